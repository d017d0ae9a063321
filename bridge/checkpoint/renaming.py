"""Finds the naming that a checkpoint has, and renames its parameters from one naming to another."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from bridge.checkpoint.hub import Hub, Model, Origin, Parameter, ParameterGroup, loss_finding
from bridge.checkpoint.lazy import ElementRun, Joined, Lazy, Turned
from bridge.checkpoint.parameter_names import (
    NEUTRAL,
    Naming,
    Shape,
    Shapes,
    Table,
    Theirs,
    has_all_names,
    ignore_pattern,
    neutral_shapes,
    one_to_one_rows,
    read_names,
    write_names,
)
from bridge.errors import SourceError, nearest
from bridge.files.shown import show_value
from bridge.stack import registry
from bridge.stack.checkpoint_side import namings_of
from bridge.stack.findings import Finding
from bridge.stack.rules import Effect


class Neutral(Naming):
    """The names of parameters in the native engine's models, called neutral. Every other naming is
    translated to and from these.
    """

    name = NEUTRAL
    title = "the native engine"

    def tables(self) -> Sequence[Table]:
        """Return one table with all neutral names, which are collected from the tables of all
        other namings.
        """
        ours = {
            name: name
            for naming in _stack_namings().values()
            for table in naming.tables()
            for row in table.all
            for name in row.ours
        }
        parts = {
            name: [row for row in one_to_one_rows(ours) if name in row.theirs]
            for name in ("block", "head.")
        }
        first = [
            row
            for row in one_to_one_rows(ours)
            if row not in parts["block"] and row not in parts["head."]
        ]
        return (Table("neutral model", tuple(first), tuple(parts["block"]), tuple(parts["head."])),)

    def table_for_shapes(self, shapes: Shapes, facts: Model) -> Table:
        """Every model."""
        return self.tables()[0]


def all_namings() -> Mapping[str, Naming]:
    """Return all namings by name."""
    return {**_stack_namings(), NEUTRAL: Neutral()}


def _stack_namings() -> dict[str, Naming]:
    return {
        naming.name: naming for name in registry.OWN for naming in namings_of(registry.load(name))
    }


def naming_of_name(name: str) -> Naming:
    """Return the naming `name`. If there is none, raise a `SourceError` that suggests a similar
    name.
    """
    namings = all_namings()
    if name not in namings:
        raise SourceError(
            f"--names: found {name}, expected one of {', '.join(namings)}{nearest(name, namings)}"
        )
    return namings[name]


@dataclass(frozen=True)
class Recognised:
    """The naming of a checkpoint, and the table of the family that has all names in the
    checkpoint.
    """

    naming: Naming
    table: Table


def try_namings(hub: Hub) -> Recognised | None:
    """Return the naming and the family that have all names in a checkpoint; None if there are
    none.
    """
    shapes = shapes_by_name(hub)
    families = ((naming, naming.family(shapes)) for naming in all_namings().values())
    return next(
        (Recognised(naming, table) for naming, table in families if table is not None), None
    )


def prefix_of_model(hub: Hub) -> str:
    """Return the prefix without which a family of models has all names in a checkpoint, such as the
    attribute of a module that holds the model; empty if there is none.
    """
    shapes = shapes_by_name(hub)
    first = next(iter(shapes), "").split(".")
    for count in range(min(len(first), DEEPEST)):
        prefix = "".join(f"{part}." for part in first[:count])
        if not all(name.startswith(prefix) for name in shapes):
            break
        bare = {name.removeprefix(prefix): shape for name, shape in shapes.items()}
        if any(naming.family(bare) for naming in all_namings().values()):
            return prefix
    return ""


DEEPEST = 4
"""Most parts of a prefix of all names of a model, and one more."""


def module_order(model: Mapping[str, Lazy]) -> list[str] | None:
    """Return the names of a model's parameters in the order of its modules; None if no family of
    models has these names.
    """
    hub = Hub(Origin(""), {name: Parameter(tensor) for name, tensor in model.items()})
    prefix, facts = prefix_of_model(hub), Model(kv_heads=1)
    bare = {
        name.removeprefix(prefix): tensor
        for name, tensor in hub.parameters.items()
        if tensor.weight.shape
    }
    recognition = try_namings(replace(hub, parameters=bare))
    if recognition is None:
        return None
    try:
        pieces = read_names(
            recognition.naming,
            recognition.table,
            {name: tensor.weight.shape for name, tensor in bare.items()},
            facts,
        )
        parameters = write_names(recognition.table, neutral_shapes(pieces), facts)
    except SourceError:
        return None
    # A table may have several names for one parameter, of which it writes the first.
    order = [prefix + theirs.name for theirs in parameters]
    return order if model.keys() >= set(order) else None


def recognise_names(hub: Hub) -> Recognised:
    """Return the naming and the family that have all names in a checkpoint. If there are none,
    raise a `SourceError` with a name that the nearest family does not have.
    """
    recognition, shapes = try_namings(hub), shapes_by_name(hub)
    if recognition is not None:
        return recognition
    # The family that knows most of the names: what it lacks is most likely what is odd about this
    # model.
    closest = max(
        ((naming, table) for naming in all_namings().values() for table in naming.tables()),
        key=lambda pair: sum(
            has_all_names(pair[1], {name: shape}) for name, shape in shapes.items()
        ),
    )
    odd = [name for name, shape in shapes.items() if not has_all_names(closest[1], {name: shape})]
    rest = len(odd) - 1
    more = f" and {rest} more" if rest else ""
    raise SourceError(
        f"{show_value(odd[0])}{more}: no known family of models has parameters of this name (the nearest family is "
        f"{closest[1].family}); keep the checkpoint's own names"
    )


WRAPPERS = re.compile(
    r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
)
"""Modules that torch puts around others: of torch.compile, FSDP and activation checkpointing."""


def unwrap_names(hub: Hub) -> Hub:
    """Return the checkpoint without the names of modules that wrap the model or parts of it, as no
    model that is loaded by name has these, and a finding. DDP's `module.` is one if all names begin
    with it, and so is every prefix without which a family of models has all names.
    """
    names = [*hub.parameters, *hub.ties, *hub.buffers]
    top = prefix_of_model(hub)
    if not top and all(name.startswith("module.") for name in names):
        top = "module."
    bare = {name: WRAPPERS.sub("", name.removeprefix(top)) for name in names}
    renames = [name for name in names if bare[name] != name]
    if not renames or len(set(bare.values())) < len(names):
        return hub
    message = f"{len(renames)} names lose what wrapped the model, such as {renames[0]}: {bare[renames[0]]}"
    return replace(
        hub,
        parameters={bare[name]: value for name, value in hub.parameters.items()},
        buffers={bare[name]: value for name, value in hub.buffers.items()},
        ties={bare[alias]: bare[name] for alias, name in hub.ties.items()},
        groups=tuple(
            replace(group, names=tuple(bare[name] for name in group.names)) for group in hub.groups
        ),
        findings=(*hub.findings, loss_finding("names", message, Effect.NONE)),
    )


def naming_that_fits(hub: Hub, target_name: str | None, usual: str | None, model: Model) -> Hub:
    """Return the checkpoint with its parameters renamed to the naming `target_name`. If `target_name` is
    None, rename them to `usual`, the naming that the format's readers expect, but only if the
    present names belong to another stack. Raises `SourceError` if they cannot be renamed.
    """
    if target_name is None and usual is None:
        return hub
    target = naming_of_name(target_name or usual or "")
    if target_name is None:
        known_as = try_namings(hub)
        if known_as is None or known_as.naming.stack in ("", target.stack):
            return hub
    return rename_parameters(hub, target, model)


def shapes_by_name(hub: Hub) -> dict[str, Shape]:
    """Return the shape of each parameter, tied names included."""
    ties = {alias: hub.parameters[name].weight.shape for alias, name in hub.ties.items()}
    return {**{name: parameter.weight.shape for name, parameter in hub.parameters.items()}, **ties}


def rename_parameters(hub: Hub, target: Naming, facts: Model) -> Hub:
    """Return the checkpoint with its parameters renamed to the naming `target`. Weights, masters
    and moments are stacked and transposed as this naming requires. Raises `SourceError` if the
    names are unknown, or if parameters that the optimizer treats differently would be joined.
    """
    source = recognise_names(hub)
    SourceError.raise_if(
        f"{line}; its parameters cannot be renamed, so keep the checkpoint's own names"
        for line in facts.refused
    )
    apart = facts.tied is False and hub.ties
    if apart and not hub.moments:
        # The model has two parameters, which one storage holds while they are equal.
        twins = {alias: hub.parameters[name] for alias, name in hub.ties.items()}
        hub = replace(hub, parameters={**hub.parameters, **twins}, ties={})
    shapes = shapes_by_name(hub)
    ignorable = [name for name in shapes if ignore_pattern(source.table).fullmatch(name)]
    pieces = read_names(source.naming, source.table, shapes, facts)
    sizes = neutral_shapes(pieces)
    places = {block.name: theirs for theirs in pieces for block in theirs.blocks}
    aliases = {name for name, theirs in places.items() if theirs.name in hub.ties}
    table = target.table_for_shapes(sizes, facts)
    pieces_to_write = write_names(table, sizes, facts)
    # A tied parameter is laid out once. Its other name comes back as a tie, if the target keeps
    # both.
    neutral = {
        name: _neutral_parameter(name, sizes[name], places[name], hub)
        for name in sizes
        if name not in aliases
    }
    own = [
        theirs
        for theirs in pieces_to_write
        if not {block.name for block in theirs.blocks} & aliases
    ]
    parameters = {theirs.name: _join_parameter(theirs, neutral) for theirs in own}
    return replace(
        hub,
        parameters=parameters,
        ties=dict(_rename_ties(hub, pieces_to_write, places, table, parameters)),
        buffers={},
        ordered=True,
        groups=tuple(_rename_groups(hub, own, places)),
        findings=(
            *hub.findings,
            *_find_ignored_tensors(hub, ignorable),
            *_find_padding(pieces),
            *_find_untied(hub.ties if apart else {}),
        ),
    )


def _neutral_parameter(name: str, shape: Shape, theirs: Theirs, hub: Hub) -> Parameter:
    """Return the neutral parameter `name`, cut out of the family's parameter that contains it."""
    parameter = hub.parameters[theirs.name]

    def take_rows(source: Lazy) -> Lazy:
        straight = Turned(source) if theirs.turned else source
        runs, at = [], 0
        for block in theirs.blocks:
            size = (block.last - block.first) * theirs.width
            if block.name == name:
                runs.append(ElementRun(straight, at, at + size))
            at += size
        return _tensor_of_runs(runs, shape, source.dtype)

    return replace(
        parameter,
        weight=take_rows(parameter.weight),
        master=parameter.master and take_rows(parameter.master),
        moments={kind: take_rows(moment) for kind, moment in parameter.moments.items()},
    )


