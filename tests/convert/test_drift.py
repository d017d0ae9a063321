"""Drift: the same file in two releases, for every dialect; and the migrations that NVIDIA and DeepSpeed made themselves."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings, strategies as st

import bridge
import compat
from bridge.cli import run
from bridge.errors import VersionError
from bridge.stack.dialect import Config, Dialect
from bridge.testing import configs, entries
from bridge.translation.drift import ChangeKind, Drift, drift
from tests.common.amounts import MORE

DIALECTS = tuple(compat.load(name) for name in compat.names())
SUFFIXES = ("json", "yaml", "txt")
LAW = settings(
    max_examples=8 * MORE,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
each = pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)


def drifted(
    name: str, source: Any, version: str, to_version: str, world_size: int | None = 8
) -> Drift:
    dialect = compat.load(name)
    return drift(lambda release: dialect.read(source, release, world_size), version, to_version)


# Laws


def in_a_file(
    law: Callable[[Drift, Config], None], dialect: Dialect, folder: Path, *, other: bool
) -> None:
    """Check `law` for files of any release, in the same release or in any other, with the migrated file read back."""
    suffix = next(suffix for suffix in SUFFIXES if dialect.format_of(f"x.{suffix}"))

    @LAW
    @given(st.data())
    def check(data: st.DataObject) -> None:
        version = data.draw(st.sampled_from(dialect.versions))
        to_version = (
            data.draw(st.sampled_from([name for name in dialect.versions if name != version]))
            if other
            else version
        )
        config = data.draw(configs(dialect, version=version, entry=entries(dialect)[0]))
        with TemporaryDirectory(dir=folder) as inside:
            path, migrated = Path(inside, f"a.{suffix}"), Path(inside, f"b.{suffix}")
            dialect.write(config, path)
            found = drift(
                lambda release: dialect.read(path, release, config.world_size), version, to_version
            )
            assert found.migrated is not None
            dialect.write(found.migrated, migrated)
            law(found, dialect.read(migrated, to_version, config.world_size))

    check()


@pytest.mark.once
@each
def test_the_same_release_is_no_drift(dialect: Dialect, tmp_path: Path) -> None:
    def law(found: Drift, back: Config) -> None:
        assert found.same
        assert not (
            found.changes or found.new or found.lapsed or found.remarks or found.edits or found.left
        )
        assert back.given == found.before.given

    in_a_file(law, dialect, tmp_path, other=False)


@pytest.mark.once
@each
def test_the_migrated_file_means_the_same_or_says_where_not(
    dialect: Dialect, tmp_path: Path
) -> None:
    """Every effective value and every plan field that differs after the migration is named."""

    def law(found: Drift, back: Config) -> None:
        assert found.migrated is not None
        assert back.given == found.migrated.given
        named = said(found)
        assert unlike(found.before.effective, back.effective).keys() <= named
        for ours, (was, now) in unlike(
            bridge.lift(found.before).values(), bridge.lift(back).values()
        ).items():
            rule = next(rule for rule in dialect.rules if ours in rule.ours)
            if None in (was, now) and found.before.given.keys().isdisjoint(rule.theirs):
                continue  # one of the releases has no word for it, and the file says nothing about it
            assert not named.isdisjoint((ours, *rule.theirs, *rule.sees)), ours

    in_a_file(law, dialect, tmp_path, other=True)


def said(found: Drift) -> set[str]:
    """Settings that a user is told about: left behind, in other words, refused, added, or only in one of the releases."""
    other_words = {
        change.path
        for change in found.changes
        if change.kind in (ChangeKind.RENAMED, ChangeKind.GONE, ChangeKind.REFUSED)
    }
    added = {path for path in found.edits if path not in found.before.given}
    return (
        {change.path for change in found.left} | other_words | added | {*found.new, *found.lapsed}
    )


def unlike(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    return {
        path: (one.get(path), other.get(path))
        for path in {**one, **other}
        if one.get(path) != other.get(path)
    }


@pytest.mark.once
@each
def test_a_file_without_settings_of_its_own_drifts_by_defaults_alone(dialect: Dialect) -> None:
    """From each release to the next and back: what differs in an almost empty file is never called the file's doing."""
    for version, to_version in zip(dialect.versions, dialect.versions[1:], strict=False):
        for one, other in ((version, to_version), (to_version, version)):
            config = dialect.config(SMALL.get(dialect.name, {}), one, 1)
            found = drift(partial(dialect.config, config.given, world_size=1), one, other)
            assert not [
                change
                for change in found.changes
                if change.kind in (ChangeKind.GONE, ChangeKind.RENAMED, ChangeKind.REFUSED)
            ]


