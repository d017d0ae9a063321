"""What DeepSpeed makes of a config: defaults of the release, old keys moved, values derived, and every reason to refuse."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from bridge.errors import ConfigError, nearest
from compat.deepspeed.leaves import typed
from compat.deepspeed.releases import Release, Type, optional_section, release

Flat = Mapping[str, Any]

MICRO, STEPS, TOTAL = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"
ZERO = "zero_optimization."
OFFLOAD, PARAM = ZERO + "offload_optimizer", ZERO + "offload_param"
GATHER = ZERO + "stage3_gather_16bit_weights_on_model_save"
OLD_GATHER = ZERO + "stage3_gather_fp16_weights_on_model_save"
LEAVES = frozenset(f"{ZERO}leaf_module.{name}" for name in ("classes", "names", "name_suffixes"))
SCALE_KEYS = tuple(
    f"fp16.{name}"
    for name in ("initial_scale_power", "loss_scale_window", "min_loss_scale", "hysteresis", "consecutive_hysteresis")
)


def effective(given: Flat, version: str, world_size: int | None = None, partial: bool = False) -> dict[str, Any]:
    """Values by path that DeepSpeed `version` would hold for `given` on `world_size` ranks.

    A `partial` config may leave the batch open, which DeepSpeed itself never takes.
    Without a world size: the one that a full batch triangle implies, else the smallest possible. Raises `ConfigError` with
    every reason to refuse; messages name keys, the place in DeepSpeed's source stands beside each check.
    """
    at = release(version)
    problems = [*_unknown(given, at), *_untyped(given), *_bounds(given, at)]
    ConfigError.raise_if(problems)
    values = _filled(given, at)
    problems += [*_refused(values, given, at), *_unmeshed(values, world_size)]
    if not (partial and given.get(TOTAL) is None and given.get(MICRO) is None):
        problems += _batch(values, given, at, world_size)
    ConfigError.raise_if(problems)
    return values


# Keys, types and bounds of the release


def _unknown(given: Flat, at: Release) -> Iterator[str]:
    for path in given:
        if path not in at.keys and not path.startswith("code."):
            yield f"{path}: not read by DeepSpeed {at.version}; drop it or name another release"


def _untyped(given: Flat) -> Iterator[str]:
    for path, value in given.items():
        try:
            if value is not None:
                typed(path, value)
        except (KeyError, ValueError) as error:
            yield f"{path}: {error}" if isinstance(error, ValueError) else f"{path}: unknown key"


def _bounds(given: Flat, at: Release) -> Iterator[str]:
    for path in at.bounds.keys() & given.keys():
        for bound in at.bounds[path]:
            value = given[path]
            if not isinstance(value, str) and not (value > float(bound[1:]) if bound[0] == ">" else value < float(bound[1:])):
                yield f"{path}: found {value}, expected {bound[0]} {bound[1:]} in DeepSpeed {at.version}"


# Defaults and derived values


def _filled(given: Flat, at: Release) -> dict[str, Any]:
    values = dict(at.defaults)
    for section in dict.fromkeys(filter(None, map(optional_section, given))):
        values.update(at.section_defaults(section))
    values.update(given)
    _move(values, at)
    _name(values, given, at)
    _derive(values, given, at)
    return values


def moved(given: Flat) -> dict[str, str]:
    """Where effective values come from old keys: new path by old path."""
    sections = {f"bfloat16.{name}": f"bf16.{name}" for name in (path.removeprefix("bfloat16.") for path in given)}
    found = {old: new for old, new in sections.items() if old in given}
    singles = {ZERO + "cpu_offload": OFFLOAD + ".device", ZERO + "cpu_offload_param": PARAM + ".device", OLD_GATHER: GATHER}
    return found | {old: new for old, new in singles.items() if old in given}


def _move(values: dict[str, Any], at: Release) -> None:
    """Old keys to new ones (runtime/config_utils.py, deprecated fields; runtime/precision_config.py, bf16)."""
    for old, section in ((ZERO + "cpu_offload", OFFLOAD), (ZERO + "cpu_offload_param", PARAM)):
        if values.pop(old, None):
            values.update({**at.section_defaults(section), section + ".device": "cpu"})
    if OLD_GATHER in values:
        old_gather = values.pop(OLD_GATHER)
        values[GATHER] = old_gather or values.get(GATHER, False)
    for path in [path for path in values if path.startswith("bfloat16.")]:
        values["bf16." + path.removeprefix("bfloat16.")] = values.pop(path)


def _name(values: dict[str, Any], given: Flat, at: Release) -> None:
    """Canonical type names, and the defaults of the constructors behind them."""
    for kind, section in (("optimizers", "optimizer"), ("schedulers", "scheduler")):
        name = values.get(section + ".type")
        if name is not None and (form := _form(values, at, kind, name)):
            values[section + ".type"] = form.type
            args = form.args or {}
            defaults = {f"{section}.params.{arg}": value for arg, value in args.items() if value is not None}
            values.update({path: _tuple(value) for path, value in defaults.items() if path in at.keys and path not in given})


def _form(values: Flat, at: Release, kind: str, name: str) -> Type | None:
    """The implementation that DeepSpeed picks for a type (runtime/engine.py, `get_optimizer_configuration`)."""
    forms = at.forms(kind, name)
    wanted = "torch" if values.get("optimizer.params.torch_adam") else "cpu" if offloaded(values) else "fused"
    fitting = [form for form in forms if form.form == wanted]
    return next(iter(fitting or forms), None)


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def offloaded(values: Flat) -> bool:
    """Whether the optimizer runs on the CPU."""
    return bool(values.get(OFFLOAD + ".device", "none") != "none")


def _derive(values: dict[str, Any], given: Flat, at: Release) -> None:
    stage = values[ZERO + "stage"]
    if values.get(ZERO + "overlap_comm") is None:  # runtime/zero/config.py, overlap_comm_valid
        values[ZERO + "overlap_comm"] = stage == 3
    for name in LEAVES & values.keys():  # runtime/zero/leaf_module_config.py, _validate_entries
        values[name] = tuple(dict.fromkeys(values[name] or ()))
    if values.get("autotuning.model_info") is not None:  # autotuning/config.py, get_model_info_config
        values["autotuning.model_info"] = {**MODEL_INFO, **values["autotuning.model_info"]}
    if values["flops_profiler.enabled"]:  # runtime/config.py, _initialize_params
        values["wall_clock_breakdown"] = True
    if values.get("optimizer.type") in ("adam", "adamw"):
        _adam(values, given)
    _unhalved(values, given, at)
    if not at.since("0.17.1") and not any(path in given for path in SCALE_KEYS) and values["fp16.enabled"] and stage > 0:
        # runtime/fp16/loss_scaler.py, CreateLossScaler: no scaling key at all means the scaler's own defaults
        values.update({"fp16.initial_scale_power": 32, "fp16.hysteresis": 1})
    for size in ("tensor_parallel", "pipeline_stages", "context_parallel", "expert_parallel"):
        values.setdefault(f"code.{size}", 1)


def _unhalved(values: dict[str, Any], given: Flat, at: Release) -> None:
    """What only counts in half precision, or with a section of its own (runtime/config.py)."""
    norm, master = "optimizer.params.max_grad_norm", "fp16.fp16_master_weights_and_grads"
    if not values["fp16.enabled"] and not at.since("0.19.6") and values.get(norm, 0) > 0:  # _do_warning_check
        values[norm] = 0.0
    if not values["fp16.enabled"] and not at.since("0.17.1"):  # get_fp16_master_weights_and_grads_enabled
        values[master] = False
    if not at.since("0.17.1") and not any(path.startswith(("bf16.", "bfloat16.")) for path in given):
        values["bf16.immediate_grad_update"] = False  # get_bfloat16_immediate_grad_update


def _adam(values: dict[str, Any], given: Flat) -> None:
    """Type AdamW always decays apart; PyTorch's AdamW decays by 0.01 unless told (runtime/engine.py)."""
    mode, decay = "optimizer.params.adam_w_mode", "optimizer.params.weight_decay"
    if values["optimizer.type"] == "adamw":
        values[mode] = True
    if values.get("optimizer.params.torch_adam") and decay not in given:
        values[decay] = 0.01 if values[mode] else 0.0


