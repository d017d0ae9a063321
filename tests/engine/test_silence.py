"""Nothing goes on in silence: data that ends, ranks that hang or die, steps that come to nothing, calls without effect."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bridge
import compat.deepspeed
from bridge.engine import initialize
from bridge.engine.loss_scale import LIMIT
from bridge.engine.models.gpt import mean_cross_entropy
from bridge.engine.runner import DataEnded, Engine
from bridge.errors import BridgeError
from bridge.plan.plan import Plan
from tests.engine.dropin_scripts import Numbers, config_of
from tests.engine.pool import free_port
from tests.engine.runs import Case, microbatches, model_of

PLAN = {
    "precision.compute": "fp64",
    "batch.micro": 2,
    "batch.accumulation": 2,
    "optimizer.lr": 0.01,
}


def started(**values: Any) -> Engine:
    return initialize(model_of(Case({})), Plan.of({**PLAN, **values}), mean_cross_entropy, seed=11)


# Data that ends


def short(
    rank: int, world: int, level: int, pipeline: int, number: int
) -> tuple[str, list[int], bool]:
    """The last rank has `number` microbatches of two in the second step: what it says, the counters, whether weights stayed."""
    engine, case = started(**{"zero.stage": level, "parallel.pipeline": pipeline}), Case(PLAN)
    engine.train_batch(microbatches(case, engine, 0))
    before = {name: weight.clone() for name, weight in engine.state_dict()}
    batches = list(microbatches(case, engine, 1))[: number if rank == world - 1 else None]
    with pytest.raises(DataEnded) as raised:
        engine.train_batch(iter(batches))
    stayed = all(torch.equal(weight, before[name]) for name, weight in engine.state_dict())
    counters = [engine.progress.steps, engine.progress.skipped, engine.progress.samples]
    engine.train_batch(microbatches(case, engine, 2))
    return str(raised.value), [*counters, engine.progress.steps], stayed


@pytest.mark.parametrize(("level", "pipeline", "number"), [(0, 1, 0), (3, 1, 1), (1, 2, 1)])
def test_data_that_ends_on_one_rank_ends_the_step_on_all(
    run: Any, level: int, pipeline: int, number: int
) -> None:
    first, last = run(2, short, level, pipeline, number)
    left = "so no rank updated its weights; give all ranks the same amount of data"
    assert first[0] == f"step 2: the data of rank 1 ended, {left}"
    assert (
        last[0]
        == f"train_batch: data ended after {number} microbatches of a step, expected 2; give more data"
    )
    assert first[1:] == last[1:] == ([1, 0, 8, 2], True)


def short_script(rank: int, world: int) -> list[str]:
    """The same with the drop-in, over one iterator for the whole epoch."""
    engine = compat.deepspeed.initialize(model=nn.Sequential(nn.Linear(1, 1)), config=config_of(1))[
        0
    ]
    engine.loss_fn = lambda output, number: nn.functional.mse_loss(output[:, 0], number / 20)
    data, said = iter([(torch.ones(2, 1), torch.ones(2))] * (6 - rank)), []
    for _ in range(3):
        try:
            engine.train_batch(data)
        except BridgeError as error:
            said.append(f"{engine.global_steps}: {error}")
    return said


def test_data_of_a_deepspeed_script_ends_on_all_ranks(run: Any) -> None:
    (first,), (last,) = run(2, short_script)
    assert first.startswith("2: step 3: the data of rank 1 ended")
    assert last.startswith("2: train_batch: data ended after 1 microbatches of a step")


def test_batches_that_would_be_lost_or_come_again_are_refused() -> None:
    engine, case = started(), Case(PLAN)
    batches = [*microbatches(case, engine, 0), *microbatches(case, engine, 1)]
    with pytest.raises(
        BridgeError,
        match=r"train_batch: found 4 batches, expected 2, as many as a step has; to train on",
    ):
        engine.train_batch(batches)
    loader = torch.utils.data.DataLoader(Numbers(), 2)
    script = compat.deepspeed.initialize(model=nn.Sequential(nn.Linear(1, 1)), config=config_of(0))[
        0
    ]
    with pytest.raises(BridgeError, match=r"found 10 batches, expected 2, as many as a step has"):
        script.train_batch(loader)


# Steps that come to nothing


def poisoned(rank: int, world: int, scale: dict[str, Any], steps: int) -> tuple[list[str], str]:
    """Steps whose loss is NaN on the last rank: what is said, and the error at the end."""
    engine, said = started(**{"batch.accumulation": 1, **scale}), list[str]()
    engine.say = said.append
    try:
        for step in range(steps):
            for inputs, targets in microbatches(Case(PLAN), engine, step):
                loss = engine(inputs, targets)
                engine.backward(loss * torch.nan if rank == world - 1 else loss)
            engine.step()
    except BridgeError as error:
        return said, str(error)
    return said, ""


def test_a_loss_that_is_not_a_number_is_said_and_in_the_end_an_error(run: Any) -> None:
    (first, error), (last, same) = run(2, poisoned, {}, LIMIT + 2)
    assert first == [
        f"step {step}: skipped, no weight changed: the loss is nan" for step in range(1, LIMIT + 1)
    ]
    assert last == [f"{line} (on rank 1, in microbatch 0)" for line in first]
    assert error == same
    assert error.startswith(
        f"step {LIMIT + 1}: skipped, no weight changed: the loss is nan; {LIMIT + 1} steps in a row"
    )


def test_an_overflow_that_a_smaller_scale_will_mend_is_not_said() -> None:
    values = {
        "precision.compute": "fp16",
        "precision.loss_scale.initial": 2.0**30,
        "batch.accumulation": 1,
    }
    engine, said = started(**values), list[str]()
    engine.say = said.append
    for step in range(12):
        engine.train_batch(list(microbatches(Case(PLAN), engine, step))[:1])
    assert engine.progress.skipped > 5 and not said


def test_a_scale_at_its_minimum_ends_a_deepspeed_run_as_it_does_deepspeeds() -> None:
    config = config_of(
        1, fp16={"enabled": True, "initial_scale_power": 1, "hysteresis": 1, "min_loss_scale": 1}
    )
    engine = compat.deepspeed.initialize(
        model=nn.Linear(1, 1), config={**config, "gradient_accumulation_steps": 1}
    )[0]
    for _ in range(2):
        loss = engine(torch.ones(1, 1).half()).float().sum() * 1e9
        if engine.cur_scale > 1:
            engine.backward(loss)
            engine.step()
    with pytest.raises(
        BridgeError,
        match=r"step 2: skipped, .* gradients are not at loss scale 1; 1 steps in a row",
    ):
        engine.backward(loss)
        engine.step()


# Calls without effect


def test_what_the_optimizer_cannot_do_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    engine, optimizer, *_ = compat.deepspeed.initialize(
        model=model, config=config_of(0, gradient_accumulation_steps=1)
    )
    with pytest.raises(
        BridgeError, match=r"optimizer.add_param_group: the layout of the engine's buffers is fixed"
    ):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    with pytest.raises(
        BridgeError,
        match=r"optimizer.state_dict: .* save the state with engine.save_checkpoint\(folder\)",
    ):
        optimizer.state_dict()
    with pytest.raises(
        BridgeError, match=r"optimizer.load_state_dict: .* engine.load_checkpoint\(folder\)"
    ):
        optimizer.load_state_dict({})
    with pytest.raises(
        BridgeError, match=r"optimizer.step: the engine updates the weights; call engine.step\(\)"
    ):
        optimizer.step()
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.step()
    assert engine.was_step_applied()


@pytest.mark.parametrize("at_first", [True, False])
def test_a_weight_may_be_frozen_midway_but_not_thawed(at_first: bool) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[0].weight.requires_grad_(at_first)
    engine = initialize(model, Plan.of({}), nn.functional.mse_loss)
    engine.train_batch([(torch.ones(1, 2), torch.ones(1, 1))])
    model[0].weight.requires_grad_(not at_first)
    before = model[0].weight.clone()
    with nullcontext() if at_first else pytest.raises(BridgeError, match=THAWED):
        engine.train_batch([(torch.ones(1, 2), torch.ones(1, 1))])
    assert torch.equal(model[0].weight, before)


THAWED = "0.weight: requires_grad is True, but was False when the engine was created"


def test_a_scheduler_that_moves_twice_is_said_once() -> None:
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 9}}
    config = config_of(0, scheduler=scheduler, gradient_accumulation_steps=1)
    engine, _, _, schedule = compat.deepspeed.initialize(model=nn.Linear(2, 1), config=config)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(3):
            engine.backward(engine(torch.ones(1, 2)).sum())
            engine.step()
            schedule.step()
    assert [str(it.message) for it in found if "two steps" in str(it.message)] == [
        "step 2: the script calls lr_scheduler.step(), and engine.step() calls it too: the scheduler"
        " makes two steps at once; remove the script's call"
    ]


# Ranks that hang or die

SCRIPT = """
import os, signal, sys, time
import torch
from bridge.engine import initialize
from bridge.plan import Plan

