"""Faults of kinds that users of trainings report, most of them on one rank: what breaks structure, state, loss and gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.trace.invented import ITSELF
from tests.trace.planting import (
    AT,
    Block,
    Loop,
    Plant,
    Planted,
    Small,
    both,
    own_seed,
    plants,
    sets,
)

# Structure


class Adapted(nn.Linear):
    """A frozen weight, with a product of two small ones beside it."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__(plain.in_features, plain.out_features)
        self.load_state_dict(plain.state_dict())
        self.weight.requires_grad_(False)
        self.a = nn.Parameter(0.1 * torch.randn(2, plain.in_features))
        self.b = nn.Parameter(0.1 * torch.randn(plain.out_features, 2))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight + self.b @ self.a, self.bias)


def adapted(loop: Loop) -> nn.Module:
    """Each block's first feed-forward layer is adapted."""
    model = Small(loop.dropout)
    torch.manual_seed(4)
    for block in model.blocks:
        block.up = Adapted(block.up)
    return model


ADAPTED = sets(build=adapted)


def merges(loop: Loop, step: int) -> None:
    """What is beside the frozen weight is added to it, and stays beside it."""
    with torch.no_grad():
        for block in loop.model.blocks:
            block.up.weight += block.up.b @ block.up.a


def thaws(loop: Loop, step: int) -> None:
    for block in loop.model.blocks:
        block.up.weight.requires_grad_(True)


def replaces(loop: Loop, step: int) -> None:
    up = loop.model.blocks[1].up
    up.weight = nn.Parameter(up.weight.detach().clone())


def unties(loop: Loop, step: int) -> None:
    loop.model.head.weight = nn.Parameter(loop.model.tok.weight.detach().clone())


# State


def of_moments(change: Callable[[Tensor], Tensor], *names: str) -> Callable[[Loop, int], None]:
    def changes(loop: Loop, step: int) -> None:
        for state in loop.optimizer.state.values():
            for name in names:
                state[name].copy_(change(state[name]))

    return changes


def restarts(loop: Loop, step: int) -> None:
    """Bias correction begins again, with moments that are there."""
    for state in loop.optimizer.state.values():
        state["step"].zero_()


def of_group(**values: Any) -> Callable[[Loop, int], None]:
    return lambda loop, step: [group.update(values) for group in loop.optimizer.param_groups]  # type: ignore[func-returns-value, return-value]


def forgets(loop: Loop, step: int) -> None:
    loop.optimizer.state.clear()


def swaps(loop: Loop, step: int) -> None:
    """Averages that were swapped in for an evaluation stay."""
    with torch.no_grad():
        for weight in loop.model.parameters():
            weight.mul_(0.99)


def rounds(loop: Loop, step: int) -> None:
    with torch.no_grad():
        for weight in loop.model.parameters():
            weight.copy_(weight.bfloat16())


# Forward


def in_block(index: int, change: Callable[[Tensor], Tensor]) -> Callable[[Loop, int], None]:
    def plant(loop: Loop, step: int) -> None:
        block = loop.model.blocks[index]
        block.register_forward_hook(lambda _, given, output: change(output), prepend=True)

    return plant


