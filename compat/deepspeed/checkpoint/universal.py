"""Reads and writes DeepSpeed's universal checkpoints: a folder for each whole parameter, with one
file for the masters and one for each moment.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from bridge.checkpoint import archive
from bridge.checkpoint.archive import Used
from bridge.checkpoint.digests import SUMS
from bridge.checkpoint.files import File
from bridge.checkpoint.hub import Hub, ParameterGroup, loss_finding
from bridge.checkpoint.interface import Format, PlannedFiles, Wanted, pointer_target
from bridge.checkpoint.lazy import ElementRun, Joined, Lazy, cast_lazy, raw_bytes
from bridge.checkpoint.torch_save import torch_file
from bridge.errors import SourceError
from bridge.files.contained import path_inside
from bridge.files.shown import show_value
from bridge.stack.findings import Finding
from bridge.stack.rules import Effect
from compat.deepspeed.checkpoint import zero_writing as writing
from compat.deepspeed.checkpoint.dealing import collect_names, deals_parameters
from compat.deepspeed.checkpoint.files import DAMAGED, KNOWN, StageFiles, load_file
from compat.deepspeed.checkpoint.zero import (
    SAMPLE,
    Flats,
    Named,
    groups_of,
    hub_of,
    parameters_of,
    shapes_of,
)

LATEST = "latest_universal"
ZERO, OPTIMIZER, FP32, STEP = "zero", "optimizer_state.pt", "fp32", "step"
MODELS = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
"""File names of model states: first the name below ZeRO stage 3, then the name at stage 3."""


GROUPS = 64
"""Number of optimizer groups to write if the source does not say its groups. DeepSpeed loads only
as many groups as the file has, and all other groups would keep their initial masters
(runtime/base_optimizer.py: load_hp_checkpoint_state_from_checkpoint_dir).
"""


class Universal(Format):
    """Checkpoints in the format of DeepSpeed's ds_to_universal.py. DeepSpeed loads such a
    checkpoint on any layout of ranks.
    """

    name = "universal"
    title = "DeepSpeed universal"
    unseen = (
        "if the files of two parameters with the same shape are swapped, stagebridge detects"
        " the swap only if the values in a file do not fit the parameter"
    )

    def find(self, folder: Path) -> Path | None:
        """Return the checkpoint folder: `folder` itself, or the subfolder that the file
        `latest_universal` names. Return None if there is no checkpoint.
        """
        place = pointer_target(folder, LATEST)
        return place if place is not None and (place / ZERO / OPTIMIZER).is_file() else None

    def read(self, place: Path) -> Hub:
        """Read each parameter from its folder, and everything else from the first file of model
        states.
        """
        name = next((name for name in MODELS if (place / name).is_file()), None)
        if name is None:
            raise SourceError(f"{place}: no {MODELS[0]}; {DAMAGED}")
        # Beside it lie model states of other levels, the common state, and a folder for each
        # parameter.
        others = [place / other for other in MODELS if other != name and (place / other).is_file()]
        whole = [
            path
            for path in sorted((place / ZERO).rglob("*.pt"))
            if path.is_file() and not path.is_symlink()
        ]
        files = StageFiles(place, {0: place / name}, {}, beside=(*others, *whole))
        optimizer = archive.read_archive(place / ZERO / OPTIMIZER, place, KNOWN)
        level = 3 if name == MODELS[1] else 2
        shapes = shapes_of(files)
        flats = _flats(place, shapes, optimizer)
        rows = optimizer.get("param_groups")
        if not isinstance(rows, list):
            raise SourceError(f"{place / ZERO / OPTIMIZER}: the file lacks param_groups; {DAMAGED}")
        # Our own writing pads the rows (see GROUPS): those without parameters are no groups.
        unknown, rows = _has_unknown_groups(rows), [row for row in rows if row["params"]]
        groups = tuple(
            groups_of(
                rows, level if len(rows) != len(shapes) else 2, _order_shapes(files, level, shapes)
            )
        )
        hub = hub_of(
            self.name,
            files,
            (level, parameters_of(files, level, shapes, flats), groups, []),
            optimizer,
        )
        return replace(hub, groups=(), settings=groups[0].settings) if unknown else hub

    def verify(self, place: Path, used: Used | None = None) -> None:
        """Check everything that the base class checks, the checksums inside each archive, and that
        masters round to the model's weights.
        """
        super().verify(place, used)
        for path in (
            *(place / name for name in MODELS if (place / name).is_file()),
            *sorted((place / ZERO).rglob("*.pt")),
        ):
            archive.verify_archive(path, place, used=used)
        for name in MODELS:
            if (place / name).is_file():
                _of_one_run(place, load_file(place / name, place, "module"))

    def plan(self, hub: Hub, target: Wanted) -> PlannedFiles:
        """Return the files to write: a folder for each parameter, model states for every ZeRO
        stage, and the settings of the source's optimizer groups.
        """
        groups = hub.groups or (ParameterGroup(tuple(hub.trainable_parameters), hub.settings),)
        layout = writing.ZeroLayout(
            hub,
            2,
            1,
            target.dtype or hub.weight_dtype,
            groups,
            tuple(group.names for group in groups),
        )
        tag = f"global_step{writing.steps_of(hub)}_universal"
        empty = writing.ZeroLayout(hub, 3, 1, layout.dtype, groups, layout.flats)
        models = (
            torch_file(f"{tag}/{name}", writing.model_of(content, 0))
            for name, content in zip(MODELS, (layout, empty), strict=True)
        )
        common = torch_file(f"{tag}/{ZERO}/{OPTIMIZER}", _common_state(layout))
        files = (*models, *_parameter_files(layout, tag), common, File(LATEST, (tag.encode(),)))
        return PlannedFiles(files, f"{tag}/{SUMS}", (*writing.unsaid(layout), *_find_losses(hub)))


def _has_unknown_groups(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether stagebridge wrote these rows of groups for a source without groups. The real
    number of groups is then not known.
    """
    return len(rows) == GROUPS and [bool(row["params"]) for row in rows] == [True] + [False] * (
        GROUPS - 1
    )


