"""Reads and writes `torch_dist` of Megatron-Core.

It is torch's distributed checkpoint with stacked layers and experts, and with the file `common.pt`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from bridge.checkpoint import archive, dcp
from bridge.checkpoint.archive import Used
from bridge.checkpoint.digests import SUMS, without_digest
from bridge.checkpoint.files import File
from bridge.checkpoint.hub import (
    BESIDE,
    Hub,
    Origin,
    Parameter,
    as_plain,
    beside_of,
    loss_finding,
    weights_of,
    with_beside,
)
from bridge.checkpoint.interface import Format, PlannedFiles, Wanted
from bridge.checkpoint.lazy import ElementRun, Held, Joined, Lazy, cast_lazy
from bridge.checkpoint.torch_save import torch_file
from bridge.checkpoint.unpickle import recorders
from bridge.errors import SourceError
from bridge.files.contained import SMALL, path_inside, read_text
from bridge.files.sealed import parse_object
from bridge.files.shown import show_value
from bridge.stack.findings import Finding
from bridge.stack.rules import Effect
from compat.megatron.checkpoint import run
from compat.megatron.checkpoint.buckets import unpack_buckets
from compat.megatron.checkpoint.names import FUSED
from compat.megatron.checkpoint.run import DAMAGED, TRACKER

METADATA = "metadata.json"
PLANNER = "torch.distributed.checkpoint.planner"
KNOWN = {
    **dcp.KNOWN,
    **run.KNOWN,
    **recorders(
        *(
            f"{PLANNER} {name}"
            for name in (
                "SavePlan",
                "WriteItem",
                "WriteItemType",
                "TensorWriteData",
                "BytesIOWriteData",
            )
        )
    ),
    **recorders("megatron.core.dist_checkpointing.strategies.torch MCoreSavePlan"),
}
"""Names of the classes whose objects the file `.metadata` may hold. Besides torch's usual classes,
these are the classes of the save plans of all ranks.
"""
EXTRA = "._extra_state"
STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(\w+?)\.(.+)")
MASTERS = ("param", "fp32_param", "master_param")
"""Names that Megatron's optimizers use for the master copy of a weight."""
STACKED = re.compile(r"decoder\.layers\.(?!\d)(.+)")
EXPERTS = re.compile(r"(.*mlp\.experts\.)experts\.(linear_fc[12]\.weight)")
OWN = re.compile(r"(decoder\.layers\.)(\d+)\.(.+)")
# The two spellings of an expert's matrices: grouped (linear_fc1.weight3), or one module for each
# expert.
OF_EXPERT = re.compile(
    r"mlp\.experts\.(?:(linear_fc[12])\.weight(\d+)|local_experts\.(\d+)\.(linear_fc[12])\.weight)"
)
BACKEND = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


class TorchDist(Format):
    """Distributed checkpoints of Megatron-Core."""

    name = "megatron"
    title = "Megatron-Core torch_dist"
    takes = frozenset({"dtype", "level"})
    names = "megatron"

    def find(self, folder: Path) -> Path | None:
        """Return the folder of the checkpoint: `folder` itself, or the iteration in it that
        Megatron-LM's tracker names.
        """
        place = iteration(folder)
        return place if (place / METADATA).is_file() and (place / dcp.COMMON).is_file() else None

    def read(self, place: Path) -> Hub:
        """Read all tensors from any layout of ranks, by Megatron's names with the index of the
        layer.
        """
        backend = parse_object(read_text(place / METADATA, place, SMALL), place / METADATA).get(
            "sharded_backend"
        )
        if backend != "torch_dist":
            raise SourceError(
                f"{place / METADATA}: found {show_value(backend)} as sharded_backend; expected torch_dist; save the run with"
                " --ckpt-format torch_dist"
            )
        common = archive.read_archive(place / dcp.COMMON, place, KNOWN)
        if not isinstance(common, dict):
            raise SourceError(
                f"{place / dcp.COMMON}: found {show_value(common, 30)}; expected a dictionary; {DAMAGED}"
            )
        _sharding(common, place)
        entries = {key: entry.value for key, entry in dcp.read_entries(place, KNOWN).items()}
        return _hub(self.name, place, common, entries)

    def verify(self, place: Path, used: Used | None = None) -> None:
        """Verify checksums: those in the checkpoint's file of checksums, and, if it does not list all
        files, those inside each archive.
        """
        super().verify(place, used)
        if without_digest(place, (*place.glob("*.distcp"), place / dcp.COMMON)):
            dcp.verify_checksums(place, KNOWN, used)
            archive.verify_archive(place / dcp.COMMON, place)

    def plan(self, hub: Hub, target: Wanted) -> PlannedFiles:
        """Plan the files of a single rank, which Megatron reads on any layout
        (`fully_reshardable`).
        """
        return _plan_files(hub, target)


