"""What Isaac Lab and mjlab share (envs/manager_based.py), on a stand-in that has their habits; and mjlab itself.

The stand-in seeds and draws from torch's global generator, gives its own buffers, resets inside of a step and leaves
`final_obs` in its extras only in steps in which an episode ends.
"""

from types import SimpleNamespace

import pytest
import torch

import envs
from envs.manager_based import ManagerBasedEnv, configure, device_name, refuse_groups


class Simulation:
    num_envs, max_episode_length = 4, 6
    single_action_space = SimpleNamespace(shape=(2,))

    def __init__(self, success=True):
        self.x = torch.zeros(4, 3)
        self.age = torch.zeros(4, dtype=torch.int64)
        self.extras = {}
        if success:
            self.termination_manager = SimpleNamespace(active_terms=["success", "time_out"], get_term=self.get_term)

    def get_term(self, name):
        return self.won

    def groups(self):
        return {"policy": self.x, "critic": {"x": self.x, "age": self.age[:, None]}}

    def begin(self, rows):
        self.x[rows] = torch.rand(int(rows.sum()), 3)
        self.extras["log"] = {"Episode/age": self.age[rows].float().mean()}
        self.age[rows] = 0

    def reset(self, seed=None):
        torch.manual_seed(seed)
        self.begin(torch.ones(4, dtype=torch.bool))
        return self.groups(), self.extras

    def step(self, action):
        self.x += torch.cat([action, action.sum(1, keepdim=True)], 1)
        self.age += 1
        self.won = self.x[:, 0] > 3
        late = self.age >= 6
        reward = self.x[:, 0].clone()
        done = self.won | late
        if done.any():
            self.extras["final_obs"] = {
                "policy": self.x.clone(),
                "critic": {"x": self.x.clone(), "age": self.age[:, None] + 0},
            }
            self.begin(done)
        return self.groups(), reward, self.won, late, self.extras


class Env(ManagerBasedEnv):
    def __init__(self, seed=1, first_env=0, success=True):
        self._adopt("fake/Task", Simulation(success), "cpu", seed, first_env)

    def _advance(self, action):
        groups, reward, terminated, truncated, extras = self._sim.step(action)
        final = extras.pop("final_obs", groups)
        return groups, reward, terminated, truncated, extras.get("log", {}), self._observation(final)


def test_groups_become_state_and_privileged():
    env = Env()
    obs = env.reset()
    assert obs["state"].shape == (4, 3) and obs["privileged"].shape == (4, 4)
    assert set(env.single_observation_space.keys()) == {"state", "privileged"}
    kept = obs.clone()
    env.step(torch.ones(4, 2))
    assert torch.equal(obs["state"], kept["state"])  # not the simulator's buffer
    assert env.max_episode_steps == 6 and env.single_action_space.shape == (2,)


def test_pictures_are_left_out_where_nobody_looks():
    env = Env()
    groups = env._sim.groups()
    camera = torch.rand(4, 3, 8, 6)
    env._sim.groups = lambda: groups | {"camera": camera}
    assert "rgb" not in env.step(torch.ones(4, 2), look=False)[0]
    obs = env.step(torch.ones(4, 2))[0]
    assert obs["rgb"].shape == (4, 8, 6, 3) and obs["rgb"].dtype == torch.uint8
    assert obs["rgb"][1, 2, 3, 0] == int((camera[1, 0, 2, 3] * 255).round())


def test_the_generator_of_the_actions_is_left_alone():
    """Without this, every evaluation would make training sample the same actions again."""
    env = Env()
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    drawn = []
    for _ in range(3):
        drawn.append(torch.rand(1))
        env.reset()
        for _ in range(7):
            env.step(torch.zeros(4, 2))
    assert torch.equal(torch.cat(drawn), expected)


