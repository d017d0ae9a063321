"""Who wins under Hugging Face's Trainer: its TrainingArguments, the DeepSpeed file, or what accelerate and DeepSpeed add.

The tables follow transformers/integrations/deepspeed.py (trainer_config_process, deepspeed_optim_sched),
transformers/trainer_optimizer.py, accelerate/utils/dataclasses.py (DeepSpeedPlugin), accelerate/accelerator.py
(_prepare_deepspeed), accelerate/utils/deepspeed.py (map_pytorch_optim_to_deepspeed) and DeepSpeed's
runtime/lr_schedules.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from packaging.version import Version

from bridge.plan.section import nest
from bridge.stack.findings import Origin
from bridge.stack.program_source import CHANGES, UNKNOWN
from bridge.stack.rules import Effect
from bridge.stack.sources import DEFAULT, Claim, Placed, Said, Settled, Sources, Unheard
from bridge.stack.training_arguments import SHOWN
from compat.deepspeed.accelerated import ADDER, PRINTS
from compat.deepspeed.auto import RULES
from compat.deepspeed.trainer import (
    ADAMW,
    DEFAULTS,
    MICRO,
    NODE_LOCAL,
    STEPS,
    TOTAL,
    WITHOUT_WARMUP,
    Epoch,
    choose_release,
    read_num_steps,
)

PARAMS, SCHEDULER, STAGE = "optimizer.params.", "scheduler.params.", "zero_optimization.stage"
OFFLOADS = "zero_optimization.offload_optimizer."
"""Keys that decide at every stage who builds the optimizer."""
OFFLOAD = OFFLOADS + "device"
WARMUP, BETAS = SCHEDULER + "warmup_num_steps", PARAMS + "betas"
ARGUMENTS: Mapping[str, tuple[str, int | None]] = {
    "per_device_train_batch_size": (MICRO, None),
    "gradient_accumulation_steps": (STEPS, None),
    "max_grad_norm": ("gradient_clipping", None),
    "learning_rate": (PARAMS + "lr", None),
    "adam_beta1": (BETAS, 0),
    "adam_beta2": (BETAS, 1),
    "adam_epsilon": (PARAMS + "eps", None),
    "weight_decay": (PARAMS + "weight_decay", None),
    "warmup_steps": (WARMUP, None),
    "warmup_ratio": (WARMUP, None),
    "fp16": ("fp16.enabled", None),
    "bf16": ("bf16.enabled", None),
    "save_on_each_node": (NODE_LOCAL, None),
}
"""The key of DeepSpeed that each argument fills in, and the index of its item there."""
FILLED: Mapping[str, tuple[str, ...]] = {
    **{path: tuple(name for name, (own, _) in ARGUMENTS.items() if own == path) for path, _ in ARGUMENTS.values()},
    TOTAL: ("per_device_train_batch_size", "gradient_accumulation_steps"),
    SCHEDULER + "warmup_max_lr": ("learning_rate",),
    SCHEDULER + "total_num_steps": ("max_steps",),
    "fp16.enabled": ("fp16", "fp16_full_eval"),
    "bf16.enabled": ("bf16", "bf16_full_eval"),
}  # fmt: skip
"""The arguments that fill in each key of DeepSpeed."""
RATES: Mapping[str, str] = {
    "WarmupLR": "warmup_max_lr",
    "WarmupDecayLR": "warmup_max_lr",
    "OneCycle": "cycle_max_lr",
    "LRRangeTest": "lr_range_test_min_lr",
}
"""The argument of each scheduler that replaces the optimizer's rate. WarmupCosineLR scales that rate."""
DEFAULT_RATE = ("WarmupDecayLR", "OneCycle", "LRRangeTest")
"""Schedulers that replace the optimizer's rate also where the file does not give theirs."""
AFTER: Mapping[str, str] = {
    "WarmupLR": "after the warmup the rate stays at {0}; ",
    "WarmupDecayLR": "after the warmup the rate falls in a line to 0; ",
    "WarmupCosineLR": "after the warmup the rate falls as a cosine; ",
    "OneCycle": "the rate rises and falls in one cycle; ",
    "LRRangeTest": "the rate rises throughout, to find a fitting one; ",
}
FLOOR = 2
"""The least warmup of DeepSpeed's schedulers: max(2, warmup_num_steps). The first two steps have the rate 0."""
ADAM = ("adam_beta1", "adam_beta2", "adam_epsilon")
BARE: Mapping[str, tuple[tuple[str, ...], float | None]] = {
    "adafactor": ((), None),
    "sgd": ((), None),
    "adagrad": ((), 1e-10),
    "rmsprop": ((), 1e-8),
    "lion_8bit": (ADAM[:2], None),
    "lion_32bit": (ADAM[:2], None),
    "paged_lion_8bit": (ADAM[:2], None),
    "paged_lion_32bit": (ADAM[:2], None),
}
"""Of ADAM, the arguments that an optimizer of the Trainer takes, and its own epsilon. Every other optimizer takes all."""
IDLE: tuple[tuple[str, str, Callable[[Mapping[str, Any]], bool]], ...] = (
    ("fp16.", "fp16 is off", lambda now: now.get("fp16.enabled") is not True),
    ("zero_optimization.stage3_", "the ZeRO stage is not 3", lambda now: now.get(STAGE) != 3),
    (
        "zero_optimization.sub_group_size",
        "the ZeRO stage is not 3",
        lambda now: now.get(STAGE) != 3,
    ),
    ("zero_optimization.", "the ZeRO stage is 0", lambda now: not now.get(STAGE)),
)
"""Keys by their beginning that have no effect, with the reason, and when. The first row that fits a key counts."""
CHECKPOINTING = "activation_checkpointing."
HEARD = frozenset({"fp16.enabled", STAGE})
"""Keys of these sections that are heard all the same, as are those of OFFLOADS."""
CPU_BETAS = {"adam_beta1": 0.9, "adam_beta2": 0.999}
REPLACED: Mapping[str, str] = {
    NODE_LOCAL: "the Trainer sets this key for save_on_each_node",
    "steps_per_print": PRINTS,
}
"""Keys of the file that are replaced, and why."""
PRECISION = "ACCELERATE_MIXED_PRECISION"
SECTIONS = ("fp16.", "bf16.")
"""The sections for a precision, which accelerate adds to a file that lacks them."""
FILLS_PRECISION = (
    "accelerate's precision counts without the arguments fp16 and bf16, and where the file has no section for"
    " the precision"
)
ENVIRONMENT: Mapping[str, tuple[str, str]] = {
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": ("zero_stage", STAGE),
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": ("offload_optimizer", OFFLOAD),
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": (
        "offload_param",
        "zero_optimization.offload_param.device",
    ),
    "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": (
        "save_16bit",
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    ),
}
"""Variables that accelerate's plugin reads beside a file: the fact for "auto", and its key."""
PASSED: Mapping[str, Effect] = {
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": Effect.NUMBERS,
    "ACCELERATE_GRADIENT_CLIPPING": Effect.NUMBERS,
    "ACCELERATE_USE_DEEPSPEED": Effect.NONE,
    "ACCELERATE_DEEPSPEED_CONFIG_FILE": Effect.NUMBERS,
}
"""Variables in whose place the Trainer passes its own to accelerate, with the effect."""
BUILDS = (
    "the Trainer builds no {0} where the file has a block for it; remove the block {0} from the"
    " file, or the argument"
)
SWAPS = (
    "accelerate replaces the optimizer, as the file offloads its state; set"
    ' "zero_force_ds_cpu_optimizer": false to keep it'
)
WANT = "needs --auto {0}=N"
WANTED: Mapping[str, str] = {
    "hidden_size": "needs --model FOLDER",
    "total_steps": "needs --auto samples=N, or total_steps=N",
    "warmup_steps": "needs --auto samples=N, or total_steps=N",
    "data_parallel": "needs --world-size N",
}
"""What tells a fact that is missing."""
TAKES_NONE = "the optimizer of --optim {} does not take it"
TRANSFORMERS = "transformers"
FUSED, FUSES = "adamw_torch_fused", "4.54.0"
"""The default of the argument optim with torch 2.8 and newer, and the first release of transformers with it
(training_args.py: default_optim).
"""
FUSED_SINCE = "with torch 2.8 or newer; adamw_torch with an older one, and before transformers 4.54"
CPU_ADAM = "DeepSpeedCPUAdam"


