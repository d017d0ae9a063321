"""Runs at the start of each Python process under `stagebridge trace run`, and then runs the
`sitecustomize` that it replaces, if there is one.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))


def others() -> None:
    """Run the `sitecustomize` of the user's environment, which this module hides."""
    rest = [place for place in sys.path if os.path.abspath(place or ".") != HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", rest)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


others()
if "STAGEBRIDGE_TRACE" in os.environ:
    from bridge.trace.injected import install

    install()
