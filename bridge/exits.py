"""Exit codes: one table for every command, in numbers and in words."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """What a command ends with."""

    CLEAN = 0
    ERROR = 1
    FINDINGS = 2
    UNPROVED = 3


MEANING = {
    Exit.CLEAN: "nothing at or above the threshold",
    Exit.FINDINGS: "findings at or above it: different numbers, or what --fail-on names",
    Exit.ERROR: "wrong usage, refused, or the run stops",
    Exit.UNPROVED: "nothing was proved",
}
"""The table, as people read it."""


def table(*, clean: str = "", findings: str = "", error: str = "", unproved: str = "") -> str:
    """The codes of one command for its help: what it says of each in its own words, else what all of them mean by it.

    Only `verify` and `trace diff` prove something, and commands without findings say so by `findings="-"`.
    """
    words = dict(zip((Exit.CLEAN, Exit.FINDINGS, Exit.ERROR), (clean, findings, error), strict=True))
    own = {**words, **({Exit.UNPROVED: unproved} if unproved else {})}
    rows = (f"  {code.value}  {said or MEANING[code]}" for code, said in own.items() if said != "-")
    return "\n".join(("\b", "Exit codes:", *rows, ""))
