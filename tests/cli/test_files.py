"""Reading files as data, within limits, and writing them whole or not at all."""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from bridge import limits
from bridge.errors import SourceError
from bridge.files import (
    Document,
    Key,
    load,
    load_hjson,
    load_json,
    load_words,
    load_yaml,
    parse,
    read_text,
    write_all,
    write_text,
)
from bridge.files.document import Builder, Node

names = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-limits.INTEGER, limits.INTEGER)
    | st.floats(allow_nan=False, allow_infinity=False)
    | names
)
data = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=4),
    max_leaves=20,
)


def problem(text: str, suffix: str = "") -> str:
    """The one line that says why `text` is refused."""
    with pytest.raises(SourceError) as caught:
        parse(text, "in", suffix)
    assert len(caught.value.problems) == 1
    assert "\n" not in str(caught.value)
    return str(caught.value)


class TestJson:
    @given(data)
    def test_reads_what_was_written(self, value: Any) -> None:
        assert load_json(json.dumps(value)).data == value

    @given(st.dictionaries(names, data, min_size=1, max_size=4))
    def test_every_value_has_its_line(self, value: dict[str, Any]) -> None:
        text = json.dumps(value, indent=1, ensure_ascii=True)
        document = load_json(text)
        written = text.split("\n")
        for key, line in document.lines.items():
            if key and isinstance(key[-1], str):
                assert written[line - 1].strip().startswith(json.dumps(key[-1]))

    @given(data)
    def test_hjson_agrees(self, value: Any) -> None:
        strict, lax = load_json(json.dumps({"x": value})), load_hjson(json.dumps({"x": value}))
        assert lax.data == strict.data
        assert lax.lines == strict.lines

    def test_comments_trailing_commas_and_bare_words_are_hjson(self) -> None:
        document = parse(
            "{\n // why\n a: 1,\n 'b': [1, 2,],\n c: bare words # kept by HJSON\n}", suffix=".json"
        )
        assert document.format == "hjson"
        assert document.data == {"a": 1, "b": [1, 2], "c": "bare words # kept by HJSON"}
        assert document.line("b", 1) == 4

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ('{"a": 1,\n "b": {"x": 1,\n "x": 2}}', "lines 2 and 3: b.x is given twice"),
            ('{"a": "NaN",\n "b": NaN}', "line 2: found NaN"),
            ('{"a": [-Infinity]}', "line 1: found -Infinity"),
            ('{"a": {\n"b": 1e400}}', "line 2: a.b: found NaN, infinity or a number out of range"),
            ("{a:\n 1e400\n}", "line 2: a: found NaN, infinity or a number out of range"),
            (
                '{"a": ' + "9" * 5000 + "}",
                "line 1: a: found NaN, infinity or a number out of range",
            ),
            ('{"a": 1, "b": ', "ends within a value"),
            ('{"a": [1, 2', "ends within a value"),
            ('{"a": 1\n"b": 2', "line 2: found '\"b\": 2'; expecting ',' delimiter"),
            ('{"a": 1 "b": 2}', "line 1: found '\"b\": 2}'; expecting ',' delimiter"),
            ('{"a": "\\ud800"}', "line 1: a: found half a surrogate pair"),
            ('{"\\ud800": 1}', "found half a surrogate pair"),
            ("[" * 102 + "]" * 102, "nesting deeper than 100"),
            ('{"a":' * 100_000, "nesting deeper than 100"),
            ("[" + "1," * 100_000 + "1]", "more than 20,000 values"),
            ('"alone"', "found only 'alone'; expected a mapping"),
        ],
    )
    def test_refuses(self, text: str, says: str) -> None:
        assert says in problem(text, ".json")

    def test_a_hundred_levels_are_read(self) -> None:
        assert parse("[" * 100 + "]" * 100).data


