"""Parts (c), (d) and (e) of run.py: the speed and the memory of a Llama of 374 million parameters, several ways in turns."""

from __future__ import annotations

import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tasks import ADAMW, SETTINGS, Here, Loop, Row, at_least, at_most, llama_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from bridge.engine import initialize
from bridge.plan.plan import Debug, Plan

LARGE: Mapping[str, int] = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 32_000,
}
SMALL: Mapping[str, int] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 512,
}
"""With --dry."""
SEQUENCE, FEW = 2048, 4
"""Tokens of a sequence, and sequences of a step that is too short to keep a device busy."""
PEAK = 989e12
"""FLOP/s of dense products in bf16, by the data sheet of the H100 and of the H200 (both SXM)."""
GOALS = {"ZeRO 0": 0.97, "ZeRO 3": 0.95}
"""The least speed wanted, as a share of the plain loop's."""
WATCHED = {"attach, default": 1.05, "attach, level 2": 0.0}
"""The largest ratio to an unwatched step wanted; 0: none."""
SECONDS = 20.0
"""For measuring, within the limit of a part."""
MEBIBYTE = 2**20


@dataclass
class Way:
    """A way to make a step: the function, and the bytes that its state takes (by the device, and by the engine's layout)."""

    step: Callable[[], Any]
    kept: int = 0
    said: int = 0
    peak: int = 0


class Measured:
    """Several ways to make the same step, measured in turns."""

    def __init__(self, here: Here, rows: int) -> None:
        self.here, self.rows, self.ways = here, rows, dict[str, Way]()
        self.times: dict[str, list[float]] = {}
        self.sizes = SMALL if here.dry else LARGE
        self.sequence = 128 if here.dry else SEQUENCE
        generator = torch.Generator().manual_seed(7)
        tokens = torch.randint(
            self.sizes["vocab_size"], (rows, self.sequence), generator=generator
        ).to(here.device)
        self.batch = {"input_ids": tokens, "labels": tokens}

    def model(self) -> nn.Module:
        """The same each time."""
        return llama_of(self.here, self.sizes)

    def add(self, name: str, build: Callable[[], tuple[Callable[[], Any], int]]) -> Row | None:
        """Build a way, and make two steps to warm up. Return a row if this fails."""
        import traceback

        gc.collect()
        before = self.here.allocated()
        try:
            step, said = build()
            for _ in range(2):
                step()
            self.here.wait()
        except Exception as error:
            return Row(
                name, f"failed: {type(error).__name__}", good=False, error=traceback.format_exc()
            )
        gc.collect()
        self.ways[name] = way = Way(step, self.here.allocated() - before, said)
        if not self.here.dry:
            start = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            step()
            self.here.wait()
            way.peak = way.kept + torch.cuda.max_memory_allocated() - start
        return None

    def run(self, steps: int = 3, seconds: float = SECONDS) -> None:
        """Measure rounds of `steps` steps of each way. The first of a round changes from round to round."""
        gc.collect()
        gc.disable()
        try:
            self._run(steps, seconds)
        finally:
            gc.enable()

    def _run(self, steps: int, seconds: float) -> None:
        names = list(self.ways)
        self.times = {name: [] for name in names}
        until, most = time.perf_counter() + seconds, 2 if self.here.dry else 30
        for number in range(most):
            at = number % len(names)
            for name in (*names[at:], *names[:at]):
                self.here.wait()
                start = time.perf_counter()
                for _ in range(steps):
                    self.ways[name].step()
                self.here.wait()
                self.times[name].append((time.perf_counter() - start) / steps)
            if time.perf_counter() > until:
                return

    def ratios(self, name: str, to: str) -> list[float]:
        """Times of `name` as ratios to those of `to`, round by round, in increasing order."""
        return sorted(
            mine / theirs for mine, theirs in zip(self.times[name], self.times[to], strict=True)
        )

    def seconds(self, name: str) -> float:
        """The median time of a step."""
        return statistics.median(self.times[name])

    def flops(self) -> float:
        """Floating-point operations of a step: for each token, 6 for each weight of a product, and 12 for each layer, element of
        its width and position of the sequence.
        """
        sizes, tokens = self.sizes, self.rows * self.sequence
        hidden, layers = sizes["hidden_size"], sizes["num_hidden_layers"]
        shared = (
            2 * hidden * hidden * (1 + sizes["num_key_value_heads"] / sizes["num_attention_heads"])
        )
        weights = (
            layers * (shared + 3 * hidden * sizes["intermediate_size"])
            + hidden * sizes["vocab_size"]
        )
        return tokens * (6 * weights + 12 * layers * hidden * self.sequence)


