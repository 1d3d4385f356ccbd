"""The parts of ppo_ddp.py in one process, against references written independently of them."""

import copy
import gc
import json
import math

import gymnasium as gym
import psutil
import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from tensordict import TensorDict
from torch.utils._python_dispatch import TorchDispatchMode

import envs
import grpo_ddp
import ppo_ddp
import ppo_lstm_ddp
from ppo_ddp import LOSSES, Agent, Args, RunningMoments, checksum, compute_gae, evaluate, ppo_loss

SCRIPTS = [ppo_ddp, ppo_lstm_ddp, grpo_ddp]


def slow_gae(rewards, values, next_value, terminated, truncated, final_values, gamma, lam):
    """The definition, one sample at a time: the lambda-weighted sum of TD errors up to the episode's end."""
    T, N = rewards.shape
    advantages = torch.zeros(T, N, dtype=torch.float64)
    for n in range(N):
        for t in range(T):
            weight = 1.0
            for k in range(t, T):
                if terminated[k, n]:
                    after = 0.0
                elif truncated[k, n]:
                    after = final_values[k, n].item()
                else:
                    after = values[k + 1, n].item() if k + 1 < T else next_value[n].item()
                advantages[t, n] += weight * (rewards[k, n].item() + gamma * after - values[k, n].item())
                if terminated[k, n] or truncated[k, n]:
                    break
                weight *= gamma * lam
    return advantages.float()


@pytest.mark.smoke
@pytest.mark.parametrize("case", ["neither", "terminated", "truncated", "both", "mix"])
@pytest.mark.parametrize("seed", range(3))
def test_gae_equals_the_definition(case, seed):
    g = torch.Generator().manual_seed(seed)
    T, N = 17, 5
    rewards, values, final_values = torch.randn(3, T, N, generator=g)
    next_value = torch.randn(N, generator=g)
    terminated, truncated = torch.zeros(2, T, N, dtype=torch.bool)
    if case in ("terminated", "both"):
        terminated[6, :3] = terminated[16, 0] = True
    if case in ("truncated", "both"):
        truncated[6, 2:] = truncated[11] = truncated[16, 1] = True
    if case == "mix":
        terminated, truncated = torch.rand(2, T, N, generator=g) < 0.15
    final_values *= truncated & ~terminated  # what the script stores: termination is worth nothing
    inputs = (rewards, values, next_value, terminated, truncated, final_values, 0.9, 0.8)
    torch.testing.assert_close(compute_gae(*inputs), slow_gae(*inputs), atol=1e-5, rtol=1e-5)


@pytest.mark.smoke
def test_gae_refuses_flat_data():
    flat = torch.zeros(6)
    with pytest.raises(ValueError, match=r"\[T, N\]"):
        compute_gae(flat, flat, flat[:1], flat.bool(), flat.bool(), flat, 0.9, 0.9)
    rollout = torch.zeros(3, 2)
    with pytest.raises(ValueError, match=r"\[T, N\]"):
        compute_gae(rollout, rollout.view(2, 3), rollout[0], rollout.bool(), rollout.bool(), rollout, 0.9, 0.9)


@pytest.mark.smoke
def test_running_moments_equal_those_of_all_data():
    """Merged in parts, from several ranks, far from zero: the moments of everything together."""
    data = 1000.0 + torch.randn(4, 3, 50, 2) * torch.tensor([0.1, 5.0])
    moments = RunningMoments(2)
    for iteration in data:
        moments.merge(torch.stack([moments.sums(x) for x in iteration]).sum(0))
    flat = data.reshape(-1, 2).double()
    torch.testing.assert_close(moments.mean, flat.mean(0))
    torch.testing.assert_close(moments.var, flat.var(0, unbiased=False))
    assert moments.count == len(flat)
    normal = moments(data.reshape(-1, 2))
    assert normal.dtype == torch.float32 and normal.abs().max() <= 10
    torch.testing.assert_close(normal.std(0), torch.ones(2), atol=0.01, rtol=0)


