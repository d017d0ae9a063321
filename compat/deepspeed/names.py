"""Lists DeepSpeed's modules, each with the modules of the native engine that implement it, and
advice for names that the engine does not have. `import compat.deepspeed.comm as dist` finds a
module of this list. After `install()`, `import deepspeed.comm` finds the same module, also in
libraries that import DeepSpeed. Nothing that needs torch is imported before a script uses it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution
from types import ModuleType
from typing import Any

from bridge.errors import BridgeError
from bridge.stack.extras import need_engine

OURS, THEIRS = "compat.deepspeed", "deepspeed"
RUNTIME = f"{OURS}.runtime"
RELEASE = "0.19.8"
"""The release of DeepSpeed that the native engine imitates."""

ENTRIES = (
    "DeepSpeedConfig",
    "DeepSpeedEngine",
    "DeepSpeedTransformerConfig",
    "DeepSpeedTransformerLayer",
    "InferenceEngine",
    "OnDevice",
    "PipelineEngine",
    "PipelineModule",
    "TORCH_DISTRIBUTED_DEFAULT_PORT",
    "add_config_arguments",
    "get_accelerator",
    "init_distributed",
    "init_inference",
    "initialize",
    "log_dist",
    "logger",
)
"""The names in DeepSpeed's top-level package. They are listed here so that a wrong name is refused
without loading torch.
"""
_UTILS = ("names.utilities", "names.fragments")
MODULES: Mapping[str, Sequence[str]] = {
    "": ("entries",),
    "accelerator": ("names.accelerator",),
    "accelerator.real_accelerator": ("names.accelerator",),
    "checkpoint": (),
    "checkpoint.utils": ("names.utilities",),
    "checkpointing": ("names.checkpointing",),
    "comm": ("names.communication",),
    "comm.comm": ("names.communication",),
    "compression": (),
    "compression.helper": ("names.utilities",),
    "constants": ("names.utilities",),
    "inference": ("names.inference",),
    "inference.engine": ("names.inference",),
    "launcher": (),
    "launcher.runner": ("names.utilities",),
    "ops": ("names.operators",),
    "ops.adam": ("names.optimizers",),
    "ops.op_builder": ("names.files",),
    "ops.transformer": ("names.transformer",),
    "pipe": ("names.pipe",),
    "runtime": (),
    "runtime.activation_checkpointing": (),
    "runtime.activation_checkpointing.checkpointing": ("names.checkpointing",),
    "runtime.config": ("names.settings", "names.utilities"),
    "runtime.dataloader": ("names.utilities",),
    "runtime.engine": ("names.engines",),
    "runtime.lr_schedules": ("names.utilities",),
    "runtime.pipe": ("names.pipe",),
    "runtime.pipe.engine": ("names.engines",),
    "runtime.pipe.module": ("names.pipe",),
    "runtime.utils": ("names.utilities",),
    "runtime.zero": ("names.zero",),
    "runtime.zero.offload_config": ("names.utilities",),
    "runtime.zero.partition_parameters": ("names.zero", "names.constructors"),
    "utils": _UTILS,
    "utils.groups": ("names.groups",),
    "utils.logging": ("names.utilities",),
    "utils.module_utils": ("names.utilities",),
    "utils.tensor_fragment": ("names.fragments",),
    "utils.zero_to_fp32": ("names.export",),
    "zero": ("names.zero",),
}
"""For each module of DeepSpeed, the modules below `compat.deepspeed.runtime` that implement it. The
`__all__` of those modules lists the names.
"""

OPERATORS = "ops.__compatible_ops__"
"""The only name with leading underscores, apart from `__version__`, that scripts use: a mapping from
the name of an operator to whether DeepSpeed can build the operator.
"""
KERNELS = "the engine builds no operators; use torch's operators"
ABSENT: Mapping[str, str] = {
    "DeepSpeedHybridEngine": (
        "call the model's own generate; at ZeRO level 3 call it within zero.GatheredParameters"
    ),
    "autotuning": "use stagebridge layout to see how much memory a run needs",
    "compile": "the engine schedules gathers itself; leave out DeepSpeed's compiler",
    "compression": (
        "the engine does not train compressed models; DeepSpeed 0.19 has removed compression too"
    ),
    "inference": (
        "the engine does not serve models; use deepspeed.init_inference to run a model on one rank"
    ),
    "io": "checkpoints are written as safetensors; use engine.save_checkpoint",
    "linear": "use peft for LoRA, and freeze the other parameters",
    "model_implementations": KERNELS,
    "module_inject": f"{KERNELS}; init_inference runs a model with the model's own modules",
    "moe": (
        "give the engine a model whose layers contain experts, such as Mixtral; every rank then holds"
        " all experts"
    ),
    "monitor": "use engine.native.progress, or stagebridge train --json, for metrics of the run",
    "nvme": "the engine keeps all state on the device",
    "ops": KERNELS,
    "profiling": "use torch.profiler",
    "replace_transformer_layer": f"{KERNELS}; init_inference runs a model with the model's own"
    " modules",
    "runtime.data_pipeline": "order and batch the data with a sampler of torch",
    "runtime.domino": "the engine overlaps communication itself",
    "runtime.fp16": (
        "use the optimizer that deepspeed.initialize returns; the engine itself keeps the masters"
    ),
    "runtime.sequence_parallel": "the engine has no sequence axis; leave sequence_parallel_size at 1",
    "sequence": "the engine has no sequence axis; leave sequence_parallel_size at 1",
    "tp_model_init": "set tensor_parallel.autotp_size in the config; deepspeed.initialize then"
    " splits the model",
}
"""Names of DeepSpeed that the engine does not have, each with advice. An entry for a
module also applies to all names in this module.
"""


class Absent(BridgeError, ImportError):
    """Raised for a name of DeepSpeed that the engine does not have. The class derives from
    `ImportError` too, so that scripts with a fallback import catch it.
    """


class Names(ModuleType):
    """A module that stands for one of DeepSpeed's modules. `MODULES` lists the modules that its
    names come from.
    """

    def __init__(self, path: str) -> None:
        super().__init__(".".join((OURS, path)).rstrip("."))
        self.__dict__["_path"] = path
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        """Return the native engine's object of this name. Python calls this method for every name
        that the module itself lacks.
        """
        return resolve_name(self._path, name)

    def __dir__(self) -> list[str]:
        """Return all names of the module, including names that the native engine implements."""
        return sorted({*super().__dir__(), *names_of(self._path)})


_made: dict[str, Names] = {}


def module(path: str) -> Names:
    """Return the module that stands for DeepSpeed's module `path`."""
    return _made.setdefault(path, Names(path))


