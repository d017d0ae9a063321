"""A training run that a script starts, with the words, variables and files that the script gives it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from bridge.files.shown import brief
from bridge.shell.files import AWAY, file_key, is_gone, key_in
from bridge.shell.word_pieces import NOWHERE, Pieces, Text, Unknown, spell_pieces, unknowns


@dataclass(frozen=True)
class Launch:
    """One training run that a script starts: a program such as `python` or `torchrun`, with its arguments.

    `launcher` are the words before the program. `branch` is the line of an enclosing branch whose
    condition is not known, or 0. `ranks` is the world size, if the launcher's arguments give it as
    numbers, and `unranked` is why they do not, if a word that is not known is the reason.
    `unknown_options` are pairs of a launcher and an option that its parser does not know. `files` are
    the files that the script has written before, by key; `folder` is the key of the run's working
    directory. `sources` has the places of words that nobody wrote into a command, by index: the
    setting, the file (empty for the one that is read) or the program, and the line there.
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
    sources: Mapping[int, tuple[str, str, int]] = field(default_factory=dict)

    @property
    def texts(self) -> list[str]:
        """The words as text; unknown parts are spelled as in the script."""
        return [spell_pieces(word) for word in self.words]

    @property
    def opaque(self) -> dict[int, str]:
        """The reasons why words are not known, by index of the word.

        The reason is for the first unknown part of the word.
        """
        return {index: why for index, word in enumerate(self.words) if (why := why_unknown(word))}

    @property
    def loose(self) -> frozenset[int]:
        """Indices of words that may expand to any number of words, because they are unknown expansions without quotes."""
        alone = ((index, word[0]) for index, word in enumerate(self.words) if len(word) == 1)
        return frozenset(
            index for index, piece in alone if isinstance(piece, Unknown) and piece.loose
        )

    def place_of(self, at: int, flag: str) -> tuple[str, str, int | None]:
        """Return the setting of the word at index `at`, which is `flag` unless nobody wrote one; its source, and the line."""
        setting, source, line = self.sources.get(at, (flag, "", self.lines[at]))
        return setting, source, line or None

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


def why_unknown(word: Pieces) -> str:
    """Return why a word is not known, for the first unknown part of the word; empty if it is known."""
    part = next(unknowns(word), None)
    return f"{brief(part.spelling)} (line {part.line}) is not known: {part.why}" if part else ""
