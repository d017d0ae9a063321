"""Trace attaches to what most people train with, logs the same tensors under the same names, and raises no false alarm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from bridge.trace.naming import layers_by_name, parameters_by_name, unwrap_module
from bridge.trace.run import TracedRun
from bridge.trace.run_comparison import compare_runs
from tests.trace.attaching import WAYS, attached
from tests.trace.planting import FAULTS, tried

pytestmark = pytest.mark.usefixtures("foreign")
Ranks = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> TracedRun:
    """The training on one rank, in one pass a step."""
    folder = tmp_path_factory.mktemp("alone")
    assert attached(0, 1, "plain", folder) == []
    return TracedRun.read(folder)


@pytest.mark.parametrize("way", WAYS)
def test_what_is_attached_logs_what_one_rank_logs(
    way: str, run: Ranks, alone: TracedRun, tmp_path: Path
) -> None:
    if way == "accelerate" and find_spec("accelerate") is None:
        pytest.skip("accelerate is not installed")
    assert run(WAYS[way][0], attached, way, tmp_path) == [[]] * WAYS[way][0], "no false alarm"
    found = compare_runs(TracedRun.read(tmp_path), alone)
    assert [(str(line.name), line.verdict, line.cause) for line in found.faults] == []
    weights = {
        line.name
        for line in found.lines
        if line.name.phase in ("reduce", "update") and line.verdict != "unseen"
    }
    assert len({name for name in weights if name.kind == "gradient"}) == 2 * len(
        parameters_by_name(model())
    )
    hidden = {
        line.name.layer
        for line in found.lines
        if line.verdict == "unseen" and line.name.kind == "output"
    }
    assert hidden == (set(layers_by_name(model())) if way == "torch.compile" else set())


def model() -> Any:
    from tests.trace.attaching import small

    return small()


def test_names_are_the_same_under_every_wrapper() -> None:
    import torch
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    plain, wrapped = model(), model()
    for at, block in enumerate(wrapped.blocks):
        wrapped.blocks[at] = torch.compile(checkpoint_wrapper(block), backend="eager")
    assert (
        list(layers_by_name(wrapped))
        == list(layers_by_name(plain))
        == ["tok", "pos", "blocks.0", "blocks.1", "blocks.2", "norm", "head"]
    )
    assert list(parameters_by_name(wrapped)) == list(parameters_by_name(plain))
    assert unwrap_module(wrapped.blocks[0]).__class__ is plain.blocks[0].__class__


@pytest.mark.parametrize(
    "name", ["A1", "A3", "A12", "A17", "A22", "A23", "A24", "A25", "A26", "A28", "B7", "F5"]
)
def test_planted_faults_are_found_with_and_without_a_twin(
    name: str, run: Ranks, tmp_path: Path
) -> None:
    """A sample of the catalogue, which `python -m tests.trace.planting` plants whole."""
    found = tried(run, name, tmp_path)
    assert found.located, found.named
    assert found.right is not False, found.claim
    assert bool(found.right) == bool(FAULTS[name].cause), found.claim
    assert found.caught, found.alone
    assert [
        finding for finding in found.alarms if finding[3] == "fault" or finding[0] == "check-ended"
    ] == []


SCRIPT = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0)
for step in range(3):
    tokens = torch.randint(20, (4, 6))
    if step != 1:
        optimizer.zero_grad()
    nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    optimizer.step()
"""


