"""Comparison of two checkpoints of any formats: every tensor, and the counters of the runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from bridge.checkpoint.hub import Hub
from bridge.checkpoint.lazy import EXACT, FLOATING, STRIP, WIDTH, Lazy, torch_type
from bridge.files.progress import count_items

ROUNDED = "weight that the model computes with"
EQUAL, DIFFERENT, SHAPE, FIRST, SECOND = (
    "equal",
    "different",
    "of another shape",
    "only in A",
    "only in B",
)


@dataclass(frozen=True)
class TensorLine:
    """The comparison of one tensor in two checkpoints: equal, different (with the largest
    difference), or only in one of them. `rounded` is the number format in which two copies were
    compared, if their own formats differ.
    """

    name: str
    kind: str
    verdict: str
    most: float = 0.0
    rounded: str = ""

    @property
    def block(self) -> str:
        """The part of the model that the tensor belongs to: the tensor's name up to its first number."""
        parts = self.name.split(".")
        at = next((number for number, part in enumerate(parts) if part.isdigit()), len(parts) - 2)
        return ".".join(parts[: at + 1])


def compare_counters(one: Hub, other: Hub) -> dict[str, tuple[Any, Any]]:
    """Return a mapping from each counter and setting to the values of it in the two checkpoints.

    A value that only one checkpoint states is left out, so it does not count as a difference.
    """
    pairs = {
        key: (getattr(one.where, key), getattr(other.where, key))
        for key in ("steps", "skipped", "samples")
    }
    pairs["schedule"] = (one.schedule, other.schedule)
    if one.scale and other.scale:
        pairs |= {
            f"scale.{key}": (value, vars(other.scale)[key])
            for key, value in vars(one.scale).items()
        }
    # A stack keeps its own arguments there too, which say how a run was launched: only single values are compared.
    single = {
        key: value
        for key, value in one.client.items()
        if not isinstance(value, Mapping | list | tuple | set | frozenset)
    }
    pairs |= {f"client.{key}": (value, other.client.get(key)) for key, value in single.items()}
    pairs |= dict(_by_parameter(one, other))
    return {key: pair for key, pair in pairs.items() if None not in pair}


def _by_parameter(one: Hub, other: Hub) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Yield each optimizer setting that differs, as `SETTING of NAME` with both values.

    NAME is the first parameter for which the values of the setting differ.
    """
    ours, theirs = (dict(_settings_by_name(hub)) for hub in (one, other))
    found: dict[str, tuple[Any, Any]] = {}
    # Of a setting that differs for thousands of parameters, one is enough to look for the cause.
    for name in [name for name in ours if name in theirs]:
        for key, value in ours[name].items():
            there = theirs[name].get(key)
            if value is not None and there is not None and value != there:
                found.setdefault(f"{key} of {name}", (value, there))
    kinds: dict[str, str] = {}
    for key in found:
        kinds.setdefault(key.partition(" of ")[0], key)
    yield from ((key, found[key]) for key in kinds.values())


def _settings_by_name(hub: Hub) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each parameter's name with a dictionary: the settings of its optimizer group, its step,
    and whether it is trained.

    A tied name comes with the name of the parameter that it shares.
    """
    known = {name: group.settings for group in hub.groups for name in group.names}
    for name, held in hub.parameters.items():
        yield name, {**known.get(name, hub.settings), "step": held.step, "trained": held.trained}
    yield from ((alias, {"tied": name}) for alias, name in hub.ties.items())


def compare_tensors(one: Hub, other: Hub) -> Iterator[TensorLine]:
    """Compare the two checkpoints tensor by tensor: the most exact copy of each parameter, its
    moments, and the buffers.

    The rounded weight is compared too if both checkpoints have it.
    """
    ours, theirs = dict(_comparable_tensors(one)), dict(_comparable_tensors(other))
    for key in [
        key
        for key in {**ours, **theirs}
        if key[1] == ROUNDED and not (key in ours and key in theirs)
    ]:
        (ours if key in ours else theirs).pop(
            key
        )  # a format with one copy of a weight lacks nothing
    for key in count_items(
        [*dict.fromkeys((*ours, *theirs))], lambda key: (ours.get(key) or theirs[key]).size
    ):
        name, kind = key
        if key not in theirs or key not in ours:
            yield TensorLine(name, kind, FIRST if key in ours else SECOND)
        elif ours[key].shape != theirs[key].shape:
            yield TensorLine(name, kind, SHAPE)
        else:
            pair = ours[key], theirs[key]
            coarse = _common_format(*(held.dtype for held in pair))
            most = _largest_difference(*pair, coarse)
            rounded = "" if pair[0].dtype == pair[1].dtype else coarse
            yield TensorLine(name, kind, DIFFERENT if most else EQUAL, most, rounded)


def _comparable_tensors(hub: Hub) -> Iterator[tuple[tuple[str, str], Lazy]]:
    for name, held in hub.parameters.items():
        yield (name, "weight"), held.best
        if held.master is not None:
            yield (name, ROUNDED), held.weight
        yield from (((name, kind), moment) for kind, moment in held.moments.items())
    yield from (
        ((name, "weight"), hub.parameters[of].best)
        for name, of in hub.ties.items()
        if of in hub.parameters
    )
    yield from (
        ((name, "weight"), held) for name, held in hub.buffers.items()
    )  # some formats do not tell them apart


def _common_format(one: str, other: str) -> str:
    """Return the number format in which tensors of two formats are compared: the coarser one, as the
    finer copy has digits that the other cannot have; one that has the numbers of both if each has numbers
    that the other lacks.
    """
    if one in (other, *EXACT.get(other, ())):
        return one
    if other in EXACT.get(one, ()):
        return other
    kinds = {one[0], other[0]} - {"U", "I"}
    return "C64" if "C" in kinds else "F64" if kinds & {*"FB"} else "I64"


def _largest_difference(one: Lazy, other: Lazy, coarse: str) -> float:
    """Return the largest difference between corresponding elements, in the number format `coarse`;
    infinite if exactly one of two elements is NaN, or infinite in its own format.
    """
    import torch

    most, step = 0.0, STRIP // WIDTH[one.dtype]
    for start in range(0, one.count, step):
        stop = min(one.count, start + step)
        stored = [held.flat(start, stop) for held in (one, other)]
        left, right = (held.to(torch_type(coarse)) for held in stored)
        if one.dtype != other.dtype:
            finite = [held.double().isfinite() for held in stored]
            most = most if torch.equal(*finite) else float("inf")
        # Bytes, so that NaNs of the same bits are equal.
        differ = (left.view(torch.uint8) != right.view(torch.uint8)).view(stop - start, -1).any(1)
        if differ.any():
            gap = (left[differ].to(torch.complex128) - right[differ].to(torch.complex128)).abs()
            # Whole numbers may be one double; and 0.0 and -0.0 differ, though their distance is 0.
            least = 5e-324 if coarse in (*FLOATING, "C64") else 1.0
            most = max(most, float(gap.nan_to_num(nan=float("inf")).max()) or least)
    return most
