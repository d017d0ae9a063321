"""Fast-LLM's model section <-> the plan's model: what its own importer makes, its defaults, its layouts and its patterns."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import bridge
import compat
from bridge.stack.dialect import Config
from bridge.stack.rules import Context, Effect
from bridge.translation.diff import compare
from compat.fast_llm.rules.model import BASE
from compat.fast_llm.rules.model.places import flat
from compat.fast_llm.rules.model.reading import read, unsaid
from compat.fast_llm.rules.model.writing import write

SAMPLE: list[dict[str, Any]] = json.loads(
    Path(__file__).with_name("models.json").read_text("utf-8")
)
"""Sections as Fast-LLM's importers at 7d61a1ba make them from Hugging Face's configs, without null."""
NEWEST = Context("0.4.0+20260720")
USUAL: Mapping[str, Any] = {
    "decoder.type": "fixed",
    "decoder.block.type": "decoder",
    "decoder.block.mixer.type": "attention",
    "decoder.block.mixer.causal": True,
    "decoder.block.mixer.shared_key_value": False,
    "decoder.block.mixer.softmax_scale_power": 0.5,
    "decoder.block.mlp.type": "mlp",
    "decoder.block.mlp.routing": "aux_loss",
    "decoder.block.mlp.router_input_scale": 1.0,
    "decoder.block.mlp.shared_experts": 0,
    "peft.type": "none",
}
"""Settings that are not written where they are at their default."""


def again(section: Mapping[str, Any]) -> dict[str, Any]:
    """Leaves of a section after the way into a plan and back."""
    found = dict(flat(write(read({BASE: section}, NEWEST), NEWEST)[BASE]))
    return {**USUAL, **found}


def assert_fact(section: Mapping[str, Any]) -> None:
    assert unsaid({BASE: section}) == []
    back = again(section)
    assert {path: back.get(path) for path, value in flat(section) if value is not None} == dict(
        flat(section)
    )


@pytest.mark.parametrize("row", SAMPLE, ids=lambda row: row["name"])
def test_an_imported_model_comes_back(row: dict[str, Any]) -> None:
    assert_fact(row["base_model"])


def test_all_imported_models_come_back(whole: Path) -> None:
    rows = map(json.loads, (whole / "truth/model_configs.jsonl").read_text("utf-8").splitlines())
    sections = [
        row["fast_llm"]["base_model"]
        for row in rows
        if (row.get("fast_llm") or {}).get("base_model")
    ]
    assert len(sections) >= 60
    for section in sections:
        assert_fact(section)


def test_defaults_are_the_model() -> None:
    """layers/attention/config.py, layers/decoder/mlp/config.py, layers/language_model/config.py."""
    found = read({BASE: {"hidden_size": 512}}, NEWEST)
    assert {
        path: found[f"model.{path}"]
        for path in ("heads", "kv_heads", "attention.head_size", "ffn", "vocab", "tied")
    } == {
        "heads": 8,
        "kv_heads": 1,
        "attention.head_size": 128,
        "ffn": 4096,
        "vocab": 49152,
        "tied": False,
    }
    assert (found["model.norm.kind"], found["model.mlp.gated"], found["model.mlp.bias"]) == (
        "layer",
        False,
        True,
    )
    assert (
        found["model.embedding.positions"],
        found["model.dropout"],
        found["model.mlp.activation"],
    ) == ("none", 0.0, "gelu_tanh")
    assert read({}, NEWEST) == {}


@pytest.mark.parametrize("version", ["0.1.0", "0.2.0", "0.3.0", "0.4.0"])
def test_each_layout_says_the_same(version: str) -> None:
    context = Context(version)
    said = read({BASE: SAMPLE[0]["base_model"]}, NEWEST)
    section = write(said, context)
    assert (
        compat.load("fast_llm").read({"model": {"base_model": section[BASE]}}, version).given[BASE]
        == section[BASE]
    )
    found = read(section, context)
    # On an unknown number of ranks, only the newest sums the losses of a router.
    apart = {"habits.router_losses": "mean"} if version != NEWEST.version else {}
    assert {path: value for path, value in found.items() if said.get(path) != value} == apart


def test_shared_experts_count_among_all() -> None:
    mlp = {
        "type": "moe",
        "experts": 10,
        "shared_experts": 2,
        "experts_per_token": 2,
        "intermediate_size": 256,
    }
    section = {"decoder": {"block": {"mlp": mlp}}}
    found = read({BASE: section}, NEWEST)
    assert (found["model.experts"], found["model.moe.shared_ffn"], found["model.moe.ffn"]) == (
        8,
        512,
        256,
    )
    back = again(section)
    assert (back["decoder.block.mlp.experts"], back["decoder.block.mlp.shared_experts"]) == (10, 2)


def test_a_pattern_says_which_blocks_have_a_window_and_experts() -> None:
    said = {
        "model.layers": 4,
        "model.hidden": 64,
        "model.heads": 4,
        "model.ffn": 128,
        "model.attention.window": 32,
        "model.attention.windowed": (True, False, True, False),
        "model.experts": 8,
        "model.moe.ffn": 64,
        "model.moe.layers": (False, True, False, True),
        "model.embedding.positions": "rotary",
        "model.rotary.base": 1e6,
        "model.rotary.local_base": 1e4,
    }
    section = write(said, NEWEST)[BASE]
    assert section["decoder"]["pattern"] == ["windowed_dense", "full_experts"]
    found = read({BASE: section}, NEWEST)
    assert {path: found.get(path) for path in said} == said
    assert unsaid({BASE: section}) == ["head.normalization"] * (found["model.norm.kind"] != "layer")


def test_what_no_plan_says_is_named() -> None:
    """A layer of another kind, and settings without a word, are in the findings by their place."""
    block = {"mixer": {"type": "mamba"}, "mlp": {"jitter_eps": 0.1, "type": "moe", "experts": 4}}
    config = compat.load("fast_llm").read(
        {"model": {"base_model": {"hidden_size": 64, "decoder": {"block": block}}}}
    )
    result = bridge.translate(config, compat.load("megatron"))
    found = {it.path: str(it.effect) for it in result.findings}
    for place in ("decoder.block.mixer.type", "decoder.block.mlp.jitter_eps"):
        assert found[f"{BASE}.{place}"] == "different numbers"


SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "embeddings": {
        "vocab_size": 128,
        "num_position_embeddings": 32,
        "position_embeddings": {"enabled": True},
    },
    "decoder": {
        "num_blocks": 2,
        "block": {"mixer": {"heads": 4, "head_groups": 2}, "mlp": {"intermediate_size": 128}},
    },
}
RANKS = "model.distributed.tensor_parallel"
STOPPING: tuple[tuple[str, dict[str, Any], int], ...] = (
    (RANKS, {"decoder": {"block": {"mlp": {"intermediate_size": 127}}}}, 2),
    (RANKS, {"decoder": {"block": {"mixer": {"head_groups": 4}}}}, 8),
    (RANKS, {"embeddings": {"vocab_size": 129}}, 2),
    (BASE, {"decoder": {"block": {"mixer": {"heads": 5}}}}, 1),
    ("data.maximum_document_length", {"embeddings": {"num_position_embeddings": 16}}, 1),
)


@pytest.mark.parametrize("path, change, tensor", STOPPING)
def test_dimensions_that_no_rank_can_have_are_said(
    path: str, change: dict[str, Any], tensor: int
) -> None:
    def stops(base: dict[str, Any], tensor: int) -> set[str]:
        mesh = {"tensor_parallel": tensor, "world_size": 8}
        whole = {
            "model": {"base_model": base, "distributed": mesh},
            "data": {"maximum_document_length": 32},
        }
        found = compat.load("fast_llm").read(whole).findings
        return {one.path for one in found if one.effect is Effect.STOPS}

    assert stops(SIZES, 2) == set()
    lacking = compat.load("fast_llm").read({"model": {"base_model": SIZES}}).missing
    assert "data.maximum_document_length" in {one.path for one in lacking}
    assert path in stops(_over(SIZES, change), tensor)


def _over(base: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """`base` with the values of `change`, section by section."""
    return base | {
        key: _over(base[key], value) if isinstance(value, dict) else value
        for key, value in change.items()
    }


def experts(world: int | None, version: str, **ranks: int | bool) -> Config:
    """A run with experts whose losses have coefficients of 0.01 and 0.001."""
    mlp = {"type": "moe", "experts": 8, "experts_per_token": 2, "add_linear_biases": False}
    losses = {"auxiliary_loss_coefficient": 0.01, "z_loss_coefficient": 0.001}
    base = {"hidden_size": 64, "decoder": {"num_blocks": 2, "block": {"mlp": {**mlp, **losses}}}}
    source = {
        "training": {"train_iters": 100},
        "schedule": {"depth_first_micro_batches": 6},
        "model": {"base_model": base, "distributed": ranks},
    }
    return compat.load("fast_llm").read(source, version, world)


SPLIT = {"tensor_parallel": 2, "sequence_tensor_parallel": True}


@pytest.mark.parametrize(
    ("version", "ranks", "parts"),
    [
        ("0.4.0", {}, 1),
        ("0.4.0", {"tensor_parallel": 2}, 1),
        ("0.4.0", SPLIT, 2),
        ("0.4.0+20260720", {}, 48),
        ("0.4.0+20260720", {"tensor_parallel": 2}, 24),
        ("0.4.0+20260720", SPLIT, 48),
    ],
)
def test_losses_of_a_router_are_sums(version: str, ranks: dict[str, Any], parts: int) -> None:
    """Over tensor ranks that split a sequence, and later over data ranks and microbatches; others take the mean."""
    source = experts(8, version, **ranks)
    experts_of_plan = bridge.lift(source).model.moe
    assert (experts_of_plan.aux_loss, experts_of_plan.z_loss) == (0.01 * parts, 0.001 * parts)
    there = bridge.translate(source, compat.load("megatron"), world_size=8)
    assert there.config.given["moe_aux_loss_coeff"] == pytest.approx(0.01 * parts * 2)
    back = bridge.translate(there.config, source.dialect, version, 8).config
    written = back.given["model.base_model"]["decoder"]["block"]["mlp"]
    assert written["auxiliary_loss_coefficient"] == pytest.approx(0.01, rel=1e-15)
    assert bridge.lift(back).model.moe == experts_of_plan
    rows = (*there.findings, *compare(source, there.config))
    about = {ours for row in rows for ours in row.about if row.effect.reaches(Effect.NUMBERS)}
    assert about.isdisjoint(("model.moe.aux_loss", "model.moe.z_loss", "habits.router_losses"))


def test_sinkhorn_has_neither_a_loss_nor_a_choice_of_scores() -> None:
    """Fast-LLM and Megatron take a sigmoid for one expert and a softmax for more; a coefficient is dead or stops."""
    source = experts(8, "0.4.0")
    source.given["model.base_model"]["decoder"]["block"]["mlp"]["routing"] = "sinkhorn"
    source = source.dialect.config(source.given, source.version, 8)
    there = bridge.translate(source, compat.load("megatron"), world_size=8)
    assert there.config.given["moe_aux_loss_coeff"] == 0
    for score in ("softmax", "sigmoid"):
        given = {**there.config.given, "moe_router_score_function": score}
        config = there.config.dialect.config(given, there.config.version, 8)
        back = bridge.translate(config, source.dialect, "0.4.0", 8)
        for rows in (
            there.findings,
            back.findings,
            compare(source, config),
            compare(config, source),
        ):
            about = {
                ours for row in rows for ours in row.about if row.effect.reaches(Effect.NUMBERS)
            }
            assert not [ours for ours in about if ours.startswith("model.moe.")]


@pytest.mark.parametrize("kind", ["mlp", "moe"])
def test_a_model_that_computes_nothing_again_says_so(kind: str) -> None:
    """So that `diff` has no row on it where `convert` has none."""
    source = experts(8, "0.4.0")
    source.given["model.base_model"]["decoder"]["block"]["mlp"]["type"] = kind
    source = source.dialect.config(source.given, source.version, 8)
    assert bridge.lift(source).recompute.granularity == "none"
    there = bridge.translate(source, compat.load("megatron"), world_size=8)
    rows = (*there.findings, *compare(source, there.config), *compare(there.config, source))
    assert not [row for row in rows if "recompute.granularity" in row.about]


def test_losses_of_a_router_on_an_unknown_number_of_ranks_are_told() -> None:
    source = experts(None, "0.4.0+20260720")
    there = bridge.translate(source, compat.load("megatron"))
    for rows in (
        there.findings,
        compare(source, there.config),
        compare(there.config, source),
        compare(experts(None, "0.4.0"), source),
    ):
        worst = [row.effect for row in rows if "habits.router_losses" in row.about]
        assert Effect.NUMBERS in worst
