"""Every setting of a Merak run, with type and description: parameters of `init`, `MerakArguments`,
the trainer, and the tensor-parallel lists.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import BeforeValidator, Field as field

from bridge.plan.section import Count, Real, Section, Size, UpToThree, Whole, tuples


def _word(value: Any) -> Any:
    if (
        isinstance(value, str)
        and value.startswith("-")
        and not re.fullmatch(r"-\d+|-\d*\.\d+", value)
    ):
        raise ValueError(
            "expected a word that does not start with a dash, because a command line reads such a word as an option"
        )
    return value


def _numbers(value: Any) -> Any:
    """Return a list with each number as a word, as on the command line. Return other values
    unchanged.
    """
    if isinstance(value, list | tuple):
        return tuple(
            repr(item) if isinstance(item, int | float) and not isinstance(item, bool) else item
            for item in value
        )
    return value


def _name(value: Any) -> Any:
    if isinstance(value, str) and not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", value):
        raise ValueError(
            "expected the name of a Python object, such as model or transformers.LlamaAttention"
        )
    return value


Positive = Annotated[Real, Gt(0)]
NonNegative = Annotated[Real, Ge(0)]
Fraction = Annotated[Real, Ge(0), Le(1)]
Beta = Annotated[Real, Ge(0), Lt(1)]
Power = Annotated[Whole, Ge(0), Le(127)]
Steps = Annotated[Whole, Ge(-1)]
Word = Annotated[str, BeforeValidator(_word)]
Words = Annotated[tuple[Word, ...], BeforeValidator(tuples), MinLen(1)]
NumberWords = Annotated[tuple[Word, ...], BeforeValidator(_numbers), MinLen(1)]
Strings = Annotated[tuple[str, ...], BeforeValidator(tuples)]
Name = Annotated[str, BeforeValidator(_name)]
Names = Annotated[tuple[Name, ...], BeforeValidator(tuples)]
Style = Literal["col", "row"]
Ratio = tuple[Count, Count, Style]
Cut = tuple[str, Literal[0, 1]]
Strategy = Literal["no", "steps", "epoch"]
Schedule = Literal[
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
    "reduce_lr_on_plateau",
    "cosine_with_min_lr",
    "warmup_stable_decay",
]


class Init(Section):
    """`Merak.init`: sizes of the mesh axes. Pass them by name."""

    pp: Count | None = field(None, description="Number of ranks over which layers are split.")
    tp: Count | None = field(
        None, description=("Number of ranks over which each weight matrix is split.")
    )
    dp: Count | None = field(None, description="Data-parallel replicas.")
    sp: Count | None = field(
        None,
        description=(
            "Number of ranks over which attention splits the sequence (Ulysses, only Llama models)."
        ),
    )
    backend: str | None = field(
        None, description="No effect: Merak uses NCCL if torch supports NCCL, else MPI."
    )


class Arguments(Section):
    """`MerakArguments`, with the arguments inherited from Hugging Face's `TrainingArguments`."""

    # Pipeline
    train_schedule: (
        Literal[
            "1f1b",
            "ds_default",
            "pre_recompute_1f1b",
            "last_no_recompute_1f1b",
            "shifted_critical_path",
            "full_critical_path_1f1b",
        ]
        | None
    ) = field(
        None,
        description="Pipeline schedule: variants of 1F1B that differ in messages and in the time of recomputation.",
    )
    partition_method: (
        Literal["uniform", "uniform_floor", "parameters", "custom", "autopipe"] | None
    ) = field(
        None, description="Method that distributes shards of the traced graph over pipeline stages."
    )
    split_method: (
        Literal["min_deps", "farthest_min_deps", "nearest_min_deps", "layer_split"] | None
    ) = field(None, description="Method that cuts the traced graph into shards.")
    custom_split_points: Words | None = field(
        None,
        description=(
            "Parts of module names; layer_split cuts after each module whose name contains one of the parts."
        ),
    )
    custom_partition: NumberWords | None = field(
        None,
        description=(
            "First shard of each stage, followed by the number of shards, in one word with commas;"
            " for partition_method custom."
        ),
    )
    shard_count: Count | None = field(
        None, description="Number of shards; only split_method farthest_min_deps uses it."
    )
    dealloc_pipeoutput: bool | None = field(
        None, description="Free activations once they are sent."
    )
    # Tracing
    trace_method: str | None = field(
        None, description="fx or dynamo; any other word means no tracing, which needs pp x tp = 1."
    )
    trace_model: str | None = field(
        None, description="Class name of one more model that Merak traces."
    )
    input_names: Words | None = field(
        None,
        description=(
            "Names of the inputs for tracing. Default: the names of the model's dummy inputs."
        ),
    )
    cache_sharding: bool | None = field(None, description="Keep shards on disk between runs.")
    cache_name: str | None = field(None, description="Name of that cache.")
    # Model
    num_layers: Count | None = field(
        None, description="Number of transformer layers. Default: as in the model's config."
    )
    seq_length: Count | None = field(
        None, description="Number of tokens in a sequence. Default: as in the model's config."
    )
    hidden_size: Count | None = field(
        None, description="Width of the model. Default: as in the model's config."
    )
    num_heads: Count | None = field(
        None, description="Number of attention heads. Default: as in the model's config."
    )
    init_method_std: NonNegative | None = field(
        None, description="Standard deviation of weights that tensor parallelism initialises."
    )
    no_tie_modules: bool | None = field(None, description="Weights of equal shape are not tied.")
    parallel_vocab: bool | None = field(
        None, description="Embedding, output head and loss are split by vocabulary."
    )
    # Tensor and sequence parallelism
    sequence_parallel: bool | None = field(
        None,
        description=(
            "Up to 2.2.2: activations are split over tensor ranks. On main: Ulysses attention over"
            " the ranks of init(sp=)."
        ),
    )
    sequence_dim: Size | None = field(
        None, description="Index of the sequence dimension in the hidden states."
    )
    tp_overlapping_level: UpToThree | None = field(
        None,
        description=(
            "Overlap of tensor-parallel messages with compute: 1 within linear layers, 2 within"
            " blocks, 3 between blocks."
        ),
    )
    # Recomputation
    activation_checkpointing: bool | None = field(
        None, description="Activations are recomputed in the backward pass."
    )
    checkpoint_num_layers: Size | None = field(
        None, description="Number of shards that are recomputed together; 0 means no recomputation."
    )
    activation_checkpoint_ratio: NumberWords | None = field(
        None,
        description=(
            "Share of a stage that is recomputed: one value for the first stage, or one for each"
            " stage."
        ),
    )
    # ZeRO
    zero_optimization: bool | None = field(None, description="Switch of ZeRO in release 1.1.1.")
    zero_stage: UpToThree | None = field(None, description="ZeRO stage; only 1 exists.")
    zero_allow_untested_optimizer: bool | None = field(
        None, description="Allow ZeRO with optimizers that it was not tested with."
    )
    zero_allgather_bucket_size: Count | None = field(
        None, description="Elements gathered in one collective."
    )
    zero_reduce_bucket_size: Count | None = field(
        None, description="Elements reduced in one collective."
    )
    prescale_gradients: bool | None = field(
        None, description="ZeRO divides gradients before it sums them."
    )
    gradient_predivide_factor: Positive | None = field(
        None,
        description=(
            "ZeRO divides gradients by this factor before it sums them, and corrects the sum."
        ),
    )
    # Precision
    fp16: bool | None = field(
        None,
        description="Train in fp16, with an fp32 copy of the weights and a dynamic loss scale.",
    )
    bf16: bool | None = field(
        None, description="Train in bf16 without an fp32 copy of the weights; from 2.2.2 on."
    )
    half_precision_backend: Literal["auto", "amp", "cuda_amp", "apex", "cpu_amp"] | None = field(
        None, description="Automatic mixed precision instead of fp16 or bf16 weights."
    )
    fp16_opt_level: Literal["O0", "O1", "O2", "O3"] | None = field(
        None, description="Level of Apex mixed precision."
    )
    loss_scale: NonNegative | None = field(
        None, description="Constant loss scale; no effect: the scale is always dynamic."
    )
    initial_scale_power: Power | None = field(
        None, description="Exponent of the first loss scale, a power of two."
    )
    loss_scale_window: Count | None = field(
        None, description="Number of good steps before the scale doubles."
    )
    hysteresis: Count | None = field(
        None, description="Number of overflows before the scale halves; always 2 from 2.0.0 on."
    )
    min_loss_scale: Size | None = field(None, description="Smallest loss scale.")
    tf32: bool | None = field(
        None, description="Use TF32 matrix products; building the arguments sets torch's switch."
    )
    # Batch, optimizer, learning rate
    per_device_train_batch_size: Count | None = field(
        None, description="Sequences in a microbatch."
    )
    gradient_accumulation_steps: Count | None = field(None, description="Microbatches in a step.")
    adafactor: bool | None = field(None, description="Adafactor in place of AdamW.")
    learning_rate: NonNegative | None = field(None, description="Peak learning rate.")
    weight_decay: NonNegative | None = field(
        None, description="Weight decay of all parameters but biases and layer norms."
    )
    adam_beta1: Beta | None = field(None, description="Decay rate of the first moment.")
    adam_beta2: Beta | None = field(None, description="Decay rate of the second moment.")
    adam_epsilon: NonNegative | None = field(
        None, description="Term added to the square root of the second moment."
    )
    max_grad_norm: Real | None = field(
        None, description="Bound on the gradient norm; 0 or less switches clipping off."
    )
    lr_scheduler_type: Schedule | None = field(
        None, description="Shape of the learning rate over the steps."
    )
    lr_scheduler_kwargs: dict[str, Any] | None = field(
        None, description="Further arguments of the learning-rate schedule."
    )
    warmup_ratio: Fraction | None = field(
        None,
        description=("Share of the steps used for warmup; takes effect only if warmup_steps is 0."),
    )
    warmup_steps: Size | None = field(None, description="Steps that warm up.")
    num_train_epochs: Positive | None = field(
        None,
        description=("Number of passes over the data; takes effect only if max_steps is negative."),
    )
    max_steps: Steps | None = field(
        None, description="Number of optimizer steps; -1 leaves the length to the epochs."
    )
    seed: Size | None = field(None, description="Seed of the random numbers.")
    # Data
    dataloader_num_workers: Size | None = field(None, description="Processes that load data.")
    dataloader_pin_memory: bool | None = field(
        None, description="Batches are put into page-locked memory."
    )
    split_inputs: bool | None = field(
        None, description="Input data is split; no effect from release 2.0.0 on."
    )
    # Evaluation, logs
    per_device_eval_batch_size: Count | None = field(
        None, description="Number of sequences in a microbatch of the evaluation."
    )
    do_train: bool | None = field(None, description="Only the training script reads this argument.")
    do_eval: bool | None = field(None, description="Evaluate at the end of each epoch.")
    do_predict: bool | None = field(
        None, description="Only the training script reads this argument."
    )
    eval_steps: Positive | None = field(
        None, description=("Number of batches in an evaluation. Default: all.")
    )
    eval_iters: Steps | None = field(
        None, description=("Number of batches in an evaluation, in old releases.")
    )
    return_logits: bool | None = field(None, description="Evaluation returns logits and labels.")
    wall_clock_breakdown: bool | None = field(
        None, description="Log the time of each part of a step."
    )
    logging_steps: Positive | None = field(
        None, description=("Number of steps between two lines of the log.")
    )
    output_dir: str | None = field(
        None, description="Directory of checkpoints and logs; required on the command line."
    )
    # Checkpoints
    save: bool | None = field(None, description="Write checkpoints.")
    save_steps: Positive | None = field(None, description="Steps between checkpoints.")
    save_total_limit: Whole | None = field(
        None, description=("Number of checkpoints that are kept; 0 or less keeps all.")
    )
    finetune: bool | None = field(None, description="Load only weights, and count steps from 0.")
    no_save_rng: bool | None = field(None, description="Do not save the random state.")
    no_save_optim: bool | None = field(None, description="Do not save the optimizer state.")
    no_load_rng: bool | None = field(None, description="Do not load the random state.")
    no_load_optim: bool | None = field(None, description="Do not load the optimizer state.")
    resume_from_checkpoint: str | None = field(None, description="Checkpoint to continue from.")
    load_best_model_at_end: bool | None = field(
        None, description="The best checkpoint is kept even beyond save_total_limit."
    )
    # Text generation, LoRA
    text_generation: bool | None = field(
        None, description="Generate text with the engine, in old releases."
    )
    out_seq_length: Count | None = field(
        None, description=("Largest number of tokens that generation may produce.")
    )
    temperature: Positive | None = field(None, description="Temperature of sampling.")
    lora_config: str | None = field(
        None, description="JSON file of a LoRA adapter; only for one tensor rank."
    )
    adapter_name: str | None = field(None, description="Name of the adapter.")
    # Device
    local_rank: Annotated[Whole, Ge(-1)] | None = field(
        None, description="Rank on this node; the environment takes precedence."
    )
    no_cuda: bool | None = field(None, description="Old name of use_cpu.")
    use_cpu: bool | None = field(
        None, description="Run on the CPU, which is also done if there is no GPU."
    )
    # Inherited, and read by nothing in Merak since 2.0.0
    optim: str | None = field(None, description="Optimizer of the Hugging Face trainer.")
    overwrite_output_dir: bool | None = field(
        None, description="Allow an output directory that is not empty."
    )
    eval_strategy: Strategy | None = field(
        None, description="When the Hugging Face trainer evaluates: never, by steps or by epochs."
    )
    evaluation_strategy: Strategy | None = field(None, description="Old name of eval_strategy.")
    prediction_loss_only: bool | None = field(None, description="Evaluation returns only the loss.")
    eval_accumulation_steps: Count | None = field(
        None,
        description=(
            "Number of evaluation steps whose predictions stay on the device before they move to"
            " the CPU."
        ),
    )
    log_level: str | None = field(None, description="Level of the main process's log.")
    logging_dir: str | None = field(None, description="Where TensorBoard logs go.")
    logging_strategy: Strategy | None = field(
        None, description="When the Hugging Face trainer logs: never, by steps or by epochs."
    )
    logging_first_step: bool | None = field(None, description="Log the first step.")
    logging_nan_inf_filter: bool | None = field(
        None, description="Leave losses that are NaN or infinite out of the log."
    )
    save_strategy: Literal["no", "steps", "epoch", "best"] | None = field(
        None, description="When that trainer saves."
    )
    save_safetensors: bool | None = field(None, description="Checkpoints as safetensors.")
    save_only_model: bool | None = field(None, description="Checkpoints without optimizer state.")
    save_on_each_node: bool | None = field(None, description="Each node writes checkpoints.")
    data_seed: Size | None = field(None, description="Seed of the data order.")
    bf16_full_eval: bool | None = field(None, description="Evaluation in bf16.")
    fp16_full_eval: bool | None = field(None, description="Evaluation in fp16.")
    ddp_backend: str | None = field(None, description="Backend of torch.distributed.")
    dataloader_drop_last: bool | None = field(
        None, description="Leave out the last batch if it is short."
    )
    dataloader_prefetch_factor: Count | None = field(
        None, description="Number of batches that each process loads ahead."
    )
    dataloader_persistent_workers: bool | None = field(
        None, description="Processes that load data keep running after an epoch."
    )
    run_name: str | None = field(None, description="Name of the run in the logs.")
    disable_tqdm: bool | None = field(None, description="No progress bars.")
    remove_unused_columns: bool | None = field(
        None, description="Drop columns that are not arguments of the model."
    )
    label_names: Words | None = field(None, description="Inputs that are labels.")
    metric_for_best_model: str | None = field(None, description="Metric that compares checkpoints.")
    greater_is_better: bool | None = field(
        None, description="Whether a larger value of the metric for the best model is better."
    )
    ignore_data_skip: bool | None = field(
        None, description="Do not skip data when a run continues."
    )
    label_smoothing_factor: Fraction | None = field(
        None, description="Share of each label that is distributed over the other labels."
    )
    group_by_length: bool | None = field(
        None, description=("Put samples of similar length into the same batch.")
    )
    report_to: Words | None = field(None, description="Loggers to report to.")
    ddp_find_unused_parameters: bool | None = field(None, description="Switch of torch's DDP.")
    ddp_bucket_cap_mb: Count | None = field(
        None, description="Bucket size of torch's DDP, in megabytes."
    )
    ddp_timeout: Count | None = field(
        None, description=("Number of seconds before a collective is aborted.")
    )
    push_to_hub: bool | None = field(
        None, description=("Upload checkpoints to the Hugging Face hub.")
    )
    gradient_checkpointing: bool | None = field(
        None, description="Recomputation in the code of Hugging Face models."
    )
    full_determinism: bool | None = field(None, description="Only deterministic kernels.")
    torch_compile: bool | None = field(None, description="Compile the model.")
    neftune_noise_alpha: NonNegative | None = field(None, description="Noise on embeddings.")
    average_tokens_across_devices: bool | None = field(
        None, description="Average the loss over the tokens of all ranks."
    )


