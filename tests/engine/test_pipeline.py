"""Pipelines: a sample of all combinations against one process, what travels between ranks, what is refused, what is resumed."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import bridge.engine
from bridge.engine.environment import Environment
from bridge.engine.models.gpt import mean_cross_entropy
from bridge.errors import BridgeError, ConfigError
from bridge.layout.pipeline import by_names
from bridge.layout.schedule import Schedule, ScheduleShape, generate_schedule, prove_schedule
from bridge.layout.schedule.table import schedule_to_csv
from bridge.plan.plan import Plan
from tests.engine.pipelines import (
    ADAMW,
    DEEP,
    FULL,
    SCHEDULES,
    SGD,
    alone,
    combinations,
    error,
    evaluated,
    excess,
    from_file,
    one_process,
    overflowed,
    peaks,
    piped,
    piped_all,
    resumed,
    rounded,
    unequal,
)
from tests.engine.pool import PATIENCE, free_port
from tests.engine.runs import Case, Outcome, plain, trained

CASES = dict(combinations())
SAMPLE = (
    "1f1b; pp2 dp2; ZeRO 3, one buffer",
    "interleaved; pp2 dp2; ZeRO 2, all buffers",
    "zero bubble v; pp2 dp2; ZeRO 1, all buffers",
    "zero bubble; pp4; ZeRO 0, all buffers",
    "breadth first; pp4; ZeRO 3, all buffers",
    "critical path; pp4; ZeRO 0, all buffers",
    "zero bubble v, recomputed; pp2 tp2; ZeRO 3, one buffer",
)
"""`python -m tests.engine.pipelines` runs all of them."""


@pytest.mark.parametrize("name", SAMPLE)
def test_losses_and_gradients_are_those_of_one_process(run: Any, name: str) -> None:
    case = CASES[name]
    assert error(run(4, piped, case), one_process(case.batch)) < 1e-9


def test_all_combinations_are_there() -> None:
    assert len(CASES) == len(SCHEDULES) * (2 * 8 + 2)


PIPED = {"parallel.pipeline": 2, "batch.accumulation": 4, "schedule.name": "1f1b"}


@pytest.mark.parametrize("level", [1, 3])
def test_adam_and_clipping_see_the_whole_model(run: Any, level: int) -> None:
    values = {**ADAMW, **PIPED, "zero.stage": level}
    found: list[Outcome] = run(4, trained, Case(values, DEEP, batch=16))
    one = plain(Case(ADAMW, DEEP, batch=16))
    for outcome in found:
        assert outcome.losses == pytest.approx(one.losses, rel=1e-7)
        assert outcome.norms == pytest.approx(one.norms, rel=1e-7)


def test_frozen_stages_run_no_backward(run: Any) -> None:
    case = Case(
        {**SGD, **PIPED, "parallel.data": 1},
        replace(DEEP, tied=False),
        frozen=("embedding", "block0", "block4"),
    )
    runs = run(2, piped, case)
    one = plain(case)
    assert runs[0].actions == runs[0].planned and not any(
        action.startswith(("0B", "1B")) for action in runs[0].actions
    )
    assert runs[0].losses == pytest.approx(one.losses, rel=1e-9) and runs[1].norms == pytest.approx(
        one.norms, rel=1e-9
    )


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("name", SAMPLE[:4])
def test_other_formats_stay_as_close_as_part_one_asks(run: Any, name: str, compute: str) -> None:
    case = rounded(CASES[name], compute)
    assert excess(run(4, trained, case), case) < 1


def test_dropout_is_that_of_one_rank(run: Any) -> None:
    case = Case({**SGD, "batch.accumulation": 4}, replace(DEEP, dropout=0.3))
    one = trained(0, 1, case)
    for outcome in run(2, trained, replace(case, plan={**case.plan, **PIPED, **FULL})):
        assert outcome.losses == pytest.approx(one.losses, rel=1e-9)


def test_an_overflow_skips_the_step_on_all_ranks(run: Any) -> None:
    scaled = {
        "precision.compute": "fp16",
        "precision.loss_scale.initial": 64.0,
        "precision.loss_scale.hysteresis": 1,
    }
    case = Case(
        {**ADAMW, **PIPED, **scaled, "parallel.data": 2, "zero.stage": 2}, dtype=torch.float32
    )
    for scales, skipped, same in run(4, overflowed, case):
        assert (scales, skipped, same) == ([64.0, 32.0, 32.0], 1, True)


def test_evaluation_goes_through_the_pipeline(run: Any) -> None:
    case = Case({**SGD, **PIPED, "schedule.name": "zero_bubble_v", "zero.stage": 3}, DEEP)
    for before, after, loss in run(2, evaluated, case):
        assert before == pytest.approx(loss, rel=1e-9) and after < before


def test_checkpoints_move_between_pipelines_and_other_layouts(run: Any, tmp_path: Path) -> None:
    layouts = [
        {**PIPED, "schedule.name": "zero_bubble_v", "zero.stage": 2},
        {"parallel.pipeline": 4, "batch.accumulation": 4},
        {"parallel.tensor": 2, "zero.stage": 3, "batch.accumulation": 4},
    ]
    cases = [Case({**ADAMW, **layout}, DEEP, batch=16) for layout in layouts]
    for number, (first, second) in enumerate(zip(cases, [*cases[1:], cases[0]], strict=True)):
        for wanted, found in run(4, resumed, first, second, tmp_path / str(number)):
            assert found == pytest.approx(wanted, rel=1e-7)


def test_shapes_may_differ_by_step_and_by_microbatch_if_asked(run: Any) -> None:
    values = {**PIPED, "loss": "per_token"}
    for found, wanted in run(2, unequal, values, True):
        assert found == pytest.approx(wanted, rel=1e-9)
    with pytest.raises(
        Exception,
        match=r"stage 2 would get tensors \(2, 6, 16\) .*, expected \(2, 4, 16\).*variable_shapes",
    ):
        run(2, unequal, values, False)


@pytest.mark.parametrize(
    ("name", "virtual"),
    [("1f1b", 1), ("gpipe", 1), ("interleaved_1f1b", 2), ("zero_bubble", 2), ("zero_bubble_v", 2)],
)
def test_activations_in_flight_are_as_many_as_planned(run: Any, name: str, virtual: int) -> None:
    values = {
        "parallel.pipeline": 2,
        "batch.accumulation": 6,
        "schedule.name": name,
        "schedule.virtual": virtual,
    }
    for planned, counted, alive in run(2, peaks, values, 2 * virtual):
        assert planned == counted == alive


def test_a_table_is_run(run: Any, tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    table.write_text(schedule_to_csv(generate_schedule("zero_bubble_v", ScheduleShape(2, 4, 4))))
    case = Case(
        {**SGD, **PIPED, "schedule.name": "csv", "schedule.csv": str(table)}, DEEP, batch=16
    )
    assert error(run(4, piped, case), one_process(16)) < 1e-9


def shuffled(seed: int, ranks: int) -> tuple[Schedule, int]:
    """A schedule whose actions changed places at random as long as the checker passed it, and how often they did."""
    draw = random.Random(seed)
    name, virtual = draw.choice(
        [
            ("gpipe", 1),
            ("1f1b", 1),
            ("interleaved_1f1b", 2),
            ("looped_bfs", 2),
            ("zero_bubble", 2),
            ("zero_bubble_v", 2),
        ]
    )
    found, moved = generate_schedule(name, ScheduleShape(ranks, ranks * virtual, 4)), 0
    for _ in range(60):
        rows = [list(row) for row in found.rows]
        row = draw.choice(rows)
        one, other = draw.sample(range(len(row)), 2)
        row[one], row[other] = row[other], row[one]
        changed = replace(found, rows=tuple(map(tuple, rows)))
        if rows != [list(row) for row in found.rows] and not prove_schedule(changed):
            found, moved = changed, moved + 1
    return found, moved


@pytest.mark.parametrize(("ranks", "seeds"), [(2, range(8)), (4, range(8, 12))])
def test_what_the_checker_passes_ends_well_and_loses_nothing(
    run: Any, tmp_path: Path, ranks: int, seeds: range
) -> None:
    cases, moves = [], 0
    for seed in seeds:
        schedule, moved = shuffled(seed, ranks)
        table, moves = tmp_path / f"{seed}.csv", moves + moved
        table.write_text(schedule_to_csv(schedule))
        values = {"parallel.pipeline": ranks, "schedule.name": "csv", "schedule.csv": str(table)}
        buffers = {"zero.weight_buffers": 1, "zero.grad_buffers": 1} if seed % 2 else {}
        cases.append(
            Case({**SGD, **values, **buffers, "batch.accumulation": 4}, DEEP, batch=8, steps=1)
        )
    assert moves > len(seeds)
    one = alone(cases[0])
    for runs in zip(*run(ranks, piped_all, cases), strict=True):
        assert error(list(runs), one) < 1e-9


def test_a_killed_rank_ends_the_job_and_is_named(tmp_path: Path) -> None:
    port, here = str(free_port()), Path(__file__).parents[2]
    script = f"import sys; sys.path.append({str(here)!r}); from pathlib import Path; from tests.engine import pipelines; "
    command = [sys.executable, "-c", script + f"pipelines.endless(Path({str(tmp_path)!r}))"]
    launched = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(
            command, env={**launched, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        wait_for(tmp_path / "0.3", ranks)
        ranks[1].kill()
        _, said = ranks[0].communicate(timeout=PATIENCE)
        assert ranks[0].returncode == 1
        assert re.search(
            r"LostRank: .*: rank 1 is gone or silent .*; see the messages of that rank, then", said
        ), said[-900:]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert (tmp_path / "latest").read_text() == "step2"


def wait_for(path: Path, processes: list[subprocess.Popen[str]]) -> None:
    """Until `path` is there; the processes have not ended before."""
    while not path.exists():
        assert all(process.poll() is None for process in processes), (
            f"ended before there was {path}"
        )
        time.sleep(0.05)


# Refused before anything starts


def started(**values: Any) -> Any:
    """What the first of four ranks would do."""
    plan = Plan.of({**SGD, **{path.replace("__", "."): value for path, value in values.items()}})
    model = bridge.engine.models.gpt.GPT(DEEP)
    return bridge.engine.initialize(
        model, plan, mean_cross_entropy, environment=Environment(0, 4, 0, "127.0.0.1:1")
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"parallel__pipeline": 4, "batch__accumulation": 2},
            "found 2 microbatches, but 4 pipeline ranks; use at least 4 microbatches, or fewer ranks",
        ),
        (
            {
                "parallel__pipeline": 4,
                "batch__accumulation": 4,
                "schedule__name": "interleaved_1f1b",
                "schedule__virtual": 3,
            },
            "stages: found 12 stages, but only 8 layers; use at most 8 stages, or more layers",
        ),
        (
            {
                "parallel__pipeline": 4,
                "batch__accumulation": 5,
                "schedule__name": "interleaved_1f1b",
                "schedule__virtual": 2,
            },
            "schedule.group: 5 microbatches in groups of 4 leave 1 for the last group, which needs at least 4",
        ),
        ({"parallel__pipeline": 3}, r"parallel: pipeline \(3\) does not divide world size \(4\)"),
        (
            {"parallel__pipeline": 4, "batch__accumulation": 4, "stages__boundaries": (0, 3, 8)},
            "parallel.pipeline: found 4 ranks, but only 2 stages; use at most 2 ranks, or more layers",
        ),
        (
            {"parallel__pipeline": 2, "batch__accumulation": 4, "schedule__name": "csv"},
            "schedule.csv: not set, but schedule.name is csv",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_launch(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        started(**values)


def test_a_table_with_a_hole_is_refused_before_launch(tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    table.write_text(
        schedule_to_csv(generate_schedule("1f1b", ScheduleShape(2, 2, 4))).replace("1B2,", "")
    )
    with pytest.raises(
        ConfigError,
        match=r"table.csv: rank 1: backward of microbatch 2 on stage 1 occurs as nothing.*; add it",
    ):
        started(
            parallel__pipeline=2,
            batch__accumulation=4,
            schedule__name="csv",
            schedule__csv=str(table),
        )


def test_parts_of_a_step_are_refused_where_microbatches_run_together() -> None:
    engine = bridge.engine.initialize(
        bridge.engine.models.gpt.GPT(DEEP),
        Plan.of({"batch.accumulation": 2, "schedule.breadth_first": 2}),
        mean_cross_entropy,
    )
    with pytest.raises(
        BridgeError,
        match=r"breadth_first mixes the microbatches of a step; call engine.train_batch",
    ):
        engine(torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, 2, dtype=torch.int64))


def test_breadth_first_on_one_rank_gives_the_same_and_gathers_less(run: Any) -> None:
    level = {"zero.stage": 3, "batch.accumulation": 4}
    deep = Case({**SGD, **level}, DEEP, batch=16)
    wide = Case({**SGD, **level, "schedule.breadth_first": 4}, DEEP, batch=16)
    for first, second in zip(run(2, piped, deep), run(2, piped, wide), strict=True):
        assert second.losses == pytest.approx(first.losses, rel=1e-9)
        assert second.traffic == second.predicted
        assert second.traffic["gather weights"][0] < first.traffic["gather weights"][0] / 2
        assert second.traffic["reduce gradients"][0] < first.traffic["reduce gradients"][0] / 2


RECIPE = """
step_scheduler: {global_batch_size: 4, local_batch_size: 4}
optimizer: {_target_: torch.optim.AdamW, lr: 0.01}
model: {torch_dtype: float32, config: {num_hidden_layers: 5, hidden_size: 16, num_attention_heads: 4, intermediate_size: 24}}
distributed:
  pp_size: 2
  dp_size: 1
  pipeline:
    pp_schedule: SCHEDULE
    pp_microbatch_size: 1
    module_fqns_per_model_part: PARTS
