"""Configs of accelerate under check, convert, diff and layout; FSDP under the Trainer; translations to FSDP 2."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, note, settings, strategies as st

import compat
from bridge.cli import run
from bridge.errors import BridgeError
from bridge.files import load_yaml
from bridge.stack.sources import Said
from bridge.translation.translate import translate
from compat.accelerate.launcher import Machine
from compat.accelerate.plugins import Plugins
from compat.accelerate.slots import Refusal, Run, Slot, default
from compat.accelerate.trainer import pass_on, sort_arguments
from tests.stacks.accelerate_oracle import ask
from tests.stacks.test_accelerate import configs

ZERO3 = """compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
deepspeed_config:
  gradient_accumulation_steps: 4
  gradient_clipping: 1.0
  zero_stage: 3
  zero3_save_16bit_model: true
mixed_precision: bf16
num_machines: 1
num_processes: 8
"""
FSDP1 = """compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_sharding_strategy: SHARD_GRAD_OP
  fsdp_state_dict_type: SHARDED_STATE_DICT
mixed_precision: bf16
num_machines: 1
num_processes: 8
"""
KEYS = {
    "version": (1, 2),
    "cpu_offload": (True, False),
    "auto_wrap_policy": ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP", "wrap"),
    "min_num_params": (0, 2000),
    "transformer_layer_cls_to_wrap": ("Block", ["A", "B"]),
    "cpu_ram_efficient_loading": (True, False, "true"),
    "state_dict_type": ("FULL_STATE_DICT", "SHARDED_STATE_DICT"),
    "activation_checkpointing": (True, "false"),
    "reshard_after_forward": (True, False, "full_shard", "shard_grad_op"),
    "forward_prefetch": (True, False),
    "backward_prefetch": ("backward_pre", "no_prefetch"),
    "use_orig_params": (True, False),
    "sync_module_states": (True, False),
    "limit_all_gathers": (True,),
    "sharding_strategy": ("SHARD_GRAD_OP",),
    "offload_params": (True,),
}
"""Values of keys of fsdp_config; the last two are accelerate's, which the Trainer does not pass on."""
VARIABLES = {
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    "FSDP_SHARDING_STRATEGY": "SHARD_GRAD_OP",
    "FSDP_OFFLOAD_PARAMS": "true",
    "FSDP_ACTIVATION_CHECKPOINTING": "true",
    "FSDP_MIN_NUM_PARAMS": "7",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "Z",
}
TRAINED = st.fixed_dictionaries(
    {
        "fsdp": st.sampled_from(
            [
                "true",
                "full_shard",
                "full_shard auto_wrap",
                "shard_grad_op offload",
                "hybrid_shard",
                "x",
            ]
        ),
        "config": st.dictionaries(st.sampled_from(sorted(KEYS)), st.none(), max_size=6).flatmap(
            lambda names: st.fixed_dictionaries(
                {
                    f"{prefix}{name}": st.sampled_from(KEYS[name])
                    for name, prefix in zip(names, ("", "fsdp_") * 3, strict=False)
                }
            )
        ),
        "environment": st.sets(st.sampled_from(sorted(VARIABLES)), max_size=2),
    }
)


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, text in (("zero3.yaml", ZERO3), ("fsdp.yaml", FSDP1)):
        Path(name).write_text(text)
    return tmp_path


