"""PPO for vision-language-action models: a thread collects with a copy of the policy while the main thread learns.

    python ppo_vla_async.py                                          # a tiny model: cloned, then improved, in minutes
    python ppo_vla_async.py --max-staleness 0                        # the same, synchronous
    python ppo_vla_async.py --model-path HuggingFaceTB/SmolVLM-256M-Instruct --lora-rank 16 --mixed-precision bf16
    torchrun --standalone --nproc_per_node 2 ppo_vla_async.py        # two processes, one per GPU where there are GPUs
    torchrun --nnodes 2 --nproc_per_node 8 --rdzv_id 1 --rdzv_backend c10d --rdzv_endpoint HOST:29400 ppo_vla_async.py
    python ppo_vla_async.py --resume runs/NAME                       # go on where a run stopped, with the same options
    python ppo_vla_async.py --evaluate --checkpoint runs/NAME        # score its best policy

Docs: docs/ppo_vla_async.md
"""

import copy
import hashlib
import json
import math
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections import deque
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import numpy as np
import psutil
import torch
import torch.nn as nn
import tyro
from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs
from accelerate.tracking import TensorBoardTracker, WandBTracker
from accelerate.utils import broadcast_object_list, gather_object
from peft import LoraConfig, get_peft_model
from PIL import Image, ImageDraw
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tensordict import TensorDict
from tqdm import tqdm
from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer
from transformers import logging as transformers_logging

import envs

EVAL_SEED = 2**31 - 1  # evaluation always runs the same episodes, and training (by check_args) never sees them
DEMO_SEED = 2**31 - 2  # so do demonstrations: a fixed set, whatever the seed of the run
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
    save_interval: int = 50_000
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
    env_id: str = "Tabletop"
    """an embedded env (PushCube, CartPole; Tabletop has pictures) or gym/<id>, a Gymnasium env with Box observations"""
    num_envs: int = 64
    """parallel envs of each process"""

    # Model
    model_path: str = "tiny"
    """an image-text-to-text model of transformers, by hub id or folder; tiny: a small one, made on the spot"""
    action_bins: int = 256
    """values that each dimension of an action can take, one token each"""
    action_chunk: int = 1
    """actions that the model says at once, carried out without another look"""
    lora_rank: int | None = None
    """train low-rank adapters of this rank (peft) and nothing else of the model; by default all weights"""
    freeze_vision: bool = False
    """leave the vision encoder as it is"""
    gradient_checkpointing: bool = False
    """forget activations and compute them again in the backward pass: less memory, a third more time"""

    # Cloning
    bc_updates: int = 200
    """updates of behaviour cloning from the env's expert before PPO starts (0: the model is tuned already)"""
    bc_episodes: int = 512
    """demonstrations to clone"""
    bc_batch: int = 64
    """demonstrated steps in an update of each process"""
    bc_learning_rate: float = 1e-3
    """learning rate of cloning"""

    # Algorithm
    total_timesteps: int = 80_000
    """env steps of all processes together"""
    num_chunks: int = 4
    """action chunks of each env in one rollout"""
    max_staleness: int = 1
    """rollout n starts when n - this many updates are done (0: collecting and learning take turns)"""
    behaviour_weight_cap: float = 5.0
    """the most that a sample counts for being likelier under the newest policy than under the one that acted"""
    learning_rate: float = 2e-4
    """learning rate of Adam at the start"""
    value_learning_rate: float = 1e-3
    """learning rate of the value head at the start"""
    anneal_lr: bool = True
    """lower both learning rates steadily, to a tenth at --total-timesteps"""
    gamma: float = 0.7
    """discount"""
    gae_lambda: float = 0.9
    """lambda of generalised advantage estimation"""
    num_minibatches: int = 2
    """minibatches of an epoch; each holds that fraction of the samples of every process"""
    gradient_accumulation: int = 1
    """parts in which a minibatch goes through the model, to save memory"""
    update_epochs: int = 2
    """passes over a rollout"""
    value_warmup: int = 1
    """iterations at the start that train the value head alone"""
    clip_coef: float = 0.2
    """clipping of the probability ratio"""
    clip_coef_high: float = 0.28
    """clipping of the probability ratio from above"""
    ent_coef: float = 0.0
    """weight of the entropy bonus"""
    vf_coef: float = 0.5
    """weight of the value loss"""
    max_grad_norm: float = 1.0
    """gradients are scaled down to this norm"""
    target_kl: float = 0.0
    """no further epoch once the KL divergence of all processes passes this (0: off)"""
    norm_adv: bool = True
    """normalise advantages by their mean and deviation over all processes"""

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


