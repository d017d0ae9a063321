"""Reads and writes the list of blocks that have experts. Each family has its own keys for this
list.
"""

from __future__ import annotations

from itertools import product

from bridge.plan.families.source import Group, Source, Target

STEP, ALONE, FIRST, EVERY, KINDS, LISTED = (
    "decoder_sparse_step",
    "mlp_only_layers",
    "first_k_dense_replace",
    "moe_layer_freq",
    "mlp_layer_types",
    "is_moe_layer",
)
START, END, INTERVAL = "moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval"
KEYS = (STEP, ALONE, FIRST, EVERY, KINDS, LISTED, START, END, INTERVAL)
COUNTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
DENSE, SPARSE = "dense", "sparse"

Pattern = tuple[bool, ...]


def read(source: Source, model: Group, options: Group) -> Group:
    """Read the pattern of blocks with experts: one boolean for each block. The field stays open if
    all blocks have experts.
    """
    layers = model.get("layers")
    if not layers or not model.get("experts"):
        return {}
    pattern = _pattern(source, options, layers)
    return {"moe.layers": None if all(pattern) else pattern}


def _pattern(source: Source, options: Group, layers: int) -> Pattern:
    rule, blocks = options["rule"], range(layers)
    if rule == "step":
        step, alone = source.find(STEP) or 1, set(source.find(ALONE) or ())
        # The last block of each group of `step` blocks (models/qwen2_moe/modeling_qwen2_moe.py:
        # Qwen2MoeDecoderLayer).
        return tuple(block not in alone and (block + 1) % step == 0 for block in blocks)
    if rule == "range":
        start, step = source.find(START) or 0, source.find(INTERVAL) or 1
        end = source.find(END)
        last = layers - 1 if end is None or end == -1 else end
        # Ernie counts blocks from 1 for the interval, but from 0 for start and end.
        return tuple((block + 1) % step == 0 and start <= block <= last for block in blocks)
    kinds = source.find(KINDS) if rule == "types" else None
    if kinds:
        return tuple(kind == SPARSE for kind in kinds[:layers])
    if rule == "types" and source.find(LISTED):
        return tuple(bool(sparse) for sparse in source.find(LISTED)[:layers])
    first = source.find(FIRST)
    dense = options.get("usual", 0) if first is None else first
    step = source.find(EVERY) or 1 if rule == "first" else 1
    return tuple(block >= dense and block % step == 0 for block in blocks)


def write(model: Group, target: Target, options: Group) -> Group:
    """Return the family's keys that tell which blocks have experts; empty if these keys cannot
    express the pattern of blocks.

    If the model has no experts but the family's default model does, the keys tell that no block has
    experts.
    """
    layers, experts = model.get("layers"), bool(model.get("experts"))
    if not layers or not (experts or any(key in target.defaults for key in COUNTS)):
        return {}
    pattern: Pattern = model.get("moe.layers") or (experts,) * layers
    rule = options["rule"]
    if rule == "step":
        return _step_pattern(pattern)
    if rule == "range":
        return _range_pattern(pattern)
    dense = pattern.index(True) if True in pattern else len(pattern)
    leading = pattern == tuple(block >= dense for block in range(layers))
    if rule == "types":
        return {KINDS: [SPARSE if sparse else DENSE for sparse in pattern]}
    return {FIRST: dense} if leading else _spread(pattern)


def _spread(pattern: Pattern) -> Group:
    blocks = range(len(pattern))
    # Up to 16: published models stay far below, and all pairs of a thousand blocks would take a
    # second.
    few = min(len(pattern), 16)
    for step, dense in product(range(2, few + 1), range(few)):
        if pattern == tuple(block >= dense and block % step == 0 for block in blocks):
            return {FIRST: dense, EVERY: step}
    return {}


def _step_pattern(pattern: Pattern) -> Group:
    blocks = range(len(pattern))
    for step in range(1, len(pattern) + 1):
        if pattern == tuple((block + 1) % step == 0 for block in blocks):
            return {STEP: step, ALONE: []}
    return {STEP: 1, ALONE: [block for block in blocks if not pattern[block]]}


def _range_pattern(pattern: Pattern) -> Group:
    if True not in pattern:
        return {START: len(pattern), INTERVAL: 1}
    blocks, start = range(len(pattern)), pattern.index(True)
    last = len(pattern) - 1 - pattern[::-1].index(True)
    for step in range(1, len(pattern) + 1):
        if pattern == tuple((block + 1) % step == 0 and start <= block <= last for block in blocks):
            return {START: start, END: last, INTERVAL: step}
    return {}
