"""Ten launches, converted with --script and started as they were written: five steps on DeepSpeed, and five on Megatron-Core.

    python -m tests.engine.started [NAME ...] [--stack deepspeed|megatron] [--folder FOLDER] [--resumed]

Prints a row for every launch and stack; with --resumed also how far the last losses of DeepSpeed's script are from those of one
that was ended after three steps and started again. Megatron-LM's pretrain_gpt.py is not among Python's packages: in its place
stands `examples/megatron/train.py`, which reads its flags as our tables have its parser, and trains on Megatron-Core. On CPU
DeepSpeed compiles its kernels first, into the folder that TORCH_EXTENSIONS_DIR names.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

from bridge.cli import run as stagebridge
from tests.engine.pool import free_port

ROOT = Path(__file__).parents[2]
STEPS, ENDED, RANKS, VOCABULARY, LIMIT = 5, 3, 2, 256, 400
SAME = 1e-5
"""How far losses behind a resume may be off: sums of a few numbers in another order."""
SIZES = (
    f"--num-layers 4 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --seq-length 32 --vocab-size {VOCABULARY} "
    "--max-position-embeddings 32 --make-vocab-size-divisible-by 1 --swiglu --normalization RMSNorm --position-embedding-type "
    "rope --disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0"
)
COURSE = (
    "--micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --train-iters 5 "
    "--lr-warmup-iters 2 --weight-decay 0.1 --clip-grad 1.0 --adam-beta2 0.95 --seed 42 --mock-data "
    "--tokenizer-type NullTokenizer"
)
GROUPED = "--group-query-attention --num-query-groups 2"
MODEL = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32,
}
"""The model of those configs of DeepSpeed that come without one."""
FILE: Mapping[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1},
    },
}
WARMUP = {
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_max_lr": 1e-3, "warmup_num_steps": 3, "warmup_type": "linear"},
    }
}
OFFLOAD = {
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "cpu"},
    }
}
HALF = """import os

if "RANK" in os.environ:
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    CPU_Accelerator.is_fp16_supported = lambda accelerator: True
"""
"""DeepSpeed takes fp16 on a CPU only where that multiplies it; torch multiplies it everywhere, slowly."""
PARTS = "--pipeline-model-parallel-size 2"

LAUNCHES: Mapping[str, str | Mapping[str, Any]] = {
    "pipeline, recomputed": f"{PARTS} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --bf16",
    "grouped queries": f"{GROUPED} --use-distributed-optimizer --bf16",
    "experts": f"{GROUPED} --num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01 --bf16",
    "dynamic scale": "--fp16 --initial-loss-scale 65536 --loss-scale-window 100 --hysteresis 2",
    "WarmupLR": {**FILE, **WARMUP},
    "ZeRO 3, offloaded": {**FILE, **OFFLOAD},
    "interleaved": f"{PARTS} --num-layers-per-virtual-pipeline-stage 1 --bf16",
    "sequence parallel": "--tensor-model-parallel-size 2 --sequence-parallel --bf16",
    "Lion": "--optimizer lion --bf16",
    "SGD": "--optimizer sgd --sgd-momentum 0.9 --bf16",
}
"""Flags beside `SIZES` and `COURSE`, or a file of DeepSpeed's."""


@dataclass(frozen=True)
class Seen:
    """What was seen of a launch on a stack: losses by step, else why there are none; the report; seconds."""

    losses: list[float] = field(default_factory=list)
    failure: str = ""
    report: str = ""
    seconds: float = 0.0
    again: list[float] = field(default_factory=list)

    @property
    def trained(self) -> bool:
        """Whether it made all steps with losses that are numbers."""
        return len(self.losses) == STEPS and all(map(math.isfinite, self.losses))

    @property
    def off(self) -> float:
        """How far the losses behind a resume are from those of the run that went through, relative; infinite where some lack."""
        if len(self.again) != STEPS - ENDED:
            return math.inf
        through = self.losses[ENDED:]
        return max(
            abs(one - other) / abs(other) for one, other in zip(self.again, through, strict=True)
        )

    @property
    def announced(self) -> str:
        """Settings that the report says come to other numbers, or to no run, here or on some machines."""
        blocks = re.findall(
            r"^(?:The run stops|Different numbers)\n((?: .*\n)+)", self.report, re.MULTILINE
        )
        return ", ".join(
            re.findall(r"^ {2}(?:\d+ | {2,3})(?! )([^\s:]+)", "".join(blocks), re.MULTILINE)
        )

    def __str__(self) -> str:
        seen = (
            f"{self.losses[0]:.4f} -> {self.losses[-1]:.4f}"
            if self.trained
            else f"failed: {self.failure}"
        )
        if self.trained and self.again:
            seen += f"; resumed, off by {self.off:.1e}"
        return f"{seen}; announced: {self.announced}" if self.announced else seen


