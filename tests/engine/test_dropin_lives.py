"""What notebooks do around an engine: copy its model, pickle it, give it to another engine, share layers, change it. It
works as in plain torch, or says what to do instead.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import compat.deepspeed as deepspeed
from bridge.engine.layers import HOOKS
from bridge.errors import BridgeError
from tests.engine.pool import Run

LEVELS = pytest.mark.parametrize("level", [0, 2, 3])
KINDS = (*HOOKS, "_state_dict_pre_hooks", "_load_state_dict_pre_hooks")


def config(level: int, accumulation: int = 1) -> dict[str, Any]:
    """A config with Adam, whose moments tell a new optimizer from an old one."""
    return {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "weight_decay": 0.01}},
        "zero_optimization": {"stage": level},
    }


def model() -> nn.Sequential:
    """An embedding and two layers, with the same weights every time."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def rows(step: int, rank: int = 0) -> Tensor:
    """Input of a step."""
    return (torch.arange(3) + step + rank) % 5


def train(engine: Any, steps: range, rank: int = 0) -> list[float]:
    """Losses of steps by an engine."""
    losses = []
    for step in steps:
        loss = engine(rows(step, rank)).square().sum()
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def train_plainly(plain: nn.Module, steps: range, ranks: int = 1) -> list[float]:
    """Losses of the same steps by torch alone, with a new optimizer; of the first rank if there are several."""
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1, weight_decay=0.01)
    losses = []
    for step in steps:
        optimizer.zero_grad()
        found = [plain(rows(step, rank)).square().sum() for rank in range(ranks)]
        (sum(found[1:], found[0]) / ranks).backward()
        optimizer.step()
        losses.append(float(found[0].detach()))
    return losses


def whole(engine: Any) -> AbstractContextManager[None]:
    """The context in which all weights can be read."""
    found: AbstractContextManager[None] = deepspeed.zero.GatheredParameters(
        list(engine.module.parameters())
    )
    return found


def start(given: nn.Module, level: int) -> Any:
    """An engine."""
    return deepspeed.initialize(model=given, config=config(level))[0]


def by_torch_save(given: nn.Module) -> nn.Module:
    """A model as it comes back from a file."""
    file = io.BytesIO()
    torch.save(given, file)
    file.seek(0)
    found: nn.Module = torch.load(file, weights_only=False)
    return found


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda given: pickle.loads(pickle.dumps(given)),
    "torch.save": by_torch_save,
}


@LEVELS
@pytest.mark.parametrize("how", COPIES)
def test_a_copy_of_the_model_is_a_model_of_its_own(how: str, level: int) -> None:
    engine, plain = start(model(), level), model()
    train(engine, range(2))
    train_plainly(plain, range(2))
    with whole(engine) if level == 3 else nullcontext():
        found = COPIES[how](engine.module)
    train(engine, range(2, 4))
    assert hooks(found) == 0
    for step in range(3):  # as the model was, however far the engine went meanwhile
        torch.testing.assert_close(found(rows(step)), plain(rows(step)))
    assert train_plainly(found, range(4, 6)) == pytest.approx(train_plainly(plain, range(4, 6)))


def test_an_engine_is_no_model_to_copy() -> None:
    with pytest.raises(BridgeError, match=r"engine: an engine cannot be copied .* engine\.module"):
        copy.deepcopy(start(model(), 0))


def hooks(given: nn.Module) -> int:
    """How many hooks of any kind a model and its parameters have, those that do nothing left out."""
    found = [
        hook
        for part in given.modules()
        for kind in KINDS
        for hook in vars(part)[kind].values()
        if getattr(getattr(hook, "hook", hook), "__name__", "") != "_ignore"
    ]
    grads = [getattr(weight, "_post_accumulate_grad_hooks", None) for weight in given.parameters()]
    return len(found) + sum(len(each or ()) for each in grads)


@LEVELS
@pytest.mark.parametrize("end", [True, False], ids=["destroyed", "forgotten"])
def test_a_model_goes_on_in_another_engine(level: int, end: bool) -> None:
    given, plain = model(), model()
    first = start(given, level)
    expected = train_plainly(plain, range(2)) + train_plainly(plain, range(2, 4))
    found = train(first, range(2))
    if end:
        first.destroy()
        assert hooks(given) == 0 and "forward" not in vars(given)
        with whole(first):
            assert not given[0].weight.isnan().any()
        with pytest.raises(BridgeError, match=r"called after engine\.destroy\(\); create a new"):
            first(rows(0))
    second = start(given, level)
    assert found + train(second, range(2, 4)) == pytest.approx(expected)
    if not end:
        for call in (
            lambda: first(rows(0)),
            lambda: first.save_checkpoint("nowhere"),
            first.step,
            lambda: first.module,
        ):
            with pytest.raises(BridgeError, match=r"initialize was called again with 0\.weight"):
                call()
    first.destroy()  # which has ended, and changes nothing
    assert train(second, range(4, 5))
    second.destroy()
    assert hooks(given) == 0


@LEVELS
def test_of_two_engines_that_share_layers_the_later_one_has_them(level: int) -> None:
    shared = model()
    first = start(nn.Sequential(shared[0], shared[1]), level)
    second = start(shared, level)
    assert train(second, range(2)) == pytest.approx(train_plainly(model(), range(2)))
    with pytest.raises(BridgeError, match=r"use the new engine, or give each engine layers of its"):
        train(first, range(1))


