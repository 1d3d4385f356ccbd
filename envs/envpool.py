"""envpool: `envpool/HalfCheetah-v5`, `envpool/Pong-v5` and the other ids of `envpool.list_all_envs()`.

    pip install envpool

- A vector is `state`. A picture is `rgb`, uint8 [N, H, W, channels]: Atari is served in colour and one frame at a time
  (stack_num=1, gray_scale=false) unless the options say otherwise; four grey frames are four channels.
- Options: `max_episode_steps`, and those of envpool's own config of the env, such as `frame_skip=4`.
- envpool starts an episode with a step that ignores the action. That step is made here, in the step that ended the
  episode before, for the rows that ended, so that no step of the script is lost.
- envpool seeds an env when it makes it, so `reset(episode)` makes the envs anew: some milliseconds, and evaluations and
  groups start as they should. Episodes after that, within the same rollout, are the next of each env's own stream.
- It cannot save its state. Atari can be drawn for a clip; envpool's MuJoCo envs would need a screen.
"""

from functools import partial

import envpool
import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDict

from envs import VecEnv, closest, episode_seed, tensordict

# Fields of envpool's config that follow from the arguments of the script.
SET_HERE = ("num_envs", "batch_size", "max_num_players", "seed", "env_seed", "gym_reset_return_info")


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
        known = [field for field in envpool.make_spec(name).config._fields if field not in SET_HERE]
        if render and "gray_scale" not in known:  # MuJoCo: without a screen envpool ends the process
            raise ValueError(f"envpool/{name} cannot be drawn: leave out --capture-video, or use gym/")
        for option in options:
            if option not in known:
                raise ValueError(f"envpool/{name} has no option {option!r}: it has {', '.join(known)}")
        if "gray_scale" in known:
            options = {"gray_scale": False, "stack_num": 1} | options
        if max_episode_steps:
            options["max_episode_steps"] = max_episode_steps
        if render:
            options["render_mode"] = "rgb_array"
        self.render_rows = min(render, num_envs)
        self._make = partial(envpool.make, name, env_type="gymnasium", num_envs=num_envs, **options)
        self._keys = [(seed, (first_env + i) // group_size) for i in range(num_envs)]
        self._made_for = None  # the episode whose seeds the envs have, if they have not begun yet
        try:
            self._make_for(0)
        except (TypeError, ValueError, RuntimeError) as error:
            reason = str(error).split("\n")[0]
            raise ValueError(f"envpool cannot make {name!r} with these options ({options}): {reason}") from error
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
        self._batch = torch.Size([num_envs])
        self._on_cpu = self.device.type == "cpu"
        self._rows = np.arange(num_envs, dtype=np.int32)
        self._return = np.zeros(num_envs)
        self._steps = np.zeros(num_envs, np.int64)
        self._unknown = np.full(num_envs, np.nan, np.float32)
        no_episode = {"return": torch.zeros(num_envs), "length": torch.zeros(num_envs, dtype=torch.int64)}
        no_episode["success"] = torch.from_numpy(self._unknown)
        self._no_episode = {k: v.to(self.device) for k, v in no_episode.items()}

    def _make_for(self, episode: int) -> None:
        if self._made_for != episode:
            self._env = self._make(seed=[episode_seed(*key, episode) % 2**31 for key in self._keys])
        self._made_for = episode

    def _observation(self, look: bool = True) -> TensorDict:
        if not self._picture:
            return tensordict({"state": self._tensor(self._obs.reshape(self.num_envs, -1))}, self._batch)
        if not look:
            return tensordict({}, self._batch)
        return tensordict({"rgb": self._tensor(self._obs).permute(0, 2, 3, 1).contiguous()}, self._batch)

    def _tensor(self, x: np.ndarray) -> torch.Tensor:
        """Mostly not a copy: neither envpool nor this class writes into an array again that a step gave."""
        x = torch.from_numpy(x.astype(np.float32) if x.dtype == np.float64 else x)
        return x if self._on_cpu else x.to(self.device)

    def _merge(self, old: np.ndarray, rows: np.ndarray, new: np.ndarray) -> np.ndarray:
        """`old` with some of its rows replaced."""
        if len(rows) == self.num_envs:
            return new  # envpool answers in the order of the rows that it was given
        merged = old.copy()  # CRUCIAL: a step before this one has returned the old one
        merged[rows] = new
        return merged

    def reset(self, episode: int = 0) -> TensorDict:
        self._return[:] = 0.0
        self._steps[:] = 0
        self._make_for(episode)
        self._made_for = None
        self._obs, info = self._env.reset()
        self._metrics = [name for name in info if name.startswith("reward_")]
        return self._observation()

    def step(self, action, active=None, look=True):
        action = action.cpu().numpy()
        space = self.single_action_space
        if isinstance(space, gym.spaces.Discrete):
            action = action + space.start
        else:
            action = action.clip(space.low, space.high)
        rows = self._rows if active is None else np.flatnonzero(active.cpu().numpy()).astype(np.int32)
        nothing = np.zeros(self.num_envs, np.float32)
        reward = success = terminated = truncated = nothing
        metrics = dict.fromkeys(self._metrics, nothing)
        if len(rows):
            obs, *signals, found = self._env.step(action if rows is self._rows else action[rows], rows)
            self._obs = self._merge(self._obs, rows, obs)
            reward, terminated, truncated = (self._merge(nothing, rows, x) for x in signals)
            success = self._unknown
            if "success" in found:
                success = self._merge(nothing, rows, found["success"])
            metrics = {name: self._merge(nothing, rows, found[name]) for name in self._metrics}
        terminated = terminated.astype(bool)
        truncated = truncated.astype(bool)
        self._return += reward
        self._steps += 1 if active is None else active.cpu().numpy()
        again = ()
        if np.count_nonzero(ended := terminated | truncated):
            truncated &= ~terminated
            again = np.flatnonzero(ended).astype(np.int32)
        obs = self._observation(look or bool(np.count_nonzero(truncated)))
        metrics = {name: self._tensor(x) for name, x in metrics.items()}
        info = {"final_obs": obs, "episode": self._no_episode, "metrics": metrics}
        if len(again):
            episode = {"return": self._return.copy(), "length": self._steps.copy(), "success": success}
            info["episode"] = {k: self._tensor(v) for k, v in episode.items()}
            first, *_ = self._env.step(action[again], again)  # starts the next episode
            self._obs = self._merge(self._obs, again, first)
            self._return[again] = 0.0
            self._steps[again] = 0
            obs = self._observation(look)
        elif self._picture and not look:
            obs = self._observation(look)
        return obs, self._tensor(reward), self._tensor(terminated), self._tensor(truncated), info

    def render(self) -> torch.Tensor:
        return torch.from_numpy(self._env.render(self._rows[: self.render_rows]).copy())

    def close(self) -> None:
        self._env.close()
