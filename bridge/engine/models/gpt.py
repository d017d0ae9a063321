"""A small GPT of given sizes, and the losses of language models."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from bridge.engine.models.dense import Dense, model_of
from bridge.engine.rows import IGNORED
from bridge.engine.tensor_parallel import SplitLogits
from bridge.layout.architecture import Architecture as Architecture


class GPT(Dense):
    """The model of an `Architecture`: grouped queries, rotary or learned positions, two norms in a
    block, and a plain or gated MLP.
    """

    def __init__(self, architecture: Architecture, seed: int = 1234) -> None:
        super().__init__(model_of(architecture), seed)


def mean_cross_entropy(logits: Tensor | SplitLogits, targets: Tensor) -> Tensor:
    """Return the mean loss of all tokens whose target is not `IGNORED`."""
    total, count = sum_cross_entropy(logits, targets)
    return total / count


def sum_cross_entropy(logits: Tensor | SplitLogits, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the summed loss of the tokens whose target is not `IGNORED`, and the number of these
    tokens.

    Takes logits (batch, sequence, vocab), whole or split by vocabulary, and targets (batch,
    sequence).
    """
    count = (targets != IGNORED).sum()
    if isinstance(logits, SplitLogits):
        return logits.losses(targets, IGNORED).sum(), count
    exact = logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(exact, targets.flatten(), ignore_index=IGNORED, reduction="sum"), count
