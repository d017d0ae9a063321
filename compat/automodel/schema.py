"""Typed settings of an AutoModel recipe about distribution, batches and training; all other settings are free-form."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BeforeValidator, Field as field

from bridge.plan.families.schema import ModelKeys
from bridge.plan.section import Count, Real, Section, Size, UpToThree, Whole, tuples

DTYPES = {
    name: short
    for short, names in {
        "fp64": ("fp64", "float64", "double"),
        "fp32": ("fp32", "float32", "float", "32-true", "32"),
        "fp16": ("fp16", "float16", "half", "16-true"),
        "bf16": ("bf16", "bfloat16", "bf16-true"),
    }.items()
    for name in names
}
"""Spellings of each number format, each with its short name."""
SPELLED = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bf16"}
"""Spelling of each short name in a written file."""
_TORCH = ("float64", "double", "float32", "float", "float16", "half", "bfloat16")
TAKEN = frozenset(("bf16", "auto", *(dot + name for dot in ("", "torch.") for name in _TORCH)))
"""The spellings that AutoModel itself accepts (shared/utils.py, dtype_from_str)."""


def _dtype(value: Any) -> Any:
    # A live torch.dtype is known by its type's name, so that no torch has to be imported.
    text = str(value) if type(value).__name__ == "dtype" else value
    return DTYPES.get(text.lower().removeprefix("torch."), text) if isinstance(text, str) else text


NAMED_MODES = {
    **dict.fromkeys(("false", "off", "none", "disabled", "no"), False),
    **dict.fromkeys(("true", "on", "full", "enabled", "yes"), True),
}
"""Texts that AutoModel reads as a switch (recipes/_dist_utils.py,
_normalize_activation_checkpointing).
"""


def _mode(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    text = value.lower().replace("-", "_")
    return NAMED_MODES.get(text, text)


Dtype = Annotated[Literal["fp64", "fp32", "fp16", "bf16"], BeforeValidator(_dtype)]
ModelDtype = Annotated[Literal["fp64", "fp32", "fp16", "bf16", "auto"], BeforeValidator(_dtype)]
NonNegative = Annotated[Real, Ge(0)]
Positive = Annotated[Real, Gt(0)]
Beta = Annotated[Real, Ge(0), Lt(1)]
Betas = Annotated[tuple[Beta, Beta], BeforeValidator(tuples)]
Names = Annotated[
    tuple[str, ...],
    BeforeValidator(lambda value: (value,) if isinstance(value, str) else tuples(value)),
]
Parts = Annotated[tuple[tuple[str, ...], ...], BeforeValidator(tuples)]
Mode = Annotated[bool | Literal["selective"], BeforeValidator(_mode)]
Rounding = Literal["up", "down"]
Strategy = Annotated[
    Literal["fsdp2", "megatron_fsdp", "megatron-fsdp", "mfsdp", "ddp"],
    BeforeValidator(lambda value: value.lower() if isinstance(value, str) else value),
]
Free = dict[str, Any]

REST = "*"
"""Name of the field in which a section keeps all settings that the schema does not list."""


def rest(what: str) -> Any:
    """Return the field in which a section keeps all settings that the schema does not list. `what`
    is a part of the field's description.
    """
    return field(None, alias=REST, description=f"All other settings {what}, unchanged.")


class StepScheduler(Section):
    """Batch sizes, length of the run, and intervals of checkpoints, validation and logs."""

    global_batch_size: Count | None = field(
        None, description="Number of samples in one optimizer step over all ranks."
    )
    local_batch_size: Count | None = field(
        None,
        description=(
            "Number of samples that a data rank reads at once; with a pipeline, in all microbatches"
            " of one pass."
        ),
    )
    num_epochs: Count | None = field(None, description="Number of passes over the data set.")
    max_steps: Count | None = field(
        None, description="Number of optimizer steps after which the run ends in any case."
    )
    ckpt_every_steps: Count | None = field(None, description="Steps between checkpoints.")
    save_checkpoint_every_epoch: bool | None = field(
        None, description="Write a checkpoint also at the end of each epoch."
    )
    validate_on_checkpoint: bool | None = field(
        None, description="Validate also at each checkpoint."
    )
    val_every_steps: Count | None = field(None, description="Steps between validations.")
    log_remote_every_steps: Count | None = field(
        None, description="Steps between entries in remote logs."
    )
    loss_average_window_steps: Count | None = field(
        None, description="Number of steps in the running mean of the logged loss."
    )
    gc_every_steps: Count | None = field(
        None, description="Steps between forced garbage collections."
    )
    start_step: Size | None = field(None, description="First step of a resumed run.")
    start_epoch: Size | None = field(None, description="First epoch of a resumed run.")
    preemption_signal: int | Names | None = field(
        None, description="Signals on which a last checkpoint is written."
    )


class Pipeline(Section):
    """PipelineConfig: schedule, split and patches of a pipelined model."""

    pp_schedule: str | None = field(
        None, description="Schedule of torch.distributed.pipelining, in upper or lower case."
    )
    pp_schedule_csv: str | None = field(
        None,
        description=(
            "CSV file with the computations of the schedule; pp_schedule still decides where stages"
            " are placed."
        ),
    )
    pp_microbatch_size: Count | None = field(None, description="Samples in one microbatch.")
    pp_batch_size: Count | None = field(
        None, description="Number of samples in one pass. Recipes set it to the local batch size."
    )
    layers_per_stage: Count | None = field(
        None,
        description=(
            "Wanted number of decoder layers in a virtual stage. AutoModel computes the number of"
            " stages from this number, and then spreads the layers evenly."
        ),
    )
    round_virtual_stages_to_pp_multiple: Rounding | None = field(
        None,
        description="Direction in which the number of stages is rounded to a multiple of pp_size.",
    )
    module_fqns_per_model_part: Parts | None = field(
        None, description="Names of the modules in each virtual stage, in order."
    )
    patch_inner_model: bool | None = field(
        None, description="Replace the inner model's forward by one that runs a stage."
    )
    patch_causal_lm_model: bool | None = field(
        None, description="Replace the outer model's forward by one that runs a stage."
    )
    patch_stage_backward_maybe_with_nosync: bool | None = field(
        None,
        description="Use AutoModel's own backward pass for FSDP in stages. Recipes overwrite this switch.",
    )
    dtype: Dtype | None = field(None, description="Number format of activations between stages.")
    scale_grads_in_schedule: bool | None = field(
        None, description="Divide gradients by the number of microbatches."
    )
    loss_fn: str | Free | None = field(
        None, description="Loss of the last stage. Recipes replace it by their own loss."
    )
    pp_seq_len: Count | None = field(
        None, description="Number of tokens in a sequence, if the shapes between stages are fixed."
    )
    pp_recv_buffer_pool: bool | None = field(
        None, description=("Microbatches share receive buffers, one for each microbatch in flight.")
    )
    pp_recv_buffer_pool_slack: Size | None = field(
        None, description="Number of receive buffers beyond the microbatches in flight."
    )


class AutoPipeline(Section):
    """Settings of the layout before 0.3.0 that are no longer in `distributed.pipeline`."""

    target: str | None = field(
        None, alias="_target_", description="Class of the old layout; kept as text, never loaded."
    )
    visualization_font_size_offset: Whole | None = field(
        None, description="Font size of a drawing of the schedule."
    )


class Moe(Section):
    """Sharding of experts."""

    ignore_router_for_ac: bool | None = field(
        None, description="Results of the router are saved instead of recomputed."
    )
    reshard_after_forward: bool | None = field(
        None, description="Expert layers free their gathered weights after the forward pass."
    )
    lm_head_precision: Dtype | None = field(None, description="Number format of the output head.")
    wrap_outer_model: bool | None = field(None, description="Shard also the outer model as a unit.")
    mp_policy: Free | None = field(None, description="Number formats of the sharded experts.")


class MixedPrecision(Section):
    """Number formats of FSDP2."""

    target: str | None = field(
        None, alias="_target_", description="Class of the policy; kept as text, never loaded."
    )
    param_dtype: Dtype | None = field(
        None, description="Format of gathered weights in forward and backward."
    )
    reduce_dtype: Dtype | None = field(None, description="Format in which gradients are reduced.")
    output_dtype: Dtype | None = field(None, description="Format of a sharded module's outputs.")
    cast_forward_inputs: bool | None = field(
        None, description="Inputs are cast to the format of the weights."
    )


class Offload(Section):
    """FSDP2's offload to host memory."""

    target: str | None = field(
        None, alias="_target_", description="Class of the policy; kept as text, never loaded."
    )
    pin_memory: bool | None = field(None, description="Page-locked host memory.")


