"""DeepSpeed's entry points, implemented by the native engine. A script uses them if it writes
`import compat.deepspeed as deepspeed`.
"""

from __future__ import annotations

import argparse
import math
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import bridge.engine
from bridge.engine import comm
from bridge.engine.environment import Environment, detect
from bridge.engine.fields import check, find_limits
from bridge.engine.formats import TORCH
from bridge.engine.layers import Arguments, as_module, hooks_of
from bridge.engine.models.cutting import UNKNOWN, is_hugging_face, why_whole
from bridge.engine.runner import Engine
from bridge.errors import BridgeError, ConfigError
from bridge.plan.plan import Plan
from bridge.stack.dialect import Config
from bridge.stack.findings import Finding
from bridge.stack.rules import Effect
from bridge.translation.edit import without
from bridge.translation.lift import claims, lift, plan_claims
from bridge.translation.translate import unheld
from compat.deepspeed.dialect import DIALECT
from compat.deepspeed.free_section_keys import IGNORED
from compat.deepspeed.runtime import client, schedulers
from compat.deepspeed.runtime.engine import DeepSpeedEngine
from compat.deepspeed.runtime.names import parts
from compat.deepspeed.runtime.names.communication import PORT, init_distributed
from compat.deepspeed.runtime.names.pipe import PipelineModule

