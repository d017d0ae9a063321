"""The state of a run, found by its structure: whatever the keys above them, a model, optimizers, a
scheduler, a loss scale and random states are recognised by what they consist of.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from bridge.checkpoint.hub import (
    BESIDE,
    Hub,
    Origin,
    Parameter,
    ParameterGroup,
    Scale,
    Where,
    as_plain,
    find_misshapen_states,
    loss_finding,
    settings_of,
    with_beside,
)
from bridge.checkpoint.lazy import FLOATING, Boxed, Lazy, read_strips
from bridge.checkpoint.renaming import module_order
from bridge.checkpoint.safetensors_format import read_model, tie_by_storage
from bridge.checkpoint.unpickle import values_of
from bridge.errors import SourceError
from bridge.files.shown import show_value
from bridge.stack.findings import Finding
from bridge.stack.rules import Effect

Key = tuple[Any, ...]
"""The keys that lead to a value in nested dictionaries and lists."""
Entries = Mapping[Key, Any]
"""The tensors and plain values of a state, each with its keys."""
Model = dict[str, Lazy]
States = dict[str, dict[str, Any]]
"""The values of an optimizer for each parameter, by the parameter's name or number."""
Divide = Callable[[Model], Sequence[Sequence[str]]]
"""Function that divides the parameters of a model into the groups of an optimizer."""
DAMAGED = "the checkpoint is damaged"
OPTIMIZERS = re.compile(r"opt")
"""How keys of an optimizer begin."""
MODELS = ("model", "state_dict", "model_state_dict", "module")
"""Keys of the state of a model, the usual one first: of scripts with torch, Lightning, tutorials, and DeepSpeed."""
STEPS = ("step", "global_step", "iteration")
SCALER = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
"""Keys of the state of torch's GradScaler (torch/amp/grad_scaler.py: state_dict)."""
GENERATOR = (5056,)
"""Shape of the state of torch's generator on the CPU, in bytes."""
SHOWN, MOST_WAYS = 5, 1000


def flatten_value(value: Any, path: Key = ()) -> Iterator[tuple[Key, Any]]:
    """Yield the tensors and plain values in nested dictionaries, namespaces and lists, each with its keys."""
    value = values_of(value)
    if isinstance(value, Mapping) and value:
        rows: Any = value.items()
    elif isinstance(value, list) and any(
        isinstance(values_of(item), Mapping | Lazy) for item in value
    ):
        rows = enumerate(value)
    else:
        yield path, value
        return
    for key, inner in rows:
        yield from flatten_value(inner, (*path, key))


