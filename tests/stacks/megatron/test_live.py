"""Live config objects of the installed Megatron-Core: read, translated and made again."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import bridge
import compat
from bridge.stack.rules import Effect

core = pytest.importorskip("megatron.core")
torch = pytest.importorskip("torch")

MEGATRON = compat.load("megatron")
INSTALLED = str(core.__version__)

GIVEN: tuple[dict[str, Any], ...] = (
    {},
    {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "bf16": True,
        "params_dtype": torch.bfloat16,
    },
    {
        "pipeline_model_parallel_size": 4,
        "virtual_pipeline_model_parallel_size": 2,
        "pipeline_dtype": torch.float32,
        "overlap_p2p_comm": True,
        "microbatch_group_size_per_vp_stage": 8,
    },
    {
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
        "tensor_model_parallel_size": 2,
    },
)


def fields(real: Any) -> dict[str, Any]:
    return {
        field.name: getattr(real, field.name)
        for field in dataclasses.fields(core.ModelParallelConfig)
    }


@pytest.mark.parametrize("given", GIVEN)
def test_an_object_comes_back_equal(given: dict[str, Any]) -> None:
    real = core.ModelParallelConfig(**given)
    config = MEGATRON.read(real)
    assert config.version == INSTALLED
    assert set(config.given) == set(given)
    again = config.to_object()
    assert type(again) is type(real)
    assert fields(again) == fields(real)


def test_microbatches_that_keep_their_activations_are_part_of_the_plan() -> None:
    real = core.ModelParallelConfig(num_microbatches_with_partial_activation_checkpoints=2)
    assert bridge.lift(MEGATRON.read(real)).recompute.kept_microbatches == 2


def test_callables_are_carried() -> None:
    def scale(loss: Any) -> Any:
        return loss

    real = core.ModelParallelConfig(grad_scale_func=scale, finalize_model_grads_func=print)
    config = MEGATRON.read(real)
    assert config.opaque == {"grad_scale_func": scale, "finalize_model_grads_func": print}
    assert config.to_object().grad_scale_func is scale
    translated = bridge.translate(config, compat.load("deepspeed"), world_size=1)
    named = {finding.path for finding in translated.findings}
    assert {"grad_scale_func", "finalize_model_grads_func"} <= named


def test_a_transformer_config_keeps_its_layout() -> None:
    from megatron.core.transformer import TransformerConfig

    real = TransformerConfig(
        num_layers=8,
        hidden_size=64,
        num_attention_heads=8,
        num_query_groups=4,
        pipeline_model_parallel_size=2,
        pipeline_dtype=torch.float32,
        recompute_granularity="full",
        recompute_method="uniform",
        recompute_num_layers=1,
    )
    plan = bridge.lift(MEGATRON.read(real))
    assert (plan.model.layers, plan.model.hidden, plan.model.kv_heads) == (8, 64, 4)
    assert (plan.parallel.pipeline, plan.recompute.granularity, plan.recompute.layers) == (
        2,
        "full",
        1,
    )


def test_a_field_of_another_class_is_named_and_counts() -> None:
    @dataclasses.dataclass
    class Own(core.ModelParallelConfig):  # type: ignore[name-defined,misc]
        own_coefficient: float = 0.1

    (found,) = MEGATRON.read(Own()).remarks
    assert (found.path, found.change, found.effect, found.unknown) == (
        "own_coefficient",
        "0.1",
        Effect.NUMBERS,
        True,
    )
    # Fields of another release count only if somebody set them.
    assert not MEGATRON.read(core.ModelParallelConfig(), "0.14.0").remarks


def test_another_release_than_the_installed_one_names_both() -> None:
    config = MEGATRON.read(["--bf16", "--micro-batch-size", "1"], "0.13.0", 1)
    with pytest.raises(bridge.VersionError, match=rf"{INSTALLED}.*0\.13\.0"):
        config.to_object()


def test_flags_make_the_real_object() -> None:
    flags = "--num-layers 8 --hidden-size 64 --num-attention-heads 8 --seq-length 32 --max-position-embeddings 32"
    flags += " --micro-batch-size 1 --bf16 --tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer"
    config: Any = MEGATRON.read(flags.split(), INSTALLED, 4)
    real = config.to_object()
    assert (real.tensor_model_parallel_size, real.sequence_parallel, real.params_dtype) == (
        2,
        True,
        torch.bfloat16,
    )
    for name, value in fields(real).items():
        assert str(value) == str(config.model_parallel[name]), name
