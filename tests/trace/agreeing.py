"""Logs of generated scripts, compared with themselves, and with themselves with one tensor changed by ten roundings.

`python -m tests.trace.agreeing [NUMBER [SEED]]` prints what is not as it must be, and counts.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from math import prod
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from bridge.checkpoint.digests import digest_of
from bridge.files.sealed import seal
from bridge.trace.record import Name
from bridge.trace.run import TracedRun
from bridge.trace.run_comparison import compare_runs
from tests.trace.harmless import draw_script, prepare, run_script

ROUNDINGS = 10.0


def change_log(source: Path, target: Path, draw: Random, kind: str) -> Name | None:
    """Write a copy of a run in which one tensor of a kind is changed by ten roundings: all of its parts, but only one rank's
    copy. Return its name, or None if the run has no such tensor that is not zero.
    """
    shutil.copytree(source, target)
    about = json.loads((target / "run.json").read_text())
    paths = sorted(target.glob("rank-*/steps.jsonl"))
    logs = {path: [json.loads(text) for text in path.read_text().splitlines()] for path in paths}
    places = [
        (path, line, record)
        for path, lines in logs.items()
        for line in lines
        for record in ([{}] if kind == "loss" and line["loss"] else line["records"])
        if not record or (record["name"][4] == kind and record["summary"]["squares"] > 0)
    ]
    if not places:
        return None
    here, line, chosen = draw.choice(places)
    coarsest = max(torch.finfo(getattr(torch, name)).eps for name in about["formats"])
    if not chosen:
        line["loss"] *= 1 + ROUNDINGS * coarsest * (2 * len(about["layers"]) + 1) ** 0.5
        _write_log(here, logs[here])
        return Name(line["step"], "forward", "", None, "loss")
    name = Name(*chosen["name"])
    dtype = getattr(torch, chosen["dtype"])
    own = torch.finfo(dtype).eps if dtype.is_floating_point else 0.1
    late, summary = name.phase == "update", chosen["summary"]
    size = (summary["squares"] / summary["count"]) ** 0.5 * abs(chosen["factor"])
    ratio = 1.0 if late else max(1.0, _usual_size(source, kind) / size)
    factor = 1 + ROUNDINGS * (own if late else max(own, coarsest)) * ratio
    for path, _, record in places:
        part = record["placement"]
        whole = part["sizes"] == part["whole"] and part["stop"] - part["start"] == prod(
            part["whole"]
        )
        if record is chosen or (record["name"] == chosen["name"] and not whole):
            _multiply(path.parent, record, factor)
    for path, lines in logs.items():
        _write_log(path, lines)
    return name


def _multiply(folder: Path, record: dict[str, Any], factor: float) -> None:
    for key, power in (("total", 1), ("squares", 2), ("low", 1), ("high", 1)):
        record["summary"][key] *= factor**power
    keys = [record[key] for key in ("samples", "full") if record[key]]
    if keys:
        file = folder / f"{record['name'][0]:08d}.safetensors"
        tensors = load_file(file)
        for key in keys:
            tensors[key] = (tensors[key].double() * factor).contiguous()
        save_file(tensors, file)


def _write_log(path: Path, lines: list[dict[str, Any]]) -> None:
    texts = []
    for line in lines:
        file = path.parent / f"{line['step']:08d}.safetensors"
        if line["tensors"]:
            line["tensors"] = digest_of(file)
        texts.append(seal({key: value for key, value in line.items() if key != "digest"}))
    path.write_text("".join(f"{text}\n" for text in texts))


def _usual_size(folder: Path, kind: str) -> float:
    run = TracedRun.read(folder)
    sizes = [
        (entry.summary.squares / entry.summary.finite) ** 0.5
        for step in run.steps
        for entry in run.entries(step)
        if entry.name.kind == kind and entry.summary and entry.summary.finite
    ]
    return max(sizes, default=0.0)


KINDS = ("input", "output", "input gradient", "gradient", "weight", "buffer", "loss")


def disagreements(seeds: range, folder: Path, counts: Counter[str]) -> Iterator[str]:
    """What is not as it must be in the logs of the scripts with these seeds."""
    prepare()
    for seed in seeds:
        draw = Random(seed)
        ranks, text = draw_script(seed)
        path, good = folder / f"{seed}.py", folder / f"good{seed}"
        path.write_text(text)
        level = draw.choice([2, 9])
        run_script(path, ranks, good, level)
        if not (good / "run.json").exists():
            counts["not logged"] += 1
            continue
        run = TracedRun.read(good)
        if not run.steps:
            counts["not logged"] += 1
            continue
        counts["logs"] += 1
        counts["logs that differ by rank"] += any(
            True for step in run.steps for entry in run.entries(step) for _ in entry.copies()
        )
        itself = compare_runs(run, run).divergence
        if itself is not None:
            yield f"script {seed}, level {level}: differs from itself: {itself}"
        for kind in KINDS:
            bad = folder / f"{kind}{seed}"
            name = change_log(good, bad, draw, kind)
            if name is None:
                continue
            counts[f"changed {kind}"] += 1
            other = TracedRun.read(bad)
            found = [
                compare_runs(*pair, every=False).divergence for pair in ((other, run), (run, other))
            ]
            # Passes of a step that has only one lose their number.
            where = [
                None
                if one is None
                else (one.name.step, one.name.phase, one.name.layer, one.name.kind)
                for one in found
            ]
            if where != [(name.step, name.phase, name.layer, name.kind)] * 2:
                yield f"script {seed}, level {level}: changed {name}, found {where}"
            shutil.rmtree(bad)


def main() -> None:
    """Print what is not as it must be, and counts."""
    number, first = (*map(int, sys.argv[1:3]), *(40, 0)[len(sys.argv) - 1 :])[:2]
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        for problem in disagreements(range(first, first + number), Path(folder), counts):
            counts["problems"] += 1
            print(problem, flush=True)
    print(dict(counts))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
