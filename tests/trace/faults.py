"""The fault catalogue: real bugs, put into the engine's computation or state, with who must find them and what it must say."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from bridge.engine import initialize
from bridge.engine.models.gpt import mean_cross_entropy
from bridge.engine.optimizer import sum_of_squares
from bridge.engine.runner import Engine
from bridge.errors import ConfigError
from bridge.plan.plan import Plan
from bridge.trace.desync import DesyncError, Policy
from tests.engine.runs import Case, microbatches, model_of

Batches = list[tuple[Tensor, Tensor]]
Strike = Callable[[Engine, Batches], Batches | None]
"""Called on a rank at the start of the second step with the engine and its microbatches; others to train on, or None."""

ADAMW = {
    "precision.compute": "fp64",
    "optimizer.name": "adamw",
    "optimizer.lr": 0.01,
    "optimizer.eps": 1e-4,
}
SGD = {"precision.compute": "fp64", "optimizer.name": "sgd", "optimizer.lr": 0.1}
TENSOR = {"parallel.tensor": 2, "batch.micro": 4, "batch.accumulation": 2}
TOKENS = {**TENSOR, "parallel.sequence": True}
DATA = {"parallel.data": 2, "batch.micro": 2, "batch.accumulation": 2}
PIPELINE = {"parallel.pipeline": 2, "batch.micro": 2, "batch.accumulation": 4}
BOTH = {
    "parallel.data": 2,
    "parallel.pipeline": 2,
    "batch.micro": 2,
    "batch.accumulation": 2,
    "zero.stage": 0,
}
FOUR = {
    "parallel.data": 2,
    "parallel.tensor": 2,
    "batch.micro": 2,
    "batch.accumulation": 2,
    "zero.stage": 0,
}


@dataclass(frozen=True)
class Fault:
    """A bug: on which ranks it strikes (`at`; None: all alike), in which layout, who finds it, the tensor that must be named,
    and words that the report must hold.
    """

    strike: Strike
    layout: Mapping[str, Any]
    detector: Literal["check", "diff", "refused"]
    named: str
    words: str
    at: int | None = 1
    optimizer: Mapping[str, Any] = field(default_factory=lambda: ADAMW)
    own: Mapping[str, Any] | None = None
    """Settings that only rank `at` has."""

    @property
    def layouts(self) -> tuple[Mapping[str, Any], ...]:
        """Where it is tried: what only a comparison of runs finds, also with pipelines."""
        return (
            (self.layout, {**self.layout, **PIPED}) if self.detector == "diff" else (self.layout,)
        )


PIPED = {"parallel.pipeline": 2, "schedule.name": "interleaved_1f1b", "schedule.virtual": 2}


def world_of(layout: Mapping[str, Any]) -> int:
    """Ranks of a layout."""
    return prod(layout.get(f"parallel.{axis}", 1) for axis in ("tensor", "data", "pipeline"))


def owned(engine: Engine, shards: Iterable[Tensor], name: str) -> Tensor:
    """What this rank owns of that parameter, in `shards`: one for each flat buffer."""
    for flat, shard in zip(engine.layout.flats, shards, strict=True):
        for piece in flat.pieces(engine.data.index):
            if piece.parameter.name == name:
                return shard[piece.offset : piece.offset + piece.stop - piece.start]
    raise LookupError(name)


NORM, TIED = "block0.norm1.weight", "embedding.tokens.weight"


def flip(tensor: Tensor) -> None:
    """Flip the lowest bit of the third element."""
    tensor.view(-1).view(torch.int64)[2] ^= 1


def after(engine: Engine, call: Callable[[], object]) -> None:
    """Call once the step's gradients are reduced, as part of their reduction."""
    finish = engine.gradients.finish

    def patched() -> None:
        finish()
        call()

    engine.gradients.finish = patched  # type: ignore[method-assign]


def gradient(engine: Engine) -> Tensor:
    return owned(engine, [shard for _, shard in engine.gradients.parts()], NORM)


def moment(engine: Engine) -> Tensor:
    return owned(
        engine,
        [engine.optimizer.state(index)["exp_avg"] for index in range(len(engine.layout.flats))],
        NORM,
    )


def lost_sum(engine: Engine, batches: Batches) -> None:
    engine.gradients._partial = dict  # type: ignore[method-assign, assignment]


def scaled_loss(factor: Callable[[Engine], float]) -> Strike:
    def strike(engine: Engine, batches: Batches) -> None:
        engine.loss_fn = lambda output, targets: (
            mean_cross_entropy(output, targets) * factor(engine)
        )

    return strike


def scaled_output(engine: Engine, batches: Batches) -> None:
    engine.model.get_submodule("block1").register_forward_hook(
        lambda module, inputs, output: output * 1.00001, prepend=True
    )


def stale_tie(engine: Engine, batches: Batches) -> None:
    """The head multiplies by what the tied weight was a step ago."""
    logits: Any = engine.model.get_submodule("head.logits")
    old = model_of(Case({})).get_submodule("head.logits").weight.detach()
    logits.forward = lambda stream: torch.nn.functional.linear(stream, old)  # type: ignore[arg-type]


