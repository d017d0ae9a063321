"""Pairs of generated trainings: clean ones, which must be called equal, and ones with a change in one step, found in that step.

`python -m tests.trace.pairs [NUMBER [SEED]]` prints what is not as it must be, and counts.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from bridge.trace import attach
from bridge.trace.run import TracedRun
from bridge.trace.run_comparison import compare_runs
from tests.trace.planting import LOGS

BATCH, TOKENS, WORDS, STEPS = 8, 6, 23, 4
FORMATS: Mapping[str, tuple[torch.dtype, torch.dtype | None]] = {
    "fp64": (torch.float64, None),
    "fp32": (torch.float32, None),
    "bf16 autocast": (torch.float32, torch.bfloat16),
    "bf16 weights": (torch.bfloat16, None),
    "fp16 scaled": (torch.float32, torch.float16),
}
"""By name: the format of the weights, and that of autocast."""
OPTIMIZERS: Mapping[str, Callable[..., Any]] = {
    "SGD": torch.optim.SGD,
    "momentum": lambda weights, lr, **more: torch.optim.SGD(weights, lr, momentum=0.9, **more),
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "amsgrad": lambda weights, lr, **more: torch.optim.Adam(weights, lr, amsgrad=True, **more),
    "RMSprop": torch.optim.RMSprop,
    "Adagrad": torch.optim.Adagrad,
    "NAdam": torch.optim.NAdam,
    "Adafactor": torch.optim.Adafactor,
}
CHANGES = ("weights", "output", "gradient", "loss", "rate", "data")


class Block(nn.Module):
    """A norm and a feed-forward part."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
        )
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x + self.factor * self.down(nn.functional.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Model(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.tok, self.head = nn.Embedding(WORDS, width), nn.Linear(width, WORDS)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Training:
    """A drawn training; `passes` is its layout."""

    format: str
    optimizer: str
    width: int
    layers: int
    rate: float
    clip: float | None
    seed: int

    @classmethod
    def draw(cls, draw: Random) -> Training:
        """Draw one."""
        return cls(
            draw.choice([*FORMATS]),
            draw.choice([*OPTIMIZERS]),
            draw.choice([8, 16, 32]),
            draw.randint(1, 4),
            10 ** draw.uniform(-4, -2),
            draw.choice([None, 0.5]),
            draw.randrange(1000),
        )

    @property
    def rounding(self) -> float:
        """A unit in the last place of the coarsest format."""
        weights, inner = FORMATS[self.format]
        return float(torch.finfo(inner or weights).eps)

    def run(
        self,
        folder: Path,
        passes: int,
        alike: bool,
        change: str = "",
        step: int = 0,
        size: float = 0.0,
    ) -> None:
        """Train, with each step in so many passes. `change` is made in one step, by `size` of what it changes."""
        dtype, inner = FORMATS[self.format]
        torch.manual_seed(self.seed)
        model = Model(self.width, self.layers).to(dtype)
        more = {} if alike else {"foreach": True}
        optimizer = OPTIMIZERS[self.optimizer](model.parameters(), self.rate, **more)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=self.format == "fp16 scaled")
        tracer = attach(
            model, LOGS, folder, optimizer=optimizer, accumulation=passes, invariants=False
        )
        for now in range(1, STEPS + 1):
            by = 1 + size if now == step else 1.0
            ids = torch.randint(
                WORDS, (BATCH, TOKENS + 1), generator=torch.Generator().manual_seed(now)
            )
            if now == step and change == "data":
                ids[0, 0] = (ids[0, 0] + 1) % WORDS
            if now == step and change == "weights":
                for weight in model.parameters():
                    weight.data.mul_(by)
            model.blocks[-1].factor = by if change == "output" else 1.0
            optimizer.param_groups[0]["lr"] = self.rate * (by if change == "rate" else 1.0)
            optimizer.zero_grad()
            for part in ids.chunk(passes):
                context = torch.autocast("cpu", inner) if inner else nullcontext()
                with context:
                    logits = model(part[:, :-1]).flatten(0, 1)
                    loss = nn.functional.cross_entropy(
                        logits.float() if inner else logits, part[:, 1:].flatten()
                    )
                loss = loss / passes * (by if change == "loss" else 1.0)
                scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            if change == "gradient":
                model.head.weight.grad.mul_(by)
            if self.clip:
                nn.utils.clip_grad_norm_(model.parameters(), self.clip)
            scaler.step(optimizer)
            scaler.update()
        tracer.remove()


def wrong_pairs(seeds: range, folder: Path, counts: Counter[str]) -> Iterator[str]:
    """What is not as it must be in the pairs with these seeds, each a clean one and one with a change."""
    for seed in seeds:
        draw = Random(seed)
        training = Training.draw(draw)
        passes, other = draw.choice([1, 2, 4]), draw.choice([1, 2, 4])
        places = [folder / f"{name}{seed}" for name in ("a", "b", "bad")]
        change, step = draw.choice(CHANGES), draw.randint(2, STEPS)
        size = draw.choice([20 * training.rounding, 100 * training.rounding, 0.5])
        training.run(places[0], passes, True)
        training.run(places[1], other, False)
        training.run(places[2], passes, True, change, step, size)
        runs = [TracedRun.read(place) for place in places]
        counts["clean"] += 1
        clean = compare_runs(runs[0], runs[1], every=False).divergence
        if clean is not None:
            counts["clean, called different"] += 1
            yield f"{seed}: {training}, {passes} and {other} passes: {clean}"
        found = compare_runs(runs[2], runs[0], every=False).divergence
        if found is None and moved_by(runs[2], runs[0]) < 10 * training.rounding:
            counts["changed, by less than ten roundings"] += 1
            continue
        counts["changed"] += 1
        if found is None or found.name.step != step:
            counts["changed, not found in its step"] += 1
            yield f"{seed}: {training}, {change} by {size:.2g} in step {step}: {found}"


def moved_by(changed: TracedRun, run: TracedRun) -> float:
    """The distance of the first logged tensor that a change moves."""
    lines = compare_runs(changed, run, every=True).lines
    return next((line.distance for line in lines if line.verdict != "equal"), 0.0)


def main() -> None:
    """Print what is not as it must be, and counts."""
    number, first = (*map(int, sys.argv[1:3]), *(40, 0)[len(sys.argv) - 1 :])[:2]
    counts: Counter[str] = Counter()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for problem in wrong_pairs(range(first, first + number), Path(folder), counts):
            print(problem, flush=True)
    print(dict(counts))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
