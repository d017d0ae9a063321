"""Scripts in Merak's words train models of Hugging Face as plain torch does, over pipeline and tensor ranks, and go on from a
checkpoint.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from conftest import Run
from merak_runs import limited, plain, trained

import compat.merak
from bridge.errors import ConfigError

pytest.importorskip("transformers")
pytest.importorskip("accelerate")


@pytest.mark.parametrize(("shape", "digits"), [((2, 1, 1), 1e-5), ((1, 2, 1), 1e-4)])
def test_a_script_of_merak_trains_as_plain_torch_and_resumes(
    run: Run, tmp_path: Path, shape: tuple[int, int, int], digits: float
) -> None:
    expected, evaluated = plain("llama")
    for found in run(2, trained, "llama", shape, tmp_path):
        *log, last = found["log"]
        for mine, theirs in zip(log, expected, strict=True):
            assert mine == pytest.approx(theirs, rel=digits)
        assert last == {"step": 4, "eval_loss": pytest.approx(evaluated, rel=digits)}
        assert found["resumed"] == [pytest.approx(line, rel=1e-6) for line in log[2:]]
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == ["iter_0000002", "iter_0000004"]


def test_old_checkpoints_go(run: Run, tmp_path: Path) -> None:
    run(2, partial(limited, folder=tmp_path))
    assert [path.name for path in tmp_path.glob("iter_*")] == ["iter_0000004"]


def test_arguments_are_merak_s_on_the_command_line() -> None:
    from transformers import HfArgumentParser

    words = ["--output_dir", "out", "--train_schedule", "1f1b", "--activation_checkpointing", "False", "--save", "True"]
    (found,) = HfArgumentParser(compat.merak.MerakArguments).parse_args_into_dataclasses([*words, "--use_cpu", "True"])
    assert (found.train_schedule, found.activation_checkpointing, found.save, found.partition_method) == (
        "1f1b",
        False,
        True,
        "uniform_floor",
    )


def test_what_the_engine_cannot_run_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"init: pp x tp x dp x sp is 4, and the launcher started 1 ranks"):
        compat.merak.init(2, 2, 1)
    with pytest.raises(ConfigError, match="set_tp_layer_lists: found conv_para_list"):
        compat.merak.set_tp_layer_lists(conv_para_list=["conv"])
    with pytest.raises(ConfigError, match="MerakTrainer: found no data"):
        compat.merak.MerakTrainer(model=object(), args=object())
    with pytest.raises(AttributeError, match="of Merak's own it has init"):
        _ = compat.merak.Trainer
