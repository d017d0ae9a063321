"""Low-rank adapters that a recipe asks for, made with the library peft. Source:
components/_peft/lora.py, PeftConfig.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import translate
from importlib.util import find_spec
from typing import Any

from torch import nn

from bridge.errors import BridgeError, ConfigError
from bridge.stack.findings import Finding
from bridge.stack.rules import Effect
from compat.automodel.runtime.sections import Section, only, target

KNOWN = (
    "dim",
    "alpha",
    "dropout",
    "dropout_position",
    "target_modules",
    "exclude_modules",
    "match_all_linear",
    "use_triton",
)


def add_adapters(model: nn.Module, section: Section) -> tuple[nn.Module, tuple[Finding, ...]]:
    """Add the low-rank adapters of the section `peft` to `model`, and train only the adapters. If
    the section is empty, `model` is returned unchanged.

    The second result has findings about the adapters. Raises `BridgeError` if peft is not installed
    or does not have the wanted adapters.
    """
    if not section:
        return model, ()
    target(section, "peft", ("PeftConfig",))
    only(section, "peft", KNOWN)
    if find_spec("peft") is None:
        raise BridgeError(
            "peft: the library peft, which makes the adapters, is not installed; run pip install"
            " peft"
        )
    if section.get("dropout") and section.get("dropout_position", "post") != "pre":
        raise ConfigError(
            "peft.dropout: peft has dropout only on an adapter's input; set dropout_position to"
            " pre, or dropout to 0"
        )
    import peft  # type: ignore[import-not-found, unused-ignore]

    config = peft.LoraConfig(
        r=section.get("dim", 8),
        lora_alpha=section.get("alpha", 32),
        lora_dropout=section.get("dropout") or 0.0,
        target_modules=list(_adapter_modules(model, section)),
        task_type="CAUSAL_LM",
    )
    wrapper: nn.Module = peft.get_peft_model(model, config)
    findings = []
    if section.get("use_triton"):
        findings.append(
            Finding(
                "peft.use_triton",
                "adapters run on torch's kernels",
                Effect.ROUNDING,
                True,
                before=True,
            )
        )
    return wrapper, tuple(findings)


def _adapter_modules(model: nn.Module, section: Section) -> Iterator[str]:
    """Yield the names of the linear layers that get an adapter. A pattern of the section matches
    the whole name of a layer or the last part of the name.
    """
    targets, exclusions = (
        _patterns(section.get(name)) for name in ("target_modules", "exclude_modules")
    )
    everything = bool(section.get("match_all_linear"))
    if not (targets or everything or exclusions):
        raise ConfigError("peft.target_modules: missing; name modules, or set match_all_linear")
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    for name, module in model.named_modules():
        linear = (
            isinstance(module, nn.Linear)
            and module is not head
            and not _matches_pattern(name, exclusions)
        )
        if linear and (everything or not targets or _matches_pattern(name, targets)):
            yield name


def _patterns(patterns: Any) -> list[re.Pattern[str]]:
    return [
        re.compile(translate(each))
        for each in ([patterns] if isinstance(patterns, str) else patterns or [])
    ]


def _matches_pattern(name: str, patterns: list[re.Pattern[str]]) -> bool:
    return any(
        pattern.fullmatch(name) or pattern.fullmatch(name.rpartition(".")[2])
        for pattern in patterns
    )