def names_of(path: str) -> Iterator[str]:
    """Yield the names that the native engine has in DeepSpeed's module `path`, including direct
    submodules.
    """
    lead = f"{path}." if path else ""
    for path_of_module in MODULES:
        inner = path_of_module.removeprefix(lead)
        if path_of_module and path_of_module.startswith(lead) and "." not in inner:
            yield inner
    for behind in MODULES.get(path, ()):
        # The package's own names stand in this file, so that listing them loads no torch.
        yield from ENTRIES if behind == "entries" else import_module(f"{RUNTIME}.{behind}").__all__


def resolve_name(path: str, name: str) -> Any:
    """Return the native engine's object for `name` in DeepSpeed's module `path`. Raises `Absent`
    with advice if `ABSENT` lists the name, and `AttributeError` for any other unknown name.
    """
    whole = f"{path}.{name}" if path else name
    # Python and its tools look for names such as __wrapped__.
    # They expect AttributeError, and no import of torch.
    if name.startswith("__") and name != "__version__" and whole != OPERATORS:
        raise AttributeError(name)
    if name == "__version__" and not path:
        return RELEASE
    if whole in MODULES:
        return module(whole)
    # The package's names are all listed, so an unknown one is refused below without loading torch.
    is_entry = path or name in ENTRIES
    if is_entry:
        need_engine(f"{THEIRS}.{whole}")
    for behind in MODULES.get(path, ()) if is_entry else ():
        door = import_module(f"{RUNTIME}.{behind}")
        if name in door.__all__:
            return getattr(door, name)
    advice = instead(whole)
    if advice is not None:
        raise Absent(f"{THEIRS}.{whole}: the native engine does not have this name; {advice}")
    names = ", ".join(sorted(set(names_of(path))))
    raise AttributeError(
        f"module {module(path).__name__!r} has no attribute {name!r}; of DeepSpeed's names this"
        f" module has {names}"
    )


