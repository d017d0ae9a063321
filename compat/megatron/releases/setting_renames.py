"""Settings that Megatron renamed between releases, as its parser and its recipes renamed them."""

from __future__ import annotations

import re
from itertools import pairwise

from bridge.stack.setting_renames import Move, Words, rename_setting, switch_to_value
from compat.megatron.releases import MAIN

UNITS = ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K"))
"""Suffixes of numbers in a schedule of thresholds, with their factors
(num_microbatches_calculator.py, `_parse_numeric_value`).
"""
STEP = re.compile(r"(\d+(?:\.\d+)?[TBMK]?):(\d+(?:\.\d+)?[TBMK]?)")


def _steps(settings: Words) -> Words:
    """Convert `rampup_batch_size` to a schedule of thresholds in tokens.

    Empty if the ramp has no whole number of equal steps.
    """
    full, length = settings.get("global_batch_size"), settings.get("seq_length")
    growth = settings["rampup_batch_size"]
    if len(growth) != 3 or not all(isinstance(number, int) for number in growth):
        return {}
    # Megatron adds `increment` after each equal part of the samples, until the batch is full.
    start, increment, samples = growth
    count = (full - start) // increment if full and increment > 0 else 0
    if not length or count < 1 or (full - start) % increment or samples % count:
        return {}
    each = samples // count * length  # tokens of a part: a schedule counts tokens, a ramp samples
    steps = (f"{_in_units(step * each)}:{start + step * increment}" for step in range(count + 1))
    return {"step_batch_size_schedule": " ".join(steps)}


def _in_units(tokens: int) -> str:
    """Return a number of tokens, written with the largest suffix that gives a whole number."""
    if tokens:
        for unit, suffix in UNITS:
            if tokens % unit == 0:
                return f"{tokens // unit}{suffix}"
    return str(tokens)


def _growth(settings: Words) -> Words:
    """Convert a schedule of equal steps to `rampup_batch_size`.

    Empty if the distances or the increments of the steps differ.
    """
    schedule, length = settings["step_batch_size_schedule"], settings.get("seq_length")
    matches = [STEP.fullmatch(step) for step in schedule.upper().replace(",", " ").split()]
    # (tokens, batch size) of each step, in order; none if the text has another form.
    steps = (
        sorted((_number(step[1]), _number(step[2])) for step in matches if step)
        if all(matches)
        else []
    )
    each = {(after[0] - before[0], after[1] - before[1]) for before, after in pairwise(steps)}
    # A ramp starts at the first sample, and all its steps are alike.
    if not length or len(each) != 1 or steps[0][0]:
        return {}
    ((tokens, increment),) = each
    if tokens % length or increment < 1:
        return {}
    samples = tokens // length * (len(steps) - 1)
    return {
        "rampup_batch_size": [steps[0][1], increment, samples],
        "global_batch_size": steps[-1][1],
    }


def _number(text: str) -> int:
    return int(
        float(text.rstrip("TBMK")) * {suffix: unit for unit, suffix in UNITS}.get(text[-1], 1)
    )


def _variant(settings: Words, old: str, new: str) -> Words:
    return (
        {"experimental_attention_variant": new}
        if settings["experimental_attention_variant"] == old
        else {}
    )


MOVES: tuple[Move, ...] = (
    rename_setting("use_custom_fsdp", "use_megatron_fsdp", "0.14.0", source="arguments.py"),
    rename_setting(
        "keep_fp8_transpose_cache_when_using_custom_fsdp",
        "keep_fp8_transpose_cache",
        "0.14.0",
        source="arguments.py",
    ),
    switch_to_value(
        "enable_cuda_graph",
        "cuda_graph_impl",
        "local",
        "0.15.0",
        "deprecated",
        "arguments.py, validate_args",
    ),
    switch_to_value(
        "external_cuda_graph",
        "cuda_graph_impl",
        "transformer_engine",
        "0.15.0",
        "deprecated",
        "arguments.py, validate_args",
    ),
    switch_to_value(
        "moe_enable_deepep",
        "moe_flex_dispatcher_backend",
        "deepep",
        "0.16.0",
        "deprecated",
        "transformer_config.py, __post_init__; "
        "NVIDIA's recipes of 0.18 use hybridep, another library",
    ),
    Move(
        "0.16.0",
        ("rampup_batch_size",),
        ("rampup_batch_size",),
        lambda settings: {
            "rampup_batch_size": [
                int(word) if isinstance(word, str) and word.isdecimal() else word
                for word in settings["rampup_batch_size"]
            ]
        },
        lambda settings: {
            "rampup_batch_size": [str(number) for number in settings["rampup_batch_size"]]
        },
        source="arguments.py: text before 0.16, numbers from 0.16 on",
    ),
    Move(
        "0.18.0",
        ("cuda_graph_scope",),
        ("cuda_graph_modules",),
        lambda settings: {
            "cuda_graph_modules": (
                settings["cuda_graph_scope"]
                if isinstance(settings["cuda_graph_scope"], list)
                else [settings["cuda_graph_scope"]]
            )
        },
        lambda settings: {"cuda_graph_scope": settings["cuda_graph_modules"]},
        "deprecated",
        "arguments.py, validate_args",
    ),
    Move(
        "0.18.0",
        ("rampup_batch_size", "global_batch_size"),
        ("step_batch_size_schedule",),
        _steps,
        _growth,
        "deprecated and ignored: the run starts at its full batch size",
        "num_microbatches_calculator.py, _build_num_microbatches_calculator",
    ),
    Move(
        MAIN,
        ("experimental_attention_variant",),
        ("experimental_attention_variant",),
        lambda settings: _variant(settings, "gated_delta_net", "gdn"),
        lambda settings: _variant(settings, "gdn", "gated_delta_net"),
        "deprecated",
        "experimental_attention_variant_module_specs.py, normalize_experimental_attention_variant",
    ),
)
"""Oldest first."""
