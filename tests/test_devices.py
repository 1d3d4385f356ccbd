"""The scripts on a device that is not the CPU, and where they make the host wait for it."""

import inspect
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import devices
import gymnasium as gym
import pytest
import torch
import transformers
from accelerate.state import AcceleratorState, PartialState
from devices import DEVICE, Pretend, count_syncs
from tensordict import TensorDict
from test_resume import checkpoint, newest, scores
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves, tree_structure

import envs
import grpo_ddp
import ppo_ddp
import ppo_lstm_ddp
import ppo_vla_async as vla
from envs import cartpole, push_cube, tabletop

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
SCRIPTS = {"ppo_ddp": ppo_ddp, "ppo_lstm_ddp": ppo_lstm_ddp, "grpo_ddp": grpo_ddp, "ppo_vla_async": vla}
CPU = torch.device("cpu")
ROUNDING = 1e-5  # the CPU has layers of its own, which sum in another order


@pytest.fixture(autouse=True)
def both_compute_alike():
    """Generators of the device; and the attention that both devices have."""
    with devices.patched(), sdpa_kernel(SDPBackend.MATH):
        yield
    AcceleratorState._reset_state(True)


@pytest.fixture(autouse=True)
def short_episodes(monkeypatch):
    """Clocks end them within a test's few steps."""
    for env, steps in ((push_cube, 6), (cartpole, 6), (tabletop, 3)):
        monkeypatch.setattr(env.Env, "max_episode_steps", steps)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Where the tiny model is kept for all tests."""
    path = tmp_path_factory.mktemp("runs")
    vla.make_tiny(path / "tiny_1", 1)
    return path


def host(x):
    """Whatever holds tensors, on the CPU. That they were all on one device is checked on the way."""
    if isinstance(x, TensorDict):
        x = x.to_dict()
    if isinstance(x, torch.Tensor):
        return x.detach().cpu()
    if isinstance(x, dict):
        return {k: host(v) for k, v in x.items()}
    if isinstance(x, (list, tuple)):
        return [host(v) for v in x]
    return x


def tensors(x) -> list[torch.Tensor]:
    if isinstance(x, torch.Tensor):
        return [x]
    if isinstance(x, (dict, TensorDict)):
        x = list(x.values())
    if isinstance(x, (list, tuple)):
        return [t for v in x for t in tensors(v)]
    return []


def assert_near(one, two, tolerance: float = 0.0) -> None:
    """Through dicts and lists; bit for bit unless there is a tolerance."""
    assert tree_structure(one) == tree_structure(two)
    for a, b in zip(tree_leaves(one), tree_leaves(two)):
        if isinstance(a, (float, torch.Tensor)):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)
        else:
            assert a == b


def same_on_both(function, tolerance: float = 0.0) -> None:
    """What it returns on the device is on the device, and equals what it returns on the CPU."""
    results = []
    for device in (CPU, DEVICE):
        torch.manual_seed(1)
        result = function(device)
        places = {x.device.type for x in tensors(result)}
        assert places == {device.type}
        results.append(host(result))
    assert_near(*results, tolerance)


# ---- The tool itself


def mixed_linear(x):
    return nn.Linear(3, 1)(x)


def mixed_index(x):
    return torch.ones(3)[x[0].long()]


def mixed_generator(x):
    return torch.empty_like(x).exponential_(generator=torch.Generator())


MIX_UPS = {
    "add": lambda x: x + torch.ones(3),
    "cat": lambda x: torch.cat([x, torch.ones(2, 3)]),
    "stack": lambda x: torch.stack([x[0, 0], torch.ones(())]),  # a number, but not of an operation that takes one
    "where": lambda x: torch.where(x > 0, x, torch.ones(3)),
    "in place": lambda x: torch.ones(()).add_(x[0, 0]),
    "numpy": lambda x: x.numpy(),
    "linear": mixed_linear,
    "index": mixed_index,
    "generator": mixed_generator,
}


@pytest.mark.parametrize("name", MIX_UPS)
def test_a_mix_up_raises(name):
    with pytest.raises((RuntimeError, TypeError), match="same device|numpy|generator"):
        MIX_UPS[name](torch.zeros(2, 3, device=DEVICE))


def test_what_cuda_allows_is_allowed():
    x = torch.ones(2, 3, device=DEVICE)
    x = x * torch.tensor(2.0)  # a number of the CPU
    x[torch.tensor([0])] = 5.0  # an index of the CPU
    x[1].copy_(torch.tensor([1.0, 2.0, 3.0]))
    assert isinstance(x, Pretend)
    assert x.tolist() == [[5.0, 5.0, 5.0], [1.0, 2.0, 3.0]]


def test_every_way_to_wait_is_counted():
    x = torch.arange(3.0, device=DEVICE)
    with count_syncs() as syncs:
        x.sum().item()
        bool(x.any())
        x[x > 1]
        x.nonzero()
        x.unique()
        x.masked_select(x > 1)
        x.tolist()
        torch.tensor([1.0], device=DEVICE)
        x[torch.tensor([0])] = 1.0
        x[x > 1] = x.sum()
    kinds = [kind for kind, _ in syncs.elements()]
    assert sorted(kinds) == sorted(
        ["item"] * 2 + ["nonzero"] * 3 + ["unique", "masked_select", "copy to the host"] + ["copy to the device"] * 2
    )


def test_what_does_not_wait_is_not_counted():
    x = torch.arange(3.0, device=DEVICE, requires_grad=True)
    with count_syncs() as syncs:
        y = torch.where(x > 1, x, 0.0)
        y.detach()[y > 1] = 0.5
        (y[torch.randperm(3, device=DEVICE)] / 2.0).sum().backward()
        torch.ones(3).sum().item()  # of the CPU
    assert not syncs


def test_a_sync_is_counted_on_the_cpu_too_with_its_line():
    x = torch.ones(3)
    with count_syncs(on_cpu=True) as syncs:
        x.sum().item()
        x[x > 0]
    place = inspect.currentframe().f_lineno
    name = "test_a_sync_is_counted_on_the_cpu_too_with_its_line"
    assert syncs == {
        ("item", f"tests/test_devices.py:{place - 2} in {name}"): 1,
        ("nonzero", f"tests/test_devices.py:{place - 1} in {name}"): 1,
    }


def test_autograd_views_and_generators_equal_the_cpu():
    def function(device):
        generator = torch.Generator(device).manual_seed(3)
        net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 2)).to(device)
        adam = torch.optim.Adam(net.parameters(), fused=True)
        data = TensorDict({"x": torch.randn(6, 4, device=device, generator=generator)}, [6], device=device)
        for _ in range(2):
            out = net(data[torch.randperm(6, device=device)]["x"])
            kept = out[out[:, 0] > out.mean()]
            kept[:, 1:].mul_(2.0)
            kept.square().sum().backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            adam.step()
        return [*net.parameters(), *(p.grad for p in net.parameters()), generator.get_state().to(device)]

    same_on_both(function)


# ---- Embedded envs


@pytest.mark.parametrize("env_id", ["PushCube", "CartPole", "Tabletop", "TabletopMemory"])
def test_embedded_envs(env_id):
    def function(device):
        env = envs.make(env_id, 4, device=device, seed=3, render=2)
        seen = [env.reset(episode=1)]
        for step in range(8):
            action = torch.randn(4, *env.single_action_space.shape, device=device)
            active = torch.arange(4, device=device) != 2 if step % 2 else None
            seen.append(env.step(action, active))
            if hasattr(env, "expert_action"):
                seen.append(env.expert_action())
        state = {k: v.cpu() for k, v in env.state_dict().items()}
        seen.append(env.render())
        env.reset()
        env.load_state_dict(state)
        return [*seen, env.state_dict(), env.step(torch.zeros_like(action))]

    same_on_both(function)


@pytest.mark.parametrize("env_id", ["PushCube", "CartPole", "Tabletop", "TabletopMemory"])
def test_a_step_of_an_embedded_env_does_not_wait(env_id):
    env = envs.make(env_id, 4, device=DEVICE, seed=3)
    env.reset()
    action = torch.zeros(4, *env.single_action_space.shape, device=DEVICE)
    with count_syncs() as syncs:
        for _ in range(8):
            env.step(action)
            env.step(action, torch.arange(4, device=DEVICE) > 1)
    assert not syncs


@pytest.mark.parametrize("env_id", ["gym/CartPole-v1", "gym/Pendulum-v1"])
def test_simulators_of_the_cpu(env_id):
    def function(device):
        env = envs.make(env_id, 2, device=device, seed=3)
        seen = [env.reset()]
        for step in range(3):
            action = torch.zeros(2, *env.single_action_space.shape, dtype=torch.int64, device=device)
            action = action if "CartPole" in env_id else action.float()
            active = torch.arange(2, device=device) > 0 if step == 1 else None
            seen.append(env.step(action, active))
        env.close()
        return seen

    same_on_both(function)


# ---- Policies and functions


def spaces(discrete: bool) -> SimpleNamespace:
    action = gym.spaces.Discrete(3) if discrete else gym.spaces.Box(-1.0, 1.0, (2,))
    state = gym.spaces.Box(-1.0, 1.0, (5,))
    return SimpleNamespace(single_observation_space=gym.spaces.Dict(state=state), single_action_space=action)


@pytest.mark.parametrize("discrete", [False, True])
@pytest.mark.parametrize("script", [ppo_ddp, grpo_ddp])
def test_policies(script, discrete):
    def function(device):
        agent = script.Agent(spaces(discrete), script.Args()).to(device)
        obs = TensorDict({"state": torch.randn(4, 5, device=device)}, [4], device=device)
        seen = agent.see(obs)
        drawn, best = agent(seen), agent(seen, deterministic=True)
        scored = agent(seen, drawn[0])
        sum(x.sum() for x in scored[1:]).backward()
        return [drawn, best, scored, [p.grad for p in agent.parameters()], script.checksum(list(agent.parameters()))]

    same_on_both(function)


@pytest.mark.parametrize("script", [ppo_ddp, grpo_ddp])
def test_running_moments(script):
    def function(device):
        moments = script.RunningMoments(3).to(device)
        x = torch.randn(4, 5, 3, device=device)
        for _ in range(2):
            moments.merge(moments.sums(x) * 2)
        return moments(x), moments.state_dict()

    same_on_both(function)


NUMBERS = {"gamma": 0.9, "gae_lambda": 0.9, "clip_coef": 0.2, "clip_coef_high": 0.28, "ent_coef": 0.1, "vf_coef": 0.5}
NUMBERS |= {"kl_coef": 0.1, "cap": 5.0, "clip_vloss": True, "group_size": 2, "step_wise": True, "scale": True}
FUNCTIONS = [ppo_ddp.compute_gae, ppo_ddp.ppo_loss, grpo_ddp.group_advantages, grpo_ddp.grpo_loss, vla.vla_loss]


@pytest.mark.parametrize("tested", FUNCTIONS, ids=lambda f: f.__name__)
def test_functions(tested):
    def function(device):
        values = {}
        shape = (6,) if tested.__name__.endswith("loss") else (3, 4)
        for name in inspect.signature(tested).parameters:
            x = torch.randn(shape, device=device)
            if name in ("terminated", "truncated", "active"):
                x = x > 0
            elif name == "next_value":
                x = x[0]
            values[name] = NUMBERS.get(name, x)
        leaf = values.get("newlogprob", torch.zeros((), device=device)).requires_grad_()
        out = tested(**values)
        if tested.__name__.endswith("loss"):
            out[0].backward()
        return out, leaf.grad if leaf.grad is not None else []

    same_on_both(function)


# ---- The vision-language-action policy


def small_vla(folder: Path, **changes) -> vla.Args:
    return vla.Args(**({"output_dir": str(folder), "num_envs": 4, "num_chunks": 2} | changes))


def make_agent(env, folder: Path, **changes) -> vla.TokenAgent:
    torch.manual_seed(1)
    return vla.TokenAgent(env, str(folder / "tiny_1"), small_vla(folder, **changes)).to(env.device)


@pytest.mark.parametrize("changes", [{}, {"action_chunk": 2}, {"lora_rank": 2, "freeze_vision": True}], ids=str)
def test_the_vla_policy(folder, changes):
    def function(device):
        env = envs.make("Tabletop", 3, device=device, seed=1)
        agent = make_agent(env, folder, **changes)
        seen = agent.see(env.reset())
        generator = torch.Generator(device).manual_seed(1)
        with torch.no_grad():
            drawn = agent(seen, generator=generator)
            best = agent(seen, deterministic=True)
        scored = agent(seen, drawn[0])
        sum(x.sum() for x in scored[1:]).backward()
        gradients = [p.grad for p in agent.parameters() if p.grad is not None]
        return [seen, drawn, best, scored, gradients, agent.actions(drawn[0]), agent.tokens(agent.actions(drawn[0]))]

    same_on_both(function, ROUNDING)


@pytest.mark.parametrize("changes", [{}, {"action_chunk": 3, "execute": 2, "learn_noise": True}], ids=str)
def test_the_flow_policy(tmp_path, changes):
    """Chain, score, gradients and cloning of PI0."""
    vla.make_tiny(tmp_path / "model", 1, "tiny-pi0", changes.get("action_chunk", 1))

    def function(device):
        env = envs.make("Tabletop", 3, device=device, seed=1)
        torch.manual_seed(1)
        agent = vla.FlowAgent(env, str(tmp_path / "model"), small_vla(tmp_path, **changes)).to(device)
        seen = agent.see(env.reset())
        with torch.no_grad():
            drawn = agent(seen, generator=torch.Generator(device).manual_seed(1))
            best = agent(seen, None, True, torch.Generator(device).manual_seed(1))
        chain = torch.linspace(-1.0, 1.0, drawn[0].numel()).view(drawn[0].shape).to(device)
        scored = agent(seen, chain)
        sum(x.sum() for x in scored[1:]).backward()
        gradients = [p.grad for p in agent.parameters() if p.grad is not None]
        loss, _ = agent(seen, target=agent.actions(best[0])[:, :1].expand(-1, agent.chunk, -1))
        assert drawn[0].device.type == loss.device.type == torch.device(device).type
        return [seen, best, scored, gradients, agent.actions(best[0])]

    same_on_both(function, ROUNDING)


def test_the_check_of_a_model_runs_where_the_env_is(folder):
    env = envs.make("Tabletop", 2, device=DEVICE, seed=1)
    accelerator = vla.launch(small_vla(folder))
    agent = vla.open_model(small_vla(folder), accelerator, env)
    assert all(isinstance(x, Pretend) for x in (*agent.parameters(), *agent.buffers()))


@pytest.mark.parametrize("changes", [{}, {"action_chunk": 2}], ids=str)
def test_collecting(folder, changes):
    def function(device):
        env = envs.make("Tabletop", 3, device=device, seed=1)
        agent = vla.share_frozen(make_agent(env, folder, **changes))
        generator = torch.Generator(device).manual_seed(1)
        with torch.no_grad():
            rollout = vla.collect(agent, env, env.reset(), 4, 0.9, generator, lambda: False)
        return rollout.tensors()

    same_on_both(function, ROUNDING)


# ---- Whole runs

SIZES = {
    "ppo_ddp": {"num_envs": 4, "num_steps": 8, "num_minibatches": 2, "update_epochs": 2},
    "ppo_lstm_ddp": {"num_envs": 4, "num_steps": 8, "num_minibatches": 2, "update_epochs": 2},
    "grpo_ddp": {"num_envs": 4, "group_size": 2, "num_minibatches": 2, "update_epochs": 2},
    "ppo_vla_async": {"num_envs": 4, "num_chunks": 2, "num_minibatches": 2, "update_epochs": 1, "bc_updates": 1,
                      "bc_episodes": 2, "bc_batch": 2, "max_staleness": 0, "value_warmup": 0},
}  # fmt: skip
STEPS = {
    "ppo_ddp": 32,
    "ppo_lstm_ddp": 32,
    "grpo_ddp": 24,
    "ppo_vla_async": 8,
}  # env steps of an iteration of these sizes


def train(name: str, device: torch.device, folder: Path, monkeypatch, **changes) -> None:
    """Run the script's main in this process, on a device that Accelerate says is its own."""
    script = SCRIPTS[name]

    def launch(args, *handlers):
        accelerator = original(args, *handlers)
        accelerator.state.device = device
        PartialState().device = device
        return accelerator

    AcceleratorState._reset_state(True)
    with monkeypatch.context() as patch:
        original = script.launch
        patch.setattr(script, "launch", launch)
        settings = {"output_dir": str(folder), "eval_episodes": 2, "save_interval": 0} | SIZES[name]
        script.main(script.Args(**(settings | changes)))


