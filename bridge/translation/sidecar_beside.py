"""Reads the sidecar of the file that is converted, puts secrets back into the carry-over, and reports
faults as findings.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bridge import limits
from bridge.errors import BridgeError, VersionError
from bridge.files import Original, OutsideError, find, read_text
from bridge.files.secrets import Secrets, keep_hidden
from bridge.stack.dialect import Config, Dialect
from bridge.stack.findings import Finding
from bridge.stack.rules import Effect
from bridge.stack.stack_tables import StackTables
from bridge.translation import sidecar as carry_over
from bridge.translation.lift import claims, meaning_of
from bridge.translation.sidecar import Carry


@dataclass(frozen=True)
class Sidecar:
    """The carry-over in the sidecar of a file, findings on the sidecar, and the files that were read for it.

    `edited`: the file has changed since the sidecar was written. `foreign`: the reason why the
    sidecar is not this file's.
    """

    carry: Carry | None = None
    findings: tuple[Finding, ...] = ()
    sources: tuple[Path, ...] = ()
    edited: bool = False
    foreign: str = ""

    def fitting(self, dialect: Dialect) -> Carry | None:
        """Return the carry-over if it belongs to the stack of `dialect` and to a known release; else None."""
        return self.carry if self.carry and not self.unfit(dialect) else None

    def unfit(self, dialect: StackTables) -> str:
        """Return the reason why the sidecar cannot be used for a file of the stack of `dialect`; empty
        if the sidecar can be used, or if there is none.
        """
        if self.carry is None:
            return ""
        if self.foreign:
            return self.foreign
        if self.carry.dialect != dialect.name:
            return (
                f"the sidecar is from {self.carry.dialect[: limits.NAME]}, not from {dialect.name}"
            )
        try:
            dialect.release(self.carry.version)
        except VersionError as error:
            return f"the sidecar cannot be read ({error})"
        return ""

    def judged(self, file: Path, config: Config) -> Sidecar:
        """Return the sidecar of `file`, which holds `config`, as foreign if the file was rewritten rather
        than edited since: the sidecar then belongs to another run, whose files have the same names.
        """
        if self.carry is None or not self.edited:
            return self
        same, changed = carry_over.numbers_alike(self.carry, config)
        # No mark in a file says which run it is: JSON has no comments. Who edits a file changes a few
        # numbers, while two runs differ in most.
        if changed <= max(1, same // 2):
            return self
        why = (
            f"{file.name} is not what the conversion wrote that the sidecar belongs to:"
            f" {changed} of {same + changed} settings have other numbers; remove the sidecar, or, if these"
            " are edits of yours, make them in the file that was converted, and convert it again"
        )
        return Sidecar(self.carry, edited=True, foreign=why)

    def remarks(self, dialect: Dialect, file: Path, config: Config) -> tuple[Finding, ...]:
        """Return the findings on the sidecar of `file`, which holds `config`.

        If the sidecar does not fit the stack, the only finding is that it was not used.
        """
        why = self.unfit(dialect)
        if not why or self.carry is None:
            return self.findings
        # What a file of another stack or of another conversion left out was never a part of this run.
        # A file whose settings mean what those of the sidecar's file meant is that file with another name,
        # and one that has the name may have been edited in most of its settings.
        table = claims(config.dialect)
        paths = {
            ours
            for path in config.given
            if path in table
            for ours in table[path].paths_of_plan(path)
        }
        own = (
            not self.foreign
            or self.edited
            or paths.isdisjoint(carry_over.edits(self.carry, meaning_of(config)))
        )
        applies = own and self.carry.dialect == dialect.name
        effect = Effect.NUMBERS if applies else Effect.NONE
        return (
            Finding(
                carry_over.beside(file).name,
                f"the carry-over was not used: {why}",
                effect,
                given=True,
            ),
        )

    def note(self, file: str, dialect: Dialect, way: str = "") -> str:
        """Return the note that a sidecar is read too, and that the option `way` turns this off; empty if none is read."""
        if not self.fitting(dialect):
            return ""
        place = carry_over.beside(Path(file))
        edits = (
            f"; {file} was edited since, or written by another conversion; the settings in {file} win"
            if self.edited
            else ""
        )
        # Two runs of another size can have the same DeepSpeed file: only the names then tell them apart.
        if self.carry is not None and not edits and Path(file).name not in self.carry.files:
            names = " and ".join(self.carry.files)
            edits = f"; it was written next to {names}, with the same content as {file}"
        return f"note: {place} is read too{edits}{way and f'; {way} leaves the sidecar out'}"


def beside(file: Path, text: str | None = None) -> Sidecar:
    """Return the sidecar of `file`. `text` is the content of `file` if it was read already.

    Raises `SourceError` if the sidecar is damaged.
    """
    carry = carry_over.find(file)
    if carry is None:
        return Sidecar()
    place = carry_over.beside(file)
    content = read_text(file) if text is None else text
    if not carry.belongs(file, content):
        why = (
            f"neither the digest nor the names in the sidecar are those of {file.name}, so it belongs"
            f" to another conversion, which wrote {' and '.join(carry.files)}"
        )
        return Sidecar(carry, foreign=why)
    stale = carry.digest != carry_over.digest_of(content)
    message = (
        f"the digest in the sidecar does not match {file.name}, which was edited since, or written "
        f"by another conversion; the settings in {file.name} are used"
    )
    odd = (Finding(place.name, message, Effect.NONE),) if stale else ()
    if not carry_over.marks(carry):
        return Sidecar(carry, odd, (place,), stale)
    source, secrets, why = _secrets(carry, place.parent)
    complete = carry_over.reveal_secrets(carry, secrets)
    missing = (name for name in carry_over.marks(carry) if name not in secrets.marks.values())
    advice = (
        f"the sidecar stores a name in place of this secret, and {why}; replace the name by the "
        "secret"
    )
    absences = tuple(Finding(name, advice, Effect.STOPS, given=True) for name in missing)
    return Sidecar(complete, (*odd, *absences), (place, *source), stale)


def _secrets(carry: Carry, folder: Path) -> tuple[tuple[Path, ...], Secrets, str]:
    """Return the file with the secrets, these secrets, and the reason why a secret may be missing.

    If the file cannot be read, no file and no secrets are returned.
    """
    file = carry.source or "the file with the secret"
    try:
        # The sidecar may come from somebody else: it opens no file outside the folder that was allowed.
        path = find(carry.source, folder) if carry.source else None
        if path is None:
            return (), Secrets(), f"{file} is missing"
        like = carry.original
        original = Original(
            read_text(path),
            path.suffix.lower(),
            like.outside if like else {},
            like.chosen if like else None,
        )
        # The secrets that come back from there must not reach the report either.
        keep_hidden(original.text)
        return (path,), original.secrets, f"{file} no longer has the secret"
    except OutsideError as error:
        return (), Secrets(), f"{file} was not opened ({error})"
    except BridgeError:
        return (), Secrets(), f"{file} cannot be read any more"
