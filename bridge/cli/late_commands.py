"""Commands that are listed by name and help, and whose options are declared when the command is asked for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

Command = Callable[..., Any]
PLAIN: dict[str, Any] = {
    "pretty_exceptions_enable": False,
    "rich_markup_mode": None,  # markup would take [tool.stagebridge] for a style
}
"""Settings of every group of commands."""


def _process_given(process: Command, context: Any, value: Any) -> Any:
    """Have a parameter check `value`, if it was given: what checks values is built for each parameter."""
    return process(context, value) if value is not None else None


class Group(TyperGroup):
    """A group of commands. One command has its options from `declare` on, or once it is to run."""

    def declare(self, name: str) -> Any:
        """Return the command `name` with its options, or None if there is none."""
        command: Any = self.commands.get(name)
        declaration = getattr(getattr(command, "callback", None), "declaration", None)
        if declaration is not None:
            command = self.commands[name] = get_command(declaration())
            for parameter in command.params:
                if not parameter.required:
                    parameter.process_value = partial(_process_given, parameter.process_value)
        return command

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the name and the command that `args` ask for, and the remaining words."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, self.declare(name) if name else command, rest


class Commands(typer.Typer):
    """Commands of the command line, or of one of its groups."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(cls=Group, no_args_is_help=True, **PLAIN, **settings)

    def late_command(
        self,
        name: str | None = None,
        *,
        reads: Callable[[Command], Command] | None = None,
        **settings: Any,
    ) -> Callable[[Command], Command]:
        """Return a decorator that adds a function as a command. `reads` is applied to the function when the command
        is declared; `settings` are those of `typer.Typer.command`.
        """

        def add_command(function: Command) -> Command:
            def declaration() -> typer.Typer:
                alone = typer.Typer(add_completion=False, **PLAIN)
                alone.command(name, **settings)(reads(function) if reads else function)
                return alone

            def listed() -> None:
                """Stand for the command where commands are listed."""

            listed.__name__, listed.declaration = function.__name__, declaration  # type: ignore[attr-defined]
            self.command(name, **settings)(listed)
            return function

        return add_command
