"""The `checkpoint` command: show a checkpoint, write it in another format, or compare two
checkpoints.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bridge.api.inspect import describe_configs, inspect as inspect_checkpoint
from bridge.checkpoint import formats, interface
from bridge.checkpoint.companions import Companions, companions
from bridge.checkpoint.comparison import (
    DIFFERENT,
    EQUAL,
    TensorLine,
    compare_counters,
    compare_tensors,
)
from bridge.checkpoint.digests import SUMS, blob_digests, without_digest
from bridge.checkpoint.file_tensors import tensors_by_file
from bridge.checkpoint.hub import Hub
from bridge.checkpoint.interface import Format, PlannedFiles
from bridge.checkpoint.lazy import TORCH
from bridge.checkpoint.model_facts import rename_under
from bridge.checkpoint.tagged_json import encode_value
from bridge.checkpoint.targets import Target
from bridge.checkpoint.writing import find_output_inside, write_checkpoint
from bridge.cli import progress
from bridge.cli.budget import read_within_limits
from bridge.cli.progress import Progress
from bridge.cli.terminal import note, print_json, say
from bridge.errors import BridgeError
from bridge.files import as_private_as
from bridge.files.contained import refuse_changes, stamps_of
from bridge.files.printable import clean
from bridge.files.secrets import HIDDEN
from bridge.files.shown import show_value
from bridge.report import as_json as report, json_types
from bridge.report.as_json import finding_json
from bridge.report.console import console
from bridge.report.exit_codes import Exit
from bridge.stack.extras import need_engine
from bridge.stack.findings import Finding

DTYPES = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
TRANSFORMERS = ("huggingface", "transformers")
"""Names of parameters that transformers reads."""
SHOWN = 20
"""Largest number of differing tensors that are listed."""
WIDE = 160
"""Largest number of characters of a dictionary that are shown."""


@dataclass(frozen=True)
class CheckpointOptions:
    """The options of `checkpoint convert`."""

    to: str
    output: Path
    from_: str | None
    wanted: Mapping[str, Any]
    dry_run: bool
    verify: bool
    json: bool
    processes: int = 1
    names: str | None = None
    config: Path | None = None
    samples: int | None = None
    root: str | None = None


@contextmanager
def _answer_errors(as_json: bool) -> Iterator[None]:
    """Context in which a command reads checkpoints; with --json an error is an object on stdout as well."""
    try:
        need_engine("checkpoint")
        with read_within_limits():
            yield
    except BridgeError as error:
        error.as_object = as_json
        raise


def inspect(
    folder: Path, name: str | None, root: str | None, tensors: bool, check: bool, as_json: bool
) -> int:
    """Show one checkpoint. Returns the exit code."""
    with _answer_errors(as_json):
        with progress.show_progress("the files", quiet=not check):
            found = inspect_checkpoint(folder, format=name, root=root, check=check)
        code = report.exit_of(found.findings)
        if as_json:
            rows = {"tensors": list(_tensor_rows(found.hub))} if tensors else {}
            ways = [{**asdict(one), "lost": list(one.lost)} for one in found.targets]
            about = {**_about_checkpoint(found.hub, found.place), "targets": ways}
            print_json({**encode_value(about), **rows, "exit_code": code})
        else:
            _print_checkpoint(found.hub, found.place, tensors, check)
            _print_targets(found.targets)
            _print_findings(found.findings)
        return code


def _about_checkpoint(hub: Hub, place: Path) -> dict[str, Any]:
    about = {
        "format": hub.origin.format,
        "folder": str(place),
        "release": hub.origin.release or None,
        "layout": dict(hub.origin.layout),
        "files": len(hub.origin.files),
        "bytes": sum(path.stat().st_size for path in hub.origin.files),
        "parameters": len(hub.parameters),
        "elements": sum(held.weight.count for held in hub.parameters.values()),
        "kinds": _bytes_by_kind(hub),
        "tied": dict(hub.ties),
        "run": asdict(hub.where),
        "schedule": hub.schedule,
        "scale": asdict(hub.scale) if hub.scale else None,
        "groups": [{"parameters": len(group.names), **group.settings} for group in hub.groups],
        "client": dict(hub.client),
        "findings": [finding_json(finding) for finding in hub.findings],
    }
    shown: dict[str, Any] = HIDDEN.within(about)
    return shown


def _bytes_by_kind(hub: Hub) -> dict[str, dict[str, int]]:
    """Return the number of bytes for each kind of tensor and each number format."""
    found: dict[str, Counter[str]] = {}
    for _, kind, held in hub.tensors():
        found.setdefault(kind, Counter())[held.dtype] += held.size
    return {kind: dict(sizes) for kind, sizes in found.items()}


def _tensor_rows(hub: Hub) -> Iterator[json_types.Held]:
    for name, kind, held in hub.tensors():
        yield {"name": name, "kind": kind, "shape": list(held.shape), "dtype": held.dtype}


def _print_checkpoint(hub: Hub, place: Path, tensors: bool, check: bool) -> None:
    about, origin = _about_checkpoint(hub, place), hub.origin
    known = [
        origin.format,
        *filter(None, [origin.release]),
        *(f"{key} {value}" for key, value in origin.layout.items()),
    ]
    say(f"{place}: {', '.join(known)}; {about['files']} files, {about['bytes']:,} bytes")
    say(
        f"parameters: {about['parameters']:,} of {about['elements']:,} elements; tied: {len(hub.ties)}"
    )
    for kind, sizes in about["kinds"].items():
        say(f"  {kind}: {', '.join(f'{size:,} bytes of {dtype}' for dtype, size in sizes.items())}")
    say(f"run: {_settings_text(about['run']) or 'not stated'}")
    for key in ("scale", "schedule", "client"):
        if about[key]:
            say(f"{key}: {_settings_text(about[key])}")
    for group in about["groups"]:
        settings = {key: value for key, value in group.items() if key != "parameters"}
        say(f"group of {group['parameters']}: {_settings_text(settings)}")
    if check:
        left = without_digest(place, origin.files)
        unseen = any(finding.path == "checksums" for finding in hub.findings)
        how = "what each file says of itself" + (", which does not show all" if unseen else "")
        sums = [path for path in origin.files if path not in left]
        blobs = [path for path in sums if path.name in blob_digests(place)]
        ways = {
            SUMS: [path for path in sums if path not in blobs],
            "the names of their blobs": blobs,
            how: left,
        }
        for way, paths in ways.items():
            if paths:
                say(f"checked by {way}: {_list_names(paths, place)}")
    for row in _tensor_rows(hub) if tensors else ():
        say(
            f"  {HIDDEN.hide(row['name'])}  {row['kind']}  {'x'.join(map(str, row['shape'])) or 'one'}  {row['dtype']}"
        )


def _print_targets(targets: Sequence[Target]) -> None:
    """Print the formats that a checkpoint can be converted to: those that lose nothing first."""
    names = {target.lost: list[str]() for target in targets if target.refused is None}
    for target in targets:
        if target.refused is None:
            names[target.lost].append(target.to)
    for lost in sorted(names, key=lambda one: (len(one), one)):
        without = f" without {', '.join(lost)}" if lost else ""
        say(f"can be converted{without} to: {', '.join(names[lost])}")
    for target in targets:
        if target.refused is not None:
            say(f"not to {target.to}: {target.refused}")


def _list_names(paths: Sequence[Path], place: Path) -> str:
    rest = len(paths) - SHOWN
    folder = place if place.is_dir() else place.parent
    names = ", ".join(os.path.relpath(path, folder) for path in paths[:SHOWN])
    return f"{names} and {rest} more" if rest > 0 else names


def _settings_text(values: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{key} {show_value(value, WIDE) if isinstance(value, dict) else value}"
        for key, value in values.items()
        if value is not None
    )


def _print_findings(findings: tuple[Finding, ...]) -> None:
    for finding in findings:
        say(f"{finding.effect}: {finding.path}: {finding.message}")


# Converting


def convert(folder: Path, options: CheckpointOptions) -> int:
    """Write one checkpoint in another format. Returns the exit code."""
    with _answer_errors(options.json):
        source, place = formats.find_checkpoint(folder, options.from_, options.root)
        target = formats.format_of_name(options.to)
        BridgeError.raise_if(_option_mistakes(options, target, folder))
        dtype = options.wanted["dtype"]
        if dtype is not None and dtype not in DTYPES:
            raise BridgeError(f"--dtype: found {dtype}, expected one of {', '.join(DTYPES)}")
        asked = {
            "dtype": None if dtype is None else DTYPES[dtype],
            "shard": _gigabytes_to_bytes(options.wanted["shard"]),
        }
        wanted = interface.Wanted(**{**options.wanted, **asked})
        # A dry run reads the headers alone, and checksums need every byte.
        verified = options.verify and not options.dry_run
        read = formats.read_at(source, place)
        hub = _rename_parameters(
            _set_samples(formats.add_doubts(source, place, read) if verified else read, options),
            target,
            place,
            options,
        )
        written = formats.plan_files(target, hub, wanted)
        beside = _companion_files(target, place, hub, options)
        written = replace(written, files=(*written.files, *beside.files))
        if verified:
            with progress.show_progress("the files to be checked"):
                formats.verify_checkpoint(source, place, written.files)
        if not options.dry_run:
            _write_folder(written, folder, hub, options)
        findings = (*formats.findings_that_matter(target, hub), *written.findings)
        code = report.exit_of(findings)
        _print_outcome(hub, written, findings, code, options, beside)
        return code


def _companion_files(
    target: Format, place: Path, hub: Hub, options: CheckpointOptions
) -> Companions:
    """Return the files that transformers reads together with the weights, if it can read those under their names."""
    if target.names not in TRANSFORMERS or options.names not in (None, *TRANSFORMERS):
        return Companions()
    asked = options.wanted["dtype"]
    found = companions(place, options.config, hub, None if asked is None else TORCH[DTYPES[asked]])
    for line in found.notes:
        note(f"note: {line}")
    return found


def _option_mistakes(options: CheckpointOptions, target: Format, folder: Path) -> Iterator[str]:
    """Yield a message for each option that the target format does not use, and for an output inside the source checkpoint."""
    for key in ("dtype", "ranks", "level"):
        if options.wanted[key] is not None and key not in target.takes:
            yield (
                f"--{key}: found {options.wanted[key]}; {target.name} does not depend on it; leave "
                "it out"
            )
    yield from find_output_inside(options.output, folder)


def _set_samples(hub: Hub, options: CheckpointOptions) -> Hub:
    """Return the checkpoint with the number of samples from `--samples`.

    Raises `BridgeError` if the checkpoint states another number.
    """
    said = hub.where.samples
    if options.samples is None or said == options.samples:
        return hub
    if said is not None:
        raise BridgeError(
            f"--samples: found {options.samples}, the checkpoint says {said}; leave it out"
        )
    return replace(hub, where=replace(hub.where, samples=options.samples))


def _rename_parameters(hub: Hub, target: Format, place: Path, options: CheckpointOptions) -> Hub:
    """Return the checkpoint with renamed parameters: the names that `--names` asks for, else the
    names that readers of the target format expect.
    """
    configs = describe_configs(place, options.config)
    return rename_under(hub, options.names, target.names, configs)


def _gigabytes_to_bytes(size: float) -> int:
    """Convert `--shard-size` from gigabytes to bytes. Raises `BridgeError` for an impossible size."""
    if not 0 < size < LARGEST:
        raise BridgeError(
            f"--shard-size: found {size:g} GB, expected a size above 0 and below {LARGEST:g}; 5 is usual"
        )
    return max(1, int(size * 2**30))


LARGEST = 2.0**30
"""Size in gigabytes from which on `--shard-size` is refused as a mistake."""


def _write_folder(
    written: PlannedFiles, folder: Path, hub: Hub, options: CheckpointOptions
) -> None:
    meter = Progress(sum(file.size for file in written.files))
    with as_private_as(folder, *hub.origin.files):
        write_checkpoint(
            written, options.output, hub.origin.files, meter.add_bytes, options.processes
        )
    if not options.json:
        say(
            f"wrote {options.output}: {len(written.files)} files, {meter.total:,} bytes in {meter.seconds:.1f} s"
        )


def _print_outcome(
    hub: Hub,
    written: PlannedFiles,
    findings: tuple[Finding, ...],
    code: Exit,
    options: CheckpointOptions,
    beside: Companions,
) -> None:
    made = (
        list(tensors_by_file(hub, written.files))
        if options.dry_run
        else [(file, ()) for file in written.files]
    )
    if options.json:
        files = [
            {
                "name": file.name,
                "bytes": file.size,
                **({"made_of": [asdict(row) for row in rows]} if options.dry_run else {}),
            }
            for file, rows in made
        ]
        said = {
            "to": options.to,
            "output": str(options.output),
            "written": not options.dry_run,
            "files": files,
            "copied": [file.name for file in beside.files if beside.folder],
        }
        print_json(
            {**said, "findings": [finding_json(finding) for finding in findings], "exit_code": code}
        )
        return
    if beside.folder:
        say(f"copied from {beside.folder}: {', '.join(file.name for file in beside.files)}")
    for file, rows in made if options.dry_run else ():
        say(f"{file.name}: {file.size:,} bytes, {f'{len(rows)} tensors' if rows else 'no tensors'}")
        for row in rows:
            shape = "x".join(map(str, row.shape)) or "one"
            say(
                f"  {row.name}  {row.kind}  {shape}  {row.dtype}  from {', '.join(row.files) or 'no file'}"
            )
    if options.dry_run:
        # Moments that other parameters have: the source has none for these, so no file can have them.
        missing = (
            (name, kind)
            for name, held in hub.trainable_parameters.items()
            for kind in hub.moments
            if kind not in held.moments
        )
        for name, kind in missing:
            say(f"missing: {name}  {kind}")
    _print_findings(findings)


# Comparing


def diff(first: Path, second: Path, as_json: bool) -> int:
    """Compare two checkpoints. Returns the exit code."""
    with _answer_errors(as_json):
        one, other = formats.read_checkpoint(first), formats.read_checkpoint(second)
        with progress.show_progress("the tensors"):
            lines = list(compare_tensors(one, other))
        refuse_changes(stamps_of((*one.origin.files, *other.origin.files)))
        runs = {
            key: values
            for key, values in compare_counters(one, other).items()
            if values[0] != values[1]
        }
        verdicts = Counter(line.verdict for line in lines)
        rounded = Counter(line.rounded for line in lines if line.rounded)
        if set(verdicts) - {EQUAL} or runs:
            code = Exit.FINDINGS
        elif verdicts:
            code = Exit.CLEAN
        else:
            code = Exit.UNPROVED  # without tensors nothing is proved equal
        if as_json:
            rows = [{**vars(line), "block": line.block} for line in lines if line.verdict != EQUAL]
            pairs = {key: list(map(encode_value, pair)) for key, pair in runs.items()}
            found = {"verdicts": dict(verdicts), "rounded": dict(rounded), "run": pairs}
            print_json({**found, "differ": rows, "exit_code": code})
        else:
            _tell_lines(lines, verdicts, runs)
            for form, count in rounded.items():
                say(f"of different number formats: {count} tensors, which were compared in {form}")
        return code


def _tell_lines(
    lines: list[TensorLine], verdicts: Mapping[str, int], runs: Mapping[str, Any]
) -> None:
    say(
        f"{len(lines)} tensors: {', '.join(f'{count} {verdict}' for verdict, count in verdicts.items()) or 'none'}"
    )
    for key, (one, other) in runs.items():
        say(f"{key}: {one} in A, {other} in B")
    odd = [line for line in lines if line.verdict != EQUAL]
    blocks = Counter(line.block for line in odd)
    if blocks:
        say(
            f"by block: {', '.join(f'{clean(block)} {count}' for block, count in blocks.most_common(SHOWN))}"
        )
    out = console(sys.stdout)
    for line in odd[:SHOWN]:
        far = f", by {line.most:.3g} at most" if line.verdict == DIFFERENT else ""
        out.print(f"  {line.name} {line.kind}: {line.verdict}{far}", markup=False, soft_wrap=True)
    if len(odd) > SHOWN:
        say(f"  and {len(odd) - SHOWN} more tensors")
