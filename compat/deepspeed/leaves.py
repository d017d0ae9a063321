"""The values that each key of DeepSpeed takes, and the words for them in messages."""

from __future__ import annotations

from bridge.leaves import Leaves
from compat.deepspeed.schema import DeepSpeed

LEAVES = Leaves(DeepSpeed)
typed, expected = LEAVES.typed, LEAVES.expected
