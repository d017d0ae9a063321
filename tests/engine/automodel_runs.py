"""Scripts in AutoModel's words over real ranks, and the same with nothing but torch and transformers."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bridge.engine import comm
from tests.engine.blocks import VOCAB, small

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
    return nn.functional.cross_entropy(
        logits.view(-1, logits.size(-1)), labels.view(-1), ignore_index=-100
    )


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
    found: Found = {
        "losses": [],
        "parts": pipeline.list_stage_modules(),
        "summary": pipeline.debug_summary(),
    }
    for step in range(STEPS):
        data, losses = batch(step), []
        targets = data["labels"] if pipeline.info.has_last_stage else None
        given = (data["input_ids"],) if pipeline.info.has_first_stage else ()
        output = pipeline.info.schedule.step(
            *given, target=targets, losses=losses, attention_mask=data["attention_mask"]
        )
        found["losses"].append([float(loss) for loss in losses])
        found["output"] = None if output is None else output.shape
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found["weights"] = {
        name: weight.detach().clone()
        for part in pipeline.parts
        for name, weight in part.named_parameters()
    }
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
        every = comm.everyones(
            {"losses": list(map(float, losses)), "eval": list(map(float, again))}
        )
        found.update(
            {name: [value for each in every for value in each[name]] for name in ("losses", "eval")}
        )
        pipeline.step(data["input_ids"], target=data["labels"])
        found.setdefault("twice", float(weight.grad.norm()))
    return found


SENTENCES = {
    "num_sentences": 12,
    "mean_len": 9,
    "std_len": 3,
    "vocab_size": VOCAB,
    "max_sentence_len": 16,
    "seed": 5,
}
FP64 = {
    "param_dtype": "float64",
    "reduce_dtype": "float64",
    "output_dtype": "float64",
    "cast_forward_inputs": True,
}


def recipe(folder: Path, **distributed: Any) -> dict[str, Any]:
    """A recipe for a small Llama in `folder`, in fp64, whose epochs end with a smaller step."""
    return {
        "seed": 7,
        "step_scheduler": {"global_batch_size": 8, "local_batch_size": 4, "num_epochs": 3},
        "model": {
            "_target_": "nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained",
            "pretrained_model_name_or_path": str(folder),
            "torch_dtype": "float64",
        },
        "distributed": {"strategy": "fsdp2", "mp_policy": FP64, **distributed},
        "loss_fn": {"_target_": "nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy"},
        "dataset": {
            "_target_": "nemo_automodel.components.datasets.llm.mock.build_unpacked_dataset",
            **SENTENCES,
        },
        "dataloader": {
            "_target_": "torchdata.stateful_dataloader.StatefulDataLoader",
            "shuffle": True,
        },
        "optimizer": {
            "_target_": "torch.optim.Adam",
            "lr": RATE,
            "betas": [0.9, 0.99],
            "eps": 1e-8,
            "weight_decay": 0.1,
        },
        "lr_scheduler": {"lr_decay_style": "linear", "lr_warmup_steps": 0, "min_lr": 0.0},
        "clip_grad_norm": {"max_norm": 0.5},
    }


def recipes(
    rank: int,
    world: int,
    data: Mapping[str, Any],
    steps: int | None = None,
    resume: str | None = None,
) -> list[tuple[float, float, float]]:
    """Losses, norms and rates of a recipe, from a checkpoint if `resume` is its folder."""
    from bridge.engine.training import Report
    from compat.automodel.dialect import DIALECT
    from compat.automodel.runtime.recipe import open_recipe

    run = open_recipe(DIALECT.read(data, None, world), world)
    if resume:
        run.engine.load_checkpoint(*resume.rsplit("/", 1))
    return [
        (line.loss, line.grad_norm, line.lr)
        for line in run.steps(steps)
        if isinstance(line, Report)
    ]


def recipe_by_hand(
    folder: Path, kind: str = "Adam", **settings: Any
) -> list[tuple[float, float, float]]:
    """The same recipe with nothing but torch and transformers: six steps, of which every second has one batch of four."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).train()
    settings = settings or {"betas": (0.9, 0.99), "weight_decay": 0.1}
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=RATE, **settings)
    drawn, rows, found = random.Random(SENTENCES["seed"]), [], []
    for _ in range(SENTENCES["num_sentences"]):
        length = max(1, min(16, int(drawn.gauss(9, 3))))
        rows.append([*drawn.choices(range(2, VOCAB), k=length), 1])
    for step in range(6):
        order = torch.randperm(12, generator=torch.Generator().manual_seed(7 + step // 2)).tolist()
        batches = (order[:4], order[4:8]) if step % 2 == 0 else (order[8:],)
        total = sum(len(rows[index]) for batch in batches for index in batch)
        rate, loss = RATE * (1 - step / 6), 0.0
        for batch in batches:
            longest = max(len(rows[index]) for index in batch)
            filled = [rows[index] + [0] * (longest - len(rows[index])) for index in batch]
            mask = torch.tensor(
                [[1] * len(rows[index]) + [0] * (longest - len(rows[index])) for index in batch]
            )
            tokens = torch.tensor(filled)
            labels = tokens.where(mask.bool(), -100)
            logits = model(input_ids=tokens, attention_mask=mask, use_cache=False).logits
            part = nn.functional.cross_entropy(
                logits.flatten(0, 1), labels.flatten(), reduction="sum"
            )
            part.backward()
            loss += float(part.detach()) / total
        for weight in (
            model.parameters()
        ):  # divided once, since norms and positions in fp32 round what they are given
            weight.grad /= total
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.param_groups[0]["lr"] = rate
        found.append((loss, norm, rate))
        optimizer.step()
        optimizer.zero_grad()
    return found


def words(folder: Path) -> None:
    """A tokenizer with a word for each byte."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = {
        letter: place + 2
        for place, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    inner = Tokenizer(models.BPE(vocab={"<pad>": 0, "<eos>": 1, **letters}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>"
    ).save_pretrained(folder)
