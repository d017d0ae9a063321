"""A model of transformers in DistributedDataParallel, and on the engine sharded, in stages: one log has the other's tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bridge.cli import run as cli
from bridge.trace.run import TracedRun
from bridge.trace.run_comparison import compare_runs
from tests.trace.traces import traced_blocks, traced_replicas

pytest.importorskip("transformers")
Ranks = Callable[..., list[Any]]
STEPS = 2
PIPED = {
    "parallel.pipeline": 2,
    "parallel.data": 2,
    "zero.stage": 3,
    "batch.accumulation": 2,
    "batch.micro": 2,
}
CASES = {
    "llama, 1F1B": ("llama", {"schedule.name": "1f1b"}),
    "gpt2, interleaved": ("gpt2", {"schedule.name": "interleaved_1f1b", "schedule.virtual": 2}),
}


@pytest.fixture(scope="module")
def replicas(pools: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Ranks, str], Path]:
    """Logs of plain runs on two ranks, each once."""
    folders: dict[str, Path] = {}

    def found(run: Ranks, name: str) -> Path:
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp(name)
            run(2, traced_replicas, name, folders[name], STEPS)
        return folders[name]

    return found


@pytest.mark.parametrize("case", CASES)
def test_runs_are_equal_up_to_rounding(
    case: str, run: Ranks, replicas: Any, tmp_path: Path, capsys: Any
) -> None:
    name, schedule = CASES[case]
    layers = run(4, traced_blocks, name, tmp_path, {**PIPED, **schedule}, STEPS)[0]
    found = compare_runs(TracedRun.read(tmp_path), TracedRun.read(replicas(run, name)))
    assert [(str(line.name), line.verdict, line.cause) for line in found.faults] == []
    compared = [line for line in found.lines if line.verdict in ("equal", "rounding")]
    seen = {line.name.layer for line in compared if line.name.kind == "output"}
    assert len(seen) >= layers, "each layer of the engine has its output in both logs"
    kinds = {line.name.kind for line in compared}
    assert kinds >= {"output", "input gradient", "gradient", "weight"}
    assert cli(["trace", "diff", str(tmp_path), str(replicas(run, name))]) == 0
    capsys.readouterr()


@pytest.mark.parametrize("fault", ["model.layers.1.mlp", "model.layers.2"])
def test_a_planted_fault_is_found_in_its_block(
    fault: str, run: Ranks, replicas: Any, tmp_path: Path, capsys: Any
) -> None:
    run(4, traced_blocks, "llama", tmp_path, {**PIPED, "schedule.name": "1f1b"}, STEPS, fault)
    found = compare_runs(TracedRun.read(tmp_path), TracedRun.read(replicas(run, "llama")))
    assert found.divergence is not None
    assert str(found.divergence.name).startswith(f"1/forward/{'.'.join(fault.split('.')[:3])}/")
    assert cli(["trace", "diff", str(tmp_path), str(replicas(run, "llama"))]) == 2
    assert ".".join(fault.split(".")[:3]) in capsys.readouterr().out
