"""Plan: the meaning of a training run in the field's standard terms. Every translation goes through
a plan, and the native engine runs what a plan says.
"""

# No annotation is a text here: pydantic would compile each of them at every start.
import re
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Literal, Self

from annotated_types import Ge, Gt, Le, Lt
from pydantic import Field as field

from bridge.plan.model import Model as Model
from bridge.plan.section import (
    Count,
    Field,
    Real,
    Section,
    Size,
    UpToThree,
    Values,
    Whole,
    fields,
    flatten,
    nest,
    validate,
)

Dtype = Literal["fp64", "fp32", "bf16", "fp16"]
Device = Literal["none", "cpu", "nvme"]
Level = Annotated[int, Ge(0)]
Fraction = Annotated[Real, Ge(0), Le(1)]


class Parallel(Section):
    """Sizes of the mesh axes, in ranks."""

    data: Count | None = field(
        None, description="Data-parallel replicas: world / (tensor x pipeline x context)."
    )
    tensor: Count | None = field(None, description="Number of ranks that split each weight matrix.")
    pipeline: Count | None = field(
        None, description="Number of ranks that divide the model's layers among themselves."
    )
    context: Count | None = field(
        None, description="Number of ranks that split the sequence in attention."
    )
    expert: Count | None = field(None, description="Number of ranks that split the experts.")
    expert_tensor: Count | None = field(
        None, description="Number of ranks that split each expert's matrices."
    )
    sequence: bool | None = field(
        None,
        description="Sequence parallelism: norms and dropout split by tokens in a tensor group.",
    )
    tensor_overlap: bool | None = field(
        None, description="Communication of tensor parallelism overlaps with computation."
    )
    order: str | None = field(
        None,
        description="Order in which ranks are numbered: mesh axes, fastest first, joined by '-'.",
    )
    vocabulary: bool | None = field(
        None, description="Tensor ranks split the embedding and the output layer too."
    )
    context_method: Literal["p2p", "a2a", "all_gather", "a2a+p2p"] | None = field(
        None, description="How context ranks exchange keys and values."
    )
    dispatcher: Literal["all_gather", "all_to_all", "deepep", "hybridep"] | None = field(
        None, description="How tokens reach the experts of other ranks."
    )


class Stages(Section):
    """The grouping of layers into stages."""

    rule: Literal["carry", "ceil", "even", "floor_last", "parameters", "explicit"] | None = field(
        None, description="How the layers are cut into stages."
    )
    layers_per_stage: Annotated[Real, Gt(0)] | None = field(
        None, description="Number of layers in a stage, if `rule` cuts by such a number."
    )
    boundaries: tuple[Size, ...] | None = field(
        None,
        description=(
            "Index of the first layer of each stage, then the total number of layers. Stages are "
            "listed in model order, virtual stages included."
        ),
    )


class Schedule(Section):
    """The order of microbatches over pipeline stages."""

    name: (
        Literal[
            "1f1b",
            "interleaved_1f1b",
            "gpipe",
            "looped_bfs",
            "zero_bubble",
            "zero_bubble_v",
            "pre_recompute_1f1b",
            "last_no_recompute_1f1b",
            "shifted_critical_path",
            "csv",
        ]
        | None
    ) = field(None, description="Name of the pipeline schedule.")
    virtual: Count | None = field(None, description="Number of stages on each pipeline rank.")
    group: Count | None = field(
        None,
        description=(
            "Number of microbatches that pass one stage of a rank before the rank's next stage "
            "runs."
        ),
    )
    depth_first: Count | None = field(
        None, description="Number of microbatches that pass all stages one after the other."
    )
    breadth_first: Count | None = field(
        None, description="Number of microbatches that pass each stage together."
    )
    csv: str | None = field(
        None,
        description="Path of a CSV file with a schedule that lists computations but no messages.",
    )
    overlap: bool | None = field(None, description="Pipeline messages overlap compute.")


class Batch(Section):
    """The batch triangle: global_ = micro x accumulation x data."""

    micro: Count | None = field(
        None, description="Number of sequences in one microbatch on one data rank."
    )
    accumulation: Count | None = field(None, description="Number of microbatches in one step.")
    global_: Count | None = field(
        None, description="Number of sequences in one step over all ranks."
    )


