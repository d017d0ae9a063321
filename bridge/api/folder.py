"""Folders of models: the shape that their config.json states."""

from __future__ import annotations

from pathlib import Path

from bridge.api.read import read_config
from bridge.api.source import Source
from bridge.errors import BridgeError, nearest
from bridge.plan.model import Model
from bridge.translation.lift import lift

CONFIG = "config.json"


def is_folder(model: str) -> bool:
    """Return whether the value of `--model` is a folder with a model, rather than a name."""
    return (Path(model) / CONFIG).is_file()


def check_choice(option: str, value: str, choices: tuple[str, ...]) -> str:
    """Return `value` if it is one of `choices`, or the folder of a model; else raise `BridgeError`."""
    if value in choices or is_folder(value):
        return value
    expectation = f"{' or '.join(choices)}, or a folder with a {CONFIG}"
    raise BridgeError(f"{option}: found {value}, expected {expectation}{nearest(value, choices)}")


def model_in(folder: str) -> Model:
    """The shape of the model in a folder."""
    return lift(read_config(Source(str(Path(folder) / CONFIG)))).model
