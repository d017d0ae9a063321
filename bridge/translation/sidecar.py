"""Carry-over: settings that a translation could not express, stored in a sidecar next to the file,
so that a translation back restores them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from bridge import limits
from bridge.errors import ConfigError, SourceError
from bridge.files import Original, check_nested, read_text
from bridge.files.secrets import Secrets, marks_in
from bridge.files.shown import show_value
from bridge.plan.section import Count, Section, validate
from bridge.stack.dialect import Config, code_beside
from bridge.stack.stack_tables import StackTables
from bridge.translation.lift import claims, meaning_of

FORMAT = 1
AGAIN = "delete this file, or convert again"


@dataclass(frozen=True)
class Carry:
    """A carry-over: the source as the user wrote it (`given`), and the meaning of the target when
    the target was written (`meant`).

    `original` is the text that the source was read from, if the source's dialect can write changes
    into this text. When the target is translated back, a group of fields gets the old settings if
    these fields still have the same meaning in the target. A group whose meaning was edited in the
    target keeps the edit.

    A sidecar holds marks in place of `secrets`, and `source` names the file that has the secrets.
    If `secrets` is None, the sidecar holds all values without marks. `files` are the digests of the
    files that were written, by name.
    """

    dialect: str
    version: str
    world_size: int | None
    entry: str
    given: Mapping[str, Any]
    meant: Mapping[str, Any]
    digest: str = field(default="", compare=False)
    original: Original | None = field(default=None, compare=False)
    secrets: Secrets | None = field(default=None, compare=False, repr=False)
    source: str = field(default="", compare=False)
    files: Mapping[str, str] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, source: Config, target: Config, meaning: Mapping[str, Any]) -> Carry:
        """Return the carry-over of `source`, for a target that means the plan values `meaning`."""
        return cls(
            source.dialect.name,
            source.version,
            source.world_size,
            source.entry,
            dict(source.given),
            dict(meaning),
        )

    def text(self, content: str, files: Mapping[str, str] | None = None) -> str:
        """Return the text of the sidecar for a file with the content `content`. `files` are the
        texts of all files that are written, by name.
        """
        record = {
            "stagebridge": FORMAT,
            "digest": digest_of(content),
            "dialect": self.dialect,
            "version": self.version,
            "world_size": self.world_size,
            "entry": self.entry,
            "given": _encode_tuples(self._without(dict(self.given))),
            "meant": _encode_tuples(self._without(dict(self.meant))),
        }
        if self.original is not None:
            text = (
                self.original.text
                if self.secrets is None
                else self.secrets.hide(self.original.text)
            )
            record["original"] = asdict(
                replace(
                    self.original, text=text, outside=self._without(dict(self.original.outside))
                )
            )
        # The file with the secrets is named only if a mark was left for one: other sidecars stay
        # free of paths.
        if marks_in(record):
            record["source"] = self.source
        if files:
            record["files"] = {name: digest_of(text) for name, text in files.items()}
        return json.dumps(record, indent=1, default=str) + "\n"

    def belongs(self, path: Path, text: str) -> bool:
        """Return whether the sidecar was written with the file at `path`, whose content is `text`
        now. A file that was edited since still has the name that the sidecar knows.
        """
        names = {path.name, code_beside(path).name, path.with_suffix(".code.py").name}
        by_name = not self.files or not names.isdisjoint(self.files)
        return by_name or self.digest == digest_of(text)

    def _without(self, values: dict[str, Any]) -> Any:
        return values if self.secrets is None else self.secrets.within(values)


TUPLE = "tuple"


def _encode_tuples(value: Any) -> Any:
    """Return `value` with {"tuple": [...]} in place of each tuple. JSON has no tuples, and a
    translation back must restore each value exactly.
    """
    if isinstance(value, Mapping):
        return {key: _encode_tuples(inner) for key, inner in value.items()}
    if isinstance(value, tuple):
        return {TUPLE: [_encode_tuples(inner) for inner in value]}
    return [_encode_tuples(inner) for inner in value] if isinstance(value, list) else value


def _decode_tuples(value: Any) -> Any:
    if isinstance(value, dict) and value.keys() == {TUPLE}:
        return tuple(map(_decode_tuples, value[TUPLE]))
    if isinstance(value, dict):
        return {key: _decode_tuples(inner) for key, inner in value.items()}
    return [_decode_tuples(inner) for inner in value] if isinstance(value, list) else value


def digest_of(text: str) -> str:
    """SHA-256 of a file's content."""
    return hashlib.sha256(text.encode()).hexdigest()


def beside(path: Path) -> Path:
    """The path of the sidecar of the file at `path`."""
    return path.with_name(path.name + ".carry.json")


def find(path: Path) -> Carry | None:
    """Read the sidecar of the file at `path`, or return None if there is none. Raises `SourceError`
    if the sidecar is damaged.
    """
    place = beside(path)
    return parse(read_text(place), str(place)) if place.exists() else None


