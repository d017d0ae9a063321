"""Removed flags are read as what they meant; unknown values are left out where nothing hangs on them."""

from __future__ import annotations

from typing import Any

import pytest

import compat
from bridge.errors import BridgeError
from bridge.files import Document, Script
from bridge.stack.dialect import Config
from bridge.stack.findings import Origin
from bridge.stack.rules import Effect
from compat.megatron import forks

BASE = (
    "torchrun a.py --num-layers 2 --hidden-size 64 --num-attention-heads"
    " 2 --seq-length 8 --max-position-embeddings 8 --lr 1e-4"
)


def read(words: str, lenient: bool = True) -> Config:
    script = Document(
        Script(f"{BASE} --train-iters 2 {words}\n", "launch.sh"), {}, "script", name="launch.sh"
    )
    return compat.load("megatron").read(script, lenient=lenient)


def effects(config: Config) -> dict[str, Effect]:
    return {finding.path: finding.effect for finding in config.remarks}


FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--micro-batch-size 1 --checkpoint-activations", FULL),
        (
            "--micro-batch-size 1 --checkpoint-num-layers 2 --checkpoint-activations",
            {**FULL, "recompute_num_layers": 2},
        ),
        (
            "--micro-batch-size 1 --activations-checkpoint-method block",
            {**FULL, "recompute_method": "block"},
        ),
        (
            "--micro-batch-size 1 --activations-checkpoint-num-layers 2",
            {"recompute_num_layers": None},
        ),
        ("--micro-batch-size 1 --fp8-hybrid", {"fp8": "hybrid"}),
        ("--micro-batch-size 1 --layernorm-epsilon 1e-6", {"layernorm_epsilon": 1e-6}),
        ("--batch-size 2", {"micro_batch_size": 2}),
        ("--micro-batch-size 1 --DDP-impl torch --data-impl mmap", {"ddp_impl": None}),
    ],
)
def test_a_removed_flag_is_what_it_meant(words: str, said: dict[str, Any]) -> None:
    config = read(words)
    assert {name: config.given.get(name) for name in said} == said
    assert {word for word in words.split() if word in forks.REMOVED} <= effects(config).keys()
    with pytest.raises(BridgeError):
        read(words, lenient=False)


def test_each_removed_flag_sets_what_is_there() -> None:
    known = compat.load("megatron").defaults("0.19.2")
    for row in forks.ROWS:
        values = row.says("1" if row.takes else None)
        # Counts of tokens become counts of samples or steps when the launch is read.
        there = {name.replace(forks.TOKENS, "_samples") for name in values}
        assert there <= known.keys() and bool(values) is not bool(row.note), row.option


@pytest.mark.parametrize(
    ("words", "dest"),
    [
        ("--tokenizer-type PretrainedFromHF", "tokenizer_type"),
        ("--position-embedding-type alibi", "position_embedding_type"),
        ("--normalization rmsnorm", "normalization"),
        ("--tokenizer-type NullTokenizer --tokenizer-type Own", "tokenizer_type"),
    ],
)
def test_an_unknown_value_is_left_out_and_named(words: str, dest: str) -> None:
    config = read(f"--micro-batch-size 1 {words}")
    assert dest not in config.given
    (found,) = (
        finding
        for finding in config.remarks
        if finding.path == dest and "left out" in finding.message
    )
    assert (
        words.split()[-1] in found.message and found.origin is not None and found.origin.line == 1
    )
    with pytest.raises(BridgeError, match="expected one of"):
        read(f"--micro-batch-size 1 {words}", lenient=False)


@pytest.mark.parametrize(
    "words",
    ["--recompute-method chunk", "--fp8-format e5m2", "--optimizer own", "--fp4-format own"],
)
def test_an_unknown_value_that_counts_is_refused(words: str) -> None:
    with pytest.raises(BridgeError, match=f"line 1: {words.split()[0]}: found"):
        read(f"--micro-batch-size 1 {words}")


@pytest.mark.parametrize(
    "words",
    [
        "--zero-stage 1",
        "--label-smoothing 0.1",
        "--do-layernorm-bias-weight-decay",
        "--freeze-LM",
        "--train-tokens=300000000",
        "--log-optimizer-states-to-tensorboard",
        "--train-data /data/fp16/a",
    ],
)
def test_a_flag_that_nobody_knows_counts_as_other_numbers(words: str) -> None:
    config = read(f"--micro-batch-size 1 {words}")
    (found,) = (one for one in config.remarks if one.path == words.partition("=")[0].split()[0])
    assert found.effect is Effect.NUMBERS and found.unknown and found.origin == Origin(1)
    assert found.change == words.replace("=", " ").partition(" ")[2]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            '--save /x --save-interval "${19}"',
            "line 1, --save-interval: ${19} (line 1) is not known",
        ),
        (
            "--checkpoint-activations --checkpoint-num-layers $N",
            "line 1: --checkpoint-num-layers: $N (line 1) is not known",
        ),
        (
            "--checkpoint-activations --checkpoint-num-layers two",
            "line 1: --checkpoint-num-layers: found 'two'; expected a number",
        ),
    ],
)
def test_a_value_that_is_not_known_is_named_as_that(words: str, said: str) -> None:
    with pytest.raises(BridgeError) as caught:
        read(f"--micro-batch-size 1 {words}")
    assert said in str(caught.value) and "missing" not in str(caught.value)
