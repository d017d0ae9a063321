"""`stagebridge resolve`: who wins for each setting of a run with several sources, what it prints, and what `check` says of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bridge.cli import run

SCRIPT = """#!/bin/bash
torchrun --nproc_per_node 8 train.py --output_dir out --per_device_train_batch_size 4 \\
    --gradient_accumulation_steps 4 --lr_scheduler_type cosine --learning_rate 1e-4 \\
    --warmup_steps 100 --max_steps 3000 --max_grad_norm 0.3 --bf16 \\
    --deepspeed zero2.json
"""
AUTO = {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}
WARMUP = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}
ZERO2: dict[str, Any] = {
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": AUTO},
    "scheduler": {"type": "WarmupLR", "params": WARMUP},
    "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
    "fp16": {"enabled": False, "loss_scale": 0},
    "gradient_accumulation_steps": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}
ARGS = {"output_dir": "out", "learning_rate": 1e-4, "max_steps": 3000, "deepspeed": "zero2.json"}


@pytest.fixture
def told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., Any]:
    """The object that `resolve --json` prints of files in the current folder."""
    monkeypatch.chdir(tmp_path)
    write(ZERO2)
    Path("train.sh").write_text(SCRIPT)
    Path("args.json").write_text(json.dumps(ARGS, indent=1))
    Path("model").mkdir()
    Path("model/config.json").write_text('{\n"model_type": "llama",\n"hidden_size": 64}')

    def call(*words: str, code: int | None = None) -> Any:
        found = run(["resolve", *words, "--json"])
        data = json.loads(capsys.readouterr().out)
        assert data["exit_code"] == found and code in (None, found), data
        return data

    return call


def write(data: dict[str, Any]) -> None:
    Path("zero2.json").write_text(json.dumps(data, indent=1))


def row(data: Any, setting: str) -> Any:
    (found,) = [one for one in data["settings"] if one["setting"] == setting]
    return found


def lost(data: Any) -> set[str]:
    return {one["setting"] for setting in data["settings"] for one in setting["overruled"]}


def test_the_block_of_the_file_wins_over_the_schedule_of_the_script(told: Any) -> None:
    data = told("train.sh", code=2)
    scheduler = row(data, "scheduler.type")
    assert scheduler["value"] == "WarmupLR" and scheduler["winner"]["source"] == "zero2.json"
    line = Path("zero2.json").read_text().splitlines().index('  "type": "WarmupLR",') + 1
    assert scheduler["winner"]["line"] == line
    (overruled,) = scheduler["overruled"]
    assert (overruled["setting"], overruled["value"]) == ("--lr_scheduler_type", "cosine")
    assert (overruled["source"], overruled["line"]) == ("train.sh", 3)
    rate = row(data, "scheduler.params.warmup_max_lr")
    assert rate["value"] == 1e-4 and rate["winner"] == {
        "source": "train.sh",
        "line": 3,
        "setting": "--learning_rate",
    }
    clip = row(data, "gradient_clipping")
    assert clip["value"] == 1.0 and clip["winner"]["source"] == "DeepSpeed 0.19.8, default"
    assert lost(data) == {"--lr_scheduler_type", "--max_grad_norm"}
    assert [one["setting"] for one in data["ignored"]] == ["fp16.loss_scale"]


def test_before_0_19_3_nothing_is_clipped(told: Any) -> None:
    assert row(told("train.sh", "--from-version", "0.16.9"), "gradient_clipping")["value"] == 0.0


def test_without_the_block_the_argument_wins(told: Any) -> None:
    write({name: value for name, value in ZERO2.items() if name != "scheduler"})
    data = told("train.sh")
    assert row(data, "lr_scheduler_type")["winner"]["setting"] == "--lr_scheduler_type"
    assert lost(data) == {"--max_grad_norm"}


def test_check_and_sarif_say_it_on_the_line(told: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("check", "resolve"):
        words = [command, "train.sh", "--auto", "hidden_size=64", "--format", "sarif"]
        assert run(words) == 2
        results = json.loads(capsys.readouterr().out)["runs"][0]["results"]
        (found,) = [one for one in results if one["ruleId"] == "lr_scheduler_type/overruled"]
        assert found["locations"][0]["physicalLocation"]["region"]["startLine"] == 3
        assert "scheduler.type 'WarmupLR' (zero2.json:" in found["message"]["text"]


def test_the_report_has_contradictions_first(told: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["resolve", "train.sh"]) == 2
    out = capsys.readouterr().out
    assert out.index("'cosine' is not used") < out.index(
        "after the warmup the rate stays at 0.0001"
    )
    assert out.index("Different numbers") < out.index("setting ") < out.index("Nobody hears")


@pytest.mark.parametrize(
    "words",
    [
        ("zero2.json", "--with", "args.json"),
        ("args.json", "zero2.json"),
        ("args.json",),
        ("args.yaml",),
        ("zero2.json", "--auto-from", "learning_rate=1e-4", "--with", "max_steps=3000"),
    ],
)
def test_arguments_come_from_files_in_any_order(told: Any, words: tuple[str, ...]) -> None:
    text = "\n".join(f"{name}: {value}" for name, value in ARGS.items())
    Path("args.yaml").write_text(text.replace("0.0001", "1.0e-4"))
    data = told(*words, "--world-size", "8")
    rate = row(data, "optimizer.params.lr")
    assert rate["value"] == 1e-4
    file = next((word for word in words if word.startswith("args.")), "--auto-from")
    assert rate["winner"]["source"] == file
    assert rate["winner"]["line"] == {"args.json": 3, "args.yaml": 2}.get(file)


def test_a_number_that_yaml_takes_for_a_text_stops_the_trainer(
    told: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    for spelling, code in (("1e-4", 1), ("1.0e-4", 2)):
        text = "\n".join(f"{name}: {value}" for name, value in ARGS.items())
        Path("args.yaml").write_text(text.replace("0.0001", spelling))
        Path("alone.sh").write_text("torchrun --nproc_per_node 8 train.py args.yaml\n")
        assert run(["resolve", "alone.sh"]) == code
        said = "args.yaml, line 2: learning_rate: found 1e-4, which is a text in YAML 1.1"
        assert (said in capsys.readouterr().err) == (code == 1)


def test_of_two_sources_of_arguments_the_last_counts(told: Any) -> None:
    data = told("train.sh", "--with", "args.json", "--with", "learning_rate=0.5")
    assert row(data, "optimizer.params.lr")["value"] == 0.5
    ignored = {(one["setting"], one["value"]) for one in data["ignored"]}
    assert {("--learning_rate", 1e-4), ("learning_rate", 1e-4)} <= ignored


def test_the_models_folder_fills_in_auto(told: Any) -> None:
    key = "zero_optimization.reduce_bucket_size"
    open_ = row(told("train.sh"), key)
    assert open_["value"] == "auto" and "--model" in open_["why"]
    known = row(told("train.sh", "--model", "model"), key)
    assert known["value"] == 64 * 64 and known["winner"]["line"] == 3
    assert row(told("train.sh", "model"), key) == known


@pytest.mark.parametrize(
    ("change", "setting", "words"),
    [
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps", "refuses two values"),
        ({"train_batch_size": 128, "gradient_accumulation_steps": None}, "train_batch_size", "1"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}}, "warmup", "100"),
    ],
)
def test_a_run_that_the_trainer_refuses_stops(
    told: Any, change: dict[str, Any], setting: str, words: str
) -> None:
    write({name: value for name, value in {**ZERO2, **change}.items() if value is not None})
    (stop,) = told("train.sh", code=1)["stops"]
    assert setting in stop["setting"] and words in stop["message"]
    assert (stop["source"], stop["line"] is None) == ("zero2.json", False)


def test_accumulation_is_the_trainers_where_the_file_has_none(told: Any) -> None:
    write({name: value for name, value in ZERO2.items() if name != "gradient_accumulation_steps"})
    data = told("train.sh")
    steps = row(data, "gradient_accumulation_steps")
    assert steps["value"] == 4 and steps["winner"]["setting"] == "--gradient_accumulation_steps"


NUM_STEPS = """ --accelerator_config '{"gradient_accumulation_kwargs": {"num_steps": 4}}'"""


@pytest.mark.parametrize("whole", ["auto", 32, None])
@pytest.mark.parametrize("steps", ["auto", 1, None])
def test_num_steps_of_accelerator_config_counts(told: Any, steps: Any, whole: Any) -> None:
    data = {**ZERO2, "gradient_accumulation_steps": steps, "train_batch_size": whole}
    write({name: value for name, value in data.items() if value is not None})
    Path("train.sh").write_text(
        SCRIPT.replace("--gradient_accumulation_steps 4", "").replace(" --bf16", NUM_STEPS)
    )
    found = told("train.sh", code=2)
    rows = [row(found, name) for name in ("gradient_accumulation_steps", "train_batch_size")]
    assert [(one["value"], one["winner"]["setting"]) for one in rows] == [
        (4, "--accelerator_config"),
        (128, "--accelerator_config"),
    ]
    Path("train.sh").write_text(SCRIPT.replace(" --bf16", NUM_STEPS))
    assert "num_steps" in told("train.sh", code=1)["stops"][0]["message"]


def test_a_retired_argument_has_one_finding(told: Any, capsys: pytest.CaptureFixture[str]) -> None:
    write(ZERO2)
    Path("train.sh").write_text(
        SCRIPT.replace("--bf16", "--bf16 --no_cuda false --evaluation_strategy no --own 1")
    )
    assert run(["check", "train.sh", "--model", "model", "--json"]) == 2
    paths = [one["path"] for one in json.loads(capsys.readouterr().out)["findings"]]
    assert [paths.count(f"--{name}") for name in ("no_cuda", "evaluation_strategy", "own")] == [
        1,
        1,
        1,
    ]


def test_a_flag_that_is_given_twice_is_named(told: Any) -> None:
    Path("train.sh").write_text(SCRIPT.replace("--bf16", "--bf16 --learning_rate 2e-4"))
    data = told("train.sh")
    assert row(data, "optimizer.params.lr")["value"] == 2e-4
    assert {"setting": "--learning_rate", "line": 3} in [
        {"setting": one["setting"], "line": one["line"]} for one in data["ignored"]
    ]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("zero2.json", "train.sh"), "found 2 sources that start or configure a run"),
        (("model",), "found 0 sources"),
        (("none.sh",), "none.sh"),
        (("zero2.json", "--model", "none"), "none"),
        (("zero2.json", "--model", "args.json"), "hidden_size"),
    ],
)
def test_wrong_sources_are_named(told: Any, words: tuple[str, ...], problem: str) -> None:
    data = told(*words, code=1)
    assert any(problem in one for one in data["problems"])


def test_a_run_of_one_file_has_its_lines_and_defaults(told: Any) -> None:
    Path("plain.json").write_text('{\n"train_micro_batch_size_per_gpu": 2,\n"train_batch_size": 4}')
    data = told("plain.json", "--world-size", "2")
    assert row(data, "train_batch_size")["winner"]["line"] == 3
    assert row(data, "zero_optimization.stage")["winner"]["source"].endswith(", default")
    assert not data["ignored"] and not lost(data)


ACCELERATE = """distributed_type: DEEPSPEED
deepspeed_config:
  gradient_accumulation_steps: 4
  zero_stage: 2
