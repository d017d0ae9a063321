"""Real causes of two engines that give other numbers for one recipe, each put into one of two engines: what a comparison says.

`python -m tests.trace.engines [CAUSE ...]` tries them all, or those named, then the clean pairs, and prints the tables; it ends
with 1 if a cause is missed or wrong, too few are named, or a clean pair differs.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from bridge.trace.comparison import Comparison
from bridge.trace.run import TracedRun
from bridge.trace.run_comparison import compare_runs
from tests.trace import planting
from tests.trace.planting import (
    AT,
    LOGS,
    MENDED,
    STACKS,
    Block,
    Loop,
    Plant,
    Small,
    Stack,
    both,
    megatron,
    native,
    plants,
    sets,
)

WANTED = 0.8
"""Of the causes, how many have to be named."""
DATA = (
    "plain",
    "DDP",
    "FSDP2",
    "accelerate",
    "DeepSpeed ZeRO 0",
    "DeepSpeed ZeRO 1",
    "DeepSpeed ZeRO 2",
)
"""Engines that train the same model on the same samples."""
SHAPED = {"layers": 4, "vocab": 32}
"""Which Megatron need not fill up."""
PARTS = {"batch.micro": 4, "batch.accumulation": 2}
ENGINES: Mapping[str, Stack] = {
    **{name: STACKS[name] for name in DATA},
    "accelerate": partial(planting.accelerated, told=True),
    "Megatron-Core, tensor 2": megatron({"parallel.tensor": 2}, **SHAPED),
    "Megatron-Core, tensor 2, sequence": megatron(
        {"parallel.tensor": 2, "parallel.sequence": True}, **SHAPED
    ),
    "Megatron-Core, pipeline 2": megatron({"parallel.pipeline": 2}, **SHAPED),
    "native, tensor 2": native({"parallel.tensor": 2, **PARTS}, **SHAPED),
    "native, tensor 2, sequence": native(
        {"parallel.tensor": 2, "parallel.sequence": True, **PARTS}, **SHAPED
    ),
    "native, data 2": native(
        {"parallel.data": 2, "batch.micro": 2, "batch.accumulation": 2}, **SHAPED
    ),
}
GPTS = tuple(name for name in ENGINES if name.startswith(("native", "Megatron")))
"""Engines that train another one, split in their own ways."""


# What both engines have


class Turned(Block):
    """A block whose heads turn queries and keys by their places."""

    base = 10_000.0

    def attend(self, stream: Tensor) -> Tensor:
        """See `Block`."""
        q, k, v = (
            part.unflatten(-1, (2, -1)).transpose(1, 2)
            for part in self.qkv(self.norm1(stream)).chunk(3, -1)
        )
        rates = self.base ** (-torch.arange(0, q.shape[-1], 2) / q.shape[-1])
        angles = torch.outer(torch.arange(q.shape[-2]).float(), rates)
        cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
        q, k = (
            part * cos + torch.cat([-part.chunk(2, -1)[1], part.chunk(2, -1)[0]], -1) * sin
            for part in (q, k)
        )
        found = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(found.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def turned(loop: Loop) -> nn.Module:
    """The model with such blocks."""
    model = Small(loop.dropout)
    torch.manual_seed(4)
    model.blocks = nn.ModuleList(Turned((loop.dropout,)) for _ in range(3))
    return model


def padded(loop: Loop) -> None:
    """Samples of unequal lengths."""
    plain = Loop.data

    def data(step: int) -> list[tuple[Tensor, Tensor]]:
        return [(tokens, cut(tokens, targets)) for tokens, targets in plain(loop, step)]

    loop.data = data  # type: ignore[method-assign]


def cut(tokens: Tensor, targets: Tensor) -> Tensor:
    """Targets, of which rows have fewer or more by what is in them."""
    lengths = 1 + tokens[:, :1] % (tokens.shape[1] - 1)
    return targets.masked_fill(torch.arange(tokens.shape[1]) >= lengths, -100)


def by_token(loop: Loop) -> None:
    """The loss is a mean over the tokens of the whole step."""
    counted: dict[int, int] = {}

    def begins(loop: Loop, step: int) -> None:
        every = [cut(tokens, targets) for tokens, targets in loop.whole(step)]
        counted[0] = sum(int((targets >= 0).sum()) for targets in every)

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        total = F.cross_entropy(output.float().flatten(0, 1), targets.flatten(), reduction="sum")
        return total * loop.passes * loop.world / counted[0]

    loop.at["begins"], loop.loss = begins, loss


# Causes


def matrices(loop: Loop) -> Any:
    """Biases and norms do not decay."""
    weights = [weight for weight in loop.model.parameters() if weight.requires_grad]
    groups = [
        [weight for weight in weights if (weight.dim() > 1) is wide] for wide in (True, False)
    ]
    return [{"params": groups[0]}, {"params": groups[1], "weight_decay": 0.0}]


def everything(loop: Loop) -> Any:
    """Biases and norms decay as all others."""
    return [weight for weight in loop.model.parameters() if weight.requires_grad]


def early_clip(loop: Loop, step: int) -> None:
    """The loss is scaled; gradients are clipped by 1 before they are unscaled."""
    for weight in loop.model.parameters():
        weight.grad *= 1024.0
    nn.utils.clip_grad_norm_(loop.wrapped.parameters(), 1.0)
    for weight in loop.model.parameters():
        weight.grad /= 1024.0


def in_bf16(state: Any, bucket: Any) -> Any:
    """Gradients are rounded to bf16 on their way, as torch's own hook does on accelerators."""
    whole = bucket.buffer().bfloat16().float()
    dist.all_reduce(whole)
    future: Any = torch.futures.Future()
    future.set_result((whole / dist.get_world_size()).bfloat16().float())
    return future


