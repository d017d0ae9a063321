"""Files in sections: `--yaml-cfg` by its own loader's rules, and config containers whose `_target_` stays data."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import bridge
import compat
from bridge.errors import ConfigError
from bridge.stack.rules import Effect
from compat.megatron import releases

DIALECT = compat.load("megatron")
RELEASES = ("0.9.0", "0.12.0", "0.16.0", "0.19.2")
SET: dict[str, Any] = {
    "num_layers": 8,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "activation_func": "swiglu",
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
    "context_parallel_size": 1,
    "sequence_parallel": True,
    "bf16": True,
    "fp16": False,
}
TOP = {
    "micro_batch_size": 2,
    "global_batch_size": 32,
    "seq_length": 256,
    "max_position_embeddings": 256,
    "lr": 1e-3,
}


def yaml_cfg(version: str, top: dict[str, Any] | None = None, **more: Any) -> str:
    """A whole file: every field of the class, most of them null."""
    values = {**SET, **more}
    lines = ["# written by hand", "language_model:"]
    for section, name in (("", "TransformerConfig"), ("model_parallel:", "ModelParallelConfig")):
        fields = releases.fields(version, name)
        lines += [section] if section else []
        lines += [f"  {key}: {shown(values.get(key))}" for key in fields]
    return (
        "\n".join(
            [*lines, *(f"{key}: {shown(value)}" for key, value in {**TOP, **(top or {})}.items())]
        )
        + "\n"
    )


def shown(value: Any) -> str:
    return "null" if value is None else str(value)


@pytest.mark.parametrize("version", RELEASES)
def test_a_whole_file_says_what_its_loader_makes_of_it(version: str) -> None:
    config = DIALECT.read(yaml_cfg(version), version=version, world_size=8)
    assert config.entry == "yaml_cfg"
    plan = bridge.lift(config)
    assert (plan.parallel.tensor, plan.parallel.pipeline, plan.parallel.data) == (2, 2, 2)
    assert (plan.batch.micro, plan.batch.global_, plan.batch.accumulation) == (2, 32, 8)
    assert config.effective["params_dtype"] == "torch.bfloat16"
    assert config.effective["accumulate_allreduce_grads_in_fp32"] is True
    assert config.effective["ffn_hidden_size"] == int(4 * 512 * 2 / 3 / 64) * 64


def test_the_loader_has_rules_of_its_own() -> None:
    config = DIALECT.read(
        yaml_cfg("0.16.0", tensor_model_parallel_size=1), version="0.16.0", world_size=2
    )
    assert config.effective["sequence_parallel"] is False
    with pytest.raises(ConfigError, match="more than 2 pipeline ranks"):
        DIALECT.read(
            yaml_cfg("0.16.0", {"num_layers_per_virtual_pipeline_stage": 1}),
            version="0.16.0",
            world_size=4,
        )


@pytest.mark.parametrize(
    ("top", "said"),
    [
        ({"global_batch_size": 33}, "global_batch_size: found 33"),
        ({"min_lr": 1.0}, "min_lr: found 1.0"),
        ({"max_position_embeddings": 8}, "max_position_embeddings: found 8"),
        ({"micro_batch_size": "two"}, "micro_batch_size: found 'two'; expected a whole number"),
        ({"seed": [1, 2]}, "seed: found [1, 2]; expected a whole number"),
        (
            {"micro_batch_sise": 2},
            "micro_batch_sise: unknown to Megatron; did you mean micro_batch_size?",
        ),
        ({"train_iters": 5, "train_samples": 5}, "train_iters: found together"),
    ],
)
def test_mistakes_are_refused(top: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        DIALECT.read(yaml_cfg("0.16.0", top), version="0.16.0", world_size=8)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("normalization", "[1, 2]", "text"),
        ("gtp_weight_remat_size", '"two"', "a whole number"),
        ("batch_p2p_comm", "3", "true or false"),
    ],
)
def test_values_of_another_type_are_refused_also_where_no_flag_sets_them(
    key: str, value: str, wanted: str
) -> None:
    text = re.sub(rf"\b{key}: .*", f"{key}: {value}", yaml_cfg("0.19.2"))
    with pytest.raises(ConfigError, match=rf"{key}: found .*; expected {wanted}"):
        DIALECT.read(text, version="0.19.2", world_size=8)


def test_fields_that_are_not_in_the_file_stop_megatron() -> None:
    text = yaml_cfg("0.9.0")
    with pytest.raises(
        ConfigError, match=r"missing .*; Megatron 0\.16\.0 stops if the file lacks a field"
    ):
        DIALECT.read(text, version="0.16.0", world_size=8)
    config = DIALECT.read(text, version="0.16.0", world_size=8, lenient=True)
    assert any("stops if the file lacks a field" in finding.message for finding in config.findings)


CONTAINER = """
_target_: megatron.training.config.container.PretrainConfigContainer
model:
  _target_: megatron.training.models.gpt.GPTModelConfig
  num_layers: 8
  hidden_size: 512
  num_attention_heads: 8
  seq_length: 256
  max_position_embeddings: 256
  tensor_model_parallel_size: 2
  activation_func: {_target_: torch.nn.functional.gelu, _call_: false}
  shared_object: {_target_: os.system, _args_: [touch FILE]}
