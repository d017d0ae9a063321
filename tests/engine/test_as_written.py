"""The engine runs the model and the script that were written: what is called, which graph there is, and whose gradients count."""

from __future__ import annotations

import copy
import itertools
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import compat.deepspeed as deepspeed
from bridge.engine import comm, initialize
from bridge.errors import BridgeError, ConfigError
from bridge.plan.plan import Plan
from tests.engine.generated_scripts import OPTIMIZERS, Script, drawn, on_rank, outcome

SUITE = 20


def engine_of(model: nn.Module, level: int = 0, optimizer: Any = None, **more: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": level},
        **more,
    }
    if optimizer is None:
        config["optimizer"] = {"type": "SGD", "params": {"lr": 0.1}}
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def batch(seed: int = 0) -> Tensor:
    return torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def linear(*sizes: int) -> nn.Linear:
    return nn.Linear(*(sizes or (6, 6))).double()


class Twice(nn.Sequential):
    """A list of layers with a forward of its own."""

    def forward(self, value: Tensor) -> Tensor:
        return super().forward(value) + super().forward(value * 2)


def _repeated() -> nn.Module:
    act = nn.Tanh()
    return nn.Sequential(linear(), act, linear(), act)


def _hooked() -> nn.Module:
    model = nn.Sequential(linear())
    model.register_forward_pre_hook(lambda module, given: (given[0] * 2,))
    return model


@pytest.mark.parametrize("make", [_repeated, lambda: Twice(linear(), linear()), _hooked])
@pytest.mark.parametrize("level", [0, 3])
def test_a_list_of_layers_runs_as_it_is_called(make: Callable[[], nn.Module], level: int) -> None:
    model = make()
    expected = model(batch()).detach()
    assert torch.equal(engine_of(model, level)(batch()), expected)


def _hook(model: nn.Module) -> None:
    model.register_forward_hook(lambda module, given, output: output * 2)


def _replace(model: Any) -> None:
    model[1] = nn.ReLU()


def _forward(model: nn.Module) -> None:
    model.forward = lambda value: value * model.get_parameter("0.weight").sum()  # type: ignore[method-assign]


CHANGES = {"hook": _hook, "module": _replace, "forward": _forward}


def _changed(rank: int, world: int, change: str, level: int, by: tuple[int, ...]) -> list[Tensor]:
    """How far losses and weights are from plain torch if the model is changed on the ranks `by` within a step."""
    plains: list[Any] = [_deep() for _ in range(world)]
    for plain in plains:
        plain[1] = nn.Tanh()
    model, far = copy.deepcopy(plains[rank]), []
    engine = engine_of(model, level, gradient_accumulation_steps=2)
    for step in range(3):
        for micro in range(2):
            if (step, micro) == (0, 1):
                for one in [*(plains[place] for place in by), *([model] if rank in by else [])]:
                    CHANGES[change](one)
            losses = [
                plain(batch(step + 9 * place)).square().mean() for place, plain in enumerate(plains)
            ]
            found = engine(batch(step + 9 * rank)).square().mean()
            far.append((found - losses[rank]).abs().detach())
            engine.backward(found)
            engine.step()
            (sum(losses) / world / 2).backward()
        for weights in zip(*(plain.parameters() for plain in plains), strict=True):
            gradient = sum(weight.grad for weight in weights if weight.grad is not None)
            for weight in weights:
                weight.data -= 0.1 * gradient
                weight.grad = None
    pairs = zip(model.parameters(), plains[rank].parameters(), strict=True)
    return [*far, *((one - other).abs().max().detach() for one, other in pairs)]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.filterwarnings("ignore:.*after the model was divided")
def test_a_model_that_changes_after_initialize_runs_as_it_is(run: Any, change: str) -> None:
    far = [_changed(0, 1, change, level, (0,)) for level in (0, 2)]
    # Each rank decides by itself, and all make the same collectives.
    for level, by in ((0, (1,)), (2, (0, 1)), (2, (0,))):
        far += run(2, _changed, change, level, by)
    assert all(float(distance) < 1e-12 for distances in far for distance in distances)


def test_changes_that_the_engine_cannot_follow_are_refused(run: Any) -> None:
    engine = engine_of(nn.Sequential(linear(), nn.Tanh()))
    engine.module[0] = linear()
    with pytest.raises(BridgeError, match=r"0.weight: this parameter was replaced"):
        engine(batch())
    assert all(
        "got a hook after the model was divided into layers, which" in line
        for line in run(2, _hooked_late)
    )


def test_weights_that_are_removed_after_initialize_stay_as_they_are(run: Any) -> None:
    script = Script(0, "own forward", ("activation replaced",), 1, "momentum")
    found = {outcome(script, run(2, on_rank, script, level)) for level in (0, 2, 3)}
    assert found == {"equal"}  # one layer has a buffer of its own at ZeRO 3, too


def _hooked_late(rank: int, world: int) -> str:
    engine = engine_of(_deep(), 3)
    _hook(engine.module)
    try:
        engine(batch())
    except BridgeError as error:
        return str(error)
    return ""


