"""The model of a recipe: its Hugging Face config, named by a class and overridden key by key <-> the plan's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from bridge.errors import ConfigError
from bridge.families import (
    FAMILIES,
    GENERIC,
    Family,
    alike,
    apart,
    choose,
    family_of,
    groups,
    meaning,
    of_class,
    spelling,
    stands_for,
)
from bridge.families.codecs import undone
from bridge.plan import Plan, paths
from bridge.rules import EFFECTS, Context, Effect, Group, Rule, convert

C = "model.config."
CLASS, TYPE = C + "_target_", C + "model_type"
NAMED = (CLASS, TYPE)
BUILT, ANEW = "model._target_", "nemo_automodel.NeMoAutoModelForCausalLM.from_config"
"""What makes the model, and that which draws first weights for a config."""
KEYS = {C + key: key for keys, _ in groups() for key in keys}
MODEL = tuple(path for path in paths() if path.startswith("model."))
TIE, PIPELINE = C + "tie_word_embeddings", "parallel.pipeline"
MODULE = "transformers."
BASE = "model.rotary.base"
POSITIONS, MOST, REACH = "model.embedding.positions", "model.embedding.max_positions", "max_position_embeddings"


BALANCE, LOSS, CHOSEN = "model.moe.balance", "model.moe.aux_loss", "model.moe.top_k"
SHARE = C + "router_aux_loss_coef"
SWITCH, OWN = "output_router_logits", ("qwen3_moe", "gpt_oss", "ernie4_5_moe")
"""A switch of transformers' loss of balance, and families with code of AutoModel's, which has that loss whatever it says
(components/models/qwen3_moe/model.py: aux_loss_coeff). Other models get no labels, and so never have it
(recipes/llm/train_ft.py: labels are taken out of the batch).
"""


def _balanced(values: Group, named: Family) -> dict[str, Any]:
    """The switch as AutoModel takes it, whatever it says; a coefficient that it turns off stays off."""
    if named.name in OWN:
        return {SWITCH: True}
    return {SWITCH: None} if values.get(C + SWITCH) and named.name else {}


def _each_block(said: dict[str, Any], named: Family) -> dict[str, Any]:
    """AutoModel's own code has that loss in every block, divided by the experts of a token (components/moe/layers.py: Gate)."""
    if named.name in OWN and said.get(BALANCE) == "pooled":
        return {**said, BALANCE: "batch", LOSS: said[LOSS] / said[CHOSEN]} if said.get(CHOSEN) else {**said, BALANCE: "batch"}
    return said


def _of_each_block(plan: Group, chosen: Family) -> Group:
    """The plan's loss as the coefficient of AutoModel's own code."""
    loss, experts = plan.get(LOSS), plan.get(CHOSEN)
    if chosen.name not in OWN or not loss or not experts:
        return plan
    return {**plan, LOSS: undone(lambda number: number / experts, loss * experts, loss)}


def family(values: Group) -> Family:
    """The family that a recipe names by the class of its config, or by a model type; the generic one otherwise."""
    target = values.get(CLASS)
    named = of_class(target) if isinstance(target, str) else None
    return family_of(named or values.get(TYPE)) or GENERIC


def meant(values: Group) -> Mapping[str, Any]:
    """What a recipe says of its model; keys that its family does not have count for what others mean by them."""
    named = family(values)
    given = {key: values[path] for path, key in KEYS.items() if path in values} | _balanced(values, named)
    said = _each_block(dict(meaning(given, named, beyond=True)), named)
    if BASE in said:
        # Who names the base of rotary positions has them, whatever the class, which may be left open.
        said.setdefault(POSITIONS, "rotary")
    if said.get(POSITIONS) != "rotary" or REACH in given:
        return said
    # Rotary positions have no table whose rows would count: what a class takes by default binds no recipe.
    return {path: value for path, value in said.items() if path != MOST}


def problems(given: Group) -> tuple[str, ...]:
    """Values of the model's config that no plan has words for."""
    try:
        Plan.of(meant(given))
    except ConfigError as error:
        return tuple(f"{C}{problem.removeprefix('model.')}" for problem in error.problems)
    return ()


GROUPED = "0.3.0"
"""First release that asks for transformers 5, whose classes take `rope_parameters` in every family."""

SIZES = {
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "experts": "num_experts",
    "tied": "tie_word_embeddings",
}
"""What has to fit the ranks, whether a recipe says it or leaves it to the class of its model."""


def sizes(given: Group) -> Mapping[str, Any]:
    """Sizes that a recipe leaves to the class of its model, by their usual keys; none where that is not known."""
    if not family(given).name or problems(given):
        return {}
    said = meant(given)
    return {C + key: said[f"model.{name}"] for name, key in SIZES.items() if f"model.{name}" in said}


def _read(ours: tuple[str, ...]) -> Callable[[Group, Context], Group]:
    def read(values: Group, context: Context) -> Group:
        said = meant(values)
        return {path: said[path] for path in ours if path in said}

    return read


