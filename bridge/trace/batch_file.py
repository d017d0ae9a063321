"""Batch files: a batch of a training loop in a safetensors file, so that other engines can be run
on the same batch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bridge.engine.comm import rank_and_world
from bridge.errors import BridgeError, SourceError
from bridge.files import write_all

MARK, VALUES = "stagebridge", "values"
VERSION = "batch 1"
PLAIN = (bool, int, float, str)
_WRITTEN: set[str] = set()
"""Paths of the files that this process has written, so that only the first call in a loop writes a
batch.
"""


@dataclass(frozen=True)
class Kept:
    """A batch: its tensors by name, and its plain values by name. Elements of tuples are named by
    their index; nested names are joined by dots.
    """

    tensors: Mapping[str, Tensor]
    values: Mapping[str, bool | int | float | str | None] = field(default_factory=dict)


def keep_batch(path: str | Path, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> bool:
    """Write a batch for `bridge.trace.batch`. Returns whether this call has written the file."""
    from safetensors.torch import save

    place = os.path.abspath(path)
    # The first rank alone writes: there is one file, and ranks are fed different samples.
    if place in _WRITTEN or (rank_and_world() or (0, 1))[0]:
        return False
    # One argument is the batch itself; several are its parts by place.
    values = arguments[0] if len(arguments) == 1 else arguments
    leaves: dict[str, Any] = (
        {"0": values} if isinstance(values, Tensor) else dict(_leaf_values("", values))
    )
    leaves |= dict(_leaf_values("", keywords))
    odd = [
        f"{name or 'the batch'}: found {_kind_of_value(value)}"
        for name, value in leaves.items()
        if not _is_kept(value)
    ]
    advice = "expected tensors, arrays and plain values; pass the arguments of the model"
    BridgeError.raise_if(f"{path}: {line}, {advice}" for line in odd)
    tensors: dict[str, Tensor] = {}
    for name, value in leaves.items():
        if not _is_plain(value):
            tensor = value.detach() if isinstance(value, Tensor) else torch.as_tensor(value)
            # safetensors refuses tensors that share memory: each gets its own.
            tensors[name] = tensor.cpu().contiguous().clone()
    BridgeError.raise_if([] if tensors else [f"{path}: found a batch without tensors, {advice}"])
    plain = {name: value for name, value in leaves.items() if _is_plain(value)}
    write_all({Path(path): save(tensors, {MARK: VERSION, VALUES: json.dumps(plain)})})
    _WRITTEN.add(place)
    return True


def _leaf_values(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield every value inside nested dicts, tuples, lists and dataclasses, with its dotted name."""
    if isinstance(value, Mapping):
        parts = value.items()
    # Before other tuples: the parts of a named one have names.
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        parts = zip(value._fields, value, strict=True)  # type: ignore[assignment]
    elif isinstance(value, list | tuple):
        parts = enumerate(value)  # type: ignore[assignment]
    elif is_dataclass(value) and not isinstance(value, type):
        parts = ((one.name, getattr(value, one.name)) for one in fields(value))  # type: ignore[assignment]
    else:
        yield prefix, value
        return
    for name, part in parts:
        yield from _leaf_values(f"{prefix}.{name}" if prefix else str(name), part)


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, PLAIN)


def _is_kept(value: Any) -> bool:
    if _is_plain(value):
        return True
    array = (
        type(value).__module__ == "numpy"
        and getattr(getattr(value, "dtype", None), "kind", "") in "biuf"
    )
    dense = (
        type(value) in (Tensor, torch.nn.Parameter)
        and value.layout == torch.strided
        and not value.is_complex()
    )
    return array or (dense and not value.is_quantized and not value.is_meta)


def _kind_of_value(value: Any) -> str:
    if isinstance(value, Tensor):
        kind = type(value).__name__
        return f"a {kind} of dtype {value.dtype} and layout {value.layout}".replace("torch.", "")
    return f"{type(value).__module__}.{type(value).__name__}".removeprefix("builtins.")


def read_batch(path: Path) -> Kept:
    """Return the batch in a file. Raises `SourceError` if the file holds no batch."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            about = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
            values = json.loads(about.get(VALUES, "{}"))
    except (OSError, SafetensorError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise SourceError(
            f"{path}: found no batch ({reason}); write one with bridge.trace.batch({path.name!r}, batch)"
        ) from None
    if about.get(MARK, VERSION) != VERSION or not isinstance(values, dict):
        raise SourceError(
            f"{path}: found format {about.get(MARK)}, expected {VERSION}; write the file again with this release"
        )
    return Kept(tensors, values)
