"""EmbodiChain's variant of GRPO on grpo_ddp.py, to be compared with ours: the members of a group start in different
states, four to a group, advantages step by step and divided by the group's deviation. All else is as in grpo_ddp.py.

python benchmarks/embodichain_grpo.py --seed 1        # takes the options of grpo_ddp.py
"""

import sys
from pathlib import Path

import tyro

sys.path.insert(0, str(Path(__file__).parent.parent))
import envs  # noqa: E402
import grpo_ddp  # noqa: E402

make = envs.make


def with_different_starts(*args, group_size=1, **options) -> envs.VecEnv:
    return make(*args, **options)


if __name__ == "__main__":
    envs.make = with_different_starts
    grpo_ddp.main(tyro.cli(grpo_ddp.Args, default=grpo_ddp.Args(group_size=4, advantage="step", scale=True)))
