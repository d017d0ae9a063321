"""A layout as text, as JSON and as a picture: groups of ranks, stages, bytes and collectives."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from bridge.layout.mesh import Mesh
from bridge.layout.outline import Outline
from bridge.layout.shard import BYTES, Flat, Layout
from bridge.report import as_json as report, json_types
from bridge.report.pictures.rank_bars import draw, figure, merge_ranks
from bridge.report.tables import Grid
from bridge.stack.findings import Finding
from bridge.stack.rules import Effect

if TYPE_CHECKING:
    from rich.console import Console

WORDS = ("embedding.tokens", "head.logits")
"""Weights whose size depends on the vocabulary size."""
KINDS = ("weights", "gradients", "master", "moments")
GROUPS = 4
"""Largest number of groups of ranks that are shown for one axis of the mesh."""


def as_json(
    outline: Outline, findings: Sequence[Finding], threshold: Effect = Effect.NUMBERS
) -> json_types.Laid:
    """Return a layout as one JSON object. Its form is stable and described in docs/json.md."""
    mesh, shape = outline.mesh, outline.shape
    names = (
        "layers",
        "hidden",
        "heads",
        "vocab",
        "sequence",
        "kv_heads",
        "ffn",
        "tied",
        "norm",
        "gated",
        "rotary",
        "bias",
    )
    sizes: dict[str, Any] = {name: getattr(shape, name) for name in names}
    sizes |= {
        "vocab": shape.vocab or None,
        "experts": shape.experts.count if shape.experts else None,
    }
    sizes |= {
        "active": shape.active(),
        "unknown": [] if shape.vocab else list(WORDS),
        "parameters": shape.size(),
    }
    return {
        "model": cast("json_types.Shape", sizes),
        "batch": {
            "micro": outline.micro,
            "accumulation": outline.accumulation,
            "tokens": outline.tokens,
        },
        "mesh": {
            "ranks": mesh.world,
            "axes": _axes_json(mesh),
            "experts": _axes_json(outline.experts) if outline.experts else [],
        },
        "stages": [
            {
                "stage": stage,
                "pipeline_rank": outline.pipeline_rank(stage),
                "layers": [shape.names[layer] for layer in layers],
            }
            for stage, layers in enumerate(outline.stages)
        ],
        "ranks": [
            cast("json_types.Ranks", {"ranks": ranks, **content})
            for ranks, content in _group_alike(outline)
        ],
        "findings": list(map(report.finding_json, findings)),
        "exit_code": report.exit_of(findings, threshold),
    }


def _axes_json(mesh: Mesh) -> list[json_types.Axis]:
    return [
        {"axis": axis, "size": size, "groups": [*map(list, mesh.groups(axis))]}
        for axis, size in mesh.sizes.items()
    ]


def _group_alike(outline: Outline) -> list[tuple[list[int], dict[str, Any]]]:
    """Return groups of ranks with equal bytes and messages, each with those bytes and messages."""
    groups: dict[str, tuple[list[int], dict[str, Any]]] = {}
    contents: dict[object, tuple[str, dict[str, Any]]] = {}
    for rank in range(outline.mesh.world):
        kind = outline.kind(rank)
        # Ranks of one kind keep the same, and thousands of ranks have few kinds: each is worked out once.
        if kind not in contents:
            content = _rank_content(outline, rank)
            contents[kind] = json.dumps(content), content
        text, content = contents[kind]
        groups.setdefault(text, ([], content))[0].append(rank)
    return list(groups.values())


def _rank_content(outline: Outline, rank: int) -> dict[str, Any]:
    place, pipeline = outline.place(rank).layout, outline.mesh.coordinate(rank, "pipeline")
    stages, traffic = outline.local_stages(pipeline), outline.traffic(rank)
    calls = [
        {"name": name, "count": total.count, "bytes": total.bytes}
        for name, total in traffic.items()
    ]
    sizes = place.bytes()
    return {
        "pipeline_rank": pipeline,
        "stages": list(stages),
        "parameters": place.parameters,
        "bytes": {**sizes, "total": sum(sizes.values())},
        "flats": [_flat_content(place, flat, stages[flat.stage]) for flat in place.flats],
        "collectives": calls,
    }


def _flat_content(place: Layout, flat: Flat, stage: int) -> dict[str, Any]:
    weights = {
        "format": flat.dtype,
        "buffer": flat.weight_home.place,
        "bytes": flat.padded * BYTES[flat.dtype],
    }
    gradients = {
        "format": flat.reduce,
        "buffer": flat.grad_home.place,
        "bytes": flat.padded * BYTES[flat.reduce],
    }
    gradients["exchanged"] = flat.exchange
    return {
        "stage": stage,
        "tied": flat.tied,
        "trainable": flat.trainable,
        "parameters": flat.size,
        "padding": flat.padded - flat.size,
        "data_ranks": flat.shards,
        "weights": weights,
        "gradients": gradients if flat.trainable else None,
        "slices": place.slices(flat),
    }


def draw_layout(outline: Outline, path: Path, memory: int | None) -> None:
    bars = merge_ranks(
        [
            (ranks, {kind: content["bytes"][kind] for kind in KINDS})
            for ranks, content in _group_alike(outline)
        ]
    )
    sizes = " x ".join(f"{axis} {size}" for axis, size in outline.mesh.sizes.items() if size > 1)
    count = outline.shape.size()
    size = f"{figure(count / 1e9)} billion" if count >= 1e9 else f"{figure(count / 1e6)} million"
    model = f"{size} parameters on {outline.mesh.world} ranks"
    title = f"Kept by each rank: {model}{f' ({sizes})' if sizes else ''}, ZeRO {outline.place(0).layout.level}"
    scale = "kept between steps, without activations and buffers of the allocator"
    draw(bars, title, scale, memory, path)


def print_layout(outline: Outline, findings: Sequence[Finding], out: Console) -> None:
    shape, plan = outline.shape, outline.plan
    sizes = (
        " x ".join(f"{axis} {size}" for axis, size in outline.mesh.sizes.items() if size > 1)
        or "one"
    )
    out.print(f"[bold]{outline.mesh.world} ranks[/]: {sizes}")
    words = (
        f"vocab {shape.vocab}"
        if shape.vocab
        else "vocab unknown: embedding and head are not counted"
    )
    experts = (
        f", {shape.experts.count} experts ({shape.active() / 1e6:,.1f} M active)"
        if shape.experts
        else ""
    )
    out.print(
        f"[bold]{shape.size() / 1e6:,.1f} M parameters[/]: {shape.layers} layers, hidden {shape.hidden}, heads {shape.heads}"
        f" (keys {shape.kv_heads}), ffn {shape.ffn}{experts}, {words}{', tied' * shape.tied}, sequence {shape.sequence}"
    )
    optimizer = plan.optimizer.name or "adamw"
    out.print(
        f"[bold]A step[/]: {outline.accumulation} x {outline.micro} sequences on each data rank, {optimizer},"
        f" ZeRO {outline.place(0).layout.level}"
    )
    if outline.mesh.world > 1:
        out.print(_mesh_table(outline.mesh, "Groups"))
        if outline.experts:
            out.print(_mesh_table(outline.experts, "Groups of experts"))
    for pipeline in range(outline.mesh.sizes["pipeline"]):
        _show_ranks(outline, pipeline, out)
    for finding in findings:
        out.print(f"note: {finding.path}: {finding.message} ({finding.effect})", markup=False)
    out.print("Activations, and buffers of the allocator and of collectives, are not included.")


def _mesh_table(mesh: Mesh, title: str) -> Grid:
    table = Grid(title, ("axis", "ranks", "apart", "groups"))
    for name, axis in mesh.axes.items():
        if axis.size > 1:
            groups = mesh.groups(name)
            parts = [
                _shorten_words([str(rank) for rank in group], 8, " ") for group in groups[:GROUPS]
            ]
            more = f"; ... ({len(groups)} groups in all)" if len(groups) > GROUPS else ""
            table.add_row(name, str(axis.size), str(axis.stride), "; ".join(parts) + more)
    return table


def _shorten_words(words: Sequence[str], limit: int, joint: str) -> str:
    return joint.join(words if len(words) <= limit else [*words[: limit - 1], "...", words[-1]])


def _show_ranks(outline: Outline, pipeline: int, out: Console) -> None:
    """Print one pipeline rank: its stages, and the collectives of the rank that keeps and sends the most bytes."""
    ranks = [
        rank
        for rank in range(outline.mesh.world)
        if outline.mesh.coordinate(rank, "pipeline") == pipeline
    ]
    # Reversed, so that the lowest rank of a kind is the one that stays.
    kinds = {outline.kind(rank): rank for rank in reversed(ranks)}
    content_by_kind = {kind: _rank_content(outline, rank) for kind, rank in kinds.items()}
    contents = {rank: content_by_kind[outline.kind(rank)] for rank in ranks}
    # Of several that keep the same, the lowest.
    most = max(ranks, key=lambda rank: (_content_weight(contents[rank]), -rank))
    alike = all(
        _content_weight(content) == _content_weight(contents[most]) for content in contents.values()
    )
    who = (
        f"rank {most}, which keeps and sends the most bytes"
        if not alike
        else "each rank"
        if len(ranks) > 1
        else f"rank {most}"
    )
    suffix = f" of pipeline rank {pipeline}" if outline.mesh.sizes["pipeline"] > 1 else ""
    out.print(_stages_table(outline, contents[most], f"Kept by {who}{suffix}"))
    calls = contents[most]["collectives"]
    if calls:
        out.print(_collectives_table(calls, f"Sent in a step by {who.partition(',')[0]}"))


def _content_weight(content: Mapping[str, Any]) -> tuple[int, int]:
    return content["bytes"]["total"], sum(call["bytes"] for call in content["collectives"])


def _stages_table(outline: Outline, content: Mapping[str, Any], title: str) -> Grid:
    columns = (
        "layers",
        "stages",
        "parameters",
        "weights",
        "gradients",
        "their slice",
        "master",
        "moments",
        "in all",
    )
    table = Grid(title, columns, numbers=True)
    for row in _flat_rows(outline, content["flats"]):
        table.add_row(*row)
    sizes = content["bytes"]
    cells = [size_text(sizes[kind]) for kind in KINDS]
    table.add_row(
        "kept",
        "",
        f"{content['parameters']:,}",
        *cells[:2],
        "",
        *cells[2:],
        size_text(sizes["total"]),
        style="bold",
    )
    table.caption = "; ".join(
        _buffers_sentence(content["flats"], kind) for kind in ("weights", "gradients")
    )
    return table


def _flat_rows(outline: Outline, flats: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table; consecutive stages that are alike share a row."""

    def figures(flat: Mapping[str, Any]) -> tuple[str, ...]:
        slices, gradients = flat["slices"], flat["gradients"]
        whole = (
            size_text(flat["weights"]["bytes"]),
            size_text(gradients["bytes"] if gradients else 0),
        )
        own = tuple(size_text(slices[kind]) for kind in ("gradients", "master", "moments"))
        return (str(flat["tied"]), f"{flat['parameters']:,}", *whole, *own)

    for (tied, *numbers), alike in groupby(flats, figures):
        group = list(alike)
        layers = [layer for flat in group for layer in outline.stages[flat["stage"]]]
        label = (
            "tied weights"
            if tied == "True"
            else _shorten_words(list(_layer_runs(outline.shape.names, layers)), 3, ", ")
        )
        yield label, str(len(group)), *numbers, ""