@dataclass(frozen=True)
class Run:
    """A run of the Trainer: the arguments that were given, and the file before and after filling.

    `before` and `after` hold values by key of DeepSpeed, with `origins` of the file's; `fills` has
    what the arguments fill in. `facts` say where sizes come from that no argument gives. `blocks`
    are the sections of the file, and `open` has keys of "auto" that lack a fact, with its name. `environment`
    has accelerate's variables. `epoch` is known with the length of the data, and `share` is the
    micro-batch of each of `world` ranks where they split one batch. `added` has who put keys into the file's
    content before the Trainer read it.
    """

    arguments: Placed
    before: Mapping[str, Any]
    after: Mapping[str, Any]
    fills: Mapping[str, Any]
    origins: Mapping[str, Origin]
    blocks: frozenset[str]
    facts: Mapping[str, Said]
    open: Mapping[str, str]
    environment: Mapping[str, Said]
    epoch: Epoch | None = None
    share: int | None = None
    world: int | None = None
    added: Mapping[str, Said] = field(default_factory=dict)

    def said(self, name: str) -> Said:
        """What the run says of an argument; of one that is not given, the Trainer's default."""
        default = Said(name, DEFAULTS.get(name), f"{TRANSFORMERS}{DEFAULT}")
        return self.arguments.places.get(name) or (
            Said(name, self.arguments[name], "--auto-from") if name in self.arguments else default
        )

    def settle(self, name: str) -> Settled:
        """An argument that the Trainer itself takes."""
        place = self.said(name)
        if name == "optim" and name not in self.arguments and self._has_fused:
            place = replace(place, value=FUSED)
            return Settled(name, FUSED, place, why=FUSED_SINCE)
        return Settled(name, place.value, place)

    @property
    def _has_fused(self) -> bool:
        given = self.facts.get("transformers")
        release = choose_release(self.arguments, given.value if given else None)
        return release is None or Version(release) >= Version(FUSES)

    @property
    def optim(self) -> str:
        """The optimizer that the arguments ask for. A dump may hold the name of the enum's member."""
        return str(self.said("optim").value).removeprefix("OptimizerNames.").lower()

    @property
    def schedule(self) -> str:
        """The schedule that the arguments ask for."""
        return str(self.said("lr_scheduler_type").value).removeprefix("SchedulerType.").lower()

    @property
    def is_same_adam(self) -> bool:
        """Whether the file's optimizer computes what the arguments ask for, up to rounding.

        DeepSpeed builds one group, in which biases and norms decay too; the Trainer's do not decay.
        """
        kind = str(self.after.get("optimizer.type")).lower()
        decay = self.after.get(PARAMS + "weight_decay")
        return self.optim in ADAMW and kind in ("adam", "adamw") and decay == 0

    @property
    def offloads(self) -> bool:
        """Whether accelerate replaces the Trainer's optimizer by DeepSpeed's for the CPU."""
        forces = self.after.get("zero_force_ds_cpu_optimizer", True)
        return "optimizer" not in self.blocks and bool(forces) and self._device != "none"

    @property
    def _device(self) -> str:
        return str(getattr(self.after.get(OFFLOAD), "value", self.after.get(OFFLOAD) or "none"))


