"""Checks and derivations of `TransformerConfig.__post_init__` for layouts, uneven stages, and
embedding and loss that count as layers.
"""

from __future__ import annotations

from compat.megatron.arguments import layout
from compat.megatron.arguments.namespace import Namespace, Step
from compat.megatron.arguments.steps import any_given, check, derive, under
from compat.megatron.releases import RELEASES

CLASS = "TransformerConfig: pipeline"
FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
DEFECT = "; because of a defect of this release, the run ends with a ZeroDivisionError"


def _accounts(c: Namespace) -> int:
    """Return how many layers embedding and loss count as: 0, 1 or 2."""
    ends = (c.account_for_embedding_in_pipeline_split, c.account_for_loss_in_pipeline_split)
    return len([end for end in ends if end])


def _uneven(c: Namespace) -> bool:
    # Upstream's branches are exclusive, in this order: a layout, layers of the first and last
    # stage, embedding and loss.
    return c.pipeline_model_parallel_layout is None and any_given(FIRST, LAST)(c)


def _middle(c: Namespace) -> tuple[int, int]:
    """Return the number of layers and the number of ranks. The first stage is left out of both if
    its number of layers is given, and so is the last stage.
    """
    ends = [getattr(c, name) for name in (FIRST, LAST) if getattr(c, name) is not None]
    return c.num_layers - sum(ends), c.pipeline_model_parallel_size - len(ends)


def _spread(c: Namespace) -> bool:
    """Whether the number of middle layers is known, and there are ranks for them."""
    return _uneven(c) and c.num_layers is not None and _middle(c)[1] != 0


def _count_layers(c: Namespace) -> None:
    """Set the numbers of stages and layers of a layout, for the checks of the layout."""
    parts, ranks = layout.of(c), c.pipeline_model_parallel_size
    if parts is not None:
        letters = _letters(c)
        c.layout_stages, c.layout_virtual = len(parts), len(parts) // ranks
        c.layout_decoders, c.layout_predictions = letters.count("t"), letters.count("m")


def _round(c: Namespace) -> bool:
    """Whether the layout gives each pipeline rank the same number of stages, which equals the number
    of virtual stages if that is set. Most checks of a layout assume this.
    """
    return (
        c.layout_stages is not None
        and c.layout_stages % c.pipeline_model_parallel_size == 0
        and c.virtual_pipeline_model_parallel_size in (None, c.layout_virtual)
    )


def _letters(c: Namespace, stages: slice = slice(None)) -> str:
    """Return the letters of some of the layout's stages."""
    return "".join((layout.of(c) or ())[stages])


def _laid_out(c: Namespace) -> None:
    """Set the virtual stages of a layout, and whether prediction layers have their own stage."""
    if c.layout_stages is None:
        return
    ranks = c.pipeline_model_parallel_size
    if c.virtual_pipeline_model_parallel_size is None and c.layout_stages > ranks:
        c.virtual_pipeline_model_parallel_size = c.layout_virtual
    # `in`, because not every release has the field, and a name that is missing reads as None.
    if "mtp_standalone" in c.__dict__:
        # The last `ranks` stages are the last virtual stage of each rank.
        c.mtp_standalone = "m" in _letters(c, slice(-ranks, -1))


def _end(name: str, where: str) -> tuple[Step, ...]:
    """Return the checks of the number of layers of one stage; `where` is `first stage` or `last
    stage`.
    """
    return (
        check(
            CLASS,
            lambda c: _uneven(c) and getattr(c, name) is not None and getattr(c, name) <= 0,
            f"{name}: found {{{name}}}; expected a positive number",
            since="0.11.0",
        ),
        check(
            CLASS,
            lambda c: (
                _uneven(c)
                and getattr(c, name) is not None
                and c.virtual_pipeline_model_parallel_size
                and getattr(c, name) % c.virtual_pipeline_model_parallel_size != 0
            ),
            f"{name}: found {{{name}}}; expected a multiple of virtual_pipeline_model_parallel_size"
            " ({virtual_pipeline_model_parallel_size}) on the " + where + " stage",
            since="0.11.0",
        ),
    )


def _counts_ends_as_layers(c: Namespace) -> bool:
    """Whether embedding or loss count as layers.

    Since 0.13 they do only if no other setting determines the stages.
    """
    others = _uneven(c) or c.pipeline_model_parallel_layout is not None
    return bool(
        _accounts(c)
        and c.num_layers is not None
        and not (others and RELEASES.since(c.release, "0.13.0"))
    )


