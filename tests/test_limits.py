"""Limits: they have a page, what is beyond one is refused by its name, and a command ends within them."""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from math import inf
from pathlib import Path
from random import Random

import pytest

import compat
from bridge import limits
from bridge.cli import run
from bridge.cli.budget import stay_within_limits
from bridge.errors import BridgeError, ConfigError, SourceError, VersionError, nearest
from bridge.files import parse
from bridge.shell import steps
from bridge.shell.regular import expression
from bridge.translation import sidecar
from bridge.translation.lift import lift
from compat.megatron import releases

pytestmark = pytest.mark.once

PAGE = Path(__file__).resolve().parents[1] / "docs" / "limits.md"
LAUNCH = "--micro-batch-size 1 --global-batch-size 8 --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
LAUNCH += "--max-position-embeddings 32 --lr 1e-3 --train-iters 10\n"


def test_their_page_names_them() -> None:
    said = " ".join(PAGE.read_text(encoding="utf-8").split())
    for words in (
        "10 s of processor time",
        f"{limits.MEMORY >> 30} GiB of memory",
        f"{limits.FILE >> 20} MiB",
        f"{limits.TEXT >> 10} KiB",
        f"{limits.VALUES:,} values",
        f"{limits.DEPTH} levels",
        "64 bits",
        f"{limits.SIDECAR >> 20} MiB",
    ):
        assert words in said, words