def hub_of_entries(
    origin: Origin,
    place: Path,
    entries: Entries,
    root: str | None = None,
    in_order: bool = False,
    divide: Divide | None = None,
) -> Hub:
    """Return the checkpoint in the folder or file `place` that consists of these entries. If
    `in_order` is true, the tensors of a model come in the model's order. `root` has the keys, joined by
    dots, under which the model to be read lies, those under which an optimizer lies, or both with a comma
    between them. `divide` returns the groups that the tool makes of the parameters, for optimizers that show
    none. Raises `SourceError` if there is no model, or if several models or optimizers may be
    meant.
    """
    optimizers, entries = _find_optimizers(entries)
    if optimizers and not any(isinstance(value, Lazy) for value in entries.values()):
        raise SourceError(
            f"{place}: found an optimizer ({optimizers[0].root}) and no model; name the file or folder that has its weights"
        )
    root, optimizers, left_out = _choose_optimizers(optimizers, root)
    model, others, rest = _choose_model(entries, root, place)
    model, notes = read_model(model, place if place.is_dir() else place.parent)
    model, ties = tie_by_storage(model)
    order = list(model) if in_order else module_order(model)
    if order is not None:
        model = {name: model[name] for name in dict.fromkeys((*order, *model))}
    groups, states, remarks = _read_optimizers(optimizers, model, order or [], place, divide)
    # Nothing in these files tells a parameter from a buffer, or a frozen one from a tied one. What
    # the optimizer knows decides; without an optimizer everything that floats is a trained
    # parameter.
    optimizer_names = {name for group in groups for name in group.names} | set(states)
    equal = dict(_tie_pairs(model, optimizer_names))
    kinds = {name: _is_buffer(name, model, optimizer_names) for name in model}
    parameters = {
        name: _build_parameter(
            tensor, states.get(name, {}), not optimizer_names or name in optimizer_names
        )
        for name, tensor in model.items()
        if name not in equal and not kinds[name]
    }
    # The states of an optimizer that is not read show at least the step.
    steps = {parameter.step for parameter in parameters.values() if parameter.step is not None} or {
        step
        for one in optimizers
        for state in one.states.values()
        if (step := _step_of(state)) is not None
    }
    run = take_run(rest)
    values = dict(run.client)
    beside = values.pop(BESIDE, None)
    steps_made = int(max(steps)) if steps else _counted_steps(values)
    if values.get("step") == steps_made:
        values.pop(
            "step", None
        )  # a script's own counter that says something else stays the script's
    # States that are no moments of their parameter, such as Adafactor's rows and columns.
    unfit = (
        (name, kind)
        for name, state in states.items()
        for kind, value in state.items()
        if kind != "step" and not _is_moment(value, model[name])
    )
    rate = groups[0].settings.get("lr") if groups else None
    hub = Hub(
        origin,
        parameters,
        {name: tensor for name, tensor in model.items() if kinds[name]},
        {**{alias: equal.get(name, name) for alias, name in ties.items()}, **equal},
        ordered=order is not None,
        groups=groups,
        where=Where(steps_made, lr=rate if isinstance(rate, int | float) else None),
        schedule=run.schedule,
        scale=run.scale,
        random=run.random,
        client={key: value for key, value in values.items() if value is not None},
        findings=(
            *run.findings,
            *remarks,
            *notes,
            *others,
            *left_out,
            *find_misshapen_states(unfit),
            *_find_guesses(parameters, equal, optimizer_names),
        ),
    )
    return with_beside(hub, beside)


def _join_keys(entries: Entries) -> dict[str, Any]:
    """Return the entries by their joined keys, with a number for each tensor of one number."""
    return {
        ".".join(map(str, path)): value.whole().item()
        if isinstance(value, Lazy) and not value.shape
        else value
        for path, value in entries.items()
    }


def _counted_steps(values: Mapping[str, Any]) -> int | None:
    """Return the number of steps that a script counted itself, at the top or one key below it."""
    for depth in (0, 1):
        for name in STEPS:
            for key, value in values.items():
                if key.count(".") == depth and key.split(".")[-1] == name and type(value) is int:
                    return value
    return None


# The model


def _choose_model(
    entries: Entries, root: str | None, place: Path
) -> tuple[Model, list[Finding], dict[Key, Any]]:
    """Return the tensors of the model by name, findings for the models that are not read, and all
    other entries. Raises `SourceError` if there is no model at `root`, or if it is unclear which is
    meant.
    """
    counts: dict[Key, int] = {}
    for path, value in entries.items():
        # Counters, figures and random states are tensors too, but have no dimension or do not float.
        if isinstance(value, Lazy) and value.shape and value.dtype in FLOATING:
            counts[_model_root(path)] = counts.get(_model_root(path), 0) + 1
    overview = ", ".join(
        f"{_root_text(key)} ({count} tensors)" for key, count in [*counts.items()][:SHOWN]
    )
    if not counts:
        raise SourceError(f"{place}: found no tensors of a model; {DAMAGED}")
    if root is not None:
        names = {
            path: _name_below(path, root)
            for path, value in entries.items()
            if isinstance(value, Lazy)
        }
        if set(names.values()) <= {None}:
            raise SourceError(
                f"--root: found no tensor under {show_value(root)} in {place}; it has {overview}"
            )
    else:
        order = {key: _rank_of_root(key) for key in counts}
        best = [key for key in counts if order[key] == min(order.values())]
        if len(best) > 1:
            raise SourceError(f"{place}: found several models: {overview}; choose one with --root")
        names = {
            path: ".".join(map(str, path[len(best[0]) :]))
            for path, value in entries.items()
            if isinstance(value, Lazy)
            and path[: len(best[0])] == best[0] != path
            and (best[0] or len(path) == 1)
        }
    model = {name: entries[path] for path, name in names.items() if name is not None}
    own = {path for path, name in names.items() if name is not None}
    roots = {_model_root(path) for path in own}
    unread = {key: count for key, count in counts.items() if key not in roots}
    others = [
        loss_finding(
            _root_text(key),
            f"{count} tensors of another model are not read; --root {_root_text(key)} reads them",
            Effect.NONE,
        )
        for key, count in unread.items()
    ]
    rest = {
        path: value
        for path, value in entries.items()
        if path not in own and not (isinstance(value, Lazy) and _model_root(path) in unread)
    }
    return model, others, rest