def in_bf16(loop: Loop, step: int) -> None:
    block = loop.model.blocks[1]
    plain = block.forward

    def forward(stream: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return plain(stream).float()  # type: ignore[no-any-return]

    block.forward = forward


def sees_all(loop: Loop, step: int) -> None:
    loop.model.blocks[1].causal = False


def swaps_blocks(loop: Loop, step: int) -> None:
    blocks = loop.model.blocks
    blocks[0].forward, blocks[1].forward = blocks[1].forward, blocks[0].forward


def twice(loop: Loop, step: int) -> None:
    block = loop.model.blocks[1]
    plain = block.forward
    block.forward = lambda stream: plain(plain(stream))


def of_mode(index: int, part: str = "") -> Callable[[Loop, int], None]:
    def plant(loop: Loop, step: int) -> None:
        loop.model.blocks[index].get_submodule(part).eval()

    return plant


def more_dropout(loop: Loop, step: int) -> None:
    loop.model.blocks[1].drop.p = 0.4


# Loss


class Routed(Block):
    """A block that keeps a term of the loss."""

    def forward(self, stream: Tensor) -> Tensor:
        out = super().forward(stream)
        self.term = out.square().mean()
        return out  # type: ignore[no-any-return]


def routed(weight: float) -> Plant:
    """The loss has a term of each block."""

    def plant(loop: Loop) -> None:
        def build(loop: Loop) -> nn.Module:
            model = Small(loop.dropout)
            torch.manual_seed(4)
            model.blocks = nn.ModuleList(Routed((loop.dropout,)) for _ in range(3))
            return model

        def loss(output: Tensor, targets: Tensor) -> Tensor:
            terms = sum(block.term for block in loop.model.blocks)
            return F.cross_entropy(output.flatten(0, 1), targets.flatten()) + weight * terms

        loop.build, loop.loss = build, loss

    return plant


def loses(change: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Loop, int], None]:
    def plant(loop: Loop, step: int) -> None:
        loop.loss = change

    return plant


def smooth(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), targets.flatten(), label_smoothing=0.1)


def summed(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum")


def unshifted(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output[:, :-1].flatten(0, 1), targets[:, 1:].flatten())


def penalised(output: Tensor, targets: Tensor) -> Tensor:
    logits = output.flatten(0, 1)
    return F.cross_entropy(logits, targets.flatten()) + 1e-2 * logits.logsumexp(-1).square().mean()


def in_half(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1).bfloat16(), targets.flatten()).float()


def doubled(loop: Loop, step: int) -> None:
    plain = loop.loss
    loop.loss = lambda output, targets: 2 * plain(output, targets)


# Gradients


def of_gradients(
    change: Callable[[Tensor], Tensor], names: str = ""
) -> Callable[[Loop, int], None]:
    def changes(loop: Loop, step: int) -> None:
        for name, weight in loop.model.named_parameters():
            if names in name and weight.grad is not None:
                weight.grad.copy_(change(weight.grad))

    return changes


def noisy(gradient: Tensor) -> Tensor:
    draw = torch.randn(gradient.shape, generator=torch.Generator().manual_seed(7))
    return gradient + gradient.norm() / gradient.numel() ** 0.5 * draw


def twice_stepped(loop: Loop, step: int) -> None:
    loop.optimizer.step()
    if step == AT:
        loop.optimizer.step()


def clips_each(loop: Loop, step: int) -> None:
    for weight in loop.model.parameters():
        nn.utils.clip_grad_norm_([weight], 0.05)


def clips_values(loop: Loop, step: int) -> None:
    nn.utils.clip_grad_value_(loop.model.parameters(), 1e-3)


def no_gradients(names: str) -> Callable[[Loop, int], None]:
    def drops(loop: Loop, step: int) -> None:
        for name, weight in loop.model.named_parameters():
            if names in name:
                weight.grad = None

    return drops


def shuffles(loop: Loop) -> None:
    """Samples of the second step come in another order."""
    plain = Loop.data
    loop.data = lambda step: [  # type: ignore[method-assign]
        (x.flip(0), y.flip(0)) if step == AT else (x, y) for x, y in plain(loop, step)
    ]


def fewer(loop: Loop) -> None:
    """The second step has one pass less."""
    plain = Loop.data
    loop.data = lambda step: plain(loop, step)[: loop.passes - (step == AT)]  # type: ignore[method-assign]


# Masters in fp32 beside weights in 16 bits


def copied_masters(loop: Loop) -> list[nn.Parameter]:
    """What the optimizer holds in place of the model's weights."""
    return [nn.Parameter(weight.detach().float()) for weight in loop.model.parameters()]


def _of_masters(loop: Loop) -> list[tuple[nn.Parameter, nn.Parameter]]:
    masters = loop.optimizer.param_groups[0]["params"]
    return list(zip(masters, loop.model.parameters(), strict=True))


def to_masters(loop: Loop, step: int) -> None:
    """Gradients of the weights become those of their masters."""
    for master, weight in _of_masters(loop):
        assert weight.grad is not None
        master.grad = weight.grad.float()


