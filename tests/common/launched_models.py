"""Launches of Megatron and the models that they load: clean pairs with what may differ, and pairs with planted contradictions.

The flags come from what the families compute (`modeling_*.py` of transformers 5.23.0), not from the project's rules.
`python -m tests.common.launched_models [NUMBER [SEED]]` prints what `match` gets wrong, and counts.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

from bridge.api.read import read_config
from bridge.api.source import Source
from bridge.errors import BridgeError
from bridge.translation.match import Match, match

Flags = dict[str, Any]
"""By flag without dashes: the value, True for a flag without one."""
GATED = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe")
FAMILIES = (*GATED, "nemotron", "gpt2")
EXPERTS = ("mixtral", "qwen3_moe")


def draw_pair(draw: Random) -> tuple[str, Flags, dict[str, Any]]:
    """Draw a family, a launch of it, and the config of the model that fits."""
    family = draw.choice(FAMILIES)
    heads = draw.choice([4, 8, 16])
    groups = draw.choice([heads, heads // 2, 2]) if family != "gpt2" else heads
    head = draw.choice([8, 16, 32])
    layers, ffn, words = (
        draw.randint(1, 6),
        draw.choice([96, 128, 256]),
        draw.choice([128, 1000, 5003]),
    )
    length, eps = draw.choice([64, 128]), draw.choice([1e-5, 1e-6])
    tied = draw.choice([True, False]) if family != "gpt2" else True
    base = draw.choice([10000.0, 500000.0])
    flags: Flags = {
        "num-layers": layers, "hidden-size": heads * head, "num-attention-heads": heads, "ffn-hidden-size": ffn,
        "vocab-size": words, "seq-length": length, "max-position-embeddings": 2 * length, "norm-epsilon": eps,
        "hidden-dropout": 0.0, "attention-dropout": 0.0, "micro-batch-size": 1, "global-batch-size": 8, "lr": 1e-4,
        "train-iters": 100, "make-vocab-size-divisible-by": draw.choice([1, 64, 128]),
    }  # fmt: skip
    model: dict[str, Any] = {
        "model_type": family, "num_hidden_layers": layers, "hidden_size": heads * head,
        "num_attention_heads": heads, "num_key_value_heads": groups, "intermediate_size": ffn, "vocab_size": words,
        "max_position_embeddings": 2 * length, "rms_norm_eps": eps, "tie_word_embeddings": tied, "rope_theta": base,
        "attention_dropout": 0.0, "hidden_act": "silu", "initializer_range": 0.02,
    }  # fmt: skip
    if family == "gpt2":
        names = ("n_layer", "n_embd", "n_head", "n_inner", "n_positions", "layer_norm_epsilon")
        old = (
            "num_hidden_layers",
            "hidden_size",
            "num_attention_heads",
            "intermediate_size",
            "max_position_embeddings",
        )
        sizes = {new: model[name] for new, name in zip(names, (*old, "rms_norm_eps"), strict=True)}
        drops = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
        return family, flags, {"model_type": family, "vocab_size": words, **sizes, **drops}
    flags |= {
        "normalization": "RMSNorm", "position-embedding-type": "rope", "rotary-base": int(base),
        "disable-bias-linear": True, "swiglu": True,
    }  # fmt: skip
    if not tied:
        flags["untie-embeddings-and-output-weights"] = True
    if groups < heads:
        flags |= {"group-query-attention": True, "num-query-groups": groups}
    if family == "nemotron":
        share = draw.choice([0.5, 1.0])
        model |= {
            "norm_eps": model.pop("rms_norm_eps"),
            "hidden_act": "relu2",
            "partial_rotary_factor": share,
        }
        del flags["swiglu"]
        flags |= {
            "normalization": "LayerNorm",
            "apply-layernorm-1p": True,
            "squared-relu": True,
            "rotary-percent": share,
        }
    if family == "qwen2":
        flags["add-qkv-bias"] = True
    if family in ("qwen3", "qwen3_moe"):
        model["head_dim"] = draw.choice([8, 16, 32])
        flags |= {"qk-layernorm": True, "kv-channels": model["head_dim"]}
    if family in EXPERTS:
        chosen = draw.choice([2, 3])
        flags |= {"num-experts": 8, "moe-router-topk": chosen, "moe-router-load-balancing-type": "aux_loss",
                  "moe-aux-loss-coeff": 1e-2, "moe-ffn-hidden-size": 32}  # fmt: skip
        model["num_experts_per_tok"] = chosen
        if family == "mixtral":
            model |= {"num_local_experts": 8, "intermediate_size": 32}
        else:
            model |= {
                "num_experts": 8,
                "moe_intermediate_size": 32,
                "norm_topk_prob": draw.choice([True, False]),
            }
            flags |= {} if model["norm_topk_prob"] else {"moe-router-pre-softmax": True}
    return family, flags, model


def add_noise(flags: Flags, draw: Random) -> None:
    """Change what does not matter once weights are loaded."""
    noise: list[Flags] = [
        {"init-method-std": 0.01}, {"bf16": True}, {"fp16": True}, {"seq-length": 32}, {"weight-decay": 0.1},
        {"use-distributed-optimizer": True}, {"recompute-granularity": "selective"}, {"no-rope-fusion": True},
    ]  # fmt: skip
    if "rotary-base" in flags:
        noise.append({"max-position-embeddings": 4096})
    for one in draw.sample(noise, draw.randint(1, 4)):
        if not ("bf16" in one and "fp16" in flags) and not ("fp16" in one and "bf16" in flags):
            flags |= one


PLANTS: dict[str, Callable[[Flags, str], Flags | None]] = {
    "num_layers": lambda flags, family: {"num-layers": flags["num-layers"] + 1},
    "hidden_size": lambda flags, family: {"hidden-size": flags["hidden-size"] * 2},
    "ffn_hidden_size": lambda flags, family: (
        {"ffn-hidden-size": flags["ffn-hidden-size"] * 2} if family not in EXPERTS else None
    ),
    "vocab_size": lambda flags, family: {"vocab-size": flags["vocab-size"] * 2},
    "norm_epsilon": lambda flags, family: {"norm-epsilon": 1e-12},
    "normalization": lambda flags, family: (
        {"normalization": "LayerNorm"} if flags.get("normalization") == "RMSNorm" else None
    ),
    "rotary_base": lambda flags, family: (
        {"rotary-base": flags["rotary-base"] * 10} if "rotary-base" in flags else None
    ),
    "rotary_percent": lambda flags, family: (
        {"rotary-percent": 0.25} if "rotary-base" in flags else None
    ),
    "use_rope_scaling": lambda flags, family: (
        {"use-rope-scaling": True} if "rotary-base" in flags else None
    ),
    "position_embedding_type": lambda flags, family: (
        {"position-embedding-type": "learned_absolute"} if "rotary-base" in flags else None
    ),
    "num_query_groups": lambda flags, family: {
        "group-query-attention": True,
        "num-query-groups": 1,
    },
    "untie_embeddings_and_output_weights": lambda flags, family: (
        {"untie-embeddings-and-output-weights": None}
        if "untie-embeddings-and-output-weights" in flags
        else {"untie-embeddings-and-output-weights": True}
    ),
    "add_qkv_bias": lambda flags, family: (
        {"add-qkv-bias": None if "add-qkv-bias" in flags else True} if family != "gpt2" else None
    ),
    "add_bias_linear": lambda flags, family: (
        {"disable-bias-linear": None if "disable-bias-linear" in flags else True}
        if family not in EXPERTS
        else None
    ),
    "swiglu": lambda flags, family: (
        {"swiglu": None, "no-bias-gelu-fusion": True} if "swiglu" in flags else None
    ),
    "qk_layernorm": lambda flags, family: (
        {"qk-layernorm": None if "qk-layernorm" in flags else True}
    ),
    "kv_channels": lambda flags, family: {"kv-channels": 64},
    "layernorm_zero_centered_gamma": lambda flags, family: (
        {"apply-layernorm-1p": None if "apply-layernorm-1p" in flags else True}
    ),
    "num_experts": lambda flags, family: {"num-experts": 4} if family in EXPERTS else None,
    "moe_ffn_hidden_size": lambda flags, family: (
        {"moe-ffn-hidden-size": 64} if family in EXPERTS else None
    ),
    "moe_router_topk": lambda flags, family: {"moe-router-topk": 4} if family in EXPERTS else None,
    "moe_router_pre_softmax": lambda flags, family: (
        {"moe-router-pre-softmax": None if "moe-router-pre-softmax" in flags else True}
        if family in EXPERTS
        else None
    ),
    "seq_length": lambda flags, family: (
        {"seq-length": 8192, "max-position-embeddings": 8192} if "rotary-base" in flags else None
    ),
    "max_position_embeddings": lambda flags, family: (
        {"max-position-embeddings": 8192} if family == "gpt2" else None
    ),
    "hidden_dropout": lambda flags, family: {"hidden-dropout": 0.1},
    "attention_dropout": lambda flags, family: {"attention-dropout": None},
}
"""By setting: the flags that contradict the model, None for a flag to leave out; nothing where the family has no such flag."""
SPELLED = {
    "norm_epsilon": {"layernorm_epsilon"},
    "num_query_groups": {"num_query_groups", "group_query_attention"},
    "vocab_size": {"vocab_size"},
    "use_rope_scaling": {"use_rope_scaling"},
    "moe_router_pre_softmax": {"moe_router_pre_softmax", "moe_router_score_function"},
    "hidden_size": {"hidden_size"},
}
"""Settings that name a contradiction, where they are not the flag's own."""


