"""What several processes must agree on, in real processes under torchrun."""

import json
import os
import random
import signal
import time
from multiprocessing import get_context
from pathlib import Path

import psutil
import pytest
import torch
from accelerate import Accelerator
from conftest import forkserver, free_port, run, script, workers

import envs
import ppo_ddp

SMALL = {"num_envs": 4, "num_steps": 8, "num_minibatches": 2, "update_epochs": 2, "total_timesteps": 192}


def worker(tmp_path, case, nproc, ok=True, own=False, name="ppo_ddp", defaults=SMALL, **changes):
    """What each rank recorded of a run under torchrun, and its output.

    Two ranks are those of one launch that serves all tests: starting them is what takes long. With `own` they are not.
    """
    output = tmp_path / f"{case}_{nproc}"
    if nproc == 2 and not own:
        text = workers[2].run(name=name, case=case, output=str(output), changes=defaults | changes, ok=ok)
    else:
        text = run(*script("tests/worker.py", nproc), name, case, output, json.dumps(defaults | changes), ok=ok)
    return [torch.load(output / f"record_{r}.pt", weights_only=False) for r in range(nproc)], text


def assert_same_bits(one: dict, two: dict):
    assert one.keys() == two.keys()
    for name in one:
        assert torch.equal(one[name], two[name]), name


@pytest.mark.smoke
def test_parameters_are_bit_equal_after_updates(tmp_path):
    """Weights, and statistics of observations and returns; and the ranks really held different data."""
    (one, two), _ = worker(tmp_path, "plain", 2, norm_reward=True, backend="gloo")
    assert_same_bits(one["final"], two["final"])
    assert one["updates"] == two["updates"] == 12
    assert not torch.equal(one["start"], two["start"])
    assert any(not torch.equal(one["initial"][k], one["final"][k]) for k in one["final"])
    assert one["final"]["obs_moments.state.count"] == 192
    summary = json.loads((tmp_path / "plain_2" / "run" / "summary.json").read_text())
    assert summary["world_size"] == 2 and summary["charts/steps_sampled"] == summary["global_step"] == 192
    assert summary["charts/minibatch_size"] == 32 and summary["charts/steps_trained"] == 2 * 192


