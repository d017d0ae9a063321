"""Names of parameters in several families of models. Names of one family are translated to those
of another through the native engine's names, which are called neutral here.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import TYPE_CHECKING

from bridge.checkpoint.hub import Hub, Model, Origin, Parameter, ParameterGroup, loss_finding
from bridge.checkpoint.lazy import ElementRun, Joined, Lazy, Turned
from bridge.errors import SourceError, nearest
from bridge.files.shown import show_value
from bridge.stack import registry
from bridge.stack.findings import Finding
from bridge.stack.rules import Effect

if TYPE_CHECKING:
    from bridge.stack.dialect import Config

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]
KINDS = ("weight", "bias")
NEUTRAL = "neutral"


@dataclass(frozen=True)
class NameBlock:
    """A block: the rows of a neutral parameter from index `first` up to `last`."""

    name: str
    first: int
    last: int


@dataclass(frozen=True)
class Theirs:
    """A parameter as a family has it: its name and shape, and the blocks of neutral rows of which
    it consists, in order. If `turned` is true, the family saves the transpose. Rows after the last
    block are padding.
    """

    name: str
    shape: Shape
    blocks: tuple[NameBlock, ...]
    turned: bool = False

    @property
    def width(self) -> int:
        """The number of elements in a row of the blocks, after a transpose is undone."""
        if self.turned:
            return self.shape[0]
        # Of stacked experts, (experts, rows, columns), the blocks have experts * rows rows: what is
        # left is the columns.
        flat = sum(block.last - block.first for block in self.blocks)
        return prod(self.shape[1:]) if len(self.shape) < 3 else prod(self.shape) // flat


@dataclass(frozen=True)
class NameRow:
    """A row of a family's table: how the family calls a parameter, and the neutral parameters that
    are stacked in it.

    Names may contain `{layer}`, `{expert}` and `{kind}` (weight or bias). With `heads`, each group
    of attention heads has its queries, its key and its value next to each other. With `turned`,
    matrices are saved as transposes. With `stacked`, the first dimension counts experts. With
    `padded`, padding rows of the vocabulary may follow. `gated` restricts the row to MLPs with a
    gate (True) or without one (False).
    """

    theirs: str
    ours: tuple[str, ...]
    heads: bool = False
    turned: bool = False
    stacked: bool = False
    padded: bool = False
    gated: bool | None = None


def one_to_one_rows(pairs: Mapping[str, str], **options: bool) -> tuple[NameRow, ...]:
    """Return rows that map one parameter each. `pairs` has a family's name of a parameter and the
    neutral name.
    """
    return tuple(NameRow(theirs, (ours,), **options) for theirs, ours in pairs.items())


@dataclass(frozen=True)
class Table:
    """The table of a family of models: how it calls its parameters.

    The rows are in the model's order: those before the layers, those of one layer, and those after
    the layers. `ignored` matches tensors that are not read, because the model computes them when it
    is built. `tied` is set if the family saves a tied weight under two names. It has the name of
    the output weight, and the name of the word embedding. If the output has no weight of its own,
    it uses the embedding.
    """

    family: str
    first: tuple[NameRow, ...]
    layer: tuple[NameRow, ...]
    last: tuple[NameRow, ...]
    ignored: str = r"(?!)"
    tied: tuple[str, str] | None = None

    @property
    def all(self) -> tuple[NameRow, ...]:
        """Every row."""
        return (*self.first, *self.layer, *self.last)


class Naming(ABC):
    """A naming: how a stack calls the parameters of models, in one table for each family."""

    name: str
    title: str
    stack: str = ""

    @abstractmethod
    def tables(self) -> Sequence[Table]:
        """Return the tables of all families, the most specific family first."""

    def describe_model(self, config: Config) -> tuple[str | None, tuple[str, ...]]:
        """Return the family of the model that a config describes, and a sentence for each reason
        why its parameters cannot be renamed.
        """
        return None, ()

    def carry_facts(self, hub: Hub) -> Model | None:
        """Return the facts about a model of this stack if a checkpoint of another format holds
        them; else None.
        """
        return None

    def family(self, shapes: Shapes) -> Table | None:
        """Return the table of the family that has all of these names; None if no family has them
        all.
        """
        return next((table for table in self.tables() if _all_known(table, shapes)), None)

    @abstractmethod
    def table_for_shapes(self, shapes: Shapes, facts: Model) -> Table:
        """Return the table of the family whose names these neutral parameters get. Raises
        `SourceError` if there is no such family.
        """


@cache
def _template_pattern(template: str) -> re.Pattern[str]:
    pattern = re.escape(template)
    for name in ("layer", "expert"):
        pattern = pattern.replace(rf"\{{{name}\}}", rf"(?P<{name}>\d+)", 1)
    return re.compile(pattern.replace(r"\{kind\}", r"(?P<kind>weight|bias)"))


@cache
def _ignore_pattern(table: Table) -> re.Pattern[str]:
    return re.compile(table.ignored)


def _all_known(table: Table, shapes: Shapes) -> bool:
    return bool(shapes) and all(
        _ignore_pattern(table).fullmatch(name)
        or any(_template_pattern(row.theirs).fullmatch(name) for row in table.all)
        for name in shapes
    )


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


# Reading: theirs, made of neutral rows


def read_names(naming: Naming, table: Table, shapes: Shapes, facts: Model) -> list[Theirs]:
    """Return the parameters of a checkpoint of this family, each with the neutral rows of which it
    consists. Raises `SourceError` if a shape does not fit.
    """
    sizes = _Sizes(naming, shapes, facts)
    parameters = []
    for name, shape in shapes.items():
        if not _ignore_pattern(table).fullmatch(name):
            matches = ((row, _template_pattern(row.theirs).fullmatch(name)) for row in table.all)
            # Two rows may have one name, for layers with and without a gate.
            row, match = next(
                (row, match)
                for row, match in matches
                if match and row.gated in (None, sizes.is_gated(name))
            )
            parameters.append(
                Theirs(
                    name,
                    shape,
                    tuple(sizes.blocks(row, match, name, shape)),
                    row.turned and len(shape) == 2,
                )
            )
    return parameters


@dataclass(frozen=True)
class _Sizes:
    """The shapes of a checkpoint, and what follows from several of them: whether an MLP is gated,
    and how queries, keys and values are stacked.
    """

    naming: Naming
    shapes: Shapes
    facts: Model

    def is_gated(self, name: str) -> bool:
        """Return whether an MLP is gated; `name` is its first matrix. It is gated if this matrix
        has twice as many rows as the second matrix has columns.
        """
        second = self.shapes.get(
            re.sub(r"linear_fc1(.*)\.(weight|bias)(\d*)$", r"linear_fc2\1.weight\3", name), ()
        )
        return bool(second) and self.shapes[name][0] == 2 * second[-1]

    def blocks(
        self, row: NameRow, match: re.Match[str], name: str, shape: Shape
    ) -> Iterator[NameBlock]:
        """Yield the blocks of neutral rows of which a family's parameter consists, in order."""
        values = {key: value for key, value in match.groupdict().items() if value is not None}
        height = shape[1] if row.turned and len(shape) == 2 else shape[0]
        if row.heads:
            yield from self._heads(
                [_fill_template(ours, values) for ours in row.ours], name, height
            )
        elif row.stacked:
            for expert in range(shape[0]):
                yield from _equal_blocks(
                    [_fill_template(ours, {**values, "expert": str(expert)}) for ours in row.ours],
                    shape[1],
                    name,
                )
        elif row.padded and self.facts.vocab and self.facts.vocab < height:
            yield NameBlock(_fill_template(row.ours[0], values), 0, self.facts.vocab)
        else:
            yield from _equal_blocks(
                [_fill_template(ours, values) for ours in row.ours], height, name
            )

    def _heads(self, ours: Sequence[str], name: str, height: int) -> Iterator[NameBlock]:
        """Yield the blocks of queries, key and value, one group of attention heads after the
        other. Raises `SourceError` if the number of rows does not fit the number of groups.
        """
        out = self.shapes.get(re.sub(r"linear_qkv\.(weight|bias)$", "linear_proj.weight", name), ())
        if self.facts.kv_heads is None:
            raise SourceError(
                f"{name}: found queries, keys and values of several groups of heads, and the number of groups"
                " is unknown; name the model's config with --config"
            )
        # The output projection is as wide as all queries together are high. Keys and values share
        # what is left equally.
        queries, groups = out[-1] if out else 0, self.facts.kv_heads
        width, odd = divmod((height - queries) // 2, groups)
        if odd or not 0 < queries < height or (height - queries) % 2 or queries % (groups * width):
            raise SourceError(
                f"{name}: found {height} rows, which do not fit {groups} groups of heads and an output of {queries}"
                " columns; name the right config with --config"
            )
        yield from interleave_blocks(ours, queries // groups, width, groups)


def interleave_blocks(
    ours: Sequence[str], queries: int, width: int, groups: int
) -> Iterator[NameBlock]:
    """Yield the blocks of a tensor that holds, for each group of attention heads, `queries` rows
    of queries, `width` rows of the key and `width` rows of the value.
    """
    for group in range(groups):
        for name, size in zip(ours, (queries, width, width), strict=True):
            yield NameBlock(name, group * size, (group + 1) * size)


def _fill_template(template: str, values: Mapping[str, str]) -> str:
    return template.format_map(values)


def _equal_blocks(ours: Sequence[str], height: int, name: str) -> Iterator[NameBlock]:
    """Yield a block for each of several neutral parameters that are stacked, all with the same
    number of rows. Raises `SourceError` if the rows cannot be divided so.
    """
    part, odd = divmod(height, len(ours))
    if odd:
        raise SourceError(
            f"{name}: found {height} rows, expected {len(ours)} parts with equal numbers of rows; the checkpoint is damaged"
        )
    yield from (NameBlock(our, 0, part) for our in ours)


# Writing: theirs, of neutral parameters that are there


def write_names(table: Table, shapes: Shapes, facts: Model) -> list[Theirs]:
    """Return the parameters that a family makes of these neutral parameters, in the family's
    order. Raises `SourceError` for a neutral parameter that the family does not have.
    """
    layers = sorted(
        {int(match[1]) for name in shapes if (match := re.match(r"block(\d+)\.", name))}
    )
    parameters = [*_section_parameters(table.first, {}, shapes, facts)]
    for layer in layers:
        parameters += _section_parameters(table.layer, {"layer": str(layer)}, shapes, facts)
    parameters += _section_parameters(table.last, {}, shapes, facts)
    used = {block.name for theirs in parameters for block in theirs.blocks}
    SourceError.raise_if(
        f"{name}: a {table.family} does not have this parameter; choose other names with --names"
        for name in shapes
        if name not in used
    )
    return parameters


def _section_parameters(
    section: Sequence[NameRow], values: Mapping[str, str], shapes: Shapes, facts: Model
) -> Iterator[Theirs]:
    """Yield the parameters of one section of a table, in the model's order. If several rows about
    experts follow each other, all of them are used for the first expert, then for the next one.
    """
    names_so_far: set[str] = set()
    at = 0
    while at < len(section):
        of_expert = "{expert}" in section[at].theirs
        end = at + 1
        while end < len(section) and of_expert and "{expert}" in section[end].theirs:
            end += 1
        for expert in _expert_numbers(section[at:end], values, shapes) if of_expert else [None]:
            names = {**values, **({} if expert is None else {"expert": expert})}
            for row in section[at:end]:
                for kind in KINDS if "{kind}" in row.ours[0] else ("",):
                    theirs = _make_parameter(row, {**names, "kind": kind}, shapes, facts)
                    if theirs is not None and theirs.name not in names_so_far:
                        names_so_far.add(theirs.name)
                        yield theirs
        at = end


def _expert_numbers(
    section: Sequence[NameRow], values: Mapping[str, str], shapes: Shapes
) -> list[str]:
    """Return the numbers of the experts in a layer, as they stand in names, in ascending order."""
    pattern = _template_pattern(
        section[0].ours[0].replace("{layer}", values.get("layer", "")).replace("{kind}", "weight")
    )
    return sorted(
        (match["expert"] for name in shapes if (match := pattern.fullmatch(name))), key=int
    )


def _make_parameter(
    row: NameRow, values: Mapping[str, str], shapes: Shapes, facts: Model
) -> Theirs | None:
    """Return the parameter that a row makes of neutral parameters; None if one of these is
    missing.
    """
    if row.stacked:
        numbers = _expert_numbers([row], values, shapes)
        ours = [
            _fill_template(name, {**values, "expert": number})
            for number in numbers
            for name in row.ours
        ]
    else:
        ours = [_fill_template(name, values) for name in row.ours]
    if not ours or not all(name in shapes for name in ours):
        return None
    return _their_parameter(
        row, _fill_template(row.theirs, values), [shapes[name] for name in ours], ours, facts
    )


def _their_parameter(
    row: NameRow, name: str, sizes: Sequence[Shape], ours: Sequence[str], facts: Model
) -> Theirs:
    height, rest = sum(size[0] for size in sizes), sizes[0][1:]
    blocks: Iterable[NameBlock] = (
        NameBlock(our, 0, size[0]) for our, size in zip(ours, sizes, strict=True)
    )
    if row.heads:
        groups = facts.kv_heads
        if groups is None or sizes[1][0] % groups or sizes[0][0] % groups:
            problem = (
                "the number of groups of attention heads is unknown"
                if groups is None
                else f"{groups} groups of attention heads do not divide the {sizes[1][0]} rows of the keys"
            )
            raise SourceError(f"{name}: {problem}; name the model's config with --config")
        blocks = interleave_blocks(ours, sizes[0][0] // groups, sizes[1][0] // groups, groups)
    if row.stacked:
        experts = len(ours) // len(row.ours)
        return Theirs(name, (experts, height // experts, *rest), tuple(blocks))
    transposes = row.turned and len(rest) == 1
    return Theirs(
        name, (*rest, height) if transposes else (height, *rest), tuple(blocks), transposes
    )


# Moving


def neutral_shapes(parameters: Sequence[Theirs]) -> dict[str, Shape]:
    """Return the shapes of the neutral parameters of which a family's parameters consist. Raises
    `SourceError` if some of their rows are missing or repeated.
    """
    ends: dict[str, int] = {}
    shapes: dict[str, Shape] = {}
    for theirs in parameters:
        for block in theirs.blocks:
            # Blocks of one parameter come in order, each where the one before it ended.
            if ends.get(block.name, 0) != block.first:
                raise SourceError(
                    f"{theirs.name}: rows of {block.name} are repeated or missing; the checkpoint "
                    "is damaged"
                )
            ends[block.name] = block.last
            vector = len(theirs.shape) == 1
            shapes[block.name] = (block.last,) if vector else (block.last, theirs.width)
    return shapes


def all_namings() -> Mapping[str, Naming]:
    """Return all namings by name."""
    return {**_stack_namings(), NEUTRAL: Neutral()}


def _stack_namings() -> dict[str, Naming]:
    return {naming.name: naming for name in registry.OWN for naming in registry.load(name).namings}


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
        key=lambda pair: sum(_all_known(pair[1], {name: shape}) for name, shape in shapes.items()),
    )
    odd = [name for name, shape in shapes.items() if not _all_known(closest[1], {name: shape})]
    rest = len(odd) - 1
    more = f" and {rest} more" if rest else ""
    raise SourceError(
        f"{show_value(odd[0])}{more}: no known family of models has parameters of this name (the nearest family is "
        f"{closest[1].family}); keep the checkpoint's own names"
    )


WRAPPERS = re.compile(r"(?:^|\.)(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?=\.)")
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
    bare = {name: WRAPPERS.sub("", name.removeprefix(top)).removeprefix(".") for name in names}
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
    ignorable = [name for name in shapes if _ignore_pattern(source.table).fullmatch(name)]
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