mixed_precision: bf16
num_processes: 8
"""


def test_options_of_accelerate_win_over_its_file(told: Any) -> None:
    Path("acc.yaml").write_text(ACCELERATE)
    Path("a.sh").write_text(
        "accelerate launch --config_file acc.yaml --gradient_accumulation_steps 2 \\\n"
        "    --mixed_precision fp16 run.py\n"
    )
    data = told("a.sh", "--auto", "micro_batch=2")
    steps, stage = row(data, "gradient_accumulation_steps"), row(data, "zero_optimization.stage")
    assert (steps["value"], steps["winner"]["line"]) == (2, 1)
    assert stage["winner"] == {"source": "acc.yaml", "line": 4, "setting": "zero_stage"}
    assert row(data, "fp16.enabled")["winner"] == {
        "source": "a.sh",
        "line": 2,
        "setting": "--mixed_precision",
    }
    assert row(data, "bf16.enabled")["winner"]["source"] == "accelerate"
    assert {(one["source"], one["setting"], one["value"]) for one in data["ignored"]} == {
        ("acc.yaml", "gradient_accumulation_steps", 4),
        ("acc.yaml", "mixed_precision", "bf16"),
    }


def test_a_deepspeed_file_wins_over_options_of_accelerate(told: Any) -> None:
    write({"train_micro_batch_size_per_gpu": 16, "gradient_accumulation_steps": 16,
           "steps_per_print": 10, "zero_optimization": {"stage": 2}})  # fmt: skip
    Path("a.sh").write_text(
        "accelerate launch --use_deepspeed --deepspeed_config_file zero2.json --num_processes 2 \\\n"
        "    --gradient_accumulation_steps 2 --gradient_clipping 0.5 run.py\n"
    )
    data = told("a.sh", code=2)
    steps = row(data, "gradient_accumulation_steps")
    assert steps["value"] == 16 and steps["winner"]["source"] == "zero2.json"
    assert lost(data) == {"--gradient_accumulation_steps", "--gradient_clipping", "steps_per_print"}
    assert {one["rule"] for one in data["findings"]} >= {"gradient_accumulation_steps/overruled"}
    assert any("before accelerate 0.23" in one["message"] for one in data["findings"])


def test_accelerates_variables_count_where_nothing_else_does(told: Any) -> None:
    variables = "export ACCELERATE_MIXED_PRECISION=bf16 ACCELERATE_GRADIENT_CLIPPING=0.5\n"
    Path("train.sh").write_text(variables + SCRIPT.replace(" --bf16", ""))
    write({name: value for name, value in ZERO2.items() if name != "bf16"})
    data = told("train.sh")
    assert row(data, "bf16.enabled")["value"] is True
    assert "ACCELERATE_GRADIENT_CLIPPING" in {one["setting"] for one in data["ignored"]}
    write(ZERO2)
    assert "ACCELERATE_MIXED_PRECISION" in lost(told("train.sh"))


def test_a_length_that_only_the_data_tell_is_named(told: Any) -> None:
    block = {"type": "WarmupDecayLR", "params": {**WARMUP, "total_num_steps": 500}}
    write({**ZERO2, "scheduler": block})
    Path("train.sh").write_text(SCRIPT.replace("--max_steps 3000", "--num_train_epochs 3"))
    found = told("train.sh", code=2)["findings"]
    (one,) = [one for one in found if one["path"] == "scheduler.params.total_num_steps"]
    assert "unless the data and the epochs" in one["message"]
    assert told("train.sh", "--with", "max_steps=400", code=1)["stops"]


@pytest.mark.parametrize(
    ("flags", "change", "setting", "words"),
    [
        ("--fp16", {}, "--fp16", "refuses both"),
        ("--fp16_full_eval --bf16_full_eval", {}, "--fp16_full_eval", "refuses both"),
        ("--fp16_full_eval", {"fp16": {"enabled": "auto"}}, "--bf16", "refuses that with bf16"),
        ("--warmup_steps -5", {}, "--warmup_steps", "below 0"),
        ("--lr_scheduler_type cosin", {}, "--lr_scheduler_type", "cosine"),
        ("--lr_scheduler_type greedy", {}, "--lr_scheduler_type", "--eval_strategy"),
        (
            "--lr_scheduler_type cosine_with_min_lr",
            {"scheduler": None},
            "--lr_scheduler_type",
            "rate",
        ),
        (
            "--lr_scheduler_type warmup_stable_decay --lr_scheduler_kwargs '{\"num_cycles\": 1}'",
            {"scheduler": None},
            "--lr_scheduler_type",
            "num_decay_steps",
        ),
        (
            "--lr_scheduler_type polynomial",
            {"scheduler": None, "optimizer": None},
            "--lr_scheduler_type",
            "defaults",
        ),
        ("--optim adagrad", {"optimizer": None}, "--optim", "first step"),
        (
            "--optim adagrad",
            {
                "optimizer": None,
                "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
            },
            "--optim",
            "DeepSpeed's Adagrad",
        ),
        (
            "",
            {"optimizer": None, "zero_optimization": {"stage": 2, "cpu_offload": True}},
            "optim",
            "offload_optimizer",
        ),
        ("--save_only_model --load_best_model_at_end", {}, "--save_only_model", "drop one"),
        (
            "--auto_find_batch_size",
            {"zero_optimization": {"stage": 3}},
            "--auto_find_batch_size",
            "3",
        ),
        (
            '--accelerator_config \'{"gradient_accumulation_kwargs": {"num_steps": 4}}\'',
            {},
            "--accelerator_config",
            "num_steps",
        ),
        ("", {"zero_optimization": None}, "zero_optimization", "without this section"),
    ],
)
def test_what_the_libraries_refuse_stops_the_run(
    told: Any, flags: str, change: dict[str, Any], setting: str, words: str
) -> None:
    write({name: value for name, value in {**ZERO2, **change}.items() if value is not None})
    Path("train.sh").write_text(SCRIPT.replace("--bf16", f"--bf16 {flags}"))
    stops = told("train.sh", "--model", "model", code=1)["stops"]
    assert [one for one in stops if one["setting"] == setting and words in one["message"]], stops
    assert all(one["line"] == 4 for one in stops if one["setting"].startswith("--"))


EPOCHS = SCRIPT.replace("--max_steps 3000", "--num_train_epochs 3")


def test_the_length_of_the_data_gives_the_steps(told: Any) -> None:
    decay = {"type": "WarmupDecayLR", "params": {**WARMUP, "total_num_steps": "auto"}}
    write({**ZERO2, "scheduler": decay})
    Path("train.sh").write_text(EPOCHS)
    open_ = row(told("train.sh", code=2), "scheduler.params.total_num_steps")
    assert open_["value"] == "auto" and "samples" in open_["why"]
    data = told("train.sh", "--auto", "samples=1000")
    # 32 micro-batches of 4 on each of 8 ranks, 8 steps an epoch.
    total = row(data, "scheduler.params.total_num_steps")
    assert total["value"] == 24 and total["winner"]["setting"] == "samples"
    short = told("train.sh", "--auto", "samples=64")
    steps = row(short, "gradient_accumulation_steps")
    assert steps["value"] == 2 and "--gradient_accumulation_steps" in lost(short)
    assert row(short, "train_batch_size")["value"] == 64


def test_split_batches_divides_the_batch(told: Any) -> None:
    flags = "--bf16 --accelerator_config '{\"split_batches\": true}'"
    Path("train.sh").write_text(SCRIPT.replace("--bf16", flags).replace("size 4", "size 16"))
    data = told("train.sh")
    assert row(data, "train_micro_batch_size_per_gpu")["value"] == 2
    assert "--per_device_train_batch_size" in lost(data)
    Path("train.sh").write_text(SCRIPT.replace("--bf16", flags))
    assert "do not divide" in told("train.sh", code=1)["stops"][0]["message"]


def test_the_trainer_refuses_fsdp_and_deepspeed_at_once(told: Any) -> None:
    Path("train.sh").write_text(SCRIPT.replace("--bf16", "--bf16 --fsdp full_shard"))
    (stop,) = told("train.sh", code=1)["stops"]
    assert (stop["setting"], stop["source"], stop["line"]) == ("--fsdp", "train.sh", 4)
    Path("args.json").write_text(json.dumps({**ARGS, "fsdp": True}))
    (stop,) = told("zero2.json", "args.json", code=1)["stops"]
    assert stop["setting"] == "fsdp"
    Path("args.json").write_text(json.dumps({**ARGS, "fsdp": ""}))
    assert told("zero2.json", "args.json")["stops"] == []


@pytest.mark.parametrize(("release", "code"), [("5.23.0", 1), ("5.14.0", 2), ("4.57.6", 2)])
def test_an_argument_ends_with_a_release_of_transformers(
    told: Any, release: str, code: int
) -> None:
    Path("train.sh").write_text(SCRIPT.replace("--warmup_steps 100", "--warmup_ratio 0.03"))
    stops = told("train.sh", "--auto", f"transformers={release}", code=code)["stops"]
    assert [one["setting"] for one in stops] == (["--warmup_ratio"] if code == 1 else [])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--warmup_ratio 0.03", {"--warmup_ratio": "5.6.0"}),
        ("--warmup_ratio 0.03 --no_cuda", {"--warmup_ratio": "4.57.0", "--no_cuda": "4.57.0"}),
        ("--no_cuda --use_cache True", {"--no_cuda": "4.57.0", "--use_cache": "4.57.0"}),
        ("--use_cache True --my_own_flag 3", {}),
        ("--overwrite_output_dir", {"--overwrite_output_dir": "4.57.0"}),
    ],
)
def test_a_retired_argument_tells_the_release_of_a_run(
    told: Any, flags: str, said: dict[str, str]
) -> None:
    write({name: value for name, value in ZERO2.items() if name != "scheduler"})
    Path("train.sh").write_text(SCRIPT.replace("--warmup_steps 100", flags))
    data = told("train.sh", "--model", "model", code=2)
    dated = {one["path"]: one for one in data["findings"] if "no such argument" in one["message"]}
    assert dated.keys() == said.keys()
    assert all(
        f"read as transformers {said[name]}" in one["message"] for name, one in dated.items()
    )
    effects = {name: one["effect"] for name, one in dated.items()}
    # Which release is installed is not known; of what no step depends on, nothing but a stop follows.
    quiet = {"--overwrite_output_dir": "same numbers"}
    assert effects == {name: quiet.get(name, "different numbers") for name in said}
    if "--warmup_ratio" in said:
        assert row(data, "warmup_ratio")["value"] == 0.03


@pytest.mark.parametrize(
    ("file", "named"),
    [("other.json", True), ({"bf16": {"enabled": True}}, True), ("configs/zero2.json", False)],
)
def test_arguments_that_name_another_deepspeed_file(told: Any, file: Any, named: bool) -> None:
    Path("args.json").write_text(json.dumps({**ARGS, "deepspeed": file}))
    findings = told("zero2.json", "args.json", "--model", "model")["findings"]
    others = [one for one in findings if one["path"] == "deepspeed"]
    assert [one["effect"] for one in others] == ["different numbers"] * named


@pytest.mark.parametrize("launch", ["ACCELERATE_MIXED_PRECISION=fp16 torchrun --nproc_per_node 8",
    "accelerate launch --use_deepspeed --deepspeed_config_file zero2.json --mixed_precision fp16"])  # fmt: skip
def test_what_accelerate_adds_is_not_the_files(told: Any, launch: str) -> None:
    write({name: value for name, value in ZERO2.items() if name not in ("fp16", "bf16")})
    script = SCRIPT.replace("torchrun --nproc_per_node 8", launch).replace(" --bf16", "")
    if "accelerate" in launch:
        script = script.replace("--deepspeed zero2.json", "--seed 1").replace("8 train", "8 run")
    Path("train.sh").write_text(script)
    data = told("train.sh", "--model", "model")
    winner = row(data, "fp16.enabled")["winner"]
    setting = "--mixed_precision" if "accelerate" in launch else "ACCELERATE_MIXED_PRECISION"
    assert winner == {"source": "train.sh", "line": 2, "setting": setting}
    assert row(data, "fp16.auto_cast")["winner"]["source"] == "accelerate"
    assert {(one["source"], one["line"]) for one in data["stops"]} <= {("train.sh", 2)}


def test_the_default_optimizer_is_the_one_of_the_release(told: Any) -> None:
    write({name: value for name, value in ZERO2.items() if name != "optimizer"})
    optim = row(told("train.sh", "--model", "model"), "optim")
    assert optim["value"] == "adamw_torch_fused" and "torch 2.8" in optim["why"]
    release = ("--auto", "transformers=4.53.0")
    assert row(told("train.sh", "--model", "model", *release), "optim")["value"] == "adamw_torch"
    theirs = pytest.importorskip("transformers.training_args").TrainingArguments
    assert theirs.__dataclass_fields__["optim"].default == optim["value"]


def test_a_stop_names_who_filled_in_the_refused_value(told: Any) -> None:
    write({**ZERO2, "train_micro_batch_size_per_gpu": 2, "train_batch_size": "auto"})
    Path("train.sh").write_text(SCRIPT.replace("--bf16", "--bf16 --auto_find_batch_size"))
    stops = told("train.sh", "--model", "model", code=1)["stops"]
    (stop,) = (one for one in stops if one["setting"] == "train_batch_size")
    assert "and --per_device_train_batch_size fills it in" in stop["message"]


def test_the_call_in_a_program_gives_the_arguments(told: Any) -> None:
    call = "import os\nargs = TrainingArguments(\n  output_dir=os.environ['OUT'], bf16=True,\n  {},\n)\n"
    Path("train.py").write_text(call.format("learning_rate=3e-4, max_steps=100"))
    words = ("zero2.json", "--with", "train.py", "--model", "model", "--world-size", "8")
    rate = row(told(*words), "optimizer.params.lr")
    assert rate["value"] == 3e-4
    assert (rate["winner"]["source"], rate["winner"]["line"]) == ("train.py", 4)
    for wrong in ("learning_rate=RATE", "**others", "x=TrainingArguments()"):
        Path("train.py").write_text(call.format(wrong))
        assert run(["resolve", *words]) == 1


def test_classes_of_trl_bring_their_own_defaults(told: Any) -> None:
    write({**ZERO2, "bf16": {"enabled": "auto"}})
    flags = "--deepspeed zero2.json --output_dir out --max_steps 9"
    Path("sft.py").write_text("from trl import SFTConfig, SFTTrainer\n")
    Path("train.sh").write_text(f"deepspeed sft.py {flags}\n")
    data = told("train.sh", "--model", "model")
    rate = row(data, "optimizer.params.lr")
    assert (rate["value"], rate["winner"]["source"]) == (2e-5, "trl 1.16.0 SFTConfig, default")
    assert row(data, "bf16.enabled")["value"] is True
    Path("train.sh").write_text(f"deepspeed sft.py {flags} --fp16 --learning_rate 1e-4\n")
    data = told("train.sh", "--model", "model", "--world-size", "2")
    assert row(data, "bf16.enabled")["value"] is False
    assert row(data, "optimizer.params.lr")["value"] == 1e-4
    Path("sft.py").write_text("from trl import DPOConfig, SFTConfig\n")
    Path("train.sh").write_text(f"deepspeed sft.py {flags}\n")
    assert "sft.py" in {one["path"] for one in told("train.sh", code=2)["findings"]}
    Path("own.py").write_text("args = DPOConfig(output_dir='x', max_steps=9)\n")
    data = told("zero2.json", "--with", "own.py", "--model", "model", "--world-size", "2")
    assert row(data, "optimizer.params.lr")["value"] == 1e-6
    Path("own.py").write_text("args = SFTConfig(output_dir='x', max_steps=9, learning_rate=3e-4)\n")
    data = told("zero2.json", "--with", "own.py", "--model", "model", "--world-size", "2")
    assert row(data, "optimizer.params.lr")["value"] == 3e-4
    assert "learning_rate" not in {one["setting"] for one in data["ignored"]}
    Path("sft.py").write_text("from trl import SFTConfig\n")
    Path("train.sh").write_text(
        "accelerate launch --multi_gpu --num_processes 2 sft.py --output_dir x --fsdp True\n"
    )
    precision = row(told("train.sh"), "mixed_precision")
    assert precision["value"] == "bf16" and "SFTConfig" in precision["winner"]["source"]


def test_names_that_no_release_of_transformers_has_are_shown(told: Any) -> None:
    Path("args.json").write_text(json.dumps({**ARGS, "my_own_argument": 3}))
    ignored = told("zero2.json", "args.json")["ignored"]
    (own,) = (one for one in ignored if one["setting"] == "my_own_argument")
    assert own["value"] == 3 and "no release" in own["why"]


@pytest.mark.parametrize(
    ("flag", "release", "code", "said"),
    [
        ("--use_liger_kernel", "4.44.2", 1, "--use_liger_kernel"),
        ("--use_liger_kernel", "4.45.0", 2, ""),
        ("--seed 1", "4.53.0", 2, "average_tokens_across_devices"),
        ("--average_tokens_across_devices", "4.53.0", 2, ""),
        ("--seed 1", "4.54.0", 2, ""),
        ("--per_gpu_train_batch_size 2", "5.0.0", 1, "--per_gpu_train_batch_size"),
    ],
)
def test_a_release_of_transformers_lacks_an_argument_or_has_another_default(
    told: Any, flag: str, release: str, code: int, said: str
) -> None:
    Path("train.sh").write_text(SCRIPT.replace("--bf16", f"--bf16 {flag}"))
    data = told("train.sh", "--auto", f"transformers={release}", code=code)
    if code == 1:
        assert [one["setting"] for one in data["stops"]] == [said]
    else:
        names = {one["path"] for one in data["findings"] if "before transformers" in one["message"]}
        assert names == ({said} if said else set())


def test_a_model_without_a_width_fills_in_nothing(told: Any) -> None:
    Path("model/config.json").write_text('{"model_type": "t5"}')
    (stop,) = told("train.sh", "model", code=1)["stops"]
    assert stop["setting"] == "zero_optimization.reduce_bucket_size"
    write({**ZERO2, "zero_optimization": {"stage": 2}})
    assert not told("train.sh", "model")["stops"]


def test_accelerates_own_fields_beside_the_file_stop(told: Any) -> None:
    Path("train.sh").write_text("export ACCELERATE_CONFIG_DS_FIELDS=zero_stage\n" + SCRIPT)
    (stop,) = told("train.sh", code=1)["stops"]
    assert stop["setting"] == "ACCELERATE_CONFIG_DS_FIELDS" and stop["line"] == 1


def test_packages_of_the_trainers_optimizers(told: Any) -> None:
    from compat.deepspeed.trainer import find_package

    write({name: value for name, value in ZERO2.items() if name != "optimizer"})
    Path("train.sh").write_text(SCRIPT.replace("--bf16", "--bf16 --optim lomo"))
    words = [one["message"] for one in told("train.sh")["findings"] if one["path"] == "--optim"]
    assert any("lomo-optim" in one for one in words)
    theirs = pytest.importorskip("transformers.training_args").OptimizerNames
    builtin = {one for one in map(str, (one.value for one in theirs)) if not find_package(one)}
    assert builtin == {"adamw_torch", "adamw_torch_fused", "adamw_torch_xla", "adamw_torch_npu_fused",
                       "adafactor", "sgd", "adagrad", "rmsprop"}  # fmt: skip


def test_the_arguments_of_transformers_are_those_of_the_installed_release() -> None:
    import dataclasses

    from bridge.stack.training_arguments import RETIRED
    from compat.deepspeed.trainer import NAMES

    theirs = pytest.importorskip("transformers").TrainingArguments
    own = {one.name for one in dataclasses.fields(theirs) if one.init}
    assert own - NAMES == set() and NAMES - own == RETIRED.keys()


def test_the_defaults_of_the_trainer_are_those_of_the_installed_release() -> None:
    from bridge.stack.training_arguments import ARGUMENTS, DATA
    from tests.harvesting.stacks.transformers_arguments import read_arguments

    theirs = pytest.importorskip("transformers")
    text = Path(theirs.__file__).with_name("training_args.py").read_text(encoding="utf-8")
    assert read_arguments(text) == ARGUMENTS
    for name in (name for row in DATA["changes"] for name in row.get("before", {})):
        assert name in ARGUMENTS or any(name in row.get("gone", {}) for row in DATA["changes"])


@pytest.mark.parametrize("command", [("diff", "zero2.json", "zero2.json"), ("drift", "zero2.json")])
def test_other_commands_read_the_same_sources(told: Any, command: tuple[str, ...]) -> None:
    write({**ZERO2, "scheduler": {"type": "WarmupLR", "params": WARMUP}})
    words = [*command, "--with", "args.json", "--world-size", "8"]
    assert run(words) == 1  # the bucket's size follows from the model's width
    assert run([*words, "--model", "model"]) in (0, 2)


TRAINED = "train.py --output_dir out --bf16 --max_steps 5"
INLINE = """distributed_type: DEEPSPEED
deepspeed_config:
  gradient_accumulation_steps: 4
  zero_stage: 3