def test_a_forward_that_draws_or_counts_is_that_of_one_call() -> None:
    transformers = pytest.importorskip("transformers")

    class Masked(transformers.LlamaForCausalLM):  # type: ignore[misc, name-defined]
        def forward(self, input_ids: Any = None, labels: Any = None, **more: Any) -> Any:
            masks.append(torch.rand(input_ids.shape) < 0.3)
            labels = torch.where(masks[-1], input_ids, -100)
            return super().forward(torch.where(masks[-1], 0, input_ids), labels=labels, **more)

    class Counting(transformers.LlamaForCausalLM):  # type: ignore[misc, name-defined]
        seen = 0

        def forward(self, **given: Any) -> Any:
            self.seen += 1
            return super().forward(**given)

    masks: list[Tensor] = []
    sizes = {
        "vocab_size": 32,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    words = torch.arange(16).view(2, 8)
    engine = engine_of(Counting(transformers.LlamaConfig(**sizes)).train())
    engine.module.seen = 0
    engine(input_ids=words, labels=words)
    assert len(engine.native.chain.layers) == 1 and engine.module.seen == 1
    model = Masked(transformers.LlamaConfig(**sizes)).train()
    plain = copy.deepcopy(model)
    engine = engine_of(model)
    masks.clear()
    found = engine(input_ids=words, labels=words).loss
    assert all(torch.equal(mask, masks[0]) for mask in masks), (
        "each layer that runs the forward pass draws the same"
    )
    hidden, labels = torch.where(masks[0], 0, words), torch.where(masks[0], words, -100)
    torch.testing.assert_close(
        found, transformers.LlamaForCausalLM.forward(plain, input_ids=hidden, labels=labels).loss
    )


def test_trials_of_a_model_leave_no_trace_in_what_its_code_reaches() -> None:
    transformers = pytest.importorskip("transformers")
    outputs: list[Any] = []
    calls, generator, noise = 0, torch.Generator(), random.Random(1)
    generator.manual_seed(1)
    numbers = numpy.random.default_rng(1)
    total = torch.zeros(1)

    class Recorder:
        def __init__(self) -> None:
            self.by_name: dict[str, list[Any]] = {"one": []}
            self.calls = 0

        def record(self, module: nn.Module, given: Any, output: Any) -> None:
            self.by_name["one"].append(output)
            self.calls += 1

    class Counting(transformers.LlamaForCausalLM):  # type: ignore[misc, name-defined]
        seen = 0

        def forward(self, **given: Any) -> Any:
            nonlocal calls
            self.seen, calls = self.seen + 1, calls + 1
            total.add_(torch.rand(1, generator=generator) + noise.random() + numbers.random())
            HISTORY.append(calls)
            return super().forward(**given)

    sizes = {
        "vocab_size": 32,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    model, recorder = Counting(transformers.LlamaConfig(**sizes)), Recorder()
    model.model.layers[0].register_forward_hook(
        lambda module, given, output: outputs.append(output)
    )
    model.model.layers[1].register_forward_hook(recorder.record)
    model.lm_head.weight.register_hook(outputs.append)
    states = (generator.get_state(), noise.getstate(), numbers.bit_generator.state)
    HISTORY.clear()
    engine_of(model, 3)
    assert (model.seen, calls, recorder.calls, HISTORY, outputs) == (0, 0, 0, [], [])
    assert recorder.by_name == {"one": []} and total.item() == 0
    assert torch.equal(generator.get_state(), states[0])
    assert (noise.getstate(), numbers.bit_generator.state) == states[1:]


HISTORY: list[int] = []


@pytest.mark.parametrize("kind", ["branches", "module"])
def test_a_model_that_its_first_call_divides_calls_hooks_as_often_as_plain_torch(kind: str) -> None:
    script = Script(0, kind, ("hidden loss",), 1, "sgd")
    assert outcome(script, [on_rank(0, 1, script, 3)]) == "equal"


def test_a_cut_model_takes_embedded_tokens_and_refuses_positions_that_it_reads_differently() -> (
    None
):
    transformers = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": 32,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    words, positions = torch.arange(16).view(2, 8), (torch.arange(8) % 4).expand(2, 8)
    for cached in (True, False):
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**sizes, use_cache=cached)
        ).train()
        plain = copy.deepcopy(model)
        engine = engine_of(model)
        assert len(engine.native.chain.layers) > 2
        vectors = torch.randn(2, 8, 8, requires_grad=True)
        loss = plain(inputs_embeds=vectors, labels=words).loss
        (expected,) = torch.autograd.grad(loss, vectors)
        found = engine(inputs_embeds=vectors, labels=words).loss
        engine.backward(found)
        engine.step()
        assert torch.equal(found, loss)
        torch.testing.assert_close(vectors.grad, expected)
        if cached:
            with pytest.raises(
                BridgeError, match="position_ids: the positions restart within a row"
            ):
                engine(input_ids=words, position_ids=positions)
        else:
            engine.eval()
            plain.load_state_dict(engine.module_state_dict())
            given = {"input_ids": words, "position_ids": positions}
            torch.testing.assert_close(engine(**given).logits, plain.eval()(**given).logits)


