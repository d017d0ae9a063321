"""What stacks do alike in all runs: differences that no setting shows, and settings that only say what the
other stack does anyway.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest

import bridge
import compat
from bridge.plan.plan import Plan
from bridge.report.as_json import remarks_of
from bridge.stack.dialect import Config
from bridge.stack.rules import Effect
from bridge.translation.diff import compare
from bridge.translation.lift import plan_claims
from bridge.translation.translate import remarks

COUNT = int(os.environ.get("HABIT_PAIRS", "24"))
"""Generated pairs that differ in one habit, and as many that do not; 300 by hand."""

WORLD = 8
FLAGS = (
    "--micro-batch-size 1 --global-batch-size 8 --num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 512 "
    "--max-position-embeddings 512 --vocab-size 1024 --make-vocab-size-divisible-by 128 --tokenizer-type NullTokenizer "
    "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope --hidden-dropout 0 "
    "--untie-embeddings-and-output-weights --attention-dropout 0 --bf16 --use-distributed-optimizer "
    "--calculate-per-token-loss --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --train-iters 100 --lr-warmup-iters 10"
)
APART = " --dataloader-inter-document-masking --eod-mask-loss"
RESET = " --reset-attention-mask --reset-position-ids --eod-mask-loss"
LOCAL = " --transformer-impl local"
UNFUSED = f"{LOCAL} --no-masked-softmax-fusion"


def megatron(flags: str) -> Config:
    return compat.load("megatron").read(flags.split(), world_size=WORLD)


def told(config: Config, name: str) -> set[str]:
    """The plan fields of findings that matter in a translation, and of the differences to its result."""
    result = bridge.translate(config, compat.load(name), world_size=WORLD)
    found = {ours for finding in result.findings if finding.matters for ours in finding.about}
    apart = {
        ours
        for row in compare(config, result.config)
        if row.effect.reaches(Effect.ROUNDING)
        for ours in row.about
    }
    assert {ours for ours in found if ours.startswith("habits.")} <= apart
    return found


def test_documents_that_megatron_joins_and_fast_llm_keeps_apart() -> None:
    joined = told(megatron(FLAGS), "fast_llm")
    assert joined >= {"habits.attention", "habits.boundaries"}
    assert not {
        ours for ours in told(megatron(FLAGS + APART), "fast_llm") if ours.startswith("habits.")
    }
    there = bridge.translate(
        megatron(FLAGS + APART), compat.load("fast_llm"), world_size=WORLD
    ).config
    back = bridge.translate(there, compat.load("megatron"), world_size=WORLD).config
    assert back.given["dataloader_inter_document_masking"] and back.given["eod_mask_loss"]
    # A script that brings the data decides by itself.
    assert not {ours for ours in told(megatron(FLAGS), "deepspeed") if ours.startswith("habits.")}


@pytest.mark.parametrize(
    ("flags", "scope"),
    [
        (" --dataloader-inter-document-masking", "document"),
        (" --sft", "document"),
        # The layers of Transformer Engine make a causal mask of their own.
        (RESET, "sequence"),
        (f"{RESET} --no-masked-softmax-fusion", "sequence"),
        # So does the fused softmax of the local layers, where it is available.
        (RESET + LOCAL, "sequence"),
        (RESET + UNFUSED, "document"),
        (f"{RESET}{LOCAL} --softmax-type off-by-one", "document"),
        (f"{RESET}{LOCAL} --seq-length 8192 --max-position-embeddings 8192", "document"),
        (f"{RESET}{LOCAL} --seq-length 16", "document"),
        (f"{RESET}{LOCAL} --num-attention-heads 2", "document"),
        # No mask is made, or another replaces it.
        (f"{RESET}{UNFUSED} --no-create-attention-mask-in-dataloader", "sequence"),
        (f"{RESET}{UNFUSED} --window-size 64,0", "sequence"),
    ],
)
def test_a_mask_separates_documents_only_if_the_layers_use_it(flags: str, scope: str) -> None:
    config = megatron(FLAGS + flags)
    assert bridge.lift(config).habits.attention == scope
    ignored = "reset_attention_mask" in config.given and scope == "sequence"
    assert ignored == any(row.path == "reset_attention_mask" for row in remarks(config))


def test_local_layers_without_fusion_separate_documents_in_fp32() -> None:
    flags = FLAGS.replace("--bf16 --use-distributed-optimizer", "")
    assert bridge.lift(megatron(flags + RESET + LOCAL)).habits.attention == "document"


def test_documents_apart_are_a_named_loss_in_a_megatron_that_cannot_separate_them() -> None:
    source = fast_llm({"head": {}})
    old, new = (
        bridge.translate(source, compat.load("megatron"), version, WORLD)
        for version in ("0.16.1", "0.19.2")
    )
    about = [
        {ours for row in result.findings if row.matters for ours in row.about}
        for result in (old, new)
    ]
    assert "habits.attention" in about[0] and "habits.attention" not in about[1]
    assert new.config.given["dataloader_inter_document_masking"]


def test_data_sets_reset_only_positions_that_come_from_them() -> None:
    """Rotary positions do not use the position ids of the data set."""

    def effects(flags: str) -> set[Effect]:
        return {row.effect for row in compare(megatron(flags), megatron(flags + reset))}

    reset = " --reset-position-ids"
    learned = FLAGS.replace("--position-embedding-type rope", "")
    assert effects(FLAGS) == {Effect.NONE}
    assert Effect.NUMBERS in effects(learned)


def fast_llm(model: dict[str, Any]) -> Config:
    source = {
        "training": {"train_iters": 10},
        "model": {"base_model": {"hidden_size": 64, **model}},
    }
    return compat.load("fast_llm").read(source, world_size=WORLD)


def test_adapters_are_on_the_layers_that_the_source_adapts() -> None:
    there = bridge.translate(
        fast_llm({"peft": {"type": "lora", "rank": 8}}), compat.load("automodel"), world_size=WORLD
    )
    assert there.config.given["peft.*"] == {"target_modules": ["*.q_proj", "*.v_proj"]}
    assert "adapters.targets" not in {ours for finding in there.findings for ours in finding.about}
    back = bridge.translate(there.config, compat.load("fast_llm"), world_size=WORLD)
    assert bridge.lift(back.config).adapters.targets == ("query", "value")


def test_the_factor_of_a_whole_part_is_another_than_that_of_its_weight() -> None:
    wide = fast_llm({"head": {"lr_scale": 2.0}})
    narrow = fast_llm({"head": {"output_weight": {"lr_scale": 2.0}}})
    assert bridge.lift(wide).optimizer.output_lr == bridge.lift(narrow).optimizer.output_lr == 2.0
    assert "habits.output_lr" in told(wide, "automodel")
    assert "habits.output_lr" not in told(narrow, "automodel")
    there = bridge.translate(narrow, compat.load("automodel"), world_size=WORLD).config
    back = bridge.translate(there, compat.load("fast_llm"), world_size=WORLD).config
    assert back.given["model.base_model"]["head"]["output_weight"]["lr_scale"] == 2.0


MERAK: Mapping[str, Any] = {
    "init": {"pp": 1, "tp": 1, "dp": 8},
    "args": {
        "output_dir": "o",
        "per_device_train_batch_size": 1,
        "max_steps": 10,
        "max_grad_norm": 1.0,
        "num_layers": 2,
    },
}


def merak(**args: Any) -> Config:
    return compat.load("merak").read({**MERAK, "args": {**MERAK["args"], **args}}, world_size=WORLD)


@pytest.mark.parametrize("name", ("megatron", "deepspeed", "automodel"))
def test_the_inverse_square_root_without_warmup_has_three_meanings(name: str) -> None:
    cold = told(merak(lr_scheduler_type="inverse_sqrt", warmup_steps=0), name)
    assert "habits.inverse_sqrt" in cold
    assert "habits.inverse_sqrt" not in told(
        merak(lr_scheduler_type="inverse_sqrt", warmup_steps=4), name
    )


def test_a_decoupled_rate_that_is_the_rate_is_none() -> None:
    own = megatron(f"{FLAGS} --decoupled-lr 3e-4")
    assert not [row for row in compare(megatron(FLAGS), own) if row.effect is Effect.NUMBERS]
    assert compare(megatron(FLAGS), megatron(f"{FLAGS} --decoupled-lr 6e-4"))
    assert not {ours for ours in told(own, "automodel") if ours.startswith("optimizer.")}


def test_a_row_of_diff_has_the_values_of_one_field() -> None:
    """A setting may stand for several fields, such as that a microbatch is so long and that it has one sequence."""
    run = {**MERAK, "args": {**MERAK["args"], "save_steps": 500, "fp16": True}}
    one = compat.load("merak").read(run, world_size=WORLD)
    for name in ("fast_llm", "megatron", "deepspeed", "automodel"):
        other = bridge.translate(one, compat.load(name), world_size=WORLD).config
        for row in (*compare(one, other), *compare(other, one)):
            kinds = {type(value) for value in (row.before, row.after) if value is not None}
            assert bool not in kinds or len(kinds) == 1, row


def test_a_microbatch_that_is_translated_is_not_lost_with_the_length_of_a_sequence() -> None:
    data = {"micro_batch_size": 4096, "maximum_document_length": 2048}
    source = {"training": {"train_iters": 10}, "data": data}
    one = compat.load("fast_llm").read(source, world_size=WORLD)
    result = bridge.translate(one, compat.load("deepspeed"), world_size=WORLD)
    for rows in (result.findings, compare(one, result.config), compare(result.config, one)):
        found = {row.path for row in rows if "model.sequence" in row.about}
        assert found == {"data.maximum_document_length"}


def test_a_value_that_is_the_default_is_lost_all_the_same() -> None:
    epochs = merak(max_steps=-1, num_train_epochs=3)
    assert "run.epochs" in told(epochs, "megatron")


def test_dropout_that_a_family_does_not_read_is_none() -> None:
    config = compat.load("huggingface").read(
        {"model_type": "phi3", "embd_pdrop": 0.1, "num_hidden_layers": 2}
    )
    assert not bridge.lift(config).model.embedding.dropout


SHORT: Mapping[str, Any] = {
    "training": {"train_iters": 100},
    "optimizer": {
        "learning_rate": {"base": 1e-3, "decay_style": "constant", "warmup_iterations": 0},
        "weight_decay": 0.1,
    },
}


def scaled(**learning_rate: Any) -> Config:
    source = fast_llm({"tied_embedding_weight": False, **OWN_RATES}).given
    rates = {**SHORT["optimizer"]["learning_rate"], **learning_rate}
    optimizer = {**SHORT["optimizer"], "learning_rate": rates}
    run = {**SHORT, "optimizer": optimizer, "model": {"base_model": source["model.base_model"]}}
    return compat.load("fast_llm").read(run, world_size=WORLD)


OWN_RATES = {
    "embeddings": {"vocab_size": 512, "word_embeddings": {"lr_scale": 0.5}},
    "head": {"output_weight": {"lr_scale": 0.5}},
}


def test_factors_of_groups_come_with_the_scheduler_that_applies_them() -> None:
    """Without a scheduler, AutoModel's factors on rate and decay have no effect."""
    there = bridge.translate(scaled(), compat.load("automodel"), world_size=WORLD).config
    assert there.given["optimizer.param_group_overrides"]
    assert there.given["lr_scheduler.lr_decay_style"] == "constant"
    plan = bridge.lift(there).optimizer
    assert (plan.embedding_lr, plan.output_lr, plan.decay_scope) == (0.5, 0.5, "matrices")
    alone = {
        path: value for path, value in there.given.items() if not path.startswith("lr_scheduler.")
    }
    unscheduled = compat.load("automodel").config(alone, there.version, WORLD)
    plan = bridge.lift(unscheduled).optimizer
    assert (plan.embedding_lr, plan.output_lr, plan.decay_scope) == (None, None, "all")
    assert {"optimizer.embedding_lr", "optimizer.decay_scope"} <= {
        ours for row in compare(there, unscheduled) for ours in row.about
    }
    assert "optimizer.param_group_overrides" in {row.path for row in remarks(unscheduled)}
    # A release without groups has nothing that a scheduler would apply.
    old = bridge.translate(scaled(), compat.load("automodel"), "0.4.0", WORLD).config
    assert "lr_scheduler.lr_decay_style" not in old.given


