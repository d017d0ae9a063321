"""Python dictionaries as text: read as data with lines, never executed, and told apart from JSON and HJSON."""

from __future__ import annotations

from pathlib import Path

import pytest

from bridge.errors import SourceError
from bridge.files import parse


@pytest.mark.parametrize(
    ("text", "data", "format"),
    [
        (
            "{'a': True, 'b': None, 'c': (1, -2.5)}",
            {"a": True, "b": None, "c": [1, -2.5]},
            "python",
        ),
        ("config = {'a': {'b': 1e-6},\n 'c': [],}", {"a": {"b": 1e-6}, "c": []}, "python"),
        ("config: dict[str, int] = {'a': 1}", {"a": 1}, "python"),
        ("# a comment\n{'a': 1}", {"a": 1}, "python"),
        ('{"a": true}', {"a": True}, "json"),
        ("{a: true, b: 1}", {"a": True, "b": 1}, "hjson"),
        ("['--bf16', '--lr', '1']", ["--bf16", "--lr", "1"], "python"),
    ],
)
def test_data_and_format(text: str, data: object, format: str) -> None:
    document = parse(text)
    assert (document.data, document.format) == (data, format)


def test_lines_are_those_of_the_keys() -> None:
    document = parse("config = {\n  'a': 1,\n  'b': {\n    'c': True}}")
    assert [document.line("a"), document.line("b"), document.line("b", "c")] == [2, 3, 4]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "config = {'a': open('/tmp/x', 'w')}",
            "line 1: found open('/tmp/x', 'w'), expected a literal",
        ),
        ("{'a': 1,\n 'b': torch.float16}", "line 2: found torch.float16, expected a literal"),
        ("{'a': 1, **{'b': 2}, 'c': None}", "found the key **"),
        ("{1: True, 'a': False}", "found the key 1"),
        ("config = {'a': 1}\nimport os", "line 2: found code beside a dictionary"),
        ("{'a': 1,\n 'b': [True}", "not a Python dictionary"),
        ("{'a': True, 'a': False}", "a is given twice"),
        ("config = {'a': 1e999}", "a number out of range"),
        ("config = " + "[" * 3000, "not a Python dictionary"),
        ("config = " + "[" * 150 + "1" + "]" * 150, "nesting deeper"),
        ("config = {'a': '" + "x" * 2**20 + "'}", "more than 512 KiB"),
    ],
)
def test_what_would_have_to_run_is_refused(text: str, said: str) -> None:
    with pytest.raises(SourceError, match=r"^text: ") as caught:
        parse(text)
    assert said in str(caught.value)


def test_nothing_is_executed(tmp_path: Path) -> None:
    target = tmp_path / "touched"
    with pytest.raises(SourceError):
        parse(f"config = {{'a': __import__('pathlib').Path({str(target)!r}).touch()}}")
    assert not target.exists()
