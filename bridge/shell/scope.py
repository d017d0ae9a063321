"""The state of a shell at one point of a script: variables, functions, and written files.

States are merged after branches.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import TYPE_CHECKING, TypeAlias

from bridge.shell.arithmetic import Dropped
from bridge.shell.files import AWAY, ShellFiles
from bridge.shell.options import ON
from bridge.shell.patterns import Unread
from bridge.shell.word_pieces import (
    DEFAULT_IFS,
    NOWHERE,
    Pieces,
    Text,
    Unknown,
    same,
    shared,
    text_if_known,
)

if TYPE_CHECKING:
    from bridge.shell.source import ShellSource
    from bridge.shell.syntax import Statement

LONGEST = 20_000
"""Largest number of parts of one value. Only values that double again and again reach it."""
MOST_CHARACTERS = 2**20
Choices: TypeAlias = "tuple[tuple[ShellSource, Statement] | None, ...]"
"""Possible definitions of a function. None stands for the case that the function is not defined."""
RUN = "the value is known only in a real run"
LEADING = re.compile(r"\s*[-+]?[0-9]{1,18}")
LIVE = frozenset(
    (
        *(
            "HOSTNAME",
            "PWD",
            "OLDPWD",
            "UID",
            "EUID",
            "PPID",
            "HOME",
            "USER",
            "LOGNAME",
            "SHELL",
            "PATH",
            "TERM",
            "SHLVL",
        ),
        *(
            "RANDOM",
            "SRANDOM",
            "SECONDS",
            "EPOCHSECONDS",
            "EPOCHREALTIME",
            "LINENO",
            "BASH",
            "BASHPID",
            "BASH_VERSION",
        ),
        *(
            "BASH_VERSINFO",
            "BASH_SOURCE",
            "BASH_LINENO",
            "BASH_COMMAND",
            "BASH_ARGV0",
            "BASHOPTS",
            "SHELLOPTS",
            "BASH_SUBSHELL",
        ),
        *(
            "FUNCNAME",
            "GROUPS",
            "HOSTTYPE",
            "MACHTYPE",
            "OSTYPE",
            "DIRSTACK",
            "COLUMNS",
            "LINES",
            "PS4",
            "_",
        ),
        *(
            "PIPESTATUS",
            "OPTERR",
            "COMP_WORDBREAKS",
            "BASH_CMDS",
            "BASH_ALIASES",
            "BASH_LOADABLES_PATH",
            "HISTCMD",
        ),
    )
)
"""Variables that every shell or login sets."""
MOVING = frozenset(
    (
        *("RANDOM", "SRANDOM", "SECONDS", "EPOCHSECONDS", "EPOCHREALTIME", "LINENO"),
        *("_", "PIPESTATUS", "BASH_COMMAND", "FUNCNAME"),
    )
)
"""Variables of the shell whose value is not known even after an assignment."""
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
COUNTER = "OPTIND"
"""Name of the variable that holds the index of the next word for `getopts`. A shell sets the variable when the shell
starts.
"""


class Unsettled(Exception):
    """Raised for an assignment whose target is unknown or unsupported. The script is refused."""


class Untargeted(Unsettled):
    """Raised for an assignment through a reference whose target is not known."""


@dataclass(slots=True, unsafe_hash=True)
class Value:
    """The value of a variable as words; a variable that is no array has one word.

    `keys` are the indices of an array's words if they are not 0, 1, 2, ...; with `table` they are
    the keys of an associative array.
    """

    words: tuple[Pieces, ...]
    array: bool = False
    keys: tuple[int | str, ...] | None = None
    table: bool = False

    @property
    def pieces(self) -> Pieces:
        """The text of a variable; for an array, its element 0."""
        return self.at("0" if self.table else 0) or ()

    @property
    def places(self) -> Sequence[int | str]:
        """The index of each word."""
        return range(len(self.words)) if self.keys is None else self.keys

    def at(self, key: int | str) -> Pieces | None:
        """Return the element at an index; None if there is none.

        The element's value is unknown if an earlier word may expand to any number of words.
        """
        if self.table and self.open:
            return next(word for word in self.words if several(word))
        for place, word in zip(self.places, self.words, strict=True):
            if place == key or (self.array and several(word)):
                return word
        return None

    @property
    def open(self) -> bool:
        """Whether the number of words is unknown."""
        return self.array and any(several(word) for word in self.words)

    def put(self, key: int | str, word: Pieces) -> Value:
        """Return the array with one element added or replaced."""
        elements = dict(zip(self.places, self.words, strict=True))
        if self.table and key not in elements:
            elements[key] = word
            return Value(tuple(elements.values()), True, tuple(elements), True)
        elements[key] = word
        keys = tuple(elements) if self.table else tuple(sorted(elements, key=int))
        plain = not self.table and keys == tuple(range(len(keys)))
        return Value(
            tuple(elements[place] for place in keys), True, None if plain else keys, self.table
        )

    def without(self, key: int | str) -> Value:
        """Return the array without one of its elements."""
        elements = [
            (place, word)
            for place, word in zip(self.places, self.words, strict=True)
            if place != key
        ]
        return Value(
            tuple(word for _, word in elements),
            True,
            tuple(place for place, _ in elements),
            self.table,
        )


UNCERTAIN = {
    "?r": "read-only",
    "?n": "a reference",
    "?i": "a number",
    "?u": "in capitals",
    "?l": "in small letters",
    "?a": "an array",
    "?A": "an associative array",
}
"""Marks for attributes that a variable has after only one of two branches, each with words for messages."""
HANDED = "?x"
"""Mark of a variable that only one of two branches exports."""
SELF = "$0"
"""Placeholder for the name of the script. Only the folder part of that name is used."""
SOURCED = "$."
"""Prefix of the name of a sourced file, in `Scope.here`."""


@dataclass(frozen=True, slots=True)
class Hidden:
    """The state of a variable that a local variable of the same name hides: value, attributes,
    export, and for OPTIND the position of `getopts` within a word.
    """

    value: Value | None
    marks: frozenset[str] = frozenset()
    exported: bool = False
    letter: int | None = 0


def is_file(place: str) -> bool:
    """Return whether a path names the script or a sourced file."""
    return place.rpartition("/")[2].startswith((SELF, SOURCED))


def several(word: Pieces) -> bool:
    """Return whether a word may expand to any number of words."""
    return any(isinstance(piece, Unknown) and piece.loose for piece in word)


@dataclass(frozen=True, slots=True)
class Branch:
    """A statement whose branch is not known: its line, and the reason that messages give."""

    line: int
    why: str


@dataclass
class Scope:
    """The state of a shell.

    Variables: `outside` has the variables and arguments that are known at the start of the script. In `variables`,
    None stands for a variable that the script has unset. `frames` are the values that the local variables of each
    running function hide. `marks` are attributes; one with `?` depends on a branch. `shared` are the exported
    functions, with False if a branch decides that.

    Paths: `ended` is the kind of statement that ended this path, such as `exit`, or empty; `left_at` is the line of
    this statement, `levels` the number of loops that a `break` leaves. `hints` are messages, by line, on how to
    decide a branch. `parted` is the line of the branch at which a path left a loop or a function. `doubting` is a
    line of the current statement on which a shell may stop, `doubted` such a line of an earlier statement.

    Commands: `status` is `$?`, None if not known; with `asked`, an unknown status may be a failure. `piped` are the
    statuses of the last pipeline. `output` is the text written so far to a command substitution, `input` the input of
    the next command. With `joined`, errors go to the output. `options` are the options that are on; options in
    `unsure` depend on a branch.

    Traps: `at_exit` and `at_error` are the texts of the EXIT and ERR traps. `handled` are the other
    signals with a trap. `nested` is true in an inner shell.

    Files: `folder` is the key of the working directory after `cd`, `here` the path of the current file, or empty.
    `taken` is the number of files that are being sourced. `placed` is true if `set` changed the arguments since a
    file was sourced, None if that is not known. `letter` is the position of `getopts` within a word: 0 before the
    word, None if not known, negative if the script has set OPTIND so that `getopts` starts again.
    """

    outside: Mapping[str, str]
    variables: dict[str, Value | None] = field(default_factory=dict)
    functions: dict[str, Choices] = field(default_factory=dict)
    exported: set[str] = field(default_factory=set)
    shared: Mapping[str, bool] = field(default_factory=dict)
    files: ShellFiles = field(default_factory=ShellFiles)
    arguments: tuple[Pieces, ...] | None = None
    ended: str = ""
    levels: int = 1
    status: int | None = 0
    options: frozenset[str] = ON
    unsure: Mapping[str, Branch] = field(default_factory=dict)
    marks: dict[str, frozenset[str]] = field(default_factory=lambda: {COUNTER: frozenset("i")})
    frames: tuple[dict[str, Hidden], ...] = ()
    output: Pieces = ()
    input: Pieces | None = None
    captured: bool = False
    overtakers: tuple[tuple[str, str], ...] = ()
    left_at: int = 0
    hints: dict[int, str] = field(default_factory=dict)
    doubting: int = 0
    doubted: int = 0
    piped: tuple[int | None, ...] | None = None
    asked: bool = False
    joined: bool = False
    at_exit: Pieces | None = None
    at_error: Pieces | None = None
    letter: int | None = 0
    parted: int = 0
    folder: str = ""
    folders: tuple[str, ...] = ()
    here: str = SELF
    shifted: int = 0
    placed: bool | None = False
    handled: frozenset[str] = frozenset()
    nested: bool = False
    taken: int = 0

    def get(self, name: str) -> Value | None:
        """Return the value of a variable or of a numbered argument; None if nothing sets it."""
        if name.isdigit():
            return self._argument(int(name))
        name = self.target(name)
        # Before `MOVING`: of these variables it is the one whose value may be known.
        if name == "PIPESTATUS" and self.piped is not None and None not in self.piped:
            return Value(
                tuple((Text(str(status), NOWHERE, plain=False),) for status in self.piped), True
            )
        if name in self.variables and name not in MOVING:
            return self.variables[name]
        if name == COUNTER:
            return _value_of_text("1")
        if name in self.outside:
            return _value_of_text(self.outside[name])
        return self._live(name) if name in LIVE else None

    def _live(self, name: str) -> Value:
        at = self._place(name)
        why = f"{RUN}; set --env {name}=..."
        return Value(
            ((Unknown(f"${name}", NOWHERE, 0, why, at=at, firm=bool(at) and name == "PWD"),),)
        )

    def _place(self, name: str) -> str:
        """Return the file or folder that a shell variable names, relative to the first working
        directory; empty if that is not known.
        """
        if name == "0":
            return SELF if self.here else ""
        if name == "BASH_SOURCE" and not self.frames:
            return self.here
        return (
            self.folder.removesuffix("/") or "."
            if name == "PWD" and not self.folder.startswith(AWAY)
            else ""
        )

    def is_unset(self, name: str) -> bool:
        """Return whether a variable without a value is certainly not set."""
        if name.isdigit():
            return self.arguments is not None and int(name) > 0
        return self.target(name) in self.variables

    def outer(self, name: str) -> str:
        """Return the number that argument `name` had when the script started, before any `shift`.

        Other names are returned unchanged.
        """
        return (
            str(int(name) + self.shifted)
            if name.isdigit() and self.arguments is None and int(name)
            else name
        )

    def target(self, name: str) -> str:
        """Return the variable that a reference (nameref) names.

        Raises `Unsettled` if it is not known, or if it is an array element.
        """
        variable = self.resolve_reference(name)
        if "[" in variable:
            raise Unsettled(
                f"{name} refers to {variable}, and a reference to an element is not supported here"
            )
        return variable

    def resolve_reference(self, name: str) -> str:
        """Return the variable, or `NAME[index]`, that a reference names.

        Raises `Unsettled` if it is not known.
        """
        for _ in range(8):  # as deep as bash follows references
            if "?n" in self.marks.get(name, ()):
                self.certain(name)
            value = self.variables.get(name) if "n" in self.marks.get(name, ()) else None
            if value is None:
                return name
            text = text_if_known(value.pieces)
            if text is None or not VARIABLE.match(text):
                raise Untargeted(f"the target of the reference {name} is not known")
            if "[" in text:
                return text
            name = text
        raise Unsettled(f"the reference {name} refers to itself")

    def lists(self, name: str) -> bool:
        """Return whether a variable is an indexed or associative array.

        A shell does not export arrays.
        """
        value = self.get(name)
        return bool(value and value.array) or bool(
            self.marks.get(self.target(name), frozenset()) & {"a", "A"}
        )

    def standing(self, name: str) -> Value | None:
        """Return the value of a variable, without following references."""
        return (
            self.variables.get(name)
            if self.marks.get(name, frozenset()) & {"n", "?n"}
            else self.get(name)
        )

    @property
    def positional_arguments(self) -> tuple[Pieces, ...]:
        """The arguments of the current function, of `set --`, or of the script."""
        if self.arguments is not None:
            return self.arguments
        arguments: list[Pieces] = []
        while str(len(arguments) + 1) in self.outside:
            arguments.append(_value_of_text(self.outside[str(len(arguments) + 1)]).pieces)
        return tuple(arguments)

    def _argument(self, number: int) -> Value | None:
        if not number:
            return self._live("0") if "0" not in self.outside else _value_of_text(self.outside["0"])
        if self.arguments is None:
            return (
                _value_of_text(self.outside[str(number)]) if str(number) in self.outside else None
            )
        # Behind an argument that may be several words, no number is certain.
        doubtful = next((word for word in self.arguments[:number] if several(word)), None)
        if doubtful is not None:
            return Value(
                (
                    tuple(
                        replace(piece, loose=False)
                        for piece in doubtful
                        if isinstance(piece, Unknown)
                    ),
                )
            )
        return Value((self.arguments[number - 1],)) if 0 < number <= len(self.arguments) else None

    @property
    def separators(self) -> str | None:
        """The characters of IFS; None if they are not known."""
        if "IFS" not in self.variables:
            return self.outside.get("IFS", DEFAULT_IFS)
        value = self.variables["IFS"]
        return DEFAULT_IFS if value is None else text_if_known(value.pieces)

    def set(self, name: str, value: Value) -> None:
        """Assign a value to a variable."""
        name = self.target(name)
        self.certain(name)
        if "r" in self.marks.get(name, ()):
            raise Dropped(f"{name} is read-only")
        if sum(map(len, value.words)) > LONGEST:
            raise OverflowError(f"{name} grows beyond {LONGEST:,} parts; is this the right file?")
        if (
            sum(
                len(piece.text) for word in value.words for piece in word if isinstance(piece, Text)
            )
            > MOST_CHARACTERS
        ):
            raise OverflowError(
                f"{name} grows beyond {MOST_CHARACTERS:,} characters; is this the right file?"
            )
        self.variables[name] = value
        if "allexport" in self.options:
            self.export(name)
        elif "allexport" in self.unsure and name not in self.exported:
            self.mark(name, {HANDED})
        if name == COUNTER:
            self.record_optind()

    def on(self, option: str) -> bool:
        """Return whether an option is on. Raises `Unread` if that depends on a branch."""
        if option in self.unsure:
            raise Unread(f"it is not known whether {option} is on: {self.unsure[option].why}")
        return option in self.options

    def may(self, option: str) -> bool:
        """Return whether an option is on, or may be on depending on a branch."""
        return option in self.options or option in self.unsure

    def turn(self, option: str, on: bool) -> None:
        """Turn an option on or off."""
        self.options = self.options | {option} if on else self.options - {option}
        self.unsure = {name: branch for name, branch in self.unsure.items() if name != option}

    def certain(self, name: str) -> None:
        """Raise `Unsettled` if it depends on a branch whether a variable is read-only, a number, an array or a reference."""
        doubtful = self.marks.get(name, frozenset()) & UNCERTAIN.keys()
        if doubtful:
            raise Unsettled(f"a branch decides if {name} is {UNCERTAIN[min(doubtful)]}")

    def export(self, name: str, on: bool = True) -> None:
        """Export a variable, or stop exporting it."""
        (self.exported.add if on else self.exported.discard)(name)
        # It no longer depends on a branch.
        if HANDED in self.marks.get(name, ()):
            self.mark(name, (), "x")

    @property
    def environment(self) -> dict[str, Pieces]:
        """Return the environment variables of a command, as far as the script sets them."""
        perhaps = {name for name, marks in self.marks.items() if HANDED in marks}
        pairs = ((name, self._exported_value(name)) for name in sorted(self.exported | perhaps))
        return {name: pieces for name, pieces in pairs if pieces}

    def _exported_value(self, name: str) -> Pieces | None:
        """Return the exported value of a variable; None for arrays and unset variables."""
        marks, value = self.marks.get(name, frozenset()), self.get(name)
        if value is not None and marks & {HANDED, "?a", "?A"}:
            return (
                Unknown(
                    f"${name}",
                    NOWHERE,
                    0,
                    "a branch decides whether the variable is exported",
                    perhaps=True,
                ),
            )
        return None if value is None or self.lists(name) else value.pieces

    def mark(self, name: str, additions: Iterable[str], removals: Iterable[str] = ()) -> None:
        """Add and remove attributes of a variable."""
        letters = {*additions, *removals}
        marks = self.marks.get(name, frozenset()) - {f"?{letter}" for letter in letters}
        self.marks[name] = (marks | frozenset(additions)) - frozenset(removals)

    def overtaker(self, name: str) -> str:
        """Return what may have set a variable in a way that is not known, for messages; empty if nothing may have."""
        causes = (by for pattern, by in self.overtakers[::-1] if re.fullmatch(pattern, name))
        return next(causes, "")

    def overtaken(self, by: str, pattern: str = r"\w+") -> None:
        """Mark as unknown all variables that something which is not read may set: a sourced file, or an assignment to a
        variable of unknown name.

        `by` says in messages what that is. Only names that match `pattern` may be set. Variables
        that the user gave keep their values.
        """
        self.overtakers = tuple(dict.fromkeys((*self.overtakers, (pattern, by))))
        for name, value in list(self.variables.items()):
            is_fixed = name == COUNTER or "r" in self.marks.get(name, ())
            if is_fixed or not re.fullmatch(pattern, name):
                continue
            # From outside it keeps the value that was given for the run: the option for that is how
            # a user decides it.
            if value is None or name in self.outside:
                del self.variables[name]
                continue
            why = f"{by} may change the variable; set --env {name}=..."
            unknown = Unknown(f"${name}", NOWHERE, 0, why, loose=value.array)
            self.variables[name] = Value(
                ((unknown,),), value.array, ("",) if value.table else None, value.table
            )

    def record_optind(self) -> None:
        """Record that the script assigned OPTIND.

        With a number below 2, `getopts` starts again. With any other value, its position within a word
        becomes unknown.
        """
        number = leading_number(self.get(COUNTER))
        if self.letter:
            self.letter = -abs(self.letter) if number is not None and number < 2 else None

    def state_of(self, name: str) -> Hidden:
        """Return the state of a variable: value, attributes and export."""
        value = self.variables.get(name, _NOWHERE)
        return Hidden(
            value,
            self.marks.get(name, frozenset()),
            name in self.exported,
            self.letter if name == COUNTER else 0,
        )

    def put_back(self, name: str, hidden: Hidden) -> None:
        """Restore the state of a variable that `state_of` returned."""
        self.marks.pop(name, None)
        if hidden.marks:
            self.marks[name] = hidden.marks
        (self.exported.add if hidden.exported else self.exported.discard)(name)
        if name == COUNTER:
            self.letter = hidden.letter
        if hidden.value is _NOWHERE:
            self.variables.pop(name, None)
        else:
            self.variables[name] = hidden.value

    def local(self, name: str) -> None:
        """Hide a variable until the function returns.

        The local variable is exported if the hidden one was.
        """
        if self.frames and name not in self.frames[-1]:
            self.frames[-1][name] = self.state_of(name)
            self.marks.pop(name, None)

    def restore(self) -> None:
        """Restore the variables that a function's local variables hid."""
        *rest, last = self.frames
        self.frames = tuple(rest)
        for name, hidden in last.items():
            self.put_back(name, hidden)

    def reveal(self, name: str) -> bool:
        """Model `unset` of a local variable that belongs to a calling function: the variable hidden
        by it becomes visible again.

        Returns False if there is no such local variable.
        """
        frame = next((frame for frame in reversed(self.frames[:-1]) if name in frame), None)
        if frame is None or name in self.frames[-1]:
            return False
        self.put_back(name, frame.pop(name))
        return True

    @contextmanager
    def globally(self, name: str) -> Iterator[None]:
        """Return a context in which a name means the global variable, as in `declare -g`."""
        frame = next((frame for frame in self.frames if name in frame), None)
        if frame is None:
            yield
            return
        # The outermost local hides the global value. It is put in place for the assignment, and
        # hidden again.
        inside = self.state_of(name)
        self.put_back(name, frame[name])
        yield
        frame[name] = self.state_of(name)
        self.put_back(name, inside)

    def copy(self) -> Scope:
        """Return a copy of the state, for a branch or a subshell."""
        return replace(
            self,
            variables=dict(self.variables),
            functions=dict(self.functions),
            exported=set(self.exported),
            files=self.files.copy(),
            marks=dict(self.marks),
            frames=tuple(map(dict, self.frames)),
        )

    def become(self, other: Scope) -> None:
        """Replace this state by the state of another scope."""
        for name in self.__dataclass_fields__:
            setattr(self, name, getattr(other, name))

    def settles(self, before: Scope) -> bool:
        """Return whether the state is equal to an earlier one."""
        names = {*self.variables, *before.variables}
        arguments = self.positional_arguments, before.positional_arguments
        return (
            all(_equal(self, before, name) for name in names)
            and len(arguments[0]) == len(arguments[1])
            and all(same(left, right) for left, right in zip(*arguments, strict=True))
            and self.functions == before.functions
            and self.files.settles(before.files)
            and same(self.output, before.output)
            and all(
                getattr(self, attribute) == getattr(before, attribute) for attribute in COMPARED
            )
        )

    def take(self, branches: Sequence[Scope], line: int) -> None:
        """Merge all `branches` of the statement at `line`. Values on which they disagree become unknown."""
        running = [branch for branch in branches if not branch.ended]
        if not running:
            self.become(branches[0])
            return
        branch = Branch(
            line, f"the value depends on a branch (line {line}){self.hints.get(line, '')}"
        )
        self.become(reduce(lambda one, other: _both(one, other, branch), running))


