"""Files as data: JSON, HJSON, YAML, flags and shell scripts with the line of every value; files written whole or not at all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bridge import load_late

if TYPE_CHECKING:
    from bridge.files.document import (
        Document as Document,
        Duplicate as Duplicate,
        Key as Key,
        check_nested as check_nested,
        key_with_dots as key_with_dots,
    )
    from bridge.files.entries import edit_entries as edit_entries
    from bridge.files.json import (
        load_hjson as load_hjson,
        load_json as load_json,
        load_json_or_hjson as load_json_or_hjson,
    )
    from bridge.files.named import (
        OutsideError as OutsideError,
        existing_path as existing_path,
        find as find,
        folder_of as folder_of,
        own as own,
        path_of_name as path_of_name,
        reaching as reaching,
        writable as writable,
    )
    from bridge.files.original import Original as Original
    from bridge.files.python import (
        Call as Call,
        find_calls as find_calls,
        find_defaults as find_defaults,
        find_imports as find_imports,
        find_methods as find_methods,
        find_parsed as find_parsed,
        find_variables as find_variables,
        load_call as load_call,
    )
    from bridge.files.read import (
        LOADERS as LOADERS,
        is_text as is_text,
        load as load,
        parse as parse,
        read_stream as read_stream,
        read_text as read_text,
    )
    from bridge.files.words import load_words as load_words
    from bridge.files.write import (
        as_private_as as as_private_as,
        obstacles as obstacles,
        write_all as write_all,
        write_text as write_text,
    )
    from bridge.files.yaml import load_yaml as load_yaml, scalar as scalar, spell_yaml as spell_yaml
    from bridge.shell.launch import Launch as Launch
    from bridge.shell.script import Script as Script, load_script as load_script

_HOMES = {
    name: module
    for module, names in {
        "files.document": "Document Duplicate Key check_nested key_with_dots",
        "files.entries": "edit_entries",
        "files.json": "load_hjson load_json load_json_or_hjson",
        "files.named": "OutsideError existing_path find folder_of own path_of_name reaching writable",
        "files.original": "Original",
        "files.python": "Call find_calls find_defaults find_imports find_methods find_parsed find_variables load_call",
        "files.read": "LOADERS is_text load parse read_stream read_text",
        "files.words": "load_words",
        "files.write": "as_private_as obstacles write_all write_text",
        "files.yaml": "load_yaml scalar spell_yaml",
        "shell.launch": "Launch",
        "shell.script": "Script load_script",
    }.items()
    for name in names.split()
}
"""The module of each name. A command that reads no file of a format does not load the format's reader."""


def __getattr__(name: str) -> Any:
    """Return the attribute `name` of the package, whose module is loaded at the first use."""
    return load_late("bridge", _HOMES, name)