def test_starts_follow_from_seed_first_env_and_episode():
    starts = [
        Env(seed, first).reset(episode)["state"]
        for seed, first, episode in [(1, 0, 0), (1, 4, 0), (1, 0, 1), (2, 0, 0)]
    ]
    assert len(torch.cat(starts).unique(dim=0)) == 16
    env = Env()
    torch.manual_seed(5)
    env.step(torch.ones(4, 2))
    assert torch.equal(env.reset()["state"], starts[0])


def test_ends_of_episodes():
    env = Env()
    env.reset()
    push = torch.tensor([[1.0, 0.0], [0.0, 0.0], [1.0, 0.0], [0.0, 0.0]])
    total, length = torch.zeros(4), torch.zeros(4)
    for step in range(1, 7):
        obs, reward, terminated, truncated, info = env.step(push)
        total += reward
        length += 1
        done = terminated | truncated
        if step == 1:
            assert not done.any() and info["metrics"]["Episode/age"].isnan().all()
        assert torch.equal(info["episode"]["success"][done], terminated[done].float())
        assert torch.equal(info["episode"]["return"][done], total[done])
        assert torch.equal(info["episode"]["length"][done].float(), length[done])
        assert (info["final_obs"]["state"][terminated][:, 0] > 3).all() and (obs["state"][done][:, 0] <= 1).all()
        if done.any():
            assert info["metrics"]["Episode/age"].eq(length[done].mean()).all()
        total *= ~done
        length *= ~done
    assert truncated.tolist() == [False, True, False, True]
    assert info["final_obs"]["privileged"][truncated][:, -1].eq(6).all()


def test_success_is_nan_where_the_task_does_not_say():
    env = Env(success=False)
    env.reset()
    assert env.step(torch.zeros(4, 2))[4]["episode"]["success"].isnan().all()


def test_rows_that_are_not_active_report_nothing():
    env = Env()
    env.reset()
    active = torch.tensor([True, False, True, False])
    for _ in range(6):
        obs, reward, terminated, truncated, info = env.step(torch.ones(4, 2), active)
        assert not reward[~active].any() and not (terminated | truncated)[~active].any()


def test_fields_of_the_configuration_are_options():
    cfg = SimpleNamespace(decimation=2, sim=SimpleNamespace(dt=0.1), rewards={"alive": SimpleNamespace(weight=1.0)})
    configure("fake/Task", cfg, {"decimation": 4, "sim.dt": 0.2, "rewards.alive.weight": 2.0}, "presets")
    assert (cfg.decimation, cfg.sim.dt, cfg.rewards["alive"].weight) == (4, 0.2, 2.0)
    for field, words in {
        "decimatoin": "closest are decimation",
        "sim.nope.dt": "there are dt",
        "sim.dt.x": "no option",
    }.items():
        with pytest.raises(ValueError, match=words):
            configure("fake/Task", cfg, {field: 1}, "presets")
    with pytest.raises(ValueError, match="cannot share one"):
        refuse_groups("fake/Task", 2)


def test_warp_is_not_told_of_cpu_0():
    assert [device_name(x) for x in ("cpu:0", "cpu", torch.device("cuda:1"))] == ["cpu", "cpu", "cuda:1"]


def test_mjlab():
    pytest.importorskip("mjlab", reason="pip install mjlab")
    env = envs.make("mjlab/Mjlab-Cartpole-Balance", 4, seed=1, max_episode_steps=5)
    first = env.reset()
    for _ in range(5):
        obs, reward, terminated, truncated, info = env.step(torch.zeros(4, 1))
    assert truncated.all() and info["episode"]["length"].eq(5).all()
    assert not torch.equal(obs["state"], info["final_obs"]["state"])
    assert torch.equal(env.reset()["state"], first["state"])
    with pytest.raises(ValueError, match="Mjlab-Cartpole-Balance"):
        envs.make("mjlab/Mjlab-Cartpole-Balanc", 4)
    with pytest.raises(ValueError, match="cannot share one"):
        envs.make("mjlab/Mjlab-Cartpole-Balance", 4, group_size=2)
    with pytest.raises(ValueError, match="no option 'nonsense'"):
        envs.make("mjlab/Mjlab-Cartpole-Balance", 4, nonsense=1)
