"""Reads and writes Megatron-Core's checkpoints without Megatron-Core."""

from __future__ import annotations

from bridge.state.formats import Format
from bridge.state.names import Naming
from compat.megatron.state.dist import TorchDist
from compat.megatron.state.names import Engine, Own
from compat.megatron.state.parts import Parts

FORMATS: tuple[Format, ...] = (TorchDist(), Parts())
NAMINGS: tuple[Naming, ...] = (Engine(), Own())
