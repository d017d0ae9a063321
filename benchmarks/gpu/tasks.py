"""What the parts of run.py share: rows of the table, the device, small models and loops of plain torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bridge.engine import initialize
from bridge.engine.models.gpt import GPT, Architecture, mean_cross_entropy
from bridge.engine.runner import Engine
from bridge.plan.plan import Plan

LEVELS = (0, 1, 2, 3)
STEPS, MICROBATCHES = 4, 2
SETTINGS: Mapping[str, Any] = {
    "optimizer.name": "adamw",
    "optimizer.lr": 1e-3,
    "optimizer.betas": (0.9, 0.95),
    "optimizer.eps": 1e-6,
    "optimizer.weight_decay": 0.1,
    "optimizer.clip": 1.0,
}
ADAMW: Mapping[str, Any] = {
    name: SETTINGS[f"optimizer.{name}"] for name in ("lr", "betas", "eps", "weight_decay")
}


SHAPE = Architecture(
    layers=3, hidden=64, heads=4, kv_heads=2, ffn=128, vocab=256, sequence=32, tied=False
)


@dataclass(frozen=True)
class Row:
    """One line of the table. `good` is None where a row only informs."""

    what: str
    value: float | int | str
    unit: str = ""
    goal: str = ""
    good: bool | None = None
    error: str = ""


@dataclass(frozen=True)
class Here:
    """The device of this process. With `dry`, it is the CPU, and sizes are small."""

    device: torch.device
    dry: bool
    shape: Architecture = SHAPE

    @classmethod
    def of(cls, dry: bool) -> Here:
        """The first accelerator, with exact fp32 products; or the CPU."""
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        return cls(torch.device("cpu" if dry else "cuda:0"), dry)

    @property
    def backend(self) -> str:
        """The communication library for tensors on this device."""
        return "gloo" if self.dry else "nccl"

    def wait(self) -> None:
        """Wait until the device has done everything."""
        if not self.dry:
            torch.cuda.synchronize()

    def allocated(self) -> int:
        """Bytes of tensors on the device; 0 on a CPU, where torch does not count them."""
        return 0 if self.dry else torch.cuda.memory_allocated()


Check = Callable[[Here], Iterator[Row]]
Batch = Any


def at_most(what: str, value: float, bound: float, unit: str = "") -> Row:
    """A row whose value must not exceed `bound`; NaN does."""
    return Row(what, value, unit, f"<= {bound:g}", value <= bound)


def at_least(what: str, value: float, bound: float, unit: str = "") -> Row:
    """A row whose value must be at least `bound`."""
    return Row(what, value, unit, f">= {bound:g}", value >= bound)


def holds(what: str, good: bool, value: float | int | str = "") -> Row:
    """A row about something that is so or is not."""
    return Row(what, value if value != "" else ("yes" if good else "no"), "", "yes", good)


@dataclass(frozen=True)
class Case:
    """A model and its batches: `loss` computes the loss in plain torch, and `loss_fn` is the engine's own argument."""

    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Batch], Tensor]
    loss_fn: Any
    batches: Sequence[Batch]


def tokens_of(shape: Architecture, rows: int, number: int, device: torch.device) -> list[Tensor]:
    """Random tokens, the same on every device."""
    generator = torch.Generator().manual_seed(5)
    return [
        torch.randint(shape.vocab, (rows, shape.sequence), generator=generator).to(device)
        for _ in range(number)
    ]


def gpt(here: Here, rows: int = 2) -> Case:
    """The engine's own GPT, a chain of layers."""
    batches = [
        (tokens, tokens.roll(-1, 1))
        for tokens in tokens_of(here.shape, rows, STEPS * MICROBATCHES, here.device)
    ]

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return mean_cross_entropy(model(batch[0]), batch[1])

    return Case(lambda: GPT(here.shape).to(here.device), loss, mean_cross_entropy, batches)


def llama(here: Here, rows: int = 2) -> Case:
    """A Llama of transformers, which the engine cuts into layers."""
    shape = here.shape
    sizes = {
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
    }
    sizes |= {
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "vocab_size": shape.vocab,
    }
    batches = [
        {"input_ids": tokens, "labels": tokens}
        for tokens in tokens_of(shape, rows, STEPS * MICROBATCHES, here.device)
    ]
    return Case(
        lambda: llama_of(here, sizes), lambda model, batch: model(**batch).loss, None, batches
    )


