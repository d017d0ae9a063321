"""The `show` command: print the facts about the fields of a stack, for people and as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from bridge.errors import BridgeError, ConfigError, nearest
from bridge.files.shown import show_value
from bridge.plan.section import fields
from bridge.report import json_types
from bridge.report.console import console
from bridge.report.exit_codes import Exit
from bridge.report.tables import Grid
from bridge.stack import registry
from bridge.stack.dialect import Dialect
from bridge.stack.rules import Effect
from bridge.stack.stack_tables import StackTables
from bridge.translation import reference
from bridge.translation.reference import Arrival, Entry, Span

if TYPE_CHECKING:
    from rich.console import Console


SCHEMA = "https://json-schema.org/draft/2020-12/schema"


def show(name: str, field: str | None, as_json: bool, schema: bool = False) -> int:
    """Show one field, a section, all fields of a dialect, or the JSON Schema of its files. Returns the exit code."""
    if schema:
        _print_object({"$schema": SCHEMA, **registry.load(name).editor_schema()})
        return Exit.CLEAN
    content = _shown_content(registry.load(name), field)
    if as_json:
        _print_object(
            _entry_object(content)
            if isinstance(content, Entry)
            else _listing_object(registry.load(name), content)
        )
    elif isinstance(content, Entry):
        _print_field(content, console(sys.stdout))
    else:
        _print_list(registry.load(name), content, console(sys.stdout))
    return Exit.CLEAN


Sections = Mapping[str, tuple[Entry, ...]]


def _shown_content(dialect: Dialect, field: str | None) -> Entry | Sections:
    if field is None:
        return reference.entries(dialect)
    path = resolve_field(dialect, field)
    if path is not None:
        # Stacks of other folders are loaded only if they are named, as this one may be.
        return reference.entry(
            dialect,
            path,
            [registry.load(other) for other in dict.fromkeys((*registry.OWN, dialect.name))],
        )
    inside = {
        section: group
        for section, group in reference.entries(dialect).items()
        if f"{section}.".lower().startswith(f"{field}.".lower())
    }
    if not inside:
        raise ConfigError(reference.unknown(dialect, field))
    return inside


def resolve_field(dialect: StackTables, field: str) -> str | None:
    """Return the path that `field` names: `field` may be the path itself, or another spelling such as a flag."""
    if field in fields(dialect.schema):
        return field
    return next((path for path in fields(dialect.schema) if field in dialect.spellings(path)), None)


# For people


def _print_field(entry: Entry, console: Console) -> None:
    from rich.markup import escape

    console.print(f"[bold]{escape(entry.path)}[/]  ({entry.title}, {escape(entry.section)})")
    console.print(escape(entry.doc))
    console.print(_facts_table(entry))
    console.print(_elsewhere_table(entry))


def _facts_table(entry: Entry) -> Grid:
    from rich.markup import escape

    table = Grid("", ("", ""))
    for name, value in _fact_rows(entry):
        for place, line in enumerate(value.splitlines()):
            table.add_row("" if place else name, escape(line))
    return table


def _fact_rows(entry: Entry) -> Iterator[tuple[str, str]]:
    yield "written as", ", ".join(entry.spellings)
    yield "type", entry.kind
    yield "default", "\n".join(default_of(span, len(entry.spans) > 1) for span in entry.spans)
    yield "releases", releases_of(entry.spans)
    yield "plan", ", ".join(entry.plan) or "stagebridge does not translate this field"
    yield "if lost", effect_of(entry)
    yield "remark", entry.note
    yield "what may be lost", entry.lossy
    yield "stands on", entry.source
    for check in entry.checks:
        place = "; ".join(filter(None, (check.place, check.window)))
        yield (
            "the run stops" if check.effect is Effect.STOPS else "careful",
            f"{check.message} ({place})",
        )
    for row in entry.disagreements:
        yield "documented", f"{row.said} ({row.place})"
        since, until = (
            f"; since {row.since}" if row.since else "",
            f"; until {row.until}" if row.until else "",
        )
        yield "but in the code", f"{row.done} ({row.source}{since}{until})"


def default_of(span: Span, with_release: bool) -> str:
    """Return the text of a default, with the releases in which it applies."""
    value = "unset" if span.default is None else show_value(span.default)
    return f"{value}  ({span.since} to {span.until})" if with_release else value


def releases_of(spans: tuple[Span, ...]) -> str:
    """Return the first and the last release that have a field; gaps between them are not shown."""
    return f"{spans[0].since} to {spans[-1].until}" if spans else "none"


def effect_of(entry: Entry) -> str:
    """Describe how the run changes if the field is lost."""
    return str(entry.effect) if entry.effect else reference.DEPENDS


def _elsewhere_table(entry: Entry) -> Grid:
    from rich.markup import escape

    table = _make_table("In the other stacks", "stack", "there", "how", "why")
    for arrival in entry.arrivals:
        table.add_row(
            *map(
                escape,
                (arrival.title, place_of(arrival), str(arrival.how), "; ".join(arrival.reasons)),
            )
        )
    return table


def place_of(arrival: Arrival) -> str:
    """Return as text the fields of the other stack that receive a value, and the values that the other stack always uses."""
    always = [f"always {value}" for _, value in arrival.fixed]
    return ", ".join((*arrival.paths, *always)) or "-"


def _make_table(title: str, *columns: str) -> Grid:
    from rich.markup import escape

    return Grid(escape(title), columns)


def _print_list(dialect: StackTables, sections: Sections, console: Console) -> None:
    from rich.markup import escape

    for section, group in sections.items():
        table = _make_table(section, "field", "meaning")
        for entry in group:
            table.add_row(escape(entry.path), escape(entry.doc))
        console.print(table)
    total = sum(map(len, sections.values()))
    console.print(f"{total} fields; for one of them: stagebridge show {dialect.name} FIELD")


# For programs


def schema_of(name: str | None) -> int:
    """Print the JSON Schema of an output; without a name, print the names of all outputs."""
    if name is None:
        print("\n".join(json_types.OUTPUTS))
        return Exit.CLEAN
    if name not in json_types.OUTPUTS:
        raise BridgeError(
            f"{name}: no such output; expected one of "
            f"{', '.join(json_types.OUTPUTS)}{nearest(name, json_types.OUTPUTS)}"
        )
    _print_object(json_types.schema(name))
    return Exit.CLEAN


def _entry_object(entry: Entry) -> json_types.Shown:
    return {
        "dialect": entry.dialect,
        "path": entry.path,
        "section": entry.section,
        "type": entry.kind,
        "description": entry.doc,
        "spellings": list(entry.spellings),
        "releases": [
            {"since": span.since, "until": span.until, "default": span.default}
            for span in entry.spans
        ],
        "plan": list(entry.plan),
        "effect": effect_of(entry),
        "note": entry.note,
        "lossy": entry.lossy,
        "source": entry.source,
        "checks": [
            {
                "rule": check.rule,
                "effect": check.effect,
                "message": check.message,
                "place": check.place,
                "since": check.since,
                "until": check.until,
            }
            for check in entry.checks
        ],
        "elsewhere": [_arrival_object(arrival) for arrival in entry.arrivals],
        "disagreements": [
            {
                "documented": row.said,
                "place": row.place,
                "code": row.done,
                "source": row.source,
                "since": row.since,
                "until": row.until,
            }
            for row in entry.disagreements
        ],
    }


def _arrival_object(arrival: Arrival) -> json_types.Elsewhere:
    return {
        "dialect": arrival.dialect,
        "fields": list(arrival.paths),
        "how": arrival.how,
        "lost": list(arrival.lost),
        "always": dict(arrival.fixed),
        "reasons": list(arrival.reasons),
    }


def _listing_object(dialect: StackTables, sections: Sections) -> json_types.Listing:
    return {
        "dialect": dialect.name,
        "versions": list(dialect.versions),
        "sections": [
            {
                "section": section,
                "fields": [
                    {"path": entry.path, "type": entry.kind, "description": entry.doc}
                    for entry in group
                ],
            }
            for section, group in sections.items()
        ],
    }


def _print_object(content: Mapping[str, object]) -> None:
    print(json.dumps(content, indent=2, allow_nan=False))
