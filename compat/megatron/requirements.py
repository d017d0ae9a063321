"""Arguments without which Megatron's parser or its training loop does not start."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bridge.stack.requirements import Need

REFUSED = "Megatron refuses to start without this setting"
CHECKPOINT = "arguments.py: load_args_from_checkpoint"


def _sizes_from_checkpoint(settings: Mapping[str, Any]) -> bool:
    """Whether the sizes of the model come from the checkpoint."""
    return bool(settings.get("use_checkpoint_args"))


def _idle(settings: Mapping[str, Any]) -> bool:
    """Whether the run only evaluates."""
    return bool(settings.get("skip_train"))


VALIDATE = "training/arguments.py: validate_args"
NEEDS = (
    Need(("micro_batch_size",), REFUSED, VALIDATE),
    # Each letter of a hybrid pattern is a layer, so the pattern gives their number.
    Need(
        ("num_layers", "encoder_num_layers"),
        REFUSED,
        VALIDATE,
        unless=lambda settings: (
            _sizes_from_checkpoint(settings)
            or bool(settings.get("hybrid_layer_pattern") or settings.get("hybrid_override_pattern"))
        ),
    ),
    *(
        Need((name,), REFUSED, f"{VALIDATE}, required_args", unless=_sizes_from_checkpoint)
        for name in ("hidden_size", "num_attention_heads", "max_position_embeddings")
    ),
    Need(("seq_length", "encoder_seq_length"), REFUSED, VALIDATE, unless=_sizes_from_checkpoint),
    Need(
        ("lr",),
        "training stops when it builds the optimizer",
        "training/training.py",
        sized=False,
        unless=_idle,
    ),
    Need(
        ("train_iters", "train_samples"),
        "training stops when it builds the learning-rate schedule",
        "training/training.py: get_optimizer_param_scheduler",
        sized=False,
        unless=_idle,
    ),
)
RUN = (
    "train_iters",
    "train_samples",
    "data_path",
    "data_args_path",
    "mock_data",
    "tokenizer_type",
    "exit_duration_in_mins",
)
"""Names of arguments that only a whole launch has: the length of training, or the data."""


def whole(settings: Mapping[str, Any]) -> bool:
    """Whether `settings` is a whole launch rather than a part of one."""
    return any(settings.get(name) for name in RUN)
