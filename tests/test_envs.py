"""The env contract, on every backend."""

from concurrent.futures import ThreadPoolExecutor

import gymnasium as gym
import numpy as np
import pytest
import torch

import envs

EMBEDDED = ["CartPole", "PushCube", "Tabletop", "TabletopMemory"]
GYM = ["gym/Reacher-v5", "gym/InvertedPendulum-v5", "gym/HalfCheetah-v5", "gym/CartPole-v1"]


def actions(env, generator):
    if hasattr(env.single_action_space, "n"):
        return torch.randint(int(env.single_action_space.n), (env.num_envs,), generator=generator)
    return 2 * torch.randn(env.num_envs, *env.single_action_space.shape, generator=generator)


def play(env, steps, seed=0, obs=None):
    """A list of (obs, reward, terminated, truncated, info) under random actions."""
    generator = torch.Generator().manual_seed(seed)
    return [env.step(actions(env, generator)) for _ in range(steps)]


@pytest.mark.parametrize("env_id", EMBEDDED + GYM)
def test_shapes_and_types(env_id):
    env = envs.make(env_id, 5, seed=1)
    obs = env.reset()
    assert obs.batch_size == (5,) and obs["state"].dtype == torch.float32
    assert obs["state"].shape[1:] == env.single_observation_space["state"].shape
    assert isinstance(env.max_episode_steps, int) and env.num_envs == 5
    for obs, reward, terminated, truncated, info in play(env, 60):
        assert obs["state"].shape == info["final_obs"]["state"].shape and obs["state"].isfinite().all()
        assert reward.shape == terminated.shape == truncated.shape == (5,)
        assert reward.dtype == torch.float32 and terminated.dtype == truncated.dtype == torch.bool
        assert not (terminated & truncated).any()
        assert set(info["episode"]) == {"return", "length", "success"}
        assert all(x.shape == (5,) for x in (*info["episode"].values(), *info["metrics"].values()))
    env.close()


@pytest.mark.parametrize("env_id", EMBEDDED + GYM)
def test_autoreset_and_episode_statistics(env_id):
    """At an end, final_obs is the old episode's, obs the new one's first; statistics are those of the old episode."""
    env = envs.make(env_id, 4, seed=3, max_episode_steps=7)
    obs = env.reset()
    length, total, episode, ends = torch.zeros(4), torch.zeros(4), [0] * 4, 0
    for obs, reward, terminated, truncated, info in play(env, 25):
        length += 1
        total += reward
        done = terminated | truncated
        assert torch.equal(truncated, (length == 7) & ~terminated)
        assert torch.equal(obs["state"][~done], info["final_obs"]["state"][~done])
        for i in done.nonzero().view(-1).tolist():
            ends += 1
            episode[i] += 1
            assert info["episode"]["length"][i] == length[i]
            assert info["episode"]["return"][i].item() == pytest.approx(total[i].item(), rel=1e-5, abs=1e-5)
            fresh = envs.make(env_id, 4, seed=3, max_episode_steps=7).reset(episode=episode[i])
            assert torch.equal(obs["state"][i], fresh["state"][i])
            assert not torch.equal(obs["state"][i], info["final_obs"]["state"][i])
        length *= ~done
        total *= ~done
    assert ends >= 12


@pytest.mark.parametrize("env_id", EMBEDDED + GYM)
def test_steps_do_not_alias(env_id):
    env = envs.make(env_id, 3, seed=1)
    first = env.reset()
    kept = first.clone()
    seen = [(o.clone(), r.clone(), o, r) for o, r, *_ in play(env, 5)]
    assert torch.equal(first["state"], kept["state"])
    for obs_copy, reward_copy, obs, reward in seen:
        assert torch.equal(obs_copy["state"], obs["state"]) and torch.equal(reward_copy, reward)


