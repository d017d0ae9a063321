"""Small models of translated configs give the logits of transformers: on Megatron-Core, and dense ones on the native engine.

The whole of it, over real configs, is `python -m tests.engine.logits ROWS.jsonl`.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

if find_spec("megatron") is None or find_spec("transformers") is None:
    pytest.skip("Megatron-Core or transformers is not installed", allow_module_level=True)

import torch

import bridge.engine
from bridge.engine.compiling import disable_compile
from bridge.engine.models.dense import Dense
from bridge.engine.models.gpt import mean_cross_entropy
from bridge.errors import ConfigError
from bridge.plan.model import Model
from bridge.plan.plan import Plan
from compat.megatron.runtime.cpu import quiet
from tests.engine import logits

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
SIZES: dict[str, Any] = {
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "head_dim": 8,
    "norm_topk_prob": True,
}
ON_MEGATRON: tuple[dict[str, Any], ...] = (
    {"model_type": "llama", "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 8192}},
    {"model_type": "gemma", "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True},
    {"model_type": "qwen3_moe", **EXPERTS, "norm_topk_prob": True},
    {"model_type": "olmoe", "num_experts": 8, "num_experts_per_tok": 2, "head_dim": None},
    {
        "model_type": "deepseek_v3",
        **LATENT,
        "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
)
NATIVE: tuple[dict[str, Any], ...] = (
    {
        "model_type": "llama",
        "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 64},
        "attention_bias": True,
    },
    {"model_type": "qwen3", "rope_scaling": {**YARN, "attention_factor": 1.3}},
    {"model_type": "mistral", "sliding_window": 7, "head_dim": 24},
    {
        "model_type": "nemotron",
        "hidden_act": "relu2",
        "partial_rotary_factor": 0.5,
        "norm_eps": 1e-4,
    },
    {
        "model_type": "gemma2",
        "sliding_window": 7,
        "attn_logit_softcapping": 5.0,
        "query_pre_attn_scalar": 9,
    },
    {
        "model_type": "gemma3_text",
        "sliding_window": 7,
        "rope_local_base_freq": 100.0,
        "tie_word_embeddings": True,
    },
    {"model_type": "olmo2", "head_dim": None},
)
type_of = lambda config: config["model_type"]  # noqa: E731 - an id is a function


@pytest.fixture(scope="module")
def megatron() -> Iterator[None]:
    with disable_compile(), quiet(), logits.alone():
        yield


def config(own: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in {**SIZES, **own}.items() if value is not None}


@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize("own", ON_MEGATRON, ids=type_of)
def test_megatrons_logits_are_those_of_transformers(own: dict[str, Any]) -> None:
    kind, told = logits.answer(config(own))
    assert kind == "equal", told


@pytest.mark.usefixtures("megatron")
def test_what_megatron_lacks_is_announced() -> None:
    """Of one expert alone its router does not divide the weight by itself."""
    kind, told = logits.answer(
        config({"model_type": "deepseek_v3", **LATENT, "num_experts_per_tok": 1, "topk_group": 4})
    )
    assert kind == "announced" and "norm_topk_prob" in told


@pytest.mark.parametrize("own", NATIVE, ids=type_of)
def test_native_logits_are_those_of_transformers(own: dict[str, Any]) -> None:
    kind, told = logits.native_answer(config(own))
    assert kind == "equal", told


@pytest.mark.parametrize("own", NATIVE, ids=type_of)
def test_the_native_model_has_the_parameters_that_the_layout_counts(own: dict[str, Any]) -> None:
    model = Dense(logits.translated(config(own)).plan.model)
    counted = {
        name: shape
        for layer in model.architecture.indices
        for part in model.architecture.parts(layer)
        for name, shape in part.shapes.items()
    }
    assert {name: tuple(weight.shape) for name, weight in model.named_parameters()} == counted


MODEL: dict[str, Any] = {
    "model.layers": 2,
    "model.hidden": 32,
    "model.heads": 4,
    "model.kv_heads": 2,
    "model.ffn": 48,
    "model.vocab": 64,
    "model.attention.window": 5,
    "model.mlp.gated": True,
    "model.norm.kind": "rms",
    "model.rotary.base": 500.0,
}
RUN = {
    "batch.micro": 2,
    "batch.global_": 4,
    "optimizer.name": "sgd",
    "optimizer.lr": 0.3,
    "precision.compute": "fp64",
}


NORMED = {"model.attention.norm": "head"}


def losses(rank: int, world: int, model: dict[str, Any], values: dict[str, Any]) -> list[float]:
    """Three steps of the native model on the engine."""
    own = Dense(Plan.of({**MODEL, **model}).model).double()
    engine = bridge.engine.initialize(own, Plan.of({**RUN, **values}), mean_cross_entropy)
    found = []
    for step in range(3):
        tokens = torch.randint(0, 64, (4, 9), generator=torch.Generator().manual_seed(step))
        parts = (tokens[:2], tokens[2:])
        found.append(
            float(engine.train_batch(iter([(part[:, :-1], part[:, 1:]) for part in parts])))
        )
    return found


@pytest.mark.parametrize(
    "model, layout",
    [
        ({}, {"parallel.tensor": 2}),
        ({}, {"parallel.pipeline": 2}),
        (NORMED, {"parallel.pipeline": 2}),
    ],
)
def test_the_native_model_trains_alike_in_every_layout(
    run: Any, model: dict[str, Any], layout: dict[str, Any]
) -> None:
    alone = losses(0, 1, model, {})
    assert alone[2] != alone[0]
    for found in run(2, losses, model, layout):
        assert found == pytest.approx(alone, abs=1e-9)


def test_norms_of_heads_are_not_split_over_tensor_ranks() -> None:
    with pytest.raises(ConfigError, match=r"model\.attention\.norm: this norm needs all heads"):
        Dense(Plan.of({**MODEL, **NORMED}).model).tensor_plan(2)


def test_what_the_native_model_has_not_got_is_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"model\.attention\.sinks: the engine's dense model does not support this setting",
    ):
        Dense(Model.model_validate({"experts": 4, "attention": {"sinks": True}}))