mixed_precision: bf16
num_processes: 2
"""
SHARDED = "distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\nnum_processes: 2\n"
BY_FILE = (
    "distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: other.json\n"
    "num_processes: 2\n"
)


def launched(launcher: str, program: str = "", config: str = "") -> None:
    """Write a script that starts the Trainer by accelerate, and accelerate's config file."""
    Path("acc.yaml").write_text(config)
    Path("a.sh").write_text(f"accelerate launch {launcher} \\\n  {TRAINED} {program}\n")
    data = {**ZERO2, "gradient_clipping": "auto"}
    write({name: value for name, value in data.items() if name != "scheduler"})


@pytest.mark.parametrize(
    ("launcher", "config", "setting", "place"),
    [
        ("--config_file acc.yaml", BY_FILE, "deepspeed_config_file", ("acc.yaml", 3)),
        ("--config_file acc.yaml", SHARDED, "distributed_type", ("acc.yaml", 1)),
        ("--use_fsdp --fsdp_version 2 --num_processes 2", "", "--use_fsdp", ("a.sh", 1)),
        (
            "--use_deepspeed --deepspeed_config_file other.json --num_processes 2",
            "",
            "--deepspeed_config_file",
            ("a.sh", 1),
        ),
    ],
)
def test_the_file_of_the_program_wins_over_what_the_launcher_names(
    told: Any, launcher: str, config: str, setting: str, place: tuple[str, int]
) -> None:
    launched(launcher, "--deepspeed zero2.json", config)
    data = told("a.sh", code=2)
    assert data["world_size"] == 2
    assert row(data, "train_batch_size")["value"] == 16
    (loser,) = [one for one in data["ignored"] if one["setting"] == setting]
    assert (loser["source"], loser["line"]) == place
    assert "--deepspeed zero2.json" in loser["why"]


