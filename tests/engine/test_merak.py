"""Scripts in Merak's words train models of Hugging Face as plain torch does, over pipeline and tensor ranks, and go on from a
checkpoint.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import compat.merak
from bridge.errors import BridgeError, ConfigError
from tests.engine.blocks import small
from tests.engine.merak_runs import Rows, arguments, flagged, limited, other_kinds, plain, trained
from tests.engine.pool import Run

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

    words = [
        "--output_dir",
        "out",
        "--train_schedule",
        "1f1b",
        "--activation_checkpointing",
        "False",
        "--save",
        "True",
    ]
    (found,) = HfArgumentParser(compat.merak.MerakArguments).parse_args_into_dataclasses(
        [*words, "--use_cpu", "True"]
    )
    assert (
        found.train_schedule,
        found.activation_checkpointing,
        found.save,
        found.partition_method,
    ) == ("1f1b", False, True, "uniform_floor")


def test_lists_of_words_are_taken_on_the_command_line() -> None:
    from transformers import HfArgumentParser

    words = "--output_dir out --use_cpu True --input_names input_ids attention_mask --custom_partition 1 3"
    (args,) = HfArgumentParser(compat.merak.MerakArguments).parse_args_into_dataclasses(
        words.split()
    )
    assert args.input_names == ["input_ids", "attention_mask"] and args.custom_partition == [
        "1",
        "3",
    ]


def test_the_time_of_each_part_of_a_step_is_printed(run: Run, tmp_path: Path) -> None:
    timed = run(1, flagged, tmp_path, ["--wall_clock_breakdown", "true"])[0]
    assert timed["timed"] == len(timed["lines"]) > 0
    off = ["--wall_clock_breakdown", "false"]  # on by default, as in Merak
    assert run(1, flagged, tmp_path, off)[0]["timed"] == 0


def test_names_that_scripts_import_beside_are_there() -> None:
    from compat.merak.utils import datasets
    from compat.merak.utils.datasets import DynamicGenDataset

    from compat.merak.core import mpu
    from compat.merak.core.printer import AccMetric

    compat.merak.init(1, 1, 1)
    assert (
        mpu.get_data_parallel_rank(),
        mpu.get_pipe_parallel_world_size(),
        mpu.is_pipeline_last_stage(),
    ) == (0, 1, True)
    metric = AccMetric()
    for value in (1.0, 2.0):
        metric.update("loss", torch.tensor(value))
    assert metric.avg == {"loss": 1.5} and metric.avg == {}
    config = SimpleNamespace(max_position_embeddings=6, num_labels=3, vocab_size=9)
    data = DynamicGenDataset(config, mode="condition", dataset_size=1e6)
    assert len(data) == 10**6 and {
        name: len(value) for name, value in data[7].items()
    } == dict.fromkeys(data[7], 6)
    assert torch.equal(data[7]["labels"], data[7]["labels"]) and not torch.equal(
        data[7]["labels"], data[8]["labels"]
    )
    assert DynamicGenDataset(config, "vision_only", image_size=4)[0]["pixel_values"].shape == (
        3,
        4,
        4,
    )
    with pytest.raises(
        ConfigError, match="DynamicGenDataset: found mode 'sound', expected one of text_only"
    ):
        DynamicGenDataset(config, mode="sound")
    with pytest.raises(
        AttributeError,
        match=r"datasets' has no attribute 'Other'; stagebridge provides these names of Merak: ",
    ):
        _ = datasets.Other
    with pytest.raises(
        BridgeError, match=r"mpu.get_data_parallel_group: the engine has its own process groups"
    ):
        mpu.get_data_parallel_group()


def test_points_at_which_a_graph_would_be_split_are_among_the_findings(tmp_path: Path) -> None:
    compat.merak.init(1, 1, 1)
    args = arguments(tmp_path, gradient_accumulation_steps=1)
    args.custom_split_points = ["transformer.h.1"]
    trainer = compat.merak.MerakTrainer(
        model=small("gpt2").float(), args=args, train_dataset=Rows()
    )
    assert "args.custom_split_points" in {finding.path for finding in trainer.findings}


def test_a_script_may_make_its_own_optimizer_and_data_loader_and_get_tuples(tmp_path: Path) -> None:
    from transformers.modeling_outputs import CausalLMOutput

    model, seen, kinds = small("gpt2").float(), [], set[type]()
    model.config.return_dict = False

    class Own(compat.merak.MerakTrainer):  # type: ignore[misc, name-defined]
        def get_loss_fn(self) -> Any:
            def loss_fn(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
                logits = outputs[0] if isinstance(outputs, tuple) else outputs
                kinds.add(type(outputs))
                return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

            return loss_fn

        def create_optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
            return torch.optim.SGD(model.parameters(), lr=0.5)

        def create_dataloader(self) -> None:
            seen.append(self.input_to_stage_dic[0][0])
            self.train_dataloader = torch.utils.data.DataLoader(
                self.train_dataset, batch_sampler=self.get_train_sampler()
            )

    compat.merak.init(1, 1, 1)
    args = arguments(
        tmp_path,
        gradient_accumulation_steps=1,
        max_steps=2,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
    )
    trainer = Own(model=model, args=args, train_dataset=Rows())
    before = {name: weight.clone() for name, weight in trainer.engine.state_dict()}
    trainer.train()
    assert kinds == {torch.Tensor}, "a tuple of one is that one"
    given = trainer._loss_argument(CausalLMOutput(loss=torch.zeros(()), logits=torch.ones(2)))
    assert isinstance(given, tuple) and [each.tolist() for each in given] == [0, [1, 1]]
    assert seen == ["input_ids"] and [line["learning_rate"] for line in trainer.log_history] == [
        0.5,
        0.5,
    ]
    assert any(
        not torch.equal(weight, before[name]) for name, weight in trainer.engine.state_dict()
    )


def test_leaf_modules_are_among_the_findings(tmp_path: Path) -> None:
    compat.merak.init(1, 1, 1)
    args = arguments(tmp_path, gradient_accumulation_steps=1)
    model, leaves = small("gpt2").float(), (torch.nn.Linear,)
    trainer = compat.merak.MerakTrainer(
        model=model, args=args, train_dataset=Rows(), leaf_modules=leaves
    )
    told = {finding.path: finding.message for finding in trainer.findings}
    assert (
        told["leaf_modules"]
        == "the engine does not trace the model, so the leaf modules Linear have no effect"
    )


@pytest.mark.parametrize(
    ("name", "shape"), [("t5", (2, 1, 1)), ("dinov2", (1, 2, 1)), ("convnext", (1, 2, 1))]
)
def test_models_of_other_kinds_train_over_two_ranks_as_on_one(
    run: Run, tmp_path: Path, name: str, shape: tuple[int, int, int]
) -> None:
    alone = run(1, other_kinds, name, (1, 1, 1), tmp_path)[0]
    found = run(2, other_kinds, name, shape, tmp_path)[0]
    assert found["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    # The names in the lists are those of older releases of transformers; ConvNeXt never had them.
    assert found["split"] == {"t5": 0, "dinov2": 40, "convnext": 0}[name]
    told = {path for path in found["findings"] if path.startswith("set_tp_layer_lists")}
    assert told == (
        {"set_tp_layer_lists.col_para_list", "set_tp_layer_lists.row_para_list"}
        if name == "convnext"
        else set()
    )


def test_what_the_engine_cannot_run_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"init: pp x tp x dp x sp is 4, and the launcher started 1 ranks"
    ):
        compat.merak.init(2, 2, 1)
    with pytest.raises(ConfigError, match="set_tp_layer_lists: found conv_para_list"):
        compat.merak.set_tp_layer_lists(conv_para_list=["conv"])
    with pytest.raises(ConfigError, match="MerakTrainer: found no data"):
        compat.merak.MerakTrainer(model=object(), args=object())
    with pytest.raises(AttributeError, match="stagebridge provides these names of Merak: init"):
        _ = compat.merak.Trainer


@pytest.mark.parametrize("name", ["evaluation_strategy", "eval_strategy"])
def test_a_strategy_of_evaluation_is_heard_under_both_of_its_names(
    tmp_path: Path, name: str
) -> None:
    assert arguments(tmp_path, **{name: "epoch"}).do_eval
    assert not arguments(tmp_path, **{name: "no"}).do_eval


def trainer_of(folder: Path, model: Any, kind: Any = None, **more: Any) -> Any:
    """A trainer of one rank, whose steps are microbatches."""
    compat.merak.init(1, 1, 1)
    args = arguments(folder, **{"gradient_accumulation_steps": 1, **more})
    return (kind or compat.merak.MerakTrainer)(model=model, args=args, train_dataset=Rows())


def test_a_warmup_ratio_is_a_share_of_the_steps_unless_steps_are_given(tmp_path: Path) -> None:
    for more, expected in (
        ({"warmup_steps": 0, "warmup_ratio": 0.5}, [0, 0.005, 0.01, 0.005]),
        ({"warmup_steps": 1, "warmup_ratio": 0.5}, [0, 0.01, 0.02 / 3, 0.01 / 3]),
    ):
        trainer = trainer_of(tmp_path, small("gpt2").float(), **more)
        trainer.train()
        assert [line["learning_rate"] for line in trainer.log_history] == pytest.approx(expected)


def test_arguments_of_a_schedule_are_taken_or_refused(tmp_path: Path) -> None:
    more = {"warmup_steps": 0, "lr_scheduler_kwargs": {"min_lr": 0.004}}
    trainer = trainer_of(
        tmp_path, small("gpt2").float(), lr_scheduler_type="cosine_with_min_lr", **more
    )
    trainer.train()
    assert trainer.log_history[2]["learning_rate"] == pytest.approx(0.007)
    with pytest.raises(ConfigError, match=r"lr_scheduler_kwargs.min_lr: cosine does not have"):
        trainer_of(tmp_path, small("gpt2").float(), lr_scheduler_type="cosine", **more)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_model_trains_in_its_own_format(tmp_path: Path, dtype: torch.dtype) -> None:
    trainer = trainer_of(tmp_path, small("gpt2").to(dtype))
    assert {weight.dtype for _, weight in trainer.engine.state_dict()} == {dtype}
    with pytest.raises(ConfigError, match=r"found weights in torch\.float16; .* args\.fp16 alone"):
        trainer_of(tmp_path, small("gpt2").half())


def test_a_resume_draws_on_where_the_run_was(tmp_path: Path) -> None:
    """Passes of eight batches over steps of three: an epoch of two steps ends within a pass."""
    more = {"gradient_accumulation_steps": 3, "max_steps": -1, "num_train_epochs": 2}
    whole = trainer_of(tmp_path, small("gpt2").float(), save=True, save_steps=2, **more)
    whole.train()
    after = str(tmp_path / "iter_0000002")
    again = trainer_of(tmp_path, small("gpt2").float(), resume_from_checkpoint=after, **more)
    again.train()
    losses = [line["loss"] for line in whole.log_history[2:]]
    assert losses and [line["loss"] for line in again.log_history] == pytest.approx(losses)


def test_an_optimizer_of_a_script_is_used_as_it_is_made_or_refused(tmp_path: Path) -> None:
    def losses(make: Any) -> list[float]:
        own = type("Own", (compat.merak.MerakTrainer,), {"create_optimizer": make})
        trainer = trainer_of(tmp_path, small("gpt2").float(), own)
        trainer.train()
        return [line["loss"] for line in trainer.log_history]

    makers: list[Any] = [
        lambda self, model: torch.optim.RMSprop(model.parameters(), lr=0.01, alpha=0.5),
        lambda self, model: torch.optim.SGD(model.parameters(), 0.5, momentum=0.9),
        lambda self, model: torch.optim.SGD(model.parameters(), 0.5, momentum=0.9, nesterov=True),
    ]
    rms, momentum, nesterov = map(losses, makers)
    assert rms != momentum != nesterov
    with pytest.raises(
        ConfigError, match="create_optimizer: found Muon; the engine updates slices"
    ):
        losses(
            lambda self, model: torch.optim.Muon(
                [weight for weight in model.parameters() if weight.ndim == 2]
            )
        )


def test_settings_that_merak_s_trainer_cannot_follow_are_told(tmp_path: Path) -> None:
    trainer = trainer_of(
        tmp_path, small("gpt2").float(), optim="adafactor", label_smoothing_factor=0.1
    )
    told = {finding.path for finding in trainer.findings}
    assert {"args.optim", "args.label_smoothing_factor"} <= told
    with pytest.raises(ConfigError, match=r"args\.lr_scheduler_type: .* needs a metric"):
        trainer_of(
            tmp_path,
            small("gpt2").float(),
            lr_scheduler_type="reduce_lr_on_plateau",
            eval_strategy="epoch",
        )
    trainer.model = torch.nn.ModuleDict(
        {"q_proj": torch.nn.ModuleDict({"lora_A": torch.nn.Linear(2, 2)})}
    )
    compat.merak.set_tp_layer_lists(col_para_list=["q_proj"], row_para_list=["o_proj"])
    with pytest.raises(ConfigError, match="with LoRA and tp"):
        trainer._lists()


def test_a_module_of_one_layer_over_two_stages_says_what_to_pass() -> None:
    from bridge.layout.partition import _stage_count
    from bridge.plan.plan import Stages

    with pytest.raises(ConfigError, match=r"only 1 layers; .* pass it as an nn\.Sequential"):
        _stage_count(Stages(), 1, 2)
