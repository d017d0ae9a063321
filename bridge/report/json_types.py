"""The JSON outputs of commands as types. A type checker compares the code with these types, and
JSON Schemas are made from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from bridge.report.exit_codes import Exit
from bridge.stack.rules import Effect, How

Level = Literal["error", "warning", "note"]
Verdict = Literal["same", "in part", "differs", "not run"]
Number = float | Literal["nan", "inf", "-inf"] | None
"""A number. A number that is not finite is text, and a number that is not known is None."""


class Refused(TypedDict):
    """The output for an error or for a wrong use of a command, with one line for each problem."""

    problems: list[str]
    exit_code: Exit


class Side(TypedDict):
    """A config: its stack, release and ranks, and the values that it sets, by path."""

    dialect: str
    version: str
    world_size: int | None
    given: dict[str, Any]


class Told(TypedDict):
    """A finding: a loss, a change or a remark, with its effect and the id of its rule."""

    path: str
    how: How | None
    effect: Effect
    given: bool
    before: Any
    after: Any
    change: str
    message: str
    rule: str
    origin: str | None


class Field(TypedDict):
    """A value of the target's file, and the settings or the default that it comes from."""

    path: str
    value: Any
    sources: list[str]
    default_of: str
    how: How
    effect: Effect
    note: str


class Target(Side):
    """The converted config: the content of its file, and the settings that its stack keeps in the training script."""

    text: str
    code: dict[str, Any]
    snippet: str


class Converted(TypedDict):
    """A config translated to another stack."""

    source: Side
    target: Target
    environment: dict[str, str]
    launch: list[str]
    plan: dict[str, Any]
    fields: list[Field]
    findings: list[Told]
    exit_code: Exit
    files: NotRequired[list[str]]
    dry_run: NotRequired[bool]
    changes: NotRequired[list[str]]


class OneConverted(Converted):
    """One of several converted files."""

    file: str


class OneRefused(Refused):
    """One of several files, with the reason why it is refused."""

    file: str


class ManyConverted(TypedDict):
    """Several files that were converted."""

    files: list[OneConverted | OneRefused]
    exit_code: Exit


class Checked(TypedDict):
    """A config as its stack would read it."""

    source: Side
    effective: dict[str, Any]
    findings: list[Told]
    exit_code: Exit


class Place(TypedDict):
    """Where a setting is written: the file or program, the line, and the name that it has there."""

    source: str
    line: int | None
    setting: str


class Unused(Place):
    """A value that was written and is not in force, with the reason."""

    value: Any
    why: str


class SettledSetting(TypedDict):
    """A setting of a run: the value in force, who set it, and the values that lost."""

    setting: str
    value: Any
    winner: Place
    overruled: list[Unused]
    why: str


class Stop(Place):
    """A reason why the run does not start."""

    message: str


class Resolved(TypedDict):
    """Who wins for each setting of a run, what is ignored, and why the run would stop."""

    dialect: str
    version: str
    world_size: int | None
    settings: list[SettledSetting]
    ignored: list[Unused]
    stops: list[Stop]
    findings: list[Told]
    exit_code: Exit


class OneOfMany(TypedDict):
    """One of several checked files: its config and the findings, or the reason why the file is
    refused.
    """

    file: str
    source: NotRequired[Side]
    effective: NotRequired[dict[str, Any]]
    findings: NotRequired[list[Told]]
    problems: NotRequired[list[str]]
    exit_code: Exit


class Many(TypedDict):
    """Several files that were checked."""

    files: list[OneOfMany]
    exit_code: Exit


class Named(Side):
    """A config with its file."""

    file: str


class Compared(TypedDict):
    """How the meanings of two configs differ."""

    first: Named
    second: Named
    findings: list[Told]
    exit_code: Exit


class Matched(Compared):
    """What differs between a launch (`first`) and the model that it loads. `settings` are those with which the launch fits;
    null removes one.
    """

    settings: dict[str, Any]


class Drifted(TypedDict):
    """A setting whose effect differs between two releases."""

    path: str
    kind: str
    effect: Effect
    given: bool
    before: Any
    after: Any
    message: str
    origin: str | None


class Edited(TypedDict):
    """A setting that the migration changes: the given value before and after."""

    path: str
    before: Any
    after: Any


class Migrated(Side):
    """The config for another release, with the same meaning; `text` is the content of its file."""

    text: str


class Drifting(TypedDict):
    """The meaning of a file in two releases."""

    source: Side
    to_version: str
    accepted: bool
    changes: list[Drifted]
    new: dict[str, Any]
    lapsed: dict[str, Any]
    remarks: list[Told]
    edits: list[Edited]
    migrated: Migrated | None
    left: list[Drifted]
    exit_code: Exit


