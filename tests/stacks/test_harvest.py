"""Harvesting: a known release gives what the repository has, a new one adds only what changed, in rows that stay open."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Mapping
from contextlib import closing
from importlib import metadata
from itertools import cycle
from pathlib import Path
from textwrap import dedent
from typing import Any, cast

import pytest

import compat
from bridge.errors import SourceError
from compat.automodel import releases
from compat.deepspeed import releases as deepspeed
from compat.megatron import releases as megatron
from compat.merak import releases as merak
from tests.harvesting.__main__ import main
from tests.harvesting.judges.megatron import FUSED
from tests.harvesting.process import Process
from tests.harvesting.rows import plain_type, text as written, unite_names
from tests.harvesting.source import version_in
from tests.harvesting.stacks.automodel import PARTS, SECTIONS, STRATEGIES
from tests.harvesting.stacks.deepspeed import Heard
from tests.harvesting.stacks.megatron import CLASSES
from tests.harvesting.verdicts import VerdictSide, verdicts

pytestmark = pytest.mark.once

Rows = list[dict[str, Any]]
NEWEST = releases.KNOWN[-1]
FACTS = Path(releases.__file__).parent


def rows(version: str) -> Rows:
    """What the repository says of a release."""
    found = json.loads((FACTS / "classes.json").read_text("utf-8"))
    return [
        row
        for row in found
        if releases.RELEASES.within(version, row.get("since", ""), row.get("until", ""))
    ]


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
    lines = [
        f"    {field}: {texts.get(field, 'Any')!r} = {default}"
        for field, default in defaults.items()
    ]
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
        mine = [
            row for row in found if (row["section"], row.get("strategy", "")) == (section, strategy)
        ]
        texts[(PARTS + module).removeprefix("nemo_automodel.")] = texts.get(
            (PARTS + module).removeprefix("nemo_automodel."), ""
        ) + source(name, mine)
    sizes = {
        row["name"]: row["default"]
        for row in found
        if row["section"] == "distributed" and not row.get("strategy")
    }
    texts["recipes._dist_utils"] = f"_PARALLELISM_DEFAULTS = {sizes!r}\n"
    for module, text in texts.items():
        path = folder / "nemo_automodel" / (module.replace(".", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            f"from dataclasses import dataclass, field\nfrom typing import Any\n\n{text}", "utf-8"
        )
    return folder


def _parts(version: str) -> list[str]:
    return [
        f"{name} = {part}\n"
        for name, part in zip(("MAJOR", "MINOR", "PATCH"), version.split("."), strict=True)
    ]


@pytest.fixture
def into(tmp_path: Path) -> Path:
    """A copy of the facts, without digests of functions that the small tree does not have."""
    folder = tmp_path / "facts"
    shutil.copytree(FACTS, folder, ignore=shutil.ignore_patterns("__pycache__", "*.py"))
    (folder / "places.json").write_text("[]\n")
    return folder


def harvest(version: str, root: Path, into: Path, stack: str = "automodel") -> int:
    return main(
        [
            stack,
            version,
            "--from",
            str(root),
            "--into",
            str(into),
            "--count",
            "0",
            "--day",
            "2030-01-01",
        ]
    )


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text("utf-8") for path in sorted(folder.iterdir())}


LOADING = """
def load_args_from_checkpoint(args, load_arg="load"):
    _set_arg("layers", force=True)
    _set_arg("heads", "old_heads")
