"""Reads and writes Megatron-Core's checkpoints without Megatron-Core."""

from __future__ import annotations

from bridge.checkpoint.interface import Format
from bridge.checkpoint.parameter_names import Naming
from compat.megatron.checkpoints.dist import TorchDist
from compat.megatron.checkpoints.names import Engine, Own
from compat.megatron.checkpoints.parts import Parts

FORMATS: tuple[Format, ...] = (TorchDist(), Parts())
NAMINGS: tuple[Naming, ...] = (Engine(), Own())
