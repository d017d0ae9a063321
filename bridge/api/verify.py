"""Verify: whether a config and its translation, or two configs, are the same run, by running both at small sizes."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

from bridge.api.access import limit_access, open_source
from bridge.api.read import read_config, standard_input
from bridge.api.source import STDIN, Options, Readable, Source, source_of
from bridge.engine.backends import backends
from bridge.engine.interface import Backend
from bridge.engine.native import BACKEND
from bridge.engine.plain import BACKENDS
from bridge.errors import BridgeError
from bridge.files import as_private_as, write_text
from bridge.stack import registry
from bridge.stack.dialect import Config
from bridge.stack.extras import need_engine
from bridge.translation.translate import Result, translate
from bridge.verify.local import MARK, Fields, run_ranks
from bridge.verify.own import engines_of, pair_configs
from bridge.verify.pair import Side, TranslationPair, fit_pair

RANK = "bridge.api.verify_on_rank"


@dataclass(frozen=True)
class Own:
    """What a comparison of two configs needs: the second config, the model's folder, the file of
    the batch, and the engine of each config.
    """

    other: Source
    model: str
    batch: str
    on: tuple[str, str] | None = None


@dataclass(frozen=True)
class VerifyOptions:
    """The options of `verify`: stack and release to translate to, largest number of ranks, number
    of steps, and whether samples are padded.

    If `own` is given, nothing is translated: the file is compared with this second config.
    """

    to: str | None = None
    to_version: str | None = None
    ranks: int = 4
    steps: int | None = None
    padded: bool = False
    own: Own | None = None


def own_of(
    file: str,
    other: Source | None,
    to: str | None,
    model: Path | None,
    batch: Path | None,
    on: str | None,
) -> Own | None:
    """Return the second config with its options; None without a second config.

    Raises `BridgeError` if options are missing or contradict each other.
    """
    if other is None:
        alone = {"--model": model, "--batch": batch, "--on": on}
        BridgeError.raise_if(
            f"{name}: needs a second config: verify {file} OTHER {name} ..."
            for name in alone
            if alone[name]
        )
        BridgeError.raise_if(
            []
            if to
            else ["verify: expected --to DIALECT, or a second config with --model and --batch"]
        )
        return None
    BridgeError.raise_if(
        ["--to: found together with a second config; give one of them"] if to else []
    )
    lacks = [
        name
        for name, path in {"--model FOLDER": model, "--batch FILE": batch}.items()
        if path is None
    ]
    BridgeError.raise_if(f"verify: a second config needs {name} too" for name in lacks)
    assert model is not None and batch is not None
    config = model / "config.json"
    BridgeError.raise_if(
        []
        if config.is_file()
        else [f"{config}: not found; expected the config.json of a Hugging Face model"]
    )
    BridgeError.raise_if(
        []
        if batch.is_file()
        else [f"{batch}: not found; bridge.trace.batch({batch.name!r}, batch) writes one"]
    )
    names = tuple(on.split(",")) if on else None
    BridgeError.raise_if(
        [f"--on: found {on}, expected two engines: --on ddp,deepspeed"]
        if names and len(names) != 2
        else []
    )
    return Own(other, str(model.absolute()), str(batch.absolute()), names)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Verified:
    """The verdict (same, differs, in part, not run), the report that it rests on, by the keys of docs/json.md,
    and the notes that were made.
    """

    verdict: str
    report: Fields
    notes: tuple[str, ...] = ()


def verify(
    readable: Readable,
    /,
    to: str | None = None,
    *,
    other: Readable | None = None,
    model_folder: str | os.PathLike[str] | None = None,
    batch: str | os.PathLike[str] | None = None,
    on: str | None = None,
    to_version: str | None = None,
    ranks: int = 4,
    steps: int | None = None,
    padded: bool = False,
    **options: Unpack[Options],
) -> Verified:
    """Run a config and its translation to the stack `to`, or a config and the config `other`, on at most
    `ranks` local ranks, and compare losses, gradient norms and tensors.

    With `other`, both run the model in `model_folder` on the batch in the file `batch`, each on its own stack or
    on the engine that `on` names. Raises `BridgeError` for what cannot be read or run.
    """
    source = source_of(readable, options)
    second = None if other is None else source_of(other, options)
    folder, rows = (None if path is None else Path(path) for path in (model_folder, batch))
    own = own_of(source.file, second, to, folder, rows, on)
    with open_source(source) as notes:
        report = measure(source, VerifyOptions(to, to_version, ranks, steps, padded, own))
        return Verified(report["verdict"], report, tuple(notes))


def measure(
    source: Source, options: VerifyOptions, hear: Callable[[Fields], None] = lambda said: None
) -> Fields:
    """Return the report that the ranks send; `hear` gets what they say of their progress."""
    need_engine("verify")
    with tempfile.TemporaryDirectory() as folder:
        here = _at_hand(source, Path(folder))
        if options.own:
            world = make_own_pair(here, options.own, options.ranks)[0].size.world
        else:
            world = make_pair(here, options).size.world
        fields = next(run_tasks([(here, options)], world, hear))
    if "problems" in fields:
        raise BridgeError(*fields["problems"])
    return fields


def _at_hand(source: Source, folder: Path) -> Source:
    """Return the source.

    If it reads standard input, the input is first saved in a private file in `folder`, so that
    every rank can read it.
    """
    if source.file != STDIN:
        return source
    path = folder / "standard input"
    with as_private_as(folder):
        write_text(path, standard_input())
    return replace(source, file=str(path), allow=(*source.allow, str(Path.cwd())))


def run_tasks(
    tasks: Sequence[tuple[Source, VerifyOptions]],
    world: int,
    hear: Callable[[Fields], None] = lambda said: None,
) -> Iterator[Fields]:
    """Return the reports on several files, in order. The `world` ranks are started once.

    A file that fails has its `problems` instead of a report.
    """
    spec = [
        {"source": source.values(), "options": _values_of(options)} for source, options in tasks
    ]
    for line in run_ranks(world, RANK, json.dumps(spec)):
        message = json.loads(line.removeprefix(MARK)) if line.startswith(MARK) else {}
        hear(message)
        if "found" in message:
            yield message["found"]


def make_pair(source: Source, options: VerifyOptions) -> TranslationPair:
    """Return both sides of the translation, at small sizes."""
    config = read_config(source)
    target = _translate_target(config, options)
    return fit_pair(config, target, backends(options.to, source.dialect), options.ranks)


def make_own_pair(
    source: Source, own: Own, limit: int
) -> tuple[TranslationPair, Mapping[Side, Backend]]:
    """Return both configs at small sizes, and the engine of each config."""
    configs = read_config(source), read_model_config(own.other)
    options = {
        **backends(*(config.dialect.name for config in configs)),
        **BACKENDS,
        BACKEND.name: BACKEND,
    }
    engines = engines_of(configs, own.on, options)
    return pair_configs(configs, engines, limit), engines


def read_model_config(source: Source) -> Config:
    with limit_access(source):
        return read_config(source)


def _translate_target(source: Config, options: VerifyOptions) -> Result:
    """Translate for the release of --to-version, else for the release that is installed here."""
    assert options.to is not None, "--to is required if there is no second config"
    dialect, backend = registry.load(options.to), backends(options.to).get(options.to)
    # A run on the stack that is here proves nothing about a file for another release.
    release = backend.release if backend and backend.release in dialect.versions else None
    return translate(source, dialect, options.to_version or release)


def _values_of(options: VerifyOptions) -> dict[str, Any]:
    values, own = vars(options), options.own
    return {**values, "own": {**vars(own), "other": own.other.values()} if own else None}
