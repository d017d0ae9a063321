"""The state of a Megatron-LM run besides tensors: arguments, counters, scheduler, optimizer groups, loss scale."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bridge.checkpoint import archive
from bridge.checkpoint.groups import TREATED, base_rate
from bridge.checkpoint.hub import (
    Hub,
    Model,
    ParameterGroup,
    Scale,
    Where,
    as_plain,
    loss_finding,
    tuples_to_lists,
)
from bridge.checkpoint.lazy import Held, Lazy
from bridge.checkpoint.unpickle import Record, recorders
from bridge.errors import SourceError
from bridge.files.shown import show_value
from bridge.stack.findings import Finding
from bridge.stack.rules import Effect

CLIENT = "megatron"
"""The key in the script's own state under which other formats carry Megatron's arguments."""
TRACKER = "latest_checkpointed_iteration.txt"
DAMAGED = "the checkpoint is damaged"
ENUMS = (
    *(
        f"megatron.core.transformer.enums {name}"
        for name in ("AttnBackend", "CudaGraphScope", "CudaGraphModule", "AttnMaskType")
    ),
    *(
        "megatron.core.transformer.enums InferenceCudaGraphScope",
        "megatron.core.enums ModelType",
        "signal Signals",
    ),
    *(
        f"megatron.core.rerun_state_machine {name}"
        for name in ("RerunDiagnostic", "RerunMode", "RerunState")
    ),
)
KNOWN = {
    **archive.KNOWN,
    **recorders(
        "argparse Namespace",
        "types SimpleNamespace",
        "_io BytesIO",
        "megatron.core.optimizer.optimizer_config OptimizerConfig",
    ),
    **recorders(
        "pathlib PosixPath",
        "pathlib._local PosixPath",
        "numpy.dtypes UInt32DType",
        "numpy.dtypes _UInt32DType",
        *ENUMS,
    ),
}
"""Names of classes in Megatron-LM's files that are read as records (core/safe_globals.py)."""
KEYS = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
"""Names of settings that identify a group of Megatron's optimizer
(optimizer/optimizer.py: param_group_identifier_keys).
"""
GROUP: Mapping[str, Any] = {
    "is_expert_parallel": False,
    "default_config": True,
    "wd_mult": 1.0,
    "lr_mult": 1.0,
    "is_decoupled_lr": False,
}
ADAM: Mapping[str, Any] = {
    **dict.fromkeys(("amsgrad", "maximize", "capturable", "differentiable"), False),
    **dict.fromkeys(("foreach", "fused")),
    "decoupled_weight_decay": True,
}
"""Settings of torch's AdamW, which Megatron uses without Transformer Engine."""
SCHEDULE: Mapping[str, Any] = {
    "max_lr": 0.0,
    "lr_warmup_steps": 0,
    "num_steps": 0,
    "lr_decay_style": "constant",
    "lr_decay_steps": 1,
    "min_lr": 0.0,
    "start_wd": 0.0,
    "end_wd": 0.0,
    "wd_incr_style": "constant",
    "wd_incr_steps": 1,
}
"""Entries of the scheduler's state, with placeholders for those that a checkpoint lacks. The steps in them
count samples
(optimizer_param_scheduler.py: state_dict).
"""