def find_sources(run: Run) -> Sources:
    """Return who sets each value of a run of the Trainer, and what its arguments say to no effect."""
    kind = str(run.after.get("scheduler.type")) if "scheduler" in run.blocks else ""
    values: dict[str, Any] = {"steps_per_print": "inf"}
    winners = {"steps_per_print": Said("steps_per_print", "inf", ADDER), **dict(_find_winners(run))}
    warmup = run.after.get(WARMUP)
    if kind.startswith("Warmup") and isinstance(warmup, int) and warmup < FLOOR:
        values[WARMUP] = FLOOR
        winners[WARMUP] = Said(f"max({FLOOR}, warmup_num_steps)", FLOOR, "DeepSpeed")
    for path, value, place in _measure_batch(run):
        values[path], winners[path] = value, place
    if kind == "OneCycle" and run.after.get(SCHEDULER + "cycle_momentum", True):
        least = run.after.get(SCHEDULER + "cycle_min_mom", 0.8)
        values[BETAS] = (least, 0.99)
        winners[BETAS] = Said(SCHEDULER + "cycle_min_mom", least, "DeepSpeed")
    hidden = {path for path in run.after if path.startswith("code.") and path in winners}
    hidden |= run.open.keys()
    if "optimizer" not in run.blocks:
        hidden |= {path for path in run.after if path.startswith("optimizer.")}
    own = [*_own_optimizer(run, kind), *_own_schedule(run), *_find_open(run)]
    unheard = (*run.arguments.lost, *_find_unheard(run, kind))
    lost = {one.said.setting for one in unheard}
    shown = {
        *ARGUMENTS,
        *(one.setting for one in own),
        *(claim.said.setting for row in own for claim in row.overruled),
    }
    own += [
        run.settle(name)
        for name in run.arguments
        if name in SHOWN
        and name not in shown
        and not {name, run.said(name).setting} & (lost | shown)
    ]
    for row in _find_changed(run):
        own = [*(one for one in own if one.setting != row.setting), row]
        hidden.add(row.setting)
    claims = (*_find_claims(run, kind), *_of_file(run), *_of_environment(run))
    return Sources(claims, winners, values, unheard, tuple(own), frozenset(hidden))


