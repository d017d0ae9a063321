"""Configs of models: what each family's keys mean, there and back, and what transformers' own classes say."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import bridge
import compat
from bridge.errors import BridgeError
from bridge.plan import equality
from bridge.plan.families import FAMILIES, GENERIC, choose, groups, stands_for
from bridge.plan.families.schema import ModelKeys
from bridge.plan.families.table import ORDERED
from bridge.plan.plan import paths
from bridge.plan.section import fields
from bridge.stack.dialect import Config
from bridge.stack.rules import Effect
from bridge.translation.translate import translate
from tests.stacks.huggingface.accepted import harvest
from tests.stacks.huggingface.family_defaults import defaults

HF = compat.load("huggingface")
SAMPLE = Path(__file__).parent / "configs.jsonl"
SAME_MEANING = {
    ("mistral", "llama"),
    ("phi3", "llama"),
    ("phi3", "mistral"),
    ("mimo", "qwen2"),
    ("bailing_moe_v2", "glm4_moe"),
    ("sarvam_moe", "glm4_moe"),
    ("sarvam_mla", "deepseek_v3"),
    ("glm4_moe_lite", "deepseek_v3"),
    ("ernie4_5", "glm"),
}
"""Families whose configs, as far as they say the same, are those of an earlier one."""


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


ACCEPTED = Path(bridge.__file__).parent / "plan" / "families" / "accepted.json"


@cache
def sample() -> list[dict[str, Any]]:
    return rows(SAMPLE)


def name(hf: Mapping[str, Any]) -> str:
    return str(hf["model_type"])


def assert_holds(hf: Mapping[str, Any]) -> None:
    """Read, meant, written and read again: the same plan in every release; the family is found again without its name."""
    for version in HF.versions:
        config = HF.read(hf, version)
        plan = bridge.lift(config)
        again = HF.read(bridge.lower(plan, HF, version).text(), version)
        assert bridge.lift(again) == plan
        assert again.given["model_type"] == hf["model_type"]
        assert keys(again.effective) == keys(config.effective) or FAMILIES[name(hf)].foreign
        anonymous = {path: value for path, value in plan.values().items() if path != "model.family"}
        family, exact = choose(anonymous, version >= "5")
        if not FAMILIES[name(hf)].foreign:
            assert exact
            assert (
                family.name == hf["model_type"] or (hf["model_type"], family.name) in SAME_MEANING
            )


def keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes, which every family says outright."""
    sizes = (
        "num_hidden_layers",
        "hidden_size",
        "num_attention_heads",
        "vocab_size",
        "n_layer",
        "n_embd",
        "n_head",
    )
    return {key: values[key] for key in sizes if key in values}


def test_the_sample_has_each_kind_of_family() -> None:
    assert {name(hf) for hf in sample()} == {*FAMILIES}


@pytest.mark.parametrize("hf", sample(), ids=name)
def test_a_config_survives_its_plan(hf: Mapping[str, Any]) -> None:
    assert_holds(hf)


def test_every_config_survives_its_plan(whole: Path) -> None:
    found = rows(whole / "truth" / "model_configs.jsonl")
    assert len(found) > 100
    for row in found:
        assert_holds(row["hf"])


@pytest.mark.parametrize("hf", sample(), ids=name)
def test_a_recipe_keeps_the_model(hf: Mapping[str, Any]) -> None:
    """To AutoModel and back the plan is the same, and nothing that changes numbers is said to be lost."""
    config, recipe = HF.read(hf), compat.load("automodel")
    result = bridge.translate(config, recipe)
    assert modelled(result.config) == modelled(config)
    back = bridge.translate(recipe.read(result.written.text), HF)
    assert modelled(back.config) == modelled(config)


def modelled(config: Config) -> Mapping[str, Any]:
    """What a config says of its model, but for the code that trains it: AutoModel has its own for some families."""
    return {path: value for path, value in bridge.lift(config).values().items() if path in MODEL}


