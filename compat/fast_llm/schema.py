"""Every field of a Fast-LLM training config from 0.1.0 to mid 2026, with types and descriptions.
The module `releases` lists the fields of each release.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le
from pydantic import BeforeValidator, Field as field

from bridge.plan.section import Real, Section

IMPORTANCE = {
    "core": 0,
    "architecture": 0,
    "optional": 10,
    "feature": 10,
    "performance": 20,
    "stability": 20,
    "logging": 30,
    "expert": 40,
    "testing": 40,
    "wip": 80,
    "deprecated": 80,
}
"""A table from the groups of fields in Fast-LLM's hints to verbosities. A dump contains the fields
of a group if its verbosity is at least this one (config.py, FieldHintImportance).
"""

DTYPES = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
"""Fast-LLM's name for each of our short names of number formats (engine/config_utils/data_type.py)."""
PREFIXES = ("DataType", "numpy", "np", "torch", "triton.language", "tl")


def _dtype(value: Any) -> Any:
    """Return the name of a number format without its module: `torch.bfloat16` becomes `bfloat16`."""
    prefix, _, name = value.rpartition(".") if isinstance(value, str) else ("", "", value)
    return name if prefix in PREFIXES else value


Dtype = Annotated[
    Literal[
        "float64",
        "float32",
        "float16",
        "bfloat16",
        "int64",
        "int32",
        "int16",
        "int8",
        "uint64",
        "uint32",
        "uint16",
        "uint8",
        "fp64",
        "fp32",
        "fp16",
        "bf16",
    ],
    BeforeValidator(_dtype),
]
Level = Annotated[int, Ge(0)]
Positive = Annotated[int, Gt(0)]
PositiveReal = Annotated[Real, Gt(0)]
NonNegative = Annotated[Real, Ge(0)]
Fraction = Annotated[Real, Ge(0), Le(1)]
Free = dict[str, Any]


def _has(default: Any, hint: str, doc: str) -> Any:
    return field(default, description=doc, json_schema_extra={"hint": hint})


class TensorLogs(Section):
    """Destination of logged tensors, and the number of elements that are logged."""

    save: bool = _has(False, "logging", "Keep logged tensors in the experiment directory.")
    show: bool = _has(True, "logging", "Print logged tensors.")
    max_elements: Positive | None = _has(
        8, "logging", "Number of elements of each tensor that are logged."
    )
    full_tensors: bool = _has(False, "logging", "Log all elements of tensors.")


class Run(Section):
    """The folder of an experiment, and its logs."""

    tensor_logs: TensorLogs = field(TensorLogs(), description="Logged tensors.")
    structured_logs: bool = _has(True, "logging", "Log in Fast-LLM's own format.")
    experiment_dir: str | None = _has(None, "core", "Directory of checkpoints and logs.")
    enable_all_loggers: bool = _has(False, "logging", "Show the loggers of other packages.")
    log_timestamps: bool = _has(True, "logging", "Begin each line of the log with the time.")
    experiment_name: str | None = _has(
        None, "feature", "Name of the experiment. Default: name of its directory."
    )
    torch_dynamo_enable: bool = _has(True, "expert", "Allow torch.compile.")
    enable_triton_kernels: bool = _has(True, "expert", "Allow Triton kernels.")
    triton_linear_kernels: bool = _has(False, "performance", "Triton kernels for linear layers.")
    model_debug_level: Level = _has(
        0, "logging", "Amount of information that the model prints about itself."
    )


class MultiStage(Section):
    """Stages of layers, sharding, and logs of each layer."""

    full_precision_gradients: bool = _has(
        True, "optional", "Accumulate and reduce gradients in the optimizer's format."
    )
    store_frozen_weights_in_optimization_precision: bool = _has(
        True, "optional", "Keep shards of frozen weights in the optimizer's format."
    )
    debug_layer_outputs: Level = _has(0, "logging", "Log level for the output of each layer.")
    debug_layer_gradients: Level = _has(
        0, "logging", "Log level for the gradient of each layer's input."
    )
    debug_param_init: Level = _has(0, "logging", "Log level for parameters after initialisation.")
    debug_param_gradients: Level = _has(
        0, "logging", "Log level for the flat gradient shards after reduction."
    )
    debug_all_param_gradients: Level = _has(
        0, "logging", "Log level for every parameter's gradient after reduction."
    )
    debug_param_update: Level = _has(
        0, "logging", "Log level for parameters after the optimizer's step."
    )
    debug_global_tensors: bool = _has(
        True, "logging", "Gather tensors from all ranks before they are logged."
    )
    debug_activation_memory: bool = _has(False, "logging", "Log memory after each layer.")
    debug_tensor_parallel: bool = _has(
        False, "logging", "Compare replicas within tensor groups and log differences."
    )
    compile_all: bool = _has(False, "expert", "Compile whole stages.")
    layers_per_stage: PositiveReal = _has(
        1.0, "performance", "Number of layers in a stage, the unit of gathering and reducing."
    )
    stages_per_pipeline_stage: Literal[1] = _has(
        1, "wip", "Number of consecutive stages on a pipeline rank; only 1 works."
    )
    num_weight_buffers: Positive | None = _has(
        None,
        "expert",
        "Number of model stages whose unsharded weights may be in memory at once; "
        "null: all stages.",
    )
    num_grad_buffers: Positive | None = _has(
        None,
        "expert",
        "Number of model stages whose unsharded gradients may be in memory at once; "
        "null: all stages.",
    )
    zero_stage: Annotated[int, Ge(1), Le(3)] | None = _has(
        None,
        "performance",
        "ZeRO level: 2 sets two gradient buffers, 3 also two weight buffers; "
        "1 has the effect of null.",
    )
    pipeline_delay: NonNegative = _has(
        0.0, "expert", "Estimated delay of a pipeline round, in steps; not used."
    )


