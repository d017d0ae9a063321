"""Optimizers of a script: each argument of each class of torch is heard or refused, and other rules run on slices or whole.

`python tests/engine/test_own_rules.py --first N --count N` tries many drawn optimizers at every level of ZeRO.
"""

from __future__ import annotations

import argparse
import copy
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import compat.deepspeed as deepspeed
from bridge.errors import BridgeError, ConfigError

Make = Callable[[nn.Module], torch.optim.Optimizer]
OPTIM = torch.optim
CLASSES = sorted(
    name
    for name, kind in vars(OPTIM).items()
    if isinstance(kind, type) and issubclass(kind, OPTIM.Optimizer) and kind is not OPTIM.Optimizer
)
VALUES: dict[str, tuple[Any, ...]] = {
    "lr": (0.02, torch.tensor(0.02, dtype=torch.float64)),
    "weight_decay": (0.1,),
    "betas": ((0.8, 0.95),),
    "eps": (1e-3,),
    "momentum": (0.7,),
    "dampening": (0.3,),
    "etas": ((0.6, 1.1),),
    "step_sizes": ((1e-3, 0.1),),
    "ns_coefficients": ((3.0, -4.0, 2.0),),
    "ns_steps": (3,),
    "adjust_lr_fn": ("match_rms_adamw", "original"),
    "d": (2.0,),
    "beta2_decay": (-0.5,),
    "alpha": (0.9,),
    "lambd": (0.01,),
    "t0": (2.0,),
    "rho": (0.8,),
    "lr_decay": (0.1,),
    "initial_accumulator_value": (0.3,),
    "momentum_decay": (0.01,),
    "line_search_fn": ("strong_wolfe",),
    "max_iter": (3,),
    "max_eval": (3,),
    "tolerance_grad": (1e-3,),
    "tolerance_change": (1e-3,),
    "history_size": (3,),
}
SWITCHES = (True,)
STEPS = 6
NEVER = ("LBFGS", "SparseAdam")
"""Classes that the engine refuses: one needs a closure, one sparse gradients."""
ADAFACTOR = {"eps": ((1e-4, 1e-2),)}
SINGLE = [
    (name, argument, value)
    for name in CLASSES
    for argument in [*signature(getattr(OPTIM, name)).parameters][1:]
    for value in (ADAFACTOR if name == "Adafactor" else {}).get(
        argument, VALUES.get(argument, SWITCHES)
    )
]


