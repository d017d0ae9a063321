"""The schema of state.json, which describes a native checkpoint. The file is checked before any
weight is read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from bridge.errors import SourceError
from bridge.files.contained import read_text
from bridge.files.shown import show_value

FORMAT = 2
STATE = "state.json"
MOST = 2**28

Count = Annotated[int, Field(ge=0, lt=2**63)]
Size = Annotated[int, Field(gt=0, lt=2**63)]
Scale = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Strict(BaseModel):
    """Base of models whose values have exactly the declared types."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Progress(Strict):
    """How far the run has come, and the figures of its last step."""

    steps: Count
    skipped: Count
    samples: Count
    loss: float
    grad_norm: float
    lr: float


class Scaler(Strict):
    """The loss scale, and the values that decide how it changes."""

    scale: Scale
    window: Size | None
    hysteresis: Count
    minimum: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    good: Count
    tolerated: Count


class State(Strict):
    """The content of state.json: everything in a checkpoint except the tensors. `tensors` has the
    shape of each whole tensor; `copies` are the numbers of data and tensor ranks that save
    buffers. `ahead` is the number of updates that the moments have not seen, and `missed` the number
    of those that left out a parameter, by its name. `carried` has values of another format that the
    engine does not use, so that a move back can restore them.
    """

    format: int
    world: Annotated[int, Field(ge=1, le=2**20)]
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)]
    progress: Progress
    scaler: Scaler
    client: dict[str, JsonValue]
    copies: tuple[Size, Size] = (1, 1)
    ahead: int = 0
    missed: dict[str, Count] = {}
    tensors: dict[str, tuple[Count, ...]] = {}
    carried: dict[str, JsonValue] = {}


def read_state(folder: Path, root: Path) -> State:
    """Return the content of state.json in `folder`. Raises a `SourceError` with a line for each
    invalid value.
    """
    path = folder / STATE
    return parse_state(read_text(path, root, MOST), path)


def parse_state(text: str, path: Path) -> State:
    """Return the state that `text`, the content of the file `path`, describes. Raises a
    `SourceError` with a line for each invalid value.
    """
    try:
        state = json.loads(text, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{path}: expected JSON ({error}); the checkpoint is damaged") from None
    if not isinstance(state, dict):
        raise SourceError(
            f"{path}: found {show_value(state, 30)}, expected an object; the checkpoint is damaged"
        )
    if state.get("format") not in (1, FORMAT):
        version = show_value(state.get("format"))
        raise SourceError(
            f"{path}: format: found {version}, expected {FORMAT}; load it with the release that wrote it"
        )
    # Once more from the text: `strict` takes a JSON list as a tuple only if pydantic reads the JSON
    # itself.
    try:
        return State.model_validate_json(text)
    except ValidationError as error:
        raise SourceError(
            *(_problem_line(path, problem) for problem in error.errors(include_url=False)[:5])
        ) from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        raise ValueError("a key is given twice")
    return mapping


def _problem_line(path: Path, problem: Any) -> str:
    place = ".".join(map(str, problem["loc"])) or "the whole"
    if problem["type"] == "missing":
        return f"{path}: {place}: found no value, expected one; the checkpoint is damaged"
    return f"{path}: {place}: found {show_value(problem['input'], 40)}; {problem['msg'].lower()}; the checkpoint is damaged"
