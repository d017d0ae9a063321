"""Finds and reads the files of a DeepSpeed checkpoint, and checks that all files belong to one run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from bridge.checkpoint import archive
from bridge.checkpoint.hub import Scale, Where, as_plain, loss_finding
from bridge.checkpoint.lazy import Lazy
from bridge.checkpoint.unpickle import Record, recorders
from bridge.errors import SourceError
from bridge.files.shown import show_value
from bridge.stack.findings import Finding
from bridge.stack.rules import Effect
from compat.deepspeed.checkpoint import stages
from compat.deepspeed.checkpoint.stages import DAMAGED as DAMAGED

LATEST = "latest"
MODEL = re.compile(r"(?:zero_pp_rank_(?P<data>\d+)_)?mp_rank_(?P<model>\d+)_model_states\.pt")
OPTIMIZER = re.compile(
    r"(?P<kind>bf16_|fp16_)?zero_pp_rank_(?P<data>\d+)_mp_rank_(?P<model>\d+)_?optim_states\.pt"
)
LAYER = re.compile(r"layer_(?P<layer>\d+)-model_states\.pt")
OTHERS = {
    re.compile(
        r"layer_\d+-.+-model_states\.pt"
    ): "layers of a pipeline whose stages have tensor ranks",
    re.compile(r"(?:layer_\d+_)?expert_\d+_mp_rank_\d+_model_states\.pt"): "experts",
    re.compile(r"expp_rank_\d+_mp_rank_\d+_optim_states\.pt"): "experts",
}
"""Files that stagebridge cannot read yet, as a table from a pattern for file names to what such a
file holds, in words for messages.
"""

SCALERS = ("LossScaler", "DynamicLossScaler")
NAMES = (
    *(f"deepspeed.runtime.fp16.loss_scaler {name}" for name in SCALERS),
    "deepspeed.runtime.zero.config ZeroStageEnum",
    "deepspeed.utils.tensor_fragment fragment_address",
    "deepspeed.checkpoint.universal_checkpoint SubparamShape",
)
KNOWN = recorders(*NAMES)
"""DeepSpeed's own classes whose objects may stand in checkpoint files
(runtime/zero/stage_1_and_2.py: state_dict). The reader turns such an object into a plain record.
"""

OWN = (
    *(
        "module",
        "buffer_names",
        "optimizer",
        "param_shapes",
        "frozen_param_shapes",
        "shared_params",
        "frozen_param_fragments",
    ),
    *(
        "lr_scheduler",
        "data_sampler",
        "random_ltd",
        "skipped_steps",
        "global_steps",
        "global_samples",
        "dp_world_size",
    ),
    *(
        "mp_world_size",
        "checkpoint_parallel_dimensions",
        "ds_config",
        "ds_version",
        "universal_checkpoint_info",
        "num_experts",
    ),
)
"""Keys that DeepSpeed writes into model states (runtime/engine.py: _common_checkpoint_state). The
training script wrote all other keys.
"""


@dataclass(frozen=True)
class StageFiles:
    """The files of one model-parallel rank: `models` and `optimizers` by data-parallel rank. Below
    ZeRO stage 3 there is only one file of model states. Checkpoints of a pipeline store each
    layer's weights in a separate file: `layers` has the weights of this rank's stage, by parameter
    name, and `beside` has the paths of the layer files.
    """

    folder: Path
    models: Mapping[int, Path]
    optimizers: Mapping[int, Path]
    layers: Mapping[str, Lazy] = field(default_factory=dict)
    beside: tuple[Path, ...] = ()

    @classmethod
    def of(cls, folder: Path) -> tuple[StageFiles, ...]:
        """Return the files in `folder`, by model-parallel rank. Raises `SourceError` if files of a
        rank are missing, or if stagebridge cannot read a file.
        """
        models, optimizers = _matching_files(folder, MODEL), _matching_files(folder, OPTIMIZER)
        _check_whole(folder)
        for parts_by_rank, what in ((models, "model states"), (optimizers, "optimizer states")):
            _check_complete(
                folder,
                {part: ranks[max(ranks)] for part, ranks in parts_by_rank.items()},
                f"{what} of model rank",
            )
            for ranks in parts_by_rank.values():
                _check_complete(folder, ranks, f"{what} of rank")
        if optimizers and len(optimizers) != len(models):
            raise SourceError(
                f"{folder}: found {len(models)} parts of model states, but {len(optimizers)}"
                f" parts of optimizer states; {DAMAGED}"
            )
        parts = tuple(
            cls(folder, models[part], optimizers.get(part, {})) for part in range(len(models))
        )
        layers = {
            int(match["layer"]): path
            for path in sorted(folder.iterdir())
            if (match := LAYER.fullmatch(path.name))
        }
        if not layers:
            return parts
        _check_complete(folder, layers, "layer")
        return _weights_by_stage(folder, parts, layers)

    @cached_property
    def model(self) -> Mapping[str, Any]:
        """Contents of the first file of model states. In a pipeline, `module` has the weights of
        this rank's stage.
        """
        entries = load_file(self.models[0], self.folder, "module")
        return {**entries, "module": self.layers} if self.layers else entries

    @cached_property
    def states(self) -> tuple[Mapping[str, Any], ...]:
        """Contents of each rank's file of optimizer states."""
        contents = [
            load_file(path, self.folder, "optimizer_state_dict")
            for _, path in sorted(self.optimizers.items())
        ]
        for path, entries in zip(self.optimizers.values(), contents, strict=True):
            for key in ("ds_version", "ds_config"):
                if entries.get(key) != contents[0].get(key):
                    raise SourceError(
                        f"{path}: {key} differs from {key} in {self.optimizers[0].name}; the two"
                        " files belong to different runs"
                    )
        states = tuple(entries["optimizer_state_dict"] for entries in contents)
        for path, state in zip(self.optimizers.values(), states, strict=True):
            if not isinstance(state, dict):
                message = (
                    f"found {show_value(state, 30)} as optimizer_state_dict, expected a dictionary"
                )
                raise SourceError(f"{path}: {message}; {DAMAGED}")
        return states

    @property
    def all(self) -> tuple[Path, ...]:
        """Every file."""
        return (*self.models.values(), *self.optimizers.values(), *self.beside)


