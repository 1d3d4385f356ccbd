"""What remembers and sees in ppo_lstm_ddp.py, and what several processes must agree on in it. What it shares with
ppo_ddp.py is the same source (test_siblings.py) and is tested there."""

import json
import os
import signal
from functools import partial

import gymnasium as gym
import pytest
import torch
import tyro
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from conftest import Process, run, script, workers
from tensordict import TensorDict
from test_distributed import assert_same_bits
from test_distributed import worker as any_worker
from test_ppo import made  # noqa: F401
from test_resume import assert_same, checkpoint, cut_back, newest, ranks, scores, wait_for

import envs
import ppo_lstm_ddp
from ppo_lstm_ddp import Agent, Args, cut, pack

SMALL = {"num_envs": 4, "num_steps": 8, "num_minibatches": 2, "update_epochs": 2, "total_timesteps": 192}
worker = partial(any_worker, name="ppo_lstm_ddp", defaults=SMALL)


def small(tmp_path, **changes) -> Args:
    settings = {"output_dir": str(tmp_path), "run_name": "run", "eval_episodes": 4} | SMALL | {"num_envs": 8}
    return Args(**(settings | changes))


def eager_env(**options) -> envs.VecEnv:
    """With everything that can be observed."""
    env = envs.make("TabletopMemory", 5, seed=1, camera="wrist", **options)
    spaces = {**env.single_observation_space, "privileged": gym.spaces.Box(-1, 1, (3,))}
    env.single_observation_space = gym.spaces.Dict(spaces)
    return env


def rollout(agent: Agent, env: envs.VecEnv, dones: torch.Tensor, memory: torch.Tensor):
    """Random observations of [T, N], and what is known at each step of them, one step after the other."""
    T, N = dones.shape
    g = torch.Generator().manual_seed(3)
    obs = {"state": torch.randn(T, N, 2, generator=g), "privileged": torch.randn(T, N, 3, generator=g)}
    obs["instruction"] = torch.randint(len(env.instructions), (T, N), generator=g)
    obs["rgb"] = torch.randint(256, (T, N, 64, 64, 3), generator=g, dtype=torch.uint8)
    obs = TensorDict(obs, [T, N])
    knowns = []
    for t in range(T):
        known, memory = agent.step(agent.see(obs[t]), memory)
        knowns.append(known)
        memory = torch.stack([torch.zeros_like(m) if done else m for m, done in zip(memory, dones[t])])
    return obs, torch.stack(knowns)


# ---- Sequences


@pytest.mark.smoke
@pytest.mark.parametrize("kind", ["lstm", "gru", "none"])
def test_packed_sequences_equal_a_pass_step_by_step(kind):
    """Outputs and gradients, of all envs and of some, with ends everywhere: at the first step, the last, in a row."""
    env = eager_env()
    agent = Agent(env, Args(memory=kind))
    dones = torch.rand(13, 5, generator=torch.Generator().manual_seed(0)) < 0.2
    dones[0, 0] = dones[12, 1] = dones[4:7, 2] = True
    dones[:, 3] = False
    memory = torch.randn(5, agent.memory_size)
    obs, knowns = rollout(agent, env, dones, memory)
    sequences = cut(dones)
    seen = TensorDict(agent.see(obs), [13, 5]).reshape(-1)
    weights = torch.randn(knowns.shape[-1])
    for chosen in (torch.arange(5), torch.tensor([3, 0]), torch.tensor([2])):
        places, batch_sizes, who, goes_on = pack(sequences, chosen, 5)
        known = agent.recall(seen[places], memory[who] * goes_on[:, None], batch_sizes)
        expected = knowns.flatten(0, 1)[places]
        torch.testing.assert_close(known, expected, atol=1e-5, rtol=0)
        assert sorted(places.tolist()) == sorted(t * 5 + n for t in range(13) for n in chosen.tolist())
        gradients = []
        for x in (known, expected):
            (x * weights).sum().backward(retain_graph=True)
            gradients.append([p.grad.clone() for p in agent.parameters() if p.grad is not None])
            agent.zero_grad()
        assert len(gradients[0]) > 8 - 4 * (kind == "none")
        for a, b in zip(*gradients, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5 * max(1.0, b.abs().max().item()), rtol=0)


