"""GRPO, critic-free: episodes from the same start are compared, and gradients are averaged over processes.

    python grpo_ddp.py                                      # one process: PushCube, learned in seconds
    torchrun --standalone --nproc_per_node 2 grpo_ddp.py    # two processes, one per GPU where there are GPUs
    accelerate launch --multi_gpu --num_processes 2 --main_process_port 0 grpo_ddp.py
    torchrun --nnodes 2 --nproc_per_node 8 --rdzv_id 1 --rdzv_backend c10d --rdzv_endpoint HOST:29400 grpo_ddp.py
    python grpo_ddp.py --init-from runs/NAME --reward success    # fine-tune a policy on success alone
    python grpo_ddp.py --resume runs/NAME                   # resume a run, with the same options
    python grpo_ddp.py --evaluate --checkpoint runs/NAME    # score its best policy

Docs: docs/grpo_ddp.md
"""

import copy
import ctypes
import hashlib
import json
import math
import mmap
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
import uuid
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import psutil
import torch
import torch.nn as nn
import tyro
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.utils import broadcast, broadcast_object_list, gather_object
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file
from tensordict import TensorDict
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

import envs

EVAL_SEED = 2**31 - 1  # of evaluation: always the same episodes, which training never sees
VERSIONS = {name: version(name) for name in ("torch", "accelerate", "tensordict", "gymnasium")}
MODEL_ARGS = ("env_id", "hidden_size", "norm_obs")  # what the weights depend on
MAX_SKIPPED = 8  # updates in a row with NaN gradients before the run gives up
M_TRIM_THRESHOLD = -1  # of glibc's malloc.h
M_MMAP_THRESHOLD = -3


@dataclass
class Args:
    # Experiment
    seed: int = 1  # seed of weights, actions, minibatches and initial states
    run_name: str = ""  # folder of the run in --output-dir (default: env, script, seed and time)
    output_dir: str = "runs"  # where runs are written; with several nodes one that all of them see
    track: bool = False  # also log to Weights & Biases (offline with WANDB_MODE=offline)
    wandb_project: str = "tandem"  # Weights & Biases project
    eval_interval: int = 0  # env steps over all processes between evaluations (0: only at the end)
    eval_episodes: int = 0  # episodes per evaluation over all processes (0: 512, simulators 16)
    save_interval: int = 100_000  # env steps over all processes between checkpoints (0: only at the end)
    keep_checkpoints: int = 3  # newest checkpoints to keep, in addition to the best one
    capture_video: bool = False  # a GIF of four episodes of every evaluation
    resume: str = ""  # run or checkpoint folder to resume, or "auto": the newest of --run-name, if any
    evaluate: bool = False  # only score the policy at --checkpoint
    checkpoint: str = ""  # run folder (its best checkpoint) or checkpoint folder, for --evaluate
    init_from: str = ""  # run or checkpoint folder of ppo_ddp.py or grpo_ddp.py to start from

    # Environment
    env_id: str = "PushCube"  # PushCube, CartPole, Tabletop, TabletopMemory or a simulator's, such as gym/<id>
    env_options: tuple[str, ...] = ()  # options of the env, as name=value: docs/envs.md
    num_envs: int = 256  # parallel envs of each process
    episodes_per_env: int = 1  # episodes of each env in one rollout
    group_size: int = 8  # envs that start alike: their episodes are compared with one another
    reward: Literal["env", "success"] = "env"  # success: 1 at the end of a success, else 0

    # Algorithm
    total_timesteps: int = 1_000_000  # env steps over all processes
    learning_rate: float = 1e-3  # initial learning rate of Adam
    lr_schedule: Literal["constant", "linear", "adaptive"] = "linear"  # linear: to zero; adaptive: by --desired-kl
    desired_kl: float = 0.01  # KL per epoch that the adaptive learning rate aims at
    gamma: float = 0.99  # discount
    advantage: Literal["step", "trajectory"] = "step"  # compare returns from each step on, or whole
    scale: bool = False  # divide by the group's deviation, as GRPO does; without, it is Dr. GRPO
    filter_success: tuple[float, float] = (0.0, 1.0)  # leave out groups with other success rates
    num_minibatches: int = 8  # minibatches per epoch, on every process
    update_epochs: int = 4  # passes over a rollout
    clip_coef: float = 0.2  # clipping of the probability ratio
    clip_coef_high: float = 0.28  # clipping of the probability ratio from above
    ent_coef: float = 0.0  # weight of the entropy bonus
    kl_coef: float = 0.0  # weight of the KL divergence to the initial policy (0: none is kept)
    max_grad_norm: float = 0.5  # gradients are scaled down to this norm
    target_kl: float = 0.0  # no further epoch once the KL exceeds this (0: off)
    norm_obs: bool = True  # normalise observations by running statistics
    hidden_size: int = 64  # width of the two hidden layers of each network
    init_logstd: float = -0.5  # initial log standard deviation of a Gaussian policy

    # Performance
    cpu: bool = False  # use the CPU although there is a GPU
    backend: Literal["auto", "nccl", "gloo", "mpi"] = "auto"  # process-group backend
    check_interval: int = 10  # iterations between checks that ranks have equal weights (0: off)
    timeout: float = 600.0  # seconds that a process waits for the others before it gives up
    mixed_precision: Literal["no", "bf16", "fp16"] = "no"  # autocast; fp16 needs a GPU
    compile: bool = False  # torch.compile networks, loss and embedded envs (some seconds to warm up)
    torch_threads: int = 0  # CPU threads of each process (0: one for small networks, all cores for large ones)


POSITIVE = """
    num_envs episodes_per_env total_timesteps learning_rate desired_kl num_minibatches update_epochs clip_coef
    clip_coef_high max_grad_norm hidden_size keep_checkpoints timeout
""".split()
NATURAL = """
    eval_interval eval_episodes save_interval check_interval ent_coef kl_coef target_kl torch_threads
""".split()
FRACTION = ["gamma"]


def fail(message: str) -> None:
    """End with one line and exit code 1. Call it on all ranks; rank 0 prints."""
    raise SystemExit(f"error: {message}" if int(os.environ.get("RANK", 0)) == 0 else 1)


def option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def check_args(args: Args) -> None:
    for name, value in asdict(args).items():
        if isinstance(value, float) and not math.isfinite(value):
            fail(f"{option(name)} must be a number, not {value}")
        if name in POSITIVE and not value > 0:
            fail(f"{option(name)} must be greater than 0, not {value}")
        if name in NATURAL and not value >= 0:
            fail(f"{option(name)} must be 0 or more, not {value}")
        if name in FRACTION and not 0 <= value <= 1:
            fail(f"{option(name)} must be between 0 and 1, not {value}")
    if not 0 <= args.seed < EVAL_SEED:
        fail(f"--seed must be between 0 and {EVAL_SEED - 1}, not {args.seed}")
    if args.evaluate != bool(args.checkpoint) or (args.evaluate and args.resume):
        fail("--evaluate goes with --checkpoint PATH, and not with --resume")
    if Path(args.run_name).name != args.run_name or args.run_name == "..":
        fail(f"--run-name must be a plain name, not {args.run_name!r}: see --output-dir")


def check_groups(args: Args) -> None:
    if args.group_size < 2 or args.num_envs % args.group_size:
        sizes = f"--num-envs {args.num_envs} and --group-size {args.group_size}"
        fail(f"{sizes}: the envs of a process must divide into groups of two or more")
    low, high = args.filter_success
    if not 0 <= low <= high <= 1:
        fail(f"--filter-success {low} {high} must be two fractions, the lower one first, such as 0.1 0.9")


