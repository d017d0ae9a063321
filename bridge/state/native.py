"""Native checkpoints: state.json, SHA256SUMS, and one safetensors file a rank, whose tensors are boxes of global ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bridge.config import shown
from bridge.errors import SourceError
from bridge.state import digests, parts, schema
from bridge.state.schema import FORMAT, STATE, State


def file_of(rank: int) -> str:
    """The file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose small files are read: `state`, and the digest of each file."""

    folder: Path
    root: Path
    state: State
    digests: Mapping[str, str]

    @classmethod
    def open(cls, folder: Path, root: Path) -> Checkpoint:
        """The checkpoint `folder`, which with all links lies below `root`. Raises `SourceError`."""
        state = schema.read(folder, root)
        if state.format != FORMAT:
            said = f"{folder / STATE}: format {state.format}, expected {FORMAT}"
            raise SourceError(f"{said}; resume it with the release that wrote it, and save it anew with this one")
        found = digests.read(folder, root)
        expected = {STATE, *map(file_of, range(state.world))}
        if set(found) != expected:
            name = min(set(found) ^ expected)
            what = "no line for" if name in expected else "a line too many, for"
            raise SourceError(f"{folder / digests.SUMS}: {what} {shown(name)}, of {state.world} ranks; the checkpoint is damaged")
        return cls(folder, root, state, found)

    def verify(self, share: int = 0, shares: int = 1) -> None:
        """Raises `SourceError` that names the files that changed: state.json, and of the others every one of this share."""
        names = [STATE, *(file_of(rank) for rank in range(share, self.state.world, shares))]
        digests.verify(self.folder, self.root, names, self.digests)

    def tensors(self) -> dict[str, Sequence[parts.Stored]]:
        """Every tensor as its parts. Raises `SourceError` unless these are all that `state` names, each element once."""
        found: dict[str, list[parts.Stored]] = {name: [] for name in self.state.tensors}
        for rank in range(self.state.world):
            path = self.folder / file_of(rank)
            for part in parts.stored(path, self.root):
                if part.name not in found:
                    raise SourceError(f"{path}: {shown(part.name)} is not named in {STATE}; the checkpoint is damaged")
                found[part.name].append(part)
        problems = (parts.whole(name, self.state.tensors[name], saved) for name, saved in found.items())
        SourceError.raise_if(f"{self.folder}: {problem}; the checkpoint is damaged" for problem in problems if problem)
        return dict(found)
