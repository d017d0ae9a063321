"""Converts command lines and keyword mappings to typed values by path, and typed values to command
lines and keyword mappings.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from bridge.errors import ConfigError, SourceError, nearest
from bridge.files import (
    Document,
    Key,
    Launch,
    Script,
    check_nested,
    is_text,
    load,
    load_words,
    read_text,
)
from bridge.files.shown import brief, show_value
from bridge.plan.section import Values, fields, flatten, nest, validate
from bridge.stack.dialect import Reading, Written, code_beside, flags_of
from bridge.stack.findings import LEFT_OUT, Finding, Origin, find_assumptions, unknown
from bridge.stack.rules import Effect, effects
from compat.merak.recognition import is_launch
from compat.merak.releases import lifetime, release
from compat.merak.schema import Merak

ENTRY = "arguments"
SECTIONS = ("init", "args", "trainer", "tp_lists")
SCRIPT_SECTIONS = ("init", "trainer", "tp_lists")
POSITIONS = ("pp", "tp", "dp", "sp", "backend")
"""Order of `init`'s parameters in Merak's source. Merak's documentation and README have another
order: dp, tp, pp.
"""
YES, NO = ("yes", "true", "t", "y", "1"), ("no", "false", "f", "n", "0")
FLOATS = ("args.zero_stage", "args.zero_allgather_bucket_size", "args.zero_reduce_bucket_size")
"""Arguments that are whole numbers, but that Merak's parser reads as floats."""
LAUNCHER = re.compile(r"\s*(\w+=\S*\s+)*(\S*/)?(python[\d.]*|torchrun|srun|mpirun|deepspeed)\s")
"""Pattern for the beginning of a command that starts a script. The command may begin with
assignments of variables.
"""
NEGATIVE = re.compile(r"-\d+$|-\d*\.\d+$")
"""Pattern of a negative number. argparse reads such a word as a value although it starts with a
dash.
"""


# Reading


def read(
    source: Any, version: str, lenient: bool, code: Mapping[str, Any] | None = None
) -> Reading:
    """Read a path, text, mapping, list of words or `Written`. Raises one error with all problems.

    `code` holds arguments of `init`, the trainer and `set_tp_layer_lists`. It takes precedence over
    such arguments in the source.
    """
    reader = _ArgumentReader(version, lenient)
    # In this order: the source overrides the file beside it, and `code` overrides both.
    reader.script(_beside(source))
    content = _content(source)
    launch: Launch | None = None
    if isinstance(content.data, Script):
        launch = content.data.launch(is_launch, "arguments of Merak")
        reader.findings += find_assumptions(content.data, launch)
        reader.opaque = launch.opaque
        lines: dict[Key, int] = {(index,): line for index, line in enumerate(launch.lines)}
        content = Document(launch.texts, lines, "flags", name=content.name)
    reader.take(content)
    reader.script(code or {})
    values, wrong = _type_values(reader.raw)
    settings = {path: values[path] for path in reader.raw if path in values}
    ranks = launch.ranks if launch else None
    reading = Reading(
        Values(settings), ENTRY, reader.origins, tuple(reader.findings), world_size=ranks
    )
    return reading.unless((*reader.problems, *wrong))


def _type_values(raw: Mapping[str, Any]) -> tuple[Mapping[str, Any], Sequence[str]]:
    """Return the typed values by path, and a problem for each value that does not fit its type."""
    try:
        return flatten(validate(Merak, nest(raw))), ()
    except ConfigError as error:
        # Once more without the values that are wrong, so that checks of the others can go on.
        names = {problem.partition(":")[0] for problem in error.problems}
        rest = {
            path: value
            for path, value in raw.items()
            if not any(f"{name}.".startswith(f"{path}.") for name in names)
        }
        return (_type_values(rest)[0] if len(rest) < len(raw) else {}), error.problems


def _content(source: Any) -> Document:
    if isinstance(source, Written):
        return _content(source.text)
    if isinstance(source, Mapping):
        check_nested(source, "mapping")
        return Document(dict(source), {}, "mapping", name="mapping")
    words = flags_of(source)
    if words is not None:
        return Document(list(words), {}, "flags", name="flags")
    if not isinstance(source, str | Path | Document):
        raise SourceError(
            f"source: found {show_value(source)}, expected a path, text, mapping or list of flags"
        )
    if isinstance(source, str) and LAUNCHER.match(source) and not os.path.exists(source):
        return load_words(source, "command line")
    return _empty(source) or load(source)


def _empty(source: str | Path | Document) -> Document | None:
    """Return a document without words if the source is a command line without arguments, which the
    general reader refuses. Return None for any other source.
    """
    if isinstance(source, Document):
        return None
    if isinstance(source, Path) or not is_text(source):
        if Path(source).suffix not in (".txt", ".args") or not os.path.isfile(source):
            return None
        return _empty(read_text(source) or "#")
    # `flags_text` writes a comment for no arguments, as an empty file could be a mistake.
    bare = "".join(
        line for line in source.splitlines() if not line.lstrip().startswith("#")
    ).strip()
    return Document([], {}, "flags") if source.startswith("#") and not bare else None


