"""What nobody knows counts as different numbers, and is named: in every stack's reader, and in every command."""

from __future__ import annotations

import random
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import compat
from bridge.cli import run
from bridge.errors import ConfigError
from bridge.files import Document, Script
from bridge.report import as_json, as_text
from bridge.stack.dialect import Config
from bridge.stack.rules import Effect
from bridge.translation.diff import compare
from bridge.translation.translate import translate

LAUNCH = (
    "torchrun --nproc_per_node 8 pretrain_gpt.py --micro-batch-size 1 --global-batch-size 8 --num-layers 2 --hidden-size 64"
    " --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --lr 1e-4 --train-iters 10 --bf16"
)
FORKS = [
    "--do-layernorm-bias-weight-decay",
    "--embedding-multiplier",
    "--epochs",
    "--eps-clip",
    "--freeze-LM",
    "--kl-loss-coef",
    "--label-smoothing",
    "--log-optimizer-states-to-tensorboard",
    "--logit-softcap",
    "--lr-warmup-tokens",
    "--no-scaled-init",
    "--patch-tokenizer-type",
    "--train-tokens",
    "--universal-checkpoint",
    "--use-rotary-v2",
    "--zero-stage",
]
"""Flags of Megatron-DeepSpeed, Pai-Megatron-Patch, slime and other forks."""
WORDS = [
    "log",
    "save",
    "data",
    "name",
    "dir",
    "wandb",
    "no",
    "use",
    "loss",
    "alpha",
    "epochs",
    "print",
    "debug",
    "file",
]


def names(count: int, joint: str) -> list[str]:
    """Made-up names, also of words that sound harmless."""
    chance = random.Random(count)
    return [f"{joint.join(chance.sample(WORDS, 3))}{chance.randrange(10)}" for _ in range(count)]


def launch(words: str) -> Config:
    script = Document(Script(f"{LAUNCH} {words}\n", "launch.sh"), {}, "script", name="launch.sh")
    return compat.load("megatron").read(script, "0.19.2", lenient=True)


def text_of(config: Config, target: str) -> tuple[str, Any]:
    result, out = translate(config, compat.load(target)), StringIO()
    told = as_json.remarks_of(result)
    as_text.text(result, Console(file=out, width=200), findings=told)
    return out.getvalue(), told


FLAGS = [*FORKS, *(f"--{name}" for name in names(12, "-"))]
TARGETS = sorted(name for name in compat.names() if name not in ("megatron", "huggingface"))


@pytest.mark.parametrize("place", range(len(FLAGS)))
def test_a_flag_of_a_launch(place: int) -> None:
    flag, value = FLAGS[place], ("", " 1", " 0.1", " /data/x", "=name")[place % 5]
    config, plain = launch(flag + value), launch("")
    text, told = text_of(config, TARGETS[place % len(TARGETS)])
    for found in (as_json.all_of(config), told, compare(config, plain), compare(plain, config)):
        assert [one.effect for one in found if one.path == flag] == [Effect.NUMBERS]
    # Without --all, and before all that has a milder effect.
    lines = text.splitlines()
    assert lines[0].startswith(("different numbers", "will not start")) and any(
        flag in line for line in lines[3:6]
    )


ENDS = [
    ("--exit-interval 5", "--exit-interval 10"), ("--exit-duration-in-mins 1", ""), ("--phase-transition-iterations 5", ""),
    ("--ckpt-convert-format torch --ckpt-convert-save out --load in", "--load in --exit-on-missing-checkpoint"),
    ("--error-injection-rate 3", "--error-injection-type transient_error"), ("--skip-train", "--exit-signal-handler"),
]  # fmt: skip
"""Flags with which a run of 10 steps ends early, each with flags with which it does not."""


@pytest.mark.parametrize(("early", "whole"), ENDS)
def test_a_run_that_ends_earlier_is_another_run(early: str, whole: str) -> None:
    short, long, plain = (
        launch(early),
        launch(whole),
        launch("--load in" if "--load in" in whole else ""),
    )
    for found in (
        compare(short, plain),
        compare(plain, short),
        translate(short, compat.load("deepspeed")).findings,
    ):
        assert early.split()[0][2:].replace("-", "_") in {
            one.path for one in found if one.effect is Effect.NUMBERS
        }
    assert {one.effect for one in compare(long, plain)} <= {Effect.NONE}


def test_a_run_of_another_stack_that_ends_earlier_is_another_run() -> None:
    def effects(stack: str, one: dict[str, Any], other: dict[str, Any]) -> set[Effect]:
        sides = [compat.load(stack).read(data, world_size=1) for data in (one, other)]
        return {found.effect for found in compare(*sides)}

    model = {"base_model": {"vocab_size": 128}}
    length = {"train_iters": 20, "checkpoint": {"interval": 5}}
    fast = {"run": {"experiment_dir": "out"}, "training": length, "model": model}
    for stop, worst in ((10, Effect.NUMBERS), (20, Effect.NONE)):
        assert effects(
            "fast_llm", fast, {**fast, "training": {**length, "shutdown": {"interval": stop}}}
        ) == {worst}
    for on, worst in ((True, Effect.NUMBERS), (False, Effect.NONE)):
        assert effects(
            "deepspeed",
            {**DEEPSPEED, "autotuning": {"enabled": on, "end_profile_step": 3}},
            DEEPSPEED,
        ) == {worst}


