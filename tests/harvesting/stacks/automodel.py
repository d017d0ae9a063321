"""Reads the facts of an AutoModel release from its own classes: the settings of each section, and
the class that has them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from bridge.stack.releases import table
from tests.harvesting.code import arguments, first, signatures_in
from tests.harvesting.rows import Facts, Row
from tests.harvesting.source import Package, Tree

PACKAGE = Package("nemo-automodel", "nemo_automodel")
TABLES: Mapping[str, tuple[str, ...]] = {"classes.json": ("section", "strategy", "name")}
"""JSON files with the harvested facts. For each file: the columns that together identify a row."""
PARTS = "nemo_automodel.components."
STRATEGIES: Mapping[str, tuple[str, ...]] = {
    "fsdp2": ("distributed.config:FSDP2Config", "distributed.fsdp2:FSDP2Manager"),
    "megatron_fsdp": (
        "distributed.config:MegatronFSDPConfig",
        "distributed.megatron_fsdp:MegatronFSDPManager",
    ),
    "ddp": ("distributed.config:DDPConfig", "distributed.ddp:DDPManager"),
}
"""Classes that hold the options of each strategy: the config class since 0.3.0, and the manager
class of earlier releases.
"""
SECTIONS: Mapping[str, tuple[str, ...]] = {
    "distributed.pipeline": (
        "distributed.pipelining.config:PipelineConfig",
        "distributed.pipelining.autopipeline:AutoPipeline",
    ),
    "distributed.moe": (
        "distributed.config:MoEParallelizerConfig",
        "moe.config:MoEParallelizerConfig",
    ),
    "step_scheduler": ("training.step_scheduler:StepScheduler",),
    "lr_scheduler": ("optim.scheduler:OptimizerParamScheduler",),
    "model.backend": ("models.common.utils:BackendConfig", "moe.utils:BackendConfig"),
    "model.backend.te_fp8": ("models.common.utils:TEFp8Config",),
}
"""A table from each section to the possible places of the class whose arguments are the section's
settings. The first place that the release has is used. `STRATEGIES` has the classes for the options
of strategies.
"""
FREE: Mapping[str, tuple[str, ...]] = {
    "checkpoint": (
        "checkpoint.config:CheckpointingConfig",
        "checkpoint.checkpointing:CheckpointingConfig",
    ),
    "compile": ("utils.compile_utils:CompileConfig",),
    "fp8": ("quantization.fp8:FP8Config",),
    "model.backend": SECTIONS["model.backend"],
    "model.backend.te_fp8": SECTIONS["model.backend.te_fp8"],
    "peft": ("_peft.lora:PeftConfig",),
    "rng": ("training.rng:StatefulRNG",),
}
"""For each free-form section: the places of the class whose arguments are the section's settings.
The names of the arguments are gathered over all releases.
"""
AXES = tuple(f"{axis}_axis_name" for axis in ("pp", "cp", "tp", "ep"))
GIVEN_BY_CODE: Mapping[str, frozenset[str]] = {
    "step_scheduler": frozenset(("dp_size", "dataloader", "process_group")),
    "lr_scheduler": frozenset(("optimizer",)),
    "distributed": frozenset(("device_mesh", "rank", "config")),
    "distributed.pipeline": frozenset(
        ("world_mesh", "moe_mesh", "device", "dp_axis_names", "ep_shard_axis_names", *AXES)
    ),
}
"""Arguments of each section's class that the recipe's code sets itself. A recipe cannot set them.
"""
DEVICE = "model.backend"
"""The section with defaults that depend on the device and on installed packages."""
SIZES = ("nemo_automodel.recipes._dist_utils", "nemo_automodel.recipes._dist_setup")
"""Modules that may have the function with the defaults of the mesh sizes. Releases since 0.3.0 have
one of these modules.
"""


def facts(tree: Tree) -> Facts:
    """Return the rows of facts about the release, and the names that are collected over all
    releases. The release's code must be importable.
    """
    rows: list[Row] = []
    for section, places in SECTIONS.items():
        rows += _rows_of_class(places, {"section": section})
    for name, places in STRATEGIES.items():
        rows += _rows_of_class(places, {"section": "distributed", "strategy": name})
    # Before 0.3.0 the managers take the sizes as arguments, so they are among the rows above.
    for name, value in (first([f"{place}:_PARALLELISM_DEFAULTS" for place in SIZES]) or {}).items():
        rows.append(
            {"section": "distributed", "name": name, "type": "int | None", "default": value}
        )
    unread: list[str] = []
    arguments: dict[str, list[str]] = {}
    for section, places in FREE.items():
        arguments |= _arguments_by_class(section, [PARTS + place for place in places], unread)
    signatures = {
        "takes": dict(_class_arguments(unread)),
        "known": arguments,
        "reads": dict(_reader_arguments(tree)),
    }
    return Facts({"classes.json": rows}, {"signatures.json": signatures}, unread)


def _rows_of_class(places: Sequence[str], of: Row) -> Iterator[Row]:
    """Yield a row for each argument of a section's class. A config class is instantiated to get the
    defaults. A manager class is not, because that would start the run.
    """
    section = of["section"]
    cls = first([PARTS + place for place in places])
    config = cls is not None and cls.__name__.endswith("Config")
    for row in arguments(cls, cls() if config else None) if cls else ():
        if row["name"] not in GIVEN_BY_CODE.get(section, ()):
            # A default that depends on this machine is no fact of the release.
            yield {**of, **row, **({"default": None} if section.startswith(DEVICE) else {})}


def _class_arguments(unread: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each class that recipes name and that the release still has, with the names of its
    arguments.
    """
    for target in table("compat.automodel.releases", "signatures.json")["takes"]:
        module, _, name = target.rpartition(".")
        if module.startswith(PACKAGE.folder):
            yield from _arguments_by_class(target, [f"{module}:{name}"], unread).items()


def _reader_arguments(tree: Tree) -> Iterator[tuple[str, list[str]]]:
    """Yield each function and class with which recipes read data, with the names of its arguments. They
    are read from the text, since many of them need packages of their own.
    """
    for path in sorted((tree.folder / "components" / "datasets").rglob("*.py")):
        module = ".".join(path.relative_to(tree.root).with_suffix("").parts)
        for name, names in signatures_in(path):
            yield f"{module}.{name}", sorted(names)


def _arguments_by_class(
    what: str, places: Sequence[str], unread: list[str]
) -> dict[str, list[str]]:
    """Return the argument names of a class under the key `what`. The result is empty if the release
    lacks the class.

    A class that cannot be imported is added to `unread`.
    """
    try:
        cls = first(places)
    except Exception as error:  # old releases raise many kinds of errors on import
        unread.append(f"{what}: {type(error).__name__}: {error}")
        return {}
    return (
        {}
        if cls is None
        else {what: sorted(row["name"] for row in arguments(cls) if "." not in row["name"])}
    )


def path_of(file: str, row: Row) -> str:
    """Return the path of the setting that a row describes."""
    return f"{row['section']}.{row['name']}"