def test_a_ramp_of_weight_decay_between_equal_ends_is_none() -> None:
    ramp = f"{FLAGS} --weight-decay 0.3 --weight-decay-incr-style linear --start-weight-decay"
    flat = megatron(f"{ramp} 0.1 --end-weight-decay 0.1")
    rows = compare(flat, megatron(f"{FLAGS} --weight-decay 0.1"))
    assert {row.effect for row in rows} == {Effect.NONE}
    for name in ("fast_llm", "deepspeed", "automodel"):
        assert not {ours for ours in told(flat, name) if "decay" in ours}
        there = bridge.translate(flat, compat.load(name), world_size=WORLD).config
        assert bridge.lift(there).optimizer.weight_decay == 0.1
    rising = told(megatron(f"{ramp} 0.1 --end-weight-decay 0.2"), "fast_llm")
    assert "optimizer.decay_ramp.shape" in rising


def test_the_scheduler_of_a_recipe_sets_the_weight_decay() -> None:
    there = bridge.translate(
        megatron(f"{FLAGS} --weight-decay 0.1"), compat.load("automodel"), world_size=WORLD
    ).config
    ends = {"lr_scheduler.start_wd": 0.2, "lr_scheduler.end_wd": 0.2}
    other = compat.load("automodel").config({**there.given, **ends}, there.version, WORLD)
    assert bridge.lift(other).optimizer.weight_decay == 0.2
    assert "optimizer.weight_decay" in {ours for row in compare(there, other) for ours in row.about}