def _measure_batch(run: Run) -> Iterator[tuple[str, Any, Said]]:
    """Yield the sizes of a step's batch where they are others than the arguments for them ask for: accelerator_config
    splits a batch over the ranks or gives the steps of accumulation, or an epoch has fewer micro-batches than accumulate.
    """
    if not {MICRO, STEPS} <= run.fills.keys():
        return  # the program changes them
    micro, steps = (int(run.fills[path]) for path in (MICRO, STEPS))
    first = run.epoch.batches if run.epoch and 0 < run.epoch.batches < steps else steps
    loader = run.said("accelerator_config")
    data = run.facts.get("samples", Said("samples", None))
    if run.share:
        yield MICRO, run.share, loader
    counts = read_num_steps(run.arguments) is not None
    if counts or first != steps:
        yield STEPS, first, data if first != steps else loader
    if run.world and (run.share or counts or first != steps):
        total = (run.share or micro) * first * run.world
        yield TOTAL, total, data if first != steps else loader


def _find_winners(run: Run) -> Iterator[tuple[str, Said]]:
    """Yield each key that is not as the file has it, with who filled it in."""
    variables = {path: name for name, (_, path) in ENVIRONMENT.items() if name in run.environment}
    for path, value in run.after.items():
        if path in run.before and run.before[path] == value:
            if path in run.added:
                yield path, run.added[path]
            continue
        if path in variables:
            yield path, run.environment[variables[path]]
            continue
        names = FILLED.get(path, ())
        name = next((name for name in names if name in run.arguments), names[0] if names else "")
        fact = RULES[path].needs[0] if path in RULES and RULES[path].needs else ""
        precision = run.environment.get(PRECISION) if path.startswith(SECTIONS) else None
        if path.startswith(SECTIONS) and path not in FILLED:
            yield path, Said(path, value, ADDER)
        elif precision and value is True and not any(run.arguments.get(one) for one in names):
            yield path, precision
        elif fact in run.facts:
            yield path, run.facts[fact]
        elif fact == "total_steps" and "samples" in run.facts and "max_steps" not in run.arguments:
            yield path, run.facts["samples"]
        elif name:
            yield path, run.said(name)
        else:
            yield path, Said(path, value, TRANSFORMERS)


