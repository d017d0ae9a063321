"""Files that transformers reads together with weights: the model's config, its generation config, and its tokenizer."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from bridge.checkpoint.files import File
from bridge.checkpoint.hub import Hub
from bridge.checkpoint.model_facts import config_of_record, describe_config, establish_model
from bridge.errors import BridgeError, SourceError
from bridge.files.contained import read_bytes
from bridge.files.printable import clean
from bridge.files.secrets import HIDDEN
from bridge.files.shown import show_value
from bridge.stack import registry
from bridge.translation.translate import translate

CONFIG = "config.json"
"""The name of the config that transformers saves beside weights."""
KIND = "model_type"
"""Key of a config by which transformers finds the model's class."""
WITHOUT_EFFECT = ("micro_batch_size", "model.init", "init_method")
"""Fields that say nothing about a model whose weights are given."""
QUANTIZATION = "quantization_config"
DTYPE_KEYS = ("dtype", "torch_dtype")
"""Keys for the number format of weights, in transformers 5 and before."""
WITHOUT_WEIGHT = frozenset(("transformers_version", "_name_or_path", "use_cache", *DTYPE_KEYS))
"""Keys of a config that say nothing about the model that it describes."""
ROPE = "rope_parameters"
"""Key of the dictionary in which transformers 5 has the keys about rotary positions that were at the top."""
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
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "audio_tokenizer_config.json",
    "tekken.json",
)
FURTHER = (
    "*.py",
    "*.jinja",
    "*.model",
    "*.spm",
    "*.tiktoken",
    "adapter_*",
    "additional_chat_templates",
    "custom_generate",
)
"""Files and folders that loaders of transformers may read too: code, tokenizers with names of their own,
adapters, and further templates.
"""
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
    paths = (place / CONFIG, place.parent / CONFIG)
    return next((path for path in paths if os.path.exists(path)), None)


def companions(place: Path, given: Path | None, hub: Hub, dtype: str | None) -> Companions:
    """Return the files that go with the weights of the checkpoint `hub` in the folder `place`. `dtype` is
    the number format that was asked for, by its name in torch.

    They lie next to the config that the user gives, else next to the one that lies with the checkpoint. If
    there is none, a config is made of the arguments of the run, if the checkpoint has them.
    """
    config = given or config_beside(place)
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
    files, notes = [File(CONFIG, (_config_of_weights(text, dtype),))], list[str]()
    for name in NAMES:
        path = config.parent / name
        # A pipe, a device or a link that leads nowhere is named, as what is there is not copied.
        if os.path.lexists(path):
            try:
                files.append(File(name, (read_bytes(path, config.parent, MOST),)))
            except SourceError as error:
                notes += [f"not copied: {problem}" for problem in error.problems]
    rest = sorted(
        path.name
        for path in config.parent.iterdir()
        if path.name not in NAMES and any(fnmatch(path.name, form) for form in FURTHER)
    )
    if rest:
        notes.append(
            f"not copied from {config.parent}: {', '.join(map(clean, rest))}; copy what the model needs"
        )
    return Companions(tuple(files), config.parent, tuple(notes))


def _config_of_record(hub: Hub) -> Companions | None:
    """Return the config of transformers that the arguments of a run in a checkpoint come to, held against
    its weights, or why there is none; None if it has no arguments.
    """
    try:
        config = config_of_record(hub)
        if config is None:
            return None
        stack = config.dialect.name
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


def _config_of_weights(text: bytes, dtype: str | None) -> bytes:
    """Return a config without the way in which weights were quantized, as those that are written are not,
    and with their number format if one was asked for: from_pretrained converts weights to that of the config.
    """
    data, said = json.loads(text), json.loads(text)
    data.pop(QUANTIZATION, None)
    data |= {key: dtype for key in DTYPE_KEYS if dtype is not None and key in data}
    return text if data == said else json.dumps(data, indent=2).encode() + b"\n"


def refuse_contradictions(own: Path, given: Path) -> None:
    """Raise `BridgeError` with each key for which two configs of transformers have different values: the one
    with a checkpoint, and the one that the user gives. Some of these keys no model known here reads.
    """
    texts = [path.read_bytes() for path in (own, given)]
    if not all(map(is_of_transformers, texts)):
        return
    one, other = (_flat_config(text) for text in texts)
    pairs = {
        key: (value, one[key])
        for key, value in other.items()
        if None not in (value, one.get(key)) and value != one[key]
    }
    BridgeError.raise_if(
        f"{given}: {key}: found {show_value(value)}, but {own}: {show_value(there)}; name the config that"
        " belongs to this checkpoint, or leave --config out"
        for key, (value, there) in HIDDEN.within(pairs).items()
    )


def _flat_config(text: bytes) -> dict[str, Any]:
    data = json.loads(text)
    rope = data.pop(ROPE, None)
    flat = {**data, **(rope if isinstance(rope, dict) else {})}
    return {key: value for key, value in flat.items() if key not in WITHOUT_WEIGHT}


def is_of_transformers(text: bytes) -> bool:
    """Return whether a text is a config by which transformers finds a model's class."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(data, dict) and isinstance(data.get(KIND), str)
