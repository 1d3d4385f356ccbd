"""What stepping through an adapter of envs/ costs over the simulator's own loop, in CPU time on one core.

    python benchmarks/overhead.py gym/HalfCheetah-v5 metaworld/push-v3 --num-envs 8 64

Both loops step the same number of envs with the same actions and start the next episode where one ends. They take
turns in one process, some hundredths of a second each, so that a busy machine slows both. Another job that takes the
core in a turn leaves cold caches behind, so the time of a loop in a round is the lower quartile of its turns; the
overhead is the median of some rounds. The simulator's own loop is

    gym        `gym.make_vec` (its SyncVectorEnv, restarting in the same step as the adapter does), and as `loop` a
               Python loop over envs of `gym.make`, which gathers nothing
    envpool    its own `step`
    metaworld  a Python loop over its envs
    maniskill  a Python loop over envs of `gym.make` with one simulation each
    mjlab, isaaclab: `step` of its env, the same one that the adapter holds, and `reset` where an episode ends

The last line is the result as JSON.
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import torch

import envs


def loop(made: list, actions: list, limit: int | None = None, reset=lambda env: env.reset()):
    """A Python loop over envs that hold one each; `limit` where they do not count their steps themselves."""
    for env in made:
        reset(env)
    age = [0] * len(made)

    def step(k):
        for i, (env, action) in enumerate(zip(made, actions[k])):
            _, _, terminated, truncated, _ = env.step(action)
            age[i] += 1
            if terminated or truncated or age[i] == limit:
                reset(env)
                age[i] = 0

    return step


def gym_vector(name, num_envs, actions, env):
    import gymnasium as gym

    # As the adapter does: the next episode starts in the step that ended the last one, and final_obs is given.
    mode = {"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP}
    vector = gym.make_vec(name, num_envs, vectorization_mode="sync", vector_kwargs=mode)
    vector.reset(seed=1)
    return lambda k: vector.step(actions[k])


def gym_loop(name, num_envs, actions, env):
    import gymnasium as gym

    return loop([gym.make(name) for _ in range(num_envs)], actions)


def envpool_own(name, num_envs, actions, env):
    import envpool

    picture = "rgb" in env.single_observation_space.keys()
    options = {"gray_scale": False, "stack_num": 1} if picture else {}
    pool = envpool.make(name, env_type="gymnasium", num_envs=num_envs, seed=1, **options)
    pool.reset()
    actions = [a.astype(pool.action_space.dtype) for a in actions]
    return lambda k: pool.step(actions[k])


def metaworld_loop(name, num_envs, actions, env):
    from envs.metaworld import make_one

    made = [make_one(name, env.max_episode_steps) for _ in range(num_envs)]
    for i, one in enumerate(made):
        one.seed(i)
    return loop(made, actions, env.max_episode_steps)


def maniskill_loop(name, num_envs, actions, env):
    import gymnasium as gym

    options = {"num_envs": 1, "obs_mode": "state", "sim_backend": "physx_cpu", "render_backend": "none"}
    made = [gym.make(name, **options) for _ in range(num_envs)]
    return loop(made, [torch.from_numpy(a)[:, None] for a in actions])


def manager_own(name, num_envs, actions, env):
    actions = [torch.from_numpy(a) for a in actions]

    def step(k):
        _, _, terminated, truncated, _ = env._sim.step(actions[k])
        done = terminated | truncated
        if done.any() and not getattr(env._sim.cfg, "auto_reset", True):
            env._sim.reset(env_ids=done.nonzero().view(-1))

    return step


OWN = {
    "gym": {"make_vec": gym_vector, "loop": gym_loop},
    "envpool": {"step": envpool_own},
    "metaworld": {"loop": metaworld_loop},
    "maniskill": {"loop": maniskill_loop},
    "mjlab": {"step": manager_own},
    "isaaclab": {"step": manager_own},
}


def measure(env_id: str, num_envs: int, options: dict, rounds: int, seconds: float) -> dict:
    backend, _, name = env_id.partition("/")
    env = envs.make(env_id, num_envs, seed=1, **options)
    space = env.single_action_space
    space.seed(1)
    bounded = not hasattr(space, "low") or np.isfinite(space.low).all()
    actions = []
    for _ in range(64):
        sample = np.stack([space.sample() for _ in range(num_envs)])
        actions.append(sample if bounded else np.clip(sample, -1.0, 1.0))
    tensors = [torch.from_numpy(a) for a in actions]
    env.reset()
    loops = {"adapter": lambda k: env.step(tensors[k])}
    loops |= {own: make(name, num_envs, actions, env) for own, make in OWN[backend].items()}

    def run(step, count):
        start = time.process_time()
        for k in range(count):
            step(k % 64)
        return time.process_time() - start

    count = 2
    while run(loops["adapter"], count) < 0.03:
        count *= 2
    for step in loops.values():
        run(step, count)
    found = {own: [] for own in loops}
    for _ in range(rounds):
        turns = {own: [] for own in loops}
        start = time.process_time()
        while len(turns["adapter"]) < 8 or time.process_time() - start < seconds:
            for own, step in loops.items():
                turns[own].append(run(step, count))
        for own in loops:
            found[own].append(1e6 * float(np.quantile(turns[own], 0.25)) / count)
    env.close()
    result = {own: statistics.median(times) for own, times in found.items()}
    overhead = {}
    for own in OWN[backend]:
        ratios = sorted(100 * (a / b - 1) for a, b in zip(found["adapter"], found[own]))
        overhead[own] = {"percent": statistics.median(ratios), "from": ratios[0], "to": ratios[-1]}
    return {"microseconds_per_step": result, "overhead": overhead}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("env_ids", nargs="+")
    parser.add_argument("--num-envs", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--env-options", nargs="*", default=[])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="of a round, CPU time of all loops together")
    args = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    results = {}
    for env_id in args.env_ids:
        for num_envs in args.num_envs:
            found = measure(env_id, num_envs, envs.options(args.env_options), args.rounds, args.seconds)
            results[f"{env_id} {num_envs}"] = found
            times = ", ".join(f"{own} {time:,.0f} µs" for own, time in found["microseconds_per_step"].items())
            over = ", ".join(
                f"{x['percent']:+.1f} % over {own} ({x['from']:+.1f} to {x['to']:+.1f})"
                for own, x in found["overhead"].items()
            )
            print(f"{env_id}, {num_envs} envs: a step of all {times}: {over}", flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
