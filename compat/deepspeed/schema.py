"""Every key of a DeepSpeed config from 0.15.0 to 0.19.8, with type and description. The module
`releases` lists the keys of each release.
"""

# No annotation is a text here: pydantic would compile each of them at every start.
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BeforeValidator, Field as field

from bridge.plan.section import Count, Real, Section, Size, UpToThree, Whole

DTYPES = {
    name: short
    for short, names in {
        "fp32": ("fp32", "float32", "float", "torch.float32"),
        "fp16": ("fp16", "float16", "half", "torch.float16"),
        "bf16": ("bf16", "bfloat16", "torch.bfloat16"),
    }.items()
    for name in names
}
"""Our short name for each of DeepSpeed's spellings of a number format (runtime/config.py,
DtypeEnum).
"""


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


def _upper(value: Any) -> Any:
    return value.upper() if isinstance(value, str) else value


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _scalar(value: Any) -> Any:
    # pydantic would take true for 1.0.
    if value is True or value is False:
        raise ValueError("expected a number, not true or false")
    return value


# 2 to the power of 128 is more than the largest number in fp32.
ScalePower = Annotated[Whole, Ge(0), Le(127)]
Dtype = Annotated[
    Literal["fp32", "fp16", "bf16"],
    BeforeValidator(lambda value: DTYPES.get(value, value) if isinstance(value, str) else value),
]
CommDtype = Annotated[Literal["fp32", "fp16", "bf16"], BeforeValidator(_lower)]
Fraction = Annotated[Real, Ge(0), Le(1)]
NonNegative = Annotated[Real, Ge(0)]
Positive = Annotated[Real, Gt(0)]
Beta = Annotated[Real, Ge(0), Lt(1)]
Betas = Annotated[tuple[Beta, Beta], BeforeValidator(_tuple)]
# DeepSpeed takes one name for a list of one
# (runtime/zero/leaf_module_config.py, _coerce_container_types).
Names = Annotated[
    tuple[str, ...],
    BeforeValidator(lambda value: (value,) if isinstance(value, str) else _tuple(value)),
]
Auto = Literal["auto"]
Rates = Annotated[
    NonNegative | tuple[NonNegative, ...], BeforeValidator(_tuple), BeforeValidator(_scalar)
]
Opaque = dict[str, Any]


class OffloadParam(Section):
    """Offload of parameters to host memory or NVMe while they are not in use (stage 3)."""

    device: Literal["none", "cpu", "nvme"] | None = field(
        None, description="Device that stores parameters between uses."
    )
    nvme_path: str | None = field(None, description="Directory on the NVMe device.")
    buffer_count: Size | None = field(
        None, description="Number of buffers in the pool for transfers to NVMe."
    )
    buffer_size: Size | None = field(
        None, description=("Number of elements in one buffer of the pool for transfers to NVMe.")
    )
    max_in_cpu: Size | None = field(
        None,
        description="Number of elements that stay in host memory when parameters are"
        " offloaded to NVMe.",
    )
    pin_memory: bool | None = field(None, description="Page-locked host memory.")


class OffloadOptimizer(Section):
    """Offload of the optimizer's state and step to host memory or NVMe (stages 1 to 3)."""

    device: Literal["none", "cpu", "nvme"] | None = field(
        None, description="Where optimizer state lives."
    )
    nvme_path: str | None = field(None, description="Directory on the NVMe device.")
    buffer_count: Size | None = field(
        None,
        description="Number of buffers in the pool for transfers to NVMe; each optimizer"
        " state needs one.",
    )
    pin_memory: bool | None = field(None, description="Page-locked host memory.")
    pipeline_read: bool | None = field(
        None, description="Read the next tile while the current one is updated."
    )
    pipeline_write: bool | None = field(
        None, description="Write the previous tile while the current one is updated."
    )
    fast_init: bool | None = field(None, description="Shorter initialisation with NVMe.")
    ratio: Fraction | None = field(
        None, description="Share of the optimizer state on the CPU (stage 3)."
    )
    super_offload: bool | None = field(
        None, description="Offload path for superchips with tightly coupled CPU and GPU (stage 3)."
    )
    cpuadam_cores_perc: Fraction | None = field(
        None, description="Share of the CPU cores that Adam uses with super_offload."
    )


class ZenFlow(Section):
    """ZenFlow: an offloaded optimizer applies important gradients at once and all others later."""

    topk_ratio: Fraction | None = field(
        None, description="Share of gradient columns that count as important."
    )
    select_strategy: Literal["auto", "step", "epoch"] | None = field(
        None, description="Event that triggers a new selection of important gradients."
    )
    select_interval: Whole | Auto | None = field(
        None, description="Number of steps or epochs between two selections of gradients."
    )
    update_interval: Whole | Auto | None = field(
        None, description="Steps between two updates with the unimportant gradients."
    )
    overlap_step: bool | None = field(
        None, description="The optimizer step on the CPU overlaps forward and backward."
    )
    offload: bool | None = field(
        None, description=("The state of the selected gradients is offloaded too.")
    )
    auto_ratio: Fraction | None = field(
        None,
        description="Threshold by which DeepSpeed chooses the interval between updates if"
        ' the interval is "auto".',
    )
    full_warm_up_rounds: Whole | None = field(
        None, description="Number of first rounds in which every gradient is applied."
    )
    pt_reserved_cores_perc: Fraction | None = field(
        None, description="Share of the CPU cores that PyTorch keeps."
    )
    steps_per_epoch: Whole | None = field(
        None, description="Number of steps in an epoch, which the engine sets at run time."
    )


class LeafModule(Section):
    """Modules whose parameters stage 3 gathers all at once."""

    classes: Names | None = field(
        None, description=("Class names of modules whose parameters are gathered all at once.")
    )
    names: Names | None = field(None, description="Names of such modules.")
    name_suffixes: Names | None = field(
        None,
        description="Suffixes of the names of modules whose parameters are gathered all at once.",
    )


