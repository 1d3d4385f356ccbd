"""A run that survives: exact resume, killed ranks, signals, damaged files, stragglers."""

import contextlib
import gc
import io
import json
import os
import random
import re
import shutil
import signal
import sys
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
import tyro
from accelerate import Accelerator
from conftest import Process, forkserver, free_port, script, workers
from safetensors.torch import load_file, save_file
from test_distributed import worker

import ppo_ddp

SMALL = "--num-envs 8 --num-steps 16 --num-minibatches 4 --update-epochs 2 --eval-episodes 8 --norm-reward".split()
STEPS = 8 * 16  # of one process in an iteration


def checkpoint(folder: Path) -> dict:
    """All that a checkpoint holds, by name."""
    content = {f"model.{k}": v for k, v in load_file(folder / "model.safetensors").items()}
    for file in sorted(folder.glob("*.pt")):
        content[file.stem] = torch.load(file, weights_only=True)
    return content


def assert_same(one, two, where=""):
    """Bit for bit, through dicts and lists."""
    assert type(one) is type(two), where
    if isinstance(one, dict):
        assert one.keys() == two.keys(), where
        for k in one:
            assert_same(one[k], two[k], f"{where}.{k}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(two), where
        for i, (a, b) in enumerate(zip(one, two)):
            assert_same(a, b, f"{where}.{i}")
    elif torch.is_tensor(one):
        assert one.dtype == two.dtype and torch.equal(one.nan_to_num(-1.5), two.nan_to_num(-1.5)), where
    else:
        assert one == two or (one != one and two != two), where


def newest(run_dir: Path) -> Path:
    return run_dir / "checkpoints" / (run_dir / "checkpoints" / "latest").read_text()


def scores(run_dir: Path) -> dict:
    """The metrics of a finished run that time has no part in."""
    summary = json.loads((run_dir / "summary.json").read_text())
    return {k: v for k, v in summary.items() if re.match("losses/|eval/|env/|charts/(?!SPS)|global_step", k)}


def train(tmp_path, nproc, name, iterations, *options):
    """Run the script, in the processes of a torchrun if there are several; its output."""
    if nproc == 1:
        return train_here(tmp_path, name, iterations, *options)
    total = ["--total-timesteps", STEPS * nproc * iterations]
    where = ["--output-dir", tmp_path, "--run-name", name]
    return workers[nproc].run(name="ppo_ddp", options=[*SMALL, *where, *total, *options])


def train_here(tmp_path, name, iterations, *options, ok=True, log=None):
    """The same in this process; `log` takes the output as it comes."""
    options = ["--output-dir", tmp_path, "--run-name", name, "--total-timesteps", STEPS * iterations, *options]
    args = tyro.cli(ppo_ddp.Args, args=[str(x) for x in (*SMALL, *options)])
    with contextlib.redirect_stdout(log.open("w", buffering=1) if log else io.StringIO()) as output:
        if ok:
            ppo_ddp.main(args)
            return output.getvalue()
        with pytest.raises(SystemExit) as stopped:
            ppo_ddp.main(args)
    assert isinstance(stopped.value.code, str) and stopped.value.code.count("\n") == 0
    return stopped.value.code


def cut_back(run_dir: Path, name: str, step: int) -> Path:
    """A copy of a run as it was when this step had just been saved."""
    copy = Path(shutil.copytree(run_dir, run_dir.parent / name))
    for folder in copy.glob("checkpoints/step_*"):
        if int(folder.name.removeprefix("step_")) > step:
            shutil.rmtree(folder)
    (copy / "checkpoints" / "latest").write_text(f"step_{step}")
    return copy


@pytest.mark.parametrize("nproc", [pytest.param(1, marks=pytest.mark.smoke), 3])
def test_resume_is_exact(tmp_path, nproc):
    """2K iterations at once, and K more from a checkpoint: the same bits in weights, optimizer, statistics, metrics.

    Three processes because with two a sum has only one order: DDP's regrouping of gradients would go unseen.
    """
    options = ["--hidden-size", 32, "--save-interval", 1, "--keep-checkpoints", 100]
    go = partial(train, tmp_path, nproc)
    go("whole", 6, *options)
    parts = cut_back(tmp_path / "whole", "parts", STEPS * nproc * 3)
    text = go("parts", 6, *options, "--check-interval", 2, "--resume", "auto")
    assert f"resuming {parts}/checkpoints/step_{STEPS * nproc * 3}" in text
    assert "--check-interval is 2, was 10" in text  # what differs from the checkpoint is listed
    assert newest(tmp_path / "whole").name == newest(parts).name == f"step_{STEPS * nproc * 6}"
    assert_same(checkpoint(newest(tmp_path / "whole")), checkpoint(newest(parts)))
    assert_same(scores(tmp_path / "whole"), scores(parts))


def test_resume_of_mujoco_is_exact(tmp_path):
    options = ["--lr-schedule", "constant", "--env-id", "gym/Hopper-v5", "--eval-episodes", 2]
    train_here(tmp_path, "whole", 4, *options)
    train_here(tmp_path, "parts", 2, *options)
    text = train_here(tmp_path, "parts", 4, *options, "--resume", tmp_path / "parts")
    assert "bit for bit" not in text
    one, two = checkpoint(newest(tmp_path / "whole")), checkpoint(newest(tmp_path / "parts"))
    for saved in (one, two):  # the first part ended with an evaluation of its own
        saved["trainer"].pop("best"), saved["trainer"].pop("best_step")
    assert_same(one, two)


def test_a_simulator_without_state_starts_anew_and_says_so(tmp_path):
    options = ["--env-id", "gym/CartPole-v1", "--eval-episodes", 2]
    train_here(tmp_path, "run", 2, *options)
    assert "gym/CartPole-v1 cannot save its state" in train_here(tmp_path, "run", 4, *options, "--resume", "auto")


def tensorboard_steps(run_dir: Path) -> list[int]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir))
    events.Reload()
    return [e.step for e in events.Scalars("charts/learning_rate")]


