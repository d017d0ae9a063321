"""Names and layouts of models: there and back bit by bit, held against what other projects' converters do with them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from bridge.checkpoint import renaming
from bridge.checkpoint.hub import Hub, Model, Origin, Parameter, ParameterGroup
from bridge.checkpoint.lazy import Held
from bridge.errors import SourceError
from tests.checkpoint import checkpoints

SHARED = os.environ.get("STAGEBRIDGE_SHARED")


def hub_of(kind: str) -> tuple[Hub, Model]:
    """A model of transformers with moments that tell every element from every other, and what its config says."""
    net = checkpoints.model_of(kind)
    found, at = {}, 0.0
    for name, weight in net.named_parameters():
        numbers = torch.arange(weight.numel(), dtype=torch.float32).view(weight.shape) + at
        at += weight.numel()
        moments = {"exp_avg": Held(numbers), "exp_avg_sq": Held(-numbers)}
        found[name] = Parameter(
            Held(weight.detach().bfloat16()), Held(weight.detach()), moments, 3.0
        )
    sides = {
        dim: tuple(name for name, held in found.items() if (len(held.weight.shape) == 1) == dim)
        for dim in (False, True)
    }
    groups = tuple(
        ParameterGroup(side, {"lr": 0.1, "weight_decay": 0.1 * (not dim)})
        for dim, side in sides.items()
    )
    config: Any = net.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    ties = {name: of for name, of in (("lm_head.weight", _words(found)),) if name not in found}
    return Hub(Origin("made"), found, ties=ties, ordered=True, groups=groups), Model(
        heads, config.vocab_size, config.model_type
    )


def _words(found: Mapping[str, Parameter]) -> str:
    return next(name for name in found if name.endswith(("embed_tokens.weight", "wte.weight")))


@pytest.mark.parametrize("through", ["megatron", "megatron-local", "neutral"])
@pytest.mark.parametrize("kind", ["llama", "tied", "gpt2", "qwen2", "mixtral"])
def test_weights_masters_moments_and_groups_come_back(kind: str, through: str) -> None:
    hub, model = hub_of(kind)
    there = renaming.rename_parameters(hub, renaming.naming_of_name(through), model)
    assert set(there.parameters) != set(hub.parameters)
    back = renaming.rename_parameters(
        there,
        renaming.naming_of_name("transformers" if kind == "mixtral" else "huggingface"),
        model,
    )
    assert (list(back.parameters), back.ties, back.groups) == (
        list(hub.parameters),
        hub.ties,
        hub.groups,
    )
    for name, held in hub.parameters.items():
        other = back.parameters[name]
        assert other.step == 3.0 and other.master is not None and held.master is not None
        assert torch.equal(other.weight.whole(), held.weight.whole()), name
        assert torch.equal(other.master.whole(), held.master.whole()), name
        assert all(
            torch.equal(other.moments[kind].whole(), moment.whole())
            for kind, moment in held.moments.items()
        ), name


def test_experts_of_a_running_model_are_those_of_its_files() -> None:
    """Stacked in one tensor in memory, each with names of its own in files, as transformers itself saves them."""
    hub, model = hub_of("mixtral")
    apart = renaming.rename_parameters(hub, renaming.naming_of_name("huggingface"), model)
    both = hub.parameters["model.layers.1.mlp.experts.gate_up_proj"].best.whole()
    down = hub.parameters["model.layers.1.mlp.experts.down_proj"].best.whole()
    top = "model.layers.1.block_sparse_moe.experts"
    for expert in range(4):
        gate, up = both[expert].chunk(2)
        for name, known in {"w1": gate, "w3": up, "w2": down[expert]}.items():
            assert torch.equal(
                apart.parameters[f"{top}.{expert}.{name}.weight"].best.whole(), known
            )


def test_an_attention_that_is_read_group_by_group() -> None:
    """Four heads in two groups: two queries, their key, their value; then the next ones."""
    hub, model = hub_of("llama")
    there = renaming.rename_parameters(hub, renaming.naming_of_name("megatron"), model)
    q, k, v = (
        hub.parameters[f"model.layers.0.self_attn.{part}_proj.weight"].best.whole()
        for part in "qkv"
    )
    known = torch.cat((q[:8], k[:4], v[:4], q[8:], k[4:], v[4:]))
    assert torch.equal(
        there.parameters["decoder.layers.0.self_attention.linear_qkv.weight"].best.whole(), known
    )


def test_rows_of_no_word_are_left_and_told() -> None:
    hub, model = hub_of("tied")
    there = renaming.rename_parameters(
        hub, renaming.naming_of_name("megatron"), Model(model.kv_heads)
    )
    back = renaming.rename_parameters(
        there, renaming.naming_of_name("huggingface"), Model(model.kv_heads, 30)
    )
    assert back.parameters["model.embed_tokens.weight"].weight.shape == (30, 16)
    assert "1 rows of embedding.word_embeddings.weight" in back.findings[-1].message


def _odd(hub: Hub) -> Hub:
    found = {
        **hub.parameters,
        "model.layers.0.self_attn.sinks": next(iter(hub.parameters.values())),
    }
    return Hub(hub.origin, found)


def _frozen_key(hub: Hub) -> Hub:
    name = "model.layers.0.self_attn.k_proj.weight"
    return Hub(
        hub.origin, {**hub.parameters, name: Parameter(hub.parameters[name].weight, trained=False)}
    )


def _two_groups(hub: Hub) -> Hub:
    name = "model.layers.0.mlp.up_proj.weight"
    return Hub(
        hub.origin,
        hub.parameters,
        groups=(
            ParameterGroup((name,), {}),
            ParameterGroup(tuple(set(hub.parameters) - {name}), {}),
        ),
    )


REFUSED = {
    "a name that no family has": (_odd, Model(2), "sinks"),
    "groups that are not said": (lambda hub: hub, Model(), "--config"),
    "groups that do not divide": (lambda hub: hub, Model(3), "do not divide"),
    "a part that is frozen": (_frozen_key, Model(2), "k_proj|key"),
    "parts in two groups": (_two_groups, Model(2), "several groups"),
    "a family that is not known": (
        lambda hub: hub,
        Model(2, refused=("model_type: found 'gemma'",)),
        "gemma",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_map_holds_for_is_refused_by_name(case: str) -> None:
    change, model, said = REFUSED[case]
    with pytest.raises(SourceError, match=said):
        renaming.rename_parameters(
            change(hub_of("llama")[0]), renaming.naming_of_name("megatron"), model
        )


@pytest.mark.shared
@pytest.mark.skipif(SHARED is None, reason="STAGEBRIDGE_SHARED names no folder")
def test_names_are_those_of_every_small_model() -> None:
    """Each state dict of a family that is known is taken to Megatron's names and back."""
    rows = [
        json.loads(line)
        for line in (Path(SHARED or "") / "truth" / "model_state_dicts.jsonl").open()
    ]
    tried = [
        row
        for row in rows
        if row["arch"]
        in ("gpt2", "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
    ]
    assert len(tried) > 40
    for row in tried:
        config = row["hf"]
        groups = (
            config.get("num_key_value_heads")
            or config.get("num_attention_heads")
            or config.get("n_head")
            or 12
        )
        held = {
            name: Parameter(Held(torch.rand(shape))) for name, shape in row["parameters"].items()
        }
        hub = Hub(Origin("made"), held)
        there = renaming.rename_parameters(hub, renaming.naming_of_name("megatron"), Model(groups))
        style = (
            "transformers"
            if any(name.endswith("experts.down_proj") for name in held)
            else "huggingface"
        )
        back = renaming.rename_parameters(
            there, renaming.naming_of_name(style), Model(groups, family=row["arch"])
        )
        assert set(back.parameters) == set(held), row["name"]
        assert all(
            torch.equal(back.parameters[name].weight.whole(), own.weight.whole())
            for name, own in held.items()
        )


KNOWN_TO_OTHERS = ("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")


def _pairs(row: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    theirs = (
        row["hf"].values()
        if isinstance(row["hf"], dict)
        else row["hf"]
        if isinstance(row["hf"], list)
        else [row["hf"]]
    )
    whole = "".join(theirs) if all(len(name) == 1 for name in theirs) else None
    yield from ((row["megatron"], name) for name in ([whole] if whole else theirs))


@pytest.mark.shared
@pytest.mark.skipif(SHARED is None, reason="STAGEBRIDGE_SHARED names no folder")
def test_the_tables_are_those_of_other_bridges() -> None:
    """What Megatron-Bridge maps to a name of Hugging Face lies in that parameter here too."""
    rows = [
        json.loads(line) for line in (Path(SHARED or "") / "truth" / "model_weights.jsonl").open()
    ]
    ours = {
        naming: _lying(naming)
        for naming in ("huggingface", "transformers", "megatron", "megatron-local")
    }
    checked = 0
    for row in rows:
        if (
            row["release"] != "megatron-bridge 0.6.2"
            or row["arch"] not in KNOWN_TO_OTHERS
            or row["megatron"].startswith("mtp.")
        ):
            continue
        for megatron, hf in _pairs(row):
            left = ours["megatron"].get(megatron, set()) | ours["megatron-local"].get(
                megatron, set()
            )
            right = ours["huggingface"].get(hf, set()) | ours["transformers"].get(hf, set())
            assert left & right, (megatron, hf)
            checked += 1
    assert checked > 20


def _lying(naming: str) -> dict[str, set[str]]:
    """Which neutral parameters lie in each of theirs, with a star for a number."""
    found: dict[str, set[str]] = {}
    for table in renaming.naming_of_name(naming).tables():
        for row in table.all:
            for kind in ("weight", "bias"):
                name = row.theirs.format(layer="*", expert="*", kind=kind)
                found.setdefault(name, set()).update(
                    our.format(layer="*", expert="*", kind=kind) for our in row.ours
                )
    return found
