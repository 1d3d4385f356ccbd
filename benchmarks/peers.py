"""What speed.py and learn_mujoco.py start as processes: a peer, or the bare loops. Each prints one line of JSON.

    PEERS_PYTHON benchmarks/peers.py rsl_rl pushcube --warm 5 --iterations 20       # with the peers' Python
    python benchmarks/peers.py bare pushcube --iterations 20                        # with tandem's

Env steps are the clock: from the first step of one iteration to the first step of the next lies everything that a
library does in an iteration. Logging and checkpoints are off where a library can switch them off. Except for
Stable-Baselines3, which has its own, the peers step tandem's envs through the thinnest wrapper that they take.
"""

import argparse
import contextlib
import dataclasses
import json
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import torch
import torch.nn as nn

sys.path.insert(0, str(Path(__file__).parent.parent))
import envs  # noqa: E402


@dataclasses.dataclass
class Workload:
    env_id: str
    num_envs: int
    num_steps: int
    num_minibatches: int
    update_epochs: int
    hidden_size: int
    learning_rate: float
    gamma: float
    norm_reward: bool = False  # and clip the value loss: CleanRL's settings for MuJoCo
    init_logstd: float = -0.3

    @property
    def samples(self) -> int:
        return self.num_envs * self.num_steps

    @property
    def minibatch_size(self) -> int:
        return self.samples // self.num_minibatches


WORKLOADS = {
    "cheetah": Workload("gym/HalfCheetah-v5", 8, 256, 32, 10, 64, 3e-4, 0.99, norm_reward=True, init_logstd=0.0),
    "pushcube": Workload("PushCube", 128, 32, 8, 4, 64, 1e-3, 0.97),
    "pushcube_large": Workload("PushCube", 1024, 32, 4, 5, 256, 1e-3, 0.97),
}
GAE_LAMBDA = 0.95
CLIP_COEF = 0.2
VF_COEF = 0.5
MAX_GRAD_NORM = 0.5


class Finished(Exception):
    """Raised from within an env step to end a library's loop."""


class Clock:
    """Called before every env step; ends the run before the first one that is not measured any more."""

    def __init__(self, num_steps: int, iterations: int):
        self.num_steps = num_steps
        self.iterations = iterations
        self.steps = 0
        self.starts = []

    def tick(self) -> None:
        if self.steps % self.num_steps == 0:
            self.starts.append(time.perf_counter())
            if len(self.starts) > self.iterations:
                raise Finished
        self.steps += 1

    def seconds(self) -> list[float]:
        """Of each iteration."""
        return [after - before for before, after in zip(self.starts, self.starts[1:])]


def stable_baselines3(work: Workload, clock: Clock) -> None:
    from stable_baselines3.common.callbacks import BaseCallback

    class Tick(BaseCallback):
        def _on_step(self) -> bool:
            return True

        def _on_rollout_start(self) -> None:
            clock.starts.append(time.perf_counter())
            if len(clock.starts) > clock.iterations:
                raise Finished

    model = make_sb3(work, seed=1, total_timesteps=1_000_000)
    model.learn(1_000_000, callback=Tick(), log_interval=None)


