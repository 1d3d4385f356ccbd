"""TabletopMemory: Tabletop in which the colour is named once, and then has to be remembered.

The first observation of an episode has the instruction, all later ones "reach the block that is told". The effector
is held in the first step, so that where it stands later tells nothing; and the first block that it reaches ends the
episode, in success or failure, so that trying one after the other is no way out: without memory a third of the episodes
succeed.

There is no picture unless `camera` is "wrist" or "fixed": `state` tells where the blocks are.
"""

import torch

from envs import tabletop
from envs.tabletop import COLOURS, REACH


class Env(tabletop.Env):
    instructions = [*tabletop.Env.instructions, "reach the block that is told"]

    def __init__(self, *args, camera=None, **options):
        super().__init__(*args, camera=camera, **options)

    def initial(self, draws):
        return super().initial(draws) | {"told": torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)}

    def physics(self, state, action):
        held = action * state["told"][:, None]
        after, reward, success, _, metrics = super().physics(state, held)
        reached = (after["blocks"] - after["effector"][:, None]).norm(dim=2) < REACH
        failure = reached.any(1) & ~success
        return after | {"told": torch.ones_like(state["told"])}, reward, success, failure, metrics

    def observe(self, state):
        seen = super().observe(state)
        return seen | {"instruction": torch.where(state["told"], len(COLOURS), state["task"])}
