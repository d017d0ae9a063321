# Made of schema.json by `python docs/generate`.
from typing import Any, Literal

from pydantic import Field as field

from bridge.plan.section import Count, Real, Section, Size, UpToThree, Whole
from compat.deepspeed.setting_types import Auto, Beta, Betas, CommDtype, Dtype, Fraction, Items, Names, NonEmpty, NonNegative, Opaque, Passes, Positive, Rates, Reduction, ScalePower, Strings, TagValidation, Texts, Tuple, WriterType, WritersPer

unset: Any

class OffloadParam(Section):
    device: Literal['none'] | Literal['cpu'] | Literal['nvme'] | None = None
    nvme_path: str | None = None
    buffer_count: Size | None = None
    buffer_size: Size | None = None
    max_in_cpu: Size | None = None
    pin_memory: bool | None = None

class OffloadOptimizer(Section):
    device: Literal['none'] | Literal['cpu'] | Literal['nvme'] | None = None
    nvme_path: str | None = None
    buffer_count: Size | None = None
    pin_memory: bool | None = None
    pipeline_read: bool | None = None
    pipeline_write: bool | None = None
    fast_init: bool | None = None
    ratio: Fraction | None = None
    super_offload: bool | None = None
    cpuadam_cores_perc: Fraction | None = None

class ZenFlow(Section):
    topk_ratio: Fraction | None = None
    select_strategy: Literal['auto'] | Literal['step'] | Literal['epoch'] | None = None
    select_interval: Whole | Auto | None = None
    update_interval: Whole | Auto | None = None
    overlap_step: bool | None = None
    offload: bool | None = None
    auto_ratio: Fraction | None = None
    full_warm_up_rounds: Whole | None = None
    pt_reserved_cores_perc: Fraction | None = None
    steps_per_epoch: Whole | None = None

class LeafModule(Section):
    classes: Names | None = None
    names: Names | None = None
    name_suffixes: Names | None = None

class ZeroOptimization(Section):
    stage: UpToThree | None = None
    contiguous_gradients: bool | None = None
    reduce_scatter: bool | None = None
    reduce_bucket_size: Size | None = None
    use_multi_rank_bucket_allreduce: bool | None = None
    allgather_partitions: bool | None = None
    allgather_bucket_size: Size | None = None
    overlap_comm: bool | None = None
    compute_grad_norm: bool | None = None
    load_from_fp32_weights: bool | None = None
    elastic_checkpoint: bool | None = None
    offload_param: OffloadParam | None = None
    offload_optimizer: OffloadOptimizer | None = None
    zenflow: ZenFlow | None = None
    sub_group_size: Size | None = None
    cpu_offload_param: bool | None = None
    cpu_offload_use_pin_memory: bool | None = None
    cpu_offload: bool | None = None
    stage3_prefetch_bucket_size: Size | None = None
    stage3_param_persistence_threshold: Size | None = None
    stage3_model_persistence_threshold: Size | None = None
    stage3_max_live_parameters: Size | None = None
    stage3_max_reuse_distance: Size | None = None
    stage3_gather_16bit_weights_on_model_save: bool | None = None
    stage3_module_granularity_threshold: Whole | None = None
    stage3_use_all_reduce_for_fetch_params: bool | None = None
    stage3_allgather_sequential: bool | None = None
    stage3_gather_fp16_weights_on_model_save: bool | None = None
    ignore_unused_parameters: bool | None = None
    legacy_stage1: bool | None = None
    round_robin_gradients: bool | None = None
    parameter_alignment: bool | None = None
    zero_hpz_partition_size: Size | None = None
    zero_quantized_weights: bool | None = None
    zero_quantized_nontrainable_weights: bool | None = None
    zero_quantized_gradients: bool | None = None
    zeropp_loco_param: Opaque | None = None
    memory_efficient_linear: bool | None = None
    pipeline_loading_checkpoint: bool | None = None
    override_module_apply: bool | None = None
    log_trace_cache_warnings: bool | None = None
    enable_sanity_checks: bool | None = None
    save_muon_momentum_buffer_in_memory: bool | None = None
    mics_shard_size: Whole | None = None
    mics_hierarchical_params_gather: bool | None = None
    leaf_module: LeafModule | None = None

