"""Reads a run that accelerate starts: its config file, `accelerate launch` with options, and the environment."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any

from bridge.errors import BridgeError, ConfigError, nearest
from bridge.files import Document, Launch, Script, find, folder_of, load, load_script, parse
from bridge.shell import line_of, spell_pieces, text_if_known
from bridge.shell.word_pieces import NOWHERE, Text
from bridge.stack import trainer_detection
from bridge.stack.findings import Finding, Origin, unknown
from bridge.stack.program_source import (
    CHANGES,
    PRECISION_WINS,
    UNKNOWN,
    VARIABLE_WINS,
    Told as Called,
    read_call,
)
from bridge.stack.releases import Releases
from bridge.stack.rules import Effect
from bridge.stack.sources import (
    Resolution,
    ResolvedRun,
    Said,
    Settled,
    Unheard,
    report_contradictions,
)
from compat.accelerate import trainer
from compat.accelerate.launcher import (
    DEEPSPEED,
    SECTIONS,
    Given,
    Machine,
    read_options,
    set_environment,
)
from compat.accelerate.plugins import CLIPS, Plugins
from compat.accelerate.recognition import (
    PROGRAMS,
    SIGNS,
    SWITCH,
    has_variables,
    is_launch,
    starts_trainer,
)
from compat.accelerate.schema import TRAINER
from compat.accelerate.slots import (
    CHEAP,
    FALSE,
    QUIET,
    Refusal,
    Run,
    Slot,
    at_release,
    default,
    facts,
    releases,
)

NAME, PROGRAM = "accelerate", "train.py"
"""The host's name, and the program that stands for the one that a config does not name."""
VARIABLES = re.compile(
    r"(ACCELERATE|FSDP|MEGATRON_LM|PARALLELISM_CONFIG)_[A-Z0-9_]+|OMP_NUM_THREADS|CUDA_VISIBLE_DEVICES"
)
"""Variables that accelerate reads."""
SECTION = "deepspeed_config"
FILE = f"{SECTION}.deepspeed_config_file"
WITHOUT = ("compute_environment",)
START = ("-m", "--module", "--no_python")
"""Options that say how the program starts."""
FACTS = {"gpus": "GPUs of the machine", "cores": "cores of the machine"}
REASONS: tuple[tuple[str, str], ...] = (
    (r"(deepspeed_config\.|--)offload_\w+_nvme_path", "the launcher does not pass it on; name a DeepSpeed file with the path"),
    (r"(deepspeed_config\.|--)zero3_init_flag", "it counts at ZeRO 3 alone"),
    (r"machine_rank|--machine_rank", "there is one machine"),
    (r"rdzv_backend|same_network|enable_cpu_affinity|downcast_bf16", "the launcher's own default wins; give it as an option"),
    (r"use_cpu", "it counts only for a run without GPUs; use --cpu"),
    (r".*(backward_prefetch|forward_prefetch|use_orig_params|sync_module_states|sharding_strategy)", "FSDP 2 does not have it"),
    (r".*reshard_after_forward", "FSDP 1 does not have it; use fsdp_sharding_strategy"),
    (r".*min_num_params", "only SIZE_BASED_WRAP reads it"),
    (r".*cls_to_wrap", "only TRANSFORMER_BASED_WRAP reads it"),
    (r"parallelism_config\.(?!parallelism_config_)\w+", "the key needs the prefix parallelism_config_"),
    (r"megatron_lm_config\.(?!megatron_lm_)\w+", "the key needs the prefix megatron_lm_"),
    (r"--dynamo_\w+|dynamo_config\.\w+", "the launcher does not pass it on under DeepSpeed"),
)  # fmt: skip
"""Why nothing hears a setting, by a pattern of its name; the first that fits counts."""
NOBODY = "nothing in accelerate reads it in this run"
SURPRISING_DEFAULTS: tuple[tuple[str, Any, str], ...] = (
    ("deepspeed.gradient_clipping", "auto", f"not given: {CLIPS}"),
    ("megatron_lm.context_parallel_size", 2, "not given: accelerate splits the sequence over 2 ranks; write 1 for none"),
    ("megatron_lm.calculate_per_token_loss", True,
     "not given: accelerate sets it, and as its step returns a mean, Megatron-LM then sums gradients over ranks; write false"),
)  # fmt: skip
"""Defaults of accelerate that are others than a reader expects: setting, value, and what to say."""
ASSUMED = "accelerate launch without --config_file reads {} if it is there, which may set everything that no option gives"
READ = "pass --user-config to read it, or name a file"
NAME_IT = "name it with --config_file to have it read"
UNSTARTED = (
    "not given, as nothing here starts the run; 1 is assumed; give the script or accelerate's config as well, or"
    " --world-size"
)
COUNTING = ("deepspeed", "srun", "mpirun", "mpiexec")
"""Launchers whose number of processes may follow from the machine or the job."""
UNCOUNTED = "the launch does not say how many processes it starts; 1 is assumed; give --world-size"
STRANGE = "accelerate does not know this key, and stops"
TEXT = "this option takes any text for true, also 'false'; leave it out"


