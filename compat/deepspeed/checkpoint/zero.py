"""Reads checkpoints of ZeRO stages 0 to 3. They have files of model states, and for each
data-parallel rank a file with the rank's part of the optimizer's flat groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

from bridge.checkpoint import archive
from bridge.checkpoint.archive import Used
from bridge.checkpoint.hub import (
    Hub,
    Origin,
    Parameter,
    ParameterGroup,
    as_plain,
    find_misshapen_states,
    loss_finding,
    settings_of,
)
from bridge.checkpoint.interface import Format, PlannedFiles, Wanted, pointer_target
from bridge.checkpoint.lazy import Cast, ElementRun, Joined, Lazy, cast_lazy, raw_bytes
from bridge.checkpoint.run_files import has_run_files, verify_run_files, with_run_files
from bridge.checkpoint.unpickle import Record
from bridge.errors import SourceError
from bridge.files.shown import show_value
from bridge.stack.findings import Finding
from bridge.stack.rules import Effect
from compat.deepspeed.checkpoint import parts, zero_writing
from compat.deepspeed.checkpoint.dealing import collect_names, deals_parameters
from compat.deepspeed.checkpoint.files import (
    DAMAGED,
    LATEST,
    StageFiles,
    beside,
    client,
    load_file,
    scale_of,
    where,
)

Named = Mapping[str, tuple[int, ...]]


class Zero(Format):
    """Checkpoints of DeepSpeed's engine."""

    name = "deepspeed"
    title = "DeepSpeed ZeRO 0 to 3"
    fixed = True
    takes = frozenset({"dtype", "ranks", "level"})
    unseen = (
        "if the file of one rank is from another run at the same step, stagebridge detects the"
        " file only if the values in the file do not fit the other files"
    )

    def find(self, folder: Path) -> Path | None:
        """Return the checkpoint folder: `folder` itself, or the subfolder that the file `latest`
        names. Return None if there is no checkpoint.
        """
        place = pointer_target(folder, LATEST)
        return (
            place
            if place is not None
            and any(place.glob("*model_states.pt"))
            and not (place / "zero").is_dir()
            else None
        )

    def verify(self, place: Path, used: Used | None = None) -> None:
        """Check everything that the base class checks, the checksums inside each archive, and below
        ZeRO stage 3 that masters round to the weights.
        """
        super().verify(place, used)
        if _has_run_beside(place):
            verify_run_files(place.parent, used)
        for files in StageFiles.of(place):
            for path in files.all:
                archive.verify_archive(path, place, used=used)
            for rank in files.models:
                _model_states(files, rank)
            if files.states and _stage(files.states[0]) < 3:
                _of_one_run(files)

    def read(self, place: Path) -> Hub:
        """Read the checkpoint: common state from the first file of model states, and flat groups
        from the files of all ranks.
        """
        stage_files = StageFiles.of(place)
        if not stage_files:
            raise SourceError(f"{place}: found no file with the model states of rank 0; {DAMAGED}")
        hubs = []
        for files in stage_files:
            # The first rank's optimizer state: only values that all ranks share are read from it.
            optimizer = files.states[0] if files.states else files.model.get("optimizer") or {}
            hubs.append(hub_of(self.name, files, _read_parameters(files), optimizer))
        hub = parts.join_parts(stage_files, hubs) if len(stage_files) > 1 else hubs[0]
        # Trainer and accelerate keep the rest of a run beside the folder that `latest` names.
        return with_run_files(hub, place.parent) if _has_run_beside(place) else hub

    def plan(self, hub: Hub, target: Wanted) -> PlannedFiles:
        """Return the files to write for the wanted ZeRO stage and number of data-parallel ranks."""
        return zero_writing.plan(hub, target)


SAMPLE = 1024
"""Number of masters that are compared with the model's weights, to find files of another run. Of
each parameter, the first masters in a rank's file are compared.
"""


