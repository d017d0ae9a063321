"""The commands `trace watch` and `trace export`: follow a run while it trains, and write its
figures for other tools.
"""

from __future__ import annotations

import time
from pathlib import Path

from bridge.cli.terminal import say
from bridge.errors import BridgeError, nearest
from bridge.report.exit_codes import Exit
from bridge.stack.extras import need_engine
from bridge.trace.findings import FILE


def watch(folder: Path, interval: float) -> int:
    """Print steps and findings as they are logged, until the run ends or somebody presses Ctrl-C.
    Returns the exit code.
    """
    need_engine("trace")
    from bridge.trace.follow import Follower, step_text
    from bridge.trace.pages.series import FindingOfFile
    from bridge.trace.run_liveness import is_alive
    from bridge.trace.schema import RUN

    if not is_alive(folder) and not any((folder / name).exists() for name in (RUN, FILE)):
        raise BridgeError(
            f"{folder}: found neither a running training nor an ended one; name the folder of a "
            "trace"
        )
    follower, faults, steps = Follower(folder), 0, 0
    try:
        while True:
            # Asked before reading: what is written between the two is still printed in a last round.
            going = is_alive(folder)
            for event in follower.new():
                if isinstance(event, FindingOfFile):
                    faults += event.severity == "fault"
                    ranks = f" on rank {', '.join(map(str, event.ranks))}" if event.ranks else ""
                    say(
                        f"{event.severity}: {event.id}: step {event.step}: {event.where or 'the run'}{ranks}: {event.evidence};"
                        f" {event.meaning}"
                    )
                else:
                    steps += 1
                    say(step_text(event))
            if not going:
                break
            time.sleep(interval)
    except KeyboardInterrupt:
        say(
            f"{folder}: stopped following, the run may continue; {steps} steps, {faults} faults so "
            "far"
        )
        return Exit.FINDINGS if faults else Exit.CLEAN
    say(f"{folder}: the run has ended; {steps} steps, {faults} faults")
    return Exit.FINDINGS if faults else Exit.CLEAN


def export(folder: Path, target: str, out: Path) -> int:
    """Write what a run logged for another tool."""
    need_engine("trace")
    from bridge.trace.export import TARGETS, export_run as written
    from bridge.trace.pages.series import read_series

    if target not in TARGETS:
        raise BridgeError(
            f"--to: found {target}, expected {' or '.join(TARGETS)}{nearest(target, TARGETS)}"
        )
    count = written(read_series(folder), target, out)
    say(f"wrote {out}: {count} scalars")
    return Exit.CLEAN
