"""Who wins under `accelerate launch`, against the installed accelerate and rows that the real libraries gave."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, note, settings, strategies as st

from bridge.cli import run
from bridge.errors import BridgeError
from bridge.files import load
from bridge.stack import registry
from bridge.stack.rules import Effect
from bridge.stack.sources import Said
from compat.accelerate.host import Question, find_unheard, resolve as resolve_host
from compat.accelerate.launcher import Given, Machine, read_options, set_environment
from compat.accelerate.plugins import Plugins
from compat.accelerate.slots import Refusal, Run, facts
from tests.stacks.accelerate_oracle import ask

FLAGS: Mapping[str, tuple[str, ...]] = {
    "mixed_precision": ("no", "bf16", "fp16"),
    "num_processes": ("1", "2", "8"),
    "num_machines": ("1", "2"),
    "machine_rank": ("0",),
    "main_process_ip": ("10.0.0.1",),
    "main_process_port": ("29511",),
    "gpu_ids": ("all", "0,1"),
    "dynamo_backend": ("no", "inductor"),
    "dynamo_mode": ("default", "max-autotune"),
    "fsdp_version": ("1", "2"),
    "fsdp_offload_params": ("true", "false"),
    "fsdp_min_num_params": ("1000",),
    "fsdp_sharding_strategy": ("FULL_SHARD", "SHARD_GRAD_OP", "2", "HYBRID_SHARD_ZERO2", "nothing"),
    "fsdp_reshard_after_forward": ("true", "false", "FULL_SHARD"),
    "fsdp_auto_wrap_policy": ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP", "wrap"),
    "fsdp_transformer_layer_cls_to_wrap": ("A,B",),
    "fsdp_backward_prefetch": ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"),
    "fsdp_state_dict_type": ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"),
    "fsdp_forward_prefetch": ("true", "false"),
    "fsdp_use_orig_params": ("true", "false"),
    "fsdp_cpu_ram_efficient_loading": ("true", "false"),
    "fsdp_sync_module_states": ("true", "false"),
    "fsdp_activation_checkpointing": ("true", "false"),
    "fsdp_activation_checkpointing_offload": ("true", "false"),
    "zero_stage": ("0", "2", "3"),
    "gradient_accumulation_steps": ("1", "4"),
    "gradient_clipping": ("0.5", "0.0"),
    "offload_optimizer_device": ("none", "cpu", "nvme"),
    "offload_optimizer_nvme_path": ("/nvme",),
    "offload_param_device": ("none", "cpu"),
    "zero3_init_flag": ("true", "false"),
    "zero3_save_16bit_model": ("true", "false"),
    "megatron_lm_tp_degree": ("1", "2"),
    "megatron_lm_pp_degree": ("1", "2"),
    "megatron_lm_num_micro_batches": ("1", "4"),
    "megatron_lm_sequence_parallelism": ("true", "false"),
    "megatron_lm_use_distributed_optimizer": ("true", "false"),
    "megatron_lm_no_load_optim": ("false",),
    "megatron_lm_context_parallel_size": ("1", "4"),
    "megatron_lm_recompute_granularity": ("full", "selective"),
    "parallelism_config_dp_replicate_size": ("1", "2"),
    "parallelism_config_dp_shard_size": ("1", "4", "8"),
    "parallelism_config_tp_size": ("1", "2"),
    "parallelism_config_cp_size": ("1", "2"),
}
"""Values of options; those that belong to a section of the config file are drawn for it as well."""
SWITCHES = ("cpu", "multi_gpu", "use_fsdp", "use_deepspeed", "use_megatron_lm", "use_parallelism_config", "debug",
            "enable_cpu_affinity", "same_network")  # fmt: skip
VARIABLES: Mapping[str, tuple[str, ...]] = {
    "ACCELERATE_MIXED_PRECISION": ("no", "fp16"),
    "ACCELERATE_DYNAMO_BACKEND": ("no", "INDUCTOR"),
    "ACCELERATE_USE_CPU": ("true", "false"),
    "ACCELERATE_DEBUG_MODE": ("true", "false"),
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": ("1", "8"),
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": ("1", "3"),
    "ACCELERATE_DEEPSPEED_ZERO3_INIT": ("true",),
    "FSDP_OFFLOAD_PARAMS": ("true", "false"),
    "FSDP_STATE_DICT_TYPE": ("FULL_STATE_DICT", "SHARDED_STATE_DICT"),
    "FSDP_AUTO_WRAP_POLICY": ("SIZE_BASED_WRAP",),
    "FSDP_BACKWARD_PREFETCH": ("BACKWARD_PRE",),
    "FSDP_SHARDING_STRATEGY": ("NO_SHARD",),
    "FSDP_VERSION": ("2",),
    "MEGATRON_LM_NUM_MICRO_BATCHES": ("2",),
    "MEGATRON_LM_SEQUENCE_PARALLELISM": ("true",),
    "PARALLELISM_CONFIG_TP_SIZE": ("2",),
    "CUDA_VISIBLE_DEVICES": ("0",),
    "OMP_NUM_THREADS": ("4",),
}
SECTIONS = {
    "fsdp_config": "fsdp_",
    "megatron_lm_config": "megatron_lm_",
    "parallelism_config": "parallelism_config_",
}
INLINE = ("zero_stage", "gradient_accumulation_steps", "gradient_clipping", "offload_optimizer_device",
          "offload_optimizer_nvme_path", "offload_param_device", "zero3_init_flag", "zero3_save_16bit_model")  # fmt: skip
FILES: tuple[dict[str, Any], ...] = (
    {
        "zero_optimization": {"stage": 3},
        "bf16": {"enabled": True},
        "train_micro_batch_size_per_gpu": 1,
    },
    {
        "zero_optimization": {"stage": "auto", "offload_optimizer": {"device": "auto"}},
        "gradient_clipping": "auto",
    },
    {
        "zero_optimization": {"stage": 2},
        "fp16": {"enabled": "auto"},
        "gradient_accumulation_steps": 4,
    },
    {"train_batch_size": 8},
)


def typed(text: str) -> Any:
    """Return a value as YAML has it, not as an option does."""
    return {"true": True, "false": False}.get(text, int(text) if text.isdigit() else text)


@st.composite
def configs(draw: Any) -> dict[str, Any]:
    """A config file of accelerate."""
    kind = draw(
        st.sampled_from(
            ["FSDP", "FSDP", "DEEPSPEED", "MEGATRON_LM", "MULTI_GPU", "NO", "MULTI_CPU"]
        )
    )
    found: dict[str, Any] = {"distributed_type": kind}
    usual = {"compute_environment": ["LOCAL_MACHINE"], "num_machines": [1], "machine_rank": [0],
             "mixed_precision": ["no", "bf16", "fp16"], "use_cpu": [False, True], "debug": [False, True],
             "gpu_ids": ["all", "0,1"], "rdzv_backend": ["static"],
             "same_network": [True], "main_process_port": [29501], "downcast_bf16": ["no"],
             "enable_cpu_affinity": [True]}  # fmt: skip
    found |= draw(
        st.fixed_dictionaries(
            {"num_processes": st.sampled_from([1, 2, 4, 8])},
            optional={name: st.sampled_from(values) for name, values in usual.items()},
        )
    )
    for section, prefix in SECTIONS.items():
        own = section == {"FSDP": "fsdp_config", "MEGATRON_LM": "megatron_lm_config"}.get(kind)
        if own or draw(st.integers(0, 9)) == 0:
            names = [name for name in FLAGS if name.startswith(prefix)]
            found[section] = draw(
                st.fixed_dictionaries(
                    {},
                    optional={name: st.sampled_from([*map(typed, FLAGS[name])]) for name in names},
                )
            )
    if kind == "DEEPSPEED":
        found["deepspeed_config"] = draw(
            st.one_of(
                st.fixed_dictionaries(
                    {},
                    optional={name: st.sampled_from([*map(typed, FLAGS[name])]) for name in INLINE},
                ),
                st.fixed_dictionaries(
                    {"deepspeed_config_file": st.just("ds.json")},
                    optional={"zero3_init_flag": st.booleans()},
                ),
            )
        )
    return found


@st.composite
def words(draw: Any) -> list[str]:
    """Options of the launcher: switches, and few others."""
    found = [f"--{name}" for name in draw(st.sets(st.sampled_from(SWITCHES), max_size=2))]
    for name in draw(st.lists(st.sampled_from(sorted(FLAGS)), max_size=4, unique=True)):
        spelled = name.replace("_", "-") if draw(st.booleans()) else name
        found += [f"--{spelled}", draw(st.sampled_from(FLAGS[name]))]
    return found


LAUNCHES = st.fixed_dictionaries({
    "flags": words(),
    "config": st.one_of(st.none(), configs(), configs()),
    "environment": st.dictionaries(st.sampled_from(sorted(VARIABLES)), st.none(), max_size=3).flatmap(
        lambda names: st.fixed_dictionaries({name: st.sampled_from(VARIABLES[name]) for name in names})
    ),
    "gpus": st.sampled_from([8, 8, 8, 0]),
    "file": st.sampled_from(FILES),
})  # fmt: skip


def ours(
    launch: Mapping[str, Any],
    starter: str = "accelerate",
    world: int | None = None,
    source: str = "config file",
) -> tuple[Run, Given, Refusal | None]:
    """Return our reading of a launch: the record, what was given, and what refuses it."""
    read = read_options([(word, None) for word in launch["flags"]], "launch flag")
    config = None
    if launch["config"] is not None:
        config = dict[str, Said]()
        for name, value in launch["config"].items():
            for path, one in (
                {f"{name}.{key}": one for key, one in value.items()}.items()
                if isinstance(value, dict)
                else [(name, value)]
            ):
                config[path] = Said(path, one, source)
    variables = {
        name: Said(name, text, "environment") for name, text in launch["environment"].items()
    }
    said = Given(read.options, config, variables, starter, read.problems)
    record, machine = Run(), Machine(launch["gpus"], 2, False, world)
    try:
        environment, ranked = set_environment(said, machine, record)
        Plugins(environment, ranked, machine, record, launch["file"]).build()
    except Refusal as error:
        return record, said, error
    return record, said, None


def values(record: Run) -> dict[str, Any]:
    return {one.setting: one.value for one in record.settings}


def compare(found: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return settings that differ from those of the real code. What only a callable or a script gives is left out."""
    names = {name for name in theirs if name in found or not name.startswith("megatron_lm.")}
    return {
        name: (found.get(name), theirs[name]) for name in names if found.get(name) != theirs[name]
    }


