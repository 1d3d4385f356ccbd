"""Learning runs over several seeds, and the curves and tables in the docs made from them.

python benchmarks/learn.py run pushcube pushcube_2ranks     # seconds to minutes each; results/NAME.json
python benchmarks/learn.py plot                             # docs/images/NAME.png (needs: pip install matplotlib)
python benchmarks/learn.py gif                              # docs/images/pushcube.gif: the first command's policy
python benchmarks/learn.py clip                             # docs/images/vla_metaworld.gif: the policy of that run
python benchmarks/learn.py table                            # the table, in Markdown
"""

import json
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
TWO = "torchrun --standalone --nproc_per_node 2"
WARM = "python ppo_ddp.py --total-timesteps 50000"  # a policy that succeeds in about every fifth episode
LSTM = "python ppo_lstm_ddp.py"
PIXELS = f"{LSTM} --total-timesteps 120000 --learning-rate 5e-4 --eval-interval 12000"
PENDULUM = (
    f"{LSTM} --env-id gym/InvertedPendulum-v5 --env-options observe=0:2 --num-envs 8 --num-steps 128 "
    "--num-minibatches 4 --gamma 0.99 --total-timesteps 150000 --eval-interval 15000"
)
CHEETAH = (
    f"{LSTM} --env-id gym/HalfCheetah-v5 --env-options observe=0:8 --num-envs 8 --num-steps 256 --num-minibatches 8 "
    "--update-epochs 10 --learning-rate 3e-4 --gamma 0.99 --norm-reward --init-logstd 0 --total-timesteps 500000"
)
PONG = (  # CleanRL's settings for Atari, but for the learning rate (2.5e-4), which falls over 10M steps there
    f"{LSTM} --env-id envpool/Pong-v5 --env-options gray_scale=true --num-envs 8 --num-steps 128 --num-minibatches 4 "
    "--memory-size 128 --learning-rate 5e-4 --clip-coef 0.1 --gamma 0.99 --ent-coef 0.01 --max-grad-norm 0.5 "
    "--total-timesteps 2000000 --eval-interval 500000 --eval-episodes 4 --save-interval 0 --torch-threads 1"
)
# name: command, seeds, what is plotted
RUNS = {
    "pushcube": ("python ppo_ddp.py --eval-interval 25000", 5, "eval/success_rate"),
    "pushcube_2ranks": (f"{TWO} ppo_ddp.py --eval-interval 25000", 5, "eval/success_rate"),
    "pushcube_long": ("python ppo_ddp.py --total-timesteps 2500000 --eval-interval 125000", 2, "eval/success_rate"),
    "pushcube_long_2ranks": (
        f"{TWO} ppo_ddp.py --total-timesteps 2500000 --eval-interval 125000",
        1,
        "eval/success_rate",
    ),
    "cartpole": ("python ppo_ddp.py --env-id CartPole --eval-interval 25000", 3, "eval/success_rate"),
    "cartpole_2ranks": (f"{TWO} ppo_ddp.py --env-id CartPole --eval-interval 25000", 3, "eval/success_rate"),
    "lstm_memory": (f"{LSTM} --eval-interval 10000", 3, "eval/success_rate"),
    "lstm_memory_gru": (f"{LSTM} --memory gru --eval-interval 10000", 3, "eval/success_rate"),
    "lstm_memory_none": (f"{LSTM} --memory none --eval-interval 10000", 3, "eval/success_rate"),
    "lstm_memory_2ranks": (f"{TWO} ppo_lstm_ddp.py --eval-interval 10000", 3, "eval/success_rate"),
    "lstm_pixels": (f"{PIXELS} --env-id Tabletop", 3, "eval/success_rate"),
    "lstm_pixels_none": (f"{PIXELS} --env-id Tabletop --memory none", 1, "eval/success_rate"),
    "lstm_pixels_memory": (f"{PIXELS} --env-options camera=wrist", 3, "eval/success_rate"),
    "lstm_pendulum": (PENDULUM, 3, "eval/episodic_return"),
    "lstm_pendulum_none": (f"{PENDULUM} --memory none", 3, "eval/episodic_return"),
    "lstm_cheetah": (CHEETAH, 3, "charts/episodic_return"),
    "lstm_cheetah_none": (f"{CHEETAH} --memory none", 3, "charts/episodic_return"),
    "lstm_pong": (PONG, 1, "charts/episodic_return"),
    "grpo_pushcube": ("python grpo_ddp.py --eval-interval 50000", 5, "eval/success_rate"),
    "grpo_pushcube_2ranks": (f"{TWO} grpo_ddp.py --num-envs 128 --eval-interval 50000", 3, "eval/success_rate"),
    "grpo_pushcube_long": (
        "python grpo_ddp.py --total-timesteps 3000000 --eval-interval 150000",
        5,
        "eval/success_rate",
    ),
    "grpo_pushcube_trajectory": (
        "python grpo_ddp.py --eval-interval 50000 --advantage trajectory",
        3,
        "eval/success_rate",
    ),
    "grpo_pushcube_scale": ("python grpo_ddp.py --eval-interval 50000 --scale", 3, "eval/success_rate"),
    "grpo_pushcube_2episodes": (
        "python grpo_ddp.py --eval-interval 50000 --episodes-per-env 2 --num-minibatches 16",
        3,
        "eval/success_rate",
    ),
    "grpo_pushcube_4episodes": (
        "python grpo_ddp.py --eval-interval 50000 --episodes-per-env 4 --num-minibatches 32",
        3,
        "eval/success_rate",
    ),
    "grpo_pushcube_embodichain": (
        "python benchmarks/embodichain_grpo.py --eval-interval 50000",
        3,
        "eval/success_rate",
    ),
    "grpo_pushcube_different_starts": (
        "python benchmarks/embodichain_grpo.py --group-size 8 --no-scale --eval-interval 50000",
        3,
        "eval/success_rate",
    ),
    "grpo_cartpole": (
        "python grpo_ddp.py --env-id CartPole --num-envs 64 --eval-interval 50000",
        3,
        "eval/success_rate",
    ),
    "grpo_success": (
        "python grpo_ddp.py --reward success --init-from WARM --total-timesteps 1000000 --eval-interval 50000",
        3,
        "eval/success_rate",
    ),
    "vla": ("python ppo_vla_async.py --eval-interval 10000", 3, "eval/success_rate"),
    "vla_pi0": ("python ppo_vla_async.py --model-path tiny-pi0 --eval-interval 10000", 3, "eval/success_rate"),
    "vla_pi0_success": (
        "python ppo_vla_async.py --model-path tiny-pi0 --reward success --num-envs 256 --num-chunks 8 "
        "--num-minibatches 4 --update-epochs 1 --value-warmup 4 --gamma 0.98 --gae-lambda 0.95 --vf-coef 5 "
        "--no-anneal-lr --max-staleness 0 --torch-threads 1 --total-timesteps 260000 --eval-interval 20000",
        2,
        "eval/success_rate",
    ),
    "vla_success": (
        "python ppo_vla_async.py --reward success --action-chunk 4 --bc-updates 300 --num-envs 256 --num-minibatches 4 "
        "--update-epochs 1 --value-warmup 8 --gamma 0.98 --gae-lambda 0.95 --vf-coef 5 --total-timesteps 600000 "
        "--no-anneal-lr --max-staleness 0 --torch-threads 1 --eval-interval 40000",
        2,
        "eval/success_rate",
    ),
    "vla_metaworld": (
        "python ppo_vla_async.py --model-path tiny-pi0"
        " --env-id metaworld/coffee-button-v3,door-unlock-v3,button-press-v3"
        " --env-options camera=corner2 max_episode_steps=80 end_on_success=true --reward success"
        " --action-chunk 5 --denoise-steps 2 --noise-std 0.6 --bc-episodes 9 --bc-updates 600 --bc-draws 8"
        " --num-envs 120 --num-chunks 16 --num-minibatches 4 --update-epochs 1 --value-warmup 3 --gamma 0.99"
        " --gae-lambda 0.95 --vf-coef 5 --learning-rate 2e-4 --max-staleness 0 --torch-threads 1"
        " --total-timesteps 600000 --eval-interval 50000 --eval-episodes 150 --save-interval 0",
        3,
        "eval/success_rate",
    ),
    "vla_sync": ("python ppo_vla_async.py --max-staleness 0 --eval-interval 10000", 1, "eval/success_rate"),
}


