"""Harvesting: a known release gives what the repository has, a new one adds only what changed, in rows that stay open."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from bridge.testing.harvest.__main__ import main
from bridge.testing.harvest.rows import joined, plain_type
from bridge.testing.harvest.rows import text as written
from compat.automodel import releases
from compat.automodel.harvest import PARTS, SECTIONS, STRATEGIES
from compat.deepspeed import releases as deepspeed
from compat.deepspeed.harvest import Heard
from compat.megatron.harvest import CLASSES

pytestmark = pytest.mark.once

Rows = list[dict[str, Any]]
NEWEST = releases.KNOWN[-1]
FACTS = Path(releases.__file__).parent


def rows(version: str) -> Rows:
    """What the repository says of a release."""
    found = json.loads((FACTS / "classes.json").read_text("utf-8"))
    return [row for row in found if releases.RELEASES.within(version, row.get("since", ""), row.get("until", ""))]


def source(name: str, found: Iterable[Mapping[str, Any]]) -> str:
    """A dataclass with these fields; a dotted one is a field of a dataclass inside."""
    text, inner = [], dict[str, list[dict[str, Any]]]()
    for row in found:
        first, dot, rest = row["name"].partition(".")
        if dot:
            inner.setdefault(first, []).append({**row, "name": rest})
        else:
            text.append((first, row["type"] or "Any", row["default"]))
    nested = [source(f"{name}_{field}", parts) for field, parts in inner.items()]
    texts = {field: kind for field, kind, _ in text}
    defaults = {field: f"field(default_factory=lambda: {default!r})" for field, _, default in text}
    defaults |= {field: f"field(default_factory={name}_{field})" for field in inner}
    lines = [f"    {field}: {texts.get(field, 'Any')!r} = {default}" for field, default in defaults.items()]
    return "\n".join([*nested, "@dataclass", f"class {name}:", *(lines or ["    pass"]), ""])


def tree(folder: Path, version: str, found: Rows) -> Path:
    """A small source tree of AutoModel with these fields, and nothing else."""
    texts = {"package_info": "MAJOR, MINOR, PATCH = 0, 0, 0\n" + "".join(_parts(version))}
    homes = {
        **{(name, ""): places for name, places in SECTIONS.items()},
        **{("distributed", name): STRATEGIES[name] for name in STRATEGIES},
    }
    for (section, strategy), places in homes.items():
        module, _, name = places[0].partition(":")
        mine = [row for row in found if (row["section"], row.get("strategy", "")) == (section, strategy)]
        texts[(PARTS + module).removeprefix("nemo_automodel.")] = texts.get(
            (PARTS + module).removeprefix("nemo_automodel."), ""
        ) + source(name, mine)
    sizes = {row["name"]: row["default"] for row in found if row["section"] == "distributed" and not row.get("strategy")}
    texts["recipes._dist_utils"] = f"_PARALLELISM_DEFAULTS = {sizes!r}\n"
    for module, text in texts.items():
        path = folder / "nemo_automodel" / (module.replace(".", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"from dataclasses import dataclass, field\nfrom typing import Any\n\n{text}", "utf-8")
    return folder


def _parts(version: str) -> list[str]:
    return [f"{name} = {part}\n" for name, part in zip(("MAJOR", "MINOR", "PATCH"), version.split("."), strict=True)]


@pytest.fixture
def into(tmp_path: Path) -> Path:
    """A copy of the facts, without digests of functions that the small tree does not have."""
    folder = tmp_path / "facts"
    shutil.copytree(FACTS, folder, ignore=shutil.ignore_patterns("__pycache__", "*.py"))
    (folder / "places.json").write_text("[]\n")
    return folder


def harvest(version: str, root: Path, into: Path, stack: str = "automodel") -> int:
    return main([stack, version, "--from", str(root), "--into", str(into), "--count", "0", "--day", "2030-01-01"])


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text("utf-8") for path in sorted(folder.iterdir())}


SCRIPT = """
import argparse
from enum import Enum

Backend = Enum("Backend", ["flash", "fused"])

def tuple_type(word): return tuple(int(part) for part in word.split(","))

def layers_freq_type(word): return int(word)

def spaced_freq_type(word): return eval(word)

def backend_of(word): return "local" if word == "local" else Backend[word]

def words_of(word): return word.split()

def add_megatron_arguments(parser):
    group = parser.add_argument_group("network size")
    group.add_argument("--layers", type=int, nargs="+", default=[1, 2])
    group.add_argument("--rate", type=float, choices=[0.5, 1.0])
    group.add_argument("--maybe", type=bool, default=True)
    group.add_argument("--name", "--title")
    group.add_argument("--ranks", type=tuple_type)
    group.add_argument("--layout", type=layers_freq_type)
    group.add_argument("--spaced", type=spaced_freq_type, default=1)
    group.add_argument("--member", type=lambda word: Backend[word], choices=list(Backend), default=Backend.fused)
    group.add_argument("--backend", type=backend_of)
    group.add_argument("--unknown", type=words_of)
    group = parser.add_argument_group("RL")
    group.add_argument("--on", action=argparse.BooleanOptionalAction, default=None)
    either = group.add_mutually_exclusive_group()
    either.add_argument("--fused", action="store_true", default=None)
    either.add_argument("--no-fused", action="store_false", dest="fused")
    return parser
