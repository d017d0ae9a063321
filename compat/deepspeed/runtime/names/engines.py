"""`deepspeed.runtime.engine` and `deepspeed.runtime.pipe.engine`: one engine class under the names
of both modules.
"""

from __future__ import annotations

from compat.deepspeed.runtime.engine import DeepSpeedEngine, PipelineEngine

__all__ = ["DeepSpeedEngine", "PipelineEngine"]
