"""Rules between the model of a recipe and the plan's model. A recipe names a config class of
Hugging Face, and overrides some of its keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from bridge.errors import ConfigError
from bridge.plan.families import (
    FAMILIES,
    GENERIC,
    Family,
    apart,
    choose,
    family_of,
    groups,
    meaning,
    of_class,
    read_by,
    spelling,
    stands_for,
)
from bridge.plan.families.codecs import undone
from bridge.plan.families.source import Source
from bridge.plan.plan import Plan, paths
from bridge.stack.rules import EFFECTS, Context, Effect, Group, Rule, convert, worst
from bridge.stack.words import beyond, effect_if, give, some

C = "model.config."
CLASS, TYPE, CODE = C + "_target_", C + "model_type", C + "architectures"
NAMED = (CLASS, TYPE)
BUILT, ANEW = "model._target_", "nemo_automodel.NeMoAutoModelForCausalLM.from_config"
"""Key for the function that builds the model, and the function that builds a model with random
weights.
"""
KEYS = {C + key: key for keys, _ in groups() for key in keys}
MODEL = tuple(path for path in paths() if path.startswith("model."))
TIE, PIPELINE = C + "tie_word_embeddings", "parallel.pipeline"
MODULE = "transformers."
BASE = "model.rotary.base"
POSITIONS, REACH = "model.embedding.positions", "embedding.max_positions"


BALANCE, LOSS, CHOSEN = "model.moe.balance", "model.moe.aux_loss", "model.moe.top_k"
BALANCES = (BALANCE, LOSS, "model.moe.aux_trained", "model.moe.balance_rate")
SHARE = C + "router_aux_loss_coef"
SWITCH, OWN = "output_router_logits", ("qwen3_moe", "gpt_oss", "ernie4_5_moe")
"""The switch for transformers' load-balancing loss, and the families for which AutoModel has its
own code.

That code ignores the switch and always has the loss (components/models/qwen3_moe/model.py:
aux_loss_coeff). Other models never have the loss, because they get no labels
(recipes/llm/train_ft.py removes the labels from the batch).
"""


def _each_block(fields: dict[str, Any], kind: Family) -> dict[str, Any]:
    """Return the plan values `fields`, with the load-balancing loss as AutoModel's own models compute
    it.

    AutoModel computes the loss in every block and divides it by top_k (components/moe/layers.py:
    Gate). Transformers computes one loss for the routing of all blocks.
    """
    if kind.name not in OWN or fields.get(BALANCE) != "pooled":
        return fields
    loss = {LOSS: fields[LOSS] / fields[CHOSEN]} if fields.get(CHOSEN) else {}
    return {**fields, BALANCE: "batch", **loss}


def _of_each_block(plan: Group, chosen: Family) -> Group:
    """Return the plan with the loss coefficient that AutoModel's own models need. This is the
    inverse of `_each_block`.
    """
    loss, experts = plan.get(LOSS), plan.get(CHOSEN)
    if chosen.name not in OWN or not loss or not experts:
        return plan
    # The factor that yields exactly this loss when it is read,
    # since a product and a quotient may differ in the last digit.
    return {**plan, LOSS: undone(lambda number: number / experts, loss * experts, loss)}


def family(values: Group) -> Family:
    """Return the family of the config class or model type that a recipe names, or the generic
    family.
    """
    target = values.get(CLASS)
    name = of_class(target) if isinstance(target, str) else None
    return family_of(name or values.get(TYPE)) or GENERIC


def _family_name(values: Group) -> str | None:
    return family(values).name or None


def model_fields(values: Group) -> Mapping[str, Any]:
    """Return the plan's model fields for a recipe. A key that the recipe's model family does not
    have stands for no field, because the model does not read it.
    """
    kind = family(values)
    config = {key: values[path] for path, key in KEYS.items() if path in values}
    # The switch with the value that takes effect: on in AutoModel's own code, off elsewhere, so that
    # a coefficient there is no loss.
    if kind.name:
        config[SWITCH] = kind.name in OWN
    fields = _each_block(dict(meaning(config, kind)), kind)
    if BASE in fields:
        # A base means rotary positions, even if the class of the config is not known.
        fields.setdefault(POSITIONS, "rotary")
    reach = kind.keys.get(REACH)
    if fields.get(POSITIONS) != "rotary" or reach is None or set(reach.names) & set(config):
        return fields
    # Rotary positions have no table of positions, so a class's default of its rows limits no recipe.
    return {path: value for path, value in fields.items() if path != f"model.{REACH}"}


def problems(settings: Group) -> tuple[str, ...]:
    """Return an error for each value in the model's config that a plan refuses."""
    try:
        Plan.of(model_fields(settings))
    except ConfigError as error:
        return tuple(f"{C}{problem.removeprefix('model.')}" for problem in error.problems)
    return ()


GROUPED = "0.3.0"
"""First release that needs transformers 5, in which the classes of all families have
`rope_parameters`.
"""

SIZES = {
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "experts": "num_experts",
    "tied": "tie_word_embeddings",
}
"""Sizes of the model that must be divisible by the number of ranks, each with its key in the
model's config.
"""


