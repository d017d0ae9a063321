"""Arguments of Hugging Face's Trainer that reach accelerate, and those that do not.

The functions follow transformers 5.23: training_args.py (_process_fsdp_args, __post_init__) and trainer.py
(create_accelerator_and_postprocess).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bridge.errors import nearest
from bridge.files import Launch
from bridge.shell import text_if_known
from bridge.stack.findings import Finding, Origin, unknown
from bridge.stack.program_source import CALL_WINS, find_defaults_of_trl, read_arguments_call
from bridge.stack.rules import Effect
from bridge.stack.sources import DEFAULT as DEFAULTS, Placed, Said, Unheard
from bridge.stack.training_arguments import (
    QUIET,
    RETIRED,
    SHOWN,
    describe_lack,
    find_negated,
    read_word,
)
from compat.accelerate.recognition import CONFIG, SWITCH
from compat.accelerate.schema import TRAINER
from compat.accelerate.slots import CHEAP, Refusal, Slot, facts, one_of

LOADER, STEPS = "accelerator_config", "gradient_accumulation_steps"
DEFAULT = "transformers 5.23.0, default"
CPU = "use_cpu"
NAMES = frozenset({*TRAINER, SWITCH, CONFIG, CPU, LOADER})
PASSED = ("bf16", "fp16", STEPS)
"""Arguments that reach accelerate by other names."""
SIGNS = frozenset({SWITCH, "output_dir", "bf16", "fp16"})
"""Arguments of which a program under the Trainer gets one."""
NAMED = frozenset({*NAMES, *SIGNS, *RETIRED, *SHOWN})
KEYS: tuple[tuple[str, str, Any, str], ...] = (
    ("version", "VERSION", 2, "12"),
    ("cpu_offload", "OFFLOAD_PARAMS", None, "12"),
    ("auto_wrap_policy", "AUTO_WRAP_POLICY", "TRANSFORMER_BASED_WRAP", "12"),
    ("min_num_params", "MIN_NUM_PARAMS", None, "12"),
    ("transformer_layer_cls_to_wrap", "TRANSFORMER_CLS_TO_WRAP", None, "12"),
    ("cpu_ram_efficient_loading", "CPU_RAM_EFFICIENT_LOADING", False, "12"),
    ("state_dict_type", "STATE_DICT_TYPE", "FULL_STATE_DICT", "12"),
    ("activation_checkpointing", "ACTIVATION_CHECKPOINTING", None, "12"),
    ("reshard_after_forward", "RESHARD_AFTER_FORWARD", True, "2"),
    ("forward_prefetch", "FORWARD_PREFETCH", False, "1"),
    ("backward_prefetch", "BACKWARD_PREFETCH", "NO_PREFETCH", "1"),
    ("use_orig_params", "USE_ORIG_PARAMS", True, "1"),
    ("sync_module_states", "SYNC_MODULE_STATES", True, "1"),
)
"""Keys of fsdp_config that the Trainer passes on: the variable in whose place, its default, and the versions of FSDP."""
OTHERS = ("xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt", "xla_fsdp_settings", "limit_all_gathers")
MEANT = {"offload_params": "cpu_offload", "sharding_strategy": "reshard_after_forward"}
"""The key that the Trainer reads in place of one that accelerate's own config has."""
POLICIES = {
    "min_num_params": "SIZE_BASED_WRAP",
    "transformer_layer_cls_to_wrap": "TRANSFORMER_BASED_WRAP",
}
KEEPS = "FSDP 1 takes its strategy from FSDP_SHARDING_STRATEGY, which is FULL_SHARD unless set; set it, or use version 2"
OLDER = ("read as transformers 5.10 and newer do; 5.0 to 5.9 run FSDP 1 unless fsdp_config has a version, and before 5.0"
         " neither version nor reshard_after_forward reaches accelerate, which takes them from FSDP_* variables")  # fmt: skip
"""What releases made of fsdp_config (training_args.py: _process_fsdp_args; before 5.0 __post_init__)."""
NEWEST = "the run is read as transformers 5.23, whose part an older release may do differently"
WINS = (
    "the Trainer passes its arguments and their defaults on, whatever the launcher says; give the argument, or drop"
    " the launcher's setting"
)
DEEPSPEED, BY_FLAG = (
    "deepspeed",
    "the DeepSpeed file is read where the command names it; add --deepspeed FILE",
)
BOTH = "found num_steps beside gradient_accumulation_steps, and the Trainer refuses both; drop num_steps"
BARE = "it counts only with --fsdp"


