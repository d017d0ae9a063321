"""A launch script as data: its training runs with words, ranks and variables, and the files that the script writes."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice

from bridge.errors import SourceError
from bridge.files.document import TEXT, Document
from bridge.files.shown import brief
from bridge.shell.files import AWAY, file_key, is_gone, key_in
from bridge.shell.interpreter import ShellReader
from bridge.shell.launchers import (
    BATCH_SYSTEM,
    DIRECTIVE,
    JOB_LINE,
    Walk,
    list_unknown_options,
    ranks,
    walk,
)
from bridge.shell.missed_runs import MOST, find_missed_runs
from bridge.shell.nested_shells import list_words
from bridge.shell.scope import Scope
from bridge.shell.state import Command
from bridge.shell.word_pieces import (
    NOWHERE,
    Pieces,
    Text,
    Unknown,
    spell_pieces,
    start_of_pieces,
    text_if_known,
    unknowns,
)

MAX_CHARACTERS = 2**20


@dataclass(frozen=True)
class Launch:
    """One training run that a script starts: a program such as `python` or `torchrun`, with its arguments.

    `launcher` are the words before the program. `branch` is the line of an enclosing branch whose
    condition is not known, or 0. `ranks` is the world size, if the launcher's arguments give it as
    numbers, and `unranked` is why they do not, if a word that is not known is the reason.
    `unknown_options` are pairs of a launcher and an option that its parser does not know. `files` are
    the files that the script has written before, by key; `folder` is the key of the run's working
    directory.
    """

    program: str
    words: tuple[Pieces, ...]
    launcher: tuple[Pieces, ...]
    environment: Mapping[str, Pieces]
    line: int
    lines: tuple[int, ...]
    branch: int = 0
    ranks: int | None = None
    files: Mapping[str, Pieces] = field(default_factory=dict)
    folder: str = ""
    unranked: str = ""
    unknown_options: tuple[tuple[str, str], ...] = ()

    @property
    def texts(self) -> list[str]:
        """The words as text; unknown parts are spelled as in the script."""
        return [spell_pieces(word) for word in self.words]

    @property
    def opaque(self) -> dict[int, str]:
        """The reasons why words are not known, by index of the word.

        The reason is for the first unknown part of the word.
        """
        return {index: why for index, word in enumerate(self.words) if (why := _opaque(word))}

    @property
    def loose(self) -> frozenset[int]:
        """Indices of words that may expand to any number of words, because they are unknown expansions without quotes."""
        alone = ((index, word[0]) for index, word in enumerate(self.words) if len(word) == 1)
        return frozenset(
            index for index, piece in alone if isinstance(piece, Unknown) and piece.loose
        )

    def file(self, path: Pieces) -> Pieces | None:
        """Return the text that the script has written to `path` before this run; None if it has not written to `path`."""
        text = self.files.get(key_in(self.folder, path), self.files.get(file_key(path)))
        return None if text is None or is_gone(text) else text

    def place(self, path: Pieces) -> str | None:
        """Return the path of a file that the run names, relative to the folder in which the script starts.

        Return None if a part of the name, or the run's working directory, is not known.
        """
        key = key_in(self.folder, path)
        return None if "\0" in key or key.startswith(AWAY) else key

    def with_words(self, words: Sequence[str] = (), launcher: Sequence[str] = ()) -> Launch:
        """Return this run with further words behind those of its program and of its launcher, which nobody wrote."""
        more, options = (tuple((Text(word, NOWHERE),) for word in own) for own in (words, launcher))
        return replace(
            self,
            words=(*self.words, *more),
            lines=(*self.lines, *(0 for _ in more)),
            launcher=(*self.launcher, *options),
        )

    def __str__(self) -> str:
        where = (
            f", in a branch whose condition is not known (line {self.branch})"
            if self.branch
            else ""
        )
        return f"line {self.line}: {self.program}{where}"


@dataclass(frozen=True)
class Script:
    """A script, read as if it were started with only the variables and arguments in `outside`.

    `outside` has variables by name, and arguments by number. `chosen` is the number of the wanted
    run, counted from 1.
    """

    text: str
    name: str = TEXT
    outside: Mapping[str, str] = field(default_factory=dict)
    chosen: int | None = None

    def start_with(self, outside: Mapping[str, str], chosen: int | None) -> Script:
        """Return the same script, started with the variables and arguments in `outside` and with the run `chosen`."""
        return replace(self, outside=outside, chosen=chosen)

    def change(self, change: Callable[[Launch], Launch]) -> Script:
        """Return the same script, whose runs are those that `change` returns."""
        changed = replace(self)
        changed.__dict__["launches"] = tuple(map(change, self.launches))
        return changed

    @cached_property
    def reader(self) -> ShellReader:
        """The reader, after it has read the script."""
        if len(self.text) > MAX_CHARACTERS:
            raise SourceError(
                f"{self.name}: found more than 1 MiB; a launch script is smaller, is this the right file?"
            )
        # Slurm sets variables from the directives of a script. Those that are given take
        # precedence.
        directives = _directives(self.text)
        slurm = {
            variable: value for name, value in directives for variable in BATCH_SYSTEM.get(name, ())
        }
        reader = ShellReader(self.name, Scope({**slurm, **self.outside}))
        if JOB_LINE.search(self.text):
            reader.scope.overtaken("Slurm", r"SLURM_\w+")
        try:
            reader.read(self.text)
        except RecursionError:
            raise SourceError(
                f"{self.name}: nested too deeply; a launch script is flatter, is this the right file?"
            ) from None
        return reader

    @property
    def variables_with_value(self) -> dict[str, str]:
        """Variables of the script, and of the runs that it starts, whose values are known."""
        values = {
            name: value.pieces
            for name, value in self.reader.scope.variables.items()
            if value is not None
        }
        for launch in self.launches:
            values |= launch.environment
        return {
            name: text
            for name, pieces in values.items()
            if (text := text_if_known(pieces)) is not None
        }

    @cached_property
    def launches(self) -> tuple[Launch, ...]:
        """Every training run that the script starts."""
        where = Where(self.text)
        candidates = (_launch(command, where) for command in self.reader.commands)
        return tuple(launch for launch in candidates if launch is not None)

    def strays(self) -> Iterator[tuple[int, str, str]]:
        """Yield line, flag and reason for each flag that a shell reads as a command, because the
        line before does not end in a backslash.
        """
        for command in self.reader.commands:
            first = spell_pieces(command.words[0])
            if re.match(r"--?[a-zA-Z]", first):
                yield command.line, first, _stray(self.text, command.line)

    @property
    def unread_sources(self) -> Iterator[tuple[int, str, str]]:
        """Yield line, name and assumption for each sourced file that was not read."""
        for source in dict.fromkeys(self.reader.sourced):
            assumption = (
                "the file is assumed to set up tools, but nothing that the run uses"
                if source.tools
                else "the file is assumed to set variables, and to do nothing else"
            )
            yield (
                source.line,
                f"source {source.name}",
                f"the file is not read; {assumption}: {source.why}",
            )

    @property
    def unset_variables(self) -> Iterator[tuple[int, str, str]]:
        """Yield line, variable and assumption for each variable that decides a branch although nothing sets it."""
        for name, line in self.reader.unset_deciders.items():
            yield (
                line,
                f"${name}",
                f"not set, and a condition reads it; stagebridge assumes that it is empty; if your"
                f" environment sets it, add --env {name}=...",
            )

    def launch(self, fits: Callable[[Launch], bool], what: str) -> Launch:
        """Return the run for which `fits` is true. If a run is chosen, return that one.

        Raises `SourceError` if no run fits, or if several fit and none is chosen.
        """
        if self.chosen is not None:
            return self._run_at(self.chosen)
        fitting = [
            (number, launch) for number, launch in enumerate(self.launches, 1) if fits(launch)
        ]
        if not fitting:
            raise SourceError(
                f"{self.name}: found no run with {what}; runs of the script: {self.runs_text}",
                *self.messages_on_missed,
            )
        if len(fitting) > 1:
            messages = (f"{self.name}: --launch {number}: {launch}" for number, launch in fitting)
            raise SourceError(
                f"{self.name}: starts {len(fitting)} runs with {what}; name one with --launch",
                *messages,
            )
        return fitting[0][1]

    @property
    def runs_text(self) -> str:
        """The runs that the script starts, as text for messages."""
        return "; ".join(map(str, self.launches)) or "none"

    @property
    def _unknown(self) -> Iterator[str]:
        """Messages about words of runs that may expand to any number of flags."""
        loose = (launch.opaque[index] for launch in self.launches for index in sorted(launch.loose))
        return (f"{self.name}: {message}" for message in dict.fromkeys(loose))

    def _run_at(self, number: int) -> Launch:
        if not 1 <= number <= len(self.launches):
            messages = (
                f"{self.name}: {index}: {launch}" for index, launch in enumerate(self.launches, 1)
            )
            raise SourceError(
                f"{self.name}: there is no run {number}; the script starts {len(self.launches)}",
                *messages,
            )
        return self.launches[number - 1]

    @property
    def messages_on_missed(self) -> list[str]:
        """Messages about possible runs that were not read: flags that a shell reads as a command, and likely launches."""
        runs = {launch.line for launch in self.launches}
        left_at = self.reader.scope.left_at if self.reader.scope.ended else 0
        likely_runs = find_missed_runs(
            self.text, {command.line for command in self.reader.commands} | runs, runs, left_at
        )
        strays = [(line, f"{word}: {reason}") for line, word, reason in self.strays()]
        sources = [
            (
                source.line,
                f"source {source.name}: the variables that it sets are not known: {source.why}",
            )
            for source in self.reader.sourced
        ]
        messages = [
            f"{self.name}: line {line}: {reason}"
            for line, reason in (*strays, *likely_runs, *(sources if not runs else ()))
        ]
        return [*messages, *self.reader.ends[:MOST], *islice(self._unknown, MOST)]


def _stray(text: str, line: int) -> str:
    """Return the reason why a flag at the start of a line is read as a command."""
    before = text.split("\n")[max(line - 2, 0)] if line > 1 else ""
    reason = f"line {line - 1} does not end in a backslash"
    if before.rstrip().endswith("\\") and before != before.rstrip():
        reason = f"a blank follows the backslash of line {line - 1}"
    elif before.lstrip().startswith("#"):
        reason = f"the comment on line {line - 1} ends the command"
    return f"the flag is no part of the run: {reason}, so a shell reads the flag as a command"


def _directives(text: str) -> Iterator[tuple[str, str]]:
    """Yield the options on `#SBATCH` lines whose values are numbers."""
    return (
        (match["name"], match["value"])
        for match in DIRECTIVE.finditer(text)
        if match["value"].isdigit()
    )


class Where:
    """Facts that all runs of a script share: its lines, and the options on its `#SBATCH` lines."""

    def __init__(self, text: str) -> None:
        self.breaks, self.directives = (
            [match.start() for match in re.finditer("\n", text)],
            dict(_directives(text)),
        )

    def line(self, word: Pieces) -> int | None:
        """Return the line on which a word begins; None if the word is not in the script's text."""
        place = start_of_pieces(word)
        return None if place is None else bisect_left(self.breaks, place) + 1


