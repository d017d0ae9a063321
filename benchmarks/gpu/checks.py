"""Parts (a), (b) and (e) of run.py: whether numbers on the device are those of plain torch. Nothing here is timed."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from tasks import (
    ADAMW,
    CASES,
    LEVELS,
    MICROBATCHES,
    Case,
    Here,
    Outcome,
    Row,
    engine_of,
    gpt,
    holds,
    native,
    plain,
    trained,
)
from torch import Tensor, nn
from torch.nn import functional as F

from bridge.engine import comm, initialize
from bridge.engine.environment import Environment
from bridge.plan.plan import Plan

EXACT, HALF = (1e-6, 1e-3), (1e-3, 1e-1)
"""Bounds of the distance from plain torch (`Outcome.apart`): in fp32, and where both compute in bf16."""
HOME = Path(__file__).resolve().parents[2]


def _bounded(what: str, case: Case, found: Outcome, expected: Outcome, half: bool = False) -> Row:
    losses, weights = found.apart(expected, case)
    first, second = HALF if half else EXACT
    return Row(
        what,
        f"{losses:.1e}, {weights:.1e}",
        "",
        f"<= {first:g}, {second:g}",
        losses <= first and weights <= second,
    )


def environment(here: Here) -> Iterator[Row]:
    """The card and the software."""
    yield Row("torch", torch.__version__)
    if here.dry:
        yield Row("card", "not run")
        return
    card = torch.cuda.get_device_properties(0)
    yield Row(
        "card",
        f"{card.name}, {card.total_memory / 2**30:.0f} GiB, {card.multi_processor_count} multiprocessors",
    )
    yield Row(
        "CUDA, NCCL", f"{torch.version.cuda}, {'.'.join(map(str, torch.cuda.nccl.version()))}"
    )


def numbers(here: Here) -> Iterator[Row]:
    """ZeRO 0 to 3 on one rank, against plain torch: relative differences of losses, and of weights after the last step."""
    return _against_plain(here, native)


def _against_plain(here: Here, train: Callable[[Here, Case, int, bool], Outcome]) -> Iterator[Row]:
    for name, make in CASES.items():
        case = make(here)
        for half in (False, True):
            expected = plain(case, half)
            for level in LEVELS:
                title = f"{name}, {'bf16' if half else 'fp32'}, ZeRO {level}"
                yield _bounded(title, case, train(here, case, level, half), expected, half)


class Masked(nn.Module):
    """A layer with dropout that keeps a digest of each mask."""

    def __init__(self, seen: list[int]) -> None:
        super().__init__()
        self.linear, self.seen = nn.Linear(64, 64), seen

    def forward(self, inputs: Tensor) -> Tensor:
        """Drop a half."""
        mask = F.dropout(torch.ones_like(inputs), 0.5, self.training)
        self.seen.append(hash(mask.bool().cpu().numpy().tobytes()))
        found: Tensor = self.linear(inputs) * mask
        return found


LAYERS, ROUNDS = 3, 2


def _masks(here: Here, level: int, seed: int = 1, **values: Any) -> list[int]:
    seen: list[int] = []
    torch.manual_seed(3)
    model = nn.Sequential(*(Masked(seen) for _ in range(LAYERS))).to(here.device)
    plan = {"zero.stage": level, "batch.accumulation": MICROBATCHES, "optimizer.lr": 0.0, **values}
    engine = initialize(model, Plan.of(plan), F.mse_loss, seed=seed, device=here.device)
    batch = (torch.ones(4, 64, device=here.device), torch.zeros(4, 64, device=here.device))
    seen.clear()  # what a trial before training drew
    for _ in range(ROUNDS):
        engine.train_batch([batch] * MICROBATCHES)
    return seen


def dropout(here: Here) -> Iterator[Row]:
    """Masks differ by step, layer and microbatch, and are the same in a second run, at every level and in recomputation."""
    first = _masks(here, 0)
    number = LAYERS * ROUNDS * MICROBATCHES
    yield holds(
        "masks of all steps, layers and microbatches differ",
        len(set(first)) == len(first) == number,
        len(set(first)),
    )
    yield holds("a second run draws the same", _masks(here, 0) == first)
    yield holds("ZeRO 3 draws the same", _masks(here, 3) == first)
    yield holds("another seed draws others", not set(_masks(here, 0, seed=2)) & set(first))
    again = _masks(
        here,
        0,
        **{"recompute.granularity": "full", "recompute.method": "uniform", "recompute.layers": 1},
    )
    yield holds(
        "recomputation draws each a second time",
        sorted(again) == sorted([*first, *first]),
        len(again),
    )


def streams(here: Here) -> Iterator[Row]:
    """A step on a stream of its own, with pinned inputs, gives the same numbers."""
    case = gpt(here)
    expected = native(here, case, 3)
    pinned = Case(
        case.build,
        case.loss,
        case.loss_fn,
        [tuple(_host(here, part) for part in batch) for batch in case.batches],
    )
    memory = "host" if here.dry else "pinned"
    yield _bounded(f"inputs in {memory} memory, ZeRO 3", case, native(here, pinned, 3), expected)
    if here.dry:
        yield Row("inputs in pinned memory, and a stream of its own", "not run")
        return
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        found = native(here, pinned, 3)
    side.synchronize()
    yield _bounded("a stream of its own, ZeRO 3", case, found, expected)


def _host(here: Here, tensor: Tensor) -> Tensor:
    found = tensor.cpu()
    return found if here.dry else found.pin_memory()


def devices(here: Here) -> Iterator[Row]:
    """A rank computes on the device of its local rank, which is torch's current device too."""
    if here.dry:
        yield Row("current device", "not run")
        return
    case = gpt(here)
    plan = Plan.of({"optimizer.lr": 1e-3, "batch.accumulation": MICROBATCHES})
    engine = initialize(case.build(), plan, case.loss_fn)
    index, current = engine.device.index, torch.cuda.current_device()
    yield holds(
        "the engine's device is the current one, with its index",
        index == current == 0,
        f"{engine.device}, {current}",
    )
    # A launcher that shows each rank one device of its own.
    only = Environment(0, 1, local_rank=3)
    found = initialize(case.build(), plan, case.loss_fn, environment=only).device
    yield holds(
        "local rank 3 that sees one device takes it", found == torch.device("cuda:0"), str(found)
    )


