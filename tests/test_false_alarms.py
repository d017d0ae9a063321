"""What means the same in two stacks is no loss: switches that an optimizer does not have, or that are off."""

from __future__ import annotations

from typing import Any

import pytest

import compat
from bridge.rules import Effect
from bridge.translation import Result, translate

FUSED = "transformer_engine.pytorch.optimizers.FusedAdam"
OFF: dict[str, Any] = {
    "optimizer": {"_target_": "torch.optim.AdamW", "lr": 1e-3, "foreach": False, "fused": True},
    "model": {"backend": {"fake_balanced_gate": False}},
    "distributed": {"pp_size": 2, "pipeline": {"scale_grads_in_schedule": False}},
    "checkpoint": {"enabled": False},
}


def translated(source: str, data: Any, target: str) -> Result:
    """A config of 8 ranks in another stack."""
    config = compat.load(source).read(data, None, 8)
    return translate(config, compat.load(target))


def alarms(result: Result) -> set[str]:
    """Settings and plan fields of which it is said that the numbers differ."""
    return {finding.path for finding in result.findings if finding.effect.reaches(Effect.NUMBERS)}


@pytest.mark.parametrize("target", ["megatron", "fast_llm"])
@pytest.mark.parametrize(
    ("source", "data"),
    [
        ("automodel", {"optimizer": {"_target_": "torch.optim.AdamW", "lr": 1e-3}}),
        ("deepspeed", {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "train_micro_batch_size_per_gpu": 1}),
        ("deepspeed", {"optimizer": {"type": "Lion", "params": {"lr": 1e-3}}, "train_micro_batch_size_per_gpu": 1}),
    ],
)
def test_a_switch_that_an_optimizer_does_not_have_is_off(source: str, data: Any, target: str) -> None:
    assert alarms(translated(source, data, target)).isdisjoint({"optimizer.nesterov", "optimizer.amsgrad"})


def test_nesterov_that_is_on_is_still_a_loss() -> None:
    data = {"optimizer": {"_target_": "torch.optim.SGD", "lr": 1e-3, "momentum": 0.9, "nesterov": True}}
    assert "optimizer.nesterov" in alarms(translated("automodel", data, "megatron"))


def test_transformer_engines_adam_makes_the_steps_of_torchs() -> None:
    data = {"optimizer": {"_target_": FUSED, "adam_w_mode": True, "lr": 1e-3}}
    assert alarms(translated("automodel", data, "megatron")).isdisjoint({"optimizer._target_", "optimizer.adam_w_mode"})
    flash = {"optimizer": {"_target_": "flashoptim.FlashAdamW", "lr": 1e-3}}
    assert "optimizer._target_" in alarms(translated("automodel", flash, "megatron"))


@pytest.mark.parametrize("target", ["megatron", "fast_llm", "deepspeed"])
def test_switches_that_are_off_change_no_numbers(target: str) -> None:
    found = {f.path: f.effect for f in translated("automodel", OFF, target).findings}
    assert {path for path, effect in found.items() if effect.reaches(Effect.NUMBERS)}.isdisjoint(
        {"model.backend.fake_balanced_gate", "distributed.pipeline.scale_grads_in_schedule", "checkpoint.enabled"}
    )
    assert found["optimizer.foreach"] is found["optimizer.fused"] is Effect.ROUNDING


def test_a_gate_that_spreads_tokens_is_a_loss() -> None:
    data = {"model": {"backend": {"fake_balanced_gate": True}}}
    assert "model.backend.fake_balanced_gate" in alarms(translated("automodel", data, "megatron"))
