"""Schedules: known orders, torch's own, theory of bubbles, and a proof that passes exactly what runs to a good end."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import assume, given, settings, strategies as st

from bridge.errors import ConfigError
from bridge.layout.schedule import (
    SCHEDULES,
    Action,
    ActionKind,
    Costs,
    Schedule,
    ScheduleShape,
    generate_schedule,
    make_timeline,
    program_rows,
    prove_schedule,
)
from bridge.layout.schedule.generate import partly_kept
from bridge.layout.schedule.table import read_schedule, schedule_to_csv
from bridge.layout.schedule.timeline import in_flight

MANY = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=int(os.environ.get("SCHEDULES", "100")),
)
"""SCHEDULES=5000 runs the whole number."""


def order(name: str, shape: ScheduleShape, rank: int, kind: str) -> str:
    """Microbatches of one kind of action in the order of a rank."""
    return " ".join(
        str(action.microbatch)
        for action in generate_schedule(name, shape).rows[rank]
        if action.kind == kind
    )


# Megatron-Core's page on microbatch_group_size_per_vp_stage, for two ranks with two stages each.
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("group", "number", "expected"), [(2, 4, "0 1 0 1 2 3 2 3"), (3, 5, "0 1 2 0 1 2 3 4 3 4")]
)
def test_orders_of_megatrons_page(rank: int, group: int, number: int, expected: str) -> None:
    shape = ScheduleShape(2, 4, number, group)
    assert order("interleaved_1f1b", shape, rank, "F") == expected
    assert order("interleaved_1f1b", shape, rank, "B") == expected


@pytest.mark.once
@pytest.mark.parametrize(("number", "group", "virtual"), [(8, 4, 2), (9, 5, 3), (12, 4, 1)])
def test_order_is_megatrons_table(number: int, group: int, virtual: int) -> None:
    schedules = pytest.importorskip("megatron.core.pipeline_parallel.schedules")
    table = schedules.get_schedule_table(number, virtual, group)
    row = generate_schedule(
        "interleaved_1f1b" if virtual > 1 else "1f1b", ScheduleShape(4, 4 * virtual, number, group)
    ).rows[1]
    assert [
        (action.microbatch, action.stage // 4)
        for action in row
        if action.kind is ActionKind.FORWARD
    ] == table


NAMES = {
    "ScheduleGPipe": "gpipe",
    "Schedule1F1B": "1f1b",
    "ScheduleInterleaved1F1B": "interleaved_1f1b",
    "ScheduleInterleavedZeroBubble": "zero_bubble",
    "ScheduleZBVZeroBubble": "zero_bubble_v",
}


def torchs(name: str, ranks: int, virtual: int, microbatches: int) -> list[str]:
    """What torch's schedule class has each rank do."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    found: Any = object.__new__(getattr(schedules, name))
    found.pp_group_size, found.n_local_stages, found._n_microbatches = ranks, virtual, microbatches
    found.num_stages = found._num_stages = ranks * virtual
    found._has_backward = True
    found.number_of_rounds = max(1, microbatches // ranks)
    found.microbatches_per_round = microbatches // found.number_of_rounds
    if virtual == 1 and hasattr(found, "_get_pipeline_order"):
        rows = found._get_pipeline_order().values()
    else:
        rows = [_row_of(found, rank) for rank in range(ranks)]
    return [
        " ".join(str(action) for action in row if action is not None and action.is_compute_op)
        for row in rows
    ]


def _row_of(found: Any, rank: int) -> Any:
    found.rank = rank
    return found._calculate_single_rank_operations(rank)


@pytest.mark.parametrize(("theirs", "ours"), NAMES.items())
@pytest.mark.parametrize(
    ("ranks", "microbatches"), [(2, 2), (2, 6), (4, 8), (4, 12), (3, 4), (4, 10)]
)
def test_order_is_torchs(theirs: str, ours: str, ranks: int, microbatches: int) -> None:
    virtual = 1 if SCHEDULES[ours].most == 1 else 2
    group = microbatches // max(1, microbatches // ranks)
    rows = generate_schedule(ours, ScheduleShape(ranks, ranks * virtual, microbatches, group)).rows
    found, expected = (
        [" ".join(map(str, row)) for row in rows],
        torchs(theirs, ranks, virtual, microbatches),
    )
    # What torch 2.13 says of the last rank of 1F1B leaves out 0F0; what it runs does not.
    known = slice(-1) if theirs == "Schedule1F1B" else slice(None)
    assert found[known] == expected[known]


@pytest.mark.parametrize(
    ("ranks", "virtual", "rounds"), list(product([2, 3, 4, 8], [2, 3, 4], [1, 2, 3]))
)
def test_bubble_is_as_in_theory(ranks: int, virtual: int, rounds: int) -> None:
    number = ranks * rounds
    plain = make_timeline(generate_schedule("1f1b", ScheduleShape(ranks, ranks, number)))
    assert plain.bubble == pytest.approx((ranks - 1) / (number + ranks - 1))
    looped = make_timeline(
        generate_schedule("interleaved_1f1b", ScheduleShape(ranks, ranks * virtual, number))
    )
    assert looped.overhead == pytest.approx((ranks - 1) / (virtual * number))
    split = make_timeline(
        generate_schedule("zero_bubble", ScheduleShape(ranks, ranks * virtual, number))
    )
    v_shaped = make_timeline(
        generate_schedule("zero_bubble_v", ScheduleShape(ranks, ranks * 2, number))
    )
    assert split.overhead < looped.overhead
    assert (
        v_shaped.overhead
        < make_timeline(
            generate_schedule("interleaved_1f1b", ScheduleShape(ranks, ranks * 2, number))
        ).overhead
    )
    assert (
        make_timeline(generate_schedule("zero_bubble", ScheduleShape(ranks, ranks, number))).bubble
        < plain.bubble
    )


def test_the_v_has_almost_no_bubble_and_the_memory_of_1f1b() -> None:
    for ranks in (2, 4, 8):
        found = generate_schedule("zero_bubble_v", ScheduleShape(ranks, 2 * ranks, 4 * ranks))
        assert make_timeline(found).length - make_timeline(found).work <= ranks - 1
        assert {in_flight(row) for row in found.rows} == {2 * ranks}


def test_activations_in_flight() -> None:
    assert [in_flight(row) for row in generate_schedule("1f1b", ScheduleShape(4, 4, 8)).rows] == [
        4,
        3,
        2,
        1,
    ]
    assert [in_flight(row) for row in generate_schedule("gpipe", ScheduleShape(4, 4, 8)).rows] == [
        8,
        8,
        8,
        8,
    ]
    assert [
        in_flight(row) for row in generate_schedule("depth_first", ScheduleShape(1, 3, 8)).rows
    ] == [3]


def test_breadth_first_is_what_fast_llm_does() -> None:
    shape = ScheduleShape(2, 5, 4, rounds=2)
    expected = "0F0 0F1 2F0 2F1 4F0 4F1 4B0 4B1 2B0 2B1 0B0 0B1 0F2 0F3 2F2 2F3 4F2 4F3 4B2 4B3 2B2 2B3 0B2 0B3"
    assert " ".join(map(str, generate_schedule("looped_bfs", shape).rows[0])) == expected


# Merak/core/pipeline/schedule.py, steps of each stage with PreCheckpointForwardPass and RecomputeRecvGrad in their places.
@pytest.mark.parametrize(
    ("name", "rank", "expected"),
    [
        (
            "pre_recompute_1f1b",
            0,
            "F0 F1 F2 F3 B0 F4 R1 B1 R2 B2 R3 B3 R4 B4".replace("R1 B1", "B1", 1),
        ),
        ("pre_recompute_1f1b", 2, "F0 F1 B0 F2 B1 F3 B2 F4 B3 R4 B4"),
        ("pre_recompute_1f1b", 3, "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4"),
        ("last_no_recompute_1f1b", 2, "F0 F1 R0 B0 F2 B1 F3 B2 F4 B3 B4"),
        ("shifted_critical_path", 2, "F0 F1 F2 R0 B0 R1 B1 F3 B2 F4 B3 B4"),
        ("shifted_critical_path", 1, "F0 F1 F2 R0 B0 F3 B1 F4 B2 R3 B3 R4 B4"),
    ],
)
def test_schedules_of_merak(name: str, rank: int, expected: str) -> None:
    found = generate_schedule(name, ScheduleShape(4, 4, 5))
    assert " ".join(f"{action.kind}{action.microbatch}" for action in found.rows[rank]) == expected
    assert {stage for stage, _ in found.kept} == ({3} if name != "pre_recompute_1f1b" else set())
    assert not prove_schedule(found)


def test_recomputing_while_waiting_is_faster() -> None:
    again = Costs(again=1.0)
    lengths = [
        make_timeline(generate_schedule(name, ScheduleShape(4, 4, 8)), again).length
        for name in ("1f1b", "pre_recompute_1f1b", "last_no_recompute_1f1b")
    ]
    assert lengths[0] > lengths[1] > lengths[2]
    assert (
        make_timeline(
            generate_schedule("shifted_critical_path", ScheduleShape(4, 4, 8)), again
        ).length
        <= lengths[2]
    )


def test_some_microbatches_keep_their_activations() -> None:
    found = partly_kept(generate_schedule("1f1b", ScheduleShape(4, 4, 8)), 2)
    assert sorted(microbatch for stage, microbatch in found.kept if stage == 0) == [0, 1, 4, 5]
    assert sorted(microbatch for stage, microbatch in found.kept if stage == 3) == list(range(8))


# What is generated, and what becomes of it


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Any schedule that a generator makes, over stages whole or cut into parts."""
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    ranks, virtual = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    shape = ScheduleShape(
        ranks,
        ranks * virtual,
        draw(st.integers(ranks, 3 * ranks + 3)),
        draw(st.integers(1, 8)),
        draw(st.integers(1, 3)),
    )
    try:
        found = generate_schedule(name, shape)
    except ConfigError:
        assume(False)
        raise
    parts = (
        draw(st.lists(st.integers(1, 3), min_size=found.stages, max_size=found.stages))
        if draw(st.booleans())
        else None
    )
    return found.split_stages(parts) if parts else found


def ends_well(schedule: Schedule, rows: Sequence[Sequence[Action]]) -> bool:
    """Whether ranks that send, receive and compute as told come to a good end: an executor that shares nothing with the proof."""
    mail: dict[tuple[int, int, str], int] = {}
    values: dict[tuple[int, int], str] = {}
    gradients: dict[tuple[int, int], str] = {}
    written_by: dict[int, list[int]] = {stage: [] for stage in range(schedule.stages)}
    reduced: set[int] = set()
    last, places, moved = schedule.stages - 1, [0] * len(rows), True

    def run(rank: int, action: Action) -> bool | None:
        """True: done; None: has to wait; False: nonsense."""
        stage, kind, number = action.stage, str(action.kind), action.microbatch
        key = (stage, number)
        if kind.startswith("SEND"):
            source = (stage - 1, number) if kind == "SEND_F" else (stage + 1, number)
            held = values if kind == "SEND_F" else gradients
            if source not in held or schedule.homes[source[0]] != rank:
                return False
            mail[(*key, kind[-1])] = mail.get((*key, kind[-1]), 0) + 1
            return True
        if kind.startswith("RECV"):
            if not mail.get((*key, kind[-1])):
                return None
            mail[(*key, kind[-1])] -= 1
            got[rank].add((*key, kind[-1]))
            return True
        if schedule.homes[stage] != rank:
            return False
        if kind == "REDUCE_GRAD":
            reduced.add(stage)
            return sorted(written_by[stage]) == list(range(schedule.microbatches))
        if kind == "F":
            if key in values:
                return False
            near = stage == 0 or (
                schedule.homes[stage - 1] == rank and (stage - 1, number) in values
            )
            if not near and (*key, "F") not in got[rank]:
                return None
            values[key] = "f"
            return True
        if kind == "R":
            return values.get(key) == "f" and key not in gradients
        if kind == "W":
            if gradients.get(key) != "i":
                return False
            gradients[key] = "w"
            written_by[stage].append(number)
            return stage not in reduced
        if key not in values or key in gradients:
            return False
        near = stage == last or (
            schedule.homes[stage + 1] == rank and (stage + 1, number) in gradients
        )
        if not near and (*key, "B") not in got[rank]:
            return None
        gradients[key] = "i" if kind == "I" else "w"
        if kind == "B":
            written_by[stage].append(number)
        return kind == "I" or stage not in reduced

    got: list[set[tuple[int, int, str]]] = [set() for _ in rows]
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while places[rank] < len(row):
                outcome = run(rank, row[places[rank]])
                if outcome is False:
                    return False
                if outcome is None:
                    break
                places[rank] += 1
                moved = True
    done = all(place == len(row) for place, row in zip(places, rows, strict=True))
    everything = {
        (stage, number)
        for stage in range(schedule.stages)
        for number in range(schedule.microbatches)
    }
    return (
        done
        and not any(mail.values())
        and set(gradients) == everything
        and set(gradients.values()) == {"w"}
        and len(reduced) == schedule.stages
    )


@MANY
@given(schedules())
def test_every_generated_schedule_is_proved_and_ends_well(schedule: Schedule) -> None:
    assert not prove_schedule(schedule)
    assert ends_well(schedule, program_rows(schedule))
    found = make_timeline(schedule)
    assert not found.stuck and found.length >= found.work


def broken(data: st.DataObject, row: list[Action]) -> str:
    """Break a row in place, and say how."""
    how = data.draw(st.sampled_from(["drop", "double", "swap"]))
    place = data.draw(st.integers(0, len(row) - 1))
    if how == "drop":
        del row[place]
    elif how == "double":
        row.insert(data.draw(st.integers(0, len(row))), row[place])
    else:
        other = data.draw(st.integers(0, len(row) - 1))
        row[place], row[other] = row[other], row[place]
    return how


@MANY
@given(schedules(), st.data())
def test_every_broken_schedule_is_caught(schedule: Schedule, data: st.DataObject) -> None:
    rows = [list(row) for row in schedule.rows]
    how = broken(data, rows[data.draw(st.integers(0, len(rows) - 1))])
    found = replace(schedule, rows=tuple(map(tuple, rows)))
    recomputed = any(action.kind is ActionKind.AGAIN for row in schedule.rows for action in row)
    caught = bool(prove_schedule(found))
    if found.microbatches == schedule.microbatches and not recomputed:
        # Two actions that change places may leave another good schedule; then it has to run to a good end.
        assert caught == (not ends_well(found, program_rows(found)))
    if how != "swap" and not recomputed and found.microbatches == schedule.microbatches:
        assert caught


@MANY
@given(schedules(), st.data())
def test_every_broken_program_is_caught(schedule: Schedule, data: st.DataObject) -> None:
    rows = [list(row) for row in program_rows(schedule)]
    assume(not any(action.kind is ActionKind.AGAIN for row in rows for action in row))
    how = broken(data, rows[data.draw(st.integers(0, len(rows) - 1))])
    caught = bool(prove_schedule(schedule, tuple(map(tuple, rows))))
    assert caught if how != "swap" else caught or ends_well(schedule, rows)


@settings(MANY, max_examples=50)
@given(schedules())
def test_a_table_brings_a_schedule_back(schedule: Schedule) -> None:
    found = read_schedule(schedule_to_csv(schedule))
    plain = tuple(
        tuple(action for action in row if action.kind is not ActionKind.AGAIN)
        for row in schedule.rows
    )
    assert (found.rows, found.homes) == (plain, schedule.homes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the schedule has no actions"),
        (
            "0F0,0B0,0F1\n1F0,1B0,1F1,1B1\n",
            "backward of microbatch 1 on stage 0 occurs as nothing, expected one B.*; add it",
        ),
        (
            "0F0,0X0\n",
            r"row 1, column 2: found '0X0', expected a cell such as 0F0: a stage, one of the letters B, F, I, R, W, ",
        ),
        ("0F0,0B0\n2F0,2B0\n", "no rank runs stage 1; number stages from 0 without gaps"),
        (
            "0F0,1F0,0B0,1B0\n",
            "rank 0 waits for ever at 0B0, which needs 1B0; place 1B0 before 0B0",
        ),
        (
            "0F0,0B0\n1F0,1B0,0F1,0B1\n",
            "rank 0: 0F0 belongs to stage 0, which is on rank 1; move the action to that rank",
        ),
    ],
)
def test_tables_with_holes_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_schedule(text)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        (
            "1f1b",
            ScheduleShape(4, 4, 3),
            "found 3 microbatches, but 4 pipeline ranks; use at least 4 microbatches",
        ),
        (
            "1f1b",
            ScheduleShape(4, 3, 4),
            "parallel.pipeline: found 4 ranks, but only 3 stages; use at most 3 ranks, or more layers",
        ),
        (
            "1f1b",
            ScheduleShape(2, 4, 4),
            "found 2 stages on a rank, but schedule 1f1b needs 1; change schedule.virtual",
        ),
        (
            "interleaved_1f1b",
            ScheduleShape(2, 2, 4),
            "found 1 stages on a rank, but schedule interleaved_1f1b needs at least 2",
        ),
        (
            "zero_bubble_v",
            ScheduleShape(2, 6, 4),
            "schedule.virtual: found 3 stages on a rank, but schedule zero_bubble_v needs 2",
        ),
        (
            "interleaved_1f1b",
            ScheduleShape(2, 5, 4),
            "stages: 5 stages do not divide evenly over 2 pipeline ranks; use a multiple of 2",
        ),
        (
            "interleaved_1f1b",
            ScheduleShape(4, 8, 9),
            "9 microbatches in groups of 4 leave 1 for the last group, which needs at least 4",
        ),
        (
            "interleaved_1f1b",
            ScheduleShape(4, 8, 8, 3),
            "schedule.group: found 3, expected 4 .pipeline ranks. to 8 .microbatches.",
        ),
        (
            "looped_bfs",
            ScheduleShape(2, 4, 4, rounds=3),
            "schedule.depth_first: found 3, which does not divide the 4 microbatches",
        ),
        (
            "shifted_critical_path",
            ScheduleShape(2, 2, 3),
            "found 3 microbatches, but schedule shifted_critical_path needs at least 4",
        ),
    ],
)
def test_shapes_that_do_not_fit_are_refused(name: str, shape: ScheduleShape, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        generate_schedule(name, shape)
