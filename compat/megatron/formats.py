"""Reads Megatron's sources into given values, and writes values back.

Sources are lists of flags, launch scripts, NVIDIA's recipes, mappings and live config objects.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

from bridge.errors import TranslationError, nearest
from bridge.files import Document, Launch, Script, check_nested, load, parse, read_text
from bridge.files.named import existing_path
from bridge.files.shown import brief, show_value
from bridge.files.yaml import plain_scalar
from bridge.plan.section import Values
from bridge.stack import launch_command
from bridge.stack.dialect import Reading, flags_of
from bridge.stack.findings import LEFT_OUT, Finding, Origin, find_assumptions, unknown
from bridge.stack.rules import EFFECTS, Effect, effects
from bridge.stack.sources import Claim, Said, Sources, Unheard
from compat.megatron import flags, forks, live, options, releases, sections
from compat.megatron.checkpoint_source import add_arguments
from compat.megatron.recognition import MODEL, PARALLEL, YAML_CFG, is_launch, kind_of_sections
from compat.megatron.rules import unmapped as unmapped_flags

RECIPE = "MODEL_ARGS"
BESIDE = (
    "ENV_VARS",
    "MODEL_ENV_VARS",
    "TEST_TYPE",
    "MODE",
    "METRICS",
    "BEFORE_SCRIPT",
    "AFTER_SCRIPT",
    "THROUGHPUT_TEST_PARAMS",
    "LAUNCHER",
    "TEST_EVALUATION",
    "BASE_MODEL_ARGS",
)
"""Top-level keys of a recipe that only its runner reads. It asks for each by name
(tests/functional_tests/shell_test_utils of Megatron-LM), and never reads another.
"""
FLAGS = "flags"


@dataclass(frozen=True, slots=True)
class Words:
    """Command-line words, each with its line, and findings about them.

    `opaque` has, by index, the reason why a word is known only when the script runs.
    """

    words: list[str]
    lines: list[int | None]
    findings: tuple[Finding, ...] = ()
    opaque: Mapping[int, str] = field(default_factory=dict)
    ranks: int | None = None
    loose: frozenset[int] = frozenset()
    problems: tuple[str, ...] = ()
    program: str = ""


Read = tuple[Reading, tuple[str, ...]]
"""A reading, and the reasons why it is refused; no reasons if it is accepted."""


def read(source: Any, version: str, lenient: bool) -> Reading:
    """Read given values from a live object, mapping, flags, script, recipe or file in sections.

    All values of Megatron are read here, and every value without a meaning is refused here.
    """
    if cls := live.class_of(source):
        return live.read(source, cls, version)
    # A mapping in Python takes the way of a file, so that both are read and refused alike.
    if isinstance(source, Mapping):
        check_nested(source, "mapping")
        source = Document(dict(source), {}, "mapping", name="mapping")
    flag_words = flags_of(source)
    if flag_words is None:
        reading, problems = reading_of(load(source), version, lenient)
    else:
        words = Words(list(flag_words), [None] * len(flag_words))
        reading, problems = _spoken(words, version, lenient)
    return reading.unless(problems)


def reading_of(document: Document, version: str, lenient: bool) -> Read:
    """Read a file that has either sections or command-line words."""
    if kind_of_sections(document.data):
        return sections.read(document, version, lenient)
    return _spoken(words_of(document, version), version, lenient)


UNWRAPPED = ("moe_router_load_balancing_type", "moe_aux_loss_coeff")
"""Arguments that accept several values since 0.14. validate_args replaces a list of one element by
the element.
"""


def unwrap_lists(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `UNWRAPPED` whose value is a list of one element, with the element as
    value.
    """
    return {
        dest: settings[dest][0]
        for dest in UNWRAPPED
        if isinstance(settings.get(dest), list) and len(settings[dest]) == 1
    }


