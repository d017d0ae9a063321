"""Reads Megatron's files in sections: those for `--yaml-cfg`, by the rules of its own loader, and
config containers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from bridge.errors import nearest
from bridge.files import Document
from bridge.files.shown import show_value
from bridge.plan.section import Values
from bridge.stack.checks import excludes, positive
from bridge.stack.dialect import Reading
from bridge.stack.findings import Finding, Origin, unknown
from bridge.stack.rules import Effect
from compat.megatron import options, releases
from compat.megatron.arguments.evaluation import run, select
from compat.megatron.arguments.namespace import Namespace, Step
from compat.megatron.arguments.steps import check, compute_argument, derive
from compat.megatron.arguments.training import feed_forward_width, params_dtype
from compat.megatron.recognition import CONTAINER, MODEL, PARALLEL, YAML_CFG, kind_of_sections

CONTAINED = (
    "model",
    "train",
    "optimizer",
    "ddp",
    "scheduler",
    "dataset",
    "validation",
    "checkpoint",
    "logger",
    "rng",
    "dist",
)
"""Names of the container's sections whose fields are arguments (training/config/container.py)."""
CLASSES = (
    "ModelParallelConfig",
    "TransformerConfig",
    "OptimizerConfig",
    "DistributedDataParallelConfig",
)
# Keys with which Hydra builds objects from a file. They are never followed here.
HYDRA = ("_target_", "_call_", "_partial_", "_args_", "_recursive_", "_convert_")
RENAMED = {**options.RENAMED, "sequence_length": "seq_length"}
LOADED = (
    "bias_swiglu_fusion",
    "init_method",
    "output_layer_init_method",
    "gated_linear_unit",
    "embedding_init_method",
)
"""Keys of language_model that only core_transformer_config_from_yaml reads. No argument sets them.
"""
RECIPES = ("bf16_mixed", "fp16_mixed")
"""The recipes of `mixed_precision` that set one argument; the others also choose formats of fp8."""
ACTIVATIONS = {
    "swiglu": {"swiglu": True},
    "squaredrelu": {"squared_relu": True},
    "gelu": {},
    "silu": {},
}


def read(document: Document, version: str, lenient: bool) -> tuple[Reading, tuple[str, ...]]:
    """Read the given values of a file in sections. Returns the reading, and the reasons why it is refused.

    `_target_` is only read as text, never called.
    """
    entry = kind_of_sections(document.data) or YAML_CFG
    reader = _SectionReader(document, version, entry, lenient or entry == CONTAINER)
    for section in (MODEL, PARALLEL) if entry == YAML_CFG else CONTAINED:
        reader.section(section, document.data.get(section))
    if entry == YAML_CFG:
        reader.section(
            "", {key: value for key, value in document.data.items() if key not in (MODEL, PARALLEL)}
        )
        reader.complete()
    else:
        reader.precision(document.data.get("mixed_precision"))
        beside = {*CONTAINED, *HYDRA, "mixed_precision"}
        reader.leave_out("", [key for key in document.data if key not in beside])
    wrong = (
        Finding("file", problem, Effect.NUMBERS, True, unknown=True) for problem in reader.problems
    )
    reading = Reading(Values(reader.given), entry, reader.origins, (*reader.findings, *wrong))
    return reading, () if lenient else tuple(reader.problems)


