"""Reads what `accelerate launch` makes of its options and of its config file: DeepSpeed's config, and values for "auto".

The module follows _validate_launch_command (accelerate/commands/launch.py), prepare_deepspeed_cmd_env
(utils/launch.py), and DeepSpeedPlugin (utils/dataclasses.py: __post_init__, set_mixed_precision).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from bridge.errors import SourceError
from bridge.files import Document, Launch, Script, scalar
from bridge.files.document import Key
from bridge.plan.section import nest
from bridge.shell import Pieces, cut, line_of, spell_pieces, text_if_known, unknowns
from bridge.shell.word_pieces import NOWHERE, Text
from bridge.stack.findings import Finding, Origin, unknown
from bridge.stack.program_source import VARIABLE_WINS
from bridge.stack.rules import Effect
from bridge.stack.sources import Claim, Placed, Said, Sources, Unheard

PROGRAMS = frozenset(
    {
        "accelerate",
        "accelerate.commands.accelerate_cli",
        "accelerate-launch",
        "accelerate.commands.launch",
    }
)
MODES: Mapping[str, str] = {
    "multi_gpu": "MULTI_GPU",
    "tpu": "XLA",
    "tpu_use_cluster": "XLA",
    "use_fsdp": "FSDP",
    "use_megatron_lm": "MEGATRON_LM",
}
"""Options by which accelerate does not look for DeepSpeed in its config file, and what they ask for instead."""
ALONE = ("multi_gpu", "cpu", "tpu", "use_deepspeed", "use_fsdp")
"""Options of which accelerate takes one."""
SECTION, FILE, CONFIG, SWITCH = (
    "deepspeed_config",
    "deepspeed_config_file",
    "config_file",
    "use_deepspeed",
)
FACTS: Mapping[str, tuple[str, str]] = {
    "gradient_accumulation_steps": ("gradient_accumulation_steps", "accumulation"),
    "gradient_clipping": ("gradient_clipping", "clip"),
    "zero_stage": ("zero_optimization.stage", "zero_stage"),
    "offload_optimizer_device": ("zero_optimization.offload_optimizer.device", "offload_optimizer"),
    "offload_param_device": ("zero_optimization.offload_param.device", "offload_param"),
    "zero3_save_16bit_model": (
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
        "save_16bit",
    ),
}
"""The key of DeepSpeed that each setting of accelerate sets, and the fact that replaces "auto" there."""
USUAL: Mapping[str, Any] = {
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_stage": 2,
    "offload_optimizer_device": "none",
    "offload_param_device": "none",
    "zero3_save_16bit_model": False,
}
PATHS = {
    "offload_optimizer_device": "offload_optimizer_nvme_path",
    "offload_param_device": "offload_param_nvme_path",
}
NO_PATH = "none"
"""The path that DeepSpeed always gets: the launcher does not pass these settings on."""
CLIP = 1.0
"""The norm for a `gradient_clipping` of "auto" (accelerator.py: _prepare_deepspeed)."""
PRECISION = "mixed_precision"
STEPS = "gradient_accumulation_steps"
ADDER = "accelerate"
PRECISE = ("fp16.enabled", "bf16.enabled")
BESIDE: Mapping[str, str] = {
    "gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "gradient_clipping": "ACCELERATE_GRADIENT_CLIPPING",
    "zero_stage": "ACCELERATE_DEEPSPEED_ZERO_STAGE",
    "offload_optimizer_device": "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
    "offload_param_device": "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE",
    "zero3_save_16bit_model": "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL",
    PRECISION: "ACCELERATE_MIXED_PRECISION",
}
"""The variable of each setting that accelerate's plugin reads. The launcher writes it where an option or its config file
has the setting, and the one of the precision always (utils/launch.py: prepare_deepspeed_cmd_env).
"""
OF_FILE, OF_SWITCH = "ACCELERATE_DEEPSPEED_CONFIG_FILE", "ACCELERATE_USE_DEEPSPEED"
"""The variables of the DeepSpeed file, and with which `Accelerator()` runs DeepSpeed whatever starts its program."""
VARIABLE = re.compile(r"(ACCELERATE|FSDP)_[A-Z0-9_]+")
IDLE = "FSDP_", "DeepSpeed runs this, and accelerate then makes no plugin for FSDP"
"""What the variables that nobody hears begin with, and why."""
READ = re.compile(
    rf"FSDP_\w+|{'|'.join((*BESIDE.values(), OF_FILE))}|ACCELERATE_(CONFIG_DS_FIELDS|(USE|DISABLE|ENABLE|LOG|DEBUG|CPU)_\w+"
    r"|DEEPSPEED_ZERO3_INIT)"
)
"""Variables that are read here, or that no step of a run with DeepSpeed depends on."""
OVER = "options of the launch count over its config file, and both over the shell"
WRITES = "accelerate launch writes this variable itself, also where nothing gives a precision; give --mixed_precision"
SECTIONS: Mapping[str, tuple[str, str]] = {
    "FSDP": ("fsdp_config", "fsdp_"),
    "MEGATRON_LM": ("megatron_lm_config", "megatron_lm_"),
}
"""The section of each kind of run in accelerate's config file, and the beginning of its options."""
LOSES = 'accelerate fills in an "auto" of the DeepSpeed file, and keeps what stands there'
PRINTS = "accelerate always sets this key, so that DeepSpeed prints nothing"
NO_CALL: Mapping[str, Said] = {}
Opens = Callable[[Pieces, int], Document]
"""Reads a file that the launch names on a line."""


