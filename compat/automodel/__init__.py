"""The NeMo AutoModel dialect: recipes of AutoModel 0.1.0 to 0.7.0, and AutoModel's split of layers
into pipeline stages.
"""

from __future__ import annotations

from typing import Any

from bridge.stack.drop_in import Entries

ENTRIES = {"AutoPipeline": "pipelines", "PipelineConfig": "pipelines", "PipelineInfo": "pipelines"}
"""Names of AutoModel that the native engine implements, each with its module. A script migrates by
importing them from here: `from compat.automodel import AutoPipeline`.
"""


def __getattr__(name: str) -> Any:
    """Load the engine when a script first uses one of its names, so that reading recipes needs no
    torch.
    """
    return Entries("AutoModel", "compat.automodel.runtime").load(__name__, ENTRIES, name)
