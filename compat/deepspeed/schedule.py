"""Writes a learning-rate schedule as Python code for `torch.optim.lr_scheduler.LambdaLR`, so that
every step has the plan's learning rate. A script needs this code for a schedule from another stack,
because DeepSpeed's own schedulers start one step late and warm up over at least two steps
(runtime/lr_schedules.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from bridge.plan.section import below

PREFIX = "code.scheduler."
OTHER = "other"
"""The value of `code.scheduler.name` for a schedule that a Plan cannot express."""
DECAYS = {
    "constant": "peak",
    "linear": "minimum + (peak - minimum) * (1 - done)",
    "cosine": "minimum + (peak - minimum) * (1 + math.cos(math.pi * done)) / 2",
    "inverse_sqrt": "max(minimum, peak * math.sqrt(max(warmup, 1) / max(step, 1))) if step <= total else minimum",
}
"""Python expressions for the learning rate after warmup. `done` is the completed share of the
decay, from 0 to 1.
"""
SHARES = {
    "linear": "(1 - done)",
    "cosine": "(1 + math.cos(math.pi * done)) / 2",
    "exponential": "(2 * 0.5**done - 1)",
    "minus_sqrt": "(1 - math.sqrt(done))",
}
"""Python expressions for the decay of a wsd schedule: the share of the way from minimum to peak
that is left. `done` is the completed share of the decay, from 0 to 1.
"""


def settings_of_code(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the schedule in the code part, by name."""
    return below(PREFIX, values)


def steers(values: Mapping[str, Any]) -> bool:
    """Return whether the script has to build the schedule: the learning rate changes, and a plan
    can express the change.
    """
    settings = settings_of_code(values)
    # A constant rate without warmup is what the optimizer has anyway.
    still = settings.get("name") == "constant" and not settings.get("warmup_steps")
    return bool(settings) and not still and settings.get("name") != OTHER


def lines(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a Python function `lr_factor(step)`. It returns the learning rate at a
    step, counted from 0, divided by the optimizer's rate. LambdaLR multiplies the optimizer's rate
    by this factor.
    """
    settings = settings_of_code(values)
    name, warmup = settings.get("name") or "constant", settings.get("warmup_steps") or 0
    total = settings.get("total_steps")
    yield f"peak, minimum = {values.get('optimizer.params.lr', 'LR')}, {settings.get('minimum') or 0.0}"
    # A peak of 0 has no shares: the function would divide by it.
    if not values.get("optimizer.params.lr", 1.0):
        yield ""
        yield ""
        yield "def lr_factor(step):"
        yield "    return 1.0  # the rate is 0 in every step"
        return
    yield f"start, warmup, total = {settings.get('warmup_from') or 0.0}, {warmup}, {total or 'STEPS'}"
    if name == "wsd":
        yield f"decay = {settings.get('decay_steps', 'max(1, total // 10)')}"
    yield ""
    yield ""
    yield "def lr_factor(step):"
    if warmup:
        yield "    if step <= warmup:"
        yield "        return (start + (peak - start) * step / warmup) / peak"
    # wsd decays over the last `decay` steps, the other shapes over all steps after the warmup.
    if name == "wsd":
        yield "    done = min(1.0, max(0, step - (total - decay)) / max(1, decay))"
        rate = f"minimum + (peak - minimum) * {SHARES[settings.get('decay_shape') or 'linear']}"
    else:
        rate = DECAYS[name]
        if "done" in rate:
            yield "    done = min(1.0, (step - warmup) / max(1, total - warmup))"
    yield f"    return ({rate}) / peak"