@pytest.mark.smoke
def test_gaussian_policy_matches_torch():
    env = envs.make("PushCube", 6)
    agent = Agent(env, Args())
    seen = agent.see(env.reset())
    action, logprob, entropy = agent(seen)
    mean = agent(seen, deterministic=True)[0]
    reference = torch.distributions.Normal(mean, agent.actor_logstd.exp())
    torch.testing.assert_close(logprob, reference.log_prob(action).sum(-1))
    torch.testing.assert_close(entropy, reference.entropy().expand(6, 2).sum(-1))
    torch.testing.assert_close(agent(seen, action)[1], logprob)
    assert agent.value(seen).shape == (6,)
    many = torch.cat([agent(seen)[0] for _ in range(2000)]).view(2000, 6, 2)
    torch.testing.assert_close(many.mean(0), mean, atol=0.1, rtol=0)


@pytest.mark.smoke
def test_categorical_policy_matches_torch():
    env = envs.make("gym/CartPole-v1", 4)
    agent = Agent(env, Args())
    torch.nn.init.normal_(agent.actor[-1].weight)
    seen = agent.see(env.reset())
    action, logprob, entropy = agent(seen)
    reference = torch.distributions.Categorical(logits=agent.actor(seen))
    torch.testing.assert_close(logprob, reference.log_prob(action))
    torch.testing.assert_close(entropy, reference.entropy())
    assert torch.equal(agent(seen, deterministic=True)[0], reference.probs.argmax(-1))
    many = torch.stack([agent(seen)[0] for _ in range(4000)]).float().mean(0)
    torch.testing.assert_close(many, reference.probs[:, 1], atol=0.04, rtol=0)


def test_privileged_observations_reach_only_the_critic():
    env = envs.make("PushCube", 4)
    env.single_observation_space = gym.spaces.Dict(
        {**env.single_observation_space, "privileged": gym.spaces.Box(-1, 1, (3,))}
    )
    agent = Agent(env, Args())
    obs = env.reset()
    one, two = (TensorDict({"state": obs["state"], "privileged": torch.full((4, 3), x)}, [4]) for x in (0.0, 1.0))
    one, two = agent.see(one), agent.see(two)
    assert torch.equal(agent(one, deterministic=True)[0], agent(two, deterministic=True)[0])
    assert not torch.equal(agent.value(one), agent.value(two))


@pytest.mark.smoke
def test_loss_at_the_old_policy():
    """With nothing changed the ratio is 1: no KL, nothing clipped, and the gradient is the plain policy gradient."""
    logprob = torch.randn(8, requires_grad=True)
    advantage, returns, value, entropy = torch.randn(4, 8)
    loss, logged = ppo_loss(logprob, entropy, value, logprob.detach(), advantage, returns, value, 0.2, 0.1, 0.5, False)
    logged = dict(zip(LOSSES, logged.tolist()))
    assert logged["losses/approx_kl"] == logged["losses/old_approx_kl"] == logged["losses/clipfrac"] == 0
    assert logged["losses/policy_loss"] == pytest.approx(-advantage.sum().item(), abs=1e-5)
    expected = -advantage.sum() - 0.1 * entropy.sum() + 0.25 * (value - returns).square().sum()
    torch.testing.assert_close(loss, expected)
    (gradient,) = torch.autograd.grad(loss, logprob)
    torch.testing.assert_close(gradient, -advantage)


@pytest.mark.smoke
def test_loss_clips():
    advantage = torch.tensor([1.0, 1.0, -1.0, -1.0])
    new = torch.tensor([0.5, -0.5, 0.5, -0.5], requires_grad=True)
    zero = torch.zeros(4)
    loss, logged = ppo_loss(new, zero, zero, zero, advantage, zero, zero, 0.2, 0.0, 0.5, False)
    (gradient,) = torch.autograd.grad(loss, new)
    assert gradient.ne(0).tolist() == [False, True, True, False]  # only what would go on away from 1 is held
    assert logged[LOSSES.index("losses/clipfrac")] == 4
    value, old, target = torch.tensor([1.0]), torch.tensor([0.0]), torch.tensor([1.0])
    one = torch.ones(1)
    clipped, _ = ppo_loss(0 * one, 0 * one, value, 0 * one, 0 * one, target, old, 0.2, 0.0, 1.0, True)
    assert clipped.item() == pytest.approx(0.5 * 0.8**2)


