"""Asks an installed AutoModel which mesh, pipeline and steps it makes of a recipe. AutoModel's own
parser and step scheduler answer, and the answers are plain data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from bridge.errors import ConfigError, VersionError
from bridge.stack.dialect import Config
from compat.automodel.effective import PP, D, data_ranks
from compat.automodel.formats import formats, nest_recipe
from compat.automodel.releases import release
from compat.automodel.setting_types import DTYPES
from tests.harvesting.code import first, plain

Group = dict[str, Any]
LOOSER = ""
"""Pattern for our messages about recipes that we refuse although AutoModel's parser accepts them.
The empty pattern matches every message, because AutoModel checks the numbers of layers, heads and
ranks only later in the run.
"""
S = "step_scheduler."
PARSER = tuple(
    f"nemo_automodel.recipes.{name}:parse_distributed_section"
    for name in ("_dist_utils", "_dist_setup")
)
STEPS = ("nemo_automodel.components.training.step_scheduler:StepScheduler",)
LATER = frozenset(
    (
        *(PP + name for name in ("pp_batch_size", "pp_microbatch_size", "pp_seq_len", "loss_fn")),
        *(
            PP + "patch_stage_backward_maybe_with_nosync",
            D + "reshard_after_forward",
            D + "dp_size",
        ),
    )
)
"""Settings that AutoModel computes only after its parser has run, unless the file sets them."""
OVERWRITTEN = frozenset(
    PP + name
    for name in ("pp_batch_size", "patch_stage_backward_maybe_with_nosync", "pp_microbatch_size")
)
"""Settings that an AutoModel class computes even if the file sets them."""
SAMPLES = 10**6
"""Number of batches in the data set that AutoModel's step scheduler gets when it is asked."""


def pose_config(config: Config) -> tuple[Group, Group]:
    """Return the input for AutoModel's parser, and the values by path that AutoModel should compute
    from it.
    """
    question = raw(nest_recipe(config.given, release(config.version)), config) or {}
    settings, sections = config.given, tuple(f"{name}." for name in question.get("recipe", ()))
    later = OVERWRITTEN | {path for path in LATER if path not in settings}
    defaults = {
        path: value
        for path, value in config.effective.items()
        if path.startswith(D) and path not in later
    }
    steps = {path: value for path, value in settings.items() if path.startswith(S)}
    return question, {
        path: value for path, value in (defaults | steps).items() if path.startswith(sections)
    } if sections else {}


def raw(source: Mapping[str, Any], config: Config) -> Group | None:
    """Return the input for AutoModel's parser, made from a recipe as the user wrote the recipe.
    None if the release has no parser.
    """
    if not release(config.version).nests_pipeline:
        return None
    sections = {
        name: _without_targets(source[name])
        for name in ("distributed", "step_scheduler")
        if name in source
    }
    return {
        "recipe": {"distributed": {}, **sections},
        "ranks": data_ranks(config.given, config.world_size) or 1,
    }


def _without_targets(section: Any) -> Any:
    """Copy a section without the class names (`_target_`) in it, because AutoModel would import
    these classes.
    """
    if not isinstance(section, Mapping):
        return section
    return {name: _without_targets(value) for name, value in section.items() if name != "_target_"}


def answer(question: Mapping[str, Any]) -> Group:
    """Return the values that the installed AutoModel computes from the recipe, by path. Raises
    `ConfigError` with AutoModel's reason if AutoModel refuses the recipe.
    """
    recipe = question.get("recipe", {})
    try:
        values = dict(_mesh_values(dict(recipe["distributed"]))) if "distributed" in recipe else {}
        return values | dict(
            _step_values(recipe.get("step_scheduler", {}), question.get("ranks", 1))
        )
    except Exception as error:
        raise ConfigError(
            f"refused by AutoModel itself: {type(error).__name__}: {error}"
        ) from error


def _mesh_values(section: Group) -> Iterator[tuple[str, Any]]:
    setup = first(PARSER)(section)
    sizes = {name: value for name, value in setup.items() if name.endswith("_size")}
    yield from _flat_items(
        sizes | {"activation_checkpointing": setup["activation_checkpointing"]}, D
    )
    yield D + "strategy", STRATEGIES[type(setup["strategy_config"]).__name__]
    own = {
        name: value
        for name, value in _field_values(setup["strategy_config"]).items()
        if name != "activation_checkpointing"
    }
    yield from _flat_items(own, D)
    for part, path in (
        ("pipeline_config", PP),
        ("moe_parallel_config", f"{D}moe."),
        ("moe_config", f"{D}moe."),
    ):
        yield from _flat_items(_field_values(setup.get(part)), path)


STRATEGIES = {"FSDP2Config": "fsdp2", "MegatronFSDPConfig": "megatron_fsdp", "DDPConfig": "ddp"}


def _step_values(section: Mapping[str, Any], ranks: int) -> Iterator[tuple[str, Any]]:
    """Yield the values of AutoModel's step scheduler, by path, if the recipe sets both batch sizes."""
    if not section.keys() >= {"global_batch_size", "local_batch_size"}:
        return
    scheduler = first(STEPS)(**section, dp_size=ranks, dataloader=range(SAMPLES))
    yield from _flat_items(
        {name: value for name, value in vars(scheduler).items() if name in section}, S
    )


def _field_values(value: Any) -> Group:
    return (
        {} if value is None else {name: getattr(value, name) for name in value.__dataclass_fields__}
    )


def _flat_items(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if hasattr(value, "__dataclass_fields__"):
            yield from _flat_items(_field_values(value), f"{prefix}{name}.")
        elif value is not None:
            path = f"{prefix}{name}"
            yield (
                path,
                DTYPES.get(value, value)
                if path in formats() and isinstance(value, str)
                else plain(value),
            )


def release_of_package() -> str:
    """Return the installed release. Raises `VersionError` if AutoModel is not installed."""
    try:
        return version("nemo-automodel")
    except PackageNotFoundError:
        raise VersionError(
            "automodel: nemo-automodel is not installed; run pip install --no-deps nemo-automodel"
        ) from None
