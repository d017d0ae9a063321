"""Megatron's own meaning of flags: agreement with its real parser and checks, and the rules one by one."""

from __future__ import annotations

import json
import string
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from bridge.errors import ConfigError
from bridge.stack.checks import Check
from compat.megatron import objects, releases
from compat.megatron.arguments import OPEN, TABLE, effective, smallest_world_size
from compat.megatron.arguments.evaluation import select
from compat.megatron.arguments.namespace import Namespace
from compat.megatron.environment import environment
from compat.megatron.strategies import DESCRIBED, HETEROGENEOUS, TEXT
from tests.common.megatron_flags import parse

Row = dict[str, Any]
MODEL = {
    "num_layers": 8,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "seq_length": 128,
    "max_position_embeddings": 128,
    "micro_batch_size": 2,
}
LAST = releases.KNOWN[-1]
OUT = releases.KNOWN[: releases.KNOWN.index(releases.MAIN)]
"""Releases whose parser was run on the rows."""
EXPERT_GRID = {"expert_tensor_parallel_size": 1, "expert_model_parallel_size": 3}


def args(version: str = "0.16.1", world_size: int = 8, **more: Any) -> dict[str, Any]:
    """Effective arguments of a small model with `more`."""
    return effective({**MODEL, **more}, version, world_size)


def refused(version: str = "0.16.1", world_size: int = 8, **more: Any) -> str:
    """Why a small model with `more` is refused."""
    with pytest.raises(ConfigError) as error:
        effective({**MODEL, **more}, version, world_size)
    return str(error.value)


def outcome(row: Row) -> dict[str, Any] | None:
    try:
        return effective(
            parse(row["flags"], row["version"], lenient=True).given,
            row["version"],
            row["world_size"],
        )
    except ConfigError:
        return None


@pytest.mark.parametrize("version", OUT)
def test_agrees_with_the_real_parser_and_checks(version: str, facts: tuple[Row, ...]) -> None:
    rows = [row for row in facts if row["version"] == version]
    assert rows
    differing: Row = {}
    for row in rows:
        mine = outcome(row)
        if (mine is None) != ("rejected" in row):
            differing[row["recipe"]] = row.get("rejected", "accepted upstream")
        elif mine is not None:
            wrong = {
                name: (mine.get(name), value)
                for name, value in row["args"].items()
                if mine.get(name) != value
            }
            differing.update({row["recipe"]: wrong} if wrong else {})
    assert not differing


def test_both_verdicts_are_there_for_most_releases(facts: tuple[Row, ...]) -> None:
    verdicts = {(row["version"], "rejected" in row or "config_rejected" in row) for row in facts}
    assert {version for version, refused in verdicts if refused} == set(OUT)
    assert {version for version, refused in verdicts if not refused} == set(OUT)


KNOWN_NAMES = (
    {flag.dest for version in releases.KNOWN for flag in releases.flags(version).values()}
    | {name for version in releases.KNOWN for cls in objects.TABLES if cls != "MLATransformerConfig"
       for name in releases.fields(version, cls)}
    | set(releases.fields(LAST, "MLATransformerConfig"))
)  # fmt: skip
DERIVED = {
    "use_dist_ckpt",
    "data_parallel_size",
    "transformer_pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "world_size",
    "params_dtype",
    "cpu_offloading",
    "release",
    "ranks",
    "use_kitchen",
    *("layout_stages", "layout_virtual", "layout_decoders", "layout_predictions"),
}