def _beside(source: Any) -> Mapping[str, Any]:
    """Return the settings of the script from the file that was written together with a command
    line; empty if there is no such file.
    """
    if isinstance(source, Written):
        return source.code
    if isinstance(source, str) and (is_text(source) or LAUNCHER.match(source)):
        return {}
    file = source.name if isinstance(source, Document) else source
    if not isinstance(file, str | Path) or Path(file).suffix == ".json" or not os.path.isfile(file):
        return {}
    path = code_beside(Path(file))
    if not os.path.isfile(path):
        return {}
    data = load(path).data
    if not isinstance(data, Mapping):
        raise SourceError(
            f"{path}: found {show_value(data)}, expected a mapping of {', '.join(SCRIPT_SECTIONS)}"
        )
    return data


@dataclass
class _ArgumentReader:
    """Collects raw values by path, with spellings, findings and problems."""

    version: str
    lenient: bool
    raw: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, Origin] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    opaque: Mapping[int, str] = field(default_factory=dict)

    def take(self, document: Document) -> None:
        """Read a whole document."""
        if isinstance(document.data, list):
            self.words(document)
        else:
            self.mapping(document)

    # Mappings

    def mapping(self, document: Document) -> None:
        data: Mapping[Any, Any] = document.data
        sections = [
            name
            for name in SECTIONS
            if name in data and isinstance(data[name], Mapping | list | tuple)
        ]
        for key, value in data.items():
            line = document.line(key)
            if key in sections:
                self.section(key, value)
            elif not isinstance(key, str):
                self.problems.append(
                    f"{document.name}: found the key {show_value(key)}, expected the name of an"
                    " argument as text"
                )
            else:
                self.entry(key, value, Origin(line) if line else None)

    def script(self, data: Mapping[str, Any]) -> None:
        """Read settings of the training script. They are given as sections, or as single parameters
        such as `init.pp` or `pp`.
        """
        for name, value in data.items():
            path = name if name in fields(Merak) else _home(name, SCRIPT_SECTIONS)
            if name in SCRIPT_SECTIONS:
                self.section(name, value)
            elif path is None or path.startswith("args."):
                names = ", ".join(SCRIPT_SECTIONS)
                hint = nearest(name, SCRIPT_SECTIONS, len(self.problems))
                self.problems.append(f"code.{name}: unknown; known are {names}{hint}")
            else:
                self.put(path, value, f"code.{name}")

    def section(self, name: str, value: Any) -> None:
        if name == "init" and isinstance(value, list | tuple):
            value = self.positional(value)
        if not isinstance(value, Mapping):
            self.problems.append(f"{name}: found {show_value(value)}, expected a mapping")
            return
        for key, inner in value.items():
            self.put(f"{name}.{key}", inner, f"{name}.{key}")

    def positional(self, sizes: Sequence[Any]) -> Mapping[str, Any]:
        """Return by name the arguments that a source gives by position, as in `Merak.init(4, 1,
        2)`. They are in the order of Merak's source, because the order in its documentation is
        wrong.
        """
        degrees = dict(zip(POSITIONS, sizes, strict=False))
        if not 3 <= len(sizes) <= len(POSITIONS):
            self.problems.append(
                f"init: found {len(sizes)} values by position, expected pp, tp, dp; give them by name"
            )
        same = degrees.get("pp") == degrees.get("dp")
        message = (
            "given by position and read as pp, tp, dp, which is the order in Merak's source; its"
            " documentation and README say dp, tp, pp; give the values by name"
        )
        self.findings.append(
            Finding("init", message, Effect.NONE if same else Effect.NUMBERS, True)
        )
        return degrees

    def entry(self, key: str, value: Any, origin: Origin | None) -> None:
        """Read one key of a flat mapping: an argument, or a parameter of the script, by name or by
        dotted path.
        """
        path = key if key in fields(Merak) else _home(key)
        if path is None:
            self.unknown(key, key, _names(), (str(value),), origin)
        else:
            self.put(path, value, key)
            if origin and path in self.raw:
                self.origins[path] = origin

    def put(self, path: str, value: Any, argument: str) -> None:
        """Store one value. Add a problem if the release does not have its path."""
        if path not in fields(Merak):
            section = path.partition(".")[0]
            names = [
                other.partition(".")[2]
                for other in fields(Merak)
                if other.startswith(section + ".")
            ]
            self.unknown(argument, path.partition(".")[2], names, (str(value),))
        elif path not in release(self.version).defaults:
            self.absent(argument, path)
        elif value is not None:
            self.raw[path] = value
        elif release(self.version).defaults[path] is not None:
            self.problems.append(
                f"{argument}: found no value; give a value, or leave the argument out"
            )

    def unknown(
        self,
        argument: str,
        name: str,
        names: Sequence[str],
        values: Sequence[str],
        origin: Origin | None = None,
    ) -> None:
        if self.lenient:
            message = f"Merak {self.version} does not have this argument"
            self.findings.append(unknown(argument, message, " ".join(values) or None, origin))
        else:
            self.problems.append(
                f"{brief(argument)}: unknown argument of Merak{nearest(name, names, len(self.problems))}"
            )

    def absent(self, argument: str, path: str) -> None:
        message = f"not in Merak {self.version}; Merak {lifetime(path)} has it"
        if self.lenient:
            self.findings.append(unknown(argument, message))
        else:
            self.problems.append(f"{argument}: {message}")

    # Command lines

    def words(self, document: Document) -> None:
        words = [word if isinstance(word, str) else repr(word) for word in document.data]
        index = _start(words)
        while index < len(words):
            index = self.option(words, index, document.line(index))

    def option(self, words: Sequence[str], index: int, line: int | None) -> int:
        """Read the option at `index` and its values. Returns the index of the next option."""
        word, end = words[index], index + 1
        while end < len(words) and _is_value(words[end]):
            end += 1
        # A word whose value the script reader does not know may stand for any number of arguments.
        if index in self.opaque and not word.startswith("--"):
            message = f"{self.opaque[index]}; the arguments that this word stands for are left out"
            self.findings.append(Finding(word, message, Effect.NUMBERS, True, origin=Origin(line)))
            return index + 1
        if _is_value(word):
            self.problems.append(f"{brief(word)} (word {index + 1}): belongs to no option; drop it")
            return index + 1
        name, tied, inline = word.partition("=")
        path, negative = self.find(name)
        if path is None:
            self.unknown(
                name,
                name.lstrip("-"),
                _names(),
                (*([inline] if tied else ()), *words[index + 1 : end]),
                Origin(line) if line else None,
            )
            return end
        texts = [inline] if tied else list(words[index + 1 : end])
        reason = next((self.opaque[at] for at in range(index, end) if at in self.opaque), None)
        if reason and kind(path) is not str:
            self.leave_out(path, name, reason, line)
            return index + 1 if tied else end
        self.store(path, name, texts, negative, line)
        return index + 1 if tied else end

    def leave_out(self, path: str, name: str, reason: str, line: int | None) -> None:
        """Leave out an option whose value is not known, with a finding. If the plan has a field for
        the option, this is a problem instead.
        """
        if path in _arguments_that_matter():
            self.problems.append(f"line {line}: {name}: {reason}")
        else:
            message, effect = f"{reason}{LEFT_OUT}", _effects().get(path, Effect.NUMBERS)
            self.findings.append(Finding(path, message, effect, True, origin=Origin(line, name)))

    def find(self, name: str) -> tuple[str | None, bool]:
        """Return the path of an option, and whether the option is the `--no_` form of a switch."""
        options = _options(self.version)
        option_name = (
            name.replace("-", "_")
            if name.startswith("--") and "_" not in name
            else name.removeprefix("--")
        )
        option_name = option_name.lstrip("_")
        if not name.startswith("--"):
            return None, False
        if option_name in options:
            return options[option_name]
        # argparse accepts the beginning of an option if it fits only one.
        longer = {options[option] for option in options if option.startswith(option_name)}
        if len(longer) == 1:
            path, negative = longer.pop()
            self.findings.append(
                Finding(
                    path,
                    f"{name} is an abbreviation of --{path.partition('.')[2]}; write the full name",
                    Effect.NONE,
                    True,
                )
            )
            return path, negative
        elsewhere = f"args.{option_name}"
        return (elsewhere, False) if elsewhere in fields(Merak) else (None, False)

    def store(
        self, path: str, name: str, texts: list[str], negative: bool, line: int | None
    ) -> None:
        try:
            value = False if negative and not texts else _parse_option(path, texts)
        except ValueError as error:
            self.problems.append(f"{name}{f' (line {line})' if line else ''}: {error}")
            return
        if path in self.raw and path in self.origins:
            message = (
                "given more than once; the parser keeps the last value, and this value is lost"
            )
            self.findings.append(
                Finding(path, message, Effect.NONE, True, origin=self.origins[path])
            )
        self.put(path, value, name)
        self.origins[path] = Origin(line, name)


