"""Combinations of settings that DeepSpeed refuses when it reads a config. Each check names the
statement in DeepSpeed's source that refuses the combination.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from bridge.errors import nearest
from bridge.stack.check_tables import Checks
from bridge.stack.checks import Check
from bridge.stack.rules import Effect
from compat.deepspeed.checks_view import GATHER, OFFLOAD, OLD_GATHER, PARAM, ZERO, Seen, form_of
from compat.deepspeed.releases import RELEASES, Release

CONFIG = "runtime/config.py, _do_error_check"
FP16_MASTER, BF16_MASTER = (f"{name}.{name}_master_weights_and_grads" for name in ("fp16", "bf16"))
ANY_STAGE = "this key needs zero_optimization.stage 1, 2 or 3"
ANY_STAGE_NAME = "needs-zero_optimization-stage-1-2"
AUTOTP = "tensor_parallel.autotp_size"
SAMPLING = "data_efficiency.data_sampling"


def _refuse(
    path: str,
    when: Callable[[Seen], object],
    message: str,
    place: str,
    since: str = "",
    until: str = "",
    name: str = "",
) -> Check:
    return Check(path, when, message, Effect.STOPS, place, since, until, name=name)


def _scales_dynamically(view: Seen) -> bool:
    # A loss_scale of 0, the default, means dynamic scaling.
    return bool(view["fp16.enabled"]) and not view["fp16.loss_scale"]


def _without_norm(other: Callable[[Seen], object]) -> Callable[[Seen], object]:
    """Return a condition that holds if `compute_grad_norm` is false and `other` holds."""
    return lambda view: view[ZERO + "compute_grad_norm"] is False and other(view)


def _splits_tensors(view: Seen) -> bool:
    return (view[AUTOTP] or 0) > 1


def _require_switch(section: str) -> Check:
    """Return a check that holds if `section` lacks the key `enabled`, without which DeepSpeed
    fails.
    """
    return _refuse(
        f"{section}.enabled",
        lambda view: isinstance(view[section], Mapping) and "enabled" not in view[section],
        "missing; DeepSpeed stops with a KeyError without this key; add the key, or drop the"
        " section",
        "runtime/config.py, get_amp_params, get_pld_params and get_curriculum_params_legacy",
        name="missing-and-deepspeed-trips-on",
    )


def _require_key(section: str, name: str, word: str, place: str) -> Check:
    """Return a check that holds if `section` is enabled and lacks the key `name`. `word` is the
    last word of the check's id.
    """

    def lacks(view: Seen) -> bool:
        values = view[section] or {}
        return bool(values.get("enabled")) and name not in values

    return _refuse(
        section,
        lacks,
        f"the section is enabled without {name}; add {name}",
        f"runtime/data_pipeline/config.py, {place}",
        name=f"enabled-without-{name}-add-{word}",
    )


TECHNIQUES: Mapping[str, tuple[str, ...]] = {
    "weight_quantization": ("start_bits", "target_bits"),
    "activation_quantization": ("bits",),
    **dict.fromkeys(
        ("sparse_pruning", "row_pruning", "head_pruning", "channel_pruning"), ("dense_ratio",)
    ),
}
"""Maps each compression technique to the parameters that each of its groups needs."""


def _require_groups(technique: str, names: tuple[str, ...]) -> Iterator[Check]:
    """Yield two checks: one holds if a compression technique has no groups, the other if a group
    lacks a required parameter. DeepSpeed requires both even if the technique is not enabled.
    """
    path, place = "compression_training", f"compression/config.py, get_{technique}_different_groups"

    def groups(view: Seen) -> object:
        settings = (view[path] or {}).get(technique)
        return settings.get("different_groups") if isinstance(settings, Mapping) else {}

    def short(view: Seen) -> bool:
        rows = groups(view)
        if not isinstance(rows, Mapping):
            return rows is not None
        parameters = [
            group.get("params") if isinstance(group, Mapping) else None for group in rows.values()
        ]
        return any(
            not isinstance(one, Mapping) or any(key not in one for key in names)
            for one in parameters
        )

    message = f"{technique} has no different_groups; add different_groups, or drop {technique}"
    name = f"{technique}-without-different_groups-add-them"
    yield _refuse(path, lambda view: groups(view) is None, message, place, "", "0.19.7", name)
    message = (
        f"found {{{path}}}; a group of {technique} lacks {' or '.join(names)} in the"
        " group's params; add the missing key"
    )
    yield _refuse(path, short, message, place, until="0.19.7")


REFUSALS = Checks(
    RELEASES,
    # Precision and loss scaling
    _refuse(
        "fp16.enabled, bf16.enabled",
        lambda view: view["fp16.enabled"] and view["bf16.enabled"],
        "both are true, but a run has only one precision; switch one of the two off",
        "runtime/config.py, _initialize_params",
        name="both-are-true-expected-one",
    ),
    # Masters in half precision: stage 2 alone until 0.18.3, then every stage that shards.
    # Before 0.17.1 DeepSpeed reads the key only if fp16 is on, and since then in any case.
    _refuse(
        FP16_MASTER,
        lambda view: view[FP16_MASTER] and view["fp16.enabled"] and view.stage != 2,
        "needs zero_optimization.stage 2",
        CONFIG,
        until="0.17.1",
    ),
    _refuse(
        FP16_MASTER,
        lambda view: view[FP16_MASTER] and view.stage != 2,
        "needs zero_optimization.stage 2",
        CONFIG,
        since="0.17.1",
        until="0.18.3",
    ),
    _refuse(
        FP16_MASTER,
        lambda view: view[FP16_MASTER] and view.stage == 0,
        ANY_STAGE,
        CONFIG,
        since="0.18.3",
        name=ANY_STAGE_NAME,
    ),
    _refuse(
        BF16_MASTER,
        lambda view: view[BF16_MASTER] and view.stage == 0,
        ANY_STAGE,
        CONFIG,
        name=ANY_STAGE_NAME,
    ),
    _refuse(
        "bf16.bf16_optimizer_states",
        lambda view: view["bf16.bf16_optimizer_states"] and not (view[BF16_MASTER] and view.stage),
        "this key needs bf16.bf16_master_weights_and_grads and zero_optimization.stage 1, 2 or 3",
        CONFIG,
        name="needs-bf16-bf16_master_weights_and_grads-and-zero_optimization",
    ),
    _refuse(
        "fp16.loss_scale_window",
        lambda view: _scales_dynamically(view) and not view["fp16.loss_scale_window"],
        "found 0, expected at least 1 with dynamic loss scaling",
        "runtime/precision_config.py; before 0.19.3 a division by zero in runtime/fp16/loss_scaler.py",
    ),
    _refuse(
        "fp16.min_loss_scale",
        lambda view: _scales_dynamically(view) and not view["fp16.min_loss_scale"],
        "found 0, expected at least 1 with dynamic loss scaling",
        "runtime/precision_config.py, _validate_dynamic_loss_scale_params",
        since="0.19.3",
    ),
    # ZeRO
    _refuse(
        ZERO + "compute_grad_norm",
        _without_norm(lambda view: view.stage not in (1, 2)),
        "found false, which needs zero_optimization.stage 1 or 2; drop the key, or set the stage",
        "runtime/zero/config.py, compute_grad_norm_valid",
        name="false-needs-stage-1-or",
    ),
    _refuse(
        ZERO + "compute_grad_norm",
        _without_norm(lambda view: view.stage in (1, 2) and view["gradient_clipping"] > 0),
        "found false with gradient_clipping {gradient_clipping}; set gradient_clipping to 0",
        "runtime/zero/stage_1_and_2.py",
        name="false-needs-gradient_clipping-0-written",
    ),
    _refuse(
        OFFLOAD + ".ratio",
        lambda view: view.values.get(OFFLOAD + ".ratio", 1) < 1 and view.stage != 3,
        "found less than 1, which needs zero_optimization.stage 3; use 1, or stage 3",
        "runtime/zero/config.py, offload_ratio_check",
        name="less-than-1-needs-stage",
    ),
    _refuse(
        "gradient_allreduce_op",
        lambda view: view["gradient_allreduce_op"] == "sum" and view.stage == 3,
        "sum is not possible at zero_optimization.stage 3; use mean",
        CONFIG,
    ),
    _refuse(
        "gradient_allreduce_op",
        # A zenflow section fills in its topk_ratio; without one there is no value.
        lambda view: (
            view["gradient_allreduce_op"] == "sum" and ZERO + "zenflow.topk_ratio" in view.values
        ),
        "sum is not possible with zenflow; use mean",
        CONFIG,
    ),
    _refuse(
        "gradient_allreduce_op",
        lambda view: view["gradient_allreduce_op"] == "sum" and view["compile.deepcompile"],
        "sum is not possible with compile.deepcompile; use mean",
        CONFIG,
    ),
    # Axes
    _refuse(
        ZERO + "stage",
        lambda view: view.has_pipeline and view.stage >= 2,
        "DeepSpeed's pipeline engine refuses ZeRO stages 2 and 3; use 0 or 1",
        "runtime/pipe/engine.py, PipelineEngine.__init__",
        name="2-and-3-do-not",
    ),
    _refuse(
        AUTOTP,
        lambda view: _splits_tensors(view) and view.stage == 3,
        "AutoTP cannot be combined with zero_optimization.stage 3 before DeepSpeed 0.19.4; use a"
        " lower stage, or a later release",
        "runtime/engine.py",
        until="0.19.4",
        name="does-not-go-with-zero_optimization",
    ),
    _refuse(
        "tensor_parallel.tp.tp_size",
        lambda view: (
            _splits_tensors(view) and view["tensor_parallel.tp.tp_size"] not in (1, view[AUTOTP])
        ),
        "tp_size differs from tensor_parallel.autotp_size, and DeepSpeed uses only autotp_size;"
        " drop tp_size",
        "runtime/engine.py, _apply_autotp_partitioning",
        since="0.18.6",
        name="is-not-tensor_parallel-autotp_size-which",
    ),
    # Sections of their own
    _refuse(
        "aio.use_gds",
        lambda view: view["aio.use_gds"] and view["code.accelerator"] != "cuda",
        "use_gds needs a CUDA accelerator; switch use_gds off, or set code.accelerator to cuda",
        "runtime/swap_tensor/aio_config.py, get_aio_config",
        name="needs-a-cuda-accelerator-switch",
    ),
    _refuse(
        "expert_parallel.load_balance_coeff",
        lambda view: view["expert_parallel.load_balance_coeff"] is not None,
        "DeepSpeed supports only null for this key; drop the key",
        "module_inject/auto_ep_presets/base.py",
        name="only-null-is-supported-leave",
    ),
    _require_key(
        f"{SAMPLING}.curriculum_learning", "curriculum_metrics", "them", "get_curriculum_learning"
    ),
    _require_key(f"{SAMPLING}.dynamic_batching", "max_tokens", "it", "get_dynamic_batching"),
    *(
        check
        for technique, requirements in TECHNIQUES.items()
        for check in _require_groups(technique, requirements)
    ),
    *map(_require_switch, ("amp", "progressive_layer_drop", "curriculum_learning")),
    _refuse(
        "compile.passes",
        lambda view: "autotp" in (view["compile.passes"] or ()),
        "DeepSpeed has the pass autotp only from 0.19.6 on; drop autotp from the list",
        "compile/config.py, PassName",
        until="0.19.6",
        name="autotp-is-a-pass-since",
    ),
    _refuse(
        "elasticity",
        lambda view: (view["elasticity"] or {}).get("enabled"),
        "elasticity is enabled, so the batch would be chosen at launch, which stagebridge does"
        " not support; set the batch keys that DeepSpeed would choose, and drop the section",
        "elasticity/elasticity.py, compute_elastic_config",
        name="enabled-so-the-batch-would",
    ),
    _refuse(
        "scheduler.params.warmup_num_steps",
        lambda view: (
            (view["scheduler.type"] or "").startswith("Warmup")
            and view["scheduler.params.warmup_num_steps"] == 0
        ),
        "found 0, expected at least 1",
        "runtime/lr_schedules.py",
        since="0.19.3",
    ),
    _refuse(
        "code.context_parallel",
        lambda view: (
            view.has_pipeline
            and max(view["code.context_parallel"], view["sequence_parallel_size"]) > 1
        ),
        "a pipeline has no groups of sequence-parallel ranks; DeepSpeed counts these ranks as"
        " data-parallel, so the batch sizes do not agree; use data parallelism instead",
        "runtime/pipe/topology.py: PipelineParallelGrid; runtime/config.py: _batch_assertion",
    ),
)
"""Checks of combinations that DeepSpeed refuses. The `place` of each check is the statement in
DeepSpeed's code that refuses the combination.
"""


def refuse_combinations(view: Seen, later: frozenset[str] = frozenset()) -> Iterator[str]:
    """Yield a message for every combination that DeepSpeed refuses and no row of `REFUSALS` has. Keys of `later`
    are still filled in.
    """
    yield from _find_twice(view)
    # autotuning.model_info takes four names (autotuning/config.py, get_model_info_config).
    for name in view.given.get("autotuning.model_info") or ():
        if name not in MODEL_INFO:
            yield f"autotuning.model_info.{name}: unknown key{nearest(str(name), MODEL_INFO)}"
    yield from _find_wrong_arguments(view, later)


def _find_twice(view: Seen) -> Iterator[str]:
    """Yield a problem for each old key that is given together with its new key
    (runtime/config_utils.py, _process_deprecated_field).
    """
    for old, section in ((ZERO + "cpu_offload", OFFLOAD), (ZERO + "cpu_offload_param", PARAM)):
        if old in view.given and view.wrote(section):
            yield f"{old}: the config also has {section}, which replaces {old}; drop {old}"
    if view.wrote("bfloat16") and view.wrote("bf16"):
        yield (
            "bfloat16: the config also has bf16, which takes precedence; keep only one of the"
            " two sections"
        )
    if OLD_GATHER in view.given and GATHER in view.given:
        yield (
            f"{OLD_GATHER}: the config also has {GATHER}, which replaces {OLD_GATHER}; drop"
            f" {OLD_GATHER}"
        )


MODEL_INFO = {"profile": False, "num_params": None, "hidden_size": None, "num_layers": None}
"""The keys that DeepSpeed reads in autotuning.model_info, with their defaults."""


def strange(settings: Mapping[str, Any], at: Release) -> Iterator[str]:
    """Yield the paths of optimizer and scheduler arguments in `settings` that the chosen type does not
    take.
    """
    for section in ("optimizer", "scheduler"):
        prefix, name = f"{section}.params.", settings.get(f"{section}.type")
        names = at.arguments(f"{section}s", name) if isinstance(name, str) else None
        if names is not None:
            mine = (path for path in settings if path.startswith(prefix))
            yield from (path for path in mine if path.removeprefix(prefix) not in names)


def _find_wrong_arguments(view: Seen, later: frozenset[str]) -> Iterator[str]:
    """Yield a problem for each argument that the chosen optimizer or scheduler does not take, and
    for each argument that the scheduler requires and the config lacks (runtime/lr_schedules.py).
    """
    for path in strange(view.given, view.at):
        name = view.given[path.replace(".params", ".type").rpartition(".")[0]]
        yield f"{path}: {name} does not take this argument; drop the argument"
    form = form_of(view.values, view.at, "schedulers", view["scheduler.type"] or "")
    for argument in form.required if form else ():
        path = f"scheduler.params.{argument}"
        if form and path not in view.given and path not in later:
            yield f"{path}: missing, but {form.type} requires this argument; add it"
