"""A learning-rate schedule as Python text for `torch.optim.lr_scheduler.LambdaLR`, step by step as a Plan means it.

DeepSpeed's own schedulers start one step late and warm up over two steps at least (runtime/lr_schedules.py), so a schedule
that came from elsewhere is made by the script.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

PREFIX = "code.scheduler."
OTHER = "other"
"""The name of a schedule that a Plan cannot express."""
DECAYS = {
    "constant": "peak",
    "linear": "minimum + (peak - minimum) * (1 - done)",
    "cosine": "minimum + (peak - minimum) * (1 + math.cos(math.pi * done)) / 2",
    "inverse_sqrt": "max(minimum, peak * math.sqrt(max(warmup, 1) / max(step, 1))) if step <= total else minimum",
}
"""Learning rate after warmup, where `done` runs from 0 to 1."""
SHARES = {
    "linear": "(1 - done)",
    "cosine": "(1 + math.cos(math.pi * done)) / 2",
    "exponential": "(2 * 0.5**done - 1)",
    "minus_sqrt": "(1 - math.sqrt(done))",
}
"""Share of the range from minimum to peak that is left in the decay of wsd, where `done` runs from 0 to 1."""


def said(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of the schedule in the code part, by name."""
    return {path.removeprefix(PREFIX): value for path, value in values.items() if path.startswith(PREFIX)}


def steers(values: Mapping[str, Any]) -> bool:
    """Whether the schedule changes the learning rate and a Plan can express it."""
    found = said(values)
    still = found.get("name") == "constant" and not found.get("warmup_steps")
    return bool(found) and not still and found.get("name") != OTHER


def lines(values: Mapping[str, Any]) -> Iterator[str]:
    """The definition of `lr_factor(step)`: learning rate over the optimizer's, for optimizer steps counted from 0."""
    found = said(values)
    name, warmup, total = found.get("name") or "constant", found.get("warmup_steps") or 0, found.get("total_steps")
    yield f"peak, minimum = {values.get('optimizer.params.lr', 'LR')}, {found.get('minimum') or 0.0}"
    if not values.get("optimizer.params.lr", 1.0):
        yield ""
        yield ""
        yield "def lr_factor(step):"
        yield "    return 1.0  # of a rate that is 0"
        return
    yield f"start, warmup, total = {found.get('warmup_from') or 0.0}, {warmup}, {total or 'STEPS'}"
    if name == "wsd":
        yield f"decay = {found.get('decay_steps', 'max(1, total // 10)')}"
    yield ""
    yield ""
    yield "def lr_factor(step):"
    if warmup:
        yield "    if step <= warmup:"
        yield "        return (start + (peak - start) * step / warmup) / peak"
    if name == "wsd":
        yield "    done = min(1.0, max(0, step - (total - decay)) / max(1, decay))"
    elif "done" in DECAYS[name]:
        yield "    done = min(1.0, (step - warmup) / max(1, total - warmup))"
    yield f"    return ({_rate(name, found)}) / peak"


def _rate(name: str, found: Mapping[str, Any]) -> str:
    if name == "wsd":
        return f"minimum + (peak - minimum) * {SHARES[found.get('decay_shape') or 'linear']}"
    return DECAYS[name]