class ZeroOptimization(Section):
    """ZeRO: sharding of optimizer state, gradients and parameters over data-parallel ranks."""

    stage: UpToThree | None = field(
        None,
        description=(
            "0: nothing is sharded; 1: optimizer state; 2: also gradients; 3: also parameters."
        ),
    )
    contiguous_gradients: bool | None = field(
        None, description="Gradients are copied into one buffer as they are produced."
    )
    reduce_scatter: bool | None = field(
        None,
        description="Each gradient is reduced only to the rank that updates with it,"
        " instead of to every rank.",
    )
    reduce_bucket_size: Size | None = field(
        None, description="Number of gradient elements that one collective reduces."
    )
    use_multi_rank_bucket_allreduce: bool | None = field(
        None,
        description="Reduce the gradients that belong to different owner ranks in one all-reduce.",
    )
    allgather_partitions: bool | None = field(
        None, description="No effect in any release covered here."
    )
    allgather_bucket_size: Size | None = field(
        None, description="Number of parameter elements that one collective gathers."
    )
    overlap_comm: bool | None = field(
        None, description="Gradient reduction overlaps the backward pass. Default: only at stage 3."
    )
    compute_grad_norm: bool | None = field(
        None,
        description="The optimizer step at ZeRO stages 1 and 2 computes the global gradient norm.",
    )
    load_from_fp32_weights: bool | None = field(
        None, description="Master weights are loaded from the fp32 copies in the checkpoint."
    )
    elastic_checkpoint: bool | None = field(
        None, description="Old format of checkpoints that can be loaded at another world size."
    )
    offload_param: OffloadParam | None = field(None, description="Parameter offload.")
    offload_optimizer: OffloadOptimizer | None = field(None, description="Optimizer offload.")
    zenflow: ZenFlow | None = field(None, description="ZenFlow.")
    sub_group_size: Size | None = field(
        None, description="Number of elements in one tile of the stage 3 optimizer step."
    )
    cpu_offload_param: bool | None = field(
        None, description=("Old switch that offloads parameters to the CPU.")
    )
    cpu_offload_use_pin_memory: bool | None = field(
        None, description="Old switch for pinned memory; no effect."
    )
    cpu_offload: bool | None = field(
        None, description="Old switch that offloads the optimizer to the CPU."
    )
    stage3_prefetch_bucket_size: Size | None = field(
        None, description="Number of elements that are fetched ahead of their use."
    )
    stage3_param_persistence_threshold: Size | None = field(
        None, description="Smaller parameters stay whole."
    )
    stage3_model_persistence_threshold: Size | None = field(
        None,
        description="Largest total number of elements in all parameters that every rank"
        " keeps whole.",
    )
    stage3_max_live_parameters: Size | None = field(
        None, description="Largest number of elements that are whole at the same time."
    )
    stage3_max_reuse_distance: Size | None = field(
        None,
        description=("Parameters that are used again within this number of elements stay whole."),
    )
    stage3_gather_16bit_weights_on_model_save: bool | None = field(
        None, description="Weights are whole in the file that save_16bit_model writes."
    )
    stage3_module_granularity_threshold: Whole | None = field(
        None,
        description="A module is gathered all at once if it has fewer elements for each"
        " submodule than this number.",
    )
    stage3_use_all_reduce_for_fetch_params: bool | None = field(
        None, description="Parameters are gathered by all-reduce instead of all-gather."
    )
    stage3_allgather_sequential: bool | None = field(
        None, description="Parameters are gathered one by one, without buckets."
    )
    stage3_gather_fp16_weights_on_model_save: bool | None = field(
        None, description="Old name of stage3_gather_16bit_weights_on_model_save."
    )
    ignore_unused_parameters: bool | None = field(
        None, description="Parameters without a gradient are not an error."
    )
    legacy_stage1: bool | None = field(None, description="Old implementation of stage 1.")
    round_robin_gradients: bool | None = field(
        None,
        description=(
            "Parameters are assigned to ranks in turn, so that all ranks copy"
            " gradients to the CPU at once."
        ),
    )
    parameter_alignment: bool | None = field(
        None, description="Parameters start at 16-byte boundaries of the flat buffers."
    )
    zero_hpz_partition_size: Size | None = field(
        None, description="Number of ranks in a secondary group; each such group holds all weights."
    )
    zero_quantized_weights: bool | None = field(
        None, description="Weights are gathered in quantized form."
    )
    zero_quantized_nontrainable_weights: bool | None = field(
        None, description="Frozen weights are kept quantized."
    )
    zero_quantized_gradients: bool | None = field(
        None, description="Gradients are reduced in quantized form."
    )
    zeropp_loco_param: Opaque | None = field(
        None, description="Error feedback for quantized gradients."
    )
    memory_efficient_linear: bool | None = field(
        None, description="Linear layers store less for the backward pass (stage 3)."
    )
    pipeline_loading_checkpoint: bool | None = field(
        None, description="Checkpoint files are loaded one after the other."
    )
    override_module_apply: bool | None = field(
        None, description="Module.apply gathers the parameters first (stage 3)."
    )
    log_trace_cache_warnings: bool | None = field(
        None, description="Log a warning when the order of fetches changes."
    )
    enable_sanity_checks: bool | None = field(None, description="Internal checks of the engine.")
    save_muon_momentum_buffer_in_memory: bool | None = field(
        None, description="The momentum of Muon is not swapped to NVMe."
    )
    mics_shard_size: Whole | None = field(
        None, description="Number of ranks in one shard group of MiCS; -1 switches MiCS off."
    )
    mics_hierarchical_params_gather: bool | None = field(
        None, description="Two-level gathering of MiCS."
    )
    leaf_module: LeafModule | None = field(
        None, description="Modules whose parameters are gathered all at once."
    )


class Fp16(Section):
    """fp16 training with loss scaling."""

    enabled: bool | None = field(None, description="Train in fp16.")
    auto_cast: bool | None = field(None, description="Inputs are cast to fp16.")
    loss_scale: NonNegative | None = field(
        None, description=("Constant loss scale; 0 makes it dynamic.")
    )
    initial_scale_power: ScalePower | None = field(
        None, description="Exponent of the first dynamic scale, a power of two."
    )
    loss_scale_window: Size | None = field(
        None, description=("Number of good steps before the scale doubles.")
    )
    hysteresis: Count | None = field(
        None, description=("Number of overflows before the scale halves.")
    )
    consecutive_hysteresis: bool | None = field(
        None, description="A step without overflow resets the count of overflows."
    )
    min_loss_scale: Size | None = field(None, description="Smallest dynamic scale.")
    fp16_master_weights_and_grads: bool | None = field(
        None, description="Master weights and gradients in fp16 (CPU Adam)."
    )


