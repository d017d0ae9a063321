"""The format of torch.distributed.checkpoint: each rank saves boxes of tensors, and the file
`.metadata` lists where each box is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bridge.checkpoint import archive, stored_parts, torch_save, unpickle
from bridge.checkpoint.archive import Used
from bridge.checkpoint.digests import SUMS, without_digest
from bridge.checkpoint.files import File, size_of
from bridge.checkpoint.hub import (
    BESIDE,
    Hub,
    Origin,
    ParameterGroup,
    beside_of,
    loss_finding,
    weights_of,
)
from bridge.checkpoint.interface import PlannedFiles, RootedFormat, Wanted, coarser_weights
from bridge.checkpoint.lazy import Boxed, Held, Lazy, Placed
from bridge.checkpoint.run_state import hub_of_entries
from bridge.checkpoint.safetensors_format import list_shards, read_weights
from bridge.checkpoint.torch_save import Size
from bridge.checkpoint.unpickle import Constant, Known, Record, recorders
from bridge.errors import SourceError
from bridge.files.contained import plain as plain_name, read_bytes, regular
from bridge.files.shown import show_value
from bridge.layout.boxes import Box
from bridge.stack.findings import Finding
from bridge.stack.rules import Effect

METADATA = ".metadata"
DATA = "__0_0.distcp"
COMMON = "common.pt"
"""Name of a file that checkpoints of Megatron-Core have beside `.metadata`, and that this format
does not have. The file holds all values that are no tensors.
"""
VERSION = "1.0.0"
DAMAGED = "the checkpoint is damaged"
OWN = "torch.distributed.checkpoint.metadata"
PLACES = "torch.distributed.checkpoint.filesystem _StorageInfo"
NAMES = (
    *(
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
    ),
    *("MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
)
KNOWN = {
    **archive.KNOWN,
    **recorders(*(f"{OWN} {name}" for name in NAMES), PLACES, "torch.serialization _get_layout"),
}
"""Names that the pickle `.metadata` contains, from torch/distributed/checkpoint/metadata.py and
filesystem.py. Their objects are read as records.
"""
SCHEDULE = "lr_scheduler"
"""The key under which a scheduler of torch is written."""
NEUTRAL: Mapping[str, Any] = {
    **dict.fromkeys(("amsgrad", "maximize", "capturable", "differentiable"), False),
    **dict.fromkeys(("foreach", "fused")),
    "decoupled_weight_decay": True,
}
"""Settings that torch's AdamW expects in its state, with values that change no numbers. They are
written if the source checkpoint does not have them.
"""


@dataclass(frozen=True)
class StoredEntry:
    """An entry of a checkpoint: a tensor or another value, and the keys that lead to it in the
    dictionary that was saved.
    """

    path: tuple[Any, ...]
    value: Any


class Dcp(RootedFormat):
    """The format of torch.distributed.checkpoint, in which users of FSDP save."""

    name = "dcp"
    title = "torch.distributed.checkpoint"

    def find(self, folder: Path) -> Path | None:
        """Return the folder if it has `.metadata` but not `common.pt`, which would show
        Megatron-Core's format; else None.
        """
        return folder if (folder / METADATA).is_file() and not (folder / COMMON).is_file() else None

    def verify(self, place: Path, used: Used | None = None) -> None:
        """Check the digests in SHA256SUMS and, if it does not list all files, the checksums within the
        archives.
        """
        super().verify(place, used)
        if without_digest(place, place.glob("*.distcp")):
            verify_checksums(place, KNOWN, used)

    def read(self, place: Path) -> Hub:
        """Return the checkpoint, whose model and optimizers lie under any keys. All values that are
        not recognised become client state.
        """
        # transformers saves the optimizer in this format, and ranks their parts of the weights as safetensors.
        shards = list_shards(place)
        weights = read_weights(place)[0] if shards else {}
        model = {name: StoredEntry(("model", name), tensor) for name, tensor in weights.items()}
        files = (*shards, place / METADATA, *sorted(place.glob("*.distcp")))
        return hub_of(self.name, place, {**model, **read_entries(place)}, files, self.root)

    def plan(self, hub: Hub, target: Wanted) -> PlannedFiles:
        """Return the files that one rank would write. Their keys `model` and `optimizer` are as
        torch's get_state_dict returns them. For a parameter with a master, the master is written.
        """
        values = dict(_values_to_save(hub, target.dtype))
        files = files_of(
            [Saved.of(_entry_key(path), value) for path, value in values.items()],
            {_entry_key(path): path for path in values},
        )
        return PlannedFiles(files, SUMS, tuple(_find_losses(hub, target.dtype)))


# Reading


def hub_of(
    format: str,
    place: Path,
    stored_entries: Mapping[str, StoredEntry],
    files: tuple[Path, ...],
    root: str | None = None,
) -> Hub:
    """Return the checkpoint that consists of these entries. Raises `SourceError` if no entry
    belongs to a model.
    """
    origin = Origin(
        format, layout={"ranks": len(list(files[-1].parent.glob("*.distcp")))}, files=files
    )
    entries = {entry.path: entry.value for entry in stored_entries.values()}
    return hub_of_entries(origin, place, entries, root)


def verify_checksums(place: Path, names: Known, used: Used | None = None) -> None:
    """Check the checksums within every file. Raises `SourceError` if one does not match. `used`
    limits the check as in `archive.verify`.
    """
    metadata = unpickle.unpickle_value(
        read_bytes(place / METADATA, place, unpickle.MOST), names, place / METADATA
    )
    for info in metadata.state["storage_data"].values():
        archive.verify_archive(*_place_of_part(place, info.state), used)


def read_entries(
    place: Path, names: Known = KNOWN, accepts: Callable[[str], bool] = lambda key: True
) -> dict[str, StoredEntry]:
    """Return the entries whose keys `accepts` accepts, by key. `names` are the names that pickles
    may contain. Raises `SourceError` if the checkpoint is damaged, for instance if an element of a
    tensor is missing or stored twice.
    """
    path = place / METADATA
    metadata = unpickle.unpickle_value(read_bytes(path, place, unpickle.MOST), names, path)
    try:
        paths, storage = metadata.state["planner_data"] or {}, metadata.state["storage_data"]
        chunks: dict[str, list[tuple[Any, Any]]] = {}
        for index, info in storage.items():
            chunks.setdefault(index.state["fqn"], []).append(
                (index.state.get("offset"), info.state)
            )
        rows = [
            (key, about, chunks.get(key, []), tuple(paths.get(key, (key,))))
            for key, about in metadata.state["state_dict_metadata"].items()
            if accepts(key)
        ]
        return {
            key: StoredEntry(where, _value_of_entry(place, key, about, places, names))
            for key, about, places, where in rows
        }
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise SourceError(
            f"{path}: expected a file as torch.distributed.checkpoint writes it ({show_value(str(error))}); {DAMAGED}"
        ) from None


def _value_of_entry(
    place: Path, key: str, about: Record, places: list[tuple[Any, Any]], names: Known
) -> Any:
    """Return the tensor or the value that is stored under `key`. The boxes of a tensor are stored
    at `places`; a value has one place.
    """
    if about.name == f"{OWN} BytesStorageMetadata":
        ((_, info),) = places
        return _read_value(place, info, names)
    dtype, shape = str(about.state["properties"].state[""][0]), tuple(about.state["size"])
    boxes = []
    for offset, info in places:
        value = _read_value(place, info, names)
        if not isinstance(value, Lazy) or value.dtype != dtype:
            raise SourceError(
                f"{place / info['relative_path']}: expected a tensor of {dtype} for {show_value(key)}; {DAMAGED}"
            )
        boxes.append(Placed(Box(tuple(offset or ()), value.shape), value))
    chunks = [
        (tuple(chunk.state["offsets"]), tuple(chunk.state["sizes"]))
        for chunk in about.state["chunks"]
    ]
    if sorted((box.place.offsets, box.place.sizes) for box in boxes) != sorted(chunks):
        raise SourceError(
            f"{place}: {METADATA} lists other parts of {show_value(key)} than the files have; {DAMAGED}"
        )
    # The list and the files may agree and still leave a gap, or hold an element twice.
    problem = stored_parts.check_cover(
        key, shape, [stored_parts.Stored(key, box.place, dtype, None, key) for box in boxes]
    )
    SourceError.raise_if([f"{place}: {problem}; {DAMAGED}"] if problem else [])
    return Boxed(tuple(boxes), shape, dtype)


def _read_value(place: Path, info: Mapping[str, Any], names: Known) -> Any:
    """Return the value that torch.save wrote into one part of a file; a tensor is lazy."""
    path, root, begin, size = _place_of_part(place, info)
    return archive.read_archive(path, root, names, begin, size)


def _place_of_part(place: Path, info: Mapping[str, Any]) -> tuple[Path, Path, int, int]:
    """Return where a part is stored: the file, the checkpoint's folder, and the offset and size of
    the part in bytes. Raises `SourceError` if the file is too short, or compressed.
    """
    path = place / plain_name(info["relative_path"], place / METADATA)
    begin, size = int(info["offset"]), int(info["length"])
    if info.get("transform_descriptors"):
        raise SourceError(
            f"{path}: found a compressed file; save the checkpoint without storage extensions"
        )
    if begin < 0 or size < 0 or begin + size > regular(path, place).stat().st_size:
        raise SourceError(f"{path}: the file ends before byte {begin + size}; {DAMAGED}")
    return path, place, begin, size


# Writing


def _values_to_save(hub: Hub, dtype: str | None) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield the values to write with the keys that lead to them, in the order of a state dict."""
    import torch

    for name, entry in hub.parameters.items():
        yield ("model", name), weights_of(entry.best, dtype)
    yield from (
        (("model", alias), weights_of(hub.parameters[name].best, dtype))
        for alias, name in hub.ties.items()
    )
    yield from ((("model", name), entry) for name, entry in hub.buffers.items())
    for name, entry in hub.trainable_parameters.items():
        if entry.step is not None:
            yield ("optimizer", "state", name, "step"), Held(torch.tensor(float(entry.step)))
        yield from (
            (("optimizer", "state", name, kind), moment) for kind, moment in entry.moments.items()
        )
    groups = hub.groups or (
        (ParameterGroup(tuple(hub.trainable_parameters), {}),) if hub.moments else ()
    )
    for number, group in enumerate(groups):
        # torch loads each setting that its optimizer has by name, and stops at one that is missing.
        for key, value in {**NEUTRAL, **group.settings}.items():
            yield (
                ("optimizer", "param_groups", number, key),
                tuple(value) if key == "betas" else value,
            )
        yield ("optimizer", "param_groups", number, "params"), list(group.names)
    step = hub.client.get("step", hub.where.steps)
    if step is not None:
        yield ("step",), step
    if _is_of_torch(hub.schedule):
        yield from (((SCHEDULE, key), value) for key, value in (hub.schedule or {}).items())
    yield (BESIDE,), beside_of(hub)
    yield from (((key,), value) for key, value in hub.client.items() if key != "step")


