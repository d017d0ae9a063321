"""1,050 single edits of DeepSpeed configs, judged by DeepSpeed and by us; writes docs/deepspeed_edits.md.

Usage: python benchmarks/deepspeed_edits.py [FOLDER]; FOLDER holds real configs; else
corpus/deepspeed of the folder that STAGEBRIDGE_SHARED names does. Where there is none, configs are generated.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

sys.path.append(str(Path(__file__).parents[1]))

from hypothesis import HealthCheck, Phase, given, settings, strategies as st

import compat
from bridge.errors import BridgeError, ConfigError
from bridge.files import load
from bridge.plan.section import fields, nest
from bridge.stack.dialect import Config
from bridge.testing import Mistake, configs, values
from bridge.testing.mutations import REMOVE, Edit, edit_mapping, edits
from bridge.testing.strategies import StrategyCase, part_of, paths_of
from tests.harvesting.judges import deepspeed as real

COUNT = 1050
RANKS = 8
HOME = Path(__file__).resolve().parents[1]
CORPUS = Path(os.environ.get("STAGEBRIDGE_SHARED", ".")) / "corpus" / "deepspeed"
PAGE = HOME / "docs" / "deepspeed_edits.md"
DIALECT = compat.load("deepspeed")
RELEASE = real.release_of_package()
ANOTHER = "another value"
AUTO = {
    "hidden_size": 1024, "micro_batch": 1, "accumulation": 1, "lr": 1e-4, "betas": [0.9, 0.999], "eps": 1e-8,
    "weight_decay": 0.01, "clip": 1.0, "warmup_steps": 10, "total_steps": 100, "mixed_precision": "bf16", "save_16bit": True,
    "zero_optimization.stage3_max_live_parameters": 1_000_000_000, "zero_optimization.offload_param.buffer_size": 100_000_000,
}  # fmt: skip
"""What a trainer would fill in for "auto"."""
OUTCOMES = {
    "both refuse": "DeepSpeed raises, and we name the key",
    "we refuse, DeepSpeed ignores": "DeepSpeed goes on as if the key were not there",
    "we refuse, DeepSpeed takes it": "DeepSpeed holds what was written, or its own reading of it, and trips later or never",
    "both accept, same values": "every effective value that DeepSpeed's config object holds is the one we say",
    "both accept, carried": "an argument of an optimizer that this release does not have, so the script's own: kept as it stands",
    "both accept, other values": "a bug of ours",
    "we accept, DeepSpeed refuses": "a bug of ours",
}


@dataclass(frozen=True)
class Outcome:
    """One edit and what came of it."""

    kind: str
    key: str
    value: Any
    outcome: str
    source: str


def bases(folder: Path) -> list[tuple[str, Config]]:
    """Valid configs with the file each came from: real ones that DeepSpeed accepts, else generated ones."""
    read = [
        (path.name, config)
        for path in sorted(folder.glob("*.json"))
        if (config := _read(path)) is not None
    ]
    return read or [
        ("generated", config) for config in _drawn(configs(DIALECT, RELEASE, RANKS), 60)
    ]


def _read(path: Path) -> Config | None:
    """A real file; the micro batch stands where both sizes do, as these were written for another number of ranks."""
    try:
        data = dict(load(path).data)
        if data.setdefault("train_micro_batch_size_per_gpu", 1):
            data.pop("train_batch_size", None)
        resolved = DIALECT.read(data, version=RELEASE, world_size=RANKS, auto=AUTO)  # type: ignore[call-arg]
        return None if isinstance(_theirs(nest(resolved.given)), str) else resolved
    except BridgeError:
        return None


def _drawn(strategy: Any, count: int) -> list[Any]:
    """`count` examples, always the same."""
    found: list[Any] = []
    fixed = settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    fixed(given(strategy)(lambda example: found.append(example)))()
    return found


def chosen(found: list[tuple[str, Config]]) -> Iterator[tuple[str, str, Config, Edit]]:
    """Edits of all kinds in turn, each of a config of its own."""
    chance, made = Random(0), 0
    others = iter(_drawn(_another(), COUNT))
    kinds = [*sorted({mistake for _, config in found for mistake in edits(config)}), ANOTHER]
    while made < COUNT:
        kind, (name, config) = kinds[made % len(kinds)], chance.choice(found)
        if kind == ANOTHER:
            path, value = next(others)
            options = [Edit(None, tuple(path.split(".")), value)]  # type: ignore[arg-type]
        else:
            options = [
                edit for edit in edits(config).get(Mistake(kind), ()) if edit.at[0] != "code"
            ]
        if options:
            yield kind, name, config, chance.choice(options)
            made += 1


def _another() -> Any:
    """A key of the release and a value of its type."""
    known, part, case = (
        fields(DIALECT.schema),
        part_of(DIALECT),
        StrategyCase(RELEASE, RANKS, "file"),
    )
    paths = [
        path
        for path in paths_of(DIALECT, case)
        if not path.startswith(("code.", "optimizer.", "scheduler."))
    ]
    return st.sampled_from(paths).flatmap(
        lambda path: st.tuples(
            st.just(path), part.values(case, path) or values(known[path].annotation)
        )
    )


def judged(kind: str, name: str, config: Config, edit: Edit) -> Outcome:
    """Both sides' verdict on one edit."""
    source = part_of(DIALECT).source(config)
    data = edit_mapping(source, edit)
    code = data.pop("code", {})
    ours, theirs = _ours({**data, "code": code}), _theirs(data)
    if isinstance(theirs, str):
        outcome = "both refuse" if ours is None else "we accept, DeepSpeed refuses"
    elif ours is not None:
        outcome = _both(ours, theirs, ".".join(edit.at))
    else:
        without = _theirs(_left_out(source, edit))
        outcome = (
            "we refuse, DeepSpeed ignores" if without == theirs else "we refuse, DeepSpeed takes it"
        )
    return Outcome(
        kind, ".".join(edit.at), "(removed)" if edit.value is REMOVE else edit.value, outcome, name
    )


