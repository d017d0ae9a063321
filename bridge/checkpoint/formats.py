"""The list of all formats of checkpoints, and what works with any of them. The formats of a stack are in
the folder of the stack.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bridge.checkpoint import digests, moments
from bridge.checkpoint.file_tensors import offsets_by_file
from bridge.checkpoint.files import File
from bridge.checkpoint.hub import Hub, loss_finding
from bridge.checkpoint.interface import Format, PlannedFiles, RootedFormat, Wanted
from bridge.checkpoint.lazy import Lazy
from bridge.checkpoint.pytorch_bin import Binary
from bridge.checkpoint.safetensors_format import Safe
from bridge.checkpoint.unpickle import FLAWS
from bridge.errors import SourceError, nearest
from bridge.files.contained import SMALL, plain, read_text, refuse_special_files
from bridge.files.shown import show_value
from bridge.stack import registry
from bridge.stack.checkpoint_side import formats_of
from bridge.stack.findings import Finding
from bridge.stack.rules import Effect


def all_formats() -> Mapping[str, Format]:
    """Return all formats by name: first those that belong to no stack, then those of the stacks in
    compat/.
    """
    from bridge.checkpoint.dcp import Dcp
    from bridge.checkpoint.native_format import Native
    from bridge.checkpoint.one_file import OneFile

    own: tuple[Format, ...] = (Native(), Safe(), Binary(), Dcp(), OneFile())
    theirs = [format for name in registry.OWN for format in formats_of(registry.load(name))]
    return {format.name: format for format in (*own, *theirs)}


ALIASES = {"huggingface": "safetensors"}
"""Further names of formats: that of the library whose files they are."""


def format_of_name(name: str) -> Format:
    """Return the format `name`. If there is none, raise a `SourceError` that suggests a similar
    name.
    """
    formats = all_formats()
    name = ALIASES.get(name, name)
    if name not in formats:
        raise SourceError(
            f"{name}: found an unknown format of checkpoints, expected one of "
            f"{', '.join(formats)}{nearest(name, formats)}"
        )
    return formats[name]


def find_checkpoint(
    folder: Path, name: str | None = None, root: str | None = None
) -> tuple[Format, Path]:
    """Return the format of the checkpoint in `folder`, and the folder with its files; of a checkpoint
    in one file, the file. `root` chooses the model in it, for formats in which models lie under any
    keys. Raises `SourceError` if there is no checkpoint, or if the files are of several formats and
    `name` does not choose one.
    """
    folder = _snapshot_of(folder)
    if not folder.is_dir() and not folder.is_file():
        raise SourceError(f"{folder}: found no folder; name the folder or file of a checkpoint")
    if folder.is_dir():
        refuse_special_files(folder)
    candidates = [format_of_name(name)] if name else list(all_formats().values())
    if folder.is_file():
        candidates = [format for format in candidates if format.one_file]
    format, place = _find_one(folder, candidates)
    if place.is_dir() and place != folder:
        refuse_special_files(place)
    if root is None:
        return format, place
    if not isinstance(format, RootedFormat):
        raise SourceError(
            f"--root: found {show_value(root)}; a checkpoint of {format.title} has one model at one place; leave it out"
        )
    return replace(format, root=root), place


def _snapshot_of(folder: Path) -> Path:
    """Return the snapshot that `refs/main` names if `folder` is a model in the cache of huggingface_hub, or the folder
    of its snapshots; any other folder as it is.
    """
    place = Path(os.path.abspath(folder))
    home = place.parent if place.name == "snapshots" else place
    main = home / "refs/main"
    if not home.name.startswith("models--") or not main.is_file():
        return folder
    return home / "snapshots" / plain(read_text(main, home, SMALL).strip(), main)


def _find_one(folder: Path, candidates: Sequence[Format]) -> tuple[Format, Path]:
    places = [
        (format, place) for format in candidates if (place := format.find(folder)) is not None
    ]
    if not places:
        kinds = ", ".join(format.title for format in candidates)
        raise SourceError(
            f"{folder}: found no checkpoint of {kinds}; {_advice_on_near(folder, candidates)}"
        )
    # Weights that lie in the folder of a whole checkpoint are a copy of its own.
    whole = [(format, place) for format, place in places if not format.weights_only]
    if len(places) > 1 and len(whole) == 1:
        return whole[0]
    if len(places) > 1:
        kinds = ", ".join(format.name for format, _ in places)
        raise SourceError(
            f"{folder}: found checkpoints of several formats ({kinds}); choose one with --from"
        )
    return places[0]


POINTERS = ("latest", "latest_universal", "latest_checkpointed_iteration.txt")
SHOWN, MOST = 5, 200


def _advice_on_near(folder: Path, candidates: Sequence[Format]) -> str:
    """Return advice for the message that `folder` has no checkpoint: it names the folders inside
    that have one, and a pointer file such as `latest` that leads nowhere.
    """
    inside = [
        path for path in sorted(folder.iterdir())[:MOST] if path.is_dir() and not path.is_symlink()
    ]
    names = [
        show_value(path.name)
        for path in inside
        if any(format.find(path) is not None for format in candidates)
    ]
    for path in sorted(folder.iterdir())[:MOST]:
        if path.is_symlink() and not path.exists():
            return f"{path.name} is a link that leads to {path.readlink()}, where there is no file; fetch it again"
    there = next((pointer for pointer in POINTERS if (folder / pointer).is_file()), None)
    if not names:
        return "name the folder that contains the files of a checkpoint"
    advice = f"these folders in it hold a checkpoint: {', '.join(names[:SHOWN])}; name one of them"
    return f"the file {there} leads to no checkpoint; {advice}" if there else advice


def read_checkpoint(folder: Path, name: str | None = None) -> Hub:
    """Return the checkpoint in `folder`, in the format `name` or in any. Raises `SourceError` if
    there is none, or if it is damaged.
    """
    return read_at(*find_checkpoint(folder, name))


def read_at(format: Format, place: Path) -> Hub:
    """Return the checkpoint of this format in the folder `place`. Raises `SourceError` if it is
    damaged.
    """
    try:
        hub = format.read(place)
        SourceError.raise_if(
            f"{place}: {problem}; the checkpoint is damaged" for problem in _find_damage(hub)
        )
        return replace(hub, findings=(*hub.findings, *_find_adapter(place)))
    except FLAWS as error:
        # A file may hold any value in any place. What a reader did not look at before it used it
        # ends here, without a traceback.
        raise _damage_error(format, place, error) from error


ADAPTER = "adapter_config.json"
"""A file of peft. transformers applies the adapter of which it tells to the weights next to it
(transformers/models/auto/auto_factory.py: from_pretrained).
"""


def _find_adapter(place: Path) -> Iterator[Finding]:
    if (place / ADAPTER).is_file():
        message = (
            f"{ADAPTER} lies next to the weights: transformers computes with that adapter, which is not carried over; "
            "merge it into the weights first, as with peft's merge_and_unload"
        )
        yield loss_finding("adapter", message, Effect.NUMBERS)


def _damage_error(format: Format, place: Path, error: Exception) -> SourceError:
    return SourceError(
        f"{place}: expected a checkpoint of {format.title} ({type(error).__name__}: {show_value(str(error))}); the "
        "checkpoint is damaged"
    )


def verify_checkpoint(format: Format, place: Path, files: Sequence[File] | None = None) -> None:
    """Check the checksums of the checkpoint in the folder `place`. If `files` are given, at least
    the tensors that go into these files are checked. Raises `SourceError` if a checksum does not
    match.
    """
    try:
        format.verify(place, None if files is None else offsets_by_file(files))
    except FLAWS as error:
        raise _damage_error(format, place, error) from error


def add_doubts(format: Format, place: Path, hub: Hub) -> Hub:
    """Return the checkpoint with more findings: one if damage cannot be detected, and one for each
    pair of moments that no run can have.
    """
    paths = digests.without_digest(place, hub.origin.files) if format.unseen else []
    there = (place / digests.SUMS).is_file()
    lack = f"has no line for {', '.join(path.name for path in paths)}" if there else "is missing"
    limits = (
        [loss_finding("checksums", f"{digests.SUMS} {lack}: {format.unseen}", Effect.NONE)]
        if paths
        else []
    )
    return replace(hub, findings=(*hub.findings, *limits, *moments.find_impossible(hub)))


def plan_files(format: Format, hub: Hub, target: Wanted) -> PlannedFiles:
    """Return the files that would hold the checkpoint `hub` in this format. Raises `SourceError`
    if it has no tensor, or if a value in it has the wrong type.
    """
    if not hub.parameters and not hub.buffers:
        folder = hub.origin.files[0].parent if hub.origin.files else hub.origin.format
        raise SourceError(
            f"{folder}: found no tensor, expected those of a model; name another folder"
        )
    try:
        return format.plan(hub, target)
    except FLAWS as error:
        why = f"{type(error).__name__}: {show_value(str(error))}"
        raise SourceError(
            f"{hub.origin.format}: this checkpoint is damaged: it has a value of the run's state that {format.title}"
            f" cannot hold ({why})"
        ) from error


def _find_damage(hub: Hub) -> Iterator[str]:
    """Yield a message for each problem that shows a damaged checkpoint: another value in place of
    a tensor, a master or moment with another shape than the weight, or a group or tie with a
    parameter that does not exist.
    """
    rows: Iterable[tuple[Any, str, Any]] = hub.tensors()
    for name, kind, tensor in rows:
        if not isinstance(name, str) or not isinstance(tensor, Lazy):
            yield f"{show_value(name)}: found a {type(tensor).__name__} as {kind}, expected a tensor"
        elif name in hub.parameters and tensor.shape != hub.parameters[name].weight.shape:
            yield (
                f"{show_value(name)}: found shape {tensor.shape} of the {kind}, and"
                f" {hub.parameters[name].weight.shape} of the weight"
            )
    for group in hub.groups:
        yield from (
            f"{show_value(name)} is in a group of the optimizer but not in the model"
            for name in set(group.names) - set(hub.parameters)
        )
    yield from (
        f"{show_value(alias)} is tied to {show_value(name)}, which the model does not have"
        for alias, name in hub.ties.items()
        if name not in hub.parameters
    )


def findings_that_matter(format: Format, hub: Hub) -> tuple[Finding, ...]:
    """Return the findings on the source checkpoint that matter in this format. One that holds
    weights alone lacks nothing if the source has no moments either.
    """
    return tuple(
        finding
        for finding in hub.findings
        if not (format.weights_only and finding.path == "moments" and not hub.moments)
    )