COMPARED = (
    "letter",
    "placed",
    "options",
    "unsure",
    "shared",
    "marks",
    "exported",
    "folder",
    "overtakers",
)
"""Names of fields that are compared after an iteration of a loop, in addition to the variables. If the iteration has
changed nothing in them, further iterations change nothing either.
"""
_NOWHERE = Value(((Text("", NOWHERE),),), keys=(0,))
"""Stands for the value of an unset variable, in the state that a local variable of the same name hides."""


def _both(one: Scope, other: Scope, branch: Branch) -> Scope:
    """Return the state after two branches. Parts that differ become unknown."""
    if one is other:
        return one
    names = dict.fromkeys((*one.variables, *other.variables))
    differing = [name for name in names if not _equal(one, other, name)]
    variables = {
        name: _merge_values(one.standing(name), other.standing(name), branch, name)
        for name in differing
    }
    common = {name: one.variables[name] for name in names if name not in variables}
    # Functions that a branch defines, or defines otherwise, have several definitions. None stands
    # for not defined.
    functions = {
        name: tuple(
            dict.fromkeys((*one.functions.get(name, (None,)), *other.functions.get(name, (None,))))
        )
        for name in (*one.functions, *other.functions)
    }
    # A function is surely exported only if both branches do.
    shared: Mapping[str, bool] = one.shared
    if one.shared != other.shared:
        shared = {
            name: one.shared.get(name, False) and other.shared.get(name, False)
            for name in (*one.shared, *other.shared)
        }
    candidates = {*one.marks, *other.marks, *(one.exported ^ other.exported)}
    marks = {
        name: attributes
        for name in candidates
        if (attributes := _common_attributes(one.state_of(name), other.state_of(name)))
    }
    unknown = (_unknown_of_branch("the output of a branch", branch),)
    return replace(
        one,
        variables={**common, **variables},
        functions=functions,
        exported=one.exported & other.exported,
        shared=shared,
        files=one.files.merge_states(
            other.files,
            lambda first, second, name: _settling(first, second, _unknown_of_branch(name, branch)),
        ),
        arguments=_arguments(one, other, branch),
        status=one.status if one.status == other.status else None,
        options=one.options & other.options,
        unsure={**one.unsure, **other.unsure, **dict.fromkeys(one.options ^ other.options, branch)},
        marks=marks,
        frames=tuple(
            _frame(first, second, one, other, branch)
            for first, second in zip(one.frames, other.frames, strict=True)
        ),
        output=_settling(one.output, other.output, unknown[0]),
        input=one.input if (one.input or ()) == (other.input or ()) else unknown,
        overtakers=tuple(dict.fromkeys((*one.overtakers, *other.overtakers))),
        doubting=max(one.doubting, other.doubting),
        doubted=max(one.doubted, other.doubted),
        asked=one.asked
        or other.asked
        or (one.status != other.status and bool(one.status or other.status)),
        piped=one.piped if one.piped == other.piped else None,
        at_exit=_trap(one.at_exit, other.at_exit, branch),
        at_error=_trap(one.at_error, other.at_error, branch),
        handled=one.handled | other.handled,
        letter=one.letter if one.letter == other.letter else None,
        folder=one.folder if one.folder == other.folder else f"{AWAY}{branch.line}/",
        folders=one.folders if one.folders == other.folders else (),
        placed=one.placed if one.placed == other.placed else None,
    )