@pytest.mark.parametrize("before, after", [(2, 1), (1, 2)])
def test_another_number_of_processes_goes_on(tmp_path, before, after):
    """Model, optimizer, statistics and counters are taken over; envs start anew, and the console says so."""
    options = ["--lr-schedule", "constant", "--save-interval", 1, "--keep-checkpoints", 100]
    train(tmp_path, before, "run", 2, *options)
    old = newest(tmp_path / "run")
    time.sleep(1.1)  # TensorBoard reads its files in the order of the seconds in their names
    total = ["--total-timesteps", 1280]
    text = train(tmp_path, after, "run", 0, *options, *total, "--resume", tmp_path / "run")
    assert f"{before} processes became {after}: the run goes on, but not bit for bit" in text
    steps = tensorboard_steps(tmp_path / "run")
    assert steps == sorted(set(steps)) and steps[-1] >= 1280  # one axis, nothing twice
    start, end = (checkpoint(f)["trainer"] for f in (old, newest(tmp_path / "run")))
    assert end["iteration"] == start["iteration"] + (1280 - start["global_step"]) // (STEPS * after)
    count = load_file(newest(tmp_path / "run") / "model.safetensors")["obs_moments.state.count"]
    assert count == end["global_step"]


def test_keeps_the_newest_and_the_best(tmp_path):
    train_here(tmp_path, "run", 8, "--save-interval", 1, "--keep-checkpoints", 2, "--eval-interval", 2 * STEPS)
    folder = tmp_path / "run" / "checkpoints"
    kept = {p.name for p in folder.glob("step_*")}
    assert {f"step_{STEPS * 7}", f"step_{STEPS * 8}"} <= kept and (folder / "best").read_text() in kept
    assert len(kept) <= 3 and not list(folder.glob(".*"))
    output = train_here(tmp_path, "run", 8, "--evaluate", "--checkpoint", tmp_path / "run")
    assert (folder / "best").read_text() in output and "eval/episodes 8" in output


# ---- Damaged checkpoints


