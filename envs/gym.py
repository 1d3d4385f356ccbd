"""Any Gymnasium env: `gym/<id>`, also `gym/package:Env-v0`, with Box or Discrete actions.

Observations: a Box, a Discrete (one-hot), or a Dict of them, nested or not, such as a goal env's.
- A uint8 Box of shape [H, W, 3] is a picture: `rgb` if it is the only one, else `rgb_<key>`; grey ones are repeated
  over the three channels.
- Everything else is flattened into `state`, in the order of the keys of the Dict space.

Options: `max_episode_steps`, and the arguments of the env, such as `ctrl_cost_weight=0.2`. With `observe=0:8` only
these entries are in `state`: of HalfCheetah the positions without the velocities. Gymnasium's MuJoCo envs can save and
restore their state bit for bit.
"""

import importlib
import inspect
import warnings

import gymnasium as gym
import numpy as np
import torch
from gymnasium.envs.registration import load_env_creator
from gymnasium.spaces import Box, Discrete

from envs import closest
from envs.single import SingleEnvs

# What gym.make adds and this adapter does itself, or that only slows down: a step of HalfCheetah by a sixth.
PEELED = (gym.wrappers.TimeLimit, gym.wrappers.OrderEnforcing, gym.wrappers.PassiveEnvChecker)


def quiet_mujoco() -> None:
    """MuJoCo's warnings go through Python's, each once, in place of a MUJOCO_LOG.TXT in the working directory."""
    try:
        import mujoco
    except ImportError:
        return
    mujoco.set_mju_user_warning(lambda text: "deprecated" in text or warnings.warn(text, RuntimeWarning, stacklevel=2))


def mujoco_arrays(env) -> list[np.ndarray]:
    """The integration state, and views of what MuJoCo derived from it: envs such as Ant read that before a step."""
    import mujoco

    state = np.zeros(mujoco.mj_stateSize(env.model, mujoco.mjtState.mjSTATE_INTEGRATION))
    mujoco.mj_getState(env.model, env.data, state, mujoco.mjtState.mjSTATE_INTEGRATION)
    derived = (
        "xpos xquat xmat xipos ximat geom_xpos site_xpos subtree_com cinert cvel cfrc_ext qfrc_actuator sensordata"
    )
    return [state, *(getattr(env.data, name) for name in derived.split())]


def make_one(name: str, **options):
    """-> the env without a time limit, and the limit that it is registered with."""
    module, colon, env_name = name.rpartition(":")
    try:
        if colon:
            importlib.import_module(module)  # which registers its envs
            name = env_name
        limit = gym.spec(name).max_episode_steps
        env = gym.make(name, disable_env_checker=True, max_episode_steps=-1, **options)
    except gym.error.UnregisteredEnv as error:
        hint = closest(name, list(gym.registry))
        raise ValueError(f"Gymnasium has no {name!r}{hint}") from error
    except TypeError as error:
        if "unexpected keyword" not in str(error):
            raise
        parameters = inspect.signature(load_env_creator(gym.spec(name).entry_point)).parameters.values()
        known = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        raise ValueError(
            f"gym/{name}: {error}; its options are {', '.join(['max_episode_steps', 'observe', *known])}"
        ) from error
    except ModuleNotFoundError as error:
        raise ValueError(f"gym/{name} needs the package {error.name}, which is not installed") from error
    except Exception as error:
        reason = str(error).split("\n")[0]
        raise ValueError(f"Gymnasium cannot make {name!r}: {reason}") from error
    while isinstance(env, PEELED):
        env = env.env
    return env, limit


class Part:
    """One entry of an observation: where it is in the Dict, and what becomes of it."""

    def __init__(self, path: tuple[str, ...], space: gym.Space):
        self.path = path
        self.one_hot = np.eye(int(space.n), dtype=np.float32) if isinstance(space, Discrete) else None
        self.first = int(space.start) if isinstance(space, Discrete) else 0
        shape = space.shape
        grey = len(shape) == 2 or shape[2:] == (1,)
        self.picture = space.dtype == np.uint8 and (shape[2:] == (3,) or (grey and min(shape[:2]) >= 16))
        self.shape = (*shape[:2], 3)
        self.size = len(self.one_hot) if isinstance(space, Discrete) else int(np.prod(shape))

    def take(self, obs) -> np.ndarray:
        for key in self.path:
            obs = obs[key]
        if self.one_hot is not None:
            return self.one_hot[int(obs) - self.first]
        if not self.picture:
            return np.asarray(obs).reshape(-1)
        return obs if obs.shape == self.shape else np.broadcast_to(obs.reshape(*self.shape[:2], 1), self.shape)


def split(space: gym.Space, path: tuple[str, ...] = ()) -> list[Part]:
    """The entries of an observation space, nested ones in place."""
    if isinstance(space, gym.spaces.Dict):
        return [part for key, inner in space.items() for part in split(inner, (*path, key))]
    if not isinstance(space, Box | Discrete):
        where = f" under {'/'.join(path)}" if path else ""
        kind = type(space).__name__
        raise ValueError(f"{kind} observations{where} are not supported, only Box, Discrete and Dict are")
    return [Part(path, space)]


