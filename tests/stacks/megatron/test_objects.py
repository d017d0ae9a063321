"""Megatron's config objects as values: agreement with the real classes, and their rules one by one."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

import compat
from bridge.errors import ConfigError
from compat.megatron import objects, releases
from compat.megatron.arguments import effective, layout
from compat.megatron.objects.fields import defaults
from tests.common.megatron_flags import parse
from tests.harvesting.judges.megatron import launch_words
from tests.harvesting.verdicts import kind

Row = dict[str, Any]
MODEL = {"num_layers": 8, "hidden_size": 256, "num_attention_heads": 8, "micro_batch_size": 1}
ROWS = [
    json.loads(line)
    for line in (Path(__file__).parent / "releases.jsonl").read_text("utf-8").splitlines()
]
"""What a release's own parser and classes made of generated launches, as the harvest recorded it."""
SHAPE = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
LAST = releases.KNOWN[-1]


def args(version: str, world_size: int = 8, **more: Any) -> dict[str, Any]:
    return effective({**MODEL, **more}, version, world_size)


def refused(version: str, **more: Any) -> str:
    with pytest.raises(ConfigError) as error:
        objects.model_parallel(args(version, **more), version)
    return str(error.value)


def fields_refused(version: str, cls: str = "TransformerConfig", **given: Any) -> str:
    with pytest.raises(ConfigError) as error:
        objects.from_fields(given, version, cls)
    return str(error.value)


@pytest.mark.parametrize("version", releases.KNOWN[: releases.KNOWN.index(releases.MAIN)])
def test_agrees_with_the_real_class(version: str, facts: tuple[Row, ...]) -> None:
    rows = [row for row in facts if row["version"] == version and "args" in row]
    assert rows
    differing: Row = {}
    for row in rows:
        values = effective(
            parse(row["flags"], version, lenient=True).given, version, row["world_size"]
        )
        try:
            mine = objects.model_parallel(values, version)
        except ConfigError as error:
            differing.update({} if "config_rejected" in row else {row["recipe"]: str(error)})
            continue
        real = row.get("model_parallel_config", {})
        wrong = {
            name: (mine.get(name), value) for name, value in real.items() if mine.get(name) != value
        }
        if wrong or "config_rejected" in row:
            differing[row["recipe"]] = wrong or row["config_rejected"]
    assert not differing


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["release"])
def test_recorded_launches_hold_what_we_say(row: Row) -> None:
    dialect = compat.load("megatron")
    if not row["accepted"]:
        with pytest.raises(ConfigError):
            dialect.read(row["flags"], row["release"], row["ranks"])
        return
    question, expected = launch_words(dialect.read(row["flags"], row["release"], row["ranks"]))
    assert question == {name: row[name] for name in question}
    assert len(row["holds"]) > 10
    ours = json.loads(json.dumps(expected, default=str))
    assert {path: ours.get(path) for path in row["holds"]} == row["holds"]


def test_verdicts_of_both_kinds_are_recorded() -> None:
    reasons = [row["reason"] for row in ROWS if not row["accepted"]]
    assert len(reasons) > 20 and any(row["accepted"] for row in ROWS)
    assert len({kind(reason) for reason in reasons}) == len(reasons)


