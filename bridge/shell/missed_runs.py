"""Lines of a script that look like a training run but were not read as one.

Each line has the reason, and the variables with which the line would be read as a training run.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from bridge.shell.launchers import LaunchWord, Walk, walk

CONTINUED = re.compile(r"\\\n")
DOCUMENT = re.compile(r"<<-?\s*(['\"\\]?)(\w+)")
FUNCTION = re.compile(
    r"^(?:function\s+(?P<long>[\w:.-]+)\s*(?:\(\s*\))?|(?P<short>[\w:.-]+)\s*\(\s*\))\s*\{?"
)
LEADING = re.compile(r"^(?:(?:then|do|else|if|elif|while|until|!|\{|\(|time|[A-Za-z_]\w*=\S*)\s+)+")
OPENING = re.compile(r"^(if|case|while|until|for)\b")
CLOSING = re.compile(r"^(fi|esac|done|\})(?=\s|;|$|\||&|>|<|\))")
ASSIGNED = re.compile(
    r"(?m)^[ \t]*(?:(?:export|local|readonly|declare)[ \t]+(?:-\w+[ \t]+)*)?([A-Za-z_]\w*)=(.*)$"
)
NUMBERED = re.compile(r"\$\{?#?\d+")
"""An argument."""
VARIABLE = re.compile(r"\$\{?#?([A-Za-z_]\w*|\d+)")
MOST = 5
"""Largest number of lines that one message lists."""
DEEPEST = 4
"""Largest number of assignments that are followed from one variable to the next."""


@dataclass(frozen=True, slots=True)
class ScriptBlock:
    """A statement that encloses a line: its kind (`if`, `case`, `for`, ..., `function`), line and text."""

    kind: str
    line: int
    text: str


@dataclass(frozen=True, slots=True)
class ScriptLine:
    """A line of a script, joined with its continuation lines, and the statements that enclose it."""

    number: int
    text: str
    around: tuple[ScriptBlock, ...]

    @property
    def is_in_function(self) -> bool:
        """Return whether the line is in a function."""
        return any(block.kind == "function" for block in self.around)


@dataclass(slots=True)
class _Blocks:
    """Follows the nesting of statements line by line.

    It is approximate, and used only for messages.
    """

    open: list[ScriptBlock] = field(default_factory=list)

    def take(self, number: int, text: str) -> ScriptLine:
        body = text.strip()
        if CLOSING.match(body) and self.open:
            self.open.pop()
        function = FUNCTION.match(body)
        if function and not body.endswith("}"):  # otherwise it ends on its line
            self.open.append(ScriptBlock("function", number, function["long"] or function["short"]))
        line = ScriptLine(number, body, tuple(self.open))
        opening = OPENING.match(body)
        ends = {"if": "fi", "case": "esac"}.get(opening[1], "done") if opening else ""
        if opening and not re.search(rf"\b{ends}\b", body):
            self.open.append(ScriptBlock(opening[1], number, body))
        return line


def lines(text: str) -> Iterator[ScriptLine]:
    """Yield the lines of a script without comments and here-documents.

    Continued lines are joined.
    """
    blocks, number, until = _Blocks(), 1, ""
    # A NUL stands for each continuation, so that lines can still be numbered after they are joined.
    for raw in CONTINUED.sub("\0", text).split("\n"):
        line = raw.replace("\0", " ")
        if until:
            until = "" if line.strip() == until else until
        elif not line.lstrip().startswith("#"):
            yield blocks.take(number, line)
            document = DOCUMENT.search(line)
            until = document[2] if document else ""
        number += raw.count("\0") + 1


def words_of(text: str) -> list[LaunchWord]:
    """Return the words of a command, without expansion: words with variables are unknown."""
    command = LEADING.sub("", text)
    try:
        words = shlex.split(command, comments=True)
    except ValueError:
        words = command.split()
    return [
        LaunchWord(None if "$" in word or "`" in word else word, word, "$" in word)
        for word in words
    ]


def find_missed_runs(
    text: str, command_lines: Collection[int], runs: Collection[int], left_at: int = 0
) -> list[tuple[int, str]]:
    """Return the numbers of lines that look like a training run but were not read as one, each with a reason.

    `command_lines` are the lines of commands that the script starts, `runs` the lines of its training
    runs. `left_at` is the line that ends the script, or 0.
    """
    whole = list(lines(text))
    place = _Place(whole, Origins(text, whole), left_at)
    findings: list[tuple[int, str]] = []
    for line in whole:
        if line.number in runs or len(findings) == MOST:
            continue
        search = walk(words_of(line.text))
        if search.kind in ("program", "module", "file"):
            reason = _reason(line, search, place, line.number in command_lines)
            findings += [(line.number, reason)] if reason else []
    if findings or runs or not left_at:
        return findings
    return [(left_at, f"the script ends here{_condition(place)}")]


class Asked:
    """Finds the variables that decide the branches of a script, by line."""

    def __init__(self, text: str) -> None:
        whole = list(lines(text))
        self.origins = Origins(text, whole)
        self.lines = {line.number: line for line in whole}

    def around(self, number: int, exclusions: Collection[str]) -> str:
        """Return the options that would set the variables which decide the branches around a line.

        Variables in `exclusions` are left out.
        """
        line = self.lines.get(max((at for at in self.lines if at <= number), default=0))
        if line is None:
            return ""
        asking = " ".join(block.text for block in line.around if block.kind != "function")
        return self.origins.options_for_text(asking, exclusions, line.is_in_function)


@dataclass(frozen=True, slots=True)
class _Place:
    """The lines of a script, the origins of its variables, and the line that ends the script, or 0."""

    whole: Sequence[ScriptLine]
    origins: Origins
    left_at: int


class Origins:
    """Finds the outside variables on which a value depends, as far as the script's assignments show."""

    def __init__(self, text: str, whole: Iterable[ScriptLine]) -> None:
        self.values: dict[str, list[str]] = {}
        inside = {line.number for line in whole if line.is_in_function}
        for match in ASSIGNED.finditer(text):
            own = text.count("\n", 0, match.start()) + 1 in inside
            self.values.setdefault(match[1], []).append(
                NUMBERED.sub("", match[2]) if own else match[2]
            )

    def options_for_text(
        self, text: str, exclusions: Collection[str] = (), inside: bool = False
    ) -> str:
        """Return the options that would set the outside variables on which a text depends.

        Variables in `exclusions` are left out. `inside`: the text is in a function, where `$1` is not an
        argument of the script.
        """
        text = NUMBERED.sub("", text) if inside else text
        names = dict.fromkeys(
            variable
            for name in VARIABLE.findall(text)
            for variable in self._outer(name, 0)
            if variable not in exclusions
        )
        return f"; set {' '.join(f'--env {name}=...' for name in names)}" if names else ""

    def _outer(self, name: str, depth: int) -> list[str]:
        if name not in self.values or depth > DEEPEST:
            return [name] if name not in self.values else []
        # `NAME=${NAME:-...}` takes the variable from outside if it is set there.
        own = (
            [name]
            if any(re.match(rf"[\"']?\$\{{{name}:?[-=]", value) for value in self.values[name])
            else []
        )
        return own + [
            variable
            for value in self.values[name]
            for used in VARIABLE.findall(value)
            if used != name
            for variable in self._outer(used, depth + 1)
        ]


