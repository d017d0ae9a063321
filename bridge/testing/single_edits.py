"""Makes one edit in a real source, and says whether the plan, the values or the findings show the edit."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from random import Random
from typing import Any

from bridge.errors import BridgeError
from bridge.stack.dialect import Config
from bridge.stack.findings import Finding
from bridge.translation.lift import lift

Source = Mapping[str, Any] | Sequence[str]
Path = tuple[str, ...]
KINDS = (
    "renamed",
    "misspelled",
    "other case",
    "one level up",
    "other type",
    "below zero",
    "doubled",
)
REFUSED, OTHERWISE = "refused, key named", "refused in other words"
NAMED, MISSED = "named", "named as missing"
EQUAL, LEGAL, SILENT = "equal in meaning", "legal other value", "silent"


@dataclass(frozen=True)
class Edited:
    """A source with one edit: its kind, old key, new key, new value and path, and the edited
    source.
    """

    kind: str
    was: str
    key: str
    value: Any
    source: Source
    place: Path = ()


def edit_source(source: Source, chance: Random, kind: str) -> Edited | None:
    """Return `source` with one edit of a kind, at a key that `chance` draws; None if this edit is not possible at the key."""
    if isinstance(source, Mapping):
        places = list(_places(source))
        return _mapping(source, chance.choice(places), kind, chance) if places else None
    flags = [index for index, word in enumerate(source) if word.startswith("--")]
    return _flags(list(source), chance.choice(flags), kind, chance) if flags else None


def _places(data: Mapping[str, Any], above: Path = ()) -> Iterator[Path]:
    for name, value in data.items():
        if isinstance(value, Mapping) and value:
            yield from _places(value, (*above, str(name)))
        else:
            yield (*above, str(name))


def _mapping(source: Mapping[str, Any], place: Path, kind: str, chance: Random) -> Edited | None:
    copy: dict[str, Any] = deepcopy(dict(source))
    section = copy
    for name in place[:-1]:
        section = section[name]
    value = section[place[-1]]
    if kind in VALUES:
        wrong = VALUES[kind](value)
        if wrong is None:
            return None
        section[place[-1]] = wrong
        return Edited(kind, place[-1], place[-1], wrong, copy, place)
    above = copy
    for name in place[:-2]:
        above = above[name]
    if kind == "one level up":
        there, new = above, place[-1]
    else:
        there, new = section, NAMES[kind](place[-1], chance)
    if (kind == "one level up" and len(place) < 2) or new in there:
        return None
    del section[place[-1]]
    there[new] = value
    return Edited(kind, place[-1], new, value, copy, place)


def _flags(words: list[str], index: int, kind: str, chance: Random) -> Edited | None:
    name, value = (
        words[index].removeprefix("--"),
        words[index + 1] if index + 1 < len(words) else "--",
    )
    if kind in VALUES:
        wrong = None if value.startswith("--") else VALUES[kind](_number(value))
        if wrong is None:
            return None
        words[index + 1] = str(wrong)
        return Edited(kind, name, name, wrong, words)
    new = NAMES[kind](name, chance) if kind in NAMES else name
    if f"--{new}" in words:
        return None
    words[index] = f"--{new}"
    return Edited(kind, name, new, value, words)


def _number(text: str) -> Any:
    try:
        return float(text) if "." in text or "e" in text else int(text)
    except ValueError:
        return text


def _swap_letters(name: str, chance: Random) -> str:
    places = [
        place
        for place in range(len(name) - 1)
        if name[place] != name[place + 1] and name[place : place + 2].isalpha()
    ]
    place = chance.choice(places) if places else None
    return (
        name + "e"
        if place is None
        else name[:place] + name[place + 1] + name[place] + name[place + 2 :]
    )


NAMES: Mapping[str, Callable[[str, Random], str]] = {
    "renamed": lambda name, chance: f"{name}_size" if name[-1] != "e" else name[:-1],
    "misspelled": _swap_letters,
    "other case": lambda name, chance: name.upper() if name != name.upper() else name.lower(),
}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _other_type(value: Any) -> Any:
    if isinstance(value, int | float):
        return "many"
    return 7 if isinstance(value, str) else None


VALUES: Mapping[str, Callable[[Any], Any]] = {
    "other type": _other_type,
    "below zero": lambda value: -5 * (abs(value) or 1) if _is_number(value) else None,
    "doubled": lambda value: 2 * value if _is_number(value) and value else None,
}


@dataclass(frozen=True)
class Base:
    """A real source, and a function that reads edited versions of it.

    Values, plan and findings of the source are computed once.
    """

    source: Source
    config: Config
    read: Callable[[Source], Config]

    @cached_property
    def plan(self) -> Mapping[str, Any]:
        """The plan of the source. Raises `BridgeError` if no plan can express it."""
        return lift(self.config).values()

    @cached_property
    def findings(self) -> tuple[Finding, ...]:
        """The findings of the unchanged source."""
        return self.config.findings


def outcome(base: Base, edit: Edited) -> str:
    """Return the result of an edit, as one of the constants above.

    Reading fails: `REFUSED` if the error names the key, else `OTHERWISE`. Reading succeeds: `NAMED` if a
    new finding names the key, `EQUAL` if all values stay the same, `LEGAL` if the config has the new
    value, `MISSED` if a new finding names the old key, and `SILENT` if nothing shows the edit.
    """
    try:
        after = base.read(edit.source)
        plan = lift(after).values()
    except BridgeError as error:
        return (
            REFUSED if any(_names(key, str(error)) for key in (edit.key, edit.was)) else OTHERWISE
        )
    findings = [finding for finding in after.findings if finding not in base.findings]
    texts = [f"{finding.path} {finding.message} {finding.origin}" for finding in findings]
    if any(_names(edit.key, text) for text in texts):
        return NAMED
    # Given values are compared too: some have no plan field.
    same = after.given == base.config.given and after.opaque == base.config.opaque
    if plan == base.plan and after.effective == base.config.effective and same:
        return EQUAL
    if edit.kind in VALUES:
        differs = plan != base.plan or after.effective != base.config.effective
        return LEGAL if differs and _has_new_value(after, edit) else SILENT
    return MISSED if any(_names(edit.was, text) for text in texts) else SILENT


def _names(key: str, text: str) -> bool:
    """Return whether `text` names a key as a whole word, with dashes or underscores."""
    word = re.escape(key.replace("-", "_"))
    return (
        re.search(
            rf"(?<![A-Za-z0-9_]){word}(?![A-Za-z0-9_])", text.replace("--", "").replace("-", "_")
        )
        is not None
    )


def _has_new_value(after: Config, edit: Edited) -> bool:
    """Return whether the key has the new value among the given values, alone or in a list.

    A flag may set a field of another name; the field's origin names the flag.
    """
    key = edit.key.replace("-", "_")
    paths = {
        path
        for path, origin in after.origins.items()
        if origin.spelling.lstrip("-").replace("-", "_") == key
    }
    settings = {**after.given.flat(), **after.opaque}
    values = [
        value
        for name, value in _leaves(settings)
        if name == key or name.endswith(f".{key}") or name in paths
    ]
    items = [item for value in values if isinstance(value, list | tuple) for item in value]
    return any(edit.value in (value, _number(str(value))) for value in (*values, *items))


def _leaves(data: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in data.items():
        yield f"{above}{name}", value
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{above}{name}.")
