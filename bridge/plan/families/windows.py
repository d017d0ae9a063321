"""Reads and writes the lists of blocks with a sliding window and of blocks without rotary
positions. Each family has its own keys for these lists.
"""

from __future__ import annotations

from typing import Any

from bridge.errors import ConfigError
from bridge.plan.families.source import Group, Source, Target

WINDOW, SWITCH, LATE, KINDS, PERIOD = (
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
    "layer_types",
    "sliding_window_pattern",
)
STILL, EVERY = "no_rope_layers", "no_rope_layer_interval"
KEYS = (WINDOW, SWITCH, LATE, KINDS, PERIOD, STILL, EVERY)
PATHS = ("attention.window", "attention.windowed", "rotary.layers")
FULL, SLIDING = "full_attention", "sliding_attention"
LISTED = ("even", "late", "early", "period", "still")
"""Values of `rule` in rows of `families.json`. A family with one of these values also reads the key
`layer_types`, since transformers 4.53. If a config has this key, `rule` is not used.
"""

Pattern = tuple[bool, ...]


def read(source: Source, model: Group, options: Group) -> Group:
    """Read the size of the sliding window in tokens, the pattern of blocks with a sliding window,
    and the pattern of blocks with rotary positions.

    A pattern has one boolean for each block. A pattern is left unset if all blocks are alike.
    """
    rule, layers = options["rule"], model.get("layers")
    window = source.find(WINDOW) or None
    if options.get("switch") and not source.find(SWITCH):
        window = None
    still = _still(source, layers) if rule == "still" else None
    pattern = _pattern(source, rule, layers, options, still)
    if window is None or (pattern is not None and not any(pattern)):
        # No block has a window. Its pattern still tells which blocks rotate, in a family in which
        # the two go together.
        pattern = pattern if options.get("rotates") and window else None
        window = None
    rotates = still
    if options.get("rotates") and pattern is not None:
        rotates = pattern
    return {
        "attention.window": window,
        "attention.windowed": pattern
        if window and pattern is not None and not all(pattern)
        else None,
        "rotary.layers": rotates if rotates is not None and not all(rotates) else None,
    }


def _pattern(
    source: Source, rule: str, layers: int | None, options: Group, still: Pattern | None
) -> Pattern | None:
    if layers is None:
        return None
    kinds = source.find(KINDS) if rule in LISTED else None
    if kinds is not None:
        if unknown := sorted({str(kind) for kind in kinds} - {FULL, SLIDING}):
            raise ConfigError(f"{KINDS}: found {', '.join(unknown)}; expected {FULL} or {SLIDING}")
        return tuple(kind == SLIDING for kind in kinds[:layers])
    if rule == "even":
        return tuple((block + 1) % 2 == 1 for block in range(layers))
    if rule == "late":
        first = source.find(LATE)
        return tuple(block >= (first or 0) for block in range(layers))
    if rule == "early":
        last = source.find(LATE)
        return tuple(
            (block + 1) % 2 == 1 and (last is None or block < last) for block in range(layers)
        )
    if rule == "period":
        value = source.find(PERIOD)
        # EXAONE 4 also takes a text such as "LLLG", a letter for each block of the period
        # (models/exaone4/configuration_exaone4.py).
        period = len(value) if isinstance(value, str) else int(value or 0)
        period = period or int(options["period"])
        return tuple((block + 1) % period != 0 for block in range(layers))
    return None if rule == "all" or still is None else tuple(not rotates for rotates in still)


def _still(source: Source, layers: int | None) -> Pattern | None:
    """Return the pattern of SmolLM3's blocks with rotary positions. The key `no_rope_layers` has 1
    for a block that rotates (models/smollm3/configuration_smollm3.py).
    """
    if layers is None:
        return None
    flags = source.find(STILL)
    if flags is not None:
        return tuple(bool(rotates) for rotates in flags[:layers])
    every = source.find(EVERY) or 4
    return tuple((block + 1) % every != 0 for block in range(layers))


def write(model: Group, target: Target, options: Group) -> Group:
    """Return the keys for the sliding window, and for the pattern of blocks with a sliding window.
    The family's own keys hold the pattern if they can express it, else the key `layer_types`.
    """
    rule, window, layers = options["rule"], model.get("attention.window"), model.get("layers")
    pattern: Pattern | None = model.get("attention.windowed")
    keys: dict[str, Any] = {WINDOW: window if window else target.open(WINDOW)}
    if options.get("switch"):
        keys = {SWITCH: bool(window), **({WINDOW: window} if window else {})}
    if (
        options.get("rotates")
        and layers
        and window is None
        and not any(model.get("rotary.layers") or (True,))
    ):
        return {KINDS: [FULL] * layers}
    if rule == "still" and layers:
        rotates = model.get("rotary.layers") or (True,) * layers
        keys[STILL] = [int(turns) for turns in rotates]
    if (
        not layers
        or rule == "all"
        or (window is None and rule != "period" and options.get("switch"))
    ):
        return keys
    if window is None and not options.get("rotates"):
        # These families make the mask of a window also for blocks without one, and stop without a
        # size, so they keep their default and the blocks are listed.
        return {KINDS: [FULL] * layers} if rule in ("even", "period") else keys
    return {**keys, **_blocks(pattern or (True,) * layers, rule, layers, options)}


def _blocks(pattern: Pattern, rule: str, layers: int, options: Group) -> Group:
    if (
        rule == "late"
        and False in pattern
        and pattern == tuple(block >= _first(pattern) for block in range(layers))
    ):
        return {LATE: _first(pattern)}
    if rule == "late" and all(pattern):
        return {LATE: 0}
    if rule == "even" and pattern == tuple((block + 1) % 2 == 1 for block in range(layers)):
        return {}
    if rule == "period" and pattern == tuple(
        (block + 1) % options["period"] != 0 for block in range(layers)
    ):
        return {}
    if rule == "period":
        periods = (
            size
            for size in range(1, layers + 2)
            if pattern == tuple((block + 1) % size != 0 for block in range(layers))
        )
        if (period := next(periods, None)) is not None:
            return {PERIOD: period}
    return {KINDS: [SLIDING if slides else FULL for slides in pattern]}


def _first(pattern: Pattern) -> int:
    return pattern.index(True) if True in pattern else len(pattern)