class Bf16(Section):
    """bf16 training."""

    enabled: bool | None = field(None, description="Train in bf16.")
    immediate_grad_update: bool | None = field(
        None, description="Gradients are accumulated as soon as they are produced."
    )
    check_grad_overflow: bool | None = field(
        None, description="A step with inf or NaN gradients is skipped."
    )
    bf16_master_weights_and_grads: bool | None = field(
        None, description="Master weights and gradients in bf16."
    )
    bf16_optimizer_states: bool | None = field(None, description="Optimizer state in bf16 too.")


class TensorParallelGroup(Section):
    """Sizes for models that AutoTP splits."""

    tp_size: Whole | None = field(
        None, description=("Number of ranks over which the model is split.")
    )
    tp_grain_size: Whole | None = field(
        None,
        description="The size of each split part is a multiple of this number; not used in"
        " training.",
    )


class TensorParallel(Section):
    """AutoTP: DeepSpeed splits the linear layers of a model over tensor ranks."""

    autotp_size: Size | None = field(
        None,
        description=("Number of ranks over which each matrix is split; 0 switches AutoTP off."),
    )
    tp_overlap_comm: bool | None = field(None, description="All-reduce overlaps compute.")
    vocab_parallel_lm_head: bool | None = field(
        None,
        description="The output head is split by vocabulary. Default: the model's own setting.",
    )
    vocab_parallel_ce_backend: Literal["torch", "liger"] | None = field(
        None, description="Implementation of the cross entropy for a split output head."
    )
    tp: TensorParallelGroup | None = field(None, description="Sizes for the splitter.")
    injection_policy_tuple: Annotated[tuple[Any, ...], BeforeValidator(_tuple)] | None = field(
        None, description="Names of layers whose output is summed over the tensor ranks."
    )
    partition_config: Opaque | None = field(
        None, description="Rules that say how each parameter is split."
    )
    preset_model: str | None = field(None, description="Built-in rules for a model family.")
    keep_module_on_host: bool | None = field(
        None, description="Weights stay in host memory while loading."
    )
    kernel_inject: bool | None = field(
        None, description="Layers are replaced by kernels for inference."
    )


class CommsLogger(Section):
    """Log of collectives."""

    enabled: bool | None = field(None, description="Log collectives.")
    prof_all: bool | None = field(None, description="Log all kinds.")
    prof_ops: list[Any] | None = field(None, description="Kinds to log.")
    verbose: bool | None = field(None, description="Log each call.")
    debug: bool | None = field(None, description="Show the caller's name in the log.")


class Tensorboard(Section):
    """TensorBoard logs."""

    enabled: bool | None = field(None, description="Write TensorBoard logs.")
    output_path: str | None = field(None, description="Directory of the logs.")
    job_name: str | None = field(None, description="Name of the run.")


class Wandb(Section):
    """Weights and Biases logs."""

    enabled: bool | None = field(None, description="Write Weights and Biases logs.")
    group: str | None = field(None, description="Group of the run.")
    team: str | None = field(None, description="Team of the run.")
    project: str | None = field(None, description="Project of the run.")


class CsvMonitor(Section):
    """CSV logs."""

    enabled: bool | None = field(None, description="Write CSV logs.")
    output_path: str | None = field(None, description="Directory of the logs.")
    job_name: str | None = field(None, description="Name of the run.")


class Comet(Section):
    """Comet logs."""

    enabled: bool | None = field(None, description="Write Comet logs.")
    samples_log_interval: Whole | None = field(None, description="Samples between two entries.")
    project: str | None = field(None, description="Project of the run.")
    workspace: str | None = field(None, description="Workspace of the run.")
    api_key: str | None = field(None, description="Key of the service.")
    experiment_name: str | None = field(None, description="Name of the run.")
    experiment_key: str | None = field(None, description="Key of the run.")
    online: bool | None = field(None, description="Send data at once, or keep it on disk.")
    mode: str | None = field(None, description="Continue a run or start a new one.")


class Compile(Section):
    """DeepCompile."""

    deepcompile: bool | None = field(None, description="Compile with DeepSpeed's own passes.")
    autoep_non_moe: bool | None = field(
        None, description="Compile around expert layers, which stay uncompiled."
    )
    free_activation: bool | None = field(None, description="Large activations are freed early.")
    free_activation_threshold: Whole | None = field(
        None, description="An activation of at least this many bytes counts as large."
    )
    offload_activation: bool | None = field(
        None, description="Saved activations move to host memory."
    )
    offload_activation_pin_memory: bool | None = field(
        None, description="The host memory for saved activations is pinned."
    )
    offload_opt_states: bool | None = field(
        None, description="Optimizer state moves to host memory."
    )
    double_buffer: bool | None = field(None, description="Two communication buffers.")
    symmetric_memory: bool | None = field(None, description="Symmetric memory for collectives.")
    debug_log: bool | None = field(None, description="Graphs are dumped.")
    offload_parameters: bool | None = field(None, description="Parameters move to host memory.")
    sync_before_reduce: bool | None = field(None, description="Synchronise before reductions.")
    sync_after_reduce: bool | None = field(None, description="Synchronise after reductions.")
    sync_before_allgather: bool | None = field(None, description="Synchronise before gathers.")
    sync_after_allgather: bool | None = field(None, description="Synchronise after gathers.")
    keep_int_input_tensors: bool | None = field(
        None, description="Keep the values of integer inputs for profiling."
    )
    keep_all_input_tensors: bool | None = field(
        None, description="Keep the values of all inputs for profiling."
    )
    passes: list[Literal["z1", "z3", "autosp", "autotp"]] | None = field(
        None, description="Passes to combine."
    )


class HybridEngine(Section):
    """Hybrid engine: training and text generation in one engine."""

    enabled: bool | None = field(None, description="Use the hybrid engine.")
    max_out_tokens: Whole | None = field(
        None, description=("Largest number of tokens that generation may produce.")
    )
    inference_tp_size: Whole | None = field(
        None, description="Number of ranks over which the model is split for generation."
    )
    release_inference_cache: bool | None = field(
        None, description="Free the cache after each generation."
    )
    pin_parameters: bool | None = field(
        None, description="Parameters stay gathered during generation."
    )
    tp_gather_partition_size: Whole | None = field(None, description="Layers gathered at once.")
    enable_cuda_graph: bool | None = field(None, description="Generation through CUDA graphs.")


class Throughput(Section):
    """Throughput timer."""

    enabled: bool | None = field(None, description="Measure throughput.")
    synchronized: bool | None = field(
        None, description=("Synchronise the device before times are measured.")
    )