def iteration(folder: Path) -> Path:
    """Return the folder of the iteration that the tracker file names, or `folder` itself if there
    is no tracker.

    Raises `SourceError` if the tracker has other text.
    """
    path = folder / TRACKER
    if not path.is_file():
        return folder
    text = read_text(path, folder, SMALL).strip()
    # `release` is a converted checkpoint without an iteration. isascii, because isdigit takes other
    # scripts' digits too.
    if (text != "release" and not text.isascii()) or not (text == "release" or text.isdigit()):
        raise SourceError(
            f"{path}: found {show_value(text)}; expected the number of an iteration; {DAMAGED}"
        )
    return path_inside(folder / (text if text == "release" else f"iter_{int(text):07d}"), folder)


# Reading


OLD = ("fully_sharded_model_space", "dp_zero_gather_scatter")
"""Names of layouts of the distributed optimizer that older releases wrote and that cannot be read.
"""


def _sharding(common: Mapping[str, Any], place: Path) -> None:
    """Raise `SourceError` for a layout of the distributed optimizer that cannot be read."""
    for optimizer in _optimizers(common, {}):
        layout = optimizer.get("param_state_sharding_type")
        if layout in OLD:
            raise SourceError(
                f"{place / dcp.COMMON}: found the layout {layout} of the distributed optimizer, which"
                " cannot be read; save the run with --dist-ckpt-optim-fully-reshardable"
            )


def _hub(format: str, place: Path, common: Mapping[str, Any], entries: Mapping[str, Any]) -> Hub:
    args = run.arguments(common)
    tensors = {key: value for key, value in entries.items() if isinstance(value, Lazy)}
    values = {key: value for key, value in entries.items() if not isinstance(value, Lazy)}
    weights, kinds = _sort_tensors(tensors, BESIDE in common)
    if not weights:
        raise SourceError(f"{place / dcp.METADATA}: found no tensors of a model; {DAMAGED}")
    optimizers = list(_optimizers(common, values))
    optimizer = optimizers[0] if optimizers else {}
    step = run.step_of(optimizer)
    # dp_reshardable stores flat buckets instead of parameters.
    if any(".bucket_idx_" in key for key in tensors):
        kinds = unpack_buckets(place, weights, tensors, values, args)
    parameters = {name: _parameter(name, weight, kinds, step) for name, weight in weights.items()}
    rows = [
        row for state in optimizers for row in state.get("optimizer", state).get("param_groups", ())
    ]
    dimensions = {
        name: len(parameter.weight.shape)
        for name, parameter in parameters.items()
        if parameter.trained
    }
    groups = run.groups_of(rows, dimensions, str(place / dcp.COMMON)) if rows and kinds else ()
    client, findings = run.client_of(common)
    # The learning rate that the run had, as the first group has it.
    lr = groups[0].settings.get("lr") if groups else None
    layout = {
        "tensor": args.get("tensor_model_parallel_size"),
        "pipeline": args.get("pipeline_model_parallel_size"),
    }
    files = (
        place / dcp.METADATA,
        place / dcp.COMMON,
        place / METADATA,
        *sorted(place.glob("*.distcp")),
    )
    hub = Hub(
        Origin(
            format,
            layout={key: size for key, size in layout.items() if isinstance(size, int)},
            files=files,
        ),
        parameters,
        ordered=False,
        groups=groups,
        where=run.where_of(common, step, lr),
        scale=run.scale_of(optimizer, args),
        client=client,
        model=run.model_of(args),
        findings=(*findings, *_beside(values), *_strange(weights, kinds)),
    )
    return with_beside(hub, as_plain(common.get(BESIDE), BESIDE)[0])