@pytest.mark.parametrize("env_id", EMBEDDED + GYM)
def test_randomness_belongs_to_the_global_index(env_id):
    """One process with 6 envs and two with 3 start the same episodes; other seeds and episodes start others."""
    whole = envs.make(env_id, 6, seed=7)
    halves = [envs.make(env_id, 3, seed=7, first_env=first) for first in (0, 3)]
    for episode in (0, 5):
        joined = torch.cat([half.reset(episode)["state"] for half in halves])
        assert torch.equal(whole.reset(episode)["state"], joined)
        assert len(joined.unique(dim=0)) == 6
    assert not torch.equal(whole.reset(0)["state"], whole.reset(1)["state"])
    assert not torch.equal(whole.reset(0)["state"], envs.make(env_id, 6, seed=8).reset(0)["state"])
    assert torch.equal(whole.reset(2)["state"], whole.reset(2)["state"])


@pytest.mark.parametrize("env_id", EMBEDDED + GYM)
def test_groups_share_their_start(env_id):
    env = envs.make(env_id, 8, seed=1, group_size=4)
    for episode in (0, 3):
        groups = env.reset(episode)["state"].view(2, 4, -1)
        assert torch.equal(groups, groups[:, :1].expand_as(groups)) and not torch.equal(groups[0], groups[1])


@pytest.mark.parametrize("env_id", EMBEDDED + GYM)
def test_inactive_rows_stay(env_id):
    env, other = (envs.make(env_id, 4, seed=1) for _ in range(2))
    before = env.reset()
    other.reset()
    active = torch.tensor([True, False, True, False])
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        action = actions(env, generator)
        obs, reward, terminated, truncated, info = env.step(action, active)
        same = other.step(action)
        assert torch.equal(obs["state"][~active], before["state"][~active])
        assert not reward[~active].any() and not (terminated | truncated)[~active].any()
        assert torch.equal(obs["state"][active], same[0]["state"][active]) and torch.equal(
            reward[active], same[1][active]
        )