def _common_attributes(one: Hidden, other: Hidden) -> frozenset[str]:
    """Return the attributes of a variable after two branches.

    An attribute that only one branch sets is marked as doubtful.
    """
    if one.marks == other.marks and one.exported is other.exported:
        return one.marks
    doubtful = {f"?{letter[-1]}" for letter in one.marks ^ other.marks}
    doubtful |= {HANDED} if one.exported is not other.exported else set()
    return frozenset((one.marks & other.marks) | doubtful)


def _trap(one: Pieces | None, other: Pieces | None, branch: Branch) -> Pieces | None:
    if one is None and other is None:
        return None
    alike = one is not None and other is not None and same(one, other)
    return one if alike else (Unknown("trap", NOWHERE, branch.line, branch.why),)


def _equal(one: Scope, other: Scope, name: str) -> bool:
    if (name in one.variables) != (name in other.variables):
        return False
    first, second = one.variables[name], other.variables[name]
    if first is second:
        return True
    return first is not None and second is not None and _alike(first, second)


def _alike(first: Value, second: Value) -> bool:
    return (
        (first.array, first.table, tuple(first.places))
        == (second.array, second.table, tuple(second.places))
        and len(first.words) == len(second.words)
        and all(same(left, right) for left, right in zip(first.words, second.words, strict=True))
    )


