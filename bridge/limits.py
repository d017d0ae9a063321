"""Limits that no real config reaches. Within them a command needs at most ten seconds of processor
time and one GiB of memory.
"""

from __future__ import annotations

FILE = 16 * 2**20
"""Bytes of the largest file that is read."""
TEXT = 2**19
"""Characters of a config, in whatever format."""
SIDECAR = 8 * TEXT
"""Characters of a sidecar, which holds the text of a config, its values and their meaning."""
VALUES = 20_000
"""Values in a config, with YAML aliases expanded; also words of a command line."""
DEPTH = 100
"""Levels of nesting."""
SETTINGS = 300
"""Settings of a section that are checked one by one."""
NAME = 200
"""Characters of a key for which a similar name is searched, of a YAML tag, and of the name of a
release.
"""
INTEGER = 2**63 - 1
"""The largest whole number of either sign: torch's integers have 64 bits."""
PROBLEMS = 200
"""Problems of one file that are listed."""
LAYERS = 20_000
"""Layers of a model, and entries of a list with one for each layer."""
RANKS = 2**20
"""Ranks of a run."""
FILES = 16_384
"""Ranks that a checkpoint is written for: each has files of its own."""
COUNT = 2**31
"""Sequences, microbatches and sizes of a model."""
ACTIONS = 200_000
"""Forward and backward passes of all stages and microbatches in a step."""
PLAN = {
    "model.layers": LAYERS,
    **dict.fromkeys(
        (f"parallel.{axis}" for axis in ("data", "tensor", "pipeline", "context", "expert")), RANKS
    ),
    **dict.fromkeys(
        ("schedule.virtual", "schedule.group", "schedule.depth_first", "schedule.breadth_first"),
        COUNT,
    ),
    **dict.fromkeys(("batch.micro", "batch.accumulation", "batch.global_"), COUNT),
    **dict.fromkeys(
        (f"model.{size}" for size in ("hidden", "heads", "kv_heads", "ffn", "vocab", "sequence")),
        COUNT,
    ),
}
"""The largest values of plan fields that count something."""
SECONDS = 8.0
"""Processor seconds after which a command that reads a config gives up. Its start and end take less
than two more.
"""
MEMORY = 2**30
"""Bytes of memory that such a command may use."""