def curve(run_dir: Path, key: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0})
    events.Reload()
    return [(e.step, e.value) for e in events.Scalars(key)]


def thin(points: list[tuple[int, float]], most: int = 200) -> list[tuple[int, float]]:
    """Every so many of them, and the last."""
    return [*points[: -1 : len(points) // most + 1], points[-1]]


def mean(points: list[tuple[int, float]]) -> float:
    return sum(x for _, x in points) / len(points)


def run(name: str) -> None:
    """One seed after the other; where a command says WARM, with a policy that WARM has trained with the same seed."""
    command, seeds, key = RUNS[name]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    result = {
        "command": command,
        "commit": commit.stdout.strip(),
        "machine": f"2 cores, {platform.machine()}",
        "seeds": {},
    }
    for seed in range(1, seeds + 1):
        with tempfile.TemporaryDirectory() as folder:

            def train(command: str, run_name: str) -> dict:
                words = [sys.executable if word == "python" else word for word in command.split()]
                options = ["--seed", str(seed), "--output-dir", folder, "--run-name", run_name]
                subprocess.run([*words, *options], cwd=ROOT, check=True)
                return json.loads((Path(folder) / run_name / "summary.json").read_text())

            start = train(WARM, "warm") if "WARM" in command else {}
            summary = train(command.replace("WARM", f"{folder}/warm"), "run")
            kept = {k: v for k, v in summary.items() if k.startswith("eval/") or k in ("charts/SPS", "wall_seconds")}
            result["seeds"][seed] = kept | {
                "global_step": summary["global_step"],
                "charts/episodic_return": summary["charts/episodic_return"],
                "curve": thin(curve(Path(folder) / "run", key)),
            }
            if "charts/valid_fraction" in summary:
                parts = ("charts/valid_fraction", "charts/idle_fraction", "charts/episodic_length")
                result["seeds"][seed] |= {f"mean of {k}": mean(curve(Path(folder) / "run", k)) for k in parts}
            if "eval/success_rate_wrong_instruction" in summary:
                steps = ("charts/staleness", "time/collect", "time/train", "time/learner_wait")
                result["seeds"][seed] |= {f"mean of {k}": mean(curve(Path(folder) / "run", k)) for k in steps}
                tasks = [k for k in summary if k.startswith("eval/success_rate/")]
                result["seeds"][seed] |= {f"curve of {k}": curve(Path(folder) / "run", k) for k in tasks}
            if name == "vla_metaworld":  # for the clip
                shutil.copytree(Path(folder) / "run" / "policy", ROOT / "runs" / f"{name}_{seed}", dirs_exist_ok=True)
            if start:
                result["warm"] = WARM
                result["seeds"][seed]["success_at_start"] = start["eval/success_rate"]
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1))