EVERYTHING = {
    "ppo_ddp": {"norm_reward": True, "lr_schedule": "adaptive", "target_kl": 1.0, "clip_vloss": True},
    "ppo_lstm_ddp": {"norm_reward": True, "env_options": ("camera=wrist", "max_episode_steps=3")},
    "grpo_ddp": {"kl_coef": 0.1, "scale": True, "lr_schedule": "adaptive", "target_kl": 1.0},
    "ppo_vla_async": {"target_kl": 10.0, "gradient_accumulation": 2},
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_whole_run_on_the_device_equals_one_on_the_cpu(folder, monkeypatch, capsys, name):
    """With evaluation, a video, checkpoints, a resume and --evaluate."""
    said = []
    options = EVERYTHING[name] | {"capture_video": True, "check_interval": 1}
    for device in (CPU, DEVICE):
        run = {"run_name": f"{name}_{device.type}"} | options
        train(name, device, folder, monkeypatch, total_timesteps=STEPS[name], **run)
        train(name, device, folder, monkeypatch, total_timesteps=2 * STEPS[name], resume="auto", **run)
        capsys.readouterr()
        same = {"env_options": options.get("env_options", ())}
        train(name, device, folder, monkeypatch, evaluate=True, checkpoint=str(folder / run["run_name"]), **same)
        said.append(capsys.readouterr().out.split(": ")[1])
    assert said[0] == said[1]
    here, there = (folder / f"{name}_{device.type}" for device in (CPU, DEVICE))
    assert newest(here).name == newest(there).name
    one, two = scores(here), scores(there)
    for run in (one, two):
        run.pop("charts/memory_gb", None)
    tolerance = ROUNDING if name in ("ppo_vla_async", "ppo_lstm_ddp") else 0.0
    assert_near(one, two, tolerance)
    assert_near(checkpoint(newest(here)), checkpoint(newest(there)), tolerance)


# ---- Host syncs of whole runs. What two runs of different sizes differ by is what a step, or a minibatch, costs.

ITERATIONS = 2
NUM_ENVS = 4
ROLLOUTS = (2, 4)  # steps of each env in the two runs that are compared
MORE = ITERATIONS * 2  # steps of each env that the second run has more


def count(name: str, device: torch.device, folder: Path, monkeypatch, steps: int, num_minibatches: int) -> Counter:
    """The host syncs of a run. Those of evaluation, where one a step is right, and transformers' own are left out."""
    monkeypatch.setattr(push_cube.Env, "max_episode_steps", steps if name == "grpo_ddp" else 2)
    monkeypatch.setattr(tabletop.Env, "max_episode_steps", 2)
    changes = {"num_minibatches": num_minibatches, "total_timesteps": ITERATIONS * NUM_ENVS * steps}
    if name in ("ppo_ddp", "ppo_lstm_ddp"):
        changes |= {"num_steps": steps}
    if name == "ppo_vla_async":  # the thread is one iteration ahead, and what it has collected is learned from
        changes |= {"num_chunks": steps, "max_staleness": 1, "total_timesteps": NUM_ENVS * steps, "bc_updates": 0}
    number = len(list(folder.iterdir()))
    with count_syncs(on_cpu=device == CPU) as syncs:
        train(name, device, folder, monkeypatch, run_name=f"count_{number}", eval_episodes=1, **changes)
    return Counter({k: n for k, n in syncs.items() if "in evaluate" not in k[1] and "by transformers" not in k[1]})


@pytest.fixture(scope="module")
def counted(folder):
    """Counts are kept: several tests compare with the same run."""
    kept = {}

    def get(name, device, monkeypatch, steps, num_minibatches) -> Counter:
        key = name, device, steps, num_minibatches
        if key not in kept:
            kept[key] = count(name, device, folder, monkeypatch, steps, num_minibatches)
        return kept[key]

    return get


@pytest.mark.parametrize("name", SCRIPTS)
def test_no_minibatch_waits(counted, monkeypatch, name):
    few, many = (counted(name, DEVICE, monkeypatch, 2, num_minibatches) for num_minibatches in (2, 4))
    more = many - few
    assert few
    assert not more, more


@pytest.mark.parametrize("device", [CPU, DEVICE], ids=str)
@pytest.mark.parametrize(("name", "allowed"), [("ppo_ddp", 0), ("ppo_lstm_ddp", 0), ("grpo_ddp", 1)])
def test_how_often_a_step_waits(counted, monkeypatch, name, allowed, device):
    """GRPO looks after every step whether an episode still runs; PPO needs no look."""
    few, many = (counted(name, device, monkeypatch, steps, 2) for steps in ROLLOUTS)
    more = many - few
    if device == CPU:  # there, an env may look
        more = Counter({k: n for k, n in more.items() if not k[1].startswith("envs/")})
    assert more.total() <= allowed * MORE, more


def test_how_often_the_collector_waits(counted, monkeypatch):
    """Pictures pass through the host once a chunk, and once more where the clock cut episodes (every second step).

    Besides, the thread may look once a step whether it did.
    """
    few, many = (counted("ppo_vla_async", DEVICE, monkeypatch, chunks, 2) for chunks in ROLLOUTS)
    looks = Counter({k: n for k, n in (many - few).items() if k[1].endswith("in see")})
    steps = many - few - looks
    assert looks.total() <= MORE + MORE // 2, looks
    assert steps.total() <= MORE, steps


def test_a_planted_sync_is_found(counted, folder, monkeypatch):
    original = ppo_ddp.ppo_loss

    def loss(*args):
        args[0].sum().item()
        return original(*args)

    clean = counted("ppo_ddp", DEVICE, monkeypatch, 2, 2)
    monkeypatch.setattr(ppo_ddp, "ppo_loss", loss)
    more = count("ppo_ddp", DEVICE, folder, monkeypatch, 2, 2) - clean
    assert more.total() == ITERATIONS * 2 * 2  # epochs and minibatches
    assert all(kind == "item" and "in loss" in line for kind, line in more)


def test_a_planted_mix_up_is_found(folder, monkeypatch):
    original = ppo_ddp.compute_gae
    monkeypatch.setattr(ppo_ddp, "compute_gae", lambda *args: original(*args).cpu())
    with pytest.raises(RuntimeError, match="same device"):
        train("ppo_ddp", DEVICE, folder, monkeypatch, total_timesteps=32, run_name="mixed")
