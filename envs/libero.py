"""LIBERO: `libero/<suite>/<number>`, such as libero/libero_spatial/0, or `libero/<suite>` for all of its tasks.

Run only against a stand-in of its simulation: the scenes' files come from a hub, not with the package. Its task lists,
instructions and initial states are the package's own.

- `rgb` is the camera before the table and `rgb_wrist` the one on the hand, turned as in the published datasets; `state`
  is the hand's place, its turn as an axis times an angle, and the two fingers (8).
- An episode starts in one of the task's initial states (50 of most), chosen by its seed: a group shares one. Ten steps
  with the gripper open let things come to rest. It ends with its success, or at the suite's usual horizon.
- `instruction` numbers the tasks; groups of envs take them in turn. The reward is 1 at the success.
"""

import contextlib
import importlib.util
import io
import os
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch

from envs import closest
from envs.single import SingleEnvs

HORIZONS = {"libero_spatial": 220, "libero_object": 280, "libero_goal": 300, "libero_10": 520, "libero_90": 400}
CAMERAS = {"rgb": "agentview", "rgb_wrist": "robot0_eye_in_hand"}
REST = [0.0] * 6 + [-1.0]  # an action that stays and opens the gripper


def prepare() -> None:
    """LIBERO asks for its folders on stdin when it is imported first: write down the package's own."""
    folder = Path(os.environ.setdefault("LIBERO_CONFIG_PATH", str(Path.home() / ".libero")))
    spec = importlib.util.find_spec("libero")
    if spec is None:
        raise ModuleNotFoundError("No module named 'libero'", name="libero")
    if not (folder / "config.yaml").exists():
        root = Path(next(iter(spec.submodule_search_locations))) / "libero"
        names = {"bddl_files": "bddl_files", "init_states": "init_files", "assets": "assets", "datasets": "../datasets"}
        lines = [f"benchmark_root: {root}", *(f"{key}: {root / name}" for key, name in names.items())]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text("\n".join(lines) + "\n")


def make_simulation(bddl_file: str, size: int):
    from libero.libero.envs import OffScreenRenderEnv

    # Without observations from cameras: they are drawn in `look`, when somebody looks.
    options = {"use_camera_obs": False, "camera_heights": size, "camera_widths": size, "horizon": 100_000}
    return OffScreenRenderEnv(bddl_file_name=bddl_file, **options)


class Env(SingleEnvs):
    def __init__(
        self,
        name,
        num_envs,
        *,
        device,
        seed,
        first_env,
        group_size,
        size=128,  # of the pictures, in pixels
        settle=10,  # steps before an episode, until things lie still
        max_episode_steps=None,
        render=0,
    ):
        common = {"device": device, "seed": seed, "first_env": first_env, "group_size": group_size, "render": render}
        super().__init__(num_envs, **common)
        prepare()
        from libero.libero.benchmark import get_benchmark

        suite, _, number = name.partition("/")
        if suite not in HORIZONS:
            raise ValueError(f"LIBERO has no suite {suite!r}{closest(suite, list(HORIZONS))}")
        with contextlib.redirect_stdout(io.StringIO()):  # it prints the order of its tasks
            benchmark = get_benchmark(suite)()
        if number and not (number.isdecimal() and int(number) < benchmark.n_tasks):
            raise ValueError(f"{suite} has the tasks 0 to {benchmark.n_tasks - 1}, not {number!r}")
        tasks = [int(number)] if number else list(range(benchmark.n_tasks))
        self.instructions = [benchmark.get_task(task).language for task in tasks]
        starts = [np.asarray(benchmark.get_task_init_states(task)) for task in tasks]
        self._size, self._settle = size, settle
        self._task = [group % len(tasks) for group in self._group]
        self._starts = [starts[task] for task in self._task]
        try:
            self._sims = [make_simulation(benchmark.get_task_bddl_file_path(tasks[t]), size) for t in self._task]
        except (FileNotFoundError, OSError) as error:
            reason = f"LIBERO cannot load its scenes ({str(error).splitlines()[0]})"
            raise ValueError(f"{reason}: they are downloaded from a hub at first use") from error

        spaces = {"state": gym.spaces.Box(-np.inf, np.inf, (8,)), "instruction": gym.spaces.Discrete(len(tasks))}
        for key in CAMERAS:
            spaces[key] = gym.spaces.Box(0, 255, (size, size, 3), np.uint8)
        action = gym.spaces.Box(-1.0, 1.0, (7,))
        self.describe(spaces, action, max_episode_steps or HORIZONS[suite])

    def _observe(self, i, obs):
        turn = axis_angle(obs["robot0_eef_quat"])
        state = np.concatenate([obs["robot0_eef_pos"], turn, obs["robot0_gripper_qpos"]])
        return {"state": state, "instruction": self._task[i]}

    def start(self, i, seed):
        starts = self._starts[i]
        self._sims[i].reset()  # first: it would undo the state that is set
        obs = self._sims[i].set_init_state(starts[seed % len(starts)])
        for _ in range(self._settle):
            obs, *_ = self._sims[i].step(REST)
        return self._observe(i, obs)

    def advance(self, i, action):
        obs, reward, done, _ = self._sims[i].step(action)  # done: it has succeeded
        return self._observe(i, obs), reward, done, False, {"success": float(done)}

    def _picture(self, i, camera, size):
        picture = self._sims[i].sim.render(camera_name=camera, width=size, height=size)
        return picture[::-1, ::-1]  # turned by half, as in the published datasets

    def look(self, i):
        return {key: self._picture(i, camera, self._size) for key, camera in CAMERAS.items()}

    def render(self) -> torch.Tensor:
        pictures = [self._picture(i, "agentview", 160) for i in range(self.render_rows)]
        return torch.from_numpy(np.stack(pictures).copy())

    def close(self) -> None:
        super().close()
        for sim in self._sims:
            sim.close()


def axis_angle(quaternion: np.ndarray) -> np.ndarray:
    """Of (x, y, z, w); zeros for no turn."""
    w = np.clip(quaternion[3], -1.0, 1.0)
    sine = np.sqrt(1.0 - w * w)
    if sine < 1e-8:
        return np.zeros(3)
    return quaternion[:3] * 2.0 * np.arccos(w) / sine