def _tensor_of_runs(runs: Sequence[ElementRun], shape: Shape, dtype: str) -> Lazy:
    """Return one tensor that consists of these runs. If there is only one run, and it covers a
    whole tensor of this shape, return that tensor itself.
    """
    if len(runs) == 1 and len(runs[0]) == runs[0].source.count and runs[0].source.shape == shape:
        return runs[0].source
    return Joined(tuple(runs), shape, dtype)


def _join_parameter(theirs: Theirs, neutral: Mapping[str, Parameter]) -> Parameter:
    """Return a family's parameter, joined from neutral parameters. Raises `SourceError` if the
    optimizer treats these differently.
    """
    parts = {block.name: neutral[block.name] for block in theirs.blocks}
    first = next(iter(parts.values()))
    for name, other in parts.items():
        same = (set(other.moments), other.step, other.trained, other.weight.dtype)
        if same != (set(first.moments), first.step, first.trained, first.weight.dtype):
            raise SourceError(
                f"{theirs.name}: this parameter would be joined from {', '.join(parts)}, but {name} is trained"
                " differently from the first of them; keep the checkpoint's own names"
            )
    flat = (theirs.shape[1], theirs.shape[0]) if theirs.turned else theirs.shape

    def put(kind: Callable[[Parameter], Lazy]) -> Lazy:
        runs = []
        for block in theirs.blocks:
            source = kind(parts[block.name])
            width = prod(source.shape[1:])
            runs.append(ElementRun(source, block.first * width, block.last * width))
        tensor = _tensor_of_runs(runs, flat, runs[0].source.dtype)
        return Turned(tensor) if theirs.turned else tensor

    # A parameter without a master is its own: the others' masters need a counterpart in the same
    # format.
    masters = any(other.master is not None for other in parts.values())
    return replace(
        first,
        weight=put(lambda parameter: parameter.weight),
        master=put(lambda parameter: parameter.best) if masters else None,
        moments={kind: put(_moment_getter(kind)) for kind in first.moments},
    )


