"""GPT-NeoX: its YAML files are a DeepSpeed file and the flags of a program of Megatron in one, with defaults of
their own (megatron/neox_arguments of EleutherAI/gpt-neox, main of 2026-05).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from packaging.version import Version

from bridge.errors import BridgeError, ConfigError, nearest
from bridge.files import Document, Launch, Script, find, folder_of, load
from bridge.files.shown import show_value
from bridge.shell.word_pieces import NOWHERE, Text
from bridge.stack.findings import Finding, Origin, unknown
from bridge.stack.rules import Effect
from compat.deepspeed.releases import release

PROGRAM, FILE, LAUNCHER = "train.py", "ds_config.json", "deepy.py"
NEEDS = {"num_layers", "hidden_size", "num_attention_heads"}
TELLING = {"pipe_parallel_size", "model_parallel_size", "train_micro_batch_size_per_gpu", "pos_emb"}
"""Keys of which files that set up a model have one; a model's config of transformers has none of them."""
HALVES = {"fp16": "fp16", "bfloat16": "bf16"}
SIZES = (
    "num_layers", "hidden_size", "num_attention_heads", "model_parallel_size", "train_batch_size",
    "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "num_gpus", "mlp_multiple_of",
)  # fmt: skip
COUNTS = ("pipe_parallel_size", "num_nodes", "train_iters", "intermediate_size")
SECTIONS = ("fp16", "bf16", "optimizer", "deepspeed_extra_args")
KINDS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(
        SIZES, ("a whole number of at least 1", lambda one: type(one) is int and one > 0)
    ),
    **dict.fromkeys(COUNTS, ("a whole number", lambda one: type(one) is int)),
    **dict.fromkeys(SECTIONS, ("a mapping", lambda one: isinstance(one, Mapping))),
    **dict.fromkeys(
        ("expansion_factor", "lr_decay_fraction"),
        ("a number", lambda one: type(one) in (int, float) and math.isfinite(one)),
    ),
    "attention_config": (
        "a list of kinds, or of [[kind, ...], times]",
        lambda one: _is_layers(one),
    ),
}
"""By key: what the values are with which this module reckons, in words, and whether a value is one."""
RELEASE = "0.15.0"
"""The release by which a run is read unless the user names one: the oldest known, as GPT-NeoX asks for DeeperSpeed,
a fork of an older one.
"""
FORK = (
    "GPT-NeoX runs on DeeperSpeed, a fork of an older DeepSpeed; read as DeepSpeed 0.15.0, the oldest known; give"
    " the release that you run with --from-version"
)
CLIPS = "0.19.3"
"""The release since which DeepSpeed clips at 1.0, the default of GPT-NeoX."""
CLIPPING = (
    "GPT-NeoX leaves out what equals its own default, so that DeepSpeed's default counts: no clipping before"
    f" DeepSpeed {CLIPS}, and 1.0 since; write another value, such as 0.9999"
)
STRICT = "0.17.1"
"""The release since which DeepSpeed stops at keys that its section of a format does not have."""
SCALED = f"keys of fp16 only, which DeepSpeed ignores here before {STRICT}, and stops at since; drop them"
UNREAD = "no flag of Megatron stands for this value of GPT-NeoX, and stagebridge does not read it"
FIRST = (
    "the first step of GPT-NeoX's warm-up has the rate of its second, where Megatron's has rate 0, and"
    " stagebridge reads it as Megatron's"
)
LINEAR = (
    "GPT-NeoX's linear decay goes to 0 and is cut off at min_lr, where Megatron's goes to min_lr;"
    " stagebridge reads it as Megatron's"
)


@cache
def tables() -> Mapping[str, Any]:
    """The keys of GPT-NeoX: those of DeepSpeed with their defaults, those that are a flag of Megatron, choices
    with the flags for each value, keys without an effect on numbers, and others with their defaults.
    """
    found: Mapping[str, Any] = json.loads(Path(__file__).with_name("gpt_neox.json").read_text())
    return found


def starts(data: Any) -> bool:
    """Return whether parsed data is a config of GPT-NeoX, or a script that starts a run with some."""
    if isinstance(data, Script):
        return any(map(_is_launch, data.launches))
    names = {str(key).replace("-", "_") for key in data} if isinstance(data, Mapping) else set()
    return names >= NEEDS and not names.isdisjoint(TELLING)


def _is_launch(launch: Launch) -> bool:
    return Path(launch.program).name == LAUNCHER