class Shape(TypedDict):
    """Sizes of a model. `unknown` names weights of unknown size, which are not counted."""

    layers: int
    hidden: int
    heads: int
    vocab: int | None
    sequence: int
    kv_heads: int
    ffn: int
    tied: bool
    norm: str
    gated: bool
    rotary: Any
    bias: bool
    experts: int | None
    active: int
    unknown: list[str]
    parameters: int


class Batch(TypedDict):
    """Number of sequences in a microbatch, of microbatches in a step, and of tokens in a
    microbatch.
    """

    micro: int
    accumulation: int
    tokens: int


class Axis(TypedDict):
    """An axis of the mesh, with the ranks of each group."""

    axis: str
    size: int
    groups: list[list[int]]


class Grid(TypedDict):
    """The mesh of all ranks."""

    ranks: int
    axes: list[Axis]
    experts: list[Axis]


class Stage(TypedDict):
    """A stage with its layers."""

    stage: int
    pipeline_rank: int
    layers: list[str]


class Kept(TypedDict):
    """Bytes that a rank keeps between steps, by kind."""

    weights: int
    gradients: int
    master: int
    moments: int
    total: NotRequired[int]


class Whole(TypedDict):
    """The unsharded values of a flat in memory: their number format, the index of their buffer,
    their size in bytes, and the number format in which ranks exchange them.
    """

    format: str
    buffer: int
    bytes: int
    exchanged: NotRequired[str | None]


class Flat(TypedDict):
    """A flat buffer of a stage."""

    stage: int
    tied: bool
    trainable: bool
    parameters: int
    padding: int
    data_ranks: int
    weights: Whole
    gradients: Whole | None
    slices: Mapping[str, int]


class Call(TypedDict):
    """A collective of a step: the name, the number of calls, and the bytes of all calls."""

    name: str
    count: int
    bytes: float


class Ranks(TypedDict):
    """Ranks with equal memory and equal traffic: the bytes that each of these ranks keeps, and the
    collectives that each runs.
    """

    ranks: list[int]
    pipeline_rank: int
    stages: list[int]
    parameters: int
    bytes: Mapping[str, int]
    flats: list[Flat]
    collectives: list[Call]


class Laid(TypedDict):
    """The placement of a plan's model on ranks."""

    model: Shape
    batch: Batch
    mesh: Grid
    stages: list[Stage]
    ranks: list[Ranks]
    findings: list[Told]
    memory: NotRequired[int | None]
    exit_code: Exit


class NeededTerm(TypedDict):
    """A number of bytes, the kind of memory it belongs to, and the product that gives it. `kind`
    "host" is memory of the host.
    """

    kind: str
    what: str
    bytes: int
    formula: str


class NeededByRank(TypedDict):
    """The memory of the ranks of one pipeline rank, in bytes, at the moment of a step at which they
    need the most. `needed` adds margins for fragments, context and NCCL to `allocated`.
    """

    pipeline_rank: int
    moment: str
    needed: int
    allocated: int
    between_steps: int
    kinds: Mapping[str, int]
    terms: list[NeededTerm]


class FittingChange(TypedDict):
    """Settings with which a run fits; null removes a setting."""

    settings: Mapping[str, Any]
    needed: int
    price: str


class Estimated(TypedDict):
    """The memory that a run needs, in bytes. `fits` and `memory` are null without `--memory`."""

    fits: bool | None
    memory: int | None
    needed: int
    ranks: list[NeededByRank]
    changes: list[FittingChange]
    findings: list[Told]
    exit_code: Exit


class Scheduled(TypedDict):
    """A pipeline schedule in time."""

    name: str
    ranks: int
    stages: int
    microbatches: int
    homes: list[int]
    rows: list[list[str]]
    starts: list[list[float]]
    length: float
    bubble: float
    overhead: float
    in_flight: list[int]
    kept: list[list[int]]
    notes: NotRequired[list[str]]
    exit_code: Exit


class Span(TypedDict):
    """Successive releases with the same default."""

    since: str
    until: str
    default: Any


class Ruled(TypedDict):
    """A check of a field: what its stack refuses or gets wrong."""

    rule: str
    effect: Effect
    message: str
    place: str
    since: str
    until: str


class Elsewhere(TypedDict):
    """The counterpart of a field in another stack."""

    dialect: str
    fields: list[str]
    how: How
    lost: list[str]
    always: dict[str, Any]
    reasons: list[str]