def _layer_runs(names: Sequence[str], layers: Sequence[int]) -> Iterator[str]:
    """Yield the names of layers; neighbouring layers are shortened to `FIRST to LAST`."""
    # Within a run of neighbours a layer's number less its place stays the same.
    for _, part in groupby(enumerate(layers), lambda pair: pair[1] - pair[0]):
        run = [names[layer] for _, layer in part]
        yield run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}"


def _buffers_sentence(flats: Iterable[Mapping[str, Any]], kind: str) -> str:
    """Return a sentence on `kind`, which is weights or gradients.

    It says how many stages have them whole in memory at once, and in which number formats.
    """
    parts = [flat[kind] for flat in flats if flat[kind] and not flat["tied"]]
    # Stages whose weights are gathered into the same buffer are whole one after the other.
    places, formats = (
        {(part["format"], part["buffer"]) for part in parts},
        sorted({part["format"] for part in parts}),
    )
    number = "all" if len(places) == len(parts) else str(len(places))
    return f"{kind}: {number} of {len(parts)} stages whole in memory at once ({', '.join(formats)})"


def _collectives_table(calls: Iterable[Mapping[str, Any]], title: str) -> Grid:
    table = Grid(title, ("collective", "calls", "moved", "a call"), numbers=True)
    for call in calls:
        table.add_row(
            call["name"],
            f"{call['count']:,}",
            size_text(call["bytes"]),
            size_text(call["bytes"] / call["count"]),
        )
    return table


def size_text(number: float) -> str:
    """Return a number of bytes as text in a suitable unit, such as `1.5 GiB`."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if number >= size:
            return f"{number / size:,.1f} {unit}"
    return f"{number:,.0f} B" if number else "-"
