"""Text to train on: a few sonnets of Shakespeare's, in the public domain."""

from __future__ import annotations

from importlib.resources import files


def sonnets() -> bytes:
    """The bundled text."""
    return files(__name__).joinpath("sonnets.txt").read_bytes()