def _spoken(words: Words, version: str, lenient: bool) -> Read:
    """Read words with the parser of release `version`."""
    relevant, fixed = (
        _arguments_that_matter() if words.opaque else (),
        _arguments_to_fix() if lenient else None,
    )
    result = flags.parse(
        words.words, version, lenient, words.lines, words.opaque, relevant, words.loose, fixed
    )
    older = _older(result, words) if lenient else Older()
    # Flags that the parser takes and Megatron then refuses are given only if they were not read as
    # today's settings.
    settings = {
        dest: value
        for dest, value in result.given.items()
        if dest not in forks.ENDED or not older.covers(result.flags[dest])
        if dest not in older.winners
    }
    if settings.get("num_experts") == 1 and flags.of_deepspeed(words.words):
        del settings["num_experts"]  # its name for a dense model
    settings |= unwrap_lists(settings)
    # A flag of today wins over what a removed one means.
    values = {
        **settings,
        **{dest: value for dest, value in older.values.items() if dest not in settings},
    }
    origins = {
        dest: _origin(spot, words) for dest, spot in result.flags.items() if dest in settings
    }
    origins |= {dest: older.origins[dest] for dest in values if dest not in settings}
    remarks = tuple(_remarks(result, words, older, settings))
    gaps = tuple(_gaps(result, words))
    reading = Reading(
        Values(values),
        FLAGS,
        origins,
        remarks,
        world_size=words.ranks,
        gaps=gaps,
        program=words.program,
    )
    problems = (*words.problems, *result.problems, *older.problems)
    joined, more = _join_file(reading, version, lenient)
    return add_arguments(joined, version), (*problems, *more)


def _join_file(reading: Reading, version: str, lenient: bool) -> Read:
    """Return the reading of the file that --yaml-cfg names, next to which no flag counts (yaml_arguments.py: load_yaml
    returns the file alone); the flags' own reading where there is no such file in reach.
    """
    name = reading.given.get("yaml_cfg")
    path = existing_path(name) if isinstance(name, str) else None
    if path is None:
        return reading, ()
    document = parse(read_text(path), str(path), path.suffix.lower())
    if kind_of_sections(document.data) != YAML_CFG:
        return reading, (
            f"{path}: found no sections {MODEL} and {PARALLEL}, expected both: Megatron reads no other --yaml-cfg",
        )
    found, problems = sections.read(document, version, lenient)
    origins = {path: replace(one, file=document.name) for path, one in found.origins.items()}
    told = (
        replace(one, origin=replace(one.origin or Origin(), file=document.name))
        for one in found.findings
    )
    flags_of_launch = {
        dest: Said(origin.spelling or dest, reading.given[dest], origin.file, origin.line)
        for dest in reading.given
        if dest != "yaml_cfg"
        for origin in (reading.origins.get(dest) or Origin(),)
    }
    claims = tuple(
        Claim(dest, said.value, said, f"{YAML_ALONE}; change the file")
        for dest, said in flags_of_launch.items()
        if dest in found.given
    )
    unheard = tuple(
        Unheard(said, f"{YAML_ALONE}, which does not have it", _effects().get(dest, Effect.NUMBERS))
        for dest, said in flags_of_launch.items()
        if dest not in found.given
    )
    joined = replace(
        found,
        origins=origins,
        findings=(*reading.findings, *told),
        world_size=reading.world_size,
        program=reading.program,
        sources=Sources(claims, unheard=unheard),
    )
    return joined, problems


YAML_ALONE = "next to --yaml-cfg no flag counts, but the file alone"


def _gaps(result: flags.Parsed, words: Words) -> Iterator[str]:
    """Yield a message for each word that may contain flags and is known only when the script runs."""
    for path, index in result.opaque:
        # A word that stands alone is listed as spelled, with its variable or command; others are
        # listed by argument.
        if path.startswith(("$", "`")):
            line = f"line {words.lines[index]}: " if words.lines[index] else ""
            yield (
                f"{line}{path} may contain flags: "
                f"{words.opaque.get(index, 'its value is not known')}"
            )