class Offload(Section):
    """State kept outside the accelerator."""

    optimizer: Device | None = field(None, description="Where optimizer state lives.")
    optimizer_ratio: Fraction | None = field(
        None, description="Share of the optimizer state that is offloaded."
    )
    parameters: Device | None = field(
        None, description="Memory that holds parameters while they are not used."
    )
    pinned: bool | None = field(
        None, description="The host memory for offloaded state is page-locked."
    )


class Zero(Section):
    """Sharding of optimizer state, gradients and weights over data ranks."""

    stage: UpToThree | None = field(
        None,
        description="Level: 0 shards nothing, 1 optimizer state, 2 also gradients, 3 also weights.",
    )
    weight_buffers: Count | None = field(
        None, description="Number of model stages whose unsharded weights may be in memory at once."
    )
    grad_buffers: Count | None = field(
        None,
        description="Number of model stages whose unsharded gradients may be in memory at once.",
    )
    replicas: Count | None = field(
        None, description="Number of groups that each hold a full set of shards (hybrid sharding)."
    )
    bucket: Size | None = field(
        None,
        description="Number of elements reduced in one collective; open: the stack's own choice.",
    )
    gather_bucket: Size | None = field(
        None,
        description="Number of elements gathered in one collective; open: the value of `bucket`.",
    )
    prescale: bool | None = field(
        None,
        description="Gradients are divided by the number of data ranks before they are summed.",
    )
    predivide: Annotated[Real, Gt(0)] | None = field(
        None,
        description=(
            "Divisor of gradients before the sum; the rest of the division follows the sum. Open: "
            "the whole division comes before the sum."
        ),
    )
    overlap: bool | None = field(None, description="Gradient reduction overlaps the backward pass.")
    overlap_gather: bool | None = field(None, description="Weight gathering overlaps compute.")
    average_in_collective: bool | None = field(
        None, description="The collective itself computes the mean of gradients."
    )
    double_buffer: bool | None = field(
        None, description="Weights are gathered into two buffers that are used in turn."
    )
    registered: bool | None = field(
        None, description="Buffers are registered with the communication library."
    )
    fp8_transposes: bool | None = field(None, description="Transposes of 8-bit weights are kept.")
    meta_init: bool | None = field(
        None,
        description="The model is built without memory (on the meta device) before it is sharded.",
    )
    offload: Offload = field(
        default_factory=Offload, description="State kept outside the accelerator."
    )

    @property
    def effective_stage(self) -> int | None:
        """The ZeRO level of the run: 3 with at most two weight buffers, 2 with at most two gradient
        buffers, else the field `stage`.
        """
        # With at most two buffers (one in use, one being filled) tensors cannot stay whole, so they
        # are sharded.
        if self.weight_buffers is not None and self.weight_buffers <= 2:
            return 3
        if self.grad_buffers is not None and self.grad_buffers <= 2:
            return 2
        return self.stage


class LossScale(Section):
    """Loss scaling for fp16."""

    static: Annotated[Real, Gt(0)] | None = field(
        None, description="Constant scale; open: dynamic."
    )
    initial: Annotated[Real, Gt(0)] | None = field(None, description="First dynamic scale.")
    window: Count | None = field(
        None, description="Number of steps without overflow before the scale doubles."
    )
    hysteresis: Count | None = field(
        None, description="Number of overflows after which the scale halves."
    )
    minimum: Annotated[Real, Ge(0)] | None = field(None, description="Smallest dynamic scale.")
    late: bool | None = field(
        None,
        description=(
            "The scale doubles in the step after the `window` steps, if that step has no overflow; "
            "open: in the last of the `window` steps."
        ),
    )
    final: bool | None = field(
        None, description="An overflow at the smallest scale ends the run; open: the run continues."
    )


