"""Each simulator in an environment of its own: install it, check the contract, learn, and write down what came of it.

python benchmarks/simulators.py mjlab maniskill         # all that is known of them: minutes to an hour each
python benchmarks/simulators.py maniskill --only check  # install, check or learn
python benchmarks/simulators.py table                   # what the results say, in Markdown

The environments are kept in --venvs (gigabytes: Isaac Lab alone is 8) and used again. results/sim_NAME.json holds the
versions, what the contract check printed, and the learning runs with their curves.
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
TWO = "torchrun --standalone --nproc_per_node 2"
MANISKILL = (
    "--env-id maniskill/PushCube-v1 --num-envs 8 --num-steps 50 --gamma 0.8 --gae-lambda 0.9 --learning-rate 5e-4 "
    "--update-epochs 8 --bootstrap-at-done always --total-timesteps 160000 --eval-interval 20000 --eval-episodes 32"
)
# Isaac Lab's robots are remote files; newton, which it installs, ships the same cart. ROBOT stands for a copy of it.
ISAAC_CART = "scene.cartpole.spawn.usd_path=ROBOT scene.ground=none"
ISAACLAB = (
    "--env-id isaaclab/Isaac-Cartpole-Direct --num-envs 128 --num-steps 32 --gamma 0.99 --learning-rate 1e-3 "
    f"--total-timesteps 260000 --eval-interval 130000 --env-options {ISAAC_CART}"
)
MJLAB = (
    "--env-id mjlab/Mjlab-Cartpole-Balance --num-envs 32 --num-steps 64 --gamma 0.99 --learning-rate 1e-3 "
    "--total-timesteps 300000 --eval-interval 50000"
)


@dataclass
class Simulator:
    install: list[str]  # what pip gets, call by call
    python: str = "python3.11"
    check: list[str] = field(default_factory=list)  # arguments of `python -m envs`
    learn: dict[str, tuple[str, str]] = field(default_factory=dict)  # name: command, what its curve shows


SIMULATORS = {
    "maniskill": Simulator(
        install=["-r requirements.txt", "mani_skill==3.0.1"],
        check=[
            "maniskill/PushCube-v1",
            "maniskill/PickCube-v1",
            "maniskill/StackCube-v1",
            "maniskill/PushCube-v1 --env-options obs=rgb",
        ],
        learn={"maniskill_pushcube_2ranks": (f"{TWO} ppo_ddp.py {MANISKILL}", "eval/success_rate")},
    ),
    "mjlab": Simulator(
        install=["torch==2.13.0", f"mjlab==1.6.0 torch==2.13.0 {SCRIPTS}"],
        check=["mjlab/Mjlab-Cartpole-Balance", "mjlab/Mjlab-Lift-Cube-Yam"],
        learn={"mjlab_cartpole": (f"python ppo_ddp.py {MJLAB}", "eval/episodic_return")},
    ),
    "isaaclab": Simulator(
        python="python3.12",
        install=["isaaclab==3.0.0", SCRIPTS],
        check=[f"isaaclab/Isaac-Cartpole-Direct --env-options {ISAAC_CART}"],
        learn={
            "isaaclab_cartpole": (f"python ppo_ddp.py {ISAACLAB}", "eval/episodic_length"),
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
print(json.dumps([(e.step, e.value) for e in events.Scalars(sys.argv[2])]))
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
    parser.add_argument("names", nargs="+", choices=[*SIMULATORS, "table"])
    parser.add_argument("--only", choices=["install", "check", "learn"])
    parser.add_argument("--venvs", type=Path, default=ROOT / "venvs")
    args = parser.parse_args()
    if args.names == ["table"]:
        return table()
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
            "newton",
            "sapien",
        )
        result["versions"] = {p["name"]: p["version"] for p in listed if p["name"] in shown}
        result["install"] = simulator.install
        result["machine"] = f"2 cores, {platform.machine()}, shared with other jobs"
        if args.only in (None, "check"):
            result["check"] = check(simulator, venv)
        if args.only in (None, "learn"):
            result["learn"] = learn(simulator, venv, args.venvs.absolute() / "runs")
        path.write_text(json.dumps(result, indent=1))
        failed |= any(done["exit_code"] for part in ("check", "learn") for done in result.get(part, {}).values())
    sys.exit(failed)


if __name__ == "__main__":
    main()
