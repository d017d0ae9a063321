"""What a shell is in while its statements are read: the scope, the commands that it starts, and the paths that
left a loop, a function or the shell. `interpreter.py` reads the statements.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from bridge.errors import SourceError
from bridge.shell import arithmetic
from bridge.shell.expand import Expander
from bridge.shell.files import key_in
from bridge.shell.missed_runs import Asked
from bridge.shell.scope import Scope, several
from bridge.shell.source import ShellSource, Sourced
from bridge.shell.syntax import Body
from bridge.shell.word_pieces import Break, Piece, Pieces, Text, Unknown, spell_pieces

MOST_STEPS = 10_000
"""Most steps that a script may take, and most parts of one output."""
TO_SET = re.compile(r"--env (\w+)=")
"""Matches the variables that a reason proposes to set."""
VARIABLE = re.compile(r"\$\{?([A-Za-z_]\w*)", re.ASCII)
"""Matches the start of an expansion, with the variable's name."""
LEAVING = ("break", "continue", "return")
Action = Callable[[], None]


class Stopped(SourceError):
    """Raised for an expansion at which a shell stops with an error."""


@dataclass(frozen=True)
class Command:
    """A command that the script starts: its words, the variables set for it, and the line on which it begins.

    `branch` is the line of an enclosing `if`, `case` or loop whose condition is not known, or 0.
    `files` are the files that the script has written before, `folder` is the key of its working
    directory.
    """

    words: tuple[Pieces, ...]
    environment: Mapping[str, Pieces]
    line: int
    branch: int = 0
    files: Mapping[str, Pieces] = field(default_factory=dict)
    folder: str = ""


