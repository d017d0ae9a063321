"""Keeping: settings that limit what a log contains: some steps, some ranks, one copy of equal
tensors, a number of bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import torch

from bridge.engine.comm import Comm
from bridge.errors import BridgeError
from bridge.trace.gather import gather_tensor

if TYPE_CHECKING:
    from bridge.trace.log import Seen

OWNED = ("weight", "gradient", "moment", "buffer")
INSIDE = ("tensor", "pipeline")
"""Names of the axes along which ranks hold different parts of a model."""


@dataclass(frozen=True, slots=True)
class Keep:
    """Limits of a log. The log has only the tensors of steps that are multiples of `every`, and
    only those of `ranks` (empty: all ranks). All ranks together write about `budget` bytes. With
    `once`, a tensor of which several ranks hold equal copies is logged by one rank only.
    """

    every: int = 1
    ranks: tuple[int, ...] = ()
    once: bool = False
    budget: int | None = None

    def __post_init__(self) -> None:
        if (
            self.every < 1
            or (self.budget is not None and self.budget < 1)
            or any(rank < 0 for rank in self.ranks)
        ):
            raise BridgeError(
                f"keep: found {self}, expected numbers of at least 1 for `every` and `budget`, and of at "
                "least 0 for `ranks`"
            )

    def takes(self, step: int, rank: int) -> bool:
        """Return whether `every` and `ranks` select the tensors of this rank in this step; the
        budget does not count.
        """
        return self.fits(step) and (not self.ranks or rank in self.ranks)

    def fits(self, step: int) -> bool:
        """Return whether `every` selects this step."""
        return step % self.every == 0

    def share(self, world: int) -> int | None:
        """Return the number of bytes that each rank may log; None if there is no budget."""
        return None if self.budget is None else max(1, self.budget // (len(self.ranks) or world))

    def about(self) -> dict[str, Any]:
        """Return the settings as an entry for run.json; empty if nothing is limited."""
        return {} if self == Keep() else {"keep": asdict(self) | {"ranks": list(self.ranks)}}


def limit_notes(keep: Mapping[str, Any]) -> list[str]:
    """Return sentences that say to which steps and ranks these settings limit a log. They are
    settings as run.json holds them.
    """
    notes = []
    if keep.get("every", 1) > 1:
        notes.append(f"the log has only one of every {keep['every']} steps")
    if keep.get("ranks"):
        notes.append(f"the log has only rank {', '.join(map(str, keep['ranks']))}")
    return notes


def indices_to_skip(parts: Sequence[Seen], comm: Comm) -> set[int]:
    """Return the indices of the tensors in `parts` that this rank need not log, because an earlier
    rank logs an equal copy. All ranks must call this at the same point of a step.
    """
    axes = tuple(axis for axis in comm.mesh.sizes if axis not in INSIDE)
    group, several = comm.along(axes), {axis for axis in axes if comm.mesh.sizes[axis] > 1}
    if group.size == 1:
        return set()
    alike = []
    for at, part in enumerate(parts):
        name, placement = part.record.name, part.record.placement
        # Engines put wholes together of parts on each rank; their placements name no replicas.
        own = name.tensor.endswith(f"of rank {comm.rank}")
        whole = name.kind in OWNED and placement.complete and not own
        if several <= set(placement.replicas) or whole:
            alike.append(at)
    # A gather takes as much from each rank; and all leave here together, or none.
    sizes = gather_tensor(comm, "log head", torch.tensor([len(alike)]), group).view(-1).tolist()
    if not max(sizes):
        return set()
    digests = torch.zeros(max(sizes), 2, dtype=torch.int64)
    for row, at in enumerate(alike):
        record, tensors = parts[at].record, parts[at].tensors
        subject = repr((record.name, record.microbatch, record.placement))
        values = [parts[at].measured, *(tensors[key] for key in sorted(tensors))]
        raw = (
            value.contiguous().view(-1).view(torch.uint8) for value in values if value is not None
        )
        content = b"".join(bytes(value.cpu().numpy()) for value in raw)
        digests[row] = torch.tensor(
            [_number_of_content(subject.encode()), _number_of_content(content)]
        )
    rows = gather_tensor(comm, "log digests", digests, group).tolist()
    # The first rank that has it keeps it.
    earlier = {tuple(row) for rank in range(group.index) for row in rows[rank][: sizes[rank]]}
    return {at for at, row in zip(alike, rows[group.index], strict=False) if tuple(row) in earlier}


def _number_of_content(content: bytes) -> int:
    return int.from_bytes(blake2b(content, digest_size=8).digest(), "little", signed=True)