def _remarks(
    result: flags.Parsed, words: Words, older: Older, settings: Mapping[str, Any]
) -> Iterator[Finding]:
    """Yield findings about the words: repeated, removed and unknown flags, and values that are
    misread or not known before the run.
    """
    yield from words.findings
    for dest, spot in result.repeated:
        message = "given more than once; Megatron keeps the last value and drops this one"
        yield Finding(dest, message, Effect.NONE, True, origin=_origin(spot, words))
    # A misread mention may have been left out since, for a later one that is not known.
    for dest in filter(result.flags.__contains__, result.misread):
        message = "the text means no, but Megatron's parser reads any text as true"
        yield Finding(
            dest, message, Effect.NUMBERS, True, origin=_origin(result.flags[dest], words)
        )
    yield from (_finding_on_removed(flag, words, settings) for flag in older.found)
    yield from _unknown(result, words, older)
    # Values that are not among the choices, of arguments that no plan field needs.
    yield from (
        unknown(dest, message, origin=_origin(spot, words))
        for dest, message, spot in result.foreign
    )
    yield from (_opaque(path, index, words) for path, index in result.opaque)
    yield from filter(
        None, (_finding_on_open_text(dest, spot, words) for dest, spot in result.flags.items())
    )


@dataclass(frozen=True, slots=True)
class Older:
    """The removed flags among the words, the values that they set together, and the problems with
    values that cannot be read.
    """

    found: tuple[forks.Meant, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)
    origins: Mapping[str, Origin] = field(default_factory=dict)
    problems: tuple[str, ...] = ()

    @property
    def winners(self) -> frozenset[str]:
        """The arguments of today that a flag of a fork overrides."""
        return frozenset(dest for flag in self.found if flag.wins for dest in flag.values)

    def covers(self, spot: flags.Spot) -> bool:
        """Whether the flag at `spot`, which the parser accepted, is one of the removed flags."""
        return any(flag.place == spot.index for flag in self.found)


def _older(result: flags.Parsed, words: Words) -> Older:
    """Return the removed flags among the words, with the values that they set in today's settings."""
    refusals = {spot.index for dest, spot in result.flags.items() if dest in forks.ENDED}
    # `extras` leaves out the words that only a run completes; behind a removed flag, such a word is
    # its value.
    extras = {*result.extras, *words.opaque}
    flaws = {
        flag: _ill_typed(flag, words)
        for flag in forks.find_removed_flags(
            words.words, extras, refusals, result.given, flags.of_deepspeed(words.words)
        )
    }
    older_flags = tuple(flag for flag, flaw in flaws.items() if not flaw)
    origins = {
        dest: Origin(words.lines[flag.place], flag.row.option)
        for flag in older_flags
        for dest in flag.values
    }
    return Older(
        older_flags, forks.join_flags(older_flags), origins, tuple(filter(None, flaws.values()))
    )


def _ill_typed(flag: forks.Meant, words: Words) -> str | None:
    """Return a message about the value of a removed flag; None if the value is right."""
    place = f"line {line}: " if (line := words.lines[flag.place]) else ""
    unknown = next(
        (
            words.opaque[at]
            for at in range(flag.place, flag.place + flag.words)
            if at in words.opaque
        ),
        None,
    )
    if unknown is not None and not flag.row.note:
        return f"{place}{flag.row.option}: {unknown}"
    try:
        _ = flag.values
    except ValueError:
        return f"{place}{flag.row.option}: found {flag.value!r}; expected a number"
    except TypeError:
        return f"{place}{flag.row.option}: needs --seq-length and --global-batch-size, which are not known"
    return None


