"""Generated training scripts: each is drawn from its number, and run with plain torch and on the engine at every level of ZeRO.

An outcome is `equal` (losses, notes and final weights are those of plain torch), `refused` (an error of ours, and all that was
noted before it is equal), or what differs. `python -m tests.engine.generated_scripts --first N --count N [--world 2]` tries many,
lists refusals by reason, and shrinks what is wrong to the fewest features.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from bridge.engine.comm import everyones
from bridge.errors import BridgeError
from tests.engine.pool import Pool

WIDTH, ROWS, STEPS = 6, 4, 3
LEVELS = (0, 1, 2, 3)
CLOSE = {torch.float64: 1e-9, torch.float32: 1e-4}
MODELS = (
    "chain",
    "repeats",
    "inplace",
    "nested",
    "own forward",
    "module",
    "branches",
    "keeps",
    "tied",
    "hooked",
    "frozen start",
    "parametrized",
    "attention",
    "statistics",
    "functional",
)
FEATURES = (
    "penalty after",
    "penalty before",
    "hidden loss",
    "input gradient",
    "gradient penalty",
    "two forwards",
    "evaluation",
    "no_grad",
    "backward by hand",
    "scaled gradients",
    "clipped gradients",
    "average of weights",
    "clamped weights",
    "norms of weights",
    "weight outside",
    "generator in front",
    "layer replaced",
    "activation replaced",
    "late hook",
    "schedule",
    "averaged model",
    "frozen for a step",
    "two backwards",
    "resumed",
)
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda weights: torch.optim.SGD(weights, 0.05),
    "momentum": lambda weights: torch.optim.SGD(weights, 0.05, momentum=0.9, weight_decay=0.01),
    "adam": lambda weights: torch.optim.Adam(weights, 0.01, eps=1e-3, weight_decay=0.1),
    "decoupled": lambda weights: torch.optim.Adam(
        weights, 0.01, eps=1e-3, weight_decay=0.5, decoupled_weight_decay=True
    ),
    "adamw": lambda weights: torch.optim.AdamW(weights, 0.01, eps=1e-3),
    "rmsprop": lambda weights: torch.optim.RMSprop(weights, 0.01, eps=1e-3, momentum=0.5),
    "adafactor": lambda weights: torch.optim.Adafactor(weights, 0.01, eps=(1e-6, 1e-3)),
}


@dataclass(frozen=True)
class Script:
    """One script: its model, what it does, microbatches in a step, and its optimizer."""

    number: int
    model: str
    features: tuple[str, ...]
    accumulation: int
    optimizer: str
    dtype: torch.dtype = torch.float64


def drawn(number: int) -> Script:
    """The script of this number."""
    choice = random.Random(number)
    features = tuple(sorted(choice.sample(FEATURES, choice.choice((0, 1, 1, 2, 2, 3)))))
    return Script(
        number,
        choice.choice(MODELS),
        features,
        choice.choice((1, 1, 2)),
        choice.choice([*OPTIMIZERS, *list(OPTIMIZERS)[:-1]]),  # the last is for ZeRO 0 and 1 alone
    )


class Residual(nn.Sequential):
    """A list of layers with a forward of its own."""

    def forward(self, value: Tensor) -> Tensor:
        """Each layer adds to the stream."""
        for layer in self:
            value = value + layer(value)
        return value


class Branches(nn.Module):
    """A module with a list of layers, of which one is used twice and one by every second call."""

    def __init__(self, keeps: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("calls", torch.zeros(()))
        self.keeps, self.kept = keeps, torch.zeros(())

    def forward(self, value: Tensor, twice: bool = True) -> Tensor:
        """Two branches and their sum."""
        self.calls += 1
        first = torch.tanh(self.layers[0](value))
        second = self.layers[1](self.layers[0](value) if twice else value)
        self.kept = first.square().mean() if self.keeps else self.kept
        return self.layers[2](first + second) * self.scale


class Through(torch.autograd.Function):
    """A sign, through which gradients go as if it were not there."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.sign()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Functional(nn.Module):
    """A module that calls another one with weights that it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = (
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()),
            nn.Linear(WIDTH, WIDTH),
        )
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, value: Tensor) -> Tensor:
        """The inner module with scaled weights, and a sign."""
        weights = {name: weight * self.scale for name, weight in self.inner.named_parameters()}
        return self.last(
            value + Through.apply(torch.func.functional_call(self.inner, weights, (value,)))
        )


class Attention(nn.Module):
    """Attention over the rows of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm = (
            nn.MultiheadAttention(WIDTH, 2, batch_first=True),
            nn.LayerNorm(WIDTH),
        )

    def forward(self, value: Tensor) -> Tensor:
        """A residual block."""
        return self.norm(value + self.attention(value, value, value, need_weights=False)[0])


