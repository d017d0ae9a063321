"""Whether the tensors of a checkpoint are a whole model, which targets need that are loaded by names: what is
not there would begin anew.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from bridge.checkpoint.hub import Hub, Model
from bridge.checkpoint.parameter_names import (
    Shape,
    Shapes,
    has_all_names,
    neutral_shapes,
    read_names,
)
from bridge.checkpoint.renaming import Recognised, all_namings, shapes_by_name, try_namings
from bridge.errors import SourceError
from bridge.files.shown import show_value

BASES = ("", "model.")
"""What the names of a model have before those of a family: those of a model without an output layer lack
the beginning."""
ENDS = ("embedding.tokens.weight", "head.norm.weight")
"""Neutral parameters that every model has outside its layers."""
PARTS = (
    *(f"attention.{part}.weight" for part in ("query", "key", "value", "out")),
    *(f"norm{number}.weight" for number in (1, 2)),
)
FEED, EXPERTS = ("mlp.up.weight", "mlp.down.weight"), ("mlp.experts.0.up.weight",)
"""Neutral parameters that every layer has, and those of a layer without and with experts."""
ADAPTED = re.compile(r"\.(?:lora_[A-Z]|lora_embedding_[A-Z]|base_layer)(?:\.|$)")
"""Names of adapters that are not merged into the weights (peft/tuners/lora/layer.py)."""
DEEPEST = 4
"""Most parts of a prefix that models are looked for under, and one more."""
MOST = 20
"""Most prefixes under which models are looked for."""


@dataclass(frozen=True)
class NeutralModel:
    """The shapes of the neutral parameters in a checkpoint, for each the name under which the checkpoint has
    it, and whether all its names are those of one family. Empty if no family fits.
    """

    shapes: Mapping[str, Shape] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    alone: bool = True


def neutral_model(hub: Hub, family: str | None = None) -> NeutralModel:
    """Return the neutral parameters in a checkpoint. Names that the tables of families do not have, such as those
    of a further head, are left out if a config states the `family`.
    """
    shapes: Shapes = shapes_by_name(hub)
    recognition, base = try_namings(hub), ""
    alone = recognition is not None
    if recognition is None and family is not None:
        recognition, base, shapes = _nearest_family(shapes)
    if recognition is None:
        return NeutralModel(alone=False)
    try:
        # All rows of queries, keys and values together are as many with any number of groups.
        pieces = read_names(recognition.naming, recognition.table, shapes, Model(kv_heads=1))
        found = neutral_shapes(pieces)
    except SourceError:
        # Shapes that no model of the family has: renaming refuses them, and other formats keep them.
        return NeutralModel(alone=alone)
    names = {
        block.name: theirs.name.removeprefix(base) for theirs in pieces for block in theirs.blocks
    }
    return NeutralModel(found, names, alone)


def _nearest_family(shapes: Shapes) -> tuple[Recognised | None, str, Shapes]:
    """Return the family that has most of these names, what it has before them, and the shapes of those that
    it has.
    """
    best: tuple[Recognised | None, str, Shapes] = (None, "", {})
    kinds_by_name = {name: re.sub(r"(?<![^.])\d+(?![^.])", "0", name) for name in shapes}
    kinds = set(kinds_by_name.values())
    for base in BASES:
        for naming in all_namings().values():
            for table in naming.tables():
                # Names that differ in numbers alone have one row.
                fits = {kind: has_all_names(table, {base + kind: ()}) for kind in kinds}
                known = {
                    base + name: shape
                    for name, shape in shapes.items()
                    if fits[kinds_by_name[name]]
                }
                if len(known) > len(best[2]):
                    best = Recognised(naming, table), base, known
    return best


def refuse_parts(hub: Hub, facts: Model) -> None:
    """Raise `SourceError` if the tensors of a checkpoint are not a whole model of the family in `facts`, with
    what to do.
    """
    model = neutral_model(hub, facts.family)
    if not model.shapes and model.alone:
        return
    # Only next to other names is the number of layers that a config states needed to see which are missing.
    gaps = list(_find_gaps(model, 0 if model.alone else facts.layers or 0))
    if not gaps:
        return
    folder = hub.origin.files[0].parent if hub.origin.files else hub.origin.format
    rest = f", and {len(gaps) - 1} more such faults" if len(gaps) > 1 else ""
    raise SourceError(f"{folder}: {gaps[0]}{rest}; {_advice_on_parts(hub, facts)}")


def _advice_on_parts(hub: Hub, facts: Model) -> str:
    names = [*hub.parameters, *hub.ties]
    if any(ADAPTED.search(name) for name in names):
        return "merge the adapters into the weights first, as with PEFT's merge_and_unload"
    roots = [show_value(root) for root in _roots_of_models(hub, facts.layers or 0)]
    if roots:
        return f"name the file itself, and the model in it with --root: {' or '.join(roots)}"
    return "name the whole model; formats that keep the checkpoint's own names, such as dcp, take parts"


def _roots_of_models(hub: Hub, layers: int) -> Iterator[str]:
    """Yield the prefixes under which whole models with at least so many layers lie, without their last dots."""
    prefixes = Counter(
        ".".join(name.split(".")[:count])
        for name in hub.parameters
        for count in range(1, min(DEEPEST, name.count(".")))
    )
    for root in sorted(root for root, _ in prefixes.most_common(MOST)):
        own = {
            name.removeprefix(f"{root}."): held
            for name, held in hub.parameters.items()
            if name.startswith(f"{root}.")
        }
        model = neutral_model(Hub(hub.origin, own))
        if model.shapes and not any(_find_gaps(model, layers)):
            yield root


def _find_gaps(model: NeutralModel, layers: int) -> Iterator[str]:
    """Yield a message for each parameter that a whole model with at least so many layers has and this one
    lacks, and for each whose shape differs from that in another layer.
    """
    by_layer: dict[int, dict[str, Shape]] = {}
    for name, shape in model.shapes.items():
        if match := re.match(r"block(\d+)\.(.+)", name):
            by_layer.setdefault(int(match[1]), {})[match[2]] = shape
    yield from (f"found no tensor for {name}" for name in ENDS if name not in model.shapes)
    count = max(layers, *(number + 1 for number in by_layer), 1)
    # Layers with experts and without differ in what they feed forward.
    sparse = {number for number, own in by_layer.items() if "mlp.router.weight" in own}
    usual: dict[tuple[bool | None, str], tuple[int, Shape]] = {}
    for number, own in by_layer.items():
        for part, shape in own.items():
            kind = number in sparse if part.startswith("mlp.") else None
            usual.setdefault((kind, part), (number, shape))
    for number in range(count):
        own, kind = by_layer.get(number, {}), number in sparse
        for part in (*PARTS, *(EXPERTS if kind else FEED)):
            if part not in own and not {(None, part), (kind, part)} & usual.keys():
                yield f"found no tensor for block{number}.{part}"
        for (own_kind, part), (other, shape) in usual.items():
            if own_kind not in (None, kind) or (own_kind is not None and not own):
                continue
            name = model.names[f"block{other}.{part}"]
            if part not in own:
                here = re.sub(rf"(?<=\.){other}(?=\.)", str(number), name, count=1)
                yield f"found no {show_value(here)}, but {show_value(name)}"
            elif own[part] != shape:
                here = model.names[f"block{number}.{part}"]
                yield f"{show_value(here)}: found shape {own[part]}, but {shape} of {show_value(name)}"
