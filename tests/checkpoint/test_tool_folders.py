"""Checkpoints of the tools that people train with: all that is in them is read, by the names of the model."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import warnings
from argparse import Namespace
from contextlib import redirect_stderr
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.format_utils import torch_save_to_dcp
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen3MoeConfig

from bridge.checkpoint import formats, interface, model_facts
from bridge.checkpoint.hub import Hub
from bridge.checkpoint.model_facts import describe_config, rename_under
from bridge.checkpoint.writing import write_checkpoint
from bridge.cli import run as command
from bridge.errors import SourceError
from bridge.report.exit_codes import Exit
from bridge.stack import registry
from compat.megatron.checkpoint.run import groups_of
from tests.checkpoint.tool_folders import (
    GPT2,
    GROUPED,
    HEADS,
    LLAMA,
    MAKERS,
    SIZES,
    STEPS,
    TIED,
    Loaded,
    TrainedRun,
    file_of,
    losses_of,
    plain_file,
    run_of,
    save_by_transformers,
    save_sharded,
    trainer,
)

FLAGS = """--num-layers 2 --hidden-size 32 --num-attention-heads 4 --group-query-attention --num-query-groups 2
--ffn-hidden-size 48 --seq-length 16 --max-position-embeddings 32 --micro-batch-size 1 --swiglu --normalization RMSNorm
--norm-epsilon 1e-6 --position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights
--vocab-size 64 --make-vocab-size-divisible-by 1 --train-iters 4 --lr 1e-3 --tokenizer-type NullTokenizer"""
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


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_what_accelerate_saves_of_two_sharded_ranks_is_read(
    tmp_path: Path, run: Any, config: Any, kind: str
) -> None:
    truth, _ = run(2, save_sharded, config, tmp_path, kind)
    hub = formats.read_checkpoint(tmp_path)
    assert_equal(tensors_of(hub), truth)
    decay = {name: group.settings["weight_decay"] for group in hub.groups for name in group.names}
    assert decay == {
        name: 0.1 if len(held.weight.shape) > 1 else 0.0 for name, held in hub.parameters.items()
    }


def test_what_transformers_saves_of_two_sharded_ranks_is_read(tmp_path: Path, run: Any) -> None:
    truth, _ = run(2, save_by_transformers, tmp_path / "run")
    place, other = tmp_path / "run", tmp_path / "other"
    assert_equal(tensors_of(formats.read_checkpoint(place)), truth)
    shutil.copytree(place / "optimizer", other)  # both in one folder
    for shard in place.glob("shard-*"):
        shutil.copy(shard, other)
    assert_equal(tensors_of(formats.read_checkpoint(other)), truth)
    shutil.rmtree(place / "optimizer")
    hub = formats.read_checkpoint(place)
    assert hub.origin.format == "safetensors" and not hub.moments
    assert_equal(tensors_of(hub), {key: held for key, held in truth.items() if key[1] == "weight"})
    first, second = sorted(place.glob("shard-*"))
    first.unlink()
    with pytest.raises(SourceError, match="elements, but the tensor's shape"):
        formats.read_checkpoint(place)
    content = second.read_bytes()
    second.write_bytes(content.replace(b'"DCP_SHARDING_INFO"', b'"DCP_SHARDING_INFE"'))
    with pytest.raises(SourceError, match="expected its offsets"):
        formats.read_checkpoint(place)


@pytest.mark.parametrize("tool", ["file", "model"])
def test_inspect_says_where_a_checkpoint_can_go(tmp_path: Path, tool: str, capsys: Any) -> None:
    run = run_of(LLAMA)
    run.model.save_pretrained(str(tmp_path / "model"))
    source = plain_file(run, tmp_path) if tool == "file" else tmp_path / "model"
    capsys.readouterr()
    command(["checkpoint", "inspect", str(source), "--json"])
    rows = json.loads(capsys.readouterr().out)["targets"]
    refused = {row["to"] for row in rows if row["refused"]}
    assert refused == ({"megatron"} if tool == "file" else {"deepspeed"})
    lost = {row["to"] for row in rows if "moments" in row["lost"]}
    assert ("safetensors" in lost, "dcp" in lost) == (tool == "file", tool == "model")
    for row in rows:
        out = tmp_path / row["to"]
        code = command(["checkpoint", "convert", str(source), "--to", row["to"], "-o", str(out)])
        assert (code == Exit.ERROR) is (row["refused"] is not None)


def test_inspect_reads_the_arguments_of_a_run_once(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_of(LLAMA).model.save_pretrained(str(tmp_path))
    calls = []
    monkeypatch.setattr(model_facts, "config_of_record", calls.append)
    command(["checkpoint", "inspect", str(tmp_path)])
    assert len(calls) == 1 and "can be converted" in capsys.readouterr().out


@pytest.mark.parametrize("root", [(), ("model",)])
def test_a_tensor_without_a_name_is_a_tensor(tmp_path: Path, root: tuple[str, ...]) -> None:
    """torch's own checkpoints hold any key, so a name may be empty."""
    held = {"": torch.ones(3), "a": torch.zeros(2)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": held} if root else dict(held), checkpoint_id=str(tmp_path / "run"))
    found = formats.read_checkpoint(tmp_path / "run").parameters
    assert found.keys() == held.keys()
    assert all(torch.equal(found[name].weight.whole(), held[name]) for name in held)


def converted(source: Path, to: str, out: Path, *more: str) -> Path:
    """Convert a checkpoint by the command. Returns the folder."""
    code = command(["checkpoint", "convert", str(source), "--to", to, "-o", str(out), *more])
    assert code in (Exit.CLEAN, Exit.FINDINGS)
    return out


@pytest.mark.parametrize(
    ("other", "precise"), [("norm", True), ("norm", False), ("layers.1.mlp.down_proj", True)]
)
def test_each_weight_keeps_its_number_format_in_megatron_or_is_named(
    tmp_path: Path, other: str, precise: bool, capsys: Any
) -> None:
    one, rest = (torch.float32, torch.bfloat16)[:: 1 if precise else -1]
    model = run_of(LLAMA, steps=0).model
    tensors = {
        name: held.detach().to(one if other in name else rest)
        for name, held in model.named_parameters()
    }
    model.config.save_pretrained(str(tmp_path / "model"))
    save_file(tensors, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    out = converted(tmp_path / "model", "megatron", tmp_path / "megatron")
    said = "different numbers: weights: 1 weights in F32" in capsys.readouterr().out
    stacked = "layers.1" in other  # Megatron has this matrix of all layers in one tensor
    assert said is stacked
    found = load_file(converted(out, "safetensors", tmp_path / "back") / "model.safetensors")
    changed = {name for name, held in tensors.items() if not torch.equal(found[name], held)}
    changed |= {name for name, held in tensors.items() if found[name].dtype != held.dtype}
    assert changed == ({"model.layers.1.mlp.down_proj.weight"} if stacked else set())


WAYS = [
    *(
        (between, config, "adamw_torch")
        for between in ("dcp", "native", "deepspeed", "trainer")
        for config in CONFIGS
    ),
    *((between, "llama", "sgd") for between in ("dcp", "native", "trainer")),
]


@pytest.mark.parametrize(("between", "config", "optim"), WAYS)
def test_trainer_goes_on_from_its_checkpoint_after_any_way(
    tmp_path: Path, between: str, config: str, optim: str
) -> None:
    whole = trainer(tmp_path / "run", CONFIGS[config], optim=optim)
    whole.train()
    first = tmp_path / "run" / "checkpoint-2"
    other = converted(first, between, tmp_path / "other")
    back = converted(other, "trainer", tmp_path / "back")
    again = trainer(tmp_path / "again", CONFIGS[config], optim=optim)
    again.train(resume_from_checkpoint=str(back))
    found, truth = losses_of(again), losses_of(whole)
    assert {step: found[step] for step in (3, 4)} == {step: truth[step] for step in (3, 4)}


def test_trainer_goes_on_with_a_group_without_parameters(tmp_path: Path) -> None:
    """Trainer has two groups, of which one is empty where all that does not decay is frozen."""

    def frozen(name: str) -> Any:
        made = trainer(tmp_path / name, LLAMA)
        for weight in made.model.parameters():  # type: ignore[union-attr]
            weight.requires_grad = weight.ndim > 1
        return made

    whole, again = frozen("run"), frozen("again")
    whole.train()
    other = converted(tmp_path / "run" / "checkpoint-2", "dcp", tmp_path / "other")
    again.train(resume_from_checkpoint=str(converted(other, "trainer", tmp_path / "back")))
    found, truth = losses_of(again), losses_of(whole)
    assert {step: found[step] for step in (3, 4)} == {step: truth[step] for step in (3, 4)}


@pytest.mark.parametrize("tool", ["file", "accelerate"])
def test_trainer_goes_on_from_the_checkpoint_of_every_tool(tmp_path: Path, tool: str) -> None:
    """Of another tool, there is no state of Trainer but the step."""
    out = converted(MAKERS[tool](run_of(LLAMA), tmp_path), "trainer", tmp_path / "out")
    again = trainer(tmp_path / "again", LLAMA)
    again.train(resume_from_checkpoint=str(out))
    assert again.state.global_step == 4


@pytest.mark.parametrize("tool", ["file", "lightning", "torchtitan", "accelerate"])
def test_torch_goes_on_from_the_checkpoint_of_every_tool(tmp_path: Path, tool: str) -> None:
    run = run_of(LLAMA)
    source = MAKERS[tool](run, tmp_path)
    root = ["--root", "state_dict.model"] if tool == "lightning" else []
    out = converted(source, "dcp", tmp_path / "out", *root)
    loaded = Loaded(out, run_of(LLAMA, seed=5)).run
    assert [run.step(step) for step in (2, 3)] == [loaded.step(step) for step in (2, 3)]


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("tool", ["file", "torchtitan", "accelerate", "accelerate FSDP in parts"])
def test_accelerate_goes_on_from_the_checkpoint_of_every_tool(
    tmp_path: Path, tool: str, config: str
) -> None:
    run = run_of(CONFIGS[config])
    between = converted(MAKERS[tool](run, tmp_path), "native", tmp_path / "between")
    out = converted(between, "accelerate", tmp_path / "out")
    other = run_of(CONFIGS[config], seed=5)
    accelerator = Accelerator(cpu=True)
    parts = accelerator.prepare(other.model, other.optimizer, other.scheduler)
    accelerator.load_state(str(out))
    assert [run.step(step) for step in (2, 3)] == [other.step(step) for step in (2, 3)]
    assert other.scheduler.state_dict() == run.scheduler.state_dict()
    accelerator.free_memory(*parts)


EXPERTS = {"num_experts_per_tok": 2, "num_key_value_heads": 2}
WITH_EXPERTS = {
    "mixtral": MixtralConfig(**SIZES, **HEADS, **EXPERTS, num_local_experts=4),
    "qwen3": Qwen3MoeConfig(
        **SIZES, **HEADS, **EXPERTS, head_dim=8, num_experts=4, moe_intermediate_size=16
    ),
}


@pytest.mark.parametrize("kind", WITH_EXPERTS)
def test_trainer_goes_on_with_the_moments_of_experts(tmp_path: Path, kind: str) -> None:
    """Its own checkpoint has experts one by one, which it does not load; ours has those of a layer in one tensor."""
    whole = trainer(tmp_path / "run", WITH_EXPERTS[kind])
    whole.train()
    first = tmp_path / "run" / "checkpoint-2"
    hub = formats.read_checkpoint(first)
    assert any(".experts.3." in name for name in hub.parameters)
    assert all(held.moments for held in hub.parameters.values())
    config = ("--config", str(first / "config.json"))
    back = converted(
        converted(first, "native", tmp_path / "other", *config),
        "trainer",
        tmp_path / "back",
        *config,
    )
    again = trainer(tmp_path / "again", WITH_EXPERTS[kind])
    again.train(resume_from_checkpoint=str(back))
    found, truth = losses_of(again), losses_of(whole)
    assert {step: found[step] for step in (3, 4)} == {step: truth[step] for step in (3, 4)}
    opened = AutoModelForCausalLM.from_pretrained(str(back)).state_dict()
    held = formats.read_checkpoint(back)
    assert_equal(
        {key: value for key, value in tensors_of(held).items() if key[1] == "weight"},
        {(name, "weight"): opened[name] for name in opened},
    )


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


@pytest.mark.parametrize("state", [{}, {"momentum_buffer": None}, None])
@pytest.mark.parametrize("saved", ["trainer", "file", "dcp"])
def test_an_optimizer_without_moments_is_read(tmp_path: Path, saved: str, state: Any) -> None:
    run = run_of(LLAMA, steps=0)
    optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)
    held = optimizer.state_dict()
    if state is not None:
        held["state"] = {number: dict(state) for number in held["param_groups"][0]["params"]}
    path = file_of({"model": run.model.state_dict(), "optimizer": held}, tmp_path / "run.pt")
    if saved == "dcp":
        torch_save_to_dcp(path, tmp_path / "parts")
        path = tmp_path / "parts"
    if saved == "trainer":
        run.model.save_pretrained(str(tmp_path))
        file_of(held, tmp_path / "optimizer.pt")
        path.unlink()
        path = tmp_path
    hub = formats.read_checkpoint(path)
    weights = {(name, "weight"): held.data for name, held in run.model.named_parameters()}
    assert_equal(tensors_of(hub), weights)
    assert [len(group.names) for group in hub.groups] == [len(weights)]
    assert not [one for one in hub.findings if one.path == "moments"]


@pytest.mark.parametrize("saved", ["file", "dcp"])
@pytest.mark.parametrize("make", [Namespace, SimpleNamespace])
def test_arguments_in_a_namespace_are_read_as_data(tmp_path: Path, saved: str, make: Any) -> None:
    model = run_of(LLAMA, steps=0).model
    inner = make(lr=1e-3, out=Path("a/b"), api_key="Some1Secret")
    values = {"args": make(inner=inner, names=["a"]), "list": [make(a=1)]}
    path = file_of({"model": model.state_dict(), **values}, tmp_path / "run.pt")
    if saved == "dcp":
        torch_save_to_dcp(path, tmp_path / "parts")
        path = tmp_path / "parts"
    hub = formats.read_checkpoint(path)
    assert len(hub.parameters) == len(model.state_dict())
    text = repr(hub.client)
    assert not hub.findings and all(word in text for word in ("0.001", "'a/b'", "['a']", "1"))


@pytest.mark.parametrize("saved", ["accelerate", "file", "dcp"])
def test_moments_of_two_optimizers_are_never_mixed(tmp_path: Path, saved: str) -> None:
    run, other = run_of(LLAMA), run_of(LLAMA, seed=3)
    place = tmp_path / "run"
    second = "model_1," if saved == "accelerate" else ""
    if saved == "accelerate":
        accelerator = Accelerator(cpu=True)
        accelerator._models += [run.model, other.model]
        accelerator._optimizers += [run.optimizer, other.optimizer]
        accelerator.save_state(str(place))
        hub = formats.read_at(*formats.find_checkpoint(place, root="model,optimizer"))
        assert [one.path for one in hub.findings if one.path == "model_1"]
        with pytest.raises(SourceError, match=r"several models: model, model_1; .*--root"):
            formats.read_checkpoint(place)
        with pytest.raises(SourceError, match="two optimizers, optimizer and optimizer_1"):
            formats.read_at(*formats.find_checkpoint(place, root="model_1"))
    else:
        state = {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}
        state["optimizer_1"] = other.optimizer.state_dict()
        file_of(state, place)
        if saved == "dcp":
            torch_save_to_dcp(place, tmp_path / "parts")
            place = tmp_path / "parts"
        with pytest.raises(SourceError, match="two optimizers, optimizer and optimizer_1"):
            formats.read_checkpoint(place)
        hub = formats.read_at(*formats.find_checkpoint(place, root="optimizer"))
        assert [one.path for one in hub.findings if one.path == "optimizer_1"]
    truth = run.truth
    assert_equal(tensors_of(hub), truth)
    hub = formats.read_at(*formats.find_checkpoint(place, root=f"{second}optimizer_1"))
    moments = {key: held for key, held in other.truth.items() if key[1] != "weight"}
    weights = other.truth if saved == "accelerate" else truth
    moments |= {key: held for key, held in weights.items() if key[1] == "weight"}
    assert_equal(tensors_of(hub), moments)


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


LEVELS = """
import sys
import warnings
from pathlib import Path
import deepspeed
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # no compiler is asked
sys.path.append(sys.argv[1])
from tests.checkpoint import tool_folders
level, folder = int(sys.argv[2]), Path(sys.argv[3])
optimizer = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True}}
config = {
    "zero_optimization": {"stage": level, "stage3_gather_16bit_weights_on_model_save": level == 3},
    "train_micro_batch_size_per_gpu": 2,
    "zero_force_ds_cpu_optimizer": False,
}
"""
TRAINER = """
trainer = tool_folders.trainer(folder, tool_folders.LLAMA, 2, deepspeed=config | {"optimizer": optimizer})
trainer.train()
"""
ACCELERATE = """
from accelerate import Accelerator, DeepSpeedPlugin
from safetensors.torch import save_file
config["zero_allow_untested_optimizer"] = True
accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
run = tool_folders.run_of(tool_folders.LLAMA, 0)
model, run.optimizer, run.scheduler = accelerator.prepare(run.model, run.optimizer, run.scheduler)
for number in range(2):
    batch = tool_folders.Rows()[number]
    accelerator.backward(model(**{name: row[None] for name, row in batch.items()}).loss)
    run.optimizer.step()
    run.scheduler.step()
    run.optimizer.zero_grad()
accelerator.save_state(str(folder / "checkpoint-2"))
weights = {name: weight.contiguous() for name, weight in accelerator.get_state_dict(model).items()}
save_file(weights, folder / "checkpoint-2" / "model.safetensors")
"""


@pytest.mark.parametrize(
    ("tool", "level"),
    [(TRAINER, 1), (TRAINER, 3), (ACCELERATE, 3)],
    ids=["one", "three", "accelerate"],
)
def test_what_trainer_and_accelerate_save_with_deepspeed_is_read_whole(
    tmp_path: Path, tool: str, level: int
) -> None:
    here = str(Path(__file__).parents[2])
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    with socket.create_server(("127.0.0.1", 0)) as free:
        alone["MASTER_PORT"] = str(free.getsockname()[1])
    done = subprocess.run(
        [sys.executable, "-c", LEVELS + tool, here, str(level), str(tmp_path / "run")],
        env={**env, **alone, "DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"},
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    place = tmp_path / "run" / "checkpoint-2"
    hub = formats.read_checkpoint(place)
    assert hub.origin.format == "deepspeed" and hub.where.steps == 2
    assert hub.moments == ("exp_avg", "exp_avg_sq") and list(hub.random) == ["0"]
    assert hub.schedule["last_epoch"] == 2
    assert tool == ACCELERATE or hub.client["trainer_state"]["global_step"] == 2
    weights = load_file(place / "model.safetensors")
    for name, held in hub.parameters.items():
        assert torch.equal(held.best.whole().to(weights[name].dtype), weights[name])
    out = converted(place, "trainer", tmp_path / "plain")
    if tool == ACCELERATE:
        return  # the Trainer's own state is none of accelerate's
    again = trainer(tmp_path / "again", LLAMA, 3)
    again.train(resume_from_checkpoint=str(out))
    assert list(losses_of(again)) == [1, 2, 3]


def test_the_arguments_of_megatron_become_a_config_that_transformers_opens(tmp_path: Path) -> None:
    model = run_of(GROUPED).model
    model.save_pretrained(str(tmp_path / "model"))
    read = formats.read_checkpoint(tmp_path / "model")
    facts = describe_config(registry.load("huggingface").read(tmp_path / "model" / "config.json"))
    renamed = rename_under(read, "megatron", None, [("config.json", facts)])
    args = dict(registry.load("megatron").read(shlex.split(FLAGS)).effective.items())
    for number, (change, word) in enumerate(
        [
            ({}, ""),
            ({"hidden_size": 64}, "the hidden size: found 64"),
            ({"rotary_percent": 0.5}, "maps of parameter names"),
            ({"normalization": "LayerNorm"}, "not every family"),
        ]
    ):
        hub = replace(renamed, client={"megatron": {"args": {**args, **change}}}, model=None)
        planned = formats.plan_files(formats.format_of_name("megatron"), hub, interface.Wanted())
        source, out = tmp_path / f"source{number}", tmp_path / f"out{number}"
        write_checkpoint(planned, source, (), lambda *_: None)
        errors = io.StringIO()
        with redirect_stderr(errors):
            command(["checkpoint", "convert", str(source), "--to", "safetensors", "-o", str(out)])
        assert word in errors.getvalue()
        if change:
            assert not (out / "config.json").exists()
            continue
        opened = AutoModelForCausalLM.from_pretrained(str(out))
        ids = torch.arange(8)[None]
        assert torch.equal(opened(ids).logits, model(ids).logits)


def decays_of(hub: Hub) -> list[tuple[float, set[str]]]:
    return [(group.settings["weight_decay"], set(group.names)) for group in hub.groups]


def test_equal_groups_of_megatron_are_one() -> None:
    """Of two with all settings alike one may be empty; with other settings nothing tells which has the parameters."""
    row = {"wd_mult": 1.0, "lr_mult": 1.0, "lr": 0.1}
    (group,) = groups_of([row, dict(row)], {"a.weight": 2}, "here")
    assert group.names == ("a.weight",)
    with pytest.raises(SourceError, match="same settings"):
        groups_of([row, {**row, "lr": 0.2}], {"a.weight": 2}, "here")


@pytest.mark.parametrize("described", [False, True])
def test_groups_of_megatron_survive_the_way_to_deepspeed_and_back(
    tmp_path: Path, described: bool
) -> None:
    """Where the model is described, DeepSpeed trains on with the losses that Megatron has."""
    run = run_of(GROUPED)
    run.model.save_pretrained(str(tmp_path / "model"))
    config = ("--config", str(tmp_path / "model" / "config.json"), "--samples", "2")
    first = converted(plain_file(run, tmp_path), "megatron", tmp_path / "first", *config)
    (tmp_path / "launch.args").write_text(
        f"{FLAGS} --use-distributed-optimizer --weight-decay 0.05"  # which counts, not the checkpoint's
    )
    ways = (
        ("deepspeed", tmp_path / "launch.args", first, tmp_path / "there"),
        (
            "megatron",
            tmp_path / "there" / "ds_config.json",
            tmp_path / "there" / "checkpoint",
            tmp_path / "back",
        ),
    )
    model = ["--model", str(tmp_path / "model")] if described else []
    proof = ["--prove", "2"] if described else []
    for to, settings, source, out in ways:
        words = ["move", str(settings), "--checkpoint", str(source), "--to", to, "-o", str(out)]
        assert command([*words, *model, *proof]) in (Exit.CLEAN, Exit.FINDINGS)
        proof = []
    if described:
        said = json.loads((tmp_path / "there" / "proof.json").read_text())
        assert said["verdict"] == "same" and said["distance"]["loss"] < 1e-6, said
    there = formats.read_checkpoint(tmp_path / "there" / "checkpoint")
    names = dict(run.model.named_parameters())
    wide = {name for name, held in names.items() if held.ndim > 1}
    assert decays_of(there) == [(0.05, wide), (0.0, set(names) - wide)]
    before, after = (
        formats.read_checkpoint(place) for place in (first, tmp_path / "back" / "checkpoint")
    )
    (_, own), spared = decays_of(before)
    assert decays_of(after) == [(0.05, own), spared]
    assert_equal(tensors_of(after), tensors_of(before))
    assert_equal(
        tensors_of(formats.read_checkpoint(converted(first, "dcp", tmp_path / "between"))),
        tensors_of(before),
    )


@pytest.mark.parametrize("digest", ["sha256", "git"])
def test_the_name_of_a_blob_is_held_against_its_content(
    tmp_path: Path, digest: str, capsys: Any
) -> None:
    """Large files have the SHA-256 of their content as the name of their blob, others git's digest."""
    run_of(LLAMA).model.save_pretrained(str(tmp_path / "model"))
    content = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    place = cached(tmp_path, "org--one", content)
    link = place / "model.safetensors"
    blob = link.resolve()
    if digest == "git":
        command_of_git = ["git", "hash-object", str(blob)]
        name = subprocess.run(command_of_git, capture_output=True, text=True, check=True).stdout
        blob = blob.rename(blob.with_name(name.strip()))
        link.unlink()
        link.symlink_to(os.path.relpath(blob, place))
    words = ["checkpoint", "inspect", str(place), "--check"]
    assert command(words) == Exit.CLEAN
    out = capsys.readouterr().out
    assert "checked by the names of their blobs: model.safetensors" in out
    assert "is not detected" not in out
    changed = bytearray(blob.read_bytes())
    changed[-3] ^= 1
    blob.write_bytes(changed)
    for asking in (words, ["checkpoint", "convert", str(place), "--to", "bin", "-o", "out"]):
        assert command(asking) == Exit.ERROR
        said = capsys.readouterr().err
        assert f"{link}: the {len(changed)} bytes of this file have changed" in said
        assert f"the name of its blob has {blob.name[:12]}" in said


def two_models(place: Path, *optimizers: TrainedRun) -> Path:
    """A folder of accelerate with two models of one kind, and these optimizers."""
    accelerator = Accelerator(cpu=True)
    accelerator._models += [run_of(LLAMA).model, run_of(LLAMA, seed=3).model]
    accelerator._optimizers += [run.optimizer for run in optimizers]
    accelerator.save_state(str(place))
    return place


def test_an_optimizer_next_to_two_models_is_for_the_one_that_is_named(tmp_path: Path) -> None:
    second = run_of(LLAMA, seed=3)
    place = two_models(tmp_path / "run", second)
    with pytest.raises(SourceError, match=r"several models: model, model_1; .*--root"):
        formats.read_checkpoint(place)
    for root in ("model", "model_1"):
        hub = formats.read_at(*formats.find_checkpoint(place, root=root))
        (lost,) = [one for one in hub.findings if one.path == "moments"]
        assert not hub.moments and f"--root {root},optimizer reads it" in lost.message
    hub = formats.read_at(*formats.find_checkpoint(place, root="model_1,optimizer"))
    assert_equal(tensors_of(hub), second.truth)


def test_two_models_without_an_optimizer_are_two_models(tmp_path: Path) -> None:
    place = two_models(tmp_path / "run")
    with pytest.raises(SourceError, match=r"several models: model, model_1; .*--root"):
        formats.read_checkpoint(place)
    hub = formats.read_at(*formats.find_checkpoint(place, root="model_1"))
    truth = run_of(LLAMA, seed=3).truth
    assert_equal(tensors_of(hub), {key: truth[key] for key in truth if key[1] == "weight"})


def test_a_part_of_a_model_is_refused_by_accelerate(tmp_path: Path, capsys: Any) -> None:
    model = run_of(LLAMA).model
    model.save_pretrained(str(tmp_path / "model"))
    file = tmp_path / "model" / "model.safetensors"
    save_file({name: t for name, t in load_file(file).items() if "k_proj" not in name}, file)
    words = ["checkpoint", "convert", str(tmp_path / "model"), "--to", "accelerate"]
    assert command([*words, "-o", str(tmp_path / "out")]) == Exit.ERROR
    assert "found no tensor for block0.attention.key.weight" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("to", ["universal", "deepspeed"])
@pytest.mark.parametrize("other", [torch.float32, torch.float64, torch.bfloat16])
def test_what_deepspeed_writes_in_another_number_format_is_named(
    tmp_path: Path, to: str, other: torch.dtype, capsys: Any
) -> None:
    run = run_of(LLAMA)
    state = {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}
    norm = "model.norm.weight"
    bf16 = {name: held.bfloat16() for name, held in state["model"].items()}
    state["model"] = bf16 | {norm: bf16[norm].to(other)}
    states = state["optimizer"]["state"]
    states[0] = {**states[0], "exp_avg": states[0]["exp_avg"].to(other)}
    converted(file_of(state, tmp_path / "run.pt"), to, tmp_path / "out")
    out = capsys.readouterr().out
    named = {line.split(": ")[1]: line for line in out.splitlines() if "one number format" in line}
    code = {torch.float32: "F32", torch.float64: "F64", torch.bfloat16: "BF16"}[other]
    expected = {
        "weights": code != "BF16" and f"different numbers: weights: {norm} and 0 more",
        "moments.exp_avg": code != "F32" and f"0 more parameters are in {code}",
        "masters": code == "F64" and f"masters: {norm} and 0 more parameters are in F64",
    }
    assert named.keys() == {kind for kind, words in expected.items() if words}
    assert all(str(expected[kind]) in line for kind, line in named.items())
