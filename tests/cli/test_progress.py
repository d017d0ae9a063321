"""Progress: nothing in the first two seconds, then how much is done and how long the rest takes, in a pipe and on a terminal."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress

import pytest

import compat
from bridge.cli import fuzz, progress
from bridge.cli.progress import ProgressPrinter
from bridge.files.progress import Course, count_items, listening
from bridge.testing.fuzz import Covered, Task

pytestmark = pytest.mark.once


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """A clock that a test sets."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    yield now


def drive(clock: list[float], stream: io.StringIO, steps: int = 20, each: float = 1.0) -> str:
    meter = progress.Meter("the files", stream)
    with listening(meter):
        for _ in count_items(range(steps)):
            clock[0] += each
    meter.end()
    return stream.getvalue()


def test_a_pipe_gets_a_line_now_and_then(clock: list[float]) -> None:
    assert drive(clock, io.StringIO()).splitlines() == [
        " 10% of the files, 18 s left",
        " 35% of the files, 13 s left",
        " 60% of the files, 8 s left",
        " 85% of the files, 3 s left",
    ]


def test_a_terminal_gets_one_line_that_goes(clock: list[float]) -> None:
    shown = drive(clock, Terminal())
    assert "\n" not in shown and shown.endswith("\r\x1b[K") and shown.count("left") == 18


def test_no_time_left_is_printed_before_the_second_part_since_the_first_loads_what_all_need(
    clock: list[float],
) -> None:
    said = io.StringIO()
    meter = progress.Meter("the files", said)
    for done, at in ((1, 130), (2, 131), (3, 136)):
        clock[0] = at
        meter(done, 30)
    assert said.getvalue().splitlines() == [
        "  3% of the files",
        " 10% of the files, 1 min 21 s left",
    ]


def test_fuzz_and_checkpoints_leave_out_the_first_part_too(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    """Its time, at the pace of all, made the first estimate several times too long."""
    tick = fuzz._progress_printer(Task(compat.load("megatron"), examples=100))
    meter = progress.Progress(1000)
    for done in range(1, 11):
        clock[0] += 30 if done == 1 else 1
        tick(Covered(releases=Counter(any=done)))
        meter.add_bytes(100)
    lines = capsys.readouterr().err.splitlines()
    assert "10 of 100 configs, 1 min 30 s left" in lines
    assert [line.rsplit("  ", 1)[1] for line in lines if "MB/s" in line] == ["8 s left", "2 s left"]


def test_what_is_quick_is_not_told(clock: list[float]) -> None:
    assert drive(clock, io.StringIO(), each=0.05) == drive(clock, Terminal(), each=0.05) == ""


def test_items_count_by_their_size_and_loops_inside_are_not_told() -> None:
    heard: list[tuple[float, float]] = []
    with listening(lambda done, total: heard.append((done, total))):
        for size in count_items([1, 3], float):
            assert list(count_items(range(size))) == [*range(size)]
    assert heard == [(1, 4), (4, 4)]
    assert list(count_items("ab")) == ["a", "b"]


def test_parts_are_shares_of_the_whole_even_where_more_come_than_were_expected_or_one_fails() -> (
    None
):
    heard: list[tuple[float, float]] = []
    course = Course(2)
    with listening(lambda done, total: heard.append((done, total))):
        with course.part():
            list(count_items(range(2)))
        with suppress(ValueError), course.part():
            raise ValueError("a run that does not start")
        course.further(1)
        for _ in range(2):
            with course.part():
                list(count_items(range(1)))
    assert heard == [(0.5, 2), (1, 2), (3, 3), (4, 4)]
    with course.part():  # nobody listens
        assert list(count_items(range(2))) == [0, 1]


def test_what_ranks_say_is_told_between_states_of_the_one_line(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    told, terminal = ProgressPrinter("the runs"), Terminal()
    told.meter = progress.Meter("the runs", terminal)
    clock[0] += 10
    told.hear({"at": [1, 4]})
    clock[0] += 10
    told.hear({"at": [2, 4]})
    told.hear({"note": "native engine"})
    told.hear({"found": {}})
    lines = ("", " 25% of the runs", " 50% of the runs, 20 s left", "", "")
    assert terminal.getvalue() == progress.CLEAR.join(lines)
    assert capsys.readouterr().err == "  native engine\n"


@pytest.mark.parametrize(
    ("done", "said"), [(0.5, "10 s"), (0.1, "1 min 30 s"), (0.001, "2 h 46 min")]
)
def test_the_time_left_is_in_words(done: float, said: str) -> None:
    assert progress.time_to_go(10.0, done, 1.0) == said
