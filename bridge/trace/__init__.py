"""Trace: what happens inside a run, layer by layer, and whether ranks that should agree do."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from bridge.plan import Debug

if TYPE_CHECKING:
    from bridge.trace.source import Source
    from bridge.trace.tracer import Filter, Tracer


def attach(source: Source, debug: Debug, run: str | Path, filter: Filter | None = None, full: bool = False) -> Tracer:
    """Log what `debug` asks for of `source` into the folder `run`; see `Tracer`."""
    from bridge.trace.log import Log
    from bridge.trace.tracer import Filter, Tracer

    log = Log(Path(run), source.rank, {**source.about(), "layers": list(source.layers)}, full)
    return Tracer(source, debug, log, filter or Filter()).install()
