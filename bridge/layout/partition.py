"""Layers to stages: the rules that cut a model's layers into consecutive groups."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import accumulate, pairwise
from math import ceil, floor

from bridge import limits
from bridge.errors import ConfigError
from bridge.plan.plan import Stages

ONE_LAYER = (
    "; a module that is neither nn.Sequential nor a model of Hugging Face with repeated blocks is"
    " one layer: pass it as an nn.Sequential of its parts"
)
ALONE = 1000
"""Cost of a leading layer, such as an embedding, in the `ceil` rule. All other layers cost 1, so a
leading layer always gets its own stage.
"""


@dataclass(frozen=True, slots=True)
class Layers:
    """Numbers of layers and of parameters, by which a partition rule cuts a model into stages.
    `count` includes `leading` layers (embeddings) and `trailing` layers (final norm, output head).
    `parameters` has the number of elements of each layer; only the rule `parameters` and the
    function `cut_within` need these numbers.
    """

    count: int
    leading: int = 0
    trailing: int = 0
    parameters: tuple[int, ...] = ()

    @property
    def body(self) -> int:
        """Number of transformer layers."""
        return self.count - self.leading - self.trailing


Boundaries = tuple[int, ...]
"""Cuts between stages: the number of the first layer of each stage, and at the end the number of
all layers.
"""


def partition_layers(stages: Stages, layers: Layers, parts: int | None = None) -> tuple[range, ...]:
    """Cut `layers` into stages by the rule `stages.rule`. If no rule is set, the rule is `explicit`
    where boundaries are given, and `carry_boundaries` elsewhere.

    `parts` is the wanted number of stages (pipeline ranks x virtual stages), for rules that do not
    get this number from `layers_per_stage`. Raises `ConfigError` if the rule needs a setting that
    is missing, or if a stage would have no layer.
    """
    if max(layers.count, parts or 0) > limits.LAYERS:
        raise ConfigError(
            f"model.layers: found {layers.count:,}, expected at most {limits.LAYERS:,} layers and stages"
        )
    rule = stages.rule or ("explicit" if stages.boundaries else "carry")
    boundaries = _RULES[rule](stages, layers, parts)
    return tuple(range(first, last) for first, last in pairwise(boundaries))


FEW, SMALL = 32, 2**20
"""Limits for joining layers to stages. In a model of up to `FEW` layers, each layer is a stage. In
a model of more layers, a stage has at least `SMALL` elements, because a collective of fewer
elements costs more for its start than for its transfer.
"""


def cut_within(layers: Layers, within: Sequence[range]) -> tuple[range, ...]:
    """Cut each of the ranges `within` into small stages. In a model of up to `FEW` layers, each
    layer is a stage. Otherwise neighbouring layers are joined until they have `SMALL` elements, and
    layers that remain at the end of a range join the last stage.
    """
    if layers.count <= FEW or len(layers.parameters) != layers.count:
        return tuple(range(layer, layer + 1) for part in within for layer in part)
    return tuple(stage for part in within for stage in _fill_gap(part, layers.parameters))


def _fill_gap(part: range, sizes: Sequence[int]) -> Iterator[range]:
    first, size = part.start, 0
    for layer in part:
        size += sizes[layer]
        # Cut only if the layers behind can fill a stage too; otherwise they join this one.
        if size >= SMALL and sum(sizes[layer + 1 : part.stop]) >= SMALL:
            yield range(first, layer + 1)
            first, size = layer + 1, 0
    if first < part.stop:
        yield range(first, part.stop)


def carry_boundaries(count: int, size: Fraction) -> Boundaries:
    """Return the boundaries of stages with `size` layers, which need not be a whole number: 1.5
    gives stages of 1, 2, 1, 2 layers.
    """
    # Fractions and not floats: a size of 32 / 3 must cut exactly at 32 after three stages.
    cuts = (floor(size * index) for index in range(1, ceil(count / size) + 1))
    return tuple(sorted({0, count, *(cut for cut in cuts if cut < count)}))


def ceil_boundaries(costs: Sequence[float], size: Fraction) -> Boundaries:
    """Return the boundaries of stages, each of which ends with the layer at which the stage's cost
    reaches `size`, as in Fast-LLM. The cost of each stage counts from 0, even if the stage
    before it costs more than `size`.
    """
    boundaries, cost = [0], 0.0
    for index, layer in enumerate(costs, 1):
        cost += layer
        if cost >= size or index == len(costs):
            boundaries.append(index)
            cost = 0.0
    return tuple(boundaries)


def even_boundaries(count: int, parts: int) -> Boundaries:
    """Return the boundaries of `parts` stages whose numbers of layers differ by at most one. Longer
    stages come first.
    """
    size, longer = divmod(count, parts)
    # Each of the first `longer` stages moves the cuts behind it by one layer.
    return tuple(index * size + min(index, longer) for index in range(parts + 1))


def floor_last(count: int, parts: int) -> Boundaries:
    """Return the boundaries of `parts` stages whose numbers of layers differ by at most one. Longer
    stages come last.
    """
    size, longer = divmod(count, parts)
    return tuple(index * size + max(0, index - (parts - longer)) for index in range(parts + 1))


def balance_stages(costs: Sequence[int], parts: int) -> Boundaries:
    """Return the boundaries of `parts` non-empty stages such that the dearest stage costs as little
    as possible. Among several such results, return the one with the smallest sum of squared costs.
    """
    # Two steps: find the smallest possible largest cost, then minimise the sum of squared costs under that limit.
    limit = _smallest_limit(costs, parts)
    sums = [0, *accumulate(costs)]

    @cache
    def best(first: int, count: int) -> tuple[int, Boundaries]:
        """Cut the layers from `first` to the end into `count` stages. Return the smallest possible
        sum of the squared costs of the stages, and the boundaries that give this sum.
        """
        if count == 1:
            return (sums[-1] - sums[first]) ** 2, (len(costs),)
        # The first of these stages may cost at most `limit`, and a layer must be left for each of
        # the others.
        furthest = min(bisect_right(sums, sums[first] + limit) - 1, len(costs) - count + 1)
        options = (
            (cut, *best(cut, count - 1))
            for cut in range(first + 1, furthest + 1)
            if fits(cut, count - 1)
        )
        return min(
            ((sums[cut] - sums[first]) ** 2 + rest, (cut, *tail)) for cut, rest, tail in options
        )

    @cache
    def fits(first: int, count: int) -> bool:
        """Return whether the layers from `first` to the end can be cut into `count` stages that each
        have a layer and cost at most `limit`.
        """
        return _greedy_count(costs[first:], limit) <= count <= len(costs) - first

    return (0, *best(0, parts)[1])


def _smallest_limit(costs: Sequence[int], parts: int) -> int:
    """Return the smallest limit such that `parts` stages can be cut without a stage that costs
    more. The limit is found by bisection.
    """
    low, high = max(costs), sum(costs)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _greedy_count(costs, middle) <= parts else (middle + 1, high)
    return low


def _greedy_count(costs: Sequence[int], limit: int) -> int:
    """Return the smallest number of stages into which `costs` can be cut if no stage may cost more
    than `limit`. No single layer may cost more than `limit`.
    """
    parts, room = 1, limit
    for cost in costs:
        if cost > room:
            parts, room = parts + 1, limit
        room -= cost
    return parts


def _carry_stages(stages: Stages, layers: Layers, parts: int | None) -> Boundaries:
    if stages.layers_per_stage is None and parts is not None and parts > 1:
        return carry_boundaries(
            layers.count, Fraction(layers.count, _stage_count(stages, layers.count, parts))
        )
    return carry_boundaries(layers.count, _stage_size(stages))


def _ceil_stages(stages: Stages, layers: Layers, parts: int | None) -> Boundaries:
    costs = [ALONE] * layers.leading + [1] * (layers.count - layers.leading)
    return ceil_boundaries(costs, _stage_size(stages))


def _even_stages(stages: Stages, layers: Layers, parts: int | None) -> Boundaries:
    return _with_ends(
        even_boundaries(layers.body, _stage_count(stages, layers.body, parts)), layers
    )


def _floor_last(stages: Stages, layers: Layers, parts: int | None) -> Boundaries:
    return floor_last(layers.count, _stage_count(stages, layers.count, parts))


def _parameter_stages(stages: Stages, layers: Layers, parts: int | None) -> Boundaries:
    if len(layers.parameters) != layers.count:
        raise ConfigError(
            f"stages.rule: 'parameters' needs the size of each of the {layers.count} layers, found"
            f" {len(layers.parameters)} sizes; give the model's sizes, or use rule 'even'"
        )
    return balance_stages(layers.parameters, _stage_count(stages, layers.count, parts))


def _explicit_stages(stages: Stages, layers: Layers, parts: int | None) -> Boundaries:
    boundaries = stages.boundaries or ()
    ConfigError.raise_if(_explicit_problems(boundaries, layers))
    return boundaries if boundaries[-1] == layers.count else _with_ends(boundaries, layers)


def _explicit_problems(boundaries: Boundaries, layers: Layers) -> Iterator[str]:
    if len(boundaries) < 2 or boundaries[0] != 0:
        yield (
            f"stages.boundaries: found {boundaries}, expected 0, the first layer of each further stage,"
            " then the number of layers"
        )
    elif boundaries[-1] not in (layers.body, layers.count):
        counts_text = " or ".join(
            str(number) for number in dict.fromkeys((layers.body, layers.count))
        )
        yield f"stages.boundaries: found {boundaries[-1]} as the last number, expected the number of layers, {counts_text}"
    pairs = list(pairwise(boundaries))
    for place, (first, last) in enumerate(pairs):
        # Only the first stage may have no block, if it has the embedding, and only the last, if it has the head.
        beside = (place == 0 and layers.leading) or (place == len(pairs) - 1 and layers.trailing)
        alone = last == first and beside and boundaries[-1] == layers.body != layers.count
        if last <= first and not alone:
            yield (
                f"stages.boundaries: found {last} after {first}, expected increasing numbers, "
                "because each stage needs a layer"
            )


def _with_ends(boundaries: Boundaries, layers: Layers) -> Boundaries:
    """Turn `boundaries` that count only transformer layers into boundaries that count all layers.
    Leading layers join the first stage, and trailing layers join the last stage.
    """
    return (0, *(boundary + layers.leading for boundary in boundaries[1:-1]), layers.count)


def _stage_size(stages: Stages) -> Fraction:
    # By way of its digits: 1.1 as a float is a little more than 11/10, and the difference would add
    # up over stages.
    return Fraction(str(stages.layers_per_stage or 1))


def _stage_count(stages: Stages, count: int, parts: int | None) -> int:
    """Return the number of stages for `count` layers. If `layers_per_stage` is set, the number
    follows from this setting. Otherwise the number is `parts`, or `count` if `parts` is None or 1.
    """
    if stages.layers_per_stage is not None:
        return min(count, ceil(count / _stage_size(stages)))
    number = parts if parts is not None and parts > 1 else count
    if number > count:
        raise ConfigError(
            f"stages: found {number} stages, but only {count} layers; use at most {count} stages, or more layers"
            f"{ONE_LAYER * (count == 1)}"
        )
    return number


_RULES: Mapping[str, Callable[[Stages, Layers, int | None], Boundaries]] = {
    "carry": _carry_stages,
    "ceil": _ceil_stages,
    "even": _even_stages,
    "floor_last": _floor_last,
    "parameters": _parameter_stages,
    "explicit": _explicit_stages,
}
