"""Agreement: before the first collective, ranks compare the facts with which they were started,
such as versions, the plan and the model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bridge import __version__
from bridge.engine import comm
from bridge.engine.optimizer import ParameterGroupSettings
from bridge.errors import ConfigError
from bridge.plan.plan import Plan

Facts = Mapping[str, str]
"""Facts with which a rank was started. Names and values are text."""
ALIKE = "start all ranks with the same file, script and packages"


def facts_of(
    arguments: Mapping[str, Any],
    plan: Plan,
    model: nn.Module,
    groups: Sequence[ParameterGroupSettings],
) -> Facts:
    """Return the facts that must be equal on all ranks, as text by name: releases,
    `arguments`, the plan, groups of parameters, and names and shapes of the model.
    """
    values: dict[str, Any] = {
        "stagebridge": __version__,
        "torch": torch.__version__,
        **arguments,
        **plan.values(),
    }
    # Each machine may have a copy of the table under another path, so its content is compared.
    table = Path(plan.schedule.csv or "")
    if table.is_file():
        values["schedule.csv"] = f"a CSV file with SHA-256 {sha256(table.read_bytes()).hexdigest()}"
    for number, group in enumerate(groups):
        own = {name: value for name, value in group.settings.items() if name != "params"}
        settings = own if group.rate == 1.0 else {**own, "rate": group.rate}
        values[f"optimizer group {number}"] = f"{len(group.names)} parameters, {settings}"
    for name, weight in model.named_parameters():
        values[f"parameter {name}"] = _form(weight) + ("" if weight.requires_grad else ", frozen")
    values |= {f"buffer {name}": _form(buffer) for name, buffer in model.named_buffers()}
    return {name: str(value) for name, value in values.items()}


def agree(facts: Facts) -> None:
    """Compare the `facts` of all ranks. If some ranks have other facts than rank 0, raise a
    `ConfigError` on every rank, with the first fact that differs.
    """
    board = comm.board()
    if board is None:
        return
    # Facts name every parameter, so that they are long. Ranks post a digest; the facts themselves
    # follow only if digests differ.
    digest = sha256(json.dumps(facts).encode()).hexdigest()
    board.post(f"start {board.rank}", digest)
    if board.rank == 0:
        digests = ((rank, board.read(f"start {rank}", rank)) for rank in range(board.world))
        board.post("odd one", str(next((rank for rank, theirs in digests if theirs != digest), 0)))
    odd = int(board.read("odd one", 0))
    if not odd:  # rank 0 is compared with itself, so 0 means that there is none
        return
    if board.rank in (0, odd):
        board.post(f"facts {board.rank}", json.dumps(facts))
    first, other = (json.loads(board.read(f"facts {rank}", rank)) for rank in (0, odd))
    board.meet("told", 5.0)
    # In the order of the longer list, a setting that one rank alone has is named before whatever
    # differs because of it.
    longer, shorter = (first, other) if len(first) >= len(other) else (other, first)
    name = next(name for name in (*longer, *shorter) if first.get(name) != other.get(name))
    raise ConfigError(
        f"{name}: rank 0 has {first.get(name, 'none')}, rank {odd} has {other.get(name, 'none')}; {ALIKE}"
    )


def _form(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