def test_a_script_is_watched_without_an_edit(tmp_path: Path) -> None:
    script, folder = tmp_path / "train.py", tmp_path / "run"
    script.write_text(SCRIPT)
    command = [
        sys.executable,
        "-P",
        "-m",
        "stagebridge",
        "trace",
        "run",
        "--run",
        str(folder),
        "--level",
        "5",
        "--",
    ]
    done = subprocess.run(
        [*command, sys.executable, str(script)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ,
    )
    assert done.returncode == 2, done.stderr
    assert "trace run: 1 faults and 1 remarks" in done.stdout
    first = json.loads((folder / "findings.jsonl").read_text().splitlines()[0])
    assert (first["id"], first["step"], first["where"]) == ("gradient-stale", 2, "0.weight")
    assert TracedRun.read(folder).steps == (0, 1, 2, 3)


def test_a_fault_that_is_meant_is_accepted_by_its_id_and_place(tmp_path: Path) -> None:
    script, place = tmp_path / "train.py", "gradient-stale:0.weight"
    script.write_text(SCRIPT)
    command = [
        sys.executable,
        "-P",
        "-m",
        "stagebridge",
        "trace",
        "run",
        "--run",
        str(tmp_path / "run"),
    ]
    ends = []
    for more in ((place,), (place, "update-unexplained:the run"), ("stale:x",), ("same-data:",)):
        flags = [word for one in more for word in ("--accept", one)]
        words = [*command, *flags, "--", sys.executable, str(script)]
        done = subprocess.run(words, capture_output=True, text=True, check=False, env=os.environ)
        ends.append((done.returncode, done.stdout + done.stderr))
    assert "trace run: 0 faults and 1 remarks (1 more were accepted)" in ends[0][1]
    assert "remark: gradient-changed: step 2: 0.weight" in ends[0][1]
    assert "fault: gradient-stale: step 2: 0.weight" in ends[0][1]
    assert "--accept update-unexplained:the run: there was no such finding" in ends[1][1]
    assert [code for code, _ in ends] == [0, 0, 1, 1]
    assert all("expected ID:PLACE" in text for _, text in ends[2:])
    for accepted, code in ((place, 0), ("gradient-stale", 1)):
        project = tmp_path / "pyproject.toml"
        project.write_text(f'[tool.stagebridge.trace]\naccept = ["{accepted}"]\n')
        words = [*command, "--", sys.executable, str(script)]
        done = subprocess.run(
            words, capture_output=True, text=True, check=False, env=os.environ, cwd=tmp_path
        )
        assert done.returncode == code, done.stderr
    assert f"{project.name}: tool.stagebridge.trace.accept: gradient-stale: expected" in done.stderr


STAGES = """
import sys
import torch
import torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
stage = nn.Sequential(nn.Linear(8, 8), nn.Tanh()) if rank == 0 else nn.Linear(8, 4)
optimizer = torch.optim.SGD(stage.parameters(), lr=1e-2)
data, target = torch.randn(3, 4, 8), torch.randint(4, (3, 4))
mean = nn.functional.cross_entropy
if sys.argv[1] == "schedule":
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
    schedule = ScheduleGPipe(PipelineStage(stage, rank, 2, torch.device("cpu")), 2, loss_fn=mean)
for step in range(3):
    optimizer.zero_grad()
    if sys.argv[1] == "schedule":
        schedule.step(data[step]) if rank == 0 else schedule.step(target=target[step])
    elif rank == 0:
        output = stage(data[step])
        dist.send(output.detach(), 1)
        gradient = torch.empty_like(output)
        dist.recv(gradient, 1)
        output.backward(gradient)
    else:
        given = torch.empty(4, 8)
        dist.recv(given, 0)
        given.requires_grad_()
        mean(stage(given), target[step]).backward()
        dist.send(given.grad, 0)
    optimizer.step()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("kind", ["schedule", "by hand"])
def test_pipelines_are_watched_without_an_edit_and_wait_for_nobody(
    kind: str, tmp_path: Path
) -> None:
    script, folder = tmp_path / "train.py", tmp_path / "run"
    script.write_text(STAGES)
    launch = [
        sys.executable,
        "-P",
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(script),
        kind,
    ]
    command = [
        sys.executable,
        "-P",
        "-m",
        "stagebridge",
        "trace",
        "run",
        "--run",
        str(folder),
        "--level",
        "5",
        "--",
        *launch,
    ]
    known = {**os.environ, "STAGEBRIDGE_MEETING": "0.2" if kind == "by hand" else "10"}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=known, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "trace run: 0 faults" in done.stdout
    runs = [folder] if kind == "schedule" else [folder, folder / "apart1"]
    assert [TracedRun.read(run).steps for run in runs] == [(0, 1, 2, 3)] * len(runs)
    assert ("ranks do not begin to train at the same time" in done.stderr) == (kind == "by hand")


COPIES = """
import copy
import sys
import torch
from torch import nn
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
if sys.argv[1] == "copy":
    held = [weight for weight in copy.deepcopy(model).parameters()]
else:
    model = model.bfloat16()
    held = [weight.detach().float().requires_grad_() for weight in model.parameters()]
optimizer = torch.optim.SGD(held, lr=1.0)
for step in range(4):
    model.zero_grad()
    model(torch.randn(4, 8).to(model[0].weight.dtype)).float().square().mean().backward()
    if sys.argv[1] == "masters":
        for one, other in zip(held, model.parameters()):
            one.grad = other.grad.float()
    optimizer.step()
    if sys.argv[1] == "masters":
        with torch.no_grad():
            for one, other in zip(held, model.parameters()):
                other.copy_(one)
"""


@pytest.mark.parametrize(
    ("kind", "code", "wanted"), [("copy", 2, ["not-of-the-model"]), ("masters", 0, [])]
)
def test_a_model_that_no_optimizer_holds_is_watched_all_the_same(
    kind: str, code: int, wanted: list[str], tmp_path: Path
) -> None:
    script, folder = tmp_path / "train.py", tmp_path / "run"
    script.write_text(COPIES)
    command = [
        sys.executable,
        "-P",
        "-m",
        "stagebridge",
        "trace",
        "run",
        "--run",
        str(folder),
        "--",
    ]
    command += [sys.executable, str(script), kind]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    assert done.returncode == code, done.stderr
    found = folder / "findings.jsonl"
    lines = found.read_text().splitlines() if found.is_file() else []
    assert [json.loads(line)["id"] for line in lines[:1]] == wanted
