""" "auto": the caller's values, then the Hugging Face rules, and every leftover named."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bridge.errors import ConfigError
from bridge.stack.dialect import Dialect
from compat.deepspeed.auto import FACTS, REAL, RULES, resolve
from compat.deepspeed.value_types import typed

HF = {
    "fp16": {"enabled": "auto", "loss_scale": 0},
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "total_num_steps": "auto",
        },
    },
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_gather_16bit_weights_on_model_save": "auto",
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}
SAID = {
    "hidden_size": 1000,
    "micro_batch": 2,
    "accumulation": 4,
    "clip": 0.5,
    "lr": 3e-4,
    "betas": [0.9, 0.95],
    "eps": 1e-6,
    "weight_decay": 0.1,
    "warmup_steps": 0,
    "total_steps": 100,
    "mixed_precision": "bf16",
    "save_16bit": True,
}
EXPECTED = {
    "fp16.enabled": False,
    "bf16.enabled": True,
    "optimizer.params.lr": 3e-4,
    "optimizer.params.betas": (0.9, 0.95),
    "optimizer.params.eps": 1e-6,
    "optimizer.params.weight_decay": 0.1,
    "scheduler.params.warmup_min_lr": 0.0,
    "scheduler.params.warmup_max_lr": 3e-4,
    "scheduler.params.warmup_num_steps": 1,
    "scheduler.params.total_num_steps": 100,
    "zero_optimization.reduce_bucket_size": 1_000_000,
    "zero_optimization.stage3_prefetch_bucket_size": 900_000,
    "zero_optimization.stage3_param_persistence_threshold": 10_000,
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": True,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 0.5,
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 2,
}


def _read(dialect: Dialect, data: Any, **more: Any) -> dict[str, Any]:
    read: Any = dialect.read
    return dict(read(data, version="0.19.8", **more).given)


def test_hugging_face_rules(deepspeed: Dialect) -> None:
    given = _read(deepspeed, HF, world_size=8, auto=SAID)
    assert {path: given[path] for path in EXPECTED} == EXPECTED
    assert "auto" not in given.values()


def test_values_of_the_caller_come_first(deepspeed: Dialect) -> None:
    said = SAID | {
        "zero_optimization.reduce_bucket_size": 5,
        "gradient_accumulation_steps": 2,
        "train_batch_size": 32,
    }
    given = _read(deepspeed, HF, world_size=8, auto=said)
    assert given["zero_optimization.reduce_bucket_size"] == 5
    assert (given["gradient_accumulation_steps"], given["train_batch_size"]) == (2, 32)


def test_model_parallel_ranks_do_not_count(deepspeed: Dialect) -> None:
    given = _read(
        deepspeed,
        HF | {"zero_optimization": {"stage": 1}},
        world_size=8,
        auto=SAID,
        code={"pipeline_stages": 4},
    )
    assert given["train_batch_size"] == 2 * 4 * 2


def test_leftovers_are_all_named(deepspeed: Dialect) -> None:
    with pytest.raises(ConfigError) as raised:
        _read(deepspeed, HF, world_size=8)
    (problem,) = raised.value.problems
    assert "18 values" in problem and all(path in problem for path in EXPECTED)
    with pytest.raises(ConfigError) as raised:
        _read(
            deepspeed,
            HF,
            world_size=8,
            auto={name: fact for name, fact in SAID.items() if name != "hidden_size"},
        )
    (problem,) = raised.value.problems
    assert "3 values" in problem and "or pass hidden_size with" in problem
    assert raised.value.words == ("--auto", "hidden_size=HIDDEN_SIZE")


def test_the_words_of_an_error_say_every_fact_that_lacks(deepspeed: Dialect) -> None:
    with pytest.raises(ConfigError) as raised:
        _read(deepspeed, HF)
    words = raised.value.words
    said = dict(zip(words[::2], words[1::2], strict=True)) | {"--world-size": "8"}
    facts = dict(word.split("=", 1) for word in words if "=" in word)
    assert {name for name, value in facts.items() if value == name.upper()} == {
        "hidden_size",
        "total_steps",
    }
    assert said["--world-size"] == "8" and words[-2:] == ("--world-size", "WORLD_SIZE")
    auto = {
        name: json.loads(value)
        for name, value in facts.items()
        if value not in ("no", name.upper())
    }
    given = _read(
        deepspeed,
        HF,
        world_size=8,
        auto=auto | {"mixed_precision": "no", "hidden_size": 64, "total_steps": 10},
    )
    assert "auto" not in given.values()


def test_names_of_training_arguments_are_facts(deepspeed: Dialect) -> None:
    names = {
        "micro_batch": "per_device_train_batch_size",
        "lr": "learning_rate",
        "eps": "adam_epsilon",
        "clip": "max_grad_norm",
    }
    said = {names.get(name, name): value for name, value in SAID.items() if name != "betas"}
    given = _read(deepspeed, HF, world_size=8, auto=said | {"adam_beta1": 0.9, "adam_beta2": 0.95})
    assert {path: given[path] for path in EXPECTED} == EXPECTED


@pytest.mark.parametrize(
    "fact", ["hidden_size", "micro_batch", "accumulation", "total_steps", "warmup_steps"]
)
def test_a_count_that_is_none_is_refused(deepspeed: Dialect, fact: str) -> None:
    for wrong in ("HIDDEN_SIZE", 1.5, True):
        with pytest.raises(ConfigError, match=f"auto: {fact}: found .*, expected a whole number"):
            _read(deepspeed, HF, world_size=8, auto=SAID | {fact: wrong})


def test_keys_without_a_rule_need_a_value(deepspeed: Dialect) -> None:
    data = {"train_batch_size": 8, "zero_optimization": {"stage3_max_live_parameters": "auto"}}
    with pytest.raises(
        ConfigError, match=r'stage3_max_live_parameters: found "auto", .*; write a value$'
    ):
        _read(deepspeed, data, auto=SAID)
    given = _read(deepspeed, data, auto={"zero_optimization.stage3_max_live_parameters": 7})
    assert given["zero_optimization.stage3_max_live_parameters"] == 7


def test_resolved_values_are_checked(deepspeed: Dialect) -> None:
    with pytest.raises(
        ConfigError, match=r"^auto: clip: found 'much', expected a number of at least 0$"
    ):
        _read(
            deepspeed, {"train_batch_size": 8, "gradient_clipping": "auto"}, auto={"clip": "much"}
        )


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"foo": 1}, "neither a key of DeepSpeed nor the name of a fact"),
        ({"hidden_size": 1e3}, "found 1000.0, expected a whole number"),
        (
            {"warmup_ratio": 0.1},
            "--auto does not take this TrainingArgument; use --auto-from warmup_ratio=0.1",
        ),
        ({"bf16": True}, "--auto does not take this TrainingArgument; use --auto-from bf16=true"),
    ],
)
def test_a_wrong_value_does_not_void_the_others(
    deepspeed: Dialect, wrong: dict[str, Any], says: str
) -> None:
    """It is named alone, and no command that repeats it is printed."""
    data = {
        "train_batch_size": 8,
        "gradient_clipping": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
    }
    (name,) = wrong
    with pytest.raises(ConfigError) as raised:
        _read(deepspeed, data, auto={"lr": 1e-4, "clip": 1.0} | wrong)
    assert raised.value.problems == (f"auto: {name}: {says}",)
    with pytest.raises(ConfigError) as raised:
        _read(deepspeed, data, auto={"lr": 1e-4} | wrong)
    assert len(raised.value.problems) == 2 and "or pass clip with" in raised.value.problems[1]
    assert raised.value.words == ()


@pytest.mark.parametrize("name", ["lr", "optimizer.params.lr"])
def test_no_command_repeats_a_value_that_is_refused(deepspeed: Dialect, name: str) -> None:
    data = {
        "train_batch_size": 8,
        "gradient_clipping": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
    }
    with pytest.raises(ConfigError, match=f"{name}: found 'abc'") as raised:
        _read(deepspeed, data, auto={name: "abc"})
    assert raised.value.words == ()


def test_unknown_facts_are_named(deepspeed: Dialect) -> None:
    wrong = r"auto: hiden_size: neither a key of DeepSpeed nor the name of a fact; did you mean hidden_size\?"
    with pytest.raises(ConfigError, match=wrong):
        _read(deepspeed, {"train_batch_size": 8}, auto={"hiden_size": 3})


def test_real_autos_stay(deepspeed: Dialect) -> None:
    for path in REAL:
        assert typed(path, "auto") == "auto"
    data = {
        "train_batch_size": 8,
        "data_types": {"keep_in_fp32_modules": "auto"},
        "expert_parallel": {"top_k": "auto"},
    }
    assert _read(deepspeed, data)["expert_parallel.top_k"] == "auto"


def test_resolve_by_hand() -> None:
    given = {
        "train_micro_batch_size_per_gpu": 2,
        "train_batch_size": "auto",
        "zero_optimization.reduce_bucket_size": "auto",
    }
    found = resolve(given, {"zero_optimization.reduce_bucket_size": 3}, world_size=4)
    assert found == {**given, "train_batch_size": 8, "zero_optimization.reduce_bucket_size": 3}
    with pytest.raises(ConfigError, match="pass hidden_size"):
        resolve(given, world_size=4)


def test_every_fact_is_used() -> None:
    used = {fact for rule in RULES.values() for fact in rule.needs}
    assert used == FACTS - {
        "world_size",
        "samples",
        "transformers",
    }  # which other facts follow from
    for path in RULES:
        with pytest.raises(ValueError, match="expected"):
            typed(path, [[]])
