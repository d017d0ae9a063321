"""Reports for people: a verdict in one line, then one row for each cause. Settings are spelled as
in the file and in the target.
"""

from __future__ import annotations

import builtins
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from shlex import quote
from symtable import symtable
from typing import TYPE_CHECKING

from bridge.files.printable import clean
from bridge.files.shown import brief, show_value
from bridge.report.as_json import all_of
from bridge.report.row_choice import USUAL, View
from bridge.report.tables import Grid, Hung, markup_text
from bridge.stack import launch_command
from bridge.stack.dialect import Config
from bridge.stack.findings import UNKNOWN, Finding, Origin
from bridge.stack.rules import Effect, How
from bridge.stack.sources import ResolvedRun, Said, Settled
from bridge.stack.stack_tables import StackTables
from bridge.translation.translate import FieldReport, Result, remarks_alike

if TYPE_CHECKING:
    from rich.console import Console

EFFECT_STYLE = dict(
    zip(Effect, ("bold white on red", "bold red", "yellow", "cyan", "dim"), strict=True)
)
SAME = {Effect.ROUNDING: "same up to rounding", Effect.COST: "same run", Effect.NONE: "same run"}
AS_WRITTEN = {
    Effect.ROUNDING: "as written, up to rounding",
    Effect.COST: "as written",
    Effect.NONE: "as written",
}
# A check has no second config to compare with, so its verdict is about the file as it is written.
WRITTEN = "different numbers than written"
FATES = {How.DERIVED: "expressed by other settings", How.APPROXIMATE: "kept in part"}
"""Words that a report shows in place of a setting's new value, if no single setting of the target has
the whole value.
"""
MANY = 6
"""Maximum number of settings of one cause that are listed one per line. If there are more, and the
cause is that a stack's defaults apply, the settings are joined in one paragraph.
"""
NEAR = 3
"""Maximum number of target settings that are listed for one source setting."""
LONG = 160
"""Maximum number of characters of a value that are shown."""


@dataclass
class Cause:
    """One reason and effect, with all findings that share them."""

    effect: Effect
    message: str
    findings: list[Finding] = field(default_factory=list)


def causes(findings: Iterable[Finding]) -> list[Cause]:
    """Group findings by reason and effect, the worst effect first, then in the order of the file.

    A finding without a reason is a cause of its own. A repeated finding appears once. A setting that
    nobody knows comes first in its block. A value that only changed its unit or rounding comes after
    values that are lost or changed their meaning.
    """
    rows: dict[tuple[str, Effect], Cause] = {}
    for finding in sorted(
        _once(findings),
        key=lambda one: (
            one.effect.rank,
            not one.unknown,
            not one.given,
            bool(one.change) and not one.unknown,
            (one.origin and one.origin.line) or 0,
        ),
    ):
        words = finding.cause or finding.message
        # Findings without a reason share none. Those without effect share a line all the same.
        key = words or (finding.path if finding.effect.reaches(Effect.COST) else "")
        rows.setdefault((key, finding.effect), Cause(finding.effect, words)).findings.append(
            finding
        )
    return list(rows.values())


def _once(findings: Iterable[Finding]) -> Iterator[Finding]:
    keys = set[tuple[str, str, Effect, bool]]()
    for finding in findings:
        key = (finding.path, finding.message, finding.effect, finding.how is How.MISSING)
        if key not in keys:
            keys.add(key)
            yield finding


# The verdict


