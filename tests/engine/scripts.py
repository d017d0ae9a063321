"""Scripts as people write them, in `scripts/`: run as plain torch in one process, and on the native engine with two ranks at each
level of ZeRO. Only the import differs: `import deepspeed` becomes `import compat.deepspeed as deepspeed`, or the plain torch
of `plain_deepspeed.py`.

`python -m tests.engine.scripts [NAME ...]` prints a table: the largest relative difference of losses and norms in the first
step and in all, of final weights, and what a script notes itself; `refused` with the reason, where a script says it must be.
"""

from __future__ import annotations

import re
import sys
import tempfile
import types
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bridge.errors import BridgeError
from tests.engine.pool import Pool

FOLDER = Path(__file__).parent / "scripts"
RANKS, LEVELS, STEPS = 2, (0, 1, 2, 3), 3
MICROBATCHES, ROWS = 4, 2
"""Microbatches of a step over all ranks, and samples in each."""
TOLERANCE = (1e-9, 1e-6)
"""Largest relative differences: in the first step, and later, when rounding has gone through the optimizer. A script may have
others.
"""
SMALL = 1e-6
"""Norm below which a weight's difference counts by itself: biases of keys, whose gradients are nothing but rounding."""
IMPORTS = re.compile(r"^(\s*)(import|from) deepspeed\b", re.MULTILINE)


@dataclass
class Run:
    """What a script is told, and what it hands back: losses and norms by step, notes and final weights."""

    rank: int
    world: int
    level: int
    folder: Path
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    steps: int = STEPS
    _open: list[float] = field(default_factory=list)

    def config(self, **more: Any) -> dict[str, Any]:
        """A config of two samples in a microbatch and eight in a step, with AdamW; `more` is added or taken instead."""
        params = {
            "lr": 0.01,
            "betas": [0.9, 0.95],
            "eps": 1e-6,
            "weight_decay": 0.1,
            "torch_adam": True,
        }
        return {
            "train_batch_size": MICROBATCHES * ROWS,
            "train_micro_batch_size_per_gpu": ROWS,
            "gradient_clipping": 0.5,
            "optimizer": {"type": "AdamW", "params": params},
            "zero_optimization": {"stage": self.level},
            **more,
        }

    def mine(self, items: Sequence[Any]) -> list[Any]:
        """This rank's share."""
        return list(items[self.rank :: self.world])

    def tokens(
        self, step: int, length: int = 12, vocab: int = 64, number: int = MICROBATCHES
    ) -> list[Tensor]:
        """This rank's microbatches of a step: numbers of words."""
        generator = torch.Generator().manual_seed(100 + step)
        return self.mine(
            [torch.randint(3, vocab, (ROWS, length), generator=generator) for _ in range(number)]
        )

    def numbers(self, step: int, *shape: int) -> list[Tensor]:
        """This rank's microbatches of a step: rows of numbers."""
        generator = torch.Generator().manual_seed(200 + step)
        rows = [
            torch.randn(ROWS, *shape, generator=generator, dtype=torch.float64)
            for _ in range(MICROBATCHES)
        ]
        return self.mine(rows)

    def loss(self, value: Any) -> None:
        """Note the loss of a microbatch."""
        self._open.append(float(value.detach()))

    def step(self, engine: Any) -> None:
        """Note that a step has ended."""
        self.losses.append(sum(self._open) / len(self._open))
        self.norms.append(float(engine.get_global_grad_norm()))
        self._open.clear()

    def note(self, name: str, value: Any) -> None:
        """Note something that must be equal too: numbers, mean over ranks, or anything else, equal on all."""
        self.notes[name] = value.detach().clone().tolist() if isinstance(value, Tensor) else value

    def end(self, deepspeed: Any, engine: Any) -> None:
        """Note the final weights, read as a script does."""
        named = dict(engine.module.named_parameters())
        with deepspeed.zero.GatheredParameters(list(named.values())):
            self.weights |= {name: weight.detach().clone() for name, weight in named.items()}


def names() -> list[str]:
    """All scripts."""
    return sorted(path.stem for path in FOLDER.glob("*.py"))


def loaded(name: str, stack: str) -> types.ModuleType:
    """A script with its import changed."""
    path = FOLDER / f"{name}.py"

    def changed(found: re.Match[str]) -> str:
        indent, word = found.groups()
        return (
            f"{indent}import {stack} as deepspeed" if word == "import" else f"{indent}from {stack}"
        )

    text, number = IMPORTS.subn(changed, path.read_text())
    assert number, f"{name}: does not import deepspeed"
    module = types.ModuleType(f"script_{name}")
    sys.modules[module.__name__] = module
    exec(compile(text, str(path), "exec"), module.__dict__)
    return module


def native(rank: int, world: int, name: str, level: int, folder: Path) -> Run | str:
    """A script on the native engine; the first line of the reason where it is refused."""
    run = Run(rank, world, level, folder)
    # The real DeepSpeed, which ran in this process for other tests, leaves its own product here at
    # ZeRO 3 (partition_parameters.py), and that one asks weights for what only its own have.
    torch.nn.functional.linear = torch._C._nn.linear
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            loaded(name, "compat.deepspeed").main(run)
        except BridgeError as error:
            return str(error).splitlines()[0]
    return run


