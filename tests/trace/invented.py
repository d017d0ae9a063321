"""Faults that nobody listed: invented against the tool, and kept where they tell something."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.trace import planting
from tests.trace.planting import AT, Block, Loop, Planted, Small, alike, both, plants, rates, sets

# Data and loss


def padded(loop: Loop, ignored: int = -100) -> None:
    """Targets of unequal lengths; what is not to count has that number."""
    plain = Loop.data

    def cut(tokens: Tensor, targets: Tensor) -> Tensor:
        lengths = 1 + tokens[:, :1] % (tokens.shape[1] - 1)
        return targets.masked_fill(torch.arange(tokens.shape[1]) >= lengths, ignored)

    loop.data = lambda step: [
        (tokens, cut(tokens, targets)) for tokens, targets in plain(loop, step)
    ]  # type: ignore[method-assign]


def counted(loop: Loop) -> None:
    """Padding counts as the first word."""
    padded(loop, 0)


def divided(loop: Loop) -> None:
    """The loss is divided by the ranks, and so are gradients."""
    plain = loop.loss
    loop.loss = lambda output, targets: plain(output, targets) / loop.world


def drops_last(loop: Loop) -> None:
    """The last microbatch of the second step is run, and its loss left out."""
    plain, calls = loop.loss, [0]

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        calls[0] += 1
        return plain(output, targets) * (0.0 if calls[0] == AT * loop.passes else 1.0)

    loop.loss = loss


def again(loop: Loop) -> None:
    """The second step is fed what the first one was."""
    plain = Loop.data
    loop.data = lambda step: plain(loop, 1 if step == AT else step)  # type: ignore[method-assign]


def one_microbatch(loop: Loop) -> None:
    """Each step is fed its first microbatch several times."""
    plain = Loop.data
    loop.data = lambda step: plain(loop, step)[:1] * loop.passes  # type: ignore[method-assign]


def misses_targets(loop: Loop) -> None:
    """Targets come one microbatch late."""
    plain = loop.loss
    kept: list[Tensor] = []

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        kept.append(targets)
        return plain(output, kept[-2] if len(kept) > 1 else targets)

    loop.loss = loss


# Forward and backward


class Turned(Block):
    """Heads turn queries and keys by their places, which begin at `first`."""

    first = 0

    def attend(self, stream: Tensor) -> Tensor:
        """See `Block`."""
        q, k, v = (
            part.unflatten(-1, (2, -1)).transpose(1, 2)
            for part in self.qkv(self.norm1(stream)).chunk(3, -1)
        )
        places = torch.arange(q.shape[-2]).float()
        places = places + (places >= q.shape[-2] // 2) * self.first
        angles = torch.outer(places, 10_000.0 ** (-torch.arange(0, q.shape[-1], 2) / q.shape[-1]))
        cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
        q, k = (
            part * cos + torch.cat([-part.chunk(2, -1)[1], part.chunk(2, -1)[0]], -1) * sin
            for part in (q, k)
        )
        found = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(found.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Routed(Block):
    """A feed-forward part of two experts and a router."""

    detached = False

    def __init__(self, owner: Any) -> None:
        super().__init__(owner)
        self.router, self.other = nn.Linear(16, 2), nn.Linear(64, 16)

    def feed(self, stream: Tensor) -> Tensor:
        """See `Block`."""
        hidden = torch.tanh(self.up(self.norm2(stream)))
        shares = self.router(stream).softmax(-1)
        shares = shares.detach() if self.detached else shares
        return self.down(hidden) * shares[..., :1] + self.other(hidden) * shares[..., 1:]  # type: ignore[no-any-return]


def blocks_of(kind: Any) -> Any:
    """The model with blocks of that kind."""

    def build(loop: Loop) -> nn.Module:
        model = Small(loop.dropout)
        torch.manual_seed(4)
        model.blocks = nn.ModuleList(kind((loop.dropout,)) for _ in range(3))
        return model

    return sets(build=build)


def set_on_blocks(name: str, value: Any) -> Any:
    """An attribute of each block."""

    def strike(loop: Loop, step: int) -> None:
        for block in loop.model.blocks:
            setattr(block, name, value)

    return strike


def detaches(loop: Loop, step: int) -> None:
    """The feed-forward part of a block is cut off the graph before its first layer."""
    loop.model.blocks[1].up.register_forward_hook(lambda module, given, output: output.detach())


def skips_rest(loop: Loop, step: int) -> None:
    """A block's residual stream is lost in backward."""
    loop.model.blocks[1].register_full_backward_hook(
        lambda module, given, output: (given[0] * 0.5,)
    )