def judge(flags: Flags, model: dict[str, Any], folder: Path) -> Match:
    """Hold the launch against the model; raises `BridgeError` if Megatron refuses the launch."""
    words = (
        word
        for flag, value in flags.items()
        for word in (f"--{flag}", *([] if value is True else [str(value)]))
    )
    (folder / "launch.args").write_text(" ".join(words))
    (folder / "config.json").write_text(json.dumps(model))
    launch, other = (
        read_config(Source(str(folder / name))) for name in ("launch.args", "config.json")
    )
    return match(launch, other)


def wrong_pairs(seeds: range, folder: Path, counts: Counter[str]) -> Iterator[str]:
    """Yield what `match` gets wrong in the pairs with these seeds: each a clean one, and one with one to three contradictions,
    all of which have to be named, and mended by the settings that it gives.
    """
    for seed in seeds:
        draw = Random(seed)
        family, flags, model = draw_pair(draw)
        add_noise(flags, draw)
        counts["clean"] += 1
        alarms = judge(flags, model, folder).contradictions
        if alarms:
            counts["clean, alarmed"] += 1
            yield f"{seed} {family}: {[(row.path, row.change, row.message) for row in alarms]}"
        planted = []
        for name in sorted(draw.sample(sorted(PLANTS), 3)):
            change = PLANTS[name](flags, family)
            # A launch without rotary positions reads none of their flags.
            rotary = (
                name.startswith(("rotary", "use_rope")) and "position_embedding_type" in planted
            )
            if change and not rotary:
                flags = {
                    flag: value for flag, value in {**flags, **change}.items() if value is not None
                }
                planted.append(name)
        if not planted:
            continue
        counts["planted"] += len(planted)
        try:
            found = judge(flags, model, folder)
        except BridgeError as error:
            counts["planted, in a launch that Megatron refuses"] += len(planted)
            counts[f"refused: {str(error)[:60]}"] += 1
            continue
        named = {path for row in found.findings for path in (row.path, *row.about)}
        for name in planted:
            if named.isdisjoint(SPELLED.get(name, {name})):
                counts["planted, not named"] += 1
                yield f"{seed} {family}: {name} of {planted} is not in {sorted(named)}"
        if found.changes and found.fixed and not _fits(found, model, folder):
            counts["not mended"] += 1
            yield f"{seed} {family}: {planted}: {dict(found.changes)} does not mend it"


def _fits(found: Match, model: dict[str, Any], folder: Path) -> bool:
    """Whether the launch with the settings that are named has no contradiction left but those that no setting mends."""
    assert found.fixed is not None
    (folder / "fixed.args").write_text(found.fixed.text("flags"))
    fixed, other = (
        read_config(Source(str(folder / name))) for name in ("fixed.args", "config.json")
    )
    left = {row.id for row in match(fixed, other).contradictions}
    return left <= {row.id for row in found.contradictions if not row.about}


def main() -> None:
    """Print what is wrong, and counts."""
    number, first = (*map(int, sys.argv[1:3]), *(300, 0)[len(sys.argv) - 1 :])[:2]
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        for problem in wrong_pairs(range(first, first + number), Path(folder), counts):
            print(problem, flush=True)
    print(dict(counts))


if __name__ == "__main__":
    main()
