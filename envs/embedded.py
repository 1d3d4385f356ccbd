"""The base of the embedded envs: batched torch physics with a clock, autoreset and exact state.

A new env is a subclass with three methods on a dict of [N, ...] tensors (see push_cube.py):
`initial(draws)`, `physics(state, action)` and `observe(state)`; `look(state)` if it shows pictures, `render()` if it
should be seen.
"""

import gymnasium as gym
import torch
from tensordict import TensorDict

from envs import VecEnv

# Odd 64-bit constants with well-spread bits, as the signed numbers that torch's int64 holds.
DRAW, GROUP, EPISODE = (c - 2**64 for c in (0x9E3779B97F4A7C15, 0xD1342543DE82EF95, 0xA0761D6478BD642F))
MIX1, MIX2 = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64


def mix64(x: torch.Tensor) -> torch.Tensor:
    """The splitmix64 finaliser: int64 in, well-mixed int64 out, the same on every device."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * MIX1  # >> keeps the sign, so the copied sign bits are masked away
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * MIX2
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


class EmbeddedEnv(VecEnv):
    """Actions are Box(-1, 1)."""

    start: list[tuple[float, float]]  # centre and width of each uniform draw that makes an initial state

    def __init__(
        self, num_envs, *, device, seed, first_env, group_size, max_episode_steps=None, render=0, compile=False
    ):
        self.num_envs, self.device, self.render_rows = num_envs, torch.device(device), min(render, num_envs)
        self.max_episode_steps = max_episode_steps or self.max_episode_steps
        index = torch.arange(first_env, first_env + num_envs, device=self.device) // group_size
        self._key = mix64(torch.tensor(seed, device=self.device)) + mix64((index + 1) * GROUP)
        self._draws = torch.arange(1, len(self.start) + 1, device=self.device) * DRAW
        self._centre, self._width = torch.tensor(self.start, device=self.device).unbind(1)
        self._episode = torch.zeros(num_envs, dtype=torch.int64, device=self.device)
        self._steps = torch.zeros_like(self._episode)
        self._return = torch.zeros(num_envs, device=self.device)
        self._state: dict[str, torch.Tensor] = {}
        if compile:
            self._move = torch.compile(self._move)
            self._restart = torch.compile(self._restart)
        sample = self.reset()
        if compile:  # now, and not when the first episode ends
            nobody = torch.zeros(num_envs, dtype=torch.bool, device=self.device)
            with torch.no_grad():
                self._restart(nobody, self._state, self._episode, self._steps, self._return)
        boxes = {k: gym.spaces.Box(-float("inf"), float("inf"), v.shape[1:]) for k, v in sample.items()}
        if "rgb" in sample:
            boxes["rgb"] = gym.spaces.Box(0, 255, sample["rgb"].shape[1:], dtype="uint8")
        if "instruction" in sample:
            boxes["instruction"] = gym.spaces.Discrete(len(self.instructions))
        self.single_observation_space = gym.spaces.Dict(boxes)

    def initial(self, draws: torch.Tensor) -> dict[str, torch.Tensor]:
        """The first state of an episode from the draws that `start` describes, [N, len(start)]."""
        raise NotImplementedError

    def physics(self, state: dict, action: torch.Tensor):
        """-> next state, reward, success, failure, metrics. Success and failure end the episode."""
        raise NotImplementedError

    def observe(self, state: dict) -> dict[str, torch.Tensor]:
        raise NotImplementedError

    def look(self, state: dict) -> dict[str, torch.Tensor]:
        """The pictures among the observations: drawn only when somebody looks."""
        return {}

    def survived(self, state: dict) -> torch.Tensor | None:
        """Where reaching the clock is itself the success (balancing); None where it is not."""
        return None

    def _draw_start(self, episode: torch.Tensor) -> torch.Tensor:
        bits = mix64((self._key + (episode + 1) * EPISODE)[:, None] + self._draws)
        uniform = ((bits >> 40) & 0xFFFFFF).float() * 2.0**-24
        return self._centre + self._width * (uniform - 0.5)

    def _observation(self, state: dict, parts: dict, look: bool = True) -> TensorDict:
        if look:
            parts = parts | self.look(state)
        return TensorDict(parts, batch_size=[self.num_envs])

    def reset(self, episode: int = 0) -> TensorDict:
        self._episode = torch.full_like(self._episode, episode)
        self._steps = torch.zeros_like(self._steps)
        self._return = torch.zeros_like(self._return)
        first = self.initial(self._draw_start(self._episode))
        self._state = {k: v.clone(memory_format=torch.contiguous_format) for k, v in first.items()}
        return self._observation(self._state, self.observe(self._state))

    def step(self, action, active=None, look=True):
        moved = self._move(self._state, self._steps, self._return, action, active)
        self._state, self._steps, self._return, parts, reward, success, terminated, truncated, metrics = moved
        done = terminated | truncated
        on_cpu = self.device.type == "cpu"  # elsewhere a look at the data would stall; computing is cheaper
        ended = not on_cpu or bool(done.any())
        final_obs = self._observation(self._state, parts, look or (ended and (not on_cpu or bool(truncated.any()))))
        info = {
            "final_obs": final_obs,
            "episode": {"return": self._return, "length": self._steps, "success": success},
            "metrics": metrics,
        }
        if not ended:
            return final_obs, reward, terminated, truncated, info
        restarted = self._restart(done, self._state, self._episode, self._steps, self._return)
        self._state, self._episode, self._steps, self._return, parts = restarted
        return self._observation(self._state, parts, look), reward, terminated, truncated, info

    def _move(self, state, steps, returns, action, active):
        """One step of every env that is active, as a function of tensors alone."""
        before = state
        state, reward, success, failure, metrics = self.physics(before, action.clamp(-1.0, 1.0))
        if active is None:
            steps = steps + 1
        else:
            state = {k: where(active, v, before[k]) for k, v in state.items()}
            reward, success, failure = reward * active, success & active, failure & active
            steps = steps + active
        terminated = success | failure
        truncated = (steps >= self.max_episode_steps) & ~terminated
        if active is not None:
            truncated = truncated & active
        survived = self.survived(state)
        if survived is not None:
            success = truncated & survived
        parts = self.observe(state)
        return state, steps, returns + reward, parts, reward, success.float(), terminated, truncated, metrics

    def _restart(self, done, state, episode, steps, returns):
        """Start the next episode where one is done."""
        episode = episode + done
        first = self.initial(self._draw_start(episode))
        state = {k: where(done, first[k], v) for k, v in state.items()}
        return state, episode, steps * ~done, returns * ~done, self.observe(state)

    def state_dict(self) -> dict:
        state = {f"state.{k}": v.clone() for k, v in self._state.items()}
        return state | {"episode": self._episode.clone(), "steps": self._steps.clone(), "return": self._return.clone()}

    def load_state_dict(self, state: dict) -> None:
        state = {k: v.to(self.device, copy=True) for k, v in state.items()}
        self._episode, self._steps, self._return = (state.pop(k) for k in ("episode", "steps", "return"))
        self._state = {k.removeprefix("state."): v for k, v in state.items()}


def where(rows: torch.Tensor, new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    return torch.where(rows.view(-1, *[1] * (new.dim() - 1)), new, old)


def pixels(size: int, low: float, high: float, device) -> torch.Tensor:
    """World coordinates of the pixel centres of a square picture, [size, size, 2], y up."""
    line = low + (torch.arange(size, device=device) + 0.5) * (high - low) / size
    return torch.stack(torch.meshgrid(line.flip(0), line, indexing="ij")[::-1], dim=-1)


def paint(image: torch.Tensor, inside: torch.Tensor, colour: tuple[float, float, float]) -> torch.Tensor:
    """Give the pixels [n, H, W] where `inside` holds a colour."""
    return torch.where(inside[..., None], torch.tensor(colour, device=image.device), image)
