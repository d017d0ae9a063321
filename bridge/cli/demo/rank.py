"""One rank of the demo's training: `python -m bridge.cli.demo.rank PLAN FOLDER STEPS MORE LIMITS`.

The first rank prints one JSON object a step. Trains to STEPS and saves, or resumes if FOLDER holds a checkpoint; then trains
MORE steps. LIMITS is a JSON list of the two limits of `bridge.comm.patient`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path

from bridge import comm
from bridge.cli.train import end
from bridge.engine.checkpoint import LATEST
from bridge.engine.training import Report, Training
from bridge.plan import Plan


def main(plan: str, folder: Path, steps: int, more: int, limits: str) -> None:
    """Run one rank."""
    comm.patient(*json.loads(limits))
    training = Training.of(Plan.model_validate_json(plan))
    if (folder / LATEST).exists():
        training.engine.load_checkpoint(folder)
    else:
        _say(training, training.steps(steps))
        training.engine.save_checkpoint(folder)
    _say(training, training.steps(steps + more))
    world = training.engine.comm.world.size
    training.engine.close()
    end(world)


def _say(training: Training, reports: Iterable[Report]) -> None:
    for report in reports:
        if training.engine.comm.rank == 0:
            print(json.dumps({**report.fields(), "line": str(report)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
