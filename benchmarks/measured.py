"""Holds estimates of memory against published measurements: rows of a CSV file, judged by source.

Every row with `use_mem` is judged; a row that the estimator cannot read is a miss, and counts as an
error of 100 %. Runs that died are held against the memory of their device where the rows next to
them say what a device shows.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from bridge.errors import BridgeError
from bridge.layout.architecture import Architecture, Experts, Latent
from bridge.layout.memory.estimate import MOMENTS, Estimate, Estimator
from bridge.layout.memory.margins import RESERVED
from bridge.layout.memory.terms import GIB, sum_by_kind
from bridge.plan.plan import Plan
from bridge.stack.memory_rules import MIB, MemoryRules
from compat.megatron.memory import RULES as MEGATRON

Row = Mapping[str, str]


class Judged(NamedTuple):
    """One figure of a row: what it is, what was measured and what was estimated, in GiB."""

    what: str
    measured: float
    estimated: float

    @property
    def error(self) -> float:
        """The distance of the estimate from the measurement, as a share of the measurement."""
        return abs(self.estimated - self.measured) / self.measured


@dataclass(frozen=True)
class Case:
    """A row as the estimator takes it."""

    plan: Mapping[str, Any]
    shape: Architecture
    world: int
    rules: MemoryRules

    def estimate(self) -> Estimate:
        """The estimate of the row."""
        return Estimator.of(Plan.of(self.plan), self.shape, self.world, self.rules).estimate()


# A row as a plan and a model


def number(row: Row, name: str, default: int = 0) -> int:
    """A cell as a whole number."""
    return int(float(row[name])) if row[name] else default


def shape_of(row: Row, **settings: Any) -> Architecture:
    """The model of a row. `settings` are what the source says outside its columns."""
    hidden, heads = number(row, "hidden"), number(row, "heads") or number(row, "hidden") // 128
    tensor = number(row, "tp", 1)
    vocab = number(row, "vocab", 50257)
    latent = re.fullmatch(r"q(\d+),kv(\d+),nope(\d+),rope(\d+),v(\d+)", row["mla"])
    experts = None
    layers = number(row, "layers")
    if row["experts"]:
        dense = number(row, "dense_layers")
        experts = Experts(
            number(row, "experts"), number(row, "expert_ffn"), number(row, "top_k", 1),
            number(row, "shared_ffn"), layers=tuple(index >= dense for index in range(layers)),
        )  # fmt: skip
    multiple = settings.pop("multiple", 128) * tensor
    usual = Architecture(
        layers=layers, hidden=hidden, heads=heads, kv_heads=number(row, "kv_heads", heads),
        ffn=number(row, "ffn"), vocab=-(-vocab // multiple) * multiple,
        sequence=number(row, "seq"), norm="rms" if row["gated"] == "1" else "layer",
        gated=row["gated"] == "1", tied=row["tied"] == "1", bias=row["gated"] != "1",
        head_size=number(row, "head_dim") or None,
        latent=Latent(*map(int, latent.groups())) if latent else None,
        head_norm="width" if latent else "none", experts=experts,
    )  # fmt: skip
    return replace(usual, **settings)


def plan_of(row: Row, **settings: Any) -> dict[str, Any]:
    """The plan of a row. `settings` are fields that the source says outside its columns."""
    axes = {"tensor": "tp", "pipeline": "pp", "context": "cp", "data": "dp", "expert": "ep"}
    flat: dict[str, Any] = {f"parallel.{axis}": number(row, name, 1) for axis, name in axes.items()}
    if row["etp"] and row["experts"]:
        flat["parallel.expert_tensor"] = number(row, "etp")
    flat |= {
        "parallel.sequence": row["sp"] == "1" and number(row, "tp", 1) > 1,
        "parallel.vocabulary": True,
        "schedule.virtual": number(row, "vp", 1) if number(row, "vp", 1) > 1 else None,
        "schedule.group": group_of(row),
        "schedule.name": "interleaved_1f1b" if number(row, "vp", 1) > 1 else "1f1b",
        "stages.rule": "even",
        "batch.micro": number(row, "micro", 1),
        "batch.accumulation": number(row, "microbatches", 1),
        "precision.compute": "bf16",
        "precision.master": "fp32",
        "precision.reduce": "fp32",
        "zero.stage": 1 if "zero1" in row["zero"] else 3 if "fsdp" in row["zero"] else 0,
        "optimizer.name": "adamw",
        "recompute.granularity": next(
            (kind for kind in ("full", "selective") if kind in row["recompute"]), "none"
        ),
    }
    flat |= settings
    if flat["parallel.pipeline"] == 1:
        flat |= {"schedule.name": None, "schedule.virtual": None, "stages.rule": None}
    return flat


def group_of(row: Row) -> int | None:
    """The number of microbatches that pass a stage together: Megatron takes as many as there are
    pipeline ranks, unless the recipe says more because they do not divide the microbatches.
    """
    ranks, microbatches = number(row, "pp", 1), number(row, "microbatches", 1)
    if number(row, "vp", 1) == 1 or microbatches % ranks == 0:
        return None
    sizes = range(ranks, microbatches + 1)
    return next((size for size in sizes if microbatches % size == 0), None)


def gib(row: Row, name: str) -> float:
    """A cell in GiB."""
    return float(row[name])


# Sources


def simumax(row: Row) -> Iterator[Judged]:
    """The peaks of the first and the last stage."""
    exchange = {"parallel.context_method": "a2a"} if "cp a2a" in row["note"] else {}
    rules = replace(MEGATRON, loss="te" if "cross-entropy fusion" in row["note"] else "plain")
    estimate = Case(plan_of(row, **exchange), shape_of(row), number(row, "gpus"), rules).estimate()
    yield Judged("first stage peak", gib(row, "first_stage_peak_gib"), estimate.ranks[0].peak / GIB)
    if len(estimate.ranks) > 1:
        yield Judged(
            "last stage peak", gib(row, "last_stage_peak_gib"), estimate.ranks[-1].peak / GIB
        )


def megatron_tests(row: Row) -> Iterator[Judged]:
    """What the last rank keeps after a step, and its peak."""
    note = row["note"]
    drop = re.search(r"dropout hidden/attention ([\d.]+)/([\d.]+)", note)
    assert drop is not None, "every row of this source says its dropout"
    learned = "learned_absolute" in note
    shape = shape_of(
        row, bias="; bias;" in note, norm="layer" if "LayerNorm" in note else "rms",
        dropout=float(drop[1]), attention_dropout=float(drop[2]), rotary=not learned,
        positions=number(row, "seq") if learned else None,
    )  # fmt: skip
    unfused = "unfused" in row["attention"]
    sharded = row["zero"].startswith(("megatron-fsdp", "fsdp"))
    rules = replace(
        MEGATRON,
        sharding="fsdp" if sharded else "megatron", attention="unfused" if unfused else "flash",
        loss="fused" if "cross-entropy-loss-fusion" in note else "plain",
        fused_gradients="no-gradient-accumulation-fusion" not in note,
    )  # fmt: skip
    estimate = Case(plan_of(row), shape, number(row, "gpus"), rules).estimate()
    last = estimate.ranks[-1]
    yield Judged("after the step", gib(row, "steady_alloc_gib"), last.steady / GIB)
    yield Judged("peak", gib(row, "peak_gib"), last.peak / GIB)


def bigscience(row: Row) -> Iterator[Judged]:
    """The memory of a node as its tool showed it: what is counted, with two constants fitted."""
    hidden = number(row, "hidden")
    pipeline = number(row, "pp", 1)
    layers = number(row, "layers")
    if not layers:
        # The name says the parameters, of which a block has 12 hidden^2.
        billions = float(re.sub(r"[^0-9.]", "", row["model"]))
        layers = round((billions * 1e9 - 250880 * hidden) / (12 * hidden**2) / pipeline) * pipeline
    heads = number(row, "heads") or (96 if hidden % 96 == 0 else 64)
    shape = shape_of(
        {**row, "layers": str(layers), "heads": str(heads), "head_dim": "", "vocab": "250880"},
        dropout=0.1, attention_dropout=0.1, rotary=True,
    )  # fmt: skip
    brain = row["precision"] == "bf16"
    plan = plan_of(
        row, **{
            "precision.compute": "bf16" if brain else "fp16",
            "precision.reduce": "fp32" if brain else "fp16",
            "recompute.granularity": "full",
            "batch.accumulation": max(1, number(row, "global") // number(row, "micro") // number(row, "dp")),
            "stages.rule": "even" if layers % pipeline == 0 else "floor_last",
            "zero.stage": 0 if row["zero"] == "zero0" else 1,
        },
    )  # fmt: skip
    rules = MemoryRules(
        sharding="deepspeed", kernels="fused", attention="unfused", loss="plain", workspace=92 * MIB
    )
    largest = Case(plan, shape, number(row, "gpus"), rules).estimate().largest
    shown = NODE_BASE + NODE_FACTOR * largest.peak / GIB
    yield Judged("shown", float(row["peak_reported"] or 80), shown)


def galvatron(row: Row) -> Iterator[Judged]:
    """States, activations after a forward pass, and activations at the peak.

    A row is a run of 16 sequences: a layer that is computed again keeps 16 inputs.
    """
    settings = {
        "batch.micro": 16 // number(row, "dp", 1),
        "batch.accumulation": 1,
        "zero.stage": 3,
        "precision.reduce": "bf16",
    }
    rules = MemoryRules(
        sharding="fsdp", units="layers", kernels="fused", loss="plain", workspace=16 * MIB
    )
    case = Case(plan_of(row, **settings), shape_of(row, multiple=1), number(row, "gpus"), rules)
    estimate = case.estimate()
    first = row["peak_scope"] == "rank 0"
    rank = estimate.ranks[0 if first else -1]
    yield Judged("states", gib(row, "states_gib"), rank.steady / GIB)
    moment = rank.moments.get(MOMENTS["loss"]) or rank.moments[MOMENTS["forward"]]
    sizes = sum_by_kind(moment)
    logits = sizes.get("logits", 0)
    after = sizes["activations"] + logits / 3  # in bf16, of 6 bytes that the loss needs
    yield Judged("activations", gib(row, "act_gib"), after / GIB)
    # Without "vtp" the vocabulary's layers are not split: they are sharded over all ranks.
    whole = 0 if "vtp" in row["id"] else case.shape.vocab * case.shape.hidden * 2
    whole -= whole // number(row, "tp", 1)
    yield Judged("activations at the peak", gib(row, "act_peak_gib"), max(
        sum(size for kind, size in sum_by_kind(terms).items() if kind not in ("weights", "master", "moments"))
        + (whole if name == MOMENTS["loss"] else 0)
        for name, terms in rank.moments.items()
    ) / GIB)  # fmt: skip


def internevo(row: Row) -> Iterator[Judged]:
    """The memory of a run as a device shows it: in whole GB, all of the process."""
    fsdp = row["zero"] == "fsdp"
    plan = plan_of(
        row, **{
            "zero.stage": 3 if fsdp else 1, "precision.reduce": "bf16", "zero.bucket": 2**24,
            "stages.rule": "even",
        },
    )  # fmt: skip
    rules = MemoryRules(
        sharding="deepspeed", kernels="fused", loss="plain", foreach=True, workspace=92 * MIB
    )
    largest = Case(plan, shape_of(row, multiple=1), number(row, "gpus"), rules).estimate().largest
    yield Judged("shown", float(row["peak_reported"]), NODE_BASE + NODE_FACTOR * largest.peak / GIB)


NODE_BASE, NODE_FACTOR = 7.0, 1.075
"""What nvidia-smi shows, in GiB, for what an allocator counts: context, NCCL and fragments."""


def torchtune(row: Row) -> Iterator[Judged]:
    """The peak of one device that trains all weights in bf16."""
    compiled = row["compile"] == "1"
    plan = plan_of(row, **{"precision.master": "bf16", "precision.reduce": "bf16", "zero.stage": 0})
    rules = MemoryRules(
        sharding="ddp", kernels="fused" if compiled else "torch",
        loss="te" if "chunked-ce" in row["note"] or row["recompute"] == "full" else "torch",
    )  # fmt: skip
    largest = Case(plan, shape_of(row, multiple=1), number(row, "gpus"), rules).estimate().largest
    yield Judged("peak", gib(row, "peak_gib"), largest.peak / GIB)


def deepspeed(row: Row) -> Iterator[Judged]:
    """The peak of ZeRO 3, as torch counts it and the source prints it."""
    low = "bf16 master" in row["optimizer_state"]
    master = "bf16" if low else "fp32"
    plan = plan_of(row, **{"precision.master": master, "precision.reduce": "bf16", "zero.stage": 3})
    shape = shape_of(
        {**row, "vocab": "50000"}, multiple=1, positions=number(row, "seq"), rotary=False
    )
    rules = MemoryRules(sharding="deepspeed", attention="flash", loss="torch")
    largest = Case(plan, shape, number(row, "gpus"), rules).estimate().largest
    yield Judged("peak", float(row["peak_reported"]), largest.peak / GIB)


def torchtitan(row: Row) -> Iterator[Judged]:
    """The reserved memory of FSDP2."""
    plan = plan_of(row, **{"zero.stage": 3})
    rules = MemoryRules(sharding="fsdp", kernels="fused", loss="torch")
    largest = Case(plan, shape_of(row, multiple=1), number(row, "gpus"), rules).estimate().largest
    yield Judged("peak, reserved", gib(row, "peak_gib"), RESERVED * largest.peak / GIB)


SOURCES: Mapping[str, Callable[[Row], Iterator[Judged]]] = {
    "simumax": simumax,
    "mlm": megatron_tests,
    "bigsci": bigscience,
    "galvatron": galvatron,
    "intern": internevo,
    "tune": torchtune,
    "ds": deepspeed,
    "titan": torchtitan,
}


FEASIBLE = ("bigsci",)
"""Sources with runs that died for want of memory, in the rows of a counter that shows all of it."""


# Judging


@dataclass
class Score:
    """What came of the rows of one source."""

    figures: dict[str, list[tuple[str, Judged]]]
    misses: list[tuple[str, str]]
    left_out: int = 0
    died: list[tuple[str, bool]] = field(default_factory=list)
    ran: list[tuple[str, bool]] = field(default_factory=list)


def judge(rows: Sequence[Row]) -> dict[str, Score]:
    """Judge all rows, by the prefix of their names."""
    scores: dict[str, Score] = {}
    for row in rows:
        source = row["id"].partition("-")[0]
        score = scores.setdefault(source, Score(defaultdict(list), []))
        died = row["outcome"] == "OOM" and source in FEASIBLE
        if row["use_mem"] != "1" and not died:
            score.left_out += 1
            continue
        try:
            if source not in SOURCES:
                raise BridgeError(f"{row['stack']}: no rules for this source")
            for one in SOURCES[source](row):
                if source in FEASIBLE:
                    called_dead = one.estimated > float(row["gpu_mem_gib"])
                    (score.died if died else score.ran).append((row["id"], called_dead))
                if died:
                    continue
                kind = "experts" if row["experts"] else "dense"
                score.figures[f"{one.what}, {kind}"].append((row["id"], one))
        except (BridgeError, ArithmeticError, AssertionError, LookupError, ValueError) as error:
            # A cell that nobody foresaw: the row is a miss, and the others are judged all the same.
            score.misses.append((row["id"], str(error)))
    return scores


def main() -> int:
    """Judge a file; the exit code says whether any row that should be judged was missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rows", action="store_true", help="print every figure")
    given = parser.parse_args()
    with given.file.open(encoding="utf-8", newline="") as file:
        scores = judge(list(csv.DictReader(file)))
    if given.json:
        print(json.dumps({source: as_json(score) for source, score in scores.items()}, indent=2))
    else:
        print_scores(scores, given.rows)
    return bool(any(score.misses for score in scores.values()))


