"""The hub: the content of a checkpoint of any format, with parameters by their global names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.errors import SourceError
from bridge.findings import Finding
from bridge.rules import Effect
from bridge.state.lazy import Lazy, cast

if TYPE_CHECKING:
    from bridge.state.pickled import Record

Plain = Any
"""A value that JSON has, or a tuple, a set, or a mapping with keys that are not text.

`bridge.state.tagged` converts all of these to JSON.
"""
DEEPEST, MOST_VALUES = 20, 200_000


@dataclass(frozen=True)
class Parameter:
    """One whole parameter. The model computes with `weight`; the optimizer updates `master`, or
    `weight` if there is no master.

    `moments` has the optimizer's tensors by torch's names; `step` is the number of updates in them.
    """

    weight: Lazy
    master: Lazy | None = None
    moments: Mapping[str, Lazy] = field(default_factory=dict)
    step: float | None = None
    trained: bool = True

    @property
    def best(self) -> Lazy:
        """The most precise copy of the parameter: the master, else the weight."""
        return self.master or self.weight


@dataclass(frozen=True)
class Group:
    """Parameters that an optimizer treats alike, in the optimizer's order, and their settings."""

    names: tuple[str, ...]
    settings: Mapping[str, Plain]


@dataclass(frozen=True)
class Scale:
    """A loss scale, and the values that decide its next change; None for a value that the format does not have.

    As in DeepSpeed, the scale is multiplied by `factor` at the first good step after `good` has
    reached `window`.
    """

    value: float
    dynamic: bool
    factor: float | None = None
    window: int | None = None
    minimum: float | None = None
    hysteresis: int | None = None
    tolerated: int | None = None
    good: int | None = None


@dataclass(frozen=True)
class Where:
    """The progress of a run: updates, skipped steps, samples, and figures of the last step.

    None: unknown.
    """

    steps: int | None = None
    skipped: int | None = None
    samples: int | None = None
    loss: float | None = None
    grad_norm: float | None = None
    lr: float | None = None
    seed: int | None = None


@dataclass(frozen=True)
class Origin:
    """The origin of a checkpoint: format, release that wrote it, layout, and files."""

    format: str
    release: str = ""
    layout: Mapping[str, int] = field(default_factory=dict)
    files: tuple[Path, ...] = ()

    @property
    def world(self) -> int | None:
        """Number of ranks that saved the checkpoint: data ranks times tensor ranks times pipeline ranks; None: unknown."""
        shared = self.layout.get("tensor", 1) * self.layout.get("pipeline", 1)
        return self.layout["ranks"] * shared if "ranks" in self.layout else None


@dataclass(frozen=True)
class Model:
    """Facts about a model that names and shapes do not show: the number of key groups of attention
    heads, the vocabulary size, and the family.

    `refused` has a sentence for each feature of the model that maps of names cannot express.
    """

    kv_heads: int | None = None
    vocab: int | None = None
    family: str | None = None
    refused: tuple[str, ...] = ()


@dataclass(frozen=True)
class Hub:
    """The content of a checkpoint. With `ordered`, parameters are in the model's own order.

    `ties` maps a further name of a parameter to its name in `parameters`. `settings` are the
    optimizer's settings for all parameters, if the source has no `groups`. `findings` name the
    parts of the source that are not kept, with the effect on a resumed run.
    """

    origin: Origin
    parameters: Mapping[str, Parameter]
    buffers: Mapping[str, Lazy] = field(default_factory=dict)
    ties: Mapping[str, str] = field(default_factory=dict)
    ordered: bool = False
    groups: tuple[Group, ...] = ()
    settings: Mapping[str, Plain] = field(default_factory=dict)
    where: Where = field(default_factory=Where)
    schedule: Mapping[str, Plain] | None = None
    scale: Scale | None = None
    random: Mapping[str, Lazy] = field(default_factory=dict)
    client: Mapping[str, Plain] = field(default_factory=dict)
    config: Mapping[str, Plain] | None = None
    model: Model | None = None
    findings: tuple[Finding, ...] = ()

    def tensors(self) -> Iterator[tuple[str, str, Lazy]]:
        """Yield name, kind (`weight`, `master`, a moment, `buffer`, `random`) and lazy tensor of
        every tensor.
        """
        for name, held in self.parameters.items():
            yield name, "weight", held.weight
            if held.master is not None:
                yield name, "master", held.master
            yield from ((name, kind, moment) for kind, moment in held.moments.items())
        yield from ((name, "buffer", held) for name, held in self.buffers.items())
        yield from ((name, "random", held) for name, held in self.random.items())

    def elements(self, group: Group) -> int:
        """Number of elements of the parameters in a group."""
        return sum(self.parameters[name].weight.count for name in group.names)

    @property
    def trained(self) -> dict[str, Parameter]:
        """Parameters that the optimizer updates."""
        return {name: held for name, held in self.parameters.items() if held.trained}

    @property
    def computed(self) -> str:
        """The number format that most of the weights have."""
        found = [held.weight.dtype for held in self.parameters.values()]
        return max(dict.fromkeys(found), key=found.count) if found else "F32"

    @property
    def moments(self) -> tuple[str, ...]:
        """Names of the moments that parameters have."""
        return tuple(
            dict.fromkeys(kind for held in self.parameters.values() for kind in held.moments)
        )


