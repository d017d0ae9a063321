"""Data: samples of a text. A sample depends only on its index, so the data of a step depends only
on the number of samples that earlier steps consumed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bridge.engine.randomness import seed_of
from bridge.engine.text import sonnets
from bridge.errors import SourceError

BYTES = 256
"""Vocabulary of byte-level text."""


@dataclass(frozen=True)
class Text:
    """Samples of `sequence` tokens from a text; a token is a byte. The position of a sample in the
    text follows from the index of the sample and from `seed`.
    """

    content: Tensor
    sequence: int
    seed: int = 1234

    @classmethod
    def of(cls, path: Path | None, sequence: int, seed: int = 1234) -> Text:
        """Return samples of the file at `path`, or of the bundled text. Raises `SourceError` if the
        text is too short.
        """
        content = _read(path) if path else sonnets()
        if len(content) <= sequence:
            raise SourceError(
                f"{path or 'bundled text'}: found {len(content)} bytes, expected more than {sequence}, the tokens of a sequence;"
                " give a longer text, or shorten model.sequence"
            )
        return cls(torch.frombuffer(bytearray(content), dtype=torch.uint8), sequence, seed)

    def sample(self, number: int) -> Tensor:
        """Return the tokens (`sequence` + 1,) of sample `number`, int64."""
        # The last start leaves room for `sequence` + 1 bytes. Each input has a target, so there is
        # one byte more than inputs.
        start = seed_of(self.seed, "sample", number) % (len(self.content) - self.sequence)
        return self.content[start : start + self.sequence + 1].long()


@dataclass(frozen=True)
class Drawn:
    """Samples of random tokens, each of `vocab` tokens with equal probability. The tokens of a
    sample follow from the index of the sample and from `seed`.
    """

    vocab: int
    sequence: int
    seed: int = 1234

    def sample(self, number: int) -> Tensor:
        """Return the tokens (`sequence` + 1,) of sample `number`, int64."""
        generator = torch.Generator().manual_seed(seed_of(self.seed, "sample", number))
        return torch.randint(0, self.vocab, (self.sequence + 1,), generator=generator)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror}; give a file of text") from None
