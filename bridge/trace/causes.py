"""Causes: why two runs part, said only with what their settings and logs show; else where, what, and what to log next."""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod, sqrt
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bridge.trace.patterns import CLOSE, TINY, scaled
from bridge.trace.record import PHASES, Name

if TYPE_CHECKING:
    from bridge.trace.comparison import Comparison
    from bridge.trace.run import Entry, Run
    from bridge.trace.verdicts import Line


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting that two runs do not have alike; None where one does not have it. A `layout` changes who computes what."""

    path: str
    first: Any
    second: Any
    layout: bool = False

    def __str__(self) -> str:
        return f"{self.path}: {self.first} in A, {self.second} in B"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Where runs part; what is `claimed` of it (empty: nothing is), by which `evidence`; and what to do `next`."""

    where: Name
    claim: str
    evidence: tuple[str, ...]
    next: str


# Settings

LAYOUT = ("parallel.", "batch.", "zero.", "schedule.", "stages.", "recompute.", "debug.", "accumulation", "zero_optimization.")
"""What begins so says who computes what, or what is logged."""
SPEED = ("foreach", "fused", "capturable", "differentiable", "initial_lr", "decoupled_weight_decay", "param_names")
"""Settings of torch's optimizers that are no numbers of the update, or follow from its class."""
SHARED: Mapping[str, tuple[str, ...]] = {
    "optimizer": ("optimizer.name", "optimizer"),
    "learning rate": ("optimizer.lr", "group 0.lr", "optimizer.optimizer.lr"),
    "betas": ("optimizer.betas", "group 0.betas"),
    "eps": ("optimizer.eps", "group 0.eps", "optimizer.adam_eps"),
    "weight decay": ("optimizer.weight_decay", "group 0.weight_decay"),
    "momentum": ("optimizer.momentum", "group 0.momentum"),
}
"""What engines have in common, with its name in each."""


def differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> tuple[Setting, ...]:
    """The settings that two runs' heads do not have alike: all of them for one engine, those that both have for two."""
    ours, theirs = (_values(about.get("settings", {})) for about in (first, second))
    alike = set(ours) & set(theirs)
    if len(alike) * 2 < max(len(ours), len(theirs), 1):
        ours, theirs = _shared(ours), _shared(theirs)
        pairs = [(name, ours[name], theirs[name]) for name in ours if name in theirs]
    else:
        pairs = [(name, ours.get(name), theirs.get(name)) for name in dict.fromkeys((*ours, *theirs))]
    found = [Setting(name, one, other, name.startswith(LAYOUT)) for name, one, other in pairs if not _same(one, other)]
    if first.get("mesh", {}) != second.get("mesh", {}):
        found.append(Setting("ranks", _told(first), _told(second), True))
    if sorted(first.get("formats", ())) != sorted(second.get("formats", ())):
        found.append(Setting("number formats", ", ".join(first.get("formats", ())), ", ".join(second.get("formats", ()))))
    return tuple(sorted(found, key=lambda setting: setting.layout))


def _told(about: Mapping[str, Any]) -> str:
    return ", ".join(f"{axis} {size}" for axis, size in about.get("mesh", {}).items() if size > 1) or "one"


def _values(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _value(value) for name, value in settings.items() if name.rpartition(".")[2] not in SPEED}


def _value(value: Any) -> Any:
    """A number or a list that was written as text, as what it is."""
    if not isinstance(value, str):
        return value
    try:
        return literal_eval(value)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return value


def _shared(settings: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: [settings[key] for key in keys if settings.get(key) is not None] for name, keys in SHARED.items()}
    return {name: str(values[0]).lower() if name == "optimizer" else values[0] for name, values in found.items() if values}


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


# Causes


