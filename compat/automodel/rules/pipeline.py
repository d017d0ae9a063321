"""Rules for the pipeline: the split of layers into stages, and the schedule."""

from __future__ import annotations

from itertools import pairwise

from bridge.stack.rules import Context, Effect, Group, convert
from bridge.stack.words import no
from compat.automodel.rules.model import LAYERS, NAMED, count_layers
from compat.automodel.schedules import SCHEDULES
from compat.automodel.virtual_stages import boundaries, number, request, stage_modules

D, PP = "distributed.", "distributed.pipeline."
"""Sections of a recipe, as prefixes of their settings' paths."""
AUTOPIPELINE = "nemo_automodel.components.distributed.pipelining.AutoPipeline"


def pipeline_ranks(values: Group) -> int:
    """Return the number of pipeline ranks in a recipe."""
    return values.get(D + "pp_size") or 1


SPLIT = (
    PP + "layers_per_stage",
    PP + "round_virtual_stages_to_pp_multiple",
    PP + "module_fqns_per_model_part",
)


def _read_stages(values: Group) -> Group:
    ranks, parts = pipeline_ranks(values), values.get(SPLIT[2])
    if ranks == 1:
        return {}
    if parts is not None:
        cuts = boundaries(parts)
        return {
            "stages.rule": "explicit" if cuts else None,
            "stages.boundaries": cuts,
            "schedule.virtual": len(parts) // ranks,
        }
    virtual = _virtual_stages(values, ranks)
    return {
        "stages.rule": "even",
        "stages.layers_per_stage": float(values[SPLIT[0]]) if virtual is None else None,
        "schedule.virtual": virtual,
    }


def _virtual_stages(values: Group, ranks: int) -> int | None:
    """Return the number of virtual stages on each rank; None if it depends on a number of layers
    that the recipe does not have.
    """
    kind, layers, per_stage = (
        SCHEDULES[values[PP + "pp_schedule"].lower()],
        count_layers(values),
        values.get(SPLIT[0]),
    )
    if kind.single:
        return 1
    # AutoModel's default for schedules with several stages
    # (functional.py, calculate_virtual_stages).
    if per_stage is None:
        return 2
    if layers is None:
        return 2 if kind.pair else None
    return number(layers, per_stage, ranks, kind, values.get(SPLIT[1])) // ranks


def _write_stages(values: Group) -> Group:
    ranks, cuts = values.get("parallel.pipeline") or 1, values.get("stages.boundaries")
    if ranks == 1:
        return {}
    # Names say exactly where to cut; a number of layers for each
    # stage can only ask for even stages.
    if cuts and _is_nameable(cuts, ranks):
        return {SPLIT[2]: stage_modules(cuts)}
    layers, virtual, per_stage = (
        values.get(name) for name in ("model.layers", "schedule.virtual", "stages.layers_per_stage")
    )
    kind = SCHEDULES[schedule_name(values)]
    if (
        virtual is None
        and per_stage
        and values.get("stages.rule") == "even"
        and per_stage == int(per_stage)
    ):
        return {SPLIT[0]: int(per_stage)}
    # A pair schedule has two stages on each rank, which is the default.
    if layers is None or virtual is None or kind.pair:
        return {}
    settings = request(layers, ranks, ranks * virtual, kind)
    return {SPLIT[0]: settings[0], SPLIT[1]: settings[1]} if settings else {}


STAGES = convert(
    SPLIT,
    ("stages.rule", "stages.layers_per_stage", "stages.boundaries", "schedule.virtual"),
    _read_stages,
    _write_stages,
    effect=Effect.COST,
    sees=(
        D + "pp_size",
        PP + "pp_schedule",
        *LAYERS,
        *NAMED,
        "parallel.pipeline",
        "schedule.name",
        "model.layers",
    ),
    carries={
        SPLIT[0]: ("schedule.virtual", "stages.rule", "stages.layers_per_stage"),
        SPLIT[1]: ("schedule.virtual", "stages.rule"),
        SPLIT[2]: ("stages.rule", "stages.boundaries"),
    },
    note="the number of virtual stages depends on the number of layers; set model.config.num_hidden_layers",
    lossy="AutoModel distributes layers evenly, or uses a list of module names for each stage",
    blurs=no(count_layers),
    source="pipelining/functional.py: calculate_virtual_stages, generate_hf_model_fqn_per_model_part",
)


