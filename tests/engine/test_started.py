"""What `convert --script` writes starts as it is; `tests/engine/started.py` starts ten launches, here one of them."""

from __future__ import annotations

import ast
import json
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from bridge.cli import run
from tests.engine.started import COURSE, SIZES, started


@pytest.mark.skipif(find_spec("megatron") is None, reason="needs megatron-core")
def test_a_launch_script_of_megatron_trains_as_it_is_written(tmp_path: Path) -> None:
    seen = started("SGD", "megatron", tmp_path)
    assert seen.trained, seen.failure
    assert seen.losses[-1] < seen.losses[0]


@pytest.fixture
def written(tmp_path: Path) -> Any:
    """What the script of a launch whose vocabulary is filled up defines, with its folder."""
    sizes = SIZES.replace("--make-vocab-size-divisible-by 1", "--make-vocab-size-divisible-by 96")
    (tmp_path / "launch.args").write_text(f"{sizes} {COURSE} --bf16")
    words = [
        "convert",
        str(tmp_path / "launch.args"),
        "--to",
        "deepspeed",
        "--world-size",
        "2",
        "--script",
    ]
    assert run([*words, "-o", str(tmp_path / "run.json")]) in (0, 2)
    text, found = (
        (tmp_path / "run.train.py").read_text(),
        {"__name__": "written", "__file__": str(tmp_path / "run.train.py")},
    )
    # Its arithmetic alone is looked at, so that DeepSpeed stays out of this process.
    kept = [
        line
        for line in ast.parse(text).body
        if "deepspeed" not in ast.unparse(line).partition("\n")[0]
    ]
    exec(compile(ast.Module(kept, []), "run.train.py", "exec"), found)
    return found


def test_first_weights_and_words_of_a_script_are_those_of_the_launch(
    written: Any, tmp_path: Path
) -> None:
    torch.manual_seed(1)
    model = written["build"](str(tmp_path / "run.model.json"))
    assert json.loads((tmp_path / "run.model.json").read_text())["vocab_size"] == 256
    assert model.get_input_embeddings().weight.shape[0] == 288
    spreads = {
        name: float(weight.detach().std())
        for name, weight in model.named_parameters()
        if weight.ndim > 1
    }
    for name, spread in spreads.items():
        end = name.endswith(("o_proj.weight", "down_proj.weight"))
        assert spread == pytest.approx(0.02 / (2 * 4) ** 0.5 if end else 0.02, rel=0.1), name


def test_a_script_takes_every_sample_once_in_a_pass_and_no_two_ranks_the_same(written: Any) -> None:
    class Engine:
        device = "cpu"
        train_micro_batch_size_per_gpu = staticmethod(lambda: 2)
        gradient_accumulation_steps = staticmethod(lambda: 2)

    samples = written["Samples"](torch.arange(8 * 32 + 1).numpy(), 32)
    seen: Counter[int] = Counter()
    for step in range(3):
        parts = [
            list(written["micro_batches"](samples, step, Engine(), rank, 2)) for rank in range(2)
        ]
        firsts = [int(row[0]) for rank in parts for inputs, _ in rank for row in inputs]
        assert all((targets == inputs + 1).all() for rank in parts for inputs, targets in rank)
        assert sorted(firsts) == [32 * number for number in range(8)], (
            "a step of eight samples is a pass"
        )
        seen[tuple(firsts)] += 1  # type: ignore[index]
    assert len(seen) == 3, "each pass has an order of its own"
