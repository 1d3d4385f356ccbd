"""Each simulator in an environment of its own: install it, check the contract, learn, and write down what came of it.

python benchmarks/simulators.py mjlab maniskill         # all that is known of them: minutes to an hour each
python benchmarks/simulators.py maniskill --only check  # or install, every, resume, ...: one part of it
python benchmarks/simulators.py table                   # what the results say, in Markdown
python benchmarks/simulators.py plot                    # docs/images/sim_NAME.png

The environments are kept in --venvs (gigabytes: Isaac Lab alone is 8) and used again. results/sim_NAME.json holds the
versions and, part by part: `check`, what the contract check printed; `every`, the same on all tasks of MetaWorld;
`resume`, whether a run that was killed (kill -9) and resumed ends with the weights of one that was not; `starts`,
whether two processes start their episodes in different states; `groups`, whether grpo_ddp.py runs, or is refused
where the simulator cannot share starts; `learn`, the learning runs with their curves. `clip` draws
docs/images/sim_NAME.gif; `plot` needs matplotlib.
"""

import argparse
import json
import platform
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
# What the scripts themselves need, without the pins of requirements.txt: the simulator chooses torch.
SCRIPTS = "accelerate==1.15.* tensordict tyro tensorboard safetensors tqdm psutil pillow gymnasium"
PARTS = ("check", "every", "resume", "starts", "groups", "learn")
TWO = "torchrun --standalone --nproc_per_node 2"
MANISKILL = (
    "--env-id maniskill/PushCube-v1 --num-envs 8 --num-steps 50 --gamma 0.8 --gae-lambda 0.9 --learning-rate 5e-4 "
    "--update-epochs 8 --bootstrap-at-done always --total-timesteps 320000 --eval-interval 40000 --eval-episodes 64"
)
# Isaac Lab's robots are remote files; newton, which it installs, ships the same cart. ROBOT stands for a copy of it.
ISAAC_CART = "scene.cartpole.spawn.usd_path=ROBOT scene.ground=none"
ISAACLAB = (
    "--env-id isaaclab/Isaac-Cartpole-Direct --num-envs 128 --num-steps 32 --gamma 0.99 --learning-rate 1e-3 "
    f"--total-timesteps 520000 --eval-interval 65000 --env-options {ISAAC_CART}"
)
GROUPS = "--num-envs 8 --group-size 4 --total-timesteps 1600 --eval-episodes 4"
MJLAB = (
    "--env-id mjlab/Mjlab-Cartpole-Balance --num-envs 32 --num-steps 64 --gamma 0.99 --learning-rate 1e-3 "
    "--total-timesteps 300000 --eval-interval 50000"
)
METAWORLD = (
    "--env-id metaworld/reach-v3 --num-envs 16 --num-steps 64 --gamma 0.97 --learning-rate 1e-3 --update-epochs 8 "
    "--norm-reward --total-timesteps 200000 --eval-interval 25000 --eval-episodes 32 "
    "--env-options max_episode_steps=100"
)
# CleanRL's settings for MuJoCo
CHEETAH = (
    "HalfCheetah-v5 --num-envs 8 --num-steps 256 --num-minibatches 32 --update-epochs 10 --learning-rate 3e-4 "
    "--gamma 0.99 --clip-vloss --norm-reward --init-logstd 0 --total-timesteps 200000"
)
# What `python -m envs` does, on all tasks in one process: episodes of 20 steps, every second task with its expert.
EVERY_METAWORLD = """
import json, sys, torch
from functools import partial
import envs
from envs.__main__ import Checker
torch.set_num_threads(1)
envs.draw_without_screen()
from envs.metaworld import SETS
results = {}
for k, task in enumerate(SETS["MT50"]):
    for options in ({}, {"camera": "corner2,wrist"}):
        make = partial(envs.make, "metaworld/" + task, seed=1, max_episode_steps=20, **options)
        checker = Checker(make, 2, 25, expert=k % 2 == 0)
        checker.run()
        kept = {name: checker.notes.get(name) for name in ("state", "starts", "groups")}
        results[task + (" rgb" if options else " state")] = {"broken": checker.broken} | kept
    print(k + 1, task, file=sys.stderr, flush=True)
print(json.dumps(results))
"""