# Refusals


@dataclass(frozen=True, slots=True)
class Refusal:
    """A combination that DeepSpeed refuses: a test of effective values, the line to say, and where DeepSpeed checks it."""

    when: Callable[[Flat], bool]
    message: str
    place: str
    since: str = ""
    until: str = ""


def _on(path: str) -> Callable[[Flat], bool]:
    return lambda values: bool(values.get(path))


def _stage(values: Flat) -> int:
    return int(values[ZERO + "stage"])


def _dynamic(values: Flat) -> bool:
    return bool(values["fp16.enabled"]) and not values["fp16.loss_scale"]


def _piped(values: Flat) -> bool:
    return int(values["code.pipeline_stages"]) > 1


def _zenflow(values: Flat) -> bool:
    return ZERO + "zenflow.topk_ratio" in values


def _sum(values: Flat) -> bool:
    return values.get("gradient_allreduce_op") == "sum"


def _switched(section: str) -> Refusal:
    """A section that DeepSpeed looks for its switch in, which crashes where there is none (KeyError)."""
    return Refusal(
        lambda v: isinstance(v.get(section), Mapping) and "enabled" not in v[section],
        f"{section}.enabled: missing, and DeepSpeed trips on a section without it; write it out, or drop the section",
        "runtime/config.py, get_amp_params, get_pld_params and get_curriculum_params_legacy",
    )


REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        lambda v: v["fp16.enabled"] and v["bf16.enabled"],
        "fp16.enabled, bf16.enabled: both are true, expected one precision; switch one off",
        "runtime/config.py, _initialize_params",
    ),
    Refusal(
        lambda v: _on("fp16.fp16_master_weights_and_grads")(v) and v["fp16.enabled"] and _stage(v) != 2,
        "fp16.fp16_master_weights_and_grads: needs zero_optimization.stage 2",
        "runtime/config.py, _do_error_check",
        until="0.17.1",
    ),
    Refusal(
        lambda v: _on("fp16.fp16_master_weights_and_grads")(v) and _stage(v) != 2,
        "fp16.fp16_master_weights_and_grads: needs zero_optimization.stage 2",
        "runtime/config.py, _do_error_check",
        since="0.17.1",
        until="0.18.3",
    ),
    Refusal(
        lambda v: _on("fp16.fp16_master_weights_and_grads")(v) and _stage(v) == 0,
        "fp16.fp16_master_weights_and_grads: needs zero_optimization.stage 1, 2 or 3",
        "runtime/config.py, _do_error_check",
        since="0.18.3",
    ),
    Refusal(
        lambda v: _on("bf16.bf16_master_weights_and_grads")(v) and _stage(v) == 0,
        "bf16.bf16_master_weights_and_grads: needs zero_optimization.stage 1, 2 or 3",
        "runtime/config.py, _do_error_check",
    ),
    Refusal(
        lambda v: _on("bf16.bf16_optimizer_states")(v) and not (v["bf16.bf16_master_weights_and_grads"] and _stage(v)),
        "bf16.bf16_optimizer_states: needs bf16.bf16_master_weights_and_grads and zero_optimization.stage 1, 2 or 3",
        "runtime/config.py, _do_error_check",
    ),
    Refusal(
        lambda v: _dynamic(v) and not v["fp16.loss_scale_window"],
        "fp16.loss_scale_window: found 0, expected at least 1 with dynamic loss scaling",
        "runtime/precision_config.py; before 0.19.3 a division by zero in runtime/fp16/loss_scaler.py",
    ),
    Refusal(
        lambda v: _dynamic(v) and not v["fp16.min_loss_scale"],
        "fp16.min_loss_scale: found 0, expected at least 1 with dynamic loss scaling",
        "runtime/precision_config.py, _validate_dynamic_loss_scale_params",
        since="0.19.3",
    ),
    Refusal(
        lambda v: v.get(ZERO + "compute_grad_norm") is False and _stage(v) not in (1, 2),
        "zero_optimization.compute_grad_norm: false needs stage 1 or 2",
        "runtime/zero/config.py, compute_grad_norm_valid",
    ),
    Refusal(
        lambda v: v.get(ZERO + "compute_grad_norm") is False and _stage(v) in (1, 2) and v["gradient_clipping"] > 0,
        "zero_optimization.compute_grad_norm: false needs gradient_clipping 0, written out",
        "runtime/zero/stage_1_and_2.py",
    ),
    Refusal(
        lambda v: v.get(OFFLOAD + ".ratio", 1) < 1 and _stage(v) != 3,
        "zero_optimization.offload_optimizer.ratio: less than 1 needs stage 3",
        "runtime/zero/config.py, offload_ratio_check",
    ),
    Refusal(
        lambda v: _sum(v) and _stage(v) == 3,
        "gradient_allreduce_op: sum is not possible at zero_optimization.stage 3; use mean",
        "runtime/config.py, _do_error_check",
    ),
    Refusal(
        lambda v: _sum(v) and _zenflow(v),
        "gradient_allreduce_op: sum is not possible with zenflow; use mean",
        "runtime/config.py, _do_error_check",
    ),
    Refusal(
        lambda v: _sum(v) and bool(v.get("compile.deepcompile")),
        "gradient_allreduce_op: sum is not possible with compile.deepcompile; use mean",
        "runtime/config.py, _do_error_check",
    ),
    Refusal(
        lambda v: _piped(v) and _stage(v) >= 2,
        "zero_optimization.stage: 2 and 3 do not go with pipeline stages; use 0 or 1",
        "runtime/pipe/engine.py, PipelineEngine.__init__",
    ),
    Refusal(
        lambda v: v.get("tensor_parallel.autotp_size", 0) > 1 and _stage(v) == 3,
        "tensor_parallel.autotp_size: does not go with zero_optimization.stage 3 before DeepSpeed 0.19.4",
        "runtime/engine.py",
        until="0.19.4",
    ),
    Refusal(
        lambda v: (
            v.get("tensor_parallel.autotp_size", 0) > 1
            and v["tensor_parallel.tp.tp_size"] not in (1, v["tensor_parallel.autotp_size"])
        ),
        "tensor_parallel.tp.tp_size: is not tensor_parallel.autotp_size, which is what counts; drop tp_size",
        "runtime/engine.py, _apply_autotp_partitioning",
        since="0.18.6",
    ),
    Refusal(
        lambda v: v["aio.use_gds"] and v.get("code.accelerator") != "cuda",
        "aio.use_gds: needs a CUDA accelerator; switch it off, or say code.accelerator is cuda",
        "runtime/swap_tensor/aio_config.py, get_aio_config",
    ),
    Refusal(
        lambda v: v.get("expert_parallel.load_balance_coeff") is not None,
        "expert_parallel.load_balance_coeff: only null is supported; leave it out",
        "module_inject/auto_ep_presets/base.py",
    ),
    Refusal(
        lambda v: _lacks(v, "data_efficiency.data_sampling.curriculum_learning", "curriculum_metrics"),
        "data_efficiency.data_sampling.curriculum_learning: enabled without curriculum_metrics; add them",
        "runtime/data_pipeline/config.py, get_curriculum_learning",
    ),
    Refusal(
        lambda v: _lacks(v, "data_efficiency.data_sampling.dynamic_batching", "max_tokens"),
        "data_efficiency.data_sampling.dynamic_batching: enabled without max_tokens; add it",
        "runtime/data_pipeline/config.py, get_dynamic_batching",
    ),
    *(_switched(section) for section in ("amp", "progressive_layer_drop", "curriculum_learning")),
    Refusal(
        lambda v: "autotp" in (v.get("compile.passes") or ()),
        "compile.passes: autotp is a pass since DeepSpeed 0.19.6; drop it",
        "compile/config.py, PassName",
        until="0.19.6",
    ),
    Refusal(
        lambda v: bool((v.get("elasticity") or {}).get("enabled")),
        "elasticity: enabled, so the batch would be chosen at launch; write the batch keys it would choose and drop the section",
        "elasticity/elasticity.py, compute_elastic_config",
    ),
    Refusal(
        lambda v: v.get("scheduler.type", "").startswith("Warmup") and v.get("scheduler.params.warmup_num_steps") == 0,
        "scheduler.params.warmup_num_steps: found 0, expected at least 1",
        "runtime/lr_schedules.py",
        since="0.19.3",
    ),
)
"""Each row names the place in DeepSpeed that it stands for."""


