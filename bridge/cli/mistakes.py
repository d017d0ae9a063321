"""Known mistakes in command lines, such as options of other programs: the reason, and the corrected command."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import PurePath

from bridge.errors import BridgeError

READING = ("convert", "check", "diff", "layout", "drift", "train", "verify", "move", "schedule")
"""Commands whose first argument is FILE."""
SHELLS = ("bash", "sh", "zsh", "source", ".")
LAUNCHERS = (
    "torchrun",
    "deepspeed",
    "srun",
    "sbatch",
    "mpirun",
    "accelerate",
    "python",
    "python3",
    "env",
    "sudo",
    "nohup",
)
NAMED = (
    "--config",
    "--file",
    "--input",
    "--args",
    "-f",
    "-i",
    "-c",
    "--deepspeed_config",
    "--deepspeed",
    "--yaml-cfg",
)
"""Options that other programs use for the config file, as in `--config FILE`."""
CONFIGS = (".json", ".hjson", ".yaml", ".yml", ".args", ".sh")
OURS = (
    "--to",
    "--from",
    "--world-size",
    "--ranks",
    "-o",
    "--output",
    "--auto-from",
    "--auto",
    "--code",
)
"""Options of `stagebridge` that take a value, and that the corrected command takes over from a launch command."""
INNER = ("--deepspeed_config", "--deepspeed", "--config", "--config_file", "--yaml-cfg")
"""Options with which training scripts name a config."""


def corrected_command(arguments: Sequence[str], stacks: Sequence[str]) -> str | None:
    """Return one line with the corrected command for the refused `arguments`; None if their mistake is not a known one."""
    command_words = [
        word for word in arguments if not re.match(r"--local[_-]rank=", word)
    ]  # which a launcher puts first
    if not command_words:
        return None
    command, *words = command_words
    if command not in READING:
        return _without_command(command_words)
    ways = (
        _correct_foreign_option(command, words),
        _correct_launch_command(command, words),
        _stacks_alone(command, words, stacks),
        _without_target(command, words, stacks),
    )
    return next(filter(None, ways), None)


def instead(arguments: Sequence[str], error: BridgeError, stacks: Sequence[str]) -> Sequence[str]:
    """Return the problems of an error.

    If a known mistake explains a missing file, return only the line about that mistake.
    """
    missing = any(
        "no such file" in problem or "several files need" in problem for problem in error.problems
    )
    correction = corrected_command(arguments, stacks) if missing else None
    return error.problems if correction is None else (correction,)


def _type(*words: str) -> str:
    return shlex.join(("stagebridge", *words))


def _without_command(arguments: Sequence[str]) -> str | None:
    """Return the corrected command if a file name is in the place of the command; None if there is no such mistake."""
    file = arguments[0]
    if file.startswith("-") or not (os.path.exists(file) or file.endswith(CONFIGS)):
        return None
    return (
        f"{file}: found a file in the place of the command; put a command before it: "
        f"{_type('check', file)}, or "
        f"{_type('convert', file)} --to STACK"
    )


def _correct_foreign_option(command: str, words: Sequence[str]) -> str | None:
    """Return the corrected command if the file follows an option that only other programs have, as
    in `--config FILE`; None if there is no such mistake.
    """
    for place, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name not in NAMED or (not equals and place + 1 == len(words)):
            continue
        file, rest = (
            (value, words[place + 1 :]) if equals else (words[place + 1], words[place + 2 :])
        )
        if any(_is_launcher(before) for before in words[:place]):
            return None  # the option is the launcher's, or the training's
        return (
            f"{name}: not an option of this command; name the file alone: "
            f"{_type(command, file, *words[:place], *rest)}"
        )
    return None


def _correct_launch_command(command: str, words: Sequence[str]) -> str | None:
    """Return the corrected command if a launch command is in the place of FILE; None if there is no such mistake."""
    first = next(_positional(words), None)
    if first is None or os.path.exists(words[first]):
        return None
    whole = " " in words[first].strip()
    try:
        inner = shlex.split(words[first]) if whole else list(words[first:])
    except ValueError:
        return None
    while inner and re.match(r"\w+=", inner[0]):  # variables that are set for the command
        inner = inner[1:]
    if not inner or not (_is_launcher(inner[0]) or PurePath(inner[0]).name in SHELLS):
        return None
    rest = [*words[:first], *(words[first + 1 :] if whole else _ours(inner))]
    word = words[first] if whole else inner[0]
    if file := _file_of(inner):
        return (
            f"{word}: found a command in the place of FILE; name the file that this command reads: "
            f"{_type(command, file, *rest)}"
        )
    return (
        f"{word}: found a command in the place of FILE; write it into a file such as run.sh, which "
        f"is read and never run: {_type(command, 'run.sh', *rest)}"
    )


def _positional(words: Sequence[str]) -> Iterator[int]:
    """Yield the places of words that are neither an option nor its value."""
    end = words.index("--") if "--" in words else len(words)
    for place, word in enumerate(words[:end]):
        if not word.startswith("-") and (place == 0 or words[place - 1] not in OURS):
            yield place
    yield from range(end + 1, len(words))


def _is_launcher(word: str) -> bool:
    return (
        PurePath(word).name in LAUNCHERS
        or re.fullmatch(r"python3\.\d+", PurePath(word).name) is not None
    )


def _file_of(words: Sequence[str]) -> str | None:
    """Return the config or script in the words of a launch command; None if there is none."""
    for place, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in INNER and (equals or place + 1 < len(words)):
            return value if equals else words[place + 1]
    return next((word for word in words[1:] if word.endswith((".sh", ".slurm", ".sbatch"))), None)


def _ours(words: Sequence[str]) -> Iterator[str]:
    """Yield the options of `stagebridge` that stand among the words of a launch command, with their values."""
    for place, word in enumerate(words):
        if word.partition("=")[0] in OURS:
            yield from (word,) if "=" in word else words[place : place + 2]


def _stacks_alone(command: str, words: Sequence[str], stacks: Sequence[str]) -> str | None:
    """Return the corrected command if stacks are named without --from or --to; None if there is no such mistake."""
    alone = [
        word
        for place, word in enumerate(words)
        if word in stacks and (place == 0 or not words[place - 1].startswith("-"))
    ]
    if not alone or command not in ("convert", "verify") or "--to" in words or len(alone) > 2:
        return None
    rest = [word for word in words if word not in alone]
    options = ["--to", alone[-1]] if len(alone) == 1 else ["--from", alone[0], "--to", alone[1]]
    return f"{' '.join(alone)}: stacks are named with --from and --to: {_type(command, *rest, *options)}"


def _without_target(command: str, words: Sequence[str], stacks: Sequence[str]) -> str | None:
    """Return the message for a missing --to; None if --to is not missing."""
    if (
        command not in ("convert", "verify")
        or not words
        or any(word.partition("=")[0] == "--to" for word in words)
    ):
        return None
    return f"--to: missing; name the stack to convert to: {', '.join(stacks)}"