def sizes(settings: Group) -> Mapping[str, Any]:
    """Return the sizes of the model by their usual keys. Sizes that the recipe does not set have
    the defaults of the model's class, if the class is known.
    """
    if not family(settings).name or problems(settings):
        return {}
    fields = model_fields(settings)
    return {
        C + key: fields[f"model.{name}"] for name, key in SIZES.items() if f"model.{name}" in fields
    }


LAYERS = tuple(
    dict.fromkeys(C + name for kind in (GENERIC, *FAMILIES.values()) for name in kind.layer_keys)
)
"""Keys for the number of decoder layers, of which each family has one or two."""


def count_layers(values: Group) -> int | None:
    """Return the number of decoder layers that a recipe sets, or that its model's class has."""
    kind = family(values)
    given = {path.removeprefix(C): values[path] for path in LAYERS if values.get(path) is not None}
    count: int | None = Source(given, kind.defaults).find(*kind.layer_keys)
    return count


PADDING = "model.embedding.padding"
PADDED = ("ernie4_5_moe",)
"""Families whose padding token AutoModel's own code for models with experts knows
(components/models/ernie4_5/model.py: embed_tokens); for the others it trains all rows.
"""


def _read_fields(ours: tuple[str, ...]) -> Callable[[Group, Context], Group]:
    def read(values: Group, context: Context) -> Group:
        fields = dict(model_fields(values))
        own = family(values).name in SPLITS and not is_of_transformers(values, context)
        if own and family(values).name not in PADDED:
            fields[PADDING] = "none"
        return {path: fields[path] for path in ours if path in fields}

    return read


def _write_keys(theirs: tuple[str, ...]) -> Callable[[Group, Context], Group]:
    def write(values: Group, context: Context) -> Group:
        _, config = _spell_model(values, context)
        return {path: config[KEYS[path]] for path in theirs if KEYS[path] in config}

    return write


def _spell_model(values: Group, context: Context) -> tuple[Family, Mapping[str, Any]]:
    """Return the family in which a plan's model is written, and the keys of that family with the
    model's values.
    """
    # Rotary settings in one group, rope_parameters, unless the
    # file that is written anew has them apart.
    one_group = context.since(GROUPED) and not apart(
        [KEYS[path] for path in context.had if path in KEYS]
    )
    return _keys_of_family(
        tuple(sorted((path, values[path]) for path in MODEL if path in values)), one_group
    )


# Every group of keys is written by a rule of its own, and all of them need the whole model.
@lru_cache(32)
def _keys_of_family(
    model: tuple[tuple[str, Any], ...], one_group: bool
) -> tuple[Family, Mapping[str, Any]]:
    plan = dict(model)
    chosen = FAMILIES.get(plan.get("model.family") or "") or _infer_family(plan, one_group)
    spellings = spelling(_of_each_block(plan, chosen), chosen, one_group)
    return chosen, {
        key: tuple(value) if isinstance(value, list) else value for key, value in spellings.items()
    }


def _infer_family(plan: Group, one_group: bool) -> Family:
    """Return a family that can express the model fields of a plan, or the generic family if there
    is none.

    Families are compared without the fields that the forward pass does not depend on: the
    initialisation of weights, and, if no family has it too, the load-balancing loss.
    """
    fields = {path: value for path, value in plan.items() if not path.startswith("model.init.")}
    if fields.get(BALANCE) == "batch":
        fields[BALANCE] = "pooled"
    forward = {path: value for path, value in fields.items() if path not in BALANCES}
    for compared in (fields, forward):
        kind, exact = choose(compared, one_group)
        if exact and kind.config:
            return kind
    return GENERIC


SPLITS = {
    **dict.fromkeys(("deepseek_v3", "glm4_moe", "glm4_moe_lite", "gpt_oss"), "0.4.0"),
    **dict.fromkeys(("minimax_m2", "qwen3_moe"), "0.4.0"),
    "ernie4_5_moe": "0.5.0",
}
"""Families with experts for which AutoModel has its own code, each with the first known release of
those that check it (_transformers/registry.py: MODEL_ARCH_MAPPING).
"""


def stem(kind: Family) -> str:
    """Return what the names of a family's classes begin with."""
    return kind.config.removesuffix("Config")


def own_class(kind: Family) -> str:
    """Return the class name by which a config asks for AutoModel's own code for a family."""
    return f"{stem(kind)}ForCausalLM"


def is_of_transformers(values: Group, context: Context) -> bool:
    """Return whether the model of a known family is transformers', so that AutoModel's own code is
    not used (_transformers/model_init.py: _resolve_custom_model_cls_for_config).
    """
    kind = family(values)
    own = kind.name in SPLITS and context.since(SPLITS[kind.name])
    # The config class leaves the architectures empty; another builder reads them from a checkpoint.
    empty = CLASS in values and str(values.get(BUILT, "")).endswith(".from_config")
    return bool(kind.config) and (
        not own or (empty and own_class(kind) not in (values.get(CODE) or ())[:1])
    )


