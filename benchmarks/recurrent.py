"""Env steps per second of ppo_lstm_ddp.py beside RecurrentPPO (sb3-contrib) and CleanRL's ppo_atari_lstm.py.

    python -m venv sb3 && sb3/bin/pip install torch==2.13.0 && sb3/bin/pip install sb3-contrib "gymnasium[mujoco]"
    pip install envpool && pip install --no-deps --ignore-requires-python cleanrl==1.2.0
    python benchmarks/recurrent.py --peers-python sb3/bin/python    # some minutes; results/recurrent.json and a table
    python benchmarks/recurrent.py --curve 500000                   # CleanRL's on Pong: results/cleanrl_pong.json

Each on one core. The same env, number of envs, steps, minibatches and epochs. MuJoCo: one LSTM of 64 units that actor
and critic share, for each two layers of 64 on top of it; observations and rewards normalised. Pong: the convolutions of
the Nature paper and an LSTM of 128 units; between them CleanRL's has a layer of 512, ours one of 256, on top CleanRL's
has none, ours two of 64. The two take turns. What is compared is the CPU time of whole iterations, collecting and
learning, without the first ones: other work on the machine counts for little then.
"""

import argparse
import importlib.util
import json
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import redirect_stdout, suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "recurrent.json"
WARM = 2  # iterations that are not counted
WORKLOADS = {
    "cheetah": {"env_id": "HalfCheetah-v5", "num_envs": 8, "num_steps": 256, "num_minibatches": 8, "update_epochs": 10},
    "pendulum": {
        "env_id": "InvertedPendulum-v5",  # episodes of a few steps, so nearly every sequence is cut
        "num_envs": 8,
        "num_steps": 128,
        "num_minibatches": 4,
        "update_epochs": 4,
    },
    "pong": {"env_id": "Pong-v5", "num_envs": 8, "num_steps": 128, "num_minibatches": 4, "update_epochs": 4},
}
PEERS = {"cheetah": "RecurrentPPO", "pendulum": "RecurrentPPO", "pong": "CleanRL"}
PONG = {"env_id": "envpool/Pong-v5", "env_options": ("gray_scale=true",), "channels": 32, "memory_size": 128}
MUJOCO = {"norm_reward": True, "learning_rate": 3e-4}


class Clock:
    """CPU time of this process at the start of every iteration."""

    def __init__(self, iterations: int):
        self.iterations = WARM + iterations
        self.times = []

    def tick(self) -> bool:
        """-> whether that was enough."""
        self.times.append(time.process_time())
        return len(self.times) > self.iterations

    def seconds(self) -> float:
        return (self.times[-1] - self.times[WARM]) / (len(self.times) - 1 - WARM)


def tandem(work: dict, clock: Clock) -> None:
    sys.path.insert(0, str(ROOT))
    import ppo_lstm_ddp

    log = ppo_lstm_ddp.Run.log

    def tick(self, values, progress):
        log(self, values, progress)
        clock.tick()

    ppo_lstm_ddp.Run.log = tick
    with tempfile.TemporaryDirectory() as folder:
        settings = work | PONG if work["env_id"] == "Pong-v5" else work | MUJOCO | {"env_id": f"gym/{work['env_id']}"}
        samples = work["num_envs"] * work["num_steps"]
        args = ppo_lstm_ddp.Args(
            **settings,
            total_timesteps=samples * (clock.iterations + 1),
            gamma=0.99,
            save_interval=0,
            eval_episodes=1,
            output_dir=folder,
            torch_threads=1,
        )
        ppo_lstm_ddp.evaluate_memory = lambda *a: {"eval/episodic_return": 0.0}  # the end of a run is not measured
        ppo_lstm_ddp.main(args)


def sb3(work: dict, clock: Clock) -> None:
    import torch
    from sb3_contrib import RecurrentPPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.logger import Logger
    from stable_baselines3.common.vec_env import VecNormalize

    class Tick(BaseCallback):
        def _on_step(self) -> bool:
            return len(clock.times) <= clock.iterations

        def _on_rollout_start(self) -> None:
            clock.tick()

    torch.set_num_threads(1)
    env = make_vec_env(work["env_id"], n_envs=work["num_envs"], seed=1)
    env = VecNormalize(env, clip_obs=10.0, clip_reward=10.0, gamma=0.99)
    sizes = {"pi": [64, 64], "vf": [64, 64]}
    lstm = {"lstm_hidden_size": 64, "shared_lstm": True, "enable_critic_lstm": False, "net_arch": sizes}
    model = RecurrentPPO(
        "MlpLstmPolicy",
        env,
        learning_rate=3e-4,
        n_steps=work["num_steps"],
        batch_size=work["num_envs"] * work["num_steps"] // work["num_minibatches"],
        n_epochs=work["update_epochs"],
        gamma=0.99,
        policy_kwargs=lstm,
        seed=1,
        device="cpu",
    )
    model.set_logger(Logger(None, []))
    model.learn(10**7, callback=Tick(), log_interval=None)


