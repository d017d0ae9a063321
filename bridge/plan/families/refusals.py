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

        def when(view: Seen) -> bool:
            if family(view) not in self.families:
                return False
            keys = {
                path.removeprefix(start): view.given[path]
                for path in view.given
                if path.startswith(start)
            }
            values = {
                path.removeprefix(start): view.values[path]
                for path in view.values
                if path.startswith(start)
            }
            return bool(self.holds(values, keys))

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
        scaling = values.get(key)
        if isinstance(scaling, Mapping) and (scaling.get("rope_type") or scaling.get("type")):
            return str(scaling.get("rope_type") or scaling["type"])
    return None


def _uneven(values: Keys, keys: Keys) -> bool:
    hidden, heads = values.get("hidden_size"), values.get("num_attention_heads")
    return bool(hidden and heads and hidden % heads)


REFUSALS = (
    Refusal(
        "head_dim",
        frozenset({"falcon"}),
        lambda values, keys: "head_dim" in keys,
        "found with Falcon, whose config computes this size and takes none: transformers stops when it"
        " builds the config; drop the key",
        "models/falcon/configuration_falcon.py: head_dim has no setter",
        "falcon-computes-it",
    ),
    Refusal(
        "rope_scaling",
        frozenset({"phi3"}),
        lambda values, keys: rope(keys) not in (None, "default", "longrope", "su"),
        "found another kind than longrope, which is the only one that Phi-3 has: transformers stops"
        " when it builds the config; use longrope, or another family",
        "models/phi3/configuration_phi3.py: Phi3Config.validate_rope",
        "phi3-has-longrope-alone",
    ),
    Refusal(
        "num_key_value_heads",
        frozenset({"nemotron"}),
        lambda values, keys: values.get("num_key_value_heads") is None,
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