ENDS = 4096
"""Number of elements at each end of a parameter that are compared with its master."""


def _strange(
    weights: Mapping[str, Lazy], kinds: Mapping[str, Mapping[str, Lazy]]
) -> Iterator[Finding]:
    """Yield findings on masters that do not round to their weights.

    Megatron-Core 0.16.1 writes zeros for some masters if stages share the word embedding and the
    distributed optimizer is saved fully reshardable. A comment in its code says so
    (optimizer/distrib_optimizer.py: sharded_param_state_fully_reshardable).
    """
    for name, weight in weights.items():
        master = next(
            (tensor for kind, tensor in kinds.get(name, {}).items() if kind in MASTERS), None
        )
        # Two ends and not the whole tensor: a master that was lost is all zeros.
        ends = ((0, min(ENDS, weight.count)), (max(0, weight.count - ENDS), weight.count))
        if master is not None and not all(_equals_master(master, weight, *end) for end in ends):
            message = (
                f"{name}: the master does not round to the weight, and the moments are lost too"
            )
            advice = (
                "Megatron itself would continue from this master; save the run as dp_reshardable"
            )
            yield loss_finding("masters", f"{message}; {advice}", Effect.NUMBERS)


def _equals_master(master: Lazy, weight: Lazy, start: int, stop: int) -> bool:
    import torch

    own = weight.flat(start, stop)
    return torch.equal(master.flat(start, stop).to(own.dtype), own)


def _sort_tensors(
    tensors: Mapping[str, Lazy], bare_names: bool
) -> tuple[dict[str, Lazy], dict[str, dict[str, Lazy]]]:
    """Return the weights by name, and for each weight the optimizer's tensors by kind.

    Tensors that stack layers or experts are split. If `bare_names` is true, no module wraps the
    model: then a first part of a name such as `model.` belongs to the name.
    """
    weights: dict[str, Lazy] = {}
    kinds: dict[str, dict[str, Lazy]] = {}
    for key, tensor in tensors.items():
        match = STATE.fullmatch(key)
        if match is None and key.startswith(("optimizer.", "chained_")):
            continue  # a bucket, which `unpack_buckets` takes apart
        bare = match[2] if match else key
        # Prefixes of modules that wrap the model.
        while not bare_names and bare.startswith(("module.", "model.")):
            bare = bare.partition(".")[2]
        for name, part in apart(bare, tensor):
            if match:
                kinds.setdefault(name, {})[match[1]] = part
            else:
                weights[name] = part
    return weights, kinds


def apart(name: str, tensor: Lazy) -> Iterator[tuple[str, Lazy]]:
    """Yield each layer or expert of a tensor that stacks layers or experts, with its name. Any
    other tensor is yielded unchanged.
    """
    if match := STACKED.fullmatch(name):
        for layer, part in enumerate(_parts(tensor)):
            yield from apart(f"decoder.layers.{layer}.{match[1]}", part)
    elif match := EXPERTS.fullmatch(name):
        for expert, part in enumerate(_parts(tensor)):
            yield f"{match[1]}{match[2]}{expert}", part
    else:
        yield name, tensor


def _parts(tensor: Lazy) -> Iterator[Lazy]:
    """Yield the slices along the first dimension, which stacks layers or experts."""
    count = tensor.shape[0]
    size = tensor.count // count
    for number in range(count):
        yield Joined(
            (ElementRun(tensor, number * size, (number + 1) * size),),
            tensor.shape[1:],
            tensor.dtype,
        )


