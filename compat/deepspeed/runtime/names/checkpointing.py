"""`deepspeed.checkpointing`: recomputes activations in backward, and has random generators with
names. Source: deepspeed/runtime/activation_checkpointing/checkpointing.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import checkpoint as again

from bridge.errors import BridgeError
from compat.deepspeed.runtime.names.accelerator import get_accelerator
from compat.deepspeed.runtime.names.utilities import logger

__all__ = [
    "CudaRNGStatesTracker", "checkpoint", "configure", "get_cuda_rng_tracker", "is_configured", "model_parallel_cuda_manual_seed",
    "model_parallel_reconfigure_tp_seed", "non_reentrant_checkpoint", "partition_activations_in_checkpoint", "reset",
    "set_num_layers",
]  # fmt: skip
TENSOR_SEED, OFFSET = "model-parallel-rng", 2718
KEPT = ("partition_activations", "contiguous_checkpointing", "checkpoint_in_cpu")
"""Settings of DeepSpeed that choose where saved activations stay until backward."""
_state: dict[str, Any] = {"configured": False, "mpu": None}


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run `function` and return its result without saving activations. In backward, `function` runs
    again with the same random numbers.
    """
    result = again(function, *args, use_reentrant=False, **kwargs)
    return result[0] if isinstance(result, tuple) and len(result) == 1 else result


non_reentrant_checkpoint = checkpoint


def configure(
    mpu_: Any = None,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Record that a script has configured checkpointing. Settings that choose where saved
    activations stay have no effect, and each of them gives a warning. They change no numbers.
    """
    switches = dict(
        zip(KEPT, (partition_activations, contiguous_checkpointing, checkpoint_in_cpu), strict=True)
    )
    for name in (name for name, value in switches.items() if value):
        logger.warning(
            "checkpointing.configure: %s: the inputs of recomputed layers stay whole on the device"
            " (memory)",
            name,
        )
    _state.update(configured=True, mpu=mpu_)


def is_configured() -> bool:
    """Return whether `configure` was called."""
    return bool(_state["configured"])


def reset() -> None:
    """Do nothing, because no buffers are kept between steps."""


def set_num_layers(nlayers: int) -> None:
    """Do nothing, because no buffers are kept between steps."""


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Warn, as `configure` does."""
    if partition_activation:
        configure(_state["mpu"], partition_activations=True)


class CudaRNGStatesTracker:
    """Named states of the device's random generator."""

    def __init__(self) -> None:
        self.states_: dict[str, Tensor] = {}
        self.seeds_: set[int] = set()

    def reset(self) -> None:
        """Remove all states."""
        self.states_, self.seeds_ = {}, set()

    def get_states(self) -> dict[str, Tensor]:
        """Return a copy of the dictionary of states."""
        return dict(self.states_)

    def set_states(self, states: dict[str, Tensor]) -> None:
        """Take these states."""
        self.states_ = states

    def add(self, name: str, seed: int) -> None:
        """Add the state `name`, seeded with `seed`."""
        if seed in self.seeds_ or name in self.states_:
            raise BridgeError(
                f"random states: the name {name!r} or the seed {seed} is used already; choose"
                " others, or call reset() first"
            )
        place, before = get_accelerator(), get_accelerator().get_rng_state()
        place.manual_seed(seed)
        self.seeds_.add(seed)
        self.states_[name] = place.get_rng_state()
        place.set_rng_state(before)

    @contextmanager
    def fork(self, name: str = TENSOR_SEED) -> Iterator[None]:
        """Context in which random numbers come from the state `name`."""
        if name not in self.states_:
            raise BridgeError(
                f"random states: found no state {name!r}, expected one of"
                f" {', '.join(self.states_) or 'none'}; call add() first"
            )
        place, before = get_accelerator(), get_accelerator().get_rng_state()
        place.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = place.get_rng_state()
            place.set_rng_state(before)


_tracker = CudaRNGStatesTracker()


def get_cuda_rng_tracker() -> CudaRNGStatesTracker:
    """Return the random states of this process."""
    return _tracker


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed two random generators: one that gives the same numbers on all tensor ranks, and one that
    gives each tensor rank other numbers.
    """
    sizes = (
        getattr(_state["mpu"], name, None)
        for name in ("get_tensor_model_parallel_rank", "get_model_parallel_rank")
    )
    rank = next((call() for call in sizes if call is not None), 0)
    _tracker.reset()
    get_accelerator().manual_seed(seed)
    _tracker.add(TENSOR_SEED, seed + OFFSET + rank)


model_parallel_reconfigure_tp_seed = model_parallel_cuda_manual_seed
