"""ppo_vla_async.py: the policy on real transformers models, chunks, the collector thread, faults and resume."""

import json
import math
import os
import random
import shutil
import signal
import threading
import time
from importlib.util import find_spec
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
import transformers
import tyro
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from conftest import ROOT, Process, script, workers
from PIL import Image
from tensordict import TensorDict
from test_resume import assert_same, checkpoint, cut_back, newest, scores, wait_for
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import envs
import ppo_vla_async as vla
from ppo_vla_async import LOSSES, Args, Collector, TokenAgent, collect, compute_gae, share_frozen, trainable, vla_loss

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
SMALL = {"num_envs": 4, "num_chunks": 4, "num_minibatches": 2, "update_epochs": 1, "eval_episodes": 2}
SMALL |= {"bc_updates": 2, "bc_episodes": 4, "bc_batch": 4, "total_timesteps": 64, "value_warmup": 0}


def small(tmp_path, **changes) -> Args:
    return Args(**({"output_dir": str(tmp_path), "run_name": "run"} | SMALL | changes))


def options(**changes) -> list[str]:
    return [w for k, v in (SMALL | changes).items() for w in (f"--{k.replace('_', '-')}", str(v))]


def collectors() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "collector"]


@pytest.fixture(autouse=True)
def no_thread_is_left_behind():
    yield
    assert not collectors()


# ---- Models: small and random, but of the real classes, in folders as any checkpoint


def tokenizer(*images: str):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokens = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(sorted(alphabet))}, merges=[]))
    tokens.pre_tokenizer, tokens.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokens.add_tokens([f"<unused_{i}>" for i in range(300)])
    named = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokens, extra_special_tokens=list(images), **named)


def ids(tokens) -> dict:
    return {
        "pad_token_id": tokens.pad_token_id,
        "bos_token_id": tokens.bos_token_id,
        "eos_token_id": tokens.eos_token_id,
    }


LAYERS = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


def make_idefics3(folder: Path) -> None:
    vla.make_tiny(folder, 1)


def make_paligemma(folder: Path) -> None:
    pictures = transformers.SiglipImageProcessorPil(size={"height": 32, "width": 32})
    pictures.image_seq_length = 4
    processor = transformers.PaliGemmaProcessor(pictures, tokenizer("<image>"))
    tokens = processor.tokenizer
    heads = {"num_key_value_heads": 1, "head_dim": 16, "initializer_range": 0.2}
    text = LAYERS | heads | ids(tokens) | {"model_type": "gemma", "vocab_size": len(tokens)}
    vision = LAYERS | {"model_type": "siglip_vision_model", "image_size": 32, "patch_size": 16, "projection_dim": 32}
    image = tokens.convert_tokens_to_ids("<image>")
    config = transformers.PaliGemmaConfig(
        text_config=text, vision_config=vision, image_token_id=image, projection_dim=32, hidden_size=32
    )
    torch.manual_seed(0)
    transformers.PaliGemmaForConditionalGeneration(config).save_pretrained(folder)
    processor.save_pretrained(folder)


def make_qwen(folder: Path) -> None:
    """Its processor wants torchvision for videos; tokenizer and image processor are there without it."""
    tokens = tokenizer("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    tokens.chat_template = (
        "{% for m in messages %}{% for c in m['content'] %}{% if c['type'] == 'image' %}"
        "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ c['text'] }}{% endif %}{% endfor %}{% endfor %}"
    )
    pictures = transformers.Qwen2VLImageProcessorPil(patch_size=8, merge_size=2, min_pixels=32**2, max_pixels=32**2)
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    text = LAYERS | ids(tokens) | {"vocab_size": len(tokens), "num_key_value_heads": 1, "rope_parameters": rope}
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 32}
    vision |= {"patch_size": 8, "window_size": 32, "fullatt_block_indexes": [1]}
    names = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"}
    names |= {"vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"}
    special = {k: tokens.convert_tokens_to_ids(v) for k, v in names.items()}
    config = transformers.Qwen2_5_VLConfig(
        text_config=text | {"initializer_range": 0.2}, vision_config=vision, initializer_range=0.2, **special
    )
    torch.manual_seed(0)
    for part in (transformers.Qwen2_5_VLForConditionalGeneration(config), tokens, pictures):
        part.save_pretrained(folder)


MODELS = {"idefics3": make_idefics3, "paligemma": make_paligemma, "qwen2_5_vl": make_qwen}


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """The folder of each model, made when it is first asked for."""
    made = {}

    def folder(name: str) -> str:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("models") / name
            MODELS[name](made[name])
        return str(made[name])

    return folder


@pytest.mark.parametrize("lora_rank", [None, 4])
@pytest.mark.parametrize("name", MODELS)
def test_sampled_and_scored_probabilities_agree(folders, name, lora_rank):
    """Drawn token by token with the cache, and scored in one pass: the same, also for prompts of different lengths."""
    env = envs.make("Tabletop", 6, seed=1)
    env.instructions = ["reach the block that is ruby", "lime", "go to the block that is at the left"]
    torch.manual_seed(0)
    agent = TokenAgent(env, folders(name), Args(action_chunk=2, lora_rank=lora_rank)).eval()
    for key, p in agent.named_parameters():
        if "lora_B" in key:  # zero at the start: then an adapter does nothing
            nn.init.normal_(p, std=0.1)
    assert agent.text_attention_mask.sum(1).unique().numel() == 3
    obs = env.reset()
    seen, generator = agent.see(obs), torch.Generator().manual_seed(0)
    everybodys = torch.get_rng_state()
    with torch.no_grad():
        tokens, logprob, entropy, value = agent(seen, generator=generator)
        assert torch.equal(torch.get_rng_state(), everybodys)  # the other thread's numbers stay as they are
        again = agent(seen, tokens)
        greedy = agent(seen, deterministic=True)[0]
    assert tokens.shape == (6, 4) and len(logprob.unique()) == 6 and 0 < entropy.min() < 4 * math.log(256)
    for one, two in zip((logprob, entropy, value), again[1:]):
        torch.testing.assert_close(one, two, atol=1e-5, rtol=0)
    # What the log-probability is of: the model's own logits after the tokens before, over the bins alone.
    if name == "idefics3" and lora_rank is None:
        prompt = agent.text_input_ids[seen["instruction"][:1], : agent.prompt_length]
        row = torch.cat([prompt, agent.bins[tokens[:1]]], 1)
        mask = agent.text_attention_mask[seen["instruction"][:1]]
        pictures = agent.processor.image_processor([[Image.fromarray(obs["rgb"][0].numpy())]], return_tensors="pt")
        with torch.no_grad():
            logits = agent.model(input_ids=row, attention_mask=mask, **pictures).logits[0, -5:-1, agent.bins]
        torch.testing.assert_close(logits.log_softmax(-1).gather(1, tokens[0, :, None]).sum(), logprob[0])
        assert greedy[0, 0] == logits[0].argmax()


def test_prompts_and_pictures_reach_the_model(folders):
    """Another instruction, another picture: another distribution."""
    env = envs.make("Tabletop", 4, seed=1)
    agent = TokenAgent(env, folders("idefics3"), Args()).eval()
    obs = env.reset()
    tokens = torch.full((4, 2), 100)
    with torch.no_grad():
        base = agent(agent.see(obs), tokens)[1]
        other = obs.clone()
        other["instruction"] = (obs["instruction"] + 1) % 3
        assert (agent(agent.see(other), tokens)[1] - base).abs().min() > 1e-6
        other = obs.clone()
        other["rgb"] = obs["rgb"].roll(1, 0)
        assert (agent(agent.see(other), tokens)[1] - base).abs().min() > 1e-6


