"""Attaches a trace to what trains: a module with its optimizer, an engine of a stack, or a source."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bridge.errors import BridgeError
from bridge.plan.plan import Debug
from bridge.trace.batch_file import keep_batch
from bridge.trace.desync import Desync, DesyncCheck, Policy
from bridge.trace.filter import Filter
from bridge.trace.findings import Findings, TraceFinding
from bridge.trace.invariants import Invariants
from bridge.trace.invariants.inputs import SampleObserver
from bridge.trace.invariants.masters import Masters
from bridge.trace.layer_log import LayerLog
from bridge.trace.log import Log
from bridge.trace.module import ModuleSource
from bridge.trace.pipelining import PipelineSource, stages_of
from bridge.trace.retention import Keep
from bridge.trace.run_liveness import mark_process
from bridge.trace.source import Moment, TraceSource
from bridge.trace.tracer import Observer, Sight, Tracer

LOGS = (
    *(
        "layer_outputs",
        "layer_gradients",
        "param_init",
        "param_gradients",
        "all_param_gradients",
        "param_update",
    ),
    "activation_memory",
)
"""Names of the fields of `Debug` that turn on logs."""
StepCallback = Callable[[int, Mapping[str, float], Sequence[TraceFinding]], object]
THOROUGH = 20
"""Number of steps from one thorough comparison of ranks to the next, if the user gave neither
`debug` nor `policy`.
"""


def attach(
    target: Any,
    debug: Debug | None = None,
    run: str | Path | None = None,
    *,
    optimizer: Any = None,
    accumulation: int | None = None,
    filter: Filter | None = None,
    full: bool = False,
    policy: Policy | None = None,
    strict: bool = False,
    invariants: bool = True,
    on_finding: str | None = None,
    on_step: StepCallback | None = None,
    keep: Keep | None = None,
    done: int = 0,
) -> Tracer:
    """Log the tensors of `target` that `debug` selects into the folder `run` (default: trace), and
    compare ranks that must hold the same tensors.

    `target` is a module with or without wrappers, one stage or schedule of torch's pipelining, the
    engine of a stack in `compat`, or a `TraceSource`. A module needs `optimizer`: one of torch's, a
    wrapper around one, or several that step together. `accumulation` is the number of backward
    passes in each step; without it, the passes of each step are counted. Without `debug`, nothing
    is logged; ranks are compared, a difference is reported, and the training continues.

    `filter` selects tensors for the logs, `keep` limits the logs (`bridge.trace.retention.Keep`),
    `full` logs whole tensors instead of samples, and with `strict` an error of writing stops the
    training. `policy` sets how often ranks are compared, and the reaction to a mismatch. Invariants
    (`bridge.trace.invariants`) are checked in every step unless `invariants` is false. Their
    findings are in `findings` of the returned tracer, are logged, and are written into `run`.
    `on_finding` is a command that is run for each finding, without a shell, with the finding as
    JSON on stdin. `on_step` is called on the first rank after each step, with the number of the
    step, its loss and norm of gradients by name as far as they are known, and its new findings.
    `done` is the number of steps before this run, if it resumes one. No hook is
    installed if `debug` is given but selects nothing. Raises `BridgeError` for any other `target`.
    """
    source = source_of(target, optimizer, accumulation)
    if isinstance(source, ModuleSource):
        source.done = done
    # Without a plan nobody asked for checks: they neither stop the training nor slow it down much.
    policy = policy or Policy(action="raise" if debug else "log", thorough=1 if debug else THOROUGH)
    debug = Debug(tensor_parallel=True) if debug is None else debug  # the line above asked for it
    observers: list[Observer] = []
    logs = any(getattr(debug, name) for name in LOGS)
    folder = Path(run or "trace") if logs or run is not None else None
    if logs and folder is not None:
        observers.append(_layer_log(source, debug, folder, filter, keep, full, strict))
    active = logs or bool(debug.tensor_parallel)
    # One note for the whole run, by the first rank.
    remove_mark = (
        mark_process(folder) if folder is not None and active and source.comm.rank == 0 else None
    )
    findings = Findings(
        folder if source.comm.rank == 0 else None, on_finding, source.comm.rank == 0
    )
    if debug.tensor_parallel:
        observers.append(DesyncCheck(source, Desync(source.comm, policy, source.holders), findings))
    if invariants and observers:
        observers += _invariants_observer(source, findings)
    if on_step is not None and source.comm.rank == 0:
        observers.append(StepReport(source, findings, on_step))
    return Tracer(source, observers, findings, remove_mark).install()


def _invariants_observer(source: TraceSource, findings: Findings) -> Iterator[Observer]:
    """Yield the observer that checks the invariants of a training, or nothing if `source` does not
    give access to the tensors that the checks read.
    """
    if isinstance(source, ModuleSource):
        yield Invariants(source, findings)
        return
    if source.comm.mesh.sizes.get("data", 1) > 1:
        yield SampleObserver(source, findings)
    if getattr(source, "at_hand", False):
        yield Masters(source, findings)


@dataclass
class StepReport:
    """The observer that calls a function of the user's after each step."""

    source: TraceSource
    findings: Findings
    call: StepCallback
    _told: int = 0

    def wants(self, kind: str) -> bool:
        return False

    def saw(self, sight: Sight) -> None:
        """Ignore activations."""

    def reach_moment(self, moment: Moment | None) -> None:
        if moment == "ended":
            found, self._told = self.findings[self._told :], len(self.findings)
            self.call(self.source.now().step, getattr(self.source, "numbers", {}), found)


