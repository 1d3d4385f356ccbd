"""Environments: the only code that tandem's scripts share, all behind one contract.

    env = envs.make("PushCube", num_envs=128, seed=1)       # embedded: pure torch, batched, on any device
    env = envs.make("gym/Hopper-v5", num_envs=8, seed=1)    # the part before the slash names the file that serves it
    env = envs.make("Tabletop", num_envs=8, camera="fixed")     # an option of this env

    obs = env.reset()
    obs, reward, terminated, truncated, info = env.step(action)

- `obs` is a TensorDict of batch size [N]: `state` [N, d]; where the env has them also `rgb` uint8 [N, H, W, 3] (further
  cameras as `rgb_wrist` and the like), `instruction` [N] (an index into `env.instructions`) and `privileged` [N, k]
  (only the critic may see it). An env that has nothing but pictures has no `state`.
- `reward` float32 [N], `terminated` and `truncated` bool [N]. Success and failure terminate; the clock truncates.
- Autoreset happens in the same step: where `terminated | truncated`, `obs` is already the first one of the next
  episode, and `info["final_obs"]` (full batch, valid at those rows) is the last one of the old episode. It is None
  if the simulator does not give it.
- `info["episode"]` holds `return`, `length` and `success` of [N], raw, valid where an episode ended; `success` is NaN
  if the env does not know it. `info["metrics"]` holds further [N] tensors, always under the same names.
- Randomness belongs to the global env index: env `first_env + i` starts the same episodes whatever the number of
  processes; two envs with the same `index // group_size` start them in the same state. A simulator that cannot do
  that refuses a `group_size` above 1.
- The action goes in as sampled: clipping it to the space is the env's business.
- What a step returns is never written to again.

`python -m envs <env_id>` checks these rules one by one, on any env. docs/envs.md says how to add a simulator.
"""

import difflib
import importlib
import inspect
import os
import sys
from ctypes.util import find_library

import numpy as np
import torch
from tensordict import TensorDict

EMBEDDED = {
    "CartPole": "cartpole",
    "PushCube": "push_cube",
    "Tabletop": "tabletop",
    "TabletopMemory": "tabletop_memory",
}
# What is before the slash is also the name of the file. -> an example, what to install
BACKENDS = {
    "gym": ("gym/HalfCheetah-v5", "pip install 'gymnasium[mujoco]'"),
    "envpool": ("envpool/HalfCheetah-v5", "pip install envpool"),
    "metaworld": ("metaworld/push-v3", "pip install --no-deps metaworld && pip install 'gymnasium[mujoco]' scipy"),
    "maniskill": ("maniskill/PushCube-v1", "pip install mani_skill"),
    "isaaclab": ("isaaclab/Isaac-Cartpole-Direct", "pip install isaaclab (Python 3.12, in an environment of its own)"),
    "mjlab": ("mjlab/Mjlab-Lift-Cube-Yam", "pip install mjlab"),
    "embodichain": ("embodichain/task.json", "install EmbodiChain and its engine as its README says"),
    "libero": ("libero/libero_spatial/0", "pip install hf-libero (in an environment of its own)"),
}
SET_BY_SCRIPTS = ("num_envs", "device", "seed", "first_env", "group_size", "render", "compile")


class VecEnv:
    """The contract. `num_envs` rows; tensors in and out live on `device`."""

    num_envs: int
    device: torch.device
    max_episode_steps: int
    single_observation_space = None  # gymnasium.spaces.Dict with a Box under each key of obs
    single_action_space = None  # gymnasium Box or Discrete
    instructions: list[str] = []
    render_rows: int = 0  # how many envs `render` draws
    separate_evaluation: bool = True  # False where a process can hold only one simulation
    holds_inactive: bool = True  # False where a row that is not active is given a zero action instead of held
    checks_options: bool = False  # True where make passes any option on, and the adapter refuses what is wrong
    repeatable_starts: bool = True  # False where the simulator draws starts that a seed does not bring back
    equal_restarts: bool = True  # False where `reset` starts the envs of a group alike, but autoreset does not
    starts_by_index: bool = True  # False where the starts of a process are drawn together, so its size changes them

    def reset(self, episode: int = 0) -> TensorDict:
        """Every env starts its `episode`-th episode."""
        raise NotImplementedError

    def step(self, action: torch.Tensor, active: torch.Tensor | None = None, look: bool = True):
        """One step. A row that is not `active` stays as it is, with reward 0.

        With `look=False` nobody will look at the pictures of `obs`: an env that renders leaves them out. `final_obs`
        still has them in a step that truncates an episode, because the critic values what it saw last.
        """
        raise NotImplementedError

    def render(self) -> torch.Tensor:
        """The first `render` envs (an option of make) as uint8 [render, H, W, 3]."""
        raise NotImplementedError(f"{type(self).__name__} cannot draw itself")

    def state_dict(self) -> dict | None:
        """All that the future depends on, or None if the simulator cannot tell."""
        return None

    def load_state_dict(self, state: dict) -> None:
        raise NotImplementedError(f"{type(self).__name__} cannot restore its state")

    def close(self) -> None:
        pass


