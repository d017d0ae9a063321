"""Checkpoints of the engine: written on one layout, read on any other, and either complete or
absent. Parameters have their global names.

A checkpoint is a folder with a safetensors file for each rank, and `state.json` with everything
else and a digest of each file. The folder is written under a temporary name, flushed to the disk,
and renamed. Only then does the file `latest` name it. Nothing in a checkpoint is executed.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bridge.checkpoint import digests, stored_parts, tagged_json
from bridge.checkpoint.folder_lock import LATEST as LATEST, Saving, find_folder, hold_lock
from bridge.checkpoint.native_format import Checkpoint, file_of
from bridge.checkpoint.schema import FORMAT, STATE, State, parse_state
from bridge.checkpoint.stored_parts import LocalBox, Stored
from bridge.checkpoint.unpickle import FLAWS
from bridge.engine import buffers
from bridge.engine.comm import LostRank, arrive
from bridge.engine.device import generator
from bridge.engine.optimizer import setting
from bridge.engine.training_state import TrainingState
from bridge.errors import BridgeError
from bridge.files.shown import show_value
from bridge.layout.boxes import boxes_of_range
from bridge.layout.shard import FlatPiece, Parameter

WEIGHTS = "weights"
BUFFERS = "buffers"
GENERATORS = "generators"
SAID = "checkpoint"
LONGEST = 256
"""Maximum number of bytes of a text that one rank sends to the others."""


def save(
    engine: TrainingState, folder: Path, tag: str | None, client: Mapping[str, Any], latest: bool
) -> Path:
    """Write a checkpoint of `engine` to `folder`/`tag`, and return the path of the checkpoint.
    Without a tag, the name is `step` and the number of the step.

    Each rank writes the tensors that it owns, and each tensor is written once. `client` is stored
    as JSON. If a rank fails, all ranks raise `BridgeError`, and the previous checkpoint stays as it
    was.
    """
    _refuse_whole(engine, "")
    tag = f"step{engine.progress.steps}" if tag is None else tag
    saving: list[Saving] = []
    if others := buffers.others(engine.model):
        warnings.warn(
            f"model: found {', '.join(others)} in the model's state, expected only tensors; other "
            "values are not saved, so store them in buffers",
            stacklevel=3,
        )
    with together(engine):
        _json(client)
        if engine.comm.rank == 0:
            saving.append(Saving.begin(folder, tag))
    try:
        temporary = folder / _text_of_first_rank(engine, saving[0].temporary.name if saving else "")
        copies = _copies(engine)
        with together(engine):
            path = temporary / file_of(engine.comm.rank)
            stored_parts.write_parts(path, _unique(engine, copies))
            digest = digests.digest_of(path)
        # A SHA-256 has 64 hexadecimal digits: eight numbers of 32 bits, each of which fits into an
        # int64.
        missed = [engine.optimizer.missed[one.name] for one in engine.parameters]
        numbers = _everyones(
            engine, [*(int(digest[start : start + 8], 16) for start in range(0, 64, 8)), *missed]
        )
        with together(engine):
            if saving:
                _publish(engine, saving[0], client, copies, numbers, latest)
    finally:
        for one in saving:
            one.discard()
    return folder / tag


def load(
    engine: TrainingState, folder: Path, tag: str | None, optimizer: bool
) -> tuple[Path, dict[str, Any]]:
    """Read `folder`/`tag` into `engine` (default: the tag in `latest`). Returns the path and the
    client's state.

    Without `optimizer`, moments keep their values and the number of updates that they have seen. If
    tensors are missing, extra, of another shape, or damaged, `BridgeError` names them, and the engine
    stays as it was.
    """
    if optimizer:
        _refuse_whole(engine, "; load_optimizer_states=False loads the weights")
    with ExitStack() as stack:
        name = ""
        with together(engine):
            if engine.comm.rank == 0:
                # Readers share the lock. A save takes it alone, so that nothing in the folder
                # changes while it is read. One rank holds it for all.
                stack.enter_context(hold_lock(folder, shared=True))
                name = find_folder(folder, tag).name
        path = folder / _text_of_first_rank(engine, name)
        with together(engine):
            checkpoint = Checkpoint.open(path, folder)
            checkpoint.verify(engine.comm.rank, engine.comm.world.size)
            tensors = checkpoint.tensors()
            _check(engine, path, tensors, checkpoint.state, optimizer)
        # Only after every rank has found its part in order: a checkpoint is never loaded by some of
        # the ranks.
        with together(engine):
            _fill(engine, tensors, checkpoint.state, optimizer)
    engine.weights.reload()
    _restore(engine, checkpoint.state, optimizer)
    try:
        odd = _otherwise(engine, checkpoint.state)
    except FLAWS as error:
        problem = f"`groups` cannot be read ({error}); the checkpoint is damaged"
        raise BridgeError(f"{path / STATE}: {problem}") from None
    if odd and engine.comm.rank == 0:
        engine.say(odd)
    return path, dict(tagged_json.decode_value(checkpoint.state.client))


def _refuse_whole(engine: TrainingState, advice: str) -> None:
    if engine.optimizer.whole:
        raise BridgeError(
            f"optimizer: {type(engine.optimizer.torch).__name__} updates whole parameters, and its state"
            f" cannot be in a checkpoint of the engine{advice}"
        )


def _otherwise(engine: TrainingState, state: State) -> str:
    """Return a warning if the checkpoint was moved from another stack, and that stack's run had
    other hyperparameters for some parameters than this run. Otherwise return an empty text.
    """
    rows: Any = tagged_json.decode_value(state.carried.get("groups")) or []
    was = {str(name): dict(row["settings"]) for row in rows for name in row["names"]}
    own = {name: group.settings for group in engine.optimizer.groups for name in group.names}
    usual = {key: setting(engine.plan.optimizer, key) for key in ("weight_decay", "betas", "eps")}
    apart: dict[str, list[str]] = {}
    for name, settings in was.items():
        for key, value in usual.items():
            now, before = own.get(name, {}).get(key, value), settings.get(key)
            # JSON has no tuples, so that betas come back as a list.
            if before is not None and before != (list(now) if isinstance(now, tuple) else now):
                apart.setdefault(
                    f"{key} {show_value(before)} instead of {show_value(now)}", []
                ).append(name)
    differences = "; ".join(
        f"{len(names)} parameters, such as {names[0]}, had {difference}"
        for difference, names in apart.items()
    )
    return (
        f"the checkpoint's run used other hyperparameters: {differences}; numbers change unless you pass "
        "groups"
        if differences
        else ""
    )


def _json(client: Mapping[str, Any]) -> Any:
    try:
        return json.loads(json.dumps(tagged_json.encode_value(dict(client))))
    except (TypeError, ValueError, RecursionError) as error:
        raise BridgeError(
            f"client_state: {error}; use only numbers, strings, lists, tuples, sets and "
            "dictionaries"
        ) from None


def _publish(
    engine: TrainingState,
    saving: Saving,
    client: Mapping[str, Any],
    copies: Sequence[int],
    numbers: list[list[int]],
    latest: bool,
) -> None:
    """Complete the checkpoint on the first rank, after all ranks have written their files. `numbers`
    has, for each rank, the digest of its file in eight numbers, and how many updates left out each
    parameter of the model.
    """
    sums = {
        file_of(rank): "".join(f"{number:08x}" for number in row[:8])
        for rank, row in enumerate(numbers)
    }
    missed = [max(column) for column in zip(*(row[8:] for row in numbers), strict=True)]
    missing = next((name for name in sums if not (saving.temporary / name).is_file()), None)
    if missing is not None:
        path = saving.temporary / missing
        raise BridgeError(
            f"{path}: not found here, although another rank wrote this file; choose a folder that all ranks share"
        )
    text = _state(engine, client, copies, missed)
    # Read as a load would: a state that could not be read again is refused now, and not when it is
    # needed.
    parse_state(text, saving.temporary / STATE)
    sums[STATE] = digests.digest_of_text(text)
    saving.publish({STATE: text, digests.SUMS: digests.text_of(sums)}, latest)


def _state(
    engine: TrainingState, client: Mapping[str, Any], copies: Sequence[int], missed: Sequence[int]
) -> str:
    state = {
        "format": FORMAT,
        "world": engine.comm.world.size,
        "seed": engine.seed,
        "progress": asdict(engine.progress),
        "scaler": engine.scaler.state(),
        "client": _json(client),
        "copies": (engine.data.size, engine.tensor.size),
        "ahead": engine.optimizer.ahead,
        "missed": {
            one.name: number
            for one, number in zip(engine.parameters, missed, strict=True)
            if number
        },
        "tensors": dict(_contents(engine, copies)),
    }
    return json.dumps(state, indent=1)


def _contents(
    engine: TrainingState, copies: Sequence[int]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name and the shape of every tensor in a checkpoint of this engine."""
    yield from _shapes_in_checkpoint(engine)
    for copy in copies:
        yield from (
            (f"{BUFFERS}/{copy}/{name}", tuple(buffer.shape))
            for name, buffer in buffers.buffers(engine.model).items()
        )
    for rank in range(engine.comm.world.size):
        for name, state in _generators(engine, rank).items():
            yield name, tuple(state.shape)


