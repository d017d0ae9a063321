"""Configs written for `benchmarks/verify.py`, in the manner of public ones: launches of Megatron, configs of DeepSpeed, recipes.

Those of `LAUNCHES` and `FILES` are clean: both stacks have all that they ask for, so that their verdict is to be "same".
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RELEASES = {"megatron": "0.16.1", "deepspeed": "0.19.8"}
EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@dataclass(frozen=True)
class Case:
    """A file's text, the stack it is of and that to translate to, what is special about it, and what else its reader is told."""

    name: str
    words: str
    dialect: str
    text: str
    to: str
    world: int = 2
    version: str | None = None
    code: tuple[str, ...] = ()
    auto: tuple[str, ...] = ()
    suffix: str = ".args"
    lenient: bool = False
    clean: bool = field(default=False, compare=False)


RATE = "--lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-decay-iters 1000 --lr-warmup-iters 100 --train-iters 1000"
COURSE = f"{RATE} --weight-decay 0.1 --clip-grad 1.0 --adam-beta2 0.95 --attention-dropout 0 --hidden-dropout 0"
SIZES = "--hidden-size 512 --num-attention-heads 8 --ffn-hidden-size 1024 --seq-length 512 --max-position-embeddings 512"
BATCH = "--micro-batch-size 2 --global-batch-size 8"
LLAMA = (
    "--group-query-attention --num-query-groups 2 --swiglu --normalization RMSNorm --norm-epsilon 1e-5 --disable-bias-linear"
    " --position-embedding-type rope --rotary-base 500000 --untie-embeddings-and-output-weights"
)
GPT2 = "--position-embedding-type learned_absolute"
RAMP = "--weight-decay-incr-style linear --start-weight-decay 0.01 --end-weight-decay 0.5"
EXPERTS = "--num-experts 8 --moe-router-topk 2 --moe-aux-loss-coeff 0"
SHARDED = "--bf16 --use-distributed-optimizer"
FULLY = (
    "--use-distributed-optimizer --use-megatron-fsdp --ckpt-format fsdp_dtensor --no-gradient-accumulation-fusion"
    " --data-parallel-sharding-strategy optim_grads_params"
)
LAUNCHES: Mapping[str, tuple[str, str]] = {
    "llama": (
        "grouped queries, rotary, gate, RMSNorm, distributed optimizer",
        f"{LLAMA} {SHARDED}",
    ),
    "llama in fp32": ("fp32, no ZeRO", LLAMA),
    "llama, weights sharded": ("Megatron-FSDP", f"{LLAMA} --bf16 {FULLY}"),
    "llama, gradients sharded": (
        "Megatron-FSDP, weights whole",
        f"{LLAMA} --bf16 {FULLY.removesuffix('_params')}",
    ),
    "llama, two tensor ranks": (
        "tensor parallel",
        f"{LLAMA} {SHARDED} --tensor-model-parallel-size 2",
    ),
    "llama, sequence parallel": (
        "tensor and sequence parallel",
        f"{LLAMA} {SHARDED} --tensor-model-parallel-size 2 --sequence-parallel",
    ),
    "llama, two stages": ("pipeline", f"{LLAMA} {SHARDED} --pipeline-model-parallel-size 2"),
    "llama, recompute": (
        "pipeline, full recompute",
        f"{LLAMA} {SHARDED} --pipeline-model-parallel-size 2"
        " --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ),
    "llama, interleaved": (
        "interleaved pipeline",
        f"{LLAMA} {SHARDED} --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2",
    ),
    "mixtral": (
        "8 experts, 2 for each token, grouped queries, rotary",
        f"{LLAMA} {EXPERTS} {SHARDED}",
    ),
    "mixtral, one expert for each token": (
        "8 experts, 1 for each token",
        f"{LLAMA} {EXPERTS} {SHARDED} --moe-router-topk 1 --moe-router-pre-softmax",
    ),
    "mixtral in fp32": ("experts in fp32", f"{LLAMA} {EXPERTS}"),
    "gpt2": ("learned positions, LayerNorm, biases, tied", f"{GPT2} {SHARDED}"),
    "gpt2, two stages": (
        "pipeline, tied embeddings",
        f"{GPT2} {SHARDED} --pipeline-model-parallel-size 2",
    ),
    "one key head": ("multi-query attention", f"{LLAMA} {SHARDED} --num-query-groups 1"),
    "half rotary": ("rotary on half of each head", f"{LLAMA} {SHARDED} --rotary-percent 0.5"),
    "rotary base 10,000": (
        "rotary, all heads with keys of their own",
        f"{LLAMA} {SHARDED} --num-query-groups 8 --rotary-base 10000",
    ),
    "normed queries": ("norms of queries and keys", f"{LLAMA} {SHARDED} --qk-layernorm"),
    "wide heads": ("heads wider than hidden over heads", f"{LLAMA} {SHARDED} --kv-channels 128"),
    "biases of queries": (
        "biases of queries, keys and values alone",
        f"{LLAMA} {SHARDED} --add-qkv-bias",
    ),
    "linear decay": ("linear decay", f"{LLAMA} {SHARDED} --lr-decay-style linear"),
    "constant rate": ("constant after a warmup", f"{LLAMA} {SHARDED} --lr-decay-style constant"),
    "inverse square root": (
        "inverse square root",
        f"{LLAMA} {SHARDED} --lr-decay-style inverse-square-root",
    ),
    "wsd": (
        "warmup, stable, decay",
        f"{LLAMA} {SHARDED} --lr-decay-style WSD --lr-wsd-decay-style linear --lr-wsd-decay-iters 200",
    ),
    "sgd": ("SGD with momentum, no ZeRO", f"{LLAMA} --bf16 --optimizer sgd --sgd-momentum 0.9"),
    "fp16, constant scale": ("fp16 with a constant scale", f"{LLAMA} --fp16 --loss-scale 128"),
    "no clipping": ("no clipping, no decay", f"{LLAMA} {SHARDED} --clip-grad 0 --weight-decay 0"),
    "no accumulation": ("one microbatch in a step", f"{LLAMA} {SHARDED} --global-batch-size 4"),
}
"""Launches of Megatron with what is special about each; flags that come later win."""
DIFFERING: Mapping[str, tuple[str, str]] = {
    "fp16, dynamic scale": ("fp16 with a dynamic scale", f"{LLAMA} --fp16 --loss-scale-window 500"),
    "decay ramp": ("weight decay that grows", f"{LLAMA} {SHARDED} {RAMP}"),
    "loss per token": ("loss per token", f"{LLAMA} {SHARDED} --calculate-per-token-loss"),
    "squared relu": (
        "squared ReLU without a gate",
        f"{LLAMA.replace('--swiglu', '--squared-relu')} {SHARDED}",
    ),
}
"""Launches that ask for what DeepSpeed has not, or for a model that no family of transformers is."""

ADAMW = {
    "type": "AdamW",
    "params": {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1},
}
FILE: Mapping[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "optimizer": ADAMW,
}
WARMUP = {
    "warmup_min_lr": 0,
    "warmup_max_lr": 1e-3,
    "warmup_num_steps": 100,
    "warmup_type": "linear",
}
ENDING = {**WARMUP, "total_num_steps": 1000}
COSINE = {
    "warmup_num_steps": 100,
    "total_num_steps": 1000,
    "warmup_min_ratio": 0.0,
    "cos_min_ratio": 0.1,
    "warmup_type": "linear",
}
BF16 = {"bf16": {"enabled": True}}


def _zero(stage: int) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage}}