class Games:
    """Pong as CleanRL's file expects it: gym 0.23's vector env, in front of the adapter that tandem plays with."""

    def __init__(self, makers: list):
        sys.path.insert(0, str(ROOT))
        import envs

        self.env = envs.make("envpool/Pong-v5", len(makers), seed=1, gray_scale=True)
        self.single_action_space = self.env.single_action_space
        self.single_observation_space = SimpleNamespace(shape=(1, 84, 84))

    def reset(self):
        return self.env.reset()["rgb"].permute(0, 3, 1, 2).numpy()

    def step(self, actions):
        import torch

        obs, reward, terminated, truncated, info = self.env.step(torch.from_numpy(actions))
        ended = (terminated | truncated).tolist()
        returns = info["episode"]["return"].tolist()
        lengths = info["episode"]["length"].tolist()
        infos = [{"episode": {"r": r, "l": n}} if end else {} for end, r, n in zip(ended, returns, lengths)]
        done = (terminated | truncated).numpy()
        return obs["rgb"].permute(0, 3, 1, 2).numpy(), reward.numpy(), done, infos

    def close(self):
        self.env.close()


def cleanrl(work: dict, clock: Clock, steps: int = 0) -> list[tuple[int, float]]:
    """ppo_atari_lstm.py as it was published, but for what it imports of gym and Stable-Baselines3.

    -> the returns of episodes by env step, with `steps` those of so many of its 10M.
    """
    import gymnasium
    import torch
    import torch.utils.tensorboard as tensorboard

    returns = []

    class Watched:
        def __init__(self, folder):
            pass

        def add_scalar(self, name, value, step):
            if name == "charts/episodic_return":
                returns.append((step, value))
            if name == "charts/learning_rate":
                enough = clock.tick()
                if step >= steps if steps else enough:
                    raise StopIteration

        def add_text(self, *words):
            pass

        close = flush = add_text

    vector = SimpleNamespace(SyncVectorEnv=Games)
    sys.modules["gym"] = SimpleNamespace(vector=vector, spaces=gymnasium.spaces)
    wrappers = ("ClipRewardEnv", "EpisodicLifeEnv", "FireResetEnv", "MaxAndSkipEnv", "NoopResetEnv")
    for name in ("stable_baselines3", "stable_baselines3.common"):
        sys.modules[name] = ModuleType(name)
    sys.modules["stable_baselines3.common.atari_wrappers"] = SimpleNamespace(**dict.fromkeys(wrappers))
    tensorboard.SummaryWriter = Watched
    torch.set_num_threads(1)
    file = importlib.util.find_spec("cleanrl").submodule_search_locations[0] + "/ppo_atari_lstm.py"
    sys.argv = [file, "--env-id", "Pong-v5"]
    with redirect_stdout(sys.stderr), suppress(StopIteration):
        runpy.run_path(file, run_name="__main__")
    return returns


def table(results: dict) -> None:
    print("| workload | runner | env steps per CPU second | tandem is |\n|---|---|---|---|")
    for name, section in results["workloads"].items():
        for runner, speeds in section["steps_per_second"].items():
            ratio = "" if runner == "tandem" else f"{spread(section['ratios'], '.2f')} times"
            print(f"| `{name}` | {runner} | {spread(speeds, ',.0f')} | {ratio} |")


def spread(values: list[float], form: str) -> str:
    return f"{statistics.median(values):{form}} ({min(values):{form}} – {max(values):{form}})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers-python", default=sys.executable, help="Python of an environment with sb3-contrib")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=6, help="that are measured in a round")
    parser.add_argument("--curve", type=int, metavar="STEPS", help="only let CleanRL's learn Pong for so long")
    parser.add_argument("--table", action="store_true", help="only print the table of the results")
    parser.add_argument("--run", nargs=2, metavar=("RUNNER", "WORKLOAD"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.table:
        return table(json.loads(RESULTS.read_text()))
    if args.run:
        runner, name = args.run
        clock = Clock(args.iterations)
        {"tandem": tandem, "RecurrentPPO": sb3, "CleanRL": cleanrl}[runner](WORKLOADS[name], clock)
        print(json.dumps(clock.seconds()))
        return None
    if args.curve:
        start = time.process_time()
        curve = cleanrl(WORKLOADS["pong"], Clock(0), args.curve)
        result = {"command": f"python benchmarks/recurrent.py --curve {args.curve}", "curve": curve}
        result["steps_per_cpu_second"] = args.curve / (time.process_time() - start)
        (RESULTS.parent / "cleanrl_pong.json").write_text(json.dumps(result))
        return None

    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    words = f"python benchmarks/recurrent.py --rounds {args.rounds} --iterations {args.iterations}"
    results = {"command": words, "commit": commit.stdout.strip(), "workloads": {}}
    for name, work in WORKLOADS.items():
        speeds = {"tandem": [], PEERS[name]: []}
        for _ in range(args.rounds):
            for runner, found in speeds.items():
                python = args.peers_python if runner == "RecurrentPPO" else sys.executable
                command = [python, __file__, "--run", runner, name, "--iterations", str(args.iterations)]
                out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
                found.append(work["num_envs"] * work["num_steps"] / json.loads(out.splitlines()[-1]))
                print(f"{name}: {runner} {found[-1]:,.0f} steps per CPU second", flush=True)
        ratios = [a / b for a, b in zip(*speeds.values())]
        results["workloads"][name] = {"steps_per_second": speeds, "ratios": ratios}
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    table(results)


if __name__ == "__main__":
    main()