def table() -> None:
    print("| run | seeds | steps | success | return | seconds | steps/s |\n|---|---|---|---|---|---|---|")
    for name in RUNS:
        if not (RESULTS / f"{name}.json").exists():
            continue
        seeds = list(json.loads((RESULTS / f"{name}.json").read_text())["seeds"].values())

        def cell(key, form):
            values = [s[key] for s in seeds if key in s]
            return f"{min(values):{form}} – {max(values):{form}}" if values else ""

        cells = [cell("eval/success_rate", ".3f"), cell("eval/episodic_return", ".1f")]
        cells += [cell("wall_seconds", ".0f"), cell("charts/SPS", ".0f")]
        print(f"| `{name}` | {len(seeds)} | {seeds[0]['global_step']:,} | " + " | ".join(cells) + " |")


def short(steps: float, _=None) -> str:
    """A tick label: 0, 50k, 1.5M."""
    return f"{steps / 1e6:g}M" if abs(steps) >= 1e6 else f"{steps / 1e3:g}k" if steps else "0"


def plot() -> None:
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    for name, (_, _, key) in RUNS.items():
        if not (RESULTS / f"{name}.json").exists():
            continue
        result = json.loads((RESULTS / f"{name}.json").read_text())
        figure, axes = plt.subplots(figsize=(5, 3))
        for seed, data in result["seeds"].items():
            steps, values = zip(*data["curve"])
            axes.plot(steps, values, label=f"seed {seed}", linewidth=1.2)
        if name == "lstm_pong":  # and CleanRL's, by `recurrent.py --curve`: means of 20 episodes
            steps, returns = zip(*json.loads((RESULTS / "cleanrl_pong.json").read_text())["curve"])
            means = [statistics.mean(returns[i - 20 : i]) for i in range(20, len(returns) + 1)]
            axes.plot(steps[19:], means, label="CleanRL's ppo_atari_lstm.py", linewidth=1.2)
        axes.set(xlabel="env steps", ylabel=key, title=name)
        axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
        axes.xaxis.set_major_formatter(short)
        if key == "eval/success_rate":
            axes.axhline(0.95, color="grey", linewidth=0.8, linestyle=":")
            axes.set_ylim(-0.02, 1.02)
        axes.legend(fontsize=7, frameon=False, loc="lower right")
        figure.tight_layout()
        figure.savefig(ROOT / "docs" / "images" / f"{name}.png", dpi=110)
        plt.close(figure)