@pytest.mark.parametrize("env_id", [*EMBEDDED, *GYM[:3], "gym/Hopper-v5", "gym/Ant-v5", "gym/Humanoid-v5"])
def test_state_dict_is_exact(env_id):
    env = envs.make(env_id, 6, seed=1)
    env.reset()
    play(env, 30, seed=1)
    saved = env.state_dict()
    expected = play(env, 60, seed=2)
    other = envs.make(env_id, 6, seed=1)
    other.load_state_dict(saved)
    for a, b in zip(expected, play(other, 60, seed=2)):
        assert torch.equal(a[0]["state"], b[0]["state"]) and torch.equal(a[1], b[1])
        torch.testing.assert_close(a[4]["episode"], b[4]["episode"], atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("env_id", EMBEDDED[:2])
def test_a_compiled_env_steps_as_the_eager_one(env_id):
    """Starts to the bit, states to rounding: with episodes that end, and with rows that are not active."""
    options = {"seed": 3, "first_env": 5, "group_size": 2, "max_episode_steps": 20}
    one, two = (envs.make(env_id, 6, **options, **extra) for extra in ({}, {"compile": True}))
    generator = torch.Generator().manual_seed(0)
    assert torch.equal(one.reset(episode=4)["state"], two.reset(episode=4)["state"])
    ends = 0
    for step in range(70):
        action = actions(one, generator)
        active = None if step < 45 else torch.rand(6, generator=generator) < 0.7
        results = []
        for env in (one, two):
            before = {k: v.clone() for k, v in env._state.items()}
            with torch.no_grad():
                results.append(env.step(action, active))
            if active is not None:
                for k, v in env._state.items():
                    assert torch.equal(v[~active], before[k][~active])
        a, b = results
        done = a[2] | a[3]
        ends += int(done.sum())
        assert torch.equal(a[2], b[2]) and torch.equal(a[3], b[3])
        for k, v in one._state.items():
            assert torch.equal(v[done], two._state[k][done])  # where the next episode starts
        for x, y in (
            (a[0]["state"], b[0]["state"]),
            (a[1], b[1]),
            (a[4]["final_obs"]["state"], b[4]["final_obs"]["state"]),
        ):
            torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(a[4]["episode"], b[4]["episode"], atol=1e-5, rtol=1e-5, equal_nan=True)
        two.load_state_dict(one.state_dict())  # rounding must not add up
    assert ends >= 12


def test_a_simulator_that_cannot_tell_its_state_says_so():
    assert envs.make("gym/CartPole-v1", 2).state_dict() is None


def test_draws_are_the_documented_hash():
    """Integer arithmetic, so the same on every device: here it is again in Python's own integers."""

    def mix(x):
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
        return x ^ (x >> 31)

    env = envs.make("CartPole", 6, seed=42, first_env=10, group_size=2)
    env.reset(episode=9)
    for i in range(6):
        key = mix(42) + mix(((10 + i) // 2 + 1) * 0xD1342543DE82EF95 % 2**64) + (9 + 1) * 0xA0761D6478BD642F
        for draw, (centre, width) in enumerate(env.start):
            bits = mix((key + (draw + 1) * 0x9E3779B97F4A7C15) % 2**64)
            uniform = (bits >> 40) / 2**24
            assert env._draw_start(env._episode)[i, draw].item() == pytest.approx(
                centre + width * (uniform - 0.5), abs=1e-6
            )


def test_draws_are_uniform_and_independent():
    env = envs.make("PushCube", 20_000, seed=1)
    draws = [
        env._draw_start(env._episode)
        for env._episode in (torch.zeros(20_000, dtype=torch.int64), torch.ones(20_000, dtype=torch.int64))
    ]
    u = (torch.cat(draws, 1) - torch.cat([env._centre] * 2)) / torch.cat([env._width] * 2) + 0.5
    assert u.min() >= 0 and u.max() < 1
    histogram = torch.stack([torch.histc(x, 10, 0, 1) for x in u.T]) / 20_000
    assert (histogram - 0.1).abs().max() < 0.01
    assert (torch.corrcoef(u.T) - torch.eye(14)).abs().max() < 0.03


def test_push_cube_starts_are_tasks():
    env = envs.make("PushCube", 50_000, seed=1)
    env.reset()
    state = env._state
    assert (state["goal"] - state["cube"]).norm(dim=1).min() > 0.19
    assert (state["effector"] - state["cube"]).norm(dim=1).min() > 0.05 * 2**0.5 + 0.03
    *_, terminated, truncated, info = env.step(torch.zeros(50_000, 2))
    assert not terminated.any() and torch.equal(env._state["cube"], state["cube"])


def test_push_cube_contact():
    """A push through the centre slides the cube, one off the centre also turns it, and the disc ends up outside."""
    env = envs.make("PushCube", 3, seed=1)
    env.reset()
    env._state |= {
        "cube": torch.zeros(3, 2),
        "angle": torch.zeros(3),
        "goal": torch.full((3, 2), 0.9),
        "effector": torch.tensor([[-0.09, 0.0], [-0.09, 0.04], [-0.09, 0.09]]),
    }
    env.step(torch.tensor([[1.0, 0.0]]).expand(3, 2))
    cube, angle = env._state["cube"], env._state["angle"]
    torch.testing.assert_close(cube[0], torch.tensor([0.03, 0.0]))
    assert angle[0] == 0 and angle[1] < 0 and 0 < cube[1, 0] < 0.03
    assert not cube[2].any() and angle[2] == 0
    coasting = cube[0, 0].clone()
    env.step(torch.tensor([[-1.0, 0.0]]).expand(3, 2))
    assert 0 < env._state["cube"][0, 0] - coasting < 0.01


def test_push_cube_reward_is_for_finishing():
    """Nothing that an undiscounted episode can earn beside the goal is worth more than the success it puts off."""
    env = envs.make("PushCube", 1, seed=1)
    env.reset()
    env._state["cube"], env._state["goal"] = torch.zeros(1, 2), torch.tensor([[0.15, 0.0]])
    env._state["effector"] = torch.tensor([[-0.08, 0.0]])
    waiting = sum(env.step(torch.zeros(1, 2))[1].item() for _ in range(99))
    assert 0 < waiting < 3.1
    env.reset()
    env._state["cube"], env._state["goal"] = torch.zeros(1, 2), torch.tensor([[0.13, 0.0]])
    env._state["effector"] = torch.tensor([[-0.08, 0.0]])
    *_, reward, terminated, truncated, info = env.step(torch.tensor([[1.0, 0.0]]))
    assert terminated and info["episode"]["success"] == 1 and reward > 10


def test_push_cube_failure_is_terminated():
    env = envs.make("PushCube", 1, seed=1)
    env.reset()
    env._state["cube"], env._state["effector"] = torch.tensor([[-0.98, 0.0]]), torch.tensor([[-0.90, 0.0]])
    *_, terminated, truncated, info = env.step(torch.tensor([[-1.0, 0.0]]))
    assert terminated and not truncated and info["episode"]["success"] == 0


def test_cartpole_ends():
    env = envs.make("CartPole", 3, seed=1, max_episode_steps=2)
    env.reset()
    env._state["q"] = torch.tensor([[0.0, 0, 0, 0], [0.0, 0, 1.56, 5.0], [0.0, 0, 0.5, 0]])
    *_, terminated, truncated, info = env.step(torch.zeros(3, 1))
    assert terminated.tolist() == [False, True, False] and info["episode"]["success"][1] == 0
    *_, terminated, truncated, info = env.step(torch.zeros(3, 1))
    assert truncated.tolist() == [True, False, True] and info["episode"]["success"].tolist() == [1, 0, 0]


@pytest.mark.parametrize("env_id", GYM)
def test_gym_equals_gymnasium(env_id):
    """The same seeds and actions in plain Gymnasium give the same numbers, through an autoreset."""
    env = envs.make(env_id, 2, seed=5, max_episode_steps=20)
    obs = env.reset()
    plain = gym.make(env_id.removeprefix("gym/"), max_episode_steps=20)
    seed = [int(np.random.SeedSequence([5, 1, episode]).generate_state(1)[0]) for episode in range(10)]
    expected, episode = plain.reset(seed=seed[0])[0], 0
    assert np.array_equal(obs["state"][1].numpy(), expected.astype(np.float32))
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        action = actions(env, generator)
        obs, reward, terminated, truncated, info = env.step(action)
        space = plain.action_space
        clipped = int(action[1]) if hasattr(space, "n") else np.clip(action[1].numpy(), space.low, space.high)
        expected, r, te, tr, _ = plain.step(clipped)
        assert np.array_equal(info["final_obs"]["state"][1].numpy(), expected.astype(np.float32))
        assert reward[1].item() == np.float32(r) and bool(terminated[1]) == te and bool(truncated[1]) == (tr and not te)
        if te or tr:
            episode += 1
            expected = plain.reset(seed=seed[episode])[0]
        assert np.array_equal(obs["state"][1].numpy(), expected.astype(np.float32))
    assert episode >= 2


def test_gym_threads_change_nothing():
    results = []
    for threads in (False, True):
        env = envs.make("gym/Reacher-v5", 16, seed=1)
        env._pool = ThreadPoolExecutor(2) if threads else None
        env.reset()
        results.append([(o["state"], r) for o, r, *_ in play(env, 60)])
        env.close()
    assert all(torch.equal(a, c) and torch.equal(b, d) for (a, b), (c, d) in zip(*results))


def test_gym_refuses_what_it_cannot_serve():
    gym.register("NoLimit-v0", entry_point="gymnasium.envs.classic_control.cartpole:CartPoleEnv")
    for env_id, words in {
        "gym/Blackjack-v1": "Tuple observations",
        "gym/NoLimit-v0": "no time limit",
        "gym/Nonsense-v5": "Nonsense",
        "gym/": "unknown env id",
        "nonsense": "CartPole, PushCube",
        "os/path": "unknown env id",
    }.items():
        with pytest.raises(ValueError, match=words):
            envs.make(env_id, 2)
    with pytest.raises(ValueError, match="at least 1"):
        envs.make("PushCube", 0)


@pytest.mark.parametrize("env_id", [*EMBEDDED, "gym/InvertedPendulum-v5"])
def test_render(env_id):
    try:
        env = envs.make(env_id, 3, seed=1, render=2)
    except ValueError as error:
        assert env_id not in EMBEDDED
        pytest.skip(str(error))
    env.reset()
    image = env.render()
    assert image.dtype == torch.uint8 and image.shape[0] == 2 and image.shape[3] == 3
    assert len(image.reshape(-1, 3).unique(dim=0)) >= 3


def test_tabletop_expert_reaches_what_is_named():
    env = envs.make("Tabletop", 300, seed=3)
    env.reset()
    active, success = torch.ones(300, dtype=torch.bool), torch.zeros(300)
    while active.any():
        _, _, terminated, truncated, info = env.step(env.expert_action(), active)
        ended = active & (terminated | truncated)
        success[ended] = info["episode"]["success"][ended]
        active &= ~ended
    assert success.all()


def test_tabletop_tasks_and_places_are_evenly_drawn():
    env = envs.make("Tabletop", 6000, seed=0)
    obs = env.reset()
    assert (obs["instruction"].bincount() - 2000).abs().max() < 150
    blocks = env.state_dict()["state.blocks"]
    apart = (blocks - blocks.roll(1, dims=1)).norm(dim=-1)
    assert apart.min() > 0.4 and blocks.abs().max() < 0.9  # no two overlap, and all are on the table
    assert blocks.mean(0).abs().max() < 0.02  # no colour has a place of its own
    lengths = {len(text) for text in env.instructions}
    assert len(lengths) == 1 and len({text.rsplit(" ", 1)[0] for text in env.instructions}) == 1


@pytest.mark.parametrize("camera", ["wrist", "fixed"])
def test_tabletop_pictures_show_the_blocks(camera):
    """The middle of each colour's pixels is where that block is, as seen from the camera."""
    env = envs.make("Tabletop", 20, seed=1, camera=camera)
    rgb = env.reset()["rgb"].float()
    state = env.state_dict()
    origin = state["state.effector"] if camera == "wrist" else torch.zeros(20, 2)
    line = (torch.arange(64) + 0.5) / 32 - 1.0
    for i, channel in enumerate((0, 1, 2)):  # red, green, blue
        others = [c for c in range(3) if c != channel]
        mask = (rgb[..., channel] > 250) & (rgb[..., others] < 5).all(-1)
        whole = mask.flatten(1).sum(1) >= 121  # not cut by the picture's edge: 0.36 m are 11 or 12 pixels
        x = (mask * line).sum((1, 2)) / mask.sum((1, 2))
        y = (mask * line.flip(0)[:, None]).sum((1, 2)) / mask.sum((1, 2))
        seen = torch.stack([x, y], 1) + origin
        torch.testing.assert_close(seen[whole], state["state.blocks"][whole, i], atol=0.035, rtol=0)
        assert whole.sum() > 10


def test_tabletop_pays_for_progress_to_the_named_block():
    env = envs.make("Tabletop", 50, seed=2)
    env.reset()
    _, reward, _, _, info = env.step(env.expert_action())
    torch.testing.assert_close(reward, torch.full((50,), 0.5), atol=1e-4, rtol=0)
    with pytest.raises(ValueError, match="wrist and a fixed camera"):
        envs.make("Tabletop", 1, camera="head")
