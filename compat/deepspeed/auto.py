""" "auto" made explicit: values from the caller, then the rules by which Hugging Face's integrations fill them in."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from bridge.config import fields
from bridge.errors import ConfigError, nearest
from compat.deepspeed.schema import DeepSpeed

REAL = frozenset(
    {
        "zero_optimization.zenflow.select_strategy",
        "zero_optimization.zenflow.select_interval",
        "zero_optimization.zenflow.update_interval",
        "data_types.keep_in_fp32_modules",
        "expert_parallel.score_apply",
        "expert_parallel.combine_impl",
        "expert_parallel.row_weighting_impl",
        "expert_parallel.score_func",
        "expert_parallel.top_k",
        "expert_parallel.routed_scaling_factor",
        "pipeline.stages",
    }
)
"""Keys where "auto" is a value that DeepSpeed itself understands."""

MICRO, STEPS, TOTAL = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"


@dataclass(frozen=True, slots=True)
class Rule:
    """How one "auto" is filled in: the facts it needs, and the value they make."""

    needs: tuple[str, ...]
    value: Callable[..., Any]


def _same(fact: str) -> Rule:
    return Rule((fact,), lambda value: value)


RULES: Mapping[str, Rule] = {
    MICRO: _same("micro_batch"),
    STEPS: _same("accumulation"),
    TOTAL: Rule(("micro_batch", "accumulation", "data_parallel"), lambda micro, steps, ranks: micro * steps * ranks),
    "gradient_clipping": _same("clip"),
    "optimizer.params.lr": _same("lr"),
    "optimizer.params.betas": _same("betas"),
    "optimizer.params.eps": _same("eps"),
    "optimizer.params.weight_decay": _same("weight_decay"),
    "scheduler.params.warmup_min_lr": Rule((), lambda: 0.0),
    "scheduler.params.warmup_max_lr": _same("lr"),
    "scheduler.params.warmup_num_steps": Rule(("warmup_steps",), lambda steps: max(1, steps)),
    "scheduler.params.total_num_steps": _same("total_steps"),
    "fp16.enabled": Rule(("mixed_precision",), lambda precision: precision == "fp16"),
    "bf16.enabled": Rule(("mixed_precision",), lambda precision: precision == "bf16"),
    "zero_optimization.stage": _same("zero_stage"),
    "zero_optimization.offload_optimizer.device": _same("offload_optimizer"),
    "zero_optimization.offload_param.device": _same("offload_param"),
    "zero_optimization.offload_optimizer.nvme_path": _same("nvme_path"),
    "zero_optimization.offload_param.nvme_path": _same("nvme_path"),
    "zero_optimization.reduce_bucket_size": Rule(("hidden_size",), lambda hidden: hidden * hidden),
    "zero_optimization.stage3_prefetch_bucket_size": Rule(("hidden_size",), lambda hidden: int(0.9 * hidden * hidden)),
    "zero_optimization.stage3_param_persistence_threshold": Rule(("hidden_size",), lambda hidden: 10 * hidden),
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": _same("save_16bit"),
}
"""transformers/integrations/deepspeed.py and accelerate/accelerator.py, `_prepare_deepspeed`; hidden_size is the largest one."""

FACTS = frozenset({"world_size", *(fact for rule in RULES.values() for fact in rule.needs)})
"""What the rules may be told; sizes in samples, ranks and optimizer steps."""

_KNOWN_AS: Mapping[str, str] = {
    "micro_batch": MICRO,
    "accumulation": STEPS,
    "lr": "optimizer.params.lr",
    "zero_stage": "zero_optimization.stage",
}
"""Facts that the config itself may hold."""


def resolve(given: Mapping[str, Any], values: Mapping[str, Any] | None = None, **facts: Any) -> dict[str, Any]:
    """`given` with every "auto" replaced: by `values` (by path), then by rule from `facts` (see `FACTS`).

    Raises `ConfigError` that lists every "auto" left over and what would resolve it.
    """
    found, problems = resolved(given, {**(values or {}), **{name: fact for name, fact in facts.items() if fact is not None}})
    ConfigError.raise_if(problems)
    return {**given, **found}


def resolved(given: Mapping[str, Any], values: Mapping[str, Any] | None) -> tuple[dict[str, Any], list[str]]:
    """What each "auto" in `given` becomes by `values` (paths and facts), and a problem for each that stays.

    Without `values` no rule applies: nobody said that one of these integrations will run.
    """
    open_ = [path for path, value in given.items() if value == "auto" and path not in REAL]
    if values is None:
        return {}, [_left(path, {}) for path in open_]
    facts = _facts(given, values)
    found: dict[str, Any] = {}
    for path in open_:
        value = values.get(path) if path in values else _by_rule(path, facts)
        if value is not None:
            found[path] = value
            facts |= {fact: value for fact, known in _KNOWN_AS.items() if known == path}
    left = [_left(path, facts) for path in open_ if path not in found]
    return found, [*_strange(values), *left]


def _facts(given: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """What the caller says, before what the config itself says."""
    own = {fact: values.get(path, given.get(path)) for fact, path in _KNOWN_AS.items()}
    own["accumulation"] = own["accumulation"] if own["accumulation"] is not None else 1
    facts = {fact: value for fact, value in own.items() if value not in (None, "auto")}
    facts |= {fact: value for fact, value in values.items() if fact in FACTS}
    if "world_size" in facts:
        facts.setdefault("data_parallel", facts["world_size"] // _model_ranks(given))
    return facts


def _model_ranks(given: Mapping[str, Any]) -> int:
    """Ranks that share one batch: tensor x pipeline x sequence."""
    sizes = (given.get(path) for path in ("code.tensor_parallel", "code.pipeline_stages", "sequence_parallel_size"))
    return math.prod(size for size in sizes if isinstance(size, int))


def _by_rule(path: str, facts: Mapping[str, Any]) -> Any:
    rule = RULES.get(path)
    if rule is None or any(fact not in facts for fact in rule.needs):
        return None
    return rule.value(*(facts[fact] for fact in rule.needs))


def _left(path: str, facts: Mapping[str, Any]) -> str:
    rule = RULES.get(path)
    missing = [fact for fact in rule.needs if fact not in facts] if rule else []
    hint = f"; or say {' and '.join(missing)}" if missing else ""
    return f'{path}: found "auto", which DeepSpeed does not resolve; give a value{hint}'


def _strange(values: Mapping[str, Any]) -> list[str]:
    known = {*fields(DeepSpeed), *FACTS}
    return [f"auto: {name}: neither a key nor a fact{nearest(name, known)}" for name in values if name not in known]
