"""The constructors of rules, and that every table is fit to be read by people."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

import compat
from bridge.plan.plan import paths
from bridge.stack import words
from bridge.stack.dialect import Dialect
from bridge.stack.rules import (
    Context,
    Effect,
    Rule,
    always,
    convert,
    lacks,
    only_ours,
    only_theirs,
    rename,
)
from bridge.translation.translate import translate
from compat.deepspeed.rules import unmapped as unmapped_settings

NEWEST = Context("1.2.10", 8)
DIALECTS = tuple(compat.load(name) for name in compat.names())
each = pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)


@given(st.integers() | st.text() | st.booleans())
def test_rename_says_the_same_under_both_names(value: Any) -> None:
    rule = rename("clip_grad", "optimizer.clip")
    assert rule.read({"clip_grad": value, "lr": 1}, NEWEST) == {"optimizer.clip": value}
    assert rule.write({"optimizer.clip": value}, NEWEST) == {"clip_grad": value}
    assert rule.read({"clip_grad": None}, NEWEST) == rule.write({}, NEWEST) == {}


ANYTHING = st.none() | st.booleans() | st.integers(-2, 2) | st.sampled_from(("", "a", "b"))


@given(st.dictionaries(st.sampled_from("ab"), ANYTHING))
def test_words_say_what_their_names_say(values: dict[str, Any]) -> None:
    a, b = values.get("a"), values.get("b")
    held = {
        words.on("a"): bool(a),
        words.off("a"): a is False,
        words.has_value("a"): a is not None,
        words.has_field("a"): "a" in values,
        words.among("a", "a", None): a in ("a", None),
        words.beyond("a", "a"): a is not None and a != "a",
        words.no(words.on("a")): not a,
        words.every(words.on("a"), words.on("b")): bool(a and b),
        words.some(words.on("a"), words.on("b")): bool(a or b),
    }
    assert all(condition(values) is answer for condition, answer in held.items())
    assert words.of("a")(values) == a and words.of("a", 1)(values) == (a or 1)
    assert words.nonzero("a")(values) == (a or None)
    assert words.first("a", "b")(values) == (b if a is None else a)
    assert words.look_up({"a": "x"}, "a", "y")(values) == ("x" if a == "a" else "y")
    assert words.either(words.on("a"), words.of("b"), "z")(values) == (b if a else "z")
    assert words.give("x", words.of("a"), words.on("b"))(values, NEWEST) == ({"x": a} if b else {})


@given(st.none() | st.integers(-2, 9))
def test_above_counts_nothing_as_none(number: int | None) -> None:
    assert words.above("a")({"a": number}) is (number is not None and number > 1)
    assert words.above("a", 0)({"a": number}) is (number is not None and number > 0)


def test_a_tuple_is_spread_over_its_fields() -> None:
    side = words.spread(("x", "y"), "a")
    assert side({"a": (1, 2)}, NEWEST) == {"x": 1, "y": 2}
    assert side({}, NEWEST) == {"x": None, "y": None}
    with pytest.raises(ValueError, match="zip"):
        side({"a": (1, 2, 3)}, NEWEST)


def test_a_rule_copies_where_it_has_no_function() -> None:
    rule = convert(("a", "b"), ("optimizer.clip", "run.seed"), write=lambda values: {"a": 1})
    assert rule.read({"a": 2, "c": 3}, NEWEST) == {"optimizer.clip": 2, "run.seed": None}
    assert rule.write({}, NEWEST) == {"a": 1}


RULES = Path(__file__).with_name("checks.txt")


def test_ids_of_checks_never_change() -> None:
    """A row whose words change keeps its id by `name`; a row that is new adds its id to the list."""
    known = RULES.read_text(encoding="utf-8").split()
    found = sorted(
        {
            f"{dialect.name}/{check.rule}".replace(" ", "")
            for dialect in DIALECTS
            for check in dialect.checks
        }
    )
    assert found == known, (
        f"write these, one to a line, into {RULES.name} unless an id of it is gone: {set(found) ^ set(known)}"
    )


@each
def test_every_check_says_what_and_where(dialect: Dialect) -> None:
    for check in dialect.checks:
        assert check.path and check.message and check.place, check.rule
        assert check.effect is Effect.STOPS or not check.last


def test_convert_takes_one_path_or_several() -> None:
    one = convert("a", "optimizer.lr", lambda values, context: {}, lambda values, context: {})
    both = convert(
        ("a", "b"),
        ("optimizer.lr", "optimizer.eps"),
        lambda values, context: {},
        lambda values, context: {},
    )
    assert (one.theirs, one.ours) == (("a",), ("optimizer.lr",))
    assert (both.theirs, both.ours) == (("a", "b"), ("optimizer.lr", "optimizer.eps"))
    assert both.paths_of_plan("a") == both.ours
    assert both.carriers("optimizer.eps") == both.theirs


def test_a_path_can_stand_for_a_part_of_its_group() -> None:
    rule = convert(
        ("a", "b"),
        ("optimizer.lr", "optimizer.eps"),
        lambda values, context: {},
        lambda values, context: {},
        sees=("c", "d"),
        carries={"a": "optimizer.lr", "b": (), "c": "optimizer.lr"},
    )
    assert rule.paths_of_plan("a") == ("optimizer.lr",)
    assert rule.paths_of_plan("b") == ()
    assert rule.carriers("optimizer.lr") == ("a", "c")
    assert rule.carriers("optimizer.eps") == ()


def test_one_sided_rules_say_nothing_of_the_other_side() -> None:
    fixed = always("loss", "per_token", "it has no choice")
    assert fixed.read({}, NEWEST) == {"loss": "per_token"}
    assert fixed.write({"loss": "mean_of_microbatches"}, NEWEST) == {}
    for rule in (only_theirs("x", "y", note="its own"), only_ours("loss", note="not there")):
        assert rule.read({"x": 1}, NEWEST) == rule.write({"loss": 1}, NEWEST) == {}
    debug = lacks("debug", "no logs")
    assert debug.ours == tuple(path for path in paths() if path.startswith("debug."))
    assert lacks("loss", "no choice").ours == ("loss",)


def test_an_effect_may_hang_on_the_values() -> None:
    rule = convert(
        "a",
        "loss",
        lambda v, c: {},
        lambda v, c: {},
        effect=lambda v: Effect.NUMBERS if v.get("a") else Effect.NONE,
    )
    assert rule.effect_of({"a": 1}) is Effect.NUMBERS
    assert rule.effect_of({}) is Effect.NONE
    assert rename("a", "loss", effect=Effect.COST).effect_of({}) is Effect.COST


@pytest.mark.parametrize(
    ("since", "reached"),
    [("1.2.9", True), ("1.2.10", True), ("1.10.0", False), ("1.2.10.post1", False)],
)
def test_releases_compare_by_number(since: str, reached: bool) -> None:
    assert NEWEST.since(since) is reached


@each
def test_every_row_that_keeps_something_back_says_why(dialect: Dialect) -> None:
    silent = [
        rule.theirs or rule.ours
        for rule in dialect.rules
        if not (rule.theirs and rule.ours) and not rule.note
    ]
    assert silent == []


@each
def test_what_a_path_stands_for_is_in_its_group(dialect: Dialect) -> None:
    for rule in dialect.rules:
        assert {*rule.carries} <= {*rule.theirs, *rule.sees}, rule.theirs
        assert {ours for path in rule.carries for ours in rule.paths_of_plan(path)} <= {
            *rule.ours
        }, rule.theirs


@each
def test_every_effect_can_be_worked_out(dialect: Dialect) -> None:
    assert all(isinstance(effect_without_values(rule), Effect) for rule in dialect.rules)


def effect_without_values(rule: Rule) -> Effect:
    return rule.effect_of({})


FILE = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "fused": True}},
}
LAUNCH = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 --micro-batch-size 1"
    " --global-batch-size 16 --lr 1e-3 --lr-decay-style constant --train-iters 9 --tokenizer-type NullTokenizer --vocab-size 99"
)
LIVE, SAFE = (
    "zero_optimization.stage3_max_live_parameters",
    "torch_autocast.lower_precision_safe_modules",
)
ACTIVATION, ADAMW = "expert_parallel.expert_activation", "torch.optim.AdamW"


@pytest.mark.parametrize(
    ("stack", "source", "path", "effect"),
    [
        ("deepspeed", FILE, "optimizer.params.fused", Effect.ROUNDING),
        (
            "deepspeed",
            {**FILE, "expert_parallel": {"enabled": True, "expert_activation": "gelu"}},
            ACTIVATION,
            Effect.NUMBERS,
        ),
        (
            "deepspeed",
            {**FILE, "expert_parallel": {"expert_activation": "gelu"}},
            ACTIVATION,
            Effect.NONE,
        ),
        (
            "deepspeed",
            {**FILE, "zero_optimization": {"stage": 3, "stage3_max_live_parameters": 9}},
            LIVE,
            Effect.COST,
        ),
        (
            "deepspeed",
            {**FILE, "zero_optimization": {"stage": 1, "stage3_max_live_parameters": 9}},
            LIVE,
            Effect.NONE,
        ),
        (
            "deepspeed",
            {**FILE, "torch_autocast": {"lower_precision_safe_modules": ["a.B"]}},
            SAFE,
            Effect.NONE,
        ),
        ("megatron", f"{LAUNCH} --logits-save-top-k 9", "logits_save_top_k", Effect.NONE),
        (
            "megatron",
            f"{LAUNCH} --flight-recorder-dump-path a",
            "flight_recorder_dump_path",
            Effect.NONE,
        ),
        (
            "automodel",
            {"optimizer": {"_target_": ADAMW, "capturable": True}},
            "optimizer.capturable",
            Effect.ROUNDING,
        ),
        ("automodel", {"dataset": {"seq_len": 64}}, "dataset.seq_len", Effect.NUMBERS),
        ("automodel", {"dataloader": {"pin_memory": True}}, "dataloader.pin_memory", Effect.COST),
        (
            "automodel",
            {"model": {"config": {"architectures": ["a"]}}},
            "model.config.architectures",
            Effect.NONE,
        ),
    ],
)
def test_an_effect_follows_from_the_use_of_a_setting_and_its_switch(
    stack: str, source: Any, path: str, effect: Effect
) -> None:
    to = compat.load("megatron" if stack == "deepspeed" else "deepspeed")
    config = compat.load(stack).read(source.split() if isinstance(source, str) else source, None, 8)
    found = {
        finding.path: finding.effect for finding in translate(config, to).findings if finding.given
    }
    assert found[path] is effect


def test_every_key_of_deepspeed_that_no_plan_field_stands_for_names_its_reader() -> None:
    left = [
        path for rule in compat.load("deepspeed").rules if not rule.ours for path in rule.theirs
    ]
    assert not [
        path
        for path in left
        if unmapped_settings.why(path).note == unmapped_settings.UNKNOWN[1]
        and not path.startswith("code.")
    ]
    assert all(place and note for _, note, place, _ in unmapped_settings.READ)
