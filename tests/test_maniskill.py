"""envs/maniskill.py on a CPU. The batched simulation on a GPU has never run; what it shares with this one has."""

import pytest
import torch

import envs

pytest.importorskip("mani_skill", reason="pip install mani_skill")


def play(env, steps, seed=0, **options):
    generator = torch.Generator().manual_seed(seed)
    shape = (env.num_envs, *env.single_action_space.shape)
    return [env.step(torch.rand(shape, generator=generator) * 2.4 - 1.2, **options) for _ in range(steps)]


def press(env, steps):
    """Down and closed: the gripper meets cube and table, and contacts are what does not restore by itself."""
    action = torch.tensor([0.0, 1.0, 0.0, 0.5, 0.0, 0.5, 0.0, -1.0])
    return [env.step(action.expand(env.num_envs, -1)) for _ in range(steps)]


def equal(a, b):
    return all(torch.equal(x[0]["state"], y[0]["state"]) and torch.equal(x[1], y[1]) for x, y in zip(a, b))


def test_it_equals_maniskill():
    import gymnasium as gym

    env = envs.make("maniskill/PushCube-v1", 2, seed=5, max_episode_steps=6)
    obs = env.reset()
    plain = gym.make("PushCube-v1", obs_mode="state", max_episode_steps=6, render_backend="none").unwrapped
    first, _ = plain.reset(seed=envs.episode_seed(5, 1, 0))
    assert torch.equal(obs["state"][1], first[0])
    generator = torch.Generator().manual_seed(0)
    for t in range(1, 7):
        action = torch.rand(2, 8, generator=generator) * 2.4 - 1.2
        obs, reward, terminated, truncated, info = env.step(action)
        expected, r, *_ = plain.step(action[1:].clamp(-1, 1))
        assert torch.equal(info["final_obs"]["state"][1], expected[0]) and reward[1] == r[0]
        assert truncated.all() == (t == 6) and not terminated.any()
    second, _ = plain.reset(seed=envs.episode_seed(5, 1, 1))
    assert torch.equal(obs["state"][1], second[0])


def test_groups_and_restore_are_exact():
    make = lambda: envs.make("maniskill/PushCube-v1", 4, seed=1, group_size=2)  # noqa: E731
    env = make()
    first = env.reset()["state"]
    assert torch.equal(first[0], first[1]) and not torch.equal(first[0], first[2])
    press(env, 30)
    saved = env.state_dict()
    expected = press(env, 40)
    other = make()
    other.load_state_dict(saved)
    assert equal(expected, press(other, 40))
    assert torch.equal(env.reset()["state"], first)  # whatever happened before


def test_pictures_only_when_looked_at():
    try:
        env = envs.make("maniskill/PushCube-v1", 2, seed=1, obs="rgb", size=32, max_episode_steps=4)
    except ValueError as error:
        pytest.skip(str(error))
    obs = env.reset()
    assert obs["rgb"].shape == (2, 32, 32, 3) and obs["rgb"].dtype == torch.uint8 and obs["rgb"].float().std() > 10
    assert env.instructions == ["push cube"] and not obs["instruction"].any()
    for step in range(1, 5):
        obs, _, _, truncated, info = play(env, 1, look=False)[0]
        assert "rgb" not in obs and ("rgb" in info["final_obs"]) == (step == 4)
    assert truncated.all()
    # Rows that began an episode unseen, and are then held: what they show is still the start of that episode.
    obs, *_ = play(env, 1, active=torch.zeros(2, dtype=torch.bool))[0]
    assert torch.equal(obs["rgb"], env.reset(episode=1)["rgb"])


@pytest.mark.parametrize(
    "env_id, options, words",
    [
        ("maniskill/PushCub-v1", {}, "closest are PushCube-v1"),
        ("maniskill/PushCube-v1", {"obs": "depth"}, "state, rgb, rgb\\+state"),
        ("maniskill/PushCube-v1", {"control_mode": "nope"}, "pd_joint_delta_pos"),
        ("maniskill/PushCube-v1", {"reward_mode": "nope"}, "reward mode"),
        ("maniskill/PushCube-v1", {"colour": 3}, "control_mode"),
        ("maniskill/PushCube-v1", {"device": "cuda", "group_size": 2}, "use the CPU"),
        ("maniskill/TwoRobotPickCube-v1", {}, "several robots"),
    ],
)
def test_bad_input_is_named(env_id, options, words):
    with pytest.raises(ValueError, match=words):
        envs.make(env_id, 2, **options)