@dataclass(frozen=True)
class Case:
    """The step in which two runs part, as causes are looked for in it."""

    comparison: Comparison
    first: Line

    @cached_property
    def lines(self) -> tuple[Line, ...]:
        """Of that step."""
        return tuple(line for line in self.comparison.lines if line.name.step == self.first.name.step)

    def of(self, phase: str, kind: str | None = None) -> list[Line]:
        """Those of a phase."""
        return [line for line in self.lines if line.name.phase == phase and kind in (None, line.name.kind)]

    def agree(self, phase: str, kind: str, words: str) -> str | None:
        """That all of a phase and kind agree, in words; None if they do not, or none was logged in both."""
        measured = [line for line in self.of(phase, kind) if line.verdict in ("equal", "rounding")]
        if not measured or any(line.is_fault for line in self.of(phase, kind)):
            return None
        return f"{words} agree to {max(line.distance for line in measured):.1g} ({len(measured)} tensors)"

    @cached_property
    def entries(self) -> tuple[dict[Name, Entry], dict[Name, Entry]]:
        """Of the step, in both runs; in A as the one rank logged it that alone differs, if one does."""
        step = self.first.name.step
        return _entries(self.comparison.first, step, self.rank), _entries(self.comparison.second, step)

    @property
    def rank(self) -> int | None:
        """The only rank of A whose copy differs; None if there are others."""
        return self.first.ranks[0] if len(self.first.ranks) == 1 else None

    @cached_property
    def before(self) -> tuple[dict[Name, Entry], dict[Name, Entry]]:
        """Of the last step before that both have tensors of."""
        steps = sorted(set(self.comparison.first.logged) & set(self.comparison.second.logged), reverse=True)
        for step in (step for step in steps if step < self.first.name.step):
            found = _entries(self.comparison.first, step, self.rank), _entries(self.comparison.second, step)
            if found[0] and found[1]:
                return found
        return {}, {}

    def pair(self, name: Name) -> tuple[Tensor, Tensor] | None:
        """Samples of both."""
        return _pair(self.entries[0].get(_key(name)), self.entries[1].get(_key(name)))

    def changes(self, name: Name) -> tuple[Tensor, Tensor, Tensor] | None:
        """What the update added to the samples of a weight in both runs, and B's weight before it."""
        after, at = self.pair(name), (_key(name._replace(phase=phase)) for phase in ("update", "init"))
        place = next((key for key in (_bare(key) for key in at) if key in self._last), None)
        old = None if place is None else self._last[place]
        if after is None or old is None or old[0].shape != after[0].shape:
            return None
        return after[0] - old[0], after[1] - old[1], old[1]

    @cached_property
    def _last(self) -> dict[tuple[str, str], tuple[Tensor, Tensor]]:
        pairs = ((_bare(name), _pair(entry, self.before[1].get(name))) for name, entry in self.before[0].items() if _kept(name))
        return {name: pair for name, pair in pairs if pair is not None}

    @property
    def settings(self) -> list[Setting]:
        """Those that differ and are no layout."""
        return [setting for setting in self.comparison.settings if not setting.layout]

    def factors(self, lines: Sequence[Line], change: bool = False) -> tuple[float, int] | None:
        """The factor by which A's values are B's in all of these tensors, and how many there are; None if there is none."""
        found = []
        for line in lines:
            both = self.changes(line.name) if change else self.pair(line.name)
            if both is None or not both[1].any():
                continue
            factor, rest = scaled(both[0], both[1])
            if rest > CLOSE:
                return None
            found.append(factor)
        if not found or max(abs(factor - median(found)) for factor in found) > CLOSE * abs(median(found)):
            return None
        return median(found), len(found)


def _entries(run: Run, step: int, rank: int | None = None) -> dict[Name, Entry]:
    """By name, with the copies of that rank where it has others than the first."""
    found = {}
    for entry in run.entries(step):
        copies = (copy for part, copy in entry.copies() if part.rank == rank) if rank is not None else iter(())
        found[_key(entry.name)] = next(copies, entry)
    return found


def _key(name: Name) -> Name:
    return name._replace(layer="", tensor=f"{name.layer}.{name.tensor}".strip("."))


def _bare(name: Name) -> tuple[str, str]:
    return name.kind, name.tensor


