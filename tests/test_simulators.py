"""The adapters of simulators, and `python -m envs`, which checks any env against the contract.

What is not installed is skipped, with the line that installs it.
"""

import importlib
import json
import sys
from functools import partial
from importlib.util import find_spec

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import ROOT, run, script
from safetensors.torch import load_file
from tensordict import TensorDict

import envs
from envs.__main__ import RULES, Args, Checker, main
from envs.single import SingleEnvs


def needs(package: str):
    install = envs.BACKENDS[package][1]
    return pytest.mark.skipif(find_spec(package) is None, reason=f"{package} is not installed: {install}")


ENVPOOL, METAWORLD = needs("envpool"), needs("metaworld")


def checked(make, num_envs=4, steps=30, expert=False) -> Checker:
    checker = Checker(make, num_envs, steps, expert)
    checker.run()
    return checker


# ---- The checker itself


class Wrong(envs.VecEnv):
    """PushCube, in which one thing is wrong."""

    def __init__(self, rule, num_envs, **arguments):
        self.rule = rule
        if rule == "groups":
            arguments.pop("group_size", None)
        if rule == "global_index":
            arguments["seed"] = 100 + arguments.get("first_env", 0)
        env_id = "Tabletop" if rule in ("look", "instruction") else "PushCube"
        self.env = envs.make(env_id, num_envs, max_episode_steps=9, **arguments)
        for name in ("num_envs", "device", "single_observation_space", "single_action_space", "instructions"):
            setattr(self, name, getattr(self.env, name))
        self.max_episode_steps = 5 if rule == "clock" else 9
        self.resets = 0
        self.buffer = torch.zeros(num_envs)

    def reset(self, episode=0):
        self.resets += 1
        obs = self.env.reset(self.resets if self.rule == "starts" else episode)
        if self.rule == "observation":
            obs["state"] = obs["state"].double()
        if self.rule == "instruction":
            obs["instruction"] = obs["instruction"] + 7
        return obs

    def step(self, action, active=None, look=True):
        rule = self.rule
        active = None if rule == "inactive" else active
        look = True if rule == "look" else look
        obs, reward, terminated, truncated, info = self.env.step(action, active, look)
        if rule == "finite":
            reward = reward * float("nan")
        if rule == "reward":
            reward = reward.double()
        if rule == "ends":
            terminated = terminated | truncated
        if rule == "final_obs":
            info["final_obs"] = info["final_obs"].apply(lambda x: x + 1)
        if rule == "autoreset":
            obs = info["final_obs"]
        if rule == "episode":
            info["episode"]["length"] = info["episode"]["length"] + 1
        if rule == "metrics":
            info["metrics"] = {f"m{int(self.env._steps[0])}": reward}
        if rule == "aliasing":
            reward = self.buffer.copy_(reward)
        return obs, reward, terminated, truncated, info

    def state_dict(self):
        return self.env.state_dict()

    def load_state_dict(self, state):
        if self.rule != "state":
            self.env.load_state_dict(state)


@pytest.mark.parametrize("rule", RULES)
def test_a_wrong_env_is_caught_by_name(rule):
    checker = checked(partial(Wrong, rule))
    assert rule in checker.broken, checker.broken


def test_a_right_env_passes():
    assert not checked(partial(Wrong, "none")).broken


@pytest.mark.parametrize("env_id", ["PushCube", "CartPole", "Tabletop", "TabletopMemory", "gym/HalfCheetah-v5"])
def test_envs_that_need_no_simulator_keep_the_contract(env_id):
    checker = checked(partial(envs.make, env_id))
    assert not checker.broken, checker.broken
    assert checker.notes["groups"] == "start alike"


