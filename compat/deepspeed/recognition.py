"""Recognises configs of DeepSpeed, and scripts that start a run with one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bridge.files import Script
from compat.deepspeed import lookalike_files, scripts
from compat.deepspeed.releases import KEYS

MOST_OTHERS = 4
"""Largest number of keys of a config for each key that DeepSpeed reads."""


def score(data: Any) -> int:
    """Return the number of top-level keys in a config that DeepSpeed reads; a section counts only
    if DeepSpeed reads a key in it. For a launch script return 1 if one of its commands gets a
    DeepSpeed config, else 0.
    """
    if isinstance(data, Script):
        return int(any(scripts.is_launch(launch, data) for launch in data.launches))
    if not isinstance(data, Mapping):
        return 0
    own: dict[str, set[str]] = {}
    for path in KEYS:
        top, _, inner = path.partition(".")
        own.setdefault(top, set()).add(inner.partition(".")[0])
    count = sum(_looks_read(key, own[key], value) for key, value in data.items() if key in own)
    # Keys that DeepSpeed does not have speak against it: some of its names are common words.
    return count if MOST_OTHERS * count >= len(data) else 0


def name_lookalike(data: Any) -> str:
    """Return a message if the file is a config of accelerate or of Hugging Face's Trainer, else
    an empty string.
    """
    return (
        scripts.name_other_run(data)
        if isinstance(data, Script)
        else lookalike_files.name_other_file(data)
    )


def _looks_read(key: str, inner: set[str], value: Any) -> bool:
    """Return whether the value of a top-level key looks as DeepSpeed reads it. `inner` are the keys of that section; the
    empty key stands for a key that is no section.
    """
    if "" in inner or key == "zero_optimization":
        return True
    if not isinstance(value, Mapping):
        return False
    read = len(inner & value.keys())
    return not value or read > len(value) - read
