"""One rank of the proof of a move."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

from bridge.api.access import limit_access
from bridge.api.move import engine_for_format
from bridge.api.move_target import NATIVE, MoveOptions, model_config, translate_config
from bridge.api.read import read_config
from bridge.api.source import Source
from bridge.checkpoint import model_facts
from bridge.engine.environment import detect, end_process
from bridge.engine.interface import Workload
from bridge.engine.joining import join
from bridge.errors import BridgeError
from bridge.files.progress import listening
from bridge.layout.architecture import Architecture
from bridge.stack.checkpoint_side import side_of
from bridge.translation.edit import without
from bridge.translation.lift import lift
from bridge.verify.local import MARK
from bridge.verify.proof import Party, prove, small
from bridge.verify.rank_engines import load_engines
from bridge.verify.size import NO_NUMBERS

SEQUENCE = 32
"""Largest number of tokens of one sample in a proof."""


def main(text: str) -> None:
    """Prove a move on one rank. The first rank prints progress and result."""
    spec, rank, out = json.loads(text), detect(), sys.stdout

    def tell(**words: Any) -> None:
        if rank.rank == 0:
            print(MARK + json.dumps(words, allow_nan=False), file=out, flush=True)

    with redirect_stdout(sys.stderr):
        with listening(lambda done, total: tell(at=[done, total])):
            found = _on_rank(spec, lambda line: tell(note=line))
        tell(found=found)
    end_process(rank.world)


def warm(text: str) -> None:
    """Load the engines before ranks are forked."""
    spec = json.loads(text)
    load_engines(
        {
            name
            for name in (spec["options"]["to"], spec["run"]["dialect"])
            if name and name != NATIVE
        }
    )


def _on_rank(spec: Mapping[str, Any], note: Any) -> dict[str, Any]:
    here, run = detect(), Source(**spec["run"])
    join(here)
    options = MoveOptions(
        **{
            **spec["options"],
            **{name: Path(spec["options"][name]) for name in ("checkpoint", "output", "model")},
        }
    )
    try:
        with limit_access(run):
            source = read_config(run)
            target = (
                source
                if options.to == NATIVE
                else without(translate_config(run, options).config, spec["edits"])
            )
        folder = Path(spec["model"])
        described = model_config(folder)
        model = lift(described).model
        found, changed = {}, dict[str, Any]()
        for side, config in {"source": source, "target": target}.items():
            format = spec["formats"][side]
            backend = engine_for_format(config, format).following(config)
            smaller, differs = small(config, backend, spec["world"], model.layers)
            smaller = without(smaller, dict(side_of(config.dialect).loads.get(format, {})))
            changed |= differs
            found[side] = Party(
                side, smaller, backend, Path(spec["starts"][side]), tuple(spec["groups"][side])
            )
        wider = _widen_source(found["source"], spec)
        shape = json.loads((folder / "config.json").read_text())
        # A learned embedding of positions has no row beyond these.
        most = next(
            (shape[name] for name in POSITIONS if isinstance(shape.get(name), int)), SEQUENCE
        )
        workload = Workload(
            Architecture(vocab=shape["vocab_size"], sequence=min(SEQUENCE, most)),
            model=model,
            folder=folder,
        )
        facts = model_facts.describe_config(described)
        proved = prove(
            found["source"], found["target"], wider, workload, facts, options.prove or 1, note
        )
        told = {
            path: pair
            for path, pair in changed.items()
            if not path.startswith((*NO_NUMBERS, "parallel.data", "model."))
        }
        words = [f"{path} {before} -> {after}" for path, (before, after) in told.items()]
        return {
            **proved,
            "changed": [f"changed for the proof: {', '.join(words)}"] if words else [],
        }
    except BridgeError as error:
        return {"problems": list(error.problems)}


POSITIONS = ("max_position_embeddings", "n_positions")


def _widen_source(source: Any, spec: Mapping[str, Any]) -> Any:
    """Return the source side with computation in fp32, from the same master weights; None if the
    source computes in fp32 already, or if the stack of the source cannot.
    """
    if "wider" not in spec["starts"]:
        return None
    try:
        config = source.backend.edit_config(
            source.config, {"precision.compute": "fp32"}, spec["world"]
        )
    except BridgeError:
        return None
    return replace(
        source, side="source in fp32", config=config, start=Path(spec["starts"]["wider"])
    )


if __name__ == "__main__":
    main(sys.argv[1])
