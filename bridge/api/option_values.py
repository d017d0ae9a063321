"""Values that options give: pairs, and files of the Trainer's arguments and of models."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from bridge.errors import BridgeError
from bridge.files import Call, find_calls, load_call, parse, read_text, scalar
from bridge.plan.section import nest
from bridge.stack import registry
from bridge.stack.program_source import CHANGES, CLASSES, sort_changes
from bridge.stack.sources import Placed, Said
from bridge.stack.training_arguments import ARGUMENTS, RETIRED, TRL, default_of_trl

YAML = (".yaml", ".yml")
HOST_FILE = "deepspeed"
"""The argument of Hugging Face's Trainer that names the file of a stack, and that stack."""
UNREAD = frozenset(
    ["output_dir", "logging_dir", "run_name", "report_to", "hub_model_id", "hub_token"]
)
"""Arguments of the Trainer that no training step depends on, and that programs often compute."""


def trainer_arguments(texts: Sequence[str]) -> dict[str, Any]:
    """Return arguments of Hugging Face's Trainer. Each text in `texts` is NAME=VALUE, or the path of a
    JSON file with such arguments.
    """
    arguments = Placed({}, {})
    for words in texts:
        # A path may have an equals sign in it: a file that is there is read.
        if "=" in words and not Path(words).is_file():
            pairs = parse_pairs([words], "--auto-from")
            places = {name: Said(name, value, "--auto-from") for name, value in pairs.items()}
            arguments = arguments.overlay(Placed(pairs, places))
        else:
            expectation = "expected a JSON object with TrainingArguments, or NAME=VALUE"
            arguments = arguments.overlay(
                _read_placed(Path(words), f"--auto-from {words}: {expectation}")
            )
    BridgeError.raise_if(
        f"{said.source}: line {said.line}: {name}: the program changes it after the call, and stagebridge does not run"
        f" it; {CHANGES.format(name).rpartition(', so ')[2]}"
        for name, said in arguments.unknown.items()
    )
    return arguments


def is_launcher(words: str) -> bool:
    """Return whether an operand of --auto-from is a config of a program that starts runs, such as accelerate's."""
    path = Path(words)
    suffix = path.suffix.lower()
    if suffix not in (*YAML, ".json") or not path.is_file():
        return False
    return registry.find_launcher(parse(read_text(path), words, suffix).data) is not None


def is_part(words: str) -> bool:
    """Return whether an operand of --auto-from is flags of a program, or the file of a stack that such a program starts."""
    path = Path(words)
    suffix = path.suffix.lower()
    if suffix in (*YAML, ".py") or not path.is_file():
        return False
    data = parse(read_text(path), words, suffix).data
    if not isinstance(data, Mapping):
        return isinstance(data, list) and any(str(word).startswith("--") for word in data)
    # Of arguments of the Trainer, some are keys of DeepSpeed as well.
    own = data.keys() - {*ARGUMENTS, *RETIRED}
    score = registry.score(HOST_FILE, data) if own else 0
    return bool(score and not registry.name_lookalike(HOST_FILE, data))


def _read_placed(path: Path, message: str) -> Placed:
    """Return the settings of a JSON or YAML file, or of a program's call of TrainingArguments, with their lines;
    `message` is the error for other files.
    """
    suffix = path.suffix.lower()
    document = (
        load_call(read_text(path), CLASSES, UNREAD, str(path))
        if suffix == ".py"
        else parse(read_text(path), str(path), suffix if suffix in YAML else ".json")
    )
    if not isinstance(document.data, dict):
        raise BridgeError(message)
    usual = [
        default_of_trl(call.name, document.data) for call in _find_calls(path, TRL["defaults"])
    ]
    said = Placed(
        document.data,
        {
            name: Said(name, value, str(path), document.line(name))
            for name, value in document.data.items()
        },
    )
    said = usual[0].overlay(said) if usual else said
    for call in _find_calls(path, CLASSES):
        values, unread = sort_changes(call, str(path), HOST_FILE in document.data)
        said = said.overlay(Placed({name: one.value for name, one in values.items()}, values))
        said.unknown |= unread
    return said


def _find_calls(path: Path, names: Collection[str]) -> tuple[Call, ...]:
    return find_calls(read_text(path), names) if path.suffix == ".py" else ()


def model_sizes(folder: Path) -> Placed:
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


def split_pair(pair: str, option: str) -> tuple[str, str]:
    """Return the two parts of a value of `option`. Raises `BridgeError` if `pair` is not NAME=VALUE."""
    name, equals, value = pair.partition("=")
    BridgeError.raise_if([f"{option} {pair}: expected NAME=VALUE"] if not equals else [])
    return name, value


def parse_pairs(pairs: Sequence[str] | Mapping[str, Any], option: str) -> dict[str, Any]:
    """Return the values of an option that stands for pairs; a mapping has them already."""
    if isinstance(pairs, Mapping):
        return dict(pairs)
    return {
        name: _parse_value(value, f"{option} {name}")
        for name, value in (split_pair(pair, option) for pair in pairs)
    }


def nest_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with dotted names as nested dictionaries."""
    BridgeError.raise_if(
        [
            f"--code {name}: found a value and also keys below this name ({part}); keep either the value or the keys"
            for name in settings
            for part in settings
            if part.startswith(name + ".")
        ]
    )
    return nest(settings)
