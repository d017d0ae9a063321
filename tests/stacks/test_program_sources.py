"""What programs and scripts say of a run of the Trainer where no flag says it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bridge.cli import run

pytestmark = pytest.mark.once
FILE = """\
{"zero_optimization": {"stage": 2}, "gradient_clipping": 1.0, "bf16": {"enabled": "auto"},
 "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
 "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
"""
CALL = 'TrainingArguments(output_dir="o", learning_rate={}, max_steps=9, bf16=True, deepspeed="z.json")'
PARSED = "TrainingArguments, Trainer, HfArgumentParser\nHfArgumentParser(TrainingArguments)\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("z.json").write_text(FILE)
    Path("train.py").write_text(f"from transformers import {PARSED}Trainer(model, args).train()\n")


def launch(words: str, capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], int]:
    """Return values of settings of a launch by name, and the exit code."""
    Path("run.sh").write_text(f"{words}\n")
    code = run(["resolve", "run.sh", "--json"])
    shown = capsys.readouterr()
    found = json.loads(shown.out) if shown.out.startswith("{") else {}
    rows = {row["setting"]: row["value"] for row in found.get("settings", ())}
    return {**rows, "text": shown.out + shown.err}, code


def write_program(rate: str, before: str = "", after: str = "") -> None:
    Path("train.py").write_text(
        f"from transformers import TrainingArguments, Trainer\n{before}\n"
        f"Trainer(model, {CALL.format(rate)}).train()\n{after}\n"
    )


def test_a_file_that_only_a_call_names(capsys: pytest.CaptureFixture[str]) -> None:
    write_program("1e-4")
    rows, code = launch("torchrun --nproc_per_node 8 train.py", capsys)
    assert (rows["optimizer.params.lr"], rows["zero_optimization.stage"]) == (1e-4, 2), rows["text"]
    assert code == 0


@pytest.mark.parametrize(
    ("before", "after", "is_read"),
    [
        ("LR = 3e-4", "", True),
        ("LR: float = 3e-4", "", True),
        ("LR = 3e-4\nLR = 1e-4", "", False),
        ("LR = 3e-4", "LR += 1", False),
        ("LR = 3e-4", "def f(LR): pass", False),
        ("LR = 3e-4\nfrom settings import *", "", False),
        ("if x:\n    LR = 3e-4", "", False),
        ("LR = 3e-4", "for LR in range(2): pass", False),
        ("LR = float(3e-4)", "", False),
    ],
)
def test_a_constant_of_the_program(
    before: str, after: str, is_read: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    write_program("LR", before, after)
    rows, code = launch("torchrun --nproc_per_node 8 train.py", capsys)
    assert (rows["optimizer.params.lr"] == 3e-4) is is_read
    assert code == (0 if is_read else 2)


def test_a_call_in_a_module_that_the_program_imports(capsys: pytest.CaptureFixture[str]) -> None:
    Path("train.py").write_text("from transformers import Trainer\nfrom own.util import build\n")
    Path("own").mkdir()
    Path("own/util.py").write_text(f"def build():\n    return {CALL.format('2e-4')}\n")
    rows, code = launch("torchrun --nproc_per_node 8 train.py", capsys)
    assert rows["optimizer.params.lr"] == 2e-4 and code == 0, rows["text"]
    Path("other.py").write_text(CALL.format("5e-4"))
    Path("train.py").write_text("import other\nfrom own.util import build\n")
    rows, code = launch("torchrun --nproc_per_node 8 train.py", capsys)
    assert code in (1, 2) and "optimizer.params.lr" not in rows


def test_an_accelerator_in_a_module_that_the_program_imports(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("a.yaml").write_text(
        "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config:\n  zero_stage: 2\n"
        "  gradient_accumulation_steps: 1\n  gradient_clipping: 1.0\n"
    )
    Path("loop.py").write_text("import util\nutil.start()\n")
    Path("util.py").write_text("def start():\n    return Accelerator(mixed_precision='fp16')\n")
    rows, _ = launch("accelerate launch --config_file a.yaml loop.py", capsys)
    assert rows["fp16.enabled"] is True, rows["text"]


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ("--gradient_accumulation_steps 4.0", 1, "found '4.0', expected a whole number"),
        ("--warmup_steps 0.5", 2, ""),
        ("--no_average_tokens_across_devices", 2, ""),
        ("--no-average-tokens-across-devices", 2, ""),
        (
            '--accelerator_config \'{"gradient_accumulation_kwargs": {"num_steps": 4}}\'',
            2,
            "num_steps makes the Trainer accumulate",
        ),
    ],
)
def test_words_of_the_parser(
    words: str, code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, found = launch(f"deepspeed train.py --deepspeed z.json --max_steps 9 {words}", capsys)
    assert says in rows["text"]
    assert found in (code, 0 if not says else code), rows["text"]
    if "average" in words:
        Path("other.sh").write_text("deepspeed train.py --deepspeed z.json --max_steps 9\n")
        assert run(["diff", "run.sh", "other.sh"]) == 2
        assert "average_tokens_across_devices" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("code", "is_read"),
    [
        ('c = json.load(open("z.json")); json.dump(c, open("z.json", "w"))', False),
        ('c = json.load(open("other.json")); json.dump(c, open("other.json", "w"))', True),
        ("print(1)", True),
    ],
)
def test_a_file_that_python_in_the_script_writes(
    code: str, is_read: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    start = "deepspeed train.py --deepspeed z.json --max_steps 9"
    for text in (f"python - <<EOF\nimport json\n{code}\nEOF", f"python -c 'import json; {code}'"):
        rows, found = launch(f"{text}\n{start}", capsys)
        assert ("zero_optimization.stage" in rows) is is_read, rows["text"]
        assert is_read or (found == 1 and "python may write the file" in rows["text"])


INLINE = (
    "distributed_type: DEEPSPEED\nmixed_precision: bf16\nnum_processes: 2\ndeepspeed_config:\n  zero_stage: 3\n"
    "  gradient_accumulation_steps: 4\n  gradient_clipping: 1.0\n"
)
BY_FILE = (
    "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config:\n"
    "  deepspeed_config_file: other.json\n"
)
STARTED = "accelerate launch --config_file a.yaml train.py"


def write_object(after: str, words: str = "bf16=True, gradient_accumulation_steps=4") -> None:
    Path("train.py").write_text(
        "from transformers import TrainingArguments, Trainer\n"
        f"args = TrainingArguments('o', learning_rate=1e-4, max_steps=9, {words})\n{after}\n"
    )


def test_the_precision_of_a_call_is_the_one_of_accelerates_section(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("a.yaml").write_text(INLINE)
    write_object("Trainer(args=args)")
    rows, code = launch(STARTED, capsys)
    assert (rows.get("bf16.enabled"), code) == (True, 0), rows["text"]
    write_object("Trainer(args=args)", "gradient_accumulation_steps=4")
    rows, code = launch(STARTED, capsys)
    assert code == 1 and "bf16+bf16_full_eval" in rows["text"]


@pytest.mark.parametrize(
    "words",
    [
        STARTED,
        f"{STARTED} --deepspeed other.json",
        "accelerate launch --num_processes 2 --use_deepspeed --deepspeed_config_file other.json train.py",
        "ACCELERATE_USE_DEEPSPEED=true ACCELERATE_DEEPSPEED_CONFIG_FILE=other.json"
        " torchrun --nproc_per_node 2 train.py",
    ],
)
def test_the_file_of_a_call_wins_over_all_that_the_launch_names(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("a.yaml").write_text(BY_FILE)
    Path("other.json").write_text(FILE.replace('"stage": 2', '"stage": 1'))
    write_program("1e-4")
    rows, code = launch(words, capsys)
    assert (rows.get("zero_optimization.stage"), code) == (2, 2), rows["text"]
    ignored = [one["value"] for one in json.loads(rows["text"])["ignored"]]
    assert ignored.count("other.json") == 1 + ("--deepspeed other" in words)


def test_a_config_in_a_call_is_no_file(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.yaml").write_text(BY_FILE)
    Path("other.json").write_text(FILE)
    for config in ('{"zero_optimization": {"stage": 1}}', '"none.json"'):
        write_object("", f"deepspeed={config}")
        rows, code = launch(STARTED, capsys)
        assert code == 1 and ("train.py" if "{" in config else "none.json") in rows["text"]


def test_assignments_before_the_trainer_count(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.yaml").write_text(INLINE)
    write_object(
        "args.learning_rate = 1e-3\nargs.max_steps = 5\nargs.own = 1\nargs.logging_steps = 2\n"
        "args.set_logging(steps=3)\nprint(vars(args), args.to_dict())\nTrainer(args=args).train()"
    )
    rows, code = launch(STARTED, capsys)
    found = (rows["learning_rate"], rows["max_steps"], code)
    assert found == (1e-3, 5, 0), rows["text"]


@pytest.mark.parametrize(
    ("after", "name"),
    [
        ("if x:\n    args.max_steps = 5", "max_steps"),
        ("args.max_steps = 5\nfor i in y:\n    args.max_steps = 6", "max_steps"),
        ("args.max_steps = count()", "max_steps"),
        ("args.max_steps += 1", "max_steps"),
        ("args.max_steps, x = 5, 6", "max_steps"),
        ("args.bf16 = False", "bf16"),
        ("Trainer(args=args).train()\nargs.max_steps = 5", "max_steps"),
        ("t = Trainer(args=args)\nt.args.max_steps = 5", "max_steps"),
        ("other = args\nother.max_steps = 5", "max_steps"),
        ("def f(own):\n    own.max_steps = 5\nf(args)", "max_steps"),
        ("args.lr_scheduler_kwargs['x'] = 1", "lr_scheduler_kwargs"),
        ("args.lr_scheduler_kwargs.update(x=1)", "lr_scheduler_kwargs"),
        ("setattr(args, 'max_steps', 5)", "max_steps"),
        ("setattr(args, name, 5)", "*"),
        ("vars(args)['max_steps'] = 5", "*"),
        ("args.__dict__.update(own)", "*"),
        ("own = vars(args)", "*"),
        ("args = dataclasses.replace(args, max_steps=5)", "max_steps"),
        ("args = tune(args)", "*"),
        ("args = args.set_training(learning_rate=1e-3)", "set_training()"),
    ],
)
def test_other_changes_of_the_object_are_named(
    after: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("a.yaml").write_text(INLINE)
    write_object(after)
    rows, code = launch(STARTED, capsys)
    (finding,) = [one for one in json.loads(rows["text"])["findings"] if "(" in one["path"]]
    assert (finding["path"], code) == (f"TrainingArguments({name})", 2), rows["text"]
    assert "changed after the call" in finding["message"]


def test_what_the_call_filled_in_is_not_changed_behind_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_object("args.learning_rate = 1e-3\nargs.max_steps = 5", 'deepspeed="z.json"')
    rows, code = launch("torchrun --nproc_per_node 2 train.py", capsys)
    assert (rows["optimizer.params.lr"], rows["max_steps"], code) == (1e-4, 5, 2), rows["text"]
    assert "TrainingArguments(learning_rate)" in rows["text"]


PARSER = (
    "from transformers import HfArgumentParser, Trainer, TrainingArguments\n"
    "def main():\n"
    "    parser = HfArgumentParser((Own, TrainingArguments))\n"
    "    if one:\n        own, args = parser.parse_json_file(one)\n"
    "    else:\n        own, args = parser.parse_args_into_dataclasses()\n"
    "    {}\n    Trainer(args=args).train()\n"
)


@pytest.mark.parametrize(
    ("change", "steps", "rate"),
    [
        ("args.max_steps = 7", 7, 1e-4),
        ("if x: args.max_steps = 7", "unknown", 1e-4),
        ("args.max_steps = count()", "unknown", 1e-4),
        ("own.max_steps = 7", 9, 1e-4),
        ("args.learning_rate = 1e-5", 9, 1e-4),
        ("args.learning_rate *= 2", 9, "unknown"),
    ],
)
def test_changes_of_what_a_parser_returns(
    change: str, steps: Any, rate: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("train.py").write_text(PARSER.format(change))
    words = "torchrun --nproc_per_node 2 train.py --deepspeed z.json --max_steps 9"
    rows, _ = launch(f"{words} --learning_rate 1e-4 --neftune_noise_alpha 5 --bf16", capsys)
    assert (rows["max_steps"], rows["optimizer.params.lr"]) == (steps, rate), rows["text"]
    assert rows["neftune_noise_alpha"] == 5


def test_none_after_the_call_is_no_old_value(capsys: pytest.CaptureFixture[str]) -> None:
    Path("train.py").write_text(PARSER.format("args.neftune_noise_alpha = None"))
    words = "torchrun --nproc_per_node 2 train.py --deepspeed z.json --max_steps 9 --bf16"
    rows, _ = launch(f"{words} --learning_rate 1e-4 --neftune_noise_alpha 5", capsys)
    assert rows["neftune_noise_alpha"] == "unknown"


def test_clipping_of_accelerate_under_deepspeed(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.yaml").write_text(INLINE)
    start = "import torch\nfrom accelerate import Accelerator\naccelerator = Accelerator()\n"
    for call, code in (
        ("accelerator.clip_grad_norm_(model.parameters(), 0.5)", 2),
        ("accelerator.clip_grad_norm_(model.parameters(), 1.0)", 0),
        ("accelerator.clip_grad_norm_(model.parameters(), args.clip)", 2),
        ("accelerator.clip_grad_value_(model.parameters(), 1.0)", 1),
        ("torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)", 0),
    ):
        Path("loop.py").write_text(f"{start}{call}\n")
        rows, _ = launch(STARTED.replace("train.py", "loop.py"), capsys)
        effects = [
            one["effect"] for one in json.loads(rows["text"])["findings"] if "clip_" in one["path"]
        ]
        assert effects == {0: [], 1: ["the run stops"], 2: ["different numbers"]}[code], rows[
            "text"
        ]


ASSIGNED: dict[str, tuple[Any, dict[str, Any]]] = {
    "data_seed": (9, {}),
    "dataloader_drop_last": (True, {"max_steps": -1, "num_train_epochs": 1}),
    "label_smoothing_factor": (0.3, {}),
    "lr_scheduler_kwargs": ({"num_cycles": 3}, {"lr_scheduler_type": "cosine"}),
    "lr_scheduler_type": ("cosine", {}),
    "max_steps": (2, {}),
    "neftune_noise_alpha": (5.0, {}),
    "num_train_epochs": (1.0, {"max_steps": -1}),
    "optim": ("sgd", {}),
    "seed": (7, {}),
    "train_sampling_strategy": ("sequential", {}),
    "warmup_steps": (2, {}),
    "bf16": (True, {}),
}
"""Of arguments, a value other than the default of the runs below, and what these need besides."""


@pytest.mark.parametrize("name", ASSIGNED)
def test_the_trainer_takes_late_arguments_from_the_object(name: str, tmp_path: Path) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from bridge.stack.program_source import LATE

    sizes = {"vocab_size": 32, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1}

    def train(called: dict[str, Any], assigned: dict[str, Any]) -> Any:
        torch.manual_seed(0)
        config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)
        model = transformers.LlamaForCausalLM(config)
        rows = [{"input_ids": one, "labels": one} for one in torch.randint(0, 32, (11, 6))]
        usual = {
            "max_steps": 3,
            "per_device_train_batch_size": 2,
            "learning_rate": 1e-2,
            "use_cpu": True,
        }
        usual |= {
            "report_to": "none",
            "save_strategy": "no",
            "logging_steps": 1,
            "disable_tqdm": True,
        }
        args = transformers.TrainingArguments(str(tmp_path), **{**usual, "seed": 1, **called})
        for key, value in assigned.items():
            setattr(args, key, value)
        trainer = transformers.Trainer(model, args, train_dataset=rows)
        trainer.train()
        checkpoints = model.is_gradient_checkpointing
        return checkpoints, [
            (one.get("loss"), one.get("learning_rate"), one.get("grad_norm"))
            for one in trainer.state.log_history
        ]

    value, usual = ASSIGNED[name]
    assigned, called, neither = (
        train(usual, {name: value}), train({**usual, name: value}, {}), train(usual, {})
    )  # fmt: skip
    assert called != neither
    assert assigned == (called if name in LATE else neither)


def test_each_late_argument_has_a_run() -> None:
    from bridge.stack.program_source import LATE

    assert ASSIGNED.keys() >= LATE
