"""Reads the facts of a Merak release from the text of its source: its own arguments, and the parameters of its functions.

Arguments that `MerakArguments` inherits from transformers are in `releases/inherited.json`, which is written by hand.
"""

from __future__ import annotations

from collections.abc import Mapping

from tests.harvesting.code import fields_of_class
from tests.harvesting.rows import Facts, Row
from tests.harvesting.source import Package, Tree

PACKAGE = Package("merak", "Merak", "../setup.py")
TABLES: Mapping[str, tuple[str, ...]] = {"arguments.json": ("name",)}
"""Files of facts, with the columns that identify a row."""
DECLARED: Mapping[str, str] = {
    "args": "MerakArguments",
    "init": "init",
    "tp_lists": "set_tp_layer_lists",
}
"""The class or function of each section of a config."""


def facts(tree: Tree) -> Facts:
    """Return the rows of facts about the release. Nothing of it is imported."""
    files = sorted(tree.folder.rglob("*.py"))
    rows = [
        {**row, "name": f"{section}.{row['name']}"}
        for section, name in DECLARED.items()
        for file in files
        for row in fields_of_class(file, name)
    ]
    return Facts({"arguments.json": rows})


def path_of(file: str, row: Row) -> str:
    """Return the path of the setting that a row describes."""
    return str(row["name"])
