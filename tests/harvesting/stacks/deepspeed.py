"""Reads the facts of a DeepSpeed release from its own code: keys, sections, optimizers, schedulers.
Where DeepSpeed reads a section with a config model, the model lists the section's fields. All other
sections are dictionaries; a dictionary that records each look-up shows the names and defaults of
the keys that DeepSpeed reads. Values that a release refuses are found by trying them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from enum import Enum
from importlib import import_module
from inspect import signature
from types import ModuleType
from typing import Any, get_args

from pydantic import ValidationError

from bridge.errors import ConfigError
from bridge.plan.section import fields
from compat.deepspeed.formats import OBJECTS as OPAQUE
from compat.deepspeed.live import real
from compat.deepspeed.releases import DECIDED, KEYS
from compat.deepspeed.schema import DeepSpeed
from tests.harvesting.code import arguments, first, plain
from tests.harvesting.rows import Facts, Row
from tests.harvesting.source import Package, Tree

PACKAGE = Package("deepspeed", "deepspeed", "../version.txt")
TABLES: Mapping[str, tuple[str, ...]] = {
    "keys.json": ("key",),
    "sections.json": ("section",),
    "aliases.json": ("alias",),
    "types.json": ("kind", "type", "form", "name"),
}
"""Files of facts, with the columns that identify a row."""
BATCH = {"train_batch_size": 1}
"""A config that every release accepts."""
BESIDE: Mapping[str, Row] = {"zero_optimization": {"stage": 3}}
"""Settings that are added to a section before a value in this section is tried, because the release
refuses most values without them.
"""
TWICE = {"bf16": "bfloat16"}
"""Sections that DeepSpeed reads under a second name as well."""
SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
LOGGER = "comms_logger"
UNKNOWN = "no_release_reads_this"
VALUES: tuple[Any, ...] = (True, False, 1, "x", {}, None)
"""Values of several types. A release that refuses all of them refuses the key, not only a value."""
BOUNDS: Mapping[str, tuple[float, tuple[float, ...]]] = {">0": (0, (1, 0.5)), "<1": (1, (0.5,))}
"""Limits that a field may have: for each limit, a value that the limit forbids and values that it
allows.
"""
ADAM = {"adam_w_mode": True, "torch_adam": False}
"""Arguments of Adam, with their defaults, that the engine reads itself and does not pass to the
constructor.
"""
ENGINE = "deepspeed.runtime.config:DEEPSPEED_OPTIMIZERS"
OPS = "deepspeed.ops."
CONSTRUCTORS: Mapping[tuple[str, str], str] = {
    ("adam", "fused"): OPS + "adam:FusedAdam",
    ("adam", "cpu"): OPS + "adam:DeepSpeedCPUAdam",
    ("adamw", "fused"): OPS + "adam:FusedAdam",
    ("adamw", "cpu"): OPS + "adam:DeepSpeedCPUAdam",
    ("adagrad", "cpu"): OPS + "adagrad:DeepSpeedCPUAdagrad",
    ("lamb", ""): OPS + "lamb:FusedLamb",
    ("lion", "fused"): OPS + "lion:FusedLion",
    ("lion", "cpu"): OPS + "lion:DeepSpeedCPULion",
    ("onebitadam", ""): "deepspeed.runtime.fp16.onebit.adam:OnebitAdam",
    ("onebitlamb", ""): "deepspeed.runtime.fp16.onebit.lamb:OnebitLamb",
    ("zerooneadam", ""): "deepspeed.runtime.fp16.onebit.zoadam:ZeroOneAdam",
}
"""The class that DeepSpeed uses for each optimizer and implementation."""
SCHEDULES = "deepspeed.runtime.lr_schedules:"
GIVEN_BY_CODE = frozenset(
    ("params", "model_params", "deepspeed", "optimizer", "adamw_mode", "max_grad_norm")
)
"""Constructor arguments that a config cannot set, because the engine passes them itself or refuses
them.
"""


class Heard(dict[str, Any]):
    """A section of a config that records each key that DeepSpeed looks up in it, by path and with
    the default.
    """

    def __init__(self, data: Mapping[str, Any], heard: dict[str, Any], prefix: str = "") -> None:
        inner = {
            name: Heard(value, heard, f"{prefix}{name}.") if isinstance(value, dict) else value
            for name, value in data.items()
        }
        super().__init__(inner)
        self.heard, self.prefix = heard, prefix

    def _hear(self, name: Any, default: Any = None) -> None:
        path = f"{self.prefix}{name}"
        if self.heard.get(path) is None:
            self.heard[path] = default

    def get(self, name: Any, default: Any = None) -> Any:
        self._hear(name, default)
        return super().get(name, default)

    def __getitem__(self, name: Any) -> Any:
        self._hear(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        self._hear(name)
        return super().__contains__(name)

    def keys(self) -> Any:
        """Return the section itself, so that it records the key in `name in section.keys()` too."""
        return self

    def copy(self) -> Heard:
        """Return the section itself, so that it records look-ups in a copy too."""
        return self

    __copy__ = copy

    def __deepcopy__(self, memo: Any) -> Heard:
        return self

    def __bool__(self) -> bool:
        """Return True, so that DeepSpeed also reads a section without keys."""
        return True


def facts(tree: Tree) -> Facts:
    """Return the rows of facts about the release, whose package must be importable."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    models = dict(_models())
    rows = {path: row for prefix, model in models.items() for path, row in _fields(model, prefix)}
    rows |= {path: {"default": default} for path, default in _defaults_by_lookup(rows).items()}
    # A rejected key may be gone from the models, so that only our own tables know it.
    refusals = {path for path in {*rows, *KEYS} if _refuses(path)}
    own = {row["key"] for row in DECIDED["keys"]} | OPAQUE
    keys = [
        {"key": path, **_default_and_bounds(row)}
        for path, row in rows.items()
        if path not in own and path not in refusals
    ]
    keys += [{"key": path, "refused": True} for path in refusals]
    return Facts(
        {
            "keys.json": keys,
            "sections.json": list(_sections(models)),
            "aliases.json": list(_aliases(models)),
            "types.json": list(_types()),
        }
    )