def _finding_on_removed(flag: forks.Meant, words: Words, settings: Mapping[str, Any]) -> Finding:
    """Return the finding on a removed flag. The flag was translated, left out, or overridden by a
    newer flag.
    """
    option, origin = flag.row.option, Origin(words.lines[flag.place], flag.row.option)
    reason = f"Megatron-LM had this flag until {flag.row.source}"
    if flag.row.source == forks.FORK:
        reason = f"only {forks.FORK} has this flag"
    rival = next((dest for dest in flag.values if dest in settings), None)
    if rival is not None:
        return Finding(
            option,
            f"{reason}; {rival} is given too and is kept",
            Effect.NUMBERS,
            True,
            origin=origin,
        )
    if flag.row.note:
        return Finding(
            option, f"{reason}; left out: {flag.row.note}", flag.row.effect, True, origin=origin
        )
    read = ", ".join(f"{dest} {show_value(value)}" for dest, value in flag.values.items())
    read += ", and not as given" if flag.wins and flag.given.keys() & flag.values.keys() else ""
    return Finding(option, f"{reason}; read as {read}", flag.row.effect, True, origin=origin)


def _finding_on_open_text(dest: str, spot: flags.Spot, words: Words) -> Finding | None:
    """Return the finding on a text that is only known when the script runs, and that is written as
    the script spells it.
    """
    places = range(spot.index, spot.index + spot.words)
    reason = next((words.opaque[place] for place in places if place in words.opaque), None)
    message = f"{reason}; the text stays as the script spells it"
    return Finding(dest, message, Effect.NONE, origin=_origin(spot, words)) if reason else None


@cache
def _arguments_that_matter() -> frozenset[str]:
    """Return the names of arguments that affect the numbers or the layout of a run. The plan fields
    that an argument sets decide this.
    """
    from compat.megatron.rules.table import table

    # A plan also has fields of which no number of the run depends (logs, saves), and details of the
    # model's blocks, which a config may leave open. An unknown value of these is left out; an
    # unknown value of any other is refused.
    by_the_way = frozenset(
        path
        for path, effect in EFFECTS.items()
        if (path.startswith("run.") and not effect.reaches(Effect.NUMBERS))
        or (path.startswith("model.") and path not in SIZES)
    )
    return frozenset(path for rule in table() if {*rule.ours} - by_the_way for path in rule.theirs)


SIZES = frozenset(
    f"model.{name}"
    for name in (
        "layers",
        "hidden",
        "heads",
        "kv_heads",
        "ffn",
        "experts",
        "tied",
        "vocab",
        "sequence",
    )
)
"""Plan fields of the model on which the layout over ranks depends."""


@cache
def _arguments_to_fix() -> frozenset[str]:
    """Return the arguments whose value a script must not leave open: those that affect the numbers
    or the layout of a run, and the formats below 16 bits.
    """
    low = (
        dest
        for dest in options.groups()
        if unmapped_flags.why(dest).note == unmapped_flags.LOW.note
    )
    return _arguments_that_matter().union(low)


@cache
def _effects() -> Mapping[str, Effect]:
    from compat.megatron.rules.table import table

    return effects(table())


def _opaque(path: str, index: int, words: Words) -> Finding:
    """Return the finding on a value that is only known when the script runs, or on a word that may
    contain flags and is only known then.
    """
    # `index` is that of the flag; the reason is listed under the first of its values that is not
    # known.
    reason = next(
        (words.opaque[place] for place in range(index, len(words.words)) if place in words.opaque),
        "",
    )
    loose = path.startswith(("$", "`"))
    message = f"{reason}; any flags in this word are left out" if loose else f"{reason}{LEFT_OUT}"
    effect = _effects().get(path, Effect.NUMBERS)
    option = "" if loose else words.words[index].partition("=")[0]
    return Finding(path, message, effect, True, origin=Origin(words.lines[index], option))


def _origin(spot: flags.Spot, words: Words) -> Origin:
    return Origin(words.lines[spot.index], spot.option)


UNKNOWN = "Megatron's parser of this release does not know the flag"
MODELOPT_ON = "NVIDIA ModelOpt changes the model, its formats or its loss"
MODELOPT_OFF = (
    "Megatron knows the flag only if NVIDIA ModelOpt is installed, and stops otherwise; no other flag"
    " here turns ModelOpt on, so the flag has no effect"
)