def stale_copy(engine: Engine, batches: Batches) -> None:
    """The copy of the tied weight on a rank is what it was before the first step."""
    old = model_of(Case({})).get_parameter(TIED).detach()
    owned(engine, engine.weights.shards, TIED).copy_(old.view(-1))


def lost_tie(engine: Engine, batches: Batches) -> None:
    """Each pipeline rank updates its copy of the tied weight by its own gradient alone."""
    engine.gradients._tied = []


class Nothing(set[str]):
    """Holds nothing, whatever is added: what was written before is written over."""

    def __contains__(self, name: object) -> bool:
        return False


def last_only(engine: Engine, batches: Batches) -> None:
    """Every microbatch's gradient overwrites that of the one before. Untouched parameters do not exist in this model."""
    engine.gradients._written = Nothing()
    engine.gradients._zero_untouched = lambda flat, whole: None  # type: ignore[method-assign]


def local_norm(engine: Engine, batches: Batches) -> None:
    """Each rank clips by the norm of what it owns."""
    agree = engine._agree

    def patched() -> tuple[float, ...]:
        _, *others = agree()
        own = [
            part
            for flat, shard in engine.gradients.parts()
            for part in engine._slice_for_norm(flat, shard)
        ]
        return float(sum_of_squares(own)), *others

    engine._agree = patched  # type: ignore[method-assign]


def lost_moments(engine: Engine, batches: Batches) -> None:
    """A resume that brought back no optimizer state on one rank."""
    engine.optimizer.state = lambda index: {}  # type: ignore[method-assign]


def poisoned(engine: Engine, batches: Batches) -> None:
    after(engine, lambda: gradient(engine)[2:3].fill_(float("nan")))


def shuffled(part: int) -> Strike:
    """Inputs (0) or labels (1) of another order."""
    return lambda engine, batches: [
        tuple(x.roll(1) if at == part else x for at, x in enumerate(it)) for it in batches
    ]  # type: ignore[misc]


def nothing(engine: Engine, batches: Batches) -> None:
    """The fault is there before the first step."""


CLIPPED = {**SGD, "optimizer.clip": 0.01}
TWO = "ranks 0, 1 disagree"

FAULTS: Mapping[str, Fault] = {
    "skipped all-reduce of layer-norm gradients": Fault(
        lost_sum, TOKENS, "check", "2/reduce/block0/gradient/norm1.weight", TWO, None
    ),
    "wrong loss scaling under accumulation": Fault(
        scaled_loss(lambda engine: 4.0),
        {"parallel.tensor": 2, "batch.micro": 2, "batch.accumulation": 4},
        "diff",
        "2/backward/head/input gradient",
        "A is 4 times B; this factor is the number of microbatches of A",
        None,
        SGD,
    ),
    "loss divided by the tensor ranks": Fault(
        scaled_loss(lambda engine: 1 / engine.tensor.size),
        TOKENS,
        "diff",
        "2/backward/head/input gradient",
        "A is 0.5 times B; this factor is one over the number of tensor ranks of A",
        None,
        SGD,
    ),
    "stale tied weight": Fault(
        stale_tie, DATA, "diff", "2/forward/head/output", "cosine", None, SGD
    ),
    "stale tied weight on one pipeline rank": Fault(
        stale_copy,
        BOTH,
        "check",
        "2/reduce/embedding/weight/tokens.weight",
        "of ranks 0, 1, 2, 3, rank 3 differs",
        3,
    ),
    "tied gradients not summed over pipeline ranks": Fault(
        lost_tie, PIPELINE, "check", "2/reduce/embedding/gradient/tokens.weight", TWO, None
    ),
    "microbatches in another order on one pipeline rank": Fault(
        lambda engine, batches: batches[::-1],
        PIPELINE,
        "check",
        "2/forward/microbatch 0/input/0",
        TWO,
    ),
    "swapped microbatches": Fault(
        lambda engine, batches: batches[::-1],
        TOKENS,
        "diff",
        "2/forward/input/0",
        "samples are swapped",
        None,
        SGD,
    ),
    "gradient of the last microbatch only": Fault(
        last_only,
        {**DATA, "zero.stage": 1},
        "diff",
        "2/reduce/embedding/gradient/tokens.weight",
        "cosine",
        None,
        SGD,
    ),
    "clipping with a local norm": Fault(
        local_norm,
        {**DATA, "zero.stage": 2},
        "diff",
        "2/reduce/embedding/gradient/tokens.weight",
        "",
        None,
        CLIPPED,
    ),
    "an activation off by 1e-5 on one rank": Fault(
        scaled_output, TENSOR, "check", "2/forward/block1/microbatch 0/output", TWO
    ),
    "an activation off by 1e-5 on all ranks": Fault(
        scaled_output, TOKENS, "diff", "2/forward/block1/output", "A is 1.00001 times B", None, SGD
    ),
    "one bit flipped in a weight": Fault(
        lambda engine, batches: flip(owned(engine, engine.weights.shards, NORM)),
        FOUR,
        "check",
        "2/reduce/block0/weight/norm1.weight",
        "of ranks 0, 1, 2, 3, rank 2 differs from the others; 1 of 16 elements, first at [2]",
        2,
    ),
    "one bit flipped in a gathered copy of a weight": Fault(
        lambda engine, batches: flip(dict(engine.module.named_parameters())[NORM].data),
        {**DATA, "zero.stage": 1},
        "check",
        "2/reduce/block0/replica/norm1.weight",
        TWO,
    ),
    "one bit flipped in a gradient": Fault(
        lambda engine, batches: after(engine, lambda: flip(gradient(engine))),
        FOUR,
        "check",
        "2/reduce/block0/gradient/norm1.weight",
        "of ranks 0, 1, 2, 3, rank 3 differs from the others; 1 of 16 elements, first at [2]",
        3,
    ),
    "one bit flipped in an optimizer moment": Fault(
        lambda engine, batches: flip(moment(engine)),
        FOUR,
        "check",
        "2/reduce/block0/moment/norm1.weight.exp_avg",
        "of ranks 0, 1, 2, 3, rank 0 differs from the others; 1 of 16 elements, first at [2]",
        0,
    ),
    "a NaN in a gradient on one rank": Fault(
        poisoned, TENSOR, "check", "2/reduce/block0/gradient/norm1.weight", "NaNs: 0, 1"
    ),
    "other random numbers on one rank": Fault(
        lambda engine, batches: torch.manual_seed(3) and None,
        TENSOR,
        "check",
        "2/reduce/generator",
        TWO,
    ),
    "another learning rate on one rank": Fault(
        lambda engine, batches: setattr(engine.progress, "lr", 0.5),
        DATA,
        "check",
        "2/reduce/state/counters",
        TWO,
    ),
    "other inputs within a tensor group": Fault(
        shuffled(0), TENSOR, "check", "2/forward/microbatch 0/input/0", TWO
    ),
    "other labels within a tensor group": Fault(
        shuffled(1), TENSOR, "check", "2/forward/microbatch 0/input/1", TWO
    ),
    "differing tensor lists": Fault(
        lost_moments,
        TENSOR,
        "check",
        "2/reduce/list",
        "rank 0 has 2/reduce/block0/moment/norm1.weight.exp_avg",
        1,
    ),
    "another config on one rank": Fault(
        nothing,
        TENSOR,
        "refused",
        "optimizer.lr",
        "rank 0 has 0.01, rank 1 has 0.02",
        own={"optimizer.lr": 0.02},
    ),
}