# NVIDIA's own migrations, as its recipes changed between tags

CORE = (
    "--micro-batch-size 1 --global-batch-size 16 --num-layers 12 --hidden-size 512 --num-attention-heads 8 "
    "--seq-length 1024 --max-position-embeddings 1024 --train-iters 50 --lr 1e-4 --bf16"
)


@dataclass(frozen=True)
class Edit:
    """One of NVIDIA's edits: the flags beside CORE, then what went from the recipe and what came."""

    version: str
    to_version: str
    flags: str
    gone: tuple[str, ...]
    came: Mapping[str, Any] = field(default_factory=dict)


MOE = "--num-experts 8 --moe-token-dispatcher-type flex --expert-model-parallel-size 2 --transformer-impl local"
BACKEND = {"moe_flex_dispatcher_backend": "deepep"}
GRAPHS = "--transformer-impl transformer_engine --te-rng-tracker"
NVIDIA = {
    "encoder pipeline dropped": Edit(
        "0.12.0",
        "0.14.0",
        "--encoder-pipeline-model-parallel-size 0",
        ("encoder_pipeline_model_parallel_size",),
    ),
    "custom FSDP": Edit(
        "0.13.0",
        "0.14.0",
        "--use-custom-fsdp --data-parallel-sharding-strategy optim_grads_params --no-gradient-accumulation-fusion "
        "--use-distributed-optimizer --ckpt-format torch_dist",
        ("use_custom_fsdp",),
        {"use_megatron_fsdp": True},
    ),
    "graphs": Edit(
        "0.14.0",
        "0.15.0",
        f"--enable-cuda-graph {GRAPHS}",
        ("enable_cuda_graph",),
        {"cuda_graph_impl": "local"},
    ),
    "external graphs": Edit(
        "0.14.0",
        "0.15.0",
        f"--external-cuda-graph {GRAPHS}",
        ("external_cuda_graph",),
        {"cuda_graph_impl": "transformer_engine"},
    ),
    "asynchronous tensor parallelism dropped": Edit(
        "0.16.0",
        "0.17.0",
        "--no-async-tensor-model-parallel-allreduce",
        ("async_tensor_model_parallel_allreduce",),
    ),
    "growing batch": Edit(
        "0.17.0",
        "0.18.0",
        "--seq-length 4096 --max-position-embeddings 4096 --train-samples 1953125 --lr-decay-samples 1953125 "
        "--global-batch-size 1152 --rampup-batch-size 384 384 97656250",
        ("rampup_batch_size", "global_batch_size"),
        {"step_batch_size_schedule": "0:384 200B:768 400B:1152"},
    ),
    # The recipes went on to hybridep, another library; what keeps its meaning is deepep, as 0.18 says itself.
    "DeepEP": Edit(
        "0.17.0", "0.18.0", f"--moe-enable-deepep {MOE}", ("moe_enable_deepep",), BACKEND
    ),
    "graph modules": Edit(
        "0.17.0",
        "0.18.0",
        f"--cuda-graph-impl transformer_engine --cuda-graph-scope attn {GRAPHS}",
        ("cuda_graph_scope",),
        {"cuda_graph_modules": ["attn"]},
    ),
}


