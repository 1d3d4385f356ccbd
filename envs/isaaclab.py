"""Isaac Lab 3: `isaaclab/<task>`, such as isaaclab/Isaac-Cartpole-Direct.

envs/manager_based.py says what it does with observation groups, randomness and logs. A process can hold only one
simulation, so there is no separate env to evaluate in. Run on a CPU without Isaac Sim (Newton physics); pictures and
GPUs have never run. Isaac Lab's robots are remote files: where those cannot be reached, give local ones by options
such as scene.robot.spawn.usd_path=robot.usd.
"""

import contextlib
import io

import gymnasium as gym
import isaaclab_tasks  # noqa: F401 (registers the tasks)
from isaaclab.app import launch_simulation
from isaaclab_tasks.utils import load_cfg_from_registry, resolve_presets

from envs import closest
from envs.manager_based import ManagerBasedEnv, configure, device_name, refuse_groups


class Env(ManagerBasedEnv):
    separate_evaluation = False

    def __init__(
        self,
        name,
        num_envs,
        *,
        device,
        seed,
        first_env,
        group_size,
        presets="",  # the task's own variants, such as newton_mjwarp, separated by commas
        max_episode_steps=None,
        render=0,
        **fields,
    ):
        env_id = f"isaaclab/{name}"
        tasks = [k for k, spec in gym.registry.items() if "env_cfg_entry_point" in spec.kwargs]
        if name not in tasks:
            raise ValueError(f"Isaac Lab has no task {name!r}{closest(name, tasks)}")
        refuse_groups(env_id, group_size)
        if render:
            raise ValueError(
                f"{env_id} cannot be drawn: Isaac Lab 3 gives no pictures beside those of a task's cameras"
            )
        cfg = resolve_presets(
            load_cfg_from_registry(name, "env_cfg_entry_point"), tuple(filter(None, presets.split(",")))
        )
        configure(env_id, cfg, fields, "presets, max_episode_steps")
        cfg.scene.num_envs = num_envs
        cfg.sim.device = device_name(device)
        cfg.seed = seed
        cfg.compute_final_obs = True
        if max_episode_steps:
            cfg.episode_length_s = (max_episode_steps - 0.5) * cfg.sim.dt * cfg.decimation
        with contextlib.redirect_stdout(io.StringIO()):  # it prints its tables, on every rank
            self._launch = launch_simulation(cfg, {})
            self._launch.__enter__()
            sim = gym.make(name, cfg=cfg).unwrapped
        if hasattr(sim, "possible_agents"):
            raise ValueError(f"{env_id} has several agents: only one is supported")
        self._adopt(env_id, sim, device, seed, first_env)

    def _advance(self, action):
        groups, reward, terminated, truncated, extras = self._sim.step(action)
        final = extras.pop("final_obs", groups)  # there only where an episode ended
        return groups, reward, terminated, truncated, extras.get("log", {}), self._observation(final)

    def close(self):
        super().close()
        self._launch.__exit__(None, None, None)
