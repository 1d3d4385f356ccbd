"""What users type: every command of the README and the docs, wrong input, and the config files."""

import hashlib
import importlib
import json
import os
import re
import shlex
import stat
import sys
from pathlib import Path

import pytest
import tyro
import yaml
from conftest import ROOT, Process, free_port, run, script

import ppo_ddp

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
QUICK = "--total-timesteps 4096 --num-envs 8 --num-steps 32 --eval-episodes 4".split()
SHORT = {  # what makes a documented command of each script quick
    "ppo_ddp.py": QUICK,
    "ppo_lstm_ddp.py": QUICK,
    "grpo_ddp.py": "--total-timesteps 2048 --num-envs 8 --group-size 4 --eval-episodes 4".split(),
    "ppo_vla_async.py": (
        "--total-timesteps 32 --num-envs 4 --num-chunks 4 --num-minibatches 2 --update-epochs 1 --bc-updates 2 "
        "--bc-episodes 4 --bc-batch 4 --eval-episodes 4"
    ).split(),
}


def commands() -> list[str]:
    """The lines of the bash blocks."""
    found = []
    for page in PAGES:
        for block in re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                if line := re.sub(r"\s+#\s.*", "", line).strip():
                    found.append(line)
    return found


def check(line: str, tmp_path: Path) -> None:
    """Run a documented command, shortened by options at its end."""
    words = shlex.split(line)
    extra = {}
    while "=" in words[0]:
        name, value = words.pop(0).split("=")
        extra[name] = value
    words = [str(tmp_path / w) if w.startswith("runs/") else w for w in words]
    if words[0] == "tensorboard":
        process = Process([*words, "--port", free_port()])
        while "http://" not in (text := process.stdout.readline()):
            assert text, "tensorboard ended"
        process.kill_all()
        process.communicate()
        return
    if words[1].startswith("benchmarks/"):  # minutes each; their results are in benchmarks/results
        assert (ROOT / words[1]).exists()
        return
    if "--help" in words or words[1:3] == ["-m", "envs"]:
        run(*words)
        return
    (name,) = [w for w in words if w in SHORT]
    if "--evaluate" not in words:
        words += [*SHORT[name], "--output-dir", str(tmp_path / "runs")]
    else:
        words += ["--eval-episodes", "4"]
    if "HOST" in line:  # both nodes on this machine, with one process each
        port = free_port()
        words = [w.replace("HOST:29400", f"127.0.0.1:{port}").replace("HOST", "127.0.0.1") for w in words]
        nodes = []
        for node in (0, 1):
            mine = list(words)
            for option, value in {"--nproc_per_node": 1, "--machine_rank": node, "--num_processes": 2}.items():
                if option in mine:
                    mine[mine.index(option) + 1] = str(value)
            if mine[0] == "accelerate":
                mine[2:2] = ["--num_processes", "2", "--main_process_port", str(port)]
            nodes.append(Process(mine, **extra))
        results = [node.finish() for node in nodes]
        assert [code for code, _ in results] == [0, 0], results
    elif words[0] == "python" and not extra and len(words) > 2 + len(SHORT[name]) + 2:
        # In this process, which has torch loaded; those without options of their own are run as they stand.
        if "--run-name" not in words and "--evaluate" not in words:
            words += ["--run-name", hashlib.sha256(line.encode()).hexdigest()[:8]]
        script_of = importlib.import_module(name.removesuffix(".py"))
        script_of.main(tyro.cli(script_of.Args, args=words[2:]))
    else:
        run(*words, **extra)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    return tmp_path_factory.mktemp("documented")


@pytest.mark.parametrize("line", dict.fromkeys(x for x in commands() if not x.startswith("pip install")))
def test_every_documented_command_runs(workspace, line):
    """In their order, so that what one trains the next can resume; .ci/run runs those that install."""
    before = len(list((workspace / "runs").glob("*/summary.json")))
    check(line, workspace)
    after = len(list((workspace / "runs").glob("*/summary.json")))
    trains = any(f" {name}" in line for name in SHORT) and not re.search("--help|--evaluate|--resume", line)
    assert after == before + trains


