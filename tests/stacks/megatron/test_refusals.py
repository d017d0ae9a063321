"""Two mistakes of one launch are told of together, wherever Megatron would stop for each."""

from __future__ import annotations

from pathlib import Path

import pytest

import compat
from bridge.errors import ConfigError

BOTH = "--fp16 --bf16"
PRECISION = "fp16: "
"""What is said of `BOTH`: a row for the arguments of Megatron's parser."""
PAIRS = [
    (f"--hidden-size 0 {BOTH}", "0.19.2", ("hidden_size: found 0", PRECISION)),
    (
        "--hidden-size 0 --num-layers -1 --seq-length 0",
        "0.19.2",
        ("hidden_size: ", "num_layers: ", "seq_length: "),
    ),
    (
        "--pipeline-model-parallel-size 0 --num-layers 0",
        "0.19.2",
        ("pipeline_model_parallel_size: ", "num_layers: found 0"),
    ),
    (
        f"--pipeline-model-parallel-layout EzL {BOTH}",
        "0.19.2",
        ("found EzL; expected E, t, m, L", PRECISION),
    ),
    (
        "--pipeline-model-parallel-layout tEL --num-layers 3",
        "0.19.2",
        ("exactly one embedding", "found 1 decoder layers"),
    ),
    (
        f"--use-mup --mup-base-head-dim -1 --hidden-size 8 --num-attention-heads 1 {BOTH}",
        "0.19.2",
        ("dim: found -1", PRECISION),
    ),
    (f"--lr-decay-style WSD {BOTH}", "0.19.2", ("lr_wsd_decay_iters: missing", PRECISION)),
    (
        f"--lr-decay-style WSD --train-samples 8 --lr x {BOTH}",
        "0.19.2",
        ("lr_wsd_decay_samples: missing", "--lr ", PRECISION),
    ),
    (
        f"--kitchen-config-file x --kitchen-recipe-number 1 {BOTH}",
        "0.15.3",
        ("kitchen_config_file: found x with", PRECISION),
    ),
]


@pytest.mark.parametrize(("words", "version", "said"), PAIRS)
def test_every_mistake_of_a_launch_is_named(
    words: str, version: str, said: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as error:
        compat.load("megatron").read(words.split(), version)
    assert [one for one in said if one not in str(error.value)] == []


def test_a_removed_flag_with_a_value_of_no_meaning_is_named_beside_the_others() -> None:
    with pytest.raises(ConfigError) as error:
        compat.load("megatron").read(
            ["--checkpoint-num-layers", "x", "--lr", "y", *BOTH.split()], lenient=True
        )
    assert [
        one
        for one in ("--checkpoint-num-layers: found 'x'", "--lr ", PRECISION)
        if one not in str(error.value)
    ] == []


def test_a_value_that_only_a_run_knows_is_named_where_megatron_needs_it(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        f"python pretrain_gpt.py --num-layers 2 --micro-batch-size 1 --save x --save-interval $STEPS {BOTH}\n"
    )
    with pytest.raises(ConfigError) as error:
        compat.load("megatron").read(script)
    assert "Megatron-Core needs this value, so write it out in the script" in str(
        error.value
    ) and PRECISION in str(error.value)


NO_FLAGS = [('["--bf16", {}]', "found {} in a list"), ('{"MODEL_ARGS": 3}', "MODEL_ARGS: found 3")]


@pytest.mark.parametrize(("text", "said"), NO_FLAGS)
def test_a_file_that_holds_no_flags_is_refused_by_the_reader(
    tmp_path: Path, text: str, said: str
) -> None:
    file = tmp_path / "run.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=said):
        compat.load("megatron").read(file)
