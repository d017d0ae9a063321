"""The main job on a bundled launch: Megatron to DeepSpeed and back, with the report and the files."""

from __future__ import annotations

import json
import sys
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

import compat
from bridge import carry, report
from bridge.cli.convert import beside, console, text_for
from bridge.dialect import Config
from bridge.errors import SourceError, TranslationError
from bridge.files import parse, read_text, write_all
from bridge.translation import Result, translate

if TYPE_CHECKING:
    from rich.console import Console

LAUNCH = "megatron.args"
RANKS = 8
CONTENTS = {
    LAUNCH: "the launch that was converted",
    "deepspeed.json": "the DeepSpeed config",
    "deepspeed.json.carry.json": "what DeepSpeed cannot say; the way back reads it",
    "report.json": "the report, for programs",
}


def demo(folder: Path) -> int:
    """Convert the bundled launch to DeepSpeed and back, write all files into `folder`; the exit code."""
    source = bundled()
    there = translate(source, compat.load("deepspeed"), world_size=RANKS)
    _write(folder, there)
    back = returned(folder / "deepspeed.json", source)
    out = console(sys.stdout)
    report.text(there, out)
    _tell(folder, source, back, out)
    return report.CLEAN


def bundled() -> Config:
    """The bundled launch, read by the Megatron dialect."""
    text = files("bridge.cli.demo").joinpath(LAUNCH).read_text(encoding="utf-8")
    return compat.load("megatron").read(parse(text, LAUNCH, ".args"), world_size=RANKS)


def returned(path: Path, source: Config) -> Config:
    """The written DeepSpeed config converted back to Megatron, with the carry-over beside it."""
    sidecar = beside(path)
    kept = carry.parse(read_text(sidecar), str(sidecar))
    config = compat.load("deepspeed").read(path, world_size=RANKS)
    return translate(config, source.dialect, source.version, RANKS, kept).config


def _write(folder: Path, there: Result) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SourceError(f"{folder}: cannot be created ({error.strerror}); name another folder") from None
    path = folder / "deepspeed.json"
    text = text_for(there, path)
    write_all(
        {
            folder / LAUNCH: files("bridge.cli.demo").joinpath(LAUNCH).read_text(encoding="utf-8"),
            path: text,
            beside(path): there.carry.text(text),
            folder / "report.json": json.dumps(report.as_json(there), indent=2, allow_nan=False) + "\n",
        }
    )


def _tell(folder: Path, source: Config, back: Config, out: Console) -> None:
    if back.given != source.given:
        raise TranslationError(f"{folder}: the way back did not give {LAUNCH} again; this is a defect, please report it")
    out.print(f"\nWritten to {folder}:", markup=False)
    for name, content in CONTENTS.items():
        out.print(f"  {name:26} {content}", markup=False)
    out.print(f"\nConverted back with the carry-over: all {len(back.given)} settings of {LAUNCH} came back equal.")
