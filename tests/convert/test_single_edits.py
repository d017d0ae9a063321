"""Single edits of real files of each stack: refused with the key named, the same in meaning, or named; never silent."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

import compat
from bridge.errors import BridgeError
from bridge.files import load
from bridge.testing.single_edits import KINDS, SILENT, Base, Source, edit_source, outcome

COUNT = int(os.environ.get("SINGLE_EDITS", "21"))
HOME = Path(__file__).parents[1]
EXAMPLES = HOME.parent / "examples"
SUFFIXES = (".json", ".yaml", ".args")
OTHERS = ("cases.json", ".plan.json")
"""What lies among the examples and is no config of a stack."""
RANKS = 8
DEEPSPEED: tuple[dict[str, Any], ...] = (
    {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "optimizer": {
            "type": "OneBitAdam",
            "params": {"lr": 0.002, "freeze_step": 400, "comm_backend_name": "nccl"},
        },
        "fp16": {"enabled": True, "loss_scale": 0},
    },
    {
        "train_batch_size": 16,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.001, "weight_decay": 0.01}},
        "scheduler": {"type": "StepLR", "params": {"step_size": 10, "gamma": 0.5}},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 500000},
        "progressive_layer_drop": {"enabled": True, "theta": 0.5, "gamma": 0.001},
    },
)
"""Beside the examples, which start DeepSpeed by flags: what its own examples use."""


def sources(stack: str) -> Iterator[Source]:
    if stack == "deepspeed":
        yield from DEEPSPEED
    elif stack == "megatron":
        lines = (HOME / "stacks" / "megatron" / "sample.jsonl").read_text("utf-8").splitlines()
        yield from (json.loads(line)["flags"] for line in lines[:40])
    elif stack == "huggingface":
        lines = (HOME / "stacks" / "huggingface" / "configs.jsonl").read_text("utf-8").splitlines()
        yield from map(json.loads, lines)
    else:
        paths = sorted((EXAMPLES / stack).iterdir())
        yield from (
            load(path).data
            for path in paths
            if path.suffix in SUFFIXES and not path.name.endswith(OTHERS)
        )


def bases(stack: str) -> Iterator[Base]:
    read = partial(compat.load(stack).read, world_size=RANKS)
    for source in sources(stack):
        try:
            yield Base(source, read(source), read)
        except BridgeError:
            continue


@pytest.mark.parametrize("stack", compat.names())
def test_no_edit_passes_in_silence(stack: str) -> None:
    chance, found, made = Random(1), list(bases(stack)), 0
    assert found
    while made < COUNT:
        base = chance.choice(found)
        edit = edit_source(base.source, chance, KINDS[chance.randrange(len(KINDS))])
        if edit is not None:
            made += 1
            assert outcome(base, edit) != SILENT, (edit.kind, edit.was, edit.key, edit.value)


BATCH = {"train_batch_size": 8}


def compression(**shared: Any) -> dict[str, Any]:
    return BATCH | {
        "compression_training": {
            "sparse_pruning": {
                "shared_parameters": {"enabled": True, "schedule_offset": 2000, "method": "l1"}
                | shared,
                "different_groups": {
                    "sp1": {"params": {"dense_ratio": 0.5}, "modules": ["attention.self"]}
                },
            }
        }
    }


def one_bit(**params: Any) -> dict[str, Any]:
    return BATCH | {"optimizer": {"type": "OneBitAdam", "params": {"lr": 0.002} | params}}


FOUND: tuple[tuple[str, Mapping[str, Any], str | None, str], ...] = (
    ("deepspeed", one_bit(LR=0.002), None, "LR"),
    ("deepspeed", one_bit(rl=0.002), None, "rl"),
    ("deepspeed", one_bit(weight_dceay=0.1), None, "weight_dceay"),
    (
        "deepspeed",
        BATCH | {"optimizer": {"type": "Adm", "params": {"weight_dceay": 0.1}}},
        None,
        "weight_dceay",
    ),
    (
        "deepspeed",
        BATCH | {"optimizer": {"type": "RMSprop", "params": {"aplha": 0.9}}},
        None,
        "aplha",
    ),
    (
        "deepspeed",
        BATCH
        | {
            "optimizer": {"type": "AdamW"},
            "scheduler": {"type": "StepLR", "params": {"setp_size": 9}},
        },
        None,
        "setp_size",
    ),
    ("deepspeed", compression(schdeule_offset=1), "0.19.6", "schdeule_offset"),
    (
        "deepspeed",
        BATCH | {"compression_training": {"row_pruning": {"different_groups": {"modules": ["a"]}}}},
        "0.19.6",
        "modules",
    ),
    ("fast_llm", {"model": {"base_model": {"head": {"type": "rms_norm"}}}}, None, "head.type"),
    (
        "automodel",
        {"distributed": {"pp_size": 2, "pipeline": {"pp_schedule": ""}}},
        None,
        "pp_schedule: found ''",
    ),
    (
        "deepspeed",
        BATCH | {"data_efficiency": {"data_routing": {"random_ltd": {"random_ldt_layer_num": 4}}}},
        None,
        "random_ldt_layer_num",
    ),
    (
        "automodel",
        {"rng": {"_target_": "nemo_automodel.components.training.rng.StatefulRNG", "SEED": 1}},
        None,
        "SEED",
    ),
    ("automodel", {"rng": {"ranked": True}, "seed": 1234}, None, "do not read the rng section"),
    ("automodel", {"rng": {"ranked": True, "seed": 1234}}, None, "here 42"),
    ("automodel", {"dataloader": {"_tagret_": "torch.utils.data.DataLoader"}}, None, "_tagret_"),
    (
        "automodel",
        {"peft": {"_target_": "nemo_automodel.components._peft.lora.PeftConfig", "aplha": 32}},
        None,
        "aplha",
    ),
    (
        "automodel",
        {"optimizer": {"_target_": "flashoptim.FlashAdamW", "bteas": [0.9, 0.95]}},
        None,
        "bteas",
    ),
    (
        "automodel",
        {"dataloader": {"collate_fn": {"pad_seq_len_divisibel": 8}}},
        None,
        "pad_seq_len_divisibel",
    ),
    ("fast_llm", {"training": {"logs": {"intreval": 10}}}, None, "intreval"),
    ("fast_llm", {"training": {"evaluators": {"validation": {"typ": "loss"}}}}, None, "typ"),
    ("fast_llm", {"data": {"datasets": {"training": {"type": "randmo"}}}}, None, "randmo"),
    ("fast_llm", {"model": {"base_model": {"decoder": {"block": {"heads": 16}}}}}, None, "heads"),
)
"""Shrunk edits that once passed in silence: stack, source, release, and the word that has to be named."""


@pytest.mark.parametrize(
    "stack, source, version, key", FOUND, ids=[f"{row[0]}-{row[3]}" for row in FOUND]
)
def test_what_once_passed_in_silence(
    stack: str, source: Mapping[str, Any], version: str | None, key: str
) -> None:
    try:
        findings = compat.load(stack).read(source, version=version, world_size=RANKS).findings
        said = [f"{finding.path}: {finding.message}" for finding in findings]
    except BridgeError as error:
        said = [str(error)]
    assert any(key in text for text in said), said