def _model_root(path: Key) -> Key:
    """Return the keys of the model to which a tensor belongs: those up to a usual key of a model, or all
    but the tensor's own.
    """
    at = next((at for at, key in enumerate(path[:-1], 1) if key in MODELS), len(path) - 1)
    return path[:at]


def _root_text(path: Key) -> str:
    return ".".join(map(str, path)) or "."


def _rank_of_root(path: Key) -> int:
    """Return how unusual it is that a model lies there: under a usual key, at the top, or elsewhere."""
    if path and path[-1] in MODELS:
        return MODELS.index(path[-1])
    return len(MODELS) + bool(path)


def _name_below(path: Key, root: str) -> str | None:
    """Return the name of a tensor below `root`; None if it lies elsewhere."""
    whole = ".".join(map(str, path))
    if root == ".":
        return whole if len(path) == 1 else None
    return whole.removeprefix(f"{root}.") if whole.startswith(f"{root}.") else None


# The optimizers


@dataclass(frozen=True)
class _Optimizer:
    """The groups and states of one optimizer, by names of parameters or by their numbers."""

    root: str
    groups: tuple[ParameterGroup, ...]
    states: States
    findings: tuple[Finding, ...]

    @property
    def numbered(self) -> bool:
        """Whether the optimizer has numbers in place of names, as `state_dict()` gives them."""
        names = [*self.states, *(name for group in self.groups for name in group.names)]
        return bool(names) and all(name.isdigit() for name in names)


def _find_optimizers(entries: Entries) -> tuple[tuple[_Optimizer, ...], dict[Key, Any]]:
    """Return the optimizers of a state, and the entries that belong to none of them."""
    roots = {path[:at] for path in entries for at in _optimizer_depths(path)}
    parts: dict[Key, dict[Key, Any]] = {}
    rest: dict[Key, Any] = {}
    for path, value in entries.items():
        depth = next((at for at in range(len(path)) if path[:at] in roots), None)
        if depth is None or _top_of(path[depth]) not in ("state", "param_groups"):
            rest[path] = value
        else:
            parts.setdefault(path[:depth], {})[path[depth:]] = value
    optimizers = []
    for root, own in parts.items():
        groups, odd = _optimizer_groups(own)
        optimizers.append(_Optimizer(_root_text(root), groups, _optimizer_states(own), tuple(odd)))
    return tuple(optimizers), rest


def _choose_optimizers(
    optimizers: tuple[_Optimizer, ...], root: str | None
) -> tuple[str | None, tuple[_Optimizer, ...], list[Finding]]:
    """Return what `root` says of the model, the optimizers that it chooses, all of them if it chooses none,
    and findings for the others.
    """
    parts = (root or "").split(",")
    wanted = [one for one in optimizers if one.root in parts]
    if root is None or not wanted:
        return root, optimizers, []
    roots = {one.root for one in wanted}
    others = [
        loss_finding(
            one.root,
            f"the states of another optimizer are not read; --root {one.root} reads them",
            Effect.NONE,
        )
        for one in optimizers
        if one not in wanted
    ]
    return ",".join(part for part in parts if part not in roots) or None, tuple(wanted), others


