"""The demo: a bundled Megatron launch is converted to DeepSpeed and back, with report and files;
then its plan is trained.
"""

from __future__ import annotations

import json
import sys
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from bridge.api.convert import files_to_write, sidecar_of, translate_source
from bridge.cli.job import Job
from bridge.errors import SourceError, TranslationError
from bridge.files import write_all
from bridge.report import as_json, as_text
from bridge.report.console import console
from bridge.report.exit_codes import Exit
from bridge.stack import registry
from bridge.stack.dialect import Config
from bridge.translation.lift import lift
from bridge.translation.sidecar_beside import Sidecar

if TYPE_CHECKING:
    from rich.console import Console

RANKS = 8
LAUNCH, TARGET, BACK = "megatron.args", "ds_config.json", "back.args"
CONTENTS = {
    LAUNCH: "the launch that was converted",
    TARGET: "the DeepSpeed config",
    "ds_config.code.json": "settings that a training script for DeepSpeed has to make, as JSON",
    "ds_config.code.py": "the same settings as Python, to paste into the script",
    f"{TARGET}.carry.json": "settings that DeepSpeed cannot express; the conversion back reads this file",
    BACK: "the launch again, converted back",
    "report.json": "the report, for programs",
    "zero3.json": "a file of Hugging Face's Trainer, to try --auto-from on",
    "args.json": "TrainingArguments for it",
}


def demo(
    folder: Path, train: bool = True, silence: float | None = None, timeout: float | None = None
) -> int:
    """Convert the bundled launch to DeepSpeed and back, write all files into `folder`, and train
    it. Returns the exit code.

    A rank that is silent is named after `silence` seconds, and given up after `timeout` seconds;
    None: the default limits.
    """
    _make_folder(folder)
    write_all(
        {
            folder / LAUNCH: launch_text(),
            **{folder / name: bundled_text(name) for name in ("zero3.json", "args.json")},
        }
    )
    result = translate_source(
        _demo_job(folder / LAUNCH), registry.load("deepspeed"), None, Sidecar()
    )
    texts = {
        **files_to_write(result, folder / TARGET, with_carry=True),
        folder / "report.json": json.dumps(as_json.as_json(result), indent=2, allow_nan=False)
        + "\n",
    }
    write_all(texts)
    out = console(sys.stdout)
    as_text.text(result, out, files=tuple(texts))
    # From the files, as a user would: what was not written cannot come back.
    there = _demo_job(folder / TARGET)
    back = translate_source(there, result.source.dialect, result.source.version, sidecar_of(there))
    write_all(files_to_write(back, folder / BACK, with_carry=False))
    _print_demo(folder, result.source, back.config, out)
    if train:
        from bridge.cli.demo import training

        training.train_demo(lift(result.config), folder, out, silence, timeout)
    return Exit.CLEAN


def launch_text() -> str:
    """Return the text of the bundled launch."""
    return bundled_text(LAUNCH)


def bundled_text(name: str) -> str:
    """Return the text of a bundled file."""
    return files("bridge.cli.demo").joinpath(name).read_text(encoding="utf-8")


def _demo_job(file: Path) -> Job:
    return Job(str(file), world_size=RANKS)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SourceError(
            f"{folder}: cannot be created ({(error.strerror or '').lower()}); name another folder"
        ) from None


def _print_demo(folder: Path, source: Config, back: Config, out: Console) -> None:
    if back.given != source.given:
        raise TranslationError(
            f"{folder}: the conversion back did not restore {LAUNCH}; this is a defect, please report it"
        )
    out.print(f"\nWritten to {folder}:", markup=False)
    for name, content in CONTENTS.items():
        out.print(f"  {name:26} {content}", markup=False)
    out.print(
        f"\nConverted back with the carry-over: all {len(back.given)} settings of {LAUNCH} came back equal."
    )
