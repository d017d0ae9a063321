"""Quantized weights: those with a scale for each block are read as the numbers that they stand for, as
transformers computes with them, and all others are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from bridge.checkpoint.lazy import EIGHT, FLOATING, Lazy, torch_type
from bridge.errors import SourceError
from bridge.files.shown import show_value

if TYPE_CHECKING:
    from torch import Tensor

SCALE = "_scale_inv"
"""What follows the name of a weight in that of its scales (transformers/integrations/finegrained_fp8.py)."""
BLOCKS, SCALES = "_blocks", "_scales"
"""Ends of the names of packed weights and of their exponents (transformers/integrations/mxfp4.py)."""
FOUR = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The numbers that four bits stand for: one of sign, two of exponent, one of mantissa."""
BIAS = 127
SIGNS = ("scale", "SCB", "absmax", "zeros", "quant_map", "quant_state")
"""Parts of the names of tensors without which the integers beside them have no value."""
USUAL = (128, 128)
"""The size of blocks if a config of FP8 states none (transformers/utils/quantization_config.py: FineGrainedFP8Config)."""
DTYPE = "BF16"
"""The number format in which the weights are read: that of the models that are published like this."""


@dataclass(frozen=True)
class Scaled(Lazy):
    """A tensor of matrices in 8 bits, with a scale for each block of `rows` x `columns` elements."""

    base: Lazy
    scales: Lazy
    rows: int
    columns: int
    dtype: str = DTYPE

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """The shape of `base`."""
        return self.base.shape

    def flat(self, start: int, stop: int) -> Tensor:
        """Return elements times the scales of their blocks, rounded once."""
        import torch

        height, width = self.shape[-2:]
        first, last = start // width, -(-stop // width)
        values = self.base.flat(first * width, last * width).float().view(-1, width)
        scales = self.scales.whole().float().view(-1, *self.scales.shape[-2:])
        at = torch.arange(first, last)
        scale_rows = scales[at // height, (at % height) // self.rows]
        wide = scale_rows.repeat_interleave(self.columns, 1)[:, :width]
        whole = (values * wide).to(torch_type(self.dtype))
        return whole.view(-1)[start - first * width : stop - first * width]


@dataclass(frozen=True)
class Packed(Lazy):
    """Matrices of experts in 4 bits, two in a byte, with an exponent for each block of a row; they are
    stored as transposes.
    """

    blocks: Lazy
    scales: Lazy
    dtype: str = DTYPE

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """The shape of the experts' weights: their number, inputs, and outputs."""
        experts, outputs, count, size = self.blocks.shape
        return experts, count * size * 2, outputs

    def flat(self, start: int, stop: int) -> Tensor:
        """Return elements; each expert that has some of them is unpacked as a whole."""
        import torch

        one = prod(self.shape[1:])
        pieces = [
            self._unpack(expert)[max(0, start - expert * one) : stop - expert * one]
            for expert in range(start // one, -(-stop // one))
        ]
        return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch_type(self.dtype))

    def _unpack(self, expert: int) -> Tensor:
        import torch

        _, outputs, count, size = self.blocks.shape
        one = outputs * count
        codes = self.blocks.flat(expert * one * size, (expert + 1) * one * size).view(one, size)
        exponents = self.scales.flat(expert * one, (expert + 1) * one).int() - BIAS
        numbers = torch.tensor(FOUR, dtype=torch_type(self.dtype))
        pairs = torch.stack([numbers[(codes & 15).int()], numbers[(codes >> 4).int()]], -1)
        whole = torch.ldexp(pairs.view(one, 2 * size), exponents[:, None]).to(numbers.dtype)
        return whole.view(outputs, -1).t().reshape(-1)


def read_quantized(
    tensors: Mapping[str, Lazy],
    blocks: tuple[int, int] | None = None,
    is_stated: bool = False,
    takes_usual: bool = False,
) -> tuple[dict[str, Lazy], tuple[Lazy, ...]]:
    """Return the tensors with quantized weights as the numbers that they stand for and without their scales,
    and these weights. `blocks` is the size of a block in the model's config, and `is_stated` says whether that
    config states that the weights are in FP8; `takes_usual` says that it leaves their size to `USUAL`. Raises
    `SourceError` for weights that are quantized in another way, and for half of a quantized weight.
    """
    weights: dict[str, Lazy] = {}
    used: set[str] = set()
    for name, tensor in tensors.items():
        if name.endswith(BLOCKS) and len(tensor.shape) == 4 and tensor.dtype == "U8":
            scales = tensors.get(name.removesuffix(BLOCKS) + SCALES)
            if scales is not None and (scales.shape, scales.dtype) == (tensor.shape[:-1], "U8"):
                used |= {name, name.removesuffix(BLOCKS) + SCALES}
                weights[name.removesuffix(BLOCKS)] = Packed(tensor, scales)
        elif tensor.dtype in EIGHT and (scales := tensors.get(name + SCALE)) is not None:
            used |= {name, name + SCALE}
            weights[name] = _scaled(name, tensor, scales, blocks, takes_usual)
    rest = {name: tensor for name, tensor in tensors.items() if name not in used}
    has_scales = is_stated or any(name.endswith(SCALE) for name in tensors)
    SourceError.raise_if([*_find_halves(rest, has_scales), *_find_unread(rest)][:1])
    order = {name: weights.get(name, tensor) for name, tensor in rest.items()}
    return {**order, **weights}, tuple(weights.values())


def _scaled(
    name: str, tensor: Lazy, scales: Lazy, blocks: tuple[int, int] | None, takes_usual: bool
) -> Scaled:
    """Return a weight with its scales. Raises `SourceError` unless these are a grid of blocks of one size, and
    unless that size is known: that of the config, `USUAL` if that config leaves it open, or the one
    that divides the weights evenly, by which transformers dequantizes
    (transformers/integrations/finegrained_fp8.py: Fp8Dequantize).
    """
    sizes, grid = tensor.shape[-2:], scales.shape[-2:]
    fits = (
        len(tensor.shape) > 1
        and scales.dtype in FLOATING
        and len(scales.shape) == len(tensor.shape)
        and scales.shape[:-2] == tensor.shape[:-2]
        and all(scales.shape)
    )
    if fits and blocks is None:
        even = not any(size % count for size, count in zip(sizes, grid, strict=True))
        share = (sizes[0] // grid[0], sizes[1] // grid[1]) if even else None
        is_usual = _grid(sizes, USUAL) == grid
        blocks = USUAL if is_usual and takes_usual else share
        # A block that is larger than the weight is as large as the weight.
        if is_usual and blocks not in (
            None,
            USUAL,
            (min(sizes[0], USUAL[0]), min(sizes[1], USUAL[1])),
        ):
            raise SourceError(
                f"{name}: found weights of shape {tensor.shape} with scales of shape {scales.shape}, and no config that "
                f"says whether a block has {blocks} or {USUAL} elements; put the model's config.json, with "
                "weight_block_size in its quantization_config, next to the weights"
            )
    if not fits or blocks is None or _grid(sizes, blocks) != grid:
        raise SourceError(
            f"{name}: found weights of shape {tensor.shape} in {tensor.dtype} with scales of shape {scales.shape} in "
            f"{scales.dtype}, expected one for each block of {blocks or 'one size'}; convert a checkpoint that is not quantized"
        )
    return Scaled(tensor, scales, *blocks)


def _grid(sizes: tuple[int, ...], blocks: tuple[int, int]) -> tuple[int, ...]:
    """Return how many blocks there are along each dimension; the last one may be smaller."""
    return tuple(-(-size // block) for size, block in zip(sizes, blocks, strict=True))


def _find_halves(tensors: Mapping[str, Lazy], has_scales: bool) -> Iterator[str]:
    """Yield a message for each tensor that is half of a quantized weight. `has_scales` says whether weights in 8
    bits have scales in this model: without any they are numbers of their own.
    """
    for name, tensor in tensors.items():
        partner = name
        if name.endswith(SCALE):
            partner = name.removesuffix(SCALE)
        elif tensor.dtype in EIGHT and len(tensor.shape) > 1 and has_scales:
            partner = name + SCALE
        elif tensor.dtype == "U8" and len(tensor.shape) == 4 and name.endswith(BLOCKS):
            partner = name.removesuffix(BLOCKS) + SCALES
        elif tensor.dtype == "U8" and len(tensor.shape) == 3 and name.endswith(SCALES):
            partner = name.removesuffix(SCALES) + BLOCKS
        if partner not in tensors:
            yield (
                f"{show_value(name)}: found half of a quantized weight, and no {show_value(partner)}, which is the other "
                "half; complete the checkpoint"
            )


def _find_unread(tensors: Mapping[str, Lazy]) -> Iterator[str]:
    beside: dict[str, str] = {}
    for name in tensors:
        module, _, own = name.rpartition(".")
        if any(sign in own for sign in SIGNS):
            beside[module] = name
            beside.setdefault(module.rpartition(".")[0], name)
    for name, tensor in tensors.items():
        scale = beside.get(name.rpartition(".")[0]) or beside.get(name)
        is_coded = tensor.dtype not in FLOATING or tensor.dtype in EIGHT
        if is_coded and len(tensor.shape) > 1 and scale not in (None, name):
            yield (
                f"{show_value(name)}: found quantized weights in {tensor.dtype}, whose scales are in {show_value(scale)}; "
                "weights are read with scales of blocks in 8 bits (FP8) or 4 (MXFP4); convert a checkpoint that is not quantized"
            )
