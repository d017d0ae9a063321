"""Writes checkpoints of ZeRO stages 1 to 3: model states, and a file for each data-parallel rank
with the rank's part of the optimizer's flat groups.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from bridge.checkpoint.digests import SUMS
from bridge.checkpoint.files import File
from bridge.checkpoint.hub import Hub, ParameterGroup, Scale, loss_finding, weights_of
from bridge.checkpoint.interface import PlannedFiles, Wanted
from bridge.checkpoint.lazy import EXACT, ElementRun, Held, Joined, Lazy, cast_lazy, torch_type
from bridge.checkpoint.torch_save import Size, torch_file
from bridge.checkpoint.unpickle import Constant, Record
from bridge.errors import SourceError
from bridge.stack.findings import Finding
from bridge.stack.rules import Effect
from compat.deepspeed.checkpoint.dealing import deal_names, deals_parameters
from compat.deepspeed.checkpoint.files import LATEST

RELEASE = "0.19.8"
"""The release of DeepSpeed whose format of files is written."""
ALIGNMENT = 2
"""Each rank's part of a flat group is padded to a multiple of this number of elements
(stage_1_and_2.py: nccl_start_alignment_factor).
"""
SUBGROUP = 10**9
"""Default size of a flat group at ZeRO stage 3, in elements (runtime/zero/config.py: sub_group_size)."""
PREFIX = {"BF16": "bf16_"}
SCALERS = "deepspeed.runtime.fp16.loss_scaler"


@dataclass(frozen=True)
class ZeroLayout:
    """Layout of a checkpoint to write: ZeRO stage (`level`), number of data-parallel ranks, format
    of the weights, and the parameter names in each flat group.
    """

    hub: Hub
    level: int
    ranks: int
    dtype: str
    groups: tuple[ParameterGroup, ...]
    flats: tuple[tuple[str, ...], ...] = field(default=())

    def weight(self, name: str) -> Lazy:
        """Return the weight of a parameter in the compute format."""
        parameter = self.hub.parameters[name]
        return weights_of(
            parameter.weight if parameter.weight.dtype == self.dtype else parameter.best, self.dtype
        )

    def kinds(self, flat: Sequence[str]) -> dict[str, dict[str, Lazy]]:
        """Return masters and moments of the parameters `flat` in fp32, by kind and then by name."""
        parameters = self.hub.parameters
        tensors = {"fp32": {name: cast_lazy(parameters[name].best, "F32") for name in flat}}
        for kind in parameters[flat[0]].moments if flat else ():
            tensors[kind] = {
                name: cast_lazy(parameters[name].moments[kind], "F32") for name in flat
            }
        return tensors


def plan(hub: Hub, target: Wanted) -> PlannedFiles:
    """Return the files of a ZeRO checkpoint of `hub`. Raises `SourceError` if DeepSpeed would
    refuse the checkpoint or load it wrongly.
    """
    if target.level == 0:
        raise SourceError(
            "deepspeed: stagebridge reads checkpoints of ZeRO 0, but cannot write them; use"
            " --level 1, which gives the same numbers"
        )
    was = hub.origin.layout if hub.origin.format == "deepspeed" else {}
    level, ranks = target.level or was.get("zero", 0) or 1, target.ranks or was.get("ranks", 1)
    # More ranks than elements would leave some rank with nothing to hold.
    elements = sum(prod(parameter.weight.shape) for parameter in hub.trainable_parameters.values())
    if elements < ranks:
        raise SourceError(
            f"deepspeed: found {ranks:,} ranks for only {elements:,} trained elements; choose"
            " fewer ranks with --ranks"
        )
    layout = ZeroLayout(hub, level, ranks, target.dtype or hub.weight_dtype, _groups(hub))
    layout = ZeroLayout(hub, level, ranks, layout.dtype, layout.groups, tuple(_flats(layout)))
    _same_moments(hub)
    tag = f"global_step{steps_of(hub)}"
    files = (
        *_model_files(layout, tag),
        *_optimizer_files(layout, tag),
        File(LATEST, (tag.encode(),)),
    )
    return PlannedFiles(files, f"{tag}/{SUMS}", tuple(unsaid(layout)))


def _groups(hub: Hub) -> tuple[ParameterGroup, ...]:
    """Return the optimizer's groups with their settings. Raises `SourceError` unless each trained
    parameter is in exactly one group.
    """
    if not hub.groups:
        raise SourceError(
            "deepspeed: the source checkpoint does not say its optimizer groups, but DeepSpeed reads groups"
            " and settings from these files by their position; write the checkpoint with --to"
            " universal, which uses names"
        )
    names = [name for group in hub.groups for name in group.names]
    odd = sorted(set(names) ^ set(hub.trainable_parameters))
    if odd or len(names) != len(set(names)):
        raise SourceError(
            f"deepspeed: the parameter {(odd or names)[0]} is in no optimizer group, or in"
            " several; the source checkpoint is damaged"
        )
    return hub.groups


def _same_moments(hub: Hub) -> None:
    """Raise `SourceError` unless all trained parameters have the same moments, which flat groups
    require.
    """
    parameters = hub.trainable_parameters
    for name, parameter in parameters.items():
        if set(parameter.moments) != set(hub.moments):
            missing = sorted(set(hub.moments) - set(parameter.moments))
            raise SourceError(
                f"deepspeed: {name} lacks the moments {', '.join(missing)}; all parameters of a"
                " flat group need the same moments"
            )


def _flats(layout: ZeroLayout) -> Iterator[tuple[str, ...]]:
    """Yield the parameter names of each flat group. At ZeRO stage 3 one optimizer group may consist
    of several flat groups (stage3.py: _create_fp16_sub_groups).
    """
    zero = (layout.hub.config or {}).get("zero_optimization")
    most = zero.get("sub_group_size", SUBGROUP) if isinstance(zero, Mapping) else SUBGROUP
    for group in layout.groups:
        # Elements of each parameter on one rank, rounded up: stage 3 splits every parameter for
        # itself.
        sizes = {
            name: -(-layout.hub.parameters[name].weight.count // layout.ranks)
            for name in group.names
        }
        if layout.level < 3 and deals_parameters(layout.hub.config):
            yield deal_names(group.names, layout.ranks)
            continue
        if layout.level < 3 or most >= sum(sizes.values()):
            yield group.names
            continue
        names: list[str] = []
        for name in group.names:
            names.append(name)
            if sum(sizes[member] for member in names) >= most or name == group.names[-1]:
                yield tuple(names)
                names = []


def steps_of(hub: Hub) -> int:
    return (hub.where.steps or 0) + (hub.where.skipped or 0)


# Model states


def _model_files(layout: ZeroLayout, tag: str) -> Iterator[File]:
    if layout.level < 3:
        yield torch_file(f"{tag}/mp_rank_00_model_states.pt", model_of(layout, 0))
        return
    # At stage 3 each rank has model states of its own, with its part of the frozen parameters.
    for rank in range(layout.ranks):
        yield torch_file(
            f"{tag}/zero_pp_rank_{rank}_mp_rank_00_model_states.pt", model_of(layout, rank)
        )


def model_of(layout: ZeroLayout, rank: int) -> dict[str, Any]:
    """Return the contents of one rank's file of model states (runtime/engine.py:
    _common_checkpoint_state).
    """
    hub, shapes = (
        layout.hub,
        {name: Size(parameter.weight.shape) for name, parameter in layout.hub.parameters.items()},
    )
    frozen = (
        [name for name, parameter in hub.parameters.items() if not parameter.trained]
        if layout.level > 1
        else []
    )
    schedule = hub.schedule
    if (schedule is None or "last_epoch" in schedule) and hub.where.steps is not None:
        # All that DeepSpeed's own schedulers keep is the number of the last update
        # (runtime/lr_schedules.py: state_dict).
        schedule = {"last_batch_iteration": hub.where.steps - 1, **(schedule or {})}
    return {
        "module": OrderedDict(_module_entries(layout)),
        "buffer_names": list(hub.buffers),
        "optimizer": None,
        "param_shapes": [
            OrderedDict((name, shapes[name]) for name in flat) for flat in layout.flats
        ],
        "frozen_param_shapes": OrderedDict((name, shapes[name]) for name in frozen)
        if layout.level > 1
        else None,
        "shared_params": dict(hub.ties) if rank == 0 else {},
        "frozen_param_fragments": OrderedDict(
            (name, _fragment(layout, name, rank)) for name in frozen
        )
        if layout.level > 1
        else None,
        "lr_scheduler": schedule,
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": hub.where.skipped or 0,
        "global_steps": steps_of(hub),
        "global_samples": hub.where.samples or 0,
        "dp_world_size": layout.ranks,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "ds_config": hub.config or {},
        "ds_version": RELEASE,
        **hub.client,
    }


def _module_entries(layout: ZeroLayout) -> Iterator[tuple[str, Lazy]]:
    """Yield the entries of the model's state dictionary. At ZeRO stage 3 parameters are empty
    tensors, and only buffers have values.
    """
    empty = Held(_make_zeros(0, layout.dtype))
    entries = {
        name: empty if layout.level == 3 else layout.weight(name) for name in layout.hub.parameters
    }
    yield from entries.items()
    yield from (
        (alias, entries[name]) for alias, name in layout.hub.ties.items() if name in entries
    )
    yield from layout.hub.buffers.items()


def _fragment(layout: ZeroLayout, name: str, rank: int) -> Lazy:
    """Return a rank's part of a frozen parameter: the whole parameter below ZeRO stage 3, and an
    equal share of the parameter's elements at stage 3.
    """
    weight = layout.weight(name)
    return weight if layout.level < 3 else _third({name: weight}, rank, layout.ranks)


def _make_zeros(count: int, dtype: str) -> Any:
    import torch

    return torch.zeros(count, dtype=torch_type(dtype))


# Optimizer states


def _optimizer_files(layout: ZeroLayout, tag: str) -> Iterator[File]:
    for rank in range(layout.ranks):
        name = f"{PREFIX.get(layout.dtype, '')}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        state = _thirds(layout, rank) if layout.level == 3 else _slices(layout, rank)
        contents = {
            "optimizer_state_dict": state,
            "ds_config": layout.hub.config or {},
            "ds_version": RELEASE,
        }
        yield torch_file(f"{tag}/{name}", contents)


def _slices(layout: ZeroLayout, rank: int) -> dict[str, Any]:
    """Return a rank's optimizer states at ZeRO stages 1 and 2 (stage_1_and_2.py: state_dict).
    Masters are stored without padding, moments with padding.
    """
    cuts = [_slice(layout, flat, rank) for flat in layout.flats]
    clip = (layout.hub.config or {}).get("gradient_clipping")
    return {
        **scaler(layout),
        "overflow": False,
        **({} if clip is None else {"clip_grad": float(clip)}),
        "base_optimizer_state": {
            "state": {
                number: {**step_of(layout, flat), **cut.moments}
                for number, (cut, flat) in enumerate(zip(cuts, layout.flats, strict=True))
            },
            "param_groups": [row_of(group, [number]) for number, group in enumerate(layout.groups)],
        },
        "single_partition_of_fp32_groups": [cut.masters for cut in cuts],
        "zero_stage": Record("deepspeed.runtime.zero.config ZeroStageEnum", (layout.level,)),
        "group_paddings": [cut.padding for cut in cuts],
        "param_alignment_paddings": [[0] * len(flat) for flat in layout.flats],
        "partition_count": [layout.ranks] * len(layout.flats),
        "ds_version": RELEASE,
        "param_slice_mappings": [
            OrderedDict((name, cut.places[name]) for name in group.names if name in cut.places)
            for cut, group in zip(cuts, layout.groups, strict=True)
        ],
    }


@dataclass(frozen=True)
class Cut:
    """A rank's part of a flat group: masters, moments, number of padding elements, and the
    positions of parameters in the part.
    """

    masters: Lazy
    moments: Mapping[str, Lazy]
    padding: int
    places: Mapping[str, Record]


def _slice(layout: ZeroLayout, flat: Sequence[str], rank: int) -> Cut:
    """Return a rank's part of the flat group `flat`. The group's parameters are concatenated,
    padded and cut into equal parts.
    """
    kinds = layout.kinds(flat)
    count = sum(tensors.count for tensors in kinds["fp32"].values())
    # -count % n is the padding up to the next multiple of n.
    size = (count + -count % (ALIGNMENT * layout.ranks)) // layout.ranks
    begin, end = rank * size, min(count, (rank + 1) * size)
    # The last ranks may hold nothing but padding: then `begin` lies beyond `end`.
    slices = {
        kind: _cut_between(tensors, begin, max(begin, end)) for kind, tensors in kinds.items()
    }
    padding = size - slices["fp32"].count
    moments = {
        kind: _pad_tensor(tensors, padding) for kind, tensors in slices.items() if kind != "fp32"
    }
    return Cut(slices["fp32"], moments, padding, dict(_places(kinds["fp32"], begin, begin + size)))


def _cut_between(tensors: Mapping[str, Lazy], begin: int, end: int) -> Joined:
    """Place the tensors in `tensors` one after the other, and return the elements from `begin` up to,
    but not including, `end`.
    """
    runs, at = [], 0
    for tensor in tensors.values():
        first, last = max(begin, at), min(end, at + tensor.count)
        if first < last:
            runs.append(ElementRun(tensor, first - at, last - at))
        at += tensor.count
    return Joined(tuple(runs), (sum(map(len, runs)),), "F32")


def _pad_tensor(tensor: Lazy, padding: int) -> Lazy:
    if not padding:
        return tensor
    zeros = Held(_make_zeros(padding, tensor.dtype))
    return Joined(
        (ElementRun(tensor, 0, tensor.count), ElementRun(zeros, 0, padding)),
        (tensor.count + padding,),
        tensor.dtype,
    )


def _places(tensors: Mapping[str, Lazy], begin: int, end: int) -> Iterator[tuple[str, Record]]:
    """Yield name and position of each parameter with elements in a rank's part
    (utils/tensor_fragment.py: fragment_address).
    """
    at = 0
    for name, tensor in tensors.items():
        first, last = max(begin, at), min(end, at + tensor.count)
        if first < last:
            yield (
                name,
                Record(
                    "deepspeed.utils.tensor_fragment fragment_address",
                    (),
                    {"numel": last - first, "start": first - begin},
                ),
            )
        at += tensor.count


def _thirds(layout: ZeroLayout, rank: int) -> dict[str, Any]:
    """Return a rank's optimizer states at ZeRO stage 3 (stage3.py: _rigid_state_dict)."""
    parts = [
        {kind: _third(tensors, rank, layout.ranks) for kind, tensors in layout.kinds(flat).items()}
        for flat in layout.flats
    ]
    state = {
        number: {
            **step_of(layout, flat),
            **{kind: tensors for kind, tensors in part.items() if kind != "fp32"},
        }
        for number, (part, flat) in enumerate(zip(parts, layout.flats, strict=True))
    }
    return {
        "zero_stage": Record("deepspeed.runtime.zero.config ZeroStageEnum", (3,)),
        **scaler(layout),
        "overflow": False,
        "partition_count": layout.ranks,
        "optimizer_state_dict": {"state": state, "param_groups": list(_rows(layout))},
        "fp32_flat_groups": [part["fp32"] for part in parts],
    }


