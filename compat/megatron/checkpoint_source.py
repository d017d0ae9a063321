"""A checkpoint as a source of the launch that loads it: arguments (`--use-checkpoint-args`), the schedule, and the point
of the run.

Follows training/checkpointing.py (load_args_from_checkpoint, check_checkpoint_args, load_checkpoint) and
core/optimizer_param_scheduler.py of Megatron-LM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from bridge.errors import BridgeError
from bridge.files.contained import SMALL, path_inside, read_text
from bridge.files.named import OutsideError, find, is_file
from bridge.files.shown import show_value
from bridge.stack.dialect import Config, Reading
from bridge.stack.findings import Finding, Origin
from bridge.stack.releases import table
from bridge.stack.rules import Effect
from bridge.stack.sources import Claim, Said, Settled
from compat.megatron import releases

COMMON, RANK_FILE = "common.pt", "model_optim_rng.pt"
RANK_0 = ("mp_rank_00", "mp_rank_00_000", "mp_rank_00_000_000")
"""Folders of the first rank, in the order in which find_checkpoint_rank_0 looks for them."""
FROM_BOTH = "0.16.0"
"""The first release that takes arguments from --pretrained-checkpoint too, before those of --load."""
PATTERNS = "0.17.0"
"""The first release with hybrid_layer_pattern, for which it takes the older hybrid_override_pattern."""
IDENTIFIED = "0.19.0"
"""The first release that finds a group of a saved optimizer by its rates too, and stops if they are others
(optimizer/optimizer.py: param_group_identifier_keys).
"""
RESTORED = releases.MAIN
"""The first release in which --override-opt_param-scheduler sets the rates of the loaded groups (main of 2026-08-18;
the branch `dev` has it since 2026-06-16). Before it, the saved groups keep theirs.
"""
TAKES, USES, OVERRIDES = (
    "use_checkpoint_args",
    "use_checkpoint_opt_param_scheduler",
    "override_opt_param_scheduler",
)
ADVICE = "the launch takes the checkpoint's; drop the flag, or {}"


@dataclass(frozen=True)
class Saved:
    """What a checkpoint says of its run: the saved arguments, the version of the format, the point of the run, the
    scheduler's state, and the settings of the optimizer's groups. `file` is where all of this was read.
    """

    file: str
    args: Mapping[str, Any]
    format_version: float = 0
    iteration: int = 0
    is_release: bool = False
    schedule: Mapping[str, Any] = field(default_factory=dict)
    groups: Sequence[Mapping[str, Any]] = ()

    def said(self, name: str, value: Any) -> Said:
        """A value of the checkpoint, with its place."""
        return Said(name, value, self.file)


def read_saved(folder: str, step: int | None = None) -> Saved | None:
    """Return what the checkpoint in a folder that a launch names says; None if there is none in reach.

    Raises `BridgeError` for a checkpoint that cannot be read.
    """
    # Most launches load and save nothing, and reading a checkpoint imports its readers.
    from compat.megatron.checkpoint.run import TRACKER

    try:
        tracker = find(str(PurePosixPath(folder) / TRACKER))
    except OutsideError:
        # A first run names a folder that is not there yet.
        if is_file(Path(folder) / TRACKER):
            raise
        return None
    return _read_folder(tracker.parent, step) if tracker else None


def _read_folder(folder: Path, step: int | None) -> Saved:
    from bridge.checkpoint import archive
    from bridge.checkpoint.hub import as_plain
    from compat.megatron.checkpoint import dist
    from compat.megatron.checkpoint.run import TRACKER, arguments

    is_release = read_text(folder / TRACKER, folder, SMALL).strip() == "release"
    place = dist.iteration(folder)
    if step and not is_release:
        place = path_inside(folder / f"iter_{step:07d}", folder)
    places = (place / COMMON, *(place / rank / RANK_FILE for rank in RANK_0))
    path = next((one for one in places if is_file(one)), None)
    if path is None:
        raise BridgeError(
            f"{place}: found no {COMMON} and no {RANK_0[0]}/{RANK_FILE}, expected a checkpoint of --ckpt-format torch_dist"
            " or torch; save the run so"
        )
    state = archive.read_archive(path, place, dist.KNOWN)
    if not isinstance(state, Mapping):
        raise BridgeError(
            f"{path}: found {show_value(state, 30)}, expected a dictionary; it is damaged"
        )
    known = {
        "args": arguments(state),
        "schedule": state.get("opt_param_scheduler") or state.get("lr_scheduler") or {},
        "groups": [
            {key: value for key, value in group.items() if key != "params"}
            for group in _groups_in(state.get("optimizer"))
        ],
    }
    plain: Any = as_plain(known, str(path))[0]
    version = state.get("checkpoint_version") or 0
    step = state.get("iteration") or state.get("total_iters") or 0
    schedule = plain["schedule"]
    lengths = (
        [value for name, value in schedule.items() if name.endswith("steps")]
        if isinstance(schedule, Mapping)
        else [""]
    )
    BridgeError.raise_if(
        f"{path}: {what}: found {show_value(value, 30)}, expected a number; it is damaged"
        for what, value in (
            ("checkpoint_version", version),
            ("iteration", step),
            *(("opt_param_scheduler", value) for value in lengths),
        )
        if not isinstance(value, int | float)
    )
    return Saved(
        str(path),
        plain["args"],
        float(version),
        0 if is_release else int(step),
        is_release,
        schedule,
        plain["groups"],
    )


def _groups_in(optimizer: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the settings of each group of an optimizer's state, which may be one of several in a chain."""
    inner = optimizer.values() if isinstance(optimizer, Mapping) else optimizer
    if isinstance(optimizer, Mapping) and isinstance(optimizer.get("param_groups"), list):
        yield from (one for one in optimizer["param_groups"] if isinstance(one, Mapping))
    elif isinstance(inner, list | type({}.values())):
        for one in inner:
            if isinstance(one, Mapping):
                yield from _groups_in(one)