def test_dropout_is_off(tmp_path, folders):
    """Also in training mode, which gradient checkpointing needs."""
    shutil.copytree(folders("idefics3"), tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["text_config"]["attention_dropout"] = config["vision_config"]["attention_dropout"] = 0.5
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    env = envs.make("Tabletop", 4, seed=1)
    agent = TokenAgent(env, str(tmp_path / "model"), Args()).train()
    seen, tokens = agent.see(env.reset()), torch.full((4, 2), 7)
    assert torch.equal(agent(seen, tokens)[1], agent(seen, tokens)[1])


@pytest.mark.smoke
def test_actions_and_tokens_are_inverse(folders):
    agent = TokenAgent(envs.make("Tabletop", 1), folders("idefics3"), Args(action_chunk=3))
    tokens = torch.randint(256, (50, 6))
    actions = agent.actions(tokens)
    assert actions.shape == (50, 3, 2) and actions.abs().max() < 1
    assert torch.equal(agent.tokens(actions), tokens)
    assert torch.equal(agent.tokens(torch.tensor([[[-5.0, 5.0]] * 3])), torch.tensor([[0, 255] * 3]))
    special = set(agent.processor.tokenizer.all_special_ids)
    assert not special & set(agent.bins.tolist()) and len(agent.bins.unique()) == 256
    assert not set(agent.bins.tolist()) & set(agent.text_input_ids.unique().tolist())


def test_accumulated_gradients_are_those_of_the_whole_minibatch(tmp_path):
    for parts in (1, 4):
        vla.main(small(tmp_path, run_name=f"{parts}", gradient_accumulation=parts, total_timesteps=16, max_staleness=0))
    one, two = (checkpoint(newest(tmp_path / name)) for name in ("1", "4"))
    for k, v in one.items():
        if k.startswith("model."):
            torch.testing.assert_close(v, two[k], atol=1e-4, rtol=0)


@pytest.fixture
def fresh_accelerate():
    """Its state, which holds the precision, is the process's."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def test_half_precision_and_checkpointing_run_and_evaluate(tmp_path, capsys, fresh_accelerate):
    settings = {"mixed_precision": "bf16", "gradient_checkpointing": True, "lora_rank": 2}
    vla.main(small(tmp_path, total_timesteps=16, **settings))
    vla.main(small(tmp_path, evaluate=True, checkpoint=str(tmp_path / "run"), **settings))
    assert "eval/episodes 2" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="trained on other weights than those that --model-path tiny has"):
        vla.main(small(tmp_path, evaluate=True, checkpoint=str(tmp_path / "run"), seed=2, **settings))
    AcceleratorState._reset_state(reset_partial_state=True)
    settings["mixed_precision"] = "no"
    with pytest.raises(SystemExit, match="mixed_precision = bf16, not no: set --mixed-precision to match it$"):
        vla.main(small(tmp_path, evaluate=True, checkpoint=str(tmp_path / "run"), **settings))


def test_the_value_head_warms_up_alone(tmp_path):
    vla.main(small(tmp_path, value_warmup=1, total_timesteps=16, max_staleness=0, bc_updates=0))
    base = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "tiny_1").state_dict()
    saved = checkpoint(newest(tmp_path / "run"))
    for k, v in base.items():
        assert torch.equal(v, saved[f"model.model.{k}"]), k
    # Adam knows how large the gradients of the policy are: its first step is no leap.
    squares = [x["exp_avg_sq"].amax() for x in saved["trainer"]["optimizer"]["state"].values()]
    assert len(squares) > 4 and min(squares) > 0


def test_demonstrations_of_chunks_end_with_the_episode(folders):
    env = envs.make("Tabletop", 8, seed=3)
    agent = TokenAgent(env, folders("idefics3"), Args(action_chunk=16))
    obs, labels = vla.demonstrate(agent, env, 20)  # in three rounds, of which the last is not full
    assert len(obs) == len(labels) and obs["rgb"].dtype == torch.uint8
    for row in labels[:8]:  # from the start of each episode: moves, and then nothing
        rest = (row == 0).all(1).long()
        assert 0 < rest.sum() < 16 and torch.equal(rest, rest.sort().values)


@pytest.mark.parametrize("name", ["paligemma", "qwen2_5_vl"])
def test_other_models_train_from_their_folder(tmp_path, folders, name):
    vla.main(
        small(tmp_path, model_path=folders(name), total_timesteps=32, action_chunk=2, lora_rank=2, freeze_vision=True)
    )
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["charts/trainable_parameters"] < summary["charts/total_parameters"]
    assert math.isfinite(summary["losses/policy_loss"])


def test_success_is_told_by_the_instruction_that_an_episode_began_with(folders):
    """Here those with the second one succeed, and an env that has ended goes on with another."""
    env = envs.make("Tabletop", 32, seed=1)
    asked = env.reset()["instruction"]
    step = env.step

    def judged(*args, **look):
        *rest, info = step(*args, **look)
        info["episode"] = info["episode"] | {"success": (asked == 1).float()}
        return *rest, info

    env.step = judged
    agent = TokenAgent(env, folders("idefics3"), Args(action_chunk=4))
    scores = vla.evaluate_policy(agent, env, Accelerator(cpu=True), None, 32)
    expected = {name: float(number == 1) for number, name in enumerate(env.instructions)}
    assert {name: scores[f"eval/success_rate/{name}"] for name in env.instructions} == expected
    assert scores["eval/success_rate"] == (asked == 1).float().mean().item()


@pytest.mark.skipif(find_spec("metaworld") is None, reason="metaworld is not installed")
def test_metaworld_is_cloned_and_learned_from(tmp_path):
    """Tasks of a set, two cameras and the hand's state: drawn in the collector's thread, evaluated in this one."""
    vla.main(small(
        tmp_path, env_id="metaworld/faucet-open-v3,faucet-close-v3", model_path="tiny-pi0", action_chunk=5,
        env_options=("camera=corner2,wrist", "max_episode_steps=20"), total_timesteps=160, reward_scale=0.02,
    ))  # fmt: skip
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    for name in ("success_rate", "success_rate_wrong_instruction"):
        assert {f"eval/{name}/open the faucet", f"eval/{name}/close the faucet"} <= set(summary)
    assert math.isfinite(summary["losses/policy_loss"]) and summary["losses/entropy"] != 0


# ---- Precision


def with_peaked_head(agent: TokenAgent, factor: float) -> TokenAgent:
    with torch.no_grad():
        agent.whole.get_output_embeddings().weight.mul_(factor)
    return agent


@pytest.mark.parametrize("lora_rank", [None, 4])
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_not_rounded_in_half_precision(folders, name, lora_rank):
    """With large logits, those in bf16 are off by whole units: here they are the exact product of state and head."""
    env = envs.make("Tabletop", 8, seed=1)
    torch.manual_seed(0)
    agent = TokenAgent(env, folders(name), Args(action_chunk=2, lora_rank=lora_rank, mixed_precision="bf16")).eval()
    model = agent.model.get_base_model() if lora_rank else agent.model
    head = model.get_output_embeddings()
    with torch.no_grad():
        head.weight.mul_(30)
    states = []
    model.base_model.register_forward_hook(lambda module, inputs, out: states.append(out.last_hidden_state))
    seen = agent.see(env.reset())

    def exact(state, tokens):
        logits = state.double() @ head.weight[agent.bins].double().T
        return logits.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1).sum(-1)

    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        tokens, drawn, _, _ = agent(seen, generator=torch.Generator().manual_seed(0))
        drawn_state = torch.stack([state[:, -1] for state in states], 1)
        states.clear()
        scored = agent(seen, tokens)[1]
    assert drawn.dtype == scored.dtype == torch.float32
    torch.testing.assert_close(drawn, exact(drawn_state, tokens).float(), atol=1e-3, rtol=0)
    torch.testing.assert_close(scored, exact(states[0][:, -4:], tokens).float(), atol=1e-3, rtol=0)


@pytest.mark.parametrize("name", ["idefics3", "paligemma"])
def test_sampled_and_scored_probabilities_agree_in_half_precision(folders, name):
    env = envs.make("Tabletop", 16, seed=1)
    env.instructions = ["reach the block that is ruby", "lime", "go to the block that is at the left"]
    torch.manual_seed(0)
    agent = with_peaked_head(TokenAgent(env, folders(name), Args(action_chunk=4, mixed_precision="bf16")).eval(), 10)
    seen = agent.see(env.reset())
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        tokens, drawn, _, _ = agent(seen, generator=torch.Generator().manual_seed(0))
        assert (drawn - agent(seen, tokens)[1]).abs().max() < 0.04
    agent.check(env.reset(), torch.bfloat16)


def test_all_that_the_output_layer_does_is_done(folders, tmp_path):
    """A bias and soft-capping; what else a model may do there is refused."""
    env = envs.make("Tabletop", 4, seed=1)
    agent = TokenAgent(env, folders("paligemma"), Args()).eval()
    head = agent.model.get_output_embeddings()
    head.bias = nn.Parameter(torch.randn(head.out_features))
    agent.model.config.text_config.final_logit_softcapping = 0.8
    agent.check(env.reset(), None)
    head.register_forward_hook(lambda module, inputs, out: out / 1.1)
    with pytest.raises(ValueError, match="does more to the logits than a bias and soft-capping"):
        agent.check(env.reset(), None)


@pytest.mark.parametrize("half", [None, torch.bfloat16])
def test_the_check_at_the_start_finds_wrong_positions(folders, half):
    env = envs.make("Tabletop", 4, seed=1)
    agent = with_peaked_head(TokenAgent(env, folders("qwen2_5_vl"), Args(action_chunk=2)).eval(), 10)
    agent.check(env.reset(), half)
    right = agent._text

    def wrong(instruction, tokens):
        text = right(instruction, tokens)
        if tokens.shape[1] == 2:  # the third of four, where they are drawn one by one
            text["position_ids"] = text["position_ids"] * 10
        return text

    agent._text = wrong
    with pytest.raises(ValueError, match="drawn token by token and scored in one pass"):
        agent.check(env.reset(), half)


@pytest.mark.parametrize("lora_rank", [None, 2])
@pytest.mark.parametrize("name", MODELS)
def test_the_collector_keeps_its_weights_as_autocast_would_cast_them(folders, name, lora_rank):
    """The same actions and probabilities, bit for bit, without a cast of every weight for every token."""
    env = envs.make("Tabletop", 4, seed=1)
    torch.manual_seed(0)
    agent = TokenAgent(env, folders(name), Args(action_chunk=2, lora_rank=lora_rank)).eval()
    for key, p in agent.named_parameters():
        if "lora_B" in key:
            nn.init.normal_(p, std=0.1)
    copied = share_frozen(agent, torch.bfloat16)
    collector = Collector(copied, env, torch.Generator(), Args())
    seen = agent.see(env.reset())
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        one = agent(seen, generator=torch.Generator().manual_seed(0))
        two = copied(seen, generator=torch.Generator().manual_seed(0))
    for a, b in zip(one, two):
        assert torch.equal(a, b)
    kept = {name for name, p in zip(trainable(agent), collector.weights) if p.dtype == torch.float32}
    words = ("norm", "ln_q", "embed", "head", "bias") if lora_rank is None else ("value_head",)
    linear = {f"{name}.weight" for name, m in agent.named_modules() if isinstance(m, nn.Linear | nn.Conv2d | nn.Conv3d)}
    heads = {name for name in linear if name.startswith("value_head") or name.endswith("lm_head.weight")}
    assert not kept & (linear - heads) and heads & set(trainable(agent)) <= kept
    assert all(any(word in name for word in words) for name in kept), kept
    assert [x.dtype for x in collector.snapshot] == [x.dtype for x in collector.weights]
    with torch.no_grad():
        for p in trainable(agent).values():
            p.mul_(1.5)
    collector.publish(agent)
    for x, p in zip(collector.snapshot, trainable(agent).values()):
        assert torch.equal(x, p.to(x.dtype))


# ---- Pictures


@pytest.mark.parametrize("name", MODELS)
def test_pictures_are_those_of_the_image_processor(folders, name):
    env = envs.make("Tabletop", 3, seed=1)
    agent = TokenAgent(env, folders(name), Args())
    generator = torch.Generator().manual_seed(1)
    obs = env.reset()
    obs["rgb"] = torch.randint(256, obs["rgb"].shape, dtype=torch.uint8, generator=generator)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mine = agent.see(obs)
    assert agent.pictures.in_torch
    agent.pictures.in_torch = False
    theirs = agent.see(obs)
    assert mine.keys() == theirs.keys()
    for key, x in theirs.items():
        assert mine[key].dtype == x.dtype, key
        torch.testing.assert_close(mine[key], x, atol=1e-6, rtol=0)


def edit(path: Path, **changes) -> None:
    content = json.loads(path.read_text())
    content["image_processor"] |= changes
    path.write_text(json.dumps(content))


@pytest.mark.parametrize("resample", range(6))
def test_pictures_are_resized_once(tmp_path, folders, resample):
    """Straight to the size of the vision encoder, not to that of all tiles first; in each way that PIL knows."""
    shutil.copytree(folders("idefics3"), tmp_path / "model")
    tiles = {"do_resize": True, "do_image_splitting": True, "size": {"longest_edge": 2048}, "resample": resample}
    edit(tmp_path / "model" / "processor_config.json", **tiles)
    env = envs.make("Tabletop", 2, seed=1)
    env.single_observation_space = gym.spaces.Dict({"rgb": gym.spaces.Box(0, 255, (40, 56, 3), np.uint8)})
    agent = TokenAgent(env, str(tmp_path / "model"), Args())
    assert agent.pictures.in_torch
    generator = torch.Generator().manual_seed(1)
    rgb = torch.randint(256, (2, 40, 56, 3), dtype=torch.uint8, generator=generator)
    seen = agent.see(TensorDict({"rgb": rgb, "instruction": torch.tensor([0, 1])}, [2]))
    for row, x in zip(rgb, seen["pixel_values"]):
        expected = np.array(Image.fromarray(row.numpy()).resize((64, 64), resample))
        off = (x[0, 0].permute(1, 2, 0) - (torch.from_numpy(expected) / 255 - 0.5) / 0.5).abs() * 255 / 2
        assert off.max() < 1.01 and (off > 0.01).float().mean() < 1e-3  # at most a grey level, hardly anywhere


def test_an_image_processor_of_another_kind_is_called_itself(tmp_path, capsys, monkeypatch):
    """Where the same is not done in torch, the run says so."""
    monkeypatch.setattr(transformers.Idefics3ImageProcessorPil, "normalize", lambda self, x, mean, std: x - 3.0)
    vla.main(small(tmp_path, total_timesteps=16, bc_updates=0))
    text = "pictures are prepared on the CPU, one by one, by Idefics3ImageProcessor"
    assert capsys.readouterr().out.count(text) == 1


def test_positions_are_computed_once(folders, monkeypatch):
    """Qwen's loop over samples runs once for the prompts, and not in a forward."""
    env = envs.make("Tabletop", 4, seed=1)
    agent = TokenAgent(env, folders("qwen2_5_vl"), Args(action_chunk=2)).eval()
    monkeypatch.setattr(transformers.Qwen2_5_VLModel, "get_rope_index", None)
    seen = agent.see(env.reset())
    with torch.no_grad():
        tokens, drawn, _, _ = agent(seen, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(drawn, agent(seen, tokens)[1], atol=1e-5, rtol=0)


# ---- A device that is not the CPU


class There(torch.Tensor):
    """A tensor on the CPU that passes for one on another device (which is called meta)."""

    @staticmethod
    def __new__(cls, inner):
        settings = {"strides": inner.stride(), "storage_offset": inner.storage_offset(), "dtype": inner.dtype}
        return cls._make_wrapper_subclass(cls, inner.size(), device="meta", **settings)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError("only inside of OtherDevice")

    def tolist(self):
        OtherDevice.syncs += 1
        return self.inner.tolist()


class OtherDevice(TorchDispatchMode):
    """Runs everything on the CPU, refuses to mix devices, and counts what makes the host wait for the device."""

    syncs = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = func.overloadpacket.__name__
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        there = any(isinstance(x, There) for x in tensors)
        if there and name not in ("_to_copy", "copy_"):
            assert all(x.device.type == "meta" or x.dim() == 0 for x in tensors), f"{func} mixes devices"
        if there and name in ("_local_scalar_dense", "nonzero", "equal"):
            OtherDevice.syncs += 1
        if kwargs.get("device") is not None:
            back = there and name == "_to_copy" and kwargs["device"].type == "cpu"
            OtherDevice.syncs += back
            there = kwargs["device"].type == "meta"
            kwargs["device"] = torch.device("cpu")
        args_here, kwargs_here = tree_map(self._here, (args, kwargs))
        out = func(*args_here, **kwargs_here)
        if name.endswith("_") and isinstance(args[0], torch.Tensor):
            return args[0]
        return tree_map(lambda x: There(x) if there and isinstance(x, torch.Tensor) else x, out)

    @staticmethod
    def _here(x):
        return x.inner if isinstance(x, There) else x


class ThereEnv(envs.VecEnv):
    """An env whose tensors are on the other device."""

    def __init__(self, env):
        self.env, self.device = env, torch.device("meta")
        for name in ("num_envs", "max_episode_steps", "single_action_space", "instructions"):
            setattr(self, name, getattr(env, name))
        if not isinstance(env, Line):
            self.single_observation_space = env.single_observation_space

    def _there(self, x):
        if isinstance(x, TensorDict):
            return TensorDict(self._there(dict(x.items())), x.batch_size)
        return {k: self._there(v) for k, v in x.items()} if isinstance(x, dict) else x.to("meta")

    def reset(self, episode=0):
        return self._there(self.env.reset(episode))

    def step(self, action, active=None, look=True):
        *results, info = self.env.step(action.inner, active.inner, look)
        return *(self._there(x) for x in results), self._there(info)


@pytest.fixture
def other_device(monkeypatch):
    autocast, tensor = torch.autocast, torch.tensor
    monkeypatch.setattr(torch, "autocast", lambda device, **settings: autocast("cpu", **settings))

    def tensor_there(x, **settings):
        if str(settings.get("device")) != "meta":
            return tensor(x, **settings)
        return tensor(x, **settings | {"device": "cpu"}).to("meta")

    monkeypatch.setattr(torch, "tensor", tensor_there)
    with OtherDevice() as mode:
        yield mode


@pytest.mark.parametrize("name", ["idefics3", "paligemma"])
def test_a_model_runs_where_its_env_is(tmp_path, folders, name, other_device, fresh_accelerate):
    """Checked at the start, drawn, scored and collected: no tensor of another device, and none left behind."""
    env = ThereEnv(envs.make("Tabletop", 4, seed=1))
    args = small(tmp_path, model_path=folders(name), action_chunk=2)
    agent = vla.open_model(args, vla.Accelerator(cpu=True), env)
    assert {x.device.type for x in [*agent.parameters(), *agent.buffers()]} == {"meta"}
    with torch.no_grad():
        OtherDevice.syncs = 0
        agent.see(env.reset())
        assert OtherDevice.syncs == 0
        rollout = collect(agent, env, env.reset(), 2, 0.9, torch.Generator(), lambda: False)
        assert agent(rollout.data.reshape(-1)["obs"], rollout.data["drawn"].flatten(0, 1))[1].device.type == "meta"
    assert all(isinstance(x, There) for x in rollout.tensors())


@pytest.mark.parametrize("chunk", [1, 2])
def test_collecting_hardly_waits_for_the_device(chunk, other_device):
    """Once for a rollout."""
    env = ThereEnv(Line())
    agent = Toy(chunk)
    zeros = torch.zeros(3).to("meta")
    tokens = torch.zeros(3, chunk, dtype=torch.int64).to("meta")
    agent.forward = lambda obs, generator: (tokens, zeros, zeros, zeros)
    OtherDevice.syncs = 0
    rollout = collect(agent, env, env.reset(), 6, 0.5, None, lambda: False)
    assert rollout.final_seen is not None and OtherDevice.syncs <= 1


# ---- Chunks


class Line(envs.VecEnv):
    """Env i earns step + 1 at each step and ends after 3 + i steps: by success where i is even, else by the clock."""

    def __init__(self, num_envs=3):
        self.num_envs, self.device, self.max_episode_steps = num_envs, torch.device("cpu"), 8
        self.single_action_space, self.calls = gym.spaces.Box(-1.0, 1.0, (1,)), 0
        self.length = 3 + torch.arange(num_envs)

    def _obs(self):
        return TensorDict({"rgb": self.clock[:, None].clone(), "instruction": self.episode.clone()}, [self.num_envs])

    def reset(self, episode=0):
        self.clock, self.episode = torch.zeros(2, self.num_envs, dtype=torch.int64)
        return self._obs()

    def step(self, action, active=None, look=True):
        self.calls += 1
        self.clock += active
        reward = torch.where(active, self.clock, 100).float()  # nobody may count that of rows that are not active
        done = (self.clock >= self.length) & active
        even = torch.arange(self.num_envs) % 2 == 0
        final = self._obs()
        episode = {"return": self.clock.float(), "length": self.clock.clone(), "success": even.float()}
        self.clock[done], self.episode = 0, self.episode + done
        return self._obs(), reward, done & even, done & ~even, {"final_obs": final, "episode": episode, "metrics": {}}


class Toy(nn.Module):
    """A policy of another kind: all that the collector asks for."""

    def __init__(self, chunk=2):
        super().__init__()
        self.chunk, self.executed, self.size, self.weight = chunk, chunk, 1, nn.Parameter(torch.zeros(1))

    def see(self, obs):
        return TensorDict({"x": obs["rgb"].float(), "instruction": obs["instruction"]}, obs.batch_size)

    def forward(self, obs, tokens=None, deterministic=False, generator=None):
        n = obs.batch_size[0]
        tokens = torch.randint(9, (n, self.chunk), generator=generator) if tokens is None else tokens
        return tokens, torch.zeros(n) + self.weight, torch.zeros(n), obs["x"][:, 0]

    def actions(self, tokens):
        return tokens[..., None].float()


@pytest.mark.smoke
def test_a_chunk_by_hand():
    """Chunks of two: rewards of the steps carried out, their number, ends inside a chunk, final observations."""
    env = Line()
    rollout = collect(Toy(2), env, env.reset(), 3, 0.5, None, lambda: False)
    data = rollout.data
    # env 0 ends at step 3 (success), env 1 at step 4 (clock), env 2 at step 5 (success); rewards 1, 2, 3, ...
    assert data["steps"].T.tolist() == [[2, 1, 2], [2, 2, 2], [2, 2, 1]]
    expected = [[1 + 1.0, 3.0, 1 + 1.0], [2.0, 3 + 2.0, 2.0], [2.0, 5.0, 5.0]]
    assert data["reward"].T.tolist() == expected
    assert data["terminated"].T.tolist() == [[False, True, False], [False] * 3, [False, False, True]]
    assert data["truncated"].T.tolist() == [[False] * 3, [False, True, False], [False] * 3]
    assert rollout.final_rows.tolist() == [1 * 3 + 1] and rollout.final_seen["x"].tolist() == [[4.0]]
    assert rollout.episodes.tolist() == [3, 3 + 4 + 5, 3 + 4 + 5, 2]
    assert data["obs"]["x"][:, 0, 0].tolist() == [0, 2, 0]  # held at the new episode's start until the chunk is over
    values, steps = data["obs"]["x"][..., 0], data["steps"]
    final = torch.zeros(3, 3)
    final[1, 1] = 4.0
    advantages = compute_gae(
        data["reward"],
        values,
        torch.tensor([2.0, 2.0, 0.0]),
        data["terminated"],
        data["truncated"],
        final,
        0.5**steps,
        0.9,
    )
    assert advantages[1, 0] == 3.0 - 2.0  # success: nothing follows
    assert advantages[1, 1] == 5.0 + 0.25 * 4.0 - 2.0  # the clock: the value of the last observation, two steps on
    torch.testing.assert_close(advantages[0, 1], 2.0 + 0.25 * 2.0 - 0.0 + 0.25 * 0.9 * advantages[1, 1])


def test_the_run_discounts_by_the_steps_of_each_chunk(tmp_path, monkeypatch):
    """And values the end of an episode where the clock ended it, and there alone."""
    collected, real_collect, real = [], vla.collect, vla.compute_gae
    monkeypatch.setattr(vla, "collect", lambda *a: (collected.append(real_collect(*a)), collected[-1])[1])
    checked = []

    def check(rewards, values, next_value, terminated, truncated, final_values, gamma, gae_lambda):
        data = collected[len(checked)].data
        assert torch.equal(gamma, 0.7 ** data["steps"]) and torch.equal(rewards, data["reward"])
        assert torch.equal(final_values != 0, truncated)
        checked.append(truncated.sum().item())
        return real(rewards, values, next_value, terminated, truncated, final_values, gamma, gae_lambda)

    monkeypatch.setattr(vla, "compute_gae", check)
    vla.main(small(tmp_path, action_chunk=3, num_chunks=8, total_timesteps=150, max_staleness=0, bc_updates=0))
    assert sum(checked) > 4 and any((r.data["steps"] < 3).any() for r in collected)


# ---- Success alone


@pytest.mark.smoke
@pytest.mark.parametrize("chunk", [1, 2])
def test_success_alone_pays_one_at_the_end_of_a_success(chunk):
    """Env 0 and 2 of three end in success, env 1 by the clock; what the env itself pays does not count."""
    env = Line()
    data = collect(Toy(chunk), env, env.reset(), 8 // chunk, 1.0, None, lambda: False, only_success=True).data
    assert data["reward"].sum() > 2 and torch.equal(data["reward"], data["terminated"].float())
    assert data["truncated"][:, 1].any()


@pytest.mark.smoke
def test_whole_episodes_end_and_stay_ended():
    env = Line()
    rollout = collect(Toy(1), env, env.reset(), 8, 1.0, None, lambda: False, one_episode=True)
    assert rollout.data["active"].sum(0).tolist() == [3, 4, 5] and len(rollout.data) == 5
    assert torch.equal(rollout.data["steps"], rollout.data["active"].float())
    assert rollout.data["reward"].sum(0).tolist() == [6, 10, 15] and rollout.episodes[0] == 3


class Judge(Toy):
    """Values everything at a half."""

    def forward(self, obs, tokens=None, deterministic=False, generator=None):
        tokens, logprob, entropy, value = super().forward(obs, tokens, deterministic, generator)
        return tokens, logprob - 2.0, entropy, torch.full_like(value, 0.5)


def rollout_of(lengths: list[int], success: list[bool]) -> vla.Rollout:
    """One episode in each env: 1 at the end of a success."""
    T, N = max(lengths), len(lengths)
    step, last = torch.arange(T)[:, None], torch.tensor(lengths) - 1
    won = torch.tensor(success)
    x = torch.arange(T * N).view(T, N, 1).float()
    data = {"obs": {"x": x, "instruction": x[..., 0].long()}, "drawn": torch.zeros(T, N, 1, dtype=torch.int64)}
    data |= {"logprob": torch.zeros(T, N), "active": step <= last, "steps": (step <= last).float()}
    data |= {"reward": ((step == last) & won).float()}
    data |= {"terminated": (step == last) & won, "truncated": (step == last) & ~won}
    data = TensorDict(data, [T, N])
    return vla.Rollout(data, data["obs"][-1], None, torch.zeros(0), None, torch.zeros(4), {})


@pytest.mark.smoke
def test_groups_by_hand():
    """Success minus the mean of the group at every step; without groups where all do the same, and idle rows."""
    rollout = rollout_of([2, 3, 1, 3, 3, 3, 1, 2], [True, False] + 2 * [True] + 2 * [False] + [True, True])
    batch = vla.estimate(Judge(1), rollout, 4, Args(advantage="group", group_size=2, reward="success"))
    assert batch["obs"]["x"][:, 0].tolist() == [0, 1, 8, 9, 17]  # steps of envs 0 and 1, rows of eight
    assert batch["advantage"].tolist() == [0.5, -0.5, 0.5, -0.5, -0.5]
    assert batch["prox_logprob"].tolist() == [-2.0] * 5 and batch["logprob"].tolist() == [0.0] * 5
    four = vla.estimate(Judge(1), rollout, 4, Args(advantage="group", group_size=4, reward="success"))
    assert sorted(set(four["advantage"].tolist())) == [-0.75, -0.5, 0.25, 0.5] and len(four) == 9 + 9
    silent = rollout_of([1, 2, 2, 2], [True, True, False, False])
    assert len(vla.estimate(Judge(1), silent, 4, Args(advantage="group", group_size=2, reward="success"))) == 0


@pytest.mark.smoke
def test_with_success_alone_the_clock_is_a_failure():
    for reward, after in (("success", 0.0), ("env", 0.5)):
        rollout = rollout_of([2], [False])
        batch = vla.estimate(Judge(1), rollout, 4, Args(reward=reward, gamma=1.0, gae_lambda=0.0))
        assert batch["advantage"].tolist() == [0.0, after - 0.5]


@pytest.mark.smoke
def test_scaled_rewards_scale_what_is_learned_from():
    """With values of 0.5 throughout: the return is all reward, the advantage that less what was expected."""
    for scale, returns in ((1.0, [1.0, 1.0]), (0.1, [0.1, 0.1])):
        batch = vla.estimate(Judge(1), rollout_of([2], [True]), 4, Args(reward_scale=scale, gamma=1.0, gae_lambda=1.0))
        assert batch["return"].tolist() == pytest.approx(returns)
    rollout = rollout_of([2, 3], [True, False])
    group = vla.estimate(Judge(1), rollout, 4, Args(advantage="group", group_size=2, reward_scale=0.1))
    assert sorted(set(group["advantage"].tolist())) == pytest.approx([-0.05, 0.05])


GROUPS = {"advantage": "group", "group_size": 4, "num_envs": 8, "bc_updates": 0, "max_grad_norm": 1e9}


@pytest.mark.parametrize("mute", [[0, 4], [0, 8], [8, 8]])
def test_gradient_of_groups_is_that_of_the_joined_batch(tmp_path, mute):
    """With unequal numbers of samples, with none on one rank, and with none at all: then no step is made."""
    settings = GROUPS | {"num_minibatches": 1, "update_epochs": 2, "total_timesteps": 1, "max_staleness": 0}
    settings |= {"learning_rate": 1e-3}
    changes = SMALL | settings | {"mute": mute}
    workers[2].run(name="ppo_vla_async", case="gradient", output=str(tmp_path), changes=changes)
    ranks = [torch.load(tmp_path / f"record_{rank}.pt", weights_only=False) for rank in range(2)]
    if mute == [8, 8]:
        assert [rank["updates"] for rank in ranks] == [0, 0]
        return
    assert [rank["updates"] for rank in ranks] == [2, 2]
    agent = TokenAgent(envs.make("Tabletop", 2), str(tmp_path / "tiny_1"), Args()).eval()
    names = ranks[0]["weights"][0].keys()
    for update in (0, 1):
        agent.load_state_dict({name: ranks[0]["weights"][update][name] for name in names})
        agent.zero_grad()
        loss, counts = 0.0, []
        for rank, muted in zip(ranks, mute):
            batch = [b for b in rank["batches"] if "inputs" in b][update]
            if muted < 8:
                _, logprob, entropy, value = agent(batch["seen"], batch["action"])
                loss = loss + vla_loss(logprob, entropy, value, *batch["inputs"][3:])[0]
            counts.append(len(batch["action"]) if muted < 8 else 0)
        assert counts[0] > 1.3 * counts[1]
        (loss / sum(counts)).backward()
        expected = [p.grad for p in agent.parameters() if p.grad is not None]
        assert sum(g.abs().sum() for g in expected) > 1e-3
        for rank in ranks:
            assert len(rank["gradients"][update]) == len(expected)
            for gradient, g in zip(rank["gradients"][update], expected):
                torch.testing.assert_close(gradient, g, atol=1e-5, rtol=1e-4)


def test_groups_resume_exactly_without_staleness(tmp_path):
    settings = GROUPS | {"max_staleness": 0, "save_interval": 1, "keep_checkpoints": 100, "total_timesteps": 500}
    vla.main(small(tmp_path, run_name="whole", **settings))
    steps = sorted(int(p.name.split("_")[1]) for p in (tmp_path / "whole" / "checkpoints").glob("step_*"))
    assert len(steps) > 3
    cut_back(tmp_path / "whole", "parts", steps[1])
    vla.main(small(tmp_path, run_name="parts", resume="auto", **settings))
    assert_same(checkpoint(newest(tmp_path / "whole")), checkpoint(newest(tmp_path / "parts")))


# ---- Loss


def test_with_nothing_stale_the_loss_is_that_of_ppo():
    import ppo_ddp

    g = torch.Generator().manual_seed(0)
    new, old, advantage, value, returns, entropy = torch.randn(6, 32, generator=g) * 0.3
    zero = torch.zeros(32)
    mine, logged = vla_loss(new, entropy, zero, old, old, advantage, zero, 0.2, 0.2, 5.0, 0.01, 0.0)
    theirs, _ = ppo_ddp.ppo_loss(new, entropy, zero, old, advantage, zero, zero, 0.2, 0.01, 0.0, False)
    torch.testing.assert_close(mine, theirs)
    logged = dict(zip(LOSSES, logged.tolist()))
    assert logged["losses/behaviour_weight"] == 32 and logged["losses/behaviour_capped"] == 0


def test_stale_data_is_weighted_and_capped():
    new = torch.tensor([0.0, 0.0], requires_grad=True)
    behaviour, advantage, zero = torch.tensor([-1.0, -3.0]), torch.ones(2), torch.zeros(2)
    loss, logged = vla_loss(new, zero, zero, zero, behaviour, advantage, zero, 0.2, 0.28, 5.0, 0.0, 0.0)
    (slope,) = torch.autograd.grad(loss, new)
    torch.testing.assert_close(slope, -torch.tensor([math.e, 5.0]))
    assert dict(zip(LOSSES, logged.tolist()))["losses/behaviour_capped"] == 1


def test_nan_gradients_never_reach_the_weights(tmp_path, monkeypatch):
    real, calls = vla.vla_loss, []

    def poisoned(*inputs):
        calls.append(1)
        loss, logged = real(*inputs)
        return (loss * math.nan if len(calls) == 2 else loss), logged

    monkeypatch.setattr(vla, "vla_loss", poisoned)
    vla.main(small(tmp_path, total_timesteps=16, max_staleness=0, bc_updates=0))
    saved = checkpoint(newest(tmp_path / "run"))
    assert all(x.isfinite().all() for k, x in saved.items() if k.startswith("model."))
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["losses/skipped_updates"] == 1


# ---- The collector


def toy_args(**changes) -> Args:
    return Args(num_chunks=2, gamma=0.9, **changes)


def test_thousands_of_rollouts_with_random_delays():
    """Staleness never above 2, every rollout used once and in order, every env step counted."""
    env, generator, pace = Line(2), torch.Generator().manual_seed(0), random.Random(0)
    step = env.step

    def slow_step(*a, **k):
        if pace.random() < 0.02:
            time.sleep(pace.random() * 0.004)
        return step(*a, **k)

    env.step = slow_step
    agent = Toy(1)
    steps = staleness = 0
    learner = random.Random(1)
    seen = []
    with Collector(share_frozen(agent), env, generator, toy_args(max_staleness=2)) as collector:
        collector.start(agent, env.reset(), 0)
        for n in range(3000):
            rollout = collector.next_rollout()
            assert n - 2 <= rollout.version <= n
            assert torch.all(rollout.data["logprob"] == float(rollout.version))  # all of it from one version
            staleness = max(staleness, n - rollout.version)
            steps += int(rollout.data["steps"].sum())
            seen.append(rollout.data["obs"]["x"][0].clone())
            if learner.random() < 0.05:
                time.sleep(learner.random() * 0.004)
            with torch.no_grad():
                agent.weight += 1.0
            assert len(collector.queue) <= 2
            collector.publish(agent, 3000 if n >= 2999 - 2 else math.inf)
        assert collector.started == 3000 and not collector.queue
        assert steps == 2 * env.calls == 2 * 2 * 3000  # two envs, two chunks of one step
    assert staleness == 2
    plain = Line(2)
    obs = plain.reset()
    for x in seen:  # the same rollouts that one thread makes one after the other: none lost, none twice
        assert torch.equal(x, obs["rgb"].float())
        for _ in range(2):
            obs = plain.step(None, torch.ones(2, dtype=torch.bool))[0]


class Plain(Collector):
    """The same without a thread: a rollout is made when it is asked for."""

    def start(self, agent, obs, iteration):
        self.obs, self.started, self.version = obs, iteration, iteration - 1
        self.publish(agent)

    def next_rollout(self):
        with torch.no_grad():
            self._collect_one()
        return self.queue.popleft()


def test_a_pause_lets_the_started_rollouts_end_and_starts_no_other():
    env, agent = Line(2), Toy(1)
    with Collector(share_frozen(agent), env, torch.Generator(), toy_args(max_staleness=1)) as collector:
        collector.start(agent, env.reset(), 0)
        collector.publish(agent, 2)  # weights with which the third could start
        collector.next_rollout()
        collector.next_rollout()
        time.sleep(0.1)
        assert collector.started == 2 and not collector.queue and env.calls == 2 * 2
        collector.publish(agent)
        wait_for(lambda: collector.queue, 10)
        assert collector.next_rollout().version == 2 and collector.started > 2


def test_every_tensor_of_a_rollout_is_kept_for_the_learners_stream(monkeypatch):
    """The allocator must not reuse its memory while the learner's stream still reads it."""
    env = Line()
    rollout = collect(Toy(2), env, env.reset(), 3, 0.5, None, lambda: False)
    rollout.metrics["speed"] = torch.zeros(3)
    rollout.ready = object()
    waited, recorded = [], set()

    class Stream:
        wait_event = waited.append

    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda x, stream: recorded.add(x.data_ptr()))
    collector = Collector(Toy(), env, None, toy_args())
    collector.stream = Stream()
    collector.queue.append(rollout)
    assert collector.next_rollout() is rollout and waited == [rollout.ready]
    expected = set()
    for value in vars(rollout).values():
        parts = value if isinstance(value, dict) else {"": value}
        for part in parts.values():
            leaves = part.values(True, True) if isinstance(part, TensorDict) else [part]
            expected |= {x.data_ptr() for x in leaves if isinstance(x, torch.Tensor)}
    assert len(expected) > 12 and recorded == expected


@pytest.mark.smoke
def test_without_staleness_threads_change_nothing(tmp_path, monkeypatch):
    """max_staleness 0 equals a plain synchronous loop, bit for bit."""
    vla.main(small(tmp_path, run_name="threads", max_staleness=0, total_timesteps=96))
    monkeypatch.setattr(vla, "Collector", Plain)
    vla.main(small(tmp_path, run_name="plain", max_staleness=0, total_timesteps=96))
    one, two = (checkpoint(newest(tmp_path / name)) for name in ("threads", "plain"))
    assert_same(one, two)
    drop = ("charts/queue_length", "charts/memory_gb")
    metrics = [{k: v for k, v in scores(tmp_path / name).items() if k not in drop} for name in ("threads", "plain")]
    assert_same(*metrics)


def test_frozen_weights_are_shared_and_trained_ones_are_not(tmp_path, folders):
    """Copy and snapshot together cost twice the trainable weights, and nothing else."""
    env = envs.make("Tabletop", 2)
    agent = TokenAgent(env, folders("idefics3"), Args(lora_rank=2))
    copied = share_frozen(agent)
    collector = Collector(copied, env, torch.Generator(), Args())
    mine = {p.data_ptr() for p in [*agent.parameters(), *agent.buffers()]}
    added = [p for p in [*copied.parameters(), *copied.buffers(), *collector.snapshot] if p.data_ptr() not in mine]
    size = sum(p.numel() * p.element_size() for p in added)
    assert size == 2 * sum(p.numel() * p.element_size() for p in trainable(agent).values())
    assert 0 < size < 0.5 * sum(p.numel() * p.element_size() for p in agent.parameters())
    with torch.no_grad():
        for p in trainable(agent).values():
            p.add_(1.0)
    assert not any(torch.equal(a, b) for a, b in zip(collector.weights, trainable(agent).values()))


def test_frozen_weights_stay_as_they_are(tmp_path, monkeypatch):
    agents, real = [], vla.open_model
    monkeypatch.setattr(vla, "open_model", lambda *a: (agents.append(real(*a)), agents[-1])[1])
    vla.main(small(tmp_path, lora_rank=2, total_timesteps=32))
    base = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "tiny_1").state_dict()
    mine = agents[0].model.get_base_model().state_dict()
    frozen = {k.replace(".base_layer", ""): v for k, v in mine.items() if "lora_" not in k}
    assert_same(dict(base), frozen)


# ---- Faults


def failing(monkeypatch, where: str):
    """Break the env, the policy or the learner in the middle of the run."""
    calls = []

    def fail_at(n, function):
        def broken(*a, **k):
            calls.append(threading.current_thread().name)
            if len(calls) == n:
                raise ZeroDivisionError(f"the {where} broke")
            return function(*a, **k)

        return broken

    if where == "env":
        make = envs.make

        def broken_make(*a, **k):
            env = make(*a, **k)
            if k.get("seed") == 1:
                env.step = fail_at(10, env.step)
            return env

        monkeypatch.setattr(envs, "make", broken_make)
    elif where == "policy":
        monkeypatch.setattr(TokenAgent, "actions", fail_at(25, TokenAgent.actions))
    else:
        monkeypatch.setattr(vla, "vla_loss", fail_at(3, vla.vla_loss))
    return calls


@pytest.mark.parametrize("where", ["env", "policy", "learner"])
def test_an_exception_anywhere_ends_the_run(tmp_path, monkeypatch, where):
    """With its traceback, and without a thread left behind, whichever thread it came from."""
    calls = failing(monkeypatch, where)
    begin = time.time()
    with pytest.raises((RuntimeError, ZeroDivisionError)) as error:
        vla.main(small(tmp_path, total_timesteps=10_000, bc_updates=0, eval_episodes=1))
    root = error.value.__cause__ or error.value
    assert str(root) == f"the {where} broke" and time.time() - begin < 20
    assert calls[-1] == ("MainThread" if where == "learner" else "collector")
    assert root.__traceback__.tb_next is not None
    assert not collectors()


def test_ctrl_c_on_one_rank_saves_and_ends_all(tmp_path):
    """All of them drain their queues, save together and leave; and one process can go on from there."""
    words = [*options(total_timesteps=10**6, save_interval=32), "--output-dir", tmp_path, "--run-name", "run"]
    process = Process([*script("ppo_vla_async.py", 2), *words])
    wait_for(lambda: (tmp_path / "run" / "checkpoints" / "latest").exists(), 90)
    os.kill(pids_of(process)[1], signal.SIGINT)
    code, text = process.finish(60)
    assert code == 0 and "stopped by a signal" in text, text[-3000:]
    saved = checkpoint(newest(tmp_path / "run"))["trainer"]
    assert saved["global_step"] == 32 * saved["iteration"]
    vla.main(small(tmp_path, resume="auto", total_timesteps=saved["global_step"] + 16))
    assert checkpoint(newest(tmp_path / "run"))["trainer"]["iteration"] > saved["iteration"]


def test_ctrl_c_in_one_process(tmp_path, monkeypatch, capsys):
    real = vla.vla_loss

    def interrupted(*a):
        if not calls:
            os.kill(os.getpid(), signal.SIGINT)
        calls.append(1)
        return real(*a)

    calls = []
    monkeypatch.setattr(vla, "vla_loss", interrupted)
    vla.main(small(tmp_path, total_timesteps=10**6))
    assert "stopped by a signal" in capsys.readouterr().out and not collectors()
    saved = checkpoint(newest(tmp_path / "run"))["trainer"]
    assert 16 <= saved["global_step"] == 16 * saved["iteration"] <= 64


def pids_of(process: Process) -> dict[int, int]:
    import psutil

    found = {}
    for child in psutil.Process(process.pid).children(recursive=True):
        if "ppo_vla_async.py" in " ".join(child.cmdline()):
            found[int(child.environ().get("RANK", -1))] = child.pid
    return found


def test_a_killed_rank_takes_the_others_along(tmp_path):
    words = [*options(total_timesteps=10**6), "--output-dir", tmp_path, "--run-name", "run"]
    process = Process([*script("ppo_vla_async.py", 2), *words])
    wait_for(lambda: list((tmp_path / "run").glob("events*")), 90)
    time.sleep(2)
    pids = pids_of(process)
    os.kill(pids[1], signal.SIGKILL)
    code, _ = process.finish(60)
    assert code != 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids.values())


