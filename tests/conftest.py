"""What several tests need: running a script as its users do, in real processes, with a hard time limit."""

import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path

import psutil
import pytest
import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
torch.set_num_threads(1)
os.environ["HF_HUB_OFFLINE"] = "1"  # read by transformers when it is imported


def clean_env(**extra: str) -> dict[str, str]:
    launcher = (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_RUN_ID",
        "OMP_NUM_THREADS",
    )
    env = {k: v for k, v in os.environ.items() if k not in launcher}
    path = f"{Path(sys.executable).parent}{os.pathsep}{env.get('PATH', '')}"
    settings = {
        "TORCH_DISTRIBUTED_DEBUG": os.environ.get("DBG", "DETAIL"),
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT}/tests/site",
        "PATH": path,
        "WANDB_MODE": "offline",
    }
    return env | settings | {"OMP_NUM_THREADS": "1"} | extra


def pytest_xdist_auto_num_workers(config) -> int:
    """Two processes run the tests, which is what two cores carry; tests that were picked by name run in this one."""
    return 0 if config.option.keyword or any("::" in word for word in config.args) else 2


TOGETHER = {  # tests that are to run in one process, one after the other, by a pattern of their names
    "what one trains the next resumes": "test_commands.py::.*documented",
    "three ranks, started once": r"test_resume_is_exact(\[3\]|_on_three)",
    "two ranks, started once in a smoke run": "test_distributed.py::test_(parameters|gradient)",
}


def pytest_xdist_make_scheduler(config, log):
    """Not the mark xdist_group: pytest-xdist 3.8 overlooks it under pytest 9.2, in silence."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return next((group for group, pattern in TOGETHER.items() if re.search(pattern, nodeid)), nodeid)

    return Scheduling(config, log)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # outside of the test's time limit
def pytest_runtest_protocol(item):
    """A test that is marked `alone` waits until the other process is between two tests, and keeps it there."""
    with open(__file__) as gate, open(ROOT / "pyproject.toml") as room:  # any two files serve as locks
        fcntl.flock(gate, fcntl.LOCK_EX)
        if item.get_closest_marker("alone"):
            fcntl.flock(room, fcntl.LOCK_EX)
        else:
            fcntl.flock(room, fcntl.LOCK_SH)
            fcntl.flock(gate, fcntl.LOCK_UN)
        return (yield)


class Process(subprocess.Popen):
    """A command with a time limit, of which nothing is left behind."""

    started = []

    def __init__(self, command: list[str], log: Path | None = None, **extra: str):
        super().__init__(
            [str(c) for c in command],
            cwd=ROOT,
            env=clean_env(**extra),
            stdout=log.open("w") if log else subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        Process.started.append(self)

    def finish(self, timeout: float = 120) -> tuple[int, str]:
        try:
            output, _ = self.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.kill_all()
            output, _ = self.communicate()
            pytest.fail(f"still running after {timeout} s: {' '.join(self.args)}\n{output[-3000:]}")
        return self.returncode, output

    def kill_all(self) -> None:
        """Also the workers that torchrun puts into sessions of their own."""
        if self.poll() is None:
            parent = psutil.Process(self.pid)
            for process in [*parent.children(recursive=True), parent]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            self.wait()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run(*command, timeout: float = 120, ok: bool = True, **extra: str) -> str:
    """Run a command; its output, or with ok=False its output after checking that it failed."""
    code, output = Process(list(command), **extra).finish(timeout)
    assert (code == 0) == ok, f"exit code {code}: {' '.join(map(str, command))}\n{output[-4000:]}"
    return output


@pytest.fixture(autouse=True)
def no_process_is_left_behind():
    """Also by a test that fails."""
    yield
    kept = [pool.process for pool in workers.values()]
    for process in Process.started:
        if process not in kept:
            process.kill_all()
    Process.started[:] = [process for process in kept if process is not None]


@pytest.fixture(autouse=True)
def restored_signals():
    """A script that runs in this process takes the signals; give them back."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    handlers = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


class Workers:
    """The ranks of one torchrun that run one job after the other: starting them is what takes long."""

    def __init__(self, nproc: int):
        self.nproc, self.process, self.folder, self.jobs = nproc, None, None, 0

    def run(self, timeout: float = 120, **job) -> str:
        """What rank 0 prints in a job (see worker.py) that all ranks are to end as it says."""
        if self.process is None or self.process.poll() is not None:
            self.folder, self.jobs = Path(tempfile.mkdtemp()), 0
            (self.folder / "owner").write_text(str(os.getpid()))
            self.process = Process([*script("tests/worker.py", self.nproc), self.folder], log=self.folder / "log")
        file = self.folder / f"{self.jobs}.json"
        file.with_suffix(".part").write_text(json.dumps(job, default=str))
        file.with_suffix(".part").rename(file)
        self.jobs, end = self.jobs + 1, time.time() + timeout
        try:
            while not all(file.with_suffix(f".done_{rank}").exists() for rank in range(self.nproc)):
                if self.process.poll() is not None or time.time() > end:
                    pytest.fail(f"{job} failed\n{(self.folder / 'log').read_text()[-4000:]}")
                time.sleep(0.02)
        except BaseException:  # also the test's own time limit: the next one gets new ranks
            self.process.kill_all()
            raise
        return file.with_suffix(".out_0").read_text()

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill_all()
            shutil.rmtree(self.folder)


workers = {nproc: Workers(nproc) for nproc in (2, 3)}


def pytest_sessionfinish():
    for pool in workers.values():
        pool.stop()


def script(name: str, nproc: int = 1) -> list[str]:
    """The command that starts a script on this many processes."""
    if nproc == 1:
        return [sys.executable, name]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(nproc), name]


def forkserver(monkeypatch):
    """Starts processes as forks of one that has the scripts loaded and has done nothing else yet."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{ROOT}/tests")
    context = get_context("forkserver")
    context.set_forkserver_preload(["test_resume"])
    return context
