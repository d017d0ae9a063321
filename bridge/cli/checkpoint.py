"""The `checkpoint` command: show a checkpoint, write it in another format, or compare two
checkpoints.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bridge.checkpoint import formats, interface
from bridge.checkpoint.digests import SUMS, blob_digests, without_digest
from bridge.checkpoint.file_tensors import tensors_by_file
from bridge.checkpoint.hub import Hub, Model
from bridge.checkpoint.interface import Format, PlannedFiles
from bridge.checkpoint.lazy import EXACT, FLOATING, STRIP, TORCH, WIDTH, Lazy, torch_type
from bridge.checkpoint.model_facts import describe_config, rename_under
from bridge.checkpoint.tagged_json import encode_value
from bridge.checkpoint.targets import Target, list_targets
from bridge.checkpoint.writing import write_checkpoint
from bridge.cli import progress
from bridge.cli.budget import read_within_limits
from bridge.cli.companions import (
    Companions,
    companions,
    config_beside,
    is_of_transformers,
    refuse_contradictions,
)
from bridge.cli.job import Job
from bridge.cli.read_job import read_job
from bridge.cli.terminal import console, note, print_json, say
from bridge.errors import BridgeError
from bridge.files import as_private_as
from bridge.files.contained import refuse_changes, stamps_of
from bridge.files.printable import clean
from bridge.files.progress import count_items
from bridge.files.secrets import HIDDEN
from bridge.files.shown import show_value
from bridge.report import as_json as report, json_types
from bridge.report.as_json import finding_json
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


def _answer_errors(as_json: bool, work: Callable[[], int]) -> int:
    """Run `work`; with --json an error is an object on stdout as well."""
    try:
        need_engine("checkpoint")
        with read_within_limits():
            return work()
    except BridgeError as error:
        error.as_object = as_json
        raise


def inspect(
    folder: Path, name: str | None, root: str | None, tensors: bool, check: bool, as_json: bool
) -> int:
    """Show one checkpoint. Returns the exit code."""

    def work() -> int:
        format, place = formats.find_checkpoint(folder, name, root)
        if check:
            with progress.show_progress("the files"):
                formats.verify_checkpoint(format, place)
        hub = formats.read_at(format, place)
        if check:
            hub = formats.add_doubts(format, place, hub)
            refuse_changes(stamps_of(hub.origin.files))
        code = report.exit_of(hub.findings)
        targets = list(list_targets(hub, _describe_configs(place, None)))
        if as_json:
            rows = {"tensors": list(_tensor_rows(hub))} if tensors else {}
            ways = [{**asdict(one), "lost": list(one.lost)} for one in targets]
            about = {**_about_checkpoint(hub, place), "targets": ways}
            print_json({**encode_value(about), **rows, "exit_code": code})
        else:
            _print_checkpoint(hub, place, tensors, check)
            _print_targets(targets)
            _print_findings(hub.findings)
        return code

    return _answer_errors(as_json, work)


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

    def work() -> int:
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

    return _answer_errors(options.json, work)


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


def find_output_inside(output: Path, folder: Path) -> Iterator[str]:
    """Yield a message if an output lies inside `folder`, the source checkpoint."""
    if output.resolve().is_relative_to(folder.resolve()):
        yield f"-o: {output} lies inside {folder}, the checkpoint that is read; name a folder outside it"


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
    configs = _describe_configs(place, options.config)
    return rename_under(hub, options.names, target.names, configs)


def _describe_configs(place: Path, given: Path | None) -> list[tuple[str, Model]]:
    """Return what the config next to a checkpoint, and one that the user gives, say of the model, each with
    its path. Raises `BridgeError` if the user's cannot be read.
    """
    configs = []
    for path in dict.fromkeys(filter(None, (config_beside(place), given))):
        try:
            if not path.is_file():
                raise BridgeError("found no regular file")
            configs.append((str(path), describe_config(read_job(Job(str(path), lenient=True)))))
        except BridgeError as error:
            # What is no config of transformers says nothing about the weights beside it.
            if path == given or not path.is_file() or is_of_transformers(path.read_bytes()):
                raise BridgeError(
                    *(f"{path}: {problem}; correct this config" for problem in error.problems)
                ) from None
            note(f"note: {path}: not held against the weights, as it cannot be read: {error}")
    own = config_beside(place)
    if own and given and own != given and given.is_file():
        refuse_contradictions(own, given)
    return configs


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


class Progress:
    """Prints the progress of writing on stderr."""

    def __init__(self, total: int) -> None:
        self.total, self.done, self.before = total, 0, 0
        self.began = self.told = time.monotonic()
        self.pace = progress.Pace()

    @property
    def seconds(self) -> float:
        """Seconds since the writing began."""
        return time.monotonic() - self.began

    def add_bytes(self, count: int, fresh: bool = True) -> None:
        """Add `count` bytes to the progress. This conversion wrote them if `fresh`, else an earlier one."""
        self.done += count
        self.before += 0 if fresh else count
        # What an earlier, killed conversion wrote is found at once: it is no measure of the speed.
        new = self.done - self.before
        rest = self.pace.rest(new, new + self.total - self.done) if new else ""
        pause = progress.OFTEN if self.told > self.began else progress.FIRST
        if rest and time.monotonic() - self.told > pause:
            self.told = time.monotonic()
            note(f"{self.done / self.total:4.0%}  {new / self.seconds / 2**20:,.0f} MB/s  {rest}")


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


@dataclass(frozen=True)
class TensorLine:
    """The comparison of one tensor in two checkpoints: equal, different (with the largest
    difference), or only in one of them. `rounded` is the number format in which two copies were
    compared, if their own formats differ.
    """

    name: str
    kind: str
    verdict: str
    most: float = 0.0
    rounded: str = ""

    @property
    def block(self) -> str:
        """The part of the model that the tensor belongs to: the tensor's name up to its first number."""
        parts = self.name.split(".")
        at = next((number for number, part in enumerate(parts) if part.isdigit()), len(parts) - 2)
        return ".".join(parts[: at + 1])