FILES: Mapping[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "fp32": ("fp32, no ZeRO", {}, ()),
    "fp32, stage 1": ("fp32, ZeRO 1", _zero(1), ()),
    "bf16, stage 1": ("bf16, ZeRO 1", {**BF16, **_zero(1)}, ()),
    "fp32, stage 2": ("fp32, ZeRO 2", _zero(2), ()),
    "bf16, stage 2": ("bf16, ZeRO 2", {**BF16, **_zero(2)}, ()),
    "fp32, stage 3": ("fp32, ZeRO 3", _zero(3), ()),
    "bf16, stage 3": ("bf16, ZeRO 3", {**BF16, **_zero(3)}, ()),
    "no decay": (
        "bf16, ZeRO 1, no decay, no clipping",
        {
            **BF16,
            **_zero(1),
            "gradient_clipping": 0.0,
            "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
        },
        (),
    ),
    "SGD": (
        "fp32, SGD",
        {
            "optimizer": {"type": "SGD", "params": {"lr": 1e-2}},
            "zero_allow_untested_optimizer": True,
        },
        (),
    ),
    "stage 1 in a pipeline": (
        "bf16, ZeRO 1, pipeline",
        {**BF16, **_zero(1)},
        ("pipeline_stages=2",),
    ),
    "AutoTP": ("fp32, tensor parallel", {"tensor_parallel": {"autotp_size": 2}}, ()),
    "no accumulation": (
        "bf16, ZeRO 1, one microbatch in a step",
        {**BF16, **_zero(1), "gradient_accumulation_steps": 1},
        (),
    ),
    "fp16, constant scale": (
        "fp16, ZeRO 1, constant scale",
        {"fp16": {"enabled": True, "loss_scale": 128}, **_zero(1)},
        (),
    ),
}
"""Configs of DeepSpeed with what is special about each, and their code parts; all hand over groups: norms do not decay."""
OTHERS: Mapping[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "bf16, stage 1, WarmupLR": (
        "bf16, ZeRO 1, WarmupLR",
        {**BF16, **_zero(1), "scheduler": {"type": "WarmupLR", "params": WARMUP}},
        ("decay_scope=matrices",),
    ),
    "bf16, stage 1, WarmupDecayLR": (
        "bf16, ZeRO 1, WarmupDecayLR",
        {**BF16, **_zero(1), "scheduler": {"type": "WarmupDecayLR", "params": ENDING}},
        ("decay_scope=matrices",),
    ),
    "bf16, stage 1, WarmupCosineLR": (
        "bf16, ZeRO 1, WarmupCosineLR",
        {**BF16, **_zero(1), "scheduler": {"type": "WarmupCosineLR", "params": COSINE}},
        ("decay_scope=matrices",),
    ),
    "bf16, decay of all": ("bf16, ZeRO 1, weight decay of norms too", {**BF16, **_zero(1)}, ()),
    "bf16, stage 0": ("bf16, no ZeRO: a phantom step of DeepSpeed", BF16, ()),
    "pipeline at stage 0": (
        "fp32, pipeline: a wrong norm of DeepSpeed",
        {"gradient_clipping": 0.05},
        ("pipeline_stages=2",),
    ),
    "fp16, dynamic scale": (
        "fp16, ZeRO 1, dynamic scale",
        {"fp16": {"enabled": True}, **_zero(1)},
        (),
    ),
}
RECIPE = """
recipe: TrainFinetuneRecipeForNextTokenPrediction
step_scheduler: {global_batch_size: 8, local_batch_size: 2, max_steps: 1000}
model:
  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_config
  torch_dtype: float32
  config: {pretrained_model_name_or_path: example/decoder}
distributed: {strategy: fsdp2, dp_size: none, tp_size: 1}
optimizer: {_target_: torch.optim.AdamW, lr: 1.0e-3, betas: [0.9, 0.95], weight_decay: 0.1}
"""
MERAK: Mapping[str, Any] = {
    "init": {"pp": 1, "tp": 1, "dp": 2},
    "args": {
        "output_dir": "output",
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 1000,
    },
}