class Precision(Section):
    """Number formats."""

    compute: Dtype | None = field(
        None, description="Format of weights and activations in forward and backward."
    )
    master: Dtype | None = field(
        None, description="Format of the weights that the optimizer updates."
    )
    reduce: Dtype | None = field(
        None, description="Format in which gradients are accumulated and reduced."
    )
    communicate: Dtype | None = field(
        None, description="Format in which data ranks exchange and sum gradients; open: `reduce`."
    )
    frozen: Literal["compute", "master"] | None = field(
        None,
        description=(
            "Format of frozen weights: the format `compute` or the format `master`; open: compute."
        ),
    )
    loss_scale: LossScale = field(default_factory=LossScale, description="Loss scaling for fp16.")
    fp8: Literal["e4m3", "hybrid"] | None = field(None, description="8-bit matrix products.")
    fp8_recipe: Literal["tensorwise", "delayed", "blockwise", "mxfp8"] | None = field(
        None, description="How values are scaled to 8 bits."
    )
    fp8_weights: bool | None = field(None, description="Weights are gathered in 8 bits.")
    autocast: Dtype | None = field(
        None, description="Format that torch.autocast runs operations in; open: no autocast."
    )
    residual: Dtype | None = field(
        None, description="Format of the residual stream; open: the format `compute`."
    )
    router: Dtype | None = field(
        None, description="Format in which the router of experts computes; open: `compute`."
    )
    moments: tuple[Dtype, Dtype] | None = field(
        None,
        description="Formats of the optimizer's first and second moment; open: the format `master`.",
    )


class LearningRate(Section):
    """The learning rate over the optimizer steps."""

    name: Literal["constant", "linear", "cosine", "inverse_sqrt", "wsd"] | None = field(
        None, description="Shape of the learning rate after warmup."
    )
    warmup_steps: Size | None = field(None, description="Number of steps of linear warmup.")
    warmup_from: Annotated[Real, Ge(0)] | None = field(
        None, description="Learning rate at the first step of warmup."
    )
    total_steps: Count | None = field(
        None, description="Step at which the decay ends, counted from the start of warmup."
    )
    minimum: Annotated[Real, Ge(0)] | None = field(
        None, description="Learning rate after the decay."
    )
    decay_steps: Size | None = field(
        None,
        description=(
            "Number of steps of the decay that ends the schedule wsd; open: a tenth of the steps "
            "of the schedule."
        ),
    )
    decay_shape: Literal["linear", "cosine", "exponential", "minus_sqrt"] | None = field(
        None, description="Shape of the decay in the schedule wsd; open: linear."
    )


class DecayRamp(Section):
    """A weight decay that changes over the steps."""

    shape: Literal["linear", "cosine"] | None = field(
        None, description="Shape of the ramp; open: weight decay is constant."
    )
    start: Annotated[Real, Ge(0)] | None = field(
        None, description="Weight decay at the first step."
    )
    end: Annotated[Real, Ge(0)] | None = field(
        None, description="Weight decay at the end of the ramp and in all later steps."
    )
    steps: Size | None = field(None, description="Number of steps of the ramp.")


class Optimizer(Section):
    """The optimizer and its hyperparameters."""

    name: (
        Literal[
            "adam",
            "adamw",
            "sgd",
            "lion",
            "muon",
            "adaptive_muon",
            "soap",
            "lamb",
            "adagrad",
            "adafactor",
        ]
        | None
    ) = field(None, description="Update rule; adamw decays weights separately from the gradient.")
    lr: Annotated[Real, Ge(0)] | None = field(None, description="Peak learning rate.")
    betas: tuple[Annotated[Real, Ge(0), Lt(1)], Annotated[Real, Ge(0), Lt(1)]] | None = field(
        None, description="Decay factors of the two moments."
    )
    eps: Annotated[Real, Ge(0)] | None = field(
        None, description="Term added to the root of the second moment."
    )
    momentum: Annotated[Real, Ge(0)] | None = field(None, description="Momentum of sgd and muon.")
    nesterov: bool | None = field(None, description="Momentum is used in Nesterov's form.")
    update_scale: Literal["spectral", "unit_rms_norm", "shape_scaling"] | None = field(
        None,
        description=(
            "Muon's factor for an update with R rows and C columns: sqrt(max(R, C)) (spectral), "
            "sqrt(R / C) (unit_rms_norm) or sqrt(max(1, R / C)) (shape_scaling)."
        ),
    )
    amsgrad: bool | None = field(
        None, description="The update uses the largest second moment so far."
    )
    bias_correction: bool | None = field(
        None, description="Moments are corrected for the start at zero; open: true."
    )
    weight_decay: Annotated[Real, Ge(0)] | None = field(None, description="Weight decay.")
    decay_scope: Literal["all", "matrices", "not_layernorm"] | None = field(
        None,
        description=(
            "Which parameters decay: all, all but biases and norms, or all but biases and "
            "LayerNorm (RMSNorm decays)."
        ),
    )
    decay_ramp: DecayRamp = field(
        default_factory=DecayRamp, description="Weight decay over the steps."
    )
    embedding_lr: Annotated[Real, Ge(0)] | None = field(
        None, description="Factor of the embedding's learning rate."
    )
    output_lr: Annotated[Real, Ge(0)] | None = field(
        None, description="Factor of the output layer's learning rate."
    )
    clip: Annotated[Real, Ge(0)] | None = field(
        None, description="Bound on the global gradient norm; 0: no bound."
    )
    schedule: LearningRate = field(
        default_factory=LearningRate, description="Learning-rate schedule."
    )


