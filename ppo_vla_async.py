"""PPO for vision-language-action models: a thread collects with a copy of the policy while the main thread learns.

    python ppo_vla_async.py                                          # a tiny model: cloned, then improved, in minutes
    python ppo_vla_async.py --max-staleness 0                        # the same, synchronous
    python ppo_vla_async.py --model-path HuggingFaceTB/SmolVLM-256M-Instruct --lora-rank 16 --mixed-precision bf16
    torchrun --standalone --nproc_per_node 2 ppo_vla_async.py        # two processes, one per GPU where there are GPUs
    torchrun --nnodes 2 --nproc_per_node 8 --rdzv_id 1 --rdzv_backend c10d --rdzv_endpoint HOST:29400 ppo_vla_async.py
    python ppo_vla_async.py --resume runs/NAME                       # resume a run, with the same options
    python ppo_vla_async.py --evaluate --checkpoint runs/NAME        # score its best policy

Docs: docs/ppo_vla_async.md
"""

import copy
import ctypes
import gc
import hashlib
import json
import math
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import uuid
import warnings
from collections import deque
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import numpy as np
import psutil
import torch
import torch.nn as nn
import tyro
from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs
from accelerate.utils import broadcast_object_list, gather_object
from gymnasium.spaces import Box
from peft import LoraConfig, get_peft_model
from PIL import Image, ImageDraw, ImageOps
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tensordict import TensorDict
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import tree_leaves
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    PI0Config,
    PI0ForConditionalGeneration,
    Qwen2_5_VLProcessor,
)
from transformers import logging as transformers_logging
from transformers.models.gemma.modeling_gemma import GemmaDecoderLayer
from transformers.utils import cached_file

import envs

EVAL_SEED = 2**31 - 1  # of evaluation: always the same episodes, which training never sees
DEMO_SEED = 2**31 - 2  # of demonstrations: a fixed set, whatever the seed of the run
PACKAGES = ("torch", "accelerate", "tensordict", "gymnasium", "transformers", "peft")
VERSIONS = {name: version(name) for name in PACKAGES}
MAX_SKIPPED = 8  # updates in a row with NaN gradients before the run gives up
M_TRIM_THRESHOLD = -1  # of glibc's malloc.h
M_MMAP_THRESHOLD = -3
MAX_LISTED = 10  # instructions whose success is logged one by one
HALF = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}  # what autocast casts to


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
    save_interval: int = 50_000  # env steps over all processes between checkpoints (0: only at the end)
    keep_checkpoints: int = 3  # newest checkpoints to keep, in addition to the best one
    capture_video: bool = False  # a GIF of four episodes of every evaluation
    resume: str = ""  # run or checkpoint folder to resume, or "auto": the newest of --run-name, if any
    evaluate: bool = False  # only score the policy at --checkpoint
    checkpoint: str = ""  # run folder (its best checkpoint) or checkpoint folder, for --evaluate

    # Environment
    env_id: str = "Tabletop"  # PushCube, CartPole, Tabletop, TabletopMemory or a simulator's, such as gym/<id>
    env_options: tuple[str, ...] = ()  # options of the env, as name=value: docs/envs.md
    num_envs: int = 64  # parallel envs of each process
    group_size: int = 8  # envs that start alike: their episodes are compared with one another
    reward: Literal["env", "success"] = "env"  # success: 1 at the end of a success, else 0
    reward_scale: float = 1.0  # rewards are learned from times this: best where their discounted sum is about 1

    # Model
    model_path: str = "tiny"  # hub id or folder of a model that speaks actions, or PI0; tiny, tiny-pi0: small ones
    cameras: tuple[str, ...] = ()  # pictures that the policy takes, such as rgb rgb_wrist (default: all it can)
    statistics: str = ""  # file with the statistics of state and action (default: in the model's folder)
    unnorm_key: str = ""  # data set in that file, if it has several
    action_chunk: int | None = None  # actions predicted per forward (default: as the model does, 1 for a new one)
    execute: int | None = None  # the first of them, executed without another look (default: all)
    action_bins: int | None = None  # token policies: values of each action dimension (default: 256)
    denoise_steps: int | None = None  # flow policies: steps from noise to action (default: as the model says)
    noise_std: float = 0.35  # flow policies: deviation of the noise in each of them, in normalised actions
    learn_noise: bool = False  # flow policies: train that deviation
    lora_rank: int | None = None  # train adapters of this rank (peft) only; default: all weights
    freeze_vision: bool = False  # do not train the vision encoder
    train_expert_only: bool = False  # flow policies: train the action expert, not the vision-language model
    gradient_checkpointing: bool = False  # less memory, a third more time

    # Cloning
    bc_updates: int = 200  # updates of behaviour cloning before PPO (0: the model is tuned already)
    bc_episodes: int = 512  # demonstrations to clone
    bc_batch: int = 64  # demonstrated steps in an update of each process
    bc_draws: int = 4  # flow policies: draws of noise and time for each of them
    bc_learning_rate: float = 1e-3  # learning rate of cloning

    # Algorithm
    total_timesteps: int = 80_000  # env steps over all processes
    advantage: Literal["gae", "group"] = "gae"  # group: whole episodes against those of --group-size, no critic
    num_chunks: int = 4  # action chunks of each env in one rollout (group: one episode instead)
    max_staleness: int = 1  # updates that a rollout's policy may lag behind (0: synchronous)
    behaviour_weight_cap: float = 5.0  # cap on the importance weight of stale data
    learning_rate: float = 2e-4  # initial learning rate of Adam
    value_learning_rate: float = 1e-3  # initial learning rate of the value head
    anneal_lr: bool = True  # lower both learning rates to a tenth at --total-timesteps
    gamma: float = 0.7  # discount
    gae_lambda: float = 0.9  # lambda of generalised advantage estimation
    num_minibatches: int = 2  # minibatches per epoch, on every process
    gradient_accumulation: int = 1  # parts of a minibatch that go through the model one by one
    update_epochs: int = 2  # passes over a rollout
    value_warmup: int = 1  # first iterations, which train the value head alone
    clip_coef: float = 0.2  # clipping of the probability ratio
    clip_coef_high: float = 0.28  # clipping of the probability ratio from above
    ent_coef: float = 0.0  # weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 1.0  # gradients are scaled down to this norm
    target_kl: float = 0.0  # no further epoch once the KL exceeds this (0: off)
    norm_adv: bool = True  # normalise advantages over all processes
    scale: bool = False  # divide by the group's deviation, as GRPO does; without, it is Dr. GRPO

    # Performance
    cpu: bool = False  # use the CPU although there is a GPU
    backend: Literal["auto", "nccl", "gloo", "mpi"] = "auto"  # process-group backend
    check_interval: int = 10  # iterations between checks that ranks have equal weights (0: off)
    timeout: float = 600.0  # seconds that a process waits for the others before it gives up
    mixed_precision: Literal["no", "bf16", "fp16"] = "no"  # autocast; fp16 needs a GPU
    torch_threads: int = 0  # CPU threads of each process (0: one for small networks, all cores for large ones)


POSITIVE = """
    num_envs total_timesteps num_chunks learning_rate value_learning_rate num_minibatches update_epochs
    gradient_accumulation behaviour_weight_cap clip_coef clip_coef_high max_grad_norm noise_std
    bc_episodes bc_batch bc_draws bc_learning_rate keep_checkpoints timeout reward_scale
""".split()
NATURAL = """
    eval_interval eval_episodes save_interval check_interval ent_coef vf_coef target_kl bc_updates
    max_staleness value_warmup torch_threads
""".split()
FRACTION = "gamma gae_lambda".split()


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


def check_env(args: Args, env: envs.VecEnv) -> None:
    """Stop where a policy that predicts actions as tokens from pictures cannot work."""
    for name in ("action_chunk", "execute", "action_bins", "denoise_steps", "lora_rank"):
        value = getattr(args, name)
        if value is not None and value < 1:
            fail(f"{option(name)} must be 1 or more, not {value}: leave it out for the default")
    samples = args.num_envs * args.num_chunks
    grouped = args.advantage == "group"
    if grouped and (args.group_size < 2 or args.num_envs % args.group_size):
        sizes = f"--num-envs {args.num_envs} and --group-size {args.group_size}"
        fail(f"{sizes}: the envs of a process must divide into groups of two or more")
    if not grouped and samples % (args.num_minibatches * args.gradient_accumulation):
        parts = f"--num-minibatches {args.num_minibatches} x --gradient-accumulation {args.gradient_accumulation}"
        fail(f"--num-envs x --num-chunks = {samples} samples do not divide into {parts}")
    if not {"rgb", "instruction"} <= set(env.single_observation_space.keys()):
        keys = ", ".join(env.single_observation_space.keys())
        what = (
            "give an env with rgb and instruction, such as Tabletop, or one of its cameras, as --env-options camera=..."
        )
        fail(f"{args.env_id} shows {keys}: {what}")
    space = env.single_action_space
    if not isinstance(space, Box) or len(space.shape) != 1:
        fail(f"{args.env_id} has the actions {space}: give an env with Box actions in one dimension")
    if not np.isfinite([space.low, space.high]).all():
        fail(f"{args.env_id} has actions without bounds: give an env whose Box actions have bounds")
    if args.bc_updates and not hasattr(env, "expert_action"):
        fail(f"{args.env_id} has no expert to clone: set --bc-updates 0 and start from a tuned model")


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


def exchange(accelerator: Accelerator, values: dict) -> dict[str, torch.Tensor]:
    """Numbers by name -> those of all ranks, [W, size] each: one collective, one host sync."""
    as_tensor = partial(torch.as_tensor, dtype=torch.float64, device=accelerator.device)
    parts = [as_tensor(x).reshape(-1) for x in values.values()]
    table = accelerator.gather(torch.cat(parts)[None]).cpu()
    return dict(zip(values, table.split([len(x) for x in parts], dim=1)))


def layer_init(layer: nn.Linear, std: float = math.sqrt(2)) -> nn.Linear:
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


def make_tiny(folder: Path, seed: int, kind: str = "tiny", chunk: int = 1) -> None:
    """Write a small vision-language model with random weights, as `from_pretrained` reads it."""
    models = Path(__file__).parent / "models"
    config = AutoConfig.from_pretrained(models / kind)
    if kind == "tiny-pi0":
        config.chunk_size = chunk
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config)
    # What a pretrained model would know: places in a picture differ, and numbers have an order.
    with torch.no_grad():
        if kind == "tiny-pi0":
            model.model.vlm.vision_tower.embeddings.position_embedding.weight.mul_(5.0)
        else:
            width = config.text_config.hidden_size
            place = torch.linspace(-1.0, 1.0, 256)[:, None]
            waves = torch.cos(place * torch.randn(width) * 4.0 + torch.rand(width) * 2 * math.pi)
            first_special = config.text_config.bos_token_id
            numbers = slice(first_special - 256, first_special)
            model.model.vision_model.embeddings.position_embedding.weight.mul_(5.0)
            model.get_input_embeddings().weight[numbers] = 0.05 * waves
            model.get_output_embeddings().weight[numbers] = 0.1 * waves
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".") as hidden:
        part = Path(hidden) / "model"
        shutil.copytree(models / "tiny", part)  # its tokenizer serves both
        model.save_pretrained(part)
        part.rename(folder)


def find_file(path: str, name: str) -> Path | None:
    """A file of a model's folder, or of its repository on the hub, if there is one."""
    quiet = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    found = cached_file(path, name, **quiet)
    return Path(found) if found else None


def read_json(path: str, name: str) -> dict:
    file = find_file(path, name)
    return json.loads(file.read_text()) if file else {}


