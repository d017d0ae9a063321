"""Update rules of the script: an optimizer of any class runs on the slices of weights that ranks own
if a trial shows that it updates each element by itself, and on whole parameters if it does not.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from inspect import signature
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from bridge.engine.optimizer import Groups, Make, ParameterGroupSettings, ShardOptimizer, Whole
from bridge.errors import ConfigError
from bridge.layout.shard import FlatPiece, Parameter
from bridge.plan.plan import Optimizer as Settings
from bridge.trace.random_states import other_states, restore_others

Shape = tuple[int, ...]
STEPS = 11
"""How many updates a trial makes: more than the five after which RAdam changes its rule, and than ten,
the usual interval of rules that do something now and then.
"""
SKIPPED = 5
"""The update of a trial in which one parameter has no gradient."""
SLOWER = 3
"""The update of a trial from which on rates are lower."""
SCALES = (1.0, 100.0, 0.01)
"""By what the gradients of a trial are multiplied, in turn, so that rules that clip do."""
LIMITS = (160, 160, 160, 24)
"""The largest size of a dimension in a trial, by the number of dimensions; the last one for more, too.
From 128 on, Adafactor factors matrices.
"""
RATE = 1e-3
CLOSE = 1e-3
"""How far a trial's results may be apart, as a share of the largest change of a parameter."""
SHAPES: tuple[Shape, ...] = ((160, 160), (160,), (24, 24, 24))


def rule_of_instance(optimizer: torch.optim.Optimizer) -> Make:
    """Return how to make optimizers like `optimizer`, which has made no update: a `Whole` if its rule
    needs whole parameters. Raises `ConfigError` if the engine cannot run it.
    """
    kind = type(optimizer)
    base = {name: value for name, value in vars(optimizer).items() if name not in _NEW}
    usual = _settings(optimizer.param_groups[0])

    def construct(groups: Groups) -> torch.optim.Optimizer:
        taken = signature(kind).parameters
        settings = {name: value for name, value in optimizer.defaults.items() if name in taken}
        return kind(groups, **settings)

    def make(groups: Groups) -> torch.optim.Optimizer:
        other = object.__new__(kind)
        vars(other).update({name: copy.copy(value) for name, value in base.items()})
        other._optimizer_step_pre_hooks, other._optimizer_step_post_hooks = (
            OrderedDict(),
            OrderedDict(),
        )
        other.state, other.param_groups = defaultdict(dict), [{**usual, **one} for one in groups]
        return other

    groups = [
        (_settings(group), [tuple(weight.shape) for weight in group["params"]])
        for group in optimizer.param_groups
    ]
    begin = construct if optimizer.state else make  # a state that is there before the first update
    try:
        return _tried(kind.__name__, begin, groups, "optimizer")
    except ConfigError:
        weights = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
        for name, value in base.items():
            tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
            if any(tensor.numel() > 1 and id(tensor) not in weights for tensor in tensors):
                raise ConfigError(
                    f"optimizer: found {kind.__name__}, whose attribute {name} has tensors of its own, such"
                    " as copies of weights made at construction, which do not follow the slices that the"
                    " engine updates; keep them in its state, made in the first step(), or use AdamW or SGD"
                ) from None
        raise


_NEW = ("step", "state", "param_groups")
"""Attributes of an optimizer that a new one of its kind does not share. Schedulers set `step`."""


def maker_of(kind: type[torch.optim.Optimizer], settings: Mapping[str, Any], path: str) -> Make:
    """Return a function that makes an optimizer of class `kind` from parameter groups, for
    `initialize`. Raises `ConfigError`, which names `path`, if the optimizer cannot update slices of
    weights or does not take these settings.
    """
    make: Make = lambda groups: kind(groups, **settings)  # noqa: E731
    why = "its rule needs whole ones"
    try:
        group = _settings(make([{"params": [nn.Parameter(torch.zeros(2, 2))]}]).param_groups[0])
        rule = _tried(kind.__name__, make, [(group, SHAPES)], path)
        if not isinstance(rule, Whole):
            return rule
    except Exception as error:  # whatever the optimizer's own code raises
        why = str(error)
    raise ConfigError(
        f"{path}: found {kind.__name__}; the engine updates slices of weights, which this class does not"
        f" ({why}); use one of torch.optim's that update each element by itself, such as AdamW"
    )


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return copy.deepcopy({name: value for name, value in group.items() if name != "params"})


