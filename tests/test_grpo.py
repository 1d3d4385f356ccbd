"""The parts of grpo_ddp.py, and what several processes must agree on in it. What it shares with ppo_ddp.py is the same
source (test_siblings.py) and tested there."""

import json
import math
import os
import shutil
import signal

import gymnasium as gym
import pytest
import torch
import tyro
from conftest import run, script, workers
from test_distributed import assert_same_bits
from test_distributed import worker as start_worker
from test_ppo import compiled_and_eager, made  # noqa: F401  (a fixture)
from test_resume import assert_same, checkpoint, cut_back, newest, scores

import envs
import grpo_ddp
import ppo_ddp
from grpo_ddp import LOSSES, Agent, Args, episode_places, from_table, group_advantages, grpo_loss, to_table

SMALL = {"num_envs": 8, "group_size": 4, "num_minibatches": 2, "update_epochs": 2, "eval_episodes": 4}


def small(tmp_path, **changes) -> Args:
    settings = {"output_dir": str(tmp_path), "run_name": "run", "total_timesteps": 1600, "max_grad_norm": 1.0}
    return Args(**(settings | SMALL | changes))


def worker(tmp_path, case, nproc, **changes):
    defaults = SMALL | {"total_timesteps": 1600}
    return start_worker(tmp_path, case, nproc, name="grpo_ddp", defaults=defaults, **changes)


# ---- Advantages


def episodes(*rewards: list[float]):
    """Rewards of one episode per env, as [T, N] with the mask of their steps."""
    T = max(map(len, rewards))
    table = torch.tensor([list(r) + [0.0] * (T - len(r)) for r in rewards]).T
    active = torch.tensor([[t < len(r) for r in rewards] for t in range(T)])
    return table, active


@pytest.mark.smoke
def test_advantages_of_trajectories_by_hand():
    """Two groups of three: returns 1, 2, 3 and 0, 0, 6."""
    rewards, active = episodes([1.0], [1.0, 1.0], [0.0, 0.0, 3.0], [0.0, 0.0], [0.0], [2.0, 4.0])
    advantages, valid, returns = group_advantages(rewards, active, 3, 1.0, step_wise=False, scale=True)
    assert returns.tolist() == [1, 2, 3, 0, 0, 6]
    deviations = [math.sqrt(2 / 3), math.sqrt(8)]
    expected = torch.tensor(
        [-1 / deviations[0], 0, 1 / deviations[0], -2 / deviations[1], -2 / deviations[1], 4 / deviations[1]]
    )
    torch.testing.assert_close(advantages, expected * active)
    assert torch.equal(valid, active)
    first = advantages[0].view(2, 3)  # every episode has a first step
    torch.testing.assert_close(first.mean(1), torch.zeros(2), atol=1e-6, rtol=0)
    torch.testing.assert_close(first.std(1, correction=0), torch.ones(2))
    plain, _, _ = group_advantages(rewards, active, 3, 1.0, step_wise=False, scale=False)
    torch.testing.assert_close(plain, torch.tensor([-1.0, 0, 1, -2, -2, 4]) * active)
    discounted, _, returns = group_advantages(rewards, active, 3, 0.5, step_wise=False, scale=False)
    assert returns.tolist() == [1, 1.5, 0.75, 0, 0, 4]
    torch.testing.assert_close(discounted[0, 3:], torch.tensor([-4.0, -4.0, 8.0]) / 3)


@pytest.mark.smoke
def test_advantages_of_steps_by_hand():
    """At each step the return from there on, among those still running: the last one has nobody to compare with."""
    rewards, active = episodes([1.0], [1.0, 1.0], [0.0, 0.0, 3.0])
    advantages, valid, _ = group_advantages(rewards, active, 3, 1.0, step_wise=True, scale=False)
    expected = torch.tensor([[-1.0, 0.0, 1.0], [0.0, -1.0, 1.0], [0.0, 0.0, 0.0]])
    torch.testing.assert_close(advantages, expected)
    assert valid.tolist() == [[True] * 3, [False, True, True], [False] * 3]
    scaled, _, _ = group_advantages(rewards, active, 3, 1.0, step_wise=True, scale=True)
    torch.testing.assert_close(scaled[1], torch.tensor([0.0, -1.0, 1.0]))


