"""Reads `mp_rank_*` of Megatron-LM: a file per tensor rank and stage, with its part of the model
and the optimizer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bridge.checkpoint import archive
from bridge.checkpoint.archive import Used
from bridge.checkpoint.hub import Hub, Origin, Parameter
from bridge.checkpoint.interface import Format
from bridge.checkpoint.lazy import Boxed, Lazy, Placed, raw_bytes
from bridge.checkpoint.parameter_names import Shape
from bridge.errors import SourceError
from bridge.files.shown import show_value
from compat.megatron.checkpoint import run
from compat.megatron.checkpoint.dist import iteration
from compat.megatron.checkpoint.ranks import (
    LAYERS,
    OUTPUT,
    SPLIT,
    WORDS,
    Parallel,
    place_slices,
    renumber_layer,
)
from compat.megatron.checkpoint.run import DAMAGED

# mp_rank_TENSOR, with _STAGE and _EXPERT if there are several (training/checkpointing.py:
# get_checkpoint_name).
FOLDER = re.compile(r"mp_rank_(\d{2})(?:_(\d{3}))?(?:_(\d{3}))?")
FILE, SHARDED = "model_optim_rng.pt", "distrib_optim.pt"
ADVICE = "save the run with --ckpt-format torch_dist"
EXTRA = "._extra_state"


class Parts(Format):
    """The format `mp_rank_*`, which is Megatron-LM's own."""

    name = "megatron-ranks"
    title = "Megatron-LM mp_rank_*"

    def find(self, folder: Path) -> Path | None:
        """Return the folder of the checkpoint: `folder` itself, or the iteration in it that
        Megatron-LM's tracker names.
        """
        place = iteration(folder)
        return place if place.is_dir() and any(place.glob(f"mp_rank_*/{FILE}")) else None

    def verify(self, place: Path, used: Used | None = None) -> None:
        """Verify the checksums of the files and those inside each archive."""
        super().verify(place, used)
        for path in sorted(place.glob(f"mp_rank_*/{FILE}")):
            archive.verify_archive(path, place, used=used)

    def read(self, place: Path) -> Hub:
        """Read the weights and the unsharded optimizer, joined over all ranks."""
        files = _files(place)
        states = {key: _load_file(path, place) for key, path in files.items()}
        common = states[0, 0]
        args = run.arguments(common)
        parallel = _parallel(place, args, states)
        _in_place(files, states, parallel)
        optimizer = common.get("optimizer") or {}
        ranks = {key: Rank.of(files[key], state, *key, parallel) for key, state in states.items()}
        shapes = _shapes(ranks, parallel)
        parameters = {
            name: _whole(name, shapes, ranks, parallel, run.step_of(optimizer)) for name in shapes
        }
        rows = optimizer.get("optimizer", optimizer).get("param_groups", ())
        dimensions = {name: len(parameter.weight.shape) for name, parameter in parameters.items()}
        groups = run.groups_of(rows, dimensions, str(files[0, 0])) if rows else ()
        client, findings = run.client_of(common)
        return Hub(
            Origin(
                self.name,
                layout={"tensor": parallel.tensor, "pipeline": parallel.pipeline},
                files=tuple(files.values()),
            ),
            parameters,
            groups=groups,
            where=run.where_of(
                common, run.step_of(optimizer), groups[0].settings.get("lr") if groups else None
            ),
            scale=run.scale_of(optimizer, args),
            client=client,
            model=run.model_of(args),
            findings=(*findings, *run.generators("rng_state" in common)),
        )


def _files(place: Path) -> dict[tuple[int, int], Path]:
    """Return the file of each tensor rank and stage. Raises `SourceError` for a missing file, a
    file of an expert rank, or a file of the distributed optimizer.
    """
    files: dict[tuple[int, int], Path] = {}
    for folder in sorted(place.glob("mp_rank_*")):
        match = FOLDER.fullmatch(folder.name)
        if match is None or match[3] is not None or (folder / SHARDED).is_file():
            if match is None:
                kind = "a folder that belongs to no rank"
            elif match[3]:
                kind = "a file of an expert rank"
            else:
                kind = f"{SHARDED} of the distributed optimizer"
            raise SourceError(
                f"{folder}: found {kind}, which cannot be read in this format; {ADVICE}"
            )
        files[int(match[1]), int(match[2] or 0)] = folder / FILE
    tensor, pipeline = (max(key[at] for key in files) + 1 for at in (0, 1))
    ranks = ((t, p) for p in range(pipeline) for t in range(tensor))
    missing = next((key for key in ranks if key not in files), None)
    if missing:
        raise SourceError(
            f"{place}: no file of tensor rank {missing[0]} of stage {missing[1]}; {DAMAGED}"
        )
    return files


