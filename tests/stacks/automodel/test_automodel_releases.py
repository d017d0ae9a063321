"""What each release's own parser and step scheduler made of generated recipes, beside what we say."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest

import bridge
from bridge.errors import BridgeError
from bridge.stack.registry import load
from tests.harvesting.judges.automodel import LATER, OVERWRITTEN

AUTOMODEL = load("automodel")
ROWS = [
    json.loads(line)
    for line in (Path(__file__).parent / "releases.jsonl").read_text("utf-8").splitlines()
]


@pytest.mark.parametrize("version", sorted({row["release"] for row in ROWS}))
def test_verdicts_and_values_of_the_releases(version: str) -> None:
    rows = [row for row in ROWS if row["release"] == version]
    assert {row["accepted"] for row in rows} == {True, False}
    for row in rows:
        config = read(row)
        assert (config is not None) is row["accepted"], row
        if config is not None:
            said = config.effective.keys() & row["holds"].keys() - OVERWRITTEN - (
                LATER - config.given.keys()
            )
            held = json.loads(json.dumps({path: config.effective[path] for path in said}))
            assert held == {path: row["holds"][path] for path in said}, row


def read(row: dict[str, Any]) -> Any:
    sizes = [row["recipe"]["distributed"].get(name) for name in ("tp_size", "cp_size", "pp_size")]
    ranks = prod((row["ranks"], *(size for size in sizes if isinstance(size, int) and size > 0)))
    try:
        return AUTOMODEL.read(row["recipe"], version=row["release"], world_size=ranks)
    except BridgeError:
        return None


MOVED = [
    ("0.4.0", "bf16", "bf16", True),
    ("0.6.0", "fp32", "bf16", True),
    ("0.7.0", "fp32", None, False),
]


@pytest.mark.parametrize(("version", "reduce", "output", "cast"), MOVED)
def test_the_formats_of_fsdp2_moved(
    version: str, reduce: str, output: str | None, cast: bool
) -> None:
    values = AUTOMODEL.config({}, version, 2).effective
    policy = [
        values.get(f"distributed.mp_policy.{name}")
        for name in ("reduce_dtype", "output_dtype", "cast_forward_inputs")
    ]
    assert policy == [reduce, output, cast]


@pytest.mark.parametrize(
    ("word", "stops"),
    [("fp32", True), ("16-true", True), ("float32", False), ("torch.half", False), ("bf16", False)],
)
def test_automodel_stops_at_spellings_that_it_does_not_know(word: str, stops: bool) -> None:
    config = AUTOMODEL.read({"distributed": {"mp_policy": {"param_dtype": word}}})
    found = [finding for finding in config.findings if "AutoModel refuses" in finding.message]
    assert bool(found) is stops
    assert word not in config.text() or not stops


OPEN = {"distributed.strategy": "ddp", "model.config.n_layer": 1}
NAMING = [
    {"model.config._target_": "transformers.BloomConfig"},
    {"model.config.model_type": "bloom"},
    {
        "model.config._target_": "transformers.GPTBigCodeConfig",
        "model.config.rope_scaling": {"type": "dynamic", "factor": 1.0},
    },
]


@pytest.mark.parametrize("named", NAMING, ids=lambda named: " ".join(map(str, named.values())))
def test_a_model_that_is_named_by_its_config_alone_comes_back(named: dict[str, Any]) -> None:
    plan = bridge.lift(AUTOMODEL.config({**OPEN, **named}, "0.6.0"))
    assert plan.values()["precision.master"] == "bf16"
    assert not any(path.startswith("model.rotary") for path in plan.values())
    assert bridge.lift(bridge.lower(plan, AUTOMODEL, "0.6.0")).values() == plan.values()
