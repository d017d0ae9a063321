"""What comes back is written into the text that it came from: other words where values changed, all else byte for byte."""

from __future__ import annotations

import difflib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import compat
from bridge.cli import run
from bridge.errors import TranslationError
from bridge.files import Original
from bridge.plan.section import Values
from bridge.stack.dialect import Reading

SCRIPTS = Path(__file__).parents[1] / "shell" / "scripts"
FLAGS = """# sizes
--num-layers 4 --hidden-size 64   # small
--num-attention-heads 4 --seq-length 64 --max-position-embeddings 64
--micro-batch-size=2
--global-batch-size 16
'--lr' "3e-4"  # quoted
--bf16 --clip-grad 1.0
"""


def rewritten(text: str, suffix: str, **changes: Any) -> list[str]:
    """The lines that go and come when single values of a Megatron source change; None takes a flag away."""
    dialect = compat.load("megatron")
    version, original = dialect.versions[-1], Original(text, suffix)
    reading = dialect.parse(original.document, version, lenient=True)
    given = {
        path: value for path, value in {**reading.given, **changes}.items() if value is not None
    }
    config = dialect.build(Reading(Values(given), reading.entry), version, reading.world_size)
    new = dialect.reword_for_release(config, original, version)
    assert dict(dialect.parse(Original(new, suffix).document, version, lenient=True).given) == given
    changed = difflib.unified_diff(text.splitlines(), new.splitlines(), n=0, lineterm="")
    return [line for line in list(changed)[2:] if not line.startswith("@@")]


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        ({}, []),
        (
            {"micro_batch_size": 8},
            ["-    --micro-batch-size $MICRO \\", "+    --micro-batch-size 8 \\"],
        ),
        (
            {"clip_grad": 0.5},
            [
                "-    --clip-grad 1.0 --train-iters 1000 \\",
                "+    --clip-grad 0.5 --train-iters 1000 \\",
            ],
        ),
        (
            {"hidden_size": 2048},
            [
                '-    --hidden-size "$HIDDEN" --num-attention-heads ${HEADS}',
                '+    --hidden-size "2048" --num-attention-heads ${HEADS}',
            ],
        ),
        ({"min_lr": None}, ["-    --lr 3e-4 --min-lr 3e-5 \\", "+    --lr 3e-4 \\"]),
        (
            {"swiglu": None},
            [
                "-MODEL_ARGS+=(--swiglu '--disable-bias-linear')",
                "+MODEL_ARGS+=('--disable-bias-linear')",
            ],
        ),
        ({"position_embedding_type": None}, ['-    "--position-embedding-type rope"']),
        (
            {"global_batch_size": 256},
            ["-    --global-batch-size=${GLOBAL} \\", "+    --global-batch-size=256 \\"],
        ),
        (
            {"recompute_activations": True},
            ["-    --data-path $DATA \\", "+    --data-path $DATA --recompute-activations \\"],
        ),
    ],
)
def test_a_script_keeps_everything_but_the_words_that_change(
    changes: dict[str, Any], lines: list[str]
) -> None:
    assert rewritten((SCRIPTS / "megatron.sh").read_text(), ".sh", **changes) == lines


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        ({}, []),
        ({"micro_batch_size": 4}, ["---micro-batch-size=2", "+--micro-batch-size=4"]),
        ({"global_batch_size": None}, ["---global-batch-size 16"]),
        ({"lr": 1e-4}, ["-'--lr' \"3e-4\"  # quoted", "+--lr 0.0001  # quoted"]),
        ({"bf16": None, "fp16": True}, ["---bf16 --clip-grad 1.0", "+--clip-grad 1.0 --fp16"]),
    ],
)
def test_a_file_of_flags_keeps_its_comments(changes: dict[str, Any], lines: list[str]) -> None:
    assert rewritten(FLAGS, ".args", **changes) == lines


RECIPE = """# a recipe
ENV_VARS:
  CUDA_DEVICE_MAX_CONNECTIONS: 1
TEST_TYPE: regular   # for the runner
MODEL_ARGS:
  --num-layers: 4   # small
  --hidden-size: 64
  --num-attention-heads: 4
  --seq-length: 64
  --max-position-embeddings: 64
  --micro-batch-size: 2
  --lr: 3.0e-4 # peak
  --bf16: true
"""
SECTIONS = """# for --yaml-cfg
language_model:
  num_layers: 4   # small
  hidden_size: 64
  num_attention_heads: 4
model_parallel:
  tensor_model_parallel_size: 1
  bf16: True
micro_batch_size: 2 # of a rank
lr: 3.e-4
"""


@pytest.mark.parametrize(
    ("text", "changes", "lines"),
    [
        (RECIPE, {}, []),
        (
            RECIPE,
            {"num_layers": 8},
            ["-  --num-layers: 4   # small", "+  --num-layers: 8   # small"],
        ),
        (RECIPE, {"bf16": None}, ["-  --bf16: true"]),
        (RECIPE, {"clip_grad": 0.5}, ["+  --clip-grad: 0.5"]),
        (RECIPE, {"lr": 2e-5}, ["-  --lr: 3.0e-4 # peak", "+  --lr: '2e-05' # peak"]),
        (SECTIONS, {}, []),
        (SECTIONS, {"num_layers": 8}, ["-  num_layers: 4   # small", "+  num_layers: 8   # small"]),
        (
            SECTIONS,
            {"micro_batch_size": 4},
            ["-micro_batch_size: 2 # of a rank", "+micro_batch_size: 4 # of a rank"],
        ),
        (SECTIONS, {"lr": 2e-5}, ["-lr: 3.e-4", "+lr: 2.0e-05"]),
        (SECTIONS, {"bf16": None}, ["-  bf16: True", "+  bf16: null"]),
        (SECTIONS, {"clip_grad": 0.5}, ["+clip_grad: 0.5"]),
    ],
)
def test_yaml_keeps_its_comments(text: str, changes: dict[str, Any], lines: list[str]) -> None:
    assert rewritten(text, ".yaml", **changes) == lines


