"""The `estimate` command: say how much memory each kind of rank of a run needs, and whether it fits."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.api.access import limit_access
from bridge.api.layout import (
    FILE,
    MODELS,
    Sizes,
    config_of_source,
    ranks_of_plan,
    shape_of_model,
    with_micro,
)
from bridge.api.read import document_of, model_in, text_of
from bridge.cli.budget import stay_within_limits
from bridge.cli.job import Job, Picture, answer
from bridge.cli.layout import check_picture
from bridge.cli.resolve import sort_sources
from bridge.cli.terminal import print_json, say
from bridge.errors import ConfigError
from bridge.files import Script, scalar
from bridge.layout.architecture import PRESETS
from bridge.layout.memory.estimate import Estimate, Estimator
from bridge.layout.memory.margins import RESERVED
from bridge.layout.shard import MOMENTS
from bridge.plan.plan import Model, Plan
from bridge.report import as_json as report
from bridge.report.console import console
from bridge.report.estimates import Answer, advice, as_json, bars_of, print_answer, verdict
from bridge.report.pictures.rank_bars import draw
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
    pass

TITLE = 110
"""Number of letters in a line of a picture's title."""


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
        config = config_of_source(asked.job)
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
            print_answer(answer, explain, console(sys.stdout))
        if picture.path:
            title = textwrap.fill(verdict(answer), TITLE)
            scale = f"needed, with x {RESERVED} for fragments, and the CUDA context and NCCL"
            draw(bars_of(answer.estimate), title, scale, limit, picture.path)
            if not job.json:
                say(f"wrote {picture.path}")
        return report.exit_of(findings, job.threshold)

    with answer(job), limit_access(job):
        return work()


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
                    other = config_of_source(asked.job)
                else:
                    _ = config_of_source(asked.job)
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
        message = f"{verdict(answer)}; {advice(answer)}"
        yield Finding("memory", message, Effect.STOPS)
    if answer.estimate.doubt:
        yield Finding("model.family", answer.estimate.doubt, Effect.NONE)
    for note in answer.estimate.notes:
        yield Finding("memory", note, Effect.NONE)


# For programs


# For people
