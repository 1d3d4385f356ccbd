"""Any Gymnasium env: `gym/<id>` with Box or Discrete actions and Box observations.

Sub-envs are stepped in a thread pool when a short trial finds that faster (MuJoCo releases the GIL while it steps).
Every episode is reset with a seed made from (seed, group, episode), so an env's future never depends on how many
processes there are, and MuJoCo's state can be saved and restored bit for bit.
"""

import os
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDict

from envs import VecEnv


def quiet_mujoco() -> None:
    """MuJoCo's warnings go through Python's, each once, in place of a MUJOCO_LOG.TXT in the working directory."""
    try:
        import mujoco
    except ImportError:
        return
    mujoco.set_mju_user_warning(lambda text: "deprecated" in text or warnings.warn(text, RuntimeWarning, stacklevel=2))


def mujoco_arrays(env) -> list[np.ndarray]:
    """The integration state, and views of what MuJoCo derived from it: envs such as Ant read that before a step."""
    import mujoco

    state = np.zeros(mujoco.mj_stateSize(env.model, mujoco.mjtState.mjSTATE_INTEGRATION))
    mujoco.mj_getState(env.model, env.data, state, mujoco.mjtState.mjSTATE_INTEGRATION)
    derived = (
        "xpos xquat xmat xipos ximat geom_xpos site_xpos subtree_com cinert cvel cfrc_ext qfrc_actuator sensordata"
    )
    return [state, *(getattr(env.data, name) for name in derived.split())]


