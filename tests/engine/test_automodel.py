"""Scripts and recipes in AutoModel's words train models of Hugging Face as plain transformers does."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import compat.automodel
from bridge.cli import run as stagebridge
from bridge.errors import ConfigError
from bridge.files import load
from tests.engine import automodel_runs
from tests.engine.automodel_runs import (
    RATE,
    criterion,
    evaluated,
    plain,
    recipe,
    recipe_by_hand,
    recipes,
    scripted,
    words,
)
from tests.engine.blocks import small
from tests.engine.pool import Run

pytest.importorskip("transformers")

EXAMPLES = Path(__file__).parents[2] / "examples" / "automodel" / "small"
NAMED = [
    ["model.embed_tokens", "model.rotary_emb", "model.layers.0"],
    [
        "model.rotary_emb",
        "model.layers.1",
        "model.layers.2",
        "model.layers.3",
        "model.norm",
        "lm_head",
    ],
]
COLUMNS = "nemo_automodel.components.datasets.llm.column_mapped_text_instruction_dataset.ColumnMappedTextInstructionDataset"
TABLE = "0F0,,0F1,,0B0,0F2,0B1,0F3,0B2,,0B3\n,1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3\n"
SCRIPTS: dict[str, dict[str, Any]] = {
    "1f1b": {"pp_schedule": "1f1b"},
    "two layers a stage": {"pp_schedule": "Interleaved1F1B", "layers_per_stage": 1},
    "zero bubble": {"pp_schedule": "InterleavedZeroBubble"},
    "a V": {"pp_schedule": "ZBVZeroBubble"},
    "parts by name": {"module_fqns_per_model_part": NAMED},
    "csv": {"pp_schedule_csv": "table.csv"},
}


@pytest.mark.parametrize("case", SCRIPTS)
def test_a_script_of_autopipeline_trains_as_plain_transformers(
    run: Run, tmp_path: Path, case: str
) -> None:
    settings, expected = dict(SCRIPTS[case]), plain("llama")
    if case == "csv":
        (tmp_path / "table.csv").write_text(TABLE)
        settings["pp_schedule_csv"] = str(tmp_path / "table.csv")
    found = run(2, scripted, "llama", settings)
    last = next(each for each in found if each["losses"][0])
    assert last["losses"][0] == pytest.approx(expected["losses"][0], rel=1e-9)
    assert last["losses"] == [pytest.approx(losses, rel=1e-6) for losses in expected["losses"]]
    assert last["output"] == (automodel_runs.ROWS, 12, automodel_runs.VOCAB)
    weights = {name: weight for each in found for name, weight in each["weights"].items()}
    assert weights.keys() == expected["weights"].keys()
    assert (
        max(
            float((weights[name] - wanted.detach()).abs().max())
            for name, wanted in expected["weights"].items()
        )
        < 1e-7
    )
    assert "lm_head" in last["parts"][-1]
    if case == "parts by name":
        assert "model.layers.1" in found[1]["parts"][0]
        assert "model.layers.1" not in found[0]["parts"][0]


def test_gradients_add_up_over_data_ranks_and_batches_and_evaluation_trains_nothing(
    run: Run,
) -> None:
    halves, mean = run(2, evaluated)
    assert halves == mean
    assert halves["scaled"] == pytest.approx(halves["once"] / automodel_runs.ROWS, rel=1e-9)
    assert halves["twice"] == pytest.approx(2 * halves["once"], rel=1e-9)
    assert halves["eval"] == pytest.approx(halves["losses"], rel=1e-9)


def test_what_cannot_be_cut_so_is_refused() -> None:
    with pytest.raises(ConfigError, match="found no world_mesh; pass a DeviceMesh"):
        compat.automodel.AutoPipeline()
    with pytest.raises(ConfigError, match="world_mesh has dp, expected pp among them"):
        pipeline_of("dp")
    with pytest.raises(
        ConfigError, match="pp_batch_size: found 3, expected a multiple of pp_microbatch_size"
    ):
        pipeline_of(pp_batch_size=3, pp_microbatch_size=2)
    with pytest.raises(ConfigError, match="found no loss_fn"):
        pipeline_of().build(small("llama"))
    with pytest.raises(ConfigError, match="found Linear, expected a model of Hugging Face"):
        pipeline_of().build(torch.nn.Linear(2, 2), loss_fn=criterion)
    with torch.device("meta"), pytest.raises(ConfigError, match="weights without values"):
        pipeline_of().build(small("llama"), loss_fn=criterion)
    for parts, message in (
        ([*NAMED[:1], ["model.layers.9"]], "part 1: the model has no module 'model.layers.9'"),
        ([NAMED[0], [*NAMED[1], "model.layers.0"]], "model.layers.0 is in 2 parts, expected one"),
        (
            [[*NAMED[0], "model.norm"], [*NAMED[1][:-2], "lm_head"]],
            "model.norm, lm_head run together",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            pipeline_of(module_fqns_per_model_part=parts).build(small("llama"), loss_fn=criterion)
    with pytest.raises(
        AttributeError, match="stagebridge provides these names of AutoModel: AutoPipeline"
    ):
        _ = compat.automodel.Trainer


@pytest.mark.parametrize(
    ("ranks", "distributed"),
    [
        (1, {}),
        (2, {}),
        (
            2,
            {"pp_size": 2, "pipeline": {"pp_schedule": "interleaved1f1b", "pp_microbatch_size": 2}},
        ),
    ],
)
def test_a_recipe_trains_as_plain_transformers(
    run: Run, llama: Path, ranks: int, distributed: dict[str, Any]
) -> None:
    data = recipe(llama, **distributed)
    if ranks == 2 and not distributed:
        data["step_scheduler"]["local_batch_size"] = 2
    expected = recipe_by_hand(llama)
    for found in run(ranks, recipes, data):
        assert found[0][0] == pytest.approx(expected[0][0], rel=1e-9)
        assert found == [pytest.approx(line, rel=1e-6) for line in expected]


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "RMSprop": {"alpha": 0.9, "momentum": 0.5, "centered": True, "weight_decay": 0.1},
    "NAdam": {"momentum_decay": 0.01, "decoupled_weight_decay": True, "weight_decay": 0.1},
    "Adagrad": {"initial_accumulator_value": 0.1, "lr_decay": 0.1},
    "Adamax": {"betas": [0.5, 0.9]},
    "RAdam": {"eps": 1e-6},
    "Adadelta": {"rho": 0.5},
    "Rprop": {"etas": [0.4, 1.3]},
    "AdamW": {"amsgrad": True, "weight_decay": 0.1},
    "SGD": {"momentum": 0.9, "nesterov": True, "maximize": True},
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_recipe_trains_by_the_optimizer_that_it_names(
    llama: Path, kind: str, monkeypatch: Any
) -> None:
    monkeypatch.chdir(llama.parent)
    data, expected = recipe(llama), recipe_by_hand(llama, kind, **OPTIMIZERS[kind])
    data["optimizer"] = {"_target_": f"torch.optim.{kind}", "lr": RATE, **OPTIMIZERS[kind]}
    data["checkpoint"] = {"enabled": True, "checkpoint_dir": "out"}
    data["step_scheduler"] |= {"ckpt_every_steps": 2}
    assert recipes(0, 1, data) == [pytest.approx(line, rel=1e-7) for line in expected]
    again = recipes(0, 1, data, None, "out/epoch_0_step_1")
    assert again == [pytest.approx(line, rel=1e-7) for line in expected[2:]]


def test_an_optimizer_of_torch_updates_slices(run: Run, llama: Path) -> None:
    data, expected = recipe(llama), recipe_by_hand(llama, "RMSprop", alpha=0.9)
    data["optimizer"] = {"_target_": "torch.optim.RMSprop", "lr": RATE, "alpha": 0.9}
    for found in run(2, recipes, data):
        assert found == [pytest.approx(line, rel=1e-6) for line in expected]


def test_the_example_gives_the_same_losses_over_two_stages(run: Run) -> None:
    """In bf16 over weights in fp32, where the second stage knows the format of what it does not have."""
    one, two = (load(EXAMPLES / f"{name}.yaml").data for name in ("recipe", "pipeline"))
    expected = recipes(0, 1, one, 2)
    for found in run(2, recipes, two, 2):
        assert found == [pytest.approx(line, rel=1e-3) for line in expected]


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A folder with a small Llama and a tokenizer."""
    small("llama").save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def test_train_runs_what_a_recipe_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    data = recipe(Path("llama"))
    small("llama", vocab_size=264).save_pretrained("llama")
    words(Path("llama"))
    rows = (
        {"prompt": f"What is {number}?", "completion": f"It is {number}."} for number in range(16)
    )
    Path("train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data["dataset"] = {
        "_target_": COLUMNS,
        "path_or_dataset_id": "train.jsonl",
        "column_mapping": {"question": "prompt", "answer": "completion"},
    }
    data["validation_dataset"] = {**data["dataset"], "limit_dataset_samples": 3}
    data["step_scheduler"] |= {"val_every_steps": 2, "ckpt_every_steps": 3}
    data["checkpoint"] = {"enabled": True, "checkpoint_dir": "out", "save_consolidated": True}
    data["trainer_notes"] = {"of": "nobody"}
    Path("recipe.json").write_text(json.dumps(data))
    assert (
        stagebridge(
            ["train", "recipe.json", "--from", "automodel", "--steps", "4", "--json", "--lenient"]
        )
        == 1
    )
    assert "trainer_notes" in capsys.readouterr().err
    del data["trainer_notes"]
    Path("recipe.json").write_text(json.dumps(data))
    assert (
        stagebridge(["train", "recipe.json", "--from", "automodel", "--steps", "4", "--json"]) == 0
    )
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    assert [line["step"] for line in lines if "val_loss" in line] == [2, 3, 4]
    assert [line["saved"] for line in lines if "saved" in line] == [
        f"out/epoch_{epoch}_step_{step}" for epoch, step in ((0, 1), (1, 2), (1, 3))
    ]
    assert (Path("out") / "epoch_1_step_3_consolidated" / "tokenizer.json").is_file()
    assert (
        stagebridge(
            [
                "train",
                "recipe.json",
                "--from",
                "automodel",
                "--steps",
                "6",
                "--json",
                "--resume",
                "out",
            ]
        )
        == 0
    )
    more = [
        line for line in map(json.loads, capsys.readouterr().out.splitlines()) if "loss" in line
    ]
    assert [line["step"] for line in more] == [5, 6]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model": {"pretrained_model_name_or_path": "somebody/huge"}},
            "somebody/huge is not on this machine, and nothing is",
        ),
        (
            {"model": {"_target_": "mine.Model"}},
            "model._target_: found mine.Model, expected NeMoAutoModelForCausalLM.from_pretrained",
        ),
        (
            {"dataset": {"_target_": "mine.make_data"}},
            "dataset._target_: found 'mine.make_data', which the native engine",
        ),
        ({"loss_fn": {"_target_": "mine.Loss"}}, "loss_fn._target_: found 'mine.Loss'"),
        (
            {"optimizer": {"_target_": "torch.optim.Nobody"}},
            "optimizer._target_: found Nobody; .* use one of torch.optim's",
        ),
        (
            {"optimizer": {"_target_": "bitsandbytes.optim.AdamW8bit"}},
            "optimizer._target_: found 'bitsandbytes.optim.AdamW8bit'; .* by a rule that no plan has",
        ),
        (
            {"recipe": "KnowledgeDistillationRecipeForNextTokenPrediction"},
            "recipe._target_: found 'KnowledgeDist",
        ),
        (
            {"packed_sequence": {"packed_sequence_size": 64}},
            "samples cannot be packed here; set it to 0",
        ),
        (
            {
                "peft": {
                    "_target_": "nemo_automodel.components._peft.lora.PeftConfig",
                    "dim": 4,
                    "match_all_linear": True,
                }
            },
            "pip install peft",
        ),
        (
            {"checkpoint": {"enabled": True, "checkpoint_dir": "/tmp/elsewhere"}},
            "leads out of .*, so nothing was written",
        ),
        ({"distributed": {"cp_size": 2}}, "context \\(2\\) does not divide world size"),
    ],
)
def test_a_recipe_that_cannot_run_says_what_to_do(
    llama: Path,
    monkeypatch: Any,
    capsys: pytest.CaptureFixture[str],
    change: dict[str, Any],
    message: str,
) -> None:
    monkeypatch.chdir(llama.parent)
    if "peft" in change and find_spec("peft"):
        pytest.skip("peft is installed")
    data = recipe(llama)
    for name, values in change.items():
        data[name] = {**data.get(name, {}), **values} if isinstance(values, dict) else values
    Path("recipe.json").write_text(json.dumps(data))
    assert stagebridge(["train", "recipe.json", "--from", "automodel", "--steps", "1"]) == 1
    assert re.search(message, capsys.readouterr().err)


class Mesh(SimpleNamespace):
    """A mesh of one rank."""

    def __getitem__(self, name: str) -> Any:
        return SimpleNamespace(size=lambda: 1)


def pipeline_of(axis: str = "pp", **settings: Any) -> Any:
    return compat.automodel.AutoPipeline(world_mesh=Mesh(mesh_dim_names=(axis,)), **settings)
