"""MetaWorld: `metaworld/push-v3`, a set of tasks `metaworld/reach-v3,push-v3`, or `metaworld/MT10`, `MT25`, `MT50`.

    pip install --no-deps metaworld && pip install 'gymnasium[mujoco]' scipy

MetaWorld asks for mujoco 3.3.0, hence --no-deps; the one line of it that newer versions break is mended below.

- Without a camera `state` is MetaWorld's observation of 39 numbers, with the goal in it, and behind it, if there are
  several tasks, which one it is (one-hot). With `camera=corner2`, `camera=wrist` or `camera=corner2,wrist` there is
  `rgb` (of further cameras `rgb_wrist`), `state` is the hand's place and opening (4), and the rest is `privileged`.
- `instruction` numbers the tasks of the set. Groups of envs take them in turn, so that a group has one task.
- `reward=dense` is MetaWorld's, between 0 and 10 a step; `reward=success` is 1 in a step that succeeds.
- An episode is a success if any of its steps was one. It goes on to its 500th step, as MetaWorld's do, unless
  `end_on_success=true`. Under the dense reward a success that ends the episode costs what was still to be earned.
- `expert_action()` is MetaWorld's scripted policy of each task.
- The state can be saved and restored bit for bit.

Pictures are drawn without shadows and reflections and with the meshes thinned to what a picture of this size can show:
3 ms for one of 64 pixels, in place of 160.
"""

import copy
import sys
import warnings

import gymnasium as gym
import mujoco
import numpy as np
import torch
from metaworld.env_dict import ALL_V3_ENVIRONMENTS, MT10_V3, MT25_V3
from metaworld.policies import ENV_POLICY_MAP
from metaworld.sawyer_xyz_env import SawyerMocapBase

from envs import closest
from envs.gym import mujoco_arrays, quiet_mujoco
from envs.single import SingleEnvs

SETS = {"MT10": list(MT10_V3), "MT25": list(MT25_V3), "MT50": list(ALL_V3_ENVIRONMENTS)}
METRICS = ["near_object", "grasp_success", "grasp_reward", "in_place_reward", "obj_to_target"]
# The names that we use -> MetaWorld's
CAMERAS = {
    "corner2": "corner2",
    "wrist": "gripperPOV",
    "behind": "behindGripper",
    "top": "topview",
    "corner": "corner",
    "corner3": "corner3",
}
CORNER2 = (0.75, 0.075, 0.7)  # nearer than MetaWorld's own, as datasets of it have been recorded
INSTRUCTIONS = {
    "assembly-v3": "put the ring over the peg",
    "basketball-v3": "put the ball into the basket",
    "bin-picking-v3": "move the block from one bin to the other",
    "box-close-v3": "put the lid on the box",
    "button-press-topdown-v3": "press the button down from above",
    "button-press-topdown-wall-v3": "press the button behind the wall down from above",
    "button-press-v3": "press the button",
    "button-press-wall-v3": "press the button behind the wall",
    "coffee-button-v3": "press the button of the coffee machine",
    "coffee-pull-v3": "pull the mug away from the coffee machine",
    "coffee-push-v3": "push the mug under the coffee machine",
    "dial-turn-v3": "turn the dial",
    "disassemble-v3": "take the ring off the peg",
    "door-close-v3": "close the door",
    "door-lock-v3": "lock the door",
    "door-open-v3": "open the door",
    "door-unlock-v3": "unlock the door",
    "hand-insert-v3": "put the block into the hole",
    "drawer-close-v3": "close the drawer",
    "drawer-open-v3": "open the drawer",
    "faucet-open-v3": "open the faucet",
    "faucet-close-v3": "close the faucet",
    "hammer-v3": "hammer the nail into the wall",
    "handle-press-side-v3": "press the handle down from the side",
    "handle-press-v3": "press the handle down",
    "handle-pull-side-v3": "pull the handle up from the side",
    "handle-pull-v3": "pull the handle up",
    "lever-pull-v3": "pull the lever up",
    "pick-place-wall-v3": "carry the puck over the wall to the goal",
    "pick-out-of-hole-v3": "take the puck out of the hole",
    "pick-place-v3": "carry the puck to the goal",
    "plate-slide-v3": "slide the plate into the cabinet",
    "plate-slide-side-v3": "slide the plate into the cabinet sideways",
    "plate-slide-back-v3": "slide the plate out of the cabinet",
    "plate-slide-back-side-v3": "slide the plate out of the cabinet sideways",
    "peg-insert-side-v3": "put the peg into the hole from the side",
    "peg-unplug-side-v3": "pull the peg out of the hole",
    "soccer-v3": "kick the ball into the net",
    "stick-push-v3": "push the bottle with the stick",
    "stick-pull-v3": "pull the bottle with the stick",
    "push-v3": "push the puck to the goal",
    "push-wall-v3": "push the puck around the wall to the goal",
    "push-back-v3": "push the block back to the goal",
    "reach-v3": "reach the goal",
    "reach-wall-v3": "reach the goal behind the wall",
    "shelf-place-v3": "put the block on the shelf",
    "sweep-into-v3": "sweep the block into the hole",
    "sweep-v3": "sweep the block off the table",
    "window-open-v3": "open the window",
    "window-close-v3": "close the window",
}


