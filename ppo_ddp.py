"""PPO in which every process collects and learns, and gradients are averaged at every minibatch (DD-PPO).

    python ppo_ddp.py                                                # one process: PushCube, learned in seconds
    torchrun --standalone --nproc_per_node 2 ppo_ddp.py              # two processes, one per GPU where there are GPUs
    accelerate launch --multi_gpu --num_processes 2 --main_process_port 0 ppo_ddp.py
    torchrun --nnodes 2 --nproc_per_node 8 --rdzv_id 1 --rdzv_backend c10d --rdzv_endpoint HOST:29400 ppo_ddp.py
    python ppo_ddp.py --resume runs/NAME                             # go on where a run stopped
    python ppo_ddp.py --evaluate --checkpoint runs/NAME              # score its best policy

Docs: docs/ppo_ddp.md
"""

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
from collections import deque
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
    save_interval: int = 0
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

    # Environment
    env_id: str = "PushCube"
    """PushCube, CartPole, or gym/<id> for any Gymnasium env with Box observations"""
    num_envs: int = 128
    """parallel envs of each process"""

    # Algorithm
    total_timesteps: int = 500_000
    """env steps of all processes together"""
    num_steps: int = 32
    """steps of each env in one rollout"""
    learning_rate: float = 1e-3
    """learning rate of Adam at the start"""
    lr_schedule: Literal["constant", "linear", "adaptive"] = "linear"
    """linear: to zero at --total-timesteps; adaptive: up or down after each epoch to hold --desired-kl"""
    desired_kl: float = 0.01
    """KL divergence per epoch that the adaptive learning rate aims at"""
    gamma: float = 0.97
    """discount"""
    gae_lambda: float = 0.95
    """lambda of generalised advantage estimation"""
    bootstrap_at_done: Literal["truncated", "always"] = "truncated"
    """where an episode's end is valued by the critic: only where the clock ended it, or at every end"""
    num_minibatches: int = 8
    """minibatches of an epoch; each holds num_envs * num_steps / num_minibatches samples of every process"""
    update_epochs: int = 4
    """passes over a rollout"""
    clip_coef: float = 0.2
    """clipping of the probability ratio"""
    clip_vloss: bool = False
    """clip the value loss too"""
    ent_coef: float = 0.0
    """weight of the entropy bonus"""
    vf_coef: float = 0.5
    """weight of the value loss"""
    max_grad_norm: float = 0.5
    """gradients are scaled down to this norm"""
    target_kl: float = 0.0
    """no further epoch once the KL divergence of all processes passes this (0: off)"""
    norm_adv: bool = True
    """normalise advantages by their mean and deviation over all processes"""
    norm_obs: bool = True
    """normalise observations by running statistics of all processes, saved with the model"""
    norm_reward: bool = False
    """divide rewards by the running deviation of the discounted return, saved with the model"""
    hidden_size: int = 64
    """width of the two hidden layers of actor and critic"""
    init_logstd: float = -0.3
    """log standard deviation of a Gaussian policy at the start"""

    # Performance
    cpu: bool = False
    """use the CPU although there is a GPU"""
    backend: Literal["auto", "nccl", "gloo", "mpi"] = "auto"
    """process-group backend"""
    preempt_fraction: float = 1.0
    """a rank ends its rollout once this fraction of the ranks has finished theirs (1: off, as slow as the slowest)"""
    preempt_min: float = 0.25
    """but not before it has this fraction of its own steps"""
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
    for name in ("num_envs", "total_timesteps", "num_steps", "num_minibatches", "update_epochs", "keep_checkpoints",
                 "learning_rate", "desired_kl", "clip_coef", "max_grad_norm", "hidden_size", "timeout", "torch_threads"):  # fmt: skip
        if not getattr(args, name) > 0:
            fail(f"--{name.replace('_', '-')} must be greater than 0, not {getattr(args, name)}")
    for name in (
        "eval_interval",
        "eval_episodes",
        "save_interval",
        "check_interval",
        "ent_coef",
        "vf_coef",
        "target_kl",
    ):
        if not getattr(args, name) >= 0:
            fail(f"--{name.replace('_', '-')} must not be negative, not {getattr(args, name)}")
    for name in ("gamma", "gae_lambda", "preempt_fraction", "preempt_min"):
        if not 0 <= getattr(args, name) <= 1:
            fail(f"--{name.replace('_', '-')} must be between 0 and 1, not {getattr(args, name)}")
    if not 0 <= args.seed < EVAL_SEED:
        fail(f"--seed must be between 0 and {EVAL_SEED - 1}, not {args.seed}")
    if (args.num_envs * args.num_steps) % args.num_minibatches:
        batch = f"--num-envs {args.num_envs} x --num-steps {args.num_steps} = {args.num_envs * args.num_steps} samples"
        fail(f"{batch} do not divide into --num-minibatches {args.num_minibatches}")
    if args.evaluate != bool(args.checkpoint):
        fail("--evaluate and --checkpoint PATH go together")
    if args.evaluate and args.resume:
        fail("--evaluate scores a policy and --resume trains it further: give one of them")
    if Path(args.run_name).name != args.run_name:
        fail(f"--run-name must be a plain name, not {args.run_name!r}; --output-dir says where it goes")


