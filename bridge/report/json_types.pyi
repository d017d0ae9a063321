# Made of json_types.json by `python docs/generate`.
from collections.abc import Mapping
from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from bridge.report.exit_codes import Exit
from bridge.stack.rules import Effect, How

Verdict = Literal['same', 'in part', 'differs', 'not run']
Number = float | Literal['nan', 'inf', '-inf'] | None

class Refused(TypedDict):
    problems: list[str]
    exit_code: Exit

class Side(TypedDict):
    dialect: str
    version: str
    world_size: int | None
    given: dict[str, Any]

class Told(TypedDict):
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
    path: str
    value: Any
    sources: list[str]
    default_of: str
    how: How
    effect: Effect
    note: str

class Target(Side):
    text: str
    code: dict[str, Any]
    snippet: str

class Converted(TypedDict):
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
    file: str

class OneRefused(Refused):
    file: str

class ManyConverted(TypedDict):
    files: list[OneConverted | OneRefused]
    exit_code: Exit

class Checked(TypedDict):
    source: Side
    effective: dict[str, Any]
    findings: list[Told]
    exit_code: Exit

class Place(TypedDict):
    source: str
    line: int | None
    setting: str

class Unused(Place):
    value: Any
    why: str

class SettledSetting(TypedDict):
    setting: str
    value: Any
    winner: Place
    overruled: list[Unused]
    why: str

class Stop(Place):
    message: str

class Resolved(TypedDict):
    dialect: str
    version: str
    world_size: int | None
    settings: list[SettledSetting]
    ignored: list[Unused]
    stops: list[Stop]
    findings: list[Told]
    exit_code: Exit

class OneOfMany(TypedDict):
    file: str
    source: NotRequired[Side]
    effective: NotRequired[dict[str, Any]]
    findings: NotRequired[list[Told]]
    problems: NotRequired[list[str]]
    exit_code: Exit

class Many(TypedDict):
    files: list[OneOfMany]
    exit_code: Exit

class Named(Side):
    file: str

class Compared(TypedDict):
    first: Named
    second: Named
    findings: list[Told]
    exit_code: Exit

class Matched(Compared):
    settings: dict[str, Any]

class Drifted(TypedDict):
    path: str
    kind: str
    effect: Effect
    given: bool
    before: Any
    after: Any
    message: str
    origin: str | None

class Edited(TypedDict):
    path: str
    before: Any
    after: Any

class Migrated(Side):
    text: str

class Drifting(TypedDict):
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
    micro: int
    accumulation: int
    tokens: int

class Axis(TypedDict):
    axis: str
    size: int
    groups: list[list[int]]

class Grid(TypedDict):
    ranks: int
    axes: list[Axis]
    experts: list[Axis]

class Stage(TypedDict):
    stage: int
    pipeline_rank: int
    layers: list[str]

class Kept(TypedDict):
    weights: int
    gradients: int
    master: int
    moments: int
    total: NotRequired[int]

class Whole(TypedDict):
    format: str
    buffer: int
    bytes: int
    exchanged: NotRequired[str | None]

class Flat(TypedDict):
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
    name: str
    count: int
    bytes: float

class Ranks(TypedDict):
    ranks: list[int]
    pipeline_rank: int
    stages: list[int]
    parameters: int
    bytes: Mapping[str, int]
    flats: list[Flat]
    collectives: list[Call]

class Laid(TypedDict):
    model: Shape
    batch: Batch
    mesh: Grid
    stages: list[Stage]
    ranks: list[Ranks]
    findings: list[Told]
    memory: NotRequired[int | None]
    exit_code: Exit

class NeededTerm(TypedDict):
    kind: str
    what: str
    bytes: int
    formula: str

class NeededByRank(TypedDict):
    pipeline_rank: int
    moment: str
    needed: int
    allocated: int
    between_steps: int
    kinds: Mapping[str, int]
    terms: list[NeededTerm]

class FittingChange(TypedDict):
    settings: Mapping[str, Any]
    needed: int
    price: str

class Estimated(TypedDict):
    fits: bool | None
    memory: int | None
    needed: int
    ranks: list[NeededByRank]
    changes: list[FittingChange]
    findings: list[Told]
    exit_code: Exit

class Scheduled(TypedDict):
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
    since: str
    until: str
    default: Any