OTHER_CODE = (
    *("model.moe.aux_trained", "model.moe.aux_loss", "model.moe.balance"),
    "model.embedding.padding",
)
MODEL = frozenset(path for path in paths() if path.startswith("model.") and path not in OTHER_CODE)


def fate(hf: Mapping[str, Any], stack: str) -> str:
    """What becomes of the model on the way to another stack and back: equal, announced, padding if that is all that is
    announced, or the fields that differ in silence."""
    source = HF.read(hf)
    there = translate(source, compat.load(stack))
    back = translate(there.config, HF)
    before, after = (
        equality.plain(bridge.lift(config).values()) for config in (source, back.config)
    )
    differ = {
        path
        for path in {*before, *after} - ASIDE
        if before.get(path) != after.get(path) and path.startswith("model.")
    }
    told = [
        row
        for row in (*there.findings, *back.findings)
        if row.effect.reaches(Effect.NUMBERS) and row.path not in ASIDE
    ]
    if differ and not told:
        return f"{hf['model_type']}: {sorted(differ)}"
    return "announced" if differ - {"model.embedding.padding"} else "padding" if differ else "equal"


GOOD = {"equal", "padding", "announced"}
"""The fates of which none is silent."""
ASIDE = {
    "model.family",
    "model.sequence",
    "world_size",
    "data.micro_batch_size",
    "model.init.scaled",
}
"""What no config of a model says, and how first weights are drawn."""
STACKS = ("megatron", "fast_llm", "automodel")
ENOUGH = {"megatron": 120, "fast_llm": 60, "automodel": 180}


@pytest.mark.parametrize("stack", STACKS)
def test_models_come_back_or_are_announced(stack: str) -> None:
    assert {fate(hf, stack) for hf in sample()} <= GOOD


@pytest.mark.parametrize("stack", STACKS)
def test_all_models_come_back_or_are_announced(stack: str, whole: Path) -> None:
    """Of the rows that the stack's own converter has a result for."""
    found = [
        row
        for row in rows(whole / "truth" / "model_configs.jsonl")
        if stack == "automodel" or row.get(stack)
    ]
    fates = Counter(fate(row["hf"], stack) for row in found)
    assert fates.keys() <= GOOD
    # Megatron trains the row of the padding token, which is announced for each model where that matters.
    equal = fates["equal"] + fates["padding"]
    assert len(found) >= ENOUGH[stack] and equal > fates["announced"], fates


# The table


def test_every_key_of_the_table_is_typed() -> None:
    assert {key for keys, _ in groups() for key in keys} == {*fields(ModelKeys)}
    assert {*stands_for()} == {*fields(ModelKeys)}


def test_families_have_an_order_of_their_own() -> None:
    assert len({family.order for family in ORDERED}) == len(ORDERED)
    assert [family.name for family in ORDERED[:4]] == ["llama", "mistral", "qwen2", "qwen3"]


def test_defaults_are_those_of_the_classes() -> None:
    """The committed defaults are what transformers' own classes take today."""
    pytest.importorskip("transformers", minversion="5.23")

    for family in FAMILIES.values():
        if family.config:
            assert family.defaults == defaults(family.config, family.keys_it_reads), family.name


def test_kinds_are_those_that_the_classes_check() -> None:
    """The committed kinds are those of the installed transformers."""
    pytest.importorskip("transformers", minversion="5.23")

    assert json.loads(ACCEPTED.read_text("utf-8")) == harvest()


def oracle() -> Iterator[tuple[str, Mapping[str, Any]]]:
    yield from ((name(hf), hf) for hf in sample() if FAMILIES[name(hf)].config)


