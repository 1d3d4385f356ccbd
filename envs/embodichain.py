"""EmbodiChain: `embodichain/<file>`, where the file is the configuration of a task (.json or .yaml).

Run only against a stand-in: the true BaseEnv of EmbodiChain 0.3.2, its engine (not on the registry) stubbed.
envs/manager_based.py says what it does with randomness and rows that are not active. All numbers of an observation, in
their order, are `state`; the first camera is `rgb`.
"""

from pathlib import Path

import numpy as np
import torch
from embodichain.lab.gym.utils.gym_utils import config_to_cfg, get_manager_modules
from embodichain.lab.gym.utils.registration import build_env
from embodichain.utils.utility import load_config
from tensordict import TensorDict

from envs.manager_based import ManagerBasedEnv, configure, refuse_groups

STATUS = ("elapsed_steps", "success", "fail")


class Env(ManagerBasedEnv):
    separate_evaluation = False

    def __init__(
        self, name, num_envs, *, device, seed, first_env, group_size, max_episode_steps=None, render=0, **fields
    ):
        env_id = f"embodichain/{name}"
        if not Path(name).is_file():
            raise ValueError(f"{env_id}: there is no file {name}: give the configuration of a task")
        refuse_groups(env_id, group_size)
        if render:
            raise ValueError(f"{env_id} cannot be drawn: use the cameras of the task")
        config = load_config(name)
        cfg = config_to_cfg(config, manager_modules=get_manager_modules(), source_path=name)
        configure(env_id, cfg, fields, "max_episode_steps")
        cfg.num_envs = num_envs
        cfg.sim_cfg.headless = True
        cfg.sim_cfg.sim_device = torch.device(device)
        cfg.sim_cfg.gpu_id = torch.device(device).index or 0
        if max_episode_steps:
            cfg.max_episode_steps = max_episode_steps
        sim = build_env(config["id"], base_env_cfg=cfg).unwrapped
        sim._replay_no_auto_reset = True  # so that a step returns the last observation of an episode
        self._adopt(env_id, sim, device, seed, first_env)

    def _episode_length(self):
        return int(self._sim.max_episode_steps)

    def _begin(self, seed):
        obs, info = self._sim.reset(seed=seed)
        return obs, measures(info)

    def _advance(self, action):
        obs, reward, terminated, truncated, info = self._sim.step(action)
        info = info.clone()
        final = self._observation(obs)
        self._won = info.get("success", None)
        rows = (terminated | truncated).nonzero().view(-1)
        if len(rows):
            obs = obs.clone()
            first, _ = self._sim.reset(options={"reset_ids": rows})
            obs[rows] = first[rows]
        return obs, reward, terminated, truncated, measures(info), final

    def _observation(self, groups, look=True):
        parts = {}
        numbers = []
        for name, value in groups.items(include_nested=True, leaves_only=True):
            if value.dtype != torch.uint8:
                numbers.append(value.flatten(1).float())
            elif value.dim() == 4 and look:
                camera = "_".join(name[1:-1])  # of ("sensor", camera, "color")
                parts[f"rgb_{camera}" if "rgb" in parts else "rgb"] = value[..., :3].clone()
        return TensorDict({"state": torch.cat(numbers, 1), **parts}, batch_size=[self.num_envs], device=self.device)

    def _success(self):
        if self._won is None:
            return torch.full((self.num_envs,), np.nan, device=self.device)
        return self._won.float()


def measures(info: TensorDict) -> dict[str, torch.Tensor]:
    """The entries of `info` with one number per env."""
    return {k: v.float() for k, v in info.items() if torch.is_tensor(v) and v.dim() == 1 and k not in STATUS}
