"""Check any env against the contract, and show it:

    python -m envs PushCube
    python -m envs gym/HalfCheetah-v5
    python -m envs metaworld/push-v3 --expert --env-options camera=corner2 --video push.gif

Exit code 1 if a rule of the contract is broken: the rule and the tensor are named.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import tyro
from PIL import Image
from tensordict import TensorDict

import envs

RULES = {
    "observation": "obs has batch size [N] and the keys, shapes and types of single_observation_space",
    "finite": "observations and rewards are finite",
    "instruction": "obs['instruction'] is an index into env.instructions",
    "reward": "reward is float32 [N]",
    "ends": "terminated and truncated are bool [N], and never both",
    "clock": "no episode is longer than max_episode_steps",
    "final_obs": "info['final_obs'] is None or like obs, and equals it where no episode ended",
    "autoreset": "where an episode ended, obs is the first one of the next",
    "episode": "info['episode'] has return, length and success of [N], right where an episode ended",
    "metrics": "info['metrics'] has tensors of [N], always under the same names",
    "aliasing": "what a step returned is not written to again",
    "inactive": "a row that is not active stays as it is, with reward 0 and no end",
    "look": "with look=False there are no pictures in obs; the next ones show the same as without",
    "starts": "the same seed and episode start alike",
    "global_index": "env first_env + i starts the same whatever the number of processes",
    "groups": "the envs of a group start alike, and groups start differently",
    "state": "load_state_dict brings back the very state that state_dict saved",
}


class Checker:
    """Collects what is broken: for each rule the first sentence about it. `make(num_envs, **arguments)` makes envs."""

    def __init__(self, make: Callable[..., envs.VecEnv], num_envs: int, steps: int, expert: bool = False):
        self.make = make
        self.num_envs = num_envs
        self.steps = steps
        self.expert = expert
        self.broken: dict[str, str] = {}
        self.notes: dict[str, str] = {}
        self.generator = torch.Generator().manual_seed(0)

    def expect(self, rule: str, holds, text: str) -> bool:
        holds = bool(holds)
        if not holds:
            self.broken.setdefault(rule, text)
        return holds

    def run(self) -> None:
        env = self.make(self.num_envs)
        self.check_steps(env)
        self.check_inactive(env)
        self.check_look(env)
        self.check_state(env)
        self.check_starts(env)
        env.close()

    def actions(self, env) -> torch.Tensor:
        """Of the expert, or random and up to twice as large as the space: clipping is the env's business."""
        if self.expert:
            return env.expert_action()
        space = env.single_action_space
        if hasattr(space, "n"):
            return torch.randint(int(space.n), (env.num_envs,), generator=self.generator).to(env.device)
        low = torch.as_tensor(space.low, dtype=torch.float32).clamp(min=-10.0)
        high = torch.as_tensor(space.high, dtype=torch.float32).clamp(max=10.0)
        uniform = torch.rand(env.num_envs, *space.shape, generator=self.generator)
        return ((low + high) / 2 + (high - low) * (2 * uniform - 1)).to(env.device)

    def check_obs(self, env, obs, name: str, rule: str = "observation", pictures: bool = True) -> bool:
        if not self.expect(rule, isinstance(obs, TensorDict), f"{name} is a {type(obs).__name__}, not a TensorDict"):
            return False
        n = env.num_envs
        if not self.expect(rule, obs.batch_size == (n,), f"{name} has batch size {list(obs.batch_size)}, not [{n}]"):
            return False
        spaces = {k: v for k, v in env.single_observation_space.items() if pictures or not k.startswith("rgb")}
        found = {str(k) for k in obs.keys() if pictures or not str(k).startswith("rgb")}
        if not self.expect(rule, found == set(spaces), f"{name} has {sorted(found)}, its space {sorted(spaces)}"):
            return False
        for key, space in spaces.items():
            x = obs[key]
            wanted = (n, *space.shape)
            self.expect(rule, x.shape == wanted, f"{name}[{key!r}] has shape {list(x.shape)}, not {list(wanted)}")
            if key.startswith("rgb"):
                self.expect(rule, x.dtype == torch.uint8, f"{name}[{key!r}] is {x.dtype}, not uint8")
            elif key == "instruction":
                inside = not x.is_floating_point() and 0 <= int(x.min()) and int(x.max()) < len(env.instructions)
                self.expect("instruction", inside, f"{name}['instruction'] has {x.unique().tolist()[:5]}")
            else:
                self.expect(rule, x.dtype == torch.float32, f"{name}[{key!r}] is {x.dtype}, not float32")
                self.expect("finite", x.isfinite().all(), f"{name}[{key!r}] has NaN or infinite values")
            self.expect(rule, x.device.type == env.device.type, f"{name}[{key!r}] is on {x.device}, not {env.device}")
        return rule not in self.broken

    def check_vector(self, rule: str, env, name: str, x, dtype) -> bool:
        if not self.expect(rule, isinstance(x, torch.Tensor), f"{name} is a {type(x).__name__}, not a tensor"):
            return False
        fits = x.shape == (env.num_envs,) and (dtype is None or x.dtype == dtype)
        return self.expect(rule, fits, f"{name} is {x.dtype} {list(x.shape)}, not {dtype or 'any'} [{env.num_envs}]")

    def check_steps(self, env) -> None:
        """Play, and keep accounts of one's own."""
        obs = env.reset()
        if not self.check_obs(env, obs, "the obs of reset"):
            return
        length = torch.zeros(env.num_envs, dtype=torch.int64, device=env.device)
        total = torch.zeros(env.num_envs, dtype=torch.float64, device=env.device)
        kept = [(obs, obs.clone(), "obs")]
        names = None
        ends, successes, returns, lengths = 0, [], [], []
        seconds = 0.0
        for step in range(self.steps):
            action = self.actions(env)
            start = time.perf_counter()
            obs, reward, terminated, truncated, info = env.step(action)
            seconds += time.perf_counter() - start
            if not self.check_obs(env, obs, "obs"):
                return
            if not self.check_vector("reward", env, "reward", reward, torch.float32):
                return
            for name, x in (("terminated", terminated), ("truncated", truncated)):
                if not self.check_vector("ends", env, name, x, torch.bool):
                    return
            self.expect("ends", not (terminated & truncated).any(), "terminated and truncated are both true in a row")
            self.expect("finite", reward.isfinite().all(), "reward has NaN or infinite values")
            done = terminated | truncated
            length += 1
            total += reward
            over = f"an episode went on for {int(length.max())} steps, max_episode_steps is {env.max_episode_steps}"
            self.expect("clock", int(length.max()) <= env.max_episode_steps, over)
            self.expect("clock", done[length >= env.max_episode_steps].all(), over.replace("went", "goes"))
            final = info.get("final_obs", "missing")
            if final is None:
                self.notes["final observation"] = "not given: the last step of an episode is not valued"
            elif self.check_obs(env, final, "final_obs", "final_obs"):
                for key, x in obs.items():
                    same = torch.equal(x[~done], final[key][~done])
                    self.expect("final_obs", same, f"final_obs[{key!r}] differs from obs where no episode ended")
                for i in done.nonzero().flatten().tolist():
                    moved = any(not torch.equal(x[i], final[key][i]) for key, x in obs.items())
                    self.expect("autoreset", moved, "obs of a row that ended is still its final_obs")
            episode = info.get("episode", {})
            keys = {"return", "length", "success"}
            if not self.expect("episode", set(episode) == keys, f"info['episode'] has {sorted(episode)}"):
                return
            for name in keys:
                if not self.check_vector("episode", env, f"info['episode'][{name!r}]", episode[name], None):
                    return
            for i in done.nonzero().flatten().tolist():
                ends += 1
                told, counted = int(episode["length"][i]), int(length[i])
                self.expect("episode", told == counted, f"info['episode']['length'] is {told} after {counted} steps")
                told, counted = float(episode["return"][i]), float(total[i])
                near = abs(told - counted) <= 1e-3 + 1e-4 * abs(counted)
                self.expect("episode", near, f"info['episode']['return'] is {told:.6g}, rewards sum to {counted:.6g}")
                successes.append(float(episode["success"][i]))
                returns.append(told)
                lengths.append(int(length[i]))
            metrics = info.get("metrics", {})
            names = set(metrics) if names is None else names
            self.expect("metrics", set(metrics) == names, f"info['metrics'] had {sorted(names)}, now {sorted(metrics)}")
            for name, x in metrics.items():
                self.check_vector("metrics", env, f"info['metrics'][{name!r}]", x, None)
            length *= ~done
            total *= ~done
            if step < 8:
                kept += [(obs, obs.clone(), "obs"), (reward, reward.clone(), "reward")]
        for now, then, name in kept:
            parts = now.items() if isinstance(now, TensorDict) else [(None, now)]
            for key, x in parts:
                same = torch.equal(x, then[key] if key else then)
                where = f"{name}[{key!r}]" if key else name
                self.expect("aliasing", same, f"{where} of an earlier step has changed since")
        self.notes["speed"] = f"{env.num_envs * self.steps / seconds:,.0f} steps per second ({env.num_envs} envs)"
        if ends:
            mean = sum(returns) / ends, sum(lengths) / ends, sum(successes) / ends
            known = f", success {mean[2]:.2f}" if mean[2] == mean[2] else ", success unknown"
            self.notes["episodes"] = f"{ends} ended: return {mean[0]:.4g}, length {mean[1]:.4g}{known}"
        else:
            self.notes["episodes"] = f"none ended in {self.steps} steps: give more --steps to check what happens there"

    def check_inactive(self, env) -> None:
        if not env.holds_inactive:
            self.notes["inactive rows"] = "take a zero action: this simulator cannot hold them"
            return
        before = env.reset()
        active = torch.arange(env.num_envs, device=env.device) % 2 == 0
        for _ in range(3):
            obs, reward, terminated, truncated, _ = env.step(self.actions(env), active)
            for key, x in obs.items():
                same = torch.equal(x[~active], before[key][~active])
                self.expect("inactive", same, f"obs[{key!r}] changed in a row that is not active")
            self.expect("inactive", not reward[~active].any(), "reward is not 0 in a row that is not active")
            self.expect("inactive", not (terminated | truncated)[~active].any(), "a row that is not active ended")

    def check_look(self, env) -> None:
        pictures = [key for key in env.single_observation_space.keys() if key.startswith("rgb")]
        if not pictures:
            return
        env.reset()
        obs = env.step(self.actions(env), look=False)[0]
        for key in pictures:
            self.expect("look", key not in obs.keys(), f"obs[{key!r}] is there with look=False")
        if not env.repeatable_starts:
            return
        seen = []
        for look in (True, False):
            self.generator.manual_seed(1)
            env.reset()
            for _ in range(2):
                env.step(self.actions(env), look=look)
            seen.append(env.step(self.actions(env))[0])
        for key in pictures:
            same = torch.equal(seen[0][key], seen[1][key])
            self.expect("look", same, f"obs[{key!r}] is another one after steps with look=False")

    def check_state(self, env) -> None:
        env.reset()
        for _ in range(5):
            env.step(self.actions(env))
        state = env.state_dict()
        if state is None:
            self.notes["state"] = "cannot be saved: a resumed run starts its episodes anew"
            return
        self.notes["state"] = "restores bit for bit"
        plan = []
        futures = []
        for attempt in range(2):
            if attempt:
                env.reset(episode=7)
                env.load_state_dict(state)
            future = []
            for k in range(20):
                action = plan[k] if attempt else self.actions(env)
                plan.append(action)
                obs, reward, *_ = env.step(action)
                future.append({**obs, "reward": reward})
            futures.append(future)
        for one, two in zip(*futures):
            for key, x in one.items():
                same = torch.equal(x, two[key])
                if not self.expect("state", same, f"{key!r} is not what it was after the saved state"):
                    self.notes["state"] = "does not restore"

    def check_starts(self, env) -> None:
        if not env.repeatable_starts:
            self.notes["starts"] = "are not repeatable: this simulator draws them itself"
            return
        first = env.reset(0)
        for key, x in first.items():
            same = torch.equal(x, env.reset(0)[key])
            self.expect("starts", same, f"obs[{key!r}] of reset(0) is another one the second time")
        varied = differ(first, env.reset(1))
        self.notes["starts"] = "repeat, given seed and episode" if varied else "look alike in all episodes"
        if not env.separate_evaluation:
            self.notes["separate evaluation"] = "no: evaluation takes turns with training in the one simulation"
            return
        if not env.starts_by_index:
            self.notes["starts"] += ", but are drawn for the process as a whole: with another number of envs, others"
            return
        n = self.num_envs
        halves = []
        for start in (0, n // 2):
            half = self.make(n - n // 2 if start else n // 2, first_env=start)
            halves.append(half.reset(0))
            half.close()
        for key, x in first.items():
            same = torch.equal(x, torch.cat([half[key] for half in halves]))
            self.expect("global_index", same, f"obs[{key!r}] depends on the number of processes")
        try:
            grouped = self.make(4, group_size=2)
        except ValueError as error:
            self.notes["groups"] = f"refused: {error}"
            return
        obs = grouped.reset(0)
        for key, x in obs.items():
            self.expect("groups", torch.equal(x[0::2], x[1::2]), f"obs[{key!r}] differs within a group")
        apart = differ(obs[:2], obs[2:])
        action = self.actions(grouped)
        action = action[:1].expand_as(action)
        for _ in range(0 if apart or not varied else 100):  # Pong shows only after a while what it started with
            obs = grouped.step(action)[0]
            apart = apart or differ(obs[:2], obs[2:])
        self.expect("groups", apart or not varied, "two groups start alike")
        self.notes["groups"] = "start alike"
        grouped.close()


def differ(one: TensorDict, two: TensorDict) -> bool:
    return any(not torch.equal(x, two[key]) for key, x in one.items())


def save_video(env: envs.VecEnv, checker: Checker, steps: int, path: Path) -> None:
    env.reset()
    frames = []
    for _ in range(min(steps, 250)):
        frames.append(Image.fromarray(torch.cat(list(env.render().cpu()), dim=1).numpy()))
        env.step(checker.actions(env), look=False)
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=40, loop=0)


@dataclass
class Args:
    env_id: Annotated[str, tyro.conf.Positional]  # such as PushCube or gym/HalfCheetah-v5
    num_envs: int = 4  # envs to step at once
    steps: int = 0  # steps to take (0: enough for an episode, at most 1000)
    expert: bool = False  # act as the env's scripted expert does, instead of at random
    video: str = ""  # file of a clip (GIF) to write
    device: str = "cpu"  # device of the tensors
    seed: int = 1  # seed of the starts
    env_options: tuple[str, ...] = ()  # options of the env, as name=value


def check_args(args: Args) -> None:
    if args.num_envs < 2:
        raise ValueError("--num-envs must be at least 2, to compare rows")
    if args.steps < 0:
        raise ValueError("--steps must be at least 1, or 0 for an episode")
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"--device {args.device}: torch sees no GPU here, give --device cpu")
    if args.video:
        if not args.video.endswith(".gif"):
            raise ValueError(f"--video {args.video}: give a file that ends in .gif")
        try:
            Path(args.video).parent.mkdir(parents=True, exist_ok=True)
            Path(args.video).touch()
        except OSError as error:
            raise ValueError(f"--video {args.video}: {error}") from error