class FrameSharding(Section):
    """Distribution of a vision encoder's frames over context ranks."""

    enabled: bool | None = field(None, description="Ranks share the frames.")
    mesh_dims: Annotated[tuple[Literal["cp"]], BeforeValidator(tuples)] | None = field(
        None, description="Axes that share them."
    )
    min_tokens: Size | None = field(
        None,
        description="Ranks share the frames only if there are at least this many visual tokens.",
    )
    min_frames: Size | None = field(
        None, description="Ranks always share the frames if there are at least this many frames."
    )
    min_local_patch_rows: Size | None = field(
        None, description="Number of rows of patches on each rank after padding with zeros."
    )
    cost_alpha: Size | Literal["auto"] | None = field(
        None, description="Linear part of a frame's cost when frames are distributed."
    )


class VisionSharding(Section):
    """Sharding of vision modules."""

    frame_sharding: FrameSharding = field(FrameSharding(), description="Frames over context ranks.")


class Multimodal(Section):
    """Sharding of vision and audio modules."""

    frozen_sharding: Literal["root", "per_layer", "replicate"] | None = field(
        None, description="Way in which frozen modules are sharded."
    )
    vision: VisionSharding = field(VisionSharding(), description="Vision modules.")


class Distributed(Section):
    """Mesh sizes, the strategy that shards over data ranks, and its options."""

    target: str | None = field(
        None,
        alias="_target_",
        description="Manager class of the old layout; kept as text, never loaded.",
    )
    strategy: Strategy | None = field(
        None, description="Strategy that shards weights and gradients over data-parallel ranks."
    )
    dp_size: Count | None = field(
        None,
        description=(
            "Number of data-parallel ranks. Default: all ranks that the other axes leave."
        ),
    )
    dp_replicate_size: Count | None = field(
        None,
        description=(
            "Number of groups of data ranks. Each group holds the whole model, sharded over the"
            " ranks of the group."
        ),
    )
    tp_size: Count | None = field(None, description="Tensor-parallel ranks.")
    pp_size: Count | None = field(None, description="Pipeline ranks.")
    cp_size: Count | None = field(None, description="Context-parallel ranks.")
    ep_size: Count | None = field(
        None,
        description=(
            "Number of expert-parallel ranks, which are made of data, context and tensor ranks."
        ),
    )
    pipeline: Pipeline = field(Pipeline(), description="Pipeline.")
    moe: Moe = field(Moe(), description="Experts.")
    activation_checkpointing: Mode | None = field(
        None, description="Activations to recompute: all, selected ones, or none."
    )
    activation_checkpointing_scope: Names | None = field(
        None, description="Groups of layers for which activations are recomputed."
    )
    sequence_parallel: bool | None = field(
        None, description="Split norms by tokens within a tensor group."
    )
    tp_plan: Free | str | None = field(
        None, description=("User's own plan for tensor-parallel modules.")
    )
    custom_tp_plan: Free | str | None = field(None, description="The same before 0.3.0.")
    use_hf_tp_plan: bool | None = field(
        None, description="Use the tensor-parallel plan of the Hugging Face model."
    )
    mp_policy: MixedPrecision = field(MixedPrecision(), description="Number formats.")
    offload_policy: Offload = field(Offload(), description="Offload.")
    autocast_dtype: Dtype | None = field(
        None, description="Run the forward pass under torch.autocast."
    )
    defer_fsdp_grad_sync: bool | None = field(
        None, description="Reduce gradients only once, after the last microbatch."
    )
    reshard_after_forward: bool | None = field(
        None,
        description=(
            "Layers free their gathered weights after the forward pass. Default: all layers but the"
            " last; with a pipeline, none."
        ),
    )
    patch_is_packed_sequence: bool | None = field(
        None, description="Tell the model that no sequence is packed."
    )
    enable_async_tensor_parallel: bool | None = field(
        None, description="Tensor-parallel messages overlap compute."
    )
    enable_compile: bool | None = field(None, description="Compile each layer.")
    enable_fsdp2_prefetch: bool | None = field(
        None, description="Gather weights ahead of their use, in an explicitly defined order."
    )
    fsdp2_backward_prefetch_depth: Size | None = field(
        None, description="Number of units that are gathered ahead in the backward pass."
    )
    fsdp2_forward_prefetch_depth: Size | None = field(
        None, description="Number of units that are gathered ahead in the forward pass."
    )
    multimodal: Multimodal = field(
        Multimodal(), description="Sharding of vision and audio modules."
    )
    zero_dp_strategy: UpToThree | None = field(None, description="ZeRO stage of Megatron-FSDP.")
    megatron_fsdp_unit_modules: Names | None = field(
        None, description="Classes that Megatron-FSDP shards as units."
    )
    init_fsdp_with_meta_device: bool | None = field(
        None, description="Build the model without allocating memory first."
    )
    grad_reduce_in_fp32: bool | None = field(
        None, description="Megatron-FSDP reduces gradients in fp32."
    )
    preserve_fp32_weights: bool | None = field(
        None, description="Megatron-FSDP keeps fp32 weights for the optimizer."
    )
    overlap_grad_reduce: bool | None = field(
        None, description="Megatron-FSDP's gradient reduction overlaps backward."
    )
    overlap_param_gather: bool | None = field(
        None, description="Megatron-FSDP gathers weights ahead."
    )
    check_for_nan_in_grad: bool | None = field(
        None, description="Old check of gradient buffers; no effect."
    )
    report_nan_in_param_grad: bool | None = field(
        None, description="Check each parameter's gradient for NaN."
    )
    average_in_collective: bool | None = field(
        None, description="Average gradients inside the collective."
    )
    disable_bucketing: bool | None = field(
        None, description=("Use one reduction for each parameter.")
    )
    calculate_per_token_loss: bool | None = field(
        None, description="Megatron-FSDP leaves the division by the number of tokens to the loss."
    )
    keep_fp8_transpose_cache: bool | None = field(None, description="Keep transposed fp8 weights.")
    nccl_ub: bool | None = field(None, description="NCCL user buffers.")
    fsdp_double_buffer: bool | None = field(
        None, description=("Use two buffers for gathered weights.")
    )
    broadcast_buffers: bool | None = field(
        None, description="DDP broadcasts module buffers before each forward pass."
    )
    find_unused_parameters: bool | None = field(
        None, description="DDP looks for parameters without a gradient."
    )
    static_graph: bool | None = field(
        None, description="DDP may assume that the graph never changes."
    )
    bucket_cap_mb: Positive | None = field(None, description="DDP's bucket in MiB.")
    gradient_as_bucket_view: bool | None = field(
        None, description="Gradients are views of DDP's buckets."
    )
    backend: str | None = field(
        None, description="Backend of torch.distributed; in dist_env since 0.5.0."
    )
    world_size: Count | None = field(None, description="Number of ranks, before 0.3.0.")


