"""DeepSpeed's Adam classes, for scripts that build their own optimizer. The engine reads only the
settings of such an optimizer. If a script itself calls the optimizer's `step`, torch's Adam runs.
"""

from __future__ import annotations

from typing import Any

import torch

from bridge.errors import BridgeError

__all__ = ["DeepSpeedCPUAdam", "FusedAdam"]


class FusedAdam(torch.optim.Adam):
    """Adam. With `adam_w_mode` weight decay is decoupled; without it, decay is added to the
    gradients. Source: deepspeed/ops/adam/fused_adam.py.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        _check(type(self).__name__, bias_correction, amsgrad)
        mode: dict[str, Any] = {"decoupled_weight_decay": adam_w_mode}
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, **mode)


class DeepSpeedCPUAdam(FusedAdam):
    """`FusedAdam` under the name of DeepSpeed's Adam for CPUs. Source:
    deepspeed/ops/adam/cpu_adam.py.
    """

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        if not fp32_optimizer_states:
            raise BridgeError(
                "DeepSpeedCPUAdam: found fp32_optimizer_states=False, but the engine keeps"
                " moments in fp32; leave this argument out"
            )
        super().__init__(
            model_params, lr, bias_correction, betas, eps, adamw_mode, weight_decay, amsgrad
        )


def _check(name: str, bias_correction: bool, amsgrad: bool) -> None:
    if not bias_correction:
        raise BridgeError(
            f"{name}: found bias_correction=False, which the engine does not support; leave it out"
        )
    if amsgrad:
        raise BridgeError(
            f"{name}: found amsgrad=True, which neither DeepSpeed nor the engine supports; leave"
            " it out"
        )
