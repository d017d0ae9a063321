"""JSON Schemas of our own outputs: what commands print is what the schemas say, key by key, errors too."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from bridge.cli import run
from bridge.cli.demo import launch_text
from bridge.report import json_types
from tests.common.schemas import judge, problems

pytestmark = pytest.mark.once

HOME = Path(__file__).parents[2]
DS = {
    "train_batch_size": 128,
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 2, "allgather_partitions": False},
}
PIPED = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 --lr 1e-3 "
    "--micro-batch-size 1 --global-batch-size 8 --pipeline-model-parallel-size 4 --bf16"
)
COMMANDS = {
    "convert": [
        "convert launch.args --to deepspeed --world-size 8 --json",
        "convert launch.args --to deepspeed --world-size 8 --json -o out.json",
        "convert launch.args --to deepspeed --world-size 8 --json -o dry.json --dry-run",
        "convert none.args --to deepspeed --json",
        "convert ds.json --json --world-size",
    ],
    "resolve": [
        "resolve ds.json --json --world-size 8",
        "resolve bad.json --format json",
        "resolve launch.args --json --world-size 8",
        "resolve ds.json launch.args --json",
    ],
    "check": [
        "check ds.json --json",
        "check ds.json --format json",
        "check . --format json --world-size 8",
        "check bad.json --json",
        "check ds.json --json --nothing",
    ],
    "diff": ["diff launch.args ds.json --world-size 8 --json", "diff launch.args bad.json --json"],
    "match": ["match launch.args launch.args --json", "match launch.args none.args --json"],
    "drift": [
        "drift ds.json --from-version 0.16.0 --to-version 0.19.8 --json",
        "drift ds.json --to-version 9 --json",
    ],
    "layout": [
        "layout launch.args --world-size 8 --vocab 1000 --json",
        "layout ds.json --ranks 4 --model gpt2 --memory 1 --json",
        "layout ds.json --ranks 4 --json",
    ],
    "estimate": [
        "estimate launch.args --world-size 8 --vocab 1000 --json",
        "estimate ds.json --ranks 4 --model llama-7b --memory 80 --json",
        "estimate ds.json --ranks 4 --json",
    ],
    "schedule": ["schedule piped.args --world-size 4 --json", "schedule bad.json --json"],
    "show": [
        "show deepspeed gradient_clipping --json",
        "show megatron params_dtype --json",
        "show deepspeed --json",
        "show nothing --json",
    ],
    "fuzz": ["fuzz merak --examples 3 --json", "fuzz merak --to deepspeed --examples 3 --json"],
}
WRONG = {
    "convert": [
        "convert none.json --to deepspeed --json",
        "convert ds.json --to none --format json",
        "convert --json",
    ],
    "resolve": ["resolve none.json --json", "resolve ds.json ds.json --json", "resolve --json"],
    "check": [
        "check none.json --json",
        "check bad.json ds.json --fail-on x --format=json",
        "check --json --none",
    ],
    "diff": [
        "diff ds.json none.json --json",
        "diff ds.json bad.json --format json",
        "diff ds.json --json",
    ],
    "match": [
        "match none.args none.args --json",
        "match launch.args ds.json --json",
        "match --json",
    ],
    "drift": ["drift none.json --json", "drift ds.json --from-version 1 --json", "drift --json"],
    "layout": ["layout none.json --json", "layout ds.json --ranks 0 --json", "layout --json"],
    "estimate": ["estimate none.json --json", "estimate ds.json ds.json --json", "estimate --json"],
    "schedule": ["schedule none.json --json", "schedule ds.json --microbatches x --json"],
    "show": ["show none --json", "show deepspeed none --json", "show --json"],
    "fuzz": ["fuzz none --json", "fuzz merak --to none --json", "fuzz merak --examples x --json"],
    "train": ["train none.json --json", "train ds.json --model none --json", "train --json"],
    "verify": [
        "verify none.json --to megatron --json",
        "verify ds.json --json",
        "verify ds.json ds.json --json",
    ],
    "move": [
        "move none.json --checkpoint none --to native -o out --json",
        "move ds.json --to native -o out --json",
    ],
    "checkpoint inspect": ["checkpoint inspect none --json", "checkpoint inspect --json"],
    "checkpoint convert": [
        "checkpoint convert none --to safetensors -o out --json",
        "checkpoint convert none --json",
    ],
    "checkpoint diff": ["checkpoint diff none none --json", "checkpoint diff none --json"],
    "trace diff": ["trace diff none none --json", "trace diff none --json"],
    "trace show": ["trace show none --json", "trace show none --step x --json"],
}
"""Files that are not there or not good, and command lines that are wrong, of every command."""


@pytest.fixture
def said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[[str], Any]:
    """What a command prints on stdout, as data."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "launch.args").write_text(launch_text())
    (tmp_path / "piped.args").write_text(PIPED)
    (tmp_path / "ds.json").write_text(json.dumps(DS))
    (tmp_path / "bad.json").write_text(json.dumps({**DS, "zero_optimization": {"stage": 9}}))

    def call(command: str) -> Any:
        code = run(shlex.split(command))
        data = json.loads(capsys.readouterr().out)
        assert data.get("exit_code", code) == code  # `show` has nothing to find
        return data

    return call