def _unknown_of_branch(spelling: str, branch: Branch) -> Unknown:
    return Unknown(spelling, NOWHERE, branch.line, branch.why)


def _settling(first: Pieces, second: Pieces, unknown: Unknown) -> Pieces:
    """Return the common beginning of both values, followed by one undecided part.

    Appending in a loop does not add further undecided parts.
    """
    if same(first, second):
        return first
    start = shared(first, second)
    # If the part is there from an earlier merge, nothing behind it is certain.
    place = next(
        (index for index, piece in enumerate(start) if piece.key == unknown.key), len(start)
    )
    return (*start[:place], unknown)


def _arguments(one: Scope, other: Scope, branch: Branch) -> tuple[Pieces, ...] | None:
    if one.arguments is None and other.arguments is None:
        return None
    first, second = one.positional_arguments, other.positional_arguments
    words = _common_start(first, second)
    rest = (
        ()
        if len(words) == len(first) == len(second)
        else ((Unknown("$@", NOWHERE, branch.line, branch.why, loose=True),),)
    )
    return (*words, *rest)


def _frame(
    first: dict[str, Hidden], second: dict[str, Hidden], one: Scope, other: Scope, branch: Branch
) -> dict[str, Hidden]:
    """Return the hidden states of variables after two branches.

    If only one branch hides a variable, the other branch's current value is used.
    """
    states = {}
    for name in (*first, *second):
        left, right = (
            first.get(name) or one.state_of(name),
            second.get(name) or other.state_of(name),
        )
        value = (
            left.value
            if left.value is right.value
            else _merge_values(left.value, right.value, branch, name)
        )
        letter = left.letter if left.letter == right.letter else None
        states[name] = Hidden(
            value, _common_attributes(left, right), left.exported and right.exported, letter
        )
    return states


