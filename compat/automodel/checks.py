"""Findings about settings of a recipe that AutoModel accepts and then ignores, overwrites or gets wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from bridge.plan.families.refusals import (
    EVEN,
    REFUSALS,
    STRICT,
    find_refused_values,
    find_unread_keys,
    keys_below,
)
from bridge.stack.check_tables import Checks, report_remarks
from bridge.stack.checks import Check, Remark, Seen
from bridge.stack.dialect import Config
from bridge.stack.findings import Finding
from bridge.stack.requirements import is_given
from bridge.stack.rules import Effect
from compat.automodel.effective import PP, D, chosen, has_pipeline, strategy
from compat.automodel.formats import OBJECT, OLD
from compat.automodel.releases import RELEASES, Release, release
from compat.automodel.rules.model import (
    BUILT,
    CLASS,
    CODE,
    KEYS as CONFIG,
    OWN,
    SHARE,
    SPLITS,
    TYPE,
    C,
    family,
    is_of_transformers,
    is_unread,
    own_class,
    stem,
)
from compat.automodel.rules.table import read_precision
from compat.automodel.rules.weight_decay import GROUPS

SEED = 42
"""The seed of the training recipes if the top level of the file sets none."""

SINCE = {"": "", STRICT: "0.6.0", EVEN: "0.7.0"}
"""Releases of AutoModel by what their transformers checks: 0.6.0 requires exactly 5.12.1, and 0.7.0 exactly 5.18.0."""
ATTENTION = frozenset({"gpt_oss", "gptj", "bloom"})
"""Families for which transformers has no attention by torch's own function."""


def _splits(axis: str) -> Callable[[Seen], bool]:
    """Return a condition on recipes: transformers' own model is split over the ranks of an axis."""
    return lambda view: (view[D + axis] or 1) > 1 and is_of_transformers(view.given, view.context)


BEFORE_PAIRS = (C + "qk_nope_head_dim", C + "kv_lora_rank")


def _misaligns(view: Seen, path: str) -> bool:
    """Return whether DeepSeek-V2's channels that rotate in pairs begin at an odd place of a tensor in fp32.

    Other formats are copied to fp32 first, which aligns them (apply_rotary_emb).
    """
    formats = read_precision(view.values)
    computes = formats.get("precision.autocast") or formats.get("precision.compute")
    odd = bool((view.given.get(path) or 0) % 2)
    return odd and computes == "fp32" and family(view.given).name == "deepseek_v2"


EXPERTS, CONTEXT = _splits("ep_size"), _splits("cp_size")
PACKED = "packed_sequence.packed_sequence_size"
MESH = "_transformers/capabilities.py: validate_for_mesh"
CHECKS = Checks(
    RELEASES,
    Check(
        D + "ep_size",
        lambda view: EXPERTS(view) and _has_own_code(view),
        "found {distributed.ep_size} with transformers' model, whose experts AutoModel does not split: it"
        " stops when it builds the model; add "
        + CODE
        + " with the model's class, for which it has its own"
        " code, or use 1",
        Effect.STOPS,
        MESH,
        since="0.4.0",
        name="own-code-splits-experts",
    ),
    Check(
        D + "ep_size",
        lambda view: EXPERTS(view) and not _has_own_code(view),
        "found {distributed.ep_size}, and AutoModel has no code of its own for this family, which alone"
        " splits experts: it stops when it builds the model; use 1",
        Effect.STOPS,
        MESH,
        since="0.4.0",
        name="no-code-that-splits-experts",
    ),
    Check(
        D + "cp_size",
        lambda view: CONTEXT(view) and family(view.given).name in ATTENTION,
        "found {distributed.cp_size} with transformers' model of this family, which has no attention that"
        " AutoModel can split: it stops when it builds the model; use 1",
        Effect.STOPS,
        MESH,
        since="0.4.0",
        name="no-attention-that-splits",
    ),
    Check(
        D + "cp_size",
        lambda view: CONTEXT(view) and bool(view[PACKED]),
        "found {distributed.cp_size} with transformers' model and packed samples, which it cannot split over"
        " ranks: the recipe stops; use 1, or packed_sequence.packed_sequence_size 0",
        Effect.STOPS,
        "recipes/llm/train_ft.py: supports_cp_with_sequence_packing",
        since="0.4.0",
        name="no-split-of-packed-samples",
    ),
    *(
        Check(
            path,
            partial(_misaligns, path=path),
            "is odd, and transformers' DeepSeek-V2 reads the channels behind it as pairs, which in fp32 stops the first"
            " forward pass; use an even number, or compute in bf16",
            Effect.STOPS,
            "transformers: models/deepseek_v2/modeling_deepseek_v2.py: apply_rotary_emb, view_as_complex",
            name="odd-place-of-pairs",
        )
        for path in BEFORE_PAIRS
    ),
    *(
        replace(row.check(lambda view: family(view.given).name, C), since=SINCE[row.since])
        for row in REFUSALS
    ),
)


