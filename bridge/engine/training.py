"""Training: runs a plan for some steps on a text, and reports each step."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from bridge.checkpoint.groups import check_groups, read_groups as read_groups
from bridge.engine import initialize
from bridge.engine.data import BYTES, Text
from bridge.engine.interface import MICRO, Workload
from bridge.engine.layers import logits_in
from bridge.engine.models.dense import native
from bridge.engine.models.gpt import Architecture, mean_cross_entropy, sum_cross_entropy
from bridge.engine.optimizer import groups_of_file, trainable_names
from bridge.engine.runner import Engine
from bridge.plan.model import Model
from bridge.plan.plan import Plan
from bridge.trace.desync import Policy

TINY = Architecture(layers=4, hidden=128, heads=4, kv_heads=4, ffn=512, vocab=BYTES, sequence=64)
"""The default model, with less than a million parameters."""


@dataclass(frozen=True, slots=True)
class Report:
    """The report of one step: mean loss over all ranks, gradient norm before clipping, learning
    rate, tokens per second over all ranks, and memory of this rank in MiB. Norm and rate are None
    if the engine does not report them.
    """

    step: int
    loss: float
    grad_norm: float | None
    lr: float | None
    loss_scale: float
    tokens_per_second: float
    memory: float
    skipped: int

    def __str__(self) -> str:
        norm = "not told" if self.grad_norm is None else f"{self.grad_norm:.4f}"
        rate = "not told" if self.lr is None else f"{self.lr:.3g}"
        return (
            f"step {self.step}  loss {self.loss:.4f}  grad norm {norm}  lr {rate}"
            f"  loss scale {self.loss_scale:g}  {self.tokens_per_second:.0f} tokens/s  {self.memory:.0f} MiB"
            f"  skipped {self.skipped}"
        )

    def fields(self) -> dict[str, float | int | None]:
        """Return the report as plain values, by name."""
        return asdict(self)


@dataclass
class Training:
    """An engine, and the data on which it trains."""

    engine: Engine
    text: Text
    rows: int

    @classmethod
    def of(
        cls,
        plan: Plan,
        architecture: Architecture = TINY,
        data: Path | None = None,
        seed: int = 1234,
        deterministic: bool = False,
        trace: Path | None = None,
        full: bool = False,
        policy: Policy | None = None,
        folder: Path | None = None,
        alike: Mapping[str, Any] = MappingProxyType({}),
        groups: Path | None = None,
        model: Model | None = None,
    ) -> Training:
        """Build the model, the data and the engine.

        The model is the one in `folder`, the one that `model` describes, or a GPT. `trace`, `full`, `policy` and
        `alike` are passed on to `initialize`. `groups` is a file of parameter groups. Raises
        `BridgeError` if plan, model, data and ranks do not fit each other.
        """
        text = Text.of(data, architecture.sequence, seed)
        loss = sum_cross_entropy if plan.loss == "per_token" else mean_cross_entropy
        module = native(Workload(architecture, seed, model=model, folder=folder))
        rows = read_groups(groups) if groups else ()
        if groups:
            check_groups(rows, trainable_names(module), str(groups))
        watch: dict[str, Any] = {"trace": trace, "full": full, "policy": policy}
        facts = {"length of the text": len(text.content), "deterministic": deterministic, **alike}
        engine = initialize(
            module,
            plan,
            lambda output, targets: loss(logits_in(output), targets),
            seed=seed,
            deterministic=deterministic,
            alike=facts,
            groups=groups_of_file(rows, plan.optimizer),
            **watch,
        )
        return cls(engine, text, plan.batch.micro or MICRO)

    def steps(self, number: int) -> Iterator[Report]:
        """Train until `number` steps are done, where steps before a resume count too. Yield a
        report for each step.
        """
        engine = self.engine
        tokens = self.rows * self.text.sequence * engine.accumulation * engine.data.size
        while engine.progress.steps + engine.progress.skipped < number:
            start = time.perf_counter()
            engine.train_batch(microbatches(self.text, engine, self.rows))
            seconds = time.perf_counter() - start
            yield report_of_step(
                engine, engine.progress.steps + engine.progress.skipped, tokens / seconds
            )


def microbatches(text: Text, engine: Engine, rows: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield this rank's microbatches of `text` for the next step: inputs and targets, each of shape
    (`rows`, `sequence`).
    """
    ranks, rank = engine.data.size, engine.data.index
    for index in range(engine.accumulation):
        # Microbatch `index` of all ranks comes before microbatch `index` + 1 of any. A step
        # thus takes the same samples however many ranks share it.
        first = engine.progress.samples + (index * ranks + rank) * rows
        tokens = torch.stack([text.sample(first + row) for row in range(rows)])
        yield tokens[:, :-1], tokens[:, 1:]


def place() -> torch.device:
    """Return the device of this process: its accelerator, or the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def memory(device: torch.device) -> float:
    """Return the largest amount of memory that this process has used so far, in MiB: memory of the
    accelerator, or of the process if there is no accelerator.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    # getrusage counts in bytes on macOS, and in KiB on Linux.
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def report_of_step(engine: Engine, step: int, tokens_per_second: float) -> Report:
    """Return the report of the engine's last step. `step` is the number of this step."""
    progress = engine.progress
    return Report(
        step=step,
        loss=progress.loss,
        grad_norm=progress.grad_norm,
        lr=progress.lr,
        loss_scale=engine.scaler.scale,
        tokens_per_second=tokens_per_second,
        memory=memory(engine.device),
        skipped=progress.skipped,
    )