# ---- Resume and what is written


def test_resume_is_exact_without_staleness(tmp_path):
    settings = {"max_staleness": 0, "save_interval": 16, "keep_checkpoints": 100, "total_timesteps": 96, "lora_rank": 2}
    vla.main(small(tmp_path, run_name="whole", **settings))
    cut_back(tmp_path / "whole", "parts", 48)
    vla.main(small(tmp_path, run_name="parts", resume="auto", **settings))
    assert_same(checkpoint(newest(tmp_path / "whole")), checkpoint(newest(tmp_path / "parts")))


def test_a_stale_run_drains_its_queue_before_it_saves(tmp_path, capsys, monkeypatch):
    settings = {"max_staleness": 2, "save_interval": 16, "keep_checkpoints": 100, "eval_interval": 48}
    steps, at_save, real = [], [], vla.Run.save
    make = envs.make

    def counting(*a, **k):
        env = make(*a, **k)
        if k.get("seed") == 1:
            step = env.step
            env.step = lambda *a, **k: (steps.append(1), step(*a, **k))[1]
        return env

    monkeypatch.setattr(envs, "make", counting)
    monkeypatch.setattr(
        vla.Run, "save", lambda self, p, *a: (at_save.append((len(steps), p.global_step)), real(self, p, *a))
    )
    vla.main(small(tmp_path, total_timesteps=96, **settings))
    # Every step that the thread has taken by then is in the weights: nothing is in flight.
    assert at_save and all(4 * taken == global_step for taken, global_step in at_save)
    for folder in (tmp_path / "run" / "checkpoints").glob("step_*"):
        saved = checkpoint(folder)
        assert saved["trainer"]["global_step"] == 16 * saved["trainer"]["iteration"]
    vla.main(small(tmp_path, total_timesteps=160, resume="auto", **settings))
    assert "resuming" in capsys.readouterr().out
    assert checkpoint(newest(tmp_path / "run"))["trainer"]["global_step"] >= 160