def _find_claims(run: Run, kind: str) -> Iterator[Claim]:
    """Yield what the given arguments ask of DeepSpeed's keys."""
    for name in run.arguments:
        place, (path, part) = run.said(name), ARGUMENTS.get(name, ("", None))
        if place.source.endswith(DEFAULT):
            continue  # nobody asked for it
        # A switch asks for itself; what fills in its key may come from another one as well.
        own = run.arguments[name]
        value = own if part is not None or isinstance(own, bool) else run.fills.get(path, own)
        effect = Effect.NONE if path == NODE_LOCAL else Effect.NUMBERS
        if name == "lr_scheduler_type" and kind:
            path, value, advice = (
                "scheduler.type",
                None,
                AFTER.get(kind, "").format(run.after.get(_rate_key(run, kind)))
                + BUILDS.format("scheduler"),
            )
        elif name == "optim" and "optimizer" in run.blocks:
            path, value, advice = "optimizer.type", None, BUILDS.format("optimizer")
            effect = Effect.ROUNDING if run.is_same_adam else effect
        else:
            path = _rate_key(run, kind) if name == "learning_rate" else path
            advice = _advice_on(run, path)
        block = path.partition(".")[0]
        if not path or (block in ("optimizer", "scheduler") and block not in run.blocks):
            continue
        if path != WARMUP or kind.startswith("Warmup"):
            yield Claim(path, value, place, advice, effect, part)


def _rate_key(run: Run, kind: str) -> str:
    """Return the key of the rate in force: the scheduler's, if that replaces the optimizer's."""
    key = SCHEDULER + RATES.get(kind, "")
    return key if kind in DEFAULT_RATE or key in run.after else PARAMS + "lr"


def _advice_on(run: Run, path: str) -> str:
    key = path.rpartition(".")[2]
    if path == MICRO and run.share:
        return "split_batches of accelerator_config shares this number of samples among the ranks"
    if path == STEPS and run.epoch and run.epoch.batches < run.fills[STEPS]:
        return (
            f"an epoch has {run.epoch.batches} micro-batches a rank, and the step comes after them"
        )
    if path == STEPS and read_num_steps(run.arguments) is not None:
        return "num_steps of accelerator_config counts"
    if path == WARMUP and path in run.before:
        return "DeepSpeed's schedulers warm up for two steps at least"
    if path in run.before:
        return f'the argument counts only where the file has "{key}": "auto"'
    return (
        f"the file has no {path}, and the argument counts only through"
        f' "auto"; write "{key}": "auto"'
    )


def _of_file(run: Run) -> Iterator[Claim]:
    """Yield values of the file that the Trainer or accelerate replaces."""
    for path, why in REPLACED.items():
        if path in run.before:
            place = _place_in_file(run, path)
            yield Claim(path, place.value, place, why, Effect.NONE)


def _of_environment(run: Run) -> Iterator[Claim]:
    """Yield variables of accelerate that fill in an "auto" of the file, or a missing precision."""
    for name, variable in run.environment.items():
        path = ENVIRONMENT.get(name, ("", ""))[1]
        if path in run.before:
            yield Claim(
                path,
                variable.value,
                variable,
                f'{variable.setting} only fills in an "auto"',
                Effect.COST,
            )
        elif name == PRECISION and variable.value in ("fp16", "bf16"):
            yield Claim(f"{variable.value}.enabled", True, variable, FILLS_PRECISION)


def _place_in_file(run: Run, path: str) -> Said:
    origin = run.origins.get(path) or Origin()
    return Said(path, run.before[path], origin.file, origin.line)


def _find_open(run: Run) -> Iterator[Settled]:
    """Yield keys of "auto" whose value nothing tells that was given."""
    for path, fact in run.open.items():
        yield Settled(
            path, "auto", _place_in_file(run, path), (), WANTED.get(fact, WANT).format(fact)
        )


def _find_changed(run: Run) -> Iterator[Settled]:
    """Yield the settings whose value nobody knows, as the program changes the argument that sets it."""
    for name, said in run.arguments.unknown.items():
        path = ARGUMENTS.get(name, ("", None))[0]
        block = path.partition(".")[0]
        in_file = path and (block in run.blocks or block not in ("optimizer", "scheduler"))
        if not in_file or run.before.get(path, "auto") == "auto":
            row = Settled(path if in_file else name, UNKNOWN, said, (), CHANGES.format(name))
            yield row
            if path in (MICRO, STEPS):
                yield replace(row, setting=TOTAL)