def test_the_command(tmp_path, capsys):
    video = tmp_path / "clip.gif"
    assert main(Args("Tabletop", expert=True, video=str(video), env_options=("camera=fixed",))) == 0
    output = capsys.readouterr().out
    assert "success 1.00" in output and "keeps the contract" in output and "bit for bit" in output
    assert video.read_bytes()[:3] == b"GIF"
    assert main(Args("Tabletop", env_options=("camera=head",))) == 1
    assert main(Args("Tabeltop")) == 1
    assert "closest are Tabletop" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"expert": True}, "CartPole has no expert"),
        ({"steps": -4}, "--steps must be at least 1"),
        ({"num_envs": 1}, "--num-envs must be at least 2"),
        ({"video": "clip.mp4"}, "ends in .gif"),
        ({"video": "/proc/nowhere/clip.gif"}, "--video /proc/nowhere/clip.gif"),
        ({"env_options": ("max_episode_steps=-3",)}, "no max_episode_steps -3"),
        ({"env_options": ("max_episode_steps=few",)}, "no max_episode_steps 'few'"),
    ],
)
def test_the_command_refuses_in_one_line(arguments, words, capsys):
    assert main(Args("CartPole", **arguments)) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("error: ") and words in line


@pytest.mark.parametrize("name", ["repeatable_starts", "starts_by_index"])
def test_groups_are_refused_where_starts_cannot_be_shared(name, monkeypatch):
    module = importlib.import_module("envs.push_cube")
    monkeypatch.setattr(module.Env, name, False)
    envs.make("PushCube", 4)
    with pytest.raises(ValueError, match="PushCube: the simulator draws its starts .* cannot share one"):
        envs.make("PushCube", 4, group_size=2)


# ---- Options


def test_options_are_read_and_refused_by_name():
    read = envs.options(["a=1", "b=1.5", "c=true", "d=corner2,wrist", "e=1e-3", "f=none"])
    assert read == {"a": 1, "b": 1.5, "c": True, "d": "corner2,wrist", "e": 0.001, "f": None}
    for pairs, words in ((["a"], "name=value"), (["a=1", "a=2"], "twice"), (["seed=1"], "other options")):
        with pytest.raises(ValueError, match=words):
            envs.options(pairs)
    with pytest.raises(ValueError, match="'camra': it has camera, max_episode_steps"):
        envs.make("Tabletop", 2, camra="fixed")
    with pytest.raises(ValueError, match="such as camera=wrist"):
        envs.make("Tabletop", 2, camera=3)
    with pytest.raises(ValueError, match="closest are HalfCheetah-v5"):
        envs.make("gym/HalfChetah-v5", 2)
    with pytest.raises(ValueError, match="ctrl_cost_weight"):
        envs.make("gym/HalfCheetah-v5", 2, ctrl_cost=1)


def test_a_package_that_is_missing_is_named_with_its_install_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "envpool", None)
    monkeypatch.delitem(sys.modules, "envs.envpool", raising=False)
    with pytest.raises(ValueError, match="needs the package envpool: pip install envpool"):
        envs.make("envpool/HalfCheetah-v5", 2)


def test_options_are_saved_and_compared(tmp_path):
    words = [*script("ppo_ddp.py"), "--env-id", "gym/HalfCheetah-v5", "--num-envs", "2", "--num-steps", "8"]
    words += ["--num-minibatches", "1", "--update-epochs", "1", "--eval-episodes", "1", "--output-dir", tmp_path]
    one = "exclude_current_positions_from_observation=true"
    run(*words, "--run-name", "a", "--total-timesteps", "16", "--env-options", one, "max_episode_steps=20")
    assert json.loads((tmp_path / "a/args.json").read_text())["env_options"] == [one, "max_episode_steps=20"]
    again = [*words, "--run-name", "a", "--resume", "auto", "--total-timesteps", "32"]
    assert "--env-options is ['max_episode_steps=20'], was" in run(*again, "--env-options", "max_episode_steps=20")
    other = one.replace("true", "false")
    refused = run(*again, "--env-options", other, ok=False)
    assert f"other observations or actions: --env-options max_episode_steps=20, not {other}" in refused


# ---- gym/


