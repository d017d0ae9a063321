"""Files as data: JSON, HJSON, YAML, flags and shell scripts with the line of every value; files written whole or not at all."""

from __future__ import annotations

from bridge.files.document import Document, Duplicate, Key, check_nested, key_with_dots
from bridge.files.entries import edit_entries
from bridge.files.json import load_hjson, load_json, load_json_or_hjson
from bridge.files.named import (
    OutsideError,
    existing_path,
    find,
    folder_of,
    own,
    path_of_name,
    reaching,
    writable,
)
from bridge.files.original import Original
from bridge.files.python import (
    Call,
    find_calls,
    find_defaults,
    find_imports,
    find_variables,
    load_call,
)
from bridge.files.read import is_text, load, parse, read_stream, read_text
from bridge.files.words import load_words
from bridge.files.write import as_private_as, obstacles, write_all, write_text
from bridge.files.yaml import load_yaml, scalar, spell_yaml
from bridge.shell.script import Launch, Script, load_script

__all__ = [
    "Call",
    "Document",
    "Duplicate",
    "Key",
    "Launch",
    "Original",
    "OutsideError",
    "Script",
    "as_private_as",
    "check_nested",
    "edit_entries",
    "existing_path",
    "find",
    "find_calls",
    "find_defaults",
    "find_imports",
    "find_variables",
    "folder_of",
    "is_text",
    "key_with_dots",
    "load",
    "load_call",
    "load_hjson",
    "load_json",
    "load_json_or_hjson",
    "load_script",
    "load_words",
    "load_yaml",
    "obstacles",
    "own",
    "parse",
    "path_of_name",
    "reaching",
    "read_stream",
    "read_text",
    "scalar",
    "spell_yaml",
    "writable",
    "write_all",
    "write_text",
]