def launch(args: Args) -> tuple[Accelerator, torch.distributed.Store | None]:
    """Join the processes that the launcher started, or say why that would go wrong; with the store they share."""
    on_cpu = args.cpu or not torch.cuda.is_available()
    names = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
    world = max(int(os.environ.get(name, 1)) for name in names)
    advice = f"start several with 'torchrun --standalone --nproc_per_node {max(world, 2)} {sys.argv[0]}'"
    if "MASTER_ADDR" in os.environ and world == 1 and "RANK" not in os.environ:
        fail(f"MASTER_ADDR is set but WORLD_SIZE is not, so this would run as one process: {advice}, or unset MASTER_ADDR")
    if args.mixed_precision == "fp16" and on_cpu:
        fail("--mixed-precision fp16 needs a GPU: use bf16 or no")
    if args.backend == "nccl" and on_cpu:
        fail("--backend nccl needs a GPU: use gloo or auto")
    if args.backend == "mpi" and not torch.distributed.is_mpi_available():
        fail("--backend mpi needs a torch built with MPI: use gloo, nccl or auto")

    group, store = {"timeout": timedelta(seconds=args.timeout)}, None
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and world > 1:
        # CRUCIAL: torchrun keeps its store through a restart. Without a prefix of its own, a restarted process would
        # find the addresses of the dead ones there and fail to connect, or hang.
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = torch.distributed.TCPStore(*address, is_master=False, **group)
        store = torch.distributed.PrefixStore(f"attempt_{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
        backend = {"auto": "gloo" if on_cpu else "nccl"}.get(args.backend, args.backend)
        torch.distributed.init_process_group(backend, store=store, rank=int(os.environ["RANK"]), world_size=world, **group)
    if args.backend != "auto" and world > 1:
        group["backend"] = args.backend
    # CRUCIAL: with broadcast_buffers rank 0's observation statistics would overwrite the others' at every forward.
    ddp = DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)
    warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")  # Accelerate has no other name yet
    handlers = [ddp, InitProcessGroupKwargs(**group)]
    # CRUCIAL: without cpu=True torchrun on a machine without GPUs gives independent runs that never share a gradient.
    accelerator = Accelerator(cpu=on_cpu, mixed_precision=args.mixed_precision, kwargs_handlers=handlers)
    if accelerator.num_processes != world:
        fail(f"{world} processes were started, but {accelerator.num_processes} found each other: {advice}")
    return accelerator, store


class RunningMoments(nn.Module):
    """Mean and variance of all that was seen: part of the model, and equal on all ranks because only merged sums enter."""

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
        space = env.single_observation_space
        sizes = {k: math.prod(space[k].shape) for k in ("state", "privileged") if k in space.keys()}
        self.discrete = hasattr(env.single_action_space, "n")
        actions = int(env.single_action_space.n) if self.discrete else env.single_action_space.shape[0]
        self.obs_moments = nn.ModuleDict(
            {k: RunningMoments(n) if args.norm_obs else nn.Identity() for k, n in sizes.items()}
        )
        self.return_moments = RunningMoments(1)
        self.critic = mlp(sum(sizes.values()), 1, args.hidden_size, std=1.0)
        self.actor = mlp(sizes["state"], actions, args.hidden_size, std=0.01)
        if not self.discrete:
            self.actor_logstd = nn.Parameter(torch.full((actions,), args.init_logstd))

    def forward(self, obs: TensorDict, action: torch.Tensor | None = None, deterministic: bool = False):
        """-> action, its log-probability, the entropy, the value. The one door, so that DDP and autocast see every call."""
        inputs = [moments(obs[k]) for k, moments in self.obs_moments.items()]
        value = self.critic(torch.cat(inputs, -1)).squeeze(-1).float()
        out = self.actor(inputs[0]).float()  # `privileged`, if there is any, is for the critic alone
        if self.discrete:
            logits = out.log_softmax(-1)
            if action is None:
                noise = 0.0 if deterministic else -torch.empty_like(logits).exponential_().log()
                action = (logits + noise).argmax(-1)
            logprob = logits.gather(-1, action.unsqueeze(-1)).squeeze(-1)
            return action, logprob, -(logits.exp() * logits).sum(-1), value
        logstd = self.actor_logstd.expand_as(out)
        if action is None:
            action = out if deterministic else out + logstd.exp() * torch.randn_like(out)
        logprob = -0.5 * ((action - out) / logstd.exp()).square() - logstd - 0.5 * math.log(2 * math.pi)
        return action, logprob.sum(-1), (logstd + 0.5 * math.log(2 * math.pi * math.e)).sum(-1), value


def compute_gae(rewards, values, next_value, terminated, truncated, final_values, gamma: float, gae_lambda: float):
    """Advantages of a rollout, all [T, N]; `next_value` [N] is the value of the observation after the last step.

    `final_values` is what an episode's end is worth: V(final observation) where the clock ended it, 0 where it failed.
    """
    if rewards.dim() != 2 or any(x.shape != rewards.shape for x in (values, terminated, truncated, final_values)):
        raise ValueError(f"compute_gae needs [T, N] tensors of one shape, not {tuple(rewards.shape)}")
    done = terminated | truncated
    next_values = torch.cat([values[1:], next_value[None]])
    # CRUCIAL: the row after an episode's end belongs to the next one. Its value must not leak in, nor its advantage.
    delta = rewards + gamma * torch.where(done, final_values, next_values) - values
    decay = gamma * gae_lambda * ~done
    advantages = torch.empty_like(rewards)
    advantage = torch.zeros_like(next_value)
    for t in reversed(range(rewards.shape[0])):
        advantage = torch.addcmul(delta[t], decay[t], advantage)
        advantages[t] = advantage
    return advantages


