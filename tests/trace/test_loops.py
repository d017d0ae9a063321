"""Trace watches loops of many kinds: right ones raise no alarm and keep their numbers, and nothing in it ends a training."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

from bridge.plan.plan import Debug
from bridge.trace import attach, roots
from bridge.trace.findings import TraceFinding
from bridge.trace.invariants.gradients import Reduced
from bridge.trace.run import TracedRun
from bridge.trace.run_comparison import compare_runs

LOGS = Debug(
    layer_outputs=5,
    layer_gradients=5,
    param_init=5,
    all_param_gradients=5,
    param_update=5,
    tensor_parallel=True,
)
Loop = Callable[[nn.Module, Any], list[float]]


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def given(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4, 6, generator=generator), torch.randint(3, (4,), generator=generator)


def lost(model: nn.Module, step: int) -> Tensor:
    tensor, target = given(step)
    return nn.functional.cross_entropy(model(tensor), target)


def adam(weights: Any, rate: float = 1e-2) -> torch.optim.Optimizer:
    return torch.optim.AdamW(weights, rate, weight_decay=0.0)


def steps(model: nn.Module, optimizer: Any) -> list[float]:
    losses = []
    for step in range(4):
        optimizer.zero_grad()
        loss = lost(model, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def found(
    folder: Path, build: Callable[[], nn.Module], made: Callable[[nn.Module], Any], loop: Loop
) -> list[TraceFinding]:
    """What trace finds in the loop; that its losses and weights are the same without it is asserted."""
    results = []
    for watched in (False, True):
        torch.manual_seed(0)
        model = build()
        optimizer = made(model)
        tracer = attach(model, LOGS, folder, optimizer=optimizer) if watched else None
        losses = loop(model, optimizer)
        results.append((losses, [weight.detach().clone() for weight in model.parameters()], tracer))
    (plain, weights, _), (traced, others, tracer) = results
    assert traced == plain
    assert all(torch.equal(one, other) for one, other in zip(weights, others, strict=True))
    assert tracer is not None
    tracer.remove()
    return tracer.findings.found


def faults(findings: list[TraceFinding]) -> list[str]:
    return [
        f"{finding.id} {finding.step}"
        for finding in findings
        if finding.severity == "fault" or finding.id == "check-ended"
    ]


class Two(nn.Module):
    """A generator and a discriminator."""

    def __init__(self) -> None:
        super().__init__()
        self.make, self.judge = nn.Linear(6, 6), nn.Linear(6, 1)

    def forward(self, tensor: Tensor, judged: bool) -> Tensor:
        made = self.make(tensor)
        if judged:
            return (
                nn.functional.softplus(-self.judge(tensor)).mean()
                + nn.functional.softplus(self.judge(made.detach())).mean()
            )
        return nn.functional.softplus(-self.judge(made)).mean()


def against(model: Any, optimizers: Any, forgotten: int | None = None) -> list[float]:
    """Two optimizers in turn: each clears its own gradients, in which the other's backward pass left something."""
    losses = []
    for step in range(6):
        for judged, optimizer in ((True, optimizers[1]), (False, optimizers[0])):
            if not (judged and step == forgotten):
                optimizer.zero_grad()
            loss = model(given(2 * step + judged)[0], judged)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def both(model: Any) -> Any:
    return adam(model.make.parameters()), adam(model.judge.parameters())


def test_two_optimizers_in_turn_are_each_held_to_their_own_steps(tmp_path: Path) -> None:
    assert faults(found(tmp_path, Two, both, against)) == []


def test_a_gradient_that_one_of_two_optimizers_did_not_clear_is_found(tmp_path: Path) -> None:
    alarms = faults(found(tmp_path, Two, both, lambda model, ways: against(model, ways, 2)))
    assert "gradient-stale 5" in alarms


def closures(model: nn.Module, optimizer: Any) -> list[float]:
    losses = []
    for step in range(4):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = lost(model, step)
            loss.backward()
            return loss

        losses.append(optimizer.step(closure).item())
    return losses


@pytest.mark.parametrize("kind", ["AdamW", "LBFGS"])
def test_a_step_that_is_given_a_closure_is_judged_by_what_the_closure_computes(
    kind: str, tmp_path: Path
) -> None:
    makers = {"AdamW": adam, "LBFGS": lambda weights: torch.optim.LBFGS(weights, max_iter=3)}
    alarms = found(tmp_path, small, lambda model: makers[kind](model.parameters()), closures)
    assert faults(alarms) == []


def test_a_closure_that_forgets_to_clear_is_found(tmp_path: Path) -> None:
    def forgetful(model: nn.Module, optimizer: Any) -> list[float]:
        def closure() -> Tensor:
            loss = lost(model, 0)
            loss.backward()
            return loss

        return [optimizer.step(closure).item() for _ in range(3)]

    assert "gradient-stale 2" in faults(
        found(tmp_path, small, lambda model: adam(model.parameters()), forgetful)
    )


