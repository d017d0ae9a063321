"""Cutting: divides a model of Hugging Face into layers. The model is run on a few tokens to find
the layers. Then the layers are run one by one, each with only its own weights, and must give the
same output as the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import Parameter, signature
from math import nan
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from bridge.engine.layers import Arguments
from bridge.engine.models.blocks import Blocks, Cut, Stream, asked, left_out
from bridge.engine.models.trial import WHOLE, Uncut, cut
from bridge.engine.randomness import scope
from bridge.errors import BridgeError
from bridge.findings import Finding
from bridge.layout.pipeline import ranks_of
from bridge.plan import Plan
from bridge.rules import Effect

SHAPE = (2, 8)
"""Number of samples and of tokens on which a model is tried."""


def planned(
    model: nn.Module, plan: Plan, parts: object = None, sample: Arguments | None = None
) -> tuple[Cut | None, tuple[Finding, ...]]:
    """Return how to divide a model of Hugging Face into layers, with findings. Return None for
    other models.

    A model that cannot be divided, or that leaves out blocks at random, runs as one layer. If
    pipeline ranks must share the model, this is an error. With ZeRO 3 it is a finding, because a
    single layer is never sharded.
    """
    if isinstance(model, nn.Sequential):
        return None, ()
    reason = "make the model an nn.Sequential, so that its weights can be sharded"
    shared = ranks_of(plan) > 1 or bool(parts)
    if is_hugging_face(model) and not shared and (setting := left_out(model)):
        reason = f"the setting {setting} leaves out blocks at random; set it to 0"
    elif is_hugging_face(model):
        try:
            return cut_of(model, sample), ()
        except Uncut as error:
            if shared:
                raise
            reason = str(error)
    if plan.zero.effective_stage != 3:
        return None, ()
    return None, (
        Finding(
            "zero.stage",
            f"this model is one layer, so its weights stay whole: {reason}",
            Effect.COST,
            True,
        ),
    )


def is_hugging_face(model: nn.Module) -> bool:
    """Return whether `model` is a model of transformers, or wraps one."""
    return hasattr(model, "config") and callable(getattr(model, "get_input_embeddings", None))


def cut_of(model: nn.Module, sample: Arguments | None = None) -> Cut:
    """Return how `model` is divided into layers. The model is run on a few tokens, or on `sample`
    if it cannot run on tokens. Raises `Uncut`, which names the module that prevents a division.
    """
    Uncut.raise_if(asked(model, {}))
    # Weights take part in backward, so that arguments of blocks which are computed from weights
    # show.
    with still(model), _trained(model):
        fixed = uncached(model)
        given, expected = ran(model, trials(model, sample, *_named(model)), fixed)
        found = cut(model, given, fixed)
        _prove(model, found, given, expected)
    return found


def _prove(model: nn.Module, found: Cut, given: Arguments, expected: Any) -> None:
    """Run the layers one by one, each as if it were alone on a rank. Raises `Uncut` unless the last
    layer gives, bit by bit, the output of the model.
    """
    blocks = Blocks(model, found)
    value: Any = given
    for layer in blocks.chain().layers:
        with _alone(model, layer.module), torch.no_grad():
            try:
                value = layer(value)
            except BridgeError:
                raise
            except Exception as error:
                raise Uncut(
                    f"{layer.name}: does not run without the rest of the model ({type(error).__name__}: {error})"
                ) from error
        # As from another rank: without the calls that an earlier layer noted.
        value = blocks.received(value.tensors, given) if isinstance(value, Stream) else value
    if not _same(value, expected):
        raise Uncut(
            f"{found.blocks[0]}: the layers, run one by one, give another output than the model; {WHOLE}"
        )


def _same(one: Any, other: Any) -> bool:
    first, second = (
        [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)] for value in (one, other)
    )
    return len(first) == len(second) and all(
        a.shape == b.shape and bool(torch.equal(a, b)) for a, b in zip(first, second, strict=True)
    )


def _named(model: nn.Module) -> list[dict[str, Tensor]]:
    """Return arguments for the trial, with a few tokens: first with labels, as in training, and
    then without labels, because some models do not accept them.
    """
    ids = words(model)
    return [] if ids is None else [{"input_ids": ids, "labels": ids}, {"input_ids": ids}]


def ran(
    model: nn.Module, tries: Sequence[Arguments], fixed: Mapping[str, Any]
) -> tuple[Arguments, Any]:
    """Return the first arguments of `tries` on which the model runs, and the model's output. Raises
    `Uncut` if the model runs on none of them.
    """
    found = f"{type(model).__name__}: the model has no input embedding for tokens"
    for given in tries:
        try:
            # With gradients torch has other kernels, which round otherwise than in the proof.
            with torch.no_grad():
                return given, model(*given.given, **{**fixed, **given.named})
        except Exception as error:
            names = " and ".join(given.named) or "the sample"
            why = f"the model does not run on {names} alone ({type(error).__name__}: {error})"
            found = f"{type(model).__name__}: {why}"
    raise Uncut(f"{found}; {WHOLE}")


def trials(
    model: nn.Module, sample: Arguments | None, *named: Mapping[str, Tensor]
) -> list[Arguments]:
    """Return the arguments on which to try the model, in order: the `named` arguments, then the
    sample. If the sample has inputs other than tokens, such as images, it comes first instead.
    """
    if sample is None:
        return [Arguments((), dict(each)) for each in named]
    weight = next(weight for weight in model.parameters() if weight.is_floating_point())

    def like(tensor: Tensor) -> Tensor:
        return tensor.to(weight.device, weight.dtype if tensor.is_floating_point() else None)

    alike = Arguments(*tree_map_only(Tensor, like, tuple(sample)))
    leaves = tree_leaves(tuple(alike))
    first = any(isinstance(leaf, Tensor) and leaf.is_floating_point() for leaf in leaves)
    words = [Arguments((), dict(each)) for each in named]
    return [alike, *words] if first else [*words, alike]


def uncached(model: nn.Module) -> Mapping[str, Any]:
    """Return arguments for the model that turn its cache off."""
    taken = signature(model.forward).parameters
    takes = "use_cache" in taken or any(
        each.kind is Parameter.VAR_KEYWORD for each in taken.values()
    )
    return {"use_cache": False} if takes and hasattr(model.config, "use_cache") else {}


def tokens(model: nn.Module, shape: tuple[int, int] = SHAPE) -> Tensor:
    """Return tokens for the trial, of `shape` (samples, tokens), all within the model's vocabulary.
    """
    embeddings = model.get_input_embeddings()  # type: ignore[operator]
    number = getattr(embeddings, "num_embeddings", None) or len(next(embeddings.parameters()))
    return (
        torch.arange(shape[0] * shape[1], device=next(model.parameters()).device).view(shape)
        % number
    )


def words(model: nn.Module, shape: tuple[int, int] = SHAPE) -> Tensor | None:
    """Return tokens for the trial, or None for a model without an embedding of tokens, such as a
    model of images.
    """
    try:
        return tokens(model, shape)
    except NotImplementedError:  # transformers raises it if a model has no input embedding
        return None


@contextmanager
def still(model: nn.Module) -> Iterator[None]:
    """Context in which the model is in evaluation mode. At the end, modes, buffers and torch's
    random generators are as before.
    """
    modes = [(module, module.training) for module in model.modules()]
    held = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        model.eval()
        # Wherever the weights are: on a device, its own generator draws.
        with scope(next((weight.device for weight in model.parameters()), torch.device("cpu"))):
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        for buffer, value in held:
            buffer.copy_(value)


@contextmanager
def _trained(model: nn.Module) -> Iterator[None]:
    """Context in which every weight takes part in backward, even a frozen one."""
    held = [
        (weight, weight.requires_grad)
        for weight in model.parameters()
        if weight.is_floating_point()
    ]
    try:
        for weight, _ in held:
            weight.requires_grad_(True)
        yield
    finally:
        for weight, trained in held:
            weight.requires_grad_(trained)


@contextmanager
def _alone(model: nn.Module, module: nn.Module) -> Iterator[None]:
    """Context in which all weights except those of `module` are NaN."""
    own = {id(weight) for weight in module.parameters()}
    others = [
        (weight, weight.data)
        for weight in model.parameters()
        if id(weight) not in own and weight.is_floating_point()
    ]
    try:
        # A single element of memory each. A layer that reads one of them cannot give the right
        # output.
        for weight, data in others:
            weight.data = data.new_full((), nan).expand(data.shape)
        yield
    finally:
        for weight, data in others:
            weight.data = data