def _unknown(result: flags.Parsed, words: Words, older: Older) -> Iterator[Finding]:
    """Yield findings on flags that the parser does not know. Removed flags have findings of their
    own.
    """
    read = {place for flag in older.found for place in range(flag.place, flag.place + flag.words)}
    groups: list[list[int]] = []
    for index in sorted(set(result.extras) - read):
        # A word right behind an unknown flag is taken for its value, unless it is a flag itself.
        if groups and groups[-1][-1] == index - 1 and not words.words[index].startswith("--"):
            groups[-1].append(index)
        else:
            groups.append([index])
    # ModelOpt reads its flags only if one of these turns it on.
    on = any(word.partition("=")[0] in flags.MODELOPT_ON for word in words.words)
    yield from (
        _finding_on_unknown([words.words[index] for index in group], words.lines[group[0]], on)
        for group in groups
    )


def _finding_on_unknown(group: Sequence[str], line: int | None, on: bool) -> Finding:
    """Return the finding on an unknown flag with its values. A flag of ModelOpt has no effect if
    ModelOpt is not `on`.
    """
    option, tied, text = group[0].partition("=")
    values = " ".join([*([text] if tied else []), *group[1:]])
    if option not in flags.MODELOPT:
        return unknown(option, UNKNOWN, values or None, Origin(line))
    message, effect = (MODELOPT_ON, Effect.NUMBERS) if on else (MODELOPT_OFF, Effect.NONE)
    beside = f", with {brief(values)}" if values else ""
    message = f"left out{beside}; {message}"
    return Finding(option, message, effect, True, origin=Origin(line), unknown=on)


def words_of(document: Document, version: str) -> Words:
    """Read the command-line words of a file: plain flags, a JSON list of words, or a recipe."""
    if isinstance(document.data, Script):
        launch = launch_of(document.data)
        # Flags that a shell runs as commands, because the line before them does not continue.
        strays = [
            Finding(word, message, Effect.NUMBERS, True, origin=Origin(line))
            for line, word, message in document.data.strays()
        ]
        findings = (*strays, *find_assumptions(document.data, launch))
        return Words(
            launch.texts,
            list(launch.lines),
            findings,
            launch.opaque,
            launch.ranks,
            launch.loose,
            program=program_of(launch),
        )
    if isinstance(document.data, list):
        return _words_of_list(document)
    args = document.data.get(RECIPE)
    if args is None:
        return _recipe(document, document.data, (), version)
    if not isinstance(args, Mapping):
        problem = f"{RECIPE}: found {show_value(args)}, expected a mapping of flags to values"
        return Words([], [], problems=(f"{document.name}: {problem}",))
    return _recipe(document, args, (RECIPE,), version)


def launch_of(script: Script) -> Launch:
    """Return the command of `script` that launches Megatron."""
    return script.launch(is_launch, "flags of Megatron")


def _words_of_list(document: Document) -> Words:
    wrong = [
        item
        for item in document.data
        if not isinstance(item, str | int | float) or isinstance(item, bool)
    ]
    if wrong:
        problem = f"found {show_value(wrong[0])} in a list of flags; expected words such as --bf16"
        return Words([], [], problems=(f"{document.name}: {problem}",))
    words = [item if isinstance(item, str) else repr(item) for item in document.data]
    return Words(words, [document.line(index) for index in range(len(words))])


def _recipe(
    document: Document, args: Mapping[str, Any], at: tuple[str, ...], version: str
) -> Words:
    table, words, lines = releases.flags(version), [], []
    problems: list[str] = []
    for key, value in args.items():
        option = key if key.startswith("-") else f"--{key.replace('_', '-')}"
        line = document.line(*at, key)
        try:
            entry = list(_words(option, value, table.get(option), document.strings.get((*at, key))))
        except ValueError as error:
            problems.append(f"{document.name}: {f'line {line}: ' if line else ''}{key}: {error}")
            continue
        words += entry
        lines += [line] * len(entry)
    return Words(words, lines, tuple(_oddities(document, at)), problems=tuple(problems))