class CountingEnv(envs.VecEnv):
    """Env i of the whole world ends its episodes after i + 1 steps, with return i + 1 and success where i is even."""

    def __init__(self, num_envs, first_env=0):
        self.num_envs, self.device, self.max_episode_steps = num_envs, torch.device("cpu"), num_envs
        self.single_observation_space = gym.spaces.Dict({"state": gym.spaces.Box(-1, 1, (1,))})
        self.single_action_space = gym.spaces.Box(-1, 1, (1,))
        self.index = torch.arange(first_env, first_env + num_envs)
        self.inactive_steps = 0

    def reset(self, episode=0):
        self.clock = torch.zeros(self.num_envs, dtype=torch.int64)
        return TensorDict({"state": torch.zeros(self.num_envs, 1)}, [self.num_envs])

    def step(self, action, active=None):
        self.inactive_steps += int((~active).sum())
        self.clock += active
        done = active & (self.clock > self.index)
        episode = {"return": self.clock.float(), "length": self.clock.clone(), "success": (self.index % 2 == 0).float()}
        self.clock *= ~done
        obs = TensorDict({"state": torch.zeros(self.num_envs, 1)}, [self.num_envs])
        return obs, torch.ones(self.num_envs), done, done & False, {"final_obs": obs, "episode": episode, "metrics": {}}


@pytest.mark.smoke
def test_evaluation_counts_one_episode_of_each_env():
    env = CountingEnv(10)
    scores = evaluate(Agent(env, Args()), env, Accelerator(cpu=True), None)
    assert scores["eval/episodes"] == 10
    assert scores["eval/episodic_return"] == scores["eval/episodic_length"] == pytest.approx(5.5)
    assert scores["eval/success_rate"] == pytest.approx(0.5)
    assert env.inactive_steps == 45


def test_evaluation_leaves_out_success_where_the_env_does_not_know_it():
    env = envs.make("gym/CartPole-v1", 3)
    scores = evaluate(Agent(env, Args()), env, Accelerator(cpu=True), None)
    assert set(scores) == {"eval/episodic_return", "eval/episodic_length", "eval/episodes"}


def small(tmp_path, **changes) -> Args:
    settings = {"output_dir": str(tmp_path), "run_name": "run", "num_envs": 8, "num_steps": 8, "total_timesteps": 256}
    return Args(**(settings | {"eval_episodes": 4, "num_minibatches": 2, "update_epochs": 2} | changes))


@pytest.fixture
def made(monkeypatch):
    """The envs that a run makes, with a hook to change what their steps return."""
    real, seen = envs.make, []

    def make(*args, **kwargs):
        seen.append(real(*args, **kwargs))
        step = seen[-1].step
        seen[-1].calls = 0

        def hooked(self, *a, **k):
            result = step(*a, **k)
            self.calls += 1
            return seen.hook(self, *result) if hasattr(seen, "hook") else result

        seen[-1].step = hooked.__get__(seen[-1])
        return seen[-1]

    class Seen(list):
        pass

    seen = Seen()
    seen.real, seen.patch = real, lambda other: monkeypatch.setattr(envs, "make", other)
    seen.patch(make)
    return seen


def test_truncation_is_bootstrapped_with_the_final_observation(tmp_path, monkeypatch, made):
    """In the script itself: final_value is V(final_obs) where the clock ended an episode, and 0 elsewhere."""
    recorded = []

    def hook(env, obs, reward, terminated, truncated, info):
        terminated[0], truncated[0] = env.calls % 3 == 0, False
        truncated[1:3], terminated[1:3] = env.calls % 2 == 0, False
        if env.num_envs == 8:
            recorded.append((info["final_obs"].clone(), terminated.clone(), truncated.clone()))
        return obs, reward, terminated, truncated, info

    made.hook = hook
    real = ppo_ddp.compute_gae
    checked = []

    def check(rewards, values, next_value, terminated, truncated, final_values, *rest):
        if not checked:
            # Nothing was learned yet: an agent made like the run's own has the same weights.
            torch_state = torch.get_rng_state()
            torch.manual_seed(1)
            agent = Agent(made[1], small(tmp_path))
            torch.set_rng_state(torch_state)
            with torch.no_grad():
                expected = torch.stack([agent.value(agent.see(obs)) * cut for obs, _, cut in recorded])
            torch.testing.assert_close(final_values, expected)
            assert torch.equal(terminated, torch.stack([x for _, x, _ in recorded]))
            assert (
                torch.equal(truncated, torch.stack([x for _, _, x in recorded]))
                and expected.ne(0).sum() == truncated.sum() > 4
            )
            checked.append(True)
        return real(rewards, values, next_value, terminated, truncated, final_values, *rest)

    monkeypatch.setattr(ppo_ddp, "compute_gae", check)
    ppo_ddp.main(small(tmp_path))
    assert checked