def _check_complete(folder: Path, files: Mapping[int, Path], kind: str) -> None:
    # The numbers come from names of files, so the largest is no count.
    missing = next((at for at in range(len(files)) if at not in files), None)
    if missing is not None:
        raise SourceError(
            f"{folder}: found no file with {kind} {missing}, although the folder has"
            f" {files[max(files)].name}; {DAMAGED}"
        )


def _weights_by_stage(
    folder: Path, parts: Sequence[StageFiles], layers: Mapping[int, Path]
) -> tuple[StageFiles, ...]:
    """Return `parts`, one for each pipeline stage, with the weights of the stage's layers added."""
    entries: dict[str, Lazy] = {}
    for number, path in sorted(layers.items()):
        entries |= stages.layer(number, load_file(path, folder))
    shapes = [dict(stages.shapes(files.model, files.models[0])) for files in parts]
    tensors_by_stage = stages.modules(entries, shapes, str(folder))
    paths = tuple(layers[number] for number in sorted(layers))
    return tuple(
        replace(files, layers=own, beside=() if number else paths)
        for number, (files, own) in enumerate(zip(parts, tensors_by_stage, strict=True))
    )


def _matching_files(folder: Path, pattern: re.Pattern[str]) -> dict[int, dict[int, Path]]:
    """Return the files in `folder` whose names match `pattern`, by model-parallel rank and
    data-parallel rank.
    """
    files_by_rank: dict[int, dict[int, Path]] = {}
    for path in sorted(folder.iterdir()):
        match = pattern.fullmatch(path.name)
        if match is None:
            continue
        ranks, rank = files_by_rank.setdefault(int(match["model"]), {}), int(match["data"] or 0)
        if rank in ranks:
            raise SourceError(
                f"{path}: {ranks[rank].name} belongs to the same rank; remove the one of"
                " these two files that belongs to another run"
            )
        ranks[rank] = path
    return {part: dict(sorted(ranks.items())) for part, ranks in sorted(files_by_rank.items())}