def launch(args: Args, *handlers) -> Accelerator:
    """Join the processes that the launcher started, or say why that would go wrong."""
    on_cpu = args.cpu or not torch.cuda.is_available()
    world = 1
    for name in ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "WORLD_SIZE"):
        world = int(os.environ.get(name) or world)
    advice = f"start several with 'torchrun --standalone --nproc_per_node {max(world, 2)} {sys.argv[0]}'"
    if "MASTER_ADDR" in os.environ and "RANK" not in os.environ and world == 1:
        fail(f"MASTER_ADDR is set without WORLD_SIZE, so this is one process: {advice}, or unset MASTER_ADDR")
    if args.mixed_precision == "fp16" and on_cpu:
        fail("--mixed-precision fp16 needs a GPU: use bf16 or no")
    if args.backend == "nccl" and on_cpu:
        fail("--backend nccl needs a GPU: use gloo or auto")
    if args.backend == "mpi" and not torch.distributed.is_mpi_available():
        fail("--backend mpi needs a torch built with MPI: use gloo, nccl or auto")

    group = {"timeout": timedelta(seconds=args.timeout)}
    if world > 1 and args.backend != "auto":
        group["backend"] = args.backend
    if world > 1 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        rank = int(os.environ["RANK"])
        address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        store = torch.distributed.TCPStore(*address, timeout=group["timeout"])
        # CRUCIAL: torchrun keeps its store through a restart. Without a prefix of its own, a restarted process would
        # find the addresses of dead ones there, and fail or hang.
        store = torch.distributed.PrefixStore(name_attempt(store, rank, world), store)
        default = {"backend": "gloo" if on_cpu else "nccl"}
        torch.distributed.init_process_group(store=store, rank=rank, world_size=world, **(default | group))
    handlers = [*handlers, InitProcessGroupKwargs(**group)]
    # CRUCIAL: without cpu=True torchrun on a machine without GPUs gives runs that share no gradients.
    accelerator = Accelerator(cpu=on_cpu, mixed_precision=args.mixed_precision, kwargs_handlers=handlers)
    if accelerator.num_processes != world:
        fail(f"{world} processes were started, but {accelerator.num_processes} found each other: {advice}")
    return accelerator


def name_attempt(store, rank: int, world: int) -> str:
    """A name for this attempt that all ranks share and no earlier attempt had.

    Each torchrun counts restarts for itself, so its count will not do. Every process writes a name,
    and then all the names it reads. Once all have read the same, none is of a dead process.
    """
    store.set(f"name_{rank}", uuid.uuid4().hex)
    while True:
        names = b" ".join(store.multi_get([f"name_{r}" for r in range(world)]))
        store.set(f"read_by_{rank}", names)
        if set(store.multi_get([f"read_by_{r}" for r in range(world)])) == {names}:
            return hashlib.sha256(names).hexdigest()
        time.sleep(0.01)


def tune_cpu(threads: int, multiplications: int) -> None:
    """Set the threads (0: by the multiplications of a hidden layer in a minibatch); keep freed memory."""
    if not threads:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        cores = cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        threads = max(1, min(cores, 8)) if multiplications > 1e8 else 1
    torch.set_num_threads(threads)
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if hasattr(libc, "mallopt"):
        # Else glibc returns every large tensor to the system, and maps new pages for the next one.
        libc.mallopt(M_MMAP_THRESHOLD, 2**30)
        libc.mallopt(M_TRIM_THRESHOLD, 2**30)


@contextmanager
def together(before: str = "", after: str = "", fatal: bool = True):
    """What fails in this block on any rank ends the run on all of them, or is in the list that it yields."""
    errors = []
    try:
        yield errors
    except Exception as error:
        errors.append(str(error).split("\n")[0])
        if isinstance(error, (ArithmeticError, AssertionError, AttributeError, LookupError, NameError, TypeError)):
            traceback.print_exc()  # a mistake in the code: one line would not tell where
    # CRUCIAL: every rank must reach this gather, whatever happened to it.
    errors[:] = gather_object(errors)
    if errors and fatal:
        fail(f"{before}{errors[0]}{after}")


