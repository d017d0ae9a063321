"""What Megatron makes otherwise of a Hugging Face model is named; what it makes alike is not."""

from __future__ import annotations

from typing import Any

import pytest

import bridge
import compat
from bridge.stack.rules import Effect, How
from bridge.translation.translate import Result

SIZES: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 128,
    "max_position_embeddings": 256,
}
LATENT: dict[str, Any] = {
    **SIZES,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 0,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "norm_topk_prob": True,
}
YARN = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 4096,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
RELEASES = ("0.16.1", "0.19.2")
each = pytest.mark.parametrize("version", RELEASES)


def to_megatron(source: dict[str, Any], version: str, stack: str = "huggingface") -> Result:
    return bridge.translate(compat.load(stack).read(source), compat.load("megatron"), version)


def changed(result: Result) -> set[str]:
    """What was said of the model and would change the numbers, but for first weights and what trains nothing forward."""
    aside = ("model.init.scaled", "world_size", "moe_router_bias_update_rate", "moe_aux_loss_coeff")
    found = (finding for finding in result.findings if finding.effect.reaches(Effect.NUMBERS))
    return {finding.path for finding in found if finding.path not in aside}


@each
def test_groups_of_experts_are_chosen_alike_where_top_k_says_so(version: str) -> None:
    """Megatron sums the best top_k // groups of each group (moe_utils.py: group_limited_topk), DeepSeek-V3 the best two."""
    same = to_megatron(LATENT, version)
    assert changed(same) == set()
    assert (
        same.config.given["moe_router_num_groups"],
        same.config.given["moe_router_group_topk"],
    ) == (4, 2)
    assert changed(to_megatron({**LATENT, "num_experts_per_tok": 2}, version)) == {
        "model.moe.group_best"
    }
    everything = {**LATENT, "topk_group": 4}
    assert changed(to_megatron(everything, version)) == set()


@each
def test_chosen_groups_without_groups_are_left_out(version: str) -> None:
    """Megatron stops at one without the other (transformer_config.py)."""
    config = {**SIZES, "num_experts": 8, "num_experts_per_tok": 2, "topk_group": 2}
    recipe = {
        "step_scheduler": {"global_batch_size": 8, "local_batch_size": 1},
        "model": {"config": config},
    }
    result = to_megatron(recipe, version, "automodel")
    assert "moe_router_group_topk" not in result.config.given
    assert "model.config.topk_group" in changed(result)


@each
@pytest.mark.parametrize(
    "source",
    [
        {**LATENT, "num_experts_per_tok": 1, "topk_group": 4},
        {**SIZES, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 1},
    ],
    ids=["sigmoid", "softmax"],
)
def test_the_weight_of_one_expert_alone_is_not_divided_by_itself(
    source: dict[str, Any], version: str
) -> None:
    """Of sigmoids Megatron divides several (topk > 1), of softmaxes it wants --moe-router-pre-softmax for one."""
    result, mixtral = to_megatron(source, version), source["model_type"] == "mixtral"
    assert ("model.moe.normalised" if mixtral else "norm_topk_prob") in changed(
        result
    )  # Mixtral has no key for it
    assert result.config.given.get("moe_router_pre_softmax", False) is mixtral


@each
def test_one_expert_whose_weight_is_not_divided_is_the_same(version: str) -> None:
    source = {**LATENT, "num_experts_per_tok": 1, "topk_group": 4, "norm_topk_prob": False}
    assert changed(to_megatron(source, version)) == set()


@each
@pytest.mark.parametrize(
    "scaling, lost",
    [
        (YARN, False),
        ({**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}, False),
        ({**YARN, "original_max_position_embeddings": 64}, True),
        ({**YARN, "beta_fast": 16}, True),
        ({key: value for key, value in YARN.items() if key != "mscale"}, True),
    ],
    ids=["usual", "weights", "length", "bounds", "one weight"],
)
def test_yarn_of_latent_attention(scaling: dict[str, Any], lost: bool, version: str) -> None:
    """Megatron's flags fix the bounds (MLATransformerConfig), and its rotated part has both weights."""
    result = to_megatron({**LATENT, "rope_scaling": scaling}, version)
    assert result.config.given["rope_type"] == "yarn"
    assert bool(changed(result)) is lost


@each
def test_heads_of_latent_attention_need_not_divide_the_hidden_width(version: str) -> None:
    """Megatron asks for --kv-channels there (transformer_config.py: __post_init__), which its latent attention does not read."""
    result = to_megatron({**LATENT, "num_attention_heads": 12, "num_key_value_heads": 12}, version)
    assert result.config.given["kv_channels"] == 5
    assert changed(result) == set()


def test_a_base_with_a_fraction_is_the_nearest_whole_one() -> None:
    """--rotary-base takes a whole number (arguments.py); bigcode/starcoder2-3b has 999999.4420358813."""
    result = to_megatron(
        {**SIZES, "model_type": "llama", "rope_theta": 999999.4420358813}, "0.19.2"
    )
    assert result.config.given["rotary_base"] == 999999
    assert ("rope_theta", How.APPROXIMATE, Effect.NUMBERS) in {
        (one.path, one.how, one.effect) for one in result.findings
    }


def test_weights_of_yarn_come_back() -> None:
    """One alone counts for latent attention's scale, not for the rotated part (modeling_rope_utils.py)."""
    source = compat.load("huggingface").read({**LATENT, "rope_scaling": YARN})
    scaling = bridge.lift(source).model.rotary.scaling
    assert (scaling.mscale, scaling.mscale_all) == (1.0, 1.0)
    assert (
        bridge.lift(
            bridge.translate(source, compat.load("huggingface")).config
        ).model.rotary.scaling
        == scaling
    )


def test_further_tokens_are_not_predicted_with_yarn() -> None:
    """Megatron refuses the pair (arguments.py); positions stay, as every token hangs on them."""
    source = {**SIZES, "model_type": "mimo", "num_nextn_predict_layers": 1, "rope_scaling": YARN}
    result = to_megatron(source, "0.19.2")
    assert (
        result.config.given["position_embedding_type"] == "yarn"
        and "mtp_num_layers" not in result.config.given
    )
    assert "num_nextn_predict_layers" in changed(result)
    latent = to_megatron({**LATENT, "num_nextn_predict_layers": 1, "rope_scaling": YARN}, "0.19.2")
    assert latent.config.given["mtp_num_layers"] == 1


@each
def test_heads_that_do_not_divide_the_hidden_width_are_as_wide_as_transformers_makes_them(
    version: str,
) -> None:
    source = {**SIZES, "hidden_size": 66}
    named = to_megatron({**source, "model_type": "llama"}, version)
    open_ = to_megatron({"model": {"config": source}}, version, "automodel")
    assert named.config.given["kv_channels"] == open_.config.given["kv_channels"] == 16
    assert "model.attention.head_size" not in changed(named) | changed(open_)
