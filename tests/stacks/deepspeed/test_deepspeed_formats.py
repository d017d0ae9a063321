"""Reading and writing: strictness at every level, spellings, bad input, and that what is written reads the same."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest

from bridge.errors import BridgeError, ConfigError, SourceError, VersionError
from bridge.plan.section import fields, nest
from bridge.stack.dialect import Dialect
from bridge.stack.rules import Effect
from compat.deepspeed.releases import KEYS, KNOWN, RELEASES
from compat.deepspeed.schema import DeepSpeed

BASE = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1.0}


def _problems(dialect: Dialect, data: Any, version: str = "0.19.8", **more: Any) -> tuple[str, ...]:
    with pytest.raises(BridgeError) as raised:
        dialect.read(data, version=version, world_size=1, **more)
    return raised.value.problems


def _given(dialect: Dialect, data: Any, version: str = "0.19.8", **more: Any) -> dict[str, Any]:
    return dict(dialect.read(data, version=version, world_size=1, **more).given)


# Every key


def _example(annotation: Any) -> Any:
    """A value that `annotation` allows and that no release's bounds refuse."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _example(parts[0])
    if origin in (Union, UnionType):
        return _example(next(part for part in parts if part is not NoneType))
    if origin is Literal:
        return parts[0]
    if origin is tuple:
        return tuple(_example(part) for part in parts if part is not Ellipsis) or ("a",)
    return {bool: True, int: 2, float: 0.5, str: "text", list: ["z1"], dict: {"a": 1}}.get(
        origin or annotation, "a"
    )


BESIDE: Mapping[str, Mapping[str, Any]] = {
    "optimizer.params.max_grad_norm": {"optimizer.type": "AdamW"},
    "zero_optimization.compute_grad_norm": {"zero_optimization.stage": 1, "gradient_clipping": 0.0},
    "zero_optimization.offload_optimizer.ratio": {"zero_optimization.stage": 3},
    "fp16.fp16_master_weights_and_grads": {"zero_optimization.stage": 2},
    "bf16.bf16_master_weights_and_grads": {"zero_optimization.stage": 2},
    "bfloat16.bf16_master_weights_and_grads": {"zero_optimization.stage": 2},
    "bf16.bf16_optimizer_states": {
        "zero_optimization.stage": 2,
        "bf16.bf16_master_weights_and_grads": True,
    },
    "bfloat16.bf16_optimizer_states": {
        "zero_optimization.stage": 2,
        "bfloat16.bf16_master_weights_and_grads": True,
    },
    "aio.use_gds": {"code.accelerator": "cuda"},
}
VALUES: Mapping[str, Any] = {
    "tensor_parallel.partition_config": {
        "use_default_specs": False,
        "layer_specs": [{"patterns": ["x"], "partition_type": "row"}],
    },
    "comms_logger.prof_ops": ["all_reduce"],
    "train_batch_size": 8,
    "data_parallel_size": 4,
    "autotuning.model_info": {"num_layers": 4},
    **{key: {"enabled": True} for key in ("amp", "progressive_layer_drop", "curriculum_learning")},
}
REFUSED = ("expert_parallel.load_balance_coeff",)
"""Keys that no value but null may have."""


@pytest.mark.parametrize("path", [path for path in fields(DeepSpeed) if path not in REFUSED])
def test_every_key_comes_back(deepspeed: Dialect, path: str) -> None:
    value = VALUES.get(path, _example(fields(DeepSpeed)[path].annotation))
    version = RELEASES.last(KEYS[path].until) if path in KEYS else KNOWN[-1]
    given = BASE | dict(BESIDE.get(path, {})) | {path: value}
    config = deepspeed.read(
        nest(given), version=version, world_size=8 if path.startswith("code.") else 4
    )
    assert config.given == given
    again = deepspeed.read(deepspeed.write(config), version=version, world_size=config.world_size)
    assert again.given == config.given
    assert again.effective == config.effective
    assert deepspeed.as_section(config.given).model_dump(exclude_unset=True) == nest(given)


def test_every_key_is_described() -> None:
    for field in fields(DeepSpeed).values():
        assert field.doc.endswith("."), field.path
        assert field.default is None, field.path


# Formats


HJSON = """{
  // a comment
  train_micro_batch_size_per_gpu: 2
  zero_optimization: { leaf_module: { names: ["module%s"], }, },
}
""" % ("x" * 300)