def damage(folder: Path, how: str) -> str:
    """Spoil a checkpoint; the name of what is spoilt."""
    model, trainer = folder / "model.safetensors", folder / "trainer.pt"
    if how == "truncated":
        model.write_bytes(model.read_bytes()[:-100])
    elif how == "flipped":
        data = bytearray(model.read_bytes())
        data[-5] ^= 1
        model.write_bytes(data)
    elif how == "empty":
        trainer.write_bytes(b"")
    elif how == "missing":
        (folder / "rank_0.pt").unlink()
    elif how == "code":
        import hashlib
        import pickle

        class Evil:
            def __reduce__(self):
                return os.system, (f"touch {folder.parent.parent.parent}/executed",)

        trainer.write_bytes(pickle.dumps(Evil()))
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest["trainer.pt"] = hashlib.sha256(trainer.read_bytes()).hexdigest()
        (folder / "manifest.json").write_text(json.dumps(manifest))
    elif how == "shape":
        import hashlib

        from safetensors import safe_open

        with safe_open(model, "pt") as file:
            about = file.metadata()
        weights = load_file(model)
        weights["actor.0.weight"] = torch.zeros(3, 3)
        save_file(weights, model, metadata=about)
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest["model.safetensors"] = hashlib.sha256(model.read_bytes()).hexdigest()
        (folder / "manifest.json").write_text(json.dumps(manifest))
    return str(folder)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run with several checkpoints, to be copied."""
    folder = tmp_path_factory.mktemp("trained")
    train_here(folder, "run", 3, "--save-interval", 1)
    return folder / "run"


@pytest.mark.parametrize("how", ["truncated", "flipped", "empty", "missing", "code", "shape"])
def test_damaged_checkpoints_are_refused(tmp_path, trained, how):
    """With its folder named and a non-zero exit code; nothing inside it is executed."""
    shutil.copytree(trained, tmp_path / "run")
    name = damage(newest(tmp_path / "run"), how)
    text = train_here(tmp_path, "run", 6, "--resume", tmp_path / "run", ok=False)
    assert name in text and "Traceback" not in text
    assert not (tmp_path / "executed").exists()
    if how != "shape":
        text = train_here(tmp_path, "run", 4, "--resume", "auto")
        assert "trying the one before it" in text and f"resuming {tmp_path}/run/checkpoints/step_{2 * STEPS}" in text
        assert not (tmp_path / "executed").exists()


def test_going_back_before_the_best_forgets_it(tmp_path, monkeypatch):
    """The best is what it was at that checkpoint; if that is gone, the next evaluation is the best again."""
    returns = iter([5.0, 9.0, 7.0, 1.0, 2.0, 1.5])
    monkeypatch.setattr(ppo_ddp, "evaluate", lambda *a: {"eval/episodic_return": next(returns)})
    options = ["--save-interval", 1, "--eval-interval", 1, "--keep-checkpoints", 100]
    train_here(tmp_path, "run", 3, *options)
    folder = tmp_path / "run" / "checkpoints"
    assert (folder / "best").read_text() == f"step_{2 * STEPS}"
    step_1 = folder / f"step_{STEPS}"
    train_here(tmp_path, "run", 2, *options, "--resume", step_1)  # returns 1.0: the best is the 5.0 from before
    assert (folder / "best").read_text() == step_1.name
    shutil.rmtree(folder / f"step_{2 * STEPS}")
    trainer = torch.load(step_1 / "trainer.pt", weights_only=True)
    assert trainer["best"] == [0.0, 5.0] and trainer["best_step"] == STEPS
    os.rename(step_1, tmp_path / "elsewhere")  # as if it had been removed as one of the older ones
    (folder / "latest").unlink()
    train_here(tmp_path, "run", 2, *options, "--resume", tmp_path / "elsewhere", "--output-dir", tmp_path / "new")
    new = tmp_path / "new" / "run" / "checkpoints"
    assert (new / "best").read_text() == f"step_{2 * STEPS}"  # 2.0: less than 5.0, but the best there is


def test_all_ranks_fall_back_to_the_same_checkpoint(tmp_path):
    """Only rank 1's own file is damaged: rank 0 must not go on from it either."""
    train(tmp_path, 2, "run", 3, "--save-interval", 1)
    (newest(tmp_path / "run") / "rank_1.pt").write_bytes(b"nonsense")
    text = train(tmp_path, 2, "run", 4, "--resume", "auto")
    assert "rank_1.pt is damaged; trying the one before it" in text
    assert f"resuming {tmp_path}/run/checkpoints/step_{2 * 2 * STEPS}" in text