def _of_one_run(files: StageFiles) -> None:
    """Raise `SourceError` if the masters in a rank's file do not round to the model's weights,
    which shows that the file is from another run or another step.
    """
    module, shapes = files.model["module"], shapes_of(files)
    paths: dict[Lazy, Path] = {}
    for rank, state in enumerate(files.states):
        flats = state.get("single_partition_of_fp32_groups")
        for flat in flats if isinstance(flats, list) else ():
            if isinstance(flat, Lazy):
                paths[flat] = files.optimizers[rank]
    # A run is what one rank holds of a parameter; `at` is where it begins in the parameter.
    for name, kinds in _in_fragments(files, shapes).tensors.items():
        master, weight, at = kinds[FP32], module[name], 0
        for run in master.runs if isinstance(master, Joined) else ():
            count = min(len(run), SAMPLE)
            rounding = cast_lazy(run.source, weight.dtype).flat(run.start, run.start + count)
            if bytes(raw_bytes(rounding)) != bytes(raw_bytes(weight.flat(at, at + count))):
                raise SourceError(
                    f"{paths[run.source]}: the masters of {show_value(name)} in this file do not round"
                    f" to the weights in {files.models[0].name}; the file belongs to another run or"
                    " another step"
                )
            at += len(run)


def _has_run_beside(place: Path) -> bool:
    return (place.parent / LATEST).is_file() and has_run_files(place.parent)


Found = tuple[int, dict[str, Parameter], tuple[ParameterGroup, ...], list[Finding]]


def hub_of(format: str, files: StageFiles, contents: Found, optimizer: Mapping[str, Any]) -> Hub:
    """Return the hub of a checkpoint. The loss scale comes from `optimizer`, the parameters and
    groups from `contents`, and everything else from the model states.
    """
    level, parameters, groups, findings = contents
    values, omissions = client(files.model)
    schedule, unread = as_plain(files.model.get("lr_scheduler"), "lr_scheduler")
    config, odd = as_plain(files.model.get("ds_config"), "ds_config")
    module = files.model["module"]
    return Hub(
        Origin(
            format,
            str(files.model.get("ds_version", "")),
            {"zero": level, "ranks": len(files.optimizers) or 1},
            files.all,
        ),
        parameters,
        {name: module[name] for name in files.model.get("buffer_names") or () if name in module},
        _ties(files),
        ordered=True,
        groups=groups,
        where=where(files.model, groups[0].settings.get("lr") if groups else None),
        schedule=schedule,
        scale=scale_of(optimizer),
        client=values,
        config=config,
        findings=(*findings, *omissions, *unread, *odd, *beside(files.model)),
    )


def _read_parameters(files: StageFiles) -> Found:
    """Return the ZeRO stage of a checkpoint, its parameters, optimizer groups and findings."""
    if not files.states:
        return _read_without_zero(files)
    stages = {_stage(state) for state in files.states}
    if len(stages) > 1:
        raise SourceError(
            f"{files.folder}: found files of several ZeRO stages"
            f" ({', '.join(map(str, sorted(stages)))}); {DAMAGED}"
        )
    stage = stages.pop()
    shapes = shapes_of(files)
    # Stages 1 and 2 have a count for each flat group, stage 3 has one for all, and a file may have
    # none.
    counts = files.states[0].get("partition_count", [])
    count = max(
        map(int, counts if isinstance(counts, list) else [counts]), default=len(files.states)
    )
    if count != len(files.states):
        raise SourceError(
            f"{files.folder}: found optimizer states of {len(files.states)} ranks, expected"
            f" {count}; {DAMAGED}"
        )
    flats = _in_thirds(files, shapes) if stage == 3 else _in_fragments(files, shapes)
    rows = _group_rows(files, stage)
    findings = [*_find_losses(rows, _flat_states(files, stage)), *_find_exclusions(files, stage)]
    shapes_in_order: Sequence[Named] = shapes
    if stage < 3 and deals_parameters(files.model.get("ds_config")):
        # Flat groups have their parameters as they were dealt out; the optimizer's groups have the
        # model's order.
        ranks = len(files.states)
        shapes_in_order = [
            {name: group[name] for name in collect_names(tuple(group), ranks)} for group in shapes
        ]
    return (
        stage,
        parameters_of(files, stage, shapes, flats),
        tuple(groups_of(rows, stage, shapes_in_order)),
        findings,
    )