class TestModelParallel:
    def test_sizes_that_follow(self) -> None:
        mine = objects.model_parallel(
            args("0.16.1", tensor_model_parallel_size=2, bf16=True), "0.16.1"
        )
        assert mine["expert_tensor_parallel_size"] == 2
        assert (mine["autocast_dtype"], mine["pipeline_dtype"]) == (
            "torch.bfloat16",
            "torch.bfloat16",
        )
        assert mine["batch_p2p_comm"] is not mine["overlap_p2p_comm"]
        assert mine["deallocate_pipeline_outputs"] is True

    @pytest.mark.parametrize("version", releases.KNOWN)
    def test_fields_are_those_of_the_release(self, version: str) -> None:
        assert set(objects.model_parallel(args(version), version)) == set(
            releases.fields(version, "ModelParallelConfig")
        )

    @pytest.mark.parametrize("version", ["0.14.0", "0.15.3"])
    def test_experts_with_tensor_ranks_want_sequence_parallelism(self, version: str) -> None:
        experts: Row = {"num_experts": 4, "expert_model_parallel_size": 2, "add_bias_linear": False}
        assert "sequence_parallel: found false" in refused(
            version, tensor_model_parallel_size=2, **experts
        )

    def test_the_defect_of_0_15_is_named(self) -> None:
        experts: Row = {"num_experts": 4, "expert_model_parallel_size": 2, "add_bias_linear": False}
        sizes: Row = {"tensor_model_parallel_size": 2, **experts}
        assert "defect of this release" in refused("0.15.3", **sizes)
        assert (
            objects.model_parallel(args("0.16.1", **sizes), "0.16.1")["sequence_parallel"] is False
        )

    @pytest.mark.parametrize(("version", "taken"), [("0.15.3", False), ("0.16.1", True)])
    def test_fewer_groups_than_tensor_ranks_since_0_16(self, version: str, taken: bool) -> None:
        grouped: Row = {
            "group_query_attention": True,
            "num_query_groups": 2,
            "tensor_model_parallel_size": 4,
        }
        if taken:
            assert objects.transformer(args(version, **grouped), version)["num_query_groups"] == 2
        else:
            assert "num_query_groups: found 2" in refused(version, **grouped)

    def test_query_groups_count_only_with_their_flag(self) -> None:
        assert objects.transformer(args(LAST, num_query_groups=2), LAST)["num_query_groups"] == 8

    def test_full_recomputation_needs_a_method_and_a_count(self) -> None:
        wrong = refused("0.16.1", recompute_granularity="full")
        assert "recompute_method: missing" in wrong and "recompute_num_layers: missing" in wrong

    def test_residual_in_fp32_widens_the_pipeline_since_0_17(self) -> None:
        wide: Row = {"fp32_residual_connection": True, "bf16": True}
        assert (
            objects.model_parallel(args("0.16.1", **wide), "0.16.1")["pipeline_dtype"]
            == "torch.bfloat16"
        )
        assert (
            objects.model_parallel(args("0.17.0", **wide), "0.17.0")["pipeline_dtype"]
            == "torch.float32"
        )

    def test_latent_attention_is_another_class(self) -> None:
        values = args("0.16.1", multi_latent_attention=True, apply_rope_fusion=False)
        assert objects.transformer(values, "0.16.1")["rope_type"] == "yarn"

    def test_sampling_has_the_seed_of_the_run(self) -> None:
        assert objects.transformer(args("0.15.3", seed=7), "0.15.3")["inference_sampling_seed"] == 7

    def test_initialisation_that_no_release_can_build(self) -> None:
        assert "defect of every release" in refused(LAST, init_method_xavier_uniform=True)


