"""Reads a run that accelerate starts: its config file, `accelerate launch` with options, and the environment."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bridge.errors import BridgeError, ConfigError
from bridge.files import Document, Launch, Script, find, folder_of, load, parse
from bridge.shell import line_of, spell_pieces, text_if_known
from bridge.stack.findings import Finding, Origin
from bridge.stack.rules import Effect
from bridge.stack.sources import (
    Resolution,
    ResolvedRun,
    Said,
    Settled,
    Unheard,
    report_contradictions,
)
from compat.accelerate.launcher import SECTIONS, Given, Machine, read_options, set_environment
from compat.accelerate.plugins import CLIPS, Plugins
from compat.accelerate.slots import FALSE, Refusal, Run, default, facts

PROGRAMS = frozenset(
    {
        "accelerate",
        "accelerate-launch",
        "accelerate.commands.launch",
        "accelerate.commands.accelerate_cli",
    }
)
SIGNS = ("distributed_type", "compute_environment")
"""Keys of which every config of accelerate has one."""
VARIABLES = re.compile(
    r"(ACCELERATE|FSDP|MEGATRON_LM|PARALLELISM_CONFIG)_[A-Z0-9_]+|OMP_NUM_THREADS|CUDA_VISIBLE_DEVICES"
)
"""Variables that accelerate reads."""
FILE = "deepspeed_config.deepspeed_config_file"
FACTS = {"gpus": "GPUs of the machine", "cores": "cores of the machine"}
QUIET = re.compile(r"(machine_rank|main_training_function|rdzv_backend|same_network|downcast_bf16|tpu_\w+|debug"
                   r"|enable_cpu_affinity|compute_environment|deepspeed_config\.deepspeed_multinode_launcher"
                   r"|--machine_rank|--deepspeed_multinode_launcher|ACCELERATE_DEBUG_MODE|ACCELERATE_USE_\w+)")  # fmt: skip
"""Settings without an effect on a step, whatever they say."""
CHEAP = re.compile(r"(?i).*(offload|prefetch|wrap|min_num_params|state_dict|checkpointing|ram_efficient|zero3|reshard"
                   r"|sharding_strategy|zero_stage|dynamo|threads|cpu_affinity|use_orig_params|sync_module).*")  # fmt: skip
"""Settings that change memory and speed alone."""
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
TRAPS: tuple[tuple[str, Any, str], ...] = (
    ("deepspeed.gradient_clipping", "auto", f"not given: {CLIPS}"),
    ("megatron_lm.context_parallel_size", 2, "not given: accelerate splits the sequence over 2 ranks; write 1 for none"),
    ("megatron_lm.calculate_per_token_loss", True, "not given: accelerate takes the mean over tokens, Megatron-LM does not"),
)  # fmt: skip
"""Defaults of accelerate that are others than a reader expects: setting, value, and what to say."""
ASSUMED = (
    "accelerate launch without --config_file reads {} if it is there, which may set everything that no option gives;"
    " pass --user-config to read it, or name a file"
)
TEXT = "this option takes any text for true, also 'false'; leave it out"


@dataclass(frozen=True)
class Question:
    """What a run is asked: facts of the machine by name, variables, and whether the user's own default config
    is read.
    """

    facts: Mapping[str, Any]
    outside: Mapping[str, str]
    user_config: bool = False


def recognises(data: Any) -> bool:
    """Return whether parsed `data` is a config of accelerate, or a script that starts a run by it alone."""
    if isinstance(data, Script):
        return any(map(is_launch, data.launches))
    return (
        isinstance(data, Mapping)
        and any(name in data for name in SIGNS)
        and not {"_target_", "optimizer"} & data.keys()
    )


def is_launch(launch: Launch) -> bool:
    """Return whether accelerate starts a run."""
    return any(spell_pieces(word).rpartition("/")[2] in PROGRAMS for word in launch.launcher)


def resolve(document: Document, question: Question) -> ResolvedRun:
    """Return who wins for each setting of the run in a document. Raises `BridgeError` if it cannot be read."""
    inputs, file, findings = (
        _read_script(document, question)
        if isinstance(document.data, Script)
        else (
            Given(config=read_config(document), environment=_read_variables(question.outside)),
            folder_of(document.name),
            [],
        )
    )
    strange = sorted(set(question.facts) - FACTS.keys())
    BridgeError.raise_if(
        f"--auto {name}: no fact of a run of accelerate; known are {', '.join(FACTS)}"
        for name in strange
    )
    machine = Machine(question.facts.get("gpus"), question.facts.get("cores", 1))
    run, stop = Run(), None
    try:
        environment, has_ranks = set_environment(inputs, machine, run)
        file_of_deepspeed = environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
        inner = _read_deepspeed(str(file_of_deepspeed.value), file) if file_of_deepspeed else None
        Plugins(environment, has_ranks, machine, run, inner).build()
    except Refusal as error:
        stop = error
    unheard = () if stop else tuple(_find_unheard(inputs, run))
    settings = (
        run.settings if stop is None else [Settled(one.setting, one.value, one) for one in inputs]
    )
    resolution = Resolution(tuple(_weigh_claims(settings)), unheard)
    findings += (
        _find_stop(stop)
        if stop
        else [*_find_traps(run, inputs), *report_contradictions(resolution)]
    )
    world = next((one.value for one in settings if one.setting == "num_processes"), None)
    title = f"accelerate {facts()['release']}"
    return ResolvedRun(
        "accelerate",
        title,
        facts()["release"],
        world,
        default("", "").source,
        resolution,
        tuple(findings),
    )


def read_config(document: Document, source: str | None = None) -> dict[str, Said]:
    """Return the settings of accelerate's config file, by path, in its order."""
    statements = dict[str, Said]()
    name = source if source is not None else ""
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