def check_compiler(device: torch.device) -> None:
    """Look for what --compile needs before anything is made, on every node."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch.utils._triton import has_triton

    with together("--compile needs ", ": leave --compile out"):
        if device.type != "cpu":
            if not has_triton():
                raise OSError("triton, and a GPU that it supports")
            return
        try:
            get_cpp_compiler()
        except (OSError, RuntimeError) as error:
            raise OSError("a C++ compiler (none found: install g++ or set CXX)") from error


def exchange(accelerator: Accelerator, values: dict) -> dict[str, torch.Tensor]:
    """Numbers by name -> those of all ranks, [W, size] each: one collective, one host sync."""
    as_tensor = partial(torch.as_tensor, dtype=torch.float64, device=accelerator.device)
    parts = [as_tensor(x).reshape(-1) for x in values.values()]
    table = accelerator.gather(torch.cat(parts)[None]).cpu()
    return dict(zip(values, table.split([len(x) for x in parts], dim=1)))


class RunningMoments(nn.Module):
    """Mean and variance of all that was seen. Only joint sums enter, so all ranks have the same."""

    def __init__(self, size: int):
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("var", torch.ones(size, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((x - self.mean.float()) * (self.var + 1e-8).rsqrt().float()).clamp(-10.0, 10.0)

    def sums(self, x: torch.Tensor) -> torch.Tensor:
        """Count, sum and sum of squares on one rank, around the mean so that no digits are lost."""
        x = x.reshape(-1, self.mean.numel()).double() - self.mean
        return torch.cat([x.new_full((1,), x.shape[0]), x.sum(0), x.square().sum(0)])

    def merge(self, sums: torch.Tensor) -> None:
        """Merge the sums of all ranks together."""
        count = sums[0]
        delta, square = (sums[1:] / count).chunk(2)
        total = self.count + count
        spread = self.var * self.count + (square - delta.square()) * count
        self.var.copy_((spread + delta.square() * self.count * count / total) / total)
        self.mean.add_(delta * count / total)
        self.count.copy_(total)


def layer_init(layer: nn.Linear, std: float = math.sqrt(2)) -> nn.Linear:
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


class QuickTanh(torch.autograd.Function):
    """tanh(x), by a sigmoid: on a CPU, torch.tanh takes longer than the layer before it."""

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        y = torch.sigmoid(2.0 * x).mul_(2.0).sub_(1.0)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        (y,) = ctx.saved_tensors
        return gradient * (1.0 - y * y)


class Tanh(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return QuickTanh.apply(x)


def mlp(inputs: int, outputs: int, hidden: int, std: float) -> nn.Sequential:
    return nn.Sequential(
        layer_init(nn.Linear(inputs, hidden)),
        Tanh(),
        layer_init(nn.Linear(hidden, hidden)),
        Tanh(),
        layer_init(nn.Linear(hidden, outputs), std),
    )


class Agent(nn.Module):
    def __init__(self, env: envs.VecEnv, args: Args):
        super().__init__()
        size = math.prod(env.single_observation_space["state"].shape)
        moments = RunningMoments(size) if args.norm_obs else nn.Identity()
        self.obs_moments = nn.ModuleDict({"state": moments})
        action_space = env.single_action_space
        self.discrete = hasattr(action_space, "n")
        actions = int(action_space.n) if self.discrete else action_space.shape[0]
        self.actor = mlp(size, actions, args.hidden_size, std=0.01)
        if not self.discrete:
            self.actor_logstd = nn.Parameter(torch.full((actions,), args.init_logstd))

    def see(self, obs: TensorDict) -> torch.Tensor:
        """Observations as the networks take them. The statistics stand still during an iteration."""
        return torch.cat([moments(obs[name]) for name, moments in self.obs_moments.items()], -1)

    def forward(self, seen: torch.Tensor, action=None, deterministic=False):
        """-> action, its log-probability, and the entropy of the policy."""
        out = self.actor(seen).float()
        if self.discrete:
            logits = out.log_softmax(-1)
            if action is None and deterministic:
                action = logits.argmax(-1)
            elif action is None:
                gumbel = -torch.empty_like(logits).exponential_().log()
                action = (logits + gumbel).argmax(-1)
            logprob = logits.gather(-1, action.unsqueeze(-1)).squeeze(-1)
            entropy = -(logits.exp() * logits).sum(-1)
            return action, logprob, entropy
        logstd = self.actor_logstd.expand_as(out)
        if action is None:
            action = out if deterministic else out + logstd.exp() * torch.randn_like(out)
        z = (action - out) / logstd.exp()
        logprob = -0.5 * z.square() - logstd - 0.5 * math.log(2 * math.pi)
        entropy = logstd + 0.5 * math.log(2 * math.pi * math.e)
        return action, logprob.sum(-1), entropy.sum(-1)


def episode_places(active, ends, group_size: int, episodes: int) -> torch.Tensor:
    """Where each step of [T, N] stands in a table with one episode in each of its N * episodes columns.

    An env that has ended an episode starts the next one at once. The n-th episodes of the envs of a
    group started in the same state: they stand side by side. A step that is not active has none (-1).
    """
    steps, num_envs = active.shape
    step = torch.arange(steps, device=active.device)[:, None]
    begin = torch.where(ends, step + 1, 0).cummax(0).values.roll(1, 0)
    begin[0] = 0
    number = ends.cumsum(0) - ends.long()
    env = torch.arange(num_envs, device=active.device)
    # CRUCIAL: only episodes from the same start are compared.
    column = (env // group_size * episodes + number) * group_size + env % group_size
    return torch.where(active, (step - begin) * num_envs * episodes + column, -1)


def to_table(x: torch.Tensor, places: torch.Tensor, columns: int) -> torch.Tensor:
    """-> [T, columns], 0 where no step stands."""
    table = x.new_zeros(x.shape[0] * columns + 1)
    table[places] = x
    return table[:-1].view(-1, columns)


def from_table(table: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """-> [T, N], 0 for a step that stands nowhere."""
    return torch.cat([table.reshape(-1), table.new_zeros(1)])[places]


def group_advantages(rewards, active, group_size: int, gamma: float, step_wise: bool, scale: bool):
    """-> advantages and where they are valid, both [T, N], and the return of each episode [N].

    Every env of [T, N] holds one episode, `active` until it ends; `group_size` neighbours started
    in the same state. An advantage is how far a return lies above the mean of its group, with
    `scale` in deviations of the group. `step_wise` compares the returns from each step on of those
    still running; otherwise it is the whole returns, for all steps alike.
    """
    if rewards.dim() != 2 or rewards.shape != active.shape:
        raise ValueError(f"group_advantages needs [T, N] tensors of one shape, not {tuple(rewards.shape)}")
    returns = torch.empty_like(rewards)
    following = torch.zeros_like(rewards[0])
    for t in reversed(range(rewards.shape[0])):
        following = torch.where(active[t], rewards[t] + gamma * following, 0.0)
        returns[t] = following
    compared = len(returns) if step_wise else 1
    scores = returns[:compared].unflatten(1, (-1, group_size))
    members = active[:compared].unflatten(1, (-1, group_size))
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
    newlogprob, entropy, logprob, advantage, ref_logprob,
    clip_coef, clip_coef_high, ent_coef, kl_coef,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The loss summed over the samples, and the sums of what is logged (LOSSES)."""
    logratio = newlogprob - logprob
    ratio = logratio.exp()
    clipped_ratio = ratio.clamp(1 - clip_coef, 1 + clip_coef_high)
    pg_loss = torch.max(-advantage * ratio, -advantage * clipped_ratio)
    # The estimator k3 of the KL divergence to the reference: never negative, and of little variance.
    ref_logratio = torch.zeros_like(newlogprob) if ref_logprob is None else ref_logprob - newlogprob
    ref_kl = (ref_logratio.exp() - 1) - ref_logratio
    loss = pg_loss - ent_coef * entropy + kl_coef * ref_kl
    clipped = ((ratio < 1 - clip_coef) | (ratio > 1 + clip_coef_high)).float()
    logged = torch.stack([pg_loss, entropy, -logratio, (ratio - 1) - logratio, clipped, ref_kl])
    return loss.sum(), logged.detach().sum(1)


LOSSES = ["policy_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac", "ref_kl"]
LOSSES = [f"losses/{name}" for name in LOSSES]


class Learner(nn.Module):
    """From a minibatch to its loss, in one call and one compiled graph."""

    def __init__(self, agent: Agent, args: Args):
        super().__init__()
        self.agent = agent
        self.coefs = (args.clip_coef, args.clip_coef_high, args.ent_coef, args.kl_coef)

    def forward(self, seen, action, logprob, advantage, ref_logprob=None):
        _, newlogprob, entropy = self.agent(seen, action)
        return grpo_loss(newlogprob, entropy, logprob, advantage, ref_logprob, *self.coefs)


def episode_sums(ended: torch.Tensor, episode: dict[str, torch.Tensor]) -> torch.Tensor:
    """-> the number of episodes that ended, and the sums of their return, length and success."""
    sums = [ended.double().sum()]
    for name in ("return", "length", "success"):
        sums.append(torch.where(ended, episode[name], 0).double().sum())
    return torch.stack(sums)


def episode_means(prefix: str, sums: list[float]) -> dict[str, float]:
    """What is logged of such sums, without what the env does not know (NaN)."""
    names = ("episodic_return", "episodic_length", "success_rate")
    means = {f"{prefix}/{name}": x / sums[0] for name, x in zip(names, sums[1:])}
    return {name: x for name, x in means.items() if not math.isnan(x)}


@torch.no_grad()
def evaluate(agent: nn.Module, env: envs.VecEnv, accelerator: Accelerator, video: Path) -> dict:
    """One deterministic episode in each env of every rank: short ones are not favoured."""
    agent.eval()
    # Where it is the env that trains, an episode that training never starts.
    obs = env.reset(0 if env.separate_evaluation else EVAL_SEED)
    active = torch.ones(env.num_envs, dtype=torch.bool, device=env.device)
    sums = torch.zeros(4, dtype=torch.float64, device=env.device)
    frames = []
    steps = 0
    while active.any():
        if env.render_rows and steps % math.ceil(env.max_episode_steps / 250) == 0:
            frame = env.render().cpu()
            if frames:  # an episode that has ended stays as it was
                ended = ~active[: len(frame)].cpu()
                frame[ended] = frames[-1][ended]
            frames.append(frame)
        with accelerator.autocast():
            action = agent(agent.see(obs), deterministic=True)[0]
        obs, _, terminated, truncated, info = env.step(action, active)
        ended = (terminated | truncated) & active
        sums += episode_sums(ended, info["episode"])
        active = active & ~ended
        steps += 1
    if frames:
        save_video(frames, video)
    totals = accelerator.reduce(sums, "sum").tolist()
    return episode_means("eval", totals) | {"eval/episodes": totals[0]}


def save_video(frames: list[torch.Tensor], path: Path) -> None:
    """Frames of [n, H, W, 3], the n side by side, as a GIF."""
    path.parent.mkdir(parents=True, exist_ok=True)
    images = [Image.fromarray(torch.cat(list(frame), dim=1).numpy()) for frame in frames]
    images[0].save(path, save_all=True, append_images=images[1:], duration=40, loop=0)


