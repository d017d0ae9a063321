"""Resumes from a checkpoint with Megatron-Core's own loader, called as Megatron-LM calls it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

from megatron.core import dist_checkpointing, parallel_state
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from bridge.errors import SourceError
from compat.megatron.checkpoint import run
from compat.megatron.runtime.model import bare


def load_checkpoint(place: Path, chunks: Sequence[Any], optimizer: Any) -> Mapping[str, Any]:
    """Load weights and optimizer state from the `torch_dist` checkpoint `place` into a run.

    The checkpoint may come from another number of ranks. Returns the checkpoint's other content:
    the iteration, the scheduler's state and, if it has them, the arguments
    (training/checkpointing.py: load_checkpoint). Raises `SourceError` if the iteration or the
    scheduler's state is missing.
    """
    parts = list(map(bare, chunks))
    names = ["model"] if len(parts) == 1 else [f"model{number}" for number in range(len(parts))]
    ranks = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata = {
        **(dist_checkpointing.load_content_metadata(str(place)) or {}),
        "dp_cp_group": ranks,
    }
    with _stepping(optimizer):
        template = {
            name: part.sharded_state_dict(metadata=metadata)
            for name, part in zip(names, parts, strict=True)
        }
        template["optimizer"] = optimizer.sharded_state_dict(
            template, is_loading=True, metadata=metadata
        )
        content: dict[str, Any] = dist_checkpointing.load(template, str(place))
        missing = [name for name in ("iteration", "opt_param_scheduler") if name not in content]
        SourceError.raise_if(
            f"{place}: the checkpoint has no {name}, which Megatron-LM needs to resume; {run.DAMAGED}"
            for name in missing
        )
        for name, part in zip(names, parts, strict=True):
            part.load_state_dict(content[name])
        optimizer.load_state_dict(content["optimizer"])
    return content


@contextmanager
def _stepping(optimizer: Any) -> Iterator[None]:
    """Context manager in which Megatron's distributed optimizer can load into torch's Adam.

    Torch's Adam has a step count for each parameter, but Transformer Engine's Adam has one for all.
    Megatron prepares only Transformer Engine's Adam for loading. Inside this context, step counts
    are not loaded as state of elements.
    """
    if find_spec("transformer_engine") is not None:
        yield
        return
    parts = [
        part for part in optimizer.chained_optimizers if isinstance(part, DistributedOptimizer)
    ]
    for part in parts:
        part.optimizer.state.clear()
        part._init_optimizer_states_with_dummy_values()
    put = DistributedOptimizer._set_main_param_and_optimizer_states

    def with_step(self: Any, weight: Any, tensors: Mapping[str, Any]) -> None:
        state = self._get_main_param_and_optimizer_states(weight)
        put(
            self,
            weight,
            {**{key: value for key, value in state.items() if key == "step"}, **tensors},
        )

    with patch.object(DistributedOptimizer, "_set_main_param_and_optimizer_states", with_step):
        yield
    for part in optimizer.chained_optimizers:
        for state in part.optimizer.state.values():
            # The loaded tensor is shared: without a copy, each parameter would increase it.
            state["step"] = state["step"].clone()
