"""slurm.sh with stand-ins for sbatch, srun and scontrol: what is launched, what goes back into the queue, signals."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launching import REPOSITORY, free_port, train_here

SRUN = """#!/usr/bin/env bash
# Runs the command once for each node, at the same time, and notes the words of it; fails as a node fails.
printf '%s\\n' "$@" > "$NOTES/srun"
while [[ $1 == --* ]]; do case $1 in --kill*) shift ;; *) shift 2 ;; esac; done
for ((node = 0; node < SLURM_JOB_NUM_NODES; node++)); do
  SLURM_NODEID=$node "$@" & echo $! >> "$NOTES/tasks"
done
status=0
for task in $(jobs -p); do wait "$task" || status=$?; done
exit $status
"""
SCONTROL = """#!/usr/bin/env bash
if [ "$1 $2" = "show hostnames" ]; then printf '%s\\n' ${3//,/ }; else echo "$@" >> "$NOTES/scontrol"; fi
"""


class Cluster:
    """Runs slurm.sh as a job; a folder stands in for the repository, with a train.py of the test's own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.notes = folder / "repository", folder / "notes"
        self.output = self.folder / "out"
        for path in (self.folder, self.notes, folder / "bin"):
            path.mkdir()
        for name in ("train_scripts", "accelerate_configs"):
            (self.folder / name).symlink_to(REPOSITORY / name)
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
            (folder / "bin" / name).write_text(text)
            (folder / "bin" / name).chmod(0o755)
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
        self.environment |= {
            **{"PATH": f"{folder}/bin:{os.environ['PATH']}", "NOTES": str(self.notes), "PYTHON": "true"},
            **{"SLURM_JOB_ID": "4321", "SLURM_SUBMIT_DIR": str(self.folder), "SLURM_JOB_NUM_NODES": "1"},
            **{"SLURM_JOB_NODELIST": "alpha", "SLURM_GPUS_ON_NODE": "8"},
        }
        (self.folder / "train.py").touch()

    def start(self, *arguments: str, **variables: str) -> subprocess.Popen:
        shutil.copy(REPOSITORY / "train_scripts" / "slurm.sh", self.notes / "slurm_script")  # as sbatch does
        return subprocess.Popen(
            ["bash", self.notes / "slurm_script", *arguments],
            env=self.environment | variables,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess:
        process = self.start(*arguments, **variables)
        out, err = process.communicate(timeout=600)
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def read(self, name: str) -> list[str]:
        """What a stand-in noted."""
        file = self.notes / name
        return file.read_text().splitlines() if file.exists() else []


@pytest.fixture
def cluster(tmp_path):
    return Cluster(tmp_path)


def python_that(folder: Path, script: str) -> str:
    """An interpreter that runs a line of bash in place of the launcher."""
    path = folder / "python"
    path.write_text(f"#!/usr/bin/env bash\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_two_nodes_are_launched_with_all_their_gpus(cluster):
    arguments = ("--model", "a model", "--output_dir", "out")
    cluster.run(*arguments, SLURM_JOB_NUM_NODES="2", SLURM_JOB_NODELIST="alpha,beta", SLURM_CPUS_PER_TASK="64")
    assert cluster.read("srun") == [
        *("--kill-on-bad-exit=1", "--nodes", "2", "--ntasks", "2", "--ntasks-per-node", "1"),
        *("true", "-m", "train_scripts.slurm_node", "--config_file", "accelerate_configs/two_node.yaml"),
        *("--num_machines", "2", "--num_processes", "16", "--main_process_ip", "alpha", "--main_process_port", "24321"),
        *("train.py", *arguments),
    ]


@pytest.mark.parametrize(
    ("variables", "processes"),
    [
        ({}, "8"),
        ({"SLURM_GPUS_ON_NODE": "", "SLURM_GPUS_PER_NODE": "h100:4"}, "4"),
        ({"SLURM_GPUS_ON_NODE": "1", "CONFIG": "my.yaml"}, "1"),
    ],
)
def test_one_node(cluster, variables, processes):
    cluster.run(**variables)
    words = cluster.read("srun")
    launch = dict(zip(words[10:-1:2], words[11:-1:2], strict=True))
    assert launch["--config_file"] == variables.get("CONFIG", "accelerate_configs/single_node.yaml")
    assert (launch["--num_machines"], launch["--num_processes"]) == ("1", processes)


FINISHES = "mkdir -p out/checkpoint-9 && sleep 0.05 && touch out/config.json"
SAVES = "mkdir -p out && touch out/config.json && sleep 0.05 && mkdir out/checkpoint-$RANDOM"


def test_what_is_finished_is_not_requeued(cluster, tmp_path):
    result = cluster.run("--output-dir", "out", PYTHON=python_that(tmp_path, FINISHES))
    assert result.returncode == 0 and result.stdout.endswith("slurm.sh: the model is in out\n")
    assert cluster.read("scontrol") == []


@pytest.mark.parametrize(
    "arguments", [("--output-dir", "out"), ("--output_dir=out",), ("--output-dir", "x", "--output-dir", "out")]
)
def test_what_saved_a_checkpoint_goes_back_into_the_queue(cluster, tmp_path, arguments):
    """Also where the folder holds the model of an earlier run."""
    for _ in range(2):
        result = cluster.run(*arguments, PYTHON=python_that(tmp_path, SAVES))
        assert result.returncode == 0, result.stderr
    assert cluster.read("scontrol") == ["requeue 4321"] * 2


def test_what_gets_nowhere_is_not_requeued(cluster, tmp_path):
    (cluster.output / "checkpoint-4").mkdir(parents=True)
    result = cluster.run("--output-dir", "out")
    assert result.returncode == 1 and "without a model or a new checkpoint in out" in result.stderr
    assert cluster.read("scontrol") == []


def test_what_fails_is_not_requeued(cluster, tmp_path):
    result = cluster.run("--output-dir", "out", PYTHON=python_that(tmp_path, f"{SAVES}; exit 7"))
    assert result.returncode == 7
    assert cluster.read("scontrol") == []


@pytest.mark.parametrize(
    ("arguments", "variables", "said"),
    [
        ((), {"SLURM_JOB_ID": ""}, "submit this with sbatch"),
        ((), {"SLURM_SUBMIT_DIR": "/"}, "/ holds no train.py: run sbatch in the repository's folder"),
        ((), {"SLURM_GPUS_ON_NODE": ""}, "this job has no GPUs: ask for them with --gpus-per-node"),
        (("--resume", "none"), {}, "--resume none would begin anew after each requeue"),
        (("--resume=none",), {}, "--resume none would begin anew after each requeue"),
    ],
)
def test_what_cannot_work_is_said(cluster, arguments, variables, said):
    result = cluster.run(*arguments, **variables)
    assert result.returncode == 1 and said in result.stderr
    assert cluster.read("srun") == []


TRAIN = """
import os, signal, sys, time
from pathlib import Path
rank, out = int(os.environ["RANK"]), Path("out")
assert (os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"]) == ("2", "0")
if out.exists():
    (out / "config.json").touch()
    sys.exit()
arrived = []
signal.signal(signal.SIGUSR1, lambda *_: arrived.append(1))
Path(f"{os.environ['NOTES']}/ready-{rank}").touch()
while not arrived:
    time.sleep(0.05)
(out / "checkpoint-5").mkdir(parents=True, exist_ok=True)
"""


def test_the_launcher_lives_on_when_its_processes_get_the_signal(tmp_path):
    program = """if True:
        import signal, subprocess, sys
        from train_scripts.slurm_node import pass_on
        signal.signal(signal.SIGUSR1, pass_on)
        child = subprocess.Popen(["sleep", "60"])
        print("ready", flush=True)
        sys.exit(child.wait() == -signal.SIGUSR1)"""
    process = subprocess.Popen([sys.executable, "-c", program], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGUSR1)
    assert process.wait(timeout=60) == 1


@pytest.mark.slow
def test_a_signal_to_the_launchers_of_two_nodes_lets_train_py_save_and_the_job_go_on(cluster):
    """Real launchers, whose train.py saves on SIGUSR1 in the first start of the job and is finished in the second."""
    (cluster.folder / "train.py").write_text(TRAIN)
    variables = {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "127.0.0.1,127.0.0.1", "SLURM_GPUS_ON_NODE": "1"}
    variables |= {"PYTHON": sys.executable, "SLURM_JOB_ID": free_port()}
    job = cluster.start("--output-dir", "out", **variables, ACCELERATE_USE_CPU="true")
    deadline = time.monotonic() + 120
    try:
        while not all((cluster.notes / f"ready-{rank}").exists() for rank in (0, 1)):
            assert job.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        for task in cluster.read("tasks"):
            os.kill(int(task), signal.SIGUSR1)
        out, err = job.communicate(timeout=300)
    finally:
        job.kill()
    assert job.returncode == 0, err
    assert out.endswith("slurm.sh: not finished, back into the queue\n")
    assert cluster.read("scontrol") == [f"requeue {variables['SLURM_JOB_ID']}"]
    time.sleep(0.05)  # config.json must be newer
    again = cluster.run("--output-dir", "out", **variables, SLURM_RESTART_COUNT="1", ACCELERATE_USE_CPU="true")
    assert again.returncode == 0, again.stderr
    assert again.stdout.endswith("slurm.sh: the model is in out\n")
    assert len(cluster.read("scontrol")) == 1


@pytest.mark.slow
def test_training_is_saved_requeued_and_goes_on_as_if_nothing_had_been(cluster, tmp_path):
    """The real train.py on two processes, whose losses over both starts of the job are those of one process."""
    import datasets
    import torch
    from tiny_models import VOCABULARY, save_tiny_llama

    save_tiny_llama(tmp_path / "model")
    rows = torch.randint(0, VOCABULARY, (6, 64), generator=torch.Generator().manual_seed(0)).tolist()
    datasets.Dataset.from_dict({"input_ids": rows}).save_to_disk(tmp_path / "rows")
    flags = [
        *("--model", str(tmp_path / "model"), "--dataset", str(tmp_path / "rows"), "--seq-length", "64"),
        *("--max-train-steps", "16", "--learning-rate", "3e-3", "--lr-scheduler", "cosine", "--mixed-precision", "no"),
        *("--gradient-accumulate-every", "2"),
    ]
    variables = {"SLURM_SUBMIT_DIR": str(REPOSITORY), "SLURM_GPUS_ON_NODE": "2", "PYTHON": sys.executable}
    variables |= {"CONFIG": "accelerate_configs/cpu.yaml", "SLURM_JOB_ID": free_port()}
    variables |= {"SLURM_JOB_NODELIST": "127.0.0.1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    job = cluster.start(*flags, "--output-dir", str(tmp_path / "two"), **variables)
    deadline = time.monotonic() + 600
    try:
        while len(losses(tmp_path / "two")) < 2:
            assert job.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        os.kill(int(cluster.read("tasks")[0]), signal.SIGUSR1)
        out, err = job.communicate(timeout=300)
    finally:
        job.kill()
    assert job.returncode == 0, err
    assert out.endswith("slurm.sh: not finished, back into the queue\n")
    assert len(losses(tmp_path / "two")) < 16
    again = cluster.run(*flags, "--output-dir", str(tmp_path / "two"), **variables)
    assert again.returncode == 0 and again.stdout.endswith(f"slurm.sh: the model is in {tmp_path}/two\n"), again.stderr
    assert cluster.read("scontrol") == [f"requeue {variables['SLURM_JOB_ID']}"]
    train_here(*flags, "--parallel_mode", "data_parallel", "--output-dir", str(tmp_path / "one"))
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)


def losses(output_dir: Path) -> list[float]:
    file = output_dir / "metrics.jsonl"
    return [json.loads(line)["loss"] for line in file.read_text().splitlines()] if file.exists() else []
