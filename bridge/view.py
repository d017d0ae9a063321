"""What of a report is shown."""

from __future__ import annotations

from dataclasses import dataclass

from bridge.rules import Effect


@dataclass(frozen=True)
class View:
    """What of a report is shown.

    `everything`: rows without effect on the run too; `only`: rows of these effects alone; `quiet`: the verdict alone; `origins`:
    where each written value comes from.
    """

    everything: bool = False
    quiet: bool = False
    only: tuple[Effect, ...] = ()
    origins: bool = False

    def shows(self, effect: Effect) -> bool:
        """Whether rows of this effect are shown."""
        return effect in self.only if self.only else self.everything or effect is not Effect.NONE


USUAL = View()
"""Every row that has an effect on the run."""