def _generators(engine: TrainingState, rank: int) -> dict[str, Tensor]:
    """Return the states of this process's random generators, by the names that they have in a
    checkpoint if they are those of rank `rank`.
    """
    states = {f"{GENERATORS}/{rank}": torch.get_rng_state()}
    own = generator(engine.device)
    return states if own is None else {**states, f"{GENERATORS}/{rank}/device": own.get_state()}


def _restore(engine: TrainingState, state: State, optimizer: bool) -> None:
    seen = engine.progress.steps - engine.optimizer.ahead
    for name, value in state.progress:
        setattr(engine.progress, name, value)
    engine.scaler.restore(state.scaler.model_dump())
    engine.seed = state.seed
    if optimizer:
        seen = state.progress.steps - state.ahead
        engine.optimizer.set_steps(seen, state.missed)
    engine.optimizer.ahead = state.progress.steps - seen


def _parts(engine: TrainingState) -> Iterator[LocalBox]:
    """Yield every tensor that this rank has a part of, even if other ranks have the same part."""
    for flat_index, flat in enumerate(engine.layout.flats):
        for name, tensor in _tensors(engine, flat_index):
            for piece in flat.pieces(engine.data.index):
                yield from _boxes(name, piece, tensor)


def _shapes_in_checkpoint(engine: TrainingState) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name and the whole shape of each weight and each moment in a checkpoint of this
    model, over all ranks.
    """
    for parameter in engine.parameters:
        for kind in (WEIGHTS, *(engine.optimizer.state_names if parameter.trainable else ())):
            yield f"{kind}/{parameter.name}", _whole(parameter)


def _is_weight(name: str) -> bool:
    return name.startswith(f"{WEIGHTS}/")


def _tensors(engine: TrainingState, index: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the slice of flat number `index` that this rank owns, and the optimizer state of this
    slice, each with its kind.
    """
    yield WEIGHTS, engine.weights.shards[index]
    flats = engine.weights.trainable_flats()
    if index in flats:
        yield from engine.optimizer.state(flats.index(index)).items()


