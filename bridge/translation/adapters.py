"""Adapters as a source of a run: peft's adapter_config.json, and what says that frozen weights are quantised."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bridge.errors import BridgeError, ConfigError
from bridge.files import parse, read_text
from bridge.layout.memory.adapters import ALL
from bridge.plan.plan import Plan

FILE, SIGN = "adapter_config.json", "peft_type"
MODULES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("q_proj", "q_b_proj"), ("query",)),
    "k_proj": ("key",),
    "v_proj": ("value",),
    **dict.fromkeys(("c_attn", "query_key_value", "qkv_proj", "Wqkv"), ("query", "key", "value")),
    **dict.fromkeys(("o_proj", "out_proj", "dense"), ("dense",)),
    **dict.fromkeys(
        ("gate_proj", "up_proj", "gate_up_proj", "fc1", "c_fc", "dense_h_to_4h", "w1", "w3"),
        ("mlp_in",),
    ),
    **dict.fromkeys(("down_proj", "fc2", "dense_4h_to_h", "w2"), ("mlp_out",)),
    "c_proj": ("dense", "mlp_out"),
    "lm_head": ("output",),
}
"""The plan's targets, by the name of a module in transformers."""
LINEAR = "all-linear"
FUSED = ("c_attn", "query_key_value", "qkv_proj", "Wqkv", "gate_up_proj")
BYTES_4, BYTES_4_DOUBLE, BYTES_8 = 0.5 + 4 / 64, 0.5 + 1 / 64 + 4 / (64 * 256), 1.0
"""Bytes of a quantised element in bitsandbytes: blocks of 64 elements have a scale in fp32, or in 8 bits with a
scale in fp32 for each 256 of them.
"""


def split_adapters(names: Sequence[str]) -> tuple[tuple[str, ...], Mapping[str, Any]]:
    """Return the sources that are no adapters, and the data of the one that is; empty if none is.

    Raises `BridgeError` for two of them, and for adapters that are not LoRA.
    """
    others, found = list[str](), list[Mapping[str, Any]]()
    for name in names:
        path = Path(name) / FILE if Path(name).is_dir() else Path(name)
        data = None
        if path.is_file() and path.suffix == ".json":
            data = parse(read_text(path), str(path), ".json").data
        if isinstance(data, Mapping) and SIGN in data:
            found.append(data)
            if data[SIGN] != "LORA":
                raise ConfigError(
                    f"{path}: {SIGN}: found {data[SIGN]!r}, expected LORA, the adapters that are counted"
                )
        else:
            others.append(name)
    if len(found) > 1:
        raise BridgeError(
            f"estimate: found {len(found)} adapters, expected one; leave the others out"
        )
    return tuple(others), found[0] if found else {}


def plan_with_adapters(plan: Plan, data: Mapping[str, Any]) -> Plan:
    """Return `plan` with the adapters that `data` describes; as it is without data."""
    if not data:
        return plan
    targets = data.get("target_modules")
    if targets is None or (isinstance(targets, str) and targets != LINEAR):
        raise ConfigError(
            f"target_modules: found {targets!r}, expected a list of modules or {LINEAR!r}; write out"
            " the modules"
        )
    chosen = ALL if targets == LINEAR else [
        target for name in targets for target in MODULES.get(name.rpartition(".")[2], ())
    ]  # fmt: skip
    return Plan.of(
        {
            **plan.values(),
            "adapters.rank": data.get("r", 8),
            "adapters.dropout": data.get("lora_dropout") or None,
            "adapters.targets": tuple(dict.fromkeys(chosen)) or None,
        }
    )


def uncounted_adapters(data: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each setting of the adapters whose memory is not counted, or otherwise."""
    targets = data.get("target_modules")
    for name in targets if isinstance(targets, list) else ():
        last = name.rpartition(".")[2]
        if last not in MODULES:
            yield f"target_modules: an adapter of {name} is not counted"
        elif last in FUSED:
            yield f"target_modules: the adapter of {name} is counted as one for each part of it"
    if data.get("modules_to_save"):
        yield f"modules_to_save: copies of {', '.join(data['modules_to_save'])} are not counted"
    for name in ("use_dora", "rank_pattern"):
        if data.get(name):
            yield f"{name}: not counted"
    if data.get("bias") not in (None, "none"):
        yield "bias: biases that are trained are not counted"


def bytes_of_quantised(model: Path | None, arguments: Mapping[str, Any]) -> float:
    """Number of bytes of an element of a quantised matrix, by the model's own config or by arguments of the run; 0
    if nothing is quantised.
    """
    settings = dict(arguments)
    path = model / "config.json" if model is not None else None
    if path is not None and path.is_file():
        data = parse(read_text(path), str(path), ".json").data
        settings |= data.get("quantization_config") or {}
    if settings.get("load_in_4bit"):
        return BYTES_4_DOUBLE if settings.get("bnb_4bit_use_double_quant") else BYTES_4
    return BYTES_8 if settings.get("load_in_8bit") else 0.0