def reset_mocap_welds(self) -> None:
    """In place of MetaWorld's own, which writes 11 numbers into rows that have 12 since mujoco 3.4."""
    welds = self.model.eq_type == int(mujoco.mjtEq.mjEQ_WELD)
    self.model.eq_data[welds, :11] = [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0, 0.0, 0.0, 0.0, 5.0]


SawyerMocapBase.reset_mocap_welds = reset_mocap_welds


def find_tasks(name: str) -> list[str]:
    tasks = []
    for part in name.split(","):
        if part not in SETS and part not in ALL_V3_ENVIRONMENTS:
            hint = closest(part, [*SETS, *ALL_V3_ENVIRONMENTS])
            raise ValueError(f"MetaWorld has no task {part!r}{hint}")
        tasks += SETS.get(part, [part])
    if len(set(tasks)) != len(tasks):
        raise ValueError(f"metaworld/{name} names a task twice")
    return tasks


def make_one(task: str, max_episode_steps: int):
    env = ALL_V3_ENVIRONMENTS[task]()
    env.max_path_length = max_episode_steps
    env.model.camera("corner2").pos[:] = CORNER2
    # What set_task does, but with a start drawn anew for each episode, and the goal in the observation.
    env._set_task_called = True
    env._freeze_rand_vec = False
    env.seeded_rand_vec = True
    env._partially_observable = False
    del env.sawyer_observation_space  # cached: it is another one with the goal
    return env


def owned(x: np.ndarray) -> bool:
    """Not a view of MuJoCo's memory."""
    while isinstance(x.base, np.ndarray):
        x = x.base
    return x.base is None


def thin_robot(model: mujoco.MjModel, cell: float) -> None:
    """Merge the vertices of the robot's meshes that share a cube with sides of `cell`, drop the faces that vanish.

    Nearly all faces of a scene are the robot's, and most of them smaller than a pixel.
    """
    robot = model.geom_bodyid[:, None] == np.flatnonzero(model.body_rootid == model.body("base").id)
    is_mesh = model.geom_type == int(mujoco.mjtGeom.mjGEOM_MESH)
    for mesh in np.unique(model.geom_dataid[robot.any(1) & is_mesh]):
        start, count = model.mesh_faceadr[mesh], model.mesh_facenum[mesh]
        first = model.mesh_vertadr[mesh]
        places = model.mesh_vert[first : first + model.mesh_vertnum[mesh]]
        cubes = np.floor(places / cell).astype(np.int64)
        _, chosen, cube = np.unique(cubes, axis=0, return_index=True, return_inverse=True)
        corners = chosen[cube.reshape(-1)][model.mesh_face[start : start + count]]  # one vertex for all of its cube
        differ = (corners[:, 0] != corners[:, 1]) & (corners[:, 1] != corners[:, 2]) & (corners[:, 2] != corners[:, 0])
        kept = np.flatnonzero(differ)
        model.mesh_face[start : start + len(kept)] = corners[kept]
        for array in (model.mesh_facenormal, model.mesh_facetexcoord):
            if len(array):
                array[start : start + len(kept)] = array[start + kept]
        model.mesh_facenum[mesh] = len(kept)


