"""GRPO, critic-free: episodes from the same start are compared with one another, and gradients averaged over processes.

    python grpo_ddp.py                                               # one process: PushCube, learned in seconds
    torchrun --standalone --nproc_per_node 2 grpo_ddp.py             # two processes, one per GPU where there are GPUs
    accelerate launch --multi_gpu --num_processes 2 --main_process_port 0 grpo_ddp.py
    torchrun --nnodes 2 --nproc_per_node 8 --rdzv_id 1 --rdzv_backend c10d --rdzv_endpoint HOST:29400 grpo_ddp.py
    python grpo_ddp.py --init-from runs/NAME --reward success        # fine-tune a policy of ppo_ddp.py on bare success
    python grpo_ddp.py --resume runs/NAME                            # go on where a run stopped, with the same options
    python grpo_ddp.py --evaluate --checkpoint runs/NAME             # score its best policy

Docs: docs/grpo_ddp.md
"""

import copy
import hashlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import psutil
import torch
import torch.nn as nn
import tyro
from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs
from accelerate.tracking import TensorBoardTracker, WandBTracker
from accelerate.utils import broadcast_object_list, gather_object
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file
from tensordict import TensorDict
from tqdm import tqdm

import envs

EVAL_SEED = 2**31 - 1  # evaluation always runs the same episodes, and training (by check_args) never sees them
MAX_SKIPPED = 8  # updates in a row whose gradients are not finite before the run gives up


@dataclass
class Args:
    # Experiment
    seed: int = 1
    """seed of the run: initial weights, actions, minibatches and initial states"""
    run_name: str = ""
    """folder of the run inside --output-dir (default: made from env, seed and time)"""
    output_dir: str = "runs"
    """where runs are written; with several nodes a folder that all of them see"""
    track: bool = False
    """also log to Weights & Biases (offline with WANDB_MODE=offline)"""
    wandb_project: str = "tandem"
    """Weights & Biases project"""
    eval_interval: int = 0
    """evaluate every so many env steps of all processes (0: only at the end)"""
    eval_episodes: int = 0
    """episodes of an evaluation, over all processes (0: 512 for embedded envs, 16 for simulators)"""
    save_interval: int = 100_000
    """save a checkpoint every so many env steps of all processes (0: only at the end)"""
    keep_checkpoints: int = 3
    """how many of the newest checkpoints to keep; the best one is kept besides"""
    capture_video: bool = False
    """draw four episodes of every evaluation into a GIF"""
    resume: str = ""
    """a run folder or checkpoint to go on from, or "auto": the newest good checkpoint of --run-name, if any"""
    evaluate: bool = False
    """only score the policy at --checkpoint"""
    checkpoint: str = ""
    """a run folder (its best checkpoint) or a checkpoint folder, for --evaluate"""
    init_from: str = ""
    """a run folder or checkpoint of ppo_ddp.py or grpo_ddp.py whose policy to start from"""

    # Environment
    env_id: str = "PushCube"
    """an embedded env (PushCube, CartPole; Tabletop has pictures) or gym/<id>, a Gymnasium env with Box observations"""
    num_envs: int = 256
    """parallel envs of each process"""
    group_size: int = 8
    """envs that share their initial states: the episodes that are compared with one another"""
    reward: Literal["env", "success"] = "env"
    """what counts: the env's rewards, or 1 at an episode's end if it was a success and nothing else"""

    # Algorithm
    total_timesteps: int = 1_000_000
    """env steps of all processes together"""
    learning_rate: float = 1e-3
    """learning rate of Adam at the start"""
    lr_schedule: Literal["constant", "linear", "adaptive"] = "linear"
    """linear: to zero at --total-timesteps; adaptive: up or down after each epoch to hold --desired-kl"""
    desired_kl: float = 0.01
    """KL divergence per epoch that the adaptive learning rate aims at"""
    gamma: float = 0.99
    """discount"""
    advantage: Literal["step", "trajectory"] = "step"
    """compare, at every step, the returns from there on of those still running, or whole returns"""
    scale: bool = False
    """divide advantages by the group's deviation, as the first GRPO does; without it, it is Dr. GRPO"""
    filter_success: tuple[float, float] = (0.0, 1.0)
    """leave out groups whose success rate is below the first or above the second number"""
    num_minibatches: int = 8
    """minibatches of an epoch; each holds that fraction of the samples of every process"""
    update_epochs: int = 4
    """passes over a rollout"""
    clip_coef: float = 0.2
    """clipping of the probability ratio"""
    clip_coef_high: float = 0.28
    """clipping of the probability ratio from above"""
    ent_coef: float = 0.0
    """weight of the entropy bonus"""
    kl_coef: float = 0.0
    """weight of the KL divergence to the policy at the start (0: none is kept)"""
    max_grad_norm: float = 0.5
    """gradients are scaled down to this norm"""
    target_kl: float = 0.0
    """no further epoch once the KL divergence of all processes passes this (0: off)"""
    norm_obs: bool = True
    """normalise observations by running statistics of all processes, saved with the model"""
    hidden_size: int = 64
    """width of the two hidden layers of each network"""
    init_logstd: float = -0.5
    """log standard deviation of a Gaussian policy at the start"""

    # Performance
    cpu: bool = False
    """use the CPU although there is a GPU"""
    backend: Literal["auto", "nccl", "gloo", "mpi"] = "auto"
    """process-group backend"""
    check_interval: int = 10
    """iterations between two checks that weights and statistics are the same on all ranks (0: off)"""
    timeout: float = 600.0
    """seconds after which a process that waits for the others gives up"""
    mixed_precision: Literal["no", "bf16", "fp16"] = "no"
    """autocast of the networks; fp16 needs a GPU"""
    compile: bool = False
    """torch.compile the networks and the loss (takes a minute to warm up)"""
    torch_threads: int = 1
    """CPU threads of each process for torch; small networks are slower with more"""


def fail(message: str) -> None:
    """End with one line and exit code 1. What all ranks know, all of them call this with, and rank 0 says it."""
    raise SystemExit(f"error: {message}" if int(os.environ.get("RANK", 0)) == 0 else 1)