def test_the_policy_folder_loads_everywhere(tmp_path):
    """from_pretrained reads it, peft reads the adapters, and --model-path goes on from it."""
    vla.main(small(tmp_path))
    folder = tmp_path / "run" / "policy"
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder)
    weights = checkpoint(newest(tmp_path / "run"))
    for name, p in model.state_dict().items():
        assert torch.equal(p, weights[f"model.model.{name}"]), name
    actions = json.loads((folder / "actions.json").read_text())
    assert len(actions["token_ids"]) == len(actions["centres"]) == 256 and actions["chunk"] == 1
    statistics = json.loads((folder / "norm_stats.json").read_text())["norm_stats"]
    assert statistics == {"actions": {"mean": [0, 0], "std": [1, 1]}}
    with pytest.raises(SystemExit, match="it predicts 1 actions per forward, not 2: set --action-chunk 1"):
        vla.main(small(tmp_path, run_name="again", model_path=str(folder), bc_updates=0, action_chunk=2))
    vla.main(small(tmp_path, run_name="again", model_path=str(folder), bc_updates=0, lora_rank=2, total_timesteps=16))
    from peft import PeftModel

    base = transformers.AutoModelForImageTextToText.from_pretrained(folder)
    adapted = PeftModel.from_pretrained(base, tmp_path / "again" / "policy")
    trained = checkpoint(newest(tmp_path / "again"))
    loaded = {k.replace(".default", ""): v for k, v in adapted.state_dict().items() if "lora_" in k}
    mine = {k.removeprefix("model.model.").replace(".default", ""): v for k, v in trained.items() if "lora_" in k}
    assert_same(loaded, mine)


