"""Counts the parameters of a plan's model from the plan alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from bridge.errors import BridgeError
from bridge.layout.architecture import Architecture
from bridge.plan.plan import Plan


class Parameters(NamedTuple):
    """Number of all parameters of a model, and number of parameters that are active for a token.
    Parameters of experts that were not chosen for the token are not active.
    """

    all: int
    active: int


def count_parameters(plan: Plan) -> Parameters:
    """Count the parameters of the model of `plan`.

    Tied weights count once. The padding of the vocabulary counts. Heads for multi-token prediction
    do not count. Raises `BridgeError` if the plan does not set a field that the count needs.
    """
    lacking = missing_fields_of(plan)
    if lacking:
        raise BridgeError(f"parameters: the plan does not set {', '.join(lacking)}; set them")
    shape = Architecture.of(plan.model)
    beside = 0
    if plan.model.family in COUNTED and plan.model.moe.balance_bias:
        # One bias for each expert, in each block that has experts.
        beside = sum(map(shape.has_experts, range(shape.layers))) * (plan.model.experts or 0)
    return Parameters(shape.size() + beside, shape.active() + beside)


COUNTED = ("ernie4_5_moe",)
"""Families of models whose load-balancing bias counts as a parameter, although no gradient is
computed for this bias. In other families the bias is a buffer, which does not count.
"""


def missing_fields_of(plan: Plan) -> list[str]:
    """Return the fields that are not set in `plan` although the count needs them."""
    values = {path: value for path, value in plan.values().items() if path.startswith("model.")}
    return [path for path in _missing_fields(values) if values.get(path) is None]


ALWAYS = (
    "layers",
    "hidden",
    "vocab",
    "tied",
    "heads",
    "attention.qkv_bias",
    "attention.output_bias",
    "mlp.gated",
    "mlp.bias",
)
LATENT = ("query_rank", "plain_size", "rotary_size", "value_size")


def _missing_fields(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of the plan's fields on which the number of parameters depends, if these
    fields have no default. `values` are the fields that the plan sets.
    """
    yield from (f"model.{name}" for name in ALWAYS)
    if values.get("model.norm.bias") is None:
        yield "model.norm.kind"
    yield "model.embedding.positions"
    if values.get("model.embedding.positions") == "learned":
        yield "model.embedding.max_positions"
    if values.get("model.attention.latent.kv_rank") is not None:
        yield from (f"model.attention.latent.{name}" for name in LATENT)
    if values.get("model.experts"):
        yield "model.moe.top_k"
    # Blocks without experts have a layer of that width, and experts without a width of their own
    # take it.
    dense = not values.get("model.experts") or not all(values.get("model.moe.layers") or (True,))
    if dense or values.get("model.moe.ffn") is None:
        yield "model.ffn"
