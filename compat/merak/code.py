"""The settings that belong in the training script, as Python text: `init`, the trainer and the tensor-parallel lists."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bridge.launching import torchrun
from compat.merak.releases import REWRITTEN, release

SCRIPT = "train.py"
FLAGS = "flags.args"
AXES = ("pp", "tp", "dp", "sp")

Flat = Mapping[str, Any]


def script(given: Flat, values: Flat, version: str) -> str:
    """A short training script for the command line, with names for the parts that the user writes."""
    parts = (
        _imports(given, version),
        _start(values),
        _lists(given),
        _loss(given, version),
        _arguments(),
        _trainer(given, version),
    )
    return "\n\n".join(text for text in map("\n".join, parts) if text) + "\n"


def _imports(given: Flat, version: str) -> Iterator[str]:
    yield "import Merak"
    yield "from Merak import MerakArguments, MerakTrainer"
    if _section(given, "tp_lists"):
        package = "core.tensor_parallel" if release(version).since(REWRITTEN) else "modules"
        yield f"from Merak.{package}.mp_attrs import set_tp_layer_lists"
    yield "from transformers import HfArgumentParser"


def _section(given: Flat, name: str) -> dict[str, Any]:
    prefix = name + "."
    return {path.removeprefix(prefix): value for path, value in given.items() if path.startswith(prefix)}


def _start(values: Flat) -> Iterator[str]:
    sizes = {axis: values.get(f"init.{axis}") for axis in AXES}
    named = (f"{axis}={size or axis.upper()}" for axis, size in sizes.items() if size or axis != "sp")
    yield f"Merak.init({', '.join(named)})  # by name: its documentation and its source give another order"


def _lists(given: Flat) -> Iterator[str]:
    lists = _section(given, "tp_lists")
    if lists:
        yield "set_tp_layer_lists("
        yield from (f"    {name}={_listed(value)}," for name, value in lists.items())
        yield ")"


def _listed(value: Any) -> str:
    return repr(list(value)) if isinstance(value, tuple) else repr(value)


def _loss(given: Flat, version: str) -> Iterator[str]:
    loss = given.get("trainer.loss_fn")
    if loss and release(version).since(REWRITTEN):
        yield ""
        yield "class Trainer(MerakTrainer):"
        yield "    def get_loss_fn(self):"
        yield f"        return {loss}  # takes outputs and labels"
        yield ""


def _arguments() -> Iterator[str]:
    yield "(args,) = HfArgumentParser(MerakArguments).parse_args_into_dataclasses()"


def _trainer(given: Flat, version: str) -> Iterator[str]:
    said, own = _section(given, "trainer"), release(version).since(REWRITTEN)
    loss = said.pop("loss_fn", None)
    said = {"model": "model", "args": "args", "train_dataset": "train_dataset", **said}
    yield f"trainer = {'Trainer' if loss and own else 'MerakTrainer'}("
    yield from (f"    {name}={_object(value)}," for name, value in said.items())
    if loss and not own:
        yield f"    loss_fn={loss},"
    yield ")"
    yield "trainer.train()"


def _object(value: str | Sequence[str]) -> str:
    return value if isinstance(value, str) else "(" + "".join(f"{name}, " for name in value).rstrip(" ") + ")"


def launch(given: Flat, world_size: int | None) -> tuple[str, ...]:
    """The command that starts the script, with --output_dir, which the parser requires."""
    output = () if "args.output_dir" in given else ("--output_dir", "output")
    return torchrun(world_size, SCRIPT, *output)
