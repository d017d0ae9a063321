"""Heat map of a comparison: a page of its own that shows layer by step how far two runs are apart."""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape

from bridge.trace.comparison import Comparison, Line, share

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 14px system-ui, sans-serif; margin: 2em; color: #222 }}
table {{ border-collapse: collapse }}
th {{ font-weight: normal; padding: 2px 8px; text-align: right; white-space: nowrap }}
thead th {{ text-align: center }}
td {{ width: 34px; height: 22px; border: 1px solid #fff; text-align: center; font-size: 11px }}
td.none {{ background: #f4f4f4 }}
td.first {{ outline: 3px solid #222; outline-offset: -3px }}
p {{ max-width: 60em }}
.key td {{ width: 90px }}
</style></head><body>
<h1>{title}</h1>
<p>{verdict}</p>
<table><thead><tr><th>layer \\ step</th>{steps}</tr></thead><tbody>
{rows}
</tbody></table>
<p>Each cell is the tensor of that layer and step that is furthest apart, as a share of what rounding may do: up to 1 is
rounding. A frame marks where the runs part first. Point at a cell for its tensor.</p>
<table class="key"><tr>{key}</tr></table>
</body></html>
"""
COLOURS = ((0.0, "#d9f0d3"), (0.1, "#a6dba0"), (1.0, "#fee08b"), (10.0, "#fc8d59"), (1000.0, "#d73027"))
"""From that share of the bound on; beyond 1 the runs differ."""
LABELS = ("equal, or nearly", "rounding", "above 1: differs", "above 10", "above 1000")


def page(found: Comparison) -> str:
    """HTML that needs nothing else."""
    worst = _worst(found)
    layers = [layer for layer in ("", *found.first.about.get("layers", ())) if any(layer == key[0] for key in worst)]
    layers += sorted({layer for layer, _ in worst} - set(layers))
    steps = sorted({step for _, step in worst})
    first = found.divergence
    rows = (_row(layer, steps, worst, first) for layer in layers)
    return PAGE.format(
        title=escape(f"{found.first.folder} against {found.second.folder}"),
        verdict=escape(_verdict(first)),
        steps="".join(f"<th>{escape(str(step))}</th>" for step in steps),
        rows="\n".join(rows),
        key="".join(f'<td style="background:{colour}">{label}</td>' for (_, colour), label in zip(COLOURS, LABELS, strict=True)),
    )


def _worst(found: Comparison) -> Mapping[tuple[str, int], Line]:
    worst: dict[tuple[str, int], Line] = {}
    for line in found.lines:
        key = line.name.layer, line.name.step
        if key not in worst or share(line) > share(worst[key]):
            worst[key] = line
    return worst


def _verdict(first: Line | None) -> str:
    if first is None:
        return "Equal up to rounding."
    return f"They part at {first.name}: {first.verdict}. {first.cause}".strip()


def _row(layer: str, steps: list[int], worst: Mapping[tuple[str, int], Line], first: Line | None) -> str:
    cells = "".join(_cell(worst.get((layer, step)), first) for step in steps)
    return f"<tr><th>{escape(layer or 'run')}</th>{cells}</tr>"


def _cell(line: Line | None, first: Line | None) -> str:
    if line is None:
        return '<td class="none"></td>'
    size = share(line)
    colour = [shade for start, shade in COLOURS if size >= start][-1]
    frame = first is not None and (line.name.layer, line.name.step) == (first.name.layer, first.name.step)
    mark = ' class="first"' if frame else ""
    return f'<td{mark} style="background:{colour}" title="{escape(_hint(line))}">{_short(size)}</td>'


def _hint(line: Line) -> str:
    return f"{line.name}: {line.verdict}, distance {line.distance:.3g}, bound {line.bound:.3g}"


def _short(size: float) -> str:
    if not math.isfinite(size):
        return "&infin;"
    return f"{size:.1g}" if 0.01 <= size < 1000 else f"1e{math.floor(math.log10(size))}" if size else "0"
