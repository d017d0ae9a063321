"""Sources to typed values: YAML, mappings, overrides, PipelineConfig; and what AutoModel refuses, fills in or gets wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import bridge
import compat
from bridge.errors import BridgeError, VersionError
from bridge.plan.section import fields
from bridge.stack.dialect import Config
from bridge.stack.rules import Effect
from compat.automodel.pipeline import PipelineConfig
from compat.automodel.releases import DATES, KNOWN
from compat.automodel.schema import AutoModel

READ = compat.load("automodel").read
PIPED: dict[str, Any] = {
    "step_scheduler": {"global_batch_size": 64, "local_batch_size": 8},
    "distributed": {"pp_size": 2, "pipeline": {"pp_schedule": "1f1b", "pp_microbatch_size": 2}},
}


def recipe(**changes: Any) -> dict[str, Any]:
    """A recipe with a pipeline, changed by dotted paths spelled with two underscores."""
    data: dict[str, Any] = {name: {**section} for name, section in PIPED.items()}
    data["distributed"]["pipeline"] = dict(PIPED["distributed"]["pipeline"])
    for path, value in changes.items():
        *parents, leaf = path.split("__")
        place = data
        for parent in parents:
            place = place.setdefault(parent, {})
        place[leaf] = value
    return data


# Sources


def test_overrides_are_a_partial_recipe() -> None:
    config = READ(["--distributed.tp_size", "2", "--optimizer.lr=1e-4"])
    assert config.given == {"distributed.tp_size": 2, "optimizer.lr": 1e-4}


def test_a_section_written_twice_has_a_finding() -> None:
    config = READ("optimizer:\n  lr: 1.0e-4\nseed: 1\noptimizer:\n  lr: 2.0e-4\nseed: 1\n")
    assert config.given["optimizer.lr"] == 2e-4
    found = {
        finding.path: finding for finding in config.findings if "written twice" in finding.message
    }
    assert "on lines 1 and 4" in found["optimizer"].message
    assert (found["optimizer"].effect, found["optimizer"].given) == (Effect.NUMBERS, True)
    assert (found["seed"].effect, found["seed"].given) == (Effect.NONE, False)


def test_a_mapping_of_pipeline_settings_is_a_pipeline_config() -> None:
    config = READ(
        PipelineConfig(pp_schedule="GPipe", layers_per_stage=2, loss_fn=min, dtype="bf16").to_dict()
    )
    assert config.entry == "object"
    assert config.given["distributed.pipeline.pp_schedule"] == "GPipe"
    assert config.opaque == {"distributed.pipeline.loss_fn": min}
    assert (
        config.pipeline.to_dict()
        == PipelineConfig("GPipe", layers_per_stage=2, loss_fn=min, dtype="bf16").to_dict()
    )


def test_to_dict_has_all_settings_with_automodels_defaults() -> None:
    made = PipelineConfig().to_dict()
    own = [
        path.rpartition(".")[2]
        for path in fields(AutoModel)
        if path.startswith("distributed.pipeline.")
    ]
    assert list(made) == own and len(own) == 16
    assert list(PipelineConfig(version="0.6.0").to_dict()) == own[:14]
    assert {name: value for name, value in made.items() if value is not None} == {
        "pp_schedule": "1f1b",
        "pp_microbatch_size": 1,
        "pp_batch_size": 1,
        "patch_inner_model": True,
        "patch_causal_lm_model": True,
        "patch_stage_backward_maybe_with_nosync": False,
        "pp_recv_buffer_pool": False,
        "pp_recv_buffer_pool_slack": 2,
        "scale_grads_in_schedule": False,
    }


def test_texts_are_read_as_automodels_loader_reads_them() -> None:
    config = READ(
        "distributed:\n  dp_size: none\n  tp_size: '2'\noptimizer:\n  lr: 1e-5\n  eps: '1e-8'\n"
    )
    assert config.given == {"distributed.tp_size": 2, "optimizer.lr": 1e-5, "optimizer.eps": 1e-8}


def test_free_sections_are_kept_as_they_are() -> None:
    text = "my_section: [1, {a: 2}]\nmodel:\n  config: some/model\n  extra: {b: '${HOME}'}\n"
    config = READ(text)
    assert config.given == {
        "*": {"my_section": [1, {"a": 2}]},
        "model.*": {"config": "some/model", "extra": {"b": "${HOME}"}},
    }
    assert READ(config.text()).given == config.given


def test_a_switched_off_signal_stays_off() -> None:
    config = READ("step_scheduler: {preemption_signal: null, max_steps: 3}\n")
    assert "preemption_signal: null" in config.text()
    assert READ(config.text()).given == config.given


@pytest.mark.parametrize(
    "text, expected",
    [
        (
            "distributed: {tp_sise: 2}",
            "line 1: distributed.tp_sise: unknown key; did you mean tp_size?",
        ),
        ("distributed: {pipeline: {pp_schedul: 1f1b}}", "did you mean pp_schedule?"),
        (
            "step_scheduler: {global_batch_size: many}",
            "found 'many', expected a whole number above 0",
        ),
        ("distributed: {pp_size: 2, pipeline: {pp_schedule: null}}", "the name of a schedule"),
        ("distributed: 3", "expected a mapping"),
        ("model: {torch_dtype: bf61}", "expected a number format"),
        ("distributed: {strategy: fsdp3}", "expected one of fsdp2"),
        (
            "a: 1\ndistributed: {pipeline: {pp_schedule: 1f1b}}\nautopipeline: {pp_schedule: 1f1b}",
            "keep one",
        ),
    ],
)
def test_reading_is_strict(text: str, expected: str) -> None:
    with pytest.raises(BridgeError) as error:
        READ(text + "\n")
    assert expected in str(error.value)


def test_lenient_reading_leaves_unknown_settings_out() -> None:
    config = READ("distributed: {tp_sise: 2, cp_size: 2}\n", lenient=True)
    assert config.given == {"distributed.cp_size": 2}
    assert [finding.path for finding in config.findings] == ["distributed.tp_sise"]


# Layouts and releases


OLD = """
distributed:
  _target_: nemo_automodel.components.distributed.fsdp2.FSDP2Manager
  pp_size: 2