GEMMA_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256, "num_hidden_layers": 18}
GEMMA_SIZES = {  # what lerobot's names mean
    "gemma_2b": GEMMA_HEADS | {"hidden_size": 2048, "intermediate_size": 16384},
    "gemma_300m": GEMMA_HEADS | {"hidden_size": 1024, "intermediate_size": 4096},
}


def read_config(path: str):
    """The model's configuration; lerobot's of PI0 names sizes of its own and no class."""
    own = read_json(path, "config.json")
    if "model_type" in own or "type" not in own:
        return AutoConfig.from_pretrained(path)
    if own["type"] != "pi0":
        raise ValueError(f"it is lerobot's {own['type']}: of lerobot's policies only pi0 is supported")
    sizes = {}
    for part, name, usual in (("vlm", "paligemma_variant", "gemma_2b"), ("dit", "action_expert_variant", "gemma_300m")):
        variant = own.get(name, usual)
        if variant not in GEMMA_SIZES:
            raise ValueError(f"it has the {name} {variant!r}, which is not one of {', '.join(GEMMA_SIZES)}")
        sizes[part] = GEMMA_SIZES[variant]
    config = PI0Config(dit_config={"model_type": "gemma"} | sizes["dit"])
    for name, value in sizes["vlm"].items():
        setattr(config.vlm_config.text_config, name, value)
    config.vlm_config.projection_dim = sizes["vlm"]["hidden_size"]
    config.vlm_config.vision_config.projection_dim = sizes["vlm"]["hidden_size"]
    config.vlm_config.vision_config.image_size = own.get("image_resolution", [224])[0]
    config.num_inference_steps = own.get("num_inference_steps", own.get("num_steps", config.num_inference_steps))
    for name in ("chunk_size", "max_state_dim", "max_action_dim", "min_period", "max_period"):
        setattr(config, name, own.get(name, getattr(config, name)))
    return config


class PlainProcessor(Qwen2_5_VLProcessor):
    """Qwen's processor without the one of videos, which needs torchvision."""

    @classmethod
    def get_attributes(cls) -> list[str]:
        return ["image_processor", "tokenizer"]

    def save_pretrained(self, folder: Path) -> None:
        """Apart, so that those who have torchvision can load it as a whole."""
        self.tokenizer.save_pretrained(folder)
        self.image_processor.save_pretrained(folder)


def resize_weights(old: int, new: int, resample: int) -> torch.Tensor:
    """The [new, old] matrix by which PIL resizes one side of a picture, rounded as PIL does."""
    identity = Image.fromarray(np.eye(old, dtype=np.float32))
    weights = np.array(identity.resize((old, new), resample), dtype=np.float64)
    return torch.from_numpy(np.round(weights * 2**22) / 2**22)


def resize(x: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """[..., H, W] -> [..., h, w] as PIL does it: one side after the other, each rounded to whole grey levels."""
    x = (x @ columns + 0.5).floor().clamp(0, 255)
    return (rows @ x + 0.5).floor().clamp(0, 255)


class Pictures(nn.Module):
    """What the image processor does, but in torch: on the device of the pictures, without a host sync.

    If that does not give the same for a picture of noise, the image processor itself is called.
    """

    def __init__(self, image_processor, height: int, width: int):
        super().__init__()
        self.image_processor = image_processor
        generator = torch.Generator().manual_seed(0)
        noise = torch.randint(256, (1, height, width, 3), dtype=torch.uint8, generator=generator)
        self.in_torch = False
        processed = self._call(noise)
        pixels = processed.pop("pixel_values")
        self.shape = pixels.shape
        self.constants = list(processed)  # masks and the grid of patches, the same for all pictures
        for name, x in processed.items():
            self.register_buffer(name, x, persistent=False)
        try:
            self._read_settings(height, width)
            error = (self._compute(noise)[0] - pixels).abs().max()
            grey_level = self.scale / self.std.min()
            self.in_torch = bool(error < 1.01 * grey_level)
        except (AttributeError, KeyError, TypeError, ValueError, RuntimeError):
            pass  # an image processor of another kind

    def _call(self, rgb: torch.Tensor) -> dict[str, torch.Tensor]:
        images = [[Image.fromarray(x)] for x in rgb.cpu().numpy()]
        return dict(self.image_processor(images, return_tensors="pt"))

    def _read_settings(self, height: int, width: int) -> None:
        settings = self.image_processor
        new_height, new_width = self.shape[-2:]
        self.in_patches = "image_grid_thw" in self.constants  # of Qwen
        if self.in_patches:
            _, rows, columns = self.image_grid_thw[0].tolist()
            new_height = rows * settings.patch_size
            new_width = columns * settings.patch_size
        self.resized = (new_height, new_width) != (height, width)
        self.scale = settings.rescale_factor if settings.do_rescale else 1.0
        mean = settings.image_mean if settings.do_normalize else [0.0]
        std = settings.image_std if settings.do_normalize else [1.0]
        rows = resize_weights(height, new_height, settings.resample)
        columns = resize_weights(width, new_width, settings.resample).T
        self.register_buffer("rows", rows, persistent=False)
        self.register_buffer("columns", columns, persistent=False)
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1), persistent=False)

    def _compute(self, rgb: torch.Tensor) -> torch.Tensor:
        # CRUCIAL: float64, which autocast leaves alone; bf16 would round the pictures without notice.
        x = rgb.permute(0, 3, 1, 2).double()
        if self.resized:
            x = resize(x, self.rows, self.columns)
        x = ((x * self.scale).float() - self.mean) / self.std
        if self.in_patches:
            # To N, row, column, row and column in the block that is merged, 3, frames, size, size.
            sides = (-1, self.image_processor.merge_size, self.image_processor.patch_size)
            x = x.unflatten(3, sides).unflatten(2, sides)
            x = x.permute(0, 2, 5, 3, 6, 1, 4, 7).unsqueeze(6)
            x = x.expand(*[-1] * 6, self.image_processor.temporal_patch_size, -1, -1)
        return x.reshape(len(rgb), *self.shape)

    def forward(self, rgb: torch.Tensor) -> torch.Tensor:
        """uint8 [N, H, W, 3] -> [N, ...], the `pixel_values` of each picture."""
        if self.in_torch:
            return self._compute(rgb)
        return self._call(rgb)["pixel_values"].view(len(rgb), *self.shape).to(rgb.device)


class PaddedPictures(nn.Module):
    """Pictures for PI0: as large as fits into a square, black around it, from -1 to 1."""

    def __init__(self, height: int, width: int, size: int):
        super().__init__()
        scale = size / max(height, width)
        new_height = round(height * scale)
        new_width = round(width * scale)
        self.register_buffer("rows", resize_weights(height, new_height, Image.Resampling.BILINEAR), persistent=False)
        columns = resize_weights(width, new_width, Image.Resampling.BILINEAR).T
        self.register_buffer("columns", columns, persistent=False)
        top = (size - new_height) // 2
        left = (size - new_width) // 2
        self.margins = (left, size - new_width - left, top, size - new_height - top)

    def forward(self, rgb: torch.Tensor) -> torch.Tensor:
        """uint8 [N, H, W, 3] -> [N, 3, size, size]"""
        x = rgb.permute(0, 3, 1, 2).double()  # which autocast leaves alone
        x = resize(x, self.rows, self.columns).float() / 127.5 - 1.0
        return nn.functional.pad(x, self.margins, value=-1.0)