def test_arguments_that_change_the_shapes_are_refused(tmp_path, trained):
    shutil.copytree(trained, tmp_path / "run")
    for option in (["--hidden-size", 16], ["--no-norm-obs"], ["--env-id", "CartPole"]):
        text = train_here(tmp_path, "run", 6, *option, "--resume", tmp_path / "run", ok=False)
        assert f"set {option[0].replace('--no-', '--')} to match it" in text


def test_a_checkpoint_with_another_optimizer_is_refused_but_scored(tmp_path, trained):
    """As it was written when the optimizer held a tensor for each parameter."""
    shutil.copytree(trained, tmp_path / "run")
    folder = newest(tmp_path / "run")
    trainer = torch.load(folder / "trainer.pt", weights_only=True)
    parameters = [torch.nn.Parameter(x.float()) for k, x in load_file(folder / "model.safetensors").items()]
    adam = torch.optim.Adam(parameters, lr=1e-3, eps=1e-5, fused=True)
    torch.stack([p.sum() for p in parameters]).sum().backward()
    adam.step()
    torch.save(trainer | {"optimizer": adam.state_dict()}, folder / "trainer.pt")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["trainer.pt"] = ppo_ddp.digest(folder / "trainer.pt")
    (folder / "manifest.json").write_text(json.dumps(manifest))
    text = train_here(tmp_path, "run", 6, "--resume", tmp_path / "run", ok=False)
    assert text.startswith(f"error: cannot resume {folder}: an older version wrote it") and "--evaluate" in text
    text = train_here(tmp_path, "run", 6, "--evaluate", "--checkpoint", folder)
    assert "eval/episodes 8" in text


def test_a_finished_run_has_nothing_to_do(tmp_path, trained):
    shutil.copytree(trained, tmp_path / "run")
    before = checkpoint(newest(tmp_path / "run"))
    assert "raise --total-timesteps" in train_here(tmp_path, "run", 3, "--resume", "auto")
    assert_same(before, checkpoint(newest(tmp_path / "run")))


