"""Parameters: published and measured counts from what a plan says, and what it has to say for that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import bridge
import compat
from bridge import BridgeError, count_parameters
from bridge.layout.architecture import PRESETS, Architecture
from bridge.layout.parameters import missing_fields_of
from bridge.plan.plan import Plan

SAMPLE: list[dict[str, Any]] = json.loads(
    Path(__file__).with_name("parameters.json").read_text("utf-8")
)
"""Models in the words of a plan, with their parameters as transformers 5.23 counts them on the meta device."""
UNSAYABLE = {"nemotron_h": "its blocks of another kind have no words in a plan"}
LIBRARY = {"glm4_moe_lite": "transformers 5.23 ignores its first dense blocks"}


def plan_of(model: dict[str, Any]) -> Plan:
    return Plan.of(
        {
            f"model.{name}": tuple(value) if isinstance(value, list) else value
            for name, value in model.items()
        }
    )


@pytest.mark.parametrize("row", SAMPLE, ids=lambda row: row["name"])
def test_parameters_are_those_of_the_model(row: dict[str, Any]) -> None:
    assert count_parameters(plan_of(row["model"])) == (row["parameters"], row["active"])


@pytest.mark.parametrize("name", PRESETS)
def test_a_layout_counts_what_a_plan_says(name: str) -> None:
    shape = PRESETS[name]
    said = {
        "layers": shape.layers,
        "hidden": shape.hidden,
        "heads": shape.heads,
        "kv_heads": shape.kv_heads,
        "ffn": shape.ffn,
        "vocab": shape.vocab,
        "tied": shape.tied,
        "norm.kind": shape.norm,
        "mlp.gated": shape.gated,
        **dict.fromkeys(("mlp.bias", "attention.qkv_bias", "attention.output_bias"), shape.bias),
        "embedding.positions": "rotary" if shape.rotary else "learned",
        "embedding.max_positions": shape.sequence,
    }
    assert count_parameters(plan_of(said)) == (shape.size(), shape.size())


def test_what_a_count_needs_is_named() -> None:
    with pytest.raises(BridgeError) as caught:
        count_parameters(
            Plan.of({"model.layers": 2, "model.hidden": 64, "model.heads": 4, "model.experts": 8})
        )
    assert all(
        f"model.{name}" in str(caught.value)
        for name in ("vocab", "tied", "mlp.gated", "moe.top_k", "norm.kind")
    )
    assert missing_fields_of(plan_of(SAMPLE[0]["model"])) == []


def test_experts_are_held_by_fewer_ranks() -> None:
    """Of 8 experts on 4 ranks each has 2; what all experts are together stays the same."""
    from bridge.layout.outline import Outline

    row = next(row for row in SAMPLE if row["name"] == "Mixtral-8x7B-v0.1")
    values = {
        **plan_of(row["model"]).values(),
        "model.sequence": 128,
        "batch.micro": 1,
        "batch.global_": 8,
    }
    whole = Outline.of(plan := Plan.of(values), Architecture.of(plan.model), 8)
    apart = Outline.of(
        plan := Plan.of({**values, "parallel.expert": 4}), Architecture.of(plan.model), 8
    )
    experts = 32 * 8 * 3 * 4096 * 14336
    assert whole.place(0).layout.parameters == row["parameters"]
    assert apart.place(0).layout.parameters == row["parameters"] - experts * 3 // 4


def test_all_parameters_of_shared_models(whole: Path) -> None:
    """Every shared config that gives a count, through the dialect of Hugging Face."""
    if "huggingface" not in compat.names():
        pytest.skip("there is no dialect of Hugging Face's config")
    dialect, wrong = compat.load("huggingface"), {}
    for line in (whole / "truth/model_configs.jsonl").read_text("utf-8").splitlines():
        row = json.loads(line)
        family = row["hf"]["model_type"]
        if row["parameters"] and family not in {**UNSAYABLE, **LIBRARY}:
            found = count_parameters(bridge.lift(dialect.read(row["hf"])))
            if found != (row["parameters"], row["active"] or row["parameters"]):
                wrong[row["name"]] = found
    assert wrong == {}
