"""Checkpoints of any format: read bit by bit as their own stacks do, written so that these go on from them, and never half."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import shutil
import signal
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from io import StringIO
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from bridge.checkpoint import formats, interface, lazy as lazy_tensors, writing
from bridge.checkpoint.hub import BESIDE, Hub
from bridge.cli import run as command
from bridge.errors import BridgeError, SourceError
from tests.checkpoint import checkpoints, mutated
from tests.checkpoint.checkpoints import Task
from tests.checkpoint.test_archives import Call
from tests.engine.pool import Run

pytestmark = pytest.mark.usefixtures("foreign")
STARTED = {
    "fp32 level 0": Task(precision="fp32", level=0),
    "fp16 level 0": Task(precision="fp16", level=0),
    "fp32 level 0, odd": Task(precision="fp32", level=0, kind="odd"),
    "fp16 level 0, odd": Task(precision="fp16", level=0, kind="odd"),
    "bf16 level 2, without frozen": Task(precision="bf16", level=2, kind="odd", excluded=True),
    "bf16 level 1": Task(precision="bf16", level=1, kind="gpt2"),
    "fp32 level 2": Task(precision="fp32", level=2),
    "bf16 level 2, odd": Task(precision="bf16", level=2, kind="odd"),
    "bf16 level 2, dealt out": Task(
        precision="bf16", matrices=True, zero={"round_robin_gradients": True}
    ),
    "fp16 level 3": Task(precision="fp16", level=3),
    "bf16 level 3, odd": Task(precision="bf16", level=3, kind="odd"),
}
"""Runs of DeepSpeed on two ranks."""
Made = Callable[[str], Path]


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory, pools: dict[int, Any]) -> Made:
    """The checkpoint of a run, which is made once."""
    from tests.engine.pool import Pool

    top, found = tmp_path_factory.mktemp("made"), dict[str, Path]()

    def make(name: str) -> Path:
        if name not in found:
            found[name] = top / name.replace(" ", "_")
            pools.setdefault(2, Pool(2)).run(
                checkpoints.deepspeed, replace(STARTED[name], save=found[name])
            )
        return found[name]

    return make


def converted(source: Path, to: str, output: Path, *more: str) -> tuple[int, str]:
    """What `checkpoint convert` ends with and says."""
    with redirect_stdout(StringIO()) as out:
        code = command(["checkpoint", "convert", str(source), "--to", to, "-o", str(output), *more])
    return code, out.getvalue()


def assert_equal(one: Path, other: Path) -> None:
    """Whether two checkpoints have the same bits, and are as far."""
    with redirect_stdout(StringIO()) as out:
        code = command(["checkpoint", "diff", str(one), str(other)])
    assert code == 0, out.getvalue()


def tensors(hub: Hub) -> dict[tuple[str, str], torch.Tensor]:
    return {(name, kind): held.whole() for name, kind, held in hub.tensors()}


# Reading


@pytest.mark.parametrize("name", [name for name, task in STARTED.items() if task.level])
def test_masters_are_those_of_zero_to_fp32(made: Made, name: str, tmp_path: Path) -> None:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    with redirect_stdout(StringIO()):
        known = get_fp32_state_dict_from_zero_checkpoint(str(made(name)))
    hub = formats.read_checkpoint(made(name))
    assert set(known) == {*hub.parameters, *hub.ties, *hub.buffers}
    for key, value in known.items():
        own = hub.ties.get(key, key)
        found = (
            hub.parameters[own].best.whole() if own in hub.parameters else hub.buffers[own].whole()
        )
        assert torch.equal(found.float(), value.float()), key
    converted(made(name), "bin", tmp_path / "bin", "--dtype", "fp32")
    written = torch.load(tmp_path / "bin" / "pytorch_model.bin")
    assert set(written) == set(known)  # tied names too
    assert all(torch.equal(written[key], value.float()) for key, value in known.items())


@pytest.mark.parametrize(
    "name", ["bf16 level 1", "fp32 level 2", "fp16 level 3", "bf16 level 2, odd"]
)
def test_moments_are_those_of_ds_to_universal(
    made: Made, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepspeed.checkpoint import ds_to_universal

    place = made(name) / "global_step3"
    options = {
        "num_extract_workers": 1,
        "num_merge_workers": 1,
        "keep_temp_folder": False,
        "strict": True,
    }
    target = tmp_path / "universal"
    with redirect_stdout(StringIO()):
        ds_to_universal.main(
            argparse.Namespace(
                input_folder=str(place),
                output_folder=str(target),
                inject_missing_state=STARTED[name].level < 3,
                **options,
            )
        )
    hub = formats.read_checkpoint(made(name))
    for key, held in hub.trainable_parameters.items():
        for kind, lazy in {"fp32": held.best, **held.moments}.items():
            known = torch.load(target / "zero" / key / f"{kind}.pt", weights_only=False)
            known = known if isinstance(known, torch.Tensor) else known["param"]
            assert torch.equal(lazy.whole().reshape(known.shape), known), (key, kind)
        assert held.step == 3
    assert_equal(made(name), target)


@pytest.mark.parametrize("name", ["fp32 level 0", "fp16 level 0"])
def test_a_run_without_sharding_is_read_by_place(made: Made, name: str) -> None:
    found = torch.load(
        made(name) / "global_step3" / "mp_rank_00_model_states.pt", weights_only=False
    )
    hub = formats.read_checkpoint(made(name))
    held = found["optimizer"].get("optimizer_state_dict", found["optimizer"])
    for number, (key, parameter) in enumerate(hub.parameters.items()):
        assert torch.equal(parameter.weight.whole(), found["module"][key])
        assert torch.equal(parameter.moments["exp_avg"].whole(), held["state"][number]["exp_avg"])
        assert torch.equal(
            parameter.best.whole().to(parameter.weight.whole().dtype), parameter.weight.whole()
        )


@pytest.mark.parametrize("name", ["fp32 level 0, odd", "fp16 level 0, odd"])
def test_what_is_frozen_without_sharding_is_told_by_shapes_and_masters(
    made: Made, name: str
) -> None:
    """No file says it: the optimizer has numbers, and of one parameter fewer than the model."""
    hub = formats.read_checkpoint(made(name))
    assert [name for name, held in hub.parameters.items() if not held.trained] == ["frozen"]
    assert all(
        held.moments["exp_avg"].shape == held.weight.shape
        for held in hub.trainable_parameters.values()
    )
    assert set(hub.groups[0].names) == set(hub.trainable_parameters)


def test_frozen_parameters_that_shapes_do_not_tell_are_no_guess(tmp_path: Path) -> None:
    """Of two matrices alike one is trained: without masters nothing says which; with them it is the one that they round to."""
    weights = {"a": torch.arange(4.0), "b": torch.arange(4.0) + 8}
    for masters, dtype in (
        ({}, torch.float32),
        ({"fp32_groups_flat": [torch.arange(4.0) + 8]}, torch.float16),
    ):
        state = {
            "state": {0: {"exp_avg": torch.ones(4), "step": 1}},
            "param_groups": [{"lr": 0.1, "params": [0]}],
        }
        module = {name: weight.to(dtype) for name, weight in weights.items()}
        found = {
            "module": module,
            "optimizer": {"optimizer_state_dict": state, **masters},
            "shared_params": {},
        }
        folder = tmp_path / str(dtype)
        folder.mkdir()
        torch.save(found, folder / "mp_rank_00_model_states.pt")
        if masters:
            assert [
                name
                for name, held in formats.read_checkpoint(folder).parameters.items()
                if held.trained
            ] == ["b"]
        else:
            with pytest.raises(
                SourceError, match="1 of 2 parameters are frozen, and the shapes do not show which"
            ):
                formats.read_checkpoint(folder)


def test_frozen_parameters_that_were_left_out_are_told(made: Made, tmp_path: Path) -> None:
    source = made("bf16 level 2, without frozen")
    hub = formats.read_checkpoint(source)
    assert "frozen" not in hub.parameters and [finding.path for finding in hub.findings] == [
        "frozen"
    ]
    code, said = converted(source, "safetensors", tmp_path / "out")
    assert code == 2 and "frozen: saved with exclude_frozen_parameters" in said
    assert not [
        finding
        for finding in formats.read_checkpoint(made("bf16 level 2, odd")).findings
        if finding.path == "frozen"
    ]


def test_transformers_opens_the_weights_of_a_plain_export(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without moments in the source none are lost; config, generation config and tokenizer come along, and are named."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 64,
    }
    model, source = (
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)),
        tmp_path / "export" / "weights",
    )
    source.mkdir(parents=True)
    torch.save(
        {"module": model.state_dict(), "shared_params": {}, "optimizer": None},
        source / "mp_rank_00_model_states.pt",
    )
    code, said = converted(source, "safetensors", tmp_path / "bare")
    assert (
        code == 0
        and "moments" not in said
        and "no config.json lies next to the source" in capsys.readouterr().err
    )
    model.config.save_pretrained(source.parent)
    transformers.GenerationConfig(max_new_tokens=7).save_pretrained(source.parent)
    (source.parent / "tokenizer.json").write_text("{}")
    (source.parent / "optimizer.pt").write_text("not copied")
    code, said = converted(source, "safetensors", tmp_path / "out")
    assert (
        code == 0
        and f"copied from {source.parent}: config.json, generation_config.json, tokenizer.json\n"
        in said
    )
    loaded, told = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not any(told.values()) and loaded.generation_config.max_new_tokens == 7
    assert all(
        torch.equal(one, loaded.state_dict()[name]) for name, one in model.state_dict().items()
    )
    given = ("--config", str(source.parent / "config.json"))
    assert (
        converted(source, "bin", tmp_path / "bin", *given)[0] == 0
        and (tmp_path / "bin" / "tokenizer.json").is_file()
    )
    (source.parent / "config.json").write_text('{"zero_optimization": {"stage": 1}}')
    assert (
        converted(source, "safetensors", tmp_path / "other")[0] in (0, 1)
        and not (tmp_path / "other" / "config.json").exists()
    )


def test_the_run_is_read_beside_its_tensors(made: Made) -> None:
    hub = formats.read_checkpoint(made("fp16 level 3"))
    assert (hub.where.steps, hub.where.skipped, hub.where.samples) == (3, 0, 12)
    assert (hub.origin.format, hub.origin.release, hub.origin.layout) == (
        "deepspeed",
        "0.19.8",
        {"zero": 3, "ranks": 2},
    )
    assert hub.scale is not None and (
        hub.scale.value,
        hub.scale.window,
        hub.scale.good,
        hub.scale.tolerated,
    ) == (256, 4, 3, 1)
    assert (
        hub.schedule == {"last_batch_iteration": 2}
        and hub.client == {"epoch": 3}
        and hub.weight_dtype == "F16"
    )
    assert [len(group.names) for group in hub.groups] == [21] and hub.groups[0].settings[
        "betas"
    ] == [0.9, 0.95]


# Writing


@pytest.mark.parametrize(
    "name", [name for name, task in STARTED.items() if task.level and not task.excluded]
)
def test_a_checkpoint_comes_back_as_deepspeed_wrote_it(
    made: Made, name: str, tmp_path: Path
) -> None:
    """By way of the native format, every value that DeepSpeed reads: of each file all that torch loads, but for padding."""
    assert converted(made(name), "native", tmp_path / "native")[0] == 0
    assert_equal(made(name), tmp_path / "native")
    level = str(STARTED[name].level)
    code, _ = converted(
        tmp_path / "native", "deepspeed", tmp_path / "back", "--level", level, "--ranks", "2"
    )
    assert code == 0
    files = sorted(path.name for path in (made(name) / "global_step3").iterdir())
    assert files == sorted(
        path.name
        for path in (tmp_path / "back" / "global_step3").iterdir()
        if path.name != "SHA256SUMS"
    )
    for file in files:
        one, other = (
            torch.load(place / "global_step3" / file, weights_only=False, map_location="cpu")
            for place in (made(name), tmp_path / "back")
        )
        assert_alike(one, other, f"{'dealt ' if STARTED[name].zero else ''}{file}")
    assert (tmp_path / "back" / "latest").read_text() == "global_step3"


def assert_alike(one: Any, other: Any, at: str) -> None:
    """Whether two loaded values are the same, objects by their attributes."""
    if "dealt" in at and at.endswith("/param_slice_mappings"):
        return  # DeepSpeed writes the places that parameters would have if they were not dealt out
    if "/fp32_flat_groups/" in at or "/frozen_param_fragments/" in at:
        padding = other == 0  # DeepSpeed leaves there what was in memory
        assert one.dtype == other.dtype and one.shape == other.shape and padding.sum() < 8, at
        assert torch.equal(one[~padding], other[~padding]), at
    elif isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other), at
    elif isinstance(one, Mapping):
        order = sorted if at.endswith("/module") else list
        assert type(one) is type(other) and order(one) == order(other), (
            f"{at}: {list(one)} {list(other)}"
        )
        for key in one:
            assert_alike(one[key], other[key], f"{at}/{key}")
    elif isinstance(one, list | tuple):
        assert type(one) is type(other) and len(one) == len(other), at
        for number, (left, right) in enumerate(zip(one, other, strict=True)):
            assert_alike(left, right, f"{at}/{number}")
    elif hasattr(one, "__dict__") and type(one).__module__.startswith("deepspeed"):
        assert type(one) is type(other), at
        assert_alike(vars(one), vars(other), at) if not hasattr(one, "value") else assert_alike(
            one.value, other.value, at
        )
    else:
        assert one == other and isinstance(one, bool) == isinstance(other, bool), (
            f"{at}: {one} {other}"
        )


@pytest.mark.parametrize(
    "through",
    [
        "native",
        "deepspeed 1 on 3",
        "deepspeed 2 on 1",
        "deepspeed 3 on 4",
        "universal",
        "safetensors",
        "bin",
    ],
)
@pytest.mark.parametrize("name", ["bf16 level 2, odd", "fp16 level 3"])
def test_every_format_gives_back_what_it_can_hold(
    made: Made, name: str, through: str, tmp_path: Path
) -> None:
    to, *layout = through.split()
    options = ["--level", layout[0], "--ranks", layout[2]] if layout else []
    weights, less = (
        to in ("safetensors", "bin"),
        to == "dcp" or (to == "universal" and "odd" in name),
    )
    code, said = converted(
        made(name), to, tmp_path / "there", *options, *(["--dtype", "fp32"] if weights else [])
    )
    assert code == (2 if weights or less else 0), said
    if not weights and to != "dcp":
        assert_equal(made(name), tmp_path / "there")
    known, found = formats.read_checkpoint(made(name)), formats.read_checkpoint(tmp_path / "there")
    for key, held in known.parameters.items():
        assert torch.equal(held.best.whole().float(), found.parameters[key].best.whole()), key
    if weights:
        assert {line.split(": ")[1] for line in said.splitlines()[1:]} >= {
            "moments",
            "step",
            "schedule",
        }


def test_the_next_losses_are_those_of_an_unbroken_run(run: Run, tmp_path: Path) -> None:
    """Five steps on DeepSpeed, five on the native engine on another layout, five on DeepSpeed again; beside fifteen."""
    task = Task(precision="fp32", level=3)
    unbroken = run(2, checkpoints.deepspeed, replace(task, last=15))[0]
    run(2, checkpoints.deepspeed, replace(task, last=5, save=tmp_path / "one"))
    assert converted(tmp_path / "one", "native", tmp_path / "two")[0] == 0
    middle = replace(
        task, level=1, first=5, last=10, load=tmp_path / "two", save=tmp_path / "three"
    )
    found = run(1, checkpoints.native, middle)[0]
    assert found == pytest.approx(unbroken[5:10], abs=1e-6)
    code, said = converted(
        tmp_path / "three", "deepspeed", tmp_path / "four", "--level", "2", "--ranks", "2"
    )
    assert code == 2 and "random" in said
    last = run(
        2, checkpoints.deepspeed, replace(task, level=2, first=10, last=15, load=tmp_path / "four")
    )[0]
    assert last == pytest.approx(unbroken[10:], abs=1e-6)
    converted(tmp_path / "three", "universal", tmp_path / "five")
    for level in (1, 3):
        rest = replace(task, level=level, first=10, last=15, load=tmp_path / "five", universal=True)
        assert run(2, checkpoints.deepspeed, rest)[0] == pytest.approx(unbroken[10:], abs=1e-6)


def test_parameters_that_were_dealt_out_go_on(run: Run, tmp_path: Path) -> None:
    """From the files of DeepSpeed's round_robin_gradients to one rank of the native engine, and back to two of DeepSpeed."""
    task = Task(precision="fp32", matrices=True, zero={"round_robin_gradients": True})
    unbroken = run(2, checkpoints.deepspeed, replace(task, last=7, save=None))[0]
    run(2, checkpoints.deepspeed, replace(task, save=tmp_path / "a"))
    assert [len(group.names) for group in formats.read_checkpoint(tmp_path / "a").groups] == [16, 5]
    converted(tmp_path / "a", "native", tmp_path / "b")
    found = run(
        1,
        checkpoints.native,
        replace(task, zero={}, first=3, last=5, load=tmp_path / "b", save=tmp_path / "c"),
    )[0]
    assert found == pytest.approx(unbroken[3:5], abs=1e-6)
    converted(tmp_path / "b", "deepspeed", tmp_path / "d", "--level", "2", "--ranks", "2")
    found = run(2, checkpoints.deepspeed, replace(task, first=3, last=7, load=tmp_path / "d"))[0]
    assert found == pytest.approx(unbroken[3:], abs=1e-6)


