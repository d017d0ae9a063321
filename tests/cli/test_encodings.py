"""Output in every encoding: what a command prints in UTF-8, with characters that the encoding lacks in ASCII.

    python tests/cli/test_encodings.py FOLDER [ENCODING ...]

makes the inputs in FOLDER, and runs every command, also those that train, in a process of its own for every encoding.
"""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from typer.main import get_command

from bridge.cli import main, terminal
from bridge.cli.app import app
from bridge.cli.demo import launch_text

pytestmark = pytest.mark.once

ENCODINGS = ("ascii", "latin-1", "cp1252", "cp437", "utf-16", "koi8-r")
NAME = "größe_数据.json"
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 1.0,
    "disable_allgather": True,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "tensorboard": {"enabled": True, "output_path": "журнал→", "job_name": "größe"},
}
EIGHT = ("--world-size", "8")
LIGHT: dict[str, tuple[str, ...]] = {
    "help": ("help", "check"),
    "convert": ("convert", NAME, "--to", "megatron", *EIGHT),
    "convert, a file": (
        "convert",
        "launch.args",
        "--to",
        "deepspeed",
        *EIGHT,
        "-o",
        "gewählt→.json",
        "--force",
    ),
    "check": ("check", NAME, "launch.args", *EIGHT, "--all"),
    "check, JSON": ("check", NAME, "--json", *EIGHT),
    "check, GitHub": ("check", NAME, "--format", "github", "--fail-on", "memory", *EIGHT),
    "check, SARIF": ("check", NAME, "--format", "sarif", *EIGHT),
    "check, refused": ("check", "fälsch.json"),
    "check, wrong usage": ("check", "--größe"),
    "diff": ("diff", NAME, "launch.args", *EIGHT, "--all"),
    "match": ("match", "launch.args", "launch.args"),
    "drift": ("drift", NAME, "--from-version", "0.16.3", *EIGHT),
    "resolve": ("resolve", NAME, *EIGHT),
    "schema": ("schema", "convert"),
    "layout": ("layout", "launch.args", "--vocab", "32000", *EIGHT),
    "estimate": ("estimate", "launch.args", "--vocab", "32000", "--memory", "0.1", *EIGHT),
    "show": ("show", "megatron", "lr"),
    "show, a stack": ("show", "deepspeed"),
    "show, a schema": ("show", "deepspeed", "--schema"),
    "schedule": ("schedule", "launch.args", *EIGHT, "--microbatches", "4"),
    "demo": ("demo", "--no-train", "-o", "größe"),
}
"""Commands that need neither torch nor much time."""
SAMPLE = ("check", "check, GitHub", "check, refused", "check, wrong usage", "layout", "show")
"""Cases of the suite; the others take the same way out, and are run by hand."""
HEAVY: dict[str, tuple[str, ...]] = {
    "fuzz": ("fuzz", "merak", "--examples", "2"),
    "demo, training": ("demo", "-o", "größe"),
    "train": (
        "train",
        NAME,
        "--steps",
        "2",
        "--fit",
        "--save",
        "größe/run",
        "--trace",
        "größe/trace",
        "--world-size",
        "1",
    ),
    "verify": ("verify", NAME, "--to", "megatron", "--steps", "1", *EIGHT),
    "move": (
        "move",
        NAME,
        "--checkpoint",
        "größe/run",
        "--to",
        "native",
        "-o",
        "größe/moved",
        "--world-size",
        "1",
    ),
    "inspect": ("checkpoint", "inspect", "größe/run", "--tensors"),
    "checkpoint convert": (
        "checkpoint",
        "convert",
        "größe/run",
        "--to",
        "safetensors",
        "-o",
        "größe/weights",
    ),
    "checkpoint diff": ("checkpoint", "diff", "größe/run", "größe/weights"),
    "trace show": ("trace", "show", "größe/trace"),
    "trace diff": ("trace", "diff", "größe/trace", "größe/trace"),
    "trace html": ("trace", "html", "größe/trace", "-o", "größe/page.html"),
    "trace watch": ("trace", "watch", "größe/trace"),
    "trace export": ("trace", "export", "größe/trace", "-o", "größe/board"),
    "trace run": (
        "trace",
        "run",
        "--run",
        "größe/watched",
        "--",
        sys.executable,
        "-c",
        "print(ascii('größe'))",
    ),
}
"""In the order in which they need each other."""
VARYING = re.compile(
    r"(?m)^ *\d+% .*\n|\d+(\.\d+)?(e-\d+)? (m?s\b|MB/s|tokens/s|[MG]iB)|pid \d+|\bin \S+ s\b|0x\w+|loss +\S+"
)


def write_inputs(folder: Path) -> None:
    (folder / NAME).write_text(json.dumps(CONFIG, ensure_ascii=False), encoding="utf-8")
    (folder / "fälsch.json").write_text(
        '{"train_batch_size": "größe", "steps_per_print": "数据"}', encoding="utf-8"
    )
    (folder / "launch.args").write_text(launch_text(), encoding="utf-8")