class _SectionReader:
    """Collects given values by argument, with lines, findings and problems.

    If `open_` is true, unknown keys are left out, with a finding; otherwise they are problems. A
    container has fields of classes that Megatron-LM has no arguments for; in a file for --yaml-cfg,
    such a key is a mistake.
    """

    def __init__(self, document: Document, version: str, entry: str, open_: bool) -> None:
        self.document, self.version, self.entry, self.open = document, version, entry, open_
        self.given: dict[str, Any] = {}
        self.origins: dict[str, Origin] = {}
        self.findings: list[Finding] = []
        self.problems: list[str] = []

    def section(self, name: str, values: Any) -> None:
        """Read every key of a section; a key with null counts as not given."""
        if values is not None and not isinstance(values, Mapping):
            self.problems.append(
                f"{self.place(name)}{name}: found {show_value(values)}; expected a mapping"
            )
            return
        strange = [
            key
            for key, value in (values or {}).items()
            if value is not None and not self.entry_of(name, key, value)
        ]
        if self.open:
            self.leave_out(name, strange)
        else:
            self.problems += [self.unknown(name, key) for key in strange]

    def leave_out(self, section: str, keys: Iterable[str]) -> None:
        """Add a finding for each of `keys`, which Megatron has no arguments for."""
        for key in keys:
            place = tuple(filter(None, (section, str(key))))
            value = (self.document.data.get(section, {}) if section else self.document.data)[key]
            self.findings.append(
                unknown(
                    ".".join(place),
                    "Megatron-LM has no such argument",
                    show_value(value),
                    Origin(self.document.line(*place)),
                )
            )

    def entry_of(self, section: str, key: str, value: Any) -> bool:
        """Read one key. Returns false if Megatron has no argument for it."""
        if key == "activation_func":
            return self.activation(value)
        # Hydra's keys and those that only the loader reads are taken and hold no argument.
        dest = RENAMED.get(key, key)
        if key in HYDRA or key in LOADED or dest not in options.groups():
            return key in HYDRA or key in LOADED
        if not isinstance(value, Mapping):
            self.take(section, key, dest, value)
        return not isinstance(value, Mapping)

    def take(self, section: str, key: str, dest: str, value: Any) -> None:
        """Store a value if it has the type of its argument. Otherwise add the problem."""
        type_name = options.type_of(dest)
        # A flag of several values has no single type; the field of the class may have one.
        if type_name == "any":
            type_name = _type_in_class(self.version, key)
        fits = TYPES.get(type_name, lambda _: True)(value)
        if not fits:
            self.problems.append(
                f"{self.place(section, key)}{key}: found {show_value(value)}; expected {WORDS[type_name]}"
            )
            return
        self.given[dest] = float(value) if type_name == "float" else value
        self.origins[dest] = Origin(
            self.document.line(*filter(None, (section, key))),
            ".".join(filter(None, (section, key))),
        )

    def activation(self, value: Any) -> bool:
        """Store the activation, given by its name or by a `_target_`.

        Returns false for an unknown activation.
        """
        name = str(value.get("_target_", "") if isinstance(value, Mapping) else value).rpartition(
            "."
        )[2]
        self.given.update(ACTIVATIONS.get(name, {}))
        return name in ACTIVATIONS

    def precision(self, value: Any) -> None:
        """Read a container's `mixed_precision`, which is the name of a recipe or a mapping of
        fields.
        """
        if isinstance(value, Mapping):
            self.section("mixed_precision", value)
        elif isinstance(value, str):
            self.given.update({name: True for name in ("bf16", "fp16") if value.startswith(name)})
        if value is not None and not isinstance(value, Mapping) and value not in RECIPES:
            self.leave_out("", ["mixed_precision"])

    def complete(self) -> None:
        """Add a problem for missing keys: core_config_from_args requires every field of the class
        in the file.
        """
        keys = {*self.document.data[MODEL], *self.document.data[PARALLEL]}
        fields = {
            **releases.fields(self.version, CLASSES[0]),
            **releases.fields(self.version, CLASSES[1]),
        }
        missing = [name for name, field in fields.items() if field.init and name not in keys]
        if missing:
            names = ", ".join(missing[:5]) + (
                f" and {len(missing) - 5} more" if len(missing) > 5 else ""
            )
            self.problems.append(
                f"{self.document.name}: missing {names}; Megatron {self.version} stops if the file lacks a field of"
                " TransformerConfig; add them, or use --lenient for the defaults of Megatron's parser"
            )

    def unknown(self, section: str, key: str) -> str:
        return f"{self.place(section, key)}{key}: unknown to Megatron{nearest(key, options.groups(), len(self.problems))}"

    def place(self, *key: str) -> str:
        """Return the line of a key as the beginning of a message. Empty if the line is not known."""
        line = self.document.line(*filter(None, key))
        return f"line {line}: " if line else ""


TYPES: Mapping[str, Callable[[Any], bool]] = {
    "bool": lambda value: isinstance(value, bool),
    "int": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "float": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "text": lambda value: not isinstance(value, bool | float | list | Mapping),
}
WORDS = {"bool": "true or false", "int": "a whole number", "float": "a number", "text": "text"}


def _type_in_class(version: str, key: str) -> str:
    """Return the name of the type of a field without a flag; `any` if it is neither bool nor
    number.
    """
    fields = (releases.fields(version, name).get(key) for name in CLASSES)
    text = next((field.type for field in fields if field is not None), "any")
    plain = text.removeprefix("Optional[").removesuffix("]")
    return plain if plain in ("bool", "int", "float") else "any"


def effective(
    settings: Mapping[str, Any], entry: str, version: str, world_size: int
) -> dict[str, Any]:
    """Return the arguments that validate_yaml, or the container's classes, derive from `settings`.

    Raises `ConfigError` with every refusal.
    """
    # A container starts from the defaults of its classes; --yaml-cfg requires every field in the
    # file.
    defaults = dict(_class_defaults(version)) if entry == CONTAINER else {}
    values = Namespace(
        releases.defaults(version).copy(), defaults, settings, {"world_size": world_size}
    )
    run(select(STEPS, version), values)
    return values.__dict__


def _class_defaults(version: str) -> Iterator[tuple[str, Any]]:
    for name in CLASSES:
        for field in releases.fields(version, name).values():
            if field.default is None or isinstance(field.default, bool | int | float):
                yield RENAMED.get(field.name, field.name), field.default


def _sizes(a: Namespace) -> None:
    model = a.tensor_model_parallel_size * a.pipeline_model_parallel_size * a.context_parallel_size
    a.data_parallel_size = a.world_size // model
    if a.global_batch_size is None and a.micro_batch_size is not None:
        a.global_batch_size = a.micro_batch_size * a.data_parallel_size


