"""Files that transformers reads together with weights: the model's config, its generation config, and its tokenizer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from bridge.checkpoint.files import File
from bridge.errors import SourceError
from bridge.files.contained import read_bytes

CONFIG = "config.json"
"""The name of the config that transformers saves beside weights."""
KIND = "model_type"
"""Key of a config by which transformers finds the model's class."""
NAMES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "chat_template.jinja",
    "chat_template.json",
)
MOST = 2**28
"""Largest size in bytes of one of these files."""


@dataclass(frozen=True)
class Companions:
    """The files to copy, the folder that they come from, and what a person has to know of those that are not copied."""

    files: tuple[File, ...] = ()
    folder: Path | None = None
    notes: tuple[str, ...] = ()


def config_beside(place: Path) -> Path | None:
    """Return the config in the folder of a checkpoint, or in the folder around it; None if there is none."""
    return next((path for path in (place / CONFIG, place.parent / CONFIG) if path.is_file()), None)


def companions(place: Path, config_path: Path | None) -> Companions:
    """Return the files that go with the weights of the checkpoint in the folder `place`.

    They lie next to the config that the user gives, else next to the one that lies with the checkpoint.
    """
    config = config_path or config_beside(place)
    if config is None:
        line = f"no {CONFIG} lies next to the source, so none is written; transformers needs one: --config FILE"
        return Companions(notes=(line,))
    try:
        text = read_bytes(config, config.parent, MOST)
    except SourceError as error:
        return Companions(notes=tuple(f"not copied: {problem}" for problem in error.problems))
    if not is_of_transformers(text):
        return Companions(
            notes=(f"{config}: not copied, as a {CONFIG} of transformers has the key {KIND}",)
        )
    files, notes = [File(CONFIG, (text,))], list[str]()
    for name in NAMES:
        path = config.parent / name
        if path.is_file():
            try:
                files.append(File(name, (read_bytes(path, config.parent, MOST),)))
            except SourceError as error:
                notes += [f"not copied: {problem}" for problem in error.problems]
    return Companions(tuple(files), config.parent, tuple(notes))


def is_of_transformers(text: bytes) -> bool:
    """Return whether a text is a config by which transformers finds a model's class."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(data, dict) and isinstance(data.get(KIND), str)