def _kept(name: Name) -> bool:
    return name.kind == "weight"


def _pair(one: Entry | None, other: Entry | None) -> tuple[Tensor, Tensor] | None:
    if one is None or other is None or one.samples is None or other.samples is None or one.samples.shape != other.samples.shape:
        return None
    return one.samples, other.samples


Found = tuple[str, list[str]]
Rule = Callable[[Case], Found | None]


def diagnosed(comparison: Comparison) -> Diagnosis:
    """Why two runs part that do. The first rule whose evidence is there has its say."""
    first = comparison.divergence
    assert first is not None, "asked only where they part"
    case = Case(comparison, first)
    for rule in RULES.get(first.name.phase, ()):
        found = rule(case)
        if found:
            return Diagnosis(first.name, found[0], tuple(found[1]), _next(case, True))
    return Diagnosis(first.name, "", tuple(_seen(case)), _next(case, False))


def _seen(case: Case) -> Iterator[str]:
    for phase in PHASES[: PHASES.index(case.first.name.phase)]:
        for kind in dict.fromkeys(line.name.kind for line in case.of(phase)):
            told = case.agree(phase, kind, f"{phase}: {kind}s")
            if told:
                yield told


def _next(case: Case, known: bool) -> str:
    """What to log next."""
    name = case.first.name
    if known:
        return ""
    if name.phase == "init":
        return "compare how both runs make or load their weights"
    if name.phase == "forward":
        return f"log whole tensors (full=True) of {name.layer or 'the model'} in step {name.step}, with what goes into it"
    missing = [field for field, phase in (("layer_outputs", "forward"), ("layer_gradients", "backward")) if not case.of(phase)]
    if name.phase == "update" and not case.of("reduce"):
        missing.append("all_param_gradients")
    return f"log {', '.join(missing) or 'whole tensors (full=True)'} of step {name.step} in both runs"


def _start(case: Case) -> Found | None:
    only = [line for line in case.of("init") if line.verdict in ("only in A", "only in B")]
    if only:
        names = ", ".join(_whole(line.name) for line in only[:3])
        copy = _copy_of(case, only[0])
        if copy:
            return f"{_whole(only[0].name)} is a weight of its own {only[0].verdict[5:]}, and tied in the other run", [copy]
        return "the models do not have the same parameters", [f"{only[0].verdict}: {names}" + ", ..." * (len(only) > 3)]
    faults = [line for line in case.of("init") if line.is_fault]
    kinds = " and ".join(dict.fromkeys(f"{line.name.kind}s" for line in faults))
    told = (
        f"{len(faults)} of {len(case.of('init'))} tensors differ before the first step: {_some([line.name for line in faults])}"
    )
    return f"the runs start from other {kinds}{_on(case)}", [told]


def _copy_of(case: Case, line: Line) -> str:
    side = 0 if line.verdict == "only in A" else 1
    entries = case.entries[side]
    own = entries.get(_key(line.name))
    if own is None or len(own.shape) < 2:
        return ""
    for name, entry in entries.items():
        if entry is not own and entry.shape == own.shape and entry.summary == own.summary:
            return f"it has the same values as {name.tensor} before the first step"
    return ""


def _inputs(case: Case) -> Found | None:
    lines = [line for line in case.of("forward", "input") if line.is_fault]
    if not lines or case.first.name.kind != "input":
        return None
    return "the runs are given other data", [f"{lines[0].name} differs: {lines[0].cause or lines[0].verdict}"]


def _on(case: Case) -> str:
    ranks = case.first.ranks
    return f" on rank {', '.join(map(str, ranks))}" if ranks else ""


def _passes(case: Case) -> Found | None:
    """A rank of one of the runs logged one microbatch several times over."""
    runs = {"A": case.comparison.first, "B": case.comparison.second}
    twice = {label: found for label, run in runs.items() if (found := _twice(run, case.first.name.step))}
    if len(twice) != 1:
        return None
    label, told = next(iter(twice.items()))
    return f"{label} runs more passes in a step than the {runs[label].about.get('accumulation')} that it was told", [told]