def instead(path: str) -> str | None:
    """Return advice for a name that the engine does not have; None if `ABSENT` has no advice."""
    # The longest entry that covers the name: `runtime.domino` has
    # advice of its own, and `compression` covers all below it.
    words = path.split(".")
    for end in range(len(words), 0, -1):
        lead = ".".join(words[:end])
        if lead in ABSENT:
            return ABSENT[lead]
    return None


class Finder(MetaPathFinder, Loader):
    """Import finder for the modules in `MODULES`, below `compat.deepspeed` or below `deepspeed`
    itself.
    """

    def __init__(self, root: str) -> None:
        self.root = root

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the import spec of a module in `MODULES`. Return None for a module that Python has
        to find itself. Raises `Absent` for a module of DeepSpeed that the native engine does not
        have.
        """
        if name != self.root and not name.startswith(f"{self.root}."):
            return None
        inner = name[len(self.root) + 1 :]
        # `compat.deepspeed` itself is a package on disk; only `deepspeed` is made here.
        if inner in MODULES and (inner or self.root == THEIRS):
            return ModuleSpec(name, self, is_package=True)
        advice = instead(inner)
        # Below `compat.deepspeed` lie real modules too, such as
        # `rules`. Python goes on and finds them.
        if self.root == THEIRS or advice is not None:
            raise Absent(
                f"{THEIRS}.{inner}: the native engine does not have this module;"
                f" {advice or 'run the script with DeepSpeed itself'}"
            )
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module that stands for DeepSpeed's module of the spec's name."""
        return module(spec.name[len(self.root) + 1 :])

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing, because the module looks up its names when a script asks for them."""

    def find_distributions(self, context: Any = None) -> Iterator[Distribution]:
        """Yield the distribution `deepspeed` to libraries that look for an installed DeepSpeed."""
        if self.root == THEIRS and getattr(context, "name", None) in (None, THEIRS):
            yield _Installed()


class _Installed(Distribution):
    """Package metadata of a distribution named `deepspeed`, for libraries that require a minimum
    release of DeepSpeed.
    """

    def read_text(self, filename: str) -> str | None:
        """Return the metadata of the distribution, which are only name and release; None for any
        other file.
        """
        return (
            f"Metadata-Version: 2.1\nName: {THEIRS}\nVersion: {RELEASE}\n"
            if filename == "METADATA"
            else None
        )

    def locate_file(self, path: Any) -> Any:
        """Raise `BridgeError`, because the distribution has no files."""
        raise BridgeError(
            f"{path}: the native engine replaces DeepSpeed and does not have this file"
        )


def install() -> None:
    """Make `import deepspeed` in this process import the native engine, also in libraries such as
    accelerate.

    Raises `BridgeError` if DeepSpeed itself is imported already.
    """
    if any(isinstance(finder, Finder) and finder.root == THEIRS for finder in sys.meta_path):
        return
    if THEIRS in sys.modules:
        raise BridgeError(
            "install: DeepSpeed itself is already imported; call compat.deepspeed.install() before"
            " all other imports"
        )
    # In front of Python's own finders, which would find an installed DeepSpeed.
    sys.meta_path.insert(0, Finder(THEIRS))


def listen() -> None:
    """Register the import finder for the modules in `MODULES` below `compat.deepspeed`, which have
    no files of their own.
    """
    if not any(isinstance(finder, Finder) and finder.root == OURS for finder in sys.meta_path):
        # Behind Python's own finders: a module on disk comes first.
        sys.meta_path.append(Finder(OURS))