def make_envs(args: Args, accelerator: Accelerator, **options) -> tuple[envs.VecEnv, envs.VecEnv]:
    """The envs to train in, and those to evaluate in: ranks share the episodes of an evaluation."""
    rank = accelerator.process_index
    world = accelerator.num_processes
    embedded = "/" not in args.env_id
    episodes = args.eval_episodes or max(512 if embedded else 16, world)
    if episodes < world:
        fail(f"--eval-episodes {episodes} leaves a process without one: give at least {world}")
    first = episodes * rank // world
    mine = episodes * (rank + 1) // world - first
    render = 0
    if args.capture_video and accelerator.is_main_process:
        render = 4 if embedded else 1
    with together():
        make = partial(envs.make, args.env_id, device=accelerator.device, **envs.options(args.env_options))
        # CRUCIAL: seeded by the global index of each env: with seed + rank, ranks would share most initial states.
        env = make(num_envs=args.num_envs, seed=args.seed, first_env=rank * args.num_envs, **options)
        if not env.separate_evaluation and args.capture_video:
            raise ValueError(f"{args.env_id} is evaluated in the envs it trains in, which --capture-video cannot draw")
        if not env.separate_evaluation:
            return env, env
        eval_env = make(num_envs=mine, seed=EVAL_SEED, first_env=first, render=render)
    return env, eval_env


def flatten(parameters: list[nn.Parameter]) -> nn.Parameter:
    """Make them, and their gradients, parts of one vector: one tensor to exchange, to clip and to update."""
    weights = nn.Parameter(nn.utils.parameters_to_vector(parameters).detach())
    weights.data = broadcast(weights.data)  # another kind of CPU may draw others from the same seed
    weights.grad = torch.zeros_like(weights)
    nn.utils.vector_to_parameters(weights.data, parameters)
    for p, gradient in zip(parameters, weights.grad.split([p.numel() for p in parameters])):
        p.grad = gradient.view_as(p)
    return weights


class RankSum:
    """Sums a vector over all ranks, in place, and to the last bit the same on each of them.

    Processes on the CPUs of one machine do it in memory that they share. With gloo they would sleep
    until a message comes, and to wake up can take longer than a minibatch of a small network.
    """

    def __init__(self, vector: torch.Tensor, accelerator: Accelerator, timeout: float):
        self.rank = accelerator.process_index
        self.world = accelerator.num_processes
        self.timeout = timeout
        self.round = 0
        self.counters = None
        one_machine = os.environ.get("LOCAL_WORLD_SIZE") == str(self.world)
        ordered = platform.machine() in ("x86_64", "AMD64")  # others may let a counter overtake what it counts
        if self.world > 1 and one_machine and ordered and vector.device.type == "cpu" and sys.platform == "linux":
            self._share(vector)

    def _share(self, vector: torch.Tensor) -> None:
        counter_bytes = 64 * self.world  # a cache line for each rank
        # Not a file in /dev/shm: it would outlive a killed process, and containers allow little there.
        fd = os.memfd_create("tandem") if self.rank == 0 else None
        path = broadcast_object_list([f"/proc/{os.getpid()}/fd/{fd}"])[0]
        with open(path, "r+b") as shared:
            shared.truncate(counter_bytes + 2 * self.world * vector.nbytes)
            self.memory = mmap.mmap(shared.fileno(), 0)
        self.processes = [psutil.Process(pid) for pid in gather_object([os.getpid()])]  # all have opened it
        if self.rank == 0:
            os.close(fd)  # the memory goes when the last process does
        self.counters = memoryview(self.memory)[:counter_bytes].cast("q")
        self.parts = torch.frombuffer(self.memory, dtype=vector.dtype, offset=counter_bytes).view(2, self.world, -1)

    def __call__(self, vector: torch.Tensor) -> None:
        if self.world == 1:
            return
        if self.counters is None:
            torch.distributed.all_reduce(vector)
            return
        self.round += 1
        # CRUCIAL: two buffers in turn. A rank that writes into one has seen all ranks enter the round after its last
        # use, so all of them have read it.
        parts = self.parts[self.round % 2]
        parts[self.rank] = vector
        self.counters[8 * self.rank] = self.round
        for rank in range(self.world):
            if self.counters[8 * rank] < self.round:
                self._wait(rank)
        torch.sum(parts, 0, out=vector)

    def _wait(self, rank: int) -> None:
        start = looked = time.monotonic()
        while self.counters[8 * rank] < self.round:
            os.sched_yield()
            now = time.monotonic()
            if now > looked + 0.1:
                looked = now
                if self.processes[rank].status() == psutil.STATUS_ZOMBIE:  # raises NoSuchProcess where there is none
                    raise ProcessLookupError(f"rank {rank} has died")
                if now > start + self.timeout:
                    raise TimeoutError(f"rank {rank} has not answered for {self.timeout} seconds")


def clip_and_step(accelerator: Accelerator, optimizer, weights: nn.Parameter, max_norm: float) -> torch.Tensor:
    """Update the weights -> the norm of their gradient."""
    if accelerator.scaler:  # fp16: it unscales before clipping, and leaves out a step with NaN by itself
        norm = accelerator.clip_grad_norm_([weights], max_norm)
        optimizer.step()
    else:
        adam = optimizer.optimizer  # not Accelerate's wrapper, which looks for a file at every step
        norm = weights.grad.norm()
        adam.grad_scale = (norm / max_norm).clamp(min=1.0)  # the fused Adam divides by it
        # CRUCIAL: a NaN is in the sum over ranks, so on all of them, and the fused Adam skips its step where this is 1:
        # everywhere, and without a host sync.
        adam.found_inf = (~norm.isfinite()).float()
        adam.step()
    # CRUCIAL: set to zero, not to None: the layers' gradients are views of this vector.
    weights.grad.zero_()
    return norm


def show(scores: dict[str, float]) -> str:
    return ", ".join(f"{name} {x:.6g}" for name, x in scores.items())


def due(interval: int, before: int, after: int) -> bool:
    """Whether a multiple of the interval was passed, exactly met or not."""
    return interval > 0 and after // interval > before // interval


def split_sizes(counts: torch.Tensor, parts: int) -> list[list[int]]:
    """How many of its samples each rank puts into each minibatch: [parts][W]."""
    edges = counts * torch.arange(parts + 1)[:, None] // parts
    return edges.diff(dim=0).tolist()


def checksum(tensors: list[torch.Tensor], size: int = 2**22) -> torch.Tensor:
    """A number that changes with any bit of them, and that float64 holds exactly."""
    total = torch.zeros((), dtype=torch.int64, device=tensors[0].device)
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        odd = flat.numel() * flat.element_size() % 2
        bits = flat.view(torch.int8 if odd else torch.int16)
        value = torch.zeros_like(total)
        for start in range(0, len(bits), size):
            part = bits[start : start + size].long()
            place = torch.arange(start, start + len(part), device=part.device) % 32749 + 1
            value += (part * place).sum()
        total = (31 * total + value) % 2**52
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


def launcher_name() -> str:
    """Host, number and start of torchrun, if it started this process, or of this process: unique."""
    pid = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid()
    started = psutil.Process(pid).create_time()
    stat = Path(f"/proc/{pid}/stat")
    if stat.exists():  # in ticks since boot, which no change of the wall clock can move
        started = stat.read_text().split(")")[-1].split()[19]
    return f"{socket.gethostname()} {pid} {started}"


