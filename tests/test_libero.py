"""envs/libero.py with the package's own tasks, instructions and initial states, and a stand-in for its simulation.

The scenes' files come from a hub, so the simulation itself has not been run with this adapter.
"""

import importlib.util
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import envs

if importlib.util.find_spec("libero") is None:
    pytest.skip("pip install hf-libero", allow_module_level=True)


class Simulation:
    """A hand that moves by the action, in a scene that knows which initial state it was given; it succeeds at x > 1."""

    def __init__(self, bddl_file, size):
        self.file, self.size = bddl_file, size
        self.sim = SimpleNamespace(render=self.render)

    def observe(self):
        return {
            "robot0_eef_pos": self.place.copy(),
            "robot0_eef_quat": np.array([0.0, 0.0, 1.0, 0.0]),
            "robot0_gripper_qpos": np.array([self.state.sum(), self.rested]),
        }

    def reset(self):
        self.place, self.state, self.rested = np.zeros(3), np.zeros(1), 0
        return self.observe()

    def set_init_state(self, state):
        assert self.rested == 0 and not self.place.any()  # after a reset
        self.state = state
        return self.observe()

    def step(self, action):
        self.rested += action[6] == -1.0 and not any(action[:6])
        self.place = self.place + np.asarray(action[:3])
        done = bool(self.place[0] > 1.0)
        return self.observe(), float(done), done, {}

    def render(self, camera_name, width, height):
        picture = np.zeros((height, width, 3), np.uint8)
        picture[0, 0] = 100 if camera_name == "agentview" else 200
        return picture

    def close(self):
        pass


@pytest.fixture
def make(monkeypatch, tmp_path):
    monkeypatch.setenv("LIBERO_CONFIG_PATH", str(tmp_path))
    adapter = importlib.import_module("envs.libero")
    monkeypatch.setattr(adapter, "make_simulation", Simulation)
    return lambda env_id, num_envs=4, **options: envs.make(env_id, num_envs, **{"seed": 1, **options})


def test_starts_pictures_and_ends(make):
    env = make("libero/libero_spatial/3", group_size=2, size=8)
    assert len(env.instructions) == 1 and env.instructions[0].startswith("pick up the black bowl")
    assert env.max_episode_steps == 220
    obs = env.reset()
    assert torch.equal(obs["state"][0], obs["state"][1]) and not torch.equal(obs["state"][0], obs["state"][2])
    assert obs["state"][:, 7].eq(10).all()  # it has come to rest
    torch.testing.assert_close(obs["state"][0, 3:6], torch.tensor([0.0, 0.0, torch.pi]))
    assert obs["rgb"][0, 7, 7, 0] == 100 and obs["rgb_wrist"][0, 7, 7, 0] == 200 and not obs["rgb"][0, 0, 0].any()
    action = torch.zeros(4, 7)
    action[0, 0] = 0.6
    env.step(action, look=False)
    obs, reward, terminated, truncated, info = env.step(action, look=False)
    assert terminated.tolist() == [True, False, False, False] and info["episode"]["success"][0] == 1
    assert reward.tolist() == [1, 0, 0, 0] and "rgb" not in obs


def test_a_suite_is_all_of_its_tasks(make):
    env = make("libero/libero_goal", 20, group_size=2)
    assert len(env.instructions) == 10 and len(set(env.instructions)) == 10
    assert torch.equal(env.reset()["instruction"], torch.arange(20) // 2)
    assert len({sim.file for sim in env._sims}) == 10


def test_bad_input_is_named(make):
    for env_id, words in {
        "libero/libero_spatail/0": "closest are libero_spatial",
        "libero/libero_goal/10": "the tasks 0 to 9",
        "libero/libero_goal/bowl": "the tasks 0 to 9",
    }.items():
        with pytest.raises(ValueError, match=words):
            make(env_id)
