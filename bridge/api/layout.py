"""Layout: where a plan places its model on ranks, and what each rank keeps, and sends in a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import lcm, prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Unpack

from bridge.api.access import open_source
from bridge.api.read import check_choice, model_in, read_config
from bridge.api.source import Options, Readable, Source, source_of
from bridge.engine.fields import beyond
from bridge.errors import BridgeError, ConfigError
from bridge.layout.architecture import PRESETS, Architecture
from bridge.layout.mesh import AXES, Mesh
from bridge.layout.outline import Outline
from bridge.plan.equality import head_size
from bridge.plan.plan import Model, Plan
from bridge.report.layouts import size_text
from bridge.report.pictures.rank_bars import ranks_text
from bridge.stack.dialect import Config
from bridge.stack.findings import Finding
from bridge.stack.rules import Effect
from bridge.translation.lift import lift

if TYPE_CHECKING:
    pass

FILE = "file"
"""Value of `--model` for the model that the config itself states."""
MODELS = (FILE, *PRESETS)
NEEDED = ("layers", "hidden", "heads", "sequence")
"""Model sizes that must be known.

The other sizes follow from these, except for the vocabulary size, which may stay unknown.
"""


@dataclass(frozen=True)
class Sizes:
    """The options for sizes. `model` is the preset, file or folder that states the model's sizes.

    `given` are the sizes from the command line by field name, and `micro` is the microbatch size.
    """

    model: str
    given: Mapping[str, int | bool | None]
    micro: int | None


@dataclass(frozen=True)
class LayoutOfRun:
    """The outline of a plan on its ranks, the findings on it, and the notes that were made."""

    outline: Outline
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()


def layout(
    readable: Readable,
    /,
    *,
    shape: str = FILE,
    micro_batch: int | None = None,
    sizes: Mapping[str, int | bool | None] = MappingProxyType({}),
    memory: int | None = None,
    **options: Unpack[Options],
) -> LayoutOfRun:
    """Place the model of a config on `world_size` ranks, by default on the fewest that its sizes take.

    `shape` is a known shape such as gpt2, or the folder of a model, in place of the one that the file states;
    `sizes` replaces single sizes, by the names of the plan's model section. Ranks that keep more than `memory`
    bytes are a finding. Raises `BridgeError` for a missing size, or for sizes that do not fit the ranks.
    """
    source = source_of(readable, options)
    with open_source(source) as notes:
        return replace(
            place_model(source, sizes_of(shape, micro_batch, **sizes), memory), notes=tuple(notes)
        )


def place_model(source: Source, sizes: Sizes, memory: int | None = None) -> LayoutOfRun:
    """Return the layout of a source with the sizes of a model."""
    plan = lift(config_of_source(source))
    outline = outline_of(plan, sizes, source.world_size)
    findings = (
        *beyond(plan.values()),
        *_find_omissions(plan, outline, source.world_size),
        *_too_large(outline, memory),
    )
    return LayoutOfRun(outline, findings)


def sizes_of(model: str, micro: int | None, **given: int | bool | None) -> Sizes:
    """The options for sizes. Raises `BridgeError` if no preset, file or folder is named `model`."""
    return Sizes(check_choice("--model", model, MODELS), given, micro)


def config_of_source(source: Source) -> Config:
    """Return the config on the number of ranks asked for.

    If the stack refuses that number, the error names the numbers that would fit.
    """
    try:
        return read_config(source)
    except BridgeError as error:
        if source.world_size is None:
            raise
        try:
            plan = lift(read_config(replace(source, world_size=None)))
        except BridgeError:
            raise error from None
        # The mesh of the file's own sizes says which numbers of ranks would fit; the stack's own refusal does not.
        Mesh.of(plan.parallel, source.world_size)
        raise


def shape_of_model(plan: Plan, sizes: Sizes) -> Architecture:
    """Return the shape of the model, from a preset or from the file.

    Sizes given on the command line replace the sizes in it.
    """
    own_sizes: dict[str, Any] = {
        name: value for name, value in sizes.given.items() if value is not None
    }
    if sizes.model in PRESETS:
        # As many heads of keys as of queries, unless both are given: those of the preset may not divide the new number.
        follow = {"kv_heads": own_sizes["heads"]} if "heads" in own_sizes else {}
        return replace(PRESETS[sizes.model], **{**follow, **own_sizes})
    model = _resize_model(plan.model if sizes.model == FILE else model_in(sizes.model), own_sizes)
    missing = [name for name in NEEDED if getattr(model, name) is None]
    if missing:
        options = ", ".join(f"--{name}" for name in missing)
        raise ConfigError(
            f"model: FILE does not state its {', '.join(missing)}; give {options}, or --model {'|'.join(PRESETS)}"
        )
    shape = Architecture.of(model)
    return shape if model.vocab or model.embedding.padded_vocab else replace(shape, vocab=0)


def _resize_model(model: Model, sizes: Mapping[str, Any]) -> Model:
    """Return `model` with these `sizes` in place of its own.

    Values that were derived from the replaced sizes are derived again, such as the number of key
    heads.
    """
    update: dict[str, Any] = dict(sizes)
    if "heads" in sizes and model.kv_heads == model.heads:
        update["kv_heads"] = sizes["heads"]
    widths = {"model.hidden": model.hidden, "model.heads": model.heads}
    if {"heads", "hidden"} & sizes.keys() and head_size(widths) == model.attention.head_size:
        update["attention"] = model.attention.model_copy(update={"head_size": None})
    return model.model_copy(update=update)


def with_micro(plan: Plan, sizes: Sizes) -> Plan:
    """Return `plan` with the microbatch of the command line, if it gives one."""
    if sizes.micro is None:
        return plan
    # The global batch of the file belongs to its own microbatch; left open, it follows from the new one.
    return Plan.of({**plan.values(), "batch.micro": sizes.micro, "batch.global_": None})


def ranks_of_plan(plan: Plan, world: int | None) -> int:
    """Number of ranks of the mesh of `plan` in a run of `world` ranks; the fewest that its sizes
    take if `world` is None.
    """
    parallel = plan.parallel
    mesh = prod(getattr(parallel, axis) or 1 for axis in AXES)
    if world is None and parallel.data is None and plan.model.experts:
        within = parallel.expert_tensor or parallel.tensor or 1
        return lcm(mesh, within * (parallel.expert or 1) * (parallel.pipeline or 1))
    # If the file states the data ranks too, the mesh may be smaller than the run: ranks of a separate encoder lie beside it.
    return mesh if world is None or (parallel.data is not None and mesh < world) else world


def outline_of(plan: Plan, sizes: Sizes, world: int | None) -> Outline:
    """The outline of a plan on `world` ranks. Raises `BridgeError` if it does not fit."""
    shape, ranks = shape_of_model(plan, sizes), ranks_of_plan(plan, world)
    return Outline.of(with_micro(plan, sizes), shape, ranks)


def _find_omissions(plan: Plan, outline: Outline, world: int | None) -> Iterator[Finding]:
    """Yield findings on parts of the run that the layout leaves out or shows differently."""
    parallel, mesh = plan.parallel, outline.mesh.world
    yield from outline.costly
    if world is not None and mesh != world:
        yield Finding(
            "parallel",
            f"{world - mesh} of {world} ranks are outside the mesh, and not shown",
            Effect.NONE,
        )
    yield from (Finding("schedule", note, Effect.NONE) for note in outline.notes)
    if (parallel.context or 1) > 1:
        yield Finding(
            "parallel.context",
            "exchanges of keys and values between context ranks are not counted",
            Effect.NONE,
        )
    if (parallel.expert or 1) > 1:
        yield Finding(
            "parallel.expert",
            "messages of tokens to the experts of other ranks are not counted",
            Effect.NONE,
        )
    if plan.model.predicted:
        yield Finding(
            "model.predicted", "blocks of multi-token prediction are not counted", Effect.NONE
        )


def _too_large(outline: Outline, memory: int | None) -> Iterator[Finding]:
    """Yield a finding on the ranks that keep more bytes than a device has memory."""
    if memory is None:
        return
    totals = {rank: sum(outline.bytes(rank).values()) for rank in range(outline.mesh.world)}
    over = [rank for rank, size in totals.items() if size > memory]
    if over:
        most = size_text(max(totals[rank] for rank in over))
        message = (
            f"{ranks_text(over)}: found up to {most} kept between steps, and a device has"
            f" {size_text(memory)}; split the model further"
        )
        yield Finding("memory", message, Effect.STOPS)
