"""Which settings that nobody knows count all the same: those whose name or value speaks of parallelism, batch or precision."""

from __future__ import annotations

import re

from bridge.rules import Effect

NAMES = (
    *("tp", "pp", "dp", "cp", "ep", "sp", "etp", "vp", "vpp", "fsdp", "fsdp2", "zero", "world", "ranks?", "gpus?", "nodes?"),
    *(
        "stages?",
        "shards?",
        "sharded",
        "bs",
        "mbs",
        "gbs",
        "bsz",
        "accum",
        "accumulation",
        "accumulate",
        "amp",
        "half",
        "int8",
        "int4",
    ),
    *("nvfp4", "mxfp8", "(?:bf|fp|tf|float|bfloat)(?:4|8|16|32|64)"),
)
PARTS = ("parallel", "tensor(?!board)", "pipeline", "batch", "precision", "dtype", "quantiz", "loss[-_]?scal")
TOUCHING = re.compile(f"(?:^|[-_=.:])(?:{'|'.join(NAMES)})(?:$|[-_=.:])|{'|'.join(PARTS)}", re.IGNORECASE)
"""Names and values that speak of parallelism, batch or precision: whole words, and parts of words."""


def touches(*words: str) -> bool:
    """Whether a setting, by its name or its values, touches parallelism, batch or precision; paths are not looked into."""
    return any(TOUCHING.search(word.lstrip("-")) for word in words if "/" not in word)


def effect(*words: str) -> Effect:
    """What leaving out a setting of that name and those values may change."""
    return Effect.NUMBERS if touches(*words) else Effect.NONE
