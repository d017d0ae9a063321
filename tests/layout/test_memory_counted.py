"""Memory of a run, held against tensors of plain torch: states of FSDP2 and DDP, and what autograd saves."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import bridge
import compat
from bridge.layout.architecture import Architecture, Share
from bridge.layout.memory.activations import Keeper, Tokens
from bridge.layout.memory.adapters import add_adapters
from bridge.layout.memory.families import TRAITS
from bridge.layout.memory.states import Rank, state_terms
from bridge.layout.memory.terms import sum_by_kind
from bridge.plan.plan import Plan
from bridge.stack.memory_rules import MemoryRules

pytest.importorskip("transformers")

RANKS = 6
EAGER_ALONE = tuple(name for name, traits in TRAITS.items() if "eager" in traits.split())
"""Families of which transformers has no other attention than the eager one."""
FAMILIES = tuple(name for name in TRAITS if name not in EAGER_ALONE)
ONE_PROJECTION = ("gpt_neox", "gpt_bigcode", "phi3", "falcon", "glm", "glm4")
"""Families with one matrix for queries, keys and values, or for gate and up; here there are three or two, whose shards are
rounded up one by one.
"""
BALANCED = ("ernie4_5_moe",)
"""A family whose experts have a bias that is a parameter and is not trained."""


@pytest.fixture(scope="module")
def counted() -> dict[str, Any]:
    """Bytes of real tensors of all families, from one process: it starts a group of ranks that do not exist."""
    program = Path(__file__).with_name("count_memory.py")
    words = [sys.executable, str(program), str(RANKS), *FAMILIES, *EAGER_ALONE]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def plan_of(config: dict[str, Any], **settings: Any) -> Plan:
    """The plan of a model's config."""
    plan = bridge.lift(compat.load("huggingface").read(config))
    return Plan.of({**plan.values(), "model.sequence": 128, "batch.micro": 2, **settings})


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sharding", ["fsdp", "ddp"])
def test_states_are_those_of_torch(counted: dict[str, Any], family: str, sharding: str) -> None:
    row = counted[family]
    plan = plan_of(row["config"], **{"zero.stage": 3 if sharding == "fsdp" else 0})
    shape = Architecture.of(plan.model)
    parameters = shape.parameters(dict.fromkeys(shape.indices, 0), Share())
    rules = MemoryRules(sharding=sharding)  # type: ignore[arg-type]
    sizes = sum_by_kind(state_terms(plan, Rank(parameters, 1, RANKS), rules))
    if (family in ONE_PROJECTION and sharding == "fsdp") or family in BALANCED:
        pytest.skip("other matrices, or a bias more")
    assert {kind: sizes[kind] for kind in ("weights", "gradients", "moments")} == row[sharding]


@pytest.mark.parametrize("family", [*FAMILIES, *EAGER_ALONE])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_activations_are_what_autograd_saves(
    counted: dict[str, Any], family: str, attention: str, dtype: str
) -> None:
    row = counted[family]
    if family in EAGER_ALONE and attention == "sdpa":
        pytest.skip("transformers has no such attention")
    plan = plan_of(row["config"], **{"precision.compute": dtype})
    shape = Architecture.of(plan.model)
    flash = attention == "sdpa"
    rules = MemoryRules(attention="flash" if flash else "eager")
    keeper = Keeper(plan, shape, Tokens.of(plan, shape, 2), rules)
    kept = [one for block in range(shape.layers) for one in keeper.block(block)]
    assert keeper.bytes([*kept, *keeper.head()]) == pytest.approx(
        row[f"{attention} {dtype}"], rel=0.02
    )


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_a_block_that_is_computed_again_keeps_its_input(
    counted: dict[str, Any], family: str
) -> None:
    row = counted[family]
    plan = plan_of(row["config"], **{"precision.compute": "bf16", "recompute.granularity": "full"})
    shape = Architecture.of(plan.model)
    keeper = Keeper(plan, shape, Tokens.of(plan, shape, 2), MemoryRules())
    kept = [keeper.input()] * shape.layers
    assert keeper.bytes([*kept, *keeper.head()]) == pytest.approx(row["again"], rel=0.02)


@pytest.mark.parametrize("targets", [("query", "value"), None])
@pytest.mark.parametrize("way", ["plain", "autocast"])
def test_adapters_are_what_autograd_saves(
    counted: dict[str, Any], targets: tuple[str, ...] | None, way: str
) -> None:
    row, name = counted["adapters"], "all" if targets is None else "some"
    precision: dict[str, Any] = {"precision.compute": "bf16", "precision.master": "fp32"}
    if way == "autocast":
        precision["precision.autocast"] = "bf16"
    settings = {"adapters.rank": 8, "adapters.targets": targets, **precision}
    plan = plan_of(counted["llama"]["config"], **settings)
    shape = Architecture.of(plan.model)
    parameters = add_adapters(
        shape.parameters(dict.fromkeys(shape.indices, 0), Share()), plan.adapters
    )
    assert sum(one.size for one in parameters if one.trainable) == row[f"{name} trained"]
    keeper = Keeper(plan, shape, Tokens.of(plan, shape, 2), MemoryRules())
    kept = [one for block in range(shape.layers) for one in keeper.block(block)]
    # Autocast saves a copy of each adapter's weights too.
    copies = 2 * row[f"{name} trained"] if way == "autocast" else 0
    expected = row[f"{name} {way}"] - copies
    assert keeper.bytes([*kept, *keeper.head()]) == pytest.approx(expected, rel=0.02)