def _start(words: Sequence[str]) -> int:
    """Return the index of the first argument of the script: the index of the word after `train.py`,
    or 0 if the words name no script.
    """
    scripts = (
        index
        for index, word in enumerate(words)
        if word.endswith(".py") and not word.startswith("-")
    )
    first = next(scripts, None)
    if first is None:
        return 0
    # Behind an option, `x.py` is its value and not the script.
    by_launcher = first == 0 or LAUNCHER.match(" ".join(words[: first + 1]))
    return first + 1 if by_launcher else 0


def _is_value(word: str) -> bool:
    return (
        not word.startswith("-")
        or word == "-"
        or " " in word.partition("=")[0]
        or bool(NEGATIVE.match(word))
    )


@cache
def _options(version: str) -> Mapping[str, tuple[str, bool]]:
    """Return each option of a release, without its dashes, with its path. The second value is true
    for the `--no_` form of a switch.
    """
    defaults = release(version).defaults
    own = {
        path.removeprefix("args."): (path, False) for path in defaults if path.startswith("args.")
    }
    off = {
        f"no_{path.removeprefix('args.')}": (path, True)
        for path in defaults
        if path.startswith("args.") and defaults[path] is True
    }
    return {**off, **own}


@cache
def _arguments_that_matter() -> frozenset[str]:
    """Return the arguments for which the plan has a field. If the value of one of these is unknown,
    the config cannot be read.
    """
    from compat.merak.rules.table import table

    return frozenset(path for rule in table() if rule.ours for path in rule.theirs)