@dataclass(frozen=True)
class Started:
    """What accelerate passes to DeepSpeed: the config, facts that replace "auto", the number of ranks, findings, and
    who sets what.
    """

    document: Document
    facts: Mapping[str, Any]
    ranks: int | None
    findings: tuple[Finding, ...]
    sources: Sources


@dataclass(frozen=True)
class Passed:
    """What a launch of accelerate adds to a run whose program names a DeepSpeed file: variables that its plugin reads
    next to that file, settings that nobody hears, the number of ranks, and findings.
    """

    environment: Mapping[str, Said] = field(default_factory=dict)
    unheard: tuple[Unheard, ...] = ()
    ranks: int | None = None
    findings: tuple[Finding, ...] = ()


def options(launch: Launch) -> dict[str, Pieces] | None:
    """Return the options of `accelerate launch`, each with its value; None if accelerate does not start the run."""
    names = [spell_pieces(word).rpartition("/")[2] for word in launch.launcher]
    first = next((index for index, name in enumerate(names) if name in PROGRAMS), None)
    if first is None:
        return None
    values: dict[str, Pieces] = {}
    for index, word in enumerate(launch.launcher[first:], first + 1):
        option, tied, _ = spell_pieces(word).partition("=")
        after = launch.launcher[index] if index < len(launch.launcher) else ()
        if option.startswith("--"):
            value = (
                cut(word, len(option) + 1)
                if tied
                else ()
                if spell_pieces(after).startswith("--")
                else after
            )
            # accelerate takes each option with hyphens and with underscores.
            values[option.removeprefix("--").replace("-", "_")] = value
    return values


def _read_settings(
    options: Mapping[str, Pieces], opens: Opens, line: int
) -> tuple[Mapping[str, Any], Document | None]:
    """Return the data of accelerate's config file; empty without a file."""
    document = opens(options[CONFIG], line) if CONFIG in options else None
    data = document.data if document else {}
    if not isinstance(data, Mapping):
        raise SourceError(
            f"{document.name if document else ''}: expected a config of accelerate, a mapping of keys"
        )
    return data, document


def _uses_deepspeed(options: Mapping[str, Pieces], data: Mapping[str, Any]) -> bool:
    return _find_kind(options, data) == "DEEPSPEED"