def start(
    document: Document, world_size: int | None, version: str | None = None, lenient: bool = False
) -> tuple[Document, tuple[Finding, ...]]:
    """Return a run of GPT-NeoX on `world_size` ranks (None: as few as it allows) as a launch of Megatron-DeepSpeed, and
    findings on what that launch does not say. `version` is the release of DeepSpeed (None: `RELEASE`).

    Raises `BridgeError` for keys that GPT-NeoX refuses; if `lenient`, those that it does not have are findings.
    """
    if not isinstance(document.data, Script):
        run = _Run((document,), world_size, version or RELEASE, lenient)
        script = Script("", document.name)
        script.__dict__["launches"] = (run.launch(),)
        return replace(document, data=script), run.findings
    launch = document.data.launch(_is_launch, LAUNCHER)
    texts = [*launch.texts]
    flag = next((at for at, text in enumerate(texts) if text in ("-d", "--conf_dir")), len(texts))
    folder = "".join(texts[flag + 1 : flag + 2])
    names = [text for text in texts if text.endswith((".yml", ".yaml"))]
    files = tuple(_open(document, str(Path(folder, name))) for name in names)
    run = _Run(files, world_size or launch.ranks, version or RELEASE, lenient)
    made = run.launch(launch)
    return replace(document, data=document.data.change(lambda one: made if one is launch else one)), run.findings  # fmt: skip


def _open(document: Document, name: str) -> Document:
    place = find(name, folder_of(document.name))
    if place is None:
        raise BridgeError(f"{document.name}: {name}: no such file; put it where the script starts")
    return load(place)


