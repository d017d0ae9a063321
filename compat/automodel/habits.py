"""What AutoModel does alike in all runs. Its data sets decide what documents have to do with each other."""

from __future__ import annotations

from bridge.stack.rules import Habit, Since, habits
from compat.automodel.rules.model import NAMED, family

RULES = habits(
    {
        "adapter_init": Habit(
            "zero",
            "AutoModel's adapters add nothing at first: their second matrix is zero",
            "components/_peft/lora.py: init_lora_weights",
        ),
        "dropout_ranks": Habit(
            "apart",
            "AutoModel shifts the seed by rank",
            "recipes/llm/train_ft.py: StatefulRNG(ranked=True)",
        ),
        "clip_scope": Habit(
            "model",
            "AutoModel bounds the norm of the whole model's gradients",
            "components/training/utils.py: scale_grads_and_clip_grad_norm",
        ),
        "first_lr_step": Habit(
            0,
            "AutoModel's first update has the rate at the start of the schedule",
            "components/optim/scheduler.py: step, called behind the update (recipes/llm/train_ft.py)",
        ),
        "balance_scope": Habit(
            "sequence",
            "AutoModel's own code counts the tokens of an expert over all ranks that split a sequence",
            "components/moe/layers.py: Gate._compute_aux_loss",
        ),
        "overflow_steps": Habit(
            "taken",
            "AutoModel updates the weights after an overflow too, for it looks for none",
            "recipes/llm/train_ft.py: _run_train_optim_step",
        ),
        "router_losses": Habit(
            Since("0.5.0.post20260822", "mean", "sum"),
            "AutoModel takes the mean of a router's loss over data ranks and microbatches since 0.5.0.post20260822",
            "recipes/base_recipe.py: _set_moe_aux_loss_backward_scale; recipes/llm/train_ft.py before",
        ),
        "nonfinite": Habit(
            "continue",
            "AutoModel does not check for losses that are no finite number",
            "components/distributed/config.py: check_for_nan_in_grad has no effect",
        ),
        "mtp_loss": Habit(
            lambda values: 0.0 if family(values).name else 0.1,
            "AutoModel's loss of further predicted tokens has a factor of 0.1 in models that have one;"
            " those of transformers' families predict further tokens in generation alone",
            "components/models/common/mtp: loss_scaling_factor; transformers: modeling_layers.py, MtpModel",
            " ".join(NAMED),
        ),
        "inverse_sqrt": Habit(
            "steps",
            "AutoModel counts the inverse square root in steps, and without warmup from the first step",
            "components/optim/scheduler.py: get_lr",
        ),
        "factored_minimum": Habit(
            "scaled",
            "in AutoModel, the factor of a group's learning rate applies to the minimum, too",
            "components/optim/scheduler.py: step, lr_mult",
        ),
        "factored_start": Habit(
            "scaled",
            "in AutoModel, the factor of a group's learning rate applies to the start of the warmup, too",
            "components/optim/scheduler.py: step, lr_mult",
        ),
        "embedding_lr": Habit(
            "words",
            "AutoModel's factors are for parameters by name",
            "components/optim/optimizer.py: ParamGroupOverride",
        ),
        "output_lr": Habit(
            "weight",
            "AutoModel's factors are for parameters by name",
            "components/optim/optimizer.py: ParamGroupOverride",
        ),
    }
)
