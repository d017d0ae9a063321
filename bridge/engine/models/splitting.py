"""Splitting: splits a model of Hugging Face over tensor ranks by the model's own plan, and checks
that its logits stay the same.

A module is split if the model's plan names all of the module's weights, each with a style that the
engine supports. Layers that take and return whole features are split one by one. Stacks of experts
are split one by one too, and each rank then holds some experts of each stack. Every rank holds all
other modules whole, among them embeddings and tied heads.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from bridge.engine.layers import Arguments
from bridge.engine.models.cutting import (
    SHAPE,
    is_hugging_face,
    ran,
    still,
    trials,
    without_cache,
    words,
)
from bridge.engine.models.slicing import slice_model
from bridge.engine.models.stacks import stacks_of
from bridge.errors import ConfigError
from bridge.layout.tensor import TensorPlan
from bridge.plan.plan import Plan

COLUMN, ROW, SHARE = "colwise", "rowwise", "replicated_with_grad_allreduce"
GATHERED, DIVIDED = "colwise_gather_output", "rowwise_split_input"
EXPERTS = "moe_tp_experts"
HEADS = ("num_attention_heads", "num_key_value_heads")
WIDTHS = ("head_dim", "head_size")
CLOSE = 1e-3
"""The largest difference of logits that counts as rounding for weights in fp32, as a share of the
largest logit.
"""
ROUNDINGS = 4
"""The largest difference of logits that counts as rounding for coarser formats: this number times
the rounding of the weights' format.
"""


def tensor_plan(model: nn.Module, plan: Plan, ranks: int) -> TensorPlan:
    """Return how `model` is split over `ranks` tensor ranks. Raises `ConfigError` if the model
    cannot be split.
    """
    ConfigError.raise_if(_uneven(model, ranks))
    styles = dict(_styles(model))
    parents = {name.rpartition(".")[0] for name, style in styles.items() if style == ROW}
    split = {
        name: styles[name] for parent in parents for name in _children(model, parent, styles, ranks)
    }
    split |= {
        name: style
        for name, style in styles.items()
        if style in (GATHERED, DIVIDED) and _alone(model, name)
    }
    stacks = tuple(
        stacks_of(model, [name for name, style in styles.items() if style == EXPERTS], ranks)
    )
    if not split and not stacks:
        raise ConfigError(
            f"parallel.tensor: {type(model).__name__} has no tensor plan that the engine can "
            "follow; set parallel.tensor to 1"
        )
    layers = {
        kind: tuple(name for name, style in split.items() if style == kind)
        for kind in (COLUMN, ROW, SHARE, GATHERED, DIVIDED)
    }
    return TensorPlan(
        columns=layers[COLUMN],
        rows=layers[ROW],
        partial=layers[SHARE],
        gathered=layers[GATHERED],
        divided=layers[DIVIDED],
        experts=stacks,
        tokens=slice_model(model, layers[ROW]) if plan.parallel.sequence else None,
    )


def _alone(model: nn.Module, name: str) -> bool:
    """Return whether the layer `name` can be split by itself: it must be a linear layer whose
    weight no other module has.
    """
    layer = model.get_submodule(name)
    # A class derived from Linear may compute something else.
    if type(layer) is not nn.Linear:
        return False
    parameters = model.named_parameters(remove_duplicate=False)
    return sum(weight is layer.weight for _, weight in parameters) == 1


def _uneven(model: nn.Module, ranks: int) -> Iterator[str]:
    for name in HEADS:
        number = getattr(model.config, name, None)
        if isinstance(number, int) and number % ranks:
            yield (
                f"parallel.tensor: the model's {name} ({number}) do not divide evenly over {ranks} ranks;"
                f" use a divisor of {number}"
            )


def _styles(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield each module that the plan of the model or of its base model names, with the style in
    the plan.
    """
    base = getattr(model, "base_model", None)
    for parent, module in model.named_modules():
        # A model of transformers has the plans of the models within it, each below its name. A few
        # models do not say which of their modules is their base model; its plan is in the config.
        is_base = module is base or (base is model and parent == "model")
        config = getattr(module, "config", None) if is_base else None
        plan: Mapping[str, str] = {
            **(getattr(config, "base_model_tp_plan", None) or {}),
            **(getattr(module, "_tp_plan", None) or {}),
        }
        patterns = {
            re.compile(re.escape(name).replace(r"\*", r"\d+")): style
            for name, style in plan.items()
        }
        for name, _ in module.named_modules() if patterns else ():
            style = next(
                (style for pattern, style in patterns.items() if pattern.fullmatch(name)), None
            )
            if style is not None:
                yield f"{parent}.{name}" if parent else name, style


def _children(model: nn.Module, parent: str, styles: Mapping[str, str], ranks: int) -> list[str]:
    """Return the modules within `parent` if they hold all weights of `parent` and the engine can
    split each of them. Otherwise return no modules.
    """
    module = model.get_submodule(parent)
    names = [
        f"{parent}.{name}"
        for name, part in module.named_children()
        if any(True for _ in part.parameters())
    ]
    if any(True for _ in module.parameters(recurse=False)):
        return []
    for name in names:
        style = styles.get(name, "")
        # A class derived from Linear may compute something else.
        linear = style in (COLUMN, ROW) and type(model.get_submodule(name)) is nn.Linear
        if style != SHARE and not linear:
            return []
    # Ranks get whole heads, if the module says how wide one is.
    width = next(
        (value for name in WIDTHS if isinstance(value := getattr(module, name, None), int)), 1
    )
    columns = [model.get_submodule(name) for name in names if styles.get(name) == COLUMN]
    even = all(
        part.out_features % (width * ranks) == 0 for part in columns if isinstance(part, nn.Linear)
    )
    # One sum leads out of the module: a column split without a row split behind it would leave
    # parts, and two would sum twice.
    one = [styles.get(name) for name in names].count(ROW) == 1
    return names if even and one and columns else []


@contextmanager
def prove_split(model: nn.Module, ranks: int, sample: Arguments | None = None) -> Iterator[None]:
    """Context for a block of code that splits `model`. Raises `ConfigError` at the end unless the
    model gives the same logits as at the beginning, for a few tokens or for `sample`. Models that
    are not of Hugging Face are not checked.
    """
    if not is_hugging_face(model):
        yield
        return
    before = _logits(model, ranks, sample)
    yield
    after = _logits(model, ranks, sample)
    apart = float((after - before).abs().max() / before.abs().max().clamp(min=1e-30))
    rounding = max(
        torch.finfo(weight.dtype).eps for weight in model.parameters() if weight.is_floating_point()
    )
    # Not `>=`: a difference that is NaN has to be refused too.
    if not apart < max(CLOSE, ROUNDINGS * rounding):
        raise ConfigError(
            "parallel.tensor: the split model gives other logits,"
            f" with a relative difference of {apart:.1g}; set parallel.tensor to 1"
        )


def _logits(model: nn.Module, ranks: int, sample: Arguments | None) -> Tensor:
    # Under sequence parallelism the tokens have to divide into the ranks.
    trial = words(model, (SHAPE[0], SHAPE[1] * ranks))
    samples: list[dict[str, Tensor]] = []
    if trial is not None:
        beside = getattr(model.config, "is_encoder_decoder", False)
        samples = [{"input_ids": trial, **({"decoder_input_ids": trial} if beside else {})}]
    with still(model):
        _, output = ran(model, trials(model, sample, *samples), without_cache(model))
    logits: Tensor = output[0]
    return logits.float()
