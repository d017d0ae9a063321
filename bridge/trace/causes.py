"""Causes: why two runs differ, as far as settings and logs prove it; otherwise the first tensor
that differs, and what to log next.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import prod, sqrt
from statistics import median

import torch
from torch import Tensor

from bridge.trace.case import Case, key_of, pair_of
from bridge.trace.comparison import Comparison, Diagnosis
from bridge.trace.pages.series import read_findings
from bridge.trace.patterns import CLOSE, TINY, fit_factor
from bridge.trace.record import PHASES, Name
from bridge.trace.run import TracedRun
from bridge.trace.settings import values_of
from bridge.trace.tensor_comparison import LOSS
from bridge.trace.tensor_pairs import keywords_of
from bridge.trace.verdicts import TensorVerdict

Found = tuple[str, list[str]]
Rule = Callable[[Case], Found | None]


def diagnose_difference(comparison: Comparison) -> Diagnosis:
    """Return the diagnosis of why two runs differ. It is made by the first rule in `RULES` that
    finds its evidence.
    """
    first = comparison.divergence
    assert first is not None, "expected runs that part"
    case = Case(comparison, first)
    for rule in RULES.get(first.name.phase, ()):
        cause = rule(case)
        if cause:
            return Diagnosis(first.name, cause[0], tuple(cause[1]), _advice_on_next(case, True))
    alone = _find_missing_log(case)
    if alone:
        return Diagnosis(first.name, alone[0], (*_describe_evidence(case), *alone[1]), "")
    return Diagnosis(first.name, "", tuple(_describe_evidence(case)), _advice_on_next(case, False))


PROOFS: Mapping[str, Sequence[str]] = {
    "reduce": (
        "gradient-stale",
        "gradient-lost",
        "gradient-not-reduced",
        "gradient-summed",
        "gradient-averaged-twice",
        "gradient-changed",
        "clip-norms-differ",
        "parameter-replaced",
    ),
    "update": (
        "optimizer-replaced",
        "moments-lost",
        "moments-missing",
        "moments-changed",
        "moments-not-resumed",
        "schedule-not-resumed",
        "updates-lost",
        "update-too-large",
        "update-unexplained",
        "parameter-replaced",
        "weights-changed",
        "cast-stale",
    ),
}
"""For each phase: the ids of findings that explain why two runs first differ in this phase, if only
one of the runs has such a finding. The most certain ids come first.
"""
LATE = ("moments-not-resumed", "schedule-not-resumed")
"""Ids of findings that concern the start of a run but are reported only some steps later."""


def _find_other_ties(case: Case) -> Found | None:
    """Rule: one of the runs has two names for a parameter where the other has two parameters."""
    first, runs = case.first, _runs_in_order(case)
    step = max(first.name.step, 1)
    modes = [run.modes(step, (*first.ranks, 0)[0]) for run in runs]
    # With other layouts, ranks hold other parameters.
    if (
        not all("tied" in one for one in modes)
        or len({str(run.about.get("mesh")) for run in runs}) > 1
    ):
        return None
    for side, label in enumerate("AB"):
        others = [{*tie.split(" and ")} for tie in modes[1 - side]["tied"]]
        heads = tuple(f"{layer}." for layer in runs[1 - side].layers)
        for tie in modes[side]["tied"]:
            names = tie.split(" and ")
            # A layer without a part in it computes the same with it and without.
            inside = first.name.phase != "forward" or f"{first.name.layer}." in tie
            # The other run may have other names for the same parameters.
            if inside and {*names} not in others and all(name.startswith(heads) for name in names):
                return f"{label} ties {tie} to one parameter, {'BA'[side]} does not", [
                    f"both logs say which names are one parameter in step {step}"
                ]
    return None


def _find_changed_weights(case: Case) -> Found | None:
    """Rule: one of the runs found that its weights are not those of the last update."""
    return _find_missing_log(case, ("parameter-replaced", "cast-stale", "weights-changed"))


def _find_missing_log(case: Case, ids: Sequence[str] | None = None) -> Found | None:
    """Rule: one of the runs has a finding in this step that explains the difference, and the other
    run does not. `ids` are the findings that do; the default is those of the phase.
    """
    both = [
        {one.id: one for one in reversed(read_findings(run.folder))} for run in _runs_in_order(case)
    ]
    for id in PROOFS.get(case.first.name.phase, ()) if ids is None else ids:
        for side, label in enumerate("AB"):
            one = both[side].get(id)
            if one is None or id in both[1 - side]:
                continue
            # A change of masters reaches forward only in the next step.
            before = case.first.name.phase == "forward" and "masters" in one.evidence
            if case.first.name.step in (one.step, one.step + before) or (
                id in LATE and case.first.name.step == 1
            ):
                where = f"{one.where}: " if one.where else ""
                evidence = (
                    f"run {label} has the finding {id} in step {one.step}: {where}{one.evidence}"
                )
                return f"in {label}, {one.meaning}", [evidence]
    return None


def _describe_evidence(case: Case) -> Iterator[str]:
    for phase in PHASES[: PHASES.index(case.first.name.phase)]:
        for kind in dict.fromkeys(line.name.kind for line in case.of(phase)):
            sentence = case.agree(phase, kind, f"{phase}: {kind}s")
            if sentence:
                yield sentence


def _advice_on_next(case: Case, has_cause: bool) -> str:
    """Return advice on the tensors to log next, or an empty text if the cause is known."""
    name = case.first.name
    if has_cause:
        return ""
    if name.phase == "init":
        return "compare how both runs make or load their weights"
    if name.phase == "forward":
        return (
            f"log whole tensors (full=True) of {name.layer or 'the model'} in step {name.step}, "
            "and of its inputs"
        )
    missing = [
        field
        for field, phase in (("layer_outputs", "forward"), ("layer_gradients", "backward"))
        if not case.of(phase)
    ]
    if name.phase == "update" and not case.of("reduce"):
        missing.append("all_param_gradients")
    return (
        f"log {', '.join(missing) or 'whole tensors (full=True)'} of step {name.step} in both runs"
    )


def _find_other_start(case: Case) -> Found | None:
    only = [line for line in case.of("init") if line.verdict in ("only in A", "only in B")]
    if only:
        names = ", ".join(_name_of_whole(line.name) for line in only[:3])
        more = ", ..." if len(only) > 3 else ""
        evidence = f"{only[0].verdict}: {names}{more}"
        return "the models do not have the same parameters", [evidence]
    faults = [line for line in case.of("init") if line.is_fault]
    kinds = " and ".join(dict.fromkeys(f"{line.name.kind}s" for line in faults))
    evidence = (
        f"{len(faults)} of {len(case.of('init'))} tensors differ before the first step:"
        f" {_names_text([line.name for line in faults])}"
    )
    return f"the runs start from different {kinds}{_place_text(case)}", [evidence]


def _find_other_inputs(case: Case) -> Found | None:
    lines = [line for line in case.of("forward", "input") if line.is_fault]
    if not lines or case.first.name.kind != "input":
        return None
    evidence = [f"{line.name} differs: {line.cause or line.verdict}" for line in lines[:1]]
    words = [line.name.tensor.partition(":")[2] for line in lines]
    # What tells a model how to read its data, and is no data.
    if all(re.search("mask|position|num_items|cache|lengths", word) for word in words):
        return f"the runs get a different {' and '.join(dict.fromkeys(words))}", evidence
    first = any(line.name.tensor.partition(":")[0] == "0" for line in lines)
    agreeing = sum(not line.is_fault for line in case.of("forward", "input"))
    # Numbers of words are data; a state that is carried over is not of integers.
    if agreeing and not first and any(_is_floating(case, line.name) for line in lines):
        names = " and ".join(dict.fromkeys(line.name.tensor for line in lines))
        return (
            f"the runs pass a different input {names} to the model, which may be data, or a state that "
            "one of the loops carries from pass to pass",
            [*evidence, f"{agreeing} other inputs agree"],
        )
    return "the runs get different data", evidence


def _is_floating(case: Case, name: Name) -> bool:
    entry = case.entries[0].get(key_of(name))
    return entry is None or getattr(torch, entry.parts[0].record.dtype).is_floating_point


def _find_other_arguments(case: Case) -> Found | None:
    """Rule: the script of one run passes arguments that the other does not pass."""
    words = [keywords_of(run.entries(case.first.name.step)) for run in _runs_in_order(case)]
    alone = [[word for word in words[at] if word not in words[1 - at]] for at in (0, 1)]
    # A block behind one that agrees got the same arguments as that one.
    behind = re.search(r"\.[1-9]\d*$", case.first.name.layer)
    if not all(words) or not any(alone) or case.first.name.kind == LOSS or behind:
        return None
    sentences = [
        f"{label} alone passes {' and '.join(own)} to the model"
        for label, own in zip("AB", alone, strict=True)
        if own
    ]
    return ", and ".join(sentences), ["the inputs that both runs pass agree"]


def _place_text(case: Case) -> str:
    return f" on rank {_join_ranks(case.first.ranks)}" if case.first.ranks else ""


def _join_ranks(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))


def _find_other_passes(case: Case) -> Found | None:
    """Rule: in one of the runs, a rank ran more than one pass under the number of one microbatch."""
    runs = {"A": case.comparison.first, "B": case.comparison.second}
    twice = {
        label: passes
        for label, run in runs.items()
        if (passes := _twice(run, case.first.name.step))
    }
    # If both runs do, it is no difference.
    if len(twice) != 1:
        return None
    label, evidence = next(iter(twice.items()))
    if not runs[label].about.get("accumulation"):
        return f"{label} runs layers more than once in a pass of the model, or outside of one", [
            evidence
        ]
    return (
        f"{label} runs more passes in a step than its setting accumulation={runs[label].about.get('accumulation')}",
        [evidence],
    )


def _twice(run: TracedRun, step: int) -> str:
    for entry in run.entries(step):
        name = entry.name
        here = {(part.rank, part.record.microbatch) for part in entry.parts}
        # A copy by the same rank, under the same number: it is no replica of another rank.
        again = [
            part.rank for part in entry.replicas if (part.rank, part.record.microbatch) in here
        ]
        if name.phase == "forward" and name.kind in ("input", "output") and again:
            return f"rank {again[0]} logged {name} more than once in one microbatch"
    return ""


def _find_outside(case: Case) -> Found | None:
    """Rule: one of the runs logged layers in this step, and no input of the model."""
    runs = _runs_in_order(case)
    kinds = [{name.kind for name in side if name.phase == "forward"} for side in case.entries]
    fed = ["input" in side for side in kinds]
    # One setting tells both kinds to be logged; only a pass of the traced module has inputs.
    if fed[0] == fed[1] or not all(kinds) or runs[0].filter != runs[1].filter:
        return None
    label = "BA"[fed[1]]
    return (
        f"{label} runs layers outside of a pass of the traced module: what it wraps is called in "
        "its place, or it gets no tensors",
        [f"{label} logs no input of the model, and outputs of its layers"],
    )


def _find_other_numbers(case: Case) -> Found | None:
    """Rule: the runs ran different numbers of passes in this step, though they have the same
    setting for this number, or none.
    """
    runs = _runs_in_order(case)
    # With other layouts or settings, runs have other numbers of passes.
    if any(runs[0].about.get(key) != runs[1].about.get(key) for key in ("accumulation", "mesh")):
        return None
    every = [_passes_of(run, case.first.name.step) for run in runs]
    ranks = sorted(set(every[0]) | set(every[1]))
    odd = [rank for rank in ranks if every[0].get(rank, 0) != every[1].get(rank, 0)]
    if not odd or not all(every):
        return None
    passes_a, passes_b = (_count_passes_text(counts.get(odd[0], 0)) for counts in every)
    alone = len(odd) < len(ranks)
    where = f" on rank {_join_ranks(odd)}" if alone else ""
    idle = [
        label
        for label, counts in zip("AB", every, strict=True)
        if not any(counts.get(rank) for rank in odd)
    ]
    passes = f"step {case.first.name.step} has {passes_a} in A{where}, and {passes_b} in B"
    if idle:
        return _idle_text(idle[0], case, where), [passes]
    return f"the optimizer steps after {passes_a} in A{where}, and after {passes_b} in B", [passes]


def _count_passes_text(count: int) -> str:
    return f"{count} passes" if count > 1 else f"{count or 'no'} pass"


def _passes_of(run: TracedRun, step: int) -> dict[int, int]:
    """Return the number of forward passes that each rank logged in a step, by rank."""
    passes = {
        (part.rank, part.record.microbatch)
        for entry in run.entries(step)
        if entry.name.phase == "forward" and entry.name.kind in ("input", "output")
        for part in (*entry.parts, *entry.replicas)
    }
    counts: dict[int, int] = {}
    for rank, _ in passes:
        counts[rank] = counts.get(rank, 0) + 1
    return counts


def _find_evaluation(case: Case) -> Found | None:
    """Rule: one of the runs logged no output of any layer in this step, so it ran no layer in
    training mode.
    """
    lines = [line for line in case.of("forward", "output") if line.verdict != "unseen"]
    verdicts = {line.verdict for line in lines}
    if len(verdicts) != 1 or not verdicts <= {"only in A", "only in B"}:
        return None
    label, side = ("A", 0) if verdicts == {"only in B"} else ("B", 1)
    last = max(
        (
            name.step
            for name in case.before[side]
            if (name.phase, name.kind) == ("forward", "output")
        ),
        default=None,
    )
    if last is None:
        return None
    return (
        _idle_text(label, case),
        [
            f"all {len(lines)} outputs of layers are {case.first.verdict}; in step {last} both runs logged outputs"
        ],
    )


def _idle_text(label: str, case: Case, where: str = "") -> str:
    return (
        f"{label} runs no layer in training mode in step {case.first.name.step}{where}: it evaluates, "
        "makes a step too many, or trains another copy of the model"
    )


def _find_layer_skip(case: Case) -> Found | None:
    """Rule: some ranks did not run a layer that others ran."""
    name, entry = case.first.name, case.entries[0].get(key_of(case.first.name))
    if entry is None or not entry.missing or not name.layer:
        return None
    here = {part.rank for part in (*entry.parts, *entry.replicas)}
    others = {
        part.rank
        for other in case.entries[0].values()
        if other.name.phase == "forward"
        for part in other.parts
    }
    absent_ranks = sorted(others - here)
    if not absent_ranks:
        return None
    evidence = f"rank {_join_ranks(absent_ranks)} logged other layers in this step, and no output of {name.layer}"
    return f"rank {_join_ranks(absent_ranks)} does not run {name.layer}", [evidence]


def _find_other_modes(case: Case) -> Found | None:
    """Rule: a part of the first layer that differs is in evaluation mode in one run alone, or
    parameters are frozen in one run alone.
    """
    name, rank = case.first.name, (*case.first.ranks, 0)[0]
    modes = [run.modes(name.step, rank) for run in _runs_in_order(case)]
    kind, words = ("evaluating", "in evaluation mode")
    if name.phase != "forward":
        kind, words = "frozen", "frozen"
    if (
        not all(modes)
        or not name.layer
        or (case.first.verdict == "fault" and name.phase != "forward")
    ):
        return None
    for side, label in enumerate("AB"):
        alone = [
            one for one in modes[side].get(kind, ()) if one not in modes[1 - side].get(kind, ())
        ]
        inside = [
            one
            for one in alone
            if f"{one}.".startswith(f"{name.layer}.") or f"{name.layer}.".startswith(f"{one}.")
        ]
        few = inside if kind == "evaluating" else alone
        if few:
            verb = "is" if len(few) == 1 else "are"
            return f"{_layer_names_text(few)} {verb} {words} in {label} alone{_place_text(case)}", [
                f"{len(alone)} of the model's {'modules' if kind == 'evaluating' else 'parameters'} in step {name.step}"
            ]
    return None


def _find_layer_fault(case: Case) -> Found | None:
    name = case.first.name
    if case.first.verdict not in ("fault", "nan") or not name.layer:
        return None
    before = [line for line in case.of("forward") if line.name.microbatch == name.microbatch]
    # Lines are in order of execution: these ran before the first that differs.
    before = before[: next(at for at, line in enumerate(before) if line.name == name)]
    inputs = [line for line in before if line.verdict in ("equal", "rounding")]
    if not inputs:
        return None
    between = [
        layer
        for layer in case.layers_without_tensors("forward", "output")
        if case.places.get(layer, 0) < case.places[name.layer]
    ]
    after = max((case.places.get(line.name.layer, -1) for line in inputs), default=-1)
    hidden = sorted(
        (layer for layer in between if case.places.get(layer, 0) > after),
        key=lambda layer: case.places[layer],
    )
    evidence = [
        f"the layers before {name.layer} agree to {max(line.distance for line in inputs):.1g} "
        f"({len(inputs)} tensors)"
    ]
    step, weights = case.weights(name.layer)
    # Weights that agreed earlier may have been changed since.
    sure = step == name.step - 1 and all(line.verdict in ("equal", "rounding") for line in weights)
    if sure:
        after_step = f"after step {step}" if step else "before the first step"
        the_weights = (
            f"the weights of {name.layer}" if weights[0].name.layer == name.layer else "all weights"
        )
        evidence.append(f"{the_weights} agreed {after_step} ({len(weights)} tensors)")
    evidence += [case.first.cause] if case.first.cause else []
    if "another order" in case.first.cause:
        return "the runs take the same samples in another order", evidence
    weight_cause = (
        "weights that were changed after an update"
        if sure
        else "weights (the logs do not show whether they were equal)"
    )
    ways = (
        f"because of the layer's code, settings, number format, random numbers, {weight_cause}, or the "
        "inputs that the model's own code passes to the layer"
    )
    if hidden:
        evidence.append(
            f"the logs have no outputs of {_layer_names_text(hidden)} to compare; these layers run before {name.layer}"
        )
        return (
            f"{name.layer} is the first layer whose outputs differ{_place_text(case)}, as far as they were logged; "
            f"the cause may also lie in {_layer_names_text(hidden)}",
            evidence,
        )
    return (
        f"{name.layer} is the first layer whose outputs differ{_place_text(case)}: {ways}",
        evidence,
    )


def _layer_names_text(layers: Sequence[str]) -> str:
    rest = len(layers) - 3
    return ", ".join(layers[:3]) + (f" and {rest} more" if rest > 0 else "")


def _find_loss_fault(case: Case) -> Found | None:
    name = case.first.name
    lines = [
        line
        for line in case.of("backward")
        if line.verdict != "unseen" and line.name.microbatch == name.microbatch
    ]
    which = "" if name.microbatch is None else f" in microbatch {name.microbatch}"
    forward = case.agree("forward", "output", "outputs of all layers")
    if forward is None or not lines or case.layers_without_tensors("forward", "output"):
        return None
    fit = case.factors(lines)
    if fit and abs(fit[0] - 1) > CLOSE:
        same = [
            forward,
            f"every gradient of an activation in A is {fit[0]:.6g} times B's ({fit[1]} tensors)",
        ]
        loss = f"the loss that A's backward pass starts from is {fit[0]:.6g} times B's{which}{_place_text(case)}"
        # Gradients that agree again were divided by the factor in between.
        after = case.agree("reduce", "gradient", "gradients")
        if after:
            ways = "a loss scale" if _leaves_gradients(case) else "a loss scale, clipping or both"
            return (
                f"{loss}, but the gradients agree before the update, as {ways} would make them",
                [*same, after],
            )
        return f"{loss}{_count_note(case, fit[0])}", same
    hidden = [
        layer
        for layer in case.layers_without_tensors("backward", "input gradient")
        if _runs_later(case, layer)
    ]
    weighting = _find_loss_weight(case, lines[0])
    if weighting and case.first is lines[0]:
        return weighting[0], [forward, *weighting[1]]
    layer = name.layer
    if hidden and not any(
        line is not case.first and _runs_later(case, line.name.layer) for line in lines
    ):
        gap = f"the logs have no gradients of {_layer_names_text(hidden)} to compare; these layers run after {layer}"
        return (
            f"the loss, its targets, or the backward pass of {layer} or of a later layer differs",
            [forward, gap],
        )
    if case.first is lines[0]:
        return f"the loss, its targets, or the backward pass of {layer} differs{which}", [
            forward,
            "gradients differ already in the last layer, where backward starts",
        ]
    others = f" or of {_layer_names_text(sorted(hidden))}" if hidden else ""
    evidence = [forward, f"gradients agree in all layers after {layer}"]
    if case.first.verdict in ("only in A", "only in B"):
        label, other = ("A", "B") if case.first.verdict == "only in A" else ("B", "A")
        return (
            f"the backward pass of {layer} computes a gradient of its input in {label} alone: what runs before is "
            f"trained in {label} alone, or is cut off from the loss in {other}",
            evidence,
        )
    ways = "code, number format, recomputation, weights, or a part of the loss that starts from its input or inside of it"
    return (
        f"the backward pass of {layer}{others} computes different values: because of its {ways}",
        evidence,
    )


def _leaves_gradients(case: Case) -> bool:
    """Return whether both runs logged that clipping left the gradients of this step as they were."""
    lines = (
        steps.get(case.first.name.step)
        for run in _runs_in_order(case)
        for steps in run.lines.values()
    )
    return all(line is not None and line.read().clip == 1 for line in lines)


def _runs_later(case: Case, layer: str) -> bool:
    """Return whether a layer runs after the layer of the first tensor that differs."""
    return case.places.get(layer, -1) > case.places.get(case.first.name.layer, -1)


def _find_loss_weight(case: Case, line: TensorVerdict) -> Found | None:
    """Rule: in each microbatch, A's gradient of the activation where backward starts is B's
    gradient times a factor, and the factors of the microbatches differ.
    """
    pair = case.pair(line.name)
    if pair is None:
        return None
    # Ratios of very small values are rounding.
    mask = pair[1].abs() > 1e-4 * float(pair[1].abs().max())
    if bool((pair[0][pair[1] == 0] != 0).any()):
        return None  # what does not count in B does in A
    factors: list[float] = []
    for ratio in (pair[0][mask] / pair[1][mask]).tolist():
        # Samples lie one microbatch after the other: another factor begins another one.
        if not factors or abs(ratio - factors[-1]) > CLOSE * 0.1 * abs(factors[-1]):
            factors.append(ratio)
    most = max(
        _count_microbatches(case.comparison.first), _count_microbatches(case.comparison.second)
    )
    # One factor has another cause; more than there are microbatches are not their weights.
    if not 1 < len(factors) <= most or min(factors) <= 0:
        return None
    factors_text = ", ".join(f"{factor:.4g}" for factor in factors)
    other = sorted({round(factor, 4) for factor in factors if abs(factor - 1) > CLOSE})
    if line.ranks and len(other) == 1:
        return (
            f"the loss that A's backward pass starts from is {other[0]:.6g} times B's{_place_text(case)}",
            [f"on all other ranks, the gradients of the input of {line.name.layer} agree"],
        )
    what = "A and B weigh microbatches differently: one run may take a mean over tokens, the other run over microbatches"
    return what, [
        f"A's gradient of the input of {line.name.layer} is B's, multiplied by another factor in each microbatch: {factors_text}"
    ]


def _count_microbatches(run: TracedRun) -> int:
    """Return the number of microbatches in a step, summed over all ranks that process different
    samples.
    """
    sizes = run.about.get("mesh", {})
    ranks = prod(size for axis, size in sizes.items() if axis not in ("tensor", "pipeline"))
    return int(ranks * (run.about.get("accumulation") or 1))


def _count_note(case: Case, factor: float) -> str:
    matches: list[str] = []
    for label, run in (("A", case.comparison.first), ("B", case.comparison.second)):
        counts = {f"{axis} ranks": size for axis, size in run.about.get("mesh", {}).items()}
        counts["microbatches of a step"] = run.about.get("accumulation") or 1
        fits = [
            what
            for what, size in counts.items()
            if min(abs(factor - size) / size, abs(factor * size - 1)) <= CLOSE
        ]
        matches = matches or [f"{what} in {label}" for what in fits if counts[what] > 1]
    inverse = "" if factor > 1 else "one over "
    counts_of = " or of ".join(matches)
    note = f"; this factor is {inverse}the number of {counts_of}, as if a mean was missing or done twice"
    return note if matches else ""


def _find_gradient_fault(case: Case) -> Found | None:
    lines = [line for line in case.of("reduce", "gradient") if line.verdict != "unseen"]
    faults = [line for line in lines if line.is_fault]
    if not faults or case.first.name.kind != "gradient":
        return None
    backward = case.agree("backward", "input gradient", "gradients of activations") or case.agree(
        "forward", "output", "outputs"
    )
    evidence = [backward] if backward else []
    only = {line.verdict for line in faults}
    if len(only) == 1 and only <= {"only in A", "only in B"} and not case.first.ranks:
        label = case.first.verdict[-1]
        statement = f"{_names_text([line.name for line in faults])} are trained in {label} alone"
        evidence.append(f"{len(faults)} of {len(lines)} gradients are {case.first.verdict}")
        return f"{statement}: the other run has frozen them, or its model lacks them", evidence
    pairs = {line.name: case.pair(line.name) for line in faults}
    zeros = [name for name, pair in pairs.items() if pair and not pair[0].any()]
    if zeros and len(zeros) == len(faults):
        every = [case.pair(line.name) for line in lines]
        all_of = all(pair is None or not pair[0].any() for pair in every)
        what = (
            "no gradient is left in A when the optimizer steps"
            if all_of
            else f"{_names_text(zeros)} get no gradient"
        )
        return what, [
            *evidence,
            f"{len(zeros)} of {len(lines)} gradients are all zeros in A, but not in B",
        ]
    # Before factors: gradients of two steps that are alike add up to nearly a multiple.
    stale = _stale_text(case, faults)
    if stale:
        return "the gradients of the step before were not cleared in A", [*evidence, stale]
    fit = case.factors(lines)
    if fit and abs(fit[0] - 1) > CLOSE:
        clipping = _find_logged_clip(case, fit[0]) or _find_clipping(case)
        if clipping:
            return clipping[0], [*evidence, *clipping[1]]
        return (
            f"all gradients of A are {fit[0]:.6g} times B's{_place_text(case)}{_count_note(case, fit[0])}",
            [*evidence, f"every gradient of A is {fit[0]:.6g} times B's ({fit[1]} tensors)"],
        )
    limit = _limit_of([pair for pair in pairs.values() if pair])
    if limit:
        evidence.append("beyond this, A has the bound with B's sign; elsewhere both agree")
        return f"elements of gradients are clipped to at most {limit:.4g} in A alone", evidence
    holes = [name for name, pair in pairs.items() if pair and _has_extra_zeros(*pair)]
    if holes and len(holes) == len(faults):
        what = f"some elements of the gradients of {_names_text(holes)} are zero in A alone: they were dropped, or never computed"
        return what, [*evidence, "all other sampled elements agree"]
    if backward and len(faults) < len(lines):
        agreeing = len(lines) - len(faults)
        several = any(
            size > 1 for run in _runs_in_order(case) for size in run.about.get("mesh", {}).values()
        )
        combination = "combined over ranks" if several else "added up"
        what = (
            f"only the gradients of {_names_text([line.name for line in faults])} are computed, {combination}, or "
            f"changed differently from B{_place_text(case)}"
        )
        own = case.factors(faults)
        same = (
            [f"the gradients that differ are {own[0]:.6g} times B's ({own[1]} tensors)"]
            if own
            else []
        )
        return what, [*evidence, f"{agreeing} of {len(lines)} gradients agree", *same]
    return None


NEAR = 8
"""Maximum number of steps, nearest to the first step that differs, in which the norms of gradients
are compared.
"""


def _find_logged_clip(case: Case, fit: float) -> Found | None:
    """Rule: the factors by which both runs clipped explain the factor between their gradients."""
    step, runs = case.first.name.step, _runs_in_order(case)
    clips = [
        next(
            (line.read().clip for line in (one.get(step) for one in run.lines.values()) if line),
            None,
        )
        for run in runs
    ]
    one, other = (1.0 if clip is None else clip for clip in clips)
    # An overflow clips by 0, and a norm that is no number by none.
    if not (one > 0 and other > 0) or one == other or abs(one / other - fit) > CLOSE * fit:
        return None
    norms = [_gradient_norm(run, step) for run in runs]
    texts = [
        f"of {norm:.4g} in {label}"
        for label, norm, clip in zip("AB", norms, (one, other), strict=True)
        if clip < 1
    ]
    evidence = (
        f"in step {step}, clipping multiplied gradients by {one:.4g} in A and {other:.4g} in B"
    )
    alone = " alone" if len(texts) == 1 else ""
    return f"gradients are clipped or normalised to a norm {', and '.join(texts)}{alone}", [
        evidence
    ]


def _gradient_norm(run: TracedRun, step: int) -> float:
    """Return the norm of all gradients of a step, as far as they were logged."""
    gradients = (
        one.summary
        for one in run.entries(step)
        if one.name.phase == "reduce" and one.name.kind == "gradient"
    )
    return sqrt(sum(part.squares for part in gradients if part is not None))


def _find_clipping(case: Case) -> Found | None:
    """Rule: the norm of all gradients is the same in every step of one run; in the other run it
    varies, or has another constant value.
    """
    runs = case.comparison.first, case.comparison.second
    both = sorted(
        set(runs[0].steps_with_all_tensors) & set(runs[1].steps_with_all_tensors) - {0},
        key=lambda step: abs(step - case.first.name.step),
    )
    steps = sorted(both[:NEAR])
    norms = [[_gradient_norm(run, step) for step in steps] for run in runs]
    if len(steps) < 2 or not all(map(all, norms)):
        return None
    bounds = []
    for run, series in zip(runs, norms, strict=True):
        # Other samples have gradients of another norm: one that stays the same was set by clipping.
        same = max(series) - min(series) <= 1e-3 * max(series)
        bounds.append(median(series) if same and _samples_vary(run, steps) else 0.0)
    of_a, of_b = (", ".join(f"{norm:.4g}" for norm in series) for series in norms)
    evidence = [
        f"in steps {steps[0]} to {steps[-1]}, with other samples in each step, the norm of all gradients is"
        f" {of_a} in A; {of_b} in B"
    ]
    if bounds[0] and bounds[1]:
        if abs(bounds[0] - bounds[1]) <= CLOSE * bounds[1]:
            return None  # that is no difference
        return (
            f"gradients are clipped or normalised to a norm of {bounds[0]:.4g} in A, and of {bounds[1]:.4g} in B",
            evidence,
        )
    for at, (label, bound) in enumerate(zip("AB", bounds, strict=True)):
        # The other run was bounded in the same way in some steps, and not or differently in others.
        if bound and min(abs(norm - bound) for norm in norms[1 - at]) <= 1e-3 * bound:
            return (
                f"gradients are clipped or normalised to a norm of {bound:.4g} in all steps of {label}, "
                f"and in some steps of {'BA'[at]}",
                evidence,
            )
        if bound:
            return (
                f"gradients are clipped or normalised to a norm of {bound:.4g} in {label} alone",
                evidence,
            )
    return None


def _samples_vary(run: TracedRun, steps: Sequence[int]) -> bool:
    """Return whether each of these steps has other samples than the step before. Return False if a
    step has no logged samples.
    """
    samples = [
        [
            (one.name.tensor, one.name.microbatch, str(one.summary))
            for one in run.entries(step)
            if one.name.kind == "input"
        ]
        for step in steps
    ]
    return all(samples) and all(one != other for one, other in pairwise(samples))


def _find_coarse_format(case: Case) -> Found | None:
    """Rule: the gradients of one run have only the precision of a 16-bit format, while those of
    the other run are more precise.
    """
    faults = [line for line in case.of("reduce", "gradient") if line.is_fault]
    pairs = [pair for pair in map(case.pair, (line.name for line in faults)) if pair]
    for label, side in (("A", 0), ("B", 1)):
        for kind, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
            short = [
                _is_short(pair[side], dtype) and not _is_short(pair[1 - side], dtype)
                for pair in pairs
            ]
            # Besides their digits, both runs' values have to agree.
            near = [
                float((pair[0] - pair[1]).norm()) < 2 * CLOSE * float(pair[1].norm())
                for pair in pairs
            ]
            if len(short) > 1 and all(short) and all(near):
                what = (
                    f"{label}'s gradients have only the precision of {kind}: they were computed, "
                    "reduced or summed in this format"
                )
                return what, [
                    f"all sampled elements of {len(short)} gradients are exact in {kind}; in the other run "
                    "some elements are not"
                ]
    return None


def _is_short(values: Tensor, dtype: torch.dtype) -> bool:
    return bool((values.to(dtype).to(values.dtype) == values).all())


def _stale_text(case: Case, faults: Sequence[TensorVerdict]) -> str:
    worst, number = 0.0, 0
    for line in faults:
        pair = case.pair(line.name)
        old = pair_of(
            *(
                entries.get(key_of(line.name._replace(step=case.first.name.step - 1)))
                for entries in case.before
            )
        )
        if pair is None or old is None or old[0].shape != pair[0].shape or not old[0].any():
            continue
        # If nothing was cleared, A's gradient is B's plus A's own of the step before.
        rest = float((pair[0] - pair[1] - old[0]).norm()) / max(float(old[0].norm()), TINY)
        worst, number = max(worst, rest), number + 1
    return (
        f"A's gradients minus B's equal A's gradients of the step before, up to {worst:.1g} ({number} tensors)"
        if number and worst <= CLOSE
        else ""
    )


def _limit_of(pairs: Sequence[tuple[Tensor, Tensor]]) -> float | None:
    """Return the bound to which some elements of A are reduced, while the others are those of B.
    Return None if there is none.
    """
    if not pairs:
        return None
    values, others = (
        torch.cat([one.flatten() for one in side]) for side in zip(*pairs, strict=True)
    )
    limit = float(values.abs().max())
    beyond, room = others.abs() > limit, 1e-6 * limit
    agree = torch.allclose(values, others.clamp(-limit, limit), rtol=1e-4, atol=room)
    # A single element, and a tensor without others, fit any bound.
    return limit if agree and int(beyond.sum()) > 1 and not bool(beyond.all()) else None


def _has_extra_zeros(values: Tensor, others: Tensor) -> bool:
    """Return whether A has zeros where B has other values, and equals B in all other elements."""
    zero = (values == 0) & (others != 0)
    return bool(zero.any()) and torch.allclose(
        values[~zero], others[~zero], rtol=1e-4, atol=float(others.abs().max()) * 1e-6
    )


UPDATING = (
    "learning rate",
    "lr",
    "betas",
    "eps",
    "weight",
    "momentum",
    "optimizer",
    "clip",
    "nesterov",
    "maximize",
    "amsgrad",
)


def _find_update_fault(case: Case) -> Found | None:
    lines = [line for line in case.of("update", "weight") if line.verdict != "unseen"]
    faults = [line for line in lines if line.is_fault]
    buffers = [line.name for line in case.of("update", "buffer") if line.is_fault]
    if not faults:
        what = f"only {_names_text(buffers)} are updated differently{_place_text(case)}"
        ways = "by other code or settings, by each rank alone, or from values that were reset or changed before"
        agree = f"{len(lines)} updates of weights agree"
        return (f"{what}: {ways}", [agree]) if buffers and lines else None
    agreement = case.agree("reduce", "gradient", "gradients")
    evidence = [agreement] if agreement else []
    changes = {line.name: case.changes(line.name) for line in faults}
    still = [
        name
        for name, change in changes.items()
        if change and not change[0].any() and change[1].any()
    ]
    if still and len(still) == len(faults):
        what = (
            "nothing is updated"
            if len(still) == len(lines)
            else f"{_names_text(still)} are not updated"
        )
        return what, [
            *evidence,
            f"{len(still)} of {len(lines)} weights do not change in A, but change in B",
        ]
    # Gradients that differ make updates differ: nothing more is claimed.
    if not agreement:
        return None
    # Before settings: what decay does shows in the numbers, whatever the settings say.
    decay = _find_decay(case, faults)
    if decay:
        return f"weight decay differs: {decay[0]}", [*evidence, *decay[1]]
    candidates = [
        setting for setting in case.settings if not setting.path.startswith("number format")
    ]
    settings = [setting for setting in candidates if any(word in setting.path for word in UPDATING)]
    fit = case.factors(lines, change=True)
    if fit and abs(fit[0] - 1) > CLOSE:
        same = [f"every update of A is {fit[0]:.6g} times B's ({fit[1]} tensors)"]
        for setting in settings:
            one, other = setting.first, setting.second
            rates = setting.path.endswith(("lr", "learning rate"))
            numbers = isinstance(one, int | float) and isinstance(other, int | float)
            if rates and numbers and abs(one / max(other, TINY) - fit[0]) <= CLOSE * fit[0]:
                return f"the learning rate differs: {one} in A, {other} in B", [
                    *evidence,
                    *same,
                    str(setting),
                ]
        rate_evidence = case.agree("reduce", "state", "learning rates")
        ways = "clipping in the optimizer" if rate_evidence else "learning rate, clipping"
        what = (
            f"the updates of A are {fit[0]:.6g} times B's{_place_text(case)}:"
            f" a cause may be {ways}, or two updates in a step"
        )
        return what, [*evidence, *same, *filter(None, [rate_evidence])]
    # What a run found in itself is more than which updates differ.
    alone = _find_missing_log(case)
    if alone:
        return alone[0], [*evidence, *alone[1]]
    if settings and 2 * len(faults) > len(lines):
        named_settings = "; ".join(map(str, settings[:3]))
        return f"the optimizers' settings differ: {named_settings}", [
            *evidence,
            f"{len(faults)} of {len(lines)} updates differ",
        ]
    if case.first.ranks:
        update = f"the update of rank {_join_ranks(case.first.ranks)} differs"
        return (
            f"{update}: because of the optimizer there, or of something else that changes weights",
            evidence,
        )
    if len(faults) < len(lines):
        statement = f"only {_names_text([line.name for line in faults])} change differently from B"
        shares = _weight_shares(case, faults)
        share = (
            f"where the updates of A and B differ, they differ by {median(shares):.3g} times the weights"
            if shares
            else ""
        )
        return (
            f"{statement}: because of separate settings, of the optimizer's state, or of something other than the optimizer",
            [
                *evidence,
                f"{len(lines) - len(faults)} of {len(lines)} weights agree",
                *filter(None, [share]),
            ],
        )
    return None


def _find_decay(case: Case, faults: Sequence[TensorVerdict]) -> tuple[str, list[str]] | None:
    """Return the weight decays of both runs as text, with the evidence, if they explain the
    different updates; otherwise None.

    They explain the updates if two conditions hold: the two runs' updates of each weight differ by
    the same share of the weight, and this share is a learning rate times the difference of the two
    decays.
    """
    shares, decays = (
        _weight_shares(case, faults),
        [_numbers_of(run, "weight_decay", "weight decay") for run in _runs_in_order(case)],
    )
    rates = {
        rate for run in _runs_in_order(case) for rate in _numbers_of(run, "lr", "learning rate")
    }
    # A schedule changes the rate: the settings have that of the start, the log that of the step.
    for line in case.of("reduce", "state"):
        pair = case.pair(line.name) if line.name.tensor.endswith(("learning rate", "lr")) else None
        for values in pair or ():
            rates.update(map(float, values.tolist()))
    if (
        not shares
        or decays[0] == decays[1]
        or max(shares) - min(shares) > 10 * CLOSE * max(map(abs, shares))
    ):
        return None
    share, decay_values = median(shares), {*decays[0], *decays[1], 0.0}
    steps = {
        rate * (one - other): (rate, one, other)
        for rate in rates
        for one in decay_values
        for other in decay_values
    }
    # An update takes rate * decay * weight away: A's less B's is -rate * (one - other) of it.
    fitting = next(
        (
            step
            for difference, step in steps.items()
            if abs(difference + share) <= 10 * CLOSE * abs(share)
        ),
        None,
    )
    if fitting is None:
        return None
    rate, one, other = fitting
    names = (" and ".join(map(str, sorted(numbers, reverse=True))) or "none" for numbers in decays)
    words = dict(zip("AB", names, strict=True))
    return f"{words['A']} in A, {words['B']} in B", [
        f"the runs' updates differ by {share:.3g} times the weights ({len(shares)} tensors)",
        f"a learning rate of {rate:g} with decays of {one:g} and {other:g} makes a difference of {-rate * (one - other):.3g}",
    ]


def _runs_in_order(case: Case) -> tuple[TracedRun, TracedRun]:
    return case.comparison.first, case.comparison.second


def _numbers_of(run: TracedRun, *names: str) -> set[float]:
    """Return the values that a setting has in the parameter groups of a run. `names` are the
    endings of the names that the setting may have.
    """
    settings = values_of(run.about.get("settings", {}))
    values = (value for path, value in settings.items() if path.endswith(names))
    return {float(value) for value in values if isinstance(value, int | float)}


def _weight_shares(case: Case, faults: Sequence[TensorVerdict]) -> list[float]:
    """Return, for each weight, the number by which the weight has to be multiplied to give the
    difference between the two runs' updates. Return an empty list if there is no such number for
    one of the weights.
    """
    shares = []
    for line in faults:
        changes = case.changes(line.name)
        if changes is None or not changes[2].any():
            return []
        share, rest = fit_factor(changes[0] - changes[1], changes[2])
        if rest > 5 * CLOSE or not share:
            return []
        shares.append(share)
    return shares


def _find_state_fault(case: Case) -> Found | None:
    line = case.first
    if line.name.kind != "state":
        return None
    if line.verdict in ("only in A", "only in B"):
        if line.name.step < 2:
            return f"the optimizer's {line.name.tensor} is set in {line.verdict[-1]} alone", [
                f"{line.name}: {line.verdict}"
            ]
        only_in_one_run = line.verdict
        evidence = f"{line.name.tensor} was changed before step {line.name.step} {only_in_one_run}"
        return (
            f"the optimizer's {line.name.tensor} changes in one of the runs{_place_text(case)}",
            [evidence],
        )
    both = [side.get(key_of(line.name)) for side in case.entries]
    texts = [one.samples.tolist() for one in both if one is not None and one.samples is not None]
    values = f" is {texts[0]} in A and {texts[1]} in B" if len(texts) == 2 else ""
    return f"the optimizers run step {line.name.step} with a different {line.name.tensor}", [
        f"{line.name}{values}"
    ]


def _names_text(names: Sequence[Name]) -> str:
    text = ", ".join(_name_of_whole(name) for name in names[:3])
    rest = len(names) - 3
    return f"{text} and {rest} more" if rest > 0 else text


def _name_of_whole(name: Name) -> str:
    return f"{name.layer}.{name.tensor}".strip(".")


RULES: Mapping[str, tuple[Rule, ...]] = {
    "init": (_find_other_ties, _find_other_start),
    "forward": (
        _find_evaluation,
        _find_outside,
        _find_other_passes,
        _find_other_numbers,
        _find_other_inputs,
        _find_layer_skip,
        _find_other_modes,
        _find_other_ties,
        _find_other_arguments,
        _find_changed_weights,
        _find_layer_fault,
    ),
    "backward": (
        _find_outside,
        _find_other_ties,
        _find_other_numbers,
        _find_other_modes,
        _find_loss_fault,
    ),
    "reduce": (
        _find_outside,
        _find_other_ties,
        _find_state_fault,
        _find_other_numbers,
        _find_coarse_format,
        _find_gradient_fault,
    ),
    "update": (_find_update_fault,),
}
"""The rules that look for the cause, by the phase of the first difference, in the order in which
they are tried.
"""
