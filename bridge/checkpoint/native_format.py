"""The native engine's checkpoints: state.json, SHA256SUMS, and for each rank a safetensors file
with boxes of the whole tensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bridge.checkpoint import digests, schema, stored_parts, tagged_json
from bridge.checkpoint.files import File
from bridge.checkpoint.folder_lock import LATEST
from bridge.checkpoint.hub import (
    Hub,
    Model,
    Origin,
    Parameter,
    ParameterGroup,
    Scale,
    Where,
    loss_finding,
    tuples_to_lists,
    weights_of,
)
from bridge.checkpoint.interface import Format, PlannedFiles, Wanted, pointer_target
from bridge.checkpoint.lazy import Boxed, Held, Lazy, Placed
from bridge.checkpoint.safetensors_file import file_of as safetensors, read_header
from bridge.checkpoint.schema import FORMAT, STATE, State
from bridge.errors import SourceError
from bridge.files.shown import show_value
from bridge.stack.findings import Finding
from bridge.stack.rules import Effect

WEIGHTS, BUFFERS, GENERATORS = "weights", "buffers", "generators"
RANDOM = "random"
SEED = 1234
"""The seed of the new random states that are written if the source checkpoint has none."""


def file_of(rank: int) -> str:
    """Return the name of the file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


@dataclass(frozen=True)
class Checkpoint:
    """A native checkpoint of which only the small files have been read: `state` from state.json,
    and the digests from SHA256SUMS.
    """

    folder: Path
    root: Path
    state: State
    digests: Mapping[str, str]

    @classmethod
    def open(cls, folder: Path, root: Path) -> Checkpoint:
        """Read the small files of the checkpoint in `folder`. Raises `SourceError` if they are
        damaged or of another release, or if a link leads out of `root`.
        """
        state = schema.read_state(folder, root)
        if state.format != FORMAT:
            raise SourceError(
                f"{folder / STATE}: found format {state.format}, expected {FORMAT}; load this checkpoint with the release"
                " that wrote it"
            )
        sums = digests.read_digests(folder, root)
        names = {STATE, *map(file_of, range(state.world))}
        if set(sums) != names:
            name = min(set(sums) ^ names)
            what = "found no line for" if name in names else "found a line for"
            raise SourceError(
                f"{folder / digests.SUMS}: {what} {show_value(name)} in a checkpoint of {state.world} ranks; the"
                " checkpoint is damaged"
            )
        return cls(folder, root, state, sums)

    def verify(self, share: int = 0, shares: int = 1) -> None:
        """Compare state.json and some of the files with their digests. These are the file of rank
        `share`, and every `shares`-th file after it. Raises a `SourceError` that names each file
        that has changed.
        """
        # Every rank of a run that loads takes its own share, so that together they read each file
        # once.
        names = [STATE, *(file_of(rank) for rank in range(share, self.state.world, shares))]
        digests.verify_digests(self.folder, self.root, names, self.digests)

    def tensors(self) -> dict[str, Sequence[stored_parts.Stored]]:
        """Return the stored parts of every tensor by the tensor's name. Raises `SourceError`
        unless the files have exactly the tensors that state.json lists, and each element once.
        """
        parts: dict[str, list[stored_parts.Stored]] = {name: [] for name in self.state.tensors}
        for rank in range(self.state.world):
            path = self.folder / file_of(rank)
            for part in stored_parts.read_parts(path, self.root):
                if part.name not in parts:
                    raise SourceError(
                        f"{path}: found the tensor {show_value(part.name)}, which"
                        f" {STATE} does not list; the checkpoint is damaged"
                    )
                parts[part.name].append(part)
        problems = (
            stored_parts.check_cover(name, self.state.tensors[name], own_parts)
            for name, own_parts in parts.items()
        )
        SourceError.raise_if(
            f"{self.folder}: {problem}; the checkpoint is damaged"
            for problem in problems
            if problem
        )
        return dict(parts)