def verdict(
    findings: Iterable[Finding], same: Mapping[Effect, str] = SAME, other: str = "different numbers"
) -> str:
    """Return the verdict in one line. If the run is the same, this is the text in `same`; otherwise
    it is the number of causes that stop or change the run. The number of settings that are still to
    be added follows.
    """
    rows = list(_once(findings))
    groups = causes(finding for finding in rows if finding.how is not How.MISSING)
    open_ = [finding for finding in rows if finding.how is How.MISSING]
    lacks = f"{_number(len(open_), 'setting')} still to be added" if open_ else ""
    for effect, words in ((Effect.STOPS, "will not start"), (Effect.NUMBERS, other)):
        count = sum(cause.effect is effect for cause in groups)
        # A missing setting that stops the run decides the verdict. One that only changes numbers
        # does not: it is still open.
        stops = effect is Effect.STOPS and any(finding.effect is effect for finding in open_)
        if count or stops:
            parts = [_number(count, "thing")] if count else []
            return f"{words}: {', '.join([*parts, lacks] if lacks else parts)}"
    # A setting that no number depends on leaves the same run, which still does not start without it.
    if any(finding.effect.reaches(Effect.NUMBERS) for finding in open_):
        return f"incomplete: {lacks}"
    worst = min(
        (cause.effect for cause in groups), key=lambda effect: effect.rank, default=Effect.NONE
    )
    cost = sum(cause.effect is Effect.COST for cause in groups)
    parts = [f"{_number(cost, 'effect')} on memory or speed"] if cost else []
    words = same[worst] + _if_unset(rows)
    return "; ".join([words, *parts, *([lacks] if lacks else [])])


def _if_unset(findings: Iterable[Finding]) -> str:
    """Return the condition of a verdict on a script some of whose branches depend on unset variables."""
    names = [one.path for one in findings if one.path.startswith("$") and one.effect is Effect.NONE]
    more = f" and {len(names) - NEAR} more" if len(names) > NEAR else ""
    verb = "is" if len(names) == 1 else "are"
    return f", if {', '.join(names[:NEAR])}{more} {verb} not set" if names else ""


def translation_verdict(
    findings: Iterable[Finding],
    snippet: str,
    by_script: bool = False,
    alike: Container[str] = frozenset(),
) -> str:
    """Return the verdict on a translation. If its `snippet` leaves objects to the training script, such
    as the model, or if the script builds the model (`by_script`), the run is the same only if the script
    makes the same ones. `alike` are ids of remarks that hold for the source and the target: such
    numbers are other ones than a person would think, and yet the same on both sides.
    """
    rows = [*findings]
    shared = [one for one in rows if one.effect is Effect.NUMBERS and one.id in alike]
    text = verdict(one for one in rows if one not in shared)
    if shared and text.startswith("same"):
        text += f"; both differ from what is written: {_number(len(causes(shared)), 'thing')}"
    elif shared:
        text = verdict(rows)
    return _on_condition(text, by_script or bool(unbound(snippet)))


def _is_by_script(one: Config, other: Config) -> bool:
    """Return whether the script of one of two stacks builds the model that the other's config describes.
    Within a stack, the script stays the one that it is.
    """
    stacks = one.dialect, other.dialect
    return stacks[0] is not stacks[1] and not all(stack.model for stack in stacks)


def _on_condition(verdict_text: str, by_script: bool) -> str:
    """Return a verdict with its condition: where the script builds the model, it has to build the same."""
    same, *rest = verdict_text.split("; ")
    words, other, _ = same.partition(", if ")
    if by_script and words in SAME.values():
        joined = f"{same} and" if other else f"{same}, if"
        return "; ".join([f"{joined} the script builds the same model", *rest])
    return verdict_text


def unbound(code: str) -> set[str]:
    """Return the names that Python code uses and does not define."""
    top = symtable(code, "", "exec")
    tables = [top]
    for table in tables:
        tables += table.get_children()
    definitions = {
        name.get_name()
        for name in top.get_symbols()
        if name.is_assigned() or name.is_imported() or name.is_namespace()
    }
    used = {
        name.get_name()
        for table in tables
        for name in table.get_symbols()
        if name.is_referenced() and (table is top or name.is_global())
    }
    return used - definitions - set(dir(builtins))


def kind(
    findings: Iterable[Finding], same: Mapping[Effect, str] = SAME, other: str = "different numbers"
) -> str:
    """Return the verdict without its counts, to count files with it."""
    words = re.split("[:;]|, if ", verdict(findings, same, other))[0]
    return f"with {words}" if words == other else words


def kind_checked(findings: Iterable[Finding]) -> str:
    """Return the verdict of a check without its counts, to count files with it."""
    return kind(findings, AS_WRITTEN, WRITTEN)


