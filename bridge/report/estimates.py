"""An estimate of memory as text, as JSON and as the bars of a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from bridge.layout.memory.estimate import MOMENTS as MOMENTS_OF_STEP, Estimate, RankEstimate
from bridge.layout.memory.margins import CONTEXT, RESERVED
from bridge.layout.memory.terms import sum_by_kind
from bridge.report import as_json as report, json_types
from bridge.report.pictures.rank_bars import BARS, Bar
from bridge.report.tables import Grid
from bridge.stack.findings import Finding
from bridge.stack.rules import Effect
from bridge.translation.memory_changes import Change

if TYPE_CHECKING:
    from rich.console import Console


from bridge.report.layouts import size_text

GIB = 2**30


@dataclass(frozen=True)
class Answer:
    """What is known of a run: its estimate, the memory of a device in bytes, and the changes with
    which a run that does not fit would fit.
    """

    estimate: Estimate
    memory: int | None
    changes: Sequence[Change]

    @property
    def fits(self) -> bool | None:
        """Whether the run fits; None if the memory of a device was not given."""
        return None if self.memory is None else self.estimate.largest.needed <= self.memory


def advice(answer: Answer) -> str:
    if not answer.changes:
        return "none of the changes that are known here makes it fit: use more ranks"
    return f"with {_settings_text(answer.changes[0])} it fits"


def as_json(
    answer: Answer, findings: Sequence[Finding], threshold: Effect = Effect.NUMBERS
) -> json_types.Estimated:
    """Return an answer as one JSON object. Its form is stable and described in docs/json.md."""
    return {
        "fits": answer.fits,
        "memory": answer.memory,
        "needed": answer.estimate.largest.needed,
        "ranks": [_rank_json(rank) for rank in answer.estimate.ranks],
        "changes": [
            {"settings": dict(one.settings), "needed": one.needed, "price": one.price}
            for one in answer.changes
        ],
        "findings": list(map(report.finding_json, findings)),
        "exit_code": report.exit_of(findings, threshold),
    }


def _rank_json(rank: RankEstimate) -> json_types.NeededByRank:
    return {
        "pipeline_rank": rank.pipeline,
        "moment": rank.moment,
        "needed": rank.needed,
        "allocated": rank.peak,
        "between_steps": rank.steady,
        "kinds": cast("dict[str, int]", dict(sum_by_kind(rank.terms))),
        "terms": [
            {"kind": one.kind, "what": one.what, "bytes": one.bytes, "formula": one.formula}
            for one in rank.terms
        ],
    }


def verdict(answer: Answer) -> str:
    rank = answer.estimate.largest
    place = f"on {_stage_name(rank.pipeline, len(answer.estimate.ranks))}"
    sizes = sorted(sum_by_kind(rank.terms).items(), key=lambda item: -item[1])
    parts = ", ".join(f"{kind} {size / GIB:,.1f}" for kind, size in sizes if size >= 0.05 * GIB)
    needed = f"{rank.needed / GIB:,.1f} GiB {place}, at {rank.moment}; {parts}"
    if answer.memory is None:
        return f"needs {needed}"
    return (
        f"{'fits' if answer.fits else 'does not fit'} in {answer.memory / GIB:,.10g} GB: {needed}"
    )


def _stage_name(rank: int, count: int) -> str:
    if count == 1:
        return "each rank"
    return {0: "the first stage", count - 1: "the last stage"}.get(rank, f"stage {rank + 1}")


def print_answer(answer: Answer, explain: bool, out: Console) -> None:
    out.print(verdict(answer), style="bold", markup=False, highlight=False)
    if answer.estimate.doubt:
        out.print(f"note: {answer.estimate.doubt}", markup=False, highlight=False)
    for number, change in enumerate(answer.changes, 1):
        out.print(f"{number}. {_settings_text(change)}", markup=False, highlight=False)
        saved = answer.estimate.largest.needed - change.needed
        out.print(
            f"   {size_text(change.needed)}, {size_text(saved)} less: {change.price}",
            markup=False, highlight=False,
        )  # fmt: skip
    if answer.fits is False and not answer.changes:
        out.print(advice(answer), markup=False, highlight=False)
    out.print(_ranks_table(answer.estimate))
    if explain:
        out.print(_terms_table(answer.estimate.largest, len(answer.estimate.ranks)))
    for note in answer.estimate.notes:
        out.print(f"note: {note}", markup=False, highlight=False)
    out.print(
        f"needed: allocated x {RESERVED} for fragments, and {size_text(CONTEXT)} for the CUDA context and NCCL",
        markup=False, highlight=False,
    )  # fmt: skip


def _settings_text(change: Change) -> str:
    return ", ".join(
        f"without {path}"
        if value is None
        else f"{path}: {(str(value).lower() if isinstance(value, bool) else str(value))}"
        for path, value in change.settings.items()
    )


def _ranks_table(found: Estimate) -> Grid:
    kinds = list(dict.fromkeys(kind for rank in found.ranks for kind in sum_by_kind(rank.terms)))
    table = Grid("Memory by stage", ("stage", *kinds, "allocated", "needed"), numbers=True)
    for first, last in _alike(found.ranks):
        rank = found.ranks[first]
        sizes = sum_by_kind(rank.terms)
        name = str(first + 1) if first == last else f"{first + 1} to {last + 1}"
        cells = [size_text(sizes.get(kind, 0)) for kind in kinds]
        table.add_row(name, *cells, size_text(rank.peak), size_text(rank.needed))
    return table


def bars_of(found: Estimate) -> list[Bar]:
    """Return a bar for each stage and moment of a step, or for each stage at its peak if there are
    too many.
    """
    bars, peaks = [], []
    for first, last in _alike(found.ranks):
        rank = found.ranks[first]
        stage = str(first + 1) if first == last else f"{first + 1} to {last + 1}"
        place = f"stage {stage}, " if len(found.ranks) > 1 else ""
        moments = [one for one in MOMENTS_OF_STEP.values() if one in rank.moments]
        terms_of = {"between steps": rank.between}
        terms_of |= {name: (*rank.states, *rank.moments[name]) for name in moments}
        for name, terms in terms_of.items():
            sizes: dict[str, int] = dict(
                sum_by_kind(one for one in terms if one.kind != "host").items()
            )
            whole = sum(sizes.values())
            sizes["margins"] = round(whole * RESERVED) + CONTEXT - whole
            bars.append(Bar(f"{place}{name}", sizes))
            if name == rank.moment:
                peaks.append(bars[-1])
    return bars if len(bars) <= BARS else peaks


def _alike(ranks: Sequence[RankEstimate]) -> Iterator[tuple[int, int]]:
    """Yield the first and the last of each run of ranks that need the same."""
    first = 0
    for index in range(1, len(ranks) + 1):
        if index == len(ranks) or sum_by_kind(ranks[index].terms) != sum_by_kind(
            ranks[first].terms
        ):
            yield first, index - 1
            first = index


def _terms_table(rank: RankEstimate, count: int) -> Grid:
    title = f"{_stage_name(rank.pipeline, count).capitalize()}, at {rank.moment}"
    table = Grid(title, ("kind", "what", "bytes", "formula"))
    for one in rank.terms:
        table.add_row(one.kind, one.what, size_text(one.bytes), one.formula)
    return table