def _top_of(key: Any) -> str:
    return str(key).partition(".")[0]


def _optimizer_depths(path: Key) -> Iterator[int]:
    """Yield how many keys lead to an optimizer, if one is recognised by this entry: by its groups, or by
    its states under a key that names an optimizer.
    """
    for at, key in enumerate(path):
        names = [str(name) for name in path[:at] if not isinstance(name, int)]
        groups = _top_of(key) == "param_groups" and (at + 1 < len(path) or "." in str(key))
        if groups or (_top_of(key) == "state" and names and OPTIMIZERS.match(names[-1])):
            yield at


def _flatten_path(path: Key) -> tuple[str, ...]:
    """Return the keys of an optimizer's value as `(top, name, key)`, such as `("state",
    "head.weight", "exp_avg")`, whether they were saved nested or joined by dots.
    """
    # torch nests state_dict(), and torchtitan flattens it into "state.head.weight.exp_avg". Joined,
    # both are alike: names of parameters hold dots, the first and the last part do not.
    whole = ".".join(map(str, path))
    top, _, rest = whole.partition(".")
    name, _, kind = rest.rpartition(".")
    return top, name, kind


def _optimizer_states(optimizer: Entries) -> States:
    states: States = {}
    for path, value in optimizer.items():
        top, name, kind = _flatten_path(path)
        if top == "state" and isinstance(value, Mapping):
            # Flattened, an empty dictionary is a value: that of an optimizer or parameter without states.
            if kind:
                states.setdefault(f"{name}.{kind}" if name else kind, {})
        elif top == "state":
            # SGD without momentum keeps None as its buffer.
            states.setdefault(name, {}).update({} if value is None else {kind: value})
    return states


def _optimizer_groups(optimizer: Entries) -> tuple[tuple[ParameterGroup, ...], list[Finding]]:
    """Return the optimizer's parameter groups, and findings for settings that are not kept. torch
    saves groups by number, or instead the settings of each parameter. In the second case,
    parameters with equal settings become one group.
    """
    rows: dict[str, dict[str, Any]] = {}
    for path, value in optimizer.items():
        top, name, key = _flatten_path(path)
        if top == "param_groups":
            rows.setdefault(name, {})[key] = value
    together: dict[str, tuple[list[str], dict[str, Any]]] = {}
    odd: list[Finding] = []
    for name, row in rows.items():
        # An optimizer that was made of named parameters keeps the names beside the numbers.
        names = row.pop("param_names", None) or row.get("params")
        settings, losses = settings_of(row, f"param_groups.{name}")
        odd += losses
        own = isinstance(names, list | tuple) and name.isdigit()
        group = together.setdefault(name if own else repr(settings), ([], settings))
        group[0].extend(map(str, names) if own and names is not None else [name])
    return tuple(
        ParameterGroup(tuple(names), settings) for names, settings in together.values()
    ), odd


