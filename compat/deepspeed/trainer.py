"""Hugging Face's Trainer: computes the values that TrainingArguments fill into a DeepSpeed file,
and reports explicit values that contradict the arguments.

The module follows `trainer_config_process`, `trainer_config_finalize` and `fill_match` of
HfTrainerDeepSpeedConfig (transformers/integrations/deepspeed.py),
`TrainingArguments.get_warmup_steps`, and `Trainer.create_scheduler`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from packaging.version import Version

from bridge.errors import ConfigError, nearest
from bridge.files.shown import show_value
from bridge.stack.rules import Effect
from bridge.stack.sources import Placed
from bridge.stack.training_arguments import (
    ARGUMENTS,
    CHANGED,
    DATA,
    QUIET,
    RETIRED,
    SHOWN,
    SINCE,
    describe_lack,
    find_defaults,
    find_last_release,
    find_negated,
)

DEFAULTS: Mapping[str, Any] = {
    **find_defaults(
        *("per_device_train_batch_size", "gradient_accumulation_steps", "max_grad_norm", "learning_rate"),
        *("adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay", "fp16", "fp16_full_eval", "bf16"),
        *("bf16_full_eval", "save_on_each_node", "auto_find_batch_size", "warmup_steps", "max_steps"),
        *("lr_scheduler_type", "lr_scheduler_kwargs", "optim", "save_only_model", "load_best_model_at_end"),
        *("eval_strategy", "accelerator_config", "dataloader_drop_last", "fsdp"),
    ),
    "warmup_ratio": 0.0,
}  # fmt: skip
"""The TrainingArguments that affect a DeepSpeed file, each with the Trainer's default."""

LENGTH = frozenset({"max_steps", "num_train_epochs"})
SETS = {"max_steps": "code.steps", "num_train_epochs": "code.epochs", "seed": "code.seed"}
"""Of arguments that a file has no key for, the one of the code part."""
OPTIMIZER = frozenset(
    {"optim", "learning_rate", "adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay"}
)
CHANGED_OPTIMIZER = (
    "not given: Hugging Face's Trainer then builds its own optimizer, and the program changes {} after the call;"
    " the optimizer's fields in the plan stay open"
)
COURSE: Mapping[str, Any] = find_defaults("num_train_epochs", "seed")
"""TrainingArguments that no DeepSpeed file has, and that the code part holds."""

TRAINED: Mapping[str, Any] = {
    "label_smoothing_factor": 0.0,
    "neftune_noise_alpha": 0.0,
    "optim_args": "",
    "optim_target_modules": None,
    "data_seed": -1,
    "group_by_length": False,
    "train_sampling_strategy": "random",
    "average_tokens_across_devices": True,
    "gradient_checkpointing": False,
    "torch_compile": False,
    "tf32": None,
    "use_liger_kernel": False,
}
"""TrainingArguments that steps depend on and that no plan holds, each with the value with which it does
nothing: `code.trainer` has those of other values.
"""
PER_TOKEN, OVER_RANKS = Version("4.46.0"), Version(CHANGED["average_tokens_across_devices"][0])
"""The releases of transformers since which the loss of a step is a mean over its tokens (trainer.py:
num_items_in_batch), and since which these are the tokens of all ranks where nothing is said
(training_args.py: average_tokens_across_devices).
"""

NAMES = frozenset({*ARGUMENTS, *RETIRED})
"""The names of all TrainingArguments (training_args.py in transformers 4 and 5)."""

SPELLINGS: Mapping[str, str] = {
    f"--{spelling}": name for name in sorted(NAMES) for spelling in (name, name.replace("_", "-"))
}
"""All flags of TrainingArguments, each with the argument: HfArgumentParser takes dashes, too."""


def name_argument(flag: str) -> str | None:
    """Return the TrainingArgument that a flag sets; the start of one flag alone is enough, as for
    argparse. None if it sets none.
    """
    if flag in SPELLINGS:
        return SPELLINGS[flag]
    if name := find_negated(flag):
        return name
    flags = [spelling for spelling in SPELLINGS if spelling.startswith(flag)]
    return SPELLINGS[flags[0]] if len(flags) == 1 else None