def _reason(line: ScriptLine, search: Walk, place: _Place, is_command: bool) -> str:
    """Return the reason why a line is not read as a run; empty if there is no reason to report."""
    first = search.words[0]
    if is_command and search.kind == "file":
        script = search.words[search.at].spelling
        return f"this line starts another script, {script}; pass that script instead"
    if first.text is None and first.spelling.startswith("$"):
        hint = place.origins.options_for_text(first.spelling, inside=line.is_in_function)
        return f"the first word of this line, {first.spelling}, is not known{hint}"
    return "" if is_command else _unreachable_text(line, place)


def _unreachable_text(line: ScriptLine, place: _Place) -> str:
    """Return the reason why a line is not reached."""
    function = next((block for block in line.around if block.kind == "function"), None)
    if function is not None:
        explanation = _uncalled_text(function.text, line, place)
        return f"this line is in the function {function.text} (line {function.line}); {explanation}"
    own = FUNCTION.match(line.text)
    if own is not None:
        name = own["long"] or own["short"]
        return f"this line is in the function {name}; {_uncalled_text(name, line, place)}"
    if place.left_at and place.left_at < line.number:
        return f"a shell does not reach this line: line {place.left_at} ends the script{_condition(place)}"
    if line.around:
        block = line.around[-1]
        hint = place.origins.options_for_text(block.text, inside=line.is_in_function)
        return f"this line is in a branch that is not taken: line {block.line}: {_short(block.text)}{hint}"
    return "a shell does not reach this line"


def _uncalled_text(name: str, line: ScriptLine, place: _Place) -> str:
    """Return a message about a function that is not called.

    The message gives the line of a trap, a variable or a text that contains the function's name.
    """
    names = re.compile(rf"(?<![\w.:-]){re.escape(name)}(?![\w.:-]|\s*\(\s*\))")
    own = re.compile(rf"function\s+{re.escape(name)}(?![\w.:-])")
    naming = (
        other.number
        for other in place.whole
        if names.search(own.sub("", other.text))
        and name not in [block.text for block in other.around if block.kind == "function"]
    )
    number = next((number for number in naming if number != line.number), None)
    if number is None:
        return f"no command that is read calls {name}"
    return f"line {number} names {name}, but no command that is read calls {name}"


def _condition(place: _Place) -> str:
    """Describe, for messages, the branch around the line that ends the script; empty if there is none."""
    end = next((line for line in reversed(place.whole) if line.number <= place.left_at), None)
    inside = (
        next((block for block in reversed(end.around) if block.kind != "function"), None)
        if end
        else None
    )
    if inside is None:
        return place.origins.options_for_text(end.text, inside=end.is_in_function) if end else ""
    own = end is not None and end.is_in_function
    return f" (line {inside.line}: {_short(inside.text)}){place.origins.options_for_text(inside.text, inside=own)}"


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."