def test_a_config_of_the_launcher_that_is_not_there_is_not_silent(told: Any) -> None:
    launched("--config_file none.yaml", "--deepspeed zero2.json")
    (finding,) = [one for one in told("a.sh")["findings"] if one["path"] == "--config_file"]
    assert "none.yaml" in finding["message"] and finding["effect"] == "different numbers"


def test_settings_of_the_launcher_next_to_the_file_of_the_program_stop(told: Any) -> None:
    launched("--config_file acc.yaml", "--deepspeed zero2.json", INLINE)
    stops = [one["setting"] for one in told("a.sh", code=1)["stops"]]
    assert {"gradient_accumulation_steps", "zero_stage", "mixed_precision"} <= {*stops}


def test_options_of_the_launch_fill_in_the_file_and_may_contradict_the_program(told: Any) -> None:
    words = "--use_deepspeed --deepspeed_config_file zero2.json --num_processes 2 --zero_stage 3"
    launched(f"{words} --gradient_clipping 0.3")
    data = told("a.sh", code=1)
    (stop,) = data["stops"]
    assert (stop["setting"], stop["line"]) == ("--gradient_clipping", 1) and "0.3" in stop[
        "message"
    ]
    launched(f"{words} --gradient_clipping 0.3", "--max_grad_norm 0.3")
    data = told("a.sh")
    assert row(data, "gradient_clipping")["winner"]["setting"] == "--gradient_clipping"
    stage = row(data, "zero_optimization.stage")
    assert stage["value"] == 2 and stage["overruled"][0]["setting"] == "--zero_stage"