@pytest.mark.parametrize("version", ("0.16.1", "0.19.2"))
def test_a_flag_that_has_no_effect_is_no_subject_of_a_row(version: str) -> None:
    source = compat.load("megatron").read((FLAGS + RESET).split(), version, world_size=WORLD)
    result = bridge.translate(source, compat.load("fast_llm"), world_size=WORLD)
    rows = [row for row in result.findings if "habits.attention" in row.about]
    assert [row.effect for row in rows] == [Effect.NUMBERS]
    assert rows[0].path != "reset_attention_mask"
    assert (rows[0].before, rows[0].after) in [(False, True), ("sequence", "document")]


@pytest.mark.parametrize("style", ("cosine", "power"))
@pytest.mark.parametrize("name", ("megatron", "automodel"))
def test_a_row_has_the_value_that_was_written(style: str, name: str) -> None:
    """Of a schedule whose power alone is lost, the warmup is as before."""
    source = scaled(
        decay_style=style, warmup_iterations=10, decay_iterations=100, minimum=1e-5, decay_power=2.0
    )
    result = bridge.translate(source, compat.load(name), world_size=WORLD)
    rows = {row.path: row for row in result.findings}
    assert rows["optimizer.learning_rate.decay_power"].effect is Effect.NUMBERS
    assert rows["optimizer.learning_rate.warmup_iterations"].change == "10"