@pytest.mark.smoke
def test_sequences_by_hand():
    dones = torch.tensor([[0, 1, 0], [0, 1, 0], [1, 0, 0], [0, 0, 1]]).bool()
    assert [x.tolist() for x in cut(dones)] == [[2, 0, 1, 0, 1, 1], [0, 0, 2, 3, 0, 1], [4, 3, 2, 1, 1, 1]]
    places, batch_sizes, who, goes_on = pack(cut(dones), torch.tensor([1, 0]), 3)
    assert batch_sizes.tolist() == [5, 2, 1]
    assert who.tolist() == [0, 1, 0, 1, 1] and goes_on.tolist() == [True, False, False, True, False]
    assert places.tolist() == [0, 7, 9, 1, 4, 3, 10, 6]
    with pytest.raises(ValueError, match=r"cut needs the ends as \[T, N\]"):
        cut(dones.view(-1))


def watch_steps(monkeypatch) -> list:
    """Memory before and after each step of the training envs, in the order they are made."""
    steps, real = [], Agent.step

    def step(self, seen, memory):
        known, after = real(self, seen, memory)
        steps.append((memory.clone(), after.clone()))
        return known, after

    monkeypatch.setattr(Agent, "step", step)
    return steps


@pytest.mark.smoke
def test_memory_is_carried_over_rollouts_and_ends_with_the_episode(tmp_path, monkeypatch, made):  # noqa: F811
    """In the script itself: what enters a step is what left the one before, zeroed where an episode ended."""
    ends, rows = [], []

    def hook(env, obs, reward, terminated, truncated, info):
        if env.num_envs == 8:
            terminated[:3], truncated[:3] = torch.tensor([env.calls % 3 == 0, env.calls % 8 == 0, False]), False
            ends.append(terminated | truncated)
            rows.append(len(steps) - 1)
        return obs, reward, terminated, truncated, info

    made.hook = hook
    steps = watch_steps(monkeypatch)
    ppo_lstm_ddp.main(small(tmp_path, total_timesteps=3 * 64))
    assert len(ends) == 24 and torch.stack(ends).sum() > 8
    before, after = (torch.stack(x) for x in zip(*(steps[i] for i in rows)))
    assert not before[0].any() and after.abs().amax(-1).gt(1e-3).all()
    expected = after[:-1] * ~torch.stack(ends)[:-1, :, None]
    assert torch.equal(before[1:], expected)


def test_the_first_ratio_is_one_where_episodes_end_in_a_rollout(tmp_path):
    """Training starts each sequence with the memory that the rollout had; with pictures, words and two epochs off."""
    options = {"env_options": ("camera=wrist", "max_episode_steps=5"), "num_minibatches": 4, "update_epochs": 1}
    for kind in ("lstm", "gru"):
        name = {"run_name": kind, "memory": kind, "learning_rate": 1e-9, "lr_schedule": "constant"}
        ppo_lstm_ddp.main(small(tmp_path, total_timesteps=4 * 64, **options, **name))
        summary = json.loads((tmp_path / kind / "summary.json").read_text())
        assert abs(summary["losses/old_approx_kl"]) < 1e-6 and summary["losses/approx_kl"] < 1e-10


def test_truncation_is_bootstrapped_with_the_memory_of_that_moment(tmp_path, monkeypatch, made):  # noqa: F811
    """V(final_obs), seen by an agent that still remembers the episode; 0 where it failed."""
    finals, checked = [], []

    def hook(env, obs, reward, terminated, truncated, info):
        if env.num_envs == 8:
            terminated[0], truncated[0] = env.calls % 3 == 0, False
            truncated[1:3], terminated[1:3] = env.calls % 2 == 0, False
            finals.append((info["final_obs"].clone(), truncated.clone(), len(steps) - 1))
        return obs, reward, terminated, truncated, info

    real = ppo_lstm_ddp.compute_gae

    def check(rewards, values, next_value, terminated, truncated, final_values, *rest):
        if not checked:
            with torch.no_grad():
                expected = []
                for obs, truncated_now, i in finals:
                    known, _ = step(agents[0], agents[0].see(obs), steps[i][1])
                    expected.append(agents[0].value(known) * truncated_now)
            torch.testing.assert_close(final_values, torch.stack(expected))
            assert final_values.ne(0).sum() == truncated.sum() > 6
            checked.append(True)
        return real(rewards, values, next_value, terminated, truncated, final_values, *rest)

    made.hook = hook
    agents, init, step = [], Agent.__init__, Agent.step
    monkeypatch.setattr(Agent, "__init__", lambda self, *a: (init(self, *a), agents.append(self))[0])
    steps = watch_steps(monkeypatch)
    monkeypatch.setattr(ppo_lstm_ddp, "compute_gae", check)
    ppo_lstm_ddp.main(small(tmp_path, total_timesteps=64))
    assert checked


