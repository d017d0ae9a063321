"""Checkpoints of transformers' Trainer and of accelerate's `save_state`: weights, with the state of the run
in files beside them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from bridge.checkpoint import archive, dcp, torch_save
from bridge.checkpoint.archive import Used
from bridge.checkpoint.files import File
from bridge.checkpoint.groups import TREATED, effective_setting
from bridge.checkpoint.hub import Hub, Model, Origin, Parameter, ParameterGroup, loss_finding
from bridge.checkpoint.interface import PlannedFiles, RootedFormat, Wanted
from bridge.checkpoint.lazy import Held, Lazy
from bridge.checkpoint.pytorch_bin import BINARY, Binary, tensors_of_file
from bridge.checkpoint.renaming import module_order, naming_of_name, rename_parameters
from bridge.checkpoint.run_files import optimizer_files, read_run_files, verify_run_files
from bridge.checkpoint.run_state import Key, hub_of_entries
from bridge.checkpoint.safetensors_file import read_header
from bridge.checkpoint.safetensors_format import (
    SAFE,
    TRAINER,
    Safe,
    check_tensors,
    find_unread_index,
    list_files,
    read_weights,
)
from bridge.errors import SourceError
from bridge.stack.findings import Finding
from bridge.stack.rules import Effect

FSDP = "pytorch_model_fsdp"
"""Name of the file with the weights of FSDP, and the beginning of the name of a folder with their shards
(accelerate/utils/constants.py: FSDP_MODEL_NAME).
"""
NUMBERED = re.compile(
    rf"(?:model_(?=\d+\.safetensors)|pytorch_model_(?=\d+\.bin)|{FSDP}_(?!0$))(\d{{1,3}})(?:\.\w+)?"
)
"""Names of the weights of accelerate's second model and of those after it, with their number."""
OPTIMIZER, SCHEDULER = "optimizer.pt", "scheduler.pt"
STATE = "trainer_state"
UNKNOWN: Mapping[str, Any] = {
    "train_batch_size": 0,
    "stateful_callbacks": {"TrainerControl": {"args": {}, "attributes": {}}},
}
"""The state of a run that Trainer did not save, without which Trainer stops. It warns of another batch size than its own
(transformers/trainer_utils.py: compare_trainer_and_checkpoint_args), and this one is that of no run.
"""
SPARED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
"""Names of parameters that do not decay (transformers/trainer.py: get_decay_parameter_names)."""
EXPERT = re.compile(r"\.experts\.\d+\.")