Launch = tuple[DeepSpeedEngine, torch.optim.Optimizer | None, Any, Any]
NEVER = 2**31 - 1
"""The value of steps_per_print that stands for "never". No run has so many steps."""
RUN = ("scheduler.", "fp16.consecutive_hysteresis", "dataloader_drop_last")
"""Settings that are in no plan field but that the engine behind DeepSpeed's interface implements
exactly. An entry that ends with a dot is a whole section.
"""
READ = ("steps_per_print", "dataloader_drop_last", "train_micro_batch_size_per_gpu")
"""Settings that the engine behind DeepSpeed's interface reads from the config instead of the plan.
"""
STAGE = "zero_optimization.stage"
LOGS = ("run.project", "run.entity")
"""Plan fields of logs that DeepSpeed's engine writes itself, and the engine here does not."""
WEIGHTY = {
    "data_types.grad_accum_dtype": Effect.ROUNDING,
    "zero_optimization.offload_optimizer.device": Effect.COST,
    "zero_optimization.offload_param.device": Effect.COST,
}
"""Settings that change a run of DeepSpeed itself even where they do not change the plan, each with
the effect. Any other setting that does not change the plan has no effect.
"""
SIZES = tuple(
    f"get_{kind}_parallel_world_size"
    for kind in ("model", "tensor_model", "pipeline_model", "pipe")
)
OWN_RULE = ", or pass a torch optimizer of this kind to initialize as optimizer="
INSTEAD = {"optimizer.params.max_grad_norm": "set gradient_clipping to this value"}
"""What to do about a setting that the engine does not run, where it is not to leave the key out."""
MANAGED = "managed_gradient_accumulation"


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = PORT,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: str | Path | dict[str, Any] | None = None,
    mesh_param: Any = None,
    config_params: str | Path | dict[str, Any] | None = None,
) -> Launch:
    """Return engine, optimizer, training data loader and scheduler, as `deepspeed.initialize` of
    DeepSpeed 0.19.8 does. Parts that the run does not have are None. The optimizer is a torch
    optimizer, whose groups and learning rates the engine reads at every step. The engine splits an
    `nn.Sequential` and models of Hugging Face into layers. Any other model is a single layer, until
    at ZeRO 3 the first call of the engine shows which arguments it takes. Raises `BridgeError` for
    settings that would change the numbers and that the engine cannot run. `engine.findings` lists
    the settings that change no numbers and that the engine does not run.
    """
    if model is None:
        raise ConfigError("model: missing; deepspeed.initialize requires a model")
    here = _environment(distributed_port, dist_init_required)
    code = model.code if isinstance(model, PipelineModule) else None
    read = _read(args, config, config_params, here.world, code)
    read, unread = _leave_out(read, {"optimizer": optimizer, "scheduler": lr_scheduler})
    ConfigError.raise_if((*beyond(read), *_meshes(mpu, mesh_param)))
    plan, module = leave_open(lift(read), optimizer is not None), as_module(model)
    check(plan, here.world)
    parts.take_back(module)
    face = _face(plan, optimizer, model_parameters, module)
    scheduler = _scheduler(lr_scheduler, face, read)
    loss_fn = getattr(model, "loss_fn", None)
    pipeline_loss = loss_fn if (plan.parallel.pipeline or 1) > 1 else None
    make = partial(
        _native, module, plan, face, here, [*find_unsupported(read), *unread], read, pipeline_loss
    )
    native = make()
    init_distributed(dist_init_required=dist_init_required)
    waits = [finding for finding in native.findings if UNKNOWN in finding.message]
    native.findings = tuple(finding for finding in native.findings if finding not in waits)
    _warn(native, read)
    engine = DeepSpeedEngine(native, read, face, scheduler, collate_fn, loss_fn, here.local_rank)
    if waits:
        paths = {finding.path for finding in native.findings}

        def remake(arguments: Arguments) -> Engine:
            hooks = here.world == 1 and _has_hooks(native.model)
            why = "it has hooks, which a trial of its layers would run" if hooks else None
            why = why or why_whole(native.model, arguments)
            if why:
                warnings.warn(
                    "zero.stage 3: the model is one layer, whose weights are gathered together:"
                    f" {why}",
                    stacklevel=2,
                )
                again = make(seed=native.seed)
                again.findings = native.findings
                return again
            engine_of_layers = make(arguments, native.seed)
            _warn(engine_of_layers, read, paths)
            return engine_of_layers

        engine.cut_later(remake)
    if training_data is not None:
        engine.training_dataloader = engine.deepspeed_io(training_data)
    return engine, face, engine.training_dataloader, scheduler


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the arguments `--deepspeed` and `--deepspeed_config` to `parser`, as DeepSpeed does."""
    group = parser.add_argument_group("DeepSpeed")
    group.add_argument(
        "--deepspeed",
        action="store_true",
        help="Use DeepSpeed (only the script itself reads this flag).",
    )
    group.add_argument(
        "--deepspeed_config", metavar="FILE", help="DeepSpeed's configuration in JSON."
    )
    return parser


def _environment(port: int, is_required: bool | None) -> Environment:
    """Return rank, world size and address of this process: from its process group if it has joined
    one, else from the launcher's environment variables.
    """
    here = comm.rank_and_world()
    if here is not None:
        return replace(detect(), rank=here[0], world=here[1])
    environment = detect()
    if is_required is False and environment.world > 1:
        raise BridgeError(
            "dist_init_required: found False, but there is no process group; call"
            " init_distributed() first, or leave the argument out"
        )
    return environment


def _read(
    args: Any, config: Any, params: Any, world: int, code: Mapping[str, Any] | None = None
) -> Config:
    """Read the config from whichever argument has one. Raises `ConfigError` unless exactly one
    argument has a config.
    """
    files = [getattr(args, name, None) for name in ("deepspeed_config", "deepscale_config")]
    sources = [one for one in (config if config is not None else params, *files) if one is not None]
    if len(sources) != 1:
        count = "none" if not sources else f"{len(sources)} of them"
        raise ConfigError(
            f"config: found {count}, expected a config in exactly one of config=, config_params="
            " and args.deepspeed_config"
        )
    one = sources[0]
    # accelerate writes infinity for "never", which is no number of JSON.
    if isinstance(one, Mapping) and one.get("steps_per_print") == math.inf:
        one = {**one, "steps_per_print": NEVER}
    # trl writes such names, of which DeepSpeed reads none.
    names = [name for name in one if "." in str(name)] if isinstance(one, Mapping) else []
    if names:
        one = {name: value for name, value in one.items() if name not in names}
    read: Config = DIALECT.read(one, None, world, code=code)
    remarks = (Finding(name, IGNORED, Effect.NONE, True) for name in names)
    return replace(read, remarks=(*read.remarks, *remarks))


def _leave_out(config: Config, own: Mapping[str, Any]) -> tuple[Config, list[Finding]]:
    """Return `config` without the sections that DeepSpeed does not read because the script brings
    its `own` part, and a finding for each (runtime/engine.py: _configure_optimizer,
    _configure_lr_scheduler).
    """
    findings, left = [], dict[str, Any]()
    for section, part in own.items():
        paths = [path for path in config.given if path.startswith(f"{section}.")]
        if part is not None and paths:
            left |= dict.fromkeys(paths)
            message = f"the script's own {section} runs, so this section is not read; leave it out"
            findings.append(Finding(section, message, Effect.NONE, True))
    return without(config, left) if left else config, findings


def leave_open(plan: Plan, own: bool) -> Plan:
    """Return `plan` without settings that the script sets itself: the schedule of learning rates,
    and also the update rule if the script has its `own` optimizer.
    """
    prefixes = ("optimizer.schedule.", "optimizer.name") if own else "optimizer.schedule."
    return Plan.of(
        {path: value for path, value in plan.values().items() if not path.startswith(prefixes)}
    )


def _find_losses(config: Config) -> Iterator[Finding]:
    """Return findings for settings of the config that are in no plan field, or only in part, and
    that the engine does not implement.
    """
    return (finding for finding in unheld(config, blurred=True) if not finding.path.startswith(RUN))


def beyond(config: Config) -> Iterator[str]:
    """Yield a problem for each setting that changes the numbers and that the engine cannot run."""
    kind = config.given.get("optimizer.type")
    # The engine has Lion's rule, but torch has no class of it that the script could get.
    strange = kind is not None and kind.lower() not in client.CLASSES
    if strange:
        yield (
            f"optimizer.type: found {kind}, which the engine does not run; use AdamW, Adam or SGD, with"
            f" no optimizer.params but lr and weight_decay{OWN_RULE}"
        )
    problems = [
        (
            finding.path,
            f"{finding.path}: found {finding.before!r}, which the engine does not implement"
            f" ({finding.message}); {INSTEAD.get(finding.path, 'leave this key out')}",
        )
        for finding in _find_losses(config)
        if finding.effect is Effect.NUMBERS and finding.path != MANAGED
    ]
    rules = plan_claims(config.dialect)
    for limit in find_limits(leave_open(lift(config), own=False).values()):
        carriers = rules[limit.path].carriers(limit.path)
        key = next((path for path in carriers if path in config.given), limit.path)
        if limit.effect is Effect.NUMBERS:
            found = config.given.get(key, limit.before)
            problems.append((key, f"{key}: found {found!r}; {limit.message}"))
    for path, line in problems:
        if not path.startswith("optimizer."):
            yield line
        elif not strange:
            yield line if path in INSTEAD else line + OWN_RULE
    if config.effective.get(MANAGED) is False:
        yield (
            f"{MANAGED}: found false, but the engine always counts microbatches itself: leave the"
            " key out, and set gradient_accumulation_steps to the number of backward() calls in a"
            " step"
        )


def find_unsupported(config: Config) -> Iterator[Finding]:
    """Yield a finding for each setting that changes no numbers and that the engine does not run,
    for each setting that has no effect in this config, and for each setting that DeepSpeed itself
    does not read or gets wrong.
    """
    losses = (finding for finding in _find_losses(config) if finding.effect is not Effect.NUMBERS)
    mine = [*losses, *_find_silent(config), *_find_unlogged(config), *_other_stage(config)]
    clip = config.effective.get("gradient_clipping")
    if clip and "gradient_clipping" not in config.given:
        message = (
            f"the config does not set it, so gradients are clipped to a norm of {clip:g}, the default of"
            " this release of DeepSpeed; set it, to 0 for no clipping"
        )
        mine.append(Finding("gradient_clipping", message, Effect.NONE, False))
    yield from mine
    paths = {finding.path for finding in mine}
    unread = {finding.path for finding in config.remarks}
    for finding in config.findings:
        lead = finding.path + "."
        is_set = any(f"{path}.".startswith(lead) for path in config.given)
        if finding.path not in paths and (is_set or finding.path in unread):
            yield finding


def _other_stage(config: Config) -> Iterator[Finding]:
    """Yield a finding if the engine runs another ZeRO stage than the config's because DeepSpeed's
    own numbers at that stage are wrong.
    """
    stage = config.effective.get(STAGE) or 0
    if stage == 0 and (lift(config).zero.stage or 0) > 0:
        yield Finding(
            STAGE,
            "at stage 0 DeepSpeed makes an optimizer step too many in half precision, and clips by"
            " a wrong norm in a pipeline; the engine does neither: use stage 1, at which both give"
            " the same numbers",
            Effect.NUMBERS,
            STAGE in config.given,
            before=stage,
        )


def _find_unlogged(config: Config) -> Iterator[Finding]:
    """Yield a finding for each setting of logs that DeepSpeed's engine writes itself, which a plan
    leaves to the script.
    """
    table = claims(config.dialect)
    for path in config.given:
        if path in table and {*table[path].ours} & {*LOGS} and config.effective.get(path):
            yield Finding(path, "the engine writes no such logs", Effect.NONE, True)


def _find_silent(config: Config) -> Iterator[Finding]:
    """Yield a finding for each setting in the config that has a plan field but does not change the
    plan.
    """
    values, rules = lift(config).values(), claims(config.dialect)
    named = {finding.path for finding in config.findings}
    for path in config.given:
        if path not in rules or not rules[path].ours or path.startswith((*RUN, *READ)):
            continue
        if path in named:
            continue
        try:
            other = without(config, {path: None})
        except BridgeError:  # DeepSpeed does not run without it
            continue
        value = config.given[path]
        if value != other.effective.get(path) and lift(other).values() == values:
            effect = WEIGHTY.get(path, Effect.NONE)
            yield Finding(
                path,
                "this setting has no effect together with the other settings of the config",
                effect,
                True,
                before=value,
            )


def _meshes(mpu: Any, mesh_param: Any) -> Iterator[str]:
    """Yield a problem for an `mpu` that splits the model, and for any `mesh_param`, because the
    engine does not use process groups that a script makes.
    """
    for name in SIZES:
        size = getattr(mpu, name, lambda: 1)()
        if size > 1:
            yield (
                f"mpu: {name}() is {size}; the engine splits models itself: leave mpu out, pass"
                " the whole model with a method tensor_plan, and set tensor_parallel.autotp_size"
                " in the config"
            )
    if mesh_param:
        yield f"mesh_param: found {mesh_param}; the engine has no sequence axis; leave it out"


def _face(
    plan: Plan, optimizer: Any, parameters: Iterable[Any] | None, model: nn.Module
) -> torch.optim.Optimizer | None:
    """Return the optimizer that the script gets: the script's own, or the optimizer that the config
    describes; None if there is neither.
    """
    trainables = list(model.parameters() if parameters is None else parameters)
    if optimizer is not None:
        return client.optimizer_of_script(optimizer, trainables)
    return client.make_optimizer(plan.optimizer, trainables) if plan.optimizer.name else None


def _scheduler(scheduler: Any, face: torch.optim.Optimizer | None, config: Config) -> Any:
    section = config.ds_config.get("scheduler") or {}  # type: ignore[attr-defined]
    if face is None or (scheduler is None and section.get("type") is None):
        return None
    if scheduler is not None:
        return client.scheduler_of_script(scheduler, face)
    return schedulers.scheduler(section["type"], section.get("params") or {}, face)


def _native(
    model: nn.Module,
    plan: Plan,
    face: torch.optim.Optimizer | None,
    here: Environment,
    findings: list[Finding],
    read: Config,
    loss_fn: Callable[..., Any] | None = None,
    sample: Arguments | None = None,
    seed: int | None = None,
) -> Engine:
    """Return the native engine, set up to round as DeepSpeed does. First, weights are rounded to
    the compute format, and then masters are copied from them. Buffers are not rounded, as in
    DeepSpeed from 0.19.2 on. Losses are divided before backward (runtime/engine.py:
    _cast_module_mixed_precision, backward).
    """
    groups = client.groups_of(face, model) if face else ()
    own = client.settings_of(face) if face else {"optimizer.name": "sgd"}
    make, level, costs = client.rule_of(face, plan) if face else (None, {}, [])
    frozen = list(client.freeze_others(model, groups)) if face else []
    formats = _formats(model, plan)
    if plan.precision.compute in ("bf16", "fp16"):
        for weight in model.parameters():
            weight.data = (
                weight.data.to(TORCH[plan.precision.compute])
                if weight.is_floating_point()
                else weight.data
            )
    settings = {path: read.given[path] for path in sorted(read.given)}
    wide: dict[str, Any] = WIDE if formats == {torch.float64} else {}
    if formats == {torch.float32, torch.float64}:
        wide = dict.fromkeys(WIDE)
    precision, stage = plan.precision, plan.zero.effective_stage or 0
    wider = stage > 1 and precision.communicate == precision.compute != precision.reduce
    if wider and here.world == 1:
        wide = {"precision.communicate": precision.reduce}
    whole = Plan.of({**plan.values(), **own, **level, **wide})
    # Layers of a model would draw other numbers than the model. They save memory only at ZeRO 3 on
    # several ranks, or if several ranks share a model.
    drops, parallel = _has_dropout(model), plan.parallel
    shared = (parallel.tensor or 1) * (parallel.pipeline or 1) > 1 or (
        stage == 3 and here.world > 1
    )
    hooked = here.world == 1 and _has_hooks(model)
    whole_model = sample is None and ((drops and not shared) or hooked)
    engine = bridge.engine.initialize(
        model,
        whole,
        loss_fn,
        seed=seed,
        environment=here,
        groups=groups,
        alike=settings,
        sample=sample,
        layers=None if whole_model else (),
        optimizer=make,
    )
    engine.draws_as_torch = (
        engine.executor.joined
        and engine.tensor.size == 1
        and not (drops and any(layer.keys for layer in engine.chain.layers))
    )
    late = wider and here.world > 1
    engine.findings += (*findings, *frozen, *costs, *_find_others(engine, formats, late))
    engine.divide_early()
    _scale(engine, read)
    # DeepSpeed passes inputs on as they are, and counts calls of `step`: runtime/engine.py, forward
    engine.casts, engine.takes_more = False, True
    return engine


WIDE = {f"precision.{use}": "fp64" for use in ("compute", "master", "reduce", "communicate")}
"""Plan fields of formats, each with the value that the field gets if the model's weights are in fp64
and the config sets no format. If they are in fp32 and fp64, no format is set, and each weight keeps
its own.
"""


def _formats(model: nn.Module, plan: Plan) -> set[torch.dtype]:
    """Return the formats of the model's floating-point weights; empty if the config itself sets a
    compute format.
    """
    if plan.precision.compute in ("bf16", "fp16"):
        return set()
    return {weight.dtype for weight in model.parameters() if weight.is_floating_point()}


def _find_others(engine: Engine, formats: set[torch.dtype], late: bool) -> Iterator[Finding]:
    """Yield findings for what DeepSpeed does otherwise: a model with 16-bit weights if the config sets
    no format, where DeepSpeed computes in the format of each weight, but the engine has one format for
    all; gradients that accumulate in a wider format than ranks exchange them in (`late`); dropout in
    layers; and hooks that the search for the model's layers has run.
    """
    model, drops = engine.model, _has_dropout(engine.model)
    for kind in (torch.bfloat16, torch.float16):
        if kind in formats:
            name = next(name for name, dtype in TORCH.items() if dtype is kind)
            yield Finding(
                "model",
                f"the model's weights are in {name}, and the config names no format: DeepSpeed"
                f" computes in {name}, the engine in fp32; set {name}.enabled, or call"
                " model.float()",
                Effect.NUMBERS,
                given=True,
            )
    if drops and not engine.draws_as_torch:
        yield Finding(
            "model",
            "ranks draw dropout by a seed of the run, layer by layer; DeepSpeed draws by torch's generator"
            " of each rank: other masks of the same rate. At zero.stage 2 on data ranks, or with dropout 0,"
            " both are equal",
            Effect.NUMBERS,
            given=True,
        )
    stage, layers = engine.plan.zero.effective_stage or 0, len(engine.chain.layers)
    if stage and layers == 1 < engine.comm.world.size and drops and is_hugging_face(model):
        yield Finding(
            "zero.stage",
            "this model has dropout and is one layer, to draw the numbers that DeepSpeed draws: its gradients"
            " are whole until the end of a backward pass, and reduced there; set dropout to 0 for layers",
            Effect.COST,
            given=True,
        )
    if late:
        yield Finding(
            "data_types.grad_accum_dtype",
            "the engine exchanges the sum of a step's microbatches, rounded once; DeepSpeed exchanges each"
            " microbatch, and adds them up afterwards",
            Effect.ROUNDING,
            given=True,
        )
    if layers > 1 and not isinstance(model, nn.Sequential) and _has_hooks(model):
        yield Finding(
            "zero.stage",
            "the model ran several times to find its layers, and its hooks with it: what they print or"
            " write outside of the process is there several times",
            Effect.NONE,
            True,
        )


def _has_dropout(model: nn.Module) -> bool:
    """Return whether a model has dropout, in modules or by its config: attention drops by a function."""
    rates = [part.p for part in model.modules() if isinstance(part, nn.modules.dropout._DropoutNd)]
    config = getattr(model, "config", None)
    named = vars(config).items() if hasattr(config, "__dict__") else ()
    rates += [value for name, value in named if "drop" in name and isinstance(value, int | float)]
    return any(rates)


def _has_hooks(model: nn.Module) -> bool:
    """Return whether the script has registered hooks on calls of modules."""
    return any(map(hooks_of, model.modules()))


def _scale(engine: Engine, config: Config) -> None:
    """Set up the engine's loss scaler to behave like DeepSpeed's in two ways that no plan field
    expresses: a step without overflow may reset the count of overflows, and without ZeRO the first
    overflow halves the scale (runtime/fp16/unfused_optimizer.py).
    """
    scaler = engine.scaler
    if scaler.window is None:
        return
    scaler.refill = bool(config.effective.get("fp16.consecutive_hysteresis"))
    if engine.plan.zero.stage == 0:
        scaler.hysteresis, scaler.tolerated = 1, 0


def _warn(engine: Engine, config: Config, paths: Collection[str] = ()) -> None:
    """Warn on the first rank about each setting of the config that the engine runs differently, but
    for those that it was `paths` of.
    """
    rules = plan_claims(config.dialect)
    for finding in engine.findings if engine.comm.rank == 0 else ():
        if finding.path in paths:
            continue
        rule = rules.get(finding.path)
        if rule is None or any(path in config.given for path in rule.carriers(finding.path)):
            warnings.warn(
                f"{finding.path}: {finding.message} ({finding.effect.value})", stacklevel=3
            )
