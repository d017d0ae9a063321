"""axolotl: its recipes and commands, and what its code makes of them.

The tables follow axolotl-ai-cloud/axolotl, 0.18 of 2026-07: utils/schemas, utils/config (normalize_config), utils/trainer.py
(prepare_optim_env), core/builders (base.py, causal.py) and cli (main.py, config.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from bridge.files import Document, Launch, Script, scalar
from bridge.shell.word_pieces import NOWHERE, Text
from bridge.stack.findings import Finding
from bridge.stack.front_end import Given, Run, Table, read_file, read_launch, spell
from bridge.stack.rules import Effect
from bridge.stack.training_arguments import ARGUMENTS

RELEASE = None
NEEDED = ("micro_batch_size", "sequence_len", "datasets", "adapter", "gradient_accumulation_steps", "num_epochs",
          "optimizer")  # fmt: skip
"""Settings of which a recipe has two at least next to base_model."""
OPTIONS = ("launcher", "cloud", "sweep", "num_processes", "main_process_port", "use_ray",
           "ray_num_workers")  # fmt: skip
"""Options of the command that are no settings."""
RANKS = re.compile(r"--?(?:num[_-]processes|nproc[_-]per[_-]node)[= ](\d+)")
FSDP: Mapping[str, str] = {
    "activation_checkpointing": "ACTIVATION_CHECKPOINTING", "offload_params": "OFFLOAD_PARAMS",
    "sync_module_states": "SYNC_MODULE_STATES", "cpu_ram_efficient_loading": "CPU_RAM_EFFICIENT_LOADING",
    "use_orig_params": "USE_ORIG_PARAMS", "state_dict_type": "STATE_DICT_TYPE", "auto_wrap_policy": "AUTO_WRAP_POLICY",
    "transformer_layer_cls_to_wrap": "TRANSFORMER_CLS_TO_WRAP", "min_num_params": "MIN_NUM_PARAMS",
    "reshard_after_forward": "RESHARD_AFTER_FORWARD",
}  # fmt: skip
"""The variable FSDP_* that axolotl sets for each key of fsdp_config (utils/trainer.py: setup_fsdp_envs)."""
BY_VARIABLE = ("offload_params",)
"""Keys of fsdp_config that reach accelerate by their variable alone."""
SPLITS: Mapping[str, str] = {
    "tensor_parallel_size": "TP", "dp_shard_size": "DP_SHARD", "dp_replicate_size": "DP_REPLICATE", "context_parallel_size": "CP",
}  # fmt: skip
"""The variable PARALLELISM_CONFIG_*_SIZE of each size above 1 (utils/trainer.py: setup_parallelism_envs)."""
TWICE = (
    "before axolotl 0.16 (2026-03-15) accelerate split the sequence once more (axolotl#3498), so that each rank trained on a"
    " part of its part"
)
ADAPTER = (
    "axolotl trains adapters of rank {}, alpha {} and dropout {} ({}), and no other weights; stagebridge reads the run as one"
    " that trains all weights"
)
WARMUP = "not given: axolotl warms up for 3 % of the steps, and for {} at most"
MOST_WARMUP = 100
FLOORS = "axolotl rounds this share of the steps down where it knows their number, the Trainer up: one step of warm-up less"
ALTERNATE = "axolotl puts a schedule of its own in place of the Trainer's cosine, which stagebridge does not read"
OFFLOADS = "axolotl saves activations on the host then, and recomputes none by the Trainer"
AUTO = "auto: read as true, as on GPUs with bf16"
RANK_MEAN = "axolotl sets it to false: each rank takes the mean over its own tokens"
WITH_TRL = "axolotl trains by a class of trl then, with a loss that stagebridge does not read"


@cache
def table() -> Table:
    """Return the settings of axolotl."""
    return Table.load(__file__)


def starts(data: Any) -> bool:
    """Return whether parsed data is a recipe of axolotl, or a script that starts a training by it."""
    if isinstance(data, Script):
        return any(map(_is_launch, data.launches))
    return isinstance(data, Mapping) and "base_model" in data and sum(name in data for name in NEEDED) >= 2  # fmt: skip


def _is_launch(launch: Launch) -> bool:
    if Path(launch.program).name == "axolotl":
        return launch.texts[:1] == ["train"]
    return launch.program == "axolotl.cli.train"


def start(
    document: Document, world_size: int | None, lenient: bool = False
) -> tuple[Document, tuple[Finding, ...]]:
    """Return a run of axolotl on `world_size` ranks as the launch of the Trainer that it comes to, and findings on what that
    launch does not say. Raises `BridgeError` for settings with which axolotl stops. Of those that it does not have it reads
    none, whether `lenient` or not.
    """
    launcher: tuple[str, ...] = ("torchrun",)
    if isinstance(document.data, Script):
        launch = document.data.launch(_is_launch, "axolotl train")
        by_command = Path(launch.program).name == "axolotl"
        before, behind = _cut(launch.texts)
        own = replace(launch, words=launch.words[: len(before)], lines=launch.lines[: len(before)])
        read = read_launch(document, own, int(by_command))
        ranks = RANKS.search(" ".join((*before, *behind)))
        world_size = world_size or (int(ranks[1]) if ranks else None)
        kind = str(read.settings["launcher"].value) if "launcher" in read.settings else "accelerate"
        starter = STARTERS.get(kind, launcher)
        launcher = () if not by_command else (*starter, *behind) if behind else launcher
        statement = {
            name.replace(".", "__"): one
            for name, one in read.settings.items()
            if name not in OPTIONS
        }
        given = replace(read, settings=statement, launch=launch, others=())
    else:
        given = Given(read_file(document))
    run = Run(table(), document, given, world_size)
    _rewrite(run)
    run.check_names()
    run.check_refusals()
    _set_precision(run)
    _set_schedule(run)
    _set_fsdp(run)
    run.pass_arguments(HANDLED)
    for name, (setting, usual) in USUAL.items():
        if not run.has(setting):
            run.set(name, usual)
    run.set("average_tokens_across_devices", False)
    run.tell("average_tokens_across_devices", RANK_MEAN, Effect.NONE)
    _report_training(run)
    started, found = run.start("axolotl", launcher)
    variables = dict(_find_variables(run))

    def add_variables(one: Launch) -> Launch:
        is_own = one.program == "axolotl" and bool(one.sources)
        return replace(one, environment={**one.environment, **variables}) if is_own else one

    script = started.data.change(add_variables)
    return replace(started, data=script), found


STARTERS = {"accelerate": ("accelerate", "launch"), "torchrun": ("torchrun",), "python": ()}
HANDLED = ("bf16", "fp16", "tf32", "warmup_steps", "warmup_ratio", "lr_scheduler", "fsdp", "fsdp_config",
           "gradient_checkpointing", "gradient_checkpointing_kwargs")  # fmt: skip
USUAL: Mapping[str, tuple[str, Any]] = {
    "output_dir": ("output_dir", "./model-out"),
    "per_device_train_batch_size": ("micro_batch_size", 1),
    "gradient_accumulation_steps": ("gradient_accumulation_steps", 1),
    "num_train_epochs": ("num_epochs", 1.0),
    "optim": ("optimizer", "adamw_torch_fused"),
    "weight_decay": ("weight_decay", 0.0),
    "seed": ("seed", 42),
    "save_total_limit": ("save_total_limit", 4),
}
"""Arguments that axolotl always gives the Trainer: the setting, and its default."""


def _cut(texts: list[str]) -> tuple[list[str], list[str]]:
    """Return the words before `--`, and those behind it, which are the launcher's."""
    at = texts.index("--") if "--" in texts else len(texts)
    return texts[:at], texts[at + 1 :]


