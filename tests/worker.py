"""Runs a script's main() under a launcher, with what a test wants to see recorded, one file per rank.

torchrun ... tests/worker.py SCRIPT CASE OUTPUT '{"num_envs": 4}'
torchrun ... tests/worker.py FOLDER      # one job after the other, as their files FOLDER/0.json, 1.json, ... appear

Such a job is one of the above, or a script's command line as it is; with "ok": false all ranks are to leave it with an
error message. What a rank prints is in FOLDER/0.out_<rank>, ...
"""

import gc
import importlib
import json
import os
import sys
import time
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from unittest import mock

import psutil
import torch
import tyro
from accelerate.state import AcceleratorState

rank = int(os.environ.get("RANK", 0))


def run(name: str, case: str, output: str, changes: dict) -> None:
    script = importlib.import_module(name)
    for key, value in changes.items():
        if isinstance(value, list):  # one for each rank
            changes[key] = value[rank]
    mute = changes.pop("mute", 0)  # the first so many envs earn nothing
    args = script.Args(**({"output_dir": output, "run_name": "run", "eval_episodes": 4, "timeout": 60.0} | changes))
    record, agents = {"updates": 0, "batches": [], "gradients": []}, []
    if name == "ppo_vla_async":
        policy = script.FlowAgent if args.model_path == "tiny-pi0" else script.TokenAgent
    else:
        policy = script.Agent
    init, forward, make = policy.__init__, policy.forward, script.envs.make
    loss_name = next(k for k in ("ppo_loss", "grpo_loss", "vla_loss") if hasattr(script, k))
    # The class that the script makes: torch wraps the step of that one, and would keep another job's.
    optimizer = torch.optim.AdamW if name == "ppo_vla_async" else torch.optim.Adam
    loss_fn, step, save = getattr(script, loss_name), optimizer.step, torch.save
    learn = script.Learner.forward if name == "ppo_lstm_ddp" else None

    def recording_init(self, *a, **k):
        init(self, *a, **k)
        if case == "weights" and rank == 1:  # as another processor might draw them
            torch.nn.init.constant_(next(self.parameters()), 0.1)
        agents.append(self)
        record["initial"] = {k: v.clone() for k, v in self.state_dict().items()}

    def recording_forward(self, seen, action=None, *rest, **named):
        if torch.is_grad_enabled() and action is not None and case == "gradient":
            record["batches"].append({"seen": seen.clone(), "action": action.clone()})
        return forward(self, seen, action, *rest, **named)

    def recording_learner(self, **minibatch):
        result = learn(self, **minibatch)
        if case == "gradient":
            record["batches"][-1] |= {k: x.clone() for k, x in minibatch.items()}
        return result

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
            record["gradients"].append([p.grad.clone() for p in agents[0].parameters() if p.requires_grad])
            record.setdefault("weights", []).append({k: v.clone() for k, v in agents[0].state_dict().items()})
        if case == "corrupt" and rank == 1 and record["updates"] == 5:
            next(agents[0].parameters()).data.view(-1)[0] += 1e-7
        return step(self, *a, **k)

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
                    time.sleep(0.018 if rank == 1 else 0.003)
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

    calls = []

    def shared_noise(x):
        """The same for the same env and step, whatever process it lives in."""
        calls.append(1)
        first = rank * args.num_envs
        rows = torch.arange(first, first + x.shape[0])[:, None] * 13.7 + torch.arange(x.shape[1]) * 5.1
        return torch.sin(rows + len(calls) * 2.3) * 1.5

    def full_disk(real, enough):
        def writing(*a):
            calls.append(1)
            if case.endswith(str(rank)) and len(calls) > enough:
                raise OSError(28, "No space left on device")
            return real(*a)

        return writing

    with ExitStack() as patches:

        def patch(owner, attribute, value):
            patches.enter_context(mock.patch.object(owner, attribute, value))

        patch(policy, "__init__", recording_init)
        patch(policy, "forward", recording_forward)
        patch(script, loss_name, recording_loss)
        patch(optimizer, "step", recording_step)
        patch(script.envs, "make", recording_make)
        if learn:
            patch(script.Learner, "forward", recording_learner)
        for check in ("check_batch", "check_sequences"):
            if case in ("gradient", "shared") and hasattr(script, check):
                patch(script, check, lambda args: None)  # sizes that no user may ask for
        if case == "shared":
            patch(torch, "randn_like", shared_noise)
        if case == "disk_of_rank_1":
            patch(torch, "save", full_disk(torch.save, 2))
        if case == "manifest_of_rank_0":
            patch(script, "digest", full_disk(script.digest, 2 * 4))
        try:
            script.main(args)
        finally:
            record["final"] = {k: v.clone() for k, v in agents[0].state_dict().items()}
            Path(output).mkdir(parents=True, exist_ok=True)
            save(record, f"{output}/record_{rank}.pt")


def command(name: str, options: list, launch: str) -> None:
    """A script as its users start it. To the run's folder, each job is a launch of its own."""
    script = importlib.import_module(name)
    with mock.patch.object(script, "launcher_name", lambda: launch):
        script.main(tyro.cli(script.Args, args=[str(x) for x in options]))


if len(sys.argv) > 2:
    name, case, output, changes = sys.argv[1:5]
    run(name, case, output, json.loads(changes))
else:
    number, folder = 0, Path(sys.argv[1])
    owner = int((folder / "owner").read_text())
    while True:
        file = folder / f"{number}.json"
        while not file.exists():
            time.sleep(0.02)
            if os.getppid() == 1 or not psutil.pid_exists(owner):
                sys.exit()
        # As after a restart: the process group starts anew, under a name of its own in torchrun's store.
        AcceleratorState._reset_state(reset_partial_state=True)
        job = json.loads(file.read_text())
        ok = job.pop("ok", True)
        with file.with_suffix(f".out_{rank}").open("w", buffering=1) as output, redirect_stdout(output):
            try:
                if "case" in job:
                    run(**job)
                else:
                    command(**job, launch=str(file))
                stopped = None
            except SystemExit as stop:  # another exception ends this launch, and the test that it is for
                stopped = stop.code
            print(stopped or "")
        assert bool(stopped) != ok, stopped
        gc.collect()  # what a run that was left in the middle still holds
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        file.with_suffix(f".done_{rank}").touch()
        number += 1