def test_groups_without_variance_are_not_valid():
    """Also where the returns differ by rounding alone, as sums in another order do."""
    rewards, active = episodes([1.0, 0.0], [1.0 + 2**-22, 0.0], [1.0 - 2**-22, 0.0], [0.0, 1.0], [1.0], [1.0, 0.0])
    for step_wise in (False, True):
        advantages, valid, returns = group_advantages(rewards, active, 3, 1.0, step_wise, scale=True)
        assert len(returns[:3].unique()) == 3 and not valid[0].any() and not advantages[0].any()
        assert step_wise or not valid.any()


@pytest.mark.parametrize("step_wise", [False, True])
def test_episodes_one_after_the_other_are_compared_by_their_start(step_wise):
    """Two groups of three envs, two episodes each: the same advantages as with every episode in a row of its own."""
    g = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 6, (6, 2), generator=g)  # of the first and the second episode of each env
    T = int(lengths.sum(1).max())
    step = torch.arange(T)[:, None]
    active = step < lengths.sum(1)
    ends = (step == lengths[:, 0] - 1) | (step == lengths.sum(1) - 1)
    rewards = torch.randn(T, 6, generator=g)
    places = episode_places(active, ends, 3, 2)
    advantages, valid, _ = group_advantages(
        to_table(rewards, places, 12), to_table(active, places, 12), 3, 0.9, step_wise, scale=True
    )
    advantages, valid = from_table(advantages, places), from_table(valid, places)
    assert not advantages[~active].any() and not valid[~active].any()
    for group in (0, 3):
        for number in (0, 1):
            rows = []
            for env in range(group, group + 3):
                first = 0 if number == 0 else lengths[env, 0]
                rows.append(slice(first, first + lengths[env, number]))
            alone, running = episodes(*(rewards[rows[k], group + k].tolist() for k in range(3)))
            expected, kept, _ = group_advantages(alone, running, 3, 0.9, step_wise, scale=True)
            for k, row in enumerate(rows):
                torch.testing.assert_close(advantages[row, group + k], expected[: lengths[group + k, number], k])
                assert torch.equal(valid[row, group + k], kept[: lengths[group + k, number], k])


def test_an_env_runs_its_next_episode_at_once_from_the_start_of_its_group(tmp_path, made):  # noqa: F811
    """--episodes-per-env 3: the n-th episodes of a group start equal, no start is used twice, and rows idle less."""
    first = {}
    real = made.real

    def make(*args, **kwargs):
        env = real(*args, **kwargs)
        if env.num_envs == 8:
            step = env.step
            env.calls = 0

            def watched(action, active=None, look=True):
                env.calls += 1
                obs, reward, terminated, truncated, info = step(action, active, look)
                done = active & (torch.arange(8) % 4 < env.calls % 5)
                if done.any():  # end the episode here, whatever the physics says
                    restarted = env._restart(done, env._state, env._episode, env._steps, env._return)
                    env._state, env._episode, env._steps, env._return, parts = restarted
                    obs = obs.clone()
                    obs["state"] = parts["state"]
                    for i in done.nonzero().flatten().tolist():
                        first.setdefault(i, []).append(obs["state"][i].clone())
                return obs, reward, done, done & False, info

            env.step = watched
        return env

    made.patch(make)
    grpo_ddp.main(small(tmp_path, group_size=4, episodes_per_env=3, total_timesteps=1))
    assert all(len(starts) == 3 for starts in first.values()) and len(first) == 8
    for number in range(2):  # the last one is that of an episode which nobody runs
        starts = torch.stack([first[i][number] for i in range(8)]).view(2, 4, -1)
        assert (starts == starts[:, :1]).all()
        assert not torch.equal(starts[0, 0], starts[1, 0])
    assert not torch.equal(first[0][0], first[0][1])
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["charts/episodes"] == 24


