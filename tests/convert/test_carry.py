"""With the carry-over, a config that goes to another stack and back is as it was written, and edits made there survive."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings, strategies as st

import bridge
import compat
from bridge.errors import SourceError
from bridge.stack.dialect import Config, Dialect
from bridge.testing import configs, entries
from bridge.translation import sidecar as carry
from bridge.translation.translate import Result, translate
from tests.common.amounts import MORE

pytestmark = pytest.mark.once

DIALECTS = tuple(compat.load(name) for name in compat.names())
PAIRS = tuple((one, other) for one in DIALECTS for other in DIALECTS if one is not other)
EDITS = {
    "optimizer.clip": (0.25, 4.0),
    "optimizer.weight_decay": (0.03125, 0.5),
    "optimizer.lr": (2.0**-12, 2.0**-8),
    "batch.micro": (3, 5),
    "model.hidden": (768, 1536),
}
"""Plan fields that may be edited, each with values that no default takes."""

QUIET = settings(
    max_examples=6 * MORE,
    derandomize=True,
    phases=[Phase.generate],
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
pair = pytest.mark.parametrize("ours, theirs", PAIRS, ids=lambda dialect: dialect.name)


def editable(dialect: Dialect) -> set[str]:
    """Those of them that a config of the dialect has a setting for."""
    return {path for rule in dialect.rules if rule.theirs for path in rule.ours if path in EDITS}


common = pytest.mark.parametrize(
    "ours, theirs",
    [both for both in PAIRS if editable(both[0]) & editable(both[1])],
    ids=lambda dialect: dialect.name,
)
"""Pairs that can say the same of some field: a config of a model and DeepSpeed's file have none."""


def files(dialect: Dialect) -> st.SearchStrategy[Config]:
    """Configs as they come from files."""
    return configs(dialect, entry=entries(dialect)[0])


def translated(config: Config, theirs: Dialect) -> Result:
    """`config` in another dialect; skipped where that stack cannot run it."""
    try:
        return translate(config, theirs)
    except bridge.BridgeError:
        assume(False)
        raise


def returned(result: Result, config: Config, edited: Config) -> Config:
    """`edited`, back in the dialect of `config` with the sidecar that was written beside the first translation."""
    sidecar = carry.parse(result.carry.text(result.written.text), "sidecar")
    return translate(edited, config.dialect, config.version, config.world_size, sidecar).config


@pair
def test_there_and_back_gives_what_was_written(ours: Dialect, theirs: Dialect) -> None:
    @QUIET
    @given(files(ours))
    def law(config: Config) -> None:
        result = translated(config, theirs)
        assert returned(result, config, result.config).given == config.given

    law()


@common
def test_an_edit_survives_the_way_back(ours: Dialect, theirs: Dialect) -> None:
    @QUIET
    @given(
        files(ours), st.sampled_from(sorted(editable(ours) & editable(theirs))), st.integers(0, 1)
    )
    def law(config: Config, path: str, which: int) -> None:
        result = translated(config, theirs)
        edited = edit(result.config, path, EDITS[path][which])
        try:
            back = returned(result, config, edited)
            after = translate(edited, ours, config.version, config.world_size).config
        except bridge.BridgeError:
            return  # the edit and the rest do not go together there, which is said
        assert bridge.lift(back).values().get(path) in (
            EDITS[path][which],
            bridge.lift(after).values().get(path),
        )
        touched = {
            name for rule in ours.rules if path in rule.ours for name in (*rule.theirs, *rule.sees)
        }
        touched |= {name for rule in ours.rules if touched & {*rule.sees} for name in rule.theirs}
        for name in config.given.keys() - touched:
            assert back.given.get(name) in (config.given[name], after.given.get(name)), name

    law()