def _check_whole(folder: Path) -> None:
    for path in sorted(folder.iterdir()):
        for pattern, contents in OTHERS.items():
            if pattern.fullmatch(path.name):
                raise SourceError(
                    f"{path}: the file holds {contents}, which stagebridge cannot read yet"
                )


def load_file(path: Path, root: Path, required_key: str = "") -> Mapping[str, Any]:
    """Return the contents of a checkpoint file. Raises `SourceError` if the file lacks the key
    `required_key`, or if its name is not the name that DeepSpeed gave it.
    """
    contents = archive.read_archive(path, root, KNOWN)
    if not isinstance(contents, dict) or (required_key and required_key not in contents):
        raise SourceError(
            f"{path}: the file lacks {required_key or 'tensors'!r}, which DeepSpeed always writes;"
            f" {DAMAGED}"
        )
    was = archive.title_of_archive(path, root)
    if was not in (path.stem, "archive") and any(
        pattern.fullmatch(f"{was}.pt") for pattern in (MODEL, OPTIMIZER, LAYER)
    ):
        raise SourceError(
            f"{path}: DeepSpeed wrote this file as {was}.pt; rename each file to its original name"
        )
    return contents


def number(entries: Mapping[str, Any], key: str) -> int | None:
    """Return a counter of the run, such as `global_steps`; None if the file does not have the
    counter.
    """
    value = entries.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def where(model: Mapping[str, Any], lr: float | None) -> Where:
    """Return the step and the other counters of the run. DeepSpeed's `global_steps` includes
    skipped steps, while the hub counts skipped steps separately.
    """
    steps, skips = number(model, "global_steps"), number(model, "skipped_steps")
    updates = None if steps is None else steps - (skips or 0)
    return Where(updates, skips, number(model, "global_samples"), lr=lr)


def scale_of(entries: Mapping[str, Any]) -> Scale | None:
    """Return the loss scale; None if the file has none, or a constant scale of 1. ZeRO's files
    store an object, and other files plain numbers (runtime/fp16/loss_scaler.py).
    """
    scaler = entries.get("loss_scaler")
    if not isinstance(scaler, Record):
        if "cur_scale" not in entries:
            return None
        # Without ZeRO the scaler's numbers stand beside the optimizer's state, under the same
        # names.
        scaler = Record(
            "", (), {key: entries.get(key) for key in entries if key != "optimizer_state_dict"}
        )
    settings, dynamic = scaler.state, bool(entries.get("dynamic_loss_scale"))
    if not dynamic and settings.get("cur_scale") == 1.0:
        return None
    # cur_iter is the number of the next step, so the difference counts one step too many.
    since = int(settings.get("cur_iter") or 0) - int(settings.get("last_overflow_iter") or 0) - 1
    window = settings.get("scale_window")
    return Scale(
        float(settings["cur_scale"]),
        dynamic,
        settings.get("scale_factor"),
        window,
        settings.get("min_scale"),
        settings.get("delayed_shift"),
        # DeepSpeed halves the scale at an overflow with 1 left, so one overflow less is tolerated.
        None if settings.get("cur_hysteresis") is None else int(settings["cur_hysteresis"]) - 1,
        # Good steps since the scale last changed: after a full window the count starts at 1 again.
        (since - 1) % window + 1 if window and since > 0 else 0,
    )


def client(model: Mapping[str, Any]) -> tuple[dict[str, Any], list[Finding]]:
    """Return two things about values that the script saved with the checkpoint: the values that are
    plain data, and a finding for each other value.
    """
    values, findings = {}, []
    for key, value in model.items():
        if key not in OWN:
            value_as_data, problems = as_plain(value, f"client.{key}")
            findings += problems
            if not problems:
                values[str(key)] = value_as_data
    return values, findings


def beside(model: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield findings for state of DeepSpeed that the hub cannot hold."""
    for key, what in (
        ("data_sampler", "the curriculum's position in the data"),
        ("random_ltd", "the schedule of dropped tokens"),
    ):
        if model.get(key):
            yield loss_finding(key, f"{what} is not carried", Effect.NUMBERS)
