"""Evaluates the statements of a script without running anything.

The result is the commands that the script would start, with their words.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import dropwhile
from typing import Any

from bridge.errors import SourceError
from bridge.shell import (
    arithmetic,
    branches,
    effects,
    file_contents,
    loops,
    nested_shells,
    redirections,
    signals,
    variables,
)
from bridge.shell.decide import Bad, Condition
from bridge.shell.expand import OUTPUT
from bridge.shell.launchers import Walk, walk
from bridge.shell.nested_shells import list_words
from bridge.shell.patterns import Unread
from bridge.shell.scope import COUNTER, Scope, Unsettled, Untargeted, Value
from bridge.shell.source import ShellSource, check_ends, check_redirects
from bridge.shell.state import MOST_STEPS, Action, Command, ShellState, Stopped
from bridge.shell.syntax import (
    AndOr,
    Block,
    Body,
    Case,
    For,
    Function,
    If,
    Pipeline,
    SimpleCommand,
    Statement,
    Subshell,
    Test,
    While,
)
from bridge.shell.tokens import Token, Word
from bridge.shell.word_pieces import NOWHERE, Pieces, Unknown, spell_pieces, text_if_known

DEEPEST = 30
UNTOUCHED = -1
"""Value of `Reader.substituted` for a statement that has run no command substitution."""
NOT_FOUND = 127
"""The status of a command that does not exist."""
SEVERAL = re.compile(r"^[^/]*\s")
"""Matches a program name with a space.

