"""Settings of a model's config with which transformers stops, by family, and those that it does not
read; one row for each. A config with keys of transformers' configs takes its checks from here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from bridge.errors import nearest
from bridge.plan.families.setting_types import REST, spell_value
from bridge.plan.families.source import NULL
from bridge.plan.families.table import FAMILIES, accepted_kinds, read_by
from bridge.stack.checks import Check, Remark, Seen
from bridge.stack.findings import Finding, Origin
from bridge.stack.rules import Effect

STRICT = "5.12.1"
"""The first known release of transformers whose configs check themselves in this way."""
EVEN = "5.23.0"
"""The first known release of transformers that checks the rotated size of a head."""
PADDED = frozenset(
    name for name, one in FAMILIES.items() if one.config and "embedding.padding" in one.keys
)
"""Families whose embeddings know the number of the padding token."""
LATENT = frozenset({"deepseek_v2", "deepseek_v3", "glm4_moe_lite"})
"""Families whose rotated part of a head has a size of its own."""
ROTATED = frozenset(PADDED - {"opt"})
"""Families whose configs have the size of a head, and rotate it."""
DIVIDED = frozenset({"llama", "mistral", "cohere2"})
"""Of these, the families that compute a size that is not given."""
WINDOWED = frozenset({"gemma2", "gemma3_text", "gpt_oss", "cohere2"})
"""Families that make the mask of a window in every forward pass."""
SWITCHED = frozenset({"qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "smollm3"})
"""Families whose window needs a switch."""
MASKED = WINDOWED | {"qwen2", "qwen3", "smollm3", "exaone_moe"}
"""Families that make a mask of a window for a block that is named as sliding. Others look at the names
of blocks only for the cache, which they fill in training too unless it is off.
"""
_WHOLE = (
    "llama mistral qwen2 qwen3 gemma gemma2 gemma3_text mixtral qwen2_moe qwen3_moe olmoe olmo2 cohere starcoder2 smollm3 "
    "granite ernie4_5 ernie4_5_moe"
)
WHOLE = frozenset(_WHOLE.split())
"""Families that rotate a whole head, whatever share the config names."""
SCALES = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
"""Keys without which transformers refuses a kind of rotary scaling."""
ROPE = ("rope_parameters", "rope_scaling")
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
            keys = keys_below(start, view.given)
            values = {**keys_below(start, view.values), "model_type": family(view)}
            return bool(self.holds(values, keys))

        return Check(
            start + self.key,
            when,
            self.words.replace("{", "{" + start),
            Effect.STOPS,
            f"transformers: {self.place}",
            name=self.name,
        )


def keys_below(start: str, values: Keys) -> dict[str, Any]:
    """Return the values whose paths begin with `start`, without it; those that no schema names too."""
    keys = {
        path.removeprefix(start): values[path]
        for path in values
        if path.startswith(start) and path != start + REST
    }
    rest = values.get(start + REST)
    return {**(rest if isinstance(rest, Mapping) else {}), **keys}


def rope(values: Keys) -> str | None:
    """Return the kind of rotary scaling that a config names, under its old or its new key."""
    for key in ROPE:
        scaling = values.get(key)
        if isinstance(scaling, Mapping) and (scaling.get("rope_type") or scaling.get("type")):
            return str(scaling.get("rope_type") or scaling["type"])
    return None


def _uneven(values: Keys, keys: Keys) -> bool:
    hidden, heads = values.get("hidden_size"), values.get("num_attention_heads")
    return bool(hidden and heads and hidden % heads)


def _rotated_head(values: Keys, keys: Keys) -> tuple[int | None, float | None]:
    """Return the size of a head of which a share is rotated, and the share, where they are known."""
    size = None if values.get("head_dim") == NULL else values.get("head_dim")
    if values["model_type"] in LATENT and "qk_rope_head_dim" in keys:
        size = keys["qk_rope_head_dim"]
    if size is None and values["model_type"] in DIVIDED and not _uneven(values, keys):
        size = (values.get("hidden_size") or 0) // (values.get("num_attention_heads") or 1)
    scalings = (keys[key] for key in ROPE if isinstance(keys.get(key), Mapping))
    scaling: Keys = next(scalings, {})
    share = scaling.get("partial_rotary_factor", values.get("partial_rotary_factor"))
    if values["model_type"] == "minimax_m2" and size and "rotary_dim" in keys:
        share = keys["rotary_dim"] / size
    return size, share


def _has_odd_head(values: Keys, keys: Keys) -> bool:
    size, share = _rotated_head(values, keys)
    # Smaller heads are let through, and a part of a head is rounded.
    return bool(size and size > 4 and size % 2 and (share is None or int(size * share) == size))


def _rotates_odd_head(values: Keys, keys: Keys) -> bool:
    size = None if values.get("head_dim") == NULL else values.get("head_dim")
    hidden, heads = values.get("hidden_size"), values.get("num_attention_heads")
    if size is None and hidden and heads:
        size = hidden // heads
    # Of one channel the two halves are broadcast, except where they are interleaved.
    return bool(size and size % 2 and (size > 1 or values["model_type"].startswith("ernie")))


def _rotates_odd_share(values: Keys, keys: Keys) -> bool:
    size, share = _rotated_head(values, keys)
    size = size or (values.get("hidden_size") or 0) // (values.get("num_attention_heads") or 1)
    # One channel is broadcast.
    return (width := int(size * (0.5 if share is None else share))) > 1 and bool(width % 2)


def _divides_by_zero(values: Keys, keys: Keys) -> bool:
    size, share = _rotated_head(values, keys)
    return bool(
        rope(keys) == "dynamic" and size and int(size * (1.0 if share is None else share)) == 2
    )


def _window(values: Keys) -> Any:
    """Return the size of the window with which a model starts; None without one."""
    if values["model_type"] in SWITCHED and not values.get("use_sliding_window"):
        return None
    window = values.get("sliding_window")
    return None if window == NULL else window


def _slides_without_window(values: Keys, keys: Keys) -> bool:
    kinds = keys.get("layer_types")
    fills = values["model_type"] in MASKED or values.get("use_cache") is not False
    return fills and _window(values) is None and "sliding_attention" in (kinds or ())


def _shares_latent_heads(values: Keys, keys: Keys) -> bool:
    heads, groups = values.get("num_attention_heads"), values.get("num_key_value_heads")
    return bool(heads and groups and groups != NULL and heads // groups != 1)


def _is_no_token(values: Keys, keys: Keys) -> bool:
    token = values.get("pad_token_id", FAMILIES[values["model_type"]].defaults.get("pad_token_id"))
    vocab = values.get("vocab_size") or 0
    return isinstance(token, int) and bool(vocab) and not -vocab <= token < vocab


def find_refused_values(family: str, config: Keys, start: str = "") -> Iterator[Remark]:
    """Yield a remark for each value that the config class of a family refuses, since `STRICT`: one of another type or out of
    bounds, and rotary scaling that lacks a key. The keys of `config` have `start` in front.
    """
    kinds, keys = accepted_kinds(family), keys_below(start, config)
    for key, value in keys.items():
        path, spelling = start + key, spell_value(key, value)
        if key in kinds and not _is_accepted(spelling, kinds[key]):
            message = (
                f"found {spelling!r}, which the config class of {family} refuses when transformers builds it;"
                f" expected {' or '.join(kinds[key].split('|'))}"
            )
            yield path, message, Effect.STOPS
    # Code that comes with a model's weights is not known.
    for rotary in ROPE if kinds else ():
        for name, scaling in _scalings(keys.get(rotary)):
            kind = str(scaling.get("rope_type") or scaling.get("type"))
            for key in SCALES.get(kind, ()):
                if key not in scaling:
                    message = f"{name}{key} is missing, and transformers refuses {kind} scaling without it; set it"
                    yield start + rotary, message, Effect.STOPS


def _scalings(value: Any) -> Iterator[tuple[str, Keys]]:
    """The rotary scalings of a config, each with the kind of layers that it is for."""
    if not isinstance(value, Mapping):
        return
    parts = {name: part for name, part in value.items() if isinstance(part, Mapping)}
    yield from (((f"{name}.", part) for name, part in parts.items()) if parts else [("", value)])


_TYPES: Mapping[str, Any] = {
    "int": int,
    "float": float,
    "bool": bool,
    "str": str,
    "dict": Mapping,
    "list": list | tuple,
}


def _is_accepted(value: Any, kinds: str) -> bool:
    kinds, _, bounds = kinds.partition(" ") if " of " not in kinds else (kinds, "", "")
    if not any(_has_kind(value, kind) for kind in kinds.split("|")):
        return False
    if not bounds or value is None:
        return True
    least, most = map(float, bounds.split(".."))
    return least <= float(value) <= most


def _has_kind(value: Any, kind: str) -> bool:
    kind, _, inner = kind.partition(" of ")
    if kind in ("any", "None"):
        return kind == "any" or value is None
    if (kind == "int" and isinstance(value, bool)) or not isinstance(value, _TYPES[kind]):
        return False
    return not inner or all(_has_kind(part, inner) for part in value)


def find_unread_keys(
    family: str | None, keys: Iterable[str], origin: Callable[[str], Origin | None], start: str = ""
) -> Iterator[Finding]:
    """Yield a finding for each key that the class of a family does not read. transformers stores
    such keys, but no model uses them.
    """
    if family is None or family not in FAMILIES or FAMILIES[family].foreign:
        return
    for key in map(str, keys):
        if key in read_by(family) or key.startswith("_"):
            continue
        # A misspelled key changes the model that the user meant; any other unread key is harmless.
        hint = nearest(key, read_by(family)) or nearest(key.lower(), read_by(family))
        yield Finding(
            start + key,
            f"has no effect: transformers keeps the key, but no {family} model reads it{hint}",
            Effect.NUMBERS if hint else Effect.NONE,
            True,
            origin=origin(key),
            surprising=True,
        )


REFUSALS = (
    Refusal(
        "layer_types",
        frozenset(name for name, one in FAMILIES.items() if one.config and not one.foreign),
        _slides_without_window,
        "names blocks with a sliding window, and the config has no size of a window: transformers stops in"
        " the first forward pass; set sliding_window, in families of Qwen and SmolLM also"
        " use_sliding_window: true, or name full_attention alone",
        "masking_utils.py: create_sliding_window_causal_mask; cache_utils.py: DynamicCache",
        "sliding-blocks-without-a-window",
    ),
    Refusal(
        "sliding_window",
        WINDOWED,
        lambda values, keys: keys.get("sliding_window") == NULL,
        "is null, and this family makes the mask of a window in every forward pass: transformers stops in"
        " the first; leave the key out, and name full_attention for every block in layer_types",
        "masking_utils.py: create_sliding_window_causal_mask",
        "null-stops-the-forward-pass",
    ),
    Refusal(
        "sliding_window",
        frozenset({"qwen2_moe"}),
        lambda values, keys: bool(values.get("use_sliding_window")) and _window(values) is None,
        "is null although use_sliding_window is true: transformers stops in the first forward pass; set a"
        " size, or switch the window off",
        "masking_utils.py: create_sliding_window_causal_mask",
        "switch-without-a-window",
    ),
    Refusal(
        "pad_token_id",
        PADDED,
        _is_no_token,
        "is, if not by the config then by its class, no token of the vocabulary ({vocab_size}): torch stops when the"
        " embeddings are built; set one below it, or null",
        "models/llama/modeling_llama.py: nn.Embedding(vocab_size, hidden_size, padding_idx), and its like",
        "no-token-of-the-vocabulary",
    ),
    Refusal(
        "head_dim",
        WHOLE,
        _rotates_odd_head,
        "is odd, if not by the config then by hidden_size / num_attention_heads, and this family rotates all of"
        " it in pairs: transformers stops, at the latest in the first forward pass; use an even size of heads",
        "models/llama/modeling_llama.py: apply_rotary_pos_emb, and its like",
        "odd-size-that-is-rotated",
    ),
    Refusal(
        "head_dim",
        ROTATED - WHOLE,
        _has_odd_head,
        "is odd, and all of it is rotated in pairs: transformers stops when it builds the config; use an"
        " even size of heads",
        "modeling_rope_utils.py: RotaryEmbeddingConfigMixin.validate_rope",
        "odd-size-of-a-head",
        EVEN,
    ),
    Refusal(
        "qk_rope_head_dim",
        LATENT,
        # The config refuses larger ones.
        lambda values, keys: values.get("qk_rope_head_dim") in (1, 3),
        "is odd, and these channels are rotated in pairs: transformers stops in the first forward pass; use an"
        " even number",
        "models/deepseek_v3/modeling_deepseek_v3.py: apply_rotary_pos_emb, and its like",
        "odd-number-that-is-rotated",
    ),
    Refusal(
        "partial_rotary_factor",
        frozenset({"phi"}),
        _rotates_odd_share,
        "(0.5 by default) makes an odd number of channels of a head, and they are rotated in pairs: transformers stops in"
        " the first forward pass; use another share or size of heads",
        "models/phi/modeling_phi.py: PhiAttention.forward, apply_rotary_pos_emb",
        "odd-share-that-is-rotated",
    ),
    Refusal(
        "rotary_dim",
        frozenset({"gptj"}),
        lambda values, keys: (
            values.get("rotary_dim") != NULL and (values.get("rotary_dim") or 0) % 2
        ),
        "is odd, and GPT-J rotates these channels in pairs: transformers stops in the first forward pass; use"
        " an even number",
        "models/gptj/modeling_gptj.py: apply_rotary_pos_emb",
        "odd-number-that-is-rotated",
    ),
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
        "rope_scaling",
        ROTATED,
        _divides_by_zero,
        "is dynamic, and a head has 2 rotated channels: transformers divides by their number less 2 when it"
        " builds the model; rotate more channels, or use another kind",
        "modeling_rope_utils.py: _compute_dynamic_ntk_parameters",
        "dynamic-needs-more-than-two-rotated-channels",
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
        "num_key_value_heads",
        LATENT,
        _shares_latent_heads,
        "is not num_attention_heads ({num_attention_heads}), and latent attention has keys for each head:"
        " transformers' SDPA and eager attention, which repeat them, stop in the first forward pass; use the"
        " same number",
        "models/deepseek_v3/modeling_deepseek_v3.py: DeepseekV3Attention.num_key_value_groups",
        "latent-heads-are-not-shared",
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