def check_args(args: Args) -> None:
    positive = "num_envs total_timesteps num_steps num_minibatches update_epochs keep_checkpoints learning_rate "
    positive += "desired_kl clip_coef clip_coef_high max_grad_norm hidden_size timeout torch_threads num_chunks "
    positive += "action_bins action_chunk bc_episodes bc_batch bc_learning_rate value_learning_rate "
    positive += "gradient_accumulation behaviour_weight_cap"
    natural = "eval_interval eval_episodes save_interval check_interval ent_coef vf_coef kl_coef target_kl bc_updates "
    natural += "max_staleness value_warmup"
    fraction = "gamma gae_lambda preempt_fraction preempt_min"
    for name, value in asdict(args).items():
        option = f"--{name.replace('_', '-')}"
        if isinstance(value, float) and not math.isfinite(value):
            fail(f"{option} must be a number, not {value}")
        if name in positive.split() and not value > 0:
            fail(f"{option} must be greater than 0, not {value}")
        if name in natural.split() and not value >= 0:
            fail(f"{option} must be 0 or more, not {value}")
        if name in fraction.split() and not 0 <= value <= 1:
            fail(f"{option} must be between 0 and 1, not {value}")
    if not 0 <= args.seed < EVAL_SEED:
        fail(f"--seed must be between 0 and {EVAL_SEED - 1}, not {args.seed}")
    if args.evaluate != bool(args.checkpoint) or (args.evaluate and args.resume):
        fail("--evaluate goes with --checkpoint PATH, and not with --resume")
    if Path(args.run_name).name != args.run_name or args.run_name == "..":
        fail(f"--run-name must be a plain name, not {args.run_name!r}: --output-dir says where it goes")


def check_groups(args: Args) -> None:
    if args.group_size < 2 or args.num_envs % args.group_size:
        sizes = f"--num-envs {args.num_envs} and --group-size {args.group_size}"
        fail(f"{sizes}: the envs of a process must divide into groups of two or more")
    if not 0 <= args.filter_success[0] <= args.filter_success[1] <= 1:
        fail(f"--filter-success {args.filter_success} must be two fractions, the lower one first, such as 0.1 0.9")


def launch(args: Args) -> Accelerator:
    """Join the processes that the launcher started, or say why that would go wrong."""
    on_cpu = args.cpu or not torch.cuda.is_available()
    others = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
    world = int(os.environ.get("WORLD_SIZE") or max(int(os.environ.get(name, 1)) for name in others))
    advice = f"start several with 'torchrun --standalone --nproc_per_node {max(world, 2)} {sys.argv[0]}'"
    if "MASTER_ADDR" in os.environ and world == 1 and "RANK" not in os.environ:
        fail(f"MASTER_ADDR is set without WORLD_SIZE, so this is one process: {advice}, or unset MASTER_ADDR")
    if args.mixed_precision == "fp16" and on_cpu:
        fail("--mixed-precision fp16 needs a GPU: use bf16 or no")
    if args.backend == "nccl" and on_cpu:
        fail("--backend nccl needs a GPU: use gloo or auto")
    if args.backend == "mpi" and not torch.distributed.is_mpi_available():
        fail("--backend mpi needs a torch built with MPI: use gloo, nccl or auto")

    group = {"timeout": timedelta(seconds=args.timeout)}
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and world > 1:
        # CRUCIAL: torchrun keeps its store through a restart. Without a prefix of its own, a restarted process would
        # find the addresses of the dead ones there and fail to connect, or hang.
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = torch.distributed.TCPStore(*address, is_master=False, **group)
        store = torch.distributed.PrefixStore(f"attempt_{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
        backend = {"auto": "gloo" if on_cpu else "nccl"}.get(args.backend, args.backend)
        members = {"rank": int(os.environ["RANK"]), "world_size": world}
        torch.distributed.init_process_group(backend, store=store, **members, **group)
    if args.backend != "auto" and world > 1:
        group["backend"] = args.backend
    # The statistics in the buffers are equal by construction: broadcasting them would cost a collective per forward.
    ddp = DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)
    warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")  # Accelerate has no other name yet
    handlers = [ddp, InitProcessGroupKwargs(**group)]
    # CRUCIAL: without cpu=True torchrun on a machine without GPUs gives independent runs that never share a gradient.
    accelerator = Accelerator(cpu=on_cpu, mixed_precision=args.mixed_precision, kwargs_handlers=handlers)
    if accelerator.num_processes != world:
        fail(f"{world} processes were started, but {accelerator.num_processes} found each other: {advice}")
    return accelerator


class RunningMoments(nn.Module):
    """Mean and variance of all that was seen: part of the model, equal on all ranks as only their joint sums enter."""

    def __init__(self, size: int):
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("var", torch.ones(size, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((x - self.mean.float()) * (self.var + 1e-8).rsqrt().float()).clamp(-10.0, 10.0)

    def sums(self, x: torch.Tensor) -> torch.Tensor:
        """What one rank saw: count, sum and sum of squares, around the common mean so that no digits are lost."""
        x = x.reshape(-1, self.mean.numel()).double() - self.mean
        return torch.cat([x.new_full((1,), x.shape[0]), x.sum(0), x.square().sum(0)])

    def merge(self, sums: torch.Tensor) -> None:
        """Take in the sums of all ranks together."""
        count, delta, square = sums[0], *(sums[1:] / sums[0]).chunk(2)
        total = self.count + count
        spread = self.var * self.count + (square - delta.square()) * count
        self.var.copy_((spread + delta.square() * self.count * count / total) / total)
        self.mean.add_(delta * count / total)
        self.count.copy_(total)


def layer_init(layer: nn.Linear, std: float = math.sqrt(2)) -> nn.Linear:
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


def mlp(inputs: int, outputs: int, hidden: int, std: float) -> nn.Sequential:
    first, second = layer_init(nn.Linear(inputs, hidden)), layer_init(nn.Linear(hidden, hidden))
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), layer_init(nn.Linear(hidden, outputs), std))