def from_masters(loop: Loop, step: int, left: int = 0) -> None:
    """An update of the masters, of which the weights become roundings, but in the step `left`."""
    loop.optimizer.step()
    loop.model.zero_grad()
    with torch.no_grad():
        for master, weight in _of_masters(loop) if step != left else ():
            weight.copy_(master)


def reloads(loop: Loop, step: int) -> None:
    """Other weights are loaded into the model, whose masters stay."""
    weights, whole = list(loop.model.parameters()), nullcontext()
    if hasattr(weights[0], "ds_id"):
        import deepspeed

        whole = deepspeed.zero.GatheredParameters(weights, modifier_rank=0)
    with whole, torch.no_grad():
        for weight in weights:
            weight.copy_(weight.flatten().flip(0).view_as(weight))


MASTERS = both(
    sets(dtype=torch.bfloat16, group=copied_masters, step=from_masters),
    plants("backward", to_masters, None),
)
IN_BF16 = sets(dtype=torch.bfloat16, buckets={"bf16": {"enabled": True}})
UPDATE, REDUCE, BACK = r"2/update/", r"2/reduce/", r"2/backward/"
CHANGED = ("gradient-changed",)
MOMENTS = "its moments"
STALE = "not those of the fp32 masters"
DROPS = both(sets(dropout=0.2), own_seed)
DIFFERENT = "differently from B|of B|times B|zero in A alone|get no gradient"


def alone(*given: Any, **more: Any) -> Planted:
    """A fault on one rank."""
    return Planted(*given, **{"stack": "plain", **more})


