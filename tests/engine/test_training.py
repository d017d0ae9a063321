"""Training from a config: data by number, sizes that fit, the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

import compat
from bridge.cli import run as cli
from bridge.engine.data import Text
from bridge.engine.fields import accumulation_of, check
from bridge.engine.fit import fit
from bridge.engine.models.gpt import Architecture
from bridge.engine.training import Training
from bridge.errors import SourceError
from bridge.layout.pipeline import Pipeline
from bridge.plan.plan import Plan
from tests.engine.runs import Case, data_order

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 2e-3}},
    "zero_optimization": {"stage": 2},
    "gradient_clipping": 1.0,
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A DeepSpeed config on disk."""
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(CONFIG))
    return path


def test_data_depends_on_samples_consumed_only(run: Any) -> None:
    values = {"optimizer.lr": 0.01, "batch.micro": 2}
    alone = run(1, data_order, Case({**values, "batch.accumulation": 4}))[0]
    for world, accumulation in ((2, 2), (4, 1)):
        ranks = run(world, data_order, Case({**values, "batch.accumulation": accumulation}))
        for step, expected in enumerate(alone):
            assert sorted(row for rank in ranks for row in rank[step]) == sorted(expected)
    assert alone[0] != alone[1]


def test_samples_are_shifted_by_one_token() -> None:
    text = Text.of(None, 16)
    sample = text.sample(5)
    assert len(sample) == 17 and bytes(sample.tolist()).decode("ascii")
    assert torch.equal(sample, Text.of(None, 16).sample(5)) and not torch.equal(
        sample, text.sample(6)
    )