def _find_kind(options: Mapping[str, Pieces], data: Mapping[str, Any]) -> str:
    """Return the distributed type of a launch; empty if neither its options nor its config file tell it."""
    if SWITCH in options:
        return "DEEPSPEED"
    if mode := next((name for name in MODES if name in options), ""):
        return MODES[mode]
    if CONFIG in options:
        return str(data.get("distributed_type", "")).rpartition(".")[2]
    return "DEEPSPEED" if FILE in options else ""


def starts(launch: Launch, script: Script, opens: Opens) -> bool:
    """Return whether accelerate runs the launch with DeepSpeed."""
    words = options(launch)
    if words is None:
        return _is_switched_on(launch, script)
    return _uses_deepspeed(words, _read_settings(words, opens, launch.line)[0])


def _is_switched_on(launch: Launch, script: Script) -> bool:
    """Return whether the environment of a launch has accelerate run DeepSpeed (Accelerator.__init__)."""
    said = read_environment(launch, script).get(OF_SWITCH)
    return said is not None and str(said.value).lower() == "true"


def name_other_run(launch: Launch, opens: Opens) -> str:
    """Return what accelerate starts, and the nearest way, for a launch of accelerate without DeepSpeed."""
    words = options(launch)
    if words is None:
        return ""
    try:
        data, _ = _read_settings(words, opens, launch.line)
    except SourceError as error:
        return f"a launch of accelerate: {error}"
    if _uses_deepspeed(words, data):
        return ""
    kind = data.get("distributed_type", next((name for name in sorted(MODES) if name in words), ""))
    source = (
        f"distributed_type {kind}"
        if CONFIG in words
        else f"--{kind}"
        if kind
        else "no --config_file"
    )
    return (
        f"a launch of accelerate without DeepSpeed ({source}), whose settings are in the program"
        f" {launch.program} and in no config; of accelerate, stagebridge reads DeepSpeed's side: launch with"
        " --use_deepspeed, or with the --config_file whose distributed_type is DEEPSPEED; or describe the run"
        " as a recipe of NeMo AutoModel"
    )


