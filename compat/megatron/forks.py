"""Translates flags that only forks and older releases have into today's settings."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bridge.stack.rules import Effect

Values = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Removed:
    """A flag that the newest parser no longer has.

    `source` is a version of Megatron-LM that had it: a tag, or a month of the main branch. `says`
    maps the flag's value (None if it had no value) to today's arguments. `takes` is true if it had a
    value. A flag that sets nothing today is left out for the reason in `note`.
    """

    option: str
    says: Callable[[str | None], Values]
    source: str
    takes: bool = False
    effect: Effect = Effect.NONE
    note: str = ""


def _full(method: str | None) -> Values:
    # validate_args of 2022-05 fills in the same method and number of layers for the older flags.
    return {
        "recompute_granularity": "full",
        "recompute_method": method or "uniform",
        "recompute_num_layers": 1,
    }


def _sets(**values: Any) -> Callable[[str | None], Values]:
    return lambda _: values


def _number(name: str, kind: type) -> Callable[[str | None], Values]:
    return lambda text: {name: kind(text)}


def _text(name: str) -> Callable[[str | None], Values]:
    return lambda text: {name: text}


def _removal_rows(
    source: str, note: str, *options: str, takes: bool = False, effect: Effect = Effect.NONE
) -> Iterator[Removed]:
    """Return rows for removed flags that no setting replaces."""
    return (Removed(option, _sets(), source, takes, effect, note) for option in options)


def _groups(text: str | None) -> Values:
    return {"group_query_attention": True, "num_query_groups": int(text or "")}


FORK = "Megatron-DeepSpeed"
"""Source of the rows for flags that Megatron-DeepSpeed alone has; its own arguments.py."""
TOKENS = "_tokens"
"""End of the names of its arguments that count tokens, where Megatron counts samples or steps."""
DEFAULT = "the flag asks for today's default"
LOG, DATA, KERNEL = (
    "the flag only changes logs",
    "the flag only changes how data is read",
    "it chooses a kernel",
)
ROWS: tuple[Removed, ...] = (
    Removed("--checkpoint-activations", _full, "v2.6"),
    Removed("--checkpoint-num-layers", _number("recompute_num_layers", int), "v2.5", True),
    Removed(
        "--distribute-checkpointed-activations", _sets(distribute_saved_activations=True), "v2.6"
    ),
    Removed("--activations-checkpoint-method", _full, "v2.6", True),
    Removed(
        "--activations-checkpoint-num-layers", _number("recompute_num_layers", int), "v2.6", True
    ),
    Removed("--checkpoint-granularity", _text("recompute_granularity"), "2022-04", True),
    Removed("--checkpoint-method", _text("recompute_method"), "2022-04", True),
    Removed(
        "--distribute-recomputed-activations", _sets(distribute_saved_activations=True), "2022-05"
    ),
    Removed("--batch-size", _number("micro_batch_size", int), "v1.0", True),
    Removed("--model-parallel-size", _number("tensor_model_parallel_size", int), "v1.0", True),
    Removed("--warmup", _number("lr_warmup_fraction", float), "v1.0", True),
    Removed("--layernorm-epsilon", _number("layernorm_epsilon", float), "23.06", True),
    Removed("--min-scale", _number("min_loss_scale", float), "v1.1.5", True),
    Removed("--fp8-e4m3", _sets(fp8="e4m3"), "23.06"),
    Removed("--fp8-hybrid", _sets(fp8="hybrid"), "23.06"),
    Removed(
        "--use-checkpoint-lr-scheduler", _sets(use_checkpoint_opt_param_scheduler=True), "v2.6"
    ),
    Removed("--override-lr-scheduler", _sets(override_opt_param_scheduler=True), "v2.6"),
    *_removal_rows("23.06", DEFAULT, "--no-query-key-layer-scaling", "--overlap-p2p-communication"),
    *_removal_rows("v2.0", DEFAULT, "--bias-gelu-fusion", "--bias-dropout-fusion"),
    *_removal_rows(
        "v2.0", KERNEL, "--scaled-masked-softmax-fusion", takes=True, effect=Effect.COST
    ),
    *_removal_rows(
        "v2.0",
        KERNEL,
        "--scaled-upper-triang-masked-softmax-fusion",
        takes=True,
        effect=Effect.COST,
    ),
    *_removal_rows(
        "v2.6",
        "Megatron has only its own gradient reduction today",
        "--DDP-impl",
        takes=True,
        effect=Effect.ROUNDING,
    ),
    *_removal_rows(
        "v2.6",
        "the flag only changes where gradients are stored",
        "--no-contiguous-buffers-in-local-ddp",
        effect=Effect.COST,
    ),
    *_removal_rows(
        "v2.5",
        "the flag only changes where gradients are stored",
        "--use-contiguous-buffers-in-ddp",
        effect=Effect.COST,
    ),
    *_removal_rows(
        "v2.6",
        "the flag only changes how stages send activations",
        "--no-scatter-gather-tensors-in-pipeline",
        effect=Effect.COST,
    ),
    *_removal_rows(
        "2024-03",
        "the flag changes only the time of communication",
        "--delay-param-gather",
        "--no-delay-grad-reduce",
        effect=Effect.COST,
    ),
    *_removal_rows(
        "2024-03", LOG, "--log-batch-size-to-tensorboard", "--no-log-learnig-rate-to-tensorboard"
    ),
    *_removal_rows("v2.6", DATA, "--data-impl", takes=True),
    *_removal_rows("23.06", DATA, "--mmap-warmup"),
    Removed("--num-key-value-heads", _groups, FORK, True),
    Removed("--rotary-position-embeddings-theta", _number("rotary_base", int), FORK, True),
    Removed("--train-tokens", _number("train_tokens", int), FORK, True),
    Removed("--lr-decay-tokens", _number("lr_decay_tokens", int), FORK, True),
    Removed("--lr-warmup-tokens", _number("lr_warmup_tokens", int), FORK, True),
    *_removal_rows(FORK, LOG, "--log-optimizer-states-to-tensorboard"),
    *_removal_rows(FORK, LOG, "--kill-switch-file", "--profile_steps", takes=True),
    *_removal_rows(
        FORK,
        KERNEL,
        "--use-flash-attn-v2",
        "--use-flash-attn-triton",
        "--use-flash-attn-builder",
        "--ds_fused_adam",
        "--cpu-optimizer",
        "--cpu_torch_adam",
        "--disable-mem-efficient-ln",
        "--memory-centric-tiled-linear",
        effect=Effect.ROUNDING,
    ),
    *_removal_rows(
        FORK,
        "the flag only changes where values are stored",
        "--use-pin-memory",
        "--checkpoint-in-cpu",
        "--partition-activations",
        "--contigious-checkpointing",
        "--synchronize-each-layer",
        "--profile-backward",
        effect=Effect.COST,
    ),
    *_removal_rows(
        FORK, "it says where the model is built", "--remote-device", takes=True, effect=Effect.COST
    ),
    *_removal_rows(
        FORK,
        "no code of Megatron-DeepSpeed reads it",
        "--zero-reduce-scatter",
        "--zero-contigious-gradients",
    ),
    *_removal_rows(
        FORK,
        "no code of Megatron-DeepSpeed reads it",
        "--zero-reduce-bucket-size",
        "--zero-allgather-bucket-size",
        takes=True,
    ),
    *_removal_rows(
        "v2.6", "the launcher passes the flag to each process", "--local_rank", takes=True
    ),
)
"""All removed flags.

