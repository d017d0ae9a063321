"""Traces the Trainer of transformers: a callback that attaches the tracer when model and optimizer
are prepared.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from bridge.errors import BridgeError
from bridge.plan.plan import Debug
from bridge.trace import attach
from bridge.trace.findings import TraceFinding
from bridge.trace.tracer import Tracer


class TraceCallback(TrainerCallback):
    """Callback that traces and checks a training: `Trainer(..., callbacks=[TraceCallback()])`.

    It logs the tensors that `debug` selects to the folder `run` (default: `trace` in the Trainer's
    output folder), and checks the invariants of training. At the end of the run, `found` contains
    the findings. `options` are passed to `bridge.trace.attach`. Raises `BridgeError` with
    DeepSpeed, because the Trainer does not give access to DeepSpeed's engine.
    """

    def __init__(
        self, debug: Debug | None = None, run: str | Path | None = None, **options: Any
    ) -> None:
        self.debug, self.run, self.options = debug, run, options
        self.tracer: Tracer | None = None
        self.found: list[TraceFinding] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Attach."""
        if getattr(args, "deepspeed", None):
            raise BridgeError(
                "attach: the Trainer hides DeepSpeed's engine; call bridge.trace.attach(trainer.deepspeed, ...)"
            )
        run = self.run or Path(args.output_dir) / "trace"
        defaults: Mapping[str, Any] = {
            "optimizer": more["optimizer"],
            "accumulation": args.gradient_accumulation_steps,
        }
        self.tracer = attach(
            more["model"], self.debug, run, done=state.global_step, **{**defaults, **self.options}
        )

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Take the hooks out."""
        if self.tracer is not None:
            self.found = self.tracer.findings.found
            self.tracer.remove()