def _parameter(
    name: str, weight: Lazy, kinds: Mapping[str, Mapping[str, Lazy]], step: float | None
) -> Parameter:
    moments = dict(kinds.get(name, {}))
    master = next((moments.pop(kind) for kind in MASTERS if kind in moments), None)
    # In fp32 training the optimizer updates the weight itself; what it stores is no second copy.
    if master is not None and master.dtype == weight.dtype:
        weight, master = master, None
    return Parameter(
        weight, master, moments, step if moments else None, trained=not kinds or name in kinds
    )


def _optimizers(
    common: Mapping[str, Any], values: Mapping[str, Any]
) -> Iterator[Mapping[str, Any]]:
    """Yield the state of each optimizer. A chained optimizer has several.

    The format `dp_reshardable` keeps them in the values of each rank, not in `common`.
    """
    optimizer = common.get("optimizer")
    for part in (
        optimizer.values()
        if isinstance(optimizer, Mapping) and all(isinstance(key, int) for key in optimizer)
        else [optimizer]
    ):
        if isinstance(part, Mapping) and ("param_groups" in part or "optimizer" in part):
            yield part
    ranks = {
        key: value
        for key, value in values.items()
        if re.search(r"dp_group_idx_0\.(?:optimizer|grad_scaler)/", key)
    }
    if ranks:
        yield {key.partition("/")[0].rpartition(".")[2]: value[0] for key, value in ranks.items()}


def _beside(values: Mapping[str, Any]) -> Iterator[Finding]:
    yield from run.generators(any(key.startswith("rng_state") for key in values))
    # Without fp8, each module stores an empty extra state.
    full = [key for key, value in values.items() if EXTRA in key and value not in ([None], None)]
    if full:
        yield loss_finding(
            "_extra_state",
            f"{full[0]} and {len(full) - 1} more: scales of 8-bit formats are not carried over",
            Effect.NUMBERS,
        )


# Writing


def _plan_files(hub: Hub, request: Wanted) -> PlannedFiles:
    place = f"iter_{run.iteration_of(hub):07d}"
    layout = DistLayout(hub, request.dtype, 1 if request.level is None else request.level)
    if layout.level > 1:
        raise SourceError(
            f"--level: found {layout.level}; expected 0, or 1 for Megatron's distributed optimizer"
        )
    sharding = {"distrib_optim_sharding_type": SHARDING} if layout.level else {}
    content = {**sharding, "singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    common = {
        **run.common_of(hub, layout.optimizer() if hub.moments else {}),
        "content_metadata": content,
        BESIDE: beside_of(hub),
    }
    files = [
        *(
            File(f"{place}/{file.name}", file.parts)
            for file in dcp.files_of([*_boxes(layout)], None)
        ),
        torch_file(f"{place}/{dcp.COMMON}", common),
        File(f"{place}/{METADATA}", (json.dumps(BACKEND).encode(),)),
        File(TRACKER, (str(run.iteration_of(hub)).encode(),)),
    ]
    return PlannedFiles(
        tuple(files),
        f"{place}/{SUMS}",
        (*run.unsaid(hub), *_foreign(hub), *_find_left_out(hub), *layout.find_casts()),
    )


BEGINNINGS = (
    "embedding.",
    "decoder.",
    "output_layer.",
    "encoder.",
    "mtp.",
    "vision_",
    "language_model.",
)
"""Prefixes of parameter names in Megatron-Core's models."""


def _foreign(hub: Hub) -> Iterator[Finding]:
    """Yield a finding if parameter names are unknown to Megatron-Core, which loads by name."""
    odd = [name for name in hub.parameters if not name.startswith(BEGINNINGS)]
    if odd:
        message = (
            f"no model of Megatron-Core has {len(odd)} of the parameter names, such as {odd[0]}, and"
            " stagebridge cannot translate the names; only a model with these names loads the parameters"
        )
        yield loss_finding("names", message, Effect.NUMBERS)