def memory(here: Here) -> Iterator[Row]:
    """Bytes that an engine keeps between steps, against its layout; and a checkpoint: saved, loaded, gone on with."""
    case = gpt(here)
    for level in LEVELS:
        engine = engine_of(here, case, level, half=True)
        trained(engine, case)
        found, said = sum(engine.bytes().values()), sum(engine.layout.bytes().values())
        yield holds(
            f"bytes between steps as in the layout, ZeRO {level}",
            found <= said,
            f"{found} of {said}",
        )
    with tempfile.TemporaryDirectory() as folder:
        engine = engine_of(here, case, 3)
        trained(engine, case)
        engine.save_checkpoint(folder, "one")
        expected = trained(engine, case)
        places = {"a CPU": Here.of(dry=True)} | ({} if here.dry else {"the device": here})
        for title, place in places.items():
            other_case = gpt(place)
            other = engine_of(place, other_case, 1)
            other.load_checkpoint(folder, "one")
            found = trained(other, other_case)
            found.weights = {name: weight.to(here.device) for name, weight in found.weights.items()}
            yield _bounded(
                f"goes on from a checkpoint, ZeRO 3 to 1 on {title}",
                case,
                found,
                expected,
                half=place is not here,
            )


def collectives(here: Here) -> Iterator[Row]:
    """One rank in a group over NCCL: values of all ranks, an asynchronous wait, and leaving."""
    _join(here, 0, 1)
    yield holds("values of all ranks", comm.everyones({"rank": 0}) == [{"rank": 0}])
    tensor = torch.ones(1024, device=here.device)
    if not here.dry:
        torch.cuda._sleep(1_000_000_000)  # type: ignore[no-untyped-call]
    start = time.perf_counter()
    wait = comm._waiting(dist.all_reduce(tensor, async_op=True), "late sum", [0])
    wait()
    waited = time.perf_counter() - start
    comm.arrive()
    arrived = time.perf_counter() - start
    if here.dry:
        yield Row("a wait that does not block the host, and the arrival that does", "not run")
    else:
        yield holds("a wait does not block the host", waited < 0.1, f"{waited * 1e3:.1f} ms")
        yield holds("the arrival does", arrived > 0.2, f"{arrived * 1e3:.0f} ms")
    yield holds("nothing is under way afterwards", not comm._ON_DEVICE and not comm._UNDER_WAY)
    comm.leave()
    yield holds("the group is left", comm.rank_and_world() is None)


def _join(here: Here, rank: int, world: int, port: int = 29_513, backend: str = "") -> None:
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group(
        backend or here.backend, init_method=address, rank=rank, world_size=world
    )


LAYOUTS = {
    **{f"ZeRO {level}": {"zero__stage": level} for level in LEVELS},
    "tensor 2": {"parallel__tensor": 2},
    "tensor 2 and sequence": {"parallel__tensor": 2, "parallel__sequence": True},
    "pipeline 2": {"parallel__pipeline": 2},
}