"""
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
    {
        "options": ["--backend"],
        "dest": "backend",
        "action": "store",
        "type": "name",
        "choices": ["flash", "fused", "local"],
    },
    {"options": ["--fused"], "dest": "fused", "action": "true", "excludes": ["--no-fused"]},
    {
        "options": ["--layers"],
        "dest": "layers",
        "action": "store",
        "type": "int",
        "nargs": "+",
        "default": [1, 2],
    },
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
    {
        "options": ["--rate"],
        "dest": "rate",
        "action": "store",
        "type": "float",
        "choices": [0.5, 1.0],
    },
    {
        "options": ["--spaced"],
        "dest": "spaced",
        "action": "store",
        "type": "layers_spaced",
        "default": 1,
    },
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


def test_flags_and_fields_of_megatron_are_read_from_its_source(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = {"core/package_info.py": "MAJOR = 0\nMINOR = 99\nPATCH = 0\n"}
    texts |= dict.fromkeys(CLASSES.values(), "") | {CLASSES["TransformerConfig"]: DATACLASS}
    into = write(tmp_path / "into", {"known.json": '{"0.98.0": ""}'})
    root = write(tmp_path / "tree", {f"megatron/{file}": text for file, text in texts.items()})
    assert harvest("0.99.0", root, into, "megatron") == 1
    assert "it has no folder named training" in capsys.readouterr().err
    write(
        root,
        {"megatron/training/arguments.py": SCRIPT, "megatron/training/checkpointing.py": LOADING},
    )
    assert harvest("0.99.0", root, into, "megatron") == 0
    said = capsys.readouterr().out
    assert (
        "facts not read from this release (1):\n  ['--unknown']: unknown action _StoreAction or type words_of"
        in said
    )
    found = {name: json.loads(text) for name, text in contents(into).items()}
    assert found["flags.json"] == sorted(FLAGS, key=lambda row: (row["dest"], row["options"]))
    assert {row["name"]: row["default"] for row in found["classes.json"]} == DEFAULTS
    assert found["groups.json"]["layers"] == "network size" and found["groups.json"]["on"] == "RL"
    loads = {
        (row["name"], row.get("from"), row.get("forced"))
        for row in found["checkpoint_arguments.json"]
    }
    assert loads == {("layers", None, True), ("heads", "old_heads", None)}


LAUNCHED = """
import os
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass

def get_device_arch_version(): raise RuntimeError("no device")

def parse_args():
    parser = ArgumentParser()
    parser.add_argument("--layers", type=int)
    args = parser.parse_args()
    args.ranks = int(os.environ["WORLD_SIZE"])
    return args

def validate_args(args):
    assert args.layers % args.ranks == 0, f"{args.layers} layers"
    if args.layers == 4:
        import a_kernel_library
    if args.layers == 8:
        try:
            import a_kernel_library
        except ImportError:
            raise ValueError("layers of this size need a kernel")
    assert get_device_arch_version() == 9

@dataclass
class TransformerConfig:
    num_layers: int

