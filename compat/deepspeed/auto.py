"""Replaces values of "auto" in a config: first by values from the caller, then by the rules of
Hugging Face's integrations.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bridge.errors import ConfigError, nearest
from bridge.files.shown import show_value
from bridge.plan.section import fields
from compat.deepspeed.schema import DeepSpeed
from compat.deepspeed.trainer import DEFAULTS, NAMES, misfit
from compat.deepspeed.value_types import typed

OVERWRITTEN: Mapping[str, str] = {
    "steps_per_print": "accelerate sets it to infinity, whatever the file says (utils/dataclasses.py: __post_init__)"
}
"""Keys for which "auto" needs no value, because whoever resolves "auto" overwrites the key in any case."""
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
"""Keys for which "auto" is a value that DeepSpeed itself understands."""

MICRO, STEPS, TOTAL = (
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "train_batch_size",
)


@dataclass(frozen=True, slots=True)
class Rule:
    """The rule by which "auto" is replaced: `needs` names the facts, and `value` computes the new
    value from these facts.
    """

    needs: tuple[str, ...]
    value: Callable[..., Any]


def _itself(value: Any) -> Any:
    return value


def _same(fact: str) -> Rule:
    return Rule((fact,), _itself)


RULES: Mapping[str, Rule] = {
    MICRO: _same("micro_batch"),
    STEPS: _same("accumulation"),
    TOTAL: Rule(
        ("micro_batch", "accumulation", "data_parallel"),
        lambda micro, steps, ranks: micro * steps * ranks,
    ),
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
    "zero_optimization.stage3_prefetch_bucket_size": Rule(
        ("hidden_size",), lambda hidden: int(0.9 * hidden * hidden)
    ),
    "zero_optimization.stage3_param_persistence_threshold": Rule(
        ("hidden_size",), lambda hidden: 10 * hidden
    ),
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": _same("save_16bit"),
}
"""The rules by which Hugging Face's integrations replace "auto", by key
(transformers/integrations/deepspeed.py; `_prepare_deepspeed` in accelerate/accelerator.py). Sizes
of buckets are in elements. For a model with several hidden sizes, both integrations use the
largest.
"""

SPELLED: Mapping[str, str] = {
    "per_device_train_batch_size": "micro_batch",
    "learning_rate": "lr",
    "adam_epsilon": "eps",
    "max_grad_norm": "clip",
    "max_steps": "total_steps",
}
"""A table from TrainingArguments of Hugging Face to facts, for those whose two names differ."""
SAMPLES: Mapping[str, Any] = {
    "micro_batch": 8,
    "accumulation": 1,
    "clip": 1.0,
    "lr": 5e-5,
    "betas": [0.9, 0.999],
    "eps": 1e-8,
    "weight_decay": 0.0,
    "warmup_steps": 0,
    "mixed_precision": "no",
    "save_16bit": False,
}
"""The Trainer's default for each fact that has a default."""
WHOLE = frozenset(
    {
        "micro_batch",
        "accumulation",
        "data_parallel",
        "world_size",
        "hidden_size",
        "samples",
        "total_steps",
        "warmup_steps",
    }
)
"""Facts that must be whole numbers."""

PRECISIONS = ("no", "fp16", "bf16", "fp8")
"""The values of accelerate's `mixed_precision`."""
BETAS = ("adam_beta1", "adam_beta2")
"""The two TrainingArguments that make the fact `betas`."""

FACTS = frozenset(
    {
        "world_size",
        "samples",
        "transformers",
        *(fact for rule in RULES.values() for fact in rule.needs),
    }
)
"""The names of all facts. Facts about sizes count samples, ranks or optimizer steps; `samples` is the
length of the Trainer's data set, `transformers` its release.
"""

_TYPED_AS: Mapping[str, str] = {
    rule.needs[0]: path for path, rule in reversed([*RULES.items()]) if rule.value is _itself
}
"""The key of each fact that is the value of a key as it is; the fact has the key's type."""

_KNOWN_AS: Mapping[str, str] = {
    "micro_batch": MICRO,
    "accumulation": STEPS,
    "lr": "optimizer.params.lr",
    "zero_stage": "zero_optimization.stage",
}
"""A table from facts that a config may contain itself to the keys that contain them."""


