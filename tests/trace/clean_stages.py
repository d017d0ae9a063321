"""The families of clean models, cut into stages that torch's pipelining runs under each of its schedules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

from bridge.trace import attach
from bridge.trace.desync import Policy

MICROBATCHES = 4
SCHEDULES: Mapping[str, tuple[str, str]] = {
    "GPipe": ("ScheduleGPipe", "one"),
    "1F1B": ("Schedule1F1B", "one"),
    "LoopedBFS": ("ScheduleLoopedBFS", "loop"),
    "interleaved": ("ScheduleInterleaved1F1B", "loop"),
    "interleaved zero bubble": ("ScheduleInterleavedZeroBubble", "loop"),
    "ZBV": ("ScheduleZBVZeroBubble", "v"),
    "DualPipeV": ("ScheduleDualPipeV", "v"),
}
"""By name: torch's class, and how stages lie on ranks: one each, or two of four, in a loop or there and back."""

SPLIT = ("interleaved zero bubble", "ZBV", "DualPipeV")
"""Those that split backward in one for activations and one for weights."""


class Part(nn.Module):
    """Modules of the whole model, and how the stream goes through them."""

    def __init__(self, call: Callable[..., Tensor], **inner: nn.Module) -> None:
        super().__init__()
        self.call = call
        for name, module in inner.items():
            self.add_module(name, module)

    def forward(self, stream: Tensor, **named: Tensor) -> Tensor:
        return self.call(self, stream, **named)


class Stage(nn.Module):
    """Parts, one after the other: under names of the whole model, or counted anew in each stage."""

    def __init__(self, parts: Mapping[str, nn.Module], counted: bool) -> None:
        super().__init__()
        self.parts: Any = nn.ModuleList(parts.values()) if counted else nn.ModuleDict(parts)

    def forward(self, stream: Tensor, **named: Tensor) -> Tensor:
        for part in self.parts if isinstance(self.parts, nn.ModuleList) else self.parts.values():
            stream = part(stream, **named)
        return stream


def _places(stream: Tensor) -> Tensor:
    return torch.arange(stream.shape[1])[None]


def _gpt2(whole: Any) -> dict[str, nn.Module]:
    inner = whole.transformer
    embed = Part(
        lambda own, x, **_: own.drop(own.wte(x) + own.wpe(_places(x))),
        wte=inner.wte,
        wpe=inner.wpe,
        drop=inner.drop,
    )
    head = Part(
        lambda own, x, **_: own.lm_head(own.ln_f(x)), ln_f=inner.ln_f, lm_head=whole.lm_head
    )
    return {"embed": embed, **_blocks(inner.h), "head": head}


def _llama(whole: Any) -> dict[str, nn.Module]:
    inner = whole.model

    def turned(own: Any, x: Tensor, **_: Tensor) -> Tensor:
        angles = inner.rotary_emb(x, position_ids=_places(x))
        return own.block(x, position_embeddings=angles, position_ids=_places(x))  # type: ignore[no-any-return]

    head = Part(
        lambda own, x, **_: own.lm_head(own.norm(x)), norm=inner.norm, lm_head=whole.lm_head
    )
    return {
        "embed": Part(_only("embed"), embed=inner.embed_tokens),
        **_blocks(inner.layers, turned),
        "head": head,
    }


def _bert(whole: Any) -> dict[str, nn.Module]:
    embed, head = (
        Part(_only("embed"), embed=whole.bert.embeddings),
        Part(_only("cls"), cls=whole.cls),
    )
    return {"embed": embed, **_blocks(whole.bert.encoder.layer), "head": head}


def _vit(whole: Any) -> dict[str, nn.Module]:
    head = Part(
        lambda own, x, **_: own.classifier(own.norm(x)[:, 0]),
        norm=whole.vit.layernorm,
        classifier=whole.classifier,
    )
    return {
        "embed": Part(_only("embed"), embed=whole.vit.embeddings),
        **_blocks(whole.vit.layers),
        "head": head,
    }


def _t5(whole: Any) -> dict[str, nn.Module]:
    """Four parts too: the decoder is one, and gets its own tokens beside the stream."""

    def decoded(own: Any, x: Tensor, *, decoder: Tensor, **_: Tensor) -> Tensor:
        return own.decoder(input_ids=decoder, encoder_hidden_states=x).last_hidden_state  # type: ignore[no-any-return]

    encode = Part(
        lambda own, x, **_: own.encoder(inputs_embeds=x).last_hidden_state, encoder=whole.encoder
    )
    embed = Part(_only("embed"), embed=nn.Embedding(*whole.shared.weight.shape))
    whole.encoder.embed_tokens = None
    whole.decoder.embed_tokens = nn.Embedding(*whole.shared.weight.shape)
    return {
        "embed": embed,
        "encoder": encode,
        "decoder": Part(decoded, decoder=whole.decoder),
        "head": _head(whole),
    }