@pytest.mark.parametrize("level", [0, 2])
def test_what_lies_before_the_engine_learns(level: int) -> None:
    torch.manual_seed(0)
    generator, judge = (
        nn.Sequential(linear(), nn.Tanh()),
        nn.Sequential(linear(), nn.ReLU(inplace=True), linear(6, 1)),
    )
    plain = copy.deepcopy((generator, judge))
    first, second = engine_of(generator, level), engine_of(judge, level)
    given = batch().requires_grad_()
    first.backward(second(first(given)).square().mean())
    first.step()
    other = batch().requires_grad_()
    plain[1](plain[0](other)).square().mean().backward()
    torch.optim.SGD(plain[0].parameters(), 0.1).step()
    torch.testing.assert_close(given.grad, other.grad)
    for name, weight in plain[0].state_dict().items():
        torch.testing.assert_close(first.module_state_dict()[name], weight)
    second.zero_grad()
    assert all(weight.grad is None for weight in judge.parameters())


def test_random_numbers_follow_torchs_seed_and_differ_between_calls() -> None:
    def masks(seed: int) -> list[Any]:
        torch.manual_seed(seed)
        engine = engine_of(nn.Sequential(nn.Dropout(0.5), nn.Linear(32, 1, bias=False)))
        seen: list[Any] = []
        engine.module[0].register_forward_hook(
            lambda module, given, output: seen.append(tuple(output.flatten().tolist()))
        )
        with torch.no_grad():
            for _ in range(3):
                engine(torch.ones(1, 32))
        return seen

    assert len(set(masks(1))) == 3 and masks(1) == masks(1) != masks(2)


class Sometimes(nn.Module):
    """A module of which one half is used by some calls alone."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.seldom = linear(), linear()

    def forward(self, value: Tensor, both: bool) -> Tensor:
        return self.always(value) + (self.seldom(value) if both else 0)


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("name", ["adamw", "momentum"])
def test_a_parameter_without_a_gradient_stays(name: str, level: int) -> None:
    torch.manual_seed(0)
    make = {
        "adamw": lambda weights: torch.optim.AdamW(weights, lr=0.1, weight_decay=0.5),
        "momentum": lambda weights: torch.optim.SGD(
            weights, lr=0.1, momentum=0.9, weight_decay=0.5
        ),
    }[name]
    model = Sometimes()
    plain = copy.deepcopy(model)
    engine, optimizer = engine_of(model, level, make(model.parameters())), make(plain.parameters())
    for step, both in enumerate((True, False, False, True, False)):
        engine.backward(engine(batch(step), both).square().mean())
        engine.step()
        optimizer.zero_grad()
        plain(batch(step), both).square().mean().backward()
        optimizer.step()
        for key, weight in plain.state_dict().items():
            torch.testing.assert_close(
                engine.module_state_dict()[key], weight, msg=f"{key} after step {step}"
            )


def test_inputs_keep_their_format() -> None:
    seen = []
    model = nn.Sequential(nn.Linear(1, 1))
    model.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    engine = engine_of(model, bf16={"enabled": True})
    with pytest.raises(RuntimeError, match="dtype"):
        engine(torch.tensor([[777.0]]))
    assert seen[0].item() == 777


def test_an_optimizers_options_are_heard_or_refused() -> None:
    model = nn.Sequential(linear())
    expected = copy.deepcopy(model)
    engine = engine_of(model, optimizer=OPTIMIZERS["decoupled"](model.parameters()))
    engine.backward(engine(batch()).square().mean())
    engine.step()
    optimizer = OPTIMIZERS["decoupled"](expected.parameters())
    expected(batch()).square().mean().backward()
    optimizer.step()
    torch.testing.assert_close(model[0].weight, expected[0].weight)
    with pytest.raises(ConfigError, match="optimizer: found state of earlier steps"):
        engine_of(expected, optimizer=optimizer)


@pytest.mark.parametrize("level", [1, 2, 3])
def test_gradients_of_slices_are_whole_if_all_ranks_read_them(run: Any, level: int) -> None:
    found, plain = run(2, _clipped, level), Plainly(_deep())
    plain.backward(plain(batch()).square().mean())
    nn.utils.clip_grad_norm_(plain.module.parameters(), 0.01)
    plain.step()
    for state in found:
        torch.testing.assert_close(state, dict(plain.module.state_dict()))


def test_weights_are_those_of_a_checkpoint_as_soon_as_it_is_loaded(
    run: Any, tmp_path: Path
) -> None:
    assert run(2, _loaded, str(tmp_path)) == [True, True]


def _loaded(rank: int, world: int, folder: str) -> bool:
    model = _deep()
    engine = engine_of(model, 1)
    reload = engine.native.weights.reload
    engine.native.weights.reload = lambda: (
        time.sleep(rank / 2),
        reload(),
    )  # the other rank has to wait
    engine.save_checkpoint(folder)
    before = [weight.detach().clone() for weight in model.parameters()]
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    engine.load_checkpoint(folder)
    return all(map(torch.equal, model.parameters(), before))


def _deep() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(linear() for _ in range(4)))


def _clipped(rank: int, world: int, level: int) -> dict[str, Tensor]:
    """The weights after a step whose gradients are changed by hand, and by DeepSpeed's functions in between."""
    model = _deep()
    engine = engine_of(model, level)
    engine.backward(engine(batch()).square().mean())
    for weight in model.parameters():
        weight.grad *= 4  # type: ignore[operator]
    for weight in model.parameters():
        gradient = deepspeed.utils.safe_get_full_grad(weight)
        assert gradient is not None
        deepspeed.utils.safe_set_full_grad(weight, gradient / 4)
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    engine.step()
    return {name: value.clone() for name, value in engine.module_state_dict().items()}


