"""Reads the stages of a PipelineModule's checkpoint: each layer has its own file, and each stage
lists the parameters that it trains.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bridge.checkpoint.lazy import Lazy, Shape
from bridge.errors import SourceError
from bridge.files.shown import show_value

DAMAGED = "the checkpoint is damaged"


def modules(
    entries: Mapping[str, Lazy], parts: Sequence[Mapping[str, Shape]], where: str
) -> list[dict[str, Lazy]]:
    """Return, for each stage, the tensors of the stage by parameter name. `entries` has the tensors
    of all layer files, and `parts` the names and shapes that each stage trains. A parameter name is
    the layer's number followed by the name in this layer, or `tied_modules.` followed by the key of
    the tie. Tensors that no stage trains go to the first stage. Raises `SourceError` for a
    parameter that is in no file, or with different values in several files.
    """
    import torch

    trained_names = {name for names in parts for name in names if name in entries}
    free = {name: tensor for name, tensor in entries.items() if name not in trained_names}
    stages: list[dict[str, Lazy]] = []
    copied_names: set[str] = set()
    for names in parts:
        # A tied parameter, `tied_modules.KEY.REST`, is REST in the file of each layer that uses it:
        # several entries may be it, and they have to be equal.
        copies = {
            name: [
                entry
                for entry, tensor in free.items()
                if name.startswith("tied_modules.")
                and name.endswith(f".{entry.partition('.')[2]}")
                and tensor.shape == shape
            ]
            for name, shape in names.items()
            if name not in entries
        }
        for name, same in copies.items():
            if not same or any(
                not torch.equal(free[same[0]].whole(), free[other].whole()) for other in same[1:]
            ):
                raise SourceError(
                    f"{where}: found {show_value(name)} in {len(same)} layer files, expected one file,"
                    f" or several with equal values; {DAMAGED}"
                )
        copied_names |= {copy for same in copies.values() for copy in same}
        stages.append(
            {name: entries[name] if name in entries else free[copies[name][0]] for name in names}
        )
    stages[0] |= {name: tensor for name, tensor in free.items() if name not in copied_names}
    return stages


def layer(number: int, entries: Mapping[str, Any]) -> dict[str, Lazy]:
    """Return the tensors in a layer's file. The layer's number is added before each name."""
    return {
        f"{number}.{name}": tensor for name, tensor in entries.items() if isinstance(tensor, Lazy)
    }


def shapes(model: Mapping[str, Any], path: Path) -> Iterator[tuple[str, Shape]]:
    """Yield names and shapes of the parameters that a stage trains. Raises `SourceError` if the
    file has no shapes, such as a file written without ZeRO.
    """
    if not isinstance(groups := model.get("param_shapes"), list):
        raise SourceError(
            f"{path}: the file has no shapes of parameters, so the layers of the stage are not"
            " known; save the checkpoint with zero_optimization.stage 1, which gives the same"
            " numbers"
        )
    yield from ((name, tuple(shape)) for group in groups for name, shape in group.items())
