"""Unknown settings that may change numbers, because the name or a value of the setting is about
parallelism, batch or precision.
"""

from __future__ import annotations

import re

from bridge.rules import Effect

NAMES = (
    *(
        "tp",
        "pp",
        "dp",
        "cp",
        "ep",
        "sp",
        "etp",
        "vp",
        "vpp",
        "fsdp",
        "fsdp2",
        "zero",
        "world",
        "ranks?",
        "gpus?",
        "nodes?",
    ),
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
PARTS = (
    "parallel",
    "tensor(?!board)",
    "pipeline",
    "batch",
    "precision",
    "dtype",
    "quantiz",
    "loss[-_]?scal",
)
TOUCHING = re.compile(
    f"(?:^|[-_=.:])(?:{'|'.join(NAMES)})(?:$|[-_=.:])|{'|'.join(PARTS)}", re.IGNORECASE
)
"""Pattern of names and values that are about parallelism, batch or precision: whole words from
`NAMES`, and substrings from `PARTS`.
"""


def touches(*words: str) -> bool:
    """Return whether one of `words`, the name and the values of a setting, is about parallelism,
    batch or precision.
    """
    # A path may contain any of these words by chance.
    return any(TOUCHING.search(word.lstrip("-")) for word in words if "/" not in word)


def effect(*words: str) -> Effect:
    """Return the possible effect of leaving out a setting; `words` are its name and its values."""
    return Effect.NUMBERS if touches(*words) else Effect.NONE