def read(
    launch: Launch,
    script: Script,
    opens: Opens,
    program: Said | None = None,
    call: Mapping[str, Said] = NO_CALL,
) -> Started | None:
    """Return what accelerate passes to DeepSpeed; None if it does not start the run with DeepSpeed.

    `program` is the precision that the program's TrainingArguments set, which then counts; `call` has arguments of
    its `Accelerator`.
    """
    words = options(launch)
    alone = words is None and _is_switched_on(launch, script)
    words = {SWITCH: ()} if alone else words
    if words is None:
        return None
    data, config = _read_settings(words, opens, launch.line)
    if not _uses_deepspeed(words, data):
        return None
    section, typed_values = data.get(SECTION) or {}, _read_typed(words, launch, script)
    places = _place_settings(words, typed_values, section, data, config, launch, script, alone)
    shell = read_environment(launch, script)
    chosen = {
        **({FILE: shell[OF_FILE].value} if OF_FILE in shell else {}),
        **{name: value for name, value in section.items() if value is not None},
        **places,
        **typed_values,
    }
    precision = program.setting.lstrip("-") if program else _name_precision(chosen.get(PRECISION))
    settings = {name: _spell_setting(chosen.get(name, usual)) for name, usual in USUAL.items()}
    facts = {FACTS[name][1]: value for name, value in settings.items() if value != "auto"}
    facts = {PRECISION: precision, "clip": CLIP, "nvme_path": NO_PATH, **facts}
    findings = [*_find_modes(words, launch), *find_strange(shell)]
    findings += _find_refusals(section, typed_values, data, config) if FILE in chosen else ()
    findings += _find_unpassed(chosen, settings, launch.line)
    if FILE in chosen:
        document = opens(words.get(FILE) or (Text(str(chosen[FILE]), NOWHERE),), launch.line)
        whole = (
            {"gradient_accumulation_steps": 1, **document.data}
            if isinstance(document.data, Mapping)
            else {}
        )
        if (steps := whole.get("gradient_accumulation_steps")) not in (1, "auto", None):
            # accelerator.py: _prepare_deepspeed; scheduler.py: step
            message = (
                f"the file's {steps} wins over the number of the script's own Accelerator, which is 1 unless the script"
                " gives another; before accelerate 0.23 the Accelerator's wins, and from there to 1.7 the script's"
                " schedule steps with every micro-batch"
            )
            findings.append(Finding("gradient_accumulation_steps", message, Effect.NONE))
    else:
        document, whole = (
            config or Document({}, {}, "json", name=script.name),
            _build_config(settings),
        )
        lines: dict[Key, int] = {
            tuple(FACTS[str(key[1])][0].split(".")): line
            for key, line in document.lines.items()
            if len(key) == 2 and key[0] == SECTION and key[1] in FACTS
        }
        document = replace(document, lines=lines)
    if FILE in words and SWITCH not in words and CONFIG not in words:
        message = (
            "accelerate reads this file only with --use_deepspeed, or if its config file says distributed_type:"
            " DEEPSPEED; stagebridge assumes that your default config says so; add --use_deepspeed"
        )
        findings.append(Finding(f"--{FILE}", message, Effect.NUMBERS, origin=Origin(launch.line)))
    findings += _find_clash(whole, precision)
    ranks = data.get("num_processes")
    ranks = ranks if isinstance(ranks, int) and ranks > 0 else None
    mixed = _mix_precisions(whole, precision)
    sources = _find_sources(places, mixed, document, FILE in chosen, program)
    sources = replace(sources, unheard=(*sources.unheard, *_find_idle(shell)))
    steps = call.get(STEPS)
    if steps and "cpu" not in call:
        is_open = _fill_in(mixed, places).get(STEPS) == "auto"
        facts |= {"accumulation": steps.value} if is_open else {}
        own = {STEPS: steps} if is_open else {}
        claim = Claim(STEPS, steps.value, steps, VARIABLE_WINS)
        sources = replace(
            sources, winners={**sources.winners, **own}, claims=(*sources.claims, claim)
        )
    document = replace(document, data=_fill_in(mixed, places), strings={})
    world = launch.ranks or (None if launch.unranked else ranks)
    return Started(document, facts, world, tuple(findings), sources)


def _read_typed(words: Mapping[str, Pieces], launch: Launch, script: Script) -> dict[str, Any]:
    """Return the options of a launch for DeepSpeed, in its order."""
    names = [name for name in words if name in {*FACTS, PRECISION, FILE}]
    for name in names:
        if part := next(unknowns(words[name]), None):
            raise SourceError(
                f"{script.name}: line {launch.line}: --{name}: {part.spelling} is not known: {part.why}"
            )
    return {name: scalar(text_if_known(words[name]) or "") for name in names}


def read_environment(launch: Launch, script: Script) -> dict[str, Said]:
    """Return accelerate's variables in the environment of a launch: those that the user gives, and the script's.

    Raises `SourceError` for one of `BESIDE` whose value is not known.
    """
    words = {name: word for name, word in launch.environment.items() if VARIABLE.fullmatch(name)}
    for variable in BESIDE.values():
        for part in unknowns(words.get(variable, ())):
            raise SourceError(
                f"{script.name}: line {part.line}: {variable}: {part.spelling} is not known: {part.why}"
            )
    outside = {name: text for name, text in script.outside.items() if VARIABLE.fullmatch(name)}
    given = {name: Said(name, scalar(text), "environment") for name, text in outside.items()}
    return given | {
        name: Said(name, scalar(text), "", line_of(word, script.text) or launch.line)
        for name, word in words.items()
        if (text := text_if_known(word)) is not None
    }


def find_strange(environment: Mapping[str, Said]) -> Iterator[Finding]:
    """Yield a finding for each of accelerate's variables that may change a run and that is not read here."""
    for name, said in environment.items():
        if not READ.fullmatch(name):
            message = "accelerate reads this variable, and stagebridge does not"
            yield unknown(name, message, origin=Origin(said.line), end="")


