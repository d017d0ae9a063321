"""Mutations that keep most inputs valid: values of one type exchanged, numbers moved to a neighbour, two files spliced."""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from random import Random
from typing import Any

BOUNDS = (0, 1, 2, 4, 8, 64, 1024, 2**20, 2**31 - 1, 2**31, 2**63 - 1, 0.0, 1.0, 0.5, 1e-8, 1e8)
Path = tuple[str, ...]


class Pool:
    """What real files say, by the place that they say it at, and which keys stand there."""

    def __init__(self, trees: Iterable[Any], known: Mapping[str, Any] | None = None) -> None:
        self.values: dict[Path, list[Any]] = defaultdict(list)
        self.keys: dict[Path, dict[str, Any]] = defaultdict(dict)
        for tree in trees:
            self._add(tree, ())
        for path, value in (known or {}).items():
            *parents, last = path.split(".")
            self.keys[tuple(parents)].setdefault(last, value)

    def _add(self, data: Any, path: Path) -> None:
        if isinstance(data, dict):
            for key, value in data.items():
                self.values[*path, key].append(value)
                self.keys[path][key] = value
                self._add(value, (*path, key))

    def tree(self, random: Random, data: Any, times: int = 3) -> Any:
        """`data`, changed in a few places as its owner might have changed it."""
        found = copy.deepcopy(data)
        for _ in range(random.randint(0, times)):
            self._change(random, found)
        return found

    def _change(self, random: Random, data: Any) -> None:
        holder, key, path = random.choice(list(_entries(data)) or [(data, None, ())])
        kind = random.randrange(6)
        parent = path[:-1]
        if kind == 0 and self.keys[parent]:
            added = random.choice(list(self.keys[parent]))
            holder[added] = copy.deepcopy(
                random.choice(self.values.get((*parent, added)) or [self.keys[parent][added]])
            )
        elif key is None:
            return
        elif kind == 1 and self.values[path]:
            holder[key] = copy.deepcopy(random.choice(self.values[path]))
        elif kind == 2 and random.random() < 0.3:
            del holder[key]
        else:
            holder[key] = near(random, holder[key])


def _entries(data: Any, path: Path = ()) -> Iterable[tuple[dict[str, Any], str, Path]]:
    for key, value in data.items() if isinstance(data, dict) else ():
        yield data, key, (*path, key)
        yield from _entries(value, (*path, key))


def near(random: Random, value: Any) -> Any:
    """Another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        moved = random.choice((value + 1, value - 1, value * 2, value * 4, value / 2, value / 10))
        return type(value)(random.choice((*[moved] * 4, random.choice(BOUNDS))))
    if isinstance(value, str) and re.fullmatch(r"-?\d{1,15}", value):
        return str(near(random, int(value)))
    if isinstance(value, list) and value:
        return random.choice(
            (value[::-1], value[:-1], [near(random, item) for item in value], value * 2)
        )
    return value


def groups(words: list[str]) -> list[list[str]]:
    """Words by the flag that they belong to."""
    found: list[list[str]] = []
    for word in words:
        if word.startswith("--") or not found:
            found.append([])
        found[-1].append(word)
    return found


class Flags:
    """Command lines spliced flag by flag."""

    def __init__(self, launches: Iterable[list[str]], known: Iterable[str] = ()) -> None:
        self.values: dict[str, list[list[str]]] = defaultdict(list)
        for launch in launches:
            for name, *values in groups(launch):
                self.values[name].append(values)
        for name in known:
            self.values[name] = self.values.get(name) or [[], ["1"]]
        self.names = sorted(self.values)

    def mutant(self, random: Random, launch: list[str], times: int = 3) -> list[str]:
        """`launch` with flags added from others, values exchanged, moved to a neighbour, and flags dropped."""
        found = groups(launch)
        for _ in range(random.randint(0, times)):
            place, kind = random.randrange(len(found)), random.randrange(5)
            name, *values = found[place]
            if kind == 0:
                added = random.choice(self.names)
                found.insert(place, [added, *random.choice(self.values[added])])
            elif kind == 1 and self.values[name]:
                found[place] = [name, *random.choice(self.values[name])]
            elif kind == 2 and len(found) > 1 and random.random() < 0.3:
                del found[place]
            else:
                found[place] = [name, *(near(random, value) for value in values)]
        return [word for group in found for word in group]