def gif() -> None:
    """Four evaluation episodes of PushCube, after one iteration (above) and at the end of the run (below)."""
    import numpy as np
    from PIL import Image, ImageDraw, ImageFont

    cell, part, side = 128, (0, 36, 92, 128), 184  # size of a picture; what is cut out of it; and drawn at what size

    def goal(picture) -> np.ndarray:
        red, green, blue = np.asarray(picture, dtype=int).transpose(2, 0, 1)
        return green > np.maximum(red, blue) + 20

    rows = []  # env steps, and for each episode its pictures
    for options in (["--total-timesteps", "1"], []):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "ppo_ddp.py", "--capture-video", "--output-dir", folder, "--run-name", "run"]
            subprocess.run([*command, *options], cwd=ROOT, check=True)
            (file,) = Path(folder).glob("run/videos/*.gif")
            video = Image.open(file)
            episodes = [[] for _ in range(video.width // cell)]
            running = [True] * len(episodes)
            for frame in range(video.n_frames):
                video.seek(frame)
                for i, pictures in enumerate(episodes):
                    picture = video.convert("RGB").crop((i * cell, 0, (i + 1) * cell, cell))
                    # A finished env shows the start of its next episode, with the goal elsewhere: stop before it.
                    running[i] &= not pictures or (goal(picture) & ~goal(pictures[0])).sum() < 20
                    if running[i]:
                        pictures.append(picture)
            rows.append((int(file.stem.removeprefix("step_")), episodes))

    frames = []
    for t in range(8 + max(len(pictures) for pictures in rows[-1][1])):
        frame = Image.new("RGB", (side * len(rows[0][1]), side * len(rows)))
        draw = ImageDraw.Draw(frame)
        for y, (steps, episodes) in enumerate(rows):
            for x, pictures in enumerate(episodes):
                picture = pictures[min(t, len(pictures) - 1)].crop(part)
                frame.paste(picture.resize((side, side), Image.Resampling.NEAREST), (x * side, y * side))
                draw.rectangle((x * side, y * side, (x + 1) * side, (y + 1) * side), outline=(150, 150, 150))
            corner = (frame.width - 6, (y + 1) * side - 6)
            draw.text(corner, f"after {steps:,} steps", (60, 60, 60), ImageFont.load_default(15), anchor="rb")
        frames.append(frame.quantize(32))
    target = ROOT / "docs" / "images" / "pushcube.gif"
    frames[0].save(target, save_all=True, append_images=frames[1:], duration=80, loop=0)
    print(f"{target.name}: {len(frames)} frames, {target.stat().st_size / 1000:.0f} kB")


def clip() -> None:
    """One evaluation episode of each task of the set, by the best policy of seed 1."""
    import torch
    from accelerate import Accelerator
    from PIL import Image

    sys.path.insert(0, str(ROOT))
    import envs
    import ppo_vla_async as vla

    command = [word for word in RUNS["vla_metaworld"][0].split() if word not in ("python", "ppo_vla_async.py")]
    args = vla.tyro.cli(vla.Args, args=command)
    args.model_path = str(ROOT / "runs" / "vla_metaworld_1")
    tasks = args.env_id.count(",") + 1
    options = envs.options(args.env_options)
    env = envs.make(args.env_id, tasks, device="cpu", seed=vla.EVAL_SEED, render=tasks, **options)
    agent = vla.FlowAgent(env, args.model_path, args)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "clip.gif"
        print(vla.show(vla.evaluate_policy(agent, env, Accelerator(cpu=True), file, tasks)))
        video = Image.open(file)
        frames = []
        for frame in range(0, video.n_frames, 4):
            video.seek(frame)
            picture = video.convert("RGB").resize((video.width * 2 // 3, video.height * 2 // 3))
            frames.append(picture.quantize(32, dither=Image.Dither.NONE))
    target = ROOT / "docs" / "images" / "vla_metaworld.gif"
    frames[0].save(target, save_all=True, append_images=frames[1:], duration=200, loop=0)
    print(f"{target.name}: {len(frames)} frames, {target.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    runs = lambda: [run(name) for name in sys.argv[2:]]  # noqa: E731
    actions = {"run": runs, "table": table, "plot": plot, "gif": gif, "clip": clip}
    if len(sys.argv) < 2 or sys.argv[1] not in actions or (sys.argv[1] == "run" and not set(sys.argv[2:]) <= set(RUNS)):
        sys.exit(f"usage: python benchmarks/learn.py run NAME... | table | plot | gif | clip   NAME: {', '.join(RUNS)}")
    actions[sys.argv[1]]()