def test_flat_data_is_refused():
    with pytest.raises(ValueError, match=r"\[T, N\]"):
        group_advantages(torch.zeros(6), torch.ones(6, dtype=torch.bool), 3, 1.0, False, True)


def gradient(rewards, active, obs, actions, group_size, **settings):
    """Of the mean loss over the valid samples, for a policy that is the same every time."""
    torch.manual_seed(0)
    agent, old = (Agent(envs.make("PushCube", 1), Args()) for _ in range(2))
    torch.nn.init.normal_(agent.actor[-1].weight, std=0.1)
    advantages, valid, _ = group_advantages(rewards, active, group_size, 1.0, settings["step_wise"], True)
    rows = valid.view(-1)
    batch = agent.see({"state": obs.flatten(0, 1)[rows]})
    _, logprob, entropy = agent(batch, actions.flatten(0, 1)[rows])
    with torch.no_grad():
        before = old(batch, actions.flatten(0, 1)[rows])[1]
    loss, _ = grpo_loss(logprob, entropy, before, advantages.view(-1)[rows], before - 0.1, 0.2, 0.28, 0.01, 0.1)
    (loss / rows.sum()).backward()
    return [p.grad for p in agent.parameters()]


@pytest.mark.parametrize("step_wise", [False, True])
def test_a_group_without_variance_changes_nothing(step_wise):
    """The gradient with it equals the one without it: in loss, KL and entropy."""
    g = torch.Generator().manual_seed(1)
    T, N = 6, 12
    rewards, obs, actions = (
        torch.randn(T, N, generator=g),
        torch.randn(T, N, 16, generator=g),
        torch.randn(T, N, 2, generator=g),
    )
    active = torch.arange(T)[:, None] < torch.randint(2, T + 1, (N,), generator=g)
    rewards[:, 4:8] = 0.0
    rewards[0, 4:8] = 5.0
    rewards = rewards * active
    rest = [0, 1, 2, 3, 8, 9, 10, 11]
    whole = gradient(rewards, active, obs, actions, 4, step_wise=step_wise)
    without = gradient(rewards[:, rest], active[:, rest], obs[:, rest], actions[:, rest], 4, step_wise=step_wise)
    for one, two in zip(whole, without):
        torch.testing.assert_close(one, two, atol=1e-6, rtol=0)
    assert sum(x.abs().sum() for x in whole) > 1e-2


# ---- Loss


@pytest.mark.smoke
def test_loss_by_hand():
    new = torch.tensor([0.5, 0.25, 0.5, -0.5], requires_grad=True)
    zero, advantage = torch.zeros(4), torch.tensor([1.0, 1.0, -1.0, -1.0])
    loss, logged = grpo_loss(new, zero, zero, advantage, None, 0.2, 0.3, 0.0, 0.0)
    (slope,) = torch.autograd.grad(loss, new)
    # The upper bound is its own: a ratio of 1.28 is within 1.3, and would not be within 1.2.
    assert slope.ne(0).tolist() == [False, True, True, False]
    assert dict(zip(LOSSES, logged.tolist()))["losses/clipfrac"] == 3
    expected = -1.3 - math.exp(0.25) + math.exp(0.5) + 0.8
    assert loss.item() == pytest.approx(expected, abs=1e-6)


