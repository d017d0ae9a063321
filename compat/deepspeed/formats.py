"""Reads configs in JSON, HJSON or base64, or as mappings, into typed values by path, and checks
the keys of every section strictly. Writes configs as JSON.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from bridge.errors import SourceError, nearest
from bridge.files import Document, Script, check_nested, is_text, load, parse
from bridge.files.shown import show_value
from bridge.plan.section import Values, fields, nest
from bridge.stack.dialect import Reading, Written, code_beside
from bridge.stack.findings import UNTOLD, Finding, Origin
from bridge.stack.reader import Reader, flaw, mapping
from bridge.stack.rules import Effect
from bridge.stack.sources import NO_SOURCES, Placed, Said, Sources
from compat.deepspeed import auto, free_section_keys, scripts, trainer
from compat.deepspeed.precedence import ARGUMENTS, ENVIRONMENT, PRECISION, Run, find_sources
from compat.deepspeed.releases import ALIASES, KEYS, PARTS, RELEASES, Release, Type
from compat.deepspeed.schema import DeepSpeed
from compat.deepspeed.value_types import expected, typed

PARTIAL = "plan"
"""Marks a config that stagebridge has made from a plan (`Config.entry`). Only such a config may
lack the batch keys.
"""

NULLABLE = frozenset(
    {"expert_parallel.expert_w3", "seq_parallel_communication_data_type", "steps_per_print"}
)
"""Keys for which null means something else than a missing key."""
TRUTHS: Mapping[str, str] = {
    "optimizer.params.torch_adam": "runtime/engine.py: get_optimizer_configuration",
    "prescale_gradients": "runtime/engine.py: postscale_gradients",
    "dump_state": "runtime/engine.py: __init__",
    "disable_python_gc": "runtime/engine.py: _configure_python_gc",
    "zero_allow_untested_optimizer": "runtime/engine.py: _do_optimizer_sanity_check",
    "zero_force_ds_cpu_optimizer": "runtime/engine.py: _configure_optimizer",
    "memory_breakdown": "runtime/utils.py: see_memory_usage",
    "torch_autocast.enabled": "runtime/engine.py: torch_autocast_enabled",
    "activation_checkpointing.partition_activations": "runtime/activation_checkpointing/checkpointing.py: forward",
    "activation_checkpointing.contiguous_memory_optimization": "runtime/activation_checkpointing/checkpointing.py: backward",
    "activation_checkpointing.cpu_checkpointing": "runtime/activation_checkpointing/checkpointing.py: forward",
    "activation_checkpointing.profile": "runtime/activation_checkpointing/checkpointing.py: forward",
    "activation_checkpointing.synchronize_checkpoint_boundary": "runtime/activation_checkpointing/checkpointing.py: forward",
}
"""Keys of which DeepSpeed only asks whether the value is true in Python, each with the place in its source that asks."""
DENIALS = ("false", "no", "off", "0", "none", "null", "disabled")
"""Texts whose author means false."""
NULL_SECTIONS = frozenset(
    {
        "bf16",
        "zero_optimization.offload_param",
        "zero_optimization.offload_optimizer",
        "zero_optimization.zenflow",
        "zero_optimization.leaf_module",
        "aio",
        "checkpoint.writer",
        "expert_parallel",
    }
)
"""Sections for which null means the same as a missing section."""
KEYED = "a mapping of DeepSpeed keys"
OBJECTS = frozenset(
    {"tensor_parallel.dtype", "tensor_parallel.tp.mpu", "tensor_parallel.tp.tp_group"}
)
"""Keys whose value is a live Python object, which no file can hold."""
DICTS = frozenset(
    {
        "amp",
        "elasticity",
        "nebula",
        "compression_training",
        "quantize_training",
        "progressive_layer_drop",
    }
)
"""Free-form sections in which null makes DeepSpeed fail, because DeepSpeed reads keys from them
without a check for null.
"""
PRESENCE = frozenset({"zero_optimization.zenflow", "weight_quantization"})
"""Sections that switch a feature on by being in the config, even if the section is empty."""
PARAMS: Mapping[str, str] = {"optimizer.params": "optimizers", "scheduler.params": "schedulers"}
PARTITION: Mapping[str, Any] = {
    **dict.fromkeys(
        (
            "use_default_specs",
            "tp_size",
            "embedding_partition_dim",
            "lm_head_patterns",
            "strict_mode",
        )
    ),
    "layer_specs": dict.fromkeys(
        (
            "patterns",
            "partition_type",
            "gather_output",
            "grad_allreduce",
            "shape",
            "partition_dim",
            "model_types",
        )
    ),
}
"""The keys of tensor_parallel.partition_config (module_inject/autotp_config.py,
AutoTPConfig.from_dict). A nested mapping stands for a section, and None for a single value.
"""

UNSCHEDULED = (
    "not given, and Hugging Face's Trainer then builds its own scheduler, by default linear;"
    " stagebridge reads the learning rate as constant; give the real schedule, for example with --code"
    " scheduler.name=linear --code scheduler.total_steps=1000"
)
"""Message for a file that has the value "auto" but no schedule. The value "auto" shows that Hugging
Face's Trainer or accelerate fills in the file.
"""

SCRIPTED = (
    "not given, and a program of accelerate then builds its schedule itself; stagebridge reads the learning"
    " rate as constant; give the real schedule, for example with --code scheduler.name=linear --code"
    " scheduler.total_steps=1000"
)
PRECISIONS = ("fp16", "bf16", "bfloat16")
UNSAID = (
    "not given, and accelerate then adds the section of its mixed_precision; stagebridge assumes that"
    " there is none; give it with --auto mixed_precision=bf16 (or fp16, or no)"
)
UNTOLD_LENGTH = (
    "the Trainer refuses this value unless the data and the epochs come to the same number of optimizer"
    ' steps, which nothing given tells; write "auto"'
)
WIDTH = "hidden_size"
NO_WIDTH = (
    "which accelerate fills in below ZeRO 3 by the hidden_size at the top of the model's config.json"
    " alone (accelerator.py: _prepare_deepspeed), where this model has none; write a number"
)
WITHOUT_WIDTH = (
    "which the Trainer and accelerate fill in by the model's width (integrations/deepspeed.py:"
    " trainer_config_finalize), but the model's config.json has neither hidden_size nor hidden_sizes; write a number"
)
NUM_STEPS = (
    "num_steps makes the Trainer accumulate after it has filled in the DeepSpeed file, so that the two count other"
    " micro-batches in a step (trainer.py: create_accelerator_and_postprocess); write gradient_accumulation_steps"
)
FILLED = ("clip", "accumulation", "mixed_precision")
"""Facts of accelerate that the Trainer's arguments replace."""
ABSENT = ("scheduler.type", "optimizer.type", "bf16.enabled")
"""Settings whose findings are about a missing key. All other findings are about a key in the file.
"""

