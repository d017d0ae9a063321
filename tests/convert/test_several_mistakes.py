"""All problems of a file at once: several independent mistakes are named in the first report, and nothing else is.

By hand, with more of them: python tests/convert/test_several_mistakes.py [STACK ...] --examples N
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings, strategies as st

import compat
from bridge.errors import BridgeError
from bridge.plan.section import fields
from bridge.stack.dialect import Config, Dialect
from bridge.stack.refusals import hangs
from bridge.testing import Mistake, Mutation, configs
from bridge.testing.mutations import REST, Edit, edit_mapping, edits
from bridge.testing.strategies import entries, part_of

pytestmark = pytest.mark.once

MISTAKES = 3
EXAMPLES = 25
TRIES = 12
"""Edits that are tried for each one that is planted."""


@dataclass
class Planted:
    """Several edits of one config, each of which is refused by itself, and what is said of all of them together."""

    config: Config
    edits: Sequence[Mutation]
    alone: frozenset[str]
    together: BridgeError

    @property
    def unnamed(self) -> list[Mutation]:
        """Mistakes that the first report leaves for a later one."""
        return [edit for edit in self.edits if not edit.is_named_by(self.together)]

    @property
    def untrue(self) -> list[str]:
        """What is said of the whole, and speaks of none of the mistakes."""
        said = [problem for problem in self.together.problems if problem not in self.alone]
        return [
            problem
            for problem in said
            if not any(edit.is_named_by(BridgeError(problem)) for edit in self.edits)
        ]


@dataclass
class Tally:
    """What a stack's samples came to."""

    planted: int = 0
    kinds: Counter[Mistake] = field(default_factory=Counter)
    unnamed: list[str] = field(default_factory=list)
    untrue: list[str] = field(default_factory=list)
    invented: list[str] = field(default_factory=list)

    def add(self, one: Planted) -> None:
        self.planted += 1
        self.kinds.update(edit.mistake for edit in one.edits)
        said = f"\n  of {[(edit.key, edit.value) for edit in one.edits]}\n  " + "\n  ".join(
            one.together.problems
        )
        self.unnamed += [
            f"{edit.mistake}: {edit.key}: {edit.value!r}{said}" for edit in one.unnamed
        ]
        self.untrue += [f"{problem}{said}" for problem in one.untrue]


def planted(config: Config, seed: int, count: int = MISTAKES) -> Planted | None:
    """`count` edits of different keys of a config, each refused by name on its own; None where it has no room for them."""
    random, chosen, alone = Random(seed), list[tuple[Edit, Mutation]](), set[str]()
    found = edits(config)
    for _ in range(TRIES * count):
        edit = random.choice(found[random.choice(sorted(found))])
        if len(chosen) == count or any(_touch(edit, other) for other, _ in chosen):
            continue
        mutation = _mutation(
            config, edit, edit_mapping(part_of(config.dialect).source(config), edit)
        )
        problems = _refused(mutation)
        if problems is not None and mutation.is_named_by(problems):
            chosen.append((edit, mutation))
            alone.update(problems.problems)
    if len(chosen) < count:
        return None
    source: Any = part_of(config.dialect).source(config)
    for edit, _ in chosen:
        source = edit_mapping(source, edit)
    together = _refused(_mutation(config, chosen[0][0], source))
    return (
        Planted(config, [mutation for _, mutation in chosen], frozenset(alone), together)
        if together
        else None
    )


def _mutation(config: Config, edit: Edit, source: Any) -> Mutation:
    return Mutation(config, edit.mistake, ".".join(edit.at), edit.value, source, ours=edit.ours)


def invented(config: Config, seed: int) -> list[str]:
    """What is said of one mistake in a valid config beyond what the first look at it finds: nothing of that is true."""
    random, found = Random(seed), edits(config)
    edit = random.choice(found[random.choice(sorted(found))])
    mutation = _mutation(config, edit, edit_mapping(part_of(config.dialect).source(config), edit))
    error = _refused(mutation)
    if error is None:
        return []
    try:
        reading = config.dialect.parse(mutation.source, config.version, False)
        _ = config.dialect.build(reading, config.version, config.world_size).effective
    except BridgeError as first:
        more = [
            one
            for one in error.problems
            if one not in first.problems and not mutation.is_named_by(BridgeError(one))
        ]
        return [f"{one}\n  of {edit.at} {edit.value!r}: {first}" for one in more]
    return []


def _touch(one: Edit, other: Edit) -> bool:
    """Whether two edits are about the same part of a file, or one decides how ranks, batch or layers come out for the other."""
    places = [path for edit in (one, other) for path in (edit.at, edit.leaves or edit.at)]
    mine, theirs = places[:2], places[2:]
    shared = any(a[: len(b)] == b or b[: len(a)] == a for a in mine for b in theirs)
    names = [
        " ".join(map(str, (*edit.at, *(edit.leaves or ()), edit.ours))).replace(".", " ")
        for edit in (one, other)
    ]
    return shared or any(hangs(f": {a}", b) for a, b in (names, reversed(names)))


def _refused(mutation: Mutation) -> BridgeError | None:
    try:
        mutation.read()
    except BridgeError as error:
        return error
    return None


