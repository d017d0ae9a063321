"""The settings of the training script as Python code: the call of `init`, the trainer and the
tensor-parallel lists.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from bridge.plan.section import below
from bridge.stack.launch_command import torchrun
from compat.merak.releases import REWRITTEN, release

SCRIPT = "train.py"
FLAGS = "flags.args"
AXES = ("pp", "tp", "dp", "sp")

Flat = Mapping[str, Any]


def script(settings: Flat, values: Flat, version: str) -> str:
    """Return a short training script for the command line. The script calls functions that the user
    has to write.
    """
    sizes = {axis: values.get(f"init.{axis}") for axis in AXES}
    # An open size stands in the script as a name in capitals, for the user to fill in; `sp` is
    # optional.
    degrees = ", ".join(
        f"{axis}={size or axis.upper()}" for axis, size in sizes.items() if size or axis != "sp"
    )
    parts = (
        _imports(settings, version),
        (f"Merak.init({degrees})  # by name: its documentation and its source give another order",),
        _lists(settings),
        _loss(settings, version),
        ("(args,) = HfArgumentParser(MerakArguments).parse_args_into_dataclasses()",),
        _trainer(settings, version),
    )
    return "\n\n".join(text for text in map("\n".join, parts) if text) + "\n"


def _imports(settings: Flat, version: str) -> Iterator[str]:
    yield "import Merak"
    yield "from Merak import MerakArguments, MerakTrainer"
    if below("tp_lists.", settings):
        package = "core.tensor_parallel" if release(version).since(REWRITTEN) else "modules"
        yield f"from Merak.{package}.mp_attrs import set_tp_layer_lists"
    yield "from transformers import HfArgumentParser"


def _lists(settings: Flat) -> Iterator[str]:
    lists = below("tp_lists.", settings)
    if lists:
        yield "set_tp_layer_lists("
        for name, value in lists.items():
            yield f"    {name}={list(value) if isinstance(value, tuple) else value!r},"
        yield ")"


def _loss(settings: Flat, version: str) -> Iterator[str]:
    # Since 2.0.0 a loss is a method to override; before, it was an argument of the trainer.
    loss = settings.get("trainer.loss_fn")
    if loss and release(version).since(REWRITTEN):
        yield ""
        yield "class Trainer(MerakTrainer):"
        yield "    def get_loss_fn(self):"
        yield f"        return {loss}  # takes outputs and labels"
        yield ""


def _trainer(settings: Flat, version: str) -> Iterator[str]:
    arguments, own = below("trainer.", settings), release(version).since(REWRITTEN)
    loss = arguments.pop("loss_fn", None)
    arguments = {"model": "model", "args": "args", "train_dataset": "train_dataset", **arguments}
    yield f"trainer = {'Trainer' if loss and own else 'MerakTrainer'}("
    for name, value in arguments.items():
        # Names of objects in the script, written without quotes; several of them as a tuple.
        expression = (
            value
            if isinstance(value, str)
            else "(" + "".join(f"{one}, " for one in value).rstrip(" ") + ")"
        )
        yield f"    {name}={expression},"
    if loss and not own:
        yield f"    loss_fn={loss},"
    yield ")"
    yield "trainer.train()"


def launch(settings: Flat, world_size: int | None) -> tuple[str, ...]:
    """Return the command that starts the script. It contains --output_dir, which Merak's parser
    requires.
    """
    output = () if "args.output_dir" in settings else ("--output_dir", "output")
    return torchrun(world_size, SCRIPT, *output)