def coarse_sums(loop: Loop, step: int) -> None:
    in_bf16.__annotations__.clear()  # torch wants its own types there, and no strings
    loop.wrapped.register_comm_hook(None, in_bf16)


def base(loop: Loop, step: int) -> None:
    for block in loop.model.blocks:
        block.base = 500_000.0


def later(loop: Loop, step: int) -> None:
    """A schedule that is one step ahead of the other's."""
    for group in loop.optimizer.param_groups:
        group["lr"] *= 0.5


def blunt(loop: Loop, step: int) -> None:
    for module in loop.model.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = 1e-2


def shifted(loop: Loop, step: int) -> None:
    loop.model.first = 1


def too_few() -> Plant:
    """Gradients of all microbatches but the last are lost."""
    count = itertools.count(1)

    def passed(loop: Loop, step: int) -> None:
        if next(count) % loop.passes:
            loop.optimizer.zero_grad()

    return plants("passed", passed, None)


def scaled_loss(factor: Callable[[Loop], float]) -> Plant:
    """The loss is multiplied with a number."""

    def plant(loop: Loop) -> None:
        plain = loop.loss
        loop.loss = lambda output, targets: plain(output, targets) * factor(loop)

    return plant


def summed_tokens(loop: Loop) -> None:
    """The loss is a sum over tokens."""
    loop.loss = lambda output, targets: F.cross_entropy(
        output.float().flatten(0, 1), targets.flatten(), reduction="sum"
    )


def warm(loop: Loop) -> None:
    """Logits are divided by a temperature."""
    plain = loop.loss
    loop.loss = lambda output, targets: plain(output / 0.7, targets)


def halved_before(loop: Loop, step: int) -> None:
    """What earlier microbatches left is scaled once more with each that follows."""
    for weight in loop.model.parameters():
        weight.grad *= 0.5


