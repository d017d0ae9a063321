"""Every directed pair of formats: from real checkpoints of one into the other and back, with every bit that the other can hold.

`python -m tests.checkpoint.moved [KIND ...] --folder FOLDER` makes a checkpoint of each format with its own stack, on two
ranks, and prints for each pair what came back. It ends with 1 if a bit is missing that is not the other format's own lack.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import torch

import compat
from bridge.checkpoint import formats
from bridge.checkpoint.hub import Hub
from bridge.cli import run as command
from tests.checkpoint import checkpoints
from tests.checkpoint.checkpoints import Task

FORMATS: Mapping[str, tuple[str, ...]] = {
    "native": ("native",),
    "zero 1": ("deepspeed", "--level", "1", "--ranks", "2"),
    "zero 2": ("deepspeed", "--level", "2", "--ranks", "3"),
    "zero 3": ("deepspeed", "--level", "3", "--ranks", "2"),
    "universal": ("universal",),
    "dcp": ("dcp",),
    "hugging face": ("safetensors", "--dtype", "fp32"),
    "megatron": ("megatron",),
}
"""Each format, and how it is written."""
WIDE = 300
"""Letters of a problem that are printed."""
PADDING = -(-checkpoints.VOCABULARY // 2) * 2 - checkpoints.VOCABULARY
"""Rows that two tensor ranks add to the vocabulary."""
WEIGHTS_ALONE = ("hugging face",)


def made(kind: str, name: str, folder: Path, pool: Any) -> None:
    """A real checkpoint of a format, by its own stack on two ranks, after three steps."""
    from tests.checkpoint.megatron_checkpoints import Launch, megatron

    task = Task(kind, "bf16", matrices=True, save=folder)
    if name == "native":
        pool.run(checkpoints.native, replace(task, level=1))
    elif name.startswith("zero"):
        pool.run(checkpoints.deepspeed, replace(task, level=int(name[-1])))
    elif name == "universal":
        pool.run(checkpoints.deepspeed, replace(task, save=folder.with_name("for_universal")))
        _universal(folder.with_name("for_universal"), folder)
    elif name == "dcp":
        pool.run(checkpoints.fsdp, replace(task, precision="fp32"))
    elif name == "megatron":
        parallel = (
            {} if kind == "mixtral" else {"tensor": 2}
        )  # its experts are not split without splitting sequences
        pool.run(megatron, Launch(kind, parallel, precision="bf16", save=folder))
    else:
        net: Any = checkpoints.model_of(kind)
        net.save_pretrained(folder)


def _universal(source: Path, target: Path) -> None:
    place = target / "global_step3_universal"
    universal_of(source / "global_step3", place)
    (target / "latest_universal").write_text(place.name)


def universal_of(source: Path, place: Path) -> None:
    """What DeepSpeed's own script makes of a folder of ZeRO."""
    from deepspeed.checkpoint import ds_to_universal

    options = {
        "num_extract_workers": 1,
        "num_merge_workers": 1,
        "keep_temp_folder": False,
        "strict": True,
    }
    with redirect_stdout(StringIO()):
        ds_to_universal.main(
            argparse.Namespace(
                input_folder=str(source),
                output_folder=str(place),
                inject_missing_state=True,
                **options,
            )
        )


def converted(source: Path, to: str, output: Path, config: Path) -> str:
    """Why a conversion was refused; empty if it was not."""
    experts = json.loads(config.read_text())["model_type"] == "mixtral"
    names = {
        "megatron": "megatron-local" if experts else "megatron",
        "hugging face": "huggingface",
    }.get(to, "transformers" if experts else "huggingface")
    words = ["checkpoint", "convert", str(source), "--to", *FORMATS[to], "-o", str(output)]
    with redirect_stdout(StringIO()) as out:
        code = command([*words, "--names", names, "--config", str(config), "--json"])
    return "" if code in (0, 2) else "; ".join(json.loads(out.getvalue())["problems"])


def lacking(one: Hub, other: Hub, weights_alone: bool) -> Iterator[str]:
    """What of a checkpoint is not in another; Hugging Face has weights alone."""
    for name, held in one.parameters.items():
        if name not in other.parameters or not _same(held.best, other.parameters[name].best):
            yield f"{name}: weight"
        elif not weights_alone:
            found = other.parameters[name]
            yield from (
                f"{name}: {kind}"
                for kind in held.moments
                if not _same(held.moments[kind], found.moments.get(kind))
            )
            yield from [f"{name}: step"] if held.step != found.step else []
    if not weights_alone:
        yield from (
            f"settings of {name}"
            for name, own in _settings(one).items()
            if _settings(other).get(name) != own
        )
        yield from (
            f"{key}: {value}, {there}"
            for key, value, there in _run(one, other)
            if value is not None and value != there
        )