def started(name: str, stack: str, folder: Path, resumed: bool = False) -> Seen:
    """Convert one launch, and start what was written; `resumed`: a second time too, ended and started again."""
    began, place = time.monotonic(), folder / f"{name.replace(', ', '_').replace(' ', '_')}_{stack}"
    place.mkdir(parents=True)
    report = converted(name, stack, place)
    if not any(place.glob("run.*")):
        return Seen(
            failure=f"refused: {_reason(report)}", report=report, seconds=time.monotonic() - began
        )
    (prepared_for_deepspeed if stack == "deepspeed" else prepared_for_megatron)(place)
    command = _line(report) + _added(name, stack)
    done = _ran(command, place)
    failure = "" if done.returncode == 0 else _reason(done.stderr + done.stdout)
    again = _again(command, place) if resumed and stack == "deepspeed" and not failure else []
    return Seen(_losses(done), failure, report, time.monotonic() - began, again)


def _again(command: str, place: Path) -> list[float]:
    """Losses of a run that goes on from the checkpoint of one that was ended early."""
    for steps in (ENDED, STEPS):
        done = _ran(f"{command} --save checkpoints --steps {steps}", place)
    return _losses(done)


def _losses(done: subprocess.CompletedProcess[str]) -> list[float]:
    return [
        json.loads(line)["loss"] for line in done.stdout.splitlines() if line.startswith('{"step"')
    ]


def converted(name: str, stack: str, place: Path) -> str:
    """The report of `convert --script`, which writes into `place`."""
    launch = LAUNCHES[name]
    words = isinstance(launch, str)
    source = place / ("source.args" if words else "source.json")
    source.write_text(f"{SIZES} {COURSE} {launch}\n" if words else json.dumps(launch))
    target = place / ("run.json" if stack == "deepspeed" else "run.args")
    release = ["--to-version", "0.16.1"] if stack == "megatron" else []
    with redirect_stdout(StringIO()) as out:
        try:
            stagebridge(
                [
                    "convert",
                    str(source),
                    "--to",
                    stack,
                    "--world-size",
                    str(RANKS),
                    "--script",
                    *release,
                    "-o",
                    str(target),
                ]
            )
        except Exception as error:
            return str(error)
    return out.getvalue()


def prepared_for_deepspeed(place: Path) -> None:
    """What the report says that the user adds: tokens, and the model where nothing told it."""
    import numpy

    numpy.save(
        place / "tokens.npy",
        (numpy.random.default_rng(0).zipf(1.3, 20000) % VOCABULARY).astype("uint16"),
    )
    (place / "sitecustomize.py").write_text(HALF)
    if not (place / "run.model.json").exists():
        (place / "run.model.json").write_text(json.dumps(MODEL))


def prepared_for_megatron(place: Path) -> None:
    """Its program, which reads flags alone."""
    example = ROOT / "examples" / "megatron" / "train.py"
    text = f"import runpy, sys\n\nsys.argv[1:1] = ['/dev/null']\nrunpy.run_path({str(example)!r}, run_name='__main__')\n"
    (place / "pretrain_gpt.py").write_text(text)


def _added(name: str, stack: str) -> str:
    """What a file of DeepSpeed's does not say, behind the command."""
    if isinstance(LAUNCHES[name], str):
        return ""
    return (
        f" --steps {STEPS} --sequence 32"
        if stack == "deepspeed"
        else f" {SIZES} --train-iters {STEPS} --lr-decay-iters 5"
    )


def _line(report: str) -> str:
    return report.partition("Launch\n")[2].splitlines()[0]


def _ran(command: str, place: Path) -> subprocess.CompletedProcess[str]:
    """The command as a shell runs it, with a port of its own."""
    port = str(free_port())
    several = command.replace("deepspeed ", f"deepspeed --master_port {port} ", 1)
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(
            [str(place), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        ),
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "MASTER_PORT": port,
    }
    try:
        return subprocess.run(
            ["bash", "-c", several],
            cwd=place,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        return subprocess.CompletedProcess(
            error.cmd, 124, "", f"Error: longer than {LIMIT} seconds"
        )


def _reason(text: str) -> str:
    """The last line that names an error."""
    lines = [
        line.strip()
        for line in text.splitlines()
        if "Error" in line or "error" in line or "stops" in line
    ]
    named = [
        line
        for line in lines
        if re.match(r"(\[rank\d\]: )?[\w.]*(Error|Exception): |error: ", line)
        and "elastic" not in line
    ]
    return (named or lines or text.strip().splitlines() or [""])[-1][:200]


def main() -> int:
    """Start those that are named, or all; the exit code tells whether as many trained as are known to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(LAUNCHES))
    parser.add_argument("--stack", choices=("deepspeed", "megatron"))
    parser.add_argument("--folder", type=Path)
    parser.add_argument(
        "--resumed",
        action="store_true",
        help="end DeepSpeed's script after three steps too, and start it again",
    )
    options = parser.parse_args()
    stacks = [options.stack] if options.stack else ["deepspeed", "megatron"]
    trained = dict.fromkeys(stacks, 0)
    with tempfile.TemporaryDirectory() as scratch:
        for name in options.names or LAUNCHES:
            for stack in stacks:
                seen = started(name, stack, options.folder or Path(scratch), options.resumed)
                trained[stack] += seen.trained and (not seen.again or seen.off < SAME)
                print(f"{name:22} {stack:10} {seen.seconds:5.0f} s  {seen}", flush=True)
    print(", ".join(f"{count} trained on {stack}" for stack, count in trained.items()))
    wanted = {"deepspeed": 8, "megatron": 7}
    return int(not options.names and any(count < wanted[stack] for stack, count in trained.items()))


if __name__ == "__main__":
    sys.exit(main())
