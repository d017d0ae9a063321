"""`deepspeed.DeepSpeedConfig`: an object with the settings of a config, under the attribute names
of DeepSpeed's own object.
"""

from __future__ import annotations

from typing import Any

from bridge.engine import comm
from bridge.errors import BridgeError
from compat.deepspeed.dialect import DIALECT

__all__ = ["DeepSpeedConfig"]
NAMES = {
    "train_batch_size": "train_batch_size",
    "train_micro_batch_size_per_gpu": "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "steps_per_print": "steps_per_print",
    "gradient_clipping": "gradient_clipping",
    "prescale_gradients": "prescale_gradients",
    "gradient_predivide_factor": "gradient_predivide_factor",
    "zero_optimization_stage": "zero_optimization.stage",
    "optimizer_name": "optimizer.type",
    "scheduler_name": "scheduler.type",
    "zero_allow_untested_optimizer": "zero_allow_untested_optimizer",
    "dataloader_drop_last": "dataloader_drop_last",
}
"""Maps each attribute of DeepSpeed's object to the config key that the attribute holds."""
LOWER = ("optimizer_name",)


class DeepSpeedConfig:
    """A config, read for this run's number of ranks. Asking for an attribute that the class does
    not have raises `BridgeError`.
    """

    def __init__(self, config: Any, mpu: Any = None, mesh_device: Any = None) -> None:
        self.global_rank, self.world_size = comm.rank_and_world() or (0, 1)
        read = DIALECT.read(config, None, self.world_size)
        self._param_dict, self._values = read.ds_config, read.effective  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> Any:
        """Return the setting that DeepSpeed's own object has under this attribute name."""
        if name.startswith("_"):
            raise AttributeError(name)
        if name in NAMES:
            value = self._values.get(NAMES[name])
            return value.lower() if name in LOWER and value else value
        if name == "zero_enabled":
            return bool(self.zero_optimization_stage)
        sections = {"optimizer_params": "optimizer", "scheduler_params": "scheduler"}
        if name in sections:
            return (self._param_dict.get(sections[name]) or {}).get("params")
        raise BridgeError(
            f"DeepSpeedConfig.{name}: the native engine does not have this attribute; use one of"
            f" {', '.join([*NAMES, *sections, 'zero_enabled'])}"
        )
