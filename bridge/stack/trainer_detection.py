"""Looks into the Python program of a launch for Hugging Face's Trainer, without running it."""

from __future__ import annotations

import ast
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from bridge.errors import BridgeError
from bridge.files import find, read_text
from bridge.stack.training_arguments import ARGUMENTS, RETIRED, TRL

NAMES = frozenset({*ARGUMENTS, *RETIRED})
"""The names of all TrainingArguments."""

PACKAGES = ("transformers", "trl")
FRAMEWORKS = frozenset(
    {
        *(
            "torch",
            "torchvision",
            "torchaudio",
            "deepspeed",
            "accelerate",
            "transformers",
            "trl",
            "peft",
            "datasets",
        ),
        *(
            "numpy",
            "pandas",
            "scipy",
            "sklearn",
            "tqdm",
            "wandb",
            "tensorboard",
            "tensorboardX",
            "matplotlib",
            "yaml",
        ),
        *(
            "PIL",
            "cv2",
            "einops",
            "safetensors",
            "tokenizers",
            "sentencepiece",
            "evaluate",
            "timm",
            "apex",
            "bitsandbytes",
        ),
        *(
            "flash_attn",
            "click",
            "fire",
            "omegaconf",
            "hydra",
            "mpi4py",
            "psutil",
            "requests",
            "rich",
            "loguru",
        ),
    }
)
"""Packages that start no Trainer by themselves."""
PARTS = ("Trainer", "TrainingArguments", "HfArgumentParser")
"""Endings of the names that only a program with Hugging Face's Trainer takes from `PACKAGES`."""
USUAL = """
    learning_rate weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm lr_scheduler_type
    warmup_steps warmup_ratio num_train_epochs max_steps gradient_accumulation_steps
    gradient_checkpointing save_steps save_strategy save_total_limit logging_steps logging_dir
    eval_steps run_name report_to resume_from_checkpoint tp_size split_batches dispatch_batches use_ipex
    activation_checkpointing
"""
"""Names of TrainingArguments that argument parsers of programs without the Trainer have too."""
SHARED = frozenset(
    {
        "--local_rank",
        *(f"--{name}" for name in USUAL.split()),
        *(f"--{name}" for name in NAMES if "_" not in name),
    }
)
"""Flags of TrainingArguments that do not show that there is a Trainer."""
FLAGS = frozenset(f"--{name}" for name in NAMES) - SHARED
"""Flags of TrainingArguments that show that there is a Trainer."""


RIVALS = frozenset(
    {
        *(
            "--epochs",
            "--epoch",
            "--num_epochs",
            "--n_epochs",
            "--max_epochs",
            "--train_epochs",
            "--lr",
            "--min_lr",
        ),
        *(
            "--base_lr",
            "--max_lr",
            "--init_lr",
            "--peak_lr",
            "--batch_size",
            "--train_batch_size",
            "--micro_batch_size",
        ),
        *(
            "--global_batch_size",
            "--bs",
            "--wd",
            "--grad_clip",
            "--clip_grad",
            "--gradient_clip",
            "--gradient_clipping",
        ),
        *(
            "--clip_grad_norm",
            "--beta1",
            "--beta2",
            "--betas",
            "--save_dir",
            "--ckpt_dir",
            "--checkpoint_dir",
        ),
        *(
            "--save_interval",
            "--log_interval",
            "--eval_interval",
            "--optimizer",
            "--scheduler",
            "--lr_scheduler",
        ),
        *(
            "--warmup",
            "--num_warmup_steps",
            "--train_iters",
            "--num_train_steps",
            "--total_steps",
            "--max_train_steps",
        ),
        *("--accumulation_steps", "--grad_accum", "--grad_accum_steps"),
    }
)
"""Flags for what a TrainingArgument of another name sets. They speak against the Trainer."""
MOST_MODULES = 50
"""Largest number of modules of its own that are read for one program."""


@dataclass(frozen=True)
class Program:
    """What the text of a program and of its own modules shows: whether it imports Hugging Face's
    Trainer, and the options of its own argument parser. `opaque` is true if it imports packages
    that are not read. `loops` is true if it makes accelerate's `Accelerator` or DeepSpeed's engine itself.
    """

    trainer: bool
    options: frozenset[str]
    opaque: bool = False
    loops: bool = False