def _is_of_torch(schedule: Mapping[str, Any] | None) -> bool:
    """Return whether this is the state of one of torch's schedulers, all of which count epochs."""
    return schedule is not None and "last_epoch" in schedule


def _entry_key(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))


@dataclass(frozen=True)
class Saved:
    """A value to save under `key`. It is a box of a tensor, or another value. For a box, `shape` is
    the shape of the whole tensor, and `offsets` is where the box begins in it. For another value,
    `shape` is None.
    """

    key: str
    value: Any
    shape: tuple[int, ...] | None = None
    offsets: tuple[int, ...] = ()

    @classmethod
    def of(cls, key: str, value: Any) -> Saved:
        """Return what has to be saved for a whole tensor or for another value."""
        return (
            cls(key, value, value.shape, (0,) * len(value.shape))
            if isinstance(value, Lazy)
            else cls(key, value)
        )


def files_of(
    entries: Sequence[Saved], paths: Mapping[str, tuple[Any, ...]] | None
) -> tuple[File, ...]:
    """Return the files that one rank would write: the data and `.metadata`. If the saved
    dictionary is nested, `paths` has for each key the keys that lead to the value.
    """
    body, places = _data_file(entries)
    return File(DATA, tuple(body)), File(METADATA, (_metadata_file(entries, places, paths),))