def many(here: Here) -> int:
    """Sequences of a step that keeps the device busy, as many as its memory has room for."""
    return (
        2
        if here.dry
        else 16
        if torch.cuda.get_device_properties(0).total_memory > 100 * 2**30
        else 8
    )


def speed(here: Here) -> Iterator[Row]:
    """Steps of the engine at ZeRO 0 and 3, of a plain loop, of DDP and of FSDP2, in turns."""
    if not here.dry:
        yield Row(
            "product of two random matrices of 8192 x 8192 in bf16", _rate() / 1e12, "TFLOP/s"
        )
    dist.init_process_group(here.backend, init_method="tcp://127.0.0.1:29515", rank=0, world_size=1)
    found = Measured(here, many(here))
    builders: dict[str, Callable[[], tuple[Callable[[], Any], int]]] = {
        "plain loop": lambda: _plain(found),
        "DDP": lambda: _replicated(found),
        "FSDP2": lambda: _sharded(found),
        **{f"ZeRO {level}": lambda level=level: _native(found, level) for level in (0, 3)},  # type: ignore[misc]
    }
    for name, build in builders.items():
        failed = found.add(name, build)
        if failed is not None:
            yield failed
    found.run(steps=2)
    yield from _table(found, "plain loop", GOALS)
    for name in ("plain loop", "FSDP2", "ZeRO 0", "ZeRO 3"):
        if name in found.ways:
            yield _gaps(found, name)


def short_steps(here: Here) -> Iterator[Row]:
    """The same with few sequences, where the host sets the pace: no goal."""
    found = Measured(here, 1 if here.dry else FEW)
    builders: dict[str, Callable[[], tuple[Callable[[], Any], int]]] = {
        "plain loop": lambda: _plain(found),
        **{f"ZeRO {level}": lambda level=level: _native(found, level) for level in range(4)},  # type: ignore[misc]
    }
    for name, build in builders.items():
        failed = found.add(name, build)
        if failed is not None:
            yield failed
    found.run(seconds=SECONDS / 2)
    yield from _table(found, "plain loop", {})
    for name in ("plain loop", "ZeRO 0", "ZeRO 3"):
        if name in found.ways:
            yield _gaps(found, name)


def _table(found: Measured, base: str, goals: Mapping[str, float]) -> Iterator[Row]:
    tokens = found.rows * found.sequence
    for name, way in found.ways.items():
        seconds = found.seconds(name)
        if found.here.dry:
            yield Row(name, "not run")
            continue
        text = f"{tokens / seconds:,.0f} tokens/s, {seconds * 1e3:.1f} ms, MFU {found.flops() / seconds / PEAK:.1%}"
        text += (
            f", peak {way.peak / MEBIBYTE:,.0f} MiB, between steps {way.kept / MEBIBYTE:,.0f} MiB"
        )
        yield Row(name, text + (f" (layout: {way.said / MEBIBYTE:,.0f})" if way.said else ""))
        if name != base and base in found.ways:
            share = [1 / ratio for ratio in reversed(found.ratios(name, base))]
            title = f"{name}: speed as a share of the {base} ({share[0]:.3f} to {share[-1]:.3f})"
            middle = statistics.median(share)
            yield at_least(title, middle, goals[name]) if name in goals else Row(title, middle)


def _rate(size: int = 8192, times: int = 10) -> float:
    one, other = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in "ab")
    for _ in range(3):
        one @ other
    start, end = (torch.cuda.Event(enable_timing=True) for _ in "ab")
    start.record()
    for _ in range(times):
        one @ other
    end.record()
    end.synchronize()
    return 2 * size**3 * times / (start.elapsed_time(end) / 1e3)


def _loss(model: Any, batch: Any) -> torch.Tensor:
    found: torch.Tensor = model(**batch).loss
    return found


def _plain(found: Measured) -> tuple[Callable[[], Any], int]:
    loop = Loop(found.model(), _loss, half=True)
    return lambda: float(loop.step([found.batch])), 0  # as loops do that report their loss


def _replicated(found: Measured) -> tuple[Callable[[], Any], int]:
    model = found.model()
    loop = Loop(model, _loss, half=True)  # casts the model first, so that DDP reduces in bf16
    loop.called = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return lambda: float(loop.step([found.batch])), 0