def test_an_option_of_the_launch_wins_over_settings_of_its_config(told: Any) -> None:
    words = "--config_file acc.yaml --gradient_accumulation_steps 2 --mixed_precision fp16"
    launched(words, "--gradient_accumulation_steps 2", INLINE)
    data = told("a.sh")
    steps = row(data, "gradient_accumulation_steps")
    assert steps["value"] == 2
    assert steps["winner"] == {
        "source": "a.sh", "line": 1, "setting": "--gradient_accumulation_steps"
    }  # fmt: skip
    places = {(one["setting"], one["source"], one["line"]) for one in data["ignored"]}
    assert places >= {
        ("gradient_accumulation_steps", "acc.yaml", 3),
        ("mixed_precision", "acc.yaml", 5),
    }
    assert row(data, "bf16.enabled")["winner"]["setting"] == "--bf16"
    assert "--mixed_precision" in lost(data)


def test_two_kinds_of_run_in_one_launch_stop(told: Any) -> None:
    launched("--use_deepspeed --multi_gpu --deepspeed_config_file zero2.json --num_processes 2")
    (stop,) = told("a.sh", code=1)["stops"]
    assert "--multi_gpu and --use_deepspeed" in stop["message"]


ARGUMENTS = {"output_dir": "out", "bf16": True, "max_steps": 5}


