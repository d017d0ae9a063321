"""The commands that start what is written: nodes with ranks, names of files, and words that a shell leaves whole."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path

import pytest

import bridge
import compat
from bridge.cli import run
from bridge.stack import launch_command

LAUNCH = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --micro-batch-size 1 "
    "--global-batch-size 512 --lr 1e-3 --train-iters 10 --bf16"
)
NODES = [(1, 1, 1), (8, 1, 8), (12, 2, 6), (16, 2, 8), (512, 64, 8), (13, 13, 1)]


@pytest.mark.parametrize(("ranks", "count", "each"), NODES)
def test_ranks_are_spread_over_nodes_evenly(ranks: int, count: int, each: int) -> None:
    assert launch_command.nodes(ranks) == (count, each)


@pytest.mark.parametrize("stack", ["megatron", "automodel", "fast_llm", "deepspeed"])
def test_512_ranks_are_64_nodes_of_8(stack: str) -> None:
    written = bridge.translate(
        compat.load("megatron").read(LAUNCH.split(), None, 512), compat.load(stack)
    ).written
    words = list(written.command)
    flag = "--nnodes" if stack != "deepspeed" else "--num_nodes"
    each = "--nproc-per-node" if stack != "deepspeed" else "--num_gpus"
    assert words[words.index(flag) + 1] == "64" and words[words.index(each) + 1] == "8"


COMMANDS = [
    (
        "megatron",
        "my run.args",
        "xargs -a 'my run.args' torchrun --nproc-per-node 8 pretrain_gpt.py",
    ),
    ("megatron", "run.sh", "bash run.sh"),
    ("automodel", "my.yaml", "torchrun --nproc-per-node 8 -m nemo_automodel.cli.app my.yaml"),
    (
        "fast_llm",
        "my.yaml",
        "torchrun --nproc-per-node 8 --no-python fast-llm train gpt --config my.yaml",
    ),
    ("fast_llm", "my.args", "xargs -a my.args torchrun --nproc-per-node 8 --no-python fast-llm"),
    (
        "merak",
        "my.args",
        "xargs -a my.args torchrun --nproc-per-node 8 train.py --output_dir output",
    ),
    ("deepspeed", "my.json", "deepspeed --num_gpus 8 train.py --deepspeed_config my.json"),
]


@pytest.mark.parametrize(("stack", "name", "command"), COMMANDS)
def test_the_report_names_the_file_that_was_written(
    stack: str,
    name: str,
    command: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("source.args").write_text(LAUNCH)
    words = ["convert", "source.args", "--to", stack, "--world-size", "8", "-o", name]
    assert run(words) in (0, 1, 2)  # 1: what the stack cannot start without is told too
    assert capsys.readouterr().out.partition("Launch\n")[2].splitlines()[0] == command


def test_a_recipe_names_the_class_that_its_app_starts() -> None:
    for release, named in (("0.3.0", False), ("0.4.0", True)):
        config = compat.load("megatron").read(LAUNCH.removesuffix(" --bf16").split(), None, 8)
        written = bridge.translate(config, compat.load("automodel"), release).written
        assert ("recipe: TrainFinetuneRecipeForNextTokenPrediction" in written.text) is named
        assert ("--config" in written.command) is not named


FILES = [
    "--data-path '0.5 my data' \"it's\"\n--bf16\n",
    "# of a run\n--data-path 'a  b' # beside\n  # and behind\n--bf16\n",
]


@pytest.mark.parametrize("text", FILES)
def test_words_arrive_whole(text: str, tmp_path: Path) -> None:
    (tmp_path / "my run.args").write_text(text)
    command = launch_command.line(launch_command.fed(["printf", "%s\\n"], "my run.args", text))
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == shlex.split(text, comments=True)


def test_what_no_command_reads_is_not_given_one() -> None:
    assert (
        launch_command.fed(["x"], "f", "--name 'a # b'\n") == ()
        and launch_command.fed(["x"], "f", "") == ()
    )


@pytest.mark.parametrize(
    ("program", "named"),
    [
        ("../../pretrain_hybrid.py", "pretrain_hybrid.py"),
        ("pretrain_t5.py", "pretrain_t5.py"),
        ("examples/mimo/train.py", "examples/mimo/train.py"),
        ("$MEGATRON/pretrain_t5.py", "pretrain_t5.py"),
        ("$PROGRAM", "pretrain_gpt.py"),
    ],
)
def test_the_program_is_that_of_the_script(
    program: str,
    named: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.sh").write_text(f"torchrun --nproc-per-node 8 {program} {LAUNCH}\n")
    run(["convert", "run.sh", "--to", "megatron", "--json"])
    assert json.loads(capsys.readouterr().out)["launch"][-1] == named


@pytest.mark.parametrize(
    ("to", "out", "words"),
    [
        ("deepspeed", "sub/x.json", ["--deepspeed_config", "sub/x.json"]),
        ("deepspeed", "x.json", ["--deepspeed_config", "x.json"]),
        ("megatron", "sub/x.sh", ["bash", "sub/x.sh"]),
    ],
)
def test_the_command_names_the_file_from_the_folder_of_the_user(
    to: str,
    out: str,
    words: list[str],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sub").mkdir()
    Path("launch.args").write_text(LAUNCH)
    run(["convert", "launch.args", "--to", to, "--world-size", "8", "-o", out, "--json"])
    assert json.loads(capsys.readouterr().out)["launch"][-2:] == words