Each row follows megatron/arguments.py of Megatron-LM at the version in `source`. The rows for
`--checkpoint-activations` and `--activations-checkpoint-method` follow `validate_args` of 2022-05,
the row for `--warmup` follows training.py.
"""
REMOVED: Mapping[str, Removed] = {row.option: row for row in ROWS}
ENDED = {
    "checkpoint_activations": "--checkpoint-activations",
    "batch_size": "--batch-size",
    "warmup": "--warmup",
} | {"model_parallel_size": "--model-parallel-size"}
"""Arguments, with their flags, that the newest parsers accept and Megatron then refuses."""


@dataclass(frozen=True, slots=True)
class Meant:
    """A removed flag in the input: its index, the number of its words, and its value, if any."""

    row: Removed
    place: int
    words: int
    value: str | None
    given: Values = field(hash=False, compare=False)

    @property
    def values(self) -> Values:
        """The arguments that the flag sets. Raises `ValueError` for a value of another type."""
        return dict(self._count(*one) for one in self.row.says(self.value).items())

    @property
    def wins(self) -> bool:
        """Whether the flag counts where today's one is given too: a run ends at what comes first, and tokens steer
        the rate.
        """
        counts = self.row.option.endswith("-tokens")
        return counts and all(
            dest.startswith("lr") or value <= self.given.get(dest, value)
            for dest, value in self.values.items()
        )

    def _count(self, dest: str, value: Any) -> tuple[str, Any]:
        """Return a count of tokens as one of samples, or of steps where the run counts those. Raises `TypeError` if the
        length of a sequence or the size of a batch is not given.
        """
        name, sequence = dest.removesuffix(TOKENS), self.given.get("seq_length")
        if name == dest:
            return dest, value
        batch = self.given.get("global_batch_size") if "train_iters" in self.given else 1
        if not sequence or not batch:
            raise TypeError("tokens are counted by --seq-length and --global-batch-size")
        unit = "iters" if "train_iters" in self.given else "samples"
        return f"{name}_{unit}", round(value / (sequence * batch))


def find_removed_flags(
    words: Sequence[str],
    extras: Container[int],
    refusals: Iterable[int],
    given: Values,
    in_fork: bool,
) -> Iterator[Meant]:
    """Yield the removed flags among `words`.

    `extras` has the indices of words that the parser does not know. `refusals` has the indices of
    flags that the parser accepts but Megatron then refuses. `given` are the arguments of today.
    Flags that Megatron-DeepSpeed alone has are among them if the words are for it (`in_fork`).
    """
    refusals = set(refusals)
    for place, word in enumerate(words):
        option, tied, text = word.partition("=")
        row = REMOVED.get(option) if place in extras or place in refusals else None
        if row is None or (row.source == FORK and not in_fork):
            continue
        value = None
        if tied:
            value = text
        # A word that another flag has taken is not in `extras`, and is no value of this one.
        elif row.takes and place + 1 < len(words) and (place + 1 in extras or place in refusals):
            value = words[place + 1]
        # A flag without the value that it needs, or with one that it never took, is not the removed
        # one.
        if row.takes is (value is not None):
            yield Meant(row, place, 1 + int(row.takes and not tied), value, given)


def join_flags(flags: Sequence[Meant]) -> dict[str, Any]:
    """Return the arguments that several removed flags set together.

    A recomputation method implies 1 layer, unless a flag sets the number of layers. A number of
    layers without a method has no effect.
    """
    values: dict[str, Any] = {}
    # A method sets three values, a number of layers one: sorted this way, the given number comes
    # last and wins.
    for flag in sorted(flags, key=lambda flag: len(flag.values), reverse=True):
        values |= flag.values
    if "recompute_num_layers" in values and "recompute_granularity" not in values:
        del values["recompute_num_layers"]
    return values
