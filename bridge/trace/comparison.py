"""Comparison: where two runs part, whatever their layouts: rounding or fault, the first tensor, and what it looks like."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor

from bridge.errors import BridgeError
from bridge.trace.adaptive import Updates
from bridge.trace.causes import Diagnosis, Setting, diagnosed, differences
from bridge.trace.patterns import cause
from bridge.trace.record import MEMORY, SHARD, Name
from bridge.trace.run import Entry, Run
from bridge.trace.summary import Summary
from bridge.underway import counted

Verdict = Literal["equal", "rounding", "fault", "nan", "only in A", "only in B", "other shape", "too coarse", "unseen"]

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
    rounding may make it (`bound`); `cause` is what a fault looks like, `ranks` who logged what differs, where not all did. A
    tensor that one of the runs logs nothing of that kind of is "unseen". Of weights, the distance is what adaptive updates do not
    explain by the distance of their gradients.
    """

    name: Name
    verdict: Verdict
    distance: float = 0.0
    bound: float = 0.0
    cause: str = ""
    ranks: tuple[int, ...] = ()

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
    left: tuple[int, ...] = ()
    """Steps that were left out, after the first that differs."""

    @cached_property
    def settings(self) -> tuple[Setting, ...]:
        """The settings that the runs do not have alike."""
        return differences(self.first.about, self.second.about)

    @cached_property
    def diagnosis(self) -> Diagnosis | None:
        """Why they part, as far as their logs show it; None where they do not."""
        return diagnosed(self) if self.divergence else None

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


def compare(first: Run, second: Run, steps: Iterable[int] | None = None, every: bool = True) -> Comparison:
    """Compare the steps that both have whole (or `steps` of them), in order; without `every`, up to the first that differs.
    Raises `BridgeError` if there are none.
    """
    wanted = set(first.steps) & set(second.steps)
    wanted &= wanted if steps is None else set(steps)
    if not wanted:
        raise BridgeError(
            f"{first.folder}, {second.folder}: no step is whole in both; found {_told(first.steps)} and {_told(second.steps)}"
        )
    settings = {**second.about.get("settings", {}), **first.about.get("settings", {})}
    updates = Updates.of(settings) if any(map(_adaptive, (first, second))) else None
    before: Before = {}
    seen: Seen = (set(), set())
    lines: list[Line] = []
    ordered = sorted(wanted)
    for at, step in enumerate(counted(ordered)):
        found = sorted(_step(first, second, step, updates, before, seen), key=lambda line: first.order(line.name))
        lines += found
        if not every and any(line.is_fault for line in found):
            return Comparison(first, second, tuple(lines), tuple(ordered[at + 1 :]))
    return Comparison(first, second, tuple(lines))


def _told(steps: Sequence[int]) -> str:
    return f"steps {steps[0]} to {steps[-1]}" if steps else "no step"


Before = dict[tuple[str, str], Tensor]
"""By layer and parameter, the samples (2, samples) of the weights as both runs logged them last."""


Seen = tuple[set[tuple[str, str]], set[tuple[str, str]]]
"""Phases and kinds that each of two runs has logged so far."""


def _step(first: Run, second: Run, step: int, updates: Updates | None, before: Before, seen: Seen) -> Iterator[Line]:
    ours, theirs = _alike(_shared(first, step), _shared(second, step))
    others, scales, ratios = {_key(entry.name): entry for entry in theirs}, _scales(theirs), _ratios(first, second)
    for sections, entries in zip(seen, (ours, theirs), strict=True):
        sections.update(_section(entry.name) for entry in entries)
    unseen = _unseen(first, second, seen)
    for entry in ours:
        other = others.pop(_key(entry.name), None)
        if other is None:
            verdict: Verdict = "unseen" if unseen(entry.name) else "only in A"
            some = {part.rank for part in (*entry.parts, *entry.replicas)}
            yield Line(entry.name, verdict, ranks=tuple(sorted(some)) if len(some) < first.about["ranks"] else ())
        else:
            bound, scale = _bound(first, entry, other, updates), scales[_section(entry.name)]
            line = _line(entry, other, bound, scale, ratios, _explained(updates, entry, other, scale))
            line = _of_copies(line, entry, other, scale, ratios)
            key, pair = _parameter(entry.name), _pair(entry, other)
            if updates is not None and entry.name.phase == "reduce" and entry.name.kind == "gradient":
                noise = max(line.distance, _unit(entry, other, first.about.get("formats", ())))
                updates.gradient(key, pair, noise, scale)
            if entry.name.kind == "weight" and pair is not None:
                line = _of_change(line, pair - before.get(key, pair), ratios)
                before[key] = pair
            yield line
    yield from (Line(entry.name, "unseen" if unseen(entry.name) else "only in B") for entry in others.values())
    if updates is not None:
        updates.end()


