"""Stages: consecutive layers that run together. The activations of some of them are recomputed in
backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from bridge.engine.layers import Layer
from bridge.engine.randomness import reseed, scope, seed_of
from bridge.findings import Finding
from bridge.layout.recompute import Chunk
from bridge.plan import Recompute
from bridge.rules import Effect


@dataclass(frozen=True, slots=True)
class Draw:
    """The values that the random numbers of one microbatch depend on: the run's seed, the step, the
    microbatch's index among those of all data ranks, and the number of its forward pass.
    """

    seed: int
    step: int
    microbatch: int
    turn: int = 0


class Stage:
    """Layers that run one after the other, in chunks that are recomputed in backward or not.

    With `early_stop`, recomputation ends with the last tensor that backward needs. Without
    `early_stop`, it runs to the end, with the same calls as the first time.
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
        """Run the layers on `inputs`. `draw` is None in evaluation, which draws no random numbers
        and stores nothing for backward. With `keep`, no layer is recomputed in backward.
        """
        for layers, again in self._chunks:
            run = self._runner(layers, draw)
            if again and draw is not None and not keep:
                # An early stop leaves out calls behind the last tensor that backward needs. In
                # split layers these may be collectives, which all ranks of a group have to make
                # alike. The state of generators is not kept, as `run` seeds them for every layer.
                with set_checkpoint_early_stop(self.early_stop):
                    inputs = checkpoint(run, inputs, use_reentrant=False, preserve_rng_state=False)
            else:
                inputs = run(inputs)
        return inputs

    def _runner(self, layers: tuple[Layer, ...], draw: Draw | None) -> Callable[[Any], Any]:
        """Return a function that runs `layers` with the same random numbers at each call."""

        def run(inputs: Any) -> Any:
            for layer in layers:
                if draw is None:
                    inputs = layer(inputs)
                    continue
                # The seed names the layer, and no rank. The same dropout is drawn on every layout,
                # and when it is recomputed.
                with scope(self.device):
                    reseed(
                        seed_of(draw.seed, draw.step, draw.microbatch, draw.turn, layer.name),
                        self.device,
                    )
                    inputs = layer(inputs)
            return inputs

        return run


def recompute_parts(model: nn.Module, recompute: Recompute) -> tuple[Finding, ...]:
    """For selective recompute, call `compute_again` of every module that has this method. Returns a
    finding if no module has it.
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


def detached(values: Any) -> Any:
    """Return `values` without their graph. Their gradients, which the stage before needs, are
    accumulated in `grad`.
    """
    return tree_map_only(Tensor, _leaf, values)


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def differentiable(values: Any) -> list[Tensor]:
    """Return the tensors in `values` that take part in backward."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.requires_grad]
