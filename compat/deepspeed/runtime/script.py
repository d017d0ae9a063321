"""Runs a script of `convert --script` under the real DeepSpeed. The script keeps its own model,
parameter groups, schedule and steps.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from bridge.checkpoint import parameter_names, renaming
from bridge.checkpoint.hub import Model
from bridge.engine.models.dense import native
from bridge.errors import BridgeError
from compat.deepspeed.runtime.trainers import DeepSpeedTrainer
from compat.deepspeed.script_writer import MODEL, SCRIPT

if TYPE_CHECKING:
    from bridge.checkpoint.parameter_names import Theirs
    from bridge.engine.interface import Workload
    from bridge.engine.rows import Batch
    from bridge.stack.dialect import Written
    from compat.deepspeed.dialect import DeepSpeedFile


def open_trainer(output: Written, config: DeepSpeedFile, workload: Workload) -> ScriptTrainer:
    """Return a trainer that runs the script. Raises `BridgeError` if the script fails before
    training, for example because DeepSpeed refuses the config.
    """
    try:
        return ScriptTrainer(output, config, workload)
    except BridgeError:
        raise
    except Exception as error:
        raise BridgeError(
            f"deepspeed: the script failed before training: {type(error).__name__}: {error}"
        ) from error


class ScriptTrainer(DeepSpeedTrainer):
    """Runs a script of `convert --script` as it is, with the model config that was written beside
    it. The initial weights are those of the native model, and the samples are those of the
    workload. DeepSpeed gets the written config, with the changes that DeepSpeed needs on a CPU
    (`trainers.settings`).
    """

    def __init__(self, output: Written, config: DeepSpeedFile, workload: Workload) -> None:
        self.place = TemporaryDirectory()
        self.script: Any = _module(output.beside[SCRIPT], Path(self.place.name))
        self.described = Path(self.place.name, "config.json")
        self.described.write_text(output.beside[MODEL])
        self.family = str(json.loads(output.beside[MODEL]).get("model_type"))
        self.step = 0
        super().__init__(config, workload)

    @property
    @override
    def data(self) -> tuple[int, int]:
        rank, ranks = self.script.place(self.engine)
        return int(rank), int(ranks)

    @override
    def model(self, workload: Workload) -> nn.Module:
        module: nn.Module = self.script.build(str(self.described))
        self.stages = getattr(module, "num_stages", 1)
        own = {
            self._whole_name(name): tuple(weight.shape)
            for name, weight in module.named_parameters()
        }
        self.shapes = {name: shape for part in self._everyones(own) for name, shape in part.items()}
        first, shape = dict(native(workload).named_parameters()), workload.architecture
        facts = Model(shape.kv_heads, shape.vocab)
        self.made = [
            it
            for it in _pieces_of_parameters(self.shapes, facts)
            if all(block.name in first for block in it.blocks)
        ]
        parameter_of = {it.name: it for it in self.made}
        with torch.no_grad():
            for name, weight in module.named_parameters():
                if theirs := parameter_of.get(
                    self._whole_name(name)
                ):  # else it belongs to a part of no width
                    weight.copy_(_fill_parameter(theirs, first))
        return module

    def _whole_name(self, name: str) -> str:
        """Return the name that a parameter of the script's model has in a model without pipeline
        stages.
        """
        return _name_in_model(name, self.family) if self.stages > 1 else name

    def _initialize(self, model: nn.Module, data: dict[str, Any]) -> Any:
        path = Path(self.place.name, "run.json")
        path.write_text(json.dumps(data))
        self.script.build = lambda place: model
        return self.script.prepare(
            SimpleNamespace(model=str(self.described), deepspeed_config=str(path))
        )

    @override
    def parameters_by_name(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from (
            (self._whole_name(name), weight)
            for name, weight in self.engine.module.named_parameters()
        )

    @override
    def run(self, batches: list[Batch]) -> float:
        """Run one step of the script and return the loss. The script picks its samples by number.
        If some samples are padded, the script gets complete batches instead.
        """
        rank, ranks = self.data
        rows: dict[int, Tensor] = {}
        for part, (tokens, targets) in enumerate(batches):
            first = ((self.step * self.accumulation + part) * ranks + rank) * self.micro
            rows |= {
                first + at: torch.cat((row, last[-1:]))
                for at, (row, last) in enumerate(zip(tokens, targets, strict=True))
            }
        if any((targets[:, :-1] != tokens[:, 1:]).any() for tokens, targets in batches):
            self.script.micro_batches = lambda *_: iter(batches)
        loss = float(self.script.one_step(self.engine, rows, self.step, rank, ranks))
        self.step += 1
        return loss

    @override
    def join_parts(self, parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Return whole parameters under their native names, joined from the parts of all ranks."""
        tensors = {name: [part[name] for part in parts if name in part] for name in self.shapes}
        return _cut_parameters(
            self.made,
            {name: _put_together(tensors[name], shape) for name, shape in self.shapes.items()},
        )

    @override
    def close(self) -> None:
        super().close()
        self.place.cleanup()


