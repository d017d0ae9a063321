"""What moving checkpoints costs: a large folder beside `cp` and `sha256sum`, and peers that write the same files.

    python benchmarks/checkpoints.py large --gigabytes 10 --folder /scratch
    python benchmarks/checkpoints.py peers --folder /scratch

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
from collections.abc import Callable, Iterator, Mapping
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
    said = subprocess.run(
        ["fincore", "--json", "--bytes", *names], capture_output=True, text=True, check=True
    ).stdout
    rows = json.loads(said)["fincore"]
    return sum(int(row["res"]) for row in rows) / max(1, sum(int(row["size"]) for row in rows))


def interpreter() -> Cost:
    """Python with torch and what a conversion imports, doing nothing."""
    modules = "bridge.cli.checkpoint, bridge.checkpoint.formats, bridge.checkpoint.writing, torch, safetensors"
    return measured(
        (
            sys.executable,
            "-P",
            "-c",
            f"import {modules}; from bridge.checkpoint import formats; formats.all_formats()",
        )
    )


def large(options: argparse.Namespace, top: Path) -> None:
    """A folder of eight shards in fp32, converted to bf16, as it is, and to other formats."""
    source = top / "source"
    width = synthetic(source, options.gigabytes * GIGABYTE)
    room = shutil.disk_usage(top).free
    if room < 1.2 * options.gigabytes * GIGABYTE:
        raise SystemExit(f"{top}: {room:,} bytes are free; name a folder with more")
    idle = interpreter()
    print(
        f"{options.gigabytes} GB in 8 shards; the largest tensor has {width / MEGABYTE:.0f} MB; idle: {idle.peak:.0f} MB"
    )
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
        print(
            f"{name}: {ours.wall:.0f} s, processor {ours.processor:.1f} s = {times:.2f} x; {said}",
            flush=True,
        )
    ends = list(killed(command, top / "out", options.kills, ours.wall))
    same = all(found == known for found in ends)
    print(
        f"killed {options.kills} times at random moments, ended {len(ends)} times, with {'the same' if same else 'OTHER'} bytes"
    )


WAYS: Mapping[str, tuple[str, ...]] = {
    "native": ("--to", "native"),
    "safetensors": ("--to", "safetensors", "--shard-size", "1.25"),
    "safetensors, 2 processes": ("--to", "safetensors", "--shard-size", "1.25", "--processes", "2"),
}


def killed(command: tuple[str, ...], out: Path, times: int, wall: float) -> Iterator[bytes]:
    """Start the command and end it by SIGKILL at so many random moments; the digests of what it wrote each time that it ended
    by itself, the last time among them.
    """
    random, count = Random(1), 0
    while count < times:
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        try:
            process.wait(timeout=2 + random.random() * wall / times * 3)
            yield (out / "SHA256SUMS").read_bytes()
            shutil.rmtree(out)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            count += 1
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    yield (out / "SHA256SUMS").read_bytes()


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
        names = {
            "self_attn.q_proj": (hidden, hidden),
            "mlp.up_proj": (11008, hidden),
            "mlp.down_proj": (hidden, 11008),
        }
        shapes += [(f"model.layers.{layers}.{name}.weight", shape) for name, shape in names.items()]
        layers += 1
    parts = [shapes[number::8] for number in range(8)]
    where = {}
    for number, part in enumerate(parts, 1):
        name = f"model-{number:05d}-of-00008.safetensors"
        where |= dict.fromkeys((key for key, _ in part), name)
        _shard(folder / name, part)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": where})
    )
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


# Peers


def peers(options: argparse.Namespace, top: Path) -> None:
    """Scripts of DeepSpeed and transformers beside ours, on one folder, to the same tensors."""
    made, model = top / "made", top / "model"
    launch = (
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        __file__,
        "make",
        "--folder",
        str(top),
    )
    subprocess.run(launch, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    size = sum(path.stat().st_size for path in made.rglob("*.pt"))
    print(
        f"a Llama under ZeRO 2 in bf16 on two ranks: {size / MEGABYTE:.0f} MB; its weights in fp32 as transformers saves them"
    )
    place, out = str(next(made.glob("global_step*"))), str(top / "theirs")
    scripts = (
        "-m",
        "deepspeed.checkpoint.ds_to_universal",
        "--inject_missing_state",
        "--num_extract_workers",
        "1",
    )
    universal = (
        *scripts,
        "--num_merge_workers",
        "1",
        "--input_folder",
        place,
        "--output_folder",
        out,
    )
    cases = {
        "zero_to_fp32": (
            ("-m", "deepspeed.utils.zero_to_fp32", str(made), out, "--safe_serialization"),
            (made, "safetensors", "--dtype", "fp32"),
        ),
        "ds_to_universal": (universal, (made, "universal")),
        "transformers": (
            ("-c", LOADED.format(source=str(model), target=out)),
            (model, "safetensors", "--dtype", "bf16"),
        ),
    }
    for name, (theirs, (source, form, *words)) in cases.items():
        base = fresh(source, lambda theirs=theirs: measured((sys.executable, *theirs)))
        command = (*COMMAND, str(source), "--to", form, "-o", str(top / "ours"), *words)
        ours = fresh(source, lambda command=command: measured(command))
        time_, memory = ours.processor / base.processor, ours.peak / base.peak
        print(
            f"{name}: {base.processor:.1f} s, {base.peak:.0f} MB; ours {ours.processor:.1f} s, {ours.peak:.0f} MB:"
            f" {time_:.2f} of the processor time, {memory:.2f} of the peak; {unlike(Path(out), top / 'ours')}",
            flush=True,
        )
        shutil.rmtree(out)
        shutil.rmtree(top / "ours")


LOADED = """import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained({source!r}, dtype=torch.bfloat16)
model.save_pretrained({target!r})
"""


def unlike(theirs: Path, ours: Path) -> str:
    """Whether the tensors that both wrote are the same, bit by bit; in another process, whose memory does not count."""
    command = (sys.executable, __file__, "compare", "--folder", str(theirs), "--other", str(ours))
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def compared(theirs: Path, ours: Path) -> str:
    """See `unlike`."""
    import torch
    from safetensors.torch import load_file

    if (theirs / "model.safetensors").is_file():
        one, other = (load_file(folder / "model.safetensors") for folder in (theirs, ours))
    else:
        one, other = (dict(_universal(next(folder.rglob("zero")))) for folder in (theirs, ours))
    odd = [
        name
        for name in {*one, *other}
        if name not in one or name not in other or not torch.equal(one[name], other[name])
    ]
    return (
        f"{len(one)} tensors, all the same" if not odd else f"{len(odd)} OTHERS, such as {odd[0]}"
    )


def _universal(folder: Path) -> Iterator[tuple[str, Any]]:
    import torch

    for path in folder.rglob("*.pt"):
        held = torch.load(path, weights_only=False)
        tensor = held.get("param") if isinstance(held, dict) else held
        if isinstance(tensor, torch.Tensor) and tensor.dim():
            yield str(path.relative_to(folder)), tensor.reshape(-1)


def make(options: argparse.Namespace, top: Path) -> None:
    """On a rank: one step of DeepSpeed on a Llama, saved; and its weights as transformers saves them."""
    os.environ.update(DS_ACCELERATOR="cpu")
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from compat.deepspeed.runtime.trainers import load_deepspeed

    deepspeed = load_deepspeed()
    deepspeed.init_distributed("gloo")
    torch.manual_seed(1)
    sizes = {
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
    }
    net = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=16000, tie_word_embeddings=False))
    if deepspeed.comm.get_rank() == 0:
        net.save_pretrained(top / "model")
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
    }
    engine, *_ = deepspeed.initialize(
        model=net, model_parameters=net.parameters(), config=config, dist_init_required=False
    )
    tokens = torch.arange(8)[None]
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
    engine.save_checkpoint(str(top / "made"))


def main() -> None:
    """Choose what is measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("large", "peers", "make", "compare"))
    parser.add_argument("--gigabytes", type=float, default=10)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--other", type=Path)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if options.what == "make":
        make(options, options.folder)
        return
    if options.what == "compare":
        print(compared(options.folder, options.other))
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        {"large": large, "peers": peers}[options.what](options, Path(folder))


if __name__ == "__main__":
    main()