def leading_number(value: Value | None) -> int | None:
    """Return the number that `getopts` reads from OPTIND: the leading digits, or 0 if there are none; None if it is not known."""
    text = "" if value is None else text_if_known(value.pieces)
    match = LEADING.match(text or "")
    return None if text is None else int(match[0]) if match else 0


def _value_of_text(text: str) -> Value:
    return Value(((Text(text, NOWHERE, plain=False),),))


def _merge_values(
    one: Value | None, other: Value | None, branch: Branch, name: str
) -> Value | None:
    """Return a value after two branches. What follows the common beginning of both is unknown."""
    if one is None and other is None:
        return None
    first, second = one or Value(()), other or Value(())
    unset = one is None or other is None
    unknown = Unknown(f"${name}", NOWHERE, branch.line, branch.why, perhaps=unset)
    if first.table or second.table:
        return Value(((replace(unknown, loose=True),),), True, ("",), True)
    if first.array or second.array:
        kinds_differ = not unset and first.array != second.array
        return _merge_arrays(first, second, replace(unknown, loose=True), kinds_differ)
    if not unset and same(first.pieces, second.pieces):
        return one
    return Value(
        (
            _settling(() if unset else first.pieces, () if unset else second.pieces, unknown)
            or (unknown,),
        )
    )