No program has such a name, so quotes must have joined several words.
"""
CHECKED = (SimpleCommand, Test, Subshell)
"""Kinds of statements that end a script under `set -e` if they fail. Blocks and branches do not."""
LINE = "line"
"""Value of `Scope.ended` for a line that ends early. The script continues with the next line."""
Program = Callable[["ShellReader", Sequence[str]], Pieces | None]
DEFINED = re.compile(r"function[ \t]+(?P<name>[\w:.-]+)|\([ \t]*\)")
"""Matches the definition of a function."""
NAMED = re.compile(r"(?:^|[;&|{(]|\bthen|\bdo|\belse)[ \t]*([\w:.-]+)[ \t]*$")
"""Matches the name before the brackets in a function definition."""
HOPED = frozenset(
    (
        *(
            "cd",
            "mkdir",
            "cp",
            "mv",
            "rm",
            "ln",
            "touch",
            "chmod",
            "sleep",
            "module",
            "ml",
            "conda",
            "mamba",
            "source",
            ".",
        ),
        *(
            "pushd",
            "popd",
            "git",
            "pip",
            "pip3",
            "tar",
            "unzip",
            "wget",
            "export",
            "sync",
            "date",
            "wait",
        ),
        *("torchrun", "python", "python3", "deepspeed", "srun", "accelerate", "mpirun"),
    )
)
"""Commands that are assumed to succeed before `&&`, because they act and do not test anything."""


@dataclass
class ShellReader(ShellState):
    """Evaluates statements with a scope, and collects commands and written files."""

    def read(self, text: str) -> None:
        """Read the whole script."""
        check_ends(text, self.name)
        self.source = ShellSource(text, self.name)
        self.defined = frozenset(_function_names(text))
        self.run(self.source)
        self.read_exit_trap()

    def run(self, source: ShellSource) -> None:
        """Read a source in the current scope."""
        before, self.source = self.source, source
        for line in source.lines:
            self.statements(line)
            # A failed assignment ends only its line.
            if self.scope.ended == LINE:
                self.scope.ended = ""
        self.source = before

    def lies(self, path: Pieces, filled: bool) -> bool | None:
        """Return whether a file exists and, with `filled`, is not empty; None if that is not known."""
        there = file_contents.there(self, path)
        return there if not there or not filled else file_contents.has_content(self, path)

    def statements(self, body: Body) -> None:
        """Read statements one after the other, until one ends the path."""
        for each in body:
            if self.scope.ended:
                return
            if each.background:
                self.aside(each)
            else:
                self.either(each.first, each.others)

    def aside(self, each: AndOr) -> None:
        """Read a statement in the background."""
        first, jobs, self.jobs = len(self.commands), self.jobs, list(self.jobs)
        files = self.scope.files.copy()
        self.behind += 1
        self.apart(lambda: self.either(each.first, each.others))
        self.behind -= 1
        self.scope.files.behind(files, self.source.line(each.first.start))
        self.scope.status, self.jobs = 0, [*jobs, (first, len(self.commands))]

    def single(self, pipeline: Pipeline) -> None:
        """Read one statement or one pipeline, with `!` but without `&&` and `||`."""
        # A negated statement never ends a script under `set -e`.
        self.guarded += pipeline.negated
        self.stage(*pipeline.stages)
        self.guarded -= pipeline.negated
        if pipeline.negated and not self.scope.ended and self.scope.status is not None:
            self.scope.status = int(not self.scope.status)
        if not pipeline.negated and (
            len(pipeline.stages) > 1 or isinstance(pipeline.stages[0], CHECKED)
        ):
            self.errexit()

    def stage(self, statement: Statement, *others: Statement) -> None:
        """Read one statement, or all stages of a pipeline, without the `!` before it."""
        self.place = statement.start
        self.scope.doubted = self.scope.doubted or self.scope.doubting
        self.steps += 1
        if self.steps > MOST_STEPS:
            problem = (
                f"found more than {MOST_STEPS:,} steps; a launch script has fewer, is this the "
                "right file?"
            )
            raise self.refuse(statement.start, problem)
        try:
            if others:
                self.pipeline((statement, *others))
                return
            read = STATEMENTS[type(statement)]
            if isinstance(statement, SimpleCommand | Subshell):
                read(self, statement)
            else:
                redirections.read_with_redirections(
                    self, statement.redirects, statement.start, lambda: read(self, statement)
                )
        except (OverflowError, Unread, Unsettled) as error:
            raise self.refuse(statement.start, str(error)) from None
        except arithmetic.Wrong as error:
            if isinstance(error, arithmetic.Discarded) and not isinstance(
                error, arithmetic.Dropped
            ):
                self.discard(error)
                return
            raise self.refuse(statement.start, f"a shell stops here: {error}") from None
        self.scope.piped = None

    def errexit(self) -> None:
        """Run the ERR trap if the statement failed, and end the script under `set -e`."""
        scope = self.scope
        if self.guarded or scope.status == 0 or scope.ended:
            return
        # An unknown status is taken as success, unless the command is a test, which may well fail.
        if scope.status is None:
            if scope.asked and (scope.may("errexit") or scope.at_error is not None):
                self.doubt(self.source.line(self.place))
            return
        if scope.at_error is not None and scope.frames and "errtrace" in scope.unsure:
            why = scope.unsure["errtrace"].why
            raise self.refuse(
                self.place, f"it is not known whether functions run the ERR trap: {why}"
            )
        # Functions inherit the ERR trap only with `set -E`.
        if scope.at_error is not None and (not scope.frames or "errtrace" in scope.options):
            self.read_trap(scope.at_error)
        if "errexit" in self.scope.unsure:
            self.doubt(self.source.line(self.place))
        elif "errexit" in self.scope.options and not self.scope.ended:
            self.scope.ended, self.scope.left_at = "exit", self.source.line(self.place)

    def read_trap(self, text: Pieces) -> None:
        """Read the text of an ERR or EXIT trap, in which errors run no trap."""
        error, self.scope.at_error = self.scope.at_error, None
        self.read_handler(text)
        self.scope.at_error = error

    def read_handler(self, text: Pieces) -> None:
        """Read the text of a trap. Afterwards, the exit status is the same as before."""
        status = self.scope.status
        self.read_inner_text(self.place, text)
        if not self.scope.ended:
            self.scope.status = status

    def read_exit_trap(self) -> None:
        """Read the text of the EXIT trap when a shell ends."""
        text, self.scope.at_exit = self.scope.at_exit, None
        if text is not None:
            # The trap itself must not count as code behind the `exit`, which would not be read.
            ending, self.scope.ended = self.scope.ended, ""
            self.read_trap(text)
            self.scope.ended = ending

    # Blocks, pipelines and paths

    def block(self, block: Block) -> None:
        """Read `{ ... }`."""
        self.statements(block.body)

    def subshell(self, subshell: Subshell) -> None:
        """Read `( ... )`.

        Its assignments, including those in its redirections, have no effect outside.
        """
        # `break` in a subshell cannot leave a loop outside of it.
        loops, self.loops = self.loops, 0
        inside = partial(self.apart, lambda: self.statements(subshell.body))
        if subshell.redirects:
            self.apart(
                lambda: redirections.read_with_redirections(
                    self, subshell.redirects, subshell.start, inside
                )
            )
        else:
            inside()
        self.loops = loops

    def apart(self, action: Action) -> None:
        """Read a subshell. Its files, output and status have an effect outside; nothing else does."""
        outer, mark = self.scope, len(self.leaving)
        self.scope = self.another()
        action()
        self.merge_exits(mark)
        self.read_exit_trap()
        inner, self.scope = self.scope, outer
        outer.files, outer.output, outer.status = inner.files, inner.output, inner.status
        self.failing(inner)

    def pipeline(self, stages: Sequence[Statement]) -> None:
        """Read `a | b`: each command reads the output of the one before."""
        outer = self.scope
        output: Pieces = ()
        statuses: list[int | None] = []
        start = len(self.commands)
        for index, stage in enumerate(stages):
            last = index == len(stages) - 1
            if last and outer.on("lastpipe"):
                self._last(stage, outer, output)
                statuses.append(outer.status)
                outer.status, outer.piped = self._status_of_pipeline(statuses), tuple(statuses)
                return
            # Each command runs in a shell of its own. Files and doubts go from one to the next,
            # variables do not.
            before, self.scope = self.scope, outer
            inner = self.another()
            inner.files, inner.doubting, inner.doubted = (
                before.files,
                before.doubting,
                before.doubted,
            )
            inner.captured, inner.output = (outer.captured, outer.output) if last else (True, ())
            inner.input = output if index else outer.input
            self.scope = inner
            mark, first = len(self.leaving), len(self.commands)
            self.stage(stage)
            self.merge_exits(mark)
            self.read_exit_trap()
            # A command that ends without reading its input breaks the pipe. A block before it may
            # then end early, and its commands may not run.
            reads = self.scope.input is not output or inner.input is not output
            unread = not reads and len(self.commands) == first
            if (
                index
                and output
                and unread
                and not isinstance(stages[index - 1], SimpleCommand | Test)
            ):
                self._maybe(start, first, self.source.line(stages[index - 1].start))
                statuses[-1] = None
            start, output = first, self.scope.output
            statuses.append(self.scope.status)
        inner, self.scope = self.scope, outer
        outer.files, outer.output = inner.files, output
        outer.status, outer.piped = self._status_of_pipeline(statuses), tuple(statuses)
        self.failing(inner)

    def _last(self, stage: Statement, outer: Scope, output: Pieces) -> None:
        """Read the last command of a pipeline under `lastpipe`: it runs in the current shell."""
        files, self.scope = self.scope.files, outer
        before, outer.files, outer.input = outer.input, files, output
        self.stage(stage)
        self.scope.input = before

    def _status_of_pipeline(self, statuses: Sequence[int | None]) -> int | None:
        """Return the status of a pipeline: the status of its last command or, under `pipefail`, of
        the last command that failed.
        """
        if (
            statuses[-1]
            or not any(status != 0 for status in statuses)
            or not self.scope.may("pipefail")
        ):
            return statuses[-1]
        unsure = None in statuses or "pipefail" in self.scope.unsure
        return None if unsure else next(status for status in reversed(statuses) if status)

    # Lists

    def either(self, first: Pipeline, others: Sequence[tuple[str, Pipeline]]) -> None:
        """Read a list of operands with `&&` and `||`, from the left."""
        if not others:
            self.single(first)
            return
        *before, (sign, right) = others
        self.hoped = False
        self.guarded += 1
        self.either(first, before)
        self.guarded -= 1
        status = self.scope.status
        if self.scope.ended:
            return
        # `cd folder && python train.py`: the author means both to run.
        if status is None and sign == "&&" and self.hoped:
            status = 0
        if status is None:
            end = before[-1][1].end if before else first.end
            self.read_branches(
                self.source.line(first.start),
                lambda: self.single(right),
                lambda: None,
                asking=self.source.text[first.start : end],
            )
            if not self.scope.ended:
                self.scope.status = None
        elif (status == 0) is (sign == "&&"):
            self.single(right)

    # Functions

    def function(self, function: Function) -> None:
        """Record the definition of a function. Its body is read when the function is called."""
        name = self.source.text_of(function.name)
        self.scope.functions[name] = ((self.source, function.statement),)
        self.scope.status = 0

    def call(self, place: int, name: str, arguments: Sequence[Pieces]) -> bool:
        """Call a function with its arguments. Returns False if the name may be no function."""
        choices = self.scope.functions[name]
        if None in choices and len(choices) == 1:
            return False
        if self.depth >= DEEPEST:
            raise self.refuse(place, f"{name} calls itself without end; is this the right file?")
        if len(choices) == 1:
            self._call_function(choices[0], arguments)
            return True
        if None in choices:
            raise self.refuse(
                place,
                f"only one branch defines the function {name}, and it is not known whether a shell "
                "takes that branch",
            )
        line = self.source.line(place)
        self.read_branches(
            line,
            *((lambda chosen=chosen: self._call_function(chosen, arguments)) for chosen in choices),
        )
        return True

    def _call_function(
        self, function: tuple[ShellSource, Statement] | None, arguments: Sequence[Pieces]
    ) -> None:
        if function is None:
            return
        source, body = function
        before, around, mark = self.scope.arguments, self.source, len(self.leaving)
        self.scope.arguments, self.source = tuple(arguments), source
        self.scope.frames = (*self.scope.frames, {})
        loops, self.loops = self.loops, 0
        self.depth += 1
        self.single(Pipeline(body.start, body.end, False, (body,)))
        self.depth -= 1
        self.loops = loops
        self.merge_exits(mark, ("return",))
        self.scope.restore()
        self.scope.arguments, self.source, self.scope.placed = before, around, False

    # Commands

    def test(self, test: Test) -> None:
        """Read `[[ ... ]]` or `((...))`."""
        (self.condition if test.token.kind == "cond" else self.counting)(test.token)

    def condition(self, token: Token) -> None:
        """Read `[[ ... ]]`."""
        try:
            truth = Condition(token.items, self.expander).holds()
        except Bad as error:
            raise self.refuse(token.start, f"not a condition: {error}") from None
        if self.stops:
            self.stops.clear()
            truth = None
        self.answer(truth)

    def counting(self, token: Token) -> None:
        """`((...))`."""
        try:
            self.answer(bool(self.evaluate_condition(token.start + 2, token.end - 2)))
        except Unread:
            self.answer(None)
        except arithmetic.Unset:
            raise
        except arithmetic.Wrong:
            self.answer(False)
        self.check_stops()

    def simple(self, command: SimpleCommand) -> None:
        """Read assignments, and the command with its words that follows them."""
        words, redirects, place = command.words, command.redirects, command.start
        count = next(
            (
                index
                for index, word in enumerate(words)
                if variables.assignment(self.source, word) is None
            ),
            len(words),
        )
        assignments, rest = words[:count], words[count:]
        if redirects and not self.branch:
            check_redirects(self.source, redirects)
        self.substituted = UNTOUCHED
        if rest and self.source.text_of(rest[0]) in variables.DECLARING:
            redirections.read_with_redirections(
                self, redirects, place, lambda: variables.declare(self, rest, place)
            )
            return
        alone = bool(rest) and self.source.text_of(rest[0]) in ("[", "test")
        argv = [expansion for word in rest for expansion in self.expander.words(word, alone)]
        if not argv:
            redirections.read_with_redirections(
                self, redirects, place, lambda: self._assignments(assignments)
            )
            return
        program = self._starts(argv) if redirects else False
        redirections.read_with_redirections(
            self, redirects, place, lambda: self._with(assignments, argv, place), program
        )

    def _starts(self, argv: Sequence[Pieces]) -> bool | None:
        """Whether a command starts a program in a new process; None if its name is not known."""
        from bridge.shell.builtins import BUILTINS

        rest = dropwhile(lambda word: text_if_known(word) in ("command", "-p", "--"), argv)
        name = text_if_known(next(rest, argv[0]))
        if name is None:
            return None
        own = name in BUILTINS and name != "nohup"
        return not (
            own
            or name in self.scope.functions
            or name in variables.DECLARING
            or name.startswith("-")
        )

    def _assignments(self, words: Sequence[Word]) -> None:
        self.check_stops()
        for word in words:
            try:
                variables.perform(self, word)
            except arithmetic.Dropped as error:
                self.discard(error)
                return
            except Untargeted as error:
                line = self.source.line(word.start)
                self.scope.overtaken(
                    f"line {line}, which sets a variable of unknown name ({error}),"
                )
        # An assignment has the status of its last command substitution.
        self.scope.status = self.substituted if self.substituted != UNTOUCHED else 0
        # `$(< file)` has no command, and yields the file.
        if not words and self.scope.input is not None and self.scope.captured:
            self.write(self.scope.input)

    def discard(self, error: arithmetic.Discarded) -> None:
        """End the current line after an error. In an inner shell, and for some errors under `set -e`, end the shell."""
        if self.branch:
            # Only one of the paths loses its line, and the paths are merged before the next line.
            raise self.refuse(self.place, f"a shell stops here: {error}")
        sets_e = isinstance(error, arithmetic.Dropped) and self.scope.on("errexit")
        ends = self.scope.nested or sets_e
        self.scope.ended, self.scope.status = "exit" if ends else LINE, 1
        self.scope.left_at = self.source.line(self.place)

    def _with(self, assignments: Sequence[Word], argv: Sequence[Pieces], place: int) -> None:
        """Run a command with variables that are set only for it."""
        own: dict[str, Value | None] = {}
        marks = dict(self.scope.marks)
        doubting, self.scope.doubting = self.scope.doubting, 0
        for word in assignments:
            name = variables.assignment(self.source, word)
            if name is not None:
                before = self.scope.variables.get(name.name, variables.NOTHING)
                self.scope.certain(name.name)
                if "r" in self.scope.marks.get(name.name, ()):
                    if len(assignments) > 1 or self.scope.on("errexit"):
                        raise arithmetic.Dropped(f"{name.name} is read-only")
                    continue
                own.setdefault(name.name, before)
                variables.perform_alone(self, word, name)
        self.scope.doubted = self.scope.doubted or self.scope.doubting
        self.scope.doubting = self.scope.doubting or doubting
        exports = self.scope.exported
        self.scope.exported = exports | own.keys()
        try:
            self.start(argv, place)
        finally:
            self._without(own, exports, marks)

    def _without(
        self,
        own: Mapping[str, Value | None],
        exports: set[str],
        marks: Mapping[str, frozenset[str]],
    ) -> None:
        """Restore everything about variables that were set only for one command."""
        if not own:
            return
        self.scope.exported -= own.keys() - exports
        self.scope.marks |= {name: marks[name] for name in own if "a" in marks.get(name, ())}
        for variable, value in own.items():
            if value is variables.NOTHING:
                self.scope.variables.pop(variable, None)
            else:
                self.scope.variables[variable] = value
        if COUNTER in own:
            self.scope.record_optind()

    def start(self, argv: Sequence[Pieces], place: int, functions: bool = True) -> None:
        """Run a function or a built-in command. Any other command is recorded as started."""
        from bridge.shell.builtins import BUILTINS

        name = text_if_known(argv[0]) or ""
        if functions and name in self.scope.functions:
            self.check_stops()
            if self.call(place, name, argv[1:]):
                return
        if name in BUILTINS:
            # A word at which a shell would stop is unknown in what these print or start, and no
            # reason to refuse the script.
            all_discard = all(discards for _, _, discards in self.stops)
            if name not in ("echo", "printf", "exec", "command") or self.alone or all_discard:
                self.check_stops()
            self.stops.clear()
            self.hoped = name in HOPED
            BUILTINS[name](self, place, argv)
            return
        search = walk(list_words(argv))
        if not nested_shells.start_shell(self, place, argv, search):
            self._external(place, argv, search)

    def _external(self, place: int, argv: Sequence[Pieces], search: Walk) -> None:
        from bridge.shell.programs import PROGRAMS, place_named

        if self.alone:
            self.check_stops()
        line = self.source.line(place)
        if self.stops:
            self.doubt(line)
        self.stops.clear()
        branch, files = (
            self.branch or self.scope.doubted or self.line_of_split,
            dict(self.scope.files.held),
        )
        self.commands.append(
            Command(tuple(argv), self.scope.environment, line, branch, files, self.scope.folder)
        )
        program = text_if_known(argv[0]) or ""
        # Quotes around a whole command make a name of it, which no program has.
        if SEVERAL.search(program):
            self.scope.status, self.scope.asked = NOT_FOUND, False
            return
        name = program.rpartition("/")[2]
        self.hoped = name in HOPED
        if search.kind in ("program", "module") or name == "sleep":
            self.start_background()
        elif name in signals.KILLING:
            self.kill_background(place)
        self.scope.status, self.scope.asked = None, name in self.defined
        why = OUTPUT
        try:
            output = place_named(self, name, argv) or self._output_of_model(
                PROGRAMS.get(name), argv
            )
        except Unread as error:
            output, why, self.scope.status = None, str(error), None
        self.write(
            output if output is not None else (Unknown(spell_pieces(argv[0]), NOWHERE, line, why),)
        )
        effects.leave(self, argv, search, output is not None)

    def _output_of_model(self, program: Program | None, argv: Sequence[Pieces]) -> Pieces | None:
        """Return the output of a modelled program.

        Raises `Unread`, with the reason, if it is not known.
        """
        if program is None:
            return None
        texts = [text_if_known(word) for word in argv]
        unknown = next(
            (piece for word in argv for piece in word if isinstance(piece, Unknown)), None
        )
        if unknown is not None:
            raise Unread(unknown.why)
        self.scope.status = 0
        output = program(self, [str(text) for text in texts])
        if output is None:
            self.scope.status = None
            raise Unread(OUTPUT)
        return output

    def read_inner_text(
        self, place: int, text: Pieces, before: Sequence[Pieces] = (), scope: Scope | None = None
    ) -> None:
        """Read text as shell code, in `scope` if given.

        The words `before` are put before the words of each command in the text.
        """
        if self.depth >= DEEPEST:
            raise self.refuse(place, "a shell starts itself without end; is this the right file?")
        source = ShellSource.of(text, self.source)
        first = len(self.commands)
        self.depth += 1
        if scope is None:
            self.run(source)
        else:
            self._child(source, scope, not before)
        self.depth -= 1
        line = self.source.line(place)
        self.commands[first:] = [
            replace(command, words=(*before, *command.words), line=line)
            for command in self.commands[first:]
        ]

    def _child(self, source: ShellSource, scope: Scope, alone: bool) -> None:
        """Read an inner shell.

        Its files and output have an effect outside. With `alone`, its status has one too.
        """
        outer, mark = self.scope, len(self.leaving)
        scope.output, scope.captured = outer.output, outer.captured
        scope.doubting, scope.doubted = (
            outer.doubting,
            outer.doubted,
        )  # what may not be reached starts nothing for certain
        self.scope, around = scope, (self.guarded, self.loops)
        self.guarded, self.loops = 0, 0
        self._read_inner_source(source)
        self.guarded, self.loops = around
        self.merge_exits(mark)
        self.read_exit_trap()
        self.scope = outer
        outer.files, outer.output = scope.files, scope.output
        outer.status, outer.asked = scope.status if alone else None, scope.asked

    def _read_inner_source(self, source: ShellSource) -> None:
        """Read a source in an inner shell.

        If an expansion stops the inner shell, the outer shell continues.
        """
        scope, before = self.scope, (self.source, self.depth, self.behind)
        around, self.inner = self.inner, scope
        try:
            self.run(source)
        except Stopped as error:
            if not self.alone:
                raise
            self.stops.clear()
            self.ends += error.problems
            self.source, self.depth, self.behind = before
            scope.ended, scope.status, scope.asked = "exit", None, True
        self.inner = around

    def capture(self, source: ShellSource) -> Pieces:
        """Return the output of the commands in `$(...)`."""
        if self.depth >= DEEPEST:
            raise SourceError(
                f"{self.name}: found too many commands within commands; is this the right file?"
            )
        outer, mark, stops = self.scope, len(self.leaving), self.stops
        self.scope, self.stops = self.another(), []
        self.scope.output, self.scope.captured = (), True
        # Bash turns `set -e` off within `$(...)` unless this option is on.
        if outer.may("errexit") and not outer.on("inherit_errexit"):
            self.scope.turn("errexit", False)
        self.depth += 1
        self.run(source)
        self.depth -= 1
        self.merge_exits(mark)
        self.read_exit_trap()
        inner, self.scope, self.stops = self.scope, outer, stops
        outer.files, outer.status, outer.asked = inner.files, inner.status, inner.asked
        self.failing(inner)
        self.substituted = outer.status
        doubt = inner.doubting if inner.doubting != outer.doubting else 0
        return (*inner.output, *((Unknown("$(...)", NOWHERE, doubt, OUTPUT),) if doubt else ()))


def _function_names(text: str) -> Iterator[str]:
    """Return the names of all functions that a text defines."""
    for match in DEFINED.finditer(text):
        before = text[text.rfind("\n", 0, match.start()) + 1 : match.start()]
        if match["name"]:
            yield match["name"]
        elif name_match := NAMED.search(before):
            yield name_match[1]


STATEMENTS: Mapping[type[Statement], Callable[[ShellReader, Any], None]] = {
    SimpleCommand: ShellReader.simple,
    Test: ShellReader.test,
    Block: ShellReader.block,
    Subshell: ShellReader.subshell,
    If: branches.if_,
    Case: branches.case,
    For: loops.for_,
    While: loops.while_,
    Function: ShellReader.function,
}