class Adapters(Section):
    """Low-rank adapters (LoRA). The adapted weights are frozen."""

    rank: Count | None = field(None, description="Width of an adapter; open: no adapters.")
    alpha: Annotated[Real, Gt(0)] | None = field(
        None, description="An adapter's output is scaled by alpha / rank."
    )
    dropout: Fraction | None = field(None, description="Dropout of an adapter.")
    targets: (
        tuple[Literal["query", "key", "value", "dense", "mlp_in", "mlp_out", "output"], ...] | None
    ) = field(
        None,
        description=(
            "Layers with an adapter: the projections of attention (`dense` is its output), the "
            "projections into and out of the MLP, and the output layer of the model."
        ),
    )


class Run(Section):
    """Length, seed and communication library of the run, and the intervals of logs, checkpoints and
    evaluations in optimizer steps.
    """

    steps: Count | None = field(
        None,
        description=(
            "Number of optimizer steps after which the run ends, whatever the learning-rate "
            "schedule."
        ),
    )
    epochs: Annotated[Real, Gt(0)] | None = field(
        None, description="Number of passes over the data after which the run ends."
    )
    seed: Whole | None = field(
        None, description="Seed of random numbers; each stack draws the numbers in another order."
    )
    log_interval: Size | None = field(None, description="Steps between lines of the log; 0: never.")
    save_interval: Size | None = field(None, description="Steps between checkpoints; 0: never.")
    save_optimizer: bool | None = field(None, description="Checkpoints hold the optimizer's state.")
    save_random: bool | None = field(
        None, description="Checkpoints hold the state of random numbers."
    )
    weights_only: bool | None = field(
        None, description="Only the weights are read from a checkpoint, and steps count from zero."
    )
    load_optimizer: bool | None = field(
        None, description="The optimizer's state is read from the checkpoint at the start."
    )
    load_random: bool | None = field(
        None, description="The state of random numbers is read from the checkpoint at the start."
    )
    eval_interval: Size | None = field(None, description="Steps between evaluations; 0: never.")
    collect_interval: Count | None = field(
        None,
        description="Steps between explicit garbage collections; open: Python collects by itself.",
    )
    loaders: Size | None = field(
        None, description="Number of processes that load data on each rank."
    )
    backend: str | None = field(
        None, description="Communication library, as torch.distributed names it."
    )
    timeout: Annotated[Real, Gt(0)] | None = field(
        None, description="Seconds after which a collective gives up."
    )
    timers: bool | None = field(None, description="The log shows the time of each part of a step.")
    exit_interval: Size | None = field(
        None, description="The run ends after a step whose number is a multiple of this; 0: never."
    )
    keep_checkpoints: Count | None = field(
        None, description="Number of checkpoints that are kept; open: all checkpoints."
    )
    async_save: bool | None = field(
        None, description="Checkpoints are written while training continues."
    )
    eval_steps: Size | None = field(None, description="Number of steps in an evaluation.")
    resumed_schedule: Literal["given", "checkpoint", "same"] | None = field(
        None,
        description="Source of the learning-rate and weight-decay schedules of a resumed run; "
        "same: config and checkpoint must agree.",
    )
    host_init: bool | None = field(None, description="Initial weights are drawn on the host.")
    project: str | None = field(None, description="Project of Weights & Biases that logs go to.")
    entity: str | None = field(None, description="User or team of the Weights & Biases project.")


