"""The base of simulators that hold one env each: rows, clock, autoreset, statistics and the seeds of episodes.

A new adapter is a subclass that makes `num_envs` simulators, says what they look like, and has two methods:
`start(i, seed)` and `advance(i, action)` (docs/envs.md has one in thirty lines). `look(i)` if it draws pictures.

Every episode starts with a seed made from (seed, group, episode), so an env's future never depends on how many
processes there are. Envs are stepped in a thread pool where a short trial finds that faster.
"""

import os
import time
from concurrent.futures import ThreadPoolExecutor

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDict

from envs import VecEnv, episode_seed, tensordict


class SingleEnvs(VecEnv):
    threads = False  # whether the simulators release the GIL, so that threads may be worth a try

    def __init__(self, num_envs, *, device, seed, first_env, group_size, render=0):
        """After this, a subclass calls `describe`."""
        self.num_envs = num_envs
        self.device = torch.device(device)
        self._on_cpu = self.device.type == "cpu"
        self.render_rows = min(render, num_envs)
        self._seed = seed
        self._group = [(first_env + i) // group_size for i in range(num_envs)]
        self._episode = [0] * num_envs
        self._steps = np.zeros(num_envs, np.int64)
        self._return = np.zeros(num_envs)
        self._success = np.full(num_envs, np.nan, np.float32)
        self._ended: list[int] = []
        self._metrics: list[str] | None = None  # known after the first step
        self._pool = None
        self._batch = torch.Size([num_envs])

    def describe(self, observation: dict[str, gym.Space], action: gym.Space, max_episode_steps: int) -> None:
        """What the rows look like; keys that begin with `rgb` are pictures."""
        if isinstance(action, gym.spaces.Box):
            if len(action.shape) != 1:
                raise ValueError(f"actions of shape {action.shape} are not supported, only vectors are")
        elif not isinstance(action, gym.spaces.Discrete):
            raise ValueError(f"{type(action).__name__} actions are not supported, only Box and Discrete are")
        self.max_episode_steps = max_episode_steps
        self.single_action_space = action
        self.single_observation_space = gym.spaces.Dict(observation)
        self._obs = {k: np.zeros((self.num_envs, *space.shape), space.dtype) for k, space in observation.items()}
        self._pictures = {k for k in observation if k.startswith("rgb")}
        self._unseen = np.zeros(self.num_envs, bool)  # rows whose picture `look` has yet to draw
        self._draws = type(self).look is not SingleEnvs.look
        no_episode = {"return": torch.zeros(self.num_envs), "length": torch.zeros(self.num_envs, dtype=torch.int64)}
        no_episode["success"] = torch.full((self.num_envs,), torch.nan)
        self._no_episode = {k: v.to(self.device) for k, v in no_episode.items()}
        self._choose_pool()

    def start(self, i: int, seed: int) -> dict[str, np.ndarray]:
        """Start an episode in simulator `i` -> its first observation, without what `look` draws."""
        raise NotImplementedError

    def advance(self, i: int, action: np.ndarray) -> tuple[dict[str, np.ndarray], float, bool, bool, dict]:
        """Step simulator `i` -> observation, reward, terminated, truncated, info; the clock is kept for it.

        Of `info`, `success` (or `is_success`) and what `metric_names` names are read. The action is in its space. What
        is returned is read after all rows were stepped, so no two rows may share an array.
        """
        raise NotImplementedError

    def gather(self, observed: tuple) -> dict[str, list[np.ndarray]]:
        """The observations that `advance` returned, row by row -> the rows under each name."""
        return {name: [obs[name] for obs in observed] for name in observed[0]}

    def look(self, i: int) -> dict[str, np.ndarray]:
        """Draw the pictures of simulator `i`."""
        return {}

    def metric_names(self, info: dict) -> list[str]:
        """What of the `info` of a step is logged; asked once."""
        return []

    def _start(self, i: int) -> None:
        obs = self.start(i, episode_seed(self._seed, self._group[i], self._episode[i]))
        for name, x in obs.items():
            self._obs[name][i] = x
        self._steps[i] = 0
        self._return[i] = 0.0
        self._unseen[i] = True

    def _advance(self, rows: list[int], action: np.ndarray) -> list[tuple]:
        return list(map(self.advance, rows, action if len(rows) == self.num_envs else action[rows]))

    def _run(self, rows: list[int], action: np.ndarray) -> list[tuple]:
        """Step the simulators of `rows` -> what `advance` returned, row by row."""
        if self._pool is None:
            return self._advance(rows, action)
        count = self._pool._max_workers
        results = [()] * len(rows)
        parts = self._pool.map(self._advance, [rows[k::count] for k in range(count)], [action] * count)
        for k, part in enumerate(parts):
            results[k::count] = part
        return results

    def _record(self, rows: list[int], results: list[tuple], numbers: np.ndarray, flags: np.ndarray) -> None:
        """Write down what a step returned: for all rows at once, which is cheaper than row by row."""
        observed, rewards, terminated, truncated, infos = zip(*results)
        where = slice(None) if len(rows) == self.num_envs else rows
        for name, values in self.gather(observed).items():
            if name not in self._pictures:
                self._obs[name][where] = values
                continue
            for i, picture in zip(rows, values):  # large: not copied twice
                self._obs[name][i] = picture
        numbers[0, where] = rewards
        for row, name in enumerate(self._metrics, 1):
            numbers[row, where] = [info.get(name, 0.0) for info in infos]
        self._return[where] += rewards
        self._steps[where] += 1
        late = self._steps >= self.max_episode_steps
        if not (any(terminated) or any(truncated) or np.count_nonzero(late)):
            return
        for i, failed, cut, info in zip(rows, terminated, truncated, infos):
            if failed or cut or late[i]:
                self._ended.append(i)
                flags[0 if failed else 1, i] = True
                self._success[i] = info.get("success", info.get("is_success", np.nan))

    def _choose_pool(self) -> None:
        """Try a few steps with and without threads; only the speed depends on the outcome."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        cores = max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
        if cores == 1 or self.num_envs < 8 or not self.threads:
            return
        rows = list(range(self.num_envs))
        action = np.stack([self.single_action_space.sample() * 0 for _ in rows])
        pool = ThreadPoolExecutor(cores)
        seconds = {}
        for i in rows:
            self._start(i)
        for _ in range(3):
            for candidate in (None, pool):
                self._pool = candidate
                start = time.perf_counter()
                for _ in range(3):
                    self._run(rows, action)
                seconds[candidate] = min(seconds.get(candidate, np.inf), time.perf_counter() - start)
        self._pool = pool if seconds[pool] < 0.9 * seconds[None] else None
        if self._pool is None:
            pool.shutdown()

    def _draw(self, rows: np.ndarray) -> None:
        """Draw those of `rows` (bool [N]) that have changed since they were drawn last."""
        for i in np.flatnonzero(rows & self._unseen):
            for name, picture in self.look(int(i)).items():
                self._obs[name][i] = picture
            self._unseen[i] = False

    def _observation(self, look: bool = True) -> TensorDict:
        # CRUCIAL: copies, because the next step writes into the same buffers.
        parts = {k: self._tensor(x.copy()) for k, x in self._obs.items() if look or k not in self._pictures}
        return tensordict(parts, self._batch)

    def _tensor(self, x: np.ndarray) -> torch.Tensor:
        x = torch.from_numpy(x)
        return x if self._on_cpu else x.to(self.device)

    def reset(self, episode: int = 0) -> TensorDict:
        self._episode = [episode] * self.num_envs
        for i in range(self.num_envs):
            self._start(i)
        if self._draws:
            self._draw(np.ones(self.num_envs, bool))
        return self._observation()

    def step(self, action, active=None, look=True):
        action = action.cpu().numpy()
        space = self.single_action_space
        if isinstance(space, gym.spaces.Discrete):
            action = action + space.start
        else:
            action = action.clip(space.low, space.high)
        rows = range(self.num_envs)
        if active is not None:
            rows = np.flatnonzero(active.cpu().numpy()).tolist()
        self._ended.clear()
        results = self._run(rows, action)
        if self._metrics is None and results:
            self._metrics = self.metric_names(results[0][4])
        # New ones for every step: what a step returns is never written to again.
        numbers = np.zeros((1 + len(self._metrics or []), self.num_envs), np.float32)  # reward, then the metrics
        flags = np.zeros((2, self.num_envs), bool)  # terminated, truncated
        if results:
            self._record(rows, results, numbers, flags)
        look_at_final = look
        if self._draws:
            self._unseen[rows] = True
            self._draw(flags[1] | look)
        if self._pictures and not look:
            look_at_final = bool(flags[1].any())
        obs = self._observation(look_at_final)
        reward, *metrics = map(self._tensor, numbers)
        terminated, truncated = map(self._tensor, flags)
        info = {"final_obs": obs, "episode": self._no_episode, "metrics": dict(zip(self._metrics or [], metrics))}
        if self._ended:
            info["episode"] = self._episode_statistics()
            for i in self._ended:
                self._episode[i] += 1
                self._start(i)
            if self._draws and look:
                self._draw(flags.any(0))
            obs = self._observation(look)
        return obs, reward, terminated, truncated, info

    def _episode_statistics(self) -> dict[str, torch.Tensor]:
        numbers = {"return": self._return.astype(np.float32)}
        numbers |= {"length": self._steps.copy(), "success": self._success.copy()}
        return {k: self._tensor(v) for k, v in numbers.items()}

    def clock_state(self) -> dict:
        """What this class adds to the state of the simulators, for `state_dict` of a subclass that can tell it."""
        state = {f"obs.{k}": x for k, x in self._obs.items() if k not in self._pictures}
        state |= {"episode": self._episode, "steps": self._steps, "return": self._return}
        return {k: torch.tensor(v) for k, v in state.items()}

    def load_clock_state(self, state: dict) -> None:
        self._episode = state["episode"].tolist()
        self._steps[:] = state["steps"].numpy()
        self._return[:] = state["return"].numpy()
        for name in self._obs:
            if f"obs.{name}" in state:
                self._obs[name][:] = state[f"obs.{name}"].numpy()
        self._unseen[:] = True

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