def diff(first: Path, second: Path, as_json: bool) -> int:
    """Compare two checkpoints. Returns the exit code."""

    def work() -> int:
        one, other = formats.read_checkpoint(first), formats.read_checkpoint(second)
        with progress.show_progress("the tensors"):
            lines = list(_compare_tensors(one, other))
        refuse_changes(stamps_of((*one.origin.files, *other.origin.files)))
        runs = {
            key: values
            for key, values in _compare_counters(one, other).items()
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

    return _answer_errors(as_json, work)


ROUNDED = "weight that the model computes with"
EQUAL, DIFFERENT, SHAPE, FIRST, SECOND = (
    "equal",
    "different",
    "of another shape",
    "only in A",
    "only in B",
)


def _compare_counters(one: Hub, other: Hub) -> dict[str, tuple[Any, Any]]:
    """Return a mapping from each counter and setting to the values of it in the two checkpoints.

    A value that only one checkpoint states is left out, so it does not count as a difference.
    """
    pairs = {
        key: (getattr(one.where, key), getattr(other.where, key))
        for key in ("steps", "skipped", "samples")
    }
    pairs["schedule"] = (one.schedule, other.schedule)
    if one.scale and other.scale:
        pairs |= {
            f"scale.{key}": (value, vars(other.scale)[key])
            for key, value in vars(one.scale).items()
        }
    # A stack keeps its own arguments there too, which say how a run was launched: only single values are compared.
    single = {
        key: value
        for key, value in one.client.items()
        if not isinstance(value, Mapping | list | tuple | set | frozenset)
    }
    pairs |= {f"client.{key}": (value, other.client.get(key)) for key, value in single.items()}
    pairs |= dict(_by_parameter(one, other))
    return {key: pair for key, pair in pairs.items() if None not in pair}


def _by_parameter(one: Hub, other: Hub) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Yield each optimizer setting that differs, as `SETTING of NAME` with both values.

    NAME is the first parameter for which the values of the setting differ.
    """
    ours, theirs = (dict(_settings_by_name(hub)) for hub in (one, other))
    found: dict[str, tuple[Any, Any]] = {}
    # Of a setting that differs for thousands of parameters, one is enough to look for the cause.
    for name in [name for name in ours if name in theirs]:
        for key, value in ours[name].items():
            there = theirs[name].get(key)
            if value is not None and there is not None and value != there:
                found.setdefault(f"{key} of {name}", (value, there))
    kinds: dict[str, str] = {}
    for key in found:
        kinds.setdefault(key.partition(" of ")[0], key)
    yield from ((key, found[key]) for key in kinds.values())


def _settings_by_name(hub: Hub) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each parameter's name with a dictionary: the settings of its optimizer group, its step,
    and whether it is trained.

    A tied name comes with the name of the parameter that it shares.
    """
    known = {name: group.settings for group in hub.groups for name in group.names}
    for name, held in hub.parameters.items():
        yield name, {**known.get(name, hub.settings), "step": held.step, "trained": held.trained}
    yield from ((alias, {"tied": name}) for alias, name in hub.ties.items())


def _compare_tensors(one: Hub, other: Hub) -> Iterator[TensorLine]:
    """Compare the two checkpoints tensor by tensor: the most exact copy of each parameter, its
    moments, and the buffers.

    The rounded weight is compared too if both checkpoints have it.
    """
    ours, theirs = dict(_comparable_tensors(one)), dict(_comparable_tensors(other))
    for key in [
        key
        for key in {**ours, **theirs}
        if key[1] == ROUNDED and not (key in ours and key in theirs)
    ]:
        (ours if key in ours else theirs).pop(
            key
        )  # a format with one copy of a weight lacks nothing
    for key in count_items(
        [*dict.fromkeys((*ours, *theirs))], lambda key: (ours.get(key) or theirs[key]).size
    ):
        name, kind = key
        if key not in theirs or key not in ours:
            yield TensorLine(name, kind, FIRST if key in ours else SECOND)
        elif ours[key].shape != theirs[key].shape:
            yield TensorLine(name, kind, SHAPE)
        else:
            pair = ours[key], theirs[key]
            coarse = _common_format(*(held.dtype for held in pair))
            most = _largest_difference(*pair, coarse)
            rounded = "" if pair[0].dtype == pair[1].dtype else coarse
            yield TensorLine(name, kind, DIFFERENT if most else EQUAL, most, rounded)


def _comparable_tensors(hub: Hub) -> Iterator[tuple[tuple[str, str], Lazy]]:
    for name, held in hub.parameters.items():
        yield (name, "weight"), held.best
        if held.master is not None:
            yield (name, ROUNDED), held.weight
        yield from (((name, kind), moment) for kind, moment in held.moments.items())
    yield from (
        ((name, "weight"), hub.parameters[of].best)
        for name, of in hub.ties.items()
        if of in hub.parameters
    )
    yield from (
        ((name, "weight"), held) for name, held in hub.buffers.items()
    )  # some formats do not tell them apart


def _common_format(one: str, other: str) -> str:
    """Return the number format in which tensors of two formats are compared: the coarser one, as the
    finer copy has digits that the other cannot have; one that has the numbers of both if each has numbers
    that the other lacks.
    """
    if one in (other, *EXACT.get(other, ())):
        return one
    if other in EXACT.get(one, ()):
        return other
    kinds = {one[0], other[0]} - {"U", "I"}
    return "C64" if "C" in kinds else "F64" if kinds & {*"FB"} else "I64"


def _largest_difference(one: Lazy, other: Lazy, coarse: str) -> float:
    """Return the largest difference between corresponding elements, in the number format `coarse`;
    infinite if exactly one of two elements is NaN, or infinite in its own format.
    """
    import torch

    most, step = 0.0, STRIP // WIDTH[one.dtype]
    for start in range(0, one.count, step):
        stop = min(one.count, start + step)
        stored = [held.flat(start, stop) for held in (one, other)]
        left, right = (held.to(torch_type(coarse)) for held in stored)
        if one.dtype != other.dtype:
            finite = [held.double().isfinite() for held in stored]
            most = most if torch.equal(*finite) else float("inf")
        # Bytes, so that NaNs of the same bits are equal.
        differ = (left.view(torch.uint8) != right.view(torch.uint8)).view(stop - start, -1).any(1)
        if differ.any():
            gap = (left[differ].to(torch.complex128) - right[differ].to(torch.complex128)).abs()
            # Whole numbers may be one double; and 0.0 and -0.0 differ, though their distance is 0.
            least = 5e-324 if coarse in (*FLOATING, "C64") else 1.0
            most = max(most, float(gap.nan_to_num(nan=float("inf")).max()) or least)
    return most


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