@dataclass(frozen=True)
class Question:
    """What a run is asked: facts of the machine by name, variables, whether the user's own default config is read,
    arguments of the Trainer that are given beside it, and the number of ranks of a run that torchrun starts.
    """

    facts: Mapping[str, Any]
    outside: Mapping[str, str]
    user_config: bool = False
    trainer: Mapping[str, Said] = field(default_factory=dict)
    world: int | None = None
    release: str | None = None


@dataclass(frozen=True)
class Told:
    """What the sources of a run say: those of the launcher, the Trainer's arguments, the folder of its files, findings
    of the reader, and the number of ranks of a run that torchrun starts.
    """

    given: Given
    arguments: trainer.Arguments = field(default_factory=trainer.Arguments)
    folder: Path | None = None
    findings: tuple[Finding, ...] = ()
    world: int | None = None
    program: Mapping[str, Said] = field(default_factory=dict)


def start(document: Document, trained: bool = False) -> tuple[Document, tuple[Finding, ...]]:
    """Return a config of accelerate for DeepSpeed as the launch that names it, any other document as it is; and a
    finding for each key of accelerate's section for DeepSpeed that nothing reads. With `trained`, the Trainer runs the
    program, and fills in an "auto" by its own arguments.

    Raises `ConfigError` for a key or type with which accelerate stops.
    """
    script = isinstance(document.data, Script)
    if not script and document.data.get("distributed_type") != "DEEPSPEED":
        return document, ()
    told = _check_keys(document, trained)
    return (document if script or told is None else launch(document)), told or ()


def launch(config: Document, file: str = "") -> Document:
    """Return the script by which a config of accelerate starts a program, whose DeepSpeed file is `file`, if it has one.

    The script is in the folder of that file, else in the config's.
    """
    folder = Path(file or config.name).parent
    place = os.path.relpath(config.name, folder)
    argument = (
        f" --deepspeed {quote(Path(file).name)}" if file and not _names_file(config, file) else ""
    )
    text = f"accelerate launch --config_file {quote(place)} {PROGRAM}{argument}\n"
    return load_script(text, file or config.name)


def _names_file(config: Document, file: str) -> bool:
    """Return whether a config names a DeepSpeed file itself, so that its program need not."""
    section = config.data.get(SECTION)
    name = section.get(FILE.partition(".")[2]) if isinstance(section, Mapping) else None
    if config.data.get("distributed_type") != "DEEPSPEED" or not isinstance(name, str):
        return False
    place = find(name, folder_of(config.name))
    return place is not None and place.resolve() == Path(file).resolve()