@pytest.mark.parametrize(
    "family, hf", oracle(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_what_is_written_is_the_same_to_transformers(family: str, hf: Mapping[str, Any]) -> None:
    """The class makes the same of a config and of what comes back from its plan, but for names, tokens and formats.

    A coefficient comes back with the switch that lets it train.
    """
    transformers = pytest.importorskip("transformers", minversion="5.23")
    kind = getattr(transformers, FAMILIES[family].config)
    written = json.loads(bridge.lower(bridge.lift(HF.read(hf)), HF).text())
    before, after = kind(**plain(hf)).to_dict(), kind(**written).to_dict()
    own = {field.name for field in dataclasses.fields(kind)} | {"layer_types", "mlp_layer_types"}
    known = (
        (own & {*FAMILIES[family].keys_it_reads})
        - IDLE.get(family, frozenset())
        - {"output_router_logits"}
    )
    differing = {
        key: (before.get(key), after.get(key))
        for key in known
        if not same(key, before.get(key), after)
    }
    assert differing == {}


UNUSED, CALLED = (
    frozenset(("sliding_window", "max_window_layers")),
    frozenset(("hidden_act", "hidden_activation")),
)
IDLE: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(("qwen2", "qwen3", "qwen2_moe", "qwen3_moe"), UNUSED),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text"), CALLED),
    "deepseek_v2": frozenset(("n_group", "topk_group")),
    "falcon": frozenset(("multi_query", "num_ln_in_parallel_attn")),
    "glm4_moe_lite": frozenset(("mlp_layer_types",)),
}
"""Keys that say nothing where others are as they are, or under another name the same; the class of glm4_moe_lite overlooks
`first_k_dense_replace`, which its published files have."""
WORDS = ("architectures", "torch_dtype", "dtype")
SYNONYMS = {"gelu_new", "gelu_pytorch_tanh", "gelu_fast"}


def plain(hf: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in hf.items() if key not in WORDS}


def same(key: str, one: Any, after: Mapping[str, Any]) -> bool:
    """Whether a value came back; what was open may be said outright."""
    other = after.get(key)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        both = {*one} & {*other}
        return all(same(inner, one.get(inner), other) for inner in {*one, *other} - (ROPE - both))
    if one is None and key in ("head_dim", "n_inner"):
        worked_out = (
            after["hidden_size"] // after["num_attention_heads"]
            if key == "head_dim"
            else 4 * after["n_embd"]
        )
        return bool(other == worked_out)
    return bool(one == other or (str(one) in SYNONYMS and other in SYNONYMS))


ROPE = {
    "type",
    "beta_fast",
    "beta_slow",
    "truncate",
    "mscale",
    "mscale_all_dim",
    "partial_rotary_factor",
    "attention_factor",
}
"""Keys of rotary scaling that may be left to their usual values."""


# What is refused, and what is said


@pytest.mark.parametrize(
    "hf, said",
    [
        ({"model_type": "lama"}, "did you mean llama"),
        ({"model_type": "mamba2"}, "whose layers stagebridge cannot translate"),
        ({"model_type": "gemma3", "text_config": {}, "vision_config": {}}, "a single text decoder"),
        ({"model_type": "llama", "hidden_act": "softplus"}, "hidden_act"),
        ({"model_type": "llama", "rope_scaling": {"rope_type": "spiral"}}, "spiral"),
        ({"model_type": "llama", "num_attention_heads": 8, "num_key_value_heads": 3}, "divisor"),
        (
            {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 8},
            "at most the number of experts",
        ),
        ({"model_type": "llama", "hidden_size": "wide"}, "hidden_size"),
        ({"model_type": "gpt_oss", "layer_types": ["linear_attention"]}, "layer_types"),
        (
            {"model_type": "gpt2", "n_embd": 64, "n_head": 6},
            "found 6; gpt2 expects a divisor of the hidden size \\(64\\)",
        ),
    ],
)
def test_what_no_plan_can_say_is_refused(hf: Mapping[str, Any], said: str) -> None:
    with pytest.raises(BridgeError, match=said):
        HF.read(hf)


def test_foreign_blocks_are_named() -> None:
    config = HF.read(
        {
            "model_type": "nemotron_h",
            "hidden_size": 256,
            "num_hidden_layers": 8,
            "hybrid_override_pattern": "M*",
        }
    )
    assert [finding.path for finding in config.findings if finding.matters] == ["model_type"]
    assert bridge.lift(config).model.layers is None


def test_a_config_without_a_type_is_read_by_what_all_families_mean_alike() -> None:
    config = HF.read(
        {"num_hidden_layers": 2, "hidden_size": 64, "sliding_window": 16, "rms_norm_eps": 1e-6}
    )
    model = bridge.lift(config).model
    assert (model.layers, model.hidden, model.attention.window, model.norm.kind) == (
        2,
        64,
        16,
        "rms",
    )
    assert model.mlp.gated is None
    assert [finding.path for finding in config.missing] == ["model_type"]


def test_both_spellings_of_rotary_positions_are_read() -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
    old = HF.read({"model_type": "llama", "rope_theta": 5e5, "rope_scaling": scaling}, "4.57.6")
    new = HF.read(
        {"model_type": "llama", "rope_parameters": {**scaling, "rope_theta": 5e5}}, "5.23.0"
    )
    assert bridge.lift(old) == bridge.lift(new)
    assert (
        "rope_scaling" in bridge.translate(new, HF, "4.57.6").config.given
        or "rope_parameters" in new.given
    )
    assert (
        json.loads(bridge.lower(bridge.lift(old), HF, "5.23.0").text())["rope_parameters"]["factor"]
        == 8.0
    )
    assert (
        json.loads(bridge.lower(bridge.lift(new), HF, "4.57.6").text())["rope_scaling"]["factor"]
        == 8.0
    )


def test_a_folder_is_read_by_its_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "gpt2", "bos_token_id": 5}), "utf-8"
    )
    config = HF.read(tmp_path)
    assert bridge.lift(config).model.ffn == 4 * 768
    assert json.loads(config.text())["bos_token_id"] == 5