@pytest.mark.parametrize(
    ("name", "command"), [(name, command) for name, rows in COMMANDS.items() for command in rows]
)
def test_what_is_printed_is_what_the_schema_says(
    name: str, command: str, said: Callable[[str], Any]
) -> None:
    assert not problems(name, said(command))


@pytest.mark.parametrize("command", [command for rows in WRONG.values() for command in rows])
def test_what_is_refused_says_why_in_an_object(
    command: str, said: Callable[[str], Any], tmp_path: Path
) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.stagebridge]\n")
    name = next(name for name, rows in WRONG.items() if command in rows)
    found = said(command)
    assert not problems(name, found) and found["exit_code"] == 1
    assert found["problems"] and all(found["problems"])


def test_every_command_with_an_object_is_refused_here_in_every_way() -> None:
    assert set(WRONG) == set(json_types.OUTPUTS) - {"baseline"}


def test_an_object_behind_two_dashes_is_another_commands(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["trace", "run", "--ranks", "x", "--", "python", "--json"]) == 1
    assert not capsys.readouterr().out


@pytest.mark.parametrize("name", json_types.OUTPUTS)
def test_every_output_has_a_schema_that_refuses_another_object(name: str) -> None:
    rules = judge(name)
    assert list(rules.iter_errors({})) and list(rules.iter_errors({"exit_code": 7}))


@pytest.mark.parametrize("name", json_types.OUTPUTS)
def test_the_page_tells_every_key(name: str) -> None:
    command = "check --write-baseline FILE" if name == "baseline" else f"{name} --json"
    _, found, section = (
        (HOME / "docs" / "json.md").read_text().partition(f"## `stagebridge {command}`\n")
    )
    schema = json_types.schema(name)
    names = {row["$ref"].rpartition("/")[2] for row in schema.get("anyOf", ())} - {"Refused"}
    keys = {
        key
        for part in (schema, *map(schema.get("$defs", {}).get, names))
        for key in part.get("properties", ())
    }
    assert (
        found
        and keys
        and not [key for key in keys if f"`{key}`" not in section.partition("\n## ")[0]]
    )


def test_a_schema_is_printed_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["schema", "convert"]) == 0
    assert json.loads(capsys.readouterr().out) == json_types.schema("convert")
    assert run(["schema"]) == 0
    assert capsys.readouterr().out.split("\n")[:-1] == list(json_types.OUTPUTS)
    assert run(["schema", "convrt"]) == 1
    assert "did you mean convert?" in capsys.readouterr().err


def test_a_baseline_is_what_its_schema_says(said: Callable[[str], Any], tmp_path: Path) -> None:
    assert run(["check", "ds.json", "--write-baseline", "known.json"]) in (0, 2)
    judge("baseline").validate(json.loads((tmp_path / "known.json").read_text()))


@pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")
def test_checkpoints_and_trainings_too(
    said: Callable[[str], Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    small = "{'train_micro_batch_size_per_gpu': 1, 'optimizer': {'type': 'AdamW', 'params': {'lr': 1e-3}}}"
    (tmp_path / "small.json").write_text(small.replace("'", '"'))
    assert (
        run(["train", "small.json", "--steps", "2", "--save", "run", "--trace", "log", "--json"])
        == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    for line in lines:
        assert not problems("train", json.loads(line))
    for name, command in {
        "checkpoint inspect": "checkpoint inspect run --tensors --json",
        "checkpoint convert": "checkpoint convert run --to safetensors -o model --json",
        "checkpoint diff": "checkpoint diff run model --json",
        "trace show": "trace show log --step 1 --json",
        "trace diff": "trace diff log log --json",
    }.items():
        judge(name).validate(said(command))
    judge("checkpoint convert").validate(
        said("checkpoint convert run --to safetensors -o again --dry-run --json")
    )
    judge("checkpoint inspect").validate(said("checkpoint inspect nothing --json"))
