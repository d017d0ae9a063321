"""Megatron's own meaning of flags: the values that each release's parser and `validate_args` make of them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from compat.megatron import releases
from compat.megatron.arguments.batch import BATCH_STEPS, DATA_STEPS, GRAPH_STEPS
from compat.megatron.arguments.checkpoint import (
    END_STEPS,
    INFERENCE_STEPS,
    LAST_STEPS,
    OPTIMIZER_STEPS,
    SAVING_STEPS,
)
from compat.megatron.arguments.evaluation import OPEN, run, select
from compat.megatron.arguments.experts import EXPERT_STEPS
from compat.megatron.arguments.heterogeneous import HETEROGENEOUS_STEPS
from compat.megatron.arguments.hybrid import HYBRID_STEPS, MTP_STEPS
from compat.megatron.arguments.model import MODEL_STEPS
from compat.megatron.arguments.namespace import Namespace, Step
from compat.megatron.arguments.reinforcement import RL_STEPS, samples
from compat.megatron.arguments.sharding import (
    FSDP_STEPS,
    NARROW_STEPS,
    OVERLAP_STEPS,
    STEP_STEPS,
    TORCH_STEPS,
)
from compat.megatron.arguments.sizes import AFTER_SIZES, MSC, SIZE_STEPS, WORLD_STEPS, least
from compat.megatron.arguments.stages import STAGE_STEPS
from compat.megatron.arguments.training import PRECISION_STEPS, TRAINING_STEPS

TABLE: tuple[Step, ...] = (
    *MSC,
    *HETEROGENEOUS_STEPS,
    *SIZE_STEPS,
    *RL_STEPS,
    # The first group computes with pipeline_model_parallel_size as it was given. Before 0.14, this
    # one then subtracts the stages of a separate encoder from it.
    *AFTER_SIZES,
    *GRAPH_STEPS,
    *DATA_STEPS,
    *BATCH_STEPS,
    *samples("0.17.0"),
    # A hybrid pattern sets num_layers and the virtual stages, which the next group reads.
    *HYBRID_STEPS,
    *STAGE_STEPS,
    *OVERLAP_STEPS,
    *TORCH_STEPS,
    *STEP_STEPS,
    # The short names of dtypes become torch's names here. Rows below compare with torch's names,
    # rows above do not.
    *NARROW_STEPS,
    *FSDP_STEPS,
    *PRECISION_STEPS,
    *TRAINING_STEPS,
    *MODEL_STEPS,
    *EXPERT_STEPS,
    *OPTIMIZER_STEPS,
    *SAVING_STEPS,
    *INFERENCE_STEPS,
    *LAST_STEPS,
    *MTP_STEPS,
    *END_STEPS,
)
"""All statements of `validate_args`, in upstream's order, because later ones read what earlier ones
set.
"""

LAUNCHED = ("inprocess_active_world_size",)
"""Arguments whose default the parser reads from the launcher's WORLD_SIZE."""

__all__ = ["OPEN", "TABLE", "effective", "smallest_world_size"]


@cache
def steps(version: str) -> tuple[Step, ...]:
    """Return the statements that the release has, in order."""
    return select(TABLE, version)


def effective(settings: Mapping[str, Any], version: str, world_size: int) -> dict[str, Any]:
    """Return the arguments (dest -> value, dtypes by name) that the release derives from
    `settings`.

    Values that a partial config may leave open (`OPEN`) stay None, and checks and derivations that
    need them are skipped. Raises `ConfigError` with every problem found.
    """
    defaults = releases.defaults(version)
    launch_values = {name: world_size for name in LAUNCHED if name in defaults}
    # Later mappings win: a given flag overrules what the launcher implies, but nothing overrules
    # the number of ranks.
    values = Namespace(defaults.copy(), launch_values, settings, {"world_size": world_size})
    run(steps(version), values)
    return values.__dict__


def smallest_world_size(settings: Mapping[str, Any], version: str) -> int:
    """Return the smallest number of ranks that is a multiple of tensor x pipeline x context, and of
    the size of the expert grid.

    Raises `ConfigError` for sizes that allow no number of ranks.
    """
    values = Namespace(releases.defaults(version).copy(), settings)
    run(select(WORLD_STEPS, version), values)
    return least(values)
