"""Trains with a config and with its translation on every engine that can run them, and compares the
numbers with those of one reference run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from math import inf, isfinite
from typing import Any, Literal

from bridge.engine.interface import Backend, Step
from bridge.engine.native import BACKEND as NATIVE
from bridge.errors import BridgeError
from bridge.plan.plan import Plan
from bridge.stack.dialect import Written
from bridge.verify.cause import (
    TRIALS,
    Bench,
    Suspect,
    explain_by_findings,
    plan_causes,
    plan_loss,
    stack_cures,
)
from bridge.verify.measure import (
    LOSS,
    MARGIN,
    Distance,
    EngineRun,
    Measured,
    OtherModelError,
    differ_beyond_rounding,
    distance,
)
from bridge.verify.pair import Side, TranslationPair, in_small
from bridge.verify.size import TWO, change_plan, is_taken, steps_for

Verdict = Literal["reference", "same", "differs", "not run"]
DIGITS = {"bf16": 2.0**-7, "fp16": 2.0**-10, "fp32": 2.0**-23}
"""The distance from 1 to the next larger number, for each number format."""
WIDER = {"bf16": "fp32", "fp16": "fp32", "fp32": "fp64"}
"""For each number format, a wider one. The same run in the wider format shows how much rounding
changes the numbers.
"""


@dataclass(frozen=True)
class VerdictRow:
    """The result of the source or the target on one engine. `written` is true if the stack ran the
    written file, and false if the engine ran the plan of the file. `lacks` says which other written
    files did not run.
    """

    side: Side
    engine: str
    written: bool
    verdict: Verdict
    cause: str = ""
    measured: Measured | None = None
    distance: Distance | None = None
    lacks: str = ""


@dataclass(frozen=True)
class Report:
    """The results of all runs, with their conditions. `changes` has the plan fields that were
    changed to make the runs small, with the values before and after. `rounding` is the distance
    that counts as rounding. `hidden` are findings of `convert` that concern numbers but had no
    effect in these few steps. `nearest` says why there was no script of `convert --script` to run.
    `unread` are the settings that nobody knows and that no run shows.
    """

    rows: tuple[VerdictRow, ...]
    changes: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    world: int = 1
    rounding: Distance | None = None
    steps: int = 0
    hidden: tuple[str, ...] = ()
    nearest: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """The result of all runs together.

        "differs": a run gave other numbers than the reference. "not run": no engine ran the target.
        "same": source and target ran completely on their own stacks, with the same numbers. "in
        part": everything else.
        """
        if any(row.verdict == "differs" for row in self.rows):
            return "differs"
        if not any(row.side == "target" and row.verdict == "same" for row in self.rows):
            return "not run"
        return "in part" if self.lacking else "same"

    @property
    def lacking(self) -> tuple[str, ...]:
        """Reasons why equal numbers would not prove everything: engines that did not run, features
        that were removed, findings that had no effect in these steps, and settings that nobody knows.
        """
        silent = [row for row in self.rows if row.written and row.verdict == "not run"]
        engines = (
            "neither stack ran its own file"
            if len(silent) == TWO
            else "only one of the two stacks ran its own file"
        )
        idle = (
            [
                f"{engines}: {'; '.join(f'the {row.side} did not run on {row.engine}: {row.cause}' for row in silent)}"
            ]
            if silent
            else []
        )
        removals = [
            f"{path} {before} -> {after}"
            for path, (before, after) in self.changes.items()
            if is_taken(path, before, after)
        ]
        beside = [row.lacks for row in self.rows if row.lacks]
        # A difference that was found may well be one of these.
        hidden = () if any(row.verdict == "differs" for row in self.rows) else self.hidden
        return (
            *self.unread,
            *idle,
            *beside,
            *([f"taken out: {', '.join(removals)}"] if removals else ()),
            *hidden,
        )

    def fields(self) -> dict[str, Any]:
        """Return the report as plain values for JSON, by name."""
        return {
            "verdict": self.verdict,
            "proved": self.verdict == "same",
            "lacking": list(self.lacking),
            "no_script": list(self.nearest),
            "steps": self.steps,
            "ranks": self.world,
            "changes": {
                path: {"before": before, "after": after}
                for path, (before, after) in self.changes.items()
            },
            "rounding": _plain(self.rounding),
            "left_out": list(self.rounding.noise if self.rounding else ()),
            "runs": [_row(row) for row in self.rows],
        }


def _row(row: VerdictRow) -> dict[str, Any]:
    steps = row.measured.steps if row.measured else ()
    return {
        "side": row.side,
        "engine": row.engine,
        "as_written": row.written,
        "verdict": row.verdict,
        "cause": row.cause,
        "losses": [finite(step.loss) for step in steps],
        "grad_norms": [finite(step.grad_norm) for step in steps],
        "distance": _plain(row.distance),
    }


def _plain(distance: Distance | None) -> dict[str, Any] | None:
    return (
        {name: finite(value) for name, value in asdict(distance).items() if name != "noise"}
        if distance
        else None
    )


def finite(value: Any) -> Any:
    """Return `value` in a form that JSON allows: an infinite number or NaN becomes text, such as
    "inf", and everything else stays as it is.
    """
    return str(value) if isinstance(value, float) and not isfinite(value) else value


def verify(
    pair: TranslationPair,
    backends: Mapping[str, Backend],
    steps: int | None,
    padded: bool = False,
    note: Note = print,
    engines: Mapping[Side, Backend] | None = None,
    bench: Bench | None = None,
) -> Report:
    """Run source and target on every engine that can run them, with the ranks of this process
    group, and return the same report on all ranks.

    The reference is the plan of the source on the native engine. Raises `BridgeError` if the
    reference cannot run. Without `steps`, there are enough steps for schedules and loss scale to
    have an effect. `engines` run source and target in place of their own stacks. `bench` provides
    the model and the data, if it is given.
    """
    plan, steps = pair.plans["source"], steps or max(map(steps_for, pair.plans.values()))
    # Two ways to average a loss differ only if microbatches have different numbers of tokens.
    padded = padded or len({one.loss for one in pair.plans.values()}) > 1
    bench = bench or Bench(pair.size.micro, steps, padded, pair.size.world, NATIVE)
    steps = bench.steps
    bench.course.further(_parts(pair, (engines or backends).values()))
    note(f"native engine: runs the plan of the source, {steps} steps on {bench.world} ranks")
    reference = bench.reference_numbers(plan)
    # The same plan in the next wider format: its distance is what this format rounds away.
    rounding = distance(bench.reference_numbers(_wider(plan)), reference).at_least(
        DIGITS.get(plan.precision.compute or "fp32", 0.0)
    )
    rows = [VerdictRow("source", NATIVE.title, False, "reference", "", reference)]
    court = Court(
        pair, backends, bench, reference, replace(rounding, scale=""), note, engines=engines or {}
    )
    findings = (
        *(f"{path}: {message}" for path, message in pair.told),
        *(pair.nearest if pair.script else ()),
    )
    hidden, unwritten = (
        (
            *(f"no effect within {steps} steps: {finding}" for finding in findings),
            *(f"not shown by these runs: {difference}" for difference in pair.unlike),
        ),
        () if pair.script else pair.nearest,
    )
    return Report(
        (*rows, *court.rows()),
        pair.changes,
        pair.size.world,
        rounding,
        steps,
        hidden,
        unwritten,
        pair.unread,
    )


Note = Callable[[str], object]


def _parts(pair: TranslationPair, backends: Iterable[Backend]) -> int:
    """Return the approximate number of runs, for the display of progress.

    The source's plan runs on the reference engine twice, the second time in a wider format. It also
    runs on other engines. The target's plan runs on the reference engine twice, the second time in
    fp64. The source and the target run on their own stacks, and a second time in fp32 if the plan
    computes in a narrower format.
    """
    engine_count = sum(backend.release is not None for backend in backends)
    narrow = (pair.plans["source"].precision.compute or "fp32") not in ("fp32", "fp64")
    return TWO + engine_count + 1 + TWO + (TWO + min(TWO, engine_count) if narrow else 0)


def _wider(plan: Plan) -> Plan:
    """Return the plan with computation and reduction in the next wider number format."""
    wide = WIDER.get(plan.precision.compute or "fp32", "fp64")
    wide_master = "fp64" if wide == "fp64" else plan.precision.master
    formats = {"precision.compute": wide, "precision.reduce": wide, "precision.communicate": None}
    return change_plan(plan, {**formats, "precision.master": wide_master})


def _exact(plan: Plan) -> Plan:
    """Return the plan with all number formats set to fp64."""
    formats = {
        "precision.compute": "fp64",
        "precision.reduce": "fp64",
        "precision.communicate": None,
        "precision.master": "fp64",
    }
    return change_plan(plan, formats)


FP32 = {
    "precision.compute": "fp32",
    "precision.reduce": "fp32",
    "precision.communicate": None,
    "precision.master": "fp32",
}
"""Values of plan fields for runs in fp32, which every engine supports and which rounds little."""
EXACT = Distance(0.0, 0.0, 0.0, 1.0, "", 0.0, floor=0.1)
"""The distance between two runs in fp64 that still counts as rounding."""


@dataclass(frozen=True)
class Court:
    """Runs source and target on one engine after the other, and compares each run with one
    reference. With `scaled`, loss scales are compared too.
    """

    pair: TranslationPair
    backends: Mapping[str, Backend]
    bench: Bench
    reference: Measured
    rounding: Distance
    note: Note
    scaled: bool = True
    engines: Mapping[Side, Backend] = field(default_factory=dict)

    def rows(self) -> Iterator[VerdictRow]:
        """Yield the results of all runs except the reference run."""
        yield self._result_of_side("source")
        yield from self._elsewhere()
        target = self._target()
        yield target
        yield self._result_of_side("target", target)

    def _result_of_side(self, side: Side, plan_row: VerdictRow | None = None) -> VerdictRow:
        """Return the result of the file of `side` on its own stack. If no difference shows in a
        narrow format, the run is repeated in fp32.
        """
        config = self.pair.config(side)
        backend = self.engines.get(side) or self.backends.get(config.dialect.name)
        if backend is None:
            return VerdictRow(
                side, config.dialect.title, True, "not run", "there is no engine of this stack"
            )
        row = self._ran(side, backend, plan_row, self.pair.script if side == "target" else None)
        # In bf16, a small difference drowns in rounding. It is looked for once more in fp32.
        if row.verdict != "same" or self.finer is None:
            return row
        finer = self.finer._result_of_side(side, plan_row)
        if finer.verdict != "differs":
            return row
        return replace(
            row,
            verdict="differs",
            cause=f"in fp32, {finer.cause}",
            measured=finer.measured,
            distance=finer.distance,
        )

    def _ran(
        self, side: Side, backend: Backend, plan_row: VerdictRow | None, script: Written | None
    ) -> VerdictRow:
        """Return the result of the config of `side` on its own stack. The written `script` runs the
        config, if there is one. Otherwise, or if that script fails, a script of stagebridge runs
        it.
        """
        stack = f"{backend.title} {backend.release or ''}".strip()
        title = f"{stack}, with the written script and model" if script else stack
        run = partial(
            self.bench.measure,
            EngineRun(backend, self.pair.config(side), script=script),
            self.pair.plans[side],
        )
        row = self._judge_row(
            VerdictRow(side, title, True, "same"),
            run,
            partial(self._blame, side, backend, plan_row),
        )
        if script is None or row.verdict != "not run":
            return row
        alone = self._ran(side, backend, plan_row, None)
        return replace(
            alone, lacks=f"the script and the model's config.json did not run: {row.cause}"
        )

    @cached_property
    def finer(self) -> Court | None:
        """A court that compares the same configs in fp32, because rounding in a narrower format may
        hide a difference. None if the plans already compute in fp32 or fp64, or if a stack refuses
        fp32.

        Comparing plans is not enough, because stagebridge may read and write a flag with the same
        mistake. Then the two plans are equal although the stacks differ.
        """
        if (self.pair.plans["source"].precision.compute or "fp32") in ("fp32", "fp64"):
            return None
        plans: dict[Side, Plan] = {
            side: change_plan(plan, FP32) for side, plan in self.pair.plans.items()
        }
        try:
            configs = {
                side: in_small(self.pair.config(side), FP32, self.pair.size, self.backends)
                for side in plans
            }
        except BridgeError:
            return None
        reference = self.bench.reference_numbers(plans["source"])
        rounding = distance(
            self.bench.reference_numbers(_wider(plans["source"])), reference
        ).at_least(DIGITS["fp32"])
        pair = replace(self.pair, source=configs["source"], target=configs["target"], plans=plans)
        court = replace(
            self, pair=pair, reference=reference, rounding=replace(rounding, scale=""), scaled=False
        )
        return replace(court, note=self._note_in_fp32)

    def _note_in_fp32(self, line: str) -> None:
        self.note(f"{line}, in fp32")

    def _blame(
        self, side: Side, backend: Backend, plan_row: VerdictRow | None, numbers: Measured
    ) -> str:
        """Return a text on the reason why a stack gives other numbers than the reference. There are
        three: the config has another meaning, another written file changes the training, or the
        stack does not do what the config says.
        """
        config = self.pair.config(side)
        if plan_row is not None and plan_row.verdict == "differs":
            return plan_row.cause.partition(": ")[2]
        self.note(f"{backend.title}: looking for the cause")
        self.bench.course.further(TWO * len(TRIALS))
        beside = self._beside(backend, numbers) if side == "target" and self.pair.script else ""
        if beside:
            return f"{self.pair.fault}: {beside}"
        suspect = Suspect(config, backend, self.pair.plans[side])
        cures = list(stack_cures(suspect, self.bench, self.rounding))
        cure_text = "none of the tested changes removes the difference"
        if cures:
            cure_text = (
                f"the difference disappears with {', or with '.join(cure.words for cure in cures)}"
            )
        gap = self._gap(numbers)
        defects = "; ".join(explain_by_findings(suspect, cures, self.bench, gap))
        if defects:
            return f"{backend.title} does not do what the file says; {cure_text}; known fault: {defects}"
        losses = plan_loss(suspect, self.bench, self.rounding, self.reference, gap)
        loss_text = f"stagebridge's plan of the file lacks {', '.join(losses)}{self.pair.findings_text(losses)}"
        fault = (
            loss_text if losses else f"stagebridge reads the file differently from {backend.title}"
        )
        return f"{self.pair.fault}: {fault}; {cure_text}"

    def _gap(self, numbers: Measured) -> Distance:
        """Return the distance of a run from the reference; of another model it is infinite."""
        try:
            return distance(numbers, self.reference, self.rounding.noise)
        except OtherModelError:
            return Distance(inf, None, inf, inf, "", inf, noise=self.rounding.noise)

    def _beside(self, backend: Backend, numbers: Measured) -> str:
        """Return a text that blames a file written beside the config, such as the script or
        config.json. The text is empty if the config alone, without these files, gives wrong numbers
        too.
        """
        try:
            alone = self.bench.measure(
                EngineRun(backend, self.pair.target), self.pair.plans["target"]
            )
        except BridgeError:
            return ""
        if differ_beyond_rounding(alone, self.reference, self.rounding):
            return ""
        config_alone = "the config alone, in another script, gives the expected numbers"
        if self.pair.nearest:
            config_alone = (
                f"`convert --script` reports this: {'; '.join(self.pair.nearest)}; {config_alone}"
            )
        # The first loss and gradient depend on the model alone, and not yet on optimizer and
        # schedule.
        first, reference = numbers.steps[0], self.reference.steps[0]
        if _far(first.loss, reference.loss, self.rounding.loss) or _far(
            first.grad_norm, reference.grad_norm, self.rounding.norm
        ):
            observation = (
                f"found loss {first.loss:.7g} and gradient norm {_norm(first)} in the first step"
            )
            expectation = f"expected {reference.loss:.7g} and {_norm(reference)}"
            return (
                "the written config.json, or the script that reads it, makes a different "
                f"model: {observation}, {expectation}; {config_alone}"
            )
        evidence = "loss and gradient norm of the first step are right, but later steps differ"
        return f"the script, or the model's config.json, changes the training: {evidence}; {config_alone}"

    def _elsewhere(self) -> Iterator[VerdictRow]:
        """Yield the results of the source's plan on engines of other stacks than those of source
        and target.
        """
        plan, own = (
            self.pair.plans["source"],
            {self.pair.source.dialect.name, self.pair.target.dialect.name},
        )
        for name, backend in self.backends.items():
            if name in own or backend.release is None:
                continue
            row = VerdictRow("source", f"{backend.title} {backend.release}", False, "same")
            refusals = backend.refusals(plan, self.bench.world)
            if refusals:
                yield VerdictRow(row.side, row.engine, False, "not run", "; ".join(refusals))
            else:
                run = partial(self.bench.measure, EngineRun(backend, plan), plan)
                yield self._judge_row(row, run, partial(_otherwise, backend))

    def _target(self) -> VerdictRow:
        """Return the result of the target's plan on the native engine.

        The plan runs in its own number formats. If no difference shows, it runs again in fp64.
        """
        mine, theirs = self.pair.plans["source"], self.pair.plans["target"]
        row = self._judge_row(
            VerdictRow("target", NATIVE.title, False, "same"),
            partial(self.bench.reference_numbers, theirs),
            self._changes_text,
        )
        if row.verdict != "same":
            return row
        mine, theirs = _exact(mine), _exact(theirs)
        reference, numbers = (
            self.bench.reference_numbers(mine),
            self.bench.reference_numbers(theirs),
        )
        gap = distance(numbers, reference)
        further = gap.beyond(EXACT)
        if not further:
            return row
        words = f"in fp64, {in_numbers(further, gap)}: {self._differences_text(mine, theirs, reference, EXACT)}"
        return replace(row, verdict="differs", cause=words, measured=numbers, distance=gap)

    def _changes_text(self, numbers: Measured) -> str:
        """Return a text on the fields that the translation changed and that change the numbers.
        `numbers` is not used, because the plans run again, in their own number formats.
        """
        return self._differences_text(
            self.pair.plans["source"], self.pair.plans["target"], self.reference, self.rounding
        )

    def _differences_text(
        self, source: Plan, target: Plan, reference: Measured, rounding: Distance
    ) -> str:
        """Return a text on the fields in which `target` differs from `source` and that change the
        numbers.
        """
        self.note("native engine: looking for the cause")
        self.bench.course.further(TWO)
        changes = plan_causes(source, target, self.bench, reference, rounding)
        texts = [f"{words}{self.pair.findings_text(paths)}" for paths, words in changes]
        causes = "; ".join(texts) or "several settings together"
        return f"{self.pair.fault}, settings have another meaning: {causes}"

    def _judge_row(
        self, row: VerdictRow, run: Callable[[], Measured], cause: Callable[[Measured], str]
    ) -> VerdictRow:
        self.note(
            f"{row.engine}: "
            + (
                f"runs the file of the {row.side}"
                if row.written
                else f"runs the plan of the {row.side}"
            )
        )
        try:
            numbers = run()
        except BridgeError as error:
            return VerdictRow(
                row.side,
                row.engine,
                row.written,
                "not run",
                "; ".join(dict.fromkeys(error.problems)),
            )
        try:
            gap = distance(numbers, self.reference, self.rounding.noise)
            gap = gap if self.scaled else replace(gap, scale="")
        except OtherModelError as error:
            return VerdictRow(
                row.side,
                row.engine,
                row.written,
                "differs",
                f"{error.problems[0]}: {cause(numbers)}",
                numbers,
            )
        further = gap.beyond(self.rounding)
        words = f"{in_numbers(further, gap)}: {cause(numbers)}" if further else ""
        return VerdictRow(
            row.side, row.engine, row.written, "differs" if further else "same", words, numbers, gap
        )


def _far(value: float | None, reference: float | None, rounding: float | None) -> bool:
    """Return whether two numbers differ by more than rounding. Return False if one of them is None,
    because its stack does not report it.
    """
    if value is None or reference is None:
        return False
    return abs(value - reference) > (LOSS + MARGIN * (rounding or 0.0)) * abs(reference)


def _norm(step: Step) -> str:
    return "not told" if step.grad_norm is None else f"{step.grad_norm:.7g}"


def _otherwise(backend: Backend, numbers: Measured) -> str:
    first, last = numbers.losses[0], numbers.losses[-1]
    return f"{backend.title} computes other numbers: the loss goes from {first:.6g} to {last:.6g}"


def in_numbers(further: Iterable[str], gap: Distance) -> str:
    """Return a text on how much two runs differ. `further` names the parts of `gap` that the text
    mentions.
    """
    words = {
        "loss": f"losses differ by {gap.loss:.1e}",
        "norm": f"gradient norms differ by {gap.norm or 0.0:.1e}",
        "weights": f"updates differ by {gap.update:.1e} and are {gap.share:.3f} times as long as expected",
        "scale": gap.scale,
    }
    return ", ".join(words[name] for name in further)