def make(env_id: str, num_envs: int, *, device="cpu", seed=0, first_env=0, group_size=1, **options) -> VecEnv:
    """Make `num_envs` copies of an env. What cannot be made is a ValueError that says what can."""
    if num_envs < 1:
        raise ValueError(f"num_envs must be at least 1, not {num_envs}")
    limit = options.get("max_episode_steps")
    if limit is not None and (not isinstance(limit, int) or limit < 1):
        raise ValueError(f"{env_id} has no max_episode_steps {limit!r}: give a number of steps, such as 200")
    backend, slash, name = env_id.partition("/")
    if (backend not in BACKENDS or not name) if slash else (env_id not in EMBEDDED):
        examples = [example for example, _ in BACKENDS.values()]
        hint = closest(env_id, [*EMBEDDED, *examples])
        known = f"give one of {', '.join(EMBEDDED)}, or an id such as {', '.join(examples)}"
        raise ValueError(f"unknown env id {env_id!r}{hint}: {known}")
    args = (name, num_envs) if slash else (num_envs,)
    if slash:
        draw_without_screen()
    try:
        cls = importlib.import_module(f"envs.{backend if slash else EMBEDDED[env_id]}").Env
        check_options(env_id, cls, options)
        env = cls(*args, device=device, seed=seed, first_env=first_env, group_size=group_size, **options)
    except ModuleNotFoundError as error:
        if not slash or (error.name or "").startswith("envs"):
            raise
        raise ValueError(f"{env_id} needs the package {error.name}: {BACKENDS[backend][1]}") from error
    if group_size > 1 and not (env.repeatable_starts and env.starts_by_index):  # an adapter that did not refuse itself
        env.close()
        how = "together" if env.repeatable_starts else "anew each time"
        raise ValueError(f"{env_id}: the simulator draws its starts {how}, so the envs of a group cannot share one")
    return env


def draw_without_screen() -> None:
    """MuJoCo reads MUJOCO_GL when it is imported, so this comes before any adapter."""
    if sys.platform != "linux" or "DISPLAY" in os.environ or "MUJOCO_GL" in os.environ:
        return
    for library, name in (("EGL", "egl"), ("OSMesa", "osmesa")):
        if find_library(library):
            os.environ.setdefault("MUJOCO_GL", name)


def known_options(cls: type) -> dict | None:
    """The options of an adapter with their defaults; None if it takes any and checks them itself."""
    if cls.checks_options:
        return None
    known = {}
    for owner in cls.__mro__:
        if "__init__" not in vars(owner) or owner is object:
            continue
        parameters = inspect.signature(owner.__init__).parameters.values()
        for p in parameters:
            if p.kind is p.KEYWORD_ONLY and p.name not in SET_BY_SCRIPTS:
                known.setdefault(p.name, p.default)
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):  # else the rest goes to the class above
            return known
    return None


def check_options(env_id: str, cls: type, options: dict) -> None:
    """Refuse an option that the adapter does not know, and a value of another kind than the default."""
    known = known_options(cls)
    if known is None:
        return
    for name, value in options.items():
        if name in SET_BY_SCRIPTS:
            continue
        if name not in known:
            raise ValueError(f"{env_id} has no option {name!r}: it has {', '.join(known) or 'none'}")
        default = known[name]
        kinds = (int, float) if type(default) is float else type(default)
        wrong = isinstance(value, bool) != isinstance(default, bool) or not isinstance(value, kinds)
        nothing = value is None and isinstance(default, str)  # such as camera=none
        if default is not None and default is not inspect.Parameter.empty and wrong and not nothing:
            example = f"{name}={default}".lower() if isinstance(default, bool) else f"{name}={default}"
            raise ValueError(f"{env_id} has no {name} {value!r}: give a value such as {example}")


def options(pairs: list[str]) -> dict:
    """`["camera=fixed", "size=64"]`, as a command line gives them -> {"camera": "fixed", "size": 64}."""
    words = {"true": True, "false": False, "none": None}
    found = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not name or not equals:
            raise ValueError(f"--env-options {pair}: give name=value")
        if name in SET_BY_SCRIPTS:
            raise ValueError(f"--env-options {pair}: {name} follows from the other options of the script")
        if name in found:
            raise ValueError(f"--env-options gives {name} twice")
        found[name] = words.get(text.lower(), text)
        for number in (float, int):
            try:
                found[name] = number(text)
            except ValueError:
                pass
    return found


def closest(name: str, known: list[str]) -> str:
    """For an error message about a name that is none of the known ones: those like it, if any."""
    lower = {k.lower(): k for k in known}
    found = difflib.get_close_matches(name.lower(), lower, n=3, cutoff=0.5)
    return f", the closest are {', '.join(lower[k] for k in found)}" if found else ""


def tensordict(parts: dict[str, torch.Tensor], batch_size: torch.Size) -> TensorDict:
    """A TensorDict of tensors whose shapes are known to be right, without the checks: a tenth of the time."""
    return TensorDict._new_unsafe(parts, batch_size)


def episode_seed(seed: int, group: int, episode: int) -> int:
    """The seed of one episode, for simulators that draw a start from a seed: 32 bits, the same on every machine."""
    words = [abs(seed), group, episode]
    if words[0] < 2**32:
        words = np.array(words, np.uint32)  # the same to SeedSequence, in half the time
    return int(np.random.SeedSequence(words).generate_state(1)[0])
