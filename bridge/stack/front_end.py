"""Front ends of Hugging Face's Trainer: programs with a config of their own, which start a run with its arguments.

A front end is a table of its own settings, read from its code, and a function that says what it does with them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

from bridge.errors import BridgeError, ConfigError, nearest
from bridge.files import Document, Launch, Script, find, folder_of, load, parse, scalar
from bridge.files.shown import brief, show_value
from bridge.shell import Pieces, cut, spell_pieces, text_if_known
from bridge.shell.word_pieces import NOWHERE, Text
from bridge.stack.findings import Finding, Origin, unknown
from bridge.stack.rules import Effect
from bridge.stack.sources import DEFAULT, Said
from bridge.stack.training_arguments import ARGUMENTS, RETIRED, SHARES

FILES = (".yaml", ".yml", ".json")
SWITCHES = ("include_num_input_tokens_seen",)
"""TrainingArguments whose default is a name and that take true and false too."""
INSIDE = "ds_config.json"
"""The name of a DeepSpeed file whose content a front end's own file has."""
INPUT = "names an input of the run, which no config of a stack holds"
UNREAD = "stagebridge does not read it"
ALONE = "a setting of {} alone, which no config of a stack holds"


@dataclass(frozen=True)
class Table:
    """What a front end's code says of its settings.

    `defaults` has its own settings, `gone` those that its newest release lacks, each with the first such release.
    `effects` has patterns of names by their effect, or `input`; what fits none changes numbers. `needs` has the
    setting and the values without which nothing reads those of a pattern. `passed` are the names of TrainingArguments
    by those that the front end has for them. `refusals` are what stops it: a setting, when, and a sentence; of the
    conditions all hold: a setting (with `!` before it, not) in a list of values, `set` or `unset`,
    or `given`, `absent` or `zero`, whatever the default; `ranks` is set for
    several. With `inherits`, TrainingArguments are settings too, and a name of none stops the run.
    """

    title: str
    release: str
    defaults: Mapping[str, Any]
    gone: Mapping[str, str] = field(default_factory=dict)
    effects: Mapping[str, list[str]] = field(default_factory=dict)
    needs: Mapping[str, list[Any]] = field(default_factory=dict)
    passed: Mapping[str, str] = field(default_factory=dict)
    refusals: tuple[tuple[str, Mapping[str, Any], str], ...] = ()
    inherits: bool = False

    @classmethod
    def load(cls, place: str) -> Table:
        """Return the table in the JSON file next to the module at `place`."""
        return cls(**json.loads(Path(place).with_name("settings.json").read_text("utf-8")))

    @property
    def source(self) -> str:
        """The name of the source of its defaults."""
        return f"{self.title} {self.release}{DEFAULT}"

    def name_argument(self, name: str) -> str:
        """Return the TrainingArgument that a setting is; empty for one of the front end's own."""
        is_argument = self.inherits and name not in self.defaults and name in {*ARGUMENTS, *RETIRED}
        return self.passed.get(name, name if is_argument else "")

    def effect_of(self, name: str) -> str:
        """Return the effect of a setting, or `input`; empty where nothing is known."""
        return next(
            (
                effect
                for effect, rows in self.effects.items()
                if any(fnmatchcase(name, pattern) for pattern in rows)
            ),
            "",
        )

    def need_of(self, name: str) -> tuple[str, list[Any]]:
        """Return the setting, and its values, without which nothing reads the setting `name`; empty for none."""
        return next(
            ((row[0], row[1:]) for one, row in self.needs.items() if fnmatchcase(name, one)),
            ("", []),
        )


@dataclass(frozen=True)
class Given:
    """What a run's sources say, by setting, those of the command over those of the file. `others` are words of the
    command that may be more settings, by index; `overrides` are pairs of what is said and what is read instead.
    """

    settings: Mapping[str, Said]
    launch: Launch | None = None
    others: tuple[int, ...] = ()
    overrides: tuple[tuple[Said, Said], ...] = ()
    problems: tuple[str, ...] = ()


def read_file(document: Document, source: str = "") -> dict[str, Said]:
    """Return the settings of a front end's file by name."""
    return {
        str(key): Said(str(key), value, source, document.line(key))
        for key, value in document.data.items()
    }


