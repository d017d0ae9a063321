"""Comparison: where two runs part, whatever their layouts: rounding or fault, the first tensor, and what it looks like."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor

from bridge.errors import BridgeError
from bridge.trace.adaptive import Updates
from bridge.trace.record import MEMORY, SHARD, Name
from bridge.trace.run import Entry, Run, named

Verdict = Literal["equal", "rounding", "fault", "nan", "only in A", "only in B", "other shape", "too coarse"]

FAULTS: tuple[Verdict, ...] = ("fault", "nan", "only in A", "only in B", "other shape")
"""Verdicts that rounding does not explain."""

SLACK = 8.0
"""How many roundings deep one layer is, about: sums within it are longer than one operation."""

GAIN = 8.0
"""How many times more than the weights on their way values may be apart."""

UNKNOWN = 100.0
"""How many times more than by rounding alone values may be apart after an adaptive update of which the logs have no samples."""


@dataclass(frozen=True, slots=True)
class Line:
    """What became of one tensor: root mean square of the difference over that of the values (`distance`), and how large
    rounding may make it (`bound`); `cause` is what a fault looks like. Of weights, the distance is what adaptive updates do not
    explain by the distance of their gradients.
    """

    name: Name
    verdict: Verdict
    distance: float = 0.0
    bound: float = 0.0
    cause: str = ""

    @property
    def is_fault(self) -> bool:
        """Whether rounding does not explain it."""
        return self.verdict in FAULTS


@dataclass(frozen=True)
class Comparison:
    """Every tensor of the steps that both runs have, in order of execution."""

    first: Run
    second: Run
    lines: tuple[Line, ...]

    @cached_property
    def faults(self) -> tuple[Line, ...]:
        """Those that rounding does not explain."""
        return tuple(line for line in self.lines if line.is_fault)

    @property
    def divergence(self) -> Line | None:
        """The first of them."""
        return self.faults[0] if self.faults else None

    @property
    def worst(self) -> Line | None:
        """The tensor nearest to its bound, of those within it."""
        return max((line for line in self.lines if not line.is_fault), key=share, default=None)

    def heat(self) -> Mapping[str, Mapping[int, float]]:
        """By layer and step: the largest distance, as a share of its bound."""
        found: dict[str, dict[int, float]] = defaultdict(dict)
        for line in self.lines:
            layer = found[line.name.layer]
            layer[line.name.step] = max(layer.get(line.name.step, 0.0), share(line))
        return found


def share(line: Line) -> float:
    """Its distance as a share of its bound; infinite where a fault has no bound."""
    if line.bound:
        return line.distance / line.bound
    return math.inf if line.is_fault else 0.0


def compare(first: Run, second: Run, steps: Iterable[int] | None = None) -> Comparison:
    """Compare the steps that both have whole (or `steps` of them). Raises `BridgeError` if there are none."""
    wanted = set(first.steps) & set(second.steps)
    wanted &= wanted if steps is None else set(steps)
    if not wanted:
        raise BridgeError(
            f"{first.folder}, {second.folder}: no step is whole in both; found {_told(first.steps)} and {_told(second.steps)}"
        )
    settings = {**second.about.get("settings", {}), **first.about.get("settings", {})}
    updates = Updates.of(settings) if any(map(_adaptive, (first, second))) else None
    before: Before = {}
    lines = [line for step in sorted(wanted) for line in _step(first, second, step, updates, before)]
    return Comparison(first, second, tuple(lines))


def _told(steps: Sequence[int]) -> str:
    return f"steps {steps[0]} to {steps[-1]}" if steps else "no step"


Before = dict[tuple[str, str], Tensor]
"""By layer and parameter, the samples (2, samples) of the weights as both runs logged them last."""


def _step(first: Run, second: Run, step: int, updates: Updates | None, before: Before) -> Iterator[Line]:
    ours, theirs = _shared(first, step), _shared(second, step)
    others, scales, ratios = named(theirs), _scales(theirs), _ratios(first, second)
    for entry in ours:
        other = others.pop(entry.name, None)
        if other is None:
            yield Line(entry.name, "only in A")
        else:
            bound, scale = _bound(first, entry, other, updates), scales[_section(entry.name)]
            line = _line(entry, other, bound, scale, ratios, _explained(updates, entry, other, scale))
            key, pair = _parameter(entry.name), _pair(entry, other)
            if updates is not None and entry.name.phase == "reduce":
                noise = max(line.distance, _unit(entry, other, first.about.get("formats", ())))
                updates.gradient(key, pair, noise, scale)
            if entry.name.kind == "weight" and pair is not None:
                line = _of_change(line, pair - before.get(key, pair), ratios)
                before[key] = pair
            yield line
    yield from (Line(name, "only in B") for name in others)
    if updates is not None:
        updates.end()


def _of_change(line: Line, change: Tensor, ratios: Mapping[str, float]) -> Line:
    """What a fault in weights looks like in their `change`, beside which the weights themselves hardly differ."""
    if line.verdict != "fault" or not change.any():
        return line
    return replace(line, cause=f"of the updates: {cause(change[0], change[1], ratios, 'update')}")


def _explained(updates: Updates | None, one: Entry, other: Entry, scale: float) -> Tensor | None:
    """How far apart each sample of a weight may be because gradients were rounded; None: not at all, or unknown."""
    if updates is not None and one.name.phase == "update":
        return updates.weight(_parameter(one.name), _pair(one, other), scale)
    if updates is not None and one.name.phase == "init":
        updates.begin(_parameter(one.name), _pair(one, other))
    return None


def _pair(one: Entry, other: Entry) -> Tensor | None:
    """(2, samples) of both, where both have the same."""
    if one.samples is None or other.samples is None or len(one.samples) != len(other.samples):
        return None
    return torch.stack([one.samples, other.samples])


def _shared(run: Run, step: int) -> tuple[Entry, ...]:
    """The tensors that do not belong to one layout alone."""
    return tuple(entry for entry in run.entries(step) if entry.name.kind not in (MEMORY, SHARD))


def _adaptive(run: Run) -> bool:
    """Whether its optimizer divides gradients by their own size."""
    settings: Mapping[str, Any] = run.about.get("settings", {})
    return "sgd" not in str(settings.get("optimizer.name", settings.get("optimizer", "adamw"))).lower()


def _parameter(name: Name) -> tuple[str, str]:
    return name.layer, name.tensor


def _section(name: Name) -> tuple[str, str]:
    return name.phase, name.kind


def _scales(entries: Iterable[Entry]) -> dict[tuple[str, str], float]:
    """The usual size of values of each phase and kind: what is 0 but for rounding is measured by it, not by itself."""
    sizes: dict[tuple[str, str], list[float]] = defaultdict(list)
    for entry in entries:
        if entry.summary is not None and entry.summary.finite:
            sizes[_section(entry.name)].append(entry.summary.norm / math.sqrt(entry.summary.finite))
    return defaultdict(float, {section: median(found) for section, found in sizes.items()})


def _bound(run: Run, one: Entry, other: Entry, updates: Updates | None) -> float:
    """How far rounding may carry the two apart: units in the last place of the coarsest format on the way, growing with the
    root of the layers and steps behind, and what adaptive updates before made of it.
    """
    if one.name.phase == "init":
        return 0.0
    layers = list(run.about.get("layers", ()))
    place = layers.index(one.name.layer) + 1 if one.name.layer in layers else len(layers)
    depth = place if one.name.phase == "forward" else 2 * len(layers) - place + 1
    explained = updates is not None and one.name.phase == "update" and _pair(one, other) is not None
    formats = () if explained else run.about.get("formats", ())
    plain = SLACK * _unit(one, other, formats) * math.sqrt(max(1, depth) * max(1, one.name.step))
    if updates is None or (explained and updates.drift is not None):
        return plain
    return plain * UNKNOWN if updates.drift is None or one.name.phase == "update" else plain + GAIN * updates.drift


def _unit(one: Entry, other: Entry, formats: Iterable[str]) -> float:
    """The unit in the last place of the coarsest format."""
    formats = {one.first.dtype, other.first.dtype, *formats}
    floating = (getattr(torch, name) for name in formats if getattr(torch, name).is_floating_point)
    return max((torch.finfo(dtype).eps for dtype in floating), default=0.0)


def _line(one: Entry, other: Entry, bound: float, scale: float, ratios: Mapping[str, float], explained: Tensor | None) -> Line:
    name = one.name
    if one.shape != other.shape:
        return Line(name, "other shape", cause=f"{list(one.shape)} against {list(other.shape)}")
    if one.missing or other.missing:
        return Line(name, "fault", math.inf, bound, f"{one.missing or other.missing} elements were logged by no rank")
    if one.summary is None or other.summary is None:
        return Line(name, "too coarse", cause="logs below level 2 hold no values")
    odd = [(entry.summary.nans, entry.summary.infs) for entry in (one, other) if entry.summary is not None]
    if any(map(any, odd)):
        return Line(name, "nan", math.inf, bound, f"NaNs and infinities: {odd[0]} against {odd[1]}")
    values = _values(one, other)
    apart = (values[0] - values[1]).abs()
    if explained is not None:
        apart = (apart - explained).clamp(min=0)
    size = max(_rms(values[1]), scale)
    distance = _rms(apart) / size if size else float(_rms(values[0]) > 0) * math.inf
    if distance <= bound:
        return Line(name, "rounding" if distance else "equal", distance, bound)
    return Line(name, "fault", distance, bound, cause(values[0], values[1], ratios, name.phase))


def _values(one: Entry, other: Entry) -> tuple[Tensor, Tensor]:
    """Samples where both runs have the same, else statistics."""
    found = one.samples, other.samples
    if found[0] is not None and found[1] is not None and len(found[0]) == len(found[1]):
        return found[0], found[1]
    return _statistics(one), _statistics(other)


def _statistics(entry: Entry) -> Tensor:
    assert entry.summary is not None, "asked only from level 2 on"
    found = entry.summary
    size = found.norm / math.sqrt(found.finite) if found.finite else 0.0
    return torch.tensor([found.mean, found.std, size, found.low, found.high], dtype=torch.float64)


def _rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt()) if values.numel() else 0.0


def _ratios(first: Run, second: Run) -> dict[str, float]:
    """Factors that a forgotten or doubled reduction leaves, by what they are called."""
    found: dict[str, float] = {}
    for label, run in (("A", first), ("B", second)):
        sizes: Mapping[str, Any] = run.about.get("mesh", {})
        counts = {f"{axis} ranks of {label}": size for axis, size in sizes.items()}
        counts[f"microbatches of {label}"] = run.about.get("accumulation") or 1
        found.update({what: float(count) for what, count in counts.items() if count > 1})
    return found


CLOSE = 1e-2
"""How near a scaled copy has to come, as a share, to be called one."""


def cause(values: Tensor, others: Tensor, ratios: Mapping[str, float], phase: str = "") -> str:
    """What the difference looks like, in words: A's `values` against B's, in that phase of a step."""
    norm = float(others.norm())
    if not norm or not float(values.norm()):
        return "A is all zeros" if norm else "B is all zeros"
    factor = float(values @ others) / norm**2
    rest = float((values - factor * others).norm()) / float(values.norm())
    if rest <= CLOSE and abs(factor - 1) > rest:
        return _scaled(factor, ratios)
    if torch.allclose(values.sort().values, others.sort().values, rtol=1e-6, atol=0):
        return "the same values in another order: swapped microbatches or samples"
    alike = float(values @ others) / (norm * float(values.norm()))
    if phase in HINTS:
        return f"cosine {alike:.4g}: {HINTS[phase]}"
    if alike > 0.5:
        return f"the same direction up to a cosine of {alike:.4g}: a part of a sum is missing, or stale"
    return f"unrelated values (cosine {alike:.4g}): other inputs, or other random numbers"


HINTS = {
    "reduce": "where activations agree, a part of a sum is missing, or came twice",
    "update": "where gradients agree, the optimizers' states, settings or clipping differ",
}


def _scaled(factor: float, ratios: Mapping[str, float]) -> str:
    for what, size in ratios.items():
        for wanted, words in ((size, f"the number of {what}"), (1 / size, f"one over the number of {what}")):
            if abs(factor - wanted) <= CLOSE * wanted:
                return f"A is {factor:.6g} times B: {words}; a sum or mean over them is missing or done twice"
    return f"A is {factor:.6g} times B"
