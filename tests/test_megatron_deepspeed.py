"""Scripts of Megatron-DeepSpeed, which say the run both in Megatron's flags and in a DeepSpeed file."""

from __future__ import annotations

from pathlib import Path

import pytest

from bridge.cli import run
from bridge.cli.demo import launch_text
from compat.megatron import flags, releases

pytestmark = pytest.mark.once
SCRIPT = """\
cat <<EOT > ds_config.json
{"train_batch_size": 256, "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0, "zero_optimization": {"stage": 1}}
EOT
deepspeed --num_gpus 8 pretrain_gpt.py --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 \\
  --num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 \\
  --micro-batch-size 4 --global-batch-size 256 --train-iters 5000 --lr $LR --bf16 \\
  --deepspeed --deepspeed_config=ds_config.json --zero-stage=1
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("run.sh").write_text(SCRIPT)
    return "run.sh"


def test_neither_stack_is_guessed(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", script]) == 1
    assert "could be for deepspeed or megatron: it has settings of both" in capsys.readouterr().err


def test_flags_that_change_numbers_and_are_not_read_are_told(
    script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The learning rate is not in the DeepSpeed file, also where its value is not known."""
    assert run(["check", script, "--from", "deepspeed"]) == 2
    told = " ".join(capsys.readouterr().out.split())
    assert "optimizer.type (line 6)" in told
    assert (
        "Megatron-DeepSpeed builds optimizer and schedule from --lr, --train-iters, but stagebridge does not read"
        in told
    )
    assert run(
        ["convert", script, "--from", "deepspeed", "--to", "megatron", "-o", "out.args"]
    ) in (1, 2)
    assert "does not read these flags" in " ".join(capsys.readouterr().out.split())
    other = SCRIPT.replace("--num-layers 24 --hidden-size 2048", "")  # a script of one's own
    Path("own.sh").write_text(other)
    assert run(["check", "own.sh", "--from", "deepspeed"]) == 0
    assert "not read here" not in capsys.readouterr().out


def test_megatron_says_whose_flags_these_are(
    script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["check", script, "--from", "megatron", "--env", "LR=1e-4"]) == 1
    error = capsys.readouterr().err
    assert "--zero-stage: a flag of Megatron-DeepSpeed" in error and "did you mean" not in error


@pytest.mark.parametrize(
    ("flags", "release", "lenient", "code", "told"),
    [
        (
            "--enable-gpt-oss",
            "0.19.2",
            (),
            0,
            "left out; Megatron knows the flag only if NVIDIA ModelOpt is",
        ),
        (
            "--enable-gpt-oss --modelopt-enabled",
            "0.19.2",
            (),
            2,
            "left out; NVIDIA ModelOpt changes the model",
        ),
        (
            "--export-kd-cfg kd.yaml --load x",
            "0.19.2",
            (),
            2,
            "left out, with kd.yaml; NVIDIA ModelOpt changes",
        ),
        (
            "--enable-gpt-oss",
            "0.15.0",
            (),
            1,
            "which pretrain_gpt.py of Megatron 0.15.0 does not have; leave",
        ),
        (
            "--enable-gpt-oss",
            "0.15.0",
            ("--lenient",),
            0,
            "left out; Megatron knows the flag only if",
        ),
    ],
)
def test_flags_of_modelopt_are_named_and_change_numbers_where_it_may_be_on(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: str,
    release: str,
    lenient: tuple[str, ...],
    code: int,
    told: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("launch.args").write_text(f"{launch_text()}\n{flags}\n")
    assert (
        run(["check", "launch.args", "--world-size", "8", "--from-version", release, *lenient])
        == code
    )
    out = " ".join("".join(capsys.readouterr()).split())
    assert told in out and flags.split()[0] in out


def test_no_release_has_a_flag_of_modelopt() -> None:
    assert not [
        release for release in releases.KNOWN if releases.flags(release).keys() & flags.MODELOPT
    ]


def test_a_format_that_is_only_read_is_not_proposed_to_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("launch.args").write_text(launch_text())
    assert (
        run(["convert", "launch.args", "--to", "deepspeed", "--world-size", "8", "-o", "out.sh"])
        == 1
    )
    error = capsys.readouterr().err
    assert (
        "found suffix .sh, in which configs of DeepSpeed cannot be written; use .json or .hjson"
        in error
    )
