"""ppo_vla_async.py with PI0: chains of denoising, state, cameras, statistics, checkpointing, folders of others."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
import tyro
from conftest import workers
from PIL import Image
from safetensors.torch import load_file, save_file
from test_resume import assert_same, checkpoint, cut_back, newest
from test_vla import SMALL, fresh_accelerate, options, small  # noqa: F401
from torch import nn

import envs
import ppo_vla_async as vla
from envs import tabletop
from ppo_vla_async import Args, FlowAgent, Statistics, TokenAgent

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
PROMPTS = ["reach the block that is ruby", "lime", "go to the block that is at the left"]
STATISTICS = {"state": {"mean": [0.1, -0.2], "std": [0.5, 2.0]}, "actions": {"mean": [0.0, 0.1], "std": [0.4, 0.6]}}


class TwoCameras(tabletop.Env):
    def look(self, state):
        rgb = self._picture(state)
        return {"rgb": rgb, "rgb_wrist": rgb.flip(1)}


def make_env(num_envs: int = 6, cameras: int = 1) -> envs.VecEnv:
    kind = TwoCameras if cameras == 2 else tabletop.Env
    env = kind(num_envs, device="cpu", seed=1, first_env=0, group_size=1)
    env.instructions = PROMPTS
    return env


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a small PI0 with chunks of some length, with statistics, made when it is first asked for."""
    root = tmp_path_factory.mktemp("flow")

    def make(chunk: int = 1) -> str:
        path = root / f"tiny-pi0_{chunk}"
        if not path.exists():
            vla.make_tiny(path, 1, "tiny-pi0", chunk)
            (path / "norm_stats.json").write_text(json.dumps({"norm_stats": STATISTICS}))
        return str(path)

    return make


def make_agent(env, path: str, **changes) -> FlowAgent:
    torch.manual_seed(0)
    agent = FlowAgent(env, path, Args(**changes)).eval()
    for name, p in agent.named_parameters():
        if "lora_B" in name:  # zero at the start: then an adapter does nothing
            nn.init.normal_(p, std=0.1)
    return agent


KINDS = {
    "plain": {},
    "lora": {"lora_rank": 4},
    "expert": {"train_expert_only": True},
    "expert lora": {"train_expert_only": True, "lora_rank": 4},
    "chunk": {"execute": 2},
    "steps": {"denoise_steps": 7},
    "learned noise": {"learn_noise": True},
}