def _order_shapes(files: StageFiles, level: int, shapes: Sequence[Named]) -> Sequence[Named]:
    """Return shapes by name, with the names in the model's order. If the ranks that saved the
    checkpoint assigned parameters in turn (`round_robin_gradients`), `shapes` has another order.
    """
    ranks = files.model.get("dp_world_size")
    if (
        level == 3
        or not isinstance(ranks, int)
        or ranks < 1
        or not deals_parameters(files.model.get("ds_config"))
    ):
        return shapes
    return [{name: group[name] for name in collect_names(tuple(group), ranks)} for group in shapes]


def _of_one_run(place: Path, model: Mapping[str, Any]) -> None:
    """Raise `SourceError` if a master does not round to the model's weight. This is checked only
    below ZeRO stage 3, where a checkpoint has both.
    """
    for name, weight in (model["module"] or {}).items():
        path = place / ZERO / name / f"{FP32}.pt"
        if "/" in name or not path.is_file() or not isinstance(weight, Lazy) or not weight.count:
            continue
        value = archive.read_archive(path, place, KNOWN)
        master, count = (
            value.get("param") if isinstance(value, dict) else value,
            min(weight.count, SAMPLE),
        )
        if not isinstance(master, Lazy) or master.count != weight.count:
            continue  # `read` names this problem, or the weight is a tensor-parallel part
        if bytes(raw_bytes(cast_lazy(master, weight.dtype).flat(0, count))) != bytes(
            raw_bytes(weight.flat(0, count))
        ):
            raise SourceError(
                f"{path}: the master in this file does not round to the model's weight; the file"
                " belongs to another parameter or another run"
            )


def _flats(place: Path, shapes: Sequence[Named], optimizer: Mapping[str, Any]) -> Flats:
    """Return masters and moments of each parameter, and the step of each group. At ZeRO stage 3 all
    parameters share one step.
    """
    common = ((optimizer.get("optimizer_state_dict") or {}).get("state") or {}).get(0, {}).get(STEP)
    SourceError.raise_if(
        f"{place / ZERO / name / FP32}.pt: missing, though {show_value(name)} is a parameter; {DAMAGED}"
        for group in shapes
        for name in group
        if "/" not in name
        and not (path_inside(place / ZERO / name, place) / f"{FP32}.pt").is_file()
    )
    tensors: dict[str, dict[str, Lazy]] = {}
    steps = []
    for group in shapes:
        steps_of_group = {_read_step(place, name, common) for name in group}
        if len(steps_of_group) > 1:
            raise SourceError(
                f"{place / ZERO}: parameters of one group have different steps ({show_value(steps_of_group)}); {DAMAGED}"
            )
        steps.append(steps_of_group.pop() if steps_of_group else None)
        tensors |= {
            name: dict(_read_kinds(place, name, tuple(shape))) for name, shape in group.items()
        }
    every = {kind for kinds in tensors.values() for kind in kinds}
    SourceError.raise_if(
        f"{place / ZERO / name / kind}.pt: missing, though other parameters have this file;"
        f" {DAMAGED}"
        for name, kinds in tensors.items()
        for kind in sorted(every - set(kinds))
    )
    return Flats(tensors, steps)