def _launch(command: Command, where: Where) -> Launch | None:
    """Return the training run that a command starts; None if it starts none."""
    search = walk(list_words(command.words))
    if search.kind not in ("program", "module"):
        return None
    words = command.words[search.at + 1 :]
    if any(link.name == "xargs" for link in search.links):
        # It adds arguments at the end, any number of them.
        extra = Unknown(
            "xargs", NOWHERE, command.line, "the words come from the input of xargs", loose=True
        )
        words = (*words, (extra,))
    return _run(command, search, words, where)


def _run(command: Command, search: Walk, words: tuple[Pieces, ...], where: Where) -> Launch:
    lines = tuple(where.line(word) or command.line for word in words)
    program, before = (spell_pieces(command.words[search.at]), command.words[: search.at])
    size, unknown = ranks(search, where.directives, command.environment)
    unknown_sizes = "; ".join(
        dict.fromkeys(filter(None, (_opaque(command.words[at]) for at in unknown)))
    )
    files, folder = command.files, command.folder
    return Launch(
        program,
        words,
        before,
        command.environment,
        command.line,
        lines,
        command.branch,
        size,
        files,
        folder,
        unknown_sizes,
        tuple(list_unknown_options(search)),
    )


def _opaque(word: Pieces) -> str:
    """Return why a word is not known, for the first unknown part of the word; empty if it is known."""
    part = next(unknowns(word), None)
    return f"{brief(part.spelling)} (line {part.line}) is not known: {part.why}" if part else ""


def load_script(text: str, name: str = TEXT) -> Document:
    """Parse a shell script. The document's `data` is the `Script`."""
    return Document(Script(text, name), {}, "script", name=name)