def resolve(
    settings: Mapping[str, Any], values: Mapping[str, Any] | None = None, **facts: Any
) -> dict[str, Any]:
    """Return `settings` with every "auto" replaced. A key in `values` gets the value from there. All
    other keys get values that rules compute from `facts`, whose names are in `FACTS`. Raises
    `ConfigError` if an "auto" is left; the error names the missing facts.
    """
    resolution = resolve_auto(
        settings,
        {**(values or {}), **{name: fact for name, fact in facts.items() if fact is not None}},
    )
    ConfigError.raise_if(resolution.problems)
    return {**settings, **resolution.found}


@dataclass(frozen=True)
class Resolved:
    """Result of replacing "auto": `found` has a value for each resolved key, `problems` a message
    for each other key, and `words` the command-line options for the missing facts.
    """

    found: Mapping[str, Any]
    problems: tuple[str, ...]
    words: tuple[str, ...] = ()


def resolve_auto(
    settings: Mapping[str, Any],
    values: Mapping[str, Any] | None,
    where: Mapping[str, str] | None = None,
    world: int | None = None,
) -> Resolved:
    """Resolve each "auto" in `settings` for a run on `world` ranks.

    `values` has values for keys and facts. `where` has the line of each key in the file, for
    messages. Without `values` no rule applies, because nothing shows that Hugging Face's Trainer or
    accelerate starts the run.
    """
    open_ = [path for path, value in settings.items() if value == "auto" and path not in REAL]
    flaws = {name: text for name, value in (values or {}).items() if (text := flaw(name, value))}
    wrong = {"betas" if name in BETAS else SPELLED.get(name, name) for name in flaws}
    sources = _as_facts(
        {name: value for name, value in (values or {}).items() if name not in flaws}
    )
    facts = _facts(settings, {"world_size": world, **sources} if world else sources)
    # The user first learns that a fact is wrong; no other value takes its place.
    facts = {fact: value for fact, value in facts.items() if fact not in wrong}
    resolutions: dict[str, Any] = {}
    for path in open_ if values is not None else ():
        value = sources.get(path)
        if path not in sources:
            value = _by_rule(path, facts)
        if value is not None:
            resolutions[path] = value
            # A key that is now known may be the fact of another: a
            # resolved micro batch completes the total.
            facts |= {
                fact: value for fact, path_of_fact in _KNOWN_AS.items() if path_of_fact == path
            }
    spoilt = {path for path, rule in RULES.items() if not wrong.isdisjoint(rule.needs)}
    rest = [path for path in open_ if path not in resolutions and path not in spoilt]
    problems = (
        *(f"auto: {name}: {text}" for name, text in flaws.items()),
        *_messages_on_rest(rest, facts, where or {}),
    )
    # A command that repeats a wrong option would be refused again.
    return Resolved(resolutions, problems, () if flaws else tuple(_options_to_give(rest, facts)))


def find_open(
    settings: Mapping[str, Any], values: Mapping[str, Any], world: int | None
) -> dict[str, str]:
    """Return each "auto" that Hugging Face fills in and that lacks a fact, with that fact's name."""
    facts = _facts(
        settings, {"world_size": world, **_as_facts(values)} if world else _as_facts(values)
    )
    return {
        path: lacking[0]
        for path, rule in RULES.items()
        if settings.get(path) == "auto"
        and values.get(path) is None
        and (lacking := [fact for fact in rule.needs if fact not in facts])
    }


