"""Reads a run under accelerate into typed values by path, and writes its config file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bridge.errors import ConfigError, SourceError
from bridge.files import Document, load, spell_yaml
from bridge.plan.section import Values, fields, nest
from bridge.stack.dialect import Reading, Written
from bridge.stack.findings import Origin
from bridge.stack.launch_command import HEAD, nodes
from bridge.stack.rules import Effect
from bridge.stack.sources import ResolvedRun, Said
from compat.accelerate import host, trainer
from compat.accelerate.launcher import TYPES, Given, Machine, name_option, set_environment
from compat.accelerate.plugins import MEGATRON as PLUGIN, Plugins
from compat.accelerate.recognition import SWITCH, recognises
from compat.accelerate.schema import (
    ARGUMENTS,
    FSDP,
    MEGATRON,
    OPTIONS,
    SCHEMA,
    SIZES,
    TRAINER,
    path_of,
)
from compat.accelerate.slots import OVER_SECTIONS, Refusal, Run, facts, is_true, since

FILE, KIND, RANKS = "accelerate.yaml", "distributed_type", "num_processes"
OWN = {"XLA": "TPUs", "DEEPSPEED": "DeepSpeed"}
"""Types of runs that this dialect does not translate."""
STEPS = ARGUMENTS + "gradient_accumulation_steps"
ARGUMENTS_FILE = ".arguments.json"


def read(source: Any, question: host.Question) -> Reading:
    """Read a config of accelerate, or a script that starts a run by it: a path, text, mapping or document.

    Raises one error with everything that stops the run.
    """
    text = source.text if isinstance(source, Written) else source
    document = Document(text, {}, "yaml") if isinstance(text, Mapping) else load(text)
    if not recognises(document.data):
        raise SourceError(
            f"{document.name}: no config of accelerate, and no script that starts a run by it"
        )
    told = host.read_sources(document, question)
    run = host.resolve_sources(told, question)
    stops = [one for one in run.findings if one.effect is Effect.STOPS]
    settings = {} if stops else {**dict(_sort_settings(told)), **dict(_sort_variables(told, run))}
    given = {path: said.value for path, said in settings.items()}
    origins = {
        path: Origin(said.line, said.setting, said.source) for path, said in settings.items()
    }
    findings = tuple(one for one in run.findings if one.effect is not Effect.STOPS)
    return Reading(Values(given), "file", origins, findings, world_size=given.get(RANKS)).unless(
        [
            *(f"{one.origin or ''}: {one.path}: {one.message}".lstrip(": ") for one in stops),
            *(
                f"{KIND}: found {kind}: stagebridge reads runs of {name} by `resolve` alone"
                for kind, name in OWN.items()
                if given.get(KIND) == kind
            ),
        ]
    )


def _sort_settings(told: host.Told) -> Iterator[tuple[str, Said]]:
    """Yield the settings in force by path: of the config file, then of options, then what the Trainer says."""
    given, arguments = told.given, told.arguments
    config = dict[str, Said]()
    for path, said in (given.config or {}).items():
        section, dot, key = path.partition(".")
        config[f"{section}.{name_option(section, key)}" if dot else path] = said
    for path, said in config.items():
        yield from _type_setting(path, said)
    modes = {option: kind for kind, option in reversed([*TYPES.items()])}
    for name, said in given.options.items():
        if name in modes and said.value:
            yield KIND, Said(said.setting, modes[name], said.source, said.line)
        elif name == "cpu" and said.value:
            yield KIND, Said(said.setting, "NO", said.source, said.line)
        path = path_of(name)
        if since(OVER_SECTIONS) or "." not in path or path not in config:
            yield from _type_setting(path, said)
    many = given.options.get(RANKS)
    if given.config is None and many is not None and not modes.keys() & given.options.keys():
        yield (
            KIND,
            Said(many.setting, "MULTI_GPU" if many.value != 1 else "NO", many.source, many.line),
        )
    yield from (("mixed_precision", one) for one in (told.program.get("mixed_precision"),) if one)
    for name, said in arguments.own.items():
        if name in TRAINER:
            yield from _type_setting(ARGUMENTS + name, said)
    yield from _type_setting(STEPS, arguments.steps) if arguments.steps else ()
    if arguments.value(SWITCH):
        switch = arguments.own[SWITCH]
        yield KIND, Said(switch.setting, "FSDP", switch.source, switch.line)
        environment, _ = trainer.pass_on(arguments, {})
        for variable, slot in environment.items():
            name = (
                variable.removeprefix("FSDP_")
                .lower()
                .replace("transformer_cls", "transformer_layer_cls")
            )
            if variable.startswith("FSDP_"):
                yield from _type_setting(
                    FSDP + name,
                    Said(slot.said.setting, slot.value, slot.said.source, slot.said.line),
                )
    if told.world:
        yield RANKS, Said("ranks", told.world)


STARTS = {
    "FSDP_": FSDP,
    "MEGATRON_LM_": MEGATRON,
    "PARALLELISM_CONFIG_": SIZES,
    "ACCELERATE_DYNAMO_": "dynamo_config.dynamo_",
    "ACCELERATE_MIXED_": "mixed_",
}
"""What the path of a variable's setting begins with in place of the variable's beginning."""


def _sort_variables(told: host.Told, run: ResolvedRun) -> Iterator[tuple[str, Said]]:
    """Yield the settings in force by path that variables give, and what else `Accelerator()` of a program says."""
    alone = told.given.starter != "accelerate" and not told.arguments.own
    for one in run.resolution.settings:
        said = one.winner
        is_given = said in (*told.given.environment.values(), *told.program.values())
        if one.setting == KIND and (alone or is_given):
            yield KIND, Said(said.setting, one.value, said.source, said.line)
        elif one.setting == "gradient_accumulation_steps" and is_given:
            yield from _type_setting(STEPS, said)
        for start, section in STARTS.items():
            if is_given and said.setting.startswith(start):
                name = said.setting.removeprefix(start).lower()
                name = name.replace("transformer_cls", "transformer_layer_cls")
                yield from _type_setting(section + name, said)


def _type_setting(path: str, said: Said) -> Iterator[tuple[str, Said]]:
    """Yield a setting with a value of its type; nothing for one without a value, or of no such path."""
    if path not in fields(SCHEMA) or said.value is None:
        return
    kind, value = str(fields(SCHEMA)[path].annotation), said.value
    try:
        if kind.startswith("bool"):
            value = is_true(value)
        elif kind.startswith(("int", "float")):
            value = int(value) if kind.startswith("int") else float(value)
        elif kind.startswith("str"):
            value = (
                ",".join(value)
                if isinstance(value, list)
                else "no"
                if value is False
                else str(value)
            )
    except (Refusal, TypeError, ValueError):
        return  # the launcher has refused it, or reads it as something else
    yield path, Said(said.setting, value, said.source, said.line)


def has_setting(path: str) -> bool:
    """Return whether the release of the run has a setting of our schema."""
    top, _, name = path.partition(".")
    known = {row["name"] for row in facts()["options"]}
    return path.startswith(ARGUMENTS) or (
        top in facts()["keys"] and (name in known or name not in OPTIONS)
    )


def fill_in(given: Mapping[str, Any], world: int | None, read: bool) -> dict[str, Any]:
    """Return all values of a run: those given, and the defaults of its kind. Those of the Trainer are filled in where
    its arguments were `read`; what a plan leaves open stays so. Raises `ConfigError` if the run is refused.
    """
    if world and (ranks := given.get(RANKS)) and ranks != world:
        raise ConfigError(f"{RANKS}: found {ranks}, expected {world}, the number of ranks")
    config = {
        path: Said(path, value)
        for path, value in {RANKS: world or 2, KIND: "NO", **given}.items()
        if not path.startswith(ARGUMENTS)
    }
    run = Run()
    try:
        environment, ranked = set_environment(Given(config=config), Machine(), run)
        Plugins(environment, ranked, Machine(), run).build()
    except Refusal as error:
        raise ConfigError(
            f"{error.said.setting if error.said else KIND}: {error.message}"
        ) from None
    # The steps of accumulation are also an argument of `Accelerator`, and no sign of the Trainer.
    is_trained = read and any(path.startswith(ARGUMENTS) and path != STEPS for path in given)
    usual = {ARGUMENTS + name: value for name, value in TRAINER.items() if is_trained}
    sections = ("fsdp_",) if given.get(KIND) == "FSDP" else ()
    for name, row in OPTIONS.items():
        if name.startswith((*sections, "parallelism_config_")) and row["default"] is not None:
            usual |= {
                path: said.value
                for path, said in _type_setting(path_of(name), Said(name, row["default"]))
            }
    names = {f"megatron_lm.{name}": MEGATRON + key.lower() for name, key, *_ in PLUGIN}
    plugin = {names[one.setting]: one.value for one in run.settings if one.setting in names}
    return {
        "mixed_precision": "no",
        KIND: "NO",
        **usual,
        **({RANKS: world} if world else {}),
        **{path: value for path, value in given.items() if not path.startswith(MEGATRON)},
        **plugin,
    }


GONE = (
    "backward_prefetch",
    "forward_prefetch",
    "sync_module_states",
    "use_orig_params",
    "sharding_strategy",
)
"""Keys of FSDP 1 that FSDP 2 does not have."""
GATHERED = ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2", "NO_SHARD")
"""Strategies of FSDP 1 that keep weights whole after the forward pass."""


def convert_to_fsdp2(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return settings of FSDP 1 as those of FSDP 2 (accelerate/commands/to_fsdp2.py); others as they are."""
    if given.get(KIND) != "FSDP" or given.get(FSDP + "version") == 2:
        return given
    kept = {path: value for path, value in given.items() if path.removeprefix(FSDP) not in GONE}
    strategy = given.get(FSDP + "sharding_strategy")
    again = {FSDP + "reshard_after_forward": strategy not in GATHERED} if strategy else {}
    return {**kept, **again, FSDP + "version": 2}


