"""The trace changes no number of a training and not how it ends, and none of its collectives keeps a rank waiting for ever."""

from __future__ import annotations

import copy
import io
import pickle
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bridge.trace import attach, step_meeting
from tests.trace.harmless import changed_scripts
from tests.trace.planting import LOGS
from tests.trace.unedited import changed

SEEDS = range(6)


def test_generated_scripts_print_the_same_numbers_with_and_without_the_trace(
    tmp_path: Path,
) -> None:
    counts: dict[str, int] = {}
    assert list(changed_scripts(SEEDS, tmp_path, counts)) == []
    assert counts["watched"] == len(SEEDS) and counts["runs"] >= len(SEEDS) / 2


def test_whole_scripts_print_the_same_numbers_with_and_without_the_trace(tmp_path: Path) -> None:
    counts = Counter[str]()
    names = "whole:(adversaries|compiled step|average of weights under DDP|pipelined)"
    chosen = [names, "torch:mixtral" if find_spec("transformers") else "torch:ema"]
    assert list(changed(chosen, tmp_path, counts)) == []
    assert counts == {"runs": 5}


def test_copies_and_pickles_of_a_watched_model_are_not_watched(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    source = attach(model, LOGS, tmp_path, optimizer=optimizer).source
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    twins = [
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(file, weights_only=False),
        torch.optim.swa_utils.AveragedModel(model),
    ]
    assert b"bridge" not in pickle.dumps(model), "a copy is read without this package"
    for twin in twins:
        twin(torch.ones(3, 4)).sum().backward()
    assert source.passes == 0  # type: ignore[attr-defined]
    model(torch.ones(3, 4)).sum().backward()
    assert source.passes == 1  # type: ignore[attr-defined]


def stages(rank: int, world: int, folder: Path, skips: int | None, patience: float) -> Any:
    """A pipeline in which one stage skips an optimizer step; its losses, and what was found."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    step_meeting.PATIENCE = patience
    torch.manual_seed(rank)
    part = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    stage = PipelineStage(part, rank, world, torch.device("cpu"))  # type: ignore[no-untyped-call]
    schedule = Schedule1F1B(stage, 2, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(part.parameters(), 0.1)
    tracer = attach(schedule, LOGS, folder, optimizer=optimizer) if patience else None
    losses: list[torch.Tensor] = []
    for step in range(4):
        data = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        schedule.step(
            *data[:1] if not rank else (), target=data[1] if rank else None, losses=losses
        )
        if step != 1 or rank != skips:
            optimizer.step()
    dist.barrier()
    step_meeting.PATIENCE = 10.0
    faults = [one.id for one in tracer.findings if one.severity == "fault"] if tracer else []
    return [float(loss) for loss in losses], faults


def test_a_pipeline_goes_on_if_one_stage_skips_a_step(run: Any, tmp_path: Path) -> None:
    for skips in (0, 1):
        plain = run(2, stages, tmp_path / "plain", skips, 0.0)
        watched = run(2, stages, tmp_path / str(skips), skips, 2.0)
        assert [losses for losses, _ in watched] == [losses for losses, _ in plain]
        assert [found for _, found in watched] == [["skipped-alone"]] * 2
    assert [found for _, found in run(2, stages, tmp_path / "right", None, 10.0)] == [[], []]