def test_gradients_of_autograd_grad_that_are_set_by_hand_are_not_stale(tmp_path: Path) -> None:
    def by_hand(model: nn.Module, optimizer: Any) -> list[float]:
        losses, weights = [], list(model.parameters())
        for step in range(4):
            loss = lost(model, step)
            for weight, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
                weight.grad = gradient
            optimizer.step()
            losses.append(loss.item())
        return losses

    assert faults(found(tmp_path, small, lambda model: adam(model.parameters()), by_hand)) == []


@pytest.mark.parametrize("clears", [True, False])
def test_gradients_that_autograd_grad_and_backward_add_up_are_stale_if_left(
    tmp_path: Path, clears: bool
) -> None:
    def added(model: nn.Module, optimizer: Any) -> list[float]:
        # As torch's pipelines do: gradients of one microbatch by hand, those of the next by backward.
        losses, weights = [], list(model.parameters())
        for step in range(4):
            if clears:
                optimizer.zero_grad()
            for weight, gradient in zip(
                weights, torch.autograd.grad(lost(model, step), weights), strict=True
            ):
                weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)
            loss = lost(model, step + 4)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    ids = {one.id for one in found(tmp_path, small, lambda model: adam(model.parameters()), added)}
    assert ("gradient-stale" in ids) is not clears