class _Run:
    """A run of GPT-NeoX: its settings with their lines, and the flags and the DeepSpeed file that they come to."""

    def __init__(
        self,
        files: tuple[Document, ...],
        world_size: int | None,
        version: str,
        lenient: bool = False,
    ) -> None:
        self.version = version
        self.values: dict[str, Any] = {}
        self.lines: dict[str, int] = {}
        self.found: list[Finding] = []
        self.words: list[tuple[str, int]] = []
        known = {name for table in tables().values() for name in table}
        problems = []
        for file in files:
            for key, value in file.data.items():
                name, line = str(key).replace("-", "_"), file.line(key) or 0
                if name in self.values:
                    problems.append(f"{file.name}: line {line}: {key}: given in two files, which GPT-NeoX refuses")  # fmt: skip
                elif name not in known:
                    message = f"no key of GPT-NeoX, which stops at it{nearest(name, known)}"
                    if lenient:
                        self.found.append(unknown(name, message, value, Origin(line)))
                        continue
                    problems.append(f"{file.name}: line {line}: {key}: {message}")
                kind, fits = KINDS.get(name, ("", lambda one: True))
                if value is None and kind:
                    continue  # as if it was not given
                if not fits(value):
                    problems.append(f"{file.name}: line {line}: {key}: found {show_value(value)}; expected {kind}")  # fmt: skip
                self.values[name], self.lines[name] = value, line if len(files) == 1 else 0
        params = self.values.get("optimizer") or {}
        own = params.get("params", {}) if isinstance(params, Mapping) else {}
        betas = own.get("betas", (0, 0)) if isinstance(own, Mapping) else None
        if not isinstance(betas, list | tuple) or len(betas) != 2:
            problems.append(
                f"{files[0].name}: optimizer: expected params, a mapping, with two betas if any"
            )
        problems += (
            f"{files[0].name}: {name}: not given; expected {KINDS[name][0]}"
            for name in sorted(NEEDS - self.values.keys())
        )
        ConfigError.raise_if(problems)
        self.stages = self.values.get("pipe_parallel_size", 0)
        self.sharers = max(self.stages, 1) * self.values.get("model_parallel_size", 1)
        self.world = world_size or self._count_ranks()
        self._say_flags()
        if version == RELEASE:
            self.tell("release", FORK, Effect.NONE)

    @property
    def findings(self) -> tuple[Finding, ...]:
        return tuple(self.found)

    def _count_ranks(self) -> int | None:
        ranks, nodes = self.values.get("num_gpus"), self.values.get("num_nodes", 1)
        return ranks * max(nodes, 1) if ranks else None

    def say(self, key: str, *words: Any) -> None:
        """Add words of the launch for a key."""
        self.words += ((str(word), self.lines.get(key, 0)) for word in words)

    def tell(self, key: str, message: str, effect: Effect = Effect.NUMBERS) -> None:
        origin = Origin(self.lines.get(key) or None)
        self.found.append(Finding(key, message, effect, key in self.values, origin=origin))

    def leave(self, key: str) -> None:
        """Record a key that is not read."""
        origin = Origin(self.lines.get(key) or None)
        self.found.append(unknown(key, UNREAD, self.values.get(key), origin, end=""))

    def _say_flags(self) -> None:
        table, values = tables(), self.values
        for key, value in {**table["always"], **values}.items():
            if key in table["flags"] and value is not None:
                self.say(key, f"--{table['flags'][key]}", value)
            elif key in table["choices"]:
                words = table["choices"][key].get(str(value).lower() if value is not None else "")
                if words is None:
                    self._say_choice(key, value)
                else:
                    self.say(key, *words)
            elif key in table["others"] and value != table["others"][key]:
                self.leave(key)
        if values.get("lr_decay_style", "linear") == "linear" and values.get("min_lr"):
            self.tell("min_lr", LINEAR)
        if values.get("warmup", 0.01):
            self.tell("warmup", FIRST)
        self._say_model()
        self._say_optimizer()
        self._say_sizes()

    def _say_choice(self, key: str, value: Any) -> None:
        """Add the words for a value that no table has."""
        kinds = _layers(value) if key == "attention_config" else {value}
        if not kinds <= {"global", "flash"}:
            self.leave(key)

    def _say_model(self) -> None:
        values = self.values
        ffn = values.get("intermediate_size") or int((values.get("expansion_factor") or 4) * values["hidden_size"])  # fmt: skip
        ffn = int(ffn * 2 / 3) // 2 if str(values.get("activation")).endswith("glu") else ffn
        heads = values["num_attention_heads"]
        if _layers(values.get("attention_config")) == {"mamba"} and values["hidden_size"] % heads:
            # Nothing reads the heads of a model without attention; Megatron wants their width.
            self.say("num_attention_heads", "--kv-channels", values["hidden_size"] // heads)
        multiple = values.get("mlp_multiple_of", 1)
        self.say("intermediate_size", "--ffn-hidden-size", multiple * math.ceil(ffn / multiple))
        epsilon = "rms_norm_epsilon" if values.get("norm") == "rmsnorm" else "layernorm_epsilon"
        usual = {"rms_norm_epsilon": 1e-8, "layernorm_epsilon": 1e-5}[epsilon]
        self.say(epsilon, "--norm-epsilon", values.get(epsilon, usual))
        if values.get("init_method") == "small_init":
            self.say("init_method", "--init-method-std", math.sqrt(2 / (5 * values["hidden_size"])))
        biases = [values.get(f"use_bias_in_{part}", True) for part in ("mlp", "attn_linear")]
        if not any(biases):
            self.say("use_bias_in_mlp", "--disable-bias-linear")
        elif not all(biases):
            self.leave("use_bias_in_attn_linear" if biases[0] else "use_bias_in_mlp")
        if values.get("checkpoint_activations"):
            layers = values.get("checkpoint_num_layers", 1)
            self.say("checkpoint_activations", "--recompute-granularity", "full", "--recompute-method",
                     "uniform", "--recompute-num-layers", layers, "--deepspeed-activation-checkpointing")  # fmt: skip

    def _say_optimizer(self) -> None:
        given = self.values.get("optimizer") or {}
        kind, own = str(given.get("type", "Adam")).lower(), given.get("params") or {}
        if kind not in ("adam", "cpu_adam", "cpu_torch_adam", "sgd"):
            self.leave("optimizer")
            return
        self.say("optimizer", "--optimizer", "sgd" if kind == "sgd" else "adam")
        one, two = own.get("betas", (0.9, 0.999))
        self.say("optimizer", "--lr", own.get("lr", 0.001))
        if kind != "sgd":
            self.say("optimizer", "--adam-beta1", one, "--adam-beta2", two, "--adam-eps", own.get("eps", 1e-8))  # fmt: skip
        elif "momentum" in own:
            self.say("optimizer", "--sgd-momentum", own["momentum"])
        if own.keys() - {"lr", "betas", "eps", "momentum"}:
            self.leave("optimizer")
        if "save" in self.values and "checkpoint_factor" in self.values:
            self.say("save", "--save", self.values["save"])
            self.say("checkpoint_factor", "--save-interval", self.values["checkpoint_factor"])
        if "lr_decay_fraction" in self.values and "lr_decay_iters" not in self.values:
            steps = math.floor(self.values.get("train_iters", 0) * self.values["lr_decay_fraction"])
            self.say("lr_decay_fraction", "--lr-decay-iters", steps)

    def _say_sizes(self) -> None:
        values, ranks = self.values, max((self.world or self.sharers) // self.sharers, 1)
        steps, whole = values.get("gradient_accumulation_steps", 1), values.get("train_batch_size")
        micro = values.get("train_micro_batch_size_per_gpu") or (whole or 0) // ranks // steps
        self.say("train_micro_batch_size_per_gpu", "--micro-batch-size", micro)
        self.say("train_batch_size", "--global-batch-size", whole or micro * steps * ranks)
        self.say("pipe_parallel_size", "--pipeline-model-parallel-size", max(self.stages, 1))
        if self.stages < 1:
            self.say("pipe_parallel_size", "--no-pipeline-parallel")
        if self.precision:
            self.say("precision", f"--{HALVES[self.precision]}")
        if "gradient_clipping" in values:
            self.say("gradient_clipping", "--clip-grad", values["gradient_clipping"])
            usual = tables()["deepspeed"]["gradient_clipping"]
            if values["gradient_clipping"] == usual and not self.clips_by_default:
                self.tell("gradient_clipping", CLIPPING)

    @property
    def clips_by_default(self) -> bool:
        """Whether DeepSpeed clips as GPT-NeoX does where the file does not say it."""
        return Version(self.version) >= Version(CLIPS)

    @property
    def precision(self) -> str | None:
        on = (name for name, key in HALVES.items() if (self.values.get(key) or {}).get("enabled"))
        named = self.values.get("precision") or next(on, None)
        return named if named in HALVES else None

    def config(self) -> dict[str, Any]:
        """The config that GPT-NeoX gives DeepSpeed: only keys whose value is not its own default."""
        usual = tables()["deepspeed"]
        found = {key: value for key, value in self.values.items() if key in usual and value != usual[key]}  # fmt: skip
        found |= self.values.get("deepspeed_extra_args") or {}
        if self.precision:
            key = HALVES[self.precision]
            section = found.get(key) or {}
            if section.get("type") not in (None, key):
                self.leave(key)
            # Names of the format that DeepSpeed's section does not have.
            own = {name: value for name, value in section.items() if name not in ("type", key)}
            known = release(self.version).keys
            # A release that stops at such keys gets them.
            ignores = Version(self.version) < Version(STRICT)
            scaling = [
                name
                for name in own
                if ignores and f"{key}.{name}" not in known and f"fp16.{name}" in known
            ]
            if scaling:
                self.tell(key, f"{', '.join(scaling)}: {SCALED}", Effect.NONE)
            own = {name: value for name, value in own.items() if name not in scaling}
            found[key] = {**own, "enabled": True}
        found.setdefault("gradient_accumulation_steps", self.values.get("gradient_accumulation_steps", 1))  # fmt: skip
        return found

    def launch(self, like: Launch | None = None) -> Launch:
        """Return the launch, with the lines of the settings; those of `like` for the launch of a script."""
        words = [*self.words, ("--deepspeed_config", 0), (FILE, 0), ("--deepspeed", 0)]
        lines = tuple(line or (like.line if like else 0) for _, line in words)
        pieces = tuple((Text(word, NOWHERE),) for word, _ in words)
        text = (Text(_lay_out(self.config(), self.lines), NOWHERE, True, plain=False),)
        files = {FILE: text}
        if like is None:
            return Launch(PROGRAM, pieces, (), {}, 1, lines, ranks=self.world, files=files)
        return replace(like, program=PROGRAM, words=pieces, lines=lines, ranks=self.world, files=files, folder="")  # fmt: skip


def _layers(config: Any) -> set[str]:
    """Return the kinds of layers of an `attention_config`, a list of kinds or of [kinds, times]
    (megatron/utils.py: expand_attention_types).
    """
    rows = ([row] if isinstance(row, str) else row[0] for row in config or ())
    return {str(kind) for row in rows for kind in row}


def _is_layers(config: Any) -> bool:
    return isinstance(config, list) and all(
        isinstance(row, str) or (isinstance(row, list) and bool(row) and isinstance(row[0], list))
        for row in config
    )


def _lay_out(config: Mapping[str, Any], lines: Mapping[str, int]) -> str:
    """Return a JSON text that has each key on its line."""
    text, rows = "{", sorted(config.items(), key=lambda row: lines.get(row[0], 0))
    for at, (key, value) in enumerate(rows):
        text += "\n" * max(lines.get(key, 0) - 1 - text.count("\n"), 0)
        text += f"{', ' if at else ''}{json.dumps(key)}: {json.dumps(value)}"
    return text + "}"