"""
FLAGS: Rows = [
    {"options": ["--backend"], "dest": "backend", "action": "store", "type": "name", "choices": ["flash", "fused", "local"]},
    {"options": ["--fused"], "dest": "fused", "action": "true", "excludes": ["--no-fused"]},
    {"options": ["--layers"], "dest": "layers", "action": "store", "type": "int", "nargs": "+", "default": [1, 2]},
    {"options": ["--layout"], "dest": "layout", "action": "store", "type": "layers"},
    {"options": ["--maybe"], "dest": "maybe", "action": "store", "type": "bool", "default": True},
    {
        "options": ["--member"],
        "dest": "member",
        "action": "store",
        "type": "name",
        "choices": ["flash", "fused"],
        "default": "fused",
    },
    {"options": ["--name", "--title"], "dest": "name", "action": "store", "type": "text"},
    {"options": ["--no-fused"], "dest": "fused", "action": "false", "excludes": ["--fused"]},
    {"options": ["--on", "--no-on"], "dest": "on", "action": "switch"},
    {"options": ["--ranks"], "dest": "ranks", "action": "store", "type": "integers"},
    {"options": ["--rate"], "dest": "rate", "action": "store", "type": "float", "choices": [0.5, 1.0]},
    {"options": ["--spaced"], "dest": "spaced", "action": "store", "type": "layers_spaced", "default": 1},
    {"options": ["-h", "--help"], "dest": "help", "action": "help"},
]
"""What is read of the flags above; the first of two with one destination gives the default."""
DATACLASS = """
class TransformerConfig(ModelParallelConfig):
    layers: int = 2
    limit: int = 2**32 - 1
    names: Optional[List[str]] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    made: Any = field(default_factory=make)
    hidden: float = field(default=0.5, metadata={})
    dtype: torch.dtype = torch.float32
    wanted: int
    constant = 3
"""
DEFAULTS = {
    "layers": 2,
    "limit": 2**32 - 1,
    "names": [],
    "sizes": {},
    "made": "make",
    "hidden": 0.5,
    "dtype": "torch.float32",
    "wanted": None,
}


def test_flags_and_fields_of_megatron_are_read_from_its_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = {"core/package_info.py": "MAJOR = 0\nMINOR = 99\nPATCH = 0\n"}
    texts |= dict.fromkeys(CLASSES.values(), "") | {CLASSES["TransformerConfig"]: DATACLASS}
    into = write(tmp_path / "into", {"known.json": '{"0.98.0": ""}'})
    root = write(tmp_path / "tree", {f"megatron/{file}": text for file, text in texts.items()})
    assert harvest("0.99.0", root, into, "megatron") == 1
    assert "it has no folder named training" in capsys.readouterr().err
    write(root, {"megatron/training/arguments.py": SCRIPT})
    assert harvest("0.99.0", root, into, "megatron") == 0
    said = capsys.readouterr().out
    assert "facts not read from this release (1):\n  ['--unknown']: unknown action _StoreAction or type words_of" in said
    found = {name: json.loads(text) for name, text in contents(into).items()}
    assert found["flags.json"] == sorted(FLAGS, key=lambda row: (row["dest"], row["options"]))
    assert {row["name"]: row["default"] for row in found["classes.json"]} == DEFAULTS
    assert found["groups.json"]["layers"] == "network size" and found["groups.json"]["on"] == "RL"


def write(folder: Path, texts: Mapping[str, str]) -> Path:
    """The folder with these files in it."""
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, "utf-8")
    return folder


@pytest.mark.parametrize("version", [NEWEST, "0.6.0"])
def test_a_known_release_gives_what_the_repository_has(
    version: str, into: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(into)
    assert harvest(version, tree(tmp_path / "tree", version, rows(version)), into) == 0
    assert f"{len(rows(version))} facts unchanged, 0 rows begin, 0 rows end" in capsys.readouterr().out
    assert contents(into) == before


def test_a_release_that_changed_nothing_adds_one_line(into: Path, tmp_path: Path) -> None:
    assert harvest("0.98.0", tree(tmp_path / "first", "0.98.0", rows(NEWEST)), into) == 0
    before = contents(into)
    assert harvest("0.99.0", tree(tmp_path / "second", "0.99.0", rows(NEWEST)), into) == 0
    after = contents(into)
    assert [name for name in after if after[name] != before[name]] == ["known.json"]
    assert len(after["known.json"].splitlines()) == len(before["known.json"].splitlines()) + 1
    assert json.loads(after["known.json"])["0.99.0"] == "2030-01-01"


def test_a_new_release_begins_and_ends_only_what_changed(into: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = rows(NEWEST)
    changed = next(row for row in found if row["name"] == "zero_dp_strategy")
    found = [{**row, "default": 2} if row is changed else row for row in found if row["name"] != "pp_seq_len"]
    found.append({"section": "distributed.pipeline", "name": "wings", "type": "int", "default": 3})
    assert harvest("0.99.0", tree(tmp_path / "tree", "0.99.0", found), into) == 0
    before, after = json.loads((FACTS / "classes.json").read_text()), json.loads((into / "classes.json").read_text())
    came, went = [row for row in after if row not in before], [row for row in before if row not in after]
    assert len(after) == len(before) + 2 and len(went) == 2
    assert {(row["name"], row.get("since"), row.get("until")) for row in came} == {
        ("wings", "0.99.0", None),
        ("zero_dp_strategy", "0.99.0", None),
        ("zero_dp_strategy", changed.get("since"), "0.99.0"),
        ("pp_seq_len", "0.4.0", "0.99.0"),
    }
    told = capsys.readouterr().out
    assert "distributed.pipeline.wings: new, 3 by default; add a line to the schema and a rule" in told
    assert "distributed.zero_dp_strategy: 3 by default until now, 2 from now on (memory or speed)" in told
    assert "distributed.pipeline.pp_seq_len: removed" in told


def taken_out(facts: Path, into: Path, version: str) -> Path:
    """A copy of a stack's facts as they were before a release."""
    shutil.copytree(facts, into, ignore=shutil.ignore_patterns("__pycache__", "*.py"))
    for path in into.glob("*.json"):
        found = json.loads(path.read_text("utf-8"))
        if path.name == "known.json":
            del found[version]
            path.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
        elif isinstance(found, list):
            before = [
                {key: value for key, value in row.items() if (key, value) != ("until", version)}
                for row in found
                if row.get("since") != version
            ]
            path.write_text(written(before), "utf-8")
    return into


