"""`deepspeed.zero`: contexts in which a model is built, or in which its weights are whole on every
rank. Source: deepspeed/runtime/zero/partition_parameters.py.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any

import torch
import torch.distributed as torch_distributed
from torch import Tensor, nn

from bridge.engine.absence import change
from bridge.engine.layers import also_uses
from bridge.engine.runner import Engine
from bridge.errors import BridgeError, ConfigError
from compat.deepspeed.formats import load_source
from compat.deepspeed.runtime.names import parts
from compat.deepspeed.runtime.names.communication import init_distributed
from compat.deepspeed.runtime.names.constructors import make_tensors_in

__all__ = [
    "GatheredParameters",
    "Init",
    "ZeroParamStatus",
    "ZeroParamType",
    "register_external_parameter",
]
EARLY = "_stagebridge_early"
"""Name of an attribute that marks parameters made within `Init`. A parameter has the attribute
until an engine takes over the parameter.
"""


WITHIN = "_stagebridge_within"
"""Name of an attribute in which `GatheredParameters` stores the parameter's status before the
context.
"""


class ZeroParamStatus(Enum):
    """State of a parameter's weights: whole on this rank, not whole, or being gathered."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class ZeroParamType(Enum):
    """DeepSpeed's names for the ways in which a parameter is stored."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


@dataclass
class ParameterOffload:
    """What libraries remove DeepSpeed's hooks from while they generate, and register them at
    afterwards. The engine's own guards let calls within `GatheredParameters` pass, so that there is
    nothing to remove.
    """

    module: nn.Module
    forward_hooks: list[Any] = field(default_factory=list)
    backward_hooks: list[Any] = field(default_factory=list)

    def _register_deepspeed_module(self, module: nn.Module, count: Any = None) -> None:
        """Do nothing, because nothing was removed."""


def mark(native: Engine) -> None:
    """Give the engine's parameters, at ZeRO level 3, the attributes that parameters have in
    DeepSpeed: `ds_id`, `ds_shape`, `ds_numel`, `ds_status`, `ds_active_sub_modules`; and the model
    its `ds_external_parameters`.
    """
    if native.plan.zero.effective_stage == 3:
        native.model.__dict__["ds_external_parameters"] = partial(iter, ())
    for number, weight in enumerate(native.model.parameters()):
        place = parts.place_of(weight)
        if place is not None and native.plan.zero.effective_stage == 3:
            state = (
                ZeroParamStatus.NOT_AVAILABLE
                if parts.in_turns(native, place[1])
                else ZeroParamStatus.AVAILABLE
            )
            facts = {"id": number, "shape": weight.shape, "numel": weight.numel(), "status": state}
            for name, value in {**facts, "active_sub_modules": set[int]()}.items():
                setattr(weight, f"ds_{name}", value)


class Init(AbstractContextManager["Init"]):
    """Context in which a script builds a model. Until `initialize` shards the model, each rank has
    the whole model, which needs more memory than DeepSpeed. The numbers are the same as with
    DeepSpeed: floating-point tensors are made in `dtype`, or else in the format that the config
    switches on. Without both, tensors keep their formats. All of DeepSpeed's arguments are
    accepted.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        *_: Any,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        **__: Any,
    ) -> None:
        self.enabled = enabled
        self._before: Callable[..., None] | None = None
        self._tensors = ExitStack()
        if not enabled:
            return
        init_distributed()
        source = config_dict_or_path if config_dict_or_path is not None else config
        self.dtype = dtype if dtype is not None or source is None else _format_of(source)
        for weight in module.parameters() if module is not None else ():
            setattr(weight, EARLY, True)

    def __enter__(self) -> Init:
        if self.enabled:
            if self.dtype is not None:
                self._tensors.enter_context(make_tensors_in(self.dtype))
            before = self._before = nn.Module.register_parameter

            def register(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
                if param is not None:
                    setattr(param, EARLY, True)
                before(module, name, param)

            # Every module registers its parameters here, whichever class it is of.
            nn.Module.register_parameter = register  # type: ignore[method-assign, assignment]
        return self

    def __exit__(self, *_: object) -> None:
        self._tensors.close()
        if self._before is not None:
            nn.Module.register_parameter = self._before  # type: ignore[method-assign]


def _format_of(config: Any) -> torch.dtype:
    """Return the format of the weights that DeepSpeed makes by a config, in which other settings may
    still be "auto".
    """
    data, *_ = load_source(config)
    sections = {"bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp16": torch.float16}
    halves = {
        dtype for name, dtype in sections.items() if (data.get(name) or {}).get("enabled") is True
    }
    if len(halves) > 1:
        raise ConfigError("zero.Init: found bf16 and fp16, expected one of them; switch one off")
    return halves.pop() if halves else torch.float32


class GatheredParameters(AbstractContextManager[None]):
    """Context in which the given parameters are whole on every rank, although an engine shards them
    at ZeRO level 3. With a `modifier_rank`, all ranks get the values of this rank when the context
    ends. All data ranks must take part. Parameters that no engine holds are left unchanged.
    """

    def __init__(
        self,
        params: Any,
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        weights = [params] if isinstance(params, Tensor) else list(params)
        self.modifier_rank = modifier_rank
        self.params: list[Any] = list(
            {id(weight): weight for weight in weights if enabled}.values()
        )
        self._held: list[tuple[Engine, int, str, Any, Tensor]] = []
        for weight in self.params if fwd_module is not None else ():
            register_external_parameter(fwd_module, weight)

    def __enter__(self) -> None:
        for weight in self.params:
            place = parts.place_of(weight)
            if place is None or not hasattr(weight, "ds_id"):
                continue
            if hasattr(weight, WITHIN):
                raise BridgeError(
                    f"GatheredParameters: an outer GatheredParameters has gathered {place[2]}"
                    " already; leave this parameter out of one of the two"
                )
            place[0].weights.settle()
            setattr(weight, WITHIN, weight.ds_status)
            change(weight, "linked" if weight.ds_status is ZeroParamStatus.NOT_AVAILABLE else None)
            self._held.append((*place, weight, weight.data))
            place[0].weights.watch(weight, False)
            weight.data, weight.ds_status = (
                parts.compute_parameter(*place),
                ZeroParamStatus.AVAILABLE,
            )

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        changes: dict[int, list[tuple[int, str, Tensor]]] = {}
        engines: dict[int, Engine] = {}
        for native, index, name, weight, before in self._held:
            value, weight.ds_status = weight.data, getattr(weight, WITHIN)
            weight.data = before
            delattr(weight, WITHIN)
            is_away = weight.ds_status is ZeroParamStatus.NOT_AVAILABLE
            change(weight, "absent" if is_away else None)
            native.weights.watch(weight, not is_away)
            engines[id(native)] = native
            changes.setdefault(id(native), []).append((index, name, value))
        self._held = []
        if self.modifier_rank is None or kind is not None:
            return
        for number, native in engines.items():
            for *_, value in changes[number]:
                native.comm.broadcast(
                    "modified parameters", value, *_source(native, self.modifier_rank)
                )()
            parts.set_masters(native, changes[number])
        self._spread()

    @torch.no_grad()
    def _spread(self) -> None:
        """Broadcast the values of parameters that were made within `Init` and that no engine holds
        yet.
        """
        if not torch_distributed.is_initialized() or torch_distributed.get_world_size() == 1:
            return
        for weight in self.params:
            if hasattr(weight, EARLY) and parts.place_of(weight) is None:
                torch_distributed.broadcast(weight.data, self.modifier_rank)


def _source(native: Engine, rank: int) -> tuple[Any, int]:
    """Return the group in which a rank broadcasts its values, and the index of the rank in this
    group.
    """
    if native.tensor.size == native.line.size == 1:
        return native.data, rank
    if rank:
        raise BridgeError(
            f"GatheredParameters: found modifier_rank={rank} with tensor or pipeline ranks, which"
            " hold parts of the model; use 0"
        )
    return native.data, 0


def register_external_parameter(module: Any, parameter: Any) -> None:
    """Make `parameter`, which belongs to another module, whole also while `module` runs. A script
    must call this function before `initialize`.
    """
    if not isinstance(module, nn.Module) or not isinstance(parameter, nn.Parameter):
        kind = type(parameter if isinstance(module, nn.Module) else module).__name__
        raise BridgeError(
            f"register_external_parameter: found {kind} among the arguments, expected a"
            " torch.nn.Module and a torch.nn.Parameter"
        )
    own = {id(weight) for weight in module.parameters()}
    if id(parameter) in own or id(parameter) in {id(weight) for weight in also_uses(module)}:
        return
    place = parts.place_of(parameter)
    if place is not None and parts.in_turns(place[0], place[1]):
        raise BridgeError(
            f"register_external_parameter: {place[2]} is in the engine's buffers already; call"
            " register_external_parameter in the module's __init__, before deepspeed.initialize"
        )
    also_uses(module).append(parameter)