Tree = dict[str, Any]
"""The key names in a config or in one of its sections. The name of a single value maps to the path
of the key, and the name of a section maps to another `Tree`.
"""


@cache
def _tree(release: Release) -> Tree:
    """Return all keys that `release` reads as a nested mapping. Alternative names of keys are
    included.
    """
    spellings = {
        path: path for path in fields(DeepSpeed) if path in release.keys or path.startswith("code.")
    }
    if release.since("0.16.4"):
        spellings |= {path: path for path in OBJECTS}
    tree: Tree = nest(spellings)
    for alias, path in ALIASES.items():
        _add_alias(tree, alias, path)
    return tree


def _add_alias(tree: Tree, alias: str, path: str) -> None:
    """Add the alternative name `alias` for the key at `path`, unless the release does not read that
    key.
    """
    *parents, name = alias.split(".")
    for parent in parents:
        tree = tree.get(parent, {})
    target = path.rpartition(".")[2]
    if target in tree:
        tree[name] = tree[target]


# Reading


def read(
    source: Any,
    release: Release,
    lenient: bool = False,
    values: Mapping[str, Any] | None = None,
    code: Mapping[str, Any] | None = None,
    arguments: Mapping[str, Any] | None = None,
    world: int | None = None,
    open_auto: bool = False,
) -> Reading:
    """Read a path, text, mapping, `Written`, or live DeepSpeedConfig, for a run on `world` ranks.
    Raises one error with all problems. `values` replaces "auto" by key; for keys that are not in
    `values`, the rules of the module `auto` apply. Without `values`, every "auto" is a problem.
    `code` is the code part, which takes precedence over the code part of the source. `arguments`
    are TrainingArguments by name, for a run that Hugging Face's Trainer starts. With `open_auto`, an
    "auto" that lacks a fact is left out and told among the reading's sources.
    """
    script = _find_script(source, arguments)
    # Values that the caller gives win over those of the script.
    if script is not None:
        if script.trained or arguments is not None:
            script_arguments = (
                trainer.arguments(script.arguments, whole=False) if script.arguments else {}
            )
            script_values = Placed(script_arguments, script.arguments.places, script.arguments.lost)
            arguments = script_values.overlay(arguments or {})
            arguments = arguments.overlay(script.assigned, scripts.ASSIGNED)
        code = {**script.code, **(code or {})}
        world = world or script.ranks
        if script.facts:
            fact_names = FILLED if arguments is not None else ()
            facts = {name: fact for name, fact in script.facts.items() if name not in fact_names}
            places = {name: Said(name, fact, "accelerate") for name, fact in facts.items()}
            values = Placed(facts, places).overlay(values or {})
    data, document, entry = load_source(script.document if script else source)
    reader = _KeyReader(release, lenient, document, world=world, file=script.file if script else "")
    reader.open_auto = open_auto
    if script:
        lines, winners = script.document.lines, script.sources.winners.items()
        reader.added = {key: said for key, said in winners if tuple(key.split(".")) not in lines}
    reader.section(data, "", _tree(release))
    # After the file, since the caller's code part overrides the one that stands beside it.
    reader.section(code or {}, "code", _tree(release)["code"])
    reader.blocks = frozenset(map(str, data))
    reader.environment = script.environment if script and arguments is not None else {}
    reader.setters = script.sources.winners if script else {}
    values = reader.use_width(values, arguments is not None) if values else values
    reader.places = arguments.places if isinstance(arguments, Placed) else {}
    message = SCRIPTED if script and script.facts else UNSCHEDULED
    before = dict(reader.given)
    reader.name_other_file(
        (script.file if script else document.name if document else "") or "", arguments
    )
    words = (
        reader.resolve(values, text=message)
        if arguments is None
        else reader.fill_for_trainer(arguments, values or {})
    )
    reader.set_precision(arguments, values or {}, data)
    # A finding of the Trainer's argument says more than that no config has it.
    said = {one.path for one in reader.findings}
    words_of_launch = script.findings if script else ()
    reader.findings += (
        one for one in words_of_launch if one.message != scripts.SCRIPTS or one.path not in said
    )
    ranks = script.ranks if script else None
    reading = Reading(
        Values(reader.given),
        # The program of a launch brings the sizes of its batch.
        PARTIAL if script and script.facts and auto.MICRO in reader.left else entry,
        reader.origins,
        tuple(reader.findings),
        reader.opaque,
        ranks,
        sources=script.sources
        if script and arguments is None
        else reader.sources(before, arguments, values or {}).beside(
            script.sources if script else NO_SOURCES
        ),
    )
    return reading.unless(reader.problems, words)