def _check_keys(document: Document, trained: bool) -> tuple[Finding, ...] | None:
    """Return a finding for each key of accelerate's section for DeepSpeed that nothing reads; None if the config cannot
    be read. Raises `ConfigError` for a key or type with which accelerate stops.
    """
    try:
        told = read_sources(document, Question({}, {}))
    except BridgeError:
        return None  # the reader of the stack says it in its words
    config = told.given.config or {}
    options = {row["name"] for row in facts()["options"]} | {"deepspeed_moe_layer_cls_names"}
    # The reader of the stack opens no file that the launch does not name.
    found = [
        replace(one, message=f"{ASSUMED.format(_default_config())}; {NAME_IT}")
        for one in told.findings
        if one.path == "config_file"
    ]
    for path, said in config.items():
        section, dot, name = path.partition(".")
        keys = options if dot else {*facts()["keys"], "fp16", "dynamo_backend"}
        if not dot and section not in keys:
            raise ConfigError(
                f"{said.source or document.name}: line {said.line}: {path}: {STRANGE}{nearest(path, tuple(keys))}"
            )
        if section == "deepspeed_config" and name not in keys:
            found.append(
                unknown(
                    path,
                    f"accelerate does not read it{nearest(name, DEEPSPEED)}",
                    origin=Origin(said.line, "", said.source),
                )
            )
    if not (trained or told.arguments.own):
        found += [
            one
            for one in resolve_sources(told, Question({}, {})).findings
            if one.path == "deepspeed.gradient_clipping"
        ]
    return tuple(found)


def resolve(document: Document, question: Question) -> ResolvedRun:
    """Return who wins for each setting of the run in a document. Raises `BridgeError` if it cannot be read."""
    release = question.release or releases()[-1]
    Releases(NAME, releases()).place(release)
    with at_release(release):
        told = read_sources(document, question)
        return _add_arguments(resolve_sources(told, question), told.arguments)


def _add_arguments(found: ResolvedRun, arguments: trainer.Arguments) -> ResolvedRun:
    """Return a resolved run with the Trainer's arguments that accelerate does not take, and without the values of those
    that the program changes.
    """
    rows = [*found.resolution.settings]
    shown = {one.setting for one in rows}
    rows += [
        Settled(name, one.value, one) for name, one in arguments.others.items() if name not in shown
    ]
    for name, said in arguments.changed.items():
        setting = "mixed_precision" if name in ("bf16", "fp16") else name
        rows = [one for one in rows if one.setting not in (setting, name)]
        rows.append(Settled(setting, UNKNOWN, said, (), CHANGES.format(name)))
    return replace(found, resolution=replace(found.resolution, settings=tuple(rows)))


def read_sources(document: Document, question: Question) -> Told:
    """Return what a config of accelerate or a script that starts a run by it says."""
    strange = sorted(set(question.facts) - FACTS.keys())
    BridgeError.raise_if(
        f"--auto {name}: no fact of a run of accelerate; known are {', '.join(FACTS)}"
        for name in strange
    )
    if isinstance(document.data, Script):
        return _read_script(document, question)
    folder, variables, trained = (
        folder_of(document.name),
        _read_variables(question.outside),
        dict(question.trainer),
    )
    given, told = Given(environment=variables, starter="torchrun"), tuple[Finding, ...]()
    if not any(name in document.data for name in SIGNS):  # arguments of the Trainer
        own = {
            str(name): Said(str(name), value, "", document.line(name))
            for name, value in document.data.items()
        }
        trained = {**own, **trained}
        if question.world is None:
            told = (Finding("world_size", UNSTARTED, Effect.NUMBERS),)
    else:
        own = read_config(document)
        ranks = Said("--world-size", question.world)
        options = {"num_processes": ranks} if question.world and "num_processes" not in own else {}
        given = Given(options, own, variables)
    return Told(
        given,
        trainer.sort_arguments(trained, partial(_open_keys, folder)),
        folder,
        told,
        question.world,
    )


