"""The table of families: rows of `families.json`, with inheritance resolved, and the defaults of each family."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib.resources import files
from typing import Any

from bridge.plan.families.codecs import CODECS, Codec
from bridge.plan.families.parts import PARTS, SAYS, KeyGroup


def _data(name: str) -> Mapping[str, Any]:
    data: Mapping[str, Any] = json.loads(files(__package__).joinpath(name).read_text("utf-8"))
    return data


@dataclass(frozen=True)
class Key:
    """The keys of one field in a family, and the codec of their values. All keys are read, and the
    first one is written.
    """

    names: tuple[str, ...]
    codec: Codec


@dataclass(frozen=True, eq=False)
class Family:
    """The row of a model type in the table.

    `facts`: fields with a fixed value. `keys`: fields with a key of their own. `parts`: fields that
    several keys set together. `config`: the name of the family's config class in transformers
    (empty if the model brings its own code). `foreign`: layers of the model that a plan cannot
    describe. `order`: the family's position in `ORDERED`.
    """

    name: str
    config: str = ""
    order: int = 99
    foreign: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, Key] = field(default_factory=dict)
    parts: tuple[tuple[KeyGroup, Mapping[str, Any]], ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def paths(self) -> frozenset[str]:
        """Names of the model's fields that the family sets: by a fact, by a key or by a part."""
        inside = (path for part, options in self.parts for path in part.paths(options))
        return frozenset((*self.facts, *self.keys, *inside))

    @property
    def layer_keys(self) -> tuple[str, ...]:
        """Keys for the number of layers."""
        return self.keys["layers"].names if "layers" in self.keys else ()

    def leaves_open(self, *keys: str) -> bool:
        """Whether nobody knows what one of these keys does: the family is not known, or a plan
        describes only the fields that every model has, and the key is about another one.
        """
        known = self.name and not self.foreign
        return not known and not self.keys_it_reads.issuperset(keys)

    @cached_property
    def keys_it_reads(self) -> frozenset[str]:
        """Keys that it reads."""
        inside = (key for part, options in self.parts for key in part.keys(options))
        return frozenset((*(name for key in self.keys.values() for name in key.names), *inside))


@cache
def _row(name: str) -> Mapping[str, Any]:
    """Return the row of a model type, merged with the row that it inherits from.

    A key replaces an inherited fact about the same field, and a fact replaces an inherited key.
    """
    row = _ROWS[name]
    base = _row(row["like"]) if "like" in row else {"keys": {}, "facts": {}, "parts": {}}
    facts, keys = row.get("facts", {}), row.get("keys", {})
    drops = {*row.get("drop", ())}
    only = set(row["only"]) if "only" in row else None

    def stays(path: str) -> bool:
        return path not in drops and (only is None or path in only)

    # A row that keeps only some fields names no parts: a part stands for several fields together.
    parts = {**base["parts"], **row.get("parts", {})} if only is None else {}
    return {
        "keys": {
            **{
                path: key for path, key in base["keys"].items() if stays(path) and path not in facts
            },
            **keys,
        },
        "facts": {
            **{
                path: value
                for path, value in base["facts"].items()
                if stays(path) and path not in keys
            },
            **facts,
        },
        "parts": {part: options for part, options in parts.items() if options is not None},
    }


def _family(name: str, row: Mapping[str, Any]) -> Family:
    whole = _row(name)
    # In the order of `PARTS`, not of the row: some parts use fields that others have read.
    parts = tuple((PARTS[part], whole["parts"][part]) for part in PARTS if part in whole["parts"])
    keys = {}
    for path, spelling in whole["keys"].items():
        # `codec:name|name`, or without a codec `name|name`.
        codec, _, names = spelling.rpartition(":")
        keys[path] = Key(tuple(one for one in names.split("|") if one), CODECS[codec])
    part_paths = {path for part, options in parts for path in part.paths(options)}
    facts = {path: value for path, value in whole["facts"].items() if path not in part_paths}
    order, config = row.get("order", 99), row.get("config", "")
    own_keys = {path: key for path, key in keys.items() if path not in part_paths}
    return Family(
        name, config, order, row.get("foreign", ""), facts, own_keys, parts, _DEFAULTS.get(name, {})
    )