train:
  _target_: megatron.training.config.training_config.TrainingConfig
  micro_batch_size: 2
  global_batch_size: 16
optimizer:
  _target_: megatron.core.optimizer.OptimizerConfig
  lr: 0.001
  clip_grad: 0.5
  use_distributed_optimizer: true
ddp:
  _target_: megatron.core.distributed.DistributedDataParallelConfig
  grad_reduce_in_fp32: true
mixed_precision: bf16_mixed
"""


def test_what_no_argument_stands_for_is_named_and_counts() -> None:
    more = CONTAINER.replace("bf16_mixed", "bf16_with_fp8_mixed").replace(
        "  lr: 0.001\n", "  lr: 0.001\n  own: 2\n"
    )
    config = DIALECT.read(f"{more}peft: {{rank: 8}}\n", world_size=4)
    found = {one.path: one for one in config.remarks if one.unknown}
    assert found.keys() == {"model.shared_object", "optimizer.own", "peft", "mixed_precision"}
    assert {one.effect for one in found.values()} == {Effect.NUMBERS} and found[
        "optimizer.own"
    ].change == "2"


def test_a_container_is_data(tmp_path: Path) -> None:
    target = tmp_path / "touched"
    config = DIALECT.read(CONTAINER.replace("FILE", str(target)), world_size=4)
    assert config.entry == "container" and not target.exists()
    plan = bridge.lift(config)
    assert (
        plan.parallel.tensor,
        plan.parallel.data,
        plan.batch.accumulation,
        plan.optimizer.clip,
    ) == (2, 2, 4, 0.5)
    assert (
        config.given["accumulate_allreduce_grads_in_fp32"] is True and config.given["bf16"] is True
    )
    assert any("shared_object" in finding.path for finding in config.findings)
    result = bridge.translate(config, compat.load("deepspeed"))
    assert result.config.given["train_batch_size"] == 16


@pytest.mark.parametrize(
    ("values", "ranks", "said"),
    [
        (
            {},
            1,
            "world_size: found 1, which tensor x pipeline x context parallel size does not divide",
        ),
        (
            {"tensor_model_parallel_size": 0},
            8,
            "tensor_model_parallel_size: found 0; expected a positive number",
        ),
        ({"pipeline_model_parallel_size": -2}, 8, "pipeline_model_parallel_size: found -2"),
        ({"expert_model_parallel_size": 0}, 8, "expert_model_parallel_size: found 0"),
    ],
)
def test_sizes_that_nothing_can_be_divided_by_are_refused(
    values: dict[str, Any], ranks: int, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        DIALECT.read(yaml_cfg("0.16.0", **values), version="0.16.0", world_size=ranks)


def test_a_batch_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="micro_batch_size: found 0; expected a positive number"):
        DIALECT.read(yaml_cfg("0.16.0", {"micro_batch_size": 0}), version="0.16.0", world_size=8)
