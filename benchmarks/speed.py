"""Env steps per second of tandem and its peers, beside what the bare loops allow and what two processes add.

    python benchmarks/speed.py --quick                          # about five minutes; results/speed.json and tables
    python benchmarks/speed.py                                  # five longer rounds: about three quarters of an hour
    python benchmarks/speed.py --only cheetah two_processes     # some sections; the others keep their results
    python benchmarks/speed.py --peers-python PATH              # an environment that has benchmarks/requirements.txt
    python benchmarks/speed.py --table                          # only print the tables of the results

Without --peers-python the peers are installed once, into a cache folder. Every run is a process of its own. The runners
take turns, A B C A B C, so that whatever else the machine does meets all of them; a ratio is taken within a round, and
given as the median and the range over the rounds. In the sections of one process each run has one core and one thread.
All figures are of whole iterations, collecting and learning, after some that warm up; of tandem they include its
logging, for which the peers' is switched off. Measure on an idle machine: a run whose cores other processes used for
more than a tenth of its time is repeated, at most twice; `others` in the results says how much they took at worst.

A section holds a workload (peers.py has the sizes): tandem eager and compiled; the peers; and bare loops that only step
the env, only run the policy's forwards, only learn (forward, backward, clipping, Adam) or only multiply the matrices of
all that. Section two_processes: one process, two that share gradients, and two that know nothing of each other, which
are the limit that the machine sets.
"""

import argparse
import hashlib
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from importlib.metadata import version
from pathlib import Path

import psutil
from peers import WORKLOADS, Workload

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "speed.json"
# Each peer as it comes (rl_games compiles its networks, RSL-RL does not); the full benchmark has the other way as well.
PEERS = {
    "cheetah": ["stable_baselines3", "rsl_rl", "skrl", "rl_games"],
    "pushcube": ["rsl_rl", "skrl", "rl_games"],
    "pushcube_large": ["rsl_rl", "skrl", "rl_games"],
}
OTHER_WAY = ["rsl_rl_compiled", "rl_games_eager"]
OURS = {"tandem": [], "tandem --compile": ["--compile"]}
# Iterations that are counted, by workload and length of the benchmark. Before them: WARM, in which episodes begin to
# reach their time limit, and with it every shape that is compiled has been seen.
ITERATIONS = {"cheetah": (4, 20), "pushcube": (20, 100), "pushcube_large": (2, 8)}
WARM = {"cheetah": 4, "pushcube": 6, "pushcube_large": 4}
GRPO_STEPS = (200_000, 800_000)  # of all processes, with the first iterations, which are not counted
ROUNDS = {"cheetah": (2, 5), "pushcube": (2, 5), "pushcube_large": (1, 5), "two_processes": (1, 5)}


class Run:
    """A process of its own. `finish` waits for it."""

    def __init__(self, words: list, core: int | None = None):
        pin = None
        if core is not None and hasattr(os, "sched_setaffinity"):
            pin = lambda: os.sched_setaffinity(0, {core})
        self.words = [str(word) for word in words]
        self.env = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(self.words, cwd=ROOT, env=self.env, preexec_fn=pin, **pipes)

    def finish(self) -> str:
        out, error = self.process.communicate()
        if self.process.returncode:
            raise SystemExit(f"error: {' '.join(self.words)}\n{out[-2000:]}\n{error[-4000:]}")
        return out


def cpu_seconds(core: int | None) -> tuple[float, float]:
    """Of one core or of all, and of this process and those that it started and that have ended."""
    every = psutil.cpu_times(percpu=True)
    busy = 0.0
    for times in every if core is None else [every[core]]:
        times = times._asdict()
        idle = sum(times.get(name, 0.0) for name in ("idle", "iowait", "guest", "guest_nice"))  # guests are in user
        busy += sum(times.values()) - idle
    mine = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return busy, sum(usage.ru_utime + usage.ru_stime for usage in mine)


def undisturbed(run, core: int | None) -> dict:
    """What `run` found, in the best of up to three tries, and in `others` what other processes took of its cores."""
    tries = []
    while len(tries) < 3 and min((one["others"] for one in tries), default=1.0) > 0.1:
        start = time.perf_counter()
        busy, mine = cpu_seconds(core)
        found = run()
        busy_now, mine_now = cpu_seconds(core)
        others = (busy_now - busy) - (mine_now - mine)
        tries.append(found | {"others": max(0.0, others / (time.perf_counter() - start))})
    return min(tries, key=lambda one: one["others"])


