"""PPO that sees and remembers: pictures, words and an LSTM or GRU, in processes that all collect and learn (DD-PPO).

    python ppo_lstm_ddp.py                                      # one process: a word to be remembered, in seconds
    python ppo_lstm_ddp.py --memory none                        # the same without memory: no better than chance
    python ppo_lstm_ddp.py --env-id Tabletop                    # by sight
    torchrun --standalone --nproc_per_node 2 ppo_lstm_ddp.py    # two processes, one per GPU where there are GPUs
    torchrun --nnodes 2 --nproc_per_node 8 --rdzv_id 1 --rdzv_backend c10d --rdzv_endpoint HOST:29400 ppo_lstm_ddp.py
    python ppo_lstm_ddp.py --resume runs/NAME                   # resume a run, with the same options
    python ppo_lstm_ddp.py --evaluate --checkpoint runs/NAME    # score its best policy

Docs: docs/ppo_lstm_ddp.md
"""

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
from torch.nn.utils.rnn import PackedSequence
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

import envs

EVAL_SEED = 2**31 - 1  # of evaluation: always the same episodes, which training never sees
VERSIONS = {name: version(name) for name in ("torch", "accelerate", "tensordict", "gymnasium")}
MODEL_ARGS = ("env_id", "memory", "memory_size", "hidden_size", "channels", "norm_obs")  # what the weights depend on
MAX_SKIPPED = 8  # updates in a row with NaN gradients before the run gives up
M_TRIM_THRESHOLD = -1  # of glibc's malloc.h
M_MMAP_THRESHOLD = -3
WORD_SIZE = 16  # numbers that stand for an instruction
SMALLEST = 36  # pixels that the three convolutions need


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

    # Environment
    env_id: str = "TabletopMemory"  # PushCube, CartPole, Tabletop, TabletopMemory or a simulator's, such as gym/<id>
    env_options: tuple[str, ...] = ()  # options of the env, as name=value: docs/envs.md
    num_envs: int = 128  # parallel envs of each process

    # Algorithm
    total_timesteps: int = 200_000  # env steps over all processes
    num_steps: int = 32  # steps of each env in one rollout
    learning_rate: float = 1e-3  # initial learning rate of Adam
    lr_schedule: Literal["constant", "linear", "adaptive"] = "linear"  # linear: to zero; adaptive: by --desired-kl
    desired_kl: float = 0.01  # KL per epoch that the adaptive learning rate aims at
    gamma: float = 0.97  # discount
    gae_lambda: float = 0.95  # lambda of generalised advantage estimation
    bootstrap_at_done: Literal["truncated", "always"] = "truncated"  # episode ends that the critic values
    num_minibatches: int = 8  # minibatches per epoch, on every process
    update_epochs: int = 4  # passes over a rollout
    clip_coef: float = 0.2  # clipping of the probability ratio
    clip_vloss: bool = False  # clip the value loss too
    ent_coef: float = 0.0  # weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # gradients are scaled down to this norm
    target_kl: float = 0.0  # no further epoch once the KL exceeds this (0: off)
    norm_adv: bool = True  # normalise advantages over all processes
    norm_obs: bool = True  # normalise observations by running statistics
    norm_reward: bool = False  # divide rewards by the running deviation of returns
    memory: Literal["lstm", "gru", "none"] = "lstm"  # what carries over from step to step
    memory_size: int = 64  # units of the memory
    channels: int = 16  # of the first convolution; the two after it have twice as many
    hidden_size: int = 64  # width of the two hidden layers of each network
    init_logstd: float = -0.3  # initial log standard deviation of a Gaussian policy

    # Performance
    cpu: bool = False  # use the CPU although there is a GPU
    backend: Literal["auto", "nccl", "gloo", "mpi"] = "auto"  # process-group backend
    preempt_fraction: float = 1.0  # cut rollouts short once this fraction of ranks is done (1: off)
    preempt_min: float = 0.25  # but not below this fraction of --num-steps
    check_interval: int = 10  # iterations between checks that ranks have equal weights (0: off)
    timeout: float = 600.0  # seconds that a process waits for the others before it gives up
    mixed_precision: Literal["no", "bf16", "fp16"] = "no"  # autocast; fp16 needs a GPU
    compile: bool = False  # torch.compile networks, loss and embedded envs (some seconds to warm up)
    torch_threads: int = 0  # CPU threads of each process (0: one for small networks, all cores for large ones)


