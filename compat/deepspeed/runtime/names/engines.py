"""`deepspeed.runtime.engine` and `deepspeed.runtime.pipe.engine`: one engine for both."""

from __future__ import annotations

from compat.deepspeed.runtime.engine import DeepSpeedEngine, PipelineEngine

__all__ = ["DeepSpeedEngine", "PipelineEngine"]
