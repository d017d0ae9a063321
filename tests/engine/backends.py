"""Runs on backends, as functions that ranks run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import compat
from bridge.engine.data import Text
from bridge.engine.interface import Backend, Workload
from bridge.engine.native import BACKEND as NATIVE
from bridge.layout.architecture import Architecture
from bridge.plan.plan import Plan
from bridge.translation.edit import without
from bridge.translation.lift import lower
from bridge.translation.translate import translate
from bridge.verify.judge import Report, verify
from bridge.verify.measure import Distance, EngineRun, batches, distance, measure
from bridge.verify.pair import fit_pair

SHAPE = Architecture(
    layers=2, hidden=32, heads=4, kv_heads=4, ffn=64, sequence=16, tied=False, bias=False
)


def against_native(
    rank: int, world: int, name: str, values: dict[str, Any], padded: bool = False
) -> Distance:
    """How far a stack's own engine is from the native one on the same plan."""
    plan = Plan.of(values)
    workload = Workload(replace(SHAPE, tied=bool(plan.model.tied)))
    return distance(
        *(
            measure(EngineRun(backend, plan), workload, padded=padded)
            for backend in (compat.backends()[name], NATIVE)
        )
    )


def held(
    rank: int, world: int, name: str, values: dict[str, Any], settings: dict[str, Any]
) -> dict[str, int]:
    """Bytes by kind after two steps of a plan; `settings` are added to the config that a stack gets for it."""
    plan, text = Plan.of(values), Text.of(None, SHAPE.sequence)
    backend = {**compat.backends(), NATIVE.name: NATIVE}[name]
    run = (
        plan
        if backend is NATIVE
        else without(lower(plan, compat.load(name), backend.release, world), settings)
    )
    trainer = backend.open(run, Workload(SHAPE))
    for step in range(2):
        trainer.train_batch(batches(text, trainer, step))
    trainer.close()
    return dict(trainer.bytes())


def verified(
    rank: int, world: int, source: tuple[str, Any, dict[str, Any]], to: str, steps: int | None
) -> Report:
    """What `verify` finds for a source (dialect, content, and what its `read` takes besides), without the tensors."""
    name, content, said = source
    config = compat.load(name).read(content, **said)
    backends = compat.backends()
    result = translate(config, compat.load(to), _release(backends, to), config.world_size)
    report = verify(
        fit_pair(config, result, backends, world), backends, steps, note=lambda line: None
    )
    return replace(report, rows=tuple(replace(row, measured=None) for row in report.rows))


def planted(rank: int, world: int, text: str, ending: str, old: str, new: str) -> Report:
    """The same for flags of Megatron, with a fault in one of the files that lie beside DeepSpeed's."""
    config = compat.load("megatron").read(text, version="0.16.1", world_size=world)
    backends = compat.backends("deepspeed")
    pair = fit_pair(
        config,
        translate(config, compat.load("deepspeed"), _release(backends, "deepspeed"), world),
        backends,
        world,
    )
    assert pair.script is not None and pair.script.beside[ending].count(old) == 1, pair.script
    texts = {**pair.script.beside, ending: pair.script.beside[ending].replace(old, new)}
    vars(pair)["script"] = replace(pair.script, beside=texts)
    report = verify(pair, backends, None, note=lambda line: None)
    return replace(report, rows=tuple(replace(row, measured=None) for row in report.rows))


def _release(backends: Mapping[str, Backend], name: str) -> str | None:
    return backends[name].release if name in backends else None