def test_gradients_of_slices_that_one_rank_reads_are_no_silent_none(run: Any) -> None:
    assert run(2, _read_alone, 1) == run(2, _read_alone, 3) == [True, True]


def _read_alone(rank: int, world: int, level: int) -> bool:
    model, silence, comm.SILENCE = _deep(), comm.SILENCE, 0.2
    engine = engine_of(model, level)
    engine.backward(engine(batch()).square().mean())
    refused = False
    try:
        _ = next(model.parameters()).grad if rank == 0 else None
    except BridgeError as error:
        refused = "this rank has only a slice of the gradient" in str(error)
    comm.SILENCE = silence
    engine.step()
    return refused == (rank == 0)


def test_generated_scripts_give_the_numbers_of_plain_torch_or_are_refused() -> None:
    for number in range(SUITE):
        script = drawn(number)
        for level in (0, 3):
            said = outcome(script, [on_rank(0, 1, script, level)])
            assert not said.startswith("BUG"), (script, level, said)


OVER_RANKS = (
    "penalty after",
    "penalty before",
    "hidden loss",
    "gradient penalty",
    "two forwards",
    "backward by hand",
    "weight outside",
)


@pytest.mark.parametrize("level", [1, 2, 3])
def test_a_graph_is_whole_over_ranks(run: Any, level: int) -> None:
    refused = 0
    for feature in OVER_RANKS:
        script = Script(0, "chain", (feature,), 1, "momentum")
        said = outcome(script, run(2, on_rank, script, level))
        assert not said.startswith("BUG"), (feature, said)
        refused += said != "equal"
    assert refused == (4 if level == 3 else 0)


def _dropped(rank: int, world: int) -> bool:
    models = [nn.Sequential(linear(), linear()) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for number, model in enumerate(models):
        engine = engine_of(model, 0)
        if number:
            engine(batch()).square().mean().backward()
            engine.zero_grad()
        engine.backward(engine(batch()).square().mean())
        engine.step()
    return all(
        torch.equal(*pair) for pair in zip(*(model.parameters() for model in models), strict=True)
    )


@pytest.mark.parametrize("level", [0, 1])
def test_gradients_between_microbatches_are_no_none(level: int) -> None:
    """The engine has them, and later microbatches add to them; `zero_grad` is its own."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 1)).double()
    engine = engine_of(model, level, gradient_accumulation_steps=2)
    engine.backward(engine(batch()).square().mean())
    with pytest.raises(BridgeError, match=r"0.weight.grad: .* until the last microbatch"):
        _ = model[0].weight.grad
    engine.step()
    engine.backward(engine(batch(1)).square().mean())
    if level == 0:
        want = copy.deepcopy(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 1)).double())
        want.load_state_dict(model.state_dict())
        for seed in (0, 1):
            (want(batch(seed)).square().mean() / 2).backward()
        assert torch.allclose(model[0].weight.grad, want[0].weight.grad)
    engine.step()


def test_gradients_of_a_backward_pass_by_hand_can_be_dropped(run: Any) -> None:
    assert run(2, _dropped) == [True, True]


class ToDouble(nn.Module):
    def forward(self, value: Tensor) -> Tensor:
        return value.double()


class Odd(nn.Module):
    """Parameters without elements, without dimensions, of one element, and not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.none, self.scalar = nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.ones(()))
        self.one, self.turned = nn.Parameter(torch.ones(1)), nn.Parameter(torch.randn(5, 6).t())
        self.layer = nn.Linear(6, 6)

    def forward(self, value: Tensor) -> Tensor:
        return self.layer(value) @ self.turned * self.scalar + self.one + self.none.sum()


@dataclass
class Row:
    value: Tensor
    scale: float


@dataclass
class Answer:
    """What no layer of torch's knows."""

    loss: Tensor


