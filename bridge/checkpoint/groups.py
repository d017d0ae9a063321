"""Parameter groups, which an optimizer treats differently, and the file from which a script makes
the same groups.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bridge.checkpoint.hub import Hub, ParameterGroup
from bridge.engine.learning_rate import learning_rate
from bridge.errors import SourceError
from bridge.files.contained import read_text
from bridge.files.shown import show_value
from bridge.plan.plan import Optimizer

Row = Mapping[str, Any]
"""A group in the form that torch's optimizers expect, but with names of parameters in place of the
parameters.
"""

FILE = "parameter_groups.json"
TREATED = ("weight_decay", "betas", "eps", "momentum")
"""Settings by which groups are treated differently, apart from the learning rate, which follows
the schedule.
"""
MOST = 2**28
NEAR = 1e-9
"""Largest relative difference at which two learning rates count as equal."""


def effective_setting(group: ParameterGroup, name: str) -> Any:
    """Return the value of a group's setting that takes effect: the weight decay is 0 if Megatron's
    `wd_mult` is 0.
    """
    return 0.0 if name == DECAY and group.settings.get("wd_mult") == 0 else group.settings.get(name)


DECAY = "weight_decay"


def base_rate(group: ParameterGroup) -> float | None:
    """Return the learning rate of a group before the schedule changes it: `initial_lr`, which
    torch's schedulers set, or else `lr`.
    """
    rate = group.settings.get("initial_lr", group.settings.get("lr"))
    return float(rate) if isinstance(rate, int | float) else None


def rate_ratios(hub: Hub, optimizer: Optimizer) -> list[float]:
    """Return the learning rate of each group, divided by a base rate. The base rate is the config's
    rate or the scheduled rate at this step, if a group has this rate. If no group has it, the base
    rate is the rate of the group with most elements.
    """
    rates, steps = [base_rate(group) for group in hub.groups], hub.where.steps or 0
    plan_rates = [optimizer.lr]
    if optimizer.lr is not None:
        # DeepSpeed's schedulers are one step behind: the rate of the step before is the config's
        # too.
        near = (steps, max(0, steps - 1))
        plan_rates += [learning_rate(optimizer.lr, optimizer.schedule, step) for step in near]
    matches = (
        rate
        for rate in rates
        if rate is not None and any(_are_same(rate, other) for other in plan_rates)
    )
    usual = (
        next(matches, None)
        or max(
            zip(map(hub.elements, hub.groups), rates, strict=True),
            default=(0, None),
            key=_first_of_pair,
        )[1]
    )
    return [rate / usual if rate is not None and usual else 1.0 for rate in rates]


def _first_of_pair(pair: tuple[int, Any]) -> int:
    return pair[0]


def _are_same(one: float | None, other: float | None) -> bool:
    return one is not None and other is not None and abs(one - other) <= NEAR * abs(one)


def _one_rate(groups: Sequence[ParameterGroup]) -> bool:
    rates = [base_rate(group) for group in groups if group.names]
    return all(rate == rates[0] or _are_same(rate, rates[0]) for rate in rates)


def groups_differ(groups: Sequence[ParameterGroup]) -> bool:
    """Return whether groups differ in the learning rate or in a setting of `TREATED`."""
    ways = {
        repr([effective_setting(group, name) for name in TREATED])
        for group in groups
        if group.names
    }
    return len(ways) > 1 or not _one_rate(groups)


SPARED = "matrices"
"""The weight decay scope by which a plan says that parameters with one dimension do not decay."""


def fits_config(hub: Hub) -> bool:
    """Return whether a config can express the groups. It can if they differ only in weight decay,
    and if exactly the parameters with at most one dimension do not decay.
    """
    decays = {effective_setting(group, DECAY) for group in hub.groups}
    others = {repr([group.settings.get(name) for name in TREATED[1:]]) for group in hub.groups}
    flat = {
        name
        for name, parameter in hub.trainable_parameters.items()
        if len(parameter.weight.shape) <= 1
    }
    undecaying = {
        name for group in hub.groups if effective_setting(group, DECAY) == 0 for name in group.names
    }
    return len(others) == 1 and len(decays) == 2 and undecaying == flat and _one_rate(hub.groups)


def needs_group_file(hub: Hub, scope: str | None, by_place: bool) -> bool:
    """Return whether a script needs the file of groups to make the same groups as the checkpoint.
    `scope` is the weight decay scope that the script applies without the file. With `by_place`,
    optimizer states are loaded by position, so that the order of parameters matters too.
    """
    if not hub.groups:
        return False
    fits = scope == SPARED and fits_config(hub)
    if not by_place:
        return groups_differ(hub.groups) and not fits
    names = [list(group.names) for group in hub.groups]
    if len(names) == 1:
        return names != [list(hub.trainable_parameters)]
    flat = {
        name
        for name, parameter in hub.trainable_parameters.items()
        if len(parameter.weight.shape) <= 1
    }
    # The groups that a script makes for this scope: matrices first, then what does not decay, each
    # in the model's order.
    names_by_scope = [
        [name for name in hub.trainable_parameters if (name in flat) is side]
        for side in (False, True)
    ]
    return not (fits and names == names_by_scope)


def groups_to_write(hub: Hub, optimizer: Optimizer) -> tuple[Row, ...]:
    """Return the groups to write into the file. If the plan has a schedule, the learning rate of a
    group is the optimizer's rate times the group's ratio; otherwise it is the rate that the group
    has.
    """
    has_schedule = (
        optimizer.schedule.name not in (None, "constant") or optimizer.schedule.warmup_steps
    )
    rows = []
    for group, ratio in zip(hub.groups, rate_ratios(hub, optimizer), strict=True):
        rate = (
            optimizer.lr * ratio if has_schedule and optimizer.lr is not None else base_rate(group)
        )
        settings = {
            name: effective_setting(group, name)
            for name in TREATED
            if group.settings.get(name) is not None
        }
        rows.append(
            {"params": list(group.names), **({} if rate is None else {"lr": rate}), **settings}
        )
    return tuple(row for row in rows if row["params"])


def text_of(rows: Sequence[Row]) -> str:
    """Return the content of a file with these groups, as JSON."""
    return json.dumps(rows, indent=1) + "\n"


def read_groups(path: Path) -> tuple[Row, ...]:
    """Return the groups of a file. Raises a `SourceError` with a line for each invalid value."""
    try:
        rows = json.loads(read_text(path, path.parent, MOST))
    except (ValueError, RecursionError) as error:
        raise SourceError(
            f"{path}: expected JSON as `stagebridge move` writes it ({error})"
        ) from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise SourceError(
            f"{path}: found {show_value(rows, 40)}, expected a list of groups, each with `params` and settings"
        )
    SourceError.raise_if(
        f"{path}: group {number}: {problem}"
        for number, row in enumerate(rows)
        for problem in _find_odd_values(row)
    )
    return tuple(rows)


def _find_odd_values(row: Mapping[str, Any]) -> Iterator[str]:
    names = row.get("params")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        yield f"params: found {show_value(names, 40)}, expected names of parameters"
    for name, value in row.items():
        if name == "params":
            continue
        if name not in ("lr", *TREATED):
            yield f"{show_value(name)}: found an unknown setting of a group, expected one of lr, {', '.join(TREATED)}"
        elif not _are_numbers(value, 2 if name == "betas" else 0):
            yield f"{name}: found {show_value(value, 40)}, expected {'two numbers' if name == 'betas' else 'a number'}"


def _are_numbers(value: Any, count: int) -> bool:
    if count:
        return (
            isinstance(value, list)
            and len(value) == count
            and all(_are_numbers(one, 0) for one in value)
        )
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")
    )


def check_groups(rows: Sequence[Row], names_to_train: Iterable[str], where: str) -> None:
    """Raise `SourceError` unless the groups have exactly the `names_to_train` parameters, each of them
    once. `where` is the place in the message.
    """
    counts, own = Counter(name for row in rows for name in row["params"]), set(names_to_train)
    problems = {
        "{} is not a trained parameter of the model": sorted(counts.keys() - own),
        "{} is in no group": sorted(own - counts.keys()),
        "{} is in several groups": sorted(name for name, count in counts.items() if count > 1),
    }
    wrong = (what.format(show_value(names[0])) for what, names in problems.items() if names)
    SourceError.raise_if(
        f"{where}: {problem}; put every trained parameter of the model into one group"
        for problem in wrong
    )


def build_groups(
    rows: Sequence[Row], parameters: Mapping[str, Any], where: str
) -> list[dict[str, Any]]:
    """Return the groups as torch's optimizers expect them, with the parameters that `parameters` has by
    name. Raises `SourceError` if the groups do not fit the trained parameters.
    """
    weights = {name: weight for name, weight in parameters.items() if weight.requires_grad}
    check_groups(rows, weights, where)
    groups = [{**row, "params": [weights[name] for name in row["params"]]} for row in rows]
    return [{**row, **({"betas": tuple(row["betas"])} if "betas" in row else {})} for row in groups]