def _head(whole: Any) -> nn.Module:
    return Part(_only("lm_head"), lm_head=whole.lm_head)


def _only(name: str) -> Callable[..., Tensor]:
    return lambda own, x, **_: getattr(own, name)(x)


def _blocks(
    found: Sequence[Any], call: Callable[..., Tensor] | None = None
) -> dict[str, nn.Module]:
    return {
        f"block{at}": Part(call or _only("block"), block=block) for at, block in enumerate(found)
    }


PARTS: Mapping[str, Callable[[Any], dict[str, nn.Module]]] = {
    "GPT-2": _gpt2,
    "Llama": _llama,
    "BERT": _bert,
    "T5": _t5,
    "Mixtral": _llama,
    "ViT": _vit,
}


def untied(whole: Any) -> None:
    """Give the head a weight of its own: stages that share one would have to sum its gradients."""
    owner, name = (whole, "lm_head") if hasattr(whole, "lm_head") else (whole, "")
    if hasattr(whole, "cls"):
        owner, name = whole.cls.predictions, "decoder"
    if name:
        old = getattr(owner, name)
        setattr(
            owner, name, nn.Linear(old.in_features, old.out_features, bias=old.bias is not None)
        )
    if hasattr(whole, "cls"):
        owner.bias = (
            owner.decoder.bias
        )  # it has that twice, and would hold a copy that nothing uses


def own_stages(rank: int, world: int, layout: str) -> list[int]:
    """The numbers of a rank's stages."""
    return {"one": [rank], "loop": [rank, rank + world], "v": [rank, 2 * world - 1 - rank]}[layout]


def fed(
    model: str, given: Mapping[str, Tensor], seed: int
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """What the first stage takes, what the loss is held to, and what the decoder takes."""
    if model == "ViT":
        return given["pixel_values"], given["labels"], {}
    tokens, labels = given["input_ids"], given["labels"]
    if model == "T5":
        shifted = torch.cat([torch.zeros_like(labels[:, :1]), labels[:, :-1].clamp(min=0)], 1)
        return tokens, labels, {"decoder": shifted}
    if model != "BERT":
        labels = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], 1)
    return tokens, labels, {}


def lossed(output: Tensor, targets: Tensor) -> Tensor:
    """The mean over what counts."""
    return nn.functional.cross_entropy(output.flatten(0, -2), targets.flatten())


def trained(
    rank: int, world: int, whole: Any, model: str, way: Any, folder: Path, steps: int, batch: Any
) -> Any:
    """Train it under a schedule; what the trace found. Of more than two ranks, two each are a pipeline."""
    from tests.trace.clean import LOGS

    kind, layout = SCHEDULES[way.schedule]
    group, place, replica = None, rank, 0
    if world > 2:
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "pp"))
        group, place, replica = (
            mesh["pp"].get_group(),
            mesh["pp"].get_local_rank(),
            mesh["dp"].get_local_rank(),
        )
    untied(whole)
    parts = list(PARTS[model](whole).items())
    count = 2 if layout == "one" else 4
    share = len(parts) // count
    stages = []
    for number in own_stages(place, 2, layout):
        module: nn.Module = Stage(dict(parts[number * share : (number + 1) * share]), way.counted)
        if world > 2:
            module = nn.parallel.DistributedDataParallel(
                module, process_group=mesh["dp"].get_group(), broadcast_buffers=False
            )
        stages.append(PipelineStage(module, number, count, torch.device("cpu"), group=group))
    schedule = getattr(schedules, kind)(
        stages[0] if layout == "one" else stages, MICROBATCHES, loss_fn=lossed
    )
    weights = [weight for stage in stages for weight in stage.submod.parameters()]
    optimizer = way.optimizer(weights, lr=1e-2)
    tracer = attach(schedule, LOGS, folder, optimizer=optimizer, policy=Policy(action="log"))
    for step in range(steps):
        optimizer.zero_grad(set_to_none=not way.keeps)
        tokens, targets, named = fed(model, batch(model, 1000 * replica + step), step)
        first = any(stage.is_first for stage in stages)
        last = any(stage.is_last for stage in stages)
        schedule.step(
            *((tokens,) if first else ()), **({"target": targets} if last else {}), **named
        )
        optimizer.step()
    tracer.remove()
    return tracer.findings.found