def _read_script(
    document: Document, question: Question
) -> tuple[Given, Path | None, list[Finding]]:
    """Return what the launch of a script gives, the folder of its files, and findings."""
    script: Script = document.data
    launch = script.launch(is_launch, "accelerate launch")
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
    folder, findings = folder_of(script.name), list[Finding]()
    config = None
    option = read.options.get("config_file")
    if option is not None:
        file = _open_config(str(option.value), folder, option)
        config = read_config(file, file.name)
    elif "cpu" not in read.options:
        place = _default_config()
        if question.user_config and place.is_file():
            config = read_config(parse(place.read_text("utf-8"), str(place), ".yaml"), str(place))
        elif not question.user_config:
            findings.append(
                Finding(
                    "config_file", ASSUMED.format(place), Effect.NUMBERS, origin=Origin(launch.line)
                )
            )
    false = [statement for statement, (word, _) in _boolean_words(read, texts) if word in FALSE]
    findings += [
        Finding(one.setting, TEXT, Effect.NUMBERS, True, origin=Origin(one.line), surprising=True)
        for one in false
    ]
    options = {name: statement for name, statement in read.options.items() if name != "config_file"}
    return replace(read, options=options, config=config, environment=variables), folder, findings


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


def _default_config() -> Path:
    """Return the place of the config that `accelerate config` writes."""
    cache = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    home = os.environ.get("HF_HOME", os.path.join(cache, "huggingface"))
    return Path(os.path.expanduser(home)) / "accelerate" / "default_config.yaml"


def _open_config(name: str, folder: Path | None, statement: Said) -> Document:
    path = find(name, folder)
    if path is None:
        raise ConfigError(
            f"line {statement.line}: {statement.setting}: {name}: no such file in the folder of the script or the current one"
        )
    document = load(path)
    if not isinstance(document.data, Mapping):
        raise ConfigError(f"{name}: expected a config of accelerate, a mapping of keys")
    return document


def _read_deepspeed(name: str, folder: Path | None) -> Any:
    path = find(name, folder)
    return load(path).data if path else None


def _find_unheard(inputs: Given, run: Run) -> Iterator[Unheard]:
    """Yield what is said and changes nothing, with the reason and its effect."""
    for statement in inputs:
        if (statement.setting, statement.source) in run.heard or statement.setting in (
            "compute_environment",
            FILE,
        ):
            continue
        why = next(
            (why for pattern, why in REASONS if re.fullmatch(pattern, statement.setting)), NOBODY
        )
        yield Unheard(statement, why, _weigh_unheard(statement, run))


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
    for setting, value, message in TRAPS:
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