def _merge_arrays(first: Value, second: Value, unknown: Unknown, kinds_differ: bool) -> Value:
    """Return an array after two branches. With `kinds_differ`, the variable is no array in one of them."""
    if kinds_differ or first.keys is not None or second.keys is not None:
        return Value(((unknown,),), True)
    words = _common_start(first.words, second.words)
    rest = () if len(words) == len(first.words) == len(second.words) else ((unknown,),)
    place = next(
        (index for index, word in enumerate(words) if rest and same(word, rest[0])), len(words)
    )
    return Value((*words[:place], *rest), True)


def _common_start(one: tuple[Pieces, ...], other: tuple[Pieces, ...]) -> tuple[Pieces, ...]:
    pairs = zip(one, other, strict=False)
    length = next(
        (index for index, (left, right) in enumerate(pairs) if not same(left, right)),
        min(len(one), len(other)),
    )
    return one[:length]


def elements(value: Value) -> Iterator[tuple[int | str, Pieces]]:
    """Yield the indices and words of a value in the order in which a shell lists them."""
    pairs = list(zip(value.places, value.words, strict=True))
    # Bash walks its hash table bucket by bucket, and within a bucket from the newest key to the
    # oldest.
    if value.table:
        pairs.reverse()
        pairs.sort(key=lambda pair: _bucket(str(pair[0])))
    return iter(pairs)


BUCKETS = 1024
"""Number of buckets in the hash table of an associative array in bash."""


def _bucket(key: str) -> int:
    """Return the hash bucket of a key in bash's associative arrays (hashlib.c: 32-bit FNV-1).

    Buckets decide the order of keys.
    """
    hash_value = 2166136261
    for byte in key.encode():
        hash_value = (hash_value * 16777619) & 0xFFFFFFFF
        hash_value ^= byte
    return hash_value & (BUCKETS - 1)
