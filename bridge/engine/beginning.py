"""Begins a run: connects the ranks, prepares the model, and makes the engine of this rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from bridge.engine import comm, device as devices
from bridge.engine.agreement import agree, facts_of
from bridge.engine.environment import Environment, detect, local_rank
from bridge.engine.optimizer import Make, ParameterGroupSettings, groups_without_decay
from bridge.engine.prepared import Prepared
from bridge.engine.randomness import determine, seed_of_script
from bridge.engine.runner import Engine, Loss
from bridge.engine.tracing import EngineSource
from bridge.layout.mesh import Mesh
from bridge.layout.tensor import TensorPlan
from bridge.plan.plan import Plan
from bridge.trace.attachment import attach
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
    here, names = comm.rank_and_world(), module_fqns_per_model_part
    placement = environment or (Environment(*here, local_rank()) if here else detect())
    # First what needs no other rank: a refusal then leaves no process group, and no rank waiting.
    setup = Prepared.of(model, plan, placement.world, names, sample, loss_fn is not None, layers)
    place = devices.local(placement.local_rank, device)
    others = {
        "seed": seed,
        "device": place.type,
        "tensor_plan": tensor_plan,
        "variable_shapes": variable_shapes,
    }
    parts = {
        "module_fqns_per_model_part": names,
        "loss_fn": "given" if loss_fn else None,
        "optimizer": "given" if optimizer else None,
        "layers": list(setup.cut.blocks) if setup.cut else None,
    }
    facts = facts_of({**alike, **others, **parts}, plan, setup.module, groups)
    ranks = _join_ranks(placement, setup.mesh, devices.backend(place), facts, deterministic)
    setup.module.to(place)
    first = _first_seed(ranks, place, setup.module) if seed is None else seed
    custom = (
        loss_fn,
        first,
        setup.findings,
        tensor_plan,
        groups or groups_without_decay(setup.module, plan.optimizer),
    )
    engine = Engine(
        setup.module,
        plan,
        ranks,
        place,
        *custom,
        setup.pipeline,
        variable_shapes,
        setup.cut,
        setup.sample,
        optimizer,
    )
    if any(plan.debug.model_dump(exclude_none=True).values()):
        engine.tracer = attach(
            EngineSource(engine),
            plan.debug,
            trace,
            full=full,
            policy=policy or Policy(action="log"),
        )
    return engine


def _join_ranks(
    environment: Environment, mesh: Mesh, backend: str, facts: Any, deterministic: bool
) -> comm.Comm:
    """Connect all ranks and return the communicator of this rank. Raises `ConfigError` on every
    rank if ranks were started with different `facts`.
    """
    if deterministic:
        # Before the first collective: NCCL reads its variables when a communicator is made.
        determine()
    comm.connect(environment.rank, environment.world, environment.address, backend)
    # Making groups is a collective. Ranks that were started with different plans would make
    # different ones, and hang there.
    agree(facts)
    return comm.Comm(mesh, environment.rank)


def _first_seed(ranks: comm.Comm, place: torch.device, model: nn.Module) -> int:
    """Return the seed of the first rank (`seed_of_script`)."""
    seed = torch.tensor(seed_of_script(model), device=place)
    ranks.broadcast("seed", seed, ranks.world)()
    return int(seed)