def test_the_newest_deepspeed_taken_out_and_harvested_again_gives_the_same_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("deepspeed")
    installed, newest = metadata.version("deepspeed"), deepspeed.KNOWN[-1]
    if installed != newest:
        pytest.skip(f"DeepSpeed {installed} is installed, the newest that the tables know is {newest}")
    facts = Path(deepspeed.__file__).parent
    into = taken_out(facts, tmp_path / "facts", newest)
    (into / "places.json").write_text("[]\n")
    before = contents(into)
    assert main(["deepspeed", newest, "--into", str(into), "--count", "0", "--day", deepspeed.DATES[newest]]) == 0
    told, after = capsys.readouterr().out, contents(into)
    assert "17 rows begin, 8 rows end" in told
    assert "graph_harvesting: refused from now on; say what replaces it" in told
    assert [name for name in after if after[name] != before[name]] == ["keys.json", "known.json", "places.json"]
    for name in (name for name in after if name != "places.json"):
        assert after[name] == (facts / name).read_text("utf-8"), name


def test_keys_that_are_looked_for_are_heard_with_their_defaults() -> None:
    heard: dict[str, Any] = {}
    section = Heard({"aio": {"depth": 2}}, heard)
    assert "steps" not in section.keys()  # noqa: SIM118 - as some releases ask
    assert section.get("rate", 0.5) == 0.5
    assert section["aio"].get("size", 4) == 4 and "depth" in section["aio"] and bool(section["aio"])
    assert heard == {"steps": None, "rate": 0.5, "aio": None, "aio.size": 4, "aio.depth": None}


def test_what_is_not_there_is_said(into: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(into)
    small = tree(tmp_path / "tree", "0.2.9", rows(NEWEST))
    cases = {
        "0.99.0": (small, "found 0.2.9"),
        "0.2.9": (small, f"older than {NEWEST}"),
        "0.98.0": (tmp_path, "no folder nemo_automodel"),
    }
    for version, (root, expected) in cases.items():
        assert harvest(version, root, into) == 1
        assert expected in capsys.readouterr().err
    assert main(["merak", "9.9.9"]) == 1
    assert "no harvest.py" in capsys.readouterr().err
    assert contents(into) == before


def test_the_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "pip install --no-deps --target" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Optional[List[int]]", "list[int] | None"),
        ("typing.Union[str, Dict[str, int]]", "str | dict[str, int]"),
        ("Literal['a', 'b']", "Literal[a, b]"),
        ("not a type at all", "not a type at all"),
    ],
)
def test_one_type_has_one_spelling(one: str, other: str) -> None:
    assert plain_type(one) == other


def test_names_are_gathered_over_releases() -> None:
    assert joined({"a": ["x"], "b": "text"}, {"a": ["w"], "b": "other", "c": ["y"]}) == {"a": ["w", "x"], "b": "text", "c": ["y"]}
