"""Codecs: each converts the value of a config's key to a field of the model, and the field back to
the key's value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf, nextafter, sqrt
from typing import Any

from bridge.errors import ConfigError
from bridge.plan.families.source import NULL, Group, Source, Target

Read = Callable[[Any, Source, Group], Any]
Write = Callable[[Any, Target, Group], Any]

ACTIVATIONS: Mapping[str, tuple[str, ...]] = {
    "gelu": ("gelu", "gelu_python"),
    "gelu_tanh": (
        "gelu_pytorch_tanh",
        "gelu_new",
        "gelu_fast",
        "gelu_python_tanh",
        "gelu_accurate",
    ),
    "quick_gelu": ("quick_gelu",),
    "silu": ("silu", "swish", "swiglu"),
    "relu": ("relu",),
    "squared_relu": ("relu2",),
    "xielu": ("xielu",),
}
"""transformers' names for each of a plan's activation functions (activations.py, ACT2CLS)."""
NAMED = {name: ours for ours, names in ACTIVATIONS.items() for name in names}


@dataclass(frozen=True)
class Codec:
    """A conversion in both directions: `read` returns a field's value (None leaves the field open),
    and `write` returns a key's value.
    """

    read: Read
    write: Write


def _same(value: Any, source: Source, model: Group) -> Any:
    return value


def _put(value: Any, target: Target, model: Group) -> Any:
    return value


def _activation(value: Any, source: Source, model: Group) -> Any:
    if value is not None and value not in NAMED:
        raise ConfigError(f"hidden_act: found {value!r}; expected one of {', '.join(NAMED)}")
    return NAMED.get(value)


SPELLED = ("hidden_act", "hidden_activation", "activation_function", "activation")


def _activation_name(value: Any, target: Target, model: Group) -> Any:
    """Return the name under which a config stores an activation: the family's default name if this
    name stands for the activation, else the most common name.
    """
    if value is None:
        return None
    usual = (target.defaults.get(key) for key in SPELLED)
    return next((name for name in usual if NAMED.get(str(name)) == value), ACTIVATIONS[value][0])


def _gemma(value: Any, source: Source, model: Group) -> Any:
    """Read Gemma's activation. The released config files say `gelu`, but mean the tanh
    approximation (models/gemma/configuration_gemma.py).
    """
    return "gelu_tanh" if value in (None, "gelu") else _activation(value, source, model)


NO_FACTOR = (None, 1, 0)
"""Values of a key for a factor (such as `logit_scale`) which mean that the model has no factor."""


def near(value: float) -> float:
    """Return the number rounded to 12 digits, which removes rounding errors of roots and quotients."""
    return float(f"{value:.12g}")


def undone(forward: Callable[[float], float], guess: float, target: float) -> float:
    """Of the numbers near `guess` that `forward` maps exactly to `target`, return the one with the
    fewest digits. Return `guess` if there is no such number.
    """
    # Above 2**53 every float is a whole number already.
    tries = [float(round(guess)), near(guess), guess] if guess < 2**53 else [near(guess), guess]
    below = above = guess
    for _ in range(4):
        below, above = nextafter(below, 0.0), nextafter(above, inf)
        tries += [below, above]
    return next((number for number in tries if number > 0 and forward(number) == target), guess)


KV = "num_key_value_heads"


def _heads(value: Any, source: Source, model: Group) -> Any:
    """Return the number of key and value heads. The default is the number of attention heads.

    If the number is only the family's default and does not divide the number of attention heads,
    the number is ignored, because it belongs to the family's default model.
    """
    heads = model.get("heads")
    if value is None:
        return heads
    return heads if heads and heads % value and not source.has(KV) else value


def head_size(model: Group) -> int | None:
    """Return the default width of a head: hidden size / heads, rounded down. Return None if one of
    the two is not known, or if the hidden size is smaller than the number of heads.
    """
    hidden, heads = model.get("hidden"), model.get("heads")
    return hidden // heads if hidden and heads and hidden >= heads else None


def _head(value: Any, other: Source | Target, model: Group) -> Any:
    return head_size(model) if value is None else value


def _four(value: Any, source: Source, model: Group) -> Any:
    hidden = model.get("hidden")
    return 4 * hidden if value is None and hidden else value


def _scale(value: Any, source: Source, model: Group) -> Any:
    size = model.get("attention.head_size")
    return None if value is None or (size and near(1 / sqrt(size)) == near(value)) else value


def _own_scale(value: Any, target: Target, model: Group) -> Any:
    size = model.get("attention.head_size") or head_size(model)
    return 1 / sqrt(size) if value is None and size else value


def _number(value: Any, source: Source, model: Group) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _padding(value: Any, source: Source, model: Group) -> int | str | None:
    """Return the row of the padding token; torch counts a negative number from the last row.

    Without the key, a class that comes with a model's weights may have any number.
    """
    if value is None:
        return "none" if source.defaults or source.has("pad_token_id") else None
    if isinstance(value, str):
        return value
    row = _number(value, source, model)
    return row if row is None or row >= 0 else row + (model.get("vocab") or 0)


def _padding_token(value: Any, target: Target, model: Group) -> Any:
    return target.open("pad_token_id") if value is None else _token(value, target, "pad_token_id")


def _token(value: Any, target: Target, key: str) -> Any:
    """Return the number of a token to write; without one the key is null, unless that is known to be
    the default.
    """
    if value not in ("none", ()):
        return value
    return target.open(key) if target.defaults else NULL


def _begin(value: Any, source: Source, model: Group) -> int | str | None:
    if value is None:
        return "none" if source.defaults or source.has("bos_token_id") else None
    return value if isinstance(value, str) else _number(value, source, model)


def _tokens(value: Any, source: Source, model: Group) -> tuple[int, ...] | None:
    if value is None:
        return () if source.defaults or source.has("eos_token_id") else None
    several = value if isinstance(value, list | tuple) else (value,)
    known = (isinstance(one, str) or _number(one, source, model) is not None for one in several)
    return tuple(several) if all(known) else None


def _tokens_of(value: Any, target: Target, model: Group) -> Any:
    return (
        value[0] if value is not None and len(value) == 1 else _token(value, target, "eos_token_id")
    )


RANK = "q_lora_rank"


def _choice(on: str, off: str) -> Codec:
    """Return the codec of a switch that chooses between two values of a plan's field."""
    return Codec(
        lambda value, source, model: on if value else off,
        lambda value, target, model: None if value is None else value == on,
    )