def test_documented_runs_left_what_they_should(workspace):
    assert len(list((workspace / "runs").glob("*/checkpoints/latest"))) >= 6
    assert list((workspace / "runs").glob("*/videos/*.gif"))
    assert list((workspace / "runs").glob("*/wandb/offline-run-*"))
    assert len(commands()) > 15


def main(*options) -> None:
    """A script's own entry, in this process."""
    ppo_ddp.main(tyro.cli(ppo_ddp.Args, args=[str(x) for x in options]))


def test_the_help_of_a_script_reads_well(capsys):
    with pytest.raises(SystemExit, match="0"):
        main("--help")
    text = " ".join(capsys.readouterr().out.split())
    for words in ("--num-envs INT", "parallel envs of each process", "--lr-schedule {constant,linear,adaptive}"):
        assert words in text
    assert "batch-size" not in text  # a derived value is no option


@pytest.mark.parametrize("file", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.name)
def test_config_files_load(file):
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(file))
    assert config.num_processes >= 8 and str(config.distributed_type).endswith("MULTI_GPU")
    assert config.num_machines == (2 if "two_nodes" in file.name else 1)
    assert config.mixed_precision == ("bf16" if "bf16" in file.name else "no")
    assert yaml.safe_load(file.read_text())["compute_environment"] == "LOCAL_MACHINE"


BAD = {
    "--env-id nonsense": "unknown env id 'nonsense': give one of CartPole, PushCube",
    "--env-id gym/Nonsense-v5": "Nonsense",
    "--env-id Tabletop": "use ppo_lstm_ddp.py",
    "--num-envs 0": "--num-envs must be greater than 0, not 0",
    "--num-steps -3": "--num-steps must be greater than 0, not -3",
    "--total-timesteps 0": "--total-timesteps must be greater than 0",
    "--learning-rate 0": "--learning-rate must be greater than 0",
    "--learning-rate nan": "--learning-rate must be a number, not nan",
    "--timeout inf": "--timeout must be a number, not inf",
    "--run-name ..": "--run-name must be a plain name, not '..'",
    "--gamma 1.5": "--gamma must be between 0 and 1, not 1.5",
    "--eval-interval -1": "--eval-interval must be 0 or more",
    "--num-minibatches 7": "= 4096 samples do not divide into --num-minibatches 7",
    "--seed -1": "--seed must be between 0 and",
    "--evaluate": "--evaluate goes with --checkpoint PATH",
    "--evaluate --checkpoint nowhere": "no checkpoint at nowhere",
    "--resume nowhere": "nothing to resume at nowhere",
    "--run-name a/b": "--run-name must be a plain name, not 'a/b'",
    "--backend nccl": "use gloo or auto",
    "--backend mpi": "built with MPI",
    "--mixed-precision fp16": "needs a GPU: use bf16 or no",
    "--eval-episodes 0 --num-envs -1": "--num-envs must be greater than 0",
}


@pytest.mark.smoke
@pytest.mark.parametrize("options", BAD)
def test_wrong_input_is_answered_in_one_line(options, tmp_path):
    """With the value and what to do, before anything is written."""
    with pytest.raises(SystemExit) as stopped:
        main(*options.split(), "--output-dir", tmp_path / "runs")
    assert BAD[options] in stopped.value.code and "\n" not in stopped.value.code
    assert not (tmp_path / "runs").exists()


def test_tasks_of_slurm_without_a_launcher_are_refused(tmp_path, monkeypatch):
    """`srun python ppo_ddp.py` would be so many copies of one run."""
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    with pytest.raises(
        SystemExit, match="4 processes were started, but 1 found each other: start several with 'torchrun"
    ):
        main("--output-dir", tmp_path / "runs")


def test_an_unknown_option_is_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        main("--num-env", "3")
    assert "--num-envs" in capsys.readouterr().err


def test_a_checkpoint_of_another_env_is_refused(tmp_path):
    main(*QUICK, "--env-id", "CartPole", "--output-dir", tmp_path, "--run-name", "a")
    with pytest.raises(SystemExit, match="was trained with env_id = CartPole, not PushCube: set --env-id to match it"):
        main("--evaluate", "--checkpoint", tmp_path / "a")