HUGGING = "deepspeed --num_gpus 1 train.py --deepspeed ds.json --per_device_train_batch_size 2 --learning_rate 1e-4"
OTHERS = (
    "--num_train_epochs 3", "--max_steps 20", "--seed 7", "--label_smoothing_factor 0.1", "--auto_find_batch_size",
    "--patience 3",
)  # fmt: skip
"""Arguments of a program with the Trainer, each of another run."""


def test_launches_with_other_arguments_of_the_program_are_other_runs(tmp_path: Path) -> None:
    text = '{"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 1}}'
    (tmp_path / "ds.json").write_text(text)
    dialect, sides = compat.load("deepspeed"), {}
    for name, words in enumerate(("", "--output_dir out --logging_steps 1", *OTHERS)):
        path = tmp_path / f"{name}.sh"
        path.write_text(f"{HUGGING} --num_train_epochs 1 {words}\n")
        sides[words] = dialect.read(path)
    plain, quiet, *others = sides.values()
    assert {one.effect for one in compare(plain, quiet)} <= {Effect.NONE}
    for other in others:
        for found in (compare(plain, other), compare(other, plain)):
            assert Effect.NUMBERS in {one.effect for one in found}
        assert [
            one for one in as_json.all_of(other) if one.effect is Effect.NUMBERS and one.unknown
        ] == []


SOURCES: dict[str, dict[str, Any]] = {
    "automodel": {
        "step_scheduler": {"global_batch_size": 8, "local_batch_size": 1, "max_steps": 10},
        "distributed": {"strategy": "fsdp2", "tp_size": 1},
        "optimizer": {"_target_": "torch.optim.AdamW", "lr": 1e-4},
    },
    "fast_llm": {
        "model": {"multi_stage": {"zero_stage": 2}, "distributed": {"tensor_parallel": 1}},
        "optimizer": {"learning_rate": {"base": 1e-4}},
        "training": {"train_iters": 10},
    },
    "merak": {"seed": 1, "train_schedule": "1f1b", "learning_rate": 1e-4},
}


def placed(data: dict[str, Any], key: str, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """The config with one more key, in each of its sections in turn, with the key's path."""
    yield f"{path}{key}", {**data, key: 1}
    for name, inner in data.items():
        if isinstance(inner, dict):
            yield from (
                (where, {**data, name: more})
                for where, more in placed(inner, key, f"{path}{name}.")
            )


@pytest.mark.parametrize("stack", SOURCES)
def test_a_key_of_a_config(stack: str) -> None:
    for name in names(6, "_"):
        for path, data in placed(SOURCES[stack], name):
            config = compat.load(stack).read(data, world_size=1, lenient=True)
            found = [one for one in as_json.all_of(config) if one.path == path]
            assert [one.effect for one in found] == [Effect.NUMBERS], path


DEEPSPEED: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "none"}},
    "flops_profiler": {"enabled": False},
    "comms_logger": {"enabled": False},
    "checkpoint": {"parallel_write": {"pipeline_stage": False}},
}
STRICT = ("bf16.", "zero_optimization.", "comms_logger.", "optimizer.params.")
"""Sections in which DeepSpeed refuses a key that it does not know."""


def test_a_key_of_deepspeed_is_what_its_code_makes_of_it() -> None:
    dialect = compat.load("deepspeed")
    for name in names(6, "_"):
        for path, data in placed(DEEPSPEED, name):
            if path.startswith(STRICT):
                with pytest.raises(ConfigError, match=f"{path}: unknown key"):
                    dialect.read(data, world_size=1)
            else:
                found = [
                    one
                    for one in as_json.all_of(dialect.read(data, world_size=1))
                    if one.path == path
                ]
                assert [one.effect for one in found] == [Effect.NONE], path


def test_two_files_that_agree_in_it_are_the_same_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = tmp_path / "one.sh", tmp_path / "other.sh"
    for path, value in ((one, "3"), (other, "4")):
        path.write_text(f"{LAUNCH} --epochs {value}\n")
    assert run(["diff", str(one), str(one), "--lenient"]) == 0
    assert run(["diff", str(one), str(other), "--lenient"]) == 2
    assert "1 --epochs (line 1) 3 -> 4\n" in capsys.readouterr().out
    assert run(["check", str(one), "--lenient", "--ignore", "--epochs/unknown"]) == 0
    assert run(["drift", str(one), "--to-version", "0.19.0", "--lenient"]) == 2
    assert "may mean something else" in capsys.readouterr().err