class Fp16(Section):
    enabled: bool | None = None
    auto_cast: bool | None = None
    loss_scale: NonNegative | None = None
    initial_scale_power: ScalePower | None = None
    loss_scale_window: Size | None = None
    hysteresis: Count | None = None
    consecutive_hysteresis: bool | None = None
    min_loss_scale: Size | None = None
    fp16_master_weights_and_grads: bool | None = None

class Bf16(Section):
    enabled: bool | None = None
    immediate_grad_update: bool | None = None
    check_grad_overflow: bool | None = None
    bf16_master_weights_and_grads: bool | None = None
    bf16_optimizer_states: bool | None = None

class TensorParallelGroup(Section):
    tp_size: Whole | None = None
    tp_grain_size: Whole | None = None

class TensorParallel(Section):
    autotp_size: Size | None = None
    tp_overlap_comm: bool | None = None
    vocab_parallel_lm_head: bool | None = None
    vocab_parallel_ce_backend: Literal['torch'] | Literal['liger'] | None = None
    tp: TensorParallelGroup | None = None
    injection_policy_tuple: Tuple | None = None
    partition_config: Opaque | None = None
    preset_model: str | None = None
    keep_module_on_host: bool | None = None
    kernel_inject: bool | None = None

class CommsLogger(Section):
    enabled: bool | None = None
    prof_all: bool | None = None
    prof_ops: Items | None = None
    verbose: bool | None = None
    debug: bool | None = None

class Tensorboard(Section):
    enabled: bool | None = None
    output_path: str | None = None
    job_name: str | None = None

class Wandb(Section):
    enabled: bool | None = None
    group: str | None = None
    team: str | None = None
    project: str | None = None

class CsvMonitor(Section):
    enabled: bool | None = None
    output_path: str | None = None
    job_name: str | None = None

class Comet(Section):
    enabled: bool | None = None
    samples_log_interval: Whole | None = None
    project: str | None = None
    workspace: str | None = None
    api_key: str | None = None
    experiment_name: str | None = None
    experiment_key: str | None = None
    online: bool | None = None
    mode: str | None = None

class Compile(Section):
    deepcompile: bool | None = None
    autoep_non_moe: bool | None = None
    free_activation: bool | None = None
    free_activation_threshold: Whole | None = None
    offload_activation: bool | None = None
    offload_activation_pin_memory: bool | None = None
    offload_opt_states: bool | None = None
    double_buffer: bool | None = None
    symmetric_memory: bool | None = None
    debug_log: bool | None = None
    offload_parameters: bool | None = None
    sync_before_reduce: bool | None = None
    sync_after_reduce: bool | None = None
    sync_before_allgather: bool | None = None
    sync_after_allgather: bool | None = None
    keep_int_input_tensors: bool | None = None
    keep_all_input_tensors: bool | None = None
    passes: Passes | None = None

class HybridEngine(Section):
    enabled: bool | None = None
    max_out_tokens: Whole | None = None
    inference_tp_size: Whole | None = None
    release_inference_cache: bool | None = None
    pin_parameters: bool | None = None
    tp_gather_partition_size: Whole | None = None
    enable_cuda_graph: bool | None = None

class Throughput(Section):
    enabled: bool | None = None
    synchronized: bool | None = None

class Timers(Section):
    throughput: Throughput | None = None

class WeightQuantization(Section):
    enabled: bool | None = None
    num_bits: Whole | None = None
    q_type: Literal['symmetric'] | Literal['asymmetric'] | None = None
    q_groups: Whole | None = None
    quantized_initialization: Opaque | None = None
    post_init_quant: Opaque | None = None

