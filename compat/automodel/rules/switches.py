"""Rules for switches of a recipe that other stacks have too: FP8, adapters, formats of moments,
resumed runs, Megatron-FSDP's buffers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from bridge.stack.rules import EFFECTS, Context, Effect, Group, Rule, convert
from bridge.stack.words import effect_if, every, has_value, no, on, some
from compat.automodel.rules.learning_rate import SEES as SCHEDULE_SEES, writes_section
from compat.automodel.rules.optimizers import (
    CLASSES,
    HALVES,
    MOMENTS,
    TAKING,
    is_fused,
    needs_fused,
)
from compat.automodel.rules.pipeline import D
from compat.automodel.sharding import STRATEGY_SEES, runs_megatron_fsdp, strategy

# 8-bit products

BACKEND, TORCHAO = "model.backend.", "fp8."
TE = BACKEND + "te_fp8."
RECIPES = {
    "current": ("hybrid", "tensorwise"),
    "block": ("e4m3", "blockwise"),
    "mxfp8": ("e4m3", "mxfp8"),
}
"""Scaling recipes of Transformer Engine (common/recipe). Each has the plan's names for its number
format and its scaling.
"""
NAMED = {ours: theirs for theirs, (_, ours) in RECIPES.items()}
SINCE = {"mxfp8": "0.5.0"}
"""First release of each scaling recipe that AutoModel added later. Earlier releases read any
unknown name as "current".
"""
LINEAR = BACKEND + "linear"
GATHER = TORCHAO + "enable_fsdp_float8_all_gather"
TENSORWISE = (None, "tensorwise")
"""torchao's recipe "tensorwise", which is also its default."""


def _is_torchao(values: Group) -> bool:
    return bool(values.get(TORCHAO + "enabled"))


def _read_fp8(values: Group, context: Context) -> Group:
    # The section alone switches FP8 on, with the recipe "current"
    # (components/models/common/utils.py: TEFp8Config).
    recipe = values.get(TE + "recipe", "current" if values.get(TE + "*") else None)
    if isinstance(recipe, str) and not context.since(SINCE.get(recipe, "0.3.0")):
        recipe = "current"
    if recipe is not None:
        # A mapping is a recipe class of Transformer Engine with arguments, which no plan has.
        format_, scaling = (
            RECIPES.get(recipe, (None, None)) if isinstance(recipe, str) else (None, None)
        )
        return {
            "precision.fp8": format_,
            "precision.fp8_recipe": scaling,
            "precision.fp8_weights": False if format_ else None,
        }
    # torchao's other recipes scale by rows, which no plan has.
    if not _is_torchao(values) or values.get(TORCHAO + "recipe_name") not in TENSORWISE:
        return {}
    gathers = bool(values.get(GATHER))
    return {
        "precision.fp8": "hybrid",
        "precision.fp8_recipe": "tensorwise",
        "precision.fp8_weights": gathers,
    }


def _write_fp8(values: Group, context: Context) -> Group:
    recipe = NAMED.get(values.get("precision.fp8_recipe") or "")
    if not values.get("precision.fp8") or recipe is None:
        return {}
    # Only torchao gathers weights in FP8, and releases before
    # 0.3.0 have no section for Transformer Engine.
    if recipe == "current" and (values.get("precision.fp8_weights") or not context.since("0.3.0")):
        return {
            TORCHAO + "enabled": True,
            TORCHAO + "recipe_name": "tensorwise",
            GATHER: values.get("precision.fp8_weights"),
        }
    if not context.since(SINCE.get(recipe, "0.3.0")):
        return {}
    return {TE + "recipe": recipe, LINEAR: "te"}


def _has_no_twin(values: Group) -> bool:
    """Whether the recipe has FP8 settings that no plan can express. These are all settings of
    torchao, which also runs the output layer in FP8 but skips layers of odd widths, and all
    Transformer Engine recipes that `RECIPES` does not list.
    """
    recipe = values.get(TE + "recipe")
    return _is_torchao(values) or (
        recipe is not None and (not isinstance(recipe, str) or recipe not in RECIPES)
    )


FP8 = convert(
    (TE + "recipe", LINEAR, TORCHAO + "enabled", TORCHAO + "recipe_name", GATHER),
    ("precision.fp8", "precision.fp8_recipe", "precision.fp8_weights"),
    _read_fp8,
    _write_fp8,
    sees=(TE + "*",),
    carries={
        TE + "recipe": ("precision.fp8", "precision.fp8_recipe"),
        TORCHAO + "enabled": ("precision.fp8", "precision.fp8_recipe"),
        TORCHAO + "recipe_name": "precision.fp8_recipe",
        GATHER: "precision.fp8_weights",
        LINEAR: (),
    },
    blurs=_has_no_twin,
    mixed=True,
    effect=effect_if(some(has_value(TE + "recipe"), _is_torchao), Effect.NUMBERS, Effect.ROUNDING),
    note="the way in which linear layers are computed",
    lossy="Transformer Engine has recipes current, block and mxfp8, each in one format; only torchao gathers weights in FP8",
    source="components/models/common/utils.py: TEFp8Config; components/quantization/fp8.py: apply_fp8_to_model",
)