@pytest.mark.parametrize("option", ["truncated", "always"])
def test_without_final_observation_the_last_value_stands_in(tmp_path, monkeypatch, made, option):
    def hook(env, obs, reward, terminated, truncated, info):
        truncated[1], terminated[2] = env.calls % 2 == 0, env.calls % 3 == 0
        return obs, reward, terminated, truncated, info | {"final_obs": None}

    made.hook = hook
    real, seen = ppo_ddp.compute_gae, []

    def check(rewards, values, next_value, terminated, truncated, final_values, *rest):
        where = truncated | terminated if option == "always" else truncated
        seen.append(where.sum().item())
        assert torch.equal(final_values, values * where)
        return real(rewards, values, next_value, terminated, truncated, final_values, *rest)

    monkeypatch.setattr(ppo_ddp, "compute_gae", check)
    ppo_ddp.main(small(tmp_path, bootstrap_at_done=option))
    assert all(seen)


@pytest.mark.parametrize("what", ["reward", "obs"])
def test_nan_from_the_env_stops_the_run(tmp_path, capsys, made, what):
    def hook(env, obs, reward, terminated, truncated, info):
        if env.calls == 12:
            (reward if what == "reward" else obs["state"])[3] = math.nan if what == "reward" else math.inf
        return obs, reward, terminated, truncated, info

    made.hook = hook
    with pytest.raises(SystemExit, match="NaN or infinity from PushCube on rank 0 in iteration 2"):
        ppo_ddp.main(small(tmp_path))
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.smoke
def test_nan_gradients_never_reach_the_weights(tmp_path, monkeypatch):
    """Some updates with a NaN loss: they are skipped and counted. All of them: the run stops, the weights unharmed."""
    real, calls, weights = ppo_ddp.ppo_loss, [], []
    init = ppo_ddp.Agent.__init__

    def remember(self, *args):
        init(self, *args)
        weights.append(self)

    def poisoned(*inputs):
        loss, logged = real(*inputs)
        calls.append(True)
        return (loss * math.nan if bad(len(calls)) else loss), logged

    monkeypatch.setattr(ppo_ddp, "ppo_loss", poisoned)
    monkeypatch.setattr(ppo_ddp.Agent, "__init__", remember)
    bad = lambda call: call in (3, 16)  # noqa: E731
    ppo_ddp.main(small(tmp_path))
    assert all(p.isfinite().all() for p in weights[0].parameters())
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["losses/skipped_updates"] == 1

    bad = lambda call: call > 16 + 4  # noqa: E731
    with pytest.raises(SystemExit, match="smaller --learning-rate"):
        ppo_ddp.main(small(tmp_path, run_name="other", total_timesteps=10_000))
    assert all(p.isfinite().all() for p in weights[1].parameters())


def test_a_long_run_uses_every_sample_once_an_epoch(tmp_path, monkeypatch):
    """Also where the minibatches do not divide evenly."""
    real, seen = ppo_ddp.ppo_loss, []

    def record(newlogprob, entropy, newvalue, logprob, *rest):
        seen.append(logprob.clone())
        return real(newlogprob, entropy, newvalue, logprob, *rest)

    monkeypatch.setattr(ppo_ddp, "ppo_loss", record)
    monkeypatch.setattr(ppo_ddp, "check_batch", lambda args: None)
    ppo_ddp.main(small(tmp_path, num_minibatches=5, total_timesteps=64))
    assert sorted(len(x) for x in seen[:5]) == [12, 13, 13, 13, 13] and len(seen) == 10
    assert torch.equal(torch.cat(seen[:5]).sort().values, torch.cat(seen[5:]).sort().values)
    assert len(torch.cat(seen[:5]).unique()) == 64