def _both(ours: Config, theirs: Mapping[str, Any], key: str) -> str:
    """What to say of an edit that both accept."""
    expected = real.pose_config(ours)[1]
    agree = all(
        _plain(expected[path]) == _plain(theirs[path])
        for path in expected.keys() & theirs.keys() - set(ours.opaque)
    )
    return (
        "both accept, other values"
        if not agree
        else f"both accept, {'carried' if key in ours.opaque else 'same values'}"
    )


def _left_out(source: Mapping[str, Any], edit: Edit) -> dict[str, Any]:
    """The source without the edited key, old spelling and new."""
    try:
        data = edit_mapping(source, Edit(edit.mistake, edit.leaves or edit.at, REMOVE))
    except KeyError:
        data = dict(source)
    data.pop("code", None)
    return data


def _ours(data: Mapping[str, Any]) -> Config | None:
    try:
        return DIALECT.read(data, version=RELEASE, world_size=RANKS)
    except BridgeError:
        return None


def _theirs(data: Mapping[str, Any]) -> dict[str, Any] | str:
    plain = {key: value for key, value in data.items() if key != "code"}
    try:
        return real.answer({"data": plain, "ranks": RANKS, "accelerator": "cpu"})
    except ConfigError as error:
        return str(error)


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))


def page(results: list[Outcome], origin: str) -> str:
    """The Markdown page."""
    counts = Counter(result.outcome for result in results)
    kinds = list(dict.fromkeys(result.kind for result in results))
    lines = [
        f"# {len(results):,} single edits of DeepSpeed configs",
        "",
        f"Each is one edit away from {origin}; read by DeepSpeed {RELEASE} itself",
        f"(`DeepSpeedConfig`, {RANKS} data-parallel ranks) and by us. All but the last kind are mistakes; *another value* puts a",
        "value of the right type at any key. Made by `python benchmarks/deepspeed_edits.py`, always the same.",
        "",
        "| outcome | edits | |",
        "|---|---|---|",
        *(f"| {outcome} | {counts[outcome]} | {why} |" for outcome, why in OUTCOMES.items()),
        "",
        "## By kind of edit",
        "",
        f"| edit | {' | '.join(OUTCOMES)} |",
        f"|---|{'---|' * len(OUTCOMES)}",
        *(
            f"| {kind} | {' | '.join(str(_count(results, kind, outcome)) for outcome in OUTCOMES)} |"
            for kind in kinds
        ),
        "",
        "## Examples",
        "",
    ]
    return "\n".join([*lines, *_examples(results)]) + "\n"


def _count(results: list[Outcome], kind: str, outcome: str) -> int:
    return sum(result.kind == kind and result.outcome == outcome for result in results)


def _examples(results: list[Outcome]) -> Iterator[str]:
    for outcome in OUTCOMES:
        found = {result.kind: result for result in reversed(results) if result.outcome == outcome}
        if found:
            shown = ", ".join(
                f"`{result.key}: {_short(result.value)}`" for result in list(found.values())[:4]
            )
            yield f"- **{outcome}**: {shown}"


def _short(value: Any) -> str:
    text = json.dumps(value, default=str).replace("|", "/").replace("`", "'")
    return text if len(text) <= 40 else text[:39] + "…"


def main(folder: Path) -> int:
    """Make the edits, print the counts, write the page; 1 if there is a bug of ours."""
    logging.disable(logging.CRITICAL)
    found = bases(folder)
    origin = f"one of {len(found)} {'generated' if found[0][0] == 'generated' else 'real'} configs that DeepSpeed accepts"
    results = [judged(*edit) for edit in chosen(found)]
    for outcome, count in Counter(result.outcome for result in results).most_common():
        print(f"{count:5} {outcome}")
    bugs = [result for result in results if OUTCOMES[result.outcome] == "a bug of ours"]
    print(*bugs, sep="\n")
    PAGE.write_text(page(results, origin), "utf-8")
    print(f"wrote {PAGE}")
    return int(bool(bugs))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else CORPUS))
