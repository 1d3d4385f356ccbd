"""Runs a script's main() under a launcher, with what a test wants to see recorded, one file per rank.

torchrun ... tests/worker.py SCRIPT CASE OUTPUT '{"num_envs": 4}'
"""

import importlib
import json
import os
import sys
import time
from pathlib import Path

import torch

name, case, output, changes = sys.argv[1:5]
script = importlib.import_module(name)
rank = int(os.environ.get("RANK", 0))
changes = json.loads(changes)
for key, value in changes.items():
    if isinstance(value, list):  # one for each rank
        changes[key] = value[rank]
mute = changes.pop("mute", 0)  # the first so many envs earn nothing
args = script.Args(**({"output_dir": output, "run_name": "run", "eval_episodes": 4, "timeout": 60.0} | changes))
record = {"updates": 0, "batches": [], "gradients": []}
agents = []

init, forward = script.Agent.__init__, script.Agent.forward
save = torch.save
loss_name = next(k for k in ("ppo_loss", "grpo_loss") if hasattr(script, k))
loss_fn, step = getattr(script, loss_name), torch.optim.Adam.step


def recording_init(self, *a, **k):
    init(self, *a, **k)
    agents.append(self)
    record["initial"] = {k: v.clone() for k, v in self.state_dict().items()}


def recording_forward(self, obs, action=None, deterministic=False):
    if torch.is_grad_enabled() and action is not None and case == "gradient":
        record["batches"].append({"obs": obs.clone(), "action": action.clone()})
    return forward(self, obs, action, deterministic)


def recording_loss(*inputs):
    loss, logged = loss_fn(*inputs)
    if case == "gradient":
        record["batches"][-1]["inputs"] = [x.detach().clone() if torch.is_tensor(x) else x for x in inputs]
    if case == "kl":
        logged = logged + 0
        logged[script.LOSSES.index("losses/approx_kl")] = 1e3 if rank == 1 else 0.0
    if case == "nan" and rank == 1 and record["updates"] == 1:
        loss = loss * float("nan")
    return loss, logged


def recording_step(self, *a, **k):
    record["updates"] += 1
    if case == "gradient":
        record["gradients"].append([p.grad.clone() for p in agents[0].parameters()])
    if case == "corrupt" and rank == 1 and record["updates"] == 5:
        next(agents[0].parameters()).data.view(-1)[0] += 1e-7
    return step(self, *a, **k)


script.Agent.__init__, script.Agent.forward = recording_init, recording_forward
setattr(script, loss_name, recording_loss)
torch.optim.Adam.step = recording_step
if case in ("gradient", "shared"):
    script.check_batch = lambda args: None  # sizes that no user may ask for
if case == "shared":
    # The same noise for the same env and step, whatever process it lives in.
    first, calls = changes.pop("first_env", rank * args.num_envs), [0]

    def noise(x):
        calls[0] += 1
        rows = torch.arange(first, first + x.shape[0])[:, None] * 13.7 + torch.arange(x.shape[1]) * 5.1
        return torch.sin(rows + calls[0] * 2.3) * 1.5

    torch.randn_like = noise
make = script.envs.make


def recording_make(*a, **k):
    env = make(*a, **k)
    if k.get("seed") == args.seed:
        reset, env_step = env.reset, env.step

        def recording_reset(*a, **k):
            obs = reset(*a, **k)
            record.setdefault("start", obs["state"].clone())
            record.setdefault("starts", []).append(obs["state"].clone())
            return obs

        def broken_step(*a, **k):
            if case == "slow":
                time.sleep(0.012 if rank == 1 else 0.002)
            if case == "even":
                time.sleep(0.003)
            obs, reward, *rest = env_step(*a, **k)
            reward[:mute] = 0.0
            record["steps"] = record.get("steps", 0) + 1
            if record["steps"] == 20 and rank == 1:
                if case == "env_nan":
                    reward[0] = float("nan")
                if case == "env_error":
                    raise RuntimeError("the simulator broke")
            return obs, reward, *rest

        env.reset, env.step = recording_reset, broken_step
    return env


script.envs.make = recording_make
if case in ("disk_of_rank_1", "manifest_of_rank_0"):
    failing = "torch.save" if case == "disk_of_rank_1" else "digest"
    real, calls = (torch.save if failing == "torch.save" else script.digest), []

    def full_disk(*a):
        calls.append(a)
        if case.endswith(str(rank)) and len(calls) > (2 if failing == "torch.save" else 2 * 4):
            raise OSError(28, "No space left on device")
        return real(*a)

    if failing == "digest":
        script.digest = full_disk
    else:
        torch.save = full_disk
try:
    script.main(args)
finally:
    record["final"] = {k: v.clone() for k, v in agents[0].state_dict().items()}
    Path(output).mkdir(parents=True, exist_ok=True)
    torch.save = save
    torch.save(record, f"{output}/record_{rank}.pt")
