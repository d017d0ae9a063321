"""Finds the training runs that a script starts, and lines that may be runs but were not read as such."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Set
from functools import cached_property
from itertools import islice

from bridge.errors import SourceError
from bridge.shell.interpreter import ShellReader
from bridge.shell.launch import Launch, why_unknown
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
from bridge.shell.word_pieces import NOWHERE, Pieces, Unknown, spell_pieces, start_of_pieces

MAX_CHARACTERS = 2**20


class LaunchSearch:
    """Finds the training runs of a script, read as if it were started with only the variables and arguments in `outside`."""

    def __init__(self, text: str, name: str, outside: Mapping[str, str]) -> None:
        self.text, self.name, self.outside = text, name, outside

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

    def messages_on_missed(self, runs: Set[int], unknown: Iterable[str]) -> list[str]:
        """Messages about possible runs that were not read. `runs` are the lines of those that were, and `unknown` has
        messages about their words.
        """
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
        return [*messages, *self.reader.ends[:MOST], *islice(unknown, MOST)]


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
        dict.fromkeys(filter(None, (why_unknown(command.words[at]) for at in unknown)))
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
