"""What are equal starts worth? grpo_ddp.py with the groups and advantages of EmbodiChain's GRPO, to compare with ours.

The members of a group start in different states (envs.make is told nothing of groups), there are four of them, and
advantages, step by step, are divided by the group's deviation. Everything else is grpo_ddp.py as it stands: this is not
EmbodiChain's own code. The curves and numbers are in docs/grpo_ddp.md ("Beside EmbodiChain's variant").

    python benchmarks/embodichain_grpo.py --seed 1                        # takes the options of grpo_ddp.py
    python benchmarks/embodichain_grpo.py --group-size 8 --no-scale       # nothing but different starts
    python benchmarks/learn.py run grpo_pushcube_embodichain grpo_pushcube_different_starts
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
