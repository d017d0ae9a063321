"""What a checkpoint holds and another cannot: named, and never dropped in silence."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

from bridge.checkpoint import formats, interface
from bridge.checkpoint.hub import as_plain
from bridge.checkpoint.writing import write_checkpoint
from bridge.cli import run as command
from bridge.engine import initialize
from bridge.engine.optimizer import ParameterGroupSettings
from bridge.plan.plan import Plan


def small() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.LayerNorm(4), nn.Linear(4, 2))


def stored(
    folder: Path,
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """A checkpoint of torch after two steps."""
    for _ in range(2):
        net(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    model, state = get_state_dict(net, optimizer)
    dcp.save(
        {"model": model, "optimizer": state, **(extra or {})},
        checkpoint_id=str(folder),
        no_dist=True,
    )
    return folder


def saved(
    folder: Path,
    optimizer: str,
    extra: Mapping[str, Any] | None = None,
    frozen: str = "",
    **settings: Any,
) -> Path:
    """The same of one group, of which a parameter may be frozen."""
    net = small()
    for name, weight in net.named_parameters():
        weight.requires_grad_(name != frozen)
    trained = [weight for weight in net.parameters() if weight.requires_grad]
    return stored(folder, net, getattr(torch.optim, optimizer)(trained, **settings), extra)


def test_the_engine_says_where_it_treats_parameters_otherwise(tmp_path: Path) -> None:
    """Two groups on the other side, one here."""
    net = small()
    groups = [
        {"params": list(net[0].parameters())},
        {"params": list(net[1:].parameters()), "weight_decay": 0.0},
    ]
    source = stored(tmp_path / "a", net, torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1))
    command(["checkpoint", "convert", str(source), "--to", "native", "-o", str(tmp_path / "b")])
    plan = {"optimizer.name": "adamw", "optimizer.lr": 0.01, "optimizer.weight_decay": 0.1}
    engine = initialize(small(), Plan.of(plan), lambda output, targets: output.sum())
    with pytest.warns(
        UserWarning, match="6 parameters, such as 1.weight, had weight_decay 0.0 instead of 0.1"
    ):
        engine.load_checkpoint(tmp_path / "b")
    spared = ParameterGroupSettings(
        frozenset(name for name, _ in net.named_parameters() if name[0] != "0"),
        {"weight_decay": 0.0},
    )
    engine = initialize(
        small(), Plan.of(plan), lambda output, targets: output.sum(), groups=[spared]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.load_checkpoint(tmp_path / "b")


def said(folder: Path) -> dict[str, str]:
    return {
        finding.path: finding.effect.value for finding in formats.read_checkpoint(folder).findings
    }


@pytest.mark.parametrize(
    ("optimizer", "kind"), [("NAdam", "mu_product"), ("Adafactor", "row_var"), ("ASGD", "eta")]
)
def test_states_that_are_no_moments_are_named(tmp_path: Path, optimizer: str, kind: str) -> None:
    source = saved(tmp_path / "a", optimizer, lr=0.01)
    assert said(source)[f"moments.{kind}"] == "different numbers"
    assert (
        command(["checkpoint", "convert", str(source), "--to", "dcp", "-o", str(tmp_path / "b")])
        == 2
    )


def test_a_rate_that_is_a_tensor_stays_a_number(tmp_path: Path) -> None:
    hub = formats.read_checkpoint(saved(tmp_path / "a", "AdamW", lr=torch.tensor(0.01)))
    assert hub.groups[0].settings["lr"] == pytest.approx(0.01) and not hub.findings


@pytest.mark.parametrize(
    ("extra", "expected"), [({"step": 1000}, 1000), ({"step": 2}, 2), ({}, None)]
)
def test_a_counter_of_the_script_stays_what_it_is(
    tmp_path: Path, extra: dict[str, Any], expected: int | None
) -> None:
    source = (
        saved(tmp_path / "a", "AdamW", extra)
        if extra
        else saved(tmp_path / "a", "SGD", momentum=0.9)
    )
    command(["checkpoint", "convert", str(source), "--to", "dcp", "-o", str(tmp_path / "b")])
    state: dict[str, Any] = {"step": None}
    keys = dcp.FileSystemReader(str(tmp_path / "b")).read_metadata().state_dict_metadata
    if expected is None:
        assert "step" not in keys
    else:
        dcp.load(state, checkpoint_id=str(tmp_path / "b"), no_dist=True)
        assert state["step"] == expected


def test_frozen_constants_are_no_ties(tmp_path: Path) -> None:
    """Both norms begin as ones, and a rate of 0 leaves them so."""
    hub = formats.read_checkpoint(saved(tmp_path / "a", "AdamW", frozen="1.weight", lr=0.0))
    assert not hub.ties and not hub.parameters["1.weight"].trained


SETS = {"words": {"b", "a"}, "frozen": frozenset({4})}
KEPT = {"seen": (1, (2, 3)), **SETS, "milestones": {30: 1, (1, 2): [5]}, "stagebridge x": 1}
"""Plain values that JSON does not have."""


@pytest.mark.parametrize("to", ["native", "dcp", "deepspeed", "universal", "megatron"])
def test_plain_values_of_a_script_come_back_as_they_were(tmp_path: Path, to: str) -> None:
    """Milestones of a schedule, say, which a scheduler would not find under strings."""
    found, left = as_plain(KEPT, "client")
    assert found == KEPT and not left and as_plain({"a": (nn.Linear(1, 1),)}, "client")[1]
    source = saved(
        tmp_path / "a",
        "AdamW",
        {f"own {key}": value for key, value in KEPT.items() if key != "milestones"},
    )
    hub = replace(formats.read_checkpoint(source), client=KEPT)
    files = formats.plan_files(formats.format_of_name(to), hub, interface.Wanted())
    write_checkpoint(files, tmp_path / to, (), lambda count, fresh: None)
    back = formats.read_checkpoint(tmp_path / to).client
    assert {key: back[key] for key in KEPT} == KEPT
    assert {key: type(back[key]) for key in KEPT} == {
        key: type(value) for key, value in KEPT.items()
    }


def test_the_engine_keeps_plain_values_of_a_script(tmp_path: Path) -> None:
    plan = Plan.of({"optimizer.name": "adamw"})
    initialize(small(), plan, lambda output, targets: output.sum()).save_checkpoint(
        tmp_path, client_state=KEPT
    )
    client = initialize(small(), plan, lambda output, targets: output.sum()).load_checkpoint(
        tmp_path
    )[1]
    assert client == KEPT and isinstance(client["seen"], tuple)
    assert command(["checkpoint", "inspect", str(tmp_path), "--json"]) == 0


@pytest.mark.parametrize(
    ("option", "to"),
    [(("--ranks", "2"), "native"), (("--level", "1"), "dcp"), (("--level", "0"), "deepspeed")],
    ids=str,
)
def test_options_that_the_format_does_not_take_are_refused(
    tmp_path: Path, option: tuple[str, ...], to: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = saved(tmp_path / "a", "AdamW")
    assert (
        command(
            ["checkpoint", "convert", str(source), "--to", to, *option, "-o", str(tmp_path / "b")]
        )
        == 1
    )
    assert option[0] in capsys.readouterr().err and not (tmp_path / "b").exists()


def test_an_output_within_its_source_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = saved(tmp_path / "a", "AdamW")
    assert (
        command(["checkpoint", "convert", str(source), "--to", "native", "-o", str(source / "b")])
        == 1
    )
    assert "lies inside" in capsys.readouterr().err and not (source / "b").exists()


def test_a_folder_above_a_checkpoint_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path / "run" / "step3", "AdamW")
    (tmp_path / "run" / "latest").write_text("step4")
    assert command(["checkpoint", "inspect", str(tmp_path / "run")]) == 1
    error = capsys.readouterr().err
    assert "the file latest leads to no checkpoint" in error and "'step3'" in error


def test_names_of_no_megatron_model_are_named(tmp_path: Path) -> None:
    source = saved(tmp_path / "a", "AdamW")
    assert (
        command(
            [
                "checkpoint",
                "convert",
                str(source),
                "--to",
                "megatron",
                "-o",
                str(tmp_path / "b"),
                "--json",
            ]
        )
        == 2
    )


@pytest.mark.parametrize(
    ("one", "other", "key"),
    [
        ({"weight_decay": 0.1}, {"weight_decay": 0.2}, "weight_decay of 0.weight"),
        ({"betas": (0.9, 0.9)}, {"betas": (0.9, 0.8)}, "betas of 0.weight"),
        ({"extra": {"epoch": 1}}, {"extra": {"epoch": 2}}, "client.epoch"),
        ({"frozen": "3.bias"}, {}, "trained of 3.bias"),
    ],
    ids=str,
)
def test_diff_compares_what_optimizers_do(
    tmp_path: Path,
    one: dict[str, Any],
    other: dict[str, Any],
    key: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    first, second = (
        saved(tmp_path / name, "AdamW", **values) for name, values in (("a", one), ("b", other))
    )
    assert command(["checkpoint", "diff", str(first), str(second)]) == 2
    assert f"{key}:" in capsys.readouterr().out
