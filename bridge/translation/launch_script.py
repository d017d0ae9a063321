"""Files that `convert --script` writes next to a config: the script that starts the run, and the
config of its model.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from bridge.errors import BridgeError
from bridge.stack import registry
from bridge.stack.dialect import Config, Dialect
from bridge.stack.findings import Finding
from bridge.stack.stack_tables import StackTables
from bridge.translation.lift import claims
from bridge.translation.translate import Result, translate


def add_script(result: Result, output: Path | None) -> Result:
    """Add the script that starts the run to `result`. In the returned result, `findings` also has
    the losses of the model's config, and `lacking` has a finding for each missing setting.
    """
    if output is None or result.put is None:
        raise BridgeError("--script: needs -o OUT; the script is written next to OUT")
    model, findings = describe_model(result)
    program = result.config.dialect.program(result.put, result.config, result.plan.values(), model)
    return replace(result, put=program.written, findings=findings, lacking=program.lacking)


def describe_model(result: Result) -> tuple[Config | None, tuple[Finding, ...]]:
    """Return the model's own config, and the findings of the whole translation.

    The config is None if the target's config defines the model, or if the source lacks a part of
    the model.
    """
    if result.config.dialect.model:
        return None, result.findings
    model = translate(result.source, about_models())
    model_config = None if model.missing else model.config
    script_fields = result.config.dialect.model_fields_in_script(result.plan.values(), model_config)
    source = result.source.dialect
    # The target alone would lose every setting of the model. What its own config carries, or the
    # script holds, is not lost.
    rest = [one for one in result.findings if not (one.given and _is_about_model(source, one))]
    survivors = {
        *script_fields,
        *(
            path
            for path, rule in claims(source).items()
            if rule.ours and script_fields.issuperset(rule.ours)
        ),
    }
    losses = [
        one for one in model.findings if _is_about_model(source, one) and one.path not in survivors
    ]
    return model_config, (*rest, *losses)


def about_models() -> Dialect:
    """The dialect whose configs describe a model and nothing else."""
    return next(dialect for dialect in map(registry.load, registry.OWN) if dialect.about == "model")


def _is_about_model(dialect: StackTables, finding: Finding) -> bool:
    """Return whether a finding is about the model."""
    rule = claims(dialect).get(finding.path)
    return finding.path.startswith("model") or (rule is not None and rule.about_model)