def _layer_log(
    source: TraceSource,
    debug: Debug,
    folder: Path,
    filter: Filter | None,
    keep: Keep | None,
    full: bool,
    strict: bool,
) -> Observer:
    """Return the observer that writes the logs which `debug` selects into `folder`, within the
    limits of `keep`.
    """
    keep, world = keep or Keep(), source.comm.mesh.world
    chosen = filter or Filter()
    about = {
        **source.about(),
        "ranks": world,
        "layers": list(source.layers),
        **keep.about(),
        **chosen.about(),
    }
    log = Log(folder, source.comm.rank, about, full, strict, keep.share(world))
    return LayerLog(source, debug, log, chosen, keep)


def batch(path: str | Path, *values: Any, **keywords: Any) -> bool:
    """Write a batch of the user's training loop into the safetensors file `path`. A call in each
    step of the loop is enough.

    `values` are a dict, a tuple, or tensors; `keywords` adds named tensors, such as
    `labels=labels`. The first call on the first rank writes the file and returns True; later calls
    in the process do nothing. Raises `BridgeError` with the name and type of each value that is no
    tensor, array or plain value. `stagebridge verify A B --model FOLDER --batch FILE` runs two
    engines on such a file.
    """
    return keep_batch(path, values, keywords)


def source_of(target: Any, optimizer: Any = None, accumulation: int | None = None) -> TraceSource:
    """Return the trace source for `target`. Raises `BridgeError` if `target` cannot be attached."""
    from torch import nn

    # A source is known by its methods: one of another package derives from nothing of ours.
    if all(hasattr(target, name) for name in ("layers", "comm", "now", "tensors")):
        return target  # type: ignore[no-any-return]
    # Before torch's own modules: a stack's engine may be a module too, as DeepSpeed's is.
    stacks = _stack_of(target)
    if stacks is not None:
        return stacks.source_of(target, optimizer, accumulation)  # type: ignore[no-any-return]
    stages = stages_of(target)
    if not (stages or isinstance(target, nn.Module)):
        raise BridgeError(
            f"attach: found {type(target).__name__}, expected a module, a schedule or stage of torch's pipelining, an engine"
            " of a stack, or a Source; pass the object that the training loop calls"
        )
    if optimizer is None:
        raise BridgeError(
            "attach: found a module and no optimizer, expected one whose step() ends each step; pass optimizer=, or a Source"
        )
    return (
        PipelineSource(target, stages, optimizer)
        if stages
        else ModuleSource(target, optimizer, accumulation)
    )


def _stack_of(target: Any) -> Any:
    """Return the module `runtime.tracing` of the stack whose package defines the class of `target`
    or one of its base classes, or None if there is no such stack. For a list of objects, the first
    one counts. The stack's folder has the name of the package.
    """
    first = target[0] if isinstance(target, list | tuple) and target else target
    # A class that a user derives from an engine's comes from another package; its bases tell.
    for kind in type(first).__mro__:
        name = f"compat.{kind.__module__.partition('.')[0]}"
        if (
            find_spec("compat")
            and find_spec(name)
            and find_spec(f"{name}.runtime")
            and find_spec(f"{name}.runtime.tracing")
        ):
            tracing = import_module(f"{name}.runtime.tracing")
            if tracing.takes(first):
                return tracing
    return None
