"""Groups of parameters as a file: what a run has to be told, and what is odd in a file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bridge.checkpoint import groups
from bridge.checkpoint.hub import Hub, Origin, Parameter, ParameterGroup, Where
from bridge.checkpoint.lazy import Held
from bridge.cli import run as command
from bridge.engine import initialize
from bridge.engine.optimizer import groups_of_file
from bridge.errors import SourceError
from bridge.plan.plan import Plan

ADAM = {"optimizer.name": "adamw", "optimizer.lr": 0.1, "optimizer.weight_decay": 0.5}


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 2))


def hub(*rows: tuple[list[str], dict[str, Any]]) -> Hub:
    held = {name: Parameter(Held(weight.detach())) for name, weight in net().named_parameters()}
    return Hub(
        Origin("a test"),
        held,
        groups=tuple(ParameterGroup(tuple(names), settings) for names, settings in rows),
    )


MATRICES, VECTORS = ["0.weight", "2.weight"], ["0.bias", "1.weight", "1.bias", "2.bias"]
ALL = ["0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias"]
DECAYS, SPARED = {"lr": 0.1, "weight_decay": 0.5}, {"lr": 0.1, "weight_decay": 0.0}


@pytest.mark.parametrize(
    ("rows", "scope", "by_place", "expected"),
    [
        ([(ALL, DECAYS)], "all", True, False),
        (
            [([*VECTORS, *MATRICES], DECAYS)],
            "all",
            True,
            True,
        ),  # DeepSpeed would find others at these places
        ([([*VECTORS, *MATRICES], DECAYS)], "all", False, False),
        ([(MATRICES, DECAYS), (VECTORS, SPARED)], "all", True, True),
        ([(MATRICES, DECAYS), (VECTORS, SPARED)], "matrices", True, False),
        ([(VECTORS, SPARED), (MATRICES, DECAYS)], "matrices", True, True),
        ([(VECTORS, SPARED), (MATRICES, DECAYS)], "matrices", False, False),
        ([(MATRICES, DECAYS), (VECTORS, {**DECAYS, "wd_mult": 0.0})], "matrices", False, False),
        ([(MATRICES, DECAYS), (VECTORS, {**SPARED, "lr": 0.2})], "matrices", False, True),
        ([(MATRICES, DECAYS), (VECTORS, {**DECAYS, "lr": 0.2})], "all", False, True),
        ([(MATRICES, DECAYS), (VECTORS, DECAYS)], "all", False, False),
        ([], "all", True, False),
    ],
)
def test_a_run_is_told_groups_that_its_config_does_not_mean(
    rows: Any, scope: str, by_place: bool, expected: bool
) -> None:
    assert groups.needs_group_file(hub(*rows), scope, by_place) is expected


def test_rates_are_what_a_schedule_starts_from() -> None:
    """Both groups are in their warmup: one at half of 0.1, one at half of 0.02."""
    held = replace(hub((VECTORS, {"lr": 0.01}), (MATRICES, {"lr": 0.05})), where=Where(steps=4))
    rising = {"optimizer.schedule.name": "constant", "optimizer.schedule.warmup_steps": 8}
    steered = Plan.of({**ADAM, **rising}).optimizer
    assert [row["lr"] for row in groups.groups_to_write(held, steered)] == pytest.approx(
        [0.02, 0.1]
    )
    noted = hub(
        (VECTORS, {"lr": 0.001, "initial_lr": 0.02}), (MATRICES, {"lr": 0.005, "initial_lr": 0.1})
    )
    assert [row["lr"] for row in groups.groups_to_write(noted, steered)] == pytest.approx(
        [0.02, 0.1]
    )
    assert [row["lr"] for row in groups.groups_to_write(held, Plan.of(ADAM).optimizer)] == [
        0.01,
        0.05,
    ]


def test_the_engine_takes_them() -> None:
    """As torch itself does with the same groups, under a schedule that halves all rates."""
    rows = [
        {"params": MATRICES, "lr": 0.1},
        {"params": VECTORS, "lr": 0.02, "weight_decay": 0.0, "betas": [0.5, 0.6]},
    ]
    plan = Plan.of(
        {**ADAM, "optimizer.schedule.name": "linear", "optimizer.schedule.total_steps": 2}
    )
    engine = initialize(
        net(),
        plan,
        lambda output, targets: (output * targets).sum(),
        groups=groups_of_file(rows, plan.optimizer),
    )
    mine = net()
    optimizer = torch.optim.AdamW(
        groups.build_groups(rows, dict(mine.named_parameters()), "rows"), lr=0.1, weight_decay=0.5
    )
    for step in range(2):
        engine.train_batch([(torch.ones(1, 3), torch.ones(1, 2) * (step + 1))])
        (mine(torch.ones(1, 3)) * (step + 1)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        for group, rate in zip(optimizer.param_groups, (0.1, 0.02), strict=True):
            group["lr"] = rate / 2
    for name, weight in engine.state_dict():
        assert weight == pytest.approx(mine.get_parameter(name).detach(), abs=1e-6), name


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "expected JSON"),
        ('{"params": []}', "expected a list of groups"),
        ('[{"params": "a"}]', "expected names of parameters"),
        ('[{"params": ["a"], "lr": "fast"}]', "lr: found 'fast', expected a number"),
        ('[{"params": ["a"], "rate": 1}]', "'rate': found an unknown setting of a group"),
        ('[{"params": ["a"], "betas": [0.9]}]', "expected two numbers"),
        ('[{"params": ["a"], "lr": -1}]', "lr: found -1"),
    ],
)
def test_a_file_that_is_odd_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "groups.json").write_text(text)
    with pytest.raises(SourceError, match=problem.replace("[", r"\[")):
        groups.read_groups(tmp_path / "groups.json")


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        ([ALL[1:]], "'0.weight' is in no group"),
        ([ALL, ["9.x"]], "'9.x' is not a trained"),
        ([ALL, ALL], "several"),
    ],
)
def test_groups_hold_each_parameter_once(names: list[list[str]], problem: str) -> None:
    with pytest.raises(SourceError, match=problem):
        groups.build_groups(
            [{"params": group} for group in names], dict(net().named_parameters()), "rows"
        )


def test_train_takes_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {}}}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    (tmp_path / "groups.json").write_text('[{"params": ["head.weight"]}]')
    assert (
        command(
            [
                "train",
                str(tmp_path / "ds.json"),
                "--steps",
                "1",
                "--groups",
                str(tmp_path / "groups.json"),
            ]
        )
        == 1
    )
    assert "is in no group" in capsys.readouterr().err