class Agent(nn.Module):
    def __init__(self, env: envs.VecEnv, args: Args):
        super().__init__()
        size = math.prod(env.single_observation_space["state"].shape)
        self.discrete = hasattr(env.single_action_space, "n")
        actions = int(env.single_action_space.n) if self.discrete else env.single_action_space.shape[0]
        self.obs_moments = nn.ModuleDict({"state": RunningMoments(size) if args.norm_obs else nn.Identity()})
        self.actor = mlp(size, actions, args.hidden_size, std=0.01)
        if not self.discrete:
            self.actor_logstd = nn.Parameter(torch.full((actions,), args.init_logstd))

    def forward(self, obs: TensorDict, action: torch.Tensor | None = None, deterministic: bool = False):
        """-> action, log-probability, entropy. The only door, so that DDP and autocast see every call."""
        out = self.actor(self.obs_moments["state"](obs["state"])).float()
        if self.discrete:
            logits = out.log_softmax(-1)
            if action is None:
                noise = 0.0 if deterministic else -torch.empty_like(logits).exponential_().log()
                action = (logits + noise).argmax(-1)
            logprob = logits.gather(-1, action.unsqueeze(-1)).squeeze(-1)
            return action, logprob, -(logits.exp() * logits).sum(-1)
        logstd = self.actor_logstd.expand_as(out)
        if action is None:
            action = out if deterministic else out + logstd.exp() * torch.randn_like(out)
        logprob = -0.5 * ((action - out) / logstd.exp()).square() - logstd - 0.5 * math.log(2 * math.pi)
        return action, logprob.sum(-1), (logstd + 0.5 * math.log(2 * math.pi * math.e)).sum(-1)


def group_advantages(rewards, active, group_size: int, gamma: float, step_wise: bool, scale: bool):
    """-> advantages and where they are valid, both [T, N], and the return of each episode [N].

    Every env of [T, N] holds one episode, `active` until it ends; `group_size` neighbours started it in the same state.
    An advantage is how far a return lies above the group's mean, with `scale` in deviations of the group. `step_wise`
    compares the returns from a step on of those still running, else it is the whole ones, for all steps alike.
    """
    if rewards.dim() != 2 or rewards.shape != active.shape:
        raise ValueError(f"group_advantages needs [T, N] tensors of one shape, not {tuple(rewards.shape)}")
    returns = torch.empty_like(rewards)
    following = torch.zeros_like(rewards[0])
    for t in reversed(range(rewards.shape[0])):
        returns[t] = following = torch.where(active[t], rewards[t] + gamma * following, 0.0)
    steps = len(returns) if step_wise else 1
    scores, members = (x[:steps].unflatten(1, (-1, group_size)) for x in (returns, active))
    count = members.sum(-1, keepdim=True).clamp(min=1)
    mean = (scores * members).sum(-1, keepdim=True) / count
    offset = (scores - mean) * members
    deviation = (offset.square().sum(-1, keepdim=True) / count).sqrt()
    # CRUCIAL: where all did equally well there is nothing to learn. Divided by a deviation that is but rounding error,
    # the differences would look as large as real ones.
    signal = deviation > 1e-5 * (scores * members).abs().amax(-1, keepdim=True)
    advantages = torch.where(signal, offset / deviation if scale else offset, 0.0).flatten(1)
    valid = signal.expand_as(offset).flatten(1) & active
    return advantages * valid, valid, returns[0]


