"""Shell scripts as data.

A script is parsed and never run; the result is the training runs that it starts, with the line of
every word.
"""

from __future__ import annotations

# First, since reading a file may mean reading a script: either package can be imported first.
import bridge.files  # noqa: F401
from bridge.shell.edit import edit
from bridge.shell.launch import Launch
from bridge.shell.script import Script, load_script
from bridge.shell.word_pieces import Pieces, cut, line_of, spell_pieces, text_if_known, unknowns

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
