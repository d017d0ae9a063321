"""Releases of accelerate whose launcher and plugins are known."""

from __future__ import annotations

from compat.accelerate.slots import releases

KNOWN: tuple[str, ...] = releases()
"""Oldest first."""
