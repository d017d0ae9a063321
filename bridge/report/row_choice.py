"""The choice of rows that a report shows."""

from __future__ import annotations

from dataclasses import dataclass

from bridge.stack.effects import Effect


@dataclass(frozen=True)
class View:
    """The choice of rows that a report shows.

    `everything` adds rows without effect on the run. If `only` is set, only rows with these effects
    are shown. With `quiet`, only the verdict is shown. `origins` adds the source of each written
    value.
    """

    everything: bool = False
    quiet: bool = False
    only: tuple[Effect, ...] = ()
    origins: bool = False

    def shows(self, effect: Effect) -> bool:
        """Return whether rows with this effect are shown."""
        return effect in self.only if self.only else self.everything or effect is not Effect.NONE


USUAL = View()
"""The view by default: every row that has an effect on the run."""