BESIDE = "stagebridge"
"""Key for values that a format cannot store elsewhere. Stacks ignore this key."""


def beside_of(hub: Hub) -> dict[str, Plain]:
    """Return everything in a checkpoint except tensors, groups and findings, as plain values."""
    parts = {"where": hub.where, "scale": hub.scale, "model": hub.model}
    found = {
        name: {key: value for key, value in vars(part).items() if value is not None}
        for name, part in parts.items()
        if part
    }
    more = {"schedule": hub.schedule, "config": hub.config, "client": dict(hub.client)}
    return {name: value for name, value in {**found, **more}.items() if value}


def with_beside(hub: Hub, held: Any) -> Hub:
    """Return the checkpoint with values that `beside_of` returned.

    Values that the checkpoint has already stay. Raises `TypeError` for a value of another type.
    """
    kept = held if isinstance(held, Mapping) else {}
    where = {
        key: value
        for key, value in (kept.get("where") or {}).items()
        if getattr(hub.where, key) is None
    }
    model: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in (kept.get("model") or {}).items()
    }
    return replace(
        hub,
        where=replace(hub.where, **where),
        scale=hub.scale or (Scale(**kept["scale"]) if kept.get("scale") else None),
        schedule=hub.schedule or kept.get("schedule"),
        config=hub.config or kept.get("config"),
        model=hub.model or (Model(**model) if model else None),
        client={**(kept.get("client") or {}), **hub.client},
    )


def weights_of(source: Lazy, dtype: str | None) -> Lazy:
    """Return the tensor in the number format `dtype`; None: unchanged. Integers keep their format."""
    return (
        source if dtype is None or not source.dtype.startswith(("F", "BF")) else cast(source, dtype)
    )


def lost(path: str, message: str, effect: Effect) -> Finding:
    """Return a finding about a part of the source that is not kept."""
    return Finding(path, message, effect, given=True)


def unshaped(states: Iterable[tuple[str, str]]) -> Iterator[Finding]:
    """Yield a finding for each kind of optimizer state whose shape differs from the shape of its
    weight, as with Adafactor's rows and columns.

    `states` are pairs of parameter name and kind. The hub cannot hold such states.
    """
    names: dict[str, list[str]] = {}
    for name, kind in states:
        names.setdefault(kind, []).append(name)
    for kind, found in names.items():
        said = (
            f"{kind} of {len(found)} parameters, such as {found[0]}, does not have the shape of "
            "its weight and is not kept"
        )
        yield lost(
            f"moments.{kind}",
            f"{said}; the optimizer's own loading may stop without it",
            Effect.NUMBERS,
        )


def settings_of(row: Mapping[str, Any], where: str) -> tuple[dict[str, Plain], list[Finding]]:
    """Return the settings of a group, and a finding for each value that is not kept.

    A tensor of one element becomes a number.
    """
    numbers = {
        key: value.whole().item() if isinstance(value, Lazy) and value.count == 1 else value
        for key, value in row.items()
    }
    found, left = plain({key: value for key, value in numbers.items() if key != "params"}, where)
    return listed(found), left


def listed(value: Plain) -> Plain:
    """Return `value` with lists in place of tuples, so that settings of different stacks can be compared."""
    if isinstance(value, Mapping):
        return {key: listed(inner) for key, inner in value.items()}
    return [listed(inner) for inner in value] if isinstance(value, list | tuple) else value


def plain(value: Any, where: str) -> tuple[Plain, list[Finding]]:
    """Return the plain parts of `value`, and a finding for each part that is not plain.

    Paths in findings begin with `where`. Raises `SourceError` if `value` is nested too deeply or
    has too many values.
    """
    left: list[Finding] = []
    # A pickle may refer to one list many times: a small file could unfold into values without end.
    budget = [MOST_VALUES]
    return _plain(value, where, 0, budget, left), left


def _plain(value: Any, where: str, depth: int, budget: list[int], left: list[Finding]) -> Plain:
    budget[0] -= 1
    if depth > DEEPEST or budget[0] < 0:
        raise SourceError(f"{where}: too many values, or nested too deeply; the file is damaged")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        # Keys too may be tuples, or records that are not plain.
        keys = (
            (_plain(key, f"{where}, a key", depth + 1, budget, left), key, inner)
            for key, inner in value.items()
        )
        return {
            own: _plain(inner, f"{where}.{key}", depth + 1, budget, left)
            for own, key, inner in keys
        }
    if isinstance(value, list | tuple | set | frozenset):
        found = [
            _plain(inner, f"{where}.{number}", depth + 1, budget, left)
            for number, inner in enumerate(value)
        ]
        return found if isinstance(value, list) else KINDS[type(value)](found)
    left.append(
        lost(
            where,
            f"a {_kind(value)}, which only its own program can read, is not kept",
            Effect.NUMBERS,
        )
    )
    return None


KINDS: Mapping[type, Callable[[list[Any]], Any]] = {tuple: tuple, set: set, frozenset: frozenset}


def _kind(value: Any) -> str:
    if isinstance(value, Lazy):
        return "tensor"
    record: Record = value
    return getattr(record, "name", type(value).__name__).replace(" ", ".")