DATED = {**SINCE, **RETIRED}
"""TrainingArguments that some releases of transformers lack."""
NO_STEP = "the run ends before its first step; write -1, with which the epochs decide, or a number of steps"
OWN_NAME = "no release of transformers has this argument, and the parser stops at it unless the program has one of its own"
DUMP = 60
"""A file with so many TrainingArguments was written by a release of transformers that has all of them."""
PACKAGES: tuple[tuple[str, str], ...] = (
    (r"(paged_)?(adamw|ademamix|lion)_(bnb_)?(8|32)bit|(paged_)?ademamix|rmsprop_bnb.*", "bitsandbytes"),
    (r"adamw_torch_[48]bit", "torchao"),
    (r"galore_.*", "galore-torch"),
    (r"apollo_.*", "apollo-torch"),
    (r"(ada)?lomo", "lomo-optim"),
    (r"grokadamw", "grokadamw"),
    (r"schedule_free_.*", "schedulefree"),
    (r"stable_adamw", "torch-optimi"),
    (r"adamw_anyprecision", "torchdistx"),
)  # fmt: skip
"""The package that the Trainer needs for each optimizer beyond torch's, by a pattern of names
(transformers/trainer_optimizer.py).
"""

SCHEDULES: Mapping[str, str] = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
}
"""The plan's name for each schedule of the Trainer (transformers/optimization.py). Every warmup
starts at 0, and every decay ends at 0.
"""
WITHOUT_WARMUP = "constant"
"""The Trainer's schedule without warmup: it ignores all arguments for warmup (optimization.py:
get_scheduler).
"""

KINDS = frozenset(
    {
        *SCHEDULES,
        "cosine_with_restarts",
        "polynomial",
        "inverse_sqrt",
        "reduce_lr_on_plateau",
        "cosine_with_min_lr",
        "cosine_warmup_with_min_lr",
        "warmup_stable_decay",
        "greedy",
    }
)
"""The names of all schedules of the Trainer (trainer_utils.py: SchedulerType)."""
ADAMW = frozenset(
    {"adamw_torch", "adamw_torch_fused", "adamw_torch_npu_fused", "adamw_apex_fused", "adamw_hf"}
)
"""Values of the argument `optim` that mean AdamW with default arguments
(Trainer.get_optimizer_cls_and_kwargs). The fused AdamW, which recent releases use by default,
differs only in rounding.
"""
OWN_OPTIMIZER = (
    "not given: Hugging Face's Trainer then builds AdamW from its own arguments, without decay"
    " of biases and norms; stagebridge reads this optimizer as DeepSpeed's AdamW"
)
SWAPPED = frozenset({"sgd", "rmsprop"})
"""Values of `optim` beside AdamW in whose place accelerate puts DeepSpeed's Adam for the CPU."""
SWAPPED_ADAM: Mapping[str, Any] = {
    "optimizer.type": "Adam",
    "optimizer.params.adam_w_mode": False,
    "optimizer.params.betas": (0.9, 0.999),
    "optimizer.params.eps": 1e-8,
}
"""That Adam, which keeps rate and decay alone (accelerate/utils/deepspeed.py: map_pytorch_optim_to_deepspeed)."""
SWAP = (
    "not given: Hugging Face's Trainer builds optim={}, and accelerate puts DeepSpeedCPUAdam without decoupled decay in its"
    " place, as the file offloads its state; write an optimizer block, or --optim adamw_torch"
)
OTHER_OPTIMIZER = (
    "not given: Hugging Face's Trainer then builds optim={}, which stagebridge cannot translate;"
    " the optimizer's fields in the plan stay open"
)

MICRO, STEPS, TOTAL = (
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "train_batch_size",
)
FILE = "deepspeed"
"""The argument that names the DeepSpeed file, or is its content."""
NODE_LOCAL = "checkpoint.use_node_local_storage"


