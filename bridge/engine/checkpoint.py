"""Checkpoints under global parameter names: written on one layout, read on any other, and never half there.

A checkpoint is a folder: tensors by torch.distributed.checkpoint, and `state.json` for the rest. It is put together under a
temporary name, brought to the disk, renamed at once, and only then named in the file `latest`.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from bridge.comm import joined
from bridge.errors import BridgeError, SourceError, nearest
from bridge.layout.shard import Parameter, Piece, boxes

if TYPE_CHECKING:
    from bridge.engine.runner import Engine

FORMAT = 1
LATEST = "latest"
STATE = "state.json"
WEIGHTS = "weights"
GENERATORS = "generators"


@dataclass(frozen=True)
class Part:
    """A box of a global tensor that this rank holds, as a view."""

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: Tensor

    @property
    def index(self) -> MetadataIndex:
        """Its key in the checkpoint."""
        return MetadataIndex(self.name, torch.Size(self.offsets))

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """Its place in the global tensor."""
        return ChunkStorageMetadata(torch.Size(self.offsets), self.tensor.shape)


def save(engine: Engine, folder: Path, tag: str | None, client: Mapping[str, Any], latest: bool) -> Path:
    """Write a checkpoint of `engine` to `folder`/`tag` (default: `step` and its number); returns that path.

    Each rank writes what it owns and nothing twice. `client` is kept as JSON. Raises `BridgeError` on all ranks if any
    fails; the checkpoint before stays as it was.
    """
    tag = tag or f"step{engine.progress.steps}"
    text = _state(engine, client)
    temporary, final = folder / f".{tag}.tmp", folder / tag
    _first(engine, lambda: _prepare(temporary))
    _write(engine, temporary)
    _first(engine, lambda: _publish(temporary, final, text, latest))
    return final


def load(engine: Engine, folder: Path, tag: str | None, optimizer: bool) -> tuple[Path, dict[str, Any]]:
    """Read `folder`/`tag` (default: what `latest` names) into `engine`; returns the path and the client's state.

    Without `optimizer`, moments keep their values. Raises `BridgeError` that names what is missing, extra or of another shape.
    """
    path = _find(folder, tag)
    state = _read_state(path)
    expected = {name: shape for name, shape in _expected(engine) if optimizer or _is_weight(name)}
    parts = [part for part in _parts(engine) if part.name in expected]
    generator = torch.empty_like(torch.get_rng_state())
    _read(path, [*parts, _generator(engine, generator)], expected, optimizer)
    engine.weights.reload()
    _restore(engine, state)
    if engine.comm.rank < state["world"]:
        torch.set_rng_state(generator)
    return path, state["client"]


def _state(engine: Engine, client: Mapping[str, Any]) -> str:
    state = {
        "format": FORMAT,
        "world": engine.comm.world.size,
        "seed": engine.seed,
        "progress": asdict(engine.progress),
        "scaler": engine.scaler.state(),
        "client": dict(client),
    }
    try:
        return json.dumps(state, indent=1)
    except TypeError as error:
        raise BridgeError(f"client_state: {error}; keep to numbers, texts, lists and dictionaries") from None


def _restore(engine: Engine, state: Mapping[str, Any]) -> None:
    for name, value in state["progress"].items():
        setattr(engine.progress, name, value)
    engine.scaler.restore(state["scaler"])
    engine.seed = state["seed"]
    engine.optimizer.set_steps(engine.progress.steps)


def _parts(engine: Engine) -> Iterator[Part]:
    """Everything that this rank owns, replicas included."""
    for flat_index, flat in enumerate(engine.layout.flats):
        for name, tensor in _tensors(engine, flat_index):
            for piece in flat.pieces(engine.data.index):
                yield from _boxes(name, piece, tensor)


def _expected(engine: Engine) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of everything in a checkpoint of this model, whoever owns it."""
    for parameter in engine.parameters:
        for kind in (WEIGHTS, *(engine.optimizer.state_names if parameter.trainable else ())):
            yield f"{kind}/{parameter.name}", _whole(parameter)


def _is_weight(name: str) -> bool:
    return name.startswith(f"{WEIGHTS}/")


def _tensors(engine: Engine, index: int) -> Iterator[tuple[str, Tensor]]:
    """The owned slice of one flat and its optimizer state."""
    yield WEIGHTS, engine.weights.shards[index]
    trained = engine.weights.trained()
    if index in trained:
        yield from engine.optimizer.state(trained.index(index)).items()