def test_what_a_recipe_stops_without_is_never_the_same_run() -> None:
    there = bridge.translate(scaled(), compat.load("automodel"), world_size=WORLD)
    assert {row.effect for row in there.missing} == {Effect.STOPS}
    # A part of a run lacks what may be said elsewhere.
    part = bridge.translate(fast_llm(OWN_RATES), compat.load("automodel"), world_size=WORLD)
    parts = compat.load("fast_llm").read({"model": {"base_model": {"hidden_size": 64}}})
    assert not parts.dialect.whole(parts) and part.source.dialect.whole(part.source)
    missing = bridge.translate(parts, compat.load("automodel"), world_size=WORLD).missing
    assert {row.effect for row in missing} == {Effect.NUMBERS}


def test_the_way_back_has_no_row_on_what_the_source_never_had() -> None:
    """Fast-LLM's Adam has moments, and the SGD that the sidecar restores has none, as before."""
    flags = FLAGS.replace("--use-distributed-optimizer ", "")
    source = megatron(f"{flags} --adam-beta2 0.95 --optimizer sgd --sgd-momentum 0.9")
    there = bridge.translate(source, compat.load("fast_llm"), world_size=WORLD)
    edited = compat.load("fast_llm").config(
        {**there.config.given, "training.train_iters": 50}, there.config.version, WORLD
    )
    back = bridge.translate(edited, compat.load("megatron"), world_size=WORLD, carry=there.carry)
    assert back.config.given["optimizer"] == "sgd" and back.config.given["train_iters"] == 50
    assert not [row for row in back.findings if row.effect.reaches(Effect.ROUNDING)]


