"""What `deepspeed.ops` says of DeepSpeed's own operators, of which the engine builds none."""

from __future__ import annotations

from collections import defaultdict

__all__ = ["__compatible_ops__"]

# A script may set an entry, as it does with DeepSpeed, and read it again.
__compatible_ops__: defaultdict[str, bool] = defaultdict(bool)