def make_sb3(work: Workload, seed: int, total_timesteps: int):
    """Stable-Baselines3's PPO with CleanRL's settings; the learning rate falls linearly to zero."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.logger import Logger
    from stable_baselines3.common.vec_env import VecNormalize

    env = make_vec_env(work.env_id.removeprefix("gym/"), n_envs=work.num_envs, seed=seed)
    env = VecNormalize(env, norm_reward=work.norm_reward, clip_obs=10.0, clip_reward=10.0, gamma=work.gamma)
    sizes = [work.hidden_size, work.hidden_size]
    network = {"pi": sizes, "vf": sizes}
    policy = {"net_arch": network, "activation_fn": nn.Tanh, "ortho_init": True, "log_std_init": work.init_logstd}
    model = PPO(
        "MlpPolicy",
        env,
        learning_rate=lambda left: left * work.learning_rate,
        n_steps=work.num_steps,
        batch_size=work.minibatch_size,
        n_epochs=work.update_epochs,
        gamma=work.gamma,
        gae_lambda=GAE_LAMBDA,
        clip_range=CLIP_COEF,
        clip_range_vf=CLIP_COEF if work.norm_reward else None,
        ent_coef=0.0,
        vf_coef=VF_COEF,
        max_grad_norm=MAX_GRAD_NORM,
        policy_kwargs=policy,
        seed=seed,
        device="cpu",
    )
    model.set_logger(Logger(None, []))
    return model


def learn_sb3(work: Workload, seed: int, total_timesteps: int) -> list[tuple[int, float, float]]:
    """-> after every iteration: env steps, the time, and the mean return of the last 100 episodes."""
    from stable_baselines3.common.callbacks import BaseCallback

    curve = []

    class Log(BaseCallback):
        def _on_step(self) -> bool:
            return True

        def log(self) -> None:
            returns = [episode["r"] for episode in self.model.ep_info_buffer]
            if returns and self.num_timesteps:
                curve.append((self.num_timesteps, time.time(), sum(returns) / len(returns)))

        _on_rollout_start = log  # of the next iteration: learning from the one before is over
        _on_training_end = log

    make_sb3(work, seed, total_timesteps).learn(total_timesteps, callback=Log(), log_interval=None)
    return curve


def rsl_rl(work: Workload, clock: Clock, compile_mode: str | None = None) -> None:
    from rsl_rl.env import VecEnv
    from rsl_rl.runners import OnPolicyRunner
    from tensordict import TensorDict

    class Env(VecEnv):
        def __init__(self):
            self.env = envs.make(work.env_id, work.num_envs, seed=1)
            self.num_envs = work.num_envs
            self.num_actions = self.env.single_action_space.shape[0]
            self.max_episode_length = self.env.max_episode_steps
            self.episode_length_buf = torch.zeros(work.num_envs, dtype=torch.long)
            self.device = "cpu"
            self.cfg = {}
            self.observe(self.env.reset())

        def observe(self, obs) -> None:
            self.obs = TensorDict({"policy": obs["state"]}, [self.num_envs])

        def get_observations(self) -> TensorDict:
            return self.obs

        def step(self, actions):
            clock.tick()
            obs, reward, terminated, truncated, _ = self.env.step(actions)
            self.observe(obs)
            return self.obs, reward, terminated | truncated, {"time_outs": truncated}

    sizes = [work.hidden_size, work.hidden_size]
    network = {"class_name": "MLPModel", "hidden_dims": sizes, "activation": "tanh", "obs_normalization": True}
    start = torch.tensor(work.init_logstd).exp().item()
    gaussian = {"class_name": "GaussianDistribution", "init_std": start, "std_type": "log"}
    algorithm = {
        "class_name": "PPO",
        "num_learning_epochs": work.update_epochs,
        "num_mini_batches": work.num_minibatches,
        "learning_rate": work.learning_rate,
        "schedule": "fixed",
        "gamma": work.gamma,
        "lam": GAE_LAMBDA,
        "clip_param": CLIP_COEF,
        "value_loss_coef": VF_COEF,
        "entropy_coef": 0.0,
        "max_grad_norm": MAX_GRAD_NORM,
        "use_clipped_value_loss": work.norm_reward,
    }
    config = {
        "num_steps_per_env": work.num_steps,
        "save_interval": 1_000_000,
        "obs_groups": {"actor": ["policy"], "critic": ["policy"]},
        "algorithm": algorithm,
        "actor": network | {"distribution_cfg": gaussian},
        "critic": dict(network),
        "torch_compile_mode": compile_mode,
    }
    OnPolicyRunner(Env(), config).learn(1_000_000)


def skrl(work: Workload, clock: Clock) -> None:
    from skrl.agents.torch.ppo import PPO
    from skrl.envs.wrappers.torch import Wrapper
    from skrl.memories.torch import RandomMemory
    from skrl.models.torch import DeterministicMixin, GaussianMixin, Model
    from skrl.resources.preprocessors.torch import RunningStandardScaler
    from skrl.trainers.torch import SequentialTrainer

    class Env(Wrapper):
        observation_space = property(lambda self: self._env.single_observation_space["state"])
        action_space = property(lambda self: self._env.single_action_space)

        def reset(self):
            return self._env.reset()["state"], {}

        def step(self, actions):
            clock.tick()
            obs, reward, terminated, truncated, _ = self._env.step(actions)
            return obs["state"], reward[:, None], terminated[:, None], truncated[:, None], {}

        def state(self):
            return None

        def render(self):
            pass

        def close(self):
            pass

    def mlp(inputs: int, outputs: int) -> nn.Sequential:
        hidden = work.hidden_size
        layers = [nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh()]
        return nn.Sequential(*layers, nn.Linear(hidden, outputs))

    class Policy(GaussianMixin, Model):
        def __init__(self, **spaces):
            Model.__init__(self, **spaces)
            GaussianMixin.__init__(self)
            self.net = mlp(self.num_observations, self.num_actions)
            self.logstd = nn.Parameter(torch.full((self.num_actions,), work.init_logstd))

        def compute(self, inputs, role):
            return self.net(inputs["observations"]), {"log_std": self.logstd}

    class Value(DeterministicMixin, Model):
        def __init__(self, **spaces):
            Model.__init__(self, **spaces)
            DeterministicMixin.__init__(self)
            self.net = mlp(self.num_observations, 1)

        def compute(self, inputs, role):
            return self.net(inputs["observations"]), {}

    env = Env(envs.make(work.env_id, work.num_envs, seed=1))
    spaces = {"observation_space": env.observation_space, "action_space": env.action_space, "device": "cpu"}
    config = {
        "rollouts": work.num_steps,
        "learning_epochs": work.update_epochs,
        "mini_batches": work.num_minibatches,
        "learning_rate": work.learning_rate,
        "discount_factor": work.gamma,
        "gae_lambda": GAE_LAMBDA,
        "ratio_clip": CLIP_COEF,
        "value_clip": CLIP_COEF if work.norm_reward else 0.0,
        "value_loss_scale": VF_COEF,
        "entropy_loss_scale": 0.0,
        "grad_norm_clip": MAX_GRAD_NORM,
        "time_limit_bootstrap": True,
        "observation_preprocessor": RunningStandardScaler,
        "observation_preprocessor_kwargs": {"size": env.observation_space, "device": "cpu"},
        "experiment": {"write_interval": 0, "checkpoint_interval": 0},
    }
    if work.norm_reward:
        config["value_preprocessor"] = RunningStandardScaler
        config["value_preprocessor_kwargs"] = {"size": 1, "device": "cpu"}
    models = {"policy": Policy(**spaces), "value": Value(**spaces)}
    memory = RandomMemory(memory_size=work.num_steps, num_envs=work.num_envs, device="cpu")
    agent = PPO(models=models, memory=memory, cfg=config, **spaces)
    settings = {"timesteps": 1_000_000_000, "headless": True, "disable_progressbar": True}
    SequentialTrainer(env=env, agents=agent, cfg=settings).train()


def rl_games(work: Workload, clock: Clock, compile_model: bool = True) -> None:
    from rl_games.common import env_configurations, vecenv
    from rl_games.common.ivecenv import IVecEnv
    from rl_games.torch_runner import Runner

    class Env(IVecEnv):
        def __init__(self, name: str, num_envs: int):
            self.env = envs.make(work.env_id, num_envs, seed=1)

        def reset(self):
            return self.env.reset()["state"]

        def step(self, actions):
            clock.tick()
            obs, reward, terminated, truncated, _ = self.env.step(actions)
            return obs["state"], reward, terminated | truncated, {"time_outs": truncated}

        def get_env_info(self):
            return {
                "observation_space": self.env.single_observation_space["state"],
                "action_space": self.env.single_action_space,
            }

    vecenv.register("TANDEM", lambda name, num_envs: Env(name, num_envs))
    env_configurations.register("tandem", {"env_creator": None, "vecenv_type": "TANDEM"})
    continuous = {
        "mu_activation": "None",
        "sigma_activation": "None",
        "mu_init": {"name": "default"},
        "sigma_init": {"name": "const_initializer", "val": work.init_logstd},
        "fixed_sigma": True,
    }
    sizes = [work.hidden_size, work.hidden_size]
    network = {
        "name": "actor_critic",
        "separate": True,
        "space": {"continuous": continuous},
        "mlp": {"units": sizes, "activation": "tanh", "initializer": {"name": "default"}},
    }
    config = {
        "name": "tandem",
        "env_name": "tandem",
        "device": "cpu",
        "train_dir": ".",
        "print_stats": False,
        "save_best_after": 1_000_000,
        "max_epochs": 1_000_000,
        "torch_compile": compile_model,
        "num_actors": work.num_envs,
        "horizon_length": work.num_steps,
        "minibatch_size": work.minibatch_size,
        "mini_epochs": work.update_epochs,
        "learning_rate": work.learning_rate,
        "lr_schedule": "linear",
        "gamma": work.gamma,
        "tau": GAE_LAMBDA,
        "e_clip": CLIP_COEF,
        "clip_value": work.norm_reward,
        "critic_coef": 2 * VF_COEF,
        "entropy_coef": 0.0,
        "truncate_grads": True,
        "grad_norm": MAX_GRAD_NORM,
        "normalize_input": True,
        "normalize_value": work.norm_reward,
        "normalize_advantage": True,
        "value_bootstrap": True,
        "bound_loss_type": "none",
        "bounds_loss_coef": 0.0,
        "reward_shaper": {"scale_value": 1},
    }
    params = {"seed": 1, "torch_threads": 1, "algo": {"name": "a2c_continuous"}, "config": config}
    params |= {"model": {"name": "continuous_a2c_logstd"}, "network": network}
    runner = Runner()
    runner.load({"params": params})
    runner.run({"train": True})


def bare(work: Workload, iterations: int) -> dict[str, float]:
    """Seconds of an iteration's parts with no algorithm around them: the best that plain torch could do."""
    env = envs.make(work.env_id, work.num_envs, seed=1)
    inputs = env.single_observation_space["state"].shape[0]
    actions = env.single_action_space.shape[0]
    hidden = work.hidden_size

    def mlp(outputs: int) -> nn.Sequential:
        layers = [nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh()]
        return nn.Sequential(*layers, nn.Linear(hidden, outputs))

    actor = mlp(actions)
    critic = mlp(1)
    parameters = [*actor.parameters(), *critic.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=1e-5, fused=True)
    obs = torch.randn(work.num_envs, inputs)
    minibatches = torch.randn(work.num_minibatches, work.minibatch_size, inputs)
    random_actions = torch.rand(work.num_steps, work.num_envs, actions) * 2.0 - 1.0
    sizes = [(inputs, hidden), (hidden, hidden), (hidden, actions), (inputs, hidden), (hidden, hidden), (hidden, 1)]
    weights = [torch.randn(outs, ins) for ins, outs in sizes]

    def step_env() -> None:
        for action in random_actions:
            env.step(action)

    @torch.no_grad()
    def forward() -> None:
        for _ in range(work.num_steps):
            actor(obs)
            critic(obs)

    def learn() -> None:
        for _ in range(work.update_epochs):
            for minibatch in minibatches:
                loss = actor(minibatch).square().mean() + critic(minibatch).square().mean()
                loss.backward()
                nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM)
                optimizer.step()
                optimizer.zero_grad()

    def multiply(batch: int, times: int, backward: bool) -> float:
        """The matrix products of both networks, and nothing else."""
        pairs = [(torch.randn(batch, ins), torch.randn(batch, outs)) for ins, outs in sizes]
        start = time.perf_counter()
        for _ in range(times):
            for index, (weight, (x, grad)) in enumerate(zip(weights, pairs)):
                torch.mm(x, weight.T)
                if backward:
                    torch.mm(grad.T, x)
                if backward and index not in (0, 3):  # nobody needs the gradient of an observation
                    torch.mm(grad, weight)
        return time.perf_counter() - start

    def matmul() -> float:
        updates = work.update_epochs * work.num_minibatches
        return multiply(work.num_envs, work.num_steps, False) + multiply(work.minibatch_size, updates, True)

    def timed(part) -> float:
        start = time.perf_counter()
        seconds = part()
        return seconds or time.perf_counter() - start

    env.reset()
    parts = {"env": step_env, "forward": forward, "learn": learn, "matmul": matmul}
    totals = dict.fromkeys(parts, 0.0)
    for iteration in range(iterations + 1):
        for name, part in parts.items():
            seconds = timed(part)
            if iteration > 0:
                totals[name] += seconds / iterations
    return totals


