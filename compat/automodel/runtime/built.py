"""Builds the model that a recipe names: from a folder on this machine, or from a config with random
weights. Nothing is downloaded.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bridge.engine.formats import TORCH, name_of
from bridge.engine.models.pretrained import build_model
from bridge.errors import BridgeError, ConfigError, SourceError
from bridge.files import existing_path
from bridge.stack.findings import Finding
from bridge.stack.rules import Effect
from compat.automodel.runtime.sections import TARGET, Section
from compat.automodel.setting_types import DTYPES

LOADED, MADE = "from_pretrained", "from_config"
CLASSES = ("NeMoAutoModelForCausalLM", "AutoModelForCausalLM")
NAME = "pretrained_model_name_or_path"
CONFIG, WORDS = (
    "config.json",
    ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json"),
)
HEARD = (
    NAME,
    "torch_dtype",
    "attn_implementation",
    "trust_remote_code",
    "use_cache",
    "config",
    "backend",
)
AUTO = "auto"


def folder(name: str, where: str, files: Sequence[str] = (CONFIG,)) -> Path:
    """Return the folder of the model `name`: a folder that the recipe may read, or the model's
    folder in the local cache of Hugging Face.

    Raises `SourceError` if there is no such folder. `where` is the setting that the error names.
    """
    for file in files:
        path = existing_path(os.path.join(name, file))
        if path is not None:
            return path.parent
    from transformers.utils.hub import cached_file

    try:
        place = cached_file(name, CONFIG, local_files_only=True)
    except (OSError, ValueError):
        place = None
    if place is None:
        raise SourceError(
            f"{where}: {name} is not on this machine, and nothing is downloaded; give a folder with its {files[0]}, or train the"
            " file's plan on a small model with --model tiny"
        )
    return Path(place).parent


def model(section: Section, seed: int) -> tuple[nn.Module, str, tuple[Finding, ...]]:
    """Return the model that the section `model` names, the number format of the model, and findings
    for settings that have no effect on the model. Random weights depend on `seed`. Raises
    `BridgeError`.
    """
    kind, _, way = str(section.get(TARGET)).rpartition(".")
    if kind.rpartition(".")[2] not in CLASSES or way not in (LOADED, MADE):
        targets = " or ".join(f"{name}.{each}" for name in CLASSES for each in (LOADED, MADE))
        raise ConfigError(
            f"model.{TARGET}: found {section.get(TARGET)}, expected {targets}; or use --model tiny"
        )
    place = folder(str(section[NAME]), f"model.{NAME}") if section.get(NAME) else None
    config, dtype = (
        _build_config(section, place),
        section.get("torch_dtype") or (AUTO if way == LOADED else "bf16"),
    )
    formats: Mapping[str, torch.dtype] = TORCH  # type: ignore[assignment]
    storage = getattr(config, "dtype", None) or torch.float32
    dtype = name_of(storage, "model.torch_dtype") if dtype == AUTO else DTYPES.get(dtype, dtype)
    return (
        _build_model(section, place if way == LOADED else None, config, formats[dtype], seed),
        dtype,
        tuple(_find_idle_keys(section, config)),
    )


def _build_config(section: Section, place: Path | None) -> Any:
    """Return the model's config, with the overrides of the section. The config comes from the
    model's folder, or from the class or family in `model.config`.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    settings = dict(section.get("config") or {})
    target, family, name = (
        str(settings.pop(TARGET, "")),
        settings.pop("model_type", None),
        settings.pop(NAME, None),
    )
    if name is not None:
        place = folder(name, f"model.config.{NAME}")
    try:
        if place is not None:
            config = AutoConfig.from_pretrained(place, local_files_only=True)
        else:
            config = AutoConfig.for_model(family or _family(target), **settings)
    except (OSError, ValueError, TypeError, StrictDataclassError) as error:
        why = " ".join(str(error).split())
        raise SourceError(
            f"model.config: transformers cannot make a config from this section ({why})"
        ) from error
    for key, value in settings.items():
        setattr(config, key, value)
    return config