def test_no_step_reads_a_name_that_no_release_has(
    facts: tuple[Row, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    missed: set[str] = set()
    monkeypatch.setattr(Namespace, "__getattr__", lambda self, name: missed.add(name))
    for row in facts:
        mine = outcome(row)
        if mine is not None:
            for build in (objects.transformer, objects.ddp, objects.optimizer):
                try:
                    build(mine, row["version"])
                except ConfigError:
                    continue
    assert missed, "no step ran"
    assert not missed - KNOWN_NAMES - DERIVED


@pytest.mark.parametrize(
    "table", [TABLE, *objects.TABLES.values()], ids=["arguments", *objects.TABLES]
)
def test_messages_name_only_values_that_exist(table: tuple[Any, ...]) -> None:
    problems = [step.message for step in table if isinstance(step, Check)]
    named = {
        name for problem in problems for _, name, _, _ in string.Formatter().parse(problem) if name
    }
    assert named and not named - KNOWN_NAMES - DERIVED


@pytest.mark.parametrize("version", releases.KNOWN)
def test_every_release_has_steps_in_reach(version: str) -> None:
    bounds = {bound for step in TABLE for bound in (step.since, step.until) if bound}
    assert bounds <= set(releases.KNOWN)
    assert select(TABLE, version)


class TestSizes:
    def test_data_parallel_size_and_default_batch(self) -> None:
        mine = args(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
        assert (mine["data_parallel_size"], mine["global_batch_size"]) == (2, 4)

    def test_world_size_that_sizes_do_not_divide(self) -> None:
        assert "world_size: found 6" in refused(world_size=6, tensor_model_parallel_size=4)

    @pytest.mark.parametrize("size", [0, -2])
    def test_sizes_must_be_positive(self, size: int) -> None:
        assert "tensor_model_parallel_size: found" in refused(tensor_model_parallel_size=size)

    def test_encoder_ranks_count_until_0_13(self) -> None:
        encoder: Row = {"encoder_pipeline_model_parallel_size": 1, "tensor_model_parallel_size": 2}
        mine = args("0.12.0", **encoder)
        assert (mine["encoder_tensor_model_parallel_size"], mine["data_parallel_size"]) == (2, 2)

    def test_weight_shards_count_since_0_19(self) -> None:
        mine = args("0.19.2", tensor_model_parallel_size=2, tensor_parallel_num_weight_shards=4)
        assert (mine["gtp_weight_remat_size"], mine["data_parallel_size"]) == (2, 2)

    def test_layers_must_divide_since_0_10(self) -> None:
        assert args("0.9.0", num_layers=7, pipeline_model_parallel_size=2)["num_layers"] == 7
        assert "num_layers: found 7" in refused(
            "0.10.0", num_layers=7, pipeline_model_parallel_size=2
        )

    @pytest.mark.parametrize(
        ("version", "sizes", "ranks"),
        [
            ("0.16.1", {}, 1),
            ("0.16.1", {"tensor_model_parallel_size": 2, "context_parallel_size": 3}, 6),
            ("0.16.1", {"pipeline_model_parallel_size": 2, "expert_model_parallel_size": 8}, 16),
            ("0.16.1", {"tensor_model_parallel_size": 4, **EXPERT_GRID}, 12),
            ("0.12.0", {"tensor_model_parallel_size": 2, "encoder_pipeline_model_parallel_size": 1}, 4),
            ("0.19.2", {"tensor_model_parallel_size": 2, "tensor_parallel_num_weight_shards": 4}, 4),
        ],
    )  # fmt: skip
    def test_smallest_world_size(self, version: str, sizes: Row, ranks: int) -> None:
        assert smallest_world_size(sizes, version) == ranks

    def test_smallest_world_size_of_no_size(self) -> None:
        with pytest.raises(ConfigError, match="positive number"):
            smallest_world_size({"tensor_model_parallel_size": 0}, LAST)


class TestStages:
    def test_layers_per_virtual_stage(self) -> None:
        mine = args(pipeline_model_parallel_size=2, num_layers_per_virtual_pipeline_stage=2)
        assert (mine["virtual_pipeline_model_parallel_size"], mine["overlap_p2p_comm"]) == (2, True)

    @pytest.mark.parametrize(("version", "virtual"), [("0.13.0", 1), ("0.14.0", None)])
    def test_one_virtual_stage_is_none_since_0_14(self, version: str, virtual: int | None) -> None:
        mine = args(version, pipeline_model_parallel_size=2, num_virtual_stages_per_pipeline_rank=1)
        assert mine["virtual_pipeline_model_parallel_size"] == virtual

    @pytest.mark.parametrize("version", ["0.9.0", "0.12.0", LAST])
    def test_without_interleaving_nothing_overlaps(self, version: str) -> None:
        mine = args(version)
        assert (mine["overlap_p2p_comm"], mine["align_param_gather"]) == (False, False)

    def test_interleaving_without_overlap_wants_more_than_two_ranks(self) -> None:
        stages: Row = {"num_layers_per_virtual_pipeline_stage": 1, "overlap_p2p_comm": False}
        assert "expected more than 2" in refused(pipeline_model_parallel_size=2, **stages)
        assert (
            args(pipeline_model_parallel_size=4, **stages)["virtual_pipeline_model_parallel_size"]
            == 2
        )

    def test_layout_gives_the_virtual_size(self) -> None:
        mine = args(pipeline_model_parallel_size=2, pipeline_model_parallel_layout="Et|tt|tt|tttL")
        assert mine["virtual_pipeline_model_parallel_size"] == 2
        odd = refused(pipeline_model_parallel_size=2, pipeline_model_parallel_layout="Et|(tt|)*3tL")
        assert "expected a number of stages" in odd

    def test_layout_with_unknown_letters(self) -> None:
        assert "found Ez|L; expected E, t, m, L" in refused(pipeline_model_parallel_layout="Ez|L")

    def test_huge_layouts_are_refused_unbuilt(self) -> None:
        assert "at most" in refused(pipeline_model_parallel_layout="E(t|)*999999999L")

    def test_one_way_to_say_it(self) -> None:
        ways: Row = {
            "num_layers_per_virtual_pipeline_stage": 2,
            "num_virtual_stages_per_pipeline_rank": 2,
        }
        assert "keep one" in refused(pipeline_model_parallel_size=2, **ways)

    def test_hybrid_pattern_sets_layers_and_stages(self) -> None:
        mine = args("0.17.1", pipeline_model_parallel_size=2, hybrid_layer_pattern="M*|M*|M*|M*")
        assert (mine["num_layers"], mine["virtual_pipeline_model_parallel_size"]) == (8, 2)


class TestSharding:
    @pytest.mark.parametrize(
        ("strategy", "overlap"),
        [
            ("no_shard", (False, False)),
            ("optim_grads", (False, True)),
            ("optim_grads_params", (True, True)),
        ],
    )
    def test_strategy_forces_overlap_in_0_12_and_0_13(
        self, strategy: str, overlap: tuple[bool, bool]
    ) -> None:
        for version in ("0.12.0", "0.13.0"):
            chosen: Row = {
                "data_parallel_sharding_strategy": strategy,
                "use_distributed_optimizer": True,
            }
            mine = args(version, **chosen)
            assert (mine["overlap_param_gather"], mine["overlap_grad_reduce"]) == overlap
        assert args("0.14.0", **chosen)["overlap_grad_reduce"] is False

    def test_param_gather_needs_a_sharded_optimizer_and_grad_reduce(self) -> None:
        problems = refused(overlap_param_gather=True).splitlines()
        assert len(problems) == 2 and all(
            line.startswith("overlap_param_gather:") for line in problems
        )

    def test_megatron_fsdp_brings_its_optimizer_since_0_18(self) -> None:
        fsdp: Row = {"use_megatron_fsdp": True, "ckpt_format": "fsdp_dtensor"}
        assert args("0.17.1", **fsdp)["use_distributed_optimizer"] is False
        assert args("0.18.0", **fsdp)["use_distributed_optimizer"] is True
        assert args("0.14.0", **fsdp)["use_custom_fsdp"] is True

    def test_megatron_fsdp_wants_its_checkpoint_format(self) -> None:
        assert "expected fsdp_dtensor" in refused(use_megatron_fsdp=True)
        assert "without use_megatron_fsdp" in refused(ckpt_format="fsdp_dtensor")

    def test_torch_fsdp2_says_all_that_is_wrong(self) -> None:
        wrong = refused(use_torch_fsdp2=True, use_distributed_optimizer=True, fp16=True)
        for word in (
            "use_distributed_optimizer",
            "gradient_accumulation_fusion",
            "tied embeddings",
            "fp16",
        ):
            assert word in wrong

    @pytest.mark.parametrize(("version", "kept"), [("0.17.1", "dist_muon"), ("0.18.0", "muon")])
    def test_dist_muon_is_muon_since_0_18(self, version: str, kept: str) -> None:
        assert args(version, optimizer="dist_muon")["optimizer"] == kept


class TestPrecision:
    @pytest.mark.parametrize(
        ("given", "dtype"),
        [
            ({}, "torch.float32"),
            ({"bf16": True}, "torch.bfloat16"),
            ({"fp16": True}, "torch.float16"),
        ],
    )
    def test_params_dtype(self, given: Row, dtype: str) -> None:
        assert args(**given)["params_dtype"] == dtype

    def test_bf16_accumulates_in_fp32_unless_told_otherwise(self) -> None:
        assert args(bf16=True)["accumulate_allreduce_grads_in_fp32"] is True
        assert (
            args(bf16=True, grad_reduce_in_bf16=True)["accumulate_allreduce_grads_in_fp32"] is False
        )
        assert (
            args(bf16=True, main_grads_dtype="bf16")["accumulate_allreduce_grads_in_fp32"] is False
        )

    def test_dynamic_loss_scale_stops_the_nan_check(self) -> None:
        assert args(fp16=True)["check_for_nan_in_loss_and_grad"] is False
        assert args(fp16=True, loss_scale=1024.0)["check_for_nan_in_loss_and_grad"] is True

    def test_fp16_and_bf16(self) -> None:
        assert "keep one" in refused(fp16=True, bf16=True)

    @pytest.mark.parametrize("version", ["0.11.0", LAST])
    def test_optimizer_dtypes_are_names(self, version: str) -> None:
        assert args(version)["main_params_dtype"] == "torch.float32"


class TestRest:
    @pytest.mark.parametrize("version", releases.KNOWN)
    def test_sequence_parallelism_falls_away_without_tensor_ranks(self, version: str) -> None:
        assert args(version, sequence_parallel=True)["sequence_parallel"] is False
        kept = args(version, sequence_parallel=True, tensor_model_parallel_size=2)
        assert kept["sequence_parallel"] is True

    def test_order_of_overlap_and_sequence_parallelism_changed_at_0_10(self) -> None:
        both: Row = {"tp_comm_overlap": True, "sequence_parallel": True}
        assert args("0.9.0", **both)["sequence_parallel"] is False
        assert "tp_comm_overlap" in refused("0.10.0", **both)

    def test_recompute_activations_is_selective(self) -> None:
        mine = args(recompute_activations=True)
        assert mine["recompute_granularity"] == "selective" and "recompute_activations" not in mine

    def test_swiglu_width(self) -> None:
        assert args(swiglu=True)["ffn_hidden_size"] == 640
        assert args()["ffn_hidden_size"] == 1024

    def test_experts_and_fp16_until_0_15(self) -> None:
        experts: Row = {"num_experts": 4, "expert_model_parallel_size": 2, "fp16": True}
        assert "with fp16" in refused("0.15.3", **experts)
        assert args("0.16.0", **experts)["moe_ffn_hidden_size"] == 1024

    def test_context_parallelism_wants_even_sequences(self) -> None:
        assert "2 x context_parallel_size" in refused(context_parallel_size=8, seq_length=120)

    def test_flags_that_ended(self) -> None:
        assert "--micro-batch-size" in refused(batch_size=4)
        assert "Megatron exits" in refused(checkpoint_activations=True)

    def test_rampup_with_iterations_until_0_17(self) -> None:
        rampup: Row = {"train_iters": 10, "rampup_batch_size": ["16", "16", "1000"]}
        assert "rampup_batch_size" in refused("0.17.1", **rampup)
        assert args("0.18.0", **rampup)["train_iters"] == 10

    def test_world_size_from_the_launcher(self) -> None:
        assert args("0.13.0", 16)["inprocess_active_world_size"] == 16


class TestEnvironment:
    def test_tensor_ranks_need_one_connection(self) -> None:
        needed = environment(args("0.16.1", tensor_model_parallel_size=2), "0.16.1")
        assert needed["CUDA_DEVICE_MAX_CONNECTIONS"][0] == "1"
        assert "CUDA_DEVICE_MAX_CONNECTIONS" not in environment(args("0.16.1"), "0.16.1")

    def test_fsdp_needs_more(self) -> None:
        fsdp = args(
            "0.16.1",
            use_megatron_fsdp=True,
            ckpt_format="fsdp_dtensor",
            tensor_model_parallel_size=2,
        )
        assert environment(fsdp, "0.16.1")["CUDA_DEVICE_MAX_CONNECTIONS"][0] == "8"

    @pytest.mark.parametrize("version", ["0.9.0", LAST])
    def test_deterministic_mode(self, version: str) -> None:
        needed = environment(args(version, deterministic_mode=True), version)
        wanted = {"NCCL_ALGO", "NVTE_ALLOW_NONDETERMINISTIC_ALGO", "CUBLAS_WORKSPACE_CONFIG"}
        assert wanted <= set(needed)


SETTINGS = {
    "tensor_model_parallel_size": st.sampled_from([1, 2, 4]),
    "pipeline_model_parallel_size": st.sampled_from([1, 2, 4]),
    "context_parallel_size": st.sampled_from([1, 2]),
    "sequence_parallel": st.booleans(),
    "use_distributed_optimizer": st.booleans(),
    "overlap_grad_reduce": st.booleans(),
    "overlap_param_gather": st.booleans(),
    "bf16": st.booleans(),
    "fp16": st.booleans(),
    "num_experts": st.sampled_from([4, 8]),
    "expert_model_parallel_size": st.sampled_from([1, 2]),
    "num_layers_per_virtual_pipeline_stage": st.sampled_from([1, 2]),
    "recompute_granularity": st.sampled_from(["full", "selective"]),
    "global_batch_size": st.sampled_from([16, 64]),
}


@settings(max_examples=200, deadline=None)
@given(
    version=st.sampled_from(releases.KNOWN),
    missing=st.sets(st.sampled_from(sorted(OPEN - {"world_size"}))),
    chosen=st.fixed_dictionaries({}, optional=SETTINGS),
)
def test_partial_configs_are_refused_for_nothing_that_is_missing(
    version: str, missing: set[str], chosen: Row
) -> None:
    partial = {name: value for name, value in {**MODEL, **chosen}.items() if name not in missing}
    try:
        whole = effective({**MODEL, **chosen}, version, 64)
        objects.model_parallel(whole, version)
    except ConfigError:
        whole = {}
    try:
        part = effective(partial, version, 64)
        objects.model_parallel(part, version)
    except ConfigError:
        assert not whole
        return
    assert all(part[name] is None for name in missing)
    if whole:
        assert part["data_parallel_size"] == whole["data_parallel_size"]
        assert part["params_dtype"] == whole["params_dtype"]


@settings(max_examples=100, deadline=None)
@given(version=st.sampled_from(releases.KNOWN), chosen=st.fixed_dictionaries({}, optional=SETTINGS))
def test_given_values_are_left_alone(version: str, chosen: Row) -> None:
    before = {**MODEL, **chosen}
    copy = dict(before)
    try:
        first = effective(before, version, 64)
    except ConfigError:
        first = {}
    assert before == copy
    if first:
        assert effective(before, version, 64) == first


class TestHeterogeneous:
    def text(self, **more: Any) -> Row:
        return {**DESCRIBED, TEXT: json.dumps({**HETEROGENEOUS, **more})}

    def test_a_text_that_agrees_with_the_arguments_is_accepted(self) -> None:
        assert args(**self.text())["num_layers"] == 840

    @pytest.mark.parametrize(
        "text", ["#", "[]", "{}", json.dumps({**HETEROGENEOUS, "block_configs": []})]
    )
    def test_a_text_has_to_hold_a_model(self, text: str) -> None:
        assert f"{TEXT}: found a text that is no JSON object" in refused(
            **{**DESCRIBED, TEXT: text}
        )

    @pytest.mark.parametrize(
        "more",
        [
            {"hidden_act": "gelu"},
            {"hidden_size": 64},
            {"tie_word_embeddings": True},
            {"block_configs": [{"attention": {"n_heads_in_group": size}} for size in (1, 2)]},
        ],
    )
    def test_a_text_of_another_model_is_refused(self, more: Row) -> None:
        assert f"{TEXT}: found another model than the other arguments" in refused(
            **self.text(**more)
        )
