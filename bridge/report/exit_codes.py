"""Exit codes: one table for every command, in numbers and in words."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """The code that a command ends with."""

    CLEAN = 0
    ERROR = 1
    FINDINGS = 2
    UNPROVED = 3


MEANING = {
    Exit.CLEAN: "no finding at or above the threshold",
    Exit.FINDINGS: "findings at or above the threshold: different numbers, or the --fail-on effect",
    Exit.ERROR: "wrong usage, a refused input, or a run that stops",
    Exit.UNPROVED: "nothing was proved",
}
"""Each code in words, for all commands."""


def table(*, clean: str = "", findings: str = "", error: str = "", unproved: str = "") -> str:
    """Return the exit codes of one command, for its help. Each code is described by the given text,
    or by its text in `MEANING`.

    `findings="-"` leaves out the code for findings. `unproved` describes the code for "nothing was
    proved"; only `verify` and `trace diff` have this code.
    """
    words = {Exit.CLEAN: clean, Exit.FINDINGS: findings, Exit.ERROR: error}
    if unproved:
        words[Exit.UNPROVED] = unproved
    rows = (
        f"  {code.value}  {meaning or MEANING[code]}"
        for code, meaning in words.items()
        if meaning != "-"
    )
    # click prints a paragraph that begins with \b without filling its lines.
    return "\n".join(("\b", "Exit codes:", *rows, ""))