class TestStages:
    def test_uneven_stages(self) -> None:
        ends: Row = {"decoder_first_pipeline_num_layers": 1, "decoder_last_pipeline_num_layers": 3}
        assert "cannot be shared equally by the pipeline ranks that remain" in refused(
            "0.16.1", pipeline_model_parallel_size=4, num_layers=9, **ends
        )
        whole = objects.transformer(
            args("0.16.1", pipeline_model_parallel_size=4, **ends), "0.16.1"
        )
        assert (
            whole["num_layers_in_first_pipeline_stage"],
            whole["num_layers_in_last_pipeline_stage"],
        ) == (1, 3)

    def test_the_defect_of_0_12_is_named(self) -> None:
        assert "ZeroDivisionError" in refused("0.12.0", decoder_first_pipeline_num_layers=2)

    def test_layers_left_over_since_0_16(self) -> None:
        ends: Row = {"decoder_first_pipeline_num_layers": 2, "decoder_last_pipeline_num_layers": 2}
        assert "there is no stage for the layers that remain" in refused(
            "0.16.1", pipeline_model_parallel_size=2, **ends
        )
        assert objects.model_parallel(
            args("0.15.3", pipeline_model_parallel_size=2, **ends), "0.15.3"
        )

    @pytest.mark.parametrize(
        ("text", "problem"),
        [
            ("tE|t*7L", "exactly one embedding"),
            ("Et*4|t*4", "exactly one loss"),
            ("Et|tL", "found 2 decoder layers"),
            ("Et*4|t*4mL", "found 1 prediction layers"),
        ],
    )
    def test_layouts_that_do_not_fit(self, text: str, problem: str) -> None:
        assert problem in refused(
            "0.16.1", pipeline_model_parallel_size=2, pipeline_model_parallel_layout=text
        )

    @pytest.mark.parametrize(
        ("text", "stages"),
        [
            ("Ettt|(tt|)*2,m|L", ("Ettt", "tt", "tt", "m", "L")),
            ("E(t|)*2L", ("Et", "t", "L")),
            ("Et*3|L", ("Ettt", "L")),
            ("|", ("", "")),
        ],
    )
    def test_layout_grammar(self, text: str, stages: tuple[str, ...]) -> None:
        assert layout.stages(text) == stages

    def test_prediction_layers_on_their_own_rank(self) -> None:
        given: Row = {
            "pipeline_model_parallel_size": 4,
            "mtp_num_layers": 1,
            "position_embedding_type": "rope",
        }
        values = args("0.16.1", pipeline_model_parallel_layout="Et*4|t*4|m|L", **given)
        assert objects.model_parallel(values, "0.16.1")["mtp_standalone"] is True


class TestDataParallel:
    def test_renamed_fields(self) -> None:
        mine = objects.ddp(args("0.16.1", bf16=True, ddp_average_in_collective=True), "0.16.1")
        assert (mine["grad_reduce_in_fp32"], mine["average_in_collective"]) == (True, True)

    def test_bucket_size(self) -> None:
        assert objects.ddp(args("0.16.1"), "0.16.1")["bucket_size"] is None
        assert (
            objects.ddp(args("0.16.1", overlap_grad_reduce=True), "0.16.1")["bucket_size"]
            == 40_000_000
        )
        wide = objects.ddp(
            args("0.16.1", 64, overlap_grad_reduce=True, context_parallel_size=2, seq_length=64),
            "0.16.1",
        )
        assert wide["bucket_size"] == 64_000_000

    def test_size_and_count_of_buckets(self) -> None:
        with pytest.raises(ConfigError, match="ddp_num_buckets: found 4"):
            objects.ddp(args("0.16.1", ddp_num_buckets=4, ddp_bucket_size=100), "0.16.1")

    def test_torch_fsdp2_has_its_own_config(self) -> None:
        fsdp: Row = {"use_torch_fsdp2": True, "gradient_accumulation_fusion": False}
        values = args("0.16.1", untie_embeddings_and_output_weights=True, **fsdp)
        assert objects.ddp(values, "0.16.1")["reshard_after_forward"] is True

    @pytest.mark.parametrize(("version", "held"), [("0.19.2", (True, True)), (LAST, (False, True))])
    def test_decoupled_gradients_belong_to_fsdp_on_main(
        self, version: str, held: tuple[bool, bool]
    ) -> None:
        precise: Row = {"use_precision_aware_optimizer": True, "use_distributed_optimizer": True}
        sharded: Row = {"use_megatron_fsdp": True, "ckpt_format": "fsdp_dtensor"}
        made = [objects.ddp(args(version, **precise, **more), version) for more in ({}, sharded)]
        assert tuple(ddp["megatron_fsdp_use_decoupled_grad"] for ddp in made) == held


