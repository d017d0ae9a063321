"""The values that AutoModel refuses and the defaults that it fills in, by release and
world size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

from bridge.errors import BridgeError, ConfigError
from compat.automodel.formats import IGNORED, OBJECT, OLD, PIPELINE, TARGET, history
from compat.automodel.releases import Release
from compat.automodel.rules.model import BUILT, NAMED, problems as model_problems, sizes
from compat.automodel.rules.optimizers import argument_defaults
from compat.automodel.schedules import SCHEDULES, Schedule, schedule
from compat.automodel.sharding import DDP_SELECTS, selects
from compat.automodel.virtual_stages import boundaries, count_stages, find_repeats, number

D = "distributed."
PP = PIPELINE + "."
MANAGERS: Mapping[str, str] = {
    "FSDP2Manager": "fsdp2",
    "MegatronFSDPManager": "megatron_fsdp",
    "NVFSDPManager": "megatron_fsdp",
}
SAME = {"megatron-fsdp": "megatron_fsdp", "mfsdp": "megatron_fsdp"}
SIZES = ("dp_size", "dp_replicate_size", "tp_size", "pp_size", "cp_size", "ep_size")
COMMON = frozenset(("_target_", "strategy", "activation_checkpointing", "moe", "pipeline", *SIZES))
"""Settings of the section `distributed` that every strategy has (recipes/_dist_utils.py,
parse_distributed_section).
"""
AXES = ("tp_size", "cp_size", "pp_size")
"""Sizes of the mesh axes other than the data axes. The world size is the product of these sizes and
`dp_size`.
"""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
LAYERS = "model.config.num_hidden_layers"
SEQUENCE = ("packed_sequence.packed_sequence_size", "dataset.seq_len")

Given = Mapping[str, Any]


def strategy(settings: Given, release: Release) -> str:
    """Return the canonical name of the sharding strategy. Before 0.3.0 the manager class determines
    it.
    """
    if not release.nests_pipeline:
        target = str(settings.get(D + TARGET) or "").rpartition(".")[2]
        return "ddp" if target.startswith("DDP") else MANAGERS.get(target, "fsdp2")
    name = settings.get(D + "strategy") or "fsdp2"
    return SAME.get(name, name)


def size(settings: Given, name: str) -> int:
    """Return the number of ranks along an axis; 1 if the axis is not set."""
    return int(settings.get(D + name) or 1)


def effective(
    settings: Given, release: Release, world_size: int | None = None, entry: str = "recipe"
) -> dict[str, Any]:
    """Return every value, by path, with which a run starts: the recipe's settings and AutoModel's
    defaults.

    Raises one `ConfigError` with every reason why AutoModel would stop.
    """
    # A live PipelineConfig alone is a plain dataclass: AutoModel checks its schedule and its batch.
    if entry == OBJECT:
        ConfigError.raise_if((*_schedule_name(settings), *_check_passes(settings)))
        return {**release.defaults("pipeline"), PP + "pp_batch_size": 1, **settings}
    # Sizes of the model from its class, where the recipe does not
    # override them, must fit the ranks too.
    kind, whole = strategy(settings, release), {**sizes(settings), **settings}
    problems = [
        f"{path}: {history(path, release)}"
        for path in settings
        if not release.reads(path) and path not in IGNORED
    ]
    if settings.get("clip_grad_norm.max_norm") == 0:
        problems.append(
            "clip_grad_norm.max_norm: found 0, which scales every gradient to 0; leave it out to"
            " clip at 1.0, or set a high bound to switch clipping off"
        )
    problems += [
        *_check_strategy(settings, release, kind),
        *_check_mesh(whole, release, world_size, kind),
        *_check_pipeline(whole, release),
        *model_problems(settings),
    ]
    problems += [*_check_steps(settings, world_size), *_learning_rate(settings)]
    ConfigError.raise_if(problems)
    return _fill_defaults(settings, release, world_size, kind)


# Reasons to refuse


def _check_strategy(settings: Given, release: Release, kind: str) -> Iterator[str]:
    """Yield an error for each option that the chosen strategy does not have (distributed/config.py,
    _resolve_strategy_config).
    """
    readable = COMMON | release.strategies[kind]
    for name in {path.split(".")[1]: None for path in settings if path.startswith(D)}:
        if name not in readable:
            owners = [other for other, options in release.strategies.items() if name in options]
            advice = (
                f"; {name} belongs to strategy {' or '.join(owners)}" if owners else "; drop it"
            )
            yield f"{D}{name}: strategy {kind} does not have this option{advice}"
    selective = settings.get(D + "activation_checkpointing") == "selective"
    if selective and not release.since("0.5.0"):
        yield f"{D}activation_checkpointing: found selective, which {release.version} does not know; use true or false"
    elif selective and not selects(kind, release):
        yield f"{D}activation_checkpointing: selective works with fsdp2, and with ddp since {DDP_SELECTS}, not with {kind}"


def _check_mesh(
    settings: Given, release: Release, world_size: int | None, kind: str
) -> Iterator[str]:
    """Yield an error for each mesh axis that the strategy does not have, and for each axis whose
    size does not fit (distributed/mesh_utils.py).
    """
    alone = {
        "ddp": ("tp_size", "pp_size", "cp_size", "ep_size"),
        "megatron_fsdp": ("pp_size", "ep_size"),
    }.get(kind, ())
    for name in alone:
        if size(settings, name) > 1:
            yield f"{D}{name}: found {size(settings, name)}; strategy {kind} has no such axis, use fsdp2"
    if kind != "fsdp2" and size(settings, "dp_replicate_size") > 1:
        yield (
            f"{D}dp_replicate_size: found {size(settings, 'dp_replicate_size')}; only strategy fsdp2"
            " has groups of replicas"
        )
    yield from _check_divisions(settings)
    yield from _check_ranks(settings, world_size)
    yield from _check_data(settings, release, world_size)


def _mesh_sizes(settings: Given) -> str:
    return " x ".join(f"{name} ({size(settings, name)})" for name in AXES)


def _check_divisions(settings: Given) -> Iterator[str]:
    """Yield an error for each size of the model that is not divisible by the number of ranks that
    share it.

    Source: distributed/parallelizer.py, validate_tp_mesh; for experts components/moe.
    """
    axes = {
        "num_attention_heads": "tp_size",
        "num_key_value_heads": "tp_size",
        **dict.fromkeys(EXPERTS, "ep_size"),
    }
    for name, axis in axes.items():
        count, ranks = settings.get(f"model.config.{name}"), size(settings, axis)
        # A number may be null.
        if isinstance(count, int) and count % ranks:
            yield f"model.config.{name}: found {count}, expected a multiple of {axis} ({ranks})"


def _check_ranks(settings: Given, world_size: int | None) -> Iterator[str]:
    others, data = prod(size(settings, name) for name in AXES), settings.get(D + "dp_size")
    if world_size is None:
        return
    if world_size % others:
        yield f"distributed: {_mesh_sizes(settings)} does not divide world size ({world_size}); use a multiple of {others} ranks"
    elif data is not None and data * others != world_size:
        yield (
            f"distributed: dp_size ({data}) x {_mesh_sizes(settings)} is not the world size ({world_size}); "
            f"leave dp_size out, or use {data * others} ranks"
        )


def data_ranks(settings: Given, world_size: int | None) -> int | None:
    """Return the number of data-parallel ranks: `dp_size`, or the world size divided by all other
    axes. None if neither `dp_size` nor the world size is known.
    """
    data: int | None = settings.get(D + "dp_size")
    if data is None and world_size is not None:
        return world_size // prod(size(settings, name) for name in AXES) or None
    return data


def _check_data(settings: Given, release: Release, world_size: int | None) -> Iterator[str]:
    data, replicas, experts = (
        data_ranks(settings, world_size),
        size(settings, "dp_replicate_size"),
        size(settings, "ep_size"),
    )
    if data is None:
        return
    if data % replicas or (replicas >= data and replicas > 1):
        yield (
            f"{D}dp_replicate_size: found {replicas}, expected a divisor of dp_size"
            f" ({data}) that is smaller than dp_size"
        )
    # Expert groups are made of data ranks, since 0.2.0 also of
    # context ranks, and since 0.5.0 also of tensor ranks.
    factors = {"dp_size": data}
    if release.since("0.2.0"):
        factors["cp_size"] = size(settings, "cp_size")
    if release.since("0.5.0"):
        factors["tp_size"] = size(settings, "tp_size")
    if prod(factors.values()) % experts:
        ranks = " x ".join(f"{name} ({value})" for name, value in factors.items())
        yield f"{D}ep_size: found {experts}, expected a divisor of {ranks}"


def has_pipeline(settings: Given) -> bool:
    """Whether the recipe has a pipeline."""
    return size(settings, "pp_size") > 1


def _check_pipeline(settings: Given, release: Release) -> Iterator[str]:
    """Yield every error in the pipeline's settings. AutoModel does not check these settings if
    `pp_size` is 1.
    """
    if not has_pipeline(settings):
        return
    if not any(path.startswith((PP, OLD)) for path in settings):
        problem = f"{D}pp_size: found {size(settings, 'pp_size')} without a pipeline section"
        yield f"{problem}; add {PIPELINE} with pp_schedule and pp_microbatch_size, or drop pp_size"
        return
    names = [*_schedule_name(settings)]
    yield from names
    yield from _check_passes(settings)
    if not names:
        yield from _check_split(settings, chosen(settings))
        yield from _check_microbatches(settings, release, chosen(settings))


def _schedule_name(settings: Given) -> Iterator[str]:
    name = settings.get(PP + "pp_schedule", "1f1b")
    try:
        kind = schedule(name, PP + "pp_schedule")
    except BridgeError as error:
        yield from error.problems
        return
    if kind.abstract and PP + "pp_schedule_csv" not in settings:
        yield f"{PP}pp_schedule: {kind.name} only runs a CSV file; give pp_schedule_csv, or name another schedule"


def chosen(settings: Given) -> Schedule:
    """Return the schedule that `pp_schedule` names. It determines which rank has which stages, even
    if a CSV file replaces the order of computations.
    """
    return SCHEDULES[settings.get(PP + "pp_schedule", "1f1b").lower()]


def samples_per_pass(settings: Given) -> tuple[int | None, int]:
    """Return the number of samples in one pass through the pipeline, and the number of samples in
    one micro batch. Recipes set the samples of a pass to `step_scheduler.local_batch_size`.
    """
    batch = settings.get("step_scheduler.local_batch_size") or settings.get(PP + "pp_batch_size")
    return batch, settings.get(PP + "pp_microbatch_size") or 1


def _check_passes(settings: Given) -> Iterator[str]:
    """Yield an error if the samples of a pass are not divisible by the size of a micro batch.

    Source: pipelining/autopipeline.py: AutoPipeline.__init__; functional.py:
    build_pipeline_schedule.
    """
    batch, micro = samples_per_pass(settings)
    if batch is not None and batch % micro:
        where = (
            "step_scheduler.local_batch_size"
            if "step_scheduler.local_batch_size" in settings
            else PP + "pp_batch_size"
        )
        yield f"{where}: found {batch}, expected a multiple of pp_microbatch_size ({micro})"


def _check_microbatches(settings: Given, release: Release, kind: Schedule) -> Iterator[str]:
    """Yield an error if the number of micro batches in a pass does not fit the schedule.

    recipes/llm/train_ft.py needs one micro batch for each rank. Some of torch's schedules need
    rounds with equal numbers of micro batches, and DualPipeV needs two micro batches for each rank.
    """
    batch, micro = samples_per_pass(settings)
    count, ranks = (batch // micro if batch else None), size(settings, "pp_size")
    if count is None or "step_scheduler.local_batch_size" not in settings:
        return
    if count < ranks and (release.since("0.2.0") or kind.ours == "1f1b"):
        need = f"expected at least pp_size ({ranks}); raise local_batch_size to {ranks * micro} or more"
        yield (
            f"step_scheduler.local_batch_size: {batch} samples make {count} micro batches of"
            f" {micro}, {need}"
        )
    # torch's schedule makes count // ranks rounds and needs equal ones; a CSV file replaces it.
    elif kind.rounds and count % max(1, count // ranks) and PP + "pp_schedule_csv" not in settings:
        yield (
            f"step_scheduler.local_batch_size: {count} micro batches do not fill the {count // ranks} rounds that "
            f"{kind.name} makes for {ranks} ranks; use a multiple of {ranks} micro batches"
        )
    elif kind.name == "DualPipeV" and count < 2 * ranks:
        yield f"step_scheduler.local_batch_size: {count} micro batches, expected at least 2 x pp_size ({2 * ranks}) for DualPipeV"


def _check_split(settings: Given, kind: Schedule) -> Iterator[str]:
    """Yield every error in the split of the model into stages. Some errors are only found if the
    recipe has the number of layers.

    Source: functional.py: split_model_into_stages.
    """
    ranks, parts, layers = (
        size(settings, "pp_size"),
        settings.get(PP + "module_fqns_per_model_part"),
        settings.get(LAYERS),
    )
    if parts is not None:
        yield from (
            f"{PP}module_fqns_per_model_part: {problem}"
            for problem in _check_parts(parts, ranks, layers, kind)
        )
    if settings.get("model.config.tie_word_embeddings"):
        yield (
            "model.config.tie_word_embeddings: found true, but a pipeline cannot tie embeddings;"
            " set it to false"
        )
    if layers is None:
        return
    per_stage, rounding = (
        settings.get(PP + "layers_per_stage"),
        settings.get(PP + "round_virtual_stages_to_pp_multiple"),
    )
    try:
        # AutoModel counts the stages even if the recipe names the
        # parts, and stops if the numbers do not fit.
        if parts is not None:
            number(layers, per_stage, ranks, kind, rounding)
        else:
            count_stages(layers, per_stage, ranks, kind, rounding)
    except BridgeError as error:
        yield from (PP + problem for problem in error.problems)


def _check_parts(
    parts: tuple[tuple[str, ...], ...], ranks: int, layers: int | None, kind: Schedule
) -> Iterator[str]:
    """Yield an error for each list of module names (part) that AutoModel refuses, or with which
    AutoModel silently drops layers.
    """
    if not parts or len(parts) % ranks:
        yield f"found {len(parts)} parts, expected a multiple of pp_size ({ranks})"
    elif kind.single and len(parts) != ranks:
        yield (
            f"found {len(parts)} parts, expected {ranks}: {kind.name} runs one part on each rank"
            " and leaves out the others"
        )
    elif kind.pair and len(parts) != 2 * ranks:
        yield f"found {len(parts)} parts, expected {2 * ranks} for {kind.name}"
    ends, twice = boundaries(parts), find_repeats(parts)
    if twice:
        yield f"found {', '.join(twice[:3])} in more than one part; name each layer once"
    elif ends is None:
        yield (
            "expected all decoder layers in order, as model.layers.0, model.layers.1; AutoModel"
            " leaves out layers that are not named"
        )
    elif layers is not None and ends[-1] != layers:
        yield f"found {ends[-1]} layers, expected {layers} as in {LAYERS}"


def _check_steps(settings: Given, world_size: int | None) -> Iterator[str]:
    """Yield an error if the global batch is not a whole number of passes on every data rank
    (training/step_scheduler.py: StepScheduler.__init__).
    """
    total, local = (
        settings.get(f"step_scheduler.{name}_batch_size") for name in ("global", "local")
    )
    data = data_ranks(settings, world_size)
    if total and local and data and total % (local * data):
        yield (
            f"step_scheduler.global_batch_size: found {total}, expected a multiple of local_batch_size ({local}) "
            f"x data ranks ({data})"
        )


def _learning_rate(settings: Given) -> Iterator[str]:
    """Yield every error in the learning-rate schedule (optim/scheduler.py:
    OptimizerParamScheduler.__init__).
    """
    section = {
        path.partition(".")[2]: value
        for path, value in settings.items()
        if path.startswith("lr_scheduler.")
    }
    if not section:
        return
    values = learning_rate(settings)
    peak, warmup, decay = (values[name] for name in ("max_lr", "lr_warmup_steps", "lr_decay_steps"))
    for name in ("init_lr", "min_lr"):
        if peak is not None and values[name] is not None and values[name] > peak:
            yield f"lr_scheduler.{name}: found {values[name]:g}, expected at most the peak ({peak:g})"
    if warmup is not None and decay is not None and warmup >= decay:
        yield f"lr_scheduler.lr_warmup_steps: found {warmup}, expected fewer than the steps of the schedule ({decay})"
    first, last = values["start_wd"], values["end_wd"]
    ramp = section.get("wd_incr_style", "constant") != "constant"
    if first is not None and last is not None and (first > last or (first < last and not ramp)):
        limit = f"at most end_wd ({last:g})" if ramp else "the same without a wd_incr_style"
        yield f"lr_scheduler.start_wd: found {first:g} with end_wd {last:g}, expected {limit}"
    if section.get("lr_decay_style") == "WSD" and "wsd_decay_steps" not in section:
        yield (
            "lr_scheduler.wsd_decay_steps: missing; WSD needs the length of its final decay; set it"
        )
    # get_lr finds no shape for the decay, but only in the first step that decays.
    if (
        section.get("lr_decay_style") == "WSD"
        and section.get("lr_wsd_decay_style") is None
        and section.get("wsd_decay_steps")
    ):
        yield (
            "lr_scheduler.lr_wsd_decay_style: missing; without it training stops when WSD's final"
            " decay starts; set it"
        )
    if section.get("override_opt_param_scheduler") and section.get(
        "use_checkpoint_opt_param_scheduler", True
    ):
        yield (
            "lr_scheduler.override_opt_param_scheduler: excludes"
            " use_checkpoint_opt_param_scheduler; set use_checkpoint_opt_param_scheduler to false"
        )


def learning_rate(settings: Given) -> dict[str, Any]:
    """Return the settings of the learning-rate schedule, with values that AutoModel computes
    (optim/optimizer.py, LRSchedulerConfig.build).

    If lr_decay_steps is not set, the decay ends at `max_steps`. Without `max_steps` the end of the
    decay depends on the data, and the result has None for `lr_decay_steps`.
    """
    # A recipe may leave out the optimizer; then only max_lr tells the learning rate.
    defaults = argument_defaults(settings.get("optimizer._target_"))
    base = settings.get(
        "optimizer.lr", defaults.get("optimizer.lr", settings.get("lr_scheduler.max_lr"))
    )
    decay = settings.get("optimizer.weight_decay", defaults.get("optimizer.weight_decay"))
    total = settings.get("lr_scheduler.lr_decay_steps") or settings.get("step_scheduler.max_steps")
    run = settings.get("step_scheduler.max_steps")
    usual = {
        "lr_decay_style": "cosine",
        "lr_decay_steps": total,
        "lr_warmup_steps": min(1000, run // 10) if run else None,
        "max_lr": base,
        "init_lr": None if base is None else base * 0.1,
        "min_lr": None if base is None else base * 0.01,
        "start_wd": decay,
        "end_wd": decay,
        "wd_incr_steps": run,
    }
    return {name: settings.get(f"lr_scheduler.{name}", value) for name, value in usual.items()}


# Values that AutoModel fills in

RAMP = ("start_wd", "end_wd", "wd_incr_")
"""Beginnings of the settings that say how weight decay changes over the steps."""


def _fill_defaults(
    settings: Given, release: Release, world_size: int | None, kind: str
) -> dict[str, Any]:
    values = {
        **release.defaults(""),
        **release.defaults(kind),
        **argument_defaults(settings.get("optimizer._target_")),
    }
    values |= settings
    if release.nests_pipeline:
        values[D + "strategy"] = kind
    # A model with random weights has no stored format to follow; it
    # starts in bf16 (_transformers/auto_model.py). Only from_config
    # takes a config that is made from a class or a model type.
    builder = settings.get(BUILT)
    anew = (
        str(builder).endswith(".from_config")
        if builder
        else any(settings.get(path) is not None for path in NAMED)
    )
    if settings.get("model.torch_dtype", "auto") == "auto" and anew:
        values["model.torch_dtype"] = "bf16"
    # Before 0.3.0 recipes clip at a constant and do not read the key.
    if not release.since("0.3.0"):
        values["clip_grad_norm.max_norm"] = 1.0
    data = data_ranks(settings, world_size)
    values |= {D + "dp_size": data} if data is not None else {}
    ramp = settings.get("lr_scheduler.wd_incr_style", "constant") != "constant"
    if any(path.startswith("lr_scheduler.") for path in settings):
        values |= {
            f"lr_scheduler.{name}": value
            for name, value in learning_rate(settings).items()
            if value is not None and (ramp or not name.startswith(RAMP))
        }
    if kind == "fsdp2":
        values |= _fsdp_formats(settings, release)
        # In a pipeline each micro batch would gather the weights
        # again (distributed/config.py: FSDP2Config).
        values[D + "reshard_after_forward"] = settings.get(
            D + "reshard_after_forward", not has_pipeline(settings)
        )
    return (
        {**values, **_pipeline_settings(settings, release, values)}
        if has_pipeline(settings)
        else values
    )


def _fsdp_formats(settings: Given, release: Release) -> dict[str, Any]:
    """Return the number formats of FSDP2: the given mixed-precision policy, or bf16 for all formats
    if there is no policy (distributed/config.py).
    """
    policy = D + "mp_policy."
    if not any(path.startswith(policy) for path in settings):
        return {path: value for path, value in release.policy.items() if value is not None}
    name = policy + "cast_forward_inputs"
    return {name: settings.get(name, release.policy[name])}


def _pipeline_settings(settings: Given, release: Release, values: Given) -> dict[str, Any]:
    """Return the pipeline settings with which a recipe starts. The batch size, the sequence length
    and the patch of the backward pass come from other sections of the recipe (llm/train_ft.py).
    """
    pipeline = {
        **release.defaults("pipeline"),
        **{path: value for path, value in settings.items() if path.startswith(PP)},
    }
    pipeline[PP + "pp_schedule"] = settings.get(PP + "pp_schedule", "1f1b")
    batch, micro = samples_per_pass(settings)
    packing = (settings.get("packed_sequence.*") or {}).get("packing_strategy")
    # Packed tokens without padding (thd) are split over context
    # ranks, which needs Transformer Engine.
    if (
        size(settings, "cp_size") > 1
        and settings.get("model.backend.attn") == "te"
        and packing == "thd"
    ):
        # Each micro batch becomes one packed row, so a pass has as many rows as micro batches.
        batch, micro = (batch // micro if batch else None), 1
    pipeline[PP + "pp_microbatch_size"] = micro
    if batch is not None:
        pipeline[PP + "pp_batch_size"] = batch
    if release.reads(PP + "patch_stage_backward_maybe_with_nosync"):
        patch = settings.get("model.backend.enable_fsdp_optimizations", False)
        pipeline[PP + "patch_stage_backward_maybe_with_nosync"] = patch
    # Stages send what a sharded module returns (recipes/_dist_utils.py, parse_distributed_section).
    output = values.get(D + "mp_policy.output_dtype") or values.get(D + "mp_policy.param_dtype")
    if PP + "dtype" not in pipeline and output is not None:
        pipeline[PP + "dtype"] = output
    length = next((settings[path] for path in SEQUENCE if settings.get(path)), None)
    if PP + "pp_seq_len" not in pipeline and length and release.reads(PP + "pp_seq_len"):
        pipeline[PP + "pp_seq_len"] = length
    return pipeline
