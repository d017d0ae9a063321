"""Scripts and recipes in AutoModel's words train models of Hugging Face as plain transformers does."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import automodel_runs
import pytest
import torch
from automodel_runs import criterion, evaluated, plain, scripted
from blocks import small
from conftest import Run

import compat.automodel
from bridge.errors import ConfigError

pytest.importorskip("transformers")

NAMED = [
    ["model.embed_tokens", "model.rotary_emb", "model.layers.0"],
    ["model.rotary_emb", "model.layers.1", "model.layers.2", "model.layers.3", "model.norm", "lm_head"],
]
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
def test_a_script_of_autopipeline_trains_as_plain_transformers(run: Run, tmp_path: Path, case: str) -> None:
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
    assert max(float((weights[name] - wanted.detach()).abs().max()) for name, wanted in expected["weights"].items()) < 1e-7
    assert "lm_head" in last["parts"][-1]
    if case == "parts by name":
        assert "model.layers.1" in found[1]["parts"][0]
        assert "model.layers.1" not in found[0]["parts"][0]


def test_gradients_add_up_over_data_ranks_and_batches_and_evaluation_trains_nothing(run: Run) -> None:
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
    with pytest.raises(ConfigError, match="pp_batch_size: found 3, expected a multiple of pp_microbatch_size"):
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
        ([[*NAMED[0], "model.norm"], [*NAMED[1][:-2], "lm_head"]], "model.norm, lm_head run together"),
    ):
        with pytest.raises(ConfigError, match=message):
            pipeline_of(module_fqns_per_model_part=parts).build(small("llama"), loss_fn=criterion)
    with pytest.raises(AttributeError, match="of AutoModel's own it has AutoPipeline"):
        _ = compat.automodel.Trainer


class Mesh(SimpleNamespace):
    """A mesh of one rank."""

    def __getitem__(self, name: str) -> Any:
        return SimpleNamespace(size=lambda: 1)


def pipeline_of(axis: str = "pp", **settings: Any) -> Any:
    return compat.automodel.AutoPipeline(world_mesh=Mesh(mesh_dim_names=(axis,)), **settings)