class Timers(Section):
    """Timers."""

    throughput: Throughput | None = field(None, description="Throughput timer.")


class WeightQuantization(Section):
    """Quantized weights for inference."""

    enabled: bool | None = field(
        None, description="Weights are quantized according to the other keys of the section."
    )
    num_bits: Whole | None = field(None, description="Bits of a weight.")
    q_type: Literal["symmetric", "asymmetric"] | None = field(
        None, description="Kind of quantization."
    )
    q_groups: Whole | None = field(
        None, description="Number of groups of weights that have separate scales."
    )
    quantized_initialization: Opaque | None = field(
        None, description="Quantization while the model is built."
    )
    post_init_quant: Opaque | None = field(
        None, description="Quantization of the named layers after loading."
    )


class OptimizerParams(Section):
    """Arguments of the optimizer. `OPTIMIZERS` lists the arguments of each type."""

    lr: NonNegative | None = field(
        None, description="Peak learning rate, unless a scheduler sets it."
    )
    betas: Betas | None = field(None, description="Decay rates of the two moments.")
    eps: NonNegative | None = field(
        None, description="Term added to the square root of the second moment."
    )
    weight_decay: NonNegative | None = field(
        None, description="Weight decay; the optimizer's type decides how the decay is applied."
    )
    momentum: NonNegative | None = field(None, description="Momentum (SGD, Muon).")
    dampening: Real | None = field(None, description="Dampening of the momentum (SGD).")
    nesterov: bool | None = field(None, description="Nesterov momentum (SGD).")
    bias_correction: bool | None = field(None, description="Bias correction of the moments.")
    adam_w_mode: bool | None = field(
        None, description="Decoupled weight decay; the default is true even for type Adam."
    )
    torch_adam: bool | None = field(None, description="PyTorch's Adam instead of a fused one.")
    foreach: bool | None = field(None, description="PyTorch's multi-tensor path.")
    fp32_optimizer_states: bool | None = field(
        None, description="The CPU optimizer keeps its state in fp32."
    )
    amsgrad: bool | None = field(None, description="Use the largest second moment so far.")
    set_grad_none: bool | None = field(
        None, description="Gradients are set to None rather than zeroed."
    )
    lr_decay: NonNegative | None = field(None, description="Decay of the learning rate (Adagrad).")
    initial_accumulator_value: NonNegative | None = field(
        None, description="Initial value of the squared sums (Adagrad)."
    )
    maximize: bool | None = field(None, description="Ascend instead of descend.")
    differentiable: bool | None = field(None, description="Autograd through the step.")
    capturable: bool | None = field(None, description="The step can be captured in a CUDA graph.")
    fused: bool | None = field(None, description="PyTorch's fused path.")
    max_grad_norm: NonNegative | None = field(
        None, description="Not supported in DeepSpeed: use gradient_clipping."
    )
    max_coeff: NonNegative | None = field(None, description="Largest trust ratio (LAMB).")
    min_coeff: NonNegative | None = field(None, description="Smallest trust ratio (LAMB).")
    eps_inside_sqrt: bool | None = field(None, description="eps is added inside the square root.")
    muon_lr: NonNegative | None = field(None, description="Learning rate of matrices under Muon.")
    adam_lr: NonNegative | None = field(
        None, description="Learning rate of all other parameters under Muon."
    )
    ns_method: Literal["gram", "standard"] | None = field(
        None, description="Newton-Schulz iteration of Muon."
    )
    freeze_step: Whole | None = field(None, description="Uncompressed steps (1-bit optimizers).")
    cuda_aware: bool | None = field(
        None, description="The MPI library can send device memory (1-bit optimizers)."
    )
    comm_backend_name: Literal["nccl", "mpi", "hccl"] | None = field(
        None, description="Backend of 1-bit optimizers."
    )
    coeff_beta: Beta | None = field(
        None, description=("Decay rate of the average trust ratio (1-bit LAMB).")
    )
    factor_max: NonNegative | None = field(
        None,
        description="Upper bound on the factor that scales the frozen trust ratio (1-bit LAMB).",
    )
    factor_min: NonNegative | None = field(
        None,
        description="Lower bound on the factor that scales the frozen trust ratio (1-bit LAMB).",
    )
    factor_threshold: NonNegative | None = field(
        None,
        description=(
            "Largest change, from one step to the next, of the factor that scales the frozen trust"
            " ratio (1-bit LAMB)."
        ),
    )
    var_freeze_step: Whole | None = field(
        None, description="Steps before the second moment is frozen (0/1 Adam)."
    )
    var_update_scaler: Whole | None = field(
        None,
        description="Number of updates of the second moment after which the interval"
        " between these updates grows (0/1 Adam).",
    )
    local_step_scaler: Whole | None = field(
        None,
        description="Number of steps after which the interval between communications grows"
        " (0/1 Adam).",
    )
    local_step_clipper: Whole | None = field(
        None, description="Largest number of steps between communications (0/1 Adam)."
    )


class Optimizer(Section):
    """The optimizer that DeepSpeed builds."""

    type: str | None = field(
        None,
        description=(
            "Name of DeepSpeed's own optimizer (in any case) or of a class of torch.optim."
        ),
    )
    params: OptimizerParams | None = field(None, description="Its arguments.")
    legacy_fusion: bool | None = field(
        None, description="Old switch for fused parameters in the fp16 wrapper."
    )


