"""Clean trainings of six families of models in many ways: nothing may be found wrong in any of them.

`python -m tests.trace.clean [WAY ...]` runs them all, or those ways, on two ranks, and prints what was found.
"""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from bridge.trace import attach
from bridge.trace.desync import Policy
from bridge.trace.findings import TraceFinding
from bridge.trace.naming import layers_by_name
from tests.trace import clean_stages
from tests.trace.clean_split import split
from tests.trace.clean_stages import SCHEDULES, SPLIT
from tests.trace.planting import LOGS, Loop, started

STEPS, VOCAB, TOKENS, BATCH = 3, 40, 12, 4
SMALL = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": VOCAB,
}


def gpt2(dropout: float) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    drops = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    return GPT2LMHeadModel(
        GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=VOCAB, n_positions=32, **drops)
    )


def llama(dropout: float) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SMALL, attention_dropout=dropout))


def mixtral(dropout: float) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        **SMALL,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        attention_dropout=dropout,
    )
    return MixtralForCausalLM(config)


def bert(dropout: float) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(**SMALL, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout)
    )


def t5(dropout: float) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {
        "d_model": 16,
        "d_ff": 32,
        "d_kv": 8,
        "num_layers": 2,
        "num_heads": 2,
        "vocab_size": VOCAB,
    }
    return T5ForConditionalGeneration(
        T5Config(**sizes, dropout_rate=dropout, decoder_start_token_id=0)
    )


def vit(dropout: float) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {name: value for name, value in SMALL.items() if name != "vocab_size"}
    config = ViTConfig(
        **sizes, image_size=8, patch_size=4, num_labels=5, hidden_dropout_prob=dropout
    )
    return ViTForImageClassification(config)


MODELS: Mapping[str, Callable[[float], nn.Module]] = {
    "GPT-2": gpt2,
    "Llama": llama,
    "BERT": bert,
    "T5": t5,
    "Mixtral": mixtral,
    "ViT": vit,
}


WHOLE = tuple(name for name in MODELS if name != "T5")
"""Those whose backward pass torch can split in two: it runs T5's shared position bias twice, with a trace or without."""


