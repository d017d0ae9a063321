"""Values with their sources: who gives each, whom it replaced, and which of them are heard."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from bridge.stack.sources import DEFAULT, Claim, Said, Settled

TRUE, FALSE = ("y", "yes", "t", "true", "on", "1"), ("n", "no", "f", "false", "off", "0")
OPTION = "an option of the launch wins over the config file and over variables of the shell; drop one of the two"
CONFIG = "the launcher writes this variable by its config file; drop one of the two"
USUAL = "the launcher writes this variable also where nobody gives the option; give the option"
OTHER = "{} is read instead; drop one of the two"


@cache
def facts() -> Mapping[str, Any]:
    """Return what `harvest` read from accelerate's code."""
    rows: Mapping[str, Any] = json.loads(
        files("compat.accelerate").joinpath("release.json").read_text("utf-8")
    )
    return rows


def default(name: str, value: Any) -> Said:
    """Return what accelerate itself says of a setting that nobody gives."""
    return Said(name, value, f"accelerate {facts()['release']}{DEFAULT}")


class Refusal(Exception):
    """accelerate refuses the run: the setting, if one is to blame, and a sentence."""

    def __init__(self, message: str, statement: Said | None = None) -> None:
        super().__init__(message)
        self.message, self.said = message, statement


@dataclass(frozen=True, slots=True)
class Slot:
    """A value, who gives it, and those that it replaced."""

    value: Any
    said: Said
    lost: tuple[Said, ...] = ()

    @property
    def is_given(self) -> bool:
        """Whether somebody gives the value, and not accelerate itself."""
        return not self.said.source.endswith(DEFAULT)

    def after(self, other: Slot | None) -> Slot:
        """Return this slot as one that replaces `other`."""
        before = (
            (other.said, *other.lost) if other and other.is_given else other.lost if other else ()
        )
        return Slot(self.value, self.said, (*self.lost, *before))


@dataclass
class Run:
    """What accelerate makes of a run, in the order in which it does: `settings` in force, and which of what was
    said is `heard`, by setting and source.
    """

    settings: list[Settled] = field(default_factory=list)
    heard: set[tuple[str, str]] = field(default_factory=set)

    def hear(self, *statements: Said) -> None:
        """Record that something reads what was said."""
        self.heard |= {(one.setting, one.source) for one in statements}

    def settle(
        self, name: str, slot: Slot, parse: Callable[[Any], Any] | None = None, why: str = ""
    ) -> Any:
        """Record a setting in force, with those that it overrules, and return its value.

        Raises `Refusal` if accelerate cannot parse it.
        """
        self.hear(slot.said)
        # A value that is no text came from YAML or from an option with a type.
        kind = type(slot.value) if isinstance(slot.value, (int, float)) else str
        reads = parse or (is_true if kind is bool else kind)
        value = _parse_slot(reads, slot) if parse else slot.value
        claims = []
        for statement in slot.lost:
            if (statement.setting, statement.source) in self.heard:
                continue
            claim = Claim(name, _value_if_parsed(reads, statement), statement, _advice_on(slot))
            if claim.is_met_by(value):
                self.heard |= {(statement.setting, statement.source)} if slot.is_given else set()
            else:
                self.hear(statement)
                claims.append(claim)
        self.settings.append(Settled(name, value, slot.said, tuple(claims), why))
        return value

    def add(self, name: str, value: Any, statement: Said | None = None, why: str = "") -> None:
        """Record a setting that follows from others."""
        self.settings.append(Settled(name, value, statement or default(name, value), (), why))


def _advice_on(slot: Slot) -> str:
    """Return why a slot's source wins, and what to do."""
    if not slot.is_given:
        return USUAL
    if slot.said.setting.startswith("--"):
        return OPTION
    return OTHER.format(slot.said.setting) if slot.said.setting.isupper() else CONFIG


def _parse_slot(parse: Callable[[Any], Any], slot: Slot) -> Any:
    try:
        return parse(slot.value)
    except Refusal as error:
        raise Refusal(error.message, slot.said) from None
    except (ValueError, TypeError, AttributeError, KeyError):
        raise Refusal(f"found {slot.value!r}, which accelerate cannot read", slot.said) from None


def _value_if_parsed(parse: Callable[[Any], Any], statement: Said) -> Any:
    """Return what a source that lost would have given; what it says, if that cannot be read."""
    try:
        return parse(str(statement.value))
    except (Refusal, ValueError, TypeError, AttributeError, KeyError):
        return statement.value


def is_true(text: Any) -> bool:
    """Return the truth of a text, as accelerate's str_to_bool does."""
    if str(text).lower() in TRUE:
        return True
    if str(text).lower() in FALSE:
        return False
    raise Refusal(f"found {text}, expected a truth value such as true or false")


def one_of(names: Iterable[str], text: str) -> str:
    """Return the name in a list that `text` stands for; raises `Refusal` if there is none."""
    choices = tuple(names)
    if text.upper() in choices:
        return text.upper()
    if text.isdigit() and 1 <= int(text) <= len(choices):
        return choices[int(text) - 1]
    raise Refusal(f"found {text}, expected one of {', '.join(choices)}")
