"""The use cases in Python: the examples of docs/python.md run as they stand there, print what they say, and nothing else."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import stagebridge
from bridge.cli import run as command
from bridge.cli.demo import launch_text
from bridge.errors import BridgeError, SourceError, TranslationError

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "python.md").read_text("utf-8")
BLOCKS = dict(re.findall(r"^## (\w+)\n.*?```python\n(.*?)```", PAGE, re.DOTALL | re.MULTILINE))
ENGINE = ("Inspect", "Move", "Verify")
SMALL = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 1},
}
SAYS = {
    "Read": "0.0003 ",
    "Check": "disable_allgather",
    "Convert": '"train_micro_batch_size_per_gpu"',
    "Diff": "memory or speed",
    "Layout": "0 {'weights': ",
    "Inspect": "native 1 ",
    "Move": "Nothing was taken away.",
    "Verify": "not run ",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A launch and what it becomes; with torch also a small config with a checkpoint of its run."""
    top = tmp_path_factory.mktemp("python")
    (top / "megatron.args").write_text(launch_text())
    (top / "small.json").write_text(json.dumps(SMALL))
    words = ["convert", str(top / "megatron.args"), "--to", "deepspeed", "--world-size", "8"]
    assert command([*words, "-o", str(top / "ds_config.json")]) == 0
    return top


def test_the_package_has_these_use_cases() -> None:
    assert {name.lower() for name in BLOCKS} == {*stagebridge.__all__} == {*map(str.lower, SAYS)}
    assert all(len(block.splitlines()) <= 5 for block in BLOCKS.values())


@pytest.mark.parametrize("name", [name for name in SAYS if name not in ENGINE])
def test_an_example_runs(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    exec(compile(BLOCKS[name], "docs/python.md", "exec"), {"__name__": "example"})
    said = capsys.readouterr()
    assert SAYS[name] in said.out and not said.err


@pytest.mark.skipif(find_spec("torch") is None, reason="checkpoints need torch")
def test_the_examples_on_checkpoints_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    assert command(["train", "small.json", "--steps", "1", "--save", "run"]) == 0
    for name in ENGINE:
        capsys.readouterr()
        exec(compile(BLOCKS[name], "docs/python.md", "exec"), {"__name__": "example"})
        said = capsys.readouterr()
        assert SAYS[name] in said.out and not said.err, name


def test_sources_are_files_mappings_and_words(folder: Path) -> None:
    flags = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --micro-batch-size 2 --lr 1e-3"
    run = stagebridge.read(
        f"{flags} --seq-length 64 --max-position-embeddings 64".split(), world_size=2
    )
    assert run.config.given["num_layers"] == 4 and run.plan.parallel.data == 2
    made = stagebridge.read({"train_micro_batch_size_per_gpu": 3}, dialect="deepspeed")
    assert made.plan.batch.micro == 3
    assert stagebridge.read(folder / "small.json").config.dialect.name == "deepspeed"
    with pytest.raises(SourceError, match="the mapping: no stack recognises it"):
        stagebridge.read({"hello": 1})


def test_a_loss_is_an_error_that_has_the_translation(folder: Path) -> None:
    with pytest.raises(TranslationError, match="strict: nothing was written") as caught:
        stagebridge.convert(folder / "megatron.args", "fast_llm", world_size=8, strict=True)
    assert isinstance(caught.value, BridgeError) and caught.value.part.source.given["lr"] == 0.0003


def test_notes_are_in_the_result(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    converted = stagebridge.convert(folder / "ds_config.json", "megatron")
    assert any("is read too" in line for line in converted.notes)
    assert not any(capsys.readouterr())


@pytest.mark.parametrize("source", [None, 5, b"{}", [1, 2], ["--micro-batch-size", 2]])
def test_what_is_no_source_is_an_error_that_says_so(source: Any) -> None:
    with pytest.raises(SourceError, match="expected the name of a file, a mapping of settings"):
        stagebridge.read(source)


@pytest.mark.parametrize("ranks", [0, -1, 2.5, True, "8", 2**30])
def test_numbers_of_ranks_are_whole_ones(ranks: Any) -> None:
    with pytest.raises(SourceError, match=r"world_size: found .*, expected a whole number from 1"):
        stagebridge.read(SMALL, world_size=ranks)


def test_one_option_is_a_list_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    auto = {"train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto", "zero_optimization": {"stage": 2}}  # fmt: skip
    (tmp_path / "zero2.json").write_text(json.dumps(auto))
    (tmp_path / "args.json").write_text('{"max_grad_norm": 0.3}')
    for options in ({"auto_from": "args.json"}, {"auto_from": [Path("args.json")]}):
        made = stagebridge.read("zero2.json", world_size=1, allow="/nowhere", **options)
        assert made.plan.optimizer.clip == 0.3
    (tmp_path / "train.sh").write_text(
        "torchrun --nproc_per_node 1 pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4"
        " --seq-length 64 --max-position-embeddings 64 --micro-batch-size $MB --train-iters 3\n"
    )
    assert stagebridge.read("train.sh", env={"MB": 4}).plan.batch.micro == 4


@pytest.mark.parametrize("output", [".", "", "/", "-"])
def test_an_output_is_a_file(output: str) -> None:
    with pytest.raises(SourceError, match=r"output: found .* expected the name of a file to write"):
        stagebridge.convert(SMALL, "fast_llm", output=output)