class Rows(nn.Module):
    """A model with blocks that takes and returns what is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, row: Any, *, weight: Tensor | None = None) -> Answer:
        row = Row(**row) if isinstance(row, dict) else row
        value = row.value * row.scale
        for layer in self.layers:
            value = value + torch.tanh(layer(value))
        return Answer((value if weight is None else value * weight).square().mean())


def _inputs(step: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(step))


def _convolutions() -> nn.Module:
    layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3))
    return layers.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


ODD: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, int], Tensor]]] = {
    "a head in fp64": (
        lambda: nn.Sequential(nn.Linear(6, 6), ToDouble(), nn.Linear(6, 2).double()),
        lambda model, step: model(_inputs(step, 4, 6)).square().mean(),
    ),
    "odd parameters": (
        lambda: nn.Sequential(nn.Linear(6, 6), Odd()),
        lambda model, step: model(_inputs(step, 4, 6)).square().mean(),
    ),
    "channels last": (
        _convolutions,
        lambda model, step: (
            model(_inputs(step, 2, 3, 8, 8).to(memory_format=torch.channels_last)).square().mean()
        ),
    ),
    "a mapping": (
        Rows,
        lambda model, step: model({"value": _inputs(step, 4, 6), "scale": 2.0}).loss,
    ),
    "a data class": (Rows, lambda model, step: model(Row(_inputs(step, 4, 6), 2.0)).loss),
    "a keyword": (
        Rows,
        lambda model, step: model(Row(_inputs(step, 4, 6), 2.0), weight=_inputs(9, 6)).loss,
    ),
}


@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ODD)
def test_odd_parameters_and_arguments_are_those_of_plain_torch(name: str, level: int) -> None:
    make, run_model = ODD[name]
    torch.manual_seed(0)
    model = make()
    plain = copy.deepcopy(model)
    engine = engine_of(model, level)
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    for step in range(3):
        loss = run_model(engine, step)
        engine.backward(loss)
        engine.step()
        optimizer.zero_grad()
        expected = run_model(plain, step)
        expected.backward()
        optimizer.step()
        assert float(loss) == float(expected)
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(engine.module_state_dict()[key], value)


def test_engines_of_one_script_draw_different_numbers() -> None:
    torch.manual_seed(0)
    engines = [engine_of(nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.5))) for _ in range(2)]
    one, other = (engine(torch.ones(4, 32)) == 0 for engine in engines)
    assert not torch.equal(one, other)


class Scaled(nn.Module):
    """A layer that draws from the generators of Python and numpy."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(6, 6), 0

    def forward(self, value: Tensor) -> Tensor:
        self.calls += 1
        return torch.tanh(self.layer(value)) * (random.random() + numpy.random.rand())


def test_recomputation_keeps_the_random_numbers_of_python_and_numpy() -> None:
    results = []
    for again in (False, True):
        torch.manual_seed(0)
        random.seed(1)
        numpy.random.seed(1)
        model = nn.Sequential(nn.Linear(6, 6), Scaled(), Scaled(), nn.Linear(6, 1))
        recompute = {"granularity": "full", "method": "uniform", "layers": 2} if again else {}
        values = {f"recompute.{name}": value for name, value in recompute.items()}
        plan = Plan.of({"optimizer.name": "sgd", "optimizer.lr": 0.1, **values})
        engine = initialize(model, plan, nn.functional.mse_loss)
        losses = [
            engine.train_batch([(_inputs(step, 4, 6), torch.zeros(4, 1))]) for step in range(3)
        ]
        results.append((losses, random.random(), numpy.random.rand()))
        assert model[1].calls == (6 if again else 3)
    assert results[0] == results[1]


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_weights_that_a_script_loads_are_those_that_train(level: int) -> None:
    model, other = (nn.Sequential(linear(), nn.Tanh(), linear()) for _ in range(2))
    engine = engine_of(model, level)
    engine.module.load_state_dict(other.state_dict())
    engine.backward(engine(batch()).square().mean())
    engine.step()
    other(batch()).square().mean().backward()
    torch.optim.SGD(other.parameters(), 0.1).step()
    for key, value in other.state_dict().items():
        torch.testing.assert_close(engine.module_state_dict()[key], value)


class Writes(nn.Module):
    """A layer that gives its weight another norm in each forward pass, in one of three ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.inner, self.how = nn.Linear(6, 6), how

    def forward(self, value: Tensor) -> Tensor:
        weight = self.inner.weight
        if self.how == "in place":
            with torch.no_grad():
                weight.copy_(nn.functional.normalize(weight, dim=1))
        elif self.how == "past the watch":
            weight.data.copy_(nn.functional.normalize(weight.data, dim=1))
        else:
            weight.data = nn.functional.normalize(weight.data, dim=1)
        return torch.tanh(self.inner(value))


class Grows(nn.Module):
    """A model that replaces a buffer that is not saved, and writes into what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.register_buffer("scale", torch.ones(6), persistent=False)

    def forward(self, value: Tensor, notes: list[float]) -> Tensor:
        self.scale = self.scale * 1.5
        notes.append(1.0)
        value.add_(1)
        for layer in self.layers:
            value = torch.tanh(layer(value))
        return value * self.scale * len(notes)


