"""The families of clean models, split over tensor ranks by torch's DTensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.style import ParallelStyle


class SplitConv(ParallelStyle):
    """GPT-2's own linear layer, whose weight lies the other way: split by columns, or by rows."""

    def __init__(self, columns: bool) -> None:
        super().__init__()
        self.columns = columns

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        def split(name: str, part: Any, mesh: Any) -> None:
            places = {
                "weight": Shard(1 if self.columns else 0),
                "bias": Shard(0) if self.columns else Replicate(),
            }
            for own, place in places.items():
                setattr(
                    part, own, nn.Parameter(distribute_tensor(getattr(part, own), mesh, [place]))
                )

        def enter(part: Any, given: Any, mesh: Any) -> Any:
            return DTensor.from_local(
                given[0], mesh, [Replicate() if self.columns else Shard(-1)], run_check=False
            )

        def leave(part: Any, output: Any, mesh: Any) -> Any:
            return (
                output.to_local()
                if self.columns
                else output.redistribute(placements=[Replicate()]).to_local()
            )

        return distribute_module(module, device_mesh, split, enter, leave)


COLUMNS, ROWS = ColwiseParallel, RowwiseParallel
HEAD = {"lm_head": lambda: ColwiseParallel(output_layouts=Replicate())}
EMBED = {"model.embed_tokens": lambda: RowwiseParallel(input_layouts=Replicate())}
ATTENTION = {"q_proj": COLUMNS, "k_proj": COLUMNS, "v_proj": COLUMNS, "o_proj": ROWS}
PLANS: Mapping[str, tuple[str, Mapping[str, Any], Mapping[str, Any]]] = {
    "GPT-2": (
        "transformer.h.*",
        {"mlp.c_fc": lambda: SplitConv(True), "mlp.c_proj": lambda: SplitConv(False)},
        {},
    ),
    "Llama": (
        "model.layers.*",
        {f"self_attn.{name}": style for name, style in ATTENTION.items()}
        | {"mlp.gate_proj": COLUMNS, "mlp.up_proj": COLUMNS, "mlp.down_proj": ROWS},
        HEAD | EMBED,
    ),
    "Mixtral": (
        "model.layers.*",
        {f"self_attn.{name}": style for name, style in ATTENTION.items()},
        HEAD | EMBED,
    ),
    "BERT": (
        "bert.encoder.layer.*",
        {f"attention.self.{name}": COLUMNS for name in ("query", "key", "value")}
        | {"attention.output.dense": ROWS, "intermediate.dense": COLUMNS, "output.dense": ROWS},
        {},
    ),
    "T5": (
        "encoder.block.*",
        {"layer.1.DenseReluDense.wi": COLUMNS, "layer.1.DenseReluDense.wo": ROWS},
        {},
    ),
    "ViT": (
        "vit.layers.*",
        {f"attention.{name}": style for name, style in ATTENTION.items()}
        | {"mlp.fc1": COLUMNS, "mlp.fc2": ROWS},
        {},
    ),
}
"""By family: where its blocks are, what is split in each, and what beside them."""


def sequence(module: nn.Module, mesh: Any) -> None:
    """Norms of a Llama see a part of the tokens each."""
    rows: Any = {"output_layouts": Shard(1), "use_local_output": False}
    whole: Any = {"desired_input_layouts": (Replicate(),)}
    plan: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), **rows),
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    for at in range(len(module.get_submodule("model.layers"))):  # type: ignore[arg-type]
        given: Any = {"input_kwarg_layouts": {"hidden_states": Shard(1)}}
        block = {
            "input_layernorm": SequenceParallel(),
            "post_attention_layernorm": SequenceParallel(),
            "self_attn": PrepareModuleInput(
                **given, desired_input_kwarg_layouts={"hidden_states": Replicate()}
            ),
            "mlp": PrepareModuleInput(input_layouts=(Shard(1),), **whole),
            **{f"self_attn.{name}": COLUMNS() for name in ("q_proj", "k_proj", "v_proj")},
            "self_attn.o_proj": RowwiseParallel(**rows),
            "mlp.gate_proj": COLUMNS(),
            "mlp.up_proj": COLUMNS(),
            "mlp.down_proj": RowwiseParallel(**rows),
        }
        plan |= {f"model.layers.{at}.{name}": style for name, style in block.items()}
    parallelize_module(module, mesh, plan)


def split(module: nn.Module, model: str, world: int, by_sequence: bool) -> tuple[nn.Module, int]:
    """The module, two ranks of which hold a part each of single weights, and this rank's number among those that take other
    samples: with more than two ranks, weights are sharded over those as well.
    """
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
    if by_sequence:
        sequence(module, mesh["tp"])
    else:
        path, inner, beside = PLANS[model]
        blocks = module.get_submodule(path.removesuffix(".*"))
        plan = {
            f"{path.removesuffix('*')}{at}.{name}": style()
            for at in range(len(blocks))
            for name, style in inner.items()
        }  # type: ignore[arg-type]
        parallelize_module(
            module, mesh["tp"], plan | {name: style() for name, style in beside.items()}
        )
    if world > 2:
        from torch.distributed.fsdp import fully_shard

        for _, block in module.get_submodule(PLANS[model][0].removesuffix(".*")).named_children():
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(module, mesh=mesh["dp"])
    return module, mesh["dp"].get_local_rank()