def read_launch(document: Document, launch: Launch, first: int = 0) -> Given:
    """Return what a launch says: a file in its word `first`, and `name=value`, `--name value` and `--name=value` after.

    Raises `BridgeError` if the file is missing.
    """
    statement, others, overrides = dict[str, Said](), list[int](), list[tuple[Said, Said]]()
    texts = [text_if_known(word) for word in launch.words]
    at = first
    if at < len(launch.words) and launch.texts[at].endswith(FILES):
        file = _open(document, launch, launch.words[at], launch.lines[at])
        statement = read_file(file, file.name)
        at += 1
    while at < len(launch.words):
        word, text = launch.words[at], spell_pieces(launch.words[at])
        option, tied, _ = text.partition("=")
        is_flag = option.startswith("--") and len(option) > 2
        if not is_flag and not (tied and option.replace("_", "").replace(".", "").isalnum()):
            others.append(at)
            at += 1
            continue
        follows = (
            not tied and at + 1 < len(launch.words) and not launch.texts[at + 1].startswith("--")
        )
        value: Any = True
        if tied:
            value = cut(word, len(option) + 1)
        elif follows and is_flag:
            value = launch.words[at + 1]
        step = 2 if value is not True and not tied else 1
        name = option.lstrip("-").replace("-", "_") if is_flag else option
        if value is not True and (word_text := text_if_known(value)) is not None:
            value = _read_value(word_text)
        one = Said(option, value, "", launch.lines[at])
        if name in statement and statement[name].value != value:
            overrides.append((statement[name], one))
        statement[name] = one
        at += step
        while (
            at < len(launch.words)
            and is_flag
            and step == 2
            and not launch.texts[at].startswith("--")
        ):
            if texts[at] is None or "=" in launch.texts[at]:
                break
            at += 1  # a list of values
    return Given(statement, launch, tuple(others), tuple(overrides))


def _read_value(text: str) -> Any:
    if text[:1] in ("{", "["):
        try:
            return json.loads(text)
        except ValueError:
            return text
    return scalar(text)


def _open(document: Document, launch: Launch, word: Pieces, line: int) -> Document:
    content, name = launch.file(word), spell_pieces(word)
    if content is not None:
        return parse(spell_pieces(content), name, Path(name).suffix)
    place = find(launch.place(word) or name, folder_of(document.name))
    if place is None:
        raise BridgeError(
            f"{document.name}: line {line}: {name}: no such file; put it where the script starts"
        )
    file = load(place)
    if not isinstance(file.data, Mapping):
        raise BridgeError(f"{name}: expected a mapping of settings")
    return file


