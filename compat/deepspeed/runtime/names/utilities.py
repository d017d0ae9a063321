"""Small helpers from `deepspeed.utils`, `deepspeed.runtime.utils` and similar modules."""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from bridge.engine import comm
from bridge.errors import BridgeError
from compat.deepspeed.runtime.names.accelerator import get_accelerator

__all__ = [
    "CROSS_RANK",
    "CROSS_SIZE",
    "DEEPSPEED_ENVIRONMENT_NAME",
    "LAMB_OPTIMIZER",
    "TORCH_DISTRIBUTED_DEFAULT_PORT",
    "VALID_LR_SCHEDULES",
    "OffloadDeviceEnum",
    "OffloadStateTypeEnum",
    "OnDevice",
    "RepeatingLoader",
    "clone_tensors_for_torch_save",
    "get_z3_leaf_modules",
    "instrument_w_nvtx",
    "log_dist",
    "logger",
    "move_to_device",
    "recursive_getattr",
    "recursive_setattr",
    "see_memory_usage",
    "set_random_seed",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
]  # fmt: skip
DEEPSPEED_ENVIRONMENT_NAME = ".deepspeed_env"
TORCH_DISTRIBUTED_DEFAULT_PORT = 29500
CROSS_RANK, CROSS_SIZE = "CROSS_RANK", "CROSS_SIZE"
LAMB_OPTIMIZER = "lamb"
VALID_LR_SCHEDULES = ["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]
LEAF = "_z3_leaf"
CPU = torch.device("cpu")
GIGABYTE = 1 << 30


class OffloadDeviceEnum:
    """Names of the devices that a config may give for the memory of parameters and optimizer state."""

    none, cpu, nvme = "none", "cpu", "nvme"


class OffloadStateTypeEnum:
    """Arguments that `engine.offload_states` accepts."""

    optim_states, hp_params, lp_params = "optim_states", "hp_params", "lp_params"
    lp_grads, contiguous_grad_buffer = "lp_grads", "contiguous_grad_buffer"


def _logger() -> logging.Logger:
    own = logging.getLogger("DeepSpeed")
    if not own.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("[%(asctime)s] [%(levelname)s] %(message)s"))
        own.addHandler(handler)
        own.propagate = False
        own.setLevel(logging.WARNING)
    return own


logger = _logger()


def log_dist(message: str, ranks: Iterable[int] | None = None, level: int = logging.INFO) -> None:
    """Log a message on the given ranks only. Without ranks, or with -1, log it on all ranks."""
    rank, chosen = (comm.rank_and_world() or (-1, 1))[0], list(ranks or ())
    if not chosen or rank == -1 or -1 in chosen or rank in chosen:
        logger.log(level, "[Rank %s] %s", rank, message)


class RepeatingLoader:
    """Repeats the batches of a loader without end."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader, self.data_iter = loader, iter(loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)


class OnDevice(AbstractContextManager[None]):
    """Context in which new tensors have the given format and device."""

    def __init__(self, dtype: torch.dtype, device: Any = "meta", enabled: bool = True) -> None:
        self.dtype, self.device, self.enabled = dtype, torch.device(device), enabled

    def __enter__(self) -> None:
        self._before = torch.get_default_dtype()
        if self.enabled:
            torch.set_default_dtype(self.dtype)
            self.device.__enter__()

    def __exit__(self, *exception: Any) -> None:
        if self.enabled:
            self.device.__exit__(*exception)
            torch.set_default_dtype(self._before)


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log how much memory this process uses, on the first rank and only if `force` is true."""
    if not force or (comm.rank_and_world() or (0, 1))[0]:
        return
    place = get_accelerator()
    current, most = place.memory_allocated() / GIGABYTE, place.max_memory_allocated() / GIGABYTE
    logger.info("%s: %.2f GB, at most %.2f GB", message, current, most)


def set_random_seed(seed: int) -> None:
    """Seed the generators of Python, numpy and torch."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    torch.manual_seed(seed)


def move_to_device(
    item: Any, device: Any, criterion_func: Callable[[Any], bool] | None = None
) -> Any:
    """Return a copy of nested lists, tuples and dictionaries in which items are moved to a device:
    the items for which `criterion_func` is true, by default all tensors.
    """
    if criterion_func(item) if criterion_func is not None else isinstance(item, Tensor):
        return item.to(device)
    if isinstance(item, list | tuple | dict):
        return _nested(item, lambda value: move_to_device(value, device, criterion_func))
    return item.to(device) if isinstance(item, Tensor) else item


def _nested(item: Any, change: Callable[[Any], Any]) -> Any:
    """Return a copy of a list, tuple or dictionary, with each value changed."""
    if isinstance(item, dict):
        return {name: change(value) for name, value in item.items()}
    return (list if isinstance(item, list) else tuple)(map(change, item))


def clone_tensors_for_torch_save(item: Any, device: Any = CPU) -> Any:
    """Return a copy of nested lists, tuples and dictionaries. Each tensor in it is copied to a
    device and gets its own storage.
    """
    if isinstance(item, Tensor):
        return (
            item.detach().clone()
            if torch.device(device) == item.device
            else item.detach().to(device)
        )
    if not isinstance(item, list | tuple | dict):
        return item
    copied = _nested(item, lambda value: clone_tensors_for_torch_save(value, device))
    return type(item)(copied) if isinstance(item, dict) else copied


def recursive_getattr(model: Any, module_name: str) -> Any:
    """Return the attribute of a model at a dotted path."""
    for name in module_name.split("."):
        model = getattr(model, name)
    return model


def recursive_setattr(model: Any, module_name: str, module: Any) -> None:
    """Set the attribute of a model at a dotted path."""
    parent, _, name = module_name.rpartition(".")
    setattr(recursive_getattr(model, parent) if parent else model, name, module)


def instrument_w_nvtx(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function unchanged."""
    return function


def _leaves(model: nn.Module, classes: Iterable[Any]) -> Iterator[nn.Module]:
    kinds = list(classes)
    for module in model.modules():
        names = (type(module).__name__, f"{type(module).__module__}.{type(module).__qualname__}")
        if any(
            name in names if isinstance(name, str) else isinstance(module, name) for name in kinds
        ):
            yield module


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[Any], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark the modules of the given classes and return them. In DeepSpeed, the weights of a marked
    module are gathered together. Here the mark has no effect, because the engine gathers whole
    blocks.
    """
    leaves = list(_leaves(model, leaf_module_classes))
    if not leaves and raise_if_not_found:
        raise BridgeError(
            f"set_z3_leaf_modules: no module of type {leaf_module_classes} found in {type(model).__name__}"
        )
    for module in leaves:
        set_z3_leaf_module(module, True)
    return leaves


def unset_z3_leaf_modules(model: nn.Module, leaf_module_classes: Iterable[Any]) -> list[nn.Module]:
    """Take the note away."""
    leaves = list(_leaves(model, leaf_module_classes))
    for module in leaves:
        set_z3_leaf_module(module, False)
    return leaves


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Note one module."""
    setattr(model, LEAF, flag)


def z3_leaf_module(model: nn.Module) -> bool:
    """Return whether `set_z3_leaf_modules` has marked a module."""
    return bool(getattr(model, LEAF, False))


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Return the marked modules."""
    return [module for module in model.modules() if z3_leaf_module(module)]
