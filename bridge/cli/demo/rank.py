"""One rank of the demo's training: `python -m bridge.cli.demo.rank PLAN FOLDER STEPS MORE LIMITS`.

It trains to STEPS and saves, or resumes if FOLDER holds a checkpoint; then it trains MORE steps.
The first rank prints one JSON object for each step. LIMITS is a JSON list of the two limits of
`bridge.engine.comm.patient`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path

from bridge.engine import comm
from bridge.engine.checkpoint import LATEST
from bridge.engine.environment import end_process
from bridge.engine.native import BACKEND as NATIVE
from bridge.engine.training import Report, Training
from bridge.plan.plan import Plan


def main(plan: str, path: str, steps: str, more: str, limits: str) -> None:
    """Run one rank."""
    folder, first, again = Path(path), int(steps), int(more)
    comm.patient(*json.loads(limits))
    training = Training.of(Plan.model_validate_json(plan))
    if (folder / LATEST).exists():
        training.engine.load_checkpoint(folder)
    else:
        _say(training, training.steps(first))
        training.engine.save_checkpoint(folder)
    _say(training, training.steps(first + again))
    world = training.engine.comm.world.size
    training.engine.close()
    end_process(world)


def warm(*arguments: str) -> None:
    """Load the modules that all ranks need, before the ranks are forked."""
    NATIVE.load()


def _say(training: Training, reports: Iterable[Report]) -> None:
    for report in reports:
        if training.engine.comm.rank == 0:
            print(json.dumps({**report.fields(), "line": str(report)}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