def resolve_sources(told: Told, question: Question) -> ResolvedRun:
    """Return who wins for each setting of a run whose sources are known."""
    machine = Machine(question.facts.get("gpus"), question.facts.get("cores", 1), world=told.world)
    run, stop, given = Run(), None, told.given
    unheard = list[Unheard]()
    try:
        environment, ranked = set_environment(given, machine, run)
        environment, lost = trainer.pass_on(told.arguments, environment)
        unheard += lost
        environment = _call_accelerator(told.program, environment)
        if told.arguments.value(SWITCH) and not ranked:
            raise Refusal("FSDP of the Trainer needs a run of several ranks", told.arguments.own[SWITCH])  # fmt: skip
        named = environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
        inner = _read_deepspeed(str(named.value), told.folder) if named else None
        Plugins(environment, ranked, machine, run, inner).build()
        unheard += find_unheard(given, run)
        run.settings += [
            Settled(name, one.value, one)
            for name, one in told.arguments.own.items()
            if name in TRAINER and name not in trainer.PASSED
        ]
    except Refusal as error:
        stop, unheard = error, []
    settings = (
        run.settings if stop is None else [Settled(one.setting, one.value, one) for one in given]
    )
    resolution = Resolution(tuple(_weigh_claims(settings)), tuple(unheard))
    findings = (
        _find_stop(stop)
        if stop
        else [
            *_find_traps(run, given),
            *trainer.find_releases(told.arguments),
            *report_contradictions(resolution),
        ]
    )
    world = next((one.value for one in settings if one.setting == "num_processes"), None)
    return ResolvedRun(
        "accelerate",
        f"accelerate {facts()['release']}",
        facts()["release"],
        world,
        default("", "").source,
        resolution,
        (*told.findings, *findings),
    )


def _call_accelerator(said: Mapping[str, Said], environment: Mapping[str, Slot]) -> dict[str, Slot]:
    """Return the environment with the arguments of the program's `Accelerator` in it, as if variables had them."""
    found = dict(environment)
    if one := said.get("mixed_precision"):
        name = "ACCELERATE_MIXED_PRECISION"
        found[name] = Slot(one.value, one, why=PRECISION_WINS).after(found.get(name))
    if (one := said.get("cpu")) and one.value is True:
        found["ACCELERATE_USE_CPU"] = Slot("true", one).after(found.get("ACCELERATE_USE_CPU"))
    if one := said.get("gradient_accumulation_steps"):
        name = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
        slot, variable = Slot(str(one.value), one), found.get(name)
        found[name] = replace(variable, why=VARIABLE_WINS).after(slot) if variable else slot
    return found


def read_config(document: Document, name: str = "") -> dict[str, Said]:
    """Return the settings of accelerate's config file, by path, in its order."""
    statements = dict[str, Said]()
    for key, value in document.data.items():
        inner = value.items() if isinstance(value, Mapping) and key in SECTIONS else ()
        for own, part in inner:
            statements[f"{key}.{own}"] = Said(f"{key}.{own}", part, name, document.line(key, own))
        if not isinstance(value, Mapping) or key not in SECTIONS:
            statements[key] = Said(key, value, name, document.line(key))
    return statements


def _read_variables(
    outside: Mapping[str, str],
    line_of_name: Callable[[str], int | None] = lambda _: None,
    source: str = "environment",
) -> dict[str, Said]:
    return {
        name: Said(name, text, source, line_of_name(name))
        for name, text in outside.items()
        if VARIABLES.fullmatch(name)
    }