def test_going_back_leaves_the_later_checkpoints_aside(tmp_path, trained):
    """From an older checkpoint on, the newer ones are kept under another name, and the run's future is its own."""
    shutil.copytree(trained, tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints"
    train_here(tmp_path, "run", 2, "--resume", folder / f"step_{STEPS}")
    assert (folder / f"abandoned_step_{3 * STEPS}").exists() and newest(tmp_path / "run").name == f"step_{2 * STEPS}"
    (folder / ".latest.part").write_text("killed while the pointer moved")
    (folder / ".step_9.part").mkdir()
    train_here(tmp_path, "run", 4, "--save-interval", 1, "--resume", "auto")
    train_here(tmp_path, "run", 3, "--resume", folder / f"step_{2 * STEPS}")  # and once more
    assert newest(tmp_path / "run").name == f"step_{3 * STEPS}" and not list(folder.glob(".*"))


def test_a_restart_does_not_take_over_a_run_of_somebody_else(tmp_path, trained):
    """A launch that was refused because the run exists is refused again when torchrun restarts it.

    Also where the clocks say that the run was written since: only the launch that wrote it goes on with it by itself.
    """
    shutil.copytree(trained, tmp_path / "run")
    for file in (tmp_path / "run").glob("*.json"):
        os.utime(file, (time.time() + 1000, time.time() + 1000))
    code, text = start(tmp_path, 2, "run", 6, "restarts").finish()
    assert code != 0 and "resuming" not in text and "exists already" in text
    assert newest(tmp_path / "run").name == f"step_{3 * STEPS}"


def test_two_launches_at_once_have_two_folders(tmp_path):
    """The same command twice in the same second, without a name: neither resumes or overwrites the other."""
    words = [*SMALL, "--output-dir", tmp_path, "--total-timesteps", STEPS * 2 * 4, "--save-interval", 1]
    processes = [Process([*script("ppo_ddp.py", 2), *words]) for _ in range(2)]
    for process in processes:
        code, text = process.finish()
        assert code == 0 and "resuming" not in text, text[-3000:]
    runs = list(tmp_path.glob("PushCube__ppo_ddp__1__*"))
    assert len(runs) == 2
    launchers = [json.loads((run_dir / "launch.json").read_text()) for run_dir in runs]
    assert len(launchers[0]) == len(launchers[1]) == 1 and launchers[0] != launchers[1]
    assert_same(*(checkpoint(newest(run_dir)) for run_dir in runs))


def test_a_restart_finds_its_folder_by_the_launch(tmp_path, monkeypatch):
    """Under torchrun, without a name: the folder is found by what is written in it, not by a time in its name."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
    args = ppo_ddp.Args(output_dir=str(tmp_path))
    first = ppo_ddp.Run(args, Accelerator(cpu=True))
    assert first.open() is None and first.is_new
    first.claim(ppo_ddp.Progress())
    again = ppo_ddp.Run(args, Accelerator(cpu=True))
    again.open()
    assert again.folder == first.folder and not again.is_new
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    other = ppo_ddp.Run(args, Accelerator(cpu=True))
    other.open()
    assert other.folder != first.folder and other.is_new


def test_a_run_is_not_overwritten(tmp_path, trained):
    shutil.copytree(trained, tmp_path / "run")
    text = train_here(tmp_path, "run", 6, ok=False)
    assert f"resume it with --resume {tmp_path}/run" in text


# ---- Kills and signals


def wait_for(condition, timeout=60):
    end = time.time() + timeout
    while not (result := condition()):
        assert time.time() < end, "waited in vain"
        time.sleep(0.02)
    return result


def ranks(process: Process, name: str = "ppo_ddp.py") -> dict[int, psutil.Process]:
    """The processes of a launch that run the script, by rank."""
    found = {}
    for child in psutil.Process(process.pid).children(recursive=True):
        try:
            if name in child.cmdline():
                found[int(child.environ().get("RANK", -1))] = child
        except psutil.Error:
            pass
    return found


def start(tmp_path, nproc, name, iterations, *options) -> Process:
    total = ["--total-timesteps", STEPS * nproc * iterations]
    where = ["--output-dir", tmp_path, "--run-name", name, "--keep-checkpoints", 1000]
    command = script("ppo_ddp.py", nproc)
    if options and options[0] == "restarts":
        command[4:4] = ["--max-restarts", "1"]
        options = options[1:]
    return Process([*command, *SMALL, *where, *total, "--save-interval", "1", *options])


def test_a_killed_rank_leads_to_a_restart_that_loses_nothing(tmp_path):
    """kill -9 of rank 1 under --max-restarts: ends by itself, with the bits of the run that was left alone."""
    train(tmp_path, 2, "whole", 40)
    process = start(tmp_path, 2, "killed", 40, "restarts")
    folder = tmp_path / "killed" / "checkpoints"
    wait_for(lambda: len(list(folder.glob("step_*"))) > 5)
    ranks(process)[1].kill()
    code, text = process.finish()
    assert code == 0 and "resuming" in text, text[-3000:]
    one, two = checkpoint(newest(tmp_path / "whole")), checkpoint(newest(tmp_path / "killed"))
    assert_same(one, two)


def test_a_killed_rank_on_one_of_two_nodes_leads_to_a_restart_on_both(tmp_path):
    """Two torchruns, each counting its own restarts: all ranks meet again and end with the same bits."""
    train(tmp_path, 2, "whole", 40)
    port = free_port()
    nodes = ["--nnodes", "2", "--nproc_per_node", "1", "--max-restarts", "2", "--rdzv_id", "1"]
    nodes += ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"127.0.0.1:{port}"]
    words = [*SMALL, "--output-dir", tmp_path, "--run-name", "killed", "--keep-checkpoints", 1000]
    words += ["--total-timesteps", STEPS * 2 * 40, "--save-interval", 1, "--timeout", 40]
    command = [sys.executable, "-m", "torch.distributed.run", *nodes, "ppo_ddp.py", *words]
    one, two = (Process(command, log=tmp_path / f"node_{i}") for i in (0, 1))
    wait_for(lambda: len(list((tmp_path / "killed" / "checkpoints").glob("step_*"))) > 5, 90)
    (victim,) = ranks(two).values()
    victim.kill()
    assert one.finish()[0] == 0 and two.finish()[0] == 0
    text = "".join((tmp_path / f"node_{i}").read_text() for i in (0, 1))
    assert "resuming" in text
    assert_same(*(checkpoint(newest(tmp_path / name)) for name in ("whole", "killed")))


def test_an_attempt_gets_a_name_that_no_earlier_one_had():
    """Also where an earlier attempt got no further than some of its processes."""
    store = torch.distributed.HashStore()

    def meet(ranks):
        with ThreadPoolExecutor(3) as pool:
            return {f.result() for f in [pool.submit(ppo_ddp.name_attempt, store, r, 3) for r in ranks]}

    first = meet([0, 1, 2])
    store.set("name_1", "a process that came and died before the others")
    second, third = meet([2, 0, 1]), meet([0, 1, 2])
    assert len(first) == len(second) == len(third) == 1 and len(first | second | third) == 3


def test_nothing_of_a_checkpoint_stays_in_memory(tmp_path, trained, monkeypatch):
    """Model and optimizer of the file are mapped, copied where they belong, and let go before the first step."""
    shutil.copytree(trained, tmp_path / "run")
    loaded, alive = [], []
    real, gae = ppo_ddp.load_checkpoint, ppo_ddp.compute_gae

    def load(*a):
        found = real(*a)
        loaded.extend([weakref.ref(found), *(weakref.ref(x) for x in found.model.values())])
        return found

    def check(*a):
        gc.collect()
        alive.append([x() for x in loaded if x() is not None])
        return gae(*a)

    monkeypatch.setattr(ppo_ddp, "load_checkpoint", load)
    monkeypatch.setattr(ppo_ddp, "compute_gae", check)
    train_here(tmp_path, "run", 4, "--resume", "auto")
    assert len(loaded) > 10 and alive == [[]]


def train_until_killed(folder: Path, log: Path) -> None:
    output = train_here(folder, "run", 10_000, "--save-interval", 1, "--resume", "auto", log=log)
    raise AssertionError(f"it was to be killed: {output}")


def test_killed_at_twenty_random_moments_it_resumes_every_time(tmp_path, monkeypatch):
    """A run that saves at every iteration: after each kill -9 the newest checkpoint is good and further on.

    The processes are forks of one that has torch loaded and has done nothing else yet.
    """
    generator, steps, folder = random.Random(0), [0], tmp_path / "run" / "checkpoints"
    context = forkserver(monkeypatch)

    def latest():
        return int((folder / "latest").read_text().removeprefix("step_")) if (folder / "latest").exists() else 0

    for i in range(20):
        process = context.Process(target=train_until_killed, args=(tmp_path, tmp_path / f"log_{i}"))
        process.start()
        wait_for(lambda: latest() > steps[-1] or not process.is_alive())
        time.sleep(generator.uniform(0.0, 0.1))
        assert process.is_alive()
        process.kill()
        process.join()
        text = (tmp_path / f"log_{i}").read_text()
        assert "trying the one before it" not in text and ("resuming" in text) == (i > 0), text
        steps.append(latest())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1])
def test_a_signal_to_one_rank_stops_all_with_a_checkpoint(tmp_path, number):
    process = start(tmp_path, 2, "run", 100_000)
    wait_for(lambda: len(list((tmp_path / "run" / "checkpoints").glob("step_*"))) > 2)
    begin = time.time()
    ranks(process)[1].send_signal(number)
    code, text = process.finish(60)
    assert code == 0 and time.time() - begin < 30, text[-3000:]
    last = newest(tmp_path / "run")
    assert (tmp_path / "run" / "preempted").read_text() == last.name and f"saved {last}" in text


def test_a_stopped_run_goes_on_exactly(tmp_path):
    options = ["--lr-schedule", "constant"]
    process = start(tmp_path, 2, "run", 100_000, *options)
    wait_for(lambda: len(list((tmp_path / "run" / "checkpoints").glob("step_*"))) > 2)
    ranks(process)[0].send_signal(signal.SIGTERM)
    process.finish(60)
    done = int(newest(tmp_path / "run").name.removeprefix("step_")) // (2 * STEPS)
    train(tmp_path, 2, "run", done + 3, *options, "--save-interval", 1, "--resume", "auto")
    whole = cut_back(tmp_path / "run", "whole", 2 * STEPS)  # from the first checkpoint, and this time undisturbed
    train(tmp_path, 2, "whole", done + 3, *options, "--save-interval", 1, "--resume", "auto")
    assert whole.exists()
    assert_same(checkpoint(newest(tmp_path / "run")), checkpoint(newest(tmp_path / "whole")))


def catches(pid: int, number: int) -> bool:
    (mask,) = re.findall(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    return bool(int(mask, 16) >> (number - 1) & 1)


def test_a_second_interrupt_leaves_at_once(tmp_path):
    process = start(tmp_path, 1, "run", 100_000, "--num-steps", 20_000)
    wait_for(lambda: catches(process.pid, signal.SIGUSR1))  # and then SIGINT too
    process.send_signal(signal.SIGINT)
    time.sleep(2.5)  # within one second it would be the first one, passed on
    process.send_signal(signal.SIGINT)
    code, _ = process.finish(10)
    assert code == 130


# ---- Ranks that drift apart, or wait for one another


def test_a_corrupted_weight_is_caught(tmp_path):
    settings = {"check_interval": 2, "total_timesteps": 64 * 10}
    _, text = worker(tmp_path, "corrupt", 2, ok=False, **settings)
    assert "of rank 1 differ from rank 0's in iteration 2" in text and "Traceback" not in text


@pytest.mark.alone
def test_stragglers_are_preempted(tmp_path):
    """One rank six times slower: with preemption the run is faster, and every sample collected is trained on."""
    results = {}
    for fraction in (1.0, 0.5):
        settings = {"num_steps": 32, "num_envs": 8, "total_timesteps": 32 * 8 * 2 * 7, "preempt_fraction": fraction}
        settings |= {"num_minibatches": 1, "update_epochs": 1}  # as good as all the time is the rollout's
        records, _ = worker(tmp_path / str(fraction), "slow", 2, **settings)
        summary = json.loads((tmp_path / str(fraction) / "slow_2" / "run" / "summary.json").read_text())
        assert_same(records[0]["final"], records[1]["final"])
        assert (
            summary["global_step"]
            == records[0]["final"]["obs_moments.state.count"]
            == 8 * sum(r["steps"] for r in records)
        )
        assert summary["global_step"] >= settings["total_timesteps"]
        results[fraction] = summary
    assert results[0.5]["charts/SPS"] > 1.5 * results[1.0]["charts/SPS"]
    assert results[0.5]["charts/preempted_fraction"] > 0.2 and results[1.0]["charts/preempted_fraction"] == 0
    assert results[0.5]["time/wait_max"] < results[1.0]["time/wait_max"]


@pytest.mark.alone
def test_ranks_of_equal_speed_lose_little_to_preemption(tmp_path):
    settings = {"num_steps": 64, "num_envs": 8, "total_timesteps": 64 * 8 * 2 * 15, "preempt_fraction": 0.5}
    records, _ = worker(tmp_path, "even", 2, **settings)
    collected = sum(r["steps"] for r in records)
    iterations = records[0]["updates"] // 4
    assert collected > 0.95 * iterations * 2 * 64


@pytest.mark.parametrize("case", ["disk_of_rank_1", "manifest_of_rank_0"])
def test_a_full_disk_stops_the_run_and_spares_the_checkpoints(tmp_path, case):
    """Writing fails on one rank alone, in the third checkpoint: both stop, and the second one is still good."""
    _, text = worker(tmp_path, case, 2, ok=False, save_interval=1, total_timesteps=64 * 10)
    run_dir = tmp_path / f"{case}_2" / "run"
    assert "No space left on device" in text and "the checkpoints before it are untouched" in text
    assert {p.name for p in (run_dir / "checkpoints").glob("step_*")} == {"step_64", "step_128"}
    checkpoint(newest(run_dir))