# Arguments

CONDITIONS: Mapping[str, Callable[[Mapping[str, Any], Saved], bool]] = {
    "use_tokenizer_model_from_checkpoint_args": lambda args, saved: bool(
        args.get("use_tokenizer_model_from_checkpoint_args")
    ),
    "use_mp_args_from_checkpoint_args": lambda args, saved: bool(
        args.get("use_mp_args_from_checkpoint_args")
    ),
    "old_format": lambda args, saved: saved.format_version < 3,
    "new_format": lambda args, saved: saved.format_version >= 3,
    "experts": lambda args, saved: saved.args.get("num_experts") is not None,
    "no_experts": lambda args, saved: saved.args.get("num_experts") is None,
}
"""When a row of checkpoint_arguments.json counts, by the words in its column `if`."""


def take_arguments(args: Mapping[str, Any], saved: Saved, version: str) -> dict[str, Any]:
    """Return the arguments that a release sets from a checkpoint, next to `args` as its parser left them.

    A value that is not forced counts only where the launch and the parser's defaults have none.
    """
    checkpoint = _renew(saved.args, version)
    taken: dict[str, Any] = {}
    for row in table(releases.__name__, "checkpoint_arguments.json"):
        name = row["name"]
        if not releases.RELEASES.within(version, row.get("since", ""), row.get("until", "")):
            continue
        if not all(CONDITIONS[word](args, saved) for word in row["if"].split()):
            continue
        value = checkpoint.get(row.get("from", name))
        if row.get("clears"):
            taken[name] = None
        elif value is not None and (row.get("forced") or args.get(name) is None):
            taken[name] = value
    return taken


def _renew(args: Mapping[str, Any], version: str) -> dict[str, Any]:
    """Return the arguments of a checkpoint, with what a release makes of those that older releases saved."""
    found = dict(args)
    if "disable_bias_linear" in found:
        found["add_bias_linear"] = not found["disable_bias_linear"]
    pattern = found.get("hybrid_override_pattern")
    if (
        releases.RELEASES.since(version, PATTERNS)
        and pattern is not None
        and found.get("hybrid_layer_pattern") is None
    ):
        found |= {"hybrid_layer_pattern": pattern, "num_layers": None}
    # The argument is a main branch's, and what was saved before it has three reflections.
    return {"gdp_num_householder": 3, **found}


def add_arguments(reading: Reading, version: str) -> Reading:
    """Return a launch's reading with the arguments that it takes from the checkpoint which it loads."""
    names = ("pretrained_checkpoint", "load")
    if not reading.given.get(TAKES):
        return reading
    for name in names if releases.RELEASES.since(version, FROM_BOTH) else names[1:]:
        if (folder := reading.given.get(name)) is not None:
            reading = _add_from(reading, str(folder), version)
    return reading


def _add_from(reading: Reading, folder: str, version: str) -> Reading:
    problem = (
        "there is no such checkpoint in reach; put it there, or allow its folder with --allow-path"
    )
    try:
        saved = read_saved(folder, reading.given.get("ckpt_step"))
    except BridgeError as error:
        saved, problem = None, str(error)
    if saved is not None and not saved.args:
        problem = f"{saved.file} has no arguments, so that Megatron keeps those of the launch"
    if saved is None or not saved.args:
        message = f"the arguments of the checkpoint {show_value(folder)} are not known: {problem}"
        finding = Finding(
            TAKES, message, Effect.NUMBERS, True, origin=reading.origins.get(TAKES), unknown=True
        )
        return replace(reading, findings=(*reading.findings, finding))
    args = {**releases.defaults(version), **reading.given}
    taken = take_arguments(args, saved, version)
    advice = ADVICE.format("make them equal")
    return _overlay(reading, taken, saved, version, dict.fromkeys(taken, advice))