def _one_step(engine: Any, inputs: Tensor) -> Tensor:
    loss = engine(inputs).square().mean()
    engine.backward(loss)
    engine.step()
    return loss.detach()


def _assign(model: nn.Module) -> None:
    weight = model[2].weight  # type: ignore[index]
    weight.data = weight.data / weight.data.norm()


def _flatten(model: nn.Module) -> None:
    vector = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(vector * 0.5, model.parameters())


class Plainly:
    """Plain torch with the engine's interface."""

    def __init__(self, model: nn.Module) -> None:
        self.module, self.optimizer = model, torch.optim.SGD(model.parameters(), 0.1)

    def __call__(self, *given: Any) -> Any:
        return self.module(*given)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def _chain() -> nn.Module:
    return nn.Sequential(linear(), nn.Tanh(), linear())


@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize("write", [_assign, _flatten])
def test_weights_that_a_script_assigns_are_those_that_train(
    write: Callable[[nn.Module], None], level: int
) -> None:
    model = _chain()
    sides: list[Any] = [Plainly(copy.deepcopy(model)), engine_of(model, level)]
    losses = []
    for side in sides:
        for _ in range(3):
            losses.append(_one_step(side, batch()))
            with deepspeed.zero.GatheredParameters(list(side.module.parameters()), modifier_rank=0):
                write(side.module)
    torch.testing.assert_close(losses[3:], losses[:3])


def _written(rank: int, world: int, how: str, level: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(Writes(how), linear(), linear()).double()
    plain = Plainly(copy.deepcopy(model))
    engine = engine_of(model, level)
    differences = [(_one_step(engine, batch()) - _one_step(plain, batch())) for _ in range(3)]
    state = {
        name: engine.module_state_dict()[name] - value
        for name, value in plain.module.state_dict().items()
    }
    return differences, state


@pytest.mark.parametrize("level", [2, 3])
@pytest.mark.parametrize("how", ["in place", "past the watch", "assigned"])
def test_a_forward_pass_may_write_weights_on_two_ranks(run: Any, how: str, level: int) -> None:
    for differences, state in run(2, _written, how, level):
        assert all(abs(float(one)) < 1e-9 for one in differences), differences
        assert all(float(one.abs().max()) < 1e-9 for one in state.values()), state


def test_a_format_that_changes_after_initialize_is_refused() -> None:
    engine = engine_of(_chain())
    engine.module.float()
    with pytest.raises(BridgeError, match=r"weight: found torch.float32 of shape .* torch.float64"):
        engine(batch().float())


@pytest.mark.parametrize("through", ["data", "weight"])
def test_weights_whose_masters_are_apart_are_not_written_in_silence(through: str) -> None:
    engine = engine_of(_chain(), bf16={"enabled": True})
    _one_step(engine, batch().bfloat16())
    with torch.no_grad():
        for weight in engine.module.parameters():
            (weight.data if through == "data" else weight).clamp_(-0.01, 0.01)
    with pytest.raises(BridgeError, match="the engine keeps its own values apart"):
        _one_step(engine, batch().bfloat16())


@pytest.mark.parametrize("level", [0, 3])
def test_a_trial_leaves_buffers_and_arguments_as_they_were(level: int) -> None:
    model, losses, given, notes = Grows().double(), [], batch(), list[float]()
    for side in (Plainly(copy.deepcopy(model)), engine_of(model, level)):
        given, notes = batch(), []
        losses.append([side(given, notes).square().mean().detach() for _ in range(2)])
        assert len(notes) == 2
        torch.testing.assert_close(given, batch() + 2)
    torch.testing.assert_close(*losses)


@pytest.mark.parametrize("level", [0, 3])
def test_a_forward_pass_that_failed_is_forgotten(level: int) -> None:
    model = _chain()
    plain = Plainly(copy.deepcopy(model))
    engine = engine_of(model, level)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            engine(batch()[:, :5])
        torch.testing.assert_close(_one_step(engine, batch()), _one_step(plain, batch()))


@pytest.mark.parametrize("level", [0, 3])
def test_sparse_gradients_count(level: int) -> None:
    words = torch.tensor([[1, 2], [2, 5]])
    model = nn.Sequential(nn.Embedding(8, 6, sparse=True), nn.Linear(6, 2)).double()
    plain = Plainly(copy.deepcopy(model))
    engine = engine_of(model, level)
    for _ in range(3):
        torch.testing.assert_close(_one_step(engine, words), _one_step(plain, words))


@pytest.mark.parametrize("of", ["the module", "its class"])
def test_a_forward_that_is_replaced_after_initialize_runs(of: str) -> None:
    kind = type("Own", (nn.Sequential,), {})
    engine = engine_of(kind(linear(), linear()))
    _one_step(engine, batch())
    where: Any = engine.module if of == "the module" else kind
    where.forward = lambda *given: given[-1]
    with pytest.warns(UserWarning, match="the forward of this module was replaced"):
        assert torch.equal(engine(batch()), batch())


@pytest.mark.parametrize("level", [0, 3])
def test_gradients_go_through_a_model_in_evaluation_mode(level: int) -> None:
    model, given = _chain(), [batch().requires_grad_() for _ in range(2)]
    plain = copy.deepcopy(model)
    engine = engine_of(model, level)
    engine.eval()
    for side, inputs in zip((engine, plain), given, strict=True):
        side(inputs).square().sum().backward()
    torch.testing.assert_close(given[0].grad, given[1].grad)


def test_hooks_ahead_of_an_optimizers_step_change_what_it_sees() -> None:
    model = _chain()
    plain = Plainly(copy.deepcopy(model))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for one in (plain.optimizer, optimizer):
        one.register_step_pre_hook(
            lambda this, *_: (
                [weight.grad.mul_(0.5) for row in this.param_groups for weight in row["params"]]
                and None
            )
        )
    sides = plain, engine_of(model, 0, optimizer)
    losses = [[_one_step(side, batch()) for _ in range(3)] for side in sides]
    torch.testing.assert_close(*losses)


def test_the_state_of_a_scripts_optimizer_is_not_empty_in_silence() -> None:
    model = _chain()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    engine = engine_of(model, 0, optimizer)
    _one_step(engine, batch())
    for ask in (optimizer.state.clear, lambda: optimizer.state[model[0].weight]):
        with pytest.raises(BridgeError, match=r"optimizer.state: the optimizer's state is sharded"):
            ask()
    optimizer.state = {}
    with pytest.raises(BridgeError, match=r"optimizer.state: found another one"):
        _one_step(engine, batch())


class Reads(nn.Module):
    """A model that scales by numbers which `read` takes from a state of the script."""

    def __init__(self, read: Callable[[], float]) -> None:
        super().__init__()
        self.layers, self.read = nn.ModuleList(linear() for _ in range(3)), read

    def forward(self, value: Tensor) -> Tensor:
        for layer in self.layers:
            value = torch.tanh(layer(value)) * self.read()
        return value


def _counting() -> Callable[[], float]:
    numbers = itertools.count(1)
    return lambda: next(numbers)


@pytest.mark.parametrize("level", [0, 3])
@pytest.mark.parametrize("make", [lambda: random.random, lambda: numpy.random.rand, _counting])
@pytest.mark.filterwarnings("ignore:zero.stage 3. the model is one layer")
def test_a_trial_takes_no_numbers_of_the_script(
    make: Callable[[], Callable[[], float]], level: int
) -> None:
    results = []
    for native in (False, True):
        torch.manual_seed(0)
        random.seed(1)
        numpy.random.seed(1)
        model = Reads(make())
        side: Any = engine_of(model, level) if native else Plainly(model)
        losses = [float(_one_step(side, batch(step))) for step in range(3)]
        results.append([*losses, random.random(), numpy.random.rand()])
    assert results[0] == pytest.approx(results[1], abs=1e-12)


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, value: Tensor) -> Tensor:
        self.noise = torch.randn(3)
        return self.layer(value) + self.noise.sum()


