"""Keys of model configs that no family's meaning needs, by what a model of transformers does with
them.
"""

from __future__ import annotations

from collections.abc import Mapping

from bridge.stack.effects import Use

_READ: Mapping[Use, str] = {
    Use.UNREAD: (
        "_name_or_path name_or_path architectures auto_map transformers_version tokenizer_class task_specific_params "
        "finetuning_task problem_type prefix id2label label2id return_dict use_cache is_decoder is_encoder_decoder "
        "add_cross_attention cross_attention_hidden_size tie_encoder_decoder decoder_start_token_id bos_token_id eos_token_id "
        "sep_token_id pad_token_id output_attentions output_hidden_states tf_legacy_loss torchscript pruned_heads "
        "classifier_dropout summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj "
        "num_logits_to_keep use_bfloat16"
    ),
    Use.PLACES: "gradient_checkpointing moe_shared_expert_overlap",
    Use.FORM: (
        "attn_implementation _attn_implementation experts_implementation chunk_size_feed_forward reorder_and_upcast_attn "
        "attention_softmax_in_fp32 scale_attention_softmax_in_fp32 slow_but_exact use_mamba_kernels mamba_ssm_cache_dtype "
        "chunk_size residual_in_fp32"
    ),
}
USES: Mapping[str, Use] = {key: use for use, keys in _READ.items() for key in keys.split()}
"""Keys with a known use that changes no more than rounding. Tokens by number are read by generation
and by data, and `pad_token_id` also by the embedding, for samples that contain this token.
"""
