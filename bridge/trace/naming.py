"""Naming: the layers and parameters of a module, under names that are the same with and without
wrappers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

INNER = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Names of the attributes that hold the wrapped module in the wrappers of torch.compile,
FullyShardedDataParallel and activation checkpointing.
"""


def unwrap_module(module: nn.Module) -> nn.Module:
    """Return the innermost module that `module` wraps, or `module` itself if it wraps nothing.

    A wrapper holds its module under a name in `INNER`, or as its only child, called `module`, and
    has no parameters of its own (DistributedDataParallel, and wrappers built like it).
    """
    inner = _inner_module(module)
    return module if inner is None else unwrap_module(inner)


def _inner_module(module: nn.Module) -> nn.Module | None:
    # Every check of a step asks this of every module, so nothing is copied.
    children = module._modules
    for name in INNER:
        if children.get(name) is not None:
            return children[name]
    alone = children.get("module")
    if (
        alone is None
        or any(child is not None for child in children.values() if child is not alone)
        or any(value is not None for value in module._parameters.values())
    ):
        return None
    return alone


def modules_by_path(root: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield every module that is no wrapper, parents first, with its path without wrappers."""
    stack = [(path, root)]
    while stack:
        where, module = stack.pop()
        inner = unwrap_module(module)
        yield where, inner
        children = [(_join_path(where, name), child) for name, child in inner.named_children()]
        stack += reversed(children)


def parameters_by_name(root: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a module by name, where names do not show wrappers. A parameter
    with several names appears under the first one.
    """
    return _tensors_by_name(root, "_parameters")


def parameters_by_every_name(root: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a module by name. A parameter with several names, as a tied one,
    appears under each of them.
    """
    parameters_by_name(root)
    return dict(_KNOWN[root]["_parameters"][1])


def ties_of(root: nn.Module) -> list[list[str]]:
    """Return the names of each parameter that has several names."""
    names: dict[int, list[str]] = {}
    for name, weight in parameters_by_every_name(root).items():
        names.setdefault(id(weight), []).append(name)
    return [every for every in names.values() if len(every) > 1]


def buffers_by_name(root: nn.Module) -> dict[str, Tensor]:
    """Return the buffers of a module by name, where names do not show wrappers. A buffer with
    several names appears under the first one. Buffers that checkpoints leave out are included.
    """
    return _tensors_by_name(root, "_buffers")


_KNOWN: WeakKeyDictionary[
    nn.Module, dict[str, tuple[list[object], list[tuple[str, Any]], dict[str, Any]]]
] = WeakKeyDictionary()
"""For each root, the marks that its parameters and buffers had, all their names, and the first
name of each.
"""


def _tensors_by_name(root: nn.Module, attribute: str) -> dict[str, Any]:
    """Return the tensors of a module by name. Names are found anew only if the module has changed,
    because checks ask for them several times in each step.
    """
    memo = _KNOWN.setdefault(root, {})
    if _STEADY is None or (root, attribute) not in _STEADY or attribute not in memo:
        marks = _change_marks(root, attribute)
        if attribute not in memo or memo[attribute][0] != marks:
            every = list(_named_tensors(root, attribute))
            first = {id(tensor): name for name, tensor in reversed(every)}
            once = {name: tensor for name, tensor in every if first[id(tensor)] == name}
            memo[attribute] = marks, every, once
        if _STEADY is not None:
            _STEADY.add((root, attribute))
    return dict(memo[attribute][2])


_STEADY: set[tuple[nn.Module, str]] | None = None
"""What was asked for already, while no module changes."""


@contextmanager
def freeze_names() -> Iterator[None]:
    """Context in which no module changes, so that names are looked up once."""
    global _STEADY
    before, _STEADY = _STEADY, set() if _STEADY is None else _STEADY
    try:
        yield
    finally:
        _STEADY = before


def _change_marks(root: nn.Module, attribute: str) -> list[object]:
    """Return a list that changes with every name, module and tensor in a module."""
    marks: list[object] = []
    stack = [root]
    while stack:
        module = stack.pop()
        own = getattr(module, attribute)
        marks += (id(module), *module._modules, *own, *map(id, own.values()))
        stack += [child for child in module._modules.values() if child is not None]
    return marks


def _named_tensors(root: nn.Module, attribute: str) -> Iterator[tuple[str, Tensor]]:
    for path, module in modules_by_path(root):
        for name, tensor in getattr(module, attribute).items():
            if tensor is not None:
                yield _join_path(path, name), tensor


def layers_by_name(root: nn.Module) -> dict[str, nn.Module]:
    """Return the layers of a module by name, in order. They are the elements of lists of blocks at
    any depth, and outside such lists the largest modules that contain no list. A module with two
    names is one layer.
    """
    model, layers, ids = unwrap_module(root), {}, set[int]()
    # A module without children is one layer, and its wrapper is what is called.
    for name, module in (
        _find_layers(model, "") if any(True for _ in model.children()) else [("", root)]
    ):
        if id(unwrap_module(module)) not in ids:
            ids.add(id(unwrap_module(module)))
            layers[name] = module
    return layers


def _find_layers(model: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in model.named_children():
        inner, where = unwrap_module(child), _join_path(path, name)
        if is_list(inner):
            yield from ((f"{where}.{part}", layer) for part, layer in inner.named_children())
        elif any(is_list(part) for _, part in modules_by_path(inner)):
            yield from _find_layers(inner, where)
        else:
            yield where, child


def is_list(module: nn.Module) -> bool:
    """Return whether `module` is a list of blocks: a ModuleList or ModuleDict, a module whose
    children have numbers as names, or an `nn.Sequential` of several modules of one class with
    weights and children.
    """
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return len(module) > 0
    parts = (
        [unwrap_module(part) for part in module.children()]
        if isinstance(module, nn.Sequential)
        else []
    )
    if not isinstance(
        module, nn.Sequential
    ):  # what torch.export leaves of a list has numbers alone in it
        names = [name for name, _ in module.named_children()]
        return bool(names) and not module._parameters and all(name.isdigit() for name in names)
    alike = len({type(part) for part in parts}) == 1 and len(parts) > 1
    return (
        alike and any(True for _ in module.parameters()) and any(True for _ in parts[0].children())
    )


def layer_of(name: str, layers: Mapping[str, object]) -> tuple[str, str]:
    """Return the name of the layer to which a parameter or module belongs (empty: none), and the
    name of the parameter within this layer.
    """
    words = name.split(".")
    # The longest name first: layers may lie inside of others.
    for length in range(len(words), 0, -1):
        layer = ".".join(words[:length])
        if layer in layers:
            return layer, ".".join(words[length:])
    return "", name


def _join_path(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