def _find_idle(environment: Mapping[str, Said]) -> Iterator[Unheard]:
    begin, why = IDLE
    yield from (
        Unheard(said, why, Effect.COST)
        for name, said in environment.items()
        if name.startswith(begin)
    )


def pass_on(launch: Launch, script: Script, opens: Opens, winner: Said) -> Passed:
    """Return what a launch of accelerate adds to a run whose program names a DeepSpeed file, which wins: `winner`.

    It follows TrainingArguments.__post_init__, whose plugin has the file of the argument, and PartialState, which
    takes DeepSpeed for it whatever the launcher says.
    """
    words, shell = options(launch), read_environment(launch, script)
    if words is None:
        return Passed(shell, tuple(_find_idle(shell)), findings=(*find_strange(shell),))
    findings = [*_find_modes(words, launch), *find_strange(shell)]
    try:
        data, config = _read_settings(words, opens, launch.line)
    except SourceError as error:
        message = f"not read, so that its number of ranks and its settings are not known: {error}"
        findings.append(unknown(f"--{CONFIG}", message, origin=Origin(launch.line), end=""))
        data, config = {}, None
    kind, typed_values = _find_kind(words, data), _read_typed(words, launch, script)
    section = (data.get(SECTION) or {}) if kind == "DEEPSPEED" else {}
    if kind == "DEEPSPEED":
        findings += _find_refusals(section, typed_values, data, config)
    settings = _place_settings(words, typed_values, section, data, config, launch, script)
    written = {variable: name for name, variable in BESIDE.items()}
    environment = {name: said for name, said in shell.items() if name not in written} | {
        variable: settings.places[name] for variable, name in written.items() if name in settings
    }
    why = describe_winner(winner)
    unheard = [*settings.lost, *_find_idle(shell)]
    unheard += _find_replaced(kind, words, data, config, launch, script, winner.value, why)
    ranks = data.get("num_processes")
    ranks = ranks if isinstance(ranks, int) and ranks > 0 and not launch.unranked else None
    return Passed(environment, tuple(unheard), launch.ranks or ranks, tuple(findings))


def describe_winner(winner: Said) -> str:
    """Return the reason why nobody hears what contradicts the DeepSpeed file of the program."""
    place = f" ({winner.place})" if winner.line else ""
    return f"{winner.setting} {winner.value} of the program{place} wins"


def _find_replaced(
    kind: str,
    words: Mapping[str, Pieces],
    data: Mapping[str, Any],
    config: Document | None,
    launch: Launch,
    script: Script,
    winner: str,
    why: str,
) -> Iterator[Unheard]:
    """Yield what the launcher says of another way to share the model, or of another DeepSpeed file than `winner`."""
    name_of_section, start = SECTIONS.get(
        kind, (SECTION, FILE) if kind == "DEEPSPEED" else ("", "")
    )
    if not start:
        return
    section = data.get(name_of_section) or {}
    keys = [name for name in section if kind != "DEEPSPEED" or name == FILE]
    file = config.name if config else ""
    for name in keys:
        if name == FILE and str(section[name]) == winner:
            continue
        place = Said(
            name, section[name], file, config.line(name_of_section, name) if config else None
        )
        yield Unheard(place, why, Effect.NUMBERS if name == FILE else Effect.NONE)
    for name, value in words.items():
        if name.startswith(start):
            line = line_of(value, script.text) or launch.line
            place = Said(f"--{name}", scalar(text_if_known(value) or "true"), "", line)
            yield Unheard(place, why, Effect.NUMBERS if name == FILE else Effect.NONE)
    if kind in SECTIONS:
        option = next((name for name in words if MODES.get(name) == kind), "")
        at = launch.line if option or config is None else config.line("distributed_type")
        setting, source = (f"--{option}", "") if option else ("distributed_type", file)
        yield Unheard(Said(setting, kind, source, at), why)


