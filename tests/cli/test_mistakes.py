"""Command lines of people who come from another command: one line that says what to type instead, and it is the only one."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bridge.cli import run
from bridge.cli.demo import launch_text
from bridge.stack.registry import load

pytestmark = pytest.mark.once

ARGUMENTS = {
    "output_dir": "out",
    "per_device_train_batch_size": 4,
    "learning_rate": 2e-5,
    "max_steps": 10,
    "bf16": True,
}
DS = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 1},
}
ACCELERATE = "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\nmixed_precision: bf16\nnum_processes: 8\n"

Said = Callable[..., list[str]]


@pytest.fixture
def said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Said:
    """The lines that a command is refused with."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "launch.args").write_text(launch_text())
    (tmp_path / "x.sh").write_text(
        "torchrun pretrain_gpt.py \\\n" + " ".join(launch_text().split("\n")[-2:]) + "\n"
    )
    (tmp_path / "ds.json").write_text(json.dumps(DS))

    def call(*words: str) -> list[str]:
        assert run(list(words)) == 1
        out, err = capsys.readouterr()
        assert not out
        return [line for line in err.splitlines() if not line.startswith("note:")]

    return call


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (
            ("convert", "deepspeed train.py --deepspeed_config ds.json", "--to", "megatron"),
            "stagebridge convert ds.json --to megatron",
        ),
        (
            (
                "convert",
                "torchrun --nproc-per-node 8 train.py --deepspeed=ds.json",
                "--to",
                "megatron",
            ),
            "stagebridge convert ds.json --to megatron",
        ),
        (
            ("convert", "A=1 torchrun pretrain_gpt.py --num-layers 4", "--to", "deepspeed"),
            "stagebridge convert run.sh --to deepspeed",
        ),
        (
            ("convert", "bash", "x.sh", "--to", "deepspeed"),
            "stagebridge convert x.sh --to deepspeed",
        ),
        (("convert", "bash x.sh", "--to", "deepspeed"), "stagebridge convert x.sh --to deepspeed"),
        (("check", "sbatch", "-N", "2", "x.sh"), "stagebridge check x.sh"),
        (
            (
                "convert",
                "srun",
                "-N",
                "2",
                "torchrun",
                "pretrain_gpt.py",
                "--num-layers",
                "4",
                "--to",
                "deepspeed",
            ),
            "stagebridge convert run.sh --to deepspeed",
        ),
        (
            (
                "train",
                "torchrun",
                "--nproc-per-node",
                "2",
                "train.py",
                "--deepspeed_config",
                "ds.json",
            ),
            "stagebridge train ds.json",
        ),
        (
            ("convert", "--config=launch.args", "--to", "deepspeed"),
            "stagebridge convert launch.args --to deepspeed",
        ),
        (("check", "--deepspeed_config", "ds.json"), "stagebridge check ds.json"),
        (("convert", "launch.args", "deepspeed"), "stagebridge convert launch.args --to deepspeed"),
        (
            ("convert", "megatron", "deepspeed", "launch.args"),
            "stagebridge convert launch.args --from megatron --to deepspeed",
        ),
        (("ds.json",), "stagebridge check ds.json, or stagebridge convert ds.json --to STACK"),
        (
            ("ds.json", "--world-size", "8"),
            "stagebridge check ds.json, or stagebridge convert ds.json --to STACK",
        ),
    ],
)
def test_what_was_meant_is_said_in_one_line(typed: tuple[str, ...], meant: str, said: Said) -> None:
    (line,) = said(*typed)
    assert line.startswith("error: ") and line.endswith(f": {meant}")


@pytest.mark.parametrize(
    "typed",
    [
        "convert 'deepspeed train.py --deepspeed_config ds.json' --to megatron",
        "convert --config=launch.args --to deepspeed --world-size 8",
        "convert launch.args deepspeed --world-size 8",
    ],
)
def test_what_is_said_to_be_typed_works(
    typed: str, said: Said, capsys: pytest.CaptureFixture[str]
) -> None:
    (line,) = said(*shlex.split(typed))
    assert run(shlex.split(line.partition(": stagebridge ")[2])) in (0, 2), capsys.readouterr().err


def test_a_stack_that_is_missing_is_asked_for_by_name(said: Said) -> None:
    (line,) = said("convert", "launch.args")
    assert line.startswith("error: --to: missing; ") and "deepspeed" in line and "megatron" in line