class DistEnv(Section):
    """Process group."""

    backend: str | None = field(None, description="Backend of torch.distributed.")
    timeout_minutes: Positive | None = field(
        None, description="Number of minutes after which a collective is aborted."
    )
    others: Free | None = rest("about the process group")


class TransformerEngine(Section):
    """FP8 matrix products by Transformer Engine, which are on if the section is given."""

    recipe: str | Free | None = field(None, description="Scaling recipe: current, block or mxfp8.")
    others: Free | None = rest("about them")


class Fp8(Section):
    """8-bit products by torchao."""

    enabled: bool | None = field(None, description="Switch FP8 on.")
    recipe_name: str | None = field(
        None, description="Scaling recipe: tensorwise, rowwise or rowwise_with_gw_hp."
    )
    enable_fsdp_float8_all_gather: bool | None = field(
        None, description="FSDP2 gathers weights in 8 bits."
    )
    others: Free | None = rest("about them")


class Peft(Section):
    """Low-rank adapters, as a class and its arguments."""

    target: str | None = field(
        None,
        alias="_target_",
        description="Class of the adapters' config; kept as text, never loaded.",
    )
    dim: Count | None = field(None, description="Width of an adapter.")
    alpha: Positive | None = field(
        None, description="The output of an adapter is scaled by alpha / dim."
    )
    dropout: Annotated[Real, Ge(0), Le(1)] | None = field(
        None, description="Dropout of an adapter."
    )
    others: Free | None = rest("about adapters")


