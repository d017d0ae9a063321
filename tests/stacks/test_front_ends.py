"""Front ends: programs whose files and commands start Hugging Face's Trainer."""

from __future__ import annotations

import fnmatch
import json
from pathlib import Path
from typing import Any

import pytest

from bridge.cli import run
from bridge.files import parse
from bridge.stack import registry
from bridge.stack.training_arguments import ARGUMENTS, RETIRED
from compat.axolotl import front_end as axolotl
from compat.llama_factory import front_end as llama_factory
from compat.ms_swift import front_end as ms_swift

pytestmark = pytest.mark.once
ZERO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 2},
}
FACTORY = """\
model_name_or_path: Qwen/Qwen3-4B
stage: sft
do_train: true
finetuning_type: full
deepspeed: ds.json
dataset: identity
template: qwen3
cutoff_len: 2048
output_dir: saves
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
learning_rate: 1.0e-5
max_steps: 100
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
"""
RECIPE = """\
base_model: Qwen/Qwen3-4B
datasets:
  - path: tatsu-lab/alpaca
    type: alpaca
sequence_len: 2048
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 3
learning_rate: 2e-5
optimizer: adamw_torch
lr_scheduler: cosine
max_steps: 100
warmup_ratio: 0.1
bf16: true
deepspeed: ds.json
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text(json.dumps(ZERO))
    Path("f.yaml").write_text(FACTORY)
    Path("a.yaml").write_text(RECIPE)


def resolve(capsys: pytest.CaptureFixture[str], file: str, code: int = 2) -> dict[str, Any]:
    assert run(["resolve", file, "--world-size", "8", "--json"]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def settings(found: dict[str, Any]) -> dict[str, Any]:
    return {
        row["setting"]: (row["value"], row["winner"]["setting"], row["winner"]["source"], row["winner"]["line"])
        for row in found["settings"]
    }  # fmt: skip


def said(capsys: pytest.CaptureFixture[str], file: str, code: int) -> str:
    assert run(["check", file, "--world-size", "8"]) == code
    return " ".join("".join(capsys.readouterr()).split())


@pytest.mark.parametrize(
    ("file", "micro", "name", "line"),
    [("f.yaml", "per_device_train_batch_size", "warmup_ratio", 15), ("a.yaml", "micro_batch_size", "warmup_ratio", 13)],
)  # fmt: skip
def test_a_file_is_a_run_of_the_trainer(
    capsys: pytest.CaptureFixture[str], file: str, micro: str, name: str, line: int
) -> None:
    rows = settings(resolve(capsys, file))
    assert rows["train_micro_batch_size_per_gpu"][:2] == (2, micro)
    assert rows["train_batch_size"][0] == 2 * 4 * 8
    assert rows["warmup_steps"][1:2] == (name,) and rows["warmup_steps"][3] == line
    assert rows["zero_optimization.stage"][0] == 2 and rows["bf16.enabled"][0] is True
    words = ["convert", file, "--to", "deepspeed", "--world-size", "8", "-o", "o.json"]
    assert run(words) in (0, 2)
    made = json.loads(Path("o.json").read_text())
    assert made["train_batch_size"] == 64 and made["optimizer"]["type"] == "AdamW"
    assert run(["diff", file, file, "--world-size", "8"]) == 0
    assert run(["layout", file, "--world-size", "8", "--model", "tiny"]) == 0
    capsys.readouterr()


@pytest.mark.parametrize(
    ("command", "value", "source"),
    [
        ("llamafactory-cli train f.yaml learning_rate=3e-5", 3e-5, "run.sh"),
        ("FORCE_TORCHRUN=1 NPROC_PER_NODE=8 lmf train f.yaml", 1e-5, "f.yaml"),
        ("torchrun --nproc_per_node 8 src/train.py f.yaml", 1e-5, "f.yaml"),
        ("deepspeed --num_gpus 8 src/train.py --stage sft --do_train --finetuning_type full --model_name_or_path m"
         " --dataset d --learning_rate 3e-5 --output_dir o --deepspeed ds.json --bf16", 3e-5, "run.sh"),
        ("axolotl train a.yaml --learning-rate 3e-5", 3e-5, "run.sh"),
        ("axolotl train a.yaml --launcher torchrun -- --nproc_per_node=8", 2e-5, "a.yaml"),
        ("accelerate launch --num_processes 8 -m axolotl.cli.train a.yaml --learning_rate=3e-5", 3e-5, "run.sh"),
    ],
)  # fmt: skip
def test_a_command_names_the_file_and_wins_over_it(
    capsys: pytest.CaptureFixture[str], command: str, value: float, source: str
) -> None:
    Path("run.sh").write_text(f"#!/bin/bash\n{command}\n")
    rows = settings(resolve(capsys, "run.sh"))
    assert rows["learning_rate"][0] == value
    assert rows["learning_rate"][2] in (source, "") and (source == "f.yaml") is (
        rows["learning_rate"][2] == "f.yaml"
    )
    assert "8" in json.dumps(rows["train_batch_size"]) or rows["train_batch_size"][0] % 8 == 0


@pytest.mark.parametrize(
    ("file", "written", "instead", "code", "says"),
    [
        ("f.yaml", "bf16: true", "bf16: true\nlerning_rate: 1e-4",
         1, "lerning_rate: LLaMA-Factory has no such setting, and stops at it"),
        ("f.yaml", "finetuning_type: full", "finetuning_type: lora\nlora_rank: 16",
         2, "trains lora of rank 16 on all modules (alpha 32"),
        ("f.yaml", "finetuning_type: full\n", "", 2, "not given: LLaMA-Factory trains lora of rank 8"),
        ("f.yaml", "do_train: true\n", "", 2, "LLaMA-Factory then trains nothing"),
        ("f.yaml", "finetuning_type: full", "finetuning_type: full\nuse_dora: true",
         1, "use_dora: only finetuning_type lora takes it"),
        ("f.yaml", "finetuning_type: full", "finetuning_type: full\nlora_rank: 8\nlora_dropout: 0.1",
         2, "nothing reads it unless finetuning_type is lora"),
        ("f.yaml", "bf16: true", "pure_bf16: true", 2, "without autocast"),
        ("f.yaml", "bf16: true", 'bf16: "true"', 1, "expected true or false, without quotes"),
        ("f.yaml", "cutoff_len: 2048", "packing: true\ncutoff_len: 4096", 2, "cutoff_len - 1 = 4095"),
        ("f.yaml", "do_train: true", "do_train: true\nuse_galore: true",
         1, "deepspeed: use_galore does not go with it"),
        ("f.yaml", "stage: sft", "stage: dpo", 2, "stage (line 2) dpo"),
        ("f.yaml", "stage: sft", "stage: sft\ntensor_model_parallel_size: 2", 1, "trains through Megatron"),
        ("f.yaml", "bf16: true", "bf16: true\ngradient_checkpointing: false",
         2, "checkpoints activations all the same"),
        ("a.yaml", "bf16: true", "bf16: true\nlr: 1e-4", 2, "axolotl has no such setting, and ignores it"),
        ("a.yaml", "bf16: true", "bf16: true\nper_device_train_batch_size: 8",
         2, "per_device_train_batch_size (line 15) 8: axolotl has no such setting"),
        ("a.yaml", "bf16: true", "bf16: auto\nadapter: lora\nlora_r: 8\nlora_alpha: 16",
         2, "adapters of rank 8, alpha 16"),
        ("a.yaml", "bf16: true", "bf16: true\nmax_grad_norm: 0.3", 2, "0.3 is not used: gradient_clipping 1.0"),
        ("a.yaml", "bf16: true", "bf16: true\nwarmup_steps: 10", 1, "warmup_steps is given too"),
        ("a.yaml", "learning_rate: 2e-5\n", "", 1, "learning_rate: not given; axolotl stops without it"),
        ("a.yaml", "max_steps: 100\n", "", 2, "one step of warm-up less"),
        ("a.yaml", "deepspeed: ds.json", "context_parallel_size: 2\ndp_shard_size: 4\nfsdp_config: {fsdp_version: 2}",
         2, "axolotl#3498"),
    ],
)  # fmt: skip
def test_what_a_front_end_refuses_ignores_or_sets_itself(
    capsys: pytest.CaptureFixture[str], file: str, written: str, instead: str, code: int, says: str
) -> None:
    text = Path(file).read_text()
    assert written in text
    Path(file).write_text(text.replace(written, instead))
    assert says in said(capsys, file, code)


def words_of(module: Any, text: str) -> dict[str, str]:
    document, _ = module.start(parse(text, "x.yaml", ".yaml"), 8)
    texts = document.data.launches[0].texts
    return dict(zip(texts[::2], texts[1::2], strict=True))


@pytest.mark.parametrize(
    ("instead", "steps"),
    [("warmup_ratio: 0.1", "10"), ("warmup_ratio: 0.019", "2"), ("warmup_steps: 1", "2"), ("weight_decay: 0.0", "3")],
)  # fmt: skip
def test_warm_up_of_axolotl(instead: str, steps: str) -> None:
    # With max_steps 100: the share rounded down, no warm-up of one step, and 3 % where nothing is said.
    assert (
        words_of(axolotl, RECIPE.replace("warmup_ratio: 0.1", instead))["--warmup_steps"] == steps
    )


def test_fsdp_of_axolotl(capsys: pytest.CaptureFixture[str]) -> None:
    fsdp = "fsdp_version: 2\nfsdp_config:\n  offload_params: true\n  auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"
    Path("a.yaml").write_text(RECIPE.replace("deepspeed: ds.json\n", fsdp))
    rows = settings(resolve(capsys, "a.yaml"))
    assert rows["fsdp.fsdp_version"][0] == 2 and rows["fsdp.cpu_offload"][0] not in (False, None)


def test_a_deepspeed_section_in_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.yaml").write_text(RECIPE.replace("deepspeed: ds.json", f"deepspeed: {json.dumps(ZERO)}"))  # fmt: skip
    assert settings(resolve(capsys, "a.yaml"))["zero_optimization.stage"][0] == 2


@pytest.mark.parametrize("module", [llama_factory, axolotl, ms_swift])
def test_tables_have_each_setting_once(module: Any) -> None:
    table = module.table()
    assert not table.defaults.keys() & table.gone.keys()
    assert set(table.passed.values()) <= {*ARGUMENTS, *RETIRED}
    names = {*table.defaults, *table.gone, *table.passed}
    patterns = {one for row in (*table.effects.values(), table.needs) for one in row}
    assert [one for one in patterns if not fnmatch.filter(names, one)] == []
    named = {name.removeprefix("!") for _, when, _ in table.refusals for name in when}
    known = {*table.defaults, *table.passed, *ARGUMENTS, "ranks"}
    assert named <= known
    assert {row[0] for row in table.needs.values()} <= known


def test_front_ends_are_no_stacks() -> None:
    assert {"axolotl", "llama_factory", "ms_swift"} <= set(registry.FRONT_ENDS)
    assert not {"axolotl", "llama_factory", "ms_swift"} & set(registry.names())


@pytest.mark.parametrize(
    "text",
    ["base_model: m\nmodels: []\nmerge_method: ties\n", "stage: x\n",
     "learning_rate: 1\noutput_dir: o\nper_device_train_batch_size: 1\n"],
)  # fmt: skip
def test_other_files_are_not_taken(text: str) -> None:
    data = parse(text, "x.yaml", ".yaml").data
    assert not any(module.starts(data) for module in (llama_factory, axolotl, ms_swift))


SWIFT = "NPROC_PER_NODE=4 swift sft --model m --dataset a b --torch_dtype bfloat16 --deepspeed zero3 --warmup_ratio 0.05"


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ("", 2, "trains lora of rank 8, alpha 32 and dropout 0.05 on all-linear"),
        ("--tuner_type full --packing true", 1, "it needs attn_impl flash_attn"),
        ("--warmup_steps 10", 1, "warmup_steps is given too"),
        ("--lerning_rate 1", 1, "ms-swift has no such setting, and stops at it"),
        ("--torch_dtype float32", 2, "computes in fp16 under autocast"),
        ("--rlhf_type dpo", 2, "with a loss that stagebridge does not read"),
    ],
)
def test_commands_of_ms_swift(
    capsys: pytest.CaptureFixture[str], words: str, code: int, says: str
) -> None:
    Path("run.sh").write_text(f"{SWIFT} {words}\n")
    assert run(["check", "run.sh"]) == code
    assert says in " ".join("".join(capsys.readouterr()).split())


def test_defaults_of_ms_swift(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.sh").write_text(f"{SWIFT} --tuner_type full --per_device_train_batch_size 2\n")
    assert run(["resolve", "run.sh", "--json"]) == 2
    rows = settings(json.loads(capsys.readouterr().out))
    # 16 samples of a step on 4 ranks, the rate of full training, and the config that is called zero3.
    assert rows["gradient_accumulation_steps"][0] == 2 and rows["train_batch_size"][0] == 16
    assert rows["learning_rate"][0] == 1e-5 and rows["weight_decay"][0] == 0.1
    assert rows["adam_beta2"][0] == 0.95 and rows["lr_scheduler_type"][0] == "cosine"
    assert rows["zero_optimization.stage"][0] == 3 and rows["bf16.enabled"][0] is True
    assert rows["warmup_steps"][:2] == (0.05, "--warmup_ratio")
