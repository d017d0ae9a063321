"""What Megatron's arguments mean, in a line each."""

from __future__ import annotations

DESCRIPTIONS: dict[str, str] = {}