def test_a_run_moves_to_fully_shard_and_back(run: Run, tmp_path: Path) -> None:
    """Five steps on DeepSpeed, five on torch's fully_shard, five on DeepSpeed again; beside fifteen."""
    task = Task(precision="fp32", level=2)
    unbroken = run(2, checkpoints.deepspeed, replace(task, last=15))[0]
    run(2, checkpoints.deepspeed, replace(task, last=5, save=tmp_path / "one"))
    code, said = converted(tmp_path / "one", "dcp", tmp_path / "two")
    assert code == 2 and "schedule" in said
    middle = replace(task, first=5, last=10, load=tmp_path / "two", save=tmp_path / "three")
    assert run(2, checkpoints.fsdp, middle)[0] == pytest.approx(unbroken[5:10], abs=1e-6)
    for to, options, level in (
        ("deepspeed", ("--level", "1", "--ranks", "2"), 1),
        ("universal", (), 3),
    ):
        converted(tmp_path / "three", to, tmp_path / to, *options)
        last = replace(
            task, level=level, first=10, last=15, load=tmp_path / to, universal=to == "universal"
        )
        assert run(2, checkpoints.deepspeed, last)[0] == pytest.approx(unbroken[10:], abs=1e-6)
    assert converted(tmp_path / "three", "native", tmp_path / "native")[0] == 0
    assert_equal(tmp_path / "three", tmp_path / "native")


