"""Every name of Megatron's schema is explained, in a line of the house's form, and nothing else is."""

from __future__ import annotations

from collections import Counter

from compat.megatron import options
from compat.megatron.schema import schema

DESCRIPTIONS = options.descriptions()
LONGEST = 110
"""Characters of a line."""
WORDS = range(4, 15)


def test_every_name_has_a_line() -> None:
    assert [name for name in options.groups() if name not in DESCRIPTIONS] == []


def test_no_line_for_a_name_that_does_not_exist() -> None:
    assert [name for name in DESCRIPTIONS if name not in options.groups()] == []


def test_no_two_names_share_a_line() -> None:
    assert [line for line, count in Counter(DESCRIPTIONS.values()).items() if count > 1] == []


def test_every_line_has_the_house_form() -> None:
    assert {name: line for name, line in DESCRIPTIONS.items() if not _well_formed(line)} == {}


def _well_formed(line: str) -> bool:
    sentence = line[0].isupper() and line.endswith(".") and line == " ".join(line.split())
    return sentence and len(line) <= LONGEST and len(line.split()) in WORDS


def test_the_schema_carries_the_lines() -> None:
    fields = schema().model_fields
    lines = {field.alias or name: field.description for name, field in fields.items()}
    assert lines == DESCRIPTIONS
