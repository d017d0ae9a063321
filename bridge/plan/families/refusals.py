"""Settings of a model's config with which transformers stops, by family; one row for each. A config
with keys of transformers' configs takes its checks from here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from bridge.stack.checks import Check, Seen
from bridge.stack.rules import Effect

STRICT = "5.12.1"
"""The first known release of transformers whose configs check themselves in this way."""
Keys = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Refusal:
    """One case in which transformers stops: the key, the families, when it holds, and the words.

    `holds` gets the effective values by key, and the keys that were given.
    """

    key: str
    families: frozenset[str]
    holds: Callable[[Keys, Keys], object]
    words: str
    place: str
    name: str
    since: str = ""

    def check(self, family: Callable[[Seen], str | None], start: str = "") -> Check:
        """Return the check of a stack whose settings have `start` before the keys. `family` returns
        the family of a config.
        """

        def when(seen: Seen) -> bool:
            if family(seen) not in self.families:
                return False
            given = {
                path.removeprefix(start): seen.given[path]
                for path in seen.given
                if path.startswith(start)
            }
            values = {
                path.removeprefix(start): seen.values[path]
                for path in seen.values
                if path.startswith(start)
            }
            return bool(self.holds(values, given))

        return Check(
            start + self.key,
            when,
            self.words,
            Effect.STOPS,
            f"transformers: {self.place}",
            name=self.name,
        )


def rope(values: Keys) -> str | None:
    """Return the kind of rotary scaling that a config names, under its old or its new key."""
    for key in ("rope_parameters", "rope_scaling"):
        found = values.get(key)
        if isinstance(found, Mapping) and (found.get("rope_type") or found.get("type")):
            return str(found.get("rope_type") or found["type"])
    return None


def _uneven(values: Keys, given: Keys) -> bool:
    hidden, heads = values.get("hidden_size"), values.get("num_attention_heads")
    return bool(hidden and heads and hidden % heads)


REFUSALS = (
    Refusal(
        "head_dim",
        frozenset({"falcon"}),
        lambda values, given: "head_dim" in given,
        "found with Falcon, whose config computes this size and takes none: transformers stops when it"
        " builds the config; drop the key",
        "models/falcon/configuration_falcon.py: head_dim has no setter",
        "falcon-computes-it",
    ),
    Refusal(
        "rope_scaling",
        frozenset({"phi3"}),
        lambda values, given: rope(given) not in (None, "default", "longrope", "su"),
        "found another kind than longrope, which is the only one that Phi-3 has: transformers stops"
        " when it builds the config; use longrope, or another family",
        "models/phi3/configuration_phi3.py: Phi3Config.validate_rope",
        "phi3-has-longrope-alone",
    ),
    Refusal(
        "num_key_value_heads",
        frozenset({"nemotron"}),
        lambda values, given: values.get("num_key_value_heads") is None,
        "missing: Nemotron has no default for it and stops when it builds the model; set it",
        "models/nemotron/modeling_nemotron.py: NemotronAttention.__init__",
        "nemotron-needs-it",
    ),
    Refusal(
        "hidden_size",
        frozenset({"llama", "gemma", "gemma2", "gemma3_text", "deepseek_v2"}),
        _uneven,
        "found a size that is no multiple of the attention heads: this family's config refuses that,"
        " even with head_dim; use a multiple",
        "models/llama/configuration_llama.py: LlamaConfig.validate_architecture, and its like",
        "no-multiple-of-the-heads",
        STRICT,
    ),
)
