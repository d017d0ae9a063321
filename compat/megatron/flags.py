"""Reads command-line flags as the argument parser of a given Megatron-LM release does."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from types import MappingProxyType
from typing import Any

from bridge import limits
from bridge.errors import nearest
from bridge.files.shown import brief, show_value
from bridge.plan.values import describe_found
from compat.megatron import releases
from compat.megatron.releases import MAIN, RELEASES, Flag

# argparse's own pattern of negative numbers (_negative_number_matcher); it has no exponents.
_NEGATIVE = re.compile(r"-\d+$|-\d*\.\d+$")
_EXPONENT = re.compile(r"-[\d.]+e[-+]?\d+$", re.IGNORECASE)
_PATTERN = re.compile(r"[,\d\[\]()+*]*$")
DEEPSPEED = frozenset(
    {
        "--deepspeed",
        "--deepspeed-activation-checkpointing",
        "--deepspeed-config",
        "--deepspeed_config",
        "--ds-sequence-parallel-size",
        "--no-pipeline-parallel",
        "--zero-stage",
    }
)
"""Flags of Megatron-DeepSpeed, which no release of Megatron has."""
MODELOPT: Mapping[str, tuple[str, str]] = {
    "--enable-gpt-oss": ("0.16.0", ""),
    "--export-default-te-spec": ("0.17.0", ""),
    "--export-draft-vocab-size": ("0.13.0", "0.14.0"),
    "--export-eagle-algorithm": ("0.13.0", "0.14.0"),
    "--export-force-local-attention": ("0.13.0", ""),
    "--export-freeze-mtp": ("0.13.0", "0.14.0"),
    "--export-kd-cfg": ("0.13.0", ""),
    "--export-kd-teacher-ckpt-format": ("0.13.0", ""),
    "--export-kd-teacher-load": ("0.13.0", ""),
    "--export-kd-teacher-model-config": ("0.16.0", ""),
    "--export-kv-cache-quant": ("0.13.0", ""),
    "--export-legacy-megatron": ("0.13.0", ""),
    "--export-model-type": ("0.13.0", ""),
    "--export-moe-apply-probs-on-input": ("0.13.0", ""),
    "--export-num-eagle-layers": ("0.13.0", "0.14.0"),
    "--export-num-medusa-heads": ("0.13.0", "0.14.0"),
    "--export-num-mtp": ("0.13.0", "0.14.0"),
    "--export-offline-model": ("0.15.0", ""),
    "--export-qk-l2-norm": ("0.13.0", ""),
    "--export-quant-cfg": ("0.13.0", ""),
    "--export-real-quant-cfg": ("0.13.0", ""),
    "--export-te-mcore-model": ("0.13.0", ""),
    "--finetune-data-files": (MAIN, ""),
    "--finetune-data-split": ("0.13.0", ""),
    "--finetune-hf-dataset": ("0.13.0", ""),
    "--freeze-base-for-mtp": ("0.19.0", ""),
    "--modelopt-enabled": ("0.15.0", ""),
    "--qad-train-target": ("0.19.0", ""),
    "--teacher-model-config": ("0.15.0", "0.16.0"),
}
"""Flags that Megatron's scripts add to its parser if NVIDIA ModelOpt is installed. Each has the
first release in which pretrain_gpt.py accepts the flag, and the first release in which
pretrain_gpt.py no longer accepts it. Source: megatron/post_training/arguments.py; pretrain_gpt.py,
which has added the flags since core_v0.13.0.
"""
MODELOPT_ON = frozenset(
    {
        "--export-kd-teacher-load",
        "--export-num-eagle-layers",
        "--export-num-medusa-heads",
        "--export-quant-cfg",
        "--export-real-quant-cfg",
        "--load",
        "--modelopt-enabled",
    }
)
"""Flags that can turn ModelOpt on; without them, no flag of ModelOpt has an effect. `--load` is one
of them, because a checkpoint can turn ModelOpt on. Source: megatron/post_training,
modelopt_args_enabled in arguments.py, since 0.15.0 maybe_enable_modelopt.
"""
_NO = ("false", "no", "off", "0", "none", "null")


class ForeignValue(ValueError):
    """A value that is not among the choices of an argument."""


@dataclass(frozen=True, slots=True)
class Spot:
    """The place of a flag: its option string, its index in the list, and the number of its words."""

    option: str
    index: int
    words: int = 1


@dataclass(frozen=True, slots=True)
class Parsed:
    """The given values of a list of flags by destination, in the order of their last mention.

    Values are plain: numbers, text, booleans, lists, names of enum members.

    `repeated`: mentions that a later mention overrides. `unknown`: words that the parser does not
    accept; `extras`: the indices of these words. `misread`: destinations whose text means no, but
    which the parser sets to true, because it reads any text as true. `opaque`: values that are known
    only when the script runs, each with its index; they are given by destination, or by their words
    if the destination is unknown. `foreign`: destinations whose value is not among the choices, each
    with a message and the place. `problems`: the reasons why the list is refused, in the order of the
    words.
    """

    given: Mapping[str, Any]
    flags: Mapping[str, Spot]
    repeated: list[tuple[str, Spot]]
    unknown: list[str]
    misread: list[str]
    opaque: list[tuple[str, int]] = field(default_factory=list)
    extras: list[int] = field(default_factory=list, compare=False)
    foreign: list[tuple[str, str, Spot]] = field(default_factory=list)
    problems: tuple[str, ...] = ()


def parse(
    flags: Sequence[str],
    version: str,
    lenient: bool = False,
    lines: Sequence[int | None] = (),
    opaque: Mapping[int, str] = MappingProxyType({}),
    relevant: Container[str] = (),
    loose: Container[int] = (),
    fixed: Container[str] | None = None,
) -> Parsed:
    """Read a list of command-line words as the parser of Megatron `version` does.

    `lines` has the line number of each word. `opaque` has, by index, the reason why a word is not
    known before the run. Such a word stays as it is spelled if the flag accepts free text. It is a
    problem if the flag's argument is in `relevant`. Otherwise the word is left out, and the result lists
    it in `opaque`. A word whose index is in `loose` may contain flags; it is a value only if the flag
    before it has none yet.

    Abbreviations are not allowed, the last mention of a flag wins, and no defaults are filled in.
    Wrong, missing or surplus values and unknown flags are in `problems`. If `lenient`, surplus
    values and unknown flags are in `unknown` instead. If `fixed` is given, a value that is not
    among the choices is in `foreign` instead, unless its argument is in `fixed`.
    """
    reader = _FlagReader(list(flags), version, list(lines), opaque, relevant, loose, fixed)
    reader.read()
    if not lenient:
        reader.problems += islice(_find_unread_words(reader), limits.PROBLEMS + 1)
    reader.problems.sort()  # by the place of the word, as a user reads them
    alone = [(reader.words[index], index) for index in reader.extras if index in opaque]
    indices = [index for index in reader.extras if index not in opaque]
    unknown = [reader.words[index] for index in indices]
    left_out = [*reader.left_out, *alone]
    return Parsed(
        reader.given,
        reader.spots,
        reader.repeated,
        unknown,
        reader.misread,
        left_out,
        indices,
        reader.foreign,
        tuple(message for _, message in reader.problems),
    )


@dataclass(frozen=True, slots=True)
class _Mark:
    """The role of a word: value, bare `--`, or option.

    `flag` is the option's flag if the release has it; `attached` is the text after `=`.
    """

    role: str
    flag: Flag | None = None
    attached: str | None = None


_VALUE = _Mark("value")
_DASHES = _Mark("dashes")


@dataclass(slots=True)
class _FlagReader:
    words: list[str]
    version: str
    lines: list[int | None] = field(default_factory=list)
    opaque: Mapping[int, str] = field(default_factory=dict)
    needed: Container[str] = ()
    loose: Container[int] = ()
    fixed: Container[str] | None = None
    foreign: list[tuple[str, str, Spot]] = field(default_factory=list)
    left_out: list[tuple[str, int]] = field(default_factory=list)
    given: dict[str, Any] = field(default_factory=dict)
    spots: dict[str, Spot] = field(default_factory=dict)
    repeated: list[tuple[str, Spot]] = field(default_factory=list)
    misread: list[str] = field(default_factory=list)
    extras: list[int] = field(default_factory=list)
    problems: list[tuple[int, str]] = field(default_factory=list)
    marks: list[_Mark] = field(default_factory=list)

    def read(self) -> None:
        self.marks = list(_marks(self.words, releases.flags(self.version)))
        index = 0
        while index < len(self.words):
            flag = self.marks[index].flag
            if flag is None:
                self.extras.append(index)
            index += 1 if flag is None else self.take(index, flag)

    def take(self, index: int, flag: Flag) -> int:
        """Read the flag at `index` with its values; returns the number of words that it takes."""
        text = self.marks[index].attached
        available = self.values_after(index) if text is None else [text]
        texts = available[: _limits(flag)[1]]
        problem = _wrong_number(flag, text, len(texts))
        used = 1 if text is not None else 1 + len(texts)
        unknown = next(
            (self.opaque[at] for at in range(index, index + used) if at in self.opaque), None
        )
        free_text = flag.action == "store" and flag.type in ("text", "name") and not flag.choices
        try:
            if unknown is not None and not free_text:
                return self.leave_out(index, flag, unknown, used)
            if problem:
                raise ValueError(problem)
            self.store(
                Spot(self.option(index), index, used), flag, _value(flag, self.option(index), texts)
            )
            # type=bool makes True of any text but the empty one, so `--flag false` switches on.
            self.misread += [flag.dest] if flag.type == "bool" and texts[0].lower() in _NO else []
        except ForeignValue as error:
            spot = Spot(self.option(index), index, used)
            # Megatron-DeepSpeed spells its choices in small letters.
            alike = [one for one in flag.choices if str(one).lower() == texts[0]]
            if alike and of_deepspeed(self.words):
                self.store(spot, flag, alike[0])
            else:
                self.leave_foreign(spot, flag, str(error))
        except ValueError as error:
            self.problem(index, str(error))
        return used

    def problem(self, index: int, message: str) -> None:
        """Record a problem with the flag at `index`."""
        self.problems.append((index, f"{self.place(index, self.option(index))}: {message}"))

    def leave_foreign(self, spot: Spot, flag: Flag, message: str) -> None:
        """Leave out a value that is not among the choices of its argument.

        Record a problem instead if the argument is in `fixed`, or if `fixed` is None.
        """
        if self.fixed is None or flag.dest in self.fixed:
            self.problem(spot.index, message)
        else:
            # An earlier mention must not win just because the last one is left out.
            self.forget(flag.dest)
            self.foreign.append((flag.dest, message, spot))

    def leave_out(self, index: int, flag: Flag, reason: str, used: int) -> int:
        """Leave out a value that is known only when the script runs; returns the number of its
        words.

        Raises `ValueError` if its argument is `needed`.
        """
        if flag.dest in self.needed:
            raise ValueError(reason)
        self.forget(flag.dest)
        self.left_out.append((flag.dest, index))
        return used

    def forget(self, dest: str) -> None:
        """Move an earlier mention of the argument to `repeated`, because a later one overrides it."""
        if dest in self.given:
            del self.given[dest]
            self.repeated.append((dest, self.spots.pop(dest)))

    def place(self, index: int, what: str) -> str:
        """Return where a word is, for a message: the line if it is known, else the position in the
        list.
        """
        line = self.lines[index] if index < len(self.lines) else None
        return f"line {line}: {what}" if line else f"{what} (word {index + 1})"

    def values_after(self, index: int) -> list[str]:
        """Return the words after the flag at `index` that may be values of the flag."""
        end = index + 1
        # A loose word may contain flags, so it is a value only directly behind a flag.
        while (
            end < len(self.words)
            and self.marks[end] is _VALUE
            and not (end > index + 1 and end in self.loose)
        ):
            end += 1
        return self.words[index + 1 : end]

    def option(self, index: int) -> str:
        """Return the option string at `index`, without the value attached by `=`."""
        word = self.words[index]
        return word if self.marks[index].attached is None else word.partition("=")[0]

    def store(self, spot: Spot, flag: Flag, value: Any) -> None:
        self.forget(flag.dest)
        self.given[flag.dest] = value
        self.spots[flag.dest] = spot


def _marks(words: Sequence[str], table: Mapping[str, Flag]) -> Iterator[_Mark]:
    rest = iter(words)
    for word in rest:
        if word == "--":
            yield _DASHES
            yield from (_VALUE for _ in rest)  # argparse takes everything behind -- for a value
        else:
            yield _mark(word, table)


def _mark(word: str, table: Mapping[str, Flag]) -> _Mark:
    """Return the role of a word, as argparse decides it. A word that starts with a dash is still a
    value if it is a negative number, a lone dash, or an unknown word with a space.
    """
    if not word.startswith("-"):
        return _VALUE
    option, equals, text = word.partition("=")
    # argparse looks for the whole word first: an option may itself contain `=`.
    if word in table or option in table:
        return _Mark(
            "option",
            table.get(word, table.get(option)),
            text if equals and word not in table else None,
        )
    # -h is the only option of one dash, and argparse reads -hx as -h with more letters behind it.
    if word.startswith("-h"):
        return _Mark("option", table["-h"])
    value = word == "-" or " " in word or _NEGATIVE.match(word)
    return _VALUE if value else _Mark("option")


def _limits(flag: Flag) -> tuple[int, int | None]:
    """Return the least and the largest number of values of a flag; None means any number."""
    if flag.action != "store":
        return 0, 0
    match flag.nargs:
        case int() as number:
            return number, number
        case "*" | "+" as many:
            return int(many == "+"), None
    return 1, 1


def _wrong_number(flag: Flag, text: str | None, count: int) -> str | None:
    """Return a message about the wrong number of values of a flag; None if the number is right."""
    least, most = _limits(flag)
    if flag.action == "help":
        return "found a request for the help text; leave it out"
    if text is not None and most == 0:
        return f"found the value {show_value(text)}; expected no value; write the flag alone"
    if text == "--":
        return "found -- (the end of all flags); expected a value"
    if count >= least:
        return None
    values = "values" if count > 1 else "value"
    return f"found {count or 'no'} {values}; expected {least if most else 'one or more'}"


def _value(flag: Flag, option: str, texts: Sequence[str]) -> Any:
    if flag.action == "switch":
        return not option.startswith("--no-")
    if flag.action != "store":
        return flag.action == "true"
    values = [_convert(flag, text) for text in texts]
    return values[0] if flag.nargs is None else values


def takes(flag: Flag, text: str) -> bool:
    """Whether a word can be converted to the type of a flag."""
    try:
        _TYPES[flag.type][0](text)
    except ValueError:
        return False
    return True


def _convert(flag: Flag, text: str) -> Any:
    read, kind = _TYPES[flag.type]
    try:
        value = read(text)
    except ValueError as error:
        raise ValueError(f"{describe_found(text)}; expected {kind}") from error
    if flag.choices and value not in flag.choices:
        choices = ", ".join(map(str, flag.choices))
        raise ForeignValue(
            f"found {show_value(text)}; expected one of {choices}{nearest(text, map(str, flag.choices))}"
        )
    return value


def _layers(text: str) -> Any:
    """Return the number that a text stands for, or the list that a pattern such as ([0]*3+[1])*2
    stands for.
    """
    if "[" not in text:
        return int(text)
    if not _PATTERN.match(text):
        raise ValueError("expected digits, commas, brackets, + and * only")
    return _pattern(text)


def _pattern(text: str) -> Any:
    """Compute a text of lists, sums and repetitions of whole numbers. Upstream calls eval; this
    function refuses all other expressions.
    """
    try:
        return _tuples_to_lists(_evaluate(ast.parse(text, mode="eval").body))
    except (SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise ValueError("not a list of numbers") from error


def _evaluate(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=int() as value):
            return value
        case ast.List(elts=items):
            return [_evaluate(item) for item in items]
        case ast.Tuple(elts=items):
            return tuple(_evaluate(item) for item in items)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return +_evaluate(operand)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluate(operand)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            one, other = _evaluate(left), _evaluate(right)
            _check_size(_size(one) + _size(other))  # before the sum is built
            return _in_range(one + other)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _times(_evaluate(left), _evaluate(right))
    raise ValueError("expected lists, sums and repetitions of whole numbers only")


def _tuples_to_lists(value: Any) -> Any:
    return [_tuples_to_lists(item) for item in value] if isinstance(value, list | tuple) else value


def _times(left: Any, right: Any) -> Any:
    """Return the product `left * right`; a list that would be too long is refused before it is
    built.
    """
    number, items = (left, right) if isinstance(left, int) else (right, left)
    if isinstance(number, int) and isinstance(items, list | tuple):
        _check_size(_size(items) * number)
    return _in_range(left * right)


def _check_size(layers: int) -> None:
    if layers > limits.LAYERS:
        raise ValueError(f"expected at most {limits.LAYERS:,} layers")


def _in_range(value: Any) -> Any:
    if isinstance(value, int) and abs(value) > limits.INTEGER:
        raise ValueError("expected numbers of at most 64 bits")
    return value


def _size(value: Any) -> int:
    return sum(map(_size, value)) + 1 if isinstance(value, list | tuple) else 1


_TYPES: Mapping[str, tuple[Callable[[str], Any], str]] = {
    "text": (str, "text"),
    "int": (int, "a whole number"),
    "float": (float, "a number"),
    "bool": (bool, "text"),
    "name": (str, "a name"),
    "integers": (
        lambda text: [int(part) for part in text.strip("()").split(",")],
        "whole numbers like 128,0",
    ),
    "layers": (_layers, "a whole number or a list like ([0]*3+[1])*2, without blanks"),
    "layers_spaced": (
        lambda text: _pattern(text.strip()) if "[" in text else int(text),
        "a whole number or a list like ([0]*3+[1])*2",
    ),
}


def _find_unread_words(reader: _FlagReader) -> Iterator[tuple[int, str]]:
    """Yield a problem for each unknown flag with its values, and for each value without a flag."""
    last = -2  # index of the last word that is an unknown flag, or a value behind one
    for index in reader.extras:
        mark = reader.marks[index]
        follows = mark is _VALUE and last == index - 1
        last = index if follows or mark.role == "option" else last
        if index in reader.opaque:
            continue
        if mark.role == "option":
            line = reader.lines[index] if index < len(reader.lines) else None
            option = reader.words[index].partition("=")[0]
            if of_modelopt(option, reader.version):
                continue
            message = _unknown(option, reader.version)
            yield index, f"line {line}: {message}" if line else message
        elif not follows and not (index - 1 in reader.extras and _alike(reader, index - 1, index)):
            further = _further(reader, index)
            words = (
                f"{show_value(reader.words[index])} and {further} more word{'' if further == 1 else 's'}"
                if further
                else show_value(reader.words[index])
            )
            yield (
                index,
                f"{reader.place(index, words)}: {_after(reader, index)}{SPLIT if further else ''}",
            )


SPLIT = (
    "; if these words are one value, quote it; an array that contains it also needs quotes: "
    '"${NAME[@]}"'
)


def _alike(reader: _FlagReader, first: int, second: int) -> bool:
    """Whether two neighbouring words are on one line and are both values without a flag."""
    lines = [reader.lines[at] if at < len(reader.lines) else None for at in (first, second)]
    return lines[0] == lines[1] and all(
        reader.marks[at] is _VALUE and at not in reader.opaque for at in (first, second)
    )


def _further(reader: _FlagReader, index: int) -> int:
    """Return the number of further values without a flag that directly follow the word at `index`."""
    end = index
    while end + 1 in reader.extras and _alike(reader, end, end + 1):
        end += 1
    return end - index


def _after(reader: _FlagReader, index: int) -> str:
    """Return the message for a value that belongs to no flag; it names the flag before the value."""
    # The flag, or the loose word, that stands last before the value.
    before = next(
        (at for at in range(index - 1, -1, -1) if reader.marks[at].flag or at in reader.loose), None
    )
    if before is not None and before in reader.loose:
        return (
            "found no flag for this value; the word before it may contain flags: "
            f"{reader.opaque.get(before)}"
        )
    surplus = "" if before is None else f"; {reader.option(before)} already has all of its values"
    return f"expected a flag; no flag accepts this value{surplus}"


def of_deepspeed(words: Sequence[str]) -> bool:
    """Whether the words of a launch are for Megatron-DeepSpeed."""
    return any(word.partition("=")[0] in DEEPSPEED for word in words)


def of_modelopt(option: str, version: str) -> bool:
    """Whether the scripts of the release have this flag where NVIDIA ModelOpt is installed."""
    window = MODELOPT.get(option)
    return window is not None and RELEASES.within(version, *window)


def _unknown(option: str, version: str) -> str:
    if _EXPONENT.match(option):
        return (
            f"{brief(option)}: argparse reads a negative number with an exponent as a flag; "
            "attach the number to its flag with ="
        )
    spans = releases.spans(option)
    if spans:
        return f"{option}: not in Megatron {version}; known {' and '.join(map(_span, spans))}"
    if option in DEEPSPEED:
        return (
            f"{option}: a flag of Megatron-DeepSpeed, not of Megatron {version}; read the script's"
            " DeepSpeed file with --from deepspeed, or leave such flags out with --lenient, which"
            " names each of them"
        )
    if option in MODELOPT:
        return (
            f"{option}: a flag of NVIDIA ModelOpt, which pretrain_gpt.py of Megatron {version} does"
            " not have; leave the flag out with --lenient"
        )
    table = releases.flags(version)
    # Most parsers would accept a flag's beginning; Megatron's does not (allow_abbrev=False).
    longer = next(
        (flag for flag in table if flag.startswith(option) and len(option) > len("--")), None
    )
    hint = (
        f"; did you mean {longer}? Flags may not be abbreviated"
        if longer
        else nearest(option, table)
    )
    return f"{brief(option)}: unknown to Megatron {version}{hint}"


def _span(span: tuple[str, str]) -> str:
    since, until = span
    if until == releases.KNOWN[-1]:
        return f"since {since}"
    return f"until {until}" if since == releases.KNOWN[0] else f"from {since} to {until}"