@pytest.mark.parametrize("cameras", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_chain_has_the_probability_with_which_it_was_drawn(folder, kind, cameras):
    """Drawn step by step on a cropped cache, scored in one pass: the same, for prompts of different lengths."""
    env = make_env(cameras=cameras)
    agent = make_agent(env, folder(3 if "execute" in KINDS[kind] else 1), **KINDS[kind])
    assert agent.text_mask.sum(1).unique().numel() == 3
    seen = agent.see(env.reset())
    everybodys = torch.get_rng_state()
    with torch.no_grad():
        drawn, logprob, entropy, value = agent(seen, generator=torch.Generator().manual_seed(0))
        assert torch.equal(torch.get_rng_state(), everybodys)  # the other thread's numbers stay as they are
        again = agent(seen, drawn)
    assert drawn.shape == (6, agent.steps + 1, agent.chunk, 8) and len(logprob.unique()) == 6
    for one, two in zip((logprob, entropy, value), again[1:]):
        torch.testing.assert_close(one, two, atol=1e-5, rtol=0)
    # By hand: Gaussians around Euler steps of the model's own velocity, over what is executed of the env's actions.
    whole = agent.whole
    total = torch.zeros(6)
    pictures = torch.stack([getattr(agent, f"pictures_{name}")(seen[name]) for name in agent.cameras], 1)
    ids, mask = agent.text_ids[seen["instruction"]], agent.text_mask[seen["instruction"]]
    state = vla.pad_to((seen["state"] - torch.tensor([0.1, -0.2])) / torch.tensor([0.5, 2.0]), 8)
    for k in range(agent.steps):
        with torch.no_grad():
            velocity = whole(
                state=state,
                noise=drawn[:, k],
                timestep=torch.full((6,), 1.0 - k / agent.steps),
                input_ids=ids,
                attention_mask=mask,
                pixel_values=pictures,
                pixel_attention_mask=torch.ones(pictures.shape[:2], dtype=torch.bool),
            ).logits
        normal = torch.distributions.Normal(drawn[:, k] - velocity / agent.steps, 0.35)
        total += normal.log_prob(drawn[:, k + 1])[:, : agent.executed, :2].sum((1, 2))
    torch.testing.assert_close(total, logprob, atol=1e-3, rtol=1e-4)
    actions = agent.actions(drawn)
    assert actions.shape == (6, agent.executed, 2)
    ends = drawn[:, -1, : agent.executed, :2]
    torch.testing.assert_close(actions, torch.tensor([0.0, 0.1]) + ends * torch.tensor([0.4, 0.6]))


@pytest.mark.parametrize("kind", ["plain", "expert", "lora"])
def test_half_precision_changes_probabilities_little(folder, kind):
    env = make_env(16)
    agent = make_agent(env, folder(), mixed_precision="bf16", **KINDS[kind])
    seen = agent.see(env.reset())
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        drawn, logprob, _, _ = agent(seen, generator=torch.Generator().manual_seed(0))
        difference = (logprob - agent(seen, drawn)[1]).abs().max()
    assert logprob.dtype == torch.float32 and difference < 0.1
    agent.check(env.reset()[:2], torch.bfloat16)


def test_words_pictures_and_state_reach_the_policy_and_noise_never_the_value(folder):
    env = make_env(cameras=2)
    agent = make_agent(env, folder())
    obs = env.reset()
    with torch.no_grad():
        drawn, _, _, value = agent(agent.see(obs), generator=torch.Generator().manual_seed(0))
        logprob = agent(agent.see(obs), drawn)[1]
        other, _, _, same = agent(agent.see(obs), generator=torch.Generator().manual_seed(1))
        assert torch.equal(value, same) and not torch.equal(drawn, other)
        for name in ("rgb", "rgb_wrist", "state", "instruction"):
            changed = obs.clone()
            changed[name] = obs[name].roll(1, 0)
            _, other_logprob, _, other_value = agent(agent.see(changed), drawn)
            assert (other_logprob - logprob).abs().max() > 1e-4, name
            assert (other_value - value).abs().max() > 1e-4, name
        greedy = [agent(agent.see(obs), None, True, torch.Generator().manual_seed(1))[0] for _ in range(2)]
        assert torch.equal(*greedy) and torch.equal(greedy[0][:, 0], other[:, 0])  # from noise, as what is sampled
        assert not torch.equal(greedy[0][:, 1], other[:, 1])


def test_greedy_actions_are_those_of_transformers_alone(tmp_path, folder):
    """The ODE from the same noise; and the folder that a policy leaves is PI0's own, bit for bit."""
    env = make_env()
    agent = make_agent(env, folder(2))
    agent.save(tmp_path / "policy")
    alone = transformers.PI0ForConditionalGeneration.from_pretrained(tmp_path / "policy").eval()
    for name, p in agent.model.state_dict().items():
        assert torch.equal(p, alone.state_dict()[name]), name
    seen = agent.see(env.reset())
    with torch.no_grad():
        chain = agent(seen, deterministic=True, generator=torch.Generator().manual_seed(0))[0]
        theirs = alone.sample_actions(
            agent._state(seen),
            agent.text_ids[seen["instruction"]],
            agent.pictures_rgb(seen["rgb"])[:, None],
            noise=chain[:, 0],
            attention_mask=agent.text_mask[seen["instruction"]],
            pixel_attention_mask=torch.ones(6, 1, dtype=torch.bool),
        )
    torch.testing.assert_close(chain[:, -1], theirs, atol=1e-5, rtol=1e-5)
    again = make_agent(env, str(tmp_path / "policy"))
    assert not again.statistics.missing
    for name, x in agent.state_dict().items():
        assert torch.equal(x, again.state_dict()[name]), name


def test_cloning_is_the_flow_loss_of_the_model(folder):
    """Of the env's own action dimensions, with several draws of noise on one look."""
    env = make_env()
    agent = make_agent(env, folder(2))
    seen, target = agent.see(env.reset()), torch.rand(6, 2, 2)
    torch.manual_seed(3)
    loss, _ = agent(seen, target=target)
    torch.manual_seed(3)
    config = agent.model.config
    count = 6 * agent.draws
    time = torch.distributions.Beta(torch.tensor(1.5), torch.tensor(1.0)).sample((count,)) * 0.999 + 0.001
    actions = vla.pad_to((target - torch.tensor([0.0, 0.1])) / torch.tensor([0.4, 0.6]), 8)
    actions = actions.repeat_interleave(agent.draws, 0)
    noise = torch.randn_like(actions)
    config.loss_reduction = "none"
    many = seen[torch.arange(6).repeat_interleave(agent.draws)]
    expected = agent.model(
        state=agent._state(many),
        noise=noise,
        timestep=time,
        actions=actions,
        input_ids=agent.text_ids[many["instruction"]],
        attention_mask=agent.text_mask[many["instruction"]],
        pixel_values=agent.pictures_rgb(many["rgb"])[:, None],
        pixel_attention_mask=torch.ones(count, 1, dtype=torch.bool),
    ).loss[..., :2]
    expected = expected.mean((1, 2)).unflatten(0, (6, agent.draws)).mean(1)
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)