class TestYaml:
    @pytest.mark.parametrize(
        ("text", "value"),
        [
            ("1", 1), ("-7", -7), ("+3", 3), ("1_000", 1000), ("0x1F", 31), ("-0b11", -3), ("010", 8), ("08", "08"),
            ("1:30", 90), ("1:30.5", 90.5), ("1.5", 1.5), (".5", 0.5), ("1.e+3", 1000.0), ("1.0e-5", 1e-5),
            ("yes", True), ("Off", False), ("TRUE", True), ("yEs", "yEs"), ("~", None), ("", None), ("null", None),
            ("2020-01-01", "2020-01-01"), ("${LR}", "${LR}"), ("'1e-6'", "1e-6"), ('"yes"', "yes"), ("! 1", "1"),
            ("!!str 1", "1"), ("!!float 1", 1.0), ("!!int '7'", 7), ("!!float 1e-6", 1e-6), ("NaN", "NaN"),
        ],
    )  # fmt: skip
    def test_scalars(self, text: str, value: Any) -> None:
        found = load_yaml(f"x: {text}\n")
        assert found.data == {"x": value}
        assert type(found.data["x"]) is type(value)
        assert not found.strings

    @pytest.mark.parametrize(
        ("text", "value"),
        [("1e-6", 1e-6), ("1e5", 1e5), ("1.5e6", 1.5e6), ("-.5", -0.5), ("5E+1", 50.0)],
    )
    def test_numbers_that_yaml_1_1_leaves_as_strings(self, text: str, value: float) -> None:
        found = load_yaml(f"x:\n  - {text}\n")
        assert found.data == {"x": [value]}
        assert found.strings == {("x", 0): text}

    @given(data)
    def test_scalars_agree_with_pyyaml(self, value: Any) -> None:
        yaml = pytest.importorskip("yaml")
        text = yaml.safe_dump({"x": value}, allow_unicode=False)
        found = load_yaml(text)
        assert _spelled(found.data, found.strings) == {"x": _as_names(value)}

    @given(st.text("0123456789+-._eExXoObBaAfFnNtTrRuUyYsS:~", max_size=7))
    def test_plain_scalars_agree_with_pyyaml(self, text: str) -> None:
        yaml = pytest.importorskip("yaml")
        try:
            theirs = yaml.safe_load(f"[{text}]")
        except (yaml.YAMLError, ValueError, AttributeError):
            return
        if not isinstance(theirs, list) or any(
            isinstance(item, dict) or item != item for item in theirs
        ):
            return
        if any(isinstance(item, float) and math.isinf(item) for item in theirs):
            return
        found = load_yaml(f"[{text}]")
        assert [found.strings.get((n,), item) for n, item in enumerate(found.data)] == theirs

    def test_anchors_and_merges(self) -> None:
        text = "base: &b {lr: 1, wd: 2}\nmore: &m {wd: 3, eps: 4}\nrun: {<<: [*b, *m], lr: 5}\ncopy: *b\n"
        found = load_yaml(text)
        assert found.data["run"] == {"lr": 5, "wd": 2, "eps": 4}
        assert found.data["copy"] == found.data["base"]
        assert (found.line("run", "lr"), found.line("run", "eps"), found.line("copy")) == (3, 2, 4)

    def test_duplicate_keys_keep_the_last_and_are_noted(self) -> None:
        found = load_yaml("a: 1\nb: 2\na: {x: 3}\na: 4\n")
        assert found.data == {"a": 4, "b": 2}
        assert [(twin.key, twin.lines, twin.replaced) for twin in found.duplicates] == [
            (("a",), (1, 3), 1),
            (("a",), (3, 4), None),
        ]

    @pytest.mark.parametrize(
        ("text", "differs"),
        [
            ("a: 1\na: 1\n", False),
            ("a: 1\na: 1.0\n", True),
            ("a: 1\na: true\n", True),
            ("a: {x: [1, 2], y: 3}\na: {y: 3, x: [1, 2]}\n", False),
            ("a: {x: 1}\na: {x: 1, y: 2}\n", True),
            ("a: [1, 2]\na: [2, 1]\n", True),
            ("a: {x: 1}\na:\n", True),
            ("a: &a {x: 1}\na: *a\n", False),
        ],
    )
    def test_duplicates_tell_whether_the_two_differ(self, text: str, differs: bool) -> None:
        assert [twin.differs for twin in load_yaml(text).duplicates] == [differs]

    def test_aliases_within_aliases_do_not_make_the_comparison_long(self) -> None:
        left, right, builder = Node(1, 1), Node(1, 1), Builder("text")
        for _ in range(50):
            left, right = Node([left, left], 1, "list"), Node([right, right], 1, "list")
        assert not builder.same(left, right)
        assert builder.compared == limits.VALUES + 1

    def test_names_stay_names(self) -> None:
        assert load_yaml("on: 1\n2: x\n~: y\n").data == {"on": 1, "2": "x", "~": "y"}

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            (
                "a: 1\nb: !!python/object/apply:os.system ['touch pwned']\n",
                "line 2: found the tag !!python/object/apply",
            ),
            ("!!python/object:builtins.dict {}\n", "found the tag !!python/object"),
            ("a: !mine 1\n", "found the tag !mine"),
            ("a: !!binary aGk=\n", "found the tag !!binary"),
            ("a: !!set {x}\n", "found the tag !!set"),
            ("a: !!bool maybe\n", "found 'maybe', expected !!bool"),
            ("a: .inf\n", "line 1: a: found NaN, infinity"),
            ("a:\n  b: .nan\n", "line 2: a.b: found NaN, infinity"),
            ("a: 1.0e+400\n", "a: found NaN, infinity"),
            ("a: 1e400\n", "a: found NaN, infinity"),
            ("a: &a [*a]\n", "alias *a inside its own anchor"),
            ("a: *nobody\n", "alias *nobody without an anchor"),
            ("a: 1\n---\nb: 2\n", "line 3: found a second YAML document"),
            ("a:\n\tb: 1\n", "line 2: not valid YAML"),
            ('a: "open\nb: 1\n', "starts at line 1"),
            ("a: b: c\n", "line 1: not valid YAML"),
            ("a: 1\nb: \x07\n", "line 2: found a control character"),
            ("? [a]\n: 1\n", "found a list as a key"),
            ("a: {<<: 1}\n", "<< takes a mapping"),
            ("a: " + "[" * 101 + "]" * 101 + "\n", "nesting deeper than 100"),
            ("a: " + "[" * 50_000, "nesting deeper than 100"),
            ("# nothing\n", "holds only comments"),
            ("just words\n", "found only 'just words'"),
        ],
    )
    def test_refuses(self, text: str, says: str) -> None:
        assert says in problem(text, ".yaml")

    @pytest.mark.parametrize("kind", ["list", "mapping", "merge"])
    def test_an_alias_bomb_is_refused(self, kind: str) -> None:
        form = {
            "list": "[{0},{0},{0}]",
            "mapping": "{{p: {0}, q: {0}, r: {0}}}",
            "merge": "{{<<: {0}, k{1}: {0}}}",
        }[kind]
        lines = ["a0: &a0 {x: 1, y: 2}"] + [
            f"a{n}: &a{n} " + form.format(f"*a{n - 1}", n) for n in range(1, 40)
        ]
        assert "more than 20,000 values, aliases expanded" in problem("\n".join(lines), ".yaml")