class Native(Format):
    """The format of the native engine's checkpoints."""

    takes = frozenset()  # one copy of each weight, in its full precision
    name = "native"
    title = "the native engine"

    def find(self, folder: Path) -> Path | None:
        """Return `folder`, or the folder in it that the file `latest` names; None if that is no
        checkpoint of this format.
        """
        place = pointer_target(folder, LATEST)
        return place if place is not None and (place / STATE).is_file() else None

    def read(self, place: Path) -> Hub:
        """Return the checkpoint. In the files, tensors are called `weights/NAME`, `MOMENT/NAME`,
        `buffers/COPY/NAME`, `generators/RANK` and `generators/RANK/device`.
        """
        checkpoint = Checkpoint.open(place, place)
        checkpoint.tensors()  # raises `SourceError` for parts that are missing or overlap
        state, tensors = checkpoint.state, _checkpoint_tensors(checkpoint)
        kinds = [
            kind
            for kind in dict.fromkeys(name.split("/")[0] for name in tensors)
            if kind not in (BUFFERS, GENERATORS)
        ]
        parameters = {
            name.partition("/")[2]: _build_parameter(name.partition("/")[2], tensors, kinds, state)
            for name in tensors
            if name.startswith(f"{WEIGHTS}/")
        }
        files = (place / STATE, *(place / file_of(rank) for rank in range(state.world)))
        model = _carry_value(state, "model", None)
        hub = Hub(
            Origin(self.name, layout={"ranks": state.world}, files=files),
            parameters,
            {
                name.split("/", 2)[2]: tensor
                for name, tensor in tensors.items()
                if name.startswith(f"{BUFFERS}/0/")
            },
            {str(name): str(of) for name, of in _carry_value(state, "ties", {}).items()},
            ordered=bool(_carry_value(state, "ordered", True)),
            groups=tuple(
                ParameterGroup(tuple(row["names"]), row["settings"])
                for row in _carry_value(state, "groups", [])
            ),
            where=Where(**_where_fields(state)),
            schedule=_carry_value(state, "schedule", None),
            scale=_loss_scale(state),
            random=_generator_states(state, tensors),
            client=tagged_json.decode_value(state.client),
            config=_carry_value(state, "config", None),
            model=None
            if model is None
            else Model(**{**model, "refused": tuple(model.get("refused") or ())}),
            findings=tuple(_find_other_copies(state)),
        )
        return _adopt_own_state(hub)

    def plan(self, hub: Hub, target: Wanted) -> PlannedFiles:
        """Return the files that one rank would write. The engine can load them with any layout of
        ranks.
        """
        tag = f"step{hub.where.steps or 0}"
        tensors = dict(_tensors_by_file_name(hub))
        text = json.dumps(
            _state_to_write(hub, {name: tensor.shape for name, tensor in tensors.items()}), indent=1
        )
        schema.parse_state(text, Path(STATE))
        tensors_by_key = {
            f"{name}@{','.join('0' for _ in tensor.shape)}": tensor
            for name, tensor in tensors.items()
        }
        files = (
            safetensors(f"{tag}/{file_of(0)}", tensors_by_key),
            File(f"{tag}/{STATE}", (text.encode(),)),
            File(LATEST, (tag.encode(),)),
        )
        return PlannedFiles(files, f"{tag}/{digests.SUMS}", tuple(_find_missing_values(hub)))


CLIENT = "client_state"
"""Key of the script's own state within the client state that drop-in engines save."""


def _adopt_own_state(hub: Hub) -> Hub:
    """Return the checkpoint with its schedule, groups and script state in their own fields.
    Drop-in engines save all three together as client state.
    """
    states = [
        value
        for key, value in hub.client.items()
        if key != CLIENT and isinstance(value, Mapping) and "groups" in value
    ]
    if CLIENT not in hub.client or len(states) != 1:
        return hub
    settings, names = states[0]["groups"] or [], states[0].get("names")
    # A single group needs no names: it has every trained parameter.
    if names is None and len(settings) == 1:
        names = [list(hub.trainable_parameters)]
    rows = zip(names or (), settings, strict=True) if names else ()
    groups = tuple(ParameterGroup(tuple(row), tuples_to_lists(values)) for row, values in rows)
    return replace(
        hub,
        groups=hub.groups or groups,
        schedule=states[0].get("lr_scheduler"),
        client=hub.client[CLIENT],
    )