@dataclass
class Simulator:
    install: list[str]  # what pip gets, call by call
    python: str = "python3.11"
    check: list[str] = field(default_factory=list)  # arguments of `python -m envs`
    learn: dict[str, tuple[str, str]] = field(default_factory=dict)  # name: command, what its curve shows
    every: str = ""  # Python that checks every task in one process and prints JSON
    resume: str = ""  # arguments of ppo_ddp.py for a run to be killed after its first checkpoint
    clip: str = ""  # a command that writes a GIF; RUN stands for the newest run of `learn`
    starts: str = ""  # arguments of ppo_ddp.py for a run of two processes whose starts are compared
    groups: str = ""  # arguments of grpo_ddp.py
    refused: str = ""  # what it says where groups are refused


SIMULATORS = {
    "metaworld": Simulator(
        install=["-r requirements.txt", "--no-deps metaworld==3.1.1", "scipy"],
        check=["metaworld/push-v3 --expert", "metaworld/MT10 --expert --num-envs 10"],
        every=EVERY_METAWORLD,
        groups=f"--env-id metaworld/reach-v3 {GROUPS} --env-options max_episode_steps=50",
        clip="python -m envs metaworld/MT10 --expert --num-envs 4 --steps 100 --video CLIP",
        resume="--env-id metaworld/push-v3 --num-envs 4 --num-steps 32 --total-timesteps 4096 --save-interval 1000 "
        "--eval-episodes 2 --env-options max_episode_steps=60",
        learn={
            "metaworld_reach": (f"python ppo_ddp.py {METAWORLD}", "eval/success_rate"),
            "metaworld_reach_seed2": (f"python ppo_ddp.py --seed 2 {METAWORLD}", "eval/success_rate"),
        },
    ),
    "envpool": Simulator(
        install=["-r requirements.txt", "envpool==1.2.5"],
        check=["envpool/HalfCheetah-v5", "envpool/Pong-v5 --steps 1000"],
        groups=f"--env-id envpool/HalfCheetah-v5 {GROUPS} --env-options max_episode_steps=50",
        clip="python -m envs envpool/Pong-v5 --num-envs 2 --steps 250 --video CLIP",
        resume="--env-id envpool/HalfCheetah-v5 --num-envs 4 --num-steps 32 --total-timesteps 40960 "
        "--save-interval 5000 --eval-episodes 2",
        learn={
            "halfcheetah_envpool": (f"python ppo_ddp.py --env-id envpool/{CHEETAH}", "charts/episodic_return"),
            "halfcheetah_gym": (f"python ppo_ddp.py --env-id gym/{CHEETAH}", "charts/episodic_return"),
            "halfcheetah_envpool_seed2": (
                f"python ppo_ddp.py --seed 2 --env-id envpool/{CHEETAH}",
                "charts/episodic_return",
            ),
            "halfcheetah_gym_seed2": (f"python ppo_ddp.py --seed 2 --env-id gym/{CHEETAH}", "charts/episodic_return"),
        },
    ),
    "maniskill": Simulator(
        install=["-r requirements.txt", "mani_skill==3.0.1"],
        check=[
            "maniskill/PushCube-v1",
            "maniskill/PickCube-v1",
            "maniskill/StackCube-v1",
            "maniskill/PushCube-v1 --env-options obs=rgb",
        ],
        clip="python ppo_ddp.py --evaluate --capture-video --env-id maniskill/PushCube-v1 --eval-episodes 8 "
        "--checkpoint RUN",
        resume="--env-id maniskill/PushCube-v1 --num-envs 4 --num-steps 30 --total-timesteps 2400 --save-interval 600 "
        "--eval-episodes 2",
        starts="--env-id maniskill/PushCube-v1 --num-envs 8 --num-steps 50 --total-timesteps 1600 --eval-episodes 2",
        groups=f"--env-id maniskill/PushCube-v1 {GROUPS}",
        learn={"maniskill_pushcube_2ranks": (f"{TWO} ppo_ddp.py {MANISKILL}", "eval/success_rate")},
    ),
    "mjlab": Simulator(
        install=["torch==2.13.0", f"mjlab==1.6.0 torch==2.13.0 {SCRIPTS}"],
        check=[
            "mjlab/Mjlab-Cartpole-Balance",
            "mjlab/Mjlab-Lift-Cube-Yam",
            "mjlab/Mjlab-Velocity-Flat-Unitree-Go1 --num-envs 4",
        ],
        resume="--env-id mjlab/Mjlab-Cartpole-Balance --num-envs 32 --num-steps 32 --total-timesteps 8192 "
        "--save-interval 2000 --eval-episodes 2",
        groups=f"--env-id mjlab/Mjlab-Cartpole-Balance {GROUPS}",
        refused="the envs of a group cannot share one",
        clip="python -m envs mjlab/Mjlab-Lift-Cube-Yam --num-envs 2 --steps 100 --video CLIP",
        learn={"mjlab_cartpole": (f"python ppo_ddp.py {MJLAB}", "eval/episodic_return")},
    ),
    "isaaclab": Simulator(
        python="python3.12",
        install=["isaaclab==3.0.0", SCRIPTS],
        check=[f"isaaclab/Isaac-Cartpole-Direct --env-options {ISAAC_CART}"],
        resume="--env-id isaaclab/Isaac-Cartpole-Direct --num-envs 32 --num-steps 32 --total-timesteps 8192 "
        f"--save-interval 2000 --eval-episodes 2 --env-options {ISAAC_CART}",
        starts="--env-id isaaclab/Isaac-Cartpole-Direct --num-envs 32 --num-steps 32 --total-timesteps 4096 "
        f"--eval-episodes 2 --env-options {ISAAC_CART}",
        groups=f"--env-id isaaclab/Isaac-Cartpole-Direct {GROUPS} --env-options {ISAAC_CART}",
        refused="the envs of a group cannot share one",
        learn={
            "isaaclab_cartpole": (f"python ppo_ddp.py {ISAACLAB}", "eval/episodic_length"),
            "isaaclab_cartpole_seed2": (f"python ppo_ddp.py --seed 2 {ISAACLAB}", "eval/episodic_length"),
            "isaaclab_cartpole_2ranks": (
                f"{TWO} ppo_ddp.py {ISAACLAB} --num-envs 32 --total-timesteps 40000",
                "eval/episodic_length",
            ),
        },
    ),
}
CURVE = """
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator(sys.argv[1], size_guidance={"scalars": 0})
events.Reload()
points = [(e.step, e.value) for e in events.Scalars(sys.argv[2])]
print(json.dumps([*points[: -1 : len(points) // 200 + 1], points[-1]]))
"""
SAME = """
import sys, torch
from safetensors.torch import load_file
one, two = (load_file(path) for path in sys.argv[1:])
print(one.keys() == two.keys() and all(torch.equal(x, two[name]) for name, x in one.items()))
"""
# A script, in which every process writes down the first states of four episodes before it begins.
STARTS = """
import os, runpy, sys, torch, envs
make = envs.make
def recorded(*args, **options):
    env = make(*args, **options)
    if options["seed"] == 1:  # not the evaluation's
        starts = torch.cat([env.reset(episode)["state"] for episode in range(4)])
        torch.save(starts, os.path.join(folder, "starts_" + os.environ["RANK"] + ".pt"))
    return env
envs.make = recorded
folder, *sys.argv = sys.argv[1:]
sys.path.insert(0, ".")
runpy.run_path(sys.argv[0], run_name="__main__")
"""
DISTINCT = """
import json, sys, torch
ranks = [torch.load(path) for path in sys.argv[1:]]
both = torch.cat(ranks)
nearest = torch.cdist(*(x.double() for x in ranks)).min().item()
print(json.dumps({"starts": len(both), "distinct": len(both.unique(dim=0)), "nearest_between_ranks": nearest}))
"""