def test_one_optimizer_for_each_parameter_that_steps_in_backward_is_right(tmp_path: Path) -> None:
    def made(model: nn.Module) -> list[Any]:
        return [adam([weight]) for weight in model.parameters()]

    def inside(model: nn.Module, optimizers: Any) -> list[float]:
        for weight, optimizer in zip(model.parameters(), optimizers, strict=True):

            def step(_: Tensor, optimizer: Any = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()

            weight.register_post_accumulate_grad_hook(step)
        losses = []
        for number in range(3):
            loss = lost(model, number)
            loss.backward()
            losses.append(loss.item())
        return losses

    alarms = found(tmp_path, small, made, inside)
    assert [finding.id for finding in alarms if finding.id != "decay-on-norms"] == []


class Relative(torch.optim.SGD):
    """An optimizer without a rate in its groups, as Adafactor works one out itself."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["lr"] = 0.1
        super().step(closure)
        for group in self.param_groups:
            group["lr"] = None


def test_an_optimizer_without_a_learning_rate_is_watched(tmp_path: Path) -> None:
    def made(model: nn.Module) -> Any:
        optimizer = Relative(model.parameters(), 0.1)
        optimizer.param_groups[0]["lr"] = None
        return optimizer

    assert faults(found(tmp_path, small, made, steps)) == []


def test_an_optimizer_that_takes_over_is_followed_and_said(tmp_path: Path) -> None:
    def loop(model: nn.Module, optimizer: Any) -> list[float]:
        return steps(model, optimizer) + steps(model, adam(model.parameters()))

    alarms = found(tmp_path, small, lambda model: adam(model.parameters()), loop)
    assert [
        (finding.id, finding.step, finding.evidence)
        for finding in alarms
        if finding.id != "data-repeated"
    ] == [("optimizer-replaced", 5, "AdamW by AdamW")]
    assert TracedRun.read(tmp_path).steps == tuple(range(9))


def test_an_optimizer_of_a_part_that_another_one_holds_changes_weights_and_takes_nothing_over(
    tmp_path: Path,
) -> None:
    def loop(model: Any, optimizer: Any) -> list[float]:
        losses, beside = steps(model, optimizer), torch.optim.SGD([model[2].weight], 0.1)
        beside.step()
        return losses + steps(model, optimizer)

    alarms = found(tmp_path, small, lambda model: adam(model.parameters()), loop)
    assert [(finding.id, finding.step) for finding in alarms if finding.id != "data-repeated"] == [
        ("weights-changed", 5)
    ]


def test_what_a_run_found_in_itself_is_the_cause_where_its_twin_did_not(tmp_path: Path) -> None:
    def once(model: nn.Module, optimizer: Any) -> list[float]:
        return steps(model, optimizer) + steps(model, optimizer)

    def twice(model: nn.Module, optimizer: Any) -> list[float]:
        return steps(model, optimizer) + steps(model, adam(model.parameters()))

    for name, loop in (("once", once), ("twice", twice)):
        found(tmp_path / name, small, lambda model: adam(model.parameters()), loop)
    runs = TracedRun.read(tmp_path / "twice"), TracedRun.read(tmp_path / "once")
    for label, told in zip(
        "AB",
        (compare_runs(*runs, every=False), compare_runs(*reversed(runs), every=False)),
        strict=True,
    ):
        diagnosis = told.diagnosis
        assert diagnosis is not None
        assert diagnosis.claim.startswith(f"in {label}, another optimizer takes over")
        assert (
            diagnosis.evidence[-1]
            == f"run {label} has the finding optimizer-replaced in step 5: AdamW by AdamW"
        )
        assert diagnosis.where.phase == "update"


def test_an_optimizer_of_what_was_frozen_steps_beside_the_first(tmp_path: Path) -> None:
    def loop(model: Any, optimizer: Any) -> list[float]:
        losses = steps(model, optimizer)
        later = adam(model[2].parameters())
        for step in range(3):
            optimizer.zero_grad()
            later.zero_grad()
            loss = lost(model, step + 9)
            loss.backward()
            optimizer.step()
            later.step()
            losses.append(loss.item())
        return losses

    alarms = found(tmp_path, small, lambda model: adam(model[0].parameters()), loop)  # type: ignore[index]
    assert {finding.id for finding in alarms} == {
        "not-in-optimizer"
    }  # until the second one is there
    # The second one is met as it steps for the first time, when the first one's step is over.
    assert TracedRun.read(tmp_path).steps == tuple(range(9))


def microbatches(every: int) -> Loop:
    def loop(model: nn.Module, optimizer: Any) -> list[float]:
        losses = []
        for step in range(6):
            loss = lost(model, step) / 2
            loss.backward()
            losses.append(loss.item())
            if step % every == every - 1:
                optimizer.step()
                optimizer.zero_grad()
        return losses

    return loop


def test_steps_after_another_number_of_passes_are_named_as_that(tmp_path: Path) -> None:
    for every in (1, 2):
        found(
            tmp_path / str(every),
            small,
            lambda model: adam(model.parameters()),
            microbatches(every),
        )
    told = compare_runs(
        TracedRun.read(tmp_path / "1"), TracedRun.read(tmp_path / "2"), every=False
    ).diagnosis
    assert told is not None
    assert told.claim == "the optimizer steps after 1 pass in A, and after 2 passes in B"
    assert told.evidence == ("step 1 has 1 pass in A, and 2 passes in B",)


class Nested(torch.optim.AdamW):
    """Has a step() of its own, which calls that of torch; fails where it is told to."""

    fails = 0

    def step(self, closure: Any = None) -> Any:
        self.fails -= 1
        if not self.fails:
            raise MemoryError
        return super().step(closure)


@pytest.mark.parametrize("fails", [0, 3])
def test_a_step_within_a_step_is_one_step(fails: int, tmp_path: Path) -> None:
    def loop(model: nn.Module, optimizer: Any) -> list[float]:
        adam(small().parameters())  # now torch has hooks around the step() of AdamW too
        optimizer.fails = fails
        losses = []
        for step in range(5):
            optimizer.zero_grad()
            loss = lost(model, step)
            loss.backward()
            try:
                optimizer.step()
            except MemoryError:
                continue
            losses.append(loss.item())
        return losses

    assert (
        faults(
            found(
                tmp_path,
                small,
                lambda model: Nested(model.parameters(), 1e-2, weight_decay=0.0),
                loop,
            )
        )
        == []
    )
    assert TracedRun.read(tmp_path).steps == tuple(range(6 - bool(fails)))


class Words(nn.Module):
    """Sparse gradients, a weight that is worked out, and complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 6, sparse=True)
        self.turn = nn.Parameter(torch.randn(6, dtype=torch.complex64))
        self.normed = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 3))

    def forward(self, tensor: Tensor) -> Tensor:
        mixed = torch.fft.ifft(
            torch.fft.fft(self.words((tensor.abs() * 2).long().clamp(max=8)).mean(1)) * self.turn
        )
        return self.normed(mixed.real)  # type: ignore[no-any-return]