def _twice(run: Run, step: int) -> str:
    for entry in run.entries(step):
        name = entry.name
        here = {(part.rank, part.record.microbatch) for part in entry.parts}
        again = [part.rank for part in entry.replicas if (part.rank, part.record.microbatch) in here]
        if name.phase == "forward" and name.kind in ("input", "output") and again:
            return f"rank {again[0]} logged {name} more than once under the number of one microbatch"
    return ""


def _evaluated(case: Case) -> Found | None:
    """One of the runs ran no layer in training mode."""
    lines = [line for line in case.of("forward", "output") if line.verdict != "unseen"]
    verdicts = {line.verdict for line in lines}
    if len(verdicts) != 1 or not verdicts <= {"only in A", "only in B"}:
        return None
    label = "A" if verdicts == {"only in B"} else "B"
    return f"{label} runs no layer in training mode in step {case.first.name.step}: evaluation, or a step too many", [
        f"all {len(lines)} outputs of layers are {case.first.verdict}, and both runs logged them in the step before"
    ]


def _skipped(case: Case) -> Found | None:
    """Some ranks did not run a layer that others ran."""
    name, entry = case.first.name, case.entries[0].get(_key(case.first.name))
    if entry is None or not entry.missing or not name.layer:
        return None
    here = {part.rank for part in (*entry.parts, *entry.replicas)}
    others = {part.rank for other in case.entries[0].values() if other.name.phase == "forward" for part in other.parts}
    gone = sorted(others - here)
    if not gone:
        return None
    told = f"rank {', '.join(map(str, gone))} logged other layers of the step, and nothing of {name.layer}"
    return f"rank {', '.join(map(str, gone))} does not run {name.layer}", [told]


def _layer(case: Case) -> Found | None:
    name = case.first.name
    if case.first.verdict not in ("fault", "nan") or not name.layer:
        return None
    before = [line for line in case.of("forward") if line.name.microbatch == name.microbatch]
    before = before[: next(at for at, line in enumerate(before) if line.name == name)]
    inputs = [line for line in before if line.verdict in ("equal", "rounding")]
    if not inputs:
        return None
    where = _on(case)
    evidence = [f"what runs before it agrees to {max(line.distance for line in inputs):.1g} ({len(inputs)} tensors)"]
    evidence += ["weights agreed after the step before" if name.step > 1 else "weights agreed before the first step"]
    evidence += [case.first.cause] if case.first.cause else []
    if "another order" in case.first.cause:
        return "the runs take the same samples in another order", evidence
    what = "its code, its number format, its random numbers, or weights that were changed after an update"
    return f"{name.layer} itself computes something else{where}: {what}", evidence


def _loss(case: Case) -> Found | None:
    forward = case.agree("forward", "output", "outputs of all layers")
    lines = [line for line in case.of("backward") if line.verdict != "unseen"]
    if forward is None or not lines:
        return None
    found = case.factors(lines)
    if found and abs(found[0] - 1) > CLOSE:
        return f"the loss that backward starts from is {found[0]:.6g} times B's{_counted(case, found[0])}", [
            forward,
            f"every gradient of an activation is {found[0]:.6g} times B's ({found[1]} tensors)",
        ]
    weighed = _weighed(case, lines[0])
    if weighed and case.first is lines[0]:
        return weighed[0], [forward, *weighed[1]]
    if case.first is lines[0]:
        evidence = [forward, "gradients differ from the last layer on"]
        return f"the loss, its targets, or the backward pass of {case.first.name.layer} is another one", evidence
    return f"the backward pass of the layers up to {case.first.name.layer} computes something else", [
        forward,
        f"gradients agree from the last layer to the one after {case.first.name.layer}",
    ]


