"""Checks and derivations for experts, checkpoint formats, data sources and determinism."""

from __future__ import annotations

from typing import Any

from bridge.stack.checks import above, equals, excludes, needs, on
from compat.megatron.arguments.batch import SPLIT_PATHS
from compat.megatron.arguments.namespace import Change, Namespace, Step
from compat.megatron.arguments.steps import (
    absent,
    check,
    compute_argument,
    derive,
    inherit,
    under,
    when,
)

EXPERTS = "validate_args: experts"
FORMATS = "validate_args: checkpoint formats"
DATA = "validate_args: data sources"
FIM = "validate_args: fill in the middle"
DETERMINISM = "validate_args: deterministic mode"
FIM_TOKENS = (
    "fim_prefix_token",
    "fim_middle_token",
    "fim_suffix_token",
    "fim_pad_token",
    "fim_eod_token",
)


def _unwrap(*names: str) -> Change:
    """Return a change that replaces each list of one element by the element."""

    def change(a: Namespace) -> None:
        for name in names:
            value: Any = getattr(a, name)
            if isinstance(value, list) and len(value) == 1:
                setattr(a, name, value[0])

    return change


def _several_sources(a: Namespace) -> bool:
    """Whether more than one source of data is given; the paths of all splits are one source."""
    by_split = [getattr(a, name) for name in SPLIT_PATHS]
    sources = [source for source in (a.mock_data, a.data_path, any(by_split)) if source]
    return len(sources) > 1


_fim = under(FIM, on("fim_data"), "0.16.0")


EXPERT_STEPS: tuple[Step, ...] = (
    derive(EXPERTS, when(lambda a: a.num_experts == 0, num_experts=None)),
    check(
        EXPERTS,
        lambda a: a.num_experts is not None and a.spec is not None,
        "spec: found {spec} with experts; this release builds experts with its own spec; drop --spec",
        until="0.16.0",
    ),
    # Since 0.13, TransformerConfig refuses a width of experts in a model without experts.
    derive(
        EXPERTS, inherit("moe_ffn_hidden_size", "ffn_hidden_size"), since="0.10.0", until="0.13.0"
    ),
    derive(
        EXPERTS,
        compute_argument(
            "moe_ffn_hidden_size",
            lambda a: a.ffn_hidden_size,
            lambda a: a.num_experts is not None and absent("moe_ffn_hidden_size")(a),
        ),
        since="0.13.0",
    ),
    excludes(
        above("context_parallel_size", 1),
        "use_legacy_models",
        "validate_args: context parallelism",
        "expected 1",
        until="0.18.0",
    ),
    check(
        EXPERTS,
        lambda a: a.expert_model_parallel_size > 1 and a.num_experts is None,
        "expert_model_parallel_size: found {expert_model_parallel_size} without experts; add --num-experts",
        # A config without num_layers leaves the model open, and the number of experts with it.
        needs=("num_layers",),
    ),
    check(
        EXPERTS,
        lambda a: (
            a.expert_model_parallel_size > 1
            and a.num_experts is not None
            and a.num_experts % a.expert_model_parallel_size != 0
        ),
        "num_experts: found {num_experts}; expected a multiple of expert_model_parallel_size ({expert_model_parallel_size})",
    ),
    excludes(
        above("expert_model_parallel_size", 1),
        "fp16",
        EXPERTS,
        "this release expects bf16",
        until="0.16.0",
    ),
    # Since 0.14 both take several values, one for each kind of loss.
    derive(
        EXPERTS, _unwrap("moe_router_load_balancing_type", "moe_aux_loss_coeff"), since="0.14.0"
    ),
    check(
        FORMATS,
        lambda a: a.use_dist_ckpt and a.use_legacy_models,
        "ckpt_format: found {ckpt_format} with use_legacy_models; expected torch",
        until="0.18.0",
    ),
    needs(
        equals("ckpt_format", "torch_dcp"),
        "use_torch_fsdp2",
        FORMATS,
        "choose another format",
        since="0.12.0",
    ),
    check(
        FORMATS,
        lambda a: (
            a.ckpt_format == "torch_dcp"
            and max(a.tensor_model_parallel_size, a.encoder_tensor_model_parallel_size or 0) > 1
        ),
        "ckpt_format: found torch_dcp with tensor_model_parallel_size {tensor_model_parallel_size}; expected 1",
        since="0.12.0",
    ),
    check(
        FORMATS,
        lambda a: (
            a.ckpt_format == "torch_dcp"
            and max(a.pipeline_model_parallel_size, a.encoder_pipeline_model_parallel_size or 0) > 1
        ),
        "ckpt_format: found torch_dcp with pipeline_model_parallel_size {pipeline_model_parallel_size}; expected 1",
        since="0.12.0",
    ),
    needs(
        equals("ckpt_format", "fsdp_dtensor"),
        "use_megatron_fsdp",
        FORMATS,
        "add --use-megatron-fsdp, or choose another format",
        since="0.14.0",
    ),
    check(
        DATA,
        _several_sources,
        "data_path: found more than one source of data; keep one of mock_data, data_path, and the paths for each split"
        " (train_data_path, ...)",
    ),
    check(
        "validate_args: rank order",
        lambda a: (
            a.use_tp_pp_dp_mapping and a.context_parallel_size * a.expert_model_parallel_size > 1
        ),
        "use_tp_pp_dp_mapping: found with context or expert parallelism; this release expects both sizes to be 1",
        until="0.11.0",
    ),
    _fim(lambda a: a.mock_data, "fim_data: found with mock_data; drop one of them"),
    excludes(
        "fim_data",
        "legacy_tokenizer",
        FIM,
        "drop --legacy-tokenizer",
        since="0.16.0",
        until="0.17.0",
    ),
    _fim(
        lambda a: not a.fim_rate or not a.fim_spm_rate,
        "fim_rate: found {fim_rate}, and fim_spm_rate {fim_spm_rate}; fim_data expects both",
    ),
    _fim(
        lambda a: any(getattr(a, name) is None for name in FIM_TOKENS),
        "fim_prefix_token: fim_data expects all of its special tokens; add those that are missing among "
        + ", ".join(FIM_TOKENS),
    ),
    check(
        "validate_args: cross entropy",
        lambda a: a.cross_entropy_loss_fusion and a.cross_entropy_fusion_impl == "te",
        "cross_entropy_fusion_impl: found te, which this release no longer supports; set --cross-entropy-fusion-impl native",
        since="0.18.2",  # for "stability issues", as its message says
    ),
    check(
        DETERMINISM,
        lambda a: a.deterministic_mode and a.use_flash_attn,
        "deterministic_mode: found with use_flash_attn, which is not deterministic in this release; drop one of them",
        until="0.19.0",
    ),
    check(
        DETERMINISM,
        lambda a: a.deterministic_mode and a.cross_entropy_loss_fusion,
        "deterministic_mode: found with cross_entropy_loss_fusion, which is not deterministic; drop one of them",
    ),
    check(
        DETERMINISM,
        lambda a: a.deterministic_mode and a.tp_comm_overlap,
        "deterministic_mode: found with tp_comm_overlap, which is not deterministic; drop one of them",
        since="0.19.0",
    ),
    derive(
        "validate_args: attention softmax",
        when(lambda a: a.apply_query_key_layer_scaling, attention_softmax_in_fp32=True),
    ),
)
