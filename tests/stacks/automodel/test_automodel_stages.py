"""Layers to stages, and schedules, against what AutoModel and torch themselves make of them."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from bridge.errors import BridgeError
from compat.automodel import virtual_stages
from compat.automodel.schedules import MISNAMED, SCHEDULES, schedule, table
from compat.automodel.virtual_stages import boundaries, number, place_stages, request, stage_modules

SAMPLE = Path(__file__).parent / "stages.jsonl"
ASKED = (
    "num_layers",
    "layers_per_stage",
    "pp_size",
    "schedule",
    "round_virtual_stages_to_pp_multiple",
)


def rows(shared: Path | None) -> list[dict[str, Any]]:
    path = shared / "truth" / "automodel_stages.jsonl" if shared else SAMPLE
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def made(row: dict[str, Any]) -> dict[str, Any] | None:
    """The four values for a row, None if it is refused."""
    try:
        found = virtual_stages.stages(**{name: row[name] for name in ASKED})
    except BridgeError:
        return None
    return {
        "layers": list(found.layers),
        "virtual_stages": found.virtual_stages,
        "stages_per_rank": found.stages_per_rank,
        "stage_ids": [list(ids) for ids in found.stage_ids],
    }


def test_stages_are_those_of_automodel(shared: Path | None) -> None:
    verdicts = {True: 0, False: 0}
    for row in rows(shared):
        found, accepted = made(row), "rejected" not in row
        assert (found is not None) is accepted, row
        assert found is None or found == {name: row[name] for name in found}, row
        verdicts[accepted] += 1
    assert verdicts == ({True: 585, False: 1784} if shared else {True: 147, False: 149})


def test_the_sample_holds_both_verdicts() -> None:
    sample = [json.loads(line) for line in SAMPLE.read_text(encoding="utf-8").splitlines()]
    assert len(sample) <= 300
    assert {"rejected" in row for row in sample} == {True, False}
    assert {row["round_virtual_stages_to_pp_multiple"] for row in sample} == {None, "up", "down"}


@pytest.mark.parametrize(
    "wrong, expected",
    [
        ({"num_layers": 0}, "num_layers: found 0"),
        ({"pp_size": 0}, "pp_size: found 0"),
        ({"layers_per_stage": -1}, "layers_per_stage: found -1"),
        ({"schedule": "zero_bubble"}, "InterleavedZeroBubble"),
        ({"round_virtual_stages_to_pp_multiple": "nearest"}, "expected up or down"),
        ({"layers_per_stage": 3}, "no multiple of pp_size"),
        ({"schedule": "Interleaved1F1B", "layers_per_stage": 4}, "two or more"),
        ({"layers_per_stage": 1}, "runs one"),
    ],
)
def test_refusals_say_why(wrong: dict[str, Any], expected: str) -> None:
    with pytest.raises(BridgeError, match=expected):
        virtual_stages.stages(**{"num_layers": 8, "pp_size": 2, **wrong})


def test_a_v_goes_there_and_back() -> None:
    found = virtual_stages.stages(num_layers=8, pp_size=4, schedule="ZBVZeroBubble")
    assert found.stage_ids == ((0, 7), (1, 6), (2, 5), (3, 4))


@given(st.integers(1, 200), st.integers(2, 16), st.integers(2, 5), st.booleans())
def test_a_request_gives_the_stages_asked_for(
    layers: int, ranks: int, virtual: int, single: bool
) -> None:
    kind, count = SCHEDULES["1f1b" if single else "loopedbfs"], ranks * (1 if single else virtual)
    asked = request(layers, ranks, count, kind)
    if asked is None:
        assert (
            count > layers
            or len({-(-layers // size) for size in range(1, layers + 1)} & {count}) == 0
        )
    else:
        assert number(layers, asked[0], ranks, kind, asked[1]) == count


@given(st.lists(st.integers(1, 5), min_size=1, max_size=8))
def test_named_parts_read_back(sizes: list[int]) -> None:
    cuts = [0]
    for size in sizes:
        cuts.append(cuts[-1] + size)
    assert boundaries(stage_modules(cuts)) == tuple(cuts)


@pytest.mark.parametrize(
    "parts",
    [
        (("model.layers.1",), ("model.layers.0",)),
        (("model.layers.0",), ("model.layers.2",)),
        (("norm",),),
    ],
)
def test_parts_that_leave_layers_out_have_no_boundaries(parts: tuple[tuple[str, ...], ...]) -> None:
    assert boundaries(parts) is None


# Schedules by name


def test_misnamed_schedules_get_the_right_name() -> None:
    for wrong, right in MISNAMED.items():
        with pytest.raises(BridgeError, match=right):
            schedule(wrong)
        assert schedule(right).name == right


def test_unknown_schedules_get_the_nearest() -> None:
    with pytest.raises(BridgeError, match="did you mean gpipe"):
        schedule("gpip")


needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")


@needs_torch
def test_torch_takes_the_same_names() -> None:
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

    for kind in SCHEDULES.values():
        assert issubclass(get_schedule_class(kind.name), PipelineScheduleSingle) is kind.single
    for wrong in MISNAMED:
        with pytest.raises(ValueError, match="Unknown schedule"):
            get_schedule_class(wrong)


# Schedules as CSV


def written(name: str, ranks: int, virtual: int, microbatches: int, path: Path) -> str:
    """A schedule as torch writes it."""
    from torch.distributed.pipelining import schedules
    from torch.distributed.pipelining.stage import _PipelineStageBase

    class Stage(_PipelineStageBase):
        def __init__(self, index: int) -> None:
            self.stage_index, self.num_stages, self.group_size, self.group_rank = (
                index,
                ranks * virtual,
                ranks,
                0,
            )
            self.group, self.submod, self.has_backward = None, None, True
            self.stage_index_to_group_rank = {
                stage: rank for rank, ids in enumerate(placing) for stage in ids
            }

        def _create_grad_recv_info(self, *arguments: Any) -> None: ...
        def _prepare_forward_infra(self, *arguments: Any) -> Any: ...
        def _prepare_backward_infra(self, *arguments: Any) -> Any: ...

    placing = place_stages(ranks * virtual, ranks, schedule(name))
    made = schedules.get_schedule_class(name)(
        [Stage(index) for index in placing[0]], n_microbatches=microbatches, loss_fn=min
    )
    schedules.PipelineScheduleMulti._dump_csv(made, str(path))
    return path.read_text(encoding="utf-8")


@needs_torch
@pytest.mark.parametrize(
    "name, virtual",
    [("Interleaved1F1B", 2), ("LoopedBFS", 3), ("InterleavedZeroBubble", 2), ("ZBVZeroBubble", 2)],
)
def test_schedules_that_torch_writes_are_read(name: str, virtual: int, tmp_path: Path) -> None:
    found = table(written(name, 2, virtual, 4, tmp_path / "schedule.csv"))
    assert (len(found.ranks), found.stages, found.microbatches) == (2, 2 * virtual, 4)


GOOD = "0F0,0F1,,0B0,0B1\n,1F0,1B0,1F1,1B1\n"


def test_a_schedule_by_hand_is_read() -> None:
    found = table(GOOD)
    assert (found.stages, found.microbatches) == (2, 2)
    assert found.ranks[1][:2] == (None, (1, "F", 0))


@pytest.mark.parametrize(
    "before, after, expected",
    [
        (GOOD, "", "empty"),
        ("0F1", "0X1", "expected a stage"),
        ("0F1", "", "needs one F"),
        ("1B1", "1B1,1B1", "needs one F"),
        ("1B1", "1I1", "needs one F"),
        ("0F0,0F1,,0B0", "0B0,0F1,,0F0", "comes before its F"),
        ("1", "2", "no rank runs stage 1"),
        ("1F0", "0F0", "ranks 0 and 1"),
    ],
)
def test_broken_schedules_are_refused(before: str, after: str, expected: str) -> None:
    first, second = GOOD.split("\n")[:2]
    text = (
        after
        if before == GOOD
        else f"{first}\n{second.replace('1', '2') if before == '1' else second}\n"
    )
    text = text if before in (GOOD, "1") else text.replace(before, after, 1)
    with pytest.raises(BridgeError, match=expected):
        table(text)