def _noises(rank: int, world: int, level: int) -> list[bool]:
    engine, found = engine_of(Noisy(), level), []
    for step in range(2):
        seed = 100 + 10 * step + rank
        _one_step((torch.manual_seed(seed), engine)[1], batch(rank))
        after = torch.randn(3)
        torch.manual_seed(seed)
        found += [
            torch.equal(engine.module.noise, torch.randn(3)),
            torch.equal(after, torch.randn(3)),
        ]
    return found


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_each_data_rank_draws_from_the_scripts_own_generator(run: Any, level: int) -> None:
    assert run(2, _noises, level) == [[True] * 4] * 2


def _drops(rank: int, world: int, level: int) -> tuple[bool, list[str]]:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 32, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 8}
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).train()
    plain, words = copy.deepcopy(model), torch.arange(16).view(2, 8)
    engine, losses = engine_of(model, level), []
    for side in (plain, engine):
        torch.manual_seed(7 + rank)
        losses.append(side(input_ids=words, labels=words).loss)
    return torch.equal(*losses), [finding.message for finding in engine.findings]


@pytest.mark.parametrize("level", [0, 2, 3])
def test_dropout_of_a_model_in_layers_is_torchs_or_said(run: Any, level: int) -> None:
    for equal, said in run(2, _drops, level):
        assert equal == (level < 3)
        assert any("ranks draw dropout by a seed of the run" in line for line in said) != equal
        assert any("has dropout and is one layer" in line for line in said) == (level == 2)


