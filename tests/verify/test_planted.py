"""Faults of translation, planted one by one in a translated config: `verify` finds each and blames the translation."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

import compat
from bridge.translation.edit import edit_config
from bridge.translation.translate import translate
from bridge.verify.judge import Report, verify
from bridge.verify.pair import fit_pair

RELEASES = {"megatron": "0.16.1", "deepspeed": "0.19.8"}
MEGATRON = """
--num-layers 12 --hidden-size 512 --num-attention-heads 8 --group-query-attention --num-query-groups 2 --ffn-hidden-size 1024
--seq-length 512 --max-position-embeddings 512 --vocab-size 1000 --swiglu --normalization RMSNorm --norm-epsilon 1e-5
--position-embedding-type rope --rotary-base 500000 --disable-bias-linear --untie-embeddings-and-output-weights
--attention-dropout 0 --hidden-dropout 0 --micro-batch-size 2 --global-batch-size 4 --train-iters 2000 --lr 1e-3 --min-lr 1e-4
--lr-decay-style cosine --lr-decay-iters 1000 --lr-warmup-iters 100 --weight-decay 0.1 --clip-grad 1.0 --bf16
"""
EXPERTS = "--num-experts 8 --moe-router-topk 2"
RAMP = "--weight-decay-incr-style linear --start-weight-decay 0.01 --end-weight-decay 0.5"
LION = "--optimizer lion --lion-beta1 0.95 --lion-beta2 0.98"
FP16 = "--fp16 --loss-scale-window 1000"
FAULTS: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "decay scope": ("", "deepspeed", {"optimizer.decay_scope": "all"}),
    "ramp": (RAMP, "megatron", {"optimizer.decay_ramp.shape": "cosine"}),
    "betas of Lion": (LION, "megatron", {"optimizer.betas": (0.95, 0.999)}),
    "top-k": (EXPERTS, "megatron", {"model.moe.top_k": 4}),
    "rotary base": ("", "megatron", {"model.rotary.base": 10000}),
    "window of the loss scale": (FP16, "megatron", {"precision.loss_scale.window": 2000}),
    "horizon for length": ("", "megatron", {"optimizer.schedule.total_steps": 2000}),
    "gate": ("", "megatron", {"model.mlp.gated": False, "model.mlp.activation": "gelu"}),
    "norm eps": ("", "megatron", {"model.norm.eps": 1e-6}),
    "averaging order": ("", "megatron", {"loss": "per_token"}),
    "warmup's length": ("", "deepspeed", {"optimizer.schedule.warmup_steps": 110}),
    "warmup shape": ("", "deepspeed", {"optimizer.schedule.warmup_from": 5e-4}),
    "clip": ("", "deepspeed", {"optimizer.clip": 0.5}),
    "key heads": ("", "megatron", {"model.kv_heads": 8}),
}
"""By name: more flags, the stack to translate to, and what is wrong in the translation."""
SGD = "--optimizer sgd --sgd-momentum 0.9"
MORE: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "beta2": ("", "deepspeed", {"optimizer.betas": (0.9, 0.95)}),
    "eps of Adam": ("", "deepspeed", {"optimizer.eps": 1e-5}),
    "rate": ("", "deepspeed", {"optimizer.lr": 2e-3}),
    "half the rate": ("", "megatron", {"optimizer.lr": 5e-4}),
    "weight decay": ("", "megatron", {"optimizer.weight_decay": 0.01}),
    "no weight decay": ("", "deepspeed", {"optimizer.weight_decay": 0.0}),
    "last rate": ("", "megatron", {"optimizer.schedule.minimum": 0.0}),
    "higher last rate": ("", "deepspeed", {"optimizer.schedule.minimum": 5e-4}),
    "line for a cosine": ("", "megatron", {"optimizer.schedule.name": "linear"}),
    "half the warmup": ("", "megatron", {"optimizer.schedule.warmup_steps": 50}),
    "smaller clip": ("", "megatron", {"optimizer.clip": 0.1}),
    "no clip": ("", "deepspeed", {"optimizer.clip": 0.0}),
    "share of the rotary": ("", "megatron", {"model.rotary.share": 0.5}),
    "interleaved rotary": ("", "megatron", {"model.rotary.interleaved": True}),
    "positions": ("", "megatron", {"model.embedding.positions": "learned"}),
    "bias of the queries": ("", "megatron", {"model.attention.qkv_bias": True}),
    "norm of queries": ("", "megatron", {"model.attention.norm": "head"}),
    "kind of norm": ("", "megatron", {"model.norm.kind": "layer"}),
    "tie": ("", "megatron", {"model.tied": True}),
    "width of the feed-forward part": ("", "megatron", {"model.ffn": 512}),
    "width of heads": ("", "megatron", {"model.attention.head_size": 128}),
    "window": ("", "megatron", {"model.attention.window": 64}),
    "score of the router": (EXPERTS, "megatron", {"model.moe.score": "sigmoid"}),
    "experts": (EXPERTS, "megatron", {"model.experts": 4}),
    "first loss scale": (FP16, "megatron", {"precision.loss_scale.initial": 128.0}),
    "end of the ramp": (RAMP, "megatron", {"optimizer.decay_ramp.end": 0.1}),
    "momentum": (SGD, "megatron", {"optimizer.momentum": 0.5}),
    "no momentum": (SGD, "deepspeed", {"optimizer.momentum": 0.0}),
    "beta1 of Lion": (LION, "megatron", {"optimizer.betas": (0.9, 0.98)}),
    "optimizer": ("", "deepspeed", {"optimizer.name": "adam"}),
    "microbatches": ("", "deepspeed", {"batch.accumulation": 1, "batch.global_": 2}),
}
"""The same, tried by hand and by `tox -e long`."""
UNSHOWN: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "layers": ("", "megatron", {"model.layers": 6}),
    "balance loss": (EXPERTS, "megatron", {"model.moe.aux_loss": 0.1}),
    "z loss": (EXPERTS, "megatron", {"model.moe.z_loss": 0.1}),
    "hysteresis": (FP16, "megatron", {"precision.loss_scale.hysteresis": 1}),
    "number format": ("", "megatron", {"precision.compute": "fp32"}),
    "format of reductions": ("", "deepspeed", {"precision.reduce": "bf16"}),
}
"""What small runs make alike, take out, do not reach in a few steps, or cannot tell from rounding."""


def report(flags: str, to: str, wrong: Mapping[str, Any]) -> Report:
    """What the native engine alone, on one rank, says of a launch and its translation."""
    text = f"{MEGATRON} {flags}".replace("--bf16", "" if "--fp16" in flags else "--bf16")
    releases = (
        {**RELEASES, "megatron": "0.19.2"} if flags == LION else RELEASES
    )  # the first that has Lion
    source = compat.load("megatron").read(text, version=releases["megatron"], world_size=1)
    result = translate(source, compat.load(to), releases[to], 1)
    planted = replace(result, config=edit_config(result.config, wrong, 1)) if wrong else result
    return verify(fit_pair(source, planted, {}, 1), {}, None, note=lambda line: None)


LONG = pytest.mark.skipif(
    not os.environ.get("STAGEBRIDGE_WALKS"), reason="takes longer: tox -e long"
)


@pytest.mark.parametrize("name", [*FAULTS, *(pytest.param(name, marks=LONG) for name in MORE)])
def test_a_planted_fault_differs_and_the_translation_is_blamed(name: str) -> None:
    flags, to, wrong = {**FAULTS, **MORE}[name]
    found = report(flags, to, wrong)
    assert found.verdict == "differs", found
    (fault,) = (row for row in found.rows if row.verdict == "differs")
    assert fault.side == "target" and "the translation is at fault" in fault.cause
    assert (
        any(path in fault.cause for path in wrong)
        and "`convert` does not report this" in fault.cause
    ), fault.cause


@pytest.mark.parametrize("name", UNSHOWN)
def test_what_no_run_shows_is_named_with_both_values(name: str) -> None:
    flags, to, wrong = UNSHOWN[name]
    found = report(flags, to, wrong)
    ((path, value),) = wrong.items()
    assert found.verdict == "in part"
    # A field that is set takes others with it, as a balance loss its kind.
    told = [line for line in found.lacking if line.startswith("not shown by these runs")]
    assert any(f"{path}: " in line and line.endswith(f"{value} in the target") for line in told)
    assert len(told) < 4, told


@pytest.mark.parametrize(
    ("flags", "to"), dict.fromkeys((flags, to) for flags, to, _ in FAULTS.values())
)
def test_without_one_nothing_differs(flags: str, to: str) -> None:
    found = report(flags, to, {})
    assert found.verdict == "in part" and "neither stack ran its own file" in found.lacking[0], (
        found.rows
    )
    assert not [line for line in found.lacking if line.startswith("not shown")]


def test_a_length_that_its_stack_has_no_way_to_make_smaller_stays_on_both_sides() -> None:
    script = {
        "init": {"pp": 1, "tp": 1, "dp": 2},
        "args": {"output_dir": "output", "max_steps": 1000},
    }
    source = compat.load("merak").read(script, world_size=2)
    pair = fit_pair(
        source,
        translate(source, compat.load("megatron"), RELEASES["megatron"], 2),
        compat.backends(),
        2,
    )
    lengths = {side: plan.optimizer.schedule.total_steps for side, plan in pair.plans.items()}
    assert lengths == {"source": 1000, "target": 1000}