def _overlay(
    reading: Reading,
    taken: Mapping[str, Any],
    saved: Saved,
    version: str,
    advice: Mapping[str, str],
) -> Reading:
    """Return a reading in which values of a checkpoint replace those of the launch, which become claims."""
    defaults = releases.defaults(version)
    own = dict(reading.given)
    claims = tuple(
        Claim(name, own[name], _said(reading, name), advice[name])
        for name, value in taken.items()
        if name in own and own[name] != value
    )
    # No flag sets a switch to the value that it has without a flag.
    values = {name: value for name, value in taken.items() if value != defaults.get(name)}
    rest = {name: value for name, value in own.items() if name not in taken}
    origins = {name: place for name, place in reading.origins.items() if name not in taken}
    origins |= {name: Origin(None, f"args.{name}", saved.file) for name in values}
    winners = {name: saved.said(f"args.{name}", value) for name, value in taken.items()}
    sources = replace(
        reading.sources,
        claims=(*reading.sources.claims, *claims),
        winners={**reading.sources.winners, **winners},
    )
    return replace(
        reading, given=type(reading.given)({**rest, **values}), origins=origins, sources=sources
    )


def _said(reading: Reading | Config, name: str) -> Said:
    origin = reading.origins.get(name) or Origin()
    return Said(origin.spelling or name, reading.given[name], origin.file, origin.line)


# The schedule, and the point of the run

STATE: Mapping[str, tuple[str, ...]] = {
    "max_lr": ("start_lr", "max_lr"),
    "min_lr": ("min_lr",),
    "lr_warmup_steps": ("warmup_iter", "warmup_steps", "lr_warmup_steps"),
    "lr_decay_steps": ("end_iter", "decay_steps", "lr_decay_steps"),
    "lr_decay_style": ("decay_style", "lr_decay_style"),
    "start_wd": ("start_wd",),
    "end_wd": ("end_wd",),
    "wd_incr_steps": ("wd_incr_steps",),
    "wd_incr_style": ("wd_incr_style",),
}
"""Values of the scheduler by the names under which checkpoints have them, older names first, which count first."""
COUNTS = ("num_iters", "num_steps")
"""Names of the count of samples that the schedule has seen, the older one first."""
DECAYS = ("start_wd", "end_wd", "wd_incr_steps", "wd_incr_style")
"""Values that a checkpoint without `start_wd` leaves as they are."""
ARGUMENTS: Mapping[str, str] = {
    "max_lr": "lr",
    "min_lr": "min_lr",
    "lr_warmup_steps": "lr_warmup",
    "lr_decay_steps": "lr_decay",
    "lr_decay_style": "lr_decay_style",
    "start_wd": "start_weight_decay",
    "end_wd": "end_weight_decay",
    "wd_incr_steps": "train",
    "wd_incr_style": "weight_decay_incr_style",
}
"""The argument of each value; of a length, what its names in iterations and in samples begin with."""
LENGTHS = ("lr_warmup_steps", "lr_decay_steps", "wd_incr_steps")
"""Values that count samples."""
COMPARED = ("num_layers", "hidden_size", "num_attention_heads", "add_position_embedding")
WITH_VOCABULARY = ("max_position_embeddings", "make_vocab_size_divisible_by", "tokenizer_type")
"""Arguments that a launch must share with the checkpoint; the second ones, only with --vocab-file (check_checkpoint_args)."""