def _find_exclusions(files: StageFiles, stage: int) -> Iterator[Finding]:
    """Yield a finding if the checkpoint was saved without frozen parameters (runtime/engine.py:
    _save_checkpoint). At ZeRO 1 the files do not show whether frozen parameters were left out, so
    there is no finding.
    """
    if stage > 1 and files.model.get("frozen_param_shapes", {}) is None:
        message = (
            "saved with exclude_frozen_parameters, so the checkpoint lacks frozen parameters if the"
            " model has any; load these parameters from the weights with which the run began"
        )
        yield loss_finding("frozen", message, Effect.NUMBERS)


def _stage(state: Mapping[str, Any]) -> int:
    """Return the ZeRO stage of a rank's optimizer states. Files of the bf16 optimizer do not name
    the stage; they have the layout of stage 1.
    """
    stage = state.get("zero_stage", 1)
    return int(stage.arguments[0]) if isinstance(stage, Record) else int(stage)


def shapes_of(files: StageFiles) -> list[Named]:
    """Return the shapes of the parameters in each flat group, by name and in the group's order."""
    groups = files.model.get("param_shapes")
    right = isinstance(groups, list) and all(
        isinstance(group, dict) and all(isinstance(shape, tuple) for shape in group.values())
        for group in groups
    )
    if not right:
        raise SourceError(
            f"{files.models[0]}: found {show_value(groups, 40)} as param_shapes, expected shapes by name; {DAMAGED}"
        )
    return list(groups)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Flats:
    """Optimizer state: `tensors` has lazy tensors by parameter name and then by kind (`fp32` for
    the master, or a moment), and `steps` has the step of each flat group.
    """

    tensors: Mapping[str, Mapping[str, Lazy]]
    steps: Sequence[float | None]


FP32 = "fp32"


def _in_fragments(files: StageFiles, shapes: Sequence[Named]) -> Flats:
    """Return the optimizer state at ZeRO stages 1 and 2. Each rank's file has a part of
    every flat group, and the positions of parameters in this part (`param_slice_mappings`).
    """
    deals = deals_parameters(files.model.get("ds_config"))
    runs: dict[str, dict[str, list[ElementRun]]] = {}
    steps: list[float | None] = []
    for group, names in enumerate(shapes):
        begins = _begins(files, group) if deals else []
        kinds: dict[str, list[Lazy]] = {}
        for rank, state in enumerate(files.states):
            path = files.optimizers[rank]
            flat, moments, step = _read_flat_group(state, group, path)
            _in_step(steps, group, step, path)
            for kind, tensor in {FP32: flat, **moments}.items():
                kinds.setdefault(kind, []).append(tensor)
            places = (
                _pieces_of_rank(state, group, names, begins[rank])
                if deals
                else _fragments(state, group, names, path)
            )
            for name, start, count in places:
                for kind, tensor in {FP32: flat, **moments}.items():
                    if start + count > tensor.count:
                        raise SourceError(
                            f"{path}: {show_value(name)} ends at element {start + count} of {kind},"
                            f" but {kind} has only {tensor.count} elements; {DAMAGED}"
                        )
                    runs.setdefault(name, {}).setdefault(kind, []).append(
                        ElementRun(tensor, start, start + count)
                    )
    if not deals:
        _in_order(files, shapes)
    return Flats(
        {name: _join_runs(files, shapes, name, kinds) for name, kinds in runs.items()}, steps
    )


def _in_step(steps: list[float | None], group: int, step: float | None, path: Path) -> None:
    """Record the step of a flat group on the first rank. Raise `SourceError` if another rank has
    another step.
    """
    if len(steps) == group:
        steps.append(step)
    elif steps[group] != step:
        raise SourceError(
            f"{path}: the moments are from step {step}, but the first rank's moments from"
            f" step {steps[group]}; the file belongs to another run"
        )


def _read_flat_group(
    state: Mapping[str, Any], group: int, path: Path
) -> tuple[Lazy, dict[str, Lazy], float | None]:
    """Return masters, moments and step of one flat group on one rank. Moments and step come from
    the optimizer that ZeRO wraps (`base_optimizer_state`).
    """
    try:
        flat = state["single_partition_of_fp32_groups"][group]
        base = state["base_optimizer_state"]
        state_of_group = (
            base[group]
            if isinstance(base, list)
            else base["state"].get(base["param_groups"][group]["params"][0], {})
        )
        settings = {} if isinstance(base, list) else base["param_groups"][group]
    except (LookupError, TypeError) as error:
        raise SourceError(f"{path}: found no flat group {group} ({error}); {DAMAGED}") from None
    return flat, *_moments(state_of_group, settings, path)


