"""The `estimate` command: say how much memory each kind of rank of a run needs, and whether it fits."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from bridge.cli.budget import stay_within_limits
from bridge.cli.folder import model_in
from bridge.cli.job import Job, Picture, Sizes
from bridge.cli.layout import (
    FILE,
    MODELS,
    check_picture,
    config_of_job,
    ranks_of_plan,
    shape_of_model,
    size_text,
    with_micro,
)
from bridge.cli.rank_bars import BARS, Bar, draw
from bridge.cli.read_job import answer_job, document_of, text_of
from bridge.cli.resolve import sort_sources
from bridge.cli.terminal import console, print_json, say
from bridge.errors import ConfigError
from bridge.files import Script, scalar
from bridge.layout.architecture import PRESETS
from bridge.layout.memory.estimate import (
    MOMENTS as MOMENTS_OF_STEP,
    Estimate,
    Estimator,
    RankEstimate,
)
from bridge.layout.memory.margins import CONTEXT, RESERVED
from bridge.layout.memory.terms import sum_by_kind
from bridge.layout.shard import MOMENTS
from bridge.plan.plan import Model, Plan
from bridge.report import as_json as report, json_types
from bridge.report.tables import Grid
from bridge.stack.dialect import Config
from bridge.stack.findings import Finding
from bridge.stack.rules import Effect
from bridge.translation.adapters import (
    bytes_of_quantised,
    plan_with_adapters,
    split_adapters,
    uncounted_adapters,
)
from bridge.translation.lift import lift
from bridge.translation.memory_changes import Change, find_changes
from bridge.translation.trainer_memory import (
    ACCUMULATION,
    CHECKPOINTING,
    LIGER,
    MICRO,
    OPTIMIZER,
    plan_of_trainer,
    rules_of_trainer,
    uncounted_arguments,
)

if TYPE_CHECKING:
    from rich.console import Console

GIB = 2**30
TITLE = 110
"""Number of letters in a line of a picture's title."""


@dataclass(frozen=True)
class Answer:
    """What is known of a run: its estimate, the memory of a device in bytes, and the changes with
    which a run that does not fit would fit.
    """

    estimate: Estimate
    memory: int | None
    changes: Sequence[Change]

    @property
    def fits(self) -> bool | None:
        """Whether the run fits; None if the memory of a device was not given."""
        return None if self.memory is None else self.estimate.largest.needed <= self.memory


def estimate(
    job: Job, sizes: Sizes, picture: Picture, explain: bool, names: Sequence[str] = ()
) -> int:
    """Estimate the memory of one run. Returns the exit code."""
    others, adapters = split_adapters(names or (job.file,))
    job = sort_sources(job, others, "estimate")
    if sizes.model == FILE and job.model is not None:
        sizes = replace(sizes, model=str(job.model))
    elif sizes.model not in MODELS:
        job = replace(job, model=Path(sizes.model))
    job = replace(job, lent=(*job.lent, "model"))  # only some stacks fill in sizes from it

    @stay_within_limits()
    def work() -> int:
        asked = Asked(replace(job, text=text_of(job)), sizes, adapters)
        config = config_of_job(asked.job)
        limit = picture.bytes
        check_picture(picture, asked.job)
        found = asked.measure(config)
        changes: Sequence[Change] = ()
        if limit is not None and found.largest.needed > limit:
            changes = asked.find_changes(config, limit)
        answer = Answer(found, limit, changes)
        findings = tuple(_findings(answer))
        if job.json:
            print_json(as_json(answer, findings, job.threshold))
        else:
            _print_answer(answer, explain, console(sys.stdout))
        if picture.path:
            title = textwrap.fill(_verdict(answer), TITLE)
            scale = f"needed, with x {RESERVED} for fragments, and the CUDA context and NCCL"
            draw(_bars(answer.estimate), title, scale, limit, picture.path)
            if not job.json:
                say(f"wrote {picture.path}")
        return report.exit_of(findings, job.threshold)

    return answer_job(job, work)