@LEVELS
def test_a_model_that_was_resized_needs_a_new_engine(level: int) -> None:
    engine, plain = start(model(), level), model()
    train(engine, range(2))
    train_plainly(plain, range(2))
    for given, context in ((engine.module, whole(engine)), (plain, nullcontext())):
        with context:
            longer = torch.cat([given[0].weight.data, torch.ones(2, 4)])
        given[0].weight = nn.Parameter(longer)
        given[0].num_embeddings = 7
    with pytest.raises(BridgeError, match=r"0\.weight: this parameter was replaced.* new engine"):
        engine(rows(0))
    again = start(given := engine.native.model, level)
    assert train(again, range(2, 4)) == pytest.approx(train_plainly(plain, range(2, 4)))
    assert dict(given.named_parameters()).keys() == dict(plain.named_parameters()).keys()


FORGETS = [
    (level, which)
    for level in range(4)
    for which in ("engine", "module", "optimizer")
    if level < 2 or (level, which) == (3, "optimizer")
]
"""Where DeepSpeed 0.19.8 forgets microbatches: seen in its engine."""


@pytest.mark.parametrize("level", range(4))
@pytest.mark.parametrize("which", ["engine", "module", "optimizer"])
def test_zero_grad_between_microbatches_forgets_what_deepspeeds_forgets(
    which: str, level: int
) -> None:
    engine = deepspeed.initialize(model=model(), config=config(level, accumulation=2))[0]
    expected = torch.zeros(2, 4)
    for micro in range(2):
        loss = engine(rows(micro)).square().sum()
        engine.backward(loss)
        plain = model()
        plain(rows(micro)).square().sum().backward()
        if micro == 0:
            engine.step()
            owner = engine if which == "engine" else getattr(engine, which)
            owner.zero_grad()
        if micro or (level, which) not in FORGETS:
            expected += plain[3].weight.grad / 2
    found = deepspeed.utils.safe_get_full_grad(engine.native.model[3].weight)
    torch.testing.assert_close(found, expected)
    engine.step()


def test_moments_that_began_late_are_saved_as_such(tmp_path: Path) -> None:
    first = start(model(), 1)
    train(first, range(3))
    first.save_checkpoint(tmp_path)
    second, third = start(model(), 1), start(model(), 1)
    second.load_checkpoint(tmp_path, load_optimizer_states=False)
    plain = copy.deepcopy(second.module)
    expected = train_plainly(plain, range(3, 7))
    found = train(second, range(3, 5))
    second.save_checkpoint(tmp_path)
    third.load_checkpoint(tmp_path)
    assert [*found, *train(third, range(5, 7))] == pytest.approx(expected)
    assert third.global_steps == 7


def interrupt(engine: Any, where: str, rank: int = 0) -> None:
    """Run a microbatch that ends with an interruption in one of its passes."""

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    block = engine.native.model[1]
    block.forward, before = (stop if where == "forward" else block.forward), block.forward
    try:
        output = engine(rows(0, rank))
        output.register_hook(stop)
        engine.backward(output.square().sum())
    except KeyboardInterrupt:
        block.forward = before
        return
    raise AssertionError("nothing was interrupted")


@LEVELS
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_training_goes_on_after_an_interruption(where: str, level: int) -> None:
    engine = start(model(), level)
    found = []
    for step in range(3):
        interrupt(engine, where)
        found += train(engine, range(step, step + 1))
    assert found == pytest.approx(train_plainly(model(), range(3)))


def interrupted(rank: int, world: int) -> list[float]:
    """Losses of a rank whose passes were interrupted."""
    engine = start(model(), 3)
    found = train(engine, range(1), rank)
    interrupt(engine, "forward", rank)
    return found + train(engine, range(1, 3), rank)


def test_ranks_go_on_after_an_interruption(run: Run) -> None:
    first, _ = run(2, interrupted)
    assert first == pytest.approx(train_plainly(model(), range(3), 2))


def lives(rank: int, world: int) -> tuple[list[list[float]], list[str], list[list[float]]]:
    """What ranks that share a model see: its losses in three engines one after the other, what is said of copies while
    weights are not whole, and the output of a copy that was made while they were.
    """
    given, found, said, copied = model(), list[list[float]](), list[str](), model()
    for begin, level, end in ((0, 3, True), (2, 3, False), (4, 1, True)):
        engine = start(given, level)
        if begin == 2:
            for make in COPIES.values():
                try:
                    make(engine.module)
                except BridgeError as error:
                    said.append(str(error))
            with whole(engine):
                copied = copy.deepcopy(engine.module)
        found.append(train(engine, range(begin, begin + 2), rank))
        if end:
            engine.destroy()
    with torch.no_grad():
        return found, said, copied(rows(0)).tolist()


def test_ranks_give_a_model_from_engine_to_engine(run: Run) -> None:
    plain = model()
    expected, output = [], Tensor()
    for begin in (0, 2, 4):
        output = plain(rows(0)) if begin == 2 else output
        expected.append(train_plainly(plain, range(begin, begin + 2), 2))
    for rank, (found, said, copied) in enumerate(run(2, lives)):
        for losses, one in zip(expected, found, strict=True):
            assert rank or one == pytest.approx(losses)
        assert len(said) == len(COPIES)
        assert all("0.weight: " in one and "within zero.Gathered" in one for one in said)
        torch.testing.assert_close(torch.tensor(copied), output.detach())