class Trainer(RootedFormat):
    """The folders `checkpoint-N` of Trainer and those of accelerate's `save_state`, of plain runs and of FSDP."""

    name = "trainer"
    title = "Hugging Face Trainer"
    names: str | None = "huggingface"
    unseen = "a changed byte of a tensor in safetensors is not detected"

    def find(self, folder: Path) -> Path | None:
        """Return the folder if it has weights and an optimizer beside them; else None."""
        weights = Safe().find(folder) or Binary().find(folder)
        has_shards = (folder / f"{FSDP}_0" / dcp.METADATA).is_file() or (
            folder / f"{FSDP}.bin"
        ).is_file()
        has_more = optimizer_files(folder) or _numbered_models(folder)
        return folder if (weights or has_shards) and has_more else None

    def read(self, place: Path) -> Hub:
        """Return the checkpoint. An optimizer that has numbers in place of names belongs to the weights in the
        model's order.
        """
        weights, files, in_order, root, notes = _choose_weights(place, self.root)
        own = {path[-1]: tensor for path, tensor in weights.items()}
        running = _join_experts(own) if optimizer_files(place) else None
        if running is not None:
            weights, in_order = {("model", name): held for name, held in running.items()}, True
        entries, others, findings = read_run_files(place)
        optimizers = [path.stem for path in optimizer_files(place)]
        if notes and root is None and len(optimizers) == 1:
            name = optimizers[0]
            entries = {path: value for path, value in entries.items() if path[0] != name}
            message = f"{name} does not say which of the models it is for; --root {self.root},{name} reads it"
            notes.append(loss_finding("moments", message, Effect.NUMBERS))
        origin = Origin(self.name, files=(*files, *others))
        divide = _divide if (place / TRAINER).is_file() else None
        hub = hub_of_entries(origin, place, {**weights, **entries}, root, in_order, divide)
        state = hub.client.get(STATE)
        steps = state.get("global_step") if isinstance(state, Mapping) else None
        where = hub.where if hub.where.steps is not None else replace(hub.where, steps=steps)
        unread = (find_unread_index(place, names, files) for names in (SAFE, BINARY))
        hub = replace(
            hub,
            where=where,
            findings=(*hub.findings, *findings, *notes, *chain.from_iterable(unread)),
        )
        if running is None:
            return hub
        family = "mixtral" if any("block_sparse_moe" in name for name in own) else "qwen"
        return rename_parameters(hub, naming_of_name("huggingface"), Model(family=family))

    def verify(self, place: Path, used: Used | None = None) -> None:
        """Check the files against SHA256SUMS if there is one, and the checksums within all archives."""
        super().verify(place, used)
        verify_run_files(place, used)
        _, weights, _ = _weights(place)
        for path in weights:
            if path.name == dcp.METADATA:
                dcp.verify_checksums(path.parent, dcp.KNOWN, used)
            elif path.suffix == ".bin":
                archive.verify_archive(path, place, used=used)

    def plan(self, hub: Hub, target: Wanted) -> PlannedFiles:
        """Return the files from which `Trainer.train(resume_from_checkpoint=)` goes on. Weights are masters, as
        Trainer's optimizers update the weights themselves.
        """
        hub = _as_running(hub)
        model, findings = _plan_weights(hub, target)
        known = {**UNKNOWN, **(hub.client.get(STATE) or {})}
        state = {**known, "global_step": hub.where.steps or 0}
        files = [*model.files, File(TRAINER, (json.dumps(state, indent=2).encode() + b"\n",))]
        if _has_optimizer(hub):
            groups = _groups(hub)
            schedule, base = _schedule(hub, groups)
            files += [
                torch_save.torch_file(OPTIMIZER, dict(_optimizer(hub, groups))),
                torch_save.torch_file(SCHEDULER, schedule),
            ]
            findings += [*_find_settings(hub, groups), *base]
        elif hub.schedule:
            message = "no optimizer is written, without which Trainer reads no scheduler; its own begins anew"
            findings.append(loss_finding("schedule", message, Effect.NUMBERS))
        return PlannedFiles(tuple(files), model.sums, (*findings, *_find_losses(hub, "Trainer")))


class Accelerate(Trainer):
    """The folders that accelerate's `load_state` takes. They are read as those of `Trainer`."""

    name = "accelerate"
    title = "accelerate, which is read as trainer"

    def find(self, folder: Path) -> Path | None:
        """Return None: `Trainer` finds these folders."""
        return None

    def plan(self, hub: Hub, wanted: Wanted) -> PlannedFiles:
        """Return the files from which a script with the same groups of parameters goes on
        (accelerate/checkpointing.py: load_accelerator_state).
        """
        hub = _as_running(hub)
        # Its loader refuses a file that has a tied tensor under both of its names.
        model, findings = _plan_weights(replace(hub, ties={}), wanted)
        if hub.ties:
            pairs = ", ".join(f"{alias} (as {name})" for alias, name in hub.ties.items())
            message = (
                f"written under one name, as save_state does, for a model that ties them: {pairs}"
            )
            findings.append(loss_finding("ties", message, Effect.NONE))
        files = [*model.files]
        if hub.moments or hub.groups:
            places = {name: at for at, name in enumerate(_order_parameters(hub, self.name))}
            stored, split = _join_groups(
                hub.groups or (ParameterGroup(tuple(places), hub.settings),)
            )
            groups = [
                replace(one, names=tuple(sorted(one.names, key=places.__getitem__)))
                for one in stored
            ]
            files.append(torch_save.torch_file("optimizer.bin", dict(_optimizer(hub, groups))))
            findings += split
        else:
            message = f"the source checkpoint has no moments that are read, {WEIGHTS_FIRST.format('optimizer')}"
            findings.append(loss_finding("moments", message, Effect.NUMBERS))
        if hub.schedule:
            files.append(torch_save.torch_file("scheduler.bin", dict(hub.schedule)))
        else:
            message = f"the source checkpoint has no state of a scheduler, {WEIGHTS_FIRST.format('scheduler')}"
            findings.append(loss_finding("schedule", message, Effect.NUMBERS))
        losses = _find_losses(hub, "accelerate")
        # Its files hold a step only in the states of the optimizer.
        needless = {"step"} if not hub.moments else {"moments"}
        needless |= set() if hub.groups else {"moments"}
        return PlannedFiles(
            tuple(files),
            model.sums,
            (*findings, *(one for one in losses if one.path not in needless)),
        )