def llama_of(here: Here, sizes: Mapping[str, int]) -> nn.Module:
    """A Llama with weights in fp32, made on the device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    with here.device:
        model = LlamaForCausalLM(
            LlamaConfig(
                **sizes, max_position_embeddings=4096, tie_word_embeddings=False, use_cache=False
            )
        )
    return model.to(torch.float32).train()


CASES: Mapping[str, Callable[[Here], Case]] = {"GPT": gpt, "Llama": llama}


@dataclass
class Outcome:
    """Losses of all steps, and the weights after the last one, in fp32."""

    losses: list[float]
    weights: dict[str, Tensor]

    def apart(self, other: Outcome, case: Case) -> tuple[float, float]:
        """The largest relative difference of losses; and the distance of all weights from the other's, as a share of the way that
        these have come from the start. Infinite where a loss is not finite or where the two have other weights.
        """
        if self.weights.keys() != other.weights.keys():
            return math.inf, math.inf
        differences = [
            abs(mine - theirs) / abs(theirs)
            for mine, theirs in zip(self.losses, other.losses, strict=True)
        ]
        # `max` passes over a NaN.
        losses = max(differences) if all(map(math.isfinite, differences)) else math.inf
        start = dict(case.build().named_parameters())
        far = sum(
            float((mine - other.weights[name]).double().square().sum())
            for name, mine in self.weights.items()
        )
        way = sum(
            float((whole - start[name].detach()).double().square().sum())
            for name, whole in other.weights.items()
        )
        return losses, math.sqrt(far / way)


class Loop:
    """A loop of plain torch: fused AdamW on masters in fp32, gradients clipped by one norm. With `half`, the model computes in
    bf16 and its gradients are summed in fp32, as mixed precision is usually done by hand.
    """

    def __init__(
        self, model: nn.Module, loss: Callable[[Any, Batch], Tensor], half: bool, called: Any = None
    ) -> None:
        self.model, self.loss, self.half, self.called = model, loss, half, called or model
        self.weights = list(model.parameters())
        self.masters = (
            [nn.Parameter(weight.detach().float().clone()) for weight in self.weights]
            if half
            else self.weights
        )
        if half:  # weights alone: rotary frequencies would lose digits
            for weight in self.weights:
                weight.data = weight.data.to(torch.bfloat16)
        self.optimizer = torch.optim.AdamW(self.masters, fused=True, **ADAMW)

    def step(self, batches: Sequence[Batch]) -> Tensor:
        """Train once on all `batches`, each of which counts alike. Return the mean loss, without waiting for the device."""
        total = torch.zeros((), device=self.weights[0].device)
        for batch in batches:
            loss = self.loss(self.called, batch) / len(batches)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
            self._sum_up()
        nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.half:
            with torch.no_grad():
                torch._foreach_copy_(self.weights, self.masters)
        return total

    def _sum_up(self) -> None:
        if not self.half:
            return
        for weight, master in zip(self.weights, self.masters, strict=True):
            if weight.grad is not None:
                master.grad = (
                    weight.grad.float() if master.grad is None else master.grad.add_(weight.grad)
                )
                weight.grad = None


def plain(case: Case, half: bool) -> Outcome:
    """Train a case with plain torch."""
    loop = Loop(case.build(), case.loss, half)
    losses = [
        float(loop.step(case.batches[at : at + MICROBATCHES]))
        for at in range(0, len(case.batches), MICROBATCHES)
    ]
    names = [name for name, _ in loop.model.named_parameters()]
    return Outcome(
        losses,
        {name: master.detach().clone() for name, master in zip(names, loop.masters, strict=True)},
    )


def engine_of(here: Here, case: Case, level: int, half: bool = False, **values: Any) -> Engine:
    """The native engine on a case; `values` are plan values, with two underscores for a dot."""
    plan = {**SETTINGS, "zero.stage": level, "batch.accumulation": MICROBATCHES}
    plan |= {"precision.compute": "bf16"} if half else {}
    plan |= {name.replace("__", "."): value for name, value in values.items()}
    return initialize(case.build(), Plan.of(plan), case.loss_fn, device=here.device)


def native(here: Here, case: Case, level: int, half: bool = False, **values: Any) -> Outcome:
    """Train a case with the native engine."""
    return trained(engine_of(here, case, level, half, **values), case)


def trained(engine: Engine, case: Case) -> Outcome:
    """Train a case with an engine that exists."""
    losses = [
        engine.train_batch(case.batches[at : at + MICROBATCHES])
        for at in range(0, len(case.batches), MICROBATCHES)
    ]
    return Outcome(losses, {name: whole.clone() for name, whole in engine.state_dict()})