POSITIVE = """
    num_envs total_timesteps num_steps learning_rate desired_kl num_minibatches update_epochs
    clip_coef max_grad_norm memory_size channels hidden_size keep_checkpoints timeout
""".split()
NATURAL = """
    eval_interval eval_episodes save_interval check_interval ent_coef vf_coef target_kl torch_threads
""".split()
FRACTION = "gamma gae_lambda preempt_fraction preempt_min".split()


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


def check_sequences(args: Args) -> None:
    if args.num_envs % args.num_minibatches:
        sequences = f"the sequences of --num-envs {args.num_envs}"
        fail(f"{sequences} do not divide into --num-minibatches {args.num_minibatches}")


def check_pictures(env: envs.VecEnv, env_id: str) -> None:
    for name, space in env.single_observation_space.items():
        if name.startswith("rgb") and min(space.shape[:2]) < SMALLEST:
            height, width = space.shape[:2]
            fail(f"{name} of {env_id} has {height} x {width} pixels: give it {SMALLEST} x {SMALLEST} or more")


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


class Eye(nn.Module):
    """The three convolutions of DQN's Nature paper: uint8 [n, H, W, C] -> [n, outputs]."""

    def __init__(self, shape: tuple[int, int, int], channels: int, outputs: int):
        super().__init__()
        height, width, colours = shape
        self.layers = nn.Sequential(
            layer_init(nn.Conv2d(colours, channels, 8, 4)),
            nn.ReLU(),
            layer_init(nn.Conv2d(channels, 2 * channels, 4, 2)),
            nn.ReLU(),
            layer_init(nn.Conv2d(2 * channels, 2 * channels, 3)),
            nn.ReLU(),
            nn.Flatten(),
        )
        size = self.layers(torch.zeros(1, colours, height, width)).shape[1]
        self.layers.extend([layer_init(nn.Linear(size, outputs)), nn.ReLU()])

    def forward(self, rgb: torch.Tensor) -> torch.Tensor:
        # Pictures lie in memory as convolutions like it best (channels-last), so this turns them without a copy.
        x = rgb.permute(0, 3, 1, 2) / 255.0
        # Each by its own mean and deviation: a ball of two pixels counts for nothing beside a background that is not 0.
        var, mean = torch.var_mean(x, (2, 3), keepdim=True)
        return self.layers((x - mean) * (var + 1e-4).rsqrt())