class Distributed(Section):
    """Mesh axes, number formats and seeds."""

    tensor_parallel: Positive = _has(
        1, "performance", "Number of ranks that split each weight matrix."
    )
    pipeline_parallel: Positive = _has(
        1, "performance", "Number of ranks that divide the model's layers among themselves."
    )
    sequence_tensor_parallel: bool = _has(
        False, "performance", "Split norms and dropout by tokens in a tensor group."
    )
    sequence_data_parallel: Positive = _has(
        1, "performance", "Number of data ranks that share one sequence."
    )
    world_size: Positive | None = _has(
        None, "expert", "Number of all ranks. Default: WORLD_SIZE of the launcher."
    )
    rank: Level | None = _has(
        None, "expert", "Rank of this process. Default: RANK of the launcher."
    )
    local_world_size: Positive | None = _has(
        None, "expert", "Number of ranks on a node. Default: LOCAL_WORLD_SIZE of the launcher."
    )
    pipeline_first: bool = _has(
        False, "expert", "Pipeline ranks are closer together than data ranks."
    )
    backend: Literal["nccl", "gloo"] = _has("nccl", "expert", "Library of the process groups.")
    timeout: PositiveReal = _has(60.0, "optional", "Time limit of a collective, in seconds.")
    distributed_timeout: PositiveReal = _has(60.0, "optional", "Older name of timeout.")
    use_cuda: bool = _has(True, "expert", "Run on GPUs.")
    force_cpu_initialization: bool = _has(False, "expert", "Initialise weights on the CPU.")
    seed: int = _has(1234, "optional", "Seed of training.")
    compute_dtype: Dtype = _has("float32", "core", "Format of the forward and backward pass.")
    training_dtype: Dtype = _has("float32", "core", "Older name of compute_dtype.")
    optimization_dtype: Dtype = _has(
        "float32", "expert", "Format of master weights and optimizer state."
    )
    dp_seed_shift: int = _has(
        None,
        "optional",
        "Rank n of the data axis adds n times this number to the seed. "
        "Default: Fast-LLM's constant.",
    )
    pp_seed_shift: int = _has(
        None,
        "optional",
        "Rank n of the pipeline axis adds n times this number to the seed. "
        "Default: Fast-LLM's constant.",
    )
    pp_gen_seed_shift: int = _has(
        None,
        "optional",
        "Number added to the seed of random numbers that are the same on all tensor ranks. "
        "Default: Fast-LLM's constant.",
    )
    pp_gen_init_seed_shift: int = _has(
        None,
        "optional",
        "Number added to the seed of initial weights that are the same on all tensor ranks. "
        "Default: Fast-LLM's constant.",
    )
    tp_seed_shift: int = _has(
        None,
        "optional",
        "Rank n of the tensor axis adds n times this number to the seed. "
        "Default: Fast-LLM's constant.",
    )
    tp_gen_seed_shift: int = _has(
        None,
        "optional",
        "Number added to the seed of random numbers that differ between tensor ranks. "
        "Default: Fast-LLM's constant.",
    )
    tp_gen_init_seed_shift: int = _has(
        None,
        "optional",
        "Number added to the seed of initial weights that differ between tensor ranks. "
        "Default: Fast-LLM's constant.",
    )
    sample_seed_shift: int = _has(
        None,
        "optional",
        "Step n adds n times this number to the seed. Default: Fast-LLM's constant.",
    )
    train_seed_shift: int = _has(
        None, "optional", "Number added to the seed in training. Default: Fast-LLM's constant."
    )
    valid_seed_shift: int = _has(
        None, "optional", "Number added to the seed in validation. Default: Fast-LLM's constant."
    )
    test_seed_shift: int = _has(
        None, "optional", "Number added to the seed in a test. Default: Fast-LLM's constant."
    )
    inference_seed_shift: int = _has(
        None, "optional", "Number added to the seed in inference. Default: Fast-LLM's constant."
    )
    reproducible_init: bool = _has(
        False, "testing", "Draw the same initial weights for every layout of ranks."
    )