class Disagreeing(TypedDict):
    """A disagreement between a stack's documentation and its code."""

    documented: str
    place: str
    code: str
    source: str
    since: str
    until: str


class Shown(TypedDict):
    """A field of a stack."""

    dialect: str
    path: str
    section: str
    type: str
    description: str
    spellings: list[str]
    releases: list[Span]
    plan: list[str]
    effect: str
    note: str
    lossy: str
    source: str
    checks: list[Ruled]
    elsewhere: list[Elsewhere]
    disagreements: list[Disagreeing]


class Listed(TypedDict):
    """A field in a list."""

    path: str
    type: str
    description: str


class Headed(TypedDict):
    """Fields under one heading."""

    section: str
    fields: list[Listed]


class Listing(TypedDict):
    """Fields of a stack."""

    dialect: str
    versions: list[str]
    sections: list[Headed]


class Failed(TypedDict):
    """The smallest config that fails."""

    stage: str
    message: str
    version: str
    world_size: int | None
    text: str
    code: str
    command: str


class Fuzzed(TypedDict):
    """The results of generated configs: how many configs passed or were refused at each stage, and
    the failure, if any.
    """

    examples: int
    releases: dict[str, int]
    held: dict[str, int]
    refused: dict[str, int]
    settings: list[str]
    failure: Failed | None
    again: str
    exit_code: Exit


class Saved(TypedDict):
    """The progress of the run that wrote a checkpoint; None: the checkpoint does not say."""

    steps: int | None
    skipped: int | None
    samples: int | None
    loss: Number
    grad_norm: Number
    lr: float | None
    seed: int | None


class Scale(TypedDict):
    """A loss scale, and the settings and counters that decide when it changes."""

    value: float
    dynamic: bool
    factor: float | None
    window: int | None
    minimum: float | None
    hysteresis: int | None
    tolerated: int | None
    good: int | None


class Held(TypedDict):
    """A tensor of a checkpoint."""

    name: str
    kind: str
    shape: list[int]
    dtype: str


class WritableFormat(TypedDict):
    """A format that a checkpoint can be converted to: what it loses, or why it cannot hold it."""

    to: str
    lost: list[str]
    refused: str | None


class Inspected(TypedDict):
    """The content of a checkpoint."""

    format: str
    folder: str
    release: str | None
    layout: dict[str, Any]
    files: int
    bytes: int
    parameters: int
    elements: int
    kinds: dict[str, dict[str, int]]
    tied: dict[str, str]
    run: Saved
    schedule: Any
    scale: Scale | None
    groups: list[dict[str, Any]]
    client: dict[str, Any]
    findings: list[Told]
    targets: list[WritableFormat]
    tensors: NotRequired[list[Held]]
    exit_code: Exit


class Put(TypedDict):
    """A file of a checkpoint that was written, or would be."""

    name: str
    bytes: int
    made_of: NotRequired[list[dict[str, Any]]]


class Rewritten(TypedDict):
    """A checkpoint in another format."""

    to: str
    output: str
    written: bool
    files: list[Put]
    copied: list[str]
    findings: list[Told]
    exit_code: Exit


class Different(TypedDict):
    """A tensor that differs between two checkpoints; `most` is the largest difference between
    corresponding elements.
    """

    name: str
    kind: str
    verdict: str
    most: Number
    rounded: str
    block: str


class Apart(TypedDict):
    """The differences between two checkpoints."""

    verdicts: dict[str, int]
    rounded: dict[str, int]
    run: dict[str, tuple[Any, Any]]
    differ: list[Different]
    exit_code: Exit


class Logged(TypedDict):
    """A traced run."""

    folder: str
    engine: Any
    mesh: Any
    accumulation: Any
    formats: Any
    notes: list[str]


class Tensor(TypedDict):
    """A tensor of two traced runs: the parts of its name, the distance between its two values, and
    the ranks on which it differs.
    """

    name: str
    step: int
    phase: str
    layer: str
    microbatch: Any
    kind: str
    tensor: str
    verdict: str
    distance: float | None
    bound: float | None
    cause: str
    ranks: list[int]


class Setting(TypedDict):
    """A setting that differs between two traced runs; `layout` is true if it belongs to the layout."""

    path: str
    first: Any
    second: Any
    layout: bool


class Diagnosed(TypedDict):
    """A possible cause, the evidence for it, and the tensors to log next."""

    where: str
    claim: str
    evidence: list[str]
    next: str