def _read_script(document: Document, question: Question) -> Told:
    """Return what the launch of a script says."""
    script: Script = document.data
    named = [one for one in script.launches if is_launch(one) or starts_trainer(one)]
    launch = script.launch(
        lambda one: one in named if named else has_variables(one, script),
        "accelerate launch, arguments of the Trainer or variables of accelerate",
    )
    folder = folder_of(script.name)
    if not is_launch(launch):
        _check_trainer(launch, folder)
    arguments, said_of_class = trainer.read_arguments(
        launch, partial(_open_keys, folder, launch=launch), question.trainer, folder
    )
    variables_of_launch = {
        name: text
        for name, word in launch.environment.items()
        if (text := text_if_known(word)) is not None
    }
    places = {name: line_of(launch.environment[name], script.text) for name in variables_of_launch}
    variables = {
        **_read_variables(question.outside),
        **_read_variables(variables_of_launch, places.get, ""),
    }
    if not is_launch(launch):
        starter = "torchrun" if launch.ranks or launch.launcher else "python"
        call = Called() if starts_trainer(launch) else read_call(launch, folder)
        world = launch.ranks or question.world
        counts = any(spell_pieces(word).rpartition("/")[2] in COUNTING for word in launch.launcher)
        assumed = Finding("world_size", UNCOUNTED, Effect.NUMBERS, origin=Origin(launch.line))
        return Told(
            Given(environment=variables, starter=starter),
            arguments,
            folder,
            (*said_of_class, *call.findings, *([assumed] if counts and not world else ())),
            world,
            call.values,
        )
    first = next(
        at
        for at, word in enumerate(launch.launcher)
        if spell_pieces(word).rpartition("/")[2] in PROGRAMS
    )
    words = launch.launcher[first + 1 :]
    if words and spell_pieces(words[0]) == "launch":
        words = words[1:]
    texts = list[tuple[str, int | None]]()
    for word in words:
        text = text_if_known(word)
        if text is None:
            raise ConfigError(
                f"line {launch.line}: {spell_pieces(word)}: its value is not known; pass it with --env"
            )
        texts.append((text, line_of(word, script.text) or launch.line))
    read = read_options(texts, "")
    findings = list[Finding]()
    config = None
    option = read.options.get("config_file")
    if option is not None:
        file = _open_config(str(option.value), folder, option, launch)
        config = read_config(file, file.name)
    elif "cpu" not in read.options and not question.user_config:
        message = f"{ASSUMED.format(_default_config())}; {READ}"
        findings.append(Finding("config_file", message, Effect.NUMBERS, origin=Origin(launch.line)))
    false = [statement for statement, (word, _) in _boolean_words(read, texts) if word in FALSE]
    findings += [
        Finding(one.setting, TEXT, Effect.NUMBERS, True, origin=Origin(one.line), surprising=True)
        for one in false
    ]
    options = {name: statement for name, statement in read.options.items() if name != "config_file"}
    given = replace(read, options=options, config=config, environment=variables)
    call = read_call(launch, folder)
    return Told(
        given, arguments, folder, (*findings, *said_of_class, *call.findings), program=call.values
    )


def _check_trainer(launch: Launch, folder: Path | None) -> None:
    """Raise `ConfigError` unless the Trainer, with no DeepSpeed file, runs the program of a launch that its flags show."""
    if not starts_trainer(launch):
        return
    flags = {text.partition("=")[0] for text in launch.texts if text.startswith("--")}
    by_trainer, why = trainer_detection.evidence(
        trainer_detection.read(launch.program, folder), flags
    )
    if not by_trainer:
        raise ConfigError(
            f"line {launch.line}: {launch.program}: its flags are the Trainer's, and nothing else shows that the Trainer runs it:"
            f" {why}; stagebridge does not read its own loop"
        )
    if f"--{trainer.DEEPSPEED}" in flags:
        raise ConfigError(
            f"line {launch.line}: --{trainer.DEEPSPEED}: the DeepSpeed file is not known; pass what names it with --env, or its"
            " path with --with deepspeed=FILE"
        )


def _boolean_words(
    read: Given, texts: list[tuple[str, int | None]]
) -> Iterator[tuple[Said, tuple[str, int | None]]]:
    kinds = {row["name"]: row["kind"] for row in facts()["options"]}
    for name, statement in read.options.items():
        if kinds.get(name) == "bool":
            at = next(
                at
                for at, (word, _) in enumerate(texts)
                if word.partition("=")[0] == statement.setting
            )
            _, tied, text = texts[at][0].partition("=")
            yield statement, ((text if tied else texts[at + 1][0]).lower(), texts[at][1])


def name_user_config(document: Document) -> Document:
    """Return a document of a script whose launches by accelerate name the user's default config, where it is there and
    they name none.
    """
    place = _default_config()

    def name_config(one: Launch) -> Launch:
        words = {spell_pieces(word).partition("=")[0].replace("-", "_") for word in one.launcher}
        names = is_launch(one) and not words & {"__config_file", "__cpu"}
        return one.with_words(launcher=("--config_file", str(place))) if names else one

    return (
        replace(document, data=document.data.change(name_config)) if place.is_file() else document
    )


def _default_config() -> Path:
    """Return the place of the config that `accelerate config` writes."""
    cache = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    home = os.environ.get("HF_HOME", os.path.join(cache, "huggingface"))
    return Path(os.path.expanduser(home)) / "accelerate" / "default_config.yaml"