@pytest.mark.parametrize("name", NVIDIA)
def test_nvidias_own_migrations(name: str) -> None:
    edit = NVIDIA[name]
    flags = CORE.split()
    if "--train-samples" in edit.flags:
        flags = " ".join(flags).replace("--train-iters 50", "").split()
    found = drifted("megatron", [*flags, *edit.flags.split()], edit.version, edit.to_version)
    assert not found.same
    assert found.migrated is not None
    assert {path for path in edit.gone if path in found.before.given} == set(edit.gone)
    assert not set(edit.gone) & found.migrated.given.keys()
    assert {path: found.migrated.given.get(path) for path in edit.came} == edit.came
    assert {
        change.path
        for change in found.changes
        if change.kind in (ChangeKind.RENAMED, ChangeKind.GONE)
    } & set(edit.gone)


FAR = (
    "--use-custom-fsdp",
    "--enable-cuda-graph",
    "--external-cuda-graph",
    "--no-async-tensor-model-parallel-allreduce",
    "--encoder-pipeline-model-parallel-size",
)
"""Flags that NVIDIA took out of recipes between tags that the truth covers."""


def test_recipes_migrate_as_nvidia_migrated_them(whole: Path) -> None:
    """Recipes with such a flag at one tag: what the migrated file has of NVIDIA's edits is what NVIDIA's next one has."""
    rows = [
        json.loads(line)
        for line in (whole / "truth" / "megatron_cli.jsonl").read_text().splitlines()
    ]
    recipes = [
        row
        for row in rows
        if not row["recipe"].startswith("synthetic")
        and "args" in row
        and "config_rejected" not in row
    ]
    versions, compared = compat.load("megatron").versions, 0
    for row in recipes:
        later = sorted(
            (
                other
                for other in recipes
                if other["recipe"] == row["recipe"] and after(other, row, versions)
            ),
            key=lambda other: versions.index(other["version"]),
        )
        for other in later[:1]:
            dropped = [flag for flag in FAR if flag in row["flags"] and flag not in other["flags"]]
            if dropped:
                compared += 1
                assert_migration(row, other, dropped)
    assert compared == 3, compared


def after(other: Mapping[str, Any], row: Mapping[str, Any], versions: tuple[str, ...]) -> bool:
    return versions.index(other["version"]) > versions.index(row["version"])


INSTEAD = {
    "--use-custom-fsdp": "use_megatron_fsdp",
    "--enable-cuda-graph": "cuda_graph_impl",
    "--external-cuda-graph": "cuda_graph_impl",
}


def assert_migration(row: Mapping[str, Any], other: Mapping[str, Any], dropped: list[str]) -> None:
    megatron = compat.load("megatron")
    read = {"world_size": row["world_size"], "lenient": True}
    found = drift(
        lambda release: megatron.read(row["flags"], release, **read),
        row["version"],
        other["version"],
    )
    theirs = megatron.read(other["flags"], other["version"], **read)
    assert found.migrated is not None
    text = found.migrated.text()
    kept = [flag for flag in dropped if f"{flag}\n" in text]
    assert not [flag for flag in kept if flag in INSTEAD], (
        row["recipe"],
        row["version"],
        other["version"],
    )
    for flag in dropped:
        if path := INSTEAD.get(flag):
            assert found.migrated.given.get(path) == theirs.given.get(path), (
                row["recipe"],
                row["version"],
                other["version"],
            )


# DeepSpeed's changes between releases, each with a file that meets it