def _moment_getter(kind: str) -> Callable[[Parameter], Lazy]:
    return lambda parameter: parameter.moments[kind]


def _rename_ties(
    hub: Hub,
    pieces: Sequence[Theirs],
    places: Mapping[str, Theirs],
    table: Table,
    parameters: Mapping[str, Parameter],
) -> Iterator[tuple[str, str]]:
    """Yield pairs of tied names for the new checkpoint, if the family saves a tied weight under
    two names: the further name, and the name in `parameters`.
    """
    if table.tied and table.tied[0] not in parameters:
        yield table.tied


def _rename_groups(
    hub: Hub, pieces: Sequence[Theirs], places: Mapping[str, Theirs]
) -> Iterator[ParameterGroup]:
    """Yield the optimizer's groups with the new names of parameters, in the order of the renamed
    model. Raises `SourceError` if parameters of several groups would be joined.
    """
    group_of = {name: number for number, group in enumerate(hub.groups) for name in group.names}
    rows: list[list[str]] = [[] for _ in hub.groups]
    for theirs in pieces:
        numbers = {group_of.get(places[block.name].name) for block in theirs.blocks}
        if len(numbers) > 1:
            parts = ", ".join(dict.fromkeys(places[block.name].name for block in theirs.blocks))
            raise SourceError(
                f"{theirs.name}: this parameter would be joined from {parts}, which are in several groups of the"
                " optimizer; keep the checkpoint's own names"
            )
        number = numbers.pop()
        if number is not None:
            rows[number].append(theirs.name)
    yield from (
        replace(group, names=tuple(names)) for group, names in zip(hub.groups, rows, strict=True)
    )


def _find_ignored_tensors(hub: Hub, ignorable: Sequence[str]) -> Iterator[Finding]:
    """Yield a finding if tensors are left out because the model computes them itself."""
    names = [*ignorable, *hub.buffers]
    if names:
        examples = ", ".join(names[:3]) + (" and more" if len(names) > 3 else "")
        message = f"{examples}: these buffers are left out, because the model computes them itself"
        yield loss_finding("buffers", message, Effect.NONE)


def _find_untied(ties: Mapping[str, str]) -> Iterator[Finding]:
    for alias, name in ties.items():
        message = (
            f"{alias} and {name} were trained as one parameter, which the model's config does not tie;"
            " only one of them is kept"
        )
        yield loss_finding("ties", message, Effect.NUMBERS)


def _find_padding(pieces: Sequence[Theirs]) -> Iterator[Finding]:
    for theirs in pieces:
        rows = theirs.shape[0] - sum(block.last - block.first for block in theirs.blocks)
        if not theirs.turned and len(theirs.shape) < 3 and rows:
            message = (
                f"{rows} rows of {theirs.name} are padding of the vocabulary and are left out, though the logits"
                " of these rows take part in the loss"
            )
            yield loss_finding("vocabulary", message, Effect.NUMBERS)
