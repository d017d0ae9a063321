"""The input of a command: FILE and the options for reading it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bridge.errors import BridgeError, nearest
from bridge.files import parse, read_text, scalar
from bridge.plan.section import nest
from bridge.stack.effects import Effect
from bridge.stack.sources import Placed, Said


@dataclass(frozen=True)
class Job:
    """The file to read, and the options for reading it.

    A `loose` job is one of several jobs with the same options, so options that the stack of its file
    does not have are left out.
    `text` is the content of the file, or None before the file is opened. `typed` are the options that
    the command line gives, by field; `lent` are fields that only the project's settings give, which
    are left out as well if the stack does not have them.
    """

    file: str
    dialect: str | None = None
    version: str | None = None
    world_size: int | None = None
    lenient: bool = False
    nearest: bool = False
    json: bool = False
    auto: Sequence[str] = ()
    auto_from: Sequence[str] = ()
    model: Path | None = None
    open_auto: bool = False
    code: Sequence[str] = ()
    env: Sequence[str] = ()
    launch: int | None = None
    fail_on: str | None = None
    allow: Sequence[str] = ()
    loose: bool = False
    text: str | None = None
    typed: Mapping[str, Any] = field(default_factory=dict)
    lent: Sequence[str] = ()

    def of(self, file: str, settings: Mapping[str, Any]) -> Job:
        """Return the job for a file for which the project has `settings`, by the names of options.

        The command line wins. Lists are joined, with those of the command line last, so that of two
        values with one name they win too.
        """
        fields = {
            FIELDS.get(option, option.replace("-", "_")): value
            for option, value in settings.items()
        }
        lists = {
            name: (*value, *self.typed.get(name, ())) if isinstance(value, tuple) else value
            for name, value in fields.items()
            if isinstance(value, tuple) or name not in self.typed
        }
        before = {name: Job.__dataclass_fields__[name].default for name in self.lent}
        lent = tuple(name for name in lists if name not in self.typed)
        return replace(self, file=file, lent=lent, **{**before, **self.typed, **lists})

    @property
    def file_name(self) -> str:
        """The name of the file; empty for standard input."""
        return "" if self.file == "-" else self.file

    @property
    def settings_of_options(self) -> dict[str, dict[str, Any]]:
        """Settings that options give, by the argument of `Dialect.read` that takes them."""
        settings: dict[str, Any] = {
            "auto": _parse_pairs(self.auto, "--auto"),
            "code": _nest_settings(_parse_pairs(self.code, "--code")),
            "trainer": _trainer_arguments(self.auto_from),
            "model": _model_sizes(self.model) if self.model else {},
            "open_auto": self.open_auto,
        }
        return {keyword: values for keyword, values in settings.items() if values}

    @property
    def outside(self) -> dict[str, str]:
        """Environment of a launch script, from --env."""
        return dict(_split_pair(pair, "--env") for pair in self.env)

    @property
    def threshold(self) -> Effect:
        """The least effect of a finding that changes the exit code."""
        return Effect.NUMBERS if self.fail_on is None else effect_named(self.fail_on)


def effect_named(words: str, option: str = "--fail-on") -> Effect:
    """Return the effect that `words` name in full or in part, such as `different numbers`, `memory` or `stops`."""
    name = words.lower().replace("-", " ").replace("_", " ").strip()
    effects = [effect for effect in Effect if name == effect] or [
        effect for effect in Effect if name and name in effect
    ]
    if len(effects) != 1:
        raise BridgeError(
            f"{option}: found {words!r}, expected one of {', '.join(Effect)}{nearest(name, tuple(Effect))}"
        )
    return effects[0]


def _split_pair(pair: str, option: str) -> tuple[str, str]:
    name, equals, value = pair.partition("=")
    BridgeError.raise_if([f"{option} {pair}: expected NAME=VALUE"] if not equals else [])
    return name, value


FIELDS = {"from": "dialect", "from-version": "version", "allow-path": "allow"}
"""Fields of a `Job`, by the name of the option that sets them, where the two names differ."""
YAML = (".yaml", ".yml")
OPTIONS = {"trainer": "auto-from"}
"""Names of options, by the argument of `Dialect.read` that they set, where the two names differ."""


def _trainer_arguments(texts: Sequence[str]) -> dict[str, Any]:
    """Return arguments of Hugging Face's Trainer. Each text in `texts` is NAME=VALUE, or the path of a
    JSON file with such arguments.
    """
    arguments = Placed({}, {})
    for words in texts:
        # A path may have an equals sign in it: a file that is there is read.
        if "=" in words and not Path(words).is_file():
            pairs = _parse_pairs([words], "--auto-from")
            places = {name: Said(name, value, "--auto-from") for name, value in pairs.items()}
            arguments = arguments.overlay(Placed(pairs, places))
        else:
            expectation = "expected a JSON object with TrainingArguments, or NAME=VALUE"
            arguments = arguments.overlay(
                _read_placed(Path(words), f"--auto-from {words}: {expectation}")
            )
    return arguments


def _read_placed(path: Path, message: str) -> Placed:
    """Return the settings of a JSON or YAML file, with their lines; `message` is the error for other files."""
    suffix = path.suffix.lower()
    document = parse(read_text(path), str(path), suffix if suffix in YAML else ".json")
    if not isinstance(document.data, dict):
        raise BridgeError(message)
    return Placed(
        document.data,
        {
            name: Said(name, value, str(path), document.line(name))
            for name, value in document.data.items()
        },
    )


def _model_sizes(folder: Path) -> Placed:
    """Return the sizes of a model that fill in "auto", from its config.json."""
    path = folder / "config.json" if folder.is_dir() else folder
    config = _read_placed(path, f"--model {folder}: expected the config.json of a model")
    inner = config.get("text_config")
    for section, prefix in (
        (config, ""),
        (inner if isinstance(inner, dict) else {}, "text_config."),
    ):
        for name in ("hidden_size", "hidden_sizes"):
            size = section.get(name)
            if size:
                width = max(size) if isinstance(size, list) else size
                line = config.places[prefix.rstrip(".") or name].line
                fact = f"{prefix}hidden_size"
                return Placed({fact: width}, {fact: Said(prefix + name, size, str(path), line)})
    if "model_type" in config:  # a model without a width, by which nothing can be filled in
        line = config.places["model_type"].line
        return Placed({WIDTH: None}, {WIDTH: Said(WIDTH, None, str(path), line)})
    raise BridgeError(f"{path}: has neither hidden_size nor hidden_sizes; give the model's folder")


WIDTH = "hidden_size"
"""The fact that a model tells; null where its config has none."""


def _parse_value(text: str, option: str) -> Any:
    """Return the value of an option.

    A text that begins with [ or { is read as JSON, any other text as a YAML scalar.
    """
    if not text.startswith(("[", "{")):
        return scalar(text)
    try:
        return json.loads(text)
    except ValueError:
        raise BridgeError(
            f"{option}: found {text}, expected a list in JSON, such as [0.9, 0.95]"
        ) from None


def _parse_pairs(pairs: Sequence[str], option: str) -> dict[str, Any]:
    return {
        name: _parse_value(value, f"{option} {name}")
        for name, value in (_split_pair(pair, option) for pair in pairs)
    }


def _nest_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with dotted names as nested dictionaries."""
    BridgeError.raise_if(
        f"--code {name}: found a value and also keys below this name ({part}); keep either the value or the keys"
        for name in settings
        for part in settings
        if part.startswith(name + ".")
    )
    return nest(settings)