def write(given: Mapping[str, Any]) -> Written:
    """Return the config file, with the arguments of the Trainer in a file beside it, and the command."""
    own = {"compute_environment": "LOCAL_MACHINE", **given}
    words = {
        path.removeprefix(ARGUMENTS): own.pop(path) for path in given if path.startswith(ARGUMENTS)
    }
    machines, _ = nodes(given.get(RANKS) or 1)
    several = (
        ("--num_machines", str(machines), "--machine_rank", "RANK", "--main_process_ip", HEAD)
        if machines > 1
        else ()
    )
    # Without other arguments nothing shows that the program is the Trainer's, and any hears this variable.
    steps = () if words.keys() != {"gradient_accumulation_steps"} else words.popitem()
    beside = {ARGUMENTS_FILE: json.dumps(words, indent=2) + "\n"} if words else {}
    launch = (
        *(f"ACCELERATE_GRADIENT_ACCUMULATION_STEPS={value}" for value in steps[1:]),
        "accelerate",
        "launch",
        "--config_file",
        FILE,
        *several,
        "train.py",
        *(str(Path(FILE).with_suffix(suffix)) for suffix in beside),
    )
    return Written(
        "accelerate", spell_yaml(nest(own)), "yaml", launch=launch, file=FILE, beside=beside
    )
