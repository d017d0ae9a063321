"""Checks before files are written: a file that a person edited is replaced only with --force, a file
of another kind never, and a dry run shows the changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from bridge import limits
from bridge.errors import BridgeError, SourceError
from bridge.files import write_all
from bridge.files.printable import clean
from bridge.files.secrets import HIDDEN, keep_hidden
from bridge.translation import sidecar as carry_over

Texts = Mapping[Path, str]


def refuse_edited(texts: Texts, output: Path, look: str) -> None:
    """Raise `SourceError` if files of `texts` were edited since a conversion wrote them, or were not written by a conversion.

    `look` says how the user sees the changes first.
    """
    SourceError.raise_if(
        f"{path}: was edited since it was written, or another program wrote it; --force overwrites "
        f"it, {look}"
        for path in files_changed_by_hand(texts, output)
    )


def refuse_other(path: Path, kind: str, ours: Callable[[bytes], bool]) -> None:
    """Raise `SourceError` if there is a file at `path` whose content is not of the kind that the
    command writes. An empty file may be replaced.
    """
    content = _content(path)
    if content and not ours(content):
        raise SourceError(
            f"{path}: found a file that is not {kind}, and would be replaced; remove the file, or choose another name"
        )


def leave_no_sidecar(output: Path, force: bool) -> Path | None:
    """Return the sidecar next to `output` that belongs to an earlier conversion, and is to be
    removed; None if there is none. Raises `SourceError` if it may not be replaced.
    """
    sidecar = carry_over.beside(output)
    if not sidecar.exists():
        return None
    if not force:
        raise SourceError(
            f"{sidecar}: belongs to an earlier conversion, and would restore that one's settings; --force"
            " removes it, or drop --no-carry"
        )
    return sidecar


def files_changed_by_hand(texts: Texts, output: Path) -> Iterator[Path]:
    """Yield the files of `texts` that would change although no earlier conversion wrote their present
    content. The sidecar of `output` has the digests of the files that a conversion wrote.
    """
    sidecar, digests = carry_over.beside(output), _earlier_digests(output)
    for path, text in texts.items():
        now = _digest(path, followed=path == output)
        # A sidecar cannot hold its own digest: it is ours if it can be read as a sidecar.
        ours = (
            digests is not None
            if path == sidecar
            else digests is not None and digests.get(path.name) == now
        )
        if now is not None and now != carry_over.digest_of(text) and not ours:
            yield path


def _earlier_digests(output: Path) -> Mapping[str, str] | None:
    """Return the digest of each file that the earlier conversion wrote, by file name; None if there
    is no sidecar, or if the file is damaged.
    """
    try:
        carry = carry_over.find(output)
    except (BridgeError, OSError):
        return None
    return {output.name: carry.digest, **carry.files} if carry else None


def _digest(path: Path, followed: bool) -> str | None:
    """Return the digest of a file; None if the file is empty or missing."""
    content = _content(path, followed)
    return sha256(content).hexdigest() if content else None


def _content(path: Path, follow: bool = True) -> bytes:
    """Return the content of a file; empty if the file is missing, or is a link and `follow` is false.

    Raises `SourceError` if the file may not be read.
    """
    try:
        # Writing replaces a link beside the output, and writes through one that is the output.
        return path.read_bytes() if follow or not path.is_symlink() else b""
    except PermissionError as error:
        raise SourceError(
            f"{path}: cannot be read ({(error.strerror or str(error)).lower()}); name another output"
        ) from None
    except OSError:
        return b""


def differences(texts: Texts, output: Path) -> Iterator[str]:
    """Lines of a unified diff for each file, with secrets hidden; files that need --force are marked."""
    edits = set(files_changed_by_hand(texts, output))
    for path, text in texts.items():
        before = _lines(path)
        if before is None:
            yield f"{path}: new, {len(text.splitlines())} lines"
        elif before == text.splitlines():
            yield f"{path}: as it is"
        else:
            yield f"{path}: {'was edited, needs --force' if path in edits else 'changes'}"
            from difflib import unified_diff

            lines = unified_diff(
                before, text.splitlines(), f"{path} (now)", f"{path} (then)", lineterm=""
            )
            yield from (clean(HIDDEN.hide(line)) for line in lines)


def _lines(path: Path) -> list[str] | None:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The file that is there may have secrets that the source has not.
    keep_hidden(text[: limits.TEXT])
    return text[: limits.TEXT].splitlines()


def not_over_input(file: str, texts: Iterable[Path]) -> None:
    """Refuse to write over the file that is read; `-` is standard input."""
    for path in texts:
        with suppress(OSError):
            # The same file may have several names: links, or capitals on some systems.
            if file != "-" and path.samefile(file):
                raise SourceError(f"{path}: is the file that is read; name another output")


def place_files(texts: Mapping[Path, str], output: Path, force: bool, look: str) -> None:
    """Write all files or none. A file that a person edited is replaced only with `force`; without it `SourceError` is raised."""
    if not force:
        refuse_edited(texts, output, look)
    write_all(texts, texts.keys() - {output})