def _lacks(values: Flat, path: str, name: str) -> bool:
    section = values.get(path) or {}
    return bool(section.get("enabled")) and name not in section


def _refused(values: Flat, given: Flat, at: Release) -> Iterator[str]:
    for row in REFUSALS:
        if at.within(row.since, row.until) and row.when(values):
            yield row.message
    yield from _twice(given)
    yield from _facts(given)
    yield from _arguments(values, given, at)


def _twice(given: Flat) -> Iterator[str]:
    """An old key beside the one that replaces it (runtime/config_utils.py, _process_deprecated_field)."""
    for old, section in ((ZERO + "cpu_offload", OFFLOAD), (ZERO + "cpu_offload_param", PARAM)):
        if old in given and any(path.startswith(section + ".") for path in given):
            yield f"{old}: given beside {section}, which replaces it; drop {old}"
    if any(path.startswith("bfloat16.") for path in given) and any(path.startswith("bf16.") for path in given):
        yield "bfloat16: given beside bf16, which hides it; keep one"
    if OLD_GATHER in given and GATHER in given:
        yield f"{OLD_GATHER}: given beside {GATHER}, which replaces it; drop the old one"


MODEL_INFO = {"profile": False, "num_params": None, "hidden_size": None, "num_layers": None}


def _facts(given: Flat) -> Iterator[str]:
    """Names that nobody reads (autotuning/config.py, get_model_info_config)."""
    for name in given.get("autotuning.model_info") or ():
        if name not in MODEL_INFO:
            yield f"autotuning.model_info.{name}: unknown key{nearest(str(name), MODEL_INFO)}"


