"""Files that transformers reads together with weights: the model's config, its generation config, and its tokenizer."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from bridge.checkpoint.files import File
from bridge.checkpoint.hub import Hub
from bridge.checkpoint.model_facts import describe_config, establish_model
from bridge.errors import BridgeError, SourceError
from bridge.files.contained import read_bytes
from bridge.stack import registry
from bridge.stack.checkpoint_side import side_of
from bridge.translation.translate import translate

CONFIG = "config.json"
"""The name of the config that transformers saves beside weights."""
KIND = "model_type"
"""Key of a config by which transformers finds the model's class."""
WITHOUT_EFFECT = ("micro_batch_size", "model.init", "init_method")
"""Fields that say nothing about a model whose weights are given."""
QUANTIZATION = "quantization_config"
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


def companions(place: Path, given: Path | None, hub: Hub) -> Companions:
    """Return the files that go with the weights of the checkpoint `hub` in the folder `place`.

    They lie next to the config that the user gives, else next to the one that lies with the checkpoint. If
    there is none, a config is made of the arguments of the run, if the checkpoint has them.
    """
    config = given or config_beside(place)
    if config is None and os.path.lexists(place / CONFIG):
        return Companions(notes=(f"not copied: {place / CONFIG}: found no regular file",))
    if config is None and (made := _config_of_record(hub)) is not None:
        return made
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
    files, notes = [File(CONFIG, (_without_quantization(text),))], list[str]()
    for name in NAMES:
        path = config.parent / name
        # A pipe, a device or a link that leads nowhere is named, as what is there is not copied.
        if os.path.lexists(path):
            try:
                files.append(File(name, (read_bytes(path, config.parent, MOST),)))
            except SourceError as error:
                notes += [f"not copied: {problem}" for problem in error.problems]
    return Companions(tuple(files), config.parent, tuple(notes))


def _config_of_record(hub: Hub) -> Companions | None:
    """Return the config of transformers that the arguments of a run in a checkpoint come to, held against
    its weights, or why there is none; None if it has no arguments.
    """
    try:
        found = (
            (name, side_of(registry.load(name)).config_of_record(hub)) for name in registry.OWN
        )
        stack, config = next(((name, config) for name, config in found if config), ("", None))
        if config is None:
            return None
        result = translate(config, registry.load("huggingface"))
        lost = [
            f"{finding.path}: {finding.message}"
            for finding in result.findings
            if finding.matters and not finding.path.startswith(WITHOUT_EFFECT)
        ]
        facts = describe_config(result.config)
        BridgeError.raise_if([*lost, *facts.refused])
        place = f"the arguments of {stack} in the checkpoint"
        establish_model(hub, [(place, facts)])
    except BridgeError as error:
        line = f"no {CONFIG} is made of the run's arguments, as it would not say all: {error}; use --config FILE"
        return Companions(notes=(line,))
    text = result.written.text
    note = f"{CONFIG} is made of the arguments of {stack}; dropout is left out, and there is no tokenizer"
    return Companions((File(CONFIG, (text.encode(),)),), None, (note,))


def _without_quantization(text: bytes) -> bytes:
    """Return a config without the way in which weights were quantized, as those that are written are not."""
    data = json.loads(text)
    if data.pop(QUANTIZATION, None) is None:
        return text
    return json.dumps(data, indent=2).encode() + b"\n"


def is_of_transformers(text: bytes) -> bool:
    """Return whether a text is a config by which transformers finds a model's class."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(data, dict) and isinstance(data.get(KIND), str)
