"""What moving checkpoints costs: a large folder beside `cp` and `sha256sum`, and peers that write the same files.

    python benchmarks/checkpoints.py large --gigabytes 10 --folder /scratch
    python benchmarks/checkpoints.py peers --megabytes 600 --folder /scratch

Each way is a process of its own, so that its processor time and its peak of memory are its own; the source is put out of the
page cache before each. What was made is removed in the end.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

MEGABYTE, GIGABYTE = 2**20, 2**30
COMMAND = (sys.executable, "-P", "-m", "stagebridge", "checkpoint", "convert")


@dataclass(frozen=True)
class Cost:
    """Seconds of the clock and of processors, and the largest process's memory in MB."""

    wall: float
    processor: float
    peak: float


def measured(*commands: tuple[str, ...]) -> Cost:
    """What processes cost, one after the other."""
    wall = time.monotonic()
    processor, peaks = 0.0, []
    for command in commands:
        child = os.posix_spawn(
            shutil.which(command[0]) or command[0],
            command,
            {**os.environ, "OMP_NUM_THREADS": "1"},
            file_actions=[(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)],
        )
        _, status, used = os.wait4(child, 0)
        if os.waitstatus_to_exitcode(status) not in (0, 2):
            raise SystemExit(f"{' '.join(command)}: ended with {status}")
        processor += used.ru_utime + used.ru_stime
        peaks.append(used.ru_maxrss / 1024)
    return Cost(time.monotonic() - wall, processor, max(peaks))


def cold(folder: Path) -> None:
    """Put a folder's files out of the page cache, once they are on the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def cached(folder: Path) -> float:
    """The share of a folder's pages that the cache holds, where `fincore` says."""
    names = [str(path) for path in folder.rglob("*") if path.is_file()]
    if shutil.which("fincore") is None:
        return float("nan")
    said = subprocess.run(["fincore", "--json", "--bytes", *names], capture_output=True, text=True, check=True).stdout
    rows = json.loads(said)["fincore"]
    return sum(int(row["res"]) for row in rows) / max(1, sum(int(row["size"]) for row in rows))


def interpreter() -> Cost:
    """Python with torch and what a conversion imports, doing nothing."""
    modules = "bridge.cli.checkpoint, bridge.state.formats, bridge.state.writing, torch, safetensors"
    return measured((sys.executable, "-P", "-c", f"import {modules}; from bridge.state import formats; formats.known()"))


def large(options: argparse.Namespace, top: Path) -> None:
    """A folder of eight shards in fp32, converted to bf16, as it is, and to other formats."""
    source = top / "source"
    width = synthetic(source, options.gigabytes * GIGABYTE)
    room = shutil.disk_usage(top).free
    if room < 1.2 * options.gigabytes * GIGABYTE:
        raise SystemExit(f"{top}: {room:,} bytes are free; name a folder with more")
    idle = interpreter()
    print(f"{options.gigabytes} GB in 8 shards; the largest tensor has {width / MEGABYTE:.0f} MB; idle: {idle.peak:.0f} MB")
    files = [str(path) for path in sorted(source.glob("*.safetensors"))]

    def copied() -> Cost:
        (top / "copy").mkdir()
        found = measured(("cp", *files, str(top / "copy")), ("sha256sum", *files))
        shutil.rmtree(top / "copy")
        return found

    base = fresh(source, copied)
    print(f"cp and sha256sum: {base.wall:.0f} s, processor {base.processor:.1f} s", flush=True)
    for name, words in WAYS.items():
        command = (*COMMAND, str(source), "-o", str(top / "out"), *words)
        ours = fresh(source, lambda command=command: measured(command))
        known = (top / "out" / "SHA256SUMS").read_bytes() if "safetensors" in words else b""
        shutil.rmtree(top / "out")
        beyond, times = (ours.peak - idle.peak) * MEGABYTE / width, ours.processor / base.processor
        said = f"peak {ours.peak:.0f} MB, {beyond:.2f} x the largest tensor beyond idle"
        print(f"{name}: {ours.wall:.0f} s, processor {ours.processor:.1f} s = {times:.2f} x; {said}", flush=True)
    kills = killed(command, options.kills, ours.wall)
    same = (top / "out" / "SHA256SUMS").read_bytes() == known
    print(f"killed {kills} times at random moments, it goes on to {'the same' if same else 'OTHER'} bytes")


WAYS: Mapping[str, tuple[str, ...]] = {
    "native": ("--to", "native"),
    "safetensors": ("--to", "safetensors", "--shard-size", "1.25"),
    "safetensors, 2 processes": ("--to", "safetensors", "--shard-size", "1.25", "--processes", "2"),
}


def killed(command: tuple[str, ...], times: int, wall: float) -> int:
    """Start the command and end it by SIGKILL that often, then let it end; how often it was killed before it ended itself."""
    random, count = Random(1), 0
    for _ in range(times):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        try:
            process.wait(timeout=2 + random.random() * wall / times * 3)
            break
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            count += 1
    else:
        subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    return count


def fresh(source: Path, work: Callable[[], Cost]) -> Cost:
    cold(source)
    held = cached(source)
    if held > 0.05:
        print(f"note: {held:.0%} of the source are in the page cache")
    return work()


def synthetic(folder: Path, size: int) -> int:
    """Eight shards of a model's shapes, with an index; bytes of the largest tensor."""
    folder.mkdir(parents=True)
    hidden, layers = 4096, 0
    shapes: list[tuple[str, tuple[int, int]]] = [("model.embed_tokens.weight", (32000, hidden))]
    while sum(4 * rows * columns for _, (rows, columns) in shapes) < size:
        names = {"self_attn.q_proj": (hidden, hidden), "mlp.up_proj": (11008, hidden), "mlp.down_proj": (hidden, 11008)}
        shapes += [(f"model.layers.{layers}.{name}.weight", shape) for name, shape in names.items()]
        layers += 1
    parts = [shapes[number::8] for number in range(8)]
    where = {}
    for number, part in enumerate(parts, 1):
        name = f"model-{number:05d}-of-00008.safetensors"
        where |= dict.fromkeys((key for key, _ in part), name)
        _shard(folder / name, part)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return max(4 * rows * columns for _, (rows, columns) in shapes)


def _shard(path: Path, part: list[tuple[str, tuple[int, int]]]) -> None:
    """A safetensors file of random bytes, written in strips."""
    rows: dict[str, Any] = {}
    at = 0
    for name, shape in part:
        size = 4 * shape[0] * shape[1]
        rows[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(rows).encode()
    text += b" " * (-len(text) % 8)
    block = bytearray(os.urandom(4 * MEGABYTE))
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for start in range(0, at, len(block)):
            block[0] = start // len(block) % 256
            file.write(block[: min(len(block), at - start)])


def main() -> None:
    """Choose what is measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("large", "peers"))
    parser.add_argument("--gigabytes", type=float, default=10)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--megabytes", type=int, default=600)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        {"large": large, "peers": peers}[options.what](options, Path(folder))


def peers(options: argparse.Namespace, top: Path) -> None:
    """See below."""


if __name__ == "__main__":
    main()
