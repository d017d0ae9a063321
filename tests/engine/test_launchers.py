"""Launchers: torchrun and the deepspeed launcher run the same command to the same losses, and a dead rank ends the job."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.engine.pool import PATIENCE, free_port

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 3},
    "gradient_clipping": 1.0,
}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
DEEPSPEED = [
    sys.executable,
    "-m",
    "deepspeed.launcher.runner",
    "--num_accelerators",
    "2",
    "--master_port",
    str(free_port()),
    "--module",
]


@pytest.fixture
def config(planted: Path) -> Path:
    """A DeepSpeed config on disk, among files that must not run."""
    path = planted / "ds.json"
    path.write_text(json.dumps(CONFIG))
    return path


def environment() -> dict[str, str]:
    """One thread a rank, no file of the current directory imported; the DeepSpeed launcher looks for accelerators unless told
    that there are none.
    """
    return {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONSAFEPATH": "1"}


def losses(launcher: list[str], config: Path, *arguments: str) -> list[float]:
    """Losses that a launched training prints, in the folder of its config."""
    module = ["stagebridge"] if "--module" in launcher else ["-m", "stagebridge"]
    command = [*launcher, *module, "train", config.name, *arguments, "--json"]
    with started(command, subprocess.PIPE, config.parent) as job:
        output, errors = job.communicate(timeout=PATIENCE)
    assert job.returncode == 0, errors[-2000:]
    return [json.loads(line)["loss"] for line in output.splitlines() if line.startswith("{")]


@contextmanager
def started(
    command: list[str], stderr: int, folder: Path | None = None
) -> Iterator[subprocess.Popen[str]]:
    """A job in a session of its own, of which nothing is left in the end."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": stderr, "text": True}
    job = subprocess.Popen(command, **pipes, env=environment(), cwd=folder, start_new_session=True)
    try:
        yield job
    finally:
        with suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()


@pytest.fixture(scope="module")
def steady(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of four steps under torchrun."""
    path = tmp_path_factory.mktemp("steady") / "ds.json"
    path.write_text(json.dumps(CONFIG))
    return losses(TORCHRUN, path, "--steps", "4")


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs the deepspeed launcher")
def test_both_launchers_give_the_same_losses(config: Path, steady: list[float]) -> None:
    assert len(steady) == 4 and losses(DEEPSPEED, config, "--steps", "3") == steady[:3]


LAUNCHERS = {"torchrun": TORCHRUN, "deepspeed": DEEPSPEED}


def end_a_rank(command: list[str], config: Path, step: str, dead: int) -> None:
    """Kill a rank of a training after a step. The job ends, names the rank, and leaves no process."""
    with started(command, subprocess.STDOUT, config.parent) as job:
        _line_with(step, job)
        workers = _descendants(job.pid)
        victim = _rank(workers, str(dead))
        os.kill(victim, signal.SIGKILL)
        output, _ = job.communicate(timeout=PATIENCE)
        assert job.returncode != 0
    # The other rank says it, unless the launcher saw it first and ended that one before it could speak.
    launchers = f"Signal 9 (SIGKILL) received by PID {victim}", f"Killing subprocess {victim}"
    ours = f"error: rank {dead} (process {victim}) ended during the run"
    assert any(line in output for line in (ours, *launchers)), output[-3000:]
    assert not any(_alive(worker) for worker in workers)


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs the deepspeed launcher")
def test_a_dead_rank_ends_the_job_and_is_named(config: Path) -> None:
    words = ["stagebridge", "train", config.name, "--steps", "100000"]
    end_a_rank([*DEEPSPEED, *words], config, "step 3", 1)


def test_a_resume_after_a_dead_rank_goes_on(
    config: Path, tmp_path: Path, steady: list[float]
) -> None:
    folder = str(tmp_path / "run")
    assert losses(TORCHRUN, config, "--steps", "2", "--save", folder) == steady[:2]
    words = ["stagebridge", "train", config.name, "--steps", "100000", "--resume", folder]
    end_a_rank([*TORCHRUN, "-m", *words], config, "step 5", 0)
    assert losses(TORCHRUN, config, "--steps", "4", "--resume", folder) == pytest.approx(
        steady[2:], rel=1e-6
    )


def test_a_script_that_leaves_its_engine_open_ends_without_threads_that_outlive_the_interpreter() -> (
    None
):
    command = [*TORCHRUN, str(Path(__file__).with_name("own_script.py"))]
    with started(command, subprocess.PIPE) as job:
        output, errors = job.communicate(timeout=PATIENCE)
    assert job.returncode == 0, errors[-2000:]
    # Two ranks write to one pipe, so that their line ends may come in any order.
    assert sorted(filter(None, output.replace("[]", "[]\n").splitlines())) == [
        "rank 0: []",
        "rank 1: []",
    ]


def _line_with(text: str, job: Any) -> str:
    for line in job.stdout:
        if text in line:
            return str(line)
    raise AssertionError(f"the job ended before it printed {text!r}")


def _children(parent: int) -> list[int]:
    found = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(parent)], capture_output=True, text=True
    )
    return [int(word) for word in found.stdout.split() if _alive(int(word))]


def _descendants(parent: int) -> list[int]:
    children = _children(parent)
    return children + [process for child in children for process in _descendants(child)]


def _rank(workers: list[int], rank: str) -> int:
    for worker in workers:
        variables = Path(f"/proc/{worker}/environ")
        if variables.exists() and f"\0RANK={rank}\0" in variables.read_text():
            return worker
    raise AssertionError(f"no worker has rank {rank}")


def _alive(worker: int) -> bool:
    status = Path(f"/proc/{worker}/stat")
    return status.exists() and status.read_text().rsplit(")", 1)[1].split()[0] != "Z"


WRONG = {**CONFIG, "zero_optimization": {"stage": 9}, "gradient_clippin": 1.0}
REFUSED = [
    (
        "torchrun",
        ["bad.json"],
        ["zero_optimization.stage: found 9", "gradient_clippin: unknown key"],
    ),
    (
        "torchrun",
        ["pipeline.json", "--code", "pipeline_stages=3"],
        ["pipeline (3) does not divide world size (2)"],
    ),
    (
        "deepspeed",
        ["bad.json"],
        ["zero_optimization.stage: found 9", "gradient_clippin: unknown key"],
    ),
]


@pytest.mark.parametrize(("launcher", "words", "lines"), REFUSED)
def test_an_error_of_all_ranks_is_said_once(
    config: Path, launcher: str, words: list[str], lines: list[str]
) -> None:
    if launcher == "deepspeed" and find_spec("deepspeed") is None:
        pytest.skip("needs the deepspeed launcher")
    (config.parent / "bad.json").write_text(json.dumps(WRONG))
    (config.parent / "pipeline.json").write_text(
        json.dumps({**CONFIG, "zero_optimization": {"stage": 0}})
    )
    module = ["stagebridge"] if launcher == "deepspeed" else ["-m", "stagebridge"]
    done = subprocess.run(
        [*LAUNCHERS[launcher], *module, "train", *words],
        capture_output=True,
        text=True,
        env=environment(),
        cwd=config.parent,
        timeout=PATIENCE,
    )
    assert done.returncode == 1
    ours, trace, summary = done.stderr.partition("Traceback (most recent call last):")
    for line in lines:
        assert ours.count(line) == 1, done.stderr
        assert (line in summary) == bool(trace), (
            done.stderr
        )  # torchrun's summary says it too, in the end