rank, what = int(os.environ["RANK"]), sys.argv[1]
layers = [torch.nn.Linear(64, 64) for _ in range(4)]
engine = initialize(layers, Plan.of({"zero.stage": 2}), torch.nn.functional.mse_loss)
for step in range(1, 4):
    if rank == 1 and step == 3 and what == "hang":
        time.sleep(float(os.environ["HANG"]))
    if rank == 1 and step == 3 and what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    engine.train_batch([(torch.ones(1, 64), torch.ones(1, 64))])
if what == "save":
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    engine.save_checkpoint(sys.argv[2])
engine.close()
"""


def both(what: str, folder: Path, **environment: str) -> list[tuple[int, str]]:
    """Two processes of the script: exit codes and what they wrote to stderr."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    paths = [str(Path(bridge.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    job = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "PYTHONPATH": os.pathsep.join(paths),
    }
    running = [
        subprocess.Popen(
            [sys.executable, str(script), what, str(folder / "saved")],
            env={
                **os.environ,
                **job,
                **environment,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "OMP_NUM_THREADS": "1",
            },
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=300)[1] for process in running]
    return [(process.returncode, text) for process, text in zip(running, said, strict=True)]


def test_a_silent_rank_is_named_with_its_last_action_and_the_run_goes_on(tmp_path: Path) -> None:
    (code, said), (other, _) = both("hang", tmp_path, STAGEBRIDGE_SILENCE="1", HANG="8")
    assert (code, other) == (0, 0)
    # A busy machine may have kept a rank waiting before.
    (line,) = [
        line
        for line in said.splitlines()
        if "silent for" in line and "(last action: step 3, " in line
    ]
    assert (
        line.startswith("note: rank 0 waits in ")
        and " for rank 1; rank 1 has been silent for " in line
    )
    assert line.endswith("; rank 0 gives up after 600 s")


@pytest.mark.parametrize("what", ["die", "save"])
def test_a_rank_that_dies_is_one_clear_line(tmp_path: Path, what: str) -> None:
    (code, said), (other, _) = both(what, tmp_path)
    assert code == 1 and other == -signal.SIGKILL
    last = said.strip().splitlines()[-1]
    assert (
        "LostRank: " in last
        and ": rank 1 is gone or silent (" in last
        and "messages of that rank, then resume" in last
    )
