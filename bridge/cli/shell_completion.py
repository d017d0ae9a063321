"""Values that a shell completes: stacks, releases, effects, ids of rules, formats, fields.

File names are completed by the shell itself wherever no value is known.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from bridge.errors import BridgeError
from bridge.files import load
from bridge.plan.section import fields
from bridge.stack import registry
from bridge.stack.checkpoint_side import side_of

EFFECTS = ("stops", "numbers", "rounding", "memory", "same-numbers")
ANY = "*"


def complete(command: Any) -> None:
    """Print what the shell asks for of click's `command`, and end the process."""
    _attach_completion(command, ())
    command.main(args=[], prog_name="stagebridge", standalone_mode=False)


def _attach_completion(command: Any, path: tuple[str, ...]) -> None:
    """Give each parameter of `command`, and of the commands below `command`, the function that completes its value."""
    for name in tuple(getattr(command, "commands", ())):
        _attach_completion(command.declare(name), (*path, name))
    for parameter in command.params:
        label = (parameter.metavar or "").strip("[].")
        source = next(
            (
                VALUES[where, label]
                for where in (" ".join(path), path[0] if path else "", ANY)
                if (where, label) in VALUES
            ),
            None,
        )
        if source is not None:
            parameter._custom_shell_complete = _completer_of(source)


def _completer_of(source: Source) -> Callable[[Any, Any, str], list[str]]:
    def values(context: Any, parameter: Any, prefix: str) -> list[str]:
        # A completion that fails is none: an error message would land amid the line that is typed.
        try:
            commands = getattr(context.find_root().command, "commands", ())
            chosen = {k: v for k, v in context.params.items() if v}
            options = {"file": _file(), "commands": commands, **chosen}
            candidates = list(source(options, parameter.name, prefix))
        except (BridgeError, ImportError, OSError):
            return []
        # Values stay in the order of their source, in which releases are sorted.
        return [one for one in dict.fromkeys(candidates) if one.startswith(prefix)]

    return values


def _file() -> str | None:
    """Return the first word of the typed line that is the path of a file; None if there is none.

    The line itself is searched, because the parser passes on no arguments while an option lacks its value.
    """
    line = os.environ.get("_TYPER_COMPLETE_ARGS") or os.environ.get("COMP_WORDS") or ""
    try:
        words = shlex.split(line)
    except ValueError:  # a quote that is still open
        words = line.split()
    return next((word for word in words[2:] if os.path.isfile(word)), None)


Source = Callable[[Mapping[str, Any], str, str], Iterable[str]]
"""Function that returns the possible values of a parameter.

It gets the values of the other parameters, the parameter's name, and the text typed so far.
"""


def _stacks(options: Mapping[str, Any], name: str, prefix: str) -> Iterable[str]:
    return registry.names()


def _targets(options: Mapping[str, Any], name: str, prefix: str) -> Iterable[str]:
    return (*registry.names(), "native")


def _movable(options: Mapping[str, Any], name: str, prefix: str) -> Iterable[str]:
    """The stacks for which `move` writes a checkpoint, and the native engine."""
    return (*(one for one in registry.names() if side_of(registry.load(one)).loads), "native")


def _releases(options: Mapping[str, Any], name: str, prefix: str) -> Iterable[str]:
    """Return the releases of the stack that the options name, else of the stack that the file is for."""
    stack = options.get("to") if name == "to_version" else None
    stack = (
        stack or options.get("from_") or options.get("dialect") or _stack_of(options.get("file"))
    )
    # The newest first: it is the one that is asked for most.
    return reversed(registry.load(stack).versions) if stack else ()


def _stack_of(file: Any) -> str | None:
    """Return the stack that recognises the file; None if no stack does, or if several do equally well."""
    path = file[0] if isinstance(file, (list, tuple)) and file else file
    if not isinstance(path, str) or not Path(path).is_file():
        return None
    scores, _ = registry.recognising(load(Path(path)).data)
    best = [name for name, score in scores.items() if score and score == max(scores.values())]
    return best[0] if len(best) == 1 else None


def _effects(options: Mapping[str, Any], name: str, prefix: str) -> Iterable[str]:
    return EFFECTS


def _rules(options: Mapping[str, Any], name: str, prefix: str) -> Iterable[str]:
    """Return possible values of --select and --ignore: the settings that findings can be about or,
    once SETTING/ is typed, the ids of the rules about that setting.
    """
    from bridge.cli.patterns import by_setting

    rules = by_setting()
    if "/" not in prefix:
        return rules
    return rules.get(prefix.partition("/")[0], ())


def _fields(options: Mapping[str, Any], name: str, prefix: str) -> Iterable[str]:
    stack = options.get("dialect")
    return fields(registry.load(stack).schema) if stack else ()


def _reports(options: Mapping[str, Any], name: str, prefix: str) -> Iterable[str]:
    from bridge.report.sarif import FORMATS

    return ("text", *FORMATS)


def _checkpoints(options: Mapping[str, Any], name: str, prefix: str) -> Iterable[str]:
    from bridge.checkpoint.formats import all_formats
    from bridge.checkpoint.interface import Format

    # A format that only its stack writes has the method of the base class.
    writable = [
        one for one, format in all_formats().items() if type(format).plan is not Format.plan
    ]
    return writable if name == "to" else all_formats()


def _outputs(options: Mapping[str, Any], name: str, prefix: str) -> Iterable[str]:
    from bridge.report.json_types import OUTPUTS

    return OUTPUTS


def _shapes(options: Mapping[str, Any], name: str, prefix: str) -> Iterable[str]:
    from bridge.api.layout import MODELS

    return MODELS


def _commands(options: Mapping[str, Any], name: str, prefix: str) -> Iterable[str]:
    return tuple(options["commands"])


VALUES: Mapping[tuple[str, str], Source] = {
    (ANY, "DIALECT"): _stacks,
    (ANY, "STACK"): _targets,
    (ANY, "V"): _releases,
    (ANY, "EFFECT"): _effects,
    (ANY, "RULE"): _rules,
    (ANY, "FORMAT"): _reports,
    (ANY, "TOOL"): lambda options, name, prefix: ("tensorboard", "wandb"),
    ("checkpoint", "FORMAT"): _checkpoints,
    ("help", "COMMAND"): _commands,
    ("layout", "NAME"): _shapes,
    ("move", "FORMAT"): _checkpoints,
    ("move", "STACK"): _movable,
    ("schema", "COMMAND"): _outputs,
    ("show", "FIELD"): _fields,
}
"""The function that returns the possible values, for each pair of a command and a placeholder.

The placeholder, such as STACK, stands for the value in the help of the command.
"""
