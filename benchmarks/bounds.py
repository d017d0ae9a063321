"""Inputs that are large, broken or no config: processor time, memory, exit code and the first line of each answer.

Usage: python benchmarks/bounds.py [NAME ...]; ends with 1 if one takes more than 10 s of processor time or 1 GiB, shows a
traceback, or ends with a code that is not expected.
"""

from __future__ import annotations

import os
import resource
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

HOME = Path(__file__).resolve().parents[1]
SECONDS, MEMORY, ELAPSED = 10.0, 2**30, 120.0
LAUNCH = (
    "--micro-batch-size 1 --global-batch-size 8 --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --lr 1e-3 --train-iters 10"
)
SECTIONS = (
    "language_model:\n  num_layers: 4\n  hidden_size: 64\n  num_attention_heads: 4\n  tensor_model_parallel_size: 2\n"
    "model_parallel:\n  tensor_model_parallel_size: 2\n  pipeline_model_parallel_size: 1\n"
    "micro_batch_size: 1\nglobal_batch_size: 8\nseq_length: 32\nmax_position_embeddings: 32\nlr: 0.001\n"
)
PIPED = LAUNCH + " --pipeline-model-parallel-size 4"
MIB = 2**20


@dataclass(frozen=True)
class Sample:
    """What is put into a folder, the command that is run there, and the exit codes that are right."""

    command: str
    make: Callable[[Path], None] = lambda folder: None
    codes: tuple[int, ...] = (1,)


def text(name: str, content: str | Callable[[], str]) -> Callable[[Path], None]:
    """A file."""
    return lambda folder: void(
        (folder / name).write_text(
            content if isinstance(content, str) else content(), encoding="utf-8"
        )
    )


def content(name: str, of: bytes) -> Callable[[Path], None]:
    """A file of bytes."""
    return lambda folder: void((folder / name).write_bytes(of))


def void(_: object) -> None:
    """Nothing, of what gives something."""


def launches(count: int, said: str = LAUNCH) -> str:
    """A script that starts many runs."""
    return "#!/bin/bash\n" + "".join(
        f"torchrun pretrain_gpt.py {said} --seed {number}\n" for number in range(1, count + 1)
    )


def loop(folder: Path) -> None:
    """Two links to one another."""
    (folder / "x.yaml").symlink_to("y.yaml")
    (folder / "y.yaml").symlink_to("x.yaml")


def unreadable(folder: Path) -> None:
    """A file that its owner may not read; root may."""
    (folder / "x.yaml").write_text("a: 1\n")
    (folder / "x.yaml").chmod(0)


def converted(change: Callable[[Path], None]) -> Callable[[Path], None]:
    """A config with a sidecar beside it, and what is then done to that."""

    def make(folder: Path) -> None:
        (folder / "run.args").write_text(LAUNCH + "\n")
        words = [
            "convert",
            "run.args",
            "--from",
            "megatron",
            "--to",
            "deepspeed",
            "-o",
            "x.json",
            "--world-size",
            "1",
        ]
        subprocess.run(
            [*STAGEBRIDGE, *words], cwd=folder, env=environment(), capture_output=True, check=False
        )
        change(next(folder.glob("x*.carry.json")))

    return make


def replaced(old: str, new: str) -> Callable[[Path], None]:
    """One key of a sidecar with another value."""
    import json

    def change(path: Path) -> None:
        data = json.loads(path.read_text())
        assert old in data, sorted(data)
        path.write_text(json.dumps({**data, old: json.loads(new)}))

    return change


def pipe(path: Path) -> None:
    """A pipe in place of a file."""
    path.unlink()
    os.mkfifo(path)