def _checkpoint_tensors(checkpoint: Checkpoint) -> dict[str, Lazy]:
    """Return the lazy tensors of a checkpoint by name. The caller must have checked the stored
    parts.
    """
    parts: dict[str, list[Placed]] = {name: [] for name in checkpoint.state.tensors}
    for rank in range(checkpoint.state.world):
        path = checkpoint.folder / file_of(rank)
        for key, span in read_header(path, checkpoint.root).items():
            name, place = stored_parts.place_of(key, span.shape, path)
            parts[name].append(Placed(place, span))
    return {
        name: Boxed(boxes, checkpoint.state.tensors[name], boxes[0].source.dtype)
        for name, boxes in parts.items()
        if boxes
    }


def _build_parameter(
    name: str, tensors: Mapping[str, Lazy], kinds: Sequence[str], state: State
) -> Parameter:
    moments = {
        kind: tensors[f"{kind}/{name}"]
        for kind in kinds
        if kind != WEIGHTS and f"{kind}/{name}" in tensors
    }
    exact, dtype = tensors[f"{WEIGHTS}/{name}"], _carry_value(state, "formats", {}).get(name)
    weight = weights_of(exact, dtype)
    is_trainable = name not in _carry_value(state, "frozen", [])
    seen = state.progress.steps - state.ahead - state.missed.get(name, 0)
    step = float(seen) if moments else None
    return Parameter(weight, exact if weight is not exact else None, moments, step, is_trainable)


def _carry_value(state: State, name: str, default: Any) -> Any:
    return tagged_json.decode_value(state.carried.get(name, default))


def _where_fields(state: State) -> dict[str, Any]:
    """Return the known fields of `Where` by name. If the checkpoint was translated from another
    format, fields that were not known there are left out.
    """
    # state.json has no empty figures: nan, and the list of names in `unsaid`, stand for those that
    # the source did not have.
    fields = {**state.progress.model_dump(), "seed": state.seed}
    unknown = {
        *_carry_value(state, "unsaid", []),
        *(name for name, value in fields.items() if isinstance(value, float) and math.isnan(value)),
    }
    return {name: value for name, value in fields.items() if name not in unknown}


def _generator_states(state: State, tensors: Mapping[str, Lazy]) -> dict[str, Lazy]:
    """Return the states of the random generators by rank, without those of devices, which only the
    engine's own checkpoints have. The result is empty if the checkpoint was
    translated from one without random states, because the states in the file are then new ones.
    """
    if RANDOM in _carry_value(state, "unsaid", []):
        return {}
    return {
        name.partition("/")[2]: tensor
        for name, tensor in tensors.items()
        if name.startswith(f"{GENERATORS}/") and name.count("/") == 1
    }


def _loss_scale(state: State) -> Scale | None:
    scaler = state.scaler
    if "scale" in state.carried:
        return Scale(
            **{
                **_carry_value(state, "scale", {}),
                "value": scaler.scale,
                "good": scaler.good,
                "tolerated": scaler.tolerated,
            }
        )
    if scaler.window is None and scaler.scale == 1.0:
        return None
    dynamic = scaler.window is not None
    return Scale(
        scaler.scale,
        dynamic,
        2.0,
        scaler.window,
        scaler.minimum,
        scaler.hysteresis,
        scaler.tolerated,
        scaler.good,
    )


def _find_other_copies(state: State) -> Iterator[Finding]:
    """Yield a finding if ranks saved different buffers, because only those of the first rank are
    read.
    """
    copies = {name.split("/")[1] for name in state.tensors if name.startswith(f"{BUFFERS}/")}
    if len(copies) > 1:
        message = f"{len(copies)} ranks have different buffers; the buffers of the first rank are used for all ranks"
        yield loss_finding(BUFFERS, message, Effect.NUMBERS)