def _weighed(case: Case, line: Line) -> Found | None:
    """The first gradient of an activation is B's but for a factor that microbatches have of their own."""
    pair = case.pair(line.name)
    if pair is None:
        return None
    counted = pair[1].abs() > 1e-4 * float(pair[1].abs().max())
    factors: list[float] = []
    for ratio in (pair[0][counted] / pair[1][counted]).tolist():
        if not factors or abs(ratio - factors[-1]) > CLOSE * 0.1 * abs(factors[-1]):
            factors.append(ratio)
    most = max(_microbatches(case.comparison.first), _microbatches(case.comparison.second))
    if not 1 < len(factors) <= most or min(factors) <= 0:
        return None
    told = ", ".join(f"{factor:.4g}" for factor in factors)
    what = "A weighs microbatches otherwise than B: a mean over tokens in one, over microbatches in the other"
    return what, [f"the gradient of {line.name.layer}'s input is B's times {told}, from sample to sample"]


def _microbatches(run: Run) -> int:
    """Of a step, over all ranks that take samples of their own."""
    sizes = run.about.get("mesh", {})
    ranks = prod(size for axis, size in sizes.items() if axis not in ("tensor", "pipeline"))
    return int(ranks * (run.about.get("accumulation") or 1))


def _counted(case: Case, factor: float) -> str:
    found: list[str] = []
    for label, run in (("A", case.comparison.first), ("B", case.comparison.second)):
        counts = {f"{axis} ranks": size for axis, size in run.about.get("mesh", {}).items()}
        counts["microbatches of a step"] = run.about.get("accumulation") or 1
        fits = [what for what, size in counts.items() if min(abs(factor - size) / size, abs(factor * size - 1)) <= CLOSE]
        found = found or [f"{what} in {label}" for what in fits if counts[what] > 1]
    one = "" if factor > 1 else "one over "
    return f", {one}the number of {' or of '.join(found)}: a mean over them is missing or done twice" if found else ""


def _gradients(case: Case) -> Found | None:
    lines = [line for line in case.of("reduce", "gradient") if line.verdict != "unseen"]
    faults = [line for line in lines if line.is_fault]
    if not faults or case.first.name.kind != "gradient":
        return None
    backward = case.agree("backward", "input gradient", "gradients of activations") or case.agree("forward", "output", "outputs")
    evidence = [backward] if backward else []
    pairs = {line.name: case.pair(line.name) for line in faults}
    zeros = [name for name, pair in pairs.items() if pair and not pair[0].any()]
    if zeros and len(zeros) == len(faults):
        all_of = len([line for line in lines if line.is_fault or line.distance == 0]) == len(lines)
        what = "no gradient is left when the step begins" if all_of else f"{_some(zeros)} get no gradient"
        return what, [*evidence, f"in A {len(zeros)} of {len(lines)} gradients are all zeros, in B they are not"]
    stale = _stale(case, faults)
    if stale:
        return "gradients of the step before were not cleared", [*evidence, stale]
    found = case.factors(lines)
    if found and abs(found[0] - 1) > CLOSE:
        clipped = _clipped(case)
        if clipped:
            return clipped[0], [*evidence, *clipped[1]]
        return f"all gradients are {found[0]:.6g} times B's{_counted(case, found[0])}", [
            *evidence,
            f"every gradient is {found[0]:.6g} times B's ({found[1]} tensors)",
        ]
    lost = [name for name, pair in pairs.items() if pair and _zeroed(*pair)]
    if lost and len(lost) == len(faults):
        return f"some elements of {_some(lost)} are set to zero after backward", [*evidence, "all other sampled elements agree"]
    if backward and len(faults) < len(lines):
        agreeing = len(lines) - len(faults)
        where = _on(case)
        return f"the gradients of {_some([line.name for line in faults])} alone are not put together as in B{where}", [
            *evidence,
            f"{agreeing} of {len(lines)} gradients agree",
        ]
    return None


NEAR = 8
"""Steps around the one in which runs part that are looked at: a log may have very many."""


