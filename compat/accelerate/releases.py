"""Releases of accelerate whose launcher and plugins are known."""

from __future__ import annotations

from compat.accelerate.slots import facts

KNOWN: tuple[str, ...] = (facts()["release"],)
"""Oldest first."""