def test_kl_to_the_reference_is_k3():
    new, reference = torch.tensor([0.3, -0.2]), torch.tensor([0.1, 0.4])
    zero = torch.zeros(2)
    loss, logged = grpo_loss(new, zero, new, zero, reference, 0.2, 0.28, 0.0, 0.5)
    k3 = sum(math.exp(r - n) - (r - n) - 1 for n, r in zip(new.tolist(), reference.tolist()))
    assert loss.item() == pytest.approx(0.5 * k3, abs=1e-6)
    assert logged[LOSSES.index("losses/ref_kl")].item() == pytest.approx(k3, abs=1e-6)
    same, _ = grpo_loss(new, zero, new, zero, new, 0.2, 0.28, 0.0, 0.5)
    assert same == 0


# ---- The script in one process


@pytest.mark.parametrize("env_id", ["PushCube", "gym/Hopper-v5"])
def test_members_of_a_group_start_equal_and_groups_differ(tmp_path, env_id):
    """On two processes, which together start what one with as many envs starts."""
    halves, _ = worker(tmp_path, "plain", 2, env_id=env_id, total_timesteps=1, eval_episodes=2)
    whole = envs.make(env_id, 16, seed=1, group_size=4).reset(episode=1)["state"]
    check_starts(whole)
    assert torch.equal(whole, torch.cat([h["starts"][0] for h in halves]))


def check_starts(start):
    groups = start.view(-1, 4, start.shape[-1])
    assert (groups == groups[:, :1]).all()
    assert len(groups[:, 0].unique(dim=0)) == len(groups)


@pytest.mark.parametrize("env_id", ["PushCube", "gym/Hopper-v5"])
def test_every_iteration_starts_in_new_states(tmp_path, made, env_id):  # noqa: F811
    starts = []
    real = made.real

    def make(*args, **kwargs):
        env = real(*args, **kwargs)
        if kwargs["seed"] == 1:
            reset = env.reset
            env.reset = lambda episode=0: (starts.append(reset(episode).clone()), starts[-1])[1]
        return env

    made.patch(make)
    grpo_ddp.main(small(tmp_path, env_id=env_id, total_timesteps=600 if "/" in env_id else 2500))
    assert len(starts) >= 3
    for start in starts:
        check_starts(start["state"])
    firsts = torch.cat([s["state"][::4] for s in starts])
    assert len(firsts.unique(dim=0)) == len(firsts)


def test_several_episodes_per_env_use_no_start_twice(tmp_path, made):  # noqa: F811
    """Those that an iteration goes through are over before the next one begins."""
    used = []
    real = made.real

    def make(*args, **kwargs):
        env = real(*args, **kwargs)
        if kwargs["seed"] == 1:
            reset = env.reset
            env.reset = lambda episode=0: (used.extend(range(episode, episode + 3)), reset(episode))[1]
        return env

    made.patch(make)
    options = {"env_options": ("max_episode_steps=5",), "episodes_per_env": 3}
    grpo_ddp.main(small(tmp_path, **options, total_timesteps=8 * 5 * 3 * 3))
    assert len(used) >= 9 and len(set(used)) == len(used)


def test_masked_steps_contribute_nothing(tmp_path, made):  # noqa: F811
    """Garbage in the observations and rewards of ended episodes changes no bit of weights, statistics or metrics."""
    results = []
    for garbage in (0.0, 1e6):
        active = {}

        def hook(env, obs, reward, terminated, truncated, info):
            # Episodes end at different steps, row by row; from then on the row is held, and its data is not to be used.
            if env.num_envs == 8:
                clock = active.setdefault("clock", torch.zeros(8))
                clock += 1
                cut = clock >= 20 + 5 * torch.arange(8)
                running = active.setdefault("running", torch.ones(8, dtype=torch.bool))
                before = running.clone()
                truncated = cut & running
                reward = torch.where(running, reward, torch.tensor(garbage))
                running &= ~cut
                obs = obs.clone()
                obs["state"][~running] = garbage
                info["metrics"]["distance"] = torch.where(before, info["metrics"]["distance"], garbage)
                for name, x in info["episode"].items():
                    info["episode"][name] = torch.where(before, x.float(), garbage)
                if not running.any():
                    active.clear()
            return obs, reward, terminated & False, truncated, info

        made.hook = hook
        name = f"run_{garbage}"
        grpo_ddp.main(small(tmp_path, run_name=name, kl_coef=0.1, ent_coef=0.01, total_timesteps=900))
        results.append((checkpoint(newest(tmp_path / name)), scores(tmp_path / name)))
    assert_same(*[r[0] for r in results])
    metrics = [{k: v for k, v in r[1].items() if not k.startswith("eval/")} for r in results]
    assert_same(*metrics)
    # 20 + 25 + ... + 55 steps an iteration, of 55 x 8 rows; for 5 steps of each group one member runs alone
    assert metrics[0]["charts/steps_sampled"] == 900 and metrics[0]["charts/valid_fraction"] == pytest.approx(290 / 300)
    assert metrics[0]["charts/idle_fraction"] == pytest.approx(140 / 440)