def _clipped(case: Case) -> Found | None:
    """The norm of all gradients together is the same in every step of a run, and not in the other, or another one."""
    runs = case.comparison.first, case.comparison.second
    both = sorted(set(runs[0].logged) & set(runs[1].logged) - {0}, key=lambda step: abs(step - case.first.name.step))
    steps = sorted(both[:NEAR])
    norms = [[_norm(run, step) for step in steps] for run in runs]
    if len(steps) < 2 or not all(map(all, norms)):
        return None
    bounds = [_middle(found) for found in norms]
    told = [f"{label}: {', '.join(f'{norm:.4g}' for norm in found)}" for label, found in zip("AB", norms, strict=True)]
    evidence = [f"the norm of all gradients in steps {steps[0]} to {steps[-1]}, {'; '.join(told)}"]
    if bounds[0] and bounds[1]:
        if abs(bounds[0] - bounds[1]) <= CLOSE * bounds[1]:
            return None  # that is no difference
        return f"gradients are clipped to a norm of {bounds[0]:.4g} in A, of {bounds[1]:.4g} in B", evidence
    for label, bound in zip("AB", bounds, strict=True):
        if bound:
            return f"gradients are clipped to a norm of {bound:.4g} in {label} alone", evidence
    return None


def _norm(run: Run, step: int) -> float:
    found = [entry.summary for entry in run.entries(step) if entry.name.kind == "gradient" and entry.name.phase == "reduce"]
    return sqrt(sum(summary.squares for summary in found if summary is not None))


def _middle(norms: Sequence[float]) -> float:
    """The one that all are, or 0."""
    return median(norms) if max(norms) - min(norms) <= 1e-3 * max(norms) else 0.0


def _coarse(case: Case) -> Found | None:
    """The gradients of one run have the digits of a 16-bit format, those of the other have more."""
    faults = [line for line in case.of("reduce", "gradient") if line.is_fault]
    pairs = [pair for pair in map(case.pair, (line.name for line in faults)) if pair]
    for label, side in (("A", 0), ("B", 1)):
        for kind, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
            short = [_is_short(pair[side], dtype) and not _is_short(pair[1 - side], dtype) for pair in pairs]
            near = [float((pair[0] - pair[1]).norm()) < 2 * CLOSE * float(pair[1].norm()) for pair in pairs]
            if len(short) > 1 and all(short) and all(near):
                what = f"{label}'s gradients are numbers of {kind}: they were reduced, or added up, in it"
                return what, [f"all samples of {len(short)} gradients have no more digits than {kind}, in the other run they do"]
    return None


def _is_short(values: Tensor, dtype: torch.dtype) -> bool:
    return bool((values.to(dtype).to(values.dtype) == values).all())


def _stale(case: Case, faults: Sequence[Line]) -> str:
    worst, number = 0.0, 0
    for line in faults:
        pair = case.pair(line.name)
        old = _pair(*(entries.get(_key(line.name._replace(step=case.first.name.step - 1))) for entries in case.before))
        if pair is None or old is None or old[0].shape != pair[0].shape or not old[0].any():
            continue
        rest = float((pair[0] - pair[1] - old[0]).norm()) / max(float(old[0].norm()), TINY)
        worst, number = max(worst, rest), number + 1
    return f"A less B is A's gradient of the step before, to {worst:.1g} ({number} tensors)" if number and worst <= CLOSE else ""


def _zeroed(values: Tensor, others: Tensor) -> bool:
    """Whether A has zeros where B has values, and else the same."""
    zero = (values == 0) & (others != 0)
    return bool(zero.any()) and torch.allclose(values[~zero], others[~zero], rtol=1e-4, atol=float(others.abs().max()) * 1e-6)


UPDATING = ("learning rate", "lr", "betas", "eps", "weight", "momentum", "optimizer", "clip", "nesterov", "maximize", "amsgrad")


