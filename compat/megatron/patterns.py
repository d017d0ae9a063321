"""Converts Megatron's layer patterns, a frequency or a list of ones and zeros, to booleans per
block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bridge import limits

Every = Callable[[int, int], bool]
"""Type of a function of a block's index and a frequency. It returns whether the block has the
feature.
"""


def values_as_list(values: Mapping[str, Any], name: str) -> list[Any]:
    """Return the values of an argument as a list. A single value becomes a list of one element."""
    value = values.get(name)
    return list(value) if isinstance(value, list | tuple) else [value]


def first_of(index: int, every: int) -> bool:
    """Whether a block is the first in its group of `every` blocks.

    moe_layer_freq uses this pattern (gpt_layer_specs.py: get_gpt_decoder_layer_specs).
    """
    return index % every == 0


def all_but_last_of(index: int, every: int) -> bool:
    """Whether a block is not the last in its group of `every` blocks. Sliding windows (utils.py:
    is_layer_window_attention) and no_rope_freq (transformer_config.py) use this pattern.
    """
    return (index + 1) % every != 0


def blocks(
    value: Any, layers: int | None, every: Every, inverted: bool = False
) -> tuple[bool, ...] | None:
    """Return, for each of `layers` blocks, whether the block has the feature.

    Return None if all blocks have it, or if `value` is unset or does not fit the number of blocks.
    If `inverted`, ones in a list mark the blocks without the feature.
    """
    if isinstance(value, list | tuple):
        pattern = tuple(bool(item) is not inverted for item in value)
        # A list of another length is no pattern of these blocks; `fits` tells the rule that it is
        # lost.
        return None if all(pattern) or (layers is not None and len(pattern) != layers) else pattern
    # The plan itself refuses more layers than the limit; here it only keeps the tuple small.
    if not isinstance(value, int) or value < 1 or layers is None or layers > limits.LAYERS:
        return None
    pattern = tuple(every(index, value) for index in range(layers))
    return None if all(pattern) else pattern


def spell_pattern(
    pattern: tuple[bool, ...], layers: int | None, every: Every, inverted: bool = False
) -> int | list[int]:
    """Return the shortest value for a pattern: a frequency, if one fits the pattern and divides the
    number of blocks, else a list.
    """
    # no_rope_freq has to divide the number of layers (TransformerConfig); the others may be any
    # frequency.
    for count in range(1, len(pattern) + 1) if layers == len(pattern) else ():
        if len(pattern) % count == 0 and all(
            every(index, count) is has for index, has in enumerate(pattern)
        ):
            return count
    return [int(has is not inverted) for has in pattern]


def fits(value: Any, layers: int | None) -> bool:
    """Whether `value` determines which blocks have the feature.

    A list must have the right length, and a frequency needs a known number of layers.
    """
    if isinstance(value, list | tuple):
        return layers is None or len(value) == layers
    return value is None or (
        isinstance(value, int) and (value == 1 or (value > 1 and layers is not None))
    )