def sampled(dialect: Dialect, examples: int) -> Tally:
    """So many configs of a stack with mistakes in them."""
    tally = Tally()

    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(configs(dialect, None, None, entries(dialect)[0]), st.integers(0, 2**32))
    def law(config: Config, seed: int) -> None:
        tally.invented += invented(config, seed)
        if (one := planted(config, seed)) is not None:
            tally.add(one)

    law()
    return tally


def judged() -> Iterator[Dialect]:
    """Stacks that refuse: one that keeps any key only names those that it does not know."""
    return (
        dialect
        for dialect in map(compat.load, compat.names())
        if REST not in fields(dialect.schema)
    )


@pytest.mark.parametrize("dialect", [*judged()], ids=lambda dialect: dialect.name)
def test_every_mistake_is_named_in_the_first_report(dialect: Dialect) -> None:
    tally = sampled(dialect, EXAMPLES)
    assert tally.planted > EXAMPLES // 3 and len(tally.kinds) >= 4
    assert not tally.unnamed, "\n\n".join(tally.unnamed)
    assert not tally.untrue and not tally.invented, "\n\n".join((*tally.untrue, *tally.invented))


def test_a_misspelled_selector_hides_nothing() -> None:
    """What its section is follows from the name that was meant, so that the batch can be held against the ranks."""
    recipe = {
        "step_scheduler": {"made_up_key": 1, "global_batch_size": 33, "local_batch_size": 2},
        "distributed": {
            "_taregt_": "nemo_automodel.components.distributed.fsdp2.FSDP2Manager",
            "tp_size": 2,
        },
    }
    with pytest.raises(BridgeError) as caught:
        compat.load("automodel").read(recipe, world_size=8)
    assert sorted(problem.partition(":")[0] for problem in caught.value.problems) == [
        "distributed._taregt_",
        "step_scheduler.global_batch_size",
        "step_scheduler.made_up_key",
    ]
    assert "local_batch_size (2) x data ranks (4)" in str(caught.value)


def test_settings_that_one_problem_names_have_no_further_ones() -> None:
    given = {"train_batch_size": "auto", "bf16": {"enabled": "auto"}, "made_up_key": 1}
    with pytest.raises(BridgeError) as caught:
        compat.load("deepspeed").read(given, world_size=2)
    assert sum("auto" in problem for problem in caught.value.problems) == 1, str(caught.value)


SIZED = "--seq-length 128 --max-position-embeddings 128 --hidden-size 64 --num-attention-heads 4 --micro-batch-size 1 --lr 1e-3 "
WAVES: tuple[tuple[str, Any, int, tuple[str, ...]], ...] = (
    (
        "megatron",
        f"{SIZED} --num-layers 24 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 16",
        8,
        ("world_size: found 8", "num_layers: found 24"),
    ),
    (
        "megatron",
        f"{SIZED} --num-layers 2 --global-batch-size 8 --step-batch-size-schedule 0:16 2B:32 --tensor-model-parallel-size 16",
        8,
        ("'2B:32'", "world_size: found 8", "step_batch_size_schedule: found 0:16 with"),
    ),
    (
        "deepspeed",
        {"expert_parallel": {"score_func": "none"}, "train_batch_size": 41, "fp16": {"enabled": 7}},
        2,
        ("expert_parallel.score_func", "train_batch_size: found 41", "fp16.enabled"),
    ),
    (
        "fast_llm",
        {
            "model": {"distributed": {"tensor_parallel": 4}},
            "schedule": {"made_up": 1},
            "optimizer": {"beta_1": "many"},
        },
        2,
        ("model.distributed.world_size: found 2", "schedule.made_up", "optimizer.beta_1"),
    ),
    (
        "merak",
        {
            "init": {"pp": 3, "tp": 1, "dp": 1},
            "args": {"split_method": "none", "warmup_steps": True},
        },
        8,
        ("init: pp (3)", "args.split_method", "args.warmup_steps"),
    ),
    (
        "automodel",
        {
            "step_scheduler": {"global_batch_size": 32, "local_batch_size": 2, "made_up_key": 1},
            "distributed": {"strategy": "no such", "tp_size": 3},
            "optimizer": {"lr": True},
        },
        8,
        ("distributed.strategy", "step_scheduler.made_up_key", "optimizer.lr"),
    ),
)


@pytest.mark.parametrize(("stack", "source", "ranks", "told"), WAVES)
def test_sizes_that_do_not_fit_are_named_at_once(
    stack: str, source: Any, ranks: int, told: tuple[str, ...]
) -> None:
    """What stands beside them is refused as well, and none of it waits for a second report."""
    given = source.split() if isinstance(source, str) else source
    with pytest.raises(BridgeError) as caught:
        compat.load(stack).read(given, world_size=ranks)
    assert [any(start in one for one in caught.value.problems) for start in told] == [True] * len(
        told
    ), str(caught.value)


if __name__ == "__main__":
    options = argparse.ArgumentParser()
    options.add_argument("stacks", nargs="*", default=compat.names())
    options.add_argument("--examples", type=int, default=300)
    asked = options.parse_args()
    for stack in asked.stacks:
        tally = sampled(compat.load(stack), asked.examples)
        counts = f"unnamed {len(tally.unnamed)}, untrue {len(tally.untrue)}; of one mistake invented {len(tally.invented)}"
        print(f"{stack}: {tally.planted} files of {MISTAKES} mistakes; {counts}")
        print("\n".join((*tally.unnamed[:6], *tally.untrue[:6], *tally.invented[:6])))