def _update(case: Case) -> Found | None:
    lines = [line for line in case.of("update", "weight") if line.verdict != "unseen"]
    faults = [line for line in lines if line.is_fault]
    if not faults:
        return None
    told = case.agree("reduce", "gradient", "gradients")
    evidence = [told] if told else []
    changes = {line.name: case.changes(line.name) for line in faults}
    still = [name for name, change in changes.items() if change and not change[0].any() and change[1].any()]
    if still and len(still) == len(faults):
        what = "nothing is updated" if len(still) == len(lines) else f"{_some(still)} are not updated"
        return what, [*evidence, f"in A {len(still)} of {len(lines)} weights stay as they were, in B they change"]
    decay = _decay(case, faults)
    if decay and told:
        return f"weight decay differs{_decayed(case)}", [*evidence, decay, *map(str, case.settings[:3])]
    settings = [setting for setting in case.settings if any(word in setting.path for word in UPDATING)]
    found = case.factors(lines, change=True)
    if found and told and abs(found[0] - 1) > CLOSE:
        same = [f"every update is {found[0]:.6g} times B's ({found[1]} tensors)"]
        rate = next((setting for setting in settings if _is_rate(setting, found[0])), None)
        if rate:
            return f"the learning rate differs: {rate.first}, {rate.second}", [*evidence, *same, str(rate)]
        return f"updates are {found[0]:.6g} times B's: learning rate or clipping", [*evidence, *same]
    if settings and told:
        what = "; ".join(map(str, settings[:3]))
        return f"the optimizers' settings differ: {what}", [*evidence, f"{len(faults)} updates differ"]
    if told and case.first.ranks:
        return f"the optimizer of rank {', '.join(map(str, case.first.ranks))} does something else", evidence
    return None


def _decayed(case: Case) -> str:
    """The values, where settings tell them."""
    found = [setting for setting in case.settings if setting.path.endswith(("weight_decay", "weight decay"))]
    return "".join(f": {setting.first} in A, {setting.second} in B" for setting in found[:1])


def _is_rate(setting: Setting, factor: float) -> bool:
    if not setting.path.endswith(("lr", "learning rate")) or not isinstance(setting.first, int | float):
        return False
    return isinstance(setting.second, int | float) and abs(setting.first / max(setting.second, TINY) - factor) <= CLOSE * factor


def _decay(case: Case, faults: Sequence[Line]) -> str:
    shares = []
    for line in faults:
        found = case.changes(line.name)
        if found is None or not found[2].any():
            return ""
        share, rest = scaled(found[0] - found[1], found[2])
        if rest > 5 * CLOSE or not share:
            return ""
        shares.append(share)
    return f"updates differ by {median(shares):.3g} of the weights themselves ({len(shares)} tensors)" if shares else ""


def _state(case: Case) -> Found | None:
    line = case.first
    if line.name.kind != "state":
        return None
    pair = case.pair(line.name)
    if line.verdict in ("only in A", "only in B"):
        if line.name.step < 2:
            return f"the optimizer's {line.name.tensor} is set in {line.verdict[-1]} alone", [f"{line.name}: {line.verdict}"]
        told = f"{line.name.tensor} was changed before step {line.name.step}, {line.verdict}"
        return f"the optimizer's {line.name.tensor} changes in one of the runs{_on(case)}", [told]
    told = f": {pair[0].tolist()} in A, {pair[1].tolist()} in B" if pair else ""
    return f"the optimizers run step {line.name.step} with another {line.name.tensor}", [f"{line.name}{told}"]


def _some(names: Sequence[Name]) -> str:
    told = ", ".join(_whole(name) for name in names[:3])
    return f"{told} and {len(names) - 3} more" if len(names) > 3 else told


def _whole(name: Name) -> str:
    return f"{name.layer}.{name.tensor}".strip(".")


RULES: Mapping[str, tuple[Rule, ...]] = {
    "init": (_start,),
    "forward": (_evaluated, _passes, _inputs, _skipped, _layer),
    "backward": (_loss,),
    "reduce": (_state, _coarse, _gradients),
    "update": (_update,),
}
"""What may explain a first difference in a phase, in the order in which they are asked."""