autopipeline:
  _target_: nemo_automodel.components.distributed.pipelining.AutoPipeline
  pp_schedule: 1f1b
  pp_microbatch_size: 2
"""


@pytest.mark.parametrize("version", KNOWN)
def test_the_older_layout_means_the_same_in_every_release(version: str) -> None:
    config = READ(OLD, version)
    assert config.given["distributed.pipeline.pp_microbatch_size"] == 2
    assert config.text().count("autopipeline:") == 1
    assert READ(config.text(), version).given == config.given


def test_a_translation_to_an_older_release_takes_its_layout() -> None:
    plan = bridge.lift(READ(recipe(), world_size=4))
    old = bridge.lower(plan, compat.load("automodel"), "0.2.0", 4)
    assert "autopipeline:\n  pp_schedule" in old.text() or "autopipeline:\n  _target_" in old.text()
    assert "strategy" not in old.text()
    new = bridge.lower(plan, compat.load("automodel"), None, 4)
    assert "  pipeline:\n" in new.text() and "autopipeline" not in new.text()


def test_settings_of_other_releases_say_so() -> None:
    with pytest.raises(BridgeError, match=r"new in AutoModel 0\.5\.0"):
        READ({"distributed": {"reshard_after_forward": True}}, "0.4.0")
    with pytest.raises(BridgeError, match=r"use dist_env\.backend"):
        READ({"distributed": {"backend": "gloo"}}, "0.5.0")


def test_releases_are_in_order() -> None:
    assert list(DATES) == list(KNOWN)
    assert sorted(DATES.values()) == list(DATES.values())
    with pytest.raises(VersionError, match="unknown release"):
        READ({}, "9.9.9")


@pytest.mark.parametrize("version, expected", [("0.4.0", "bf16"), ("0.5.0", "fp32")])
def test_the_format_of_reduction_moved(version: str, expected: str) -> None:
    assert bridge.lift(READ(recipe(), version)).precision.reduce == expected


# What is refused


@pytest.mark.parametrize(
    "changes, world, expected",
    [
        ({"distributed__pp_size": 8}, None, "expected at least pp_size (8)"),
        (
            {"distributed__pipeline__pp_microbatch_size": 3},
            None,
            "expected a multiple of pp_microbatch_size (3)",
        ),
        ({"distributed__tp_size": 4}, 12, "does not divide world size (12)"),
        ({"distributed__dp_size": 4}, 4, "is not the world size (4)"),
        (
            {"distributed__dp_size": 4, "distributed__dp_replicate_size": 4},
            None,
            "(4) that is smaller than dp_size",
        ),
        ({"distributed__ep_size": 3}, 8, "distributed.ep_size: found 3"),
        ({"distributed__strategy": "ddp"}, None, "strategy ddp has no such axis"),
        ({"distributed__strategy": "mfsdp"}, None, "strategy megatron_fsdp has no such axis"),
        ({"distributed__nccl_ub": True}, None, "nccl_ub belongs to strategy megatron_fsdp"),
        (
            {"distributed__pipeline__pp_schedule": "interleaved_1f1b"},
            None,
            "torch's name is Interleaved1F1B",
        ),
        (
            {"distributed__pipeline__pp_schedule": "PipelineScheduleMulti"},
            None,
            "only runs a CSV file",
        ),
        ({"distributed__pipeline": None}, None, "without a pipeline section"),
        (
            {"step_scheduler__global_batch_size": 12},
            4,
            "expected a multiple of local_batch_size (8)",
        ),
        (
            {"model__config__num_hidden_layers": 7, "distributed__pipeline__layers_per_stage": 3},
            None,
            "no multiple of pp_size",
        ),
        (
            {"distributed__pipeline__module_fqns_per_model_part": [["model.layers.0"]]},
            None,
            "found 1 parts",
        ),
        (
            {"distributed__pipeline__module_fqns_per_model_part": [["layers.0"], ["layers.2"]]},
            None,
            "all decoder layers in order",
        ),
        (
            {"lr_scheduler__lr_warmup_steps": 9, "lr_scheduler__lr_decay_steps": 9},
            None,
            "expected fewer than the steps",
        ),
        ({"clip_grad_norm__max_norm": 0}, None, "scales every gradient to 0"),
        ({"model__config__tie_word_embeddings": True}, None, "cannot tie embeddings"),
    ],
)
def test_what_automodel_stops_at_is_refused(
    changes: dict[str, Any], world: int | None, expected: str
) -> None:
    with pytest.raises(BridgeError) as error:
        READ(recipe(**changes), world_size=world)
    assert expected in str(error.value)


def test_all_problems_come_at_once() -> None:
    with pytest.raises(BridgeError) as error:
        READ(
            recipe(
                distributed__nccl_ub=True,
                distributed__pipeline__pp_schedule="dfs",
                step_scheduler__local_batch_size=7,
            )
        )
    assert len(error.value.problems) == 3


def test_rounds_must_be_whole() -> None:
    """torch's looped schedules: 5 microbatches over 2 ranks make 2 rounds, which they do not fill."""
    looped = recipe(
        distributed__pipeline__pp_schedule="Interleaved1F1B",
        distributed__pipeline__pp_microbatch_size=1,
    )
    looped["step_scheduler"] = {"local_batch_size": 5}
    with pytest.raises(BridgeError, match="do not fill the 2 rounds"):
        READ(looped)
    looped["step_scheduler"]["local_batch_size"] = 6
    assert READ(looped).effective["distributed.pipeline.pp_batch_size"] == 6


