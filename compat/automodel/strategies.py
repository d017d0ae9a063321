"""Hypothesis strategies for AutoModel recipes: meshes, batches and pipelines that fit together, and
every setting of each release.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from math import prod
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from bridge.plan.families import FAMILIES
from bridge.plan.section import fields
from bridge.stack.dialect import Config
from bridge.testing.models import KEYS, of_family
from bridge.testing.strategies import (
    Group,
    StrategyCase,
    StrategyPart,
    values as typed_values,
    words,
)
from compat.automodel.effective import EXPERTS
from compat.automodel.formats import nest_recipe, place_of
from compat.automodel.releases import release
from compat.automodel.rules.learning_rate import LAST
from compat.automodel.rules.model import CLASS, MODULE, NAMED, TYPE, C
from compat.automodel.rules.optimizers import CLASSES, TAKING, argument_defaults, is_fused
from compat.automodel.rules.pipeline import AUTOPIPELINE
from compat.automodel.rules.switches import BUFFERS, RECIPES, TE
from compat.automodel.rules.table import MANAGERS
from compat.automodel.rules.weight_decay import GROUPS, SPARED
from compat.automodel.schedules import SCHEDULES
from compat.automodel.schema import AutoModel
from compat.automodel.virtual_stages import stage_modules

Groups = SearchStrategy[Group]
RATED = {"pattern": "embed_tokens", "lr_mult": 0.5}
"""Optimizer settings with a separate learning rate for the embedding."""
SIZED = (
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_size",
    "vocab_size",
    "intermediate_size",
    *EXPERTS,
)
"""Keys of the model's config whose values must be divisible by a number of ranks."""
D, PP, L = "distributed.", "distributed.pipeline.", "lr_scheduler."
LAYERS = "model.config.num_hidden_layers"
SMALL = st.integers(1, 6)
RATE = st.floats(1e-6, 1e-2)
RUNS = tuple(kind for kind in SCHEDULES.values() if not kind.abstract)


def _draw_field(path: str) -> SearchStrategy[Any]:
    return OWN[path] if path in OWN else typed_values(fields(AutoModel)[path].annotation)


def _draw_group(must: Mapping[str, SearchStrategy[Any]], *may: str) -> Groups:
    return st.fixed_dictionaries(dict(must), optional={path: _draw_field(path) for path in may})


# Core


@st.composite
def core(draw: DrawFn, case: StrategyCase) -> Sequence[Group]:
    """Draw the strategy, mesh and batch, followed by groups of settings. Settings of one group fit
    together.
    """
    # FSDP2 has most of the axes and options, so most recipes have it.
    kind = draw(st.sampled_from(("fsdp2", "fsdp2", "fsdp2", "fsdp2", "megatron_fsdp", "ddp")))
    sizes = _draw_sizes(draw, case, kind)
    ranks = sizes["pp_size"]
    pipeline = _draw_pipeline(draw, case, ranks) if ranks > 1 else {}
    # Before 0.3.0 the manager class told the strategy.
    strategy = (
        {D + "strategy": kind}
        if release(case.version).nests_pipeline
        else {D + "_target_": MANAGERS[kind]}
    )
    first = {**strategy, **{D + name: size for name, size in sizes.items() if size > 1}, **pipeline}
    split = [draw(_draw_split(ranks, pipeline[PP + "pp_schedule"]))] if ranks > 1 else []
    return [
        {**first, **_draw_batch(draw, case, sizes, first)},
        *split,
        _draw_widths(draw, sizes),
        *draw(_draw_model(ranks > 1)),
        *(draw(choice(case.version)) for choice in CHOICES),
    ]


AXES: Mapping[str, tuple[str, ...]] = {
    "fsdp2": ("tp_size", "cp_size", "pp_size"),
    "megatron_fsdp": ("tp_size", "cp_size"),
    "ddp": (),
}