class Camera:
    """Draws one task, from a copy of its model that is cheaper to draw than the one that is simulated."""

    def __init__(self, model: mujoco.MjModel, size: int):
        model = copy.deepcopy(model)
        model.vis.global_.offwidth = size
        model.vis.global_.offheight = size
        model.vis.quality.offsamples = 0
        model.vis.quality.shadowsize = 0
        model.mat_reflectance[:] = 0.0
        thin_robot(model, 0.03 * 64 / size)
        self.renderer = mujoco.Renderer(model, size, size)

    def draw(self, data: mujoco.MjData, camera: str) -> np.ndarray:
        self.renderer.update_scene(data, camera)
        for flag in ("SHADOW", "REFLECTION", "SKYBOX"):
            self.renderer.scene.flags[int(getattr(mujoco.mjtRndFlag, f"mjRND_{flag}"))] = False
        picture = self.renderer.render()
        return picture[::-1, ::-1] if camera.startswith("corner") else picture  # those hang upside down


def release_context() -> None:
    """Let another thread draw next: a context that is current in one cannot be used in another."""
    egl = sys.modules.get("mujoco.egl")
    if egl is not None and egl.EGL_DISPLAY is not None:
        nothing = egl.EGL.EGL_NO_SURFACE
        egl.EGL.eglMakeCurrent(egl.EGL_DISPLAY, nothing, nothing, egl.EGL.EGL_NO_CONTEXT)


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
        camera="",
        size=64,
        reward="dense",
        end_on_success=False,
        max_episode_steps=500,
        render=0,
    ):
        common = {"device": device, "seed": seed, "first_env": first_env, "group_size": group_size, "render": render}
        super().__init__(num_envs, **common)
        tasks = find_tasks(name)
        self._cameras = [CAMERAS.get(c, c) for c in (camera or "").split(",") if c]
        for c in self._cameras:
            if c not in CAMERAS.values():
                raise ValueError(f"MetaWorld has no camera {c!r}: give one or more of {','.join(CAMERAS)}")
        if reward not in ("dense", "success"):
            raise ValueError(f"MetaWorld has no reward {reward!r}: give dense or success")
        if size < 16:
            raise ValueError(f"pictures of {size} pixels show nothing: give size=64")
        self._dense = reward == "dense"
        self._end_on_success = end_on_success
        self._size = size
        self.instructions = [INSTRUCTIONS[task] for task in tasks]
        quiet_mujoco()
        self._task_number = [group % len(tasks) for group in self._group]
        self._task = [tasks[number] for number in self._task_number]
        self._one_hot = np.eye(len(tasks)) if len(tasks) > 1 else np.zeros((1, 0))
        self._envs = [make_one(task, max_episode_steps) for task in self._task]
        self._policies = [ENV_POLICY_MAP[task]() for task in self._task]
        self._observed = np.zeros((num_envs, 39))  # in double precision, for the experts
        self._succeeded = [False] * num_envs
        self._drawers: dict[tuple[str, int], Camera] = {}  # by task and size

        everything = gym.spaces.Box(-np.inf, np.inf, (39 + self._one_hot.shape[1],))
        spaces = {"state": everything}
        if self._cameras:
            spaces = {"state": gym.spaces.Box(-np.inf, np.inf, (4,)), "privileged": everything}
        for key in self._picture_keys():
            spaces[key] = gym.spaces.Box(0, 255, (size, size, 3), np.uint8)
        spaces["instruction"] = gym.spaces.Discrete(len(tasks))
        self.describe(spaces, self._envs[0].action_space, max_episode_steps)
        if render or self._cameras:
            try:
                self._picture(0, "corner2", size)
            except Exception as error:  # now, and not at the end of a long run
                raise ValueError(f"MetaWorld cannot draw here ({error}): try MUJOCO_GL=egl") from error
            release_context()

    def _picture_keys(self) -> list[str]:
        short = {camera: name for name, camera in CAMERAS.items()}
        return ["rgb", *(f"rgb_{short[c]}" for c in self._cameras[1:])][: len(self._cameras)]

    def _observe(self, i: int, obs: np.ndarray) -> dict:
        self._observed[i] = obs
        number = self._task_number[i]
        everything = np.concatenate([obs, self._one_hot[number]]) if len(self._one_hot) > 1 else obs
        if self._cameras:
            return {"state": obs[:4], "privileged": everything, "instruction": number}
        return {"state": everything, "instruction": number}

    def start(self, i, seed):
        self._envs[i].seed(seed)  # reset(seed) ignores it
        self._succeeded[i] = False
        return self._observe(i, self._envs[i].reset()[0])

    def advance(self, i, action):
        obs, reward, _, _, info = self._envs[i].step(action)
        success = bool(info["success"])
        self._succeeded[i] |= success
        info["success"] = float(self._succeeded[i])
        if not self._dense:
            reward = float(success)
        return self._observe(i, obs), reward, success and self._end_on_success, False, info

    def metric_names(self, info):
        return METRICS

    def expert_action(self) -> torch.Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that an action is beyond its bounds: it is clipped
            actions = [policy.get_action(obs) for policy, obs in zip(self._policies, self._observed)]
        return torch.tensor(np.clip(actions, -1.0, 1.0), dtype=torch.float32, device=self.device)

    def _picture(self, i: int, camera: str, size: int) -> np.ndarray:
        key = (self._task[i], size)
        if key not in self._drawers:
            self._drawers[key] = Camera(self._envs[i].model, size)
        return self._drawers[key].draw(self._envs[i].data, camera)

    def look(self, i):
        return {key: self._picture(i, c, self._size) for key, c in zip(self._picture_keys(), self._cameras)}

    def _draw(self, rows):
        super()._draw(rows)
        release_context()

    def render(self) -> torch.Tensor:
        pictures = [self._picture(i, "corner2", 160) for i in range(self.render_rows)]
        release_context()
        return torch.from_numpy(np.stack(pictures))

    def state_dict(self) -> dict:
        state = self.clock_state() | {"succeeded": torch.tensor(self._succeeded)}
        state["observed"] = torch.from_numpy(self._observed.copy())
        for i, env in enumerate(self._envs):
            arrays = [*mujoco_arrays(env), env.model.body_pos, env.model.site_pos]
            state[f"{i}.mujoco"] = torch.from_numpy(np.concatenate([a.reshape(-1) for a in arrays]))
            state[f"{i}.attributes"] = {k: torch.from_numpy(np.array(v)) for k, v in attributes(env).items()}
            state[f"{i}.lists"] = [k for k, v in attributes(env).items() if isinstance(v, list)]
        return state

    def load_state_dict(self, state: dict) -> None:
        self.reset()
        self.load_clock_state(state)
        self._succeeded = state["succeeded"].tolist()
        self._observed[:] = state["observed"].numpy()
        for i, env in enumerate(self._envs):
            for name, value in state[f"{i}.attributes"].items():
                plain = value.dim() == 0 or name in state[f"{i}.lists"]
                setattr(env, name, value.tolist() if plain else value.numpy().copy())
            arrays = [*mujoco_arrays(env), env.model.body_pos, env.model.site_pos]
            parts = np.split(state[f"{i}.mujoco"].numpy(), np.cumsum([a.size for a in arrays])[:-1])
            for array, part in zip(arrays, parts):
                array[...] = part.reshape(array.shape)
            set_state(env, arrays[0])
            mujoco.mj_forward(env.model, env.data)
            set_state(env, arrays[0])
            for array, part in zip(arrays[1:], parts[1:]):
                array[...] = part.reshape(array.shape)


def set_state(env, state: np.ndarray) -> None:
    mujoco.mj_setState(env.model, env.data, state, mujoco.mjtState.mjSTATE_INTEGRATION)


def attributes(env) -> dict:
    """What the env itself remembers: numbers, lists of them, and arrays that are not MuJoCo's."""
    found = {}
    for name, value in vars(env).items():
        if name == "max_path_length":  # an option, not a state
            continue
        is_number = isinstance(value, (bool, int, float, np.number, np.bool_)) and name != "_np_random_seed"
        is_list = isinstance(value, list) and value and isinstance(value[0], float)
        is_array = isinstance(value, np.ndarray) and value.dtype != object and owned(value)
        if is_number or is_list or is_array:
            found[name] = value
    return found
