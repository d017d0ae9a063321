"""Stages: consecutive layers that run together. Some stages recompute activations in backward
instead of storing them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from bridge.engine.layers import Layer
from bridge.engine.randomness import Keyed, scope, seed_generators, seed_of
from bridge.layout.recompute import Chunk
from bridge.plan.plan import Recompute
from bridge.stack.findings import Finding
from bridge.stack.rules import Effect


@dataclass(frozen=True, slots=True)
class Draw:
    """Numbers on which the random numbers of a microbatch depend: the seed of the run, the step,
    the number of the microbatch counted over all data ranks, and the number of its forward pass.
    Without a seed, layers draw from torch's generators as they are.
    """

    seed: int | None
    step: int
    microbatch: int
    turn: int = 0


class Stage:
    """Layers that run one after the other, in chunks. Some chunks are recomputed in backward.

    With `early_stop`, recomputation ends with the last tensor that backward needs. Without
    `early_stop`, it runs to the end and makes the same calls as the first time.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        chunks: Sequence[Chunk],
        device: torch.device,
        early_stop: bool = True,
    ) -> None:
        self.device, self.early_stop = device, early_stop
        self._chunks = tuple(
            (tuple(layers[index] for index in chunk.layers), chunk.again) for chunk in chunks
        )
        self.recomputes = any(chunk.again for chunk in chunks)
        weights = [
            weight
            for members, _ in self._chunks
            for layer in members
            for weight in layer.module.parameters()
        ]
        self.trains = any(weight.requires_grad for weight in weights)

    def forward(self, inputs: Any, draw: Draw | None, keep: bool = False) -> Any:
        """Return the output of the layers for `inputs`. If `draw` is None, the run is an
        evaluation, which draws no random numbers and stores nothing for backward. With `keep`, no
        layer is recomputed in backward.
        """
        for layers, again in self._chunks:
            run = self._runner(layers, draw)
            if again and draw is not None and not keep:
                # An early stop leaves out calls behind the last tensor that backward needs. In
                # split layers these may be collectives, which all ranks of a group have to make
                # alike. The state of generators is not kept, as `run` seeds them for every layer.
                with set_checkpoint_early_stop(self.early_stop):
                    keeps = draw.seed is None
                    inputs = checkpoint(run, inputs, use_reentrant=False, preserve_rng_state=keeps)
            else:
                inputs = run(inputs)
        return inputs

    def _runner(self, layers: tuple[Layer, ...], draw: Draw | None) -> Callable[[Any], Any]:
        """Return a function that runs `layers`, each time with the same random numbers."""

        def run(inputs: Any) -> Any:
            for layer in layers:
                if draw is None or draw.seed is None:
                    inputs = layer(inputs)
                    continue
                # The seed names the layer, and no rank. The same dropout is drawn on every layout,
                # and when it is recomputed.
                name = "" if layer.keys else layer.name
                seed = seed_of(draw.seed, draw.step, draw.microbatch, draw.turn, name)
                with scope(self.device), _drawing(layer, seed, self.device):
                    inputs = layer(inputs)
            return inputs

        return run


def _drawing(layer: Layer, seed: int, device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which `layer` draws the random numbers of `seed`."""
    if layer.keys:
        return Keyed(device, seed, layer.keys)
    seed_generators(seed, device)
    return nullcontext()


def recompute_parts(model: nn.Module, recompute: Recompute) -> tuple[Finding, ...]:
    """Prepare the modules of a model for selective recomputation, by their method `compute_again`.
    Return a finding if no module has this method.
    """
    parts = [module for module in model.modules() if hasattr(module, "compute_again")]
    if recompute.granularity != "selective":
        return ()
    for part in parts:
        part.compute_again()  # type: ignore[operator]
    return (
        ()
        if parts
        else (Finding("recompute.granularity", _NO_PARTS, Effect.COST, True, before="selective"),)
    )


_NO_PARTS = "no module of the model has a method `compute_again`, so nothing is recomputed"


def detach_tensors(values: Any) -> Any:
    """Return the tensors in `values` detached from their graph. Their gradients are accumulated in
    `grad`, from where the stage before gets them.
    """
    return _leaf(values) if isinstance(values, Tensor) else tree_map_only(Tensor, _leaf, values)


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def differentiable(values: Any) -> list[Tensor]:
    """Return the tensors in `values` that take part in backward."""
    if isinstance(values, Tensor):
        return [values] if values.requires_grad else []
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.requires_grad]