LOGS = ("layer_outputs", "layer_gradients", "param_init", "all_param_gradients", "param_update")
LEVELS = {f"debug.{name}": 13 for name in LOGS}


def values(fault: Fault, layout: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """Plan values on that rank."""
    watched = LEVELS if fault.detector == "diff" else {"debug.tensor_parallel": True}
    own = fault.own if fault.own and rank == fault.at else {}
    return {**fault.optimizer, **layout, **own, **watched}


def struck(
    rank: int, world: int, name: str, layout: Mapping[str, Any], folder: Path
) -> tuple[list[str], int]:
    """Train three steps with that fault in the second; what the checks reported, and steps done."""
    fault = FAULTS[name]
    torch.manual_seed(5)
    case, steps = Case(values(fault, layout, rank)), 0
    try:
        plan = Plan.of(case.plan)
        engine = initialize(
            model_of(case), plan, mean_cross_entropy, seed=11, trace=folder, policy=Policy()
        )
        for step in range(case.steps):
            batches = list(microbatches(case, engine, step))
            if step == 1 and fault.at in (rank, None):
                batches = fault.strike(engine, batches) or batches
            engine.train_batch(batches)
            steps += 1
    except DesyncError as error:
        return [str(mismatch) for mismatch in error.mismatches], steps
    except ConfigError as error:
        return list(error.problems), steps
    return [], steps


def table() -> str:
    """The catalogue in Markdown."""
    heads = ("fault", "strikes", "layout", "found by", "named")
    rows = [heads, ("---",) * len(heads)]
    for name, fault in FAULTS.items():
        layout = _told(fault.layout) + "; also with pipeline 2, interleaved" * (
            len(fault.layouts) - 1
        )
        where = "all ranks" if fault.at is None else f"rank {fault.at}"
        rows.append((name, where, layout, DETECTORS[fault.detector], f"`{fault.named}`"))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _told(layout: Mapping[str, Any]) -> str:
    sizes = {
        path.partition(".")[2]: value
        for path, value in layout.items()
        if path.startswith("parallel.")
    }
    axes = [name if value is True else f"{name} {value}" for name, value in sizes.items()]
    return ", ".join(
        axes + [f"ZeRO {level}" for path, level in layout.items() if path == "zero.stage"]
    )


DETECTORS = {
    "check": "desync check",
    "diff": "`trace diff`",
    "refused": "refused before the first step",
}
