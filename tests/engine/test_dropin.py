"""A script for DeepSpeed runs on the engine with another import: the same losses, learning rates, norms and answers."""

from __future__ import annotations

import math
import subprocess
import sys
import warnings
from argparse import Namespace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import compat.deepspeed
from bridge.errors import BridgeError
from compat.deepspeed.runtime.schedulers import scheduler
from tests.engine.dropin_scripts import (
    Model,
    by_batches,
    config_of,
    exported,
    loaded,
    resumed,
    script,
)
from tests.engine.runs import Shared

SIX_DIGITS = 1e-6
needs_deepspeed = pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="DeepSpeed is not installed"
)


def assert_equal_runs(
    run: Any, config: dict[str, Any], way: str, folder: Path, **steps: int
) -> None:
    """Run the script with both and compare all that it saw."""
    theirs, ours = (
        run(2, script, name, config, way, folder, *steps.values())
        for name in ("deepspeed", "compat")
    )
    for expected, found in zip(theirs, ours, strict=True):
        assert found[0] == pytest.approx(expected[0], rel=SIX_DIGITS, abs=0.0)
        assert found[1] == [pytest.approx(lrs, rel=1e-12) for lrs in expected[1]]
        known = [
            (mine, norm)
            for mine, norm in zip(found[2], expected[2], strict=True)
            if norm is not None
        ]
        assert all(float(mine) == pytest.approx(float(norm), rel=1e-4) for mine, norm in known)
        assert found[3] == expected[3]
        assert found[4] == pytest.approx(expected[4], rel=SIX_DIGITS)
    assert sum(theirs[0][0][-4:]) < 0.95 * sum(theirs[0][0][:4])


@needs_deepspeed
@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_the_same_script_with_another_import(run: Any, tmp_path: Path, level: int) -> None:
    assert_equal_runs(run, config_of(level), "config", tmp_path)


@needs_deepspeed
@pytest.mark.parametrize(
    ("way", "level"),
    [("arguments", 0), ("groups", 1), ("optimizer", 2), ("functions", 3), ("old name", 1)],
)
def test_every_way_to_give_config_parameters_optimizer_and_scheduler(
    run: Any, tmp_path: Path, way: str, level: int
) -> None:
    assert_equal_runs(run, config_of(level), way, tmp_path, steps=6)


@needs_deepspeed
@pytest.mark.parametrize("level", [1, 3])
def test_bf16_stays_as_close_to_deepspeeds_as_rounding_allows(
    run: Any, tmp_path: Path, level: int
) -> None:
    config = config_of(
        level,
        bf16={"enabled": True},
        data_types={"grad_accum_dtype": "fp32"},
        communication_data_type="fp32",
    )
    theirs, ours = (
        run(2, script, name, config, "config", tmp_path, 10)[0] for name in ("deepspeed", "compat")
    )
    assert ours[0] == pytest.approx(theirs[0], rel=2e-3)
    assert ours[3] == theirs[3]


SCHEDULES: list[tuple[str, dict[str, Any]]] = [
    ("WarmupLR", {"warmup_num_steps": 7, "warmup_min_lr": 0.001, "warmup_max_lr": 0.02}),
    ("WarmupLR", {"warmup_num_steps": 1, "warmup_type": "linear"}),
    (
        "WarmupDecayLR",
        {
            "total_num_steps": 20,
            "warmup_num_steps": 5,
            "warmup_min_lr": 0.002,
            "warmup_max_lr": 0.02,
        },
    ),
    ("WarmupDecayLR", {"total_num_steps": 9, "warmup_num_steps": 3, "warmup_type": "linear"}),
    (
        "WarmupCosineLR",
        {
            "total_num_steps": 20,
            "warmup_num_steps": 5,
            "warmup_min_ratio": 0.1,
            "cos_min_ratio": 0.2,
        },
    ),
    ("WarmupCosineLR", {"total_num_steps": 4, "warmup_num_steps": 6, "warmup_type": "linear"}),
    ("LRRangeTest", {"lr_range_test_step_size": 4, "lr_range_test_staircase": True}),
    ("LRRangeTest", {"lr_range_test_step_size": 4, "lr_range_test_step_rate": 0.5}),
]