class SchedulerParams(Section):
    """Arguments of the learning-rate scheduler. `SCHEDULERS` lists the arguments of each type."""

    warmup_min_lr: Rates | None = field(None, description="Learning rate at the start of warmup.")
    warmup_max_lr: Rates | None = field(
        None, description="Learning rate after warmup. Default: the optimizer's learning rate."
    )
    warmup_num_steps: Size | None = field(None, description="Steps of warmup.")
    warmup_type: Literal["log", "linear"] | None = field(None, description="Shape of warmup.")
    total_num_steps: Count | None = field(None, description="Step at which the decay ends.")
    warmup_min_ratio: Fraction | None = field(
        None, description="Learning rate at the start of warmup, as a share of the peak."
    )
    cos_min_ratio: Fraction | None = field(
        None, description="Learning rate at the end of the decay, as a share of the peak."
    )
    lr_range_test_min_lr: Rates | None = field(
        None, description="Learning rate at the start of the range test."
    )
    lr_range_test_step_size: Count | None = field(None, description="Steps between increases.")
    lr_range_test_step_rate: NonNegative | None = field(None, description="Size of an increase.")
    lr_range_test_staircase: bool | None = field(
        None, description="The learning rate rises in steps instead of continuously."
    )
    cycle_min_lr: Rates | None = field(None, description="Lower learning rate of the cycle.")
    cycle_max_lr: Rates | None = field(None, description="Upper learning rate of the cycle.")
    decay_lr_rate: NonNegative | None = field(None, description="Decay after the cycle.")
    cycle_first_step_size: Count | None = field(
        None, description=("Number of steps in the rising half of the cycle.")
    )
    cycle_second_step_size: Count | None = field(
        None, description="Number of steps in the falling half. Default: as in the rising half."
    )
    cycle_first_stair_count: Size | None = field(
        None, description=("Number of stairs in the rising half.")
    )
    cycle_second_stair_count: Size | None = field(
        None, description=("Number of stairs in the falling half.")
    )
    decay_step_size: Size | None = field(None, description="Steps between decays.")
    cycle_momentum: bool | None = field(
        None, description="Momentum falls while the learning rate rises, and the reverse."
    )
    cycle_min_mom: NonNegative | None = field(None, description="Lower momentum of the cycle.")
    cycle_max_mom: NonNegative | None = field(None, description="Upper momentum of the cycle.")
    decay_mom_rate: NonNegative | None = field(
        None, description="Decay of the momentum after the cycle."
    )
    last_batch_iteration: Whole | None = field(
        None, description="Step from which to continue; -1 starts from the beginning."
    )


class Scheduler(Section):
    """The learning-rate scheduler that DeepSpeed builds."""

    type: str | None = field(
        None,
        description=(
            "Name of DeepSpeed's own scheduler or of a class of torch.optim.lr_scheduler."
        ),
    )
    params: SchedulerParams | None = field(None, description="Its arguments.")


class ActivationCheckpointing(Section):
    """Settings of deepspeed.checkpointing, which take effect only if the model's code calls
    deepspeed.checkpointing.
    """

    partition_activations: bool | None = field(
        None, description="Saved activations are split over the tensor group."
    )
    number_checkpoints: Count | None = field(
        None,
        description=(
            "Number of checkpoints in the model, which sets the size of the contiguous buffer."
        ),
    )
    contiguous_memory_optimization: bool | None = field(
        None, description="Saved activations share one buffer."
    )
    synchronize_checkpoint_boundary: bool | None = field(
        None, description="Synchronise at each checkpoint."
    )
    profile: bool | None = field(None, description="Time each checkpoint.")
    cpu_checkpointing: bool | None = field(
        None, description="Saved activations move to host memory."
    )


class Pipeline(Section):
    """Settings of the pipeline engine."""

    stages: Whole | str | None = field(
        None, description="No effect: use PipelineModule(num_stages=)."
    )
    partition: str | None = field(
        None, description="No effect: use PipelineModule(partition_method=)."
    )
    seed_layers: bool | None = field(
        None, description="No effect: use PipelineModule(seed_layers=)."
    )
    activation_checkpoint_interval: Size | None = field(
        None,
        description=(
            "Number of layers between activation checkpoints; 0 leaves the choice to"
            " PipelineModule."
        ),
    )
    pipe_partitioned: bool | None = field(
        None, description="Activations sent between stages are split over the tensor group."
    )
    grad_partitioned: bool | None = field(
        None, description="Gradients sent between stages are split over the tensor group."
    )
    use_reentrant: bool | None = field(
        None, description="Use the reentrant form of torch's activation checkpointing."
    )


class ParallelWrite(Section):
    """Distribution of the work of writing a checkpoint over ranks."""

    pipeline_stage: bool | None = field(
        None, description="The data ranks of a pipeline stage share the work of writing."
    )


class Writer(Section):
    """Writer of checkpoints."""

    type: Annotated[Literal["MOCK", "PYTHON", "FAST"], BeforeValidator(_upper)] | None = field(
        None, description="Implementation that writes checkpoints."
    )
    io_buffer_size: Whole | None = field(None, description="Bytes in the buffer.")
    io_buffer_double: bool | None = field(
        None, description="Use two buffers, so that one fills while the other is written."
    )
    show_statistics: bool | None = field(None, description="Statistics of the writer are printed.")
    data_parallel: (
        Annotated[Literal["REPLICA", "SOCKET", "MACHINE"], BeforeValidator(_upper)] | None
    ) = field(None, description="Ranks that share the work of writing.")
    decoupled: bool | None = field(None, description="Write in another process.")
    io_multiplier: Whole | None = field(None, description="Writers for each rank.")


class Checkpoint(Section):
    """Checkpoints."""

    tag_validation: Annotated[Literal["WARN", "IGNORE", "FAIL"], BeforeValidator(_upper)] | None = (
        field(None, description="Reaction to ranks that save under different tags.")
    )
    load_universal: bool | None = field(None, description="Load a universal checkpoint.")
    use_node_local_storage: bool | None = field(
        None, description="Each node writes to its own disk."
    )
    parallel_write: ParallelWrite | None = field(None, description="Ranks that write.")
    checkpoint_serialization: bool | None = field(None, description="Serialise as torch.save does.")
    writer: Writer | None = field(None, description="Writer.")


class DataTypes(Section):
    """Number formats in addition to the training precision."""

    grad_accum_dtype: Dtype | None = field(
        None, description="Format in which gradients accumulate. Default: the model's format."
    )
    param_dtype: Dtype | None = field(
        None, description="Format of the parameters, which must be the training precision."
    )
    buffer_dtype: Dtype | None = field(
        None, description=("Format of the buffers. Default: the format in which they are loaded.")
    )
    keep_in_fp32_modules: Auto | Annotated[tuple[str, ...], BeforeValidator(_tuple)] | None = field(
        None, description='Buffers kept in fp32; "auto" leaves the choice to the model.'
    )


class TorchAutocast(Section):
    """torch.autocast around the model."""

    enabled: bool | None = field(None, description="Run under autocast.")
    dtype: Dtype | None = field(None, description="Format of autocast.")
    lower_precision_safe_modules: Annotated[tuple[str, ...], BeforeValidator(_tuple)] | None = (
        field(
            None,
            description=("Modules whose parameters are communicated in the format of autocast."),
        )
    )