class Backend(Section):
    """Implementations inside the model."""

    attn: str | None = field(None, description="Implementation of attention.")
    linear: str | None = field(None, description="Implementation of linear layers.")
    experts: str | None = field(None, description="Implementation of experts' products.")
    enable_fsdp_optimizations: bool | None = field(
        None, description="Use AutoModel's own gradient exchange for FSDP, also in stages."
    )
    fake_balanced_gate: bool | None = field(
        None, description="Spread tokens evenly over the experts; the router has no effect."
    )
    gate_precision: Dtype | None = field(None, description="Number format of the router.")
    dispatcher: str | None = field(None, description="Way in which tokens reach their experts.")
    te_fp8: TransformerEngine = field(
        TransformerEngine(), description="8-bit products by Transformer Engine."
    )
    others: Free | None = rest("about the model's implementation")


class ModelConfig(ModelKeys):
    """Overrides of keys in the model's Hugging Face config, or the whole config."""

    target: str | None = field(
        None, alias="_target_", description="Config class of the model; kept as text, never loaded."
    )
    model_type: str | None = field(
        None, description="The model family, by its name in transformers."
    )
    architectures: Names | None = field(
        None, description="Model class; AutoModel's own code for it is used, if there is any."
    )
    others: Free | None = rest("in the model's config")


