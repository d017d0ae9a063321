"""Reads and writes Megatron-Core's checkpoints without Megatron-Core."""

from __future__ import annotations

from bridge.checkpoint.interface import Format
from bridge.checkpoint.parameter_names import Naming
from compat.megatron.checkpoint.dist import TorchDist
from compat.megatron.checkpoint.names import Engine, Own
from compat.megatron.checkpoint.parts import Parts

FORMATS: tuple[Format, ...] = (TorchDist(), Parts())
NAMINGS: tuple[Naming, ...] = (Engine(), Own())
