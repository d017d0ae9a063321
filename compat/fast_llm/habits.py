"""What Fast-LLM does alike in all runs, by release."""

from __future__ import annotations

from bridge.stack.rules import HABITS, Context, Effect, Group, Habit, Since, convert, habits
from compat.fast_llm.rules import learning_rate

CROSSES, APART = "batch.cross_document_attention", "0.4.0"


def _read(values: Group, context: Context) -> Group:
    apart = context.since(APART) or values.get(CROSSES) is False
    scope = "document" if apart else "sequence"
    return {HABITS + "attention": scope, HABITS + "positions": scope}


DOCUMENTS = convert(
    CROSSES,
    (HABITS + "attention", HABITS + "positions"),
    _read,
    lambda values, context: (
        {CROSSES: False} if values.get(HABITS + "attention") == "document" else {}
    ),
    effect=Effect.NUMBERS,
    note="Fast-LLM keeps the documents of a sequence apart, since 0.4.0 always and before on request",
    source="layers/attention/attention.py: document_mask; models/gpt/config.py before 0.4.0",
)

RULES = (
    DOCUMENTS,
    *habits(
        {
            "boundaries": Habit(
                Since(APART, "masked", "trained"),
                "Fast-LLM leaves the first token of each document out of the loss since 0.4.0",
                "data/document/language_model.py: _set_target_inputs",
            ),
            "factored_minimum": Habit(
                "scaled",
                "in Fast-LLM, the factor of a layer's learning rate applies to the minimum, too",
                "engine/optimizer/optimizer.py: step, lr_scale",
            ),
            "factored_start": Habit(
                "scaled",
                "in Fast-LLM, the factor of a layer's learning rate applies to the start of the warmup, too",
                "engine/optimizer/optimizer.py: step, lr_scale",
            ),
            "adapter_init": Habit(
                "weights",
                "Fast-LLM draws both matrices of an adapter like the weights of its layer",
                "layers/common/peft/lora.py: init_method",
            ),
            "adapter_dropout": Habit(
                "input",
                "Fast-LLM drops the input of an adapter",
                "layers/common/peft/lora.py: forward_only",
            ),
            "dropout_ranks": Habit(
                "apart",
                "Fast-LLM shifts the seed by data rank",
                "engine/distributed/distributed.py: dp_seed_shift",
            ),
            "clip_scope": Habit(
                "model",
                "Fast-LLM bounds the norm of the whole model's gradients",
                "engine/optimizer/optimizer.py: _clip_grad_norm",
            ),
            "first_lr_step": Habit(
                learning_rate.first_lr_step,
                "Fast-LLM counts an update before it takes the rate, so that the first one has the rate of step 1",
                "engine/optimizer/optimizer.py: step",
                learning_rate.TEXT,
            ),
            "balance_scope": Habit(
                "rank",
                "Fast-LLM adds a balancing loss of each rank's part of a sequence, which is no loss of the whole",
                "layers/decoder/mlp/mixture_of_experts.py: _topk_routing",
            ),
            "overflow_steps": Habit(
                "skipped",
                "in Fast-LLM, a step that an overflow leaves out does not count",
                "engine/optimizer/optimizer.py: step",
            ),
            "nonfinite": Habit(
                "continue",
                "Fast-LLM counts losses that are no finite number, and continues",
                "engine/training/trainer.py: nan_iters",
            ),
            "mtp_loss": Habit(
                1.0,
                "Fast-LLM adds the losses of further predicted tokens in full",
                "layers/language_model/head.py: loss_coefficient",
            ),
        }
    ),
)