def _boxes(kind: str, piece: FlatPiece, tensor: Tensor) -> Iterator[LocalBox]:
    """Yield the rectangular regions of a parameter that lie in `tensor`, one rank's slice of a
    flat.
    """
    parameter, place = piece.parameter, piece.offset
    for box in boxes_of_range(parameter.shape, piece.start, piece.stop):
        length = torch.Size(box.sizes).numel()
        view = tensor[place : place + length].view(box.sizes)
        # Boxes count within this tensor rank's part of the parameter, which begins at `start` of
        # the whole.
        offsets = list(box.offsets)
        if parameter.split is not None:
            offsets[parameter.split] += parameter.start
        yield LocalBox(f"{kind}/{parameter.name}", _whole(parameter), tuple(offsets), view)
        place += length


def _whole(parameter: Parameter) -> tuple[int, ...]:
    return tuple(
        parameter.whole if dim == parameter.split else size
        for dim, size in enumerate(parameter.shape)
    )


def _unique(engine: TrainingState, copies: Sequence[int]) -> Iterator[LocalBox]:
    """Yield the regions of tensors that this rank writes. If several ranks hold the same region,
    only the first of them writes it.
    """
    for index, flat in enumerate(engine.layout.flats):
        if (flat.sharded or engine.data.index == 0) and engine.first_holder(flat):
            for name, tensor in _tensors(engine, index):
                for piece in flat.pieces(engine.data.index):
                    if piece.parameter.split is not None or engine.tensor.index == 0:
                        yield from _boxes(name, piece, tensor)
    if _copy(engine) in copies:
        for name, buffer in buffers.local_buffers(engine):
            yield _complete(f"{BUFFERS}/{_copy(engine)}/{name}", buffer.detach().clone())
    for name, state in _generators(engine, engine.comm.rank).items():
        yield _complete(name, state)