class Seeing(gym.Env):
    """A dict with two cameras, a nested dict and a number; `plain` leaves one grey picture."""

    def __init__(self, plain=False, render_mode=None):
        self.plain = plain
        box = gym.spaces.Box
        inner = gym.spaces.Dict({"b": box(-1, 1, (2, 2)), "a": gym.spaces.Discrete(3)})
        cameras = {"front": box(0, 255, (8, 8, 3), np.uint8), "hand": box(0, 255, (6, 6, 3), np.uint8)}
        self.observation_space = gym.spaces.Dict({"inner": inner, **cameras, "x": box(-1, 1, (1,))})
        if plain:
            self.observation_space = box(0, 255, (16, 16), np.uint8)
        self.action_space = gym.spaces.Box(-1, 1, (2,))

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        self.last = self.observation_space.sample()
        return self.last, {}

    def step(self, action):
        self.last = self.observation_space.sample()
        return self.last, 1.0, False, False, {}


gym.register("Seeing-v0", entry_point=Seeing, max_episode_steps=6)


def test_gym_dict_and_image_observations():
    env = envs.make("gym/Seeing-v0", 2, seed=1)
    obs = env.reset()
    assert obs["rgb_front"].shape == (2, 8, 8, 3) and obs["rgb_hand"].dtype == torch.uint8
    last = env._envs[1].last
    keys = list(env._envs[1].observation_space["inner"].spaces)
    parts = {"a": np.eye(3)[last["inner"]["a"]], "b": last["inner"]["b"].reshape(-1)}
    state = np.concatenate([*(parts[k] for k in keys), last["x"]])
    order = list(env._envs[1].observation_space.spaces)
    if order.index("x") < order.index("inner"):
        state = np.roll(state, 1)
    assert np.array_equal(obs["state"][1].numpy(), state.astype(np.float32))
    grey = envs.make("gym/Seeing-v0", 2, plain=True)
    rgb = grey.reset()["rgb"]
    assert rgb.shape == (2, 16, 16, 3) and torch.equal(rgb[..., 0], rgb[..., 2])
    assert set(grey.reset().keys()) == {"rgb"}
    for options in ({}, {"plain": True}):
        checker = checked(partial(envs.make, "gym/Seeing-v0", **options))
        assert not checker.broken, checker.broken


def test_gym_ids_of_packages_and_goal_envs():
    class Goal(gym.Env):
        def __init__(self, render_mode=None):
            box = gym.spaces.Box(-1, 1, (2,))
            keys = ("observation", "achieved_goal", "desired_goal")
            self.observation_space = gym.spaces.Dict({k: box for k in keys})
            self.action_space = gym.spaces.Box(-1, 1, (2,))

        def reset(self, seed=None, options=None):
            super().reset(seed=seed)
            self.place, self.goal = self.np_random.uniform(-1, 1, (2, 2)).astype(np.float32)
            return {"observation": self.place, "achieved_goal": self.place, "desired_goal": self.goal}, {}

        def step(self, action):
            self.place = self.place + 0.1 * action
            obs = {"observation": self.place, "achieved_goal": self.place, "desired_goal": self.goal}
            return obs, 0.0, False, False, {"is_success": 1.0}

    gym.register("Goal-v0", entry_point=Goal, max_episode_steps=3)
    env = envs.make("gym/Goal-v0", 2)
    assert env.reset()["state"].shape == (2, 6)
    for _ in range(3):
        info = env.step(torch.zeros(2, 2))[-1]
    assert info["episode"]["success"].tolist() == [1.0, 1.0]
    env = envs.make("gym/gymnasium.envs.mujoco:Reacher-v5", 2)
    assert env.reset()["state"].shape == (2, 10)


# ---- envpool/


@ENVPOOL
@pytest.mark.parametrize("env_id", ["envpool/HalfCheetah-v5", "envpool/Pong-v5"])
def test_envpool_keeps_the_contract(env_id):
    checker = checked(partial(envs.make, env_id, max_episode_steps=12), num_envs=2)
    assert not checker.broken, checker.broken