# Generated pairs


class Case(NamedTuple):
    """One behaviour: the stacks of a pair, what makes the behaviour take effect, and what says its values in the plan
    of the source. With the first, the target's stack does differently; with the second, it does the same.
    """

    ours: str
    source: str
    targets: tuple[str, ...]
    under: Mapping[str, Any]
    apart: Mapping[str, Any]
    alike: Mapping[str, Any] | None


KEPT = {
    "habits.attention": "document",
    "habits.positions": "document",
    "habits.boundaries": "masked",
}
FACTORS = {"optimizer.embedding_lr": 2.0, "optimizer.output_lr": 2.0}
BALANCED = {
    "model.experts": 4,
    "model.moe.top_k": 2,
    "model.moe.balance": "batch",
    "model.moe.aux_loss": 0.01,
}
LORA = {
    "adapters.rank": 8,
    "adapters.alpha": 8.0,
    "adapters.targets": ("query", "value"),
    "habits.adapter_dropout": "input",
}
COLD = {"optimizer.schedule.name": "inverse_sqrt", "optimizer.schedule.warmup_steps": 0}
WARM = {"optimizer.schedule.warmup_steps": 5}
DROPS = {
    **KEPT,
    "model.dropout": 0.1,
    "model.attention.dropout": 0.1,
    "model.embedding.dropout": 0.1,
    "parallel.data": 2,
}
FP16, BF16 = {"precision.compute": "fp16"}, {"precision.compute": "bf16"}
MUON = {"optimizer.name": "muon", "optimizer.momentum": 0.9}
CASES = (
    Case("habits.attention", "megatron", ("fast_llm",), KEPT, {"habits.attention": "sequence"}, {}),
    Case(
        "habits.boundaries", "megatron", ("fast_llm",), KEPT, {"habits.boundaries": "trained"}, {}
    ),
    Case(
        "habits.positions",
        "megatron",
        ("fast_llm",),
        # A data set that gives the boundaries of documents resets their positions, too.
        {**KEPT, "model.embedding.positions": "learned", "habits.attention": "sequence"},
        {"habits.positions": "sequence"},
        {},
    ),
    Case("habits.attention", "fast_llm", ("megatron",), {}, {}, None),
    Case("habits.inverse_sqrt", "merak", ("megatron", "deepspeed", "automodel"), COLD, {}, WARM),
    Case("habits.inverse_sqrt", "megatron", ("deepspeed", "automodel"), COLD, {}, WARM),
    Case(
        "habits.overflow_steps",
        "merak",
        ("megatron", "deepspeed"),
        FP16,
        {},
        {"precision.compute": "bf16"},
    ),
    Case(
        "habits.first_lr_step",
        "fast_llm",
        ("megatron", "automodel", "merak", "deepspeed"),
        KEPT,
        {"habits.first_lr_step": 1},
        {"habits.first_lr_step": 0},
    ),
    Case("habits.first_lr_step", "megatron", ("fast_llm",), KEPT, {}, None),
    *(
        Case("precision.loss_scale.static", stack, ("automodel",), FP16, {}, BF16)
        for stack in ("megatron", "fast_llm", "deepspeed", "merak")
    ),
    Case(
        "precision.loss_scale.static",
        "automodel",
        ("megatron", "fast_llm", "deepspeed"),
        FP16,
        {},
        None,
    ),
    Case("habits.overflow_steps", "megatron", ("automodel",), FP16, {}, BF16),
    Case("habits.overflow_steps", "automodel", ("deepspeed", "fast_llm"), FP16, {}, BF16),
    Case("habits.clip_scope", "merak", ("megatron", "deepspeed"), {"parallel.tensor": 2}, {}, FP16),
    *(
        Case(
            "habits.balance_scope",
            source,
            targets,
            BALANCED,
            {"parallel.tensor": 2, "parallel.sequence": True},
            {"model.moe.aux_loss": 0.0, "parallel.tensor": 2, "parallel.sequence": True},
        )
        for source, targets in (("megatron", ("fast_llm",)), ("fast_llm", ("megatron",)))
    ),
    Case("habits.balance_scope", "megatron", ("fast_llm",), BALANCED, {}, None),
    Case(
        "habits.dropout_ranks",
        "megatron",
        ("fast_llm",),
        DROPS,
        {},
        {"habits.dropout_ranks": "apart"},
    ),
    Case("habits.muon_qkv", "megatron", ("deepspeed",), MUON, {}, {"habits.muon_qkv": "whole"}),
    Case("habits.adapter_init", "fast_llm", ("automodel",), LORA, {}, {"adapters.rank": None}),
    Case("habits.adapter_init", "automodel", ("fast_llm",), LORA, {}, {"adapters.rank": None}),
    Case(
        "adapters.targets",
        "automodel",
        ("fast_llm",),
        LORA,
        {"adapters.targets": ("query", "output")},
        {},
    ),
    Case(
        "habits.adapter_dropout",
        "automodel",
        ("fast_llm",),
        {**LORA, "adapters.dropout": 0.1},
        {"habits.adapter_dropout": "output"},
        {},
    ),
    Case(
        "habits.output_lr",
        "fast_llm",
        ("automodel", "megatron"),
        {**FACTORS, "habits.embedding_lr": "words"},
        {"habits.output_lr": "weight_and_norm"},
        {"habits.output_lr": "weight"},
    ),
    Case(
        "habits.factored_minimum",
        "megatron",
        ("fast_llm", "automodel"),
        {**FACTORS, "optimizer.schedule.minimum": 1e-5},
        {"habits.factored_minimum": "shared"},
        {"habits.factored_minimum": "scaled"},
    ),
    *(
        Case("habits.factored_minimum", "megatron", ("fast_llm", "automodel"), FACTORS, said, None)
        for said in ({"optimizer.schedule.minimum": 0.0}, {"optimizer.schedule.name": "constant"})
    ),
    *(
        Case(
            "habits.factored_start",
            source,
            targets,
            FACTORS,
            {"optimizer.schedule.warmup_from": 1e-5},
            {"optimizer.schedule.warmup_from": 0.0},
        )
        for source, targets in (
            ("megatron", ("fast_llm", "automodel")),
            *((stack, ("megatron",)) for stack in ("fast_llm", "automodel")),
        )
    ),
    *(
        Case(
            "habits.factored_start",
            source,
            (target,),
            {**FACTORS, "habits.first_lr_step": 0},
            {"optimizer.schedule.warmup_from": 1e-5},
            None,
        )
        for source, target in (("fast_llm", "automodel"), ("automodel", "fast_llm"))
    ),
    Case(
        "habits.embedding_lr",
        "fast_llm",
        ("megatron",),
        {**FACTORS, "model.embedding.positions": "learned", "habits.output_lr": "weight"},
        {"habits.embedding_lr": "words_and_positions"},
        {"habits.embedding_lr": "words"},
    ),
)