def _family(target: str) -> str:
    """Return the family of a config class of transformers, found by the name of the class."""
    from transformers.models.auto import configuration_auto

    name = target.rpartition(".")[2]
    mapping: Mapping[str, str] = vars(configuration_auto)["CONFIG_MAPPING_NAMES"]
    match = next((family for family, kind in mapping.items() if kind == name), None)
    if match is None:
        raise ConfigError(
            f"model.config.{TARGET}: found {target or 'nothing'}, expected a config class of transformers, such as"
            f" transformers.LlamaConfig, or model.{NAME} with a folder; or use --model tiny"
        )
    return match


def _build_model(
    section: Section, place: Path | None, config: Any, dtype: torch.dtype, seed: int
) -> Any:
    more: dict[str, Any] = {"dtype": dtype}
    if section.get("attn_implementation"):
        more["attn_implementation"] = section["attn_implementation"]
    try:
        return build_model(place, config, seed, **more)
    except (OSError, ValueError, ImportError) as error:
        raise SourceError(
            f"model: transformers cannot build the model ({str(error).splitlines()[0]})"
        ) from error


def _find_unread(settings: Mapping[str, Any], config: Any) -> Iterator[str]:
    """Yield the keys of the section `model.config` that the config class does not have."""
    kind = type(config)
    values = {
        key: value for key, value in settings.items() if key not in (TARGET, "model_type", NAME)
    }
    for key in (key for key in values if not hasattr(kind(), key)):
        whole = kind(**values).to_dict()
        rest = kind(**{name: value for name, value in values.items() if name != key}).to_dict()
        if rest == {name: value for name, value in whole.items() if name != key}:
            yield key


def _find_idle_keys(section: Section, config: Any) -> Iterator[Finding]:
    for key in _find_unread(section.get("config") or {}, config):
        message = f"{type(config).__name__} does not have this key, so nothing reads it"
        yield Finding(f"model.config.{key}", message, Effect.NONE, True)
    if section.get("trust_remote_code"):
        yield Finding(
            "model.trust_remote_code",
            "code from a model's folder is never run",
            Effect.NONE,
            True,
            before=True,
        )
    backend: Mapping[str, Any] = section.get("backend") or {}
    for name, value in backend.items():
        message = "only AutoModel's own models read this setting; here transformers' model runs"
        yield Finding(f"model.backend.{name}", message, Effect.ROUNDING, True, before=value)
    for name, value in section.items():
        if name not in (*HEARD, TARGET):
            yield Finding(
                f"model.{name}",
                "the native engine does not know this setting",
                Effect.NUMBERS,
                True,
                before=value,
            )


def tokenizer(section: Section, data: Section, path: str) -> Any:
    """Return the tokenizer of a data set. If the section of the data set names none, the tokenizer
    of the model is used. Raises `BridgeError`.
    """
    from transformers import AutoTokenizer

    own = data.get("tokenizer")
    settings = own if isinstance(own, Mapping) else {}
    config: Mapping[str, Any] = section.get("config") or {}
    name = settings.get(NAME) or section.get(NAME) or config.get(NAME)
    if not name:
        raise ConfigError(
            f"{path}.tokenizer.{NAME}: missing, and the model has no folder; give the folder of a"
            " tokenizer"
        )
    more = {
        key: value
        for key, value in settings.items()
        if key not in (TARGET, NAME, "trust_remote_code")
    }
    place = folder(str(name), f"{path}.tokenizer", WORDS)
    try:
        instance: Any = AutoTokenizer.from_pretrained(place, local_files_only=True, **more)
    except (OSError, ValueError, TypeError) as error:
        raise SourceError(
            f"{place}: transformers cannot load a tokenizer from this folder ({str(error).splitlines()[0]})"
        ) from error
    if not callable(instance) or not len(instance):
        raise BridgeError(f"{place}: the tokenizer has no vocabulary; add a tokenizer.json")
    return instance
