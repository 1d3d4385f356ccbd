"""How much of collecting and learning goes on at the same time in ppo_vla_async.py.

python benchmarks/async_overlap.py              # about six minutes; results/async_overlap.json and a table

Four settings: a robot or simulator that makes the thread wait (latency-bound), one that takes as long as learning
(balanced), learning that takes longer (learner-bound), and no waiting, both sides busy on a core each (CPU-bound). In
each, runs with --max-staleness 0 and 1 take turns, so that whatever else the machine does meets both. The measure is
the async iteration against the longer of what the synchronous one spends on collecting and on learning: 1 is perfect.
"""

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
import envs  # noqa: E402
import ppo_vla_async as vla  # noqa: E402

ENVS, CHUNKS, ITERATIONS, ROUNDS = 32, 8, 8, 3


def measure(staleness: int, latency: float, epochs: int, folder: str) -> dict[str, list[float]]:
    """Seconds of each iteration, without the first two and those that wait for the end."""
    make, logs = envs.make, []

    def slow(*args, **options) -> envs.VecEnv:
        env = make(*args, **options)
        if options.get("seed") == 1:
            step = env.step

            def waiting(*a):
                time.sleep(latency)
                return step(*a)

            env.step = waiting
        return env

    class Log(vla.Run):
        def log(self, values, progress):
            logs.append(values)

    real, envs.make, vla.Run = vla.Run, slow, Log
    try:
        vla.main(vla.Args(
            output_dir=folder, run_name=f"{time.time()}", num_envs=ENVS, num_chunks=CHUNKS, num_minibatches=4,
            update_epochs=epochs, total_timesteps=ENVS * CHUNKS * ITERATIONS, bc_updates=0, eval_episodes=1,
            max_staleness=staleness, save_interval=0, check_interval=0,
        ))  # fmt: skip
    finally:
        envs.make, vla.Run = make, real
    logs = logs[2 : ITERATIONS - 1]
    keys = {"collect": "time/collect", "train": "time/train", "wait": "time/learner_wait"}
    parts = {name: [log[key] for log in logs] for name, key in keys.items()}
    return parts | {"iteration": [t + w for t, w in zip(parts["train"], parts["wait"])]}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        median = lambda part, runs: statistics.median(x for run in runs for x in run[part])  # noqa: E731
        base = [measure(0, 0.0, 1, folder) for _ in range(2)]
        collect, train = median("collect", base), median("train", base)
        wait = lambda target: max(target - collect, 0.0) / CHUNKS  # noqa: E731
        settings = {  # latency of an env step in seconds, epochs
            "latency-bound": (wait(2.5 * train), 1),
            "balanced": (wait(max(train, 1.2 * collect)), 1),
            "learner-bound": (wait(1.2 * collect), 4),
            "CPU-bound": (0.0, 1),
        }
        results = {}
        print("| setting | sync collect | sync learn | sync iteration | async iteration | ratio |")
        print("|---|---|---|---|---|---|")
        for name, (latency, epochs) in settings.items():
            runs = {0: [], 1: []}
            for _ in range(ROUNDS):
                for staleness in runs:
                    runs[staleness].append(measure(staleness, latency, epochs, folder))
            row = {part: median(part, runs[0]) for part in ("collect", "train", "iteration")}
            row |= {"async": median("iteration", runs[1]), "latency": latency, "epochs": epochs}
            row["ratio"] = row["async"] / max(row["collect"], row["train"])
            results[name] = row
            cells = [f"{row[k]:.3f} s" for k in ("collect", "train", "iteration", "async")]
            print(f"| {name} | " + " | ".join(cells) + f" | {row['ratio']:.2f} |", flush=True)
    (ROOT / "benchmarks" / "results" / "async_overlap.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
