"""Logs outlive what ends or fills a process: kills, torn lines, full disks, folders that cannot be written to."""

from __future__ import annotations

import json
import os
import pickle
import re
import resource
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bridge.errors import BridgeError
from bridge.trace.log import Log
from bridge.trace.placement import Placement
from bridge.trace.record import Name
from bridge.trace.run import TracedRun

SIZE = 20_000
WRITER = """
import sys, torch
from pathlib import Path
from bridge.trace.log import Log
from bridge.trace.placement import Placement
from bridge.trace.record import Name
log, step = Log(Path(sys.argv[1]), 0, full=True), 0
while True:
    for index in range(5):
        name = Name(step, "forward", f"layer{index}", None, "output")
        log.add(name, torch.full((20_000,), float(step)), Placement.full((20_000,)), 5)
    log.write(step)
    step += 1
"""


def write(log: Log, step: int) -> None:
    """One step with one tensor that holds the step's number."""
    log.add(
        Name(step, "forward", "layer", None, "output"),
        torch.full((SIZE,), float(step)),
        Placement.full((SIZE,)),
        5,
    )
    log.write(step)


@pytest.mark.parametrize("turn", range(3))
def test_a_killed_run_reads_up_to_its_last_whole_step(tmp_path: Path, turn: int) -> None:
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)])
    lines = tmp_path / "rank-00000" / "steps.jsonl"
    while not (lines.exists() and lines.read_text().count("\n") > 3 + turn):
        assert writer.poll() is None
        time.sleep(0.003)
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    run = TracedRun.read(tmp_path)
    assert len(run.steps) > 3 + turn and run.steps == tuple(range(len(run.steps)))
    for step in run.steps:
        found = run.entries(step)
        assert len(found) == 5
        assert all(entry.whole is not None and (entry.whole == step).all() for entry in found)


def test_a_torn_line_is_left_out_and_written_over(tmp_path: Path) -> None:
    log = Log(tmp_path, 0)
    for step in range(3):
        write(log, step)
    lines = tmp_path / "rank-00000" / "steps.jsonl"
    lines.write_bytes(lines.read_bytes()[:-40])
    assert TracedRun.read(tmp_path).steps == (0, 1)
    write(Log(tmp_path, 0), 2)
    assert TracedRun.read(tmp_path).steps == (0, 1, 2)


def test_a_run_that_begins_anew_replaces_what_comes_after(tmp_path: Path) -> None:
    log = Log(tmp_path, 0)
    for step in range(5):
        write(log, step)
    write(Log(tmp_path, 0), 2)
    assert TracedRun.read(tmp_path).steps == (0, 1, 2)


@pytest.fixture
def little_room() -> Iterator[None]:
    """No file may grow beyond 40 kB: less than a step needs."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def test_without_room_one_warning_and_the_steps_before(tmp_path: Path, little_room: None) -> None:
    log = Log(tmp_path, 0, full=True)
    log.write(0)
    with pytest.warns(
        UserWarning, match="the log of this rank ends before step 1; name a folder that"
    ) as said:
        write(log, 1)
    assert len(said) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write(log, 2)
    assert TracedRun.read(tmp_path).steps == (0,)


def test_without_room_a_strict_log_raises(tmp_path: Path, little_room: None) -> None:
    with pytest.raises(BridgeError, match="the log of this rank ends before step 1"):
        write(Log(tmp_path, 0, full=True, strict=True), 1)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="Not a directory; nothing is logged; name a folder"):
        log = Log(tmp_path / "file" / "run", 0)
    write(log, 1)
    with pytest.raises(BridgeError, match="Not a directory"):
        Log(tmp_path / "file" / "run", 0, strict=True)


@pytest.fixture
def logged(tmp_path: Path) -> Path:
    """A run of two steps."""
    log = Log(tmp_path / "run", 0)
    for step in range(2):
        write(log, step)
    return tmp_path / "run"


def everything(run: Path) -> list[torch.Tensor | None]:
    """What its log has of values."""
    found = TracedRun.read(run)
    return [entry.samples for step in found.steps for entry in found.entries(step)]


class Payload:
    """Its pickle makes a file when it is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize(
    "name", ["run.json", "rank-00000/steps.jsonl", "rank-00000/00000001.safetensors"]
)
def test_a_changed_file_is_named_and_no_payload_is_executed(
    logged: Path, tmp_path: Path, name: str
) -> None:
    path = logged / name
    content, marker = path.read_bytes(), tmp_path / "executed"
    for place in range(0, len(content) - 1, max(1, len(content) // 50)):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(BridgeError, match=re.escape(str(path))):
            everything(logged)
    for payload in (
        pickle.dumps(Payload(marker)) + b"\n",
        content + pickle.dumps(Payload(marker)) + b"\n",
    ):
        path.write_bytes(payload)
        with pytest.raises(BridgeError, match=re.escape(str(path))):
            everything(logged)
    torch.save(Payload(marker), path)
    with pytest.raises(BridgeError, match=re.escape(str(path))):
        everything(logged)
    assert not marker.exists()


@pytest.mark.parametrize(
    "name", ["run.json", "rank-00000/steps.jsonl", "rank-00000/00000001.safetensors"]
)
def test_links_out_of_a_run_and_pipes_are_refused(logged: Path, tmp_path: Path, name: str) -> None:
    path, outside = logged / name, tmp_path / "outside"
    path.rename(outside)
    path.symlink_to(outside)
    with pytest.raises(BridgeError, match=f"{path}: a link that leads to {outside}"):
        everything(logged)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(BridgeError, match=f"{path}: found no regular file"):
        everything(logged)


def test_a_log_of_the_format_before_is_read(logged: Path) -> None:
    expected = everything(logged)
    lines = logged / "rank-00000" / "steps.jsonl"
    for path in (logged / "run.json", lines):
        found = [
            json.loads(line)
            for line in (path.read_text().splitlines() if path == lines else [path.read_text()])
        ]
        for one in found:
            one.pop("digest")
            one.pop("tensors", None)
            one.pop("rank", None)
            one.update({"format": 1} if path != lines else {})
        path.write_text("".join(f"{json.dumps(one)}\n" for one in found))
    assert [values.tolist() for values in everything(logged)] == [
        values.tolist() for values in expected
    ]