def test_the_loss_scale_goes_on(run: Run, tmp_path: Path) -> None:
    """In fp16 the scale doubles every fourth step: the same steps on another level give the same losses, bit by bit."""
    task = Task(precision="fp16", level=2)
    unbroken = run(2, checkpoints.deepspeed, replace(task, last=8, save=tmp_path / "all"))[0]
    run(2, checkpoints.deepspeed, replace(task, last=5, save=tmp_path / "one"))
    converted(tmp_path / "one", "native", tmp_path / "two")
    converted(tmp_path / "two", "deepspeed", tmp_path / "three", "--level", "3", "--ranks", "2")
    rest = replace(task, level=3, first=5, last=8, load=tmp_path / "three", save=tmp_path / "four")
    found = run(2, checkpoints.deepspeed, rest)[0]
    assert found[:, 0].tolist() == unbroken[5:, 0].tolist() and found == pytest.approx(
        unbroken[5:], rel=1e-3
    )
    scales = [formats.read_checkpoint(tmp_path / name).scale for name in ("all", "four")]
    assert (
        scales[0] == scales[1]
        and scales[0] is not None
        and (scales[0].value, scales[0].good) == (512, 4)
    )


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_what_transformers_saves_is_read_and_what_is_written_it_loads(
    kind: str, tmp_path: Path
) -> None:
    model = checkpoints.model_of(kind)
    known = dict(model.named_parameters())
    for name, options in {"one": {}, "many": {"max_shard_size": "4KB"}}.items():
        model.save_pretrained(tmp_path / name, **options)
        hub = formats.read_checkpoint(tmp_path / name)
        assert {key: tuple(value.shape) for key, value in known.items()} == {
            k: v.weight.shape for k, v in hub.parameters.items()
        }
        assert all(
            torch.equal(hub.parameters[key].weight.whole(), value) for key, value in known.items()
        )
    for number, (to, options) in enumerate(
        (("safetensors", ()), ("bin", ("--shard-size", "0.000004")))
    ):
        code, _ = converted(tmp_path / "many", to, tmp_path / f"out{number}", *options)
        assert code == 0
        assert_equal(tmp_path / "one", tmp_path / f"out{number}")
        shutil.copy(tmp_path / "one" / "config.json", tmp_path / f"out{number}")
        loaded = type(model).from_pretrained(tmp_path / f"out{number}")
        assert all(torch.equal(value, known[key]) for key, value in loaded.named_parameters())


