"""`examples/`: real training scripts under the launchers that people use, with the files that convert makes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from bridge.cli import run as stagebridge
from tests.engine.pool import free_port

EXAMPLE = Path(__file__).parents[2] / "examples" / "deepspeed"
FSDP = "--use-megatron-fsdp --use-distributed-optimizer --ckpt-format fsdp_dtensor --no-gradient-accumulation-fusion"
SHARDING = (
    "",
    "--use-distributed-optimizer",
    f"{FSDP} --data-parallel-sharding-strategy optim_grads",
    f"{FSDP} --data-parallel-sharding-strategy optim_grads_params",
)
"""What a Megatron launch says for each level."""
STEPS = 20


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """What convert makes of the launch, sharded in four ways."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    found = []
    for level, sharding in enumerate(SHARDING):
        launch, file = tmp_path / f"launch{level}.args", tmp_path / f"zero{level}.json"
        launch.write_text(f"{(EXAMPLE / 'launch.args').read_text()}\n{sharding}\n")
        releases = ("--from-version", "0.16.1", "--to-version", "0.19.8")
        words = [
            "convert",
            str(launch),
            "--to",
            "deepspeed",
            "--world-size",
            "2",
            *releases,
            "-o",
            str(file),
        ]
        assert stagebridge(words) in (0, 2)
        found.append(file)
    return found


def test_the_files_have_the_level_that_the_launch_asked_for_and_its_clipping(
    files: list[Path],
) -> None:
    contents = [json.loads(path.read_text()) for path in files]
    assert [content["zero_optimization"]["stage"] for content in contents] == [0, 1, 2, 3]
    assert [content["gradient_clipping"] for content in contents] == [0.5] * 4


def test_the_script_holds_what_convert_wrote_for_it(files: list[Path]) -> None:
    written = files[0].with_suffix(".code.py").read_text()
    pasted = written[written.index("peak, minimum") : written.index("model =")].strip()
    assert pasted in (EXAMPLE / "train.py").read_text()


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs the deepspeed launcher")
def test_under_the_deepspeed_launcher_every_level_gives_the_same_losses(files: list[Path]) -> None:
    losses: dict[int, list[float]] = {level: [] for level in range(4)}
    for line in lines(["--deepspeed_config", *map(str, files), "--steps", str(STEPS)]):
        assert line["clip"] == 0.5
        losses[line["zero"]].append(line["loss"])
    assert [len(found) for found in losses.values()] == [STEPS] * 4
    assert losses[0][-1] < 0.8 * losses[0][0]
    for found in losses.values():
        assert found == pytest.approx(losses[0], rel=1e-6, abs=0.0)


def lines(arguments: list[str]) -> Iterator[dict[str, Any]]:
    """What the first of two ranks prints."""
    launcher = [
        sys.executable,
        "-m",
        "deepspeed.launcher.runner",
        "--num_accelerators",
        "2",
        "--master_port",
        str(free_port()),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    command = [*launcher, str(EXAMPLE / "train.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    yield from (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