def load_schedule(
    own: Mapping[str, Any], state: Mapping[str, Any], overrides: bool, uses: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the scheduler's values after it has loaded a state, and those of the state at which it stops instead."""
    found, problems = dict(own), dict[str, Any]()
    for name, names in STATE.items():
        if name in DECAYS and "start_wd" not in state:
            continue
        value = next(state[one] for one in names if one in state)
        if not overrides and not uses and own[name] != value:
            problems[name] = value
        found[name] = own[name] if overrides else value
    found["num_steps"] = next(state[one] for one in COUNTS if one in state)
    return found, problems


def schedule_of(args: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the values with which a launch builds its scheduler; None if it leaves one of them open
    (training.py: get_optimizer_param_scheduler).
    """
    unit, batch = (
        ("iters", args.get("global_batch_size")) if args.get("train_iters") else ("samples", 1)
    )
    length, rate = args.get(f"train_{unit}"), args.get("lr")
    if not length or not batch or rate is None:
        return None
    decay = args.get(f"lr_decay_{unit}")
    decay = (length if decay is None else decay) * batch
    fraction = args.get("lr_warmup_fraction")
    return {
        "max_lr": float(rate),
        "min_lr": args.get("min_lr"),
        "lr_warmup_steps": (
            (args.get(f"lr_warmup_{unit}") or 0) * batch if fraction is None else fraction * decay
        ),
        "lr_decay_steps": decay,
        "lr_decay_style": args.get("lr_decay_style"),
        "start_wd": args.get("start_weight_decay"),
        "end_wd": args.get("end_weight_decay"),
        "wd_incr_steps": length * batch,
        "wd_incr_style": args.get("weight_decay_incr_style"),
    }


def resume(config: Config) -> Config:
    """Return a launch with what the checkpoint brings back that it loads: the point of the run, and the schedule.

    A checkpoint that is not in reach brings nothing back: a first run has none.
    """
    folder = config.given.get("load")
    if config.entry != "flags" or folder is None:
        return config
    try:
        saved = read_saved(str(folder), config.given.get("ckpt_step"))
    except BridgeError as error:
        message = f"what the checkpoint {show_value(folder)} brings back is not known: {error}"
        told = Finding(
            "load", message, Effect.NUMBERS, True, origin=config.origins.get("load"), unknown=True
        )
        return replace(config, remarks=(*config.remarks, told))
    return config if saved is None else _Resumption(config, saved).resumed


class _Resumption:
    """A launch that loads a checkpoint."""

    def __init__(self, config: Config, saved: Saved) -> None:
        self.config, self.saved, self.args = config, saved, config.effective
        self.is_fresh = bool(self.args.get("finetune")) or saved.is_release
        self.loads = not self.is_fresh and not self.args.get("no_load_optim")
        self.overrides, self.uses = (bool(self.args.get(name)) for name in (OVERRIDES, USES))

    @property
    def resumed(self) -> Config:
        """The launch with the values of the checkpoint."""
        config, saved = self.config, self.saved
        taken, stops, steps = (
            self._load_schedule() if self.loads and saved.schedule else ({}, [], 0)
        )
        reading = Reading(config.given, config.entry, config.origins, sources=config.sources)
        hint = ADVICE.format(
            "load without the optimizer (--no-load-optim)"
            if self.overrides
            else "override the checkpoint's with --override-opt_param-scheduler"
        )
        overlaid = _overlay(reading, taken, saved, config.version, dict.fromkeys(taken, hint))
        point = tuple(self._point(steps))
        sources = replace(
            overlaid.sources,
            own=(*overlaid.sources.own, *point),
            # The launch's own count is that of a run which loads nothing.
            hidden=overlaid.sources.hidden | {one.setting for one in point},
        )
        found = replace(
            config,
            given=overlaid.given,
            origins=overlaid.origins,
            sources=sources,
            remarks=(*config.remarks, *self._compare(), *stops),
        )
        _ = found.effective  # the release may refuse what the two say together
        return found

    def _point(self, steps: int | None) -> Iterator[Settled]:
        """Yield where the run goes on."""
        saved = self.saved
        point = {
            "iteration": 0 if self.is_fresh else saved.iteration,
            "consumed_train_samples": (
                0 if self.args.get("finetune") else saved.args.get("consumed_train_samples", 0)
            ),
            **({} if steps is None else {"opt_param_scheduler.num_steps": steps}),
        }
        why = (
            ""
            if self.loads
            else "the schedule begins anew, as it is loaded with the optimizer alone"
        )
        for name, value in point.items():
            of_schedule = name.startswith("opt_param")
            yield Settled(name, value, saved.said(name, value), why=why if of_schedule else "")

    def _compare(self) -> Iterator[Finding]:
        """Yield a finding for each argument that differs from the checkpoint's and stops the run."""
        names = (*COMPARED, *(WITH_VOCABULARY if self.args.get("vocab_file") else ()))
        own = self.saved.args
        for name in names if own and not self.args.get("finetune") else ():
            value = own.get(name, True if name == "add_position_embedding" else None)
            is_known = name in own or value is not None
            if is_known and self.args.get(name) is not None and self.args[name] != value:
                yield self._stop(name, self.args[name], value, "make them equal, or use --finetune")

    def _stop(self, name: str, own: Any, value: Any, advice: str) -> Finding:
        message = (
            f"found {show_value(own)}, but {self.saved.file} has {show_value(value)}: training stops when it loads"
            f" the checkpoint; {advice}"
        )
        origin = self.config.origins.get(name)
        return Finding(
            name, message, Effect.STOPS, True, origin=origin, rule=f"{name}/not-as-saved"
        )

    def _load_schedule(self) -> tuple[dict[str, Any], list[Finding], int | None]:
        """Return the arguments that the checkpoint sets, findings on what stops, and the steps of the schedule."""
        own, state = schedule_of(self.args), self.saved.schedule
        needed = [
            names for name, names in STATE.items() if name not in DECAYS or "start_wd" in state
        ]
        lacking = [
            names[-1] for names in (*needed, COUNTS) if not any(one in state for one in names)
        ]
        if own is None or lacking:
            what = (
                f"its scheduler has no {', '.join(lacking)}"
                if lacking
                else "the launch leaves its own open"
            )
            message = f"the schedule of {self.saved.file} is not read: {what}"
            return {}, [Finding("load", message, Effect.NUMBERS, True, unknown=True)], None
        found, problems = load_schedule(own, self.saved.schedule, self.overrides, self.uses)
        stops = [
            self._stop(
                self._name(name),
                own[name],
                value,
                "make them equal, or choose one with --override-opt_param-scheduler or"
                " --use-checkpoint-opt_param-scheduler",
            )
            for name, value in problems.items()
        ]
        rates = self._rates()
        wrong = {name: value for name, value in rates.items() if own[name] != value}
        if self._is_identified and wrong:
            stops += [
                self._stop(
                    ARGUMENTS[name],
                    own[name],
                    value,
                    "this release finds the groups of the optimizer by their rates; make them equal, or load without"
                    " the optimizer (--no-load-optim)",
                )
                for name, value in wrong.items()
                if name not in problems
            ]
        elif not (self.overrides and releases.RELEASES.since(self.config.version, RESTORED)):
            found |= rates
        if stops:
            return {}, stops, found["num_steps"]
        changed = {name: value for name, value in found.items() if own.get(name, value) != value}
        return *self._arguments(changed, found), found["num_steps"]

    @property
    def _is_identified(self) -> bool:
        fsdp = self.args.get("use_megatron_fsdp")
        return releases.RELEASES.since(self.config.version, IDENTIFIED) and not fsdp

    def _rates(self) -> dict[str, Any]:
        """Return the rates of the saved groups, which the scheduler takes before its own."""
        usual = [group for group in self.saved.groups if not group.get("is_decoupled_lr")]
        of_groups = {
            name: {group[name] for group in usual if isinstance(group.get(name), int | float)}
            for name in ("max_lr", "min_lr")
        }
        return {name: values.pop() for name, values in of_groups.items() if len(values) == 1}

    def _name(self, name: str) -> str:
        stem = ARGUMENTS[name]
        unit = "iters" if self.args.get("train_iters") else "samples"
        return f"{stem}_{unit}" if name in LENGTHS else stem

    def _arguments(
        self, changed: Mapping[str, Any], found: Mapping[str, Any]
    ) -> tuple[dict[str, Any], list[Finding]]:
        """Return values of the schedule as arguments, and findings on those for which there are none."""
        taken: dict[str, Any] = {}
        lost: list[Finding] = []
        unit = self.args["global_batch_size"] if self.args.get("train_iters") else 1
        for name, value in changed.items():
            if name in LENGTHS:
                if name == "wd_incr_steps":
                    if found["wd_incr_style"] != "constant":
                        lost.append(self._lose(name, value))
                elif value % unit:
                    lost.append(self._lose(name, value))
                else:
                    taken[self._name(name)] = int(value // unit)
                    taken |= {"lr_warmup_fraction": None} if name == "lr_warmup_steps" else {}
            elif name not in DECAYS:
                taken[ARGUMENTS[name]] = value
        if {"start_wd", "end_wd", "wd_incr_style"} & changed.keys():
            grows = found["wd_incr_style"] != "constant"
            taken["weight_decay_incr_style"] = found["wd_incr_style"]
            for end in ("start", "end"):
                taken[f"{end}_weight_decay"] = found[f"{end}_wd"] if grows else None
            taken |= {} if grows else {"weight_decay": found["end_wd"]}
        return taken, lost

    def _lose(self, name: str, value: Any) -> Finding:
        message = (
            f"the schedule has the checkpoint's {name}, {show_value(value)} samples ({self.saved.file}), which no"
            " argument of this launch says; it is read with its own"
        )
        origin = self.config.origins.get(self._name(name))
        return Finding(self._name(name), message, Effect.NUMBERS, True, origin=origin, unknown=True)