WEIGHTS_FIRST = (
    "so no {0}.bin is written: load_state stops in a script that has prepared its {0}; "
    "call load_state when the model alone is prepared, and prepare the {0} after that"
)


def _join_groups(
    groups: Sequence[ParameterGroup],
) -> tuple[Sequence[ParameterGroup], list[Finding]]:
    """Return the groups of a script from which Megatron's optimizer made its own: without empty ones, and with equal
    ones joined; other groups as they are. A finding says how many there are, as torch loads no other number.
    """
    if not any("wd_mult" in group.settings for group in groups):
        return groups, []
    names: dict[str, list[str]] = {}
    settings: dict[str, Mapping[str, Any]] = {}
    for group in groups:
        if group.names:
            key = repr([effective_setting(group, name) for name in ("lr", *TREATED)])
            names.setdefault(key, []).extend(group.names)
            settings.setdefault(key, group.settings)
    counts = " and ".join(str(len(own)) for own in names.values())
    message = (
        f"Megatron's groups become {len(names)}, of {counts} parameters; load_state takes these in a script whose "
        "optimizer has groups of the same sizes"
    )
    joined = [ParameterGroup(tuple(own), settings[key]) for key, own in names.items()]
    return joined, [loss_finding("groups", message, Effect.NONE)]


def _has_optimizer(hub: Hub) -> bool:
    """Return whether to write an optimizer: SGD may have no moments, and Trainer takes a scheduler only next to one
    (transformers/trainer.py: _load_optimizer_and_scheduler).
    """
    return bool(hub.moments or (hub.groups and hub.schedule))


def _as_running(hub: Hub) -> Hub:
    """Return the checkpoint with the names of a running model, in which all experts of a layer are one tensor. Trainer
    loads weights by these names alone (transformers/trainer.py: _load_from_checkpoint), as `from_pretrained` does too.
    """
    if not any(EXPERT.search(name) for name in hub.parameters):
        return hub
    return rename_parameters(hub, naming_of_name("transformers"), hub.model or Model())


def _join_experts(weights: Mapping[str, Any]) -> dict[str, Lazy] | None:
    """Return weights by the names of a running model, whose parameters the optimizer numbers; None if these are the
    names of the files.
    """
    if not any(EXPERT.search(name) for name in weights):
        return None
    saved = Hub(Origin(""), {name: Parameter(tensor) for name, tensor in weights.items()})
    try:
        return {name: held.weight for name, held in _as_running(saved).parameters.items()}
    except SourceError:
        return None  # a family without a map, whose moments are named as not read


def _plan_weights(hub: Hub, wanted: Wanted) -> tuple[PlannedFiles, list[Finding]]:
    """Return the files of the weights, which are masters: these optimizers update the weights themselves."""
    masters = {
        name: replace(held, weight=held.best, master=None) for name, held in hub.parameters.items()
    }
    model = Safe().plan(replace(hub, parameters=masters), wanted)
    return model, [finding for finding in model.findings if finding.path in ("masters", "ties")]


def _numbered_models(place: Path) -> dict[str, Path]:
    """Return the weights of all models after the first in a folder, by the names that choose them."""
    paths = sorted(place.iterdir()) if place.is_dir() else []
    matches = {path: NUMBERED.fullmatch(path.name) for path in paths}
    return {f"model_{match[1]}": path for path, match in matches.items() if match}


