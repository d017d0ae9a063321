"""A run is followed as it goes on, handed to other tools, and what is found in it to a command."""

from __future__ import annotations

import json
import logging
import math
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from bridge.cli import run as command
from bridge.plan.plan import Debug
from bridge.trace import attach, run_liveness
from bridge.trace.findings import Findings, TraceFinding
from bridge.trace.follow import Follower, Step, step_text
from bridge.trace.log import Log
from bridge.trace.pages import series
from bridge.trace.pages.series import FindingOfFile
from bridge.trace.placement import Placement
from bridge.trace.record import Name

FOUND = TraceFinding("gradient-stale", 2, "head; rm -rf $HOME", "3 of 3 gradients")


def step(log: Log, number: int, loss: float | None = 1.5) -> None:
    """Gradients whose norm is the number of the step."""
    gradient = torch.full((4,), number / 2)
    log.add(Name(number, "reduce", "a", None, "gradient", "w"), gradient, Placement.full((4,)), 4)
    log.write(number, loss=loss, clip=1.0)


def test_steps_and_findings_come_once_each_in_order(tmp_path: Path) -> None:
    follower = Follower(tmp_path)
    assert list(follower.new()) == []
    log, findings = Log(tmp_path, 0, {"layers": ["a"]}), Findings(tmp_path)
    for number in (1, 2):
        step(log, number)
    findings.add([FOUND], aloud=False)
    first = list(follower.new())
    assert [type(one) for one in first] == [Step, FindingOfFile, Step]
    assert first[0] == Step(1, 1.5, {"gradients": 1.0}, False)
    assert list(follower.new()) == []
    step(log, 3, None)
    lines = tmp_path / "rank-00000" / "steps.jsonl"
    with lines.open("a") as file:
        file.write('{"step": 4, "rank": 0, "records": [')
    (third,) = follower.new()
    assert isinstance(third, Step) and step_text(third) == "step 3: norm of gradients 3"
    again = Log(tmp_path, 0, {"layers": ["a"]})
    step(again, 1)
    assert [one.number for one in follower.new() if isinstance(one, Step)] == [1], (
        "a run that begins anew is followed from there"
    )


def test_the_norm_of_gradients_is_that_before_clipping(tmp_path: Path) -> None:
    """A spike that clipping cuts stays visible; where nobody told how gradients were clipped, their norm has another name."""
    log = Log(tmp_path, 0, {"layers": ["a"]})
    for number, clip in enumerate((1.0, 0.1, None), 1):
        log.add(
            Name(number, "reduce", "a", None, "gradient", "w"),
            torch.full((4,), 0.5),
            Placement.full((4,)),
            4,
        )
        log.write(number, clip=clip)
    assert [one.norms for one in Follower(tmp_path).new() if isinstance(one, Step)] == [
        {"gradients": 1.0},
        {"gradients": 10.0, "clipped gradients": 1.0},
        {"gradients in the update": 1.0},
    ]
    found = series.read_series(tmp_path).norms
    assert {
        name: [None if np.isnan(one) else float(one) for one in norms]
        for name, norms in found.items()
    } == {
        "gradients": [1.0, 10.0, None],
        "clipped gradients": [1.0, 1.0, None],
        "gradients in the update": [None, None, 1.0],
    }


NORM = 145**0.5  # four weights with a gradient of 6, and a bias with one of 1


@pytest.mark.parametrize(
    ("way", "norms"),
    [
        (
            lambda model: clip_grad_norm_(model.parameters(), 1.0),
            {"gradients": NORM, "clipped gradients": 1.0},
        ),
        (
            lambda model: clip_grad_norm_(model.parameters(), 3.0, math.inf),
            {"gradients": NORM, "clipped gradients": NORM / 2},
        ),
        (lambda model: clip_grad_norm_(model.parameters(), 100.0), {"gradients": NORM}),
        (lambda model: clip_grad_norm_([model.weight], 1.0), {"gradients in the update": 2**0.5}),
        (
            lambda model: torch.nn.utils.clip_grad_value_(model.parameters(), 1.0),
            {"gradients in the update": 5**0.5},
        ),
        (lambda model: None, {"gradients in the update": NORM}),
    ],
)
def test_how_a_loop_of_torch_clips_is_seen(
    tmp_path: Path, way: Callable[[nn.Linear], object], norms: dict[str, float]
) -> None:
    """Also through a function that the loop imported by name before the trace was attached."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    tracer = attach(
        model, Debug(all_param_gradients=3), tmp_path, optimizer=optimizer, invariants=False
    )
    model(torch.full((1, 4), 6.0)).sum().backward()
    way(model)
    optimizer.step()
    tracer.remove()
    *_, last = (one for one in Follower(tmp_path).new() if isinstance(one, Step))
    assert last.norms == pytest.approx(norms, rel=1e-5)


TRAINING = """
import sys, time, torch, bridge.trace
from bridge.plan import Debug
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
bridge.trace.attach(model, Debug(all_param_gradients=5, param_update=5), sys.argv[1], optimizer=optimizer)
while True:
    loss = model(torch.randn(3, 4)).square().mean()
    loss.backward()
    optimizer.step()
    print(float(loss), flush=True)
    time.sleep(0.05)