def _open_config(
    name: str, folder: Path | None, statement: Said, launch: Launch | None = None
) -> Document:
    word = (Text(name, NOWHERE),)
    written, place = (launch.file(word), launch.place(word)) if launch else (None, None)
    path = find(place or name, folder) if written is None else None
    if written is not None:
        document = parse(spell_pieces(written), name, Path(name).suffix)
    elif path is not None:
        document = load(path)
    else:
        raise ConfigError(
            f"line {statement.line}: {statement.setting}: {name}: no such file in the folder of the script or the current one"
        )
    if not isinstance(document.data, Mapping):
        raise ConfigError(f"{name}: expected a mapping of keys")
    return document


def _open_keys(
    folder: Path | None, name: str, said: Said, launch: Launch | None = None
) -> dict[str, Said]:
    """Return the settings of a file that an argument names, each with its place."""
    document = _open_config(name, folder, said, launch)
    return {
        str(key): Said(f"{said.setting.lstrip('-')}.{key}", value, name, document.line(key))
        for key, value in document.data.items()
    }


def _read_deepspeed(name: str, folder: Path | None) -> Any:
    path = find(name, folder)
    return load(path).data if path else None


def find_unheard(given: Given, run: Run) -> Iterator[Unheard]:
    """Yield what is said and changes nothing, with the reason and its effect; what two sources say alike is no news."""
    alike = Counter((one.setting.lstrip("-"), str(one.value)) for one in given)
    for said in given:
        twice = alike[said.setting.lstrip("-"), str(said.value)] > 1
        if (
            (said.setting, said.source) in run.heard
            or said.setting in (*WITHOUT, *START, FILE)
            or twice
        ):
            continue
        why = next((why for pattern, why in REASONS if re.fullmatch(pattern, said.setting)), NOBODY)
        yield Unheard(said, why, _weigh_unheard(said, run))


def _weigh_unheard(statement: Said, run: Run) -> Effect:
    """Return the effect of a setting that nothing hears: none where it asks for what is so anyway."""
    name = statement.setting.rpartition(".")[2].lstrip("-")
    inert = statement.value in (None, False, "", [], "no", "none", "NO")
    same = any(
        one.setting.rpartition(".")[2] == name and one.value == statement.value
        for one in run.settings
    )
    if QUIET.fullmatch(statement.setting) or inert or same:
        return Effect.NONE
    return Effect.COST if CHEAP.fullmatch(statement.setting) else Effect.NUMBERS


def _weigh_claims(settings: Iterable[Settled]) -> Iterator[Settled]:
    """Yield settings with the effect of what they overrule."""
    for one in settings:
        kind = (
            Effect.NONE
            if QUIET.fullmatch(one.setting)
            else Effect.COST
            if CHEAP.fullmatch(one.setting)
            else Effect.NUMBERS
        )
        yield replace(one, overruled=tuple(replace(claim, effect=kind) for claim in one.overruled))


def _find_traps(run: Run, inputs: Given) -> Iterator[Finding]:
    for setting, value, message in SURPRISING_DEFAULTS:
        for one in run.settings:
            # A DeepSpeed file without the key leaves clipping to DeepSpeed, and no "auto" is replaced.
            leaves_clipping = setting == "deepspeed.gradient_clipping" and not one.why
            if (
                one.setting == setting
                and one.value == value
                and not leaves_clipping
                and one.winner.source == default("", "").source
            ):
                yield Finding(setting, message, Effect.NUMBERS, surprising=True)
    kind = next((one for one in run.settings if one.setting == "distributed_type"), None)
    if kind is not None and kind.why:
        statement = (inputs.config or {}).get("distributed_type", Said("distributed_type", ""))
        yield Finding(
            "distributed_type",
            f"{kind.why}, without a word",
            Effect.NUMBERS,
            True,
            origin=Origin(statement.line, "", statement.source),
            surprising=True,
        )


def _find_stop(stop: Refusal) -> list[Finding]:
    statement = stop.said or Said("run", None)
    source = "" if statement.source in ("environment", default("", "").source) else statement.source
    return [
        Finding(
            statement.setting,
            stop.message,
            Effect.STOPS,
            True,
            origin=Origin(statement.line, "", source),
        )
    ]