def _choose_weights(
    place: Path, root: str | None
) -> tuple[dict[Key, Any], tuple[Path, ...], bool, str | None, list[Finding]]:
    """Return what `_weights` does of the model that `root` names, the rest of `root`, and findings for the models
    that are not read. accelerate numbers all models after the first (accelerate/checkpointing.py:
    save_accelerator_state). Raises `SourceError` if `root` names none of several.
    """
    numbered = _numbered_models(place)
    if not numbered:
        return *_weights(place), root, []
    first = next(iter(numbered))
    parts = (root or "").split(",")
    chosen = next((part for part in parts if part in ("model", *numbered)), None)
    if chosen is None:
        raise SourceError(
            f"{place}: found several models: model, {', '.join(numbered)}; choose one with --root, as in --root {first}; "
            f"an optimizer follows after a comma, as in --root {first},optimizer_1"
        )
    rest = ",".join(part for part in parts if part != chosen) or None
    notes = [
        loss_finding(name, f"this model is not read; --root {name} reads it", Effect.NONE)
        for name in ("model", *numbered)
        if name != chosen
    ]
    if chosen == "model":
        return *_weights(place), rest, notes
    path = numbered[chosen]
    if path.is_dir():
        entries = dcp.read_entries(path)
        files = (path / dcp.METADATA, *sorted(path.glob("*.distcp")))
        return {entry.path: entry.value for entry in entries.values()}, files, False, rest, notes
    in_order = path.suffix == ".bin"
    tensors = tensors_of_file(path, place) if in_order else read_header(path, place)
    return {("model", name): held for name, held in tensors.items()}, (path,), in_order, rest, notes


def _weights(place: Path) -> tuple[dict[Key, Any], tuple[Path, ...], bool]:
    """Return the tensors of the model in a folder, the files that hold them, and whether they are in the
    model's order.
    """
    folder = place / f"{FSDP}_0"
    if (folder / dcp.METADATA).is_file():
        entries = dcp.read_entries(folder)
        files = (folder / dcp.METADATA, *sorted(folder.glob("*.distcp")))
        return {entry.path: entry.value for entry in entries.values()}, files, False
    tensors, files = read_weights(place)
    if files:
        return {("model", name): tensor for name, tensor in tensors.items()}, files, False
    if paths := list_files(place, BINARY):
        binaries = {path: tensors_of_file(path, place) for path in paths}
        tensors = check_tensors(place, BINARY, binaries)
        return {("model", name): tensor for name, tensor in tensors.items()}, paths, True
    path = place / f"{FSDP}.bin"
    tensors = tensors_of_file(path, place)
    return {("model", name): tensor for name, tensor in tensors.items()}, (path,), True


def _order_parameters(hub: Hub, format: str) -> list[str]:
    """Return the trainable parameters in the model's order. Raises `SourceError` if it is unknown."""
    parameters = hub.trainable_parameters
    order = module_order({name: held.weight for name, held in parameters.items()})
    order = order or (list(parameters) if hub.ordered else None)
    if order is None:
        tool = {"trainer": "Trainer"}.get(format, format)
        raise SourceError(
            f"{format}: the order of the model's parameters is unknown, by which {tool} finds the moments of each; "
            "convert to another format"
        )
    return list(order)


def _groups(hub: Hub) -> tuple[ParameterGroup, ...]:
    """Return the groups that Trainer makes: what decays, and what does not (transformers/trainer.py:
    create_optimizer), each in the model's order and with the settings that its parameters have in the
    checkpoint. Raises `SourceError` if the model's order is unknown.
    """
    parameters = hub.trainable_parameters
    order = _order_parameters(hub, "trainer")
    settings = {name: group.settings for group in hub.groups for name in group.names}
    rows = _divide({name: parameters[name].weight for name in order})
    # Trainer makes both groups even if one has no parameters, and torch loads as many as it has.
    return tuple(
        ParameterGroup(tuple(names), settings.get(next(iter(names or order), ""), hub.settings))
        for names in rows
    )


def _divide(weights: Mapping[str, Lazy]) -> tuple[list[str], list[str]]:
    """Return the names of the parameters that Trainer decays, and of those that it does not."""
    rows: tuple[list[str], list[str]] = ([], [])
    for name, weight in weights.items():
        # Trainer goes by names, and by the class of a norm, whose parameters have one dimension.
        rows[len(weight.shape) < 2 or bool(SPARED.search(name.lower()))].append(name)
    return rows