def _layers_do_not_divide(c: Namespace) -> bool:
    return (
        _counts_ends_as_layers(c)
        and (c.num_layers + _accounts(c)) % c.pipeline_model_parallel_size != 0
    )


_laid = under("PipelineParallelLayerLayout.validate_layer_layout", _round, "0.13.0")
LAYOUT = "pipeline_model_parallel_layout"
LAYOUT_CHECKS: tuple[Step, ...] = (
    layout.multiple(CLASS),
    check(
        CLASS,
        lambda c: (
            c.layout_stages % c.pipeline_model_parallel_size == 0
            and c.virtual_pipeline_model_parallel_size not in (None, c.layout_virtual)
        ),
        f"{LAYOUT}: found {{layout_virtual}} stages per rank; expected"
        " virtual_pipeline_model_parallel_size ({virtual_pipeline_model_parallel_size})",
        since="0.13.0",
        needs=("layout_stages",),
    ),
    _laid(
        lambda c: "?" in _letters(c), f"{LAYOUT}: expected layers embedding, decoder, mtp and loss"
    ),
    _laid(
        lambda c: not _letters(c).startswith("E") or _letters(c).count("E") != 1,
        f"{LAYOUT}: expected exactly one embedding, as the first layer",
    ),
    _laid(
        lambda c: not _letters(c).endswith("L") or _letters(c).count("L") != 1,
        f"{LAYOUT}: expected exactly one loss, as the last layer",
    ),
    _laid(
        lambda c: c.layout_decoders != c.num_layers,
        f"{LAYOUT}: found {{layout_decoders}} decoder layers; expected num_layers ({{num_layers}})",
        needs=("num_layers",),
    ),
    _laid(
        lambda c: c.layout_predictions,
        f"{LAYOUT}: found prediction layers, which this release does not support in a layout",
        until="0.14.0",
    ),
    _laid(
        lambda c: c.layout_predictions != (c.mtp_num_layers or 0),
        f"{LAYOUT}: found {{layout_predictions}} prediction layers; expected mtp_num_layers"
        " ({mtp_num_layers})",
        since="0.14.0",
    ),
    _laid(
        lambda c: "t" in _letters(c).partition("m")[2],
        f"{LAYOUT}: expected all decoder layers before the prediction layers",
        since="0.14.0",
    ),
    # Stages go round the ranks, so the last ones are the last virtual stage of each rank.
    _laid(
        lambda c: "m" in _letters(c, slice(-c.pipeline_model_parallel_size)),
        f"{LAYOUT}: expected prediction layers only in the last virtual stage of a rank",
        since="0.14.0",
    ),
    _laid(
        lambda c: any(0 < part.count("m") < c.layout_predictions for part in layout.of(c) or ()),
        f"{LAYOUT}: expected all prediction layers in one stage",
        since="0.14.0",
    ),
    _laid(
        lambda c: "m" in _letters(c, slice(-1)),
        f"{LAYOUT}: expected the prediction layers in the last stage, with the loss",
        since="0.15.0",
        until="0.16.0",
    ),
)
"""Checks of a layout. If several checks fail, all of their problems are reported."""

