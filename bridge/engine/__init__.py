"""The native engine: trains a model by a plan on plain PyTorch, stage by stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

    from bridge.engine.environment import Environment
    from bridge.engine.optimizer import Make, ParameterGroupSettings
    from bridge.engine.runner import Engine, Loss
    from bridge.layout.tensor import TensorPlan
    from bridge.plan.plan import Plan
    from bridge.trace.desync import Policy


def initialize(
    model: nn.Module | Sequence[nn.Module],
    plan: Plan,
    loss_fn: Loss | None = None,
    *,
    tensor_plan: TensorPlan | None = None,
    seed: int | None = 1234,
    device: str | torch.device | None = None,
    environment: Environment | None = None,
    groups: Sequence[ParameterGroupSettings] = (),
    deterministic: bool = False,
    module_fqns_per_model_part: Sequence[Sequence[str]] | None = None,
    variable_shapes: bool = False,
    trace: str | Path | None = None,
    full: bool = False,
    policy: Policy | None = None,
    alike: Mapping[str, Any] = MappingProxyType({}),
    sample: Any = None,
    optimizer: Make | None = None,
    layers: Sequence[str] | None = (),
) -> Engine:
    """Return an engine that trains `model` by `plan`.

    `model` is a list of layers, each of which takes the output of the layer before. A model of
    Hugging Face is cut into layers by a run on a few tokens, or on the batch `sample` if the model
    takes other inputs. Any other module is cut in this way under ZeRO 3 or in a pipeline if there is
    a `sample`, and is one layer without. The blocks are the modules that the model repeats, or those
    that `layers` names; None keeps the model one layer. `loss_fn(output, targets)` returns the mean
    loss of a microbatch, or the sum of losses and a count.

    `tensor_plan` names the modules that tensor ranks split (default: `model.tensor_plan()`), and
    `module_fqns_per_model_part` the layers of each pipeline stage (default: the plan's rule).
    `device` defaults to the accelerator, if there is one. `environment` describes the launcher's
    ranks. `groups` are groups of parameters with hyperparameters of their own. With `deterministic`,
    two runs are equal bit by bit. If `seed` is None, it follows from the state of torch's generator on
    the first rank. With `variable_shapes`, microbatches may differ in shape. Values
    in `alike` must be equal on all ranks. If the plan sets `debug`, tensors are logged to the folder
    `trace` (default: "trace"), and `full` logs whole tensors. `policy` is that of `bridge.trace.attach`.
    `optimizer` makes the optimizer (`bridge.engine.own_rules.maker_of`) in place of the plan's.
    Raises `BridgeError` before ranks are connected if the plan cannot run, and `ConfigError` on all
    ranks if they were started with different settings.
    """
    settings = dict(locals())
    # The name is there without torch; what it does needs torch.
    from bridge.engine.beginning import begin

    return begin(**settings)