# What is filled in and overwritten


def effective(**changes: Any) -> Any:
    return READ(recipe(**changes), world_size=8).effective


def test_recipes_overwrite_the_pipeline_config() -> None:
    values = effective(
        distributed__pipeline__pp_batch_size=99,
        distributed__pipeline__patch_stage_backward_maybe_with_nosync=False,
        model__backend__enable_fsdp_optimizations=True,
        packed_sequence__packed_sequence_size=4096,
    ).distributed.pipeline
    assert values.pp_batch_size == 8
    assert values.patch_stage_backward_maybe_with_nosync is True
    assert values.pp_seq_len == 4096
    assert values.dtype == "bf16"


def test_sizes_that_are_left_out_are_what_the_ranks_leave() -> None:
    assert effective(distributed__tp_size=2)["distributed.dp_size"] == 2


def test_layers_per_stage_is_a_wish_of_virtual_stages() -> None:
    looped = {
        "distributed__pipeline__pp_schedule": "LoopedBFS",
        "distributed__pipeline__layers_per_stage": 2,
    }
    plan = bridge.lift(READ(recipe(**looped, model__config__num_hidden_layers=12)))
    assert (plan.schedule.virtual, plan.stages.rule, plan.stages.layers_per_stage) == (
        3,
        "even",
        None,
    )


