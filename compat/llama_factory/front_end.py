"""LLaMA-Factory: its files and commands, and what its code makes of them.

The tables follow hiyouga/LLaMA-Factory, main of 2026-08: hparams (read_args, get_train_args and the classes of arguments),
launcher.py, model/adapter.py and model/model_utils/checkpointing.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from bridge.errors import ConfigError
from bridge.files import Document, Launch, Script
from bridge.stack.findings import Finding
from bridge.stack.front_end import FILES, Given, Run, Table, read_file, read_launch
from bridge.stack.rules import Effect
from bridge.stack.training_arguments import ARGUMENTS, RETIRED

RELEASE = None
COMMANDS, PROGRAMS = (
    ("llamafactory-cli", "lmf"),
    ("train.py", "train_bash.py", "cli.py", "launcher.py"),
)
MODULES = ("llamafactory.cli", "llamafactory.launcher")
TELLING = frozenset(
    {
        "finetuning_type",
        "template",
        "stage",
        "dataset_dir",
        "cutoff_len",
        "lora_target",
        "lora_rank",
        "plot_loss",
    }
)
"""Settings by which a file, or the words of a program, are LLaMA-Factory's."""
MEGATRON = ("USE_MCA", "USE_MEGATRON_BRIDGE")
PARALLEL = frozenset(
    {"tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size"}
)
"""Settings of the classes that take the place of the Trainer's then."""
SWITCHED = ("1", "true", "y")
"""What LLaMA-Factory takes for a set variable (extras/misc.py: is_env_enabled)."""
ADAPTERS = (
    "LLaMA-Factory trains {} of rank {} on {} modules (alpha {}, dropout {}), and no other weights; stagebridge reads the"
    " run as one that trains all weights"
)
FROZEN = "only a part of the weights is trained; stagebridge reads the run as one that trains all weights"
BARE = (
    "LLaMA-Factory loads and trains weights in bf16, without autocast and without weights in float32; stagebridge reads"
    " the precision from bf16 and fp16 alone"
)
CHECKPOINTS = (
    "LLaMA-Factory checkpoints activations all the same; write disable_gradient_checkpointing: true"
)
IDLE = "not given: LLaMA-Factory then trains nothing; write do_train: true"
JSON_STOPS = "LLaMA-Factory 0.9.5 stops at a JSON file, whose path it gives to json.load (hparams/parser.py: read_args); use YAML"
PACKS = "with packing, LLaMA-Factory cuts samples at cutoff_len - 1 = {}"
THROUGH_MEGATRON = "with {}, LLaMA-Factory trains through Megatron, which stagebridge does not read; it reads runs of the Trainer"


@cache
def table() -> Table:
    """Return the settings of LLaMA-Factory."""
    return Table.load(__file__)


def starts(data: Any) -> bool:
    """Return whether parsed data is arguments of LLaMA-Factory, or a script that starts a training by it."""
    if isinstance(data, Script):
        return any(map(_is_launch, data.launches))
    return isinstance(data, Mapping) and _is_own({str(key) for key in data})


def _is_own(names: set[str]) -> bool:
    trained = names & (ARGUMENTS.keys() | RETIRED.keys())
    return len(names & TELLING) >= 2 and bool(trained) and "base_model" not in names


def _first(launch: Launch) -> int:
    """Return the index of the first word that is an argument of a training."""
    return int(launch.texts[:1] == ["train"])


def _is_launch(launch: Launch) -> bool:
    """Return whether a launch starts a training by LLaMA-Factory."""
    name, texts = Path(launch.program).name, launch.texts
    if name in COMMANDS or launch.program in MODULES:
        return texts[:1] == ["train"]
    if name not in PROGRAMS:
        return False
    flags = {text.partition("=")[0].removeprefix("--") for text in texts if text.startswith("--")}
    return _is_own(flags) or (
        name != "cli.py" and bool(texts) and texts[0].endswith(FILES) and "src/train" in launch.program
    )  # fmt: skip


