"""The device of a rank: which one it is, its generator, and collectives that it waits for while the host goes on."""

from __future__ import annotations

import importlib
import json
import math
import os
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bridge.engine import comm, device, initialize
from bridge.engine.environment import Environment, local_rank
from bridge.engine.joining import join
from bridge.engine.randomness import seed_generators
from bridge.errors import ConfigError
from bridge.plan.plan import Plan
from bridge.trace import attach
from bridge.trace.digest import digest_tensor, hash_bits


class Machine:
    """Several accelerators, as far as torch is asked about them."""

    def __init__(self, count: int, monkeypatch: pytest.MonkeyPatch, current: int = 0) -> None:
        self.current = current
        self.seeds: dict[int, int] = {}
        generators = [
            SimpleNamespace(manual_seed=lambda seed, at=at: self.seeds.update({at: seed}))
            for at in range(count)
        ]
        answers = {
            "is_available": lambda: True,
            "device_count": lambda: count,
            "current_device": lambda: self.current,
        }
        answers |= {"set_device": self._set, "init": lambda: None}
        for name, answer in answers.items():
            monkeypatch.setattr(torch.cuda, name, answer)
        monkeypatch.setattr(torch.cuda, "default_generators", tuple(generators))

    def _set(self, place: torch.device) -> None:
        self.current = place.index


@pytest.mark.parametrize(
    ("count", "current", "rank", "given", "expected"),
    [
        (8, 0, 5, None, 5),
        (8, 0, 5, "cuda", 5),
        (8, 0, 5, "cuda:2", 2),
        (8, 3, 5, None, 3),  # the script's own choice
        (1, 0, 5, None, 0),  # a launcher that shows each rank one device
    ],
)
def test_a_rank_computes_on_the_device_of_its_local_rank(
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    current: int,
    rank: int,
    given: str | None,
    expected: int,
) -> None:
    machine = Machine(count, monkeypatch, current)
    assert device.local(rank, given) == torch.device("cuda", expected)
    assert machine.current == expected
    assert (
        device.backend() == device.backend(torch.device("cuda", 1)) == "nccl"
        and device.backend(torch.device("cpu")) == "gloo"
    )


def test_a_rank_has_its_device_before_it_joins_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    # NCCL gathers objects, as those by which ranks agree, on the current device.
    machine, joined = Machine(8, monkeypatch), list[tuple[int, str]]()

    def connect(rank: int, world: int, address: str | None, backend: str) -> None:
        joined.append((machine.current, backend))
        raise ConnectionRefusedError

    here = Environment(13, 16, 5, "127.0.0.1:1")
    monkeypatch.setattr(comm, "connect", connect)
    with pytest.raises(ConnectionRefusedError):
        join(here)
    machine.current = 0
    with pytest.raises(ConnectionRefusedError):
        initialize(nn.Sequential(nn.Linear(2, 2)), Plan(), environment=here)
    assert joined == [(5, "nccl"), (5, "nccl")]


def test_more_ranks_than_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(4, monkeypatch)
    with pytest.raises(ConfigError, match="LOCAL_RANK: found 4, but this machine has 4 devices"):
        device.local(4)
    assert device.local(4, "cpu") == torch.device("cpu")


def test_a_joined_rank_keeps_its_local_rank() -> None:
    assert local_rank({"LOCAL_RANK": "3", "RANK": "11"}) == 3
    assert local_rank({"SLURM_LOCALID": "2"}) == 2
    assert local_rank({}) == 0


def test_the_generator_of_the_rank_s_own_device_is_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(4, monkeypatch)
    before = torch.get_rng_state()
    seed_generators(7, torch.device("cuda", 2))
    seed_generators(8, torch.device("cpu"))
    torch.set_rng_state(before)
    assert machine.seeds == {2: 7}