@dataclass(frozen=True)
class Asked:
    """What is asked: the job, the sizes that its options give, and the data of adapters."""

    job: Job
    sizes: Sizes
    adapters: Mapping[str, Any]

    @cached_property
    def arguments(self) -> Mapping[str, Any]:
        """Arguments of the Trainer, if it starts the run."""
        return trainer_arguments(self.job)

    def plan(self, config: Config) -> Plan:
        """The plan of a config as the run has it."""
        plan = plan_of_trainer(with_micro(lift(config), self.sizes), self.arguments)
        if self.sizes.model in PRESETS:
            families = (one for one in ("gpt2", "llama") if self.sizes.model.startswith(one))
            plan = plan.model_copy(update={"model": Model(family=next(families, None))})
        elif self.sizes.model != FILE:
            plan = plan.model_copy(update={"model": model_in(self.sizes.model)})
        return plan_with_adapters(plan, self.adapters)

    def measure(self, config: Config) -> Estimate:
        """The estimate of a config. Raises `BridgeError` if its sizes do not fit."""
        plan = self.plan(config)
        name = plan.optimizer.name or "adamw"
        if name not in MOMENTS:
            raise ConfigError(
                f"optimizer.name: found {name}, whose state is not counted; expected one of {', '.join(MOMENTS)}"
            )
        rules = rules_of_trainer(config.dialect.memory_rules(config), self.arguments)
        if self.adapters:
            quantised = bytes_of_quantised(self.job.model, self.arguments)
            rules = replace(rules, quantised=quantised)
        shape, ranks = shape_of_model(plan, self.sizes), ranks_of_plan(plan, self.job.world_size)
        found = Estimator.of(plan, shape, ranks, rules).estimate()
        notes = (
            *found.notes,
            *uncounted_arguments(self.arguments),
            *uncounted_adapters(self.adapters),
            *(
                (f"frozen weights are taken to be loaded in {plan.precision.compute or 'fp32'}",)
                if self.adapters
                else ()
            ),
        )
        return replace(found, notes=(*notes, *rules.assumptions))

    def find_changes(self, config: Config, limit: int) -> Sequence[Change]:
        """Changes with which the run needs no more than `limit` bytes."""
        plan = self.plan(config)
        hosted: dict[str, dict[str, Any]] = {}
        if not self.arguments.get(CHECKPOINTING):
            hosted["full"] = {CHECKPOINTING: True}
        micro, accumulation = plan.batch.micro, plan.batch.accumulation
        if micro and accumulation and micro % 2 == 0 and self.sizes.micro is None:
            hosted["micro"] = {MICRO: micro // 2, ACCUMULATION: accumulation * 2}

        def needed(other: Config, arguments: Mapping[str, Any]) -> int:
            asked = self
            if arguments:
                words = (f"{name}={json.dumps(value)}" for name, value in arguments.items())
                asked = replace(
                    self, job=replace(self.job, auto_from=(*self.job.auto_from, *words))
                )
                if other is config:
                    other = config_of_job(asked.job)
                else:
                    _ = config_of_job(asked.job)
            return asked.measure(other).largest.needed

        return find_changes(config, plan, needed, limit, hosted if self.arguments else None)


def trainer_arguments(job: Job) -> Mapping[str, Any]:
    """Return the arguments of the Trainer that a job's sources give; of a script, those that its launches name."""
    found: dict[str, Any] = {}
    data = document_of(job).data
    for launch in data.launches if isinstance(data, Script) else ():
        words = list(launch.texts)
        for word, after in zip(words, [*words[1:], "--"], strict=True):
            name, tied, text = word.removeprefix("--").partition("=")
            name = name.replace("-", "_")
            if word.startswith("--") and name in (CHECKPOINTING, LIGER, OPTIMIZER):
                found[name] = scalar(text if tied else "true" if after.startswith("--") else after)
    return {**found, **job.settings_of_options.get("trainer", {})}


def _findings(answer: Answer) -> Iterator[Finding]:
    if answer.fits is False:
        message = f"{_verdict(answer)}; {_advice(answer)}"
        yield Finding("memory", message, Effect.STOPS)
    if answer.estimate.doubt:
        yield Finding("model.family", answer.estimate.doubt, Effect.NONE)
    for note in answer.estimate.notes:
        yield Finding("memory", note, Effect.NONE)


def _advice(answer: Answer) -> str:
    if not answer.changes:
        return "none of the changes that are known here makes it fit: use more ranks"
    return f"with {_settings_text(answer.changes[0])} it fits"


# For programs


def as_json(
    answer: Answer, findings: Sequence[Finding], threshold: Effect = Effect.NUMBERS
) -> json_types.Estimated:
    """Return an answer as one JSON object. Its form is stable and described in docs/json.md."""
    return {
        "fits": answer.fits,
        "memory": answer.memory,
        "needed": answer.estimate.largest.needed,
        "ranks": [_rank_json(rank) for rank in answer.estimate.ranks],
        "changes": [
            {"settings": dict(one.settings), "needed": one.needed, "price": one.price}
            for one in answer.changes
        ],
        "findings": list(map(report.finding_json, findings)),
        "exit_code": report.exit_of(findings, threshold),
    }


def _rank_json(rank: RankEstimate) -> json_types.NeededByRank:
    return {
        "pipeline_rank": rank.pipeline,
        "moment": rank.moment,
        "needed": rank.needed,
        "allocated": rank.peak,
        "between_steps": rank.steady,
        "kinds": cast("dict[str, int]", dict(sum_by_kind(rank.terms))),
        "terms": [
            {"kind": one.kind, "what": one.what, "bytes": one.bytes, "formula": one.formula}
            for one in rank.terms
        ],
    }


# For people


def _verdict(answer: Answer) -> str:
    rank = answer.estimate.largest
    place = f"on {_stage_name(rank.pipeline, len(answer.estimate.ranks))}"
    sizes = sorted(sum_by_kind(rank.terms).items(), key=lambda item: -item[1])
    parts = ", ".join(f"{kind} {size / GIB:,.1f}" for kind, size in sizes if size >= 0.05 * GIB)
    needed = f"{rank.needed / GIB:,.1f} GiB {place}, at {rank.moment}; {parts}"
    if answer.memory is None:
        return f"needs {needed}"
    return (
        f"{'fits' if answer.fits else 'does not fit'} in {answer.memory / GIB:,.10g} GB: {needed}"
    )


def _stage_name(rank: int, count: int) -> str:
    if count == 1:
        return "each rank"
    return {0: "the first stage", count - 1: "the last stage"}.get(rank, f"stage {rank + 1}")


def _print_answer(answer: Answer, explain: bool, out: Console) -> None:
    out.print(_verdict(answer), style="bold", markup=False, highlight=False)
    if answer.estimate.doubt:
        out.print(f"note: {answer.estimate.doubt}", markup=False, highlight=False)
    for number, change in enumerate(answer.changes, 1):
        out.print(f"{number}. {_settings_text(change)}", markup=False, highlight=False)
        saved = answer.estimate.largest.needed - change.needed
        out.print(
            f"   {size_text(change.needed)}, {size_text(saved)} less: {change.price}",
            markup=False, highlight=False,
        )  # fmt: skip
    if answer.fits is False and not answer.changes:
        out.print(_advice(answer), markup=False, highlight=False)
    out.print(_ranks_table(answer.estimate))
    if explain:
        out.print(_terms_table(answer.estimate.largest, len(answer.estimate.ranks)))
    for note in answer.estimate.notes:
        out.print(f"note: {note}", markup=False, highlight=False)
    out.print(
        f"needed: allocated x {RESERVED} for fragments, and {size_text(CONTEXT)} for the CUDA context and NCCL",
        markup=False, highlight=False,
    )  # fmt: skip


def _settings_text(change: Change) -> str:
    return ", ".join(
        f"without {path}" if value is None else f"{path}: {_value_text(value)}"
        for path, value in change.settings.items()
    )


def _value_text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _ranks_table(found: Estimate) -> Grid:
    kinds = list(dict.fromkeys(kind for rank in found.ranks for kind in sum_by_kind(rank.terms)))
    table = Grid("Memory by stage", ("stage", *kinds, "allocated", "needed"), numbers=True)
    for first, last in _alike(found.ranks):
        rank = found.ranks[first]
        sizes = sum_by_kind(rank.terms)
        name = str(first + 1) if first == last else f"{first + 1} to {last + 1}"
        cells = [size_text(sizes.get(kind, 0)) for kind in kinds]
        table.add_row(name, *cells, size_text(rank.peak), size_text(rank.needed))
    return table


def _bars(found: Estimate) -> list[Bar]:
    """Return a bar for each stage and moment of a step, or for each stage at its peak if there are
    too many.
    """
    bars, peaks = [], []
    for first, last in _alike(found.ranks):
        rank = found.ranks[first]
        stage = str(first + 1) if first == last else f"{first + 1} to {last + 1}"
        place = f"stage {stage}, " if len(found.ranks) > 1 else ""
        moments = [one for one in MOMENTS_OF_STEP.values() if one in rank.moments]
        terms_of = {"between steps": rank.between}
        terms_of |= {name: (*rank.states, *rank.moments[name]) for name in moments}
        for name, terms in terms_of.items():
            sizes: dict[str, int] = dict(
                sum_by_kind(one for one in terms if one.kind != "host").items()
            )
            whole = sum(sizes.values())
            sizes["margins"] = round(whole * RESERVED) + CONTEXT - whole
            bars.append(Bar(f"{place}{name}", sizes))
            if name == rank.moment:
                peaks.append(bars[-1])
    return bars if len(bars) <= BARS else peaks


def _alike(ranks: Sequence[RankEstimate]) -> Iterator[tuple[int, int]]:
    """Yield the first and the last of each run of ranks that need the same."""
    first = 0
    for index in range(1, len(ranks) + 1):
        if index == len(ranks) or sum_by_kind(ranks[index].terms) != sum_by_kind(
            ranks[first].terms
        ):
            yield first, index - 1
            first = index


def _terms_table(rank: RankEstimate, count: int) -> Grid:
    title = f"{_stage_name(rank.pipeline, count).capitalize()}, at {rank.moment}"
    table = Grid(title, ("kind", "what", "bytes", "formula"))
    for one in rank.terms:
        table.add_row(one.kind, one.what, size_text(one.bytes), one.formula)
    return table
