"""Experts of a block: a router chooses a few experts for each token, and gives each of them a
weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bridge.layout.architecture import Experts
from bridge.plan.model import Moe

TINY = 1e-20
"""Term that is added to a sum of scores before division, because all scores of a token may be 0."""
SCORES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": lambda logits: F.softplus(logits).sqrt(),
}


class Router(nn.Linear):
    """The router. Returns the weight of each expert for each token, which is 0 for experts that
    were not chosen. Scores are in fp32 at least.
    """

    def __init__(self, hidden: int, shape: Experts, moe: Moe) -> None:
        super().__init__(hidden, shape.count, shape.router_bias)
        self.score, self.top_k = SCORES[moe.score or "softmax"], shape.top_k
        self.normalised, self.scale = moe.normalised is not False, moe.scale or 1.0

    def forward(self, stream: Tensor) -> Tensor:
        """From shape (batch, sequence, hidden) to shape (batch, sequence, experts)."""
        logits = super().forward(stream)
        scores = self.score(logits.to(torch.promote_types(logits.dtype, torch.float32)))
        best, chosen = scores.topk(self.top_k, -1)
        # The weights of the chosen experts then sum to 1, whatever the scores of the others.
        if self.normalised:
            best = best / (best.sum(-1, keepdim=True) + TINY)
        return torch.zeros_like(scores).scatter(-1, chosen, best * self.scale).to(stream.dtype)


class Routed(nn.Module):
    """A router and its experts. Every expert computes all tokens. The output of an expert that was
    not chosen for a token has weight 0.
    """

    def __init__(
        self, hidden: int, shape: Experts, moe: Moe, make: Callable[[int], nn.Module]
    ) -> None:
        super().__init__()
        self.router = Router(hidden, shape, moe)
        self.experts = nn.ModuleList(make(shape.ffn) for _ in range(shape.count))
        self.shared = make(shape.shared) if shape.shared else None
        self.shared_gate = nn.Linear(hidden, 1, bias=False) if shape.shared_gate else None

    def forward(self, stream: Tensor) -> Tensor:
        weights = self.router(stream).unbind(-1)
        out: Tensor = sum(
            (
                expert(stream) * weight.unsqueeze(-1)
                for expert, weight in zip(self.experts, weights, strict=True)
            ),
            torch.zeros_like(stream),
        )
        if self.shared is None:
            return out
        beside: Tensor = self.shared(stream)
        return out + (
            beside if self.shared_gate is None else beside * torch.sigmoid(self.shared_gate(stream))
        )