def _third(tensors: Mapping[str, Lazy], rank: int, ranks: int) -> Lazy:
    """Return a rank's parts of all tensors in `tensors`, one after the other. Each tensor is cut into
    equal parts, and the last parts are padded.
    """
    runs: list[ElementRun] = []
    dtype = "F32"
    for tensor in tensors.values():
        part, dtype = -(-tensor.count // ranks), tensor.dtype  # rounded up
        first, last = min(tensor.count, rank * part), min(tensor.count, (rank + 1) * part)
        runs.append(ElementRun(tensor, first, last))
        if padding := part - (last - first):
            runs.append(ElementRun(Held(_make_zeros(padding, dtype)), 0, padding))
    # Parameters with fewer elements than ranks leave empty runs.
    filled_runs = tuple(run for run in runs if len(run))
    return Joined(filled_runs, (sum(map(len, filled_runs)),), dtype)


def _rows(layout: ZeroLayout) -> Iterator[dict[str, Any]]:
    """Yield the settings of each optimizer group, with the indices of the group's flat groups."""
    at = 0
    for group in layout.groups:
        numbers = []
        while at < len(layout.flats) and set(layout.flats[at]) <= set(group.names):
            numbers.append(at)
            at += 1
        yield row_of(group, numbers)


def row_of(group: ParameterGroup, numbers: list[int]) -> dict[str, Any]:
    settings = {
        key: tuple(value) if key == "betas" else value for key, value in group.settings.items()
    }
    return {**settings, "params": numbers}


def step_of(layout: ZeroLayout, flat: Sequence[str]) -> dict[str, Any]:
    """Return the optimizer's entry for the step: a number for DeepSpeed's own Adam, a tensor for
    PyTorch's optimizers. Return an empty dictionary if the source has no step.
    """
    import torch

    step = layout.hub.parameters[flat[0]].step if flat else None
    if step is None:
        return {}
    return (
        {"step": int(step)} if own_adam(layout.hub) else {"step": Held(torch.tensor(float(step)))}
    )


def own_adam(hub: Hub) -> bool:
    """Return whether DeepSpeed would build its own Adam: the config's type is Adam or AdamW, and
    torch_adam is off.
    """
    section = (hub.config or {}).get("optimizer")
    if not isinstance(section, Mapping) or str(section.get("type", "")).lower() not in (
        "adam",
        "adamw",
    ):
        return False
    options = section.get("params")
    return not (isinstance(options, Mapping) and options.get("torch_adam"))


def scaler(layout: ZeroLayout) -> dict[str, Any]:
    """Return the entries for the loss scale, with DeepSpeed's own scaler object. If the source has
    no loss scale, DeepSpeed starts fp16 below ZeRO stage 3 with the scale in the config, and all
    other runs with a scale of 1.
    """
    scale = layout.hub.scale
    if scale is None:
        none = {
            "loss_scaler": Record(
                f"{SCALERS} LossScaler", (), {"cur_scale": 1.0, "dynamic": False}
            ),
            "dynamic_loss_scale": False,
        }
        return none if layout.level == 3 or layout.dtype != "F16" else {}
    if not scale.dynamic:
        record = Record(f"{SCALERS} LossScaler", (), {"cur_scale": scale.value, "dynamic": False})
        return {"loss_scaler": record, "dynamic_loss_scale": False}
    return {
        "loss_scaler": Record(f"{SCALERS} DynamicLossScaler", (), _dynamic_scaler(layout, scale)),
        "dynamic_loss_scale": True,
    }


def _dynamic_scaler(layout: ZeroLayout, scale: Scale) -> dict[str, Any]:
    """Return the state of the dynamic loss scaler (runtime/fp16/loss_scaler.py: DynamicLossScaler)."""
    section = (layout.hub.config or {}).get("fp16")
    consecutive = bool(isinstance(section, Mapping) and section.get("consecutive_hysteresis"))
    steps, hysteresis = steps_of(layout.hub), scale.hysteresis or 2
    return {
        "cur_scale": scale.value,
        "dynamic": True,
        "cur_iter": steps,
        "last_overflow_iter": steps - (scale.good or 0) - 1,
        "scale_factor": scale.factor or 2.0,
        "scale_window": scale.window or 1000,
        "min_scale": 1 if scale.minimum is None else scale.minimum,
        "delayed_shift": hysteresis,
        "cur_hysteresis": hysteresis if scale.tolerated is None else scale.tolerated + 1,
        "consecutive_hysteresis": consecutive,
        "raise_error_at_min_scale": True,
        "dtype": Constant(layout.dtype),
    }


def unsaid(layout: ZeroLayout) -> Iterator[Any]:
    hub = layout.hub
    if layout.dtype == "F16" and hub.scale is None:
        start = "stays at 1" if layout.level == 3 else "starts with the value in the config"
        yield loss_finding(
            "scale",
            f"the source checkpoint has no loss scale; the loss scale {start}",
            Effect.NUMBERS,
        )
    if hub.trainable_parameters and not hub.moments:
        yield loss_finding(
            "moments",
            "the source checkpoint has no optimizer state; load the checkpoint with"
            " load_optimizer_states=False",
            Effect.NUMBERS,
        )
    if hub.moments and not hub.ordered:
        message = (
            "the order of the model's parameters is unknown, by which DeepSpeed finds the moments of each; a run"
            " whose model has another order loads those of other parameters"
        )
        yield loss_finding("order", message, Effect.NUMBERS)
    if hub.schedule is None:
        message = (
            "the source checkpoint has no scheduler state; DeepSpeed's own schedulers continue from the"
            " checkpoint's step, and other schedulers start from the beginning"
        )
        yield loss_finding("schedule", message, Effect.NUMBERS)
    if hub.where.steps is None:
        yield loss_finding(
            "step", "the source checkpoint does not contain the step; 0 is assumed", Effect.NUMBERS
        )
    if hub.where.samples is None:
        yield loss_finding(
            "samples",
            "the source checkpoint does not contain the number of samples; 0 is assumed",
            Effect.NONE,
        )
    if hub.random:
        yield loss_finding(
            "random", "DeepSpeed checkpoints do not store random states", Effect.NUMBERS
        )
    yield from _find_other_formats(hub)


def _find_other_formats(hub: Hub) -> Iterator[Finding]:
    """Yield a finding for each kind of tensor that is not in the only number format that DeepSpeed has for it."""
    copies = {
        "masters": ("F32", {name: held.best for name, held in hub.trainable_parameters.items()}),
        "weights": (
            hub.weight_dtype,
            {name: held.weight for name, held in hub.parameters.items() if held.trained},
        ),
        **{
            f"moments.{kind}": (
                "F32",
                {name: tensor for name, of, tensor in hub.tensors() if of == kind},
            )
            for kind in hub.moments
        },
    }
    for kind, (dtype, tensors) in copies.items():
        own = {name: held.dtype for name, held in tensors.items() if held.dtype != dtype}
        inexact = [name for name, other in own.items() if other not in EXACT.get(dtype, ())]
        # A master of fewer digits holds its weight exactly, and a weight is what it was.
        names = inexact if kind == "masters" else list(own)
        if names:
            message = (
                f"{names[0]} and {len(names) - 1} more parameters are in {own[names[0]]}, but DeepSpeed has all"
                f" {kind} in one number format, {dtype}"
            )
            yield loss_finding(kind, message, Effect.NUMBERS if inexact else Effect.NONE)