_ROWS = _data("families.json")
_DEFAULTS = _data("defaults.json")
FAMILIES: Mapping[str, Family] = {
    name: _family(name, row) for name, row in _ROWS.items() if name and not row.get("abstract")
}
"""Every family by its model type."""
GENERIC: Family = _family("", _ROWS[""])
"""The generic family, for configs without a model type. It has the keys that mean the same in every
family.
"""
ORDERED: tuple[Family, ...] = tuple(
    sorted((one for one in FAMILIES.values() if not one.foreign), key=lambda one: one.order)
)
"""Families in which a plan's model can be written, the most common family first."""


def family_of(model_type: str | None) -> Family | None:
    """Return the family of a model type. Return the generic family without a model type, and None
    for an unknown model type.
    """
    return GENERIC if not model_type else FAMILIES.get(model_type)


def of_class(name: str) -> str | None:
    """Return the model type of a config class of transformers, given the class name with or without
    its module. Return None if no family has this class.
    """
    last = name.rpartition(".")[2]
    return next((one.name for one in FAMILIES.values() if one.config and one.config == last), None)


@cache
def groups() -> tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]:
    """Return pairs of keys and fields, (keys, fields), that belong together.

    No family reads a field of one pair from a key of another pair.
    """
    group: dict[
        str, str
    ] = {}  # a union-find: each name points to another name of its group, the root to itself

    def root(name: str) -> str:
        while group.setdefault(name, name) != name:
            name = group[name]
        return name

    for keys, paths in _bundles():
        names = [*(f"k:{key}" for key in keys), *(f"p:{path}" for path in paths)]
        for name in names:
            group[root(name)] = root(names[0])
    together: dict[str, tuple[list[str], list[str]]] = {}
    for name in group:
        keys_, paths_ = together.setdefault(root(name), ([], []))
        (keys_ if name.startswith("k:") else paths_).append(name[2:])
    return tuple((tuple(keys), tuple(paths)) for keys, paths in together.values())


@cache
def stands_for() -> Mapping[str, tuple[str, ...]]:
    """Return the names of the fields that each key sets in any family."""
    paths_by_key: dict[str, dict[str, None]] = {}
    for keys, paths in _bundles():
        for key in keys:
            paths_by_key.setdefault(key, {}).update(dict.fromkeys(paths))
    return {key: SAYS.get(key, tuple(paths)) for key, paths in paths_by_key.items()}


def _bundles() -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    for family in (GENERIC, *FAMILIES.values()):
        for path, key in family.keys.items():
            yield key.names, (path,)
        for part, options in family.parts:
            yield part.keys(options), part.paths(options)
        yield from (((), (path,)) for path in family.facts)


EVERYWHERE = (
    "torch_dtype auto_map quantization_config attn_implementation experts_implementation use_bfloat16 torchscript pruned_heads "
    "tokenizer_class task_specific_params finetuning_task prefix gradient_checkpointing is_decoder add_cross_attention "
    "output_attentions cross_attention_hidden_size tf_legacy_loss bos_token_id eos_token_id pad_token_id sep_token_id "
    "decoder_start_token_id tie_word_embeddings tie_encoder_decoder use_cache rope_theta rope_scaling rope_parameters "
    "partial_rotary_factor head_dim hidden_act initializer_range"
)
"""Keys that may be used for every family, either by some release of transformers or by the code
that comes with a model.
"""


@cache
def read_by(family: str) -> frozenset[str]:
    """Return the keys that the config class of a family reads (`read.json`, harvested from
    transformers), and the keys in our own table.
    """
    rows = _data("read.json")
    return frozenset(
        (*rows[""], *rows.get(family, ()), *EVERYWHERE.split(), *FAMILIES[family].keys_it_reads)
    )


@cache
def accepted_kinds(family: str) -> Mapping[str, str]:
    """Return the kinds that the config class of a family accepts, by key (`accepted.json`, harvested from transformers): names of
    types between bars, with bounds behind them; "any" where the class takes everything.
    """
    keys = frozenset(_data("read.json").get(family, ()))
    return {
        key: next((kind for kind, names in row.items() if family in names.split()), next(iter(row)))
        for key, row in _data("accepted.json").items()
        if key in keys
    }


_ROTARY = (
    "rope_type type factor rope_theta original_max_position_embeddings low_freq_factor high_freq_factor beta_fast beta_slow "
    "mscale mscale_all_dim attention_factor short_factor long_factor short_mscale long_mscale partial_rotary_factor truncate "
    "finetuned full_attention sliding_attention"
)
ROTARY = frozenset(_ROTARY.split())
"""Keys of rotary positions and of their scaling (transformers/modeling_rope_utils.py)."""
