"""Shells that a script starts: the text, file or input that such a shell reads, and the variables that it gets."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import overload

from bridge.shell import file_contents, options
from bridge.shell.files import is_gone
from bridge.shell.launchers import LaunchWord, Walk, walk
from bridge.shell.scope import Scope, Value
from bridge.shell.state import ShellState
from bridge.shell.word_pieces import (
    NOWHERE,
    Piece,
    Pieces,
    Text,
    Unknown,
    cut,
    spell_pieces,
    text_if_known,
)

SET = re.compile(r"([A-Za-z_]\w*)=")
UNSET = re.compile(r"(?:-u|--unset=)(?=.)(.*)", re.DOTALL)
SHARED = "BASH_FUNC_{}%%"
"""Name of the environment variable that holds an exported function."""
GIVEN = re.compile(SHARED.format(".*") + "=")
OTHERS = frozenset(("sudo", "srun", "sbatch"))
"""Programs that start a shell with a new environment."""
UNSEEN = "the script does not export the variable, so an inner shell does not have it"


class Listed(Sequence[LaunchWord]):
    """The words of a command, among which a launcher is searched for.

    A word is expanded only when it is needed.
    """

    def __init__(self, words: Sequence[Pieces]) -> None:
        self.pieces, self.made = words, dict[int, LaunchWord]()

    def __len__(self) -> int:
        return len(self.pieces)

    @overload
    def __getitem__(self, at: int) -> LaunchWord: ...

    @overload
    def __getitem__(self, at: slice) -> list[LaunchWord]: ...

    def __getitem__(self, at: int | slice) -> LaunchWord | list[LaunchWord]:
        if isinstance(at, slice):
            return [self[place] for place in range(*at.indices(len(self)))]
        place = range(len(self))[at]
        if place not in self.made:
            word = self.pieces[place]
            loose = len(word) == 1 and isinstance(word[0], Unknown) and word[0].loose
            self.made[place] = LaunchWord(text_if_known(word), spell_pieces(word), loose)
        return self.made[place]


def list_words(words: Sequence[Pieces]) -> Listed:
    """Return the words of a command, ready for the search for a launcher."""
    return Listed(words)


def behind(argv: Sequence[Pieces]) -> Sequence[Pieces]:
    """Return the command that follows a starter such as `exec` or `time` and the starter's options."""
    search = walk(list_words(argv))
    end = search.links[0].end if search.links else len(argv)
    return argv[end:]


def start_shell(reader: ShellState, place: int, argv: Sequence[Pieces], search: Walk) -> bool:
    """Read the inner shell that a command starts.

    The inner shell reads a text, its input, or a file that the script has written. Returns False if
    the command starts no such shell.
    """
    if search.kind in ("text", "rest"):
        text, arguments = _text(search, argv)
    elif (
        search.kind == "file"
        and (content := file_contents.file(reader, argv[search.at])) is not None
        and not is_gone(content)
    ):
        text, arguments = content, argv[search.at :]
    elif search.kind == "input" and reader.scope.input is not None:
        text, arguments = (
            reader.scope.input,
            (*argv[search.before : search.before + 1], *argv[search.at :]),
        )
    else:
        return False
    scope = _scope(reader, place, search, argv, arguments)
    if scope.on("noexec"):  # `bash -n` reads a script and runs nothing of it
        reader.scope.status = None
    else:
        reader.read_inner_text(place, text, argv[: search.before], scope)
    return True


def _text(search: Walk, argv: Sequence[Pieces]) -> tuple[Pieces, Sequence[Pieces]]:
    """Return the text that an inner shell reads, and its arguments from `$0` on."""
    if search.kind == "rest":
        # As `ssh` does, all words are joined by blanks and read a second time.
        pieces: list[Piece] = []
        for index, word in enumerate(argv[search.at :]):
            pieces += [*([Text(" ", NOWHERE, True, plain=False)] if index else []), *word]
        return tuple(pieces), ()
    # An option that names the text may have it behind `=`. Otherwise words behind the text are `$0`
    # and the arguments.
    option, tied, _ = spell_pieces(argv[search.at]).partition("=")
    is_long_option = bool(tied) and option.startswith("--") and option.removeprefix("--").isalpha()
    text = cut(argv[search.at], len(option) + 1) if is_long_option else argv[search.at]
    return text, tuple(argv[search.at + 1 :]) or tuple(argv[search.before : search.at])[:1]