def test_a_file_that_is_not_there_is_no_command(said: Said) -> None:
    assert said("check", "nothere.json") == ["error: nothere.json: no such file; check the path"]


@pytest.mark.parametrize(
    "typed",
    [
        ("convert", "--to", "deepspeed", "--", "-x.args"),
        ("convert", "--to", "deepspeed", "gone.args"),
        ("check", "--from", "deepspeed", "gone.json"),
    ],
)
def test_the_value_of_an_option_is_no_command(typed: tuple[str, ...], said: Said) -> None:
    assert said(*typed)[0].startswith(f"error: {typed[-1]}: no such file")


def test_wrong_usage_of_our_own_stays_the_parsers(said: Said) -> None:
    assert said("check", "ds.json", "--nothing")[-1] == "Error: No such option: --nothing"


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (ACCELERATE, "the DeepSpeed config or the launch script of the training"),
        (
            ACCELERATE
            + "deepspeed_config:\n  deepspeed_config_file: zero.json\n  zero3_init_flag: true\n",
            "give zero.json",
        ),
        (
            ACCELERATE + "deepspeed_config:\n  zero_stage: 3\n",
            "accelerate launch --config_file FILE",
        ),
    ],
)
def test_a_config_of_accelerate_is_no_file_of_deepspeed(
    content: str, named: str, said: Said, tmp_path: Path
) -> None:
    (tmp_path / "accelerate.yaml").write_text(content)
    (line,) = said("convert", "accelerate.yaml", "--to", "megatron", "--from", "deepspeed")
    assert "a config of accelerate" in line and named in line