def test_null_is_kept_where_it_says_something() -> None:
    config = HF.read({"model_type": "mistral", "sliding_window": None})
    assert bridge.lift(config).model.attention.window is None
    assert json.loads(config.text())["sliding_window"] is None
    assert bridge.lift(HF.read({"model_type": "mistral"})).model.attention.window == 4096


def test_the_generic_family_is_none_of_the_others() -> None:
    assert GENERIC.name not in FAMILIES
    assert not GENERIC.facts


def test_a_stretch_that_is_lost_is_named_by_its_own_key() -> None:
    """The base is written, and only the stretch has no place: nobody has to look at `rope_theta`."""
    config = {
        "model_type": "llama",
        "rope_theta": 100000.0,
        "rope_scaling": {"type": "linear", "factor": 4.0},
    }
    found = translate(compat.load("huggingface").read(config), compat.load("fast_llm")).findings
    told = {row.path: row for row in found if row.path.startswith("rope")}
    assert told["rope_scaling.factor"].effect is Effect.NUMBERS
    assert "rope_theta" not in told or told["rope_theta"].effect is Effect.NONE


def test_width_of_a_layer_that_no_block_has_is_no_loss() -> None:
    config = {
        "model_type": "qwen3_moe",
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 8,
    }
    found = translate(compat.load("huggingface").read(config), compat.load("fast_llm")).findings
    assert not [
        row
        for row in found
        if row.path in ("intermediate_size", "model.moe.z_loss") and row.effect is Effect.NUMBERS
    ]


def test_norms_behind_the_sum_end_without_one() -> None:
    """As transformers counts a small one (models/opt/modeling_opt.py: OPTDecoder has a last norm only with norms before)."""
    sizes = {
        "hidden_size": 256,
        "ffn_dim": 1000,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "vocab_size": 3000,
    }
    opt = {"model_type": "opt", **sizes, "max_position_embeddings": 512, "word_embed_proj_dim": 128}
    config = HF.read({**opt, "do_layer_norm_before": False})
    assert bridge.count_parameters(bridge.lift(config)).all == 2_913_464
    losses = {f.path: f.effect for f in bridge.translate(config, compat.load("fast_llm")).findings}
    assert losses["do_layer_norm_before"] is Effect.NUMBERS


