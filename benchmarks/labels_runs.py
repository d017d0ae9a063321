"""The stacks of `labels.py`: configs that train, the settings that may change, and how each stack trains five steps."""

from __future__ import annotations

import copy
import hashlib
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import compat
from bridge.plan.section import fields

Result = Mapping[str, Any]
VOCAB, WIDTH, TOKENS, SAMPLES = 64, 32, 16, 19


def result(losses: list[float], first: Mapping[str, Tensor], last: Mapping[str, Tensor]) -> Result:
    """Return what two runs are compared by: losses, and first and last weights."""
    names = sorted(last)
    flat = torch.cat([last[name].detach().double().flatten() for name in names])
    start = torch.cat([first[name].detach().double().flatten() for name in names])
    digest = hashlib.sha256(flat.numpy().tobytes() + repr(losses).encode()).hexdigest()
    shapes = [(name, tuple(last[name].shape)) for name in names]
    ends = {"first": start.numpy(), "last": flat.numpy()}
    return {"steps": len(losses), "losses": losses, "shapes": shapes, "bits": digest, **ends}


def distance(one: Result, other: Result) -> float:
    """Return how far the updates and the losses of two runs are from each other, relative to those of the first run."""
    moved, apart = one["last"] - one["first"], other["last"] - one["last"]
    losses = [
        abs(a - b) / max(abs(a), 1e-12) for a, b in zip(one["losses"], other["losses"], strict=True)
    ]
    return float(max((apart**2).sum() ** 0.5 / max((moved**2).sum() ** 0.5, 1e-30), *losses))


# DeepSpeed

ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.5, "torch_adam": True}}
FILE: Mapping[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5,
    "optimizer": ADAMW,
}


def _file(**more: Any) -> dict[str, Any]:
    return {**copy.deepcopy(dict(FILE)), **more}


def _scheduled(name: str, **params: Any) -> dict[str, Any]:
    return _file(scheduler={"type": name, "params": params})