def test_target_kl_stops_the_epochs(tmp_path, monkeypatch):
    updates = []
    step = torch.optim.Adam.step
    monkeypatch.setattr(torch.optim.Adam, "step", lambda self, *a: (updates.append(1), step(self, *a))[1])
    ppo_ddp.main(small(tmp_path, target_kl=1e-9, update_epochs=7, total_timesteps=64))
    assert len(updates) == 2


@pytest.mark.parametrize("desired, direction", [(1e-9, -1), (1e9, 1)])
def test_adaptive_learning_rate_follows_the_kl(tmp_path, desired, direction):
    ppo_ddp.main(small(tmp_path, lr_schedule="adaptive", desired_kl=desired, total_timesteps=64))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["charts/learning_rate"] == pytest.approx(1e-3 * 1.5 ** (2 * direction))


def test_linear_schedule_ends_at_zero(tmp_path):
    ppo_ddp.main(small(tmp_path))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["charts/learning_rate"] == pytest.approx(1e-3 * 64 / 256)  # of the last of four iterations


def test_evaluation_and_saving_are_due_by_at_least(tmp_path):
    """Intervals that no iteration hits exactly are still kept."""
    ppo_ddp.main(small(tmp_path, total_timesteps=640, save_interval=100, keep_checkpoints=50, eval_interval=10_000))
    steps = sorted(int(p.name.removeprefix("step_")) for p in (tmp_path / "run" / "checkpoints").glob("step_*"))
    assert steps == [128, 256, 320, 448, 512, 640]


def test_reward_scaling_is_part_of_the_model(tmp_path, monkeypatch, made):
    """Rewards are divided by the deviation of the discounted returns seen so far, which is saved with the weights."""
    raw, scaled, agents = [], [], []
    init, real = ppo_ddp.Agent.__init__, ppo_ddp.compute_gae
    monkeypatch.setattr(ppo_ddp.Agent, "__init__", lambda self, *a: (init(self, *a), agents.append(self))[0])
    monkeypatch.setattr(
        ppo_ddp, "compute_gae", lambda rewards, *rest: (scaled.append(rewards), real(rewards, *rest))[1]
    )

    def hook(env, obs, reward, terminated, truncated, info):
        if env.num_envs == 8:
            raw.append((reward, terminated | truncated))
        return obs, reward, terminated, truncated, info

    made.hook = hook
    ppo_ddp.main(small(tmp_path, env_id="CartPole", norm_reward=True))
    running, returns = torch.zeros(8), []
    for t, (reward, done) in enumerate(raw):
        running = 0.97 * running + reward
        returns.append(running.clone())
        running[done] = 0
        if (t + 1) % 8 == 0:
            expected = torch.stack([r for r, _ in raw[t - 7 : t + 1]]) / torch.stack(returns).std(unbiased=False)
            torch.testing.assert_close(scaled[t // 8], expected)
    assert agents[0].state_dict()["return_moments.count"] == 256


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda s: s.__name__)
def test_layers_such_as_dropout_are_at_rest_but_in_the_update(tmp_path, monkeypatch, script):
    """A fork that adds dropout must not have it in rollouts and evaluations."""
    seen = []
    forward = script.Agent.forward

    def watch(self, obs, action=None, deterministic=False):
        seen.append((torch.is_grad_enabled(), self.training))
        return forward(self, obs, action, deterministic)

    monkeypatch.setattr(script.Agent, "forward", watch)
    sizes = {"output_dir": str(tmp_path), "num_envs": 8, "num_minibatches": 2, "eval_episodes": 4}
    script.main(script.Args(total_timesteps=1600, eval_interval=800, **sizes))
    assert {True} == {grad for grad, training in seen if training}
    assert {False} == {training for grad, training in seen if not grad}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda s: s.__name__)
def test_the_first_ratio_of_an_update_is_one(tmp_path, script):
    """In every iteration: the observations are normalised in the update as they were in the rollout."""
    sizes = {"output_dir": str(tmp_path), "run_name": "a", "num_envs": 8, "eval_episodes": 4}
    script.main(script.Args(total_timesteps=3200, num_minibatches=1, update_epochs=1, **sizes))
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    assert summary["charts/iteration"] > 2
    assert abs(summary["losses/old_approx_kl"]) < 1e-6 and summary["losses/clipfrac"] == 0


