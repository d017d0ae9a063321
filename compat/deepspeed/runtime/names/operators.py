"""The mapping `deepspeed.ops.__compatible_ops__`, which says for each of DeepSpeed's own operators
whether it can be built. The native engine builds none.
"""

from __future__ import annotations

from collections import defaultdict

__all__ = ["__compatible_ops__"]

# A script may set an entry, as it does with DeepSpeed, and read it again.
__compatible_ops__: defaultdict[str, bool] = defaultdict(bool)