def freezes(loop: Loop, step: int) -> None:
    for weight in loop.model.blocks[0].parameters():
        weight.requires_grad_(False)


def in_bf16(loop: Loop, step: int) -> None:
    """A block's weights are rounded to bf16 on this rank."""
    for weight in loop.model.blocks[1].parameters():
        part = getattr(weight.data, "_local_tensor", weight.data)
        part.copy_(part.bfloat16())


def rounds(loop: Loop, step: int) -> None:
    """All weights are rounded to bf16 after each step."""
    for weight in loop.model.parameters():
        part = getattr(weight.data, "_local_tensor", weight.data)
        part.copy_(part.bfloat16())


def own_masks(loop: Loop, step: int) -> None:
    """Tensor ranks drop other values."""
    torch.manual_seed(100 * loop.rank + step)


# Gradients


def unsynced(loop: Loop, step: int) -> None:
    """The last microbatch of the second step is not reduced either."""
    plain = loop.wrapped.forward

    def forward(*given: Any, **named: Any) -> Any:
        loop.wrapped.require_backward_grad_sync = False
        return plain(*given, **named)

    loop.wrapped.forward = (
        forward if step == AT else type(loop.wrapped).forward.__get__(loop.wrapped)
    )
    loop.wrapped.require_backward_grad_sync = True


def doubles_shard(loop: Loop, step: int) -> None:
    """A rank's part of a block's gradient was added twice."""
    for weight in loop.model.blocks[2].parameters():
        weight.grad._local_tensor.mul_(2)


def whitewashed(loop: Loop, step: int) -> None:
    """A rank takes a gradient for broken, and puts zeros there."""
    for weight in loop.model.norm.parameters():
        weight.grad.zero_()


def by_blocks(loop: Loop, step: int) -> None:
    """Each block is clipped by a norm of its own."""
    for block in loop.model.blocks:
        nn.utils.clip_grad_norm_(block.parameters(), 0.01)


# Updates


def blunt(loop: Loop, step: int) -> None:
    """The arithmetic of AdamW itself uses another eps than its group says."""
    import torch.optim.adam as module

    plain = module.adam
    module.adam = lambda *given, **named: plain(*given, **{**named, "eps": 0.1})
    planting.MENDED.append(lambda: setattr(module, "adam", plain))


def average(loop: Loop, step: int) -> None:
    """An average of the weights over time takes their place."""
    kept = loop.__dict__.setdefault("average", {})
    for name, weight in loop.model.named_parameters():
        part = getattr(weight.data, "_local_tensor", weight.data)
        kept[name] = part.clone() if name not in kept else 0.5 * kept[name] + 0.5 * part
        part.copy_(kept[name])


def extra(loop: Loop, step: int) -> None:
    """The tied weight is updated once more, by an optimizer of its own."""
    if "extra" not in loop.__dict__:
        loop.__dict__["extra"] = torch.optim.SGD([loop.model.tok.weight], 0.1)
    loop.__dict__["extra"].step()


def forgets(loop: Loop, step: int) -> None:
    loop.optimizer.state.clear()