class TestOptimizer:
    def test_values_come_from_the_arguments(self) -> None:
        mine = objects.optimizer(args("0.16.1", lr=1e-3, adam_beta2=0.95), "0.16.1")
        assert (mine["lr"], mine["adam_beta2"], mine["clip_grad"]) == (1e-3, 0.95, 1.0)

    def test_narrow_gradients_want_a_precision_aware_optimizer(self) -> None:
        with pytest.raises(ConfigError, match="main_grads_dtype"):
            objects.optimizer(args("0.16.1", bf16=True, main_grads_dtype="bf16"), "0.16.1")

    def test_precision_awareness_wants_a_sharded_adam(self) -> None:
        with pytest.raises(ConfigError) as error:
            objects.optimizer(
                args("0.16.1", use_precision_aware_optimizer=True, optimizer="sgd"), "0.16.1"
            )
        assert len(error.value.problems) == 2


class TestFromFields:
    @pytest.mark.parametrize("version", releases.KNOWN)
    @pytest.mark.parametrize("cls", ["ModelParallelConfig", "TransformerConfig"])
    def test_nothing_given_gives_the_defaults(self, version: str, cls: str) -> None:
        built = objects.from_fields({}, version, cls)
        kept = {name for name, value in defaults(version, cls).items() if built[name] == value}
        assert {"tensor_model_parallel_size", "sequence_parallel", "params_dtype"} <= kept
        assert set(built) == set(defaults(version, cls))

    def test_the_class_refuses_what_the_parser_drops(self) -> None:
        assert "sequence_parallel: found" in fields_refused("0.16.1", sequence_parallel=True)

    def test_pipelines_need_a_dtype(self) -> None:
        assert "pipeline_dtype: missing" in fields_refused(
            "0.16.1", "ModelParallelConfig", pipeline_model_parallel_size=2
        )

    @pytest.mark.parametrize(
        ("given", "held"),
        [
            ({}, ([], "none", "none")),
            (
                {"cuda_graph_modules": "attn,moe_router", "num_moe_experts": 2},
                (["attn", "moe_router"], "none", "none"),
            ),
            (
                {
                    "cuda_graph_modules": "moe_router",
                    "cuda_graph_impl": "local",
                    "num_moe_experts": 2,
                    "moe_layer_freq": 1,
                },
                (["moe_router", "moe_preprocess"], "local", "layer"),
            ),
            ({"cuda_graph_modules": "full_iteration"}, ([], "full_iteration", "none")),
            (
                {"cuda_graph_modules": ["full_iteration_inference"], "cuda_graph_impl": "local"},
                ([], "local", "block"),
            ),
            (
                {"cuda_graph_scope": "attn", "cuda_graph_impl": "local"},
                (["attn"], "local", "layer"),
            ),
        ],
    )
    def test_captured_modules_since_0_18(
        self, given: Row, held: tuple[list[str], str, str]
    ) -> None:
        made = objects.from_fields({**SHAPE, **given}, "0.19.2", "TransformerConfig")
        names = ("cuda_graph_modules", "cuda_graph_impl", "inference_cuda_graph_scope")
        assert tuple(made[name] for name in names) == held
        assert made["cuda_graph_scope"] is None

    @pytest.mark.parametrize(
        ("given", "problem"),
        [
            ({"cuda_graph_modules": "0"}, "cuda_graph_modules: found 0; expected names among attn"),
            (
                {"cuda_graph_modules": "full,attn"},
                "cuda_graph_modules: found full beside other modules",
            ),
            (
                {"cuda_graph_modules": "attn", "cuda_graph_scope": "mlp"},
                "cuda_graph_scope: found with cuda_graph_modules attn",
            ),
            (
                {"inference_cuda_graph_scope": "layer"},
                "inference_cuda_graph_scope: found layer, which cuda_graph_impl none",
            ),
            (
                {"use_mup": True, "mup_base_head_dim": -1.0},
                "mup_base_head_dim: found -1.0; expected at least 0",
            ),
            (
                {"use_mup": True, "kv_channels": -1, "mup_attn_scale_power": 0.5},
                "mup_attn_scale_power: found 0.5; kv_channels",
            ),
        ],
    )
    def test_refused_since_0_18(self, given: Row, problem: str) -> None:
        assert problem in fields_refused("0.19.2", **SHAPE, **given)

    def test_problems_are_collected(self) -> None:
        wrong = fields_refused(
            "0.16.1", num_layers=8, fp16=True, bf16=True, expert_model_parallel_size=2
        )
        assert len(wrong.splitlines()) == 2

    def test_unchecked(self) -> None:
        built = objects.from_fields(
            {"fp16": True, "bf16": True}, "0.16.1", "TransformerConfig", check=False
        )
        assert built["autocast_dtype"] == "torch.float32"

    def test_layouts_as_lists(self) -> None:
        stages = [["embedding", "decoder"], ["decoder"], ["decoder"], ["decoder", "loss"]]
        given: Row = {
            "pipeline_model_parallel_layout": stages,
            "pipeline_model_parallel_size": 2,
            "num_layers": 4,
        }
        built = objects.from_fields(
            {**given, "pipeline_dtype": "torch.float32"}, "0.16.1", "TransformerConfig"
        )
        assert built["virtual_pipeline_model_parallel_size"] == 2


