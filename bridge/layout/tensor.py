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
"""Fields of a tensor plan that, without other fields, split no weights."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """The split of the residual stream by tokens between the blocks `first` and `last`, for a model
    whose code does not split the stream.

    `regions` are groups of modules that pass whole sequences into split layers; the last module of
    a region sums its output and returns slices. `whole` are modules that every rank runs on whole
    sequences. All names are exact. `width` is the number of features of the stream.
    """

    first: str
    last: str
    width: int
    regions: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Stack:
    """A module that holds `count` experts, which are stacked along the first dimension of each
    parameter. Its inputs are `width` features for each token, and the numbers and the weights of
    the `choices` experts of each token.
    """

    name: str
    count: int
    width: int
    choices: int


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """Patterns for the modules that tensor ranks split. A pattern is a part of a module's dotted
    name, and of a parameter's name for `weights`.

    `columns`, `rows`: linear layers that are split by output features or by input features.
    `gathered`, `divided`: linear layers that are split by output or input features, and take and
    return whole features: outputs are gathered, and each rank takes its slice of the input.
    `experts`: stacks of experts, of which each rank holds some. `shapes`: (input, output, kind) in
    any unit; a linear layer that matches no pattern gets the kind of the first shape with the same
    ratio of features. `weights`: parameters that are cut along a dimension. `attributes`: integers
    on any module that are divided, such as numbers of heads. `shared`: linear layers that every
    rank holds whole, but of whose output it uses only a slice. `vocabulary`: embeddings, and linear
    layers that return logits, split by vocabulary. `scattered`: modules after which sequence
    parallelism splits by tokens. `partial`: modules that every rank holds whole and runs on its
    slice of the activations, so that the gradients on all ranks must be summed. `tokens`: the split
    by tokens for sequence parallelism, if the model's code does not split its stream. `whole`:
    nothing is split, and every rank holds the whole model.
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
        """Return the way in which the linear layer `name` is split: vocabulary, shared, column,
        row, gathered, divided, or None.
        """
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
            yield "tensor plan: splits nothing; name modules in `columns`, `rows`, `shapes`, `weights` or `vocabulary`"
        lists = list(self._lists())
        for index, (kind, parts) in enumerate(lists):
            for other, theirs in lists[index + 1 :]:
                for name in set(parts) & set(theirs):
                    yield f"tensor plan: {name!r} is in the lists of {kind} and {other} layers; leave it in one"


@dataclass(frozen=True, slots=True)
class Site:
    """A point in the model where tensor ranks exchange activations. `width` is the number of
    features of a token at this point.

    Activations `enter` split layers or `leave` one, come out of a split `embed`-ding, are
    `scatter`-ed by tokens, or are `logits` of a split loss. If the stream is split by tokens,
    `gather` assembles whole sequences for modules that every rank computes on whole sequences;
    activations that enter or leave split layers inside such modules are `enter whole` or `leave
    whole`. Around a single split layer, ranks `gather features` of its outputs and `divide
    features` of its inputs. If `exact`, activations are exchanged in fp32 at least.
    """

    name: str
    kind: SiteKind
    width: int
    exact: bool = False

    @staticmethod
    def ends(whole: bool) -> tuple[SiteKind, SiteKind]:
        """Return the kinds of the two sites at the beginning and end of split layers. With `whole`,
        the layers run on whole sequences although the stream is split by tokens.
        """
        return ("enter whole", "leave whole") if whole else ("enter", "leave")


def matches(name: str, parts: tuple[str, ...]) -> bool:
    """Whether `name` contains one of `parts`."""
    return any(part in name for part in parts)


def cut(size: int, ranks: int, rank: int) -> range:
    """Return the range of `size` that belongs to `rank`. The sizes of two ranges differ by at most
    one, and larger ranges come first.
    """
    length, longer = divmod(size, ranks)
    # Each of the first `longer` ranks takes one more and moves those behind it by one.
    start = rank * length + min(rank, longer)
    stop = (rank + 1) * length + min(rank + 1, longer)
    return range(start, stop)