@pytest.mark.parametrize(
    "name", sorted(theirs.name for theirs in DIALECTS if "model.hidden" in editable(theirs))
)
@pytest.mark.parametrize("family, key", [("bloom", "hidden_size"), ("gptj", "n_embd")])
def test_an_edit_is_written_in_the_keys_of_the_source_s_family(
    family: str, key: str, name: str
) -> None:
    """What came back from the other stack reads as another family, whose keys this one does not know."""
    source = compat.load("huggingface").config(
        {"model_type": family, "n_layer": 1, key: 192}, world_size=1, entry="file"
    )
    result = translate(source, compat.load(name))
    edited = written_over(result.config, {"model.hidden": 768}, bridge.lift(result.config).values())
    back = returned(result, source, edited)
    assert bridge.lift(back).values()["model.hidden"] == 768
    assert back.given["model_type"] == family


def edit(config: Config, path: str, value: Any) -> Config:
    """`config` with a Plan field set to another value in its own words; skipped where that is not legal there."""
    plan = bridge.lift(config).values()
    assume(plan.get(path) not in (None, value))
    changes = {path: value}
    if path == "batch.micro":
        assume("batch.accumulation" in plan and "parallel.data" in plan)
        changes["batch.global_"] = value * plan["batch.accumulation"] * plan["parallel.data"]
    try:
        edited = written_over(config, changes, plan)
        assume(bridge.lift(edited).values().get(path) == value)
    except bridge.BridgeError:
        assume(False)
    return edited


def written_over(config: Config, changes: dict[str, Any], plan: dict[str, Any]) -> Config:
    """`config`, which means `plan`, with these Plan fields written into it."""
    given = dict(config.given)
    for rule in config.dialect.rules:
        if set(rule.ours) & changes.keys():
            group = {
                name: plan[name] for name in (*rule.ours, *rule.sees) if name in plan
            } | changes
            given |= {
                name: said
                for name, said in rule.write(group, config.context).items()
                if said is not None
            }
    return config.dialect.config(given, config.version, config.world_size, config.entry)


def test_a_sidecar_survives_its_text() -> None:
    given = {"a": (1, 2.5), "b": [1, (2,)], "c": {"d": None}, "e": "x"}
    kept = carry.Carry("megatron", "0.16.1", 8, "flags", given, {"optimizer.betas": (0.9, 0.95)})
    again = carry.parse(kept.text("{}\n"), "sidecar")
    assert again == kept
    assert again.digest == carry.digest_of("{}\n")


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", "null", '{"stagebridge": 99}', '{"stagebridge": 1}', "\x00"]
)
def test_what_is_no_sidecar_is_refused(text: str) -> None:
    with pytest.raises(SourceError, match="sidecar"):
        carry.parse(text, "sidecar")


LAUNCH = (
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --max-position-embeddings 4096 --bf16 "
    "--micro-batch-size 1 --global-batch-size 128 --train-samples 1000000 --lr-decay-samples 900000 --lr-warmup-samples 10000 "
    "--lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --fp8-format hybrid --fp8-recipe delayed --fp8-param-gather "
    "--weight-decay 0.1 --start-weight-decay 0.01 --end-weight-decay 0.1 --weight-decay-incr-style cosine "
    "--use-distributed-optimizer --vocab-size 50257 --make-vocab-size-divisible-by 128"
)


def edited_leaf(config: Config, path: str, value: Any) -> Config:
    """`config` with a value deep in one of its sections changed."""
    given = copy.deepcopy(dict(config.given))
    top = next(name for name in given if f"{path}.".startswith(f"{name}."))
    *above, last = path.removeprefix(top).lstrip(".").split(".")
    section = given if path == top else given[top]
    for name in above if path != top else ():
        section = section[name]
    section[top if path == top else last] = value
    return config.dialect.config(given, config.version, config.world_size, config.entry)