class _Text(Section):
    """A part of a sidecar's content: the text of the source."""

    text: str
    suffix: str = ""
    outside: dict[str, str] = Field({})
    chosen: Count | None = None


class _Record(Section):
    """The content of a sidecar."""

    stagebridge: Literal[1]
    digest: str
    dialect: str
    version: str
    world_size: Count | None
    entry: str
    given: dict[str, Any]
    meant: dict[str, Any]
    original: _Text | None = None
    source: str = ""
    files: dict[str, str] = Field({})


def parse(text: str, where: str) -> Carry:
    """Return the carry-over in the text of a sidecar. Raises `SourceError` if the text is no
    sidecar.
    """
    try:
        record = validate(_Record, _mapping(text, where))
        settings, meaning = _settings("given", record.given), _settings("meant", record.meant)
    # Sidecars are files that anybody may have edited. JSON of deep lists ends in RecursionError,
    # numbers of thousands of digits in ValueError: both are damage to the file and not mistakes of
    # this program.
    except (ValueError, TypeError, RecursionError) as error:
        raise SourceError(f"{where}: not a carry-over file ({error}); {AGAIN}") from None
    except ConfigError as error:
        raise SourceError(
            *(f"{where}: not a carry-over file ({problem}); {AGAIN}" for problem in error.problems)
        ) from None
    original = Original(**record.original.model_dump()) if record.original else None
    return Carry(
        record.dialect,
        record.version,
        record.world_size,
        record.entry,
        settings,
        meaning,
        record.digest,
        original,
        source=record.source,
        files=record.files,
    )


def _settings(part: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Decode the settings in `part` of a sidecar. Raises `ValueError` if the result is not a
    mapping.
    """
    settings = _decode_tuples(values)
    if not isinstance(settings, dict):
        raise ValueError(f"{part}: found {show_value(settings)}, expected a mapping of settings")
    return settings


def _mapping(text: str, where: str) -> dict[str, Any]:
    if len(text) > limits.SIDECAR:
        raise SourceError(
            f"{where}: found more than {limits.SIDECAR >> 20} MiB, expected a carry-over file; {AGAIN}"
        )
    data = json.loads(text)
    # Four times the limit of one config: a sidecar holds given and meant values, and each tuple
    # adds a mapping around its list.
    check_nested(data, where, 4 * limits.VALUES)
    if not isinstance(data, dict):
        raise ValueError(f"found {show_value(data)}, expected a mapping")
    return data


def reveal_secrets(carry: Carry, secrets: Secrets) -> Carry:
    """Return `carry` with each mark replaced by the secret that it stands for, as listed in
    `secrets`. A setting with an unknown mark is left out.
    """
    original = carry.original
    if original is not None:
        outside = {name: secrets.reveal(value) for name, value in original.outside.items()}
        original = replace(original, text=secrets.reveal(original.text), outside=outside)
    settings = {
        path: value
        for path, value in secrets.reveal(dict(carry.given)).items()
        if not marks_in(value)
    }
    return replace(
        carry,
        given=settings,
        meant=secrets.reveal(dict(carry.meant)),
        original=original,
        secrets=secrets,
    )


def marks(carry: Carry) -> tuple[str, ...]:
    """Return the marks in `carry` that stand for secrets."""
    parts = [
        dict(carry.given),
        *([carry.original.text, dict(carry.original.outside)] if carry.original else []),
    ]
    return tuple(marks_in(parts))


def edits(carry: Carry, meaning: Mapping[str, Any]) -> set[str]:
    """Plan paths whose values differ from those at the time when the sidecar was written."""
    return {path for path in {*carry.meant, *meaning} if carry.meant.get(path) != meaning.get(path)}


def numbers_alike(carry: Carry, config: Config) -> tuple[int, int]:
    """Return how many numbers of `config` are what they were when the sidecar was written, and how many
    are others. Switches, 0, 1 and the defaults of the stack tell no run from another.
    """
    table, meaning = claims(config.dialect), meaning_of(config)
    usual = config.dialect.defaults(config.version)
    verdicts = {}
    for rule, path in ((table[path], path) for path in config.given if path in table):
        defaults = rule.read(usual, config.context)
        for ours in rule.paths_of_plan(path):
            was, now = carry.meant.get(ours), meaning.get(ours)
            numbers = isinstance(was, int | float) and isinstance(now, int | float)
            if numbers and not {was, now} <= {0, 1, defaults.get(ours)}:
                verdicts[ours] = was == now
    same = sum(verdicts.values())
    return same, len(verdicts) - same


def overrulers(carry: Carry, dialect: StackTables, meaning: Mapping[str, Any]) -> set[str]:
    """Return the settings of the source whose old values, if restored, could overrule an edit. Such
    a setting stands for the edited plan field, although another rule claims the setting than the
    rule that writes the field.
    """
    fields = edits(carry, meaning)
    rules = (rule for rule in dialect.rules if not fields.isdisjoint(rule.ours))
    return {
        path
        for rule in rules
        for path in rule.sees
        if path in rule.carries and not fields.isdisjoint(rule.paths_of_plan(path))
    }
