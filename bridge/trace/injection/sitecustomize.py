"""Start file that Python runs in each process under `stagebridge trace run`. It hides a
`sitecustomize` of the user's environment, and so runs that one as well.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))


def others() -> None:
    """Run the `sitecustomize` of the user's environment, which this file hides, if there is one."""
    rest = [place for place in sys.path if os.path.abspath(place or ".") != HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", rest)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


others()
if "STAGEBRIDGE_TRACE" in os.environ:
    from bridge.trace.injected_watch import install_watch

    install_watch()
