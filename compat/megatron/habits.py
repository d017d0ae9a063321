"""What Megatron does alike in all runs, and the flags for documents, which change some of it."""

from __future__ import annotations

from bridge.plan.equality import DROPOUTS
from bridge.stack.rules import HABITS, Context, Effect, Group, Habit, Rule, convert, habits

PACKS = ("sft", "dataloader_inter_document_masking")
"""Flags of data sets that keep documents apart by themselves; only the first masks the loss."""
DATASET = (
    "core/datasets/gpt_dataset.py: _get_ltor_masks_and_position_ids, inter_document_masking; "
    "training/datasets/sft_dataset.py"
)


def _apart(
    flags: tuple[str, ...],
    name: str,
    apart: str,
    together: str,
    note: str,
    packs: tuple[str, ...] = PACKS,
) -> Rule:
    """Return the rule for flags of which each keeps the documents of a sequence apart in one
    respect. The first is written.
    """
    ours = HABITS + name

    def read(values: Group, context: Context) -> Group:
        on = any(values.get(path) for path in (*flags, *packs))
        return {ours: apart if on else together}

    return convert(
        flags,
        ours,
        read,
        lambda values, context: {flags[0]: True} if values.get(ours) == apart else {},
        sees=tuple(path for path in packs if path not in flags),
        note=note,
        source=DATASET,
    )


DOCUMENTS = (
    _apart(
        # The data set's own masking moves the positions too, which then make no difference.
        ("reset_attention_mask", PACKS[1]),
        "attention",
        "document",
        "sequence",
        "Megatron's tokens attend to earlier documents of their sequence unless the mask is reset",
    ),
    _apart(
        ("reset_position_ids",),
        "positions",
        "document",
        "sequence",
        "Megatron counts positions over all documents of a sequence unless they are reset",
    ),
    _apart(
        ("eod_mask_loss",),
        "boundaries",
        "masked",
        "trained",
        "Megatron trains the first token of a document on the document before it, unless the loss "
        "is masked at ends of documents",
        ("sft",),
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
            "output_lr": Habit(
                "weight",
                "Megatron's decoupled learning rate is that of the output layer's weight, not of the final norm",
                "core/models/common/language_module/language_module.py: is_embedding_or_output_parameter",
            ),
        }
    ),
)
