"""Builds an installed AutoModel's mesh, pipeline and steps of a recipe, and the config and model of
transformers that the recipe names, with a forward pass on the meta device, to see whether they stop.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from bridge.errors import ConfigError
from bridge.stack.dialect import Config
from bridge.translation.lift import meaning_of
from compat.automodel.effective import D
from compat.automodel.formats import nest_recipe
from compat.automodel.releases import release
from tests.harvesting.code import first
from tests.harvesting.judges import automodel as real
from tests.harvesting.judges.automodel import release_of_package as release_of_package
from tests.harvesting.machine import judge

FILLS = True
"""Whether `start` needs none of the settings that `missing` asks for."""


def start(config: Config) -> None:
    """Build what the recipe describes. Raises `ConfigError` with the reason for which something
    stops.
    """
    question, _ = real.pose_config(config)
    real.answer(question)
    model = nest_recipe(config.given, release(config.version)).get("model") or {}
    settings = dict(model.get("config") or {})
    name = str(settings.pop("_target_", ""))
    if not name.startswith("transformers."):
        return
    from torch import device, long, zeros
    from transformers import AutoModelForCausalLM

    build: Any = AutoModelForCausalLM.from_config
    try:
        instance: Any = first([name.replace(".", ":", 1)])(**settings)
        with device("meta"):
            built = build(instance).to(_format(config))
            if not settings.get("architectures"):
                _validate(built, config)
            # The shapes of a step tell whether masks and positions fit; experts have no kernel here.
            if not _has_experts(built):
                built(input_ids=zeros(1, TOKENS, dtype=long))
    except Exception as error:
        judge(error)
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(f"refused by transformers: {type(error).__name__}: {reason}") from error


UNASKED = tuple(
    f"model.config.{key}"
    for key in ("num_key_value_heads", "qk_rope_head_dim", "qk_nope_head_dim", "kv_lora_rank")
)
"""Settings whose stops come in the forward pass of models with experts too, which is not run here."""
TOKENS = 4


def _has_experts(model: Any) -> bool:
    return any(name.rpartition(".")[2] == "experts" for name, _ in model.named_modules())


def _format(config: Config) -> Any:
    """Return torch's format in which the recipe computes."""
    import torch

    compute = str(meaning_of(config).get("precision.compute"))
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(compute, torch.float32)


def _validate(model: Any, config: Config) -> None:
    """Ask AutoModel whether it splits this model, which is transformers' own, and its packed samples
    over the mesh.
    """
    validate: Any = first(["nemo_automodel._transformers.capabilities:validate_for_mesh"])
    if validate is None:
        return  # AutoModel asks since 0.4.0
    axes = ("tp_size", "pp_size", "cp_size", "ep_size")
    mesh = SimpleNamespace(**{axis: config.effective.get(D + axis) or 1 for axis in axes})
    validate(model, mesh)
    supports: Any = first(["nemo_automodel._transformers.capabilities:ModelSupports"])
    packs = config.effective.get("packed_sequence.packed_sequence_size")
    if packs and mesh.cp_size > 1 and not supports(model, mesh).supports_cp_with_sequence_packing:
        raise ValueError("packed samples over context ranks (recipes/llm/train_ft.py)")
