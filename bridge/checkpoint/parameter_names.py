"""Names of parameters in several families of models. Names of one family are translated to those
of another through the native engine's names, which are called neutral here.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any, Protocol

from bridge.checkpoint.hub import Hub, Model
from bridge.errors import SourceError

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


class GivenConfig(Protocol):
    """What a naming looks at of a config."""

    @property
    def given(self) -> Mapping[str, Any]:
        """The settings that the user wrote, by path."""


class Naming(ABC):
    """A naming: how a stack calls the parameters of models, in one table for each family."""

    name: str
    title: str
    stack: str = ""

    @abstractmethod
    def tables(self) -> Sequence[Table]:
        """Return the tables of all families, the most specific family first."""

    def describe_model(self, config: GivenConfig) -> tuple[str | None, tuple[str, ...]]:
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
        return next((table for table in self.tables() if has_all_names(table, shapes)), None)

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
def ignore_pattern(table: Table) -> re.Pattern[str]:
    return re.compile(table.ignored)


def has_all_names(table: Table, shapes: Shapes) -> bool:
    return bool(shapes) and all(
        ignore_pattern(table).fullmatch(name)
        or any(_template_pattern(row.theirs).fullmatch(name) for row in table.all)
        for name in shapes
    )


# Reading: theirs, made of neutral rows


def read_names(naming: Naming, table: Table, shapes: Shapes, facts: Model) -> list[Theirs]:
    """Return the parameters of a checkpoint of this family, each with the neutral rows of which it
    consists. Raises `SourceError` if a shape does not fit.
    """
    sizes = _Sizes(naming, shapes, facts)
    parameters = []
    for name, shape in shapes.items():
        if not ignore_pattern(table).fullmatch(name):
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