def test_texts_too_short_or_missing_are_said(tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("abc")
    with pytest.raises(
        SourceError,
        match=r"short.txt: found 3 bytes, expected more than 16, the tokens of a sequence",
    ):
        Text.of(short, 16)
    with pytest.raises(
        SourceError, match=r"none.txt: No such file or directory; give a file of text"
    ):
        Text.of(tmp_path / "none.txt", 16)


sizes = st.none() | st.integers(1, 9)
plans = st.builds(
    lambda data, tensor, pipeline, micro, global_, sequence, name, rule: Plan.model_validate(
        {
            "parallel": {"data": data, "tensor": tensor, "pipeline": pipeline, "sequence": sequence},
            "batch": {"micro": micro, "global_": global_},
            "schedule": {"name": name},
            "stages": {"rule": rule},
        }
    ),
    sizes, sizes, sizes, sizes, sizes | st.just(48), st.none() | st.booleans(),
    st.sampled_from([None, "1f1b", "interleaved_1f1b", "zero_bubble_v", "shifted_critical_path"]),
    st.sampled_from([None, "even", "parameters"]),
)  # fmt: skip


@given(plans, st.sampled_from([1, 2, 3, 4, 6, 8]), st.sampled_from([1, 4, 12]))
def test_a_fitted_plan_runs_and_every_change_is_said(plan: Plan, world: int, heads: int) -> None:
    shape = Architecture(layers=4, heads=heads)
    fitted, findings = fit(plan, world, shape)
    mesh, _ = check(fitted, world)
    Pipeline.of(fitted, shape.facts(), accumulation_of(fitted, mesh.sizes["data"]))
    assert mesh.world == world and heads % mesh.sizes["tensor"] == 0
    before, after = dict(plan.values()), dict(fitted.values())
    changed = {path for path in before if before[path] != after.get(path)}
    assert changed <= {finding.path for finding in findings}
    assert fit(fitted, world, shape)[0] == fitted


@pytest.mark.parametrize(
    ("world", "asked", "kept"),
    [
        (2, {"pipeline": 4, "data": 2}, (1, 2, 1)),
        (4, {"pipeline": 2, "tensor": 2, "data": 2}, (1, 2, 2)),
        (4, {"pipeline": 4}, (1, 4, 1)),
        (6, {"pipeline": 4}, (2, 3, 1)),
        (8, {"pipeline": 8}, (2, 4, 1)),
    ],
)
def test_pipelines_shrink_no_more_than_ranks_and_layers_ask_for(
    world: int, asked: dict[str, int], kept: tuple[int, int, int]
) -> None:
    values = {
        "batch.micro": 1,
        "batch.global_": 16,
        "schedule.name": "1f1b",
        "stages.boundaries": (0, 1, 9),
    }
    plan = Plan.of({**values, **{f"parallel.{axis}": size for axis, size in asked.items()}})
    fitted, _ = fit(plan, world, Architecture(layers=3))
    sizes = check(fitted, world)[0].sizes
    assert (sizes["data"], sizes["pipeline"], sizes["tensor"]) == kept
    assert fitted.schedule.name == "1f1b" and fitted.stages.boundaries is None


def test_the_loss_falls_by_a_fifth() -> None:
    plan = Plan.of({"optimizer.lr": 2e-3, "batch.micro": 8})
    reports = list(Training.of(plan, Architecture(2, 64, 4, 4, 128, 256, 32)).steps(20))
    assert reports[-1].loss < 0.8 * reports[0].loss
    assert [report.step for report in reports] == list(range(1, 21))


def test_train_on_a_file(config: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert (
        cli(["train", str(config), "--steps", "2", "--json", "--save", str(tmp_path / "run")]) == 0
    )
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["step"] for row in rows] == [1, 2] and rows[1]["loss"] < rows[0]["loss"]
    assert (
        cli(["train", str(config), "--steps", "3", "--json", "--resume", str(tmp_path / "run")])
        == 0
    )
    (row,) = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert row["step"] == 3 and row["loss"] < rows[1]["loss"]
    assert cli(["train", str(config), "--steps", "1"]) == 0
    assert capsys.readouterr().out.startswith("step 1  loss ")


ENGINES = " or ".join(("native", "auto", *compat.backends()))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--engine", "natve"], f"--engine: found natve, expected {ENGINES}; did you mean native?"),
        (
            ["--model", "big"],
            "--model: found big, expected tiny or file, or a folder with a config.json",
        ),
        (["--model", "file"], "model.heads: the file does not state this size; use --model tiny"),
        (["--data", "nowhere.txt"], "nowhere.txt: No such file or directory; give a file of text"),
        (
            ["--resume", "nowhere"],
            "nowhere: found no file 'latest', which would name a checkpoint; give a tag, or save first",
        ),
    ],
)
def test_what_cannot_be_done_is_one_line(
    config: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert cli(["train", str(config), *arguments]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == f"error: {message}"


def test_deterministic_training_gives_the_same_bits(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = []
    try:
        for _ in range(2):
            assert cli(["train", str(config), "--steps", "2", "--json", "--deterministic"]) == 0
            rows.append([json.loads(line) for line in capsys.readouterr().out.splitlines()])
            assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    first, second = ([(row["loss"], row["grad_norm"]) for row in run] for run in rows)
    assert len(first) == 2 and first == second


def test_what_no_plan_holds_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({**CONFIG, "steps_per_print": 5, "gradient_allreduce_op": "sum"}))
    assert cli(["train", str(path), "--steps", "1"]) == 0
    notes = capsys.readouterr().err.splitlines()
    assert (
        "note: gradient_allreduce_op: DeepSpeed sums gradients instead of averaging them (different numbers)"
        in notes
    )
    assert not any("steps_per_print" in note for note in notes)


MEGATRON = "--tensor-model-parallel-size {} --micro-batch-size 2 --global-batch-size 8 --num-layers 4 --hidden-size 64"


def test_sizes_that_do_not_fit_come_with_the_command_that_would(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "launch.args"
    rest = " --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --lr 1e-3 --train-iters 20"
    path.write_text(MEGATRON.format(2) + rest)
    assert cli(["train", str(path), "--steps", "2"]) == 1
    command = f"PYTHONSAFEPATH=1 torchrun --nproc-per-node 2 -m stagebridge train {path}"
    assert (
        f"to run the plan unchanged: {command}; or shrink sizes with --fit"
        in capsys.readouterr().err
    )
    assert cli(["train", str(path), "--steps", "2", "--fit", "--model", "file"]) == 0
    streams = capsys.readouterr()
    assert (
        "note: parallel.tensor: changed from 2 to 1, to fit 1 ranks (memory or speed)"
        in streams.err
    )
    assert streams.out.splitlines()[1].startswith("step 2  loss ")


SETTINGS = (
    "--attention-dropout 0.1",
    "--attention-dropout 0.9",
    "--hidden-dropout 0.1",
    "--norm-epsilon 0.5",
    "--window-size (3,0)",
    "--init-method-std 0.1",
    "--normalization RMSNorm",
    "--swiglu",
    "--kv-channels 32",
    "--qk-layernorm",
    "--untie-embeddings-and-output-weights",
    "--position-embedding-type rope",
    "--position-embedding-type rope --rotary-base 50",
    "--position-embedding-type rope --rotary-percent 0.5",
    "--disable-bias-linear",
    "--num-experts 4",
    "--multi-latent-attention",
)


def test_the_model_of_a_file_has_the_settings_of_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "launch.args"
    usual = (
        "--micro-batch-size 2 --global-batch-size 4 --num-layers 2 --hidden-size 32 --lr 1e-2"
        " --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --train-iters 20"
    )
    drops = ("--attention-dropout 0", "--hidden-dropout 0")
    losses: dict[str, str] = {}
    for setting in ("", *SETTINGS):
        others = [drop for drop in drops if drop.split()[0] not in setting]
        path.write_text(" ".join((usual, *others, setting)))
        code = cli(["train", str(path), "--steps", "2", "--model", "file", "--json"])
        streams = capsys.readouterr()
        if code:
            assert "error: " in streams.err
            continue
        steps = [json.loads(line) for line in streams.out.splitlines()]
        losses[setting] = str([step["loss"] for step in steps])
    assert len(losses) >= len(SETTINGS) - 2
    assert len({*losses.values()}) == len(losses), losses