def test_evaluation_remembers(tmp_path):
    """One episode of each env, by hand: the score is that of a policy with its memory."""
    env = envs.make("TabletopMemory", 64, seed=5)
    agent = Agent(env, Args())
    torch.nn.init.orthogonal_(agent.actor[-1].weight, 1.0)  # so that it moves
    scores = ppo_lstm_ddp.evaluate_memory(agent, env, Accelerator(cpu=True), tmp_path / "none.gif")
    obs, returns, alive = env.reset(), torch.zeros(64), torch.ones(64, dtype=torch.bool)
    state = (torch.zeros(1, 64, 64), torch.zeros(1, 64, 64))
    while alive.any():
        with torch.no_grad():
            out, state = agent.core(agent.encode(agent.see(obs))[None], state)
            action = agent.actor(out[0])
        obs, reward, terminated, truncated, _ = env.step(action, alive)
        returns += reward * alive
        alive &= ~(terminated | truncated)
    assert scores["eval/episodic_return"] == pytest.approx(returns.mean().item(), abs=1e-4)


# ---- What is seen


@pytest.mark.smoke
def test_privileged_observations_reach_only_the_critic():
    env = eager_env()
    agent = Agent(env, Args())
    memory = torch.zeros(5, agent.memory_size)
    obs = env.reset()
    knowns = []
    for x in (0.0, 1.0):
        known, after = agent.step(agent.see(obs.clone().set("privileged", torch.full((5, 3), x))), memory)
        knowns.append((known, after))
    (one, after_one), (two, after_two) = knowns
    assert torch.equal(agent(one, deterministic=True)[0], agent(two, deterministic=True)[0])
    assert torch.equal(after_one, after_two) and not torch.equal(agent.value(one), agent.value(two))


@pytest.mark.smoke
def test_every_picture_word_and_number_is_seen():
    """Two cameras, of different sizes, state and instruction: each changes the policy, and gets a gradient."""
    env = envs.make("TabletopMemory", 5, seed=1, camera="wrist")
    spaces = {**env.single_observation_space, "rgb_wrist": gym.spaces.Box(0, 255, (40, 48, 1), dtype="uint8")}
    env.single_observation_space = gym.spaces.Dict(spaces)
    agent = Agent(env, Args())
    memory = torch.randn(5, agent.memory_size)
    obs = env.reset().set("rgb_wrist", torch.randint(256, (5, 40, 48, 1), dtype=torch.uint8))
    known, _ = agent.step(agent.see(obs), memory)
    for name in ("state", "rgb", "rgb_wrist", "instruction"):
        other = obs.clone()
        other[name] = 1 - obs[name].clamp(0, 1) if name == "instruction" else obs[name] // 2 + 1
        assert (agent.step(agent.see(other), memory)[0] - known).abs().amax(1).gt(1e-5).all(), name
    known.square().sum().backward()
    for name, p in agent.named_parameters():
        assert name.split(".")[0] in ("critic", "actor", "actor_logstd") or p.grad.abs().sum() > 0, name


@pytest.mark.smoke
def test_pictures_are_normalised_once_and_lie_channels_last():
    eye = ppo_lstm_ddp.Eye((64, 64, 3), 16, 32)
    rgb = torch.randint(256, (7, 64, 64, 3), dtype=torch.uint8)
    entered = []
    eye.layers[0].register_forward_pre_hook(lambda module, inputs: entered.append(inputs[0]))
    out = eye(rgb)
    (x,) = entered
    assert x.is_contiguous(memory_format=torch.channels_last) and x.dtype == torch.float32
    planes = torch.stack([rgb[..., c].double() for c in range(3)], 1)
    planes = (planes - planes.mean((2, 3), keepdim=True)) / planes.std((2, 3), keepdim=True)
    torch.testing.assert_close(x, planes.float(), atol=1e-2, rtol=0)
    torch.testing.assert_close(out, eye.layers(x.contiguous()), atol=1e-4, rtol=0)
    grey = torch.full((2, 64, 64, 3), 77, dtype=torch.uint8)  # without any deviation
    assert eye(grey).isfinite().all()