def _find_left_out(hub: Hub) -> Iterator[Finding]:
    """Yield a finding if there are buffers, or further names of tied parameters that Megatron-Core does not have."""
    names = [*hub.buffers, *(alias for alias in hub.ties if not alias.startswith(BEGINNINGS))]
    if names:
        message = f"{', '.join(names)}: buffers and further names of a parameter are not written, as Megatron-Core has none"
        yield loss_finding("buffers", message, Effect.NUMBERS)


SHARDING = "fully_reshardable"


@dataclass(frozen=True)
class DistLayout:
    """The layout to write: the format of the weights (None: that of each), and the ZeRO level.

    Level 1 is the distributed optimizer.
    """

    hub: Hub
    wanted: str | None
    level: int

    @property
    def dtype(self) -> str:
        """The format of weights that cannot each have their own."""
        return self.wanted or self.hub.weight_dtype

    @cached_property
    def dtypes(self) -> dict[str, str]:
        """The format in which each weight is written. Weights of all layers in one tensor have one format, and
        so have all weights of an optimizer that has masters for all of them or for none.
        """
        layers, separate = _layers(self.hub)
        keys = {name: _place(name, self.hub, layers, separate)[0] for name in self.hub.parameters}
        own: dict[str, set[str]] = {}
        for name, parameter in self.hub.parameters.items():
            own.setdefault(keys[name], set()).add(parameter.weight.dtype)
        one = self.wanted is not None or (self.level == 0 and bool(self.hub.moments))
        return {
            name: self.dtype if one or len(own[key]) > 1 else next(iter(own[key]))
            for name, key in keys.items()
        }

    def find_casts(self) -> Iterator[Finding]:
        """Yield a finding for each other format in which weights are written without being asked for."""
        casts: dict[tuple[str, str], list[str]] = {}
        for name, parameter in self.hub.parameters.items() if self.wanted is None else ():
            if self.dtypes[name] != parameter.weight.dtype:
                casts.setdefault((parameter.weight.dtype, self.dtypes[name]), []).append(name)
        for (before, after), names in casts.items():
            message = (
                f"{len(names)} weights in {before}, such as {names[0]}, are written in {after}, as Megatron has them "
                "in one tensor or under one optimizer with weights in that format"
            )
            effect = Effect.NONE if after == "F32" else Effect.NUMBERS
            yield loss_finding("weights", message, effect)

    @property
    def apart(self) -> bool:
        """Whether masters are separate tensors."""
        return self.level == 1 or self.dtype != "F32"

    def optimizer(self) -> dict[str, Any]:
        """Return the optimizer's state that is no tensor (optimizer.py, distrib_optimizer.py)."""
        steps = {
            parameter.step
            for parameter in self.hub.trainable_parameters.values()
            if parameter.moments
        }
        if len(steps) > 1:
            text = show_value(sorted(map(str, steps)))
            raise SourceError(
                f"megatron: found moments of several steps ({text}); Megatron has one step for all"
                " moments; keep the source's format"
            )
        step = next(iter(steps), None)
        if self.level:
            inner: dict[str, Any] = {"param_groups": run.rows_of(self.hub, step)}
            return {
                "optimizer": inner,
                **run.grad_scaler(self.hub),
                "param_state_sharding_type": SHARDING,
            }
        state = {} if step is None else {"common_step": Held(torch_number(step))}
        inner = {"state": state, "param_groups": run.rows_of(self.hub, None)}
        return {"optimizer": inner, **run.grad_scaler(self.hub)} if self.apart else inner


def torch_number(value: float) -> Any:
    """Return the number as a tensor."""
    import torch

    return torch.tensor(float(value))