OWNED = ("weight", "gradient", "moment", "replica", "buffer")
"""Kinds that belong to a parameter or buffer, whatever layer a log counts that to."""


def _key(name: Name) -> Name:
    """By which both runs know a tensor: parameters by their whole name."""
    return name._replace(layer="", tensor=f"{name.layer}.{name.tensor}".strip(".")) if name.kind in OWNED else name


def _unseen(first: Run, second: Run, seen: Seen) -> Callable[[Name], bool]:
    """Whether a tensor is one that only one of the runs could log, or was asked to: of a layer that a compiler hides, or of a
    kind of which the other has logged nothing so far.
    """
    hidden = {layer for run in (first, second) for layer in run.about.get("hidden", ())}
    both = seen[0] & seen[1]

    def told(name: Name) -> bool:
        return _section(name) not in both or name.kind == "input" or (name.phase in RUNNING and name.layer in hidden)

    return told


RUNNING = ("forward", "backward")
"""Phases in which layers are seen as they run."""


def _alike(ours: Sequence[Entry], theirs: Sequence[Entry]) -> tuple[list[Entry], list[Entry]]:
    """Both steps' tensors; those that the runs divide among other microbatches are one tensor in both, without samples."""
    numbers: list[dict[Name, set[int | None]]] = []
    for entries in (ours, theirs):
        found: dict[Name, set[int | None]] = defaultdict(set)
        for entry in entries:
            found[entry.name._replace(microbatch=None)].add(entry.name.microbatch)
        numbers.append(found)
    apart = {name for name in numbers[0].keys() & numbers[1].keys() if numbers[0][name] != numbers[1][name]}
    return _joined(ours, apart), _joined(theirs, apart)


def _joined(entries: Sequence[Entry], names: Collection[Name]) -> list[Entry]:
    found: dict[Name, list[Entry]] = {}
    for entry in entries:
        whole = entry.name._replace(microbatch=None)
        found.setdefault(whole if whole in names else entry.name, []).append(entry)
    return [
        Entry(name, tuple(part for entry in parts for part in entry.parts), joined=True) if name in names else parts[0]
        for name, parts in found.items()
    ]


def _of_copies(line: Line, one: Entry, other: Entry, scale: float, ratios: Mapping[str, float]) -> Line:
    """What becomes of a tensor if one of A's ranks logged another copy of it than the first did, and which ranks those are."""
    if line.is_fault:
        return replace(line, ranks=tuple(sorted(set(apart_on(one, other)))))
    for part, entry in one.copies():
        found = _line(entry, other, line.bound, scale, ratios, None)
        if found.is_fault and _line(entry, one, line.bound, scale, ratios, None).is_fault:
            return replace(found, ranks=(part.rank,))
    return line


def apart_on(one: Entry, other: Entry) -> Iterator[int]:
    """The ranks of A whose part differs from the same part in B, where some do and some do not."""
    theirs = {part.record.placement: part.record for part in other.parts}
    pairs = [(part.rank, part.record, theirs.get(part.record.placement)) for part in one.parts]
    if len(pairs) > 1 and all(match is not None for *_, match in pairs):
        odd = [rank for rank, record, match in pairs if match and not _close(record.summary, match.summary)]
        yield from odd if len(odd) < len(pairs) else ()


def _close(one: Summary | None, other: Summary | None) -> bool:
    return one == other or (
        one is not None
        and other is not None
        and math.isclose(one.squares, other.squares, rel_tol=1e-6)
        and math.isclose(one.low, other.low, rel_tol=1e-5, abs_tol=1e-12)
        and math.isclose(one.high, other.high, rel_tol=1e-5, abs_tol=1e-12)
    )


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
    if one.joined != other.joined or (one.shape != other.shape and not one.joined):
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