def _complete(name: str, tensor: Tensor) -> LocalBox:
    return LocalBox(name, tuple(tensor.shape), (0,) * tensor.dim(), tensor)


def _copy(engine: TrainingState) -> int:
    """Return the index of this rank's copy of the buffers. Each pair of a data rank and a tensor
    rank has one copy.
    """
    return engine.data.index * engine.tensor.size + engine.tensor.index


def _copies(engine: TrainingState) -> list[int]:
    """Return the indices of the copies of buffers that are written: the first copy, and all copies
    that differ from the first. Copies differ with BatchNorm, for example, because each data rank
    averages its own microbatches.
    """
    if not buffers.buffers(engine.model):
        return []
    digests = _everyones(engine, [_copy(engine), engine.line.index, buffers.digest(engine)])
    first = {place: digest for copy, place, digest in digests if copy == 0}
    return sorted({copy for copy, place, digest in digests if copy == 0 or digest != first[place]})


def _name_of_copy(engine: TrainingState, state: State, name: str) -> str:
    """Return the name under which this rank reads a buffer from the checkpoint. The rank reads its
    own copy if the checkpoint has this copy and was saved with as many data ranks and tensor ranks
    as this run has. Otherwise it reads the first copy.
    """
    own = f"{BUFFERS}/{_copy(engine)}/{name}"
    alike = state.copies == (engine.data.size, engine.tensor.size)
    return own if alike and own in state.tensors else f"{BUFFERS}/0/{name}"


def _check(
    engine: TrainingState,
    path: Path,
    tensors: Mapping[str, Sequence[Stored]],
    state: State,
    optimizer: bool,
) -> None:
    """Raise `BridgeError` if the saved tensors are not those that this engine expects."""
    shapes = {
        name: shape
        for name, shape in _shapes_in_checkpoint(engine)
        if optimizer or _is_weight(name)
    }
    for name, buffer in buffers.buffers(engine.model).items():
        shapes[_name_of_copy(engine, state, name)] = tuple(buffer.shape)
    BridgeError.raise_if(_misfits(path, shapes, state.tensors, optimizer))
    whole = {WEIGHTS, *engine.optimizer.state_names}
    for name in shapes:
        dtype = tensors[name][0].dtype if tensors[name] else "F32"
        if name.split("/")[0] in whole and not dtype.startswith(("F", "BF")):
            raise BridgeError(
                f"{path}: {name} has the number format {dtype}, expected floating point; the checkpoint is damaged"
            )
    for name, own in _generators(engine, engine.comm.rank).items():
        # A run on CPUs has saved none of a device.
        belongs = engine.comm.rank < state.world if name.count("/") == 1 else name in state.tensors
        if belongs and state.tensors.get(name) != tuple(own.shape):
            raise BridgeError(
                f"{path}: {name} does not hold the state of a random generator of torch; the checkpoint is damaged"
            )