def _runtime() -> ModuleType:
    """Return the module that knows the attributes of DeepSpeed's config object."""
    return import_module("tests.harvesting.judges.deepspeed")


def _models() -> Iterator[tuple[str, Any]]:
    """Yield each section that a config model reads, with the model's class."""
    # A section that is off unless the file has it has a model only if the file has it.
    config = real({**BATCH, LOGGER: {}, "weight_quantization": {}}, 1)
    for attribute, section in _runtime().MODELS.items():
        if hasattr(config, attribute):
            yield section, type(getattr(config, attribute))
    for name in _runtime().MONITORS:
        if hasattr(config.monitor_config, name):
            yield name, type(getattr(config.monitor_config, name))
    yield LOGGER, type(config.comms_config.comms_logger)


def _model(annotation: Any) -> Any:
    """Return the config model that a type annotation names, also inside Optional; None if the
    annotation names none.
    """
    models = (one for one in (annotation, *get_args(annotation)) if hasattr(one, "model_fields"))
    return next(models, None)


def _fields(model: Any, prefix: str) -> Iterator[tuple[str, Row]]:
    """Yield the path of each field of a model, with its default and its bounds."""
    for name, info in getattr(model, "model_fields", {}).items():
        path = f"{prefix}.{info.alias or name}"
        if inner := _model(info.annotation):
            yield from _fields(inner, path)
            continue
        default = info.get_default(call_default_factory=True)
        default = plain(default.value if isinstance(default, Enum) else default)
        limits = list(_bounds(path))
        yield path, {"default": default, **({"bound": limits} if limits else {})}
        if prefix in TWICE:
            yield f"{TWICE[prefix]}.{info.alias or name}", {}


def _bounds(path: str) -> Iterator[str]:
    """Yield the limits that the release sets for a field but that our schema does not have."""
    for limit, (beyond, within) in BOUNDS.items():
        # A section may be refused for another reason, so one value has to be taken.
        if not _accepts(path, beyond) and any(_accepts(path, value) for value in within):
            try:
                DeepSpeed.model_validate(_row_of_section(path, beyond))
            except ValidationError:
                continue
            yield limit


def _row_of_section(path: str, value: Any) -> Row:
    for name in reversed(path.split(".")):
        value = {name: value}
    row: Row = value
    return row