def read(name: str, folder: Path | None) -> Program | None:
    """Return what the program `name` of a script in `folder` shows; None if it cannot be read."""
    try:
        path = find(name, folder) if name.endswith(".py") else None
    except BridgeError:
        return None
    tree = _parse_file(path) if path else None
    if path is None or tree is None:
        return None
    trees, places, opaque = [tree], {path}, False
    waiting = [(path, tree)]
    while waiting:
        place, inside = waiting.pop()
        for module, sure in _imported_modules(inside, place, path.parent):
            at, top = _module_file(module, path.parent), module.partition(".")[0]
            if at is None:
                own = (path.parent / top).is_dir() or top in sys.stdlib_module_names | FRAMEWORKS
                opaque |= sure and not own
            elif at not in places:
                places.add(at)
                more = _parse_file(at) if len(places) <= MOST_MODULES else None
                opaque |= more is None
                waiting += [(at, more)] if more else []
                trees += [more] if more else []
    options = [name for tree in trees for name in _parser_options(tree)]
    loops = _makes_engine(tree) and not any(_imports_trainer(tree))
    trainer = not loops and any(any(_imports_trainer(one)) for one in trees)
    return Program(trainer, frozenset(options), opaque, loops)


def evidence(program: Program | None, flags: Collection[str]) -> tuple[bool, str]:
    """Return whether Hugging Face's Trainer runs a program that is started with `flags`, and, if
    not, why that is assumed.

    The text of the program decides if it can be read; one that makes an engine itself has a loop of its own.
    Where packages that are not read may take the flags, or where there is no text, the flags decide: those of
    TrainingArguments speak for the Trainer, those of another name for the same thing against it.
    """
    if program is not None and program.trainer:
        return True, ""
    if program is not None and (program.loops or program.options or not program.opaque):
        return False, "no import of it there"
    # HfArgumentParser takes each flag with dashes too.
    spellings = {f"--{flag.lstrip('-').replace('-', '_')}": flag for flag in flags}
    own, others = (
        sorted(spellings[name] for name in names & spellings.keys()) for names in (FLAGS, RIVALS)
    )
    if own and others:
        return (
            False,
            f"{', '.join(own)} speak for it, but TrainingArguments have no {', '.join(others)}",
        )
    return bool(own), "no import of it there, and no flag here that TrainingArguments alone have"


def _parse_file(path: Path) -> ast.Module | None:
    try:
        return ast.parse(read_text(path))
    # A program may be of another Python, or not be one at all.
    except (BridgeError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _imported_modules(tree: ast.Module, place: Path, root: Path) -> Iterator[tuple[str, bool]]:
    """Yield the modules that a module at `place` imports, by names that begin in the folder `root`,
    each with false if the name may be no module.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((one.name, True) for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = place.parents[node.level - 1] if 0 < node.level <= len(place.parents) else None
            package = (
                ".".join(above.relative_to(root).parts)
                if above and above.is_relative_to(root)
                else ""
            )
            name = ".".join(filter(None, (package, node.module or "")))
            yield from [(name, True)] if name else []
            yield from ((f"{name}.{one.name}".lstrip("."), False) for one in node.names)


def _module_file(name: str, root: Path) -> Path | None:
    """Return the file of a module in the folder of the program; None if it is not there."""
    path = name.replace(".", "/")
    try:
        return find(f"{path}.py", root) or find(f"{path}/__init__.py", root)
    except BridgeError:
        return None


def _imports_trainer(tree: ast.Module) -> Iterator[bool]:
    # Of `import transformers as hf`, hf is the package.
    aliases = {
        one.asname or one.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for one in node.names
        if one.name in PACKAGES
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            package = (node.module or "").partition(".")[0]
            yield package in PACKAGES and any(
                one.name.endswith(PARTS) or one.name in TRL["defaults"] for one in node.names
            )
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield node.value.id in aliases and node.attr.endswith(PARTS)


def _makes_engine(tree: ast.Module) -> bool:
    """Return whether a program makes what the Trainer would make: an `Accelerator`, or an engine by deepspeed.initialize."""
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return any(
        (isinstance(one, ast.Name) and one.id == "Accelerator")
        or (
            isinstance(one, ast.Attribute)
            and ast.unparse(one) in ("accelerate.Accelerator", "deepspeed.initialize")
        )
        for one in calls
    )


def _parser_options(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            words = (one.value for one in node.args if isinstance(one, ast.Constant))
            yield from (word for word in words if isinstance(word, str))