class Statistics(nn.Module):
    """How state and action are scaled for the model: what it sees is (x - shift) / scale."""

    def __init__(self, widths: dict[str, int]):
        super().__init__()
        self.names = set(widths)
        self.missing = set(widths)
        for name, width in widths.items():
            self.register_buffer(f"{name}_shift", torch.zeros(width))
            self.register_buffer(f"{name}_scale", torch.ones(width))

    def set(self, name: str, shift, scale) -> None:
        mine = getattr(self, f"{name}_shift")
        shift = torch.as_tensor(shift, dtype=torch.float32).reshape(-1)
        scale = torch.as_tensor(scale, dtype=torch.float32).reshape(-1)
        if shift.shape != mine.shape or scale.shape != mine.shape:
            raise ValueError(f"its statistics are of {len(shift)} numbers of {name}, but the env has {len(mine)}")
        if not (shift.isfinite().all() and scale.isfinite().all() and (scale >= 0).all()):
            raise ValueError(f"its statistics of {name} are not finite, or of a negative width")
        mine.copy_(shift)
        getattr(self, f"{name}_scale").copy_(torch.where(scale < 1e-6, 1.0, scale))  # what never varies
        self.missing.discard(name)

    def normalise(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return (x - getattr(self, f"{name}_shift")) / getattr(self, f"{name}_scale")

    def restore(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return getattr(self, f"{name}_shift") + x * getattr(self, f"{name}_scale")

    def read(self, path: str, file: str, key: str) -> None:
        """From a file, or whichever the model's folder has; missing if it has none."""
        found = read_statistics(path, file, key)
        for name in self.names & set(found):
            self.set(name, *found[name])

    def fit(self, name: str, x: torch.Tensor) -> None:
        self.set(name, x.mean(0), x.std(0))

    def save(self, folder: Path) -> None:
        """As openpi lays them out."""
        found = {}
        for name in self.names:
            numbers = {"mean": getattr(self, f"{name}_shift").tolist()}
            numbers["std"] = getattr(self, f"{name}_scale").tolist()
            found["actions" if name == "action" else name] = numbers
        write(folder / "norm_stats.json", json.dumps({"norm_stats": found}))


def find_tables(path: str, file: str) -> tuple[dict, dict]:
    """Tables of numbers by feature, as others write them, and how each kind of feature is normalised."""
    modes = {"STATE": "MEAN_STD", "ACTION": "MEAN_STD"}
    modes |= read_json(path, "config.json").get("normalization_mapping", {})
    if file:
        try:
            tables = json.loads(Path(file).read_text())
            return tables.get("norm_stats", tables), modes
        except (OSError, ValueError, AttributeError) as error:
            raise ValueError(f"--statistics {file} is no table of statistics in JSON ({error})") from error
    # Of openpi and tandem, of OpenVLA, of a data set of lerobot's
    for name in ("norm_stats.json", "dataset_statistics.json", "meta/stats.json", "stats.json"):
        tables = read_json(path, name)
        if tables:
            return tables.get("norm_stats", tables), modes
    for step in read_json(path, "policy_preprocessor.json").get("steps", []):  # of a policy of lerobot's
        if step.get("registry_name") == "normalizer_processor" and "state_file" in step:
            for name, x in load_file(find_file(path, step["state_file"])).items():
                feature, _, number = name.rpartition(".")
                tables.setdefault(feature, {})[number] = x.tolist()
            return tables, modes | step.get("config", {}).get("norm_map", {})
    own = read_json(path, "processor_config.json")  # of transformers' PI0Processor
    if own.get("state_mean"):
        tables["state"] = {"mean": own["state_mean"], "std": own["state_std"]}
        tables["action"] = {"mean": own["actions_mean"], "std": own["actions_std"]}
    return tables, modes


def read_statistics(path: str, file: str, key: str) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """-> state and action, each as (shift, scale); empty if there are none."""
    tables, modes = find_tables(path, file)
    names = {"state": ("observation.state", "state", "proprio"), "action": ("action", "actions")}
    if tables and not any(name in tables for name in names["action"]):  # OpenVLA's: tables for each data set
        choice = f"set --unnorm-key to one of {', '.join(tables)}"
        if not key and len(tables) > 1:
            raise ValueError(f"it has the statistics of several data sets: {choice}")
        key = key or next(iter(tables))
        if key not in tables:
            raise ValueError(f"it has no statistics of {key}: {choice}")
        tables = tables[key]
        modes = {"STATE": "QUANTILES", "ACTION": "QUANTILES"}
    found = {}
    for name, theirs in names.items():
        for table in theirs:
            if table in tables:
                found[name] = shift_and_scale(tables[table], modes[name.upper()])
    if tables and "action" not in found:
        raise ValueError("its statistics are not of state and action")
    return found


def shift_and_scale(numbers: dict, mode: str) -> tuple[torch.Tensor, torch.Tensor]:
    ends = {"MEAN_STD": ("mean", "std"), "QUANTILES": ("q01", "q99"), "MIN_MAX": ("min", "max")}
    if mode not in ends or not set(ends[mode]) <= set(numbers):
        raise ValueError(f"its statistics have {', '.join(numbers)}, which is not what {mode} needs")
    first, second = (torch.tensor(numbers[name], dtype=torch.float64) for name in ends[mode])
    mask = torch.tensor(numbers.get("mask", [True] * len(first)))  # False: left as it is, such as a gripper
    shift = first if mode == "MEAN_STD" else (first + second) / 2
    scale = second if mode == "MEAN_STD" else (second - first) / 2
    return torch.where(mask, shift, 0.0), torch.where(mask, scale, 1.0)


def choose_chunk(args: Args, own: int | None) -> tuple[int, int]:
    """-> actions predicted per forward, and how many of them are executed."""
    chunk = own or args.action_chunk or 1
    if args.action_chunk not in (None, chunk):
        have = f"it predicts {chunk} actions per forward, not {args.action_chunk}"
        raise ValueError(f"{have}: set --action-chunk {chunk}")
    executed = args.execute or chunk
    if executed > chunk:
        raise ValueError(f"it predicts {chunk} actions per forward: --execute {executed} is more than that")
    return chunk, executed


def choose_cameras(args: Args, env: envs.VecEnv) -> list[str]:
    """The pictures that the policy takes, in its order."""
    there = [name for name in env.single_observation_space.keys() if name.startswith("rgb")]
    for name in args.cameras:
        if name not in there:
            raise ValueError(f"{args.env_id} has no camera {name}: set --cameras to some of {' '.join(there)}")
    return list(args.cameras) or there


def without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        for name in ("p", "dropout", "attention_dropout"):
            if isinstance(getattr(module, name, None), float):
                # CRUCIAL: with dropout, the same action would have another probability each time.
                setattr(module, name, 0.0)
    return model


def choose_trained(model: nn.Module, args: Args, frozen: str | None) -> nn.Module:
    """Freeze the parts whose names match `frozen`, and add adapters to the others if asked for."""
    found = [p for name, p in model.named_parameters() if frozen and re.search(frozen, name)]
    if frozen and not found:
        raise ValueError(f"no part of it is called {' or '.join(frozen.split('|'))}: leave out --freeze-vision")
    if args.lora_rank:
        settings = {"r": args.lora_rank, "lora_alpha": 2 * args.lora_rank}
        settings |= {"target_modules": "all-linear", "exclude_modules": f".*({frozen}).*" if frozen else None}
        return get_peft_model(model, LoraConfig(**settings))
    for p in found:
        p.requires_grad_(False)
    return model


def make_value_head(width: int, path: str) -> nn.Module:
    first = layer_init(nn.Linear(width, 256))
    last = layer_init(nn.Linear(256, 1), std=0.1)
    head = nn.Sequential(first, nn.Tanh(), last)
    file = find_file(path, "value_head.safetensors")
    if file:
        head.load_state_dict(load_file(file))
    return head


class LayerCache:
    """The keys and values of one layer."""

    def __init__(self, past: tuple[torch.Tensor, ...]):
        self.past = past

    def update(self, keys, values, layer_idx):
        if self.past:
            keys = torch.cat([self.past[0], keys], dim=-2)
            values = torch.cat([self.past[1], values], dim=-2)
        self.now = (keys, values)
        return self.now


class RecomputedLayer(GemmaDecoderLayer):
    """Gradient checkpointing of a layer that writes to a cache.

    transformers' own takes the cache away from the layers, but PI0's expert reads what they write there. Here
    the layer gets a cache of its own, made anew whenever it is computed.
    """

    def forward(self, hidden_states, past_key_values=None, **settings):
        if not (self.training and torch.is_grad_enabled()):
            return super().forward(hidden_states, past_key_values=past_key_values, **settings)

        def compute(hidden_states, *past):
            cache = LayerCache(past)
            out = super(RecomputedLayer, self).forward(hidden_states, past_key_values=cache, **settings)
            return out, *cache.now

        layer = past_key_values.layers[self.self_attn.layer_idx]
        past = (layer.keys, layer.values) if layer.is_initialized else ()
        out, keys, values = torch.utils.checkpoint.checkpoint(compute, hidden_states, *past, use_reentrant=False)
        if not layer.is_initialized:
            layer.lazy_initialization(keys, values)
        layer.keys = keys
        layer.values = values
        return out


def pad_to(x: torch.Tensor, width: int) -> torch.Tensor:
    return nn.functional.pad(x, (0, width - x.shape[-1]))


class TokenAgent(nn.Module):
    """A vision-language model that predicts actions as tokens, as OpenVLA does, and a value head.

    A policy of another kind needs the same five methods, `see`, `forward`, `actions`, `check` and `save`, and the
    attributes `model`, `value_head`, `statistics`, `chunk` (actions predicted per forward) and `executed`.
    """

    def __init__(self, env: envs.VecEnv, path: str, args: Args):
        super().__init__()
        if args.denoise_steps or args.learn_noise or args.train_expert_only:
            what = "it predicts actions as tokens"
            raise ValueError(f"{what}: leave out --denoise-steps, --learn-noise and --train-expert-only")
        settings = read_json(path, "actions.json")  # what others call it, or an earlier run
        self.chunk, self.executed = choose_chunk(args, settings.get("chunk"))
        self.size = env.single_action_space.shape[0]
        self.camera = choose_cameras(args, env)[0]
        if len(args.cameras) > 1:
            raise ValueError("it predicts actions as tokens from one picture: give one of --cameras")
        # Frozen weights are kept as small as they are computed with; what is trained stays in fp32.
        dtype = torch.bfloat16 if args.mixed_precision == "bf16" and args.lora_rank else torch.float32
        model = AutoModelForImageTextToText.from_pretrained(path, dtype=dtype)
        try:
            self.processor = AutoProcessor.from_pretrained(path)
        except (ImportError, AttributeError):
            self.processor = PlainProcessor.from_pretrained(path)
        image_processor = self.processor.image_processor
        if hasattr(image_processor, "do_image_splitting"):
            # One picture instead of seventeen tiles of it. Without tiles it is brought to `max_image_size`
            # in any case; `do_resize` would enlarge it to the size of all tiles together first.
            image_processor.do_image_splitting = False
            image_processor.do_resize = False
        height, width, _ = env.single_observation_space[self.camera].shape
        self.crop = settings.get("crop", 1.0)  # part of the picture's area that is looked at, its middle
        side = math.sqrt(self.crop)
        self.top = round(height * (1.0 - side) / 2)
        self.left = round(width * (1.0 - side) / 2)
        height -= 2 * self.top
        width -= 2 * self.left
        self.pictures = Pictures(image_processor, height, width)
        self.prompt = settings.get("prompt")  # with {instruction} in it
        self.temperature = settings.get("temperature", 1.0)
        self._read_prompts(env.instructions, Image.new("RGB", (width, height)), model)
        self._choose_bins(env.single_action_space, path, args, model, settings)
        self.model = choose_trained(without_dropout(model), args, "vision|visual" if args.freeze_vision else None)
        if args.gradient_checkpointing:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.value_head = make_value_head(model.get_input_embeddings().weight.shape[1], path)

    def _read_prompts(self, instructions: list[str], picture: Image.Image, model: nn.Module) -> None:
        """Tokenize each instruction once, as a message with a picture, and leave room for actions."""
        texts = []
        for instruction in instructions:
            text = getattr(self.processor, "image_token", "") + instruction
            if self.prompt:
                text = getattr(self.processor, "image_token", "") + self.prompt.format(instruction=instruction)
            elif self.processor.chat_template:
                content = [{"type": "image"}, {"type": "text", "text": instruction}]
                message = {"role": "user", "content": content}
                text = self.processor.apply_chat_template([message], add_generation_prompt=True)
            texts.append(text)
        settings = {"return_tensors": "pt", "padding": True, "padding_side": "left"}
        prompts = self.processor(text=texts, images=[[picture]] * len(texts), **settings)
        self.prompt_length = prompts["input_ids"].shape[1]
        count = self.chunk * self.size
        inputs = {}
        for name, x in prompts.items():
            if x.shape == prompts["input_ids"].shape and name != "labels":
                # Actions are attended to, and are the model's own words (token type 1 of PaliGemma).
                value = 1 if name in ("attention_mask", "token_type_ids") else 0
                inputs[name] = nn.functional.pad(x, (0, count), value=value)
        if hasattr(model.base_model, "get_rope_index"):
            # Qwen places tokens in three dimensions, by a loop over samples. All pictures are of one
            # size, so the places depend on the instruction alone: [instructions, 3, length].
            names = ("input_ids", "attention_mask", "mm_token_type_ids", "image_grid_thw")
            known = {name: prompts[name] for name in names if name in prompts}
            places, offsets = model.base_model.get_rope_index(**known)
            after = prompts["attention_mask"].sum(1, keepdim=True) + offsets + torch.arange(count)
            parts = [places.transpose(0, 1), after[:, None].expand(-1, 3, -1)]
            inputs["position_ids"] = torch.cat(parts, 2)
        self.text_names = list(inputs)
        for name, x in inputs.items():
            self.register_buffer(f"text_{name}", x, persistent=False)

    def _choose_bins(self, space: Box, path: str, args: Args, model: nn.Module, settings: dict) -> None:
        """The last tokens that nothing else uses stand for the bins, or what the folder says."""
        tokenizer = self.processor.tokenizer
        prompts = self.text_input_ids[:, : self.prompt_length]
        taken = {*tokenizer.all_special_ids, *prompts.unique().tolist()}
        rows = model.get_input_embeddings().weight.shape[0]
        free = [i for i in sorted(tokenizer.get_vocab().values()) if i not in taken and i < rows]
        bins = args.action_bins or len(settings.get("token_ids", range(256)))
        token_ids = settings.get("token_ids", free[-bins:])
        if len(token_ids) != bins:
            have = f"{len(token_ids)} action tokens that no prompt uses"
            raise ValueError(f"{path} has {have}, not --action-bins {bins}")
        # Where the bins lie between the lowest action, -1, and the highest, 1: evenly, if the folder does not say.
        centres = settings.get("centres", ((torch.arange(bins) + 0.5) / bins * 2.0 - 1.0).tolist())
        if len(centres) != bins:
            raise ValueError(f"actions.json has {bins} token_ids, but {len(centres)} centres")
        self.register_buffer("bins", torch.as_tensor(token_ids))
        self.register_buffer("centres", torch.as_tensor(centres))
        self.statistics = Statistics({"action": self.size})
        low = torch.as_tensor(settings.get("low", space.low))
        high = torch.as_tensor(settings.get("high", space.high))
        self.statistics.set("action", (low + high) / 2, (high - low) / 2)
        self.statistics.read(path, args.statistics, args.unnorm_key)

    @property
    def whole(self) -> nn.Module:
        """The transformers model; its layers hold the adapters, if there are any."""
        return self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model

    def see(self, obs: TensorDict) -> TensorDict:
        """What `forward` needs of an observation: made once, kept with the rollout."""
        rgb = obs[self.camera]
        rgb = rgb[:, self.top : rgb.shape[1] - self.top, self.left : rgb.shape[2] - self.left]
        seen = {"pixel_values": self.pictures(rgb), "instruction": obs["instruction"]}
        return TensorDict(seen, obs.batch_size)

    def forward(self, obs: TensorDict, drawn=None, deterministic=False, generator=None, target=None):
        """-> drawn, log-probability, entropy, value of whole chunks. The single entry point.

        What is drawn are numbers of bins, [N, executed * size]. Given ones are scored in one pass. Else they
        are drawn one by one from the caller's own `generator`, with a cache of keys and values.
        With the actions of a demonstration as `target` [N, chunk, size]: -> the loss of cloning, value.
        """
        if target is not None:
            drawn = self.tokens(target)
        tokens, logits, hidden = self._predict(obs, drawn, deterministic, generator)
        logits = logits.log_softmax(-1)
        logprob = logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).sum(-1)
        entropy = -(logits.exp() * logits).sum((-2, -1))
        with torch.autocast(hidden.device.type, enabled=False):
            value = self.value_head(hidden.float()).squeeze(-1)
        if target is not None:
            return -logprob, value
        return tokens, logprob, entropy, value

    def _predict(self, obs: TensorDict, tokens=None, deterministic=False, generator=None):
        """-> tokens [N, count], logits [N, count, bins], and the state at the end of the prompt."""
        instruction = obs["instruction"]
        images = self._images(obs)
        if tokens is not None:
            text = self._text(instruction, tokens[:, :-1])
            out = self.whole.base_model(**text, **images, use_cache=False)
            hidden = out.last_hidden_state[:, -tokens.shape[1] :]
            return tokens, self._bin_logits(hidden) / self.temperature, hidden[:, 0]

        tokens = instruction.new_empty(len(instruction), 0)
        feed = self._text(instruction, tokens) | images
        cache = None
        states = []
        logits = []
        for _ in range(self.executed * self.size):
            out = self.whole.base_model(**feed, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            states.append(out.last_hidden_state[:, -1])
            scores = self._bin_logits(states[-1]) / self.temperature
            logits.append(scores)
            if not deterministic:
                # CRUCIAL: threads share the global generator: draws from it could not be repeated.
                gumbel = -torch.empty_like(scores).exponential_(generator=generator).log()
                scores = scores + gumbel
            tokens = torch.cat([tokens, scores.argmax(-1, keepdim=True)], 1)
            feed = self._text(instruction, tokens)
            for name in feed:
                if name != "attention_mask":
                    feed[name] = feed[name][..., -1:]
        return tokens, torch.stack(logits, 1), states[0]

    def _text(self, instruction: torch.Tensor, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        """The prompts of the instructions, and after them the action tokens [N, any number]."""
        length = self.prompt_length + tokens.shape[1]
        text = {}
        for name in self.text_names:
            text[name] = getattr(self, f"text_{name}")[instruction][..., :length]
        text["input_ids"][:, self.prompt_length :] = self.bins[tokens]
        if "position_ids" in text:
            text["position_ids"] = text["position_ids"].transpose(0, 1)
        return text

    def _images(self, obs: TensorDict) -> dict[str, torch.Tensor]:
        """What the model takes: the rows of all pictures in one dimension."""
        pixels = obs["pixel_values"]
        images = {"pixel_values": pixels.flatten(0, 1)}
        for name in self.pictures.constants:
            x = getattr(self.pictures, name)
            images[name] = x.expand(len(pixels), *x.shape).flatten(0, 1)
        return images

    def _bin_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The logits of the bins alone: the product with the whole vocabulary is never made."""
        head = self.whole.get_output_embeddings()
        cap = getattr(self.whole.config.get_text_config(), "final_logit_softcapping", None)
        # CRUCIAL: in fp32. In bf16, log-probabilities of drawn and scored tokens differ by whole units.
        with torch.autocast(hidden.device.type, enabled=False):
            logits = hidden.float() @ head.weight.index_select(0, self.bins).float().T
            if head.bias is not None:
                logits = logits + head.bias.index_select(0, self.bins).float()
            if cap is not None:
                logits = cap * torch.tanh(logits / cap)
        return logits

    @torch.no_grad()
    def check(self, obs: TensorDict, half: torch.dtype | None) -> None:
        """Raise a ValueError if this does not compute what the model does, in the run's precision."""
        head = self.whole.get_output_embeddings()
        if not isinstance(head, nn.Linear) or self.whole.base_model is self.whole:
            raise ValueError("its output layer is not a plain linear layer on top of a backbone")
        seen = self.see(obs)
        with torch.autocast(obs["instruction"].device.type, dtype=half, enabled=half is not None):
            tokens, drawn, _ = self._predict(seen, deterministic=True)
            _, scored, _ = self._predict(seen, tokens)
        # In standard deviations of the logits: the scale of the head does not matter.
        rounded = self.whole.dtype != torch.float32
        tolerance = 0.25 if half is not None or rounded else 0.01
        difference = drawn.log_softmax(-1) - scored.log_softmax(-1)
        if (difference.abs().amax(-1) > tolerance * scored.std(-1)).any():
            raise ValueError("actions drawn token by token and scored in one pass have different probabilities")

        text = self._text(seen["instruction"], tokens[:, :-1])
        out = self.whole(**text, **self._images(seen), logits_to_keep=tokens.shape[1], use_cache=False)
        own = out.logits[..., self.bins].float() / self.temperature
        _, mine, _ = self._predict(seen, tokens)
        tolerance = 0.02 if rounded else 1e-3
        if ((own - mine).abs() > tolerance * own.abs().amax()).any():
            raise ValueError("its output layer does more to the logits than a bias and soft-capping")

    def actions(self, tokens: torch.Tensor) -> torch.Tensor:
        """[N, executed * size] numbers of bins -> [N, executed, size] the middles of the bins."""
        return self.statistics.restore("action", self.centres[tokens.unflatten(1, (-1, self.size))])

    def tokens(self, actions: torch.Tensor) -> torch.Tensor:
        """[N, chunk, size] -> [N, chunk * size], the bins whose middles are nearest."""
        part = self.statistics.normalise("action", actions).flatten(1)
        return (part.unsqueeze(-1) - self.centres).abs().argmin(-1)

    def save(self, folder: Path) -> None:
        """Write what `from_pretrained` (for adapters: peft) reads, and which token is which action."""
        self.model.save_pretrained(folder)
        self.processor.save_pretrained(folder)
        actions = {"token_ids": self.bins.tolist(), "centres": self.centres.tolist(), "chunk": self.chunk}
        actions |= {"temperature": self.temperature, "prompt": self.prompt, "crop": self.crop}
        write(folder / "actions.json", json.dumps(actions))
        self.statistics.save(folder)
        save_file(self.value_head.state_dict(), folder / "value_head.safetensors")


class FlowAgent(nn.Module):
    """PI0: an action expert turns noise into actions in a few steps, each with noise of its own; and a value head.

    What is drawn is the whole chain from noise to action, so its probability is a product of Gaussians.
    """

    def __init__(self, env: envs.VecEnv, path: str, args: Args):
        super().__init__()
        config = read_config(path)
        if args.action_bins:
            raise ValueError("it is a flow policy, whose actions are no tokens: leave out --action-bins")
        self.chunk, self.executed = choose_chunk(args, config.chunk_size)
        self.steps = args.denoise_steps or config.num_inference_steps
        self.draws = args.bc_draws
        self.size = env.single_action_space.shape[0]
        self.cameras = choose_cameras(args, env)
        widths = {"action": self.size}
        if "state" in env.single_observation_space.keys():
            widths["state"] = env.single_observation_space["state"].shape[0]
        for name, most in (("state", config.max_state_dim), ("action", config.max_action_dim)):
            if widths.get(name, 0) > most:
                raise ValueError(f"it takes at most {most} numbers of {name}, but the env has {widths[name]}")
        self.statistics = Statistics(widths)
        self.statistics.read(path, args.statistics, args.unnorm_key)

        model = PI0ForConditionalGeneration.from_pretrained(path, config=config, dtype=torch.float32)
        frozen = r"\.vlm\." if args.train_expert_only else "vision_tower" if args.freeze_vision else None
        self.model = choose_trained(without_dropout(model), args, frozen)
        if args.mixed_precision == "bf16":  # what is frozen is kept as small as it is computed with
            for p in model.parameters():
                if not p.requires_grad:
                    p.data = p.data.bfloat16()
        if args.gradient_checkpointing:
            model.model.vlm.vision_tower.gradient_checkpointing_enable({"use_reentrant": False})
            for module in model.modules():
                if isinstance(module, GemmaDecoderLayer):
                    module.__class__ = RecomputedLayer
        vision = config.vlm_config.vision_config
        for name in self.cameras:
            height, width, _ = env.single_observation_space[name].shape
            self.add_module(f"pictures_{name}", PaddedPictures(height, width, vision.image_size))
        self.tokenizer = load_tokenizer(path)
        image_tokens = len(self.cameras) * (vision.image_size // vision.patch_size) ** 2
        texts = [f"{self.tokenizer.bos_token}{instruction}\n" for instruction in env.instructions]
        words = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        length = max(len(x) for x in words)
        ids = [[config.vlm_config.image_token_id] * image_tokens + x + [0] * (length - len(x)) for x in words]
        mask = [[1] * (image_tokens + len(x)) + [0] * (length - len(x)) for x in words]
        self.register_buffer("text_ids", torch.tensor(ids), persistent=False)
        self.register_buffer("text_mask", torch.tensor(mask), persistent=False)
        log_std = torch.full((self.steps, self.size), math.log(args.noise_std))
        saved = read_json(path, "flow.json").get("log_std", [])
        if args.learn_noise and len(saved) == self.steps:
            log_std = torch.tensor(saved)
        self.log_std = nn.Parameter(log_std, requires_grad=args.learn_noise)
        width = config.vlm_config.text_config.hidden_size + config.max_state_dim
        self.value_head = make_value_head(width, path)

    whole = TokenAgent.whole

    def see(self, obs: TensorDict) -> TensorDict:
        """What `forward` needs of an observation. Pictures stay small until the model looks at them."""
        names = [*self.cameras, "instruction"]
        if "state" in self.statistics.names:
            names.append("state")
        return obs.select(*names)

    def forward(self, obs: TensorDict, drawn=None, deterministic=False, generator=None, target=None):
        """-> drawn, log-probability, entropy, value of whole chunks. The single entry point.

        What is drawn is a chain [N, steps + 1, chunk, width]: noise first, normalised actions last, with what the
        model has beyond the env's actions. A given one is scored, all steps in one pass. `deterministic`: the ODE,
        with no noise but the one that it starts from.
        With the actions of a demonstration as `target` [N, chunk, size]: -> the loss of cloning, value.
        """
        cache, mask, hidden = self._read_prefix(obs)
        with torch.autocast(hidden.device.type, enabled=False):
            value = self.value_head(torch.cat([hidden, self._state(obs)], -1)).squeeze(-1)
        if target is not None:
            return self._clone(obs, target, cache, mask), value
        if drawn is None:
            drawn, means = self._denoise(obs, cache, mask, deterministic, generator)
        else:
            noisy = drawn[:, :-1].flatten(0, 1)
            time = self._times(drawn).repeat(len(drawn))
            velocity = self._velocity(obs, noisy, time, cache, mask)
            means = (noisy - velocity / self.steps).unflatten(0, (len(drawn), self.steps))
        return drawn, *self._score(drawn, means), value

    def _read_prefix(self, obs: TensorDict):
        """Pictures and words through the vision-language model -> its keys and values, mask, mean state."""
        pictures = [getattr(self, f"pictures_{name}")(obs[name]) for name in self.cameras]
        pictures = torch.stack(pictures, 1)
        there = torch.ones(pictures.shape[:2], dtype=torch.bool, device=pictures.device)
        ids = self.text_ids[obs["instruction"]]
        mask = self.text_mask[obs["instruction"]]
        inner = self.whole.model
        embeds = inner.embed_prefix(ids, pictures, there)
        settings = {"attention_mask": mask, "position_ids": mask.cumsum(-1) - 1, "use_cache": True}
        # Token type 0: all of the prefix sees all of it.
        out = inner.vlm(inputs_embeds=embeds, token_type_ids=torch.zeros_like(ids), **settings)
        # CRUCIAL: the value is of the prefix and the state; it must not see the noise that it is a baseline for.
        hidden = (out.last_hidden_state.float() * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)
        return out.past_key_values, mask, hidden

    def _state(self, obs: TensorDict) -> torch.Tensor:
        width = self.whole.config.max_state_dim
        if "state" not in self.statistics.names:
            return torch.zeros(len(obs), width, device=obs["instruction"].device)
        return pad_to(self.statistics.normalise("state", obs["state"]), width)

    def _times(self, like: torch.Tensor) -> torch.Tensor:
        """When the steps start: 1 is noise, 0 the action."""
        return 1.0 - torch.arange(self.steps, device=like.device) / self.steps

    def _velocity(self, obs: TensorDict, noisy, time, cache, mask) -> torch.Tensor:
        """Of [M, chunk, width] actions at [M] times, several of each observation if M is larger than N."""
        repeats = len(noisy) // len(obs)
        state = self._state(obs)
        if repeats > 1:
            cache.batch_repeat_interleave(repeats)
            state = state.repeat_interleave(repeats, 0)
            mask = mask.repeat_interleave(repeats, 0)
        length = mask.shape[1]
        out = self.whole(state=state, noise=noisy, timestep=time, attention_mask=mask, past_key_values=cache)
        cache.crop(length - cache.get_seq_length())  # the prefix stays, for the next step
        return out.logits.float()

    def _denoise(self, obs, cache, mask, deterministic, generator) -> tuple[torch.Tensor, torch.Tensor]:
        config = self.whole.config
        like = {"device": mask.device, "generator": generator}
        x = torch.randn(len(obs), self.chunk, config.max_action_dim, **like)
        chain = [x]
        means = []
        for step, now in enumerate(self._times(x)):
            mean = x - self._velocity(obs, x, now.expand(len(obs)), cache, mask) / self.steps
            means.append(mean)
            x = mean
            if not deterministic:
                # CRUCIAL: threads share the global generator: draws from it could not be repeated.
                noise = torch.randn(len(obs), self.executed, self.size, **like)
                x = mean.clone()
                x[:, : self.executed, : self.size] += self.log_std[step].exp() * noise
            chain.append(x)
        return torch.stack(chain, 1), torch.stack(means, 1)

    def _score(self, drawn: torch.Tensor, means: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """-> log-probability and entropy of the part that is executed: the env sees no other."""
        part = (slice(None), slice(None), slice(self.executed), slice(self.size))
        log_std = self.log_std.unsqueeze(1)  # [steps, 1, size]
        offset = (drawn[:, 1:][part] - means[part]) * torch.exp(-log_std)
        constant = log_std + 0.5 * math.log(2 * math.pi)
        logprob = -(0.5 * offset.square() + constant).sum((1, 2, 3))
        entropy = (constant + 0.5).expand(self.steps, self.executed, self.size).sum()
        return logprob, entropy.expand(len(drawn))

    def _clone(self, obs: TensorDict, target: torch.Tensor, cache, mask) -> torch.Tensor:
        """The flow-matching loss [N], of several draws of noise and time on one look."""
        config = self.whole.config
        target = pad_to(self.statistics.normalise("action", target), config.max_action_dim)
        target = target.repeat_interleave(self.draws, 0)
        alpha = torch.tensor(config.time_sampling_beta_alpha)
        beta = torch.tensor(config.time_sampling_beta_beta)
        time = torch.distributions.Beta(alpha, beta).sample((len(target),)).to(target.device)
        time = time * config.time_sampling_scale + config.time_sampling_offset
        noise = torch.randn_like(target)
        noisy = noise + (1.0 - time[:, None, None]) * (target - noise)
        velocity = self._velocity(obs, noisy, time, cache, mask)
        loss = (velocity - (noise - target))[..., : self.size].square().mean((1, 2))
        return loss.unflatten(0, (-1, self.draws)).mean(1)

    @torch.no_grad()
    def check(self, obs: TensorDict, half: torch.dtype | None) -> None:
        """Raise a ValueError if a chain that is drawn step by step is scored otherwise in one pass."""
        seen = self.see(obs)
        generator = torch.Generator(obs["instruction"].device).manual_seed(0)
        with torch.autocast(obs["instruction"].device.type, dtype=half, enabled=half is not None):
            drawn, logprob, _, _ = self(seen, generator=generator)
            scored = self(seen, drawn)[1]
        numbers = self.steps * self.executed * self.size
        tolerance = (0.05 if half is not None else 1e-3) * math.sqrt(numbers) / self.log_std.exp().min()
        if ((logprob - scored).abs() > tolerance).any():
            raise ValueError("a chain drawn step by step and scored in one pass has different probabilities")

    def actions(self, drawn: torch.Tensor) -> torch.Tensor:
        """A chain -> [N, executed, size]: its end, in the env's units."""
        return self.statistics.restore("action", drawn[:, -1, : self.executed, : self.size])

    def save(self, folder: Path) -> None:
        """Write what `from_pretrained` (for adapters: peft) reads, and the statistics of state and action."""
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        self.statistics.save(folder)
        write(folder / "flow.json", json.dumps({"log_std": self.log_std.tolist()}))
        save_file(self.value_head.state_dict(), folder / "value_head.safetensors")


def load_tokenizer(path: str):
    """That of the folder; lerobot's policies name one on the hub."""
    for step in read_json(path, "policy_preprocessor.json").get("steps", []):
        if step.get("registry_name") == "tokenizer_processor" and not find_file(path, "tokenizer_config.json"):
            return AutoTokenizer.from_pretrained(step["config"]["tokenizer_name"])
    return AutoTokenizer.from_pretrained(path)


Agent = TokenAgent | FlowAgent


def export(agent: Agent, folder: Path) -> None:
    """Write the policy's folder as a whole, in place of an older one."""
    hidden = folder.with_name(f".{folder.name}")
    shutil.rmtree(hidden, ignore_errors=True)
    agent.save(hidden / "new")
    if folder.exists():
        folder.rename(hidden / "old")
    (hidden / "new").rename(folder)
    shutil.rmtree(hidden, ignore_errors=True)


def trainable(agent: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in agent.named_parameters() if p.requires_grad}


def saved_tensors(agent: Agent) -> dict[str, torch.Tensor]:
    """What a checkpoint holds of the policy: the rest is in the model's folder."""
    return trainable(agent) | dict(agent.statistics.named_buffers(prefix="statistics"))


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


def vla_loss(
    newlogprob, entropy, newvalue, prox_logprob, logprob, advantage, returns,
    clip_coef, clip_coef_high, cap, ent_coef, vf_coef,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The loss summed over the samples, and the sums of what is logged (LOSSES).

    Decoupled PPO: the ratio that is clipped is to the proximal policy, where this update starts, and
    a weight makes up for the data being an older one's. With nothing stale it is 1, and this is PPO.
    """
    logratio = newlogprob - prox_logprob
    ratio = logratio.exp()
    behaviour = (prox_logprob - logprob).exp()
    weight = behaviour.clamp(max=cap)
    clamped = ratio.clamp(1 - clip_coef, 1 + clip_coef_high)
    pg_loss = weight * torch.max(-advantage * ratio, -advantage * clamped)
    v_loss = nn.functional.huber_loss(newvalue, returns, reduction="none")
    loss = pg_loss - ent_coef * entropy + vf_coef * v_loss
    clipped = ((ratio < 1 - clip_coef) | (ratio > 1 + clip_coef_high)).float()
    capped = (behaviour > cap).float()
    logged = [pg_loss, v_loss, entropy, -logratio, (ratio - 1) - logratio, clipped, weight, capped]
    return loss.sum(), torch.stack(logged).detach().sum(1)


LOSSES = "policy_loss value_loss entropy old_approx_kl approx_kl clipfrac behaviour_weight behaviour_capped"
LOSSES = [f"losses/{name}" for name in LOSSES.split()]


@torch.no_grad()
def estimate(agent: Agent, rollout: "Rollout", size: int, args: Args) -> TensorDict:
    """-> the samples to learn from, [n], with `advantage`, `return` and `prox_logprob`.

    All is by the proximal policy: the newest weights, not those that acted. `size` samples go through
    the model at a time. Of groups, only the steps of episodes that can be told apart are samples.
    """
    agent.eval()
    data = rollout.data
    rewards = args.reward_scale * data["reward"]
    if args.advantage == "group":
        advantages, valid, _ = group_advantages(rewards, data["active"], args.group_size, 1.0, False, args.scale)
        data["advantage"] = advantages
        data["return"] = advantages
        batch = data.reshape(-1)[valid.view(-1).nonzero().squeeze(1)]
        batch["prox_logprob"] = batch["logprob"].clone()
        for part in batch.split(size) if len(batch) else []:
            part["prox_logprob"].copy_(agent(part["obs"], part["drawn"])[1])
        return batch

    batch = data.reshape(-1)
    scored = [agent(part["obs"], part["drawn"]) for part in batch.split(size)]
    values = torch.cat([value for _, _, _, value in scored])
    data["prox_logprob"] = torch.cat([logprob for _, logprob, _, _ in scored]).view_as(data["logprob"])

    def predict(seen: TensorDict) -> torch.Tensor:  # values do not depend on what is scored along
        return torch.cat([agent(part, batch["drawn"][: len(part)])[3] for part in seen.split(size)])

    final_values = values * batch["truncated"]  # if the simulator gives no final observations
    if args.reward == "success":
        # CRUCIAL: an episode that the clock ends is a failure. Valued as if it went on, all would succeed some day.
        final_values = torch.zeros_like(values)
    elif rollout.final_seen is not None:
        final_values[rollout.final_rows] = predict(rollout.final_seen)
    values = values.view_as(rewards)
    # CRUCIAL: k steps lie between a chunk and what follows it, fewer where the episode ended inside.
    discount = args.gamma ** data["steps"]
    data["advantage"] = compute_gae(
        rewards, values, predict(rollout.next_seen), data["terminated"], data["truncated"],
        final_values.view_as(values), discount, args.gae_lambda,
    )  # fmt: skip
    data["return"] = data["advantage"] + values
    return data.reshape(-1)


@dataclass
class Rollout:
    """What the collector hands over to the learner."""

    data: TensorDict  # [T, N] chunks: obs, drawn, logprob, active, reward, steps, terminated, truncated
    next_seen: TensorDict  # [N] the observations after the last chunk, as the policy sees them
    final_seen: TensorDict | None  # the last ones of episodes that the time limit ended, if any
    final_rows: torch.Tensor  # the rows of the flat data that they belong to
    obs: TensorDict  # [N] the observations from which the next rollout starts
    episodes: torch.Tensor  # episode_sums
    metrics: dict[str, torch.Tensor]  # sums over the env steps of what the env measures
    version: int = 0  # updates that the weights had seen
    wait: float = 0.0  # seconds that the collector waited before it started
    seconds: float = 0.0  # seconds that it took
    ready: torch.cuda.Event | None = None  # on a GPU: all of it is computed

    def tensors(self) -> list[torch.Tensor]:
        """Every tensor in it, each made on the collector's stream."""
        return [x for x in tree_leaves(vars(self)) if isinstance(x, torch.Tensor)]


def collect(
    agent: Agent, env: envs.VecEnv, obs: TensorDict, num_chunks: int, gamma: float, generator, stopped,
    only_success: bool = False, one_episode: bool = False,
) -> Rollout | None:  # fmt: skip
    """A rollout of [T, N] chunks that starts at `obs`, or None once `stopped()` says so.

    Chunks are executed open loop: a row whose episode ends inside one is not `active` for the rest,
    with `one_episode` for the rest of the rollout. `only_success`: the reward is that of --reward success.
    Host syncs: one per rollout, for the final observations.
    """
    N = env.num_envs
    rows = []
    final_obs = []  # of each chunk, valid where it is truncated; None if the simulator gives none
    episodes = torch.zeros(4, dtype=torch.float64, device=env.device)
    metrics = {}
    seen = agent.see(obs)
    running = torch.ones(N, dtype=torch.bool, device=env.device)
    for _ in range(num_chunks):
        drawn, logprob, _, _ = agent(seen, generator=generator)
        reward = torch.zeros(N, device=env.device)
        steps = torch.zeros_like(reward)
        active = running
        terminated = torch.zeros_like(active)
        truncated = torch.zeros_like(active)
        final = obs
        actions = agent.actions(drawn).unbind(1)
        for number, action in enumerate(actions, 1):
            if stopped():
                return None
            # Pictures are drawn for the next look of the policy, which is after the last action.
            obs, step_reward, ended, cut, info = env.step(action, active, look=number == len(actions))
            ended = ended & active
            cut = cut & active
            if only_success:
                step_reward = torch.where(ended | cut, info["episode"]["success"], 0.0)
            # CRUCIAL: rewards of the executed steps alone, each discounted from the chunk's first one.
            reward = reward + gamma**steps * step_reward * active
            steps = steps + active
            terminated = terminated | ended
            truncated = truncated | cut
            if info["final_obs"] is None:
                final = None
            elif set(info["final_obs"].keys()) == set(final.keys()):  # else nobody's episode was cut, nor its end drawn
                final = info["final_obs"].where(cut, final)
            episodes += episode_sums(ended | cut, info["episode"])
            for name, x in info["metrics"].items():
                metrics[name] = metrics.get(name, 0.0) + (x * active).sum()
            active = active & ~(ended | cut)
        final_obs.append(final)
        row = {"obs": seen, "drawn": drawn, "logprob": logprob, "active": running, "reward": reward, "steps": steps}
        rows.append(TensorDict(row | {"terminated": terminated, "truncated": truncated}, [N]))
        seen = agent.see(obs)
        if one_episode:
            running = active
            # On a GPU a look costs a host sync, and steps in which nobody moves cost less.
            if env.device.type == "cpu" and not running.any():
                break

    data = torch.stack(rows)
    final_rows = data["truncated"].view(-1).nonzero().squeeze(1)
    final_seen = None
    if final is not None and len(final_rows) and not (one_episode or only_success):
        final_seen = agent.see(torch.cat(final_obs)[final_rows])
    return Rollout(data, seen, final_seen, final_rows, obs, episodes, metrics)


def cast_weights(model: nn.Module) -> list[nn.Parameter]:
    """The trained weights that autocast would cast at each use: not those of the head, which is used in fp32."""
    head = model.get_output_embeddings()
    found = []
    for module in model.modules():
        if isinstance(module, (nn.Linear, _ConvNd)) and module is not head:
            found += [p for p in module.parameters(recurse=False) if p.requires_grad]
    return found


def share_frozen(agent: Agent, half: torch.dtype | None = None) -> Agent:
    """A copy with its own trained weights. CRUCIAL: a rollout would see the learner's half updated.

    With `half`, weights that autocast would cast are kept in it. Autocast remembers its casts only of
    weights that need a gradient: a policy that only acts would cast all of them for every token.
    """
    kept = {id(x): x for x in (*agent.parameters(), *agent.buffers()) if not x.requires_grad}
    if half is not None:
        for p in cast_weights(agent.whole):
            kept[id(p)] = nn.Parameter(p.detach().to(half))
    return copy.deepcopy(agent, kept)


class Collector:
    """Makes rollouts in a thread, with a policy, envs and a generator that nothing else uses.

    Rollout n (from 0, over the whole run) starts when n <= version + max_staleness and n < pause_at,
    where version is how many updates the newest weights have seen. So at most max_staleness + 1 are
    under way or wait to be used, none is dropped and none is used twice.

    The thread makes no collective and touches no tracker, no accelerator and no env but its own.
    """

    def __init__(self, agent: Agent, env: envs.VecEnv, generator: torch.Generator, args: Args):
        self.weights = list(trainable(agent).values())
        self.agent = agent.requires_grad_(False).eval()
        self.snapshot = [p.detach().clone() for p in self.weights]
        self.env = env
        self.generator = generator
        self.args = args
        self.version = 0
        self.queue = deque()
        self.error = None
        self.stopping = False
        self.lock = threading.Condition()
        self.stream = torch.cuda.Stream(env.device) if env.device.type == "cuda" else None
        self.copied = None  # CUDA event: the snapshot is complete
        self.loaded = None  # CUDA event: the thread has read the snapshot
        self.thread = threading.Thread(target=self._run, name="collector", daemon=True)

    def start(self, agent: Agent, obs: TensorDict, iteration: int) -> None:
        """Start at `obs` with the weights of `agent`, which have seen `iteration` updates."""
        # CRUCIAL: cloning has set the statistics of state and action, and with DDP the copy does not share them.
        for mine, current in zip(self.agent.buffers(), agent.buffers(), strict=True):
            mine.copy_(current)
        self.obs = obs
        self.started = iteration
        self.version = iteration - 1
        self.publish(agent)
        self.thread.start()

    def publish(self, agent: Agent, pause_at: float = math.inf) -> None:
        """Give the thread new weights, for the rollouts that start from now on.

        Rollout `pause_at` does not start before the next call. Once the one before it has been used,
        the thread and its env are at rest.
        """
        with self.lock, torch.no_grad():
            if self.loaded:
                torch.cuda.current_stream().wait_event(self.loaded)
            torch._foreach_copy_(self.snapshot, list(trainable(agent).values()))
            self.copied = torch.cuda.current_stream().record_event() if self.stream else None
            self.version += 1
            self.pause_at = pause_at
            self.lock.notify_all()

    def next_rollout(self) -> Rollout:
        """Wait for the oldest unused rollout; raise what went wrong in the thread."""
        with self.lock:
            self.lock.wait_for(lambda: self.queue or self.error)
            if self.error:
                raise RuntimeError("the collector thread failed") from self.error
            rollout = self.queue.popleft()
        if self.stream:
            stream = torch.cuda.current_stream()
            stream.wait_event(rollout.ready)
            # CRUCIAL: else the allocator may reuse their memory while this stream still reads them.
            for tensor in rollout.tensors():
                tensor.record_stream(stream)
        return rollout

    def __enter__(self) -> "Collector":
        return self

    def __exit__(self, *error) -> None:
        """End the thread, in the middle of a rollout if need be, on every way out."""
        with self.lock:
            self.stopping = True
            self.lock.notify_all()
        if self.thread.ident:
            self.thread.join(self.args.timeout)

    def _run(self) -> None:
        try:
            # Autocast and the current stream are a thread's own: the main one's do not hold here.
            half = HALF[self.args.mixed_precision]
            autocast = torch.autocast(self.env.device.type, dtype=half, enabled=half is not None)
            with torch.no_grad(), autocast, torch.cuda.stream(self.stream):
                while self._collect_one():
                    pass
        except BaseException as error:
            with self.lock:
                self.error = error
                self.lock.notify_all()

    def _may_start(self) -> bool:
        # CRUCIAL: this pace, not a bound on the queue, keeps staleness below its limit.
        return self.started <= self.version + self.args.max_staleness and self.started < self.pause_at

    def _collect_one(self) -> bool:
        begin = time.perf_counter()
        with self.lock:
            self.lock.wait_for(lambda: self.stopping or self._may_start())
            if self.stopping:
                return False
            # CRUCIAL: between two rollouts and with the lock held, so that all are of one version.
            if self.copied:
                self.stream.wait_event(self.copied)
            torch._foreach_copy_(self.weights, self.snapshot)
            self.loaded = self.stream.record_event() if self.stream else None
            version = self.version
            number = self.started
            self.started += 1
        start = time.perf_counter()
        args = self.args
        num_chunks = args.num_chunks
        gamma = args.gamma
        if args.advantage == "group":
            # CRUCIAL: the number of the rollout makes the starts: new ones each time, and the same after a resume.
            self.obs = self.env.reset(episode=number)
            num_chunks = math.ceil(self.env.max_episode_steps / self.agent.executed)
            gamma = 1.0
        rollout = collect(
            self.agent, self.env, self.obs, num_chunks, gamma, self.generator, lambda: self.stopping,
            args.reward == "success", args.advantage == "group",
        )  # fmt: skip
        if rollout is None:
            return False
        self.obs = rollout.obs
        rollout.version = version
        rollout.wait = start - begin
        rollout.seconds = time.perf_counter() - start
        rollout.ready = self.stream.record_event() if self.stream else None
        with self.lock:
            self.queue.append(rollout)
            self.lock.notify_all()
        return True


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
def evaluate_policy(
    agent: Agent, env: envs.VecEnv, accelerator: Accelerator, video: Path | None, batch: int, shift: int = 0
) -> dict[str, float]:
    """One deterministic episode in each env of every rank; with `shift`, told the wrong thing."""
    agent.eval()
    # Where it is the env that trains, an episode that training never starts.
    obs = env.reset(0 if env.separate_evaluation else EVAL_SEED)
    active = torch.ones(env.num_envs, dtype=torch.bool, device=env.device)
    sums = torch.zeros(4, dtype=torch.float64, device=env.device)
    generator = torch.Generator(env.device).manual_seed(EVAL_SEED)  # of where a flow policy's chains start
    told = obs["instruction"]
    success = torch.zeros(env.num_envs, dtype=torch.float64, device=env.device)
    frames = []
    while active.any():
        shown = obs[active]
        shown["instruction"] = (shown["instruction"] + shift) % len(env.instructions)
        with accelerator.autocast():  # which only a prepared agent does by itself
            drawn = [agent(agent.see(part), None, True, generator)[0] for part in shown.split(batch)]
        actions = torch.zeros(env.num_envs, agent.executed, agent.size, device=env.device)
        actions[active] = agent.actions(torch.cat(drawn))
        for number, action in enumerate(actions.unbind(1), 1):
            if env.render_rows and video:
                frame = label(env, obs)
                if frames:  # an episode that has ended stays as it was
                    ended = ~active[: len(frame)].cpu()
                    frame[ended] = frames[-1][ended]
                frames.append(frame)
            obs, _, terminated, truncated, info = env.step(action, active, look=number == agent.executed)
            ended = (terminated | truncated) & active
            sums += episode_sums(ended, info["episode"])
            success = torch.where(ended, info["episode"]["success"].double(), success)
            active = active & ~ended
    if frames:
        save_video([frame for frame in frames for _ in range(4)], video)  # slowly: episodes are short
    numbers = torch.arange(len(env.instructions), device=env.device)
    asked = (told.unsqueeze(1) == numbers).double()  # [N, instructions]
    sums = torch.cat([sums, asked.sum(0), (success.unsqueeze(1) * asked).sum(0)])
    totals = accelerator.reduce(sums, "sum").tolist()
    scores = episode_means("eval", totals[:4]) | {"eval/episodes": totals[0]}
    counts, successes = np.split(np.array(totals[4:]), 2)
    if 1 < len(env.instructions) <= MAX_LISTED and "eval/success_rate" in scores:
        for name, count, successful in zip(env.instructions, counts, successes):
            if count:
                scores[f"eval/success_rate/{name}"] = successful / count
    return scores


def label(env: envs.VecEnv, obs: TensorDict) -> torch.Tensor:
    """What the env renders, [n, H, W, 3], with its instruction under each picture."""
    labelled = []
    for frame, number in zip(env.render().cpu(), obs["instruction"].tolist()):
        image = ImageOps.expand(Image.fromarray(frame.numpy()), (0, 0, 0, 14), "white")
        text = env.instructions[number]
        size = min(9.0, 2.0 * frame.shape[1] / max(len(text), 1))  # a letter is half as wide as it is high
        ImageDraw.Draw(image).text((2, len(frame) + 1), text, "black", font_size=size)
        labelled.append(torch.from_numpy(np.array(image)))
    return torch.stack(labelled)


def save_video(frames: list[torch.Tensor], path: Path) -> None:
    """Frames of [n, H, W, 3], the n side by side, as a GIF."""
    path.parent.mkdir(parents=True, exist_ok=True)
    images = [Image.fromarray(torch.cat(list(frame), dim=1).numpy()) for frame in frames]
    images[0].save(path, save_all=True, append_images=images[1:], duration=40, loop=0)


@torch.no_grad()
def demonstrate(agent: Agent, env: envs.VecEnv, episodes: int) -> tuple[TensorDict, torch.Tensor]:
    """Episodes of the expert: observations, and the chunk of actions that it would take there.

    Its actions are executed with noise, so that it also shows how to recover.
    """
    generator = torch.Generator(env.device).manual_seed(DEMO_SEED)
    shown = []
    labels = []
    for episode in range(math.ceil(episodes / env.num_envs)):
        obs = env.reset(episode)
        active = torch.ones(env.num_envs, dtype=torch.bool, device=env.device)
        active[episodes - episode * env.num_envs :] = False
        observations = []
        actions = []
        while active.any():
            action = env.expert_action()
            observations.append(obs.exclude("privileged").set("active", active))
            actions.append(action * active[:, None])  # after the end: nothing
            noise = 0.5 * torch.randn(action.shape, generator=generator, device=env.device)
            obs, _, terminated, truncated, _ = env.step(action + noise, active)
            active = active & ~(terminated | truncated)
        actions += [torch.zeros_like(action)] * (agent.chunk - 1)
        chunks = torch.stack(actions).unfold(0, agent.chunk, 1)  # [T, N, size, chunk]
        observations = torch.cat(observations)
        rows = observations.pop("active")
        shown.append(observations[rows])
        labels.append(chunks.transpose(2, 3).flatten(0, 1)[rows])
    return torch.cat(shown), torch.cat(labels)


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


def prepare(accelerator: Accelerator, agent: nn.Module, optimizer: torch.optim.Optimizer, *inputs):
    """-> model to train with, optimizer, and the optimizer to step. `inputs` are some that `agent` takes."""
    # CRUCIAL: training goes through `model`. `agent`, the same networks without DDP's hooks, would learn on each rank
    # alone, and no error would tell.
    model, optimizer = accelerator.prepare(agent, optimizer)
    # Accelerate's wrapper is for fp16; without that, all it adds is a disk access at every step.
    adam = optimizer if accelerator.scaler else optimizer.optimizer
    # CRUCIAL: DDP regroups its gradients after its first backward, which changes the order of summation. A backward
    # that counts for nothing lets a resumed run sum in the same order as one that never stopped.
    accelerator.backward(0.0 * sum(x.sum() for x in model(*inputs)[1:]))
    optimizer.zero_grad()
    return model, optimizer, adam


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


def peak_memory(device: torch.device) -> float:
    """In GB: of the GPU, or of the process where there is none."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


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


def frozen_checksum(agent: Agent) -> float:
    frozen = [p for name, p in agent.named_parameters() if not p.requires_grad and name != "log_std"]
    return checksum(frozen).item() if frozen else 0.0


def load_trained(agent: Agent, checkpoint: Checkpoint, args: Args) -> None:
    folder = checkpoint.folder
    names = ["env_id", "model_path", "cameras", "action_bins", "action_chunk", "execute", "denoise_steps", "lora_rank"]
    if args.lora_rank:
        names.append("mixed_precision")  # in which the frozen weights are kept
    for name in names:
        new = json.loads(json.dumps(getattr(args, name)))
        old = checkpoint.about["args"].get(name, new)
        if old != new:
            fail(f"{folder} was trained with {name} = {old}, not {new}: set {option(name)} to match it")
    frozen = checkpoint.trainer.get("frozen", checkpoint.about.get("frozen"))  # where older ones keep it
    if frozen != frozen_checksum(agent):
        model = f"--model-path {args.model_path}"
        fail(f"{folder} was trained on other weights than those that {model} has now")
    own = {name: x.shape for name, x in saved_tensors(agent).items()}
    if own != {name: x.shape for name, x in checkpoint.model.items()}:
        fail(f"{folder} does not fit this model: other weights were trained, or of another shape")
    agent.load_state_dict(checkpoint.model, strict=False)
    agent.statistics.missing.clear()


def open_model(args: Args, accelerator: Accelerator, env: envs.VecEnv) -> Agent:
    """The policy from --model-path on the env's device, the same on every rank."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    path = args.model_path
    if "/" not in path and path not in ("tiny", "tiny-pi0") and not os.path.isdir(path):
        fail(f"there is no --model-path {path}: give tiny, tiny-pi0, a folder, or a hub id, which has a slash")
    if path in ("tiny", "tiny-pi0"):
        chunk = args.action_chunk or 1
        path = f"{args.output_dir}/{args.model_path}_{args.seed}"
        if args.model_path == "tiny-pi0" and chunk > 1:
            path = f"{path}_{chunk}"
        with together(fatal=False) as errors:
            if accelerator.is_main_process and not os.path.exists(path):
                make_tiny(Path(path), args.seed, args.model_path, chunk)
        if errors and not os.path.exists(path):  # if it does by now, another run was quicker
            fail(f"cannot write {path}: {errors[0]}; choose another --output-dir")
    with together(f"cannot use --model-path {args.model_path}: "):
        config = read_config(path)
        if type(config) not in AutoModelForImageTextToText._model_mapping:
            raise ValueError(f"it is a {config.model_type} model, which takes no pictures")
        torch.manual_seed(args.seed)  # the same value head and adapters on every rank
        kind = FlowAgent if isinstance(config, PI0Config) else TokenAgent
        # CRUCIAL: on the env's device from here on; the check below runs on the env's observations.
        agent = kind(env, path, args).to(env.device).eval()
        if agent.executed > env.max_episode_steps:
            what = f"{agent.executed} actions are executed at once"
            limit = f"an episode of {args.env_id} has {env.max_episode_steps} steps"
            raise ValueError(f"{what}, but {limit}: set --execute")
        obs = env.reset()[:2]
        agent.check(obs, HALF[args.mixed_precision])
        # A backward tells which weights take part: DDP would wait for the gradients of all others.
        seen = agent.see(obs)
        with torch.no_grad():
            drawn = agent(seen)[0]
        sum(x.sum() for x in agent(seen, drawn)[1:] if x.requires_grad).backward()
        for p in agent.parameters():
            p.requires_grad_(p.grad is not None)
        agent.zero_grad()
    if isinstance(agent, TokenAgent) and not agent.pictures.in_torch:
        name = type(agent.processor.image_processor).__name__
        accelerator.print(f"pictures are prepared on the CPU, one by one, by {name}")
    return agent


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
    # Buffers are equal by construction: broadcasting them would cost a collective per forward.
    ddp = DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)
    warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")
    accelerator = launch(args, ddp)
    rank = accelerator.process_index
    world = accelerator.num_processes
    device = accelerator.device
    env, eval_env = make_envs(args, accelerator, group_size=args.group_size if args.advantage == "group" else 1)
    check_env(args, env)
    agent = open_model(args, accelerator, env)
    num_chunks = args.num_chunks
    if args.advantage == "group":
        num_chunks = math.ceil(env.max_episode_steps / agent.executed)
    size = math.ceil(args.num_envs * num_chunks / args.num_minibatches)  # of a minibatch at most, on each rank
    tune_cpu(args.torch_threads, size * sum(p.numel() for p in agent.parameters()))
    if args.evaluate:
        checkpoint = load_best(args.checkpoint, args, accelerator)
        load_trained(agent, checkpoint, args)
        video = checkpoint.folder / "evaluation.gif"
        scores = evaluate_policy(agent, eval_env, accelerator, video, args.num_envs)
        accelerator.print(f"{checkpoint.folder}: {show(scores)}")
        return accelerator.end_training()

    run = Run(args, accelerator)
    checkpoint = run.open()
    if checkpoint:
        load_trained(agent, checkpoint, args)
    elif agent.statistics.missing and not args.bc_updates:
        missing = " and ".join(sorted(agent.statistics.missing, reverse=True))
        what = f"has no statistics of {missing}, without which its actions mean nothing"
        fail(f"{args.model_path} {what}: give those of its training data with --statistics FILE")
    policy = [p for name, p in trainable(agent).items() if not name.startswith("value_head")]
    value_head = [p for name, p in trainable(agent).items() if name.startswith("value_head")]
    parameters = policy + value_head
    groups = [{"params": policy}, {"params": value_head}]
    optimizer = torch.optim.AdamW(groups, lr=args.learning_rate, eps=1e-5, weight_decay=0.0, fused=True)
    # Before `prepare`, which patches `forward` in place.
    inference = share_frozen(agent, HALF[args.mixed_precision])
    next_obs = env.reset()
    seen = agent.see(next_obs[:1])
    with torch.no_grad():
        drawn = agent(seen)[0]
    model, optimizer, adam = prepare(accelerator, agent, optimizer, seen, drawn)
    seed = args.seed + 1_000_003 * (accelerator.process_index + 1)  # other actions on every rank
    torch.manual_seed(seed)
    generator = torch.Generator(device).manual_seed(seed)

    # ---- Resume
    progress = Progress(learning_rate=args.learning_rate)
    if checkpoint:
        local = checkpoint.local
        if run.resume(checkpoint, progress, optimizer):
            env.load_state_dict(local["env"])
            next_obs = TensorDict(local["obs"], [args.num_envs]).to(device)
            generator.set_state(local["generator"])
        else:
            next_obs = env.reset(episode=progress.iteration)
            torch.manual_seed(seed + progress.iteration)
            generator.manual_seed(seed + progress.iteration)
        checkpoint = local = None  # let go of the mapped files
    run.claim(progress)
    frozen = frozen_checksum(agent)
    sizes = {"charts/trainable_parameters": sum(p.numel() for p in parameters)}
    sizes["charts/total_parameters"] = sum(p.numel() for p in agent.parameters())
    accelerator.print(f"{args.env_id}: {world} x {args.num_envs} envs on {device.type}, writing to {run.folder}")
    accelerator.print("{:,} of {:,} parameters are trained".format(*sizes.values()))

    # ---- Cloning: the model learns to act from a few demonstrations
    if args.bc_updates and progress.iteration == 0:
        at_once = args.bc_episodes if "/" not in args.env_id else min(args.bc_episodes, args.num_envs)
        demo_env = env
        if env.separate_evaluation:
            options = envs.options(args.env_options)
            demo_env = envs.make(args.env_id, at_once, device=device, seed=DEMO_SEED, **options)
        demo_obs, demo_actions = demonstrate(agent, demo_env, args.bc_episodes)
        if demo_env is not env:
            demo_env.close()
            del demo_env
            gc.collect()  # a simulator's envs take gigabytes
        for name in sorted(agent.statistics.missing):
            agent.statistics.fit(name, demo_actions[:, 0] if name == "action" else demo_obs["state"])
        agent.train(args.gradient_checkpointing)
        for update in range(args.bc_updates):
            for group in optimizer.param_groups:
                group["lr"] = args.bc_learning_rate * (1.0 - update / args.bc_updates)
            rows = torch.randint(len(demo_actions), (args.bc_batch,), device=device)
            loss, value = model(agent.see(demo_obs[rows]), target=demo_actions[rows])
            loss = loss.mean()
            accelerator.backward(loss + 0.0 * value.sum())
            norm = accelerator.clip_grad_norm_(parameters, args.max_grad_norm)
            adam.found_inf = (~norm.isfinite()).float()
            adam.step()
            adam.zero_grad()
            if update + 1 == args.bc_updates or time.time() > run.last_print + 5:
                run.last_print = time.time()
                accelerator.print(f"cloning {update + 1}/{args.bc_updates}  loss {loss.item():.3f}")
        optimizer.optimizer.state.clear()
        video = run.folder / "videos" / "step_0.gif"
        scores = evaluate_policy(agent, eval_env, accelerator, video, args.num_envs)
        if eval_env is env:
            next_obs = env.reset(episode=progress.iteration)
        accelerator.print(f"cloned: {show(scores)}")
        run.log(scores, progress)

    grouped = args.advantage == "group"
    vf_coef = 0.0 if grouped else args.vf_coef
    skipped_in_a_row = torch.zeros((), device=device)
    most_stale = 0
    log = {}
    # Evaluating, saving and ending need the collector at rest and its queue empty. When one of them is
    # due, no rank has started a rollout that iteration + max_staleness does not use: all ranks pause
    # after that iteration, and nothing is lost.
    pause_at = math.inf
    paused_step = progress.global_step  # env steps at the last pause
    running = progress.global_step < args.total_timesteps
    with Collector(inference, env, generator, args) as collector:
        if running:
            collector.start(agent, next_obs, progress.iteration)
        while running:
            progress.iteration += 1
            iteration_start = time.perf_counter()
            decay = 1.0
            if args.anneal_lr:
                decay = 1.0 - 0.9 * min(progress.global_step / args.total_timesteps, 1.0)
            progress.learning_rate = args.learning_rate * decay
            warming_up = progress.iteration <= args.value_warmup and not grouped
            # The policy stays, but Adam learns how large its gradients are: the first step of a fresh Adam moves every
            # weight by the whole learning rate.
            optimizer.param_groups[0]["lr"] = 0.0 if warming_up else progress.learning_rate
            optimizer.param_groups[1]["lr"] = args.value_learning_rate * decay

            # ---- Rollout: the thread's next one, judged by the weights that this update starts from
            rollout = collector.next_rollout()
            learner_wait = time.perf_counter() - iteration_start
            batch = estimate(agent, rollout, size, args)

            # ---- Exchange what all ranks must know of each other
            mine = {"samples": len(batch), "steps": rollout.data["steps"].sum(), "episodes": rollout.episodes}
            mine |= {"advantages": sum_and_square(batch["advantage"]), "returns": sum_and_square(batch["return"])}
            mine["chunks"] = rollout.data["active"].sum()
            mine["unknown"] = args.reward == "success" and rollout.data["reward"].isnan().any()
            ranks = exchange(accelerator, mine | {"stop": bool(run.signals)})
            if ranks["unknown"].any():
                fail(f"{args.env_id} does not always say what success is: leave --reward as it is")
            run.check_finite(~ranks["advantages"].isfinite().all(1), progress.iteration)
            sums = {name: x.sum(0) for name, x in ranks.items()}
            samples = int(sums["samples"])
            steps = int(sums["steps"])
            progress.global_step += steps
            mean, var = mean_and_var(sums["advantages"], max(samples, 1))
            return_var = mean_and_var(sums["returns"], max(samples, 1))[1]
            finished = progress.global_step >= args.total_timesteps
            stopping = bool(sums["stop"])
            evaluating = due(args.eval_interval, paused_step, progress.global_step)
            saving = due(args.save_interval, paused_step, progress.global_step)
            if finished or stopping or evaluating or saving:
                pause_at = min(pause_at, progress.iteration + args.max_staleness)

            # ---- Update
            agent.train(args.gradient_checkpointing)
            if args.norm_adv and not grouped:
                batch["advantage"] = (batch["advantage"] - mean) / (math.sqrt(var) + 1e-8)
            spare = rollout.data.reshape(-1)[:1]
            for name in ("advantage", "return", "prox_logprob"):
                spare[name] = torch.zeros_like(spare["logprob"])
            shares = split_sizes(ranks["samples"][:, 0].long(), args.num_minibatches)
            losses = torch.zeros(len(LOSSES), dtype=torch.float64, device=device)
            grad_norms = torch.zeros((), device=device)
            skipped = torch.zeros((), device=device)
            epochs = 0
            while epochs < args.update_epochs:
                epochs += 1
                epoch_losses = torch.zeros_like(losses)
                shuffled = batch[torch.randperm(len(batch), device=device)]
                for mb, on_ranks in zip(shuffled.split([share[rank] for share in shares]), shares):
                    if sum(on_ranks) == 0:  # all ranks know it, and skip it together
                        continue
                    counts = float(len(mb) > 0)
                    if not counts:  # the others wait for gradients of this rank: those of a sample that counts nothing
                        mb = spare
                    parts = mb.split(math.ceil(len(mb) / args.gradient_accumulation))
                    for part in parts:
                        # Gradients are exchanged once per minibatch, with its last part.
                        with nullcontext() if part is parts[-1] else accelerator.no_sync(model):
                            _, newlogprob, entropy, newvalue = model(part["obs"], part["drawn"])
                            loss, part_losses = vla_loss(
                                newlogprob, entropy, newvalue,
                                part["prox_logprob"], part["logprob"], part["advantage"], part["return"],
                                args.clip_coef, args.clip_coef_high, args.behaviour_weight_cap,
                                args.ent_coef, vf_coef,
                            )  # fmt: skip
                            # CRUCIAL: DDP's mean over ranks is then the mean over the samples of all of them, also
                            # when they hold different numbers.
                            accelerator.backward(counts * loss / (sum(on_ranks) / world))
                        epoch_losses += counts * part_losses
                    norm = accelerator.clip_grad_norm_(parameters, args.max_grad_norm)
                    # CRUCIAL: after the all-reduce a NaN is on every rank, and the fused Adam skips its
                    # step where this is 1: on all of them together, and without a host sync.
                    adam.found_inf = (~norm.isfinite()).float()
                    adam.step()
                    adam.zero_grad()
                    skipped += adam.found_inf
                    skipped_in_a_row = (skipped_in_a_row + 1.0) * adam.found_inf
                    grad_norms += norm.nan_to_num(0.0, 0.0)
                losses += epoch_losses
                if args.target_kl:
                    # CRUCIAL: the KL of all ranks, so that all of them stop together.
                    kl = accelerator.reduce(epoch_losses, "sum")[LOSSES.index("losses/approx_kl")]
                    if kl.item() / max(samples, 1) > args.target_kl:
                        break
            progress.steps_trained += steps * epochs

            # ---- Metrics, means over ranks
            metrics = dict(zip(LOSSES, losses * world / max(samples * epochs, 1)))
            metrics["losses/grad_norm"] = grad_norms / (epochs * args.num_minibatches)
            metrics["losses/skipped_updates"] = skipped
            metrics["charts/staleness"] = progress.iteration - 1 - rollout.version
            metrics["charts/queue_length"] = len(collector.queue)
            metrics["charts/memory_gb"] = peak_memory(device)
            metrics["time/train"] = time.perf_counter() - iteration_start - learner_wait
            metrics |= {"time/learner_wait": learner_wait, "time/collector_wait": rollout.wait}
            metrics["time/collect"] = rollout.seconds
            for name in run.metric_names(rollout.metrics):
                metrics[f"env/{name}"] = rollout.metrics.get(name, 0.0) * world / steps
            check = 0.0
            if args.check_interval and progress.iteration % args.check_interval == 0:
                check = checksum(parameters)
            ranks = exchange(accelerator, metrics | {"checksum": check, "skipped": skipped_in_a_row})
            run.check_ranks(ranks.pop("checksum"), int(ranks.pop("skipped")[0]), progress.iteration)
            most_stale = max(most_stale, int(ranks["charts/staleness"].max()))
            log = {name: x.mean().item() for name, x in ranks.items()} | sizes
            log |= {"charts/staleness_max": most_stale, "charts/policy_version": progress.iteration}
            log["charts/minibatch_size"] = samples / args.num_minibatches
            if grouped:
                log["charts/valid_fraction"] = samples / int(sums["chunks"])
            else:
                log["losses/explained_variance"] = 1.0 - var / max(return_var, 1e-12)
            log |= progress.count_episodes(sums["episodes"].tolist())
            log |= run.speed(steps, time.perf_counter() - iteration_start)

            # ---- Evaluate and save, with the collector at rest: its env and obs can be read
            if progress.iteration == pause_at:
                pause_at = math.inf
                paused_step = progress.global_step
                running = not (finished or stopping)
                improved = False
                if finished or (evaluating and not stopping):
                    eval_start = time.perf_counter()
                    video = run.folder / "videos" / f"step_{progress.global_step}.gif"
                    log |= evaluate_policy(agent, eval_env, accelerator, video, args.num_envs)
                    log["time/eval"] = time.perf_counter() - eval_start
                    improved = progress.improve(log)
                    if eval_env is env:  # the simulator allows no second one: training starts new episodes
                        collector.obs = env.reset(episode=progress.iteration)
                if finished and len(env.instructions) > 1:
                    misled = evaluate_policy(agent, eval_env, accelerator, None, args.num_envs, shift=1)
                    misled.setdefault("eval/success_rate", math.nan)
                    for name, score in misled.items():
                        if name.startswith("eval/success_rate"):
                            log[name.replace("success_rate", "success_rate_wrong_instruction")] = score
                trainer = {"optimizer": optimizer.optimizer.state_dict(), "frozen": frozen}
                local = {"env": env.state_dict(), "generator": generator.get_state()}
                local["obs"] = dict(collector.obs.items())
                with together(f"cannot write {run.folder / 'policy'}: ", fatal=False) as errors:
                    if improved and accelerator.is_main_process:
                        export(agent, run.folder / "policy")
                # After the policy: a run that is killed in between evaluates again, and writes it again.
                run.save(progress, saved_tensors(agent), trainer, local, improved)
                if errors:
                    fail(f"cannot write {run.folder / 'policy'}: {errors[0]}; the checkpoint is saved")
            run.log(log, progress)
            if running:
                collector.publish(agent, pause_at)

    # ---- Finish
    run.finish(log, progress)
    env.close()
    if eval_env is not env:
        eval_env.close()
    # CRUCIAL: DDP must not be the last owner of the process group: it would wait for its end while holding the GIL.
    del model, optimizer, adam
    accelerator.free_memory()
    accelerator.end_training()


if __name__ == "__main__":
    main(tyro.cli(Args))