def _words(
    option: str, value: Any, flag: releases.Flag | None, spelling: str | None
) -> Iterator[str]:
    if value is True:
        yield option
    elif value is False or value is None:
        raise ValueError(
            f"found {'false' if value is False else 'nothing'}; "
            "a switch that is off expects no line; remove the line"
        )
    else:
        yield option
        yield from _value_words(value, flag, spelling)


def _value_words(value: Any, flag: releases.Flag | None, spelling: str | None) -> Iterator[str]:
    if isinstance(value, Mapping):
        raise ValueError(f"found {show_value(value)}, expected a value or a list of values")
    if isinstance(value, list | tuple):
        yield from (item if isinstance(item, str) else repr(item) for item in value)
    elif not isinstance(value, str):
        # The text of the file, because a number such as 1e-5 is written in another way after it was
        # read.
        yield spelling or repr(value)
    # A value in parentheses, such as a layer pattern, stays one word, blanks and all.
    elif re.fullmatch(r"\(.*\)", value):
        yield value
    else:
        yield from _shell_words(value, many=flag is None or flag.nargs is not None)


def _shell_words(value: str, many: bool) -> list[str]:
    """Split a value into words as the shell of a recipe's runner does."""
    # Backslashes escape, and a list is in brackets or has blanks.
    match = re.fullmatch(r"\[(.*)\]", value.strip())
    if match:
        return match[1].replace(",", " ").split()
    words = value.replace("\\", "").split() if "'" not in value and '"' not in value else [value]
    return words if many or len(words) == 1 else [" ".join(words)]


def _oddities(document: Document, at: tuple[str, ...]) -> Iterator[Finding]:
    for duplicate in document.duplicates:
        if duplicate.key[: len(at)] == at:
            first, second = duplicate.lines
            message = (
                f"written twice (lines {first} and {second}); "
                f"YAML loaders keep the last value, and {show_value(duplicate.replaced)} is lost"
            )
            yield Finding(
                str(duplicate.key[-1]), message, Effect.NUMBERS, True, origin=Origin(second)
            )
    for key, spelling in document.strings.items():
        message = (
            f"{spelling} is read as a number here, but as a string by YAML 1.1 loaders; "
            "write it with a point, such as 1.0e-6"
        )
        yield Finding(str(key[-1]), message, Effect.NONE, True, origin=Origin(document.line(*key)))
    # Arguments of further runs have keys that begin with MODEL_ARGS; in a file without it, all keys
    # are arguments.
    for key in document.data if at else ():
        origin = Origin(document.line(key))
        if key in (RECIPE, *BESIDE):
            continue
        if str(key).startswith(RECIPE):
            message = f"has the arguments of a further run; only {RECIPE} was read"
            yield Finding(key, message, Effect.NONE, True, origin=origin)
        elif hint := nearest(str(key), (RECIPE, *BESIDE)):
            yield unknown(str(key), f"the recipe's runner reads no such key{hint}", None, origin)
        else:
            message = "the recipe's runner reads no such key"
            yield Finding(str(key), message, Effect.NONE, True, origin=origin)


def flag_lines(settings: Mapping[str, Any], version: str) -> list[tuple[str, ...]]:
    """Return for each flag a tuple of its option and values. Raises `TranslationError` for
    values without a flag.
    """
    problems, lines = [], []
    for dest, value in settings.items():
        line = options.option_for(version, dest, value)
        if line is None:
            problems.append(f"{dest}: no flag of Megatron {version} sets it to {show_value(value)}")
        else:
            lines.append(line)
    TranslationError.raise_if(problems)
    return lines


