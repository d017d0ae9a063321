"""Holds estimates of memory against published measurements: rows of a CSV file, judged by source.

Every row with `use_mem` is judged; a row that the estimator cannot read is a miss, and counts as an
error of 100 %. Rows of runs that died count if their kind of counter is that of rows that ran.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from bridge.errors import BridgeError
from bridge.layout.architecture import Architecture, Experts, Latent
from bridge.layout.memory.estimate import Estimate, Estimator, RankEstimate
from bridge.layout.memory.rules import MEGATRON, MIB, MemoryRules
from bridge.layout.memory.terms import GIB, sum_by_kind
from bridge.plan.plan import Plan

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
        return Estimator.of(
            Plan.of(self.plan), self.shape, self.world, self.rules
        ).estimate()


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
        "zero.stage": 1 if "zero1" in row["zero"] else 0,
        "optimizer.name": "adamw",
        "recompute.granularity": "full" if row["recompute"] == "full" else "none",
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
    return next(size for size in range(ranks, microbatches + 1) if microbatches % size == 0)


def gib(row: Row, name: str) -> float:
    """A cell in GiB."""
    return float(row[name])


# Sources


def simumax(row: Row) -> Iterator[Judged]:
    """The peaks of the first and the last stage."""
    rules = replace(MEGATRON, loss="te" if "cross-entropy fusion" in row["note"] else "plain")
    estimate = Case(plan_of(row), shape_of(row), number(row, "gpus"), rules).estimate()
    yield Judged("first stage peak", gib(row, "first_stage_peak_gib"), estimate.ranks[0].peak / GIB)
    if len(estimate.ranks) > 1:
        yield Judged("last stage peak", gib(row, "last_stage_peak_gib"), estimate.ranks[-1].peak / GIB)


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
    unfused = row["attention"] == "unfused"
    rules = replace(
        MEGATRON, attention="unfused" if unfused else "flash",
        loss="fused" if "cross-entropy-loss-fusion" in note else "plain",
        fused_gradients="no-gradient-accumulation-fusion" not in note,
    )  # fmt: skip
    estimate = Case(plan_of(row), shape, number(row, "gpus"), rules).estimate()
    last = estimate.ranks[-1]
    yield Judged("after the step", gib(row, "steady_alloc_gib"), last.steady / GIB)
    yield Judged("peak", gib(row, "peak_gib"), last.peak / GIB)


SOURCES: Mapping[str, Callable[[Row], Iterator[Judged]]] = {
    "simumax": simumax,
    "mlm": megatron_tests,
}


# Judging


@dataclass
class Score:
    """What came of the rows of one source."""

    figures: dict[str, list[tuple[str, Judged]]]
    misses: list[tuple[str, str]]
    left_out: int = 0


def judge(rows: Sequence[Row]) -> dict[str, Score]:
    """Judge all rows, by the prefix of their names."""
    scores: dict[str, Score] = {}
    for row in rows:
        source = row["id"].partition("-")[0]
        score = scores.setdefault(source, Score(defaultdict(list), []))
        if row["use_mem"] != "1":
            score.left_out += 1
            continue
        try:
            if source not in SOURCES:
                raise BridgeError(f"{row['stack']}: no rules for this source")
            for one in SOURCES[source](row):
                kind = "experts" if row["experts"] else "dense"
                score.figures[f"{one.what}, {kind}"].append((row["id"], one))
        except BridgeError as error:
            score.misses.append((row["id"], str(error)))
    return scores


def main() -> int:
    """Judge a file; the exit code says whether any row that should be judged was missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rows", action="store_true", help="print every figure")
    given = parser.parse_args()
    with given.file.open(encoding="utf-8", newline="") as file:
        scores = judge(list(csv.DictReader(file)))
    print_scores(scores, given.rows)
    return bool(any(score.misses for score in scores.values()))


def print_scores(scores: Mapping[str, Score], rows: bool) -> None:
    """Print a table of errors by source and figure, and what was missed or left out."""
    for source, score in scores.items():
        for what, figures in score.figures.items():
            errors = [one.error for _, one in figures]
            mean, worst = sum(errors) / len(errors), max(errors)
            print(f"{source:10} {what:32} {len(errors):4} figures  mean {mean:6.2%}  worst {worst:6.2%}")
            for name, one in figures if rows else ():
                print(f"    {one.measured:9.3f} {one.estimated:9.3f} {one.estimated/one.measured-1:+7.2%}  {name}")
        for name, why in score.misses:
            print(f"{source:10} missed: {name}: {why}")
        if score.left_out:
            print(f"{source:10} {score.left_out} rows left out: not marked as enough to judge memory")


if __name__ == "__main__":
    sys.exit(main())
