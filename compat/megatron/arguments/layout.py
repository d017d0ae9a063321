"""Layout strings: stages of E (embedding), t (decoder), m (multi-token prediction) and L (loss), separated by |."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache

from bridge import limits
from bridge.config import shown
from bridge.errors import ConfigError
from compat.megatron.releases import RELEASES

KINDS = "EtmL"
# In upstream's order: first repeated groups, (tt|)*3, and then repeated single letters, t*3.
REPEATS = (re.compile(r"\(([^)]+)\)\*(\d+)"), re.compile(r"(.)\*(\d+)"))
SPELLED = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}


@lru_cache
def stages(text: str) -> tuple[str, ...]:
    """Return the letters of each stage of a layout string. Raises `ConfigError` for unknown
    letters.
    """
    unrolled = _checked(text).replace(",", "")
    for pattern in REPEATS:
        unrolled = _checked(pattern.sub(_unroll, unrolled))
    unknown = sorted(set(unrolled) - set(KINDS + "|"))
    if unknown:
        raise ConfigError(
            f"pipeline_model_parallel_layout: found {''.join(unknown)} in {text!r}; expected E, t, m, L, | and (...)*n"
        )
    return tuple(unrolled.split("|"))


def _unroll(match: re.Match[str]) -> str:
    body, digits = match.group(1), match.group(2)
    # The number of digits is checked first: int() of thousands of digits is itself slow.
    if len(digits) > 9 or len(body) * int(digits) > limits.LAYERS:
        raise _too_long(match.group(0))
    return body * int(digits)


def _checked(text: str) -> str:
    if len(text) > limits.LAYERS:
        raise _too_long(text)
    return text


def _too_long(text: str) -> ConfigError:
    return ConfigError(
        f"pipeline_model_parallel_layout: found {shown(text)}; expected at most {limits.LAYERS:,} layers"
    )


def written(layout: str | list[list[str]]) -> tuple[str, ...]:
    """Return the letters of each stage of a layout, which is a layout string or lists of layer
    names. The letter of an unknown name is `?`.
    """
    if isinstance(layout, str):
        return stages(layout)
    return tuple(
        "".join(SPELLED.get(str(layer).strip().lower(), "?") for layer in stage) for stage in layout
    )


def problems(
    parts: tuple[str, ...], ranks: int, layers: int | None, predictions: int | None, release: str
) -> Iterator[str]:
    """Yield a message for each problem of a layout on `ranks` pipeline ranks
    (validate_layer_layout).

    If `layers` is None, the number of decoder layers is not checked.
    """
    flat = "".join(parts)
    if "?" in flat:
        yield "expected layers embedding, decoder, mtp and loss"
    if not flat.startswith("E") or flat.count("E") != 1:
        yield "expected exactly one embedding, as the first layer"
    if not flat.endswith("L") or flat.count("L") != 1:
        yield "expected exactly one loss, as the last layer"
    if layers is not None and flat.count("t") != layers:
        yield f"found {flat.count('t')} decoder layers; expected num_layers ({layers})"
    yield from _prediction_problems(parts, ranks, predictions, release)


def _prediction_problems(
    parts: tuple[str, ...], ranks: int, predictions: int | None, release: str
) -> Iterator[str]:
    flat = "".join(parts)
    if not RELEASES.since(release, "0.14.0"):
        if "m" in flat:
            yield "found prediction layers, which this release does not support in a layout"
        return
    if flat.count("m") != (predictions or 0):
        yield f"found {flat.count('m')} prediction layers; expected mtp_num_layers ({predictions or 0})"
    if "m" in flat and "t" in flat[flat.index("m") :]:
        yield "expected all decoder layers before the prediction layers"
    # Stages go round the ranks, so the last `ranks` stages are the last virtual stage of each rank.
    if any("m" in part for part in parts[:-ranks]):
        yield "expected prediction layers only in the last virtual stage of a rank"
    # A part that has some of the prediction layers, but not all of them, shares them with another
    # part.
    if any(0 < part.count("m") < flat.count("m") for part in parts):
        yield "expected all prediction layers in one stage"
    if RELEASES.within(release, "0.15.0", "0.16.0") and "m" in "".join(parts[:-1]):
        yield "expected the prediction layers in the last stage, with the loss"


def standalone(parts: tuple[str, ...], ranks: int) -> bool:
    """Whether prediction layers are on a pipeline rank other than the last (mtp_standalone)."""
    return "m" in "".join(parts[-ranks:-1])