def install(simulator: Simulator, venv: Path) -> None:
    if not (venv / "bin" / "python").exists():
        subprocess.run([simulator.python, "-m", "venv", venv], check=True)
    for packages in simulator.install:
        subprocess.run([venv / "bin" / "pip", "install", *packages.split()], cwd=ROOT, check=True)


def robot(venv: Path) -> Path:
    """A copy of newton's cart whose default prim has the name that is in the file."""
    target = venv / "cartpole.usda"
    (source,) = venv.glob("lib/python*/site-packages/newton/examples/assets/cartpole_single_pendulum.usda")
    target.write_text(source.read_text().replace('defaultPrim = "cartPole"', 'defaultPrim = "cartpole"'))
    return target


def words(command: str, venv: Path) -> list[str]:
    """A command of the tables above, with the programs of this environment."""
    if "ROBOT" in command:
        command = command.replace("ROBOT", str(robot(venv)))
    program, *rest = command.split()
    return [str(venv / "bin" / program), *rest]


def commit() -> str:
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return git.stdout.strip()


def check(simulator: Simulator, venv: Path) -> dict:
    checks = {}
    for arguments in simulator.check:
        start = time.time()
        done = subprocess.run(words(f"python -m envs {arguments}", venv), cwd=ROOT, capture_output=True, text=True)
        print(done.stdout, done.stderr[-2000:] if done.returncode else "", sep="\n")
        lines = [line for line in done.stdout.splitlines() if line.strip()]
        checks[arguments] = {"commit": commit(), "exit_code": done.returncode, "seconds": time.time() - start}
        checks[arguments]["printed"] = lines[-40:]
    return checks