def _same(one: Any, other: Any) -> bool:
    """Whether they have the same bits; rows of Megatron's vocabulary that stand for no word are told and left."""
    if (
        other is None
        or one.shape[1:] != other.shape[1:]
        or not 0 <= one.shape[0] - other.shape[0] <= PADDING
    ):
        return False
    return torch.equal(one.whole()[: other.shape[0]].float(), other.whole().float())


def _settings(hub: Hub) -> dict[str, Any]:
    """What the optimizer does with each parameter."""
    taken = ("lr", "betas", "eps", "weight_decay")
    return {
        name: [group.settings.get(key) for key in taken]
        for group in hub.groups
        for name in group.names
    }


def _run(one: Hub, other: Hub) -> Iterator[tuple[str, Any, Any]]:
    for key in ("steps", "skipped", "samples"):
        yield key, getattr(one.where, key), getattr(other.where, key)
    yield "schedule", one.schedule, other.schedule
    yield "scale", one.scale, other.scale
    yield (
        "client",
        _kept(one.client),
        _kept({key: value for key, value in other.client.items() if key in one.client}),
    )


def _kept(client: Mapping[str, Any]) -> str | None:
    """The script's own state; a checkpoint that has no random states says so in Megatron's arguments."""
    return (
        json.dumps(client, sort_keys=True).replace('"no_save_rng": true', '"no_save_rng": null')
        if client
        else None
    )


def pairs(
    kind: str, top: Path, pool: Any, tried: tuple[str, ...] = tuple(FORMATS)
) -> Iterator[tuple[str, str, str]]:
    """Source, target, and what is wrong, for each pair of formats; real checkpoints are made in `top`."""
    config = top / "model" / "config.json"
    checkpoints.config_for(kind).save_pretrained(config.parent)
    for name in tried:
        if not (top / name).exists():
            made(kind, name, top / name, pool)
    for source in tried:
        known = formats.read_checkpoint(top / source)
        for target in tried:
            if source != target:
                there, back = (top / f"{source} to {target}{end}" for end in ("", " and back"))
                problem = converted(top / source, target, there, config)
                if problem and source in WEIGHTS_ALONE and FORMATS[target][0] == "deepspeed":
                    problem = (
                        "" if "groups and settings" in problem else problem
                    )  # these files go by places, which weights do not say
                else:
                    problem = problem or _back(known, source, target, there, back, config)
                yield source, target, problem


def _back(known: Hub, source: str, target: str, there: Path, back: Path, config: Path) -> str:
    alone = target in WEIGHTS_ALONE or source in WEIGHTS_ALONE
    if target in WEIGHTS_ALONE and FORMATS[source][0] in ("deepspeed", "megatron"):
        found = formats.read_checkpoint(
            there
        )  # these cannot be made of weights alone: the way there is held, under the source's names
        from bridge.checkpoint import model_facts, renaming

        known = renaming.naming_that_fits(
            known,
            "huggingface",
            None,
            model_facts.describe_config(
                compat.load("huggingface").read(json.loads(config.read_text()))
            ),
        )
        return "; ".join(lacking(known, found, True))
    problem = converted(there, source, back, config)
    return problem or "; ".join(list(lacking(known, formats.read_checkpoint(back), alone))[:4])


def main() -> int:
    """All pairs."""
    from tests.engine.pool import Pool

    parser = argparse.ArgumentParser()
    parser.add_argument("kinds", nargs="*", default=["llama", "gpt2"])
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    wrong, pool = 0, Pool(2)
    with tempfile.TemporaryDirectory() as folder:
        for kind in options.kinds:
            top = (options.folder or Path(folder)) / kind
            top.mkdir(parents=True, exist_ok=True)
            for source, target, problem in pairs(kind, top, pool):
                wrong += bool(problem)
                print(
                    f"{kind}: {source} -> {target}: {problem[:WIDE] or 'all that it can hold'}",
                    flush=True,
                )
    pool.close()
    print(f"{wrong} pairs are wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
