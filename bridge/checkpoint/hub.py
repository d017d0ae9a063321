"""The hub: the content of a checkpoint of any format. Parameters have their global names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.checkpoint.lazy import Cast, Lazy
from bridge.checkpoint.unpickle import values_of
from bridge.errors import SourceError
from bridge.stack.findings import Finding
from bridge.stack.rules import Effect

if TYPE_CHECKING:
    from bridge.checkpoint.unpickle import Record

Plain = Any
"""A plain value: what JSON can hold, and also tuples, sets, and mappings whose keys are not text.
`bridge.checkpoint.tagged_json` converts all of these to JSON.
"""
DEEPEST, MOST_VALUES = 20, 200_000


@dataclass(frozen=True)
class Parameter:
    """A whole parameter. The model computes with `weight`; the optimizer updates `master`, or
    `weight` if there is no master. `moments` are the optimizer's tensors, under torch's names, and
    `step` is the number of updates that they have seen.
    """

    weight: Lazy
    master: Lazy | None = None
    moments: Mapping[str, Lazy] = field(default_factory=dict)
    step: float | None = None
    trained: bool = True

    @property
    def best(self) -> Lazy:
        """The most precise copy of the parameter: the master if there is one, else the weight."""
        return self.master or self.weight


@dataclass(frozen=True)
class ParameterGroup:
    """The names of parameters that an optimizer treats alike, in the optimizer's order, and the
    settings of this group.
    """

    names: tuple[str, ...]
    settings: Mapping[str, Plain]


@dataclass(frozen=True)
class Scale:
    """A loss scale, and the values that decide how it changes (None: the format does not have the
    value). `good` counts the steps without overflow. After it has reached `window`, the next such
    step multiplies the scale by `factor`, as in DeepSpeed.
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
    """How far a run has come: the numbers of updates, skipped steps and samples, figures of the
    last step, and the seed. None stands for an unknown value.
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
    """Where a checkpoint comes from: its format, the release of the stack that wrote it, the
    layout of ranks, and its files.
    """

    format: str
    release: str = ""
    layout: Mapping[str, int] = field(default_factory=dict)
    files: tuple[Path, ...] = ()

    @property
    def world(self) -> int | None:
        """Number of ranks that saved the checkpoint (the product of its data, tensor and pipeline
        ranks); None if it is unknown.
        """
        copies = self.layout.get("tensor", 1) * self.layout.get("pipeline", 1)
        return self.layout["ranks"] * copies if "ranks" in self.layout else None


@dataclass(frozen=True)
class Model:
    """Facts about a model that a config or a run's arguments state: sizes, the number of groups of
    attention heads that share keys, whether the output uses the word embedding, which parts have biases,
    norms of heads or gates, and the family.
    `refused` has a sentence for each property of the model that makes it impossible to rename its
    parameters. `padded_vocab` is the number of words with padding, of which a run needs no more than
    its own, and `settings` are those of a model that shapes do not show, by their paths in a plan;
    both are of one place, and are not kept.
    """

    kv_heads: int | None = None
    vocab: int | None = None
    family: str | None = None
    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    head_size: int | None = None
    ffn: int | None = None
    experts: int | None = None
    expert_ffn: int | None = None
    shared_ffn: int | None = None
    positions: int | None = None
    tied: bool | None = None
    qkv_bias: bool | None = None
    output_bias: bool | None = None
    mlp_bias: bool | None = None
    norm_bias: bool | None = None
    head_norms: bool | None = None
    gated: bool | None = None
    refused: tuple[str, ...] = ()
    padded_vocab: int | None = None
    settings: Mapping[str, Plain] | None = None


@dataclass(frozen=True)
class Hub:
    """The content of a checkpoint. If `ordered` is true, parameters are in the order of the model.
    `ties` has the further names of tied parameters, each with the name in `parameters`. If there
    are no `groups`, the `settings` of the optimizer hold for all parameters. `findings` name the
    values in the checkpoint's files that are not kept here, and say what this means for a resumed
    run.
    """

    origin: Origin
    parameters: Mapping[str, Parameter]
    buffers: Mapping[str, Lazy] = field(default_factory=dict)
    ties: Mapping[str, str] = field(default_factory=dict)
    ordered: bool = False
    groups: tuple[ParameterGroup, ...] = ()
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
        """Yield every tensor of the checkpoint: its name, its kind (`weight`, `master`, the name
        of a moment, `buffer`, `random`) and the lazy tensor.
        """
        for name, held in self.parameters.items():
            yield name, "weight", held.weight
            if held.master is not None:
                yield name, "master", held.master
            yield from ((name, kind, moment) for kind, moment in held.moments.items())
        yield from ((name, "buffer", held) for name, held in self.buffers.items())
        yield from ((name, "random", held) for name, held in self.random.items())

    def elements(self, group: ParameterGroup) -> int:
        """Return the number of elements of all parameters in a group."""
        return sum(self.parameters[name].weight.count for name in group.names)

    @property
    def trainable_parameters(self) -> dict[str, Parameter]:
        """The parameters that the optimizer updates, by name."""
        return {name: parameter for name, parameter in self.parameters.items() if parameter.trained}

    @property
    def weight_dtype(self) -> str:
        """The number format that most of the weights have."""
        dtypes = [parameter.weight.dtype for parameter in self.parameters.values()]
        return max(dict.fromkeys(dtypes), key=dtypes.count) if dtypes else "F32"

    @property
    def moments(self) -> tuple[str, ...]:
        """The names of all moments that some parameter has."""
        return tuple(
            dict.fromkeys(
                kind for parameter in self.parameters.values() for kind in parameter.moments
            )
        )

    @property
    def lacks_moments(self) -> bool:
        """Whether no trained parameter has moments, although its optimizer may have some. SGD without momentum has none
        (torch/optim/sgd.py).
        """
        has_none = self.groups and all(
            group.settings.get("momentum") == 0 and "dampening" in group.settings
            for group in self.groups
        )
        return bool(self.trainable_parameters) and not self.moments and not has_none


BESIDE = "stagebridge"
"""Key for all values that have no key of their own in a format. Stacks ignore this key."""


def beside_of(hub: Hub) -> dict[str, Plain]:
    """Return the values of a checkpoint to store under `BESIDE`: all except tensors, groups and
    findings, as plain values.
    """
    parts = {"where": hub.where, "scale": hub.scale, "model": hub.model}
    values_by_part = {
        name: {key: value for key, value in vars(part).items() if value is not None}
        for name, part in parts.items()
        if part
    }
    more = {"schedule": hub.schedule, "config": hub.config, "client": dict(hub.client)}
    return {name: value for name, value in {**values_by_part, **more}.items() if value}


def with_beside(hub: Hub, values: Any) -> Hub:
    """Return the checkpoint, with its missing values taken from `values`, a result of `beside_of`.
    Raises `TypeError` for a value of another type.
    """
    entries = values if isinstance(values, Mapping) else {}
    where = {
        key: value
        for key, value in (entries.get("where") or {}).items()
        if getattr(hub.where, key) is None
    }
    model: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in (entries.get("model") or {}).items()
    }
    return replace(
        hub,
        where=replace(hub.where, **where),
        scale=hub.scale or (Scale(**entries["scale"]) if entries.get("scale") else None),
        schedule=hub.schedule or entries.get("schedule"),
        config=hub.config or entries.get("config"),
        model=hub.model or (Model(**model) if model else None),
        client={**(entries.get("client") or {}), **hub.client},
    )


def weights_of(source: Lazy, dtype: str | None) -> Lazy:
    """Return a tensor converted to the number format `dtype`; None leaves it as it is. Integers
    are never converted, and no finite number becomes infinite.
    """
    return (
        source
        if dtype in (None, source.dtype) or not source.dtype.startswith(("F", "BF"))
        else Cast(source, str(dtype), bounded=True)
    )


def loss_finding(path: str, message: str, effect: Effect) -> Finding:
    """Return a finding which says that a value of the source checkpoint is not kept."""
    return Finding(path, message, effect, given=True)


def find_misshapen_states(states: Iterable[tuple[str, str]]) -> Iterator[Finding]:
    """Yield a finding for each kind of optimizer state that the hub cannot hold, because its shape
    differs from the weight's, as with Adafactor's rows and columns. `states` are pairs of a
    parameter's name and a kind.
    """
    names: dict[str, list[str]] = {}
    for name, kind in states:
        names.setdefault(kind, []).append(name)
    for kind, parameters in names.items():
        message = (
            f"{kind} of {len(parameters)} parameters, such as {parameters[0]}, has another shape than the weight, and "
            f"is not kept; the optimizer may fail to load without {kind}"
        )
        yield loss_finding(f"moments.{kind}", message, Effect.NUMBERS)


def settings_of(row: Mapping[str, Any], where: str) -> tuple[dict[str, Plain], list[Finding]]:
    """Return the settings of a group as plain values, and a finding for each value that is not
    kept. A tensor of one element becomes a number.
    """
    numbers = {
        key: value.whole().item() if isinstance(value, Lazy) and value.count == 1 else value
        for key, value in row.items()
    }
    settings, findings = as_plain(
        {key: value for key, value in numbers.items() if key != "params"}, where
    )
    return tuples_to_lists(settings), findings


def tuples_to_lists(value: Plain) -> Plain:
    """Return `value` with every tuple replaced by a list, so that settings of different stacks can
    be compared.
    """
    if isinstance(value, Mapping):
        return {key: tuples_to_lists(inner) for key, inner in value.items()}
    return [tuples_to_lists(inner) for inner in value] if isinstance(value, list | tuple) else value


def as_plain(value: Any, where: str) -> tuple[Plain, list[Finding]]:
    """Return `value` with None for everything that is no plain value, and a finding for each value
    that was replaced. `where` is the path at which the paths in findings begin. Raises
    `SourceError` if `value` is nested too deeply or has too many values.
    """
    findings: list[Finding] = []
    # A pickle may refer to one list many times: a small file could unfold into values without end.
    budget = [MOST_VALUES]
    return _plain_within(value, where, 0, budget, findings), findings


def _plain_within(
    value: Any, where: str, depth: int, budget: list[int], findings: list[Finding]
) -> Plain:
    budget[0] -= 1
    if depth > DEEPEST or budget[0] < 0:
        raise SourceError(
            f"{where}: found too many values, or values nested too deeply; the file is damaged"
        )
    value = values_of(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        # Keys too may be tuples, or records that are not plain.
        keys = (
            (_plain_within(key, f"{where}, a key", depth + 1, budget, findings), key, inner)
            for key, inner in value.items()
        )
        return {
            own: _plain_within(inner, f"{where}.{key}", depth + 1, budget, findings)
            for own, key, inner in keys
        }
    if isinstance(value, list | tuple | set | frozenset):
        values = [
            _plain_within(inner, f"{where}.{number}", depth + 1, budget, findings)
            for number, inner in enumerate(value)
        ]
        return values if isinstance(value, list) else KINDS[type(value)](values)
    findings.append(
        loss_finding(
            where,
            f"a value of type {kind_of_value(value)}, which only the program that saved it can read, is not kept",
            Effect.NUMBERS,
        )
    )
    return None


KINDS: Mapping[type, Callable[[list[Any]], Any]] = {tuple: tuple, set: set, frozenset: frozenset}


def kind_of_value(value: Any) -> str:
    """Return what a message calls a value that a file holds."""
    if isinstance(value, Lazy):
        return "tensor"
    record: Record = value
    return getattr(record, "name", type(value).__name__).replace(" ", ".")