class Late:
    """A collective as NCCL has it: its wait returns at once, and the device is done later."""

    def __init__(self, seconds: float) -> None:
        self.until = time.monotonic() + seconds

    def wait(self, limit: object = None) -> None:
        """Only the device would wait."""

    def is_completed(self) -> bool:
        """Whether the device is done."""
        return time.monotonic() > self.until


@pytest.fixture
def forgotten() -> Iterator[None]:
    yield
    comm._ON_DEVICE.clear()
    comm._UNDER_WAY.clear()


def late(name: str, seconds: float, peer: int = 1) -> None:
    work: Any = Late(seconds)
    comm._waiting(work, name, [peer])()


@pytest.mark.usefixtures("forgotten")
def test_the_host_waits_where_it_reads_and_not_before() -> None:
    start = time.monotonic()
    late("reduce", 0.05)
    late("done", 0.0)
    assert time.monotonic() - start < 0.05 and comm.HERE.waiting()[:2] == ("reduce", [1])
    comm.arrive()
    assert time.monotonic() - start >= 0.05 and comm.HERE.waiting()[0] == "" and not comm._ON_DEVICE


@pytest.mark.usefixtures("forgotten")
def test_a_rank_that_never_comes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comm, "TIMEOUT", 0.05)
    late("reduce gradients", 3600, peer=3)
    with pytest.raises(
        comm.LostRank,
        match=r"reduce gradients: rank 3 is gone or silent \(timed out after 0.05 s\)",
    ):
        comm.arrive()


@pytest.mark.usefixtures("forgotten")
def test_what_only_the_device_waits_for_is_reported_to_other_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    store: Any = SimpleNamespace(check=lambda keys: False)
    late("reduce gradients", 3600, peer=3)
    assert '"waits": "reduce gradients"' in comm.HERE.state_as_json(1)
    monkeypatch.setattr(comm, "SILENCE", 0.0)
    watcher = comm.Watcher(store, 0, said.append)
    time.sleep(0.01)
    watcher._look()
    assert said and said[0].startswith(
        "rank 0 waits in 'reduce gradients' for rank 3; rank 3 has not reported anything yet"
    )


@pytest.mark.usefixtures("forgotten")
def test_a_collective_that_hangs_on_the_device_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[str] = []
    monkeypatch.setattr(comm, "PATIENCE", comm.timedelta(seconds=0.02))
    monkeypatch.setattr(comm, "rank_and_world", lambda: (0, 2))
    monkeypatch.setattr(comm.dist, "destroy_process_group", lambda: ends.append("left"))
    monkeypatch.setattr(
        comm.dist.distributed_c10d, "_abort_process_group", lambda: ends.append("aborted")
    )
    monkeypatch.setattr(comm, "_HANDLES", {})
    late("reduce", 3600)
    comm._abandon()
    late("reduce", 0.0)
    comm._abandon()
    assert ends == ["aborted", "left"]


def test_nccl_gives_up_later_than_the_host() -> None:
    assert comm._timeout("nccl") > comm._timeout("gloo") == comm.timedelta(seconds=comm.TIMEOUT)


def test_gloo_sends_what_is_on_a_device_through_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    group = comm.Group((0, 1), 0)
    monkeypatch.setattr(comm.dist, "get_backend", lambda handle: "gloo")
    assert comm._through_host(torch.empty(2, device="meta"), group) and not comm._through_host(
        torch.empty(2), group
    )
    monkeypatch.setattr(comm.dist, "get_backend", lambda handle: "nccl")
    assert not comm._through_host(torch.empty(2, device="meta"), group)


gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")


@gpu
@needs_gpu
def test_a_rank_that_sees_one_device_takes_it_and_makes_it_current() -> None:
    engine = initialize(nn.Linear(4, 4), Plan(), F.mse_loss, environment=Environment(local_rank=0))
    assert engine.device == torch.device("cuda", torch.cuda.current_device())
    assert all(weight.device == engine.device for weight in engine.model.parameters())