@pytest.mark.once
@settings(max_examples=40, deadline=None)
@given(LAUNCHES)
def test_a_launch_is_what_the_real_launcher_and_plugins_make_of_it(
    tmp_path_factory: Any, launch: dict[str, Any]
) -> None:
    pytest.importorskip("accelerate")
    assert_launch(tmp_path_factory.mktemp("launch"), launch)


def assert_launch(folder: Path, launch: dict[str, Any]) -> None:
    """Compare a launch with the real code: its stop, or every value; and whoever is heard, by changing what is not."""
    (folder / "ds.json").write_text(json.dumps(launch["file"]))
    theirs = ask(
        launch["flags"], launch["config"], launch["environment"], launch["gpus"], str(folder)
    )
    record, said, stop = ours(launch)
    note(f"{theirs} {stop and stop.message}")
    assert (stop is not None) == ("stops" in theirs)
    if stop is not None:
        return
    assert not compare(values(record), theirs)
    for one in said:
        if (one.setting, one.source) in record.heard or one.source != "environment":
            continue
        # What nobody hears can go.
        rest = {name: text for name, text in launch["environment"].items() if name != one.setting}
        without = ask(launch["flags"], launch["config"], rest, launch["gpus"], str(folder))
        assert without == theirs, one.setting


SHELL: Mapping[str, tuple[str, ...]] = {
    "ACCELERATE_MIXED_PRECISION": ("no", "fp16", "bf16"),
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": ("1", "8"),
    "ACCELERATE_GRADIENT_CLIPPING": ("0.5", "auto"),
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": ("1", "3"),
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": ("none", "cpu"),
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": ("cpu",),
    "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": ("true", "false"),
    "ACCELERATE_DEEPSPEED_CONFIG_FILE": ("ds.json",),
}
OF_PLUGIN = {
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "zero_stage": "zero_optimization.stage",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "zero3_save_16bit_model": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    "deepspeed_config.fp16.enabled": "fp16.enabled",
    "deepspeed_config.bf16.enabled": "bf16.enabled",
}
"""The key of DeepSpeed that each field of accelerate's plugin sets."""
INLINE_OR_FILE = st.one_of(
    st.none(),
    st.fixed_dictionaries({}, optional={
        "zero_stage": st.sampled_from([2, 3]), "gradient_clipping": st.just(0.3),
        "gradient_accumulation_steps": st.just(4),
    }),
    st.just({"deepspeed_config_file": "ds.json"}),
)  # fmt: skip