class OptimizerParams(Section):
    lr: NonNegative | None = None
    betas: Betas | None = None
    eps: NonNegative | None = None
    weight_decay: NonNegative | None = None
    momentum: NonNegative | None = None
    dampening: Real | None = None
    nesterov: bool | None = None
    bias_correction: bool | None = None
    adam_w_mode: bool | None = None
    torch_adam: bool | None = None
    foreach: bool | None = None
    fp32_optimizer_states: bool | None = None
    amsgrad: bool | None = None
    set_grad_none: bool | None = None
    lr_decay: NonNegative | None = None
    initial_accumulator_value: NonNegative | None = None
    maximize: bool | None = None
    differentiable: bool | None = None
    capturable: bool | None = None
    fused: bool | None = None
    max_grad_norm: NonNegative | None = None
    max_coeff: NonNegative | None = None
    min_coeff: NonNegative | None = None
    eps_inside_sqrt: bool | None = None
    muon_lr: NonNegative | None = None
    adam_lr: NonNegative | None = None
    ns_method: Literal['gram'] | Literal['standard'] | None = None
    freeze_step: Whole | None = None
    cuda_aware: bool | None = None
    comm_backend_name: Literal['nccl'] | Literal['mpi'] | Literal['hccl'] | None = None
    coeff_beta: Beta | None = None
    factor_max: NonNegative | None = None
    factor_min: NonNegative | None = None
    factor_threshold: NonNegative | None = None
    var_freeze_step: Whole | None = None
    var_update_scaler: Whole | None = None
    local_step_scaler: Whole | None = None
    local_step_clipper: Whole | None = None

class Optimizer(Section):
    type: str | None = None
    params: OptimizerParams | None = None
    legacy_fusion: bool | None = None

class SchedulerParams(Section):
    warmup_min_lr: Rates | None = None
    warmup_max_lr: Rates | None = None
    warmup_num_steps: Size | None = None
    warmup_type: Literal['log'] | Literal['linear'] | None = None
    total_num_steps: Count | None = None
    warmup_min_ratio: Fraction | None = None
    cos_min_ratio: Fraction | None = None
    lr_range_test_min_lr: Rates | None = None
    lr_range_test_step_size: Count | None = None
    lr_range_test_step_rate: NonNegative | None = None
    lr_range_test_staircase: bool | None = None
    cycle_min_lr: Rates | None = None
    cycle_max_lr: Rates | None = None
    decay_lr_rate: NonNegative | None = None
    cycle_first_step_size: Count | None = None
    cycle_second_step_size: Count | None = None
    cycle_first_stair_count: Size | None = None
    cycle_second_stair_count: Size | None = None
    decay_step_size: Size | None = None
    cycle_momentum: bool | None = None
    cycle_min_mom: NonNegative | None = None
    cycle_max_mom: NonNegative | None = None
    decay_mom_rate: NonNegative | None = None
    last_batch_iteration: Whole | None = None

class Scheduler(Section):
    type: str | None = None
    params: SchedulerParams | None = None

class ActivationCheckpointing(Section):
    partition_activations: bool | None = None
    number_checkpoints: Count | None = None
    contiguous_memory_optimization: bool | None = None
    synchronize_checkpoint_boundary: bool | None = None
    profile: bool | None = None
    cpu_checkpointing: bool | None = None

class Pipeline(Section):
    stages: Whole | str | None = None
    partition: str | None = None
    seed_layers: bool | None = None
    activation_checkpoint_interval: Size | None = None
    pipe_partitioned: bool | None = None
    grad_partitioned: bool | None = None
    use_reentrant: bool | None = None

class ParallelWrite(Section):
    pipeline_stage: bool | None = None

class Writer(Section):
    type: WriterType | None = None
    io_buffer_size: Whole | None = None
    io_buffer_double: bool | None = None
    show_statistics: bool | None = None
    data_parallel: WritersPer | None = None
    decoupled: bool | None = None
    io_multiplier: Whole | None = None

class Checkpoint(Section):
    tag_validation: TagValidation | None = None
    load_universal: bool | None = None
    use_node_local_storage: bool | None = None
    parallel_write: ParallelWrite | None = None
    checkpoint_serialization: bool | None = None
    writer: Writer | None = None

class DataTypes(Section):
    grad_accum_dtype: Dtype | None = None
    param_dtype: Dtype | None = None
    buffer_dtype: Dtype | None = None
    keep_in_fp32_modules: Auto | Texts | None = None

class TorchAutocast(Section):
    enabled: bool | None = None
    dtype: Dtype | None = None
    lower_precision_safe_modules: Texts | None = None

class FlopsProfiler(Section):
    enabled: bool | None = None
    recompute_fwd_factor: NonNegative | None = None
    profile_step: Whole | None = None
    module_depth: Whole | None = None
    top_modules: Whole | None = None
    detailed: bool | None = None
    output_file: str | None = None

