"""Limits: what no config needs. Within them any file is answered in ten seconds of processor time and one GiB of memory."""

from __future__ import annotations

FILE = 16 * 2**20
"""Bytes of a file that is read at all."""
TEXT = 2**19
"""Characters of a config, in whatever format."""
SIDECAR = 8 * TEXT
"""Characters of a sidecar, which holds a config in full and what is known of it."""
VALUES = 20_000
"""Values in a config, aliases opened; words of a command line too."""
DEPTH = 100
"""Levels of nesting."""
SETTINGS = 300
"""Settings of a section that are looked at one by one."""
NAME = 200
"""Characters of a key that a message looks for a similar name for, of a YAML tag, and of the name of a release."""
INTEGER = 2**63 - 1
"""The largest whole number, either sign: what 64 bits hold, as in torch."""
PROBLEMS = 200
"""Problems of one file that are spelled out; more are counted."""
LAYERS = 20_000
"""Layers of a model, and of a list that says something of each."""
RANKS = 2**20
"""Ranks of a run."""
FILES = 16_384
"""Ranks that a checkpoint is written for, each with files of its own."""
COUNT = 2**31
"""Sequences, microbatches and sizes of a model."""
ACTIONS = 200_000
"""Forward and backward passes of all stages and microbatches in a step."""
PLAN = {
    "model.layers": LAYERS,
    **dict.fromkeys((f"parallel.{axis}" for axis in ("data", "tensor", "pipeline", "context", "expert")), RANKS),
    **dict.fromkeys(("schedule.virtual", "schedule.group", "schedule.depth_first", "schedule.breadth_first"), COUNT),
    **dict.fromkeys(("batch.micro", "batch.accumulation", "batch.global_"), COUNT),
    **dict.fromkeys((f"model.{size}" for size in ("hidden", "heads", "kv_heads", "ffn", "vocab", "sequence")), COUNT),
}
"""The most that fields of a plan may count."""
SECONDS = 8.0
"""Processor time of the work of a command that reads a config, after which it gives up; with start and end it is below ten."""
MEMORY = 2**30
"""Bytes of memory of such a command."""
