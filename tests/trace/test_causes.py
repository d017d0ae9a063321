"""A cause is claimed only with what proves it: other changes that leave the same marks are not called by its name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bridge.plan.plan import Debug
from bridge.trace import attach
from bridge.trace.comparison import Comparison
from bridge.trace.filter import Filter
from bridge.trace.run import TracedRun
from bridge.trace.run_comparison import compare_runs

LOGS = Debug(
    layer_outputs=9, layer_gradients=9, param_init=9, all_param_gradients=9, param_update=9
)


class Model(nn.Module):
    """Words, two blocks, a head."""

    def __init__(self, **embedding: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.words = nn.Embedding(12, 8, **embedding)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(2)
        )
        self.head = nn.Linear(8, 12)

    def forward(self, tokens: Tensor, scale: Tensor | None = None) -> Tensor:
        stream = self.words(tokens) * (1.0 if scale is None else scale)
        for block in self.blocks:
            stream = stream + block(stream)
        return self.head(stream)  # type: ignore[no-any-return]


Change = Callable[[nn.Module, Any], object]


def trained(
    folder: Path,
    *,
    model: nn.Module | None = None,
    change: Change = lambda model, optimizer: None,
    optimizer: Any = torch.optim.AdamW,
    factor: float = 1.0,
    unscale: float = 1.0,
    alike: bool = False,
    logs: Debug = LOGS,
    call: Callable[[nn.Module, Tensor], Tensor] = lambda model, tokens: model(tokens),
    rate: float = 1e-2,
    decay: float = 0.0,
    **more: Any,
) -> Path:
    """Two steps. `change` is called before the trace is attached, so that its hooks come before those of the trace."""
    found = Model() if model is None else model
    named = {"eps": 1e-3} if optimizer is torch.optim.AdamW else {}
    kind = optimizer(found.parameters(), lr=rate, weight_decay=decay, **named)
    change(found, kind)
    tracer = attach(found, logs, folder, optimizer=kind, invariants=False, **more)
    for step in range(2):
        tokens = torch.randint(
            1, 12, (4, 6), generator=torch.Generator().manual_seed(0 if alike else step)
        )
        tokens[0, 0] = 0
        kind.zero_grad()
        loss = nn.functional.cross_entropy(call(found, tokens).flatten(0, 1), tokens.flatten())
        (loss * factor).backward()  # type: ignore[no-untyped-call]
        for weight in found.parameters():
            weight.grad = weight.grad if weight.grad is None else weight.grad * unscale
        kind.step()
    tracer.remove()
    return folder


def held(first: Path, second: Path) -> Comparison:
    return compare_runs(TracedRun.read(first), TracedRun.read(second), every=False)


def claimed(tmp_path: Path, first: dict[str, Any], second: dict[str, Any] | None = None) -> str:
    """What is claimed where A was trained so, and B so."""
    found = held(trained(tmp_path / "a", **first), trained(tmp_path / "b", **(second or {})))
    assert found.divergence is not None and found.diagnosis is not None
    return found.diagnosis.claim + "\n" + "\n".join(found.diagnosis.evidence)


def by_hand(names: tuple[str, ...], factor: float) -> Change:
    """Weights are multiplied as each step ends."""

    def change(model: nn.Module, optimizer: Any) -> None:
        def strike(*given: Any) -> None:
            for name, weight in model.named_parameters():
                if name.startswith(names):
                    weight.data.mul_(factor)

        optimizer.register_step_post_hook(strike)

    return change


def test_weights_that_were_changed_by_hand_are_no_decay(tmp_path: Path) -> None:
    said = claimed(tmp_path, {"change": by_hand(("blocks.0.0.weight", "head.weight"), 0.999)})
    assert said.startswith("only blocks.0.0.weight, head.weight change differently from B")
    assert "where the updates of A and B differ, they differ by -0.000996 times the weights" in said


@pytest.mark.parametrize("decay", [0.0, 0.2])
def test_nor_are_all_of_them_even_beside_another_decay(decay: float, tmp_path: Path) -> None:
    said = claimed(tmp_path, {"change": by_hand(("",), 0.9), "decay": decay}, {"decay": 2 * decay})
    assert "weight decay differs" not in said


def test_a_decay_is_one_where_settings_and_rate_make_what_differs(tmp_path: Path) -> None:
    said = claimed(tmp_path, {"decay": 0.1})
    assert said.startswith("weight decay differs: 0.1 in A, 0.0 in B\n")
    assert "a learning rate of 0.01 with decays of 0.1 and 0 makes a difference of -0.001" in said


def test_settings_that_differ_are_no_cause_of_what_two_weights_alone_do(tmp_path: Path) -> None:
    def betas(model: nn.Module, optimizer: Any) -> None:
        optimizer.param_groups[0]["betas"] = (0.9, 0.99)  # which shows in the second step
        by_hand(("head",), 1.01)(model, optimizer)

    assert claimed(tmp_path, {"change": betas}).startswith(
        "only head.bias, head.weight change differently"
    )


class Adapted(Model):
    """With a matrix of zeros that another one is as well, as adapters begin with."""

    def __init__(self, both: bool) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8, bias=False)
        nn.init.zeros_(self.first.weight)
        self.second = nn.Linear(8, 8, bias=False) if both else nn.Identity()
        if both:
            nn.init.zeros_(self.second.weight)  # type: ignore[arg-type]


def test_zeros_that_one_model_lacks_are_no_tie(tmp_path: Path) -> None:
    said = claimed(tmp_path, {"model": Adapted(True)}, {"model": Adapted(False)})
    assert said.startswith("the models do not have the same parameters")


def other_weights() -> Model:
    model = Model()
    nn.init.normal_(model.blocks[0][0].weight)  # type: ignore[index, arg-type]
    return model


def test_weights_that_were_not_logged_are_not_said_to_agree(tmp_path: Path) -> None:
    logs = Debug(layer_outputs=9)
    said = claimed(tmp_path, {"model": other_weights(), "logs": logs}, {"logs": logs})
    assert (
        said.startswith("blocks.0 is the first layer whose outputs differ")
        and "weights agreed" not in said
    )
    assert "weights (the logs do not show whether they were equal)" in said


def test_a_layer_is_not_blamed_for_what_may_come_before_it(tmp_path: Path) -> None:
    def scaled(model: nn.Module, optimizer: Any) -> None:
        model.get_submodule("blocks.0").register_forward_hook(lambda *given: given[-1] * 1.1)

    some = {"filter": Filter(layers=("words", "blocks.1", "head"))}
    said = claimed(tmp_path, {"change": scaled, **some}, some)
    assert said.startswith(
        "blocks.1 is the first layer whose outputs differ, as far as they were logged"
    )


def test_a_loss_is_not_blamed_for_what_runs_after_the_layers_that_were_logged(
    tmp_path: Path,
) -> None:
    def hooked(model: nn.Module, optimizer: Any) -> None:
        model.get_submodule("head").register_full_backward_hook(
            lambda module, given, out: (given[0] * torch.rand(8),)
        )

    whole = claimed(tmp_path / "whole", {"change": hooked})
    assert whole.startswith("the loss, its targets, or the backward pass of head differs")
    some = {"filter": Filter(layers=("words", "blocks"))}
    said = claimed(tmp_path / "some", {"change": hooked, **some}, some)
    told = "outputs of the head were not logged: they may differ"
    assert "backward pass of head differs" not in said, told


def test_a_norm_that_stays_as_samples_do_is_no_clipping(tmp_path: Path) -> None:
    still = {"rate": 0.0, "alike": True}
    said = claimed(tmp_path, {**still, "unscale": 2.0}, still)
    assert said.startswith("all gradients of A are 2 times B's") and "clip" not in said


def test_samples_that_differ_under_one_norm_are(tmp_path: Path) -> None:
    def clipped(model: nn.Module, optimizer: Any) -> None:
        optimizer.register_step_pre_hook(
            lambda *given: [nn.utils.clip_grad_norm_(model.parameters(), 1e-3)].clear()
        )

    assert claimed(tmp_path, {"change": clipped}).startswith(
        "gradients are clipped or normalised to a norm of 0.001 in A alone"
    )


def test_a_row_without_a_gradient_was_not_cleared_after_backward(tmp_path: Path) -> None:
    def filled(**embedding: Any) -> Model:
        model = Model(**embedding)
        nn.init.ones_(model.words.weight)
        return model

    said = claimed(tmp_path, {"model": filled(padding_idx=0)}, {"model": filled()})
    assert said.startswith(
        "some elements of the gradients of words.weight are zero in A alone: they were dropped"
    )


def test_a_loss_scale_is_told_from_a_mean_that_is_missing(tmp_path: Path) -> None:
    assert "a loss scale" in claimed(tmp_path / "scale", {"factor": 8.0, "unscale": 1 / 8})
    said = claimed(tmp_path / "sum", {"factor": 8.0})
    assert said.startswith("the loss that A's backward pass starts from is 8 times B's\n")


def test_a_step_done_twice_is_among_what_doubles_an_update(tmp_path: Path) -> None:
    def doubled(model: nn.Module, optimizer: Any) -> None:
        def strike(*given: Any) -> None:
            for weight in model.parameters():
                if weight.grad is not None:
                    weight.data.add_(weight.grad, alpha=-0.1)

        optimizer.register_step_post_hook(strike)

    sgd = {"optimizer": torch.optim.SGD, "rate": 0.1}
    said = claimed(tmp_path, {"change": doubled, **sgd}, sgd)
    assert said.startswith(
        "the updates of A are 2 times B's: a cause may be clipping in the optimizer, or two updates in a step"
    )
    assert "learning rates agree" in said


def test_what_is_given_by_name_may_come_in_any_order(tmp_path: Path) -> None:
    ones = torch.ones(())
    found = held(
        trained(tmp_path / "a", call=lambda model, tokens: model(scale=ones, tokens=tokens)),
        trained(tmp_path / "b", call=lambda model, tokens: model(tokens, ones)),
    )
    assert found.divergence is None
    assert {line.verdict for line in found.lines if line.name.kind == "input"} == {"equal"}


def test_what_one_run_was_not_to_log_is_unseen(tmp_path: Path) -> None:
    found = held(
        trained(tmp_path / "a", filter=Filter(layers=("blocks.1",))), trained(tmp_path / "b")
    )
    assert found.divergence is None
    assert TracedRun.read(tmp_path / "a").notes == (
        "the log has only layers with blocks.1 in their names",
    )
    odd = held(
        trained(tmp_path / "c", filter=Filter(kinds=("weight",), steps=range(2, 3))),
        trained(tmp_path / "d"),
    )
    assert odd.divergence is None


def twice(model: nn.Module, tokens: Tensor) -> Tensor:
    """In two passes."""
    return torch.cat([model(part) for part in tokens.chunk(2)])


@pytest.mark.parametrize("turned", [False, True])
def test_a_model_that_is_called_past_its_wrapper_makes_no_other_number_of_passes(
    turned: bool, tmp_path: Path
) -> None:
    runs: list[dict[str, Any]] = [
        {"call": lambda model, tokens: twice(model[0], tokens)},
        {"call": twice},
    ]
    runs = [{"model": nn.Sequential(Model()), "accumulation": 2, **run} for run in runs]
    said = claimed(tmp_path, *(runs[::-1] if turned else runs))
    assert said.startswith(f"{'AB'[turned]} runs layers outside of a pass of the traced module")
    assert "the optimizer steps after" not in said


class Batched(Model):
    """A norm over batches beside the words."""

    def __init__(self, momentum: float) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6, momentum=momentum, affine=False)

    def forward(self, tokens: Tensor, scale: Tensor | None = None) -> Tensor:
        return self.head(self.norm(self.words(tokens)))  # type: ignore[no-any-return]


def test_statistics_that_alone_differ_are_named(tmp_path: Path) -> None:
    said = claimed(tmp_path, {"model": Batched(0.1)}, {"model": Batched(0.2)})
    assert said.startswith("only norm.running_mean, norm.running_var are updated differently: ")
