"""Limits that no real config reaches. Within them a command needs at most ten seconds of processor
time and one GiB of memory.
"""

from __future__ import annotations

FILE = 16 * 2**20
"""Size in bytes of the largest file that is read."""
TEXT = 2**19
"""Most characters in a config, whatever its format."""
SIDECAR = 8 * TEXT
"""Most characters in a sidecar, which holds the text of a config, the values of its settings and
the meaning of these values.
"""
VALUES = 20_000
"""Most values in a config, with YAML aliases expanded; also most words of a command line."""
DEPTH = 100
"""Largest depth of nested mappings and lists in a config."""
SETTINGS = 300
"""Most settings of a section that are checked one by one."""
NAME = 200
"""Most characters of a key for which a similar name is searched, of a YAML tag, and of the name of
a release.
"""
INTEGER = 2**63 - 1
"""The largest absolute value of a whole number, because torch's integers have 64 bits."""
PROBLEMS = 200
"""Most problems of one file that are listed."""
LAYERS = 20_000
"""Most layers of a model, and most entries of a list with one entry for each layer."""
RANKS = 2**20
"""Most ranks of a run."""
FILES = 16_384
"""Most ranks that a checkpoint is written for. Each rank has its own files, so more ranks would
need too many files.
"""
COUNT = 2**31
"""Largest number of sequences or microbatches, and largest size of a model's dimension."""
ACTIONS = 200_000
"""Most forward and backward passes in a step, summed over all stages and microbatches."""
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
"""Processor seconds after which a command that reads a config gives up. Starting and ending the
command takes less than two more seconds.
"""
MEMORY = 2**30
"""Most bytes of memory that a command that reads a config may use."""
BYTES_A_SECOND, FILES, COPIES = 2**24, 100, 4
"""By how much these two grow for a checkpoint: one processor second for so many bytes or so many
files that are read, and so many times the bytes of these files.
"""
