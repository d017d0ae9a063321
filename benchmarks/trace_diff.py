"""What `trace diff` takes: two runs of many steps and tensors, equal up to rounding, compared from the first step to the last.

The logs are written by the tool's own `Log`, of a training that is computed: Adam on tensors that are drawn, whose gradients
in the second run are rounded otherwise. Prints a table; exit code 1 if a bound is missed.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor

from bridge.trace.log import Log
from bridge.trace.placement import Placement
from bridge.trace.record import Name

BOUND = 30.0
"""Seconds that 1,000 steps of 500 tensors may take."""
SHAPE = (8, 32)
SETTINGS = {"group 0.betas": "(0.9, 0.999)", "group 0.eps": 1e-8, "group 0.lr": 1e-4}


class Training:
    """Layers with an output, the gradient of an input, and two parameters each with a gradient: six tensors a layer."""

    def __init__(
        self, folder: Path, tensors: int, level: int, noise: float, fault: int | None
    ) -> None:
        self.layers = [f"layers.{number}" for number in range(tensors // 6)]
        about = {
            "engine": "module",
            "layers": self.layers,
            "mesh": {},
            "accumulation": 1,
            "formats": ["float32"],
        }
        self.log, self.level, self.noise, self.fault = (
            Log(folder, 0, {**about, "settings": SETTINGS}),
            level,
            noise,
            fault,
        )
        self.place = Placement.full(SHAPE)
        self.weights = torch.randn(
            len(self.layers), 2, *SHAPE, generator=torch.Generator().manual_seed(1)
        )
        self.moments = torch.zeros(2, *self.weights.shape)

    def step(self, step: int) -> None:
        """Compute one, and log it."""
        source, own = (
            torch.Generator().manual_seed(step),
            torch.Generator().manual_seed(1000 + step),
        )
        if step:
            outputs = self._drawn(source, own, len(self.layers), *SHAPE)
            inputs = self._drawn(source, own, len(self.layers), *SHAPE)
            gradients = self._drawn(source, own, *self.weights.shape)
            self._add("forward", "output", outputs, step)
            self._add("backward", "input gradient", inputs, step)
            self._hold("reduce", "gradient", gradients, step)
            self._update(gradients, step)
        if step == self.fault:
            self.weights[len(self.layers) // 2] *= 1.01
        self._hold("update" if step else "init", "weight", self.weights, step)
        self.log.write(step)

    def _drawn(self, source: torch.Generator, own: torch.Generator, *shape: int) -> Tensor:
        rounding = self.noise * torch.randn(*shape, generator=own)
        return torch.randn(*shape, generator=source) * (1 + rounding)

    def _update(self, gradients: Tensor, step: int) -> None:
        self.moments[0].lerp_(gradients, 0.1)
        self.moments[1].lerp_(gradients**2, 0.001)
        first, second = self.moments[0] / (1 - 0.9**step), self.moments[1] / (1 - 0.999**step)
        self.weights -= 1e-4 * first / (second.sqrt() + 1e-8)

    def _add(self, phase: str, kind: str, values: Tensor, step: int) -> None:
        for layer, tensor in zip(self.layers, values, strict=True):
            self.log.add(Name(step, phase, layer, None, kind), tensor, self.place, self.level, 0)

    def _hold(self, phase: str, kind: str, values: Tensor, step: int) -> None:
        for layer, both in zip(self.layers, values, strict=True):
            for name, tensor in zip(("weight", "bias"), both, strict=True):
                self.log.add(
                    Name(step, phase, layer, None, kind, name), tensor, self.place, self.level
                )


def written(
    folder: Path, steps: int, tensors: int, level: int, noise: float, fault: int | None = None
) -> Path:
    """A run of so many steps after the state before them."""
    training = Training(folder, tensors, level, noise, fault)
    for step in range(steps + 1):
        training.step(step)
    return folder


def compared(first: Path, second: Path, *options: str) -> tuple[float, float, float, int]:
    """Seconds of the clock and of the processor, the largest memory in MB, and the exit code of the command."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    command = [
        sys.executable,
        "-P",
        "-m",
        "stagebridge",
        "trace",
        "diff",
        str(first),
        str(second),
        *options,
    ]
    code = subprocess.run(command, check=False, stdout=subprocess.DEVNULL).returncode
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - start, processor, after.ru_maxrss / 1024, code


def main() -> int:
    """The table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--tensors", type=int, default=500)
    parser.add_argument("--level", type=int, default=5)
    parser.add_argument(
        "--keep", type=Path, help="write the runs there, or use those that are there"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        place = options.keep or Path(scratch)
        for name, noise, fault in (
            ("a", 0.0, None),
            ("b", 1e-7, None),
            ("bad", 0.0, options.steps // 2),
        ):
            if not (place / name).exists():
                written(place / name, options.steps, options.tensors, options.level, noise, fault)
        rows: dict[str, tuple[str, tuple[str, ...], int]] = {
            "equal up to rounding": ("b", (), 0),
            "part in the middle": ("bad", (), 2),
            "part in the middle, --all": ("bad", ("--all",), 2),
        }
        print(f"{options.steps} steps, {options.tensors // 6 * 6} tensors, level {options.level}")
        print("| runs | clock | processor | largest memory |\n|---|---|---|---|")
        missed = False
        for what, (name, extra, expected) in rows.items():
            clock, processor, memory, code = compared(place / name, place / "a", *extra)
            missed |= code != expected or clock > BOUND
            print(f"| {what} | {clock:.1f} s | {processor:.1f} s | {memory:.0f} MB |", flush=True)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
