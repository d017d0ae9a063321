"""Reports for programs: a translation, a check or a drift as JSON, and as an exit code."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bridge.plan.section import Values
from bridge.report.exit_codes import Exit
from bridge.stack.dialect import Config
from bridge.stack.findings import Finding
from bridge.stack.rules import Effect
from bridge.stack.sources import ResolvedRun, Said
from bridge.translation.translate import Result

if TYPE_CHECKING:
    from bridge.report import json_types
    from bridge.translation.drift import Drift, DriftChange


def exit_of(remarks: Iterable[Finding | DriftChange], threshold: Effect = Effect.NUMBERS) -> Exit:
    """The exit code for these remarks: an error if one stops the run, findings if one reaches the threshold, else clean."""
    effects = {remark.effect for remark in remarks}
    if Effect.STOPS in effects:
        return Exit.ERROR
    return Exit.FINDINGS if any(effect.reaches(threshold) for effect in effects) else Exit.CLEAN


def remarks_of(result: Result) -> tuple[Finding, ...]:
    """All findings of a translation: on losses, on its source, and on settings that the target
    needs and the source does not give.
    """
    return (*result.findings, *all_of(result.source), *result.missing)


def all_of(config: Config) -> tuple[Finding, ...]:
    """Findings on a config. If the config is only a part of a launch, the findings include settings
    that other parts have to give.
    """
    return (
        *config.findings,
        *(finding for finding in config.missing if finding.effect is not Effect.STOPS),
    )


def as_json(
    result: Result, threshold: Effect = Effect.NUMBERS, findings: Sequence[Finding] | None = None
) -> json_types.Converted:
    """Return a translation as the stable JSON object that docs/json.md describes. `findings` are
    the findings to include; None stands for all findings.
    """
    output, selection = result.written, remarks_of(result) if findings is None else findings
    return {
        "source": _side(result.source),
        "target": {
            **_side(result.config),
            "text": output.text,
            "code": _plain(output.code),
            "snippet": output.snippet,
        },
        "environment": dict(output.environment),
        "launch": list(output.command),
        "plan": _plain(result.plan.values()),
        "fields": [
            {
                "path": field.path,
                "value": _plain(field.value),
                "sources": list(field.sources),
                "default_of": field.default_of,
                "how": field.how,
                "effect": field.effect,
                "note": field.note,
            }
            for field in result.fields
        ],
        "findings": [*map(finding_json, selection)],
        "exit_code": exit_of(selection, threshold),
    }


def check_json(
    config: Config, threshold: Effect = Effect.NUMBERS, findings: Sequence[Finding] | None = None
) -> json_types.Checked:
    """Return a check as one JSON object. `findings` are the findings to include; None stands for
    all findings.
    """
    selection = all_of(config) if findings is None else findings
    return {
        "source": _side(config),
        "effective": _plain(config.effective),
        "findings": [finding_json(finding) for finding in selection],
        "exit_code": exit_of(selection, threshold),
    }


def resolution_json(
    run: ResolvedRun, told: Sequence[Finding], file: str, code: Exit
) -> json_types.Resolved:
    """Return who wins for each setting of a run as one JSON object. `file` is the file that the user
    gave.
    """

    def place(said: Said) -> json_types.Place:
        return {"source": said.source or file, "line": said.line, "setting": said.setting}

    stops = [one for one in told if one.effect is Effect.STOPS]
    return {
        "dialect": run.name,
        "version": run.version,
        "world_size": run.world_size,
        "settings": [
            {
                "setting": one.setting,
                "value": _plain(one.value),
                "winner": place(one.winner),
                "overruled": [
                    {**place(claim.said), "value": _plain(claim.said.value), "why": claim.advice}
                    for claim in one.overruled
                ],
                "why": one.why,
            }
            for one in run.resolution.settings
        ],
        "ignored": [
            {**place(one.said), "value": _plain(one.said.value), "why": one.why}
            for one in run.resolution.unheard
        ],
        "stops": [
            {
                "source": (one.origin.file if one.origin else "") or file,
                "line": one.origin.line if one.origin else None,
                "setting": one.path,
                "message": one.message,
            }
            for one in stops
        ],
        "findings": [*map(finding_json, told)],
        "exit_code": code,
    }


def difference_json(
    names: tuple[str, str], sides: tuple[Config, Config], findings: Iterable[Finding], code: Exit
) -> json_types.Compared:
    """The differences in meaning of two configs as one JSON object."""
    first, second = (
        _side_with_file(name, config) for name, config in zip(names, sides, strict=True)
    )
    return {
        "first": first,
        "second": second,
        "findings": [*map(finding_json, findings)],
        "exit_code": code,
    }


def _side_with_file(name: str, config: Config) -> json_types.Named:
    return {"file": name, **_side(config)}


def drift_json(
    drift: Drift, format: str | None = None, threshold: Effect = Effect.NUMBERS
) -> json_types.Drifting:
    """The meaning of a file in two releases as one JSON object, with the text of the migrated file
    in `format`.
    """
    migration = drift.migrated
    return {
        "source": _side(drift.before),
        "to_version": drift.version,
        "accepted": drift.after is not None,
        "changes": [_change_as_json(change) for change in drift.changes],
        "new": _plain(drift.new),
        "lapsed": _plain(drift.lapsed),
        "remarks": [finding_json(finding) for finding in drift.remarks],
        "edits": [
            {"path": path, "before": _plain(old), "after": _plain(new)}
            for path, (old, new) in drift.edits.items()
        ],
        "migrated": {**_side(migration), "text": migration.text(format)} if migration else None,
        "left": [_change_as_json(change) for change in drift.left],
        "exit_code": exit_of((*drift.changes, *drift.remarks), threshold),
    }


def _change_as_json(change: DriftChange) -> json_types.Drifted:
    return {
        "path": change.path,
        "kind": str(change.kind),
        "effect": change.effect,
        "given": change.given,
        "before": _plain(change.before),
        "after": _plain(change.after),
        "message": change.message,
        "origin": str(change.origin) if change.origin else None,
    }


def _side(config: Config) -> json_types.Side:
    return {
        "dialect": config.dialect.name,
        "version": config.version,
        "world_size": config.world_size,
        "given": _plain(config.given),
    }


def finding_json(finding: Finding) -> json_types.Told:
    """One finding as a JSON object."""
    return {
        "path": finding.path,
        "how": finding.how or None,
        "effect": finding.effect,
        "given": finding.given,
        "before": _plain(finding.before),
        "after": _plain(finding.after),
        "change": finding.change,
        "message": finding.message,
        "rule": finding.id,
        "origin": str(finding.origin) if finding.origin else None,
    }


def _plain(value: Any) -> Any:
    if isinstance(value, Values):
        return {path: _plain(inner) for path, inner in value.items()}
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    # What JSON has no form for, such as a path or an enum, stands as Python writes it: nothing is left out.
    return value if value is None or isinstance(value, bool | int | float | str) else repr(value)
