"""One key of a config <-> one field of a model, for each way in which families spell the same fact."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf, nextafter, sqrt
from typing import Any

from bridge.errors import ConfigError
from bridge.families.source import NULL, Group, Source, Target

Read = Callable[[Any, Source, Group], Any]
Write = Callable[[Any, Target, Group], Any]

ACTIVATIONS: Mapping[str, tuple[str, ...]] = {
    "gelu": ("gelu", "gelu_python"),
    "gelu_tanh": ("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_python_tanh", "gelu_accurate"),
    "quick_gelu": ("quick_gelu",),
    "silu": ("silu", "swish", "swiglu"),
    "relu": ("relu",),
    "squared_relu": ("relu2",),
    "xielu": ("xielu",),
}
"""A plan's activation functions, and transformers' names for each (activations.py, ACT2CLS)."""
NAMED = {name: ours for ours, names in ACTIVATIONS.items() for name in names}


@dataclass(frozen=True)
class Codec:
    """Both directions of one value; `read` returns None for a value that a plan leaves open."""

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


def _named(value: Any, target: Target, model: Group) -> Any:
    """The name that the family uses by default if it means the same, else the most common name."""
    usual = (target.defaults.get(key) for key in SPELLED)
    return None if value is None else next((name for name in usual if NAMED.get(str(name)) == value), ACTIVATIONS[value][0])


def _gemma(value: Any, source: Source, model: Group) -> Any:
    """Gemma's released files have gelu for its tanh approximation (models/gemma/configuration_gemma.py)."""
    return "gelu_tanh" if value in (None, "gelu") else _activation(value, source, model)


def _factor(value: Any, source: Source, model: Group) -> Any:
    return None if value in (None, 1, 1.0, 0) else value


def _unit(value: Any, target: Target, model: Group) -> Any:
    return 1.0 if value is None else value


def _divisor(value: Any, source: Source, model: Group) -> Any:
    return None if value in (None, 1, 1.0, 0) else 1.0 / value


def _divided(value: Any, target: Target, model: Group) -> Any:
    return 1.0 if value is None else undone(lambda number: 1.0 / number, 1.0 / value, value)


def near(value: float) -> float:
    """A number rounded to 12 digits, which removes the rounding errors of a few roots or quotients."""
    return float(f"{value:.12g}")


def undone(forward: Callable[[float], float], guess: float, wanted: float) -> float:
    """The number near `guess` with the fewest digits that `forward` maps exactly to `wanted`; `guess` if there is none."""
    # Above 2**53 every float is a whole number already.
    tries = [float(round(guess)), near(guess), guess] if guess < 2**53 else [near(guess), guess]
    below = above = guess
    for _ in range(4):
        below, above = nextafter(below, 0.0), nextafter(above, inf)
        tries += [below, above]
    return next((number for number in tries if number > 0 and forward(number) == wanted), guess)


def _one(value: Any, source: Source, model: Group) -> Any:
    return None if value in (None, 0, 1) else value


def _at_least_one(value: Any, target: Target, model: Group) -> Any:
    return 1 if value is None else value


KV = "num_key_value_heads"


def _heads(value: Any, source: Source, model: Group) -> Any:
    """Key and value heads: as many as attention heads by default.

    A family's default that does not divide the heads belongs to its default model, and is not taken.
    """
    heads = model.get("heads")
    if value is None:
        return heads
    return heads if heads and heads % value and not source.has(KV) else value


def _own_heads(value: Any, target: Target, model: Group) -> Any:
    return model.get("heads") if value is None else value


def head_size(model: Group) -> int | None:
    """Default width of a head: hidden size / heads, rounded down; None if one is not known."""
    hidden, heads = model.get("hidden"), model.get("heads")
    return hidden // heads if hidden and heads and hidden >= heads else None


def _head(value: Any, source: Source, model: Group) -> Any:
    return head_size(model) if value is None else value


def _own_head(value: Any, target: Target, model: Group) -> Any:
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


RANK = "q_lora_rank"


def _rank(value: Any, source: Source, model: Group) -> Any:
    return value or (0 if source.named or source.has(RANK) else None)


def _no_rank(value: Any, target: Target, model: Group) -> Any:
    return NULL if value == 0 else value or target.open(RANK)


def _switch(value: Any, source: Source, model: Group) -> Any:
    return "head" if value else "none"


def _own(value: Any, source: Source, model: Group) -> Any:
    """In Cohere models, the norm of each head has its own weights (models/cohere/modeling_cohere.py)."""
    return "own" if value else "none"


def _each(value: Any, target: Target, model: Group) -> Any:
    return None if value is None else value == "own"


def _on(value: Any, target: Target, model: Group) -> Any:
    return None if value is None else value == "head"


def _before(value: Any, source: Source, model: Group) -> Any:
    return "before" if value else "post"


def _first(value: Any, target: Target, model: Group) -> Any:
    return None if value is None else value == "before"


CODECS: Mapping[str, Codec] = {
    "": Codec(_same, _put),
    "activation": Codec(_activation, _named),
    "gemma": Codec(_gemma, _named),
    "factor": Codec(_factor, _unit),
    "divisor": Codec(_divisor, _divided),
    "one": Codec(_one, _at_least_one),
    "bound": Codec(_same, _put),
    "heads": Codec(_heads, _own_heads),
    "head": Codec(_head, _own_head),
    "four": Codec(_four, _put),
    "scale": Codec(_scale, _own_scale),
    "rank": Codec(_rank, _no_rank),
    "switch": Codec(_switch, _on),
    "own": Codec(_own, _each),
    "before": Codec(_before, _first),
}
"""Codecs by the word before the colon in a key of `families.json`."""
