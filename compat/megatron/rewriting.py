"""Writes changed values into a launch script or a file of flags; all other bytes stay."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from bridge.errors import BridgeError, TranslationError
from bridge.files import Document, Script, edit_entries, parse
from bridge.files.words import load_words, pieces
from bridge.shell import Pieces, edit
from compat.megatron import flags, options, releases
from compat.megatron.formats import Words, launch_of, reading_of, unwrap_lists, words_of, yaml_line
from compat.megatron.recognition import kind_of_sections

Range = tuple[int, int]


def rewritten(
    settings: Mapping[str, Any], text: str, like: Document, was: str, version: str
) -> str:
    """Return the `text` of a file, changed so that release `version` reads the values `settings`
    from it.

    `like` is the document that was read from the text, and `was` the release for which the text was
    written. The result is read again as a check. Raises `TranslationError` if the words cannot be
    changed in place.
    """
    if like.format == "yaml":
        return _entries(settings, text, like, was, version)
    words = words_of(like, was)
    result = _parse_words(words, was)
    put, additions = _changes(result, settings, words.words, version)
    if not put and not additions:
        return text
    # New flags go behind the last flag. If they cannot stand there, as inside a branch of the
    # script, an earlier place is tried.
    for anchor in sorted(
        {spot.index + spot.words - 1 for spot in result.flags.values()}, reverse=True
    ):
        words_there = (
            launch_of(like.data).words if isinstance(like.data, Script) else pieces(text, like.name)
        )
        new = _edit_or_none(text, words_there, put, additions, anchor)
        if new is not None and _values_of_text(new, like, version) == dict(settings):
            return new
    raise TranslationError(
        f"{like.name}: the words of this file cannot be changed in place; write flags or a new script"
    )


def _entries(settings: Mapping[str, Any], text: str, like: Document, was: str, version: str) -> str:
    """Return the text of a recipe or a YAML file with sections. Only lines with changed values are
    edited.
    """
    before, _ = reading_of(like, was, lenient=True)
    put: dict[int, str | None] = {}
    additions: dict[int, list[str]] = {}
    for path in before.given:
        line = before.origins[path].line if path in before.origins else None
        if line and settings.get(path) != before.given[path]:
            value = settings.get(path)
            if kind_of_sections(like.data):
                put[line] = plain(value)
            elif value is None:
                put[line] = None  # a flag that is removed takes its line with it
            else:
                put[line] = _entry(path, value, like, version).partition(": ")[2]
    lines = [origin.line for origin in before.origins.values() if origin.line]
    for path in settings:
        if path not in before.given and lines:
            additions.setdefault(max(lines), []).append(_entry(path, settings[path], like, version))
    new = edit_entries(text, put, additions)
    after, problems = reading_of(parse(new, like.name, ".yaml"), version, lenient=True)
    if problems or dict(after.given) != dict(settings):
        raise TranslationError(
            f"{like.name}: the lines of this file cannot be changed in place; write a new file"
        )
    return new


def _entry(path: str, value: Any, like: Document, version: str) -> str:
    """Return a new line for a YAML file that sets the argument `path` to `value`."""
    if kind_of_sections(like.data):
        return f"{path}: {plain(value)}"
    return yaml_line(*(options.option_for(version, path, value) or ()), version=version)


def plain(value: Any) -> str:
    """Return a value as text that every YAML loader reads as this value."""
    if value is None:
        return "null"
    # YAML 1.1 loaders take 1e-05 for text, and 1.0e-05 for a number.
    if isinstance(value, float) and "." not in repr(value).partition("e")[0]:
        return repr(value).replace("e", ".0e")
    return repr(value) if isinstance(value, bool | int | float) else json.dumps(value)


def _parse_words(words: Words, version: str) -> flags.Parsed:
    result = flags.parse(words.words, version, True, words.lines, words.opaque, (), words.loose)
    return replace(result, given={**result.given, **unwrap_lists(result.given)})


def _changes(
    result: flags.Parsed, settings: Mapping[str, Any], words: Sequence[str], version: str
) -> tuple[dict[Range, Sequence[str]], list[Sequence[str]]]:
    """Return the new words for each range of words that changes, and the words of each flag that is
    added.
    """
    put: dict[Range, Sequence[str]] = {}
    for dest, spot in result.flags.items():
        place = spot.index, spot.index + spot.words
        flag = releases.flags(version).get(spot.option)
        if dest not in settings:
            put[place] = ()
        # The same value is written anew if the release spells the flag in another way.
        elif settings[dest] != result.given[dest] or flag is None or flag.dest != dest:
            put[place] = _line(dest, settings[dest], words[slice(*place)], version)
    additions = [
        _line(dest, value, (), version)
        for dest, value in settings.items()
        if dest not in result.flags
    ]
    return put, additions


def _line(dest: str, value: Any, before: Sequence[str], version: str) -> Sequence[str]:
    """Return the words that set `dest` to `value`. If the flag's old words `before` attach the
    value with `=`, the new words do so too.
    """
    line = options.option_for(version, dest, value) or ()
    tied = len(before) == 1 and "=" in before[0] and len(line) == 2
    return (f"{line[0]}={line[1]}",) if tied else line


def _edit_or_none(
    text: str,
    words: Sequence[Pieces],
    put: Mapping[Range, Sequence[str]],
    additions: Sequence[Sequence[str]],
    anchor: int,
) -> str | None:
    try:
        return edit(text, words, put, additions, anchor)
    except TranslationError:
        return None


def _values_of_text(text: str, like: Document, version: str) -> dict[str, Any] | None:
    """Return the values that the edited text sets. None if the text cannot be read, or has an empty
    word.
    """
    try:
        data = (
            replace(like.data, text=text)
            if isinstance(like.data, Script)
            else load_words(text).data
        )
        result = _parse_words(words_of(replace(like, data=data), version), version)
        # An empty word among the unknown ones is what a removed flag left behind.
        return dict(result.given) if all(result.unknown) and not result.problems else None
    except BridgeError:
        return None