def _boxes(layout: DistLayout) -> Iterator[dcp.Saved]:
    """Yield all weights, masters, moments and extra states to write. The tensors of a layer are
    slices of tensors that stack all layers.
    """
    hub = layout.hub
    master = "param" if layout.level else "fp32_param"
    layers, separate = _layers(hub)
    for name, parameter in hub.parameters.items():
        dtype = layout.dtypes[name]
        weight = weights_of(
            parameter.weight if parameter.weight.dtype == dtype else parameter.best, dtype
        )
        masters = {master: cast_lazy(parameter.best, "F32")} if layout.apart else {}
        kinds = {"": weight, **({**masters, **parameter.moments} if parameter.moments else {})}
        for kind, source in kinds.items():
            key, sizes, offsets = _place(name, hub, layers, separate)
            value = source
            if sizes:  # one more dimension of size 1 for each stacked one
                value = Joined(
                    (ElementRun(source, 0, source.count),),
                    (1,) * len(sizes) + source.shape,
                    source.dtype,
                )
            top = f"optimizer.state.{kind}." if kind else ""
            yield dcp.Saved(
                f"{top}{key}",
                value,
                (*sizes, *source.shape),
                (*offsets, *(0 for _ in source.shape)),
            )
        yield from _extra(name, hub, layers, separate)


def _layers(hub: Hub) -> tuple[int, bool]:
    """Return the number of layers, and whether the layers have different tensors. Megatron does not
    stack such layers (transformer_block.py).
    """
    layers: dict[int, set[str]] = {}
    for name in hub.parameters:
        if match := OWN.fullmatch(name):
            layers.setdefault(int(match[2]), set()).add(match[3])
    if sorted(layers) != list(range(len(layers))):
        raise SourceError(
            f"megatron: found layers {show_value(sorted(layers))}; expected consecutive layers from 0; "
            "the source is damaged"
        )
    args = run.run_state(hub).get("args") or {}
    has_list = any(
        isinstance(args.get(name), list) for name in ("moe_layer_freq", "linear_attention_freq")
    )
    return len(layers), has_list or len(set(map(frozenset, layers.values()))) > 1


def _place(
    name: str, hub: Hub, layers: int, separate: bool
) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """Return the key under which a tensor is saved, the sizes of the dimensions that stack layers
    and experts, and the tensor's indices in these dimensions.
    """
    match = OWN.fullmatch(name)
    if match is None:
        return name, (), ()
    top, layer, rest = match[1], int(match[2]), match[3]
    # Megatron saves norms of its own layers under the names of Transformer Engine's. A layer of
    # Transformer Engine with experts has its second norm apart, and that under its own name.
    local = any(
        "local_experts." in other or other.endswith(".input_layernorm.weight")
        for other in hub.parameters
    )
    if local and not separate:
        rest = next(
            (
                fused + rest.removeprefix(norm)
                for norm, fused in FUSED.items()
                if rest.startswith(norm)
            ),
            rest,
        )
    # A layer is a slice of a stacked tensor, or has its number in the name.
    sizes, offsets = ((), ()) if separate else ((layers,), (layer,))
    key = f"{top}{layer}." if separate else top
    if expert_match := OF_EXPERT.fullmatch(rest):
        module, expert = expert_match[1] or expert_match[4], int(expert_match[2] or expert_match[3])
        return (
            f"{key}mlp.experts.experts.{module}.weight",
            (*sizes, _experts(hub, layer)),
            (*offsets, expert),
        )
    return f"{key}{rest}", sizes, offsets


def _experts(hub: Hub, layer: int) -> int:
    """Return the number of experts of a layer."""
    count = 0
    for name in hub.parameters:
        match = OWN.fullmatch(name)
        # Each expert has one second matrix.
        if (
            match
            and int(match[2]) == layer
            and OF_EXPERT.fullmatch(match[3])
            and "linear_fc2" in match[3]
        ):
            count += 1
    return count


def _extra(name: str, hub: Hub, layers: int, separate: bool) -> Iterator[dcp.Saved]:
    """Yield the empty extra state of a linear layer, which Megatron requires even without fp8."""
    key, sizes, offsets = _place(name, hub, layers, separate)
    module, _, kind = key.rpartition(".")
    if kind == "weight" and module.rpartition(".")[2].startswith("linear_"):
        at = ".".join(map(str, offsets or (0,)))
        of = ".".join(map(str, sizes or (1,)))
        yield dcp.Saved(f"{module}{EXTRA}/shard_{at}_{of}", [None])
