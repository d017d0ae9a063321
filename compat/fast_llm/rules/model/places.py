"""Paths of the model's settings in each layout of the model section, and their conversion to the
newest layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any, Literal

from bridge.stack.rules import Context

BASE = "model.base_model"
BLOCK = "decoder.block."
BLOCKS = "decoder.blocks."
Leaf = Mapping[str, Any]
Layout = Literal["newest", "middle", "oldest"]

MIDDLE = {
    "hidden_size": "embeddings_layer.hidden_size",
    "tied_embedding_weight": "output_layer.tied_weight",
    "embeddings.": "embeddings_layer.",
    "head.": "output_layer.",
}
"""For each path (or prefix) of the newest layout, the path in 0.3.0 (models/gpt/config.py,
layers/language_model/config.py).
"""
NEWEST = {middle: newest for newest, middle in MIDDLE.items()}

OLDEST: Mapping[str, tuple[str, ...]] = {
    "transformer.num_layers": ("decoder.num_blocks",),
    "transformer.hidden_size": ("hidden_size",),
    "vocab_size": ("embeddings.vocab_size",),
    "max_position_embeddings": ("embeddings.num_position_embeddings",),
    "use_position_embeddings": ("embeddings.position_embeddings.enabled",),
    "tie_word_embeddings": ("tied_embedding_weight",),
    "parallel_embeddings": ("embeddings.vocab_parallel",),
    "logits_scale_factor": ("head.logits_scale_factor",),
    "transformer.full_precision_residual": ("embeddings.full_precision_residual",),
    "transformer.num_attention_heads": ("mixer.heads",),
    "transformer.head_groups": ("mixer.head_groups",),
    "transformer.kv_channels": ("mixer.head_size",),
    "transformer.add_linear_biases": ("mixer.add_linear_biases", "mlp.add_linear_biases"),
    "transformer.attention_dropout": ("mixer.dropout",),
    "transformer.hidden_dropout": ("dropout", "embeddings.dropout"),
    "transformer.window_size": ("mixer.window_size",),
    "transformer.attention_softmax_scale_power": ("mixer.softmax_scale_power",),
    "transformer.rotary.": ("mixer.rotary.",),
    "transformer.use_rotary_embeddings": ("mixer.rotary.enabled",),
    "transformer.rotary_embedding_scale": ("mixer.rotary.scale",),
    "transformer.triton_rotary": ("mixer.rotary.triton",),
    "transformer.ffn_hidden_size": ("mlp.intermediate_size",),
    "transformer.gated": ("mlp.gated",),
    "transformer.activation_type": ("mlp.activation",),
    "transformer.mlp_recompute_level": ("mlp.recompute_level",),
    "transformer.num_experts": ("mlp.experts",),
    "transformer.num_shared_experts": ("mlp.shared_experts",),
    "transformer.num_experts_per_token": ("mlp.experts_per_token",),
    "transformer.expert_routing_type": ("mlp.routing",),
    "transformer.expert_auxiliary_loss_coefficient": ("mlp.auxiliary_loss_coefficient",),
    "transformer.expert_z_loss_coefficient": ("mlp.z_loss_coefficient",),
    "transformer.normalization.": ("normalization.",),
    "transformer.init_method_std": ("init.std",),
    "transformer.init_method_std_qkv": ("init.qkv",),
    "transformer.init_method_std_attn_proj": ("init.dense",),
    "transformer.init_method_std_mlp_1": ("init.layer_1",),
    "transformer.init_method_std_mlp_2": ("init.layer_2",),
    "init_method_std_embed": ("init.embed",),
}
"""For each path (or prefix) before 0.3.0, the paths of the newest layout
(layers/transformer/config.py). Paths of a block's settings are relative to the block.
"""

INSIDE = ("mixer.", "mlp.", "normalization.", "dropout", "pre_m", "post_m")
"""Prefixes of paths that are relative to a block."""


def layout_of(context: Context) -> Layout:
    """Return the layout of the model section in the release of `context`."""
    if context.since("0.4.0"):
        return "newest"
    return "middle" if context.since("0.3.0") else "oldest"


def found_layout(model: Leaf, context: Context | None) -> Layout:
    """Return the layout of the section `model`. A key that only one layout has determines the
    layout; without such a key, the release does.
    """
    if "transformer" in model:
        return "oldest"
    if "embeddings_layer" in model or "output_layer" in model:
        return "middle"
    if {"embeddings", "head", "hidden_size", "tied_embedding_weight"} & model.keys():
        return "newest"
    layout = layout_of(context) if context else "newest"
    # The oldest layout has no `decoder`, whatever release was named.
    return "newest" if layout == "oldest" and "decoder" in model else layout


def flat(data: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each leaf below `data` with its dotted path. An empty mapping is a leaf, and null is
    skipped.
    """
    if isinstance(data, Mapping) and (data or not path):
        for name, inner in data.items():
            yield from flat(inner, f"{path}.{name}" if path else str(name))
    elif data is not None:
        yield path, data