CODECS: Mapping[str, Codec] = {
    "": Codec(_same, _put),
    "activation": Codec(_activation, _activation_name),
    "gemma": Codec(_gemma, _activation_name),
    "factor": Codec(
        lambda value, source, model: None if value in NO_FACTOR else value,
        lambda value, target, model: 1.0 if value is None else value,
    ),
    "divisor": Codec(
        lambda value, source, model: None if value in NO_FACTOR else 1.0 / value,
        lambda value, target, model: (
            1.0 if value is None else undone(lambda number: 1.0 / number, 1.0 / value, value)
        ),
    ),
    "one": Codec(
        lambda value, source, model: None if value in NO_FACTOR else value,
        lambda value, target, model: 1 if value is None else value,
    ),
    "bound": Codec(_same, _put),
    "heads": Codec(
        _heads, lambda value, target, model: model.get("heads") if value is None else value
    ),
    "head": Codec(_head, _head),
    "padding": Codec(_padding, _padding_token),
    "token": Codec(_begin, lambda value, target, model: _token(value, target, "bos_token_id")),
    "tokens": Codec(_tokens, _tokens_of),
    "four": Codec(_four, _put),
    "scale": Codec(_scale, _own_scale),
    # A null in the file, or the default of a known class, means that queries are not compressed
    # (0). A file of an unknown class that lacks the key leaves it open.
    "rank": Codec(
        lambda value, source, model: value or (0 if source.named or source.has(RANK) else None),
        lambda value, target, model: NULL if value == 0 else value or target.open(RANK),
    ),
    "switch": _choice("head", "none"),
    # In Cohere models, the norm of each head has its own weights
    # (models/cohere/modeling_cohere.py).
    "own": _choice("own", "none"),
    "before": _choice("before", "post"),
}
"""Codecs by name. In `families.json`, a codec's name is the word before the colon of a key."""
