"""Whether a policy looks: does the hand go where the thing is, or to the same place every time?

python benchmarks/vla_sees.py runs/NAME...    # runs of ppo_vla_async.py with PI0 on MetaWorld

For every task, unseen starts are played without noise, and the hand's x is read where it comes nearest to the thing.
Its slope against the thing's own x is 1 for a hand that follows the thing, and 0 for a policy that is blind to it.
"""

import json
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
import envs  # noqa: E402
import ppo_vla_async as vla  # noqa: E402

STARTS = 32  # of each task
HAND = slice(0, 3)  # in MetaWorld's privileged numbers
THING = slice(4, 7)


def load(run: Path) -> tuple[vla.FlowAgent, envs.VecEnv]:
    args = vla.Args(**json.loads((run / "args.json").read_text()))
    tasks = args.env_id.count(",") + 1
    options = envs.options(args.env_options)
    env = envs.make(args.env_id, tasks * STARTS, device="cpu", seed=vla.EVAL_SEED, **options)
    return vla.FlowAgent(env, str(run / "policy"), args).eval(), env


@torch.no_grad()
def play(agent: vla.FlowAgent, env: envs.VecEnv) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """-> x of the things [N], x of the hands where they are nearest [N], success [N]"""
    obs = env.reset()
    thing = obs["privileged"][:, THING]
    nearest = torch.full((env.num_envs,), torch.inf)
    hand_x = torch.zeros(env.num_envs)
    success = torch.zeros(env.num_envs)
    active = torch.ones(env.num_envs, dtype=torch.bool)
    generator = torch.Generator().manual_seed(0)
    while active.any():
        drawn = agent(agent.see(obs), deterministic=True, generator=generator)[0]
        for number, action in enumerate(agent.actions(drawn).unbind(1), 1):
            hand = obs["privileged"][:, HAND]
            distance = (hand - thing).norm(dim=1)
            nearer = active & (distance < nearest)
            nearest = torch.where(nearer, distance, nearest)
            hand_x = torch.where(nearer, hand[:, 0], hand_x)
            obs, _, terminated, truncated, info = env.step(action, active, look=number == agent.executed)
            ended = (terminated | truncated) & active
            success = torch.where(ended, info["episode"]["success"].float(), success)
            active = active & ~ended
    return thing[:, 0], hand_x, success


def main(runs: list[str]) -> None:
    torch.set_num_threads(1)
    print("| run | task | success | slope |")
    print("|---|---|---|---|")
    for run in runs:
        agent, env = load(Path(run))
        told = env.reset()["instruction"]
        thing, hand, success = play(agent, env)
        for number, instruction in enumerate(env.instructions):
            rows = told == number
            x = thing[rows] - thing[rows].mean()
            slope = (x * hand[rows]).sum() / x.square().sum()
            print(f"| {Path(run).name} | {instruction} | {success[rows].mean():.2f} | {slope:.2f} |", flush=True)
        env.close()


if __name__ == "__main__":
    main(sys.argv[1:])
