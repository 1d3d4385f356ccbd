"""A small cost model of ppo_ddp.py on many ranks, from what one and two processes measure on this machine.

    python benchmarks/scaling.py

It runs the default task with one process, with two, and with two independent ones at the same time, which are the
limit that the machine sets to two. From the seconds of a rollout and of an update, their spread, and the bytes of an
all-reduce it predicts the efficiency (samples per second and rank, against one process alone).
"""

import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
import envs  # noqa: E402
import ppo_ddp  # noqa: E402

# Assumptions, by name: seconds of latency of one message, bytes per second of one link.
NETWORKS = {"NVLink or InfiniBand": (15e-6, 20e9), "10 Gbit/s Ethernet": (50e-6, 1.1e9)}


def measure(nproc: int, runs: int = 1) -> dict[str, list[float]]:
    """Seconds of each iteration but the first few, from the events of `runs` runs at the same time."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    launcher = [sys.executable] if nproc == 1 else ["torchrun", "--standalone", "--nproc_per_node", str(nproc)]
    seconds = {"rollout": [], "update": [], "wait": []}
    with tempfile.TemporaryDirectory() as folder:
        options = ["--output-dir", folder, "--total-timesteps", str(400_000 * nproc)]
        commands = [[*launcher, "ppo_ddp.py", *options, "--run-name", f"run_{number}"] for number in range(runs)]
        processes = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) for command in commands]
        if any([process.wait() for process in processes]):
            sys.exit("error: a run failed")
        for number in range(runs):
            events = EventAccumulator(str(Path(folder) / f"run_{number}"), size_guidance={"scalars": 0})
            events.Reload()
            for part, values in seconds.items():
                values += [e.value for e in events.Scalars(f"time/{part}")][5:]
    return seconds


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def main() -> None:
    args = ppo_ddp.Args()
    agent = ppo_ddp.Agent(envs.make(args.env_id, 1), args)
    size = 4 * sum(p.numel() for p in agent.parameters())
    updates = args.update_epochs * args.num_minibatches
    one, two, independent = measure(1), measure(2), measure(1, runs=2)
    rollout, update = mean(one["rollout"]), mean(one["update"])
    iteration = {"two": sum(mean(x) for x in two.values()), "limit": sum(mean(x) for x in independent.values())}
    spread = torch.tensor(one["rollout"]).std().item()
    found = {
        "rollout_ms": 1e3 * rollout,
        "rollout_spread_ms": 1e3 * spread,
        "update_ms": 1e3 * update,
        "allreduces_per_iteration": updates + 2,
        "bytes_per_allreduce": size,
        "two_processes_update_ms": 1e3 * mean(two["update"]),
        "two_processes_efficiency": (rollout + update) / iteration["two"],
        "two_independent_runs_efficiency": (rollout + update) / iteration["limit"],
    }
    print(json.dumps(found, indent=1))
    print("| network | 8 ranks | 64 ranks | 512 ranks |\n|---|---|---|---|")
    for network, (latency, bandwidth) in NETWORKS.items():
        cells = []
        for world in (8, 64, 512):
            # A tree of messages up and down for the latency, a ring's traffic for the bytes, at every minibatch; and
            # the slowest of `world` rollouts, which for a normal spread lies sqrt(2 ln world) deviations late.
            allreduce = 2 * math.ceil(math.log2(world)) * latency + 2 * (world - 1) / world * size / bandwidth
            wait = spread * math.sqrt(2 * math.log(world))
            cells.append(f"{(rollout + update) / (rollout + update + (updates + 2) * allreduce + wait):.0%}")
        print(f"| {network} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
