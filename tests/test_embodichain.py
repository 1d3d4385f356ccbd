"""envs/embodichain.py against a stand-in: the true BaseEnv with its engine, which is not on the registry, stubbed.

pip install --no-deps embodichain==0.3.2 && pip install warp-lang, and the true classes run; only the physics is ours.
"""

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from types import SimpleNamespace

import gymnasium as gym
import pytest
import torch

import envs

pytest.importorskip("warp", reason="pip install warp-lang")
if importlib.util.find_spec("embodichain") is None:
    pytest.skip("pip install --no-deps embodichain", allow_module_level=True)

ENGINE = ("dexsim", "open3d", "cv2", "scipy", "rtree", "trimesh", "polars", "av", "lerobot")


class Anything(type):
    """A class whose attributes are such classes: enough for a module that is imported and not used."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return anything(name)

    def __or__(cls, other):
        return cls

    __ror__ = __or__

    def __iter__(cls):
        return iter(())


def anything(name):
    body = {"__init__": lambda self, *a, **k: None, "__getattr__": lambda self, name: anything(name)}
    return Anything(name, (), body)


class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ENGINE:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        module = types.ModuleType(spec.name)

        def attribute(name):
            if name.startswith("__"):
                raise AttributeError(name)
            return anything(name)

        module.__path__ = []
        module.__getattr__ = attribute
        return module

    def exec_module(self, module):
        pass


@pytest.fixture
def env(monkeypatch, tmp_path):
    """An env whose robot has two joints that move by the action; it succeeds when the first passes 2."""
    finder = Stubs()
    sys.meta_path.append(finder)  # last: what is installed is used
    try:
        import embodichain.lab.gym.envs.base_env as base

        import envs.embodichain as adapter
    finally:
        sys.meta_path.remove(finder)

    class Physics:
        device = torch.device("cpu")
        profiler = SimpleNamespace(section=lambda *a, **k: contextlib.nullcontext())

        def __init__(self, num_envs):
            self.joints = torch.zeros(num_envs, 2)

        def __getattr__(self, name):  # prepare, update, capture_visualization_safely: nothing to do
            return lambda *a, **k: contextlib.nullcontext()

        def reset_objects_state(self, env_ids, **_):
            self.joints[env_ids] = torch.rand(len(env_ids), 2)

    class StandIn(base.BaseEnv):
        def _setup_scene(self, **_):
            self.sim = Physics(self.num_envs)

        def _setup_robot(self, **_):
            self.active_joint_ids = [0, 1]
            self.single_action_space = gym.spaces.Box(-1.0, 1.0, (2,))
            return SimpleNamespace(active_joint_ids=[0, 1], get_proprioception=lambda: self.sim.joints.clone())

        def _log_initialization_summary(self):
            pass

        def _step_action(self, action):
            self.sim.joints += action
            return action

        def evaluate(self, **_):
            return {"success": self.sim.joints[:, 0] > 2, "fail": torch.zeros(self.num_envs, dtype=torch.bool)}

        def get_reward(self, obs, action, info):
            return self.sim.joints[:, 0].clone()

    def configuration(config, manager_modules, source_path):
        return base.EnvCfg(max_episode_steps=5)

    monkeypatch.setattr(adapter, "config_to_cfg", configuration)
    monkeypatch.setattr(adapter, "build_env", lambda id, base_env_cfg: StandIn(base_env_cfg))
    (tmp_path / "task.json").write_text('{"id": "StandIn-v1"}')
    return lambda **options: envs.make(f"embodichain/{tmp_path}/task.json", 4, **{"seed": 1, **options})


def test_ends_of_episodes(env):
    env = env()
    first = env.reset()
    assert first["state"].shape == (4, 2) and env.max_episode_steps == 5 and not env.separate_evaluation
    push = torch.tensor([[1.0, 0.0], [0.0, 0.0], [1.0, 0.0], [0.0, 0.0]])
    length = torch.zeros(4)
    for _ in range(5):
        obs, reward, terminated, truncated, info = env.step(push)
        length += 1
        done = terminated | truncated
        assert torch.equal(info["episode"]["success"][done], terminated[done].float())
        assert torch.equal(info["episode"]["length"][done].float(), length[done])
        assert torch.equal(info["final_obs"]["state"][:, 0], reward)  # the old episode's
        assert torch.equal(info["final_obs"]["state"][~done], obs["state"][~done])
        assert (obs["state"][done] <= 1).all()
        length *= ~done
    assert truncated[1] and truncated[3] and not (terminated & truncated).any()
    assert torch.equal(env.reset()["state"], first["state"]) and not torch.equal(env.reset(1)["state"], first["state"])


def test_bad_input_is_named(env):
    with pytest.raises(ValueError, match="cannot share one"):
        env(group_size=2)
    with pytest.raises(ValueError, match="no option 'nonsense'"):
        env(nonsense=1)
    with pytest.raises(ValueError, match="there is no file"):
        envs.make("embodichain/nothing.json", 1)