def program_of(launch: Launch) -> str:
    """Return the Python file that a launch starts, as seen from Megatron's folder; its name if the
    folder is not known, and an empty text if the name is not either.
    """
    path = re.sub(r"^(\.\./)+", "", launch.program)
    names = (one for one in (path, PurePosixPath(path).name) if re.fullmatch(r"[\w./-]+\.py", one))
    return next(names, "")


def flags_text(settings: Mapping[str, Any], version: str) -> str:
    """Return the text of a file with one flag per line, quoted for a shell."""
    return "".join(
        " ".join(map(shlex.quote, line)) + "\n" for line in flag_lines(settings, version)
    )


PROGRAM, ARGUMENTS, SCRIPT = "pretrain_gpt.py", "launch.args", "launch.sh"
"""Megatron's program, and the default names of a file of flags and of a launch script."""


def script_text(
    settings: Mapping[str, Any], version: str, environment: Mapping[str, str], launch: Sequence[str]
) -> str:
    """Return the text of a launch script: environment variables, an array with one flag per line,
    and the command.
    """
    lines = [
        "#!/bin/bash",
        "set -e",
        *(f"export {name}={shlex.quote(value)}" for name, value in environment.items()),
        "ARGS=(",
    ]
    lines += [f"    {' '.join(map(shlex.quote, line))}" for line in flag_lines(settings, version)]
    return (
        "\n".join(
            [
                *lines,
                ")",
                launch_command.line(
                    [*launch, launch_command.Shell('"${ARGS[@]}"'), launch_command.Shell('"$@"')]
                ),
            ]
        )
        + "\n"
    )


def recipe_text(settings: Mapping[str, Any], version: str, environment: Mapping[str, str]) -> str:
    """Return the text of a recipe for NVIDIA's runner, with `ENV_VARS` and `MODEL_ARGS`."""
    lines = [f"{name}: {_scalar(value)}" for name, value in environment.items()]
    args = [yaml_line(*line, version=version) for line in flag_lines(settings, version)]
    parts = (("ENV_VARS", lines), (RECIPE, args))
    return "".join(
        f"{name}:\n" + "".join(f"  {line}\n" for line in body) for name, body in parts if body
    )


def yaml_line(option: str, *values: str, version: str) -> str:
    """Return one line of a recipe. A single value that a shell would change is attached to its
    option by `=`; several values become a list.
    """
    if not values:
        return f"{_quote_yaml(option) if '=' in option else option}: true"
    if len(values) > 1:
        plain = all(re.fullmatch(r"[\w./:-]+", value) for value in values)
        return f"{option}: " + (
            _quote_yaml(f"[{' '.join(values)}]")
            if plain
            else f"[{', '.join(map(_quote_yaml, values))}]"
        )
    many = releases.flags(version)[option].nargs is not None
    # The runner's shell must hand the word on unchanged.
    intact = _shell_words(values[0], many) == [values[0]]
    return (
        f"{option}: {_scalar(values[0])}"
        if intact
        else f"{_quote_yaml(f'{option}={values[0]}')}: true"
    )


def _scalar(value: str) -> str:
    """Return a YAML scalar. It is quoted if a loader would otherwise read another value, such as 0
    for -0.
    """
    result = plain_scalar(value)
    number = (
        isinstance(result, int | float) and not isinstance(result, bool) and repr(result) == value
    )
    word = re.fullmatch(r"[A-Za-z_/][\w./-]*", value) and value.lower() not in YAML_WORDS
    return value if number or word else _quote_yaml(value)


YAML_WORDS = ("true", "false", "yes", "no", "on", "off", "null", "y", "n")


def _quote_yaml(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"


def format_of(path: str | Path | None) -> str | None:
    """Return the format of a file by its suffix; None for an unknown suffix."""
    suffix = Path(path).suffix.lower() if path is not None else ""
    return {
        ".yaml": "yaml",
        ".yml": "yaml",
        ".txt": "flags",
        ".args": "flags",
        ".sh": "script",
    }.get(suffix)