FILES: Mapping[str, dict[str, Any]] = {
    "fp32": _file(),
    "level 1": _file(zero_optimization={"stage": 1}),
    "level 2": _file(zero_optimization={"stage": 2}),
    "level 3": _file(zero_optimization={"stage": 3}),
    "bf16, level 1": _file(zero_optimization={"stage": 1}, bf16={"enabled": True}),
    "bf16, level 3": _file(zero_optimization={"stage": 3}, bf16={"enabled": True}),
    "fp16, level 2": _file(
        zero_optimization={"stage": 2}, fp16={"enabled": True, "initial_scale_power": 8}
    ),
    "autocast": _file(
        zero_optimization={"stage": 1}, torch_autocast={"enabled": True, "dtype": "bfloat16"}
    ),
    "SGD": _file(optimizer={"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9}}),
    "Adagrad": _file(optimizer={"type": "Adagrad", "params": {"lr": 1e-2}}),
    "WarmupLR": _scheduled("WarmupLR", warmup_min_lr=1e-3, warmup_max_lr=1e-2, warmup_num_steps=4),
    "WarmupDecayLR": _scheduled(
        "WarmupDecayLR", total_num_steps=6, warmup_max_lr=1e-2, warmup_num_steps=3
    ),
    "WarmupCosineLR": _scheduled("WarmupCosineLR", total_num_steps=6, warmup_num_steps=3),
    "OneCycle": _scheduled(
        "OneCycle", cycle_min_lr=1e-3, cycle_max_lr=1e-2, cycle_first_step_size=3
    ),
    "LRRangeTest": _scheduled("LRRangeTest", lr_range_test_min_lr=1e-3, lr_range_test_step_size=2),
}
SCRIPTED = (
    *(
        "code",
        "sequence_parallel_size",
        "data_parallel_size",
        "pipeline",
        "tensor_parallel",
        "expert_parallel",
    ),
    *("autotuning", "gradient_allreduce_op"),
)
"""Sections and keys that need more than one rank, a model of their own, or the launcher."""
PRIVATE = ("wandb", "comet", "tensorboard", "nebula", "datastates_ckpt")
"""Sections that need a package or an account."""
VALUES: Mapping[str, Mapping[str, list[Any]]] = {
    "deepspeed": {
        "optimizer.params.betas": [[0.8, 0.99]],
        "optimizer.type": ["SGD", "Adam"],
        "communication_data_type": ["fp32", "bf16"],
        "progressive_layer_drop": [{"enabled": False, "theta": 0.5}],
        "curriculum_learning": [{"enabled": False}],
        "csv_monitor.output_path": ["/tmp/labels"],
        "csv_monitor.job_name": ["labels"],
        "flops_profiler.output_file": ["/tmp/labels.flops"],
        "gradient_allreduce_op": ["sum", "avg"],
        "scheduler.type": ["WarmupLR", "OneCycle"],
        "zero_optimization.leaf_module.classes": [["torch.nn.Linear"]],
        "data_types.grad_accum_dtype": ["fp32", "bf16"],
        "aio.block_size": [65536],
    },
    "megatron": {},
    "huggingface": {},
}


class Tokens(nn.Module):
    """A small language model that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCAB, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the mean loss of the next token."""
        hidden = self.words(tokens[:, :-1])
        mixed = (
            hidden.cumsum(1)
            / torch.arange(1, hidden.shape[1] + 1, dtype=hidden.dtype)[None, :, None]
        )
        hidden = hidden + self.down(F.gelu(self.up(self.norm(mixed))))
        return F.cross_entropy(self.out(hidden).float().flatten(0, 1), tokens[:, 1:].flatten())


def samples(count: int, tokens: int, vocab: int) -> list[Tensor]:
    """Return the same samples at each call."""
    generator = torch.Generator().manual_seed(7)
    return list(torch.randint(1, vocab, (count, tokens), generator=generator))


def train_deepspeed(source: Any, steps: int) -> Result:
    """Train with `deepspeed.initialize` as a script of users does, on the config as it is."""
    import deepspeed
    from deepspeed.runtime.dataloader import RepeatingLoader

    os.environ.update(LOCAL_RANK="0", RANK="0", WORLD_SIZE="1")
    alone = {"init_method": "tcp://127.0.0.1:0", "rank": 0, "world_size": 1}
    deepspeed.comm.init_distributed("gloo", auto_mpi_discovery=False, verbose=False, **alone)
    torch.manual_seed(1)
    model = Tokens()
    first = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    engine, _, loader, _ = deepspeed.initialize(
        model=model,
        model_parameters=list(model.parameters()),
        config=copy.deepcopy(source),
        training_data=samples(SAMPLES, TOKENS, VOCAB),
        dist_init_required=False,
    )
    rows, losses = iter(RepeatingLoader(loader)), list[float]()
    while engine.global_steps < steps and len(losses) < MOST:
        loss = engine(next(rows).to(engine.device))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    from deepspeed.utils import safe_get_full_fp32_param

    last = {}
    for name, weight in engine.module.named_parameters():
        whole = safe_get_full_fp32_param(weight) if engine.zero_optimization() else None
        last[name] = (weight if whole is None else whole).detach().clone()
    return result(losses, first, last)


MOST = 100
"""Largest number of microbatches of a run."""


def _sections(
    schema: Any, known: Callable[[str], bool], section: Callable[[str], str]
) -> dict[str, tuple[str, ...]]:
    found: dict[str, list[str]] = {}
    for path in fields(schema):
        if known(path):
            found.setdefault(section(path), []).append(path)
    return {name: tuple(paths) for name, paths in found.items()}


def _put(source: Mapping[str, Any], path: str, value: Any) -> dict[str, Any]:
    found = copy.deepcopy(dict(source))
    place, (*above, last) = found, path.split(".")
    for key in above:
        place = place.setdefault(key, {})
    place[last] = value
    return found


def _format(source: Mapping[str, Any]) -> str:
    half = any(
        source.get(name, {}).get("enabled")
        for name in ("bf16", "bfloat16", "fp16", "torch_autocast")
    )
    return "half" if half else "fp32"


def deepspeed_bench(bench: Any) -> Any:
    """Return the bench of DeepSpeed."""
    from compat.deepspeed.runtime.trainers import load_deepspeed

    load_deepspeed()
    dialect, version = compat.load("deepspeed"), "0.19.8"
    known = lambda path: (  # noqa: E731
        path.split(".")[0] not in (*SCRIPTED, *PRIVATE)
        and dialect.knows(path, True, version, "file")
    )
    return bench(
        "deepspeed",
        FILES,
        _sections(
            dialect.schema, known, lambda path: path.split(".")[0] if "." in path else "the top"
        ),
        lambda source: dialect.read(source, version, 1),
        _put,
        train_deepspeed,
        _format,
        version,
    )


# Megatron-Core

FLAGS: Mapping[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "ffn_hidden_size": 64,
    "seq_length": TOKENS,
    "max_position_embeddings": TOKENS,
    "micro_batch_size": 2,
    "global_batch_size": 4,
    "lr": 1e-2,
    "train_iters": 6,
    "lr_decay_style": "cosine",
    "lr_decay_iters": 6,
    "lr_warmup_iters": 2,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "tokenizer_type": "NullTokenizer",
    "vocab_size": VOCAB,
    "transformer_impl": "local",
    "no_persist_layer_norm": True,
    "no_gradient_accumulation_fusion": True,
    "mock_data": True,
}
LLAMA = {
    "group_query_attention": True,
    "num_query_groups": 2,
    "swiglu": True,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "position_embedding_type": "rope",
    "untie_embeddings_and_output_weights": True,
}
LAUNCHES: Mapping[str, dict[str, Any]] = {
    "gpt2": {**FLAGS, "position_embedding_type": "learned_absolute"},
    "llama": {**FLAGS, **LLAMA},
    "llama, bf16": {**FLAGS, **LLAMA, "bf16": True},
    "llama, sharded": {**FLAGS, **LLAMA, "bf16": True, "use_distributed_optimizer": True},
    "mixtral": {
        **FLAGS,
        **LLAMA,
        "num_experts": 4,
        "moe_router_topk": 2,
        "moe_aux_loss_coeff": 0.01,
    },
    "sgd": {**FLAGS, **LLAMA, "optimizer": "sgd", "sgd_momentum": 0.9},
}
"""Launches by their arguments."""


def train_megatron(source: Any, steps: int) -> Result:
    """Train Megatron-Core's own model, optimizer and schedules as the flags say."""
    from bridge import lift
    from bridge.engine.data import Text
    from bridge.engine.interface import Workload
    from bridge.layout.architecture import Architecture
    from bridge.plan.plan import Plan
    from bridge.verify.measure import batches
    from compat.megatron.runtime.backend import BACKEND, WEIGHTLESS

    config: Any = compat.load("megatron").config(dict(source), "0.16.1", 1, "flags")
    described = Plan.of({**lift(config).values(), **WEIGHTLESS}).model
    load = Workload(
        Architecture.of(described), model=described
    )  # the model takes all fields of the config class
    trainer = BACKEND.open(config, load)
    text = Text.of(None, load.architecture.sequence, load.seed)
    first, losses = dict(trainer.weights()), list[float]()
    for step in range(steps):
        losses.append(trainer.train_batch(batches(text, trainer, step)).loss)
    return result(losses, first, dict(trainer.weights()))


INITIAL = (
    *(
        "init",
        "embedding_init",
        "seed",
        "data_parallel_random",
        "perform_initialization",
        "use_cpu_initialization",
    ),
    "is_hybrid_model",
)
"""Beginnings of arguments of the first weights, which are the same in all runs here. `is_hybrid_model` is one of them: it halves
the factor by which the variance of the output layers' weights is divided (transformer_config.py: output_layer_init_method).
"""


def megatron_bench(bench: Any) -> Any:
    """Return the bench of Megatron-Core. Its package has no training loop, so the arguments are those of its config classes
    and of its scheduler.
    """
    from compat.megatron import options, releases
    from compat.megatron.objects.fields import DDP, OPTIMIZER, PARALLEL, TRANSFORMER
    from compat.megatron.rules.learning_rate import RULE
    from compat.megatron.runtime.backend import BACKEND

    BACKEND.load()
    from compat.megatron.runtime.model import EXPERTS, KERNELS

    # The training loop of Megatron-LM clips queries and keys, not its package.
    fixed = {*KERNELS, *EXPERTS, "qk_clip"}
    fixed |= {
        "hidden_dropout",
        "attention_dropout",
        "use_precision_aware_optimizer",
        "optimizer_cpu_offload",
    }
    dialect, version = compat.load("megatron"), "0.16.1"
    taken = {
        name
        for cls in (PARALLEL, TRANSFORMER, DDP, OPTIMIZER)
        for name in releases.fields(version, cls)
    }
    taken |= {
        *RULE.theirs,
        "micro_batch_size",
        "global_batch_size",
        "num_experts",
        "swiglu",
        "norm_epsilon",
        "add_bias_linear",
    }

    def known(path: str) -> bool:
        return (
            path in taken - fixed
            and not path.startswith(INITIAL)
            and dialect.knows(path, True, version, "flags")
        )

    return bench(
        "megatron",
        LAUNCHES,
        _sections(dialect.schema, known, lambda path: options.groups().get(path, "other")),
        lambda source: dialect.config(dict(source), version, 1, "flags"),
        lambda source, path, value: {**source, path: value},
        train_megatron,
        lambda source: "half" if source.get("bf16") or source.get("fp16") else "fp32",
        version,
    )


# The Trainer of transformers

SIZES: Mapping[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": VOCAB,
    "max_position_embeddings": 32,
}
GPT: Mapping[str, Any] = {
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "vocab_size": VOCAB,
    "n_positions": 32,
}
NONE = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
MODELS: Mapping[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **SIZES, "num_key_value_heads": 2},
    "qwen2": {"model_type": "qwen2", **SIZES, "num_key_value_heads": 2},
    "mistral": {"model_type": "mistral", **SIZES, "num_key_value_heads": 2, "sliding_window": 8},
    "gemma2": {
        "model_type": "gemma2",
        **SIZES,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "sliding_window": 8,
    },
    "mixtral": {"model_type": "mixtral", **SIZES, "num_key_value_heads": 2, "num_local_experts": 4},
    "gpt2": {"model_type": "gpt2", **GPT, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    # A quarter of a head is rotated: of two heads, at two frequencies, so that their base takes effect.
    "gpt_neox": {"model_type": "gpt_neox", **SIZES, **NONE, "num_attention_heads": 2},
}


def train_transformers(source: Any, steps: int) -> Result:
    """Train a model that is built from the config with transformers' Trainer, in fp64."""
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    data = dict(source)
    config = CONFIG_MAPPING[data.pop("model_type")](**data)
    config._experts_implementation = data.get(
        "experts_implementation", "eager"
    )  # the grouped products have no fp64
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config).double()
    rows = [{"input_ids": row, "labels": row} for row in samples(SAMPLES, TOKENS, VOCAB)]
    first = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    losses = list[float]()

    class Watched(Trainer):
        def training_step(self, *given: Any, **named: Any) -> Tensor:
            found: Tensor = super().training_step(*given, **named)
            losses.append(float(found))
            return found

    arguments = TrainingArguments(
        output_dir="/tmp/labels", use_cpu=True, max_steps=steps, per_device_train_batch_size=2, learning_rate=1e-2,
        lr_scheduler_type="constant", report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True, seed=1,
    )  # fmt: skip
    Watched(model=model, args=arguments, train_dataset=rows).train()
    return result(losses, first, dict(model.named_parameters()))


def transformers_bench(bench: Any) -> Any:
    """Return the bench of transformers: settings of a model's config, in sections of the plan."""
    import transformers.trainer  # noqa: F401

    from bridge.plan.families import stands_for

    dialect = compat.load("huggingface")
    stands = stands_for()

    def section(path: str) -> str:
        ours = next(iter(stands.get(path, ())), "other")
        return ours.partition(".")[0] if "." in ours else "other" if ours == "other" else "sizes"

    known = lambda path: path not in ("model_type", "*", "dtype", "torch_dtype")  # noqa: E731
    return bench(
        "huggingface",
        MODELS,
        _sections(dialect.schema, known, section),
        lambda source: dialect.read(dict(source), None, 1),
        lambda source, path, value: {**source, path: value},
        train_transformers,
        lambda source: "fp64",
        "",
    )


BENCHES: Mapping[str, Callable[[Any], Any]] = {
    "deepspeed": deepspeed_bench,
    "megatron": megatron_bench,
    "huggingface": transformers_bench,
}
"""Functions that load a stack and return its bench."""