@pytest.mark.smoke
@pytest.mark.parametrize("sizes", ["equal", "unequal", "empty"])
def test_gradient_equals_that_of_the_joined_batch(tmp_path, sizes):
    """Also where the ranks hold different numbers of samples, and where one has nothing in a minibatch."""
    steps, rows = {"equal": ([8, 8], [4, 4]), "unequal": ([8, 3], [4, 4]), "empty": ([8, 1], [4, 1])}[sizes]
    minibatches = 4 if sizes == "empty" else 1
    settings = {
        "num_steps": steps,
        "num_envs": rows,
        "num_minibatches": minibatches,
        "update_epochs": 1,
        "max_grad_norm": 1e9,
    }
    ranks, _ = worker(tmp_path, "gradient", 2, total_timesteps=1, learning_rate=1e-12, **settings)
    agent = ppo_ddp.Agent(envs.make("PushCube", 1), ppo_ddp.Args())
    agent.load_state_dict(ranks[0]["initial"])
    counts = [steps[r] * rows[r] for r in (0, 1)]
    empty_seen = 0
    held = [iter(r["batches"]) for r in ranks]  # of the minibatches in which a rank has something
    for m in range(minibatches):
        mine = [counts[r] * (m + 1) // minibatches - counts[r] * m // minibatches for r in (0, 1)]
        batches = [next(held[r]) if mine[r] else None for r in (0, 1)]
        assert all(len(b["action"]) == n for b, n in zip(batches, mine) if n)
        empty_seen += 0 in mine
        agent.zero_grad()
        loss = 0.0
        for batch, size in zip(batches, mine):
            if size:
                _, logprob, entropy = agent(batch["seen"], batch["action"])
                value = agent.value(batch["seen"])
                loss = loss + ppo_ddp.ppo_loss(logprob, entropy, value, *batch["inputs"][3:])[0]
        (loss / sum(mine)).backward()
        for r in ranks:
            for gradient, p in zip(r["gradients"][m], agent.parameters()):
                torch.testing.assert_close(gradient, p.grad, atol=1e-6, rtol=0)
    # Advantages were normalised over all ranks, and not on each alone.
    advantages = [torch.cat([b["inputs"][4] for b in r["batches"][:n]]) for r, n in zip(ranks, (minibatches, 1))]
    if sizes != "empty":
        joined = torch.cat(advantages)
        assert abs(joined.mean()) < 1e-6 and joined.std(unbiased=False).item() == pytest.approx(1.0, abs=1e-5)
        assert abs(advantages[1].mean()) > 1e-3
    assert empty_seen == (3 if sizes == "empty" else 0)
    assert sum(p.grad.abs().sum() for p in agent.parameters()) > 1e-3


def test_one_process_with_twice_the_envs_learns_the_same(tmp_path):
    """1 x 2N and 2 x N envs: the same initial states, and with the same noise and full batches the same weights."""
    settings = {"num_minibatches": 1, "learning_rate": 1e-3, "update_epochs": 2}
    (whole,), _ = worker(tmp_path, "shared", 1, num_envs=8, **settings)
    halves, _ = worker(tmp_path, "shared", 2, num_envs=4, **settings)
    assert torch.equal(whole["start"], torch.cat([h["start"] for h in halves]))
    assert whole["updates"] == halves[0]["updates"] == 6
    for name, x in whole["final"].items():
        torch.testing.assert_close(x, halves[0]["final"][name], atol=1e-5, rtol=1e-5)
    metrics = [json.loads((tmp_path / f"shared_{n}" / "run" / "summary.json").read_text()) for n in (1, 2)]
    for key in (
        "losses/policy_loss",
        "losses/value_loss",
        "losses/approx_kl",
        "losses/explained_variance",
        "env/distance",
    ):
        assert metrics[0][key] == pytest.approx(metrics[1][key], abs=1e-4), key
    assert metrics[0]["eval/episodic_return"] == pytest.approx(metrics[1]["eval/episodic_return"], abs=1e-4)


def test_all_ranks_start_with_the_weights_of_the_first(tmp_path):
    (one, two), _ = worker(tmp_path, "weights", 2, check_interval=1)
    assert any(not torch.equal(one["initial"][k], two["initial"][k]) for k in one["initial"])
    assert_same_bits(one["final"], two["final"])


def test_different_kl_on_the_ranks_stops_both(tmp_path):
    """Rank 1 alone is over the target: together they are, so both leave after the first epoch, and nobody hangs."""
    (one, two), _ = worker(tmp_path, "kl", 2, target_kl=1.0, update_epochs=5)
    assert one["updates"] == two["updates"] == 3 * 2
    assert_same_bits(one["final"], two["final"])


def test_nan_gradient_on_one_rank_skips_the_update_on_both(tmp_path):
    (one, two), _ = worker(tmp_path, "nan", 2, total_timesteps=64)
    assert_same_bits(one["final"], two["final"])
    assert all(x.isfinite().all() for x in one["final"].values())
    summary = json.loads((tmp_path / "nan_2" / "run" / "summary.json").read_text())
    assert summary["losses/skipped_updates"] == 1


def test_nan_from_one_env_stops_both(tmp_path):
    _, text = worker(tmp_path, "env_nan", 2, ok=False, own=True)
    assert "NaN or infinity from PushCube on rank 1 in iteration 3" in text


def test_an_exception_on_one_rank_stops_both(tmp_path):
    _, text = worker(tmp_path, "env_error", 2, ok=False, own=True)
    assert "the simulator broke" in text


@pytest.mark.parametrize(
    "command, words",
    [
        (["accelerate", "launch", "--cpu", "--num_processes", "2", "ppo_ddp.py"], "torchrun --standalone"),
        (
            ["torchrun", "--standalone", "--nproc_per_node", "2", "ppo_ddp.py", "--env-id", "nonsense"],
            "CartPole, PushCube",
        ),
    ],
)
def test_a_launch_that_would_go_wrong_is_refused(command, words, tmp_path):
    text = run(*command, "--output-dir", tmp_path / "runs", ok=False)
    assert words in text and 'Traceback (most recent call last):\n  File "ppo_ddp.py"' not in text
    assert not (tmp_path / "runs").exists()


# ---- RankSum


def sum_as_rank(rank: int, world: int, port: int, case: str, results) -> None:
    local = 1 if case == "fallback" else world
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": local, "MASTER_PORT": port}
    os.environ |= {k: str(v) for k, v in places.items()} | {"MASTER_ADDR": "127.0.0.1"}
    torch.set_num_threads(1)
    vector = torch.empty(1001)
    add = ppo_ddp.RankSum(vector, Accelerator(cpu=True), timeout=2.0 if case == "silent" else 60.0)
    assert (add.counters is None) == (case == "fallback")
    real, delays, bits = torch.sum, random.Random(rank), []

    def slow(*a, **k):  # all have written, and others are free to write again
        time.sleep(delays.choice([0.0, 0.0, 0.0, 0.003]))
        return real(*a, **k)

    torch.sum = slow
    for turn in range(200):
        if turn == 20 and rank == 1 and case == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if turn == 20 and rank == 1 and case == "silent":
            time.sleep(600)
        generator = torch.Generator().manual_seed(turn)
        parts = torch.randn(world, 1001, generator=generator)
        vector.copy_(parts[rank])
        time.sleep(delays.choice([0.0, 0.0, 0.0, 0.003]))
        add(vector)
        torch.testing.assert_close(vector.double(), parts.double().sum(0), atol=1e-5, rtol=0)
        bits.append(vector.view(torch.int32).tolist())
    results.put((rank, bits))


def sum_over_ranks(world: int, port: int, case: str, file: Path) -> None:
    """The parent of the ranks: it does not look after one that died before the others have ended."""
    context = get_context("fork")
    results = context.Queue()
    ranks = [
        context.Process(target=sum_as_rank, args=(r, world, port, case, results), daemon=True) for r in range(world)
    ]
    for process in ranks:
        process.start()
    begin = time.monotonic()
    bits = {}
    if case in ("right", "fallback"):
        bits = dict(results.get(timeout=60) for _ in ranks)
    for rank, process in enumerate(ranks):
        if rank != 1 or bits:
            process.join()
    left = [name for name in os.listdir("/dev/shm") if "tandem" in name] if Path("/dev/shm").is_dir() else []
    found = {"seconds": time.monotonic() - begin, "left": left, "bits": bits}
    ranks[1].kill()
    ranks[1].join()
    torch.save(found | {"codes": [process.exitcode for process in ranks]}, file)


def rank_sum(monkeypatch, tmp_path, world, case) -> dict:
    process = forkserver(monkeypatch).Process(target=sum_over_ranks, args=(world, free_port(), case, tmp_path / case))
    process.start()
    process.join(90)
    if process.is_alive():
        for child in [*psutil.Process(process.pid).children(recursive=True), process]:
            child.kill()
        pytest.fail("the ranks hang")
    found = torch.load(tmp_path / case)
    assert not found["left"]
    return found


@pytest.mark.parametrize("world", [2, 3, 4])
def test_sums_over_ranks_are_right_and_bit_equal(tmp_path, monkeypatch, world):
    """Whatever rank is late, and wherever it is; also through all_reduce, where the memory is not shared."""
    found = rank_sum(monkeypatch, tmp_path, world, "right")
    assert found["codes"] == [0] * world and len(found["bits"]) == world
    assert all(bits == found["bits"][0] for bits in found["bits"].values())
    if world == 3:
        fallback = rank_sum(monkeypatch, tmp_path, world, "fallback")
        assert fallback["codes"] == [0] * world
        one, two = (torch.tensor(f["bits"][0], dtype=torch.int32).view(torch.float32) for f in (found, fallback))
        torch.testing.assert_close(one, two, atol=1e-6, rtol=0)


def test_a_rank_that_died_is_not_waited_for(tmp_path, monkeypatch):
    """Killed, and not even reaped by its parent: the others end within seconds, with an error."""
    found = rank_sum(monkeypatch, tmp_path, 3, "killed")
    assert found["codes"] == [1, -signal.SIGKILL, 1] and found["seconds"] < 20


def test_a_rank_that_does_not_answer_is_waited_for_as_long_as_said(tmp_path, monkeypatch, capfd):
    found = rank_sum(monkeypatch, tmp_path, 2, "silent")
    assert found["codes"][0] == 1 and 2.0 < found["seconds"] < 30
