"""Layout strings: stages of E (embedding), t (decoder), m (multi-token prediction) and L (loss), separated by |."""

from __future__ import annotations

import re
from functools import lru_cache

from bridge import limits
from bridge.stack.checks import Check
from compat.megatron.arguments.namespace import Namespace
from compat.megatron.arguments.steps import check

KINDS = "EtmL|"
# In upstream's order: first repeated groups, (tt|)*3, and then repeated single letters, t*3.
REPEATS = (re.compile(r"\(([^)]+)\)\*(\d+)"), re.compile(r"(.)\*(\d+)"))
SPELLED = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}


@lru_cache
def unroll_repeats(text: str) -> str:
    """Return a layout string with its repeats written out. A string that gets longer than
    `limits.LAYERS` letters is not unrolled to its end.
    """
    text = text.replace(",", "")
    for pattern in REPEATS:
        if len(text) <= limits.LAYERS:
            text = pattern.sub(_unroll, text)
    return text


def _unroll(match: re.Match[str]) -> str:
    body, digits = match.group(1), match.group(2)
    # One body more than the limit is enough to be too long. The number of digits is checked first:
    # int() of thousands of digits is itself slow.
    most = limits.LAYERS // len(body) + 1
    return body * (min(int(digits), most) if len(digits) < 10 else most)


def stages(text: str) -> tuple[str, ...] | None:
    """Return the letters of each stage of a layout string; None if the string is refused."""
    letters = unroll_repeats(text)
    readable = len(letters) <= limits.LAYERS and not set(letters) - set(KINDS)
    return tuple(letters.split("|")) if readable else None


def _string(a: Namespace) -> str:
    layout = a.pipeline_model_parallel_layout
    return layout if isinstance(layout, str) else ""


PARSER = "PipelineParallelLayerLayout.parse_str_to_list"
READABLE: tuple[Check, ...] = (
    check(
        PARSER,
        lambda a: len(unroll_repeats(_string(a))) > limits.LAYERS,
        "pipeline_model_parallel_layout: found {pipeline_model_parallel_layout}; expected at most"
        f" {limits.LAYERS:,} layers",
        since="0.13.0",
    ),
    check(
        PARSER,
        lambda a: (
            len(unroll_repeats(_string(a))) <= limits.LAYERS
            and set(unroll_repeats(_string(a))) - set(KINDS)
        ),
        "pipeline_model_parallel_layout: found {pipeline_model_parallel_layout}; expected E, t, m, L,"
        " | and (...)*n",
        since="0.13.0",
    ),
)
"""Checks of a layout string. Both the parser and the config class make these checks."""


def _uneven_stages(a: Namespace) -> bool:
    stages, ranks = of(a), a.pipeline_model_parallel_size
    return bool(stages) and (not ranks or len(stages or ()) % ranks != 0)


def multiple(place: str) -> Check:
    """Return a check that a layout has the same number of stages for each pipeline rank."""
    return check(
        place,
        _uneven_stages,
        "pipeline_model_parallel_layout: found {pipeline_model_parallel_layout}; expected a number of stages"
        " that is a multiple of pipeline_model_parallel_size ({pipeline_model_parallel_size})",
        since="0.13.0",
    )


def of(a: Namespace) -> tuple[str, ...] | None:
    """Return the letters of each stage of the layout, which is a layout string or lists of layer
    names; None if there is no layout, or if its string is refused. The letter of an unknown name is
    `?`.
    """
    layout = a.pipeline_model_parallel_layout
    if layout is None or isinstance(layout, str):
        return layout if layout is None else stages(layout)
    return tuple(
        "".join(SPELLED.get(str(layer).strip().lower(), "?") for layer in stage) for stage in layout
    )
