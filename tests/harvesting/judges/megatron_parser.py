"""Asks a source tree of Megatron-LM about flags: its parser and checks, and the config classes that training builds."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from itertools import accumulate
from typing import Any, NoReturn
from unittest.mock import MagicMock, patch

from tests.harvesting.code import first
from tests.harvesting.stacks.megatron import ready

ARGUMENTS = "megatron.training.arguments"
MODEL = "core_transformer_config_from_args"
BUILDERS = (
    # The function moved to the second module.
    (f"{ARGUMENTS}:{MODEL}", f"megatron.training.argument_utils:{MODEL}"),
    ("megatron.training.training:get_megatron_optimizer_config",),
    ("megatron.training.training:get_megatron_ddp_config",),
)
"""Functions that build config classes from arguments. A function that moved has a path for each of its places."""
HOPPER = (9, 0)
"""Compute capability of the device that Megatron's checks see."""
SHARDED = ("use_torch_fsdp2", "use_megatron_fsdp", "use_custom_fsdp")
"""Arguments with which Megatron refuses a single connection to a device; without them it often requires one."""


LOCAL = "nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager"
STORAGE = "multistorageclient"
PACKAGES = {
    name: MagicMock()
    for path in (LOCAL, STORAGE, "torch_memory_saver")
    for name in accumulate(path.split("."), "{}.{}".format)
}
"""Stand-ins for the packages that Megatron's checks look for, and for their parent packages."""


class Refused(Exception):
    """argparse refuses the words."""


def launch_parser(words: Sequence[str], ranks: int) -> Iterator[Any]:
    """Yield the effective arguments, and each config object that training builds from them.

    Raises what Megatron raises if it refuses the words.
    """
    ready()
    # Before the stand-ins are there: modules look for some packages when they are imported.
    script, builders = import_module(ARGUMENTS), [*filter(None, map(first, BUILDERS))]
    with _on_a_rank(words, ranks):
        args = script.parse_args()
        several = any(getattr(args, name, False) for name in SHARDED)
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "8" if several else "1"
        script.validate_args(args)
        yield args
        for make in builders:
            config = make(args)
            # The optimizer's comes with overrides for some parameters.
            yield config[0] if isinstance(config, tuple) else config


def _refuse(parser: ArgumentParser, message: str) -> NoReturn:
    raise Refused(message)


@contextmanager
def _on_a_rank(words: Sequence[str], ranks: int) -> Iterator[None]:
    """Context manager in which this process is rank 0 of a launch with these words, on a Hopper."""
    environment = {
        "RANK": "0",
        "WORLD_SIZE": str(ranks),
        "NCCL_ALGO": "Ring",
        "NVTE_CPU_OFFLOAD_V1": "1",
    }
    script, storage = map(import_module, (ARGUMENTS, "megatron.core.msc_utils"))
    with ExitStack() as stack:
        for change in (
            patch.dict(sys.modules, PACKAGES),
            patch.object(storage, "msc", PACKAGES[STORAGE]),
            patch.object(script, "is_flashinfer_min_version", lambda version: True, create=True),
            patch.dict(os.environ, environment),
            patch.object(sys, "argv", ["pretrain_gpt.py", *words]),
            patch.object(ArgumentParser, "error", _refuse),
            patch.object(script, "get_device_arch_version", lambda: HOPPER[0], create=True),
            patch("torch.cuda.get_device_capability", lambda device=None: HOPPER),
            patch("torch.use_deterministic_algorithms", lambda mode: None),
        ):
            stack.enter_context(change)
        yield
