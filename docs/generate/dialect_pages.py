"""Pages of dialects: every field, where it goes, and where documentation and code disagree."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache

import rule_examples
from markdown_text import (
    Row,
    between,
    code,
    codes,
    named,
    page,
    prose,
    sentence,
    slug,
    table,
    value,
)

import compat
from bridge.plan.kinds import kind
from bridge.plan.plan import paths
from bridge.plan.section import Field
from bridge.stack.dialect import Checker, Dialect, Writer
from bridge.stack.rules import How
from bridge.stack.stack_tables import StackTables
from bridge.translation import reference
from bridge.translation.reference import Arrival, Entry, Span


@cache
def dialects() -> tuple[Dialect, ...]:
    """All dialects, by name."""
    return tuple(compat.load(name) for name in compat.names())


def dialect_page(dialect: Dialect) -> str:
    """Every field of a dialect, by section."""
    sections = reference.entries(dialect, dialects())
    every = [entry for group in sections.values() for entry in group]
    notes = _notes(every)
    return page(
        f"{dialect.title}: every field",
        prose(_opening(dialect, every)),
        _contents(sections),
        "## Where fields go",
        prose(MAPPED),
        _mapped(dialect, [entry for entry in every if entry.plan]),
        *_disagreements(dialect),
        *_checks(dialect),
        *(
            part
            for section, group in sections.items()
            for part in _section(section, group, notes, dialect)
        ),
        "## Notes",
        "\n".join(f"- {code(path)}: {note}" for note, path in notes.items()),
    )


def _opening(dialect: Writer, every: Sequence[Entry]) -> str:
    mapped, first, last = (
        sum(bool(entry.plan) for entry in every),
        dialect.versions[0],
        dialect.versions[-1],
    )
    return (
        f"{len(every)} fields in {len(dialect.versions)} releases, {first} to {last}. {mapped} of them stand for something that "
        f"other stacks know too; the others stay behind in a translation, and travel in its sidecar. Sources: "
        f"{', '.join(dialect.formats)}. The same facts for one field: `stagebridge show {dialect.name} FIELD`. "
        f"What is lost on the way to another stack: [{dialect.title} to the others](../fidelity/{dialect.name}.md)."
    )


def _contents(sections: Mapping[str, Sequence[Entry]]) -> str:
    lines = [
        f"- [{section}](#{slug(section)}) ({len(group)})" for section, group in sections.items()
    ]
    head = ["- [Where fields go](#where-fields-go)", "- [Notes](#notes)"]
    return "\n".join([head[0], *lines, head[1]])


MAPPED = (
    "What each field stands for in a plan, and which fields stand for the same in the newest release of the other stacks. "
    "Where several are named, they share the meaning. `~`: not every value survives; "
    "`always`: the stack offers no choice; empty: nothing there stands for it."
)


def _mapped(dialect: Dialect, entries: Sequence[Entry]) -> str:
    others = [other for other in dialects() if other is not dialect]
    rows = [
        (code(entry.path), codes(entry.plan), *map(_place, entry.arrivals)) for entry in entries
    ]
    return table(("field", "plan", *(other.title for other in others)), rows)


def _place(arrival: Arrival) -> str:
    always = [f"always {code(str(value))}" for _, value in arrival.fixed]
    limited = "~ " if arrival.how is How.APPROXIMATE else ""
    return limited + "\n".join((*map(code, arrival.paths), *always))


def _disagreements(dialect: StackTables) -> tuple[str, ...]:
    rows = [
        (
            code(row.path),
            f"{row.said} ({row.place})",
            f"{row.done} ({row.source})",
            between(row.since, row.until),
        )
        for row in dialect.disagreements
    ]
    if not rows:
        return ()
    return (
        "## Documentation and code disagree",
        table(("field", "documentation", "code", "releases"), rows),
    )


RULES = (
    "What the stack refuses or stops at, and what it takes and then ignores or gets wrong. `{name}` is the value found. "
    "The first column is the rule's id, which findings carry; the last one a source that it speaks of, as small as was found, "
    "with the ranks and the release where they count."
)


def _checks(dialect: Checker) -> tuple[str, ...]:
    if not dialect.checks:
        return ()
    return (
        "## Checks",
        f"[What {dialect.title} refuses, ignores or gets wrong](../rules/{dialect.name}.md), each with an example, or why it"
        " has none.",
    )


def rules_page(dialect: Dialect) -> str:
    """Every rule of a dialect, with its example."""
    rows = [
        (code(check.rule), check.message, str(check.effect), check.window, check.place, cell)
        for check, cell in zip(dialect.checks, rule_examples.cells(dialect), strict=True)
    ]
    columns = ("rule", "what it says", "effect", "releases", "place", "example")
    return page(
        f"{dialect.title}: every rule", prose(f"{RULES} {_counted(dialect)}"), table(columns, rows)
    )


def _counted(dialect: Checker) -> str:
    """How many rules have an example."""
    rules = {check.rule for check in dialect.checks}
    having = len(rules & rule_examples.known().get(dialect.name, {}).keys())
    if having == len(rules):
        return f"All {having} rules have one."
    others = f"beside the other {len(rules) - having} stands what keeps every source from them."
    return f"{having} of {len(rules)} rules have one; {others}"


def _notes(entries: Iterable[Entry]) -> dict[str, str]:
    """Remarks on rules, by the name of their first field, so that they keep it when others come."""
    found: dict[str, str] = {}
    for entry in entries:
        if note := _note(entry):
            found.setdefault(note, entry.path)
    return found


def _note(entry: Entry) -> str:
    lossy = f"What may be lost: {entry.lossy}" if entry.lossy else ""
    source = f"Stands on: {entry.source}" if entry.source else ""
    return " ".join(sentence(part) for part in (entry.note, lossy, source) if part)


def _section(
    section: str, group: Sequence[Entry], notes: Mapping[str, str], dialect: StackTables
) -> tuple[str, ...]:
    rows = [
        (
            _named(entry),
            entry.kind,
            _default(entry.spans),
            _lifetime(entry.spans, dialect),
            entry.doc,
            codes(entry.plan) or "stays behind",
            " ".join(
                (named(entry.effect), f"[{notes[_note(entry)]}](#notes)" if _note(entry) else "")
            ).strip(),
        )
        for entry in group
    ]
    return f"## {section}", table(
        ("field", "type", "default", "releases", "meaning", "plan", "if lost"), rows
    )


def _named(entry: Entry) -> str:
    usual = (
        f"--{entry.path.rpartition('.')[2].replace('_', '-')}",
        f"--{entry.path.rpartition('.')[2]}",
    )
    others = [spelling for spelling in entry.spellings if spelling not in usual]
    return codes((entry.path, *others))


def _default(spans: Sequence[Span]) -> str:
    values = list(dict.fromkeys(value(span.default) for span in spans))
    if len(values) == 1:
        return values[0]
    return "\n".join(f"{value(span.default) or 'unset'} ({_run(span)})" for span in spans)


def _run(span: Span) -> str:
    return span.since if span.since == span.until else f"{span.since} to {span.until}"


def _lifetime(spans: Sequence[Span], dialect: StackTables) -> str:
    if not spans:
        return "none"
    since = spans[0].since if spans[0].since != dialect.versions[0] else ""
    until = spans[-1].until if spans[-1].until != dialect.versions[-1] else ""
    return between(since, until)


def dialects_table() -> str:
    """The stacks, with their releases and sizes."""
    return table(
        ("stack", "releases", "fields", "what is lost from here"), map(_dialect_row, dialects())
    )


def _dialect_row(dialect: Dialect) -> Row:
    fields, first, last = reference.entries(dialect), dialect.versions[0], dialect.versions[-1]
    count = sum(map(len, fields.values()))
    return (
        f"[{dialect.title}](dialects/{dialect.name}.md)",
        f"{len(dialect.versions)}: {first} to {last}",
        str(count),
        f"[to the others](fidelity/{dialect.name}.md)",
    )


PLAN = (
    "What a run means, in the field's standard terms: every translation goes through these, and the native engine runs them. "
    "For each of them, the fields of the newest releases that stand for it; `always`: the stack offers no choice; empty: it "
    "cannot say it. A field that is unset is open: nobody said."
)


def plan_page() -> str:
    """Every field of a plan, and the fields of each stack that stand for it."""
    groups: dict[str, list[Field]] = {}
    for path, leaf in paths().items():
        groups.setdefault(path.partition(".")[0], []).append(leaf)
    tables = [part for name, group in groups.items() for part in (f"## {name}", _plan_table(group))]
    return page("The plan: every field", prose(PLAN), *tables)


def _plan_table(group: Sequence[Field]) -> str:
    rows = [
        (
            code(leaf.path),
            kind(leaf.annotation),
            leaf.doc,
            *(_stands(other, leaf.path) for other in dialects()),
        )
        for leaf in group
    ]
    return table(("plan", "type", "meaning", *(other.title for other in dialects())), rows)


def _stands(dialect: Dialect, ours: str) -> str:
    fixed = reference.always(dialect)
    return codes(reference.carriers(dialect, ours)) or (
        f"always {code(str(fixed[ours]))}" if ours in fixed else ""
    )


def pages() -> dict[str, str]:
    """The plan, and for each dialect a page of its fields and one of its rules."""
    fields_ = {f"dialects/{dialect.name}.md": dialect_page(dialect) for dialect in dialects()}
    rules = {
        f"rules/{dialect.name}.md": rules_page(dialect) for dialect in dialects() if dialect.checks
    }
    return {"plan.md": plan_page(), **fields_, **rules}