NAMEABLE = 10_000
"""Largest number of layers for which a recipe lists the module names of each stage."""


def _is_nameable(cuts: tuple[int, ...], ranks: int) -> bool:
    """Whether module names can express the split: every rank has the same number of stages, and no
    stage is empty.
    """
    # The cuts are the first layer of each stage and then the
    # number of layers, so there is one more than stages.
    stages = len(cuts) - 1
    return (
        cuts[-1] <= NAMEABLE
        and stages % ranks == 0
        and all(first < last for first, last in pairwise(cuts))
    )


# In reverse, so that of two schedules with the same name in a
# plan the first wins: ZBVZeroBubble, not DualPipeV.
NAMES = {kind.ours: kind.name.lower() for kind in reversed(tuple(SCHEDULES.values())) if kind.ours}
LOOPED = {"1f1b": "interleaved_1f1b", "gpipe": "looped_bfs"}
"""A table from each schedule with one stage on each rank to its variant with several stages on each
rank.
"""
PLAIN = {loop: plain for plain, loop in LOOPED.items()} | {
    "zero_bubble": "1f1b",
    "zero_bubble_v": "1f1b",
}
"""A table from each schedule with several stages on each rank to the schedule to use with one
stage. Zero-bubble schedules, which split the backward pass, need several stages and become 1f1b.
"""


def _read_schedule(values: Group) -> Group:
    if pipeline_ranks(values) == 1:
        return {}
    csv, parts = values.get(PP + "pp_schedule_csv"), values.get(SPLIT[2])
    name = SCHEDULES[values[PP + "pp_schedule"].lower()].ours
    # With one part for each rank, a schedule for several runs as its form for one.
    if parts is not None and len(parts) == pipeline_ranks(values):
        name = PLAIN.get(name or "", name)
    return {"schedule.name": "csv" if csv else name, "schedule.csv": csv}


def _stages_a_rank(values: Group) -> int | None:
    cuts, ranks = values.get("stages.boundaries"), values.get("parallel.pipeline") or 1
    if cuts and _is_nameable(cuts, ranks):
        return (len(cuts) - 1) // ranks
    virtual: int | None = values.get("schedule.virtual")
    return virtual


def schedule_name(values: Group) -> str:
    """Return AutoModel's name of the plan's schedule. If the schedule does not fit the number of
    stages on each rank, return the name of its variant for that number.
    """
    name, count = values.get("schedule.name") or "1f1b", _stages_a_rank(values)
    # The CSV file replaces the schedule, but AutoModel still places the stages by the name.
    if name == "csv":
        name = "1f1b" if count == 1 else "interleaved_1f1b"
    if count == 1:
        name = PLAIN.get(name, name)
    elif count is not None:
        name = LOOPED.get(name, name)
    return NAMES.get(name, NAMES["1f1b" if count in (None, 1) else "interleaved_1f1b"])


def _write_schedule(values: Group, context: Context) -> Group:
    if (values.get("parallel.pipeline") or 1) == 1:
        return {}
    csv = values.get("schedule.csv") if values.get("schedule.name") == "csv" else None
    old = {} if context.since("0.3.0") else {"autopipeline._target_": AUTOPIPELINE}
    return {PP + "pp_schedule": schedule_name(values), PP + "pp_schedule_csv": csv, **old}


SCHEDULE = convert(
    (PP + "pp_schedule", PP + "pp_schedule_csv", "autopipeline._target_"),
    ("schedule.name", "schedule.csv"),
    _read_schedule,
    _write_schedule,
    effect=Effect.COST,
    sees=(D + "pp_size", SPLIT[2], "parallel.pipeline", "schedule.virtual", "stages.boundaries"),
    carries={
        PP + "pp_schedule": "schedule.name",
        PP + "pp_schedule_csv": "schedule.csv",
        "autopipeline._target_": (),
    },
    blurs=lambda values: (
        PP + "pp_schedule_csv" in values
        or values.get(PP + "pp_schedule", "").lower() == "dualpipev"
    ),
    note="the class of the pipeline in the layout before 0.3.0",
    lossy="torch has some schedules only for one stage on each rank, and others only for several",
    source="torch.distributed.pipelining.schedules: get_schedule_class; pipelining/functional.py: build_pipeline_schedule",
)