# Adapters

PEFT = "peft."
CLASS, REST = "nemo_automodel.components._peft.lora.PeftConfig", PEFT + "*"
ADAPTERS = {"dim": "rank", "alpha": "alpha", "dropout": "dropout"}
USUAL = {"dim": 8, "alpha": 32.0, "dropout": 0.0}
"""Defaults of PeftConfig (components/_peft/lora.py)."""
ALL = {"match_all_linear": True}
TARGETS: Mapping[str, tuple[str, ...]] = {
    "query": ("self_attn.q_proj",),
    "key": ("self_attn.k_proj",),
    "value": ("self_attn.v_proj",),
    "dense": ("self_attn.o_proj",),
    "mlp_in": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp_out": ("mlp.down_proj",),
    "output": (),
}
"""The modules of a block that a plan's name for adapted layers stands for; the output layer is outside of
the blocks.
"""
SIDE = "habits.adapter_dropout"
CHOICES = ("match_all_linear", "target_modules", "exclude_modules")
USUALLY = "*_proj"
"""Pattern of the adapted modules if a recipe names none (components/_peft/module_matcher.py)."""
BEFORE = {"dropout_position": "pre"}
"""Setting for the adapters of a plan. A plan has dropout on an adapter's input, but AutoModel's
default is dropout on the output.
"""


def _has_adapters(values: Group) -> bool:
    return any(values.get(PEFT + name) is not None for name in ("_target_", "*", *ADAPTERS))


def _write_adapters(values: Group, context: Context) -> Group:
    if values.get("adapters.rank") is None:
        return {}
    settings = {
        PEFT + theirs: values.get(f"adapters.{ours}", USUAL[theirs])
        for theirs, ours in ADAPTERS.items()
    }
    # AutoModel declares alpha as a whole number.
    if settings[PEFT + "alpha"] == int(settings[PEFT + "alpha"]):
        settings[PEFT + "alpha"] = int(settings[PEFT + "alpha"])
    rest = _write_targets(values.get("adapters.targets"))
    if settings[PEFT + "dropout"] and values.get(SIDE) != "output":
        rest |= BEFORE
    return {PEFT + "_target_": CLASS, **settings, REST: rest}


def _write_targets(targets: Collection[str] | None) -> dict[str, Any]:
    if targets is None or set(targets) == set(TARGETS):
        return dict(ALL)
    if set(targets) == set(TARGETS) - {"output"}:
        return {"target_modules": [USUALLY]}
    patterns = [f"*.{module.split('.')[1]}" for name in targets for module in TARGETS[name]]
    return {"target_modules": patterns + ["lm_head"] * ("output" in targets)}


def _adapter_layers(rest: Mapping[str, Any], block: int) -> tuple[set[str], set[str]]:
    """Return the plan's names for the layers with an adapter, and for those of which some modules have
    one and others do not, in one block.
    """
    targets, exclusions = (
        [names] if isinstance(names, str) else list(names or ())
        for names in (rest.get("target_modules"), rest.get("exclude_modules"))
    )

    def fits(patterns: Iterable[Any], module: str) -> bool:
        last = module.rpartition(".")[2]
        return any(last == name or fnmatchcase(module, str(name)) for name in patterns)

    def adapts(module: str) -> bool:
        if rest.get("match_all_linear"):
            return True
        if exclusions and not targets:
            return not fits(exclusions, module)
        return fits(targets or (USUALLY,), module)

    whole, parts = set[str](), set[str]()
    for name, modules in TARGETS.items():
        full = [f"model.layers.{block}.{module}" for module in modules] or ["lm_head"]
        on = [adapts(module) for module in full]
        if any(on):
            (whole if all(on) else parts).add(name)
    return whole, parts


def _dropout_side(values: Group) -> str | None:
    """Return the side of an adapter on which its dropout is; None without dropout."""
    if not values.get(PEFT + "dropout"):
        return None
    return "input" if (values.get(REST) or {}).get("dropout_position") == "pre" else "output"


def _read_targets(values: Group) -> tuple[str, ...] | None:
    whole, _ = _adapter_layers(values.get(REST) or {}, 0)
    return tuple(name for name in TARGETS if name in whole) or None


def _chooses_layers(values: Group) -> bool:
    """Whether a recipe has adapter settings that no plan can express: layers that differ between
    blocks, or other kinds of adapters.
    """
    rest = dict(values.get(REST) or {})
    first, other = _adapter_layers(rest, 0), _adapter_layers(rest, 1)
    whole = bool(first[0]) and not first[1] and first == other
    return _has_adapters(values) and not (whole and rest.keys() <= {*CHOICES, *BEFORE})