def _write_family(values: Group, context: Context) -> Group:
    chosen, _ = _spell_model(values, context)
    if not chosen.config:
        return {TYPE: chosen.name} if chosen.name else {}
    # Only AutoModel's own code splits experts over ranks, and has the load-balancing loss.
    needs = (values.get("parallel.expert") or 1) > 1 or (chosen.name in OWN and values.get(LOSS))
    own = needs and chosen.name in SPLITS and context.since(SPLITS[chosen.name])
    return {
        BUILT: ANEW,
        CLASS: MODULE + chosen.config,
        **({CODE: (own_class(chosen),)} if own else {}),
    }


def _is_strange(values: Group) -> bool:
    """Whether the recipe names a class or a model type that belongs to no known family."""
    return any(values.get(path) is not None for path in NAMED) and not family(values).name


OTHERS = tuple(path for path in (*KEYS, *NAMED, *MODEL))
FAMILY = convert(
    (*NAMED, CODE, BUILT),
    "model.family",
    give("model.family", _family_name),
    _write_family,
    # A plan starts from random weights; any other way to build the model brings weights of its own.
    effect=effect_if(
        some(_is_strange, beyond(BUILT, ANEW)), Effect.NUMBERS, EFFECTS["model.family"]
    ),
    sees=(*(path for path in OTHERS if path not in (*NAMED, "model.family")), "parallel.expert"),
    carries={CLASS: "model.family", TYPE: "model.family", CODE: (), BUILT: ()},
    blurs=_is_strange,
    note="the choice of the model and of its initial weights",
    lossy="the family of this model is not known, or stagebridge translates only a similar family",
    source="_transformers/auto_model.py: from_config; transformers' own config classes",
)


def _without_tie(theirs: Callable[[Group, Context], Group]) -> Callable[[Group, Context], Group]:
    """Wrap the writer `theirs`. In a recipe with a pipeline, which cannot tie embeddings, the
    wrapped writer leaves out the key for tied embeddings.
    """

    def write(values: Group, context: Context) -> Group:
        keys = theirs(values, context)
        cannot = values.get("model.tied") and (values.get(PIPELINE) or 1) > 1
        return {path: value for path, value in keys.items() if not (cannot and path == TIE)}

    return write


OWN_KEYS: Mapping[str, frozenset[str]] = {
    "deepseek_v3": frozenset({"qk_head_dim"}),
    "gpt_oss": frozenset({"norm_topk_prob"}),
    "minimax_m2": frozenset({"scoring_func", "use_qk_norm"}),
    "qwen2": frozenset({"mlp_bias"}),
}
"""Keys that AutoModel's own code for a family reads, and transformers' does not
(components/models/FAMILY/model.py).
"""


def is_unread(key: str, kind: Family) -> bool:
    """Return whether no model of a family that AutoModel builds reads a key of the model's config."""
    if not kind.name or kind.foreign:
        return False
    return key not in read_by(kind.name) | OWN_KEYS.get(kind.name, frozenset())


def _effect_on_model(keys: tuple[str, ...], effect: Effect) -> Callable[[Group], Effect]:
    """Return a function for the effect of losing `keys`: none if the model reads none of those that
    a recipe sets.
    """

    def of_values(values: Group) -> Effect:
        set_keys = [key for key in keys if values.get(C + key) is not None]
        unread = set_keys and all(is_unread(key, family(values)) for key in set_keys)
        return Effect.NONE if unread else effect

    return of_values


UNTOLD = "no known family of models says what this key does in this model"


def _group_rule(keys: tuple[str, ...], paths: tuple[str, ...]) -> Rule:
    """Return the rule between keys of the model's config and fields of the plan's model. Keys and
    fields are given without the prefixes `model.config.` and `model.`.
    """
    theirs, ours = tuple(C + key for key in keys), tuple(f"model.{path}" for path in paths)
    carries = (
        {C + key: tuple(f"model.{path}" for path in stands_for()[key]) for key in keys}
        if keys
        else {CLASS: ours}
    )
    tied = TIE in theirs
    write = _without_tie(_write_keys(theirs)) if tied else _write_keys(theirs)
    return convert(
        theirs,
        ours,
        _read_fields(ours),
        write,
        effect=_effect_on_model(keys, worst(EFFECTS[path] for path in ours)),
        sees=(
            *(path for path in OTHERS if path not in (*theirs, *ours)),
            *((PIPELINE,) if tied else ()),
        ),
        carries=carries,
        blurs=lambda values: family(values).leaves_open(
            *(key for key in keys if values.get(C + key) is not None)
        ),
        tells=UNTOLD,
        lossy="AutoModel cannot tie embeddings in a pipeline, so they are untied; train without a pipeline to tie them"
        if tied
        else "the model's family determines this field",
        note="a key of the model's own config",
        source="pipelining/hf_utils.py: validate_hf_model_for_pipeline_support" if tied else "",
    )


RULES: tuple[Rule, ...] = (FAMILY, *(_group_rule(keys, paths) for keys, paths in groups()))
