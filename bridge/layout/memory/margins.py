"""Margins: what a device needs beyond the bytes that an allocator counts as allocated."""

from bridge.stack.memory_rules import MIB

RESERVED = 1.06
"""Reserved over allocated memory: what an allocator holds beyond what is in use, as fragments. It is
1.028 to 1.093 where both are published (SimuMax on B200).
"""
CONTEXT = 1200 * MIB
"""Bytes of a CUDA context with the kernels of torch and the buffers of NCCL, of which no allocator
knows.
"""