def _load_file(path: Path, place: Path) -> Mapping[str, Any]:
    content = archive.read_archive(path, place, run.KNOWN)
    if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
        # With virtual stages, a file has model0, model1, ... instead of model.
        parts = isinstance(content, dict) and "model0" in content
        problem = (
            f"found chunks of an interleaved pipeline, which cannot be read; {ADVICE}"
            if parts
            else f"found no model; {DAMAGED}"
        )
        raise SourceError(f"{path}: {problem}")
    return content


def _parallel(
    place: Path, args: Mapping[str, Any], states: Mapping[tuple[int, int], Mapping[str, Any]]
) -> Parallel:
    """Return the layout over ranks, from the saved arguments. Raises `SourceError` if the number of
    files does not fit this layout.
    """
    # Each stage numbers its layers from 0, so the layers of the first tensor rank's stages are
    # added up.
    layers = 0
    for (index, _), state in states.items():
        if index == 0:
            own = [name for name in state["model"] if name.startswith(LAYERS)]
            layers += len({int(name.removeprefix(LAYERS).partition(".")[0]) for name in own})
    parallel = Parallel.of(args, layers, str(place))
    if parallel.tensor * parallel.pipeline != len(states):
        raise SourceError(
            f"{place}: found {len(states)} files; expected {parallel.tensor} tensor ranks on "
            f"{parallel.pipeline} stages; {DAMAGED}"
        )
    return parallel


ENDS = {"embedding.": 0, "decoder.final_layernorm.": -1}
"""For each prefix of parameters that only one stage has: the index of that stage."""


def _in_place(
    files: Mapping[tuple[int, int], Path],
    states: Mapping[tuple[int, int], Mapping[str, Any]],
    parallel: Parallel,
) -> None:
    """Raise `SourceError` for a file of another rank or of another step.

    The rank is known from the saved arguments, if the file has them. The first and the last stage
    are known from the names of their parameters.
    """
    # By stage, then by tensor rank: in this order the numbers of Megatron's ranks rise.
    order = sorted(files, key=lambda key: (key[1], key[0]))
    ranks = [run.arguments(states[key]).get("rank") for key in order]
    marks: dict[bytes, Path] = {}
    for number, key in enumerate(order):
        path, state, own = files[key], states[key], ranks[number]
        before = ranks[number - 1] if number else None
        for prefix, stage in ENDS.items():
            having = {
                other[1]
                for other in order
                if any(name.startswith(prefix) for name in states[other]["model"])
            }
            if having and (key[1] in having) != (key[1] == stage % parallel.pipeline):
                raise SourceError(
                    f"{path}: {prefix}* belongs to stage {stage % parallel.pipeline}; "
                    "the names of the files of two stages are swapped; rename the files"
                )
        if isinstance(own, int) and isinstance(before, int) and own <= before:
            raise SourceError(
                f"{path}: found rank {own} in the file; expected a rank above {before}; "
                "name each file after the rank that wrote it"
            )
        other = marks.setdefault(_mark(state), path)
        if len(files) > 1 and other != path:
            raise SourceError(
                f"{path}: found the same weights as in {other}; one of them is a copy of another rank's file"
            )
        for what in ("iteration", "opt_param_scheduler"):
            if state.get(what) != states[order[0]].get(what):
                raise SourceError(
                    f"{path}: the {what} in this file differs from the {what} in {files[order[0]]}; "
                    "the file comes from another step"
                )


SAMPLE = 256
"""Number of elements at the start of each matrix that are compared between ranks. Two ranks with
equal elements are copies of one file.
"""


def _mark(state: Mapping[str, Any]) -> bytes:
    """Return the first elements of each matrix in a rank's file. These elements differ between any
    two ranks.
    """
    matrices = (
        part
        for _, part in sorted(state["model"].items())
        if isinstance(part, Lazy) and len(part.shape) > 1
    )
    return b"".join(bytes(raw_bytes(part.flat(0, min(part.count, SAMPLE)))) for part in matrices)