class Model(Section):
    """The model and how it is laid out over ranks."""

    type: str | None = _has(None, "feature", "Kind of model.")
    base_model: Free = _has(None, "core", "The model itself, layer by layer.")
    multi_stage: MultiStage = field(MultiStage(), description="Stages, sharding and logs.")
    distributed: Distributed = field(Distributed(), description="Mesh axes, formats and seeds.")


class Training(Section):
    """Length, intervals and limits of a training run."""

    evaluators: Free = _has(None, "core", "Evaluations by name.")
    validation: Free = _has(None, "core", "Older form of evaluators.")
    logs: Free = _has(None, "core", "How often metrics are logged.")
    checkpoint: Free = _has(None, "core", "When checkpoints are written, and how many are kept.")
    export: Free = _has(None, "core", "Exports to other formats.")
    shutdown: Free = _has(None, "core", "Shutdown on a schedule.")
    wandb: Free = _has(None, "core", "Weights & Biases.")
    train_iters: Level = _has(0, "core", "Number of optimizer steps in the run.")
    test_iters: Level = _has(0, "feature", "Number of steps of the final test.")
    num_workers: Level = _has(2, "optional", "Processes that load data.")
    prefetch_factor: Positive | None = _has(
        None, "performance", "Number of microbatches that a loader prepares ahead."
    )
    timeout: PositiveReal | None = _has(
        3600.0, "feature", "Time limit of saving, loading and sampling, in seconds."
    )


class Batch(Section):
    """Sizes of the batch, before 0.4.0. Sizes that are not set follow from those that are."""

    micro_batch_size: Positive | None = _has(None, "core", "Samples in a microbatch.")
    depth_first_micro_batches: Positive | None = _has(
        None, "core", "Number of microbatches accumulated one after the other."
    )
    breadth_first_micro_batches: Positive | None = _has(
        None, "core", "Number of microbatches that pass each stage together."
    )
    sequential_micro_batches: Positive | None = _has(
        None, "core", "Depth-first times breadth-first microbatches."
    )
    batch_size: Positive | None = _has(None, "core", "Number of samples in a step over all ranks.")
    sequence_length: Positive = _has(2048, "core", "Tokens in a sample.")
    micro_sequence_length: Positive | None = _has(
        None, "performance", "Number of tokens of a sample that run at once."
    )
    cross_document_attention: bool = _has(
        True, "feature", "Tokens attend to other documents in the same sample."
    )
    use_loss_masking_spans: bool = _has(
        False, "feature", "Mask the loss at the spans that the data marks."
    )
    truncate_documents: bool | None = _has(True, "feature", "Cut documents to fill samples.")


class Schedule(Section):
    """The order of microbatches, and the overlap of messages with compute."""

    depth_first_micro_batches: Positive = _has(
        1, "core", "Number of microbatches accumulated one after the other."
    )
    breadth_first_micro_batches: Positive = _has(
        1, "core", "Number of microbatches that pass each stage together."
    )
    micro_batch_splits: Positive = _has(
        1, "performance", "Number of parts into which a microbatch is split along the sequence."
    )
    pipeline_overlap: bool = _has(True, "testing", "Pipeline messages overlap compute.")
    data_overlap: bool = _has(True, "testing", "Gathering and reducing overlap compute.")
    data_batch_warn_time_ms: PositiveReal = _has(
        1000.0, "optional", "Warn when a batch takes longer than this, in milliseconds."
    )
    throttle_cpu: bool = _has(True, "expert", "Keep the CPU from running far ahead of the GPU.")
    throttle_cpu_rate: Positive = _has(
        1, "expert", "Number of schedule steps after which the CPU waits for the GPU again."
    )
    throttle_cpu_delay: Level = _has(
        1, "expert", "Number of schedule steps by which the CPU may be ahead."
    )
    debug_schedule: bool = _has(False, "logging", "Log the whole schedule.")
    debug_send_recv: bool = _has(False, "logging", "Log pipeline messages.")
    profile_schedule: bool = _has(False, "logging", "Time each step of the schedule.")
    estimate_critical_batch: Literal[False] = _has(False, "deprecated", "No longer supported.")
    skip_step: bool = _has(False, "testing", "Leave out the optimizer's step.")