def test_json_hjson_mapping_base64_and_files_read_alike(deepspeed: Dialect, tmp_path: Path) -> None:
    names = ["module" + "x" * 300]
    data = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"leaf_module": {"names": names}},
    }
    expected = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization.leaf_module.names": tuple(names),
    }
    text = json.dumps(data)
    (tmp_path / "config.json").write_text(text)
    (tmp_path / "config.hjson").write_text(HJSON)
    encoded = base64.urlsafe_b64encode(text.encode()).decode()
    for source in (
        data,
        text,
        HJSON,
        encoded,
        tmp_path / "config.json",
        str(tmp_path / "config.hjson"),
    ):
        assert _given(deepspeed, source) == expected


def test_lines_and_spellings_are_remembered(deepspeed: Dialect) -> None:
    text = '{\n "train_batch_size": 2,\n "zero_optimization": {\n  "max_live_parameters": 5\n }\n}'
    origins = deepspeed.read(text, world_size=1).origins
    assert str(origins["train_batch_size"]) == "line 2"
    assert (
        str(origins["zero_optimization.stage3_max_live_parameters"])
        == "line 4, zero_optimization.max_live_parameters"
    )


def test_written_text_is_plain_json_in_schema_order(deepspeed: Dialect) -> None:
    config = deepspeed.config(
        {"zero_optimization.stage": 1, "train_batch_size": 8, "optimizer.type": "AdamW"},
        world_size=4,
    )
    lines = (
        "{",
        '  "train_batch_size": 8,',
        '  "optimizer": {',
        '    "type": "AdamW"',
        "  },",
        '  "zero_optimization": {',
        '    "stage": 1',
        "  }",
        "}",
    )
    assert config.text() == "\n".join(lines) + "\n"
    with pytest.raises(VersionError, match="cannot write yaml"):
        config.text("yaml")


def test_written_file_is_read(deepspeed: Dialect, tmp_path: Path) -> None:
    config = deepspeed.read({"train_batch_size": 8}, code={"pipeline_stages": 2}, world_size=4)
    written = deepspeed.write(config, tmp_path / "out.json")
    assert json.loads((tmp_path / "out.json").read_text()) == {"train_batch_size": 8}
    assert deepspeed.read(tmp_path / "out.json", world_size=4).given == config.given
    assert deepspeed.read(written.text, world_size=4, code=written.code).given == config.given
    assert deepspeed.read(written.text, world_size=4).given == {"train_batch_size": 8}


def test_aliases_have_one_path(deepspeed: Dialect) -> None:
    canonical = _given(
        deepspeed,
        nest(BASE | {"tensor_parallel.kernel_inject": True, "tensor_parallel.tp.tp_size": 2}),
    )
    other = _given(
        deepspeed,
        nest(
            BASE
            | {
                "tensor_parallel.replace_with_kernel_inject": True,
                "tensor_parallel.tensor_parallel.tp_size": 2,
            }
        ),
    )
    assert canonical == other


# Strictness


UNKNOWN = [
    (
        {"zero_optimisation": {"stage": 3}},
        "zero_optimisation: unknown key; did you mean zero_optimization?",
    ),
    (
        {"gradient_acumulation_steps": 2},
        "gradient_acumulation_steps: unknown key; did you mean gradient_accumulation_steps?",
    ),
    (
        {"activation_checkpointing": {"partitioned_activations": True}},
        "activation_checkpointing.partitioned_activations: unknown key; did you mean partition_activations?",
    ),
    (
        {"flops_profiler": {"enable": True}},
        "flops_profiler.enable: unknown key; did you mean enabled?",
    ),
    ({"lr": 1e-3}, "lr: unknown key here; DeepSpeed reads optimizer.params.lr"),
    (
        {"optimizer": {"type": "AdamW", "params": {"lrr": 1}}},
        "optimizer.params.lrr: unknown key; did you mean lr?",
    ),
    (
        {"optimizer": {"params": {"momentum": 1}, "type": "Lamb"}},
        "optimizer.params.momentum: unknown key",
    ),
    (
        {"scheduler": {"type": "WarmupLR", "params": {"total_num_steps": 9}}},
        "scheduler.params.total_num_steps: unknown key",
    ),
    (
        {"aio": {"thread_count": 2}},
        "aio.thread_count: only releases up to DeepSpeed 0.16.3 read this key, but the config is for 0.19.8;"
        " use aio.intra_op_parallelism",
    ),
    (
        {"tensor_parallel": {"partition_config": {"layer_specs": [{"pattern": "x"}]}}},
        "tensor_parallel.partition_config.layer_specs.0.pattern: unknown key; did you mean patterns?",
    ),
    (
        {"code": {"pipeline_stage": 2}},
        "code.pipeline_stage: unknown key; did you mean pipeline_stages?",
    ),
]


