"""What `convert --script` writes beside a config: the whole script that starts the run, and the config of its model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from bridge import stacks
from bridge.dialect import Config, Dialect
from bridge.errors import BridgeError
from bridge.findings import Finding
from bridge.lifting import claims
from bridge.translation import Result, translate


def scripted(result: Result, output: Path | None) -> Result:
    """The translation with its script; what the model's config loses is among its findings, and what lacks is named."""
    if output is None or result.put is None:
        raise BridgeError("--script: needs -o OUT; the script lies beside it")
    model, findings = described(result)
    program = result.config.dialect.program(result.put, result.config, result.plan.values(), model)
    return replace(result, put=program.written, findings=findings, lacking=program.lacking)


def described(result: Result) -> tuple[Config | None, tuple[Finding, ...]]:
    """The model's own config, where the target leaves the model to the script and the source tells it; and what is lost then."""
    if result.config.dialect.model:
        return None, result.findings
    model = translate(result.source, about_models())
    told = None if model.missing else model.config
    held = result.config.dialect.held(result.plan.values(), told)
    return told, (*_others(result), *_of_model(model, held))


def about_models() -> Dialect:
    """The dialect of configs that say no more than what the model is."""
    return next(dialect for dialect in map(stacks.load, stacks.OWN) if dialect.about == "model")


def _told(dialect: Dialect, finding: Finding) -> bool:
    """Whether a finding is about the model."""
    rule = claims(dialect).get(finding.path)
    return finding.path.startswith("model") or (rule is not None and rule.about_model)


def _others(result: Result) -> Iterator[Finding]:
    """Findings but for those that leave the model to the script."""
    yield from (finding for finding in result.findings if not (finding.given and _told(result.source.dialect, finding)))


def _of_model(model: Result, held: frozenset[str]) -> Iterator[Finding]:
    """What the model's config loses and the script does not hold."""
    dialect = model.source.dialect
    kept = {*held, *(path for path, rule in claims(dialect).items() if rule.ours and held.issuperset(rule.ours))}
    yield from (finding for finding in model.findings if _told(dialect, finding) and finding.path not in kept)