class Sign(OPTIM.Optimizer):
    """A rule by element, as scripts write Lion."""

    def __init__(self, weights: Any, lr: float = 0.01) -> None:
        super().__init__(weights, {"lr": lr, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                moment = self.state[weight].setdefault("moment", torch.zeros_like(weight))
                first, second = group["betas"]
                weight.mul_(1 - group["lr"] * 0.1)
                weight.sub_(group["lr"] * (first * moment + (1 - first) * weight.grad).sign())
                moment.lerp_(weight.grad, 1 - second)


class Trust(OPTIM.Optimizer):
    """A rule by layer, as scripts write LAMB, which counts in its groups and decays without a gradient too."""

    def __init__(self, weights: Any, lr: float = 0.01) -> None:
        super().__init__(weights, {"lr": lr, "count": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] += 1
            for weight in group["params"]:
                weight.mul_(0.99)
                if weight.grad is not None:
                    ratio = weight.norm() / weight.grad.norm().clamp(min=1e-6)
                    weight.sub_(group["lr"] / group["count"] * ratio * weight.grad)


class Together(Trust):
    """A rule that divides by the norm of all gradients, and by element but for it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        weights = [weight for group in self.param_groups for weight in group["params"]]
        norm = torch.stack([w.grad.norm() for w in weights if w.grad is not None]).norm()
        for weight in weights:
            if weight.grad is not None:
                weight.sub_(0.01 * weight.grad / norm)


class Periodic(Sign):
    """A rule that does something else every tenth step, with weights that it keeps."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for weight in self.param_groups[0]["params"]:
            state = self.state[weight]
            state["steps"] = state.get("steps", 0) + 1
            if state["steps"] % 10 == 0:
                slow = state.setdefault("slow", weight.clone())
                weight.copy_(slow.lerp_(weight, 0.5))


class Noise(Sign):
    """A rule that draws."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for weight in self.param_groups[0]["params"]:
            weight.add_(torch.randn_like(weight), alpha=0.01)


def model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = (nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6), nn.LayerNorm(6))
    return nn.Sequential(*layers).double()


def of_class(name: str, **settings: Any) -> Make:
    """How to make an optimizer of torch; Muon takes matrices alone."""

    def make(of: nn.Module) -> OPTIM.Optimizer:
        weights = [weight for weight in of.parameters() if name != "Muon" or weight.ndim == 2]
        return getattr(OPTIM, name)(weights, **copy.deepcopy(settings))  # type: ignore[no-any-return]

    return make


def batch(step: int, rank: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(step * 10 + rank)
    return torch.randn(4, 6, dtype=torch.float64, generator=generator)


def plain(make: Make, world: int = 1, steps: int = STEPS) -> dict[str, Tensor]:
    """The weights after some steps of torch alone, with a rate that changes."""
    of = model()
    optimizer = make(of)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(world):
            (of(batch(step, rank)).square().mean() / world).backward()
        optimizer.step()
        _change(optimizer, step)
    return of.state_dict()


def _change(optimizer: OPTIM.Optimizer, step: int) -> None:
    for group in optimizer.param_groups:
        if step == 2:
            group["lr"] = group["lr"] * 0.5


def engine_of(make: Make, level: int) -> Any:
    of = model()
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": level},
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return deepspeed.initialize(model=of, optimizer=make(of), config=config)[0]


def run_steps(engine: Any, first: int, last: int, rank: int = 0) -> None:
    for step in range(first, last):
        engine.backward(engine(batch(step, rank)).square().mean())
        engine.step()
        _change(engine.optimizer, step)


def outcome(make: Make, level: int, steps: int = STEPS) -> str:
    """`equal`, `refused: REASON`, `none: REASON` if torch itself ends in an error, or `BUG`."""
    try:
        expected: Any = plain(make, steps=steps)
    except Exception as error:
        expected = error
    try:
        engine = engine_of(make, level)
        run_steps(engine, 0, steps)
    except BridgeError as error:
        return f"refused: {error}"
    except Exception as error:
        same = type(error) is type(expected)
        return f"none: {error}" if same else f"BUG: {type(error).__name__}: {error}"
    if isinstance(expected, Exception):
        # It chooses a kernel of a device, and the engine has its own.
        known = "capturable=True" in str(expected)
        return f"{'none' if known else 'BUG'}: runs, but torch says {expected}"
    apart = (
        float((engine.module_state_dict()[name] - value).abs().max())
        for name, value in expected.items()
    )
    return "equal" if max(apart) < 1e-10 else "BUG: other weights"


WHOLE = ("ASGD", "Adafactor", "Muon")


@pytest.mark.parametrize("name", CLASSES)
def test_each_argument_of_torchs_optimizers_is_heard_or_refused(name: str) -> None:
    for number, (kind, argument, value) in enumerate(SINGLE):
        if kind != name:
            continue
        level = (0, 1, 2, 3)[number % 4]
        found = outcome(of_class(name, **{argument: value}), level)
        assert not found.startswith("BUG"), (argument, value, level, found)
        whole = name in WHOLE or argument in ("dampening", "momentum")
        if name not in NEVER and not (whole and level > 1) and argument not in NO_ARGUMENT:
            assert found == "equal" or argument == "nesterov", (argument, value, level, found)


NO_ARGUMENT = ("capturable", "differentiable")
"""Arguments with which no class of torch updates weights on a CPU. Nesterov's momentum needs another one."""


@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", [Sign, Trust, Together, Periodic])
def test_rules_of_a_script_run_on_slices_or_whole(kind: Any, level: int) -> None:
    found = outcome(lambda of: kind(of.parameters()), level, 22)
    if kind is Sign or level < 2:
        assert found == "equal"
    else:
        assert found.startswith(f"refused: optimizer: found {kind.__name__}, whose rule needs")


class Ahead(torch.optim.Optimizer):
    """Keeps copies of weights, made at construction."""

    def __init__(self, weights: Any) -> None:
        super().__init__(weights, {"lr": 0.1})
        self.slow = [
            [weight.detach().clone() for weight in group["params"]] for group in self.param_groups
        ]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group, copies in zip(self.param_groups, self.slow, strict=True):
            for weight, slow in zip(group["params"], copies, strict=True):
                weight.add_(weight.grad, alpha=-0.1)
                weight.copy_(slow.lerp_(weight, 0.5))


def test_refusals_say_what_to_leave_out() -> None:
    with pytest.raises(ConfigError, match=r"Ahead, whose attribute slow has tensors of its own"):
        engine_of(lambda of: Ahead(of.parameters()), 0)
    with pytest.raises(ConfigError, match=r"SGD with dampening=0.5, .*, or leave dampening out$"):
        engine_of(of_class("SGD", momentum=0.9, dampening=0.5), 3)


def test_a_rule_that_draws_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"found Noise.* draws random numbers"):
        engine_of(lambda of: Noise(of.parameters()), 0)


@pytest.mark.parametrize("warm", [True, False])
def test_a_rate_of_zero_at_the_start_hides_nothing(warm: bool) -> None:
    def make(of: nn.Module) -> Any:
        return Trust(of.parameters(), 0.0 if warm else 0.01)

    assert outcome(make, 0) == "equal"
    assert outcome(make, 2).startswith("refused")


@pytest.mark.parametrize(("kind", "level"), [(Sign, 1), (Sign, 3), (Trust, 1), (Together, 0)])
def test_rules_of_a_script_on_two_ranks(run: Any, kind: Any, level: int) -> None:
    expected = plain(lambda of: kind(of.parameters()), 2)
    for weights in run(2, _on_rank, kind, level):
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value)


def _on_rank(rank: int, world: int, kind: Any, level: int) -> dict[str, Tensor]:
    engine = engine_of(lambda of: kind(of.parameters()), level)
    run_steps(engine, 0, STEPS, rank)
    return {name: value.clone() for name, value in engine.module_state_dict().items()}


@pytest.mark.parametrize("name", ["Adagrad", "NAdam", "RMSprop"])
def test_a_resume_goes_on_as_if_nothing_had_happened(name: str, tmp_path: Path) -> None:
    make = of_class(name, weight_decay=0.1)
    first = engine_of(make, 1)
    run_steps(first, 0, 3)
    first.save_checkpoint(str(tmp_path))
    second = engine_of(make, 2)
    second.load_checkpoint(str(tmp_path))
    run_steps(second, 3, STEPS)
    for key, value in plain(make).items():
        torch.testing.assert_close(second.module_state_dict()[key], value)


def test_a_rule_on_whole_parameters_is_in_no_checkpoint(tmp_path: Path) -> None:
    engine = engine_of(lambda of: Trust(of.parameters()), 0)
    with pytest.raises(BridgeError, match=r"Trust updates whole parameters, and its state cannot"):
        engine.save_checkpoint(str(tmp_path))
    assert not [*tmp_path.iterdir()]


def drawn(number: int) -> tuple[str, dict[str, Any]]:
    """A class and some of its arguments."""
    choice = random.Random(number)
    name = CLASSES[number % len(CLASSES)]
    rows = [row for row in SINGLE if row[0] == name and row[1] not in NO_ARGUMENT]
    return name, {
        row[1]: row[2] for row in choice.sample(rows, min(len(rows), choice.randint(2, 5)))
    }


def main() -> int:
    """Print what is wrong and the outcomes by class; 1 if anything is wrong."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    asked = parser.parse_args()
    counts = Counter[str]()
    for number in range(asked.first, asked.first + asked.count):
        name, settings = drawn(number)
        for level in range(4):
            found = outcome(of_class(name, **settings), level)
            counts[f"{name}: {found.split(',')[0].split('(')[0][:60]}"] += 1
            if found.startswith("BUG"):
                print(number, level, name, settings, found, flush=True)
    for line, count in sorted(counts.items()):
        print(f"{count:6} {line}")
    return int(any("BUG" in line for line in counts))


if __name__ == "__main__":
    sys.exit(main())