@dataclass
class Progress:
    """Everything that is counted, the same on all ranks. A new field is saved and restored too."""

    global_step: int = 0  # env steps over all processes
    iteration: int = 0
    steps_trained: int = 0  # env steps, once for each epoch that used them
    learning_rate: float = 0.0
    best: list[float] | None = None  # success rate and return of the best evaluation
    best_step: int = -1  # its checkpoint
    episodes: list = field(default_factory=list)  # episode_sums of the newest iterations

    def count_episodes(self, sums: list[float]) -> dict[str, float]:
        """Add those of an iteration -> means over the newest iterations that have 100 together."""
        if sums[0] > 0:
            self.episodes.append(sums)
        while sum(newer[0] for newer in self.episodes[1:]) >= 100:
            self.episodes.pop(0)
        if not self.episodes:
            return {}
        return episode_means("charts", [sum(column) for column in zip(*self.episodes)])

    def improve(self, scores: dict[str, float]) -> bool:
        """Whether this evaluation is the best so far."""
        score = [scores.get("eval/success_rate", 0.0), scores.get("eval/episodic_return", -math.inf)]
        improved = self.best is None or score > self.best
        if improved:
            self.best = score
            self.best_step = self.global_step
        return improved


@dataclass
class Checkpoint:
    """What a checkpoint holds, mapped from its files rather than read: let go of it after use."""

    folder: Path
    model: dict[str, torch.Tensor]
    about: dict  # the arguments of the run that wrote it
    trainer: dict  # optimizer and progress
    local: dict | None  # this rank's own state, if there was such a rank


def find_checkpoints(path: Path, pointer: str) -> list[Path]:
    """The checkpoints at a path: itself, or those of a run, the one that its pointer names first."""
    if (path / "manifest.json").exists():
        return [path]
    folder = path / "checkpoints"
    named = (folder / pointer).read_text() if (folder / pointer).exists() else None
    found = [p for p in folder.glob("step_*") if p.name.removeprefix("step_").isdigit()]
    return sorted(found, key=lambda p: (p.name == named, int(p.name.removeprefix("step_"))), reverse=True)


def load_checkpoint(folders: list[Path], accelerator: Accelerator) -> Checkpoint | None:
    """The first of them that every rank finds good. Nothing in the files is executed."""
    own = f"rank_{accelerator.process_index}.pt"
    load = partial(torch.load, map_location="cpu", weights_only=True, mmap=True)
    for folder in folders:
        problem = f"{folder} is not a good checkpoint: "
        with together(problem, fatal=folder == folders[-1]) as errors:
            manifest = json.loads((folder / "manifest.json").read_text())
            for name in ("model.safetensors", "trainer.pt", own):
                if name in manifest and digest(folder / name) != manifest[name]:
                    raise ValueError(f"{name} is damaged")
            with safe_open(folder / "model.safetensors", "pt") as file:
                model = {k: file.get_tensor(k) for k in file.keys()}
                about = json.loads(file.metadata()["about"])
            local = load(folder / own) if own in manifest else None
            checkpoint = Checkpoint(folder, model, about, load(folder / "trainer.pt"), local)
        if not errors:
            return checkpoint
        accelerator.print(f"{problem}{errors[0]}; trying the one before it")
    return None


def load_best(path: str, args: Args, accelerator: Accelerator) -> Checkpoint:
    (folders,) = broadcast_object_list([find_checkpoints(Path(path), "best")[:1]])
    if not folders:
        fail(f"no checkpoint at {path}: give a run folder or one of its checkpoints/step_*")
    checkpoint = load_checkpoint(folders, accelerator)
    old = " ".join(checkpoint.about["args"].get("env_options", [])) or "none"
    new = " ".join(args.env_options) or "none"
    if old != new:
        accelerator.print(f"{checkpoint.folder} was trained with --env-options {old}, not {new}")
    return checkpoint


def load_model(agent: nn.Module, checkpoint: Checkpoint, args: Args) -> None:
    for name in MODEL_ARGS:
        old = checkpoint.about["args"].get(name)
        new = getattr(args, name)
        if old != new:
            fail(f"{checkpoint.folder} was trained with {name} = {old}, not {new}: set {option(name)} to match it")
    try:
        agent.load_state_dict(checkpoint.model)
    except RuntimeError as error:
        old = " ".join(checkpoint.about["args"].get("env_options", [])) or "none"
        new = " ".join(args.env_options) or "none"
        if old != new:
            fail(f"{checkpoint.folder} was trained with other observations or actions: --env-options {old}, not {new}")
        fail(f"{checkpoint.folder} does not fit this model: {' '.join(str(error).split())}")