def _arguments(values: Flat, given: Flat, at: Release) -> Iterator[str]:
    """Arguments that the scheduler cannot be built without (runtime/lr_schedules.py)."""
    form = _form(values, at, "schedulers", values.get("scheduler.type") or "")
    for argument in form.required if form else ():
        if f"scheduler.params.{argument}" not in given:
            yield f"scheduler.params.{argument}: missing, and {form.type if form else ''} needs it"


# Batch


@dataclass(frozen=True, slots=True)
class Ranks:
    """How many ranks there are, and by how many DeepSpeed divides the batch."""

    world: int
    dividing: int
    why: str


def ranks(values: Flat, version: str, world_size: int | None) -> Ranks:
    """The ranks that DeepSpeed's batch arithmetic counts; raises `ConfigError` where they do not come out even."""
    at = release(version)
    shared = _shared(values, at)
    dividing = _dividing(values, at)
    world = world_size or _implied(values) * dividing
    least = world or _mesh(values, at) or dividing
    if _mesh(values, at) not in (0, least):
        raise ConfigError(_mesh_problem(values, least))
    if least % dividing:
        raise ConfigError(f"{shared} does not divide world size ({least}); use a multiple of {dividing} ranks")
    data = int(values["data_parallel_size"]) if _mesh(values, at) else least // dividing
    return Ranks(least, data, shared)


