"""Computes the values that DeepSpeed would use for a config: fills in the release's defaults,
renames old keys, and derives values from other values.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bridge.errors import ConfigError
from bridge.stack.rules import Context
from compat.deepspeed.batch import check_mesh, solve
from compat.deepspeed.checks_view import (
    GATHER,
    LEAVES,
    MICRO,
    OFFLOAD,
    OLD_GATHER,
    PARAM,
    SCALE_KEYS,
    TOTAL,
    ZERO,
    Flat,
    Seen,
    form_of,
)
from compat.deepspeed.refusals import MODEL_INFO, REFUSALS, refuse_combinations
from compat.deepspeed.releases import Release, optional_section, release
from compat.deepspeed.value_types import typed


def effective(
    settings: Flat,
    version: str,
    world_size: int | None = None,
    partial: bool = False,
    later: frozenset[str] = frozenset(),
) -> dict[str, Any]:
    """Return the values by path that DeepSpeed `version` would use for `settings` on `world_size`
    ranks. Without a world size, assume the number of ranks that the batch keys imply, or the
    smallest possible number. With `partial` the batch keys may be missing, which DeepSpeed itself
    refuses; keys of `later` are still filled in, and may be missing as well.

    Raises `ConfigError` with every reason why DeepSpeed refuses the config.
    """
    at = release(version)
    problems = [
        f"{path}: DeepSpeed {at.version} does not read this key; drop the key, or name another"
        " release"
        for path in settings
        if path not in at.keys and not path.startswith("code.")
    ]
    problems += [*_find_wrong_types(settings), *_find_beyond_bounds(settings, at)]
    # The checks below compute with the values, so keys and types have to be right first.
    ConfigError.raise_if(problems)
    values = _fill_defaults(settings, at)
    view = Seen(values, settings, Context(version, world_size))
    problems += [
        *REFUSALS.refusal_lines(view),
        *refuse_combinations(view, later),
        *check_mesh(values, world_size),
    ]
    if not (partial and settings.get(TOTAL) is None and settings.get(MICRO) is None):
        problems += solve(values, settings, at, world_size)
    ConfigError.raise_if(problems)
    return values


# Keys, types and bounds of the release


def _find_wrong_types(settings: Flat) -> Iterator[str]:
    for path, value in settings.items():
        try:
            if value is not None:
                typed(path, value)
        except (KeyError, ValueError) as error:
            yield f"{path}: {error}" if isinstance(error, ValueError) else f"{path}: unknown key"


def _find_beyond_bounds(settings: Flat, at: Release) -> Iterator[str]:
    for path in at.bounds.keys() & settings.keys():
        for limit_text in at.bounds[path]:
            value, limit = settings[path], float(limit_text[1:])
            # A text such as "auto" has no size; whether the key takes it is a matter of its type.
            if not isinstance(value, str) and not (
                value > limit if limit_text[0] == ">" else value < limit
            ):
                yield f"{path}: found {value}, expected {limit_text[0]} {limit_text[1:]} in DeepSpeed {at.version}"


# Defaults and derived values


def _fill_defaults(settings: Flat, at: Release) -> dict[str, Any]:
    values = at.defaults.copy()
    # A section that DeepSpeed leaves at None, such as offload_param,
    # has defaults only once one of its keys is given.
    for section in dict.fromkeys(filter(None, map(optional_section, settings))):
        values.update(at.section_defaults(section))
    values.update(settings)
    # In this order: constructors are looked up by moved keys (offload
    # decides between them), and derivations by their names.
    _move_old_keys(values, at)
    _name_types(values, settings, at)
    _derive_values(values, settings, at)
    return values


def _move_old_keys(values: dict[str, Any], at: Release) -> None:
    """Replace old keys by new keys, as DeepSpeed does (runtime/config_utils.py, deprecated fields;
    runtime/precision_config.py, bf16).
    """
    for old, section in ((ZERO + "cpu_offload", OFFLOAD), (ZERO + "cpu_offload_param", PARAM)):
        if values.pop(old, None):
            # The old switch makes a whole section with the defaults
            # of the others; the new key beside it is refused.
            values.update({**at.section_defaults(section), section + ".device": "cpu"})
    if OLD_GATHER in values:
        old_gather = values.pop(OLD_GATHER)
        values[GATHER] = old_gather or values.get(GATHER, False)
    for path in [path for path in values if path.startswith("bfloat16.")]:
        values["bf16." + path.removeprefix("bfloat16.")] = values.pop(path)


def _name_types(values: dict[str, Any], settings: Flat, at: Release) -> None:
    """Replace the user's spellings of optimizer and scheduler types by DeepSpeed's own, and add the
    default arguments of these types.
    """
    for kind, section in (("optimizers", "optimizer"), ("schedulers", "scheduler")):
        name = values.get(section + ".type")
        if name is not None and (form := form_of(values, at, kind, name)):
            values[section + ".type"] = form.type
            for argument, default in (form.args or {}).items():
                path = f"{section}.params.{argument}"
                if default is not None and path in at.keys and path not in settings:
                    # The table is JSON, where betas are a list; the
                    # schema holds tuples, and values are compared.
                    values[path] = tuple(default) if isinstance(default, list) else default


def _derive_values(values: dict[str, Any], settings: Flat, at: Release) -> None:
    stage = values[ZERO + "stage"]
    if values.get(ZERO + "overlap_comm") is None:  # runtime/zero/config.py, overlap_comm_valid
        values[ZERO + "overlap_comm"] = stage == 3
    for name in LEAVES & values.keys():  # runtime/zero/leaf_module_config.py, _validate_entries
        values[name] = tuple(dict.fromkeys(values[name] or ()))
    if (
        values.get("autotuning.model_info") is not None
    ):  # autotuning/config.py, get_model_info_config
        values["autotuning.model_info"] = {**MODEL_INFO, **values["autotuning.model_info"]}
    if values["flops_profiler.enabled"]:  # runtime/config.py, _initialize_params
        values["wall_clock_breakdown"] = True
    if values.get("optimizer.type") in ("adam", "adamw"):
        _set_adam(values, settings)
    _reset_half_precision(values, settings, at)
    if (
        not at.since("0.17.1")
        and not any(path in settings for path in SCALE_KEYS)
        and values["fp16.enabled"]
        and stage > 0
    ):
        # runtime/fp16/loss_scaler.py, CreateLossScaler: no scaling key at all means the scaler's own defaults
        values.update({"fp16.initial_scale_power": 32, "fp16.hysteresis": 1})
    for size in ("tensor_parallel", "pipeline_stages", "context_parallel", "expert_parallel"):
        values.setdefault(f"code.{size}", 1)


def _reset_half_precision(values: dict[str, Any], settings: Flat, at: Release) -> None:
    """Reset settings that DeepSpeed ignores: settings for half precision in an fp32 run, and
    settings of sections that the config does not contain (runtime/config.py).
    """
    norm, master = "optimizer.params.max_grad_norm", "fp16.fp16_master_weights_and_grads"
    if (
        not values["fp16.enabled"] and not at.since("0.19.6") and values.get(norm, 0) > 0
    ):  # _do_warning_check
        values[norm] = 0.0
    if not values["fp16.enabled"] and not at.since(
        "0.17.1"
    ):  # get_fp16_master_weights_and_grads_enabled
        values[master] = False
    if not at.since("0.17.1") and not any(
        path.startswith(("bf16.", "bfloat16.")) for path in settings
    ):
        values["bf16.immediate_grad_update"] = False  # get_bfloat16_immediate_grad_update


def _set_adam(values: dict[str, Any], settings: Flat) -> None:
    """Set adam_w_mode and the default of weight_decay as DeepSpeed does: type AdamW always
    decouples weight decay, and PyTorch's AdamW has a default of 0.01 (runtime/engine.py).
    """
    mode, decay = "optimizer.params.adam_w_mode", "optimizer.params.weight_decay"
    if values["optimizer.type"] == "adamw":
        values[mode] = True
    if values.get("optimizer.params.torch_adam") and decay not in settings:
        values[decay] = 0.01 if values[mode] else 0.0
