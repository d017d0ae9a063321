"""`convert --script`: what starts the run lies beside the config, and what only the user can add is named."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from bridge.cli import run
from bridge.plan.section import fields
from compat.deepspeed import script_writer
from compat.deepspeed.dialect import DIALECT as DEEPSPEED

LAUNCH = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --vocab-size 256 "
    "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --attention-dropout 0 "
    "--untie-embeddings-and-output-weights --hidden-dropout 0 --micro-batch-size 1 --global-batch-size 8 --lr 1e-3 "
    "--train-iters 10 --lr-decay-style cosine --weight-decay 0.1 --bf16 --seed 7"
)
FILE = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}


def script_of(folder: Path, more: str = "", to: str = "deepspeed", name: str = "run.json") -> int:
    """What `convert --script` ends with."""
    (folder / "source.args").write_text(f"{LAUNCH} {more}")
    return run(
        [
            "convert",
            str(folder / "source.args"),
            "--to",
            to,
            "--world-size",
            "4",
            "--script",
            "-o",
            str(folder / name),
        ]
    )


SCRIPTS = {
    "": (
        "STEPS, SEQUENCE = 10, 32",
        "SEED = 7",
        '"weight_decay": 0.1',
        "LambdaLR(optimizer, lr_factor)",
        "shift_labels",
    ),
    "--pipeline-model-parallel-size 2 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1": (
        "num_stages=2",
        "activation_checkpoint_interval=1",
        "engine.train_batch(",
    ),
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1": (
        "gradient_checkpointing_enable(",
    ),
    "--tensor-model-parallel-size 2": (
        'settings["tensor_parallel"] = {"autotp_size": 2}',
        "config=settings",
    ),
}


@pytest.mark.parametrize("more", SCRIPTS)
def test_the_script_of_deepspeed_is_whole(
    more: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script_of(tmp_path, more) in (0, 2)
    text, report = (
        (tmp_path / "run.train.py").read_text(),
        capsys.readouterr().out.replace(f"{tmp_path}/", ""),
    )
    ast.parse(text)
    assert all(
        part in text
        for part in (*SCRIPTS[more], "save_checkpoint", "load_checkpoint", "'run.model.json'")
    )
    assert json.loads((tmp_path / "run.model.json").read_text())["model_type"] == "llama"
    assert not (tmp_path / "run.code.py").exists()
    line = "deepspeed --num_gpus 4 run.train.py --deepspeed_config run.json --data tokens.npy"
    assert line in report and line in text
    assert "--data" in report.partition("You still have to add")[2]


REFUSED = {
    "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2": "pipeline layers that are split over tensor ranks",
    "--context-parallel-size 2": "Ulysses attention",
    "--optimizer soap": "the config has no optimizer",
}


@pytest.mark.parametrize("more", REFUSED)
def test_what_no_script_can_do_is_refused_and_nothing_written(
    more: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script_of(tmp_path, more) == 1
    assert REFUSED[more] in capsys.readouterr().err and [
        path.name for path in tmp_path.iterdir()
    ] == ["source.args"]


def test_what_a_file_of_deepspeed_leaves_open_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(FILE))
    words = [
        "convert",
        str(tmp_path / "ds.json"),
        "--to",
        "deepspeed",
        "--world-size",
        "2",
        "--script",
    ]
    assert run([*words, "-o", str(tmp_path / "run.json")]) == 1
    lacking = capsys.readouterr().out.partition("You still have to add")[2]
    assert all(name in lacking for name in ("run.model.json", "--sequence", "--steps", "--data"))
    assert (tmp_path / "run.train.py").exists() and not (tmp_path / "run.model.json").exists()


CODE = {
    "code.pipeline_stages": 2,
    "code.partition_method": "uniform",
    "code.tensor_parallel": 2,
    "code.expert_parallel": 2,
    "code.checkpointing": True,
    "code.checkpoint_interval": 2,
    "code.manual_accumulation": True,
    "code.decay_scope": "matrices",
    "code.steps": 7,
    "code.seed": 3,
    "code.scheduler.name": "cosine",
    "code.accelerator": "cpu",
    "code.parameter_groups": "groups.json",
    "code.loss": "per_token",
    **{path: 1 for path in fields(DEEPSPEED.schema) if path.startswith("code.trainer.")},
}
PARTS = {
    "code.partition_method": {"code.pipeline_stages": 2},
    "code.checkpoint_interval": {"code.checkpointing": True},
}
ELSEWHERE = {
    "code.context_parallel": "refused",
    "code.epochs": "steps are asked for",
    "code.accelerator": "in the launch line",
}


@pytest.mark.parametrize("path", CODE)
def test_what_a_script_is_told_it_takes_or_names(path: str) -> None:
    """No setting of the training script is lost on the way into one."""
    plain = {"optimizer.type": "AdamW", "optimizer.params.weight_decay": 0.1, **PARTS.get(path, {})}

    def written(values: Mapping[str, Any]) -> tuple[str, set[str]]:
        lacking = {
            finding.path
            for finding in script_writer._find_lacking(values, {}, "run.model.json", None)
        }
        return script_writer.program(
            values, {}, {}, "run.json", "run.model.json", "deepspeed"
        ), lacking

    assert path in ELSEWHERE or written(plain) != written({**plain, path: CODE[path]})


def test_every_setting_of_a_script_is_looked_at() -> None:
    beside = {
        path
        for path in fields(DEEPSPEED.schema)
        if path.startswith("code.") and not path.startswith("code.scheduler.")
    }
    assert {path for path in CODE if not path.startswith("code.scheduler.")} | {
        *ELSEWHERE
    } == beside


def test_the_script_of_megatron_lies_beside_its_flags(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script_of(tmp_path, to="megatron", name="run.args") in (0, 2)
    assert (
        (tmp_path / "run.sh")
        .read_text()
        .endswith('torchrun --nproc-per-node 4 pretrain_gpt.py "${ARGS[@]}" "$@"\n')
    )
    assert f"Launch\nbash {tmp_path}/run.sh\n" in capsys.readouterr().out
    assert script_of(tmp_path, to="megatron", name="whole.sh") in (0, 2)


def test_there_is_none_for_others_or_without_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        script_of(tmp_path, to="merak", name="run.args") == 1
        and "no script can be written" in capsys.readouterr().err
    )
    assert (
        run(
            [
                "convert",
                str(tmp_path / "source.args"),
                "--to",
                "deepspeed",
                "--world-size",
                "4",
                "--script",
            ]
        )
        == 1
    )
    assert "needs -o OUT" in capsys.readouterr().err
