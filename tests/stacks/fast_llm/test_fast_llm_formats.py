"""Files, mappings and overrides of Fast-LLM: strict reading, and text that its own loader reads the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

import bridge
import compat
from bridge import limits
from bridge.errors import BridgeError, ConfigError
from bridge.files import load_yaml
from bridge.plan.section import fields
from bridge.stack.dialect import Dialect
from bridge.stack.rules import Effect
from compat.fast_llm.formats import flow, text
from compat.fast_llm.releases import KEYS, KNOWN, RELEASES
from compat.fast_llm.setting_types import IMPORTANCE

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "fast_llm"
LEVEL = "model.multi_stage.zero_stage"


def fast_llm() -> Dialect:
    return compat.load("fast_llm")


@pytest.mark.parametrize(
    "source",
    (
        {"model": {"multi_stage": {"zero_stage": 2}}},
        {"multi_stage": {"zero_stage": 2}},
        {LEVEL: 2},
        ["model.multi_stage.zero_stage=2"],
        ["fast-llm", "train", "gpt", f"{LEVEL}=2"],
        [f"{LEVEL}=3", "--validate", f"{LEVEL}=2"],
        "model.multi_stage.zero_stage=2",
        "model:\n  multi_stage:\n    zero_stage: 2\n",
        "train gpt\nmodel.multi_stage.zero_stage=2\n",
        '{"model": {"multi_stage": {"zero_stage": 2}}}',
    ),
)
def test_one_setting_in_every_form(source: Any) -> None:
    assert fast_llm().read(source).given == {LEVEL: 2}


def test_overrides_go_over_the_file_wherever_they_stand() -> None:
    path = str(EXAMPLES / "zero2.yaml")
    for words in (
        [f"{LEVEL}=3", "--config", path],
        ["-c", path, f"{LEVEL}=3"],
        [f"--config={path}", f"{LEVEL}=3"],
    ):
        config = fast_llm().read(words)
        assert config.given[LEVEL] == 3 and config.given["training.train_iters"] == 1000
        assert config.origins[LEVEL].spelling == f"{LEVEL}=3"


def test_an_override_may_replace_a_section() -> None:
    config = fast_llm().read([f"{LEVEL}=2", "model.multi_stage={num_grad_buffers: 3}"])
    assert config.given == {"model.multi_stage.num_grad_buffers": 3}


def test_origins_have_lines() -> None:
    config = fast_llm().read(EXAMPLES / "zero2.yaml")
    line = config.origins[LEVEL].line
    assert line is not None
    assert "zero_stage: 2" in (EXAMPLES / "zero2.yaml").read_text("utf-8").splitlines()[line - 1]


@pytest.mark.parametrize(
    ("source", "said"),
    (
        ({"model": {"multi_stag": {}}}, "did you mean multi_stage"),
        ({"model": {"multi_stage": {"zero_stag": 2}}}, "did you mean zero_stage"),
        ({"model": {"multi_stage": None}}, "expected a mapping"),
        ({"multi_stage": {}, "model": {"multi_stage": {}}}, "keep only the section in model"),
        ({"batch": {"batch_size": 8}}, "removed after Fast-LLM 0.3.0"),
        ({"distributed": {"training_dtype": "bf16"}}, "use model.distributed.compute_dtype"),
        ({"distributed": {"compute_dtype": "float8"}}, "expected one of"),
        ({"run": {"tensor_logs": {"save": True}}}, "run.experiment_dir"),
        (["model.multi_stage.zero_stage"], "expected an override"),
        (["a=1", "b"], "expected an override"),
        (["--hydra", "a=1"], "expected an override"),
        ({1: 2}, "expected a name"),
        (3, "expected a path"),
    ),
)
def test_what_is_wrong_is_said(source: Any, said: str) -> None:
    with pytest.raises(BridgeError, match=said):
        fast_llm().read(source)


def test_problems_name_line_and_spelling() -> None:
    with pytest.raises(ConfigError, match=r"^line 3: multi_stage\.zero_stage: found 7"):
        fast_llm().read("# a run\nmulti_stage:\n  zero_stage: 7\n")


def test_lenient_takes_unknown_fields_with_a_finding() -> None:
    config = fast_llm().read({"multi_stage": {"zero_stage": 2, "new": 1}}, lenient=True)
    assert config.given == {LEVEL: 2}
    assert [finding.path for finding in config.findings] == ["model.multi_stage.new"]


def test_numbers_that_the_loader_takes_for_text_have_a_finding() -> None:
    config = fast_llm().read("optimizer:\n  learning_rate:\n    base: 1e-5\n")
    assert config.given == {"optimizer.learning_rate.base": 1e-5}
    assert any("1.0e-05" in finding.message for finding in config.findings)
    assert "1.0e-05" in config.text()


def test_a_key_written_twice_has_a_finding() -> None:
    config = fast_llm().read("multi_stage:\n  zero_stage: 2\n  zero_stage: 3\n")
    assert config.given == {LEVEL: 3}
    (found,) = (
        finding
        for finding in config.findings
        if "written twice, on lines 2 and 3" in finding.message
    )
    assert (found.path, found.effect, found.given) == (
        "multi_stage.zero_stage",
        Effect.NUMBERS,
        True,
    )


def test_a_section_written_twice_alike_costs_nothing() -> None:
    config = fast_llm().read("multi_stage:\n  zero_stage: 2\nmulti_stage: {zero_stage: 2}\n")
    (found,) = (finding for finding in config.findings if "written twice" in finding.message)
    assert (found.path, found.effect, found.given) == ("multi_stage", Effect.NONE, False)


def test_a_mapping_is_left_as_it_was() -> None:
    source = {"model": {"base_model": {"hidden_size": 8}}, f"{LEVEL}": 2}
    before = repr(source)
    fast_llm().read(source)
    assert repr(source) == before


WHOLE = st.integers(-limits.INTEGER, limits.INTEGER)
SCALARS = (
    st.none()
    | st.booleans()
    | WHOLE
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=12)
)
DATA = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
)


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(DATA)
def test_text_is_what_a_yaml_1_1_loader_reads(value: Any) -> None:
    assert load_yaml(f"a: {flow(value)}\n").data == {"a": value}
    assert load_yaml(text({"model.base_model": {"inner": value}})).data == {
        "model": {"base_model": {"inner": value}}
    }


def has_key(path: str, *versions: str) -> bool:
    """Whether one of the releases has the key."""
    key = KEYS[path]
    return any(RELEASES.within(version, key.since, key.until) for version in versions)


def test_every_field_has_a_doc_line_a_hint_group_and_a_release() -> None:
    for path, field in fields(fast_llm().schema).items():
        assert field.doc.endswith("."), path
        assert field.info.json_schema_extra["hint"] in IMPORTANCE  # type: ignore[index]
        assert has_key(path, *KNOWN)


def test_the_17_fields_of_a_multi_stage_config() -> None:
    hints = {
        path.removeprefix("model.multi_stage."): field.info.json_schema_extra["hint"]  # type: ignore[index]
        for path, field in fields(fast_llm().schema).items()
        if path.startswith("model.multi_stage.") and has_key(path, KNOWN[-1])
    }
    groups = {group: sum(hint == group for hint in hints.values()) for group in set(hints.values())}
    assert groups == {"optional": 2, "performance": 2, "logging": 9, "expert": 3, "wip": 1}


def test_dialect_is_recognised() -> None:
    for name in (
        "zero2.yaml",
        "three_axes.yaml",
        "buffers.yaml",
        "batch_0.3.0.yaml",
        "verbose.yaml",
    ):
        data = load_yaml((EXAMPLES / name).read_text("utf-8")).data
        mine = fast_llm().recognises(data)
        others = [
            compat.load(other).recognises(data) for other in compat.names() if other != "fast_llm"
        ]
        assert mine > max(others, default=0), name
    assert fast_llm().recognises(["model.multi_stage.zero_stage=2"]) > 0


# Translation


def test_debug_fields_reach_the_plan() -> None:
    debug = {
        "debug_layer_outputs": 3,
        "debug_param_init": 1,
        "debug_global_tensors": False,
        "debug_tensor_parallel": True,
    }
    plan = bridge.lift(fast_llm().read({"multi_stage": debug})).debug
    assert (plan.layer_outputs, plan.param_init, plan.global_tensors, plan.tensor_parallel) == (
        3,
        1,
        False,
        True,
    )


def test_level_0_has_no_fast_llm_form() -> None:
    source = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 0}}
    result = compat.translate(source, "deepspeed", "fast_llm")
    found = [finding for finding in result.findings if finding.path == "zero_optimization.stage"]
    assert found and "lowest ZeRO level is 1" in found[0].message
    assert result.config.multi_stage["zero_stage"] == 1  # type: ignore[attr-defined]


def test_sequence_parallel_and_layers_per_stage_do_not_map_by_name() -> None:
    source = {"multi_stage": {"layers_per_stage": 4}, "distributed": {"sequence_data_parallel": 2}}
    result = compat.translate(source, "fast_llm", "megatron", world_size=4)
    assert result.config.given.get("sequence_parallel") in (None, False)
    assert result.config.given["context_parallel_size"] == 2
    assert "num_layers_per_virtual_pipeline_stage" not in result.config.given
    assert any(finding.path == "model.multi_stage.layers_per_stage" for finding in result.findings)


def test_an_open_sequence_length_keeps_the_batch() -> None:
    plan = bridge.Plan.of({"batch.micro": 4, "batch.accumulation": 2})
    assert bridge.lift(bridge.lower(plan, fast_llm())).batch.micro == 4
    assert bridge.lift(bridge.lower(plan, fast_llm(), "0.3.0")).batch.micro == 4


@pytest.mark.parametrize("version", KNOWN)
def test_plans_reach_every_release(version: str) -> None:
    plan = bridge.Plan.of(
        {
            "model.layers": 4,
            "precision.compute": "bf16",
            "zero.stage": 3,
            "batch.micro": 2,
            "batch.accumulation": 4,
        }
    )
    assert {**plan.values()}.items() <= {
        **bridge.lift(bridge.lower(plan, fast_llm(), version)).values()
    }.items()


def test_clipping_that_is_off_stays_off() -> None:
    config = bridge.lower(bridge.Plan.of({"optimizer.clip": 0.0}), fast_llm())
    assert config.given["optimizer.gradient_norm_clipping"] >= 1e30
    assert bridge.lift(config).optimizer.clip == 0


# What is accepted and then goes wrong


@pytest.mark.parametrize(
    ("source", "version", "path"),
    (
        ({"multi_stage": {"layers_per_stage": 1.5}}, None, "model.multi_stage.layers_per_stage"),
        ({"multi_stage": {"pipeline_delay": 0.5}}, None, "model.multi_stage.pipeline_delay"),
        (
            {
                "multi_stage": {"zero_stage": 2},
                "distributed": {"world_size": 1},
                "schedule": {"depth_first_micro_batches": 4},
            },
            "0.4.0",
            "model.multi_stage.num_grad_buffers",
        ),
        (
            {
                "multi_stage": {"full_precision_gradients": False},
                "distributed": {"compute_dtype": "bf16"},
            },
            None,
            "model.multi_stage.full_precision_gradients",
        ),
        (
            {"distributed": {"sequence_tensor_parallel": True}},
            None,
            "model.distributed.sequence_tensor_parallel",
        ),
        (
            {"optimizer": {"learning_rate": {"decay_style": "cosine"}}},
            None,
            "optimizer.learning_rate.decay_iterations",
        ),
        (
            {
                "base_model": {"decoder": {"num_blocks": 2}},
                "multi_stage": {"layers_per_stage": 3},
                "distributed": {"pipeline_parallel": 4},
            },
            None,
            "model.multi_stage.layers_per_stage",
        ),
    ),
)
def test_traps_have_findings(source: dict[str, Any], version: str | None, path: str) -> None:
    assert path in {finding.path for finding in fast_llm().read(source, version).findings}


def test_the_lost_microbatch_was_mended() -> None:
    source = {
        "multi_stage": {"zero_stage": 2},
        "distributed": {"world_size": 1},
        "schedule": {"depth_first_micro_batches": 4},
    }
    assert fast_llm().read(source).findings == ()


@pytest.mark.parametrize(
    ("size", "stages"),
    ((0.1, 10), (1, 10), (1.5, 6), (2, 6), (2.5, 4), (3, 4), (4, 4), (9, 2), (1000, 2), (2000, 1)),
)
def test_stages_of_eight_blocks_with_embedding_and_head(size: float, stages: int) -> None:
    """Counts of the table in the reference."""
    from compat.fast_llm.checks import stages_of

    assert stages_of(8, size) == stages


# The model, held against the classes of its release


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (
            {"hiden_size": 64},
            "model.base_model.hiden_size: unknown field of the model; did you mean hidden_size?",
        ),
        (
            {"decoder": {"block": {"mixer": {"type": "attention", "heds": 4}}}},
            "block.mixer.heds: unknown field",
        ),
        (
            {"decoder": {"block": {"mixer": {"heads": "many"}}}},
            "mixer.heads: found 'many'; expected int",
        ),
        (
            {"decoder": {"block": {"mixer": {"heads": True}}}},
            "mixer.heads: found True; expected int",
        ),
        ({"embeddings": {"vocab_size": -5}}, "embeddings.vocab_size: found -5; expected int > 0"),
        ({"embeddings": 3}, "model.base_model.embeddings: found 3; expected a mapping"),
        (
            {"decoder": {"type": "pattern", "blocks": {"a": {"mlp": {"gatd": True}}}}},
            "blocks.a.mlp.gatd: unknown field",
        ),
        ({"head": {"type": "rms_norm"}}, "head.type: found 'rms_norm'; expected no type"),
        ({"embeddings": {"type": ["a"]}}, "embeddings.type: found ['a']; expected no type"),
        (
            {"decoder": {"block": {"mlp": {"type": {"a": 1}}}}},
            "block.mlp.type: found {'a': 1}; expected one of mlp, moe",
        ),
    ],
)
def test_a_model_that_its_classes_refuse(model: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        fast_llm().read({"model": {"base_model": model}})
    assert said in str(error.value)
    lenient = fast_llm().read({"model": {"base_model": model}}, lenient=True)
    assert any(finding.path.endswith(said.partition(":")[0]) for finding in lenient.findings)


@pytest.mark.parametrize(
    ("version", "model"),
    [
        (
            "0.1.0",
            {
                "transformer": {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4},
                "vocab_size": 100,
            },
        ),
        (
            "0.3.0",
            {
                "decoder": {
                    "num_blocks": 4,
                    "block": {"mixer": {"heads": 4, "head_groups": 2}, "mlp": {"gated": True}},
                }
            },
        ),
        (
            "0.4.0",
            {
                "hidden_size": 64,
                "embeddings": {"vocab_size": 100},
                "tied_embedding_weight": True,
                "head": None,
            },
        ),
    ],
)
def test_a_model_that_its_classes_take(version: str, model: dict[str, Any]) -> None:
    assert (
        fast_llm().read({"model": {"base_model": model}}, version).given["model.base_model"]
        == model
    )


def test_a_type_where_the_release_has_none_is_an_unknown_field() -> None:
    with pytest.raises(ConfigError, match=r"transformer\.type: unknown field"):
        fast_llm().read({"model": {"base_model": {"transformer": {"type": "gpt"}}}}, "0.1.0")
