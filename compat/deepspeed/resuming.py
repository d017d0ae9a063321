"""How runs of DeepSpeed save checkpoints and resume from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from bridge.errors import BridgeError
from bridge.stack.checkpoint_side import CheckpointSide, Saves
from bridge.stack.dialect import Config, Written
from bridge.stack.launch_command import torchrun
from compat.deepspeed.schedule import steers

if TYPE_CHECKING:
    from bridge.checkpoint.hub import Hub

PARTS = ("tensor_parallel", "pipeline_stages", "context_parallel", "expert_parallel")
"""The settings of the training script that set the sizes of the mesh axes."""
SCRIPT = "train.py"
HALVES = {"bf16": "BF16", "fp16": "F16"}
"""The name of each 16-bit format in safetensors files, by the config section that switches the
format on.
"""


def _scheduler_state(config: Config, hub: Hub) -> Mapping[str, Any] | None:
    """Return the state of torch's LambdaLR after the number of optimizer steps in `hub`, if the
    script builds a LambdaLR.

    Return an empty mapping if the script builds no scheduler, and None to keep the scheduler state
    of the source checkpoint.
    """
    steps = hub.where.steps
    if steers(config.given):
        # LambdaLR steps once when it is built, so its count of steps is one ahead of the updates.
        return (
            None
            if steps is None
            else {"last_epoch": steps, "_step_count": steps + 1, "lr_lambdas": []}
        )
    if hub.schedule is None and config.given.get("scheduler.type") is None:
        return {}
    return None


class DeepSpeedCheckpoints(CheckpointSide):
    """ZeRO files of its own, or universal ones, for runs whose ranks are all data-parallel."""

    loads: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "deepspeed": {},
        "universal": {"checkpoint.load_universal": True},
    }
    grouping = True
    spared = ("decay_scope=matrices",)
    by_place = True

    def saves(self, config: Config, hub: Hub) -> Saves:
        """Return the checkpoint format to write: ZeRO's own files if the source has optimizer
        groups, else universal files. ZeRO's own files list the parameters of each group.
        """
        values = config.effective
        parts = {name: values.get(f"code.{name}") or 1 for name in PARTS}
        # AutoTP splits tensors too, but by a key of the file rather than by the script.
        parts["autotp_size"] = values.get("tensor_parallel.autotp_size") or 1
        BridgeError.raise_if(
            f"{name}: found {size}, but stagebridge writes DeepSpeed checkpoints only for runs"
            " whose ranks are all data-parallel: set it to 1"
            for name, size in parts.items()
            if size > 1
        )
        level = values.get("zero_optimization.stage") or 0
        if not level:
            raise BridgeError(
                "zero_optimization.stage: found 0, but stagebridge writes DeepSpeed checkpoints"
                " only for stage 1 or more: set the stage to 1, which gives the same numbers"
            )
        dtype = next(
            (code for name, code in HALVES.items() if values.get(f"{name}.enabled")), "F32"
        )
        schedule, settings = _scheduler_state(config, hub), dict(config.ds_config)  # type: ignore[attr-defined]
        if values.get("checkpoint.load_universal") or not hub.groups:
            return Saves("universal", dtype=dtype, schedule=schedule, config=settings)
        return Saves(
            "deepspeed", int(level), config.world_size, dtype, schedule=schedule, config=settings
        )

    def settings_for_groups(self, file: str) -> Mapping[str, Any]:
        """Return the setting that makes the script read parameter groups from the file named
        `file`.
        """
        return {"code.parameter_groups": file}

    def resume_from(self, output: Written, folder: str, groups: str = "") -> Written:
        """Return `output`, changed so that the run continues from the checkpoint in `folder`. If
        `output` has a complete training script, the launch command gets the option `--save`.
        Otherwise the script for the user to complete gets a line that loads the checkpoint.
        """
        if output.beside:
            return replace(output, launch=(*output.launch, "--save", folder))
        # The last bracket on a line of its own closes the call of
        # deepspeed.initialize; loading needs the engine it returns.
        head, close, rest = output.snippet.rpartition("\n)\n")
        return replace(output, snippet=f'{head}{close}engine.load_checkpoint("{folder}")\n{rest}')

    def run_natively(
        self, output: Written, world: int, folder: str, groups: str = "", model: str = ""
    ) -> Written:
        """Return `output` with a script and a launch command that run the native engine: in the
        script the name `deepspeed` means `compat.deepspeed`.
        """
        snippet = output.snippet.replace(
            "import deepspeed\n", "import compat.deepspeed as deepspeed\n"
        )
        launch = tuple(torchrun(world, SCRIPT, "--deepspeed_config", output.file))
        return replace(
            self.resume_from(replace(output, snippet=snippet, beside={}), folder), launch=launch
        )


SIDE = DeepSpeedCheckpoints