class Data(Section):
    """Datasets and sampling."""

    micro_batch_size: Positive = _has(2048, "core", "Tokens in a microbatch.")
    maximum_document_length: int | None = _has(
        None, "core", "Number of tokens in the longest document."
    )
    truncate_documents: bool | None = _has(True, "feature", "Cut documents to fill microbatches.")
    gpu: bool = _has(True, "feature", "Sample on the GPU.")
    shuffle: Literal["full", "epoch", "skip_first_epoch", "disabled"] = _has(
        "epoch", "feature", "How samples are shuffled."
    )
    seed: int = _has(784569, "feature", "Seed of sampling.")
    datasets: Free = _has(None, "core", "Datasets by phase.")
    sampling: Free = _has(None, "core", "Old name of the section for sampling.")
    tokenizer: Free = _has(None, "feature", "Tokenizer of the data.")
    fim: Free = _has(None, "feature", "Fill in the middle.")
    split: list[Real] = _has(None, "core", "Shares of the data for training, validation and test.")
    format: str = _has(None, "core", "Kind of dataset.")
    path: str | list[str] = _has(None, "core", "Paths of datasets.")
    data_sample_warn_time_ms: PositiveReal = _has(
        1000.0, "feature", "Warn when a sample takes longer than this, in milliseconds."
    )
    multiprocessing_context: Literal["fork", "spawn"] = _has(
        "spawn", "expert", "How loader processes start."
    )


class LearningRate(Section):
    """Learning rate over optimizer steps."""

    base: Real = _has(0.0001, "core", "Peak learning rate.")
    decay_style: str = _has(
        "constant", "feature", "Shape after warmup: constant, linear, power or cosine."
    )
    decay_iterations: int | None = _has(
        None, "feature", "Step at which the decay ends, warmup included."
    )
    decay_power: Real = _has(1.0, "feature", "Exponent of a decay of shape power.")
    warmup_iterations: int = _has(0, "feature", "Steps of linear warmup from 0.")
    minimum: Real = _has(0.0, "feature", "Learning rate after the decay.")
    schedule: str | None = _has(
        None, "wip", "The schedule as text, which replaces the other fields of this section."
    )


class GradientScaler(Section):
    """Scaling of the loss."""

    constant: NonNegative | None = _has(
        None, "feature", "Constant loss scale. Default: dynamic in fp16."
    )
    initial: PositiveReal = _has(65536.0, "feature", "First dynamic scale.")
    minimum: PositiveReal = _has(1.0, "feature", "Smallest dynamic scale.")
    window: Positive = _has(
        1000, "feature", "Number of steps without overflow before the loss scale grows."
    )
    hysteresis: Positive = _has(
        2, "feature", "Number of overflows tolerated before the loss scale shrinks."
    )


class Optimizer(Section):
    """AdamW."""

    learning_rate: LearningRate = field(LearningRate(), description="Learning rate.")
    gradient_scaler: GradientScaler = field(GradientScaler(), description="Loss scaling.")
    weight_decay: NonNegative = _has(0.01, "core", "Decoupled weight decay.")
    beta_1: Fraction = _has(0.9, "optional", "Decay of the first moment.")
    beta_2: Fraction = _has(0.999, "optional", "Decay of the second moment.")
    epsilon: PositiveReal = _has(1e-8, "optional", "Term added to the root of the second moment.")
    gradient_norm_clipping: PositiveReal = _has(
        1.0, "feature", "Limit of the global gradient norm."
    )
    default_learning_rate_scale: NonNegative = _has(
        1.0, "feature", "Factor of the learning rate for layers that set no own factor."
    )


class FastLLM(Section):
    """A Fast-LLM training config."""

    type: str | None = _has(None, "feature", "Kind of trainer, such as gpt.")
    run: Run = field(Run(), description="Experiment and logs.")
    model: Model = field(Model(), description="Model and layout.")
    pretrained: Free = _has(None, "feature", "Checkpoint to start from.")
    training: Training = field(Training(), description="Course of the run.")
    batch: Batch = field(Batch(), description="Batch, before 0.4.0.")
    schedule: Schedule = field(Schedule(), description="Order of microbatches.")
    data: Data = field(Data(), description="Datasets and sampling.")
    profiling: Free = _has(None, "logging", "Steps to profile, and the data to record.")
    optimizer: Optimizer = field(Optimizer(), description="Optimizer.")
    reference_models: Free = _has(None, "feature", "Further models by name, as for distillation.")
    callbacks: Free = _has(None, "feature", "Callbacks by name.")


SCHEMA = FastLLM
"""The schema, under the name by which `PackagedDialect` finds it."""
