"""Reports: a translation or a check as a table for people, as JSON for programs, and as an exit code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from shlex import quote
from typing import TYPE_CHECKING, Any

from bridge import launching
from bridge.clean import brief, clean
from bridge.config import Values, shown
from bridge.dialect import Config, Dialect
from bridge.drift import Change, Drift, Kind
from bridge.exits import Exit
from bridge.findings import UNKNOWN, Finding
from bridge.rules import Effect, How
from bridge.secrets import hide
from bridge.translation import Result

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

EFFECT_STYLE = dict(zip(Effect, ("bold white on red", "bold red", "yellow", "cyan", "dim"), strict=True))

FATES = {How.DERIVED: "in other words", How.APPROXIMATE: "in part"}
"""What became of a value that was not dropped and that no single value of the target stands for."""


def exit_of(remarks: Iterable[Finding | Change], threshold: Effect = Effect.NUMBERS) -> Exit:
    """What a command ends with that has these to say: an error if the run stops, findings if one reaches the threshold."""
    effects = {remark.effect for remark in remarks}
    if Effect.STOPS in effects:
        return Exit.ERROR
    return Exit.FINDINGS if any(effect.reaches(threshold) for effect in effects) else Exit.CLEAN


def remarks_of(result: Result) -> tuple[Finding, ...]:
    """Everything that a translation has to say, what was odd about its source included."""
    return (*result.findings, *all_of(result.source), *result.missing)


def all_of(config: Config) -> tuple[Finding, ...]:
    """Findings on a config, and what a part of a launch leaves to others."""
    return (*config.findings, *(finding for finding in config.missing if finding.effect is not Effect.STOPS))


def as_json(result: Result, threshold: Effect = Effect.NUMBERS) -> dict[str, Any]:
    """A translation as one JSON object; the form is stable and described in docs/json.md."""
    written = result.written
    return {
        "source": _side(result.source),
        "target": {**_side(result.config), "text": written.text, "code": _plain(written.code), "snippet": written.snippet},
        "environment": dict(written.environment),
        "launch": list(written.command),
        "plan": _plain(result.plan.values()),
        "fields": [
            {
                "path": field.path,
                "value": _plain(field.value),
                "sources": list(field.sources),
                "default_of": field.default_of,
                "how": str(field.how),
                "effect": str(field.effect),
                "note": field.note,
            }
            for field in result.fields
        ],
        "findings": [*map(finding_json, remarks_of(result))],
        "exit_code": exit_of(remarks_of(result), threshold),
    }


def check_json(config: Config, threshold: Effect = Effect.NUMBERS) -> dict[str, Any]:
    """A check as one JSON object."""
    return {
        "source": _side(config),
        "effective": _plain(config.effective),
        "findings": [finding_json(finding) for finding in all_of(config)],
        "exit_code": exit_of(all_of(config), threshold),
    }


def drift_json(drift: Drift, format: str | None = None, threshold: Effect = Effect.NUMBERS) -> dict[str, Any]:
    """What a file means in two releases as one JSON object; the migrated file as text in `format`."""
    migrated = drift.migrated
    return {
        "source": _side(drift.before),
        "to_version": drift.version,
        "accepted": drift.after is not None,
        "changes": [_drifted(change) for change in drift.changes],
        "new": _plain(drift.new),
        "lapsed": _plain(drift.lapsed),
        "remarks": [finding_json(finding) for finding in drift.remarks],
        "edits": [{"path": path, "before": _plain(old), "after": _plain(new)} for path, (old, new) in drift.edits.items()],
        "migrated": {**_side(migrated), "text": migrated.text(format)} if migrated else None,
        "left": [_drifted(change) for change in drift.left],
        "exit_code": exit_of((*drift.changes, *drift.remarks), threshold),
    }


def _drifted(change: Change) -> dict[str, Any]:
    return {
        "path": change.path,
        "kind": str(change.kind),
        "effect": str(change.effect),
        "given": change.given,
        "before": _plain(change.before),
        "after": _plain(change.after),
        "message": change.message,
        "origin": str(change.origin) if change.origin else None,
    }


def _side(config: Config) -> dict[str, Any]:
    return {
        "dialect": config.dialect.name,
        "version": config.version,
        "world_size": config.world_size,
        "given": _plain(config.given),
    }


def finding_json(finding: Finding) -> dict[str, Any]:
    """One finding as a JSON object."""
    return {
        "path": finding.path,
        "how": str(finding.how) if finding.how else None,
        "effect": str(finding.effect),
        "given": finding.given,
        "before": _plain(finding.before),
        "after": _plain(finding.after),
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
    return value if value is None or isinstance(value, bool | int | float | str) else repr(value)


def text(result: Result, console: Console) -> None:
    """Print a translation as tables: what was lost or changed first, then what mapped."""
    source, target = result.source, result.config
    _first((*source.remarks, *result.findings), console)
    console.print(f"[bold]{_name(source)}[/] -> [bold]{_name(target)}[/]  on {target.world_size or '?'} ranks")
    _told("On reading", all_of(result.source), console, "What the source lacks")
    if result.findings:
        console.print(_losses(result.findings))
    console.print(_mapped(result))
    _outside(result, console)
    _told("", result.missing, console)
    console.print(summary(result))


def check_text(config: Config, console: Console) -> None:
    """Print what there is to say about one config."""
    _first(config.remarks, console)
    verdict = "would not run" if exit_of(config.findings) is Exit.ERROR else "valid"
    console.print(f"[bold]{_name(config)}[/]: {len(config.given)} settings given, {verdict}")
    _told("Findings", all_of(config), console)


def _first(findings: Iterable[Finding], console: Console) -> None:
    """What puts the whole report in doubt."""
    for finding in findings:
        if finding.rule == UNKNOWN:
            console.print(clean(finding.message), markup=False, highlight=False, soft_wrap=True)


def _told(title: str, findings: Iterable[Finding], console: Console, beside: str = "You still have to add") -> None:
    """Findings under a title, and under one of their own what is still to be added."""
    lacking = [finding for finding in findings if finding.how is How.MISSING]
    others = [finding for finding in findings if finding.how is not How.MISSING]
    for heading, group in ((title, others), (beside, lacking)):
        if group:
            console.print(_remarks(heading, group))


def summary(result: Result) -> str:
    """One line: how many settings survived, and how the others fared by effect."""
    lost = [finding for finding in result.findings if finding.how is not How.DERIVED]
    counts = Counter(finding.effect for finding in lost)
    parts = [f"{counts[effect]} {effect}" for effect in Effect if counts[effect]]
    changed = f"{len(lost)} lost or changed ({', '.join(parts)})" if lost else "nothing lost"
    return f"{len(result.fields)} settings written; {changed}"


def _name(config: Config) -> str:
    return _release(config.dialect, config.version)


def _release(dialect: Dialect, version: str) -> str:
    """A stack and its release; that it is the newest known one is said, as it is taken where none was named."""
    return f"{dialect.title} {version}{' (newest known)' if version == dialect.newest else ''}"


def table_of(title: str, *columns: str) -> Table:
    """An empty table in the style of every report."""
    from rich import box
    from rich.table import Table

    class Clean(Table):
        """A table in whose cells input stays on its line and does nothing to the terminal."""

        def add_row(self, *cells: Any, **options: Any) -> None:
            """As rich does, with texts cleaned."""
            super().add_row(*(brief(hide(clean(cell))) if isinstance(cell, str) else cell for cell in cells), **options)

    table = Clean(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, highlight=False)
    for column in columns:
        table.add_column(column, overflow="fold", min_width=26 if column == "setting" else None)
    return table


def _by_effect(findings: Iterable[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda finding: (finding.effect.rank, not finding.given))


def _styled(effect: Effect) -> str:
    return f"[{EFFECT_STYLE[effect]}]{effect}[/]"


def _remarks(title: str, findings: Iterable[Finding]) -> Table:
    from rich.markup import escape

    table = table_of(title, "setting", "what")
    for finding in _by_effect(findings):
        place = _place(finding)
        where = f"{finding.path} ({place})" if place else finding.path
        table.add_row(escape(where), f"{_styled(finding.effect)}: {escape(finding.message)}")
    return table


def _place(finding: Finding) -> str:
    """Where the setting was written; a spelling that says no more than its path is left out."""
    origin = finding.origin
    if origin is None:
        return ""
    alike = origin.spelling.lstrip("-").replace("-", "_") == finding.path
    return str(replace(origin, spelling="") if alike else origin)


def _losses(findings: Iterable[Finding]) -> Table:
    from rich.markup import escape

    table = table_of("Lost or changed", "setting", "change", "why")
    for (how, effect, message), group in _alike(findings):
        setting = ", ".join(finding.path for finding in group)
        change = _change(group[0]) if len(group) == 1 else how
        table.add_row(escape(setting), escape(change), f"{_styled(effect)}: {escape(message)}")
    return table


def _change(finding: Finding) -> str:
    """A change as `before -> after`, or what became of the value."""
    if finding.how is None:
        return ""
    if finding.how is How.DROPPED or finding.after is None:
        return f"{shown(finding.before, 24)} {FATES.get(finding.how, 'dropped')}"
    return f"{shown(finding.before, 24)} -> {shown(finding.after, 24)}"


def _alike(findings: Iterable[Finding]) -> list[tuple[tuple[str, Effect, str], list[Finding]]]:
    """Findings by effect; those that fare alike for the same harmless reason share a row."""
    rows: dict[tuple[str, Effect, str, str], list[Finding]] = {}
    for finding in _by_effect(findings):
        alone = finding.path if finding.effect is not Effect.NONE else ""
        rows.setdefault((str(finding.how or ""), finding.effect, finding.message, alone), []).append(finding)
    return [((how, effect, message), group) for (how, effect, message, _), group in rows.items()]


def _mapped(result: Result) -> Table:
    from rich.markup import escape

    table = table_of(f"Written for {result.config.dialect.title}", "setting", "value", "from", "how")
    for field in result.fields:
        row = (
            field.path,
            shown(field.value),
            ", ".join(field.sources) or f"default of {field.default_of}",
            str(field.how),
        )
        table.add_row(*map(escape, row))
    return table


def _outside(result: Result, console: Console) -> None:
    """What the target keeps outside its file: code, environment, launch command."""
    written = result.written
    if written.snippet:
        console.print("[bold]In the training script[/]")
        console.print(written.snippet, markup=False, highlight=False, soft_wrap=True)
    if written.environment:
        console.print("[bold]Environment[/]")
        console.print(
            "\n".join(f"export {name}={quote(clean(value))}" for name, value in written.environment.items()), markup=False
        )
    if written.command:
        console.print("[bold]Launch[/]")
        console.print(clean(launching.line(written.command)), markup=False, highlight=False, soft_wrap=True)


def drift_text(drift: Drift, console: Console) -> None:
    """Print what a file means in two releases: the differences first, then what the migrated file says otherwise."""
    before, to = drift.before, _release(drift.before.dialect, drift.version)
    _first(drift.remarks, console)
    verdict = "means the same" if drift.same else "means something else" if drift.after else f"is refused by {drift.version}"
    console.print(f"[bold]{_name(before)}[/] -> [bold]{to}[/]: the file {verdict}")
    if drift.changes:
        console.print(_changes("What differs", drift.changes, before.version, drift.version))
    if drift.remarks:
        console.print(_remarks(f"{drift.version} adds", drift.remarks))
    for title, settings in ((f"only in {drift.version}", drift.new), (f"only in {before.version}", drift.lapsed)):
        if settings:
            console.print(f"{len(settings)} settings {title}, none of them in the file", markup=False)
    _migrated(drift, console)


def _changes(title: str, changes: Iterable[Change], old: str, new: str) -> Table:
    from rich.markup import escape

    rows = table_of(title, "setting", old, new, "why")
    for change in sorted(changes, key=lambda change: (change.effect.rank, list(Kind).index(change.kind))):
        where = f"{change.path} (line {change.origin.line})" if change.origin and change.origin.line else change.path
        plain = change.kind in (Kind.DEFAULT, Kind.DERIVED)
        why = f"{_styled(change.effect)}: {change.kind}{'' if plain else '; ' + escape(change.message)}"
        rows.add_row(escape(where), escape(_said(change.before)), escape(_said(change.after)), why)
    return rows


def _said(value: Any) -> str:
    return "-" if value is None else shown(value, 24)


def _migrated(drift: Drift, console: Console) -> None:
    from rich.markup import escape

    if drift.migrated is None:
        console.print(f"{drift.version} accepts no part of the file: nothing to write")
        return
    if drift.edits:
        rows = table_of(f"To mean the same in {drift.version}", "setting", "in the file", "to write")
        for path, (old, new) in drift.edits.items():
            rows.add_row(*map(escape, (path, _said(old), _said(new))))
        console.print(rows)
    if drift.left:
        console.print(_changes("What no file says there", drift.left, drift.before.version, drift.version))