def drawn(case: Case, said: Mapping[str, Any], draw: random.Random) -> tuple[Config, Config]:
    """A run of the source's stack, and its translation."""
    heads, layers = draw.choice((2, 4, 8)), draw.choice((2, 4, 6))
    width, length, steps = (
        heads * draw.choice((16, 32)),
        draw.choice((64, 128)),
        draw.randrange(20, 200),
    )
    run = {
        "model.layers": layers,
        "model.hidden": width,
        "model.heads": heads,
        "model.ffn": 4 * width,
        "model.vocab": 1024,
        "model.sequence": length,
        "model.tied": False,
        "model.embedding.max_positions": length,
        "model.embedding.positions": "rotary",
        "model.rotary.base": 10000.0,
        "model.norm.kind": "rms",
        "model.dropout": 0.0,
        "model.attention.dropout": 0.0,
        "model.embedding.dropout": 0.0,
        "batch.micro": draw.choice((1, 2)),
        "batch.accumulation": draw.choice((1, 2, 4)),
        "parallel.data": draw.choice((1, 2)),
        "precision.compute": "bf16",
        "optimizer.name": "adamw",
        "optimizer.lr": draw.choice((1e-4, 3e-4)),
        "optimizer.clip": 1.0,
        "optimizer.schedule.name": "linear",
        "optimizer.schedule.warmup_steps": draw.randrange(1, 10),
        "optimizer.schedule.total_steps": steps,
        "run.steps": steps,
        **case.under,
        **said,
    }
    world = int(run["parallel.data"]) * int(run.get("parallel.tensor", 1))
    source = bridge.lower(Plan.of(run), compat.load(case.source), world_size=world)
    return source, bridge.translate(
        source, compat.load(draw.choice(case.targets)), world_size=world
    ).config