def _data_file(entries: Sequence[Saved]) -> tuple[list[Any], list[tuple[int, int]]]:
    """Return the parts of which the data file consists, and for each value its offset and size in
    this file.
    """
    body: list[Any] = []
    places = []
    at = 0
    for entry in entries:
        parts = list(torch_save.parts_of("archive", entry.value))
        size = sum(map(size_of, parts))
        # Each value is an archive of its own within the file, as torch's FileSystemWriter has it.
        places.append((at, size))
        body += parts
        at += size
    return body, places


def _metadata_file(
    entries: Sequence[Saved],
    places: Sequence[tuple[int, int]],
    paths: Mapping[str, tuple[Any, ...]] | None,
) -> bytes:
    """Return the content of the file `.metadata`, torch's `Metadata`: it lists the keys, and where
    each box or value is stored.
    """
    # A tensor that several ranks hold has a box for each of them, all under its one key.
    boxes: dict[str, list[Saved]] = {}
    for entry in entries:
        boxes.setdefault(entry.key, []).append(entry)
    places_by_index = {}
    for entry, (begin, size) in zip(entries, places, strict=True):
        # torch finds a box by its key and offsets, and a value by its key alone.
        offset = None if entry.shape is None else Size(entry.offsets)
        index = Record(
            f"{OWN} MetadataIndex", (), {"fqn": entry.key, "offset": offset, "index": None}
        )
        place = {
            "relative_path": DATA,
            "offset": begin,
            "length": size,
            "transform_descriptors": None,
        }
        places_by_index[index] = Record(PLACES, (), place)
    meta = Record(
        f"{OWN} StorageMeta",
        (),
        dict.fromkeys(("checkpoint_id", "save_id", "load_id")) | {"modules": []},
    )
    state = {
        "state_dict_metadata": {key: _about_boxes(parts) for key, parts in boxes.items()},
        "planner_data": None if paths is None else dict(paths),
        "storage_data": places_by_index,
        "storage_meta": meta,
        "version": VERSION,
    }
    return torch_save.Pickle().of(Record(f"{OWN} Metadata", (), state))