def ranks(here: Here) -> Iterator[Row]:
    """Two ranks that share the device over gloo, against plain torch in one process."""
    with tempfile.TemporaryDirectory() as folder:
        context = processes.spawn(_rank, (here.dry, folder), nprocs=2, join=False)
        assert context is not None
        try:
            while not context.join(timeout=5):
                pass
        except Exception as error:
            yield Row("two ranks", "failed", good=False, error=str(error))
        case = gpt(here)
        expected = plain(case, half=False)
        for name, rank in itertools.product(LAYOUTS, range(2)):
            title, path = f"{name}, rank {rank}", _answer_of(folder, name, rank)
            if not path.exists():
                yield Row(title, "no answer", good=False)
                continue
            answer = torch.load(path, map_location=here.device)
            if isinstance(answer, str):
                yield Row(title, "failed", good=False, error=answer)
                continue
            trained_there = Outcome(answer["losses"], answer["weights"])
            yield _bounded(f"{title}: against one process", case, trained_there, expected)
            yield holds(f"{title}: as many bytes sent as the layout says", answer["traffic"])


def _answer_of(folder: str, name: str, rank: int) -> Path:
    return Path(folder) / f"{name}, {rank}"


def _rank(rank: int, dry: bool, folder: str) -> None:
    """Train in every layout; each rank writes its answer, or the traceback."""
    import traceback

    here = Here.of(dry)
    os.environ.update(LOCAL_RANK="0")
    comm.connect(rank, 2, "127.0.0.1:29514", "gloo", 30)
    for name, values in LAYOUTS.items():
        try:
            answer: Any = _in_layout(here, rank, **values)
        except Exception:
            answer = traceback.format_exc()
        path = _answer_of(folder, name, rank)
        unfinished = path.with_suffix(".part")
        torch.save(answer, unfinished)
        unfinished.rename(path)
        if isinstance(answer, str):
            break  # the other rank may wait in a collective
    os._exit(0)


def _in_layout(here: Here, rank: int, **values: Any) -> dict[str, Any]:
    """Each data rank takes half of the rows of every microbatch."""
    case = gpt(here)
    if "zero__stage" in values:
        own = [tuple(part[rank : rank + 1] for part in batch) for batch in case.batches]
        case = Case(case.build, case.loss, case.loss_fn, own)
    engine = engine_of(here, case, **{"level": values.pop("zero__stage", 0), **values})
    found = trained(engine, case)
    engine.comm.ledger.clear()
    tokens = case.batches[0][0].numel()
    engine.train_batch(case.batches[:MICROBATCHES])
    sent = {name: total for name, total in engine.comm.ledger.totals.items() if total.count}
    said = {name: total for name, total in engine.traffic(tokens).items() if total.count}
    return {"losses": found.losses, "weights": found.weights, "traffic": sent == said}


def dropin_numbers(here: Here) -> Iterator[Row]:
    """A script for DeepSpeed on our engine, against plain torch."""
    return _against_plain(here, _script)


def _script(here: Here, case: Case, level: int, half: bool) -> Outcome:
    import compat.deepspeed as deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICROBATCHES,
        "zero_optimization": {"stage": level},
        "bf16": {"enabled": half},
        "data_types": {"grad_accum_dtype": "fp32"},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": dict(ADAMW)},
    }
    model = case.build()
    start = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    if (
        half
    ):  # as DeepSpeed does, masters begin with weights that were rounded; plain torch's do not
        _exact(engine.native, start)
    losses, total = [], 0.0
    for number, batch in enumerate(case.batches, 1):
        loss = case.loss(engine, batch)
        engine.backward(loss)
        engine.step()
        total += float(loss.detach()) / MICROBATCHES
        if number % MICROBATCHES == 0:
            losses.append(total)
            total = 0.0
    return Outcome(losses, {name: whole.clone() for name, whole in engine.native.state_dict()})


def _exact(engine: Any, start: dict[str, Tensor]) -> None:
    """Set the masters of an engine on one rank to these weights."""
    for flat, shard in zip(engine.layout.flats, engine.weights.shards, strict=True):
        for slot in flat.slots:
            shard[slot.start : slot.stop].copy_(start[slot.parameter.name].view(-1))
    engine.weights.reload()


def marked(here: Here) -> Iterator[Row]:
    """Tests that are marked `gpu`."""
    files = [
        str(path)
        for path in sorted((HOME / "tests").rglob("test_*.py"))
        if "mark.gpu" in path.read_text()
    ]
    line = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *files]
    done = subprocess.run(line, cwd=HOME, capture_output=True, text=True)
    last = (done.stdout.strip().splitlines() or ["no output"])[-1].strip("= ")
    # All of them skipped is code 0, too.
    passed = done.returncode == 0 and " passed" in last
    good = None if here.dry and done.returncode in (0, 5) else passed
    error = "" if done.returncode in (0, 5) else done.stdout[-6000:] + done.stderr[-2000:]
    yield Row("tests marked gpu", last, "", "pass", good, error)