@pytest.mark.parametrize(("data", "problem"), UNKNOWN)
def test_unknown_keys_are_errors_at_every_level(
    deepspeed: Dialect, data: dict[str, Any], problem: str
) -> None:
    assert _problems(deepspeed, BASE | data) == (problem,)


@pytest.mark.parametrize(
    ("data", "path"),
    [
        ({"_comment": "x"}, "_comment"),
        ({"comment": "see the docs"}, "comment"),
        ({"_fp16": {"enabled": True}}, "_fp16"),
        ({"// as in v0.9": 1}, "// as in v0.9"),
        ({"cuda_visible_devices": "0"}, "cuda_visible_devices"),
        (
            {"optimizer": {"type": "Adam", "_read_the_docs": ["x"], "params": {"lr": 1.0}}},
            "optimizer._read_the_docs",
        ),
        (
            {"data_efficiency": {"data_sampling": {"_note": 1}}},
            "data_efficiency.data_sampling._note",
        ),
    ],
)
def test_a_key_that_deepspeed_never_reads_has_no_effect(
    deepspeed: Dialect, data: dict[str, Any], path: str
) -> None:
    config = deepspeed.read(BASE | data, world_size=1)
    assert [(one.path, one.effect) for one in config.remarks] == [(path, Effect.NONE)]
    assert path not in config.given


@pytest.mark.parametrize(
    "data",
    [{"gradient_cliping": 1.0}, {"fp_16": {"enabled": True}}, {"stage": 3}, {"zero.stage": 3}],
)
def test_what_is_probably_a_key_of_deepspeed_stays_refused(
    deepspeed: Dialect, data: dict[str, Any]
) -> None:
    assert next(iter(data)) in _problems(deepspeed, BASE | data)[0]


def test_lenient_turns_a_misspelled_key_into_a_finding(deepspeed: Dialect) -> None:
    config = deepspeed.read(BASE | {"flops_profiler": {"enable": True}}, world_size=1, lenient=True)
    assert dict(config.given) == BASE
    assert [(one.path, one.effect, one.unknown) for one in config.remarks] == [
        ("flops_profiler.enable", Effect.NUMBERS, True)
    ]


@pytest.mark.parametrize(
    "data",
    [
        {"zero_optimization": {"stag": 1}},
        {"bf16": {"loss_scale": 0}},
        {"compile": {"backend": "x"}},
    ],
)
def test_lenient_does_not_relax_what_deepspeed_refuses(
    deepspeed: Dialect, data: dict[str, Any]
) -> None:
    assert "unknown key" in _problems(deepspeed, BASE | data, lenient=True)[0]


def test_newer_and_removed_keys_name_their_release(deepspeed: Dialect) -> None:
    newer = _problems(deepspeed, BASE | {"managed_gradient_accumulation": False}, "0.19.3")
    assert newer == (
        "managed_gradient_accumulation: DeepSpeed reads this key from 0.19.4 on, but the config is for 0.19.3;"
        " drop the key, or name a later release",
    )
    section = _problems(
        deepspeed, BASE | {"torch_autocast": {"enabled": True, "dtype": "bf16"}}, "0.17.1"
    )
    assert len(section) == 1
    assert "from 0.17.2 on" in section[0]
    for empty in ({}, None, {"enabled": False}):
        removed = _problems(deepspeed, BASE | {"elasticity": empty})
        assert "DeepSpeed 0.19.8 removed this key" in removed[0]
        assert "even if it is empty" in removed[0]
    assert _given(deepspeed, BASE | {"elasticity": {"enabled": False}}, "0.19.7")["elasticity"] == {
        "enabled": False
    }


def test_two_spellings_of_one_key_are_refused(deepspeed: Dialect) -> None:
    data = BASE | {"zero_optimization": {"max_live_parameters": 1, "stage3_max_live_parameters": 1}}
    assert _problems(deepspeed, data) == (
        "zero_optimization.stage3_max_live_parameters: this key and zero_optimization.max_live_parameters are"
        " two names of the same setting, and both are given; keep one of them",
    )