def test_words_that_cannot_be_said_in_place_are_refused() -> None:
    with pytest.raises(TranslationError, match="changed in place"):
        rewritten((SCRIPTS / "megatron.sh").read_text(), ".sh", data_path=["two words"])


def test_there_and_back_is_the_same_file_and_edits_are_small(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target, back = tmp_path / "launch.sh", tmp_path / "ds.json", tmp_path / "back.sh"
    shutil.copy(SCRIPTS / "megatron.sh", source)
    assert (
        run(
            [
                "convert",
                str(source),
                "--to",
                "deepspeed",
                "-o",
                str(target),
                "--env",
                "LOG_INTERVAL=5",
            ]
        )
        == 2
    )
    assert run(["convert", str(target), "--to", "megatron", "-o", str(back)]) in (0, 2)
    assert back.read_text() == source.read_text()
    edited = {**json.loads(target.read_text()), "gradient_clipping": 0.25}
    target.write_text(json.dumps(edited))
    assert run(["convert", str(target), "--to", "megatron", "-o", str(back)]) in (0, 2)
    assert back.read_text() == source.read_text().replace("--clip-grad 1.0", "--clip-grad 0.25")
    capsys.readouterr()


def test_another_release_renames_the_flags_in_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = tmp_path / "old.args", tmp_path / "new.args"
    source.write_text(FLAGS + "--num-query-groups 2 --group-query-attention # grouped\n")
    wanted = [
        "convert",
        str(source),
        "--to",
        "megatron",
        "--from-version",
        "0.9.0",
        "--to-version",
        "0.19.2",
        "-o",
        str(target),
    ]
    assert run(wanted) in (0, 2)
    assert "# grouped" in target.read_text() and "# sizes" in target.read_text()
    capsys.readouterr()


def test_a_new_script_is_read_as_it_was_meant(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = tmp_path / "launch.args", tmp_path / "launch.sh"
    source.write_text(FLAGS.replace("=2", "=2 --tensor-model-parallel-size 2"))
    assert run(
        ["convert", str(source), "--to", "megatron", "--world-size", "4", "-o", str(target)]
    ) in (0, 2)
    dialect = compat.load("megatron")
    before, after = dialect.read(source, world_size=4), dialect.read(target)
    assert (dict(after.given), after.world_size) == (dict(before.given), 4)
    assert (
        target.read_text().startswith("#!/bin/bash\n")
        and "torchrun --nproc-per-node 4 pretrain_gpt.py" in target.read_text()
    )
    capsys.readouterr()


HJSON = """{
  // sizes
  train_batch_size: 32
  train_micro_batch_size_per_gpu: 4   # of a rank
  gradient_clipping: 1.0,
  bf16: {enabled: true}
  zero_optimization: {
    stage: 1  // light
  }
}
"""


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        ({}, []),
        (
            {"train_micro_batch_size_per_gpu": 2},
            [
                "-  train_micro_batch_size_per_gpu: 4   # of a rank",
                "+  train_micro_batch_size_per_gpu: 2   # of a rank",
            ],
        ),
        ({"zero_optimization.stage": 2}, ["-    stage: 1  // light", "+    stage: 2  // light"]),
        ({"bf16.enabled": False}, ["-  bf16: {enabled: true}", "+  bf16: {enabled: false}"]),
        (
            {"zero_optimization.overlap_comm": True},
            ["-  zero_optimization: {", '+  zero_optimization: {"overlap_comm": true, '],
        ),
    ],
)
def test_hjson_keeps_its_comments(changes: dict[str, Any], lines: list[str]) -> None:
    dialect = compat.load("deepspeed")
    original = Original(HJSON, ".hjson")
    config = dialect.read(original.document, world_size=8)
    wanted = dialect.config({**config.given, **changes}, world_size=8)
    new = dialect.reword_for_release(wanted, original, config.version)
    changed = list(difflib.unified_diff(HJSON.splitlines(), new.splitlines(), n=0, lineterm=""))[2:]
    assert [line for line in changed if not line.startswith("@@")] == lines


def test_a_here_document_is_written_back_into_its_script(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target, back = tmp_path / "launch.sh", tmp_path / "launch.args", tmp_path / "back.sh"
    shutil.copy(SCRIPTS / "deepspeed.sh", source)
    assert run(["convert", str(source), "--to", "megatron", "-o", str(target)]) in (0, 2)
    there = ["convert", str(target), "--to", "deepspeed", "--world-size", "8", "-o", str(back)]
    assert run(there) in (0, 2)
    assert back.read_text() == source.read_text()
    target.write_text(target.read_text().replace("--clip-grad 1.0", "--clip-grad 0.5"))
    assert run(there) in (0, 2)
    assert back.read_text() == source.read_text().replace('clipping": 1.0', 'clipping": 0.5')
    capsys.readouterr()


def test_a_key_that_goes_is_refused_where_it_would_be_kept() -> None:
    dialect = compat.load("deepspeed")
    original = Original(HJSON, ".hjson")
    config = dialect.read(original.document, world_size=8)
    rest = {path: value for path, value in config.given.items() if path != "gradient_clipping"}
    with pytest.raises(TranslationError, match="made line by line"):
        dialect.reword_for_release(dialect.config(rest, world_size=8), original, config.version)
