"""Steps are read as arrays and compared at once: the same numbers as tensor by tensor, every rank's copy, settings first."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from bridge.cli import run as command
from bridge.errors import BridgeError
from bridge.trace.columns import ColumnReader, Gathering
from bridge.trace.comparison import Comparison
from bridge.trace.log import Log
from bridge.trace.placement import Placement
from bridge.trace.record import Name
from bridge.trace.run import TracedRun
from bridge.trace.run_comparison import compare_runs

FORMATS = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.float16)
ABOUT = {
    "engine": "module",
    "layers": ["a", "b"],
    "mesh": {"data": 2},
    "formats": ["float32"],
    "settings": {"group 0.lr": 0.1, "optimizer": "SGD"},
}


def drawn(folder: Path, seed: int, world: int = 2, steps: int = 4) -> TracedRun:
    """A run whose tensors are whole, split, copied, of several formats, kept whole or not, with and without samples, and are not
    the same in every step.
    """
    random = Random(seed)
    plan = [
        (random.choice(("whole", "rows", "run")), random.choice(FORMATS), random.randint(1, 8))
        for _ in range(9)
    ]
    for rank in range(world):
        logs = (
            Log(folder, rank, {**ABOUT, "ranks": world}),
            Log(folder, rank, {**ABOUT, "ranks": world}, full=True),
        )
        for step in range(steps):
            log = logs[seed % 2]
            for number, (how, dtype, level) in enumerate(plan[: 9 - step % 2]):
                whole = (
                    torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + number))
                    .mul(9)
                    .to(dtype)
                )
                place = Placement.full((4, 6), ("data",))
                local = whole
                if how == "rows":
                    place, local = (
                        Placement.box((4, 6), (2 * rank, 0), (2, 6)),
                        whole[2 * rank : 2 * rank + 2],
                    )
                elif how == "run":
                    place, local = (
                        Placement.full((4, 6)).run(10 * rank, (10, 24)[rank]),
                        whole.view(-1)[10 * rank : (10, 24)[rank]],
                    )
                log.add(
                    Name(step, "forward", "ab"[number % 2], None, "output", str(number)),
                    local,
                    place,
                    level,
                    0,
                )
            log.write(step)
    return TracedRun.read(folder)


@pytest.mark.parametrize("seed", range(12))
def test_steps_are_read_at_once_as_they_are_tensor_by_tensor(seed: int, tmp_path: Path) -> None:
    run = drawn(tmp_path, seed)
    reader, patterns = ColumnReader(run), set()
    for step in run.steps:
        columns, entries = reader.columns(step), run.entries(step)
        patterns.add(id(columns.pattern))
        assert [entry.name[1:] for entry in columns.pattern.entries] == [
            entry.name[1:] for entry in entries
        ]
        gathering = Gathering(columns.pattern.entries, columns.pattern)
        figures, samples = gathering.figures(columns), gathering.samples(columns)
        for at, entry in enumerate(entries):
            summary = entry.summary
            assert gathering.told[at] == (summary is not None)
            if summary is not None:
                expected = [
                    summary.count,
                    summary.nans,
                    summary.infs,
                    summary.total,
                    summary.squares,
                    summary.low,
                    summary.high,
                ]
                assert figures[at].tolist() == pytest.approx(expected, rel=1e-15)
            begin, length = gathering.begins[at], gathering.lengths[at]
            assert (None if length < 0 else samples[begin : begin + length].tolist()) == (
                None if entry.samples is None else entry.samples.tolist()
            )
    assert len(patterns) == 2, "steps that look alike share what they have in common"
    found = compare_runs(run, run)
    assert {line.verdict for line in found.lines} <= {"equal", "too coarse"}
    assert len(found.lines) == sum(len(run.entries(step)) for step in run.steps)


def copied(folder: Path, odd: int | None, rate: float = 0.1) -> TracedRun:
    """Two data ranks with the same weights, inputs of their own, and a weight of rank `odd` that is another from step 2 on."""
    settings = {**ABOUT["settings"], "group 0.lr": rate}  # type: ignore[dict-item]
    for rank in range(2):
        log = Log(folder, rank, {**ABOUT, "ranks": 2, "settings": settings})
        for step in range(4):
            weight = torch.arange(12.0).view(3, 4) * (1 + rate * step)
            weight = weight * 1.01 if rank == odd and step > 1 else weight
            output = torch.randn(2, 5, generator=torch.Generator().manual_seed(10 * step + rank))
            log.add(
                Name(step, "forward", "a", None, "output"),
                output,
                Placement.box((4, 5), (2 * rank, 0), (2, 5)),
                8,
                rank,
            )
            log.add(
                Name(step, "update", "a", None, "weight", "w"),
                weight,
                Placement.full((3, 4), ("data",)),
                8,
            )
            log.write(step, loss=3.0 - step)
    return TracedRun.read(folder)


@pytest.mark.parametrize("odd", [0, 1])
def test_a_fault_on_one_rank_alone_is_located_there(odd: int, tmp_path: Path) -> None:
    found = compare_runs(
        copied(tmp_path / "bad", odd), copied(tmp_path / "good", None), every=False
    )
    assert found.divergence is not None
    assert str(found.divergence.name) == "2/update/a/weight/w"
    assert found.divergence.ranks == (odd,)
    assert found.left == (3,)
    assert "cosine" in found.divergence.cause or "times B" in found.divergence.cause


def test_settings_are_compared_before_anything_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copied(tmp_path / "a", None, 0.1)
    copied(tmp_path / "b", None, 0.2)
    assert command(["trace", "diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "settings differ: group 0.lr: 0.1 in A, 0.2 in B"
    assert (
        lines.index(next(line for line in lines if line.startswith("the runs first differ at"))) > 2
    )


def verdicts(found: Comparison) -> list[str]:
    return [line.verdict for line in found.lines]


def test_it_stops_at_the_first_step_that_differs_unless_all_are_asked_for(tmp_path: Path) -> None:
    both = copied(tmp_path / "bad", 0), copied(tmp_path / "good", None)
    short, long = compare_runs(*both, every=False), compare_runs(*both)
    assert (len(short.lines), short.left) == (6, (3,))
    assert (len(long.lines), long.left) == (8, ())
    assert verdicts(long)[:6] == verdicts(short)


def test_steps_that_look_otherwise_in_one_run_alone_are_matched_by_name(tmp_path: Path) -> None:
    for name, missing in (("a", 2), ("b", None)):
        log = Log(tmp_path / name, 0, {**ABOUT, "ranks": 1})
        for step in range(1, 5):
            for tensor in ("x", "y", "z"):
                if (step, tensor) != (missing, "y"):
                    log.add(
                        Name(step, "forward", "a", None, "output", tensor),
                        torch.full((3,), 2.0),
                        Placement.full((3,)),
                        5,
                    )
            log.write(step)
    found = compare_runs(TracedRun.read(tmp_path / "a"), TracedRun.read(tmp_path / "b"))
    assert [(str(line.name), line.verdict) for line in found.faults] == [
        ("2/forward/a/output/y", "only in B")
    ]
    assert len(found.lines) == 12


def test_layers_are_in_the_order_in_which_they_run(tmp_path: Path) -> None:
    """Whatever the order is in which the model has them."""
    for name, factor in (("a", 2.0), ("b", 3.0)):
        log = Log(
            tmp_path / name,
            0,
            {**ABOUT, "ranks": 1, "layers": ["head", "unused", "body", "embedding"]},
        )
        for layer in ("embedding", "body", "head"):
            log.add(
                Name(1, "forward", layer, None, "output"),
                torch.ones(3) * factor,
                Placement.full((3,)),
                5,
            )
        log.write(1)
    found = compare_runs(TracedRun.read(tmp_path / "a"), TracedRun.read(tmp_path / "b"))
    assert found.first.layers == ("embedding", "unused", "body", "head")
    assert [line.name.layer for line in found.lines] == ["embedding", "body", "head"]


def test_tensors_that_are_alike_and_all_zeros_are_equal(tmp_path: Path) -> None:
    log = Log(tmp_path, 0, {**ABOUT, "ranks": 1})
    log.add(Name(1, "update", "a", None, "buffer", "mean"), torch.zeros(4), Placement.full((4,)), 6)
    log.write(1)
    run = TracedRun.read(tmp_path)
    assert verdicts(compare_runs(run, run)) == ["equal"]


def rewritten(path: Path, change: Any) -> None:
    """The lines of a log without digests, changed."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        line.pop("digest")
        change(line)
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


@pytest.mark.parametrize("value", ["1", None, [1.0], {}])
def test_numbers_that_are_none_are_refused_in_any_step(value: object, tmp_path: Path) -> None:
    """However the steps before looked."""
    drawn(tmp_path, 1)
    run = tmp_path / "run.json"
    about = json.loads(run.read_text())
    run.write_text(
        json.dumps({**{key: found for key, found in about.items() if key != "digest"}, "format": 1})
    )

    def change(line: dict[str, Any]) -> None:
        for record in line["records"] if line["step"] == 3 else ():
            if record["summary"]:
                record["summary"]["count"] = value

    for rank in range(2):
        rewritten(tmp_path / f"rank-0000{rank}" / "steps.jsonl", change)
    found = TracedRun.read(tmp_path)
    if value == "1":
        assert compare_runs(found, found).divergence is None, "a number as text is one"
        return
    with pytest.raises(BridgeError, match=r"step 3: .*the file is damaged"):
        compare_runs(found, found)