def _read_optimizers(
    optimizers: Sequence[_Optimizer],
    model: Model,
    order: Sequence[str],
    place: Path,
    divide: Divide | None,
) -> tuple[tuple[ParameterGroup, ...], States, list[Finding]]:
    """Return the groups and states of the optimizers by the names of the model's parameters, and
    findings. An optimizer whose parameters cannot be told is named in a finding. Raises `SourceError` if
    two have the same parameter.
    """
    groups: list[ParameterGroup] = []
    states: States = {}
    findings: list[Finding] = []
    owners: dict[str, str] = {}
    order = [name for name in order if model[name].dtype in FLOATING]
    for one in optimizers:
        names = {name: name for name in one.states}
        strange = sorted(name for name in one.states if name not in model)
        if one.numbered:
            matches = _assign_numbers(one, order, model)
            if matches is None and divide is not None and order:
                matches = _assign_by_groups(one, divide({name: model[name] for name in order}))
            if matches is None:
                why = (
                    "fit the shapes of the model's parameters in no way or in several"
                    if order
                    else "are in the order of the model's parameters, which the files do not show"
                )
                has_states = any(one.states.values())
                what = f"{len(one.states) if has_states else len(one.groups)} {'states' if has_states else 'groups'}"
                message = f"the optimizer has {what} by number, which {why}; they are not read"
                lost = "moments" if has_states else "groups"
                findings.append(loss_finding(lost, f"{one.root}: {message}", Effect.NUMBERS))
                continue
            names = matches
            message = "the optimizer has numbers for names; in the model's order they fit all shapes in one way"
            findings.append(loss_finding("groups", f"{one.root}: {message}", Effect.NONE))
        elif strange and len(optimizers) > 1:
            message = f"the optimizer has states of {show_value(strange[0])}, which this model does not have; it is not read"
            findings.append(loss_finding("moments", f"{one.root}: {message}", Effect.NUMBERS))
            continue
        elif strange:
            others = len(strange) - 1
            more = f" and {others} more" if others else ""
            raise SourceError(
                f"{place}: the optimizer has states of {show_value(strange[0])}{more}, which the model does "
                f"not have; {DAMAGED}"
            )
        own = {
            names.get(name, name)
            for name in (*one.states, *(name for group in one.groups for name in group.names))
        }
        for name in sorted(own & owners.keys())[:1]:
            raise SourceError(
                f"{place}: found two optimizers, {owners[name]} and {one.root}, that both may have the states of "
                f"{show_value(name)}; choose one with --root {owners[name]} or --root {one.root}; after the keys "
                f"of a model, as in --root model,{one.root}, it chooses both"
            )
        owners |= dict.fromkeys(own, one.root)
        findings += one.findings
        states |= {names[key]: state for key, state in one.states.items()}
        groups += [
            replace(group, names=tuple(names.get(name, name) for name in group.names))
            for group in one.groups
        ]
    return tuple(groups), states, findings


def _assign_numbers(
    optimizer: _Optimizer, order: Sequence[str], model: Model
) -> dict[str, str] | None:
    """Return the name of the parameter that each number of an optimizer stands for. Each group has its
    parameters in the model's order, and the shapes of moments are those of weights. Return None unless
    this leaves exactly one way.
    """
    rows = [
        [(name, _moment_shape(optimizer.states.get(name))) for name in group.names]
        for group in optimizer.groups
    ]
    spare = len(order) - sum(map(len, rows))
    if spare < 0 or not order:
        return None
    # How many parameters of each group are placed, with the number of ways (at most 2) to get there,
    # and with the last step of one of these.
    ways: dict[Key, int] = {(0,) * len(rows): 1}
    steps: list[dict[Key, tuple[Key, int | None]]] = []
    for number, name in enumerate(order):
        next_ways: dict[Key, int] = {}
        last: dict[Key, tuple[Key, int | None]] = {}
        for at, count in ways.items():
            for group, row in enumerate(rows):
                if at[group] < len(row) and row[at[group]][1] in (None, model[name].shape):
                    to = (*at[:group], at[group] + 1, *at[group + 1 :])
                    next_ways[to] = min(2, next_ways.get(to, 0) + count)
                    last[to] = (at, group)
            if number - sum(at) < spare:
                next_ways[at] = min(2, next_ways.get(at, 0) + count)
                last[at] = (at, None)
        if len(next_ways) > MOST_WAYS:
            return None
        ways = next_ways
        steps.append(last)
    at = tuple(map(len, rows))
    if ways.get(at) != 1:
        return None
    matches = {}
    for name, last in zip(reversed(order), reversed(steps), strict=True):
        before, group_of_name = last[at]
        if group_of_name is not None:
            matches[rows[group_of_name][before[group_of_name]][0]] = name
        at = before
    return matches