def _find_modes(words: Mapping[str, Pieces], launch: Launch) -> Iterator[Finding]:
    """Yield a finding if the launch has two options of which accelerate takes one."""
    modes = [name for name in ALONE if name in words]
    if len(modes) > 1:
        message = (
            f"accelerate refuses {' and '.join(f'--{name}' for name in modes)} together"
            " (commands/launch.py: _validate_launch_command); keep one of them"
        )
        yield Finding(f"--{modes[0]}", message, Effect.STOPS, True, origin=Origin(launch.line))


def _place_settings(
    words: Mapping[str, Pieces],
    typed_values: Mapping[str, Any],
    section: Mapping[str, Any],
    data: Mapping[str, Any],
    config: Document | None,
    launch: Launch,
    script: Script,
    alone: bool = False,
) -> Placed:
    """Return the settings of accelerate for DeepSpeed; options of the launch win over its config file, and both over
    variables of the shell. These are `alone` where something else starts the program.
    """
    shell = read_environment(launch, script)
    variables = {name: shell[one] for name, one in BESIDE.items() if one in shell}
    own = None if alone else variables.pop(PRECISION, None)
    keys: dict[str, tuple[str, ...]] = {
        name: (SECTION, name) for name in FACTS if section.get(name) is not None
    }
    keys |= {PRECISION: (PRECISION,)} if data.get(PRECISION) is not None else {}
    values = {name: section.get(name, data.get(name)) for name in keys}
    file = config.name if config else ""
    lines = {name: config.line(*key) if config else None for name, key in keys.items()}
    places = {name: Said(name, value, file, lines[name]) for name, value in values.items()}
    options = {name: typed_values[name] for name in words if name in typed_values and name != FILE}
    option_places = {
        name: Said(f"--{name}", value, "", line_of(words[name], script.text) or launch.line)
        for name, value in options.items()
    }
    found = Placed({name: said.value for name, said in variables.items()}, variables)
    found = found.overlay(Placed(values, places), OVER).overlay(
        Placed(options, option_places), OVER
    )
    if own and _name_precision(own.value) != _name_precision(found.get(PRECISION)):
        found.lost.append(Unheard(own, WRITES))
    return found


def _name_precision(value: Any) -> str:
    """Return a precision in small letters. YAML reads the word no as false."""
    return str(value or "no").lower()


def _find_sources(
    settings: Placed,
    config: Mapping[str, Any],
    document: Document,
    by_file: bool,
    program: Said | None,
) -> Sources:
    """Return who sets what of the config `config` for DeepSpeed. A file of DeepSpeed wins over settings of
    accelerate, which fill in its "auto"; without one, accelerate builds the config from these settings. The
    precision of the program wins over accelerate's.
    """
    paths = {path for path in flat(config) if tuple(path.split(".")) in document.lines}
    winners = {path: Said(path, value, ADDER) for path, value in flat(config).items()}
    winners = {path: place for path, place in winners.items() if path not in paths}
    claims, values = list[Claim](), {"steps_per_print": "inf"}
    winners["steps_per_print"] = Said("steps_per_print", "inf", ADDER)
    for name, value in settings.items():
        place, path = settings.places[name], FACTS.get(name, ("", ""))[0]
        if name == PRECISION and program:
            is_off = str(value).lower() in ("no", "false")
            path = f"{program.setting.lstrip('-') if is_off else value}.enabled"
            why = f"{program.setting} of the program wins over accelerate's precision"
            claims.append(Claim(path, not is_off, place, why))
            continue
        if name == PRECISION:
            path, value = f"{'bf16' if value == 'fp8' else value}.enabled", True
        if path in winners or not by_file or flat(config).get(path) == "auto":
            winners[path] = place
        if path in PRECISE or name in FACTS:
            effect = Effect.COST if path.startswith("zero_") else Effect.NUMBERS
            claims.append(Claim(path, value, place, LOSES, effect))
    if program and (path := f"{program.setting.lstrip('-')}.enabled") in winners:
        winners[path] = program
    if "steps_per_print" in config:
        line = document.line("steps_per_print")
        place = Said("steps_per_print", config["steps_per_print"], document.name, line)
        claims.append(Claim("steps_per_print", place.value, place, PRINTS, Effect.NONE))
    return Sources(tuple(claims), winners, values, tuple(settings.lost))