def batch(model: str, seed: int) -> dict[str, Tensor]:
    """What the model is called with; those of language end in padding."""
    generator = torch.Generator().manual_seed(seed)
    if model == "ViT":
        pixels = torch.randn(BATCH, 3, 8, 8, generator=generator)
        return {"pixel_values": pixels, "labels": torch.randint(5, (BATCH,), generator=generator)}
    tokens = torch.randint(4, VOCAB, (BATCH, TOKENS), generator=generator)
    labels = tokens.clone()
    if model == "BERT":
        hidden = torch.rand(tokens.shape, generator=generator) < 0.3
        hidden[:, 0] = True
        labels, tokens = labels.masked_fill(~hidden, -100), tokens.masked_fill(hidden, 3)
    lengths = torch.randint(TOKENS // 2, TOKENS + 1, (BATCH, 1), generator=generator)
    mask = (torch.arange(TOKENS) < lengths).long()
    return {
        "input_ids": tokens,
        "attention_mask": mask,
        "labels": labels.masked_fill(mask == 0, -100),
    }


@dataclass(frozen=True)
class Way:
    """How a model is trained."""

    wrap: str = "DDP"
    passes: int = 1
    dropout: float = 0.0
    autocast: bool = False
    dtype: torch.dtype = torch.float32
    checkpoint: bool | None = None
    """Reentrant or not; None: nothing is computed again."""
    pairs: bool = False
    """Whether each loss is of two forward passes, beside one of a reference model."""
    evaluates: bool = False
    clip: float | None = None
    told: bool = False
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW
    compiled: bool = False
    keeps: bool = False
    """Whether gradients are set to zeros instead of none."""
    schedule: str = ""
    """Of torch's pipelining."""
    counted: bool = False
    """Whether each stage counts its layers anew."""
    sequence: bool = False
    """Whether tensor ranks see a part of the tokens each in norms."""
    ranks: int = 2
    models: tuple[str, ...] = ()
    """The families that it fits; none named: all."""


WAYS: Mapping[str, Way] = {
    "DDP": Way(),
    "plain": Way("none"),
    "FSDP2": Way("FSDP2"),
    "FSDP2 accumulation": Way("FSDP2", passes=2, told=True),
    "accumulation untold": Way(passes=3),
    "accumulation told, clip": Way(passes=2, told=True, clip=0.1),
    "autocast": Way(autocast=True),
    "bf16": Way(dtype=torch.bfloat16),
    "checkpoint": Way(checkpoint=False, dropout=0.1),
    "checkpoint reentrant": Way(checkpoint=True, dropout=0.1),
    "dropout": Way(dropout=0.1),
    "compile": Way("none", compiled=True),
    "compile DDP": Way(compiled=True),
    "DPO": Way(pairs=True, dropout=0.1),
    "evaluation": Way(evaluates=True, dropout=0.1),
    "SGD, zeros": Way(optimizer=torch.optim.SGD, keeps=True, clip=0.5),
    "accelerate": Way("accelerate", passes=2, dropout=0.1),
    "Trainer": Way("Trainer", passes=2, dropout=0.1),
    "DTensor": Way("DTensor", optimizer=torch.optim.SGD),
    "DTensor dropout, clip": Way("DTensor", dropout=0.1, clip=0.1),
    "DTensor accumulation": Way("DTensor", passes=2, told=True),
    "DTensor sequence": Way("DTensor", sequence=True, models=("Llama",)),
    "DTensor FSDP2": Way("DTensor", ranks=4),
    **{
        f"pipelining {name}": Way(schedule=name, models=WHOLE if name in SPLIT else ())
        for name in SCHEDULES
    },
    "pipelining 1F1B, dropout, SGD": Way(
        schedule="1F1B", dropout=0.1, counted=True, optimizer=torch.optim.SGD, keeps=True
    ),
    "pipelining interleaved, dropout": Way(schedule="interleaved", dropout=0.1, counted=True),
    "pipelining 1F1B, DDP": Way(schedule="1F1B", ranks=4),
}


def trained(rank: int, world: int, model: str, name: str, folder: Path) -> list[tuple[str, str]]:
    """Findings of one run, with their severity."""
    import logging

    warnings.simplefilter("ignore")
    for noisy in ("transformers", "bridge.trace", "accelerate", "torch._dynamo"):
        logging.getLogger(noisy).setLevel(logging.CRITICAL)
    way = WAYS[name]
    torch.manual_seed(1)
    module = MODELS[model](way.dropout).to(way.dtype)
    if way.checkpoint is not None:
        module.gradient_checkpointing_enable({"use_reentrant": way.checkpoint})  # type: ignore[operator]
    if way.checkpoint:
        module.enable_input_require_grads() if model != "ViT" else None  # type: ignore[operator]
    torch.manual_seed(100 + rank)
    if way.wrap == "Trainer":
        return by_trainer(rank, world, module, model, way, folder)
    if way.schedule:
        return told(clean_stages.trained(rank, world, module, model, way, folder, STEPS, batch))
    return by_loop(rank, world, module, model, way, folder)


def by_loop(
    rank: int, world: int, module: nn.Module, model: str, way: Way, folder: Path
) -> list[tuple[str, str]]:
    optimizer: Any = way.optimizer(module.parameters(), lr=1e-2)
    wrapped: Any = module
    backward: Any = torch.Tensor.backward
    around = nullcontext
    if way.wrap == "DDP":
        wrapped = nn.parallel.DistributedDataParallel(
            module, find_unused_parameters=model == "Mixtral"
        )
    elif way.wrap == "FSDP2":
        wrapped, optimizer = sharded(module, way)
    elif way.wrap == "accelerate":
        from accelerate import Accelerator, DistributedDataParallelKwargs

        started(Loop(rank, world))
        kwargs = (
            [DistributedDataParallelKwargs(find_unused_parameters=True)]
            if model == "Mixtral"
            else []
        )
        accelerator = Accelerator(
            cpu=True, gradient_accumulation_steps=way.passes, kwargs_handlers=kwargs
        )
        wrapped, optimizer = accelerator.prepare(module, optimizer)
        backward, around = accelerator.backward, lambda: accelerator.accumulate(wrapped)  # type: ignore[assignment]
    if way.compiled:
        wrapped = torch.compile(wrapped, backend="aot_eager")
    reference = MODELS[model](0.0).eval() if way.pairs else None
    own = rank if way.wrap != "none" else 0
    if way.wrap == "DTensor":
        wrapped, own = split(module, model, world, way.sequence)
        optimizer = way.optimizer(module.parameters(), lr=1e-2)
        torch.manual_seed(100 + own)
    tracer = (
        attach(
            wrapped,
            LOGS,
            folder,
            optimizer=optimizer,
            accumulation=way.passes if way.told else None,
            policy=Policy(action="log"),
        )
        if way.wrap != "none" or rank == 0 or world == 1
        else None
    )
    for step in range(STEPS):
        for place in range(way.passes):
            with around():
                optimizer.zero_grad(
                    set_to_none=not way.keeps
                ) if place == 0 and way.wrap != "accelerate" else None
                with torch.autocast("cpu", torch.bfloat16, way.autocast):
                    loss = loss_of(wrapped, reference, model, 1000 * own + 10 * step + place)
                backward(loss / (1 if way.wrap == "accelerate" else way.passes))
                if place == way.passes - 1 and way.clip:
                    clip(wrapped, way.clip)
                if place == way.passes - 1 or way.wrap == "accelerate":
                    optimizer.step()
                    optimizer.zero_grad() if way.wrap == "accelerate" else None
        if way.evaluates:
            wrapped.eval()
            with torch.no_grad():
                wrapped(**batch(model, 7))
            wrapped.train()
            with torch.no_grad():
                wrapped(**batch(model, 8))
    if tracer is None:
        return []
    tracer.remove()
    return told(tracer.findings.found)


def told(found: Iterable[TraceFinding]) -> list[tuple[str, str]]:
    """Findings in words, with their severity."""
    return [(str(finding), finding.severity) for finding in found]


def clip(module: nn.Module, most: float) -> None:
    """By the norm of all gradients; where torch splits some of them as DTensors and others not, of either kind."""
    kinds: dict[bool, list[nn.Parameter]] = {}
    for weight in module.parameters():
        kinds.setdefault(isinstance(weight, DTensor), []).append(weight)
    for weights in kinds.values():
        nn.utils.clip_grad_norm_(weights, most)


def sharded(module: nn.Module, way: Way) -> tuple[Any, Any]:
    """With FSDP2, block by block."""
    from torch.distributed.fsdp import fully_shard

    for name, block in layers_by_name(module).items():
        if name[-1].isdigit():
            fully_shard(block)
    fully_shard(module)
    return module, way.optimizer(module.parameters(), lr=1e-2)


def loss_of(wrapped: Any, reference: Any, model: str, seed: int) -> Tensor:
    """The model's own loss, or what DPO makes of two passes and a reference."""
    found: Tensor = wrapped(**batch(model, seed)).loss
    if reference is None:
        return found
    other = wrapped(**batch(model, seed + 500_000)).loss
    with torch.no_grad():
        margin = (
            reference(**batch(model, seed)).loss - reference(**batch(model, seed + 500_000)).loss
        )
    return -nn.functional.logsigmoid(other - found + margin)


def by_trainer(
    rank: int, world: int, module: nn.Module, model: str, way: Way, folder: Path
) -> list[tuple[str, str]]:
    from transformers import Trainer, TrainingArguments

    from compat.huggingface.runtime.tracing import TraceCallback

    started(Loop(rank, world))
    rows = [row for seed in range(8) for row in unbatched(batch(model, seed))]
    arguments = TrainingArguments(
        str(folder) + "-out",
        per_device_train_batch_size=2,
        gradient_accumulation_steps=way.passes,
        max_steps=STEPS,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        ddp_find_unused_parameters=model == "Mixtral",
    )
    callback = TraceCallback(LOGS, folder, policy=Policy(action="log"))
    Trainer(module, arguments, train_dataset=rows, callbacks=[callback]).train()
    return told(callback.found)


def unbatched(whole: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    for at in range(BATCH):
        yield {name: tensor[at] for name, tensor in whole.items()}


def main() -> int:
    """Run them, and say what was found; 1 if there is a false alarm."""
    from tests.engine.pool import Pool

    pools, runs, alarms, failed, remarks = {world: Pool(world) for world in (2, 4)}, 0, 0, 0, 0
    for name in sys.argv[1:] or WAYS:
        way = WAYS[name]
        for model in way.models or MODELS:
            with tempfile.TemporaryDirectory() as folder:
                try:
                    ranks = (
                        [trained(0, 1, model, name, Path(folder))]
                        if way.wrap == "none"
                        else pools[way.ranks].run(trained, model, name, Path(folder), timeout=180)
                    )
                    run = list(dict.fromkeys(itertools.chain(*ranks)))
                except Exception as error:
                    failed += 1
                    print(
                        f"{model}, {name}: DID NOT RUN: {str(error).strip().splitlines()[-1][:300]}",
                        flush=True,
                    )
                    pools[way.ranks].close()
                    continue
            faults = [
                text
                for text, severity in run
                if severity == "fault" or text.startswith("check-ended")
            ]
            runs, alarms, remarks = (
                runs + 1,
                alarms + bool(faults),
                remarks + bool(len(run) - len(faults)),
            )
            for text in faults:
                print(f"{model}, {name}: {text}", flush=True)
    print(
        f"{runs} clean runs: {alarms} with a false alarm, {remarks} with remarks; {failed} did not run"
    )
    for pool in pools.values():
        pool.close()
    return int(bool(alarms))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from tests.trace import clean  # the module that other processes find

    raise SystemExit(clean.main())
