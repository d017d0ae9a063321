"""One file of safetensors: its header, and a file to be written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from bridge.checkpoint.archive import advice_on
from bridge.checkpoint.files import File, all_of
from bridge.checkpoint.lazy import WIDTH, Lazy, Placed, Span
from bridge.errors import SourceError
from bridge.files.contained import regular
from bridge.files.sealed import parse_object
from bridge.files.shown import show_value
from bridge.layout.boxes import Box

MOST = 2**28
"""Maximum number of bytes of a header, or of an index."""
DAMAGED = "the file is damaged"
ALIGNED = 8
METADATA = "__metadata__"
SHARDING = "DCP_SHARDING_INFO"
"""Entry of a header that says where the parts of tensors in a rank's file begin
(torch/distributed/checkpoint/_hf_utils.py: DCP_SHARDING_INFO_KEY).
"""


def _read_rows(path: Path, root: Path) -> tuple[dict[str, Any], int, int]:
    """Return the rows of a header, its end, and the size of the file, both in bytes."""
    try:
        with regular(path, root).open("rb") as file:
            size = path.stat().st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(MOST, size - 8):
                raise SourceError(
                    f"{path}: a header of {length} bytes does not fit into a file of {size} bytes; {DAMAGED}"
                )
            text = file.read(length).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"{path}: {error}; {advice_on(error, DAMAGED)}") from None
    # The format begins with the header's size in 8 bytes.
    return parse_object(text, path), 8 + length, size


def read_header(path: Path, root: Path) -> dict[str, Span]:
    """Return the tensors of a file by name. Raises `SourceError` if tensors overlap, leave gaps,
    or do not reach to the end of the file.
    """
    rows, end, size = _read_rows(path, root)
    spans = {
        name: _span_of_row(path, name, row, end) for name, row in rows.items() if name != METADATA
    }
    # Places are relative to the end of the header, and there are no gaps.
    for name, span in sorted(spans.items(), key=lambda item: item[1].begin):
        if span.begin != end:
            raise SourceError(
                f"{path}: the tensor {show_value(name)} begins at byte {span.begin}, expected byte {end}; {DAMAGED}"
            )
        end += span.size
    if end != size:
        raise SourceError(
            f"{path}: found {size} bytes, but the tensors end at byte {end}; {DAMAGED}"
        )
    return spans


def read_parts(path: Path, root: Path) -> dict[str, Placed]:
    """Return the parts of tensors in the file of one rank, by the tensor's name. Raises `SourceError` if the
    file does not say where a part begins.
    """
    rows, _, _ = _read_rows(path, root)
    about = rows.get(METADATA)
    text = about.get(SHARDING) if isinstance(about, dict) else None
    places = parse_object(text, path) if isinstance(text, str) else {}
    parts = {}
    for name, span in read_header(path, root).items():
        row = places.get(name)
        offsets = row.get("saved_offsets") if isinstance(row, dict) else None
        if not (
            isinstance(offsets, list)
            and len(offsets) == len(span.shape)
            and all(type(offset) is int and offset >= 0 for offset in offsets)
        ):
            raise SourceError(
                f"{path}: found {show_value(row)} as place of {show_value(name)}, expected its offsets; {DAMAGED}"
            )
        parts[name] = Placed(Box(tuple(offsets), span.shape), span)
    return parts


def _span_of_row(path: Path, name: str, row: Any, base: int) -> Span:
    try:
        dtype, shape, (begin, end) = row["dtype"], tuple(row["shape"]), row["data_offsets"]
        whole = all(type(size) is int and 0 <= size < 2**63 for size in (*shape, begin, end))
        right = whole and dtype in WIDTH and end - begin == prod(shape) * WIDTH[dtype]
        lacks = whole and isinstance(dtype, str) and dtype not in WIDTH
    except (KeyError, TypeError, ValueError):
        right = lacks = False
    if lacks:
        raise SourceError(
            f"{path}: {show_value(name)}: found the number format {show_value(dtype)}, expected one of "
            f"{', '.join(WIDTH)}; save it in one of these"
        )
    if not right:
        raise SourceError(
            f"{path}: found {show_value(row)} for {show_value(name)}, expected the dtype, shape and offsets of a "
            f"tensor; {DAMAGED}"
        )
    return Span(path, base + begin, shape, dtype)


def file_of(
    name: str, tensors: Mapping[str, Lazy], metadata: Mapping[str, str] | None = None
) -> File:
    """Return a safetensors file with these tensors. Those with wide elements come first, so that
    each begins at a multiple of its element's width. Raises `SourceError` for a tensor with the name
    that the format has for the metadata.
    """
    if METADATA in tensors:
        raise SourceError(
            f"{METADATA}: found a tensor of this name, which safetensors has for metadata; rename it"
        )
    # So every tensor begins at a multiple of its element's width, and can be mapped into memory as
    # it is.
    order = sorted(tensors, key=lambda key: (-WIDTH[tensors[key].dtype], key))
    rows: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    at = 0
    for key in order:
        tensor = tensors[key]
        rows[key] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.size],
        }
        at += tensor.size
    text = json.dumps(rows, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNED)
    return File(
        name, (len(text).to_bytes(8, "little") + text, *(all_of(tensors[key]) for key in order))
    )