@dataclass(frozen=True)
class Arguments:
    """Arguments of the Trainer by name, keys of its fsdp_config by name without the prefix, and retired arguments.

    Of accelerator_config there is num_steps alone. `others` are arguments that nothing here depends on, and `changed`
    those that the program changes, so that nobody knows their value.
    """

    own: Mapping[str, Said] = field(default_factory=dict)
    fsdp: Mapping[str, Said] = field(default_factory=dict)
    retired: Mapping[str, Said] = field(default_factory=dict)
    others: Mapping[str, Said] = field(default_factory=dict)
    changed: Mapping[str, Said] = field(default_factory=dict)

    @property
    def steps(self) -> Said | None:
        """The micro-batches of a step: num_steps of accelerator_config, if it has that.

        Source: transformers/trainer.py, create_accelerator_and_postprocess.
        """
        return self.own.get(LOADER) or self.own.get(STEPS)

    def value(self, name: str, usual: Any = None) -> Any:
        """Return an argument's value; `usual` if nobody gives it."""
        return self.own[name].value if name in self.own else usual


def find_releases(arguments: Arguments) -> Iterator[Finding]:
    """Yield what older releases of transformers make of arguments for FSDP, and arguments that newer ones lack."""
    for name, said in arguments.retired.items():
        message = f"{describe_lack(name, f'since {RETIRED[name]}')}; {NEWEST}"
        effect = Effect.NONE if name in QUIET else Effect.NUMBERS
        yield Finding(said.setting, message, effect, True, origin=_locate(said))
    if arguments.value(SWITCH):
        said = arguments.fsdp.get("version") or arguments.own[SWITCH]
        yield Finding(said.setting, OLDER, Effect.COST, origin=_locate(said))


def read_arguments(
    launch: Launch,
    opens: Callable[[str, Said], Any],
    beside: Mapping[str, Said],
    folder: Path | None = None,
) -> tuple[Arguments, tuple[Finding, ...]]:
    """Return what the words of a program say to the Trainer, and the arguments `beside` them; nothing
    if neither shows that there is one.

    `opens` returns the data of a file that an argument names, as settings by name; `folder` is the one of the program,
    whose class of arguments may be trl's.
    """
    words = [text_if_known(word) for word in launch.words]
    found = dict[str, Said]()
    for at, word in enumerate(words):
        option, tied, text = (word or "").partition("=")
        name = find_negated(option) or option.removeprefix("--").replace("-", "_")
        if not option.startswith("--") or name not in NAMED:
            continue
        after = words[at + 1] if at + 1 < len(words) else "--"
        word = text if tied else "true" if after is None or after.startswith("--") else after
        spelling = option if find_negated(option) else f"--{name}"
        setting, source, line = launch.place_of(at, spelling)
        found[name] = Said(setting, read_word(name, word, option), source, line)
    given = Placed({name: said.value for name, said in beside.items()}, beside)
    called = read_arguments_call(launch, folder, found, {*NAMED, DEEPSPEED}, given)
    if not SIGNS & found.keys() and not beside and not called.values:
        return Arguments(changed=called.changed), called.findings
    told = list(called.findings)
    for name, said in called.values.items():
        flag = found.get(name)
        if name == DEEPSPEED or (flag and flag.value != said.value):
            lost = flag or said
            message = f"{lost.value!r} is not used: {CALL_WINS if flag else BY_FLAG}"
            told.append(unknown(lost.setting, message, origin=_locate(lost), end=""))
    said_last = {**found, **called.values, **beside, **called.assigned}
    usual, findings = find_defaults_of_trl(launch, folder, said_last)
    arguments = sort_arguments({**usual, **said_last}, opens)
    return replace(arguments, changed=called.changed), (*told, *findings)


def _locate(said: Said) -> Origin:
    return Origin(said.line, "", said.source)


def sort_arguments(said: Mapping[str, Said], opens: Callable[[str, Said], Any]) -> Arguments:
    """Return arguments by name, with the keys of the fsdp_config that one of them is or names."""
    own = {name: one for name, one in said.items() if name in NAMES}
    config, keys = own.get(CONFIG), dict[str, Said]()

    def open_mapping(said: Said) -> Mapping[str, Any]:
        text, data = str(said.value), said.value
        if isinstance(data, str):
            data = json.loads(text) if text.lstrip().startswith("{") else opens(text, said)
        return data or {}

    if loader := own.pop(LOADER, None):
        kwargs = {key: getattr(one, "value", one) for key, one in open_mapping(loader).items()}
        count = (kwargs.get("gradient_accumulation_kwargs") or {}).get("num_steps")
        own |= {} if count is None else {LOADER: replace(loader, value=count)}
    if config is not None and config.value:
        for key, value in open_mapping(config).items():
            one = (
                value
                if isinstance(value, Said)
                else Said(f"{CONFIG}.{key}", value, config.source, config.line)
            )
            keys[key.removeprefix("fsdp_")] = one
    retired = {name: one for name, one in said.items() if name in RETIRED}
    rest = SHOWN.keys() - own.keys() - {CONFIG, LOADER, DEEPSPEED}
    usual = {name for name, one in said.items() if one.source.endswith(DEFAULTS)}
    others = {name: one for name, one in said.items() if name in rest - usual}
    return Arguments(own, keys, retired, others)