@needs_deepspeed
@pytest.mark.parametrize(("kind", "params"), SCHEDULES)
def test_schedulers_follow_deepspeeds_step_for_step(kind: str, params: dict[str, Any]) -> None:
    from deepspeed.runtime import lr_schedules

    theirs, ours = (
        torch.optim.SGD(
            [{"params": [torch.zeros(1)]}, {"params": [torch.zeros(1)], "lr": 0.5}], lr=0.1
        )
        for _ in "ab"
    )
    expected, found = getattr(lr_schedules, kind)(theirs, **params), scheduler(kind, params, ours)
    for _ in range(25):
        assert rates(ours) == pytest.approx(rates(theirs), rel=1e-12)
        expected.step()
        found.step()
        assert found.get_last_lr() == pytest.approx(expected.get_last_lr(), rel=1e-12)
    assert found.state_dict() == expected.state_dict()


def rates(optimizer: torch.optim.Optimizer) -> list[float]:
    """Learning rates by group."""
    return [group["lr"] for group in optimizer.param_groups]


@needs_deepspeed
@pytest.mark.parametrize(
    ("collate", "config"), [(False, {}), (True, {"dataloader_drop_last": True})]
)
def test_the_loader_gives_deepspeeds_batches_in_deepspeeds_order(
    run: Any, collate: bool, config: dict[str, Any]
) -> None:
    theirs, ours = (
        run(2, partial(loaded, **config), name, collate) for name in ("deepspeed", "compat")
    )
    assert ours == theirs
    assert ours[0][1] != ours[1][1]


def test_a_resume_on_another_level_goes_on_with_scheduler_and_client_state(
    run: Any, tmp_path: Path
) -> None:
    for nothing, name, client, (lrs, steps, iteration), expected, found, fresh in run(
        2, resumed, tmp_path
    ):
        assert nothing == (None, None) and name == "global_step3" and client == {"epoch": 4}
        assert (steps, iteration) == (3, 2) and lrs == pytest.approx(
            [0.01 * math.log(3) / math.log(6)]
        )
        assert found == pytest.approx(expected, rel=SIX_DIGITS)
        assert fresh == 0
    weights = torch.load(tmp_path / "pytorch_model.bin")
    Model().load_state_dict(weights)


@pytest.mark.parametrize("level", [0, 3])
def test_a_fresh_model_takes_the_exported_one_strictly(
    run: Any, tmp_path: Path, level: int
) -> None:
    for expected in run(2, exported, tmp_path, level):
        if expected is not None:
            found = torch.load(tmp_path / "pytorch_model.bin")
            fresh = Shared()
            fresh.load_state_dict(found)
            assert fresh.last.weight is fresh.first.weight and not fresh.frozen.sum() - 6
            assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("level", [0, 3])
def test_train_batch_and_eval_batch_are_the_loop_by_hand(run: Any, level: int) -> None:
    for losses, by_hand, mean, whole in run(2, by_batches, level):
        assert losses == pytest.approx(by_hand, rel=SIX_DIGITS) and losses[2] < losses[0]
        assert mean == pytest.approx(whole, rel=SIX_DIGITS)


def alone(**given: Any) -> Any:
    """Everything that `initialize` returns, in this process."""
    model = given.pop("model", None) or nn.Linear(2, 1)
    config = {**config_of(0, gradient_accumulation_steps=1), **given.pop("config", {})}
    return compat.deepspeed.initialize(
        model=model,
        config={key: value for key, value in config.items() if value is not None},
        **given,
    )


class Grid:
    """Groups of a script that splits its model itself."""

    def get_model_parallel_world_size(self) -> int:
        """Ranks that hold one model."""
        return 2


def lbfgs(parameters: Any) -> Any:
    """An optimizer that calls the model itself."""
    return torch.optim.LBFGS(parameters)


def adamw(parameters: Any) -> Any:
    """An update rule that the engine has."""
    return torch.optim.AdamW(parameters)