def ask_plugin(case: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the plugin that the installed Trainer builds, or `stops`."""
    from accelerate.utils import FullyShardedDataParallelPlugin
    from transformers import TrainingArguments

    from tests.stacks.accelerate_oracle import _fsdp

    before = dict(os.environ)
    os.environ.update({name: VARIABLES[name] for name in case["environment"]})
    try:
        own = TrainingArguments(
            "out",
            fsdp=True if case["fsdp"] == "true" else case["fsdp"],
            fsdp_config=json.loads(json.dumps(case["config"])),
            report_to=[],
        )
        assert own.fsdp_plugin_args is not None
        with (
            patch("accelerate.utils.dataclasses.is_cuda_available", lambda: True),
            patch("torch.cuda.current_device", lambda: 0),
        ):
            return _fsdp(FullyShardedDataParallelPlugin(**own.fsdp_plugin_args))
    except (ValueError, KeyError, AttributeError, RuntimeError) as error:
        return {"stops": str(error)}
    finally:
        os.environ.clear()
        os.environ.update(before)


def read_case(case: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return our values of the plugin by name, or `stops`, and the keys that nobody hears."""
    value = True if case["fsdp"] == "true" else case["fsdp"]
    said = {"fsdp": Said("--fsdp", value), "fsdp_config": Said("--fsdp_config", case["config"])}
    shell = {
        name: Slot(VARIABLES[name], Said(name, VARIABLES[name], "environment"))
        for name in case["environment"]
    }
    record = Run()
    try:
        found, lost = pass_on(
            sort_arguments(said, lambda *_: {}), {**shell, "num_processes": Slot(8, default("", 8))}
        )
        Plugins(found, True, Machine(8), record).build()
    except Refusal as error:
        return {"stops": error.message}, []
    values = {
        one.setting.removeprefix("fsdp."): one.value
        for one in record.settings
        if one.setting.startswith("fsdp.")
    }
    return values, [one.said.setting for one in lost]


@pytest.mark.once
@settings(max_examples=300, deadline=None)
@given(TRAINED)
def test_fsdp_of_the_trainer_is_the_plugin_that_it_builds(case: dict[str, Any]) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    theirs, (ours, lost) = ask_plugin(case), read_case(case)
    note(f"{theirs} {ours}")
    assert ("stops" in theirs) == ("stops" in ours)
    if "stops" in theirs:
        return
    theirs.pop("reshard_after_forward" if theirs["fsdp_version"] == 1 else "sharding_strategy")
    assert {name: ours.get(name) for name in theirs if not name.startswith("mixed")} == {
        name: value for name, value in theirs.items() if not name.startswith("mixed")
    }
    for name in lost:  # what nobody hears can go
        key = name.partition(".")[2]
        rest = {
            one: value
            for one, value in case["config"].items()
            if one.removeprefix("fsdp_") != key.removeprefix("fsdp_")
        }
        if key:
            without = ask_plugin({**case, "config": rest})
            without.pop(
                "reshard_after_forward" if without["fsdp_version"] == 1 else "sharding_strategy"
            )
            assert without == theirs, name


@pytest.mark.once
@settings(max_examples=200, deadline=None)
@given(configs())
def test_fsdp_1_becomes_what_accelerates_own_command_makes_of_it(config: dict[str, Any]) -> None:
    pytest.importorskip("accelerate")
    from accelerate.commands.to_fsdp2 import convert_config_to_fsdp2

    dialect = compat.load("accelerate")
    config = {**config, "distributed_type": "FSDP", "num_processes": 8}
    for section in ("deepspeed_config", "megatron_lm_config", "parallelism_config"):
        config.pop(section, None)
    if not config.get("fsdp_config"):
        return  # which the command leaves as it is
    try:
        source = dialect.read(config)
    except BridgeError:
        return
    theirs = convert_config_to_fsdp2(json.loads(json.dumps(config)))
    try:
        wanted = dialect.read(theirs)
    except BridgeError:
        return  # it leaves what FSDP 2 refuses
    ours = dialect.read(translate(source, dialect).written.text)
    note(f"{ours.given} {wanted.given}")
    lost = {"fsdp_config.fsdp_auto_wrap_policy", "compute_environment"}  # which ours always sets
    differ = {
        path
        for path in {*ours.effective, *wanted.effective} - lost
        if ours.effective.get(path) != wanted.effective.get(path)
    }
    assert not differ


def test_zero_3_under_accelerate_becomes_a_file_of_deepspeed(folder: Path, capsys: Any) -> None:
    assert run(["convert", "zero3.yaml", "--to", "deepspeed"]) == 0
    text = capsys.readouterr().out
    data = json.loads(text[: text.index("\n}\n") + 3])
    assert (
        data["zero_optimization"]["stage"],
        data["bf16"],
        data["gradient_accumulation_steps"],
    ) == (3, {"enabled": True}, 4)


def test_zero_3_becomes_fsdp_2_and_comes_back(folder: Path, capsys: Any) -> None:
    assert run(["convert", "zero3.yaml", "--to", "accelerate", "-o", "out.yaml"]) == 0
    assert "train.py out.arguments.json" in capsys.readouterr().out
    data = load_yaml(Path("out.yaml").read_text()).data
    assert (data["distributed_type"], data["num_processes"], data["mixed_precision"]) == (
        "FSDP",
        8,
        "bf16",
    )
    assert data["fsdp_config"]["fsdp_version"] == 2
    assert data["fsdp_config"]["fsdp_reshard_after_forward"] is True
    words = json.loads(Path("out.arguments.json").read_text())
    assert words == {"gradient_accumulation_steps": 4, "max_grad_norm": 1.0}
    assert (
        run(
            [
                "convert",
                "out.yaml",
                "--to",
                "deepspeed",
                "-o",
                "back.json",
                "--with",
                "out.arguments.json",
            ]
        )
        == 2
    )
    # DeepSpeed's file does not say who averages: the Trainer's mean over tokens is named.
    out = capsys.readouterr().out
    assert out.startswith("different numbers: 1 thing") and "how tokens are averaged" in out
    back = json.loads(Path("back.json").read_text())
    assert (
        back["zero_optimization"]["stage"],
        back["gradient_accumulation_steps"],
        back["gradient_clipping"],
    ) == (3, 4, 1.0)


def test_layout_and_diff_of_a_config_of_accelerate(folder: Path, capsys: Any) -> None:
    assert (
        run(["layout", "fsdp.yaml", "--model", "gpt2", "--sequence", "1024", "--micro-batch", "1"])
        == 0
    )
    assert "ZeRO 2" in capsys.readouterr().out
    assert run(["diff", "fsdp.yaml", "fsdp.yaml"]) == 0


@pytest.mark.parametrize("words", [["check"], ["convert", "--to", "deepspeed"]])
def test_unknown_keys_are_named(folder: Path, capsys: Any, words: list[str]) -> None:
    Path("a.yaml").write_text(ZERO3.replace("  zero_stage", "  zero_level: 2\n  zero_stage"))
    assert run([words[0], "a.yaml", *words[1:]]) == 2
    out = capsys.readouterr()
    assert "zero_level" in out.out + out.err
    Path("a.yaml").write_text(ZERO3.replace("num_machines", "number_of_machines"))
    assert run([words[0], "a.yaml", *words[1:]]) == 1
    assert "a.yaml: line 9: number_of_machines" in capsys.readouterr().err
    Path("a.sh").write_text("accelerate launch --config_file a.yaml train.py\n")
    assert run([words[0], "a.sh", *words[1:]]) == 1
    assert "line 9: number_of_machines" in capsys.readouterr().err


def test_fsdp_of_a_trainer_that_torchrun_starts(folder: Path, capsys: Any) -> None:
    Path("a.sh").write_text(
        "torchrun --nproc_per_node 8 train.py --bf16 --per_device_train_batch_size 2 --output_dir o \\\n"
        '  --fsdp "full_shard auto_wrap" --fsdp_config \'{"fsdp_offload_params": true, "version": 2}\'\n'
    )
    assert run(["check", "a.sh"]) == 0
    out = capsys.readouterr().out
    assert "offload_params" in out and "write cpu_offload" in out
    assert run(["layout", "a.sh", "--model", "gpt2", "--sequence", "1024"]) == 0
    assert "8 ranks: data 8" in capsys.readouterr().out
    assert run(["resolve", "a.sh", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert {one["setting"]: one["value"] for one in data["settings"]}["distributed_type"] == "FSDP"
    assert [one["setting"] for one in data["ignored"]] == ["fsdp_config.fsdp_offload_params"]


@pytest.mark.parametrize(
    "launch",
    ["--multi_gpu --num_processes 4", "--num_processes 2", "--config_file fsdp.yaml", "--cpu"],
)
def test_a_launch_without_deepspeed_is_read(folder: Path, capsys: Any, launch: str) -> None:
    Path("a.sh").write_text(f"accelerate launch {launch} train.py\n")
    assert run(["check", "a.sh"]) in (0, 2)
    assert "accelerate 1.15.0" in capsys.readouterr().out


def test_before_1_5_sections_of_the_config_file_win_over_options(folder: Path, capsys: Any) -> None:
    Path("a.sh").write_text(
        "accelerate launch --config_file fsdp.yaml --fsdp_state_dict_type FULL_STATE_DICT train.py\n"
    )
    values = list[Any]()
    for release in ("1.4.0", "1.5.2"):
        run(["resolve", "a.sh", "--from-version", release, "--json"])
        data = json.loads(capsys.readouterr().out)
        values += [
            one["value"] for one in data["settings"] if one["setting"] == "fsdp.state_dict_type"
        ]
    assert values == ["SHARDED_STATE_DICT", "FULL_STATE_DICT"]
    assert run(["resolve", "a.sh", "--from-version", "0.20.0"]) == 1
    assert "unknown release 0.20.0" in capsys.readouterr().err


SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
         "expert_model_parallel_size", "expert_tensor_parallel_size")  # fmt: skip
NUMBERS = ("clip_grad", "attention_dropout", "hidden_dropout", "recompute_num_layers")
WORDS = ("recompute_granularity", "recompute_method")
SWITCHES = ("use_distributed_optimizer", "sequence_parallel", "no_load_optim", "no_save_optim", "eod_mask_loss",
            "calculate_per_token_loss", "bf16", "fp16")  # fmt: skip
MORE = {
    "megatron_lm_gradient_clipping": ("0.5", "1.0"),
    "megatron_lm_eod_mask_loss": ("true", "false"),
    "megatron_lm_no_save_optim": ("true",),
    "megatron_lm_optimizer_cpu_offload": ("true", "false"),
    "megatron_lm_expert_model_parallel_size": ("1", "2"),
    "megatron_lm_hidden_dropout": ("0.1", "0.0"),
    "megatron_lm_attention_dropout": ("0.2",),
    "megatron_lm_calculate_per_token_loss": ("true", "false"),
    "megatron_lm_use_rotary_position_embeddings": ("true", "false"),
}
"""Further options of Megatron-LM, beside those in `FLAGS`."""


@pytest.mark.once
@settings(max_examples=15, deadline=None)
@given(
    configs(),
    st.fixed_dictionaries(
        {}, optional={name: st.sampled_from(texts) for name, texts in MORE.items()}
    ),
)
def test_megatron_lm_under_accelerate_becomes_the_arguments_of_its_plugin(
    tmp_path_factory: Any, config: dict[str, Any], more: dict[str, str]
) -> None:
    pytest.importorskip("accelerate")
    own = {**config.get("megatron_lm_config", {}), **more}
    kept = {name: value for name, value in config.items() if not name.endswith("_config")}
    config = {
        **kept,
        "distributed_type": "MEGATRON_LM",
        "num_processes": 8,
        "megatron_lm_config": own,
    }
    theirs = ask([], config, {}, 8, str(tmp_path_factory.mktemp("launch")))
    try:
        source = compat.load("accelerate").read(config)
    except BridgeError as error:
        note(str(error))
        assert "stops" in theirs
        return
    note(str(theirs))
    if "stops" in theirs or theirs["distributed_type"] != "MEGATRON_LM":
        return
    pairs = (
        line.split()
        for line in translate(source, compat.load("megatron")).written.text.splitlines()
    )
    flags = {name.lstrip("-").replace("-", "_"): [*rest, True][0] for name, *rest in pairs}
    plugin = {name.removeprefix("megatron_lm."): value for name, value in theirs.items()}
    assert {name: int(flags[name]) for name in SIZES} == {name: plugin[name] for name in SIZES}
    assert {name: float(flags[name]) for name in NUMBERS} == {
        name: plugin[name] for name in NUMBERS
    }
    assert {name: flags[name] for name in WORDS} == {name: plugin[name] for name in WORDS}
    assert {name: name in flags for name in SWITCHES} == {
        name: bool(plugin.get(name)) for name in SWITCHES
    }
    assert (flags.get("position_embedding_type") == "rope") == plugin[
        "use_rotary_position_embeddings"
    ]