def _scope(
    reader: ShellState,
    place: int,
    search: Walk,
    argv: Sequence[Pieces],
    arguments: Sequence[Pieces],
) -> Scope:
    """Return the scope of the inner shell.

    It has the exported variables, or none if the shell runs on another machine.
    """
    # `apart`: nothing of this shell's environment reaches the new one. `clears_here`: it is
    # emptied on this machine, so that the variables are not set there; of another machine nothing
    # is known.
    outer, shell = reader.scope, spell_pieces(argv[search.before]).rpartition("/")[2]
    apart, removals = _variables_to_clear(argv[: search.before])
    clears_here = (
        apart
        and not search.apart
        and not OTHERS & {spell_pieces(word) for word in argv[: search.before]}
    )
    apart = apart or bool(search.apart)
    environment = (
        {}
        if apart
        else {name: pieces for name, pieces in outer.environment.items() if name not in removals}
    )
    values = {name: Value((pieces,)) for name, pieces in environment.items()}
    for word in argv[: search.before] if not search.apart else ():
        if GIVEN.match(spell_pieces(word)):
            raise reader.refuse(place, "a function in an environment variable is not supported")
        if match := SET.match(spell_pieces(word)):
            values[match[1]] = Value((cut(word, match.end()) or (Text("", NOWHERE),),))
    lists = {
        name
        for name, value in outer.variables.items()
        if not apart and not (value and value.open) and outer.lists(name)
    }
    line, absent = reader.source.line(place), removals | lists
    # A variable that is not exported is not passed on. It is unknown rather than unset: the
    # environment may have one of that name.
    hidden = {
        name: None
        if clears_here or name in absent
        else Value(((Unknown(f"${name}", NOWHERE, line, UNSEEN),),))
        for name in (*outer.variables, *removals)
        if name not in values and (apart or name in absent or name not in outer.outside)
    }
    outside_values = {
        name: value
        for name in outer.outside.keys() - removals
        if name in outer.variables and (value := outer.get(name)) is not None
    }
    exports = (
        {}
        if apart
        else {
            name: sure and shell == "bash"
            for name, sure in outer.shared.items()
            if name in outer.functions
        }
    )
    inherits = {name: sure for name, sure in exports.items() if SHARED.format(name) not in removals}
    own_name = text_if_known(arguments[0]) if arguments else None
    outside = {name: text for name, text in outer.outside.items() if not name.isdigit()}
    return Scope(
        outside if own_name is None else outside | {"0": own_name},
        {**({} if apart else outside_values), **hidden, **values},
        functions={
            name: outer.functions[name] if sure else (*outer.functions[name], None)
            for name, sure in inherits.items()
        },
        exported=set(values),
        shared=inherits,
        files=outer.files.copy(),
        folder=outer.folder,
        here="",
        arguments=tuple(arguments[1:]),
        options=_options_of_bash(reader, place, argv[search.before : search.at]),
    )


def _variables_to_clear(words: Sequence[Pieces]) -> tuple[bool, set[str]]:
    """Return whether a starter such as `env -i` clears the environment, and the variables that it removes."""
    texts = [spell_pieces(word) for word in words]
    if any(re.fullmatch(r"--export=(NONE|NIL)", text, re.IGNORECASE) for text in texts):
        return True, set()
    if "sudo" in texts and not {"-E", "--preserve-env"} & set(texts):
        return True, set()
    behind_env = texts[texts.index("env") :] if "env" in texts else []
    names = {after for text, after in pairwise(behind_env) if text in ("-u", "--unset")}
    names |= {match[1] for text in behind_env if (match := UNSET.match(text))}
    return bool({"-i", "-", "--ignore-environment"} & set(behind_env)), names


def _options_of_bash(reader: ShellState, place: int, words: Sequence[Pieces]) -> frozenset[str]:
    """Return the options that `bash -e`, `-u`, `-o pipefail`, `-O extglob` and `+B` set.

    Raises `SourceError` for unsupported options.
    """
    result = options.ON
    texts = [spell_pieces(word) for word in words]
    for text, after in pairwise([*texts, ""]):
        letters = re.fullmatch(r"([-+])([A-Za-z]+)", text)
        for letter in letters[2] if letters else "":
            kind = options.SHOPT if letter == "O" else options.SET
            # `-o` and `-O` take the name of the option from the next word.
            name = after if letter in "oO" else options.LETTERS.get(letter)
            if name is None:
                continue
            if problem := kind.problem(name, text[0] == "-"):
                raise reader.refuse(place, problem)
            result = result | {name} if text[0] == "-" else result - {name}
    return result
