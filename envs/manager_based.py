"""What Isaac Lab and mjlab have in common: one batched simulation with observation groups and `extras["log"]`.

A subclass makes the simulator's env and hands it to `_adopt`; `_advance` steps it. What is special to this family:

- The group `policy` (Isaac Lab) or `actor` (mjlab) is `state`, the group `critic` is `privileged`, a group of RGB
  pictures is `rgb`. Groups that are not concatenated are, in the order of their terms.
- The simulator draws all starts from torch's global generator. It gets one of its own here, seeded at every reset by
  (seed, first env, episode): without that, it would seed the generator that samples the actions. The starts
  depend on the number of envs per process, so a group cannot share one: groups are refused.
- A row cannot be held: one that is not active goes on with a zero action, and its rewards and ends are not reported.
- Beside the options of the adapter, every field of the task's configuration is one: `--env-options decimation=4`.
- `extras["log"]` has means over the episodes that ended in a step. `info["metrics"]` repeats the last ones, NaN before
  the first. Success is known where the task has a termination of that name.
"""

from contextlib import contextmanager

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDict

from envs import VecEnv, closest, episode_seed

GROUPS = {"policy": "state", "actor": "state", "critic": "privileged"}


class ManagerBasedEnv(VecEnv):
    checks_options = True
    holds_inactive = False
    starts_by_index = False

    def _adopt(self, env_id, sim, device, seed, first_env) -> None:
        self.num_envs, self.device = sim.num_envs, torch.device(device)
        self._sim = sim
        self._seed, self._first = seed, first_env
        self._random = [x.clone() for x in self._generators()]
        self._log: dict[str, float] = {}
        self._steps = torch.zeros(self.num_envs, dtype=torch.int64, device=self.device)
        self._return = torch.zeros(self.num_envs, device=self.device)
        self.max_episode_steps = self._episode_length()
        self.single_action_space = gym.spaces.Box(-np.inf, np.inf, sim.single_action_space.shape)
        spaces = {}
        for name, value in self.reset().items():
            picture = name.startswith("rgb")
            if not picture and value.dim() != 2:
                shape = tuple(value.shape[1:])
                raise ValueError(f"{env_id}: {name} has the shape {shape}, only vectors and RGB pictures are supported")
            low, high, dtype = (0, 255, np.uint8) if picture else (-np.inf, np.inf, np.float32)
            spaces[name] = gym.spaces.Box(low, high, value.shape[1:], dtype)
        if "state" not in spaces:
            raise ValueError(f"{env_id} has no observations called {' or '.join(GROUPS)}")
        self.single_observation_space = gym.spaces.Dict(spaces)

    def _episode_length(self) -> int:
        return int(self._sim.max_episode_length)

    def _begin(self, seed: int) -> tuple[dict, dict]:
        """Start all envs -> observations, log."""
        groups, extras = self._sim.reset(seed=seed)
        log = extras.get("log", {})
        extras["log"] = {}
        return groups, log

    def _advance(self, action: torch.Tensor):
        """One step of the simulator -> observations, reward, terminated, truncated, log, final observations."""
        raise NotImplementedError

    def _generators(self) -> list[torch.Tensor]:
        states = [torch.get_rng_state()]
        if self.device.type == "cuda":
            states.append(torch.cuda.get_rng_state(self.device))
        return states

    @contextmanager
    def _own_randomness(self):
        outside = self._generators()
        self._set_generators(self._random)
        try:
            yield
        finally:
            self._random = self._generators()
            self._set_generators(outside)

    def _set_generators(self, states: list[torch.Tensor]) -> None:
        torch.set_rng_state(states[0])
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(states[1], self.device)

    def _observation(self, groups: dict, look: bool = True) -> TensorDict:
        obs = {}
        for group, value in groups.items():
            if isinstance(value, dict):
                value = torch.cat([x.flatten(1) for x in value.values()], 1)
            if group in GROUPS:
                obs[GROUPS[group]] = value.float().clone()  # the simulator writes into its buffers again
            elif value.dim() == 4 and value.shape[1] == 3:
                if look:
                    obs["rgb"] = (value.permute(0, 2, 3, 1) * 255.0).round().to(torch.uint8)
        return TensorDict(obs, batch_size=[self.num_envs], device=self.device)

    def reset(self, episode: int = 0) -> TensorDict:
        with self._own_randomness():
            groups, log = self._begin(episode_seed(self._seed, self._first, episode) % 2**31)
        for name in log:  # of episodes that did not run: only their names say something
            self._log.setdefault(name, torch.nan)
        self._steps.zero_()
        self._return.zero_()
        return self._observation(groups)

    def step(self, action, active=None, look=True):
        if active is not None:
            action = action * active[:, None]
        with self._own_randomness():
            groups, reward, terminated, truncated, log, final = self._advance(action)
        reward, terminated = reward.float().clone(), terminated.clone()
        truncated = truncated & ~terminated
        if active is not None:
            reward *= active
        self._steps += 1
        self._return += reward
        done = terminated | truncated
        self._log |= log
        metrics = {}
        for name, value in self._log.items():
            metrics[name] = torch.zeros_like(self._return) + value
        episode = {"return": self._return.clone(), "length": self._steps.clone(), "success": self._success()}
        info = {"final_obs": final, "episode": episode, "metrics": metrics}
        self._steps *= ~done
        self._return *= ~done
        if active is not None:
            terminated &= active
            truncated &= active
        return self._observation(groups, look), reward, terminated, truncated, info

    def _success(self) -> torch.Tensor:
        manager = getattr(self._sim, "termination_manager", None)
        if manager is not None and "success" in manager.active_terms:
            return manager.get_term("success").float().clone()
        return torch.full((self.num_envs,), torch.nan, device=self.device)

    def close(self) -> None:
        self._sim.close()


def configure(env_id: str, cfg, fields: dict, known: str) -> None:
    """Set fields of a task's configuration, such as "sim.dt"; one that it does not have is refused."""
    for path, value in fields.items():
        *parents, last = path.split(".")
        part = cfg
        for name in [*parents, last]:
            names = list(part) if isinstance(part, dict) else list(getattr(part, "__dict__", {}))
            if name not in names:
                hint = closest(name, names) or f": there are {', '.join(names)}"
                raise ValueError(f"{env_id} has no option {path!r} (it has {known} and its configuration){hint}")
            owner, part = part, part[name] if isinstance(part, dict) else getattr(part, name)
        if isinstance(owner, dict):
            owner[last] = value
        else:
            setattr(owner, last, value)


def device_name(device) -> str:
    """As Warp wants it: with several processes Accelerate says cpu:0, which Warp does not know."""
    device = torch.device(device)
    return "cpu" if device.type == "cpu" else str(device)


def refuse_groups(env_id: str, group_size: int) -> None:
    if group_size > 1:
        reason = "the simulator draws the starts of all its envs together, so the envs of a group cannot share one"
        raise ValueError(f"{env_id}: {reason}")
