"""Mutants of real files: their trees changed key by key and value by value, and their texts cut, spliced and flipped."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

ODD: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        2,
        3,
        7,
        8,
        1.5,
        -0.0,
        1e-300,
        1e300,
        10**9,
        2**31,
        2**63 - 1,
        2**63,
        -(2**63),
        10**400,
    ),
    *(
        "",
        " ",
        "auto",
        "null",
        "none",
        "1",
        "-1",
        "1e3",
        "0x10",
        "nan",
        "inf",
        "true",
        "é",
        "\u202e",
        "\x1b[2J",
        "a" * 5000,
        "a.b",
    ),
    *(
        "9" * 5000,
        "../x",
        "/dev/zero",
        "[1]",
        "(1,2)",
        "([1]*3)",
        "*",
        "${X}",
        "$(x)",
        "%",
        "1,2",
        "float32",
        "torch.bfloat16",
    ),
    *(
        [],
        {},
        [[]],
        [None],
        {"": None},
        {"a": {}},
        [1, 2],
        ["a"],
        {"a": 1},
        [{}],
        [[1, [2]]],
        {"0": [1.5]},
    ),
)
"""Values that readers meet where they expect another."""
PIECES = (
    *(
        "\0",
        "\n",
        "\t",
        "\r",
        "\ufeff",
        "\u2028",
        "'",
        '"',
        "{",
        "}",
        "[",
        "]",
        ":",
        ": ",
        ",",
        "- ",
        "#",
        "&a ",
        "*a",
        "<<: *a\n",
    ),
    *(
        "!!python/x ",
        "!x ",
        "|\n",
        ">\n",
        "? ",
        "---\n",
        "...\n",
        "%YAML 1.2\n",
        "\\",
        "\\u0000",
        "//",
        "/*",
        "'''",
        "=",
        "--",
        "-",
    ),
    *(
        " --a.b.c 1",
        " a=1",
        "$X",
        "${X:-1}",
        "$((1+",
        "`x`",
        "(",
        ")",
        "|",
        "&",
        ";",
        "<<E\n",
        "1e999",
        "9" * 400,
        "0x",
        "NaN",
    ),
)
"""Text that is put into another."""


def tree(random: Random, data: Any, times: int = 2) -> Any:
    """`data`, plain mappings, lists and scalars, changed in a few places."""
    found = json.loads(json.dumps(data))
    for _ in range(random.randint(1, times)):
        found = _changed(random, found)
    return found


def _places(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = (
        data.items()
        if isinstance(data, dict)
        else enumerate(data)
        if isinstance(data, list)
        else ()
    )
    return [path, *(place for key, value in inner for place in _places(value, (*path, key)))]


def _changed(random: Random, data: Any) -> Any:
    *parents, last = random.choice(_places(data)) or (None,)
    holder = data
    for step in parents:
        holder = holder[step]
    if last is None:
        return random.choice((ODD[random.randrange(len(ODD))], [data], {"a": data}, data))
    kind = random.randrange(8)
    if kind == 0:
        del holder[last]
    elif kind == 1 and isinstance(holder, dict):
        holder[_key(random, last)] = holder.pop(last)
    elif kind == 2 and isinstance(holder, dict):
        holder[_key(random, last)] = holder[last]
    elif kind == 3:
        holder[last] = random.choice(
            ({"a": holder[last]}, [holder[last]], [holder[last]] * 3, {str(last): holder[last]})
        )
    elif kind == 4 and isinstance(holder[last], int | float) and not isinstance(holder[last], bool):
        value = holder[last]
        holder[last] = random.choice(_near(value))
    elif kind == 5:
        holder[last] = _at(data, random.choice(_places(data)))
    else:
        holder[last] = random.choice(ODD)
    return json.loads(json.dumps(data, default=str))


def _near(value: int | float) -> tuple[Any, ...]:
    """Other values of a number; one beyond what a float holds stays whole."""
    exact = (-value, value + 1, value * 2, value * 10**9, value - 1)
    return (
        exact if abs(value) > sys.float_info.max else (*exact, value / 2, str(value), float(value))
    )


def _at(data: Any, path: tuple[Any, ...]) -> Any:
    for step in path:
        data = data[step]
    return json.loads(json.dumps(data))


def _key(random: Random, key: Any) -> str:
    text = str(key)
    cut = random.randrange(len(text) + 1)
    return random.choice(
        (
            text[:cut] + text[cut + 1 :],
            text + "_",
            text.upper(),
            text[::-1],
            "",
            f"a.{text}",
            "é",
            text + ".",
            " ",
        )
    )


def text(random: Random, source: str, times: int = 3) -> str:
    """`source`, changed in a few places."""
    for _ in range(random.randint(1, times)):
        source = _spliced(random, source)
    return source[: random.randrange(len(source) + 1)] if random.random() < 0.1 else source


def _spliced(random: Random, source: str) -> str:
    """`source` with something else in one place."""
    start = random.randrange(len(source) + 1)
    end = min(len(source), start + random.choice((0, 1, 1, 5, 40)))
    makers: tuple[Callable[[], str], ...] = (
        lambda: random.choice(PIECES),
        lambda: "",
        lambda: source[start:end] * random.choice((2, 3, 50)),
        lambda: chr(random.choice((random.randrange(128), random.randrange(0xD800), 0x10FFFF))),
        lambda: json.dumps(random.choice(ODD)),
        lambda: source[random.randrange(len(source) + 1) :][:30],
    )
    return source[:start] + random.choice(makers)() + source[end:]


def as_json(data: Any) -> str:
    """JSON."""
    return json.dumps(data, indent=1)


def as_yaml(data: Any) -> str:
    """YAML in blocks, each scalar as JSON has it; lists in one line."""
    return (
        "\n".join(_blocks(data, "")) + "\n" if isinstance(data, dict) and data else json.dumps(data)
    )


def _blocks(data: dict[str, Any], indent: str) -> Iterator[str]:
    for key, value in data.items():
        name = (
            key
            if re.fullmatch(r"[a-z]\w{2,}", key)
            and key not in ("yes", "off", "true", "null", "false")
            else json.dumps(key)
        )
        if isinstance(value, dict) and value:
            yield f"{indent}{name}:"
            yield from _blocks(value, indent + "  ")
        else:
            yield f"{indent}{name}: {json.dumps(value)}"
