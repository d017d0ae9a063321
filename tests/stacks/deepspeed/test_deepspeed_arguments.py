"""Arguments of the Trainer on command lines, against the real parser under generated spellings."""

from __future__ import annotations

import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from bridge.errors import ConfigError
from bridge.files import Script
from compat.deepspeed import scripts
from compat.deepspeed.trainer import DEFAULTS

VALUES = {
    bool: ("", "True", "false"),
    int: ("3", "16"),
    float: ("3e-4", "0.5"),
    str: ("cosine", "adamw_torch"),
}
AUTO = '{"train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": "auto"}}'


@cache
def _parser() -> Any:
    transformers = pytest.importorskip("transformers")
    parser = transformers.HfArgumentParser(transformers.TrainingArguments)
    parser.error = _raise
    return parser


def _raise(message: str) -> None:
    raise ValueError(message)


@pytest.mark.once
@settings(max_examples=200)
@given(data=st.data())
def test_flags_in_any_spelling_are_what_the_trainers_parser_reads(data: st.DataObject) -> None:
    parser = _parser()
    known = {action.dest for action in parser._actions}
    kinds = {
        name: type(value) for name, value in DEFAULTS.items() if name in known and value is not None
    }
    kinds["warmup_steps"] = int
    words: list[str] = []
    for name in data.draw(st.lists(st.sampled_from(sorted(kinds)), max_size=4)):
        flag = name.replace("_", "-") if data.draw(st.booleans()) else name
        flag = f"--{flag[: len(flag) - data.draw(st.integers(0, 4))]}"
        value = data.draw(st.sampled_from(VALUES[kinds[name]]))
        words += (
            [f"{flag}={value}"]
            if value and data.draw(st.booleans())
            else [flag, *[value] * bool(value)]
        )
    (launch,) = Script(f"python train.py {shlex.join(words)}\n").launches
    try:
        real, unknown = parser.parse_known_args([*words])
    except ValueError:
        return
    if unknown:
        return
    ours = scripts._trainer_arguments(launch, DEFAULTS)
    assert dict(ours) == {
        name: getattr(real, name)
        for name in kinds
        if getattr(real, name) != parser.get_default(name) or name in ours
    }


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds.json").write_text(AUTO)


def _read(words: str) -> scripts.Found:
    line = f"deepspeed train.py --deepspeed ds.json --output_dir o --per_device_train_batch_size 4 {words}\n"
    return scripts.read(Script(line, "run.sh"))


@pytest.mark.parametrize(
    "words", ['--bf16 "$X"', "--learning_rate $X", "--weight_decay=$X", "--optim $(x)"]
)
def test_a_value_that_is_not_known_is_no_default(words: str) -> None:
    with pytest.raises(ConfigError, match="is not known"):
        _read(words)


@pytest.mark.parametrize(
    ("words", "path"),
    [("--bf16 $X", "$X"), ("$X", "$X"), ("--seed $X", "--seed"), ("--output_dir $X", "")],
)
def test_words_that_may_be_arguments_are_named(words: str, path: str) -> None:
    run = _read(words)
    assert [one.path for one in run.findings if one.effect.name == "NUMBERS"] == (
        [path] if path else []
    )
    assert run.arguments.get("bf16") is (True if "bf16" in words else None)


def test_of_a_file_that_is_named_twice_the_last_one_counts() -> None:
    Path("other.json").write_text('{"train_batch_size": 8}')
    assert _read("--deepspeed other.json").file == "other.json"