@gpu
@needs_gpu
def test_the_script_s_own_random_numbers_go_on_across_a_checkpoint(tmp_path: Path) -> None:
    def engine() -> Any:
        torch.manual_seed(1)
        return initialize(nn.Linear(4, 4), Plan(), F.mse_loss)

    batch = torch.ones(2, 4), torch.zeros(2, 4)
    first = engine()
    first.train_batch([batch])
    first.save_checkpoint(tmp_path)
    expected = torch.rand(8, device="cuda")
    second = engine()
    second.load_checkpoint(tmp_path)
    assert torch.equal(torch.rand(8, device="cuda"), expected)


@gpu
@needs_gpu
def test_dropout_leaves_the_script_s_own_generator_alone() -> None:
    engine = initialize(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), Plan(), F.mse_loss)
    before = torch.cuda.get_rng_state()
    engine.train_batch([(torch.ones(2, 4), torch.zeros(2, 4))])
    assert torch.equal(torch.cuda.get_rng_state(), before)


def waits(step: Any) -> Counter[str]:
    """Where the host waits for the device in a step, and how often."""
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return Counter(
        f"{Path(said.filename).name}:{said.lineno}"
        for said in seen
        if "called a synchronizing" in str(said.message)
    )


def deep(layers: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(layers)))


@gpu
@needs_gpu
@pytest.mark.parametrize("level", [0, 3])
def test_a_step_waits_for_the_device_as_often_in_a_deep_model(level: int) -> None:
    batch = [(torch.ones(2, 64, device="cuda"), torch.zeros(2, 64, device="cuda"))]
    found = []
    for layers in (2, 6):
        engine = initialize(
            deep(layers), Plan.of({"zero.stage": level, "optimizer.clip": 1.0}), F.mse_loss
        )
        engine.train_batch(batch)
        found.append(waits(lambda engine=engine: engine.train_batch(batch)))  # type: ignore[misc]
    assert found[0] == found[1] and found[0].total() <= 2, found


@gpu
@needs_gpu
def test_watching_waits_for_the_device_as_often_in_a_deep_model() -> None:
    inputs, found = torch.ones(2, 64, device="cuda"), []
    for layers in (2, 6):
        model = deep(layers).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        attach(model, optimizer=optimizer)

        def step(model: nn.Module = model, optimizer: Any = optimizer) -> None:
            optimizer.zero_grad()
            torch.autograd.backward(model(inputs + torch.rand_like(inputs)).square().mean())
            optimizer.step()

        for _ in range(5):  # in the first steps, more is looked at
            step()
        found.append(waits(step))
    assert found[0] == found[1], found


@gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_digests_are_the_same_on_every_device(dtype: torch.dtype) -> None:
    values = (torch.arange(300_001) % 257).sub(100).to(dtype)
    for part in (values, values[1:], values[:3]):
        assert torch.equal(digest_tensor(part), digest_tensor(part.cuda()).cpu())
        assert torch.equal(hash_bits(part), hash_bits(part.cuda()).cpu())