class Run:
    """The run's folder: checkpoints, logs and summary; and the signals that end the run."""

    def __init__(self, args: Args, accelerator: Accelerator):
        self.args = args
        self.accelerator = accelerator
        self.is_main = accelerator.is_main_process
        self.launchers = sorted(set(gather_object([launcher_name()])))  # the same after a restart
        self.start_time = time.time()
        self.last_print = 0.0
        self.signals = []  # when they came
        self.names = None
        self.timed_steps = None  # not before the first iteration is over
        self.timed_seconds = 0.0
        self.wandb = None

    def open(self) -> Checkpoint | None:
        """Choose the run's folder -> the checkpoint to resume from, if there is one."""
        chosen = None
        with together():
            if self.is_main:  # other nodes may see an older state of a shared disk
                chosen = self._choose_folder()
        self.folder, found, self.is_new = broadcast_object_list([chosen])[0]
        return load_checkpoint(found, self.accelerator)

    def _choose_folder(self) -> tuple[Path, list[Path], bool]:
        """-> folder, checkpoints to resume from, whether the folder must not exist yet."""
        args = self.args
        runs = Path(args.output_dir)
        stem = f"{args.env_id.replace('/', '-')}__{Path(__file__).stem}__{args.seed}"
        unique = f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:4]}"
        folder = runs / (args.run_name or f"{stem}__{unique}")
        found = []
        if args.resume == "auto":
            if not args.run_name:
                folder = max([p.parent for p in runs.glob(f"{stem}__*/checkpoints")], default=folder)
            found = find_checkpoints(folder, "latest")
        elif args.resume:
            found = find_checkpoints(Path(args.resume).resolve(), "latest")[:1]
            if not found:
                raise ValueError(f"nothing to resume at {args.resume}: give a run folder or its checkpoints/step_*")
            if found[0].parent.name == "checkpoints":
                folder = found[0].parent.parent
        # CRUCIAL: torchrun starts all processes again when one died: then resume what this very launch has written,
        # and nothing that another launch of the same name has.
        if "TORCHELASTIC_RUN_ID" in os.environ:
            for file in [folder / "launch.json", *runs.glob(f"{stem}__*/launch.json")]:
                if file.exists() and set(self.launchers) & set(json.loads(file.read_text())):
                    return file.parent, find_checkpoints(file.parent, "latest") or found, False
        if folder.exists() and not args.resume:
            raise ValueError(f"{folder} exists already: choose another --run-name, or resume it with --resume {folder}")
        return folder, found, not args.resume

    def resume(self, checkpoint: Checkpoint, progress: Progress, optimizer) -> bool:
        """Restore what every script saves -> whether the run continues bit for bit."""
        accelerator = self.accelerator
        trainer = checkpoint.trainer
        old = checkpoint.about["args"]
        accelerator.print(f"resuming {checkpoint.folder}")
        for name, value in json.loads(json.dumps(asdict(self.args))).items():
            if value != old.get(name) and name not in ("resume", "run_name", "output_dir"):
                accelerator.print(f"  {option(name)} is {value}, was {old.get(name)}")
        for name in asdict(progress):
            if name in trainer:
                setattr(progress, name, trainer[name])
        if progress.global_step >= self.args.total_timesteps:
            accelerator.print(f"nothing to do: {checkpoint.folder} has all steps; raise --total-timesteps")
        try:
            optimizer.optimizer.load_state_dict(trainer["optimizer"])
        except ValueError:
            what = "an older version wrote it, and its optimizer state does not fit this one"
            fail(f"cannot resume {checkpoint.folder}: {what}; --evaluate can still score its policy")
        if accelerator.scaler and trainer.get("scaler"):
            accelerator.scaler.load_state_dict(trainer["scaler"])
        changed = ""
        if trainer["world_size"] != accelerator.num_processes:
            changed = f"{trainer['world_size']} processes became {accelerator.num_processes}"
        elif old["num_envs"] != self.args.num_envs:
            changed = "--num-envs changed"
        elif checkpoint.local.get("env", {}) is None:
            changed = f"{self.args.env_id} cannot save its state"
        if changed:
            accelerator.print(f"  episodes start anew, because {changed}: the run goes on, but not bit for bit")
            return False
        torch.set_rng_state(checkpoint.local["rng"])
        if accelerator.device.type == "cuda" and checkpoint.local["cuda_rng"] is not None:
            torch.cuda.set_rng_state(checkpoint.local["cuda_rng"], accelerator.device)
        return True

    def claim(self, progress: Progress) -> None:
        """Make the folder this launch's own, start to log, and listen to signals."""
        args = self.args
        with together(f"cannot write to {self.folder}: ", "; choose another --output-dir"):
            if self.is_main:
                self.folder.mkdir(parents=True, exist_ok=not self.is_new)
                write(self.folder / "launch.json", json.dumps(self.launchers))
                write(self.folder / "args.json", json.dumps(asdict(args), indent=2))
                (self.folder / "preempted").unlink(missing_ok=True)
                self._tidy_checkpoints(progress)
                self.writer = SummaryWriter(self.folder, purge_step=progress.global_step + 1)
        with together("cannot start Weights & Biases: ", "; run 'wandb login', or set WANDB_MODE=offline"):
            if self.is_main and args.track:
                import wandb

                run_id = hashlib.sha256(str(self.folder.resolve()).encode()).hexdigest()[:16]
                options = {"project": args.wandb_project, "name": self.folder.name, "dir": self.folder}
                try:
                    self.wandb = wandb.init(**options, id=run_id, resume="allow", config=asdict(args))
                except Exception:
                    if self.is_new:  # so that the same command works after a login
                        shutil.rmtree(self.folder)
                    raise
        progress.best = broadcast_object_list([progress.best])[0]
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self._on_signal)
        options = {"total": args.total_timesteps, "initial": progress.global_step, "unit": "step", "unit_scale": True}
        self.bar = tqdm(**options, disable=None if self.is_main else True)  # None: only on a terminal

    def _tidy_checkpoints(self, progress: Progress) -> None:
        folder = self.folder / "checkpoints"
        for part in folder.glob(".step_*.part"):  # killed while it was written
            shutil.rmtree(part)
        for newer in find_checkpoints(self.folder, "latest"):  # damaged, or left behind
            if int(newer.name.removeprefix("step_")) > progress.global_step:
                abandoned = newer.with_name(f"abandoned_{newer.name}")
                shutil.rmtree(abandoned, ignore_errors=True)
                newer.rename(abandoned)
        # The best so far is as of the checkpoint that is resumed. If it is gone, start over.
        if (folder / f"step_{progress.best_step}").exists():
            write(folder / "best", f"step_{progress.best_step}")
        else:
            progress.best = None
            (folder / "best").unlink(missing_ok=True)

    def _on_signal(self, number, frame) -> None:
        # A second Ctrl-C leaves at once; within a second it is torchrun passing the first one on.
        if number == signal.SIGINT and self.signals and time.time() - self.signals[0] > 1.0:
            os._exit(130)
        self.signals.append(time.time())

    def save(self, progress: Progress, model: dict, trainer: dict, local: dict, best: bool) -> None:
        """Write a checkpoint, all ranks together. Killed at any moment, it harms no other one."""
        accelerator = self.accelerator
        folder = self.folder / "checkpoints" / f"step_{progress.global_step}"
        part = folder.with_name(f".{folder.name}.part")
        message = (f"cannot save {folder}: ", "; the checkpoints before it are untouched")
        with together(*message):
            part.mkdir(parents=True, exist_ok=True)
            local = local | {"rng": torch.get_rng_state(), "cuda_rng": None}
            if accelerator.device.type == "cuda":
                local["cuda_rng"] = torch.cuda.get_rng_state(accelerator.device)
            torch.save(local, part / f"rank_{accelerator.process_index}.pt")
            if self.is_main:
                model = {k: v.detach().cpu().contiguous() for k, v in model.items()}
                about = json.dumps({"env_id": self.args.env_id, "args": asdict(self.args)})
                save_file(model, part / "model.safetensors", metadata={"about": about})
                scaler = accelerator.scaler.state_dict() if accelerator.scaler else None
                trainer = trainer | asdict(progress) | {"scaler": scaler, "versions": VERSIONS}
                trainer["world_size"] = accelerator.num_processes
                torch.save(trainer, part / "trainer.pt")
        with together(*message):
            if self.is_main:
                names = ["model.safetensors", "trainer.pt"]
                names += [f"rank_{r}.pt" for r in range(accelerator.num_processes)]
                for name in names:
                    with (part / name).open("rb") as file:
                        os.fsync(file.fileno())
                write(part / "manifest.json", json.dumps({name: digest(part / name) for name in names}))
                shutil.rmtree(folder, ignore_errors=True)
                part.rename(folder)
                if best:
                    write(folder.with_name("best"), folder.name)
                write(folder.with_name("latest"), folder.name)
                for old in find_checkpoints(self.folder, "best")[1 + self.args.keep_checkpoints :]:
                    shutil.rmtree(old, ignore_errors=True)

    def metric_names(self, metrics: dict) -> list[str]:
        """The names that any rank has, so that all of them exchange the same ones."""
        if self.names is None:
            self.names = sorted(set(gather_object(list(metrics))))
        return self.names

    def speed(self, steps: int, seconds: float) -> dict[str, float]:
        """Env steps per second so far, without the first iteration, which warms up."""
        if self.timed_steps is None:
            self.timed_steps = 0
            return {}
        self.timed_steps += steps
        self.timed_seconds += seconds
        return {"charts/SPS": self.timed_steps / self.timed_seconds}

    def check_finite(self, broken: torch.Tensor, iteration: int) -> None:
        if broken.any():
            ranks = ", ".join(str(rank) for rank, x in enumerate(broken) if x)
            where = f"{self.args.env_id} on rank {ranks} in iteration {iteration}"
            fail(f"NaN or infinity from {where}: no update was made")

    def check_ranks(self, checksums: torch.Tensor, skipped: int, iteration: int) -> None:
        """Stop where ranks have drifted apart, or where the last updates were all skipped."""
        differ = checksums != checksums[0]
        if differ.any():
            ranks = ", ".join(str(rank) for rank, x in enumerate(differ) if x)
            what = f"weights, learning rate or statistics of rank {ranks} differ from rank 0's"
            fail(f"{what} in iteration {iteration}: resume the last checkpoint with --resume {self.folder}")
        # A loss scale of fp16 that can still be lowered is at work, and no reason to give up.
        scaler = self.accelerator.scaler
        if skipped >= MAX_SKIPPED and (scaler is None or scaler.get_scale() <= 1.0):
            what = f"the last {skipped} updates had NaN or infinite gradients and were skipped"
            fail(f"{what}: try a smaller --learning-rate than {self.args.learning_rate}")

    def log(self, log: dict[str, float], progress: Progress) -> None:
        """To TensorBoard, Weights & Biases and, every few seconds, the console."""
        if not self.is_main:
            return
        step = progress.global_step
        log["charts/iteration"] = progress.iteration
        log["charts/learning_rate"] = progress.learning_rate
        log["charts/steps_sampled"] = step
        log["charts/steps_trained"] = progress.steps_trained
        for name, value in log.items():
            self.writer.add_scalar(name, value, step)
        if self.wandb:
            self.wandb.log(log, step=step)
        names = ("SPS", "episodic_return", "success_rate")
        shown = show({name: log[f"charts/{name}"] for name in names if f"charts/{name}" in log})
        self.bar.set_postfix_str(shown, refresh=False)
        self.bar.update(step - self.bar.n)
        if self.bar.disable and (step >= self.bar.total or time.time() > self.last_print + 5):
            self.last_print = time.time()
            print(f"step {step}/{self.bar.total}  {shown}", flush=True)

    def finish(self, log: dict[str, float], progress: Progress) -> None:
        """Write the summary, or how to resume if a signal ended the run."""
        if not self.is_main:
            return
        self.bar.close()
        self.writer.close()
        if self.wandb:
            self.wandb.finish()
        if log and progress.global_step < self.args.total_timesteps:
            saved = self.folder / "checkpoints" / f"step_{progress.global_step}"
            write(self.folder / "preempted", saved.name)
            print(f"stopped by a signal, saved {saved}: resume with --resume {self.folder}")
        elif log:  # without it, there was nothing left to do
            git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
            commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
            summary = log | {"env_id": self.args.env_id, "seed": self.args.seed, "command": " ".join(sys.argv)}
            summary |= {"commit": commit, "versions": VERSIONS, "world_size": self.accelerator.num_processes}
            summary |= {"global_step": progress.global_step, "wall_seconds": time.time() - self.start_time}
            write(self.folder / "summary.json", json.dumps(summary, indent=2))
            scores = {name: x for name, x in log.items() if name.startswith("eval/")}
            print(f"{show(scores)}  -> {self.folder}")


