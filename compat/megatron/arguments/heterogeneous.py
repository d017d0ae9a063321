"""Checks of a heterogeneous model, whose layers a JSON text describes one by one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from compat.megatron.arguments.namespace import Namespace, Step
from compat.megatron.arguments.steps import check

PLACE = "arguments.py: validate_model_config_args_from_heterogeneous_config"
TEXT = "heterogeneous_layers_config_encoded_json"
FIXED = {
    "swiglu": True,
    "normalization": "RMSNorm",
    "group_query_attention": True,
    "position_embedding_type": "rope",
    "rotary_percent": 1.0,
    "use_rope_scaling": True,
    "use_rotary_position_embeddings": True,
}
"""Arguments with which Megatron builds a heterogeneous model."""


def _arguments_of_text(a: Namespace) -> Mapping[str, Any] | None:
    """Return the arguments that the JSON text describes. The additional key `fits` tells whether the
    text has the activation and the query heads that Megatron requires. None if the text lacks an entry
    that Megatron reads.
    """
    try:
        description = json.loads(a[TEXT])
        heads = [block["attention"]["n_heads_in_group"] for block in description["block_configs"]]
        group_sizes = [size for size in heads if size is not None]
        return {
            **FIXED,
            "num_layers": description["num_hidden_layers"],
            "hidden_size": description["hidden_size"],
            "num_attention_heads": description["num_attention_heads"],
            "untie_embeddings_and_output_weights": not description["tie_word_embeddings"],
            "rotary_base": description["rope_theta"],
            "rope_scaling_factor": description["rope_scaling"]["factor"],
            "num_query_groups": description["num_attention_heads"] // group_sizes[0],
            "fits": description["hidden_act"] == "silu" and len({*group_sizes}) == 1,
        }
    except (ValueError, TypeError, LookupError, ZeroDivisionError):
        return None


def _differs(a: Namespace) -> bool:
    arguments = _arguments_of_text(a) or {}
    return any(value != (True if name == "fits" else a[name]) for name, value in arguments.items())


HETEROGENEOUS_STEPS: tuple[Step, ...] = (
    check(
        PLACE,
        lambda a: _arguments_of_text(a) is None,
        f"{TEXT}: found a text that is no JSON object with the sizes and the blocks of a model;"
        " write it as the config.json of the model has it",
        since="0.12.0",
        needs=(TEXT,),
        name="found-no-json-of-a-model",
    ),
    check(
        PLACE,
        _differs,
        f"{TEXT}: found another model than the other arguments describe; give the sizes, query groups and rotary"
        " settings of the text as arguments too, with "
        + ", ".join(f"{name} {'true' if value is True else value}" for name, value in FIXED.items())
        + "; the text needs hidden_act silu and the same n_heads_in_group in all blocks",
        since="0.12.0",
        needs=(TEXT,),
        name="found-another-model-than-the-arguments",
    ),
)
"""Megatron's checks of the JSON text. The file in `heterogeneous_layers_config_path` is not read here."""