def check_model(args: Args) -> None:
    if args.lora_rank is not None and args.lora_rank < 1:
        fail(f"--lora-rank must be 1 or more, not {args.lora_rank}: leave it out to train all weights")
    batch = args.num_envs * args.num_chunks
    if batch % args.num_minibatches or (batch // args.num_minibatches) % args.gradient_accumulation:
        parts = (
            f"--num-minibatches {args.num_minibatches} of --gradient-accumulation {args.gradient_accumulation} parts"
        )
        fail(
            f"--num-envs {args.num_envs} x --num-chunks {args.num_chunks} = {batch} samples do not divide into {parts}"
        )


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


def layer_init(layer: nn.Linear, std: float = math.sqrt(2)) -> nn.Linear:
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


def make_tiny(folder: Path, seed: int) -> None:
    """Write a small vision-language model, random as it is, with tokenizer and processor, as any checkpoint is kept."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import (
        Idefics3Config,
        Idefics3ForConditionalGeneration,
        Idefics3ImageProcessorPil,
        Idefics3Processor,
        PreTrainedTokenizerFast,
    )

    tokens = Tokenizer(models.BPE())
    tokens.pre_tokenizer, tokens.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=512, initial_alphabet=alphabet, show_progress=False)
    # The words of the instructions become one token each; anything else is spelt byte by byte.
    tokens.train_from_iterator(envs.make("Tabletop", 1).instructions, trainer)
    tokens.add_tokens([f"<unused_{i}>" for i in range(512)])
    named = {"pad_token": "<pad>", "bos_token": "<|im_start|>", "eos_token": "<end_of_utterance>"}
    around = ["<fake_token_around_image>", "<image>", "<global-img>"]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, extra_special_tokens=around, **named)
    template = "{% for m in messages %}{% for c in m['content'] %}"
    template += "{% if c['type'] == 'image' %}<image>{% else %}{{ c['text'] }}{% endif %}{% endfor %}{% endfor %}"

    side, patch, width = 64, 16, 96
    pictures = {"do_resize": False, "do_image_splitting": False, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    pictures |= {"size": {"longest_edge": side}, "max_image_size": {"longest_edge": side}}
    layers = {"hidden_size": width, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    layers |= {"initializer_range": 0.04}
    ids = {f"{name}_id": tokenizer.convert_tokens_to_ids(token) for name, token in named.items()}
    config = Idefics3Config(
        text_config=layers | ids | {"model_type": "llama", "vocab_size": len(tokenizer)},
        vision_config=layers | {"image_size": side, "patch_size": patch},
        scale_factor=1, tie_word_embeddings=False, image_token_id=tokenizer.convert_tokens_to_ids("<image>"), **ids,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = Idefics3ForConditionalGeneration(config)
    # What a pretrained model would know: that places in a picture differ, and that numbers have an order.
    place = torch.linspace(-1.0, 1.0, 256)[:, None]
    waves = torch.cos(place * torch.randn(width) * 4.0 + torch.rand(width) * 2 * math.pi)
    numbers = slice(min(tokenizer.all_special_ids) - 256, min(tokenizer.all_special_ids))
    with torch.no_grad():
        model.model.vision_model.embeddings.position_embedding.weight.mul_(5.0)
        model.get_input_embeddings().weight[numbers] = 0.05 * waves
        model.get_output_embeddings().weight[numbers] = 0.1 * waves
    model.save_pretrained(folder)
    settings = {"image_seq_len": (side // patch) ** 2, "chat_template": template}
    Idefics3Processor(Idefics3ImageProcessorPil(**pictures), tokenizer, **settings).save_pretrained(folder)


class PlainProcessor:
    """Tokenizer and image processor side by side, where the processor cannot be loaded whole: that of Qwen2.5-VL wants
    torchvision for its videos. An image token becomes as many as the picture has patches after merging."""

    def __init__(self, path: str):
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.image_processor = AutoImageProcessor.from_pretrained(path)
        self.chat_template = self.tokenizer.chat_template
        self.image_token_id = AutoConfig.from_pretrained(path).image_token_id
        self.image_token = self.tokenizer.convert_ids_to_tokens(self.image_token_id)

    def apply_chat_template(self, messages: list[dict], **options) -> str:
        return self.tokenizer.apply_chat_template(messages, tokenize=False, **options)

    def __call__(self, text: list[str], images: list, **options) -> dict:
        seen = self.image_processor(images, return_tensors="pt")
        counts = seen["image_grid_thw"].prod(-1) // self.image_processor.merge_size**2
        text = [t.replace(self.image_token, self.image_token * int(n)) for t, n in zip(text, counts)]
        tokens = self.tokenizer(text, **options)
        tokens["mm_token_type_ids"] = (tokens["input_ids"] == self.image_token_id).long()
        return {**tokens, **seen}

    def save_pretrained(self, folder: Path) -> None:
        self.tokenizer.save_pretrained(folder)
        self.image_processor.save_pretrained(folder)


class Agent(nn.Module):
    """A vision-language model that says its actions in tokens (as OpenVLA does), and a value head on its prompt.

    A model of another kind needs `see`, `forward`, `actions`, `tokens` and `save` with the same arguments and results.
    """

    def __init__(self, env: envs.VecEnv, path: str, args: Args):
        super().__init__()
        self.path, self.chunk, self.size = path, args.action_chunk, env.single_action_space.shape[0]
        # Frozen weights are kept as small as they are computed with; what is trained stays in fp32.
        small = args.mixed_precision == "bf16" and args.lora_rank
        model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.bfloat16 if small else torch.float32)
        try:
            self.processor = AutoProcessor.from_pretrained(path)
        except (ImportError, AttributeError):
            self.processor = PlainProcessor(path)
        tokenizer = self.processor.tokenizer
        if hasattr(self.processor.image_processor, "do_image_splitting"):
            self.processor.image_processor.do_image_splitting = False  # one picture, not seventeen tiles of it

        # The prompt of each instruction, around a picture of the size that the env gives.
        texts = [self._prompt(words) for words in env.instructions]
        blank = Image.new("RGB", env.single_observation_space["rgb"].shape[1::-1])
        images = [[blank]] * len(texts)
        prompts = self.processor(text=texts, images=images, return_tensors="pt", padding=True, padding_side="left")
        self.prompts = [k for k, v in prompts.items() if v.shape == prompts["input_ids"].shape and k != "labels"]
        for name in self.prompts:
            self.register_buffer(f"prompt_{name}", prompts[name], persistent=False)
        self.patches = [k for k, v in prompts.items() if len(v) != len(texts)]  # of all pictures in one row

        # The last tokens that nothing else uses stand for the bins, or those that the folder says.
        known = {}
        if (Path(path) / "actions.json").exists():
            known = json.loads((Path(path) / "actions.json").read_text())
        taken = {*tokenizer.all_special_ids, *prompts["input_ids"].unique().tolist()}
        rows = model.get_input_embeddings().weight.shape[0]
        free = [i for i in sorted(tokenizer.get_vocab().values()) if i not in taken and i < rows]
        bins = known.get("token_ids") or free[-args.action_bins :]
        if len(bins) != args.action_bins:
            have = f"{len(bins)} action tokens" if known else f"{len(bins)} tokens that no prompt uses"
            raise ValueError(f"{path} has {have}, not --action-bins {args.action_bins}")
        space = env.single_action_space
        ranges = {"bins": bins, "low": known.get("low", space.low), "high": known.get("high", space.high)}
        for name, x in ranges.items():
            self.register_buffer(name, torch.as_tensor(x))

        for module in model.modules():  # CRUCIAL: with dropout, the same action would be more or less likely each time
            for name in ("p", "dropout", "attention_dropout"):
                if isinstance(getattr(module, name, None), float):
                    setattr(module, name, 0.0)
        vision = [name for name, _ in model.named_parameters() if re.search("vision|visual", name)]
        if args.freeze_vision and not vision:
            raise ValueError("no part of it is called vision or visual: leave out --freeze-vision")
        if args.lora_rank:
            skip = "|".join(re.escape(n.removesuffix(".weight")) for n in vision) if args.freeze_vision else None
            rank = {"r": args.lora_rank, "lora_alpha": 2 * args.lora_rank, "lora_dropout": 0.0}
            model = get_peft_model(model, LoraConfig(**rank, target_modules="all-linear", exclude_modules=skip))
        elif args.freeze_vision and vision:
            for name, p in model.named_parameters():
                p.requires_grad_(name not in vision)
        if args.gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.model, self.positions = model, [m for m in model.modules() if hasattr(m, "rope_deltas")]
        width = model.get_input_embeddings().weight.shape[1]
        first, last = layer_init(nn.Linear(width, 256)), layer_init(nn.Linear(256, 1), std=0.1)
        self.value_head = nn.Sequential(first, nn.Tanh(), last)
        if (file := Path(path) / "value_head.safetensors").exists():
            self.value_head.load_state_dict(load_file(file))

    def _prompt(self, instruction: str) -> str:
        """In the model's own words for a user who shows a picture, if it has any."""
        if self.processor.chat_template:
            content = [{"type": "image"}, {"type": "text", "text": instruction}]
            said = [{"role": "user", "content": content}]
            return self.processor.apply_chat_template(said, add_generation_prompt=True)
        return getattr(self.processor, "image_token", "") + instruction

    def see(self, obs: TensorDict) -> TensorDict:
        """What `forward` needs of an observation: made once, kept with the rollout."""
        images = [[Image.fromarray(x)] for x in obs["rgb"].cpu().numpy()]
        made = self.processor.image_processor(images, return_tensors="pt")
        made = {k: v.unflatten(0, (len(images), -1)) if k in self.patches else v for k, v in made.items()}
        return TensorDict(made | {"instruction": obs["instruction"]}, [len(images)]).to(obs.device)

    def forward(self, obs: TensorDict, tokens: torch.Tensor | None = None, deterministic=False, generator=None):
        """-> tokens, log-probability, entropy, value, each of a whole chunk. The only door, as in the siblings.

        Tokens are numbers of bins, [N, chunk * action size]. Given, all are scored in one pass; else they are drawn one
        by one, with the keys and values of the tokens before them kept, from the caller's own `generator`.
        """
        inputs = {k: getattr(self, f"prompt_{k}")[obs["instruction"]] for k in self.prompts}
        seen = {k: v.flatten(0, 1) if k in self.patches else v for k, v in obs.items() if k != "instruction"}
        count = self.chunk * self.size
        if tokens is not None:
            feed = self._follow(inputs, tokens[:, :-1]) | seen
            out = self.model(**feed, logits_to_keep=count, output_hidden_states=True)
            logits = out.logits[..., self.bins].float().log_softmax(-1)
            hidden = out.hidden_states[-1][:, -count]
        else:
            chosen, parts, cache, feed = [], [], None, inputs | seen
            for _ in range(count):
                first = {"output_hidden_states": not chosen, "logits_to_keep": 1}
                out = self.model(**feed, **first, past_key_values=cache, use_cache=True)
                hidden = hidden if chosen else out.hidden_states[-1][:, -1]
                cache = out.past_key_values
                parts.append(out.logits[:, -1, self.bins].float().log_softmax(-1))
                # CRUCIAL: the global generator is shared by all threads: drawing from it, none could be repeated.
                noise = 0.0 if deterministic else torch.empty_like(parts[-1]).exponential_(generator=generator).log()
                chosen.append((parts[-1] - noise).argmax(-1))
                feed = self._follow(inputs, torch.stack(chosen, 1))
                if self.positions:  # Qwen counts in three dimensions, and leaves it to its caller to count on
                    place = feed["attention_mask"].sum(-1, keepdim=True) - 1 + self.positions[0].rope_deltas
                    feed["position_ids"] = place.expand(3, -1, -1)
                feed |= {k: feed[k][:, -1:] for k in inputs if k != "attention_mask"}
            tokens, logits = torch.stack(chosen, 1), torch.stack(parts, 1)
        logprob = logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).sum(-1)
        value = self.value_head(hidden.float()).squeeze(-1)
        return tokens, logprob, -(logits.exp() * logits).sum((-2, -1)), value

    def _follow(self, inputs: dict, tokens: torch.Tensor) -> dict:
        """The prompts with action tokens after them. Whether a token is seen, and is the model's own, goes along."""
        after = {"input_ids": self.bins[tokens], "attention_mask": torch.ones_like(tokens)}
        after |= {"token_type_ids": torch.ones_like(tokens)}
        return {k: torch.cat([x, after.get(k, torch.zeros_like(tokens))], 1) for k, x in inputs.items()}

    def actions(self, tokens: torch.Tensor) -> torch.Tensor:
        """[N, chunk * size] numbers of bins -> [N, chunk, size] the middles of the bins."""
        part = (tokens.unflatten(1, (self.chunk, self.size)) + 0.5) / len(self.bins)
        return self.low + part * (self.high - self.low)

    def tokens(self, actions: torch.Tensor) -> torch.Tensor:
        """[N, chunk, size] -> [N, chunk * size], the bins that the actions are in."""
        part = (actions - self.low) / (self.high - self.low) * len(self.bins)
        return part.long().clamp(0, len(self.bins) - 1).flatten(1)

    def save(self, folder: Path) -> None:
        """Write what `from_pretrained` (and for adapters peft) reads, and which tokens are which actions."""
        self.model.save_pretrained(folder)
        self.processor.save_pretrained(folder)
        actions = {"token_ids": self.bins.tolist(), "low": self.low.tolist(), "high": self.high.tolist()}
        write(folder / "actions.json", json.dumps(actions | {"chunk": self.chunk}))
        save_file({k: v.cpu() for k, v in self.value_head.state_dict().items()}, folder / "value_head.safetensors")


