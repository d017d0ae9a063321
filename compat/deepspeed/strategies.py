"""Hypothesis strategies for DeepSpeed configs: batches, axes, optimizers and schedulers that are
consistent with each other, and keys of each release.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from math import prod
from types import MappingProxyType
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from bridge.plan.section import fields
from bridge.stack.dialect import Config
from bridge.testing.strategies import Group, StrategyCase, StrategyPart, values as typed_values
from compat.deepspeed.checks_view import MICRO, OFFLOAD, PARAM, STEPS, TOTAL, ZERO
from compat.deepspeed.releases import Type, release
from compat.deepspeed.schema import DeepSpeed

Groups = SearchStrategy[Group]
Drawn = Mapping[str, SearchStrategy[Any]]
EMPTY: Groups = st.just({})
AXES = ("code.tensor_parallel", "code.pipeline_stages", "code.context_parallel")
SMALL = st.integers(1, 8)
TRUE = st.just(True)
LIKELY = st.sampled_from((True, True, True, False))
POWER = st.integers(1, 24).map(lambda power: 2.0**power)


def _draw_field(path: str) -> SearchStrategy[Any]:
    return OWN[path] if path in OWN else typed_values(fields(DeepSpeed)[path].annotation)


@st.composite
def _draw_group(draw: DrawFn, must: Drawn, *may: str, own: Drawn = MappingProxyType({})) -> Group:
    """Draw a group of settings with all of the `must` keys and most of the `may` keys. `own` has
    strategies for keys whose type allows unsuitable values.
    """
    chosen = {path: own[path] if path in own else _draw_field(path) for path in may if draw(LIKELY)}
    return {path: draw(value) for path, value in {**must, **chosen}.items()}


# Core


@st.composite
def core(draw: DrawFn, case: StrategyCase) -> Sequence[Group]:
    """Draw the sizes of mesh axes and batches, and then groups of further settings. The settings
    within each group are consistent.
    """
    # Groups that the script builds are the common case, so they are drawn twice as often.
    axes = draw(
        st.sampled_from((_draw_script_sizes, _draw_script_sizes, _draw_autotp, _draw_mesh))
    )(draw, case)
    data = (
        axes.get("data_parallel_size")
        or (case.world_size or 1) // prod(axes.get(axis, 1) for axis in AXES)
        or 1
    )
    batch = draw(st.sampled_from(TRIANGLES))(draw(SMALL), draw(SMALL), data)
    return [{**axes, **batch}, *(draw(choice(case.version)) for choice in CHOICES)]


def _draw_script_sizes(draw: DrawFn, case: StrategyCase) -> dict[str, int]:
    """Draw the sizes of the tensor, pipeline and context axes, which the training script sets."""
    ranks, sizes = case.world_size or draw(st.sampled_from((1, 2, 4, 8))), {}
    for axis in AXES:
        sizes[axis] = draw(st.sampled_from([size for size in (1, 2, 3, 4, 8) if ranks % size == 0]))
        ranks //= sizes[axis]
    if sizes["code.pipeline_stages"] > 1:
        del sizes["code.context_parallel"]  # DeepSpeed's pipelines have no sequence-parallel groups
    return {axis: size for axis, size in sizes.items() if size > 1}


def _draw_autotp(draw: DrawFn, case: StrategyCase) -> dict[str, int]:
    """Draw the size of AutoTP's groups. DeepSpeed's batch equation ignores this size."""
    sizes = [size for size in (1, 2, 3, 4, 8) if (case.world_size or 1) % size == 0]
    size = draw(st.sampled_from(sizes))
    inner_size = (
        {"tensor_parallel.tp.tp_size": draw(st.sampled_from((1, size)))}
        if draw(st.booleans())
        else {}
    )
    return {"tensor_parallel.autotp_size": size, **inner_size}


def _draw_mesh(draw: DrawFn, case: StrategyCase) -> dict[str, int]:
    """Draw a mesh of data and sequence ranks that the config file sets. Before 0.17.0, DeepSpeed's
    batch equation ignores sequence ranks, so all ranks are data ranks.
    """
    world = case.world_size or draw(st.sampled_from((1, 2, 4, 8)))
    sequence = draw(st.sampled_from([size for size in (1, 2, 4, 8) if world % size == 0]))
    sequence_ranks = sequence if release(case.version).since("0.17.0") else 1
    return {"sequence_parallel_size": sequence_ranks, "data_parallel_size": world // sequence_ranks}


TRIANGLES = (
    lambda micro, steps, data: {MICRO: micro, STEPS: steps},
    lambda micro, steps, data: {MICRO: micro, STEPS: steps, TOTAL: micro * steps * data},
    lambda micro, steps, data: {MICRO: micro, TOTAL: micro * steps * data},
    lambda micro, steps, data: {STEPS: steps, TOTAL: micro * steps * data},
    lambda micro, steps, data: {TOTAL: micro * data},
)
"""Functions that return batch keys for a micro batch, accumulation steps and data ranks. The keys of
one function agree with each other, and each function sets a different choice of keys.
"""


@cache
def _draw_precision(version: str) -> Groups:
    scales = (
        "loss_scale",
        "initial_scale_power",
        "loss_scale_window",
        "hysteresis",
        "consecutive_hysteresis",
        "min_loss_scale",
    )
    formats = ("data_types.grad_accum_dtype", "communication_data_type")
    return st.one_of(
        _draw_group({"bf16.enabled": TRUE}, *formats),
        _draw_group({"bfloat16.enabled": TRUE}),
        _draw_group({"fp16.enabled": TRUE}, *formats, *(f"fp16.{name}" for name in scales)),
        _draw_group({"fp16.enabled": TRUE, "fp16.loss_scale": POWER}),
        st.just({}),
    )


@cache
def _draw_sharding(version: str) -> Groups:
    buckets = tuple(
        ZERO + name for name in ("reduce_bucket_size", "allgather_bucket_size", "overlap_comm")
    )
    device = st.sampled_from(("cpu", "nvme", "none"))
    optimizer = {OFFLOAD + ".device": device, ZERO + "stage": st.sampled_from((1, 2, 3))}
    parameters = {PARAM + ".device": device, ZERO + "stage": st.just(3)}
    return st.one_of(
        _draw_group({ZERO + "stage": st.sampled_from((0, 1, 2, 3))}, *buckets),
        _draw_group(optimizer, *buckets, OFFLOAD + ".pin_memory", OFFLOAD + ".ratio"),
        _draw_group(
            {**parameters, OFFLOAD + ".device": device}, PARAM + ".pin_memory", OFFLOAD + ".ratio"
        ),
        st.just({}),
    )


@cache
def _draw_optimizer(version: str) -> Groups:
    return st.sampled_from([*[EMPTY] * 20, *_build_groups("optimizer", version)]).flatmap(
        lambda groups: groups
    )


@cache
def _draw_scheduler(version: str) -> Groups:
    script_group = _draw_group(
        {"code.scheduler.name": _draw_field("code.scheduler.name")},
        *(f"code.scheduler.{name}" for name in CODED),
    )
    return st.sampled_from(
        [*[EMPTY, script_group] * 10, *_build_groups("scheduler", version)]
    ).flatmap(lambda groups: groups)


CODED = ("warmup_steps", "warmup_from", "total_steps", "minimum", "decay_steps", "decay_shape")


def _build_groups(section: str, version: str) -> list[Groups]:
    """Return strategies for the section `section`: one for each type of optimizer or scheduler that
    the release has. DeepSpeed's own types are in the list several times, so that they are drawn
    more often.
    """
    at = release(version)
    groups: list[Groups] = []
    for name in at.types[section + "s"]:
        forms = at.forms(section + "s", name)
        if forms:
            # DeepSpeed's own types have listed arguments, so more can go wrong with them.
            often = 1 if forms[0].args is None else 10
            groups += [_draw_type(section, name, forms)] * often
    return groups


def _draw_type(section: str, name: str, forms: Sequence[Type]) -> Groups:
    """Return a strategy for a section with the type `name`, the arguments that this type requires,
    and some optional arguments.
    """
    own = forms[0].args is not None
    # DeepSpeed takes the names of its own optimizers in any case, and torch's only as they are.
    spellings = (name, name.upper()) if own and name.islower() else (name,)
    required_paths = {
        f"{section}.params.{argument}" for form in forms for argument in form.required
    }
    argument_paths = {
        f"{section}.params.{argument}"
        for form in forms
        for argument in (*(form.args or ()), *form.ignored)
    }
    must = {
        f"{section}.type": st.sampled_from(spellings),
        **{path: _draw_field(path) for path in sorted(required_paths)},
    }
    ignored_paths = {"optimizer.params.max_grad_norm"} if section == "optimizer" and own else set()
    defaults = {
        f"{section}.params.{name}": value
        for form in forms
        for name, value in (form.args or {}).items()
    }
    # A switch at its default would test nothing.
    switches = {
        path: st.just(not value) for path, value in defaults.items() if isinstance(value, bool)
    }
    return _draw_group(
        must,
        *sorted(((argument_paths | ignored_paths) - required_paths) & fields(DeepSpeed).keys()),
        own=switches,
    )


@cache
def _draw_recompute(version: str) -> Groups:
    settings = ("partition_activations", "cpu_checkpointing")
    may = tuple(f"activation_checkpointing.{name}" for name in settings)
    return st.one_of(
        st.just({}),
        _draw_group({"code.checkpointing": TRUE, "code.checkpoint_interval": SMALL}, *may),
        _draw_group({"pipeline.activation_checkpoint_interval": SMALL}, *may),
    )


CHOICES = (_draw_precision, _draw_sharding, _draw_optimizer, _draw_scheduler, _draw_recompute)


# Single fields

ARGUMENTS = ("optimizer.type", "optimizer.params.", "scheduler.type", "scheduler.params.")
SIZES = (
    "sequence_parallel_size",
    "data_parallel_size",
    "tensor_parallel.autotp_size",
    "tensor_parallel.tp.tp_size",
)
RESERVED = (MICRO, STEPS, TOTAL, *AXES, *SIZES, *ARGUMENTS)
"""Keys that are not drawn one by one: keys that depend on the number of ranks, and arguments that
only some types have.
"""
UNSETTABLE = {"expert_parallel.load_balance_coeff": "takes nothing but null"}


def paths(case: StrategyCase) -> Iterable[str]:
    """Return the keys to draw: those that the release reads, and those of the code part."""
    return settable(case.version)


@cache
def settable(version: str) -> tuple[str, ...]:
    """Return all keys that a config of this release can set, including the keys that `core` draws."""
    own = release(version).keys
    return tuple(
        path
        for path in fields(DeepSpeed)
        if path not in UNSETTABLE and (path in own or path.startswith("code."))
    )


SPECS = st.lists(
    st.fixed_dictionaries(
        {"patterns": st.just([".*query"]), "partition_type": st.sampled_from(("row", "column"))}
    ),
    max_size=2,
)
SWITCHED = st.fixed_dictionaries({"enabled": st.booleans()}, optional={"theta": st.floats(0, 1)})
"""Strategy for a free-form section with the key `enabled`, which DeepSpeed reads."""
OWN: Mapping[str, SearchStrategy[Any]] = {
    **dict.fromkeys(
        ("optimizer.params.lr", "scheduler.params.warmup_max_lr"), st.floats(1e-5, 1e-2)
    ),
    **dict.fromkeys(
        ("code.scheduler.minimum", "code.scheduler.warmup_from", "scheduler.params.warmup_min_lr"),
        st.floats(0, 1e-6),
    ),
    **dict.fromkeys(("amp", "progressive_layer_drop", "curriculum_learning"), SWITCHED),
    "autotuning.model_info": st.fixed_dictionaries(
        {}, optional={"profile": st.booleans(), "num_params": SMALL}
    ),
    "code.partition_method": st.sampled_from(("uniform", "parameters", "type:block")),
    "tensor_parallel.partition_config": st.fixed_dictionaries(
        {"layer_specs": SPECS}, optional={"tp_size": SMALL}
    ),
}
"""Strategies for keys whose type also allows values that DeepSpeed cannot use."""


def values(case: StrategyCase, path: str) -> SearchStrategy[Any] | None:
    """Return the strategy for the values of a key that has an entry in `OWN`; None for other keys."""
    return OWN.get(path)


BESIDE: Mapping[str, Group] = {
    "bf16.bf16_optimizer_states": {
        "bf16.bf16_master_weights_and_grads": True,
        "bf16.enabled": True,
        ZERO + "stage": 2,
    },
    "aio.use_gds": {"code.accelerator": "cuda"},
    "zero_optimization.compute_grad_norm": {ZERO + "stage": 1, "gradient_clipping": 0.0},
}
"""For each key that DeepSpeed accepts only together with other settings: the other settings."""


def requirements_of(config: Config) -> Iterable[str]:
    """Return the keys in a config that DeepSpeed requires: a batch size if the config has only one,
    and the arguments that the scheduler requires.
    """
    sizes = [path for path in (MICRO, TOTAL) if path in config.given]
    forms = release(config.version).forms("schedulers", config.given.get("scheduler.type", ""))
    required_paths = [f"scheduler.params.{name}" for form in forms for name in form.required]
    return [
        *(sizes if len(sizes) == 1 else ()),
        *(path for path in required_paths if path in config.given),
    ]


COERCED = (ZERO + "stage",)
"""Keys for which DeepSpeed accepts a value of another type, such as true for stage 1."""

PART = StrategyPart(
    core,
    paths,
    values,
    beside=BESIDE,
    reserved=RESERVED,
    entries=("file",),
    required=requirements_of,
    coerced=COERCED,
    unsettable=UNSETTABLE,
    least={MICRO: 1},
)
