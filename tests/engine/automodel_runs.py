"""Scripts in AutoModel's words over real ranks, and the same with nothing but torch and transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from blocks import VOCAB, small
from torch import Tensor, nn

from bridge import comm

ROWS, STEPS, RATE = 4, 2, 0.01
Found = dict[str, Any]


def batch(step: int) -> dict[str, Tensor]:
    """Rows of tokens with their labels and a mask; the last row is padded."""
    generator = torch.Generator().manual_seed(step)
    tokens, labels = (torch.randint(3, VOCAB, (ROWS, 12), generator=generator) for _ in range(2))
    mask = torch.ones(ROWS, 12, dtype=torch.int64)
    mask[-1, -4:] = 0
    return {"input_ids": tokens, "labels": labels.where(mask.bool(), -100), "attention_mask": mask}


def criterion(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean loss of a microbatch."""
    return nn.functional.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1), ignore_index=-100)


def scripted(rank: int, world: int, name: str, settings: Mapping[str, Any]) -> Found:
    """A script: its own loop and its own optimizer over the parts of its rank."""
    from torch.distributed.device_mesh import init_device_mesh

    from compat.automodel import AutoPipeline

    axes = settings.get("mesh", {"pp": world})
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    given = {key: value for key, value in settings.items() if key != "mesh"}
    pipeline = AutoPipeline(world_mesh=mesh, pp_microbatch_size=1, pp_batch_size=ROWS, **given)
    pipeline.build(small(name).train(), loss_fn=criterion)
    optimizers = [torch.optim.AdamW(part.parameters(), lr=RATE) for part in pipeline.parts]
    found: Found = {"losses": [], "parts": pipeline.list_stage_modules(), "summary": pipeline.debug_summary()}
    for step in range(STEPS):
        data, losses = batch(step), []
        targets = data["labels"] if pipeline.info.has_last_stage else None
        given = (data["input_ids"],) if pipeline.info.has_first_stage else ()
        output = pipeline.info.schedule.step(*given, target=targets, losses=losses, attention_mask=data["attention_mask"])
        found["losses"].append([float(loss) for loss in losses])
        found["output"] = None if output is None else output.shape
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found["weights"] = {name: weight.detach().clone() for part in pipeline.parts for name, weight in part.named_parameters()}
    return found


def plain(name: str) -> Found:
    """The same training in one process with nothing but torch and transformers."""
    model = small(name).train()
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=RATE), []
    for step in range(STEPS):
        losses = []
        for row in range(ROWS):
            data = {key: value[row : row + 1] for key, value in batch(step).items()}
            labels = data.pop("labels")
            loss = criterion(model(**data, use_cache=False).logits, labels)
            loss.backward()
            losses.append(float(loss.detach()))
        found.append(losses)
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": found, "weights": dict(model.named_parameters())}


def evaluated(rank: int, world: int) -> dict[str, Any]:
    """Two data ranks of one stage: a number of the gradients after one batch, two, and one that is scaled; and an evaluation."""
    from torch.distributed.device_mesh import init_device_mesh

    from compat.automodel import PipelineConfig

    mesh, found = init_device_mesh("cpu", (1, world), mesh_dim_names=("pp", "dp")), {}
    config = PipelineConfig(pp_batch_size=ROWS, loss_fn=criterion)
    for scaled in (False, True):
        config.scale_grads_in_schedule = scaled
        pipeline = config.autopipeline(mesh).build(small("llama").eval())
        weight = dict(pipeline.parts[0].named_parameters())["lm_head.weight"]
        data, losses, again = batch(rank), [], []
        pipeline.step(data["input_ids"], target=data["labels"], losses=losses)
        found["scaled" if scaled else "once"] = float(weight.grad.norm())
        held = weight.grad.clone()
        pipeline.info.schedule.eval(data["input_ids"], target=data["labels"], losses=again)
        assert torch.equal(weight.grad, held)
        every = comm.everyones({"losses": list(map(float, losses)), "eval": list(map(float, again))})
        found.update({name: [value for each in every for value in each[name]] for name in ("losses", "eval")})
        pipeline.step(data["input_ids"], target=data["labels"])
        found.setdefault("twice", float(weight.grad.norm()))
    return found