def as_json(score: Score) -> dict[str, Any]:
    """A score as data: errors are shares of what was measured, and a miss is an error of 1."""
    figures = {}
    for what, pairs in score.figures.items():
        errors = [one.error for _, one in pairs]
        figures[what] = {
            "rows": len(errors),
            "mean": sum(errors) / len(errors),
            "worst": max(errors),
            "claimed": len(errors) >= CLAIMED,
            "figures": {
                name: {"measured": one.measured, "estimated": one.estimated} for name, one in pairs
            },
        }
    return {
        "figures": figures,
        "missed": dict(score.misses),
        "left_out": {"rows": score.left_out, "why": LEFT_OUT},
        "died": dict(score.died),
        "called_dead": [name for name, dead in score.ran if dead],
    }


CLAIMED = 5
"""Number of rows from which on an error says something of a source."""
LEFT_OUT = "not marked as enough to judge memory"


def print_scores(scores: Mapping[str, Score], rows: bool) -> None:
    """Print a table of errors by source and figure, and what was missed or left out."""
    for source, score in scores.items():
        for what, figures in score.figures.items():
            errors = [one.error for _, one in figures]
            mean, worst, few = sum(errors) / len(errors), max(errors), len(errors) < CLAIMED
            claim = ", too few rows to claim" if few else ""
            number = f"{len(errors):4} figures"
            print(f"{source:10} {what:32} {number}  mean {mean:6.2%}  worst {worst:6.2%}{claim}")
            for name, one in figures if rows else ():
                off = one.estimated / one.measured - 1
                print(f"    {one.measured:9.3f} {one.estimated:9.3f} {off:+7.2%}  {name}")
        if score.died:
            dead = sum(named for _, named in score.died)
            wrong = [name for name, called in score.ran if called]
            print(
                f"{source:10} {dead} of {len(score.died)} runs that died are named;"
                f" {len(wrong)} of {len(score.ran)} that ran are called dead: {', '.join(wrong)}"
            )
        for name, why in score.misses:
            print(f"{source:10} missed, an error of 100 %: {name}: {why}")
        if score.left_out:
            print(f"{source:10} {score.left_out} rows left out: {LEFT_OUT}")


if __name__ == "__main__":
    sys.exit(main())
