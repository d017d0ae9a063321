# Made of schema.json by `python docs/generate`.
from typing import Any, Literal

from pydantic import Field as field

from bridge.plan.section import Count, Section, Size, UpToThree, Whole
from compat.automodel.setting_types import Betas, Dtype, Fraction, Free, Items, MeshAxes, Mode, ModelDtype, ModelKeys, Names, NonNegative, Parts, Positive, Rounding, Shape, Strategy

unset: Any

class StepScheduler(Section):
    global_batch_size: Count | None = None
    local_batch_size: Count | None = None
    num_epochs: Count | None = None
    max_steps: Count | None = None
    ckpt_every_steps: Count | None = None
    save_checkpoint_every_epoch: bool | None = None
    validate_on_checkpoint: bool | None = None
    val_every_steps: Count | None = None
    log_remote_every_steps: Count | None = None
    loss_average_window_steps: Count | None = None
    gc_every_steps: Count | None = None
    start_step: Size | None = None
    start_epoch: Size | None = None
    preemption_signal: int | Names | None = None

class Pipeline(Section):
    pp_schedule: str | None = None
    pp_schedule_csv: str | None = None
    pp_microbatch_size: Count | None = None
    pp_batch_size: Count | None = None
    layers_per_stage: Count | None = None
    round_virtual_stages_to_pp_multiple: Rounding | None = None
    module_fqns_per_model_part: Parts | None = None
    patch_inner_model: bool | None = None
    patch_causal_lm_model: bool | None = None
    patch_stage_backward_maybe_with_nosync: bool | None = None
    dtype: Dtype | None = None
    scale_grads_in_schedule: bool | None = None
    loss_fn: str | Free | None = None
    pp_seq_len: Count | None = None
    pp_recv_buffer_pool: bool | None = None
    pp_recv_buffer_pool_slack: Size | None = None

class AutoPipeline(Section):
    target: str | None = field(None, alias='_target_')
    visualization_font_size_offset: Whole | None = None

class Moe(Section):
    ignore_router_for_ac: bool | None = None
    reshard_after_forward: bool | None = None
    lm_head_precision: Dtype | None = None
    wrap_outer_model: bool | None = None
    mp_policy: Free | None = None

class MixedPrecision(Section):
    target: str | None = field(None, alias='_target_')
    param_dtype: Dtype | None = None
    reduce_dtype: Dtype | None = None
    output_dtype: Dtype | None = None
    cast_forward_inputs: bool | None = None

class Offload(Section):
    target: str | None = field(None, alias='_target_')
    pin_memory: bool | None = None

class FrameSharding(Section):
    enabled: bool | None = None
    mesh_dims: MeshAxes | None = None
    min_tokens: Size | None = None
    min_frames: Size | None = None
    min_local_patch_rows: Size | None = None
    cost_alpha: Size | Literal['auto'] | None = None

class VisionSharding(Section):
    frame_sharding: FrameSharding = FrameSharding()

class Multimodal(Section):
    frozen_sharding: Literal['root'] | Literal['per_layer'] | Literal['replicate'] | None = None
    vision: VisionSharding = VisionSharding()

class Distributed(Section):
    target: str | None = field(None, alias='_target_')
    strategy: Strategy | None = None
    dp_size: Count | None = None
    dp_replicate_size: Count | None = None
    tp_size: Count | None = None
    pp_size: Count | None = None
    cp_size: Count | None = None
    ep_size: Count | None = None
    pipeline: Pipeline = Pipeline()
    moe: Moe = Moe()
    activation_checkpointing: Mode | None = None
    activation_checkpointing_scope: Names | None = None
    sequence_parallel: bool | None = None
    tp_plan: Free | str | None = None
    custom_tp_plan: Free | str | None = None
    use_hf_tp_plan: bool | None = None
    mp_policy: MixedPrecision = MixedPrecision()
    offload_policy: Offload = Offload()
    autocast_dtype: Dtype | None = None
    defer_fsdp_grad_sync: bool | None = None
    reshard_after_forward: bool | None = None
    patch_is_packed_sequence: bool | None = None
    enable_async_tensor_parallel: bool | None = None
    enable_compile: bool | None = None
    enable_fsdp2_prefetch: bool | None = None
    fsdp2_backward_prefetch_depth: Size | None = None
    fsdp2_forward_prefetch_depth: Size | None = None
    multimodal: Multimodal = Multimodal()
    zero_dp_strategy: UpToThree | None = None
    megatron_fsdp_unit_modules: Names | None = None
    init_fsdp_with_meta_device: bool | None = None
    grad_reduce_in_fp32: bool | None = None
    preserve_fp32_weights: bool | None = None
    overlap_grad_reduce: bool | None = None
    overlap_param_gather: bool | None = None
    check_for_nan_in_grad: bool | None = None
    report_nan_in_param_grad: bool | None = None
    average_in_collective: bool | None = None
    disable_bucketing: bool | None = None
    calculate_per_token_loss: bool | None = None
    keep_fp8_transpose_cache: bool | None = None
    nccl_ub: bool | None = None
    fsdp_double_buffer: bool | None = None
    broadcast_buffers: bool | None = None
    find_unused_parameters: bool | None = None
    static_graph: bool | None = None
    bucket_cap_mb: Positive | None = None
    gradient_as_bucket_view: bool | None = None
    backend: str | None = None
    world_size: Count | None = None

