"""Pages: an HTML file about one run, or about two compared runs, without scripts and external
resources.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from bridge.trace.comparison import Comparison
from bridge.trace.pages.series import MOST_RANKS, FindingOfFile, Series
from bridge.trace.pages.svg import Curve, Map, draw_chart, draw_map, escape_text
from bridge.trace.segments import Floats
from bridge.trace.verdicts import TensorVerdict, share_of_bound

STYLE = Path(__file__).parent / "page.css"
SHARES = (0.1, 1.0, 10.0, 1000.0)
"""For maps of two runs, the limits between the levels of a cell. They are distances divided by the
bound of rounding: from 1 on, rounding does not explain the distance.
"""
SHARE_WORDS = (
    "equal, or nearly",
    "rounding",
    "differs: beyond the bound of rounding",
    "differs by 10 times the bound or more",
    "differs by 1000 times the bound or more, or NaN",
)
TIMES = (2.0, 8.0, 100.0)
"""For maps of one run, the limits between the levels of a cell. They are factors between a norm
and the usual norm of the layer. NaN has the highest level.
"""
TIMES_WORDS = (
    "as usual",
    "at least twice the usual norm, or at most half of it",
    "at least 8 times the usual norm, or at most an eighth of it",
    "at least 100 times the usual norm, or at most a hundredth of it",
    "NaN or infinite",
)
SHOWN = 200
"""Maximum number of rows that a table shows."""
Levels = np.ndarray[tuple[int, ...], np.dtype[np.int8]]


def run_page(series: Series) -> str:
    """Return the page of one run."""
    body = [
        _about_run("Run", series),
        _findings_section([("", series.findings)]),
        *_render_charts([("", series)], {}),
    ]
    if series.sizes.size:
        body += [
            f"<h2>Norms of {escape_text(series.mapped)}, by layer and step</h2>",
            _map_legend(TIMES_WORDS, "the norm compared with the layer's median over all steps"),
        ]
        body += [draw_map(panel) for panel in _run_maps(series)]
    return _render_page(f"{series.folder}", body)


def comparison_page(comparison: Comparison, both: tuple[Series, Series]) -> str:
    """Return the page of two compared runs."""
    first = comparison.divergence
    marks = {} if first is None else {first.name.step: "the runs first differ"}
    body = [
        _verdict_section(comparison),
        _about_run("A", both[0]),
        _about_run("B", both[1]),
        _settings_section(comparison),
    ]
    body.append(
        "<h2>Distance by layer and step</h2>"
        + _map_legend(SHARE_WORDS, "the largest distance of a tensor in this layer and step")
    )
    body += [draw_map(panel) for panel in _comparison_maps(comparison)]
    body += [
        *_render_charts([("A", both[0]), ("B", both[1])], marks),
        *_differences_section(comparison),
    ]
    body.append(_findings_section([("A", both[0].findings), ("B", both[1].findings)]))
    return _render_page(f"{comparison.first.folder} against {comparison.second.folder}", body)


def _render_page(title: str, body: Iterable[str]) -> str:
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        '<meta name="color-scheme" content="light dark"><meta http-equiv="Content-Security-Policy"'
        " content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{escape_text(title)}</title><style>{STYLE.read_text()}</style></head><body>\n<h1>{escape_text(title)}</h1>\n"
        + "\n".join(filter(None, body))
        + "\n</body></html>\n"
    )


def _about_run(label: str, series: Series) -> str:
    if series.run is None:
        return f"<p>{label}: {escape_text(series.folder)}: this run has findings, but no log of tensors.</p>"
    steps = f"steps {series.steps[0]} to {series.steps[-1]}" if series.steps else "no whole step"
    ranks = len(series.run.lines)
    more = f"; the first {MOST_RANKS} of {ranks} ranks are shown" if ranks > MOST_RANKS else ""
    notes = "".join(f"<br>{escape_text(note)}" for note in series.run.notes)
    return f"<p>{label}: {escape_text(series.folder)}: {escape_text(series.run.layout)}; {steps}{more}.{notes}</p>"


# Findings


def _findings_section(both: Sequence[tuple[str, Sequence[FindingOfFile]]]) -> str:
    rows = [(label, finding) for label, findings in both for finding in findings]
    if not rows:
        return (
            "<h2>Findings</h2><p>There are no findings: no invariant was violated, or none was "
            "checked.</p>"
        )
    several = len(both) > 1
    heads = [
        *(["run"] if several else []),
        "",
        "finding",
        "step",
        "where",
        "ranks",
        "numbers",
        "what it means",
    ]
    cells = [
        [
            *([label] if several else []),
            f"{'✕' if finding.severity == 'fault' else '!'} {finding.severity}",
            finding.id,
            finding.step,
            finding.where or "the run",
            _ranks_text(finding.ranks),
            finding.evidence,
            finding.meaning,
        ]
        for label, finding in rows[:SHOWN]
    ]
    more = f"<p>and {len(rows) - SHOWN} more findings</p>" if len(rows) > SHOWN else ""
    return f"<h2>Findings</h2>{_render_table(heads, cells)}{more}"


def _ranks_text(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks)) or "all"


def _render_table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    head = "".join(f"<th>{escape_text(word)}</th>" for word in heads)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape_text(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


# Curves


def _render_charts(both: Sequence[tuple[str, Series]], marks: Mapping[int, str]) -> list[str]:
    pairs = [(f" of {label}" if label else "", series) for label, series in both]
    loss = []
    for label, series in pairs:
        if series.losses.size:
            # Over the ranks that know it; NaN if none does, or if one has NaN.
            mask = ~np.isnan(series.losses).all(axis=0)
            none = np.full(len(series.losses), np.nan)
            mean: Floats = series.losses[:, mask].mean(axis=1) if mask.any() else none
            loss.append(Curve(f"loss{label}", series.steps, mean))
    kinds = dict.fromkeys(kind for _, series in pairs for kind in series.norms)
    charts = [draw_chart("Loss that backward starts from, mean over ranks", loss, marks)]
    for kind in kinds:
        curves = [
            Curve(f"norm of {kind}{label}", series.steps, series.norms[kind])
            for label, series in pairs
            if kind in series.norms
        ]
        charts.append(draw_chart(f"Norm of all {kind}", curves, marks))
    figures = [one for one in charts if one]
    missing = "" if charts[0] else "<p>The loss is not in the log.</p>"
    return ["<h2>Loss and norms</h2>", missing, *figures] if figures else []


# Maps


def _map_legend(words: Sequence[str], of: str) -> str:
    """Return the legend of a map, which explains the height and colour of cells. `words` explain
    the levels, and `of` says what is compared.
    """
    bars = (
        f'<path class="cell level{at}" stroke-width="12" d="M7 13v-{12 * (at + 1) / 5:.1f}"/>'
        for at in range(len(words))
    )
    rows = (
        f'<span><svg class="key cellkey" viewBox="0 0 14 14">{bar}</svg> {escape_text(word)}</span>'
        for bar, word in zip(bars, words, strict=True)
    )
    return (
        f"<p class='legend'>The worse a value, the more of its cell is filled ({escape_text(of)}):"
        f" {''.join(rows)}<span>empty: not logged</span></p>"
    )


def _group_levels(levels: Sequence[Levels]) -> dict[tuple[int, ...], Levels]:
    """Return the levels by groups of ranks: ranks with the same levels share a map."""
    groups: dict[bytes, list[int]] = defaultdict(list)
    for rank, own in enumerate(levels):
        groups[own.tobytes()].append(rank)
    return {tuple(ranks): levels[ranks[0]] for ranks in groups.values()}


def _run_maps(series: Series) -> list[Map]:
    with np.errstate(all="ignore"):
        usual = np.array([[_median_of_finite(row) for row in rank] for rank in series.sizes])[
            :, :, None
        ]
        # So many times larger, or so many times smaller.
        times = np.maximum(series.sizes / usual, usual / series.sizes)
    levels = np.full(series.sizes.shape, -1, np.int8)
    there = ~np.isnan(series.sizes)
    levels[there] = 0
    for level, least in enumerate(TIMES, 1):
        levels[there & (times >= least)] = level
    # Last: it outweighs what the size says.
    levels[there & ((series.odd > 0) | ~np.isfinite(series.sizes))] = 4
    rows, columns = np.flatnonzero(there.any(axis=(0, 2))), np.flatnonzero(there.any(axis=(0, 1)))
    layers, steps = (
        [series.layers[at] for at in rows.tolist()],
        [series.steps[at] for at in columns.tolist()],
    )
    if not layers or not steps:
        return []
    rank, frames = _places_of_findings(series.findings, layers, steps)
    groups = _group_levels([own[rows][:, columns] for own in levels])
    return [
        Map(_ranks_phrase(ranks, len(levels)), layers, steps, own, frames if rank in ranks else ())
        for ranks, own in groups.items()
    ]


def _median_of_finite(values: Floats) -> float:
    """Return the median of the finite positive values, or NaN if there are none."""
    some = values[(values > 0) & np.isfinite(values)]
    return float(np.median(some)) if len(some) else np.nan


def _places_of_findings(
    findings: Sequence[FindingOfFile], layers: Sequence[str], steps: Sequence[int]
) -> tuple[int, list[tuple[str, int, str]]]:
    """Return where the map marks the first finding that names a layer: the rank, and a list
    with the layer, step and caption. The list is empty if there is no such finding.
    """
    for finding in findings:
        # The longest name: a finding names a parameter, and layers may lie inside of others.
        layer = max(
            (layer for layer in layers if layer and f"{finding.where}.".startswith(f"{layer}.")),
            key=len,
            default=None,
        )
        if layer is not None and finding.step in steps:
            return min(finding.ranks, default=0), [
                (layer, finding.step, f"{finding.id}, step {finding.step}, {layer}")
            ]
    return 0, []


def _ranks_phrase(ranks: Sequence[int], world: int) -> str:
    if world == 1:
        return "The only rank"
    if len(ranks) == world:
        return f"All {world} ranks, which have equal values"
    word = "Ranks" if len(ranks) > 1 else "Rank"
    rest = len(ranks) - 16
    more = f" and {rest} more" if rest > 0 else ""
    return f"{word} {', '.join(map(str, ranks[:16]))}{more}"


def _comparison_maps(comparison: Comparison) -> list[Map]:
    world, first = min(len(comparison.first.lines), MOST_RANKS), comparison.divergence
    used = {line.name.layer for line in comparison.lines}
    layers = [layer for layer in ("", *comparison.first.layers) if layer in used]
    layers += sorted(used - set(layers))
    steps = sorted({line.name.step for line in comparison.lines})
    rows, columns = ({name: at for at, name in enumerate(names)} for names in (layers, steps))
    levels = np.full((world, len(layers), len(steps)), -1, np.int8)
    for line in comparison.lines:
        if line.verdict in ("unseen", "too coarse"):
            continue
        place = rows[line.name.layer], columns[line.name.step]
        level = sum(share_of_bound(line) >= least for least in SHARES)
        for rank in (rank for rank in line.ranks if rank < world):
            levels[(rank, *place)] = max(levels[(rank, *place)], level)
        others = levels[(slice(None), *place)]
        # If only some ranks differ, the others are drawn as equal.
        np.maximum(others, 0 if line.ranks else level, out=others)
    frames = (
        []
        if first is None
        else [(first.name.layer, first.name.step, f"the runs first differ: {first.name}")]
    )
    groups = _group_levels(list(levels))
    maps = []
    for ranks, own in groups.items():
        # The frame is drawn where the first difference was logged; without ranks, everywhere.
        here = first is not None and (not first.ranks or any(rank in first.ranks for rank in ranks))
        if own.size:
            maps.append(
                Map(_ranks_phrase(ranks, world), layers, steps, own, frames if here else ())
            )
    return maps


# Comparing


def _verdict_section(comparison: Comparison) -> str:
    first, why = comparison.divergence, comparison.diagnosis
    if first is None:
        has_values = any(line.verdict in ("equal", "rounding") for line in comparison.lines)
        text = (
            "✓ The runs are equal up to rounding."
            if has_values
            else "No tensor has values in both logs, so nothing was compared."
        )
        return f"<p class='verdict'>{text}</p>"
    lines = [
        f"✕ The runs first differ at <strong>{escape_text(first.name)}</strong>: {escape_text(first.verdict)}."
    ]
    lines += (
        [
            f"Only the logs of rank {escape_text(', '.join(map(str, first.ranks)))} differ in this tensor."
        ]
        if first.ranks
        else []
    )
    lines += [f"Looks like: {escape_text(first.cause)}."] if first.cause else []
    if why is not None:
        lines += [f"Cause: <strong>{escape_text(why.claim)}</strong>."] if why.claim else []
        lines += [
            f"{'Evidence' if why.claim else 'Before this tensor'}: {escape_text(evidence)}."
            for evidence in why.evidence
        ]
        lines += (
            [f"The logs do not show the cause; next: {escape_text(why.next)}."] if why.next else []
        )
    return f"<p class='verdict'>{'<br>'.join(lines)}</p>"


def _settings_section(comparison: Comparison) -> str:
    if not comparison.settings:
        return "<h2>Settings</h2><p>The runs have the same settings.</p>"
    rows = [
        (setting.path, setting.first, setting.second, "layout" if setting.layout else "number")
        for setting in comparison.settings
    ]
    return f"<h2>Settings that differ</h2>{_render_table(('setting', 'A', 'B', 'of the'), rows[:SHOWN])}"


def _differences_section(comparison: Comparison) -> list[str]:
    """Return the table of all differences by phase and kind of tensor: first those in the first
    step that differs, then those in all later steps.
    """
    groups: dict[tuple[str, str, bool], list[TensorVerdict]] = defaultdict(list)
    for line in comparison.faults:
        groups[
            line.name.phase, line.name.kind, line.name.step > comparison.faults[0].name.step
        ].append(line)
    if not groups:
        return []
    rows = []
    for (phase, kind, _), lines in sorted(groups.items(), key=lambda item: item[0][2]):
        begin, end = lines[0].name.step, lines[-1].name.step
        steps = str(begin) if begin == end else f"{begin} to {end}"
        worst = max(map(share_of_bound, lines))
        furthest = f"{worst:.3g} times its bound" if math.isfinite(worst) else "no bound"
        first = lines[0]
        cells = (first.name, furthest, _ranks_text(first.ranks), first.cause)
        rows.append((steps, phase, kind, len(lines), *cells))
    heads = ("steps", "phase", "kind", "tensors", "first", "furthest", "ranks", "looks like")
    note = (
        f"<p>{len(comparison.left)} later steps were not compared.</p>" if comparison.left else ""
    )
    return ["<h2>Differences, in order of execution</h2>", _render_table(heads, rows), note]
