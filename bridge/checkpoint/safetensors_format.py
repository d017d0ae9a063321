"""Safetensors files as Hugging Face writes them: only whole weights, in one file, or in several
files with an index.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bridge.checkpoint.files import File
from bridge.checkpoint.hub import Hub, Origin, Parameter, loss_finding, weights_of
from bridge.checkpoint.interface import Format, PlannedFiles, Wanted, only_weights
from bridge.checkpoint.lazy import EIGHT, FLOATING, Boxed, Lazy, Placed
from bridge.checkpoint.quantized import USUAL, Scaled, read_quantized
from bridge.checkpoint.safetensors_file import DAMAGED, MOST, file_of, read_header, read_parts
from bridge.checkpoint.stored_parts import Stored, check_cover
from bridge.errors import SourceError
from bridge.files.contained import plain, read_text
from bridge.files.sealed import parse_object
from bridge.files.shown import show_value
from bridge.stack.findings import Finding
from bridge.stack.rules import Effect


@dataclass(frozen=True)
class FileNames:
    """The names of the files of a format: of a single file, of one of several files (with its
    number and their count), and of their index.
    """

    alone: str
    several: str
    index: str


SAFE = FileNames(
    "model.safetensors", "model-{:05d}-of-{:05d}.safetensors", "model.safetensors.index.json"
)


def divide_into_shards(tensors: Mapping[str, Lazy], most: int) -> list[dict[str, Lazy]]:
    """Divide tensors into files, in order. Returns the tensors of each file. A file has at most
    `most` bytes, unless a single tensor is larger.
    """
    shards: list[dict[str, Lazy]] = []
    size = 0
    for name, tensor in tensors.items():
        if not shards or (size and size + tensor.size > most):
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.size
    return shards or [{}]


def index_files(
    names: FileNames, parts: Sequence[Mapping[str, Lazy]]
) -> Iterator[tuple[str, Mapping[str, Lazy]]]:
    """Yield the name of each file with the tensors in it."""
    if len(parts) == 1:
        yield names.alone, parts[0]
        return
    for number, part in enumerate(parts, 1):
        yield names.several.format(number, len(parts)), part


def index_file(names: FileNames, parts: Sequence[Mapping[str, Lazy]]) -> Iterator[File]:
    """Yield the file with the index, if there are several files."""
    if len(parts) > 1:
        total = sum(tensor.size for part in parts for tensor in part.values())
        where = {name: file for file, part in index_files(names, parts) for name in part}
        text = (
            json.dumps(
                {"metadata": {"total_size": total}, "weight_map": where}, indent=2, sort_keys=True
            )
            + "\n"
        )
        yield File(names.index, (text.encode(),))


def list_files(folder: Path, names: FileNames) -> tuple[Path, ...] | None:
    """Return the single file, or those that the index in a folder names; None if there is neither."""
    where = map_of_files(folder, names)
    if where is not None:
        return tuple(folder / name for name in dict.fromkeys(where.values()))
    return (folder / names.alone,) if (folder / names.alone).is_file() else None


def map_of_files(folder: Path, names: FileNames) -> dict[str, str] | None:
    """Return the name of the file that has each tensor, from the index in a folder; None if there is
    none, or one of other files than the single file, which transformers prefers
    (transformers/modeling_utils.py: _get_resolved_checkpoint_files).
    """
    if not (folder / names.index).is_file():
        return None
    where = weight_map(folder, names)
    other = (folder / names.alone).is_file() and set(where.values()) != {names.alone}
    return None if other else where


def find_unread_index(folder: Path, names: FileNames, files: Sequence[Path]) -> Iterator[Finding]:
    """Yield a finding if the index in a folder is not read, as the single file is among `files`."""
    there = folder / names.alone in files and (folder / names.index).is_file()
    if there and map_of_files(folder, names) is None:
        message = f"{names.index} and its files are not read, as transformers loads {names.alone}"
        yield loss_finding("files", message, Effect.NONE)


def weight_map(folder: Path, names: FileNames) -> dict[str, str]:
    """Return the name of the file that has each tensor, from the index in a folder."""
    path = folder / names.index
    rows = parse_object(read_text(path, folder, MOST), path).get("weight_map")
    if not (
        rows and isinstance(rows, dict) and all(isinstance(name, str) for name in rows.values())
    ):
        raise SourceError(
            f"{path}: found {show_value(rows)} as weight_map, expected the name of a file for each tensor; {DAMAGED}"
        )
    return {key: plain(name, path) for key, name in rows.items()}


def check_tensors(
    folder: Path, names: FileNames, tensors_by_path: Mapping[Path, Mapping[str, Lazy]]
) -> dict[str, Lazy]:
    """Return the tensors of all files together. `tensors_by_path` has the tensors of each file. Raises
    `SourceError` if a tensor is in two files, or in another file than the index says, or missing.
    """
    where = map_of_files(folder, names)
    tensors: dict[str, Lazy] = {}
    for path, own_tensors in tensors_by_path.items():
        for name, tensor in own_tensors.items():
            if name in tensors or (where is not None and where.get(name) != path.name):
                other = (
                    f"{names.index} lists this tensor in {where.get(name)}"
                    if where is not None
                    else "another file has this tensor too"
                )
                raise SourceError(
                    f"{path}: found the tensor {show_value(name)}, but {other}; the checkpoint is damaged"
                )
            tensors[name] = tensor
    for name in sorted(set(where or ()) - set(tensors)):
        raise SourceError(
            f"{folder / (where or {})[name]}: found no tensor {show_value(name)},"
            f" which {names.index} lists for this file; {DAMAGED}"
        )
    return tensors


SHARD = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")
"""Names of the files in which the ranks of transformers and AutoModel save parts of tensors
(torch/distributed/checkpoint/_hf_utils.py: SHARDED_FILE_NAME).
"""


def list_shards(folder: Path) -> tuple[Path, ...]:
    """Return the files in a folder in which ranks saved their parts of tensors."""
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    return tuple(folder / name for name in names if SHARD.fullmatch(name))


def read_weights(folder: Path) -> tuple[dict[str, Lazy], tuple[Path, ...]]:
    """Return the tensors in the safetensors of a folder, and these files: the single file, those that the index
    names, or those of ranks. Raises `SourceError` if a part is missing or stored twice.
    """
    paths = list_files(folder, SAFE)
    if paths is not None:
        return check_tensors(
            folder, SAFE, {path: read_header(path, folder) for path in paths}
        ), paths
    paths = list_shards(folder)
    boxes: dict[str, list[Placed]] = {}
    for path in paths:
        for name, part in read_parts(path, folder).items():
            boxes.setdefault(name, []).append(part)
    return {name: _join_parts(folder, name, parts) for name, parts in boxes.items()}, paths


def _join_parts(folder: Path, name: str, parts: Sequence[Placed]) -> Lazy:
    """Return the tensor that consists of parts. The files do not say its shape: it ends where the last part does."""
    ends = ((o + s for o, s in zip(p.place.offsets, p.place.sizes, strict=True)) for p in parts)
    shape = tuple(map(max, zip(*ends, strict=True)))
    stored = [Stored(name, part.place, part.source.dtype, None, name) for part in parts]
    problem = check_cover(name, shape, stored)
    SourceError.raise_if([f"{folder}: {problem}; {DAMAGED}"] if problem else [])
    return Boxed(tuple(parts), shape, parts[0].source.dtype)


def weights_to_write(hub: Hub, dtype: str | None) -> dict[str, Lazy]:
    """Return the weights to write: one copy of each parameter, the further names of tied parameters
    with the same copy, and the buffers. Copies have the number format `dtype`, or by default that
    of the weight. The master is written if it has exactly the format `dtype`; otherwise the weight,
    with which the model computes, is converted.
    """
    weights = {}
    for name, parameter in hub.parameters.items():
        exact = parameter.best if dtype == parameter.best.dtype else parameter.weight
        weights[name] = weights_of(exact, dtype)
    return {**weights, **{alias: weights[name] for alias, name in hub.ties.items()}, **hub.buffers}


def _name_tied_by_config(hub: Hub) -> str | None:
    """Return the name that transformers gives a parameter which the file has under its other name,
    as the model's config ties the two; None if the config does not tie them.
    """
    from bridge.checkpoint.renaming import try_namings

    recognition = try_namings(hub) if hub.model and hub.model.tied else None
    pair = recognition.table.tied if recognition else None
    both = any({alias, name} == set(pair or ()) for alias, name in hub.ties.items())
    return pair[0] if pair and both else None


def tie_by_storage(tensors: Mapping[str, Lazy]) -> tuple[dict[str, Lazy], dict[str, str]]:
    """Return the tensors without further names of the same bytes, and these names, each with the first. Only
    parameters are tied: a buffer is a tensor of its own under each of its names.
    """
    # Equal lazy tensors are the same bytes of the same file: that is how torch.save keeps a tie.
    places: dict[Lazy, str] = {}
    ties = {
        name: first
        for name, tensor in tensors.items()
        # Boxes are lists, which have no hash, and keep no ties.
        if tensor.dtype in FLOATING and tensor.count and not isinstance(tensor, Boxed)
        if (first := places.setdefault(tensor, name)) != name
    }
    return {name: tensor for name, tensor in tensors.items() if name not in ties}, ties


def hub_of(
    format: str, tensors: Mapping[str, Lazy], files: tuple[Path, ...], in_order: bool
) -> Hub:
    """Return a checkpoint that consists of these tensors. Floating-point tensors are parameters,
    all others are buffers. Two names of the same bytes are a tie. Raises `SourceError` for weights that
    are quantized in a way that is not read.
    """
    tensors, findings = read_model(tensors, files[0].parent if files else None)
    own, ties = tie_by_storage(tensors)
    parameters = {
        name: Parameter(tensor) for name, tensor in own.items() if tensor.dtype in FLOATING
    }
    buffers = {name: tensor for name, tensor in own.items() if name not in parameters}
    return Hub(
        Origin(format, files=files), parameters, buffers, ties, in_order, findings=tuple(findings)
    )


def read_model(
    tensors: Mapping[str, Lazy], folder: Path | None
) -> tuple[dict[str, Lazy], list[Finding]]:
    """Return the tensors of a model, those of quantized weights as numbers, and a finding if there are any.
    The config in `folder` says how large their blocks are.
    """
    eight = any(isinstance(tensor, Lazy) and tensor.dtype in EIGHT for tensor in tensors.values())
    path = folder / "config.json" if folder and eight else None
    data = parse_object(read_text(path, path.parent, MOST), path) if path and path.is_file() else {}
    # The parts of a model with a text decoder, such as Kimi-VL, have configs of their own.
    inner = data.get("text_config")
    sections = data.get(QUANTIZED), inner.get(QUANTIZED) if isinstance(inner, dict) else None
    section = next((one for one in sections if isinstance(one, dict)), {})
    is_stated = section.get("quant_method") == "fp8"
    takes_usual = is_stated and "weight_block_size" not in section
    sizes = section.get("weight_block_size")
    blocks = None
    if isinstance(sizes, list) and [type(size) for size in sizes] == [int, int] and min(sizes) > 0:
        blocks = sizes[0], sizes[1]
    numbers, weights = read_quantized(tensors, blocks, is_stated, takes_usual)
    used = {(one.rows, one.columns) for one in weights if isinstance(one, Scaled)}
    source = (
        f"{path} says"
        if blocks
        else "transformers takes where a config states no weight_block_size"
        if takes_usual and USUAL in used
        else "the shapes of the scales show"
    )
    spelled = ", ".join(f"{rows} x {columns}" for rows, columns in sorted(used))
    about = f"; blocks of {spelled} elements, as {source}" if used else ""
    message = (
        f"{len(weights)} weights are quantized with a scale for each block, and are read as bf16"
    )
    return numbers, [loss_finding("weights", message + about, Effect.NONE)] if weights else []


QUANTIZED = "quantization_config"
TRAINER = "trainer_state.json"
"""The file in which transformers' Trainer saves the step of a run, beside the weights."""
UNREAD = ("optimizer.*", "scheduler.*", "rng_state*.pth", "random_states_*.pkl", "scaler.pt")
"""Patterns for files of Trainer and accelerate with the rest of a run's state, which is not read."""