def check_every(simulator: Simulator, venv: Path) -> dict:
    start = time.time()
    command = [venv / "bin" / "python", "-c", simulator.every]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    checks = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {}
    broken = {name: found["broken"] for name, found in checks.items() if found["broken"]}
    counts = {}
    for found in checks.values():
        for note in ("state", "starts", "groups"):
            line = f"{note}: {found[note]}"
            counts[line] = counts.get(line, 0) + 1
    result = {"commit": commit(), "exit_code": int(done.returncode != 0 or bool(broken)), "checked": len(checks)}
    return result | {"broken": broken, "notes": counts, "seconds": time.time() - start}


def python(venv: Path, code: str, *arguments) -> str:
    command = [venv / "bin" / "python", "-c", code, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def kill_and_resume(simulator: Simulator, venv: Path, folder: Path) -> dict:
    folder = folder / f"resume_{int(time.time())}"
    command = f"python ppo_ddp.py {simulator.resume}"
    train = [*words(command, venv), "--output-dir", str(folder), "--run-name"]
    result = {"command": command, "commit": commit()}
    subprocess.run([*train, "whole"], cwd=ROOT, check=True)
    killed = subprocess.Popen([*train, "killed"], cwd=ROOT)
    while killed.poll() is None and not list(folder.glob("killed/checkpoints/step_*")):
        time.sleep(0.01)
    time.sleep(0.2)  # into the steps after the checkpoint
    killed.kill()
    result["killed_by_signal"] = -killed.wait()
    found = sorted(int(path.name[5:]) for path in folder.glob("killed/checkpoints/step_*"))
    done = subprocess.run([*train, "killed", "--resume", "auto"], cwd=ROOT, capture_output=True, text=True)
    print(done.stdout, done.stderr[-2000:] if done.returncode else "", sep="\n")
    result |= {"exit_code": done.returncode, "checkpoints_at_the_kill": found}
    lines = [line.strip() for line in done.stdout.splitlines()]
    result["weaker"] = [line for line in lines if "not bit for bit" in line]
    last = sorted(folder.glob("whole/checkpoints/step_*"), key=lambda path: int(path.name[5:]))[-1].name
    models = [folder / name / "checkpoints" / last / "model.safetensors" for name in ("whole", "killed")]
    result["same_weights"] = python(venv, SAME, *models) == "True"
    result["exit_code"] = result["exit_code"] or int(not result["same_weights"] and not result["weaker"])
    return result


def compare_starts(simulator: Simulator, venv: Path, folder: Path) -> dict:
    folder = folder / f"starts_{int(time.time())}"
    folder.mkdir(parents=True)
    result = {"command": f"{TWO} ppo_ddp.py {simulator.starts}", "commit": commit()}
    launch = [*words(f"{TWO} --no-python", venv), venv / "bin" / "python", "-c", STARTS, folder]
    _, *script = words(f"python ppo_ddp.py --output-dir {folder} --run-name run {simulator.starts}", venv)
    done = subprocess.run([*launch, *script], cwd=ROOT)
    result["exit_code"] = done.returncode
    if done.returncode == 0:
        result |= json.loads(python(venv, DISTINCT, *sorted(folder.glob("starts_*.pt"))))
        result["exit_code"] = int(result["distinct"] != result["starts"])
    return result


def run_groups(simulator: Simulator, venv: Path, folder: Path) -> dict:
    command = f"python grpo_ddp.py {simulator.groups}"
    result = {"command": command, "commit": commit()}
    options = ["--output-dir", str(folder), "--run-name", f"groups_{int(time.time())}"]
    program, script, *rest = words(command, venv)
    done = subprocess.run([program, script, *options, *rest], cwd=ROOT, capture_output=True, text=True)
    said = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    result["said"] = said[-1].replace(f"{folder}/", "") if said else ""
    print(result["said"])
    as_it_should = (done.returncode != 0) == bool(simulator.refused) and simulator.refused in result["said"]
    return result | {"refused": done.returncode != 0, "exit_code": int(not as_it_should)}


def learn(simulator: Simulator, venv: Path, folder: Path) -> dict:
    runs = {}
    for name, (command, key) in simulator.learn.items():
        run = folder / f"{name}_{int(time.time())}"
        options = ["--output-dir", str(folder), "--run-name", run.name]
        runs[name] = {"command": command, "commit": commit()}  # before it starts: it may change meanwhile
        runs[name]["exit_code"] = subprocess.run([*words(command, venv), *options], cwd=ROOT).returncode
        if (run / "summary.json").exists():
            runs[name] |= read(run, key, venv)
    return runs


def clip(name: str, simulator: Simulator, venv: Path, folder: Path) -> None:
    source = folder / f"{name}.gif"
    command = simulator.clip.replace("CLIP", str(source))
    if "RUN" in command:
        run = sorted(folder.glob(f"{next(iter(simulator.learn))}_[0-9]*"))[-1]
        command = command.replace("RUN", str(run))
    subprocess.run(words(command, venv), cwd=ROOT, check=True)
    if not source.exists():  # a script writes it beside the checkpoint
        (source,) = {path.resolve() for path in run.glob("checkpoints/*/evaluation.gif")}
    shrink(source, ROOT / "docs" / "images" / f"sim_{name}.gif")


def shrink(source: Path, target: Path) -> None:
    """At most 30 frames of a GIF, in 64 colours."""
    from PIL import Image

    video = Image.open(source)
    stride = -(-video.n_frames // 30)
    frames = []
    for k in range(0, video.n_frames, stride):
        video.seek(k)
        frames.append(video.convert("RGB"))
    palette = frames[len(frames) // 2].quantize(64)
    frames = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    durations = [max(80, 40 * stride)] * (len(frames) - 1) + [1000]
    frames[0].save(target, save_all=True, append_images=frames[1:], duration=durations, loop=0)
    print(f"{target.name}: {len(frames)} frames, {target.stat().st_size / 1000:.0f} kB")


def plot() -> None:
    """docs/images/sim_NAME.png: the learning runs of each simulator that show the same, in one picture."""
    import matplotlib.pyplot as plt

    for name in SIMULATORS:
        path = RESULTS / f"sim_{name}.json"
        runs = json.loads(path.read_text()).get("learn", {}) if path.exists() else {}
        runs = {run: data for run, data in runs.items() if len(data.get("curve", [])) > 1}
        if not runs:
            continue
        figure, axes = plt.subplots(figsize=(5, 3))
        for run, data in runs.items():
            steps, values = zip(*data["curve"])
            axes.plot([step / 1000 for step in steps], values, label=run, linewidth=1.2)
        axes.set(xlabel="thousand env steps", ylabel=data["shows"], title=name)
        axes.legend(fontsize=7, frameon=False, loc="lower right")
        figure.tight_layout()
        figure.savefig(ROOT / "docs" / "images" / f"sim_{name}.png", dpi=110)
        plt.close(figure)


def read(run: Path, key: str, venv: Path) -> dict:
    """What is kept of a run: its last scores, and a curve."""
    summary = json.loads((run / "summary.json").read_text())
    kept = ("charts/SPS", "charts/episodic_length", "charts/episodic_return", "wall_seconds", "global_step")
    result = {k: v for k, v in summary.items() if k.startswith(("eval/", "env/")) or k in kept}
    curve = [venv / "bin" / "python", "-c", CURVE, run, key]
    curve = subprocess.run(curve, capture_output=True, text=True, check=True)
    return result | {"shows": key, "curve": json.loads(curve.stdout)}


def table() -> None:
    print("| simulator | versions | contract | learned |\n|---|---|---|---|")
    for name in SIMULATORS:
        path = RESULTS / f"sim_{name}.json"
        if not path.exists():
            continue
        result = json.loads(path.read_text())
        versions = ", ".join(f"{k} {v}" for k, v in result["versions"].items())
        checks = result.get("check", {}).values()
        passed = f"{sum(c['exit_code'] == 0 for c in checks)} of {len(checks)}"
        cells = []
        for run, data in result.get("learn", {}).items():
            if "curve" in data:
                cells.append(f"`{run}`: {data['shows']} {data[data['shows']]:.3g} at {data['global_step']:,} steps")
        print(f"| {name} | {versions} | {passed} | {'; '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=[*SIMULATORS, "table", "plot"])
    parser.add_argument("--only", choices=["install", *PARTS, "clip"])
    parser.add_argument("--venvs", type=Path, default=ROOT / "venvs")
    args = parser.parse_args()
    if args.names == ["table"]:
        return table()
    if args.names == ["plot"]:
        return plot()
    failed = False
    for name in args.names:
        simulator = SIMULATORS[name]
        venv = (args.venvs / name).absolute()
        if args.only in (None, "install"):
            install(simulator, venv)
        path = RESULTS / f"sim_{name}.json"
        result = json.loads(path.read_text()) if path.exists() else {}
        listed = json.loads(subprocess.check_output([venv / "bin" / "pip", "list", "--format", "json"]))
        shown = (
            "torch",
            "gymnasium",
            "mujoco",
            "numpy",
            "mani-skill",
            "mani_skill",
            "mjlab",
            "isaaclab",
            "metaworld",
            "envpool",
            "newton",
            "sapien",
        )
        result["versions"] = {p["name"]: p["version"] for p in listed if p["name"] in shown}
        result["install"] = simulator.install
        result["machine"] = f"2 cores, {platform.machine()}, shared with other jobs"
        if args.only in (None, "check"):
            result["check"] = check(simulator, venv)
        if simulator.every and args.only in (None, "every"):
            result["every"] = check_every(simulator, venv)
        folder = args.venvs.absolute() / "runs"
        if simulator.resume and args.only in (None, "resume"):
            result["resume"] = kill_and_resume(simulator, venv, folder)
        if simulator.starts and args.only in (None, "starts"):
            result["starts"] = compare_starts(simulator, venv, folder)
        if simulator.groups and args.only in (None, "groups"):
            result["groups"] = run_groups(simulator, venv, folder)
        if args.only in (None, "learn"):
            result["learn"] = learn(simulator, venv, folder)
        if simulator.clip and args.only in (None, "clip"):
            clip(name, simulator, venv, folder)
        path.write_text(json.dumps(result, indent=1))
        for part in (result.get(name, {}) for name in PARTS):
            failed |= any(done["exit_code"] for done in ([part] if "exit_code" in part else part.values()))
    sys.exit(failed)


if __name__ == "__main__":
    main()