class FlopsProfiler(Section):
    """Profile of floating-point operations."""

    enabled: bool | None = field(None, description="Profile; turns wall_clock_breakdown on.")
    recompute_fwd_factor: NonNegative | None = field(
        None, description="Share of the forward pass that is recomputed."
    )
    profile_step: Whole | None = field(None, description="Step to profile.")
    module_depth: Whole | None = field(
        None, description=("Depth of modules in the report; -1 lists modules at every depth.")
    )
    top_modules: Whole | None = field(None, description="Number of modules listed at each depth.")
    detailed: bool | None = field(None, description="Print the whole tree.")
    output_file: str | None = field(None, description="File for the report.")


class Aio(Section):
    """Asynchronous file access for NVMe offload."""

    block_size: Count | None = field(None, description="Bytes in one request.")
    queue_depth: Count | None = field(None, description="Requests in flight.")
    thread_count: Count | None = field(None, description="Old name of intra_op_parallelism.")
    intra_op_parallelism: Count | None = field(None, description="Threads for one operation.")
    single_submit: bool | None = field(
        None, description=("Submit requests one by one, not in batches.")
    )
    overlap_events: bool | None = field(
        None, description=("Submit requests while waiting for completions.")
    )
    use_gds: bool | None = field(None, description="GPUDirect storage; needs CUDA.")


class Autotuning(Section):
    """Autotuning: the launcher searches for the best batch size and ZeRO settings."""

    enabled: bool | None = field(None, description="Tune before training.")
    fast: bool | None = field(None, description="Tune only the micro batch and the stage.")
    results_dir: Annotated[str, field(min_length=1)] | None = field(
        None, description="Directory of results."
    )
    exps_dir: Annotated[str, field(min_length=1)] | None = field(
        None, description="Directory of experiments."
    )
    overwrite: bool | None = field(None, description="Overwrite earlier results.")
    start_profile_step: Whole | None = field(None, description="First step of the timed range.")
    end_profile_step: Whole | None = field(None, description="Last step of the timed range.")
    metric: str | None = field(None, description="Quantity to maximise.")
    metric_path: str | None = field(None, description="File for the metric.")
    tuner_type: str | None = field(
        None, description="Method of the search: through a grid, at random, or guided by a model."
    )
    tuner_early_stopping: Whole | None = field(
        None, description="Number of experiments without a gain after which the search ends."
    )
    tuner_num_trials: Whole | None = field(None, description="Experiments at most.")
    arg_mappings: Opaque | None = field(
        None, description="Config keys, each with the script argument that sets it."
    )
    model_info: Opaque | None = field(None, description="Facts about the model.")
    model_info_path: str | None = field(None, description="File for facts about the model.")
    mp_size: Count | None = field(
        None, description="Number of model-parallel ranks in the tuned runs."
    )
    max_train_batch_size: Count | None = field(None, description="Largest batch to try.")
    min_train_batch_size: Count | None = field(None, description="Smallest batch to try.")
    max_train_micro_batch_size_per_gpu: Count | None = field(
        None, description="Largest micro batch to try."
    )
    min_train_micro_batch_size_per_gpu: Count | None = field(
        None, description="Smallest micro batch to try."
    )
    num_tuning_micro_batch_sizes: Count | None = field(None, description="Micro batches to try.")


class DataSampling(Section):
    """Curriculum and dynamic batches."""

    enabled: bool | None = field(None, description="Use the sampler.")
    num_epochs: Count | None = field(
        None, description=("Number of epochs that the sampler prepares.")
    )
    num_workers: Size | None = field(None, description="Loader processes.")
    pin_memory: bool | None = field(None, description="Batches in pinned memory.")
    curriculum_learning: Opaque | None = field(
        None, description="Curriculum learning, with metrics and difficulties."
    )
    dynamic_batching: Opaque | None = field(None, description="Batches of varying size.")


class DataRouting(Section):
    """Token dropping."""

    enabled: bool | None = field(None, description="Use token dropping.")
    random_ltd: Opaque | None = field(None, description="Random layerwise token dropping.")


class DataEfficiency(Section):
    """Data efficiency library."""

    enabled: bool | None = field(None, description="Use the library.")
    seed: Whole | None = field(None, description="Seed of the sampler.")
    data_sampling: DataSampling | None = field(None, description="Sampling.")
    data_routing: DataRouting | None = field(None, description="Routing.")


class ExpertParallel(Section):
    """AutoEP: DeepSpeed splits the experts of a model over ranks."""

    enabled: bool | None = field(None, description="Split the experts over ranks.")
    autoep_size: Count | None = field(
        None, description=("Number of ranks over which the experts are split.")
    )
    expert_tensor_parallel_size: Count | None = field(
        None, description="Number of ranks over which each expert's matrices are split."
    )
    validate_folding_routing: bool | None = field(
        None, description="Check that tensor ranks route tokens alike."
    )
    async_split_plan: bool | None = field(
        None, description="Split sizes are copied asynchronously."
    )
    preset_model: str | None = field(None, description="Built-in rules for a model family.")
    moe_layer_pattern: str | None = field(None, description="Names of expert layers.")
    expert_pattern: str | None = field(None, description="Names of the experts in a layer.")
    router_pattern: str | None = field(None, description="Names of the routers in a layer.")
    use_grouped_mm: bool | None = field(
        None, description=("Use one grouped matrix product for all experts.")
    )
    disable_triton_grouped_mm: bool | None = field(
        None, description="Grouped products without Triton."
    )
    route_norm: bool | None = field(
        None, description=("Normalize the routing weights of a token to a sum of one.")
    )
    route_scale: Real | None = field(
        None, description=("Factor by which routing weights are multiplied.")
    )
    score_apply: Literal["auto", "pre", "post"] | None = field(
        None, description="Apply routing weights before or after the experts."
    )
    combine_impl: Literal["auto", "weighted_sum", "fused_weighted_sum", "legacy_bmm"] | None = (
        field(None, description="Way in which expert outputs are summed.")
    )
    row_weighting_impl: Literal["auto", "eager", "fused"] | None = field(
        None, description="How rows are weighted."
    )
    gate_up_impl: Literal["separate", "fused"] | None = field(
        None, description="Compute the gate and up projections in one matrix product."
    )
    comm_backend: Literal["comm", "deepep"] | None = field(
        None, description="Library for the exchange of tokens."
    )
    comm_num_sm: Count | None = field(None, description="Multiprocessors for the exchange.")
    comm_qp_margin: Size | None = field(
        None, description=("Number of spare queue pairs for the exchange.")
    )
    comm_max_tokens_per_rank: Size | None = field(
        None, description="Largest number of tokens that one rank may route."
    )
    num_expert_groups: Count | None = field(
        None, description=("Number of groups of experts for routing.")
    )
    num_limited_groups: Count | None = field(
        None, description=("Largest number of groups that a token may reach.")
    )
    score_func: Literal["auto", "softmax", "sigmoid"] | None = field(
        None, description="Function of the router."
    )
    top_k: Count | Auto | None = field(None, description="Experts for each token.")
    load_balance_coeff: Real | None = field(
        None, description="Not supported by DeepSpeed: only null is allowed."
    )
    routed_scaling_factor: Real | Auto | None = field(
        None, description="Factor by which the routed output is multiplied."
    )
    expert_w1: str | None = field(None, description="Name of the gate projection's weights.")
    expert_w2: str | None = field(None, description="Name of the down projection's weights.")
    expert_w3: str | None = field(
        None,
        description=("Name of the up projection's weights; null if they are fused with the gate."),
    )
    num_experts_attr: str | None = field(
        None, description="Attribute of the model's config with the number of experts."
    )
    top_k_attr: str | None = field(
        None,
        description=("Attribute of the model's config with the number of experts for each token."),
    )
    has_shared_experts: bool | None = field(None, description="Layers have shared experts.")
    shared_experts_pattern: str | None = field(None, description="Names of shared experts.")
    shared_experts_gate_pattern: str | None = field(None, description="Names of their gates.")
    expert_activation: str | None = field(
        None, description="Activation function of the experts. Default: the function of the preset."
    )