def model_of(kind: str, dtype: torch.dtype) -> nn.Module:
    """A model in one format; every layer of a chain takes and gives `WIDTH` numbers."""
    torch.manual_seed(len(kind))
    linear = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    act = nn.Tanh()
    made: dict[str, Callable[[], nn.Module]] = {
        "chain": lambda: nn.Sequential(
            linear[0], nn.GELU(), linear[1], nn.LayerNorm(WIDTH), linear[2]
        ),
        "repeats": lambda: nn.Sequential(linear[0], act, linear[1], act, linear[0], linear[2]),
        "inplace": lambda: nn.Sequential(
            linear[0], nn.ReLU(inplace=True), linear[1], nn.ReLU(inplace=True), linear[2]
        ),
        "nested": lambda: nn.Sequential(
            nn.Sequential(linear[0], act), nn.Sequential(linear[1], act), linear[2], nn.Identity()
        ),
        "own forward": lambda: Residual(*linear[:3]),
        "module": lambda: nn.ModuleDict({"one": linear[0]})["one"],
        "branches": Branches,
        "keeps": lambda: Branches(True),
        "tied": lambda: nn.Sequential(linear[0], act, linear[1], linear[3]),
        "hooked": lambda: nn.Sequential(linear[0], act, linear[1]),
        "frozen start": lambda: nn.Sequential(linear[0], act, linear[1], act, linear[2]),
        "parametrized": lambda: nn.Sequential(
            nn.utils.parametrizations.weight_norm(linear[0]), act, linear[1], act, linear[2]
        ),
        "attention": lambda: nn.Sequential(
            Attention(), nn.TransformerEncoderLayer(WIDTH, 2, 8, 0.0, batch_first=True), linear[0]
        ),
        "statistics": lambda: nn.Sequential(
            linear[0], nn.BatchNorm1d(WIDTH), act, linear[1], linear[2]
        ),
        "functional": lambda: nn.Sequential(Functional(), act, Functional()),
    }
    model = made[kind]().to(dtype)
    if kind == "tied":
        model[3].weight = model[0].weight  # type: ignore[index]
    if kind == "hooked":
        model.register_forward_hook(lambda module, given, output: output * 3)
    if kind == "frozen start":
        model[0].requires_grad_(False)  # type: ignore[index]
    return model