@cache
def _effects() -> Mapping[str, Effect]:
    from compat.merak.rules.table import table

    return effects(table())


@cache
def _names() -> tuple[str, ...]:
    return tuple(path.partition(".")[2] for path in fields(Merak))


def _home(name: str, sections: Sequence[str] = ("args", *SCRIPT_SECTIONS)) -> str | None:
    """Return the path of a parameter that is given by name only, without its section."""
    return next(
        (f"{section}.{name}" for section in sections if f"{section}.{name}" in fields(Merak)), None
    )


@cache
def kind(path: str) -> type:
    """Return the type of the values at `path`: bool, int, float, str, tuple or dict."""
    return _kind(fields(Merak)[path].annotation)


def _kind(annotation: Any) -> type:
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kind(inside[0])
    if origin in (Union, UnionType):
        return _kind(next(part for part in inside if part is not NoneType))
    if origin is Literal:
        return type(inside[0])
    kind: type = origin or annotation
    return kind


def _parse_option(path: str, texts: list[str]) -> Any:
    """Return the value of an option, as Hugging Face's argument parser reads it."""
    value_type = kind(path)
    if value_type is bool and not texts:
        return True
    if value_type is bool and len(texts) == 1:
        if texts[0].lower() not in (*YES, *NO):
            raise ValueError(f"found {texts[0]!r}, expected true or false")
        return texts[0].lower() in YES
    if value_type is tuple and texts:
        return tuple(texts)
    if len(texts) != 1:
        raise ValueError(
            f"found {len(texts) or 'no'} values, expected {'one or more' if value_type is tuple else 'one'}"
        )
    return _mapping(texts[0]) if value_type is dict else _single(path, value_type, texts[0])


def _single(path: str, value_type: type, text: str) -> Any:
    try:
        return (float if path in FLOATS else value_type)(text)
    except ValueError:
        raise ValueError(
            f"found {text!r}, expected a {'number' if value_type is float else 'whole number'}"
        ) from None


def _mapping(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise ValueError(f'found {text!r}, expected JSON, such as {{"min_lr": 1e-5}}') from None


# Writing


def flags(settings: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return a tuple of words for each argument: the option, and its values if it has any."""
    lines: list[tuple[str, ...]] = []
    for path, value in settings.items():
        if not path.startswith("args."):
            continue
        name, texts = path.partition(".")[2], list(_texts(value))
        # argparse reads a word with a dash as an option, unless it is tied to its own or is a
        # number.
        tied = len(texts) == 1 and texts[0].startswith("-") and not NEGATIVE.match(texts[0])
        lines.append((f"--{name}={texts[0]}",) if tied else (f"--{name}", *texts))
    return lines


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, bool):
        yield str(value).lower()
    elif isinstance(value, tuple | list):
        yield from value
    elif isinstance(value, Mapping):
        yield json.dumps(value)
    else:
        yield value if isinstance(value, str) else repr(value)


def flags_text(settings: Mapping[str, Any]) -> str:
    """Return the arguments of the command line, one on each line, quoted for a shell."""
    text = "".join(" ".join(map(shlex.quote, line)) + "\n" for line in flags(settings))
    return text or "# no arguments\n"


def json_text(settings: Mapping[str, Any]) -> str:
    """Return all settings as one keyword mapping."""
    return json.dumps(nest(settings), indent=2) + "\n"


def script_part(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that belong in the training script, as nested mappings."""
    sections: dict[str, Any] = nest(
        {path: value for path, value in settings.items() if not path.startswith("args.")}
    )
    plain: dict[str, Any] = json.loads(json.dumps(sections))
    return plain