@pytest.mark.once
@settings(max_examples=25, deadline=None)
@given(
    st.fixed_dictionaries({}, optional={name: st.sampled_from(one) for name, one in SHELL.items()}),
    st.fixed_dictionaries({}, optional={
        name: st.sampled_from(FLAGS[name])
        for name in ("zero_stage", "gradient_clipping", "gradient_accumulation_steps", "mixed_precision")
    }),
    INLINE_OR_FILE,
    st.sampled_from(FILES[:3]),
)  # fmt: skip
def test_variables_of_the_shell_next_to_deepspeed_are_heard_as_by_the_real_plugin(
    tmp_path_factory: Any,
    shell: dict[str, str],
    flags: dict[str, str],
    section: dict[str, Any] | None,
    file: dict[str, Any],
) -> None:
    pytest.importorskip("accelerate")
    folder = tmp_path_factory.mktemp("shell")
    (folder / "ds.json").write_text(json.dumps({"train_micro_batch_size_per_gpu": 1, **file}))
    words = [word for name, text in flags.items() for word in (f"--{name}", text)]
    words += ["--num_processes", "2", *([] if section is not None else ["--use_deepspeed"])]
    config = section and {
        "distributed_type": "DEEPSPEED", "num_processes": 2, "deepspeed_config": section
    }  # fmt: skip
    config = config or (
        None if section is None else {"distributed_type": "DEEPSPEED", "num_processes": 2}
    )
    theirs = ask(words, config, shell, 8, str(folder))
    (folder / "config.yaml").write_text(json.dumps(config))
    launch = [
        "accelerate",
        "launch",
        *(["--config_file", "config.yaml"] if config else []),
        *words,
        "train.py",
    ]
    exports = [f"export {name}={text}" for name, text in shell.items()]
    (folder / "run.sh").write_text("\n".join([*exports, " ".join(launch), ""]))
    reads: Any = registry.load("deepspeed").read
    note(f"{theirs}")
    try:
        # Sizes of the batch are the program's.
        found = reads(folder / "run.sh", open_auto=True)
    except BridgeError as error:
        assert "stops" in theirs, error.problems
        return
    stops = [one for one in found.findings if one.effect is Effect.STOPS]
    assert bool(stops) == ("stops" in theirs), stops
    if stops:
        return
    values = {one.setting: one.value for one in found.resolve().settings}
    by_file = (
        "deepspeed_config_file" in (section or {}) or "ACCELERATE_DEEPSPEED_CONFIG_FILE" in shell
    )
    paths = {path for path, _ in flat(file)} if by_file else {*OF_PLUGIN.values()}
    for name, path in OF_PLUGIN.items():
        if path not in paths and not path.endswith("16.enabled"):
            continue  # the plugin's field is not what DeepSpeed gets
        own = theirs[f"deepspeed.{name}"]
        if own == 0.0:
            continue  # accelerate leaves the key out, and DeepSpeed clips by its default
        if own == "auto":
            assert values.get(path) in (
                (1.0,) if name == "gradient_clipping" else ("auto", 1, None)
            )
        else:
            assert values.get(path, own) == own, name
    lost = {one.said.setting for one in found.resolve().unheard}
    lost |= {claim.said.setting for one in found.resolve().settings for claim in one.overruled}
    compared = [
        f"deepspeed.{name}"
        for name, path in OF_PLUGIN.items()
        if path in paths or path.endswith("16.enabled")
    ]
    for name in shell:
        rest = {one: text for one, text in shell.items() if one != name}
        other = ask(words, config, rest, 8, str(folder))
        heard = any(other.get(field) != theirs[field] for field in compared)
        assert not (heard and name in lost), name