def export(agent: Agent, folder: Path) -> None:
    """Write the policy's folder as a whole, in place of an older one."""
    part, old = (folder.with_name(f".{folder.name}.{word}") for word in ("part", "old"))
    shutil.rmtree(part, ignore_errors=True)
    agent.save(part)
    if folder.exists():
        folder.rename(old)
    part.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def trainable(agent: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in agent.named_parameters() if p.requires_grad}


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


def vla_loss(
    newlogprob, entropy, newvalue, prox_logprob, logprob, advantage, returns,
    clip_coef, clip_coef_high, cap, ent_coef, vf_coef,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The loss summed over the samples, and the sums of what is logged (LOSSES).

    Decoupled PPO: the ratio that is clipped is to the proximal policy, where this update starts, and a weight makes up
    for the data being an older one's. With nothing stale the weight is 1, and this is PPO.
    """
    logratio = newlogprob - prox_logprob
    ratio = logratio.exp()
    behaviour = (prox_logprob - logprob).exp()
    weight = behaviour.clamp(max=cap)
    pg_loss = weight * torch.max(-advantage * ratio, -advantage * ratio.clamp(1 - clip_coef, 1 + clip_coef_high))
    v_loss = nn.functional.huber_loss(newvalue, returns, reduction="none")
    loss = pg_loss - ent_coef * entropy + vf_coef * v_loss
    clipped = ((ratio < 1 - clip_coef) | (ratio > 1 + clip_coef_high)).float()
    logged = [pg_loss, v_loss, entropy, -logratio, (ratio - 1) - logratio, clipped, weight, (behaviour > cap).float()]
    return loss.sum(), torch.stack(logged).detach().sum(1)


LOSSES = ["policy_loss", "value_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac"]
LOSSES = [f"losses/{k}" for k in (*LOSSES, "behaviour_weight", "behaviour_capped")]


def collect(
    agent: Agent, env: envs.VecEnv, obs: TensorDict, num_chunks: int, gamma: float, generator, stopped
) -> dict | None:
    """A rollout of [T, N] chunks that starts at `obs`, or None once `stopped()` says so.

    Chunks are carried out open loop: a row whose episode ends inside one is not `active` for the rest of it.
    """
    N, device = env.num_envs, env.device
    rows, final_obs, final_rows, episodes = [], [], [], torch.zeros(4, dtype=torch.float64, device=device)
    metrics, seen = {}, agent.see(obs)
    for t in range(num_chunks):
        tokens, logprob, _, _ = agent(seen, generator=generator)
        reward, count = torch.zeros(N, device=device), torch.zeros(N, device=device)
        active = torch.ones(N, dtype=torch.bool, device=device)
        terminated, truncated = torch.zeros_like(active), torch.zeros_like(active)
        for action in agent.actions(tokens).unbind(1):
            if stopped():
                return None
            obs, r, ended, cut, info = env.step(action, active)
            # CRUCIAL: the rewards of the steps carried out, and no others, each discounted from the chunk's first one.
            reward, count = reward + gamma**count * r * active, count + active
            ended, cut = ended & active, cut & active
            if (where := cut.nonzero().squeeze(1)).numel() and info["final_obs"] is not None:
                final_obs.append(agent.see(info["final_obs"][where]))
                final_rows.append(t * N + where)
            stats = [torch.ones_like(r), *(info["episode"][k].float() for k in ("return", "length", "success"))]
            stats = torch.stack(stats)
            episodes += torch.where(ended | cut, stats, 0.0).double().sum(1)
            for name, x in info["metrics"].items():
                metrics[name] = metrics.get(name, 0.0) + (x * active).sum()
            terminated, truncated = terminated | ended, truncated | cut
            active = active & ~(ended | cut)
            if agent.chunk > 1 and not active.any():
                break
        row = {"obs": seen, "tokens": tokens, "logprob": logprob, "reward": reward, "steps": count}
        rows.append(TensorDict(row | {"terminated": terminated, "truncated": truncated}, [N]))
        seen = agent.see(obs)
    rollout = {"data": torch.stack(rows), "next_seen": seen, "obs": obs, "episodes": episodes, "metrics": metrics}
    if final_obs:
        rollout |= {"final_obs": torch.cat(final_obs), "final_rows": torch.cat(final_rows)}
    return rollout


def share_frozen(agent: Agent) -> Agent:
    """A copy with its own trainable weights. CRUCIAL: on the learner's, a rollout would see them half updated."""
    frozen = [x for x in (*agent.parameters(), *agent.buffers()) if not x.requires_grad]
    return copy.deepcopy(agent, {id(x): x for x in frozen})


class Collector:
    """Makes rollouts in a thread of its own, with a private policy, private envs and a private generator.

    Rollout n starts when n <= version + max_staleness, and n < limit: at most max_staleness + 1 of them are under way
    or wait to be used, none is dropped and none used twice. The thread makes no collective and touches no tracker,
    no accelerator and no env but its own.
    """

    def __init__(self, agent: Agent, env: envs.VecEnv, generator: torch.Generator, args: Args):
        self.weights = list(trainable(agent).values())
        self.agent = agent.requires_grad_(False).eval()
        self.snapshot = [p.detach().clone() for p in self.weights]
        self.env, self.generator, self.args, self.obs = env, generator, args, None
        self.version, self.started, self.limit = 0, 0, math.inf
        self.lock, self.queue, self.error, self.stopping = threading.Condition(), deque(), None, False
        self.stream = torch.cuda.Stream(env.device) if env.device.type == "cuda" else None
        self.copied = self.loaded = None  # CUDA events: the snapshot is whole; the thread has read it
        self.thread = threading.Thread(target=self._run, name="collector", daemon=True)

    def start(self, agent: Agent, obs: TensorDict, iteration: int) -> None:
        """From `obs` on, with the weights of `agent`, which have seen so many updates."""
        self.obs, self.started, self.version = obs, iteration, iteration - 1
        self.publish(agent)
        self.thread.start()

    def publish(self, agent: Agent) -> None:
        """Give the thread new weights, for the rollouts that start from now on."""
        with self.lock, torch.no_grad():
            if self.loaded:
                torch.cuda.current_stream().wait_event(self.loaded)
            torch._foreach_copy_(self.snapshot, list(trainable(agent).values()))
            self.copied = torch.cuda.current_stream().record_event() if self.stream else None
            self.version += 1
            self.lock.notify_all()

    def get(self) -> dict:
        """The oldest rollout that was not used yet, waiting for it if need be; or what went wrong in the thread."""
        with self.lock:
            self.lock.wait_for(lambda: self.queue or self.error)
            if self.error:
                raise RuntimeError("the collector thread failed") from self.error
            rollout = self.queue.popleft()
        if self.stream:
            torch.cuda.current_stream().wait_event(rollout["ready"])
            for part in ("data", "next_seen", "final_obs"):
                if part in rollout:
                    rollout[part].record_stream(torch.cuda.current_stream())
        return rollout

    def rest(self, limit: float) -> None:
        """Let it start no rollout from number `limit` on."""
        with self.lock:
            self.limit = limit
            self.lock.notify_all()

    def __enter__(self) -> "Collector":
        return self

    def __exit__(self, *error) -> None:
        """End the thread, in the middle of a rollout if need be, on every way out."""
        with self.lock:
            self.stopping = True
            self.lock.notify_all()
        if self.thread.ident:
            self.thread.join(self.args.timeout)

    def _ready(self) -> bool:
        # CRUCIAL: this pace, rather than a bound on the queue, is what keeps staleness below its limit.
        return self.started <= self.version + self.args.max_staleness and self.started < self.limit

    def _run(self) -> None:
        try:
            # Both of these belong to the thread: the main one's do not hold here.
            half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.args.mixed_precision)
            autocast = torch.autocast(self.env.device.type, dtype=half, enabled=half is not None)
            stream = torch.cuda.stream(self.stream) if self.stream else nullcontext()
            with torch.no_grad(), autocast, stream:
                while self._collect_one():
                    pass
        except BaseException as error:
            with self.lock:
                self.error = error
                self.lock.notify_all()

    def _collect_one(self) -> bool:
        begin = time.perf_counter()
        with self.lock:
            self.lock.wait_for(lambda: self.stopping or self._ready())
            if self.stopping:
                return False
            # CRUCIAL: weights change here, between two rollouts, and with the lock held: all are of one version.
            if self.copied:
                self.stream.wait_event(self.copied)
            torch._foreach_copy_(self.weights, self.snapshot)
            self.loaded = self.stream.record_event() if self.stream else None
            version, self.started = self.version, self.started + 1
        waited = time.perf_counter() - begin
        settings = self.args.num_chunks, self.args.gamma, self.generator, lambda: self.stopping
        if (rollout := collect(self.agent, self.env, self.obs, *settings)) is None:
            return False
        self.obs = rollout["obs"]
        rollout |= {"version": version, "wait": waited, "seconds": time.perf_counter() - begin - waited}
        rollout["ready"] = self.stream.record_event() if self.stream else None
        with self.lock:
            self.queue.append(rollout)
            self.lock.notify_all()
        return True


