"""Each `debug_*` setting of a Fast-LLM config does on the engine what Fast-LLM's documentation says; read from the log."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bridge
import compat
from bridge.engine import initialize
from bridge.engine.models.gpt import mean_cross_entropy
from bridge.plan.plan import Debug, Plan
from bridge.trace.run import LoggedTensor, TracedRun
from bridge.trace.summary import sample_indices
from tests.engine.runs import Case, model_of
from tests.trace.traces import drifted, logged

Ranks = Callable[..., list[Any]]

BASE = {
    "precision.compute": "fp64",
    "optimizer.name": "sgd",
    "optimizer.lr": 0.1,
    "batch.accumulation": 2,
}
DATA = {**BASE, "parallel.data": 2, "batch.micro": 2, "zero.stage": 2}
TOKENS = {**BASE, "parallel.tensor": 2, "parallel.sequence": True, "batch.micro": 4}
LAYERS = ("embedding", "block0", "block1", "block2", "head")


def settings(folder: Path, **debug: Any) -> dict[str, Any]:
    """Plan values of a Fast-LLM config with these settings alone, read from YAML."""
    path = folder / "config.yaml"
    lines = "".join(f"    debug_{name}: {str(value).lower()}\n" for name, value in debug.items())
    path.write_text(f"type: gpt\nmodel:\n  multi_stage:\n{lines}")
    values = bridge.lift(compat.load("fast_llm").read(path)).values()
    return {name: value for name, value in values.items() if name.startswith("debug.")}


def entries(folder: Path) -> list[LoggedTensor]:
    """All tensors of a run."""
    run = TracedRun.read(folder)
    assert run.steps == (0, 1, 2)
    return [entry for step in run.steps for entry in run.entries(step)]


def weights(found: list[LoggedTensor]) -> dict[tuple[int, str], LoggedTensor]:
    """By step and the parameter's name."""
    return {(entry.name.step, f"{entry.name.layer}.{entry.name.tensor}"): entry for entry in found}


def assert_logged_at(values: torch.Tensor, entry: LoggedTensor) -> None:
    """The samples of `entry` are those of `values`."""
    assert entry.samples is not None
    assert torch.equal(entry.samples, values.reshape(-1)[sample_indices(entry.shape, 5)])


def test_layer_outputs(run: Ranks, tmp_path: Path) -> None:
    """Every layer's output, of every microbatch, and what goes into the first."""
    run(2, logged, Case({**TOKENS, **settings(tmp_path, layer_outputs=5)}), tmp_path / "run")
    inputs = [
        entry.name.tensor for entry in entries(tmp_path / "run") if entry.name.kind == "input"
    ]
    assert inputs == ["0", "1"] * 2, "tokens and targets, in two steps"
    found = [entry for entry in entries(tmp_path / "run") if entry.name.kind != "input"]
    assert [(entry.name.step, entry.name.layer) for entry in found] == list(product((1, 2), LAYERS))
    assert {(entry.name.phase, entry.name.kind) for entry in found} == {("forward", "output")}
    assert {entry.missing for entry in found} == {0}
    assert all(set(entry.microbatches()) == {0, 1} for entry in found)
    assert {len(entry.samples) for entry in found if entry.samples is not None} == {4}, (
        "level 5: 2^(5-3)"
    )
    assert found[1].shape == (8, 6, 16)


def test_layer_gradients(run: Ranks, tmp_path: Path) -> None:
    """The gradient of every layer's input; the first layer's are numbers of tokens and have none."""
    run(2, logged, Case({**TOKENS, **settings(tmp_path, layer_gradients=5)}), tmp_path / "run")
    found = entries(tmp_path / "run")
    assert [(entry.name.step, entry.name.layer) for entry in found] == list(
        product((1, 2), LAYERS[:0:-1])
    )
    assert {(entry.name.phase, entry.name.kind) for entry in found} == {
        ("backward", "input gradient")
    }
    assert {(entry.missing, entry.shape) for entry in found} == {(0, (8, 6, 16))}


def test_param_init(run: Ranks, tmp_path: Path) -> None:
    """Every parameter before the first step, and none later."""
    case = Case({**DATA, **settings(tmp_path, param_init=5)})
    run(2, logged, case, tmp_path / "run")
    found, model = weights(entries(tmp_path / "run")), dict(model_of(case).named_parameters())
    assert set(found) == {(0, name) for name in model}
    for (_, name), entry in found.items():
        assert_logged_at(model[name].detach(), entry)