@dataclass(frozen=True)
class Filling:
    """The changes that the Trainer makes to a DeepSpeed file. `values` replace "auto" by key, and
    `facts` are for the rules that replace all other "auto". `demands` has, by key, the only
    explicit value that the Trainer accepts, and the names of the arguments that set it. `sets`
    replaces explicit values. `schedule` is the schedule that the Trainer builds, by names of the
    code part; `unscheduled` says why this schedule is not known. `optimizer` is the optimizer that
    the Trainer builds, by key, and `said_of_it` is the message about this optimizer; `is_open`: the program changes it.
    """

    values: Mapping[str, Any]
    facts: Mapping[str, Any]
    demands: Mapping[str, tuple[Any, str]]
    sets: Mapping[str, Any] = field(default_factory=dict)
    schedule: Mapping[str, Any] = field(default_factory=dict)
    unscheduled: str = ""
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    said_of_it: str = ""
    is_open: bool = False

    def refusals(self, settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """Yield each key whose explicit value differs from the TrainingArguments, with a message.
        The Trainer refuses such a file.
        """
        for path, (demand, names) in self.demands.items():
            value = settings.get(path)
            if value not in (None, "auto") and value != demand:
                yield (
                    path,
                    f"found {show_value(value)}, but the TrainingArguments ({names}) give"
                    f" {show_value(demand)}, and the Trainer refuses two values; use the same value in"
                    ' both places, or write "auto"',
                )

    def swap_optimizer(self, run: Case) -> tuple[Mapping[str, Any], str]:
        """Return the optimizer of a run, by key, and the message about it: DeepSpeed's for the CPU in place of the
        Trainer's, where accelerate replaces that by it.
        """
        if self.is_open or not run.offloads or run.text("optim") not in SWAPPED:
            return self.optimizer, self.said_of_it
        rate, decay = (f"optimizer.params.{name}" for name in ("lr", "weight_decay"))
        given = {path: self.values[path] for path in (rate, decay) if path in self.values}
        own = {**SWAPPED_ADAM, **given} if len(given) == 2 else {}
        return own, SWAP.format(run.text("optim"))


AXOLOTL = {"micro_batch_size": "per_device_train_batch_size", "lr_scheduler": "lr_scheduler_type", "optimizer": "optim",
           "num_epochs": "num_train_epochs"}  # fmt: skip
"""The TrainingArgument of each name that axolotl's recipes give another name."""


def rename_recipe(said: Placed) -> Placed:
    """Return settings of an axolotl recipe by the names of TrainingArguments; others as they are."""
    if "micro_batch_size" not in said:
        return said
    names = {name: AXOLOTL.get(name, name) for name in said}
    places = {names[name]: place for name, place in said.places.items()}
    # A recipe may leave the precision to the device.
    values = {names[name]: value for name, value in said.items() if value != "auto"}
    return Placed(values, places, said.lost)


def arguments(values: Mapping[str, Any], whole: bool) -> dict[str, Any]:
    """Return the arguments in `values` that affect a DeepSpeed file, without the other
    TrainingArguments. If `values` is a `whole` dump, it may also have arguments of a class of the
    user. Raises `ConfigError` with all problems: wrong values, and names of no argument.
    """
    usual = {**DEFAULTS, **COURSE, **TRAINED}
    arguments_of_run = {
        name: value
        for name, value in values.items()
        if (name in usual or name in SHOWN or name == FILE) and value is not None
    }
    steps = arguments_of_run.get("max_steps")
    if len(values) >= DUMP:  # nobody asked for its defaults
        arguments_of_run = {
            name: value
            for name, value in arguments_of_run.items()
            if name in usual or value != SHOWN.get(name)
        }
    else:
        arguments_of_run |= {name: values[name] for name in DATED if values.get(name) is not None}
    if (
        len(values) >= DUMP
        and isinstance(steps, int)
        and steps > 0
        and arguments_of_run.get("num_train_epochs") == COURSE["num_train_epochs"]
    ):
        # A dump has all arguments: nobody asked for the default number of epochs next to one of steps.
        del arguments_of_run["num_train_epochs"]
    strange = [] if whole else [name for name in values if name not in NAMES]
    problems = [
        f"--auto-from: {name}: found no TrainingArgument of this name{nearest(name, NAMES)}"
        for name in strange
    ]
    if values and not strange and DEFAULTS.keys().isdisjoint(values):
        problems.append(
            "--auto-from: found no TrainingArguments that fill in a DeepSpeed file, expected for"
            f" example {', '.join(list(DEFAULTS)[:4])}"
        )
    problems += [
        f"--auto-from: {name}: {flaw}"
        for name, value in arguments_of_run.items()
        if (flaw := misfit(value, usual.get(name)))
    ]
    ConfigError.raise_if(problems)
    # No defaults yet: they would win over those of a launch script.
    return arguments_of_run


@dataclass(frozen=True, slots=True)
class Case:
    """A run of the Trainer, as `REFUSALS` see it: its arguments with defaults, and the file. `given`
    has the file's values by key, and `blocks` its sections. `world` is the number of ranks, if known.
    """

    arguments: Mapping[str, Any]
    given: Mapping[str, Any]
    blocks: frozenset[str]
    world: int | None

    def __getitem__(self, name: str) -> Any:
        return self.arguments.get(name)

    def text(self, name: str) -> str:
        """The name that an argument has; a dump may hold the enum's member."""
        return str(self[name]).rpartition(".")[2].lower()

    def options(self, name: str) -> Mapping[str, Any]:
        """The mapping that an argument has."""
        return read_mapping(self[name])

    @property
    def stage(self) -> Any:
        """The ZeRO stage of the file."""
        return self.given.get("zero_optimization.stage") or 0

    @property
    def lets_offload(self) -> bool:
        """Whether the Trainer builds the optimizer, and DeepSpeed's for the CPU may have to replace it."""
        forces = self.given.get("zero_force_ds_cpu_optimizer", True)
        return bool(forces) and "optimizer" not in self.blocks

    @property
    def offloads(self) -> bool:
        """Whether accelerate replaces the Trainer's optimizer by DeepSpeed's for the CPU."""
        device = self.given.get("zero_optimization.offload_optimizer.device") or "none"
        return self.lets_offload and str(device) != "none"

    @property
    def builds_schedule(self) -> bool:
        """Whether the Trainer builds the schedule."""
        return "scheduler" not in self.blocks


NO_CASE = Case({}, {}, frozenset(), None)


def read_mapping(value: Any) -> Mapping[str, Any]:
    """Return the mapping that an argument has; on a command line it is written as JSON."""
    try:
        mapping = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return {}
    return mapping if isinstance(mapping, Mapping) else {}


def read_num_steps(arguments: Mapping[str, Any]) -> Any:
    """Return the number of micro-batches in a step that accelerator_config gives the Trainer; None if it gives none."""
    config = read_mapping(arguments.get("accelerator_config"))
    return (config.get("gradient_accumulation_kwargs") or {}).get("num_steps")


def _lacks_arguments(kind: str, *names: str) -> Callable[[Case], bool]:
    """Return whether the Trainer builds the schedule `kind` without any of the arguments `names`."""
    return lambda run: (
        run.builds_schedule
        and run.text("lr_scheduler_type") == kind
        and not any(run.options("lr_scheduler_kwargs").get(name) is not None for name in names)
    )


FIELDS = "ACCELERATE_CONFIG_DS_FIELDS"
"""The variable in which accelerate's launcher tells its plugin which settings its config file has."""
OWN_FIELDS = frozenset(
    {
        "gradient_accumulation_steps",
        "gradient_clipping",
        "zero_stage",
        "offload_optimizer_device",
        "offload_param_device",
        "offload_param_nvme_path",
        "offload_optimizer_nvme_path",
        "zero3_save_16bit_model",
        "mixed_precision",
    }
)
"""Settings of accelerate's config file that it refuses beside a DeepSpeed file."""
NEEDS_ZERO = (
    "not given, and accelerate refuses a file without this section (utils/dataclasses.py:"
    ' DeepSpeedPlugin); write "zero_optimization": {"stage": 0} for no sharding'
)
RATIO = "needs min_lr or min_lr_rate; write --lr_scheduler_kwargs '{\"min_lr_rate\": 0.1}'"
REFUSALS: tuple[tuple[str, Callable[[Case], object], str, str], ...] = (
    (
        "fp16",
        lambda run: run["fp16"] and run["bf16"],
        "found fp16 and bf16, and the Trainer refuses both at once; keep one of them",
        "training_args.py: _validate_args",
    ),
    (
        "fp16_full_eval",
        lambda run: run["fp16_full_eval"] and run["bf16_full_eval"],
        "found fp16_full_eval and bf16_full_eval, and the Trainer refuses both at once; keep one of them",
        "training_args.py: _validate_args",
    ),
    *(
        (
            name,
            lambda run, name=name, other=other: run[name]
            and run[f"{other}_full_eval"]
            and run.given.get(f"{other}.enabled") in ("auto", True),
            f"{other}_full_eval switches {other}.enabled on in the file, and accelerate refuses that with {name}; drop"
            f" the section {other}, or {other}_full_eval",
            "accelerate/utils/dataclasses.py: DeepSpeedPlugin.set_mixed_precision",
        )
        for name, other in (("fp16", "bf16"), ("bf16", "fp16"))
    ),
    (
        "warmup_steps",
        lambda run: run["warmup_steps"] < 0,
        "found a number below 0; write 0 for no warmup",
        "training_args.py: _validate_args",
    ),
    (
        "lr_scheduler_type",
        lambda run: run.text("lr_scheduler_type") not in KINDS,
        f"the Trainer has no schedule of this name; use one of {', '.join(sorted(KINDS))}",
        "trainer_utils.py: SchedulerType",
    ),
    (
        "lr_scheduler_type",
        lambda run: run.text("lr_scheduler_type") in ("reduce_lr_on_plateau", "greedy")
        and str(run["eval_strategy"]).lower() == "no",
        "this schedule follows an evaluation; write --eval_strategy steps",
        "training_args.py: _validate_args",
    ),
    ("lr_scheduler_type", _lacks_arguments("cosine_with_min_lr", "min_lr", "min_lr_rate"), RATIO, "optimization.py"),
    ("lr_scheduler_type", _lacks_arguments("cosine_warmup_with_min_lr", "min_lr", "min_lr_rate"), RATIO, "optimization.py"),
    (
        "lr_scheduler_type",
        _lacks_arguments("warmup_stable_decay", "num_decay_steps"),
        'needs num_decay_steps; write --lr_scheduler_kwargs \'{"num_decay_steps": 100}\'',
        "optimization.py: get_wsd_schedule",
    ),
    (
        "lr_scheduler_type",
        lambda run: run.builds_schedule
        and run.text("lr_scheduler_type") == "polynomial"
        and (run.stage if "optimizer" not in run.blocks else run.given.get("optimizer.type") == "Muon"),
        "polynomial reads the optimizer's defaults, which ZeRO's optimizer and Muon do not have; use another schedule",
        "optimization.py: get_polynomial_decay_schedule_with_warmup",
    ),
    (
        "optim",
        lambda run: run.text("optim") == "adagrad" and run.stage >= 2 and "optimizer" not in run.blocks,
        "Adagrad of the Trainer fails in its first step at ZeRO 2 and 3; use an optimizer block in the file",
        "deepspeed/runtime/zero: the state of Adagrad is made before ZeRO replaces its groups",
    ),
    (
        "optim",
        lambda run: run.text("optim") == "adagrad" and run.offloads,
        "accelerate fails to build DeepSpeed's Adagrad for the CPU from it; use an optimizer block in the file",
        "accelerate/utils/deepspeed.py: map_pytorch_optim_to_deepspeed passes adamw_mode",
    ),
    (
        "optim",
        lambda run: run.text("optim") == "adafactor" and run.offloads,
        "accelerate gives DeepSpeedCPUAdam the groups of Adafactor, whose eps is a pair, and the first step fails; use"
        " an optimizer block in the file, or no offload",
        "accelerate/utils/deepspeed.py: map_pytorch_optim_to_deepspeed keeps the groups",
    ),
    (
        "optim",
        lambda run: run.given.get("zero_optimization.cpu_offload") is True and run.lets_offload,
        "accelerate does not see the old key cpu_offload, and DeepSpeed refuses the Trainer's optimizer with it;"
        " write offload_optimizer, or an optimizer block",
        "deepspeed/runtime/engine.py: _do_optimizer_sanity_check",
    ),
    (
        "fsdp",
        lambda run: run["fsdp"],
        "found FSDP and DeepSpeed, and the Trainer refuses both at once; keep one of them",
        "trainer.py: Trainer.__init__",
    ),
    (
        "save_only_model",
        lambda run: run["save_only_model"] and run["load_best_model_at_end"],
        "the Trainer refuses this argument with load_best_model_at_end under DeepSpeed; drop one of them",
        "trainer.py: create_accelerator_and_postprocess",
    ),
    (
        "auto_find_batch_size",
        lambda run: run["auto_find_batch_size"] and run.stage == 3,
        "the Trainer refuses this argument at ZeRO 3; drop it, or use ZeRO 2",
        "trainer.py: create_accelerator_and_postprocess",
    ),
    (
        "accelerator_config",
        lambda run: read_num_steps(run.arguments) is not None and run["gradient_accumulation_steps"] > 1,
        "found num_steps beside gradient_accumulation_steps, and the Trainer refuses both; drop num_steps",
        "trainer.py: create_accelerator_and_postprocess",
    ),
    (
        FIELDS,
        lambda run: not OWN_FIELDS.isdisjoint(str(run[FIELDS]).split(",")),
        "found settings that accelerate refuses beside a DeepSpeed file; keep them in the DeepSpeed file",
        "accelerate/utils/dataclasses.py: DeepSpeedPlugin._deepspeed_config_checks",
    ),
    (
        "accelerator_config",
        lambda run: run.options("accelerator_config").get("split_batches") is True
        and run["per_device_train_batch_size"] % (run.world or 1),
        "found split_batches, and the ranks do not divide per_device_train_batch_size; use a multiple of them",
        "accelerate/data_loader.py: prepare_data_loader",
    ),
)  # fmt: skip
"""What stops a run of the Trainer under DeepSpeed: the argument, when, what to say and do, and the place in
transformers that refuses it.
"""


def choose_release(values: Mapping[str, Any], version: Any) -> str | None:
    """Return the release of transformers by which a run is read: `version` if that is known, else the last one that
    has all retired arguments of the run, or None for the newest.
    """
    return find_last_release(values) if version is None else str(version)


def find_dated(values: Mapping[str, Any], version: Any) -> Iterator[tuple[str, str, Effect]]:
    """Yield each argument that the release `version` of transformers lacks, and each that it gives another
    default than newer ones, with a message and the effect. If no release is known, arguments that are retired
    show an older one, and other releases stop at them.
    """
    release = None if version is None else Version(str(version))
    older = choose_release(values, None)
    chosen = release or Version(older or DATA["newest"])
    choice = ", or use another release"
    if release is None:
        choice = (
            f"; the run is read as transformers {older}; say yours with --auto transformers=RELEASE"
        )
    for name in sorted(values):
        gone, came = RETIRED.get(name), SINCE.get(name)
        lacks = f"since {gone}" if gone and (release is None or release >= Version(gone)) else ""
        if window := lacks or (f"before {came}" if came and chosen < Version(came) else ""):
            yield (
                name,
                f"{describe_lack(name, window)}{choice}",
                Effect.STOPS if release else Effect.NONE if name in QUIET else Effect.NUMBERS,
            )
    for name, usual in {**DEFAULTS, **COURSE, **TRAINED}.items():
        first, before = CHANGED.get(name, ("0", usual))
        if (
            release
            and Version(SINCE.get(name, "0")) <= release < Version(first)
            and (before or usual)
            and before != usual
            and name not in values
        ):
            yield (
                name,
                f"not given: {before} before transformers {first}, {usual} since; set the value you want",
                Effect.NUMBERS,
            )


def find_package(optim: str) -> str:
    """Return the package that the Trainer needs for an optimizer; empty for none."""
    own = optim.rpartition(".")[2].lower()
    return next((name for pattern, name in PACKAGES if re.fullmatch(pattern, own)), "")


def find_refusals(run: Case) -> Iterator[tuple[str, str]]:
    """Yield the argument and the message of each refusal of a run."""
    yield from ((name, message) for name, holds, message, _ in REFUSALS if holds(run))


SPELLED: Mapping[str, str] = {
    "micro_batch": "per_device_train_batch_size",
    "accumulation": "gradient_accumulation_steps",
    "clip": "max_grad_norm",
    "lr": "learning_rate",
    "eps": "adam_epsilon",
    MICRO: "per_device_train_batch_size",
    "gradient_clipping": "max_grad_norm",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.eps": "adam_epsilon",
    "optimizer.params.weight_decay": "weight_decay",
    "optimizer.params.betas": "betas",
}
"""A table from facts and keys of --auto to TrainingArguments, for those whose two names differ."""


def arguments_of_facts(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the TrainingArguments that the facts of --auto set. A fact given with --auto takes
    precedence over the same argument in a dump or a script. A key whose value has the wrong type
    is left out, because the problem is reported where the key is set.
    """
    arguments_by_name = {SPELLED.get(name, name): value for name, value in values.items()}
    betas = arguments_by_name.get("betas")
    if isinstance(betas, list | tuple) and len(betas) == 2:
        arguments_by_name |= {"adam_beta1": betas[0], "adam_beta2": betas[1]}
    if "mixed_precision" in arguments_by_name:
        # With fp8, accelerate lets DeepSpeed compute in bf16.
        own = (
            "bf16"
            if arguments_by_name["mixed_precision"] == "fp8"
            else arguments_by_name["mixed_precision"]
        )
        arguments_by_name |= {name: name == own for name in ("fp16", "bf16")}
    return {
        name: value
        for name, value in arguments_by_name.items()
        if name in DEFAULTS and not misfit(value, DEFAULTS[name])
    }


def misfit(value: Any, usual: Any) -> str:
    """Return a message if an argument's value does not have the type of the default `usual`, else
    an empty string.
    """
    # lr_scheduler_kwargs, whose default is None, takes anything.
    if usual is None:
        return ""
    # The switch comes first: true and false are whole numbers to Python.
    if isinstance(usual, bool):
        fits, kind = isinstance(value, bool), "true or false"
    elif isinstance(usual, str):
        fits, kind = isinstance(value, str), "a name"
    else:
        whole = isinstance(usual, int)
        fits = (
            isinstance(value, (int, float))
            and not isinstance(value, bool)
            and (not whole or value == int(value))
        )
        kind = "a whole number" if whole else "a number"
    return "" if fits else f"found {show_value(value)}, expected {kind}"


def filling(
    arguments: Mapping[str, Any], world: int | None, total: int | None, version: Any = None
) -> Filling:
    """Return the changes that the arguments `arguments` make to a file, for `world` ranks and a run of
    `total` optimizer steps (None: not known), with the release `version` of transformers (None: the newest).
    """
    args = _fill_arguments(arguments)
    # What a program changes so that nobody knows it is left open.
    unknown = {*getattr(arguments, "unknown", ())}
    micro, steps = args["per_device_train_batch_size"], args["gradient_accumulation_steps"]
    # max_steps is -1 if the epochs decide, and then only the data tells the length.
    total = total or (args["max_steps"] if args["max_steps"] > 0 else None)
    total = None if unknown & LENGTH else total
    warmup, rate = _count_warmup(args, total), args["learning_rate"]
    warmup = None if unknown & {"warmup_steps", "warmup_ratio"} else warmup
    demands: dict[str, tuple[Any, str]] = {
        MICRO: (micro, "per_device_train_batch_size"),
        STEPS: (steps, "gradient_accumulation_steps"),
        "gradient_clipping": (args["max_grad_norm"], "max_grad_norm"),
        "optimizer.params.lr": (rate, "learning_rate"),
        "optimizer.params.betas": (
            (args["adam_beta1"], args["adam_beta2"]),
            "adam_beta1+adam_beta2",
        ),
        "optimizer.params.eps": (args["adam_epsilon"], "adam_epsilon"),
        "optimizer.params.weight_decay": (args["weight_decay"], "weight_decay"),
        "scheduler.params.warmup_max_lr": (rate, "learning_rate"),
        "fp16.enabled": (args["fp16"] or args["fp16_full_eval"], "fp16+fp16_full_eval"),
        "bf16.enabled": (args["bf16"] or args["bf16_full_eval"], "bf16+bf16_full_eval"),
    }
    if world is not None:
        demands[TOTAL] = (
            world * micro * steps,
            "world size+per_device_train_batch_size+gradient_accumulation_steps",
        )
    if warmup is not None:
        # At least 1, because recent DeepSpeed refuses 0 (trainer_config_finalize).
        demands["scheduler.params.warmup_num_steps"] = (max(1, warmup), "warmup_steps")
    if total is not None:
        demands["scheduler.params.total_num_steps"] = (total, "max_steps")
    demands = {key: row for key, row in demands.items() if unknown.isdisjoint(row[1].split("+"))}
    values = {path: value for path, (value, _) in demands.items()} | {
        "scheduler.params.warmup_min_lr": 0
    }
    # The Trainer reads num_steps after it has compared its arguments with the file.
    if count := read_num_steps(args):
        values[STEPS] = count
        values |= {TOTAL: world * micro * count} if world is not None else {}
    # The Trainer then tries smaller batches itself and does not compare these keys.
    if args["auto_find_batch_size"]:
        demands = {path: demand for path, demand in demands.items() if path not in (MICRO, TOTAL)}
    # The plugin's own values for "auto" (accelerate/utils/dataclasses.py: DeepSpeedPlugin).
    facts = {
        "zero_stage": 2,
        "offload_optimizer": "none",
        "offload_param": "none",
        "warmup_steps": warmup,
        "total_steps": total,
        "save_16bit": False,
    }
    sets: dict[str, Any] = {NODE_LOCAL: True} if args["save_on_each_node"] else {}
    if args["max_steps"] > 0:
        sets["code.steps"] = args["max_steps"]
    elif "num_train_epochs" in arguments:
        sets["code.epochs"] = float(args["num_train_epochs"])
    if "seed" in arguments:
        sets["code.seed"] = args["seed"]
    sets |= _set_code(arguments, version)
    # Further arguments, such as a number of cycles or a final
    # rate, make a schedule that no plan knows.
    schedule = (
        {}
        if args["lr_scheduler_kwargs"] or unknown & {"lr_scheduler_type", "lr_scheduler_kwargs"}
        else _build_schedule(args["lr_scheduler_type"], warmup, total)
    )
    optimizer, message = _build_optimizer(args, values)
    if changed := sorted(unknown & OPTIMIZER):
        optimizer, message = {}, CHANGED_OPTIMIZER.format(", ".join(changed))
    sets = {
        key: one for key, one in sets.items() if key not in {SETS.get(name) for name in unknown}
    }
    return Filling(
        values,
        {name: fact for name, fact in facts.items() if fact is not None},
        demands,
        sets,
        schedule,
        _check_schedule(args, total),
        optimizer,
        message,
        bool(unknown & OPTIMIZER),
    )


def _set_code(given: Mapping[str, Any], version: Any) -> dict[str, Any]:
    """Return how the Trainer averages the loss, and its arguments in `TRAINED`, by path of the code part."""
    release = Version(str(version)) if version is not None else OVER_RANKS
    named = {name: given[name] for name in TRAINED if name in given}
    if PER_TOKEN <= release < OVER_RANKS:
        named.setdefault("average_tokens_across_devices", False)
    return {
        **{
            f"code.trainer.{name}": value for name, value in named.items() if value != TRAINED[name]
        },
        **({"code.loss": "per_token"} if release >= PER_TOKEN else {}),
    }


@dataclass(frozen=True, slots=True)
class Epoch:
    """An epoch of the Trainer: the micro-batch of a rank in samples, the micro-batches of a rank, and the
    optimizer steps of the whole run.
    """

    micro: int
    batches: int
    steps: int


def split_batch(values: Mapping[str, Any], world: int | None) -> int | None:
    """Return the micro-batch of a rank where accelerator_config splits one batch over `world` ranks; None where
    it does not, or where the ranks do not divide it, which accelerate refuses.
    """
    args = _fill_arguments(values)
    whole = args["per_device_train_batch_size"]
    splits = read_mapping(args["accelerator_config"]).get("split_batches") is True
    return whole // world if splits and world and whole % world == 0 else None


def find_epoch(values: Mapping[str, Any], world: int | None, samples: int | None) -> Epoch | None:
    """Return the epoch of a run on `world` ranks over a data set of `samples`; None if one of the two is not
    known (accelerate/data_loader.py: BatchSamplerShard; Trainer.set_initial_training_values).
    """
    if not world or not samples:
        return None
    args = _fill_arguments(values)
    own = split_batch(values, world)
    whole, micro = args["per_device_train_batch_size"], own or args["per_device_train_batch_size"]
    round_off: Callable[[float], int] = math.floor if args["dataloader_drop_last"] else math.ceil
    batches = round_off(round_off(samples / whole) / (1 if own else world))
    updates = max(math.ceil(batches / args["gradient_accumulation_steps"]), 1)
    epochs = float(args.get("num_train_epochs") or COURSE["num_train_epochs"])
    steps = args["max_steps"] if args["max_steps"] > 0 else math.ceil(epochs * updates)
    return Epoch(micro, batches, steps)


def _fill_arguments(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return all TrainingArguments in `DEFAULTS`, with the values of `values` and defaults for all
    others.
    """
    # A dump of JSON may hold 8.0 for a batch of 8, and such sizes go into messages and files; and it may hold the
    # name of an enum's member: OptimizerNames.ADAMW_TORCH, SchedulerType.LINEAR.
    return {
        name: int(value)
        if type(DEFAULTS.get(name)) is int
        else value.rpartition(".")[2].lower()
        if name in ("optim", "lr_scheduler_type")
        else value
        for name, value in {**DEFAULTS, **values}.items()
    }


def _build_optimizer(
    args: Mapping[str, Any], values: Mapping[str, Any]
) -> tuple[dict[str, Any], str]:
    """Return two things: the optimizer that the Trainer builds, by key, and a message about this
    optimizer. If a plan cannot express the optimizer, there are no keys.
    """
    if args["optim"] not in ADAMW:
        return {}, OTHER_OPTIMIZER.format(args["optim"])
    params = {path: value for path, value in values.items() if path.startswith("optimizer.params.")}
    # Trainer.get_decay_parameter_names leaves out biases and the weights of norms.
    scope = {"code.decay_scope": "matrices"} if args["weight_decay"] else {}
    return {"optimizer.type": "AdamW", **params, **scope}, OWN_OPTIMIZER


def _check_schedule(args: Mapping[str, Any], total: int | None) -> str:
    """Return a message if stagebridge cannot read the schedule that the Trainer builds, because its
    kind or its length is not known. Otherwise return an empty string.
    """
    kind = args["lr_scheduler_type"]
    if args["lr_scheduler_kwargs"] or kind not in SCHEDULES:
        return (
            f"not given: Hugging Face's Trainer then builds its own scheduler, {kind}, which"
            " stagebridge cannot translate; stagebridge reads the learning rate as constant"
        )
    if total is None:
        return (
            f"not given: Hugging Face's Trainer then builds its own scheduler, {kind}, over a number"
            " of steps that follows from the data; stagebridge reads the learning rate as constant;"
            " give the number of steps with --auto-from max_steps=1000"
        )
    return ""


def _count_warmup(args: Mapping[str, Any], total: int | None) -> int | None:
    """Return the number of warmup steps; None if the number is not known. A value below 1 is a
    share of all steps. Older releases have a separate argument for the share.
    """
    warmup = args["warmup_steps"] or args["warmup_ratio"]
    if warmup >= 1 or not warmup:
        return int(warmup)
    return math.ceil(total * warmup) if total is not None else None


def _build_schedule(kind: str, warmup: int | None, total: int | None) -> dict[str, Any]:
    """Return the schedule that the Trainer builds, by names of the code part; empty if a plan
    cannot express the schedule or if its length is not known.
    """
    name = SCHEDULES.get(kind)
    if name is None or warmup is None or (total is None and name != "constant"):
        return {}
    settings: dict[str, Any] = {
        "name": name,
        "warmup_steps": 0 if kind == WITHOUT_WARMUP else warmup,
    }
    if settings["warmup_steps"]:
        settings["warmup_from"] = 0.0
    if name != "constant":
        settings |= {"total_steps": total, "minimum": 0.0}
    return settings