def main(args: Args) -> int:
    torch.set_num_threads(1)  # a few envs: more threads would only wait for one another
    try:
        options = envs.options(args.env_options)
        check_args(args)

        def make(num_envs, **arguments):
            arguments = {"seed": args.seed, "device": args.device} | arguments
            return envs.make(args.env_id, num_envs, **arguments, **options)

        drawn = {"render": min(4, args.num_envs)} if args.video else {}
        env = make(args.num_envs, **drawn)  # what cannot be drawn is refused before the long check
        if args.expert and not hasattr(env, "expert_action"):
            raise ValueError(f"{args.env_id} has no expert: leave out --expert")
    except ValueError as error:
        print(f"error: {error}")
        return 1
    print(f"{args.env_id}: at most {env.max_episode_steps} steps an episode")
    for key, space in env.single_observation_space.items():
        print(f"  obs[{key!r}]: {space}")
    print(f"  action: {env.single_action_space}")
    if env.instructions:
        print(f"  instructions: {', '.join(env.instructions[:3])}{', ...' if len(env.instructions) > 3 else ''}")
    steps = args.steps or min(env.max_episode_steps + 5, 1000)
    if env.separate_evaluation:
        env.close()
    else:
        only = env
        make = lambda num_envs, **arguments: only  # noqa: E731 a second one cannot be made
    checker = Checker(make, args.num_envs, steps, args.expert)
    checker.run()
    for name, text in checker.notes.items():
        print(f"  {name}: {text}")
    if args.video:
        env = make(args.num_envs, **drawn)
        save_video(env, checker, steps, Path(args.video))
        print(f"  video: {args.video}")
    for rule, text in checker.broken.items():
        print(f"broken rule {rule!r} ({RULES[rule]}): {text}")
    if not checker.broken:
        print("keeps the contract")
    return 1 if checker.broken else 0


if __name__ == "__main__":
    raise SystemExit(main(tyro.cli(Args, description=__doc__)))