class Parted(TypedDict):
    """The comparison of two traced runs: where the runs first differ, and why."""

    first: Logged
    second: Logged
    verdicts: dict[str, int]
    settings: list[Setting]
    divergence: Tensor | None
    diagnosis: Diagnosed | None
    steps_left: list[int]
    faults: list[Tensor]
    worst: Tensor | None
    heat: dict[str, dict[str, float | None]]
    exit_code: Exit


class Traced(Logged):
    """The tensors that a run logged."""

    tensors: list[dict[str, Any]]
    exit_code: Exit


class Changed(TypedDict):
    """A size of the model that was made smaller for the run."""

    before: Any
    after: Any


class Gap(TypedDict):
    """The distance between two runs in losses, gradient norms and updates, and the tensor with the
    largest distance. `scale` says in words how the loss scales differ.
    """

    loss: Number
    norm: Number
    update: Number
    share: Number
    tensor: str
    worst: Number
    scale: str
    floor: Number


class Ran(TypedDict):
    """A run of one side of a translation on one engine."""

    side: str
    engine: str
    as_written: bool
    verdict: str
    cause: str
    losses: list[Number]
    grad_norms: list[Number]
    distance: Gap | None


class Verified(TypedDict):
    """Both sides of a translation, run with a small model."""

    verdict: Verdict
    proved: bool
    lacking: list[str]
    no_script: list[str]
    steps: int
    ranks: int
    changes: dict[str, Changed]
    rounding: Gap | None
    left_out: list[str]
    runs: list[Ran]
    judged_release: str
    exit_code: Exit


class Start(TypedDict):
    """The source of a run that is moved: its stack, its checkpoint format and its steps."""

    dialect: str
    format: str
    steps: int | None


class Goal(TypedDict):
    """The target of a run that is moved: its stack, its checkpoint format and its config."""

    stack: str
    format: str
    config: str


class Size(TypedDict):
    """A file and its size."""

    name: str
    bytes: int


class Further(TypedDict):
    """The run of one side of a move, resumed from a checkpoint: the step at which the run resumed,
    and the figures of each further step.
    """

    side: Literal["source", "target"]
    engine: str
    problem: str
    first: int | None
    losses: list[Number]
    grad_norms: list[Number]
    lr: list[float | None]
    loss_scale: list[float | None]


class Lengths(TypedDict):
    """The distance between two runs, or the distance that rounding alone causes."""

    loss: Number
    norm: Number
    update: Number
    tensor: NotRequired[str]


class Proved(TypedDict):
    """The result of training both sides of a move further."""

    verdict: Verdict
    steps: int
    ranks: int
    cause: str
    lacking: list[str]
    distance: Lengths | None
    rounding: Lengths | None
    runs: list[Further]


class Moved(TypedDict):
    """A run moved to another stack."""

    output: str
    written: bool
    taken_away: str
    source: Start
    target: Goal
    launch: list[str]
    files: list[Size]
    findings: list[Told]
    proof: Proved | None
    exit_code: Exit


class Step(TypedDict):
    """A step of a training run; `train --json` prints one object on each line."""

    step: int
    loss: Number
    grad_norm: Number
    lr: float | None
    loss_scale: float
    tokens_per_second: float
    memory: float
    skipped: int


class Known(TypedDict):
    """A finding that the baseline lists as known."""

    file: str
    rule: str
    path: str


class Baseline(TypedDict):
    """The file that `--write-baseline` writes."""

    stagebridge: Literal[1]
    known: list[Known]


OUTPUTS: Mapping[str, Any] = {
    "convert": Converted | ManyConverted | Refused,
    "check": Checked | Many | Refused,
    "resolve": Resolved | Refused,
    "diff": Compared | Refused,
    "match": Matched | Refused,
    "drift": Drifting | Refused,
    "layout": Laid | Refused,
    "estimate": Estimated | Refused,
    "schedule": Scheduled | Refused,
    "show": Shown | Listing | Refused,
    "fuzz": Fuzzed | Refused,
    "train": Step | Refused,
    "verify": Verified | Refused,
    "move": Moved | Refused,
    "checkpoint inspect": Inspected | Refused,
    "checkpoint convert": Rewritten | Refused,
    "checkpoint diff": Apart | Refused,
    "trace diff": Parted | Refused,
    "trace show": Traced | Refused,
    "baseline": Baseline,
}
"""The output of each command with `--json`; `train` prints one such object on each line. `baseline`
is the file of `--write-baseline`.
"""


def schema(name: str) -> dict[str, Any]:
    """The JSON Schema (2020-12) of an output. Raises `KeyError` for an unknown name."""
    from pydantic import TypeAdapter

    body = TypeAdapter(OUTPUTS[name]).json_schema(mode="serialization")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"stagebridge {name}",
        **body,
    }
