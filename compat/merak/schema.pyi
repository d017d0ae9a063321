# Made of schema.json by `python docs/generate`.
from typing import Any, Literal

from pydantic import Field as field

from bridge.plan.section import Count, Real, Section, Size, UpToThree, Whole
from compat.merak.setting_types import Beta, Cuts, Fraction, Free, Name, Names, NonNegative, NumberWords, Positive, Power, Ratios, Schedule, Steps, Strategy, Strings, Words

unset: Any

class Init(Section):
    pp: Count | None = None
    tp: Count | None = None
    dp: Count | None = None
    sp: Count | None = None
    backend: str | None = None

class Arguments(Section):
    train_schedule: Literal['1f1b'] | Literal['ds_default'] | Literal['pre_recompute_1f1b'] | Literal['last_no_recompute_1f1b'] | Literal['shifted_critical_path'] | Literal['full_critical_path_1f1b'] | None = None
    partition_method: Literal['uniform'] | Literal['uniform_floor'] | Literal['parameters'] | Literal['custom'] | Literal['autopipe'] | None = None
    split_method: Literal['min_deps'] | Literal['farthest_min_deps'] | Literal['nearest_min_deps'] | Literal['layer_split'] | None = None
    custom_split_points: Words | None = None
    custom_partition: NumberWords | None = None
    shard_count: Count | None = None
    dealloc_pipeoutput: bool | None = None
    trace_method: str | None = None
    trace_model: str | None = None
    input_names: Words | None = None
    cache_sharding: bool | None = None
    cache_name: str | None = None
    num_layers: Count | None = None
    seq_length: Count | None = None
    hidden_size: Count | None = None
    num_heads: Count | None = None
    init_method_std: NonNegative | None = None
    no_tie_modules: bool | None = None
    parallel_vocab: bool | None = None
    sequence_parallel: bool | None = None
    sequence_dim: Size | None = None
    tp_overlapping_level: UpToThree | None = None
    activation_checkpointing: bool | None = None
    checkpoint_num_layers: Size | None = None
    activation_checkpoint_ratio: NumberWords | None = None
    zero_optimization: bool | None = None
    zero_stage: UpToThree | None = None
    zero_allow_untested_optimizer: bool | None = None
    zero_allgather_bucket_size: Count | None = None
    zero_reduce_bucket_size: Count | None = None
    prescale_gradients: bool | None = None
    gradient_predivide_factor: Positive | None = None
    fp16: bool | None = None
    bf16: bool | None = None
    half_precision_backend: Literal['auto'] | Literal['amp'] | Literal['cuda_amp'] | Literal['apex'] | Literal['cpu_amp'] | None = None
    fp16_opt_level: Literal['O0'] | Literal['O1'] | Literal['O2'] | Literal['O3'] | None = None
    loss_scale: NonNegative | None = None
    initial_scale_power: Power | None = None
    loss_scale_window: Count | None = None
    hysteresis: Count | None = None
    min_loss_scale: Size | None = None
    tf32: bool | None = None
    per_device_train_batch_size: Count | None = None
    gradient_accumulation_steps: Count | None = None
    adafactor: bool | None = None
    learning_rate: NonNegative | None = None
    weight_decay: NonNegative | None = None
    adam_beta1: Beta | None = None
    adam_beta2: Beta | None = None
    adam_epsilon: NonNegative | None = None
    max_grad_norm: Real | None = None
    lr_scheduler_type: Schedule | None = None
    lr_scheduler_kwargs: Free | None = None
    warmup_ratio: Fraction | None = None
    warmup_steps: Size | None = None
    num_train_epochs: Positive | None = None
    max_steps: Steps | None = None
    seed: Size | None = None
    dataloader_num_workers: Size | None = None
    dataloader_pin_memory: bool | None = None
    split_inputs: bool | None = None
    per_device_eval_batch_size: Count | None = None
    do_train: bool | None = None
    do_eval: bool | None = None
    do_predict: bool | None = None
    eval_steps: Positive | None = None
    eval_iters: Steps | None = None
    return_logits: bool | None = None
    wall_clock_breakdown: bool | None = None
    logging_steps: Positive | None = None
    output_dir: str | None = None
    save: bool | None = None
    save_steps: Positive | None = None
    save_total_limit: Whole | None = None
    finetune: bool | None = None
    no_save_rng: bool | None = None
    no_save_optim: bool | None = None
    no_load_rng: bool | None = None
    no_load_optim: bool | None = None
    resume_from_checkpoint: str | None = None
    load_best_model_at_end: bool | None = None
    text_generation: bool | None = None
    out_seq_length: Count | None = None
    temperature: Positive | None = None
    lora_config: str | None = None
    adapter_name: str | None = None
    local_rank: Steps | None = None
    no_cuda: bool | None = None
    use_cpu: bool | None = None
    optim: str | None = None
    overwrite_output_dir: bool | None = None
    eval_strategy: Strategy | None = None
    evaluation_strategy: Strategy | None = None
    prediction_loss_only: bool | None = None
    eval_accumulation_steps: Count | None = None
    log_level: str | None = None
    logging_dir: str | None = None
    logging_strategy: Strategy | None = None
    logging_first_step: bool | None = None
    logging_nan_inf_filter: bool | None = None
    save_strategy: Literal['no'] | Literal['steps'] | Literal['epoch'] | Literal['best'] | None = None
    save_safetensors: bool | None = None
    save_only_model: bool | None = None
    save_on_each_node: bool | None = None
    data_seed: Size | None = None
    bf16_full_eval: bool | None = None
    fp16_full_eval: bool | None = None
    ddp_backend: str | None = None
    dataloader_drop_last: bool | None = None
    dataloader_prefetch_factor: Count | None = None
    dataloader_persistent_workers: bool | None = None
    run_name: str | None = None
    disable_tqdm: bool | None = None
    remove_unused_columns: bool | None = None
    label_names: Words | None = None
    metric_for_best_model: str | None = None
    greater_is_better: bool | None = None
    ignore_data_skip: bool | None = None
    label_smoothing_factor: Fraction | None = None
    group_by_length: bool | None = None
    report_to: Words | None = None
    ddp_find_unused_parameters: bool | None = None
    ddp_bucket_cap_mb: Count | None = None
    ddp_timeout: Count | None = None
    push_to_hub: bool | None = None
    gradient_checkpointing: bool | None = None
    full_determinism: bool | None = None
    torch_compile: bool | None = None
    neftune_noise_alpha: NonNegative | None = None
    average_tokens_across_devices: bool | None = None

class Trainer(Section):
    model: Name | None = None
    train_dataset: Name | None = None
    eval_dataset: Name | None = None
    data_collator: Name | None = None
    leaf_modules: Names | None = None
    loss_fn: Name | None = None

class TensorLists(Section):
    col_para_list: Strings | None = None
    row_para_list: Strings | None = None
    conv_para_list: Strings | None = None
    input_output_mapping: Ratios | None = None
    weight_change_list: Cuts | None = None
    tp_attr_list: Strings | None = None

class Merak(Section):
    init: Init = Init()
    args: Arguments = Arguments()
    trainer: Trainer = Trainer()
    tp_lists: TensorLists = TensorLists()

SCHEMA = Merak
