"""What Merak makes of a run: defaults by release, what it derives, what it refuses, and what it gets wrong."""

from __future__ import annotations

import re
from cProfile import Profile
from pathlib import Path
from typing import Any

import pytest

import compat
from bridge.errors import ConfigError
from bridge.plan.section import fields
from bridge.stack.findings import Finding
from bridge.stack.rules import Effect
from compat.merak.checks import CHECKS
from compat.merak.releases import KNOWN, release
from compat.merak.schema import Merak

MERAK = compat.load("merak")
MAIN = KNOWN[-1]
ABSENT = "absent"

PAGE: dict[str, Any] = {
    "train_schedule": "1f1b",
    "partition_method": "uniform_floor",
    "split_method": "nearest_min_deps",
    "custom_split_points": None,
    "trace_method": "fx",
    "trace_model": "",
    "init_method_std": 0.02,
    "activation_checkpointing": True,
    "checkpoint_num_layers": 1,
    "input_names": None,
    "num_layers": None,
    "seq_length": None,
    "num_heads": None,
    "wall_clock_breakdown": True,
    "shard_count": None,
    "prescale_gradients": False,
    "gradient_predivide_factor": 1.0,
    "zero_allow_untested_optimizer": False,
    "zero_stage": None,
    "zero_allgather_bucket_size": 500_000_000,
    "zero_reduce_bucket_size": 500_000_000,
    "save": False,
    "finetune": False,
    "no_save_rng": False,
    "no_save_optim": False,
    "no_load_rng": False,
    "no_load_optim": False,
    "split_inputs": False,
    "parallel_vocab": False,
    "sequence_parallel": False,
    "sequence_dim": 1,
    "dealloc_pipeoutput": False,
    "activation_checkpoint_ratio": None,
    "tp_overlapping_level": 0,
    "loss_scale": 0,
    "initial_scale_power": 32,
    "loss_scale_window": 1000,
    "hysteresis": 2,
    "min_loss_scale": 1,
    "custom_partition": None,
    "no_tie_modules": False,
    "save_total_limit": -1,
    "eval_iters": ABSENT,
    "text_generation": ABSENT,
    "out_seq_length": 1024,
    "temperature": 0.9,
    "lora_config": None,
    "adapter_name": "default",
}
"""Arguments that Merak's documentation lists, with the default in the source of its newest commit."""


def read(version: str = MAIN, world_size: int | None = None, **said: Any) -> Any:
    return MERAK.read(said, version, world_size)


def about(
    path: str, version: str = MAIN, world_size: int | None = None, **said: Any
) -> list[Finding]:
    return [
        finding for finding in read(version, world_size, **said).findings if finding.path == path
    ]


