"""Tabletop: the end effector of an arm goes to the block that the instruction names, by sight.

Three blocks, one of each colour, stand around the middle of a table in an arbitrary order. The observation is a 64 x 64
picture and the instruction; the action is a step in the plane. The episode ends in success when the effector is within
0.12 m of the centre of the named block, and by the clock after 16 steps. The reward is 1 for success plus 5 times the
progress towards that block in metres.

The camera rides on the effector (`camera="wrist"`), so the picture shows where things are as seen from the hand; with
`camera="fixed"` it hangs above the table and sees the effector as a white disc: much harder to learn from. With
`camera=None` there is no picture: `state` tells where the blocks are as seen from the hand, in the order of COLOURS.

All instructions have the same number of letters and end with the colour: nothing but the word tells the task.
"""

import math
from itertools import permutations

import gymnasium as gym
import torch

from envs.embedded import EmbeddedEnv, paint, pixels

COLOURS = {"ruby": (1.0, 0.0, 0.0), "lime": (0.0, 1.0, 0.0), "blue": (0.0, 0.0, 1.0)}
TABLE, HALF, RADIUS = 1.0, 0.18, 0.05  # m: half the table's side, half a block's side, the effector's radius
REACH, SPEED, VIEW = 0.12, 0.1, 1.0  # m: success, the longest step, half the side of the wrist camera's picture
SIZE = 64  # pixels


class Env(EmbeddedEnv):
    max_episode_steps = 16
    # effector x, y; a turn of all blocks, and of each alone; their distances from the middle; which colour where; task
    start = [
        (0.0, 0.4),
        (0.0, 0.4),
        (0.0, 2 * math.pi / 3),
        *[(0.0, 0.6)] * 3,
        *[(0.68, 0.3)] * 3,
        (3.0, 6.0),
        (1.5, 3.0),
    ]
    single_action_space = gym.spaces.Box(-1.0, 1.0, (2,))
    instructions = [f"reach the block that is {name}" for name in COLOURS]

    def __init__(self, *args, device, camera="wrist", **options):
        if camera not in ("wrist", "fixed", None):
            raise ValueError(f"Tabletop has a wrist and a fixed camera, or none, not {camera!r}")
        self.camera = camera
        self._orders = torch.tensor(list(permutations(range(len(COLOURS)))), device=device)
        palette = [(0.5, 0.5, 0.5), *COLOURS.values(), (0.2, 0.2, 0.2), (1.0, 1.0, 1.0)]  # table, blocks, beyond, hand
        self._palette = (torch.tensor(palette, device=device) * 255).to(torch.uint8)
        self._numbers = torch.arange(1, len(COLOURS) + 1, dtype=torch.uint8, device=device).view(-1, 1, 1)
        self._thirds = torch.arange(3, device=device) * (2 * math.pi / 3)
        self._line = pixels(SIZE, -VIEW, VIEW, device)[0, :, 0]  # m from the middle of the picture
        super().__init__(*args, device=device, **options)

    def initial(self, draws):
        angle = draws[:, 2:3] + draws[:, 3:6] + self._thirds
        place = draws[:, 6:9, None] * torch.stack([angle.cos(), angle.sin()], -1)
        order = self._orders[draws[:, 9].long().clamp(0, 5)]
        blocks = place.gather(1, order[..., None].expand(-1, -1, 2))  # [N, 3, 2]: in the order of COLOURS
        return {"effector": draws[:, :2], "blocks": blocks, "task": draws[:, 10].long().clamp(0, 2)}

    def _target(self, state):
        return state["blocks"][torch.arange(self.num_envs, device=self.device), state["task"]]

    def physics(self, state, action):
        target = self._target(state)
        effector = (state["effector"] + SPEED * action).clamp(-TABLE, TABLE)
        before, after = ((target - e).norm(dim=1) for e in (state["effector"], effector))
        success = after < REACH
        reward = success + 5.0 * (before - after)
        return state | {"effector": effector}, reward, success, torch.zeros_like(success), {"distance": after}

    def expert_action(self) -> torch.Tensor:
        """Straight to the named block."""
        offset = (self._target(self._state) - self._state["effector"]) / SPEED
        return offset / offset.norm(dim=1, keepdim=True).clamp(min=1.0)

    def _picture(self, state) -> torch.Tensor:
        """-> uint8 [N, 64, 64, 3]: the table, the blocks by colour, and what is beyond the table."""
        hand = state["effector"] if self.camera == "wrist" else torch.zeros_like(state["effector"])
        # Everything is a square along the axes: columns and rows of the picture, then where the two meet.
        columns, rows = self._line + hand[:, :1], self._line.flip(0) + hand[:, 1:]  # [N, 64]
        x, y = state["blocks"].unsqueeze(-1).unbind(2)  # [N, 3, 1]
        block = ((rows[:, None] - y).abs() < HALF)[..., None] & ((columns[:, None] - x).abs() < HALF)[:, :, None]
        paint = (block * self._numbers).amax(1)  # [N, 64, 64]: which of the colours, or none
        paint[(columns.abs() > TABLE)[:, None] | (rows.abs() > TABLE)[..., None]] = len(COLOURS) + 1
        if self.camera == "fixed":
            dx, dy = columns - state["effector"][:, :1], rows - state["effector"][:, 1:]
            paint[dx.square()[:, None] + dy.square()[..., None] < RADIUS**2] = len(COLOURS) + 2
        return self._palette[paint.long()]

    def observe(self, state):
        seen = state["effector"]
        if self.camera is None:
            seen = torch.cat([seen, (state["blocks"] - seen[:, None]).flatten(1)], 1)
        return {"state": seen, "instruction": state["task"]}

    def look(self, state):
        return {"rgb": self._picture(state)} if self.camera else {}

    def render(self):
        rows = {k: v[: self.render_rows] for k, v in self._state.items()}
        hand, points = rows["effector"][:, None, None], pixels(128, -TABLE, TABLE, self.device)
        image = torch.full((len(hand), 128, 128, 3), 0.5, device=self.device)
        for i, colour in enumerate(COLOURS.values()):
            image = paint(image, (points - rows["blocks"][:, i, None, None]).abs().amax(-1) < HALF, colour)
        image = paint(image, (points - hand).square().sum(-1) < RADIUS**2, (1.0, 1.0, 1.0))
        image[:, :, -1] = 0.6  # a line between the pictures of a video
        return (image * 255).to(torch.uint8)