@pytest.fixture
def gpu_benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The program `benchmarks/gpu/run.py`, as a module."""
    folder = Path(__file__).parents[2] / "benchmarks" / "gpu"
    if not folder.is_dir():
        pytest.skip("the benchmarks are in the repository alone")
    monkeypatch.syspath_prepend(str(folder))
    return importlib.import_module("run")


def test_each_part_of_the_gpu_benchmark_has_checks(gpu_benchmark: Any) -> None:
    parts = (*gpu_benchmark.TOGETHER, *gpu_benchmark.ALONE)
    for part in parts:
        checks = gpu_benchmark.checks_of(part)
        assert checks and all(map(callable, checks))


RESULT = '{"part": "numbers", "what": "x", "value": 1, "good": true}\\n'
END = RESULT + '{"part": "numbers", "what": "the last check ended"}'


@pytest.mark.parametrize(
    "does, expected",
    [
        (f"rows.write_text('{END}')", None),
        (f"rows.write_text('{RESULT}')", "ended before its last check"),
        (f"rows.write_text('{END.removeprefix(RESULT)}')", "ended without a result"),
        (f"rows.write_text('{END}'.replace('1', 'NaN'))", "nan"),
        (f"rows.write_text('42\\n{END}')", "wrote a row that is none: 42"),
        ("pass", "ended before its last check"),
        ("sys.exit(3)", "ended with code 3"),
        (f"rows.write_text('{{broken}}\\n{END}')", "wrote a row that is none: {broken}"),
        ("time.sleep(60)", "stopped at its time limit"),
    ],
)
def test_a_part_of_the_gpu_benchmark_counts_only_if_it_reached_its_end(
    gpu_benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, does: str, expected: str
) -> None:
    program = tmp_path / "part.py"
    program.write_text(
        "import pathlib, sys, time\nrows = pathlib.Path(sys.argv[sys.argv.index('--to') + 1])\n"
        + does
    )
    monkeypatch.setattr(gpu_benchmark, "__file__", str(program))
    seconds = 3 if "sleep" in does else 60
    started = gpu_benchmark.Started("numbers", tmp_path, time.monotonic() + seconds, dry=True)
    wrong = [row["value"] for row in started.answer() if row.get("good") is False]
    assert wrong == ([expected] if expected else [])
    assert started.process.returncode is not None


def test_an_interrupted_gpu_benchmark_leaves_no_process_and_keeps_its_rows(
    gpu_benchmark: Any, tmp_path: Path
) -> None:
    path, temporary = tmp_path / "rows.json", tmp_path / "temporary"
    temporary.mkdir()
    line = [sys.executable, gpu_benchmark.__file__, "--dry", "--only", "environment,numbers"]
    process = subprocess.Popen(
        [*line, "--to", str(path)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    assert process.stdout is not None
    until_first_row = [process.stdout.readline() for _ in range(3)]
    process.send_signal(signal.SIGTERM)
    said = process.stdout.read()
    assert process.wait(60) == 130, said
    assert "environment" in until_first_row[2] and "interrupted" in said
    report = json.loads(path.read_text())
    assert report["state"] == "interrupted" and "environment" in {
        row["part"] for row in report["rows"]
    }
    assert sorted(tmp_path.iterdir()) == [path, temporary]
    # What a part was told to write tells its process.
    lines = [_read_or_empty(found) for found in Path("/proc").glob("[0-9]*/cmdline")]
    assert not [line for line in lines if str(temporary).encode() in line]


def _read_or_empty(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # A process that ended meanwhile.
        return b""


def test_without_a_device_the_gpu_benchmark_says_why_and_does_not_end_with_0(
    gpu_benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    report = tmp_path / "gpu.json"
    report.write_text("of a device that is gone")
    monkeypatch.setattr(sys, "argv", ["run.py", "--only", "numbers", "--to", str(report)])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    (tmp_path / "python").write_text("#!/bin/sh\necho no libcudart.so >&2\nexit 1\n")
    (tmp_path / "python").chmod(0o755)
    assert gpu_benchmark.main() == 2
    assert "not run: no libcudart.so" in capsys.readouterr().out
    assert (tmp_path / "gpu.1.json").read_text() == "of a device that is gone"


def test_the_gpu_benchmark_takes_no_nan_and_no_missing_weight_for_equal(gpu_benchmark: Any) -> None:
    tasks = importlib.import_module("tasks")
    case = SimpleNamespace(build=lambda: nn.Linear(1, 1))
    weights = {name: torch.ones(1) for name in ("weight", "bias")}
    expected = tasks.Outcome([1.0, 1.0], weights)
    assert expected.apart(expected, case) == (0, 0)
    assert tasks.Outcome([1.0, math.nan], weights).apart(expected, case)[0] == math.inf
    assert tasks.Outcome([1.0, 1.0], {}).apart(expected, case) == (math.inf, math.inf)