def _virtual(a: Namespace) -> None:
    per_stage = a.num_layers_per_virtual_pipeline_stage
    layers = a.num_layers // a.pipeline_model_parallel_size if a.num_layers else None
    a.virtual_pipeline_model_parallel_size = layers // per_stage if layers and per_stage else None
    a.overlap_p2p_comm = bool(a.overlap_p2p_comm and a.virtual_pipeline_model_parallel_size)


def _shape(a: Namespace) -> None:
    if a.ffn_hidden_size is None and a.hidden_size:
        a.ffn_hidden_size = feed_forward_width(a)
    if a.kv_channels is None and a.hidden_size and a.num_attention_heads:
        a.kv_channels = a.hidden_size // a.num_attention_heads
    a.sequence_parallel = bool(a.sequence_parallel and a.tensor_model_parallel_size > 1)


PLACE = "validate_yaml"
SPLITS = (
    "world_size",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
)
UNSPLIT = (
    "world_size: found {world_size}, which tensor x pipeline x context parallel size does not divide;"
    " use a multiple of this product"
)
STEPS: tuple[Step, ...] = (
    # Later steps divide by these sizes.
    *(
        positive(name, PLACE, last=True, name="found-expected-a-number-above")
        for name in (*SPLITS, "expert_model_parallel_size", "micro_batch_size", "global_batch_size")
    ),
    # No experts in this product: validate_yaml does not look at the expert grid.
    check(
        f"{PLACE}: world size",
        lambda a: (
            a.world_size
            % (
                a.tensor_model_parallel_size
                * a.pipeline_model_parallel_size
                * a.context_parallel_size
            )
        ),
        UNSPLIT,
        needs=("world_size",),
        last=True,
    ),
    check(
        PLACE,
        lambda a: a.micro_batch_size is None,
        "micro_batch_size: missing; Megatron needs it",
        last=True,
    ),
    derive(PLACE, _sizes, needs=("world_size",)),
    check(
        PLACE,
        lambda a: a.global_batch_size % (a.micro_batch_size * a.data_parallel_size),
        "global_batch_size: found {global_batch_size}; expected a multiple of micro_batch_size ({micro_batch_size}) x"
        " data_parallel_size"
        " ({data_parallel_size})",
        needs=("global_batch_size", "micro_batch_size", "data_parallel_size"),
    ),
    check(
        PLACE,
        lambda a: a.num_layers_per_virtual_pipeline_stage and a.pipeline_model_parallel_size <= 2,
        "num_layers_per_virtual_pipeline_stage: needs more than 2 pipeline ranks; found pipeline_model_parallel_size"
        " {pipeline_model_parallel_size}",
    ),
    derive(PLACE, _virtual),
    check(
        PLACE,
        lambda a: (
            a.overlap_param_gather and not (a.use_distributed_optimizer and a.overlap_grad_reduce)
        ),
        "overlap_param_gather: needs use_distributed_optimizer and overlap_grad_reduce; set both",
    ),
    excludes("fp16", "bf16", PLACE),
    derive(PLACE, compute_argument("params_dtype", params_dtype)),
    # validate_yaml knows no gradients in bf16: with bf16 it always accumulates them in fp32.
    derive(
        PLACE,
        compute_argument(
            "accumulate_allreduce_grads_in_fp32",
            lambda a: bool(a.accumulate_allreduce_grads_in_fp32 or a.bf16),
        ),
    ),
    check(
        PLACE,
        lambda a: a.train_iters and (a.train_samples or a.lr_decay_samples or a.lr_warmup_samples),
        "train_iters: found together with train_samples, lr_decay_samples or lr_warmup_samples; set all lengths"
        " in iterations, or all in samples",
    ),
    check(
        PLACE,
        lambda a: a.train_samples and (a.lr_decay_iters or a.lr_warmup_iters),
        "train_samples: found together with lr_decay_iters or lr_warmup_iters; set all lengths in iterations,"
        " or all in samples",
    ),
    check(
        PLACE,
        lambda a: (
            a.seq_length and a.max_position_embeddings and a.max_position_embeddings < a.seq_length
        ),
        "max_position_embeddings: found {max_position_embeddings}; expected at least seq_length ({seq_length})",
    ),
    check(
        PLACE,
        lambda a: a.lr is not None and (a.min_lr or 0) > a.lr,
        "min_lr: found {min_lr}; expected at most lr ({lr})",
    ),
    check(
        PLACE,
        lambda a: a.save is not None and a.save_interval is None,
        "save_interval: missing; save needs it; set it",
        name="missing-save-needs-it",
    ),
    check(
        PLACE,
        lambda a: a.recompute_granularity == "selective" and a.recompute_method is not None,
        "recompute_method: found with recompute_granularity selective; drop it",
        name="found-with-selective-recomputing-drop",
    ),
    derive(PLACE, _shape),
    check(
        PLACE,
        lambda a: a.expert_model_parallel_size > 1 and not a.num_experts,
        "expert_model_parallel_size: found {expert_model_parallel_size} without num_moe_experts; set num_moe_experts",
        name="found-without-num_moe_experts-give-their",
    ),
)
"""Statements of validate_yaml on the settings that a plan holds, in upstream's order."""
