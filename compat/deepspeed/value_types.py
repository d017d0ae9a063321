"""Types of the values of DeepSpeed's keys, and the names of these types in messages."""

from __future__ import annotations

from bridge.plan.values import Leaves
from compat.deepspeed.schema import DeepSpeed

LEAVES = Leaves(DeepSpeed)
typed, expected = LEAVES.as_typed, LEAVES.describe_values
