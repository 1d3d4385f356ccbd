"""envpool: `envpool/HalfCheetah-v5`, `envpool/Pong-v5` and the other ids of `envpool.list_all_envs()`.

    pip install envpool

- A vector is `state`. A picture is `rgb`, uint8 [N, H, W, channels]: Atari is served in colour and one frame at a time
  (stack_num=1, gray_scale=false) unless the options say otherwise; four grey frames are four channels.
- Options: `max_episode_steps`, and those of envpool's own config of the env, such as `frame_skip=4`.
- envpool starts an episode with a step that ignores the action. That step is made here, in the step that ended the
  episode before, for the rows that ended, so that no step of the script is lost.
- envpool seeds an env when it makes it, so `reset(episode)` makes the envs anew: some milliseconds, and evaluations and
  groups start as they should. Episodes after that, within the same rollout, are the next of each env's own stream.
- It cannot save its state.
"""

from functools import partial

import envpool
import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDict

from envs import VecEnv, closest, episode_seed


class Env(VecEnv):
    checks_options = True  # they are those of the env's own config
    equal_restarts = False

    def __init__(
        self, name, num_envs, *, device, seed, first_env, group_size, max_episode_steps=None, render=0, **options
    ):
        self.num_envs = num_envs
        self.device = torch.device(device)
        if name not in envpool.list_all_envs():
            raise ValueError(f"envpool has no {name!r}{closest(name, envpool.list_all_envs())}")
        if render:
            raise ValueError("envpool/ cannot be drawn: leave out --capture-video, or use gym/")
        known = envpool.make_spec(name).config._fields
        for option in options:
            if option not in known:
                raise ValueError(f"envpool/{name} has no option {option!r}: it has {', '.join(known)}")
        if "gray_scale" in known:
            options = {"gray_scale": False, "stack_num": 1} | options
        if max_episode_steps:
            options["max_episode_steps"] = max_episode_steps
        self._make = partial(envpool.make, name, env_type="gymnasium", num_envs=num_envs, **options)
        self._keys = [(seed, (first_env + i) // group_size) for i in range(num_envs)]
        self._made_for = None  # the episode whose seeds the envs have, if they have not begun yet
        self._make_for(0)
        space = self._env.observation_space
        self.single_action_space = self._env.action_space
        self.max_episode_steps = int(self._env.spec.config.max_episode_steps)
        if not isinstance(space, gym.spaces.Box):
            raise ValueError(f"envpool/{name} has {type(space).__name__} observations, only Box is supported")
        if not isinstance(self.single_action_space, gym.spaces.Box | gym.spaces.Discrete):
            kind = type(self.single_action_space).__name__
            raise ValueError(f"envpool/{name} has {kind} actions, only Box and Discrete are supported")
        self._picture = space.dtype == np.uint8 and len(space.shape) == 3
        if self._picture:
            channels, height, width = space.shape
            spaces = {"rgb": gym.spaces.Box(0, 255, (height, width, channels), np.uint8)}
        else:
            spaces = {"state": gym.spaces.Box(-np.inf, np.inf, (int(np.prod(space.shape)),))}
        self.single_observation_space = gym.spaces.Dict(spaces)
        self._rows = np.arange(num_envs, dtype=np.int32)
        self._return = np.zeros(num_envs)
        self._steps = np.zeros(num_envs, np.int64)

    def _make_for(self, episode: int) -> None:
        if self._made_for != episode:
            self._env = self._make(seed=[episode_seed(*key, episode) % 2**31 for key in self._keys])
        self._made_for = episode

    def _convert(self, obs: np.ndarray) -> np.ndarray:
        """A copy, because envpool writes to its arrays again."""
        if self._picture:
            return np.ascontiguousarray(obs.transpose(0, 2, 3, 1))
        return obs.reshape(len(obs), -1).astype(np.float32)

    def _observation(self, look: bool = True) -> TensorDict:
        parts = {}
        if not self._picture or look:
            parts["rgb" if self._picture else "state"] = self._tensor(self._obs)
        return TensorDict(parts, batch_size=[self.num_envs], device=self.device)

    def _tensor(self, x: np.ndarray) -> torch.Tensor:
        x = torch.from_numpy(x.copy())
        return x if self.device.type == "cpu" else x.to(self.device)

    def reset(self, episode: int = 0) -> TensorDict:
        self._return[:] = 0.0
        self._steps[:] = 0
        self._make_for(episode)
        self._made_for = None
        obs, info = self._env.reset()
        self._obs = self._convert(obs)
        self._metrics = [name for name in info if name.startswith("reward_")]
        return self._observation()

    def step(self, action, active=None, look=True):
        action = action.cpu().numpy()
        space = self.single_action_space
        if isinstance(space, gym.spaces.Discrete):
            action = (action + space.start).astype(space.dtype)
        else:
            action = action.clip(space.low, space.high).astype(space.dtype)
        rows = self._rows if active is None else np.flatnonzero(active.cpu().numpy()).astype(np.int32)
        reward = np.zeros(self.num_envs, np.float32)
        terminated = np.zeros(self.num_envs, bool)
        truncated = np.zeros(self.num_envs, bool)
        success = np.full(self.num_envs, np.nan, np.float32)
        metrics = {name: np.zeros(self.num_envs, np.float32) for name in self._metrics}
        if len(rows):
            obs, r, te, tr, info = self._env.step(action[rows], rows)
            # Rows come back in the order in which they were done.
            rows = info["env_id"]
            self._obs[rows] = self._convert(obs)
            reward[rows] = r
            terminated[rows] = te
            truncated[rows] = tr & ~te
            if "success" in info:
                success[rows] = info["success"]
            for name in self._metrics:
                metrics[name][rows] = info[name]
        self._return += reward
        self._steps[rows] += 1
        ended = terminated | truncated
        obs = self._observation(look or bool(truncated.any()))
        episode = {"return": self._return.astype(np.float32), "length": self._steps, "success": success}
        info = {
            "final_obs": obs,
            "episode": {k: self._tensor(v) for k, v in episode.items()},
            "metrics": {k: self._tensor(v) for k, v in metrics.items()},
        }
        if ended.any():
            again = self._rows[ended]
            first, _, _, _, after = self._env.step(action[again], again)  # starts the next episode
            self._obs[after["env_id"]] = self._convert(first)
            self._return[ended] = 0.0
            self._steps[ended] = 0
            obs = self._observation(look)
        elif not look and "rgb" in obs.keys():
            obs = self._observation(look)
        flags = self._tensor(terminated), self._tensor(truncated)
        return obs, self._tensor(reward), *flags, info

    def close(self) -> None:
        self._env.close()