def halves_moments(loop: Loop, step: int) -> None:
    """Second moments are read in another unit."""
    for state in loop.optimizer.state.values():
        state["exp_avg_sq"].mul_(0.25)


def steps_less(loop: Loop, step: int) -> None:
    """A rank counts fewer steps than the others."""
    for state in loop.optimizer.state.values():
        state["step"].fill_(50.0)


def stale(loop: Loop, step: int) -> None:
    """A rank goes on with the weights of a block that it had a step before."""
    kept = loop.__dict__.setdefault("kept", {})
    for name, weight in loop.model.blocks[1].named_parameters():
        if step == AT:
            weight.data.copy_(kept[name])
        kept[name] = weight.detach().clone()


def drifts(loop: Loop, step: int) -> None:
    loop.model.scale.mul_(1.05)


def megatron_eps(loop: Loop, step: int) -> None:
    """The norm before a block's attention has another eps."""
    layer = loop.wrapped.chunks[0].module.decoder.layers[1]
    layer.input_layernorm.eps = 0.1


def megatron_scale(loop: Loop, step: int) -> None:
    """The loss of a microbatch is not divided by their number."""
    config = loop.wrapped.chunks[0].config
    plain = config.grad_scale_func
    config.grad_scale_func = lambda loss: (plain(loss) if plain else loss) * 2.0


def engine_rate(loop: Loop, step: int) -> None:
    """A rank of the native engine steps at another rate."""
    plain = loop.wrapped.optimizer.step
    loop.wrapped.optimizer.step = lambda gradients, lr, *given, **named: plain(
        gradients, lr * 1.5, *given, **named
    )


