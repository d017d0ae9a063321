"""`convert --script`: what starts the run, written whole beside the config; the model's own config beside that."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from bridge import stacks
from bridge.dialect import Dialect
from bridge.errors import BridgeError
from bridge.findings import Finding
from bridge.lifting import claims
from bridge.translation import Result, translate

HELD = "model.sequence"
"""A fact of the model that the script holds, where the model's config has no key for it."""


def scripted(result: Result, output: Path | None) -> Result:
    """The translation with its script; what the model's config loses is among its findings, and what lacks is named."""
    put, target = result.put, result.config.dialect
    if output is None or put is None:
        raise BridgeError("--script: needs -o OUT; the script lies beside it")
    model = None if target.model else _model(result)
    if model is not None:
        result = replace(result, findings=(*_others(result), *_of_model(model)))
    told = model.config if model and not model.missing else None
    program = target.program(put, result.config, result.plan.values(), told)
    return replace(result, put=program.written, lacking=program.lacking)


def _model(result: Result) -> Result:
    """The source's model, as a file that says no more than that."""
    about = next(dialect for dialect in map(stacks.load, stacks.OWN) if dialect.about == "model")
    return translate(result.source, about)


def _told(dialect: Dialect, finding: Finding) -> bool:
    """Whether a finding is about the model."""
    rule = claims(dialect).get(finding.path)
    return finding.path.startswith("model") or (rule is not None and rule.about_model)


def _others(result: Result) -> list[Finding]:
    """Findings but for those that leave the model to the script."""
    return [finding for finding in result.findings if not (finding.given and _told(result.source.dialect, finding))]


def _of_model(model: Result) -> list[Finding]:
    dialect = model.source.dialect
    held = [path for path, rule in claims(dialect).items() if rule.ours == (HELD,)]
    return [finding for finding in model.findings if _told(dialect, finding) and finding.path not in held]
