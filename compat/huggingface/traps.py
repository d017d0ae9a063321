"""Settings with which transformers stops when it builds a model's config or the model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bridge.checks import Check, Checks, Seen
from bridge.dialect import Config
from bridge.findings import Finding
from bridge.releases import Releases
from bridge.rules import Effect
from compat.huggingface.effective import foreign
from compat.huggingface.releases import KNOWN
from compat.huggingface.schema import REST

STRICT = "5.12.1"
"""The first known release whose configs check the types of their fields."""
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
WHOLE = frozenset({"llama", "gemma", "gemma2", "gemma3_text", "deepseek_v2", "mistral3"})
"""Families whose config refuses a hidden size that is no multiple of the heads, even beside
`head_dim`.
"""


def _kind(seen: Seen) -> Any:
    return seen["model_type"]


def _rope(seen: Seen) -> str | None:
    """Return the kind of rotary scaling that the config names, under its old or its new key."""
    for key in ("rope_parameters", "rope_scaling"):
        found = seen[key]
        if isinstance(found, dict) and (found.get("rope_type") or found.get("type")):
            return str(found.get("rope_type") or found["type"])
    return None


def _identity(value: Any, several: bool) -> bool:
    """Return whether a value is the number of a token, or a list of such numbers if `several`."""
    if several and isinstance(value, list | tuple):
        return all(_identity(one, False) for one in value)
    return value is None or (isinstance(value, int) and not isinstance(value, bool))


def _token(path: str) -> Check:
    several = path == "eos_token_id"
    return Check(
        path,
        lambda seen: not _identity(seen[path], several),
        f"found {{{path}}}, which transformers refuses when it builds the config; expected a whole"
        f" number{' or a list of them' if several else ''}",
        Effect.STOPS,
        f"configuration_utils.py: PreTrainedConfig.{path}",
        since=STRICT,
        name="no-number-of-a-token",
    )


TRAPS = Checks(
    Releases("huggingface", KNOWN),
    Check(
        "head_dim",
        lambda seen: _kind(seen) == "falcon" and "head_dim" in seen.given,
        "found with falcon, whose config computes this size and takes none: transformers stops when it"
        " builds the config; drop the key",
        Effect.STOPS,
        "models/falcon/configuration_falcon.py: head_dim has no setter",
        name="falcon-computes-it",
    ),
    Check(
        "hidden_size",
        lambda seen: (
            _kind(seen) in WHOLE and seen["hidden_size"] % seen["num_attention_heads"] != 0
        ),
        "found {hidden_size}, which is no multiple of num_attention_heads ({num_attention_heads}):"
        " this family's config refuses that, even with head_dim; use a multiple",
        Effect.STOPS,
        "models/llama/configuration_llama.py: LlamaConfig.validate_architecture, and its like",
        since=STRICT,
        needs=("hidden_size", "num_attention_heads"),
        name="no-multiple-of-the-heads",
    ),
    Check(
        "rope_scaling",
        lambda seen: (
            _kind(seen) == "phi3" and _rope(seen) not in (None, "default", "longrope", "su")
        ),
        "found another kind than longrope, which is the only one that Phi-3 has: transformers stops"
        " when it builds the config; use longrope, or another family",
        Effect.STOPS,
        "models/phi3/configuration_phi3.py: Phi3Config.validate_rope",
        name="phi3-has-longrope-alone",
    ),
    Check(
        "num_key_value_heads",
        lambda seen: _kind(seen) == "nemotron" and seen["num_key_value_heads"] is None,
        "missing: Nemotron has no default for it and stops when it builds the model; set it",
        Effect.STOPS,
        "models/nemotron/modeling_nemotron.py: NemotronAttention.__init__",
        name="nemotron-needs-it",
    ),
    *map(_token, TOKENS),
)


def inspect(config: Config) -> Iterator[Finding]:
    """Yield findings on what stops, and on layers that a plan cannot describe."""
    others = config.given.get(REST)
    values = {**(others if isinstance(others, dict) else {}), **config.effective.flat()}
    yield from TRAPS.remarks(Seen(values, config.given, config.context), config.origins)
    yield from foreign(config.given, config.origins)