def loose(config: str, **more: Any) -> None:
    """Write a config of accelerate and arguments of the Trainer."""
    launched("", "", config)
    Path("arguments.json").write_text(json.dumps({**ARGUMENTS, **more}))


def test_a_config_of_accelerate_next_to_a_deepspeed_file_is_a_source(told: Any) -> None:
    loose(SHARDED)
    data = told("zero2.json", "arguments.json", "acc.yaml", code=2)
    assert (data["world_size"], row(data, "train_batch_size")["value"]) == (2, 16)
    assert {("acc.yaml", 1), ("acc.yaml", 3)} == {
        (one["source"], one["line"]) for one in data["ignored"] if one["source"] == "acc.yaml"
    }
    loose(INLINE)
    stops = told("zero2.json", "arguments.json", "acc.yaml", code=1)["stops"]
    assert ("acc.yaml", "zero_stage") in {(one["source"], one["setting"]) for one in stops}


def test_check_reads_a_config_of_accelerate_next_to_a_deepspeed_file(
    told: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["check", "zero2.json", "--with", "arguments.json", "--with", "acc.yaml", "--json"]
    loose(SHARDED)
    assert run(words) == 2
    paths = [one["path"] for one in json.loads(capsys.readouterr().out)["findings"]]
    assert "distributed_type" in paths
    loose(BY_FILE.replace("other.json", "zero2.json"))
    assert run(words) == 0
    Path("more.yaml").write_text(SHARDED)
    capsys.readouterr()
    assert run([*words, "--with", "more.yaml"]) == 1
    assert "more.yaml" in json.loads(capsys.readouterr().out)["problems"][0]


def test_arguments_of_the_trainer_next_to_a_config_of_accelerate(told: Any) -> None:
    loose(INLINE)
    data = told("acc.yaml", "arguments.json", code=1)
    (stop,) = data["stops"]
    assert (stop["setting"], stop["line"]) == ("gradient_accumulation_steps", 3)
    loose(INLINE, gradient_accumulation_steps=4)
    data = told("acc.yaml", "arguments.json")
    assert row(data, "bf16.enabled")["winner"]["source"] == "arguments.json"
    loose(SHARDED + "mixed_precision: fp16\n")
    data = told("acc.yaml", "arguments.json", code=2)
    precision = row(data, "mixed_precision")
    assert (precision["value"], precision["winner"]["source"]) == ("bf16", "arguments.json")
    assert precision["overruled"][0]["source"] == "acc.yaml"


def test_the_file_of_the_arguments_wins_over_a_config_of_accelerate(told: Any) -> None:
    loose(SHARDED, deepspeed="zero2.json")
    data = told("acc.yaml", "arguments.json", code=2)
    assert data["dialect"] == "deepspeed"
    assert row(data, "zero_optimization.stage")["winner"]["source"] == "zero2.json"
    assert "distributed_type" in {one["setting"] for one in data["ignored"]}


def test_a_file_of_arguments_that_a_launch_of_accelerate_passes(told: Any) -> None:
    loose(INLINE)
    Path("a.sh").write_text("accelerate launch --config_file acc.yaml run.py arguments.json\n")
    (stop,) = told("a.sh", code=1)["stops"]
    assert (stop["source"], stop["setting"]) == ("acc.yaml", "gradient_accumulation_steps")
    loose(SHARDED, deepspeed="zero2.json")
    Path("a.sh").write_text("accelerate launch --config_file acc.yaml run.py arguments.json\n")
    data = told("a.sh", code=2)
    assert (data["dialect"], data["world_size"]) == ("deepspeed", 2)
    assert "distributed_type" in {one["setting"] for one in data["ignored"]}
    assert run(["check", "a.sh", "--with", "arguments.json"]) == 2


@pytest.mark.parametrize(
    "launcher", ["--multi_gpu --num_processes 2", "--use_fsdp --num_processes 2"]
)
@pytest.mark.parametrize("passed", ["arguments.json", ""])
def test_a_deepspeed_file_in_a_file_of_arguments_wins_over_another_launch(
    told: Any, launcher: str, passed: str
) -> None:
    loose("", deepspeed="zero2.json", bf16=False)
    Path("a.sh").write_text(
        f"export ACCELERATE_DEEPSPEED_ZERO_STAGE=3\n"
        f"accelerate launch {launcher} --mixed_precision fp16 --gradient_clipping 0.3 run.py {passed}\n"
    )
    write({"zero_optimization": {"stage": "auto"}, "train_micro_batch_size_per_gpu": "auto"})
    data = told("a.sh", *(() if passed else ("arguments.json",)), code=2)
    assert (data["dialect"], data["world_size"]) == ("deepspeed", 2)
    assert row(data, "fp16.enabled")["winner"]["setting"] == "--mixed_precision"
    stage = row(data, "zero_optimization.stage")
    assert (stage["value"], stage["winner"]["setting"]) == (3, "ACCELERATE_DEEPSPEED_ZERO_STAGE")
    kind = {"--use_fsdp"} if "fsdp" in launcher else set()
    assert {"--gradient_clipping"} | kind <= {one["setting"] for one in data["ignored"]}


def test_files_are_looked_for_in_the_current_folder_too(told: Any) -> None:
    loose("", deepspeed="configs/zero2.json")
    for folder in ("scripts", "configs"):
        Path(folder).mkdir()
    Path("zero2.json").rename("configs/zero2.json")
    Path("arguments.json").rename("configs/arguments.json")
    Path("scripts/a.sh").write_text("torchrun --nproc_per_node 2 run.py configs/arguments.json\n")
    data = told("scripts/a.sh", "--allow-path", ".")
    assert row(data, "bf16.enabled")["winner"]["source"] == "configs/arguments.json"
    assert row(data, "zero_optimization.stage")["value"] == 2


def test_the_users_own_config_of_accelerate_is_named_for_deepspeed_too(told: Any) -> None:
    launched("--use_deepspeed --zero_stage 2 --num_processes 2")
    (finding,) = [one for one in told("a.sh", code=2)["findings"] if one["path"] == "config_file"]
    assert "default_config.yaml" in finding["message"]


def test_the_users_own_config_of_accelerate_is_read_for_deepspeed_on_demand(
    told: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    launched("--use_deepspeed --zero_stage 2")
    own = Path("cache/accelerate/default_config.yaml")
    own.parent.mkdir(parents=True)
    own.write_text(
        INLINE.replace("gradient_accumulation_steps: 4", "gradient_accumulation_steps: 1")
    )
    data = told("a.sh", "--user-config")
    assert "config_file" not in {one["path"] for one in data["findings"]}
    steps = row(data, "gradient_accumulation_steps")
    assert steps["winner"]["source"] == str(own.resolve())
    assert data["world_size"] == 2


def test_an_overruled_value_is_shown_where_it_is_written(told: Any) -> None:
    launched("--config_file acc.yaml", "", SHARDED + "mixed_precision: fp16\n")
    (one,) = [one for one in told("a.sh", code=2)["findings"] if one["path"] == "mixed_precision"]
    assert one["origin"] == "acc.yaml line 5"
    assert "--bf16" in one["message"] and "the Trainer" in one["message"]


SHELL = {
    "ACCELERATE_GRADIENT_CLIPPING": "0.5",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "8",
    "ACCELERATE_MIXED_PRECISION": "fp16",
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
}
EXPORTS = "".join(f"export {name}={value}\n" for name, value in SHELL.items())


def test_variables_of_the_shell_count_where_accelerate_writes_none(told: Any) -> None:
    launched("--use_deepspeed --zero_stage 2 --num_processes 2")
    Path("a.sh").write_text(f"{EXPORTS}accelerate launch --use_deepspeed --zero_stage 2 run.py\n")
    data = told("a.sh", code=2)
    for name, value in (("gradient_clipping", 0.5), ("gradient_accumulation_steps", 8)):
        assert (row(data, name)["value"], row(data, name)["winner"]["line"]) == (
            value,
            1 + (value == 8),
        )
    assert row(data, "zero_optimization.stage")["value"] == 2
    assert not row(data, "fp16.enabled")["value"]
    lost_variables = {one["setting"] for one in data["ignored"]}
    assert lost_variables == {"ACCELERATE_DEEPSPEED_ZERO_STAGE", "ACCELERATE_MIXED_PRECISION"}


def test_a_variable_that_fills_in_the_file_contradicts_the_trainer(told: Any) -> None:
    launched("--use_deepspeed --deepspeed_config_file zero2.json --num_processes 2")
    Path("a.sh").write_text(EXPORTS + Path("a.sh").read_text())
    stops = {(one["setting"], one["line"]) for one in told("a.sh", code=1)["stops"]}
    assert stops == {
        ("ACCELERATE_GRADIENT_CLIPPING", 1),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", 2),
    }


def test_without_accelerate_nobody_hears_its_variables(told: Any) -> None:
    write({"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 1})
    Path("a.sh").write_text(f"{EXPORTS}deepspeed run.py --deepspeed_config zero2.json\n")
    assert {one["setting"] for one in told("a.sh", code=2)["ignored"]} == SHELL.keys()


def test_a_variable_of_the_users_environment_counts(told: Any) -> None:
    write({name: value for name, value in ZERO2.items() if name not in ("fp16", "bf16")})
    Path("train.sh").write_text(SCRIPT.replace(" --bf16", ""))
    words = ("train.sh", "--env", "ACCELERATE_MIXED_PRECISION=fp16", "--model", "model")
    assert row(told(*words), "fp16.enabled")["winner"]["source"] == "environment"


def test_variables_that_are_not_read_are_named(told: Any) -> None:
    Path("train.sh").write_text(f"export ACCELERATE_DYNAMO_BACKEND=INDUCTOR\n{SCRIPT}")
    findings = told("train.sh", "--model", "model", code=2)["findings"]
    assert "ACCELERATE_DYNAMO_BACKEND" in {one["path"] for one in findings}
    Path("train.sh").write_text(f"export ACCELERATE_GRADIENT_CLIPPING=$(compute)\n{SCRIPT}")
    assert run(["resolve", "train.sh"]) == 1


def test_the_programs_training_arguments_count_over_the_command(told: Any) -> None:
    Path("sft.py").write_text(
        "from transformers import Trainer, TrainingArguments\n"
        "a = TrainingArguments('out', gradient_accumulation_steps=3, learning_rate=RATE)\n"
    )
    write({name: value for name, value in ZERO2.items() if name != "scheduler"})
    Path("b.sh").write_text(
        "deepspeed --num_gpus 2 sft.py --deepspeed zero2.json --gradient_accumulation_steps 2\n"
    )
    data = told("b.sh", code=2)
    steps = row(data, "gradient_accumulation_steps")
    assert (steps["value"], steps["winner"]["source"]) == (3, "sft.py")
    assert "--gradient_accumulation_steps" in {one["setting"] for one in data["ignored"]}
    assert "TrainingArguments" in {one["path"] for one in data["findings"]}
    data = told("b.sh", "--with", "learning_rate=1e-3")
    assert "TrainingArguments" not in {one["path"] for one in data["findings"]}


@pytest.mark.parametrize(
    "launch",
    [
        f"torchrun --nproc_per_node 2 {TRAINED} --deepspeed zero2.json",
        f"accelerate launch --config_file acc.yaml {TRAINED}",
        f"accelerate launch --config_file acc.yaml {TRAINED} --deepspeed zero2.json",
    ],
)
def test_variables_of_fsdp_under_deepspeed_are_named(told: Any, launch: str) -> None:
    launched("", "", INLINE)
    Path("a.sh").write_text(f"export FSDP_OFFLOAD_PARAMS=true\n{launch}\n")
    assert "FSDP_OFFLOAD_PARAMS" in {one["setting"] for one in told("a.sh")["ignored"]}


def test_defaults_of_the_programs_own_class_are_heard_where_no_flag_is(told: Any) -> None:
    Path("sft.py").write_text(
        "import transformers\n"
        "class Own(transformers.TrainingArguments):\n"
        "    gradient_accumulation_steps: int = field(default=3)\n"
        "    max_grad_norm: float = CLIP\n"
        "    model_max_length: int = LENGTH\n"
        "    own_flag: str\n"
        "a = transformers.HfArgumentParser(Own)\n"
    )
    write({name: value for name, value in ZERO2.items() if name != "scheduler"})
    launch = "deepspeed --num_gpus 2 sft.py --deepspeed zero2.json"
    for flag, steps in (("", 3), (" --gradient_accumulation_steps 2", 2)):
        Path("b.sh").write_text(f"{launch}{flag}\n")
        data = told("b.sh", code=2)
        assert row(data, "gradient_accumulation_steps")["value"] == steps
        (message,) = [one["message"] for one in data["findings"] if one["path"] == "Own"]
        assert message.startswith("max_grad_norm: ")