@dataclass
class Played:
    """What a script noted, step by step, its final weights, and why it was refused."""

    notes: list[tuple[str, float]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    refused: str | None = None
    layers: int = 1


class Side:
    """Plain torch in one process, for the batches of all ranks."""

    def __init__(self, script: Script, world: int) -> None:
        self.script, self.world, self.ranks = script, world, tuple(range(world))
        self.model = self.call = self.module = model_of(script.model, script.dtype)
        self.weights = [weight for weight in self.model.parameters() if weight.requires_grad]
        self.optimizer = OPTIMIZERS[script.optimizer](self.weights)

    def backward(self, loss: Tensor, by_hand: bool) -> None:
        """Gradients of one rank's microbatch."""
        (loss / self.script.accumulation / self.world).backward()

    def step(self) -> None:
        """Update."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def micro_step(self, last: bool) -> None:
        """After each microbatch."""
        if last:
            self.step()

    def state(self) -> dict[str, Tensor]:
        """Final weights."""
        return {name: value.clone() for name, value in self.model.state_dict().items()}

    def resume(self) -> None:
        """Go on as if nothing had happened."""

    def layers(self) -> int:
        """Layers that the model is divided into."""
        return 1


class Engine(Side):
    """The engine, on this rank."""

    def __init__(self, script: Script, world: int, rank: int, level: int) -> None:
        super().__init__(script, world)
        self.rank, self.level = rank, level
        config = {
            "train_micro_batch_size_per_gpu": ROWS,
            "gradient_accumulation_steps": script.accumulation,
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": level},
            "zero_allow_untested_optimizer": True,
        }
        self.ranks = (rank,)
        self.engine = self.deepspeed().initialize(
            model=self.model, optimizer=self.optimizer, config=config
        )[0]
        self.call, self.module = self.engine, self.engine.module

    def deepspeed(self) -> Any:
        """What the script imports as `deepspeed`."""
        import compat.deepspeed

        return compat.deepspeed

    def backward(self, loss: Tensor, by_hand: bool) -> None:
        if by_hand:
            (loss / self.script.accumulation).backward()
        else:
            self.engine.backward(loss)

    def micro_step(self, last: bool) -> None:
        self.engine.step()

    def resume(self) -> None:
        own = tempfile.TemporaryDirectory()
        folder = everyones(own.name)[0]
        self.engine.save_checkpoint(folder)
        self.__init__(self.script, self.world, self.rank, self.level)  # type: ignore[misc]
        self.engine.load_checkpoint(folder)
        self.folder = own  # at ZeRO 3 the first call reads it once more

    def state(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self.engine.module_state_dict().items()}

    def layers(self) -> int:
        return len(self.engine.native.chain.layers)


def play(side: Side) -> Played:
    """Run a script, and note what plain torch and the engine have to agree on."""
    played, has = Played(), side.script.features.__contains__
    try:
        _train(side, has, played)
        played.weights = side.state()
    except BridgeError as error:
        played.refused = str(error).splitlines()[0]
    return played


def _train(side: Side, has: Callable[[str], bool], played: Played) -> None:
    kept: list[Tensor] = []
    averages = (
        [weight.detach().clone() for weight in side.weights] if has("average of weights") else []
    )
    torch.manual_seed(1)
    front = nn.Linear(WIDTH, WIDTH).to(side.script.dtype)
    hooked: nn.Module | None = None
    averaged = AveragedModel(side.module) if has("averaged model") else None
    for step in range(STEPS):
        layers = [module for module in side.module.modules() if isinstance(module, nn.Linear)]
        if has("hidden loss") and side.model is not hooked:
            hooked = side.model
            layers[0].register_forward_hook(
                lambda module, given, output: kept.append(output.square().mean())
            )
        if has("frozen for a step"):
            layers[-1].requires_grad_(step != 1)
        if has("activation replaced") and step == 1 and isinstance(side.model, nn.Sequential):
            side.model[1] = nn.Identity()
        if has("layer replaced") and step == 1 and isinstance(side.model, nn.Sequential):
            torch.manual_seed(5)
            side.model[-1] = nn.Linear(WIDTH, WIDTH).to(side.script.dtype)
        if has("late hook") and step == 1:
            side.model.register_forward_hook(lambda module, given, output: output * 2)
        for micro in range(side.script.accumulation):
            for rank in side.ranks:
                loss = _microbatch(side, has, played, (step, micro, rank), layers, kept, front)
                played.notes.append((f"loss {step} {micro} {rank}", float(loss.detach())))
                side.backward(loss, has("backward by hand"))
                if has("generator in front"):
                    assert front.weight.grad is not None
                    grad, front.weight.grad = front.weight.grad, None
                    played.notes.append(
                        (f"front {step} {micro} {rank}", float(grad.norm() * _share(side)))
                    )
            last = micro == side.script.accumulation - 1
            if last:
                _touch(side, has)
            side.micro_step(last)
        _between(side, has, averages, played, step)
        if averaged is not None:
            averaged.update_parameters(side.module)
            norms = [float(weight.detach().norm()) for weight in averaged.parameters()]
            played.notes.append((f"averaged {step}", sum(norms)))
        if has("schedule"):
            for group in side.optimizer.param_groups:
                group["lr"] *= 0.5
        if has("resumed") and step == 0:
            side.resume()
        played.layers = max(played.layers, side.layers())


def _microbatch(
    side: Side,
    has: Callable[[str], bool],
    played: Played,
    where: tuple[int, int, int],
    layers: list[nn.Linear],
    kept: list[Tensor],
    front: nn.Module,
) -> Tensor:
    step, micro, rank = where
    generator = torch.Generator().manual_seed(step * 100 + micro * 10 + rank)
    given = torch.randn(ROWS, WIDTH, dtype=side.script.dtype, generator=generator)
    if has("input gradient") or has("gradient penalty"):
        given.requires_grad_()
    before = (
        0.05 * sum(weight.square().sum() for weight in side.weights) if has("penalty before") else 0
    )
    if has("no_grad"):
        with torch.no_grad():
            played.notes.append((f"no_grad {where}", float(side.call(given).sum())))
    if has("evaluation") and not (side.script.model == "statistics" and side.world > 1):
        side.call.eval()
        with torch.no_grad():
            played.notes.append((f"evaluation {where}", float(side.call(given).sum())))
        side.call.train()
    kept.clear()
    output = side.call(front(given) if has("generator in front") else given)
    loss = output.square().mean() + before
    if has("two forwards"):
        loss = loss + side.call(given * 0.5).mean()
    if has("penalty after"):
        loss = loss + 0.05 * sum(weight.square().sum() for weight in side.weights)
    if has("gradient penalty"):
        (slope,) = torch.autograd.grad(output.sum(), given, create_graph=True)
        loss = loss + slope.square().sum() * 0.1
    if has("two backwards"):
        (output.abs().mean() / _share(side)).backward(retain_graph=True)
    if has("weight outside"):
        loss = loss + nn.functional.linear(output, layers[0].weight).mean()
    if has("input gradient"):
        given.register_hook(
            lambda found: played.notes.append(
                (f"input {where}", float(found.norm() * _share(side)))
            )
        )
    if isinstance(side.module, Branches) and side.module.keeps:
        loss = loss + side.module.kept
    return loss + sum(kept, torch.zeros((), dtype=side.script.dtype))


def _share(side: Side) -> float:
    return side.script.accumulation * (side.world if type(side) is Side else 1)


def _touch(side: Side, has: Callable[[str], bool]) -> None:
    if has("scaled gradients"):
        for weight in side.weights:
            if weight.grad is not None:
                weight.grad.mul_(0.5)
    if has("clipped gradients"):
        nn.utils.clip_grad_norm_(side.weights, 0.1)


def _between(
    side: Side, has: Callable[[str], bool], averages: list[Tensor], played: Played, step: int
) -> None:
    with torch.no_grad():
        for average, weight in zip(averages, side.weights, strict=False):
            average.lerp_(weight, 0.5)
        if averages:
            played.notes.append(
                (f"average {step}", sum(float(average.norm()) for average in averages))
            )
        if has("clamped weights"):
            for weight in side.weights:
                weight.clamp_(-0.2, 0.2)
        if has("norms of weights"):
            played.notes.append(
                (f"norms {step}", sum(float(weight.norm()) for weight in side.weights))
            )


def on_rank(rank: int, world: int, script: Script, level: int) -> Played:
    """A script on one rank of the engine."""
    torch.nn.functional.linear = torch._C._nn.linear  # the real DeepSpeed leaves its own here
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return play(Engine(script, world, rank, level))
        except BridgeError as error:
            return Played(refused=str(error).splitlines()[0])


def outcome(script: Script, runs: list[Played]) -> str:
    """`equal`, `refused: REASON`, or what is wrong."""
    plain, close = play(Side(script, len(runs))), CLOSE[script.dtype]
    expected = dict(plain.notes)
    for run in runs:
        if not all(name in expected for name, _ in run.notes):
            return "BUG: another note"
        for name, value in run.notes:
            if not abs(value - expected[name]) <= close * max(1.0, abs(expected[name])):
                return f"BUG: {name.split()[0]}"
        if run.refused is None and len(run.notes) * len(runs) < len(
            [name for name in expected if "loss" in name]
        ):
            return "BUG: notes are missing"
    if any(run.refused for run in runs):
        return f"refused: {next(run.refused for run in runs if run.refused)}"
    for run in runs:
        for name, value in plain.weights.items():
            if name not in RANKS_OWN and not torch.allclose(
                run.weights[name], value, rtol=0, atol=close
            ):
                return f"BUG: weights {name}"
    return "equal"


RANKS_OWN = ("calls", "1.running_mean", "1.running_var", "1.num_batches_tracked")
"""Buffers that count what one rank has seen."""
CUT = Counter[tuple[str, bool]]()
"""How many models of more than one module were divided into layers, by kind, and how many were not."""


def tried(
    script: Script, level: int, pool: Pool | None, run: Callable[..., Played] = on_rank
) -> str:
    """Run a script at one level, on the ranks of a pool or in this process."""
    try:
        runs = pool.run(run, script, level) if pool else [run(0, 1, script, level)]
        if script.model != "module":
            CUT[script.model, runs[0].layers > 1] += 1
        return outcome(script, runs)
    except (
        Exception
    ) as error:  # a traceback is a finding of the generator, unless plain torch ends in it too
        with suppress(Exception):
            play(Side(script, pool.world if pool else 1))
            return f"BUG: {type(error).__name__}: {str(error).strip().splitlines()[-1][:150]}"
        return f"not a script: plain torch refuses it: {type(error).__name__}"


def kind_of(said: str) -> str:
    """An outcome without names and what to do."""
    return re.sub(r"\b\d+\.\S*|'[^']*'", "...", said.split(";")[0])


def shrunk(script: Script, level: int, pool: Pool | None) -> Script:
    """The script with the fewest features that is still wrong."""
    simpler: list[Script] = [
        *(
            replace(script, features=tuple(one for one in script.features if one != left))
            for left in script.features
        ),
        *([replace(script, accumulation=1)] if script.accumulation > 1 else []),
        *([replace(script, optimizer="sgd")] if script.optimizer != "sgd" else []),
        *([replace(script, model="chain")] if script.model != "chain" else []),
    ]
    for other in simpler:
        if tried(other, level, pool).startswith("BUG"):
            return shrunk(other, level, pool)
    return script


def rounds(
    first: int, count: int, pool: Pool | None, levels: tuple[int, ...]
) -> Iterator[tuple[Script, int, str]]:
    """Try many scripts."""
    for number in range(first, first + count):
        for level in levels:
            script = drawn(number)
            yield script, level, tried(script, level, pool)


def main() -> int:
    """Print what is wrong, and the number of scripts by outcome; 1 if anything is wrong."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--world", type=int, default=1)
    parser.add_argument("--level", type=int, action="append")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    pool = Pool(asked.world) if asked.world > 1 else None
    counts, known = Counter[str](), set[Any]()
    for script, level, said in rounds(asked.first, asked.count, pool, tuple(asked.level or LEVELS)):
        counts[kind_of(said)] += 1
        if said.startswith("BUG"):
            least = replace(shrunk(script, level, pool), number=0)
            if (least, level) not in known:
                known.add((least, level))
                print(f"{script.number} ZeRO {level}: {said}: {least}", flush=True)
    for said, number in counts.most_common():
        print(f"{number:6} {said}", flush=True)
    cut = sum(count for (_, divided), count in CUT.items() if divided)
    whole = {model: count for (model, divided), count in CUT.items() if not divided}
    print(f"{cut} of {CUT.total()} models of several modules are cut; whole: {whole}", flush=True)
    if pool:
        pool.close()
    return int(any(said.startswith("BUG") for said in counts))


if __name__ == "__main__":
    sys.exit(main())