def worst(case: Case, one: Config, other: Config) -> tuple[Effect, Effect, Effect]:
    """The worst effect of a row about the behaviour, or of a remark on a setting that goes with it: of a
    translation, and of differences in both directions.
    """
    translated = bridge.translate(one, other.dialect, world_size=other.world_size)
    found = (remarks_of(translated), compare(one, other), compare(other, one))
    beside = {
        path
        for side in (one, other)
        for path in plan_claims(side.dialect)[case.ours].carriers(case.ours)
    }
    about = (
        [
            row.effect
            for row in rows
            if case.ours in row.about or (row.how is None and row.path in beside)
        ]
        for rows in found
    )
    first, second, third = (
        min(effects, key=lambda effect: effect.rank, default=Effect.NONE) for effects in about
    )
    return first, second, third


def test_pairs_that_differ_in_one_behaviour_are_told_apart() -> None:
    draw, missed = random.Random(1), Counter[str]()
    for number in range(COUNT):
        cases = [case for case in CASES if case.alike is not None]
        case = cases[number % len(cases)]
        if any(
            effect is not Effect.NUMBERS for effect in worst(case, *drawn(case, case.apart, draw))
        ):
            missed[f"{case.ours}: {case.source}"] += 1
    assert not missed


def test_pairs_that_say_the_same_in_other_words_have_no_row() -> None:
    draw, alarms = random.Random(2), Counter[str]()
    for number in range(COUNT):
        case = CASES[number % len(CASES)]
        said = case.apart if case.alike is None else case.alike
        if any(effect is not Effect.NONE for effect in worst(case, *drawn(case, said, draw))):
            alarms[f"{case.ours}: {case.source}"] += 1
    assert not alarms
