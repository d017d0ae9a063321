"""Runs on backends, as functions that ranks run."""

from __future__ import annotations

from typing import Any

import compat
from bridge.backend import Workload
from bridge.engine.backend import BACKEND as NATIVE
from bridge.layout.architecture import Architecture
from bridge.plan import Plan
from bridge.verify.measure import Distance, Run, distance, measure

SHAPE = Architecture(layers=2, hidden=32, heads=4, kv_heads=4, ffn=64, sequence=16, tied=False, bias=False)


def against_native(rank: int, world: int, name: str, values: dict[str, Any], tied: bool = False) -> Distance:
    """How far a stack's own engine is from the native one on the same plan."""
    plan, workload = Plan.of(values), Workload(Architecture(**{**{n: getattr(SHAPE, n) for n in SHAPE.__slots__}, "tied": tied}))
    theirs = measure(Run(compat.backends()[name], plan), workload)
    ours = measure(Run(NATIVE, plan), workload)
    if rank == 0:
        print([(s.loss, s.grad_norm, s.lr, s.updated) for s in theirs.steps])
        print([(s.loss, s.grad_norm, s.lr, s.updated) for s in ours.steps])
    return distance(theirs, ours)