def refused(version: str = MAIN, world_size: int | None = None, **said: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        read(version, world_size, **said)
    return str(caught.value)


# Fields and defaults


@pytest.mark.parametrize("name", PAGE)
def test_documented_arguments(name: str) -> None:
    path = f"args.{name}"
    assert fields(Merak)[path].doc.endswith(".")
    assert release(MAIN).defaults.get(path, ABSENT) == PAGE[name]
    if PAGE[name] is not ABSENT and PAGE[name] is not None:
        assert read().effective[path] == PAGE[name]


def test_the_page_is_the_documentation(whole: Path) -> None:
    page = (whole / "seeds" / "merak_api.txt").read_text()
    start, end = page.index("Extra parameters"), page.index("class Merak.MerakTrainer")
    assert re.findall(r"^\W+(\w+) ?\(", page[start:end], re.MULTILINE) == list(PAGE)


def test_every_field_is_described_and_known_somewhere() -> None:
    known = {path for version in KNOWN for path in release(version).defaults}
    assert known == set(fields(Merak))
    assert all(field.doc.endswith(".") for field in fields(Merak).values())


@pytest.mark.parametrize(
    "version, path, default",
    [
        ("1.1.1", "partition_method", "uniform"),
        ("2.0.0", "partition_method", "uniform_floor"),
        ("0.1.0", "parallel_vocab", True),
        ("1.1.1", "parallel_vocab", False),
        ("1.1.1", "wall_clock_breakdown", False),
        ("2.0.0", "wall_clock_breakdown", True),
        ("1.1.1", "zero_stage", 1),
        ("2.0.0", "split_method", "min_deps"),
        ("2.0.1", "split_method", "farthest_min_deps"),
        ("2.1.0", "split_method", "nearest_min_deps"),
    ],
)
def test_defaults_move(version: str, path: str, default: Any) -> None:
    assert read(version).effective[f"args.{path}"] == default


def test_what_a_release_lacks_is_refused() -> None:
    assert "Merak 2.0.0 to 2.2.2+main has it" in refused("1.1.1", split_method="layer_split")
    assert "Merak 1.1.1 has it" in refused(zero_optimization=True)
    assert "Merak 2.2.2+main has it" in refused("2.2.2", sp=2)
    assert "Merak 2.1.0" in refused("2.0.0", conv_para_list=["x"])


# Derived


def test_derived_values() -> None:
    values = read(num_layers=12, train_schedule="shifted_critical_path", activation_checkpoint_ratio=["0.5"],
                  gradient_accumulation_steps=4, activation_checkpointing=False, eval_strategy="steps").effective  # fmt: skip
    assert values["args.shard_count"] == 28
    assert values["args.train_schedule"] == "full_critical_path_1f1b"
    assert values["args.checkpoint_num_layers"] == 0
    assert values["args.eval_steps"] == 500 and values["args.do_eval"] is True


def test_data_ranks_are_what_is_left() -> None:
    assert read(world_size=16, pp=2, tp=2, sp=2).effective["init.dp"] == 2
    assert "init.dp" not in read(pp=2, tp=2).effective


# Refused


@pytest.mark.parametrize(
    "said, part",
    [
        ({"pp": 3, "tp": 1, "dp": 1, "world_size": 4}, "pp (3) x tp (1) x dp (1) is 3, which is not the world size (4)"),
        ({"fp16": True, "bf16": True}, "keep one"),
        ({"bf16": True, "half_precision_backend": "apex"}, "apex does not support bf16"),
        ({"bf16": True, "half_precision_backend": "cuda_amp"}, "drop cuda_amp or bf16"),
        ({"half_precision_backend": "auto"}, "expected one of cuda_amp, apex, cpu_amp"),
        ({"pp": 4, "train_schedule": "pre_recompute_1f1b", "gradient_accumulation_steps": 2}, "(2) < pp (4)"),
        ({"train_schedule": "shifted_critical_path", "gradient_accumulation_steps": 8}, "activation_checkpoint_ratio: not set"),
        ({"train_schedule": "shifted_critical_path", "activation_checkpoint_ratio": ["0.5"]}, "needs 4 or more"),
        ({"partition_method": "custom"}, "custom_partition: not set"),
        ({"partition_method": "custom", "custom_partition": ["a,b"]}, "whole numbers"),
        ({"pp": 2, "partition_method": "custom", "custom_partition": ["0,6"]}, "for pp (2), expected 3"),
        ({"split_method": "min_deps"}, "expected one of farthest_min_deps"),
        ({"trace_method": "None", "pp": 2}, "means no tracing"),
        ({"trace_method": "dynamo", "tp": 2}, "dynamo needs tp = 1"),
        ({"lora_config": "x.json", "tp": 2}, "LoRA needs tp = 1"),
        ({"activation_checkpoint_ratio": ["half"]}, "expected a number"),
        ({"zero_stage": 2}, "only stage 1 exists"),
        ({"zero_stage": 0}, "only stage 1 exists"),
        ({"zero_stage": 1, "adafactor": True}, "without this switch"),
        ({"lr_scheduler_type": "polynomial", "learning_rate": 1e-8}, "less than learning_rate"),
        ({"lr_scheduler_type": "cosine_with_min_lr"}, "one of min_lr and min_lr_rate"),
        ({"lr_scheduler_type": "warmup_stable_decay"}, "num_stable_steps"),
        ({"lr_scheduler_type": "linear", "lr_scheduler_kwargs": {"power": 2}}, "linear does not have this argument"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "needs an eval_strategy"),
        ({"load_best_model_at_end": True}, "make them the same"),
        ({"tp_lists": {"tp_attr_list": ["num_heads"]}}, "found tp_attr_list"),
        ({"tp_overlapping_level": 4}, "tp_overlapping_level"),
        ({"warmup_ratio": 1.5}, "warmup_ratio"),
    ],
)  # fmt: skip
def test_refused(said: dict[str, Any], part: str) -> None:
    assert part in refused(**said)


def test_old_releases_refuse_new_shapes() -> None:
    assert "expected one of linear, cosine" in refused("1.1.1", lr_scheduler_type="inverse_sqrt")


# Findings


@pytest.mark.parametrize(
    "name, doc",
    [
        ("partition_method", "uniform"),
        ("split_method", "farthest_min_deps"),
        ("wall_clock_breakdown", "False"),
        ("zero_stage", "1"),
        ("shard_count", "num_layers * 2"),
    ],
)
def test_wrong_documentation(name: str, doc: str) -> None:
    found = [
        finding
        for finding in about(f"args.{name}", num_layers=4)
        if "Merak's documentation says" in finding.message
    ]
    assert len(found) == 1 and found[0].message.endswith(
        f"says {doc!r}" if "min" in doc or doc == "uniform" else f"says {doc}"
    )
    assert not found[0].given


def test_given_values_need_no_documentation() -> None:
    said = {
        "partition_method": "uniform_floor",
        "split_method": "layer_split",
        "wall_clock_breakdown": True,
        "zero_stage": 1,
    }
    assert not [finding for finding in read(**said).findings if "documentation" in finding.message]


DEGREES = {"pp": 2, "tp": 2, "dp": 2}
INERT: dict[str, dict[str, Any]] = {
    "args.split_inputs": {"split_inputs": True},
    "args.hysteresis": {"hysteresis": 4},
    "args.loss_scale": {"loss_scale": 128.0},
    "init.backend": {"backend": "gloo"},
    "args.shard_count": {"shard_count": 10},
    "args.prescale_gradients": {"prescale_gradients": True},
    "args.gradient_predivide_factor": {"gradient_predivide_factor": 2.0},
    "args.zero_reduce_bucket_size": {"zero_reduce_bucket_size": 10},
    "args.custom_partition": {"custom_partition": ["0,1"]},
    "args.custom_split_points": {"custom_split_points": ["h.1"]},
    "args.parallel_vocab": {"parallel_vocab": True},
    "args.checkpoint_num_layers": {"checkpoint_num_layers": 2},
    "args.warmup_ratio": {"warmup_ratio": 0.1, "warmup_steps": 5},
    "args.num_train_epochs": {"num_train_epochs": 2.0, "max_steps": 5},
    "args.save_steps": {"save_steps": 5},
    "args.optim": {"optim": "adafactor"},
    "args.gradient_checkpointing": {"gradient_checkpointing": True},
    "args.label_smoothing_factor": {"label_smoothing_factor": 0.1},
    "args.sequence_parallel": {"sequence_parallel": True},
}


@pytest.mark.parametrize("path", INERT)
def test_inert_settings(path: str) -> None:
    found = [
        finding for finding in about(path, **INERT[path]) if finding.message.startswith("no effect")
    ]
    assert len(found) == 1 and found[0].given and found[0].effect is Effect.NONE


WORKING: dict[str, dict[str, Any]] = {
    "args.hysteresis": {"version": "1.1.1", "hysteresis": 4},
    "args.split_inputs": {"version": "1.1.1", "split_inputs": True},
    "args.shard_count": {"split_method": "farthest_min_deps", "shard_count": 10},
    "args.prescale_gradients": {"zero_stage": 1, "prescale_gradients": True},
    "args.parallel_vocab": {**DEGREES, "parallel_vocab": True},
    "args.checkpoint_num_layers": {"checkpoint_num_layers": 2, "split_method": "layer_split"},
    "args.save_steps": {"save_steps": 5, "save": True},
    "args.optim": {},
    "args.sequence_parallel": {"version": "2.2.2", "tp": 2, "sequence_parallel": True},
}


@pytest.mark.parametrize("path", WORKING)
def test_the_same_settings_where_they_count(path: str) -> None:
    assert not [
        finding
        for finding in about(path, **WORKING[path])
        if finding.message.startswith("no effect")
    ]


BROKEN: list[tuple[str, dict[str, Any]]] = [
    ("args.split_method", {"split_method": "farthest_min_deps"}),
    ("args.split_method", {"version": "2.0.0"}),
    ("args.tp_overlapping_level", {**DEGREES, "tp_overlapping_level": 2}),
    ("args.trace_method", {"trace_method": "dynamo"}),
    ("args.half_precision_backend", {"half_precision_backend": "cuda_amp", "max_grad_norm": 0.0}),
    (
        "args.lr_scheduler_type",
        {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps"},
    ),
    ("args.loss_scale", {"version": "1.1.1", "fp16": True, "loss_scale": 8.0}),
]


@pytest.mark.parametrize("path, said", BROKEN)
def test_broken_settings(path: str, said: dict[str, Any]) -> None:
    found = [finding for finding in about(path, **said) if finding.message.startswith("broken")]
    untrained = path in ("args.half_precision_backend", "args.loss_scale")
    assert len(found) == 1 and found[0].effect is (Effect.NUMBERS if untrained else Effect.STOPS)


WRONG: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("args.max_grad_norm", {"pp": 2}, {"max_grad_norm": 0.0}),
    ("args.max_grad_norm", {"pp": 2}, {"fp16": True}),
    ("args.half_precision_backend", {"half_precision_backend": "cpu_amp"}, {"max_grad_norm": 0.0}),
    ("args.zero_stage", {"zero_stage": 1, "dp": 2}, {"fp16": True}),
    ("args.bf16", {"bf16": True}, {"version": "2.2.1"}),
    ("args.initial_scale_power", {"fp16": True}, {"initial_scale_power": 16}),
    ("args.custom_partition", {"partition_method": "custom", "custom_partition": ["0,6,4"]}, {"custom_partition": ["0,4,6"]}),
    ("args.custom_partition", {"partition_method": "custom", "custom_partition": ["0,6", "8"]}, {"custom_partition": ["0,6"]}),
    ("args.partition_method", {"partition_method": "uniform", "pp": 2}, {"partition_method": "uniform_floor"}),
    ("args.activation_checkpoint_ratio", {"activation_checkpoint_ratio": ["0.5"]}, {"activation_checkpointing": False}),
    ("args.tp_overlapping_level", {"tp": 2, "tp_overlapping_level": 1, "per_device_train_batch_size": 3},
     {"per_device_train_batch_size": 4}),
    ("tp_lists.weight_change_list", {"tp": 2, "weight_change_list": [["bias", 1]]}, {"tp": 1}),
    ("init.sp", {"sp": 2}, {"sequence_parallel": True}),
]  # fmt: skip


@pytest.mark.parametrize("path, said, cure", WRONG)
def test_what_goes_wrong_and_what_cures_it(
    path: str, said: dict[str, Any], cure: dict[str, Any]
) -> None:
    def bites(given: dict[str, Any]) -> int:
        return len(
            [
                finding
                for finding in about(path, **given)
                if not finding.message.startswith(("no effect", "not given"))
            ]
        )

    assert bites(said) == bites({**said, **cure}) + 1


def test_bf16_is_inert_before_it_was_read() -> None:
    assert "trains in fp32" in about("args.bf16", version="2.2.1", bf16=True)[0].message


def test_open_degrees_are_said() -> None:
    assert {finding.path for finding in read().findings} >= {
        "init.pp",
        "init.tp",
        "init.dp",
        "args.output_dir",
    }
    assert not {finding.path for finding in read(**DEGREES, output_dir="x").findings} & {
        "init.pp",
        "args.output_dir",
    }


def test_every_trap_names_a_field_and_a_place() -> None:
    for trap in CHECKS:
        assert (
            trap.path in fields(Merak) and trap.place and (".py" in trap.place or ":" in trap.place)
        ), trap


def test_a_config_takes_few_calls() -> None:
    """Less than a millisecond on any machine of today; what is counted does not depend on how busy it is."""
    said = {**DEGREES, "output_dir": "x", "fp16": True, "num_layers": 12}
    read(**said)
    with Profile() as profile:
        read(**said)
    assert sum(entry.callcount for entry in profile.getstats()) < 4000