def _module(text: str, folder: Path) -> ModuleType:
    """Return the script as a module, under a name with which the block under `if __name__ ==
    "__main__"` does not run.
    """
    module, path = ModuleType("written"), folder / "train.py"
    path.write_text(text)
    module.__file__ = str(path)
    exec(compile(text, str(path), "exec"), vars(module))
    return module


def _name_in_model(name: str, family: str) -> str:
    """Return the name of a parameter in the whole model. `name` is its name in a pipeline, such as
    `3.layer.mlp.up_proj.weight`.
    """
    at, _, rest = name.removeprefix("tied_modules.").partition(".")
    part, _, inner = rest.partition(".")
    before, layer, ends = STAGED.get(family, ROTARY)
    return f"{layer}.{int(at) - before}.{inner}" if part == "layer" else f"{ends[part]}.{inner}"


ROTARY = (
    1,
    "model.layers",
    {"tokens": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"},
)
STAGED = {
    "gpt2": (
        2,
        "transformer.h",
        {
            "tokens": "transformer.wte",
            "places": "transformer.wpe",
            "norm": "transformer.ln_f",
            "output": "lm_head",
        },
    )
}
"""For each family: the number of pipeline layers before the first block, the name of the list of
blocks in the whole model, and the names of the other layers.
"""


def _pieces_of_parameters(shapes: Mapping[str, tuple[int, ...]], facts: Model) -> list[Theirs]:
    """Return, for each parameter of a transformers model, the native parameters from which it is
    made.
    """
    for naming in renaming.all_namings().values():
        table = naming.family(shapes) if naming.stack == "huggingface" else None
        if table is not None:
            return parameter_names.read_names(naming, table, shapes, facts)
    raise BridgeError(
        "deepspeed: the parameter names in the script's model follow no naming that stagebridge"
        " knows"
    )


def _fill_parameter(theirs: Theirs, ours: Mapping[str, Tensor]) -> Tensor:
    """Return the value of the transformers parameter `theirs`, made from native parameters."""
    rows = torch.cat([ours[block.name][block.first : block.last] for block in theirs.blocks])
    return rows.T if theirs.turned else rows.reshape(theirs.shape)


def _cut_parameters(parameters: list[Theirs], whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the native parameters, cut from the parameters of the script's model. This is the
    inverse of `_fill_parameter`.
    """
    rows_by_name: dict[str, list[Tensor]] = {}
    for theirs in parameters:
        tensor = whole[theirs.name].T if theirs.turned else whole[theirs.name]
        flat = tensor.flatten(0, 1) if tensor.ndim == STACKED else tensor
        sizes = [block.last - block.first for block in theirs.blocks]
        for block, rows in zip(theirs.blocks, torch.split(flat[: sum(sizes)], sizes), strict=True):
            rows_by_name.setdefault(block.name, []).append(rows)
    return {name: torch.cat(rows) for name, rows in rows_by_name.items()}


STACKED = 3
"""A tensor with this number of dimensions contains the weights of all experts."""


def _put_together(parts: list[Tensor], shape: tuple[int, ...]) -> Tensor:
    """Return a whole parameter, joined from the `parts` of the ranks. Each rank has either the
    whole parameter or a slice along one dimension.
    """
    split = next((at for at, size in enumerate(shape) if parts[0].shape[at] != size), None)
    if split is None:
        return parts[0]
    return torch.cat(parts[: shape[split] // parts[0].shape[split]], split)
