"""Settings that Merak accepts and then ignores, fails on or gets wrong. Each check names the effect
and the place in Merak's source.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import pairwise
from typing import Any

from bridge.files.shown import show_value
from bridge.stack import checks
from bridge.stack.check_tables import Checks
from bridge.stack.checks import Check
from bridge.stack.dialect import Config
from bridge.stack.findings import Finding, Origin
from bridge.stack.rules import Effect
from compat.merak.habits import automatic
from compat.merak.releases import RELEASES, REWRITTEN, ULYSSES, Release, release
from compat.merak.rules.table import (
    BF16,
    INHERITED,
    compute,
    has_zero,
    switches_clipping_off,
    table,
)

ZERO_ONLY = "only ZeRO looks at this argument; set zero_stage 1, or drop the argument"
ZERO_OFF = "ZeRO is off; set zero_stage 1, or drop this argument"


class Seen(checks.Seen):
    """A config of Merak, as the checks get it. A check names an argument without the prefix
    `args.`.
    """

    def __getitem__(self, name: str) -> Any:
        return self.values.get(name if "." in name else f"args.{name}")

    def size(self, axis: str) -> int:
        """Return the number of ranks on an axis of `init`; 1 if it is not set."""
        return int(self.values.get(f"init.{axis}") or 1)


def _ignore_unless(
    argument: str,
    used: Callable[[Seen], bool],
    message: str,
    place: str,
    since: str = "",
    until: str = "",
    name: str = "",
) -> Check:
    path = argument if "." in argument else f"args.{argument}"
    return Check(
        path,
        lambda view: view.wrote(path) and not used(view),
        f"no effect: {message}",
        Effect.NONE,
        place,
        since,
        until,
        name=name,
    )


def _dead(
    argument: str, message: str, place: str, since: str = "", until: str = "", name: str = ""
) -> Check:
    return _ignore_unless(argument, lambda view: False, message, place, since, until, name)


def _on(view: Seen) -> bool:
    return has_zero(view.values, view.context)


def _wrong_norm(view: Seen) -> bool:
    """Return whether gradients are clipped by the norm of the rank's own parameters only
    (`torch.nn.utils.clip_grad_norm_`).
    """
    own = (
        not view["fp16"]
        and not switches_clipping_off(view.values)
        and view["half_precision_backend"] != "apex"
    )
    # With one pipeline and one tensor rank, the rank's own parameters are all of them.
    return (view["max_grad_norm"] or 0) > 0 and own and view.size("pp") * view.size("tp") > 1


def _odd_cuts(view: Seen) -> bool:
    words = view["custom_partition"]
    if view["partition_method"] != "custom" or not words:
        return False
    cuts = [int(part) for part in words[0].split(",")]
    return cuts[0] != 0 or any(second < first for first, second in pairwise(cuts))


def _checkpoints(view: Seen) -> bool:
    return bool(view["activation_checkpointing"])


CHECKS = Checks(
    RELEASES,
    # Nothing reads them
    _dead(
        "split_inputs",
        "nothing in Merak reads this argument",
        "merak_args/args.py",
        since=REWRITTEN,
    ),
    _dead(
        "hysteresis",
        "the scaler takes a hysteresis of 2 in any case",
        "core/amp/amp_engine.py: dynamic_loss_args",
        since=REWRITTEN,
    ),
    _dead(
        "loss_scale", "the scale is dynamic in any case", "core/amp/amp_engine.py", since=REWRITTEN
    ),
    _dead(
        "init.backend", "init takes NCCL if torch supports NCCL, else MPI", "initialize.py: init"
    ),
    _dead(
        "bf16",
        f"Merak {BF16} is the first release that reads bf16; this release trains in fp32",
        "core/amp/amp_engine.py",
        until="2.2.2",
        name="no-effect-merak-reads-it",
    ),
    _dead("fp16_opt_level", "only Apex mixed precision uses this level", "core/amp/amp_engine.py"),
    _ignore_unless(
        "shard_count",
        lambda view: view["split_method"] in (None, "farthest_min_deps"),
        "only split_method farthest_min_deps uses this number",
        "core/fx/graph_shard/split_graph.py",
        REWRITTEN,
    ),
    _ignore_unless("prescale_gradients", _on, ZERO_ONLY, "core/zero/stage1.py", "1.1.1"),
    _ignore_unless("gradient_predivide_factor", _on, ZERO_ONLY, "core/zero/stage1.py", "1.1.1"),
    _ignore_unless("zero_reduce_bucket_size", _on, ZERO_OFF, "core/zero/stage1.py"),
    _ignore_unless("zero_allgather_bucket_size", _on, ZERO_OFF, "core/zero/stage1.py"),
    _ignore_unless("zero_allow_untested_optimizer", _on, ZERO_OFF, "core/zero/stage1.py"),
    _ignore_unless(
        "custom_partition",
        lambda view: view["partition_method"] == "custom",
        "only partition_method custom uses this argument",
        "core/pipeline/layers_partition.py",
    ),
    _ignore_unless(
        "custom_split_points",
        lambda view: view["split_method"] == "layer_split",
        "only split_method layer_split uses this argument",
        "core/fx/graph_shard/layer_config.py",
    ),
    _ignore_unless(
        "parallel_vocab",
        lambda view: view.size("tp") > 1,
        "Merak splits the vocabulary only with tp > 1",
        "core/tensor_parallel/model_parallel.py",
        name="no-effect-it-needs-tp",
    ),
    _ignore_unless(
        "cache_name",
        lambda view: bool(view["cache_sharding"]),
        "cache_sharding is off",
        "core/pipeline/module.py",
    ),
    _ignore_unless(
        "checkpoint_num_layers",
        lambda view: _checkpoints(view) and view["split_method"] != "nearest_min_deps",
        "split_method nearest_min_deps makes Merak recompute chunks of similar size instead;"
        " activation_checkpointing false switches recomputation off",
        "core/pipeline/module.py: act_ckpt_interval",
        "2.2.1",
        name="no-effect-split_method-nearest_min_deps-puts",
    ),
    _ignore_unless(
        "warmup_ratio",
        lambda view: not view["warmup_steps"],
        "warmup_steps wins",
        "transformers: get_warmup_steps",
    ),
    _ignore_unless(
        "num_train_epochs",
        lambda view: view["max_steps"] <= 0,
        "max_steps decides",
        "utils/parameters.py",
    ),
    _ignore_unless(
        "save_steps", lambda view: bool(view["save"]), "save is off", "merak_trainer.py: train"
    ),
    # Names with another meaning than in other stacks or releases
    Check(
        "args.sequence_parallel",
        lambda view: bool(view["sequence_parallel"]) and view.size("sp") == 1,
        "no effect with sp = 1: on main this switch is Ulysses attention over the ranks of init(sp=),"
        " not Megatron's sequence parallelism",
        Effect.NONE,
        "core/pipeline/module.py: sequence_parallel",
        since=ULYSSES,
    ),
    Check(
        "args.sequence_parallel",
        lambda view: bool(view["sequence_parallel"]) and view.size("sp") > 1,
        "this switch is Ulysses attention over the ranks of init(sp=), for Llama models only; the words"
        " 'when TMP > 1' in Merak's documentation are about older releases",
        Effect.NONE,
        "core/sequence_parallel/operation.py",
        since=ULYSSES,
        name="ulysses-over-the-ranks-of",
    ),
    Check(
        "args.sequence_parallel",
        lambda view: bool(view["sequence_parallel"]) and view.size("tp") == 1,
        "no effect: sequence parallelism needs tp > 1",
        Effect.NONE,
        "core/tensor_parallel/mp_layers.py",
        until="2.2.2+main",
        name="no-effect-it-needs-tp",
    ),
    Check(
        "init.sp",
        lambda view: view.size("sp") > 1 and not view["sequence_parallel"],
        "sequence_parallel is off, so these ranks repeat each other's work; set sequence_parallel",
        Effect.COST,
        "core/pipeline/module.py: sequence_parallel",
        since=ULYSSES,
    ),
    Check(
        "trainer.loss_fn",
        lambda view: view.wrote("trainer.loss_fn"),
        "MerakTrainer has no parameter loss_fn, although Merak's documentation names one; override"
        " get_loss_fn",
        Effect.NUMBERS,
        "merak_trainer.py: __init__",
        since=REWRITTEN,
        name="meraktrainer-does-not-take-it",
    ),
    # Broken
    Check(
        "args.split_method",
        lambda view: view["split_method"] == "farthest_min_deps",
        "broken: training ends with 'too many values to unpack'; use nearest_min_deps",
        Effect.STOPS,
        "core/fx/graph_shard/farthest_deps.py, as run at the newest commit",
        since=ULYSSES,
    ),
    Check(
        "args.split_method",
        lambda view: view["split_method"] == "min_deps",
        "broken: the default of this release is min_deps, which the splitter of this release does"
        " not know; give nearest_min_deps",
        Effect.STOPS,
        "core/fx/graph_shard/split_graph.py",
        since=REWRITTEN,
        until="2.0.1",
    ),
    Check(
        "args.tp_overlapping_level",
        lambda view: (view["tp_overlapping_level"] or 0) > 1 and view.size("tp") > 1,
        "broken: tp_overlapping_level 2 and 3 exist only for GPT-2, and fail with an AttributeError; for other"
        " models Merak uses 1; use 0 or 1",
        Effect.STOPS,
        "core/tensor_parallel/model_parallel.py, as run at the newest commit",
        since=ULYSSES,
        name="broken-levels-2-and-3",
    ),
    Check(
        "args.trace_method",
        lambda view: view["trace_method"] == "dynamo",
        "broken with torch 2.13, which no longer has torch.export.export_for_training; use fx",
        Effect.STOPS,
        "core/fx/tracer/_dynamo_trace.py; seen in a run of the newest commit",
        since=ULYSSES,
    ),
    Check(
        "args.half_precision_backend",
        lambda view: (
            view["half_precision_backend"] in ("cuda_amp", "amp")
            and not (view["max_grad_norm"] or 0) > 0
        ),
        "broken with max_grad_norm 0: the optimizer steps only if it clips gradients, so nothing is trained; set max_grad_norm",
        Effect.NUMBERS,
        "core/merak_engine.py: _exec_optimizer_step",
    ),
    Check(
        "args.lr_scheduler_type",
        lambda view: view["lr_scheduler_type"] == "reduce_lr_on_plateau",
        "broken: this scheduler needs a metric, and the engine passes none; use another"
        " lr_scheduler_type",
        Effect.STOPS,
        "core/merak_engine.py: _exec_optimizer_step",
        name="broken-the-engine-steps-it",
    ),
    Check(
        "args.loss_scale",
        lambda view: bool(view["fp16"]) and (view["loss_scale"] or 0) > 0,
        "broken: with a constant scale no fp16 optimizer is built, and gradients are not unscaled; leave loss_scale out",
        Effect.NUMBERS,
        "runtime/engine.py: _configure_fp16_optimizer",
        until="2.0.0",
    ),
    # Wrong numbers
    Check(
        "args.max_grad_norm",
        _wrong_norm,
        "each rank clips by the norm of its own gradients, not by the global norm, so"
        " results depend on pp and tp; 0 switches clipping off",
        Effect.NUMBERS,
        "core/merak_engine.py: clip_fp32_gradients",
    ),
    Check(
        "args.half_precision_backend",
        lambda view: switches_clipping_off(view.values) and (view["max_grad_norm"] or 0) > 0,
        "Merak has no mixed precision for cpu_amp; this value only switches gradient clipping off;"
        " drop the argument",
        Effect.NUMBERS,
        "core/merak_engine.py: _exec_optimizer_step",
        since=REWRITTEN,
        name="cpu_amp-is-read-nowhere-but",
    ),
    Check(
        "args.zero_stage",
        lambda view: (
            _on(view) and compute(view.values, view.context) != "fp16" and view.size("dp") > 1
        ),
        "ZeRO reduces gradients in fp16 in every training format, so the numbers differ from those without ZeRO",
        Effect.NUMBERS,
        "core/zero/stage1.py: communication_data_type",
        since=REWRITTEN,
    ),
    Check(
        "args.bf16",
        lambda view: bool(view["bf16"]) and not automatic(view.values),
        "weights, optimizer state and sums are all in bf16: there are no fp32 master weights",
        Effect.NUMBERS,
        "core/amp/amp_engine.py: _configure_bf16_model",
        since=BF16,
    ),
    Check(
        "args.initial_scale_power",
        lambda view: bool(view["fp16"]) and (view["initial_scale_power"] or 0) > 24,
        "the loss scale starts so high that the first steps overflow and are skipped; 16 is common",
        Effect.NUMBERS,
        "core/amp/amp_engine.py: dynamic_loss_args",
    ),
    Check(
        "args.custom_partition",
        _odd_cuts,
        "boundaries that do not start at 0 or are not increasing drop shards or run them twice, and Merak does not check them",
        Effect.NUMBERS,
        "core/pipeline/layers_partition.py: custom_layer_idx",
    ),
    Check(
        "args.custom_partition",
        lambda view: (
            view["partition_method"] == "custom" and len(view["custom_partition"] or ()) > 1
        ),
        "only the first word is read; write the boundaries in one word, with commas",
        Effect.NUMBERS,
        "core/pipeline/layers_partition.py: custom_layer_idx",
    ),
    Check(
        "args.partition_method",
        lambda view: view["partition_method"] == "uniform" and view.size("pp") > 1,
        "wrong unless pp divides the number of shards: the boundaries exceed the last shard; use uniform_floor",
        Effect.NUMBERS,
        "core/pipeline/module_utils.py: partition_uniform",
    ),
    Check(
        "args.activation_checkpoint_ratio",
        lambda view: view["activation_checkpoint_ratio"] is not None and _checkpoints(view),
        "with a ratio Merak computes the forward pass twice and discards the first result",
        Effect.COST,
        "core/pipeline/module.py: forward",
        name="this-path-computes-the-forward",
    ),
    Check(
        "args.tp_overlapping_level",
        lambda view: (
            view["tp_overlapping_level"] == 1
            and view.size("tp") > 1
            and (view["per_device_train_batch_size"] or 0) % 2 == 1
        ),
        "tp_overlapping_level 1 cuts each microbatch in two, and per_device_train_batch_size is odd; use an even size",
        Effect.NUMBERS,
        "core/tensor_parallel/mp_layers.py",
        name="level-1-cuts-each-microbatch",
    ),
    Check(
        "tp_lists.weight_change_list",
        lambda view: bool(view["tp_lists.weight_change_list"]) and view.size("tp") > 1,
        "every tensor rank takes the first part of each weight in this list; load or initialise"
        " the right part afterwards",
        Effect.NUMBERS,
        "core/tensor_parallel/mp_attrs.py: set_mp_attr",
    ),
)


def inspect(config: Config) -> Iterator[Finding]:
    """Yield findings for a config: checks that hold, unused settings, wrongly documented defaults,
    and missing settings.
    """
    values, settings, at = config.effective, config.given, release(config.version)
    view = Seen(values, settings, config.context)
    yield from CHECKS.remarks(view, config.origins)
    yield from _find_inherited(settings, at, config.origins)
    yield from _find_other_defaults(values, settings, at)
    yield from _open(values)


@cache
def _unread() -> frozenset[str]:
    """Return the arguments that only the Hugging Face trainer reads."""
    return frozenset(next(rule.theirs for rule in table() if rule.note == INHERITED[0])) - set(
        NEEDED
    )


def _find_inherited(
    settings: Mapping[str, Any], at: Release, origins: Mapping[str, Origin]
) -> Iterator[Finding]:
    """Yield findings for arguments of the Hugging Face trainer, from which Merak's trainer does not
    inherit since 2.0.0.
    """
    if not at.since(REWRITTEN):
        return
    for path in settings:
        if path in _unread():
            message = (
                "no effect: only the Hugging Face trainer reads this argument, and Merak does not"
                " use that trainer"
            )
            yield Finding(path, message, Effect.NONE, True, origin=origins.get(path))


NEEDED = (
    "args.eval_strategy",
    "args.evaluation_strategy",
    "args.save_strategy",
    "args.metric_for_best_model",
)
"""Arguments of the Hugging Face trainer that Merak's checks still read."""