def test_success_as_the_only_reward(tmp_path, monkeypatch, made):  # noqa: F811
    real, seen = grpo_ddp.group_advantages, []
    monkeypatch.setattr(grpo_ddp, "group_advantages", lambda *a: (seen.append(a), real(*a))[1])
    success = torch.tensor([1.0, 0, 0, 1, 1, 1, 0, 1])

    def hook(env, obs, reward, terminated, truncated, info):
        info["episode"]["success"] = success[: env.num_envs]
        return obs, reward, terminated, truncated, info

    made.hook = hook
    grpo_ddp.main(small(tmp_path, reward="success", gamma=1.0, total_timesteps=800))
    ((rewards, active, *_),) = seen
    assert torch.equal(rewards.sum(0), success) and set(rewards.unique().tolist()) == {0.0, 1.0}
    assert torch.equal(rewards.argmax(0)[success > 0], active.sum(0)[success > 0] - 1)  # at the last step
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["charts/group_return_mean"] == summary["charts/success_rate"] == 5 / 8
    del made.hook
    with pytest.raises(SystemExit, match="gym/CartPole-v1 does not always say what success is"):
        grpo_ddp.main(small(tmp_path, env_id="gym/CartPole-v1", reward="success", run_name="gym"))


def test_groups_are_filtered_by_their_success(tmp_path, monkeypatch, made):  # noqa: F811
    """Of two groups the first succeeds always, the second half of the time: only the second is learned from."""
    sizes = []
    real = grpo_ddp.grpo_loss
    monkeypatch.setattr(grpo_ddp, "grpo_loss", lambda *a: (sizes.append(len(a[0])), real(*a))[1])

    def hook(env, obs, reward, terminated, truncated, info):
        info["episode"]["success"] = torch.tensor([1.0, 1, 1, 1, 1, 1, 0, 0])[: env.num_envs]
        return obs, reward, terminated, truncated, info

    made.hook = hook
    grpo_ddp.main(small(tmp_path, filter_success=(0.1, 0.9), total_timesteps=400, update_epochs=1, num_minibatches=1))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert sizes == [400] and summary["charts/groups_without_signal"] == 0.5 and summary["charts/valid_fraction"] == 0.5


def test_the_reference_stays_and_is_only_kept_where_it_is_used(tmp_path, monkeypatch):
    copies = []
    real = grpo_ddp.copy.deepcopy
    monkeypatch.setattr(grpo_ddp.copy, "deepcopy", lambda *a: (copies.append(real(*a)), copies[-1])[1])
    grpo_ddp.main(small(tmp_path))
    assert not [c for c in copies if isinstance(c, Agent)]
    assert checkpoint(newest(tmp_path / "run"))["trainer"]["reference"] is None
    grpo_ddp.main(small(tmp_path, run_name="kl", kl_coef=0.1))
    (reference,) = [c for c in copies if isinstance(c, Agent)]
    torch.manual_seed(1)
    assert_same_bits(dict(reference.state_dict()), dict(Agent(envs.make("PushCube", 1), Args()).state_dict()))
    assert json.loads((tmp_path / "kl" / "summary.json").read_text())["losses/ref_kl"] > 0


