"""Checks and derivations for hybrid layer patterns (`--hybrid-layer-pattern`, since 0.17) and
multi-token prediction.
"""

from __future__ import annotations

from bridge.stack.checks import above, excludes, set_
from compat.megatron.arguments.namespace import Namespace, Predicate, Step
from compat.megatron.arguments.steps import any_given, check, compute_argument, derive, follow, when
from compat.megatron.releases import MAIN

HYBRID = "validate_args: hybrid layer pattern"
MTP = "validate_args: multi-token prediction"
# M*-M|M*-M/MM/MM: a stage of 4 layers, another one, and two prediction layers, each with the
# pattern MM.
PREDICTION, STAGE = "/", "|"
KINDS = "MG*-E"
"""Letters for kinds of layers in a pattern; D is new in 0.18, + in 0.19."""


def _main(a: Namespace) -> str:
    return str(a.hybrid_layer_pattern or "").split(PREDICTION)[0]


def _predictions(a: Namespace) -> list[str]:
    return str(a.hybrid_layer_pattern or "").split(PREDICTION)[1:]


def _unknown(kinds: str) -> Predicate:
    """Return a predicate that is true if the pattern has letters other than `kinds`."""

    def fails(a: Namespace) -> bool:
        repeats = "".join(_predictions(a))
        return bool(set(_main(a)) - set(kinds + STAGE) or set(repeats) - set(kinds))

    return fails


def _repeats(a: Namespace) -> None:
    """Append the separate pattern of prediction layers to the main pattern, once for each
    prediction layer.
    """
    # mtp_hybrid_override_pattern is deprecated; upstream keeps it to load old checkpoints.
    repeat = a.mtp_hybrid_override_pattern
    if repeat is not None and (a.mtp_num_layers or 0) > 0 and not _predictions(a):
        a.hybrid_layer_pattern = PREDICTION.join([_main(a)] + [repeat] * a.mtp_num_layers)
        a.mtp_hybrid_override_pattern = None


def _segments(a: Namespace) -> int:
    return _main(a).count(STAGE) + 1


def _virtual(a: Namespace) -> int | None:
    """Return the number of virtual stages on each pipeline rank; None if each rank has a single
    stage.
    """
    # A pattern without | is one segment. Megatron spreads it over the ranks when it builds the
    # model, without virtual stages.
    stages = _segments(a) // a.transformer_pipeline_model_parallel_size
    return int(stages) if stages > 1 else None


def _beside(name: str, only_with_stages: bool = False) -> Step:
    """Return a check that refuses the argument `name`, which sets stages, together with a layer
    pattern.

    If `only_with_stages` is true, the check only refuses `name` together with a pattern that contains `|`.
    """

    def fails(a: Namespace) -> bool:
        conflict = a.hybrid_layer_pattern is not None and (
            STAGE in _main(a) or not only_with_stages
        )
        return conflict and getattr(a, name) is not None and getattr(a, name) is not False

    problem = "with hybrid_layer_pattern, whose | separators define the stages; drop it"
    return check(HYBRID, fails, f"{name}: found {{{name}}} {problem}", since="0.17.0")