def plain(name: str, folder: Path) -> Run:
    """A script in one process with plain torch."""
    run = Run(0, 1, 0, folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded(name, "tests.engine.plain_deepspeed").main(run)
    return run


def over_ranks(runs: Sequence[Run]) -> Run:
    """What the ranks say together: the mean of their losses, and what must be the same on all."""
    first = runs[0]
    for other in runs[1:]:
        assert other.norms == first.norms
        assert all(
            torch.equal(other.weights[name], weight) for name, weight in first.weights.items()
        )
    losses = [sum(values) / len(runs) for values in zip(*(run.losses for run in runs), strict=True)]
    notes = {name: _joined([run.notes[name] for run in runs]) for name in first.notes}
    return Run(0, 1, first.level, first.folder, losses, first.norms, notes, first.weights)


def _joined(values: list[Any]) -> Any:
    if isinstance(values[0], float):
        return sum(values) / len(values)
    if isinstance(values[0], list):
        return [_joined(list(parts)) for parts in zip(*values, strict=True)]
    assert all(value == values[0] for value in values)
    return values[0]


@dataclass(frozen=True)
class Difference:
    """The largest relative differences from plain torch."""

    first: float
    later: float
    weights: float
    notes: float

    def small(self, tolerance: tuple[float, float] = TOLERANCE) -> bool:
        """Whether it is rounding."""
        return (
            self.first < tolerance[0] and max(self.later, self.weights, self.notes) < tolerance[1]
        )


def difference(found: Run, expected: Run) -> Difference:
    """How far a run is from the reference."""
    assert len(found.losses) == len(expected.losses) == len(found.norms) > 0
    assert found.weights.keys() == expected.weights.keys() and found.weights
    assert found.notes.keys() == expected.notes.keys()
    steps = [
        max(_far(one, other), _far(norm, reference))
        for one, other, norm, reference in zip(
            found.losses, expected.losses, found.norms, expected.norms, strict=True
        )
    ]
    weights = [
        float(
            (weight - expected.weights[name]).norm()
            / expected.weights[name].norm().clamp(min=SMALL)
        )
        for name, weight in found.weights.items()
    ]
    return Difference(
        steps[0], max(steps), max(weights), max(_all_far(found.notes, expected.notes), default=0.0)
    )


def _far(found: float, expected: float) -> float:
    return abs(found - expected) / max(abs(expected), 1e-12)


def _all_far(found: Any, expected: Any) -> Iterator[float]:
    if isinstance(expected, Mapping):
        assert found.keys() == expected.keys()
        for name in expected:
            yield from _all_far(found[name], expected[name])
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            yield from _all_far(one, other)
    elif isinstance(expected, float):
        yield _far(found, expected)
    else:
        assert found == expected, (found, expected)


def compared(
    pool: Pool, name: str, levels: Sequence[int] = LEVELS
) -> Iterator[tuple[int, Difference | str]]:
    """A script at each level: how far it is from plain torch, or the reason why it is refused."""
    with tempfile.TemporaryDirectory() as folder:
        reference = None if expected_of(name)[0] else plain(name, Path(folder))
        for level in levels:
            place = Path(folder) / str(level)
            place.mkdir()
            runs = pool.run(native, name, level, place)
            said = [run for run in runs if isinstance(run, str)]
            if said:
                yield level, said[0]
            else:
                assert reference is not None, (
                    f"{name}: ran at level {level}, but says that it is refused"
                )
                yield level, difference(over_ranks(runs), reference)


def expected_of(name: str) -> tuple[str | None, tuple[float, float]]:
    """The reason for which a script says that it is refused, and how far it may be from plain torch."""
    module = loaded(name, "tests.engine.plain_deepspeed")
    return getattr(module, "REFUSED", None), getattr(module, "TOLERANCE", TOLERANCE)


def good(name: str, outcome: Difference | str) -> bool:
    """Whether a script came out as it should."""
    refused, tolerance = expected_of(name)
    if isinstance(outcome, str):
        return refused is not None and refused in outcome
    return outcome.small(tolerance)


def main(chosen: Sequence[str]) -> int:
    """Print the table; 1 if anything differs."""
    torch.set_num_threads(1)
    pool, wrong = Pool(RANKS), 0
    print("| script | level | outcome | | first step | all steps | weights | notes |", flush=True)
    for name in chosen or names():
        try:
            found = dict(compared(pool, name))
        except Exception as error:  # the others are to run all the same
            wrong += 1
            print(f"| {name} | | FAILED | {type(error).__name__}: {error} |", flush=True)
            continue
        for level, outcome in found.items():
            word = "refused" if isinstance(outcome, str) else "ran"
            wrong += not good(name, outcome)
            told = (
                outcome
                if isinstance(outcome, str)
                else " | ".join(f"{value:.0e}" for value in astuple(outcome))
            )
            print(
                f"| {name} | {level} | {word if good(name, outcome) else 'WRONG'} | {told} |",
                flush=True,
            )
    pool.close()
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