def _optimizer(hub: Hub, groups: Sequence[ParameterGroup]) -> Iterator[tuple[str, Any]]:
    """Yield the entries of the state of torch's AdamW with numbers for names."""
    import torch

    numbers = {name: at for at, name in enumerate(name for group in groups for name in group.names)}
    states: dict[int, dict[str, Any]] = {}
    for name, at in numbers.items():
        parameter = hub.parameters[name]
        step = parameter.step if parameter.step is not None else hub.where.steps
        if parameter.moments:  # an optimizer makes what a parameter without a state lacks
            states[at] = {"step": Held(torch.tensor(float(step or 0))), **parameter.moments}
    yield "state", states
    rows = [
        {
            **dcp.NEUTRAL,
            **{
                key: tuple(value) if key == "betas" else value
                for key, value in group.settings.items()
            },
            "params": [numbers[name] for name in group.names],
        }
        for group in groups
    ]
    yield "param_groups", rows


def _schedule(hub: Hub, groups: Sequence[ParameterGroup]) -> tuple[dict[str, Any], list[Finding]]:
    """Return the state of Trainer's scheduler, which is a LambdaLR (transformers/optimization.py), and
    findings. Without a base rate in the state, Trainer's own arguments give it.
    """
    state = dict(hub.schedule or {})
    if "lr_lambdas" not in state and STATE not in hub.client:
        state = {}  # of another class, which only a script that had Trainer use it can load
    rates = state.get("base_lrs") or ()
    if "last_epoch" in state and len(set(rates)) == 1:
        # One rate for all groups holds for any number of them.
        lists = {
            key: list(value[:1]) * len(groups)
            for key, value in state.items()
            if isinstance(value, list | tuple) and len(value) == len(rates)
        }
        return {**state, **lists}, []
    if "last_epoch" in state and len(rates) == len(groups):
        return state, []
    steps = hub.where.steps or 0
    new_state = {
        "last_epoch": steps,
        "_step_count": steps + 1,
        "_is_initial": False,
        "_get_lr_called_within_step": False,
        "_last_lr": [group.settings.get("lr") for group in groups],
        "lr_lambdas": [{} for _ in groups],
    }
    initial = [group.settings.get("initial_lr") for group in groups]
    if None not in initial:
        new_state["base_lrs"] = initial
    message = (
        "the source checkpoint has no state of one of torch's schedulers for these groups; Trainer's scheduler goes on "
        f"from step {steps} by the arguments of the run"
    )
    return new_state, [loss_finding("schedule", message, Effect.NUMBERS)]


def _find_settings(hub: Hub, groups: Sequence[ParameterGroup]) -> Iterator[Finding]:
    """Yield a finding for the settings of parameters that Trainer puts into one group, if they differ."""
    settings = {name: group.settings for group in hub.groups for name in group.names}
    for group in groups:
        odd = sorted(
            {
                key
                for name in group.names
                for key in (*TREATED, "lr")
                if settings.get(name, {}).get(key) != group.settings.get(key)
            }
        )
        if odd:
            message = f"{', '.join(odd)} differ within a group of Trainer; all of it gets those of {group.names[0]}"
            yield loss_finding("groups", message, Effect.NUMBERS)
    if not hub.groups and not hub.settings:
        message = "the source checkpoint has no settings of the optimizer; Trainer's optimizer needs them to load moments"
        yield loss_finding("groups", message, Effect.NUMBERS)


def _find_losses(hub: Hub, tool: str) -> Iterator[Finding]:
    """Yield a finding for each value that the files of a tool do not hold or that the source does not have."""
    if hub.lacks_moments:
        message = f"the source checkpoint has no moments; {tool} starts with new ones"
        yield loss_finding("moments", message, Effect.NUMBERS)
    if hub.where.steps is None:
        yield loss_finding("step", "the step is unknown; 0 is written", Effect.NUMBERS)
    if hub.scale is not None:
        yield loss_finding(
            "scale", f"the loss scale is not written; {tool} begins with a new one", Effect.NUMBERS
        )
    message = f"no random states are written; {tool} draws different numbers"
    yield loss_finding("random", message, Effect.NUMBERS)
    if keys := [key for key in hub.client if key != STATE]:
        message = f"{tool}'s files do not hold these values of the script: {', '.join(keys)}"
        yield loss_finding("client", message, Effect.NONE)