HYBRID_STEPS: tuple[Step, ...] = (
    excludes(
        set_("hybrid_override_pattern"),
        set_("hybrid_layer_pattern"),
        HYBRID,
        "keep --hybrid-layer-pattern",
        since="0.17.0",
    ),
    derive(HYBRID, follow("hybrid_layer_pattern", "hybrid_override_pattern"), since="0.17.0"),
    derive(HYBRID, _repeats, since="0.17.0"),
    *(
        check(
            "_validate_pattern",
            _unknown(kinds),
            f"hybrid_layer_pattern: found {{hybrid_layer_pattern}}; expected the letters {' '.join(kinds)}, and | between stages",
            since=since,
            until=until,
            name="found-expected-layers-of-m",
        )
        for kinds, since, until in (
            (KINDS, "0.17.0", "0.18.0"),
            (KINDS + "D", "0.18.0", "0.19.0"),
            (KINDS + "D+", "0.19.0", ""),
        )
    ),
    check(
        "_validate_pattern",
        lambda a: any(
            "*" in part and ("D" in part or "+" in part) for part in (_main(a), *_predictions(a))
        ),
        "hybrid_layer_pattern: found {hybrid_layer_pattern}, which mixes * with D or +; "
        "expected only one kind of attention",
        since="0.18.0",
    ),
    check(
        "parse_hybrid_pattern",
        lambda a: len(set(_predictions(a))) > 1,
        "hybrid_layer_pattern: found {hybrid_layer_pattern}; expected the same pattern after each /",
        since="0.17.0",
    ),
    # The pattern decides over a given num_layers, which may come from a checkpoint
    # (--use-checkpoint-args).
    derive(
        HYBRID,
        compute_argument(
            "num_layers",
            lambda a: len(_main(a).replace(STAGE, "")),
            any_given("hybrid_layer_pattern"),
        ),
        since="0.17.0",
    ),
    _beside("decoder_first_pipeline_num_layers", only_with_stages=True),
    _beside("decoder_last_pipeline_num_layers", only_with_stages=True),
    _beside("num_layers_per_virtual_pipeline_stage"),
    _beside("num_virtual_stages_per_pipeline_rank"),
    _beside("pipeline_model_parallel_layout"),
    _beside("account_for_embedding_in_pipeline_split"),
    _beside("account_for_loss_in_pipeline_split"),
    check(
        HYBRID,
        lambda a: (
            a.hybrid_layer_pattern is not None
            and _segments(a) > 1
            and _segments(a) % a.transformer_pipeline_model_parallel_size != 0
        ),
        "hybrid_layer_pattern: found {hybrid_layer_pattern}; expected a number of stages that"
        " is a multiple of pipeline_model_parallel_size ({pipeline_model_parallel_size})",
        since="0.17.0",
    ),
    derive(
        HYBRID,
        compute_argument(
            "virtual_pipeline_model_parallel_size", _virtual, any_given("hybrid_layer_pattern")
        ),
        since="0.17.0",
    ),
    derive(
        HYBRID,
        compute_argument(
            "mtp_num_layers",
            lambda a: len(_predictions(a)),
            lambda a: a.hybrid_layer_pattern and any(_predictions(a)),
        ),
        since="0.17.0",
    ),
    check(
        MTP,
        lambda a: a.mtp_num_layers and a.position_embedding_type not in ("rope", "none"),
        "position_embedding_type: found {position_embedding_type}; multi-token prediction expects rope or none",
        since="0.17.0",
    ),
    # Upstream infers latent attention from D, sparse attention that works on latents, and from +,
    # latent attention itself.
    derive(
        HYBRID,
        when(lambda a: "D" in (a.hybrid_layer_pattern or ""), multi_latent_attention=True),
        since="0.18.0",
    ),
    derive(
        HYBRID,
        when(lambda a: "+" in (a.hybrid_layer_pattern or ""), multi_latent_attention=True),
        since="0.19.0",
    ),
)

MTP_STEPS: tuple[Step, ...] = (
    derive(MTP, when(lambda a: (a.mtp_num_layers or 0) < 2, mtp_hsm=False), since=MAIN),
    check(
        MTP,
        lambda a: a.mtp_num_layers and a.use_legacy_models,
        "mtp_num_layers: found with use_legacy_models, which has no multi-token prediction; drop one of them",
        since="0.12.0",
        until="0.18.0",
        name="found-with-use_legacy_models-which-cannot",
    ),
    excludes(
        "mtp_num_layers",
        above("context_parallel_size", 1),
        MTP,
        "this release expects 1",
        since="0.12.0",
        until="0.14.0",
    ),
    check(
        MTP,
        lambda a: a.mtp_num_layers and a.position_embedding_type not in ("rope", "none"),
        "position_embedding_type: found {position_embedding_type}; multi-token prediction expects rope or none",
        since="0.12.0",
        until="0.17.0",
    ),
)