def test_param_update(run: Ranks, tmp_path: Path) -> None:
    """Every parameter after each update."""
    case = Case({**DATA, **settings(tmp_path, param_update=5)})
    (_, final, _), _ = run(2, logged, case, tmp_path / "run")
    found = weights(entries(tmp_path / "run"))
    assert set(found) == {(step, name) for step in (1, 2) for name in final}
    for name, weight in final.items():
        assert_logged_at(weight, found[2, name])


def test_all_param_gradients(run: Ranks, tmp_path: Path) -> None:
    """Every parameter's gradient, reduced; together they have the gradient norm of the step."""
    case = Case({**DATA, **settings(tmp_path, all_param_gradients=2)})
    (norms, final, _), _ = run(2, logged, case, tmp_path / "run")
    found = weights(entries(tmp_path / "run"))
    assert set(found) == {(step, name) for step in (1, 2) for name in final}
    assert squares(found.values()) == pytest.approx([norm**2 for norm in norms])


def squares(found: Any) -> list[float]:
    """Sum of squares in steps 1 and 2."""
    return [
        sum(entry.summary.squares for entry in found if entry.name.step == step) for step in (1, 2)
    ]


def test_param_gradients(run: Ranks, tmp_path: Path) -> None:
    """The flat slice of each stage's gradients that each rank keeps after the reduction."""
    case = Case({**DATA, **settings(tmp_path, param_gradients=2)})
    results = run(2, logged, case, tmp_path / "run")
    found = entries(tmp_path / "run")
    assert {entry.name.kind for entry in found} == {"gradient shard"}
    for rank, (_, _, sizes) in enumerate(results):
        mine = [
            entry
            for entry in found
            if entry.name.tensor.endswith(f"of rank {rank}") and entry.name.step == 1
        ]
        assert sorted(entry.shape[0] for entry in mine) == sorted(sizes)
    assert squares(found) == pytest.approx([norm**2 for norm in results[0][0]])


def test_global_tensors_off(run: Ranks, tmp_path: Path) -> None:
    """Each rank logs what it holds itself: with sequence parallelism, half of the tokens."""
    run(
        2,
        logged,
        Case({**TOKENS, **settings(tmp_path, layer_outputs=5, global_tensors=False)}),
        tmp_path / "run",
    )
    found = [
        entry
        for entry in entries(tmp_path / "run")
        if entry.name.layer == "block1" and entry.name.step == 1
    ]
    assert {(entry.name.tensor, entry.shape) for entry in found} == {
        (f"of rank {rank}", (4, 3, 16)) for rank in (0, 1)
    }


def test_activation_memory(run: Ranks, tmp_path: Path) -> None:
    """Memory after each layer, forward and backward, of each microbatch."""
    run(
        1,
        logged,
        Case({**BASE, "batch.micro": 4, **settings(tmp_path, activation_memory=True)}),
        tmp_path / "run",
    )
    found = entries(tmp_path / "run")
    assert {entry.name.kind for entry in found} == {"memory"}
    seen = {(entry.name.phase, entry.name.layer, entry.name.microbatch) for entry in found}
    backward = {("backward", layer, place) for layer in LAYERS[1:] for place in (0, 1)}
    assert seen == {("forward", layer, place) for layer in LAYERS for place in (0, 1)} | backward
    assert all(entry.samples is not None and 2**20 < entry.samples.min() < 2**40 for entry in found)


def test_tensor_parallel(run: Ranks, tmp_path: Path) -> None:
    """Replicas in a tensor group are compared; what differs is logged by every rank, and training goes on."""
    for said, steps in run(
        2, drifted, Case({**TOKENS, **settings(tmp_path, tensor_parallel=True)})
    ):
        assert steps == 3
        assert any(
            "desync: 2/reduce/block0/weight/norm1.weight: ranks 0, 1 disagree; 1 of 16 elements"
            in line
            for line in said
        )
        assert not any(line.startswith("desync: 1/") for line in said)


def test_nothing_is_installed_at_level_zero(run: Ranks, tmp_path: Path) -> None:
    values = settings(
        tmp_path, **dict.fromkeys(("layer_outputs", "layer_gradients", "param_init"), 0)
    )
    engine = initialize(
        model_of(Case(BASE)),
        Plan.of({**BASE, **values}),
        mean_cross_entropy,
        trace=tmp_path / "run",
    )
    hooks: list[Callable[[nn.Module], Any]] = [
        lambda module: module._forward_hooks,
        lambda module: module._forward_pre_hooks,
    ]
    assert not any(hook(module) for module in engine.model for hook in hooks)
    assert not (tmp_path / "run").exists()
    assert not any(engine.watchers.values())


def test_every_setting_has_its_test() -> None:
    tests = {
        name.removeprefix("test_").removesuffix("_off")
        for name in globals()
        if name.startswith("test_")
    }
    assert set(Debug.model_fields) <= tests