@torch.no_grad()
def evaluate_policy(
    agent: Agent, env: envs.VecEnv, accelerator: Accelerator, video: Path | None, batch: int, shift: int = 0
) -> dict:
    """One deterministic episode in each eval env of every rank; with `shift`, after being told another instruction."""
    agent.eval()
    obs, active = env.reset(), torch.ones(env.num_envs, dtype=torch.bool, device=env.device)
    totals, frames = torch.zeros(4, dtype=torch.float64, device=env.device), []
    tasks = [env.instructions[i] for i in obs["instruction"].tolist()]
    while active.any():
        rows = active.nonzero().squeeze(1)
        told = obs[rows]
        told["instruction"] = (told["instruction"] + shift) % len(env.instructions)
        actions = torch.zeros(env.num_envs, agent.chunk, agent.size, device=env.device)
        said = [agent(agent.see(part), deterministic=True)[0] for part in told.split(batch)]
        actions[rows] = agent.actions(torch.cat(said))
        for action in actions.unbind(1):
            if video:
                frames += [label(env.render(), tasks)] * 4  # episodes are short: show them slowly
            obs, _, terminated, truncated, info = env.step(action, active)
            ended = (terminated | truncated) & active
            stats = torch.stack([ended.float(), *(info["episode"][k].float() for k in ("return", "length", "success"))])
            totals += torch.where(ended, stats, 0.0).double().sum(1)
            active = active & ~ended
    if video:
        save_video(frames, video)
    count, *sums = accelerator.gather(totals[None]).sum(0).tolist()
    names = ("eval/episodic_return", "eval/episodic_length", "eval/success_rate")
    return {k: x / count for k, x in zip(names, sums) if not math.isnan(x)} | {"eval/episodes": count}