class Ruled(TypedDict):
    rule: str
    effect: Effect
    message: str
    place: str
    since: str
    until: str

class Elsewhere(TypedDict):
    dialect: str
    fields: list[str]
    how: How
    lost: list[str]
    always: dict[str, Any]
    reasons: list[str]

class Disagreeing(TypedDict):
    documented: str
    place: str
    code: str
    source: str
    since: str
    until: str

class Shown(TypedDict):
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
    path: str
    type: str
    description: str

class Headed(TypedDict):
    section: str
    fields: list[Listed]

class Listing(TypedDict):
    dialect: str
    versions: list[str]
    sections: list[Headed]

class Failed(TypedDict):
    stage: str
    message: str
    version: str
    world_size: int | None
    text: str
    code: str
    command: str

class Fuzzed(TypedDict):
    examples: int
    releases: dict[str, int]
    held: dict[str, int]
    refused: dict[str, int]
    settings: list[str]
    failure: Failed | None
    again: str
    exit_code: Exit

class Saved(TypedDict):
    steps: int | None
    skipped: int | None
    samples: int | None
    loss: Number
    grad_norm: Number
    lr: float | None
    seed: int | None

class Scale(TypedDict):
    value: float
    dynamic: bool
    factor: float | None
    window: int | None
    minimum: float | None
    hysteresis: int | None
    tolerated: int | None
    good: int | None

class Held(TypedDict):
    name: str
    kind: str
    shape: list[int]
    dtype: str

class WritableFormat(TypedDict):
    to: str
    lost: list[str]
    refused: str | None

class Inspected(TypedDict):
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
    name: str
    bytes: int
    made_of: NotRequired[list[dict[str, Any]]]

class Rewritten(TypedDict):
    to: str
    output: str
    written: bool
    files: list[Put]
    copied: list[str]
    findings: list[Told]
    exit_code: Exit

class Different(TypedDict):
    name: str
    kind: str
    verdict: str
    most: Number
    rounded: str
    block: str

class Apart(TypedDict):
    verdicts: dict[str, int]
    rounded: dict[str, int]
    run: dict[str, tuple[Any, Any]]
    differ: list[Different]
    exit_code: Exit

class Logged(TypedDict):
    folder: str
    engine: Any
    mesh: Any
    accumulation: Any
    formats: Any
    notes: list[str]

class Tensor(TypedDict):
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
    path: str
    first: Any
    second: Any
    layout: bool

class Diagnosed(TypedDict):
    where: str
    claim: str
    evidence: list[str]
    next: str

class Parted(TypedDict):
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
    tensors: list[dict[str, Any]]
    exit_code: Exit

class Changed(TypedDict):
    before: Any
    after: Any

class Gap(TypedDict):
    loss: Number
    norm: Number
    update: Number
    share: Number
    tensor: str
    worst: Number
    scale: str
    floor: Number

class Ran(TypedDict):
    side: str
    engine: str
    as_written: bool
    verdict: str
    cause: str
    losses: list[Number]
    grad_norms: list[Number]
    distance: Gap | None

class Verified(TypedDict):
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
    dialect: str
    format: str
    steps: int | None

class Goal(TypedDict):
    stack: str
    format: str
    config: str

class Size(TypedDict):
    name: str
    bytes: int

class Further(TypedDict):
    side: Literal['source', 'target']
    engine: str
    problem: str
    first: int | None
    losses: list[Number]
    grad_norms: list[Number]
    lr: list[float | None]
    loss_scale: list[float | None]

class Lengths(TypedDict):
    loss: Number
    norm: Number
    update: Number
    tensor: NotRequired[str]

class Proved(TypedDict):
    verdict: Verdict
    steps: int
    ranks: int
    cause: str
    lacking: list[str]
    distance: Lengths | None
    rounding: Lengths | None
    runs: list[Further]

class Moved(TypedDict):
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
    step: int
    loss: Number
    grad_norm: Number
    lr: float | None
    loss_scale: float
    tokens_per_second: float
    memory: float
    skipped: int

class Known(TypedDict):
    file: str
    rule: str
    path: str

class Baseline(TypedDict):
    stagebridge: Literal[1]
    known: list[Known]

OUTPUTS: Mapping[str, Any]
def read_rows() -> dict[str, Any]: ...
def schema(name: str) -> dict[str, Any]: ...