@pytest.mark.parametrize(
    ("name", "text", "named"),
    [
        ("a.json", '{"train_batch_size": CONFIG_MBSIZE, "seed": 1}', "CONFIG_MBSIZE"),
        ("b.json", '{"train_batch_size": {{ batch }}, "note": "{{ x }}"}', "{{ batch }}"),
        ("c.json", '{"train_batch_size": <YOUR_BATCH>, "seed": 1}', "<YOUR_BATCH>"),
        ("d.json", '{"note": "A_B", "train_batch_size": ${BATCH}, "seed": 1}', "${BATCH}"),
        (
            "e.yaml",
            "train_batch_size: 1\nzero_optimization:\n  stage: {{ stage }}\n",
            "{{ stage }}",
        ),
    ],
)
def test_a_template_that_is_not_filled_in_is_named(
    name: str, text: str, named: str, said: Said, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    (line,) = said("check", name, "--from", "deepspeed")
    assert f"{named} is a placeholder of a template that is not filled in" in line


@pytest.mark.parametrize(
    ("launch", "given"),
    [
        (
            "--use_deepspeed --deepspeed_config_file ds.json train.py",
            {"gradient_accumulation_steps": 1, "bf16.enabled": True},
        ),
        (
            "--config_file acc.yaml train.py",
            {"zero_optimization.stage": 2, "bf16.enabled": True, "gradient_clipping": 0.5},
        ),
        (
            "--config-file=acc.yaml --mixed_precision no --zero-stage=3 x",
            {"zero_optimization.stage": 3, "bf16.enabled": False},
        ),
    ],
)
def test_what_accelerate_passes_to_deepspeed_is_read(
    launch: str, given: dict[str, Any], tmp_path: Path
) -> None:
    plugin = "deepspeed_config:\n  zero_stage: 2\n  gradient_clipping: 0.5\nmixed_precision: bf16\nnum_processes: 4\n"
    (tmp_path / "acc.yaml").write_text("distributed_type: DEEPSPEED\n" + plugin)
    (tmp_path / "ds.json").write_text(
        json.dumps({**DS, "zero_optimization": {"stage": 1}, "bf16": {"enabled": True}})
    )
    (tmp_path / "go.sh").write_text(f"accelerate launch --num_processes 4 {launch}\n")
    config = load("deepspeed").read(tmp_path / "go.sh", auto={"micro_batch": 2, "accumulation": 1})
    assert config.world_size == 4 and given.items() <= config.given.items()


@pytest.mark.parametrize(
    ("launch", "named"),
    [
        ("--config_file gone.yaml train.py", "gone.yaml: no such file"),
        ("--config_file tpu.yaml train.py", "stagebridge does not read runs on TPUs"),
    ],
)
def test_a_launch_of_accelerate_that_is_not_read_is_named(
    launch: str, named: str, said: Said, tmp_path: Path
) -> None:
    (tmp_path / "tpu.yaml").write_text("distributed_type: XLA\nnum_processes: 8\n")
    (tmp_path / "go.sh").write_text(f"accelerate launch {launch}\n")
    assert named in said("check", "go.sh")[0]


@pytest.mark.parametrize(
    "option", ["--ds_config", "--ds-config-file=", "--deepspeed_config_path", "--deepspeed_file="]
)
def test_a_program_names_its_deepspeed_file_by_other_options(option: str, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(DS))
    (tmp_path / "go.sh").write_text(
        f"deepspeed train.py {option}{'' if option.endswith('=') else ' '}ds.json\n"
    )
    assert load("deepspeed").read(tmp_path / "go.sh").given["train_micro_batch_size_per_gpu"] == 2


@pytest.mark.parametrize("more", [{}, {"deepspeed": "zero.json"}])
def test_arguments_of_the_trainer_are_no_file_of_deepspeed(
    more: dict[str, Any], said: Said, tmp_path: Path
) -> None:
    (tmp_path / "args.json").write_text(json.dumps({**ARGUMENTS, **more}))
    (line,) = said("check", "args.json", "--from", "deepspeed")
    assert (
        "TrainingArguments" in line
        and "--auto-from" in line
        and more.get("deepspeed", "DEEPSPEED.json") in line
    )


def test_arguments_of_the_trainer_are_no_config_of_a_stack_that_shares_their_names(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Merak's per_device_train_batch_size and DeepSpeed's bf16 are in every dump; a name of Merak's own makes it Merak's."""
    file = tmp_path / "args.json"
    file.write_text(
        json.dumps(
            {
                **ARGUMENTS,
                "bf16": True,
                "per_device_train_batch_size": 4,
                "gradient_accumulation_steps": 2,
            }
        )
    )
    assert run(["check", str(file)]) == 1
    error = capsys.readouterr().err
    assert (
        "TrainingArguments of Hugging Face's Trainer" in error
        and "read as" not in error
        and len(error.splitlines()) == 1
    )
    (tmp_path / "ds.json").write_text(json.dumps({"train_batch_size": 8, "gradient_clipping": 1.0}))
    assert run(["check", str(tmp_path)]) in (0, 2)
    assert "1 of no stack" in capsys.readouterr().out
    file.write_text(json.dumps({**ARGUMENTS, "train_schedule": "1f1b"}))
    assert run(["check", str(file)]) in (0, 2)
    assert (
        "read as Merak; it may be TrainingArguments of Hugging Face's Trainer"
        in capsys.readouterr().err
    )


FOREIGN = {
    "GPT-NeoX": (
        "x.yml",
        "{pipe_parallel_size: 1, num_layers: 12, checkpoint_num_layers: 1, gradient_clipping: 1.0}",
    ),
    "GPT-NeoX, a part": (
        "x.yml",
        "{data-path: d, vocab-file: v, merge-file: m, train-iters: 9, checkpoint_num_layers: 1}",
    ),
    "LLaMA-Factory": ("x.yaml", "{template: qwen, infer_backend: vllm, model_name_or_path: m}"),
    "torchtune": (
        "x.yaml",
        "{model: {_component_: m}, tokenizer: {_component_: t}, optimizer: {_component_: o, lr: 1}}",
    ),
    "OLMo": (
        "x.yaml",
        "{model: {d_model: 8}, max_duration: 9, device_train_microbatch_size: 1, evaluators: []}",
    ),
    "llm-foundry": (
        "x.yaml",
        "{model: {name: m}, max_duration: 1ep, train_loader: {}, fsdp_config: {}, optimizer: {name: a}}",
    ),
    "of torchtitan": ("y.toml", "[job]\na = 'o'\n[model]\nname = 'x'\n[training]\nsteps = 10\n"),
    "torchtitan": (
        "x.toml",
        "[job]\na = 'o'\n[model]\nflavor = '8B'\n[training]\nsteps = 10\n[parallelism]\n",
    ),
    "nanotron": (
        "x.yaml",
        "{general: {run: r}, parallelism: {dp: 1}, tokens: {}, logging: {}, optimizer: {zero_stage: 0}}",
    ),
    "verl": (
        "x.yaml",
        "{actor_rollout_ref: {}, trainer: {nnodes: 1, project_name: p}, algorithm: {adv_estimator: gae}}",
    ),
    "Python project": (
        "pyproject.toml",
        "[build-system]\nrequires = []\n[project]\nname = 'x'\nauthors = [{name = 'A, B'}]\n",
    ),
}
"""Files of programs that no stack reads, by a word of the message."""


@pytest.mark.parametrize("program", FOREIGN)
def test_a_file_of_another_program_is_named_as_what_it_is(
    program: str, said: Said, tmp_path: Path
) -> None:
    file, text = FOREIGN[program]
    (tmp_path / file).write_text(text)
    (line,) = said("check", file)
    assert program.partition(",")[0] in line and "which stagebridge does not read; give" in line


@pytest.mark.parametrize("text", ["a = \n", "[a\n", "a = [1,\n"])
def test_a_fault_of_toml_is_said(text: str, said: Said, tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text(text)
    (line,) = said("check", "x.toml")
    assert "not valid TOML" in line


@pytest.mark.parametrize(
    ("data", "score"),
    [
        (
            {
                "optimizer": {"_target_": "torch.optim.AdamW", "lr": 1},
                "checkpoint": {"enabled": True},
            },
            0,
        ),
        ({"optimizer": {"type": "AdamW"}, "bf16": {"enabled": True}}, 2),
        ({"log_level": "info", **dict.fromkeys(map(str, range(20)), 1)}, 0),
        ({"optimizer": "adamw_torch", "bf16": True}, 0),
    ],
)
def test_a_section_speaks_for_deepspeed_only_with_a_key_of_it(
    data: dict[str, Any], score: int
) -> None:
    assert load("deepspeed").recognises(data) == score


def test_a_file_below_the_current_folder_may_be_named(
    said: Said, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A script below the folder where the command is started names files from there; outside of both nothing is opened."""
    folder = tmp_path / "scripts"
    folder.mkdir()
    (folder / "zero.json").write_text(json.dumps(DS))
    (folder / "x.sh").write_text(
        "deepspeed --num_gpus 2 train.py --deepspeed_config ./scripts/zero.json\n"
    )
    assert run(["check", "scripts/x.sh", "--fail-on", "stop"]) == 0
    capsys.readouterr()
    (tmp_path / "z.json").write_text(json.dumps(DS))
    (folder / "z.json").write_text(json.dumps({**DS, "gradient_clipping": 2.0}))
    (folder / "z.sh").write_text("deepspeed train.py --deepspeed_config z.json\n")
    run(["check", "scripts/z.sh"])
    assert "started in the current folder, the script reads z.json" in " ".join(
        capsys.readouterr().out.split()
    )
    outside = tmp_path.parent / f"{tmp_path.name}.json"
    outside.write_text(json.dumps(DS))
    (folder / "link.json").symlink_to(outside)
    for name in (f"../{outside.name}", str(outside), "scripts/link.json"):
        (folder / "y.sh").write_text(f"deepspeed train.py --deepspeed_config {name}\n")
        assert "--allow-path" in said("check", "scripts/y.sh")[0]


@pytest.mark.parametrize(
    "text",
    [
        'D=$(cd "$(dirname "$0")" && pwd)\ndeepspeed train.py --deepspeed_config "$D/ds.json"',
        'D="$(dirname "$(realpath "$0")")"\ndeepspeed train.py --deepspeed_config=${D}/ds.json',
        "mkdir -p in\ncp ds.json in/\ndeepspeed train.py --deepspeed_config $PWD/ds.json",
        "deepspeed train.py --deepspeed=ds.json --output_dir o --per_device_train_batch_size 2 --learning_rate 1e-3",
        "deepspeed train.py --deepspeed ds.json --output_dir o --per_device_train_batch_size 2 --learning_rate 1e-3",
    ],
)
def test_a_config_is_read_by_any_name_that_a_script_gives_it(
    text: str, said: Said, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.sh").write_text(f"{text}\n")
    assert run(["check", "x.sh", "--from", "deepspeed", "--fail-on", "stop"]) == 0
