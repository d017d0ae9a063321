"""The model in its own section: what a plan says of it, in whatever layout of releases it stands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bridge.rules import Group, convert
from compat.fast_llm.model.places import BASE as BASE
from compat.fast_llm.model.places import layout_of as layout_of
from compat.fast_llm.model.reading import MASTER, read, told, unsaid, weigh
from compat.fast_llm.model.reading import SCALE as SCALE
from compat.fast_llm.model.writing import OURS, write

BESIDE = (
    "parallel.vocabulary",
    "precision.residual",
    "optimizer.embedding_lr",
    "optimizer.output_lr",
    "recompute.granularity",
    "recompute.modules",
    "adapters.rank",
    "adapters.alpha",
    "adapters.dropout",
)
"""What a plan says elsewhere, and Fast-LLM in the section of its model."""


def facts(values: Group) -> Mapping[str, Any]:
    """Plan fields that the model section tells, as the newest layout takes its defaults; empty without a section."""
    return read(values, None)


RULE = convert(
    BASE,
    (*OURS, *BESIDE),
    read,
    write,
    effect=weigh,
    sees=(MASTER, SCALE, "precision.compute", "precision.master"),
    blurs=lambda values: bool(unsaid(values)),
    tells=told,
    lossy="Fast-LLM's model has no such setting, or none that means the same, or a Plan has none",
    model=True,
    mixed=True,
    source="models/gpt/config.py, layers/attention/config.py, layers/decoder/config.py, layers/decoder/mlp/config.py, "
    "layers/common/normalization/config.py, layers/language_model/config.py; layers/transformer/config.py before 0.3.0",
)