def pass_on(
    arguments: Arguments, environment: Mapping[str, Slot]
) -> tuple[dict[str, Slot], list[Unheard]]:
    """Return the environment as the plugins of a Trainer's run take it, and what of its arguments nobody hears.

    Raises `Refusal` where the Trainer refuses an argument.
    """
    found = dict(environment)

    def put(variable: str, value: Any, said: Said | None = None) -> None:
        slot = Slot(value, said or Said(variable, value, DEFAULT), why=WINS)
        found[variable] = slot.after(found.get(variable))

    half = next((name for name in ("fp16", "bf16") if arguments.value(name) is True), None)
    if half:
        put("ACCELERATE_MIXED_PRECISION", half, arguments.own[half])
    if arguments.own:
        steps = arguments.steps
        if LOADER in arguments.own and arguments.value(STEPS, 1) > 1:
            raise Refusal(BOTH, steps)
        put("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", steps.value if steps else 1, steps)
    if arguments.value(CPU) is True:
        put("ACCELERATE_USE_CPU", "true", arguments.own[CPU])
    if not arguments.value(SWITCH):
        return found, [_ignore(one, BARE) for one in arguments.fsdp.values()]
    switch = arguments.own[SWITCH]
    keys = dict(arguments.fsdp)
    lost = list(_translate_words(switch, keys))
    put("ACCELERATE_USE_FSDP", "true", switch)
    put("distributed_type", "FSDP", switch)
    version = str(keys["version"].value if "version" in keys else 2)
    if version not in ("1", "2"):
        raise Refusal(f"found {version}, expected 1 or 2", keys["version"])
    strategy = keys.get("reshard_after_forward")
    if version == "1" and strategy:
        try:
            one_of(facts()["strategies"], str(strategy.value))
        except Refusal as error:
            raise Refusal(error.message, strategy) from None
    policy = str(keys["auto_wrap_policy"].value) if "auto_wrap_policy" in keys else KEYS[2][2]
    if policy not in facts()["wraps"]:
        raise Refusal(
            f"found {policy}, expected one of {', '.join(facts()['wraps'])}",
            keys["auto_wrap_policy"],
        )
    rows = {key: (variable, usual) for key, variable, usual, kinds in KEYS if version in kinds}
    for key, (variable, usual) in rows.items():
        said = keys.get(key)
        value = usual if said is None else said.value
        needs = POLICIES.get(key, policy)
        if value is None or (key == "cpu_offload" and not value) or needs != policy:
            lost += [_ignore(said, f"only {needs} reads it")] if said and needs != policy else []
        else:
            value = ",".join(value) if isinstance(value, list) else value
            put(f"FSDP_{variable}", str(value), said)
    for key, said in keys.items():
        if key in rows or key in OTHERS:
            continue
        known = {row[0] for row in KEYS}
        meant = f"; write {MEANT[key]}" if key in MEANT else nearest(key, tuple(known))
        why = (
            KEEPS
            if key == "reshard_after_forward"
            else f"FSDP {version} under the Trainer does not have it"
        )
        lost.append(
            _ignore(said, why if key in known else f"the Trainer does not pass it on{meant}")
        )
    return found, lost


def _translate_words(switch: Said, keys: dict[str, Said]) -> Iterator[Unheard]:
    """Put the words of an old --fsdp into the keys of fsdp_config, which count where both say something."""
    words = switch.value.split() if isinstance(switch.value, str) else switch.value
    version = str(keys["version"].value if "version" in keys else 2)
    for word in words if isinstance(words, list) else ():
        strategy = word.upper() in facts()["strategies"]
        if not strategy and word not in ("offload", "auto_wrap"):
            raise Refusal(
                f"found {word}, expected full_shard, shard_grad_op, offload or auto_wrap", switch
            )
        if strategy and version == "2" and word not in ("full_shard", "shard_grad_op"):
            raise Refusal(f"found {word}, which only version 1 of fsdp_config has", switch)
        key = "cpu_offload" if word == "offload" else "reshard_after_forward"
        value = True if word == "offload" else word == "full_shard" if version == "2" else word
        if word == "auto_wrap" or (key in keys and keys[key].value == value):
            continue
        said = Said(switch.setting, value, switch.source, switch.line)
        if key in keys:
            word_said = replace(said, value=word)
            yield Unheard(word_said, f"{keys[key].setting} is read instead", Effect.COST)
        else:
            keys[key] = said


def _ignore(said: Said, why: str) -> Unheard:
    cheap = (
        Effect.COST if CHEAP.fullmatch(said.setting) or said.setting == "--fsdp" else Effect.NUMBERS
    )
    return Unheard(
        said, why, Effect.NONE if said.value in (None, False, "", [], "full_shard") else cheap
    )