def _tensors_by_file_name(hub: Hub) -> Iterator[tuple[str, Lazy]]:
    """Yield every tensor with the name that it has in the files of a native checkpoint."""
    for name, entry in hub.parameters.items():
        yield f"{WEIGHTS}/{name}", entry.best
        yield from ((f"{kind}/{name}", moment) for kind, moment in entry.moments.items())
    yield from ((f"{BUFFERS}/0/{name}", entry) for name, entry in hub.buffers.items())
    random = hub.random.get("0")
    if random is None:
        import torch

        # The engine loads a generator in any case. Without one in the source it is a new one at the
        # run's seed.
        seed = SEED if hub.where.seed is None else hub.where.seed
        random = Held(torch.Generator().manual_seed(seed).get_state())
    yield f"{GENERATORS}/0", random


def _state_to_write(hub: Hub, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    where, scale = hub.where, hub.scale
    return {
        "format": FORMAT,
        "world": 1,
        "seed": SEED if where.seed is None else where.seed,
        "progress": {
            **{name: getattr(where, name) or 0 for name in ("steps", "skipped", "samples")},
            **{
                name: math.nan if (value := getattr(where, name)) is None else value
                for name in ("loss", "grad_norm")
            },
            "lr": where.lr or 0.0,
        },
        "scaler": {
            "scale": float(scale.value) if scale else 1.0,
            "window": scale.window if scale and scale.dynamic else None,
            "hysteresis": (scale and scale.hysteresis) or 1,
            "minimum": float((scale and scale.minimum) or 1.0),
            "good": (scale and scale.good) or 0,
            "tolerated": (scale and scale.tolerated) or 0,
        },
        "client": tagged_json.encode_value(hub.client),
        "copies": (1, 1),
        "tensors": {name: list(shape) for name, shape in shapes.items()},
        "carried": {
            key: tagged_json.encode_value(value)
            for key, value in _values_of_other_engines(hub).items()
            if value
        },
    }


def _values_of_other_engines(hub: Hub) -> dict[str, Any]:
    """Return values that the native engine does not use. They are written so that a move to
    another format can restore them.
    """
    formats = {
        name: parameter.weight.dtype
        for name, parameter in hub.parameters.items()
        if parameter.weight.dtype != parameter.best.dtype
    }
    return {
        "formats": formats,
        "frozen": [name for name, parameter in hub.parameters.items() if not parameter.trained],
        "groups": [
            {"names": list(group.names), "settings": dict(group.settings)} for group in hub.groups
        ],
        "schedule": hub.schedule,
        "ordered": hub.ordered,
        "scale": asdict(hub.scale) if hub.scale else None,
        "config": hub.config,
        "ties": dict(hub.ties),
        "model": asdict(hub.model) if hub.model else None,
        "unsaid": [
            name
            for name, value in {**asdict(hub.where), RANDOM: hub.random or None}.items()
            if value is None
        ],
    }


def _find_missing_values(hub: Hub) -> Iterator[Finding]:
    """Yield a finding for each value that the native engine needs and that the source checkpoint
    lacks. Yield another one if the moments have seen more or fewer updates than the run has made.
    """
    if "0" not in hub.random:
        message = (
            "the source checkpoint has no random states; new ones are written, which begin at seed "
            f"{SEED}"
        )
        yield loss_finding(RANDOM, message, Effect.NONE)
    if hub.lacks_moments:
        yield loss_finding(
            "moments",
            "the source checkpoint has no moments; load the new checkpoint with load_optimizer_states=False",
            Effect.NUMBERS,
        )
    if hub.where.steps is None:
        yield loss_finding(
            "step",
            "the source checkpoint has no number of steps; the run begins at step 0",
            Effect.NUMBERS,
        )
    steps = {
        parameter.step
        for parameter in hub.parameters.values()
        if parameter.step is not None and parameter.moments
    }
    if len(steps) > 1 or (steps and steps != {float(hub.where.steps or 0)}):
        message = (
            f"the moments have seen {', '.join(f'{step:g}' for step in sorted(steps))} updates, but the run has made "
            f"{hub.where.steps}; the engine uses the run's number for all moments"
        )
        yield loss_finding("step", message, Effect.NUMBERS)
