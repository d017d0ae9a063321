"""Settings with which transformers stops when it builds a model's config or the model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from bridge.plan.families import NULL
from bridge.plan.families.refusals import REFUSALS, STRICT, find_refused_values, keys_below
from bridge.stack.check_tables import Checks, report_remarks
from bridge.stack.checks import Check, Seen
from bridge.stack.dialect import Config
from bridge.stack.findings import Finding
from bridge.stack.releases import Releases
from bridge.stack.rules import Effect
from compat.huggingface.effective import foreign
from compat.huggingface.releases import KNOWN

TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def _identity(value: Any, several: bool) -> bool:
    """Return whether a value is the number of a token, or a list of such numbers if `several`."""
    if several and isinstance(value, list | tuple):
        return all(_identity(one, False) for one in value)
    return value in (None, NULL) or (isinstance(value, int) and not isinstance(value, bool))


def _token(path: str) -> Check:
    several = path == "eos_token_id"
    return Check(
        path,
        lambda view: not _identity(view[path], several),
        f"found {{{path}}}, which transformers refuses when it builds the config; expected a whole"
        f" number{' or a list of them' if several else ''}",
        Effect.STOPS,
        f"configuration_utils.py: PreTrainedConfig.{path}",
        since=STRICT,
        name="no-number-of-a-token",
    )


WIDTHS = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")
FORMATS = frozenset(
    (
        *("auto", "float64", "double", "float32", "float", "float16", "half", "bfloat16", *WIDTHS),
        *("int8", "int16", "short", "int32", "int", "int64", "long", "bool", "complex64"),
        *("uint8", "uint16", "uint32", "uint64", "complex128"),
    )
)
"""Names of torch's formats."""


def _format(path: str) -> Check:
    return Check(
        path,
        lambda view: view[path] not in FORMATS,
        f"found {{{path}}}, which is no format of torch: transformers stops when it builds the config;"
        " use a name such as bfloat16",
        Effect.STOPS,
        "configuration_utils.py: PreTrainedConfig, getattr(torch, dtype)",
        needs=(path,),
        name="no-format-of-torch",
    )


def _for_each_block(path: str) -> Check:
    return Check(
        path,
        lambda view: len(view[path]) != view["num_hidden_layers"],
        "found a list of another length than num_hidden_layers ({num_hidden_layers}): transformers"
        " stops when it builds the config; use one entry for each block",
        Effect.STOPS,
        "configuration_utils.py: PreTrainedConfig.validate_layer_type",
        since=STRICT,
        needs=(path, "num_hidden_layers"),
        name="no-entry-for-each-block",
    )


CHECKS = Checks(
    Releases("huggingface", KNOWN),
    *(replace(row.check(lambda view: view["model_type"]), since=row.since) for row in REFUSALS),
    *map(_for_each_block, ("layer_types", "mlp_layer_types")),
    *map(_token, TOKENS),
    *map(_format, ("torch_dtype", "dtype")),
)


def inspect(config: Config) -> Iterator[Finding]:
    """Yield findings on what stops, and on layers that a plan cannot describe."""
    settings = keys_below("", config.given)
    view = Seen({**settings, **config.effective.flat()}, config.given, config.context)
    yield from CHECKS.remarks(view, config.origins)
    if CHECKS.releases.since(config.version, STRICT):
        others = {path: value for path, value in settings.items() if path not in TOKENS}
        refusals = find_refused_values(str(view["model_type"]), others)
        yield from report_remarks(refusals, view, config.origins)
    yield from foreign(config.given, config.origins)