def test_bf16_hides_bfloat16(deepspeed: Dialect) -> None:
    config = deepspeed.read(BASE | {"bf16": {}, "bfloat16": {"enabled": True}}, world_size=1)
    assert config.effective["bf16.enabled"] is False
    assert config.remarks[0].path == "bfloat16"
    alone = deepspeed.read(BASE | {"bfloat16": {"enabled": True}}, world_size=1)
    assert alone.effective["bf16.enabled"] is True
    assert "bfloat16.enabled" not in alone.effective


def test_old_forms_of_a_stage(deepspeed: Dialect) -> None:
    for written, stage in (
        (True, 1),
        (False, 0),
        ({"stage": "3"}, 3),
        ({"stage": True}, 1),
        ({"stage": 2.0}, 2),
    ):
        config = deepspeed.read(BASE | {"zero_optimization": written}, world_size=1)
        assert config.given["zero_optimization.stage"] == stage
        assert [finding.effect for finding in config.remarks] == [Effect.NONE]
    old = deepspeed.read(BASE | {"zero_optimization": True, "allgather_size": 7}, world_size=1)
    assert old.given["zero_optimization.allgather_bucket_size"] == 7


def test_own_optimizers_keep_their_arguments(deepspeed: Dialect) -> None:
    params = {"lr": 0.1, "betas": [1, 2, 3], "rho": {"a": [1]}}
    config = deepspeed.read(BASE | {"optimizer": {"params": params, "type": "MyOwn"}}, world_size=1)
    assert config.given["optimizer.params.lr"] == 0.1
    assert dict(config.opaque) == {
        "optimizer.params.betas": [1, 2, 3],
        "optimizer.params.rho": {"a": [1]},
    }
    assert json.loads(config.text())["optimizer"]["params"] == params
    assert deepspeed.read(deepspeed.write(config), world_size=1).opaque == config.opaque


def test_live_objects_are_carried_and_texts_refused(deepspeed: Dialect) -> None:
    group = object()
    config = deepspeed.read(nest(BASE | {"tensor_parallel.tp.mpu": group}), world_size=1)
    assert dict(config.opaque) == {"tensor_parallel.tp.mpu": group}
    assert "tensor_parallel" not in config.text()
    assert (
        "live Python object"
        in _problems(deepspeed, nest(BASE | {"tensor_parallel.dtype": "fp16"}))[0]
    )


# Values


BAD = [
    ("train_batch_size", True),
    ("train_batch_size", -1),
    ("train_batch_size", 0),
    ("train_batch_size", 2.5),
    ("train_batch_size", "8"),
    ("train_batch_size", [8]),
    ("train_batch_size", {"a": 1}),
    ("gradient_clipping", float("nan")),
    ("gradient_clipping", float("inf")),
    ("gradient_clipping", "1.0"),
    ("zero_optimization.stage", 4),
    ("zero_optimization.stage", "two"),
    ("zero_optimization.overlap_comm", "true"),
    ("zero_optimization.reduce_bucket_size", 10**400),
    ("zero_optimization.offload_optimizer", "cpu"),
    ("zero_optimization.offload_optimizer.device", "gpu"),
    ("fp16", True),
    ("fp16.enabled", 1),
    ("optimizer.type", ["Adam"]),
    ("optimizer.params.betas", [0.9]),
    ("optimizer.params.betas", [0.9, 1.5]),
    ("scheduler.params.warmup_max_lr", True),
    ("communication_data_type", "fp64"),
    ("data_efficiency.data_sampling.curriculum_learning", {"a": float("nan")}),
    ("elasticity", [1]),
    ("gradient_clipping", None),
    ("zero_optimization", None),
    ("optimizer", None),
    ("optimizer.params.lr", None),
]


@pytest.mark.parametrize(("path", "value"), BAD, ids=[path for path, _ in BAD])
def test_bad_values_are_named(deepspeed: Dialect, path: str, value: Any) -> None:
    beside = {"optimizer.type": "AdamW"} if path.startswith("optimizer.params") else {}
    data = nest({key: base for key, base in BASE.items() if key != path} | beside | {path: value})
    (problem,) = _problems(deepspeed, data, "0.19.7")
    assert problem.startswith(path)
    assert "found" in problem


def test_all_problems_come_at_once(deepspeed: Dialect) -> None:
    data = {
        "train_batch_size": "x",
        "fp17": 1,
        "zero_optimization": {"stage": 9, "bucket": 1},
        "elasticity": {},
    }
    assert len(_problems(deepspeed, data)) == 5


