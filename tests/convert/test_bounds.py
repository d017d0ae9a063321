"""Numbers that no run can use: a finding of every stack, also where its own parser takes them."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

import pytest

import compat
from bridge.plan.section import fields
from bridge.stack.rules import Effect

SIZES = [
    "--micro-batch-size",
    "1",
    "--num-layers",
    "2",
    "--seq-length",
    "8",
    "--max-position-embeddings",
    "8",
]
ADAM = {"_target_": "torch.optim.Adagrad"}
BLOCK = "model.base_model.decoder.block"
FOUND: list[tuple[str, Any, str]] = [
    ("megatron", [*SIZES, "--min-lr", "-5"], "min_lr"),
    ("megatron", [*SIZES, "--eval-iters", "-5"], "eval_iters"),
    ("megatron", [*SIZES, "--hidden-dropout", "1.5"], "hidden_dropout"),
    (
        "deepspeed",
        {"train_batch_size": 1, "flops_profiler": {"profile_step": -5}},
        "flops_profiler.profile_step",
    ),
    (
        "fast_llm",
        {"optimizer": {"learning_rate": {"minimum": -5.0}}},
        "optimizer.learning_rate.minimum",
    ),
    (
        "fast_llm",
        {"model": {"base_model": {"decoder": {"block": {"mixer": {"heads": -160}}}}}},
        f"{BLOCK}.mixer.heads",
    ),
    ("merak", ["--output_dir", "x", "--max_grad_norm", "-5"], "args.max_grad_norm"),
    ("automodel", {"optimizer": {**ADAM, "lr_decay": -1.0}}, "optimizer.lr_decay"),
]


@pytest.mark.parametrize(("stack", "source", "path"), FOUND)
def test_a_number_that_no_run_can_mean(stack: str, source: Any, path: str) -> None:
    found = [
        it
        for it in compat.load(stack).read(source, world_size=1).findings
        if it.path == path and "no run can use" in it.message
    ]
    assert [(it.effect, it.given) for it in found] == [(Effect.NUMBERS, True)]


@pytest.mark.parametrize("stack", compat.names())
def test_every_row_is_of_a_setting(stack: str) -> None:
    rows = json.loads(files(f"compat.{stack}.releases").joinpath("bounds.json").read_text("utf-8"))
    known = fields(compat.load(stack).schema)
    assert rows.keys() <= {"at least 0", "at most 1"}
    for path in (path for paths in rows.values() for path in paths):
        assert path in known or path.rpartition(".")[0] in known, path