BATCH = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
MOVED, GONE, REFUSED, RENAMED, NEW = (
    ChangeKind.DEFAULT,
    ChangeKind.GONE,
    ChangeKind.REFUSED,
    ChangeKind.RENAMED,
    ChangeKind.NEW,
)
HALF = {"bf16": {"enabled": True}}
DEEPSPEED: tuple[tuple[str, str, dict[str, Any], str, ChangeKind, Any, Any], ...] = (
    ("0.15.1", "0.15.2", {}, "steps_per_print", MOVED, 10, None),
    ("0.16.3", "0.16.4", {"aio": {"thread_count": 2}}, "aio.thread_count", RENAMED, 2, 2),
    (
        "0.16.4",
        "0.16.5",
        {"seq_parallel_comm_data_type": "bf16"},
        "seq_parallel_comm_data_type",
        RENAMED,
        "bf16",
        "bf16",
    ),
    (
        "0.17.0",
        "0.17.1",
        {"bf16": {"enabled": True, "loss_scale": 1.0}},
        "bf16.loss_scale",
        REFUSED,
        None,
        None,
    ),
    (
        "0.16.3",
        "0.16.4",
        {"tensor_parallel": {"autotp_size": 2}},
        "tensor_parallel.autotp_size",
        NEW,
        None,
        2,
    ),
    (
        "0.17.1",
        "0.17.2",
        {"torch_autocast": {"enabled": True}},
        "torch_autocast.enabled",
        NEW,
        None,
        True,
    ),
    ("0.19.2", "0.19.3", {}, "gradient_clipping", MOVED, 0.0, 1.0),
    ("0.19.2", "0.19.3", HALF, "bf16.check_grad_overflow", MOVED, False, True),
    (
        "0.19.4",
        "0.19.5",
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}},
        "zero_optimization.offload_optimizer.pin_memory",
        MOVED,
        False,
        True,
    ),
    (
        "0.19.4",
        "0.19.5",
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}},
        "zero_optimization.offload_param.pin_memory",
        MOVED,
        False,
        True,
    ),
    (
        "0.19.5",
        "0.19.6",
        {"zero_optimization": {"stage": 1, "reduce_bucket_size": 0}},
        "zero_optimization.reduce_bucket_size",
        REFUSED,
        0,
        None,
    ),
    (
        "0.19.5",
        "0.19.6",
        {"gradient_allreduce_op": "sum"},
        "gradient_allreduce_op",
        NEW,
        None,
        "sum",
    ),
    *(
        ("0.19.6", "0.19.7", section, path, GONE, None, None)
        for path, section in {
            "nebula": {"nebula": {"enabled": False}},
            "compression_training": {"compression_training": {}},
            "quantize_training": {"quantize_training": {"enabled": False}},
            "sparse_attention": {"sparse_attention": {"mode": "fixed"}},
        }.items()
    ),
    *(
        (
            "0.19.6",
            "0.19.7",
            {"zero_optimization": {"stage": 3, name: value}},
            f"zero_optimization.{name}",
            GONE,
            None,
            None,
        )
        for name, value in {"mics_shard_size": 2, "mics_hierarchical_params_gather": True}.items()
    ),
    *(
        (
            "0.19.6",
            "0.19.7",
            {"optimizer": {"type": name, "params": {"lr": 1e-3}}},
            "optimizer.type",
            ChangeKind.DERIVED,
            None,
            None,
        )
        for name in ("OneBitAdam", "OneBitLamb", "ZeroOneAdam")
    ),
    (
        "0.19.7",
        "0.19.8",
        {
            "zero_optimization": {
                "stage": 3,
                "zeropp_loco_param": {"err_beta": 0.8, "reset_T": 1024},
            }
        },
        "zero_optimization.zeropp_loco_param",
        GONE,
        None,
        None,
    ),
    (
        "0.19.5",
        "0.19.6",
        {
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "cpu"},
                "zenflow": {"topk_ratio": 1.0},
            }
        },
        "zero_optimization.zenflow.topk_ratio",
        REFUSED,
        1.0,
        None,
    ),
    (
        "0.19.4",
        "0.19.3",
        {"tensor_parallel": {"autotp_size": 2}, "zero_optimization": {"stage": 3}},
        "tensor_parallel.autotp_size",
        REFUSED,
        2,
        None,
    ),
    *(
        ("0.19.7", "0.19.8", section, path, GONE, None, None)
        for path, section in {
            "amp": {"amp": {"enabled": False}},
            "sparse_gradients": {"sparse_gradients": False},
            "eigenvalue": {"eigenvalue": {"enabled": False}},
            "elasticity": {"elasticity": {"enabled": False}},
            "graph_harvesting": {"graph_harvesting": False},
            "curriculum_learning": {"curriculum_learning": {"enabled": False}},
            "progressive_layer_drop": {"progressive_layer_drop": {"enabled": False}},
        }.items()
    ),
)


