"""Files put in place: nothing that a person edited is written over unasked, and a dry run shows what would change."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from difflib import unified_diff
from hashlib import sha256
from pathlib import Path

from bridge import carry as carry_over
from bridge import limits
from bridge.clean import clean
from bridge.errors import BridgeError, SourceError
from bridge.secrets import HIDDEN, keep_hidden

Texts = Mapping[Path, str]


def refuse_edited(texts: Texts, output: Path) -> None:
    """Raises `SourceError` that names every file of `texts` that was edited, or that no conversion wrote."""
    SourceError.raise_if(
        f"{path}: was edited since it was written, or something else wrote it; --force writes over it, --dry-run shows how"
        for path in edited(texts, output)
    )


def edited(texts: Texts, output: Path) -> Iterator[Path]:
    """Files that would be other than they are, and that the sidecar of `output` does not know as they are."""
    sidecar, known = carry_over.beside(output), _known(output)
    for path, text in texts.items():
        now = _digest(path, followed=path == output)
        ours = known is not None if path == sidecar else known is not None and known.get(path.name) == now
        if now is not None and now != carry_over.digest_of(text) and not ours:
            yield path


def _known(output: Path) -> Mapping[str, str] | None:
    """Digests by name of what an earlier conversion wrote there; None if none did, or its sidecar is damaged."""
    try:
        carry = carry_over.find(output)
    except (BridgeError, OSError):
        return None
    return {output.name: carry.digest, **carry.files} if carry else None


def _digest(path: Path, followed: bool) -> str | None:
    """The digest of a file as it stands; None if there is none, nothing in it, or no file can be there, as writing will say."""
    try:
        content = b"" if path.is_symlink() and not followed else path.read_bytes()
    except PermissionError as error:
        raise SourceError(f"{path}: cannot be read ({(error.strerror or str(error)).lower()}); name another output") from None
    except OSError:
        return None
    return sha256(content).hexdigest() if content else None


def differences(texts: Texts, output: Path) -> Iterator[str]:
    """What each file would change, as lines of a unified diff; secrets hidden. What has to be forced is said."""
    forced = set(edited(texts, output))
    for path, text in texts.items():
        before = _lines(path)
        if before is None:
            yield f"{path}: new, {len(text.splitlines())} lines"
        elif before == text.splitlines():
            yield f"{path}: as it is"
        else:
            yield f"{path}: {'edited since, needs --force' if path in forced else 'changes'}"
            yield from _diff(before, text.splitlines(), str(path))


def _lines(path: Path) -> list[str] | None:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    keep_hidden(text[: limits.TEXT])
    return text[: limits.TEXT].splitlines()


def _diff(before: Iterable[str], after: Iterable[str], name: str) -> Iterator[str]:
    lines = unified_diff(list(before), list(after), f"{name} (now)", f"{name} (then)", lineterm="")
    return (clean(HIDDEN.hide(line)) for line in lines)
