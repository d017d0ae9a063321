"""Compares ZeRO levels: in a model of few pipeline stages, a lower level may take less memory."""

from __future__ import annotations

from collections.abc import Sequence

from bridge.layout.shard import Layout, Parameter
from bridge.plan.plan import Plan
from bridge.stack.findings import Finding
from bridge.stack.rules import Effect

MEBIBYTE = 2**20


def find_dearer_level(
    plan: Plan, layout: Layout, parameters: Sequence[Parameter]
) -> Finding | None:
    """Return a finding if `parameters` take less memory on a rank at a lower ZeRO level than at the
    level of `layout`, the plan's layout.

    Level 2 stores slices of all gradients, and level 3 also stores slices of all weights. Beside
    the slices of gradients there are two whole buffers, each as large as the largest stage. Beside
    the slices of weights there are two more. With few stages, slices and buffers together can take
    more memory than whole copies of all stages.
    """
    sizes: dict[int, int] = {}
    for level in range(1, layout.level):
        # Buffer counts of the plan would override the level.
        update = {"stage": level, "weight_buffers": None, "grad_buffers": None}
        lower = plan.model_copy(update={"zero": plan.zero.model_copy(update=update)})
        other = Layout.of(lower, parameters, layout.stages, layout.data)
        sizes[level] = sum(other.bytes().values())
    best = min(sizes, key=lambda level: sizes[level], default=layout.level)
    own = sum(layout.bytes().values())
    if best == layout.level or sizes[best] >= own:
        return None
    here, there = (f"{size / MEBIBYTE:,.1f} MiB" for size in (own, sizes[best]))
    why = f"with {layout.stages} stages, two whole buffers take more memory than slices save"
    message = f"ZeRO level {layout.level} takes {here} on a rank, level {best} only {there}: {why}; use level {best}"
    return Finding("zero.stage", message, Effect.COST, given=True)