PIPELINE_STEPS: tuple[Step, ...] = (
    check(
        CLASS,
        lambda c: (
            c.recompute_granularity is not None
            and c.virtual_pipeline_model_parallel_size
            and c.num_layers % c.virtual_pipeline_model_parallel_size != 0
        ),
        "num_layers: found {num_layers}; recomputation in this release expects a multiple of"
        " virtual_pipeline_model_parallel_size ({virtual_pipeline_model_parallel_size})",
        until="0.11.0",
        needs=("num_layers",),
    ),
    check(
        CLASS,
        lambda c: any_given(FIRST, LAST)(c) and _accounts(c),
        f"{FIRST}: found (or {LAST}) with account_for_embedding_in_pipeline_split or"
        " account_for_loss_in_pipeline_split; keep one of the two kinds of settings",
        name="named-layers-of-the-first",
        since="0.11.0",
    ),
    check(
        CLASS,
        lambda c: (
            c.pipeline_model_parallel_layout is not None
            and (any_given(FIRST, LAST)(c) or _accounts(c))
        ),
        "pipeline_model_parallel_layout: found with other settings of uneven stages; keep one of them",
        since="0.13.0",
    ),
    *layout.READABLE,
    derive(CLASS, _count_layers, since="0.13.0"),
    *LAYOUT_CHECKS,
    derive(CLASS, _laid_out, since="0.13.0"),
    check(
        CLASS,
        lambda c: (
            c.virtual_pipeline_model_parallel_size == 0
            and (_uneven(c) or _counts_ends_as_layers(c))
        ),
        "virtual_pipeline_model_parallel_size: found 0; expected a positive number; name at least one virtual stage",
        since="0.11.0",
    ),
    *_end(FIRST, "first"),
    *_end(LAST, "last"),
    check(
        CLASS,
        lambda c: _uneven(c) and c.num_layers is not None and _middle(c)[1] == 0,
        f"pipeline_model_parallel_size: found {{pipeline_model_parallel_size}}, and every stage has a given"
        f" number of layers{DEFECT}; set the layers of fewer stages, or use more pipeline ranks",
        since="0.11.0",
        until="0.13.0",
        name="found-all-of-it-first",
    ),
    check(
        CLASS,
        lambda c: (
            _uneven(c) and c.num_layers is not None and bool(_middle(c)[0]) != bool(_middle(c)[1])
        ),
        f"num_layers: found {{num_layers}}, with {{{FIRST}}} on the first stage and {{{LAST}}} on the last;"
        " with pipeline_model_parallel_size {pipeline_model_parallel_size}, the stages between them get no layers, or"
        " there is no stage for the layers that remain; change one of these numbers",
        since="0.16.0",
    ),
    check(
        CLASS,
        lambda c: _spread(c) and _middle(c)[0] % _middle(c)[1] != 0,
        f"num_layers: found {{num_layers}}, with {{{FIRST}}} on the first stage and {{{LAST}}} on the last;"
        " the layers that remain cannot be shared equally by the pipeline ranks that remain"
        f" (pipeline_model_parallel_size {{pipeline_model_parallel_size}}); change one of these numbers",
        since="0.11.0",
    ),
    check(
        CLASS,
        lambda c: (
            _spread(c)
            and c.virtual_pipeline_model_parallel_size
            and _middle(c)[0] // _middle(c)[1] % c.virtual_pipeline_model_parallel_size != 0
        ),
        f"num_layers: found {{num_layers}}, with {{{FIRST}}} on the first stage and {{{LAST}}} on the last;"
        " expected the layers of each other rank to be a multiple of"
        f" virtual_pipeline_model_parallel_size ({{virtual_pipeline_model_parallel_size}})",
        since="0.11.0",
    ),
    # Without virtual stages, 0.11 gives embedding and loss whole pipeline ranks, and not the place
    # of one layer each.
    check(
        CLASS,
        lambda c: (
            _counts_ends_as_layers(c)
            and c.virtual_pipeline_model_parallel_size is None
            and c.pipeline_model_parallel_size - _accounts(c) == 0
        ),
        f"pipeline_model_parallel_size: found {{pipeline_model_parallel_size}}, and embedding"
        f" and loss leave no stage for layers{DEFECT}; use more pipeline ranks",
        since="0.11.0",
        until="0.12.0",
        name="found-all-of-it-taken",
    ),
    check(
        CLASS,
        lambda c: (
            _counts_ends_as_layers(c)
            and c.virtual_pipeline_model_parallel_size is None
            and c.pipeline_model_parallel_size - _accounts(c) != 0
            and c.num_layers % (c.pipeline_model_parallel_size - _accounts(c)) != 0
        ),
        "num_layers: found {num_layers}; expected a multiple of the number of pipeline ranks that "
        "hold neither embedding nor loss (pipeline_model_parallel_size "
        "{pipeline_model_parallel_size})",
        since="0.11.0",
        until="0.12.0",
    ),
    check(
        CLASS,
        lambda c: c.virtual_pipeline_model_parallel_size is not None and _layers_do_not_divide(c),
        "num_layers: found {num_layers}; with embedding and loss counted as layers, expected a multiple of"
        " pipeline_model_parallel_size ({pipeline_model_parallel_size})",
        since="0.11.0",
        until="0.12.0",
    ),
    check(
        CLASS,
        _layers_do_not_divide,
        "num_layers: found {num_layers}; with embedding and loss counted as layers, expected a multiple of"
        " pipeline_model_parallel_size ({pipeline_model_parallel_size})",
        since="0.12.0",
    ),
    check(
        CLASS,
        lambda c: (
            _counts_ends_as_layers(c)
            and c.virtual_pipeline_model_parallel_size
            and int((c.num_layers + _accounts(c)) // c.pipeline_model_parallel_size)
            % c.virtual_pipeline_model_parallel_size
            != 0
        ),
        "num_layers: found {num_layers}; with embedding and loss counted as layers, expected a "
        "number of layers on each rank that is a multiple of virtual_pipeline_model_parallel_size "
        "({virtual_pipeline_model_parallel_size})",
        since="0.11.0",
    ),
)