LORA = convert(
    (PEFT + "_target_", *(PEFT + name for name in ADAPTERS), REST),
    (*(f"adapters.{name}" for name in ADAPTERS.values()), "adapters.targets", SIDE),
    lambda values, context: (
        {
            **{
                f"adapters.{ours}": values.get(PEFT + theirs, USUAL[theirs])
                for theirs, ours in ADAPTERS.items()
            },
            "adapters.targets": _read_targets(values),
            SIDE: _dropout_side(values),
        }
        if _has_adapters(values)
        else {}
    ),
    _write_adapters,
    carries={
        **{PEFT + theirs: f"adapters.{ours}" for theirs, ours in ADAPTERS.items()},
        PEFT + "_target_": "adapters.rank",
        REST: ("adapters.targets", SIDE),
    },
    blurs=_chooses_layers,
    note="the layers with an adapter, and the form of the adapters",
    lossy="stagebridge translates adapters that are alike in all blocks",
    source="components/_peft/lora.py: PeftConfig, apply_lora_to_linear_modules",
)

# Formats of moments

FORMATS = tuple("optimizer." + name for name in ("exp_avg_dtype", "exp_avg_sq_dtype"))
WIDE = "fp32"
WEIGHTS, PRESERVES = "model.torch_dtype", "distributed.preserve_fp32_weights"


def _read_moments(values: Group, context: Context) -> Group:
    weights = None if values.get(PRESERVES) else values.get(WEIGHTS)
    # Only Transformer Engine's class takes these arguments; others would stop at them, and keep
    # their state in the format of the weights.
    if is_fused(values.get("optimizer._target_")):
        moments = tuple(values.get(path) or WIDE for path in FORMATS)
        return {MOMENTS: moments} if moments != (WIDE, WIDE) or weights in HALVES else {}
    entry = CLASSES.get(values.get("optimizer._target_") or "")
    adam = entry is not None and entry.ours in TAKING["bias_correction"]
    return {MOMENTS: (weights, weights)} if adam and weights in HALVES else {}


def _write_moments(values: Group, context: Context) -> Group:
    formats = values.get(MOMENTS) or (WIDE, WIDE)
    takes = needs_fused(values) and formats != (WIDE, WIDE)
    return dict(zip(FORMATS, formats, strict=True)) if takes else {}


MOMENT_FORMATS = convert(
    FORMATS,
    MOMENTS,
    _read_moments,
    _write_moments,
    effect=EFFECTS[MOMENTS],
    sees=(
        "optimizer._target_",
        "optimizer.name",
        "optimizer.bias_correction",
        WEIGHTS,
        PRESERVES,
        "precision.master",
    ),
    lossy="only Transformer Engine's FusedAdam can keep moments in another format than the weights",
    source="components/optim/optimizer.py: _DTYPE_FIELDS; torch/optim/adam.py: zeros_like the weights",
)

# The schedule of a resumed run

L = "lr_scheduler."
GIVEN, STORED, RESUMED = (
    L + "override_opt_param_scheduler",
    L + "use_checkpoint_opt_param_scheduler",
    "run.resumed_schedule",
)


def _read_resumed(values: Group, context: Context) -> Group:
    if L + "lr_decay_style" not in values:
        return {}
    if values.get(GIVEN):
        return {RESUMED: "given"}
    # Without either switch a checkpoint's values win; with the
    # second off, they have to equal the recipe's.
    return {RESUMED: "same" if values.get(STORED) is False else "checkpoint"}


def _write_resumed(values: Group, context: Context) -> Group:
    resumption = values.get(RESUMED)
    if resumption is None or not writes_section(values, context):
        return {}
    return {GIVEN: True if resumption == "given" else None, STORED: resumption == "checkpoint"}


RESUMING = convert(
    (GIVEN, STORED),
    RESUMED,
    _read_resumed,
    _write_resumed,
    effect=EFFECTS[RESUMED],
    sees=(L + "lr_decay_style", *SCHEDULE_SEES),
    lossy="a recipe without a schedule has no schedule to resume",
    source="components/optim/scheduler.py: OptimizerParamScheduler._check_and_set",
)

# Megatron-FSDP's buffers

BUFFERS = {
    D + "fsdp_double_buffer": "zero.double_buffer",
    D + "keep_fp8_transpose_cache": "zero.fp8_transposes",
    D + "nccl_ub": "zero.registered",
    D + "init_fsdp_with_meta_device": "zero.meta_init",
    D + "average_in_collective": "zero.average_in_collective",
}


def _switch_rule(theirs: str, ours: str) -> Rule:
    def write(values: Group, context: Context) -> Group:
        return (
            {theirs: True}
            if values.get(ours) and strategy(values, context) == "megatron_fsdp"
            else {}
        )

    def read(values: Group, context: Context) -> Group:
        return {ours: True} if values.get(theirs) and runs_megatron_fsdp(values) else {}

    return convert(
        theirs,
        ours,
        read,
        write,
        effect=EFFECTS[ours],
        sees=(D + "strategy", D + "_target_", *(path for path in STRATEGY_SEES if path != ours)),
        blurs=every(on(theirs), no(runs_megatron_fsdp)),
        lossy="only Megatron-FSDP has this switch",
        source="components/distributed/config.py: MegatronFSDPConfig",
    )


# Factors of groups of parameters stand with the decay of their weights (weight_decay.py)

RULES: tuple[Rule, ...] = (
    FP8,
    LORA,
    MOMENT_FORMATS,
    RESUMING,
    *(_switch_rule(theirs, ours) for theirs, ours in BUFFERS.items()),
)