def test_no_permission_to_write(tmp_path):
    """A file where the folder should be, and a folder that may not be written to."""
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit, match=f"cannot write to {tmp_path}/file.*choose another --output-dir"):
        main(*QUICK, "--output-dir", tmp_path / "file")
    if os.geteuid():  # root may write anywhere
        (tmp_path / "folder").mkdir()
        (tmp_path / "folder").chmod(stat.S_IRUSR | stat.S_IXUSR)
        with pytest.raises(SystemExit, match="Permission denied"):
            main(*QUICK, "--output-dir", tmp_path / "folder")


@pytest.mark.smoke
def test_summary_and_video(tmp_path):
    main(*QUICK, "--output-dir", tmp_path, "--run-name", "a", "--capture-video")
    assert list((tmp_path / "a").glob("events.*"))
    assert (tmp_path / "a" / "videos" / "step_4096.gif").read_bytes()[:4] == b"GIF8"
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    for key in ("eval/success_rate", "eval/episodic_return", "charts/SPS", "charts/episodic_return", "env/distance"):
        assert isinstance(summary[key], float), key
    for key in (
        "time/rollout",
        "time/update",
        "time/wait",
        "time/eval",
        "losses/approx_kl",
        "losses/explained_variance",
    ):
        assert isinstance(summary[key], float), key
    assert summary["global_step"] == 4096 and summary["world_size"] == 1 and summary["versions"]["torch"]


def test_a_fork_names_its_runs_after_its_own_file(tmp_path):
    """One copied file and envs/ is all that it takes."""
    (tmp_path / "my_idea.py").write_text((ROOT / "ppo_ddp.py").read_text())
    run(*script(tmp_path / "my_idea.py"), *QUICK, "--output-dir", tmp_path / "runs")
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("PushCube__my_idea__1__") and (folder / "summary.json").exists()


def test_bf16_and_compile_run(tmp_path):
    options = [*QUICK, "--mixed-precision", "bf16", "--compile", "--output-dir", tmp_path]
    one_thread = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}  # more cost more than they save
    assert "eval/success_rate" in run(*script("ppo_ddp.py"), *options, timeout=170, **one_thread)


@pytest.mark.parametrize("nproc", [1, 2])
@pytest.mark.parametrize("name", ["ppo_ddp.py", "grpo_ddp.py"])
def test_compile_without_a_compiler_is_answered_in_one_line(tmp_path, name, nproc):
    """At once and on all ranks, before there is a folder; also where CXX names what does not exist."""
    extra = {"PATH": str(Path(sys.executable).parent)} if nproc == 1 else {"CXX": "/nowhere/g++"}
    options = [*SHORT[name], "--compile", "--output-dir", tmp_path / "runs"]
    process = Process([*script(name, nproc), *options], TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"), **extra)
    code, text = process.finish(60)
    message = "error: --compile needs a C++ compiler (none found: install g++ or set CXX): leave --compile out"
    assert code == 1 and text.count(message) == 1 and f'File "{name}"' not in text, text
    if nproc == 1:
        assert text.strip() == message
    assert not (tmp_path / "runs").exists()


def test_inverted_pendulum_is_learned(tmp_path):
    """Real MuJoCo: the pole stands for all of the 1000 steps, in every one of 8 episodes."""
    options = "--env-id gym/InvertedPendulum-v5 --num-envs 8 --num-steps 128 --gamma 0.99 --total-timesteps 60000"
    run(*script("ppo_ddp.py"), *options.split(), "--eval-episodes", 8, "--output-dir", tmp_path, "--run-name", "a")
    assert json.loads((tmp_path / "a" / "summary.json").read_text())["eval/episodic_return"] == 1000


@pytest.mark.parametrize("nproc", [1, 2])
def test_push_cube_is_learned(tmp_path, nproc):
    """With the default options. The five seeds, and five times as many steps, are in benchmarks/results."""
    steps = ["--total-timesteps", 500_000 * nproc]
    run(*script("ppo_ddp.py", nproc), *steps, "--output-dir", tmp_path, "--run-name", "a", timeout=170)
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    assert summary["eval/success_rate"] >= 0.95 and summary["eval/episodes"] == 512
