"""Cutting: divides a model of Hugging Face into layers. The model is run on a few tokens to find
the layers. Then the layers are run one by one, each with only its own weights, and must give the
same output as the model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import is_dataclass, replace
from inspect import Parameter, signature
from math import nan
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from bridge.engine.layers import Arguments, Layer, hooks_of, logits_in, more_than_children
from bridge.engine.models.blocks import (
    WHOLE,
    Blocks,
    Cut,
    Stream,
    Uncut,
    ancestors,
    find_layer_drop,
    find_requests,
)
from bridge.engine.models.reach import MANY, unchanged
from bridge.engine.models.trial import cut
from bridge.engine.randomness import Keyed, scope
from bridge.engine.stage import differentiable
from bridge.errors import BridgeError, ConfigError
from bridge.layout.pipeline import ranks_of
from bridge.plan.plan import Plan
from bridge.stack.findings import Finding
from bridge.stack.rules import Effect
from bridge.trace.random_states import other_states, restore_others

SHAPE = (2, 8)
"""Number of samples and of tokens on which a model is tried."""


def plan_cut(
    model: nn.Module,
    plan: Plan,
    parts: object = None,
    sample: Arguments | None = None,
    blocks: Sequence[str] | None = (),
) -> tuple[Cut | None, tuple[Finding, ...]]:
    """Return how to divide a model into layers, with findings. Return None for an `nn.Sequential`,
    and for a module that takes unknown arguments because it is no model of Hugging Face and there is
    no `sample`. `blocks` are the names of the blocks (default: those that the model repeats); None
    keeps a model that could be divided without a sample one layer.

    A model that cannot be divided, or that leaves out blocks at random, runs as one layer. If
    pipeline ranks must share the model, this is an error. With ZeRO 3 it is a finding, because a
    single layer is never sharded.
    """
    reason: str | None = UNKNOWN
    across_ranks = ranks_of(plan) > 1 or bool(parts)
    if isinstance(model, nn.Sequential):
        reason = more_than_children(model)
        if reason is None:
            return None, ()
        ConfigError.raise_if(
            [f"model: {reason}, so that pipeline ranks cannot share it"] * across_ranks
        )
    elif is_hugging_face(model) and not across_ranks and (setting := find_layer_drop(model)):
        reason = f"the setting {setting} leaves out blocks at random; set it to 0"
    elif blocks is not None and (
        is_hugging_face(model) or (sample and (across_ranks or plan.zero.effective_stage == 3))
    ):
        try:
            return cut_of(model, sample, blocks), ()
        except Uncut as error:
            if across_ranks:
                raise
            reason = str(error)
    if plan.zero.effective_stage != 3 or (blocks is None and is_hugging_face(model)):
        return None, ()
    return None, (
        Finding(
            "zero.stage",
            f"this model is one layer, so its weights stay whole: {reason}",
            Effect.COST,
            True,
        ),
    )


UNKNOWN = (
    "what arguments it takes is not known; pass a batch as `sample` to initialize, or make the model"
    " an nn.Sequential"
)
"""Why a module that is no model of Hugging Face stays whole."""


def is_hugging_face(model: nn.Module) -> bool:
    """Return whether `model` is a model of transformers, or wraps one."""
    return hasattr(model, "config") and callable(getattr(model, "get_input_embeddings", None))


def cut_of(model: nn.Module, sample: Arguments | None = None, blocks: Sequence[str] = ()) -> Cut:
    """Return how `model` is divided into layers, of which `blocks` may be named. The model is run on
    a few tokens, or on `sample` if it cannot run on tokens. Raises `Uncut`, which names the module
    that prevents a division.
    """
    Uncut.raise_if(find_requests(model, {}))
    # Weights take part in backward, so that arguments of blocks which are computed from weights
    # show.
    with still(model), _train_all_weights(model):
        others = other_states()
        constants = without_cache(model)
        ids = words(model)
        # First with labels, as in training, and then without: some models do not accept them.
        known = [] if ids is None else [{"input_ids": ids, "labels": ids}, {"input_ids": ids}]
        arguments, output = ran(model, trials(model, sample, *known), constants)
        Uncut.raise_if(_find_hidden(output))
        model_cut = cut(model, arguments, constants, blocks)
        around = _around(model, model_cut)
        Uncut.raise_if(
            f"{name or type(model).__name__}: the module has hooks, which would run once for each layer; {WHOLE}"
            for name, module in around.items()
            if hooks_of(module)
        )
        with torch.no_grad():
            layer_output = _in_layers(model, model_cut, arguments)
        if not _same(layer_output, output):
            raise Uncut(f"{_first_block(model, model_cut)}: {_OTHER}; {WHOLE}")
        packs = _packs(model, arguments, constants)
        model.train()
        _prove_training(model, model_cut, arguments, around)
        if other_states() != others:
            raise Uncut(f"{type(model).__name__}: {_DRAWS}; {WHOLE}")
    return replace(model_cut, packs=packs)


def _packs(model: nn.Module, arguments: Arguments, constants: Mapping[str, Any]) -> bool:
    """Return whether positions that restart within a row mean something else with the arguments in `constants`."""
    ids = arguments.named.get("input_ids")
    if (
        not constants
        or not isinstance(ids, Tensor)
        or "position_ids" not in signature(model.forward).parameters
    ):
        return False
    half = max(ids.shape[-1] // 2, 1)
    positions = (torch.arange(ids.shape[-1], device=ids.device) % half).expand(ids.shape)
    with torch.no_grad():
        try:
            plain = model(input_ids=ids, position_ids=positions)
        except Exception:  # whatever the model's own code raises: nobody can call it in this way
            return False
        other = model(input_ids=ids, position_ids=positions, **constants)
    return not _same(logits_in(plain), logits_in(other))


def _find_hidden(output: Any) -> Iterator[str]:
    """Yield a problem if a model's output has tensors where the engine does not see them, so that layers
    would lose their gradients: in a data class or another object that torch's pytree does not know.
    """
    leaves = tree_leaves(output)
    for leaf in leaves:
        values = (
            []
            if isinstance(leaf, Tensor)
            else tree_leaves([*getattr(leaf, "__dict__", {}).values()])
        )
        if any(isinstance(value, Tensor) for value in values) or is_dataclass(leaf):
            yield (
                f"{type(leaf).__name__}: the tensors in it, which the model returns, are known to no layer;"
                f" return a dict or a tuple, or register the class with torch's pytree; {WHOLE}"
            )
    if not any(isinstance(leaf, Tensor) for leaf in leaves):
        yield f"the model returns no tensor; {WHOLE}"


def _first_block(model: nn.Module, model_cut: Cut) -> str:
    return next(iter(model_cut.blocks), type(model).__name__)  # all may have joined a segment


_OTHER = "the layers, run one by one, give another output than the model"
_DRAWS = "it draws random numbers of Python or numpy, by which it may choose what it runs"


def _around(model: nn.Module, model_cut: Cut) -> dict[str, nn.Module]:
    """Return the modules outside of all layers, which run with the forward pass of the model, once for
    each segment.
    """
    layers = {step.name for step in model_cut.places}
    return {
        name: module
        for name, module in model.named_modules()
        if name not in layers and not layers.intersection(ancestors(name))
    }


def _prove_training(
    model: nn.Module, model_cut: Cut, arguments: Arguments, around: Mapping[str, nn.Module]
) -> None:
    """Run model and layers forward and backward in training mode. Raises `Uncut` unless outputs are
    equal bit by bit, and gradients but for the order of sums. The forward pass of the model runs once
    for each segment: it must change nothing, and what it draws by itself must not come to two segments.
    """
    device = next(model.parameters()).device
    before = _attributes(around)
    names = {id(module): name for name, module in model.named_modules()}
    with Keyed(device, 0, names):
        reference = model(*arguments.given, **{**model_cut.fixed, **arguments.named})
    attribute = next(
        (name for name, value in _attributes(around).items() if before.get(name) != value), None
    )
    if attribute is not None:
        raise Uncut(
            f"{attribute}: the forward pass changes this attribute, and would run once for each layer; {WHOLE}"
        )
    gradients = _gradients(model, reference)
    drawing = Keyed(device, 0, names)
    output = _in_layers(
        model,
        model_cut,
        arguments,
        lambda layer: Keyed(device, 0, names) if layer.keys else drawing,
    )
    if not _same(output, reference):
        raise Uncut(f"{_first_block(model, model_cut)}: in training mode, {_OTHER}; {WHOLE}")
    others = _gradients(model, output)
    largest = max((float(one.norm()) for one in gradients.values()), default=0.0)
    for name, gradient in gradients.items():
        other = others.get(name, torch.zeros_like(gradient))
        if float((gradient - other).norm()) > _ROUNDING * torch.finfo(gradient.dtype).eps * largest:
            raise Uncut(
                f"{name}: the layers, run one by one, give another gradient than the model; {WHOLE}"
            )


_ROUNDING = 64
"""How often the smallest difference between numbers two gradients may differ, since sums over several
uses of a tensor may be taken in another order.
"""


def _gradients(model: nn.Module, output: Any) -> dict[str, Tensor]:
    """Return the gradients of a sum over all outputs by name."""
    roots = [leaf.double().square().sum() for leaf in differentiable(output)]
    weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    if not roots:
        return {}
    try:
        gradients = torch.autograd.grad(
            sum(roots[1:], roots[0]), list(weights.values()), allow_unused=True
        )
    except RuntimeError as error:  # reentrant checkpoints have no gradients apart
        raise Uncut(f"{type(model).__name__}: {error}; {WHOLE}") from None
    return {name: one for name, one in zip(weights, gradients, strict=True) if one is not None}


def _attributes(modules: Mapping[str, nn.Module]) -> dict[str, Any]:
    """Return what tells whether attributes and buffers of `modules` change: simple values themselves,
    the elements of a collection, and the number of changes to a tensor in place.
    """
    return {
        f"{name}.{key}" if name else key: _fingerprint(value)
        for name, module in modules.items()
        for key, value in {**vars(module), **module._buffers}.items()
        if not key.startswith("_") or key not in vars(nn.Module())
    }


def _fingerprint(value: Any) -> Any:
    if isinstance(value, str | int | float | bool | None):
        return type(value), value
    if isinstance(value, Mapping):
        return (
            [(id(key), _fingerprint(one)) for key, one in value.items()]
            if len(value) < MANY
            else len(value)
        )
    if isinstance(value, list | tuple | set | deque):
        return [*map(_fingerprint, value)] if len(value) < MANY else len(value)
    return id(value), value._version if isinstance(value, Tensor) else 0


def _in_layers(
    model: nn.Module,
    model_cut: Cut,
    arguments: Arguments,
    context: Callable[[Layer], AbstractContextManager[object]] = lambda layer: nullcontext(),
) -> Any:
    """Run the layers one by one, each in its `context` and as if it were alone on a rank. Return the
    output of the last one.
    """
    blocks = Blocks(model, model_cut)
    value: Any = arguments
    for layer in blocks.chain().layers:
        with _alone(model, layer.module), context(layer):
            try:
                value = layer(value)
            except BridgeError:
                raise
            except Exception as error:
                raise Uncut(
                    f"{layer.name}: does not run without the rest of the model ({type(error).__name__}: {error})"
                ) from error
        # As from another rank: without the calls that an earlier layer noted.
        value = (
            blocks.receive_stream(value.tensors, arguments) if isinstance(value, Stream) else value
        )
    return value


def _same(one: Any, other: Any) -> bool:
    first, second = (
        [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)] for value in (one, other)
    )
    return len(first) == len(second) and all(
        a.shape == b.shape and bool(torch.equal(a, b)) for a, b in zip(first, second, strict=True)
    )


def ran(
    model: nn.Module, tries: Sequence[Arguments], constants: Mapping[str, Any]
) -> tuple[Arguments, Any]:
    """Return the first arguments of `tries` on which the model runs, and the model's output. Raises
    `Uncut` if the model runs on none of them.
    """
    why = []
    for arguments in tries:
        try:
            # With gradients torch has other kernels, which round otherwise than in the proof.
            with torch.no_grad():
                return arguments, model(*arguments.given, **{**constants, **arguments.named})
        except Exception as error:
            names = " and ".join(arguments.named) or "the sample"
            why += [f"the model does not run on {names} alone ({type(error).__name__}: {error})"]
    reasons = "; ".join(why or ["the model has no input embedding for tokens"])
    raise Uncut(f"{type(model).__name__}: {reasons}; {WHOLE}")


def trials(
    model: nn.Module, sample: Arguments | None, *samples: Mapping[str, Tensor]
) -> list[Arguments]:
    """Return the arguments on which to try the model, in order: those in `samples`, then the
    sample. If the sample has inputs other than tokens, such as images, it comes first instead.
    """
    if sample is None:
        return [Arguments((), dict(each)) for each in samples]
    weight = next(weight for weight in model.parameters() if weight.is_floating_point())

    def like(tensor: Tensor) -> Tensor:
        return tensor.to(weight.device, weight.dtype if tensor.is_floating_point() else None)

    alike = Arguments(*tree_map_only(Tensor, like, tuple(sample)))
    leaves = tree_leaves(tuple(alike))
    first = any(isinstance(leaf, Tensor) and leaf.is_floating_point() for leaf in leaves)
    words = [Arguments((), dict(each)) for each in samples]
    return [alike, *words] if first else [*words, alike]


def without_cache(model: nn.Module) -> Mapping[str, Any]:
    """Return arguments for the model that turn its cache off."""
    parameters = signature(model.forward).parameters
    takes = "use_cache" in parameters or any(
        each.kind is Parameter.VAR_KEYWORD for each in parameters.values()
    )
    has = hasattr(getattr(model, "config", None), "use_cache")
    return {"use_cache": False} if takes and has else {}


def tokens(model: nn.Module, shape: tuple[int, int] = SHAPE) -> Tensor:
    """Return tokens for the trial, of `shape` (samples, tokens), all within the model's vocabulary."""
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
    if not is_hugging_face(model):
        return None
    try:
        return tokens(model, shape)
    except NotImplementedError:  # transformers raises it if a model has no input embedding
        return None