CALLS: tuple[dict[str, Any], ...] = (
    {"mixed_precision": "bf16"},
    {"mixed_precision": "no", "gradient_accumulation_steps": 4},
    {"gradient_accumulation_steps": 4, "mixed_precision": "fp16"},
)
OF_CALL = ("--use_deepspeed --zero_stage 2", "--multi_gpu", "--use_fsdp --fsdp_version 2")


@pytest.mark.once
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", OF_CALL)
@pytest.mark.parametrize("options", ["", "--mixed_precision fp16"])
@pytest.mark.parametrize("shell", [{}, {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "8"}])
def test_the_programs_accelerator_is_heard_as_by_the_real_one(
    told: Any, tmp_path: Path, call: dict[str, Any], kind: str, options: str, shell: dict[str, str]
) -> None:
    pytest.importorskip("accelerate")
    flags = f"--num_processes 2 {kind} {options}".split()
    theirs = ask(flags, None, shell, 8, str(tmp_path), call)
    words = ", ".join(f"{name}={value!r}" for name, value in call.items())
    Path("train.py").write_text(f"from accelerate import Accelerator\na = Accelerator({words})\n")
    exports = "".join(f"export {name}={text}\n" for name, text in shell.items())
    Path("run.sh").write_text(f"{exports}accelerate launch {' '.join(flags)} train.py\n")
    data = told("run.sh", "--auto", "gpus=8") if "deepspeed" not in kind else told("run.sh")
    values = {one["setting"]: one["value"] for one in data["settings"]}
    if "deepspeed" in kind:
        for half in ("fp16", "bf16"):
            assert values[f"{half}.enabled"] == theirs[f"deepspeed.deepspeed_config.{half}.enabled"]
    else:
        assert values["mixed_precision"] == theirs["mixed_precision"]
    assert values.get("gradient_accumulation_steps", 1) == theirs["gradient_accumulation_steps"]


ALONE: Mapping[str, tuple[str, ...]] = {
    **{name: values for name, values in VARIABLES.items() if not name.startswith("CUDA")},
    "ACCELERATE_MIXED_PRECISION": ("no", "bf16", "fp16"),
    "FSDP_VERSION": ("1", "2"),
    "FSDP_RESHARD_AFTER_FORWARD": ("true", "false"),
    "FSDP_AUTO_WRAP_POLICY": ("TRANSFORMER_BASED_WRAP", "NO_WRAP"),
    "FSDP_TRANSFORMER_CLS_TO_WRAP": ("A,B",),
    "ACCELERATE_DEEPSPEED_CONFIG_FILE": ("ds.json",),
}


@pytest.mark.once
@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(("DEEPSPEED", "DEEPSPEED", "FSDP", "FSDP", "MEGATRON_LM", "")),
    st.fixed_dictionaries({}, optional={name: st.sampled_from(one) for name, one in ALONE.items()}),
    st.sampled_from(CALLS),
    st.sampled_from(FILES[:3]),
)
def test_variables_alone_are_heard_as_by_the_real_accelerator(
    tmp_path_factory: Any,
    kind: str,
    shell: dict[str, str],
    call: dict[str, Any],
    file: dict[str, Any],
) -> None:
    pytest.importorskip("accelerate")
    folder = tmp_path_factory.mktemp("alone")
    (folder / "ds.json").write_text(json.dumps({"train_micro_batch_size_per_gpu": 1, **file}))
    shell = {"ACCELERATE_MIXED_PRECISION": "no", **shell}
    shell |= {f"ACCELERATE_USE_{kind}": "true"} if kind else {}
    theirs = ask(None, None, shell, 8, str(folder), call)
    words = ", ".join(f"{name}={value!r}" for name, value in call.items())
    program = f"from accelerate import Accelerator\na = Accelerator({words})\n"
    (folder / "train.py").write_text(program)
    exports = "".join(f"export {name}={text}\n" for name, text in shell.items())
    (folder / "run.sh").write_text(f"{exports}torchrun --nproc_per_node 8 train.py --steps 3\n")
    document = load(folder / "run.sh")
    note(f"{theirs}")
    by_deepspeed = registry.recognising(document.data)[0]["deepspeed"]
    assert bool(by_deepspeed) == (kind == "DEEPSPEED")
    reads: Any = registry.load("deepspeed" if by_deepspeed else "accelerate").read
    try:
        config = reads(document, open_auto=True)
    except BridgeError as error:
        assert "stops" in theirs, error.problems
        return
    stops = [one for one in config.findings if one.effect is Effect.STOPS]
    assert bool(stops) == ("stops" in theirs), stops
    if stops:
        return
    if by_deepspeed and theirs["distributed_type"] == "DEEPSPEED":
        found = {one.setting: one.value for one in config.resolve().settings}
        for half in ("fp16", "bf16"):
            own = theirs[f"deepspeed.deepspeed_config.{half}.enabled"]
            assert found[f"{half}.enabled"] in (own, "auto" if own is None else own)
    elif not by_deepspeed:
        record = resolve_host(document, Question({}, {})).resolution
        assert not compare({one.setting: one.value for one in record.settings}, theirs)
        given = config.given
        assert (given["distributed_type"], given["num_processes"]) == (
            theirs["distributed_type"],
            8,
        )
        assert given.get("mixed_precision", "no") == theirs["mixed_precision"]
        steps = given.get("arguments.gradient_accumulation_steps", 1)
        assert steps == theirs["gradient_accumulation_steps"]
        if theirs["distributed_type"] == "FSDP":
            again = given.get("fsdp_config.fsdp_reshard_after_forward")
            assert again in (None, theirs["fsdp.reshard_after_forward"])