def test_a_group_order_that_is_not_known_is_refused(tmp_path: Path) -> None:
    checkpoints.model_of("llama").save_pretrained(tmp_path / "model")
    with redirect_stdout(StringIO()):
        assert (
            command(
                [
                    "checkpoint",
                    "convert",
                    str(tmp_path / "model"),
                    "--to",
                    "deepspeed",
                    "-o",
                    str(tmp_path / "out"),
                ]
            )
            == 1
        )
    assert not (tmp_path / "out").exists()


def test_parts_that_torch_wrote_make_its_tensors(run: Run, tmp_path: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    run(2, checkpoints.fsdp, Task(kind="odd", save=tmp_path / "made"))
    dcp_to_torch_save(tmp_path / "made", tmp_path / "whole.pt")
    known, hub = (
        torch.load(tmp_path / "whole.pt", weights_only=False),
        formats.read_checkpoint(tmp_path / "made"),
    )
    assert (hub.ties, list(hub.buffers), list(hub.trainable_parameters)) == (
        {"head.weight": "tokens.weight"},
        ["seen"],
        ["scale", "tokens.weight", "mixed.weight", "mixed.bias"],
    )
    for name, held in hub.parameters.items():
        assert torch.equal(held.weight.whole(), known["model"][name]), name
        for kind, moment in held.moments.items():
            assert torch.equal(moment.whole(), known["optimizer"]["state"][name][kind]), name
    assert (hub.where.steps, hub.client) == (3, {"epoch": 3})
    assert converted(tmp_path / "made", "dcp", tmp_path / "again")[0] == 0
    dcp_to_torch_save(tmp_path / "again", tmp_path / "again.pt")
    again = torch.load(tmp_path / "again.pt", weights_only=False)
    assert set(again) == {*known, BESIDE}
    for part in ("model", "optimizer"):
        for key in known[part]:
            (assert_alike if part == "model" else assert_same_rows)(
                known[part][key], again[part][key], key
            )


def assert_same_rows(one: Any, other: Any, at: str) -> None:
    if at == "state":
        assert set(one) == set(other)
        for name in one:
            assert set(one[name]) == set(other[name]) and all(
                torch.equal(one[name][kind], other[name][kind]) for kind in one[name]
            )
    else:
        assert [dict(sorted(row.items())) for row in one] == [
            dict(sorted(row.items())) for row in other
        ]


METADATA_FLAWS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a part is missing": (lambda place: (place / "__1_0.distcp").unlink(), "__1_0.distcp"),
    "a part is cut short": (
        lambda place: os.truncate(place / "__0_0.distcp", 4000),
        "__0_0.distcp",
    ),
    "parts are swapped": (
        lambda place: shutil.copy(place / "__0_0.distcp", place / "__1_0.distcp"),
        "__1_0.distcp",
    ),
    "a payload": (
        lambda place: (place / ".metadata").write_bytes(pickle.dumps(Call(os.system, "touch x"))),
        "posix.system",
    ),
    "no list": (
        lambda place: (place / ".metadata").write_bytes(pickle.dumps({"a": 1})),
        ".metadata",
    ),
}