def core_transformer_config_from_args(args): return TransformerConfig(args.layers)
"""


def test_a_source_tree_of_megatron_judges_launches(tmp_path: Path) -> None:
    empty = (*FUSED, "megatron.core.utils", "megatron.core.msc_utils", "megatron.training.training")
    texts = {f"{module.replace('.', '/')}.py": "" for module in empty}
    root = write(
        tmp_path,
        {
            **texts,
            "megatron/core/msc_utils.py": "msc = None",
            "megatron/training/arguments.py": LAUNCHED,
        },
    )
    with closing(Process("megatron", "0.99.0", root)) as process:
        answers = [
            process.ask({"flags": ["--layers", layers], "ranks": 2})
            for layers in ("2", "3", "many", "4", "8")
        ]
    missing = "No module named 'a_kernel_library'"
    assert answers == [
        {"held": {"args.layers": 2, "args.ranks": 2, "TransformerConfig.num_layers": 2}},
        {"refused": "refused by Megatron itself: AssertionError: 3 layers"},
        {
            "refused": "refused by Megatron itself: Refused: argument --layers: invalid int value: 'many'"
        },
        {"lacks": f"ModuleNotFoundError: {missing}"},
        {"lacks": f"ModuleNotFoundError: {missing}"},
    ]


class Canned:
    """Answers in turn as a release would, whatever it is asked."""

    def __init__(self) -> None:
        self.answers = cycle(
            [
                {"held": {}},
                {"refused": "found 3 of 'x'"},
                {"refused": "found 4 of 'y'"},
                {"lacks": "no 'x'"},
            ]
        )

    def ask(self, question: Any) -> dict[str, Any]:
        return next(self.answers)


def test_verdicts_are_counted_by_who_refuses() -> None:
    tally = verdicts(
        cast(Process, Canned()),
        compat.load("megatron"),
        megatron.KNOWN[-1],
        24,
        lambda number, count: None,
    )
    assert tally.sides.total() == 24
    lacking = tally.lacking["this machine lacks what the config needs: no …"]
    assert tally.sides[VerdictSide.LEFT_OUT] == tally.lacking.total() == lacking
    assert (
        tally.sides[VerdictSide.THEIRS]
        == tally.differences[f"{VerdictSide.THEIRS}: found … of …"]
        > 0
    )
    assert len(tally.rows[True]) == tally.sides[VerdictSide.ACCEPTED]
    assert len(tally.rows[False]) == tally.sides[VerdictSide.REFUSED] > 1
    # Of refusals that differ in values alone, one is recorded.
    assert [row["accepted"] for row in tally.sample].count(False) == 1


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
    assert (
        f"{len(rows(version))} facts unchanged, 0 rows begin, 0 rows end" in capsys.readouterr().out
    )
    assert contents(into) == before


def test_a_release_that_changed_nothing_adds_one_line(into: Path, tmp_path: Path) -> None:
    assert harvest("0.98.0", tree(tmp_path / "first", "0.98.0", rows(NEWEST)), into) == 0
    before = contents(into)
    assert harvest("0.99.0", tree(tmp_path / "second", "0.99.0", rows(NEWEST)), into) == 0
    after = contents(into)
    assert [name for name in after if after[name] != before[name]] == ["known.json"]
    assert len(after["known.json"].splitlines()) == len(before["known.json"].splitlines()) + 1
    assert json.loads(after["known.json"])["0.99.0"] == "2030-01-01"


def test_a_new_release_begins_and_ends_only_what_changed(
    into: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = rows(NEWEST)
    changed = next(row for row in found if row["name"] == "zero_dp_strategy")
    found = [
        {**row, "default": 2} if row is changed else row
        for row in found
        if row["name"] != "pp_seq_len"
    ]
    found.append({"section": "distributed.pipeline", "name": "wings", "type": "int", "default": 3})
    assert harvest("0.99.0", tree(tmp_path / "tree", "0.99.0", found), into) == 0
    before, after = (
        json.loads((FACTS / "classes.json").read_text()),
        json.loads((into / "classes.json").read_text()),
    )
    came, went = (
        [row for row in after if row not in before],
        [row for row in before if row not in after],
    )
    assert len(after) == len(before) + 2 and len(went) == 2
    assert {(row["name"], row.get("since"), row.get("until")) for row in came} == {
        ("wings", "0.99.0", None),
        ("zero_dp_strategy", "0.99.0", None),
        ("zero_dp_strategy", changed.get("since"), "0.99.0"),
        ("pp_seq_len", "0.4.0", "0.99.0"),
    }
    told = capsys.readouterr().out
    assert (
        "distributed.pipeline.wings: new, 3 by default; add a line to the schema and a rule" in told
    )
    assert (
        "distributed.zero_dp_strategy: 3 by default until now, 2 from now on (memory or speed)"
        in told
    )
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
        pytest.skip(
            f"DeepSpeed {installed} is installed, the newest that the tables know is {newest}"
        )
    facts = Path(deepspeed.__file__).parent
    into = taken_out(facts, tmp_path / "facts", newest)
    (into / "places.json").write_text("[]\n")
    before = contents(into)
    assert (
        main(
            [
                "deepspeed",
                newest,
                "--into",
                str(into),
                "--count",
                "0",
                "--day",
                deepspeed.DATES[newest],
            ]
        )
        == 0
    )
    told, after = capsys.readouterr().out, contents(into)
    assert "17 rows begin, 8 rows end" in told
    assert "graph_harvesting: refused from now on; say what replaces it" in told
    assert [name for name in after if after[name] != before[name]] == [
        "keys.json",
        "known.json",
        "places.json",
    ]
    for name in (name for name in after if name != "places.json"):
        assert after[name] == (facts / name).read_text("utf-8"), name


FAST_LLM = {
    "__init__": '__version__ = "0.99.0"',
    "config": """
        import dataclasses

        class NoAutoValidate:
            def __enter__(self): pass
            def __exit__(self, *error): pass

        class Field(dataclasses.Field):
            def __init__(self, default=dataclasses.MISSING, valid=None, init=True):
                more = {"repr": True, "hash": None, "compare": True, "metadata": None, "kw_only": True}
                super().__init__(default=default, default_factory=dataclasses.MISSING, init=init, **more)
                self.valid = valid

        def check_field(fn, *args):
            def valid(value): fn(value, *args)
            return valid

        def gt(value, limit): pass

        @dataclasses.dataclass(kw_only=True)
        class Config:
            _registry = None
            _validated: bool = Field(init=False, default=False)
            type: str | None = Field(default=None)

            @classmethod
            def _from_dict(cls, default): return cls()
    """,
    "layers": """
        import dataclasses
        from fast_llm.config import Config, Field, check_field, gt

        @dataclasses.dataclass(kw_only=True)
        class Layer(Config):
            width: int | None = Field(default=8, valid=check_field(check_field(gt, 0)))

            @classmethod
            def _from_dict(cls, default):
                cls._handle_renamed_field(default, "breadth", "width")
                return (Small if cls is Layer else cls)()

            def _handle_renamed_field(default, old, new): pass

        @dataclasses.dataclass(kw_only=True)
        class Small(Layer):
            below: dict[str, Layer] = Field(default=None)
            rate: float = Field(default=0.5)
            path: bytes = Field(default=b"")

        Layer._registry = {"small": Small}
    """,
    "models.gpt.config": """
        import dataclasses
        from fast_llm.config import Config, Field
        from fast_llm.layers import Layer

        @dataclasses.dataclass(kw_only=True)
        class Run(Config):
            log_timestamps: bool = Field(default=True)

        @dataclasses.dataclass(kw_only=True)
        class Model(Config):
            base_model: Layer = Field(default=None)

        @dataclasses.dataclass(kw_only=True)
        class GPTTrainerConfig(Config):
            run: Run = Field(default=None)
            model: Model = Field(default=None)
            callbacks: dict[str, Layer] = Field(default=None)
            wings: int = Field(default=3)
    """,
}
"""A small Fast-LLM: a key `wings` of its own, and one class of layers that others stand below."""
SMALL = {"breadth": "?", "width": "int>0", "below": "{}Layer", "rate": "float", "path": "?"}


def packaged(folder: Path, texts: Mapping[str, str]) -> Path:
    """The folder with these modules of Fast-LLM in it."""
    return write(
        folder,
        {f"fast_llm/{name.replace('.', '/')}.py": dedent(text) for name, text in texts.items()},
    )


def test_keys_and_classes_of_fast_llm_are_read_from_its_own_classes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = packaged(tmp_path / "tree", FAST_LLM)
    into = write(tmp_path / "into", {"known.json": '{"0.98.0": ""}'})
    assert harvest("0.99.0", root, into, "fast_llm") == 0
    assert (
        "wings: new, 3 by default; add a line to the schema and a rule" in capsys.readouterr().out
    )
    found = {name: json.loads(text) for name, text in contents(into).items()}
    assert {row["key"]: (row["type"], row.get("default")) for row in found["keys.json"]} == {
        "type": ("str", None),
        "run.log_timestamps": ("bool", True),
        "model.type": ("str", None),
        "model.base_model": ("Layer", None),
        "callbacks": ("{}Layer", None),
        "wings": ("int", 3),
    }
    types = {"types": {"small": "Small"}, "below": ["Small"], "default": "Small"}
    assert found["classes.json"] == [
        {"class": "Layer", "fields": {"breadth": "?", "width": "int>0"}, **types},
        {"class": "Small", "fields": SMALL},
    ]
    packaged(
        root,
        {
            "__init__": '__version__ = "1.0.0"',
            "layers": FAST_LLM["layers"].replace("gt, 0", "gt, 1"),
        },
    )
    assert harvest("1.0.0", root, into, "fast_llm") == 0
    told = capsys.readouterr().out
    assert "4 facts" not in told and "6 facts unchanged, 2 rows begin, 2 rows end" in told
    assert "model.base_model.Small: fields {'width': 'int>0'} becomes {'width': 'int>1'}" in told
    packaged(root, {"layers": "class Layer[unreadable"})
    assert harvest("1.0.0", root, into, "fast_llm") == 1
    assert "layers.py; harvest with Python 3.12 or later" in capsys.readouterr().err


def test_the_newest_merak_taken_out_and_read_again_gives_the_same_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts, newest = Path(merak.__file__).parent, merak.KNOWN[-1]
    stated = [
        row for row in json.loads((facts / "arguments.json").read_text()) if not row.get("until")
    ]
    into = taken_out(facts, tmp_path / "facts", newest)
    (into / "places.json").write_text("[]\n")
    arguments, init, lists = (
        [
            (row["name"].removeprefix(section), row["type"], row["default"])
            for row in stated
            if row["name"].startswith(section)
        ]
        for section in ("args.", "init.", "tp_lists.")
    )
    texts = {
        "setup.py": 'setup(\n    name="merak",\n    version="2.2.2",  # Required\n)\n',
        "Merak/args.py": "class MerakArguments(TrainingArguments):\n"
        + "".join(
            f"    {name}: {kind} = field(default={value!r})\n" for name, kind, value in arguments
        ),
        "Merak/functions.py": function("init", init) + function("set_tp_layer_lists", lists),
    }
    before = contents(into)
    root = write(tmp_path / "tree", texts)
    assert (
        main(
            [
                "merak",
                newest,
                "--from",
                str(root),
                "--into",
                str(into),
                "--count",
                "0",
                "--day",
                merak.DATES[newest],
            ]
        )
        == 0
    )
    assert f"{len(stated) - 1} facts unchanged, 1 rows begin, 0 rows end" in capsys.readouterr().out
    after = contents(into)
    assert [name for name in after if after[name] != before[name]] == [
        "arguments.json",
        "known.json",
    ]
    assert all(
        after[name] == (facts / name).read_text("utf-8")
        for name in ("arguments.json", "known.json")
    )
    assert main(["merak", newest, "--from", str(root), "--into", str(into), "--record"]) == 0
    assert (
        "no configs are judged, because harvesting/judges has no module for the stack"
        in capsys.readouterr().out
    )


def function(name: str, parameters: Iterable[tuple[str, str, Any]]) -> str:
    """A function with these parameters, those without a default first."""
    needed = [
        f"{word}: {kind}" for word, kind, default in parameters if default is None and kind == "int"
    ]
    others = [
        f"{word}: {kind} = {default!r}"
        for word, kind, default in parameters
        if default is not None or kind != "int"
    ]
    return f"def {name}({', '.join(needed + others)}): ...\n"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("MAJOR = 0\nMINOR = 19\nPATCH = 0\nPRE_RELEASE = 'rc1'\n", "0.19.0rc1"),
        ('__version__ = "0.4.0"\n', "0.4.0"),
        ("0.19.8\n", "0.19.8"),
    ],
)
def test_a_source_tree_states_its_version_in_one_of_three_ways(
    text: str, told: str, tmp_path: Path
) -> None:
    assert version_in(write(tmp_path, {"info.py": text}) / "info.py") == told


def test_a_tree_without_a_version_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="sets neither version nor MAJOR, MINOR, PATCH"):
        version_in(write(tmp_path, {"info.py": "names = ()\n"}) / "info.py")


def test_keys_that_are_looked_for_are_heard_with_their_defaults() -> None:
    heard: dict[str, Any] = {}
    section = Heard({"aio": {"depth": 2}}, heard)
    assert "steps" not in section.keys()  # noqa: SIM118 - as some releases ask
    assert section.get("rate", 0.5) == 0.5
    assert section["aio"].get("size", 4) == 4 and "depth" in section["aio"] and bool(section["aio"])
    assert heard == {"steps": None, "rate": 0.5, "aio": None, "aio.size": 4, "aio.depth": None}


def test_what_is_not_there_is_said(
    into: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
    assert main(["huggingface", "9.9.9"]) == 1
    assert "harvesting/stacks has no module" in capsys.readouterr().err
    assert contents(into) == before


def test_no_window_moves_when_a_release_is_added() -> None:
    newest = re.compile(
        r"(since|until)[=(]\s*(\w+\.)?KNOWN\[-1\]|^[A-Z_]+ = KNOWN\[-1\]", re.MULTILINE
    )
    texts = {path: path.read_text("utf-8") for path in Path(compat.__file__).parent.rglob("*.py")}
    assert len(texts) > 100
    assert not [path for path, text in texts.items() if newest.search(text)]


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
    assert unite_names({"a": ["x"], "b": "text"}, {"a": ["w"], "b": "other", "c": ["y"]}) == {
        "a": ["w", "x"],
        "b": "text",
        "c": ["y"],
    }
