"""Tensor parallelism by names: describes which modules and parameters of a model are split over
tensor ranks, and along which dimension.
"""

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
"""Fields of a tensor plan that split no weights by themselves."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """How the residual stream is split by tokens from block `first` to block `last`, for a model
    whose own code does not split the stream.

    `regions` are groups of modules with split layers, which need whole sequences: tokens are
    gathered before the first module of a group, and the output of the last module is summed and
    split by tokens again. `whole` are modules that every rank runs on whole sequences. All names
    are full names of modules. `width` is the number of features of the stream.
    """

    first: str
    last: str
    width: int
    regions: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Stack:
    """A module that holds `count` experts, stacked along the first dimension of each parameter. The
    module gets three inputs: `width` features for each token, the numbers of the `choices` experts
    chosen for the token, and a weight for each of these experts.
    """

    name: str
    count: int
    width: int
    choices: int


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """Says how the modules of a model are split over tensor ranks. Each entry is a pattern: a part
    of the dotted name of a module, or in `weights` of a parameter.

    `columns`, `rows`: linear layers that are split by output features or by input features.
    `gathered`, `divided`: linear layers that are split in the same two ways, but take whole
    features and return whole features. `experts`: stacks of experts; each rank holds some of the
    experts. `shapes`: triples (input, output, kind) for linear layers that match no pattern; such a
    layer gets the kind of the first triple with the same ratio of input to output features.
    `weights`: parameters that are cut along a dimension. `attributes`: integers on modules that are
    divided by the number of ranks, such as a number of heads. `shared`: linear layers that every
    rank holds whole, although each rank uses only a slice of the output. `vocabulary`: embeddings,
    and linear layers that return logits, split by vocabulary. `scattered`: modules after which
    sequence parallelism splits by tokens. `partial`: modules that every rank holds whole and runs
    on a slice of the activations, so that gradients must be summed over the ranks. `tokens`: the
    split by tokens for sequence parallelism, if the model's code does not do it. `whole`: nothing
    is split, and every rank holds the whole model.
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
        """Return how the linear layer `name` is split: vocabulary, shared, column, row, gathered or
        divided, or None if the layer is not split.
        """
        for kind, parts in self._lists():
            if name_matches(name, parts):
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
            yield "tensor plan: splits nothing; name modules in `columns`, `rows`, `shapes`, `weights` or `vocabulary`"
        lists = list(self._lists())
        for index, (kind, parts) in enumerate(lists):
            for other, theirs in lists[index + 1 :]:
                for name in set(parts) & set(theirs):
                    yield f"tensor plan: {name!r} is listed both as a {kind} and as a {other} layer; remove one of the entries"


@dataclass(frozen=True, slots=True)
class Site:
    """A point in the model where tensor ranks exchange activations. `width` is the number of
    features of a token at this point.

    Activations `enter` split layers, `leave` split layers, come out of a split `embed`-ding, are
    `scatter`-ed by tokens, or are `logits` of a split loss. If the stream is split by tokens,
    `gather` assembles whole sequences for modules that every rank runs on whole sequences. At split
    layers inside such modules the kinds are `enter whole` and `leave whole`. Around a single split
    layer, ranks `gather features` of the output or `divide features` of the input. With `exact`,
    activations are exchanged in fp32 at least.
    """

    name: str
    kind: SiteKind
    width: int
    exact: bool = False

    @staticmethod
    def ends(whole: bool) -> tuple[SiteKind, SiteKind]:
        """Return the kinds of the sites before and behind split layers. With `whole`, these layers
        get whole sequences although the stream is split by tokens.
        """
        return ("enter whole", "leave whole") if whole else ("enter", "leave")


def name_matches(name: str, parts: tuple[str, ...]) -> bool:
    """Return whether `name` contains one of the strings `parts`."""
    return any(part in name for part in parts)


def cut_range(size: int, ranks: int, rank: int) -> range:
    """Return the part of range(`size`) that belongs to `rank`, if `ranks` ranks divide it. Some
    ranks may get one element more than others; these ranks come first.
    """
    length, longer = divmod(size, ranks)
    # Each of the first `longer` ranks takes one more and moves those behind it by one.
    start = rank * length + min(rank, longer)
    return range(start, (rank + 1) * length + min(rank + 1, longer))