def label(frames: torch.Tensor, texts: list[str]) -> torch.Tensor:
    """Write a line of text under each picture of [n, H, W, 3]."""
    labelled = []
    for frame, text in zip(frames.cpu(), texts):
        image = Image.new("RGB", (frame.shape[1], frame.shape[0] + 14), "white")
        image.paste(Image.fromarray(frame.numpy()))
        ImageDraw.Draw(image).text((2, frame.shape[0] + 1), text, fill="black", font_size=9)
        labelled.append(torch.from_numpy(np.array(image)))
    return torch.stack(labelled)


def save_video(frames: list[torch.Tensor], path: Path) -> None:
    """Frames of [n, H, W, 3], the n side by side, as a GIF."""
    path.parent.mkdir(parents=True, exist_ok=True)
    images = [Image.fromarray(torch.cat(list(frame.cpu()), dim=1).numpy()) for frame in frames]
    images[0].save(path, save_all=True, append_images=images[1:], duration=40, loop=0)


@torch.no_grad()
def demonstrate(agent: Agent, env: envs.VecEnv, noise: float = 0.5) -> tuple[TensorDict, torch.Tensor]:
    """One episode of the expert in each env: the observations, and the tokens of what it would do from there.

    Its actions are carried out with noise, so that it also shows how to recover.
    """
    obs, active = env.reset(), torch.ones(env.num_envs, dtype=torch.bool, device=env.device)
    generator = torch.Generator(env.device).manual_seed(DEMO_SEED)
    seen, labels, running = [], [], []
    while active.any():
        action = env.expert_action()
        seen.append(obs.select("rgb", "instruction")), running.append(active)
        labels.append(action * active[:, None])  # after the end: nothing
        shaken = action + noise * torch.randn(action.shape, generator=generator, device=env.device)
        obs, _, terminated, truncated, _ = env.step(shaken, active)
        active = active & ~(terminated | truncated)
    labels += [torch.zeros_like(labels[0])] * (agent.chunk - 1)
    chunks = torch.stack([torch.stack(labels[t : t + agent.chunk], 1) for t in range(len(seen))])
    rows = torch.stack(running).view(-1)
    return torch.cat(seen)[rows], agent.tokens(chunks.flatten(0, 1))[rows]


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


def frozen_checksum(agent: Agent) -> float:
    frozen = [p for p in agent.parameters() if not p.requires_grad]
    return checksum(frozen).item() if frozen else 0.0


def load_trained(agent: Agent, folder: Path, weights: dict, about: dict, args: Args) -> None:
    for name in (
        "env_id",
        "model_path",
        "action_bins",
        "action_chunk",
        "lora_rank",
    ):  # what gives the weights their meaning
        old, new = about["args"].get(name), getattr(args, name)
        if old != new:
            fail(f"{folder} was trained with {name} = {old}, not {new}: set --{name.replace('_', '-')} to match it")
    mine = trainable(agent)
    if about["frozen"] != frozen_checksum(agent):
        fail(f"{folder} was trained on other weights than those that --model-path {args.model_path} has now")
    if weights.keys() != mine.keys() or any(weights[k].shape != p.shape for k, p in mine.items()):
        fail(f"{folder} does not fit this model: other weights were trained, or of another shape")
    agent.load_state_dict(weights, strict=False)


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


def open_model(args: Args, accelerator: Accelerator, env: envs.VecEnv) -> Agent:
    """The policy from --model-path, the same on every rank, or one line on why there is none."""
    path, errors = args.model_path, []
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        if path == "tiny":
            path = str(Path(args.output_dir) / f"tiny_{args.seed}")
            if accelerator.is_main_process and not Path(path).exists():
                part = Path(path).with_name(f".tiny_{args.seed}.{os.getpid()}")
                make_tiny(part, args.seed)
                part.rename(path)
    except OSError as error:
        shutil.rmtree(part, ignore_errors=True)
        if not Path(path).exists():  # if it does by now, another run was quicker
            errors = [f"cannot write {path}: {error.strerror}; choose another --output-dir"]
    if errors := gather_object(errors):
        fail(errors[0])
    try:
        config = AutoConfig.from_pretrained(path)
        if type(config) not in AutoModelForImageTextToText._model_mapping:
            raise ValueError(f"it is a {config.model_type} model, which takes no pictures and answers in words")
        torch.manual_seed(args.seed)  # the same value head and adapters on every rank
        agent = Agent(env, path, args)
        seen = agent.see(env.reset()[:1])
        with torch.no_grad():
            tokens, drawn, _, _ = agent.eval()(seen, deterministic=True)
            if not torch.allclose(drawn, agent(seen, tokens)[1], atol=0.1):
                raise ValueError("actions drawn token by token and scored in one pass have different probabilities")
    except Exception as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        errors = [f"cannot use --model-path {args.model_path}: {reason}"]
    if errors := gather_object(errors):
        fail(errors[0])
    return agent