class Run:
    """A run of the Trainer that a front end starts: what is said, what the front end makes of it, and findings."""

    def __init__(self, table: Table, document: Document, given: Given, world: int | None) -> None:
        self.table, self.document, self.given, self.world = table, document, given, world
        self.settings = dict(given.settings)
        self.findings: list[Finding] = []
        self.problems: list[str] = []
        self.words: list[tuple[Pieces, Said]] = []
        for before, now in given.overrides:
            message = (
                f"{show_value(before.value)} is not used: {now.setting} {show_value(now.value)}"
                f" (line {now.line}) is read instead"
            )
            self.remark(before, message, Effect.NONE)

    @cached_property
    def variables(self) -> dict[str, str]:
        """The environment of the launch, as far as it is known."""
        words = self.given.launch.environment if self.given.launch else {}
        return {name: text for name, word in words.items() if (text := text_if_known(word)) is not None}  # fmt: skip

    def value(self, name: str) -> Any:
        """Return the value of a setting, or the front end's default; None for an unknown word of a script."""
        statement = self.settings.get(name)
        if statement is None or statement.value is None:
            return self.table.defaults.get(name, ARGUMENTS.get(name))
        return None if isinstance(statement.value, tuple) else statement.value

    def has(self, name: str) -> bool:
        """Return whether a setting has a value, known or not."""
        return name in self.settings and self.settings[name].value is not None

    def is_open(self, name: str) -> bool:
        """Return whether a setting is a word of a script whose value is not known."""
        return self.has(name) and isinstance(self.settings[name].value, tuple)

    def locate(self, statement: Said | None) -> Origin | None:
        """Return the place of what is said."""
        return Origin(statement.line, "", statement.source) if statement else None

    def remark(self, statement: Said, message: str, effect: Effect, **more: Any) -> None:
        """Add a finding on what is said."""
        self.findings.append(
            Finding(statement.setting, message, effect, origin=self.locate(statement), **more)
        )

    def tell(self, name: str, message: str, effect: Effect = Effect.NUMBERS) -> None:
        """Add a finding on what the front end does with a setting, which may not be given."""
        statement = self.settings.get(name, Said(name, None))
        self.remark(statement, message, effect, given=name in self.settings, surprising=True)

    def refuse(self, name: str, message: str) -> None:
        """Add a problem with a setting, at which the front end stops."""
        statement = self.settings.get(name)
        line = f"line {statement.line}: " if statement and statement.line else ""
        file = (statement.source if statement else "") or self.document.name
        self.problems.append(f"{file}: {line}{name}: {message}")

    def leave(self, statement: Said, message: str) -> None:
        """Add a finding on what is said and not read."""
        shown, place = brief(spell(statement.value)), self.locate(statement)
        self.findings.append(unknown(statement.setting, message, shown, place, end="; left out"))

    def check_names(self, is_closed: bool = True) -> None:
        """Refuse settings that the front end does not have; those that it ignores are findings."""
        table = self.table
        names = {*table.defaults, *table.gone, *table.passed}
        names |= {*ARGUMENTS, *RETIRED} if table.inherits else set()
        for name, statement in [*self.settings.items()]:
            if name in names:
                continue
            message = f"{table.title} has no such setting"
            if table.inherits and is_closed:
                self.refuse(name, f"{message}, and stops at it{nearest(name, names)}")
            else:
                self.leave(statement, f"{message}, and ignores it{nearest(name, names)}")
            del self.settings[name]

    def check_refusals(self) -> None:
        """Refuse what the front end refuses."""
        for name, conditions, message in self.table.refusals:
            if all(self._holds(*row) for row in conditions.items()):
                self.refuse(name, message)

    def _holds(self, name: str, condition: Any) -> bool:
        statement = self.settings.get(name.removeprefix("!"))
        if statement and isinstance(statement.value, tuple):
            return False  # a word of unknown value
        value = (self.world or 1) > 1 if name == "ranks" else self.value(name.removeprefix("!"))
        if condition == "zero":
            return statement is not None and bool(statement.value == 0)
        if condition in ("given", "absent"):
            return bool(statement and statement.value) is (condition == "given")
        if isinstance(condition, str):
            return bool(value) is (condition == "set")
        return bool(value in condition) != name.startswith("!")

    def report_own(self, read: Iterable[str] = ()) -> None:
        """Add a finding for each of the front end's own settings that is not its default, but for those in `read`."""
        for name, statement in self.settings.items():
            value, is_open = statement.value, self.is_open(name)
            if self.table.name_argument(name) or value is None or (name in read and not is_open):
                continue
            if not is_open and value == self.table.defaults.get(name):
                continue
            need, values = self.table.need_of(name)
            effect, shown = self.table.effect_of(name), brief(spell(statement.value))
            if need and not self.is_open(need) and self.value(need) not in values:
                why = f"nothing reads it unless {need} is {' or '.join(map(spell, values))}"
                self.remark(statement, why, Effect.NONE, change=shown)
            elif effect == "input":
                self.remark(statement, INPUT, Effect.NONE, change=shown, unknown=True)
            elif effect:
                self.remark(statement, ALONE.format(self.table.title), Effect(effect), change=shown)
            else:
                gone, title = self.table.gone.get(name), self.table.title
                why = f"{title} lacks it since {gone}" if gone else f"a setting of {title} alone"
                self.leave(statement, f"{why}, and {UNREAD}")

    def pass_on(self, name: str, statement: Said) -> None:
        """Give the Trainer an argument; refuse a value of a kind with which it stops."""
        usual, value = ARGUMENTS.get(name), statement.value
        if value is None:
            if usual is not None:
                self.leave(statement, "null is passed on, which the Trainer does not take")
            return
        if kind := _misfit(name, value, usual):
            self.refuse(
                statement.setting.lstrip("-"), f"found {show_value(value)}; expected {kind}"
            )
            return
        # A list of words for FSDP is the same as one text of them.
        shown = (
            " ".join(map(str, value))
            if name == "fsdp" and isinstance(value, list)
            else spell(value)
        )
        text = (Text(shown, NOWHERE, True, plain=False),)
        for word in ((Text(f"--{name}", NOWHERE),), value if isinstance(value, tuple) else text):
            self.words.append((word, statement))

    def set(self, name: str, value: Any, statement: Said | None = None) -> None:
        """Give the Trainer an argument that nobody gives, for the setting `said` or by the front end's own default."""
        place = statement or Said(name, value, self.table.source)
        self.pass_on(name, replace(place, value=value))

    def pass_arguments(self, but: Iterable[str] = ()) -> None:
        """Give the Trainer all its arguments that are said, but for those of the names `but`."""
        for name, statement in self.settings.items():
            own = self.table.name_argument(name)
            if not own or name in but:
                continue
            if own == "deepspeed" and isinstance(statement.value, Mapping):
                self.set("deepspeed", INSIDE, statement)
            elif own == "warmup_ratio" and _is_share(statement.value):
                if self.value("warmup_steps"):
                    self.remark(
                        statement, "warmup_steps is read instead", Effect.NUMBERS, given=True
                    )
                else:
                    # The same share as newer releases of transformers have it.
                    self.set("warmup_steps", statement.value, statement)
            elif own != "warmup_steps" or statement.value or "warmup_ratio" not in self.settings:
                self.pass_on(own, statement)

    def start(
        self, program: str, launcher: tuple[str, ...]
    ) -> tuple[Document, tuple[Finding, ...]]:
        """Return the script that starts the Trainer, and the findings. Raises `ConfigError` with all problems."""
        ConfigError.raise_if(self.problems)
        like = self.given.launch
        if like:
            self.words += (
                (like.words[at], Said("", None, "", like.lines[at])) for at in self.given.others
            )
        first = like.line if like else 1
        places = [statement for _, statement in self.words]
        lines = tuple(
            statement.line or first if not statement.source else first for statement in places
        )
        sources = {
            at: (one.setting, one.source, one.line or 0)
            for at, one in enumerate(places)
            if one.setting
        }
        pieces = tuple(word for word, _ in self.words)
        files = dict(self._files())
        starter: tuple[Pieces, ...] = tuple((Text(word, NOWHERE),) for word in launcher)
        run = Launch(program, pieces, starter, {}, first, lines, ranks=self.world, files=files, sources=sources)  # fmt: skip
        if like:
            starter = starter or like.launcher
            run = replace(like, program=program, words=pieces, launcher=starter, lines=lines, sources=sources,
                           ranks=self.world or like.ranks, files={**like.files, **files})  # fmt: skip
            script = self.document.data.change(lambda one: run if one is like else one)
        else:
            script = Script("", self.document.name)
            script.__dict__["launches"] = (run,)
        return replace(self.document, data=script), tuple(self.findings)

    def _files(self) -> Iterator[tuple[str, Pieces]]:
        statement = self.settings.get("deepspeed")
        if statement and isinstance(statement.value, Mapping):
            yield INSIDE, (Text(json.dumps(statement.value), NOWHERE, True, plain=False),)


def spell(value: Any) -> str:
    """Return a value as a word of a command line."""
    if isinstance(value, tuple):
        return spell_pieces(value)
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value) if isinstance(value, Mapping | list) else str(value)


def _is_share(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1


def _misfit(name: str, value: Any, usual: Any) -> str:
    """Return what an argument's value should be, if its file gives another kind; the Trainer converts none."""
    if isinstance(value, tuple) or usual is None:
        return ""
    if isinstance(usual, bool):
        return "" if isinstance(value, bool) else "true or false, without quotes"
    if isinstance(usual, int | float):
        whole = isinstance(usual, int) and name not in SHARES and name != "num_train_epochs"
        kinds = (int,) if whole else (int, float)
        fits = isinstance(value, kinds) and not isinstance(value, bool)
        return "" if fits else f"a {'whole ' * whole}number, without quotes"
    if isinstance(usual, str) and isinstance(value, bool) and name not in SWITCHES:
        return 'a name; YAML reads no, off, yes and on as switches, so write "no"'
    return ""