def _assign_by_groups(
    optimizer: _Optimizer, rows: Sequence[Sequence[str]]
) -> dict[str, str] | None:
    """Return the name of the parameter that each number stands for, if the optimizer has groups of these sizes and
    no state that would show another order.
    """
    groups = [group.names for group in optimizer.groups]
    if any(optimizer.states.values()) or [*map(len, groups)] != [*map(len, rows)]:
        return None
    return dict(zip(chain.from_iterable(groups), chain.from_iterable(rows), strict=True))


def _moment_shape(state: Mapping[str, Any] | None) -> tuple[int, ...] | None:
    """Return the shape of a parameter, from its moments; None if they do not show it."""
    shapes = {
        value.shape
        for kind, value in (state or {}).items()
        if kind != "step" and isinstance(value, Lazy)
    }
    return shapes.pop() if len(shapes) == 1 else None


def _is_moment(value: Any, weight: Lazy) -> bool:
    return isinstance(value, Lazy) and value.shape == weight.shape


def _build_parameter(weight: Lazy, state: Mapping[str, Any], is_trainable: bool) -> Parameter:
    moments = {
        kind: value for kind, value in state.items() if kind != "step" and _is_moment(value, weight)
    }
    return Parameter(weight, None, moments, _step_of(state), is_trainable)


def _step_of(state: Mapping[str, Any]) -> float | None:
    step = state.get("step")
    value = step.whole() if isinstance(step, Lazy) else step
    is_one = getattr(value, "numel", lambda: 1)() == 1
    return float(value) if is_one and not isinstance(value, str | None) else None


def _is_buffer(name: str, model: Model, optimizer_names: set[str]) -> bool:
    """Return whether to take a tensor for a buffer, because the format does not tell. A tensor is
    taken for a buffer if its elements are not floating-point numbers. It is also taken for one if
    it is stored whole and unknown to the optimizer, while all parameters that the optimizer knows
    are stored in several boxes.
    """
    tensor = model[name]
    if tensor.dtype not in FLOATING:
        return True
    others = [model[key] for key in optimizer_names if key in model]
    splits = [isinstance(other, Boxed) and len(other.parts) > 1 for other in others]
    alone = not isinstance(tensor, Boxed) or len(tensor.parts) == 1
    return name not in optimizer_names and alone and bool(splits) and all(splits)


def _tie_pairs(model: Model, optimizer_names: set[str]) -> Iterator[tuple[str, str]]:
    """Yield pairs of tied names: a tensor that the optimizer does not know, and a parameter of the
    optimizer with the same elements.
    """
    import torch

    for name, tensor in model.items() if optimizer_names else ():
        if name in optimizer_names or tensor.count < 2:
            continue
        # Equal elements throughout tell nothing: norms begin as ones, and biases as zeros.
        first = tensor.flat(0, 1)
        if all(bool((strip == first).all()) for strip in read_strips(tensor)):
            continue
        for other in sorted(optimizer_names):
            if other not in model or (model[other].shape, model[other].dtype) != (
                tensor.shape,
                tensor.dtype,
            ):
                continue
            if all(
                torch.equal(mine, right)
                for mine, right in zip(read_strips(tensor), read_strips(model[other]), strict=True)
            ):
                yield name, other
                break


def _find_guesses(
    parameters: Mapping[str, Parameter], ties: Mapping[str, str], optimizer_names: set[str]
) -> Iterator[Finding]:
    for name, other in ties.items():
        message = f"{name}: the optimizer does not know this tensor, which is equal to {other}; both are read as one parameter"
        yield loss_finding("ties", message, Effect.NONE)
    frozen = [
        name for name, parameter in parameters.items() if optimizer_names and not parameter.trained
    ]
    if frozen:
        message = (
            f"{', '.join(frozen)}: the optimizer does not know these tensors; they are read as frozen "
            "parameters, but may be buffers"
        )
        yield loss_finding("frozen", message, Effect.NONE)


