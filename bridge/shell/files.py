"""The files that a script writes, removes and reads: their content, and whether they exist."""

from __future__ import annotations

import posixpath
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from bridge.shell.word_pieces import NOWHERE, Pieces, Unknown, same, text_if_known

GONE = "the script has removed the file"
"""Reason given for a file that does not exist any more."""
BEHIND = "a background command writes the file, perhaps after the script has read the file"
AWAY = "?"
"""Prefix of the key of a folder whose location is not known."""


@dataclass
class ShellFiles:
    """The files of a script. `held` is the known content of each file by key; files in `unsure` may
    not exist.

    `folders` are the folders that the script has made. `writer` names a program that may have
    written any file, and its line. After that program, only the content of files in `since` is
    known, which the script wrote later. `awaited` is the content that background programs leave in
    each file; None if the order of these programs decides the content.
    """

    held: dict[str, Pieces] = field(default_factory=dict)
    unsure: set[str] = field(default_factory=set)
    folders: set[str] = field(default_factory=set)
    writer: str = ""
    since: set[str] = field(default_factory=set)
    awaited: dict[str, Pieces | None] = field(default_factory=dict)

    def copy(self) -> ShellFiles:
        """Return a copy for a branch or a subshell."""
        return ShellFiles(
            dict(self.held),
            set(self.unsure),
            set(self.folders),
            self.writer,
            set(self.since),
            dict(self.awaited),
        )

    def put(self, key: str, content: Pieces) -> None:
        """Write a file."""
        # A program in the background may write it before or after this: neither content is certain.
        if key in self.awaited:
            self.awaited[key], content = None, self.held[key]
        self.held[key] = content
        self.unsure.discard(key)
        if self.writer:
            self.since.add(key)

    def remove(self, key: str) -> None:
        """Remove a file."""
        self.put(key, (Unknown("", NOWHERE, 0, GONE),))

    def doubt(self, key: str, content: Unknown) -> None:
        """Record that a program may have changed or removed a file."""
        self.put(key, (content,))
        self.unsure.add(key)

    def record_writer(self, program: str) -> None:
        """Record a program whose output files are not known."""
        self.writer, self.since = program, set()

    def behind(self, before: ShellFiles, line: int) -> None:
        """Record that files written since the state `before` were written in the background, at an unknown time."""
        contents = {
            key: content
            for key, content in self.held.items()
            if before.held.get(key) is not content
        }
        for key in contents.keys() - self.awaited.keys():
            self.doubt(key, Unknown("", NOWHERE, line, BEHIND))
            self.awaited[key] = contents[key]

    def settle_background(self) -> None:
        """Record that all background programs have ended."""
        contents, self.awaited = self.awaited, {}
        for key, content in contents.items():
            if content is not None:
                self.put(key, content)

    def stale(self, key: str) -> str:
        """Return the reason why a file may have changed since the script wrote or found it; empty if it cannot have changed."""
        return f"{self.writer} may write the file" if self.writer and key not in self.since else ""

    def there(self, key: str) -> bool | None:
        """Return whether a file exists; None if that is not known."""
        if key.removesuffix("/") + "/" in self.folders:
            return True
        if key not in self.held or key in self.unsure or self.stale(key):
            return None
        return not is_gone(self.held[key])

    def settles(self, before: ShellFiles) -> bool:
        """Return whether, since the state `before`, no file was added and no program that may write any file was run."""
        return self.held.keys() == before.held.keys() and (self.writer, self.since) == (
            before.writer,
            before.since,
        )

    def merge_states(
        self, other: ShellFiles, settling: Callable[[Pieces, Pieces, str], Pieces]
    ) -> ShellFiles:
        """Merge the file states at the end of two branches.

        `settling` merges two different contents of one file.
        """
        if self is other:
            return self
        contents = {}
        for key in dict.fromkeys((*self.held, *other.held)):
            first, second = self.held.get(key), other.held.get(key)
            alike = first is not None and second is not None and same(first, second)
            contents[key] = (
                first
                if alike and first is not None
                else settling(_content_or_nothing(first), _content_or_nothing(second), key)
            )
        # A file that only one branch has written, or has removed, may not be there.
        both = self.held.keys() & other.held.keys()
        uncertain = self.held.keys() ^ other.held.keys()
        uncertain |= {
            key for key in both if is_gone(self.held[key]) is not is_gone(other.held[key])
        }
        # If only one branch has started a program that may write any file, the files of the other
        # are as certain as before.
        since = (
            self.since & other.since
            if self.writer and other.writer
            else set(self.since or other.since)
        )
        return ShellFiles(
            contents,
            self.unsure | other.unsure | uncertain,
            self.folders & other.folders,
            self.writer or other.writer,
            since,
            dict.fromkeys((*self.awaited, *other.awaited)),
        )


def is_gone(content: Pieces) -> bool:
    """Return whether a file has been removed."""
    return len(content) == 1 and isinstance(content[0], Unknown) and content[0].why == GONE


def _content_or_nothing(content: Pieces | None) -> Pieces:
    return () if content is None or is_gone(content) else content


def file_key(path: Pieces) -> str:
    """Return a key for a file name.

    Two names of one file have equal keys, also if parts of the names are unknown.
    """
    return "".join(piece.key for piece in path).removeprefix("./")


def path_in_folder(folder: str, path: Pieces) -> Unknown | None:
    """Return the path that a word names, relative to `folder`, if the word begins with an expansion whose path is known."""
    first, rest = (path[0], text_if_known(path[1:])) if path else (None, None)
    if (
        not isinstance(first, Unknown)
        or not first.at
        or rest is None
        or (folder and not first.firm)
    ):
        return None
    if rest and not rest.startswith("/"):
        return None
    return replace(first, at=posixpath.normpath(first.at + rest), loose=False)


def key_in(folder: str, path: Pieces) -> str:
    """Return a key for a file name in the working directory `folder`.

    Two names of one file have equal keys.
    """
    key, path_piece = file_key(path), path_in_folder(folder, path)
    if path_piece:
        return path_piece.at
    if key.startswith(("/", "~")):
        return key
    # `..` can be resolved only from a folder whose place is known.
    if folder.startswith(AWAY) or text_if_known(path) is None:
        return folder + key
    plain = posixpath.normpath(folder + key) if key else ""
    return f"{plain}/" if key.endswith("/") and plain else plain