class Agent(nn.Module):
    """Observations -> `see` -> `encode` -> memory -> what is known -> the policy (`forward`) and its `value`."""

    def __init__(self, env: envs.VecEnv, args: Args):
        super().__init__()
        space = env.single_observation_space
        self.obs_moments = nn.ModuleDict()
        sizes = {}
        for name in ("state", "privileged"):
            if name in space.keys():
                sizes[name] = math.prod(space[name].shape)
                self.obs_moments[name] = RunningMoments(sizes[name]) if args.norm_obs else nn.Identity()
        self.return_moments = RunningMoments(1)
        privileged = sizes.pop("privileged", 0)
        self.eyes = nn.ModuleDict()
        for name in sorted(space.keys()):
            if name.startswith("rgb"):
                sizes[name] = 8 * args.channels
                self.eyes[name] = Eye(space[name].shape, args.channels, sizes[name])
        self.words = None
        if "instruction" in space.keys():
            sizes["instruction"] = WORD_SIZE
            self.words = nn.Embedding(len(env.instructions), WORD_SIZE)
        self.names = list(sizes)
        inputs = sum(sizes.values())
        self.kind = args.memory
        self.core = None
        self.state_size = inputs
        self.memory_size = 0  # numbers of each env that are carried over
        if self.kind != "none":
            self.core = {"lstm": nn.LSTM, "gru": nn.GRU}[self.kind](inputs, args.memory_size)
            for name, p in self.core.named_parameters():
                nn.init.zeros_(p) if "bias" in name else nn.init.orthogonal_(p)
            self.state_size = args.memory_size
            self.memory_size = args.memory_size * (2 if self.kind == "lstm" else 1)
        action_space = env.single_action_space
        self.discrete = hasattr(action_space, "n")
        actions = int(action_space.n) if self.discrete else action_space.shape[0]
        self.critic = mlp(self.state_size + privileged, 1, args.hidden_size, std=1.0)
        self.actor = mlp(self.state_size, actions, args.hidden_size, std=0.01)
        if not self.discrete:
            self.actor_logstd = nn.Parameter(torch.full((actions,), args.init_logstd))

    def see(self, obs: TensorDict) -> dict[str, torch.Tensor]:
        """Observations as the networks take them. The statistics stand still during an iteration."""
        seen = {name: obs[name] for name in self.names}
        return seen | {name: moments(obs[name]) for name, moments in self.obs_moments.items()}

    def encode(self, seen: dict[str, torch.Tensor]) -> torch.Tensor:
        """What goes into the memory: [n, inputs]."""
        parts = []
        for name in self.names:
            x = seen[name]
            if name in self.eyes:
                x = self.eyes[name](x)
            elif name == "instruction":
                x = self.words(x)
            parts.append(x.float())
        return torch.cat(parts, -1)

    def know(self, x: torch.Tensor, seen: dict[str, torch.Tensor]) -> torch.Tensor:
        """What comes out of the memory, and what only the critic may see."""
        if "privileged" in self.obs_moments:
            x = torch.cat([x, seen["privileged"]], -1)
        return x

    def step(self, seen: dict[str, torch.Tensor], memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One step of n envs with their memory [n, memory_size] -> what is known, and the memory after it."""
        x = self.encode(seen)
        with torch.autocast(x.device.type, enabled=False):  # memory is float32, whatever the rest is
            if self.kind == "lstm":
                x, cell = torch.lstm_cell(x, memory.chunk(2, -1), *self.core.all_weights[0])
                memory = torch.cat([x, cell], -1)
            elif self.kind == "gru":
                x = torch.gru_cell(x, memory, *self.core.all_weights[0])
                memory = x
        return self.know(x, seen), memory

    def recall(self, seen: dict[str, torch.Tensor], memory: torch.Tensor, batch_sizes: torch.Tensor) -> torch.Tensor:
        """All steps of several sequences at once, in the order of `pack`, with the memory that each starts with."""
        x = self.encode(seen)
        if self.core is not None:
            with torch.autocast(x.device.type, enabled=False):
                start = tuple(memory[None].chunk(2, -1)) if self.kind == "lstm" else memory[None]
                x = self.core(PackedSequence(x, batch_sizes), start)[0].data
        return self.know(x, seen)

    def value(self, known: torch.Tensor) -> torch.Tensor:
        return self.critic(known).squeeze(-1).float()

    def forward(self, known: torch.Tensor, action=None, deterministic=False):
        """-> action, its log-probability, and the entropy of the policy."""
        out = self.actor(known[..., : self.state_size]).float()  # `privileged` is for the critic alone
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


def cut(dones: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A rollout's ends [T, N] -> env, first step and length of its sequences, the longest first.

    A sequence is what an env has of one episode in this rollout.
    """
    if dones.dim() != 2:
        raise ValueError(f"cut needs the ends as [T, N], not {list(dones.shape)}")
    steps = len(dones)
    # CRUCIAL: the step after an end starts a sequence of its own: no memory of the old episode may leak in.
    starts = torch.cat([torch.ones_like(dones[:1]), dones[:-1]])
    env, first = starts.T.nonzero(as_tuple=True)
    place = env * steps + first  # one env after the other, so the next one begins where this one ends
    length = torch.cat([place, place.new_tensor([dones.numel()])]).diff()
    order = length.argsort(descending=True, stable=True)
    return env[order], first[order], length[order]


def pack(sequences: tuple[torch.Tensor, torch.Tensor, torch.Tensor], chosen: torch.Tensor, num_envs: int):
    """The sequences of the chosen envs as one PackedSequence: all first steps, all second steps, and so on.

    -> their places in the flat rollout [T * N], how many sequences each step has, and of each sequence
    its env and whether it goes on from the rollout before.
    """
    kept = torch.isin(sequences[0], chosen)
    env, first, length = (x[kept] for x in sequences)
    clock = torch.arange(int(length[0]))[:, None]
    running = clock < length
    places = ((first + clock) * num_envs + env)[running]
    return places, running.sum(1), env, first == 0


def compute_gae(rewards, values, next_value, terminated, truncated, final_values, gamma, gae_lambda) -> torch.Tensor:
    """Advantages of a rollout, all [T, N]; `next_value` [N] is that after the last step.

    `final_values` is what an episode's end is worth: the value of its final observation at a time
    limit, 0 at success or failure.
    """
    shapes = {x.shape for x in (rewards, values, terminated, truncated, final_values)}
    if rewards.dim() != 2 or len(shapes) > 1:
        raise ValueError(f"compute_gae needs [T, N] tensors of one shape, not {shapes}")
    done = terminated | truncated
    next_values = torch.cat([values[1:], next_value[None]])
    # CRUCIAL: the row after an end is of the next episode: neither its value nor its advantage may leak in.
    delta = rewards + gamma * torch.where(done, final_values, next_values) - values
    decay = gamma * gae_lambda * ~done
    advantages = torch.empty_like(rewards)
    advantage = torch.zeros_like(next_value)
    for t in reversed(range(rewards.shape[0])):
        advantage = torch.addcmul(delta[t], decay[t], advantage)
        advantages[t] = advantage
    return advantages


def bootstrap_memory(agent: nn.Module, values, ends, final_obs: list[TensorDict | None], memories) -> torch.Tensor:
    """The value of the final observation at the `ends` of [T, N], 0 elsewhere.

    It is seen with the memory of that moment, `memories` [T, N, size]. A simulator that does not give
    final observations falls back to the value of the one before.
    """
    final_values = values * ends
    if final_obs[0] is not None:
        on_host = ends.cpu()  # the one host sync of a rollout
        when, who = on_host.nonzero(as_tuple=True)
        if len(when):
            rows = enumerate(who.split(on_host.sum(1).tolist()))  # only these, as pictures are large
            obs = torch.cat([final_obs[t][n.to(ends.device, non_blocking=True)] for t, n in rows if len(n)])
            when, who = (x.to(ends.device, non_blocking=True) for x in (when, who))
            # CRUCIAL: the memory before it is reset, which belongs to the episode that ended.
            known, _ = agent.step(agent.see(obs), memories[when, who])
            final_values[when, who] = agent.value(known)
    return final_values


def discount_rewards(rewards, dones, running_return, gamma: float) -> tuple[torch.Tensor, torch.Tensor]:
    """-> the discounted return so far at every step of [T, N], and the one to go on with."""
    returns = torch.empty_like(rewards)
    for t in range(len(rewards)):
        returns[t] = running_return * gamma + rewards[t]
        running_return = returns[t] * ~dones[t]
    return returns, running_return


def ppo_loss(
    newlogprob, entropy, newvalue, logprob, advantage, returns, value,
    clip_coef, ent_coef, vf_coef, clip_vloss,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The loss summed over the samples, and the sums of what is logged (LOSSES)."""
    logratio = newlogprob - logprob
    ratio = logratio.exp()
    clipped_ratio = ratio.clamp(1 - clip_coef, 1 + clip_coef)
    pg_loss = torch.max(-advantage * ratio, -advantage * clipped_ratio)
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
LOSSES = [f"losses/{name}" for name in LOSSES]


class Learner(nn.Module):
    """From a minibatch to its loss, in one call. torch.compile leaves the memory out: a graph before, one after it."""

    def __init__(self, agent: Agent, args: Args):
        super().__init__()
        self.agent = agent
        self.coefs = (args.clip_coef, args.ent_coef, args.vf_coef, args.clip_vloss)

    def forward(self, seen, action, logprob, value, advantage, returns, memory, batch_sizes):
        known = self.agent.recall(seen, memory, batch_sizes)
        _, newlogprob, entropy = self.agent(known, action)
        newvalue = self.agent.value(known)
        return ppo_loss(newlogprob, entropy, newvalue, logprob, advantage, returns, value, *self.coefs)


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
def evaluate_memory(agent: nn.Module, env: envs.VecEnv, accelerator: Accelerator, video: Path) -> dict:
    """One deterministic episode in each env of every rank: short ones are not favoured."""
    agent.eval()
    # Where it is the env that trains, an episode that training never starts.
    obs = env.reset(0 if env.separate_evaluation else EVAL_SEED)
    active = torch.ones(env.num_envs, dtype=torch.bool, device=env.device)
    memory = torch.zeros(env.num_envs, agent.memory_size, device=env.device)
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
            known, memory = agent.step(agent.see(obs), memory)
            action = agent(known, deterministic=True)[0]
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


def sum_and_square(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x.double().sum(), x.double().square().sum()])


def mean_and_var(sums: torch.Tensor, count: int) -> tuple[float, float]:
    mean, square = (sums / count).tolist()
    return mean, max(square - mean**2, 0.0)


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
    check_sequences(args)
    accelerator = launch(args)
    rank = accelerator.process_index
    world = accelerator.num_processes
    device = accelerator.device
    if args.compile:
        check_compiler(device)
    tune_cpu(args.torch_threads, args.hidden_size**2 * args.num_envs * args.num_steps // args.num_minibatches)
    options = {"compile": True} if args.compile and args.env_id in envs.EMBEDDED else {}
    env, eval_env = make_envs(args, accelerator, **options)
    check_pictures(env, args.env_id)
    torch.manual_seed(args.seed)  # the same weights on every rank
    agent = Agent(env, args).to(device)
    if args.evaluate:
        checkpoint = load_best(args.checkpoint, args, accelerator)
        load_model(agent, checkpoint, args)
        scores = evaluate_memory(agent, eval_env, accelerator, checkpoint.folder / "evaluation.gif")
        accelerator.print(f"{checkpoint.folder}: {show(scores)}")
        return accelerator.end_training()

    run = Run(args, accelerator)
    checkpoint = run.open()
    if checkpoint:
        load_model(agent, checkpoint, args)
    learner = Learner(agent, args)

    def act(obs: TensorDict, memory: torch.Tensor):
        known, memory = agent.step(agent.see(obs), memory)
        return known, memory, *agent(known)[:2]

    if args.compile:
        learner.compile()
        act = torch.compile(act)
    weights = flatten(list(agent.parameters()))
    sum_over_ranks = RankSum(weights.grad, accelerator, args.timeout)
    optimizer = torch.optim.Adam([weights], lr=args.learning_rate, eps=1e-5, fused=True)
    optimizer = accelerator.prepare(optimizer)
    next_obs = env.reset()
    seed = args.seed + 1_000_003 * (rank + 1)  # other actions and minibatches on every rank
    torch.manual_seed(seed)

    # ---- Resume
    progress = Progress(learning_rate=args.learning_rate)
    running_return = torch.zeros(args.num_envs, device=device)
    memory = torch.zeros(args.num_envs, agent.memory_size, device=device)
    if checkpoint:
        local = checkpoint.local
        if run.resume(checkpoint, progress, optimizer):
            env.load_state_dict(local["env"])
            next_obs = TensorDict(local["next_obs"], [args.num_envs]).to(device)
            running_return = local["running_return"].to(device)
            memory = local["memory"].to(device)
        else:
            next_obs = env.reset(episode=progress.iteration)
            torch.manual_seed(seed + progress.iteration)
        checkpoint = local = None  # let go of the mapped files
    run.claim(progress)
    accelerator.print(f"{args.env_id}: {world} x {args.num_envs} envs on {device.type}, writing to {run.folder}")

    preempt = args.preempt_fraction < 1.0 and world > 1
    store = torch.distributed.distributed_c10d._get_default_store() if preempt else None
    skipped_in_a_row = torch.zeros((), device=device)
    stopping = False
    log = {}
    while progress.global_step < args.total_timesteps and not stopping:
        progress.iteration += 1
        if args.lr_schedule == "constant":
            progress.learning_rate = args.learning_rate
        elif args.lr_schedule == "linear":
            progress.learning_rate = args.learning_rate * (1.0 - progress.global_step / args.total_timesteps)

        # ---- Rollout, with the statistics of the observations frozen
        rollout_start = time.perf_counter()
        agent.eval()
        first_memory = memory
        rows = []
        final_obs = []
        episodes = []
        env_metrics = {}
        with torch.no_grad(), accelerator.autocast():
            for step in range(1, args.num_steps + 1):
                known, memory, action, logprob = act(next_obs, memory)
                row = [next_obs, known, memory, action, logprob]
                next_obs, reward, terminated, truncated, info = env.step(action)
                # CRUCIAL: an episode starts without a memory of the one before.
                memory = memory.masked_fill((terminated | truncated)[:, None], 0.0)
                rows.append([*row, reward, terminated, truncated])
                final_obs.append(info["final_obs"])
                episodes.append(info["episode"])
                for name, x in info["metrics"].items():
                    env_metrics[name] = env_metrics.get(name, 0.0) + x.mean()
                # Where most ranks are done, end with what there is rather than keep them waiting. Reading a counter in
                # the store is no collective: nobody waits for it.
                if preempt and args.preempt_min * args.num_steps <= step < args.num_steps:
                    if store.add(f"rollout_{progress.iteration}", 0) >= args.preempt_fraction * world:
                        break
            if preempt and step == args.num_steps:
                store.add(f"rollout_{progress.iteration}", 1)
            columns = [torch.stack(column) for column in zip(*rows)]
            obs, knowns, memories, actions, logprobs, rewards, terminations, truncations = columns

            # ---- Advantages
            seen = agent.see(obs)
            values = agent.value(knowns)
            dones = terminations | truncations
            bootstrapped = truncations if args.bootstrap_at_done == "truncated" else dones
            final_values = bootstrap_memory(agent, values, bootstrapped, final_obs, memories)
            next_value = agent.value(agent.step(agent.see(next_obs), memory)[0])
            inputs = [rewards, final_values, next_value, *obs.values()]
            finite = torch.stack([x.isfinite().all() for x in inputs]).all()
            if args.norm_reward:
                discounted, running_return = discount_rewards(rewards, dones, running_return, args.gamma)
                sums = exchange(accelerator, {"return": agent.return_moments.sums(discounted)})
                agent.return_moments.merge(sums["return"].sum(0).to(device))
                scale = (agent.return_moments.var + 1e-8).rsqrt().float()
                rewards = (rewards * scale).clamp(-10.0, 10.0)
            advantages = compute_gae(
                rewards, values, next_value, terminations, truncations, final_values,
                args.gamma, args.gae_lambda,
            )  # fmt: skip
            returns = advantages + values

        # ---- Exchange what all ranks must know of each other
        mine = {"samples": dones.numel(), "envs": args.num_envs, "broken": ~finite, "stop": bool(run.signals)}
        mine["advantages"] = sum_and_square(advantages)
        mine["returns"] = sum_and_square(returns)
        mine["episodes"] = episode_sums(dones, {k: torch.stack([e[k] for e in episodes]) for k in episodes[0]})
        if args.norm_obs:
            for name, moments in agent.obs_moments.items():
                mine[f"obs_{name}"] = moments.sums(obs[name])
        rollout_seconds = time.perf_counter() - rollout_start
        ranks = exchange(accelerator, mine)
        wait_seconds = time.perf_counter() - rollout_start - rollout_seconds
        run.check_finite(ranks["broken"], progress.iteration)
        sums = {name: x.sum(0) for name, x in ranks.items()}
        samples = int(sums["samples"])
        before_step = progress.global_step
        progress.global_step += samples
        finished = progress.global_step >= args.total_timesteps
        stopping = bool(sums["stop"]) and not finished
        mean, var = mean_and_var(sums["advantages"], samples)
        return_var = mean_and_var(sums["returns"], samples)[1]

        # ---- Update: the same number of minibatches on every rank, whatever it holds; one collective in each
        update_start = time.perf_counter()
        agent.train()
        if args.norm_adv:
            advantages = (advantages - mean) / (math.sqrt(var) + 1e-8)
        batch = {"seen": seen, "action": actions, "logprob": logprobs, "value": values}
        batch |= {"advantage": advantages, "returns": returns}
        batch = TensorDict(batch, dones.shape).reshape(-1)
        # Minibatches are of envs, with all of their steps; ranks that were cut short have fewer of these.
        steps_of = (ranks["samples"] / ranks["envs"])[:, 0].long().tolist()
        sizes = split_sizes(ranks["envs"][:, 0].long(), args.num_minibatches)
        sequences = cut(dones.cpu())
        losses = torch.zeros(len(LOSSES), dtype=torch.float64, device=device)
        norms = []
        epochs = 0
        while epochs < args.update_epochs:
            epochs += 1
            for group in optimizer.param_groups:
                group["lr"] = progress.learning_rate
            epoch_losses = torch.zeros_like(losses)
            shuffled = torch.randperm(args.num_envs)
            for chosen, on_ranks in zip(shuffled.split([size[rank] for size in sizes]), sizes):
                if len(chosen):  # a rank with fewer envs may have nothing in it
                    places, batch_sizes, who, goes_on = pack(sequences, chosen, args.num_envs)
                    places, who, goes_on = (x.to(device, non_blocking=True) for x in (places, who, goes_on))
                    start = first_memory[who] * goes_on[:, None]
                    with accelerator.autocast():
                        loss, mb_losses = learner(**batch[places], memory=start, batch_sizes=batch_sizes)
                    # CRUCIAL: the mean over the samples of all ranks, also when they hold different numbers of them.
                    accelerator.backward(loss / sum(n * steps for n, steps in zip(on_ranks, steps_of)))
                    epoch_losses += mb_losses
                # CRUCIAL: without it each rank would learn alone, and no error would tell.
                sum_over_ranks(weights.grad)
                norms.append(clip_and_step(accelerator, optimizer, weights, args.max_grad_norm))
            losses += epoch_losses
            if args.target_kl or args.lr_schedule == "adaptive":
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
        metrics = dict(zip(LOSSES, losses * world / (samples * epochs)))
        norms = torch.stack(norms)
        skipped = ~norms.isfinite()
        skipped_in_a_row = torch.where(skipped.all(), skipped_in_a_row, 0) + skipped.flip(0).cumprod(0).sum()
        metrics["losses/grad_norm"] = norms.nan_to_num(0.0, 0.0).mean()
        metrics["losses/skipped_updates"] = skipped.sum()
        metrics |= {"time/rollout": rollout_seconds, "time/update": update_seconds, "time/wait": wait_seconds}
        for name in run.metric_names(env_metrics):
            metrics[f"env/{name}"] = env_metrics.get(name, 0.0) / step
        check = 0.0
        if args.check_interval and progress.iteration % args.check_interval == 0:
            rate = torch.tensor([progress.learning_rate], device=device)
            check = checksum([*agent.state_dict().values(), rate])
        ranks = exchange(accelerator, metrics | {"checksum": check, "skipped": skipped_in_a_row})
        run.check_ranks(ranks.pop("checksum"), int(ranks.pop("skipped")[0]), progress.iteration)
        log = {name: x.mean().item() for name, x in ranks.items()}
        log["time/wait_min"] = ranks["time/wait"].min().item()
        log["time/wait_max"] = ranks["time/wait"].max().item()
        log["losses/explained_variance"] = 1.0 - var / max(return_var, 1e-12)
        log["charts/minibatch_size"] = samples / args.num_minibatches
        log["charts/preempted_fraction"] = 1.0 - samples / (world * args.num_steps * args.num_envs)
        log |= progress.count_episodes(sums["episodes"].tolist())
        log |= run.speed(samples, time.perf_counter() - rollout_start)

        # ---- Evaluate and save when due
        improved = False
        evaluating = due(args.eval_interval, before_step, progress.global_step) and not stopping
        saving = due(args.save_interval, before_step, progress.global_step) or stopping
        if evaluating or finished:
            eval_start = time.perf_counter()
            video = run.folder / "videos" / f"step_{progress.global_step}.gif"
            log |= evaluate_memory(agent, eval_env, accelerator, video)
            log["time/eval"] = time.perf_counter() - eval_start
            improved = progress.improve(log)
            if eval_env is env:  # the simulator allows no second one: training starts new episodes
                next_obs = env.reset(episode=progress.iteration)
                running_return.zero_()
                memory = torch.zeros_like(memory)
        if saving or finished or improved:
            trainer = {"optimizer": optimizer.optimizer.state_dict()}
            local = {"env": env.state_dict(), "next_obs": dict(next_obs.items()), "running_return": running_return}
            local["memory"] = memory
            run.save(progress, agent.state_dict(), trainer, local, improved)
        run.log(log, progress)

    # ---- Finish
    run.finish(log, progress)
    env.close()
    if eval_env is not env:
        eval_env.close()
    accelerator.end_training()


if __name__ == "__main__":
    main(tyro.cli(Args))