class Model(Section):
    """The model to load or to build."""

    target: str | None = field(
        None,
        alias="_target_",
        description="Function that loads or builds the model; kept as text, never called.",
    )
    torch_dtype: ModelDtype | None = field(
        None, description="Format in which weights are stored and updated."
    )
    config: ModelConfig = field(ModelConfig(), description="Overrides.")
    backend: Backend = field(Backend(), description="Implementations.")
    others: Free | None = rest("about the model")


class Optimizer(Section):
    """Optimizer class and its arguments."""

    target: str | None = field(
        None, alias="_target_", description="Optimizer class; kept as text, never loaded."
    )
    lr: NonNegative | None = field(None, description="Peak learning rate.")
    betas: Betas | None = field(None, description="Decay rates of the two moments.")
    eps: NonNegative | None = field(
        None, description="Term added to the square root of the second moment."
    )
    momentum: NonNegative | None = field(None, description="Momentum of SGD.")
    weight_decay: NonNegative | None = field(None, description="Weight decay.")
    adam_w_mode: bool | None = field(
        None, description="Transformer Engine's FusedAdam uses decoupled weight decay (AdamW)."
    )
    nesterov: bool | None = field(None, description="Nesterov momentum (SGD).")
    amsgrad: bool | None = field(None, description="Adam uses the largest second moment so far.")
    foreach: bool | None = field(
        None, description="Torch's optimizers update many parameters in one kernel."
    )
    fused: bool | None = field(
        None, description="Torch's optimizers run the whole step in one fused kernel."
    )
    bias_correction: bool | None = field(
        None, description="Transformer Engine's FusedAdam uses bias correction."
    )
    exp_avg_dtype: Dtype | None = field(
        None, description="Format of the first moment in Transformer Engine's FusedAdam."
    )
    exp_avg_sq_dtype: Dtype | None = field(
        None, description=("Format of the second moment in Transformer Engine's FusedAdam.")
    )
    param_group_overrides: list[Any] | None = field(
        None,
        description=(
            "Factors on learning rate and weight decay of parameters, by pattern of their names."
        ),
    )
    others: Free | None = rest("the optimizer takes")


Shape = Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"]


class LrScheduler(Section):
    """Learning rate and weight decay over the steps."""

    lr_decay_style: Shape | None = field(None, description="Shape after warmup.")
    lr_warmup_steps: Size | None = field(None, description="Steps of linear warmup.")
    lr_decay_steps: Count | None = field(
        None, description="Step at which the decay ends, warmup included."
    )
    init_lr: NonNegative | None = field(None, description="Learning rate at the start of warmup.")
    max_lr: NonNegative | None = field(
        None, description="Peak learning rate. Default: that of the optimizer."
    )
    min_lr: NonNegative | None = field(None, description="Learning rate after the decay.")
    start_wd: NonNegative | None = field(None, description="First weight decay.")
    end_wd: NonNegative | None = field(None, description="Last weight decay.")
    wd_incr_steps: Size | None = field(
        None, description="Number of steps over which weight decay changes."
    )
    wd_incr_style: Literal["constant", "linear", "cosine"] | None = field(
        None, description="Shape between them."
    )
    use_checkpoint_opt_param_scheduler: bool | None = field(
        None, description="Values in a checkpoint override those of the recipe."
    )
    override_opt_param_scheduler: bool | None = field(
        None, description="Values in the recipe override those of a checkpoint."
    )
    wsd_decay_steps: Size | None = field(
        None, description=("Number of steps in the final decay of WSD.")
    )
    lr_wsd_decay_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] | None = field(
        None, description="Shape of the final decay of WSD."
    )


