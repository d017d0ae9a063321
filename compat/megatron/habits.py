"""What Megatron does alike in all runs, and the flags for documents, which change some of it."""

from __future__ import annotations

from bridge.plan.equality import DROPOUTS
from bridge.stack.rules import HABITS, Context, Effect, Group, Habit, convert, habits
from compat.megatron.rules.rotary import TYPE

MASKING = "dataloader_inter_document_masking"
PACKS = ("sft", MASKING)
"""Flags of data sets that keep documents apart by themselves; only the first masks the loss."""
RESET = "reset_attention_mask"
ATTENTION, ORDINALS, BOUNDARIES = (
    HABITS + name for name in ("attention", "positions", "boundaries")
)
DATASET = (
    "core/datasets/gpt_dataset.py: _get_ltor_masks_and_position_ids, inter_document_masking; "
    "training/datasets/sft_dataset.py"
)
LAYERS = (
    *("transformer_impl", "create_attention_mask_in_dataloader", "masked_softmax_fusion"),
    *("bf16", "fp16", "seq_length", "micro_batch_size", "num_attention_heads"),
    *("tensor_model_parallel_size", "softmax_type", "window_size", "use_legacy_models"),
)
"""Flags that decide whether attention uses the data set's mask."""


def _fuses_softmax(values: Group) -> bool:
    """Return whether local attention may take the fused kernel of a causal softmax, which makes its
    own mask (core/fusions/fused_softmax.py: is_kernel_available, forward_fused_softmax).

    An unknown size counts as one that the kernel takes.
    """
    plain = values.get("softmax_type") in (None, "vanilla")
    half = values.get("bf16") or values.get("fp16")
    if not (values.get("masked_softmax_fusion") and half and plain):
        return False
    # The kernel of legacy models takes longer sequences (legacy/model/fused_softmax.py).
    longest = 16384 if values.get("use_legacy_models") else 4096
    length, heads = values.get("seq_length"), values.get("num_attention_heads")
    if length is not None and not (16 < length <= longest and length % 4 == 0):
        return False
    batch, tensor = values.get("micro_batch_size"), values.get("tensor_model_parallel_size") or 1
    return heads is None or batch is None or batch * heads // tensor % 4 == 0


def uses_mask(values: Group) -> bool:
    """Return whether attention uses the mask that the data set makes.

    The layers of Transformer Engine have a causal mask of their own (gpt_layer_specs.py:
    attn_mask_type; extensions/transformer_engine.py: TEDotProductAttention), and a window replaces
    the mask of local layers (fused_softmax.py: forward_torch_softmax).
    """
    return (
        values.get("transformer_impl") == "local"
        and values.get("create_attention_mask_in_dataloader") is not False
        and values.get("window_size") is None
        and not _fuses_softmax(values)
    )


def _read_attention(values: Group, context: Context) -> Group:
    apart = any(map(values.get, PACKS)) or (values.get(RESET) and uses_mask(values))
    return {ATTENTION: "document" if apart else "sequence"}


def _write_attention(values: Group, context: Context) -> Group:
    if values.get(ATTENTION) != "document":
        return {}
    return {MASKING if context.since("0.19.0") else RESET: True}


def _read_positions(values: Group, context: Context) -> Group:
    # Rotary positions count from the start of the sequence whatever the data set says, except in
    # packed sequences.
    reset = values.get("reset_position_ids") and values.get(TYPE) not in UNCOUNTED
    return {ORDINALS: "document" if reset or any(map(values.get, PACKS)) else "sequence"}


UNCOUNTED = ("rope", "yarn", "relative", "none")
"""Kinds of positions that do not use the data set's (gpt_model.py: embedding, rotary_pos_emb)."""
DOCUMENTS = (
    convert(
        (RESET, MASKING),
        ATTENTION,
        _read_attention,
        _write_attention,
        sees=("sft", *LAYERS),
        lossy="Megatron before 0.19 keeps documents apart in attention only with --reset-attention-mask, "
        "--transformer-impl local and --no-masked-softmax-fusion",
        note="Megatron's tokens attend to earlier documents of their sequence, unless the data set gives "
        "the boundaries of documents, or its mask is reset and the layers use it",
        source=f"{DATASET}; core/extensions/transformer_engine.py; core/fusions/fused_softmax.py",
    ),
    convert(
        "reset_position_ids",
        ORDINALS,
        _read_positions,
        lambda values, context: (
            {"reset_position_ids": True} if values.get(ORDINALS) == "document" else {}
        ),
        sees=(*PACKS, TYPE),
        note="Megatron counts learned positions over all documents of a sequence unless they are reset, "
        "and rotary positions always",
        source=f"{DATASET}; core/models/gpt/gpt_model.py: embedding",
    ),
    convert(
        "eod_mask_loss",
        BOUNDARIES,
        lambda values, context: {
            BOUNDARIES: "masked" if values.get("eod_mask_loss") or values.get("sft") else "trained"
        },
        lambda values, context: (
            {"eod_mask_loss": True} if values.get(BOUNDARIES) == "masked" else {}
        ),
        sees=("sft",),
        note="Megatron trains the first token of a document on the document before it, unless the loss "
        "is masked at ends of documents",
        source=DATASET,
    ),
)