def select(text: str, size: int) -> slice:
    """`0:8` -> the entries of a state that are observed."""
    try:
        first, last = (int(number) for number in text.split(":"))
    except (AttributeError, ValueError):
        first, last = 0, 0
    if not 0 <= first < last <= size:
        raise ValueError(f"observe={text} is no part of the {size} entries of state: give observe=0:{size}")
    return slice(first, last)


class Env(SingleEnvs):
    checks_options = True  # the arguments of the env are known to Gymnasium alone

    def __init__(
        self,
        name,
        num_envs,
        *,
        device,
        seed,
        first_env,
        group_size,
        max_episode_steps=None,
        observe=None,
        render=0,
        **options,
    ):
        super().__init__(num_envs, device=device, seed=seed, first_env=first_env, group_size=group_size, render=render)
        quiet_mujoco()
        self._envs = []
        for i in range(num_envs):
            mode = {"render_mode": "rgb_array"} if i < render else {}
            env, limit = make_one(name, **mode, **options)
            self._envs.append(env)
        self.threads = hasattr(env.unwrapped, "mujoco_renderer")  # MuJoCo releases the GIL while it steps
        try:
            parts = split(env.observation_space)
            self._vectors = [part for part in parts if not part.picture]
            pictures = [part for part in parts if part.picture]
            self._named = [("rgb" if len(pictures) == 1 else "_".join(["rgb", *p.path]), p) for p in pictures]
            space = env.observation_space
            self._is_vector = isinstance(space, Box) and len(space.shape) == 1 and observe is None
            self._observed = slice(None)
            spaces = {}
            size = sum(part.size for part in self._vectors)
            if observe is not None:
                self._observed = select(observe, size)
                size = self._observed.stop - self._observed.start
            if self._vectors:
                spaces["state"] = Box(-np.inf, np.inf, (size,))
            spaces |= {key: Box(0, 255, part.shape, np.uint8) for key, part in self._named}
            if not (max_episode_steps or limit):
                hint = "register it with max_episode_steps, or give the option max_episode_steps=1000"
                raise ValueError(f"no time limit: {hint}")
            self.describe(spaces, env.action_space, max_episode_steps or limit)
        except ValueError as error:
            raise ValueError(f"gym/{name}: {error}") from error
        if render:
            self.reset()
            try:
                self.render()
            except Exception as error:  # now, and not at the end of a long run
                raise ValueError(f"gym/{name} cannot be drawn here ({error}): try MUJOCO_GL=egl") from error

    def _observe(self, obs) -> dict[str, np.ndarray]:
        if self._is_vector:
            return {"state": obs}
        parts = {key: part.take(obs) for key, part in self._named}
        if self._vectors:
            parts["state"] = np.concatenate([part.take(obs) for part in self._vectors])[self._observed]
        return parts

    def start(self, i, seed):
        return self._observe(self._envs[i].reset(seed=seed)[0])

    def advance(self, i, action):
        return self._envs[i].step(action)

    def gather(self, observed):
        if self._is_vector:
            return {"state": observed}
        return super().gather([self._observe(obs) for obs in observed])

    def metric_names(self, info):
        return [name for name in info if name.startswith("reward_")]

    def render(self) -> torch.Tensor:
        images = np.stack([env.render() for env in self._envs[: self.render_rows]])
        stride = max(1, images.shape[1] // 160)  # small enough for a GIF
        return torch.from_numpy(images[:, ::stride, ::stride].copy())

    def _mujoco(self) -> list | None:
        """The simulators, if they are Gymnasium's own MuJoCo envs: these keep nothing that MjData does not hold."""
        envs = [env.unwrapped for env in self._envs]
        return envs if envs[0].__module__.startswith("gymnasium.envs.mujoco") else None

    def state_dict(self) -> dict | None:
        if self._mujoco() is None:
            return None
        rows = [np.concatenate([a.reshape(-1) for a in mujoco_arrays(env)]) for env in self._mujoco()]
        return self.clock_state() | {"mujoco": torch.from_numpy(np.stack(rows))}

    def load_state_dict(self, state: dict) -> None:
        import mujoco

        self.reset()
        self.load_clock_state(state)
        for env, row in zip(self._mujoco(), state["mujoco"].numpy()):
            arrays = mujoco_arrays(env)
            parts = np.split(row, np.cumsum([a.size for a in arrays])[:-1])
            mujoco.mj_setState(env.model, env.data, parts[0], mujoco.mjtState.mjSTATE_INTEGRATION)
            for array, part in zip(arrays[1:], parts[1:]):
                array[...] = part.reshape(array.shape)

    def close(self) -> None:
        super().close()
        for env in self._envs:
            env.close()