def last_core() -> int | None:
    """The core for single processes: the last one that this process may use, as the first serves most interrupts."""
    return max(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None


def options_of(work: Workload) -> list:
    """What ppo_ddp.py calls a workload."""
    names = "env_id num_envs num_steps num_minibatches update_epochs hidden_size learning_rate gamma init_logstd"
    options = []
    for name in names.split():
        options += [f"--{name.replace('_', '-')}", getattr(work, name)]
    if work.norm_reward:
        options += ["--norm-reward", "--clip-vloss"]
    return [*options, "--torch-threads", 1]


def read_events(folder: str, key: str) -> list:
    """What a run logged under this key, as (step, wall_time, value)."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(folder, size_guidance={"scalars": 0})
    events.Reload()
    return events.Scalars(key)


class Ours:
    """A run of one of our scripts, in `processes` processes."""

    def __init__(self, script: str, options: list, processes: int = 1, core: int | None = None):
        self.folder = tempfile.mkdtemp()
        launcher = [sys.executable]
        if processes > 1:
            launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", processes]
        quick = ["--save-interval", 0, "--eval-episodes", processes, "--output-dir", self.folder, "--run-name", "run"]
        self.run = Run([*launcher, script, *options, *quick], core)

    def finish(self, warm: int) -> float:
        """Steps per second between the ends of two iterations: the last one that warms up, and the last but one.

        (The very last one is logged after the evaluation at the end of a run.)
        """
        self.run.finish()
        logged = read_events(f"{self.folder}/run", "charts/iteration")
        shutil.rmtree(self.folder)
        first, last = logged[warm - 1], logged[-2]
        return (last.step - first.step) / (last.wall_time - first.wall_time)


def measure(name: str, work: Workload, runner: str, quick: bool, python: str) -> dict:
    """One run of one runner on one workload, on one core."""
    core = last_core()
    warm = WARM[name]
    iterations = ITERATIONS[name][not quick]
    if runner in OURS:
        total = work.samples * (warm + iterations + 1)
        options = [*options_of(work), "--total-timesteps", total, *OURS[runner]]
        return {"steps_per_second": Ours("ppo_ddp.py", options, core=core).finish(warm)}
    words = ["benchmarks/peers.py", runner, name, "--warm", warm, "--iterations", iterations]
    out = Run([sys.executable if runner == "bare" else python, *words], core).finish()
    return json.loads(out.splitlines()[-1])


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def compare(name: str, quick: bool, rounds: int, python: str) -> dict:
    """A section of one workload: all runners, taking turns."""
    work = WORKLOADS[name]
    peers = PEERS[name] if quick else [*PEERS[name], *OTHER_WAY]
    runs = {runner: [] for runner in [*OURS, *peers, "bare"]}
    versions = {}
    for number in range(rounds):
        for runner, found in runs.items():
            one = undisturbed(lambda: measure(name, work, runner, quick, python), last_core())
            versions |= one.pop("version", {})
            found.append(one)
            shown = f"{one['steps_per_second']:,.0f} steps/s" if runner != "bare" else show_parts(one)
            print(f"{name}, round {number + 1}: {runner} {shown} (others: {one['others']:.2f} cores)", flush=True)

    bare = runs.pop("bare")
    section = {"rounds": rounds, "iterations": ITERATIONS[name][not quick], "peers": versions}
    section["others"] = max(one["others"] for found in [*runs.values(), bare] for one in found)
    speeds = {runner: [one["steps_per_second"] for one in found] for runner, found in runs.items()}
    section["steps_per_second"] = {runner: spread(values) for runner, values in speeds.items()}
    section["ratios"] = {}
    section["bare"] = {part: spread([one[part] for one in bare]) for part in bare[0] if part != "others"}
    section["of_bare"] = {}
    section["of_matmul"] = {}
    for ours in OURS:
        ratios = {peer: spread([a / b for a, b in zip(speeds[ours], speeds[peer])]) for peer in peers}
        section["ratios"][ours] = ratios
        seconds = [work.samples / speed for speed in speeds[ours]]
        sums = [one["env"] + one["forward"] + one["learn"] for one in bare]
        section["of_bare"][ours] = spread([a / b for a, b in zip(sums, seconds)])
        section["of_matmul"][ours] = spread([one["matmul"] / b for one, b in zip(bare, seconds)])
    return section


def show_parts(parts: dict) -> str:
    return ", ".join(f"{name} {1e3 * parts[name]:.0f} ms" for name in ("env", "forward", "learn", "matmul"))


def two_processes(quick: bool, rounds: int) -> dict:
    """One process, two, and two independent ones at the same time, on all cores."""
    works = {}  # script, options of the one process, options of each of two, iterations that warm up
    for name in ("pushcube", "pushcube_large"):
        work = WORKLOADS[name]
        iterations = WARM[name] + ITERATIONS[name][not quick] + 1
        alone = [*options_of(work), "--total-timesteps", work.samples * iterations]
        both = [*options_of(work), "--total-timesteps", 2 * work.samples * iterations]
        works[name] = ("ppo_ddp.py", alone, both, alone, WARM[name])
    total = GRPO_STEPS[not quick]
    half = ["--num-envs", 128, "--total-timesteps"]
    works["grpo"] = (
        "grpo_ddp.py",
        ["--num-envs", 256, "--total-timesteps", total],
        [*half, total],
        [*half, total // 2],
        4,
    )
    for name in ("pushcube", "grpo"):
        script, *options, warm = works[name]
        works[f"{name} --compile"] = (script, *([*words, "--compile"] for words in options), warm)

    section = {"rounds": rounds, "others": 0.0}
    for name, (script, alone, both, independent, warm) in works.items():

        def pair() -> float:
            runs = [Ours(script, [*independent, "--seed", seed]) for seed in (1, 2)]
            return sum(run.finish(warm) for run in runs)

        ways = {
            "one": lambda: Ours(script, alone).finish(warm),
            "two": lambda: Ours(script, both, processes=2).finish(warm),
            "independent": pair,
        }
        speeds = {way: [] for way in ways}
        for number in range(rounds):
            for way, run in ways.items():
                one = undisturbed(lambda: {"steps_per_second": run()}, core=None)
                speeds[way].append(one["steps_per_second"])
                section["others"] = max(section["others"], one["others"])
                shown = f"{one['steps_per_second']:,.0f} steps/s (others: {one['others']:.2f} cores)"
                print(f"two_processes, round {number + 1}: {name}, {way} {shown}", flush=True)
        section[name] = {way: spread(values) for way, values in speeds.items()}
        for way in ("two", "independent"):
            section[name][f"{way} / one"] = spread([a / b for a, b in zip(speeds[way], speeds["one"])])
    return section


def cell(values: dict[str, float], form: str) -> str:
    """Median and range."""
    return f"{values['median']:{form}} ({values['min']:{form}} – {values['max']:{form}})"


def table(results: dict) -> None:
    workloads = [name for name in WORKLOADS if name in results]
    if workloads:
        print("\n| workload | runner | steps/s | tandem is | compiled, it is |\n|---|---|---|---|---|")
    for name in workloads:
        section = results[name]
        for runner, speed in section["steps_per_second"].items():
            ratios = [section["ratios"][ours].get(runner) for ours in OURS]
            cells = [f"{cell(ratio, '.2f')} times" if ratio else "" for ratio in ratios]
            print(f"| `{name}` | {runner} | {cell(speed, ',.0f')} | " + " | ".join(cells) + " |")
    if workloads:
        print("\n| workload | env | forwards | learning | tandem against their sum | compiled ", end="")
        print("| matrix products | tandem against them | compiled |")
        print("|---" * 9 + "|")
    for name in workloads:
        section = results[name]
        cells = [f"{1e3 * section['bare'][part]['median']:.0f} ms" for part in ("env", "forward", "learn")]
        cells += [cell(section["of_bare"][ours], ".0%") for ours in OURS]
        cells += [f"{1e3 * section['bare']['matmul']['median']:.0f} ms"]
        cells += [cell(section["of_matmul"][ours], ".0%") for ours in OURS]
        print(f"| `{name}` | " + " | ".join(cells) + " |")
    if "two_processes" in results:
        print(
            "\n| workload | one process | two | two independent | two / one | limit / one |\n|---|---|---|---|---|---|"
        )
        for name in ("pushcube", "pushcube --compile", "pushcube_large", "grpo", "grpo --compile"):
            row = results["two_processes"][name]
            cells = [cell(row[key], ",.0f") for key in ("one", "two", "independent")]
            cells += [cell(row[f"{key} / one"], ".2f") for key in ("two", "independent")]
            print(f"| `{name}` | " + " | ".join(cells) + " |")


def cpu_name() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{len(names) or os.cpu_count()} cores of {names[0] if names else platform.processor()}"


def install_peers() -> str:
    """-> the Python of an environment with the peers, made when it is first needed."""
    requirements = ROOT / "benchmarks" / "requirements.txt"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "tandem" / f"peers_{hashlib.sha256(requirements.read_bytes()).hexdigest()[:12]}"
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        print(f"installing the peers into {folder}", flush=True)
        venv.create(folder, clear=True, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "-r", requirements], check=True)
        (folder / "complete").touch()
    return str(python)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one or two short rounds, each peer only as it comes")
    parser.add_argument("--only", nargs="+", choices=list(ROUNDS), default=list(ROUNDS), help="sections to measure")
    parser.add_argument("--rounds", type=int, default=0, help="rounds (default: 5, with --quick 1 or 2)")
    parser.add_argument("--peers-python", default="", help="Python of an environment with the peers")
    parser.add_argument("--table", action="store_true", help="only print the tables of the results")
    args = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if args.table:
        return table(results)

    git = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    words = ["PATH" if word == args.peers_python else word for word in sys.argv[1:]]
    about = {"command": " ".join(["python", "benchmarks/speed.py", *words]), "commit": commit, "machine": cpu_name()}
    about["versions"] = {name: version(name) for name in ("torch", "accelerate", "tensordict", "gymnasium", "mujoco")}
    python = args.peers_python
    if set(args.only) & set(WORKLOADS) and not python:
        python = install_peers()
    for name in args.only:
        rounds = args.rounds or ROUNDS[name][not args.quick]
        if name in WORKLOADS:
            section = compare(name, args.quick, rounds, python)
        else:
            section = two_processes(args.quick, rounds)
        results[name] = about | section
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    table({name: results[name] for name in args.only})


if __name__ == "__main__":
    main()