@pytest.mark.parametrize("source", ["ppo_ddp", "grpo_ddp"])
def test_starts_from_a_policy_of_either_script(tmp_path, source, monkeypatch, capsys):
    """The policy with its statistics is taken over bit for bit, whatever else the checkpoint holds."""
    steps = {"num_steps": 8} if source == "ppo_ddp" else {"group_size": 4}
    module = {"ppo_ddp": ppo_ddp, "grpo_ddp": grpo_ddp}[source]
    settings = {"output_dir": str(tmp_path), "num_envs": 8, "eval_episodes": 4, "num_minibatches": 2}
    module.main(module.Args(run_name="first", total_timesteps=900, **steps, **settings))
    before = checkpoint(newest(tmp_path / "first"))
    settings = {"init_from": str(tmp_path / "first"), "kl_coef": 0.1}
    grpo_ddp.main(small(tmp_path, total_timesteps=1, **settings))
    assert "starting from the policy of" in capsys.readouterr().out
    after = checkpoint(newest(tmp_path / "run"))
    reference = after["trainer"]["reference"]  # taken before the first update
    assert sum(k.startswith("actor") for k in reference) == 7 and "obs_moments.state.var" in reference
    for k, v in reference.items():
        assert torch.equal(v, before[f"model.{k}"]), k
    count = "model.obs_moments.state.count"
    assert after[count] == before[count] + after["trainer"]["global_step"]
    shutil.rmtree(tmp_path / "first")  # no longer needed: what goes on is the run itself
    grpo_ddp.main(small(tmp_path, total_timesteps=1600, resume="auto", **settings))
    text = capsys.readouterr().out
    assert "resuming" in text and "starting from" not in text
    assert_same(checkpoint(newest(tmp_path / "run"))["trainer"]["reference"], reference)


# ---- Resume


def train_here(tmp_path, name, total, **changes):
    args = small(tmp_path, run_name=name, total_timesteps=total, save_interval=1, keep_checkpoints=100, **changes)
    grpo_ddp.main(args)