PEERS = {
    "stable_baselines3": (stable_baselines3, {}),
    "rsl_rl": (rsl_rl, {}),
    "rsl_rl_compiled": (rsl_rl, {"compile_mode": "default"}),
    "skrl": (skrl, {}),
    "rl_games": (rl_games, {}),
    "rl_games_eager": (rl_games, {"compile_model": False}),
}
PACKAGES = {stable_baselines3: "stable-baselines3", rsl_rl: "rsl-rl-lib", skrl: "skrl", rl_games: "rl-games"}


def time_peer(runner: str, work: Workload, warm: int, iterations: int) -> dict:
    train, options = PEERS[runner]
    clock = Clock(work.num_steps, warm + iterations)
    with contextlib.suppress(Finished):
        train(work, clock, **options)
    seconds = clock.seconds()[warm:]
    package = PACKAGES[train]
    return {"steps_per_second": work.samples * len(seconds) / sum(seconds), "version": {package: version(package)}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runner", choices=[*PEERS, "bare"])
    parser.add_argument("workload", choices=list(WORKLOADS))
    parser.add_argument("--warm", type=int, default=2, help="iterations that are not counted")
    parser.add_argument("--iterations", type=int, default=10, help="iterations that are")
    parser.add_argument("--learn", type=int, default=0, help="learn for so many steps (only stable_baselines3)")
    parser.add_argument("--env-id", default="", help="another env than the workload's")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    work = WORKLOADS[args.workload]
    if args.env_id:
        work = dataclasses.replace(work, env_id=args.env_id)
    # What a library prints goes to stderr, and what it writes into a folder that is removed.
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), contextlib.redirect_stdout(sys.stderr):
        if args.runner == "bare":
            found = bare(work, args.iterations)
        elif args.learn:
            found = {"curve": learn_sb3(work, args.seed, args.learn)}
        else:
            found = time_peer(args.runner, work, args.warm, args.iterations)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