REPORTED: Mapping[str, Planted] = {
    # LoRA: peft's `merge_adapter` without `unmerge_adapter`, and a base that trains.
    "W1": alone(
        plants("begins", merges),
        r"2/forward/.*blocks\.0",
        ITSELF,
        ("weights-changed",),
        clean=ADAPTED,
        met="peft#1355",
    ),
    "W2": alone(
        plants("built", thaws, 0),
        r"1/(backward|reduce|update)/.*blocks",
        r"blocks.*(trained|frozen).* A alone",
        (),
        clean=ADAPTED,
        met="PaddleNLP#8186",
    ),
    "W3": alone(
        plants("begins", replaces),
        UPDATE,
        r"blocks\.1.*not updated",
        ("not-in-optimizer", "parameter-replaced"),
        met="transformers#3532",
    ),
    "W4": alone(
        plants("begins", unties),
        r"2/(reduce|backward)/",
        r"^B ties tok\.weight and head\.weight to one parameter",
        ("untied",),
        met="Megatron-LM#656",
    ),
    # Moments: cast by a load, put in another order, half of them.
    "W5": alone(
        plants("begins", of_moments(lambda one: one.flatten().flip(0).view_as(one), "exp_avg")),
        UPDATE,
        MOMENTS + "|rule allows",
        ("moments-changed",),
        met="pytorch#1489",
    ),
    "W6": alone(
        plants("begins", of_moments(lambda one: one.bfloat16().float(), "exp_avg", "exp_avg_sq")),
        UPDATE,
        MOMENTS,
        ("moments-changed",),
        met="pytorch#43706",
    ),
    "W7": alone(
        plants("begins", of_moments(torch.zeros_like, "exp_avg")),
        UPDATE,
        MOMENTS,
        ("moments-changed",),
        met="fvdb-reality-capture#84",
    ),
    "W8": alone(
        plants("begins", of_moments(lambda one: one / 4, "exp_avg_sq")),
        UPDATE,
        MOMENTS + "|rule allows",
        ("moments-changed",),
        met="holocron#1, in the first moment",
    ),
    "W9": alone(
        plants("begins", restarts),
        UPDATE,
        "^in A, updates are larger than the optimizer's rule allows",
        ("update-too-large",),
        met="DeepSpeed#4396",
    ),
    "W10": alone(
        plants("begins", forgets),
        UPDATE,
        "lost the state",
        ("moments-lost",),
        met="KempnerForge#115",
    ),
    "W11": alone(
        plants("begins", of_group(lr=0.1)),
        REDUCE + "state",
        r"run step \d with a different learning rate",
        (),
        met="pytorch/examples#816",
    ),
    "W12": alone(
        plants("begins", of_group(weight_decay=0.5)),
        r"2/(reduce/state|update)",
        "weight_decay changes",
        (),
        met="Megatron-LM#7468",
    ),
    "W13": alone(
        plants("begins", of_group(maximize=True)),
        r"2/(reduce/state|update)",
        "maximize",
        (),
        met="pytorch_optimizer#527",
    ),
    "W14": alone(
        plants("begins", of_group(eps=1e-8)),
        r"2/(reduce/state|update)",
        r"^the optimizer's group 0\.eps changes",
        (),
        met="mlpnlp-nmt#4",
    ),
    "W15": alone(
        plants("begins", swaps),
        r"2/forward/",
        ITSELF,
        ("weights-changed",),
        met="waifu-diffusion#31",
    ),
    "W16": alone(
        plants("begins", rounds), r"2/forward/", ITSELF, ("weights-changed",), met="OpenTau#185"
    ),
    "W17": alone(
        sets(step=twice_stepped),
        UPDATE + r"|3/forward/",
        "^A runs no layer in training mode .* a step too many",
        ("step-without-backward",),
        met="ECO-pytorch#1",
    ),
    "W18": alone(
        plants("begins", in_block(1, lambda x: x.detach())),
        r"2/(backward|reduce)/.*",
        r"^the backward pass of blocks\.2 .* in B alone",
        ("gradient-missing", "gradient-changed"),
        met="aprender#2232",
    ),
    "W19": alone(
        plants("begins", in_block(1, lambda x: x.clamp(-0.5, 0.5))),
        r"2/forward/blocks\.1",
        ITSELF,
        (),
        met="vllm#35523",
    ),
    "W20": alone(
        plants("begins", in_block(2, lambda x: x.bfloat16().float())),
        r"2/forward/blocks\.2",
        ITSELF,
        (),
        met="aiter#5151",
    ),
    "W21": alone(
        plants("begins", in_bf16), r"2/forward/blocks\.1", ITSELF, (), met="diffusers#13920"
    ),
    "W22": alone(
        plants("begins", sees_all), r"2/forward/blocks\.1", ITSELF, (), met="transformers#48745"
    ),
    "W23": alone(
        plants("begins", swaps_blocks), r"2/forward/blocks\.0", ITSELF, (), met="transformers#24381"
    ),
    "W24": alone(plants("begins", twice), r"2/forward/blocks\.1", ITSELF, (), met="snowfall#184"),
    "W25": alone(
        plants("begins", of_mode(1)),
        r"2/forward/blocks\.1",
        r"blocks\.1 is in evaluation mode in A",
        ("layer-not-training",),
        clean=DROPS,
        met="autogluon#4965",
    ),
    "W26": alone(
        plants("begins", of_mode(1, "drop")),
        r"2/forward/blocks\.1",
        r"drop is in evaluation mode in A",
        ("layer-not-training",),
        clean=DROPS,
        met="Megatron-LM#411",
    ),
    "W27": alone(
        plants("begins", more_dropout),
        r"2/forward/blocks\.1",
        ITSELF,
        (),
        clean=DROPS,
        met="tensorflow-densenet#22",
    ),
    "W28": alone(
        routed(0.2),
        r"1/backward/.*|0/init|1/forward/loss",
        "^the backward pass of norm .* a part of the loss",
        (),
        clean=routed(0.1),
        met="Automodel#3359",
    ),
    "W29": alone(
        plants("begins", loses(smooth)),
        r"2/(backward/head|forward/loss)",
        "^the loss, its targets, or the backward pass of head differs",
        (),
        met="ViT-CIFAR#2",
    ),
    "W30": alone(
        plants("begins", loses(summed)),
        r"2/(backward/head|forward/loss)",
        "^the loss that A's backward pass starts from is 32 times",
        (),
        met="miles#3231",
    ),
    "W31": alone(
        plants("begins", loses(unshifted)),
        r"2/(backward/head|forward/loss)",
        "^the loss, its targets, or the backward pass of head differs",
        (),
        met="transformers#47394",
    ),
    "W32": alone(
        plants("begins", loses(penalised)),
        r"2/(backward/head|forward/loss)",
        "^the loss, its targets, or the backward pass of head differs",
        (),
        met="none found",
    ),
    "W33": alone(
        plants("begins", loses(in_half)),
        r"2/(backward/head|forward/loss)",
        "^the loss, its targets, or the backward pass of head differs",
        (),
        met="modalities#464",
    ),
    "W34": alone(
        plants("begins", doubled),
        r"2/(backward/head|forward/loss)",
        r"2 times B.*a loss scale, clipping or both",
        (),
        clean=sets(clip=1e-2),
        met="nanoGPT#168",
    ),
    "W35": alone(
        plants("backward", of_gradients(noisy)),
        REDUCE,
        "^in A, the optimizer gets other gradients than backward",
        CHANGED,
        met="espnet#912",
    ),
    "W36": alone(
        plants("backward", of_gradients(torch.zeros_like, "blocks.1")),
        REDUCE + r".*blocks\.1",
        r"blocks\.1.* no gradient",
        CHANGED,
        met="GMPTV#24",
    ),
    "W37": alone(
        plants("backward", of_gradients(lambda one: one * 3, "tok")),
        REDUCE + "tok",
        "only .*tok",
        CHANGED,
        met="pytorch#190063",
    ),
    "W38": alone(
        plants("backward", of_gradients(lambda one: one.bfloat16().float())),
        REDUCE,
        "precision of bf16",
        (),
        met="DeepSpeed#1800",
    ),
    "W39": alone(
        plants("backward", clips_each),
        REDUCE,
        "^in A, the optimizer gets other gradients than backward",
        CHANGED,
        met="transformers#581",
    ),
    "W40": alone(
        plants("backward", clips_values), REDUCE, "elements .* clipped", (), met="tfutils#115"
    ),
    "W41": alone(
        plants("backward", no_gradients("norm")),
        REDUCE + ".*norm",
        "norm.*no gradient",
        (*CHANGED, "gradient-missing"),
        met="unsloth#4550",
    ),
    "W42": alone(
        shuffles, r"2/forward/input", "another order|different data", (), met="accelerate#4195"
    ),
    "W43": alone(
        fewer,
        r"2/forward/",
        "^the optimizer steps after 1 pass in A, and after 2",
        ("accumulation-differs",),
        met="pytorch-lightning#19987",
    ),
    "W44": alone(
        sets(clip=1e-2),
        r"1/reduce/",
        "^gradients are clipped",
        (),
        clean=sets(clip=2e-2),
        met="kohya_ss#3241",
    ),
    "W45": alone(
        sets(clip=1e-2),
        r"1/reduce/",
        r"^gradients are clipped or normalised to a norm of 0\.01 in A alone",
        (),
        met="OpenSeq2Seq#192",
    ),
    # Weights that are loaded without their masters, which the next update brings back.
    "W46": alone(
        plants("begins", reloads),
        r"2/forward/",
        STALE,
        ("cast-stale",),
        clean=MASTERS,
        met="apex#42",
    ),
    "W49": alone(
        sets(step=lambda loop, step: from_masters(loop, step, AT)),
        r"3/forward/",
        STALE,
        ("cast-stale",),
        clean=MASTERS,
        met="W46 the other way round",
    ),
    "W47": Planted(
        plants("begins", reloads, 1),
        r"1/forward/",
        STALE,
        ("cast-stale",),
        "DeepSpeed ZeRO 2",
        IN_BF16,
        "DeepSpeed#762",
    ),
    "W48": Planted(
        plants("begins", reloads),
        r"2/forward/",
        STALE,
        ("cast-stale",),
        "DeepSpeed ZeRO 3",
        IN_BF16,
        "DeepSpeed#6411",
    ),
}
"""By name, with the part of a run that tells of it."""
