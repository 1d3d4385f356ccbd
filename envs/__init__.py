"""Environments: the only code that tandem's scripts share, all behind one contract.

    env = envs.make("PushCube", num_envs=128, seed=1)       # embedded: pure torch, batched, on any device
    env = envs.make("gym/Hopper-v5", num_envs=8, seed=1)    # the part before the slash names the file that serves it

    obs = env.reset()
    obs, reward, terminated, truncated, info = env.step(action)

- `obs` is a TensorDict of batch size [N]: `state` [N, d]; where the env has them also `rgb` uint8 [N, H, W, 3],
  `instruction` [N] (an index into `env.instructions`) and `privileged` [N, k] (only the critic may see it).
- `reward` float32 [N], `terminated` and `truncated` bool [N]. Success and failure terminate; the clock truncates.
- Autoreset happens in the same step: where `terminated | truncated`, `obs` is already the first one of the next
  episode, and `info["final_obs"]` (full batch, valid at those rows) is the last one of the old episode. It is None
  if the simulator does not give it.
- `info["episode"]` holds `return`, `length` and `success` of [N], raw, valid where an episode ended; `success` is NaN
  if the env does not know it. `info["metrics"]` holds further [N] tensors, always under the same names.
- Randomness belongs to the global env index: env `first_env + i` starts the same episodes whatever the number of
  processes; two envs with the same `index // group_size` start them in the same state.
- The action goes in as sampled: clipping it to the space is the env's business.
"""

import importlib

import torch
from tensordict import TensorDict

EMBEDDED = {"CartPole": "cartpole", "PushCube": "push_cube", "Tabletop": "tabletop"}
BACKENDS = {"gym": "any Gymnasium id with Box observations, such as gym/HalfCheetah-v5"}


class VecEnv:
    """The contract. `num_envs` rows; tensors in and out live on `device`."""

    num_envs: int
    device: torch.device
    max_episode_steps: int
    single_observation_space = None  # gymnasium.spaces.Dict with a Box under each key of obs
    single_action_space = None  # gymnasium Box or Discrete
    instructions: list[str] = []
    render_rows: int = 0  # how many envs `render` draws

    def reset(self, episode: int = 0) -> TensorDict:
        """Every env starts its `episode`-th episode."""
        raise NotImplementedError

    def step(self, action: torch.Tensor, active: torch.Tensor | None = None):
        """One step. A row that is not `active` stays as it is, with reward 0."""
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
    """Make `num_envs` copies of an env. An id that cannot be made is a ValueError that says what can."""
    if num_envs < 1:
        raise ValueError(f"num_envs must be at least 1, not {num_envs}")
    backend, slash, name = env_id.partition("/")
    known = f"one of {', '.join(EMBEDDED)}, or " + "; ".join(BACKENDS.values())
    if (backend not in BACKENDS or not name) if slash else (env_id not in EMBEDDED):
        raise ValueError(f"unknown env id {env_id!r}: give {known}")
    module = importlib.import_module(f"envs.{backend if slash else EMBEDDED[env_id]}")
    cls = module.Env
    args = (name,) if slash else ()
    return cls(*args, num_envs, device=device, seed=seed, first_env=first_env, group_size=group_size, **options)