def ppo_loss(
    newlogprob, entropy, newvalue, logprob, advantage, returns, value, clip_coef, ent_coef, vf_coef, clip_vloss
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss summed over the samples, and the sums of what is logged (LOSSES)."""
    logratio = newlogprob - logprob
    ratio = logratio.exp()
    pg_loss = torch.max(-advantage * ratio, -advantage * ratio.clamp(1 - clip_coef, 1 + clip_coef))
    v_loss = (newvalue - returns).square()
    if clip_vloss:
        v_clipped = value + (newvalue - value).clamp(-clip_coef, clip_coef)
        v_loss = torch.max(v_loss, (v_clipped - returns).square())
    v_loss = 0.5 * v_loss
    loss = pg_loss - ent_coef * entropy + vf_coef * v_loss
    clipped = ((ratio - 1.0).abs() > clip_coef).float()
    logged = torch.stack([pg_loss, v_loss, entropy, -logratio, (ratio - 1) - logratio, clipped])
    return loss.sum(), logged.detach().sum(1)


LOSSES = ["policy_loss", "value_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac"]


@torch.no_grad()
def evaluate(
    agent: nn.Module, env: envs.VecEnv, accelerator: Accelerator, video: Path | None = None
) -> dict[str, float]:
    """One deterministic episode in each eval env of every rank, so that short episodes are not favoured."""
    obs = env.reset()
    active = torch.ones(env.num_envs, dtype=torch.bool, device=env.device)
    totals = torch.zeros(4, dtype=torch.float64, device=env.device)
    frames = []
    while active.any():
        if video:
            frames.append(env.render(min(4, env.num_envs)))
        action = agent(obs, deterministic=True)[0]
        obs, _, terminated, truncated, info = env.step(action, active)
        ended = (terminated | truncated) & active
        stats = torch.stack([ended.float(), *(info["episode"][k].float() for k in ("return", "length", "success"))])
        totals += torch.where(ended, stats, 0.0).double().sum(1)
        active &= ~ended
    if video:
        save_video(frames, video)
    count, *sums = accelerator.gather(totals[None]).sum(0).tolist()
    names = ("eval/episodic_return", "eval/episodic_length", "eval/success_rate")
    return {k: x / count for k, x in zip(names, sums) if not math.isnan(x)} | {"eval/episodes": count}


def save_video(frames: list[torch.Tensor], path: Path) -> None:
    """Frames of [n, H, W, 3], side by side, as a GIF."""
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    frames = [Image.fromarray(torch.cat(list(frame.cpu()), dim=1).numpy()) for frame in frames]
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=40, loop=0)


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
    folder: Path, accelerator: Accelerator, model: dict, about: dict, trainer: dict, local: dict
) -> None:
    """Write `folder` on all ranks together. Killed at any moment, this leaves the checkpoints before it as they were."""
    part, error = folder.with_name(f".{folder.name}.part"), None
    try:
        part.mkdir(parents=True, exist_ok=True)
        torch.save(local, part / f"rank_{accelerator.process_index}.pt")
        if accelerator.is_main_process:
            model = {k: v.detach().cpu().contiguous() for k, v in model.items()}
            save_file(model, part / "model.safetensors", metadata={"about": json.dumps(about)})
            torch.save(trainer, part / "trainer.pt")
    except (OSError, RuntimeError) as caught:
        error = caught
    # CRUCIAL: every rank comes here, whatever happened to it: the others wait for its word.
    errors = [e for e in gather_object([str(error) if error else None]) if e]
    if not errors and accelerator.is_main_process:
        try:
            files = sorted(part.iterdir())
            for file in files:
                with file.open("rb") as opened:
                    os.fsync(opened.fileno())
            write(part / "manifest.json", json.dumps({file.name: digest(file) for file in files}))
            shutil.rmtree(folder, ignore_errors=True)
            part.rename(folder)
            write(folder.parent / "latest", folder.name)
        except OSError as caught:
            errors = [str(caught)]
    if errors := errors or [e for e in gather_object(errors) if e]:
        fail(f"cannot save {folder}: {errors[0]}; the checkpoints before it are untouched")


def find_checkpoints(path: Path, pointer: str) -> list[Path]:
    """The checkpoint folders that `path` may mean, the preferred one first."""
    if (path / "manifest.json").exists():
        return [path]
    folder = path / "checkpoints"
    found = sorted(folder.glob("step_*"), key=lambda p: p.stat().st_mtime, reverse=True)
    found.sort(key=lambda p: int(p.name.removeprefix("step_")), reverse=True)
    named = folder / (folder / pointer).read_text() if (folder / pointer).exists() else None
    return [p for p in found if p == named] + [p for p in found if p != named]


def load_checkpoint(folder: Path, rank: int) -> tuple[dict, dict, dict, dict | None]:
    """-> model, about, trainer, and this rank's own state, if one was saved for it. Nothing in the files is executed."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        names = ["model.safetensors", "trainer.pt"] + [n for n in [f"rank_{rank}.pt"] if n in manifest]
        for name in names:
            if digest(folder / name) != manifest[name]:
                raise ValueError(f"{name} is damaged")
        with safe_open(folder / "model.safetensors", "pt") as file:
            model, about = {k: file.get_tensor(k) for k in file.keys()}, json.loads(file.metadata()["about"])
        loaded = [torch.load(folder / name, map_location="cpu", weights_only=True) for name in names[1:]]
        return model, about, loaded[0], loaded[1] if len(loaded) > 1 else None
    except Exception as error:
        raise ValueError(f"{folder} is not a good checkpoint: {str(error).splitlines()[0]}") from error


def checksum(tensors: list[torch.Tensor]) -> torch.Tensor:
    """A number that changes when any bit does, small enough for float64 to hold exactly."""
    bits = torch.cat([t.detach().reshape(-1).view(torch.int16) for t in tensors]).long()
    place = torch.arange(1, len(bits) + 1, device=bits.device) % 32749
    return ((bits * place).sum() % 2**52).double()


def load_together(folders: list[Path], accelerator: Accelerator, fall_back: bool):
    """The first of the checkpoints that every rank finds good: one rank alone may see a bad file."""
    for folder in folders:
        try:
            loaded, error = load_checkpoint(folder, accelerator.process_index), None
        except ValueError as caught:
            loaded, error = None, str(caught)
        errors = [e for e in gather_object([error]) if e]
        if not errors:
            return folder, loaded
        if not fall_back:
            fail(errors[0])
        accelerator.print(f"{errors[0]}; trying the one before it")
    return None


def load_model(agent: nn.Module, folder: Path, model: dict, about: dict, args: Args) -> None:
    for name in ("env_id", "hidden_size", "norm_obs"):  # what gives the networks their shapes and their meaning
        if about["args"].get(name) != getattr(args, name):
            fail(f"{folder} was trained with {name} = {about['args'].get(name)}, not {getattr(args, name)}: "
                 f"set --{name.replace('_', '-')} to match it")  # fmt: skip
    try:
        agent.load_state_dict(model)
    except RuntimeError as error:
        fail(f"{folder} does not fit this model: {' '.join(str(error).split())}")


def main(args: Args) -> None:
    # ---- Set up
    check_args(args)
    accelerator, store = launch(args)
    rank, world, device = accelerator.process_index, accelerator.num_processes, accelerator.device
    torch.set_num_threads(args.torch_threads)
    eval_episodes = args.eval_episodes or (16 if "/" in args.env_id else 512)
    if eval_episodes < world:
        fail(f"--eval-episodes {eval_episodes} leaves a process without an episode: give at least {world}")
    first, last = eval_episodes * rank // world, eval_episodes * (rank + 1) // world
    render = 4 if args.capture_video and rank == 0 else 0
    try:
        eval_env = envs.make(args.env_id, last - first, device=device, seed=EVAL_SEED, first_env=first, render=render)
        # CRUCIAL: seeded by the global index of each env. With seed + rank, neighbouring ranks would share initial states.
        env = envs.make(args.env_id, args.num_envs, device=device, seed=args.seed, first_env=rank * args.num_envs)
    except ValueError as error:
        fail(str(error))
    torch.manual_seed(args.seed)  # the same weights on every rank
    agent = Agent(env, args).to(device)

    if args.evaluate:
        found = find_checkpoints(Path(args.checkpoint), "best")[:1]
        if not found:
            fail(f"no checkpoint at {args.checkpoint}: give a run folder or one of its checkpoints/step_* folders")
        folder, (weights, about, _, _) = load_together(found, accelerator, fall_back=False)
        load_model(agent, folder, weights, about, args)
        scores = evaluate(agent, eval_env, accelerator, folder / "evaluation.gif" if render else None)
        accelerator.print(f"{folder}: " + ", ".join(f"{k} {v:.4g}" for k, v in scores.items()))
        return

    # ---- The run's folder, and the checkpoint to go on from
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0
    launcher = psutil.Process(os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid())
    started = time.strftime(
        "%Y%m%d-%H%M%S", time.localtime(launcher.create_time())
    )  # the same after an elastic restart
    stem = f"{args.env_id.replace('/', '-')}__ppo_ddp__{args.seed}__"
    run_dir, folders = Path(args.output_dir) / (args.run_name or stem + started), []
    if args.resume == "auto" and not args.run_name:
        run_dir = max([p.parent for p in Path(args.output_dir).glob(f"{stem}*/checkpoints")], default=run_dir)
    elif args.resume and args.resume != "auto":
        folders = find_checkpoints(Path(args.resume), "latest")[:1]
        if not folders:
            fail(f"nothing to resume at {args.resume}: give a run folder or one of its checkpoints/step_* folders")
        run_dir = folders[0].parent.parent
    if restarted or args.resume == "auto":
        folders = find_checkpoints(run_dir, "latest")
    run_dir, folders = broadcast_object_list([run_dir, folders])  # what rank 0 sees
    loaded = load_together(folders, accelerator, fall_back=restarted or args.resume == "auto")
    if loaded:
        folder, (weights, about, trainer, local) = loaded
        load_model(agent, folder, weights, about, args)

    loss_fn = ppo_loss
    if args.compile:
        agent.compile()
        loss_fn = torch.compile(ppo_loss)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)
    # CRUCIAL: forwards that are trained on go through `model`. `agent`, the same networks without DDP's hooks, would learn
    # on each rank alone, and no error would tell.
    model, optimizer = accelerator.prepare(agent, optimizer)
    # Accelerate's wrapper is for fp16's loss scaling; without that, it only searches the disk for a package at every step.
    adam = optimizer if accelerator.scaler else optimizer.optimizer
    next_obs = env.reset()
    # CRUCIAL: DDP regroups its gradients after its first backward, and with them the order of summation. A backward that
    # counts for nothing lets a resumed run sum in the same order as one that never stopped.
    accelerator.backward(0.0 * sum(x.sum() for x in model(next_obs)[1:]))
    optimizer.zero_grad()

    global_step, iteration, steps_trained = 0, 0, 0
    next_eval, next_save, best = args.eval_interval, args.save_interval, None
    learning_rate, window = args.learning_rate, deque(maxlen=100)  # the newest episodes of all ranks
    running_return = torch.zeros(args.num_envs, device=device)
    torch.manual_seed(args.seed + 1_000_003 * (rank + 1))  # other actions and minibatches on every rank
    if loaded:
        optimizer.optimizer.load_state_dict(trainer["optimizer"])
        global_step, iteration, steps_trained = (trainer[k] for k in ("global_step", "iteration", "steps_trained"))
        next_eval, next_save, best = (trainer[k] for k in ("next_eval", "next_save", "best"))
        learning_rate = trainer["learning_rate"]
        window.extend(trainer["window"])
        accelerator.print(f"resuming {folder}")
        changed = {
            k: v for k, v in asdict(args).items() if v != about["args"].get(k) and k not in ("resume", "run_name")
        }
        for name, x in changed.items():
            accelerator.print(f"  --{name.replace('_', '-')} is {x}, was {about['args'].get(name)}")
        if (
            trainer["world_size"] == world
            and args.num_envs == len(local["running_return"])
            and local["env"] is not None
        ):
            env.load_state_dict(local["env"])
            next_obs = TensorDict(local["next_obs"], [args.num_envs]).to(device)
            running_return = local["running_return"].to(device)
            torch.set_rng_state(local["rng"])
            if device.type == "cuda" and local["cuda_rng"] is not None:
                torch.cuda.set_rng_state(local["cuda_rng"], device)
        else:
            why = (
                "the number of envs changed"
                if local and local["env"] is not None
                else f"{args.env_id} cannot save its state"
            )
            why = f"{trainer['world_size']} processes became {world}" if trainer["world_size"] != world else why
            accelerator.print(f"  envs start new episodes, because {why}: the run goes on, but not bit for bit")
            next_obs = env.reset(episode=iteration)
            torch.manual_seed(args.seed + 1_000_003 * (rank + 1) + iteration)

    error = None
    if accelerator.is_main_process:
        try:
            run_dir.mkdir(parents=True, exist_ok=bool(args.resume) or restarted)
            write(run_dir / "args.json", json.dumps(asdict(args), indent=2))
            (run_dir / "preempted").unlink(missing_ok=True)
            for newer in find_checkpoints(run_dir, "latest"):
                if int(newer.name.removeprefix("step_")) > global_step:  # damaged, or left behind by going back
                    newer.rename(newer.with_name(f"abandoned_{newer.name}"))
            for part in run_dir.glob("checkpoints/.*.part"):
                shutil.rmtree(part)
        except FileExistsError:
            error = f"{run_dir} exists already: choose another --run-name, or go on with --resume {run_dir}"
        except OSError as caught:
            error = f"cannot write to {run_dir}: {caught.strerror}; choose another --output-dir"
    if error := broadcast_object_list([error])[0]:
        fail(error)
    accelerator.log_with = [
        TensorBoardTracker(run_dir.name, run_dir.parent, purge_step=global_step + 1 if loaded else None)
    ]
    if args.track:
        settings = {"name": run_dir.name, "id": run_dir.name, "resume": "allow", "dir": str(run_dir)}
        accelerator.log_with.append(WandBTracker(args.wandb_project, config=asdict(args), **settings))
    try:
        accelerator.init_trackers(args.wandb_project)
    except Exception as error:  # wandb has many
        fail(
            f"cannot start Weights & Biases ({str(error).splitlines()[0]}): run 'wandb login', or set WANDB_MODE=offline"
        )
    stop_signals: list[float] = []

    def on_signal(number, frame):
        if (
            number == signal.SIGINT and stop_signals and time.time() - stop_signals[0] > 1.0
        ):  # torchrun may send it twice
            os._exit(130)
        stop_signals.append(time.time())

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, on_signal)
    preempt = args.preempt_fraction < 1.0 and world > 1
    if preempt and store is None:
        fail("--preempt-fraction needs torchrun, or accelerate launch, with the c10d rendezvous")
    about = {"env_id": args.env_id, "args": asdict(args)}
    versions = {k: version(k) for k in ("torch", "accelerate", "tensordict", "gymnasium")}
    accelerator.print(f"{args.env_id}: {world} x {args.num_envs} envs on {device.type}, writing to {run_dir}")
    progress = tqdm(total=args.total_timesteps, initial=global_step, unit="step", unit_scale=True, dynamic_ncols=True,
                    disable=not (accelerator.is_main_process and sys.stderr.isatty()))  # fmt: skip

    # ---- Storage: [T, N] of everything, allocated once; the step loop writes into the leaves
    T, N = args.num_steps, args.num_envs
    storage = TensorDict({"obs": {k: torch.zeros(T, *v.shape, dtype=v.dtype) for k, v in next_obs.items()}}, [T, N])
    storage["action"] = torch.zeros(
        T, N, *env.single_action_space.shape, dtype=torch.int64 if agent.discrete else torch.float32
    )
    storage["terminated"], storage["truncated"] = torch.zeros(2, T, N, dtype=torch.bool)
    storage["logprob"], storage["value"], storage["reward"], storage["final_value"] = torch.zeros(4, T, N)
    storage = storage.to(device)
    obs_leaves, leaves = list(storage["obs"].items()), dict(storage.items())
    episodes = torch.zeros(T, N, 3, device=device)
    skipped_in_a_row = torch.zeros((), device=device)
    parameters = list(agent.parameters())
    start_time = last_print = time.time()
    timed_steps, timed_seconds, stopping = 0, 0.0, False

    while global_step < args.total_timesteps and not stopping:
        iteration += 1
        if args.lr_schedule == "linear":
            learning_rate = args.learning_rate * (1.0 - global_step / args.total_timesteps)

        # ---- Rollout, with the statistics of the observations frozen
        rollout_start = time.perf_counter()
        env_metrics: dict[str, torch.Tensor] = {}
        final_obs, final_rows = [], []
        leaves["final_value"].zero_()
        with torch.no_grad():
            for step in range(T):
                action, logprob, _, value = agent(next_obs)
                for name, leaf in obs_leaves:
                    leaf[step] = next_obs[name]
                leaves["action"][step], leaves["logprob"][step], leaves["value"][step] = action, logprob, value
                next_obs, reward, terminated, truncated, info = env.step(action)
                leaves["reward"][step], leaves["terminated"][step], leaves["truncated"][step] = (
                    reward,
                    terminated,
                    truncated,
                )
                episodes[step] = torch.stack([info["episode"][k].float() for k in ("return", "length", "success")], -1)
                for name, x in info["metrics"].items():
                    env_metrics[name] = env_metrics.get(name, 0.0) + x.mean()
                # What an episode's end is worth: nothing where it failed, the value of its last observation where only
                # the clock ran out. A simulator that does not give that observation has the one before it stand in.
                valued = truncated if args.bootstrap_at_done == "truncated" else terminated | truncated
                if info["final_obs"] is None:
                    leaves["final_value"][step] = value * valued
                elif (rows := valued.nonzero().squeeze(1)).numel():
                    final_obs.append(info["final_obs"][rows])
                    final_rows.append(step * N + rows)
                # Most ranks are done: end here, with what there is, rather than keep them waiting.
                if preempt and step + 1 < T and step + 1 >= args.preempt_min * T:
                    if store.add(f"rollout_{iteration}", 0) >= args.preempt_fraction * world:
                        break
            steps = step + 1
            if preempt and steps == T:
                store.add(f"rollout_{iteration}", 1)
            if final_obs:
                leaves["final_value"].view(-1)[torch.cat(final_rows)] = agent(torch.cat(final_obs))[3]
            next_value = agent(next_obs)[3]

            # ---- Advantages
            rollout = storage[:steps]
            rewards, values, done = rollout["reward"], rollout["value"], rollout["terminated"] | rollout["truncated"]
            if args.norm_reward:
                discounted = torch.empty_like(rewards)
                for step in range(steps):
                    discounted[step] = running_return * args.gamma + rewards[step]
                    running_return = discounted[step] * ~done[step]
                agent.return_moments.merge(accelerator.gather(agent.return_moments.sums(discounted)[None]).sum(0))
                rewards = (rewards * (agent.return_moments.var + 1e-8).rsqrt().float()).clamp(-10.0, 10.0)
            advantages = compute_gae(rewards, values, next_value, rollout["terminated"], rollout["truncated"],
                                     rollout["final_value"], args.gamma, args.gae_lambda)  # fmt: skip
            rollout["advantage"], rollout["return"] = advantages, advantages + values

            # ---- The one exchange before the update: counts, flags, moments and the newest episodes of each rank
            finite = all(
                rollout[k].isfinite().all()
                for k in ("reward", "final_value", "value", *(("obs", k) for k, _ in obs_leaves))
            )
            ended = done.nonzero()[-window.maxlen :]
            newest = torch.full((window.maxlen, 4), -1.0, dtype=torch.float64, device=device)
            newest[: len(ended), 0] = ended[:, 0].double()
            newest[: len(ended), 1:] = episodes[ended[:, 0], ended[:, 1]].double()
            a, r = advantages.double(), rollout["return"].double()
            sums = torch.stack([a.sum(), a.square().sum(), r.sum(), r.square().sum()])
            flags = torch.tensor([done.numel(), not finite, bool(stop_signals)], dtype=torch.float64, device=device)
            rollout_seconds = time.perf_counter() - rollout_start
            gathered = accelerator.gather(torch.cat([flags, sums, newest.view(-1)])[None]).cpu()
            wait_seconds = time.perf_counter() - rollout_start - rollout_seconds
        counts, samples = gathered[:, 0].long(), int(gathered[:, 0].sum())
        if gathered[:, 1].any():
            where = ", ".join(str(i) for i in gathered[:, 1].nonzero().view(-1).tolist())
            fail(
                f"NaN or infinity from {args.env_id} on rank {where} in iteration {iteration}: nothing was learned from it"
            )
        stopping = bool(gathered[:, 2].any())
        (mean, r_mean), (square, r_square) = (gathered[:, 3:7].sum(0) / samples).view(2, 2).T.tolist()
        var, r_var = max(square - mean**2, 0.0), r_square - r_mean**2
        newest = sorted((e for e in gathered[:, 7:].reshape(-1, 4).tolist() if e[0] >= 0), key=lambda e: e[0])
        window.extend(e[1:] for e in newest)
        global_step += samples
        if args.norm_adv:
            rollout["advantage"] = (advantages - mean) / (math.sqrt(var) + 1e-8)

        # ---- Update: the same number of minibatches on every rank, whatever it holds; one collective in each, DDP's
        update_start = time.perf_counter()
        batch = rollout.reshape(-1)
        edges = counts * torch.arange(args.num_minibatches + 1)[:, None] // args.num_minibatches
        sizes = edges.diff(dim=0).tolist()  # of every minibatch, on every rank
        logged = torch.zeros(len(LOSSES), dtype=torch.float64, device=device)
        norms, skipped, updates = torch.zeros((), device=device), torch.zeros((), device=device), 0
        for epoch in range(args.update_epochs):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate
            shuffled = batch[torch.randperm(len(batch), device=device)]
            before_epoch = logged.clone()
            for mb, on_ranks in zip(shuffled.split([x[rank] for x in sizes]), sizes):
                # A rank with nothing in this minibatch still runs a row, with weight zero: DDP waits for its gradients.
                mb, weight = (mb, 1.0) if on_ranks[rank] else (shuffled[:1], 0.0)
                _, newlogprob, entropy, newvalue = model(mb["obs"], mb["action"])
                loss, mb_logged = loss_fn(
                    newlogprob, entropy, newvalue, mb["logprob"], mb["advantage"], mb["return"], mb["value"],
                    args.clip_coef, args.ent_coef, args.vf_coef, args.clip_vloss,
                )  # fmt: skip
                # CRUCIAL: DDP takes the mean over ranks. Scaled like this it is the mean over the samples of all ranks,
                # also when they hold different numbers of them.
                accelerator.backward(loss * (weight * world / sum(on_ranks)))
                norm = accelerator.clip_grad_norm_(parameters, args.max_grad_norm)
                # CRUCIAL: after the all-reduce a NaN is on every rank, and the fused Adam skips its step where this is 1:
                # on all of them, and without a look at the GPU.
                bad = (~norm.isfinite()).float()
                adam.found_inf = bad
                adam.step()
                adam.zero_grad()
                skipped_in_a_row = (skipped_in_a_row + 1.0) * bad
                skipped, norms, updates = skipped + bad, norms + norm.nan_to_num(0.0, 0.0), updates + 1
                logged += mb_logged * weight
            if args.target_kl or args.lr_schedule == "adaptive":
                # CRUCIAL: the KL of all ranks, so that all of them stop, or change their learning rate, together.
                kl = (
                    accelerator.gather((logged - before_epoch)[None]).sum(0)[LOSSES.index("approx_kl")].item() / samples
                )
                if args.lr_schedule == "adaptive" and kl > 2.0 * args.desired_kl:
                    learning_rate = max(1e-5, learning_rate / 1.5)
                elif args.lr_schedule == "adaptive" and kl < 0.5 * args.desired_kl:
                    learning_rate = min(1e-2, learning_rate * 1.5)
                if args.target_kl and kl > args.target_kl:
                    break
        steps_trained += samples * (epoch + 1)
        update_seconds = time.perf_counter() - update_start

        # ---- Statistics and metrics: merged after the update, else the first ratio would not be 1
        names = [
            *LOSSES,
            "grad_norm",
            "skipped_updates",
            "skipped_in_a_row",
            *sorted(env_metrics),
            "rollout",
            "update",
            "wait",
        ]
        mine = [*logged / (epoch + 1), norms / updates, skipped, skipped_in_a_row]
        mine += [env_metrics[k] / steps for k in sorted(env_metrics)]
        mine += [torch.tensor(x, device=device) for x in (rollout_seconds, update_seconds, wait_seconds)]
        check = args.check_interval and iteration % args.check_interval == 0
        if check:
            mine.append(checksum([*agent.state_dict().values(), torch.tensor([learning_rate], device=device)]))
        moments = [(agent.obs_moments[k], v[:steps]) for k, v in obs_leaves if args.norm_obs and k in agent.obs_moments]
        sums = [moment.sums(x) for moment, x in moments]
        gathered = accelerator.gather(torch.cat([torch.stack([x.double() for x in mine]), *sums])[None])
        per_rank, *merged = gathered.split([len(mine), *(len(x) for x in sums)], dim=1)
        for (moment, _), x in zip(moments, merged):
            moment.merge(x.sum(0))
        per_rank = per_rank.cpu()
        if check and (differ := (per_rank[:, -1] != per_rank[0, -1]).nonzero().view(-1).tolist()):
            fail(f"weights, learning rate or statistics of rank {', '.join(map(str, differ))} differ from rank 0's "
                 f"in iteration {iteration}: go on from the last checkpoint with --resume {run_dir}")  # fmt: skip
        means = dict(zip(names, per_rank.mean(0).tolist()))
        if means["skipped_in_a_row"] >= MAX_SKIPPED:
            fail(f"the last {means['skipped_in_a_row']:.0f} updates had NaN or infinite gradients and were skipped: "
                 f"try a smaller --learning-rate than {args.learning_rate}")  # fmt: skip
        log = {f"losses/{k}": means[k] * world / samples for k in LOSSES}
        log |= {f"losses/{k}": means[k] for k in ("grad_norm", "skipped_updates")}
        log |= {f"env/{k}": means[k] for k in env_metrics} | {
            f"time/{k}": means[k] for k in ("rollout", "update", "wait")
        }
        waits = per_rank[:, names.index("wait")]
        log |= {"time/wait_min": waits.min().item(), "time/wait_max": waits.max().item()}
        log["losses/explained_variance"] = 1.0 - var / r_var if r_var > 0 else math.nan
        if iteration > 1:  # the first one warms up
            timed_steps, timed_seconds = timed_steps + samples, timed_seconds + time.perf_counter() - rollout_start
            log["charts/SPS"] = timed_steps / timed_seconds
        if window:
            keys = ("charts/episodic_return", "charts/episodic_length", "charts/success_rate")
            log |= {k: x for k, *xs in zip(keys, *window) if not math.isnan(x := sum(xs) / len(window))}
        log |= {"charts/learning_rate": learning_rate, "charts/minibatch_size": samples / args.num_minibatches}
        log |= {
            "charts/steps_sampled": global_step,
            "charts/steps_trained": steps_trained,
            "charts/iteration": iteration,
        }
        log["charts/preempted_fraction"] = 1.0 - samples / (world * T * N)

        # ---- Evaluate and save when due
        finished = global_step >= args.total_timesteps
        improved = False
        if (finished and not stopping) or (args.eval_interval and global_step >= next_eval):
            eval_start = time.perf_counter()
            video = run_dir / "videos" / f"step_{global_step}.gif" if render else None
            scores = evaluate(agent, eval_env, accelerator, video)
            next_eval = (global_step // max(args.eval_interval, 1) + 1) * args.eval_interval
            score = [scores.get("eval/success_rate", 0.0), scores["eval/episodic_return"]]
            improved = best is None or score > best
            best = score if improved else best
            log |= scores | {"time/eval": time.perf_counter() - eval_start}
        if finished or stopping or improved or (args.save_interval and global_step >= next_save):
            next_save = (global_step // max(args.save_interval, 1) + 1) * args.save_interval
            trainer = {
                "optimizer": optimizer.optimizer.state_dict(), "global_step": global_step, "iteration": iteration,
                "steps_trained": steps_trained, "next_eval": next_eval, "next_save": next_save, "best": best,
                "learning_rate": learning_rate, "window": list(window), "world_size": world, "versions": versions,
            }  # fmt: skip
            local = {"env": env.state_dict(), "next_obs": dict(next_obs.items()), "running_return": running_return}
            local["rng"] = torch.get_rng_state()
            local["cuda_rng"] = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
            folder = run_dir / "checkpoints" / f"step_{global_step}"
            save_checkpoint(folder, accelerator, agent.state_dict(), about, trainer, local)
            if accelerator.is_main_process:
                if improved:
                    write(folder.parent / "best", folder.name)
                for old in find_checkpoints(run_dir, "best")[1 + args.keep_checkpoints :]:
                    shutil.rmtree(old)

        # ---- Log
        accelerator.log(log, step=global_step)
        progress.update(global_step - progress.n)
        shown = [
            ("SPS", "charts/SPS", ".0f"),
            ("return", "charts/episodic_return", ".2f"),
            ("success", "charts/success_rate", ".2f"),
        ]
        shown = "  ".join(f"{name} {log[key]:{form}}" for name, key, form in shown if key in log)
        progress.set_postfix_str(shown, refresh=False)
        if (
            accelerator.is_main_process
            and progress.disable
            and (finished or iteration == 1 or time.time() - last_print > 5)
        ):
            last_print = time.time()
            print(f"step {global_step}/{args.total_timesteps}  {shown}", flush=True)

    # ---- Finish
    progress.close()
    if accelerator.is_main_process and stopping:
        write(run_dir / "preempted", folder.name)
        print(f"stopped by a signal, saved {folder}: go on with --resume {run_dir}")
    elif accelerator.is_main_process:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent)
        summary = log | {
            "global_step": global_step, "wall_seconds": time.time() - start_time, "world_size": world, "versions": versions,
            "commit": commit.stdout.strip(), "command": " ".join(sys.argv), "env_id": args.env_id, "seed": args.seed,
        }  # fmt: skip
        write(run_dir / "summary.json", json.dumps(summary, indent=2))
        print(", ".join(f"{k} {v:.4g}" for k, v in log.items() if k.startswith("eval/")) + f"  -> {run_dir}")
    env.close()
    eval_env.close()
    # CRUCIAL: DDP must not be the last to hold the process group, whose end it would wait for with Python's lock in hand.
    del model, optimizer, adam
    accelerator.free_memory()
    accelerator.end_training()


if __name__ == "__main__":
    main(tyro.cli(Args))
