"""Sources of Merak: command lines, files of flags, keyword mappings; and what is written for them."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

import compat
from bridge.errors import BridgeError, ConfigError, SourceError
from bridge.stack.rules import Effect

MERAK = compat.load("merak")
EXAMPLES = Path(__file__).parents[3] / "examples" / "merak"
CASES = json.loads((EXAMPLES / "cases.json").read_text())


def given(source: Any, **more: Any) -> dict[str, Any]:
    return MERAK.read(source, **more).given.flat()


def problems(source: Any, **more: Any) -> tuple[str, ...]:
    with pytest.raises(BridgeError) as caught:
        MERAK.read(source, **more)
    return caught.value.problems


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["file"])
def test_examples(case: dict[str, Any]) -> None:
    from bridge.translation.lift import lift

    config = MERAK.read(EXAMPLES / case["file"], case["version"], case["world_size"])
    for path, value in case["effective"].items():
        assert config.effective[path] == (tuple(value) if isinstance(value, list) else value), path
    values = lift(config).values()
    assert {path: values.get(path) for path in case["plan"]} == case["plan"]


@pytest.mark.parametrize(
    "words, expected",
    [
        ("--train_schedule ds_default", {"args.train_schedule": "ds_default"}),
        ("--train-schedule=ds_default", {"args.train_schedule": "ds_default"}),
        (
            "--input_name input_ids attention_mask",
            {"args.input_names": ("input_ids", "attention_mask")},
        ),
        ("--custom_partition 0,6,16", {"args.custom_partition": ("0,6,16",)}),
        ("--save --finetune false", {"args.save": True, "args.finetune": False}),
        ("--no_activation_checkpointing", {"args.activation_checkpointing": False}),
        ("--activation_checkpointing no", {"args.activation_checkpointing": False}),
        (
            "--zero_stage 1.0 --zero_reduce_bucket_size 5e8",
            {"args.zero_stage": 1, "args.zero_reduce_bucket_size": 500_000_000},
        ),
        ("--max_steps -1", {"args.max_steps": -1}),
        (
            "--activation_checkpoint_ratio 0.5 -1",
            {"args.activation_checkpoint_ratio": ("0.5", "-1")},
        ),
        (
            '--lr_scheduler_type cosine_with_min_lr --lr_scheduler_kwargs {"min_lr":0.1}',
            {
                "args.lr_scheduler_type": "cosine_with_min_lr",
                "args.lr_scheduler_kwargs": {"min_lr": 0.1},
            },
        ),
        ("python train.py --seed 3", {"args.seed": 3}),
        ("torchrun --nproc-per-node 4 train.py --seed 3", {"args.seed": 3}),
    ],
)
def test_command_lines(words: str, expected: dict[str, Any]) -> None:
    assert given(words.split()) == expected
    if "{" not in words:
        assert given(words) == expected


@pytest.mark.parametrize(
    "words, said",
    [
        ("--train_schedulle x", "did you mean train_schedule?"),
        ("--trace x", "unknown argument"),
        ("--num_layers many", "--num_layers: found 'many', expected a whole number"),
        ("--num_layers", "--num_layers: found no values, expected one"),
        ("--num_layers 1 2", "--num_layers: found 2 values, expected one"),
        ("--save maybe", "--save: found 'maybe', expected true or false"),
        ("--input_names", "--input_names: found no values, expected one or more"),
        ("--lr_scheduler_kwargs min_lr", "expected JSON"),
        ("--eval_iters 3", "not in Merak 2.2.2+main; Merak 1.1.1 to 2.1.0 has it"),
        ("stray --seed 1", "stray (word 1): belongs to no option"),
        ("-s 1", "-s: unknown argument"),
        ("--pp 2", "--pp: unknown argument"),
    ],
)
def test_wrong_command_lines(words: str, said: str) -> None:
    assert any(said in problem for problem in problems(words.split()))


def test_wrong_choices_name_the_known_ones() -> None:
    (problem,) = problems({"train_schedule": "gpipe"})
    assert problem.startswith("args.train_schedule: found 'gpipe'") and "ds_default" in problem


def test_every_problem_at_once() -> None:
    assert len(problems({"train_schedul": 1, "eval_iters": 1, "init": {"pipe": 2}})) == 3
    assert "did you mean train_schedule?" in problems({"train_schedul": "1f1b"})[0]


def test_lenient_leaves_out_what_is_unknown() -> None:
    config = MERAK.read(["--model_name", "gpt2", "--seed", "1"], lenient=True)
    assert config.given == {"args.seed": 1}
    assert [finding.path for finding in config.remarks] == ["--model_name"]


@pytest.mark.parametrize(
    "words", [["--own_pipeline_size", "2"], ["--own_name=gpt2"], ["--own_folder", "/data/bf16"]]
)
def test_an_argument_that_nobody_knows_counts_as_other_numbers(words: list[str]) -> None:
    (found,) = MERAK.read([*words, "--seed", "1"], lenient=True).remarks
    assert (
        found.effect is Effect.NUMBERS
        and found.unknown
        and found.path == words[0].partition("=")[0]
    )


def test_the_last_mention_wins() -> None:
    config = MERAK.read(["--seed", "1", "--seed", "2"])
    assert config.given == {"args.seed": 2}
    assert "more than once" in config.remarks[0].message


def test_nested_and_flat_mappings_say_the_same() -> None:
    nested = {
        "init": {"pp": 2, "tp": 1, "dp": 2},
        "args": {"zero_stage": 1},
        "tp_lists": {"conv_para_list": ["conv"]},
    }
    flat = {"pp": 2, "tp": 1, "dp": 2, "zero_stage": 1, "conv_para_list": ["conv"]}
    assert given(nested) == given(flat) == {**given({"args.zero_stage": 1}), **given(flat)}


def test_positions_of_init_are_those_of_the_source() -> None:
    config = MERAK.read({"init": [4, 1, 2]})
    assert config.given == {"init.pp": 4, "init.tp": 1, "init.dp": 2}
    (finding,) = config.remarks
    assert (
        finding.path == "init"
        and "dp, tp, pp" in finding.message
        and finding.effect == "different numbers"
    )
    assert MERAK.read({"init": [2, 1, 2]}).remarks[0].effect == "same numbers"
    assert not MERAK.read({"init": {"pp": 4, "tp": 1, "dp": 2}}).remarks
    assert "found 2 values by position" in problems({"init": [1, 2]})[0]


@pytest.mark.parametrize("code", [{"init": {"pp": 2}}, {"init.pp": 2}, {"pp": 2}])
def test_what_the_script_says_can_be_given_beside(code: dict[str, Any]) -> None:
    assert given(["--seed", "1"], code=code) == {"args.seed": 1, "init.pp": 2}
    assert "unknown" in problems(["--seed", "1"], code={"seed": 2})[0]


def test_tensor_lists_are_typed() -> None:
    lists = {
        "input_output_mapping": [[1, 3, "col"], [4, 1, "row"]],
        "weight_change_list": [["bias", 1]],
    }
    config = MERAK.read({"tp_lists": lists})
    assert config.given["tp_lists.input_output_mapping"] == ((1, 3, "col"), (4, 1, "row"))
    assert config.given["tp_lists.weight_change_list"] == (("bias", 1),)
    assert "weight_change_list" in problems({"tp_lists": {"weight_change_list": [["bias", 2]]}})[0]
    assert (
        "needs col_para_list and row_para_list"
        in problems({"tp_lists": {"col_para_list": ["q"]}})[0]
    )


@pytest.mark.parametrize("suffix", ["args", "txt", "json"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["file"])
def test_files_read_back(case: dict[str, Any], suffix: str, tmp_path: Path) -> None:
    config = MERAK.read(EXAMPLES / case["file"], case["version"], case["world_size"])
    MERAK.write(config, tmp_path / f"config.{suffix}")
    assert (
        MERAK.read(tmp_path / f"config.{suffix}", case["version"], case["world_size"]).given
        == config.given
    )


def test_an_empty_command_line_reads_back(tmp_path: Path) -> None:
    config = MERAK.read({"init": {"pp": 1, "tp": 1, "dp": 1}})
    MERAK.write(config, tmp_path / "x.args")
    assert MERAK.read(tmp_path / "x.args").given == config.given


def test_the_script_is_python_and_passes_degrees_by_name() -> None:
    case = next(case for case in CASES if case["file"] == "llama.json")
    config = MERAK.read(EXAMPLES / case["file"], case["version"])
    calls = {
        ast.unparse(node.func): node
        for node in ast.walk(ast.parse(config.script))
        if isinstance(node, ast.Call)
    }
    init = {word.arg: ast.literal_eval(word.value) for word in calls["Merak.init"].keywords}
    assert init == {"pp": 4, "tp": 2, "dp": 1} and not calls["Merak.init"].args
    lists = {
        word.arg: ast.literal_eval(word.value) for word in calls["set_tp_layer_lists"].keywords
    }
    assert tuple(lists["tp_attr_list"]) == config.given["tp_lists.tp_attr_list"]
    assert {word.arg for word in calls["MerakTrainer"].keywords} == {
        "model",
        "args",
        "train_dataset",
        "leaf_modules",
    }


def test_a_loss_is_a_method_to_override() -> None:
    new, old = (
        MERAK.read({"trainer": {"loss_fn": "my_loss"}}, version) for version in ("2.2.2", "1.1.1")
    )
    assert "def get_loss_fn(self):" in new.script and "loss_fn=my_loss" not in new.script
    assert "loss_fn=my_loss" in old.script
    assert [finding.path for finding in new.findings if "get_loss_fn" in finding.message] == [
        "trainer.loss_fn"
    ]


def test_objects_are_names_not_code() -> None:
    assert (
        "expected the name of a Python object"
        in problems({"trainer": {"model": "__import__('os').system('x')"}})[0]
    )


def test_the_launch_command_has_what_the_parser_insists_on() -> None:
    assert "--output_dir" in MERAK.render(MERAK.read({"seed": 1}, world_size=4)).launch
    assert "--output_dir" not in MERAK.render(MERAK.read({"output_dir": "x"})).launch


def test_what_cannot_be_read_says_so() -> None:
    with pytest.raises(SourceError, match="expected a path"):
        MERAK.read(3)
    with pytest.raises(ConfigError, match="start with a dash"):
        MERAK.read({"input_names": ["-x"]})


@pytest.mark.parametrize(
    "data, known",
    [
        ({"train_schedule": "1f1b", "fp16": True}, True),
        ({"init": {"pp": 1}, "args": {"seed": 1}}, True),
        (["--train_schedule", "1f1b"], True),
        (
            {
                "train_micro_batch_size_per_gpu": 1,
                "gradient_accumulation_steps": 2,
                "wall_clock_breakdown": True,
            },
            False,
        ),
        (["--num-layers", "2", "--bf16"], False),
        ({"model": {"multi_stage": {}}}, False),
    ],
)
def test_recognition(data: Any, known: bool) -> None:
    scores = {name: compat.load(name).recognises(data) for name in compat.names()}
    assert (scores["merak"] > 0) is known
    assert not known or max(scores, key=scores.__getitem__) == "merak"
