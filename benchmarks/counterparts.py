"""Fields that only one stack is said to have and that change the numbers, beside fields of other stacks that look alike.

Two fields look alike if the words of one's name are among the words of the other's, or if their descriptions share
most of their words. Each pair is a plan field, or declined in `declined.json`: by reason, each field with those of other
stacks that only look like it.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import compat
from bridge.plan.section import fields
from bridge.stack.rules import Effect

DECLINED = Path(__file__).with_name("declined.json")
ALIKE = 0.5
"""Share of the words of two descriptions, those that nearly every description has left out, from which on they look alike."""
_FILLERS = (
    "a an and as at be by for from in into is it its no none not of off on or over per than that the their them then they "
    "this to use used uses value what when where whether which with without number set given model layer layers"
)
COMMON = frozenset(_FILLERS.split())


class Place(NamedTuple):
    """A field of a stack, with the words of its name's last part and of its description."""

    stack: str
    path: str
    name: frozenset[str]
    doc: frozenset[str]
    mapped: bool

    def __str__(self) -> str:
        return f"{self.stack}:{self.path}"


class Proposal(NamedTuple):
    """A field without a counterpart, one that looks like it, and why."""

    mine: Place
    theirs: Place
    why: str

    @property
    def key(self) -> str:
        """Both fields."""
        return f"{self.mine} ~ {self.theirs}"


def words(text: str) -> frozenset[str]:
    """The words of a name or a description that tell something, without a plural's s."""
    found = re.findall(r"[a-z0-9]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", text).lower())
    return frozenset(word.rstrip("s") or word for word in found) - COMMON


def places(stack: str) -> Iterator[Place]:
    """Every field of a stack."""
    dialect = compat.load(stack)
    known = fields(dialect.schema)
    for rule in dialect.rules:
        for path in rule.theirs:
            doc = known[path].doc if path in known else ""
            yield Place(
                stack,
                path,
                words(path.rpartition(".")[2]),
                words(doc),
                bool(rule.paths_of_plan(path)),
            )


def alone(stack: str) -> frozenset[str]:
    """Fields of a stack that no plan field stands for and whose loss changes the numbers."""
    rules = (
        rule for rule in compat.load(stack).rules if not rule.ours and rule.effect is Effect.NUMBERS
    )
    return frozenset(path for rule in rules for path in rule.theirs)


def alike(mine: Place, theirs: Place) -> str:
    """Why two fields look alike; empty: they do not."""
    if mine.name and mine.name == theirs.name:
        return "same name"
    shared, all_ = mine.doc & theirs.doc, mine.doc | theirs.doc
    if len(shared) > 1 and len(shared) >= ALIKE * len(all_):
        return "description: " + " ".join(sorted(shared))
    inside = min(mine.name, theirs.name, key=len)
    return "name inside name" if len(inside) > 1 and mine.name & theirs.name == inside else ""


def proposals() -> Iterator[Proposal]:
    """Pairs of fields of two stacks that look alike, of which one has no counterpart and changes the numbers."""
    known = {stack: tuple(places(stack)) for stack in compat.names()}
    for stack, mine in known.items():
        lonely = [place for place in mine if place.path in alone(stack)]
        others = [place for other, found in known.items() if other != stack for place in found]
        for place in lonely:
            for other in others:
                if why := alike(place, other):
                    yield Proposal(place, other, why)


def declined() -> dict[str, str]:
    """The reason for each pair that is declined."""
    reasons = json.loads(DECLINED.read_text("utf-8"))
    return {
        f"{mine} ~ {other}": reason
        for reason, fields_ in reasons.items()
        for mine, others in fields_.items()
        for other in others
    }


def main() -> int:
    """Print what is proposed; 1 if a proposal is neither taken nor declined."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--open", action="store_true", help="only proposals without an answer")
    options = parser.parse_args()
    reasons, found = declined(), list(proposals())
    unanswered = [proposal for proposal in found if proposal.key not in reasons]
    for proposal in unanswered if options.open else found:
        print(f"{proposal.key}  ({proposal.why})  {reasons.get(proposal.key, 'OPEN')}")
    stale = reasons.keys() - {proposal.key for proposal in found}
    for key in sorted(stale):
        print(f"{key}  (no longer proposed)")
    answered = len(found) - len(unanswered)
    print(
        f"{len(found)} proposals, {answered} declined, {len(unanswered)} open, {len(stale)} declined in vain"
    )
    return 1 if unanswered or stale else 0


if __name__ == "__main__":
    sys.exit(main())