def _sharded(found: Measured) -> tuple[Callable[[], Any], int]:
    model: Any = found.model()
    mesh = init_device_mesh(found.here.device.type, (1,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.model.layers:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    loop = Loop(model, _loss, half=False)
    return lambda: float(loop.step([found.batch])), 0


def _native(found: Measured, level: int) -> tuple[Callable[[], Any], int]:
    plan = Plan.of({**SETTINGS, "zero.stage": level, "precision.compute": "bf16"})
    engine = initialize(found.model(), plan, device=found.here.device)
    return lambda: engine.train_batch([dict(found.batch)]), sum(engine.layout.bytes().values())


def _gaps(found: Measured, name: str) -> Row:
    """The share of two steps in which no kernel runs."""
    title = f"{name}: share of the time without a kernel"
    if found.here.dry:
        return Row(title, "not run")
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(2):
            found.ways[name].step()
        found.here.wait()
    spans = _spans(seen)
    busy, reached = 0.0, spans[0][0]
    for start, end in spans:
        busy += max(0, end - max(start, reached))
        reached = max(reached, end)
    whole = reached - spans[0][0]
    return Row(
        title, f"{1 - busy / whole:.1%} of {whole / 2e3:.1f} ms, {len(spans) // 2} kernels a step"
    )


def _spans(seen: Any) -> Sequence[tuple[float, float]]:
    """Start and end of everything that ran on the device, in microseconds, in order."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    ran = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    return sorted((event["ts"], event["ts"] + event["dur"]) for event in ran)


def attached(here: Here) -> Iterator[Row]:
    """A plain loop with attach as it is by default, and with logs at level 2, as ratios to one without."""
    found = Measured(here, many(here))
    with tempfile.TemporaryDirectory() as folder:
        logs = Debug(layer_outputs=2, layer_gradients=2, all_param_gradients=2, param_update=2)
        watches: dict[str, Any] = {
            "no attach": None,
            "attach, default": (None, None),
            "attach, level 2": (logs, folder),
        }
        for name, watch in watches.items():
            failed = found.add(name, lambda watch=watch: (_users(found, watch), 0))  # type: ignore[misc]
            if failed is not None:
                yield failed
        found.run(steps=2)
        for name in ("no attach", "attach, default"):
            if name in found.ways:
                yield _gaps(found, name)
        for name, bound in WATCHED.items():
            if name not in found.ways:
                continue
            ratios = found.ratios(name, "no attach")
            title = f"{name}: time of a step to one without"
            middle = statistics.median(ratios)
            title += f" ({ratios[0]:.3f} to {ratios[-1]:.3f})" if not here.dry else ""
            yield (
                Row(title, "not run")
                if here.dry
                else at_most(title, middle, bound)
                if bound
                else Row(title, middle)
            )


def _users(found: Measured, watch: Any) -> Callable[[], Any]:
    """A loop as its users write it: weights in fp32, and autocast."""
    from bridge.trace import attach

    model = found.model()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
    if watch is not None:
        attach(model, watch[0], watch[1], optimizer=optimizer, invariants=watch[0] is None)

    def step() -> Any:
        optimizer.zero_grad()
        with torch.autocast(found.here.device.type, torch.bfloat16):
            loss = model(**found.batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return float(loss.detach())

    return step


def dropin_speed(here: Here) -> Iterator[Row]:
    """A script for DeepSpeed on our engine at ZeRO 0 and 3, in turns with a plain loop."""
    found = Measured(here, many(here))
    failed = found.add("plain loop", lambda: _plain(found))
    if failed is not None:
        yield failed
    for level in (0, 3):
        failed = found.add(f"ZeRO {level}", lambda level=level: _script(found, level))  # type: ignore[misc]
        if failed is not None:
            yield failed
    found.run(steps=2, seconds=SECONDS / 2)
    yield from _table(found, "plain loop", GOALS)


def _script(found: Measured, level: int) -> tuple[Callable[[], Any], int]:
    import compat.deepspeed as deepspeed

    config = {
        "train_micro_batch_size_per_gpu": found.rows,
        "zero_optimization": {"stage": level},
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": dict(ADAMW)},
    }
    model = found.model()
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )

    def step() -> Any:
        loss = engine(**found.batch).loss
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    return step, sum(engine.native.layout.bytes().values())