def _own_optimizer(run: Run, kind: str) -> Iterator[Settled]:
    """Yield the settings of the optimizer that the Trainer builds itself."""
    if "optimizer" in run.blocks:
        return
    arguments, (names, eps) = run.arguments, BARE.get(run.optim, (ADAM, None))
    if run.offloads:
        effect = Effect.ROUNDING if run.optim in ADAMW else Effect.NUMBERS
        claim = Claim("optim", None, run.said("optim"), SWAPS, effect)
        yield Settled(
            "optim",
            CPU_ADAM,
            Said(OFFLOAD, CPU_ADAM, ADDER),
            (claim,) if "optim" in arguments else (),
        )
    else:
        yield run.settle("optim")
    yield run.settle("weight_decay")
    if _rate_key(run, kind) == PARAMS + "lr":
        yield run.settle("learning_rate")
    own = {**(CPU_BETAS if run.offloads else {}), **({"adam_epsilon": eps} if eps else {})}
    for name in ADAM:
        if name in names:
            yield run.settle(name)
        elif name in own:
            claim = Claim(name, own[name], run.said(name), TAKES_NONE.format(run.optim))
            claims = (claim,) if name in arguments and arguments[name] != own[name] else ()
            winner = Said(name, own[name], f"{CPU_ADAM if run.offloads else run.optim}{DEFAULT}")
            yield Settled(name, own[name], winner, claims)


def _own_schedule(run: Run) -> Iterator[Settled]:
    """Yield the settings of the schedule that the Trainer builds itself, and the length of the run."""
    if "scheduler" not in run.blocks:
        yield run.settle("lr_scheduler_type")
        if run.arguments.get("lr_scheduler_kwargs"):
            yield run.settle("lr_scheduler_kwargs")
        if run.schedule != WITHOUT_WARMUP:
            share = "warmup_ratio" in run.arguments and not run.arguments.get("warmup_steps")
            yield run.settle("warmup_ratio" if share else "warmup_steps")
    epochs = "num_train_epochs" in run.arguments
    if (run.arguments.get("max_steps") or -1) > 0:
        place = run.said("num_train_epochs")
        claim = Claim("max_steps", None, place, "max_steps above 0 decides the length alone")
        yield Settled(
            "max_steps",
            run.arguments["max_steps"],
            run.said("max_steps"),
            (claim,) if epochs else (),
        )
    elif epochs:
        yield run.settle("num_train_epochs")


def _find_unheard(run: Run, kind: str) -> Iterator[Unheard]:
    """Yield arguments and keys of the file that nothing reads in this run."""
    why: dict[str, str] = {}
    if kind:
        why["lr_scheduler_kwargs"] = f"the scheduler is {kind} of the file; remove its block"
        if not kind.startswith("Warmup"):
            why["warmup_steps"] = f"{kind} has no warmup_num_steps"
    elif run.schedule == WITHOUT_WARMUP:
        why["warmup_steps"] = "the schedule constant has no warmup; use constant_with_warmup"
    if "optimizer" not in run.blocks:
        names, eps = BARE.get(run.optim, (ADAM, None))
        own = {*names, *(CPU_BETAS if run.offloads else ()), *(("adam_epsilon",) if eps else ())}
        why |= {name: TAKES_NONE.format(run.optim) for name in ADAM if name not in own}
    for name, place in run.environment.items():
        if name in PASSED:
            yield Unheard(place, "the Trainer gives accelerate its own", PASSED[name])
        elif name in ENVIRONMENT and ENVIRONMENT[name][1] not in run.before:
            yield Unheard(place, 'it only fills in an "auto" of the file', Effect.COST)
    for name, reason in why.items():
        if name in run.arguments and not run.said(name).source.endswith(DEFAULT):
            yield Unheard(run.said(name), reason)
    section = {path: value for path, value in run.before.items() if path.startswith(CHECKPOINTING)}
    if section:
        first_key = _place_in_file(run, next(iter(section)))
        place = replace(
            first_key, setting=CHECKPOINTING.rstrip("."), value=nest(section).popitem()[1]
        )
        yield Unheard(place, "only a model that calls deepspeed.checkpointing uses it", Effect.NONE)
    for path in run.before:
        idle = next(
            (why for start, why, holds in IDLE if path.startswith(start) and holds(run.after)), ""
        )
        if idle and path not in HEARD and not path.startswith(OFFLOADS):
            yield Unheard(_place_in_file(run, path), idle, Effect.NONE)