@pytest.fixture
def loss_scale(monkeypatch):
    """Accelerate's loss scaling of fp16, on the CPU: what the scripts see of it is accelerator.scaler."""
    real, scalers = ppo_ddp.launch, []

    def launch(args):
        accelerator = real(args)
        scalers.append(torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=5))
        accelerator.scaler = scalers[-1]
        return accelerator

    monkeypatch.setattr(ppo_ddp, "launch", launch)
    return scalers


def test_the_loss_scale_is_saved_and_restored(tmp_path, loss_scale):
    ppo_ddp.main(small(tmp_path))
    saved = loss_scale[0].state_dict()
    assert saved["scale"] == 2.0**23 and saved["_growth_tracker"] == 1  # 16 updates, doubled after every 5
    ppo_ddp.main(small(tmp_path, resume="auto", total_timesteps=256))
    assert loss_scale[1].state_dict() == saved


def test_a_loss_scale_that_is_too_high_is_lowered_and_no_reason_to_stop(tmp_path, monkeypatch, loss_scale):
    """Twelve overflows in a row bring it down; only a scale of 1 that still overflows ends the run."""
    real, step = ppo_ddp.ppo_loss, []

    def overflowing(*inputs):
        loss, logged = real(*inputs)
        step.append(1)
        return (loss * math.inf if bad(len(step)) else loss), logged

    monkeypatch.setattr(ppo_ddp, "ppo_loss", overflowing)
    bad = lambda n: n <= 12  # noqa: E731
    ppo_ddp.main(small(tmp_path))
    assert loss_scale[0].get_scale() == 2.0**8
    bad = lambda n: True  # noqa: E731
    with pytest.raises(SystemExit, match="smaller --learning-rate"):
        ppo_ddp.main(small(tmp_path, run_name="never", total_timesteps=100_000))
    assert loss_scale[1].get_scale() <= 1.0


@pytest.mark.smoke
def test_checksum_sees_every_bit_and_takes_little_memory():
    """In slices: no tensor larger than one is made, and the result does not depend on them. Odd bytes will do."""
    g = torch.Generator().manual_seed(0)
    weights = torch.randn(1000, 3, generator=g)
    odd = torch.tensor([True, False, True])
    value = checksum([weights, odd])
    assert value == checksum([weights, odd], size=7) == value.long() and value < 2**52
    for i in range(0, 3000, 271):
        other = weights.clone()
        other.view(torch.int32).view(-1)[i] ^= 1 << (i % 32)
        assert checksum([other, odd]) != value
    assert checksum([weights.flip(0), odd]) != value and checksum([weights, ~odd]) != value

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if torch.is_tensor(result) and result.untyped_storage().data_ptr() != weights.untyped_storage().data_ptr():
                self.elements = max(self.elements, result.numel())
            return result

    with Largest() as largest:
        checksum([weights], size=64)
    assert largest.elements == 64


# ---- One vector of weights, and the step that updates it


def networks(seed=0) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return ppo_ddp.mlp(5, 2, 16, std=1.0)