@pytest.mark.parametrize("flaw", METADATA_FLAWS)
def test_a_flaw_of_torchs_checkpoint_names_the_file(run: Run, tmp_path: Path, flaw: str) -> None:
    run(2, checkpoints.fsdp, Task(save=tmp_path / "spoiled", last=1))
    spoil, said = METADATA_FLAWS[flaw]
    spoil(tmp_path / "spoiled")
    with pytest.raises(SourceError) as caught:
        hub = formats.read_checkpoint(tmp_path / "spoiled")
        assert all(held.whole() is not None for _, _, held in hub.tensors())
    assert said in str(caught.value), caught.value


# Damage


def spoiled(made: Made, tmp_path: Path, name: str = "bf16 level 1") -> Path:
    """A copy of a checkpoint that a test may change."""
    shutil.copytree(made(name), tmp_path / "spoiled")
    return tmp_path / "spoiled" / "global_step3"


FIRST, SECOND = (f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2))
MODEL = "mp_rank_00_model_states.pt"


def swap(place: Path) -> None:
    (place / FIRST).rename(place / "x")
    (place / SECOND).rename(place / FIRST)
    (place / "x").rename(place / SECOND)


def resaved(place: Path, change: Callable[[Any], None], file: str = SECOND) -> None:
    found = torch.load(place / file, weights_only=False)
    change(found)
    torch.save(found, place / file)


def other_run(found: Any) -> None:
    found["ds_config"]["seed"] = 7