FIELDS = {
    "tensor_model_parallel_size": st.sampled_from([1, 2, 4]),
    "pipeline_model_parallel_size": st.sampled_from([1, 2]),
    "pipeline_dtype": st.sampled_from(["torch.float32", "torch.bfloat16"]),
    "context_parallel_size": st.sampled_from([1, 2]),
    "expert_model_parallel_size": st.sampled_from([1, 2]),
    "expert_tensor_parallel_size": st.sampled_from([1, 2]),
    "sequence_parallel": st.booleans(),
    "params_dtype": st.sampled_from(["torch.float32", "torch.bfloat16"]),
    "overlap_p2p_comm": st.booleans(),
    "batch_p2p_comm": st.booleans(),
    "overlap_p2p_comm_warmup_flush": st.booleans(),
    "microbatch_group_size_per_vp_stage": st.sampled_from([1, 2]),
    "defer_embedding_wgrad_compute": st.booleans(),
    "gradient_accumulation_fusion": st.booleans(),
    "wgrad_deferral_limit": st.sampled_from([-1, 0, 2]),
    "cross_entropy_loss_fusion": st.booleans(),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@settings(max_examples=150, deadline=None)
@given(chosen=st.fixed_dictionaries({}, optional=FIELDS))
def test_agrees_with_the_installed_class(chosen: Row) -> None:
    core = pytest.importorskip("megatron.core")
    torch = pytest.importorskip("torch")
    version = core.__version__
    if version not in releases.KNOWN:
        pytest.skip(f"no facts about {version}")
    real = {
        name: getattr(torch, v[6:]) if str(v).startswith("torch.") else v
        for name, v in chosen.items()
    }
    try:
        built = core.ModelParallelConfig(**real)
    except ValueError:
        with pytest.raises(ConfigError):
            objects.from_fields(chosen, version, "ModelParallelConfig")
        return
    mine = objects.from_fields(chosen, version, "ModelParallelConfig")
    theirs = {field.name: getattr(built, field.name) for field in dataclasses.fields(built)}
    plain = {name: str(v) if isinstance(v, torch.dtype) else v for name, v in theirs.items()}
    assert {name: mine[name] for name in plain} == plain


@pytest.mark.parametrize("name", ["TransformerConfig", "ModelParallelConfig"])
def test_an_object_with_a_size_of_zero_is_read_or_refused(name: str) -> None:
    """The classes check few of their sizes, so an object may hold a 0 in any of them."""
    megatron, version = compat.load("megatron"), compat.load("megatron").versions[-1]
    fields = [field for field, value in defaults(version, name).items() if type(value) is int]
    assert "pipeline_model_parallel_size" in fields
    for field in fields:
        made = type(name, (), {})()
        vars(made).update({field: 0})
        try:
            assert isinstance(megatron.read(made, version, 1).findings, tuple)
        except ConfigError as error:
            assert field in str(error)