"""
PARTS = {
    "GPipe": (
        "[[model.embed_tokens, model.layers.0], [model.layers.1, model.layers.2, model.layers.3, model.layers.4, lm_head]]",
        [["embedding", "block0"], ["block1", "block2", "block3", "block4", "head"]],
    ),
    "Interleaved1F1B": (
        "[[model.embed_tokens, model.layers.0, model.layers.1], [model.layers.2], [model.layers.3], [model.layers.4, lm_head]]",
        [["embedding", "block0", "block1", "block3"], ["block2", "block4", "head"]],
    ),
}


@pytest.mark.parametrize("schedule", PARTS)
def test_a_recipe_that_names_its_parts_runs_as_it_says(
    run: Any, tmp_path: Path, schedule: str
) -> None:
    parts, layers = PARTS[schedule]
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.replace("SCHEDULE", schedule).replace("PARTS", parts))
    ranks = run(2, from_file, path)
    _, expected = from_file(0, 1, path, one=True)
    assert [held for held, _ in ranks] == layers
    # On one rank autograd adds both gradients of the tied weight in bf16, as plain torch does.
    assert all(losses == pytest.approx(expected, rel=1e-4) for _, losses in ranks)


def test_stages_by_names_of_modules() -> None:
    layers = ["embedding", "block0", "block1", "head"]
    assert by_names([["embedding", "block0"], ["block1", "head"]], layers) == (
        range(2),
        range(2, 4),
    )
    with pytest.raises(
        ConfigError,
        match="stage 1: the model has no layer 'block9'; its layers are embedding, block0, block1, head",
    ):
        by_names([["embedding", "block0", "block1"], ["block9", "head"]], layers)
    with pytest.raises(
        ConfigError, match="layer block1: is in 0 stages, expected one; name it in one stage"
    ):
        by_names([["embedding", "block0"], ["head"]], layers)
    with pytest.raises(
        ConfigError, match="stages: found layers in another order than in the model"
    ):
        by_names([["block0", "embedding"], ["head"], ["block1"]], layers)