def _find_script(source: Any, arguments: Mapping[str, Any] | None) -> scripts.Found | None:
    """Return the config of the run that a launch script starts; None if `source` is not a launch
    script.
    """
    if isinstance(source, str | Path) and _decode_base64(str(source)) is None:
        source = load(source)
    return (
        scripts.read(source.data, arguments)
        if isinstance(source, Document) and isinstance(source.data, Script)
        else None
    )


def load_source(source: Any) -> tuple[Mapping[str, Any], Document | None, str]:
    """Return three things: the source as a nested mapping, the document with line numbers (None for
    an object), and the kind of source (`file` or `object`).
    """
    if isinstance(source, Written):
        return {**mapping(load(source.text), KEYED), "code": dict(source.code)}, None, "file"
    # A live DeepSpeedConfig keeps the mapping that it was made from.
    live = getattr(source, "_param_dict", source)
    if isinstance(live, Mapping):
        check_nested(live, "mapping")
        return live, None, "object"
    if not isinstance(source, str | Path | Document):
        raise SourceError(
            f"source: found {show_value(source)}, expected a path, text, mapping or DeepSpeedConfig"
        )
    document = _decode_base64(source) if isinstance(source, str) else None
    document = document or load(source)
    return {**_read_code_beside(source), **mapping(document, KEYED)}, document, "file"


def _read_code_beside(source: str | Path | Document) -> dict[str, Any]:
    """Return the code part from the file that stands next to `source`; empty if there is no such
    file.
    """
    if isinstance(source, str) and is_text(source):
        return {}
    path = Path(source.name if isinstance(source, Document) else source)
    beside = code_beside(path)
    return (
        {"code": mapping(load(beside), KEYED)}
        if os.path.isfile(path) and os.path.isfile(beside)
        else {}
    )


def _decode_base64(source: str) -> Document | None:
    """Return the config in a base64 string, which DeepSpeed accepts in place of a path. Return None
    if `source` is not such a string.
    """
    # A name such as `ds_config` is made of the same letters, so a file of
    # that name comes first, and what is decoded has to look like a mapping.
    if not re.fullmatch(r"[\w-]{8,}={0,2}", source) or os.path.exists(source):
        return None
    try:
        text = base64.urlsafe_b64decode(source).decode("utf-8")
    except (binascii.Error, ValueError):
        return None
    return parse(text, "base64", ".hjson") if text.lstrip().startswith("{") else None


def _of_code(key: str) -> bool:
    return key.partition(".")[0] == "code"