def start(
    document: Document, world_size: int | None, lenient: bool = False
) -> tuple[Document, tuple[Finding, ...]]:
    """Return a run of LLaMA-Factory on `world_size` ranks as the launch of the Trainer that it comes to, and findings on
    what that launch does not say. Raises `BridgeError` for settings with which LLaMA-Factory stops; if `lenient`, those
    that it does not have are findings, as a fork may have them.
    """
    if isinstance(document.data, Script):
        launch = document.data.launch(_is_launch, "llamafactory-cli train")
        given = read_launch(document, launch, _first(launch))
    else:
        given = Given(read_file(document))
    run = Run(table(), document, given, world_size)
    run.world = world_size or _count_ranks(run)
    allows = run.variables.get("ALLOW_EXTRA_ARGS", "").lower() in SWITCHED
    if PARALLEL & run.settings.keys():
        name = min(PARALLEL & run.settings.keys())
        run.refuse(name, THROUGH_MEGATRON.format(" or ".join(MEGATRON)))
        ConfigError.raise_if(run.problems)
    run.check_names(not (lenient or allows))
    run.check_refusals()
    for variable in MEGATRON:
        if run.variables.get(variable, "").lower() in SWITCHED:
            run.refuse(variable, THROUGH_MEGATRON.format(variable))
    _report_training(run)
    run.pass_arguments()
    for name in ("output_dir", "per_device_train_batch_size"):
        if not run.has(name):
            run.set(name, ARGUMENTS[name] or "trainer_output")
    checkpoints = not run.value("disable_gradient_checkpointing")
    if checkpoints and run.settings.get("gradient_checkpointing") is None:
        run.set("gradient_checkpointing", True)
    elif checkpoints and run.value("gradient_checkpointing") is False:
        run.tell("gradient_checkpointing", CHECKPOINTS, Effect.COST)
    by_command = (
        given.launch is None
        or Path(given.launch.program).name in COMMANDS
        or given.launch.program in MODULES
    )
    return run.start("llamafactory-cli", ("torchrun",) if by_command else ())


def _count_ranks(run: Run) -> int | None:
    """Return the ranks that the command starts: NPROC_PER_NODE on each of NNODES (launcher.py)."""
    node, nodes = run.variables.get("NPROC_PER_NODE", ""), run.variables.get("NNODES", "1")
    return int(node) * int(nodes) if node.isdigit() and nodes.isdigit() else None


def _report_training(run: Run) -> None:
    """Add findings on which weights are trained, in which precision, and on the rest of LLaMA-Factory's own settings."""
    kind = run.value("finetuning_type")
    read = {"finetuning_type", "pure_bf16"}
    if kind in ("lora", "oft"):
        read |= (
            {f"{kind}_rank", f"{kind}_target", "lora_alpha", "lora_dropout"}
            if kind == "lora"
            else set()
        )
        rank, targets = run.value(f"{kind}_rank"), run.value(f"{kind}_target")
        alpha = run.value("lora_alpha") or (rank * 2 if isinstance(rank, int) else None)
        shown = (kind, rank, targets, alpha, run.value("lora_dropout"))
        default = "" if "finetuning_type" in run.settings else "not given: "
        run.tell("finetuning_type", default + ADAPTERS.format(*shown))
    elif kind == "freeze":
        run.tell("finetuning_type", FROZEN)
    if run.value("pure_bf16"):
        run.tell("pure_bf16", BARE)
    if not run.value("do_train") and not run.is_open("do_train"):
        run.tell("do_train", IDLE)
    packing = run.value("packing")
    if packing or run.value("neat_packing") or (packing is None and run.value("stage") == "pt"):
        length = run.value("cutoff_len")
        run.tell("packing", PACKS.format(length - 1 if isinstance(length, int) else "?"))
        read.add("packing")
    launch = run.given.launch
    words = launch.texts[_first(launch) :] if launch else [run.document.name]
    if words and words[0].endswith(".json"):
        run.findings.append(Finding("LLaMA-Factory", JSON_STOPS, Effect.NUMBERS, surprising=True))
    run.report_own(read)