@pytest.mark.smoke
def test_flat_weights_are_the_weights_of_the_model(tmp_path):
    """Parameters and gradients are parts of the vector; what reads, writes or copies a model still does."""
    model = networks()
    before = copy.deepcopy(model.state_dict())
    weights = ppo_ddp.flatten(list(model.parameters()))
    assert weights.numel() == sum(p.numel() for p in model.parameters())
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name])
        for part, whole in ((p, weights), (p.grad, weights.grad)):
            assert part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr() and part.is_contiguous()
    model(torch.ones(3, 5)).sum().backward()
    assert torch.equal(weights.grad, torch.cat([p.grad.flatten() for p in model.parameters()])) and weights.grad.any()
    with torch.no_grad():
        weights.mul_(2.0)
    assert all(torch.equal(p, 2.0 * before[name]) for name, p in model.named_parameters())

    other = copy.deepcopy(model)  # such as the reference of GRPO
    with torch.no_grad():
        weights.zero_()
    assert all(torch.equal(p, 2.0 * before[name]) for name, p in other.named_parameters())
    save_file({k: v.detach().contiguous() for k, v in other.state_dict().items()}, tmp_path / "a")
    model.load_state_dict(load_file(tmp_path / "a"))
    assert torch.equal(weights, torch.cat([p.flatten() for p in other.parameters()])) and weights.any()
    save_file({k: v.detach().contiguous() for k, v in model.state_dict().items()}, tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.smoke
@pytest.mark.parametrize("max_norm", [0.05, 1e9])
def test_a_step_equals_that_of_torch(max_norm):
    """clip_grad_norm_ and Adam on separate parameters, over several steps; a NaN among them changes nothing."""
    accelerator = Accelerator(cpu=True)
    model, reference = networks(), networks()
    weights = ppo_ddp.flatten(list(model.parameters()))
    optimizer = accelerator.prepare(torch.optim.Adam([weights], lr=1e-2, eps=1e-5, fused=True))
    plain = torch.optim.Adam(reference.parameters(), lr=1e-2, eps=1e-5)
    data = torch.randn(8, 20, 5, generator=torch.Generator().manual_seed(1))
    for i, x in enumerate(data):
        if i == 4:
            model(x * math.nan).sum().backward()
            before = copy.deepcopy([model.state_dict(), optimizer.optimizer.state_dict()])
            assert ppo_ddp.clip_and_step(accelerator, optimizer, weights, max_norm).isnan()
            after = [model.state_dict(), optimizer.optimizer.state_dict()]
            torch.testing.assert_close(before, after, atol=0, rtol=0)
            assert not weights.grad.any()
        model(x).square().mean().backward()
        reference(x).square().mean().backward()
        norm = ppo_ddp.clip_and_step(accelerator, optimizer, weights, max_norm)
        expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), max_norm)
        assert norm.item() == pytest.approx(expected.item(), rel=1e-5) and norm > 0.05
        plain.step()
        plain.zero_grad()
        assert not weights.grad.any() and all(p.grad is not None for p in model.parameters())
        for a, b in zip(model.parameters(), reference.parameters()):
            torch.testing.assert_close(a, b, atol=1e-6, rtol=0)


@pytest.mark.smoke
def test_the_quick_tanh_is_a_tanh():
    x = torch.cat([torch.linspace(-12, 12, 20_001), torch.tensor([1e-8, -1e-8, 0.0, 1e30, -1e30])])
    mine, torchs = x.clone().requires_grad_(), x.clone().requires_grad_()
    ours, theirs = ppo_ddp.Tanh()(mine), torch.tanh(torchs)
    torch.testing.assert_close(ours, theirs, atol=3e-7, rtol=0)
    ours.sum().backward()
    theirs.sum().backward()
    torch.testing.assert_close(mine.grad, torchs.grad, atol=1e-6, rtol=0)
    double = torch.linspace(-3, 3, 7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(ppo_ddp.QuickTanh.apply, double)
    model, expected = networks(), torch.nn.Sequential(*networks())
    expected[1] = expected[3] = torch.nn.Tanh()
    outputs = []
    for net in (model, expected):
        with torch.autocast("cpu", torch.bfloat16):
            outputs.append(net(torch.linspace(-2, 2, 50).view(10, 5)))
        outputs[-1].float().sum().backward()
    torch.testing.assert_close(*outputs, atol=0.05, rtol=0.05)
    for a, b in zip(model.parameters(), expected.parameters()):
        torch.testing.assert_close(a.grad, b.grad, atol=0.1, rtol=0.1)


# ---- Memory


def live_bytes() -> int:
    """Of all tensors that Python holds, each storage once; without the fake ones that a compiler leaves behind."""
    gc.collect()
    real = [x for x in gc.get_objects() if type(x) in (torch.Tensor, torch.nn.Parameter) and x.device.type == "cpu"]
    storages = [x.untyped_storage() for x in real if not torch._is_functional_tensor(x)]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda s: s.__name__)