def test_packed_tokens_over_context_ranks_are_their_own_batch() -> None:
    packed = recipe(
        distributed__cp_size=2, model__backend__attn="te", packed_sequence__packing_strategy="thd"
    )
    config = READ(packed)
    assert config.effective["distributed.pipeline.pp_microbatch_size"] == 1
    assert config.effective["distributed.pipeline.pp_batch_size"] == 4
    assert bridge.lift(config).batch.micro == 2


@pytest.mark.parametrize(
    "strategy, more, stage",
    [
        ("fsdp2", {}, 3),
        ("fsdp2", {"reshard_after_forward": False}, 2),
        ("ddp", {}, 0),
        ("megatron_fsdp", {"zero_dp_strategy": 1}, 1),
        ("mfsdp", {}, 3),
    ],
)
def test_strategies_are_levels(strategy: str, more: dict[str, Any], stage: int) -> None:
    assert bridge.lift(READ({"distributed": {"strategy": strategy, **more}})).zero.stage == stage


def test_a_pipeline_keeps_weights_gathered() -> None:
    assert bridge.lift(READ(recipe())).zero.stage == 2


# What is accepted and wrong


def found(config: Config) -> dict[str, Effect]:
    return {finding.path: finding.effect for finding in config.findings}


def test_traps_are_found() -> None:
    split = recipe(
        distributed__pipeline__pp_schedule="InterleavedZeroBubble",
        distributed__pipeline__scale_grads_in_schedule=True,
        distributed__pipeline__pp_batch_size=4,
        distributed__pipeline__dtype="fp32",
        distributed__reshard_after_forward=True,
    )
    assert found(READ(split)) == {
        "distributed.pipeline.scale_grads_in_schedule": Effect.NUMBERS,
        "distributed.pipeline.pp_batch_size": Effect.COST,
        "distributed.pipeline.dtype": Effect.NUMBERS,
        "distributed.reshard_after_forward": Effect.NUMBERS,
    }


def test_the_split_backward_trap_is_never_written() -> None:
    split = recipe(
        distributed__pipeline__pp_schedule="InterleavedZeroBubble",
        distributed__reshard_after_forward=True,
    )
    written = bridge.lower(bridge.lift(READ(split)), compat.load("automodel"))
    assert written.given["distributed.reshard_after_forward"] is False


def test_a_pipeline_without_ranks_is_ignored_aloud() -> None:
    assert found(READ(recipe(distributed__pp_size=1))) == {"distributed.pipeline": Effect.NONE}


def test_a_clean_recipe_has_no_findings() -> None:
    assert READ(recipe()).findings == ()


# A schedule in a file


CSV = "0F0,0F1,0F2,0F3,,0B0,0B1,0B2,0B3\n,1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3\n"