class DistEnv(Section):
    backend: str | None = None
    timeout_minutes: Positive | None = None
    others: Free | None = field(None, alias='*')

class TransformerEngine(Section):
    recipe: str | Free | None = None
    others: Free | None = field(None, alias='*')

class Fp8(Section):
    enabled: bool | None = None
    recipe_name: str | None = None
    enable_fsdp_float8_all_gather: bool | None = None
    others: Free | None = field(None, alias='*')

class Peft(Section):
    target: str | None = field(None, alias='_target_')
    dim: Count | None = None
    alpha: Positive | None = None
    dropout: Fraction | None = None
    others: Free | None = field(None, alias='*')

class Backend(Section):
    attn: str | None = None
    linear: str | None = None
    experts: str | None = None
    enable_fsdp_optimizations: bool | None = None
    fake_balanced_gate: bool | None = None
    gate_precision: Dtype | None = None
    dispatcher: str | None = None
    te_fp8: TransformerEngine = TransformerEngine()
    others: Free | None = field(None, alias='*')

class ModelConfig(ModelKeys):
    target: str | None = field(None, alias='_target_')
    model_type: str | None = None
    architectures: Names | None = None
    others: Free | None = field(None, alias='*')

class Model(Section):
    target: str | None = field(None, alias='_target_')
    torch_dtype: ModelDtype | None = None
    config: ModelConfig = ModelConfig()
    backend: Backend = Backend()
    others: Free | None = field(None, alias='*')

class Optimizer(Section):
    target: str | None = field(None, alias='_target_')
    lr: NonNegative | None = None
    betas: Betas | None = None
    eps: NonNegative | None = None
    momentum: NonNegative | None = None
    weight_decay: NonNegative | None = None
    adam_w_mode: bool | None = None
    nesterov: bool | None = None
    amsgrad: bool | None = None
    foreach: bool | None = None
    fused: bool | None = None
    bias_correction: bool | None = None
    exp_avg_dtype: Dtype | None = None
    exp_avg_sq_dtype: Dtype | None = None
    param_group_overrides: Items | None = None
    others: Free | None = field(None, alias='*')

class LrScheduler(Section):
    lr_decay_style: Shape | None = None
    lr_warmup_steps: Size | None = None
    lr_decay_steps: Count | None = None
    init_lr: NonNegative | None = None
    max_lr: NonNegative | None = None
    min_lr: NonNegative | None = None
    start_wd: NonNegative | None = None
    end_wd: NonNegative | None = None
    wd_incr_steps: Size | None = None
    wd_incr_style: Literal['constant'] | Literal['linear'] | Literal['cosine'] | None = None
    use_checkpoint_opt_param_scheduler: bool | None = None
    override_opt_param_scheduler: bool | None = None
    wsd_decay_steps: Size | None = None
    lr_wsd_decay_style: Literal['linear'] | Literal['cosine'] | Literal['exponential'] | Literal['minus_sqrt'] | None = None

class ClipGradNorm(Section):
    max_norm: NonNegative | None = None

class PackedSequence(Section):
    packed_sequence_size: Size | None = None
    others: Free | None = field(None, alias='*')

class Dataset(Section):
    seq_len: Count | None = None
    others: Free | None = field(None, alias='*')

class Rng(Section):
    seed: Whole | None = None
    others: Free | None = field(None, alias='*')

class Dataloader(Section):
    num_workers: Size | None = None
    others: Free | None = field(None, alias='*')

class Checkpoint(Section):
    enabled: bool | None = None
    is_async: bool | None = None
    restore_from: str | None = None
    others: Free | None = field(None, alias='*')

class Wandb(Section):
    project: str | None = None
    entity: str | None = None
    others: Free | None = field(None, alias='*')

class AutoModel(Section):
    step_scheduler: StepScheduler = StepScheduler()
    distributed: Distributed = Distributed()
    autopipeline: AutoPipeline = AutoPipeline()
    dist_env: DistEnv = DistEnv()
    model: Model = Model()
    optimizer: Optimizer = Optimizer()
    lr_scheduler: LrScheduler = LrScheduler()
    clip_grad_norm: ClipGradNorm = ClipGradNorm()
    packed_sequence: PackedSequence = PackedSequence()
    dataset: Dataset = Dataset()
    recipe: str | Free | None = None
    seed: Whole | None = None
    rng: Rng = Rng()
    loss_fn: Free | str | None = None
    dataloader: Dataloader = Dataloader()
    validation_dataset: Free | None = None
    validation_dataloader: Free | None = None
    checkpoint: Checkpoint = Checkpoint()
    peft: Peft = Peft()
    fp8: Fp8 = Fp8()
    compile: Free | None = None
    autocast: Free | None = None
    benchmark: Free | None = None
    wandb: Wandb = Wandb()
    ci: Free | None = None
    freeze_config: Free | None = None
    processor: Free | None = None
    teacher_model: Free | None = None
    teacher_distributed: Free | None = None
    others: Free | None = field(None, alias='*')

SCHEMA = AutoModel
