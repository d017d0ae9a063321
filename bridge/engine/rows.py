"""Rows: the samples of a user's own batch, which engines read by index. After the last row, reading
begins with the first row again.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bridge.errors import SourceError

IGNORED = -100
"""Target of a token that has no loss, such as padding."""
Batch = tuple[Tensor, Tensor]
"""Tokens and targets of a microbatch, each (sequences, tokens), int64; the loss leaves out
targets of -100.
"""
INPUTS = ("input_ids", "tokens", "inputs", "0")
"""Names that the tokens may have in a batch, the most likely first. "0" is the first element of a
tuple.
"""
MASK, POSITIONS = "attention_mask", "position_ids"
OTHERS = (MASK, POSITIONS, "token_type_ids")
"""Names of other arguments of a model that have one value for each token."""
LABELS, TARGETS, SECOND = "labels", "targets", "1"
"""Names that labels and targets may have in a batch. A label is at the position of its own token,
as models of Hugging Face expect. A target is one position earlier, at the token before its own. "1"
is the second element of a tuple, which may be labels or targets.
"""


@dataclass(frozen=True)
class Rows:
    """The samples of a batch as tensors. `planes` (rows, names, tokens), int64, has the arguments
    of the model in the order of `names`. `targets` (rows, tokens) has the next token for each
    token, or -100 where there is no loss.
    """

    names: tuple[str, ...]
    planes: Tensor
    targets: Tensor

    @classmethod
    def of(cls, where: str, tensors: Mapping[str, Tensor]) -> Rows:
        """Return the rows of a batch, given as `tensors` by name. Raises `SourceError` for a tensor
        that a model for next tokens does not accept. Messages begin with `where`.
        """
        first = next((name for name in INPUTS if name in tensors), None)
        if first is None:
            listing = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())
            raise SourceError(
                f"{where}: found {listing or 'no tensors'}, expected a tensor {INPUTS[0]} of token numbers; rename the tensor"
            )
        tokens = tensors[first]
        if tokens.dim() != 2 or tokens.is_floating_point():
            raise SourceError(
                f"{where}: {first}: found {_form(tokens)}, expected whole numbers of shape (rows, tokens)"
            )
        names = {first, LABELS, TARGETS, *OTHERS, *((SECOND,) if first == "0" else ())}
        odd = [
            f"{where}: {name}: found {_form(tensors[name])}, which no engine accepts"
            for name in tensors
            if name not in names
        ]
        others = {
            name: _plane(where, name, tensors[name], tokens) for name in OTHERS if name in tensors
        }
        SourceError.raise_if(
            f"{problem}; expected tokens, labels, {', '.join(OTHERS)}; leave this tensor out"
            for problem in odd
        )
        targets = _targets(where, tensors, tokens, others.get(MASK))
        planes = torch.stack([tokens.long(), *others.values()], 1)
        return cls((INPUTS[0], *others), planes, targets.long())

    @property
    def sequence(self) -> int:
        """Tokens of a row."""
        return self.targets.shape[1]

    @property
    def plain(self) -> bool:
        """Whether the rows consist of tokens only."""
        return len(self.names) == 1

    def batch(self, numbers: Iterable[int]) -> Batch:
        """Return a microbatch of the rows with these numbers. Numbers beyond the last row begin
        with the first row again.
        """
        at = [number % len(self.targets) for number in numbers]
        return (self.planes[at, 0] if self.plain else self.planes[at]), self.targets[at]

    def model_arguments(self, tokens: Tensor) -> dict[str, Tensor]:
        """Return the arguments of the model in a microbatch, by name, each of shape (rows, tokens)."""
        parts = tokens.unbind(1) if tokens.dim() == 3 else (tokens,)
        return {name: part.contiguous() for name, part in zip(self.names, parts, strict=True)}

    def fed(self, model: nn.Module) -> nn.Module:
        """Change the model so that it accepts whole microbatches, and return it. Raises
        `SourceError` for arguments that the model does not accept.
        """
        plain: Any = model.forward
        takes = inspect.signature(plain).parameters
        open_ended = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in takes.values())
        lacking = [name for name in self.names if name not in takes and not open_ended]
        SourceError.raise_if(
            f"--batch: {name}: {type(model).__name__} does not accept this argument; leave it out"
            for name in lacking
        )
        constants = {"use_cache": False} if "use_cache" in takes else {}

        def forward(tokens: Tensor) -> Any:
            return plain(**self.model_arguments(tokens), **constants)

        model.forward = forward
        return model


def _plane(where: str, name: str, tensor: Tensor, tokens: Tensor) -> Tensor:
    """Return `tensor` as (rows, tokens), like `tokens`. It must have a whole number for each token.
    A single row is repeated for all rows.
    """
    fits = (
        tensor.dim() == 2
        and tensor.shape[1] == tokens.shape[1]
        and tensor.shape[0] in (1, len(tokens))
    )
    whole = bool((tensor == tensor.long()).all())
    if not (fits and whole):
        raise SourceError(
            f"{where}: {name}: found {_form(tensor)}, expected a whole number for each of {tuple(tokens.shape)} tokens"
        )
    return tensor.long().expand(tokens.shape)


def _targets(
    where: str, tensors: Mapping[str, Tensor], tokens: Tensor, mask: Tensor | None
) -> Tensor:
    """Return the target of each token, (rows, tokens): the next token, or -100 where there is no
    loss.
    """
    source = next((name for name in (LABELS, TARGETS, SECOND) if name in tensors), None)
    labels = tokens if source is None else tensors[source]
    if labels.shape != tokens.shape or labels.is_floating_point():
        raise SourceError(
            f"{where}: {source}: found {_form(labels)}, expected whole numbers of shape {tuple(tokens.shape)}"
        )
    if source == TARGETS or (source == SECOND and not _beside(labels, tokens)):
        return labels
    # Without labels, tokens are their own. Padding, which the mask tells, is not predicted.
    if source is None and mask is not None:
        labels = labels.masked_fill(mask == 0, IGNORED)
    # Labels move one place to the left. Nothing follows the last token.
    return torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], IGNORED)], 1)


def _beside(labels: Tensor, tokens: Tensor) -> bool:
    """Return whether labels are at the positions of their own tokens, rather than one position
    earlier. This is so if more labels are equal to the token at their own position than to the
    token after it.
    """
    mask = labels != IGNORED
    own = (labels == tokens) & mask
    before = (labels[:, :-1] == tokens[:, 1:]) & mask[:, :-1]
    return int(own.sum()) > int(before.sum())


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