def main(args: Args) -> None:
    # ---- Set up
    check_args(args)
    check_groups(args)
    accelerator = launch(args)
    rank = accelerator.process_index
    world = accelerator.num_processes
    device = accelerator.device
    if args.compile:
        check_compiler(device)
    steps = 100  # a guess at the length of an episode
    tune_cpu(args.torch_threads, args.hidden_size**2 * args.num_envs * steps // args.num_minibatches)
    options = {"compile": True} if args.compile and args.env_id in envs.EMBEDDED else {}
    env, eval_env = make_envs(args, accelerator, group_size=args.group_size, **options)
    if "rgb" in env.single_observation_space.keys():
        fail(f"{args.env_id} has image observations, which this script does not support: use ppo_vla_async.py")
    if args.episodes_per_env > 1 and not env.equal_restarts:
        fail(f"{args.env_id} starts a group alike at a reset only: leave --episodes-per-env at 1")
    torch.manual_seed(args.seed)  # the same weights on every rank
    agent = Agent(env, args).to(device)
    if args.evaluate:
        checkpoint = load_best(args.checkpoint, args, accelerator)
        load_model(agent, checkpoint, args)
        scores = evaluate(agent, eval_env, accelerator, checkpoint.folder / "evaluation.gif")
        accelerator.print(f"{checkpoint.folder}: {show(scores)}")
        return accelerator.end_training()

    run = Run(args, accelerator)
    checkpoint = run.open()
    if checkpoint:
        load_model(agent, checkpoint, args)
    elif args.init_from:
        initial = load_best(args.init_from, args, accelerator)
        accelerator.print(f"starting from the policy of {initial.folder}")
        own = agent.state_dict()  # without the critic of ppo_ddp.py
        initial.model = {name: x for name, x in initial.model.items() if name in own}
        load_model(agent, initial, args)
    reference = copy.deepcopy(agent).requires_grad_(False) if args.kl_coef else None
    learner = Learner(agent, args)

    def act(obs: TensorDict):
        return agent(agent.see(obs))

    if args.compile:
        learner.compile(dynamic=True)  # minibatches have many sizes
        act = torch.compile(act)
    weights = flatten(list(agent.parameters()))
    sum_over_ranks = RankSum(weights.grad, accelerator, args.timeout)
    optimizer = torch.optim.Adam([weights], lr=args.learning_rate, eps=1e-5, fused=True)
    optimizer = accelerator.prepare(optimizer)
    seed = args.seed + 1_000_003 * (rank + 1)  # other actions and minibatches on every rank
    torch.manual_seed(seed)

    # ---- Resume
    progress = Progress(learning_rate=args.learning_rate)
    if checkpoint:
        exact = run.resume(checkpoint, progress, optimizer)
        if reference and checkpoint.trainer["reference"]:
            reference.load_state_dict(checkpoint.trainer["reference"])
        elif reference:
            accelerator.print("  the KL is to the policy of this checkpoint: the run has kept no older one")
        if not exact:
            torch.manual_seed(seed + progress.iteration)
        checkpoint = None  # let go of the mapped files
    run.claim(progress)
    groups = f"{world} x {args.num_envs // args.group_size} groups of {args.group_size} envs"
    accelerator.print(f"{args.env_id}: {groups} on {device.type}, writing to {run.folder}")

    skipped_in_a_row = torch.zeros((), device=device)
    stopping = False
    log = {}
    while progress.global_step < args.total_timesteps and not stopping:
        progress.iteration += 1
        if args.lr_schedule == "constant":
            progress.learning_rate = args.learning_rate
        elif args.lr_schedule == "linear":
            progress.learning_rate = args.learning_rate * (1.0 - progress.global_step / args.total_timesteps)

        # ---- Rollout: as many episodes in each env, one right after the other; statistics frozen
        rollout_start = time.perf_counter()
        agent.eval()
        rows = []
        episodes = []
        env_metrics = {}
        left = torch.full((args.num_envs,), args.episodes_per_env, device=device)  # episodes not over yet
        with torch.no_grad(), accelerator.autocast():
            # CRUCIAL: the number of the iteration makes the starts: new ones each time, and the same after a resume.
            next_obs = env.reset(episode=progress.iteration * args.episodes_per_env)
            for step in range(1, args.episodes_per_env * env.max_episode_steps + 1):
                running = left > 0
                action, logprob, _ = act(next_obs)
                row = [next_obs, action, logprob, running]
                next_obs, reward, terminated, truncated, info = env.step(action, running)
                ended = running & (terminated | truncated)
                if args.reward == "success":
                    reward = torch.where(ended, info["episode"]["success"], 0.0)
                rows.append([*row, reward, ended])
                episodes.append(info["episode"])
                for name, x in info["metrics"].items():
                    env_metrics[name] = env_metrics.get(name, 0.0) + (x * running).sum()
                left = left - ended.long()
                # On a GPU a look costs a host sync, and steps in which nobody moves cost less.
                if (device.type == "cpu" or step % 16 == 0) and not left.any():
                    break
            obs, actions, logprobs, active, rewards, ends = [torch.stack(column) for column in zip(*rows)]
            episodes = {name: torch.stack([episode[name] for episode in episodes]) for name in episodes[0]}

            # ---- Advantages, in a table with an episode in each column
            columns = args.num_envs * args.episodes_per_env
            places = episode_places(active, ends, args.group_size, args.episodes_per_env)
            advantages, valid, scores = group_advantages(
                to_table(rewards, places, columns), to_table(active, places, columns),
                args.group_size, args.gamma, args.advantage == "step", args.scale,
            )  # fmt: skip
            success = to_table(episodes["success"] * ends, places, columns).nan_to_num().sum(0)
            success_rate = success.view(-1, args.group_size).mean(1)
            low, high = args.filter_success
            kept = (low <= success_rate) & (success_rate <= high)
            valid = valid & kept.repeat_interleave(args.group_size)
            silent = ~valid.any(0).view(-1, args.group_size).any(1)
            advantages = from_table(advantages, places)
            valid = from_table(valid, places)
            needs_success = args.reward == "success" or (low, high) != (0.0, 1.0)
            unknown = (episodes["success"].isnan() & ends).any() & needs_success
            finite = torch.stack([x.isfinite().all() for x in (rewards, *obs.values())]).all()

        # ---- Exchange what all ranks must know of each other
        mine = {"samples": valid.sum(), "steps": active.sum(), "rows": active.numel()}
        mine |= {"broken": ~finite & ~unknown, "unknown": unknown, "stop": bool(run.signals)}
        mine["episodes"] = episode_sums(ends, episodes)
        mine["group_return"] = scores.double().sum()
        mine["group_std"] = scores.view(-1, args.group_size).std(1, correction=0).double().sum()
        mine["silent"] = silent.sum()
        if args.norm_obs:
            for name, moments in agent.obs_moments.items():
                mine[f"obs_{name}"] = moments.sums(obs[name][active])
        rollout_seconds = time.perf_counter() - rollout_start
        ranks = exchange(accelerator, mine)
        wait_seconds = time.perf_counter() - rollout_start - rollout_seconds
        run.check_finite(ranks["broken"], progress.iteration)
        if ranks["unknown"].any():
            fail(f"{args.env_id} does not always say what success is: leave --reward and --filter-success as they are")
        sums = {name: x.sum(0) for name, x in ranks.items()}
        samples = int(sums["samples"])
        steps = int(sums["steps"])
        before_step = progress.global_step
        progress.global_step += steps
        finished = progress.global_step >= args.total_timesteps
        stopping = bool(sums["stop"]) and not finished

        # ---- Update: the same number of minibatches on every rank, whatever it holds; one collective in each
        update_start = time.perf_counter()
        agent.train()
        batch = {"seen": agent.see(obs), "action": actions, "logprob": logprobs, "advantage": advantages}
        batch = TensorDict(batch, active.shape).reshape(-1)
        batch = batch[valid.view(-1).nonzero().squeeze(1)]
        if reference:
            with torch.no_grad(), accelerator.autocast():
                batch["ref_logprob"] = reference(batch["seen"], batch["action"])[1]
        sizes = split_sizes(ranks["samples"][:, 0].long(), args.num_minibatches)
        losses = torch.zeros(len(LOSSES), dtype=torch.float64, device=device)
        norms = []
        epochs = 0
        while epochs < args.update_epochs:
            epochs += 1
            for group in optimizer.param_groups:
                group["lr"] = progress.learning_rate
            epoch_losses = torch.zeros_like(losses)
            shuffled = batch[torch.randperm(len(batch), device=device)]
            for mb, on_ranks in zip(shuffled.split([size[rank] for size in sizes]), sizes):
                if sum(on_ranks) == 0:  # all ranks know it, and skip it together
                    continue
                if len(mb):
                    with accelerator.autocast():
                        loss, mb_losses = learner(**mb)
                    # CRUCIAL: the mean over the samples of all ranks, also when they hold different numbers of them.
                    accelerator.backward(loss / sum(on_ranks))
                    epoch_losses += mb_losses
                # CRUCIAL: without it each rank would learn alone, and no error would tell.
                sum_over_ranks(weights.grad)
                norms.append(clip_and_step(accelerator, optimizer, weights, args.max_grad_norm))
            losses += epoch_losses
            if samples and (args.target_kl or args.lr_schedule == "adaptive"):
                # CRUCIAL: the KL of all ranks, so that all of them stop, or change their learning rate, together.
                epoch_losses = accelerator.reduce(epoch_losses, "sum")
                kl = epoch_losses[LOSSES.index("losses/approx_kl")].item() / samples
                if args.lr_schedule == "adaptive" and kl > 2.0 * args.desired_kl:
                    progress.learning_rate = max(1e-5, progress.learning_rate / 1.5)
                elif args.lr_schedule == "adaptive" and kl < 0.5 * args.desired_kl:
                    progress.learning_rate = min(1e-2, progress.learning_rate * 1.5)
                if args.target_kl and kl > args.target_kl:
                    break
        progress.steps_trained += samples * epochs
        update_seconds = time.perf_counter() - update_start

        # ---- Observation statistics: merged after the update, else the first ratio is not 1
        if args.norm_obs:
            for name, moments in agent.obs_moments.items():
                moments.merge(sums[f"obs_{name}"].to(device))

        # ---- Metrics, means over ranks
        metrics = dict(zip(LOSSES, losses * world / max(samples * epochs, 1)))
        norms = torch.stack(norms) if norms else torch.zeros(1, device=device)
        skipped = ~norms.isfinite()
        skipped_in_a_row = torch.where(skipped.all(), skipped_in_a_row, 0) + skipped.flip(0).cumprod(0).sum()
        metrics["losses/grad_norm"] = norms.nan_to_num(0.0, 0.0).mean()
        metrics["losses/skipped_updates"] = skipped.sum()
        metrics |= {"time/rollout": rollout_seconds, "time/update": update_seconds, "time/wait": wait_seconds}
        for name in run.metric_names(env_metrics):
            metrics[f"env/{name}"] = env_metrics.get(name, 0.0) * world / steps
        check = 0.0
        if args.check_interval and progress.iteration % args.check_interval == 0:
            rate = torch.tensor([progress.learning_rate], device=device)
            check = checksum([*agent.state_dict().values(), rate])
        ranks = exchange(accelerator, metrics | {"checksum": check, "skipped": skipped_in_a_row})
        run.check_ranks(ranks.pop("checksum"), int(ranks.pop("skipped")[0]), progress.iteration)
        log = {name: x.mean().item() for name, x in ranks.items()}
        log["time/wait_min"] = ranks["time/wait"].min().item()
        log["time/wait_max"] = ranks["time/wait"].max().item()
        log["charts/minibatch_size"] = samples / args.num_minibatches
        log["charts/episodes"] = world * columns
        log["charts/group_return_mean"] = sums["group_return"].item() / (world * columns)
        groups = world * columns // args.group_size
        log["charts/group_return_std"] = sums["group_std"].item() / groups
        log["charts/groups_without_signal"] = sums["silent"].item() / groups
        log["charts/valid_fraction"] = samples / steps
        log["charts/idle_fraction"] = 1.0 - steps / sums["rows"].item()
        log |= progress.count_episodes(sums["episodes"].tolist())
        log |= run.speed(steps, time.perf_counter() - rollout_start)

        # ---- Evaluate and save when due
        improved = False
        evaluating = due(args.eval_interval, before_step, progress.global_step) and not stopping
        saving = due(args.save_interval, before_step, progress.global_step) or stopping
        if evaluating or finished:
            eval_start = time.perf_counter()
            video = run.folder / "videos" / f"step_{progress.global_step}.gif"
            log |= evaluate(agent, eval_env, accelerator, video)
            log["time/eval"] = time.perf_counter() - eval_start
            improved = progress.improve(log)
        if saving or finished or improved:
            trainer = {"optimizer": optimizer.optimizer.state_dict(), "reference": None}
            if reference:
                trainer["reference"] = reference.state_dict()
            run.save(progress, agent.state_dict(), trainer, {}, improved)
        run.log(log, progress)

    # ---- Finish
    run.finish(log, progress)
    env.close()
    if eval_env is not env:
        eval_env.close()
    accelerator.end_training()


if __name__ == "__main__":
    main(tyro.cli(Args))