def grpo_loss(
    newlogprob, entropy, logprob, advantage, ref_logprob, clip_coef, clip_coef_high, ent_coef, kl_coef
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss summed over the samples, and the sums of what is logged (LOSSES)."""
    logratio = newlogprob - logprob
    ratio = logratio.exp()
    pg_loss = torch.max(-advantage * ratio, -advantage * ratio.clamp(1 - clip_coef, 1 + clip_coef_high))
    # The estimator of KL(new, reference) that is never negative and has little variance (k3).
    ref_logratio = torch.zeros_like(newlogprob) if ref_logprob is None else ref_logprob - newlogprob
    ref_kl = (ref_logratio.exp() - 1) - ref_logratio
    loss = pg_loss - ent_coef * entropy + kl_coef * ref_kl
    clipped = ((ratio < 1 - clip_coef) | (ratio > 1 + clip_coef_high)).float()
    logged = torch.stack([pg_loss, entropy, -logratio, (ratio - 1) - logratio, clipped, ref_kl])
    return loss.sum(), logged.detach().sum(1)


LOSSES = [f"losses/{k}" for k in ("policy_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac", "ref_kl")]


@torch.no_grad()
def evaluate(agent: nn.Module, env: envs.VecEnv, accelerator: Accelerator, video: Path | None) -> dict[str, float]:
    """One deterministic episode in each eval env of every rank, so that short episodes are not favoured."""
    obs, active = env.reset(), torch.ones(env.num_envs, dtype=torch.bool, device=env.device)
    totals = torch.zeros(4, dtype=torch.float64, device=env.device)
    frames, step = [], 0
    while active.any():
        if video and step % math.ceil(env.max_episode_steps / 250) == 0:
            frames.append(env.render())
        action = agent(obs, deterministic=True)[0]
        obs, _, terminated, truncated, info = env.step(action, active)
        ended = (terminated | truncated) & active
        stats = torch.stack([ended.float(), *(info["episode"][k].float() for k in ("return", "length", "success"))])
        totals += torch.where(ended, stats, 0.0).double().sum(1)
        active, step = active & ~ended, step + 1
    if video:
        save_video(frames, video)
    count, *sums = accelerator.gather(totals[None]).sum(0).tolist()
    names = ("eval/episodic_return", "eval/episodic_length", "eval/success_rate")
    return {k: x / count for k, x in zip(names, sums) if not math.isnan(x)} | {"eval/episodes": count}


def save_video(frames: list[torch.Tensor], path: Path) -> None:
    """Frames of [n, H, W, 3], the n side by side, as a GIF."""
    path.parent.mkdir(parents=True, exist_ok=True)
    images = [Image.fromarray(torch.cat(list(frame.cpu()), dim=1).numpy()) for frame in frames]
    images[0].save(path, save_all=True, append_images=images[1:], duration=40, loop=0)


def due(interval: int, before: int, after: int) -> bool:
    """Whether a multiple of the interval was passed, exactly met or not."""
    return interval > 0 and after // interval > before // interval


def checksum(tensors: list[torch.Tensor]) -> torch.Tensor:
    """A number that changes with any bit of them, small enough for float64 to hold exactly."""
    total = torch.zeros((), dtype=torch.int64, device=tensors[0].device)
    for t in tensors:
        bits = t.detach().reshape(-1).view(torch.int16).long()
        place = torch.arange(len(bits), device=bits.device) % 32749 + 1
        total = (31 * total + (bits * place).sum()) % 2**52
    return total.double()


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write(path: Path, text: str) -> None:
    """Replace a file as a whole: whoever reads it sees the old text or the new one."""
    part = path.with_name(f".{path.name}.part")
    with part.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def save_checkpoint(
    folder: Path, accelerator: Accelerator, model: dict, about: dict, trainer: dict, local: dict, best: bool
):
    """Write a checkpoint, all ranks together. Killed at any moment, it leaves those before it as they were."""
    part, errors = folder.with_name(f".{folder.name}.part"), []
    try:
        part.mkdir(parents=True, exist_ok=True)
        torch.save(local, part / f"rank_{accelerator.process_index}.pt")
        if accelerator.is_main_process:
            model = {k: v.detach().cpu().contiguous() for k, v in model.items()}
            save_file(model, part / "model.safetensors", metadata={"about": json.dumps(about)})
            torch.save(trainer, part / "trainer.pt")
    except Exception as error:
        errors = [str(error)]
    # CRUCIAL: whatever happened to a rank, it comes here: the others wait for its word.
    errors = gather_object(errors)
    try:
        if accelerator.is_main_process and not errors:
            names = ["model.safetensors", "trainer.pt", *(f"rank_{r}.pt" for r in range(accelerator.num_processes))]
            for name in names:
                with (part / name).open("rb") as file:
                    os.fsync(file.fileno())
            write(part / "manifest.json", json.dumps({name: digest(part / name) for name in names}))
            shutil.rmtree(folder, ignore_errors=True)
            part.rename(folder)
            for pointer in ["best"] * best + ["latest"]:
                write(folder.parent / pointer, folder.name)
    except Exception as error:
        errors = [str(error)]
    if errors := gather_object(errors):
        fail(f"cannot save {folder}: {errors[0]}; the checkpoints before it are untouched")


def find_checkpoints(path: Path, pointer: str) -> list[Path]:
    """The checkpoints that a path may mean: itself, or those of a run, the one its pointer names first, then by age."""
    if (path / "manifest.json").exists():
        return [path]
    folder = path / "checkpoints"
    named = (folder / pointer).read_text() if (folder / pointer).exists() else None
    found = [p for p in folder.glob("step_*") if p.name.removeprefix("step_").isdigit()]
    return sorted(found, key=lambda p: (p.name == named, int(p.name.removeprefix("step_"))), reverse=True)


def load_checkpoint(folder: Path, rank: int) -> tuple[dict, dict, dict, dict | None]:
    """-> model, about, trainer, and the rank's own state if there is one. Nothing in the files is executed."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        names = ["model.safetensors", "trainer.pt"] + [n for n in [f"rank_{rank}.pt"] if n in manifest]
        for name in names:
            if digest(folder / name) != manifest[name]:
                raise ValueError(f"{name} is damaged")
        with safe_open(folder / "model.safetensors", "pt") as file:
            model, about = {k: file.get_tensor(k) for k in file.keys()}, json.loads(file.metadata()["about"])
        trainer, *local = (torch.load(folder / name, map_location="cpu", weights_only=True) for name in names[1:])
        return model, about, trainer, local[0] if local else None
    except Exception as error:
        reason = str(error).split("\n")[0]
        raise ValueError(f"{folder} is not a good checkpoint: {reason}") from error


def load_together(folders: list[Path], accelerator: Accelerator, fall_back: bool):
    """The first of the checkpoints that every rank finds good, with its content: one rank alone may see a bad file."""
    for folder in folders:
        try:
            loaded, errors = load_checkpoint(folder, accelerator.process_index), []
        except ValueError as error:
            loaded, errors = None, [str(error)]
        if not (errors := gather_object(errors)):
            return folder, *loaded
        if not fall_back:
            fail(errors[0])
        accelerator.print(f"{errors[0]}; trying the one before it")
    return None


def load_model(agent: nn.Module, folder: Path, model: dict, about: dict, args: Args) -> None:
    for name in ("env_id", "hidden_size", "norm_obs"):  # what gives the networks their shapes and their meaning
        old, new = about["args"].get(name), getattr(args, name)
        if old != new:
            fail(f"{folder} was trained with {name} = {old}, not {new}: set --{name.replace('_', '-')} to match it")
    try:
        agent.load_state_dict(model)
    except RuntimeError as error:
        fail(f"{folder} does not fit this model: {' '.join(str(error).split())}")


def open_run(args: Args, accelerator: Accelerator, stem: str):
    """-> the run's folder, whether it may exist already, and the loaded checkpoint to go on from, if any."""
    elastic = "TORCHELASTIC_RUN_ID" in os.environ
    launched = psutil.Process(os.getppid() if elastic else os.getpid()).create_time()  # the same after a restart
    started = time.strftime("%Y%m%d-%H%M%S", time.localtime(launched))
    run_dir, folders = Path(args.output_dir) / (args.run_name or f"{stem}__{started}"), []
    if args.resume not in ("", "auto"):
        folders = find_checkpoints(Path(args.resume).resolve(), "latest")[:1]
        if folders and folders[0].parent.name == "checkpoints":
            run_dir = folders[0].parent.parent
    elif args.resume == "auto" and not args.run_name:
        run_dir = max([p.parent for p in Path(args.output_dir).glob(f"{stem}__*/checkpoints")], default=run_dir)
    # torchrun starts all ranks anew when one died: then go on with what this very launch has written.
    restarted = elastic and (run_dir / "args.json").exists() and (run_dir / "args.json").stat().st_mtime >= launched
    search = args.resume == "auto" or restarted
    if search:
        folders = find_checkpoints(run_dir, "latest")
    run_dir, folders, search = broadcast_object_list([run_dir, folders, search])  # as rank 0 sees them
    if args.resume and not search and not folders:
        fail(f"nothing to resume at {args.resume}: give a run folder or one of its checkpoints/step_* folders")
    return run_dir, search or bool(args.resume), load_together(folders, accelerator, fall_back=search)


def main(args: Args) -> None:
    # ---- Set up
    check_args(args)
    check_groups(args)
    accelerator = launch(args)
    rank, world, device = accelerator.process_index, accelerator.num_processes, accelerator.device
    torch.set_num_threads(args.torch_threads)
    embedded = "/" not in args.env_id
    eval_episodes = args.eval_episodes or max(512 if embedded else 16, world)
    if eval_episodes < world:
        fail(f"--eval-episodes {eval_episodes} leaves a process without an episode: give at least {world}")
    first, last = eval_episodes * rank // world, eval_episodes * (rank + 1) // world
    render = (4 if embedded else 1) if args.capture_video and rank == 0 else 0
    errors = []
    try:
        eval_env = envs.make(args.env_id, last - first, device=device, seed=EVAL_SEED, first_env=first, render=render)
        # CRUCIAL: seeded by the global index of each group: with seed + rank, ranks would share most initial states.
        settings = {"first_env": rank * args.num_envs, "group_size": args.group_size}
        env = envs.make(args.env_id, args.num_envs, device=device, seed=args.seed, **settings)
        if "rgb" in env.single_observation_space.keys():
            raise ValueError(
                f"{args.env_id} is to be seen in pictures, which this policy has no eyes for: use ppo_vla_async.py"
            )
    except ValueError as error:
        errors = [str(error)]
    if errors := gather_object(errors):
        fail(errors[0])
    torch.manual_seed(args.seed)  # the same weights on every rank
    agent = Agent(env, args).to(device)

    if args.evaluate:
        if not (found := broadcast_object_list([find_checkpoints(Path(args.checkpoint), "best")[:1]])[0]):
            fail(f"no checkpoint at {args.checkpoint}: give a run folder or one of its checkpoints/step_* folders")
        folder, weights, about, _, _ = load_together(found, accelerator, fall_back=False)
        load_model(agent, folder, weights, about, args)
        scores = evaluate(agent, eval_env, accelerator, folder / "evaluation.gif" if render else None)
        accelerator.print(f"{folder}: " + ", ".join(f"{k} {v:.4g}" for k, v in scores.items()))
        accelerator.end_training()
        return

    run_dir, may_exist, loaded = open_run(args, accelerator, f"{args.env_id.replace('/', '-')}__grpo_ddp__{args.seed}")
    if loaded:
        folder, weights, about, trainer, local = loaded
        load_model(agent, folder, weights, about, args)
    elif args.init_from:
        if not (found := broadcast_object_list([find_checkpoints(Path(args.init_from), "best")[:1]])[0]):
            fail(f"no checkpoint at {args.init_from}: give a run folder or one of its checkpoints/step_* folders")
        folder, weights, about, _, _ = load_together(found, accelerator, fall_back=False)
        mine = agent.state_dict()  # of a checkpoint of ppo_ddp.py all but its critic
        load_model(agent, folder, {k: v for k, v in weights.items() if k in mine}, about, args)
        accelerator.print(f"starting from the policy of {folder}")
    reference = copy.deepcopy(agent).requires_grad_(False) if args.kl_coef else None
    loss_fn = grpo_loss
    if args.compile:
        agent.compile()
        loss_fn = torch.compile(grpo_loss)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)
    # CRUCIAL: what is trained on goes through `model`. `agent`, the same networks without DDP's hooks, would learn on
    # each rank alone, and no error would tell.
    model, optimizer = accelerator.prepare(agent, optimizer)
    # Accelerate's wrapper is there for fp16; without that, all it adds is a search of the disk at every step.
    adam = optimizer if accelerator.scaler else optimizer.optimizer
    next_obs = env.reset()
    # CRUCIAL: DDP regroups its gradients after its first backward, which changes the order of summation. A backward
    # that counts for nothing lets a resumed run sum in the same order as one that never stopped.
    accelerator.backward(0.0 * sum(x.sum() for x in model(next_obs)[1:]))
    optimizer.zero_grad()
    torch.manual_seed(args.seed + 1_000_003 * (rank + 1))  # other actions and minibatches on every rank

    # ---- Resume
    global_step, iteration, steps_trained, best = 0, 0, 0, None
    learning_rate = args.learning_rate
    if loaded:
        accelerator.print(f"resuming {folder}")
        for name, new in json.loads(json.dumps(asdict(args))).items():
            if (old := about["args"].get(name)) != new and name not in ("resume", "run_name", "output_dir"):
                accelerator.print(f"  --{name.replace('_', '-')} is {new}, was {old}")
        global_step, iteration, steps_trained = trainer["global_step"], trainer["iteration"], trainer["steps_trained"]
        best = trainer["best"]
        if args.lr_schedule == "adaptive":  # the other schedules follow from the arguments
            learning_rate = trainer["learning_rate"]
        optimizer.optimizer.load_state_dict(trainer["optimizer"])
        if reference and trainer["reference"]:
            reference.load_state_dict(trainer["reference"])
        elif reference:
            accelerator.print("  the KL is to the policy of this checkpoint: the run has kept no older one")
        changed = f"{trainer['world_size']} processes became {world}" if trainer["world_size"] != world else None
        if not changed and about["args"]["num_envs"] != args.num_envs:
            changed = "--num-envs changed"
        if changed:
            accelerator.print(f"  actions are drawn anew, because {changed}: the run goes on, but not bit for bit")
            torch.manual_seed(args.seed + 1_000_003 * (rank + 1) + iteration)
        else:
            torch.set_rng_state(local["rng"])
            if device.type == "cuda" and local["cuda_rng"] is not None:
                torch.cuda.set_rng_state(local["cuda_rng"], device)
        if global_step >= args.total_timesteps:
            accelerator.print(f"nothing to do: {folder} has them all; raise --total-timesteps to train further")

    # ---- The run's folder, trackers and signals
    errors = []
    try:
        if accelerator.is_main_process:
            run_dir.mkdir(parents=True, exist_ok=may_exist)
            write(run_dir / "args.json", json.dumps(asdict(args), indent=2))
            (run_dir / "preempted").unlink(missing_ok=True)
            for part in run_dir.glob("checkpoints/.*.part"):
                shutil.rmtree(part) if part.is_dir() else part.unlink()
            for newer in find_checkpoints(run_dir, "latest"):  # damaged, or left behind by going back
                if int(newer.name.removeprefix("step_")) > global_step:
                    aside = newer.with_name(f"abandoned_{newer.name}")
                    shutil.rmtree(aside, ignore_errors=True)
                    newer.rename(aside)
                    if (best_file := newer.with_name("best")).exists() and best_file.read_text() == newer.name:
                        best_file.unlink()
    except FileExistsError:
        errors = [f"{run_dir} exists already: choose another --run-name, or go on with --resume {run_dir}"]
    except OSError as error:
        errors = [f"cannot write to {run_dir}: {error.strerror}; choose another --output-dir"]
    if errors := gather_object(errors):
        fail(errors[0])
    trackers = [TensorBoardTracker(run_dir.name, run_dir.parent, purge_step=global_step + 1 if loaded else None)]
    if args.track:
        run_id = hashlib.sha256(str(run_dir.resolve()).encode()).hexdigest()[:16]
        settings = {"name": run_dir.name, "id": run_id, "resume": "allow", "dir": run_dir, "config": asdict(args)}
        trackers.append(WandBTracker(args.wandb_project, **settings))
    accelerator.log_with = trackers
    try:
        accelerator.init_trackers(args.wandb_project)
    except Exception as error:
        if not may_exist:
            shutil.rmtree(run_dir)
        reason = str(error).split("\n")[0]
        fail(f"cannot start Weights & Biases ({reason}): run 'wandb login', or set WANDB_MODE=offline")
    stop_signals: list[float] = []

    def on_signal(number, frame):
        # A second Ctrl-C leaves at once; within a second it is torchrun passing the first one on.
        if number == signal.SIGINT and stop_signals and time.time() - stop_signals[0] > 1.0:
            os._exit(130)
        stop_signals.append(time.time())

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, on_signal)
    about = {"env_id": args.env_id, "args": asdict(args)}
    versions = {k: version(k) for k in ("torch", "accelerate", "tensordict", "gymnasium")}
    groups = f"{world} x {args.num_envs // args.group_size} groups of {args.group_size} envs"
    accelerator.print(f"{args.env_id}: {groups} on {device.type}, writing to {run_dir}")
    bar = accelerator.is_main_process and sys.stderr.isatty()
    progress = tqdm(total=args.total_timesteps, initial=global_step, unit="step", unit_scale=True, disable=not bar)

    # ---- Storage: [T, N] of everything, allocated once; the step loop writes into its leaves
    T, N = env.max_episode_steps, args.num_envs
    storage = TensorDict({"obs": {k: torch.zeros(T, *v.shape, dtype=v.dtype) for k, v in next_obs.items()}}, [T, N])
    dtype = torch.int64 if agent.discrete else torch.float32
    storage["action"] = torch.zeros(T, N, *env.single_action_space.shape, dtype=dtype)
    storage["active"] = torch.zeros(T, N, dtype=torch.bool)
    storage["logprob"], storage["reward"] = torch.zeros(2, T, N)
    storage = storage.to(device)
    leaves, obs_leaves = dict(storage.items()), dict(storage["obs"].items())
    parameters, skipped_in_a_row = list(agent.parameters()), torch.zeros((), device=device)
    start_time = last_print = time.time()
    start_iteration, timed_steps, timed_seconds, stopping = iteration, 0, 0.0, False

    while global_step < args.total_timesteps and not stopping:
        iteration += 1
        if args.lr_schedule == "linear":
            learning_rate = args.learning_rate * (1.0 - global_step / args.total_timesteps)

        # ---- Rollout: one episode in each env, with the statistics of the observations frozen
        rollout_start = time.perf_counter()
        env_metrics, episodes = {}, torch.zeros(N, 3, device=device)
        active = torch.ones(N, dtype=torch.bool, device=device)
        with torch.no_grad():
            # CRUCIAL: the number of the iteration makes the starts: new ones each time, and the same after a resume.
            next_obs = env.reset(episode=iteration)
            for step in range(T):
                action, logprob, _ = agent(next_obs)
                for name, leaf in obs_leaves.items():
                    leaf[step] = next_obs[name]
                next_obs, reward, terminated, truncated, info = env.step(action, active)
                ended = active & (terminated | truncated)
                stats = torch.stack([info["episode"][k].float() for k in ("return", "length", "success")], -1)
                episodes = torch.where(ended[:, None], stats, episodes)
                if args.reward == "success":
                    reward = torch.where(ended, stats[:, 2], 0.0)
                row = {"action": action, "logprob": logprob, "reward": reward, "active": active}
                for name, x in row.items():
                    leaves[name][step] = x
                for name, x in info["metrics"].items():
                    env_metrics[name] = env_metrics.get(name, 0.0) + (x * active).sum()
                active = active & ~ended
                if not active.any():
                    break
            steps = step + 1
            returns, lengths, success = episodes.unbind(1)
            unknown = (args.reward == "success" or args.filter_success != (0.0, 1.0)) and bool(success.isnan().any())

            # ---- Advantages
            rollout = storage[:steps]
            obs, rewards, active = (rollout[k] for k in ("obs", "reward", "active"))
            finite = unknown or all(x.isfinite().all() for x in (rewards, *obs.values()))
            advantages, valid, scores = group_advantages(
                rewards, active, args.group_size, args.gamma, args.advantage == "step", args.scale
            )
            low, high = args.filter_success
            rate = success.nan_to_num().view(-1, args.group_size).mean(1)
            valid = valid & ((low <= rate) & (rate <= high)).repeat_interleave(args.group_size)
            rollout["advantage"] = advantages

            # ---- The one exchange before the update: counts, flags and sums of each rank
            groups = scores.view(-1, args.group_size)
            silent = ~valid.any(0).view(-1, args.group_size).any(1)
            sums = [x.double().sum() for x in (returns, lengths, success, scores, groups.std(1, correction=0), silent)]
            flags = [active.numel(), active.sum(), valid.sum(), not finite, unknown, bool(stop_signals)]
            flags = torch.tensor(flags, dtype=torch.float64, device=device)
            rollout_seconds = time.perf_counter() - rollout_start
            gathered = accelerator.gather(torch.cat([flags, torch.stack(sums)])[None]).cpu()
            wait_seconds = time.perf_counter() - rollout_start - rollout_seconds
        flags, sums = gathered.split([len(flags), len(sums)], dim=1)
        rows, collected, counts, broken, unknown, stop = flags.long().unbind(1)
        if broken.any():
            where = ", ".join(map(str, broken.nonzero().view(-1).tolist()))
            fail(f"NaN or infinity from {args.env_id} on rank {where} in iteration {iteration}: no update was made")
        if unknown.any():
            fail(f"{args.env_id} does not always say what success is: leave --reward and --filter-success as they are")
        steps_taken, samples = int(collected.sum()), int(counts.sum())
        global_step += steps_taken
        finished = global_step >= args.total_timesteps
        stopping = bool(stop.any()) and not finished
        *episode_means, group_mean, group_std, silent = (sums.sum(0) / (world * N)).tolist()

        # ---- Update: the same number of minibatches on every rank, whatever it holds; one collective in each, DDP's
        update_start = time.perf_counter()
        flat = rollout.reshape(-1)
        batch, spare = flat[valid.view(-1)], flat[:1]
        if reference:
            with torch.no_grad(), accelerator.autocast():
                for part in (batch, spare):
                    part["ref_logprob"] = reference(part["obs"], part["action"])[1]
        edges = counts * torch.arange(args.num_minibatches + 1)[:, None] // args.num_minibatches
        mine, in_all = edges.diff(dim=0)[:, rank].tolist(), edges.diff(dim=0).sum(1).tolist()  # samples by minibatch
        logged = torch.zeros(len(LOSSES), dtype=torch.float64, device=device)
        norms, skipped, epochs = torch.zeros((), device=device), torch.zeros((), device=device), 0
        while epochs < args.update_epochs:
            epochs += 1
            for group in optimizer.param_groups:
                group["lr"] = learning_rate
            shuffled = batch[torch.randperm(len(batch), device=device)]
            before = logged.clone()
            for mb, size_in_all in zip(shuffled.split(mine), in_all):
                if not size_in_all:  # on no rank: all of them know it, and skip it together
                    continue
                # A rank with nothing in this minibatch still runs a row, with weight zero: DDP waits for its gradients.
                mb, weight = (mb, 1.0) if len(mb) else (spare, 0.0)
                _, newlogprob, entropy = model(mb["obs"], mb["action"])
                loss, mb_logged = loss_fn(
                    newlogprob, entropy, mb["logprob"], mb["advantage"], mb.get("ref_logprob", None),
                    args.clip_coef, args.clip_coef_high, args.ent_coef, args.kl_coef,
                )  # fmt: skip
                # CRUCIAL: DDP takes the mean over ranks. Scaled like this it is the mean over the samples of all ranks,
                # also when they hold different numbers of them.
                accelerator.backward(loss * (weight * world / size_in_all))
                norm = accelerator.clip_grad_norm_(parameters, args.max_grad_norm)
                # CRUCIAL: after the all-reduce a NaN is on every rank, and the fused Adam skips its step where this is
                # 1: on all of them together, and without a look at the GPU.
                bad = adam.found_inf = (~norm.isfinite()).float()
                adam.step()
                adam.zero_grad()
                skipped, skipped_in_a_row = skipped + bad, (skipped_in_a_row + 1.0) * bad
                norms, logged = norms + norm.nan_to_num(0.0, 0.0), logged + mb_logged * weight
            if samples and (args.target_kl or args.lr_schedule == "adaptive"):
                # CRUCIAL: the KL of all ranks, so that all of them stop, or change their learning rate, together.
                sums = accelerator.gather((logged - before)[None]).sum(0)
                kl = sums[LOSSES.index("losses/approx_kl")].item() / samples
                if args.lr_schedule == "adaptive" and kl > 2.0 * args.desired_kl:
                    learning_rate = max(1e-5, learning_rate / 1.5)
                elif args.lr_schedule == "adaptive" and kl < 0.5 * args.desired_kl:
                    learning_rate = min(1e-2, learning_rate * 1.5)
                if args.target_kl and kl > args.target_kl:
                    break
        steps_trained += samples * epochs
        update_seconds = time.perf_counter() - update_start

        # ---- Statistics and metrics: merged after the update, else the first ratio would not be 1
        metrics = dict(zip(LOSSES, logged * world / max(samples * epochs, 1)))
        metrics |= {"losses/grad_norm": norms / (epochs * args.num_minibatches), "losses/skipped_updates": skipped}
        if iteration == start_iteration + 1:
            metric_names = sorted(set(gather_object(list(env_metrics))))
        metrics |= {f"env/{k}": env_metrics.get(k, 0.0) * world / steps_taken for k in metric_names}
        metrics |= {"time/rollout": rollout_seconds, "time/update": update_seconds, "time/wait": wait_seconds}
        metrics |= {"skipped_in_a_row": skipped_in_a_row, "checksum": 0.0}
        if args.check_interval and iteration % args.check_interval == 0:
            metrics["checksum"] = checksum([*agent.state_dict().values(), torch.tensor([learning_rate], device=device)])
        moments = [(agent.obs_moments[k], obs[k][active]) for k in agent.obs_moments if args.norm_obs]
        values = torch.stack([torch.as_tensor(x, dtype=torch.float64, device=device) for x in metrics.values()])
        parts = [values, *(moment.sums(x) for moment, x in moments)]
        gathered = accelerator.gather(torch.cat(parts)[None]).split([len(part) for part in parts], dim=1)
        for (moment, _), sums in zip(moments, gathered[1:]):
            moment.merge(sums.sum(0))
        on_ranks = dict(zip(metrics, gathered[0].T.cpu()))  # [W] each
        checksums = on_ranks.pop("checksum")
        if differ := (checksums != checksums[0]).nonzero().view(-1).tolist():
            fail(f"weights, learning rate or statistics of rank {', '.join(map(str, differ))} differ from rank 0's in "
                 f"iteration {iteration}: go on from the last checkpoint with --resume {run_dir}")  # fmt: skip
        if (in_a_row := int(on_ranks.pop("skipped_in_a_row")[0])) >= MAX_SKIPPED:
            fail(f"the last {in_a_row} updates had NaN or infinite gradients and were skipped: "
                 f"try a smaller --learning-rate than {args.learning_rate}")  # fmt: skip
        log = {k: x.mean().item() for k, x in on_ranks.items()}
        log |= {
            "time/wait_min": on_ranks["time/wait"].min().item(),
            "time/wait_max": on_ranks["time/wait"].max().item(),
        }
        log |= {"charts/learning_rate": learning_rate, "charts/minibatch_size": samples / args.num_minibatches}
        log |= {"charts/steps_sampled": global_step, "charts/steps_trained": steps_trained}
        log |= {"charts/iteration": iteration, "charts/episodes": world * N, "charts/group_return_mean": group_mean}
        log |= {"charts/group_return_std": group_std * args.group_size}
        log |= {"charts/groups_without_signal": silent * args.group_size}
        log |= {
            "charts/valid_fraction": samples / steps_taken,
            "charts/idle_fraction": 1 - steps_taken / int(rows.sum()),
        }
        if iteration > start_iteration + 1:  # the first one warms up
            timed_steps, timed_seconds = timed_steps + steps_taken, timed_seconds + time.perf_counter() - rollout_start
            log["charts/SPS"] = timed_steps / timed_seconds
        names = ("charts/episodic_return", "charts/episodic_length", "charts/success_rate")
        log |= {k: x for k, x in zip(names, episode_means) if not math.isnan(x)}

        # ---- Evaluate and save when due
        improved = False
        if finished or (due(args.eval_interval, global_step - steps_taken, global_step) and not stopping):
            eval_start = time.perf_counter()
            video = run_dir / "videos" / f"step_{global_step}.gif" if render else None
            log |= evaluate(agent, eval_env, accelerator, video)
            log["time/eval"] = time.perf_counter() - eval_start
            score = [log.get("eval/success_rate", 0.0), log.get("eval/episodic_return", -math.inf)]
            improved = best is None or score > best
            best = score if improved else best
        if finished or stopping or improved or due(args.save_interval, global_step - steps_taken, global_step):
            trainer = {
                "optimizer": optimizer.optimizer.state_dict(), "learning_rate": learning_rate, "best": best,
                "global_step": global_step, "iteration": iteration, "steps_trained": steps_trained,
                "reference": reference and reference.state_dict(), "world_size": world, "versions": versions,
            }  # fmt: skip
            cuda_rng = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
            local = {"rng": torch.get_rng_state(), "cuda_rng": cuda_rng}
            folder = run_dir / "checkpoints" / f"step_{global_step}"
            save_checkpoint(folder, accelerator, agent.state_dict(), about, trainer, local, improved)
            if accelerator.is_main_process:
                for old in find_checkpoints(run_dir, "best")[1 + args.keep_checkpoints :]:
                    shutil.rmtree(old, ignore_errors=True)

        # ---- Log
        accelerator.log(log, step=global_step)
        formats = {
            "charts/SPS": "SPS {:.0f}",
            "charts/episodic_return": "return {:.2f}",
            "charts/success_rate": "success {:.2f}",
        }
        shown = "  ".join(text.format(log[k]) for k, text in formats.items() if k in log)
        progress.update(global_step - progress.n)
        progress.set_postfix_str(shown, refresh=False)
        if accelerator.is_main_process and not bar and (finished or iteration == 1 or time.time() > last_print + 5):
            last_print = time.time()
            print(f"step {global_step}/{args.total_timesteps}  {shown}", flush=True)

    # ---- Finish
    progress.close()
    if accelerator.is_main_process and stopping:
        write(run_dir / "preempted", folder.name)
        print(f"stopped by a signal, saved {folder}: go on with --resume {run_dir}")
    elif accelerator.is_main_process and iteration > start_iteration:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent)
        summary = log | {
            "global_step": global_step, "wall_seconds": time.time() - start_time, "world_size": world,
            "env_id": args.env_id, "seed": args.seed, "command": " ".join(sys.argv), "commit": commit.stdout.strip(),
            "versions": versions,
        }  # fmt: skip
        write(run_dir / "summary.json", json.dumps(summary, indent=2))
        print(", ".join(f"{k} {v:.4g}" for k, v in log.items() if k.startswith("eval/")) + f"  -> {run_dir}")
    env.close()
    eval_env.close()
    # CRUCIAL: DDP must not be the last to hold the process group: it would wait for its end with Python's lock in hand.
    del model, optimizer, adam
    accelerator.free_memory()
    accelerator.end_training()


if __name__ == "__main__":
    main(tyro.cli(Args))