def test_arguments_of_accelerator_that_are_not_read_are_named(told: Any) -> None:
    program = "a = Accelerator(gradient_accumulation_steps=args.steps, fsdp_plugin=plugin, log_with='x')\n"
    Path("train.py").write_text(program)
    for kind in OF_CALL:
        Path("run.sh").write_text(f"accelerate launch --num_processes 2 {kind} train.py\n")
        findings = told("run.sh", code=2)["findings"]
        named = {one["path"] for one in findings if one["path"].startswith("Accelerator")}
        assert named == {"Accelerator(gradient_accumulation_steps)", "Accelerator(fsdp_plugin)"}
    Path("train.py").write_text("a = Accelerator(cpu=True)\n")
    Path("run.sh").write_text("accelerate launch --use_deepspeed --zero_stage 2 train.py\n")
    findings = told("run.sh", code=2)["findings"]
    assert "Accelerator(cpu)" in {one["path"] for one in findings}
    Path("train.py").write_text(program * 2)
    assert "Accelerator" in {one["path"] for one in told("run.sh", code=2)["findings"]}


def test_the_data_are_those_of_the_installed_release() -> None:
    pytest.importorskip("accelerate")
    from tests.harvesting.stacks.accelerate import read_facts

    assert json.loads(json.dumps(read_facts())) == facts()


WRONG = {
    "ac-52d33223e0-232": "--dynamo_backend", "ac-2abaecf483-259": "--dynamo_backend",
    "ac-9a05cc105b-270": "--dynamo_backend", "ac-2ff98295fe-406": "--megatron_lm_no_load_optim",
    "ac-ee383316e6-419": "--megatron_lm_use_custom_fsdp", "ac-764cfc71a7-422": "--megatron_lm_use_custom_fsdp",
}  # fmt: skip
"""Rows whose values we have, and whose word on one option is not so by accelerate's own code: under DeepSpeed nothing
passes --dynamo_backend on, and an option of type bool is true for any text, so that it is heard.
"""