DROPS = ("hidden_dropout", "attention_dropout")


MUON = HABITS + "muon_qkv"


def _read_muon(values: Group, context: Context) -> Group:
    if "muon" not in str(values.get("optimizer")):
        return {}
    return {MUON: "whole" if values.get("muon_split_qkv") is False else "parts"}


SWITCHES = (
    convert(
        "muon_split_qkv",
        MUON,
        _read_muon,
        lambda values, context: (
            {"muon_split_qkv": False}
            if values.get(MUON) == "whole" and "muon" in (values.get("optimizer.name") or "")
            else {}
        ),
        sees=("optimizer", "optimizer.name"),
        note="Megatron's Muon takes queries, keys and values one by one unless told not to",
        source="core/optimizer/emerging_optimizers.py: split_qkv",
    ),
    convert(
        "data_parallel_random_init",
        HABITS + "dropout_ranks",
        lambda values, context: {
            HABITS + "dropout_ranks": "apart"
            if values.get("data_parallel_random_init") and any(map(values.get, DROPS))
            else "alike"
        },
        lambda values, context: (
            {"data_parallel_random_init": True}
            if values.get(HABITS + "dropout_ranks") == "apart" and any(map(values.get, DROPOUTS))
            else {}
        ),
        sees=(*DROPS, *DROPOUTS),
        note="Megatron's data ranks have one seed unless it is shifted by rank",
        source="training/initialize.py: _set_random_seed",
    ),
    convert(
        "mtp_loss_scaling_factor",
        HABITS + "mtp_loss",
        lambda values, context: (
            {HABITS + "mtp_loss": values.get("mtp_loss_scaling_factor")}
            if values.get("mtp_num_layers")
            else {}
        ),
        lambda values, context: (
            {"mtp_loss_scaling_factor": values.get(HABITS + "mtp_loss")}
            if values.get("model.predicted")
            else {}
        ),
        sees=("mtp_num_layers", "model.predicted"),
        effect=Effect.NUMBERS,
        note="Megatron's loss of further predicted tokens has a factor of 0.1 unless it is set",
        source="core/transformer/multi_token_prediction.py: mtp_loss_scaling_factor",
    ),
)

RULES = (
    *DOCUMENTS,
    *SWITCHES,
    *habits(
        {
            # A run with the check off is Megatron's own; no other stack has the check.
            "nonfinite": Habit(
                "stop",
                "Megatron stops at a loss or gradient that is not a finite number, unless its check is off",
                "training/config/resilience_config.py: check_for_nan_in_loss",
            ),
            "clip_scope": Habit(
                "model",
                "Megatron bounds the norm of the whole model's gradients",
                "core/optimizer/clip_grads.py: get_grad_norm_fp32",
            ),
            "first_lr_step": Habit(
                0,
                "Megatron's first update has the rate at the start of the schedule",
                "core/optimizer_param_scheduler.py: step, called behind the update (training/training.py: train_step)",
            ),
            "router_losses": Habit(
                "mean",
                "Megatron takes the mean of a router's losses over data ranks and microbatches",
                "core/pipeline_parallel/schedules.py: MoEAuxLossAutoScaler.set_loss_scale",
            ),
            "balance_scope": Habit(
                "sequence",
                "Megatron counts the tokens of an expert over all ranks that split a sequence",
                "core/transformer/moe/moe_utils.py: get_tokens_per_expert_and_token_count over tp_cp_group",
            ),
            "overflow_steps": Habit(
                "skipped",
                "in Megatron, a step that an overflow leaves out does not count",
                "training/training.py: opt_param_scheduler.step",
            ),
            "inverse_sqrt": Habit(
                "samples",
                "Megatron counts the inverse square root in samples, and without warmup from the first sample",
                "core/optimizer_param_scheduler.py: get_lr",
            ),
            "embedding_lr": Habit(
                "words",
                "Megatron's decoupled learning rate is that of the embedding of words, not of positions",
                "core/models/common/language_module/language_module.py: is_embedding_or_output_parameter",
            ),
            "factored_start": Habit(
                "shared",
                "Megatron's warmup starts at one rate for all parameters, whatever peak they have",
                "core/optimizer_param_scheduler.py: get_lr, init_lr",
            ),
            "output_lr": Habit(
                "weight",
                "Megatron's decoupled learning rate is that of the output layer's weight, not of the final norm",
                "core/models/common/language_module/language_module.py: is_embedding_or_output_parameter",
            ),
        }
    ),
)
