"""Terms: a number of bytes, the kind of memory it belongs to, and the formula that gives it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal

Kind = Literal[
    "weights",
    "gradients",
    "master",
    "moments",
    "activations",
    "logits",
    "buffers",
    "workspace",
    "host",
]
STATES: tuple[Kind, ...] = ("weights", "gradients", "master", "moments")
"""Kinds of memory that a run keeps between steps."""
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Term:
    """A number of bytes on one rank. `kind` "host" is memory of the host, which no device has to
    hold. `formula` is the product that gives the bytes, with every factor named.
    """

    kind: Kind
    what: str
    bytes: int
    formula: str


def product(kind: Kind, what: str, *factors: tuple[float, str]) -> Term:
    """Return the term whose bytes are the product of `factors`, rounded to whole bytes. A factor is
    a number with the name of what it counts.
    """
    formula = " x ".join(f"{number:,.10g} {name}".strip() for number, name in factors)
    return Term(kind, what, round(prod(number for number, _ in factors)), formula)


def sum_by_kind(terms: Iterable[Term]) -> Mapping[Kind, int]:
    """Return the bytes of each kind that occurs in `terms`, in the order of their first terms."""
    sizes: dict[Kind, int] = {}
    for term in terms:
        sizes[term.kind] = sizes.get(term.kind, 0) + term.bytes
    return sizes


def device_bytes(terms: Iterable[Term]) -> int:
    """Number of bytes that `terms` take on the device."""
    return sum(term.bytes for term in terms if term.kind != "host")