def other_step(found: Any) -> None:
    found["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["step"] += 1


def shorter(found: Any) -> None:
    groups = found["optimizer_state_dict"]["single_partition_of_fp32_groups"]
    groups[0] = groups[0][:-1].clone()


def doubled(place: Path) -> None:
    resaved(place, lambda found: None)
    shutil.copy(place / FIRST, place / FIRST.replace("bf16_", ""))


def turned(found: Any) -> None:
    rows = found["optimizer_state_dict"]["param_slice_mappings"][0]
    for name in reversed(list(rows)):
        rows.move_to_end(name)


FLAWS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a rank is missing": (lambda place: (place / FIRST).unlink(), "of rank 0"),
    "the last rank is missing": (lambda place: (place / SECOND).unlink(), "of 1 ranks, expected 2"),
    "ranks are swapped": (swap, FIRST),
    "a file is cut short": (lambda place: os.truncate(place / SECOND, 3000), SECOND),
    "a file is empty": (lambda place: os.truncate(place / MODEL, 0), MODEL),
    "a rank is there twice": (doubled, FIRST.replace("bf16_", "")),
    "a file of another run": (lambda place: resaved(place, other_run), SECOND),
    "a file of another step": (lambda place: resaved(place, other_step), SECOND),
    "a flat group is shorter": (lambda place: resaved(place, shorter), SECOND),
    "parameters stand in another order": (lambda place: resaved(place, turned), SECOND),
    "no model states": (
        lambda place: (place / MODEL).rename(place / "layer_00-model_00-model_states.pt"),
        "layers of a pipeline",
    ),
    "a tensor rank": (
        lambda place: shutil.copy(place / MODEL, place / "mp_rank_01_model_states.pt"),
        "2 parts of model states",
    ),
    "it is no checkpoint": (
        lambda place: resaved(place, lambda found: found.pop("module"), MODEL),
        "lacks 'module'",
    ),
    "a payload": (
        lambda place: resaved(
            place, lambda found: found.update(x=Call(os.system, "touch x")), MODEL
        ),
        "posix.system",
    ),
    "a payload of a shard": (
        lambda place: resaved(place, lambda found: found.update(x=Call(eval, "1"))),
        "eval",
    ),
}


@pytest.mark.parametrize("flaw", FLAWS)
def test_a_flaw_is_an_error_that_names_the_file(made: Made, tmp_path: Path, flaw: str) -> None:
    place = spoiled(made, tmp_path)
    spoil, said = FLAWS[flaw]
    spoil(place)
    with pytest.raises(BridgeError) as caught:
        formats.read_checkpoint(place.parent)
    assert said in str(caught.value), caught.value
    with redirect_stdout(StringIO()):
        assert (
            command(
                [
                    "checkpoint",
                    "convert",
                    str(place.parent),
                    "--to",
                    "native",
                    "-o",
                    str(tmp_path / "out"),
                ]
            )
            == 1
        )
    assert {path.name for path in tmp_path.iterdir()} == {"spoiled"}


