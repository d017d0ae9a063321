"""The most bytes of tensors that are alive in a training step of a model of transformers, beside DDP's and FSDP2's.

Every storage that an operation makes is counted until it is freed or resized. Prints the table of README.md, row by row.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.append(str(Path(__file__).resolve().parents[1]))

import huggingface
from engine import RANKS, TIMEOUT, line

from bridge.engine import initialize
from bridge.plan.plan import Plan
from tests.engine.pool import Pool

MEBIBYTE = 2**20
OTHERS = ("ddp", "fsdp2", "fsdp2 whole")


class Peak(TorchDispatchMode):
    """Bytes of storages that are alive now, and the most there were."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count what the operation made."""
        found = func(*args, **(kwargs or {}))
        self.count(found)
        return found

    def count(self, values: Any) -> None:
        """Count storages that were not counted yet."""
        for tensor in tree_leaves(values):
            inner = getattr(tensor, "_local_tensor", tensor)
            if isinstance(inner, Tensor):
                with (
                    torch._C.DisableTorchFunctionSubclass()
                ):  # also those of weights that are not whole now
                    self._seen(inner.untyped_storage())

    def _seen(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = 0
            weakref.finalize(storage, self.resized, key, None)
        self.resized(key, storage.nbytes())

    def resized(self, key: int, size: int | None) -> None:
        """A storage has another size, or is gone."""
        self.now += (size or 0) - self._sizes.get(key, 0)
        self.most = max(self.most, self.now)
        if size is None:
            self._sizes.pop(key, None)
        else:
            self._sizes[key] = size


@contextmanager
def resizing(peak: Peak) -> Iterator[None]:
    """Count storages that are resized in place, as FSDP2 frees what it gathered."""
    usual = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, size: int) -> Any:
        found = usual(storage, size)
        if storage._cdata in peak._sizes:
            peak.resized(storage._cdata, size)
        return found

    torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = usual  # type: ignore[method-assign]


def measured(rank: int, world: int, name: str, blocks: int, kind: str) -> tuple[int, int, int]:
    """The most bytes in the third step, those alive before it, and what the engine's layout says of these (others: 0)."""
    huggingface.SIZES = {**huggingface.SIZES, "num_hidden_layers": blocks}  # type: ignore[misc]
    gc.collect()
    before = {id(tensor) for tensor in _tensors()}
    data = huggingface.batch(rank, world, False)
    said = 0
    step: Callable[[], Any]
    if name in OTHERS:
        step = huggingface.torch_step(kind, name, data)
    else:
        engine = initialize(
            huggingface.model(kind),
            Plan.of({"zero.stage": int(name[-1]), "optimizer.lr": 1e-3, "optimizer.clip": 1.0}),
        )
        said = sum(engine.layout.bytes().values())
        step = lambda: engine.train_batch([dict(data)])  # noqa: E731
    for _ in range(2):
        step()
    gc.collect()
    peak = Peak()
    peak.count([tensor for tensor in _tensors() if id(tensor) not in before])
    kept = peak.now
    with resizing(peak), peak:
        step()
    return peak.most, kept, said


def _tensors() -> list[Tensor]:
    return [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]


def main() -> None:
    """Print one row for each engine and level."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kind", default="llama")
    parser.add_argument("--blocks", type=int, action="append")
    given = parser.parse_args()
    print(
        line(("blocks", "engine", "most in a step", "between steps", "by its layout")), flush=True
    )
    print("|---|---|---|---|---|")
    for blocks in given.blocks or (2, 10):
        for name in (*(f"zero {level}" for level in range(4)), *OTHERS):
            pool = Pool(RANKS)  # nothing is left of the one before
            most, kept, said = pool.run(measured, name, blocks, given.kind, timeout=TIMEOUT)[0]
            pool.close()
            sizes = [f"{size / MEBIBYTE:.1f} MiB" if size else "" for size in (most, kept, said)]
            title = huggingface.TITLES.get(name, name.replace("zero", "ZeRO"))
            print(line((str(blocks), title, *sizes)), flush=True)


if __name__ == "__main__":
    main()