class CodeScheduler(Section):
    """A learning-rate schedule that the script builds itself, in optimizer steps."""

    name: Literal["constant", "linear", "cosine", "inverse_sqrt", "wsd", "other"] | None = field(
        None,
        description=(
            'Shape of the schedule after warmup; "other" stands for a shape that stagebridge cannot'
            " translate."
        ),
    )
    warmup_steps: Size | None = field(None, description="Steps of linear warmup.")
    warmup_from: NonNegative | None = field(
        None, description="Learning rate at the first step of warmup."
    )
    total_steps: Count | None = field(
        None, description="Step at which the decay ends, warmup included."
    )
    minimum: NonNegative | None = field(None, description="Learning rate after the decay.")
    decay_steps: Size | None = field(
        None,
        description=(
            "Number of steps in the decay of wsd, at the end of the schedule. Default: a tenth of"
            " the schedule."
        ),
    )
    decay_shape: Literal["linear", "cosine", "exponential", "minus_sqrt"] | None = field(
        None, description="Shape of the decay of wsd. Default: linear."
    )


class CodeTrainer(Section):
    """Arguments of Hugging Face's Trainer that its steps depend on and that no DeepSpeed file has."""

    label_smoothing_factor: NonNegative | None = field(
        None, description="Share of each target that the loss spreads over all classes."
    )
    neftune_noise_alpha: Real | None = field(
        None, description="Factor of the noise that is added to embeddings in training."
    )
    optim_args: str | None = field(None, description="Further arguments of the optimizer.")
    optim_target_modules: str | list[str] | None = field(
        None, description="Modules that GaLore and APOLLO train in a space of lower rank."
    )
    data_seed: Whole | None = field(None, description="Seed of the order of samples.")
    group_by_length: bool | None = field(
        None, description="Batches have samples of about one length."
    )
    train_sampling_strategy: str | None = field(
        None, description="Order of samples: random, sequential, or group_by_length."
    )
    average_tokens_across_devices: bool | None = field(
        None, description="The loss is averaged over the tokens of all ranks, not of each."
    )
    gradient_checkpointing: bool | None = field(
        None, description="The model recomputes the activations of each layer."
    )
    torch_compile: bool | None = field(None, description="The model is compiled.")
    tf32: bool | None = field(None, description="Products of fp32 matrices are computed in TF32.")
    use_liger_kernel: bool | None = field(None, description="Layers use Liger's kernels.")


class Code(Section):
    """Settings that belong to the training script, not to DeepSpeed's file."""

    pipeline_stages: Count | None = field(
        None,
        description=("PipelineModule(num_stages=): number of ranks over which layers are split."),
    )
    partition_method: str | None = field(
        None,
        description="PipelineModule(partition_method=): way in which layers are divided into stages.",
    )
    tensor_parallel: Count | None = field(
        None,
        description=("Number of ranks in the mpu's model-parallel group (Megatron-style layers)."),
    )
    context_parallel: Count | None = field(
        None,
        description=("Number of ranks in the mpu's sequence-parallel group (Ulysses attention)."),
    )
    expert_parallel: Count | None = field(
        None, description="MoE(ep_size=): number of ranks over which experts are split."
    )
    checkpointing: bool | None = field(
        None, description="The model calls deepspeed.checkpointing.checkpoint."
    )
    checkpoint_interval: Count | None = field(None, description="Layers between those calls.")
    manual_accumulation: bool | None = field(
        None, description="The script calls backward several times before each step."
    )
    scheduler: CodeScheduler | None = field(
        None, description="Learning-rate schedule that the script builds."
    )
    decay_scope: Literal["all", "matrices"] | None = field(
        None,
        description=(
            "Parameters with weight decay in the script's groups: all, or all except biases and"
            " norms."
        ),
    )
    parameter_groups: str | None = field(
        None,
        description="File with names and settings of the parameter groups that the script builds.",
    )
    steps: Count | None = field(
        None, description=("Number of optimizer steps that the script makes.")
    )
    epochs: Positive | None = field(
        None, description=("Number of passes over the data that the script makes.")
    )
    seed: Whole | None = field(None, description="Seed that the script sets.")
    loss: Literal["mean_of_microbatches", "per_token"] | None = field(
        None,
        description=(
            "How the script averages the losses of a step: over micro batches, or over all tokens, as"
            " Hugging Face's Trainer does."
        ),
    )
    trainer: CodeTrainer | None = field(
        None, description="Arguments of Hugging Face's Trainer that no plan holds."
    )
    accelerator: (
        Literal["cuda", "cpu", "xpu", "npu", "hpu", "mps", "mlu", "sdaa", "supa"] | None
    ) = field(None, description="Accelerator of the run, as in DS_ACCELERATOR.")


