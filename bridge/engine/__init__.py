"""The native staged engine: runs a plan on plain PyTorch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

    from bridge.engine.environment import Environment
    from bridge.engine.optimizer import Group
    from bridge.engine.runner import Engine, Loss
    from bridge.layout.tensor import TensorPlan
    from bridge.plan import Plan
    from bridge.trace.desync import Policy


def initialize(
    model: nn.Module | Sequence[nn.Module],
    plan: Plan,
    loss_fn: Loss | None = None,
    *,
    tensor_plan: TensorPlan | None = None,
    seed: int = 1234,
    device: str | torch.device | None = None,
    environment: Environment | None = None,
    groups: Sequence[Group] = (),
    deterministic: bool = False,
    module_fqns_per_model_part: Sequence[Sequence[str]] | None = None,
    variable_shapes: bool = False,
    trace: str | Path | None = None,
    full: bool = False,
    policy: Policy | None = None,
    alike: Mapping[str, Any] = MappingProxyType({}),
    sample: Any = None,
) -> Engine:
    """Return an engine that trains `model` as `plan` says.

    `model` is an `nn.Sequential` or a list of layers, each of which takes the output of the one
    before, or a model of Hugging Face, which is cut into embedding, blocks and head
    (`models.cutting`). Any other module is run as one layer. `loss_fn(output, targets)` returns the
    mean loss of a microbatch, or its sum and a count. `tensor_plan` names the modules that tensor
    ranks split (default: the answer of the model's own method of that name). `device` defaults to
    the accelerator if there is one. `environment` has the ranks that the launcher started (default:
    detected). `groups` of parameters have hyperparameters of their own. With `deterministic`, two
    runs give the same bits (`randomness.determine`). `module_fqns_per_model_part` names the layers
    of each pipeline stage and replaces the plan's rule. With `variable_shapes`, the shapes that
    pass between pipeline ranks may differ by microbatch. `sample` is a batch by which a model of
    Hugging Face is tried that does not run on a few tokens, such as one of images.

    The tensors that `plan.debug` asks for are logged to the folder `trace` (default: "trace"),
    whole with `full` and as samples otherwise. `policy` decides what a mismatch between ranks does
    (default: it is logged); see `bridge.trace.attach`.

    Ranks first compare what they were started with, including `alike`. If they differ, all raise
    `ConfigError` with the first difference. If the plan cannot run, `BridgeError` is raised before
    any process group exists.
    """
    import torch

    from bridge import comm
    from bridge.engine.agreement import agree, facts_of
    from bridge.engine.environment import Environment, detect
    from bridge.engine.fields import accumulation_of, check
    from bridge.engine.layers import as_module
    from bridge.engine.models.cutting import planned
    from bridge.engine.optimizer import spared
    from bridge.engine.randomness import determine
    from bridge.engine.runner import Engine, arguments_of, chained, pipeline_of

    here = comm.joined()
    found = environment or (Environment(*here) if here else detect())
    # Everything that needs no other rank is checked first: a refusal then leaves no process group
    # behind, and no rank that waits.
    mesh, findings = check(plan, found.world)
    module = as_module(model)
    tried = None if sample is None else arguments_of(sample, loss_fn is not None)
    cut, whole = planned(module, plan, module_fqns_per_model_part, tried)
    layers, accumulation = chained(module, cut), accumulation_of(plan, mesh.sizes["data"])
    pipeline = pipeline_of(layers, plan, accumulation, module_fqns_per_model_part)
    place = torch.device(device or (f"cuda:{found.local_rank}" if torch.cuda.is_available() else "cpu"))
    if deterministic:
        # Before the first collective: NCCL reads its variables when a communicator is made.
        determine()
    comm.connect(found.rank, found.world, found.address, "nccl" if place.type == "cuda" else "gloo")
    others = {"seed": seed, "device": place.type, "tensor_plan": tensor_plan, "variable_shapes": variable_shapes}
    parts = {"module_fqns_per_model_part": module_fqns_per_model_part, "loss_fn": "given" if loss_fn else None}
    # Making groups is a collective. Ranks that were started with different plans would make
    # different ones, and hang there.
    agree(facts_of({**alike, **others, **parts}, plan, module, groups))
    module, ranks = module.to(place), comm.Comm(mesh, found.rank)
    groups = groups or spared(module, plan.optimizer)
    said = (*findings, *whole)
    engine = Engine(module, plan, ranks, place, loss_fn, seed, said, tensor_plan, groups, pipeline, variable_shapes, cut, tried)
    if any(plan.debug.model_dump(exclude_none=True).values()):
        _watch(engine, plan, trace, full, policy)
    return engine


def _watch(
    engine: Engine, plan: Plan, folder: str | Path | None, full: bool, policy: Policy | None
) -> None:
    from bridge.engine.tracing import EngineSource
    from bridge.trace import attach
    from bridge.trace.desync import Policy

    engine.tracer = attach(
        EngineSource(engine), plan.debug, folder, full=full, policy=policy or Policy(action="log")
    )