def _as_facts(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` with each TrainingArgument renamed to the fact that it sets."""
    facts = {SPELLED.get(name, name): value for name, value in values.items() if name not in BETAS}
    # Two arguments make one fact. The one that is not given has the Trainer's default.
    if not values.keys().isdisjoint(BETAS):
        facts["betas"] = tuple(map(values.get, BETAS, SAMPLES["betas"]))
    return facts


def _facts(settings: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return all facts for the rules: those in `values`, those that the config `settings` contains,
    and the number of data-parallel ranks.
    """
    own = {fact: values.get(path, settings.get(path)) for fact, path in _KNOWN_AS.items()}
    # Both the Trainer and accelerate make one micro batch a step unless told otherwise.
    own["accumulation"] = own["accumulation"] if own["accumulation"] is not None else 1
    facts = {fact: value for fact, value in own.items() if value not in (None, "auto")}
    facts |= {fact: value for fact, value in values.items() if fact in FACTS}
    if "world_size" in facts:
        # Ranks that share one batch: tensor x pipeline x sequence.
        sizes = (
            settings.get(path)
            for path in ("code.tensor_parallel", "code.pipeline_stages", "sequence_parallel_size")
        )
        sharing = math.prod(size for size in sizes if isinstance(size, int))
        facts.setdefault("data_parallel", facts["world_size"] // sharing)
    return facts


def _by_rule(path: str, facts: Mapping[str, Any]) -> Any:
    rule = RULES.get(path)
    if rule is None or any(fact not in facts for fact in rule.needs):
        return None
    return rule.value(*(facts[fact] for fact in rule.needs))


def _messages_on_rest(
    paths: Sequence[str], facts: Mapping[str, Any], where: Mapping[str, str]
) -> Iterator[str]:
    """Yield messages about keys that still have the value "auto": one message for all keys that
    Hugging Face fills in, and one for each other key.
    """
    fillable = [path for path in paths if path in RULES]
    if fillable:
        keys = ", ".join(
            f"{path}{f' ({where[path]})' if where.get(path) else ''}" for path in fillable
        )
        missing = dict.fromkeys(
            fact for path in fillable for fact in RULES[path].needs if fact not in facts
        )
        count = "1 value" if len(fillable) == 1 else f"{len(fillable)} values"
        advice = "pass the TrainingArguments with --auto-from"
        if missing:
            advice = f"{advice}, or pass {', '.join(missing)} with --auto"
        yield (
            f'found "auto" for {count} that Hugging Face\'s Trainer or accelerate fills in:'
            f" {keys}; {advice}"
        )
    for path in paths:
        if path not in RULES:
            place = f"{where[path]}: " if where.get(path) else ""
            yield f'{place}{path}: found "auto", which DeepSpeed does not resolve; write a value'


def _options_to_give(paths: Sequence[str], facts: Mapping[str, Any]) -> Iterator[str]:
    """Yield example options for the command line that give the missing facts. Each value is the
    Trainer's default, or the fact's name in capitals if the Trainer has no default.
    """
    needs = dict.fromkeys(
        fact for path in paths if path in RULES for fact in RULES[path].needs if fact not in facts
    )
    for fact in needs:
        # The user knows the world size; the data-parallel ranks follow from it.
        if fact == "data_parallel":
            yield from ("--world-size", "WORLD_SIZE")
        else:
            value = SAMPLES.get(fact, fact.upper())
            yield from ("--auto", f"{fact}={_spell_value(value)}")


def _spell_value(value: Any) -> str:
    """Return `value` as the command line takes it."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def flaw(name: str, value: Any) -> str:
    """Return a message if there is no fact or key `name`, or if the fact cannot have this value.
    Otherwise return an empty string.

    The value of a key is checked where the key is set.
    """
    fact, names = SPELLED.get(name, name), {*fields(DeepSpeed), *FACTS}
    if name in BETAS:
        return misfit(value, DEFAULTS[name])
    if fact not in names:
        if name in NAMES:
            return f"--auto does not take this TrainingArgument; use --auto-from {name}={_spell_value(value)}"
        return (
            f"neither a key of DeepSpeed nor the name of a fact{nearest(name, {*names, *SPELLED})}"
        )
    # True and false are whole numbers to Python, so they are ruled out by name.
    if fact in WHOLE and (isinstance(value, bool) or not isinstance(value, int)):
        return f"found {show_value(value)}, expected a whole number"
    # YAML reads the word no as false.
    if fact == "mixed_precision" and value not in PRECISIONS and value is not False:
        return f"found {show_value(value)}, expected one of {', '.join(PRECISIONS)}"
    if fact == "transformers" and not re.fullmatch(r"\d+(\.\d+){1,2}", str(value)):
        return f"found {show_value(value)}, expected a release such as 4.57.6"
    try:
        if fact in _TYPED_AS:
            typed(_TYPED_AS[fact], value)
    except ValueError as error:
        return str(error)
    return ""
