"""What several tests need: running a script as its users do, in real processes, with a hard time limit."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
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


class Process(subprocess.Popen):
    """A command with a time limit, of which nothing is left behind."""

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
        parent = psutil.Process(self.pid)
        for process in [*parent.children(recursive=True), parent]:
            process.kill()


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
def restored_signals():
    """A script that runs in this process takes the signals; give them back."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    handlers = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


class Workers:
    """Two ranks under one torchrun that run one job after the other."""

    process, folder, jobs = None, None, 0

    def run(self, timeout: float = 120, **job) -> None:
        if self.process is None or self.process.poll() is not None:
            self.folder, self.jobs = Path(tempfile.mkdtemp()), 0
            self.process = Process([*script("tests/worker.py", 2), self.folder], log=self.folder / "log")
        file = self.folder / f"{self.jobs}.json"
        file.with_suffix(".part").write_text(json.dumps(job))
        file.with_suffix(".part").rename(file)
        self.jobs, end = self.jobs + 1, time.time() + timeout
        while not all(file.with_suffix(f".done_{rank}").exists() for rank in (0, 1)):
            if self.process.poll() is not None or time.time() > end:
                self.stop()
                pytest.fail(f"{job['name']} {job['case']} failed\n{(self.folder / 'log').read_text()[-4000:]}")
            time.sleep(0.02)

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill_all()
            self.process.wait()


workers = Workers()


def pytest_sessionfinish():
    workers.stop()


def script(name: str, nproc: int = 1) -> list[str]:
    """The command that starts a script on this many processes."""
    if nproc == 1:
        return [sys.executable, name]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(nproc), name]