SEEN = ("data-repeated",)
ITSELF = "is the first layer whose outputs differ|changed weights between two steps"
INVENTED: Mapping[str, Planted] = {
    "V1": Planted(
        counted, r"1/backward/", "^the loss, its targets, or|^A and B weigh", (), "DDP", padded
    ),
    "V2": Planted(divided, r"1/backward/", r"0\.5 times B's", (), "FSDP2"),
    "V3": Planted(drops_last, r"2/backward/", "the loss .* is 0 times", (), "accelerate"),
    "V4": Planted(again, r"2/forward/.*input", "different data", SEEN, "DDP"),
    "V5": Planted(one_microbatch, r"1/forward/.*input", "different data", SEEN, "FSDP2"),
    "V6": Planted(misses_targets, r"1/backward/", "the loss, its targets", (), "pipelining"),
    "V7": Planted(
        plants("begins", set_on_blocks("first", 3)),
        r"2/forward/.*blocks\.0/output",
        ITSELF,
        (),
        "FSDP2",
        blocks_of(Turned),
    ),
    "V8": Planted(
        plants("built", set_on_blocks("detached", True), 0),
        r"1/(backward|reduce)/.*blocks\.2",
        r"^the backward pass of blocks\.2 computes",
        ("gradient-missing",),
        "plain",
        blocks_of(Routed),
    ),
    "V9": Planted(
        plants("built", detaches, 0),
        r"1/backward/.*blocks\.1",
        "backward pass of .*blocks.1",
        ("gradient-missing",),
        "Trainer",
        sets(buckets={"find_unused_parameters": True}),
    ),
    "V10": Planted(
        plants("built", skips_rest, 0),
        r"1/backward/blocks\.1",
        "backward pass of blocks.1",
        (),
        "plain",
    ),
    "V11": Planted(
        plants("built", freezes, 0),
        r"1/reduce/blocks\.0",
        r"blocks\.0.* trained in B alone",
        (),
        "plain",
    ),
    "V12": Planted(
        plants("begins", in_bf16, rank=1),
        r"2/forward/blocks\.1",
        ITSELF,
        ("replicas-differ",),
        "DeepSpeed ZeRO 0",
    ),
    "V13": Planted(
        plants("stepped", rounds, None),
        r"2/forward/",
        ITSELF,
        ("weights-changed", "updates-lost"),
        "FSDP2",
    ),
    "V14": Planted(
        plants("begins", own_masks, None),
        r"1/forward/.*blocks\.0/output",
        ITSELF,
        ("replicas-differ",),
        "DTensor",
        both(
            alike,
            sets(dropout=0.2),
            plants("begins", lambda loop, step: torch.manual_seed(step), None),
        ),
    ),
    "V15": Planted(
        plants("begins", unsynced, None),
        r"2/reduce",
        "computed itself",
        ("gradient-not-reduced",),
        "DDP",
    ),
    "V16": Planted(
        plants("backward", doubles_shard, rank=1),
        r"2/reduce/blocks\.2",
        r"only .*blocks\.2",
        (),
        "FSDP2",
    ),
    "V17": Planted(
        plants("backward", whitewashed, rank=1),
        r"2/reduce/norm",
        r"^norm\.bias, norm\.weight get no gradient",
        ("replicas-differ",),
        "DDP",
    ),
    "V18": Planted(
        plants("backward", by_blocks),
        r"2/reduce/.*blocks\.0",
        r"only .*blocks\.0",
        ("gradient-changed",),
        "Trainer",
    ),
    "V19": Planted(
        plants("wrapped", blunt, 0),
        r"1/update",
        "the optimizer.s rule",
        ("update-unexplained",),
        "accelerate",
    ),
    "V20": Planted(
        plants("stepped", average, None),
        r"2/forward/|3/forward/",
        ITSELF,
        ("weights-changed",),
        "DTensor",
        alike,
    ),
    "V21": Planted(
        plants("stepped", extra), r"3/forward/tok", ITSELF, ("weights-changed",), "plain"
    ),
    "V22": Planted(
        plants("begins", forgets, rank=1),
        r"2/update",
        "lost the state of a parameter",
        ("moments-lost", "replicas-differ"),
        "FSDP2",
    ),
    "V23": Planted(
        plants("begins", halves_moments),
        r"2/update",
        "changed its moments",
        ("moments-changed", "update-too-large"),
        "plain",
    ),
    "V24": Planted(
        plants("begins", steps_less, rank=1),
        r"2/update",
        "^the update of rank 1 differs: because of the optimizer",
        ("replicas-differ",),
        "DDP",
    ),
    "V25": Planted(
        plants("begins", stale, None, 1),
        r"2/forward/blocks\.1",
        ITSELF,
        ("replicas-differ",),
        "DeepSpeed ZeRO 1",
    ),
    "V26": Planted(
        plants("begins", drifts, rank=1), r"2/forward/", ITSELF, ("buffers-differ",), "DDP"
    ),
    "V27": Planted(
        plants("begins", megatron_eps),
        r"2/forward/block1/output",
        ITSELF,
        (),
        "Megatron-Core, tensor 2",
    ),
    "V28": Planted(
        plants("begins", megatron_scale),
        r"2/backward",
        "^the loss that A's backward pass starts from is 2 times B's; this",
        (),
        "Megatron-Core, pipeline 2",
    ),
    "V29": Planted(
        plants("begins", engine_rate, rank=1),
        r"2/update",
        r"^the updates of A are 1\.5 times B's on rank 1: a cause may be learning rate",
        ("replicas-differ",),
        "native, data 2",
    ),
    "V30": Planted(
        sets(buckets={"scale_grads": False}),
        r"1/(backward|reduce)",
        "^the loss that A's backward pass starts from is 2 times B's; this",
        (),
        "pipelining",
    ),
    "V31": Planted(
        plants("begins", rates(1.5), rank=1),
        r"2/(reduce/state|update)",
        r"run step \d with a different learning rate",
        ("replicas-differ",),
        "pipelining",
    ),
    "V32": Planted(
        plants("backward", whitewashed, rank=1),
        r"2/reduce/norm",
        "norm.* no gradient",
        ("gradient-changed",),
        "pipelining",
    ),
}