def _number(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"


def _print_verdict(verdict_text: str, findings: Iterable[Finding], console: Console) -> None:
    """Print the verdict in the colour of the worst effect."""
    worst = min(
        (finding.effect for finding in findings),
        key=lambda effect: effect.rank,
        default=Effect.NONE,
    )
    style = "bold green" if not worst.reaches(Effect.NUMBERS) else EFFECT_STYLE[worst]
    _print_heading(f"[{style}]{verdict_text}[/]", console)


def _print_heading(markup: str, console: Console, rest: int = 0) -> None:
    """Print a heading. A word that is wider than a line, such as a path, stays whole, so that it
    can be copied.
    """
    console.print(Hung(markup_text(markup), 0, rest, whole=True), soft_wrap=True)


# What is shown


def text(
    result: Result,
    console: Console,
    view: View = USUAL,
    files: Sequence[Path] = (),
    findings: Sequence[Finding] | None = None,
) -> None:
    """Print a translation: the verdict, the causes, and the parts outside the target's file.
    `files` are the files that were written.

    Only `findings` are printed and decide the verdict; None stands for all findings of the
    translation.
    """
    source, target = result.source, result.config
    selection = (
        (*all_of(source), *result.findings, *result.missing) if findings is None else findings
    )
    first(selection, console)
    snippet = result.written.snippet if source.dialect is not target.dialect else ""
    by_script = _is_by_script(source, target)
    verdict_text = translation_verdict(selection, snippet, by_script, remarks_alike(result))
    _print_verdict(verdict_text, selection, console)
    if view.quiet:
        return
    assumed = any(one.path == "world_size" for one in selection)
    ranks = f"{target.world_size or '?'} ranks{' (assumed: give --world-size)' if assumed else ''}"
    console.print(Hung(markup_text(f"{name(source)} -> {name(target)}, {ranks}")))
    _causes(selection, console, view, result.fields)
    _missing(selection, console)
    if view.origins:
        console.print()
        console.print(_origins(result))
    # A snippet that was written to a file is not printed too, unless the user asked for every
    # detail.
    code = next((path for path in files if path.name.endswith(".code.py")), None)
    _outside(result, console, None if view.origins else code)
    _footer(selection, console, view, result)
    print_files(files, console)


def check_text(
    config: Config,
    console: Console,
    view: View = USUAL,
    findings: Sequence[Finding] | None = None,
    file: str = "",
) -> None:
    """Print the report on the config in `file`. Only `findings` are printed and decide the verdict;
    None: all findings on the config.
    """
    from rich.markup import escape

    selection, view = (
        all_of(config) if findings is None else findings,
        replace(view, everything=True),
    )
    first(selection, console)
    _print_verdict(verdict(selection, AS_WRITTEN, WRITTEN), selection, console)
    if view.quiet:
        return
    where = f"{escape(file)}: " if file else ""
    count = _number(len(config.given), "setting")
    _print_heading(f"{where}{name(config)}, {count} given", console)
    _causes(selection, console, view)
    _missing(selection, console)
    _footer(selection, console, view)


def resolution_text(
    run: ResolvedRun, told: Sequence[Finding], console: Console, view: View, file: str
) -> None:
    """Print what contradicts what in a run, then a table of its settings: value, winner, and who
    lost. Defaults that nothing was said about, and what has no effect, are printed with
    `view.everything`.
    """
    from rich.markup import escape

    first(told, console)
    _print_verdict(verdict(told, AS_WRITTEN, WRITTEN), told, console)
    if view.quiet:
        return
    ranks = f", {_number(run.world_size, 'rank')}" if run.world_size else ""
    _print_heading(f"{escape(file)}: {run.title}{ranks}", console)
    found = run.resolution
    _causes(told, console, view)
    console.print()
    grid = Grid("", ("setting", "value", "from"))
    for one in found.settings:
        if view.everything or one.overruled or one.winner.source != run.default:
            lost = "; ".join(f"not used: {_said(claim.said, file)}" for claim in one.overruled)
            origin = "; ".join(filter(None, (_from(one, file), one.why, lost)))
            grid.add_row(*map(escape, (one.setting, _plain_value(one.value), origin)))
    console.print(grid)
    if found.unheard:
        console.print()
        rows = Grid("Nobody hears", ("setting", "value", "why"), ruled=False)
        for left in found.unheard:
            said = left.said
            place = f"{said.setting} ({_place_of(said, file)})"
            rows.add_row(*map(escape, (place, _plain_value(said.value), left.why)))
        console.print(rows)


def _from(one: Settled, file: str) -> str:
    """Return the source of a setting, with the name that it has there if that is another."""
    spelled = "" if one.winner.setting == one.setting else f"{one.winner.setting}, "
    return f"{spelled}{_place_of(one.winner, file)}"


def _said(said: Said, file: str) -> str:
    return f"{said.setting} {_plain_value(said.value)} ({_place_of(said, file)})"


def _plain_value(value: object) -> str:
    return brief(value if isinstance(value, str) and value else show_value(value))


def _place_of(said: Said, file: str) -> str:
    # The headline has the folder of the run's own file.
    return replace(said, source=said.source or Path(file).name).place


def one_of_many(file: str, findings: Sequence[Finding], console: Console, view: View) -> None:
    """Print the report on one of several configs: its name, the verdict, and the causes."""
    from rich.markup import escape

    first(findings, console)
    _print_verdict(f"{escape(file)}: {verdict(findings, AS_WRITTEN, WRITTEN)}", findings, console)
    if not view.quiet:
        _causes(findings, console, view, gap=False)
        lacking = [finding.path for finding in _once(findings) if finding.how is How.MISSING]
        if lacking:
            console.print(
                Hung(markup_text(escape(f"still to be added: {', '.join(lacking)}")), 2, 4)
            )


def unshown(findings: Iterable[Finding], view: View) -> int:
    """Return the number of findings that are not shown because they have no effect on the run."""
    rows = (one for one in _once(findings) if one.how is not How.MISSING)
    return sum(one.effect is Effect.NONE and not view.shows(one.effect) for one in rows)


def print_differences(
    names: tuple[str, str],
    sides: tuple[Config, Config],
    findings: Sequence[Finding],
    console: Console,
    view: View,
    verdict_text: str = "",
) -> None:
    """Print the differences between the meanings of two configs. Each row has a setting with its
    line in the first file, and the new value with the line in the second file.
    """
    from rich.markup import escape

    findings = [_of_first(finding, sides[0]) for finding in findings]
    usual = _on_condition(verdict(findings), _is_by_script(*sides))
    _print_verdict(verdict_text or usual, findings, console)
    if not view.quiet:
        titles = (
            f"{escape(file)} ({name(config)})" for file, config in zip(names, sides, strict=True)
        )
        _print_heading(" -> ".join(titles), console)
        _causes(findings, console, view)
        _footer(findings, console, view)


def _of_first(finding: Finding, one: Config) -> Finding:
    """Return the finding with the line in the first file, `one`, as the setting's place. The line
    in the second file is added to the text of the change. A finding on a setting that only the
    second config has stays unchanged.
    """
    origin = finding.origin
    if finding.how is None and origin is not None:
        return finding
    there = f" ({replace(origin, spelling='')})" if origin and origin.line else ""
    change = f"{finding.change}{there}"
    return replace(finding, origin=one.origins.get(finding.path), change=change)


def first(findings: Iterable[Finding], console: Console) -> None:
    """Print that a release is not known, if a finding says so. This line comes first, because the
    whole report may be wrong for that release.
    """
    for message in dict.fromkeys(
        finding.message for finding in findings if finding.rule == UNKNOWN
    ):
        console.print(clean(message), markup=False, highlight=False, soft_wrap=True)


def name(config: Config) -> str:
    """The title of a config's stack, and its release."""
    return release_named(config.dialect, config.version)


def release_named(dialect: StackTables, version: str) -> str:
    """The title of a stack and a release, marked if it is the newest known release, which is used
    if none is named.
    """
    return f"{dialect.title} {version}{' (newest known)' if version == dialect.newest else ''}"


def _causes(
    findings: Iterable[Finding],
    console: Console,
    view: View,
    fields: Sequence[FieldReport] = (),
    gap: bool = True,
) -> None:
    """Print one block for each effect, and in it one row for each cause."""
    groups = causes(
        finding
        for finding in findings
        if finding.how is not How.MISSING and finding.rule != UNKNOWN
    )
    for effect in filter(view.shows, Effect):
        rows = [cause for cause in groups if cause.effect is effect]
        if rows and gap:
            console.print()
        if rows:
            console.print(
                Hung(
                    markup_text(f"[{EFFECT_STYLE[effect]}]{effect.capitalize()}[/]"),
                    0 if gap else 2,
                )
            )
        for number, cause in enumerate(rows, 1):
            for line in _row(
                cause, f"{number}" if effect.reaches(Effect.NUMBERS) else "", console.width, fields
            ):
                console.print(line)


def _row(cause: Cause, number: str, width: int, fields: Sequence[FieldReport]) -> Iterator[Hung]:
    """Yield the lines for a cause: its settings, each with the change of the value, and the reason."""
    from rich.markup import escape

    heads = []
    for finding in cause.findings:
        place, change = _place(finding), _change(finding, fields)
        where, change_text = f" ({place})" if place else "", f" {change}" if change else ""
        heads.append(escape(f"{finding.path}{where}{change_text}"))
    by_default = cause.findings[0].how is How.DEFAULTED
    # Settings without effect share a line, and so do many defaults: nobody acts on a single one.
    if not cause.effect.reaches(Effect.COST) or (len(heads) > MANY and by_default):
        heads = [", ".join(heads)]
    label, why = f"{number} " if number else "", escape(cause.message)
    indent = len(label)
    if not why:
        yield from _heads(heads, label)
        return
    if len(heads) == 1 and len(heads[0]) + len(why) + indent + 4 <= width:
        yield Hung(markup_text(f"{label}{heads[0]}: {why}"), 2, 4 + indent)
        return
    yield from _heads(heads, label)
    yield Hung(markup_text(why), 4 + indent, 4 + indent)


def _heads(heads: Iterable[str], label: str) -> Iterator[Hung]:
    """Yield one line for each setting. The label is in front of the first setting, and the other
    lines are indented by the width of the label.
    """
    for place, head in enumerate(heads):
        if place == 0:
            yield Hung(markup_text(label + head), 2, 6 + len(label))
        else:
            yield Hung(markup_text(head), 2 + len(label), 6 + len(label))


def _change(finding: Finding, fields: Sequence[FieldReport]) -> str:
    """Return the change of a value as `before -> after`, with the target settings that have the new
    value, if they are few.
    """
    if finding.change or finding.how is None:
        return finding.change
    if finding.how is How.DEFAULTED:
        return f"{'' if finding.cause else 'not set -> '}{show_value(finding.after, LONG)}"
    before = f"{show_value(finding.before, LONG)} " if finding.before is not None else ""
    # A section would not show which of its values is meant.
    targets = [
        field
        for field in fields
        if finding.path in field.sources and not isinstance(field.value, Mapping)
    ]
    near = [field for field in targets if field.how is How.APPROXIMATE] or targets
    if (
        finding.how is not How.DROPPED
        and 0 < len(near) <= NEAR
        and finding.effect is not Effect.NONE
        and all(field.value != finding.before for field in near)
    ):
        return f"{before}-> {', '.join(f'{field.path} {show_value(field.value, LONG)}' for field in near)}"
    if finding.how in FATES and finding.after is None and finding.effect is Effect.NONE:
        # The reason says that its meaning is kept; an arrow behind each setting would say no more.
        return before.rstrip()
    if finding.after == "none":  # the plan's word for nothing
        return f"{before}-> nothing"
    if finding.how is How.DROPPED or finding.after is None:
        return f"{before}-> {FATES.get(finding.how, 'nothing')}"
    return f"{before}-> {show_value(finding.after, LONG)}"


def _place(finding: Finding) -> str:
    """Return the place where the setting was written. A spelling that only repeats the setting's
    path is left out.
    """
    return _at(finding.origin, finding.path)


def _at(origin: Origin | None, path: str) -> str:
    if origin is None:
        return ""
    alike = origin.spelling.lstrip("-").replace("-", "_") == path
    return str(replace(origin, spelling="") if alike else origin)


def _missing(findings: Iterable[Finding], console: Console) -> None:
    """Print the settings that are still to be added, one row for each reason. Every report shows
    these settings.
    """
    from rich.markup import escape

    lacking = [finding for finding in findings if finding.how is How.MISSING]
    if lacking:
        console.print()
        console.print(Hung(markup_text("[bold]You still have to add[/]")))
    for cause in causes(lacking):
        for finding in cause.findings:
            what = (
                finding.message.removesuffix(f": {finding.cause}")
                if finding.cause
                else finding.message
            )
            has_path = finding.path in what.replace("-", "_")
            console.print(
                Hung(markup_text(escape(what if has_path else f"{finding.path}: {what}")), 2, 6)
            )
        # Whether numbers hang on it is no news here: the run does not start without it.
        stops = cause.effect is Effect.STOPS
        parts = [f"[{EFFECT_STYLE[cause.effect]}]{cause.effect}[/]"] if stops else []
        parts += [escape(cause.message)] if cause.findings[0].cause else []
        if parts:
            console.print(Hung(markup_text(": ".join(parts)), 4, 4))


def remarks(title: str, findings: Iterable[Finding]) -> Grid:
    """Findings as a table: the setting, its effect and the message."""
    from rich.markup import escape

    table = Grid(title, ("setting", "what"))
    for finding in sorted(findings, key=lambda one: (one.effect.rank, not one.given)):
        place = _place(finding)
        where = f"{finding.path} ({place})" if place else finding.path
        table.add_row(
            escape(where),
            f"[{EFFECT_STYLE[finding.effect]}]{finding.effect}[/]: {escape(finding.message)}",
        )
    return table


def _origins(result: Result) -> Grid:
    """A table of every written value, with the settings or the default that it comes from."""
    from rich.markup import escape

    origins = result.source.origins
    table = Grid(f"Written for {result.config.dialect.title}", ("setting", "value", "from", "how"))
    for field_ in result.fields:
        lines = ((path, origins.get(path)) for path in field_.sources)
        from_ = ", ".join(
            f"{path} ({replace(at, spelling='')})" if at and at.line else path for path, at in lines
        )
        row = (
            field_.path,
            show_value(field_.value),
            from_ or f"default of {field_.default_of}",
            str(field_.how),
        )
        table.add_row(*map(escape, row))
    return table


def _outside(result: Result, console: Console, code: Path | None) -> None:
    """Print the parts outside the target's file: the code for the training script or the name of
    its file, the environment, and the launch command.
    """
    output = result.written
    if output.snippet and code:
        console.print(f"\nIn the training script: the lines of {code.name}", markup=False)
    elif output.snippet:
        console.print("\n[bold]In the training script[/]")
        console.print(output.snippet.rstrip(), markup=False, highlight=False, soft_wrap=True)
    if output.environment:
        console.print("\n[bold]Environment[/]")
        lines = (
            f"export {name}={quote(clean(value))}" for name, value in output.environment.items()
        )
        console.print("\n".join(lines), markup=False, soft_wrap=True)
    if output.command:
        console.print("\n[bold]Launch[/]")
        console.print(
            clean(launch_command.line(output.command)),
            markup=False,
            highlight=False,
            soft_wrap=True,
        )


def _footer(
    findings: Iterable[Finding], console: Console, view: View, result: Result | None = None
) -> None:
    """Print the number of findings and settings that are hidden, and the options that show them."""
    harmless = [
        finding
        for finding in _once(findings)
        if finding.effect is Effect.NONE and finding.how is not How.MISSING
    ]
    parts = []
    if harmless and not view.shows(Effect.NONE):
        parts.append(f"{_number(len(harmless), 'finding')} without effect (--all shows them)")
    if result and not view.origins:
        parts.append(
            f"{_number(len(result.fields), 'setting')} written (-v says where each comes from)"
        )
    if parts:
        console.print()
        console.print(Hung(markup_text("; ".join(parts))))


def print_files(files: Sequence[Path], console: Console) -> None:
    """Print the names of the files that were written."""
    if files:
        from rich.markup import escape

        _print_heading(escape(f"wrote {', '.join(map(str, files))}"), console, 6)