@contextmanager
def still(model: nn.Module) -> Iterator[None]:
    """Context in which the model is in evaluation mode. At the end, modes, buffers, the random
    generators of torch, Python and numpy, and what the model's code can change (`unchanged`) are as
    before. Raises `Uncut` if its code can change what cannot be put back.
    """
    modes = [(module, module.training) for module in model.modules()]
    copies = [(buffer, buffer.clone()) for buffer in model.buffers()]
    others = other_states()
    try:
        model.eval()
        # Wherever the weights are: on a device, its own generator draws.
        device = next((weight.device for weight in model.parameters()), torch.device("cpu"))
        with scope(device), unchanged(model):
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        for buffer, value in copies:
            buffer.copy_(value)
        restore_others(others)


def why_whole(model: nn.Module, arguments: Arguments) -> str | None:
    """Return why a model has to stay one layer as far as a forward pass in training mode shows, or
    None: if it draws random numbers, of which layers would draw others.
    """
    device, own = next(model.parameters()).device, arguments.copy() or arguments
    states = torch.cuda.get_rng_state if device.type == "cuda" else torch.get_rng_state
    try:
        with still(model), torch.no_grad():
            model.train()
            before, others = states(), other_states()
            model(*own.given, **own.named)
            if other_states() != others:
                return _DRAWS
            drawn = not torch.equal(before, states())
    except Uncut as error:
        return str(error)
    except (
        Exception
    ) as error:  # whatever the model's own code raises: a batch may be for evaluation
        return f"its first batch does not run in training mode ({type(error).__name__}: {error})"
    return (
        "it draws random numbers, such as those of dropout, which layers would draw differently"
        if drawn
        else None
    )


@contextmanager
def _train_all_weights(model: nn.Module) -> Iterator[None]:
    """Context in which every weight takes part in backward, even a frozen one."""
    flags = [
        (weight, weight.requires_grad)
        for weight in model.parameters()
        if weight.is_floating_point()
    ]
    try:
        for weight, _ in flags:
            weight.requires_grad_(True)
        yield
    finally:
        for weight, trains in flags:
            weight.requires_grad_(trains)


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