"""


@pytest.fixture
def training(tmp_path: Path) -> subprocess.Popen[str]:
    """One that goes on, and that never clears its gradients."""
    words = [sys.executable, "-c", TRAINING, str(tmp_path / "run")]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None and process.stdout.readline(), "the first step"
    return process


def watching(folder: Path) -> subprocess.Popen[str]:
    words = [
        sys.executable,
        "-P",
        "-m",
        "stagebridge",
        "trace",
        "watch",
        str(folder),
        "--interval",
        "0.1",
    ]
    # What starts in a shell's background inherits that Ctrl-C is ignored, and so would its children.
    return subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def test_a_running_training_is_followed_in_a_pipe_until_it_is_gone(
    training: subprocess.Popen[str], tmp_path: Path
) -> None:
    watcher, left = watching(tmp_path / "run"), watching(tmp_path / "run")
    assert watcher.stdout is not None and left.stdout is not None
    said = [watcher.stdout.readline() for _ in range(8)]
    assert left.stdout.readline() == said[0]
    left.send_signal(signal.SIGINT)
    assert "stopped following, the run may continue" in left.stdout.read().splitlines()[
        -1
    ] and left.wait() in (0, 2)
    assert training.poll() is None, "Ctrl-C ends who follows, not who is followed"
    training.send_signal(signal.SIGKILL)
    training.wait()
    rest = watcher.stdout.read()  # not communicate, which does not know what was read ahead
    everything = "".join(said) + rest
    assert said[0] == "step 0: no loss and no norm in the log\n" and "step 1: loss " in said[1]
    assert "fault: gradient-stale: step 2: " in everything and "zero_grad is missing" in everything
    assert rest.splitlines()[-1].endswith("faults") and "the run has ended; " in rest
    assert watcher.wait() == 2
    losses = [
        float(line.split("loss ")[1].split(",")[0])
        for line in everything.splitlines()
        if ": loss " in line
    ]
    assert training.stdout is not None
    pairs = list(zip(losses[1:], map(float, training.stdout.read().splitlines()), strict=False))
    assert len(pairs) >= 2, everything
    assert [shown for shown, _ in pairs] == pytest.approx(
        [printed for _, printed in pairs], rel=1e-4
    )


def test_nothing_to_watch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["trace", "watch", str(tmp_path)]) == 1
    assert "found neither a running training nor an ended one" in capsys.readouterr().err


def test_a_note_says_whether_a_run_goes_on(tmp_path: Path) -> None:
    assert not run_liveness.is_alive(tmp_path)
    ended = run_liveness.mark_process(tmp_path)
    assert run_liveness.is_alive(tmp_path)
    ended()
    assert not run_liveness.is_alive(tmp_path)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for host, expected in ((socket.gethostname(), False), ("elsewhere", True)):
        (tmp_path / run_liveness.FILE).write_text(json.dumps({"pid": gone.pid, "host": host}))
        assert run_liveness.is_alive(tmp_path) is expected, "of another host nobody can tell"


def test_findings_are_a_sequence() -> None:
    findings, other = Findings(said=False), TraceFinding("decay-on-norms", 1, "norm", "")
    assert (
        not findings
        and len(findings) == 0
        and list(findings) == []
        and repr(findings) == "Findings([])"
    )
    findings.add([FOUND, FOUND, other])
    assert (
        findings
        and len(findings) == 2
        and list(findings) == [FOUND, other] == findings[:]
        and other in findings
    )
    assert (findings[0], findings[-1], findings[1:]) == (FOUND, other, [other])
    assert repr(findings) == f"Findings([{FOUND!r}, {other!r}])"
    with pytest.raises(IndexError):
        findings[2]


def test_a_command_gets_each_finding_on_its_stdin_without_a_shell(tmp_path: Path) -> None:
    keep = tmp_path / "keep.py"
    keep.write_text("import sys\nopen(sys.argv[1], 'a').write(sys.stdin.read())\n")
    findings = Findings(None, f"{sys.executable} {keep} '{tmp_path / 'with blank'}'")
    findings.add([FOUND, FOUND, TraceFinding("decay-on-norms", 1, "norm", "")], aloud=False)
    rows = [json.loads(line) for line in (tmp_path / "with blank").read_text().splitlines()]
    assert [row["id"] for row in rows] == ["gradient-stale", "decay-on-norms"]
    assert rows[0]["where"] == FOUND.where and rows[0]["meaning"] == FOUND.meaning


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("/nowhere/page", "cannot be run: "),
        ("false", "ended with exit code 1"),
        ("'", "cannot be run: "),
        ("", "cannot be run: "),
    ],
)
def test_a_command_that_fails_is_one_line(
    program: str, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "bridge.trace"):
        Findings(None, program).add([FOUND], aloud=False)
    (said,) = caplog.messages
    assert words in said and "\n" not in said


def test_a_command_that_hangs_is_ended(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("bridge.trace.findings.PATIENCE", 0.2)
    start = time.monotonic()
    Findings(None, "sleep 600").add([FOUND], aloud=False)
    assert time.monotonic() - start < 500 and "did not end within 0.2 s" in caplog.messages[-1]


def logged(folder: Path) -> Path:
    """A run of four steps with a finding."""
    log = Log(folder, 0, {"layers": ["a"], "settings": {"optimizer": "SGD"}})
    for number in range(1, 5):
        step(log, number, 4.0 / number)
    Findings(folder).add([FOUND], aloud=False)
    return folder


def test_tensorboard_reads_what_was_logged(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert (
        command(["trace", "export", str(logged(tmp_path / "run")), "-o", str(tmp_path / "board")])
        == 0
    )
    found = EventAccumulator(str(tmp_path / "board"))
    found.Reload()
    assert set(found.Tags()["scalars"]) == {"loss", "norm/gradients", "gradients/a"}
    assert [(event.step, event.value) for event in found.Scalars("loss")] == [
        (number, pytest.approx(4.0 / number)) for number in range(1, 5)
    ]
    assert [event.value for event in found.Scalars("gradients/a")] == [1.0, 2.0, 3.0, 4.0]
    (text,) = found.Tensors("findings/0/text_summary")
    assert text.step == 2 and b"gradient-stale" in text.tensor_proto.string_val[0]


@pytest.mark.outside
def test_weights_and_biases_writes_an_offline_run(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    assert (
        command(
            [
                "trace",
                "export",
                str(logged(tmp_path / "run")),
                "--to",
                "wandb",
                "-o",
                str(tmp_path / "offline"),
            ]
        )
        == 0
    )
    (written,) = (tmp_path / "offline").rglob("*.wandb")
    assert b"gradients/a" in written.read_bytes()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--to", "tensorbord"),
            "--to: found tensorbord, expected tensorboard or wandb; did you mean tensorboard?",
        ),
        (("--to", "wandb"), "wandb is not installed; pip install wandb"),
        (("--to", "tensorboard"), "tensorboard is not installed; pip install tensorboard"),
    ],
)
def test_what_cannot_be_exported_is_one_line(
    words: tuple[str, ...],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("bridge.trace.export.find_spec", lambda name: None)
    assert (
        command(
            ["trace", "export", str(logged(tmp_path / "run")), "-o", str(tmp_path / "out"), *words]
        )
        == 1
    )
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1 and not (tmp_path / "out").exists()


def test_a_folder_that_is_there_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(["trace", "export", str(logged(tmp_path / "run")), "-o", str(tmp_path)]) == 1
    assert "found a file or folder, expected none" in capsys.readouterr().err


def test_a_loss_is_what_backward_was_called_with(tmp_path: Path) -> None:
    from bridge.plan.plan import Debug
    from bridge.trace.run import TracedRun

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    tracer = attach(model, Debug(all_param_gradients=5), tmp_path, optimizer=optimizer)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        halves = [model(torch.randn(3, 4)).square().mean() / 2 for _ in range(2)]
        for half in halves:
            torch.autograd.backward(half)
        optimizer.step()
        losses.append(sum(half.item() for half in halves))
    tracer.remove()
    (lines,) = TracedRun.read(tmp_path).lines.values()
    assert [lines[number].read().loss for number in range(4)] == [None, *map(pytest.approx, losses)]
    assert not run_liveness.is_alive(tmp_path) and not (tmp_path / run_liveness.FILE).exists()