def test_sparse_complex_and_parametrized_weights_keep_their_numbers(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    def made(model: Any) -> Any:
        rest = [weight for name, weight in model.named_parameters() if name != "words.weight"]
        return [torch.optim.SparseAdam([model.words.weight], 1e-2), torch.optim.Adam(rest, 1e-2)]

    def loop(model: nn.Module, optimizers: Any) -> list[float]:
        losses = []
        for step in range(4):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = lost(model, step)
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            losses.append(loss.item())
        return losses

    assert faults(found(tmp_path, Words, made, loop)) == []
    assert [str(warning.message) for warning in recwarn if "complex" in str(warning.message)] == []


class Counting(nn.Module):
    """A language model that keeps something from pass to pass: a count, and its last hidden state."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(9, 8), nn.Linear(8, 9)
        self.register_buffer("count", torch.zeros(()))
        self.last: Tensor | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        self.count += 1
        hidden = self.words(tokens) * (1 + self.count)
        if self.last is not None:
            hidden = hidden + self.last
        self.last = hidden.detach().mean()
        return self.head(hidden)  # type: ignore[no-any-return]


def test_what_a_model_keeps_between_passes_is_as_if_nobody_had_looked_for_the_future(
    tmp_path: Path,
) -> None:
    def loop(model: nn.Module, optimizer: Any) -> list[float]:
        losses = []
        for step in range(3):
            tokens = torch.randint(9, (4, 7), generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(
                model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
            )
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    assert faults(found(tmp_path, Counting, lambda model: adam(model.parameters()), loop)) == []


@pytest.mark.parametrize(
    "point",
    [
        "row",
        "later",
        "judge_rows",
        "local",
        "backward",
        "_add_gradient_sketch",
        "start",
        "end_step",
    ],
)
def test_a_check_that_fails_itself_is_said_and_left_out(
    point: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*given: Any) -> Any:
        raise KeyError("a mistake of ours")

    monkeypatch.setattr(Reduced, point, broken)
    alarms = found(tmp_path, small, lambda model: adam(model.parameters()), steps)
    ended = [finding for finding in alarms if finding.id == "check-ended"]
    assert [(finding.where, finding.evidence) for finding in ended] == [
        ("Reduced", "KeyError: 'a mistake of ours'")
    ]


def test_a_log_that_fails_itself_is_said_and_the_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from bridge.trace.layer_log import LayerLog

    def broken(*given: Any) -> Any:
        raise KeyError("a mistake of ours")

    monkeypatch.setattr(LayerLog, "saw", broken)
    with caplog.at_level(logging.WARNING, "bridge.trace"):
        found(tmp_path, small, lambda model: adam(model.parameters()), steps)
    told = [
        record.getMessage() for record in caplog.records if "LayerLog failed" in record.getMessage()
    ]
    assert len(told) == 1
    assert "step 1" in told[0]
    assert "the training goes on: KeyError" in told[0]


def test_hooks_on_all_optimizers_do_not_come_and_go_with_models(tmp_path: Path) -> None:
    """Torch walks through them in each step, and ends it in an error if one goes meanwhile."""
    numbers = []
    for name in ("a", "b"):
        model = small()
        attach(model, LOGS, tmp_path / name, optimizer=adam(model.parameters())).remove()
        numbers.append(len(_global_optimizer_pre_hooks))
    assert numbers[0] == numbers[1]


def test_a_long_run_takes_constant_memory_and_a_spike_of_its_loss_is_a_remark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What other tests left behind collects the losses of this training too.
    monkeypatch.setattr(roots, "_listeners", WeakSet[roots.Roots]())
    told: list[tuple[int, set[str], list[str]]] = []
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.1), nn.Linear(4, 3))
    optimizer = adam(model.parameters(), 1e-3)
    tracer = attach(
        model,
        run=tmp_path,
        optimizer=optimizer,
        on_step=lambda step, numbers, found: told.append(
            (step, set(numbers), [one.id for one in found])
        ),
    )
    sizes = []
    for step in range(1, 401):
        optimizer.zero_grad()
        (lost(model, step) * (1000 if step == 350 else 1)).backward()
        optimizer.step()
        if step in (150, 300):
            gc.collect()
            sizes.append(len(gc.get_objects()))
    assert [(step, ids) for step, _, ids in told if ids] == [
        (350, ["loss-spike", "gradient-spike"])
    ]
    assert [step for step, _, _ in told] == list(range(1, 401))
    assert all(names == {"loss", "gradient norm"} for _, names, _ in told)
    # What is told is all that this test itself keeps: a tuple with a set and a list for each step.
    assert sizes[1] - sizes[0] < 4 * 150
    assert {one.severity for one in tracer.findings} == {"remark"}


def test_a_function_that_is_told_of_steps_and_fails_does_not_end_a_training(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*told: Any) -> None:
        raise OSError("the network is gone")

    model = small()
    optimizer = adam(model.parameters())
    attach(model, optimizer=optimizer, on_step=fail)
    assert len(steps(model, optimizer)) == 4
    assert [text for text in caplog.messages if "StepReport failed in step 1" in text]


def test_a_compiled_update_is_explained_as_any_other_is(tmp_path: Path) -> None:
    model = small()
    optimizer = adam(model.parameters())
    update = torch.compile(optimizer.step, backend="eager")
    tracer = attach(model, LOGS, tmp_path, optimizer=optimizer)
    for step in range(3):
        optimizer.zero_grad()
        lost(model, step).backward()
        update()
    assert [one.id for one in tracer.findings if one.severity == "fault"] == []
    assert tracer.source.now().step == 4