class ClipGradNorm(Section):
    """Gradient clipping."""

    max_norm: NonNegative | None = field(None, description="Bound on the global gradient norm.")


class PackedSequence(Section):
    """Packing of several samples into one sequence."""

    packed_sequence_size: Size | None = field(
        None, description="Number of tokens in a packed sequence; 0 switches packing off."
    )
    others: Free | None = rest("about packing")


class Dataset(Section):
    """Training data."""

    seq_len: Count | None = field(
        None,
        description=(
            "Number of tokens in a sample; with a pipeline, the length of the tensors between"
            " stages."
        ),
    )
    others: Free | None = rest("about the data")


class Rng(Section):
    """Generator of random numbers, as a class and its arguments."""

    seed: Whole | None = field(None, description="First seed.")
    others: Free | None = rest("about random numbers")


class Dataloader(Section):
    """Loader of the training data, as a class and its arguments."""

    num_workers: Size | None = field(
        None, description=("Number of processes that load data on each rank.")
    )
    others: Free | None = rest("about loading training data")


class Checkpoint(Section):
    """Checkpoints: directory, format, and the checkpoint to start from."""

    enabled: bool | None = field(None, description="Write checkpoints, and resume from them.")
    is_async: bool | None = field(None, description="Write checkpoints while training continues.")
    restore_from: str | None = field(None, description="Checkpoint from which the run continues.")
    others: Free | None = rest("about checkpoints")


class Wandb(Section):
    """Log to Weights & Biases."""

    project: str | None = field(None, description="Project to which logs are sent.")
    entity: str | None = field(None, description="Its user or team.")
    others: Free | None = rest("about that log")


class AutoModel(Section):
    """A recipe, section by section. Settings that the schema does not list are free-form."""

    step_scheduler: StepScheduler = field(StepScheduler(), description="Batches and steps.")
    distributed: Distributed = field(Distributed(), description="Mesh and sharding.")
    autopipeline: AutoPipeline = field(AutoPipeline(), description="Old layout.")
    dist_env: DistEnv = field(DistEnv(), description="Process group.")
    model: Model = field(Model(), description="Model.")
    optimizer: Optimizer = field(Optimizer(), description="Optimizer.")
    lr_scheduler: LrScheduler = field(LrScheduler(), description="Learning rate.")
    clip_grad_norm: ClipGradNorm = field(ClipGradNorm(), description="Clipping.")
    packed_sequence: PackedSequence = field(PackedSequence(), description="Packing.")
    dataset: Dataset = field(Dataset(), description="Training data.")
    recipe: str | Free | None = field(
        None, description="Recipe class that runs the file; kept as text, never loaded."
    )
    seed: Whole | None = field(None, description="Seed for recipes without a random-state section.")
    rng: Rng = field(Rng(), description="Random numbers.")
    loss_fn: Free | str | None = field(
        None, description="Loss class or function, with its arguments."
    )
    dataloader: Dataloader = field(Dataloader(), description="Loading of training data.")
    validation_dataset: Free | None = field(
        None, description="Validation data set, as a class and its arguments."
    )
    validation_dataloader: Free | None = field(None, description="Loading of validation data.")
    checkpoint: Checkpoint = field(Checkpoint(), description="Checkpoints.")
    peft: Peft = field(Peft(), description="Low-rank adapters.")
    fp8: Fp8 = field(Fp8(), description="8-bit products by torchao.")
    compile: Free | None = field(None, description="Settings of torch.compile.")
    autocast: Free | None = field(None, description="torch.autocast of some recipes.")
    benchmark: Free | None = field(None, description="Settings of the benchmark recipe.")
    wandb: Wandb = field(Wandb(), description="Log to Weights & Biases.")
    ci: Free | None = field(
        None, description="Settings with which AutoModel's own tests run the recipe."
    )
    freeze_config: Free | None = field(None, description="Parts of the model that are not trained.")
    processor: Free | None = field(None, description="Image and audio processing.")
    teacher_model: Free | None = field(None, description="Teacher for distillation.")
    teacher_distributed: Free | None = field(None, description="Mesh of the teacher.")
    others: Free | None = field(None, alias=REST, description="All other sections, unchanged.")


SCHEMA = AutoModel
"""The schema under the name that the dialect expects."""
