"""Updates of torch's optimizers are worked out from what goes in: as they are, nothing is found; as they should not be, it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from bridge.trace import attach

KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "Adam": (torch.optim.Adam, {"lr": 1e-2}),
    "Adam, decay": (torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1}),
    "Adam, largest": (torch.optim.Adam, {"lr": 1e-2, "amsgrad": True, "maximize": True}),
    "Adam, one by one": (torch.optim.Adam, {"lr": torch.tensor(1e-2), "foreach": False}),
    "Adam, at once": (torch.optim.Adam, {"lr": 1e-2, "fused": True, "weight_decay": 0.1}),
    "AdamW": (
        torch.optim.AdamW,
        {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.8, 0.9), "eps": 1e-3},
    ),
    "SGD": (torch.optim.SGD, {"lr": 1e-2}),
    "SGD, momentum": (
        torch.optim.SGD,
        {"lr": 1e-2, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1},
    ),
    "SGD, Nesterov": (
        torch.optim.SGD,
        {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "maximize": True},
    ),
}
Strike = Callable[[int, nn.Module, Any], object]


def found(
    kind: str, begins: Strike = lambda *given: None, stepped: Strike = lambda *given: None
) -> list[tuple[str, int]]:
    """Findings of 5 steps; `stepped` is called within each step, once its optimizer has updated weights."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 3))
    made, settings = KINDS[kind]
    optimizer, steps = made(model.parameters(), **settings), [0]
    optimizer.register_step_post_hook(lambda *given: [stepped(steps[0], model, optimizer)].clear())
    tracer = attach(model, optimizer=optimizer)
    for step in range(1, 6):
        steps[0] = step
        begins(step, model, optimizer)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(torch.randn(8, 6)), torch.randint(3, (8,))).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    tracer.remove()
    return [(one.id, one.step) for one in tracer.findings.found if one.id != "decay-on-norms"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_clean_step_is_explained(kind: str) -> None:
    assert found(kind) == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_change_beside_the_update_is_not(kind: str) -> None:
    def strike(step: int, model: nn.Module, optimizer: Any) -> None:
        if step == 2:
            model.get_parameter("2.weight").data.mul_(1.001)

    assert found(kind, stepped=strike) == [("update-unexplained", 2)]
    assert found(kind, begins=strike) == [("weights-changed", 2)]


def test_arithmetic_that_does_not_keep_to_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.optim.adam as module

    plain = module.adam
    monkeypatch.setattr(
        module, "adam", lambda *given, **named: plain(*given, **{**named, "eps": 0.1})
    )
    assert found("AdamW") == [("update-unexplained", 1)]


def test_state_that_is_gone() -> None:
    assert found("AdamW", lambda step, model, optimizer: step == 3 and optimizer.state.clear()) == [
        ("moments-lost", 3)
    ]


def test_rates_and_settings_may_change_between_steps() -> None:
    def anneal(step: int, model: nn.Module, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * 0.5
            group["betas"] = (0.7, 0.99)

    assert found("AdamW", anneal) == []


def test_a_rule_of_its_own_is_left_alone() -> None:
    class Own(torch.optim.AdamW):
        """Moves weights half as far."""

        def step(self, closure: Any = None) -> Any:
            old = [
                weight.detach().clone() for group in self.param_groups for weight in group["params"]
            ]
            super().step(closure)
            for before, weight in zip(old, self.param_groups[0]["params"], strict=True):
                weight.data.copy_((weight.data + before) / 2)

    KINDS["own"] = Own, {"lr": 1e-2, "weight_decay": 0.0}
    try:
        assert found("own") == []
    finally:
        del KINDS["own"]