def _read_step(place: Path, name: str, common: Any) -> float | None:
    path = place / ZERO / name / f"{STEP}.pt"
    value = archive.read_archive(path, place, KNOWN) if path.is_file() else common
    if isinstance(value, Lazy):
        return float(value.whole())
    return float(value) if isinstance(value, int | float) else None


def _read_kinds(place: Path, name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, Lazy]]:
    """Yield the tensors in a parameter's folder by kind (`fp32` or a moment). Raises `SourceError`
    if a tensor has the wrong number of elements.
    """
    folder = path_inside(place / ZERO / name, place)
    if "/" in name:
        raise SourceError(
            f"{folder}: {show_value(name)} is not a valid name of a parameter; {DAMAGED}"
        )
    for path in sorted(folder.glob("*.pt")):
        if path.stem == STEP:
            continue
        value = archive.read_archive(path, place, KNOWN)
        was = archive.title_of_archive(path, place)
        if was not in (path.stem, "archive"):
            raise SourceError(
                f"{path}: DeepSpeed wrote this file as {was}.pt; rename each file to its original"
                " name"
            )
        tensor = value.get("param") if isinstance(value, dict) else value
        if not isinstance(tensor, Lazy) or tensor.count != prod(shape):
            raise SourceError(
                f"{path}: found {show_value(getattr(tensor, 'shape', tensor))}, expected a tensor of shape {shape}; {DAMAGED}"
            )
        yield (
            path.stem,
            tensor
            if tensor.shape == shape
            else Joined((ElementRun(tensor, 0, tensor.count),), shape, tensor.dtype),
        )


def _parameter_files(layout: writing.ZeroLayout, tag: str) -> Iterator[File]:
    for name, parameter in layout.hub.trainable_parameters.items():
        top = f"{tag}/{ZERO}/{name}"
        for kind, tensor in {FP32: parameter.best, **parameter.moments}.items():
            yield torch_file(f"{top}/{kind}.pt", {"param": cast_lazy(tensor, "F32"), "cat_dim": 0})
        for value in writing.step_of(layout, [name]).values():
            yield torch_file(f"{top}/{STEP}.pt", value)


def _common_state(layout: writing.ZeroLayout) -> dict[str, Any]:
    """Return the contents of the file for state that all parameters share. At ZeRO stage 3
    DeepSpeed reads the step and the settings from `optimizer_state_dict`.
    """
    rows = [writing.row_of(group, [number]) for number, group in enumerate(layout.groups)]
    rows += [
        {**layout.hub.settings, "params": []}
        for _ in range(0 if layout.hub.groups else GROUPS - len(rows))
    ]
    first = layout.groups[0].names[:1] if layout.groups else ()
    clip = (layout.hub.config or {}).get("gradient_clipping")
    return {
        **writing.scaler(layout),
        "overflow": False,
        **({} if clip is None else {"clip_grad": float(clip)}),
        "ds_version": writing.RELEASE,
        "param_groups": rows,
        "optimizer_state_dict": {
            "state": {0: writing.step_of(layout, first)},
            "param_groups": rows,
        },
    }


def _find_losses(hub: Hub) -> Iterator[Finding]:
    """Yield findings for state in the hub that DeepSpeed does not load from a universal checkpoint
    (runtime/engine.py: _load_checkpoint skips the state of the module).
    """
    if hub.buffers:
        yield loss_finding(
            "buffers",
            f"{', '.join(hub.buffers)}: DeepSpeed loads no buffers from a universal checkpoint",
            Effect.NUMBERS,
        )
    frozen = [name for name, parameter in hub.parameters.items() if not parameter.trained]
    if frozen:
        yield loss_finding(
            "frozen",
            f"{', '.join(frozen)}: DeepSpeed loads no frozen parameters from a universal checkpoint",
            Effect.NUMBERS,
        )
    if any(group.settings != hub.groups[0].settings for group in hub.groups):
        yield loss_finding(
            "groups",
            "at ZeRO stage 3 DeepSpeed uses the settings of the first group for all groups",
            Effect.NUMBERS,
        )
    if not hub.groups:
        yield loss_finding(
            "groups",
            "the source checkpoint has no optimizer settings; DeepSpeed uses the settings in its config",
            Effect.NONE,
        )