class Trainer(Section):
    """Arguments of `MerakTrainer`, as names of objects in the script."""

    model: Name | None = field(None, description="Model to train, an object of the script.")
    train_dataset: Name | None = field(
        None, description="Data set to train on, an object of the script."
    )
    eval_dataset: Name | None = field(
        None, description="Data set to evaluate on, an object of the script."
    )
    data_collator: Name | None = field(None, description="Function that makes a batch of samples.")
    leaf_modules: Names | None = field(
        None, description=("Module classes that tracing does not enter.")
    )
    loss_fn: Name | None = field(
        None,
        description=(
            "Loss function; from release 2.0.0 on a script overrides the"
            " method get_loss_fn instead."
        ),
    )


class TensorLists(Section):
    """`set_tp_layer_lists`: the split of modules over tensor ranks, for models that Merak does not
    know.
    """

    col_para_list: Strings | None = field(
        None, description="Parts of the names of linear layers that are split by output."
    )
    row_para_list: Strings | None = field(
        None, description="Parts of the names of linear layers that are split by input."
    )
    conv_para_list: Strings | None = field(
        None, description="Parts of the names of convolutions that are split by channel."
    )
    input_output_mapping: Annotated[tuple[Ratio, ...], BeforeValidator(tuples)] | None = field(
        None,
        description=(
            "Ratios of a linear layer's input and output width, each with the kind of split; the"
            " first that fits is used."
        ),
    )
    weight_change_list: Annotated[tuple[Cut, ...], BeforeValidator(tuples)] | None = field(
        None,
        description="Names of weights, each with the dimension to split; Merak gives every rank the first part of the weight.",
    )
    tp_attr_list: Strings | None = field(
        None, description="Attributes of modules that are divided by the number of tensor ranks."
    )


class Merak(Section):
    """A Merak run: the parameters of `init`, the arguments on the command line, the trainer and the
    tensor-parallel lists.
    """

    init: Init = field(Init(), description="Sizes of the mesh axes.")
    args: Arguments = field(Arguments(), description="Arguments of the command line.")
    trainer: Trainer = field(Trainer(), description="The trainer.")
    tp_lists: TensorLists = field(TensorLists(), description="Tensor-parallel lists.")


SCHEMA = Merak
"""The schema, under the name by which `PackagedDialect` finds it."""
