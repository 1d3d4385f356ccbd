"""Learning on MuJoCo with CleanRL's hyperparameters: tandem beside Stable-Baselines3 on the same envs and settings.

    python benchmarks/learn_mujoco.py                                     # runs what is missing, then table and plot
    python benchmarks/learn_mujoco.py --envs Hopper-v5 --seeds 1 2        # a part of it
    python benchmarks/learn_mujoco.py --total-timesteps 20000             # a trial, kept apart from the results
    python benchmarks/learn_mujoco.py --show                              # only the table, and docs/images/mujoco.png

A million steps, three seeds, one core and one thread for each run. Every run leaves a file in results/mujoco/, and one
whose file exists is skipped: the command can be stopped and repeated, or started once per core (`taskset -c 0 ...`)
with other --envs. The curves are of the return of training episodes, the mean over the last 100, against env steps and
against CPU minutes of the process, so that other work on the machine does not count. The Python of the peers is found
as in speed.py. CleanRL's figures are those it publishes for ppo_continuous_action.py, of the v4 envs. The plot needs
matplotlib.
"""

import argparse
import json
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from peers import WORKLOADS
from speed import ROOT, Run, cpu_name, install_peers, last_core, options_of, read_events

CLEANRL = {  # mean and deviation
    "HalfCheetah-v5": (1443, 46),
    "Hopper-v5": (2383, 272),
    "Walker2d-v5": (2288, 572),
    "InvertedPendulum-v5": (963, 22),
}
RUNNERS = {"tandem": "tandem", "tandem_compiled": "tandem --compile", "stable_baselines3": "Stable-Baselines3"}
MILLION = 1_000_000
POINTS = 100  # of a curve that is kept


def folder_of(total: int) -> Path:
    name = "mujoco" if total == MILLION else f"mujoco_{total}"
    return ROOT / "benchmarks" / "results" / name


def train(runner: str, env: str, seed: int, total: int, python: str) -> dict:
    """One run -> its curve of (steps, minutes, return)."""
    start = time.time()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    if runner == "stable_baselines3":
        words = ["benchmarks/peers.py", runner, "cheetah", "--env-id", f"gym/{env}", "--seed", seed, "--learn", total]
        out = Run([python, *words], last_core()).finish()
        curve = json.loads(out.splitlines()[-1])["curve"]
    else:
        work = replace(WORKLOADS["cheetah"], env_id=f"gym/{env}")
        options = [*options_of(work), "--total-timesteps", total, "--seed", seed]
        if runner == "tandem_compiled":
            options += ["--compile"]
        folder = tempfile.mkdtemp()
        options += ["--save-interval", 0, "--eval-episodes", 1, "--output-dir", folder, "--run-name", "run"]
        Run([sys.executable, "ppo_ddp.py", *options], last_core()).finish()
        curve = [(e.step, e.wall_time, e.value) for e in read_events(f"{folder}/run", "charts/episodic_return")]
        shutil.rmtree(folder)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    busy = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    scale = busy / (time.time() - start) / 60  # from seconds on the clock to CPU minutes
    minutes = [(step, round((seconds - start) * scale, 3), round(value, 2)) for step, seconds, value in curve]
    stride = max(1, len(minutes) // POINTS)
    return {"return": minutes[-1][2], "minutes": minutes[-1][1], "curve": minutes[::-stride][::-1]}


def run_missing(envs: list[str], seeds: list[int], runners: list[str], total: int, peers_python: str) -> None:
    folder = folder_of(total)
    folder.mkdir(parents=True, exist_ok=True)
    git = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    about = {"total_timesteps": total, "commit": commit, "machine": cpu_name()}
    for seed in seeds:
        for env in envs:
            for runner in runners:
                file = folder / f"{env}_{runner}_{seed}.json"
                if file.exists():
                    continue
                python = peers_python
                if runner == "stable_baselines3" and not python:
                    python = install_peers()
                result = {"runner": runner, "env": env, "seed": seed} | train(runner, env, seed, total, python)
                file.write_text(json.dumps(result | about) + "\n")
                shown = f"return {result['return']:.0f} after {result['minutes']:.1f} minutes"
                print(f"{env}, {runner}, seed {seed}: {shown}", flush=True)


def load(total: int) -> dict[str, dict[str, list[dict]]]:
    """Runs by env and runner."""
    runs = {env: {runner: [] for runner in RUNNERS} for env in CLEANRL}
    for file in sorted(folder_of(total).glob("*.json")):
        run = json.loads(file.read_text())
        runs[run["env"]][run["runner"]].append(run)
    return runs


def table(runs: dict) -> None:
    print("| env | runner | seeds | return at the end | CPU minutes |\n|---|---|---|---|---|")
    for env, by_runner in runs.items():
        for runner, found in by_runner.items():
            if not found:
                continue
            returns = [run["return"] for run in found]
            minutes = [run["minutes"] for run in found]
            deviation = statistics.stdev(returns) if len(returns) > 1 else 0.0
            cells = [f"{statistics.mean(returns):.0f} ± {deviation:.0f}", f"{min(minutes):.1f} – {max(minutes):.1f}"]
            print(f"| {env} | {RUNNERS[runner]} | {len(found)} | " + " | ".join(cells) + " |")
        mean, deviation = CLEANRL[env]
        print(f"| {env.replace('v5', 'v4')} | CleanRL, published | 3 | {mean} ± {deviation} | |")


def plot(runs: dict, file: Path) -> None:
    import matplotlib.pyplot as plt

    colours = dict(zip(RUNNERS, ("tab:blue", "tab:cyan", "tab:orange")))
    figure, axes = plt.subplots(2, len(runs), figsize=(3.4 * len(runs), 5.2), sharey="col")
    for column, (env, by_runner) in enumerate(runs.items()):
        for runner, found in by_runner.items():
            for number, run in enumerate(found):
                steps, minutes, values = zip(*run["curve"])
                style = {"color": colours[runner], "linewidth": 1.1, "label": None if number else RUNNERS[runner]}
                axes[0, column].plot(steps, values, **style)
                axes[1, column].plot(minutes, values, **style)
        axes[0, column].axhline(CLEANRL[env][0], color="grey", linewidth=0.8, linestyle=":", label="CleanRL, published")
        axes[1, column].axhline(CLEANRL[env][0], color="grey", linewidth=0.8, linestyle=":")
        axes[0, column].set(title=env, xlabel="env steps")
        axes[1, column].set(xlabel="CPU minutes")
    axes[0, 0].set_ylabel("return of training episodes")
    axes[1, 0].set_ylabel("return of training episodes")
    axes[0, 0].legend(fontsize=7, frameon=False)
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    print(f"wrote {file.name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envs", nargs="+", choices=list(CLEANRL), default=list(CLEANRL))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--runners", nargs="+", choices=list(RUNNERS), default=["tandem", "stable_baselines3"])
    parser.add_argument("--total-timesteps", type=int, default=MILLION)
    parser.add_argument("--peers-python", default="", help="Python of an environment with the peers")
    parser.add_argument("--show", action="store_true", help="only the table and the plot")
    args = parser.parse_args()
    total = args.total_timesteps
    if not args.show:
        run_missing(args.envs, args.seeds, args.runners, total, args.peers_python)
    runs = load(total)
    table(runs)
    plot(runs, ROOT / "docs" / "images" / "mujoco.png" if total == MILLION else folder_of(total) / "mujoco.png")


if __name__ == "__main__":
    main()