def _tried(
    name: str, make: Make, groups: Sequence[tuple[dict[str, Any], Sequence[Shape]]], path: str
) -> Make:
    """Return `make` or a `Whole` of it, the first with which the engine gives the updates of the
    optimizer itself.
    """
    why: Any = None
    for rule in (make, Whole(make)):
        try:
            why = _Trial(make, groups).problem(rule)  # each trial changes its own groups
        except Exception as error:  # whatever the optimizer's own code raises
            why = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        if why is None:
            return rule
    raise ConfigError(
        f"{path}: found {name}, which the engine cannot run ({why}); use AdamW or SGD"
    )


class _Trial:
    """A few parameters as those of an optimizer's groups, one of each number of dimensions, updated by
    the optimizer itself and by the engine's.
    """

    def __init__(
        self, make: Make, groups: Sequence[tuple[dict[str, Any], Sequence[Shape]]]
    ) -> None:
        self.make, self.groups, place = make, [], 0
        self.pieces: list[FlatPiece] = []
        for number, (settings, shapes) in enumerate(groups):
            # A warm-up begins with no rate.
            settings = settings | ({} if settings.get("lr", RATE) else {"lr": RATE})
            by_dims = {len(shape): shape for shape in sorted(shapes, key=prod) if prod(shape)}
            names = [f"{number}.{dims}" for dims in by_dims]
            self.groups.append(ParameterGroupSettings(frozenset(names), settings))
            for name, shape in zip(names, by_dims.values(), strict=True):
                least = tuple(min(size, LIMITS[min(len(shape), 3)]) for size in shape)
                piece = FlatPiece(Parameter(name, least, "fp32", (0,)), 0, prod(least), place)
                self.pieces.append(piece)
                place += prod(least)
        self.random = torch.Generator().manual_seed(0)
        self.start = torch.randn(place, generator=self.random)

    def problem(self, rule: Make) -> str | None:
        """Return what differs if the engine runs `rule`, or None."""
        reference, flat = self.start.clone(), self.start.clone()
        weights = {
            piece.parameter.name: nn.Parameter(self._part(reference, piece))
            for piece in self.pieces
        }
        optimizer = self.make(
            [
                {**group.settings, "params": [weights[name] for name in sorted(group.names)]}
                for group in self.groups
            ]
        )
        ranks = self._ranks(rule, flat)
        state, others = torch.get_rng_state(), other_states()
        for step in range(STEPS):
            for row in (*optimizer.param_groups, *(group.settings for group in self.groups)):
                if step == SLOWER and "lr" in row:
                    row["lr"] = row["lr"] * 0.5  # type: ignore[index]
            gradient = torch.randn(len(flat), generator=self.random) * SCALES[step % len(SCALES)]
            skip = frozenset([self.pieces[0].parameter.name] if step == SKIPPED else [])
            for piece in self.pieces:
                name = piece.parameter.name
                weights[name].grad = None if name in skip else self._part(gradient, piece).clone()
            optimizer.step()
            if not torch.equal(state, torch.get_rng_state()) or other_states() != others:
                torch.set_rng_state(state)
                restore_others(others)
                return "it draws random numbers, of which each rank would draw its own"
            for start, stop, rank in ranks:
                rank.step([gradient[start:stop]], RATE, None, skip)
        for piece in self.pieces:
            before, one, other = (self._part(of, piece) for of in (self.start, reference, flat))
            moved = float((one - before).abs().max())
            if not moved > 0 or not float((one - other).abs().max()) <= CLOSE * moved:
                return "a trial on a few tensors gives other updates than the optimizer itself"
        kept = {
            name
            for weight in weights.values()
            for name, value in optimizer.state[weight].items()
            if isinstance(value, Tensor) and value.numel() > 1
        }
        if not isinstance(rule, Whole) and kept - {*ranks[0][2].state_names}:
            return "its state begins later than with the first update"
        return None

    def _part(self, flat: Tensor, piece: FlatPiece) -> Tensor:
        return flat[piece.offset : piece.offset + piece.stop].view(piece.parameter.shape)

    def _ranks(self, rule: Make, flat: Tensor) -> list[tuple[int, int, ShardOptimizer]]:
        """Return the engine's optimizers with the ranges of `flat` that they own: of two ranks, which
        divide a parameter, or of one if `rule` needs whole ones.
        """
        bounds = (0, len(flat)) if isinstance(rule, Whole) else (0, (len(flat) + 1) // 2, len(flat))
        ranks = []
        for start, stop in pairwise(bounds):
            ends = (
                (piece, max(piece.offset, start), min(piece.offset + piece.stop, stop))
                for piece in self.pieces
            )
            parts = [
                FlatPiece(piece.parameter, first - piece.offset, last - piece.offset, first - start)
                for piece, first, last in ends
                if first < last
            ]
            rank = ShardOptimizer(Settings(), [flat[start:stop]], [parts], self.groups, rule)
            ranks.append((start, stop, rank))
        return ranks
