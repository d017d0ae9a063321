"""Compares two configs on a user's own model and batch.

Each config runs on its own engine, and the numbers are compared with those of the first config's
plan on the native engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from bridge.checkpoint import model_facts
from bridge.checkpoint.hub import Model
from bridge.engine.interface import Backend, Workload
from bridge.engine.models.pretrained import dropping, open_model, settings
from bridge.engine.native import BACKEND as NATIVE
from bridge.engine.rows import IGNORED, Rows
from bridge.errors import BridgeError
from bridge.layout.architecture import Architecture
from bridge.plan.plan import Plan
from bridge.stack.dialect import Config
from bridge.translation.lift import lift
from bridge.verify.cause import Bench
from bridge.verify.judge import Report, VerdictRow, verify
from bridge.verify.measure import EngineRun, Measured, measure, neutral
from bridge.verify.own import alone
from bridge.verify.pair import Side, TranslationPair
from bridge.verify.size import Size, change_plan, steps_for

OWN_MODEL = ("megatron",)
"""Names of engines that build the model from the config, and then copy the user's weights into it.
"""
UNDROPPED = dict.fromkeys(
    ("model.dropout", "model.attention.dropout", "model.embedding.dropout"), 0.0
)


@dataclass(frozen=True)
class Given:
    """The user's model and batch: the folder of the model, the config.json in this folder, and the
    rows of the batch.
    """

    folder: Path
    model: Config
    rows: Rows
    seed: int = 1234

    def workload(self, own: bool, facts: Model | None) -> Workload:
        """Return the model and the data for an engine.

        If `own` is true, the engine builds the model from the config. Such an engine also gets the
        weights, by the names of the native engine.
        """
        plan = change_plan(
            lift(self.model),
            {
                "model.sequence": self.rows.sequence,
                "model.embedding.padded_vocab": None,
                **UNDROPPED,
            },
        )
        words = plan.model.vocab or int(self.rows.planes[:, 0].max()) + 1
        shape = Architecture(vocab=words, sequence=self.rows.sequence)
        first = None
        if own and facts is not None:
            plain = open_model(self.folder, self.seed, drops=False)
            first = neutral(
                {name: weight.detach() for name, weight in plain.named_parameters()}, facts
            )
        return Workload(
            shape,
            self.seed,
            model=plan.model if own else None,
            folder=self.folder,
            first=first,
            rows=self.rows,
        )

    def _blind(self) -> list[int]:
        """Return the indices of rows that have a loss at a token that cannot attend to any token.

        Such tokens are padding before the first real token of a row.
        """
        mask = self.rows.model_arguments(self.rows.planes).get("attention_mask")
        if mask is None:
            return []
        # Attention is causal, so that a token sees the ones before it that the mask leaves.
        unseeing = mask.cumsum(1) == 0
        rows: list[int] = (
            (unseeing & (self.rows.targets != IGNORED)).any(1).nonzero().view(-1).tolist()
        )
        return rows

    def refusals(self, engines: Mapping[Side, Backend]) -> Iterator[str]:
        """Yield a reason for each engine that cannot train on this batch."""
        inputs = ("input_ids", "attention_mask", "position_ids")
        for engine in engines.values():
            if engine.name not in OWN_MODEL:
                continue
            yield from (
                f"{engine.name}: {name}: the model of this engine has no such input; remove it from the batch"
                for name in self.rows.names
                if name not in inputs
            )
            blind = self._blind()
            if blind:
                yield (
                    f"{engine.name}: attention_mask: row {blind[0]} has losses at tokens that "
                    "cannot attend to any token; torch's attention gives zeros for these tokens, "
                    "Megatron's does not; set the labels of these tokens to -100"
                )
            positions = self.rows.model_arguments(self.rows.planes).get("position_ids")
            rotary = lift(self.model).model.embedding.positions == "rotary"
            if (
                rotary
                and positions is not None
                and bool((positions[:, 1:] != positions[:, :-1] + 1).any())
            ):
                yield (
                    f"{engine.name}: position_ids: found positions that are not consecutive, but "
                    "the rotary positions of this engine always are; remove position_ids"
                )


@dataclass(frozen=True)
class OnBatch(Bench):
    """Runs the user's model on the user's batch. `trained` has the model and the data twice: under
    True for engines that build the model from the config, and under False for other engines.
    `facts` are what the translation of weight names needs to know of the model.
    """

    trained: Mapping[bool, Workload] = field(default_factory=dict)
    facts: Model | None = None

    def _measure_plan(self, run: EngineRun, plan: Plan) -> Measured:
        workload = replace(self.trained[run.backend.name in OWN_MODEL], micro=self.micro)
        result = measure(run, workload, self.steps)
        if self.facts is None:
            return result
        return replace(result, weights=tuple(neutral(part, self.facts) for part in result.weights))

    def reference_numbers(self, plan: Plan) -> Measured:
        """Return the numbers of `plan` on the reference engine, where all ranks are data ranks."""
        micro = plan.batch.micro or self.micro
        accumulation = max(1, (plan.batch.global_ or micro * self.world) // (micro * self.world))
        return super().reference_numbers(alone(plan, Size(self.world, 1, 1, micro, accumulation)))


def judge_on_batch(
    pair: TranslationPair,
    engines: Mapping[Side, Backend],
    inputs: Given,
    steps: int | None,
    note: Callable[[str], object] = print,
) -> Report:
    """Run two configs on the user's model and batch, and return a report. The reference is the plan
    of the first config on the native engine.
    """
    BridgeError.raise_if(inputs.refusals(engines))
    own = {engine.name in OWN_MODEL for engine in engines.values()}
    facts = model_facts.describe_config(inputs.model) if any(own) else None
    workloads = {is_own: inputs.workload(is_own, facts) for is_own in {*own, False}}
    steps = steps or max(map(steps_for, pair.plans.values()))
    bench = OnBatch(
        pair.size.micro, steps, False, pair.size.world, NATIVE, trained=workloads, facts=facts
    )
    dropouts = {name: (value, 0.0) for name, value in dropping(settings(inputs.folder)).items()}
    whole = replace(pair, changes={**pair.changes, **dropouts})
    report = verify(whole, {}, None, note=note, engines=engines, bench=bench)
    return replace(
        report, rows=tuple(_explain_other_model(row, pair, inputs.model) for row in report.rows)
    )


UNLIKE = (
    "model.embedding.padded_vocab",
    "model.embedding.max_positions",
    *(f"model.embedding.{name}" for name in ("padding", "begin", "ends")),
    "model.sequence",
    "model.init.",
    *UNDROPPED,
)
"""Plan fields, or prefixes of fields, that may differ between a config and a config.json of the
same model.
"""


def _explain_other_model(row: VerdictRow, pair: TranslationPair, folder: Config) -> VerdictRow:
    """Return the result `row`. If the numbers differ or the config did not run, and the config
    describes another model than the user's folder, the result's cause says so.
    """
    if not row.written or row.verdict not in ("differs", "not run"):
        return row
    values, model_values = lift(pair.config(row.side)).values(), lift(folder).values()
    differences = [
        f"{path}: found {values[path]}, config.json has {model_values[path]}"
        for path in model_values
        if path.startswith("model.")
        and not path.startswith(UNLIKE)
        and path in values
        and values[path] != model_values[path]
    ]
    return (
        replace(
            row, cause=f"the config describes another model: {'; '.join(differences)} ({row.cause})"
        )
        if differences
        else row
    )