@pytest.mark.parametrize("env_id", ["PushCube", "gym/CartPole-v1"])
def test_resume_is_exact(tmp_path, env_id):
    """Also with a simulator that cannot save its state: every rollout starts anew. The reference comes along."""
    total = 4000 if env_id == "PushCube" else 1000
    train_here(tmp_path, "whole", total, env_id=env_id, kl_coef=0.05)
    folders = sorted(int(p.name[5:]) for p in (tmp_path / "whole" / "checkpoints").glob("step_*"))
    cut_back(tmp_path / "whole", "parts", folders[len(folders) // 2])
    train_here(tmp_path, "parts", total, env_id=env_id, kl_coef=0.05, resume="auto")
    assert len(folders) > 4 and newest(tmp_path / "parts").name == f"step_{folders[-1]}"
    assert_same(checkpoint(newest(tmp_path / "whole")), checkpoint(newest(tmp_path / "parts")))
    assert_same(scores(tmp_path / "whole"), scores(tmp_path / "parts"))


def test_resume_is_exact_on_three_processes(tmp_path):
    """With two a sum has only one order: DDP's regrouping of gradients would go unseen."""
    options = "--num-envs 8 --group-size 4 --num-minibatches 2 --eval-episodes 6 --hidden-size 32 --save-interval 1"
    options = [*options.split(), "--keep-checkpoints", 100, "--total-timesteps", 9600, "--output-dir", tmp_path]
    workers[3].run(name="grpo_ddp", options=[*options, "--run-name", "whole"])
    cut_back(tmp_path / "whole", "parts", 4800)
    text = workers[3].run(name="grpo_ddp", options=[*options, "--run-name", "parts", "--resume", "auto"])
    assert f"resuming {tmp_path}/parts/checkpoints/step_4800" in text
    assert_same(checkpoint(newest(tmp_path / "whole")), checkpoint(newest(tmp_path / "parts")))
    assert_same(scores(tmp_path / "whole"), scores(tmp_path / "parts"))


@pytest.mark.smoke
def test_a_signal_stops_it_with_a_checkpoint(tmp_path, made, capsys):  # noqa: F811
    def hook(env, *result):
        if env.calls == 250 and env.num_envs == 8:
            os.kill(os.getpid(), signal.SIGTERM)
        return result

    made.hook = hook
    grpo_ddp.main(small(tmp_path, total_timesteps=1_000_000))
    last = newest(tmp_path / "run")
    assert (tmp_path / "run" / "preempted").read_text() == last.name == "step_2400"
    assert f"resume with --resume {tmp_path}/run" in capsys.readouterr().out


def test_nan_from_the_env_stops_the_run(tmp_path, made):  # noqa: F811
    def hook(env, obs, reward, *rest):
        if env.calls == 120:
            reward[3] = math.nan
        return obs, reward, *rest

    made.hook = hook
    with pytest.raises(SystemExit, match="NaN or infinity from PushCube on rank 0 in iteration 2"):
        grpo_ddp.main(small(tmp_path))
    assert not (tmp_path / "run" / "checkpoints").exists()


# ---- Several processes


@pytest.mark.parametrize("mute", [[0, 4], [0, 8], [8, 8]])
def test_gradient_equals_that_of_the_joined_batch(tmp_path, mute):
    """With unequal valid counts, with nothing valid on one rank, and nothing valid anywhere: then no step is made."""
    settings = {"num_minibatches": 1, "update_epochs": 2, "max_grad_norm": 1e9, "total_timesteps": 1}
    settings |= {"kl_coef": 0.1, "ent_coef": 0.01, "learning_rate": 1e-2}
    ranks, _ = worker(tmp_path, "gradient", 2, mute=mute, **settings)
    summary = json.loads((tmp_path / "gradient_2" / "run" / "summary.json").read_text())
    assert summary["charts/groups_without_signal"] == sum(mute) / 16
    assert summary["global_step"] == 1600 and summary["charts/steps_trained"] == 2 * 100 * (16 - sum(mute))
    if mute == [8, 8]:
        assert ranks[0]["updates"] == ranks[1]["updates"] == 0
        for rank in ranks:
            assert_same_bits(*({k: v for k, v in rank[w].items() if "moments" not in k} for w in ("initial", "final")))
        return
    assert ranks[0]["updates"] == ranks[1]["updates"] == 2
    agent = Agent(envs.make("PushCube", 1), Args())
    for update in (0, 1):  # in the second the policy is no longer the reference, so the KL has a gradient too
        agent.load_state_dict(ranks[0]["weights"][update])
        agent.zero_grad()
        loss, count, kl = 0.0, 0, 0.0
        for rank, muted in zip(ranks, mute):
            if muted == 8:
                assert not rank["batches"]
            else:
                batch = rank["batches"][update]
                assert len(batch["action"]) == 100 * (8 - muted)
                _, logprob, entropy = agent(batch["seen"], batch["action"])
                part, logged = grpo_loss(logprob, entropy, *batch["inputs"][2:])
                loss, count, kl = loss + part, count + len(logprob), kl + logged[LOSSES.index("losses/ref_kl")]
        (loss / count).backward()
        assert (kl > 1e-3) == (update == 1)
        for rank in ranks:
            for gradient, p in zip(rank["gradients"][update], agent.parameters()):
                torch.testing.assert_close(gradient, p.grad, atol=1e-6, rtol=0)
        assert sum(p.grad.abs().sum() for p in agent.parameters()) > 1e-3


def test_parameters_are_bit_equal_after_updates(tmp_path):
    """Ranks whose episodes end at different steps, and that have different numbers of valid samples."""
    (one, two), _ = worker(tmp_path, "plain", 2, mute=[4, 0], env_id="CartPole", total_timesteps=4000, kl_coef=0.01)
    assert_same_bits(one["final"], two["final"])
    assert one["updates"] == two["updates"] > 8 and one["steps"] != two["steps"]
    summary = json.loads((tmp_path / "plain_2" / "run" / "summary.json").read_text())
    assert one["final"]["obs_moments.state.count"] == summary["global_step"] >= 4000


@pytest.mark.parametrize("case", ["nan", "kl"])
def test_ranks_skip_and_stop_together(tmp_path, case):
    """A NaN gradient on rank 1 skips that update on both; a KL that rank 1 alone sees ends the epochs of both."""
    (one, two), _ = worker(tmp_path, case, 2, target_kl=1.0 if case == "kl" else 0.0, update_epochs=5)
    assert_same_bits(one["final"], two["final"])
    assert all(x.isfinite().all() for x in one["final"].values())
    assert one["updates"] == two["updates"] == (2 if case == "kl" else 10)


# ---- What users type


BAD = {
    "--group-size 7": "--num-envs 256 and --group-size 7: the envs of a process must divide",
    "--group-size 1": "groups of two or more",
    "--group-size 0": "groups of two or more",
    "--filter-success 0.9 0.1": "the lower one first, such as 0.1 0.9",
    "--init-from nowhere": "no checkpoint at nowhere",
    "--env-id Tabletop": "use ppo_vla_async.py",
    "--clip-coef-high 0": "--clip-coef-high must be greater than 0",
    "--kl-coef -1": "--kl-coef must be 0 or more",
    "--num-envs 0": "--num-envs must be greater than 0",
}


@pytest.mark.parametrize("options", BAD)
def test_wrong_input_is_answered_in_one_line(options, tmp_path):
    with pytest.raises(SystemExit) as stopped:
        grpo_ddp.main(tyro.cli(Args, args=[*options.split(), "--output-dir", str(tmp_path / "runs")]))
    assert BAD[options] in stopped.value.code and "\n" not in stopped.value.code
    assert not (tmp_path / "runs").exists()


def test_a_checkpoint_of_ppo_is_not_resumed(tmp_path):
    settings = {"output_dir": str(tmp_path), "num_envs": 8, "eval_episodes": 4, "num_minibatches": 2}
    ppo_ddp.main(ppo_ddp.Args(run_name="ppo", num_steps=8, total_timesteps=64, **settings))
    with pytest.raises(SystemExit, match="does not fit this model.*critic"):
        grpo_ddp.main(small(tmp_path, resume=str(tmp_path / "ppo")))


def test_discrete_actions(tmp_path):
    env = envs.make("gym/CartPole-v1", 4)
    agent = Agent(env, Args())
    seen = agent.see(env.reset())
    action, logprob, entropy = agent(seen)
    assert isinstance(env.single_action_space, gym.spaces.Discrete) and action.dtype == torch.int64
    torch.testing.assert_close(agent(seen, action)[1], logprob)


def test_push_cube_is_learned(tmp_path):
    """With the default options. The seeds, longer runs and comparisons are in benchmarks/results."""
    run(*script("grpo_ddp.py"), "--output-dir", tmp_path, "--run-name", "a", timeout=170)
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    assert summary["eval/success_rate"] >= 0.95 and summary["eval/episodes"] == 512


def test_compiled_once_it_does_the_same(tmp_path, monkeypatch):
    """Minibatches of many sizes, episodes that end one after the other, evaluations: no graph is compiled for them."""
    args = SMALL | {"output_dir": str(tmp_path), "episodes_per_env": 2, "update_epochs": 1, "kl_coef": 0.1}
    args |= {"total_timesteps": 5 * 1600, "eval_interval": 3200, "save_interval": 1, "keep_checkpoints": 100}
    assert compiled_and_eager(grpo_ddp, tmp_path, monkeypatch, args) == 4
