"""Settings that AutoModel's recipes need to start."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bridge.stack.requirements import Need, is_given

STOPS = "the recipe stops without this setting"
TRAIN = "recipes/llm/train_ft.py: setup"
NEEDS = (
    Need(
        ("model._target_",),
        STOPS,
        f"{TRAIN}, build_model",
        example=" (nemo_automodel.NeMoAutoModelForCausalLM.from_config)",
    ),
    Need(
        ("model.pretrained_model_name_or_path", "model.config"),
        "the model's class needs one of these settings",
        "_transformers/auto_model.py: from_pretrained, from_config",
        unless=lambda settings: (
            not str(settings.get("model._target_", "NeMoAuto")).rpartition(".")[0].endswith("LM")
        ),
    ),
    Need(
        ("model.config.pretrained_model_name_or_path",),
        "model.config names the function from_pretrained, which stops without this setting",
        "transformers: models/auto/configuration_auto.py: AutoConfig.from_pretrained",
        unless=lambda settings: (
            not str(settings.get("model.config._target_", "")).endswith(".from_pretrained")
        ),
    ),
    Need(("optimizer._target_", "optimizer"), STOPS, f"{TRAIN}, optimizer.build"),
    Need(("dataset._target_", "dataloader.dataset"), STOPS, f"{TRAIN}, dataloader", sized=False),
    Need(("loss_fn",), STOPS, f"{TRAIN}, loss_fn.build", sized=False),
)
RUN = (
    *("dataset._target_", "model.pretrained_model_name_or_path"),
    *("step_scheduler.max_steps", "step_scheduler.num_epochs"),
)
"""A recipe with at least one of these settings is a whole recipe, because it names data or stored
weights, or says how long to train. A recipe with only sections about the mesh and the model may be an excerpt.
"""


def whole(settings: Mapping[str, Any]) -> bool:
    """Whether the source is a whole recipe, and not only some of its sections."""
    return any(is_given(settings, path) for path in RUN)
