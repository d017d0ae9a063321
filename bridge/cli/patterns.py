"""Patterns of --select and --ignore that match no rule: they are refused, as a misspelled pattern
would let everything through.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache

from bridge.errors import BridgeError, nearest
from bridge.plan import plan
from bridge.plan.section import fields
from bridge.report.sarif import fits
from bridge.stack import registry
from bridge.stack.findings import DIFFERENCE, UNKNOWN
from bridge.stack.rules import How

ENDS = (*map(str, How), "remark", "unknown")
"""Endings of a finding's id if no check made the finding, such as `remark` in `gradient_clipping/remark`."""
WHERE = "; check --json names the rule of every finding"


def refuse_strange(select: Sequence[str], ignore: Sequence[str]) -> None:
    """Raise `BridgeError` for patterns that no rule of any stack can match."""
    if select or ignore:
        BridgeError.raise_if((*_strange("select", select), *_strange("ignore", ignore)))


def _strange(option: str, patterns: Iterable[str]) -> Iterator[str]:
    for pattern in patterns:
        if option == "ignore" and pattern.endswith(("/remark", "/unknown")):
            # These are also about keys that no stack knows, under --lenient.
            continue
        if not _possible(pattern):
            yield f"{option}: {pattern}: no rule has this id{_instead(pattern) or WHERE}"


def _possible(pattern: str) -> bool:
    head, slash, tail = pattern.rstrip("/").partition("/")
    if head == DIFFERENCE:
        return not tail or _names(tail, (*_paths(), "world_size", "unknown"))
    if not _names(head, (*_paths(), *_heads())):
        return _names(pattern, _ids())
    fits_end = tail in ENDS or any(fnmatchcase(end, tail) for end in ENDS)
    return not slash or fits_end or any(fits(rule, pattern) for rule in _ids())


def _names(pattern: str, names: Iterable[str]) -> bool:
    return any(name == pattern or fnmatchcase(name, pattern) for name in names)


def _instead(pattern: str) -> str:
    head, _, tail = pattern.partition("/")
    if any(path.startswith(f"{head}.") for path in _paths()):
        return f"; {head}.* matches all settings of the section"
    if tail and (own := _heads().get(head)):
        return f"; the rules of {head} are {', '.join(own)}"
    return nearest(head, (*_paths(), *_heads()))


@cache
def _paths() -> frozenset[str]:
    """Return all paths that a finding can be about: the settings of all stacks, and the fields of a plan."""
    own = (path for name in registry.names() for path in fields(registry.load(name).schema))
    return frozenset((*own, *plan.paths()))


@cache
def _ids() -> tuple[str, ...]:
    """Return the ids of the checks of all stacks, and the id of the finding on an unknown release."""
    own = (check.rule for name in registry.names() for check in registry.load(name).checks)
    return tuple(dict.fromkeys((*own, UNKNOWN)))


def by_setting() -> Mapping[str, Sequence[str]]:
    """Return a mapping from settings to the ids of the rules, of all stacks, about that setting."""
    return _heads()


@cache
def _heads() -> Mapping[str, Sequence[str]]:
    """Return a mapping from settings to the ids of the checks about that setting."""
    rules: dict[str, list[str]] = {}
    for rule in _ids():
        rules.setdefault(rule.partition("/")[0], []).append(rule)
    return rules
