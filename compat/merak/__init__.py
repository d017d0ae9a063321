"""The Merak dialect: command lines and keyword mappings of Merak 0.1.0 to 2.2.2 and its main
branch, with the settings of the training script.
"""

from __future__ import annotations

from typing import Any

from compat.merak.entries import entry, listen

ENTRIES = {
    "init": "launch",
    "print_rank_0": "launch",
    "init_empty_weights": "launch",
    "set_tp_layer_lists": "launch",
    "MerakArguments": "arguments",
    "MerakTrainer": "trainer",
}
"""Names of Merak that the native engine implements, each with its module. `import compat.merak as
Merak` migrates a script.
"""


def __getattr__(name: str) -> Any:
    """Return one of Merak's names. The engine is loaded when a script first uses such a name."""
    return entry(__name__, ENTRIES, name)


listen()
