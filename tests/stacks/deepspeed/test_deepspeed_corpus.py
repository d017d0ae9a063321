"""Real DeepSpeed files: what DeepSpeed accepts is read, what it refuses is refused, and what is written back means the same."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import compat
from bridge.errors import BridgeError
from bridge.files import load
from bridge.stack.dialect import Config, Dialect
from bridge.stack.rules import Effect
from bridge.translation.lift import lift
from bridge.translation.translate import translate

RELEASE = "0.19.8"
IGNORED = {
    "deepspeedai_DeepSpeedExamples__training_imagenet_config_ds_config.json": "cuda_visible_devices",
    "deepspeedai_DeepSpeedExamples__training_imagenet_config_ds_fp16_config.json": "cuda_visible_devices",
}
"""Files with a key that DeepSpeed ignores."""
AUTO = {
    "hidden_size": 1024,
    "micro_batch": 1,
    "accumulation": 1,
    "lr": 1e-4,
    "betas": [0.9, 0.999],
    "eps": 1e-8,
    "weight_decay": 0.01,
    "clip": 1.0,
    "warmup_steps": 10,
    "total_steps": 100,
    "mixed_precision": "bf16",
    "save_16bit": True,
    "zero_optimization.stage3_max_live_parameters": 1_000_000_000,
    "zero_optimization.offload_param.buffer_size": 100_000_000,
}


@pytest.fixture(scope="module")
def folder(whole: Path) -> Path:
    """The folder of real files."""
    return whole / "corpus" / "deepspeed"


@pytest.fixture(scope="module")
def index(folder: Path) -> list[dict[str, str]]:
    """What DeepSpeed says of each file."""
    with open(folder / "index.csv") as stream:
        return list(csv.DictReader(stream))


def _prepared(path: Path) -> dict[str, Any]:
    """The file as the index judged it: the total batch gives way to the micro batch, which is 1 where both are missing."""
    data = dict(load(path).data)
    if "train_micro_batch_size_per_gpu" in data:
        data.pop("train_batch_size", None)
    elif "train_batch_size" not in data:
        data["train_micro_batch_size_per_gpu"] = 1
    return data


def _read(dialect: Dialect, path: Path, lenient: bool = False) -> Config:
    read: Callable[..., Config] = dialect.read
    return read(_prepared(path), version=RELEASE, world_size=1, lenient=lenient, auto=AUTO)


def _names(index: list[dict[str, str]], accepted: bool) -> Iterator[str]:
    return (
        row["file"] for row in index if (row["auto_resolved_at_0_19_8"] == "accept") is accepted
    )


def test_accepted_files_are_read(
    deepspeed: Dialect, folder: Path, index: list[dict[str, str]]
) -> None:
    names = list(_names(index, True))
    assert len(names) == 44
    for name in names:
        config = _read(deepspeed, folder / name)
        ignored = [(one.path, one.effect) for one in config.remarks if "ignores it" in one.message]
        assert ignored == [(key, Effect.NONE) for file, key in IGNORED.items() if file == name]


@pytest.mark.parametrize("lenient", [False, True])
def test_refused_files_are_refused(
    deepspeed: Dialect, folder: Path, index: list[dict[str, str]], lenient: bool
) -> None:
    names = list(_names(index, False))
    assert len(names) == 19
    for name in names:
        with pytest.raises(BridgeError) as raised:
            _read(deepspeed, folder / name, lenient)
        assert all(":" in problem and "\n" not in problem for problem in raised.value.problems)


def test_unresolved_auto_is_refused(
    deepspeed: Dialect, folder: Path, index: list[dict[str, str]]
) -> None:
    automatic = [
        row["file"]
        for row in index
        if row["auto_values"] != "0" and row["auto_resolved_at_0_19_8"] == "accept"
    ]
    assert len(automatic) == 12
    for name in automatic:
        with pytest.raises(BridgeError, match='found "auto"'):
            deepspeed.read(folder / name, version=RELEASE)


def test_written_back_means_the_same(
    deepspeed: Dialect,
    folder: Path,
    index: list[dict[str, str]],
    real: Callable[..., Any],
    held: Callable[[Any], Mapping[str, Any]],
) -> None:
    for name in _names(index, True):
        config = _read(deepspeed, folder / name)
        written = deepspeed.write(config)
        again = deepspeed.read(written, version=RELEASE, world_size=1)
        assert again.given == config.given
        assert dict(again.opaque) == dict(config.opaque)
        theirs = real(json.loads(written.text))
        assert not isinstance(theirs, str), (name, theirs)
        assert_same(config, held(theirs), name)


def assert_same(config: Config, theirs: Mapping[str, Any], name: str) -> None:
    ours = config.effective
    both = [path for path in theirs if path in ours]
    assert len(both) > 150
    for path in both:
        value = list(ours[path]) if isinstance(ours[path], tuple) else ours[path]
        assert value == theirs[path], (name, path)


@pytest.mark.parametrize("release", ["0.12.0", "0.16.1", "0.19.2"])
def test_each_becomes_a_megatron_launch(
    deepspeed: Dialect, folder: Path, index: list[dict[str, str]], release: str
) -> None:
    megatron = compat.load("megatron")
    for name in _names(index, True):
        source = _read(deepspeed, folder / name)
        result = translate(source, megatron, release)
        again = megatron.read(result.written.text, release, result.config.world_size)
        assert again.given == result.config.given, name
        assert lift(again) == lift(result.config), name


def test_the_real_megatron_class_accepts_each(
    deepspeed: Dialect, folder: Path, index: list[dict[str, str]]
) -> None:
    core = pytest.importorskip("megatron.core")
    for name in _names(index, True):
        source = _read(deepspeed, folder / name)
        result = translate(source, compat.load("megatron"), core.__version__)
        real = result.config.to_object()
        assert real.tensor_model_parallel_size == 1
        assert real.bf16 == source.effective["bf16.enabled"], name
        assert real.fp16 == source.effective["fp16.enabled"], name