def _has_own_code(view: Seen) -> bool:
    since = SPLITS.get(family(view.given).name)
    return since is not None and view.context.since(since)


def inspect(config: Config) -> Iterator[Finding]:
    """Yield findings about `config`, in the order of the recipe's sections."""
    view = Seen(config.effective, config.given, config.context)
    if CLASS in config.given or TYPE in config.given:
        yield from CHECKS.remarks(view, config.origins)
        if RELEASES.since(config.version, SINCE[STRICT]):
            refusals = find_refused_values(family(config.given).name, config.given, C)
            yield from report_remarks(refusals, view, config.origins)
        kind = family(config.given)
        unread = [key for key in keys_below(C, config.given) if is_unread(key, kind)]
        origins = {path.removeprefix(C): origin for path, origin in config.origins.items()}
        yield from find_unread_keys(kind.name, unread, origins.get, C)
    yield from report_remarks(
        _find_remarks(config.given, config.effective, release(config.version), config.entry),
        view,
        config.origins,
    )


def _find_remarks(
    settings: Mapping[str, Any], effective: Mapping[str, Any], at: Release, entry: str
) -> Iterator[Remark]:
    yield from _check_scaling(settings)
    if entry == OBJECT:
        return
    yield from _check_layout(settings, at)
    if has_pipeline(settings):
        yield from _find_overwrites(settings, effective)
        yield from _check_schedule(settings)
    else:
        yield from _find_inert(settings, effective)
    yield from _check_steps(settings)
    yield from _check_seed(settings)
    # from_config and from_pretrained take keys of the config beside their own arguments,
    # and hand them to _consume_config_overrides (_transformers/auto_model.py).
    for key in sorted((settings.get("model.*") or {}).keys() & set(CONFIG.values())):
        message = (
            f"{key} overrides the model's config, but stagebridge does not translate this key;"
            f" write model.config.{key} instead"
        )
        yield "model.*", message, Effect.NUMBERS
    yield from _own_code(settings)


def _own_code(settings: Mapping[str, Any]) -> Iterator[Remark]:
    """Yield a remark if AutoModel does not find its own code for a model, or that of another family.

    AutoModel chooses its own code by the first of `architectures`, which transformers' config
    classes leave empty (_transformers/model_init.py, _resolve_custom_model_cls_for_config).
    """
    model_family, from_config = (
        family(settings),
        str(settings.get(BUILT, "")).endswith(".from_config"),
    )
    if (
        from_config
        and model_family.name in OWN
        and CLASS in settings
        and settings.get(SHARE) != 0
        and not is_given(settings, CODE)
    ):
        message = (
            "AutoModel builds transformers' model, which trains without the load-balancing loss;"
            f" add {CODE}: [{own_class(model_family)}]"
        )
        yield CLASS, message, Effect.NUMBERS
    for name in (settings.get(CODE) or ())[:1]:
        if model_family.config and name.partition("For")[0] != stem(model_family):
            message = (
                f"AutoModel uses its own code for {name}, if it has any, whose family is not the"
                f" config's; write {own_class(model_family)}"
            )
            yield CODE, message, Effect.NUMBERS


def _check_seed(settings: Mapping[str, Any]) -> Iterator[Remark]:
    """Yield a remark about a seed in the section rng, which no release reads.

    Source: recipes/llm/train_ft.py, recipes/vlm/finetune.py, setup:
    StatefulRNG(seed=cfg.get("seed", 42)).
    """
    seed, other = settings.get("seed", SEED), settings.get("rng.seed")
    if other is not None and other != seed:
        message = (
            f"the training recipes do not read this seed; they use the top-level seed, here {seed};"
            " set the top-level seed"
        )
        yield "rng.seed", message, Effect.NONE
    elif other is None and "seed" in settings and any(path.startswith("rng.") for path in settings):
        yield (
            "seed",
            "the training recipes use this value; they do not read the rng section",
            Effect.NONE,
        )


def _check_layout(settings: Mapping[str, Any], at: Release) -> Iterator[Remark]:
    target = str(settings.get(D + "_target_") or "").rpartition(".")[2]
    if target and at.nests_pipeline:
        message = (
            f"the manager class has no effect since 0.3.0; the strategy is {strategy(settings, at)}"
        )
        yield D + "_target_", message, Effect.NONE if target == "FSDP2Manager" else Effect.COST
    if "clip_grad_norm.max_norm" in settings and not at.nests_pipeline:
        yield (
            "clip_grad_norm.max_norm",
            f"AutoModel reads this bound only since 0.3.0; {at.version} always clips at 1.0",
            Effect.NUMBERS,
        )