@ENVPOOL
def test_envpool_loses_no_step():
    """After an end, the first action of the next episode counts: the same as in a fresh env of that stream."""
    env = envs.make("envpool/HalfCheetah-v5", 2, seed=1, max_episode_steps=5)
    env.reset()
    action = torch.full((2, 6), 0.5)
    for step in range(1, 16):
        obs, reward, terminated, truncated, info = env.step(action)
        assert truncated.all() == (step % 5 == 0) and reward.all()
        if truncated.all():
            assert info["episode"]["length"].tolist() == [5, 5]


@ENVPOOL
def test_envpool_steps_some_rows_as_it_steps_all():
    every, some = (envs.make("envpool/HalfCheetah-v5", 3, seed=1) for _ in range(2))
    first = some.reset()
    assert torch.equal(every.reset()["state"], first["state"])
    action = torch.full((3, 6), 0.5)
    obs, reward, _, _, info = every.step(action)
    active = torch.tensor([True, False, True])
    held, held_reward, terminated, truncated, held_info = some.step(action, active)
    assert torch.equal(held["state"][active], obs["state"][active])
    assert torch.equal(held["state"][1], first["state"][1])
    assert torch.equal(held_reward, reward * active) and not (terminated | truncated).any()
    for name, x in info["metrics"].items():
        assert torch.equal(held_info["metrics"][name], x * active)


@ENVPOOL
def test_envpool_draws_atari_and_refuses_by_name():
    env = envs.make("envpool/Pong-v5", 3, seed=1, render=2)
    env.reset()
    picture = env.render()
    assert picture.shape == (2, 210, 160, 3) and picture.dtype == torch.uint8 and picture.float().std() > 10
    for env_id, options, words in (
        ("envpool/HalfCheetah-v5", {"render": 1}, "cannot be drawn"),
        ("envpool/HalfCheetah-v5", {"batch_size": 1}, "no option 'batch_size': it has .*frame_skip"),
        ("envpool/Pong-v5", {"frame_skip": "fast"}, "cannot make .Pong-v5. with these options"),
        ("envpool/HalfCheeta-v5", {}, "closest are HalfCheetah-v5"),
    ):
        with pytest.raises(ValueError, match=words):
            envs.make(env_id, 2, **options)


# ---- metaworld/


@METAWORLD
@pytest.mark.parametrize("options", [{}, {"camera": "corner2,wrist", "reward": "success", "end_on_success": True}])
def test_metaworld_keeps_the_contract(options):
    try:
        checker = checked(partial(envs.make, "metaworld/push-v3", max_episode_steps=12, **options))
    except ValueError as error:
        pytest.skip(str(error))  # nothing to draw with
    assert not checker.broken, checker.broken
    assert checker.notes["state"] == "restores bit for bit"


@METAWORLD
def test_metaworld_experts_succeed_and_sets_take_turns():
    env = envs.make("metaworld/reach-v3,drawer-close-v3,button-press-v3", 6, seed=1, group_size=2, end_on_success=True)
    obs = env.reset()
    assert obs["instruction"].tolist() == [0, 0, 1, 1, 2, 2]
    assert env.instructions[1] == "close the drawer"
    assert obs["state"].shape == (6, 42) and torch.equal(obs["state"][:, 39:].argmax(1), obs["instruction"])
    active = torch.ones(6, dtype=torch.bool)
    success = torch.zeros(6)
    while active.any():
        _, _, terminated, truncated, info = env.step(env.expert_action(), active)
        ended = active & (terminated | truncated)
        success[ended] = info["episode"]["success"][ended]
        active &= ~ended
    assert success.all()


@METAWORLD
def test_metaworld_goes_on_with_longer_episodes():
    short, long = (envs.make("metaworld/reach-v3", 2, seed=1, max_episode_steps=n) for n in (4, 8))
    short.reset()
    for _ in range(3):
        short.step(torch.zeros(2, 4))
    long.load_state_dict(short.state_dict())
    truncated = [long.step(torch.zeros(2, 4))[3].all().item() for _ in range(5)]
    assert truncated == [False] * 4 + [True]