LLAMA = {"model_type": "llama", "hidden_size": 96, "num_attention_heads": 8, "head_dim": 16}
FACTORS = {"factor": 8.0, "low_freq_factor": 1.0, "rope_theta": 1e4}
STOPPING: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
    ("head_dim", {"model_type": "falcon", "head_dim": 64}, {"model_type": "falcon"}),
    ("hidden_size", {**LLAMA, "hidden_size": 100}, LLAMA),
    (
        "rope_scaling",
        {"model_type": "phi3", "rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
        {"model_type": "llama", "rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
    ),
    (
        "num_key_value_heads",
        {"model_type": "nemotron"},
        {"model_type": "nemotron", "num_key_value_heads": 8},
    ),
    (
        "num_key_value_heads",
        {"model_type": "deepseek_v3", "num_attention_heads": 8, "num_key_value_heads": 4},
        {"model_type": "deepseek_v3", "num_attention_heads": 8, "num_key_value_heads": 8},
    ),
    *(
        (
            "qk_rope_head_dim",
            {"model_type": family, "qk_rope_head_dim": 3},
            {"model_type": family, "qk_rope_head_dim": 2},
        )
        for family in ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")
    ),
    (
        "rotary_dim",
        {"model_type": "gptj", "rotary_dim": 7},
        {"model_type": "gptj", "rotary_dim": 8},
    ),
    ("bos_token_id", {**LLAMA, "bos_token_id": "<s>"}, {**LLAMA, "bos_token_id": 1}),
    ("torch_dtype", {**LLAMA, "torch_dtype": "bf16"}, {**LLAMA, "torch_dtype": "bfloat16"}),
    ("eos_token_id", {**LLAMA, "eos_token_id": ["</s>"]}, {**LLAMA, "eos_token_id": [2, 3]}),
    ("pad_token_id", {**LLAMA, "pad_token_id": 32000}, {**LLAMA, "pad_token_id": 31999}),
    (
        "pad_token_id",
        {"model_type": "smollm3", "vocab_size": 49152},
        {"model_type": "smollm3", "vocab_size": 49152, "pad_token_id": None},
    ),
    (
        "head_dim",
        {**LLAMA, "head_dim": 17},
        {
            "model_type": "nemotron",
            "num_key_value_heads": 8,
            "head_dim": 17,
            "partial_rotary_factor": 0.5,
        },
    ),
    (
        "initializer_range",
        {**LLAMA, "initializer_range": 1.5},
        {"model_type": "mistral", "initializer_range": 1.5},
    ),
    (
        "query_pre_attn_scalar",
        {"model_type": "gemma2", "query_pre_attn_scalar": 256.5},
        {"model_type": "gemma2", "query_pre_attn_scalar": 256},
    ),
    (
        "rope_parameters",
        {**LLAMA, "rope_parameters": {"rope_type": "llama3", **FACTORS}},
        {**LLAMA, "rope_parameters": {"rope_type": "llama3", **FACTORS, "high_freq_factor": 4.0}},
    ),
)


@pytest.mark.parametrize("path, bad, good", STOPPING)
def test_what_transformers_refuses_is_said(
    path: str, bad: dict[str, Any], good: dict[str, Any]
) -> None:
    stops = [
        {one.path for one in HF.read(config).findings if one.effect is Effect.STOPS}
        for config in (bad, good)
    ]
    assert stops == [{path}, set()]


@pytest.mark.parametrize("head", (1, 2, 5, 6, 8, 12))
@pytest.mark.parametrize("share", (None, 0.125, 0.375, 0.5, 1.0))
def test_an_odd_number_of_rotated_channels_stops_exactly_where_that_is_said(
    head: int, share: float | None
) -> None:
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    config: dict[str, Any] = {
        "hidden_size": 4 * head,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "intermediate_size": 8,
        "vocab_size": 8,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **({} if share is None else {"partial_rotary_factor": share}),
    }
    try:
        model = transformers.PhiForCausalLM(transformers.PhiConfig(**config))
        model(input_ids=torch.zeros(1, 4, dtype=torch.long))
        stops = False
    except RuntimeError:
        stops = True
    read = compat.load("huggingface").read({"model_type": "phi", **config})
    assert any(one.effect is Effect.STOPS for one in read.dialect.inspect(read)) == stops
