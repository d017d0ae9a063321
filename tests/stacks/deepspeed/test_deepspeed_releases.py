"""History: what each release knows, fills in and refuses, against inputs that the releases themselves judged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bridge.errors import BridgeError, VersionError
from bridge.plan.section import fields
from bridge.stack.dialect import Dialect
from compat.deepspeed import releases
from compat.deepspeed.releases import ALIASES, KEYS, KNOWN, PARTS, RELEASES, release
from compat.deepspeed.schema import DeepSpeed

ROWS = [
    json.loads(line) for line in (Path(__file__).parent / "releases.jsonl").read_text().splitlines()
]
"""Generated configs through the DeepSpeedConfig of twelve releases (CPU): its verdict, and part of what it then held."""


@pytest.mark.parametrize("version", sorted({row["release"] for row in ROWS}))
def test_verdicts_and_values_of_the_releases(deepspeed: Dialect, version: str) -> None:
    rows = [row for row in ROWS if row["release"] == version]
    assert {row["accepted"] for row in rows} == {True, False}
    for row in rows:
        config = _read(deepspeed, row)
        assert (config is not None) is row["accepted"], row
        if config is not None:
            held = {
                path: config.effective[path] for path in row["holds"] if path in config.effective
            }
            assert _plain(held) == {path: row["holds"][path] for path in held}, row


def _read(dialect: Dialect, row: dict[str, Any]) -> Any:
    try:
        # Harvested rows name what the script says as well, and all ranks beside those that share a batch.
        code = {"code": row["code"]} if row.get("code") else {}
        return dialect.read(
            {**row["config"], **code},
            version=row["release"],
            world_size=row.get("world", row["ranks"]),
        )
    except BridgeError:
        return None


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {
        path: list(value) if isinstance(value, tuple) else value for path, value in values.items()
    }


MOVED = [
    ("steps_per_print", "0.15.1", 10, "0.15.2", None),
    ("bf16.immediate_grad_update", "0.16.4", False, "0.16.5", True),
    ("bf16.immediate_grad_update", "0.17.0", True, "0.17.1", False),
    ("gradient_clipping", "0.19.2", 0.0, "0.19.3", 1.0),
    ("bf16.check_grad_overflow", "0.19.2", False, "0.19.3", True),
    ("zero_optimization.offload_param.pin_memory", "0.19.4", False, "0.19.5", True),
    ("zero_optimization.offload_optimizer.pin_memory", "0.19.4", False, "0.19.5", True),
]


@pytest.mark.parametrize(("path", "before", "old", "after", "new"), MOVED)
def test_defaults_that_moved(path: str, before: str, old: Any, after: str, new: Any) -> None:
    assert (KEYS[path].at(before), KEYS[path].at(after)) == (old, new)
    assert KNOWN.index(after) == KNOWN.index(before) + 1


def test_moved_defaults_are_all_listed() -> None:
    changed = {
        path
        for path, row in KEYS.items()
        if len({repr(period.default) for period in row.periods}) > 1
    }
    assert changed == {row[0] for row in MOVED}


SINCE = {
    "zero_optimization.stage3_module_granularity_threshold": "0.16.0",
    "tensor_parallel.autotp_size": "0.16.4",
    "aio.intra_op_parallelism": "0.16.4",
    "seq_parallel_communication_data_type": "0.16.5",
    "compile.deepcompile": "0.16.6",
    "checkpoint.writer.type": "0.17.1",
    "torch_autocast.enabled": "0.17.2",
    "zero_optimization.zenflow.topk_ratio": "0.17.5",
    "zero_optimization.offload_optimizer.super_offload": "0.18.0",
    "datastates_ckpt": "0.18.1",
    "bf16.bf16_master_weights_and_grads": "0.18.3",
    "tensor_parallel.preset_model": "0.18.6",
    "expert_parallel.enabled": "0.19.2",
    "expert_parallel.expert_tensor_parallel_size": "0.19.3",
    "managed_gradient_accumulation": "0.19.4",
    "gradient_allreduce_op": "0.19.6",
    "zero_optimization.compute_grad_norm": "0.19.7",
    "disable_python_gc": "0.19.8",
}


def test_first_releases() -> None:
    for path, version in SINCE.items():
        position = KNOWN.index(version)
        assert path in releases.release(version).keys, path
        assert path not in releases.release(KNOWN[position - 1]).keys, path


REMOVED = {
    "0.19.7": ("nebula", "compression_training", "quantize_training", "sparse_attention", "zero_optimization.mics_shard_size"),
    "0.19.8": ("amp", "sparse_gradients", "eigenvalue", "elasticity", "graph_harvesting", "curriculum_learning",
               "progressive_layer_drop", "zero_optimization.zeropp_loco_param"),
}  # fmt: skip


def test_removed_keys_are_rejected_by_name() -> None:
    for version, paths in REMOVED.items():
        before = release(KNOWN[KNOWN.index(version) - 1])
        for path in paths:
            assert path in release(version).keys_to_refuse
            assert path not in release(version).keys
            assert path in before.keys


def test_bounds_that_moved() -> None:
    assert release("0.19.5").bounds == {}
    assert release("0.19.6").bounds["zero_optimization.reduce_bucket_size"] == (">0",)
    assert release("0.19.6").bounds["zero_optimization.zenflow.topk_ratio"] == (">0", "<1")
    assert "hybrid_engine.max_out_tokens" in release("0.19.7").bounds


def test_unknown_keys_in_fp16_are_refused_since_0_17_1() -> None:
    assert not release("0.17.0").refuses("fp16")
    assert release("0.17.1").refuses("fp16")
    assert not release("0.19.8").refuses("activation_checkpointing")
    assert not release("0.19.8").refuses("")


def test_history_covers_the_schema() -> None:
    paths = {path for path in fields(DeepSpeed) if not path.startswith("code.")}
    assert set(KEYS) == paths
    sections = {path.rpartition(".")[0] for path in paths}
    assert {part.section for part in PARTS.values()} <= sections
    for alias, path in ALIASES.items():
        assert alias not in paths
        assert path in paths | sections


def test_known_releases() -> None:
    assert (len(KNOWN), KNOWN[0], KNOWN[-1]) == (41, "0.15.0", "0.19.8")
    assert releases.key("train_batch_size") is KEYS["train_batch_size"]
    assert releases.key("nothing") is None
    assert releases.defaults("0.19.8")["zero_optimization.stage"] == 0
    with pytest.raises(
        VersionError, match=r"unknown release 0\.14\.0; the nearest known is 0\.15\.0"
    ):
        release("0.14.0")


TYPES = [
    ("optimizers", "OneBitAdam", "0.19.6", True),
    ("optimizers", "OneBitAdam", "0.19.7", False),
    ("optimizers", "muon", "0.17.5", False),
    ("optimizers", "muon", "0.17.6", True),
    ("optimizers", "ADAMW", "0.15.0", True),
    ("optimizers", "sgd", "0.19.8", False),
    ("optimizers", "SGD", "0.19.8", True),
    ("schedulers", "WarmupLR", "0.15.0", True),
    ("schedulers", "warmuplr", "0.19.8", False),
]


@pytest.mark.parametrize(("kind", "name", "version", "known"), TYPES)
def test_types_by_release(kind: str, name: str, version: str, known: bool) -> None:
    assert bool(release(version).forms(kind, name)) is known


def test_a_facts_table_agrees(whole: Path) -> None:
    """First releases and defaults in the table of keys, where the source does not say otherwise."""
    import csv

    with open(whole / "facts" / "deepspeed_keys.csv") as stream:
        rows = {row["key"]: row for row in csv.DictReader(stream)}
    assert {path for path in rows if path not in KEYS and path not in OPENED} == set()
    for path in KEYS.keys() & rows.keys():
        first = rows[path]["first_version"].split()[0]
        if first in KNOWN and path not in FINER:
            assert (KEYS[path].since or KNOWN[0]) == first, path
        if rows[path]["removed_after"]:
            assert RELEASES.last(KEYS[path].until) == rows[path]["removed_after"], path


OPENED = frozenset(
    {
        "tensor_parallel.dtype",
        "tensor_parallel.tp",
        "tensor_parallel.tp.mpu",
        "tensor_parallel.tp.tp_group",
        "zero_optimization.offload_param",
        "zero_optimization.offload_optimizer",
        "zero_optimization.zenflow",
        "zero_optimization.leaf_module",
        "bfloat16",
        "optimizer.params",
        "scheduler.params",
        *(
            f"tensor_parallel.partition_config.{name}"
            for name in (
                "use_default_specs",
                "layer_specs",
                "tp_size",
                "embedding_partition_dim",
                "lm_head_patterns",
                "strict_mode",
            )
        ),
        *(
            f"tensor_parallel.partition_config.layer_specs[].{name}"
            for name in (
                "patterns",
                "partition_type",
                "gather_output",
                "grad_allreduce",
                "shape",
                "partition_dim",
                "model_types",
            )
        ),
    }
)
"""Rows that are sections, parts of a free-form value, or live objects."""
EXPERTS = (
    "expert_tensor_parallel_size",
    "validate_folding_routing",
    "disable_triton_grouped_mm",
    "comm_backend",
    "comm_num_sm",
    "comm_qp_margin",
    "comm_max_tokens_per_rank",
    "async_split_plan",
    "row_weighting_impl",
    "gate_up_impl",
    "expert_activation",
)
FINER = frozenset(
    {
        "sequence_parallel_size",
        "bf16.immediate_grad_update",
        *(f"expert_parallel.{name}" for name in EXPERTS),
    }
)
"""Keys whose first release the source gives more exactly than the table."""


def test_an_argument_that_an_optimizer_does_not_take_is_refused_by_file_and_by_config(
    deepspeed: Dialect,
) -> None:
    name = "optimizer.params.adam_w_mode"
    for given in (
        {"optimizer.type": "zerooneadam", name: True},
        {"optimizer.type": "ZeroOneAdam", name: True},
    ):
        with pytest.raises(BridgeError, match="adam_w_mode"):
            deepspeed.config({**given, "train_batch_size": 8}, "0.17.6", 8, "file")
    kept = deepspeed.config(
        {"optimizer.type": "adam", name: True, "train_batch_size": 8}, "0.17.6", 8, "file"
    )
    assert kept.given[name] is True
