"""Checkpoints of the tools that people train with: all that is in them is read, by the names of the model."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tool_folders import (
    GPT2,
    LLAMA,
    MAKERS,
    STEPS,
    TIED,
    TrainedRun,
    file_of,
    losses_of,
    run_of,
    trainer,
)
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from bridge.checkpoint import formats
from bridge.checkpoint.hub import Hub
from bridge.cli.app import app
from bridge.errors import SourceError
from bridge.report.exit_codes import Exit

CONFIGS = {"llama": LLAMA, "tied": TIED, "gpt2": GPT2}


def tensors_of(hub: Hub) -> dict[tuple[str, str], Tensor]:
    return {
        (name, kind): held.whole()
        for name, kind, held in hub.tensors()
        if kind not in ("random", "buffer")
    }


def assert_equal(
    found: dict[tuple[str, str], Tensor], truth: dict[tuple[str, str], Tensor]
) -> None:
    """Fail unless both have the same tensors, bit by bit."""
    assert found.keys() == truth.keys()
    assert not [key for key, held in truth.items() if not torch.equal(found[key], held)]


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("tool", MAKERS)
def test_weights_and_moments_of_every_tool_are_read(tmp_path: Path, tool: str, config: str) -> None:
    run = run_of(CONFIGS[config])
    truth = run.truth
    hub = formats.read_checkpoint(MAKERS[tool](run, tmp_path))
    prefix = "model." if tool.startswith("lightning") and "in parts" not in tool else ""
    assert_equal(
        tensors_of(hub), {(prefix + name, kind): held for (name, kind), held in truth.items()}
    )
    assert hub.where.steps == STEPS
    decay = {name: group.settings["weight_decay"] for group in hub.groups for name in group.names}
    names = dict(run.model.named_parameters())
    assert decay == {prefix + name: 0.1 if held.ndim > 1 else 0.0 for name, held in names.items()}
    scheduled = any(word in tool for word in ("file", "torchtitan", "accelerate")) or prefix
    assert (hub.schedule == run.scheduler.state_dict()) is bool(scheduled)
    assert not [finding for finding in hub.findings if finding.path == "moments"]


def converted(source: Path, to: str, out: Path) -> Path:
    """Convert a checkpoint by the command. Returns the folder."""
    done = CliRunner().invoke(
        app, ["checkpoint", "convert", str(source), "--to", to, "-o", str(out)]
    )
    assert done.exit_code in (Exit.CLEAN, Exit.FINDINGS), done.output
    return out


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("between", ["dcp", "native", "deepspeed", "trainer"])
def test_trainer_goes_on_from_its_checkpoint_after_any_way(
    tmp_path: Path, between: str, config: str
) -> None:
    whole = trainer(tmp_path / "run", CONFIGS[config])
    whole.train()
    first = tmp_path / "run" / "checkpoint-2"
    other = converted(first, between, tmp_path / "other")
    back = converted(other, "trainer", tmp_path / "back")
    again = trainer(tmp_path / "again", CONFIGS[config])
    again.train(resume_from_checkpoint=str(back))
    found, truth = losses_of(again), losses_of(whole)
    assert {step: found[step] for step in (3, 4)} == {step: truth[step] for step in (3, 4)}


class Loaded:
    """A run of plain torch in the state in which torch's own loader of DCP leaves it."""

    def __init__(self, folder: Path, run: TrainedRun) -> None:
        weights, moments = get_state_dict(run.model, run.optimizer)
        state = {"model": weights, "optimizer": moments}
        dcp.load(state, checkpoint_id=str(folder))
        set_state_dict(
            run.model,
            run.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        schedule = {"lr_scheduler": run.scheduler.state_dict()}
        dcp.load(schedule, checkpoint_id=str(folder))
        run.scheduler.load_state_dict(schedule["lr_scheduler"])
        self.run = run


@pytest.mark.parametrize("tool", ["file", "lightning", "torchtitan", "accelerate"])
def test_torch_goes_on_from_the_checkpoint_of_every_tool(tmp_path: Path, tool: str) -> None:
    run = run_of(LLAMA)
    source = MAKERS[tool](run, tmp_path)
    root = ["--root", "state_dict.model"] if tool == "lightning" else []
    out = tmp_path / "out"
    done = CliRunner().invoke(
        app, ["checkpoint", "convert", str(source), "--to", "dcp", "-o", str(out), *root]
    )
    assert done.exit_code == Exit.CLEAN, done.output
    loaded = Loaded(out, run_of(LLAMA, seed=5)).run
    assert [run.step(step) for step in (2, 3)] == [loaded.step(step) for step in (2, 3)]


def test_one_of_several_models_is_chosen_by_its_keys(tmp_path: Path) -> None:
    model, other = run_of(LLAMA).model, run_of(LLAMA, seed=3).model
    state = {"gen": model.state_dict(), "ema": other.state_dict(), "epoch": 1}
    path = file_of(state, tmp_path / "models.pt")
    with pytest.raises(SourceError, match=r"several models: gen .*, ema .*--root"):
        formats.read_checkpoint(path)
    for root, held in (("gen", model), ("ema", other)):
        hub = formats.read_at(*formats.find_checkpoint(path, root=root))
        names = held.state_dict()
        assert_equal(tensors_of(hub), {(name, "weight"): names[name] for name in hub.parameters})
        (finding,) = [finding for finding in hub.findings if "of another model" in finding.message]
        assert finding.path == {"gen": "ema", "ema": "gen"}[root]
    with pytest.raises(SourceError, match="no tensor under 'disc'"):
        formats.read_at(*formats.find_checkpoint(path, root="disc"))


def test_a_usual_key_goes_before_the_averages_beside_it(tmp_path: Path) -> None:
    model, other = run_of(LLAMA).model, run_of(LLAMA, seed=3).model
    state = {"state_dict_ema": other.state_dict(), "state_dict": model.state_dict()}
    hub = formats.read_checkpoint(file_of(state, tmp_path / "averaged.pth"))
    names = model.state_dict()
    assert_equal(tensors_of(hub), {(name, "weight"): names[name] for name in hub.parameters})
    assert [finding.path for finding in hub.findings] == ["state_dict_ema"]


def test_numbers_of_an_optimizer_get_the_names_of_their_parameters_or_none(tmp_path: Path) -> None:
    """Models, groups and frozen parameters by chance: a moment is never given to another parameter."""
    random, read = Random(0), 0
    for turn in range(150):
        sizes = [random.choice([(3,), (4,), (3, 4), (4, 3)]) for _ in range(random.randint(1, 9))]
        weights = {
            f"part{at}.w": torch.rand(size).requires_grad_() for at, size in enumerate(sizes)
        }
        trained = [name for name in weights if random.random() < 0.9] or list(weights)
        rows: list[list[str]] = [[] for _ in range(random.randint(1, 3))]
        for name in trained:
            rows[random.randrange(len(rows))].append(name)
        rows = [row for row in rows if row]
        groups: Any = [{"params": [weights[name] for name in row]} for row in rows]
        optimizer = torch.optim.Adam(groups, lr=0.1)
        sum((weights[name] * torch.rand(())).sum() for name in trained).backward()  # type: ignore[union-attr]
        optimizer.step()
        state = {
            "model": {name: held.detach() for name, held in weights.items()},
            "optimizer": optimizer.state_dict(),
        }
        hub = formats.read_checkpoint(file_of(state, tmp_path / f"{turn}.pt"))
        unread = [finding for finding in hub.findings if finding.path == "moments"]
        assert bool(hub.moments) is not bool(unread)
        read += bool(hub.moments)
        for name, held in hub.parameters.items():
            for kind, moment in held.moments.items():
                assert torch.equal(moment.whole(), optimizer.state[weights[name]][kind])
        if hub.groups:
            assert [sorted(group.names) for group in hub.groups] == [sorted(row) for row in rows]
    assert 40 < read < 150


def cached(folder: Path, name: str, content: dict[str, bytes]) -> Path:
    """A snapshot in the cache of huggingface_hub (file_download.py: `_create_symlink`)."""
    place = folder / f"models--{name}" / "snapshots" / ("0" * 40)
    place.mkdir(parents=True)
    blobs = folder / f"models--{name}" / "blobs"
    blobs.mkdir()
    for file, text in content.items():
        blob = blobs / hashlib.sha256(text).hexdigest()
        blob.write_bytes(text)
        (place / file).symlink_to(os.path.relpath(blob, place))
    return place


def test_links_of_the_hub_cache_are_followed_to_their_own_blobs_alone(tmp_path: Path) -> None:
    model = run_of(LLAMA).model
    model.save_pretrained(str(tmp_path / "model"))
    content = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    place = cached(tmp_path, "org--one", content)
    hub = formats.read_checkpoint(place)
    assert_equal(
        tensors_of(hub), {(name, "weight"): held.data for name, held in model.named_parameters()}
    )
    out = converted(place, "safetensors", tmp_path / "out")
    assert AutoModelForCausalLM.from_pretrained(str(out)).config.hidden_size == LLAMA.hidden_size
    other = cached(tmp_path, "org--two", content)
    blob = (other / "model.safetensors").resolve()
    plain = tmp_path / "models--org--one" / "blobs" / "secret"
    plain.write_bytes(blob.read_bytes())
    (tmp_path / "models--org--one" / blob.name).write_bytes(blob.read_bytes())
    for target in (blob, plain, tmp_path / "models--org--one" / blob.name):
        (place / "model.safetensors").unlink()
        (place / "model.safetensors").symlink_to(target)
        with pytest.raises(SourceError, match="a link that leads to"):
            formats.read_checkpoint(place)