BEYOND: dict[str, tuple[str, str, str]] = {
    "text": ("x.yaml", "a: 1\n" * (limits.TEXT // 5 + 1), "more than 512 KiB of text"),
    "YAML values": ("x.yaml", "a: [" + "1," * limits.VALUES + "1]", "more than 20,000 values"),
    "Python values": ("x", "x = {'a': [" + "1," * limits.VALUES + "1]}", "more than 20,000 values"),
    "words": ("x.args", "--bf16 " * (limits.VALUES + 1), "more than 20,000 values"),
    "YAML tag": ("x.yaml", "a: !" + "x" * 100_000, "a tag of more than 200 characters"),
    "hexadecimal": ("x.yaml", "a: 0x" + "f" * 5000, "out of range"),
    "sexagesimal": ("x.yaml", "a: " + "1" * 5000 + ":1", "out of range"),
    "integer": ("x.json", '{"a": 9223372036854775808}', "a whole number beyond 64 bits"),
    "negative integer": ("x.yaml", "a: -9223372036854775809", "a whole number beyond 64 bits"),
    "Python expression": (
        "x",
        "x = [" + "1+" * 2000 + "1]",
        "a long expression, expected a literal",
    ),
}
"""Name of the file, its content, and what the message must say."""


def test_a_text_beyond_the_limit_is_not_searched_for_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    searched = list[int]()
    monkeypatch.setattr(
        "bridge.api.read.keep_hidden", lambda text, named=None: searched.append(len(text))
    )
    (tmp_path / "x.yaml").write_text("a" * limits.FILE)
    assert run(["check", str(tmp_path / "x.yaml")]) == 1
    assert "more than 512 KiB of text" in capsys.readouterr().err and max(searched) <= limits.TEXT


@pytest.mark.parametrize("name", BEYOND)
def test_files_beyond_a_limit(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, content, says = BEYOND[name]
    (tmp_path / file).write_text(content)
    assert run(["check", str(tmp_path / file)]) == 1
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["check", "launch.args", "--" + "x" * 5000],
        ["check", "long.args"],
        ["check", "long.args", "--lenient"],
        ["check", "long.json"],
        ["show", "megatron", "--" + "x" * 5000],
    ],
)
def test_a_name_beyond_all_names_is_shown_in_part(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("launch.args").write_text(LAUNCH)
    Path("long.args").write_text(f"{LAUNCH.strip()} --{'x' * 5000} 3\n")
    Path("long.json").write_text(
        json.dumps({"train_batch_size": 8, "zero_optimization": {"x" * 5000: 1}})
    )
    run(words)
    said = "".join(capsys.readouterr())
    assert "x" * 40 in said and said.count("x") < 200 and "…" in said


@pytest.mark.parametrize(
    "flags", ["--lr inf", "--lr nan", "--train-iters 9223372036854775808", "--seed " + "9" * 5000]
)
def test_flags_beyond_a_number(flags: str) -> None:
    option = flags.partition(" ")[0].removeprefix("--").replace("-", "_")
    with pytest.raises(BridgeError, match=f"{option}|--{option}"):
        compat.load("megatron").read(LAUNCH + flags)


@pytest.mark.parametrize(
    "flags",
    ["", "--num-experts 8 --moe-layer-freq 2", "--window-size 8,0 --window-attn-skip-freq 2"],
)
def test_layers_beyond_all_models_are_not_gone_through_one_by_one(flags: str) -> None:
    config = compat.load("megatron").read(
        LAUNCH.replace("--num-layers 4", f"--num-layers {2**62}") + flags
    )
    with pytest.raises(
        ConfigError,
        match=r"model\.layers: found 4,611,686,018,427,387,904, expected at most 20,000",
    ):
        lift(config)


def test_names_of_many_parts() -> None:
    name = "a." * 100_000 + "a"
    for dialect, words in (("fast_llm", [f"{name}=1"]), ("automodel", [f"--{name}", "1"])):
        with pytest.raises(BridgeError, match="more than 100 parts"):
            compat.load(dialect).read(words)
    assert parse(f'{{"{name}": 1}}').line(*name.split(".")) == 1


def test_many_problems_are_not_all_listed() -> None:
    with pytest.raises(ConfigError) as caught:
        compat.load("deepspeed").read(
            "{" + ",".join(f'"train_batch_siz{number}": 1' for number in range(5000)) + "}"
        )
    assert len(caught.value.problems) == limits.PROBLEMS + 1
    assert caught.value.problems[-1] == "more than 200 problems; is this the right file?"
    assert nearest("lrr", ["lr"], limits.PROBLEMS) == "; did you mean lr?"
    assert nearest("lrr", ["lr"], limits.PROBLEMS + 1) == nearest("l" * 500, ["lr"]) == ""


@pytest.mark.parametrize("version", ["9" * 5000, "1." + "9" * 300, "x" * 5000])
def test_a_release_of_many_digits(version: str) -> None:
    with pytest.raises(VersionError, match=r"unknown release .{200}…; known are") as caught:
        compat.load("deepspeed").read({}, version)
    with pytest.raises(VersionError, match=r"unknown release .{200}…; known are"):
        releases.RELEASES.place(version)
    assert len(str(caught.value)) < 2 * limits.NAME


def test_many_names_that_are_kept_with_a_remark() -> None:
    """A similar name is looked for only as long as somebody may read it."""
    source = "".join(f"distributed_{number}: 1\n" for number in range(400))
    findings = compat.load("automodel").read(source).findings
    meant = [finding.path for finding in findings if "did you mean distributed" in finding.message]
    assert (
        0
        < len(meant)
        < len([finding for finding in findings if finding.path.startswith("distributed_")])
    )


@pytest.mark.parametrize(
    "words",
    [
        ["schedule", "--csv"],
        ["schedule", "--png"],
        ["train", "--save"],
        ["train", "--trace"],
        ["demo", "--no-train", "-o"],
    ],
)
def test_only_a_converted_file_goes_to_standard_output(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("launch.args").write_text(LAUNCH)
    file = [] if words[0] == "demo" else ["launch.args"]
    assert run([words[0], *file, *words[1:], "-"]) == 1
    assert "write to standard output" in capsys.readouterr().err and os.listdir() == ["launch.args"]


@pytest.mark.parametrize(
    "command", [["convert", "--to", "deepspeed"], ["drift", "--to-version", "0.16.1"]]
)
def test_a_dash_is_standard_output(
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("launch.args").write_text(LAUNCH)
    words = [*command, "launch.args", "--world-size", "8"]
    code, plain = run(words), capsys.readouterr()
    assert run([*words, "-o", "-"]) == code and os.listdir() == ["launch.args"]
    out, err = capsys.readouterr()
    note = "note: the sidecar (OUT.carry.json) is not written, as the output is standard output; -o OUT writes both\n"
    assert out == plain.out and err == (note if command[0] == "convert" else "") + plain.err


@pytest.mark.parametrize("output", [".", "..", "/", "a" * 300, "a" * 250, "missing/x.json"])
@pytest.mark.parametrize(
    "command", [["convert", "--to", "deepspeed"], ["drift", "--to-version", "0.16.1"]]
)
def test_outputs_that_no_file_can_have(
    command: list[str],
    output: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("launch.args").write_text(LAUNCH)
    code = run([*command, "launch.args", "--world-size", "8", "-o", output])
    errors = capsys.readouterr().err
    if command[0] == "drift" and output == "a" * 250:  # no sidecar, whose name would be longer
        assert code != 1
        return
    assert code == 1
    assert re.search("found a directory|file name too long|there is no directory", errors)
    assert os.listdir() == ["launch.args"]


SIDECAR = {
    "stagebridge": 1,
    "digest": "",
    "dialect": "megatron",
    "version": "0.16.1",
    "world_size": 8,
    "entry": "flags",
}


@pytest.mark.parametrize(
    "change",
    [
        {"meant": None},
        {"given": []},
        {"given": {"tuple": [1]}},
        {"meant": {"tuple": []}},
        {"entry": {}},
        {"version": 3},
        {"world_size": -1},
        {"digest": None},
        {"original": {"text": 5}},
        {"original": {"text": "", "chosen": "1"}},
        {"given": {"a": {"tuple": 5}}},
        {"surprise": 1},
        {"given": {"a": [[[]]] * 100_000}},
    ],
)
def test_sidecars_of_another_shape(change: dict[str, object]) -> None:
    record = {**SIDECAR, "given": {}, "meant": {}}
    sidecar.parse(json.dumps(record), "x.carry.json")
    with pytest.raises(SourceError, match=r"x\.carry\.json"):
        sidecar.parse(json.dumps(record | change), "x.carry.json")
    with pytest.raises(SourceError, match=r"x\.carry\.json: "):
        sidecar.parse("[" * 100_000, "x.carry.json")


def test_a_sidecar_that_is_a_pipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.args"
    path.write_text(LAUNCH)
    os.mkfifo(sidecar.beside(path))
    assert run(["convert", str(path), "--to", "deepspeed", "--world-size", "8"]) == 1
    assert "a device or a pipe" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line, lr",
    [
        ("[[ $X =~ (a+)+$ ]] && LR=2e-3", 1e-3),
        ("[[ $X =~ ^(a|aa)+b$ ]] && LR=2e-3", 2e-3),
        ("[[ $X =~ " + "(a|a)" * 40 + "c ]] || LR=3e-3", 3e-3),
        ("[[ $X =~ " + "a?" * 40 + "c ]] || LR=3e-3", 3e-3),
        ('LR=$(echo $X | grep -cE "^((a*)*)*c")', 0.0),
        ('LR=$(echo $X | sed -E "s/(a|a)*b/7/")', 7.0),
    ],
)
def test_an_expression_with_ever_more_ways_is_read_all_the_same(line: str, lr: float) -> None:
    """Each of them has more than 2^40 ways through the text."""
    script = f"X={'a' * 60}b\nLR=1e-3\n{line}\npython pretrain_gpt.py {LAUNCH.replace('--lr 1e-3', '--lr $LR')}"
    assert compat.load("megatron").read(parse(script, suffix=".sh")).given["lr"] == lr


def test_matching_without_going_back_is_matching() -> None:
    random, compared = Random(0), 0
    while compared < 2_000:
        text = "".join(random.choice("aab1. ") for _ in range(random.randint(0, 8)))
        pattern = expression([(char, True) for char in _expression(random)], random.random() < 0.2)
        found, first = pattern.search(text), steps.first(pattern, text, 0, False)
        assert (found is None) is (first is None), pattern
        assert (
            not found
            or not first
            or (found.start() == first.start() and found.end() <= first.end())
        ), pattern
        assert bool(pattern.fullmatch(text)) is (len(text) in steps.ends(pattern, text, (0,))), (
            pattern
        )
        compared += 1


def _expression(random: Random, depth: int = 0) -> str:
    """Some regular expression."""
    kind = random.randrange(5) if depth < 4 else 0
    if kind == 0:
        return random.choice(
            (
                "a",
                "b",
                ".",
                "[ab]",
                "[^a]",
                r"\.",
                "[[:digit:]]",
                "^",
                "$",
                r"\b",
                r"\w",
                "a*",
                ".+",
                "a?",
            )
        )
    if kind in (1, 2):
        return _expression(random, depth + 1) + _expression(random, depth + 1)
    if kind == 3:
        return f"({_expression(random, depth + 1)}){random.choice(('', '*', '+', '?', '{1,2}', '{2}', '{1,}'))}"
    return f"({_expression(random, depth + 1)}|{_expression(random, depth + 1)})"


def test_time_is_up_in_a_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SECONDS", 0.05)
    monkeypatch.setattr(steps, "TRIES", inf)
    said = r"0\.05 s of processor time; following the commands of the script takes too long"
    with pytest.raises(BridgeError, match=said), stay_within_limits():
        steps.has_match(re.compile("(a+)+c"), "a" * 100)


def test_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SECONDS", 0.05)
    with (
        pytest.raises(
            BridgeError, match=r"more work than can be done in 0\.05 s of processor time"
        ),
        stay_within_limits(),
    ):
        while True:
            with suppress(Exception):  # what a careless reader does must not keep it going
                sum(range(10_000))


def test_memory_is_up() -> None:
    with (
        pytest.raises(BridgeError, match="more data than fits into 1 GiB of memory"),
        stay_within_limits(),
    ):
        bytearray(1 << 40)