def test_recomputing_in_the_backward_saves_memory_and_changes_no_gradient(folder):
    env = make_env(16)
    gradients, kept = [], []
    for checkpointing in (False, True):
        agent = make_agent(env, folder(), gradient_checkpointing=checkpointing).train()
        seen = agent.see(env.reset())
        with torch.no_grad():
            drawn = agent(seen, generator=torch.Generator().manual_seed(0))[0]
        stored = {}

        def keep(x, stored=stored):
            stored[x.data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            _, logprob, _, value = agent(seen, drawn)
        kept.append(sum(stored.values()))
        (logprob.sum() + value.sum()).backward()
        gradients.append({name: p.grad for name, p in agent.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys() and len(gradients[0]) > 50
    for name, g in gradients[0].items():
        torch.testing.assert_close(g, gradients[1][name], atol=1e-5, rtol=1e-4)
    assert kept[1] < 0.6 * kept[0]
    copy = vla.share_frozen(agent)  # the collector's: with layers of its own, not the learner's
    with torch.no_grad():
        for p in agent.parameters():
            p.zero_()
        assert copy(seen, drawn)[3].abs().max() > 0


def test_missing_cameras_are_left_out(folder):
    """Which is what a mask over a camera that is not there does."""
    env = make_env(cameras=2)
    one, both = make_agent(env, folder(), cameras=("rgb_wrist",)), make_agent(env, folder())
    seen = both.see(env.reset())
    with torch.no_grad():
        drawn = one(one.see(seen), generator=torch.Generator().manual_seed(0))[0]
        velocity = one._velocity(one.see(seen), drawn[:, 0], torch.ones(6), *one._read_prefix(one.see(seen))[:2])
        pictures = torch.stack([both.pictures_rgb(seen["rgb"]), both.pictures_rgb_wrist(seen["rgb_wrist"])], 1)
        masked = both.model(
            state=both._state(seen),
            noise=drawn[:, 0],
            timestep=torch.ones(6),
            input_ids=one.text_ids[seen["instruction"]],
            attention_mask=one.text_mask[seen["instruction"]],
            pixel_values=pictures,
            pixel_attention_mask=torch.tensor([[False, True]]).expand(6, -1),
        ).logits
    torch.testing.assert_close(velocity, masked, atol=1e-5, rtol=1e-4)


@pytest.mark.smoke
def test_pictures_are_resized_with_padding():
    rgb = torch.randint(256, (2, 48, 64, 3), dtype=torch.uint8)
    small, same = vla.PaddedPictures(48, 64, 32), vla.PaddedPictures(64, 64, 64)
    x = small(rgb)
    assert x.shape == (2, 3, 32, 32) and (x[:, :, :4] == -1).all() and (x[:, :, 28:] == -1).all()
    theirs = Image.fromarray(rgb[0].numpy()).resize((32, 24), Image.Resampling.BILINEAR)
    expected = torch.from_numpy(np.array(theirs)).permute(2, 0, 1) / 127.5 - 1
    assert (x[0, :, 4:28] - expected).abs().max() <= 1.01 / 127.5
    square = torch.randint(256, (1, 64, 64, 3), dtype=torch.uint8)
    assert torch.equal(same(square), square.permute(0, 3, 1, 2) / 127.5 - 1)


def test_only_the_picture_after_a_chunk_is_drawn(folder, monkeypatch):
    env = make_env()
    agent = make_agent(env, folder(4))
    obs, looks = env.reset(), []
    look = env.look
    monkeypatch.setattr(env, "look", lambda state: (looks.append(1), look(state))[1])
    ended = []
    step = env.step

    def watched(*a, **k):
        result = step(*a, **k)
        ended.append(bool((result[2] | result[3]).any()))
        return result

    monkeypatch.setattr(env, "step", watched)
    with torch.no_grad():
        rollout = vla.collect(agent, env, obs, 3, 0.9, torch.Generator().manual_seed(0), lambda: False)
    assert len(ended) == 12 and len(looks) <= 3 + sum(ended)
    assert rollout.data["obs"]["rgb"].shape == (3, 6, 64, 64, 3)


# ---- Statistics


def test_states_in_other_units_give_the_same_actions(folder, tmp_path):
    env = make_env()
    shutil.copytree(folder(), tmp_path / "model")
    numbers = json.loads(json.dumps(STATISTICS))
    for name in ("mean", "std"):
        numbers["state"][name] = [1000.0 * x for x in numbers["state"][name]]
    (tmp_path / "model" / "norm_stats.json").write_text(json.dumps({"norm_stats": numbers}))
    one, two = make_agent(env, folder()), make_agent(env, str(tmp_path / "model"))
    obs = env.reset()
    in_mm = obs.clone()
    in_mm["state"] = 1000.0 * obs["state"]
    with torch.no_grad():
        first = one.actions(one(one.see(obs), None, True, torch.Generator().manual_seed(0))[0])
        second = two.actions(two(two.see(in_mm), None, True, torch.Generator().manual_seed(0))[0])
        wrong = two.actions(two(two.see(obs), None, True, torch.Generator().manual_seed(0))[0])
    torch.testing.assert_close(first, second, atol=1e-5, rtol=1e-5)
    assert (first - wrong).abs().max() > 1e-4


def test_statistics_that_a_file_lacks_are_those_of_the_demonstrations(tmp_path):
    (tmp_path / "stats.json").write_text(json.dumps({"action": STATISTICS["actions"]}))
    settings = {"model_path": "tiny-pi0", "statistics": str(tmp_path / "stats.json"), "total_timesteps": 16}
    vla.main(small(tmp_path, **settings))
    saved = checkpoint(newest(tmp_path / "run"))
    assert saved["model.statistics.action_shift"].tolist() == pytest.approx(STATISTICS["actions"]["mean"])
    assert saved["model.statistics.state_shift"].abs().max() > 0
    with pytest.raises(SystemExit, match="has no statistics of state, without which its actions mean nothing"):
        vla.main(small(tmp_path, run_name="other", bc_updates=0, **settings))


def in_lerobots_way(folder: Path, config: dict, tables: dict) -> None:
    steps = [{"registry_name": "normalizer_processor", "config": {"norm_map": config}, "state_file": "n.safetensors"}]
    (folder / "policy_preprocessor.json").write_text(json.dumps({"steps": steps}))
    flat = {f"{k}.{name}": torch.tensor(x) for k, numbers in tables.items() for name, x in numbers.items()}
    save_file(flat, folder / "n.safetensors")


QUANTILES = {"q01": [-1.0, 0.0], "q99": [3.0, 1.0]}
MEANS = {"mean": [1.0, 0.5], "std": [2.0, 0.5]}  # of the same shift and scale


@pytest.mark.parametrize("layout", ["openpi", "lerobot", "lerobot quantiles", "data set", "openvla", "transformers"])
def test_statistics_are_read_as_others_write_them(tmp_path, layout):
    if layout == "openpi":
        text = {"norm_stats": {"state": MEANS | QUANTILES, "actions": MEANS | QUANTILES}}
        (tmp_path / "norm_stats.json").write_text(json.dumps(text))
    elif layout == "data set":
        text = {"observation.state": MEANS, "action": MEANS, "observation.images.top": {"mean": [[[0.5]]]}}
        (tmp_path / "stats.json").write_text(json.dumps(text))
    elif layout == "openvla":
        text = {"bridge": {"action": QUANTILES | {"mask": [True, False]}, "proprio": QUANTILES}}
        (tmp_path / "dataset_statistics.json").write_text(json.dumps(text))
    elif layout == "transformers":
        means = {f"{k}_{name}": x for k in ("state", "actions") for name, x in MEANS.items()}
        (tmp_path / "processor_config.json").write_text(json.dumps(means))
    elif layout == "lerobot":
        in_lerobots_way(tmp_path, {"STATE": "MEAN_STD"}, {"observation.state": MEANS, "action": MEANS})
    else:
        modes = {"STATE": "QUANTILES", "ACTION": "QUANTILES"}
        in_lerobots_way(tmp_path, modes, {"observation.state": QUANTILES, "action": QUANTILES})
    statistics = Statistics({"action": 2, "state": 2})
    statistics.read(str(tmp_path), "", "")
    assert not statistics.missing
    x = torch.tensor([[3.0, 1.0]])
    assert statistics.normalise("state", x).tolist() == [[1.0, 1.0]]
    masked = layout == "openvla"
    assert statistics.normalise("action", x).tolist() == [[1.0, 1.0]]  # a masked dimension is left as it is
    assert statistics.restore("action", torch.tensor([[0.0, 0.25]])).tolist() == [[1.0, 0.25 if masked else 0.625]]


@pytest.mark.parametrize(
    "text, words",
    [
        ({"state": MEANS, "actions": {"mean": [0.0] * 7, "std": [1.0] * 7}}, "7 numbers of action, but the env has 2"),
        ({"state": {"mean": [0.0] * 8, "std": [1.0] * 8}, "actions": MEANS}, "8 numbers of state, but the env has 2"),
        (
            {"state": MEANS, "actions": {"mean": [0.0, 0.0], "std": [1.0, -1.0]}},
            "of action are not finite, or of",
        ),
        ({"state": MEANS, "actions": QUANTILES}, "have q01, q99, which is not what MEAN_STD needs"),
        (
            {"a": {"action": QUANTILES}, "b": {"action": QUANTILES}},
            "several data sets: set --unnorm-key to one of a",
        ),
        ({"a": {"loss": 1}}, "its statistics are not of state and action"),
    ],
)
def test_wrong_statistics_are_refused_in_one_line(tmp_path, folder, text, words):
    (tmp_path / "wrong.json").write_text(json.dumps(text))
    args = small(tmp_path, model_path=folder(), statistics=str(tmp_path / "wrong.json"))
    with pytest.raises(SystemExit) as stopped:
        vla.main(args)
    assert words in stopped.value.code and "\n" not in stopped.value.code
    assert not (tmp_path / "run").exists()


# ---- Folders of others


def test_a_folder_of_lerobot(tmp_path, folder, monkeypatch):
    """Its weights have other names, its configuration no class; without statistics it is refused."""
    source, target = Path(folder()), tmp_path / "lerobot"
    target.mkdir()
    config = json.loads((source / "config.json").read_text())
    for variant, part in (("small", config["vlm_config"]["text_config"]), ("expert", config["dit_config"])):
        sizes = {name: part[name] for name in vla.GEMMA_SIZES["gemma_2b"]}
        monkeypatch.setitem(vla.GEMMA_SIZES, variant, sizes)
    own = {"type": "pi0", "chunk_size": 1, "max_state_dim": 8, "max_action_dim": 8, "num_inference_steps": 4}
    own |= {"paligemma_variant": "small", "action_expert_variant": "expert", "image_resolution": [64, 64]}
    (target / "config.json").write_text(json.dumps(own))
    weights = load_file(source / "model.safetensors")
    assert any(name.startswith("paligemma_with_expert.") for name in weights)  # as transformers saves it, too
    save_file(weights, target / "model.safetensors")
    steps = [{"registry_name": "tokenizer_processor", "config": {"tokenizer_name": str(source)}}]
    (target / "policy_preprocessor.json").write_text(json.dumps({"steps": steps}))
    real = transformers.PI0Config.__post_init__

    def shrunk(self, **kwargs):  # what the names of the variants do not say: the vision tower and the vocabulary
        real(self, **kwargs)
        for name, value in config["vlm_config"]["vision_config"].items():
            setattr(self.vlm_config.vision_config, name, value)
        self.vlm_config.text_config.vocab_size = self.dit_config.vocab_size = 800
        self.vlm_config.image_token_id = 798

    monkeypatch.setattr(transformers.PI0Config, "__post_init__", shrunk)
    with pytest.raises(SystemExit, match="has no statistics of state and action.*--statistics FILE"):
        vla.main(small(tmp_path, model_path=str(target), bc_updates=0))
    (target / "stats.json").write_text(
        json.dumps({"observation.state": STATISTICS["state"], "action": STATISTICS["actions"]})
    )
    env = make_env()
    theirs, ours = make_agent(env, str(target)), make_agent(env, str(source))
    seen = ours.see(env.reset())
    with torch.no_grad():
        one, two = (x(seen, None, True, torch.Generator().manual_seed(0))[0] for x in (theirs, ours))
        assert torch.equal(one, two)
    vla.main(small(tmp_path, model_path=str(target), bc_updates=0, total_timesteps=16))
    (target / "config.json").write_text(json.dumps(own | {"type": "smolvla"}))
    with pytest.raises(SystemExit, match="it is lerobot's smolvla: of lerobot's policies only pi0 is supported"):
        vla.main(small(tmp_path, run_name="other", model_path=str(target), bc_updates=0))


def test_openvlas_tokens(tmp_path):
    """The last 256 tokens in falling order, 255 bin centres, quantiles, a prompt, a crop and a temperature."""
    vla.make_tiny(tmp_path / "model", 1)
    last = 793
    edges = torch.linspace(-1.0, 1.0, 256)
    centres = ((edges[1:] + edges[:-1]) / 2).tolist()
    settings = {"token_ids": list(range(last, last - 256, -1)), "centres": [*centres, centres[-1]]}
    settings |= {"prompt": "In: What action should the robot take to {instruction}?\nOut:", "crop": 0.9}
    (tmp_path / "model" / "actions.json").write_text(json.dumps(settings | {"temperature": 1.6}))
    table = {"q01": [-0.5, -1.0], "q99": [0.5, 1.0], "mask": [True, False]}
    (tmp_path / "model" / "dataset_statistics.json").write_text(json.dumps({"bridge": {"action": table}}))
    env = make_env()
    agent = TokenAgent(env, str(tmp_path / "model"), Args()).eval()
    texts = agent.processor.tokenizer.batch_decode(agent.text_input_ids[:, : agent.prompt_length])
    assert all("should the robot take to" in text for text in texts)
    # OpenVLA: the number of the bin is the vocabulary's size less the token, less one, and at most 254.
    predicted = torch.tensor([[last, last - 255]])
    numbers = (last + 1 - predicted - 1).clamp(0, 254)
    normalised = torch.tensor(centres)[numbers]
    expected = torch.stack([0.5 * (normalised[:, 0] + 1) * 1.0 - 0.5, normalised[:, 1]], 1)
    torch.testing.assert_close(agent.actions(torch.tensor([[0, 255]]))[:, 0], expected)
    assert agent.bins[torch.tensor([0, 255])].tolist() == predicted[0].tolist()
    obs = env.reset()
    seen = agent.see(obs)
    assert (agent.top, agent.left) == (2, 2)  # of 64: the middle nine tenths of the area
    edge = obs.clone()
    edge["rgb"][:, :2] = 0
    assert torch.equal(agent.see(edge)["pixel_values"], seen["pixel_values"])
    with torch.no_grad():
        drawn, logprob, entropy, _ = agent(seen, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(agent(seen, drawn)[1], logprob, atol=1e-5, rtol=0)
        agent.temperature = 1.0
        sharper = agent(seen, drawn)[2]
    assert (sharper < entropy).all()
    agent.check(obs[:2], None)
    assert torch.equal(agent.tokens(agent.actions(drawn)), drawn.clamp(max=254))
    agent.temperature = 1.6
    agent.save(tmp_path / "policy")
    again = TokenAgent(env, str(tmp_path / "policy"), Args()).eval()
    with torch.no_grad():
        assert torch.equal(again(again.see(obs), drawn)[1], agent(seen, drawn)[1])
    assert torch.equal(again.actions(drawn), agent.actions(drawn))


# ---- Whole runs


def test_the_first_ratio_of_an_update_is_one(tmp_path, monkeypatch):
    real, ratios = vla.vla_loss, []

    def watched(newlogprob, entropy, newvalue, prox_logprob, *rest):
        ratios.append((newlogprob - prox_logprob).detach().abs().max().item())
        return real(newlogprob, entropy, newvalue, prox_logprob, *rest)

    monkeypatch.setattr(vla, "vla_loss", watched)
    vla.main(small(tmp_path, model_path="tiny-pi0", num_minibatches=1, total_timesteps=32, max_staleness=0))
    assert len(ratios) == 2 and max(ratios) < 1e-3


@pytest.mark.parametrize("changes", [{}, {"action_chunk": 3, "execute": 2, "learn_noise": True}])
def test_resume_is_exact_without_staleness(tmp_path, changes):
    settings = changes | {"model_path": "tiny-pi0", "max_staleness": 0, "save_interval": 16, "keep_checkpoints": 100}
    vla.main(small(tmp_path, run_name="whole", **settings))
    first = min(int(p.name.removeprefix("step_")) for p in (tmp_path / "whole" / "checkpoints").glob("step_*"))
    cut_back(tmp_path / "whole", "parts", first)
    vla.main(small(tmp_path, run_name="parts", resume="auto", **settings))
    saved = checkpoint(newest(tmp_path / "parts"))
    assert_same(checkpoint(newest(tmp_path / "whole")), saved)
    assert saved["trainer"]["global_step"] > first
    assert saved["model.statistics.state_scale"].min() > 0


def test_two_processes_agree(tmp_path):
    settings = {"check_interval": 1, "save_interval": 32, "max_staleness": 0, "model_path": "tiny-pi0"}
    words = [*options(**settings), "--output-dir", tmp_path]
    workers[2].run(name="ppo_vla_async", options=[*words, "--run-name", "run"])
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["world_size"] == 2
    # What acts is what learns, with the same statistics of state and action.
    assert summary["losses/behaviour_weight"] == pytest.approx(1.0, abs=1e-4)
    saved = checkpoint(newest(tmp_path / "run"))
    assert not torch.equal(saved["rank_0"]["obs"]["rgb"], saved["rank_1"]["obs"]["rgb"])


def test_a_policy_goes_on_from_its_folder_and_is_scored(tmp_path, capsys, fresh_accelerate):  # noqa: F811
    settings = {"gradient_checkpointing": True, "train_expert_only": True, "mixed_precision": "bf16"}
    settings |= {"model_path": "tiny-pi0", "total_timesteps": 16}
    vla.main(small(tmp_path, **settings))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    vla.main(small(tmp_path, evaluate=True, checkpoint=str(tmp_path / "run"), **settings))
    # The same score as at the end of the run, where the policy ran in half precision, too.
    assert f"eval/episodic_return {summary['eval/episodic_return']:g}," in capsys.readouterr().out.splitlines()[-1]
    other = settings | {"noise_std": 0.2}  # which an evaluation does without
    vla.main(small(tmp_path, evaluate=True, checkpoint=str(tmp_path / "run"), **other))
    assert "eval/episodes 2" in capsys.readouterr().out
    settings["model_path"] = str(tmp_path / "run" / "policy")
    vla.main(small(tmp_path, run_name="again", **(settings | {"bc_updates": 0})))


BAD = {
    "--action-bins 256": "it is a flow policy, whose actions are no tokens: leave out --action-bins",
    "--model-path tiny --denoise-steps 4": "it predicts actions as tokens: leave out --denoise-steps",
    "--model-path tiny --train-expert-only": "it predicts actions as tokens: leave out --denoise-steps",
    "--execute 2": "it predicts 1 actions per forward: --execute 2 is more than that",
    "--cameras rgb rgb_wrist": "Tabletop has no camera rgb_wrist: set --cameras to some of rgb",
    "--execute 0": "--execute must be 1 or more, not 0",
    "--noise-std 0": "--noise-std must be greater than 0",
    "--statistics nowhere.json": "--statistics nowhere.json is no table of statistics in JSON ([Errno 2] No such file",
    "--statistics README.md": "--statistics README.md is no table of statistics in JSON",
    "--model-path tinypi0": "there is no --model-path tinypi0: give tiny, tiny-pi0, a folder, or a hub id",
}


@pytest.mark.parametrize("words", BAD)
def test_wrong_input_is_answered_in_one_line(words, tmp_path):
    words_of = [*options(), "--model-path", "tiny-pi0", "--output-dir", str(tmp_path), *words.split()]
    with pytest.raises(SystemExit) as stopped:
        vla.main(tyro.cli(Args, args=words_of))
    assert BAD[words] in stopped.value.code and "\n" not in stopped.value.code
