"""How fast commands start, in processor time and as a ratio to importing pydantic, and what loading the dialects imports."""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

BASE = "import pydantic; from pydantic import BaseModel"
FOLDER = Path(tempfile.mkdtemp())
LAUNCH = Path(__file__).parents[1] / "examples" / "megatron" / "tiny.args"
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 2},
    "bf16": {"enabled": True},
}


def command(*words: object) -> str:
    """Code that runs `stagebridge` with these words."""
    arguments = list(map(str, words))
    return f"import sys; sys.argv[1:] = {arguments!r}; from bridge.cli import main; main()"


def configs(name: str, count: int) -> Path:
    """A new folder with `count` DeepSpeed files."""
    folder = FOLDER / name
    folder.mkdir()
    for number in range(count):
        (folder / f"{number}.json").write_text(json.dumps(CONFIG))
    return folder


STARTS = {
    "python": "pass",
    "pydantic": BASE,
    "stagebridge --help": command("--help"),
    "stagebridge convert --help": command("convert", "--help"),
    "stagebridge check, DeepSpeed": command("check", configs("one", 1) / "0.json"),
    "stagebridge check, 30 files": command("check", configs("thirty", 30)),
    "stagebridge convert": command("convert", LAUNCH, "--to", "deepspeed", "--world-size", 8),
    "load both dialects": "import bridge, compat; compat.load('megatron'); compat.load('deepspeed')",
    "their schemas and tables": "import compat; [(d.schema, d.rules) for d in map(compat.load, compat.names())]",
}
HEAVY = ("torch", "numpy", "deepspeed", "megatron", "rich", "typer", "ruamel", "yaml", "hjson")


def seconds(code: str) -> float:
    """Processor time of a fresh interpreter that runs `code`, which ends with 0 or 2."""
    begin = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    end = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode not in (0, 2):
        sys.exit(f"{code}: {done.stderr.decode()}")
    return end.ru_utime + end.ru_stime - begin.ru_utime - begin.ru_stime


def measure(rounds: int) -> dict[str, float]:
    """Median seconds by name; the candidates take turns, so that a busy machine slows all of them."""
    times: dict[str, list[float]] = {name: [] for name in STARTS}
    for _ in range(rounds):
        for name, code in STARTS.items():
            times[name].append(seconds(code))
    return {name: statistics.median(values) for name, values in times.items()}


def loaded(code: str) -> list[str]:
    """Heavy packages that `code` loads."""
    script = f"{code}\nimport sys, json\nprint(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))"
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    )
    return list(json.loads(done.stdout))


def main() -> None:
    """Print one line for each start, and what loading the dialects imports."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    medians = measure(parser.parse_args().rounds)
    for name, value in medians.items():
        print(f"{name:28} {value * 1000:6.0f} ms  {value / medians['pydantic']:5.2f} x pydantic")
    print(
        f"heavy packages with both dialects loaded: {', '.join(loaded(STARTS['load both dialects'])) or 'none'}"
    )


if __name__ == "__main__":
    main()