class DeepSpeed(Section):
    """A DeepSpeed config. A key that is not set has the release's default."""

    train_batch_size: Count | None = field(
        None, description=("Number of samples in one step over all ranks.")
    )
    train_micro_batch_size_per_gpu: Count | None = field(
        None, description="Number of samples in one micro batch on one rank."
    )
    gradient_accumulation_steps: Count | None = field(
        None, description="Number of micro batches in one step."
    )
    managed_gradient_accumulation: bool | None = field(
        None,
        description=("The engine, and not the script, determines the last micro batch of a step."),
    )
    steps_per_print: Count | None = field(
        None, description=("Number of steps between two lines of progress.")
    )
    optimizer: Optimizer | None = field(None, description="Optimizer.")
    scheduler: Scheduler | None = field(None, description="Learning-rate scheduler.")
    gradient_clipping: NonNegative | None = field(
        None, description="Bound on the global gradient norm; 0 switches clipping off."
    )
    fp16: Fp16 | None = field(None, description="fp16 training.")
    bf16: Bf16 | None = field(None, description="bf16 training.")
    bfloat16: Bf16 | None = field(None, description="Old name of bf16.")
    amp: Opaque | None = field(None, description="Apex mixed precision.")
    torch_autocast: TorchAutocast | None = field(None, description="torch.autocast.")
    data_types: DataTypes | None = field(None, description="Number formats.")
    communication_data_type: CommDtype | None = field(
        None, description="Format in which gradients are reduced."
    )
    seq_parallel_communication_data_type: CommDtype | None = field(
        None, description="Format of reductions over sequence-parallel ranks."
    )
    seq_parallel_comm_data_type: CommDtype | None = field(
        None, description="Old name of seq_parallel_communication_data_type, before 0.16.5."
    )
    prescale_gradients: bool | None = field(
        None, description="Gradients are divided before the reduction."
    )
    gradient_predivide_factor: Positive | None = field(
        None,
        description=(
            "Number by which gradients are divided before the reduction; the"
            " rest of the division comes after the reduction."
        ),
    )
    gradient_allreduce_op: Annotated[Literal["mean", "sum"], BeforeValidator(_lower)] | None = (
        field(
            None,
            description="How data-parallel ranks combine gradients: by their mean or by their sum.",
        )
    )
    sparse_gradients: bool | None = field(
        None, description="Embedding gradients are reduced sparsely."
    )
    zero_optimization: ZeroOptimization | None = field(None, description="ZeRO.")
    zero_allow_untested_optimizer: bool | None = field(
        None, description="Allow ZeRO with an optimizer that it was not tested with."
    )
    zero_force_ds_cpu_optimizer: bool | None = field(
        None, description="Allow offload only with DeepSpeed's CPU optimizers."
    )
    sequence_parallel_size: Count | None = field(
        None, description="Number of ranks over which each sequence is split (Ulysses)."
    )
    data_parallel_size: Count | None = field(
        None, description="Number of data-parallel ranks in the mesh with sequence_parallel_size."
    )
    tensor_parallel: TensorParallel | None = field(None, description="AutoTP.")
    expert_parallel: ExpertParallel | None = field(None, description="AutoEP.")
    use_data_before_expert_parallelism: bool | None = field(
        None, description="Order of the data and expert ranks."
    )
    pipeline: Pipeline | None = field(None, description="Pipeline engine.")
    activation_checkpointing: ActivationCheckpointing | None = field(
        None, description="Activation checkpointing."
    )
    compile: Compile | None = field(None, description="DeepCompile.")
    hybrid_engine: HybridEngine | None = field(None, description="Hybrid engine.")
    disable_allgather: bool | None = field(
        None, description="No effect in any release covered here."
    )
    fp32_allreduce: bool | None = field(None, description="Key of releases before 0.6; no effect.")
    graph_harvesting: bool | None = field(None, description="Capture the step in a CUDA graph.")
    dataloader_drop_last: bool | None = field(None, description="Drop the last, incomplete batch.")
    vocabulary_size: Size | None = field(
        None, description="No effect, except a check that the value is a multiple of 8."
    )
    dump_state: bool | None = field(None, description="Print the engine's state.")
    disable_python_gc: bool | None = field(
        None, description=("Switch Python's garbage collector off.")
    )
    log_level: str | None = field(None, description="Level of DeepSpeed's log.")
    wall_clock_breakdown: bool | None = field(
        None, description="Log the times of forward, backward and step."
    )
    memory_breakdown: bool | None = field(
        None, description="Log the memory after forward, backward and step."
    )
    flops_profiler: FlopsProfiler | None = field(
        None, description="Profile of floating-point operations."
    )
    comms_logger: CommsLogger | None = field(None, description="Log of collectives.")
    tensorboard: Tensorboard | None = field(None, description="TensorBoard.")
    wandb: Wandb | None = field(None, description="Weights and Biases.")
    csv_monitor: CsvMonitor | None = field(None, description="CSV logs.")
    comet: Comet | None = field(None, description="Comet.")
    timers: Timers | None = field(None, description="Timers.")
    checkpoint: Checkpoint | None = field(None, description="Checkpoints.")
    datastates_ckpt: Opaque | bool | None = field(
        None, description="Checkpoint engine DataStates; any value but false switches it on."
    )
    nebula: Opaque | None = field(None, description="Nebula checkpoint service.")
    aio: Aio | None = field(None, description="Asynchronous file access.")
    autotuning: Autotuning | None = field(None, description="Autotuning.")
    elasticity: Opaque | None = field(
        None, description="Elastic training, with batch sizes that fit several numbers of ranks."
    )
    data_efficiency: DataEfficiency | None = field(None, description="Data efficiency library.")
    curriculum_learning: Opaque | None = field(None, description="Old form of curriculum learning.")
    progressive_layer_drop: Opaque | None = field(
        None, description="Drop layers with a rising probability."
    )
    eigenvalue: Opaque | None = field(None, description="Eigenvalues for mixed quantization.")
    quantize_training: Opaque | None = field(
        None, description="Mixed quantization during training."
    )
    compression_training: Opaque | None = field(
        None,
        description="Settings of the compression library: quantization, pruning, fewer layers.",
    )
    sparse_attention: Opaque | None = field(
        None, description="Layout of the blocks in sparse attention."
    )
    weight_quantization: WeightQuantization | None = field(None, description="Quantized weights.")
    code: Code | None = field(None, description="Settings of the training script.")


SCHEMA = DeepSpeed
"""The schema under the name that every dialect's module has for it."""