def test_positions_alone_are_observed():
    whole, part = envs.make("gym/HalfCheetah-v5", 2, seed=1), envs.make("gym/HalfCheetah-v5", 2, seed=1, observe="0:8")
    assert torch.equal(whole.reset()["state"][:, :8], part.reset()["state"])
    for _ in range(3):
        action = torch.randn(2, 6)
        one, two = whole.step(action), part.step(action)
        assert torch.equal(one[0]["state"][:, :8], two[0]["state"]) and torch.equal(one[1], two[1])
    for wrong in ("0:18", "8:8", "8", "a:b", 3):
        with pytest.raises(ValueError, match=f"observe={wrong} is no part of the 17 entries of state: give observe=0:"):
            envs.make("gym/HalfCheetah-v5", 1, observe=wrong)


def test_the_colour_is_told_once():
    """In the first observation of every episode, while the arm is held; a wrong block ends the episode."""
    env = envs.make("TabletopMemory", 300, seed=3)
    obs = env.reset()
    assert obs["instruction"].unique().tolist() == [0, 1, 2] and "rgb" not in obs.keys()
    task, ended = obs["instruction"].clone(), torch.zeros(300)
    wrong = (task + 1) % 3
    first = obs["state"][:, :2].clone()
    for step in range(16):
        blocks = obs["state"][:, 2:].view(300, 3, 2)
        goal = torch.where((torch.arange(300) < 150), task, wrong)
        action = blocks[torch.arange(300), goal] * 10
        obs, reward, terminated, truncated, info = env.step(action)
        if step == 0:
            assert torch.equal(obs["state"][:, :2], first) and not reward.any() and not terminated.any()
        done = terminated | truncated
        assert torch.equal(obs["instruction"] < 3, done)  # the next episode's first observation tells its own
        assert (info["final_obs"]["instruction"] == 3).all()
        assert info["episode"]["success"][done & (ended == 0) & (torch.arange(300) < 150)].all()
        assert not info["episode"]["success"][done & (ended == 0) & (torch.arange(300) >= 150)].any()
        task = torch.where(done, obs["instruction"], task)
        ended += done
        wrong = (task + 1) % 3
    assert (ended > 0).float().mean() > 0.97


# ---- Several processes


