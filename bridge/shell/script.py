"""A launch script as data: its training runs with words, ranks and variables, and the files that the script writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from bridge.errors import SourceError
from bridge.files.document import TEXT, Document
from bridge.shell.launch import Launch
from bridge.shell.word_pieces import text_if_known

if TYPE_CHECKING:
    from bridge.shell.launch_search import LaunchSearch


@dataclass(frozen=True)
class Script:
    """A script, read as if it were started with only the variables and arguments in `outside`.

    `outside` has variables by name, and arguments by number. `chosen` is the number of the wanted
    run, counted from 1.
    """

    text: str
    name: str = TEXT
    outside: Mapping[str, str] = field(default_factory=dict)
    chosen: int | None = None

    def start_with(self, outside: Mapping[str, str], chosen: int | None) -> Script:
        """Return the same script, started with the variables and arguments in `outside` and with the run `chosen`."""
        return replace(self, outside=outside, chosen=chosen)

    def change(self, change: Callable[[Launch], Launch]) -> Script:
        """Return the same script, whose runs are those that `change` returns."""
        changed = replace(self)
        changed.__dict__["launches"] = tuple(map(change, self.launches))
        return changed

    @cached_property
    def search(self) -> LaunchSearch:
        """The runs of the script, and the reader that has read it."""
        # The reader is a third of our code, and only scripts need it.
        from bridge.shell.launch_search import LaunchSearch

        return LaunchSearch(self.text, self.name, self.outside)

    @cached_property
    def launches(self) -> tuple[Launch, ...]:
        """Every training run that the script starts."""
        return self.search.launches

    def strays(self) -> Iterator[tuple[int, str, str]]:
        """Yield line, flag and reason for each flag that a shell reads as a command, because the
        line before does not end in a backslash.
        """
        return self.search.strays()

    @property
    def variables_with_value(self) -> dict[str, str]:
        """Variables of the script, and of the runs that it starts, whose values are known."""
        values = {
            name: value.pieces
            for name, value in self.search.reader.scope.variables.items()
            if value is not None
        }
        for launch in self.launches:
            values |= launch.environment
        return {
            name: text
            for name, pieces in values.items()
            if (text := text_if_known(pieces)) is not None
        }

    @property
    def unread_sources(self) -> Iterator[tuple[int, str, str]]:
        """Yield line, name and assumption for each sourced file that was not read."""
        for source in dict.fromkeys(self.search.reader.sourced):
            assumption = (
                "the file is assumed to set up tools, but nothing that the run uses"
                if source.tools
                else "the file is assumed to set variables, and to do nothing else"
            )
            yield (
                source.line,
                f"source {source.name}",
                f"the file is not read; {assumption}: {source.why}",
            )

    @property
    def unset_variables(self) -> Iterator[tuple[int, str, str]]:
        """Yield line, variable and assumption for each variable that decides a branch although nothing sets it."""
        for name, line in self.search.reader.unset_deciders.items():
            yield (
                line,
                f"${name}",
                f"not set, and a condition reads it; stagebridge assumes that it is empty; if your"
                f" environment sets it, add --env {name}=...",
            )

    def launch(self, fits: Callable[[Launch], bool], what: str) -> Launch:
        """Return the run for which `fits` is true. If a run is chosen, return that one.

        Raises `SourceError` if no run fits, or if several fit and none is chosen.
        """
        if self.chosen is not None:
            return self._run_at(self.chosen)
        fitting = [
            (number, launch) for number, launch in enumerate(self.launches, 1) if fits(launch)
        ]
        if not fitting:
            raise SourceError(
                f"{self.name}: found no run with {what}; runs of the script: {self.runs_text}",
                *self.messages_on_missed,
            )
        if len(fitting) > 1:
            messages = (f"{self.name}: --launch {number}: {launch}" for number, launch in fitting)
            raise SourceError(
                f"{self.name}: starts {len(fitting)} runs with {what}; name one with --launch",
                *messages,
            )
        return fitting[0][1]

    @property
    def runs_text(self) -> str:
        """The runs that the script starts, as text for messages."""
        return "; ".join(map(str, self.launches)) or "none"

    @property
    def _unknown(self) -> Iterator[str]:
        """Messages about words of runs that may expand to any number of flags."""
        loose = (launch.opaque[index] for launch in self.launches for index in sorted(launch.loose))
        return (f"{self.name}: {message}" for message in dict.fromkeys(loose))

    def _run_at(self, number: int) -> Launch:
        if not 1 <= number <= len(self.launches):
            messages = (
                f"{self.name}: {index}: {launch}" for index, launch in enumerate(self.launches, 1)
            )
            raise SourceError(
                f"{self.name}: there is no run {number}; the script starts {len(self.launches)}",
                *messages,
            )
        return self.launches[number - 1]

    @property
    def messages_on_missed(self) -> list[str]:
        """Messages about possible runs that were not read: flags that a shell reads as a command, and likely launches."""
        return self.search.messages_on_missed(
            {launch.line for launch in self.launches}, self._unknown
        )


def load_script(text: str, name: str = TEXT) -> Document:
    """Parse a shell script. The document's `data` is the `Script`."""
    return Document(Script(text, name), {}, "script", name=name)
