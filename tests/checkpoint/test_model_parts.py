"""Checkpoints of DeepSpeed whose ranks share the model: stages of a pipeline, and tensor ranks of AutoTP, become one."""

from __future__ import annotations

import re
import shutil
from argparse import Namespace
from collections.abc import Mapping
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch

from bridge.checkpoint import formats
from bridge.cli import run as command
from bridge.errors import SourceError
from tests.checkpoint import checkpoints
from tests.engine.pool import Run

pytestmark = pytest.mark.usefixtures("foreign")
TRIED = ("stages that share words", "tensor ranks")
ENDS = {"0": "embedding", "4": "head", "tied_modules": ""}
"""What the first and the last layer of the pipeline are in the GPT."""


@pytest.fixture(scope="module")
def saved(
    tmp_path_factory: pytest.TempPathFactory, pools: dict[int, Any]
) -> Mapping[str, tuple[Path, Mapping[str, Any]]]:
    """For each layout a checkpoint, and the masters that its engine had."""
    from tests.engine.pool import Pool

    top, pool = tmp_path_factory.mktemp("parts"), pools.setdefault(2, Pool(2))
    return {
        name: (top / name, pool.run(checkpoints.in_parts, name, top / name)[0]) for name in TRIED
    }


def native(name: str) -> str:
    """The GPT's own name of a parameter: a pipeline numbers its layers, and names what they share."""
    first, _, rest = name.partition(".")
    if first not in ENDS and not first.isdigit():
        return name
    if name == f"4.{rest}" and "." not in rest:
        return f"head.norm.{rest}"
    return f"{ENDS.get(first, f'block{int(first) - 1}' if first.isdigit() else '')}.{rest}".removeprefix(
        "."
    )


def universal(source: Path, target: Path) -> None:
    """What DeepSpeed itself makes of the parts."""
    from deepspeed.checkpoint import ds_to_universal

    options = {
        "num_extract_workers": 1,
        "num_merge_workers": 1,
        "keep_temp_folder": False,
        "strict": True,
    }
    with redirect_stdout(StringIO()):
        ds_to_universal.main(
            Namespace(
                input_folder=str(source),
                output_folder=str(target),
                inject_missing_state=True,
                **options,
            )
        )


@pytest.mark.parametrize("name", TRIED)
def test_parts_become_the_model_that_the_engine_had(
    saved: Mapping[str, Any], tmp_path: Path, name: str
) -> None:
    folder, masters = saved[name]
    hub = formats.read_checkpoint(folder)
    found = {native(own): held.best.whole() for own, held in hub.parameters.items()}
    assert found.keys() == masters.keys() and all(
        torch.equal(found[own], masters[own]) for own in masters
    )
    assert (hub.where.steps, hub.where.samples, hub.client) == (2, 8, {"epoch": 3})
    universal(folder / "global_step2", tmp_path / "whole")
    for own, held in hub.parameters.items():
        for kind, tensor in {"fp32": held.best, **held.moments}.items():
            theirs = torch.load(
                tmp_path / "whole" / "zero" / own / f"{kind}.pt", weights_only=False
            )
            whole = theirs["param"] if isinstance(theirs, dict) else theirs
            assert torch.equal(tensor.whole().view(-1), whole.view(-1)), (own, kind)


@pytest.mark.parametrize("name", TRIED)
def test_parts_are_converted_with_every_bit(
    saved: Mapping[str, Any], tmp_path: Path, name: str
) -> None:
    folder = saved[name][0]
    with redirect_stdout(StringIO()) as out:
        assert (
            command(
                [
                    "checkpoint",
                    "convert",
                    str(folder),
                    "--to",
                    "universal",
                    "-o",
                    str(tmp_path / "out"),
                ]
            )
            == 2
        )
        assert "schedule" in out.getvalue()  # of which the source has none
        assert command(["checkpoint", "diff", str(folder), str(tmp_path / "out")]) == 0, (
            out.getvalue()
        )


DAMAGES = {
    "a part is missing": (r"mp_rank_00_model", None),
    "a layer is missing": (r"layer_02", None),
    "ranks are exchanged": (r"mp_rank_01_optim", r"mp_rank_00_optim"),
    "layers are exchanged": (r"layer_02", r"layer_03"),
}


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        (name, damage)
        for name in TRIED
        for damage in DAMAGES
        if "layer" not in damage or "stage" in name
    ],
)
def test_parts_that_do_not_belong_together_are_named(
    saved: Mapping[str, Any], tmp_path: Path, name: str, damage: str
) -> None:
    shutil.copytree(saved[name][0], tmp_path / "copy")
    first, second = DAMAGES[damage]
    files = sorted((tmp_path / "copy" / "global_step2").iterdir())
    there, other = (
        next(path for path in files if re.search(part or first, path.name))
        for part in (first, second)
    )
    if second is None:
        there.unlink()
    else:
        content = other.read_bytes()
        other.write_bytes(there.read_bytes())
        there.write_bytes(content)
    with pytest.raises(SourceError, match=r"global_step2.*(?:part|rank|layer|written as|no model)"):
        format, place = formats.find_checkpoint(tmp_path / "copy")
        formats.verify_checkpoint(format, place)
        formats.read_at(format, place)


def test_folders_of_automodel_are_read(run: Run, tmp_path: Path) -> None:
    """Model and optimizer in folders of their own, the latest of them by a link."""
    place = tmp_path / "run" / "epoch_0_step_1"
    place.mkdir(parents=True)
    run(2, checkpoints.automodel, place)
    (tmp_path / "run" / "LATEST").symlink_to(place.name)
    hub = formats.read_checkpoint(tmp_path / "run")
    whole, moments = torch.load(place.with_suffix(".pt"))
    assert hub.parameters.keys() == whole.keys() and hub.origin.format == "automodel"
    for name, held in hub.parameters.items():
        assert torch.equal(held.weight.whole(), whole[name]) and torch.equal(
            held.moments["exp_avg"].whole(), moments[name]
        )
    assert (
        sorted(group.settings["weight_decay"] for group in hub.groups) == [0.0, 0.1]
        and hub.where.steps == 1
    )
    assert (hub.schedule or {})["last_epoch"] == 1 and [
        finding.path for finding in hub.findings
    ] == ["rng"]
    (place / "model" / ".metadata").unlink()
    with pytest.raises(SourceError, match=r"an optimizer \(optim\) and no model"):
        formats.read_checkpoint(tmp_path / "run")