def test_lines_are_named(deepspeed: Dialect) -> None:
    text = '{\n "train_batch_size": 2,\n "zero_optimization": {\n  "stage": 7\n }\n}'
    assert _problems(deepspeed, text) == (
        "line 4: zero_optimization.stage: found 7, expected one of 0, 1, 2, 3",
    )


SOURCES: tuple[tuple[str, bytes], ...] = (
    ("empty.json", b""),
    ("binary.json", bytes(range(256))),
    ("truncated.json", b'{"train_batch_size": '),
    ("list.json", b"[1, 2]"),
    ("scalar.json", b"3"),
    ("twice.json", b'{"train_batch_size": 1, "train_batch_size": 2}'),
    ("nested_twice.json", b'{"fp16": {"enabled": true, "enabled": false}}'),
    ("nan.json", b'{"gradient_clipping": NaN}'),
    ("huge_number.json", b'{"gradient_clipping": 1e400}'),
    ("deep.json", b'{"a":' * 5000 + b"1" + b"}" * 5000),
    ("large.json", b'{"a": "' + b"x" * (17 * 2**20) + b'"}'),
)


@pytest.mark.parametrize(("name", "content"), SOURCES, ids=[name for name, _ in SOURCES])
def test_bad_files_give_one_clear_line(
    deepspeed: Dialect, tmp_path: Path, name: str, content: bytes
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SourceError) as raised:
        deepspeed.read(tmp_path / name)
    assert len(raised.value.problems) == 1
    assert name in str(raised.value)
    assert "\n" not in str(raised.value)


def test_missing_files_and_other_sources(deepspeed: Dialect, tmp_path: Path) -> None:
    for source in (
        tmp_path / "missing.json",
        tmp_path,
        "no_such_config",
        3,
        None,
        ["--bf16"],
        object(),
    ):
        with pytest.raises(SourceError):
            deepspeed.read(source)
    cyclic: dict[str, Any] = dict(BASE)
    cyclic["elasticity"] = cyclic
    with pytest.raises(SourceError, match="nesting"):
        deepspeed.read(cyclic, version="0.19.7")
    with pytest.raises(ConfigError, match=re.escape("expected a name without dots")):
        deepspeed.read({**BASE, "zero_optimization.stage": 1})
    with pytest.raises(ConfigError, match="expected a name without dots"):
        deepspeed.read({**BASE, 3: 1})


def test_unknown_releases_are_named(deepspeed: Dialect) -> None:
    with pytest.raises(VersionError, match=r"unknown release 0\.19\.9.*nearest known"):
        deepspeed.read(BASE, version="0.19.9")


def test_recognises(deepspeed: Dialect) -> None:
    assert deepspeed.recognises({"train_batch_size": 1, "zero_optimization": {}, "x": 1}) == 2
    assert deepspeed.recognises(["--bf16"]) == 0


@pytest.mark.parametrize(
    ("path", "value", "taken", "effect"),
    [
        ("optimizer.params.torch_adam", "torch_impl", True, Effect.NONE),
        ("prescale_gradients", 0, False, Effect.NONE),
        ("prescale_gradients", "false", True, Effect.NUMBERS),
        ("activation_checkpointing.cpu_checkpointing", "yes", True, Effect.NONE),
    ],
)
def test_keys_that_are_only_asked_for_truth_take_any_value(
    deepspeed: Dialect, path: str, value: Any, taken: bool, effect: Effect
) -> None:
    more = {"optimizer.type": "AdamW"} if path.startswith("optimizer") else {}
    config = deepspeed.read(nest({**BASE, **more, path: value}), version="0.19.8", world_size=1)
    assert config.given[path] is taken
    assert [found.effect for found in config.findings if found.path == path] == [effect]


def test_a_key_that_accelerate_overwrites_may_be_auto(deepspeed: Dialect) -> None:
    config = deepspeed.read({**BASE, "steps_per_print": "auto"}, version="0.19.8", world_size=1)
    assert "steps_per_print" not in config.given
    assert [found.effect for found in config.findings if found.path == "steps_per_print"] == [
        Effect.NONE
    ]


@pytest.mark.parametrize("value", ["CONFIG_MBSIZE,", "<batch>", "${BATCH}", "{{ batch }}"])
def test_a_placeholder_of_a_template_is_called_one(deepspeed: Dialect, value: str) -> None:
    (problem,) = _problems(deepspeed, {"train_batch_size": value})
    assert (
        "a placeholder of a template that is not filled in, expected a whole number above 0"
        in problem
    )
