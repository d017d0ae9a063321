"""Faults of an attack on the trace itself: each once passed as rounding, got a wrong cause, or was silent in the run alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.trace.planting import AT, Loop, Planted, Small, both, plants, sets
from tests.trace.reported import MASTERS, STALE, alone, from_masters, loses, of_gradients

# Layers, and what a loop passes to them


class Wrapped(nn.Module):
    """A model inside of another module, which a loop is to call."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.blocks = inner.blocks

    def forward(self, tokens: Tensor) -> Tensor:
        return self.inner(tokens)  # type: ignore[no-any-return]


def unwraps(loop: Loop, step: int) -> None:
    """From here on, the loop calls what is inside of the wrapper."""
    loop.wrapped = loop.wrapped.module if hasattr(loop.wrapped, "module") else loop.wrapped.inner


def hooks_late(loop: Loop, step: int) -> None:
    """A hook that is registered behind those of the trace."""
    loop.model.blocks[1].register_forward_hook(lambda _, given, output: 1.01 * output)


def exchanges(loop: Loop, step: int) -> None:
    """Two blocks take each other's place in their list."""
    blocks = loop.model.blocks
    blocks[0], blocks[1] = blocks[1], blocks[0]


def replaces_head(loop: Loop, step: int) -> None:
    torch.manual_seed(9)
    loop.model.head = nn.Linear(*reversed(loop.model.head.weight.shape), bias=False)


class Normed(Small):
    """A model with running statistics."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(dropout)
        self.batch_norm = nn.BatchNorm1d(self.norm.normalized_shape[0])

    def forward(self, tokens: Tensor) -> Tensor:
        stream = self.tok(tokens) + self.pos(torch.arange(tokens.shape[1]))
        stream = self.batch_norm(stream.flatten(0, 1)).view_as(stream)
        for block in self.blocks:
            stream = block(stream)
        return self.head(self.norm(stream) * self.scale)  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    """A model whose state a loop may carry from pass to pass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.tok, self.lstm, self.head = nn.Embedding(29, 16), nn.LSTM(16, 16), nn.Linear(16, 29)
        self.state: Any = None

    def forward(self, tokens: Tensor, state: Any = None) -> Tensor:
        output, self.state = self.lstm(self.tok(tokens).transpose(0, 1), state)
        return self.head(output.transpose(0, 1))  # type: ignore[no-any-return]


def recurrent(loop: Loop) -> None:
    loop.build = lambda loop: Recurrent()
    loop.at["wrapped"] = lambda loop, step: carries(loop, 99)


def carries(loop: Loop, since: int) -> None:
    """The loop passes zeros as the state, and from a step on what the last pass left."""
    model, now = loop.model, [0]
    loop.at["begins"] = lambda loop, step: now.__setitem__(0, step)

    class Called:
        def __call__(self, tokens: Tensor) -> Tensor:
            zeros = torch.zeros(1, len(tokens), 16), torch.zeros(1, len(tokens), 16)
            old = model.state if now[0] >= since else None
            given = zeros if old is None else tuple(part.detach() for part in old)
            return model(tokens, given)  # type: ignore[no-any-return]

    loop.at["attached"] = lambda loop, step: setattr(loop, "wrapped", Called())


def carried(loop: Loop) -> None:
    loop.at["wrapped"] = lambda loop, step: carries(loop, AT)


# Optimizers and clipping


def in_groups(**second: Any) -> Callable[[Loop], Any]:
    """Blocks in one group, and all the rest in another with settings of its own."""

    def groups(loop: Loop) -> Any:
        named = list(loop.model.named_parameters())
        inner = [weight for name, weight in named if "blocks" in name]
        outer = [weight for name, weight in named if "blocks" not in name]
        return [{"params": inner}, {"params": outer, **second}]

    return groups


def clips_to(limit: float) -> Callable[[Loop, int], None]:
    return lambda loop, step: setattr(loop, "clip", limit)


# State


def lags(loop: Loop, step: int) -> None:
    """One 16-bit weight does not get what its master has become."""
    old = loop.model.blocks[1].up.weight.detach().clone()
    from_masters(loop, step)
    if step == AT:
        with torch.no_grad():
            loop.model.blocks[1].up.weight.copy_(old)


def shrinks_late(loop: Loop, step: int) -> None:
    if step == AT:
        shrinks_masters(loop, step)
    from_masters(loop, step)


def shrinks_masters(loop: Loop, step: int) -> None:
    with torch.no_grad():
        for group in loop.optimizer.param_groups:
            for weight in group["params"]:
                weight.mul_(0.9)


def shrinks(loop: Loop, step: int) -> None:
    with torch.no_grad():
        for weight in loop.model.parameters():
            weight.mul_(0.97)


def breaks(loop: Loop, step: int) -> None:
    with torch.no_grad():
        loop.model.blocks[1].up.weight[0, 0] = torch.nan