def read_trainer_state(place: Path) -> dict[str, Any]:
    """Return the state of a run that Trainer saved beside the weights. Raises `SourceError` if it has no
    number of steps.
    """
    path = place / TRAINER
    state = parse_object(read_text(path, place, MOST), path)
    steps = state.get("global_step")
    if type(steps) is not int or steps < 0:
        raise SourceError(
            f"{path}: found {show_value(steps)} as global_step, expected a number of steps; {DAMAGED}"
        )
    return state


def with_trainer_state(hub: Hub, place: Path, files: FileNames) -> Hub:
    """Return the checkpoint with the step that Trainer saved beside the weights, which have the names
    `files`, and findings that name the files beside them that are not read.
    """
    there = (place / TRAINER).is_file()
    steps = read_trainer_state(place)["global_step"] if there else None
    names = sorted({path.name for pattern in UNREAD for path in place.glob(pattern)})
    message = (
        f"{', '.join(names)} hold the moments and the rest of the run's state, which is not read"
    )
    findings = [loss_finding("moments", message, Effect.NUMBERS)] if names else []
    findings += find_unread_index(place, files, hub.origin.files)
    return replace(hub, where=replace(hub.where, steps=steps), findings=(*hub.findings, *findings))


class Safe(Format):
    """The format in which transformers saves weights."""

    name = "safetensors"
    title = "Hugging Face safetensors"
    names = "huggingface"
    weights_only = True
    unseen = "a changed byte of a tensor is not detected"

    def find(self, folder: Path) -> Path | None:
        """Return the folder if it has files with this format's names; else None."""
        whole = (folder / SAFE.index).is_file() or (folder / SAFE.alone).is_file()
        return folder if whole or list_shards(folder) else None

    def read(self, place: Path) -> Hub:
        """Return a checkpoint with all weights of the files in the folder."""
        tensors, paths = read_weights(place)
        return with_trainer_state(hub_of(self.name, tensors, paths, in_order=False), place, SAFE)

    def plan(self, hub: Hub, target: Wanted) -> PlannedFiles:
        """Return the files that would hold the weights: one file, or several files with an index.
        Tied names are written twice, as the format has no ties, unless the config ties them.
        """
        tensors = weights_to_write(hub, target.dtype)
        if (alias := _name_tied_by_config(hub)) is not None:
            del tensors[alias]
        parts = divide_into_shards(tensors, target.shard)
        files = [file_of(name, part, {"format": "pt"}) for name, part in index_files(SAFE, parts)]
        findings: tuple[Finding, ...] = tuple(only_weights(hub, target.dtype, self.title))
        if alias is not None:
            message = f"{alias} is written under the name that the model's config ties it to"
            findings = (*findings, loss_finding("ties", message, Effect.NONE))
        return PlannedFiles((*files, *index_file(SAFE, parts)), "SHA256SUMS", findings)
