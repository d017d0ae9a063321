"""Judges two configs on a user's own model and batch.

Each config runs on its engine, and is compared with the plan of the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from bridge.backend import Backend, Workload
from bridge.dialect import Config
from bridge.engine.backend import BACKEND as NATIVE
from bridge.engine.models.gpt import IGNORED
from bridge.engine.models.pretrained import dropping, opened, settings
from bridge.engine.rows import Rows
from bridge.errors import BridgeError
from bridge.layout.architecture import Architecture
from bridge.lifting import lift
from bridge.plan import Plan
from bridge.state import names
from bridge.state.hub import Model
from bridge.verify.cause import Bench
from bridge.verify.judge import Report, Row, verify
from bridge.verify.measure import Measured, Run, measure
from bridge.verify.own import alone
from bridge.verify.pair import Pair, Side
from bridge.verify.proof import neutral
from bridge.verify.size import Size, made, steps_for

OWN_MODEL = ("megatron",)
"""Names of engines that build the model themselves, and copy the user's weights into it."""
UNDROPPED = dict.fromkeys(
    ("model.dropout", "model.attention.dropout", "model.embedding.dropout"), 0.0
)


@dataclass(frozen=True)
class Given:
    """The user's model and batch: the model's folder and config.json, and the batch's rows."""

    folder: Path
    model: Config
    rows: Rows
    seed: int = 1234

    def workload(self, own: bool, facts: Model | None) -> Workload:
        """The workload of an engine.

        An engine that builds its `own` model also gets the weights, by native names.
        """
        said = made(
            lift(self.model),
            {
                "model.sequence": self.rows.sequence,
                "model.embedding.padded_vocab": None,
                **UNDROPPED,
            },
        )
        words = said.model.vocab or int(self.rows.planes[:, 0].max()) + 1
        shape = Architecture(vocab=words, sequence=self.rows.sequence)
        first = None
        if own and facts is not None:
            plain = opened(self.folder, self.seed, drops=False)
            first = neutral(
                {name: weight.detach() for name, weight in plain.named_parameters()}, facts
            )
        return Workload(
            shape,
            self.seed,
            model=said.model if own else None,
            folder=self.folder,
            first=first,
            rows=self.rows,
        )

    def _blind(self) -> list[int]:
        """Indices of rows with a loss at a token that cannot attend to any token.

        These tokens are padding on the left, before the first real token.
        """
        mask = self.rows.named(self.rows.planes).get("attention_mask")
        if mask is None:
            return []
        # Attention is causal, so that a token sees the ones before it that the mask leaves.
        unseeing = mask.cumsum(1) == 0
        found: list[int] = (
            (unseeing & (self.rows.targets != IGNORED)).any(1).nonzero().view(-1).tolist()
        )
        return found

    def refused(self, engines: Mapping[Side, Backend]) -> Iterator[str]:
        """Yield the reasons why engines cannot train on this batch."""
        known = ("input_ids", "attention_mask", "position_ids")
        for engine in engines.values():
            if engine.name not in OWN_MODEL:
                continue
            yield from (
                f"{engine.name}: {name}: the engine's model has no such input"
                for name in self.rows.names
                if name not in known
            )
            blind = self._blind()
            if blind:
                told = (
                    "torch's attention gives zeros for these tokens, Megatron's does not; "
                    "set the labels of these tokens to -100"
                )
                yield (
                    f"{engine.name}: attention_mask: row {blind[0]} has losses at tokens that "
                    f"cannot attend to any token; {told}"
                )
            positions = self.rows.named(self.rows.planes).get("position_ids")
            rotary = lift(self.model).model.embedding.positions == "rotary"
            if (
                rotary
                and positions is not None
                and bool((positions[:, 1:] != positions[:, :-1] + 1).any())
            ):
                yield (
                    f"{engine.name}: position_ids: found positions that are not consecutive; "
                    "the engine's rotary positions count from 0"
                )


@dataclass(frozen=True)
class OnBatch(Bench):
    """Runs the user's model on the user's rows, with common names of weights. `trained` holds two
    workloads: under True for engines that build the model themselves, and under False for other
    engines.
    """

    trained: Mapping[bool, Workload] = field(default_factory=dict)
    facts: Model | None = None

    def _measured(self, run: Run, plan: Plan) -> Measured:
        workload = replace(self.trained[run.backend.name in OWN_MODEL], micro=self.micro)
        found = measure(run, workload, self.steps)
        if self.facts is None:
            return found
        return replace(found, weights=tuple(neutral(part, self.facts) for part in found.weights))

    def expected(self, plan: Plan) -> Measured:
        """The run of `plan` on the reference engine, with data ranks only."""
        micro = plan.batch.micro or self.micro
        accumulation = max(1, (plan.batch.global_ or micro * self.world) // (micro * self.world))
        return super().expected(alone(plan, Size(self.world, 1, 1, micro, accumulation)))


def judged(
    pair: Pair,
    engines: Mapping[Side, Backend],
    given: Given,
    steps: int | None,
    note: Callable[[str], object] = print,
) -> Report:
    """Judge two configs on the user's model and batch. The reference is the plan of the first, on
    the native engine.
    """
    BridgeError.raise_if(given.refused(engines))
    own = {engine.name in OWN_MODEL for engine in engines.values()}
    facts = names.described(given.model) if any(own) else None
    trained = {wanted: given.workload(wanted, facts) for wanted in {*own, False}}
    steps = steps or max(map(steps_for, pair.plans.values()))
    bench = OnBatch(
        pair.size.micro, steps, False, pair.size.world, NATIVE, trained=trained, facts=facts
    )
    dropped = {name: (value, 0.0) for name, value in dropping(settings(given.folder)).items()}
    whole = replace(pair, changes={**pair.changes, **dropped})
    report = verify(whole, {}, None, note=note, engines=engines, bench=bench)
    return replace(report, rows=tuple(_remodelled(row, pair, given.model) for row in report.rows))


UNLIKE = (
    "model.embedding.padded_vocab",
    "model.embedding.max_positions",
    "model.sequence",
    "model.init.",
    *UNDROPPED,
)
"""Names of fields in which two descriptions of one model may differ."""


def _remodelled(row: Row, pair: Pair, folder: Config) -> Row:
    """Return the row of a run that differs, or that did not run. If the config describes another
    model than the folder, the cause states this.
    """
    if not row.written or row.verdict not in ("differs", "not run"):
        return row
    said, known = lift(pair.config(row.side)).values(), lift(folder).values()
    told = [
        f"{path}: found {said[path]}, config.json has {known[path]}"
        for path in known
        if path.startswith("model.")
        and not path.startswith(UNLIKE)
        and path in said
        and said[path] != known[path]
    ]
    return (
        replace(row, cause=f"its config describes another model: {'; '.join(told)} ({row.cause})")
        if told
        else row
    )