def clears_between(loop: Loop) -> None:
    """What the first pass of the second step left is cleared."""
    passes = [0]

    def clears(loop: Loop, step: int) -> None:
        passes[0] += 1
        if passes[0] == (AT - 1) * loop.passes + 1:
            loop.optimizer.zero_grad()

    loop.at["passed"] = clears


def in_autocast(loop: Loop) -> None:
    """The model runs under autocast, in 16 bits."""

    class Cast(Small):
        def forward(self, tokens: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(tokens)

    loop.build = lambda loop: Cast(loop.dropout)


def double(output: Tensor, targets: Tensor) -> Tensor:
    return 2 * F.cross_entropy(output.float().flatten(0, 1), targets.flatten())


SMALL_STEPS = both(MASTERS, sets(rate=1e-3))
CLIPS = sets(clip=1e-2)
ATTACKED: Mapping[str, Planted] = {
    "Y1": Planted(
        plants("begins", unwraps),
        r"2/(forward|reduce)/",
        "^A runs layers outside of a pass of the traced module|gradient that it computed itself",
        ("gradient-not-reduced", "replicas-differ"),
    ),
    "Y2": alone(
        plants("begins", unwraps),
        r"2/(forward|reduce|backward)/",
        "^A runs layers outside of a pass of the traced module",
        (),
        clean=sets(build=lambda loop: Wrapped(Small())),
    ),
    "Y3": alone(
        sets(step=lags),
        r"3/update/blocks\.1/",
        r"blocks\.1\.up\.weight.*not updated",
        ("cast-stale",),
        clean=SMALL_STEPS,
    ),
    # Weights become those of their masters behind the update: forward shows it in the next step.
    "Y4": alone(
        sets(step=shrinks_late),
        r"3/forward/tok",
        "changed weights between two steps",
        ("weights-changed",),
        clean=MASTERS,
    ),
    "Y5": alone(
        plants("begins", shrinks_masters), r"3/forward/tok", STALE, ("cast-stale",), clean=MASTERS
    ),
    "Y6": alone(
        plants("begins", shrinks),
        r"2/forward/",
        "changed weights between two steps",
        ("weights-changed",),
        clean=in_autocast,
    ),
    "Y7": Planted(
        plants("begins", breaks, rank=1),
        r"2/forward/",
        "changed weights between two steps",
        ("replicas-differ", "weights-changed", "weights-not-finite"),
    ),
    "Y8": Planted(
        clears_between, r"2/reduce/", "zero_grad is called too early", ("gradient-lost",)
    ),
    "Y9": alone(
        sets(group=in_groups(lr=3e-2)), r"(1/reduce/state|0/)", "different learning rate", ()
    ),
    "Y10": alone(
        sets(group=in_groups(weight_decay=0.3)),
        r"1/update/",
        r"group 1\.weight_decay|weight decay differs",
        (),
        clean=sets(group=in_groups()),
    ),
    "Y11": Planted(
        sets(clip=5e-3), r"1/reduce/", r"clipped .* 0\.005 in A, and of 0\.01 in B", (), clean=CLIPS
    ),
    "Y12": Planted(
        plants("begins", clips_to(5e-3)),
        r"2/reduce/",
        r"clipped .* 0\.005 in A, and of 0\.01 in B",
        ("clip-changed",),
        clean=CLIPS,
    ),
    "Y13": Planted(
        plants("begins", loses(double), rank=1),
        r"2/(backward/head|forward/loss)",
        "starts from is .* on rank 1",
        (),
    ),
    "Y14": Planted(
        plants("backward", of_gradients(lambda one: 1.5 * one, "blocks.1.up"), rank=1),
        r"2/reduce/",
        "other gradients than backward computed",
        ("gradient-changed", "replicas-differ", "clip-norms-differ"),
        clean=CLIPS,
    ),
    "Y15": alone(
        plants("begins", lambda loop, step: loop.model.batch_norm.reset_running_stats()),
        r"2/update/.*batch_norm",
        r"batch_norm.*before",
        (),
        clean=sets(build=lambda loop: Normed()),
    ),
    "Y16": alone(carried, r"2/forward/(input|lstm)", "carries", (), clean=recurrent),
    "Y17": alone(
        plants("begins", exchanges), r"2/forward/", "changed places", ("parameter-replaced",)
    ),
    "Y18": alone(
        plants("begins", replaces_head),
        r"2/(forward/head|backward/norm|forward/loss)",
        "were replaced",
        ("not-in-optimizer",),
        clean=sets(build=lambda loop: Small(tied=False)),
    ),
    "Y19": alone(
        plants("begins", hooks_late), r"2/forward/blocks\.1", r"^blocks\.1 is the first layer", ()
    ),
}
"""By name."""