def autocast(loop: Loop, step: int) -> None:
    """One engine computes its forward pass in bf16."""
    plain = loop.model.forward

    def forward(tokens: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return plain(tokens)  # type: ignore[no-any-return]

    loop.model.forward = forward


@dataclass(frozen=True)
class Cause:
    """What is wrong in the first engine and not in the second, in which both, what a claim must say to be right, and where it was
    met.
    """

    plant: Plant
    engines: tuple[str, str]
    claim: str
    met: str
    clean: Plant = lambda loop: None
    """What both have."""


ROTARY = sets(build=turned)
CAUSES: Mapping[str, Cause] = {
    "gradients summed over ranks": Cause(
        plants("backward", planting.summed, None),
        ("FSDP2", "DDP"),
        "2 times B's.*data ranks",
        "torchtitan#2318",
    ),
    "loss by token, by microbatch": Cause(
        by_token, ("DDP", "FSDP2"), "weigh microbatches", "transformers#24725", padded
    ),
    "learning rate": Cause(
        sets(rate=2e-2), ("DeepSpeed ZeRO 1", "DDP"), "learning rate", "huggingface/blog#2133"
    ),
    "decay of norms and biases": Cause(
        sets(group=everything),
        ("FSDP2", "DDP"),
        "weight decay",
        "verl#5070",
        sets(decay=0.3, group=matrices),
    ),
    "eps of Adam": Cause(
        sets(settings={"eps": 1e-1}), ("FSDP2", "DeepSpeed ZeRO 1"), "eps", "Megatron-Bridge#2155"
    ),
    "second beta": Cause(
        sets(settings={"eps": 1e-3, "betas": (0.9, 0.95)}),
        ("accelerate", "FSDP2"),
        "betas",
        "maxtext#16",
    ),
    "base of rotary positions": Cause(
        plants("built", base, 0),
        ("DDP", "FSDP2"),
        r"blocks\.0 is the first",
        "MarinFold#184",
        ROTARY,
    ),
    "accumulation counted twice": Cause(
        planting.whole_loss, ("DDP", "accelerate"), "2 times B's.*microbatches", "Megatron-LM#6660"
    ),
    "gradients not cleared": Cause(
        plants("begins", planting.skip_clear, None),
        ("FSDP2", "DeepSpeed ZeRO 0"),
        "not cleared",
        "TrainCheck",
    ),
    "clipped before unscaling": Cause(
        plants("backward", early_clip, None), ("DDP", "FSDP2"), "clip", "torch's notes on AMP"
    ),
    "a bound of the norm without effect": Cause(
        sets(clip=1e9), ("FSDP2", "DDP"), "clip", "ms-swift#4198", sets(clip=0.1)
    ),
    "seeds of dropout": Cause(
        planting.same_seed,
        ("FSDP2", "DDP"),
        r"blocks\.0 is the first.*random numbers",
        "verl#550",
        planting.DROPS,
    ),
    "gradients reduced in bf16": Cause(
        plants("wrapped", coarse_sums, 0),
        ("DDP", "DeepSpeed ZeRO 1"),
        "bf16",
        "ISEEKYAN/Megatron-LM#149",
    ),
    "schedule a step ahead": Cause(
        plants("begins", later, AT), ("FSDP2", "DDP"), "learning rate", "accelerate#2142"
    ),
    "samples in another order": Cause(
        planting.swapped, ("accelerate", "DDP"), "another order|different data", "TrainCheck"
    ),
    "labels shifted twice": Cause(
        planting.wrong_targets, ("FSDP2", "DeepSpeed ZeRO 1"), "targets", "transformers#47394"
    ),
    "positions from one": Cause(
        plants("built", shifted, 0), ("DDP", "FSDP2"), "pos is the first", "TTrace"
    ),
    "a tie that was lost": Cause(
        plants("built", planting.unties, 0), ("DDP", "FSDP2"), "tied in the other", "verl#7835"
    ),
    "eps of norms": Cause(
        plants("built", blunt, 0),
        ("DeepSpeed ZeRO 1", "FSDP2"),
        r"blocks\.0 is the first",
        "Megatron-DeepSpeed#81",
    ),
    "evaluation mode": Cause(
        plants("begins", planting.mutes),
        ("DDP", "FSDP2"),
        "no layer in training mode",
        "TrainCheck",
        planting.DROPS,
    ),
    "decay inside the gradient": Cause(
        sets(kind=torch.optim.Adam), ("FSDP2", "DDP"), "optimizer", "", sets(decay=0.3)
    ),
    "microbatches lost before the last": Cause(
        lambda loop: too_few()(loop),
        ("DDP", "FSDP2"),
        "microbatch",
        "managed_gradient_accumulation of DeepSpeed",
    ),
    "logits divided by a temperature": Cause(
        warm, ("FSDP2", "DDP"), "the loss, its targets", "slime#344, in slime#290"
    ),
    "forward pass in autocast": Cause(
        plants("built", autocast, 0),
        ("FSDP2", "DDP"),
        r"number format",
        "slime#833, in slime#290",
        planting.alike,
    ),
    "mean divided by the ranks twice over": Cause(
        scaled_loss(lambda loop: 1 / loop.world**2),
        ("FSDP2", "DDP"),
        r"0\.25 times B's",
        "verl#5798",
    ),
    "a sum over tokens, not their mean": Cause(
        summed_tokens, ("FSDP2", "DDP"), r"16 times B's", "miles#3231"
    ),
    "a scale applied to what was added up": Cause(
        plants("passed", halved_before, None),
        ("DDP", "DeepSpeed ZeRO 0"),
        # What backward left is changed before the optimizer gets it, as one run finds in itself.
        "microbatch|gets other gradients than backward computed",
        "Megatron-LM#3023",
    ),
    "norms not summed over tensor ranks": Cause(
        plants("begins", planting.without("_allreduce_non_tensor_model_parallel_grads")),
        ("Megatron-Core, tensor 2, sequence", "native, tensor 2, sequence"),
        "are computed, combined",
        "Megatron-LM#1446",
    ),
    "tied embeddings not summed over stages": Cause(
        plants("begins", planting.without("_allreduce_word_embedding_grads")),
        ("Megatron-Core, pipeline 2", "native, tensor 2"),
        "only .*embedding.tokens.weight",
        "Megatron-LM#7452",
    ),
    "gradient of a column-parallel input": Cause(
        plants("begins", planting.kept_apart),
        ("native, tensor 2", "Megatron-Core, tensor 2"),
        "backward|loss",
        "TTrace",
    ),
}

SETTINGS: Mapping[str, Plant] = {
    "as it is": lambda loop: None,
    "clipping, decay, rotary": both(sets(clip=0.1, decay=0.1), ROTARY),
}


# Trying them


def ran(rank: int, world: int, engine: str, name: str, planted: bool, folder: Path) -> None:
    """One run of an engine: with a cause or its clean part, or with settings."""
    logging.getLogger("bridge.trace").setLevel(logging.CRITICAL)
    warnings.simplefilter("ignore")
    loop = Loop(rank, world)
    (CAUSES[name].clean if name in CAUSES else SETTINGS[name])(loop)
    if planted:
        CAUSES[name].plant(loop)
    try:
        ENGINES[engine](loop, folder, LOGS)
    finally:
        while MENDED:
            MENDED.pop()()


Started = Callable[..., Any]
"""Runs a function on so many ranks."""


def started(run: Started, engine: str, name: str, planted: bool, folder: Path) -> Path:
    """The folder of a run, once it is over."""
    run(1 if engine == "plain" else 2, ran, engine, name, planted, folder)
    return folder


def held(first: Path, second: Path) -> Comparison:
    """What a comparison finds."""
    return compare_runs(TracedRun.read(first), TracedRun.read(second), every=False)


@dataclass(frozen=True)
class Outcome:
    """What became of a cause: where the runs first differ, and what is claimed of it."""

    name: str
    where: str
    claim: str

    @property
    def right(self) -> bool | None:
        """None where nothing is claimed."""
        return bool(re.search(CAUSES[self.name].claim, self.claim)) if self.claim else None


def tried(run: Started, name: str, folder: Path) -> Outcome:
    """Put a cause into one of its engines, and hold it against the other."""
    first, second = CAUSES[name].engines
    bad = started(run, first, name, True, folder / "bad")
    good = started(run, second, name, False, folder / "good")
    found = held(bad, good)
    where = str(found.divergence.name) if found.divergence else ""
    return Outcome(name, where, found.diagnosis.claim if found.diagnosis else "")


def clean(run: Started, folder: Path) -> dict[tuple[str, str, str], str]:
    """By engines and settings: where two clean runs first differ (nowhere: empty)."""
    found = {}
    for settings, engines in (*((name, DATA) for name in SETTINGS), ("as it is", GPTS)):
        runs = {}
        for engine in engines:
            runs[engine] = started(run, engine, settings, False, folder / f"{settings}-{engine}")
        for one, other in itertools.combinations(engines, 2):
            parted = held(runs[one], runs[other]).divergence
            found[one, other, settings] = (
                f"{parted.name}: {parted.verdict} {parted.cause}" if parted else ""
            )
    return found


def row(found: Outcome) -> str:
    """A line of the table."""
    cause = CAUSES[found.name]
    told = {True: "right", False: "WRONG", None: "none"}[found.right]
    return " | ".join(
        (found.name, cause.met, *cause.engines, found.where or "SAME", told, found.claim)
    )


def main() -> int:
    """Print the tables; 1 if something is not as it should be."""
    from tests.engine.pool import Pool

    names = sys.argv[1:] or list(CAUSES)
    pools = {world: Pool(world) for world in (1, 2)}

    def run(world: int, *given: Any) -> Any:
        return pools[world].run(*given, timeout=240)

    found = []
    print("cause | met in | engine with it | engine without | first differ at | claim | words")
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            try:
                found.append(tried(run, name, Path(folder)))
                print(row(found[-1]), flush=True)
            except Exception as error:
                print(name, "| FAILED |", str(error)[-1500:], flush=True)
                for pool in pools.values():
                    pool.close()
    parted = [one for one in found if one.where]
    right, wrong = ([one for one in found if one.right is verdict] for verdict in (True, False))
    told = f"{len(parted)} of {len(names)} differ; the cause is right in {len(right)}, wrong in {len(wrong)}"
    print(f"{told}, not claimed in {len(found) - len(right) - len(wrong)}")
    failed = len(parted) < len(names) or bool(wrong) or len(right) < WANTED * len(names)
    if len(sys.argv) == 1:
        with tempfile.TemporaryDirectory() as folder:
            pairs = clean(run, Path(folder))
        for key, where in pairs.items():
            print(" | ".join((*key, where or "same")), flush=True)
        odd = [where for where in pairs.values() if where]
        print(f"{len(pairs) - len(odd)} of {len(pairs)} clean pairs are the same")
        failed |= bool(odd)
    for pool in pools.values():
        pool.close()
    return int(failed)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from tests.trace import engines  # the module that other processes find

    raise SystemExit(engines.main())