def _about_boxes(boxes: Sequence[Saved]) -> Record:
    shape = boxes[0].shape
    if shape is None:
        return Record(f"{OWN} BytesStorageMetadata")
    layout = Record("torch.serialization _get_layout", ("torch.strided",))
    form = Record(f"{OWN} _MEM_FORMAT_ENCODING", (0,))
    properties = Record(
        f"{OWN} TensorProperties",
        (),
        {"": (Constant(boxes[0].value.dtype), layout, False, form, False)},
    )
    chunks = [
        Record(
            f"{OWN} ChunkStorageMetadata",
            (),
            {"offsets": Size(box.offsets), "sizes": Size(box.value.shape)},
        )
        for box in boxes
    ]
    return Record(
        f"{OWN} TensorStorageMetadata",
        (),
        {"properties": properties, "size": Size(shape), "chunks": chunks},
    )


def _find_losses(hub: Hub, dtype: str | None) -> Iterator[Finding]:
    """Yield a finding for each value that torch's checkpoint cannot hold, or that it should have
    and that the source checkpoint lacks. `dtype` is the number format in which weights are written;
    None: that of the best copy of each.
    """
    if dtype is not None:
        yield from coarser_weights(hub, dtype, "torch's checkpoint")
    if hub.moments and not hub.groups:
        yield loss_finding(
            "groups",
            "the source checkpoint has no settings of the optimizer; torch needs them to load moments",
            Effect.NUMBERS,
        )
    if hub.lacks_moments:
        yield loss_finding(
            "moments",
            "the source checkpoint has no moments; load only the model, and no optimizer",
            Effect.NUMBERS,
        )
    if hub.scale is not None:
        yield loss_finding(
            "scale",
            "torch's checkpoint cannot hold the loss scale; set the scale in the script's scaler",
            Effect.NUMBERS,
        )
    if hub.schedule is not None and not _is_of_torch(hub.schedule):
        yield loss_finding(
            "schedule",
            f"the schedule {show_value(hub.schedule)} of the source checkpoint is not the state of a scheduler of torch; set the"
            " state of torch's scheduler by hand",
            Effect.NUMBERS,
        )
    if hub.random:
        yield loss_finding(
            "random",
            "torch's checkpoint cannot hold random states; a run that resumes from it draws other numbers",
            Effect.NUMBERS,
        )
    names = [name for name in ("skipped", "samples") if getattr(hub.where, name)]
    if names:
        message = (
            f"{', '.join(names)}: torch's checkpoint keeps only the step of the run's progress"
        )
        yield loss_finding("run", message, Effect.NONE)