def _write(theirs: tuple[str, ...]) -> Callable[[Group, Context], Group]:
    def write(values: Group, context: Context) -> Group:
        _, written = _spelled(values, context)
        return {path: written[KEYS[path]] for path in theirs if KEYS[path] in written}

    return write


def _spelled(values: Group, context: Context) -> tuple[Family, Mapping[str, Any]]:
    grouped = context.since(GROUPED) and not apart([KEYS[path] for path in context.had if path in KEYS])
    return _kept(tuple(sorted((path, values[path]) for path in MODEL if path in values)), grouped)


@lru_cache(32)
def _kept(model: tuple[tuple[str, Any], ...], grouped: bool) -> tuple[Family, Mapping[str, Any]]:
    plan = dict(model)
    chosen = FAMILIES.get(plan.get("model.family") or "") or _inferred(plan, grouped)
    written = spelling(_of_each_block(plan, chosen), chosen, grouped, beyond=True)
    return chosen, {key: tuple(value) if isinstance(value, list) else value for key, value in written.items()}


def _inferred(plan: Group, grouped: bool) -> Family:
    """The family that says all of a plan's model by the names that most families have; else no one of them.

    How first weights are drawn, and what a loss of balance is over, is no part of what the model computes: a family that lacks
    a word for that is still the family.
    """
    told = {path: value for path, value in plan.items() if not path.startswith("model.init.")}
    if told.get(BALANCE) == "batch":
        told[BALANCE] = "pooled"
    found, exact = choose(told, grouped)
    return found if exact and found in alike() and found.config else GENERIC


def _write_family(values: Group, context: Context) -> Group:
    chosen, _ = _spelled(values, context)
    if not chosen.name:
        return {}
    return {BUILT: ANEW, CLASS: MODULE + chosen.config} if chosen.config else {TYPE: chosen.name}


def _strange(values: Group) -> bool:
    """Whether a class or type is named that no row of the table is about."""
    return any(values.get(path) is not None for path in NAMED) and not family(values).name


def _stored(values: Group) -> bool:
    """Whether a model is made that is no decoder with first weights of its own."""
    return values.get(BUILT) not in (None, ANEW)


def _said(values: Group) -> Group:
    return {"model.family": family(values).name or None}


OTHERS = tuple(path for path in (*KEYS, *NAMED, *MODEL))
FAMILY = convert(
    (*NAMED, BUILT),
    "model.family",
    lambda values, context: _said(values),
    _write_family,
    effect=lambda values: Effect.NUMBERS if _strange(values) or _stored(values) else EFFECTS["model.family"],
    sees=tuple(path for path in OTHERS if path not in (*NAMED, "model.family")),
    carries={CLASS: "model.family", TYPE: "model.family", BUILT: ()},
    blurs=_strange,
    note="which model is built, and what weights it starts from",
    lossy="a family that no plan knows, or that the nearest one stands for",
    source="_transformers/auto_model.py: from_config; transformers' own config classes",
)


def _tied(theirs: Callable[[Group, Context], Group]) -> Callable[[Group, Context], Group]:
    """A pipeline cannot tie embeddings, so that the key is left out there."""

    def write(values: Group, context: Context) -> Group:
        written = theirs(values, context)
        cannot = values.get("model.tied") and (values.get(PIPELINE) or 1) > 1
        return {path: value for path, value in written.items() if not (cannot and path == TIE)}

    return write


def _unread_by_family(keys: tuple[str, ...]) -> Callable[[Group], bool]:
    """Whether one of the keys is given that the family of the model, or a model of no known one, does not read."""

    def unread(values: Group) -> bool:
        known = family(values).known
        return any(values.get(C + key) is not None and key not in known for key in keys)

    return unread


def _group(keys: tuple[str, ...], said: tuple[str, ...]) -> Rule:
    theirs, ours = tuple(C + key for key in keys), tuple(f"model.{path}" for path in said)
    carries = {C + key: tuple(f"model.{path}" for path in stands_for()[key]) for key in keys} if keys else {CLASS: ours}
    tied = TIE in theirs
    write = _tied(_write(theirs)) if tied else _write(theirs)
    return convert(
        theirs,
        ours,
        _read(ours),
        write,
        effect=min((EFFECTS[path] for path in ours), key=lambda effect: effect.rank),
        sees=(*(path for path in OTHERS if path not in (*theirs, *ours)), *((PIPELINE,) if tied else ())),
        carries=carries,
        blurs=_unread_by_family(keys) if keys else None,
        lossy="AutoModel refuses tied embeddings in a pipeline; train without one, or a model that is not tied"
        if tied
        else "the family of the model decides",
        note="a key of the model's own config",
        source="pipelining/hf_utils.py: validate_hf_model_for_pipeline_support" if tied else "",
    )


RULES: tuple[Rule, ...] = (FAMILY, *(_group(keys, said) for keys, said in groups()))