def _moments(
    state: Mapping[str, Any], settings: Mapping[str, Any], path: Path
) -> tuple[dict[str, Lazy], float | None]:
    """Return the moments and the step in an optimizer's state. Some optimizers store the step in
    their settings instead.
    """
    moments = {
        kind: value for kind, value in state.items() if kind != "step" and _is_moment(kind, value)
    }
    step = state.get("step", settings.get("step"))
    if isinstance(step, Lazy):
        step = float(step.whole())
    if step is not None and not isinstance(step, int | float):
        raise SourceError(f"{path}: found {show_value(step)} as step, expected a number; {DAMAGED}")
    return moments, None if step is None else float(step)


def _fragments(
    state: Mapping[str, Any], group: int, names: Named, path: Path
) -> Iterator[tuple[str, int, int]]:
    try:
        rows = state["param_slice_mappings"][group].items()
        positions = [
            (name, int(mapping.state["start"]), int(mapping.state["numel"]))
            for name, mapping in rows
        ]
    except (LookupError, TypeError, AttributeError) as error:
        raise SourceError(
            f"{path}: found no positions of the parameters in flat group {group} ({error});"
            f" {DAMAGED}"
        ) from None
    for name, start, count in positions:
        if name not in names or start < 0 or count < 0:
            raise SourceError(
                f"{path}: flat group {group} has no parameter {show_value(name)}, or its position is"
                f" negative; {DAMAGED}"
            )
        yield name, start, count