@pytest.mark.parametrize("row", DEEPSPEED, ids=lambda row: f"{row[1]} {row[3]}")
def test_deepspeeds_own_changes(
    row: tuple[str, str, dict[str, Any], str, ChangeKind, Any, Any],
) -> None:
    version, to_version, section, path, kind, before, after = row
    deepspeed = compat.load("deepspeed")
    ranks = section.get("tensor_parallel", {}).get("autotp_size", 1)
    found = drift(
        lambda release: deepspeed.read({**BATCH, **section}, release, ranks, lenient=True),
        version,
        to_version,
    )
    changes = {change.path: change for change in found.changes}
    assert path in changes, list(changes)
    assert changes[path].kind is kind, changes[path]
    if kind in (MOVED, RENAMED, NEW):
        assert (changes[path].before, changes[path].after) == (before, after)
    if kind in (GONE, REFUSED):
        assert found.after is None
    if kind is MOVED and before is not None:
        assert found.migrated is not None
        assert found.migrated.effective[path] == before


OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
SUPER = {
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "super_offload": True}}
}
MASTER = {
    "bf16": {"enabled": True, "bf16_master_weights_and_grads": True},
    "zero_optimization": {"stage": 2},
}
VOCAB = {"tensor_parallel": {"autotp_size": 2, "vocab_parallel_lm_head": True}}
CAME: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("0.16.6", "0.16.5", "compile.deepcompile", {"compile": {"deepcompile": True}}),
    (
        "0.17.5",
        "0.17.4",
        "zero_optimization.zenflow",
        {"zero_optimization": {"stage": 2, **OFFLOAD, "zenflow": {"topk_ratio": 0.1}}},
    ),
    ("0.18.0", "0.17.6", "zero_optimization.offload_optimizer.super_offload", SUPER),
    (
        "0.18.0",
        "0.17.6",
        "zero_optimization.leaf_module",
        {"zero_optimization": {"stage": 3, "leaf_module": {"classes": ["A"]}}},
    ),
    ("0.18.3", "0.18.2", "bf16.bf16_master_weights_and_grads", MASTER),
    (
        "0.18.6",
        "0.18.5",
        "tensor_parallel.preset_model",
        {"tensor_parallel": {"autotp_size": 2, "preset_model": "llama"}},
    ),
    (
        "0.19.2",
        "0.19.1",
        "expert_parallel",
        {"expert_parallel": {"enabled": True, "autoep_size": 2}},
    ),
    ("0.19.2", "0.19.1", "data_types.param_dtype", {"data_types": {"param_dtype": "fp32"}}),
    ("0.19.4", "0.19.3", "managed_gradient_accumulation", {"managed_gradient_accumulation": False}),
    (
        "0.19.7",
        "0.19.6",
        "zero_optimization.compute_grad_norm",
        {"zero_optimization": {"stage": 2, "compute_grad_norm": True}},
    ),
    (
        "0.19.7",
        "0.19.6",
        "zero_optimization.parameter_alignment",
        {"zero_optimization": {"stage": 2, "parameter_alignment": True}},
    ),
    ("0.19.8", "0.19.7", "disable_python_gc", {"disable_python_gc": True}),
    (
        "0.19.8",
        "0.19.7",
        "data_types.keep_in_fp32_modules",
        {"data_types": {"keep_in_fp32_modules": ["a"]}},
    ),
    ("0.19.8", "0.19.7", "tensor_parallel.vocab_parallel_lm_head", VOCAB),
)