class Recompute(Section):
    """Activations computed again in the backward pass."""

    granularity: Literal["none", "selective", "full"] | None = field(
        None, description="Which activations are computed again."
    )
    method: Literal["uniform", "block"] | None = field(
        None, description="Which layers are computed again, for granularity full."
    )
    layers: Count | None = field(
        None,
        description=(
            "Number of layers between saved activations (uniform), or of recomputed layers in a "
            "stage (block)."
        ),
    )
    ratio: Fraction | None = field(None, description="Share of the layers that are recomputed.")
    kept_microbatches: Size | None = field(
        None,
        description=(
            "Number of the microbatches in flight on a pipeline rank that keep all activations; "
            "open: 0."
        ),
    )
    partition: bool | None = field(
        None, description="Saved activations are split over the tensor group."
    )
    offload: bool | None = field(None, description="Saved activations are moved to host memory.")
    modules: (
        tuple[
            Literal[
                "attention", "projections", "mlp", "experts", "norm", "latent", "shared_experts"
            ],
            ...,
        ]
        | None
    ) = field(
        None,
        description=(
            "Parts of a block that are computed again, for granularity selective; `attention` "
            "is the core of attention alone."
        ),
    )


class Habits(Section):
    """What a stack does alike in all runs, or unless a setting changes it. A field that is open is
    decided by the training script.
    """

    attention: Literal["document", "sequence"] | None = field(
        None,
        description=(
            "In sequences of several documents, a token attends to its own document, or to the "
            "whole sequence before it."
        ),
    )
    positions: Literal["document", "sequence"] | None = field(
        None, description="Positions count from the start of the document, or of the sequence."
    )
    boundaries: Literal["masked", "trained"] | None = field(
        None,
        description="The first token of a document is predicted from the document before it, or masked in the loss.",
    )
    inverse_sqrt: Literal["samples", "steps", "ten_thousand_steps"] | None = field(
        None,
        description=(
            "Unit of time of the schedule inverse_sqrt if the run has no warmup: the rate falls with "
            "the root of the samples, of the steps, or of the steps counted in ten thousands."
        ),
    )
    embedding_lr: Literal["words", "words_and_positions"] | None = field(
        None,
        description="Weights with the learning rate of the embedding: those of words, or learned positions too.",
    )
    output_lr: Literal["weight", "weight_and_norm"] | None = field(
        None,
        description="Weights with the learning rate of the output layer: its own, or the final norm's too.",
    )
    factored_minimum: Literal["scaled", "shared"] | None = field(
        None,
        description=(
            "Minimum of a part whose learning rate has a factor: the factor applies to it too, or it is "
            "the schedule's."
        ),
    )
    factored_start: Literal["scaled", "shared"] | None = field(
        None,
        description=(
            "First rate of the warmup of a part whose learning rate has a factor: the factor applies to it "
            "too, or it is the schedule's."
        ),
    )
    adapter_init: Literal["zero", "weights"] | None = field(
        None,
        description=(
            "First weights of an adapter: one of its two matrices is zero, so that it adds nothing, or "
            "both are drawn like the weights of its layer."
        ),
    )
    adapter_dropout: Literal["input", "output"] | None = field(
        None, description="Side of an adapter on which its dropout is."
    )
    dropout_ranks: Literal["alike", "apart"] | None = field(
        None, description="Data ranks drop the same activations, or each draws its own."
    )
    clip_scope: Literal["model", "rank"] | None = field(
        None,
        description="Gradients whose norm is bounded: those of the whole model, or of the rank's part alone.",
    )
    first_lr_step: Whole | None = field(
        None,
        description=(
            "Step of the learning-rate schedule whose rate the first update has; below 0, the rate at "
            "the start of the schedule comes as often before it."
        ),
    )
    overflow_steps: Literal["skipped", "counted", "taken"] | None = field(
        None,
        description=(
            "An update that overflows is left out, and counts in the learning-rate schedule or does not; "
            "or it is not left out."
        ),
    )
    muon_qkv: Literal["parts", "whole"] | None = field(
        None,
        description="Muon orthogonalises queries, keys and values of a fused matrix one by one, or the whole.",
    )
    nonfinite: Literal["stop", "continue"] | None = field(
        None,
        description="A loss or gradient that is not a finite number ends the run, or does not.",
    )
    router_losses: Literal["mean", "sum"] | None = field(
        None,
        description=(
            "The losses of a router of experts are the mean over data ranks and microbatches, or their sum."
        ),
    )
    balance_scope: Literal["sequence", "rank"] | None = field(
        None,
        description=(
            "Ranks whose tokens a balancing loss counts together: all that split a sequence, or each rank "
            "for itself."
        ),
    )
    mtp_loss: Real | None = field(
        None, description="Factor of the loss of further predicted tokens."
    )