def test_memory_is_flat_over_the_iterations(tmp_path, monkeypatch, script):
    """Nothing of a rollout is left when the next one is over, and the process does not grow."""
    steps = 8 * 20 if script is grpo_ddp else 8 * 8
    settings = {"group_size": 4, "env_options": ("max_episode_steps=20",)} if script is grpo_ddp else {"num_steps": 8}
    settings |= {"output_dir": str(tmp_path), "num_envs": 8, "num_minibatches": 1, "update_epochs": 1}
    log, tensors, resident = script.Run.log, [], []

    def measure(self, values, progress):
        log(self, values, progress)
        if progress.iteration % 50 == 0:
            tensors.append(live_bytes())
            resident.append(psutil.Process().memory_info().rss)

    monkeypatch.setattr(script.Run, "log", measure)
    script.main(script.Args(**settings, eval_episodes=4, save_interval=0, total_timesteps=300 * steps))
    assert len(tensors) >= 6
    assert max(tensors[1:]) - min(tensors[1:]) < 4096, tensors  # less than one column of a rollout
    assert max(resident[3:]) - resident[2] < 4e6, resident


def test_a_rollout_takes_little_more_than_its_samples(tmp_path, monkeypatch):
    """When the first minibatch is learned from, less than FACTOR times observation, action, log-probability, reward
    and two flags of each step are alive: also normalised observations, values, advantages, returns, final
    observations, episode statistics, and the batch in its order and shuffled."""
    FACTOR = 8.0
    before, during = [], []
    see, forward = ppo_ddp.Run.claim, ppo_ddp.Learner.forward

    def claim(self, progress):
        see(self, progress)
        before.append(live_bytes())

    def learn(self, *args, **kwargs):
        if not during:
            during.append(live_bytes())
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(ppo_ddp.Run, "claim", claim)
    monkeypatch.setattr(ppo_ddp.Learner, "forward", learn)
    ppo_ddp.main(small(tmp_path, num_envs=64, num_steps=64, total_timesteps=1))
    env = envs.make("PushCube", 1)
    state, action = env.single_observation_space["state"].shape[0], env.single_action_space.shape[0]
    minimum = 64 * 64 * (4 * (state + action + 2) + 2)
    factor = (during[0] - before[0]) / minimum
    assert 1.0 < factor < FACTOR, factor


# ---- --compile


def compiled_and_eager(script, tmp_path, monkeypatch, args) -> int:
    """Run both and compare them after the first iteration -> how many graphs the compiled one has."""
    graphs, log = [], script.Run.log

    def count(self, values, progress):
        log(self, values, progress)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])

    saved = {}
    for compile in (False, True):
        monkeypatch.setattr(script.Run, "log", count if compile else log)
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        with torch._inductor.config.patch(fallback_random=True, compile_threads=1):  # the random numbers of eager mode
            script.main(script.Args(**(args | {"run_name": f"compile_{compile}", "compile": compile})))
        folder = tmp_path / f"compile_{compile}" / "checkpoints"
        first = min(folder.glob("step_*"), key=lambda p: int(p.name.removeprefix("step_")))
        saved[compile] = load_file(first / "model.safetensors")
    assert not torch._dynamo.utils.counters["graph_break"], "a graph is broken in two"
    assert len(graphs) >= 4 and set(graphs) == {graphs[0]}, f"recompiled after the first iteration: {graphs}"
    for name, x in saved[False].items():
        torch.testing.assert_close(saved[True][name], x, atol=2e-5, rtol=1e-4, msg=lambda m: f"{name}: {m}")
    return graphs[0]


@pytest.mark.parametrize("env_id, graphs", [("PushCube", 4), ("CartPole", 4), ("gym/CartPole-v1", 2)])
def test_compiled_once_it_does_the_same(tmp_path, monkeypatch, env_id, graphs):
    """A graph for the learner and one to act, two more for an embedded env: also where episodes end, and are scored."""
    args = {"env_id": env_id, "num_envs": 8, "num_steps": 64, "num_minibatches": 2, "update_epochs": 1}
    args |= {"total_timesteps": 5 * 8 * 64, "eval_interval": 2 * 8 * 64, "eval_episodes": 2, "save_interval": 1}
    args |= {"output_dir": str(tmp_path), "keep_checkpoints": 100}
    assert compiled_and_eager(ppo_ddp, tmp_path, monkeypatch, args) == graphs
