"""Follows the words of a command from one starter to the next, as these programs would, down to the
last program that is started.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from bridge.shell.launchers.tables import (
    ASSIGNMENT,
    LAUNCHERS,
    NO_PYTHON,
    PYTHON,
    PYTHON_VALUES,
    SCRIPT,
    SHELL_VALUES,
    SHELLS,
    STARTERS,
    TEXT_ONLY,
    TEXT_OPTION,
    TRAINER,
    Starter,
)


@dataclass(slots=True, unsafe_hash=True)
class LaunchWord:
    """A word of a command: its text, or None if that is not known, its spelling in the script, and
    whether it may expand to several words.
    """

    text: str | None
    spelling: str
    loose: bool = False

    @property
    def name(self) -> str:
        """The word as a program's name, without its folder."""
        return self.spelling.rpartition("/")[2]

    @property
    def option(self) -> bool:
        """Whether the word is an option."""
        return self.spelling.startswith("-") and self.spelling != "-"


@dataclass(slots=True, unsafe_hash=True)
class Link:
    """A starter in a command: its name, and the range of its words, from index `start` up to index `end`."""

    name: str
    start: int
    end: int


@dataclass(slots=True)
class Walk:
    """The search for the started program in `words`.

    `links` are the starters on the way, and `at` is the index at which the search ends. `kind` is
    `program`, `module`, or for a shell `text`, `rest` (all further words are its text), `file` or
    `input`; it is empty if nothing is started. `before` is the number of words that start the
    shell.
    """

    words: Sequence[LaunchWord]
    links: list[Link] = field(default_factory=list)
    kind: str = ""
    at: int = -1
    before: int = 0

    @property
    def apart(self) -> bool:
        """Whether the started program has a new environment."""
        return any(STARTERS[link.name].apart for link in self.links if link.name in STARTERS)

    def run(self) -> Walk:
        """Search the words from the first one on. Returns this walk, in which the result is stored."""
        at: int | None = 0
        while at is not None and at < len(self.words):
            at = self._step(at)
        last = STARTERS.get(self.links[-1].name) if self.links else None
        if not self.kind and last and last.stdin and self.links[-1].end >= len(self.words):
            self._end("input", len(self.words), self.links[-1].start)
        return self

    def _end(self, kind: str, at: int, before: int = 0) -> int | None:
        """Record the end of the walk. Returns None, because there is no next index."""
        self.kind, self.at, self.before = kind, at, before
        return None

    def _step(self, at: int) -> int | None:
        """Read the word at index `at`, where a program is expected.

        Returns the index of the next program, or None at the end.
        """
        word = self.words[at]
        if word.text is None:
            further = self._ahead(at + 1, known=False)
            if further is None and self.links:
                self._end("program", at)
            return further
        if word.name in SHELLS:
            return self._shell(at)
        if PYTHON.fullmatch(word.name):
            return self._python(at)
        if word.name in STARTERS:
            return self._starter(at, at, STARTERS[word.name])
        if TRAINER.fullmatch(word.name):
            return self._end("program", at)
        is_name = "/" in word.text or not any(
            char.isspace() for char in word.text
        )  # else it is no program that starts another
        further = self._ahead(at + 1) if is_name and word.name not in TEXT_ONLY else None
        if further is None and word.name.endswith(SCRIPT):
            self._end("file", at, at)
        return further

    def _ahead(self, start: int, known: bool = True) -> int | None:
        """Return the index of the next word that is certainly a program.

        With `known` false, after an unknown word, training scripts count too.
        """
        return next(
            (at for at in range(start, len(self.words)) if self._is_program(at, known)), None
        )

    def _is_program(self, at: int, needs_flags: bool) -> bool:
        word, places = self.words[at], range(at + 1, len(self.words))
        if word.option or word.text is None:
            return False
        if TRAINER.fullmatch(word.name):
            flags = (self.words[place].spelling.lstrip().startswith("-") for place in places)
            return not self._is_value(at) and (not needs_flags or any(flags))
        after = self.words[at + 1] if places else None
        runs = after is not None and (
            after.option or after.text is None or bool(TRAINER.fullmatch(after.name))
        )
        if word.name in SHELLS:
            return after is not None and bool(TEXT_OPTION.fullmatch(after.spelling))
        return word.name in LAUNCHERS or (runs and bool(PYTHON.fullmatch(word.name)))

    def _is_value(self, at: int) -> bool:
        """Return whether the word may be the value of an option: the word before it is a long option without `=`."""
        before = self.words[at - 1].spelling if at else ""
        return before.startswith("--") and before != "--" and "=" not in before

    # Python

    def _python(self, start: int) -> int | None:
        """Read Python's own options, then a script or a module."""
        at = start + 1
        while at < len(self.words) and self.words[at].option:
            text = self.words[at].text
            if text == "-m":
                return self._module(start, at + 1)
            if text == "-c":
                return None
            at += 2 if text in PYTHON_VALUES else 1
        if at < len(self.words) and self.words[at].text != "-":
            self.links.append(Link("python", start, at))
            if (behind := self._submitted(at)) is not None:
                return behind
            self._end("program", self._script(at))
        return None

    def _submitted(self, at: int) -> int | None:
        """Return the index of the launcher that a script at `at` gets as a command, as in `submit.py ... -- torchrun ...`: it
        starts that elsewhere. None if it gets none.
        """
        places = range(at + 1, len(self.words) - 1)
        return next(
            (
                place + 1
                for place in places
                if self.words[place].text == "--" and self.words[place + 1].name in LAUNCHERS
            ),
            None,
        )

    def _module(self, start: int, at: int) -> int | None:
        """Read `python -m NAME`, which is a launcher or a training program."""
        if at >= len(self.words):
            return None
        name = self.words[at].text
        if name is not None and name in STARTERS:
            return self._starter(at, start, STARTERS[name])
        self.links.append(Link("python", start, at))
        return self._end("module", at)

    def _script(self, at: int) -> int:
        """Return the index of the training script: `at`, or the first script after unknown words, which may be options."""
        if not self.words[at].loose:
            return at
        for place in range(at, len(self.words)):
            word = self.words[place]
            if TRAINER.fullmatch(word.name) and not word.option and not self._is_value(place):
                return place
        return at

    # Starters

    def _starter(self, at: int, start: int, row: Starter) -> int | None:
        """Read a starter. Its name is at index `at`, and its words begin at `start`.

        Returns the index after them.
        """
        name = self.words[at].name
        here = self._under(at + 1, row) if row.under else at + 1
        if here is None:
            return None
        here = self._past_options(here, row)
        if self._names_started(here - 1, row):
            self.links.append(Link(name, start, here))
            # The option names the module that is started, or has the text for a shell, maybe behind
            # `=`.
            if not row.module and "=" in self.words[here - 1].spelling:
                return self._end("text", here - 1, start)
            return (
                self._end("module" if row.module else "text", here, start)
                if here < len(self.words)
                else None
            )
        here = min(here + row.before, len(self.words))
        while (
            row.assigns and here < len(self.words) and ASSIGNMENT.match(self.words[here].spelling)
        ):
            here += 1
        self.links.append(Link(name, start, here))
        if here >= len(self.words):
            return None
        if row.script:
            return self._end("file", here, start)
        if row.shell == "rest":
            reads = Walk(self.words[here:]).run().kind == "input"
            return self._end("input" if reads else "rest", here, start)
        if row.own and self.words[here].text is None:
            return self._opaque(here)
        if (
            row.module
            and row.own
            and not any(word.spelling in NO_PYTHON for word in self.words[start:here])
        ):
            return self._end("program", here)
        return here

    def _opaque(self, at: int) -> int | None:
        """Read an unknown word. It may be a launcher's program, or further options of the launcher."""
        further = self._ahead(at + 1, known=False) if self.words[at].loose else None
        if further is None:
            self._end("program", at)
        return further

    def _under(self, at: int, row: Starter) -> int | None:
        """Return the index after a subcommand that starts a program, as in `docker --context x run`; None if there is none."""
        for place in range(at, min(at + 4, len(self.words))):
            for words in row.under:
                if tuple(word.text for word in self.words[place : place + len(words)]) == words:
                    return place + len(words)
        return None

    def _names_started(self, at: int, row: Starter) -> bool:
        """Return whether the option at index `at` names the program to start: a module or a shell's text."""
        option = self.words[at].spelling.partition("=")[0]
        option = row.name_option(option) or option
        return (row.module and option in ("-m", "--module")) or (
            row.shell.startswith("-") and option == row.shell
        )

    def _past_options(self, at: int, row: Starter) -> int:
        """Return the index after a starter's own options, or after an option that names the program to start."""
        while at < len(self.words):
            word = self.words[at]
            further: int | None = None
            if word.text is None and word.loose:
                # It may be more options of the starter. Behind it comes one that the starter has,
                # or a program.
                following = (
                    self.words[at + 1].spelling.partition("=")[0]
                    if at + 1 < len(self.words)
                    else ""
                )
                further = at + 1 if row.name_option(following) else self._later(at + 1)
            if further is not None:
                at = further
            elif word.text == "--":
                return at + 1
            elif not word.option:
                return at
            else:
                at = min(self._past_option(at, word.spelling, row), len(self.words))
                if self._names_started(at - 1, row):
                    return at
        return at

    def _past_option(self, at: int, text: str, row: Starter) -> int:
        option, tied, _ = text.partition("=")
        has_value = not text.startswith("--") and len(text) > 2 and row.values.get(text[:2], 0) > 0
        if self._names_started(at, row) or tied or (has_value and text not in row.values):
            return at + 1
        if name := row.name_option(option):
            return at + 1 + row.values[name]
        after = at + 1
        if (
            row.before
            or after >= len(self.words)
            or self.words[after].option
            or self._starts(after)
        ):
            return after
        # Of an option that is not in the table, the next word is a value if a program still
        # follows.
        return after + 1 if self._later(after + 1) is not None else after

    def _starts(self, at: int) -> bool:
        name = self.words[at].name
        return (
            name in STARTERS
            or name in SHELLS
            or bool(PYTHON.fullmatch(name) or TRAINER.fullmatch(name))
        )

    def _later(self, start: int) -> int | None:
        """Return the index of the next word that may be a program, or that is an option such as `-m`."""
        places = range(start, len(self.words))
        return next(
            (at for at in places if self._starts(at) or self.words[at].text in ("-m", "--module")),
            None,
        )

    # Shells

    def _shell(self, start: int) -> int | None:
        """Read a call of a shell, whose script is an argument (-c), a file, or standard input."""
        at, text, stdin = start + 1, False, False
        while (
            at < len(self.words)
            and (word := self.words[at].spelling).startswith(("-", "+"))
            and word != "-"
        ):
            cluster = word.startswith("-") and not word.startswith("--")
            text = text or (cluster and "c" in word)
            stdin = stdin or (cluster and "s" in word)
            at += 2 if word in SHELL_VALUES or (cluster and word.endswith("o")) else 1
            if word == "--":
                break
        if at >= len(self.words) or (stdin and not text):
            return self._end("input", at, start)
        if text:
            return self._end("text", at, start)
        # `bash wrapper.sh torchrun ...`: a script that is given a launcher most likely starts it.
        further = self._ahead(at + 1)
        return self._end("file", at, start) if further is None else further


def walk(words: Sequence[LaunchWord]) -> Walk:
    """Follow the words of a command to the program that is started last."""
    return Walk(words).run()