def halved(optimizer: Any) -> Any:
    """A scheduler of the script."""
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"args": Namespace(deepspeed_config="x.json")},
        "config: found 2 of them, expected a config in exactly one of config=",
    ),
    (
        {"optimizer": lbfgs},
        "optimizer: found LBFGS, which the engine cannot run .*closure.*; use AdamW or SGD",
    ),
    (
        {"optimizer": lambda parameters: parameters},
        r"optimizer: found list, expected a torch.optim.Optimizer",
    ),
    (
        {"lr_scheduler": 3},
        r"lr_scheduler: found int, expected an object with step\(\), or a function",
    ),
    (
        {"mpu": Grid()},
        r"mpu: get_model_parallel_world_size\(\) is 2; the engine splits models itself",
    ),
    ({"mesh_param": (1, 1)}, "mesh_param: found .* the engine has no sequence axis; leave it out"),
    (
        {"model_parameters": [nn.Parameter(torch.zeros(3))]},
        r"model_parameters: found 1 tensors that are not in the model,",
    ),
    (
        {"config": {"optimizer": {"type": "Adagrad", "params": {}}}},
        "optimizer.type: found Adagrad, which the engine does not run; use AdamW, Adam or SGD",
    ),
    (
        {"config": {"optimizer": {"type": "Rprop", "params": {}}}},
        "optimizer.type: found Rprop, which the engine does not run",
    ),
    (
        {"config": {"optimizer": {"type": "Lion", "params": {"lr": 0.02}}}},
        "optimizer.type: found Lion, which the engine does not run; use AdamW, Adam or SGD",
    ),
    (
        {"config": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}},
        "torch_autocast.enabled: found True; the engine does not use torch.autocast",
    ),
    (
        {"config": {"gradient_allreduce_op": "sum"}},
        "gradient_allreduce_op: found 'sum', which the engine does not",
    ),
    (
        {"config": {"optimizer": {"type": "Muon", "params": {"lr": 0.02}}}},
        "optimizer.type: found Muon, which the engine does not run; use AdamW, Adam or SGD, with no"
        " optimizer.params but lr and weight_decay, or pass a torch optimizer of this kind to initialize as optimizer=$",
    ),
    (
        {"config": {"managed_gradient_accumulation": False}},
        "managed_gradient_accumulation: found false, but the engine",
    ),
    (
        {"config": {"sequence_parallel_size": 2}},
        r"sequence_parallel_size \(2\) does not divide world size",
    ),
    (
        {
            "config": {
                "scheduler": {
                    "type": "OneCycle",
                    "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2},
                }
            }
        },
        "scheduler.type: the engine has no scheduler OneCycle; use one of",
    ),
    (
        {"config": {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_step": 1}}}},
        "warmup_num_step",
    ),
    (
        {"config": {"scheduler": {"type": "WarmupLR", "params": {"last_batch_iteration": 1}}}},
        "scheduler.params.last_batch_iteration: the engine's WarmupLR does not take this; leave it out",
    ),
    (
        {"config": {"zero_optimisation": {"stage": 1}}},
        "zero_optimisation: unknown key; did you mean zero_optimization",
    ),
]


@pytest.mark.parametrize(
    ("given", "message"), REFUSED, ids=[message[:30] for _, message in REFUSED]
)
def test_what_the_engine_cannot_run_is_refused_with_what_to_do(
    given: dict[str, Any], message: str
) -> None:
    with pytest.raises(BridgeError, match=message):
        alone(**given)


NAMED: list[tuple[dict[str, Any], str, str]] = [
    (
        {"config": {"optimizer": {"type": "AdamW", "params": {"adam_w_mode": False}}}},
        "optimizer.params.adam_w_mode",
        "ignores false with type AdamW.* use type Adam with it",
    ),
    (
        {"config": {"optimizer": {"type": "Lamb", "params": {"lr": 1}}}, "optimizer": adamw},
        "optimizer",
        "the script's own optimizer runs, so this section is not read; leave it out",
    ),
    (
        {"config": {"scheduler": {"type": "WarmupLR"}}, "lr_scheduler": halved},
        "scheduler",
        "the script's own scheduler runs",
    ),
]


@pytest.mark.parametrize(("given", "path", "message"), NAMED, ids=[path for _, path, _ in NAMED])
def test_a_section_that_deepspeed_does_not_read_is_named(
    given: dict[str, Any], path: str, message: str
) -> None:
    with pytest.warns(UserWarning, match=f"{path}: .*{message}"):
        engine = alone(**given)[0]
    assert [finding.path for finding in engine.findings if finding.path == path]


def test_misuse_is_said() -> None:
    with pytest.raises(BridgeError, match="model: missing;"):
        compat.deepspeed.initialize(config=config_of(0))
    with pytest.raises(BridgeError, match="config: found none, expected a config in exactly one"):
        compat.deepspeed.initialize(model=nn.Linear(1, 1))
    engine, optimizer, loader, schedule = alone(config={"optimizer": None})
    assert (optimizer, loader, schedule) == (None, None, None) and engine(
        torch.ones(3, 2)
    ).shape == (3, 1)
    with pytest.raises(
        BridgeError, match="backward: no optimizer: name an optimizer in the config"
    ):
        engine.backward(engine(torch.ones(3, 2)).sum())
    engine = alone()[0]
    loss = engine(torch.ones(3, 2)).sum()
    engine.backward(loss, retain_graph=True)
    engine.zero_grad()
    with pytest.raises(
        BridgeError, match="found False at microbatch 1 of 1, but a step cannot be longer"
    ):
        engine.set_gradient_accumulation_boundary(False)
    with pytest.raises(BridgeError, match=r"found no loss in the model's output"):
        engine.train_batch([torch.ones(3, 2)])
    with pytest.raises(BridgeError, match="train_batch: found no data; pass an iterator"):
        engine.train_batch()


def test_what_is_left_out_is_said_and_defaults_are_not() -> None:
    with pytest.warns(
        UserWarning, match="zero.prescale: gradients are divided after they are summed"
    ) as found:
        engine = alone(
            config={
                "prescale_gradients": True,
                "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}},
            }
        )[0]
        engine(torch.ones(3, 2))  # which shows what the model takes
    said = [str(warning.message) for warning in found]
    assert any(
        line.startswith("zero.offload.parameters: parameters stay on the device") for line in said
    )
    assert any(
        line.startswith("zero.stage: this model is one layer") and "no module" in line
        for line in said
    )
    assert not any("bucket" in line for line in said)
    assert "zero.bucket" in {finding.path for finding in engine.findings}


def test_formats_are_deepspeeds_and_a_model_in_double_stays_in_double() -> None:
    def made(model: nn.Module, **config: Any) -> Any:
        model.register_buffer("positions", torch.linspace(0, 1, 7, dtype=torch.float32))
        model.register_buffer("wide", torch.linspace(0, 1, 7, dtype=torch.float64))
        return alone(model=model, config=config)[0]

    engine = made(nn.Linear(2, 1), bf16={"enabled": True})
    assert {weight.dtype for weight in engine.module.parameters()} == {torch.bfloat16}
    assert [buffer.dtype for buffer in engine.module.buffers()] == [torch.float32, torch.float64]
    engine = made(nn.Linear(2, 1).double())
    assert engine(torch.ones(3, 2, dtype=torch.float64)).dtype == torch.float64
    assert engine.get_data_types() == (torch.float64, torch.float64)
    with pytest.warns(UserWarning, match="model: the model's weights are in bf16, and the config"):
        engine = made(nn.Linear(2, 1).bfloat16())
    assert engine.get_data_types() == (torch.float32, torch.float32)


def test_hooks_see_gradients_of_the_divided_loss() -> None:
    model, seen = nn.Linear(2, 1), []
    model.weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    engine = alone(model=model, config={"gradient_accumulation_steps": 4})[0]
    for _ in range(4):
        engine.backward(engine(torch.ones(3, 2)).mean())
        engine.step()
    assert torch.equal(torch.cat(seen), torch.full((4, 2), 0.25))
    assert engine.get_global_grad_norm() == pytest.approx(3**0.5)


@pytest.mark.parametrize("level", [0, 3])
@pytest.mark.parametrize("calls", ["bb", "bsbb", "bss", "s"])
def test_steps_are_counted_as_deepspeed_counts_them_or_not_at_all(calls: str, level: int) -> None:
    """DeepSpeed ends a step after two calls of `step`, however many backward passes came before."""
    engine = alone(model=nn.Linear(2, 1), config=config_of(level, gradient_accumulation_steps=2))[0]
    before = engine.get_global_grad_norm(), engine.global_steps

    def run(call: str) -> None:
        engine.backward(engine(torch.ones(3, 2)).mean()) if call == "b" else engine.step()

    for call in calls[:-1]:
        run(call)
    with pytest.raises(BridgeError, match="two microbatches, where DeepSpeed ends a step after"):
        run(calls[-1])
    assert (engine.get_global_grad_norm(), engine.global_steps) == before


def test_a_script_may_say_where_a_step_ends() -> None:
    engine = alone(model=nn.Linear(2, 1), config={"gradient_accumulation_steps": 2})[0]
    for last in (False, True):
        engine.set_gradient_accumulation_boundary(last)
        engine.backward(engine(torch.ones(3, 2)).mean())
    engine.step()
    assert engine.global_steps == 1


def test_parameters_that_are_not_given_stay_as_they_are() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    before = model[0].weight.detach().clone()
    engine = alone(model=model, model_parameters=model[1].parameters())[0]
    engine.backward(engine(torch.ones(3, 2)).sum())
    engine.step()
    moved = dict(engine.native.state_dict())
    assert torch.equal(moved["0.weight"], before) and engine.was_step_applied()
    assert engine.get_parameter("module.1.weight") is model[1].weight


def test_a_scripts_own_changes_of_the_learning_rate_count() -> None:
    engine, optimizer, _, _ = alone()
    optimizer.param_groups[0]["lr"] = 0.0
    before = {name: weight.clone() for name, weight in engine.native.state_dict()}
    engine.backward(engine(torch.ones(3, 2)).sum())
    engine.step()
    assert all(torch.equal(weight, before[name]) for name, weight in engine.native.state_dict())


def test_the_package_needs_no_torch_until_an_entry_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import sys, compat.deepspeed as d; assert 'torch' not in sys.modules; d.initialize; assert 'torch' in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    monkeypatch.setattr("bridge.stack.extras.find_spec", lambda name: None)
    with pytest.raises(
        BridgeError,
        match=r"deepspeed.initialize: torch is not installed; in a clone of stagebridge, pip install",
    ):
        _ = compat.deepspeed.initialize
    with pytest.raises(AttributeError, match="has no attribute 'initialise'"):
        _ = compat.deepspeed.initialise


@pytest.mark.parametrize("clip", [None, 0.0, 0.5])
def test_a_default_that_clips_is_said_once(clip: float | None) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = alone(config={"gradient_clipping": clip})[0]
    said = [str(one.message) for one in caught if "gradient_clipping" in str(one.message)]
    told = [finding.path for finding in engine.findings if finding.path == "gradient_clipping"]
    assert len(said) == len(told) == (clip is None)
    assert clip is not None or "clipped to a norm of 1, the default" in said[0]


class Dropping(nn.Module):
    """Layers of one kind, with dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        self.dropout = nn.Dropout(0.4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Inputs and outputs have shape (rows, 2)."""
        for layer in self.layers:
            inputs = self.dropout(layer(inputs).tanh())
        return inputs


@pytest.mark.parametrize("level", [0, 2, 3])
def test_one_rank_drops_what_torch_drops_and_leaves_torchs_generator_as_torch_does(
    level: int,
) -> None:
    torch.manual_seed(3)
    model, inputs = Dropping(), torch.ones(6, 2)
    torch.manual_seed(4)
    expected = [*map(model, [inputs] * 2), torch.rand(2)]
    config = config_of(level, gradient_accumulation_steps=1)
    engine = compat.deepspeed.initialize(model=model, config=config)[0]
    torch.manual_seed(4)
    found = [engine(inputs), engine(inputs), torch.rand(2)]
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


class Checkpointed(Dropping):
    """Layers that are computed again in backward, by checkpoints around them."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Inputs and outputs have shape (rows, 2)."""
        for layer in self.layers:
            inputs = checkpoint(layer, inputs, use_reentrant=False).tanh()
        return inputs


def test_checkpoints_around_layers_leave_a_model_whole() -> None:
    engine = alone(model=Checkpointed(), config={"zero_optimization": {"stage": 3}})[0]
    with pytest.warns(
        UserWarning, match=r"layers\.0: the model calls this module again in backward"
    ):
        engine.backward(engine(torch.ones(2, 2)).square().sum())
    engine.step()


def unused(rank: int, world: int, often: bool) -> list[str]:
    """Warnings of steps of a model with a weight that gets no gradient, or gets one every second time."""
    model = nn.ModuleDict({"used": nn.Linear(2, 2), "other": nn.Linear(2, 2)})
    model.forward = lambda inputs, both: (
        model["used"](inputs)
        + (  # type: ignore[method-assign]
            model["other"](inputs) if both else 0
        )
    )
    config = config_of(1, gradient_accumulation_steps=1)
    config["optimizer"]["params"]["weight_decay"] = 0.0 if often else 0.1
    engine = compat.deepspeed.initialize(model=model, config=config)[0]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            engine.backward(engine(torch.ones(2, 2), often and step == 0).square().sum())
            engine.step()
    return [str(one.message) for one in caught if "DeepSpeed would take" in str(one.message)]


@pytest.mark.parametrize("often", [False, True])
def test_a_weight_that_deepspeed_moves_without_a_gradient_is_named_once(often: bool) -> None:
    (said,) = unused(0, 1, often)
    assert said.startswith(f"step {2 if often else 1}: other.bias got no gradient")


def test_a_scheduler_that_wants_a_number_gets_the_batch_size_as_from_deepspeed() -> None:
    given: list[int] = []

    class Counting:
        def step(self, increment: int) -> None:
            """Count samples, as the scheduler of Megatron does."""
            given.append(increment)

    engine = alone(lr_scheduler=Counting())[0]
    engine.backward(engine(torch.ones(2, 2)).sum())
    engine.step()
    assert given == [engine.train_batch_size()]