def in_ascii(text: str, encoding: str) -> str:
    """What `text` has to become: characters that the encoding has, and ASCII for the others."""
    lacking = {letter for letter in text if not encodable(letter, encoding)}
    plain = {
        letter: terminal.PLAIN.get(letter, terminal.escape_character(letter)) for letter in lacking
    }
    return "".join(plain.get(letter, letter) for letter in text)


def encodable(letter: str, encoding: str) -> bool:
    try:
        letter.encode(encoding)
    except UnicodeEncodeError:
        return False
    return True


def judge(said: bytes, usual: bytes, encoding: str) -> None:
    """A converted file on stdout is UTF-8 for every reader; everything else is text in the encoding."""
    if said != usual:
        shown, wanted = said.decode(encoding), in_ascii(usual.decode(), encoding)
        assert VARYING.sub("", shown) == VARYING.sub("", wanted)


def print_in(
    encoding: str, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> tuple[object, bytes, bytes]:
    """The exit code of a command in this process, and what it prints on stdout and stderr."""
    streams = [
        io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True) for _ in range(2)
    ]
    monkeypatch.setattr("sys.stdout", streams[0])
    monkeypatch.setattr("sys.stderr", streams[1])
    monkeypatch.setattr("sys.argv", ["stagebridge", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code, *(stream.buffer.getvalue() for stream in streams)  # type: ignore[attr-defined]


@pytest.mark.parametrize("case", SAMPLE)
def test_every_encoding_gets_the_same_text(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    usual = print_in("utf-8", LIGHT[case], monkeypatch)
    for encoding in ("ascii", "utf-16"):
        code, *said = print_in(encoding, LIGHT[case], monkeypatch)
        assert code == usual[0]
        for one, other in zip(said, usual[1:], strict=True):
            judge(one, other, encoding)


def test_boxes_and_names_in_ascii(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    table = print_in("ascii", LIGHT["layout"], monkeypatch)[1].decode("ascii")
    assert re.search(r"^ -{40,}$", table, re.MULTILINE)
    _, out, err = print_in("ascii", LIGHT["check, refused"], monkeypatch)
    assert (
        rb"error: f\xe4lsch.json: line 1: train_batch_size: found 'gr\xf6\xdfe'" in err
        and out == b""
    )


def test_a_converted_file_on_stdout_is_as_o_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_inputs(tmp_path)
    (tmp_path / "names.yaml").write_text("run: {experiment_name: größe_数据}\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    words = ("convert", "names.yaml", "--from", "fast_llm", "--to", "fast_llm", *EIGHT)
    out = print_in("latin-1", words, monkeypatch)[1]
    print_in("latin-1", (*words, "-o", "out.yaml"), monkeypatch)
    assert out and out == (tmp_path / "out.yaml").read_bytes()


def test_every_command_is_among_the_cases() -> None:
    tried = {
        words[:2] if words[0] in ("checkpoint", "trace") else words[:1] for words in EVERY.values()
    }
    assert leaves(get_command(app)) == tried


EVERY = {**LIGHT, **HEAVY}


def leaves(command: object, before: tuple[str, ...] = ()) -> set[tuple[str, ...]]:
    inner = getattr(command, "commands", None)
    return (
        {before}
        if inner is None
        else set().union(*(leaves(one, (*before, name)) for name, one in inner.items()))
    )


def run_all(folder: Path, encodings: Sequence[str]) -> Iterator[str]:
    """Run every command in every encoding, and yield a line for each that is wrong."""
    usual: dict[str, subprocess.CompletedProcess[bytes]] = {}
    subprocess.run(
        [sys.executable, "-P", "-m", "stagebridge", "--version"], check=True
    )  # it has to be installed
    for encoding in ("utf-8", *encodings):
        place = folder / encoding
        place.mkdir(parents=True)
        write_inputs(place)
        for case, words in EVERY.items():
            variables = {**os.environ, "PYTHONIOENCODING": encoding, "OMP_NUM_THREADS": "1"}
            command = [sys.executable, "-P", "-m", "stagebridge", *words]
            done = subprocess.run(
                command, cwd=place, env=variables, capture_output=True, check=False
            )
            told = usual.setdefault(case, done)
            try:
                assert (
                    done.returncode == told.returncode
                    and b"Traceback" not in done.stderr.replace(b"\0", b"")
                )
                judge(done.stdout, told.stdout, encoding)
                judge(done.stderr, told.stderr, encoding)
            except (AssertionError, UnicodeDecodeError) as error:
                yield f"{encoding}: {case}: {done.returncode}, expected {told.returncode}: {error}"
            print(f"{encoding}: {case}: {done.returncode}", flush=True)


if __name__ == "__main__":
    chosen, wrong = sys.argv[2:] or ENCODINGS, 0
    for line in run_all(Path(sys.argv[1]), chosen):
        wrong += 1
        print(f"wrong: {line}", flush=True)
    print(f"{len(EVERY)} commands in {len(chosen)} encodings: {wrong} wrong")
    sys.exit(bool(wrong))
