"""Values with their sources: who gives each, whom it replaced, and which of them are heard."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from typing import Any

from bridge.stack.sources import DEFAULT, Claim, Said, Settled

TRUE, FALSE = ("y", "yes", "t", "true", "on", "1"), ("n", "no", "f", "false", "off", "0")
OPTION = "an option of the launch wins over the config file and over variables of the shell; drop one of the two"
CONFIG = "the launcher writes this variable by its config file; drop one of the two"
USUAL = "the launcher writes this variable also where nobody gives the option; give the option"
OTHER = "{} is read instead; drop one of the two"
QUIET = re.compile(r"(machine_rank|main_training_function|rdzv_backend|same_network|downcast_bf16|tpu_\w+|debug"
                   r"|enable_cpu_affinity|compute_environment|deepspeed_config\.deepspeed_multinode_launcher"
                   r"|--machine_rank|--deepspeed_multinode_launcher|ACCELERATE_DEBUG_MODE|ACCELERATE_USE_\w+)")  # fmt: skip
"""Settings without an effect on a step, whatever they say."""
CHEAP = re.compile(r"(?i).*(offload|prefetch|wrap|min_num_params|state_dict|checkpointing|ram_efficient|zero3|reshard"
                   r"|sharding_strategy|zero_stage|dynamo|threads|cpu_affinity|use_orig_params|sync_module).*")  # fmt: skip
"""Settings that change memory and speed alone."""


@cache
def _read(name: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads(
        files("compat.accelerate").joinpath(name).read_text("utf-8")
    )
    return found


def releases() -> tuple[str, ...]:
    """Return the known releases, oldest first."""
    changes = _read("changes.json")
    return (changes["oldest"], *(row["release"] for row in changes["changes"]))


RELEASE: ContextVar[str] = ContextVar("RELEASE")
"""The release that a run is read for; the newest one, unless somebody names another."""


@contextmanager
def at_release(release: str) -> Iterator[None]:
    """Context in which `facts` are those of a release."""
    token = RELEASE.set(release)
    try:
        yield
    finally:
        RELEASE.reset(token)


def since(release: str) -> bool:
    """Return whether the run's release is `release`, which is known, or a newer one."""
    known = releases()
    return known.index(RELEASE.get(known[-1])) >= known.index(release)


OVER_SECTIONS = "1.5.2"
"""First known release in which options of the launch win over sections of the config file; before, the sections win
(commands/launch.py: _validate_launch_command).
"""
SECTION = "before accelerate 1.5 a section of the config file wins over an option of the launch; drop one of the two"


def facts() -> Mapping[str, Any]:
    """Return what `harvest` read from the code of the run's release."""
    return _facts_of(RELEASE.get(releases()[-1]))


@cache
def _facts_of(release: str) -> Mapping[str, Any]:
    """Return the newest facts without what came after a release, and with what went after it."""
    found = {**_read("release.json"), "release": release}
    for row in reversed(_read("changes.json")["changes"]):
        if row["release"] == release:
            break
        new, gone = row.get("new", ()), row.get("gone", [])
        changed = row.get("before", {})
        found["options"] = [
            {**one, "default": changed.get(one["name"], one["default"])} for one in found["options"]
        ]
        found["options"] = [*(one for one in found["options"] if one["name"] not in new), *gone]
        keys = {
            name: value
            for name, value in found["keys"].items()
            if name not in row.get("new_keys", ())
        }
        found["keys"] = {**keys, **dict.fromkeys(row.get("gone_keys", ()))}
        for name in ("types", "backends", "launchers"):
            rest = [one for one in found[name] if one not in row.get(f"new_{name}", ())]
            found[name] = [*rest, *row.get(f"gone_{name}", ())]
    return found


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
    """A value, who gives it, those that it replaced, and why, where the places alone do not tell it."""

    value: Any
    said: Said
    lost: tuple[Said, ...] = ()
    why: str = ""

    @property
    def is_given(self) -> bool:
        """Whether somebody gives the value, and not accelerate itself."""
        return not self.said.source.endswith(DEFAULT)

    def after(self, other: Slot | None) -> Slot:
        """Return this slot as one that replaces `other`."""
        before = (
            (other.said, *other.lost) if other and other.is_given else other.lost if other else ()
        )
        return replace(self, lost=(*self.lost, *before))


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
        self.settings.append(
            Settled(name, value, slot.said, self.claim(name, slot, value, reads), why)
        )
        return value

    def claim(
        self, name: str, slot: Slot, value: Any, reads: Callable[[Any], Any]
    ) -> tuple[Claim, ...]:
        """Return what a slot replaced and what is not met by its value; record what is heard."""
        claims = []
        for said in slot.lost:
            if (said.setting, said.source) in self.heard:
                continue
            claim = Claim(name, _value_if_parsed(reads, said), said, _advice_on(slot, said))
            if claim.is_met_by(value):
                self.heard |= {(said.setting, said.source)} if slot.is_given else set()
            else:
                self.hear(said)
                claims.append(claim)
        return tuple(claims)

    def add(self, name: str, value: Any, statement: Said | None = None, why: str = "") -> None:
        """Record a setting that follows from others."""
        self.settings.append(Settled(name, value, statement or default(name, value), (), why))


def _advice_on(slot: Slot, said: Said) -> str:
    """Return why a slot's source wins over what was said, and what to do."""
    if slot.why:
        return slot.why
    if not slot.is_given:
        return USUAL
    if slot.said.setting.startswith("--"):
        return OPTION
    if said.setting.startswith("--"):
        return SECTION
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
