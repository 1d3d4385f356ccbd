"""How much of collecting and learning goes on at the same time in ppo_vla_async.py.

python benchmarks/async_overlap.py              # about ten minutes; results/async_overlap.json and a table
python benchmarks/async_overlap.py MetaWorld    # only this row of them

Four settings on Tabletop: a robot or simulator that makes the thread wait (latency-bound), one that takes as long as
learning (balanced), learning that takes longer (learner-bound), and no waiting, both sides busy on a core each
(CPU-bound). And MetaWorld: a small PI0, three tasks, two cameras, and episodes that end and start as in training. In
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
METAWORLD = {
    "env_id": "metaworld/faucet-open-v3,faucet-close-v3,button-press-topdown-v3",
    "env_options": ("camera=corner2,wrist", "max_episode_steps=100"),
    "model_path": "tiny-pi0",
    "action_chunk": 5,
    "torch_threads": 1,
    "bc_updates": 1,  # statistics of state and action are those of demonstrations
    "bc_episodes": 3,
}


def measure(staleness: int, latency: float, epochs: int, folder: str, **options) -> dict[str, list[float]]:
    """Seconds of each iteration, without the first two and those that wait for the end."""
    make, logs = envs.make, []

    def slow(*args, **options) -> envs.VecEnv:
        env = make(*args, **options)
        if options.get("seed") == 1:
            step = env.step

            def waiting(*a, **look):
                time.sleep(latency)
                return step(*a, **look)

            env.step = waiting
        return env

    class Log(vla.Run):
        def log(self, values, progress):
            logs.append(values)

    real, envs.make, vla.Run = vla.Run, slow, Log
    steps = ENVS * CHUNKS * ITERATIONS * options.get("action_chunk", 1)
    try:
        vla.main(vla.Args(
            output_dir=folder, run_name=f"{time.time()}", num_envs=ENVS, num_chunks=CHUNKS, num_minibatches=4,
            update_epochs=epochs, total_timesteps=steps, eval_episodes=1, max_staleness=staleness,
            save_interval=0, check_interval=0, **({"bc_updates": 0} | options),
        ))  # fmt: skip
    finally:
        envs.make, vla.Run = make, real
    logs = [log for log in logs if "time/train" in log][2 : ITERATIONS - 1]
    keys = {"collect": "time/collect", "train": "time/train", "wait": "time/learner_wait"}
    parts = {name: [log[key] for log in logs] for name, key in keys.items()}
    return parts | {"iteration": [t + w for t, w in zip(parts["train"], parts["wait"])]}


def choose_settings(folder: str) -> dict[str, dict]:
    """What `measure` takes of each; the latencies are found from how fast this machine is."""
    base = [measure(0, 0.0, 1, folder) for _ in range(2)]
    collect = median("collect", base)
    train = median("train", base)
    wait = lambda target: max(target - collect, 0.0) / CHUNKS  # noqa: E731
    return {
        "latency-bound": {"latency": wait(2.5 * train), "epochs": 1},
        "balanced": {"latency": wait(max(train, 1.2 * collect)), "epochs": 1},
        "learner-bound": {"latency": wait(1.2 * collect), "epochs": 4},
        "CPU-bound": {"latency": 0.0, "epochs": 1},
    }


def median(part: str, runs: list[dict[str, list[float]]]) -> float:
    return statistics.median(x for run in runs for x in run[part])


def mean(part: str, runs: list[dict[str, list[float]]]) -> float:
    """The median run's: episodes that all end in the same iteration count for what they cost."""
    return statistics.median(statistics.mean(run[part]) for run in runs)


def main(only: list[str]) -> None:
    file = ROOT / "benchmarks" / "results" / "async_overlap.json"
    results = json.loads(file.read_text()) if only else {}
    with tempfile.TemporaryDirectory() as folder:
        settings = {} if only == ["MetaWorld"] else choose_settings(folder)
        settings["MetaWorld"] = {"latency": 0.0, "epochs": 1, **METAWORLD}
        print("| setting | sync collect | sync learn | sync iteration | async iteration | ratio |")
        print("|---|---|---|---|---|---|")
        for name in only or settings:
            runs = {0: [], 1: []}
            for _ in range(ROUNDS):
                for staleness in runs:
                    runs[staleness].append(measure(staleness, folder=folder, **settings[name]))
            typical = mean if name == "MetaWorld" else median
            row = {part: typical(part, runs[0]) for part in ("collect", "train", "iteration")}
            row["async"] = typical("iteration", runs[1])
            row |= {k: settings[name][k] for k in ("latency", "epochs")}
            row["ratio"] = row["async"] / max(row["collect"], row["train"])
            results[name] = row
            cells = [f"{row[k]:.3f} s" for k in ("collect", "train", "iteration", "async")]
            print(f"| {name} | " + " | ".join(cells) + f" | {row['ratio']:.2f} |", flush=True)
    file.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
