"""Five steps on two ranks: ZeRO 3 on DeepSpeed itself, and its translation to FSDP 2 under accelerate, have the same losses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import compat
from bridge.translation.translate import translate

PROGRAM = Path(__file__).with_name("fsdp2_steps.py")
ZERO3 = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.1,
    "zero_optimization": {"stage": 3},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 0.01, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.0, "torch_adam": True},
    },
}  # fmt: skip
PLAIN = [
    0.9004188776016235,
    0.7401307821273804,
    0.7618916034698486,
    0.2290375679731369,
    0.6544308066368103,
]
"""What DeepSpeed 0.19.8 gives on two ranks of a CPU, within rounding."""


def train(folder: Path, *words: str) -> list[float]:
    """Return the losses that the program prints on two ranks."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(PROGRAM),
    ]
    done = subprocess.run(
        [*command, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-3000:]
    losses: list[float] = json.loads(done.stdout.splitlines()[-1])
    return losses


@pytest.fixture
def translated(tmp_path: Path) -> Path:
    source, target = compat.load("deepspeed"), compat.load("accelerate")
    result = translate(source.read(ZERO3, world_size=2), target, world_size=2)
    assert not [one for one in result.findings if one.matters]
    target.write(result.config, tmp_path / "out.yaml")
    (tmp_path / "zero3.json").write_text(json.dumps(ZERO3))
    return tmp_path


def test_five_steps_of_fsdp_2_are_those_of_zero_3(translated: Path) -> None:
    pytest.importorskip("accelerate")
    assert train(translated, "accelerate", "out.yaml", "out.arguments.json") == pytest.approx(
        PLAIN, rel=1e-6
    )


@pytest.mark.outside
def test_five_steps_of_zero_3_on_deepspeed_itself(translated: Path) -> None:
    pytest.importorskip("deepspeed")
    assert train(translated, "deepspeed", "zero3.json") == pytest.approx(PLAIN, rel=1e-6)