class Env(VecEnv):
    def __init__(self, name, num_envs, *, device, seed, first_env, group_size, max_episode_steps=None, render=0):
        self.num_envs, self.device, self.render_rows = num_envs, torch.device(device), min(render, num_envs)
        self._key = [(seed, (first_env + i) // group_size) for i in range(num_envs)]
        options = {"max_episode_steps": max_episode_steps} if max_episode_steps else {}
        if render and sys.platform == "linux" and "DISPLAY" not in os.environ:
            os.environ.setdefault("MUJOCO_GL", "egl")  # draw without a screen
        quiet_mujoco()
        try:
            self._envs = [
                gym.make(name, **options, **({"render_mode": "rgb_array"} if i < render else {}))
                for i in range(num_envs)
            ]
        except Exception as error:
            reason = str(error).split("\n")[0]
            raise ValueError(f"Gymnasium cannot make {name!r}: {reason}") from error
        env = self._envs[0]
        observation, action = env.observation_space, env.action_space
        if not isinstance(observation, gym.spaces.Box):
            raise ValueError(f"gym/{name} has {type(observation).__name__} observations, only Box is supported")
        if not isinstance(action, gym.spaces.Box | gym.spaces.Discrete):
            raise ValueError(f"gym/{name} has {type(action).__name__} actions, only Box and Discrete are supported")
        if isinstance(action, gym.spaces.Box) and len(action.shape) != 1:
            raise ValueError(f"gym/{name} has actions of shape {action.shape}, only vectors are supported")
        if env.spec is None or env.spec.max_episode_steps is None:
            raise ValueError(f"gym/{name} has no time limit: register it with max_episode_steps")
        self.max_episode_steps = env.spec.max_episode_steps
        self.single_action_space = action
        size = int(np.prod(observation.shape))
        self.single_observation_space = gym.spaces.Dict({"state": gym.spaces.Box(-np.inf, np.inf, (size,))})

        self._obs = np.zeros((num_envs, size), np.float32)
        self._final = np.zeros((num_envs, size), np.float32)
        self._reward = np.zeros(num_envs, np.float32)
        self._terminated, self._truncated = np.zeros(num_envs, bool), np.zeros(num_envs, bool)
        self._episode, self._steps = np.zeros(num_envs, np.int64), np.zeros(num_envs, np.int64)
        self._return, self._success = np.zeros(num_envs), np.full(num_envs, np.nan, np.float32)
        self._metrics: dict[str, np.ndarray] = {}
        self._pool = None
        self._choose_pool()
        if render:
            self.reset()
            try:
                self.render()
            except Exception as error:  # now, and not at the end of a long run
                raise ValueError(f"gym/{name} cannot be drawn on this machine ({error}): try MUJOCO_GL=egl") from error

    def _reset(self, i: int) -> None:
        seed = np.random.SeedSequence([abs(k) for k in (*self._key[i], int(self._episode[i]))]).generate_state(1)
        self._obs[i] = self._envs[i].reset(seed=int(seed[0]))[0].reshape(-1)
        self._steps[i], self._return[i] = 0, 0.0

    def _step(self, rows: list[int], action: np.ndarray) -> None:
        """Step some rows; a row whose episode ends keeps its last observation in `_final` and starts anew."""
        for i in rows:
            obs, reward, terminated, truncated, info = self._envs[i].step(action[i])
            self._final[i] = obs.reshape(-1)
            self._reward[i], self._terminated[i], self._truncated[i] = reward, terminated, truncated and not terminated
            self._steps[i] += 1
            self._return[i] += reward
            self._success[i] = info.get("success", info.get("is_success", np.nan))
            for k, v in info.items():
                if k.startswith("reward_"):
                    self._metrics.setdefault(k, np.zeros(self.num_envs, np.float32))[i] = v
            if not (terminated or truncated):
                self._obs[i] = self._final[i]

    def _run(self, rows: list[int], action: np.ndarray) -> None:
        if self._pool is None:
            return self._step(rows, action)
        parts = [rows[k :: self._pool._max_workers] for k in range(self._pool._max_workers)]
        list(self._pool.map(self._step, parts, [action] * len(parts)))

    def _choose_pool(self) -> None:
        """Try a few steps with and without threads; only the speed depends on the outcome."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        cores = max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
        if cores == 1 or self.num_envs < 8 or not hasattr(self._envs[0].unwrapped, "mujoco_renderer"):
            return
        rows, seconds = list(range(self.num_envs)), {}
        action = np.stack([self.single_action_space.sample() * 0 for _ in rows])
        pool = ThreadPoolExecutor(cores)
        for _ in range(3):
            for candidate in (None, pool):
                self._pool = candidate
                self.reset()
                start = time.perf_counter()
                for _ in range(3):
                    self._run(rows, action)
                seconds[candidate] = min(seconds.get(candidate, np.inf), time.perf_counter() - start)
        self._pool = pool if seconds[pool] < 0.9 * seconds[None] else None
        if self._pool is None:
            pool.shutdown()

    def _tensordict(self, state: np.ndarray) -> TensorDict:
        return TensorDict({"state": self._tensor(state)}, batch_size=[self.num_envs], device=self.device)

    def _tensor(self, x: np.ndarray) -> torch.Tensor:
        x = torch.from_numpy(x)
        return x.to(self.device) if self.device.type != "cpu" else x.clone()  # the buffers are used again

    def reset(self, episode: int = 0) -> TensorDict:
        self._episode[:] = episode
        for i in range(self.num_envs):
            self._reset(i)
        return self._tensordict(self._obs)

    def step(self, action, active=None, look=True):
        action = action.cpu().numpy()
        space = self.single_action_space
        if isinstance(space, gym.spaces.Discrete):
            action = action + space.start
        else:
            action = np.clip(action, space.low, space.high)
        rows = list(range(self.num_envs))
        if active is not None:
            active = active.cpu().numpy()
            rows = np.flatnonzero(active).tolist()
            for x in (self._reward, self._terminated, self._truncated):
                x[~active] = 0
            self._final[~active] = self._obs[~active]
        self._run(rows, action)
        episode = {"return": self._return.astype(np.float32), "length": self._steps, "success": self._success}
        info = {
            "final_obs": self._tensordict(self._final),
            "episode": {k: self._tensor(v) for k, v in episode.items()},
            "metrics": {k: self._tensor(v) for k, v in self._metrics.items()},
        }
        for i in np.flatnonzero(self._terminated | self._truncated):
            self._episode[i] += 1
            self._reset(i)
        tensors = [self._tensor(x) for x in (self._reward, self._terminated, self._truncated)]
        return self._tensordict(self._obs), *tensors, info

    def render(self) -> torch.Tensor:
        images = np.stack([env.render() for env in self._envs[: self.render_rows]])
        stride = max(1, images.shape[1] // 160)  # small enough for a GIF
        return torch.from_numpy(images[:, ::stride, ::stride].copy())

    def _mujoco(self) -> list | None:
        """The simulators, if they are Gymnasium's own MuJoCo envs: these keep nothing that MjData does not hold."""
        envs = [env.unwrapped for env in self._envs]
        return envs if envs[0].__module__.startswith("gymnasium.envs.mujoco") else None

    def state_dict(self) -> dict | None:
        if self._mujoco() is None:
            return None
        rows = [np.concatenate([a.reshape(-1) for a in mujoco_arrays(env)]) for env in self._mujoco()]
        state = {"mujoco": np.stack(rows), "episode": self._episode, "steps": self._steps, "return": self._return}
        return {k: torch.from_numpy(v.copy()) for k, v in state.items()}

    def load_state_dict(self, state: dict) -> None:
        import mujoco

        self.reset()
        for name, buffer in (("episode", self._episode), ("steps", self._steps), ("return", self._return)):
            buffer[:] = state[name].numpy()
        for i, (env, row) in enumerate(zip(self._mujoco(), state["mujoco"].numpy())):
            arrays = mujoco_arrays(env)
            parts = np.split(row, np.cumsum([a.size for a in arrays])[:-1])
            mujoco.mj_setState(env.model, env.data, parts[0], mujoco.mjtState.mjSTATE_INTEGRATION)
            for array, part in zip(arrays[1:], parts[1:]):
                array[...] = part.reshape(array.shape)
            self._envs[i].set_wrapper_attr("_elapsed_steps", int(self._steps[i]))

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
        for env in self._envs:
            env.close()