def _begins(files: StageFiles, group: int) -> list[range]:
    """Return, for each rank, the range of elements of a flat group in the rank's file. No file has
    the padding at the end of the group.
    """
    sizes = [
        _read_flat_group(state, group, files.optimizers[rank])[0].count
        for rank, state in enumerate(files.states)
    ]
    ends = list(accumulate(sizes))
    return [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def _pieces_of_rank(
    state: Mapping[str, Any], group: int, names: Named, span: range
) -> Iterator[tuple[str, int, int]]:
    """Yield three things for each parameter with elements on this rank: the name, the offset of the
    part in the rank's tensor, and the part's number of elements. This function is for parameters
    that are assigned to ranks in turn. In that case the offsets in `param_slice_mappings` are wrong
    (stage_1_and_2.py: _link_all_hp_params), so they are computed from the order of `param_shapes`.
    """
    # Aligned parameters have padding behind each of them in the flat tensor; a file may have
    # no list of it.
    paddings = (state.get("param_alignment_paddings") or {group: [0] * len(names)})[group]
    at = 0
    for (name, shape), padding in zip(names.items(), paddings, strict=True):
        first, last = max(at, span.start), min(at + prod(shape), span.stop)
        if first < last:
            yield name, first - span.start, last - first
        at += prod(shape) + padding


def _in_order(files: StageFiles, shapes: Sequence[Named]) -> None:
    """Raise `SourceError` unless the parameters are in the model's order from rank to rank. This
    detects swapped files.
    """
    for group, names in enumerate(shapes):
        numbers = {name: number for number, name in enumerate(names)}
        last = -1
        for rank, state in enumerate(files.states):
            for name in state["param_slice_mappings"][group]:
                if numbers[name] < last:
                    raise SourceError(
                        f"{files.optimizers[rank]}: found {show_value(name)} after parameters that come"
                        " later in the model; the file may belong to another rank"
                    )
                last = numbers[name]


def _join_runs(
    files: StageFiles, shapes: Sequence[Named], name: str, kinds: Mapping[str, Sequence[ElementRun]]
) -> dict[str, Lazy]:
    shape = next(tuple(group[name]) for group in shapes if name in group)
    for kind, runs in kinds.items():
        count = sum(map(len, runs))
        if count != prod(shape):
            message = (
                f"all ranks together have {count} elements of {kind} for {show_value(name)}, expected"
                f" {prod(shape)} for its shape {shape}"
            )
            raise SourceError(f"{files.folder}: {message}; {DAMAGED}")
    return {kind: Joined(tuple(runs), shape, runs[0].source.dtype) for kind, runs in kinds.items()}


def _in_thirds(files: StageFiles, shapes: Sequence[Named]) -> Flats:
    """Return the optimizer state at ZeRO stage 3. Every parameter is split into equal parts, one
    for each rank, and the last part is padded.
    """
    if any(state.get("ds_zero_partition_groups") for state in files.states):
        raise SourceError(
            f"{files.folder}: the checkpoint has separate data-parallel groups for experts, which"
            " stagebridge cannot read yet"
        )
    ranks = len(files.states)
    tensors: dict[str, dict[str, Lazy]] = {}
    steps: list[float | None] = []
    for group, names in enumerate(shapes):
        thirds = [
            _read_third(state, group, files.optimizers[rank])
            for rank, state in enumerate(files.states)
        ]
        for rank, (_, step) in enumerate(thirds):
            _in_step(steps, group, step, files.optimizers[rank])
        offset = 0
        for name, shape in names.items():
            part = -(-prod(shape) // ranks)  # rounded up
            tensors[name] = dict(
                _cut_runs(files, [kinds for kinds, _ in thirds], offset, part, tuple(shape))
            )
            offset += part
    return Flats(tensors, steps)


def _read_third(
    state: Mapping[str, Any], group: int, path: Path
) -> tuple[dict[str, Lazy], float | None]:
    """Return masters, moments and step of one flat group on one rank at ZeRO stage 3. Masters and
    moments are by kind.
    """
    try:
        flat, base = state["fp32_flat_groups"][group], state["optimizer_state_dict"]
        settings: Mapping[str, Any] = next(
            (row for row in base["param_groups"] if group in row["params"]), {}
        )
        moments, step = _moments(base["state"].get(group, {}), settings, path)
    except (LookupError, TypeError) as error:
        raise SourceError(f"{path}: found no flat group {group} ({error}); {DAMAGED}") from None
    return {FP32: flat, **moments}, step


def _cut_runs(
    files: StageFiles,
    tensors_by_rank: Sequence[Mapping[str, Lazy]],
    offset: int,
    part: int,
    shape: tuple[int, ...],
) -> Iterator[tuple[str, Lazy]]:
    count = prod(shape)
    for kind in tensors_by_rank[0]:
        runs = []
        for rank, kinds in enumerate(tensors_by_rank):
            size = max(0, min(part, count - rank * part))  # the last ranks may hold only padding
            if kind not in kinds or offset + size > kinds[kind].count:
                raise SourceError(
                    f"{files.optimizers[rank]}: the tensor {kind} ends before element"
                    f" {offset + size}; {DAMAGED}"
                )
            runs.append(ElementRun(kinds[kind], offset, offset + size))
        yield kind, Joined(tuple(runs), shape, runs[0].source.dtype)


def parameters_of(
    files: StageFiles, stage: int, shapes: Sequence[Named], flats: Flats
) -> dict[str, Parameter]:
    """Return all parameters in the model's order: trained ones with masters and moments, frozen
    ones with only the weight.
    """
    module, group_of = (
        files.model["module"],
        {name: number for number, group in enumerate(shapes) for name in group},
    )
    buffers, ties = set(files.model.get("buffer_names") or ()), _ties(files)
    parameters: dict[str, Parameter] = {}
    for name, tensor in module.items():
        if name in buffers or name in ties:
            continue
        if name in group_of:
            kinds = flats.tensors[name]
            parameters[name] = _trainable_parameter(
                name, tensor, kinds, flats.steps[group_of[name]], stage, files
            )
        else:
            parameters[name] = Parameter(_frozen_weight(files, name, tensor, stage), trained=False)
    missing = [name for name in group_of if name not in parameters]
    if missing:
        raise SourceError(
            f"{files.models[0]}: {show_value(missing[0])} is in the optimizer, but not in the model;"
            f" {DAMAGED}"
        )
    return parameters


def _trainable_parameter(
    name: str,
    tensor: Any,
    kinds: Mapping[str, Lazy],
    step: float | None,
    stage: int,
    files: StageFiles,
) -> Parameter:
    """Return a trained parameter. At ZeRO stage 3 no file has the weight in the compute format, so
    the master is rounded to get the weight.
    """
    moments = {kind: lazy for kind, lazy in kinds.items() if kind != FP32}
    master, dtype = kinds[FP32], tensor.dtype
    weight = cast_lazy(master, dtype) if stage == 3 else tensor
    if stage < 3 and tensor.shape != master.shape:
        raise SourceError(
            f"{files.models[0]}: {show_value(name)} has shape {tensor.shape} in the model, but"
            f" {master.shape} in the optimizer; {DAMAGED}"
        )
    # A model in fp32 has no separate master.
    alone = dtype == master.dtype and (stage == 3 or not isinstance(weight, Cast))
    return Parameter(master if alone else weight, None if alone else master, moments, step)


def _frozen_weight(files: StageFiles, name: str, tensor: Lazy, stage: int) -> Lazy:
    """Return the weight of a frozen parameter. Below ZeRO stage 3 the model states contain the
    whole weight; at stage 3 the weight is split over the ranks.
    """
    if stage < 3:
        return tensor
    shape = tuple((files.model.get("frozen_param_shapes") or {}).get(name, ()))
    states = [files.model, *(_model_states(files, rank) for rank in sorted(files.models) if rank)]
    fragments = [(state.get("frozen_param_fragments") or {}).get(name) for state in states]
    parts = [part for part in fragments if isinstance(part, Lazy)]
    if len(parts) != len(states) or sum(part.count for part in parts) < prod(shape):
        raise SourceError(
            f"{files.folder}: parts of the frozen parameter {show_value(name)} are missing; {DAMAGED}"
        )
    runs, at = [], 0
    for part in parts:
        size = min(part.count, prod(shape) - at)
        runs.append(ElementRun(part, 0, size))
        at += size
    return Joined(tuple(runs), shape, parts[0].dtype)


def _model_states(files: StageFiles, rank: int) -> Mapping[str, Any]:
    return load_file(files.models[rank], files.folder, "module")


def groups_of(
    rows: Sequence[Mapping[str, Any]], stage: int, shapes: Sequence[Named]
) -> Iterator[ParameterGroup]:
    """Yield the optimizer's groups with their settings. At ZeRO stage 3 one group may consist of
    several flat groups.
    """
    for number, row in enumerate(rows):
        flats = row["params"] if stage == 3 else [number]
        yield ParameterGroup(
            tuple(name for flat in flats for name in shapes[flat]), _settings(row, number)
        )


def _group_rows(files: StageFiles, stage: int) -> Sequence[Mapping[str, Any]]:
    state = files.states[0]
    base = state["optimizer_state_dict"] if stage == 3 else state["base_optimizer_state"]
    return (
        base["param_groups"]
        if isinstance(base, dict)
        else [{"params": [number]} for number in range(len(base))]
    )


def _read_without_zero(files: StageFiles) -> Found:
    """Read a checkpoint of ZeRO stage 0. There the optimizer's state has parameter numbers instead
    of names, in the order of the optimizer's groups.
    """
    optimizer = files.model.get("optimizer") or {}
    base = optimizer.get("optimizer_state_dict", optimizer)
    other_names = {*(files.model.get("buffer_names") or ()), *_ties(files)}
    module = {
        name: tensor for name, tensor in files.model["module"].items() if name not in other_names
    }
    rows = base.get("param_groups") or []
    numbers = [number for row in rows for number in row["params"]]
    if not numbers:
        none = loss_finding("moments", "the file has no optimizer state", Effect.NUMBERS)
        return 0, {name: Parameter(tensor) for name, tensor in module.items()}, (), [none]
    names = _number_parameters(files, module, numbers, base, optimizer)
    masters = dict(_masters(optimizer, rows, names, module))
    parameters = {
        name: _whole_parameter(name, tensor, names, base, masters, files)
        for name, tensor in module.items()
    }
    groups = tuple(
        ParameterGroup(
            tuple(name for name in names if names[name] in row["params"]), _settings(row, number)
        )
        for number, row in enumerate(rows)
    )
    states = {name: base["state"].get(number, {}) for name, number in names.items()}
    return 0, parameters, groups, _find_losses(rows, states)


def _ties(files: StageFiles) -> dict[str, str]:
    """Return a mapping from each alias of a tied parameter to the parameter's name. The names come
    from ZeRO's list of shared parameters. Without this list, names whose tensors share storage are
    tied.
    """
    names_by_alias = files.model.get("shared_params")
    if names_by_alias is not None:
        return {str(alias): str(name) for alias, name in names_by_alias.items()}
    places: dict[Lazy, str] = {}
    first_names = {
        name: places.setdefault(tensor, name)
        for name, tensor in files.model["module"].items()
        if tensor.count
    }
    return {alias: name for alias, name in first_names.items() if alias != name}


def _settings(row: Mapping[str, Any], number: int) -> dict[str, Any]:
    return settings_of(row, f"param_groups.{number}")[0]


def _find_losses(
    rows: Sequence[Mapping[str, Any]], states: Mapping[str, Mapping[str, Any]]
) -> list[Finding]:
    """Return a finding for each optimizer setting and each optimizer state that is not carried
    over.
    """
    odd = [
        finding
        for number, row in enumerate(rows)
        for finding in settings_of(row, f"param_groups.{number}")[1]
    ]
    kinds = (
        (name, kind)
        for name, state in states.items()
        for kind, value in state.items()
        if not _is_moment(kind, value)
    )
    return [*odd, *find_misshapen_states(kinds)]


def _is_moment(kind: str, value: Any) -> bool:
    """Return whether the optimizer state `kind` is a moment or the step, which are both carried
    over.
    """
    return kind == "step" or (isinstance(value, Lazy) and bool(value.shape))


def _flat_states(files: StageFiles, stage: int) -> dict[str, Mapping[str, Any]]:
    """Return the first rank's optimizer state of each flat group."""
    state = files.states[0]
    base = state["optimizer_state_dict"] if stage == 3 else state["base_optimizer_state"]
    states = enumerate(base) if isinstance(base, list) else base["state"].items()
    return {
        f"flat group {number}": values for number, values in states if isinstance(values, Mapping)
    }


def _number_parameters(
    files: StageFiles,
    module: Mapping[str, Lazy],
    numbers: Sequence[int],
    base: Mapping[str, Any],
    optimizer: Mapping[str, Any],
) -> dict[str, int]:
    """Return the number that each parameter has in the optimizer, by parameter name. The file has
    numbers without names. With a single group, the numbers are in the model's order. If there are
    fewer numbers than parameters, some parameters are frozen, and the file does not say which. In
    that case, shapes and rounded masters must leave only one choice. With several groups, shapes
    must leave only one match. Raises `SourceError` if the match is not unique.
    """
    own = list(module)
    state = base.get("state", {})
    shapes = {
        number: next(
            (v.shape for v in state.get(number, {}).values() if isinstance(v, Lazy) and v.shape),
            None,
        )
        for number in numbers
    }
    alone = len(base["param_groups"]) == 1
    fits = len(own) == len(numbers) and all(
        shapes[n] in (None, module[name].shape) for name, n in zip(own, numbers, strict=True)
    )
    if fits and alone:
        return dict(zip(own, numbers, strict=True))
    numbers_by_name = (
        _choose_numbers(own, module, numbers, shapes, optimizer)
        if alone and len(own) > len(numbers)
        else None
    )
    numbers_by_name = numbers_by_name or _by_shape(own, module, shapes)
    if numbers_by_name is not None:
        return numbers_by_name
    several = "the groups of the optimizer are not in the model's order"
    frozen = (
        f"{len(own) - len(numbers)} of {len(own)} parameters are frozen, and the shapes do not"
        " show which of them"
    )
    problem = f"the optimizer's parameters have numbers but no names, and {frozen if len(own) > len(numbers) else several}"
    raise SourceError(
        f"{files.models[0]}: {problem}; save the checkpoint under ZeRO 1, which stores names"
    )


def _choose_numbers(
    own: Sequence[str],
    module: Mapping[str, Lazy],
    numbers: Sequence[int],
    shapes: Mapping[int, Any],
    optimizer: Mapping[str, Any],
) -> dict[str, int] | None:
    """Return the number of each trained parameter by name, for a model with frozen parameters and
    one optimizer group. The numbers are in the model's order. Return None unless exactly one choice
    of the trained parameters fits.
    """
    masters = dict(
        zip(
            numbers,
            _masters_in_order(optimizer, [shapes[number] for number in numbers]),
            strict=False,
        )
    )

    def fit(number: int, name: str) -> bool:
        master, weight = masters.get(number), module[name]
        if shapes[number] != weight.shape or (master is not None and master.count != weight.count):
            return False
        if master is None:
            return True
        count = min(SAMPLE, weight.count)
        return bytes(raw_bytes(cast_lazy(master, weight.dtype).flat(0, count))) == bytes(
            raw_bytes(weight.flat(0, count))
        )

    # The earliest choice and the latest one agree exactly if there is no other between them.
    first, last = _earliest(numbers, own, fit), _earliest(numbers[::-1], own[::-1], fit)
    return first if first is not None and first == last else None


def _earliest(
    numbers: Sequence[int], own: Sequence[str], fit: Callable[[int, str], bool]
) -> dict[str, int] | None:
    """Return a number for some of the names in `own`: each number goes to the first name that fits
    and that follows the name of the previous number. Return None if a number fits no such name.
    """
    names, numbers_by_name = iter(own), dict[str, int]()
    for number in numbers:
        name = next((name for name in names if fit(number, name)), None)
        if name is None:
            return None
        numbers_by_name[name] = number
    return numbers_by_name


def _masters_in_order(optimizer: Mapping[str, Any], shapes: Sequence[Any]) -> list[Lazy]:
    """Return the masters of a single group, in the group's order; empty if the file has no masters.
    The file has either one tensor for each master or one flat tensor.
    """
    flats = optimizer.get("fp32_groups_flat") or ()
    if not flats or None in shapes:
        return [
            master
            for group in optimizer.get("fp32_groups") or ()
            for master in group
            if isinstance(master, Lazy)
        ]
    ends = list(accumulate(map(prod, shapes)))
    if ends[-1] > flats[0].count:
        return []
    cuts = zip(shapes, ends, strict=True)
    return [
        Joined((ElementRun(flats[0], end - prod(shape), end),), shape, flats[0].dtype)
        for shape, end in cuts
    ]


def _by_shape(
    own: Sequence[str], module: Mapping[str, Lazy], shapes: Mapping[int, Any]
) -> dict[str, int] | None:
    """Return the parameters' numbers by name if each shape belongs to only one parameter, else
    None.
    """
    by: dict[Any, list[str]] = {}  # with frozen ones, which may be those that have the shape
    for name in own:
        by.setdefault(module[name].shape, []).append(name)
    numbers_by_name = {}
    for number, shape in shapes.items():
        if shape is None or len(by.get(shape, ())) != 1:
            return None
        numbers_by_name[by[shape][0]] = number
    return numbers_by_name if len(numbers_by_name) == len(shapes) else None


def _masters(
    optimizer: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    names: Mapping[str, int],
    module: Mapping[str, Lazy],
) -> Iterator[tuple[str, Lazy]]:
    """Yield parameter names and masters of the fp16 and bf16 optimizers, which store one tensor for
    each parameter or one flat tensor for each group (runtime/fp16).
    """
    by_number = {number: name for name, number in names.items()}
    for row, group in zip(rows, optimizer.get("fp32_groups") or (), strict=False):
        yield from zip((by_number[number] for number in row["params"]), group, strict=True)
    for row, flat in zip(rows, optimizer.get("fp32_groups_flat") or (), strict=False):
        at = 0
        for number in row["params"]:
            name = by_number[number]
            count = module[name].count
            yield name, Joined((ElementRun(flat, at, at + count),), module[name].shape, flat.dtype)
            at += count


def _whole_parameter(
    name: str,
    tensor: Lazy,
    names: Mapping[str, int],
    base: Mapping[str, Any],
    masters: Mapping[str, Lazy],
    files: StageFiles,
) -> Parameter:
    if name not in names:
        return Parameter(tensor, trained=False)
    moments, step = _moments(base["state"].get(names[name], {}), {}, files.models[0])
    if any(moment.shape != tensor.shape for moment in moments.values()):
        raise SourceError(
            f"{files.models[0]}: the moments of {show_value(name)} have another shape than the"
            f" parameter; {DAMAGED}"
        )
    return replace(Parameter(tensor, None, moments, step), master=masters.get(name))