BACK = "convert x.json --from deepspeed --to megatron --world-size 1"
SAMPLES: dict[str, Sample] = {
    "3,000 runs in a script": Sample("check x.sh", text("x.sh", lambda: launches(3000)), (1, 2)),
    "3,000 short runs in a script": Sample(
        "check x.sh",
        text("x.sh", lambda: launches(3000, "--micro-batch-size 1 --num-layers 2")),
        (1, 2),
    ),
    "3,000 runs, one chosen": Sample(
        "check x.sh --launch 7",
        text("x.sh", lambda: launches(3000, "--micro-batch-size 1 --num-layers 2")),
        (0, 1, 2),
    ),
    "19,990 unknown keys, JSON": Sample(
        "check x.json --from deepspeed",
        text(
            "x.json", lambda: "{" + ",".join(f'"zero_optimi_{n}": 1' for n in range(19_990)) + "}"
        ),
    ),
    "19,990 unknown keys, lenient": Sample(
        "check x.json --from deepspeed --lenient",
        text(
            "x.json", lambda: "{" + ",".join(f'"zero_optimi_{n}": 1' for n in range(19_990)) + "}"
        ),
        (0, 1, 2),
    ),
    "9,990 unknown keys, YAML": Sample(
        "check x.yaml --from fast_llm",
        text("x.yaml", lambda: "".join(f"training_{n}: 1\n" for n in range(9_990))),
    ),
    "9,990 unknown keys, AutoModel": Sample(
        "check x.yaml --from automodel",
        text("x.yaml", lambda: "".join(f"distributed_{n}: 1\n" for n in range(9_990))),
        (1, 2),
    ),
    "9,990 unknown keys of any stack": Sample(
        "check x.yaml", text("x.yaml", lambda: "".join(f"training_{n}: 1\n" for n in range(9_990)))
    ),
    "20,000 unknown keys, JSON": Sample(
        "check x.json --from deepspeed",
        text(
            "x.json",
            lambda: "{" + ",".join(f'"zero_optimisation_{n}": 1' for n in range(19_999)) + "}",
        ),
    ),
    "20,000 unknown keys, YAML": Sample(
        "check x.yaml --from fast_llm",
        text("x.yaml", lambda: "".join(f"training_{n}: 1\n" for n in range(19_999))),
    ),
    "20,000 unknown keys, lenient": Sample(
        "check x.json --from deepspeed --lenient",
        text(
            "x.json",
            lambda: "{" + ",".join(f'"zero_optimisation_{n}": 1' for n in range(19_999)) + "}",
        ),
        (0, 1, 2),
    ),
    "20,000 unknown flags": Sample(
        "check x.args --from megatron",
        text("x.args", lambda: " ".join(f"--num-layer-{n}" for n in range(20_000))),
    ),
    "CSV of 20,000 short rows": Sample("schedule x.csv", text("x.csv", "0F0,1F0\n" * 20_000)),
    "CSV of 400,000 short rows": Sample("schedule x.csv", text("x.csv", "0F0\n" * 400_000)),
    "CSV of 30 bytes": Sample("schedule x.csv", text("x.csv", "0F0,400000000F1\n")),
    "CSV of 30 bytes in a recipe": Sample(
        "check x.yaml --from automodel",
        lambda folder: (
            text("t.csv", "0F0,400000000F1\n")(folder),
            text(
                "x.yaml",
                "distributed:\n  strategy: fsdp2\n  pp_size: 2\n  pipeline:\n    pp_schedule_csv: t.csv\n",
            )(folder),
        )[0],
    ),
    "CSV of 20,000 rows in a recipe": Sample(
        "check x.yaml --from automodel",
        lambda folder: (
            text("t.csv", "0F0,1F0\n" * 20_000)(folder),
            text(
                "x.yaml",
                "distributed:\n  strategy: fsdp2\n  pp_size: 2\n  pipeline:\n    pp_schedule_csv: t.csv\n",
            )(folder),
        )[0],
    ),
    "launch without an interpreter": Sample(
        "check x.sh", text("x.sh", f"./pretrain_gpt.py {LAUNCH}\n"), (0, 1, 2)
    ),
    "- 5 as a Fast-LLM file": Sample("check x.yaml --from fast_llm", text("x.yaml", "- 5\n")),
    "symlink loop": Sample("check x.yaml --from fast_llm", loop),
    "unreadable file": Sample("check x.yaml --from fast_llm", unreadable),
    "folder as file": Sample("check . --from fast_llm"),
    "no file": Sample("check nowhere.yaml"),
    "byte order mark": Sample(
        "check x.json --from deepspeed",
        content("x.json", b'\xef\xbb\xbf{"train_batch_size": 8}'),
        (0, 2),
    ),
    "byte order mark of UTF-16": Sample(
        "check x.json --from deepspeed",
        content("x.json", '{"train_batch_size": 8}'.encode("utf-16")),
    ),
    "byte order mark, script": Sample(
        "check x.sh --world-size 1",
        content("x.sh", b"\xef\xbb\xbf#!/bin/bash\ntorchrun pretrain_gpt.py " + LAUNCH.encode()),
        (0, 1, 2),
    ),
    "byte order mark, YAML": Sample(
        "check x.yaml --from fast_llm",
        content("x.yaml", b"\xef\xbb\xbfbatch:\n  micro_batch_size: 1\n"),
        (0, 1, 2),
    ),
    "-o .": Sample(
        "convert x.args --from megatron --to deepspeed --world-size 1 -o .", text("x.args", LAUNCH)
    ),
    "-o of 5,000 characters": Sample(
        f"convert x.args --from megatron --to deepspeed --world-size 1 -o {'a' * 5000}.json",
        text("x.args", LAUNCH),
    ),
    "-o of 300 characters": Sample(
        f"convert x.args --from megatron --to deepspeed --world-size 1 -o {'a' * 300}.json",
        text("x.args", LAUNCH),
    ),
    "hexadecimal of 5,000 digits": Sample(
        "check x.yaml --from fast_llm", text("x.yaml", f"a: 0x{'f' * 5000}\n")
    ),
    "hexadecimal of 5,000 digits, flags": Sample(
        "check x.args --from megatron", text("x.args", f"{LAUNCH} --seed 0x{'f' * 5000}\n"), (1, 2)
    ),
    "hexadecimal of 5,000 digits, script": Sample(
        "check x.sh",
        text("x.sh", f"A=$((0x{'f' * 5000}))\ntorchrun pretrain_gpt.py {LAUNCH} --seed $A\n"),
        (1, 2),
    ),
    "decimal of 5,000 digits, JSON": Sample(
        "check x.json --from deepspeed", text("x.json", f'{{"train_batch_size": {"9" * 5000}}}')
    ),
    "integer beyond a float, JSON": Sample(
        "check x.json --from deepspeed", text("x.json", f'{{"gradient_clipping": {"9" * 400}}}')
    ),
    "integer beyond a float, flags": Sample(
        "check x.args --from megatron --world-size 1",
        text("x.args", f"{LAUNCH} --clip-grad {'9' * 400}\n"),
        (1, 2),
    ),
    "integer beyond a float, YAML": Sample(
        "check x.yaml --from fast_llm",
        text("x.yaml", f"optimizer:\n  learning_rate:\n    base: {'9' * 400}\n"),
    ),
    "meant: null in a sidecar": Sample(BACK, converted(replaced("meant", "null")), (0, 1, 2)),
    "entry: {} in a sidecar": Sample(BACK, converted(replaced("entry", "{}")), (0, 1, 2)),
    "pipe as a sidecar": Sample(BACK, converted(pipe), (0, 1, 2)),
    "pipe as a file": Sample("check x.json", lambda folder: os.mkfifo(folder / "x.json")),
    "10**12 ranks": Sample("layout x.args --ranks 1000000000000", text("x.args", LAUNCH)),
    "10**6 ranks": Sample("layout x.args --ranks 1000000", text("x.args", LAUNCH), (0, 1, 2)),
    "10**9 microbatches": Sample(
        "schedule x.args --microbatches 1000000000", text("x.args", PIPED)
    ),
    "1e9 microbatches": Sample("schedule x.args --microbatches 1e9", text("x.args", PIPED)),
    "20,000 microbatches": Sample(
        "schedule x.args --microbatches 20000", text("x.args", PIPED), (0, 1)
    ),
    "YAML of 10 MB that is no config": Sample(
        "check x.yaml", text("x.yaml", lambda: "- {a: 1, b: [1, 2]}\n" * (10 * MIB // 20))
    ),
    "YAML of 10 MB, one text": Sample(
        "check x.yaml",
        text("x.yaml", lambda: "a: |\n" + "  lorem ipsum dolor\n" * (10 * MIB // 20)),
    ),
    "YAML of 500 kB that is no config": Sample(
        "check x.yaml", text("x.yaml", lambda: "a: 1\n" * (500_000 // 5))
    ),
    "YAML of 500 kB, one line": Sample(
        "check x.yaml --from fast_llm", text("x.yaml", lambda: "a: '" + "x " * 249_000 + "'\n")
    ),
    "JSON of 17 MiB": Sample("check x.json", text("x.json", lambda: " " * (17 * MIB))),
    "brackets 100,000 deep": Sample("check x.json", text("x.json", "[" * 100_000)),
    "Megatron YAML, 2 tensor ranks of 1": Sample(
        "check x.yaml --from megatron --world-size 1", text("x.yaml", SECTIONS)
    ),
    "secrets by the thousand": Sample(
        "check x.sh",
        text(
            "x.sh",
            lambda: (
                "".join(f"export MY_API_KEY_{n}=abcdef{n}\n" for n in range(10_000))
                + f"torchrun pretrain_gpt.py {LAUNCH}\n"
            ),
        ),
        (0, 1, 2),
    ),
    "names of secrets in one word": Sample(
        "check x.sh",
        text("x.sh", lambda: f"A={'key=' * 120_000}\ntorchrun pretrain_gpt.py {LAUNCH}\n"),
        (0, 1, 2),
    ),
    "blanks after a name of a secret": Sample(
        "check x.sh",
        text("x.sh", lambda: f"# key,{' ' * 400_000}\ntorchrun pretrain_gpt.py {LAUNCH}\n"),
        (0, 1, 2),
    ),
}
STAGEBRIDGE = [sys.executable, "-P", "-m", "stagebridge"]


def environment() -> dict[str, str]:
    """This one, with the checkout in front."""
    return {
        **os.environ,
        "PYTHONPATH": f"{HOME}{os.pathsep}{HOME / 'bridge/cli/front'}",
        "NO_COLOR": "1",
        "COLUMNS": "200",
    }


def measured(sample: Sample, folder: Path) -> Iterator[str]:
    """What is wrong with the answer, after a line that shows it."""
    sample.make(folder)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [*STAGEBRIDGE, *shlex.split(sample.command)]
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment(),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=ELAPSED,
            check=False,
        )
    except subprocess.TimeoutExpired:
        yield f"no answer within {ELAPSED:.0f} s"
        return
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    said = (done.stderr.strip() or done.stdout.strip()).splitlines()
    shown = next(
        (line for line in said if line.startswith(("error", "│ Invalid"))), said[0] if said else ""
    )
    print(f"  {spent:5.1f} s, code {done.returncode}: {shown[:150]}", flush=True)
    if spent > SECONDS:
        yield f"{spent:.1f} s of processor time"
    if done.returncode not in sample.codes:
        yield f"code {done.returncode}, expected one of {sample.codes}"
    if "Traceback" in done.stderr + done.stdout:
        yield "a traceback"
    if not said:
        yield "no answer"


def main(names: list[str]) -> int:
    """All samples, or those whose name holds one of the words."""
    failed = 0
    for name, sample in SAMPLES.items():
        if names and not any(word in name for word in names):
            continue
        print(name, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            for problem in measured(sample, Path(folder)):
                failed += 1
                print(f"  WRONG: {problem}", flush=True)
    memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    print(f"{failed} wrong; at most {memory / MIB:.0f} MiB of memory")
    return int(bool(failed or memory > MEMORY))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