def _find_other_defaults(
    values: Mapping[str, Any], settings: Mapping[str, Any], at: Release
) -> Iterator[Finding]:
    """Yield findings for defaults that differ from the documentation. The effective value is the
    default in the release's source.
    """
    for path, default in at.documented.items():
        if path not in at.defaults:
            continue
        if path == "args.shard_count" and path not in settings and path in values:
            message = (
                f"not given: the default of Merak {at.version} is num_layers * 2 + 4;"
                f" Merak's documentation says {default}"
            )
            yield Finding(path, message, Effect.NONE, after=values[path])
        elif path != "args.shard_count" and path not in settings and at.defaults[path] != default:
            message = (
                f"not given: the default of Merak {at.version} is {show_value(at.defaults[path])};"
                f" Merak's documentation says {show_value(default)}"
            )
            yield Finding(path, message, Effect.COST, after=values.get(path))


def _open(values: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield findings for required settings of the script and of the command line that the source
    does not give.
    """
    for axis in ("pp", "tp", "dp"):
        if f"init.{axis}" not in values:
            yield Finding(
                f"init.{axis}",
                "not given in the source; pass the value to Merak.init by name",
                Effect.NONE,
            )
    if "args.output_dir" not in values:
        yield Finding(
            "args.output_dir",
            "not given in the source; the command line needs --output_dir",
            Effect.NONE,
        )