# The rest


@dataclass(frozen=True)
class Run:
    """The state of a run besides its model and optimizers, as `Hub` has it."""

    schedule: Mapping[str, Any] | None
    scale: Scale | None
    random: Mapping[str, Lazy]
    client: Mapping[str, Any]
    findings: tuple[Finding, ...]


def take_run(entries: Entries) -> Run:
    """Return what entries without model and optimizers say about a run."""
    schedule, rest = _take_schedule(entries)
    scale, rest = _take_scale(rest)
    random, other_generators, rest = _take_random(rest)
    values, losses = as_plain(_join_keys(rest), "client")
    return Run(schedule, scale, random, values, (*losses, *other_generators))


def _below(entries: Entries, root: Key) -> dict[Key, Any]:
    return {
        path[len(root) :]: value for path, value in entries.items() if path[: len(root)] == root
    }


def _without(entries: Entries, root: Key) -> dict[Key, Any]:
    return {path: value for path, value in entries.items() if path[: len(root)] != root}


def _take_schedule(entries: Entries) -> tuple[dict[str, Any] | None, dict[Key, Any]]:
    """Return the state of the first of torch's schedulers (torch/optim/lr_scheduler.py: state_dict),
    and the other entries.
    """
    for path in entries:
        if path[-1:] == ("last_epoch",) and (*path[:-1], "_step_count") in entries:
            schedule, losses = as_plain(nest_entries(_below(entries, path[:-1])), "schedule")
            if not losses:
                return schedule, _without(entries, path[:-1])
    return None, dict(entries)


def nest_entries(entries: Entries) -> Any:
    """Return the value that `flatten_value` flattened into these entries."""
    if set(entries) == {()}:
        return entries[()]
    inner: dict[Any, dict[Key, Any]] = {}
    for path, value in entries.items():
        inner.setdefault(path[0], {})[path[1:]] = value
    values = {key: nest_entries(rows) for key, rows in inner.items()}
    is_list = list(values) == list(range(len(values)))
    return list(values.values()) if is_list else values


def _take_scale(entries: Entries) -> tuple[Scale | None, dict[Key, Any]]:
    """Return the loss scale that torch's GradScaler saved, and the other entries."""
    for path in entries:
        root = path[:-1]
        values = [entries.get((*root, key)) for key in SCALER]
        if path[-1:] == SCALER[-1:] and all(isinstance(value, int | float) for value in values):
            size, factor, back, window, good = values
            if factor and back == 1 / factor:
                scale = Scale(float(size or 0), True, factor, window, good=good)
                return scale, _without(entries, root)
    return None, dict(entries)


def _take_random(entries: Entries) -> tuple[dict[str, Lazy], list[Finding], dict[Key, Any]]:
    """Return the states of torch's generator on the CPU by rank, a finding that names the states of
    other generators beside them, and the other entries.
    """
    generators: dict[str, Lazy] = {}
    other_names: dict[str, None] = {}
    rest = dict(entries)
    for path, value in entries.items():
        if isinstance(value, Lazy) and (value.dtype, value.shape) == ("U8", GENERATOR):
            rank = next((key for key in reversed(path) if isinstance(key, int)), 0)
            if str(rank) in generators:
                continue
            generators[str(rank)] = value
            beside = _below(entries, path[:-1]) if len(path) > 1 else {path: value}
            other_names |= {str(key[0]): None for key in beside if key[0] not in (path[-1], "step")}
            rest = _without(rest, path[:-1] if len(path) > 1 else path)
    names = ", ".join(other_names)
    message = f"{names}: of the random states, those of torch's generator on the CPU are read alone"
    return (
        generators,
        [loss_finding("random", message, Effect.NUMBERS)] if other_names else [],
        rest,
    )
