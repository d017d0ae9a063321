"""Tensor parallelism by names: the modules and parameters of a model that are split over tensor ranks, and how."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Literal

from bridge.errors import ConfigError

Kind = Literal["column", "row"]
SiteKind = Literal[
    "enter",
    "leave",
    "embed",
    "scatter",
    "gather",
    "enter whole",
    "leave whole",
    "gather features",
    "divide features",
    "logits",
]

_NO_SPLIT = ("attributes", "scattered", "partial", "tokens")
"""Fields of a tensor plan that alone split no weights."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """The split by tokens of the residual stream between the blocks `first` and `last`, for a model
    whose code does not split it.

    `regions` are modules that take whole sequences into split layers, the last of which sums its
    output and gives slices back. `whole` are modules that every rank runs on whole sequences. All
    names are exact; `width` is the number of features of the stream.
    """

    first: str
    last: str
    width: int
    regions: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Stack:
    """A module that holds `count` experts, each of its parameters along the first dimension.

    It takes `width` features of each token, the numbers of its experts, and their weights: `choices` of each.
    """

    name: str
    count: int
    width: int
    choices: int


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """Parts of module names, or of parameter names for `weights`. A module matches if its dotted name contains one.

    columns, rows: linear layers split by output or by input features. `gathered`, `divided`: the same, but each takes whole
    features and gives whole features: outputs are gathered, and each rank takes its part of the input. `experts`: stacks of
    experts, of which each rank keeps some. `shapes`: (input, output, kind) in any unit; a linear
    layer that no name claims is taken if its features stand in that ratio, first match first. `weights`: parameters cut along
    a dimension. `attributes`: integers on any module that are divided, such as numbers of heads. `shared`: linear layers that
    every rank holds whole while it uses a part of their output. `vocabulary`: embeddings, and linear layers that return
    logits, split by vocabulary. `scattered`: modules after which sequence parallelism splits by tokens. `partial`: modules
    that every rank holds whole and uses on its part of the activations, so that their gradients are shares of a sum. `tokens`:
    how sequence parallelism splits a model that does not split its stream itself. `whole`: nothing is split, and every rank
    holds the whole model.
    """

    columns: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    gathered: tuple[str, ...] = ()
    divided: tuple[str, ...] = ()
    experts: tuple[Stack, ...] = ()
    shapes: tuple[tuple[float, float, Kind], ...] = ()
    weights: tuple[tuple[str, int], ...] = ()
    attributes: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    vocabulary: tuple[str, ...] = ()
    scattered: tuple[str, ...] = ()
    partial: tuple[str, ...] = ()
    tokens: Tokens | None = None
    whole: bool = False

    def __post_init__(self) -> None:
        ConfigError.raise_if(self._problems())

    def kind(self, name: str, inputs: int, outputs: int) -> str | None:
        """How the linear layer `name` is split: vocabulary, shared, column, row, gathered, divided, or None."""
        for kind, parts in self._lists():
            if matches(name, parts):
                return kind
        ratios = (kind for first, second, kind in self.shapes if inputs * second == outputs * first)
        return next(ratios, None)

    def _lists(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        yield from (
            ("vocabulary", self.vocabulary),
            ("shared", self.shared),
            ("column", self.columns),
            ("row", self.rows),
            ("gathered", self.gathered),
            ("divided", self.divided),
        )

    def _problems(self) -> Iterator[str]:
        if not any(
            getattr(self, field.name) for field in fields(self) if field.name not in _NO_SPLIT
        ):
            yield "tensor plan: splits nothing; name columns and rows, shapes, weights or a vocabulary"
        lists = list(self._lists())
        for index, (kind, parts) in enumerate(lists):
            for other, theirs in lists[index + 1 :]:
                for name in set(parts) & set(theirs):
                    yield f"tensor plan: {name!r} is in the lists of {kind} and {other} layers; leave it in one"


@dataclass(frozen=True, slots=True)
class Site:
    """A place where tensor ranks exchange activations; `width` is the number of features of a token
    there.

    Activations `enter` split layers or `leave` one, come out of a split `embed`-ding, are
    `scatter`-ed by tokens, or are `logits` of a split loss. If the stream is split by tokens,
    `gather` assembles it for modules that every rank computes on whole sequences, and activations
    that enter or leave split layers there are `whole`. Where split layers stand alone, ranks
    `gather features` of their outputs and `divide features` of their inputs. What is `exact` is
    exchanged in fp32 at least.
    """

    name: str
    kind: SiteKind
    width: int
    exact: bool = False

    @staticmethod
    def ends(whole: bool) -> tuple[SiteKind, SiteKind]:
        """The kinds at the two ends of split layers; `whole`: of whole sequences, while the stream is split by tokens."""
        return ("enter whole", "leave whole") if whole else ("enter", "leave")


def matches(name: str, parts: tuple[str, ...]) -> bool:
    """Whether `name` contains one of `parts`."""
    return any(part in name for part in parts)


def cut(size: int, ranks: int, rank: int) -> range:
    """The part of `size` for `rank`. The sizes of parts differ by at most one, and larger parts
    come first.
    """
    length, longer = divmod(size, ranks)
    # Each of the first `longer` ranks takes one more and moves those behind it by one.
    start = rank * length + min(rank, longer)
    stop = (rank + 1) * length + min(rank + 1, longer)
    return range(start, stop)