def _fill_in(config: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with each "auto" for which the launch has an option, as accelerate's plugin fills it in.

    It refuses a config file with such settings next to a DeepSpeed file.
    """
    filled = copy.deepcopy(dict(config))
    for name, (path, _) in FACTS.items():
        *sections, key = path.split(".")
        inner: Any = filled
        for section in sections:
            inner = inner.get(section) if isinstance(inner, dict) else None
        if name in settings and isinstance(inner, dict) and inner.get(key) == "auto":
            inner[key] = _spell_setting(settings[name])
    return filled


def flat(section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of a nested config by path."""
    values: dict[str, Any] = {}
    for name, value in section.items():
        inner = isinstance(value, Mapping)
        values |= flat(value, f"{prefix}{name}.") if inner else {prefix + name: value}
    return values


def _spell_setting(value: Any) -> Any:
    """Return a setting as accelerate takes it from its environment variable."""
    if isinstance(value, str):
        text = value.lower()
        return {"true": True, "false": False}.get(
            text, text if text in ("none", "auto", "cpu", "nvme") else value
        )
    return value


def _build_config(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config that accelerate builds where no file of DeepSpeed is named."""
    flat = {
        FACTS[name][0]: value
        for name, value in settings.items()
        if value or name != "gradient_clipping"
    }
    for name in PATHS:
        if settings[name] == "nvme":
            flat[FACTS[name][0].replace("device", "nvme_path")] = NO_PATH
    return {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", **nest(flat)}


def _mix_precisions(data: Mapping[str, Any], precision: str) -> dict[str, Any]:
    """Return a config with the sections of both 16-bit formats, as accelerate completes it."""
    on = {"fp16": {"enabled": True, "auto_cast": True}} if precision == "fp16" else {}
    on |= {"bf16": {"enabled": True}} if precision in ("bf16", "fp8") else {}
    return {**{name: {"enabled": False} for name in ("fp16", "bf16")}, **on, **data}


def _find_clash(data: Mapping[str, Any], precision: str) -> Iterator[Finding]:
    other = {"fp16": "bf16", "bf16": "fp16", "fp8": "fp16"}.get(precision, "")
    section = data.get(other)
    if isinstance(section, Mapping) and str(section.get("enabled")).lower() == "true":
        message = f"accelerate refuses this section with the mixed_precision {precision} of the launch; keep one of them"
        yield Finding(f"{other}.enabled", message, Effect.STOPS)


def _find_unpassed(
    chosen: Mapping[str, Any], settings: Mapping[str, Any], line: int
) -> Iterator[Finding]:
    for device, path in PATHS.items():
        if settings[device] == "nvme" and FILE not in chosen:
            message = (
                f"accelerate's launcher does not pass {path} on (utils/launch.py: prepare_deepspeed_cmd_env), so that"
                f' DeepSpeed gets the path "{NO_PATH}"; name a DeepSpeed file with the path in {FILE}'
            )
            yield Finding(path, message, Effect.COST, origin=Origin(line))


def _find_refusals(
    section: Mapping[str, Any],
    typed_values: Mapping[str, Any],
    data: Mapping[str, Any],
    config: Document | None,
) -> Iterator[Finding]:
    """Yield a finding for each setting that accelerate's config file may not have where it names a file of DeepSpeed."""
    names = [name for name in section if name in FACTS]
    if PRECISION not in typed_values and data.get(PRECISION) is not None:
        names.append(PRECISION)
    for name in names:
        message = (
            f"accelerate refuses to start: its config file may not have {name} where it names a DeepSpeed file"
            " (DeepSpeedPlugin._deepspeed_config_checks); keep the setting in the DeepSpeed file alone"
        )
        line = config.line(*((SECTION, name) if name in FACTS else (name,))) if config else None
        yield Finding(
            name, message, Effect.STOPS, origin=Origin(line, "", config.name if config else "")
        )