@dataclass
class Leaves:
    """The leaves of a section. The paths that were read are recorded in `known`."""

    values: Leaf
    known: set[str] = field(default_factory=set)

    def take(self, path: str, default: Any, fits: Callable[[Any], bool]) -> Any:
        """Return the value at `path`, or the default if the value is missing or not valid. Only a
        valid value is marked as read.
        """
        value = self.values.get(path)
        if value is None or not fits(value):
            return default
        self.known.add(path)
        return value

    def count(self, path: str, default: int | None = None) -> Any:
        """Return the value at `path` if it is a whole number of at least 1, else the default."""
        return self.take(path, default, lambda value: type(value) is int and value > 0)

    def real(
        self, path: str, default: float | None = None, least: float = 0.0, most: float = inf
    ) -> Any:
        """Return the value at `path` if it is a number from `least` to `most`, else the default."""
        return self.take(
            path,
            default,
            lambda value: (
                isinstance(value, int | float) and value is not True and least <= value <= most
            ),
        )

    def share(self, path: str) -> Any:
        """Return the value at `path` if it is a number from 0 to 1, else 0."""
        return self.real(path, 0.0, most=1.0)

    def flag(self, path: str, default: bool | None) -> Any:
        """Return the value at `path` if it is a boolean, else the default."""
        return self.take(path, default, lambda value: isinstance(value, bool))

    def name(self, path: str, default: str, names: tuple[str, ...]) -> Any:
        """Return the value at `path` if it is one of `names`, else the default."""
        return self.take(
            path, default, lambda value: value in names if isinstance(value, str) else False
        )

    def unread_paths(self, neutral: Leaf) -> Iterator[str]:
        """Yield the paths of leaves that were not read and differ from their `neutral` value."""
        odd = (path for path in self.values if path not in self.known)
        return (path for path in odd if path not in neutral or self.values[path] != neutral[path])

    def within(self, start: str) -> bool:
        """Return whether there is a leaf at `start` or below it."""
        return any(path == start or path.startswith(start + ".") for path in self.values)


@dataclass
class Sections:
    """A model section with the paths of the newest layout: leaves outside of blocks, the leaves of
    each block by name, and the order of the blocks.
    """

    layout: Layout
    common: Leaves
    blocks: Mapping[str, Leaves]
    order: tuple[str, ...]

    def unsaid(self, neutral: Leaf) -> list[str]:
        """Return the paths of all leaves that were not read and differ from their `neutral` value."""
        paths = list(self.common.unread_paths(neutral))
        for name, block in self.blocks.items():
            start = f"{BLOCKS}{name}." if name else BLOCK
            paths += [start + path for path in block.unread_paths(neutral)]
        return paths


def sections(model: Leaf, context: Context | None) -> Sections:
    """Split the section `model` into leaves outside of blocks and leaves of blocks."""
    layout = found_layout(model, context)
    leaves = dict(_newest(model, layout))
    pattern = leaves.get("decoder.type") == "pattern"
    blocks: dict[str, dict[str, Any]] = {} if pattern else {"": {}}
    common: dict[str, Any] = {}
    for path, value in leaves.items():
        name, place = _find_block(path, layout, pattern)
        if place is None:
            common[path] = value
        else:
            blocks.setdefault(name, {})[place or path] = value
    common_leaves = Leaves(common)
    order = _order(common_leaves, tuple(blocks)) if pattern else ("",)
    return Sections(
        layout, common_leaves, {name: Leaves(values) for name, values in blocks.items()}, order
    )


def _find_block(path: str, layout: Layout, pattern: bool) -> tuple[str, str | None]:
    """Return the name of the block that a leaf belongs to, and the path inside the block. The path
    is None for a leaf outside of all blocks.
    """
    if layout == "oldest":
        return "", path if path.startswith(INSIDE) else None
    if pattern and path.startswith(BLOCKS) and path.count(".") > 2:
        name, _, place = path.removeprefix(BLOCKS).partition(".")
        return name, place
    return "", path.removeprefix(BLOCK) if not pattern and path.startswith(BLOCK) else None


def _order(common: Leaves, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of the blocks in one period of the pattern; empty if the pattern is not
    valid.
    """
    common.name("decoder.type", "fixed", ("pattern",))
    pattern = common.take(
        "decoder.pattern", (), lambda value: isinstance(value, list | tuple) and bool(value)
    )
    is_valid = pattern and all(isinstance(name, str) and name in names for name in pattern)
    return tuple(pattern) if is_valid else ()


def _newest(model: Leaf, layout: Layout) -> Iterator[tuple[str, Any]]:
    for path, value in flat(model):
        if layout == "oldest":
            yield from ((place, value) for place in _from_oldest(path))
        else:
            yield (_move_path(path, NEWEST) if layout == "middle" else path), value


def _from_oldest(path: str) -> tuple[str, ...]:
    if path in OLDEST:
        return OLDEST[path]
    starts = [start for start in OLDEST if start.endswith(".") and path.startswith(start)]
    return (
        tuple(place + path.removeprefix(starts[0]) for place in OLDEST[starts[0]])
        if starts
        else (path,)
    )


def _move_path(path: str, places: Mapping[str, str]) -> str:
    """Return the path in another layout. `places` maps paths, or prefixes that end with a dot, to
    this layout.
    """
    for before, after in places.items():
        if path == before or (before.endswith(".") and path.startswith(before)):
            return after + path.removeprefix(before)
    return path


def place_leaves(leaves: Leaf, layout: Layout) -> dict[str, Any]:
    """Convert paths of the newest layout to `layout`. Leaves that do not exist in `layout` are
    dropped.
    """
    if layout == "newest":
        return dict(leaves)
    if layout == "middle":
        return {_move_path(path, MIDDLE): value for path, value in leaves.items()}
    pairs = ((_to_oldest(path.removeprefix(BLOCK)), value) for path, value in leaves.items())
    return {place: value for place, value in pairs if place}


BEFORE = {place: oldest for oldest, places in OLDEST.items() for place in places}


def _to_oldest(path: str) -> str:
    """Return the path before 0.3.0 of a path in the newest layout; empty if there was none."""
    if path in BEFORE:
        return BEFORE[path]
    start = next((place for place in BEFORE if place.endswith(".") and path.startswith(place)), "")
    return BEFORE[start] + path.removeprefix(start) if start else ""