@METAWORLD
def test_metaworld_refuses_what_is_no_value():
    with pytest.raises(ValueError, match="has no size None: give a value such as size=64"):
        envs.make("metaworld/reach-v3", 2, size=None)
    assert "rgb" not in envs.make("metaworld/reach-v3", 2, camera=None).single_observation_space.keys()


@METAWORLD
def test_metaworld_equals_its_own_loop():
    """Stepped as MetaWorld's users do, with the same seed and actions, the numbers are the same."""
    import envs.metaworld as adapter

    env = envs.make("metaworld/pick-place-v3", 2, seed=4)
    obs = env.reset()
    plain = adapter.make_one("pick-place-v3", 500)
    plain.seed(envs.episode_seed(4, 1, 0))
    expected = plain.reset()[0]
    generator = torch.Generator().manual_seed(0)
    for _ in range(30):
        assert np.array_equal(obs["state"][1].numpy(), expected.astype(np.float32))
        action = 2 * torch.rand(2, 4, generator=generator) - 1
        obs, reward, *_ = env.step(action)
        expected, r, *_ = plain.step(action[1].numpy())
        assert reward[1].item() == np.float32(r)


@METAWORLD
def test_metaworld_refuses_by_name():
    for env_id, options, words in (
        ("metaworld/pusch-v3", {}, "closest are push-v3"),
        ("metaworld/push-v3,push-v3", {}, "twice"),
        ("metaworld/push-v3", {"camera": "head"}, "corner2,wrist"),
        ("metaworld/push-v3", {"reward": "big"}, "dense or success"),
        ("metaworld/push-v3", {"pixels": 3}, "it has camera, size, reward"),
    ):
        with pytest.raises(ValueError, match=words):
            envs.make(env_id, 2, **options)


# ---- An adapter in thirty lines


def test_the_adapter_in_the_docs(monkeypatch):
    """The example of docs/envs.md is run as it is written."""
    text = (ROOT / "docs/envs.md").read_text()
    source = text.split("```python\n")[1].split("```")[0]
    scope = {}
    exec(source, scope)
    assert issubclass(scope["Env"], SingleEnvs) and len(source.strip().splitlines()) <= 34
    arguments = {"device": "cpu", "seed": 1, "first_env": 0, "group_size": 1}
    checker = checked(lambda n, **other: scope["Env"]("slow", n, **(arguments | other)))
    assert not checker.broken, checker.broken
    assert isinstance(scope["Env"]("slow", 2, **arguments).reset(), TensorDict)


@METAWORLD
def test_metaworld_resumes_exactly_and_groups_train(tmp_path):
    common = ["--env-id", "metaworld/push-v3", "--num-envs", "4", "--eval-episodes", "1", "--output-dir", tmp_path]
    common += ["--num-minibatches", "1", "--update-epochs", "1", "--lr-schedule", "constant"]
    ppo = [*script("ppo_ddp.py"), *common, "--num-steps", "16", "--env-options", "max_episode_steps=12"]
    run(*ppo, "--run-name", "whole", "--total-timesteps", "256", "--save-interval", "0")
    run(*ppo, "--run-name", "parts", "--total-timesteps", "128", "--save-interval", "0")
    output = run(*ppo, "--run-name", "parts", "--total-timesteps", "256", "--save-interval", "0", "--resume", "auto")
    assert "not bit for bit" not in output
    whole, parts = (tmp_path / f"{name}/checkpoints/step_256/model.safetensors" for name in ("whole", "parts"))
    assert safetensors_equal(whole, parts)
    grpo = [*script("grpo_ddp.py"), *common, "--group-size", "2", "--env-options", "max_episode_steps=12"]
    run(*grpo, "--run-name", "groups", "--total-timesteps", "100")


def safetensors_equal(one, two) -> bool:
    one, two = load_file(one), load_file(two)
    return one.keys() == two.keys() and all(torch.equal(x, two[name]) for name, x in one.items())