class Debug(Section):
    """Log levels of the tensors of each layer; 0: no log."""

    layer_outputs: Level | None = field(None, description="Log level for the output of each layer.")
    layer_gradients: Level | None = field(
        None, description="Log level for the gradient of each layer's input."
    )
    param_init: Level | None = field(
        None, description="Log level for parameters after initialisation."
    )
    param_gradients: Level | None = field(
        None, description="Log level for gradient shards after reduction."
    )
    all_param_gradients: Level | None = field(
        None, description="Log level for every parameter's gradient after reduction."
    )
    param_update: Level | None = field(
        None, description="Log level for parameters after the update."
    )
    global_tensors: bool | None = field(
        None, description="Logs show whole tensors, assembled from all ranks."
    )
    activation_memory: bool | None = field(None, description="Memory after each layer.")
    tensor_parallel: bool | None = field(
        None, description="Replicas in a tensor group are compared with each other."
    )


class Plan(Section):
    """The meaning of a training run. A field that is None is open: nothing in the
    source sets it.
    """

    model: Model = field(default_factory=Model, description="Facts about the model.")
    parallel: Parallel = field(default_factory=Parallel, description="Mesh axes.")
    stages: Stages = field(default_factory=Stages, description="Grouping of layers into stages.")
    schedule: Schedule = field(default_factory=Schedule, description="Pipeline schedule.")
    batch: Batch = field(default_factory=Batch, description="Batch triangle.")
    zero: Zero = field(default_factory=Zero, description="Sharding over data ranks.")
    precision: Precision = field(default_factory=Precision, description="Number formats.")
    optimizer: Optimizer = field(default_factory=Optimizer, description="Optimizer.")
    run: Run = field(default_factory=Run, description="Course of the run.")
    adapters: Adapters = field(default_factory=Adapters, description="Low-rank adapters.")
    recompute: Recompute = field(default_factory=Recompute, description="Activation recomputation.")
    loss: Literal["mean_of_microbatches", "per_token"] | None = field(
        None, description="How microbatch losses are averaged."
    )
    habits: Habits = field(
        default_factory=Habits, description="What a stack does alike in all runs."
    )
    debug: Debug = field(default_factory=Debug, description="Per-layer logging.")

    @classmethod
    def of(cls, flat: Mapping[str, Any]) -> Self:
        """Return the plan with values by dotted path; None means unset.

        Raises `ConfigError` with every problem.
        """
        return validate(
            cls, nest({path: value for path, value in flat.items() if value is not None})
        )

    def values(self) -> Values:
        """The fields that are set, by dotted path."""
        return Values(
            {
                path: value
                for path, value in flatten(self, only_set=True).items()
                if value is not None
            }
        )


@cache
def paths() -> Mapping[str, Field]:
    """Every leaf of a Plan by dotted path."""
    return fields(Plan)


def in_words(path: str) -> str:
    """What a leaf of a Plan is, as the beginning of its description says it in lower case."""
    text, *_ = re.split(r"[;.]", paths()[path].doc)
    start, *_ = text.split(":")
    text = start if " " in start else text
    return text if text[:2].isupper() else text[:1].lower() + text[1:]