def _unmeshed(values: Flat, world_size: int | None) -> Iterator[str]:
    """AutoTP lays its groups out as a mesh over all ranks (utils/groups.py, _init_tp_mesh_device)."""
    size = values.get("tensor_parallel.autotp_size") or 1
    if world_size is not None and world_size % size:
        yield f"tensor_parallel.autotp_size: {size} does not divide world size ({world_size}); use a divisor of it"


def _coded(values: Flat) -> int:
    """Ranks of the groups that the script builds and DeepSpeed learns of through an mpu."""
    return math.prod(int(values[f"code.{axis}_parallel"]) for axis in ("tensor", "context")) * int(values["code.pipeline_stages"])


def _sequence(values: Flat, at: Release) -> int:
    """Sequence-parallel ranks that the batch arithmetic sees: those of the mpu, else of the file from 0.17.0 on."""
    seen = at.since("0.17.0") or _coded(values) > 1
    return max(int(values["code.context_parallel"]), int(values["sequence_parallel_size"]) if seen else 1)


def _dividing(values: Flat, at: Release) -> int:
    return int(values["code.tensor_parallel"]) * int(values["code.pipeline_stages"]) * _sequence(values, at)


def _mesh(values: Flat, at: Release) -> int:
    """World size of the mesh that data_parallel_size and sequence_parallel_size describe, or 0 (__init__.py, initialize)."""
    if values.get("data_parallel_size") is None or _coded(values) > 1:
        return 0
    return int(values["data_parallel_size"]) * int(values["sequence_parallel_size"])


def _mesh_problem(values: Flat, world: int) -> str:
    data, sequence = values["data_parallel_size"], values["sequence_parallel_size"]
    return f"data_parallel_size ({data}) x sequence_parallel_size ({sequence}) is not the world size ({world}); make them agree"


def _shared(values: Flat, at: Release) -> str:
    """What the ranks are shared among, by the keys that say so."""
    sequence = _sequence(values, at)
    told = "code.context_parallel" if sequence == values["code.context_parallel"] else "sequence_parallel_size"
    sizes = {path: int(values[path]) for path in ("code.tensor_parallel", "code.pipeline_stages")} | {told: sequence}
    return " x ".join(f"{path} ({size})" for path, size in sizes.items() if size > 1)


def _implied(values: Flat) -> int:
    """Data-parallel ranks that a full triangle implies; 0 if it is not full or does not come out even."""
    total, micro, steps = (values.get(path) for path in (TOTAL, MICRO, STEPS))
    if not (total and micro and steps) or total % (micro * steps):
        return 0
    return int(total // (micro * steps))


def _batch(values: dict[str, Any], given: Flat, at: Release, world_size: int | None) -> list[str]:
    """Solve and check the batch triangle as DeepSpeed does (runtime/config.py, _set_batch_related_parameters)."""
    try:
        data = ranks(values, at.version, world_size).dividing
    except ConfigError as error:
        return list(error.problems)
    total, micro, steps = (given.get(path) for path in (TOTAL, MICRO, STEPS))
    if total is None and micro is None:
        return [f"{MICRO}: missing; give it, or {TOTAL}"]
    values.update(_solved(total, micro, steps, data))
    return _uneven(values, data)


def _solved(total: int | None, micro: int | None, steps: int | None, data: int) -> dict[str, int]:
    """The two others of the triangle from what is given, with floor division."""
    if micro is None:
        assert total is not None
        steps = 1 if steps is None else steps
        micro = total // data // steps
    elif steps is None:
        steps = total // micro // data if total is not None else 1
    return {TOTAL: micro * steps * data if total is None else total, MICRO: micro, STEPS: steps}


def _uneven(values: Flat, data: int) -> list[str]:
    total, micro, steps = values[TOTAL], values[MICRO], values[STEPS]
    if total == micro * steps * data and micro * steps > 0:
        return []
    whole = f"{MICRO} ({micro}) x {STEPS} ({steps}) x data-parallel ranks ({data})"
    return [f"{TOTAL}: found {total}, expected {whole} = {micro * steps * data}; give two of the three, or make them agree"]
