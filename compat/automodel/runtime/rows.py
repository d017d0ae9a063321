"""Reads rows of data: JSON, JSON lines, and data sets of Hugging Face on this machine. Nothing is
downloaded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bridge.errors import ConfigError, SourceError
from bridge.files import existing_path

SUFFIXES = (".jsonl", ".json", ".parquet")
SAVED = "state.json"
"""File that `save_to_disk` writes into the folder of a split. It identifies such a folder."""
SPLIT = re.compile(r"(\w+)(?:\[(-?\d*):(-?\d*)\])?")
Rows = Sequence[dict[str, Any]]


def rows(names: str | Sequence[str], split: str | None, where: str) -> Rows:
    """Return the rows of a split (`train`, `train[:64]`) from a folder, or from one or more files.
    Error messages begin with `where`.

    A folder has `SPLIT.jsonl`, `SPLIT.json` or `SPLIT.parquet`, or was written by `save_to_disk`. A
    file holds one split.
    """
    match = SPLIT.fullmatch(split or "train")
    if match is None:
        raise ConfigError(
            f"{where}: found the split {split!r}, expected a name such as train, or a part of a"
            " split such as train[:64]"
        )
    name, first, last = match.groups()
    table: list[dict[str, Any]] = []
    for each in [names] if isinstance(names, str) else names:
        table += _read_rows(each, name, where)
    return (
        table[slice(int(first) if first else None, int(last) if last else None)]
        if first is not None
        else table
    )


def _read_rows(name: str, split: str, where: str) -> Rows:
    place = next((path for path in _find_files(name, split) if path is not None), None)
    if place is None:
        raise SourceError(
            f"{where}: {name} is not on this machine, and nothing is downloaded; give a file of JSON lines, or a folder with"
            f" {split}.jsonl or {split}.parquet"
        )
    if place.suffix in (".jsonl", ".json") and place.name != SAVED:
        return _read_lines(place)
    if find_spec("datasets") is None:
        raise SourceError(
            f"{place}: the library datasets is not installed; run pip install datasets, or give"
            " JSON lines"
        )
    import datasets  # type: ignore[import-not-found, unused-ignore]

    from_disk = place.name == SAVED
    table: Any = (
        datasets.load_from_disk(str(place.parent))
        if from_disk
        else datasets.Dataset.from_parquet(str(place))
    )
    return list(table)


def _find_files(name: str, split: str) -> Sequence[Path | None]:
    if name.endswith(SUFFIXES):
        return [existing_path(name)]
    files = [existing_path(f"{name}/{split}{suffix}") for suffix in SUFFIXES]
    return [*files, existing_path(f"{name}/{split}/{SAVED}"), existing_path(f"{name}/{SAVED}")]


def _read_lines(path: Path) -> Rows:
    """Return the rows in a file of JSON lines, or in a JSON list."""
    try:
        text = path.read_text(encoding="utf-8")
        data = (
            json.loads(text)
            if text.lstrip().startswith("[")
            else [json.loads(line) for line in text.splitlines() if line.strip()]
        )
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise SourceError(
            f"{path}: the file has no JSON lines ({error}); write one object in each line"
        ) from None
    wrong = next((number for number, row in enumerate(data, 1) if not isinstance(row, dict)), None)
    if wrong is not None:
        raise SourceError(f"{path}: row {wrong} is not an object; write one object in each line")
    table: Rows = data
    return table


def column(row: dict[str, Any], name: str, where: str) -> Any:
    """Return the value of a column in a row. Raises `SourceError` with the names of the existing
    columns if the column is missing.
    """
    if name not in row:
        raise SourceError(
            f"{where}: a row has the columns {', '.join(row)}, expected {name} among them"
        )
    return row[name]
