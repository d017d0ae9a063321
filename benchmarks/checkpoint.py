"""What a checkpoint costs: saved and loaded with digests, without them, and by torch.distributed.checkpoint."""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from unittest.mock import patch

from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from bridge.checkpoint import digests
from bridge.engine import checkpoint, initialize
from bridge.engine.models.gpt import GPT, Architecture, mean_cross_entropy
from bridge.engine.runner import Engine
from bridge.plan.plan import Plan

TURNS = 5


def engine_of(width: int) -> Engine:
    """A GPT of two blocks in fp32 with AdamW, whose state is three times its weights."""
    shape = Architecture(
        layers=2, hidden=width, heads=8, kv_heads=8, ffn=4 * width, vocab=8192, sequence=64
    )
    plan = Plan.of({"precision.compute": "fp32", "optimizer.name": "adamw", "batch.micro": 1})
    return initialize(GPT(shape), plan, mean_cross_entropy)


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Wall and processor time in seconds."""
    wall, processor = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - processor


def without_digests(work: Callable[[], object]) -> Callable[[], object]:
    """The same work, as if digests were free."""

    def run() -> object:
        with (
            patch.object(digests, "digest_of", lambda path: "0" * 64),
            patch.object(digests, "verify_digests"),
        ):
            return work()

    return run


def main(width: int) -> None:
    """Print a table, the ways taking turns."""
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    engine = engine_of(width)
    tensors = {part.key: part.tensor.detach() for part in checkpoint._unique(engine, ())}
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    folder = Path(tempfile.mkdtemp())
    ours, bare, theirs = (str(folder / name) for name in ("ours", "bare", "theirs"))
    works: dict[str, Callable[[], object]] = {
        "save": lambda: engine.save_checkpoint(ours, "tag"),
        "save without digests": without_digests(lambda: engine.save_checkpoint(bare, "tag")),
        "save by torch": lambda: dcp_save(tensors, checkpoint_id=theirs, no_dist=True),
        "load": lambda: engine.load_checkpoint(ours, "tag"),
        "load without digests": without_digests(lambda: engine.load_checkpoint(bare, "tag")),
        "load by torch": lambda: dcp_load(tensors, checkpoint_id=theirs, no_dist=True),
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in works}
    for _ in range(TURNS):
        for name, work in works.items():
            found[name].append(timed(work))
    shutil.rmtree(folder)
    print(f"{size / 2**20:.0f} MiB\n\n| what | wall time | processor time |\n|---|---|---|")
    for name, times in found.items():
        wall, processor = (median(column) for column in zip(*times, strict=True))
        print(f"| {name} | {wall * 1000:.0f} ms | {processor * 1000:.0f} ms |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=512)
    main(parser.parse_args().width)
