"""mjlab, Isaac Lab's manager API on MuJoCo-Warp: `mjlab/<task>`, such as mjlab/Mjlab-Cartpole-Balance.

envs/manager_based.py says what it does with observation groups, randomness and logs.
"""

import contextlib
import io
import os
import sys

import torch
from mjlab.envs import ManagerBasedRlEnv
from mjlab.tasks.registry import list_tasks, load_env_cfg

from envs import closest
from envs.manager_based import ManagerBasedEnv, configure, device_name, refuse_groups


class Env(ManagerBasedEnv):
    def __init__(
        self,
        name,
        num_envs,
        *,
        device,
        seed,
        first_env,
        group_size,
        play=False,  # the task's version without noise and pushes
        max_episode_steps=None,
        render=0,
        **fields,
    ):
        import mjlab.tasks  # noqa: F401 (registers the tasks)

        if name not in list_tasks():
            raise ValueError(f"mjlab has no task {name!r}{closest(name, list_tasks())}")
        refuse_groups(f"mjlab/{name}", group_size)
        cfg = load_env_cfg(name, play=play)
        configure(f"mjlab/{name}", cfg, fields, "play, max_episode_steps")
        cfg.scene.num_envs = num_envs
        cfg.auto_reset = False  # so that a step returns the last observation of an episode
        if max_episode_steps:
            cfg.episode_length_s = (max_episode_steps - 0.5) * cfg.sim.mujoco.timestep * cfg.decimation
        if render and sys.platform == "linux" and "DISPLAY" not in os.environ:
            os.environ.setdefault("MUJOCO_GL", "egl")  # draw without a screen
        with contextlib.redirect_stdout(io.StringIO()):  # it prints its tables, on every rank
            sim = ManagerBasedRlEnv(cfg, device=device_name(device), render_mode="rgb_array" if render else None)
        self.render_rows = min(render, 1)
        self._adopt(f"mjlab/{name}", sim, device, seed, first_env)

    def reset(self, episode=0):
        with contextlib.redirect_stdout(io.StringIO()):  # it prints its seed
            return super().reset(episode)

    def _advance(self, action):
        groups, reward, terminated, truncated, extras = self._sim.step(action)
        log = dict(extras["log"])
        final = self._observation(groups)
        rows = (terminated | truncated).nonzero().view(-1)
        if len(rows):
            terminated, truncated, reward = terminated.clone(), truncated.clone(), reward.clone()
            first, extras = self._sim.reset(env_ids=rows)
            log |= extras["log"]
            groups = {k: replace(v, first[k], rows) for k, v in groups.items()}
        return groups, reward, terminated, truncated, log, final

    def render(self):
        return torch.from_numpy(self._sim.render().copy())[None]


def replace(old, new, rows):
    """The observations `old` with some rows of `new`, in the nested dicts of the simulator."""
    if isinstance(old, dict):
        return {k: replace(v, new[k], rows) for k, v in old.items()}
    old = old.clone()
    old[rows] = new[rows]
    return old