def arguments(common: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the saved arguments by name; empty if there are none."""
    record = common.get("args")
    return record.state if isinstance(record, Record) else {}


def model_of(args: Mapping[str, Any]) -> Model | None:
    """Return facts about the model from the arguments, or None if the arguments have no number of
    heads.
    """
    heads = args.get("num_attention_heads")
    if not isinstance(heads, int):
        return None
    groups = args.get("num_query_groups") if args.get("group_query_attention") else None
    sizes: dict[str, Any] = {fact: args.get(name) for fact, name in SIZES.items()}
    unties = args.get("untie_embeddings_and_output_weights")
    if sizes["experts"] and not sizes["expert_ffn"]:
        sizes["expert_ffn"] = sizes["ffn"]
    values: dict[str, Any] = {
        fact: size for fact, size in sizes.items() if isinstance(size, int) and size
    }
    return Model(
        groups or heads,
        **values,
        tied=None if unties is None else not unties,
        refused=refusals(args),
    )


SIZES: Mapping[str, str] = {
    "vocab": "vocab_size",
    "padded_vocab": "padded_vocab_size",
    "layers": "num_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "head_size": "kv_channels",
    "ffn": "ffn_hidden_size",
    "experts": "num_experts",
    "expert_ffn": "moe_ffn_hidden_size",
    "shared_ffn": "moe_shared_expert_intermediate_size",
}
"""Names of the arguments that are facts about the model."""


ODD = (
    "apply_layernorm_1p",
    "layernorm_zero_centered_gamma",
    "rotary_interleaved",
    "multi_latent_attention",
)
"""Names of arguments that change the meaning of weights, so that renaming is not enough."""


def refusals(args: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a refusal for each argument that changes the meaning of weights."""
    return tuple(
        f"{name}: found {args[name]!r} in the arguments of the run"
        for name in ODD
        if args.get(name)
    )


def groups_of(
    rows: Sequence[Mapping[str, Any]], names: Mapping[str, int], where: str
) -> tuple[ParameterGroup, ...]:
    """Return the optimizer's groups with the names of their parameters, which the files do not
    contain.

    Megatron puts biases and vectors into groups without weight decay (optimizer/__init__.py:
    get_standard_config_overrides), and experts, embedding and output layer into separate groups if
    their settings differ. `names` has the number of dimensions of each parameter. Raises
    `SourceError` if two groups have the same place and other settings, or if a parameter fits no group.
    """
    # One of two equal groups may be empty: whichever has the parameters, they are treated alike.
    rows = [row for number, row in enumerate(rows) if row not in rows[:number]]
    # NeMo saves such a key as pre_wd_mult and so on, and Megatron reads both
    # (optimizer/optimizer.py).
    keys = [tuple(row.get(name, row.get(f"pre_{name}")) for name in KEYS) for row in rows]
    if len(set(keys)) < len(keys):
        raise SourceError(f"{where}: two groups of the optimizer have the same settings; {DAMAGED}")
    apart = any(key[2] for key in keys)
    ends = any(key[3] for key in keys)
    members: list[list[str]] = [[] for _ in rows]
    for name, dimensions in names.items():
        no_decay = dimensions == 1 or name.endswith(".bias")
        expert = apart and ".experts." in name
        end = ends and name in (
            "embedding.word_embeddings.weight",
            "output_layer.weight",
            "embedding.position_embeddings.weight",
        )
        at = []
        for number, key in enumerate(keys):
            # If all groups have one wd_mult, the run decays nothing, and vectors are not apart.
            decay_fits = len({other[0] for other in keys}) == 1 or (key[0] == 0.0) == no_decay
            if (bool(key[2]), bool(key[3])) == (expert, end) and decay_fits:
                at.append(number)
        if len(at) != 1:
            raise SourceError(
                f"{where}: {name} fits {len(at)} groups of the optimizer; expected one; "
                "only groups of Megatron's own optimizers can be read"
            )
        members[at[0]].append(name)
    own = (
        {key: value for key, value in row.items() if key not in ("params", "step")} for row in rows
    )
    settings = (tuples_to_lists(as_plain(row, where)[0]) for row in own)
    return tuple(
        ParameterGroup(tuple(own), values) for own, values in zip(members, settings, strict=True)
    )


def scale_of(optimizer: Mapping[str, Any], args: Mapping[str, Any]) -> Scale | None:
    """Return the state of the loss scale, with steps counted as in the hub's checkpoints.

    Megatron doubles the scale at the end of the loss-scale window. In the hub's count, the scale
    doubles one step later.
    """
    scaler = optimizer.get("grad_scaler")
    if not isinstance(scaler, Mapping) or "scale" not in scaler:
        scale = args.get("loss_scale")
        return Scale(float(scale), False) if scale else None
    good = int(_number(scaler["growth_tracker"]))  # steps since the last overflow
    overflows = int(_number(scaler["hysteresis_tracker"]))  # overflows until the scale is lowered
    return Scale(
        float(_number(scaler["scale"])),
        True,
        2.0,
        args.get("loss_scale_window"),
        args.get("min_loss_scale"),
        args.get("hysteresis"),
        # Megatron lowers the scale when its count reaches 0, so one less is tolerated.
        max(overflows - 1, 0),
        good + 1,  # makes up for that one step
    )


def _number(value: Any) -> float:
    return float(value.whole().reshape(-1)[0]) if isinstance(value, Lazy) else float(value)


def step_of(optimizer: Mapping[str, Any]) -> float | None:
    """Return the number of updates that the moments have seen; None if the checkpoint contains two
    different numbers.

    Depending on the optimizer, the number is stored in the groups or in the state.
    """
    inner = optimizer.get("optimizer", optimizer)
    state = inner.get("state")
    counts = [row["step"] for row in inner.get("param_groups", ()) if row.get("step") is not None]
    counts += (
        [state["common_step"]] if isinstance(state, Mapping) and "common_step" in state else []
    )
    counts += [
        entry["step"]
        for entry in (state or {}).values()
        if isinstance(entry, Mapping) and "step" in entry
    ]
    steps = {_number(value) for value in counts}
    # Several numbers mean that a part of the optimizer comes from another step.
    return steps.pop() if len(steps) == 1 else None


def where_of(common: Mapping[str, Any], step: float | None, lr: float | None) -> Where:
    """Return the progress of the run. Megatron counts skipped steps as iterations, so they are
    subtracted from the iteration.
    """
    args, iteration = arguments(common), common.get("iteration")
    updates = int(step) if step is not None else iteration
    # An iteration whose gradients overflow makes no update.
    skips = iteration - int(step) if isinstance(iteration, int) and step is not None else None
    samples = args.get("consumed_train_samples")
    return Where(
        updates, skips, samples if isinstance(samples, int) else None, lr=lr, seed=args.get("seed")
    )


def client_of(common: Mapping[str, Any]) -> tuple[dict[str, Any], list[Finding]]:
    """Return Megatron's arguments, counters and scheduler as the script's own state, and findings
    on what is lost.

    Checkpoints of other formats carry the script's own state. The scheduler is part of this state,
    because no other stack has the same scheduler. Arguments that are objects are left out.
    """
    flops = common.get("num_floating_point_operations_so_far")
    args, _ = as_plain(
        {key: value for key, value in arguments(common).items() if not isinstance(value, Record)},
        "args",
    )
    schedule, findings = as_plain(common.get("opt_param_scheduler"), "opt_param_scheduler")
    state = {
        "args": args,
        "checkpoint_version": common.get("checkpoint_version"),
        "num_floating_point_operations_so_far": flops,
        "opt_param_scheduler": schedule,
    }
    content = {key: value for key, value in state.items() if value}
    return {CLIENT: content} if content else {}, findings


def generators(there: bool) -> Iterator[Finding]:
    """Yield a finding that random states are lost, if there are any."""
    if there:
        yield loss_finding(
            "rng_state",
            "random states of Megatron's own trackers are not carried over; "
            "dropout differs from the original run",
            Effect.NUMBERS,
        )


# Writing


def run_state(hub: Hub) -> Mapping[str, Any]:
    """Return the state of a Megatron run in a checkpoint of another format. Empty if the checkpoint
    has none.
    """
    state = hub.client.get(CLIENT)
    return state if isinstance(state, Mapping) else {}


def common_of(hub: Hub, optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """Return all values that Megatron-LM saves besides tensors (checkpointing.py:
    generate_state_dict).
    """
    state = run_state(hub)
    # Random states are not written. With this argument, load_checkpoint does not look for them.
    args = {**(state.get("args") or {}), "no_save_rng": True}
    if hub.where.samples is not None:
        args["consumed_train_samples"] = hub.where.samples
    entry = {"args": Record("argparse Namespace", (), args)} if state.get("args") else {}
    return {
        **entry,
        "checkpoint_version": float(state.get("checkpoint_version") or 3.0),
        "iteration": iteration_of(hub),
        "num_floating_point_operations_so_far": state.get("num_floating_point_operations_so_far")
        or 0,
        "optimizer": dict(optimizer),
        "opt_param_scheduler": scheduler_of(hub),
    }


def iteration_of(hub: Hub) -> int:
    """Return Megatron's count of iterations: steps with an update plus skipped steps."""
    return (hub.where.steps or 0) + (hub.where.skipped or 0)


def scheduler_of(hub: Hub) -> dict[str, Any]:
    """Return the state of the scheduler: the state that the source carries, advanced to the samples
    seen. If the source carries none, only the number of samples is known, and all other entries
    are the placeholders in `SCHEDULE`.

    Samples of skipped steps do not advance the scheduler (training.py: train_step).
    """
    state, where = run_state(hub), hub.where
    schedule = {**SCHEDULE, **(state.get("opt_param_scheduler") or {})}
    # The carried state is of this very point of the run, unless steps were made since in another
    # stack.
    there = (
        state.get("opt_param_scheduler")
        and (state.get("args") or {}).get("consumed_train_samples") == where.samples
    )
    if where.samples is not None and not there:
        updates, steps = where.steps or 0, iteration_of(hub)
        # num_steps counts samples; of all samples seen, the share of the iterations that made an
        # update.
        schedule["num_steps"] = where.samples * updates // steps if steps else where.samples
    return schedule


def rows_of(hub: Hub, step: float | None) -> list[dict[str, Any]]:
    """Return the settings of Megatron's optimizer groups for this model.

    Several groups of the source may become one group of Megatron. That group gets the settings of
    the source's group with most of its parameters; `unsaid` reports the other settings. Raises
    `SourceError` if the source has no settings at all.
    """
    kinds = _kinds(hub)
    if not kinds:
        raise SourceError(
            "megatron: the source has no settings of optimizer groups, which Megatron needs; keep the source's format"
        )
    rows = []
    for no_decay, numbers in sorted(kinds.items()):
        settings = _settings(hub.groups[_most(numbers)].settings)
        row = {
            **GROUP,
            "wd_mult": 0.0 if no_decay else 1.0,
            **settings,
            **({} if step is None else {"step": step}),
        }
        rows.append(row)
        # Experts are reduced over other ranks, so they have groups of their own.
        if any(".experts." in name for name in hub.parameters):
            rows.append({**row, "is_expert_parallel": True})
    return rows


def _kinds(hub: Hub) -> dict[bool, dict[int, list[str]]]:
    """Return the parameters of Megatron's two groups, by the number of the source's group that they
    come from. The key True is Megatron's group without weight decay, the key False the other group.
    """
    kinds: dict[bool, dict[int, list[str]]] = {}
    for number, group in enumerate(hub.groups):
        for name in group.names:
            no_decay = len(hub.parameters[name].weight.shape) == 1 or name.endswith(".bias")
            kinds.setdefault(no_decay, {}).setdefault(number, []).append(name)
    return kinds


def _most(numbers: Mapping[int, Sequence[str]]) -> int:
    """Return the number of the group with the most parameters. Of several such groups, return
    the number of the first.
    """
    return max(numbers, key=lambda number: (len(numbers[number]), -number))


def _otherwise(hub: Hub) -> Iterator[Finding]:
    """Yield findings on groups of the source that Megatron cannot represent."""
    for no_decay, numbers in sorted(_kinds(hub).items()):
        main = _most(numbers)
        for number, names in numbers.items():
            own, common = (
                {**hub.groups[at].settings, RATE: base_rate(hub.groups[at])}
                for at in (number, main)
            )
            keys = (RATE, *(key for key in TREATED if not no_decay or key != "weight_decay"))
            other = [key for key in keys if key in own and own[key] != common.get(key)]
            settings = ", ".join(
                f"{key} {show_value(own[key])} instead of {show_value(common.get(key))}"
                for key in other
            )
            if settings:
                what = "biases and vectors" if no_decay else "matrices"
                message = f"{len(names)} parameters, such as {names[0]}, had {settings}; Megatron has one group for all {what}"
                yield loss_finding("groups", message, Effect.NUMBERS)


RATE = "learning rate"


def _settings(source: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a group that Megatron's optimizer has, with defaults for settings that
    the group lacks.
    """
    settings = {
        key: value
        for key, value in source.items()
        if key not in (*KEYS, "step", "initial_lr", "params", "bias_correction")
    }
    if "betas" in settings:
        settings["betas"] = tuple(settings["betas"])
    return {**ADAM, **settings}


def grad_scaler(hub: Hub) -> dict[str, Any]:
    """Return the loss scale in the form of Megatron's scaler (optimizer/grad_scaler.py)."""
    import torch

    scale = hub.scale
    if scale is None or not scale.dynamic:
        return {}
    hysteresis = scale.hysteresis or 2  # Megatron's default
    overflows = hysteresis if scale.tolerated is None else scale.tolerated + 1
    return {
        "grad_scaler": {
            "scale": Held(torch.tensor([scale.value])),
            "growth_tracker": Held(torch.tensor([(scale.good or 0) - 1], dtype=torch.int)),
            "hysteresis_tracker": Held(torch.tensor([overflows], dtype=torch.int)),
        }
    }


def unsaid(hub: Hub) -> Iterator[Finding]:
    """Yield findings on state that Megatron needs and the source lacks."""
    if not run_state(hub).get("args"):
        message = (
            "the source has no arguments of Megatron-LM; "
            "the run uses the launch's arguments, and its data starts again at the first sample"
        )
        yield loss_finding("args", message, Effect.NUMBERS)
    if not run_state(hub).get("opt_param_scheduler"):
        message = (
            "of the scheduler's state, the source has only the number of samples seen; "
            "launch with --override-opt_param-scheduler"
        )
        yield loss_finding("schedule", message, Effect.NONE)
    if hub.where.samples is None:
        message = "the source has no number of samples seen, which Megatron's scheduler needs; set it with --samples"
        yield loss_finding("samples", message, Effect.NUMBERS)
    if hub.trainable_parameters and not hub.moments:
        yield loss_finding(
            "moments", "the source has no moments; launch with --no-load-optim", Effect.NUMBERS
        )
    if hub.where.steps is None:
        yield loss_finding(
            "step",
            "the source has no number of steps; the run starts at iteration 0",
            Effect.NUMBERS,
        )
    if hub.random:
        yield loss_finding(
            "random",
            "Megatron cannot use the random states of another stack; launch with --no-load-rng",
            Effect.NUMBERS,
        )
    yield from _otherwise(hub)
    groups = [group for group in hub.groups if group.settings.get("weight_decay")]
    vectors = [
        name
        for group in groups
        for name in group.names
        if len(hub.parameters[name].weight.shape) == 1
    ]
    if vectors:
        message = f"the source's optimizer decays {vectors[0]} and {len(vectors) - 1} more vectors; Megatron decays no vectors"
        yield loss_finding("optimizer.decay_scope", message, Effect.NUMBERS)
