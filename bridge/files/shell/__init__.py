"""Shell scripts as data.

A script is parsed and never run; the result is the training runs that it starts, with the line of
every word.
"""

from __future__ import annotations

from bridge.files.shell.edit import edit
from bridge.files.shell.pieces import Pieces, cut, line_of, spell_pieces, text_if_known, unknowns
from bridge.files.shell.script import Launch, Script, load_script

__all__ = [
    "Launch",
    "Pieces",
    "Script",
    "cut",
    "edit",
    "line_of",
    "load_script",
    "spell_pieces",
    "text_if_known",
    "unknowns",
]