def _misfits(
    path: Path,
    model_shapes: Mapping[str, tuple[int, ...]],
    file_shapes: Mapping[str, tuple[int, ...]],
    optimizer: bool,
) -> Iterator[str]:
    # A saved weight or moment that is not wanted means another model. Other copies of buffers, and
    # generators of more ranks, are left by another layout. Moments matter only if they are read.
    there = {name for name in file_shapes if _is_weight(name)}
    if optimizer:
        there |= {
            name for name in file_shapes if not name.startswith((f"{GENERATORS}/", f"{BUFFERS}/"))
        }
    yield from _list(path, "missing", set(model_shapes) - set(file_shapes))
    yield from _list(path, "extra, because the model has no such tensor", there - set(model_shapes))
    for name in sorted(set(file_shapes) & set(model_shapes)):
        if file_shapes[name] != model_shapes[name]:
            yield f"{path}: {name} has shape {file_shapes[name]}, expected {model_shapes[name]}; build the model that was saved"


def _list(path: Path, what: str, names: set[str]) -> Iterator[str]:
    """Yield one problem for each weight or buffer in `names`. Moments get a single problem with
    their number, because every parameter has moments. `what` says what is wrong with all of these
    tensors.
    """
    for name in sorted(filter(_of_model, names)):
        yield f"{path}: tensor {name} is {what}; build the model that was saved"
    moments = sorted(name for name in names if not _of_model(name))
    if moments:
        others = f" (and {len(moments) - 1} more tensors)" if len(moments) > 1 else ""
        advice = "load with load_optimizer_states=False, or with the optimizer that was saved"
        yield f"{path}: tensor {moments[0]}{others} is {what}; {advice}"


def _of_model(name: str) -> bool:
    return name.startswith((f"{WEIGHTS}/", f"{BUFFERS}/"))


def _fill(
    engine: TrainingState, tensors: Mapping[str, Sequence[Stored]], state: State, optimizer: bool
) -> None:
    names = {name for name, _ in _shapes_in_checkpoint(engine) if optimizer or _is_weight(name)}
    stored_parts.fill_parts((part for part in _parts(engine) if part.name in names), tensors)
    named_buffers = (
        (_name_of_copy(engine, state, name), tensor)
        for name, tensor in buffers.buffers(engine.model).items()
    )
    stored_parts.fill_parts((_complete(name, tensor) for name, tensor in named_buffers), tensors)
    # A rank that the saved run did not have keeps its own generators.
    generators = [torch.default_generator, generator(engine.device)]
    for own, (name, values) in zip(
        generators, _generators(engine, engine.comm.rank).items(), strict=False
    ):
        if own is not None and name in state.tensors:
            stored_parts.fill_parts([_complete(name, values)], tensors)
            own.set_state(values)


# Notes between ranks


@contextmanager
def together(engine: TrainingState) -> Iterator[None]:
    """Context for a block of code without collectives, which all ranks run. If the block fails on
    one rank, all ranks raise `BridgeError`.
    """
    failure: BridgeError | None = None
    try:
        yield
    except LostRank:
        raise  # the others cannot be asked any more
    except BridgeError as error:
        failure = error
    except OSError as error:
        failure = BridgeError(
            f"{error.filename or SAID}: {error.strerror}; make room, or choose another folder"
        )
    problems = [
        rank for rank, (bad,) in enumerate(_everyones(engine, [int(failure is not None)])) if bad
    ]
    if failure is not None:
        raise failure
    if problems:
        raise BridgeError(f"{SAID}: rank {problems[0]} failed; see its message")


def _everyones(engine: TrainingState, numbers: Sequence[int]) -> list[list[int]]:
    """Return the `numbers` of each rank, in order of ranks. Every rank must pass the same count of
    numbers, each below 2**63.
    """
    # Each rank fills its own row of zeros, so that the sum over ranks is every row.
    comm = engine.comm
    rows = torch.zeros(comm.world.size, len(numbers), dtype=torch.int64, device=engine.device)
    rows[comm.rank] = torch.tensor(numbers, dtype=torch.int64)
    comm.all_reduce(SAID, rows, comm.world)()
    arrive()
    return [[int(number) for number in row] for row in rows.tolist()]


def _text_of_first_rank(engine: TrainingState, text: str) -> str:
    """Return the `text` of the first rank on all ranks, cut to `LONGEST` bytes."""
    data = text.encode()[:LONGEST]
    return (
        bytes(_everyones(engine, [*data, *(0 for _ in range(LONGEST - len(data)))])[0])
        .rstrip(b"\0")
        .decode()
    )