@dataclass
class _KeyReader(Reader):
    """Reads a nested config and checks it against the keys of one release."""

    release: Release
    world: int | None = None
    # Whether a value of "auto" was replaced, which only accelerate or the Trainer does.
    filled: bool = False
    # Whether an "auto" that lacks a fact is no problem, and those found, with the facts.
    open_auto: bool = False
    left: dict[str, str] = field(default_factory=dict)
    # The sections of the file, and where the Trainer's arguments are written.
    blocks: frozenset[str] = frozenset()
    places: Mapping[str, Said] = field(default_factory=dict)
    # accelerate's variables in the environment of the Trainer's run, and the run's length.
    environment: Mapping[str, Said] = field(default_factory=dict)
    # Who sets keys of the config that a launcher builds or fills in.
    setters: Mapping[str, Said] = field(default_factory=dict)
    epoch: trainer.Epoch | None = None
    steps: int | None = None
    # Who put keys into the file's content before it was read.
    added: Mapping[str, Said] = field(default_factory=dict)
    # Arguments that the program changes, so that nobody knows their value.
    changed: Mapping[str, Said] = field(default_factory=dict)
    case: trainer.Case = trainer.NO_CASE

    def line(self, key: str) -> int | None:
        """Return the line of the key `key` in the file, or the line of its section. Return None
        for a key of the code part that is not in the file itself, even if the file has the section.
        """
        if key in self.added:
            return None
        if not _of_code(key):
            return super().line(key)
        return self.document.lines.get(tuple(key.split("."))) if self.document else None

    def problem(self, key: str, message: str) -> None:
        """Record a problem of the key `key`. The message names the file only if the file
        contains the key.
        """
        if _of_code(key) and not self.line(key):
            self.problems.append(f"{key}: {message}")
        elif key in self.added:
            adder = self.added[key]
            place = f"line {adder.line}: {adder.setting}: " if adder.line else ""
            file = f"{adder.source}: " if place and adder.source else ""
            self.problems.append(f"{file}{place}{key}: {message}")
        else:
            super().problem(key, message)

    def section(self, data: Mapping[str, Any], path: str, tree: Tree) -> None:
        """Read the section at `path` and store the values of its keys. `data` is the section, and
        `tree` the keys that the release reads in it.
        """
        targets: dict[str, str] = {}
        for name, value in self._entries(data, path):
            key = f"{path}.{name}" if path else name
            entry = tree.get(name)
            # Two spellings of one key have one target: the canonical path.
            target = entry if isinstance(entry, str) else ALIASES.get(key, key)
            if target in targets:
                self.problem(
                    key,
                    f"this key and {targets[target]} are two names of the same setting, and both"
                    " are given; keep one of them",
                )
                continue
            targets[target] = key
            self._entry(key, target, value, entry)

    def _entries(self, data: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
        """Yield the keys of a section with their values. Keys that DeepSpeed never reads are left
        out.
        """
        # It reads bfloat16 only if bf16 is missing or null
        # (runtime/precision_config.py: get_bfloat16_config).
        hidden = not path and data.get("bf16") is not None and "bfloat16" in data
        # The type comes first: it decides which arguments are known.
        for name, value in sorted(data.items(), key=lambda item: item[0] != "type"):
            if isinstance(name, str) and free_section_keys.is_remark(name) and self._ignores(path):
                self._remark(path, name)
            elif not isinstance(name, str) or "." in name:
                self.problem(
                    path or "config",
                    f"found the key {show_value(name)}, expected a name without dots; write sections as"
                    " nested mappings",
                )
            elif hidden and name == "bfloat16":
                self.finding(
                    "bfloat16",
                    "DeepSpeed ignores the section bfloat16, because the config also has bf16; drop"
                    " bfloat16",
                    Effect.NONE if value == data["bf16"] else Effect.NUMBERS,
                )
            elif (
                not path
                and name == "allgather_size"
                and isinstance(data.get("zero_optimization"), bool)
            ):
                # The bucket size beside a ZeRO section that is true or
                # false, the oldest form (runtime/zero/config.py).
                if data["zero_optimization"]:
                    self.leaf("allgather_size", "zero_optimization.allgather_bucket_size", value)
            else:
                yield name, value

    def _remark(self, path: str, name: str) -> None:
        """Report a remark of the author, whose name may have dots."""
        line = self.document.line(*filter(None, path.split(".")), name) if self.document else None
        key, origin = f"{path}.{name}" if path else name, Origin(line, "", self.file)
        self.findings.append(Finding(key, free_section_keys.IGNORED, Effect.NONE, origin=origin))

    def _entry(self, key: str, target: str, value: Any, entry: Any) -> None:
        if target in self.release.keys_to_refuse:
            history, version = KEYS[target], self.release.version
            instead = f"; use {history.instead}" if history.instead else ""
            message = (
                f"DeepSpeed {history.rejected} removed this key, and {version} refuses it even if"
                f" it is empty; drop the key{instead}"
            )
            self.problem(key, message)
        elif entry is None:
            self.unknown(key, value)
        elif isinstance(entry, str):
            self.leaf(key, target, value)
        elif isinstance(value, Mapping):
            self._read_section(key, target, value, entry)
        else:
            self._no_mapping(key, target, value)

    def _read_section(self, key: str, target: str, value: Mapping[str, Any], entry: Tree) -> None:
        if target in PRESENCE and not value:
            self.problem(
                key,
                "an empty section switches this feature on with all defaults; set at least"
                f" {next(iter(entry))} in the section, or drop the section",
            )
        elif target in PARAMS:
            self._params(key, target, value, entry)
        elif key == target:
            self.section(value, target, entry)
        else:
            self._read_old_section(key, target, value, entry)

    def _read_old_section(
        self, key: str, target: str, value: Mapping[str, Any], entry: Tree
    ) -> None:
        """Read a section that the file calls by an old name. Messages name the keys in the section
        as the file does.
        """
        before = set(self.given)
        self.section(value, target, entry)
        for path in set(self.given) - before:
            self.origins[path] = Origin(self.line(key), path.replace(target, key, 1), self.file)

    def _no_mapping(self, key: str, target: str, value: Any) -> None:
        """Report an error for a single value where a section is expected. DeepSpeed accepts null
        for some sections, and true or false for zero_optimization; such values are stored.
        """
        if value is None and target in NULL_SECTIONS:
            return
        if target == "zero_optimization" and isinstance(value, bool):
            self._set("zero_optimization.stage", int(value), key)
            self.finding(
                target,
                f"{str(value).lower()} is an old form of stage {int(value)}; write"
                " zero_optimization.stage instead",
                Effect.NONE,
            )
            return
        if value is None:
            self.problem(key, "found null, expected a mapping; or drop the section")
        else:
            self.problem(key, f"found {show_value(value)}, expected a mapping")

    # Leaves

    def leaf(self, key: str, path: str, value: Any) -> None:
        """Read one value."""
        # A null that differs from leaving the key out: for expert_w3
        # always, for the others if their default is not null.
        means = path in NULLABLE and (
            path == "expert_parallel.expert_w3" or KEYS[path].at(self.release.version) is not None
        )
        if path in OBJECTS:
            self._object(key, value)
        elif value is None and not means:
            self._no_value(key, path)
        elif value == "auto" and path in auto.OVERWRITTEN:
            self.finding(path, f'"auto" has no effect: {auto.OVERWRITTEN[path]}', Effect.NONE)
        elif path in TRUTHS and path not in auto.RULES and not isinstance(value, bool):
            self._truth(key, path, value)
        elif value == "auto" and path not in auto.REAL:
            # Replaced once all keys are read: one "auto" may follow from another key.
            self._set(path, "auto", key)
        else:
            self._value(key, path, value)

    def _truth(self, key: str, path: str, value: Any) -> None:
        """Read a value of which DeepSpeed only asks whether it is true in Python, so that the text "false" counts as true."""
        truth = str(bool(value)).lower()
        contradicts = isinstance(value, str) and bool(value) and value.strip().lower() in DENIALS
        self.finding(
            path,
            f"found {show_value(value)}, which DeepSpeed takes as {truth} ({TRUTHS[path]}); write true or false",
            Effect.NUMBERS if contradicts else Effect.NONE,
        )
        self._set(path, bool(value), key)

    def _value(self, key: str, path: str, value: Any) -> None:
        try:
            result = None if value is None else typed(path, self._same_meaning(path, value))
        except ValueError as error:
            self.problem(key, str(error))
            return
        self._check_free_value(path, key, result)
        self._set(path, result, key)

    def _same_meaning(self, path: str, value: Any) -> Any:
        """Return the number that DeepSpeed reads for `value`, such as 3 for a stage of "3" or 1 for
        true. Return other values unchanged.
        """
        stage = path == "zero_optimization.stage"
        if stage and (isinstance(value, bool) or value in ("0", "1", "2", "3")):
            self.finding(
                path, f"{show_value(value)} is read as {int(value)}; write the number", Effect.NONE
            )
            return int(value)
        if isinstance(value, float) and value.is_integer() and (stage or "whole" in expected(path)):
            self.finding(
                path, f"{value!r} is read as {int(value)}; write a whole number", Effect.NONE
            )
        return value

    def _check_free_value(self, path: str, key: str, value: Any) -> None:
        """Report a free-form value that JSON cannot hold, and keys inside the value that DeepSpeed
        does not read.
        """
        if isinstance(value, dict | list | tuple):
            wrong = flaw(value, "JSON cannot hold")
            if wrong:
                self.problem(key, wrong)
        for name, message, effect in free_section_keys.unread(path, value):
            self.finding(name, message, effect)
        if path == "tensor_parallel.partition_config" and isinstance(value, Mapping):
            self._partition(value, key, PARTITION)

    def _partition(self, value: Mapping[str, Any], key: str, names: Mapping[str, Any]) -> None:
        for name, inner in value.items():
            if name not in names:
                self.problem(
                    f"{key}.{name}", f"unknown key{nearest(str(name), names, len(self.problems))}"
                )
            elif names[name] is not None:
                specs = (
                    [item for item in inner if isinstance(item, Mapping)]
                    if isinstance(inner, list)
                    else []
                )
                if not isinstance(inner, list) or len(specs) < len(inner):
                    self.problem(
                        f"{key}.{name}", f"found {show_value(inner)}, expected a list of mappings"
                    )
                for position, item in enumerate(specs):
                    self._partition(item, f"{key}.{name}.{position}", names[name])

    def _no_value(self, key: str, path: str) -> None:
        """Report null as an error, unless DeepSpeed's own default of the key is None. In that case
        null means the same as a missing key.
        """
        section, _, name = path.rpartition(".")
        if section in PARAMS:
            # Null goes to the constructor, which takes it if that is its own default.
            fine = all(
                form.args.get(name, "") is None
                for form in self._forms(section)
                if form.args is not None
            )
        else:
            fine = path not in DICTS and (
                path not in KEYS or KEYS[path].at(self.release.version) is None
            )
        if not fine:
            self.problem(
                key, f"found null, expected {expected(path)}; set a value, or drop the key"
            )

    def _object(self, key: str, value: Any) -> None:
        if isinstance(value, str | int | float | Mapping | list | tuple):
            self.problem(
                key,
                f"found {show_value(value)}; DeepSpeed expects a live Python object here, which a file"
                " cannot hold; drop it",
            )
        elif value is not None:
            self.opaque[key] = value

    def _set(self, path: str, value: Any, key: str) -> None:
        self.given[path] = value
        line = self.line(key)
        if line or key != path:
            self.origins[path] = Origin(line, key if key != path else "", self.file)

    # Arguments of optimizers and schedulers

    def _params(self, key: str, target: str, value: Mapping[str, Any], entry: Tree) -> None:
        """Read the arguments of an optimizer or scheduler. If DeepSpeed or torch has its type, the
        arguments are checked. If the type is the user's own, the arguments are stored unchanged.
        """
        # Arguments without a type: DeepSpeed builds nothing of them, and a finding tells so.
        if target.replace(".params", ".type") not in self.given:
            self.section(value, target, entry)
            return
        name = self.given[target.replace(".params", ".type")]
        names = self.release.arguments(PARAMS[target], name) if isinstance(name, str) else None
        if names is None:
            self._own(target, value, entry, self._forms(target))
            return
        self.section(
            value, target, {argument: path for argument, path in entry.items() if argument in names}
        )

    def _forms(self, target: str) -> tuple[Type, ...]:
        name = self.given.get(target.replace(".params", ".type"))
        return self.release.forms(PARAMS[target], name) if isinstance(name, str) else ()

    def _own(
        self, target: str, value: Mapping[str, Any], entry: Tree, forms: tuple[Type, ...]
    ) -> None:
        """Store the arguments of an optimizer or scheduler whose constructor is not known. An
        argument that one of DeepSpeed's own types also has is checked against that argument's type.
        """
        for before, (name, argument) in enumerate(self._entries(value, target)):
            path = f"{target}.{name}"
            if remark := free_section_keys.strange(
                PARAMS[target],
                forms,
                str(self.given[target.replace(".params", ".type")]),
                name,
                before,
            ):
                self.finding(path, *remark)
            if argument == "auto" or (name in entry and _fits_type(path, argument)):
                self.leaf(path, path, argument)
            else:
                self.opaque[path] = argument

    # Unknown keys

    def unknown(self, key: str, value: Any) -> None:
        """Report a key that the release does not read. A key that DeepSpeed ignores has no effect,
        unless it is probably a misspelling of a key that DeepSpeed reads. Such a key is an error, or
        a finding if reading is lenient; a key that DeepSpeed refuses is always an error.
        """
        parent, _, name = key.rpartition(".")
        advice = _find_elsewhere(key, self.release)
        if parent == "code" and name in _tree(self.release):
            advice = (
                f"not a setting of the training script; move {name} from the code part into"
                " the config of DeepSpeed"
            )
        advice = advice or self._mistake(key, value)
        if not self._ignores(parent) and (parent not in PARAMS or not self.lenient):
            self.problem(key, advice or f"unknown key{self._nearest(key)}")
        elif not advice:
            self.finding(key, free_section_keys.IGNORED, Effect.NONE)
        elif self.lenient:
            self.record_omission(
                key, advice, UNTOLD if parent in PARAMS else "; DeepSpeed ignores it"
            )
        else:
            self.problem(key, advice)

    def _ignores(self, section: str) -> bool:
        """Return whether DeepSpeed ignores unknown keys in a section. The constructor of an optimizer
        or scheduler refuses them, and no stack reads the code part.
        """
        return not (self.release.refuses(section) or section in PARAMS or _of_code(section))

    def _mistake(self, key: str, value: Any) -> str:
        """Return a message about a key that is probably a misspelling, or that DeepSpeed reads at
        another place. Return an empty string for any other key.
        """
        parent, _, name = key.rpartition(".")
        if parent in PARAMS:
            return f"unknown key{self._nearest(key)}"
        if advice := free_section_keys.suggest_spelling(
            name, value, self._level(parent), self._before()
        ):
            return f"unknown key{advice}"
        places = [path for path in self.release.keys if path.rpartition(".")[2] == name]
        return (
            f"unknown key here; DeepSpeed reads {' and '.join(sorted(places)[:2])}"
            if places
            else ""
        )

    def _level(self, parent: str) -> Tree:
        level: Any = _tree(self.release)
        for name in filter(None, parent.split(".")):
            level = level.get(name, {})
        return level  # type: ignore[no-any-return]

    def _before(self) -> int:
        return len(self.problems) + len(self.findings)

    def _nearest(self, key: str) -> str:
        parent, _, name = key.rpartition(".")
        return nearest(name, self._level(parent), self._before())

    # "auto"

    def resolve(
        self, values: Mapping[str, Any] | None, has_schedule: bool = False, text: str = UNSCHEDULED
    ) -> tuple[str, ...]:
        """Replace "auto" by the caller's values or by rules; without `values` each "auto" is a
        problem. Return command-line options that would give the missing facts. If the file has no
        schedule, Hugging Face's Trainer builds one, and a finding with the message `text`
        says so. With `has_schedule` the Trainer's schedule is already known, and there is no finding.
        """
        lines = {
            path: f"{self.file} line {line}".strip()
            for path in self.given
            if (line := self.line(path))
        }
        if self.open_auto and values is not None:
            self.left = auto.find_open(self.given, values, self.world)
            for path in self.left:
                del self.given[path]
        resolution = auto.resolve_auto(self.given, values, lines, self.world)
        self.problems.extend(resolution.problems)
        before = len(self.problems)
        for path, value in resolution.found.items():
            self._value(path, path, value)
        has_refusals = len(self.problems) > before
        self.filled = bool(resolution.found)
        if resolution.found and not has_schedule and not self._has_scheduler():
            self.finding("scheduler.type", text, Effect.NUMBERS)
        # A command that repeats a refused value would be refused again.
        return () if has_refusals else resolution.words

    def _has_scheduler(self) -> bool:
        return any(path.startswith(("scheduler.", "code.scheduler.")) for path in self.given)

    def has_key(self, path: str) -> bool:
        """Return whether findings about the key at `path` concern a key that the file contains."""
        return path not in ABSENT

    def fill_for_trainer(
        self, arguments: Mapping[str, Any], values: Mapping[str, Any]
    ) -> tuple[str, ...]:
        """Fill in the file as Hugging Face's Trainer does with these arguments. Report values in
        the file that the Trainer refuses, and store the optimizer and the schedule that the Trainer
        would build. Return command-line options for facts that are missing.
        """
        fit = {name: value for name, value in values.items() if not auto.flaw(name, value)}
        arguments = Placed({}, {}).overlay(arguments).overlay(trainer.arguments_of_facts(fit))
        self.changed = arguments.unknown = {
            name: said
            for name, said in arguments.unknown.items()
            if said.value is None or not self._is_filled_early(name)
        }
        self._refuse_arguments(arguments)
        for dated in trainer.find_dated(arguments, fit.get("transformers")):
            self._remark_argument(*dated)
        if (trainer.read_num_steps(arguments) or 1) != 1:
            self._remark_argument("accelerator_config", NUM_STEPS, Effect.NUMBERS)
        if arguments.get("max_steps") == 0:
            self._remark_argument("max_steps", trainer.NO_STEP, Effect.NUMBERS)
        ranks = fit.get("data_parallel", fit.get("world_size", self.world))
        self.epoch = trainer.find_epoch(arguments, ranks, fit.get("samples"))
        self.steps = fit.get("total_steps", self.epoch.steps if self.epoch else None)
        release = trainer.choose_release(arguments, fit.get("transformers"))
        filling = trainer.filling(arguments, ranks, self.steps, release)
        for path, problem in filling.refusals(self.given):
            setter = self.setters.get(path, Said(path, None))
            if setter.line:
                source = f"{setter.source}: " if setter.source else ""
                self.problems.append(f"{source}line {setter.line}: {setter.setting}: {problem}")
            else:
                self.problem(path, problem)
        for path in ("scheduler.params.total_num_steps", "scheduler.params.warmup_num_steps"):
            if path not in filling.demands and self.given.get(path) not in (None, "auto"):
                self.finding(path, UNTOLD_LENGTH, Effect.NUMBERS)
        self._fill_batch(filling)
        # The Trainer overwrites keys of the file, but not what the user said of the script.
        for path, value in filling.sets.items():
            if not (path.startswith("code.") and path in self.given):
                self._value(path, path, value)
                if place := self.places.get(path.rpartition(".")[2]):
                    self.origins[path] = Origin(place.line, place.setting, place.source)
        own = filling.schedule if not self._has_scheduler() else {}
        if not any(path.startswith("optimizer.") for path in self.given):
            optimizer, message = filling.swap_optimizer(self.case)
            for path, value in optimizer.items():
                if path not in self.given:
                    self._value(path, path, value)
            effect = Effect.ROUNDING if filling.optimizer else Effect.NUMBERS
            self.finding("optimizer.type", message, effect)
        text = filling.unscheduled or UNSCHEDULED
        environment_facts = {
            fact: self.environment[name].value
            for name, (fact, _) in ENVIRONMENT.items()
            if name in self.environment
        }
        facts = {**filling.facts, **filling.values, **environment_facts, **values}
        words = self.resolve(facts, bool(own), text)
        for name, value in own.items():
            self._value(f"code.scheduler.{name}", f"code.scheduler.{name}", value)
        if (
            not own
            and not self._has_scheduler()
            and "scheduler.type" not in {finding.path for finding in self.findings}
        ):
            self.finding("scheduler.type", text, Effect.NUMBERS)
        return words

    def _is_filled_early(self, name: str) -> bool:
        """Whether the call of the arguments fills this one into the file, so that later changes come too late."""
        path = ARGUMENTS.get(name, ("", 0))[0]
        return path not in (auto.MICRO, auto.STEPS) and self.given.get(path) == "auto"

    def use_width(self, values: Mapping[str, Any], by_trainer: bool) -> Placed:
        """Return `values` with the width of a model that only its text_config has. The Trainer fills
        in by it; accelerate, which does so for the keys of ZeRO 3 below that level, does not find it.
        """
        facts, inner = Placed({}, {}).overlay(values), f"text_config.{WIDTH}"
        if WIDTH in facts and facts[WIDTH] is None:
            del facts[WIDTH]
            for path, rule in auto.RULES.items():
                if self.given.get(path) == "auto" and path not in facts and WIDTH in rule.needs:
                    self.problem(path, f'found "auto", {WITHOUT_WIDTH}')
        if inner not in facts or not by_trainer:
            return facts
        width = facts.pop(inner)
        place = facts.places.pop(inner, Said(inner, width))
        stage = self.given.get("zero_optimization.stage")
        for path, rule in auto.RULES.items():
            open_ = self.given.get(path) == "auto" and path not in facts and WIDTH in rule.needs
            if open_ and ".stage3_" in path and stage != 3:
                self.problem(path, f'found "auto", {NO_WIDTH}')
        return Placed({WIDTH: width}, {WIDTH: place}).overlay(facts)

    def _refuse_arguments(self, arguments: Mapping[str, Any]) -> None:
        """Record what the Trainer refuses of its arguments, each with the place of the argument."""
        outside = {
            name: place_of_argument.value for name, place_of_argument in self.environment.items()
        }
        all_arguments = {**trainer.DEFAULTS, **outside, **arguments}
        self.case = case = trainer.Case(all_arguments, self.given, self.blocks, self.world)
        places = {**self.environment, **self.places}
        for name, message in trainer.find_refusals(case):
            variable = places.get(name, Said(name, None))
            place = f"line {variable.line}: " if variable.line else ""
            self.problems.append(
                f"{f'{variable.source}: ' if place and variable.source else ''}{place}{variable.setting}: {message}"
            )

        if "zero_optimization" not in self.blocks:
            self.problem("zero_optimization", trainer.NEEDS_ZERO)
        package = trainer.find_package(str(arguments.get("optim", "")))
        if package and "optimizer" not in self.blocks:
            self._remark_argument(
                "optim", f"needs the package {package}, without which the run stops", Effect.NONE
            )

    def name_other_file(self, file: str, arguments: Mapping[str, Any] | None) -> None:
        """Report an argument of the Trainer that gives another file of DeepSpeed than `file`, the one that is read."""
        other = (arguments or {}).get(trainer.FILE)
        if file and other and not (isinstance(other, str) and Path(other).name == Path(file).name):
            read_file = Path(file).name
            self._remark_argument(
                trainer.FILE,
                f"found {show_value(other)}, which the Trainer reads, and not {read_file}, which is read here; give"
                f" the same file, or name {read_file} in this argument",
                Effect.NUMBERS,
            )

    def _remark_argument(self, name: str, message: str, effect: Effect) -> None:
        """Record a finding on an argument of the Trainer, where it is written."""
        place = self.places.get(name, Said(name, None))
        origin = Origin(place.line, "", place.source)
        self.findings.append(Finding(place.setting, message, effect, origin=origin))

    def _fill_batch(self, filling: trainer.Filling) -> None:
        """Set the sizes of the batch that the file leaves out. Without accumulation steps accelerate
        writes 1 for DeepSpeed, and the Trainer accumulates by its own argument.
        """
        if auto.STEPS not in filling.demands or auto.MICRO not in filling.values:
            return  # the program changes them
        steps, (demand, _) = filling.values[auto.STEPS], filling.demands[auto.STEPS]
        for path in (auto.STEPS, auto.TOTAL) if steps != demand else ():
            if path in self.given and path in filling.values:
                self._value(path, path, filling.values[path])
        if auto.STEPS not in self.given and steps > 1:
            if demand > 1 and auto.TOTAL in self.given and auto.MICRO in self.given:
                self.problem(
                    auto.TOTAL,
                    f"the file has no {auto.STEPS}, so accelerate writes 1, and DeepSpeed refuses a"
                    f" batch of {steps} micro-batches; write"
                    f' "{auto.STEPS}": "auto"',
                )
            self._value(auto.STEPS, auto.STEPS, steps)
        if auto.MICRO not in self.given and auto.TOTAL in self.given:
            self._value(auto.MICRO, auto.MICRO, filling.values[auto.MICRO])

    def sources(
        self,
        before: Mapping[str, Any],
        arguments: Mapping[str, Any] | None,
        values: Mapping[str, Any],
    ) -> Sources:
        """Return who set each value of a run of the Trainer; `before` has the values of the file."""
        if arguments is None:
            return NO_SOURCES
        settings = Placed({}, {}).overlay(arguments)
        settings.unknown = dict(self.changed)
        fills = trainer.filling(settings, self.world, self.steps).values
        places = values.places if isinstance(values, Placed) else {}
        facts = {name: places.get(name, Said(name, values[name], "--auto")) for name in values}
        run = Run(
            settings,
            before,
            self.given,
            fills,
            self.origins,
            self.blocks,
            facts,
            self.left,
            self.environment,
            self.epoch,
            trainer.split_batch(arguments, self.world),
            self.world,
            self.added,
        )
        return find_sources(run)

    def set_precision(
        self,
        arguments: Mapping[str, Any] | None,
        values: Mapping[str, Any],
        data: Mapping[str, Any],
    ) -> None:
        """Switch on the precision of the run if the file `data` has no section for it, as accelerate
        does (accelerate/utils/dataclasses.py: DeepSpeedPlugin.set_mixed_precision). Report a
        precision that only accelerate knows.
        """
        settings = {**(arguments or {}), **trainer.arguments_of_facts(values)}
        precision = self.environment.get(PRECISION)
        if (
            precision
            and precision.value in PRECISIONS
            and not (settings.get("fp16") or settings.get("bf16"))
        ):
            settings[precision.value] = True
        on = (name for name in PRECISIONS if isinstance(data.get(name), Mapping))
        if arguments is None and any(data[name].get("enabled") is True for name in on):
            return  # the file has a precision, and a value for "auto" says nothing else of it
        if settings.get("fp16") and "fp16" not in data:
            self._value("fp16.enabled", "fp16.enabled", True)
            self._value("fp16.auto_cast", "fp16.auto_cast", True)
        if settings.get("bf16") and "bf16" not in data:
            self._value("bf16.enabled", "bf16.enabled", True)
        is_known = (
            arguments is not None or "bf16" in settings or not data.keys().isdisjoint(PRECISIONS)
        )
        if self.filled and not is_known:
            self.finding("bf16.enabled", UNSAID, Effect.NUMBERS)


def _fits_type(path: str, value: Any) -> bool:
    try:
        typed(path, value)
    except ValueError:
        return False
    return True


def _find_elsewhere(key: str, release: Release) -> str:
    """Return a message about a key or section that only other releases read; empty if no release
    reads it.
    """
    path = ALIASES.get(key, key)
    rows = [row for key, row in KEYS.items() if key == path or key.startswith(path + ".")]
    if not rows:
        return ""
    part = PARTS.get(path)
    instead = next(
        (row.instead for row in rows if row.key == path and row.instead),
        part.instead if part else "",
    )
    # The release reads the key by another of its names.
    if any(row.is_read_by(release.version) for row in rows):
        return f"unknown key{f'; use {instead}' if instead else ''}"
    # A section is as old as its first key, and ends with the first that goes.
    later = [row.since for row in rows if not release.since(row.since)]
    if later:
        first = min(later, key=RELEASES.place)
        return (
            f"DeepSpeed reads this key from {first} on, but the config is for {release.version};"
            " drop the key, or name a later release"
        )
    last = min((RELEASES.last(row.until) for row in rows), key=RELEASES.place)
    return (
        f"only releases up to DeepSpeed {last} read this key, but the config is for"
        f" {release.version}; {f'use {instead}' if instead else 'drop the key'}"
    )


# Writing


def plain(settings: Mapping[str, Any], opaque: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config as the nested mapping that DeepSpeed reads. Keys have their canonical names
    and the order of the schema, and the code part is left out.
    """
    flat = {path: value for path, value in settings.items() if not path.startswith("code.")}
    flat |= {path: value for path, value in opaque.items() if path not in OBJECTS}
    order = {path: place for place, path in enumerate(fields(DeepSpeed))}
    paths = sorted(flat, key=lambda path: (_place(path, order), path))
    return nest({path: flat[path] for path in paths})


def _place(path: str, order: Mapping[str, int]) -> int:
    """Return a number that sorts keys: the position of `path` in the schema. A path that the schema
    does not list gets the position of the last key of its section.
    """
    if path in order:
        return order[path]
    # An argument that no schema lists stands behind the last known one of its section.
    parent = path.rpartition(".")[0] + "."
    return max(
        (place for sibling, place in order.items() if sibling.startswith(parent)),
        default=len(order),
    )


def text(settings: Mapping[str, Any], opaque: Mapping[str, Any]) -> str:
    """Return the settings as JSON text, indented by two spaces, with a line break at the end."""
    return json.dumps(plain(settings, opaque), indent=2, allow_nan=False) + "\n"