@pytest.mark.parametrize("sizes", ["equal", "unequal", "empty"])
def test_gradient_equals_that_of_the_joined_batch(tmp_path, sizes):
    """With sequences: also of different lengths on the ranks, and where a rank has none in a minibatch."""
    steps, rows = {"equal": ([8, 8], [4, 4]), "unequal": ([8, 3], [4, 4]), "empty": ([8, 5], [4, 1])}[sizes]
    minibatches = {"equal": 2, "unequal": 2, "empty": 4}[sizes]
    settings = {"num_steps": steps, "num_envs": rows, "num_minibatches": minibatches, "update_epochs": 1}
    settings |= {"max_grad_norm": 1e9, "env_options": [["max_episode_steps=3"]] * 2}
    records, _ = worker(tmp_path, "gradient", 2, total_timesteps=1, learning_rate=1e-12, **settings)
    agent = Agent(envs.make("TabletopMemory", 1), Args())
    agent.load_state_dict(records[0]["initial"])
    held = [iter(r["batches"]) for r in records]
    empty = 0
    for m in range(minibatches):
        mine = [n * (m + 1) // minibatches - n * m // minibatches for n in rows]
        agent.zero_grad()
        loss = 0.0
        for r in (0, 1):
            if not mine[r]:
                empty += 1
                continue
            batch = next(held[r])
            assert len(batch["action"]) == mine[r] * steps[r] == batch["batch_sizes"].sum()
            assert len(batch["batch_sizes"]) == 3  # episodes end within the rollout
            memory, knowns, first = batch["memory"], [], 0
            for n in batch["batch_sizes"].tolist():  # one step after the other, as in a rollout
                known, memory = agent.step(batch["seen"][first : first + n], memory[:n])
                knowns.append(known)
                first += n
            known = torch.cat(knowns)
            _, logprob, entropy = agent(known, batch["action"])
            inputs = [batch[k] for k in ("logprob", "advantage", "returns", "value")]
            loss = loss + ppo_lstm_ddp.ppo_loss(logprob, entropy, agent.value(known), *inputs, 0.2, 0.0, 0.5, False)[0]
        (loss / sum(n * t for n, t in zip(mine, steps))).backward()
        for r in records:
            for gradient, p in zip(r["gradients"][m], agent.parameters(), strict=True):
                torch.testing.assert_close(gradient, p.grad, atol=1e-6, rtol=0)
        assert sum(p.grad.abs().sum() for p in agent.parameters()) > 1e-3
    assert empty == (3 if sizes == "empty" else 0)
    if sizes != "empty":  # normalised over all ranks
        joined = torch.cat([b["advantage"] for r in records for b in r["batches"]])
        assert abs(joined.mean()) < 1e-6 and joined.std(unbiased=False).item() == pytest.approx(1.0, abs=1e-5)


def test_stragglers_are_preempted(tmp_path):
    """Sequences of different lengths on the ranks: every sample collected is trained on, and weights stay bit-equal."""
    settings = {"num_steps": 16, "num_envs": 8, "total_timesteps": 16 * 8 * 2 * 4, "preempt_fraction": 0.5}
    (one, two), _ = worker(tmp_path, "slow", 2, **settings)
    assert_same_bits(one["final"], two["final"])
    assert one["updates"] == two["updates"] and one["steps"] > two["steps"]
    summary = json.loads((tmp_path / "slow_2" / "run" / "summary.json").read_text())
    assert summary["global_step"] == 8 * (one["steps"] + two["steps"]) and summary["charts/preempted_fraction"] > 0.1


@pytest.mark.parametrize("case", ["nan", "kl"])
def test_ranks_skip_and_stop_together(tmp_path, case):
    (one, two), _ = worker(tmp_path, case, 2, target_kl=1.0 if case == "kl" else 0.0, update_epochs=5)
    assert_same_bits(one["final"], two["final"])
    assert all(x.isfinite().all() for x in one["final"].values())
    assert one["updates"] == two["updates"] == (3 * 2 if case == "kl" else 3 * 10)


# ---- Resume, kills and signals

OPTIONS = "--num-envs 8 --num-steps 12 --num-minibatches 4 --update-epochs 2 --eval-episodes 6 --norm-reward"
OPTIONS = f"{OPTIONS} --memory-size 16 --hidden-size 16 --keep-checkpoints 1000 --save-interval 1".split()
STEPS = 8 * 12  # of one process in an iteration; episodes of 16 steps go on into the next


def train(tmp_path, nproc, name, iterations, *options) -> str:
    where = ["--output-dir", tmp_path, "--run-name", name, "--total-timesteps", STEPS * nproc * iterations]
    words = [str(x) for x in (*OPTIONS, *where, *options)]
    if nproc > 1:
        return workers[nproc].run(name="ppo_lstm_ddp", options=words)
    ppo_lstm_ddp.main(tyro.cli(Args, args=words))


@pytest.mark.parametrize("nproc", [pytest.param(1, marks=pytest.mark.smoke), 2, 3])
def test_resume_is_exact(tmp_path, nproc):
    """In the middle of episodes: memory is part of the checkpoint of each rank."""
    train(tmp_path, nproc, "whole", 6)
    cut_back(tmp_path / "whole", "parts", STEPS * nproc * 3)
    train(tmp_path, nproc, "parts", 6, "--resume", "auto")
    whole, parts = (checkpoint(newest(tmp_path / name)) for name in ("whole", "parts"))
    assert_same(whole, parts)
    assert_same(scores(tmp_path / "whole"), scores(tmp_path / "parts"))
    for rank in range(nproc):
        memory = whole[f"rank_{rank}"]["memory"]
        assert memory.shape == (8, 32) and memory.abs().sum() > 0


@pytest.mark.parametrize("options", [["--memory", "gru", "--env-options", "camera=wrist"], ["--memory", "none"]])
def test_resume_is_exact_with_pictures_and_without_memory(tmp_path, options):
    train(tmp_path, 1, "whole", 4, *options)
    cut_back(tmp_path / "whole", "parts", STEPS * 2)
    train(tmp_path, 1, "parts", 4, *options, "--resume", "auto")
    assert_same(*(checkpoint(newest(tmp_path / name)) for name in ("whole", "parts")))


def test_other_memory_is_refused(tmp_path, capsys):
    train(tmp_path, 1, "run", 1)
    for option, value in (("--memory", "gru"), ("--memory-size", 8), ("--channels", 8)):
        with pytest.raises(SystemExit, match=f"set {option} to match it"):
            train(tmp_path, 1, "run", 2, "--resume", "auto", option, value)


def test_a_killed_rank_leads_to_a_restart_that_loses_nothing(tmp_path):
    """kill -9 of rank 1 under --max-restarts: ends by itself, with the bits of the run that was left alone."""
    train(tmp_path, 2, "whole", 40)
    command = script("ppo_lstm_ddp.py", 2)
    command[4:4] = ["--max-restarts", "1"]
    where = ["--output-dir", tmp_path, "--run-name", "killed", "--total-timesteps", STEPS * 2 * 40]
    process = Process([*command, *OPTIONS, *where])
    wait_for(lambda: len(list((tmp_path / "killed" / "checkpoints").glob("step_*"))) > 5)
    ranks(process, "ppo_lstm_ddp.py")[1].kill()
    code, text = process.finish()
    assert code == 0 and "resuming" in text, text[-3000:]
    assert_same(*(checkpoint(newest(tmp_path / name)) for name in ("whole", "killed")))


@pytest.mark.smoke
def test_a_signal_stops_it_with_a_checkpoint(tmp_path, made, capsys):  # noqa: F811
    def hook(env, *result):
        if env.calls == 20 and env.num_envs == 8:
            os.kill(os.getpid(), signal.SIGTERM)
        return result

    made.hook = hook
    ppo_lstm_ddp.main(small(tmp_path, total_timesteps=1_000_000))
    last = newest(tmp_path / "run")
    assert (tmp_path / "run" / "preempted").read_text() == last.name == f"step_{3 * 64}"
    assert f"resume with --resume {tmp_path}/run" in capsys.readouterr().out


# ---- What users type


BAD = {
    "--num-envs 12": "the sequences of --num-envs 12 do not divide into --num-minibatches 8",
    "--memory-size 0": "--memory-size must be greater than 0",
    "--channels 0": "--channels must be greater than 0",
    "--env-options colour=red": "TabletopMemory has no option 'colour': it has camera",
    "--env-options camera=head": "a wrist and a fixed camera, or none, not 'head'",
}


@pytest.mark.smoke
@pytest.mark.parametrize("options", BAD)
def test_wrong_input_is_answered_in_one_line(options, tmp_path):
    with pytest.raises(SystemExit) as stopped:
        ppo_lstm_ddp.main(tyro.cli(Args, args=[*options.split(), "--output-dir", str(tmp_path / "runs")]))
    assert BAD[options] in stopped.value.code and "\n" not in stopped.value.code
    assert not (tmp_path / "runs").exists()


def test_pictures_that_are_too_small_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(envs.tabletop, "SIZE", 32)
    with pytest.raises(SystemExit, match="rgb of Tabletop has 32 x 32 pixels: give it 36 x 36 or more"):
        ppo_lstm_ddp.main(small(tmp_path, env_id="Tabletop"))


@pytest.fixture
def fresh_accelerate():
    """It refuses another precision than that of the runs before in this process."""
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


def test_discrete_actions_and_bf16(tmp_path, fresh_accelerate):
    settings = {"env_id": "gym/CartPole-v1", "eval_episodes": 2, "mixed_precision": "bf16"}
    ppo_lstm_ddp.main(small(tmp_path, **settings))
    ppo_lstm_ddp.main(small(tmp_path, run_name="b", env_options=("camera=wrist",), mixed_precision="bf16"))
    for name in ("run", "b"):
        saved = checkpoint(newest(tmp_path / name))
        assert saved["rank_0"]["memory"].dtype == torch.float32
        summary = json.loads((tmp_path / name / "summary.json").read_text())
        assert summary["losses/skipped_updates"] == 0 and summary["losses/approx_kl"] < 0.5


def test_what_is_told_once_is_remembered(tmp_path):
    """With memory nearly every episode succeeds, without it none but by chance. Seeds: benchmarks/results."""
    for kind, steps in {"lstm": 130_000, "none": 60_000}.items():
        options = ["--memory", kind, "--total-timesteps", steps, "--output-dir", tmp_path, "--run-name", kind]
        run(*script("ppo_lstm_ddp.py"), *options, timeout=170)
    with_memory, without = (json.loads((tmp_path / k / "summary.json").read_text()) for k in ("lstm", "none"))
    assert with_memory["eval/success_rate"] >= 0.9 and without["eval/success_rate"] <= 0.45