def main(args: Args) -> None:
    # ---- Set up
    check_args(args)
    check_model(args)
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
        # CRUCIAL: seeded by the global index of each env: with seed + rank, ranks would share most initial states.
        env = envs.make(args.env_id, args.num_envs, device=device, seed=args.seed, first_env=rank * args.num_envs)
        if not {"rgb", "instruction"} <= set(env.single_observation_space.keys()):
            raise ValueError(f"{args.env_id} has no pictures and instructions: give an env that does, such as Tabletop")
        if args.action_chunk > env.max_episode_steps:
            limit = f"an episode of {args.env_id} has {env.max_episode_steps} steps"
            raise ValueError(f"--action-chunk {args.action_chunk} is longer than an episode: {limit}")
        if args.bc_updates and not hasattr(env, "expert_action"):
            raise ValueError(f"{args.env_id} has no expert to clone: set --bc-updates 0 and start from a tuned model")
    except ValueError as error:
        errors = [str(error)]
    if errors := gather_object(errors):
        fail(errors[0])
    agent = open_model(args, accelerator, env).to(device)
    # A backward that counts for nothing tells which weights take part at all: DDP waits for a gradient of every one.
    next_obs = env.reset()
    tokens = torch.zeros(1, agent.chunk * agent.size, dtype=torch.int64, device=device)
    sum(x.sum() for x in agent(agent.see(next_obs[:1]), tokens)[1:]).backward()
    for p in agent.parameters():
        p.requires_grad_(p.grad is not None)
    agent.zero_grad()

    if args.evaluate:
        if not (found := broadcast_object_list([find_checkpoints(Path(args.checkpoint), "best")[:1]])[0]):
            fail(f"no checkpoint at {args.checkpoint}: give a run folder or one of its checkpoints/step_* folders")
        folder, weights, about, _, _ = load_together(found, accelerator, fall_back=False)
        load_trained(agent, folder, weights, about, args)
        scores = evaluate_policy(
            agent, eval_env, accelerator, folder / "evaluation.gif" if render else None, args.num_envs
        )
        accelerator.print(f"{folder}: " + ", ".join(f"{k} {v:.4g}" for k, v in scores.items()))
        accelerator.end_training()
        return

    stem = f"{args.env_id.replace('/', '-')}__ppo_vla_async__{args.seed}"
    run_dir, may_exist, loaded = open_run(args, accelerator, stem)
    if loaded:
        folder, weights, about, trainer, local = loaded
        load_trained(agent, folder, weights, about, args)
    generator = torch.Generator(device).manual_seed(args.seed + 1_000_003 * (rank + 1))  # other actions on every rank
    head = [name for name in trainable(agent) if name.startswith("value_head")]
    groups = [{"params": [p for k, p in trainable(agent).items() if (k in head) == last]} for last in (False, True)]
    optimizer = torch.optim.AdamW(groups, lr=args.learning_rate, eps=1e-5, weight_decay=0.0, fused=True)
    # Before `prepare`, which changes the forward of what it is given.
    inference = share_frozen(agent)
    # CRUCIAL: what is trained on goes through `model`. `agent`, the same networks without DDP's hooks, would learn on
    # each rank alone, and no error would tell.
    model, optimizer = accelerator.prepare(agent, optimizer)
    # Accelerate's wrapper is there for fp16; without that, all it adds is a search of the disk at every step.
    adam = optimizer if accelerator.scaler else optimizer.optimizer
    # CRUCIAL: DDP regroups its gradients after its first backward, which changes the order of summation. A backward
    # that counts for nothing lets a resumed run sum in the same order as one that never stopped.
    accelerator.backward(0.0 * sum(x.sum() for x in model(agent.see(next_obs[:1]), tokens)[1:]))
    optimizer.zero_grad()
    torch.manual_seed(args.seed + 1_000_003 * (rank + 1))  # other minibatches on every rank

    # ---- Resume
    global_step, iteration, steps_trained, best = 0, 0, 0, None
    if loaded:
        accelerator.print(f"resuming {folder}")
        for name, new in asdict(args).items():
            if (old := about["args"].get(name)) != new and name not in ("resume", "run_name", "output_dir"):
                accelerator.print(f"  --{name.replace('_', '-')} is {new}, was {old}")
        global_step, iteration, steps_trained = trainer["global_step"], trainer["iteration"], trainer["steps_trained"]
        best = trainer["best"]
        optimizer.optimizer.load_state_dict(trainer["optimizer"])
        changed = f"{trainer['world_size']} processes became {world}" if trainer["world_size"] != world else None
        if not changed and len(local["obs"]["rgb"]) != args.num_envs:
            changed = "--num-envs changed"
        elif not changed and local["env"] is None:
            changed = f"{args.env_id} cannot save its state"
        if changed:
            accelerator.print(f"  envs start new episodes, because {changed}: the run goes on, but not bit for bit")
            next_obs = env.reset(episode=iteration)
            torch.manual_seed(args.seed + 1_000_003 * (rank + 1) + iteration)
            generator.manual_seed(args.seed + 1_000_003 * (rank + 1) + iteration)
        else:
            env.load_state_dict(local["env"])
            next_obs = TensorDict(local["obs"], [args.num_envs]).to(device)
            generator.set_state(local["generator"])
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
    about = {"env_id": args.env_id, "args": asdict(args), "frozen": frozen_checksum(agent)}
    versions = {k: version(k) for k in ("torch", "accelerate", "tensordict", "gymnasium", "transformers", "peft")}
    parameters = list(trainable(agent).values())
    sizes = {"charts/trainable_parameters": sum(p.numel() for p in parameters)}
    sizes["charts/total_parameters"] = sum(p.numel() for p in agent.parameters())
    accelerator.print(f"{args.env_id}: {world} x {args.num_envs} envs on {device.type}, writing to {run_dir}")
    accelerator.print("{:,} of {:,} parameters are trained".format(*sizes.values()))
    bar = accelerator.is_main_process and sys.stderr.isatty()
    progress = tqdm(total=args.total_timesteps, initial=global_step, unit="step", unit_scale=True, disable=not bar)

    start_time = last_print = time.time()
    skipped_in_a_row = torch.zeros((), device=device)

    # ---- Cloning: the model learns to speak in actions from a few demonstrations
    if args.bc_updates and not loaded:
        demo_env = envs.make(args.env_id, args.bc_episodes, device=device, seed=DEMO_SEED)
        seen, labels = demonstrate(agent, demo_env)
        agent.train(args.gradient_checkpointing)
        for update in range(1, args.bc_updates + 1):
            for group in optimizer.param_groups:
                group["lr"] = args.bc_learning_rate * (1.0 - (update - 1) / args.bc_updates)
            rows = torch.randint(len(labels), (args.bc_batch,), device=device)
            _, logprob, _, value = model(agent.see(seen[rows]), labels[rows])
            accelerator.backward(0.0 * value.sum() - logprob.mean())
            norm = accelerator.clip_grad_norm_(parameters, args.max_grad_norm)
            adam.found_inf = (~norm.isfinite()).float()
            adam.step()
            adam.zero_grad()
            if accelerator.is_main_process and (update == args.bc_updates or time.time() > last_print + 5):
                last_print = time.time()
                print(f"cloning {update}/{args.bc_updates}  loss {-logprob.mean().item():.3f}", flush=True)
        optimizer.optimizer.state.clear()
        video = run_dir / "videos" / "step_0.gif" if render else None
        log = evaluate_policy(agent, eval_env, accelerator, video, args.num_envs)
        accelerator.log(log, step=0)
        accelerator.print("cloned: " + ", ".join(f"{k} {v:.4g}" for k, v in log.items()))

    N, T = args.num_envs, args.num_chunks
    size = N * T // args.num_minibatches
    blank = torch.zeros(N * T, agent.chunk * agent.size, dtype=torch.int64, device=device)  # any tokens: values only
    start_iteration, timed_steps, timed_seconds, most_stale = iteration, 0, 0.0, 0
    stopping, evaluating, rest_at = False, False, None
    with Collector(inference, env, generator, args) as collector:
        if global_step < args.total_timesteps:
            collector.start(agent, next_obs, iteration)
        while global_step < args.total_timesteps or rest_at:
            iteration += 1
            begin = time.perf_counter()
            progressed = min(global_step / args.total_timesteps, 1.0)
            decay = 1.0 - 0.9 * progressed * args.anneal_lr
            rates = [args.learning_rate * decay, args.value_learning_rate * decay]
            for group, rate in zip(optimizer.param_groups, rates):
                group["lr"] = rate

            # ---- Rollout: the thread's next one
            rollout = collector.get()
            learner_wait = time.perf_counter() - begin
            stale = iteration - 1 - rollout["version"]
            data = rollout["data"]
            batch = data.reshape(-1)

            # ---- Advantages, by the proximal policy: the newest weights, which this update starts from
            with torch.no_grad():
                agent.eval()
                parts = [agent(part["obs"], part["tokens"]) for part in batch.split(size)]
                batch["prox_logprob"], values = (torch.cat([p[i] for p in parts]) for i in (1, 3))
                next_value = torch.cat([agent(x, blank[: len(x)])[3] for x in rollout["next_seen"].split(size)])
                final_values = values * batch["truncated"]  # if the simulator gives no final observations
                if "final_obs" in rollout:
                    seen = rollout["final_obs"].split(size)
                    final_values[rollout["final_rows"]] = torch.cat([agent(x, blank[: len(x)])[3] for x in seen])
                values, final_values = values.view(T, N), final_values.view(T, N)
                rewards, steps = data["reward"], data["steps"]
                finite = all(x.isfinite().all() for x in (rewards, final_values, next_value))
                # CRUCIAL: k steps lie between a chunk and what follows it, fewer where the episode ended inside.
                advantages = compute_gae(
                    rewards, values, next_value, data["terminated"], data["truncated"], final_values,
                    args.gamma**steps, args.gae_lambda,
                )  # fmt: skip
                batch["advantage"], batch["return"] = advantages.view(-1), (advantages + values).view(-1)

                # ---- The one exchange before the update: counts, flags, moments and sums over episodes of each rank
                a, r = advantages.double(), batch["return"].double()
                sums = torch.stack([a.sum(), r.sum(), a.square().sum(), r.square().sum()])
                flags = [steps.sum(), not finite, bool(stop_signals)]
                flags = torch.tensor(flags, dtype=torch.float64, device=device)
                gathered = accelerator.gather(torch.cat([flags, sums, rollout["episodes"]])[None]).cpu()
            flags, sums, episodes = gathered.split([len(flags), len(sums), 4], dim=1)
            steps_taken, broken, stop = flags.long().unbind(1)
            if broken.any():
                where = ", ".join(map(str, broken.nonzero().view(-1).tolist()))
                fail(f"NaN or infinity from {args.env_id} on rank {where} in iteration {iteration}: no update was made")
            samples, steps_taken = world * N * T, int(steps_taken.sum())
            before_step, global_step = global_step, global_step + steps_taken
            finished = global_step >= args.total_timesteps
            stopping = stopping or bool(stop.any())
            mean, r_mean, square, r_square = (sums.sum(0) / samples).tolist()
            var, r_var = max(square - mean**2, 0.0), max(r_square - r_mean**2, 1e-12)
            if args.norm_adv:
                batch["advantage"] = (batch["advantage"] - mean) / (math.sqrt(var) + 1e-8)
            # Evaluating, saving and leaving need the thread at rest and its queue empty. No rank can have started a
            # rollout after number iteration + max_staleness - 1, so all of them rest after that one: nothing is lost.
            evaluating = evaluating or due(args.eval_interval, before_step, global_step)
            saving = due(args.save_interval, before_step, global_step)
            if rest_at is None and (finished or stopping or evaluating or saving):
                rest_at = iteration + args.max_staleness
                collector.rest(rest_at)

            # ---- Update
            agent.train(args.gradient_checkpointing)
            logged = torch.zeros(len(LOSSES), dtype=torch.float64, device=device)
            norms, skipped, epochs = torch.zeros((), device=device), torch.zeros((), device=device), 0
            while epochs < args.update_epochs:
                epochs += 1
                shuffled = batch[torch.randperm(len(batch), device=device)]
                before = logged.clone()
                for mb in shuffled.split(size):
                    parts = mb.split(size // args.gradient_accumulation)
                    for i, part in enumerate(parts):
                        # Gradients are exchanged once a minibatch, with its last part.
                        with accelerator.no_sync(model) if i < len(parts) - 1 else nullcontext():
                            _, newlogprob, entropy, newvalue = model(part["obs"], part["tokens"])
                            loss, part_logged = vla_loss(
                                newlogprob, entropy, newvalue, part["prox_logprob"], part["logprob"], part["advantage"],
                                part["return"], args.clip_coef, args.clip_coef_high, args.behaviour_weight_cap,
                                args.ent_coef, args.vf_coef,
                            )  # fmt: skip
                            # All ranks hold as many samples: the mean over ranks is the mean over all of them.
                            accelerator.backward(loss / size)
                        logged = logged + part_logged
                    if iteration <= args.value_warmup:  # the value head alone, and nothing for Adam to remember
                        for p in optimizer.param_groups[0]["params"]:
                            p.grad = None
                    norm = accelerator.clip_grad_norm_(parameters, args.max_grad_norm)
                    # CRUCIAL: after the all-reduce a NaN is on every rank, and the fused Adam skips its step where this
                    # is 1: on all of them together, and without a look at the GPU.
                    bad = adam.found_inf = (~norm.isfinite()).float()
                    adam.step()
                    adam.zero_grad()
                    skipped, skipped_in_a_row = skipped + bad, (skipped_in_a_row + 1.0) * bad
                    norms = norms + norm.nan_to_num(0.0, 0.0)
                if args.target_kl:
                    # CRUCIAL: the KL of all ranks, so that all of them stop together.
                    sums = accelerator.gather((logged - before)[None]).sum(0)
                    if sums[LOSSES.index("losses/approx_kl")].item() / samples > args.target_kl:
                        break
            steps_trained += steps_taken * epochs
            train_seconds = time.perf_counter() - begin - learner_wait

            # ---- Metrics
            metrics = dict(zip(LOSSES, logged * world / (samples * epochs)))
            metrics |= {"losses/grad_norm": norms / (epochs * args.num_minibatches), "losses/skipped_updates": skipped}
            if iteration == start_iteration + 1:
                metric_names = sorted(set(gather_object(list(rollout["metrics"]))))
            metrics |= {f"env/{k}": rollout["metrics"].get(k, 0.0) * world / steps_taken for k in metric_names}
            metrics |= {"time/collect": rollout["seconds"], "time/train": train_seconds}
            metrics |= {"time/collector_wait": rollout["wait"], "time/learner_wait": learner_wait}
            metrics |= {"charts/staleness": stale, "charts/queue_length": len(collector.queue)}
            metrics |= {"skipped_in_a_row": skipped_in_a_row, "checksum": 0.0}
            if args.check_interval and iteration % args.check_interval == 0:
                metrics["checksum"] = checksum(parameters)
            on_gpu = device.type == "cuda"
            peak = (
                torch.cuda.max_memory_allocated(device)
                if on_gpu
                else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            )
            metrics["charts/memory_gb"] = peak / (1e9 if on_gpu else 1e6)
            values = torch.stack([torch.as_tensor(x, dtype=torch.float64, device=device) for x in metrics.values()])
            on_ranks = dict(zip(metrics, accelerator.gather(values[None]).T.cpu()))  # [W] each
            checksums = on_ranks.pop("checksum")
            if differ := (checksums != checksums[0]).nonzero().view(-1).tolist():
                fail(f"weights of rank {', '.join(map(str, differ))} differ from rank 0's in "
                     f"iteration {iteration}: go on from the last checkpoint with --resume {run_dir}")  # fmt: skip
            if (in_a_row := int(on_ranks.pop("skipped_in_a_row")[0])) >= MAX_SKIPPED:
                fail(f"the last {in_a_row} updates had NaN or infinite gradients and were skipped: "
                     f"try a smaller --learning-rate than {args.learning_rate}")  # fmt: skip
            most_stale = max(most_stale, int(on_ranks["charts/staleness"].max()))
            log = {k: x.mean().item() for k, x in on_ranks.items()} | {"losses/explained_variance": 1.0 - var / r_var}
            log |= {"charts/staleness_max": most_stale, "charts/policy_version": iteration}
            log |= {"charts/learning_rate": rates[0], "charts/minibatch_size": samples / args.num_minibatches}
            log |= {"charts/steps_sampled": global_step, "charts/steps_trained": steps_trained}
            log |= {"charts/iteration": iteration} | sizes
            if iteration > start_iteration + 1:  # the first one warms up
                timed_steps, timed_seconds = timed_steps + steps_taken, timed_seconds + time.perf_counter() - begin
                log["charts/SPS"] = timed_steps / timed_seconds
            count, *totals = episodes.sum(0).tolist()
            names = ("charts/episodic_return", "charts/episodic_length", "charts/success_rate")
            log |= {k: x / count for k, x in zip(names, totals) if count and not math.isnan(x)}

            # ---- Evaluate and save, with the thread at rest
            if iteration == rest_at:
                improved = False
                if finished or (evaluating and not stopping):
                    eval_start = time.perf_counter()
                    video = run_dir / "videos" / f"step_{global_step}.gif" if render else None
                    log |= evaluate_policy(agent, eval_env, accelerator, video, args.num_envs)
                    log["time/eval"] = time.perf_counter() - eval_start
                    score = [log.get("eval/success_rate", 0.0), log.get("eval/episodic_return", -math.inf)]
                    improved = best is None or score > best
                    best = score if improved else best
                if finished:
                    told_wrong = evaluate_policy(agent, eval_env, accelerator, None, args.num_envs, shift=1)
                    log["eval/success_rate_wrong_instruction"] = told_wrong.get("eval/success_rate", math.nan)
                trainer = {
                    "optimizer": optimizer.optimizer.state_dict(), "best": best, "global_step": global_step,
                    "iteration": iteration, "steps_trained": steps_trained, "world_size": world, "versions": versions,
                }  # fmt: skip
                cuda_rng = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
                local = {
                    "env": env.state_dict(), "obs": dict(collector.obs.items()), "generator": generator.get_state(),
                    "rng": torch.get_rng_state(), "cuda_rng": cuda_rng,
                }  # fmt: skip
                folder = run_dir / "checkpoints" / f"step_{global_step}"
                save_checkpoint(folder, accelerator, trainable(agent), about, trainer, local, improved)
                if accelerator.is_main_process:
                    for old in find_checkpoints(run_dir, "best")[1 + args.keep_checkpoints :]:
                        shutil.rmtree(old, ignore_errors=True)
                errors = []
                try:
                    if improved and accelerator.is_main_process:
                        export(agent, run_dir / "policy")
                except Exception as error:
                    errors = [f"cannot write {run_dir / 'policy'}: {error}; the checkpoint is saved"]
                if errors := gather_object(errors):
                    fail(errors[0])
                evaluating, rest_at = False, None

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
            resting = rest_at is None and (finished or stopping)
            if accelerator.is_main_process and not bar and (resting or iteration == 1 or time.time() > last_print + 5):
                last_print = time.time()
                print(f"step {global_step}/{args.total_timesteps}  {shown}", flush=True)
            if resting:
                break
            collector.publish(agent)
            if rest_at is None:  # with the new weights, it may go on
                collector.rest(math.inf)

    # ---- Finish
    progress.close()
    if accelerator.is_main_process and stopping and not finished:
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