def _defaults_by_lookup(rows: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults, by path, of all keys that the release looks up in a config and that
    `rows` lacks.
    """
    defaults: dict[str, Any] = {}
    sections = {path.partition(".")[0] for path in (*rows, "code.")}
    for on in (False, True):  # some keys are looked for only in a section that is on
        config: dict[str, Any] = {}
        for path in fields(DeepSpeed):
            *parents, name = path.split(".")
            section = config
            for parent in parents if parents and parents[0] not in sections else ():
                section = section.setdefault(parent, {})
                # fp16 and bf16 cannot both be on.
                if on and name == "enabled" and parent == parents[-1] and parent not in TWICE:
                    section[name] = True
        real(Heard({**BATCH, **config}, defaults), 1)
    # Defaults that the code fills in later are in the config that it makes of nothing.
    bare = _runtime().values_by_path(real(dict(BATCH), 1))
    usual = {path: value for path, value in bare.items() if path not in SIZES}
    # A section that is taken whole is heard by its name alone.
    inner = {path.rpartition(".")[0] for path in defaults}
    inside = {path for path in usual if path.partition(".")[0] in defaults.keys() - inner}
    return {
        path: plain(
            defaults.get(path)
            if defaults.get(path) is not None
            else _plain_default(usual.get(path))
        )
        for path in sorted({*defaults, *inside} - {*rows})
        if path in fields(DeepSpeed)
        or not any(other.startswith(f"{path}.") for other in (*rows, *defaults, *inside))
    }


def _plain_default(value: Any) -> Any:
    """Return the default `value`; None if it is a bare `object()`, by which DeepSpeed's code marks
    a key without a default.
    """
    return None if type(value) is object else value


def _refuses(path: str) -> bool:
    """Return whether the release refuses every value of a key, always for the same reason."""
    reasons = {_reason(path, value) for value in VALUES}
    return len(reasons) == 1 and "" not in reasons


def _accepts(path: str, value: Any) -> bool:
    return not _reason(path, value)


def _reason(path: str, value: Any) -> str:
    """Return the reason for which the release refuses a value; empty if it accepts it."""
    data = _row_of_section(path, value)
    data |= {name: {**BESIDE[name], **data[name]} for name in BESIDE.keys() & data.keys()}
    try:
        real({**BATCH, **data}, 1)
    except ConfigError as error:
        return str(error)
    return ""


def _sections(models: Mapping[str, Any]) -> Iterator[Row]:
    """Yield a row for each section that refuses unknown keys, or that is off unless a config
    contains it.
    """
    bare = real(dict(BATCH), 1)
    off = {
        section
        for attribute, section in _runtime().MODELS.items()
        if getattr(bare, attribute, 0) is None
    }
    inner = {
        path: optional
        for prefix, model in models.items()
        for path, optional in _inner_models(model, prefix)
    }
    for section in (*models, *inner, *(TWICE[name] for name in TWICE if name in models)):
        row: Row = {"section": section}
        row |= {"optional": True} if section in off or inner.get(section) else {}
        row |= {"refuses": True} if not _accepts(f"{section}.{UNKNOWN}", 1) else {}
        if len(row) > 1:
            yield row


def _inner_models(model: Any, prefix: str) -> Iterator[tuple[str, bool]]:
    """Yield the path of each config model inside `model`, and whether the section at this path is
    off by default.
    """
    for name, info in getattr(model, "model_fields", {}).items():
        if inner := _model(info.annotation):
            path = f"{prefix}.{info.alias or name}"
            yield path, info.get_default(call_default_factory=True) is None
            yield from _inner_models(inner, path)


def _aliases(models: Mapping[str, Any]) -> Iterator[Row]:
    for prefix, model in models.items():
        for name, info in getattr(model, "model_fields", {}).items():
            if info.alias and info.alias != name:
                yield {"alias": f"{prefix}.{name}", "key": f"{prefix}.{info.alias}"}


def _types() -> Iterator[Row]:
    """Yield a row for each optimizer and scheduler of DeepSpeed, and one for each of its arguments."""
    names = first([ENGINE])
    for (name, form), place in CONSTRUCTORS.items():
        if name in names:
            base = {"kind": "optimizers", "type": name, **({"form": form} if form else {})}
            more = ADAM if name in ("adam", "adamw") else {}
            yield from _arguments(base, first([place]), more)
    for name in first([SCHEDULES + "VALID_LR_SCHEDULES"]):
        yield from _arguments({"kind": "schedulers", "type": name}, first([SCHEDULES + name]), {})


def _arguments(base: Row, cls: Any, more: Mapping[str, Any]) -> Iterator[Row]:
    yield base
    for name, default in more.items():
        yield {**base, "name": name, "default": default}
    required_names = {
        name for name, one in signature(cls).parameters.items() if one.default is one.empty
    }
    for row in arguments(cls):
        if row["name"] not in GIVEN_BY_CODE:
            facts = (
                {"required": True} if row["name"] in required_names else _default_and_bounds(row)
            )
            yield {**base, "name": row["name"], **facts}


def _default_and_bounds(row: Row) -> Row:
    """Return the default and the bounds of a row. Those that are None are left out."""
    return {name: row[name] for name in ("default", "bound") if row.get(name) is not None}


def path_of(file: str, row: Row) -> str:
    """Return the path of the setting that a row describes."""
    if file == "types.json":
        return f"{row['kind'][:-1]}.{'params.' if row.get('name') else ''}{row.get('name', 'type')}"
    return str(row.get("key") or row["section"])
