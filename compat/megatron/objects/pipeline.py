"""Steps of `TransformerConfig.__post_init__` for layouts, uneven stages, and embedding and loss that count as layers."""

from __future__ import annotations

from collections.abc import Iterator

from compat.megatron.arguments import layout
from compat.megatron.arguments.steps import Namespace, Step, check, derive, given, inspect
from compat.megatron.releases import RELEASES

CLASS = "TransformerConfig: pipeline"
FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
DEFECT = "; a defect of this release ends the run there (ZeroDivisionError)"


def _accounts(c: Namespace) -> int:
    """Return how many layers embedding and loss count as: 0, 1 or 2."""
    ends = (c.account_for_embedding_in_pipeline_split, c.account_for_loss_in_pipeline_split)
    return len([end for end in ends if end])


def _uneven(c: Namespace) -> bool:
    # Upstream's branches are exclusive, in this order: a layout, layers of the first and last
    # stage, embedding and loss.
    return c.pipeline_model_parallel_layout is None and given(FIRST, LAST)(c)


def _middle(c: Namespace) -> tuple[int, int]:
    """Return the number of layers and the number of ranks, both without the first and the last
    stage if these have a given number of layers.
    """
    ends = [getattr(c, name) for name in (FIRST, LAST) if getattr(c, name) is not None]
    return c.num_layers - sum(ends), c.pipeline_model_parallel_size - len(ends)


def _spread(c: Namespace) -> bool:
    """Whether the number of middle layers is known, and there are ranks for them."""
    return _uneven(c) and c.num_layers is not None and _middle(c)[1] != 0


def _parts(c: Namespace) -> tuple[str, ...]:
    return layout.written(c.pipeline_model_parallel_layout)


def _unfit(parts: tuple[str, ...], c: Namespace) -> Iterator[str]:
    """Yield a message for each problem of a layout."""
    ranks, virtual = c.pipeline_model_parallel_size, c.virtual_pipeline_model_parallel_size
    if len(parts) % ranks:
        yield f"found {len(parts)} stages; expected a multiple of pipeline_model_parallel_size ({ranks})"
    elif virtual is not None and virtual != len(parts) // ranks:
        stages = f"{len(parts) // ranks} stages per rank"
        yield f"found {stages}; expected virtual_pipeline_model_parallel_size ({virtual})"
    # The other checks count on stages that go round the ranks.
    else:
        yield from layout.problems(parts, ranks, c.num_layers, c.mtp_num_layers, c.release)


def _laid_out(c: Namespace) -> None:
    """Set the virtual stages of a layout, and whether prediction layers have their own stage."""
    if c.pipeline_model_parallel_layout is None:
        return
    parts, ranks = _parts(c), c.pipeline_model_parallel_size
    if c.virtual_pipeline_model_parallel_size is None and len(parts) > ranks:
        c.virtual_pipeline_model_parallel_size = len(parts) // ranks
    # `in`, because not every release has the field, and a name that is missing reads as None.
    if "mtp_standalone" in c.__dict__:
        c.mtp_standalone = layout.standalone(parts, ranks)


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


def _counted(c: Namespace) -> bool:
    """Whether embedding or loss count as layers.

    Since 0.13 they do only if no other setting determines the stages.
    """
    others = _uneven(c) or c.pipeline_model_parallel_layout is not None
    return bool(
        _accounts(c)
        and c.num_layers is not None
        and not (others and RELEASES.since(c.release, "0.13.0"))
    )


def _counted_per_rank(c: Namespace) -> int:
    return int((c.num_layers + _accounts(c)) // c.pipeline_model_parallel_size)


def _counted_indivisible(c: Namespace) -> bool:
    return _counted(c) and (c.num_layers + _accounts(c)) % c.pipeline_model_parallel_size != 0


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
        lambda c: given(FIRST, LAST)(c) and _accounts(c),
        f"{FIRST}: found (or {LAST}) with account_for_embedding_in_pipeline_split or"
        " account_for_loss_in_pipeline_split; keep one of the two kinds of settings",
        name="named-layers-of-the-first",
        since="0.11.0",
    ),
    check(
        CLASS,
        lambda c: (
            c.pipeline_model_parallel_layout is not None and (given(FIRST, LAST)(c) or _accounts(c))
        ),
        "pipeline_model_parallel_layout: found with other settings of uneven stages; keep one of them",
        since="0.13.0",
    ),
    inspect(
        CLASS,
        lambda c: (
            f"pipeline_model_parallel_layout: {problem}"
            for problem in (
                _unfit(_parts(c), c) if c.pipeline_model_parallel_layout is not None else ()
            )
        ),
        since="0.13.0",
    ),
    derive(CLASS, _laid_out, since="0.13.0"),
    check(
        CLASS,
        lambda c: c.virtual_pipeline_model_parallel_size == 0 and (_uneven(c) or _counted(c)),
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
        " pipeline_model_parallel_size {pipeline_model_parallel_size} has stages between them without layers, or"
        " layers are left without a stage; change one of these numbers",
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
            _counted(c)
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
            _counted(c)
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
        lambda c: c.virtual_pipeline_model_parallel_size is not None and _counted_indivisible(c),
        "num_layers: found {num_layers}; with embedding and loss counted as layers, expected a multiple of"
        " pipeline_model_parallel_size ({pipeline_model_parallel_size})",
        since="0.11.0",
        until="0.12.0",
    ),
    check(
        CLASS,
        _counted_indivisible,
        "num_layers: found {num_layers}; with embedding and loss counted as layers, expected a multiple of"
        " pipeline_model_parallel_size ({pipeline_model_parallel_size})",
        since="0.12.0",
    ),
    check(
        CLASS,
        lambda c: (
            _counted(c)
            and c.virtual_pipeline_model_parallel_size
            and _counted_per_rank(c) % c.virtual_pipeline_model_parallel_size != 0
        ),
        "num_layers: found {num_layers}; with embedding and loss counted as layers, expected a "
        "number of layers on each rank that is a multiple of virtual_pipeline_model_parallel_size "
        "({virtual_pipeline_model_parallel_size})",
        since="0.11.0",
    ),
)