class Chosen(nn.Module):
    """One of two layers, chosen by the script."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(linear() for _ in range(2))

    def forward(self, value: Tensor, which: int) -> Tensor:
        return self.layers[which](value)


@pytest.mark.parametrize("level", [0, 3])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.NAdam])
def test_a_resumed_run_has_the_updates_that_each_parameter_has_seen(
    kind: Any, level: int, tmp_path: Path
) -> None:
    model, choices = Chosen(), [0, 0, 0, 1, 0, 1, 0, 1]

    def make(weights: Any) -> Any:
        return kind(weights, 0.05)

    plain = Plainly(copy.deepcopy(model))
    plain.optimizer = make(plain.module.parameters())
    engine = engine_of(copy.deepcopy(model), level, make)
    for step, which in enumerate(choices):
        if step == 4:
            engine.save_checkpoint(str(tmp_path))
            engine.destroy()
            engine = engine_of(copy.deepcopy(model), level, make)
            engine.load_checkpoint(str(tmp_path))
        losses = []
        for side in (plain, engine):
            losses.append(side(batch(step), which).square().mean())
            side.backward(losses[-1])
            side.step()
        torch.testing.assert_close(*losses)


def test_weights_without_a_shape_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"0.weight has no shape .* run the model once before"):
        engine_of(nn.Sequential(nn.LazyLinear(2)))


class Jacobian(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(linear() for _ in range(2))

    def inner(self, value: Tensor) -> Tensor:
        for layer in self.layers:
            value = torch.tanh(layer(value))
        return value

    def forward(self, value: Tensor) -> Tensor:
        return torch.func.vmap(torch.func.jacrev(self.inner))(value).square().sum((1, 2))


@pytest.mark.filterwarnings("ignore:zero.stage")
def test_a_model_with_transforms_in_its_forward_runs_whole() -> None:
    model = Jacobian()
    plain = Plainly(copy.deepcopy(model))
    engine = engine_of(model, 3)
    for _ in range(2):
        torch.testing.assert_close(_one_step(engine, batch()), _one_step(plain, batch()))


def _scripted(rank: int, world: int) -> str:
    try:
        engine_of(nn.Sequential(linear(), torch.jit.script(linear()), linear()), 3)
    except BridgeError as error:
        return str(error)
    return ""


def test_torchscript_whose_weights_take_turns_is_refused(run: Any) -> None:
    assert all("1 is a module of TorchScript" in line for line in run(2, _scripted))


def _cast(rank: int, world: int) -> list[float]:
    torch.manual_seed(0)
    model = Reads(lambda: 1.0).float()
    plain = Plainly(copy.deepcopy(model))
    engine, losses = engine_of(model, 3), list[float]()
    for step in range(3):
        for side in (plain, engine):
            with torch.autocast("cpu", torch.bfloat16):
                loss = side(batch(step).float()).float().square().mean()
            side.backward(loss)
            side.step()
            losses.append(float(loss))
    return losses


def test_a_forward_pass_under_autocast_has_its_backward_pass_outside(run: Any) -> None:
    for losses in run(2, _cast):
        assert losses[::2] == pytest.approx(losses[1::2], rel=3e-3)


def _tuned(rank: int, world: int, level: int) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(linear(), nn.BatchNorm1d(6).double(), linear()).eval()
    plain = Plainly(copy.deepcopy(model))
    engine = engine_of(model, level)
    engine.eval()
    engine(batch())  # with a graph that no backward pass comes to
    with torch.no_grad():
        assert not engine(batch()).requires_grad
    return [float(_one_step(side, batch(step))) for step in range(3) for side in (plain, engine)]


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_weights_train_in_evaluation_mode(run: Any, level: int) -> None:
    for losses in [_tuned(0, 1, level), *run(2, _tuned, level)]:
        assert losses[::2] == pytest.approx(losses[1::2], abs=1e-12)


def _several(rank: int, world: int, level: int) -> list[float]:
    torch.manual_seed(0)
    model = _chain()
    plain, losses = Plainly(copy.deepcopy(model)), list[float]()
    engine = engine_of(model, level)
    for step in range(3):
        for side in (plain, engine):
            # One loss through a graph that stays, one through the same graph, and one of another pass;
            # the reference has those of all ranks.
            for place in range(world) if side is plain else [rank]:
                output, share = side(batch(10 * step + place)), 1 / world if side is plain else 1
                one, other = output.square().mean() * share, output.abs().mean() * share
                if side is plain:
                    one.backward(retain_graph=True)
                else:
                    engine.backward(one, retain_graph=True)
                side.backward(other)
                third = side(batch(10 * step + 5 + place)).square().mean() * share
                side.backward(third)
            side.step()
    for one, other in zip(model.parameters(), plain.module.parameters(), strict=True):
        losses.append(float((one - other).abs().max()))
    return losses


def test_several_backward_passes_add_up_before_a_step(run: Any) -> None:
    for far in [_several(0, 1, 0), _several(0, 1, 2), *run(2, _several, 0)]:
        assert max(far) < 1e-12


@pytest.mark.parametrize("of", ["engine", "optimizer", "model"])
def test_a_bad_batch_can_be_dropped_before_its_step(of: str) -> None:
    model = _chain()
    plain = Plainly(copy.deepcopy(model))
    engine = engine_of(model)
    engine.backward(engine(batch(9)).square().mean())
    {"engine": engine, "optimizer": engine.optimizer, "model": engine.module}[of].zero_grad()
    for step in range(2):
        torch.testing.assert_close(_one_step(engine, batch(step)), _one_step(plain, batch(step)))
