"""ms-swift: its commands and files, and what its code makes of them.

The tables follow modelscope/ms-swift, main of 2026-08: cli/main.py, arguments (sft_args.py, base_args/model_args.py),
trainers/arguments.py, and the configs in config/, which are in presets.json.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from bridge.files import Document, Launch, Script
from bridge.stack.findings import Finding
from bridge.stack.front_end import Given, Run, Table, read_file, read_launch
from bridge.stack.rules import Effect
from bridge.stack.training_arguments import ARGUMENTS

RELEASE = None
METHODS = ("sft", "pt", "rlhf")
TELLING = frozenset(
    {"tuner_type", "train_type", "split_dataset_ratio", "dataset_num_proc", "rlhf_type", "padding_free",
     "target_modules", "torch_dtype", "model_author", "max_length"}
)  # fmt: skip
"""Settings of which a file of ms-swift has one at least next to a model and a dataset."""
HALVES = {"bfloat16": ("bf16", "fp16"), "float16": ("fp16", "bf16"), "float32": ("fp16", "bf16")}
"""The precision that is switched on and the one that is off for each torch_dtype (model_args.py: _init_mixed_precision)."""
SINGLE = "ms-swift computes in fp16 under autocast then, with a loss scale; write --fp16 false for float32"
OPEN_DTYPE = "not given: ms-swift takes it from the model's config; read as bfloat16"
ADAPTERS = (
    "ms-swift trains {} of rank {}, alpha {} and dropout {} on {}, and no other weights; stagebridge reads the run as one"
    " that trains all weights"
)
OTHERS = "ms-swift trains a part of the weights, or weights of its own, then; stagebridge reads the run as one that trains all"
FILLS = "not given: ms-swift takes as many as make {} samples of a step: {}"
SAMPLES = 16
WITHOUT_WORLD = "not given: ms-swift takes as many as make 16 samples of a step, which needs --world-size; read as on one rank"
WITH_TRL = "the run has a class of trl, with a loss that stagebridge does not read"


@cache
def table() -> Table:
    """Return the settings of ms-swift."""
    return Table.load(__file__)


@cache
def presets() -> Mapping[str, Any]:
    """Return the configs of DeepSpeed and of FSDP that ms-swift has by a name."""
    found: Mapping[str, Any] = json.loads(Path(__file__).with_name("presets.json").read_text())
    return found


def starts(data: Any) -> bool:
    """Return whether parsed data is a file of ms-swift, or a script that starts a training by it."""
    if isinstance(data, Script):
        return any(map(_is_launch, data.launches))
    return (
        isinstance(data, Mapping)
        and {"model", "dataset"} <= data.keys()
        and bool(TELLING & data.keys())
    )


def _is_launch(launch: Launch) -> bool:
    path = launch.program.replace(".", "/").removesuffix("/py")
    if Path(launch.program).name == "swift":
        return launch.texts[:1] in [[name] for name in METHODS]
    return path.endswith(tuple(f"swift/cli/{name}" for name in METHODS))


def start(
    document: Document, world_size: int | None, lenient: bool = False
) -> tuple[Document, tuple[Finding, ...]]:
    """Return a run of ms-swift on `world_size` ranks as the launch of the Trainer that it comes to, and findings on what that
    launch does not say. Raises `BridgeError` for settings with which ms-swift stops; if `lenient`, those that it does not
    have are findings.
    """
    method = ""
    launcher: tuple[str, ...] = ("torchrun",)
    if isinstance(document.data, Script):
        launch = document.data.launch(_is_launch, "swift sft, pt or rlhf")
        by_command = Path(launch.program).name == "swift"
        method = (
            launch.texts[0]
            if by_command
            else Path(launch.program.replace(".py", "")).name.rpartition(".")[2]
        )
        given = read_launch(document, launch, int(by_command))
        launcher = ("torchrun",) if by_command else ()
    else:
        given = Given(read_file(document))
    variables = given.settings.get("ENV")
    given = replace(given, settings={name: one for name, one in given.settings.items() if name != "ENV"})  # fmt: skip
    run = Run(table(), document, given, world_size)
    if variables and isinstance(variables.value, Mapping):
        run.variables = {**{str(name): str(text) for name, text in variables.value.items()}, **run.variables}  # fmt: skip
    run.world = world_size or _count_ranks(run)
    if "train_type" in run.settings:  # before 4.2
        run.settings.setdefault("tuner_type", run.settings.pop("train_type"))
    run.check_names(not (lenient or run.value("ignore_args_error")))
    run.check_refusals()
    share = run.value("warmup_ratio")
    if isinstance(share, int | float) and share >= 1:
        run.refuse("warmup_ratio", f"found {share}; expected a share below 1, or warmup_steps")
    _set_precision(run)
    _set_files(run)
    _report_training(run, method)
    run.pass_arguments(("bf16", "fp16"))
    _set_defaults(run)
    return run.start("swift", launcher)


def _count_ranks(run: Run) -> int | None:
    node, nodes = run.variables.get("NPROC_PER_NODE", ""), run.variables.get("NNODES", "1")
    return int(node) * int(nodes) if node.isdigit() and nodes.isdigit() else None


def _set_precision(run: Run) -> None:
    """Give the Trainer its precision, which follows from torch_dtype."""
    kind = run.value("torch_dtype")
    if kind is None:
        run.tell("torch_dtype", OPEN_DTYPE)
    on, off = HALVES.get(str(kind), HALVES["bfloat16"])
    if kind == "float32" and not run.has("fp16"):
        run.tell("torch_dtype", SINGLE)
    for name in (on, off):
        if run.has(name):
            run.pass_on(name, run.settings[name])
        else:
            run.set(name, name == on, run.settings.get("torch_dtype"))


def _set_files(run: Run) -> None:
    """Put the content of a named config in place of its name (sft_args.py: _init_deepspeed, _init_fsdp)."""
    zero = run.settings.get("deepspeed")
    content = presets()["deepspeed"].get(str(zero.value)) if zero else None
    if zero and content is not None:
        more = {"zero_hpz_partition_size": run.value("zero_hpz_partition_size")}
        section = {
            **content["zero_optimization"],
            **{name: size for name, size in more.items() if size},
        }
        run.settings["deepspeed"] = replace(zero, value={**content, "zero_optimization": section})
    shards = run.settings.get("fsdp")
    config = presets()["fsdp"].get(str(shards.value)) if shards else None
    if shards and config is not None:
        run.settings["fsdp"] = replace(shards, value=config["fsdp"])
        run.settings["fsdp_config"] = replace(shards, value=config["fsdp_config"])
        run.settings["gradient_checkpointing"] = replace(shards, value=False)


def _set_defaults(run: Run) -> None:
    """Give the Trainer what ms-swift's classes have as other defaults, and what follows from the run."""
    for name in table().passed:
        usual = table().defaults[name]
        if name in ARGUMENTS and usual not in (None, ARGUMENTS[name]) and not run.has(name):
            run.set(name, usual)
    if not run.has("learning_rate"):
        run.set("learning_rate", 1e-5 if run.value("tuner_type") == "full" else 1e-4)
    if not run.has("output_dir"):
        run.set("output_dir", "output")
    micro = run.value("per_device_train_batch_size")
    if not run.has("gradient_accumulation_steps") and isinstance(micro, int) and micro > 0:
        steps = max(1, math.ceil(SAMPLES / micro / (run.world or 1)))
        message = FILLS.format(SAMPLES, steps) if run.world else WITHOUT_WORLD
        run.tell(
            "gradient_accumulation_steps", message, Effect.NONE if run.world else Effect.NUMBERS
        )
        run.set("gradient_accumulation_steps", steps)


def _report_training(run: Run, method: str) -> None:
    """Add findings on what is trained, and on the rest of ms-swift's own settings."""
    kind, read = (
        run.value("tuner_type"),
        {"tuner_type", "torch_dtype", "max_epochs", "zero_hpz_partition_size"},
    )
    if kind == "lora":
        names = ("lora_rank", "lora_alpha", "lora_dropout")
        modules = run.value("target_modules") or "all-linear"
        run.tell("tuner_type", ADAPTERS.format(kind, *map(run.value, names), modules))
        read |= {*names, "target_modules"}
    elif kind != "full":
        run.tell("tuner_type", OTHERS)
    if run.has("max_epochs"):
        run.settings["num_train_epochs"] = run.settings["max_epochs"]
    if method == "rlhf" or run.has("rlhf_type"):
        run.tell("rlhf_type", WITH_TRL)
        read.add("rlhf_type")
    run.report_own(read)