def _rewrite(run: Run) -> None:
    """Read values as axolotl's models do, which take texts of numbers, and settings that follow from others."""
    for name, statement in [*run.settings.items()]:
        usual = ARGUMENTS.get(table().passed.get(name, ""))
        if isinstance(statement.value, str) and isinstance(usual, int | float):
            run.settings[name] = replace(statement, value=scalar(statement.value))
        if name == "optim_args" and isinstance(statement.value, Mapping):
            pairs = ",".join(f"{key}={value}" for key, value in statement.value.items())
            run.settings[name] = replace(statement, value=pairs)
    size, micro = run.value("batch_size"), run.value("micro_batch_size")
    if (
        isinstance(size, int)
        and isinstance(micro, int)
        and not run.has("gradient_accumulation_steps")
    ):
        steps = replace(run.settings["batch_size"], value=max(size // max(micro, 1), 1))
        run.settings["gradient_accumulation_steps"] = steps


def _set_precision(run: Run) -> None:
    """Give the Trainer its precision (core/builders/base.py: _configure_precision_settings)."""
    half, value = run.settings.get("bf16") or run.settings.get("bfloat16"), run.value("bf16")
    if value == "auto" and not run.has("bfloat16"):
        value = not run.value("fp16")
        run.tell("bf16", AUTO, Effect.NONE)
    if half and run.is_open(half.setting.lstrip("-")):
        run.pass_on("bf16", half)
    elif value or run.value("bfloat16"):
        run.set("bf16", True, half)
    elif run.has("fp16"):
        run.pass_on("fp16", run.settings["fp16"])
    if isinstance(run.value("tf32"), bool):
        run.set("tf32", run.value("tf32"), run.settings.get("tf32"))


def _set_schedule(run: Run) -> None:
    """Give the Trainer its schedule and warm-up (_configure_warmup_and_logging, _configure_scheduler)."""
    kind = run.value("lr_scheduler") or "cosine"
    own = kind in ("one_cycle", "rex")
    run.set("lr_scheduler_type", "cosine" if own else kind, run.settings.get("lr_scheduler"))
    if own or any(
        run.value(name) is not None for name in ("cosine_min_lr_ratio", "cosine_constant_lr_ratio")
    ):
        name = "lr_scheduler" if own else "cosine_min_lr_ratio"
        run.tell(name, ALTERNATE)
    length = run.value("max_steps")
    length = length if isinstance(length, int) and length > 0 else None
    names = [name for name in ("warmup_steps", "warmup_ratio") if run.has(name)]
    statement = run.settings[names[0]] if names else None
    value = statement.value if statement else min(int(0.03 * length), MOST_WARMUP) if length else 0.03  # fmt: skip
    if names == ["warmup_ratio"] and isinstance(value, int | float):
        if length:
            value = int(value * length)
        else:
            run.tell("warmup_ratio", FLOORS)
    elif not names and not length:
        run.tell("warmup_steps", WARMUP.format(MOST_WARMUP))
    run.set("warmup_steps", 2 if value == 1 else value, statement)


def _set_fsdp(run: Run) -> None:
    """Give the Trainer FSDP and checkpoints of activations (_set_base_training_args, _configure_gradient_checkpointing)."""
    switch, config = run.settings.get("fsdp"), run.settings.get("fsdp_config")
    keys = _keys_of_fsdp(run)
    own = next((one for one in (switch, config) if one and one.value), None)
    if own:
        run.set("fsdp", own.value if own is switch else True, own)
        if (
            keys["version"] == 1
            and keys.get("offload_params")
            and "8bit" in str(run.value("optimizer"))
        ):
            run.refuse("fsdp_config", "offload_params does not go with an optimizer in 8 bits")
        arguments = {name: value for name, value in keys.items() if name not in BY_VARIABLE}
        run.set("fsdp_config", arguments, config or own)
    saves = run.settings.get("gradient_checkpointing")
    if saves and isinstance(saves.value, str):
        run.tell("gradient_checkpointing", OFFLOADS, Effect.COST)
    elif saves and saves.value is not None and not run.value("activation_offloading"):
        run.set("gradient_checkpointing", saves.value, saves)


def _keys_of_fsdp(run: Run) -> dict[str, Any]:
    """Return the keys of fsdp_config without their prefix, and with the version (utils/schemas/validation.py)."""
    config = run.value("fsdp_config")
    found = dict(config) if isinstance(config, Mapping) else {}
    keys = {str(name).removeprefix("fsdp_"): value for name, value in found.items()}
    version = run.value("fsdp_version") or keys.get("version") or 1
    return {**keys, "version": 2 if str(version) == "2" else 1}


def _find_variables(run: Run) -> Iterator[tuple[str, Any]]:
    """Yield the variables that axolotl sets for accelerate."""
    rows = dict[str, Any]()
    if run.value("fsdp") or run.value("fsdp_config"):
        keys = _keys_of_fsdp(run)
        rows = {f"FSDP_{variable}": keys[name] for name, variable in FSDP.items() if keys.get(name)}
    sizes = {name: run.value(name) for name in SPLITS} if _is_split(run) else {}
    split = {name: size for name, size in sizes.items() if isinstance(size, int) and size > 1}
    rows |= {f"PARALLELISM_CONFIG_{SPLITS[name]}_SIZE": size for name, size in split.items()}
    if split:
        rows["ACCELERATE_USE_PARALLELISM_CONFIG"] = True
    for name, value in rows.items():
        yield name, (Text(spell(value), NOWHERE),)


def _is_split(run: Run) -> bool:
    """Return whether accelerate's own mesh splits the run; for experts axolotl builds another."""
    return (run.value("expert_parallel_size") or 1) == 1


def _report_training(run: Run) -> None:
    """Add findings on what is trained, and on the rest of axolotl's own settings."""
    read = {
        "adapter",
        "bfloat16",
        "batch_size",
        "fsdp_version",
        "cosine_min_lr_ratio",
        *(SPLITS if _is_split(run) else ()),
    }
    if (kind := run.value("adapter")) in ("lora", "qlora"):
        names = (
            "lora_r",
            "lora_alpha",
            "lora_dropout",
            "lora_target_modules",
            "lora_target_linear",
        )
        values = [run.value(name) for name in names]
        where = "all linear layers" if values[4] else values[3] or "the model's usual layers"
        run.tell("adapter", ADAPTER.format(*values[:2], values[2] or 0.0, spell(where)))
        read |= {*names}
    elif kind:
        read.discard("adapter")
    if run.value("rl"):
        run.tell("rl", WITH_TRL)
        read.add("rl")
    size = run.value("context_parallel_size")
    if isinstance(size, int) and size > 1:
        run.tell("context_parallel_size", TWICE)
    run.report_own(read)