class Aio(Section):
    block_size: Count | None = None
    queue_depth: Count | None = None
    thread_count: Count | None = None
    intra_op_parallelism: Count | None = None
    single_submit: bool | None = None
    overlap_events: bool | None = None
    use_gds: bool | None = None

class Autotuning(Section):
    enabled: bool | None = None
    fast: bool | None = None
    results_dir: NonEmpty | None = None
    exps_dir: NonEmpty | None = None
    overwrite: bool | None = None
    start_profile_step: Whole | None = None
    end_profile_step: Whole | None = None
    metric: str | None = None
    metric_path: str | None = None
    tuner_type: str | None = None
    tuner_early_stopping: Whole | None = None
    tuner_num_trials: Whole | None = None
    arg_mappings: Opaque | None = None
    model_info: Opaque | None = None
    model_info_path: str | None = None
    mp_size: Count | None = None
    max_train_batch_size: Count | None = None
    min_train_batch_size: Count | None = None
    max_train_micro_batch_size_per_gpu: Count | None = None
    min_train_micro_batch_size_per_gpu: Count | None = None
    num_tuning_micro_batch_sizes: Count | None = None

class DataSampling(Section):
    enabled: bool | None = None
    num_epochs: Count | None = None
    num_workers: Size | None = None
    pin_memory: bool | None = None
    curriculum_learning: Opaque | None = None
    dynamic_batching: Opaque | None = None

class DataRouting(Section):
    enabled: bool | None = None
    random_ltd: Opaque | None = None

class DataEfficiency(Section):
    enabled: bool | None = None
    seed: Whole | None = None
    data_sampling: DataSampling | None = None
    data_routing: DataRouting | None = None

class ExpertParallel(Section):
    enabled: bool | None = None
    autoep_size: Count | None = None
    expert_tensor_parallel_size: Count | None = None
    validate_folding_routing: bool | None = None
    async_split_plan: bool | None = None
    preset_model: str | None = None
    moe_layer_pattern: str | None = None
    expert_pattern: str | None = None
    router_pattern: str | None = None
    use_grouped_mm: bool | None = None
    disable_triton_grouped_mm: bool | None = None
    route_norm: bool | None = None
    route_scale: Real | None = None
    score_apply: Literal['auto'] | Literal['pre'] | Literal['post'] | None = None
    combine_impl: Literal['auto'] | Literal['weighted_sum'] | Literal['fused_weighted_sum'] | Literal['legacy_bmm'] | None = None
    row_weighting_impl: Literal['auto'] | Literal['eager'] | Literal['fused'] | None = None
    gate_up_impl: Literal['separate'] | Literal['fused'] | None = None
    comm_backend: Literal['comm'] | Literal['deepep'] | None = None
    comm_num_sm: Count | None = None
    comm_qp_margin: Size | None = None
    comm_max_tokens_per_rank: Size | None = None
    num_expert_groups: Count | None = None
    num_limited_groups: Count | None = None
    score_func: Literal['auto'] | Literal['softmax'] | Literal['sigmoid'] | None = None
    top_k: Count | Auto | None = None
    load_balance_coeff: Real | None = None
    routed_scaling_factor: Real | Auto | None = None
    expert_w1: str | None = None
    expert_w2: str | None = None
    expert_w3: str | None = None
    num_experts_attr: str | None = None
    top_k_attr: str | None = None
    has_shared_experts: bool | None = None
    shared_experts_pattern: str | None = None
    shared_experts_gate_pattern: str | None = None
    expert_activation: str | None = None

class CodeScheduler(Section):
    name: Literal['constant'] | Literal['linear'] | Literal['cosine'] | Literal['inverse_sqrt'] | Literal['wsd'] | Literal['other'] | None = None
    warmup_steps: Size | None = None
    warmup_from: NonNegative | None = None
    total_steps: Count | None = None
    minimum: NonNegative | None = None
    decay_steps: Size | None = None
    decay_shape: Literal['linear'] | Literal['cosine'] | Literal['exponential'] | Literal['minus_sqrt'] | None = None