def test_a_schedule_file_beside_the_recipe_is_checked(tmp_path: Path) -> None:
    text = "step_scheduler: {local_batch_size: 8, global_batch_size: 8}\n"
    text += "distributed:\n  pp_size: 2\n  pipeline:\n    pp_schedule: 1f1b\n"
    text += "    pp_microbatch_size: 2\n    pp_schedule_csv: own.csv\n"
    (tmp_path / "recipe.yaml").write_text(text, encoding="utf-8")
    (finding,) = READ(tmp_path / "recipe.yaml").findings
    assert "was not found" in finding.message
    (tmp_path / "own.csv").write_text(CSV, encoding="utf-8")
    config = READ(tmp_path / "recipe.yaml")
    assert config.findings == ()
    assert (bridge.lift(config).schedule.name, bridge.lift(config).schedule.csv) == (
        "csv",
        "own.csv",
    )
    (tmp_path / "own.csv").write_text(CSV.replace(",0F3", "").replace(",0B3", ""), encoding="utf-8")
    with pytest.raises(BridgeError, match="needs one F"):
        READ(tmp_path / "recipe.yaml")
    (tmp_path / "own.csv").write_text(CSV.replace("3", "9"), encoding="utf-8")
    with pytest.raises(BridgeError, match="needs one F"):
        READ(tmp_path / "recipe.yaml")


def test_a_schedule_file_must_fit_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "own.csv").write_text(CSV, encoding="utf-8")
    with pytest.raises(BridgeError, match="has 4 micro batches, expected 8 by"):
        READ(
            recipe(
                step_scheduler__local_batch_size=16,
                distributed__pipeline__pp_schedule_csv=str(tmp_path / "own.csv"),
            )
        )
    with pytest.raises(BridgeError, match="has 2 rows, expected one for each of 4 pipeline ranks"):
        READ(
            recipe(
                distributed__pp_size=4,
                distributed__pipeline__pp_schedule_csv=str(tmp_path / "own.csv"),
            )
        )


# Recognition, objects, and the shape of the schema


def test_recipes_and_pipeline_configs_are_recognised() -> None:
    dialect = compat.load("automodel")
    assert dialect.recognises(recipe()) > dialect.recognises({"step_scheduler": {}}) > 0
    assert dialect.recognises(PipelineConfig().to_dict()) > 0
    for other in (
        {"train_batch_size": 8, "zero_optimization": {"stage": 2}},
        ["--num-layers", "2"],
        {"model": {"multi_stage": {}}},
        3,
    ):
        assert dialect.recognises(other) == 0


def test_an_object_needs_the_installed_release() -> None:
    with pytest.raises(VersionError, match="automodel"):
        READ(recipe(), "0.3.0").to_object()


def test_every_setting_says_what_it_is() -> None:
    assert all(field.doc.endswith(".") for field in fields(AutoModel).values())


def test_the_file_formats() -> None:
    dialect = compat.load("automodel")
    assert dialect.format_of("recipe.yml") == "yaml"
    with pytest.raises(VersionError, match="cannot write json"):
        dialect.render(READ(recipe()), "json")


@pytest.mark.parametrize(
    "text",
    [
        "yes",
        "1e-5",
        "null",
        "a: b",
        "- x",
        "#1",
        "",
        "0x10",
        "2026-01-01",
        "a\nb",
        "é",
        "\x85",
        "'",
        '"',
        "~",
        "{",
        "*a",
    ],
)
def test_texts_survive_yaml(text: str) -> None:
    config = READ({"notes": {text or "empty": [text, {"k": text}]}})
    assert READ(config.text()).given == config.given


def test_pyyaml_reads_what_is_written() -> None:
    yaml = pytest.importorskip("yaml")
    config = READ(
        {"optimizer": {"lr": 1e-5, "eps": 1e22}, "notes": {"a": ["1e-5", "on", None, True]}}
    )
    assert yaml.safe_load(config.text()) == {
        "optimizer": {"lr": 1e-5, "eps": 1e22},
        "notes": {"a": ["1e-5", "on", None, True]},
    }


# Names that go to a class, and names that nothing reads

TYPED = {"_target_": "torch.optim.AdamW", "lr": 1e-4}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"optimizer": {**TYPED, "LR": 1e-3}},
            "optimizer.LR: torch.optim.AdamW does not have this argument, and refuses it; did you mean lr?",
        ),
        (
            {"optimizer": {**TYPED, "_target_": "torch.optim.SGD", "eps": 1e-8}},
            "optimizer.eps: torch.optim.SGD does not have this argument",
        ),
        (
            {
                "model": {
                    "backend": {
                        "_target_": "nemo_automodel.components.models.common.BackendConfig",
                        "atn": "te",
                    }
                }
            },
            "did you mean attn?",
        ),
    ],
)
def test_what_a_class_does_not_take_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(BridgeError) as error:
        READ(recipe(**changes))
    assert said in str(error.value)