@dataclass(frozen=True)
class Rank:
    """The content of one rank's file: `weights` by global name, and `kinds` with the optimizer's
    tensors of each weight.
    """

    index: int
    stage: int
    weights: Mapping[str, Lazy]
    kinds: Mapping[str, Mapping[str, Lazy]]

    @classmethod
    def of(
        cls, path: Path, state: Mapping[str, Any], index: int, stage: int, parallel: Parallel
    ) -> Rank:
        """Read the content of a rank's file."""
        first = parallel.of_stage(stage).start
        weights = {
            renumber_layer(name, lambda layer: first + layer): tensor
            for name, tensor in state["model"].items()
            if isinstance(tensor, Lazy) and EXTRA not in name
        }
        # With tied words, the last stage calls its copy of them the output layer.
        if (
            stage
            and OUTPUT in weights
            and (run.arguments(state).get("untie_embeddings_and_output_weights") is False)
        ):
            weights[WORDS] = weights.pop(OUTPUT)
        return cls(
            index,
            stage,
            weights,
            dict(_masters_and_moments(path, state.get("optimizer") or {}, weights)),
        )


def _masters_and_moments(
    path: Path, optimizer: Mapping[str, Any], weights: Mapping[str, Lazy]
) -> Iterator[tuple[str, dict[str, Lazy]]]:
    """Yield masters and moments by name. The file numbers parameters by group; within a group they
    are in the order of the model.
    """
    # In mixed precision, torch's own state lies one level down, beside the masters.
    inner = optimizer.get("optimizer", optimizer)
    masters = optimizer.get("fp32_from_fp16_params") or []
    dimensions = {name: len(tensor.shape) for name, tensor in weights.items()}
    rows = inner.get("param_groups") or []
    for number, (row, group) in enumerate(
        zip(rows, run.groups_of(rows, dimensions, str(path)) if rows else (), strict=True)
    ):
        if len(row["params"]) != len(group.names):
            problem = f"{len(row['params'])} parameters in group {number} of the optimizer; expected {len(group.names)}"
            raise SourceError(f"{path}: {problem}; {DAMAGED}")
        for at, (key, name) in enumerate(zip(row["params"], group.names, strict=True)):
            # A tensor without dimensions is the step, not a moment.
            states = {
                kind: tensor
                for kind, tensor in inner["state"].get(key, {}).items()
                if isinstance(tensor, Lazy) and tensor.shape
            }
            states |= {"master": masters[number][at]} if masters else {}
            if any(tensor.shape != weights[name].shape for tensor in states.values()):
                raise SourceError(
                    f"{path}: the optimizer's tensors of {show_value(name)} and the weight have "
                    f"different shapes; {DAMAGED}"
                )
            yield name, states


def _shapes(ranks: Mapping[tuple[int, int], Rank], parallel: Parallel) -> dict[str, Shape]:
    """Return the shapes of whole parameters."""
    shapes: dict[str, Shape] = {}
    for (index, _), rank in sorted(ranks.items(), key=lambda item: item[0][1]):
        for name, weight in rank.weights.items() if index == 0 else ():
            dim = next((dim for end, dim in SPLIT.items() if name.endswith(end)), None)
            # The split dimension is as many times larger as there are tensor ranks.
            ratio = [parallel.tensor if at == dim else 1 for at in range(len(weight.shape))]
            shapes.setdefault(
                name, tuple(size * times for size, times in zip(weight.shape, ratio, strict=True))
            )
    return shapes


def _whole(
    name: str,
    shapes: Mapping[str, Shape],
    ranks: Mapping[tuple[int, int], Rank],
    parallel: Parallel,
    step: float | None,
) -> Parameter:
    """Return a whole parameter. It is joined over the tensor ranks of the first stage that has the
    parameter.
    """
    stage = min(rank.stage for rank in ranks.values() if name in rank.weights)
    split = any(name.endswith(end) for end in SPLIT)
    holders = [ranks[index, stage] for index in range(parallel.tensor if split else 1)]

    def join_boxes(parts: Sequence[Lazy]) -> Lazy:
        boxes: list[Placed] = []
        for rank, part in zip(holders, parts, strict=True):
            boxes += place_slices(name, shapes, rank.index, parallel.tensor if split else 1, part)
        return Boxed(tuple(boxes), shapes[name], parts[0].dtype)

    weight = join_boxes([rank.weights[name] for rank in holders])
    kinds = {
        kind: join_boxes([rank.kinds[name][kind] for rank in holders])
        for kind in holders[0].kinds.get(name, {})
    }
    return Parameter(weight, kinds.pop("master", None), kinds, step if kinds else None)