@pytest.mark.parametrize(
    "version, to_version, section, source", CAME, ids=lambda value: str(value)[:40]
)
def test_what_deepspeed_added_is_gone_on_the_way_down(
    version: str, to_version: str, section: str, source: dict[str, Any]
) -> None:
    found = drifted("deepspeed", {**BATCH, **source}, version, to_version, 2)
    assert any(
        change.path.startswith(section) and change.kind is GONE and change.given
        for change in found.changes
    )
    assert (
        any(change.path.startswith(section) for change in found.left)
        or "code.expert_parallel" in found.edits
    )
    assert found.migrated is not None and not any(
        path.startswith(section) for path in found.migrated.given
    )


# Other stacks


def test_merak_gave_sequence_parallel_another_meaning() -> None:
    flags = "--sequence_parallel --train_schedule 1f1b --num_layers 4 --seq_length 8 --per_device_train_batch_size 2"
    found = drifted("merak", flags.split(), "2.2.2", "2.2.2+main")
    (change,) = found.changes
    assert (change.path, change.kind) == ("args.sequence_parallel", ChangeKind.MEANING)


def test_fast_llm_renamed_its_dtype_and_moved_its_batch() -> None:
    dtype = drifted(
        "fast_llm",
        {"model": {"distributed": {"training_dtype": "bf16"}, "multi_stage": {}}},
        "0.2.0",
        "0.3.0",
    )
    assert dtype.edits == {
        "model.distributed.training_dtype": ("bf16", None),
        "model.distributed.compute_dtype": (None, "bf16"),
    }
    source = {
        "batch": {"micro_batch_size": 2, "sequence_length": 128, "batch_size": 16},
        "model": {"distributed": {}},
    }
    batch = drifted("fast_llm", source, "0.3.0", "0.4.0")
    assert batch.migrated is not None and {
        change.path.partition(".")[0] for change in batch.left
    } == {"habits"}
    assert bridge.lift(batch.migrated).batch == bridge.lift(batch.before).batch


def test_what_a_release_always_does_is_a_change_though_no_setting_says_it() -> None:
    found = drifted(
        "fast_llm",
        {"batch": {"sequence_length": 128}, "model": {"distributed": {}}},
        "0.3.0",
        "0.4.0",
    )
    silent = {
        change.path: (change.before, change.after)
        for change in found.changes
        if change.kind is ChangeKind.MEANING
    }
    assert silent["habits.attention"] == ("sequence", "document")
    assert silent["habits.boundaries"] == ("trained", "masked")
    source = {
        "batch": {"sequence_length": 128, "cross_document_attention": False},
        "model": {"distributed": {}},
    }
    apart = drifted("fast_llm", source, "0.3.0", "0.4.0")
    assert "habits.attention" not in {change.path for change in apart.left}


def test_automodel_reduces_in_another_format() -> None:
    source = {
        "distributed": {"strategy": "fsdp2", "tp_size": 2},
        "step_scheduler": {"local_batch_size": 1, "global_batch_size": 8},
    }
    found = drifted("automodel", source, "0.4.0", "0.5.0")
    assert {change.path: (change.before, change.after) for change in found.changes} == {
        "distributed.mp_policy.reduce_dtype": ("bf16", "fp32")
    }
    assert found.migrated is not None and found.migrated.effective == found.before.effective


@each
def test_unknown_releases_name_the_nearest_known_ones(dialect: Dialect) -> None:
    newest = dialect.newest
    last = dialect.versions[-1]
    with pytest.raises(
        VersionError, match=f"{dialect.name}: unknown release 99.0; the nearest known is {last[:5]}"
    ):
        dialect.release("99.0")
    with pytest.raises(VersionError, match=r"the nearest known are .* and "):
        dialect.release(f"{dialect.versions[0]}.post1")
    with pytest.raises(VersionError, match=f"known are {dialect.versions[0]} to"):
        dialect.release("latest")
    assert dialect.release(None) == newest


# On the command line