def _draw_sizes(draw: DrawFn, case: StrategyCase, kind: str) -> dict[str, int]:
    ranks, sizes = case.world_size or draw(st.sampled_from((1, 2, 4, 8, 16))), {"pp_size": 1}
    for axis in draw(st.permutations(AXES[kind])):
        sizes[axis] = draw(st.sampled_from([size for size in (1, 2, 3, 4, 8) if ranks % size == 0]))
        ranks //= sizes[axis]
    explicit = case.world_size is None or draw(st.booleans())
    if kind == "fsdp2":
        sizes["ep_size"] = draw(st.sampled_from([size for size in (1, 2, 4) if ranks % size == 0]))
        sizes["dp_replicate_size"] = draw(
            st.sampled_from([size for size in (1, 2) if ranks % size == 0 and size < ranks] or [1])
        )
    world = {"world_size": case.world_size} if case.world_size and draw(st.booleans()) else {}
    return {**sizes, **({"dp_size": ranks} if explicit else {}), **world}


def _draw_widths(draw: DrawFn, sizes: Mapping[str, int]) -> Group:
    """Draw the model's config, with some of the model's sizes."""
    kv = sizes.get("tp_size", 1) * draw(st.sampled_from((1, 2)))
    heads = kv * draw(st.sampled_from((1, 4)))
    config = {
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "hidden_size": 128 * heads,
        "vocab_size": 32000,
    }
    experts = {
        draw(st.sampled_from(EXPERTS)): sizes.get("ep_size", 1) * draw(st.sampled_from((2, 4)))
    }
    widths = draw(
        st.sampled_from(({}, {}, config, {**config, **experts, "intermediate_size": 512 * heads}))
    )
    return {f"model.config.{name}": size for name, size in widths.items()}


@st.composite
def _draw_model(draw: DrawFn, layers: bool) -> Sequence[Group]:
    """Draw a complete model config for some recipes: a config class, and keys that its family
    reads.
    """
    name = draw(st.sampled_from((*("",) * 120, *FAMILIES)))
    if not name:
        return ()
    first, *more = draw(of_family(name, without=(*SIZED, "tie_word_embeddings")))
    kind = {CLASS: MODULE + FAMILIES[name].config} if FAMILIES[name].config else {TYPE: name}
    groups = ({} if layers else first, *more)
    return [kind, *({C + key: value for key, value in group.items()} for group in groups)]


def _draw_pipeline(draw: DrawFn, case: StrategyCase, ranks: int) -> dict[str, Any]:
    kind = draw(st.sampled_from(RUNS))
    old = {} if release(case.version).nests_pipeline else {"autopipeline._target_": AUTOPIPELINE}
    return {
        **old,
        PP + "pp_schedule": draw(st.sampled_from((kind.name, kind.name.lower()))),
        PP + "pp_microbatch_size": draw(SMALL),
    }


def _draw_batch(draw: DrawFn, case: StrategyCase, sizes: Mapping[str, int], first: Group) -> Group:
    """Draw batch sizes that consist of whole micro batches, rounds and passes."""
    others = prod(sizes.get(axis, 1) for axis in ("tp_size", "cp_size", "pp_size"))
    data = sizes.get("dp_size") or (case.world_size or others) // others
    micro, ranks = first.get(PP + "pp_microbatch_size", 1), sizes["pp_size"]
    # Twice the ranks fill the rounds of every schedule; DualPipeV needs as many.
    local = micro * 2 * ranks * draw(SMALL) if ranks > 1 else draw(SMALL)
    total = {"step_scheduler.global_batch_size": local * data * draw(SMALL)}
    return {"step_scheduler.local_batch_size": local, **draw(st.sampled_from((total, total, {})))}


@st.composite
def _draw_split(draw: DrawFn, ranks: int, name: str) -> Group:
    """Draw the split of layers into stages: the default, a number of layers per stage, or module
    names.
    """
    kind = SCHEDULES[name.lower()]
    virtual = 1
    if not kind.single:
        virtual = 2 if kind.pair else draw(st.sampled_from((2, 2, 3, 4)))
    size = draw(SMALL)
    # The last stage may have fewer layers, but it has at least one.
    layers = ranks * virtual * size - draw(st.integers(0, size - 1))
    depth = draw(st.sampled_from(({LAYERS: layers}, {LAYERS: layers}, {})))
    rounding = draw(
        st.sampled_from(
            (
                {},
                {PP + "round_virtual_stages_to_pp_multiple": "up"},
                {PP + "round_virtual_stages_to_pp_multiple": "down"},
            )
        )
    )
    cuts = tuple(range(0, ranks * virtual * size + 1, size))
    return draw(
        st.sampled_from(
            (
                depth,
                {**depth, PP + "layers_per_stage": size, **rounding},
                {PP + "layers_per_stage": size, **rounding},
                {PP + "module_fqns_per_model_part": stage_modules(cuts)},
            )
        )
    )