def test_two_processes_agree(tmp_path):
    """Weights bit-equal (the run checks it every iteration), frozen ones untouched; and one process can go on."""
    words = [*options(check_interval=1, lora_rank=2, max_staleness=1, save_interval=32), "--output-dir", tmp_path]
    workers[2].run(name="ppo_vla_async", options=[*words, "--run-name", "run"])
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["world_size"] == 2 and summary["charts/staleness_max"] <= 1
    saved = checkpoint(newest(tmp_path / "run"))
    names = ("lora_", "value_head", "statistics")
    assert all(any(name in k for name in names) for k in saved if k.startswith("model."))
    assert saved["trainer"]["global_step"] == 32 * saved["trainer"]["iteration"]
    assert not torch.equal(saved["rank_0"]["obs"]["rgb"], saved["rank_1"]["obs"]["rgb"])


# ---- Wrong input


BAD = {
    "--model-path nowhere": "there is no --model-path nowhere: give tiny, tiny-pi0, a folder, or a hub id",
    "--env-id PushCube": ": give an env with rgb and instruction, such as Tabletop",
    "--action-chunk 17": "17 actions are executed at once, but an episode of Tabletop has 16 steps: set --execute",
    "--lora-rank 0": "--lora-rank must be 1 or more, not 0",
    "--max-staleness -1": "--max-staleness must be 0 or more",
    "--action-bins 100000": "tokens that no prompt uses, not --action-bins 100000",
    "--num-minibatches 7": "do not divide into --num-minibatches 7",
    "--behaviour-weight-cap 0": "--behaviour-weight-cap must be greater than 0",
    "--checkpoint nowhere --evaluate": "no checkpoint at nowhere",
}