@pytest.mark.parametrize(
    "path, value",
    [
        ("model.base_model.decoder.num_blocks", 40),
        ("model.base_model.hidden_size", 2048),
        ("optimizer.weight_decay", 0.2),
    ],
)
def test_an_edit_loses_nothing_that_it_does_not_touch(path: str, value: Any) -> None:
    """Though the stack cannot say all that it means: the weights that were drawn for so many layers."""
    megatron, fast_llm = compat.load("megatron"), compat.load("fast_llm")
    source = megatron.read(LAUNCH.split(), world_size=8)
    result = translate(source, fast_llm)
    sidecar = carry.parse(result.carry.text(result.written.text), "sidecar")
    back = translate(edited_leaf(result.config, path, value), megatron, source.version, 8, sidecar)
    changed = {
        "num_layers",
        "hidden_size",
        "weight_decay",
        "end_weight_decay",
        "start_weight_decay",
        "weight_decay_incr_style",
    }
    assert {name: back.config.given.get(name) for name in source.given.keys() - changed} == {
        name: given for name, given in source.given.items() if name not in changed
    }
    assert not back.config.given.get("calculate_per_token_loss")
    assert not [
        finding
        for finding in back.findings
        if "not put back" in finding.message and "weight" not in finding.path
    ]


@pytest.mark.parametrize(
    "name, path, value, edited",
    [
        (
            "fast_llm",
            "optimizer.learning_rate.schedule",
            "constant,1,0.0;linear,200,0.0,0.0003;cosine,9175,0.0003,0.0",
            {"lr_warmup_samples": 12800},
        ),
        ("fast_llm", "training.train_iters", 5000, {"train_samples": 320000}),
        ("automodel", "step_scheduler.max_steps", 5000, {"train_samples": 320000}),
        ("automodel", "lr_scheduler.lr_warmup_steps", 200, {"lr_warmup_samples": 12800}),
    ],
)
def test_a_launch_that_counts_samples_still_does(
    name: str, path: str, value: int | str, edited: dict[str, int]
) -> None:
    megatron, counts = (
        compat.load("megatron"),
        "--train-samples 640000 --lr-decay-samples 600000 --lr-warmup-samples 6400 ",
    )
    rest = "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 --max-position-embeddings 1024 --bf16 "
    batch = "--micro-batch-size 4 --global-batch-size 64 --lr 3e-4 --lr-decay-style cosine --vocab-size 50257"
    source = megatron.read((counts + rest + batch).split(), world_size=8)
    result = translate(source, compat.load(name))
    assert (
        dict(returned(result, source, edited_leaf(result.config, path, value)).given)
        == dict(source.given) | edited
    )


ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SIZES = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "vocab_size": 512,
}


@pytest.mark.parametrize(
    "given",
    [{"rope_theta": 5e5, "rope_scaling": ROPE}, {"rope_parameters": {"rope_theta": 5e5, **ROPE}}],
)
@pytest.mark.parametrize("name", ["megatron", "fast_llm", "automodel"])
@pytest.mark.parametrize(
    "path, key, value", [("base", "rope_theta", 1e6), ("scaling.factor", "factor", 4.0)]
)
def test_an_edit_keeps_the_spelling_of_the_source(
    given: dict[str, Any], name: str, path: str, key: str, value: float
) -> None:
    source = compat.load("huggingface").config({**SIZES, **given}, world_size=1, entry="file")
    result = translate(source, compat.load(name))
    ours = f"model.rotary.{path}"
    back = returned(
        result,
        source,
        written_over(result.config, {ours: value}, bridge.lift(result.config).values()),
    )
    (mapping,) = given.keys() - {"rope_theta"}
    kept = dict(source.given) | (
        {key: value} if key in given else {mapping: {**given[mapping], key: value}}
    )
    assert dict(back.given) == kept


def test_what_clashes_with_an_edit_is_named_and_nothing_else_is_left_out() -> None:
    megatron = compat.load("megatron")
    source = megatron.read(
        LAUNCH.replace("--num-layers", "--encoder-num-layers").split(), world_size=8
    )
    result = translate(source, compat.load("fast_llm"))
    sidecar = carry.parse(result.carry.text(result.written.text), "sidecar")
    edited = edited_leaf(result.config, "model.base_model.decoder.num_blocks", 40)
    back = translate(edited, megatron, source.version, 8, sidecar)
    assert source.given.keys() - back.config.given.keys() == {"encoder_num_layers"}
    said = {finding.path: finding.message for finding in back.findings}
    assert "the edit of model.base_model excludes the old setting" in said["encoder_num_layers"]