def _arguments(target: str) -> tuple[str, ...]:
    """Return the settings to draw for the optimizer class `target`: arguments and switches of the
    class, and the parameter groups.
    """
    switches = (
        ["bias_correction", "exp_avg_dtype", "exp_avg_sq_dtype"]
        if is_fused(target)
        else [name for name in ("nesterov", "amsgrad") if CLASSES[target].ours in TAKING[name]]
    )
    kernels = (
        ("foreach", "fused")
        if target in ("torch.optim.Adam", "torch.optim.AdamW", "torch.optim.SGD")
        else ()
    )
    return (
        *argument_defaults(target),
        *(f"optimizer.{name}" for name in (*switches, *kernels)),
        GROUPS,
    )


@cache
def _draw_optimizer(version: str) -> Groups:
    rows = [
        _draw_group({"optimizer._target_": st.just(target)}, *_arguments(target))
        for target in CLASSES
    ]
    return st.one_of(
        st.just({}),
        _draw_group({"optimizer._target_": st.just("dion.Dion")}, "optimizer.lr", "optimizer.*"),
        *rows,
    )


@cache
def _draw_schedule(version: str) -> Groups:
    steps = {
        L + "lr_warmup_steps": st.integers(0, 9),
        L + "lr_decay_steps": st.integers(10, 999),
        "optimizer.lr": st.just(0.01),
    }
    return st.one_of(
        st.just({}),
        _draw_group(
            {
                L + "lr_decay_style": _draw_field(L + "lr_decay_style"),
                "step_scheduler.max_steps": st.integers(1, 999),
            }
        ),
        st.fixed_dictionaries(
            {L + "lr_decay_style": _draw_field(L + "lr_decay_style"), **steps},
            optional={L + "min_lr": RATE, L + "init_lr": RATE},
        ),
        _draw_group(
            {
                L + "lr_decay_style": st.just("WSD"),
                L + "wsd_decay_steps": st.integers(0, 9),
                LAST: _draw_field(LAST),
            },
            L + "lr_decay_steps",
        ),
        _draw_group({L + "max_lr": RATE}),
    )


@cache
def _draw_precision(version: str) -> Groups:
    policy = D + "mp_policy."
    return st.one_of(
        st.just({}),
        _draw_group(
            {"model.torch_dtype": _draw_field("model.torch_dtype")},
            policy + "param_dtype",
            policy + "reduce_dtype",
            policy + "output_dtype",
        ),
        _draw_group(
            {policy + "param_dtype": _draw_field(policy + "param_dtype")},
            policy + "cast_forward_inputs",
            policy + "_target_",
            "model.torch_dtype",
        ),
        _draw_group(
            {"model.torch_dtype": _draw_field("model.torch_dtype")},
            D + "preserve_fp32_weights",
            D + "grad_reduce_in_fp32",
        ),
        _draw_group({D + "autocast_dtype": _draw_field(D + "autocast_dtype")}, "model.torch_dtype"),
    )


@cache
def _draw_sharding(version: str) -> Groups:
    return st.one_of(
        st.just({}),
        _draw_group({D + "reshard_after_forward": st.booleans()}, D + "offload_policy.pin_memory"),
        _draw_group(
            {D + "zero_dp_strategy": _draw_field(D + "zero_dp_strategy")},
            D + "overlap_grad_reduce",
            D + "overlap_param_gather",
            *BUFFERS,
        ),
        _draw_group({D + "activation_checkpointing": _draw_field(D + "activation_checkpointing")}),
    )


@cache
def _draw_products(version: str) -> Groups:
    """Draw FP8 settings of torchao or Transformer Engine, or low-rank adapters. Most recipes get
    none of these.
    """
    none: tuple[Groups, ...] = (st.just({}),) * 6
    torchao = _draw_group(
        {"fp8.enabled": st.booleans()}, "fp8.recipe_name", "fp8.enable_fsdp_float8_all_gather"
    )
    adapters = _draw_group({"peft.dim": st.sampled_from((8, 16))}, "peft.alpha", "peft.dropout")
    return st.one_of(
        *none,
        _draw_group({TE + "recipe": _draw_field(TE + "recipe")}, "model.backend.linear"),
        torchao,
        adapters,
    )