def own() -> Iterator[Case]:
    """All of these; the clean ones first."""
    yield from _launches(LAUNCHES, True)
    yield from _files(FILES, True, ("decay_scope=matrices",))
    yield from _launches(DIFFERING, False)
    yield from _files(OTHERS, False)
    yield Case("AutoModel recipe", "FSDP2", "automodel", RECIPE, "deepspeed", suffix=".yaml")
    fast = (EXAMPLES / "fast_llm" / "zero2.yaml").read_text()
    yield Case(
        "Fast-LLM example", "sharded gradients", "fast_llm", fast, "megatron", suffix=".yaml"
    )
    yield Case(
        "Merak script", "data parallel", "merak", json.dumps(MERAK), "megatron", suffix=".json"
    )


def _launches(rows: Mapping[str, tuple[str, str]], clean: bool) -> Iterator[Case]:
    for name, (words, flags) in rows.items():
        text = f"--num-layers 8 --vocab-size 1000 {SIZES} {BATCH} {COURSE} {flags}"
        yield Case(
            f"Megatron: {name}",
            words,
            "megatron",
            text,
            "deepspeed",
            version=RELEASES["megatron"],
            clean=clean,
        )


def _files(
    rows: Mapping[str, tuple[str, dict[str, Any], tuple[str, ...]]],
    clean: bool,
    said: tuple[str, ...] = (),
) -> Iterator[Case]:
    for name, (words, content, code) in rows.items():
        text, release, told = json.dumps({**FILE, **content}), RELEASES["deepspeed"], (*said, *code)
        yield Case(
            f"DeepSpeed: {name}",
            words,
            "deepspeed",
            text,
            "megatron",
            2,
            release,
            told,
            suffix=".json",
            clean=clean,
        )