def _spelled(value: Any, strings: Mapping[Key, str], key: Key = ()) -> Any:
    """With the spelling of numbers that a loader of YAML 1.1 leaves as strings."""
    if isinstance(value, dict):
        return {name: _spelled(inner, strings, (*key, name)) for name, inner in value.items()}
    if isinstance(value, list):
        return [_spelled(inner, strings, (*key, place)) for place, inner in enumerate(value)]
    return strings.get(key, value)


def _as_names(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _as_names(inner) for name, inner in value.items()}
    return [_as_names(item) for item in value] if isinstance(value, list) else value


class TestWords:
    def test_a_launch(self) -> None:
        text = "# sizes\n--tp 2 # two\n\n--name='a b' --path s3://x#y \\\n  --empty ''\n--say \"$HOME \\\"q\\\"\" a\\ b\n"
        found = load_words(text)
        assert found.data == [
            "--tp",
            "2",
            "--name=a b",
            "--path",
            "s3://x#y",
            "--empty",
            "",
            "--say",
            '$HOME "q"',
            "a b",
        ]
        assert [found.line(n) for n in range(len(found.data))] == [2, 2, 4, 4, 4, 5, 5, 6, 6, 6]

    def test_nothing_is_expanded_or_run(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        found = load_words("--a $(touch pwned) `touch pwned` ${HOME} ~ * ; touch pwned\n")
        assert found.data[1:3] == ["$(touch", "pwned)"]
        assert "${HOME}" in found.data
        assert not list(tmp_path.iterdir())

    @given(
        st.lists(
            names.filter(lambda name: "\0" not in name and "\r" not in name), min_size=1, max_size=6
        )
    )
    def test_quoted_words_survive(self, words: list[str]) -> None:
        import shlex

        assert load_words(" ".join(shlex.quote(word) for word in words)).data == words

    @pytest.mark.parametrize("text", ["--a 'b\n--c", '--a "b', "--a b\\"])
    def test_open_quotes_are_refused(self, text: str) -> None:
        assert "line 1: found an open quote" in problem(text, ".args")

    def test_a_huge_word_takes_no_time(self) -> None:
        assert len(load_words("--a " + "x" * 5_000_000).data[1]) == 5_000_000
        assert "quote" in problem('--a "' + '\\"' * 250_000, ".args")


class TestSources:
    @pytest.mark.parametrize(
        ("text", "format"),
        [
            ('{"a": 1}', "json"),
            ("  [1]", "json"),
            ("# why\n{a: 1}", "hjson"),
            ("// why\n{a: 1}", "hjson"),
            ("a: 1\n", "yaml"),
            ("---\na: 1\n", "yaml"),
            ("- --bf16\n", "yaml"),
            ("# sizes\n--bf16\n", "flags"),
            ("-tp 2\n", "flags"),
        ],
    )
    def test_the_content_tells_the_format(self, text: str, format: str) -> None:
        assert parse(text).format == format

    def test_the_suffix_wins(self, tmp_path: Path) -> None:
        for suffix, text, format in [
            (".yaml", '{"a": 1}', "yaml"),
            (".HJSON", "a: 1", "hjson"),
            (".txt", "--a", "flags"),
        ]:
            path = tmp_path / f"x{suffix}"
            path.write_text(text)
            assert load(path).format == format
            assert load(str(path)).name == str(path)

    def test_text_and_documents_pass(self) -> None:
        document = load('{"a": 1}')
        assert (document.data, document.name) == ({"a": 1}, "text")
        assert load(document) is document

    def test_line_falls_back_to_the_parent(self) -> None:
        document = Document({}, {(): 1, ("a",): 3}, "yaml")
        assert (document.line("a", "b"), document.line("z")) == (3, 1)
        assert Document({}, {}, "mapping").line("a") is None

    def test_line_ends_and_byte_order_mark(self, tmp_path: Path) -> None:
        path = tmp_path / "x.json"
        path.write_bytes(b'\xef\xbb\xbf{"a":\r\n1,\r"b": 2}')
        assert load(path).data == {"a": 1, "b": 2}
        assert load(path).line("b") == 3

    def test_missing(self, tmp_path: Path) -> None:
        with pytest.raises(SourceError, match=r"x\.json: no such file; check the path"):
            read_text(tmp_path / "x.json")

    def test_directory(self, tmp_path: Path) -> None:
        with pytest.raises(SourceError, match="found a directory, expected a config file"):
            read_text(tmp_path)

    @pytest.mark.parametrize("path", ["a\0b", "x" * 5000, "file.json/inside"])
    def test_impossible_paths(self, path: str, tmp_path: Path) -> None:
        (tmp_path / "file.json").write_text("{}")
        with pytest.raises(SourceError, match=r"cannot be read|no such file") as caught:
            read_text(f"{tmp_path}/{path}")
        assert str(caught.value).isprintable()

    @pytest.mark.parametrize(
        ("content", "says"),
        [(b"", "empty"), (b" \n\t\n", "empty"), (b'{"a": "\0"}', "binary data"), (b"\x89PNG\r\n\x1a\n", "not UTF-8"),
         ('{"a": 1}'.encode("utf-16"), "not UTF-8")],
    )  # fmt: skip
    def test_no_text(self, content: bytes, says: str, tmp_path: Path) -> None:
        path = tmp_path / "x.json"
        path.write_bytes(content)
        with pytest.raises(SourceError, match=says):
            load(path)

    def test_size(self, tmp_path: Path) -> None:
        path = tmp_path / "x.json"
        with path.open("wb") as stream:
            stream.truncate(100 * 2**20)
        with pytest.raises(SourceError, match="more than 16 MiB"):
            load(path)
        path.write_bytes(b"{" + b" " * (limits.FILE - 2) + b"}")
        assert len(read_text(path)) == limits.FILE

    def test_a_device_without_end(self) -> None:
        with pytest.raises(SourceError, match="a device or a pipe"):
            read_text("/dev/zero")

    def test_a_pipe_that_nobody_writes_into(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "x.json")
        with pytest.raises(SourceError, match="a device or a pipe"):
            load(tmp_path / "x.json")

    @pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
    def test_unreadable(self, tmp_path: Path) -> None:
        path = tmp_path / "x.json"
        path.write_text("{}")
        path.chmod(0)
        with pytest.raises(SourceError, match="permission denied"):
            load(path)


class TestWriting:
    def test_replaces_and_keeps_the_mode(self, tmp_path: Path) -> None:
        path = tmp_path / "x.json"
        path.write_text("old")
        path.chmod(0o640)
        write_text(path, "new\n")
        assert path.read_bytes() == b"new\n"
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
        assert list(tmp_path.iterdir()) == [path]

    def test_follows_a_link(self, tmp_path: Path) -> None:
        (tmp_path / "link").symlink_to(tmp_path / "real")
        write_text(tmp_path / "link", "x")
        assert (tmp_path / "real").read_text() == "x"
        assert (tmp_path / "link").is_symlink()

    @pytest.mark.parametrize(
        ("name", "says"),
        [
            ("no/x", "there is no directory"),
            (".", "found a directory"),
            ("pipe", "a device or a pipe"),
        ],
    )
    def test_obstacles(self, name: str, says: str, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(SourceError, match=says):
            write_text(tmp_path / name, "x")

    def test_all_or_none(self, tmp_path: Path) -> None:
        with pytest.raises(SourceError, match="there is no directory"):
            write_all({tmp_path / "a": "x", tmp_path / "no" / "b": "y"})
        assert not list(tmp_path.iterdir())

    def test_a_failed_rename_is_undone(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        old, new, last = tmp_path / "old", tmp_path / "new", tmp_path / "last"
        old.write_text("before")
        replace = os.replace

        def failing(source: Path, target: Path) -> None:
            if Path(target) == last:
                raise OSError(28, "No space left on device")
            replace(source, target)

        monkeypatch.setattr(os, "replace", failing)
        with pytest.raises(SourceError, match=r"no space left on device.*nothing was written"):
            write_all({old: "after", new: "x", last: "y"})
        assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"old": "before"}