CHOICES = (_draw_optimizer, _draw_schedule, _draw_precision, _draw_sharding, _draw_products)

# Single settings

RESERVED = (
    *(
        D + name
        for name in (
            "strategy",
            "_target_",
            "dp_",
            "tp_size",
            "pp_size",
            "cp_size",
            "ep_size",
            "world_size",
        )
    ),
    *(
        PP + name
        for name in ("pp_schedule", "layers_per_stage", "round_", "module_fqns_", "pp_microbatch_")
    ),
    *("autopipeline._target_", "step_scheduler.global_", "step_scheduler.local_", "optimizer."),
    # Without a format of the weights, a policy leaves open what a plan cannot leave open.
    D + "mp_policy.",
    *(L + name for name in ("lr_", "max_lr", "min_lr", "init_lr", "wsd_")),
    *(C + name for name in SIZED),
    *(C + name for name in ("num_hidden_layers",)),
    *NAMED,
)
"""Settings that `core` draws, because their values depend on the number of ranks or layers, or on a
class that accepts only some arguments.
"""

SCOPES = st.lists(
    st.sampled_from(("language", "vision", "audio", "multimodal")),
    min_size=1,
    max_size=2,
    unique=True,
).map(tuple)
OWN: Mapping[str, SearchStrategy[Any]] = {
    "optimizer.lr": st.just(0.0) | RATE,
    GROUPS: st.sampled_from(
        (
            [dict(SPARED)],
            [{"pattern": "embed", "lr_mult": 0.5}],
            [dict(SPARED), dict(RATED), dict(RATED, pattern="lm_head")],
        )
    ),
    TE + "recipe": st.sampled_from(
        (*RECIPES, {"_target_": "transformer_engine.common.recipe.DelayedScaling"})
    ),
    "fp8.recipe_name": st.sampled_from(("tensorwise", "rowwise", "rowwise_with_gw_hp")),
    D + "activation_checkpointing_scope": SCOPES,
    # A plan cannot hold what another class does.
    D + "mp_policy._target_": st.just("torch.distributed.fsdp.MixedPrecisionPolicy"),
    PP + "pp_schedule_csv": words().map(lambda name: f"no such/{name.strip()}.csv"),
    **{C + name: strategy for name, strategy in KEYS.items()},
    "step_scheduler.preemption_signal": st.sampled_from(
        (15, ("SIGTERM",), ("SIGTERM", "SIGUSR1"), ())
    ),
}
"""Strategies for settings whose type alone does not tell which values AutoModel accepts."""


def paths(case: StrategyCase) -> Iterable[str]:
    """Return the settings that the release reads."""
    return settable(case.version)


@cache
def settable(version: str) -> tuple[str, ...]:
    """Return every setting that a recipe of the release can have, including settings that `core`
    draws.
    """
    return tuple(path for path in fields(AutoModel) if release(version).reads(path))


def values(case: StrategyCase, path: str) -> SearchStrategy[Any] | None:
    """Return the strategy for a setting whose values cannot be drawn from its type. None for all
    other settings.
    """
    return OWN.get(path)


BESIDE: Mapping[str, Group] = {
    PP + "pp_schedule_csv": {},
    "distributed.moe.reshard_after_forward": {},
    L + "override_opt_param_scheduler": {L + "use_checkpoint_opt_param_scheduler": False},
}
"""For each setting that only few recipes allow: the other settings that such a recipe needs. The
strategies draw the rare settings first.
"""


def source(config: Config) -> Group:
    """Return the recipe as nested mappings."""
    return nest_recipe(config.given, release(config.version))


def spell_path(config: Config, path: str) -> tuple[str, ...]:
    """Return the keys that lead to a setting in the layout of the recipe."""
    return place_of(path, config.given, release(config.version))


PART = StrategyPart(
    core,
    paths,
    values,
    beside=BESIDE,
    reserved=RESERVED,
    entries=("recipe",),
    source=source,
    spelled=spell_path,
)