def _boxes(kind: str, piece: Piece, tensor: Tensor) -> Iterator[Part]:
    parameter, place = piece.parameter, piece.offset
    for box in boxes(parameter.shape, piece.start, piece.stop):
        length = torch.Size(box.sizes).numel()
        view = tensor[place : place + length].view(box.sizes)
        yield Part(f"{kind}/{parameter.name}", _whole(parameter), _shifted(parameter, box.offsets), view)
        place += length


def _whole(parameter: Parameter) -> tuple[int, ...]:
    return tuple(parameter.whole if dim == parameter.split else size for dim, size in enumerate(parameter.shape))


def _shifted(parameter: Parameter, offsets: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(offset + parameter.start * (dim == parameter.split) for dim, offset in enumerate(offsets))


def _generator(engine: Engine, state: Tensor) -> Part:
    return Part(f"{GENERATORS}/{engine.comm.rank}", tuple(state.shape), (0,), state)


def _unique(engine: Engine) -> Iterator[Part]:
    """What this rank writes: replicas over data, tensor or pipeline ranks are left to the first of them."""
    for index, flat in enumerate(engine.layout.flats):
        if (flat.sharded or engine.data.index == 0) and engine.first_holder(flat):
            for name, tensor in _tensors(engine, index):
                for piece in flat.pieces(engine.data.index):
                    if piece.parameter.split is not None or engine.tensor.index == 0:
                        yield from _boxes(name, piece, tensor)
    yield _generator(engine, torch.get_rng_state())


def _write(engine: Engine, folder: Path) -> None:
    writer, planner = FileSystemWriter(folder, overwrite=True), _Saver(_unique(engine))
    try:
        with _alone_or_not() as alone:
            save_tensors({}, storage_writer=writer, planner=planner, no_dist=alone)
    except CheckpointException as error:
        raise BridgeError(f"{folder}: not written; {_causes(error)}") from error


def _read(folder: Path, parts: Iterable[Part], expected: Mapping[str, tuple[int, ...]], optimizer: bool) -> None:
    planner = _Loader(folder, parts, expected, optimizer)
    reader = FileSystemReader(folder)
    try:
        with _alone_or_not() as alone:
            load_tensors({}, storage_reader=reader, planner=planner, no_dist=alone)
    except CheckpointException as error:
        raise BridgeError(_causes(error)) from error


@contextmanager
def _alone_or_not() -> Iterator[bool]:
    """Whether this process is in no group, which torch then warns of."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield joined() is None


def _causes(error: CheckpointException) -> str:
    return "\n".join(dict.fromkeys(str(cause) for cause, _ in error.failures.values()))


class _Saver(SavePlanner):
    """Plans to write parts, which each rank chose so that nothing is written twice."""

    def __init__(self, parts: Iterable[Part]) -> None:
        self.parts = {part.index: part for part in parts}

    def set_up_planner(self, state_dict: Any, storage_meta: StorageMeta | None = None, is_coordinator: bool = False) -> None:
        """Nothing: the parts are known."""

    def create_local_plan(self) -> SavePlan:
        """One item for each part."""
        return SavePlan([_item(part) for part in self.parts.values()])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """All plans, and the index of what they write."""
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """The plan as it is."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """The tensor of one item."""
        return self.parts[write_item.index].tensor.detach()


def _item(part: Part) -> WriteItem:
    properties = TensorProperties(dtype=part.tensor.dtype)
    data = TensorWriteData(chunk=part.chunk, properties=properties, size=torch.Size(part.shape))
    return WriteItem(index=part.index, type=WriteItemType.SHARD, tensor_data=data)


class _Loader(LoadPlanner):
    """Plans to read parts out of whatever boxes were written; `expected` are the shapes that have to be there."""

    def __init__(self, folder: Path, parts: Iterable[Part], expected: Mapping[str, tuple[int, ...]], optimizer: bool) -> None:
        self.folder, self.expected, self.optimizer = folder, expected, optimizer
        self.parts = {part.index: part for part in parts}
        self.saved: dict[str, Any] = {}

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """Take note of what there is."""
        self.saved = dict(metadata.state_dict_metadata) if metadata is not None else {}

    def create_local_plan(self) -> LoadPlan:
        """Items that fill every part. Raises `BridgeError` if names or shapes do not fit."""
        BridgeError.raise_if(self._problems())
        wanted: dict[str, list[Part]] = {}
        for part in self.parts.values():
            wanted.setdefault(part.name, []).append(part)
        return LoadPlan([item for name, parts in wanted.items() for item in self._items(name, parts)])

    def _items(self, name: str, parts: list[Part]) -> list[ReadItem]:
        found = self.saved.get(name)
        if not isinstance(found, TensorStorageMetadata):
            return []
        return create_read_items_for_chunk_list(name, found, [part.chunk for part in parts])

    def _problems(self) -> Iterator[str]:
        saved = {name: tuple(data.size) for name, data in self.saved.items() if self._counts(name)}
        missing, extra = set(self.expected) - set(saved), set(saved) - set(self.expected)
        yield from self._list("missing", missing)
        yield from self._list("extra, the model has none of that name", extra)
        for name in sorted(set(saved) & set(self.expected)):
            found, wanted = saved[name], self.expected[name]
            if found != wanted:
                yield f"{self.folder}: {name} has shape {found}, expected {wanted}; build the model that was saved"

    def _list(self, what: str, names: set[str]) -> Iterator[str]:
        """One line a name; of moments, which come with every parameter, the first and their number."""
        for name in sorted(filter(_is_weight, names)):
            yield f"{self.folder}: {name} is {what}; build the model that was saved"
        moments = sorted(name for name in names if not _is_weight(name))
        if moments:
            more = f" (and {len(moments) - 1} more)" if len(moments) > 1 else ""
            yield (
                f"{self.folder}: {moments[0]}{more} is {what}; load with load_optimizer_states=False, or with the"
                " optimizer that was saved"
            )

    def _counts(self, name: str) -> bool:
        return _is_weight(name) or (self.optimizer and not name.startswith(f"{GENERATORS}/"))

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Never asked: there are tensors only."""
        raise BridgeError(f"{self.folder}: {read_item.dest_index.fqn} is no tensor; the checkpoint is damaged")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """The place that one item goes to."""
        found = self.parts[MetadataIndex(read_item.dest_index.fqn, read_item.dest_index.offset)].tensor.detach()
        for dim, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            found = found.narrow(dim, offset, length)
        return found

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing: tensors are filled in place."""


def _first(engine: Engine, action: Callable[[], None]) -> None:
    """Run `action` on rank 0 while the others wait; all raise if it fails."""
    problem, comm, device = "", engine.comm, engine.device
    if comm.rank == 0:
        try:
            action()
        except OSError as error:
            problem = f"{error.filename or 'checkpoint'}: {error.strerror}; make room, or choose another folder"
    failed = torch.tensor([float(bool(problem))], device=device)
    comm.all_reduce("checkpoint", failed, comm.world, "max")()
    if failed.item():
        raise BridgeError(problem or "checkpoint: rank 0 could not write; see its message")


def _prepare(temporary: Path) -> None:
    """Clear what a save that was killed left, and make room for the next."""
    if temporary.exists():
        shutil.rmtree(temporary)
    temporary.mkdir(parents=True)


def _publish(temporary: Path, final: Path, text: str, latest: bool) -> None:
    _write_text(temporary / STATE, text)
    _sync(temporary)
    old = final.with_name(f".{final.name}.old")
    if final.exists():
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
    temporary.rename(final)
    _sync(final.parent)
    if latest:
        pointer = final.parent / f".{LATEST}.tmp"
        _write_text(pointer, final.name)
        pointer.rename(final.parent / LATEST)
        _sync(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def _write_text(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _find(folder: Path, tag: str | None) -> Path:
    """The folder of a checkpoint; if a save of the same tag was killed between two renames, the one before."""
    if tag is None:
        try:
            tag = (folder / LATEST).read_text().strip()
        except OSError:
            raise SourceError(f"{folder}: no file {LATEST!r} that names a checkpoint; give a tag, or save first") from None
    for path in (folder / tag, folder / f".{tag}.old"):
        if (path / STATE).exists():
            return path
    raise SourceError(f"{folder / tag}: no checkpoint there; correct the tag{nearest(tag, _tags(folder))}")


def _tags(folder: Path) -> list[str]:
    return [path.name for path in folder.glob("*") if (path / STATE).exists()]


def _read_state(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((path / STATE).read_text())
    except ValueError as error:
        raise SourceError(f"{path / STATE}: {error}; the checkpoint is damaged") from None
    if found.get("format") != FORMAT:
        raise SourceError(f"{path}: format {found.get('format')}, expected {FORMAT}; load it with the version that wrote it")
    return found