def test_a_link_and_a_path_lead_nowhere(made: Made, tmp_path: Path) -> None:
    place = spoiled(made, tmp_path)
    (tmp_path / "elsewhere").mkdir()
    (place / SECOND).rename(tmp_path / "elsewhere" / SECOND)
    (place / SECOND).symlink_to(tmp_path / "elsewhere" / SECOND)
    with pytest.raises(SourceError, match="a link that leads to"):
        formats.read_checkpoint(place.parent)
    for name in ("../spoiled/global_step3", "/etc", ".."):
        (place.parent / "latest").write_text(name)
        with pytest.raises(SourceError, match="expected a plain name"):
            formats.read_checkpoint(place.parent)
    index = {"weight_map": {"a": "../model.safetensors"}}
    (tmp_path / "elsewhere" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(SourceError, match="expected a plain name"):
        formats.read_checkpoint(tmp_path / "elsewhere")


@pytest.mark.parametrize("name", ["fp16 level 0", "bf16 level 1", "bf16 level 3, odd"])
def test_a_changed_folder_is_an_error_or_a_whole_checkpoint(
    made: Made, tmp_path: Path, name: str
) -> None:
    """Rounds by hand: python -m tests.checkpoint.mutated FOLDER --count N."""
    found = [mutated.tried(made(name), number, tmp_path) for number in range(40)]
    assert set(found) == {"accepted", "SourceError"} and not list(tmp_path.iterdir())


def test_a_changed_element_is_found_by_its_checksum(made: Made, tmp_path: Path) -> None:
    place = spoiled(made, tmp_path)
    content = bytearray((place / SECOND).read_bytes())
    content[len(content) // 2] ^= 1
    (place / SECOND).write_bytes(content)
    with redirect_stdout(StringIO()):
        assert (
            command(
                [
                    "checkpoint",
                    "convert",
                    str(place.parent),
                    "--to",
                    "native",
                    "-o",
                    str(tmp_path / "out"),
                ]
            )
            == 1
        )
        assert command(["checkpoint", "inspect", str(place.parent), "--check"]) == 1


def contents(folder: Path) -> dict[Path, bytes]:
    return {
        path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


def ended(
    written: interface.PlannedFiles, target: Path, hub: Hub, after: int, processes: int
) -> None:
    """Write in a process that SIGKILL ends after so many bytes."""
    child = os.fork()
    if not child:
        left = [after]

        def moved(count: int, fresh: bool) -> None:
            left[0] -= count
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            writing.write_checkpoint(written, target, hub.origin.files, moved, processes)
        finally:
            os._exit(0)
    os.waitpid(child, 0)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_killed_conversion_goes_on_to_the_same_bytes(
    made: Made, tmp_path: Path, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one process or several, each of which notes what is certain of a file after 3,000 bytes."""
    monkeypatch.setattr(writing, "STAGE", 3000)
    monkeypatch.setattr(lazy_tensors, "STRIP", 1000)
    monkeypatch.setattr(writing, "STRIP", 1000)
    hub = formats.read_checkpoint(made("fp16 level 3"))
    written = formats.format_of_name("deepspeed").plan(hub, interface.Wanted(ranks=3, level=2))
    writing.write_checkpoint(
        written, tmp_path / "known", hub.origin.files, lambda count, fresh: None
    )
    total, random, found = sum(file.size for file in written.files), Random(3), 0
    known = contents(tmp_path / "known")
    for number in range(20):
        target = tmp_path / f"killed{number}"
        ended(written, target, hub, random.randrange(total), processes)
        assert not target.exists()
        again: list[tuple[int, bool]] = []
        writing.write_checkpoint(
            written,
            target,
            hub.origin.files,
            lambda *said, again=again: again.append(said),
            processes,
        )  # type: ignore[misc]
        assert contents(target) == known
        assert sum(count for count, _ in again) == total
        found += sum(count for count, fresh in again if not fresh)
    assert (
        not list(tmp_path.glob(".*")) and found > 5 * total
    )  # of what was written before, most was found again


def test_what_fails_in_one_of_several_processes_is_told(made: Made, tmp_path: Path) -> None:
    place = spoiled(made, tmp_path)
    hub = formats.read_checkpoint(place)
    written = formats.format_of_name("safetensors").plan(hub, interface.Wanted(shard=500))
    os.truncate(place / MODEL, 3000)
    with pytest.raises(SourceError, match="changed while it was read"):
        writing.write_checkpoint(
            written, tmp_path / "out", hub.origin.files, lambda count, fresh: None, 3
        )
    assert not (tmp_path / "out").exists()


def test_a_beginning_that_is_another_is_written_anew(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "STAGE", 3000)
    hub = formats.read_checkpoint(made("fp16 level 3"))
    written = formats.format_of_name("safetensors").plan(hub, interface.Wanted())
    writing.write_checkpoint(
        written, tmp_path / "known", hub.origin.files, lambda count, fresh: None
    )
    ended(written, tmp_path / "out", hub, sum(file.size for file in written.files) // 2, 1)
    (beside,) = (tmp_path / ".out.partial").glob("*.part")
    content = bytearray(beside.read_bytes())
    content[700] ^= 1
    beside.write_bytes(content)
    writing.write_checkpoint(written, tmp_path / "out", hub.origin.files, lambda count, fresh: None)
    assert_equal(tmp_path / "known", tmp_path / "out")


def test_what_is_there_is_not_written_over(made: Made, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert converted(made("fp32 level 2"), "native", tmp_path / "out")[0] == 1
    code, said = converted(made("fp32 level 2"), "native", tmp_path / "new", "--dry-run")
    row = next(line for line in said.splitlines() if "model.norm.weight  exp_avg_sq" in line)
    files = [f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2)]
    assert code == 0 and row in (
        f"  model.norm.weight  exp_avg_sq  16  F32  from {name}"
        for name in (*files, ", ".join(files))
    )
    assert not (tmp_path / "new").exists() and not list((tmp_path / "out").iterdir())


def test_a_disk_without_room_is_told_before(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        writing.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1)
    )  # type: ignore[attr-defined]
    code, _ = converted(made("fp32 level 2"), "native", tmp_path / "out")
    assert code == 1 and not list(tmp_path.iterdir())


@pytest.mark.parametrize("processes", [1, 2])
def test_a_disk_that_fills_says_what_is_left_and_how_to_go_on(
    made: Made,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    processes: int,
) -> None:
    whole = writing._fill_file

    def full(path: Path, *arguments: Any) -> str:
        if path.name == "state.json":
            raise OSError(28, "No space left on device", str(path))
        return whole(path, *arguments)

    monkeypatch.setattr(writing, "_fill_file", full)
    words = [
        "checkpoint",
        "convert",
        str(made("fp32 level 2")),
        "--to",
        "native",
        "-o",
        str(tmp_path / "out"),
    ]
    assert command([*words, "--processes", str(processes)]) == 1
    said = capsys.readouterr().err
    assert "No space left" in said and "repeat the command" in said
    assert ".out.partial keeps the finished part" in said
    assert [path.name for path in tmp_path.iterdir()] == [".out.partial"]
    monkeypatch.undo()
    assert command(words) == 0 and [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_source_that_fails_in_the_middle_leaves_nothing(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*arguments: Any) -> str:
        raise SourceError("the checkpoint changed while it was read")

    monkeypatch.setattr(writing, "_fill_file", fails)
    assert (
        command(
            [
                "checkpoint",
                "convert",
                str(made("fp32 level 2")),
                "--to",
                "native",
                "-o",
                str(tmp_path / "out"),
            ]
        )
        == 1
    )
    assert "while it was read" in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.parametrize("size", ["0", "-1", "nan", "inf"])
def test_a_size_of_files_that_is_none_is_refused(made: Made, tmp_path: Path, size: str) -> None:
    with redirect_stderr(StringIO()) as said:
        code, _ = converted(
            made("fp32 level 2"), "safetensors", tmp_path / "out", f"--shard-size={size}"
        )
    assert code == 1 and "--shard-size: found" in said.getvalue() and not list(tmp_path.iterdir())


@pytest.mark.parametrize("level", ["2", "3"])
def test_more_ranks_than_elements_are_refused_at_once(
    made: Made, tmp_path: Path, level: str
) -> None:
    hub = formats.read_checkpoint(made("fp32 level 2"))
    with pytest.raises(SourceError, match="found 16,384 ranks for only 4,912 trained elements"):
        formats.plan_files(
            formats.format_of_name("deepspeed"),
            hub,
            interface.Wanted(ranks=16384, level=int(level)),
        )


def test_groups_that_a_universal_checkpoint_does_not_know_stay_unknown(
    made: Made, tmp_path: Path
) -> None:
    """It has rows for any groups of the run that loads it; one group of all would have that run's others begin anew."""
    hub = replace(formats.read_checkpoint(made("fp32 level 2")), groups=(), settings={"lr": 0.5})
    for name in ("one", "two"):
        files = formats.plan_files(formats.format_of_name("universal"), hub, interface.Wanted())
        writing.write_checkpoint(files, tmp_path / name, (), lambda count, fresh: None)
        hub = formats.read_checkpoint(tmp_path / name)
        assert hub.groups == () and hub.settings["lr"] == 0.5
    rows = torch.load(next((tmp_path / "two").rglob("optimizer_state.pt")), weights_only=False)[
        "param_groups"
    ]
    assert len(rows) > 2 and {row["lr"] for row in rows} == {0.5}


def test_every_file_of_a_universal_checkpoint_counts(made: Made, tmp_path: Path) -> None:
    converted(made("fp32 level 2"), "universal", tmp_path / "out")
    place = tmp_path / "out" / "global_step3_universal"
    known = set(place.rglob("*.pt"))
    assert (
        set(formats.read_checkpoint(tmp_path / "out").origin.files) == known
        and len(known) == 3 + 21 * 4
    )
    for name in ("model.norm.weight", "lm_head.weight"):
        (place / "zero" / name / "fp32.pt").unlink()
    with pytest.raises(SourceError) as told:
        formats.read_checkpoint(tmp_path / "out")
    assert len(told.value.problems) == 2 and all(
        "fp32.pt: missing" in line for line in told.value.problems
    )


def test_files_are_held_against_their_digests(made: Made, tmp_path: Path) -> None:
    converted(made("fp32 level 2"), "safetensors", tmp_path / "out", "--shard-size", "0.000004")
    shards = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(shards) > 3 and all(one.name < other.name for one, other in pairwise(shards))
    assert command(["checkpoint", "inspect", str(tmp_path / "out"), "--check", "--json"]) == 0
    content = bytearray(shards[1].read_bytes())
    content[-1] ^= 1
    shards[1].write_bytes(content)
    assert command(["checkpoint", "inspect", str(tmp_path / "out"), "--check"]) == 1
    shards[2].unlink()
    with pytest.raises(SourceError, match=shards[2].name):
        formats.read_checkpoint(tmp_path / "out")


def pickled(folder: Path) -> list[tuple[Path, int]]:
    """Every pickle of a checkpoint: its file, and its number there."""
    found = []
    for path in sorted(folder.rglob("*")):
        if path.name == ".metadata":
            found.append((path, 0))
        elif path.suffix in (".pt", ".bin", ".distcp"):
            found += [
                (path, number) for number, _ in enumerate(mutated.archives(path.read_bytes()))
            ]
    return found


@pytest.mark.parametrize("form", ["fp16 level 3", "bf16 level 2, odd", "universal", "dcp", "bin"])
def test_a_payload_in_any_pickle_is_named_and_not_executed(
    made: Made, tmp_path: Path, form: str
) -> None:
    source = made(form) if form in STARTED else tmp_path / "source"
    if form not in STARTED:
        converted(made("bf16 level 2, odd"), form, source)
        for sums in source.rglob("SHA256SUMS"):
            sums.unlink()
    marker, places = tmp_path / mutated.MARKER, pickled(source)
    assert len(places) > {"bin": 0, "dcp": 10, "universal": 10}.get(form, 2)
    for number, (path, place) in enumerate(places):
        target = tmp_path / str(number)
        shutil.copytree(source, target)
        poison = target / path.relative_to(source)
        if not mutated.poisoned(poison, place, marker):
            continue
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()) as said:
            assert (
                command(
                    [
                        "checkpoint",
                        "convert",
                        str(target),
                        "--to",
                        "native",
                        "-o",
                        str(tmp_path / "out"),
                    ]
                )
                == 1
            )
        assert "posix.system" in said.getvalue() and poison.name in said.getvalue(), said.getvalue()
        assert not marker.exists() and not (tmp_path / "out").exists()
        shutil.rmtree(target)
    if form in STARTED:  # the payload is one: the stack's own loader executes it
        torch.load(poisoned_copy(source, tmp_path, marker), weights_only=False)
        assert marker.exists()


def poisoned_copy(source: Path, folder: Path, marker: Path) -> Path:
    path = next(source.rglob("*model_states.pt"))
    shutil.copy(path, folder / path.name)
    assert mutated.poisoned(folder / path.name, 0, marker)
    return folder / path.name


def test_a_shard_of_another_run_of_the_same_config_is_named(
    made: Made, run: Run, tmp_path: Path
) -> None:
    """As many steps, the same config: only the weights tell."""
    run(
        2,
        checkpoints.deepspeed,
        replace(STARTED["fp32 level 2"], first=7, last=10, save=tmp_path / "other"),
    )
    shutil.copytree(made("fp32 level 2"), tmp_path / "run")
    name = SECOND.replace("bf16_", "")
    shutil.copy(
        tmp_path / "other" / "global_step3" / name, tmp_path / "run" / "global_step3" / name
    )
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()) as said:
        assert (
            command(
                [
                    "checkpoint",
                    "convert",
                    str(tmp_path / "run"),
                    "--to",
                    "native",
                    "-o",
                    str(tmp_path / "out"),
                ]
            )
            == 1
        )
    assert (
        name in said.getvalue()
        and "the file belongs to another run or another step" in said.getvalue()
    )