@pytest.mark.parametrize(
    "path",
    ["sede", "eps", "optimizr", "model__torch_dtpye", "packed_sequence__packed_seqence_size"],
)
def test_what_nothing_reads_is_named(path: str) -> None:
    named = path.replace("__", ".")
    found = [finding for finding in READ(recipe(**{path: 1})).findings if finding.path == named]
    assert [finding.effect for finding in found] == [
        Effect.NUMBERS
    ] and "no known code reads it" in found[0].message


DATA = "nemo_automodel.components.datasets.llm.mock.build_unpacked_dataset"
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "low_freq_factor": 1.0,
}


def test_what_the_called_code_takes_is_read() -> None:
    """The parameters of AutoModel's functions, and the keys of transformers' classes and of its rotary positions."""
    config = {"_target_": "transformers.LlamaConfig", "pretraining_tp": 1, "rope_scaling": LLAMA3}
    data = {"_target_": DATA, "num_sentences": 64, "num_sentence": 64}
    found = [
        one.path
        for one in READ(recipe(model__config=config, dataset=data)).findings
        if "no known code" in one.message
    ]
    assert found == ["dataset.num_sentence"]


def test_a_class_of_somebody_else_takes_what_it_takes() -> None:
    found = READ(recipe(dataset={"_target_": "my_code.Data", "anything": 1})).findings
    assert not [finding for finding in found if finding.path.startswith("dataset")]


# Switches that other stacks have too

SWITCHED: tuple[tuple[dict[str, Any], tuple[str, str]], ...] = (
    (
        {"model__backend__te_fp8": {"recipe": "current"}},
        ("--fp8-format hybrid", "--fp8-recipe tensorwise"),
    ),
    ({"model__backend__te_fp8": {}}, ("--fp8-format hybrid", "--fp8-recipe tensorwise")),
    ({"model__backend__te_fp8": {"recipe": "mxfp8"}}, ("--fp8-format e4m3", "--fp8-recipe mxfp8")),
    (
        {"optimizer__exp_avg_dtype": "bf16"},
        ("--exp-avg-dtype bf16", "--use-precision-aware-optimizer"),
    ),
    ({"distributed__nccl_ub": True}, ("--use-megatron-fsdp", "--use-nccl-ub")),
    (
        {"distributed__init_fsdp_with_meta_device": True},
        ("--use-megatron-fsdp", "--init-model-with-meta-device"),
    ),
    (
        {"lr_scheduler__override_opt_param_scheduler": True},
        ("--lr-decay-style linear", "--override-opt_param-scheduler"),
    ),
    (
        {"optimizer__param_group_overrides": [{"pattern": "embed_tokens|lm_head", "lr_mult": 0.5}]},
        ("--decoupled-lr 0.0005", "--lr 0.001"),
    ),
)


@pytest.mark.parametrize("changes, flags", SWITCHED)
def test_switches_reach_megatron(changes: dict[str, Any], flags: tuple[str, str]) -> None:
    kind = (
        "megatron_fsdp"
        if any("__nccl" in name or "__init" in name for name in changes)
        else "fsdp2"
    )
    schedule = {
        "lr_decay_style": "linear",
        "lr_warmup_steps": 0,
        "lr_decay_steps": 9,
        "use_checkpoint_opt_param_scheduler": False,
    }
    data = {
        "step_scheduler": {"global_batch_size": 8, "local_batch_size": 1},
        "distributed": {"strategy": kind},
        "optimizer": {
            "_target_": "transformer_engine.pytorch.optimizers.fused_adam.FusedAdam",
            "lr": 1e-3,
        },
        "lr_scheduler": schedule,
    }
    for name, value in changes.items():
        *parents, leaf = name.split("__")
        place: dict[str, Any] = data
        for parent in parents:
            place = place.setdefault(parent, {})
        place[leaf] = value
    text = bridge.translate(READ(data, world_size=8), compat.load("megatron")).written.text
    assert set(flags) <= set(text.splitlines())


