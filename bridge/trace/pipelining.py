"""Pipelines of torch.distributed.pipelining as sources of traces. Each rank has some stages of one
model, and logs them under the model's global names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch.distributed as dist
from torch import nn

from bridge.engine.comm import Comm, everyones, rank_and_world
from bridge.errors import BridgeError
from bridge.layout.mesh import Mesh
from bridge.trace import naming
from bridge.trace.hook import Hook
from bridge.trace.module import ModuleSource
from bridge.trace.record import Unit
from bridge.trace.source import Now


def stages_of(target: Any) -> tuple[Any, ...]:
    """Return the stages that this rank has of a schedule, or `target` itself if it is a stage.
    Return an empty tuple for any other object.
    """
    if hasattr(target, "submod") and hasattr(target, "stage_index"):
        return (target,)
    stages = getattr(target, "_stages", None) or [getattr(target, "_stage", None)]
    return tuple(
        stage for stage in stages if hasattr(stage, "submod") and hasattr(stage, "stage_index")
    )


class Stages(nn.Module):
    """The stages of a rank as children of one module, called `stage0` and so on."""

    def __init__(self, stages: Sequence[Any], apart: bool) -> None:
        super().__init__()
        self.paths = [f"stage{stage.stage_index}" for stage in stages]
        for path, stage in zip(self.paths, stages, strict=True):
            self.add_module(path, stage.submod)
        self.apart = apart


class PipelineSource(ModuleSource):
    """The trace source of the `stages` on this rank; `schedule` decides when they run which
    microbatch.

    Layers have the names that they have in the stage's module. Those are usually the names in the
    whole model, which `torch.distributed.pipelining.pipeline` and most hand-written splits keep. If
    two stages have a layer with the same name, all names get a prefix such as `stage1.`.
    """

    def __init__(self, schedule: Any, stages: Sequence[Any], optimizer: Any) -> None:
        self.schedule, self.stages = schedule, tuple(stages)
        own = [
            (stage.stage_index, list(naming.layers_by_name(stage.submod))) for stage in self.stages
        ]
        self._everywhere = sorted(pair for pairs in everyones(own) for pair in pairs)
        names = {number: set(layers) for number, layers in self._everywhere}
        # With a name in common, the union is smaller than the sum.
        self._apart = sum(map(len, names.values())) != len(set().union(*names.values()))
        self._running, self._trial = 0, False
        self._counts = [0] * len(self.stages)
        self.number = int(getattr(schedule, "_n_microbatches", 0)) or None
        self.scaled = bool(getattr(schedule, "scale_grads", False))
        super().__init__(
            Stages(self.stages, self._apart), optimizer, self.number, mesh_of(self.stages[0])
        )

    def _enter(self) -> None:
        for index, stage in enumerate(self.stages):

            def enter_stage(
                module: nn.Module, arguments: Any, keywords: Any, index: int = index
            ) -> None:
                self._running = index
                self.begin(arguments, keywords)

            stage.submod.register_forward_pre_hook(
                Hook(enter_stage), prepend=True, with_kwargs=True
            )
            self._ignore(stage)
        if hasattr(self.schedule, "step"):
            plain = self.schedule.step

            def step(*arguments: Any, **keywords: Any) -> Any:
                self._begin_schedule_step()
                return plain(*arguments, **keywords)

            self.schedule.step = step

    def _begin_schedule_step(self) -> None:
        """End the step before, if an optimizer of this rank stepped, and tell the other ranks that
        a step begins. A rank does so before it waits for messages of ranks that may wait for it.
        """
        if self._stepped:
            self.after()
        if self.meeting is not None:
            self.meeting.begin_forward()

    def begin_pass(self) -> None:
        """Do nothing, because stages of ranks may run different numbers of passes in a step."""

    def _ignore(self, stage: Any) -> None:
        """Have a stage's trial pass ignored. In this pass, before the first step, a stage runs once
        on made-up tensors to infer shapes.
        """
        plain = getattr(stage, "_forward_metadata_inference", None)
        if plain is None:
            return

        def trial(*arguments: Any, **keywords: Any) -> Any:
            self._trial = True
            try:
                return plain(*arguments, **keywords)
            finally:
                self._trial = False

        stage._forward_metadata_inference = trial

    @property
    def current_module(self) -> nn.Module:
        return naming.unwrap_module(self.stages[self._running].submod)

    @property
    def trains(self) -> bool:
        return any(stage.submod.training for stage in self.stages)

    @property
    def roots(self) -> Sequence[nn.Module]:
        return tuple(stage.submod for stage in self.stages)

    def begin(self, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
        """Handle the beginning of a forward pass, and count it separately for each stage. A trial
        pass is ignored.
        """
        if self._trial:
            self.quiet = True
            return
        before = self._passes
        super().begin(arguments, keywords)
        if self._passes != before:
            # The first pass of a step: the counts are those of the step before.
            if not before:
                self._counts = [0] * len(self.stages)
            self._counts[self._running] += 1

    def now(self) -> Now:
        place = max(self._counts[self._running] - 1, 0)
        if self.number is None:
            return Now(self._step, place, None, part=(self.data.index, self.data.size))
        return Now(
            self._step,
            place % self.number * self.data.size + self.data.index,
            self.number * self.data.size,
        )

    def _name(self, stage: int, name: str) -> str:
        return f"stage{stage}.{name}".removesuffix(".") if self._apart else name

    @cached_property
    def layers(self) -> Mapping[str, nn.Module]:
        """The layers of all ranks by name. For a layer of another rank, the module is a
        placeholder that is never called.
        """
        here = {
            self._name(stage.stage_index, name): module
            for stage in self.stages
            for name, module in naming.layers_by_name(stage.submod).items()
        }
        order = [self._name(number, name) for number, names in self._everywhere for name in names]
        return {name: here.get(name) or nn.Identity() for name in order}

    def factors(self) -> Mapping[Unit, float]:
        """Return the factors of gradients by unit. A schedule that divides gradients by the number
        of microbatches does so only at the end of a step, so gradients of activations are divided
        here.
        """
        return {
            "parameter": 1.0,
            "activation": 1 / self.data.size / (self.number or 1 if self.scaled else 1),
        }

    @property
    def entrance(self) -> str:
        stage = self.stages[0]
        return self._name(stage.stage_index, next(iter(naming.layers_by_name(stage.submod))))

    def global_name(self, name: str) -> str:
        path, _, rest = name.partition(".")
        return self._name(int(path.removeprefix("stage")), rest)


def mesh_of(stage: Any) -> Comm:
    """Return the communicator of this rank. Its mesh has the pipeline ranks of the stage's group
    and the data ranks. Raises `BridgeError` if the ranks form no grid.
    """
    rank, world = rank_and_world() or (0, 1)
    size = stage.group_size
    ranks = tuple(dist.get_process_group_ranks(stage.group or dist.group.WORLD))
    # The first axis is the fastest: pipeline ranks are far apart, or next to each other.
    grids = (
        Mesh({"data": world // size, "pipeline": size}),
        Mesh({"pipeline": size, "data": world // size}),
    )
    grid = next((mesh for mesh in grids if mesh.group(rank, "pipeline") == ranks), None)
    if grid is None:
        raise BridgeError(
            f"attach: found pipeline ranks {ranks} of {world}, expected ranks that form a grid of "
            "pipeline and data ranks"
        )
    return Comm(grid, rank)