@pytest.fixture
def old(tmp_path: Path) -> Path:
    path = tmp_path / "old.json"
    path.write_text(
        json.dumps({**BATCH, "elasticity": {"enabled": False}, "aio": {"thread_count": 2}})
    )
    return path


def test_the_migrated_file_is_written_and_means_the_same(
    old: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = tmp_path / "new.json"
    assert (
        run(
            [
                "drift",
                str(old),
                "--from-version",
                "0.16.3",
                "--to-version",
                "0.19.8",
                "-o",
                str(new),
            ]
        )
        == 1
    )
    report = capsys.readouterr().out
    assert (
        "DeepSpeed 0.16.3 -> DeepSpeed 0.19.8 (newest known): the file is refused by 0.19.8"
        in report
    )
    assert all(
        word in report for word in ("elasticity", "aio.intra_op_parallelism", "gradient_clipping")
    )
    written = json.loads(new.read_text())
    assert written["gradient_clipping"] == 0.0 and written["aio"] == {"intra_op_parallelism": 2}
    assert "elasticity" not in written
    assert run(["check", str(new), "--from-version", "0.19.8"]) in (0, 2)


def test_the_same_release_exits_with_0(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["drift", str(old), "--from-version", "0.16.3", "--to-version", "0.16.3"]) == 0
    out, report = capsys.readouterr()
    assert json.loads(out) == json.loads(old.read_text())
    assert "means the same" in report


def test_drift_as_json(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["drift", str(old), "--from-version", "0.16.3", "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["to_version"] == "0.19.8" and said["accepted"] is False and said["exit_code"] == 1
    assert {"path": "aio.thread_count", "before": 2, "after": None} in said["edits"]
    assert {change["kind"] for change in said["changes"]} == {"gone", "renamed", "default moved"}
    assert json.loads(said["migrated"]["text"])["gradient_clipping"] == 0.0
    assert [change["path"] for change in said["left"]] == ["elasticity"]


@pytest.mark.parametrize(
    "arguments, problem",
    [
        (["--from-version", "0.19.8"], "elasticity: DeepSpeed 0.19.8 removed this key"),
        (["--from-version", "0.16.3", "--to-version", "0.19.9"], "the nearest known is 0.19.8"),
        (["--from-version", "0.16.33"], "the nearest known are"),
        (["--from-version", "0.16.3", "-o", "OLD"], "is the file that is read"),
        (
            ["--from-version", "0.16.3", "-o", "OTHER"],
            "--force overwrites it, without -o the new file is printed",
        ),
    ],
)
def test_errors(
    old: Path, arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    other = old.with_name("other.json")
    other.write_text("{}")
    words = [{"OLD": str(old), "OTHER": str(other)}.get(word, word) for word in arguments]
    before = old.read_text()
    assert run(["drift", str(old), *words]) == 1
    assert problem in capsys.readouterr().err
    assert old.read_text() == before


@each
def test_every_stack_drifts_on_the_command_line(
    dialect: Dialect, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Between the two newest releases, both ways, with the stack recognised or named; the newest is said aloud."""
    suffix = next(suffix for suffix in SUFFIXES if dialect.format_of(f"x.{suffix}"))
    first, last = dialect.versions[-2:]
    path = tmp_path / f"config.{suffix}"
    dialect.write(dialect.config(SMALL.get(dialect.name, {}), first, 1), path)
    for one, other in ((first, last), (last, first)):
        code = run(
            [
                "drift",
                str(path),
                "--from",
                dialect.name,
                "--from-version",
                one,
                "--to-version",
                other,
                "--world-size",
                "1",
            ]
        )
        report = capsys.readouterr().err
        assert code in (0, 2), report
        assert f"{dialect.title} {dialect.newest} (newest known)" in report
        assert ("means the same" in report) == (code == 0)


SMALL: Mapping[str, Mapping[str, Any]] = {"deepspeed": BATCH, "megatron": {"micro_batch_size": 1}}
"""The least that a stack accepts, where that is not nothing."""