def test_products_of_torchao_are_near_but_not_the_same() -> None:
    """torchao takes the output layer too (components/quantization/fp8.py: convert_to_float8_training)."""
    result = bridge.translate(READ({"fp8": {"enabled": True}}), compat.load("megatron"))
    assert ("fp8.enabled", Effect.NUMBERS) in {
        (finding.path, finding.effect) for finding in result.findings
    }
    assert "--fp8-recipe tensorwise" in result.written.text


def test_autocast_of_ddp_and_mixed_precision_are_one() -> None:
    recipe = {
        "distributed": {"strategy": "ddp", "autocast_dtype": "bfloat16"},
        "model": {"torch_dtype": "fp32"},
    }
    there = bridge.translate(READ(recipe), compat.load("deepspeed"))
    assert (
        there.config.given["torch_autocast.dtype"] == "bf16"
        and not there.config.given["bf16.enabled"]
    )
    megatron = compat.load("megatron").read(
        "--bf16 --num-layers 2 --hidden-size 8 --num-attention-heads 2", lenient=True
    )
    back = bridge.translate(megatron, compat.load("automodel"))
    assert back.config.given["distributed.autocast_dtype"] == "bf16"
    assert not [finding for finding in back.findings if finding.path == "bf16"]


def test_adapters_go_to_the_other_stack_that_has_them() -> None:
    model = {"config": {"_target_": "transformers.LlamaConfig", "num_hidden_layers": 2}}
    adapters = {
        "target_modules": "*_proj",
        "dim": 16,
        "alpha": 32,
        "dropout": 0.1,
        "dropout_position": "pre",
    }
    there = bridge.translate(READ({"model": model, "peft": adapters}), compat.load("fast_llm"))
    assert all(
        line in there.written.text
        for line in ("type: lora", "rank: 16", "alpha: 32", "dropout: 0.1")
    )
    assert not {
        finding.path
        for finding in there.findings
        if finding.path.startswith("peft") and finding.matters
    }
    # Fast-LLM adapts values without keys, keys only with values, and never the output layer.
    for targets, arrives in (
        ("*.q_proj", True),
        ("*.v_proj", True),
        ("*.k_proj", False),
        ("lm_head", False),
    ):
        recipe = READ({"model": model, "peft": {"target_modules": ["*.o_proj", targets]}})
        some = bridge.translate(recipe, compat.load("fast_llm"))
        assert (
            "peft.target_modules"
            not in {finding.path for finding in some.findings if finding.matters}
        ) is arrives


def test_a_key_of_the_models_config_beside_it_is_named() -> None:
    """NeMoAutoModel takes it as an override; no recipe that says it there is translated in silence."""
    model = {
        "_target_": "nemo_automodel.NeMoAutoModelForCausalLM.from_config",
        "router_aux_loss_coef": 0.1,
    }
    config = READ({"model": model})
    found = config.dialect.inspect(config)
    assert any(
        "model.config.router_aux_loss_coef" in row.message and row.effect is Effect.NUMBERS
        for row in found
    )


def test_a_class_of_transformers_that_refuses_its_keys_stops_the_run() -> None:
    falcon = {
        "_target_": "transformers.FalconConfig",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
    }
    recipe = {"recipe": "TrainFinetuneRecipeForNextTokenPrediction", "model": {"config": falcon}}
    assert not [one for one in READ(recipe).findings if one.effect is Effect.STOPS]
    refused = READ({**recipe, "model": {"config": {**falcon, "head_dim": 16}}})
    assert [one.path for one in refused.findings if one.effect is Effect.STOPS] == [
        "model.config.head_dim"
    ]
    source = compat.load("huggingface").read(
        {"model_type": "falcon", "hidden_size": 64, "num_attention_heads": 4}
    )
    given = bridge.translate(source, compat.load("automodel")).config.given
    assert (
        given["model.config._target_"] == "transformers.FalconConfig"
        and "model.config.head_dim" not in given
    )