@pytest.mark.parametrize("words", BAD)
def test_wrong_input_is_answered_in_one_line(words, tmp_path):
    with pytest.raises(SystemExit) as stopped:
        vla.main(tyro.cli(Args, args=[*words.split(), "--output-dir", str(tmp_path / "runs")]))
    assert BAD[words] in stopped.value.code and "\n" not in stopped.value.code
    assert not list((tmp_path / "runs").glob("Tabletop*")) and not list((tmp_path / "runs").glob(".*"))


def test_a_model_without_eyes_and_a_damaged_one_are_refused(tmp_path, folders):
    config = transformers.LlamaConfig(vocab_size=600, **LAYERS)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "blind")
    with pytest.raises(SystemExit, match="it is a llama model, which takes no pictures"):
        vla.main(small(tmp_path, model_path=str(tmp_path / "blind")))
    shutil.copytree(folders("idefics3"), tmp_path / "damaged")
    weights = tmp_path / "damaged" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(SystemExit, match="cannot use --model-path .*damaged") as stopped:
        vla.main(small(tmp_path, model_path=str(tmp_path / "damaged")))
    assert "\n" not in stopped.value.code and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "space, words",
    [
        (gym.spaces.Discrete(4), "give an env with Box actions"),
        (gym.spaces.Box(-np.inf, np.inf, (2,)), "give an env whose Box actions have bounds"),
    ],
)
def test_actions_that_bins_cannot_stand_for_are_refused(tmp_path, monkeypatch, space, words):
    from envs import tabletop

    monkeypatch.setattr(tabletop.Env, "single_action_space", space)
    with pytest.raises(SystemExit, match=words) as stopped:
        vla.main(small(tmp_path))
    assert "\n" not in stopped.value.code and "tuple" not in stopped.value.code


def test_a_folder_that_cannot_be_read_is_answered_in_one_line(tmp_path, monkeypatch):
    def exists(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(vla, "make_tiny", lambda folder, *rest: exists(folder))
    monkeypatch.setattr(Path, "exists", exists)
    with pytest.raises(SystemExit, match="Permission denied; choose another --output-dir") as stopped:
        vla.main(small(tmp_path))
    assert "\n" not in stopped.value.code


def test_the_files_of_the_tiny_model_fit_tabletop():
    """Each word of an instruction is one token; and no file names a folder of the machine that made it."""
    folder = ROOT / "models" / "tiny"
    tokens = transformers.AutoTokenizer.from_pretrained(folder)
    for instruction in envs.make("Tabletop", 1).instructions:
        assert len(tokens(instruction)["input_ids"]) == len(instruction.split())
    for file in folder.iterdir():
        assert "/" not in file.read_text().replace('"/"', "").replace("</", ""), file
