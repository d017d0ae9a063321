"""Releases of transformers. Transformers 5 changed the names of some keys, and every release here
reads both old and new names.
"""

from __future__ import annotations

KNOWN: tuple[str, ...] = ("4.57.6", "5.0.0", "5.12.1", "5.23.0")
"""Oldest first."""
GROUPED = "5.0.0"
"""First release that writes `rope_parameters` in place of `rope_theta` and `rope_scaling`
(modeling_rope_utils.py).
"""
