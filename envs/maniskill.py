"""ManiSkill 3: `maniskill/<id>`, such as maniskill/PushCube-v1, from state or from pictures.

On a CPU every env is a simulation of its own, and every episode starts from a seed made of (seed, group, episode). What
follows from a seed and the actions is exact, so the state of an episode is saved as its actions and restored by
playing them again. On a GPU one simulation holds all envs (written by ManiSkill's source, never run): it draws the
starts of a batch together, so they depend on the number of processes, groups are refused and nothing is restored.
From state nothing is drawn, and no Vulkan is needed; pictures on a CPU need Mesa 25 or newer.
"""

import re

import gymnasium as gym
import mani_skill.envs  # noqa: F401 (registers the tasks)
import numpy as np
import torch
from mani_skill.utils import assets, common
from mani_skill.utils.registration import REGISTERED_ENVS
from tensordict import TensorDict

from envs import VecEnv, closest, episode_seed

MODES = ("state", "rgb", "rgb+state")  # with rgb `state` is what the robot feels, with rgb+state also where things are


class Env(VecEnv):
    def __init__(
        self,
        name,
        num_envs,
        *,
        device,
        seed,
        first_env,
        group_size,
        obs="state",  # one of MODES
        size=64,  # of the pictures, in pixels
        control_mode=None,  # such as pd_ee_delta_pose (None: the robot's first, often pd_joint_delta_pos)
        reward_mode=None,  # normalized_dense, dense or sparse (None: the task's first)
        instruction="",  # what a language model is told (default: the words of the id)
        max_episode_steps=None,
        render=0,
    ):
        check_task(name, obs)
        self.num_envs, self.device, self.render_rows = num_envs, torch.device(device), min(render, num_envs)
        self.max_episode_steps = max_episode_steps or REGISTERED_ENVS[name].max_episode_steps
        if self.max_episode_steps is None:
            raise ValueError(f"maniskill/{name} has no time limit: give the option max_episode_steps")
        self._batched = self.device.type == "cuda"
        self.holds_inactive = self.starts_by_index = not self._batched
        if self._batched and group_size > 1:
            reason = "on a GPU ManiSkill draws the starts of all envs together, so the envs of a group cannot share one"
            raise ValueError(f"maniskill/{name}: {reason}: use the CPU (--cpu)")
        self._seed, self._first = seed, first_env
        self._group = [(first_env + i) // group_size for i in range(num_envs)]
        if obs != "state":
            words = re.findall("[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name.partition("-v")[0])
            self.instructions = [instruction or " ".join(words).lower()]

        options = {"obs_mode": obs, "control_mode": control_mode, "reward_mode": reward_mode}
        options["sensor_configs"] = {"width": size, "height": size}
        options["human_render_camera_configs"] = {"width": 160, "height": 160}
        if self._batched:
            self._rows = [slice(0, num_envs)]
            gpu = f"cuda:{self.device.index or 0}"
            options |= {"num_envs": num_envs, "sim_backend": f"physx_{gpu}"}
            renderer = f"sapien_{gpu}"
        else:
            self._rows = [slice(i, i + 1) for i in range(num_envs)]
            options |= {"num_envs": 1, "sim_backend": "physx_cpu"}
            renderer = "sapien_cpu"
        self._sims = []
        for rows in self._rows:
            options["render_mode"] = "rgb_array" if rows.start < render else None
            options["render_backend"] = renderer if obs != "state" or rows.start < render else "none"
            try:
                sim = gym.make(name, **options).unwrapped  # without the wrappers: the clock is kept here
            except (RuntimeError, NotImplementedError, LookupError, AssertionError) as error:
                reason = str(error).split("\n")[0]
                raise ValueError(f"ManiSkill cannot make {name!r} with these options: {reason}") from error
            self._sims.append(sim)
            self._draw_on_demand(sim)
        self.single_action_space = sim.single_action_space
        if not isinstance(self.single_action_space, gym.spaces.Box):
            raise ValueError(f"maniskill/{name} has several robots: only one action vector is supported")

        at = self.device if self._batched else "cpu"  # where the simulation is
        self._low, self._high = (torch.as_tensor(x, device=at) for x in (sim.action_space.low, sim.action_space.high))
        self._episode = np.zeros(num_envs, np.int64)
        self._steps = torch.zeros(num_envs, dtype=torch.int64, device=at)
        self._return = torch.zeros(num_envs, device=at)
        self._actions: list[list] = [[] for _ in range(num_envs)]  # of the present episode, to restore it
        self._looking = True
        self._drawn = np.ones(num_envs, bool)  # the picture of this row in `_obs` is of the present
        self._restarts = (0, 0)
        sample = self._observation(sim.get_obs())
        self._obs = {k: torch.zeros(num_envs, *v.shape[1:], dtype=v.dtype, device=at) for k, v in sample.items()}
        self._metrics = {k: torch.zeros(num_envs, device=at) for k in measures(sim.get_info())}
        spaces = {}
        for k, v in self._obs.items():
            picture = k.startswith("rgb")
            spaces[k] = gym.spaces.Box(
                0 if picture else -np.inf, 255 if picture else np.inf, v.shape[1:], v.numpy(force=True).dtype
            )
        if self.instructions:
            spaces["instruction"] = gym.spaces.Discrete(1)
        self.single_observation_space = gym.spaces.Dict(spaces)

    def _draw_on_demand(self, sim) -> None:
        """Pictures cost most of a step: leave them out where nobody looks."""
        draw = sim._get_obs_sensor_data
        sim._get_obs_sensor_data = lambda *args: draw(*args) if self._looking else {}

    def _observation(self, raw) -> dict[str, torch.Tensor]:
        """An observation of ManiSkill under the names of the contract: its first camera is `rgb`."""
        if torch.is_tensor(raw):
            return {"state": raw}
        state = raw.get("state")
        if state is None:
            state = common.flatten_state_dict({"agent": raw["agent"], "extra": raw["extra"]}, use_torch=True)
        obs = {"state": state.float()}
        for i, (camera, data) in enumerate(raw["sensor_data"].items()):
            obs[f"rgb_{camera}" if i else "rgb"] = data["rgb"]
        return obs

    def _tensordict(self, obs: dict, pictures: bool = True) -> TensorDict:
        obs = {k: v.to(self.device, copy=True) for k, v in obs.items() if pictures or not k.startswith("rgb")}
        if self.instructions:
            obs["instruction"] = torch.zeros(self.num_envs, dtype=torch.int64, device=self.device)
        return TensorDict(obs, batch_size=[self.num_envs], device=self.device)

    def _start(self, begins: torch.Tensor) -> None:
        """Start the episode `_episode` of the rows where `begins`."""
        for sim, rows in zip(self._sims, self._rows):
            mine = begins[rows]
            if not mine.any():
                continue
            if self._batched:
                # The first seed seeds the draws of the whole batch: it must be another one at every reset.
                episode, count = self._restarts
                self._restarts = (episode, count + 1)
                seeds = np.random.SeedSequence([abs(self._seed), self._first, episode, count])
                seeds = seeds.generate_state(self.num_envs).tolist()
                raw, _ = sim.reset(seed=seeds, options={"env_idx": mine.nonzero().view(-1)})
            else:
                i = rows.start
                self._actions[i] = []
                raw, _ = sim.reset(seed=episode_seed(self._seed, self._group[i], int(self._episode[i])))
                self._drawn[i] = self._looking
            for k, v in self._observation(raw).items():
                self._obs[k][rows][mine] = v[mine]
        self._steps[begins] = 0
        self._return[begins] = 0.0

    def reset(self, episode: int = 0) -> TensorDict:
        self._episode[:] = episode
        self._restarts = (episode, 0)
        self._looking = True
        self._start(torch.ones_like(self._steps, dtype=torch.bool))
        return self._tensordict(self._obs)

    def step(self, action, active=None, look=True):
        action = torch.clamp(action.to(self._low.device), self._low, self._high)
        acting = torch.ones_like(self._steps, dtype=torch.bool)
        if active is not None:
            acting = active.to(acting.device)
            action = action * acting[:, None]  # a GPU cannot hold a row: it goes on with a zero action
        self._steps += acting
        self._obs = {k: v.clone() for k, v in self._obs.items()}
        reward = torch.zeros_like(self._return)
        terminated = torch.zeros_like(acting)
        truncated = (self._steps >= self.max_episode_steps) & acting
        success = torch.full_like(reward, torch.nan)
        draw_final = look or bool(truncated.any())
        for sim, rows in zip(self._sims, self._rows):
            i = rows.start
            self._looking = look or bool(truncated[rows].any())  # the critic values what it saw last
            if self._batched or acting[i]:
                raw, reward[rows], terminated[rows], _, info = sim.step(action[rows])
                self._actions[i].append(action[i])
                success[rows] = info.get("success", torch.nan)
                for k, v in measures(info).items():
                    self._metrics[k][rows] = v
            elif look and not self._drawn[i]:
                raw = sim.get_obs()
            else:
                continue
            self._drawn[i] = self._looking
            for k, v in self._observation(raw).items():
                self._obs[k][rows] = v
        reward *= acting
        terminated &= acting
        truncated &= ~terminated
        self._return += reward
        episode = {"return": self._return, "length": self._steps, "success": success}
        info = {
            "final_obs": self._tensordict(self._obs, draw_final),
            "episode": {k: v.to(self.device, copy=True) for k, v in episode.items()},
            "metrics": {k: v.to(self.device, copy=True) for k, v in self._metrics.items()},
        }
        done = terminated | truncated
        self._episode += done.numpy(force=True)
        self._looking = look
        self._start(done)
        signals = [x.to(self.device) for x in (reward, terminated, truncated)]
        return self._tensordict(self._obs, look), *signals, info

    def render(self) -> torch.Tensor:
        images = [sim.render_rgb_array() for sim in self._sims[: self.render_rows]]
        return torch.cat(images)[: self.render_rows].to(torch.uint8).cpu()

    def state_dict(self) -> dict | None:
        if self._batched:
            return None
        actions = torch.zeros(self.num_envs, self.max_episode_steps, *self.single_action_space.shape)
        for i, taken in enumerate(self._actions):
            for t, action in enumerate(taken):
                actions[i, t] = action
        state = {"episode": torch.from_numpy(self._episode), "steps": self._steps, "return": self._return}
        return {k: v.clone() for k, v in state.items()} | {"actions": actions}

    def load_state_dict(self, state: dict) -> None:
        self._episode[:] = state["episode"].numpy()
        self._looking = True
        self._start(torch.ones_like(self._steps, dtype=torch.bool))
        for i, sim in enumerate(self._sims):
            for action in state["actions"][i, : int(state["steps"][i])]:
                sim.step(action[None])
                self._actions[i].append(action)
            raw = sim.get_obs()
            for k, v in self._observation(raw).items():
                self._obs[k][i] = v[0]
        self._steps.copy_(state["steps"])
        self._return.copy_(state["return"])

    def close(self) -> None:
        for sim in self._sims:
            sim.close()


def check_task(name: str, obs: str) -> None:
    if name not in REGISTERED_ENVS:
        raise ValueError(f"ManiSkill has no task {name!r}{closest(name, list(REGISTERED_ENVS))}")
    if obs not in MODES:
        raise ValueError(f"maniskill/{name} has no obs {obs!r}: give one of {', '.join(MODES)}")
    if name in assets.DATA_GROUPS:
        for asset in assets.expand_data_group_into_individual_data_source_ids(name):
            if not assets.is_data_source_downloaded(asset):  # here, because ManiSkill would ask on stdin
                command = f"python -m mani_skill.utils.download_asset {name}"
                raise ValueError(f"maniskill/{name} needs files that are not here ({asset}): {command}")


def measures(info: dict) -> dict[str, torch.Tensor]:
    """What a task says about a step beside success, such as is_grasped: the entries with one number per env."""
    known = ("elapsed_steps", "success", "fail", "reconfigure")
    return {k: v for k, v in info.items() if k not in known and torch.is_tensor(v) and v.dim() == 1}