@dataclass
class ShellState(ABC):
    """The state of the shell that reads a script, and what changes it."""

    name: str
    scope: Scope
    commands: list[Command] = field(default_factory=list)
    sourced: list[Sourced] = field(default_factory=list)
    unset_deciders: dict[str, int] = field(default_factory=dict)
    branch: int = 0
    depth: int = 0
    steps: int = 0
    begun: set[str] = field(default_factory=set)
    guarded: int = 0
    loops: int = 0
    grouping: int = 0
    behind: int = 0
    jobs: list[tuple[int, int]] = field(default_factory=list)
    leaving: list[Scope] = field(default_factory=list)
    exits: list[list[Scope]] = field(default_factory=list)
    stops: list[tuple[int, str, bool]] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    inner: Scope | None = None
    substituted: int | None = 0
    hoped: bool = False
    place: int = 0
    lines: dict[str, int] | None = None
    defined: frozenset[str] = frozenset()
    asked: Asked | None = None
    source: ShellSource = field(init=False)

    @property
    def over(self) -> bool:
        """Whether a statement ended the current path."""
        return bool(self.scope.ended)

    @property
    def alone(self) -> bool:
        """Whether an error in an expansion stops only an inner shell, and not the script."""
        return self.scope is self.inner

    @property
    def line_of_split(self) -> int:
        """The line of an undecided branch in which a path may have left a loop or a function; 0 if there is none."""
        lines = (scope.parted for scopes in (self.leaving, *self.exits) for scope in scopes)
        return next((line for line in lines if line), 0)

    @property
    def expander(self) -> Expander:
        """The expander for the source that is being read."""
        return Expander(self.source, self.scope, self)

    def refuse(self, place: int, problem: str) -> SourceError:
        """Return an error at a character of the source that is being read, with its line."""
        return SourceError(f"{self.name}: line {self.source.line(place)}: {problem}")

    def stop(self, line: int, problem: str, discards: bool) -> None:
        """Record that a shell certainly stops at an expansion on `line`; if it `discards`, only the rest of the line is lost."""
        self.stops.append((line, problem, discards))

    def overtake(self, place: int, name: Pieces) -> None:
        """Record that the script sets a variable whose name is not known, or not known in full."""
        parts = (re.escape(piece.text) if isinstance(piece, Text) else r"\w*" for piece in name)
        pattern = "".join(parts).partition("=")[0].partition(r"\[")[0]
        line = self.source.line(place)
        by = f"line {line}, which sets a variable of unknown name ({spell_pieces(name)}),"
        self.scope.overtaken(by, r"\w+" if several(name) else pattern)

    def doubt(self, line: int) -> None:
        """Record that a shell possibly stops at an expansion on `line`."""
        self.scope.doubting = self.scope.doubting or line

    def check_stops(self) -> None:
        """Raise `SourceError` if an expansion was recorded at which a shell stops, or `Discarded` if only the line is lost."""
        stops = [(line, problem) for line, problem, discards in self.stops if not discards]
        Stopped.raise_if(f"{self.name}: line {line}: {problem}" for line, problem in stops)
        for _, problem, _ in self.stops:
            self.stops.clear()
            raise arithmetic.Discarded(problem)

    def setter(self, name: str) -> int:
        """Return the first line on which the script assigns a variable; 0 if it never does."""
        if self.lines is None:
            matches = re.finditer(r"(?:^|[\s;&|({])([A-Za-z_]\w*)\+?=", self.source.text, re.ASCII)
            self.lines = {}
            for match in matches:
                self.lines.setdefault(match[1], self.source.line(match.start(1)))
        return self.lines.get(name, 0)

    def record_unset(self, pieces: Iterable[Piece | Break]) -> None:
        """Record the variables in the words of a condition that nothing sets, so that they count as empty."""
        for piece in pieces:
            name = VARIABLE.match(piece.spelling) if isinstance(piece, Unknown) else None
            if isinstance(piece, Unknown) and piece.alone is not None:
                for one in [name[1]] if name else TO_SET.findall(piece.why):
                    self.unset_deciders.setdefault(one, piece.line)

    def sets(self, name: str) -> bool:
        """Return whether the script has set a variable so far, or is setting it at present."""
        return name in self.begun

    def options_for_line(self, line: int) -> str:
        """Return the command-line options that would decide the branches around a line."""
        if self.asked is None:
            self.asked = Asked(self.source.script.text)
        return self.asked.around(line, self.scope.outside)

    def start_background(self) -> None:
        """Record that all background commands have started, so that no command can be killed before its start."""
        if not self.branch:
            self.jobs.clear()

    def kill_background(self, place: int) -> None:
        """Record that background commands may be killed before they start."""
        for first, last in self.jobs:
            self._maybe(first, last, self.source.line(place))

    def another(self) -> Scope:
        """Return the scope of a subshell: a copy of the current scope without traps."""
        scope = self.scope.copy()
        scope.nested, scope.handled, scope.at_exit = True, frozenset(), None
        if scope.at_error is not None and not scope.on("errtrace"):
            scope.at_error = None
        return scope

    def failing(self, inner: Scope) -> None:
        """Record that this shell may stop under `set -e`, because an inner shell may have stopped."""
        doubt = inner.doubted or inner.doubting
        if doubt and not self.scope.doubted:
            self.scope.status = None
            if self.scope.may("errexit"):
                self.doubt(doubt)

    def merge_exits(
        self, mark: int, kinds: Sequence[str] = ("break", "continue", "return", "exit")
    ) -> None:
        """End a loop, function or shell: merge the paths that left it early into the current path."""
        # `mark` is where `leaving` ended when the construct began. Paths of other kinds leave
        # further constructs around it.
        exits = [scope for scope in self.leaving[mark:] if scope.ended in kinds]
        self.leaving[mark:] = [scope for scope in self.leaving[mark:] if scope.ended not in kinds]
        for scope in exits:
            scope.ended = ""
        if self.scope.ended in kinds:
            self.scope.ended = ""
        if exits:
            here = [] if self.scope.ended else [self.scope.copy()]
            self.scope.take([*here, *exits], self.branch or 0)

    def _maybe(self, first: int, last: int, line: int) -> None:
        """Mark the commands from index `first` to `last` as commands that may not run."""
        self.commands[first:last] = [
            replace(command, branch=command.branch or line) for command in self.commands[first:last]
        ]

    def read_branches(self, line: int, *actions: Action, asking: str = "") -> None:
        """Read several branches of which exactly one is taken.

        `asking` is the text of the unknown condition.
        """
        outer, around = self.scope, self.branch
        if line not in outer.hints:
            outer.hints[line] = self.expander.settling(asking)
        branches: list[Scope] = []
        for action in actions:
            self.scope, self.branch = outer.copy(), line
            action()
            branches.append(self.scope)
        self.scope, self.branch = outer, around
        # A branch that ended in `exit` is over. One that left a loop or a function waits in
        # `leaving` for the end of that.
        running = [branch for branch in branches if not branch.ended]
        exits = [replace(branch, parted=line) for branch in branches if branch.ended in LEAVING]
        if not running and exits:
            running, exits = exits[:1], exits[1:]
            outer.become(running[0])
        else:
            outer.take(running or branches, line)
        self.leaving += exits

    def truth(self, body: Body) -> bool | None:
        """Return whether the statements of a condition succeed; None if that is not known."""
        self.guarded += 1
        self.statements(body)
        self.guarded -= 1
        return None if self.scope.status is None else not self.scope.status

    def answer(self, truth: bool | None) -> None:
        """Set the exit status from the result of a test; None if that is not known."""
        self.scope.status, self.scope.asked = (None if truth is None else int(not truth)), True

    def evaluate_condition(self, start: int, end: int) -> int:
        """Return the value of an arithmetic expression that decides something, and record the variables in
        it that nothing sets. Raises what `Expander.evaluate_span` raises.
        """
        expander = self.expander
        outer, expander.lacking = expander.lacking, []
        try:
            return expander.evaluate_span(start, end)
        finally:
            counted = set(arithmetic.assignable_names(self.source.text[start:end]))
            for name in TO_SET.findall(" ".join(expander.lacking)):
                if name not in counted:
                    self.unset_deciders.setdefault(name, self.source.line(start))
            expander.lacking = outer

    def write(self, pieces: Pieces) -> None:
        """Store text that a command writes, if something reads the output."""
        if self.scope.captured:
            self.scope.output = (*self.scope.output, *pieces)
            if len(self.scope.output) > MOST_STEPS:
                raise OverflowError(
                    f"a command writes more than {MOST_STEPS:,} parts; is this the right file?"
                )

    def key(self, path: Pieces) -> str:
        """Return a key for a file in the current working directory.

        Two names of one file have equal keys.
        """
        return key_in(self.scope.folder, path)

    @abstractmethod
    def statements(self, body: Body) -> None:
        """Read statements one after the other, until one ends the path."""

    @abstractmethod
    def run(self, source: ShellSource) -> None:
        """Read a source in the current scope."""

    @abstractmethod
    def start(self, argv: Sequence[Pieces], place: int, functions: bool = True) -> None:
        """Run a function or a built-in command. Any other command is recorded as started."""

    @abstractmethod
    def read_inner_text(
        self, place: int, text: Pieces, before: Sequence[Pieces] = (), scope: Scope | None = None
    ) -> None:
        """Read text as shell code, in `scope` if given.

        The words `before` are put before the words of each command in the text.
        """

    @abstractmethod
    def read_handler(self, text: Pieces) -> None:
        """Read the text of a trap. Afterwards, the exit status is the same as before."""

    @abstractmethod
    def read_exit_trap(self) -> None:
        """Read the text of the EXIT trap when a shell ends."""

    @abstractmethod
    def capture(self, source: ShellSource) -> Pieces:
        """Return the output of the commands in `$(...)`."""

    @abstractmethod
    def lies(self, path: Pieces, filled: bool) -> bool | None:
        """Return whether a file exists and, with `filled`, is not empty; None if that is not known."""