class CodeTrainer(Section):
    label_smoothing_factor: NonNegative | None = None
    neftune_noise_alpha: Real | None = None
    optim_args: str | None = None
    optim_target_modules: str | Strings | None = None
    data_seed: Whole | None = None
    group_by_length: bool | None = None
    train_sampling_strategy: str | None = None
    average_tokens_across_devices: bool | None = None
    gradient_checkpointing: bool | None = None
    torch_compile: bool | None = None
    tf32: bool | None = None
    use_liger_kernel: bool | None = None

class Code(Section):
    pipeline_stages: Count | None = None
    partition_method: str | None = None
    tensor_parallel: Count | None = None
    context_parallel: Count | None = None
    expert_parallel: Count | None = None
    checkpointing: bool | None = None
    checkpoint_interval: Count | None = None
    manual_accumulation: bool | None = None
    scheduler: CodeScheduler | None = None
    decay_scope: Literal['all'] | Literal['matrices'] | None = None
    parameter_groups: str | None = None
    steps: Count | None = None
    epochs: Positive | None = None
    seed: Whole | None = None
    loss: Literal['mean_of_microbatches'] | Literal['per_token'] | None = None
    trainer: CodeTrainer | None = None
    accelerator: Literal['cuda'] | Literal['cpu'] | Literal['xpu'] | Literal['npu'] | Literal['hpu'] | Literal['mps'] | Literal['mlu'] | Literal['sdaa'] | Literal['supa'] | None = None

class DeepSpeed(Section):
    train_batch_size: Count | None = None
    train_micro_batch_size_per_gpu: Count | None = None
    gradient_accumulation_steps: Count | None = None
    managed_gradient_accumulation: bool | None = None
    steps_per_print: Count | None = None
    optimizer: Optimizer | None = None
    scheduler: Scheduler | None = None
    gradient_clipping: NonNegative | None = None
    fp16: Fp16 | None = None
    bf16: Bf16 | None = None
    bfloat16: Bf16 | None = None
    amp: Opaque | None = None
    torch_autocast: TorchAutocast | None = None
    data_types: DataTypes | None = None
    communication_data_type: CommDtype | None = None
    seq_parallel_communication_data_type: CommDtype | None = None
    seq_parallel_comm_data_type: CommDtype | None = None
    prescale_gradients: bool | None = None
    gradient_predivide_factor: Positive | None = None
    gradient_allreduce_op: Reduction | None = None
    sparse_gradients: bool | None = None
    zero_optimization: ZeroOptimization | None = None
    zero_allow_untested_optimizer: bool | None = None
    zero_force_ds_cpu_optimizer: bool | None = None
    sequence_parallel_size: Count | None = None
    data_parallel_size: Count | None = None
    tensor_parallel: TensorParallel | None = None
    expert_parallel: ExpertParallel | None = None
    use_data_before_expert_parallelism: bool | None = None
    pipeline: Pipeline | None = None
    activation_checkpointing: ActivationCheckpointing | None = None
    compile: Compile | None = None
    hybrid_engine: HybridEngine | None = None
    disable_allgather: bool | None = None
    fp32_allreduce: bool | None = None
    graph_harvesting: bool | None = None
    dataloader_drop_last: bool | None = None
    vocabulary_size: Size | None = None
    dump_state: bool | None = None
    disable_python_gc: bool | None = None
    log_level: str | None = None
    wall_clock_breakdown: bool | None = None
    memory_breakdown: bool | None = None
    flops_profiler: FlopsProfiler | None = None
    comms_logger: CommsLogger | None = None
    tensorboard: Tensorboard | None = None
    wandb: Wandb | None = None
    csv_monitor: CsvMonitor | None = None
    comet: Comet | None = None
    timers: Timers | None = None
    checkpoint: Checkpoint | None = None
    datastates_ckpt: Opaque | bool | None = None
    nebula: Opaque | None = None
    aio: Aio | None = None
    autotuning: Autotuning | None = None
    elasticity: Opaque | None = None
    data_efficiency: DataEfficiency | None = None
    curriculum_learning: Opaque | None = None
    progressive_layer_drop: Opaque | None = None
    eigenvalue: Opaque | None = None
    quantize_training: Opaque | None = None
    compression_training: Opaque | None = None
    sparse_attention: Opaque | None = None
    weight_quantization: WeightQuantization | None = None
    code: Code | None = None

SCHEMA = DeepSpeed