def test_the_real_code_says_that_rows_are_wrong(whole: Path, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    lines = (whole / "truth" / "sources" / "accelerate.jsonl").read_text().splitlines()
    for row in (row for row in map(json.loads, lines) if row["id"] in WRONG):
        option, flags = WRONG[row["id"]], row["flags"]
        at = flags.index(option)
        (tmp_path / "ds_config.json").write_text(json.dumps(row.get("deepspeed_file") or {}))
        one, other = (
            ask(words, row["config"], row["env"], row["gpus"], str(tmp_path))
            for words in (flags, [*flags[:at], *flags[at + 2 :]])
        )
        assert (one == other) == (option == "--dynamo_backend"), row["id"]


def lines_of(record: Run, said: Given) -> tuple[set[tuple[str, str]], set[tuple[str, str]]]:
    """Return what is overruled and what nobody hears, each as source and setting."""
    lost = {
        (claim.said.source, claim.said.setting)
        for one in record.settings
        for claim in one.overruled
    }
    rest = {(one.said.source, one.said.setting) for one in find_unheard(said, record)}
    return lost, rest


def test_launches_that_the_real_libraries_judged(whole: Path) -> None:
    rows = map(
        json.loads, (whole / "truth" / "sources" / "accelerate.jsonl").read_text().splitlines()
    )
    wrong = dict[str, Any]()
    for row in rows:
        own = row.get("config")
        default = own is None and "default_config" in row and "--cpu" not in row["flags"]
        launch = {
            **row,
            "config": row["default_config"] if default else own,
            "file": row.get("deepspeed_file"),
            "environment": row["env"],
        }
        starter = row["launched_by"].removesuffix(" launch")
        source = "default config file" if default else "config file"
        record, said, stop = ours(launch, starter, row.get("world_size"), source)
        if (stop is None) is not (row["stops"] is None):
            wrong[row["id"]] = stop and stop.message
        elif stop is None:
            lost, rest = lines_of(record, said)
            theirs = [
                {(one["source"], one["setting"]) for one in row[name]}
                for name in ("overruled", "ignored")
            ]
            # A default file that is not read says nothing, and keys of DeepSpeed's file are its dialect's.
            theirs = [
                {
                    one
                    for one in group
                    if one[0] in (source, "launch flag", "environment")
                    and (own or default or one[0] != "default config file")
                }
                for group in theirs
            ]
            if (both := [lost, rest]) != theirs or (both := differing(record, row["effective"])):
                wrong[row["id"]] = both
    assert wrong.keys() <= WRONG.keys(), {
        name: why for name, why in wrong.items() if name not in WRONG
    }


def differing(record: Run, effective: Mapping[str, Any]) -> dict[str, Any]:
    """Return effective values of a row that are not ours."""
    found, theirs = values(record), dict(flat(effective))
    left = ("deepspeed.enable_msamp", "deepspeed.transformer_moe", "deepspeed.deepspeed_config.")
    names = {
        name
        for name, value in theirs.items()
        if not name.startswith(left) and (value is not None or name in found)
    }
    return compare(found, {name: theirs[name] for name in names})


def flat(section: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    return [
        pair
        for name, value in section.items()
        for pair in (
            flat(value, f"{prefix}{name}.") if isinstance(value, dict) else [(prefix + name, value)]
        )
    ]


FSDP = """compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_sharding_strategy: FULL_SHARD
mixed_precision: bf16
num_machines: 1
num_processes: 8
"""


@pytest.fixture
def told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., Any]:
    """The object that `resolve --json` prints of files in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    Path("fsdp.yaml").write_text(FSDP)

    def call(*words: str, code: int | None = None) -> Any:
        found = run(["resolve", *words, "--json"])
        data = json.loads(capsys.readouterr().out)
        assert data["exit_code"] == found and code in (None, found), data
        return data

    return call


def row(data: Any, setting: str) -> Any:
    (found,) = [one for one in data["settings"] if one["setting"] == setting]
    return found


def test_a_config_of_accelerate_alone(told: Any) -> None:
    data = told("fsdp.yaml", code=0)
    assert (data["dialect"], data["world_size"]) == ("accelerate", 8)
    assert row(data, "fsdp.fsdp_version")["winner"] == {
        "source": "fsdp.yaml",
        "line": 4,
        "setting": "fsdp_config.fsdp_version",
    }
    assert [(one["setting"], one["line"]) for one in data["ignored"]] == [
        ("fsdp_config.fsdp_sharding_strategy", 6)
    ]


def test_options_win_over_the_file_and_the_launcher_over_the_shell(
    told: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("a.sh").write_text(
        "export FSDP_OFFLOAD_PARAMS=true\naccelerate launch --config_file fsdp.yaml \\\n    --mixed_precision fp16 run.py\n"
    )
    data = told("a.sh", code=2)
    precision = row(data, "mixed_precision")
    assert precision["value"] == "fp16" and precision["winner"] == {
        "source": "a.sh",
        "line": 3,
        "setting": "--mixed_precision",
    }
    (lost,) = precision["overruled"]
    assert (lost["source"], lost["line"], lost["value"]) == ("fsdp.yaml", 7, "bf16")
    assert [one["setting"] for one in row(data, "fsdp.cpu_offload")["overruled"]] == [
        "FSDP_OFFLOAD_PARAMS"
    ]
    assert run(["resolve", "a.sh", "--format", "sarif"]) == 2
    rules = {one["ruleId"] for one in json.loads(capsys.readouterr().out)["runs"][0]["results"]}
    assert "mixed_precision/overruled" in rules


def test_the_users_own_config_is_named_and_read_only_on_demand(told: Any, tmp_path: Path) -> None:
    place = tmp_path / "cache" / "accelerate" / "default_config.yaml"
    place.parent.mkdir(parents=True)
    place.write_text(FSDP)
    Path("a.sh").write_text("accelerate launch --num_processes 4 run.py\n")
    data = told("a.sh", code=2)
    assert row(data, "distributed_type")["value"] == "MULTI_GPU"
    assert any(str(place) in one["message"] for one in data["findings"])
    data = told("a.sh", "--user-config")
    assert row(data, "distributed_type") == {
        "setting": "distributed_type", "value": "FSDP", "overruled": [], "why": "",
        "winner": {"source": str(place), "line": 2, "setting": "distributed_type"},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "setting", "words"),
    [
        ("fsdp: 2", "fsdp", "does not know the key"),
        ("distributed_type: FSDP", "", ""),
        (
            "parallelism_config:\n  parallelism_config_dp_replicate_size: 2",
            "parallelism_config",
            "2 ranks, and the run has 8",
        ),
        ("compute_environment: AMAZON_SAGEMAKER", "compute_environment", "LOCAL_MACHINE"),
    ],
)
def test_what_accelerate_refuses_stops_the_run(
    told: Any, change: str, setting: str, words: str
) -> None:
    name = change.partition(":")[0]
    rest = "".join(line for line in FSDP.splitlines(True) if not line.startswith(name + ":"))
    Path("fsdp.yaml").write_text(rest + change + "\n")
    data = told("fsdp.yaml")
    assert [(one["setting"], words in one["message"]) for one in data["stops"]] == (
        [(setting, True)] if words else []
    )


@pytest.mark.parametrize(
    ("ranks", "words"), [(1, "the run has 1; and FSDP 2"), (2, "FSDP 2 has no dim")]
)
@pytest.mark.parametrize("release", ["1.10.1", "1.15.0"])
def test_fsdp_2_without_a_dimension_to_shard_over_stops(
    told: Any, ranks: int, words: str, release: str
) -> None:
    sizes = "parallelism_config:\n  parallelism_config_dp_replicate_size: 2\n"
    Path("fsdp.yaml").write_text(FSDP.replace("processes: 8", f"processes: {ranks}") + sizes)
    (stop,) = told("fsdp.yaml", "--from-version", release, code=1)["stops"]
    assert words in stop["message"]


def test_without_a_gpu_each_process_is_alone(told: Any) -> None:
    data = told("fsdp.yaml", "--auto", "gpus=0", code=2)
    assert (
        row(data, "distributed_type")["value"] == "NO" and row(data, "num_processes")["value"] == 1
    )
    assert any("asked for FSDP, runs as NO" in one["message"] for one in data["findings"])


def test_clipping_that_nobody_asked_for_is_named(told: Any) -> None:
    Path("ds.yaml").write_text(
        "distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 2\nnum_processes: 8\n"
    )
    data = told("ds.yaml", code=2)
    assert any(
        one["path"] == "deepspeed.gradient_clipping" and "1.0" in one["message"]
        for one in data["findings"]
    )


def test_a_deepspeed_file_beside_settings_of_accelerate_stops(told: Any) -> None:
    Path("ds.json").write_text('{"zero_optimization": {"stage": 2}}')
    text = "distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: ds.json\n{}num_processes: 8\n"
    Path("ds.yaml").write_text(text.format("mixed_precision: bf16\n"))
    assert "mixed_precision" in told("ds.yaml", code=1)["stops"][0]["message"]
    Path("ds.yaml").write_text(text.format(""))
    data = told("ds.yaml", code=0)
    assert row(data, "deepspeed.zero_stage")["winner"]["source"] == "ds.json"


def test_text_that_says_false_switches_on(told: Any) -> None:
    Path("a.sh").write_text("accelerate launch --cpu --megatron_lm_no_load_optim false run.py\n")
    assert any("also 'false'" in one["message"] for one in told("a.sh")["findings"])


def test_a_retired_argument_of_the_trainer_is_named(told: Any) -> None:
    words = "--fsdp full_shard --fsdp_transformer_layer_cls_to_wrap LlamaDecoderLayer --own_flag 1"
    Path("a.sh").write_text(f"torchrun --nproc_per_node 2 run.py --output_dir o --bf16 {words}\n")
    lacks = [
        one for one in told("a.sh", code=2)["findings"] if "no such argument" in one["message"]
    ]
    assert [one["path"] for one in lacks] == ["--fsdp_transformer_layer_cls_to_wrap"]
    assert "since 5.0.0" in lacks[0]["message"]


def test_num_steps_of_accelerator_config_counts(told: Any) -> None:
    words = "--per_device_train_batch_size 2 --accelerator_config"
    Path("own.json").write_text('{"gradient_accumulation_kwargs": {"num_steps": 4}}')
    for config in ("own.json", """'{"gradient_accumulation_kwargs": {"num_steps": 4}}'"""):
        line = f"torchrun --nproc_per_node 2 run.py --output_dir o {words} {config}"
        Path("a.sh").write_text(line + "\n")
        steps = row(told("a.sh"), "gradient_accumulation_steps")
        assert (steps["value"], steps["winner"]["setting"]) == (4, "--accelerator_config")
        given = registry.load("accelerate").read("a.sh").given
        assert given["arguments.gradient_accumulation_steps"] == 4
        Path("a.sh").write_text(f"{line} --gradient_accumulation_steps 2\n")
        assert "refuses both" in told("a.sh", code=1)["stops"][0]["message"]


def test_words_of_fsdp_that_its_config_overrules_are_each_named(told: Any) -> None:
    Path("fsdp.json").write_text('{"reshard_after_forward": false, "cpu_offload": false}')
    words = "--fsdp 'full_shard offload auto_wrap' --fsdp_config fsdp.json"
    Path("a.sh").write_text(f"torchrun --nproc_per_node 2 run.py --output_dir o {words}\n")
    ignored = [one for one in told("a.sh")["ignored"] if one["setting"] == "--fsdp"]
    assert [one["value"] for one in ignored] == ["full_shard", "offload"]
    assert "reshard_after_forward" in ignored[0]["why"] and "cpu_offload" in ignored[1]["why"]


IMPORTS = "from transformers import TrainingArguments as Arguments\n"
HALVES = ({}, {"fp16": True}, {"fp16": False}, {"bf16": True, "use_cpu": True})


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("launcher", ["no", "bf16", "fp16"])
def test_the_programs_training_arguments_are_heard_as_by_the_real_ones(
    told: Any, monkeypatch: pytest.MonkeyPatch, half: dict[str, bool], launcher: str
) -> None:
    transformers = pytest.importorskip("transformers")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launcher)
    theirs = transformers.TrainingArguments(output_dir="out", **half)
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION")
    words = ", ".join(f"{name}={value}" for name, value in half.items())
    Path("train.py").write_text(f"{IMPORTS}a = Arguments(output_dir='out', {words})\n")
    Path("run.sh").write_text(
        f"accelerate launch --config_file fsdp.yaml --mixed_precision {launcher} train.py\n"
    )
    assert row(told("run.sh"), "mixed_precision")["value"] == theirs.mixed_precision


def test_what_the_programs_training_arguments_say_is_named(told: Any) -> None:
    Path("run.sh").write_text(
        "accelerate launch --config_file fsdp.yaml train.py --gradient_accumulation_steps 2 --learning_rate 1e-3\n"
    )
    Path("train.py").write_text(
        "from trl import SFTConfig\n"
        "a = SFTConfig(output_dir='out', fp16=True, gradient_accumulation_steps=4, deepspeed='ds.json',\n"
        "              learning_rate=own.learning_rate, max_grad_norm=CLIP, eval_steps=EVERY)\n"
    )
    data = told("run.sh", code=2)
    assert row(data, "mixed_precision")["winner"] == {
        "setting": "SFTConfig(fp16)",
        "source": "train.py",
        "line": 2,
    }
    assert row(data, "gradient_accumulation_steps")["value"] == 4
    found = {one["path"]: one["message"] for one in data["findings"]}
    assert found["SFTConfig"].startswith("max_grad_norm: ")
    assert {"SFTConfig(deepspeed)", "--gradient_accumulation_steps"} <= found.keys()
    Path("train.py").write_text("a = TrainingArguments('a')\nb = TrainingArguments('b')\n")
    assert "TrainingArguments" in {one["path"] for one in told("run.sh", code=2)["findings"]}


@pytest.mark.parametrize(
    ("program", "path"),
    [
        ("from accelerate import Accelerator as A\na = A(split_batches=True)\n", "split_batches"),
        ("os.environ['FSDP_VERSION'] = '1'\n", "FSDP_VERSION"),
        ("environ.setdefault('ACCELERATE_USE_FSDP', 'true')\n", "ACCELERATE_USE_FSDP"),
    ],
)
def test_other_words_of_a_program_are_named(told: Any, program: str, path: str) -> None:
    Path("run.sh").write_text("accelerate launch --config_file fsdp.yaml train.py\n")
    Path("train.py").write_text(program)
    (finding,) = [
        one for one in told("run.sh", code=2)["findings"] if one["effect"] == "different numbers"
    ]
    assert path in finding["path"]


@pytest.mark.parametrize("enter", ["cd sub", "cd sub && pwd", "pushd sub"])
def test_a_launch_reads_what_is_in_its_folder(told: Any, enter: str) -> None:
    Path("sub/own").mkdir(parents=True)
    Path("sub/fsdp.yaml").write_text(FSDP.replace("bf16", "fp16"))
    Path("sub/own/train.py").write_text("Accelerator(gradient_accumulation_steps=3)\n")
    Path("own").mkdir()
    Path("own/train.py").write_text("Accelerator(gradient_accumulation_steps=5)\n")
    for program in ("own/train.py", "-m own.train"):
        Path("run.sh").write_text(f"{enter}\naccelerate launch --config_file fsdp.yaml {program}\n")
        data = told("run.sh", code=0)
        assert row(data, "mixed_precision")["value"] == "fp16"
        assert row(data, "gradient_accumulation_steps")["value"] == 3


def test_truth_values_are_those_of_the_trainers_parser(told: Any) -> None:
    parser = pytest.importorskip("transformers.hf_argparser")
    for word in ("yes", "TRUE", "t", "Y", "1", "no", "false", "F", "n", "0"):
        Path("run.sh").write_text(
            f"accelerate launch --config_file fsdp.yaml train.py --output_dir out --fp16 {word}\n"
        )
        half = "fp16" if parser.string_to_bool(word) else "bf16"
        assert row(told("run.sh"), "mixed_precision")["value"] == half


OWN_LOOP = "from accelerate import Accelerator\nfrom own import parser\na = Accelerator()\n"
TRAINED = "run.py --output_dir o --per_device_train_batch_size 2"


def test_flags_are_the_trainers_only_if_the_program_may_be(told: Any) -> None:
    Path("run.sh").write_text(f"torchrun --nproc_per_node 2 {TRAINED}\n")
    assert told("run.sh", code=0)["settings"]
    Path("run.py").write_text(OWN_LOOP)
    assert "nothing else shows that the Trainer" in told("run.sh", code=1)["problems"][0]
    Path("run.sh").write_text(
        f"accelerate launch --use_deepspeed --mixed_precision bf16 {TRAINED}\n"
    )
    assert row(told("run.sh"), "bf16.enabled")["winner"]["setting"] == "--mixed_precision"


def test_a_deepspeed_file_that_is_not_known_is_no_run_without_one(told: Any) -> None:
    Path("run.sh").write_text(f"deepspeed {TRAINED} --deepspeed $FILE\n")
    assert "--deepspeed: the DeepSpeed file is not known" in told("run.sh", code=1)["problems"][0]


def test_arguments_alone_are_a_run_of_unknown_ranks(told: Any) -> None:
    Path("args.yaml").write_text("output_dir: o\nbf16: true\nlearning_rate: 1.0e-4\n")
    data = told("args.yaml", code=2)
    assert row(data, "mixed_precision")["value"] == "bf16"
    assert [one["path"] for one in data["findings"]] == ["world_size"]
    assert not told("args.yaml", "--world-size", "4", code=0)["findings"]
