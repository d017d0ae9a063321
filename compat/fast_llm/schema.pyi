# Made of schema.json by `python docs/generate`.
from typing import Any, Literal

from pydantic import Field as field

from bridge.plan.section import Real, Section
from compat.fast_llm.setting_types import Dtype, Fraction, Free, Level, NonNegative, Positive, PositiveReal, Reals, Strings, ZeroLevel

unset: Any

class TensorLogs(Section):
    save: bool = False
    show: bool = True
    max_elements: Positive | None = 8
    full_tensors: bool = False

class Run(Section):
    tensor_logs: TensorLogs = TensorLogs()
    structured_logs: bool = True
    experiment_dir: str | None = None
    enable_all_loggers: bool = False
    log_timestamps: bool = True
    experiment_name: str | None = None
    torch_dynamo_enable: bool = True
    enable_triton_kernels: bool = True
    triton_linear_kernels: bool = False
    model_debug_level: Level = 0

class MultiStage(Section):
    full_precision_gradients: bool = True
    store_frozen_weights_in_optimization_precision: bool = True
    debug_layer_outputs: Level = 0
    debug_layer_gradients: Level = 0
    debug_param_init: Level = 0
    debug_param_gradients: Level = 0
    debug_all_param_gradients: Level = 0
    debug_param_update: Level = 0
    debug_global_tensors: bool = True
    debug_activation_memory: bool = False
    debug_tensor_parallel: bool = False
    compile_all: bool = False
    layers_per_stage: PositiveReal = 1.0
    stages_per_pipeline_stage: Literal[1] = 1
    num_weight_buffers: Positive | None = None
    num_grad_buffers: Positive | None = None
    zero_stage: ZeroLevel | None = None
    pipeline_delay: NonNegative = 0.0

class Distributed(Section):
    tensor_parallel: Positive = 1
    pipeline_parallel: Positive = 1
    sequence_tensor_parallel: bool = False
    sequence_data_parallel: Positive = 1
    world_size: Positive | None = None
    rank: Level | None = None
    local_world_size: Positive | None = None
    pipeline_first: bool = False
    backend: Literal['nccl'] | Literal['gloo'] = 'nccl'
    timeout: PositiveReal = 60.0
    distributed_timeout: PositiveReal = 60.0
    use_cuda: bool = True
    force_cpu_initialization: bool = False
    seed: int = 1234
    compute_dtype: Dtype = 'float32'
    training_dtype: Dtype = 'float32'
    optimization_dtype: Dtype = 'float32'
    dp_seed_shift: int = unset
    pp_seed_shift: int = unset
    pp_gen_seed_shift: int = unset
    pp_gen_init_seed_shift: int = unset
    tp_seed_shift: int = unset
    tp_gen_seed_shift: int = unset
    tp_gen_init_seed_shift: int = unset
    sample_seed_shift: int = unset
    train_seed_shift: int = unset
    valid_seed_shift: int = unset
    test_seed_shift: int = unset
    inference_seed_shift: int = unset
    reproducible_init: bool = False

class Model(Section):
    type: str | None = None
    base_model: Free = unset
    multi_stage: MultiStage = MultiStage()
    distributed: Distributed = Distributed()

class Training(Section):
    evaluators: Free = unset
    validation: Free = unset
    logs: Free = unset
    checkpoint: Free = unset
    export: Free = unset
    shutdown: Free = unset
    wandb: Free = unset
    train_iters: Level = 0
    test_iters: Level = 0
    num_workers: Level = 2
    prefetch_factor: Positive | None = None
    timeout: PositiveReal | None = 3600.0

class Batch(Section):
    micro_batch_size: Positive | None = None
    depth_first_micro_batches: Positive | None = None
    breadth_first_micro_batches: Positive | None = None
    sequential_micro_batches: Positive | None = None
    batch_size: Positive | None = None
    sequence_length: Positive = 2048
    micro_sequence_length: Positive | None = None
    cross_document_attention: bool = True
    use_loss_masking_spans: bool = False
    truncate_documents: bool | None = True

class Schedule(Section):
    depth_first_micro_batches: Positive = 1
    breadth_first_micro_batches: Positive = 1
    micro_batch_splits: Positive = 1
    pipeline_overlap: bool = True
    data_overlap: bool = True
    data_batch_warn_time_ms: PositiveReal = 1000.0
    throttle_cpu: bool = True
    throttle_cpu_rate: Positive = 1
    throttle_cpu_delay: Level = 1
    debug_schedule: bool = False
    debug_send_recv: bool = False
    profile_schedule: bool = False
    estimate_critical_batch: Literal[False] = False
    skip_step: bool = False

class Data(Section):
    micro_batch_size: Positive = 2048
    maximum_document_length: int | None = None
    truncate_documents: bool | None = True
    gpu: bool = True
    shuffle: Literal['full'] | Literal['epoch'] | Literal['skip_first_epoch'] | Literal['disabled'] = 'epoch'
    seed: int = 784569
    datasets: Free = unset
    sampling: Free = unset
    tokenizer: Free = unset
    fim: Free = unset
    split: Reals = unset
    format: str = unset
    path: str | Strings = unset
    data_sample_warn_time_ms: PositiveReal = 1000.0
    multiprocessing_context: Literal['fork'] | Literal['spawn'] = 'spawn'

class LearningRate(Section):
    base: Real = 0.0001
    decay_style: str = 'constant'
    decay_iterations: int | None = None
    decay_power: Real = 1.0
    warmup_iterations: int = 0
    minimum: Real = 0.0
    schedule: str | None = None

class GradientScaler(Section):
    constant: NonNegative | None = None
    initial: PositiveReal = 65536.0
    minimum: PositiveReal = 1.0
    window: Positive = 1000
    hysteresis: Positive = 2

class Optimizer(Section):
    learning_rate: LearningRate = LearningRate()
    gradient_scaler: GradientScaler = GradientScaler()
    weight_decay: NonNegative = 0.01
    beta_1: Fraction = 0.9
    beta_2: Fraction = 0.999
    epsilon: PositiveReal = 1e-08
    gradient_norm_clipping: PositiveReal = 1.0
    default_learning_rate_scale: NonNegative = 1.0

class FastLLM(Section):
    type: str | None = None
    run: Run = Run()
    model: Model = Model()
    pretrained: Free = unset
    training: Training = Training()
    batch: Batch = Batch()
    schedule: Schedule = Schedule()
    data: Data = Data()
    profiling: Free = unset
    optimizer: Optimizer = Optimizer()
    reference_models: Free = unset
    callbacks: Free = unset

SCHEMA = FastLLM