def _find_inert(settings: Mapping[str, Any], effective: Mapping[str, Any]) -> Iterator[Remark]:
    path = next((path for path in settings if path.startswith((PP, OLD))), None)
    if path is not None:
        yield (
            path.rpartition(".")[0],
            "AutoModel ignores this section, because pp_size is 1; set pp_size above 1 to use the section",
            Effect.NONE,
        )
    if (settings.get(D + "tp_size") or 1) == 1 and settings.get(D + "sequence_parallel"):
        yield D + "sequence_parallel", "the switch has no effect, because tp_size is 1", Effect.NONE
    elif effective.get(D + "strategy") == "megatron_fsdp" and settings.get(D + "sequence_parallel"):
        yield (
            D + "sequence_parallel",
            "the switch has no effect, because megatron_fsdp has no sequence parallelism; use fsdp2",
            Effect.COST,
        )


def _find_overwrites(settings: Mapping[str, Any], effective: Mapping[str, Any]) -> Iterator[Remark]:
    """Yield a remark for each pipeline setting that recipes overwrite with the value of another
    section (recipes/llm/train_ft.py).
    """
    sources = {
        "pp_batch_size": "step_scheduler.local_batch_size",
        "patch_stage_backward_maybe_with_nosync": "model.backend.enable_fsdp_optimizations",
        "loss_fn": "the loss_fn section",
    }
    for name, source in sources.items():
        if PP + name in settings and settings[PP + name] != effective.get(
            PP + name, settings[PP + name]
        ):
            yield (
                PP + name,
                f"recipes overwrite this setting with {source}: {effective[PP + name]!r}",
                Effect.COST,
            )
    if PP + "loss_fn" in settings:
        yield (
            PP + "loss_fn",
            ("recipes overwrite this setting with the section loss_fn"),
            Effect.NUMBERS,
        )
    # AutoModel keeps the format that is given, and sizes its receive buffers by it.
    output = effective.get(D + "mp_policy.output_dtype") or effective.get(
        D + "mp_policy.param_dtype"
    )
    if output is not None and settings.get(PP + "dtype", output) != output:
        yield (
            PP + "dtype",
            f"stages send activations in {output}; a stage that receives them in another format may get wrong values",
            Effect.NUMBERS,
        )


def _check_scaling(settings: Mapping[str, Any]) -> Iterator[Remark]:
    if settings.get(PP + "scale_grads_in_schedule"):
        message = (
            "recipes already divide gradients by the tokens of the step; this switch"
            " divides them by the number of micro batches too"
        )
        yield PP + "scale_grads_in_schedule", message, Effect.NUMBERS


def _check_schedule(settings: Mapping[str, Any]) -> Iterator[Remark]:
    kind, reshards = chosen(settings), settings.get(D + "reshard_after_forward")
    # Seen in runs of torch 2.13: no layer of the last stage has a
    # gradient then, and no message tells so.
    if kind.split and reshards:
        message = (
            f"{kind.name} splits the backward pass; with this switch stages then silently lose"
            " gradients; set it to false"
        )
        yield D + "reshard_after_forward", message, Effect.NUMBERS
    if kind.name == "DualPipeV":
        yield (
            PP + "pp_schedule",
            "AutoModel places the stages in a loop over the ranks, but torch expects the stages in a V",
            Effect.NUMBERS,
        )


def _check_steps(settings: Mapping[str, Any]) -> Iterator[Remark]:
    for name in ("global_batch_size", "local_batch_size"):
        if (
            any(path.startswith("step_scheduler.") for path in settings)
            and f"step_scheduler.{name}" not in settings
        ):
            yield (
                f"step_scheduler.{name}",
                "not given in the recipe; AutoModel uses its own default",
                Effect.NUMBERS,
            )
    has_scheduler = any(path.startswith("lr_scheduler.") for path in settings)
    if settings.get(GROUPS) and not has_scheduler:
        yield (
            GROUPS,
            "these factors have no effect, because the scheduler applies them; add the section lr_scheduler",
            Effect.NUMBERS,
        )
    if has_scheduler and "lr_scheduler.lr_decay_steps" not in settings:
        yield (
            "lr_scheduler.lr_decay_steps",
            "not given; the decay then ends with the run, and the data may end the run earlier",
            Effect.NONE,
        )
