"""What Megatron's arguments mean, in a line each."""

from __future__ import annotations

DESCRIPTIONS: dict[str, str] = {
    # Ranks and how the model is split over them
    "tensor_model_parallel_size": "Ranks that share each layer's weight matrices.",
    "pipeline_model_parallel_size": "Ranks in a pipeline, each holding a run of layers.",
    "virtual_pipeline_model_parallel_size": (
        "Model chunks per pipeline rank under interleaving; none means no interleaving."
    ),
    "num_virtual_stages_per_pipeline_rank": "Interleaved model chunks that each pipeline rank holds.",
    "num_layers_per_virtual_pipeline_stage": (
        "Layers in each interleaved model chunk; fixes how many chunks a rank gets."
    ),
    "microbatch_group_size_per_vp_stage": (
        "Microbatches run on one model chunk before moving to the next chunk."
    ),
    "pipeline_model_parallel_layout": "Text such as Ett|tt|ttL that names the layers of every stage.",
    "decoder_first_pipeline_num_layers": (
        "Layers that the first pipeline stage holds; the other stages share the rest."
    ),
    "decoder_last_pipeline_num_layers": (
        "Layers that the last pipeline stage holds; the other stages share the rest."
    ),
    "account_for_embedding_in_pipeline_split": "Counts the input embedding as one layer when stages are cut.",
    "account_for_loss_in_pipeline_split": "Counts the loss layer as one layer when stages are cut.",
    "standalone_embedding_stage": "Gives the input embedding a first pipeline stage without layers.",
    "pipeline_model_parallel_split_rank": (
        "Pipeline rank at which the decoder of an encoder-decoder model begins."
    ),
    "encoder_pipeline_model_parallel_size": "Pipeline ranks that hold the encoder, apart from the decoder's.",
    "encoder_tensor_model_parallel_size": "Tensor-parallel ranks of the encoder, apart from the decoder's.",
    "context_parallel_size": "Ranks that each hold a slice of every sequence.",
    "hierarchical_context_parallel_sizes": (
        "Group sizes of nested context parallelism, innermost first; their product is its degree."
    ),
    "cp_comm_type": "How context-parallel ranks exchange keys and values, for all layers or layer by layer.",
    "hybrid_context_parallel": (
        "Spreads packed sequences of unequal length evenly over context-parallel ranks."
    ),
    "max_seqlen_per_dp_cp_rank": (
        "Longest sequence piece a rank takes under hybrid context parallelism, in tokens."
    ),
    "expert_model_parallel_size": "Ranks among which the experts of a layer are divided.",
    "expert_tensor_parallel_size": (
        "Ranks that share each expert's weights; none takes the tensor-parallel size."
    ),
    "sequence_parallel": "Splits norms and dropout along the sequence over the tensor-parallel ranks.",
    "data_parallel_size": "Model replicas: the world size over all other parallel sizes.",
    "tensor_parallel_num_weight_shards": (
        "Shards per weight, tensor parallelism and weight gathering together."
    ),
    "gtp_weight_remat_size": (
        "Ranks among which a tensor-parallel weight shard is split and regathered; derived."
    ),
    "expert_tensor_parallel_num_weight_shards": (
        "Shards per expert weight, expert tensor parallelism and weight gathering together."
    ),
    "expert_gtp_weight_remat_size": (
        "Ranks among which an expert's weight shard is split and regathered; derived."
    ),
    "use_tp_pp_dp_mapping": "Numbers ranks with pipeline inside data parallelism instead of outside.",
    "model_parallel_size": "Former name of the tensor-parallel size; any value is refused.",
    "moe_extended_tp": "Sharded every expert over tensor and expert ranks until 0.9; ignored since.",
    # Pipeline schedule and its messages
    "variable_seq_lengths": (
        "Sends tensor shapes along the pipeline, since sequence lengths differ between microbatches."
    ),
    "overlap_p2p_comm": "Overlaps pipeline sends and receives with compute; interleaved schedules only.",
    "overlap_p2p_comm_warmup_flush": "Also overlaps pipeline messages in the warm-up and flush phases.",
    "batch_p2p_comm": "Groups pipeline sends and receives in one batched call.",
    "batch_p2p_sync": "Synchronizes the device after each batched pipeline exchange.",
    "use_ring_exchange_p2p": "Sends pipeline tensors by a ring exchange that stock PyTorch lacks.",
    "pipeline_model_parallel_comm_backend": "Communication library of the pipeline groups: nccl or ucc.",
    "pipeline_dtype": "Data type of the tensors passed between pipeline stages.",
    "deallocate_pipeline_outputs": "Frees a stage's output data once it is sent on.",
    "scatter_gather_tensors_in_pipeline": (
        "Meant to send pipeline tensors in tensor-parallel slices; read by no release."
    ),
    "defer_embedding_wgrad_compute": "Puts off the output layer's weight gradients until the pipeline flush.",
    "wgrad_deferral_limit": "Microbatches whose output-layer weight gradients are put off; 0 is all.",
    "num_microbatches_with_partial_activation_checkpoints": (
        "Microbatches in flight that recompute only some layers; the rest recompute all."
    ),
    "mtp_standalone": "Says that prediction heads for later tokens have their own stage; derived.",
    # Hooks of the training loop, set from code
    "timers": "Timer object that schedules and optimizers report their phases to.",
    "grad_scale_func": "Callable that scales the loss before the backward pass.",
    "moe_grad_scale_func": "Callable giving the scale of the expert balance losses.",
    "mtp_grad_scale_func": "Callable giving the scale of the multi-token prediction loss.",
    "experimental_attention_variant_loss_scale_func": (
        "Callable that hands the loss scale to an experimental attention."
    ),
    "no_sync_func": "Callable whose context suspends data-parallel gradient communication.",
    "grad_sync_func": "Callable that starts the gradient reductions of given parameters.",
    "param_sync_func": "Callable that starts the gathering of given parameters.",
    "finalize_model_grads_func": "Callable that completes gradients after the last microbatch.",
    # Overlap inside tensor parallelism
    "tp_comm_overlap": (
        "Overlaps tensor-parallel collectives with matrix products through Transformer Engine."
    ),
    "tp_comm_overlap_cfg": "YAML file with Transformer Engine's overlap settings per layer.",
    "tp_comm_overlap_ag": "Overlaps the all-gather with its product by splitting both into pieces.",
    "tp_comm_overlap_rs": "Overlaps the reduce-scatter with its product by splitting both into pieces.",
    "tp_comm_overlap_rs_dgrad": "Overlaps the reduce-scatter with the product for the input gradient.",
    "tp_comm_overlap_disable_qkv": "Leaves the query-key-value projection out of the all-gather overlap.",
    "tp_comm_overlap_disable_fc1": "Leaves the first feed-forward projection out of the all-gather overlap.",
    "tp_comm_bulk_dgrad": "Overlaps the input's all-gather with the input-gradient product as a whole.",
    "tp_comm_bulk_wgrad": (
        "Overlaps the input gradient's reduce-scatter with the weight-gradient product as a whole."
    ),
    "tp_comm_split_ag": (
        "Older split all-gather overlap of the forward product; before Transformer Engine 1.6."
    ),
    "tp_comm_split_rs": (
        "Older split reduce-scatter overlap of the forward product; before Transformer Engine 1.6."
    ),
    "tp_comm_atomic_ag": "Older all-gather overlap through atomic products; before Transformer Engine 1.6.",
    "tp_comm_atomic_rs": (
        "Older reduce-scatter overlap through atomic products; before Transformer Engine 1.6."
    ),
    "tp_comm_bootstrap_backend": "Library that sets up the overlap buffers: nccl, mpi or gloo.",
    "async_tensor_model_parallel_allreduce": (
        "Asynchronous all-reduce of input gradients; ignored by every release here."
    ),
    "symmetric_ar_type": (
        "All-reduce over symmetric memory in inference: two_shot, one_shot or multimem_all_reduce."
    ),
    "nccl_all_reduce_for_prefill": "Falls back from symmetric memory to NCCL all-reduce for prompts.",
    # Process groups and start-up
    "distributed_backend": "Library of the process groups: nccl or gloo.",
    "distributed_timeout_minutes": "Time limit of collectives, in minutes.",
    "distributed_timeout_seconds_after_init": "Time limit of collectives once training runs, in seconds.",
    "local_rank": "Index of the process on its machine.",
    "lazy_mpu_init": "Leaves the process groups to an outside launcher, to be set up later.",
    "enable_gloo_process_groups": "Creates Gloo groups beside the NCCL ones; this name until 0.16.",
    "use_gloo_process_groups": "Creates Gloo groups beside the NCCL ones; this name from 0.17.",
    "high_priority_stream_groups": "Names of the process groups whose streams get high priority.",
    "nccl_communicator_config_path": "YAML file with NCCL thread-block limits per process group.",
    "use_sharp": "Reduces inside the InfiniBand switches (SHARP) for data-parallel groups.",
    "sharp_enabled_group": "Group that gets in-switch reduction: dp or dp_replica.",
    "create_all_gather_group": (
        "Makes extra data-parallel groups so that all-gather and reduce-scatter run side by side."
    ),
    "fake_process_group": "Runs without any communication, to measure memory on one device.",
    "flight_recorder_dump_path": "Where NCCL's flight recorder writes its traces.",
    "flight_recorder_trace_buffer_size": "Events that NCCL's flight recorder keeps per rank.",
    "flight_recorder_dump_on_timeout": "Writes the flight recorder's traces when a collective times out.",
    "flight_recorder_include_stack_trace": "Adds stack traces to what the flight recorder writes.",
    "flight_recorder_include_only_active": "Limits the flight recorder's output to unfinished operations.",
    "flight_recorder_extra_dump_on_exec": (
        "Writes the flight recorder's traces also when an exception ends the process group."
    ),
    # Data parallelism and sharding
    "use_distributed_optimizer": (
        "Shards the optimizer among data-parallel ranks and reduce-scatters gradients."
    ),
    "num_distributed_optimizer_instances": (
        "Copies of the sharded optimizer state among the data-parallel ranks."
    ),
    "overlap_grad_reduce": "Overlaps gradient reduction with the backward pass, bucket by bucket.",
    "overlap_param_gather": "Overlaps parameter gathering with the forward pass.",
    "overlap_param_gather_with_optimizer_step": (
        "Starts gathering the first bucket while the optimizer still steps."
    ),
    "align_grad_reduce": "Makes all pipeline stages start gradient reductions at the same time.",
    "align_param_gather": "Makes all pipeline stages start parameter gathering at the same time.",
    "delay_wgrad_compute": "Runs weight gradients after input gradients, to hide communication behind them.",
    "ddp_bucket_size": "Parameters per gradient bucket, in elements.",
    "ddp_num_buckets": "Gradient buckets to cut the parameters into; sets the bucket size.",
    "ddp_average_in_collective": "Lets the collective average gradients instead of scaling before a sum.",
    "ddp_pad_buckets_for_high_nccl_busbw": (
        "Pads gradient buckets to multiples of 65536 elements for NCCL bandwidth."
    ),
    "ddp_reduce_scatter_with_fp32_accumulation": (
        "Exchanges low-precision gradients but sums them in float32 on each rank."
    ),
    "ddp_param_name_patterns_for_fp32_local_accumulation": (
        "Name patterns of parameters whose gradients accumulate locally in float32."
    ),
    "gradient_reduce_div_fusion": "Merges the division by the number of ranks into the gradient reduction.",
    "gradient_accumulation_fusion": "Adds weight gradients to their buffer inside the matrix product.",
    "check_for_nan_in_loss_and_grad": "Looks for NaN in losses and in gradients before their reduction.",
    "check_for_large_grads": "Looks for suspiciously large gradients before their reduction.",
    "nccl_ub": "Registers communication buffers with NCCL, so that collectives occupy fewer multiprocessors.",
    "disable_symmetric_registration": "Registers NCCL buffers locally instead of in symmetric windows.",
    "reuse_grad_buf_for_mxfp8_param_ag": "Gathers MXFP8 parameters through the gradient buffer.",
    "use_layer_wise_param_layout": (
        "Plans parameter shards ahead for the layer-wise optimizer, other parameters apart."
    ),
    "check_weight_hash_across_dp_replicas_interval": "Steps between checks that replicas hold equal weights.",
    # Fully sharded data parallelism
    "use_megatron_fsdp": "Wraps the model in Megatron's own fully sharded data parallelism.",
    "use_custom_fsdp": "Older name of use_megatron_fsdp, until release 0.13.",
    "use_torch_fsdp2": "Wraps the model in PyTorch's FSDP2.",
    "torch_fsdp2_reshard_after_forward": "Lets FSDP2 drop gathered weights after the forward pass.",
    "data_parallel_sharding_strategy": (
        "What FSDP shards: no_shard, optim, optim_grads or optim_grads_params."
    ),
    "outer_dp_sharding_strategy": "What hybrid FSDP shards over its outer ranks: no_shard or optim.",
    "enable_full_sharding_in_hsdp": "Meant to shard fully in hybrid FSDP; read by no release.",
    "fsdp_double_buffer": (
        "Keeps two standing buffers for FSDP communication instead of allocating each time."
    ),
    "fsdp_db_use_persist_buf_on_alloc_fail": (
        "Gives FSDP modules that miss the double buffer a standing buffer."
    ),
    "megatron_fsdp_max_pool_double_buffer": "Sizes the FSDP double buffer for the largest of unequal units.",
    "fsdp_manual_registration": "Registers FSDP buffers with NCCL in a few explicit calls.",
    "suggested_communication_unit_size": "Elements that FSDP communicates at once; also bounds its prefetch.",
    "megatron_fsdp_enable_fine_grained_param_gather": (
        "Gathers FSDP parameters module by module instead of unit by unit."
    ),
    "megatron_fsdp_main_params_dtype": "Data type of FSDP's master weights; auto keeps the model's.",
    "megatron_fsdp_main_grads_dtype": "Data type of FSDP's gradient buffer; auto keeps the model's.",
    "megatron_fsdp_grad_comm_dtype": "Data type in which FSDP reduces gradients; auto takes the buffer's.",
    "keep_fp8_transpose_cache": "Keeps FSDP's transposed FP8 weights between passes.",
    "keep_fp8_transpose_cache_when_using_custom_fsdp": (
        "Older name of keep_fp8_transpose_cache, until release 0.13."
    ),
    "init_model_with_meta_device": "Builds the model without storage and fills it while FSDP shards it.",
    # Optimizer
    "optimizer": "Optimizer by name: adam and sgd, later also muon, lion and others.",
    "adam_beta1": "Decay rate of Adam's gradient average.",
    "adam_beta2": "Decay rate of Adam's squared-gradient average.",
    "adam_eps": "Small number added to Adam's denominator.",
    "sgd_momentum": "Momentum of plain stochastic gradient descent.",
    "lion_beta1": "Lion's weight of old momentum in the signed update.",
    "lion_beta2": "Lion's decay rate of the momentum.",
    "muon_momentum": "Momentum that Muon applies before it orthogonalizes.",
    "muon_nesterov": "Gives Muon's momentum the Nesterov look-ahead; this name from 0.18.",
    "muon_use_nesterov": "Gives Muon's momentum the Nesterov look-ahead; this name until 0.17.",
    "muon_num_ns_steps": "Newton-Schulz iterations per Muon update.",
    "muon_coefficient_type": "Set of polynomial coefficients of Muon's Newton-Schulz iteration.",
    "muon_fp32_matmul_prec": "Precision of float32 products in Muon's iteration: low, medium or high.",
    "muon_scale_mode": (
        "How Muon's update scales with matrix shape: spectral, unit_rms_norm or shape_scaling."
    ),
    "muon_extra_scale_factor": "Further factor on every Muon update.",
    "muon_split_qkv": "Orthogonalizes query, key and value weights apart under Muon.",
    "muon_tp_mode": "How Muon treats tensor-parallel weights: blockwise, duplicated or distributed.",
    "muon_scalar_optimizer": "Optimizer of embeddings, biases and norms beside Muon: adam or lion.",
    "clip_grad": "Largest allowed global gradient norm; 0 turns clipping off.",
    "weight_decay": "Weight decay coefficient, constant unless a schedule is chosen.",
    "apply_wd_to_qk_layernorm": "Decays the weights of query and key norms too.",
    "no_weight_decay_cond_type": "Older choice of the parameters spared from weight decay.",
    "decoupled_lr": "Peak learning rate of input and output embeddings, if they have their own.",
    "decoupled_min_lr": "Lowest learning rate of input and output embeddings with their own rate.",
    "freeze_all_layers": "Trains no parameter, so that no optimizer is needed.",
    "use_mup": "Scales initialization and learning rates with width (maximal update parametrization).",
    "mup_base_hidden_size": "Hidden size of the small model that settings were tuned on.",
    "mup_base_head_dim": "Head width of the small tuned model, for attention scaling.",
    "mup_width_mult": "Hidden size over that of the small tuned model; derived.",
    "mup_attn_scale_power": "Exponent of the head width in width-scaled attention: 0.5 or 1.",
    "mup_embedding_mult": "Factor on the embedding output under width scaling.",
    "mup_output_mult": "Factor on the logits under width scaling.",
    "use_precision_aware_optimizer": "Lets the optimizer keep its state and master weights in low precision.",
    "main_params_dtype": "Data type of master weights in the precision-aware optimizer.",
    "main_grads_dtype": "Data type of main gradients in the precision-aware optimizer.",
    "exp_avg_dtype": "Storage type of Adam's first moment in the precision-aware optimizer.",
    "exp_avg_sq_dtype": "Storage type of Adam's second moment in the precision-aware optimizer.",
    "optimizer_cpu_offload": "Keeps optimizer state and its update on the CPU.",
    "optimizer_offload_fraction": "Share of the optimizer state held on the CPU, 0 to 1.",
    "use_torch_optimizer_for_cpu_offload": "Uses PyTorch's optimizer for the part on the CPU.",
    "overlap_cpu_optimizer_d2h_h2d": "Overlaps CPU updates with copies to and from the device.",
    "pin_cpu_grads": "Pins the CPU memory of offloaded gradients.",
    "pin_cpu_params": "Pins the CPU memory of offloaded parameters.",
    "optimizer_cuda_graph": "Captures the optimizer step in a CUDA graph.",
    "dump_param_to_param_group_map": "Where to write which parameter belongs to which optimizer group.",
    # Learning rate and weight decay over the run
    "lr": "Peak learning rate, reached after warm-up.",
    "min_lr": "Learning rate at which the decay stops.",
    "lr_decay_style": "Shape of the decay: constant, linear, cosine, inverse-square-root or WSD.",
    "lr_decay_iters": "Steps from the start until the decay ends.",
    "lr_decay_samples": "Samples from the start until the decay ends.",
    "lr_warmup_init": "Learning rate at the first step of warm-up.",
    "lr_warmup_iters": "Steps of linear warm-up.",
    "lr_warmup_samples": "Samples of linear warm-up.",
    "lr_warmup_fraction": "Warm-up as a share of the decay's length, 0 to 1.",
    "lr_wsd_decay_iters": "Steps of the closing decay of a WSD schedule.",
    "lr_wsd_decay_samples": "Samples of the closing decay of a WSD schedule.",
    "lr_wsd_decay_style": "Shape of WSD's closing decay, exponential unless set.",
    "start_weight_decay": "Weight decay at the start of a growing schedule.",
    "end_weight_decay": "Weight decay at the end of a growing schedule.",
    "weight_decay_incr_style": "How weight decay grows: constant, linear or cosine.",
    "override_opt_param_scheduler": "Takes the schedule from these arguments where the checkpoint's differs.",
    "use_checkpoint_opt_param_scheduler": (
        "Takes the schedule from the checkpoint where these arguments differ."
    ),
    "warmup": "Former name of a warm-up setting; any value is refused.",
    # Size of the model
    "num_layers": "Transformer layers of the model, over all stages.",
    "hidden_size": "Width of the residual stream, in elements.",
    "ffn_hidden_size": "Inner width of the feed-forward block; four times the hidden size unless set.",
    "num_attention_heads": "Query heads per attention layer.",
    "group_query_attention": "Lets query heads share keys and values in groups.",
    "num_query_groups": "Key and value heads that the query heads share.",
    "kv_channels": "Elements per attention head; hidden size over heads unless set.",
    "seq_length": "Tokens per training sequence.",
    "encoder_seq_length": "Tokens per encoder sequence; replaces the sequence length.",
    "decoder_seq_length": "Tokens per decoder sequence of an encoder-decoder model.",
    "encoder_num_layers": "Layers of the encoder; replaces the number of layers.",
    "decoder_num_layers": "Layers of the decoder of an encoder-decoder model.",
    "max_position_embeddings": "Longest position that the model can embed, in tokens.",
    "vocab_size": "Entries of the vocabulary, without padding.",
    "make_vocab_size_divisible_by": (
        "Pads the vocabulary to a multiple of this times the tensor-parallel size."
    ),
    "padded_vocab_size": "Entries of the embedding table, padding included.",
    "pad_vocab_size": "Rounds the vocabulary up for even tensor-parallel shards.",
    "untie_embeddings_and_output_weights": "Gives the output layer weights of its own.",
    "spec": "Module and function that return a custom layer specification.",
    "yaml_cfg": "YAML file that takes the place of all other arguments.",
    "is_hybrid_model": "Says that the layers mix attention, state-space and feed-forward blocks.",
    # Layers
    "normalization": "Kind of norm: LayerNorm or RMSNorm.",
    "layernorm_epsilon": "Number added to the variance in norms.",
    "norm_epsilon": "Number added to the variance in norms, under its name until 0.15.",
    "layernorm_zero_centered_gamma": "Stores norm weights as their distance from one.",
    "apply_layernorm_1p": "Stores norm weights as their distance from one; name until 0.15.",
    "apply_residual_connection_post_layernorm": (
        "Takes the residual after the norm, as BERT did; legacy models only."
    ),
    "add_bias_linear": "Gives the linear layers a bias.",
    "add_qkv_bias": "Gives the query, key and value projections a bias.",
    "activation_func": "Callable that is the feed-forward block's activation.",
    "gated_linear_unit": "Multiplies the activation by a second, linear branch.",
    "swiglu": "Uses SiLU with a linear gate branch in the feed-forward block.",
    "quick_geglu": "Uses the quick GELU with a linear gate branch.",
    "squared_relu": "Uses the squared ReLU in the feed-forward block.",
    "openai_gelu": "Uses OpenAI's tanh form of GELU; legacy models only.",
    "onnx_safe": "Uses operations that ONNX can export; legacy models only.",
    "activation_func_clamp_value": "Bound to which a gated activation's two inputs are clamped.",
    "glu_linear_offset": "Number added to the linear branch of a gated activation.",
    "use_te_activation_func": "Takes the feed-forward activation from Transformer Engine.",
    "hidden_dropout": "Dropout probability of the residual branches and embeddings.",
    "fp32_residual_connection": "Keeps the residual stream in float32.",
    "transformer_impl": "Who supplies the layers: local, transformer_engine or inference_optimized.",
    "heterogeneous_block_specs": "Lets every layer have its own specification.",
    "heterogeneous_layers_config_path": "JSON file that describes each layer of a heterogeneous model.",
    "heterogeneous_layers_config_encoded_json": (
        "Text of the heterogeneous model's JSON file, kept for checkpoints."
    ),
    "hetereogenous_dist_checkpoint": "Saves layers one by one in checkpoints, since they differ.",
    "use_legacy_models": "Builds the models from before Megatron Core; gone from 0.18.",
    "deprecated_use_mcore_models": "Former switch to Megatron Core models, now the rule; ignored.",
    "mlp_chunks_for_prefill": "Pieces of the sequence that the feed-forward block takes in turn on prompts.",
    "mlp_chunks_for_training": (
        "Pieces of the sequence that the feed-forward block takes in turn in training."
    ),
    # Attention
    "attention_backend": "Attention kernels: auto, flash, fused, unfused or local.",
    "flash_attention_version": "Major version of FlashAttention to use in training and inference.",
    "use_flash_attn": "Turns on FlashAttention in legacy models.",
    "attention_dropout": "Dropout probability of attention weights.",
    "attention_output_gate": "Gates the attention output by a sigmoid of the input.",
    "softmax_scale": "Factor on attention scores; inverse root of the head width unless set.",
    "softmax_type": "Denominator of attention softmax: vanilla, off-by-one or learnable.",
    "apply_query_key_layer_scaling": "Divides attention scores by the layer number, for float16.",
    "qk_layernorm": "Normalizes queries and keys before their product.",
    "qk_l2_norm": "Divides queries and keys by their root mean square, without weights.",
    "qk_clip": "Rescales query and key weights when attention scores grow too large.",
    "qk_clip_threshold": "Attention score above which weights are rescaled.",
    "qk_clip_alpha": "Share of the rescaling that goes to the query weights, 0 to 1.",
    "window_size": "Tokens that attention reaches back and ahead; -1 has no bound.",
    "window_attn_skip_freq": "Which layers attend without a window: every Nth, or by pattern.",
    "reset_attention_mask": "Keeps tokens from attending beyond their own document.",
    "test_mode": "Checks while running that query and key norms agree across tensor-parallel ranks.",
    # Positions
    "position_embedding_type": (
        "How positions are encoded: learned_absolute, rope, mrope, relative, yarn or none."
    ),
    "add_position_embedding": (
        "Former switch for learned positions; turning it off is refused without rotary positions."
    ),
    "use_rotary_position_embeddings": "Former way to choose rotary positions.",
    "rope_type": "Variant of rotary positions: rope or yarn.",
    "rotary_base": "Base of the rotary frequencies.",
    "rotary_percent": "Share of a head's elements that get rotated, 0 to 1.",
    "rotary_interleaved": "Rotates neighbouring elements as pairs instead of the two halves.",
    "rotary_seq_len_interpolation_factor": "Factor by which rotary positions are compressed.",
    "use_rope_scaling": "Rescales rotary frequencies as Llama 3.1 does.",
    "rope_scaling_factor": "Factor by which the context grows under Llama 3.1's rescaling.",
    "no_rope_freq": "Which layers go without rotary positions: every Nth, or by pattern.",
    "mrope_section": "Rotary channels for time, height and width of multimodal positions.",
    "reset_position_ids": "Restarts positions after every end-of-document token.",
    "relative_attention_num_buckets": "Buckets that relative distances are sorted into.",
    "relative_attention_max_distance": (
        "Distance beyond which relative positions share one bucket, in tokens."
    ),
    "yarn_beta_fast": "Rotations above which YaRN leaves a frequency as it is.",
    "yarn_beta_slow": "Rotations below which YaRN interpolates a frequency in full.",
    "yarn_original_max_position_embeddings": "Context length before YaRN stretched it, in tokens.",
    "yarn_correction_range_round_to_int": "Rounds the ends of YaRN's ramp to whole channels.",
    # Multi-latent attention
    "multi_latent_attention": "Uses attention over compressed keys and values.",
    "q_lora_rank": "Width of the compressed queries; none leaves them uncompressed.",
    "kv_lora_rank": "Width of the compressed keys and values.",
    "qk_head_dim": "Elements per query and key head that carry no position.",
    "qk_pos_emb_head_dim": "Elements per query and key head that carry the position.",
    "v_head_dim": "Elements per value head.",
    "rotary_scaling_factor": "Factor by which YaRN stretches the context.",
    "mscale": "Weight of YaRN's attention temperature, numerator.",
    "mscale_all_dim": "Weight of YaRN's attention temperature, denominator and softmax scale.",
    "cache_mla_latents": "Caches compressed keys and values in inference, instead of full ones.",
    "mla_down_proj_fusion": "Merges the compressing projections and their norm into one kernel.",
    # Experimental attention
    "experimental_attention_variant": "Replacement for attention: gated_delta_net or dsa.",
    "linear_attention_freq": "Which layers use linear attention: all but every Nth, or by pattern.",
    "linear_conv_kernel_dim": "Length of gated delta net's convolution, in tokens.",
    "linear_key_head_dim": "Elements per query and key head of the gated delta net.",
    "linear_value_head_dim": "Elements per value head of the gated delta net.",
    "linear_num_key_heads": "Query and key heads of the gated delta net.",
    "linear_num_value_heads": "Value heads of the gated delta net.",
    "dsa_indexer_n_heads": "Heads of the indexer that picks keys for sparse attention.",
    "dsa_indexer_head_dim": "Elements per indexer head.",
    "dsa_indexer_topk": "Keys that the indexer keeps per query, in tokens.",
    "dsa_indexer_topk_freq": "Layers that share one choice of keys.",
    "dsa_indexer_skip_topk_offset": "First layers that each choose their own keys before sharing begins.",
    "dsa_indexer_loss_coeff": "Weight of the indexer's divergence loss; 0 drops it.",
    "dsa_indexer_use_sparse_loss": "Computes the indexer's loss over the chosen keys alone.",
    "dsa_indexer_k_norm_epsilon": "Number added to the variance in the indexer's key norm.",
    "dsa_indexer_k_norm_fp32": "Computes the indexer's key norm in float32.",
    "dsa_indexer_rope_interleaved": (
        "Rotates neighbouring elements in the indexer, as multi-latent attention does."
    ),
    "dsa_indexer_rotate_activation": "Applies a Hadamard rotation to the indexer's queries and keys.",
    "dsa_indexer_scoring_relu": "Applies ReLU to indexer scores before their weighted sum.",
    "dsa_kernel_backend": "Fused kernels of sparse attention: none, tilelang or cudnn.",
    # State-space and hybrid models
    "mamba_num_heads": "Heads of a Mamba layer; set by its width unless given.",
    "mamba_head_dim": "Elements per Mamba head.",
    "mamba_num_groups": "Groups of Mamba heads that share their state projections.",
    "mamba_state_dim": "State elements per channel of a Mamba layer.",
    "use_mamba_mem_eff_path": "Runs Mamba layers through the fused kernel that saves memory.",
    "disable_mamba_mem_eff_path": "Meant to avoid Mamba's fused kernel; read by no release.",
    "mamba_training_ssm_states_dtype": "Data type of Mamba's states between chunks in training.",
    "hybrid_layer_pattern": "One letter per layer: mamba, attention, feed-forward, experts and more.",
    "hybrid_override_pattern": "Older name of the hybrid layer pattern.",
    "hybrid_attention_ratio": "Share of layers that are attention in a hybrid model, 0 to 1.",
    "hybrid_mlp_ratio": "Share of layers that are feed-forward in a hybrid model, 0 to 1.",
    # Multi-token prediction
    "mtp_num_layers": "Extra heads that each predict one token further ahead.",
    "mtp_loss_scaling_factor": "Weight of the extra heads' mean loss.",
    "mtp_use_repeated_layer": "Uses one extra head again and again for all depths.",
    "mtp_detach_heads": "Keeps the extra heads' gradients out of the main model.",
    "mtp_hybrid_override_pattern": "Older pattern of the extra heads' layers, for old checkpoints.",
    # Precision
    "params_dtype": "Data type in which weights are created; follows fp16 and bf16.",
    "fp16": "Trains in float16 with loss scaling.",
    "bf16": "Trains in bfloat16 with float32 master weights.",
    "enable_autocast": "Runs the forward step under torch.autocast.",
    "autocast_dtype": "Data type for torch.autocast; that of the weights unless set.",
    "loss_scale": "Fixed loss scale; none scales dynamically under float16.",
    "initial_loss_scale": "First value of the dynamic loss scale.",
    "min_loss_scale": "Lowest value of the dynamic loss scale.",
    "loss_scale_window": "Steps without overflow before the loss scale doubles.",
    "hysteresis": "Overflows tolerated before the loss scale is lowered.",
    "accumulate_allreduce_grads_in_fp32": "Accumulates and reduces gradients in float32.",
    "grad_reduce_in_bf16": "Accumulates and reduces gradients in bfloat16 instead of float32.",
    "attention_softmax_in_fp32": "Computes attention masks and softmax in float32.",
    "fp16_lm_cross_entropy": "Computes the loss in float16 instead of float32; needs float16 training.",
    "disable_bf16_reduced_precision_matmul": (
        "Forbids reduced-precision sums inside bfloat16 matrix products."
    ),
    "te_precision_config_file": "YAML file with precision overrides by module for Transformer Engine.",
    "quant_recipe": "Object that sets quantization by module.",
    # FP8 and FP4
    "fp8": "Format of FP8 training: e4m3, or hybrid with e5m2 gradients.",
    "fp8_recipe": "How FP8 scales are found: tensorwise, delayed, mxfp8, blockwise or custom.",
    "fp8_margin": "Margin in FP8 scales, as a power of two.",
    "fp8_interval": "Steps between updates of FP8 scales; ignored since Transformer Engine 1.8.",
    "fp8_amax_history_len": "Steps whose largest values count for delayed FP8 scaling.",
    "fp8_amax_compute_algo": "How the history gives the FP8 scale: max or most_recent.",
    "fp8_wgrad": "Computes weight gradients in FP8 too.",
    "fp8_dot_product_attention": "Computes the attention core in FP8.",
    "fp8_multi_head_attention": "Keeps FP8 between the projections and the attention core.",
    "fp8_output_proj": "Computes the output layer in MXFP8.",
    "fp8_param": "Stores the weights in FP8.",
    "fp8_param_gather": "Stores the weights in FP8 and gathers them so.",
    "fp8_quantizer_factory": "Import path of the function behind the custom FP8 recipe.",
    "activation_func_fp8_input_store": "Stores the activation's input in FP8 for the backward pass.",
    "first_last_layers_bf16": "Keeps the first and last layers in bfloat16 during FP8 training.",
    "num_layers_at_start_in_bf16": "Layers at the start that stay in bfloat16.",
    "num_layers_at_end_in_bf16": "Layers at the end that stay in bfloat16.",
    "tp_only_amax_red": "Shares FP8 maxima over tensor-parallel ranks alone, not data-parallel ones.",
    "disable_parameter_transpose_cache": "Transposes FP8 weights anew for every microbatch.",
    "fp4": "Format of FP4 training: e2m1.",
    "fp4_recipe": "How FP4 scales are found: nvfp4 or custom.",
    "fp4_param": "Stores the weights in FP4.",
    "fp4_param_gather": "Stores the weights in FP4 and gathers them so.",
    "fp4_quantizer_factory": "Import path of the function behind the custom FP4 recipe.",
    "use_kitchen": "Quantizes layers through the kitchen extension.",
    "kitchen_config_file": "YAML file that sets kitchen quantization by module.",
    "kitchen_recipe_number": "Index of the built-in kitchen recipe that every linear layer gets.",
    "use_kitchen_attention": "Takes attention from the kitchen extension.",
    "kitchen_attention_backend": "Attention of the kitchen extension: sdpa or fa.",
    # Fused kernels
    "masked_softmax_fusion": "Fuses scaling, masking and softmax of attention scores.",
    "bias_activation_fusion": "Fuses the bias with the feed-forward activation.",
    "bias_gelu_fusion": "Fuses the bias with GELU.",
    "bias_swiglu_fusion": "Fuses the bias with SwiGLU.",
    "bias_dropout_fusion": "Fuses the bias with dropout and the residual sum.",
    "apply_rope_fusion": "Rotates queries and keys in a fused kernel.",
    "fused_single_qkv_rope": "Rotates queries and keys before the joint projection is split.",
    "fused_residual_rmsnorm": "Fuses the residual sum with RMSNorm in Transformer Engine.",
    "use_fused_weighted_squared_relu": "Fuses squared ReLU with the routing weight of experts.",
    "persist_layer_norm": "Uses the persistent LayerNorm kernel, made for certain hidden sizes.",
    "no_persist_layer_norm": "Avoids the persistent LayerNorm kernel.",
    "memory_efficient_layer_norm": "Uses Apex's LayerNorm that stores less for the backward pass.",
    "cross_entropy_loss_fusion": "Computes the loss in a fused kernel.",
    "cross_entropy_fusion_impl": "Who supplies the fused loss: native or te.",
    "use_transformer_engine_op_fuser": "Lets Transformer Engine fuse sequences of operations.",
    "use_grouped_gemm_for_dense_mlp": "Runs dense feed-forward blocks as a grouped product of one.",
    "disable_jit_fuser": "Leaves functions to run without JIT compilation.",
    "clone_scatter_output_in_embedding": "Copies the scattered embedding, so that the full one can be freed.",
    # Recomputation and offloading
    "recompute_granularity": "What the backward pass recomputes: full layers, or selective modules.",
    "recompute_method": "Which layers full recomputation takes: uniform groups, or a block per stage.",
    "recompute_num_layers": "Layers per uniform group, or recomputed layers per stage.",
    "recompute_modules": "Modules that selective recomputation takes, such as core_attn or moe.",
    "recompute_activations": "Short form of selective recomputation.",
    "distribute_saved_activations": "Splits saved layer inputs over the tensor-parallel ranks.",
    "checkpoint_activations": "Former switch for recomputation; setting it ends the program.",
    "moe_layer_recompute": "Recomputes whole expert layers in the backward pass.",
    "cpu_offloading": "Moves layers' saved activations to the CPU; flags set it from the layer count.",
    "cpu_offloading_num_layers": "Layers whose saved tensors go to the CPU.",
    "cpu_offloading_activations": "Includes activations in the offloading by layer.",
    "cpu_offloading_weights": "Includes weights in the offloading by layer.",
    "cpu_offloading_double_buffering": "Reloads one layer's tensors while another's are in use.",
    "cpu_offloading_retain_pinned_cpu_buffers": "Keeps the pinned CPU buffers from step to step.",
    "_cpu_offloading_context": "Context object of the offloading by layer; internal.",
    "fine_grained_activation_offloading": "Moves the inputs of chosen modules to the CPU.",
    "offload_modules": "Modules whose inputs go to the CPU, such as core_attn or moe_act.",
    "min_offloaded_tensor_size": "Smallest tensor that is offloaded, in elements.",
    "activation_offload_fraction": "Share of eligible module inputs to offload, 0 to 1.",
    "delta_offload_bytes_across_pp_ranks": "Bytes that each later pipeline rank keeps back from offloading.",
    "delay_offload_until_cuda_graph": "Starts offloading copies when the CUDA graph is replayed.",
    "fine_grained_offloading_max_inflight_offloads": "Copies to the CPU that may be pending per module name.",
    # CUDA graphs
    "cuda_graph_impl": "Who captures CUDA graphs: none, local, transformer_engine or full_iteration.",
    "cuda_graph_modules": "Parts of a layer captured in CUDA graphs, such as attn or mlp.",
    "cuda_graph_scope": "What is captured in CUDA graphs; older name of cuda_graph_modules.",
    "cuda_graph_scope_deprecated": (
        "Value of the older cuda-graph-scope flag, passed on to cuda_graph_modules."
    ),
    "cuda_graph_warmup_steps": "Steps run before CUDA graphs are captured.",
    "cuda_graph_use_single_mempool": "Lets CUDA graphs share a single memory pool.",
    "cuda_graph_retain_backward_graph": "Retains the autograd graph while backward CUDA graphs are captured.",
    "enable_cuda_graph": "Former switch for locally captured CUDA graphs.",
    "external_cuda_graph": "Former switch for CUDA graphs captured by Transformer Engine.",
    "inference_cuda_graph_scope": "Owner of CUDA graphs in inference: none, layer or block.",
    # Mixture of experts
    "num_experts": "Experts per expert layer; none builds dense layers.",
    "moe_layer_freq": "Which layers have experts: one in N, or by pattern.",
    "moe_ffn_hidden_size": "Inner width of each expert; that of dense layers unless set.",
    "moe_latent_size": "Width to which tokens are projected before the experts.",
    "moe_shared_expert_intermediate_size": (
        "Inner width of all shared experts together; none has no shared expert."
    ),
    "moe_shared_expert_gate": "Gates the shared expert's output.",
    "moe_shared_expert_overlap": "Runs the shared expert while tokens travel between ranks.",
    "moe_shared_expert_glu_interleave_size": (
        "Block size in which the shared expert's gate and linear units alternate."
    ),
    "use_grouped_gemm_for_shared_expert": "Runs the shared expert as a grouped product of one.",
    "moe_router_topk": "Experts that each token is sent to.",
    "moe_router_score_function": "Turns router logits into scores: softmax, sigmoid or sqrtsoftplus.",
    "moe_router_pre_softmax": "Takes scores before choosing experts instead of after.",
    "moe_router_topk_scaling_factor": "Factor on the routing weights of the chosen experts.",
    "moe_router_num_groups": "Groups of experts, of which each token uses only some.",
    "moe_router_group_topk": "Groups of experts that a token may use.",
    "moe_router_topk_limited_devices": (
        "Expert-parallel ranks that a token may use; replaced by expert groups."
    ),
    "moe_router_dtype": "Data type of routing: fp32, fp64, or the layer's own.",
    "moe_router_fusion": "Fuses the choice of experts and the balance loss.",
    "moe_router_load_balancing_type": (
        "How expert load is balanced, such as aux_loss, seq_aux_loss or sinkhorn."
    ),
    "moe_aux_loss_coeff": "Weight of the balance loss, one per balancing type.",
    "moe_z_loss_coeff": "Weight of the loss that keeps router logits small.",
    "moe_router_enable_expert_bias": "Balances load by a bias on each expert's score, without a loss.",
    "moe_router_bias_update_rate": "Step by which expert biases move each training step.",
    "moe_router_quantile_balancing_ema": "Share of the old bias kept under quantile balancing, 0 to 1.",
    "moe_router_force_load_balancing": "Routes by random logits, for benchmarks.",
    "moe_router_force_biased": "Spread of random expert biases for benchmarks; negative keeps them fixed.",
    "moe_input_jitter_eps": "Relative size of random noise on the router's input.",
    "moe_apply_probs_on_input": "Multiplies routing weights into the experts' input instead of their output.",
    "moe_enable_routing_replay": "Lets recorded routing decisions be replayed.",
    "moe_expert_capacity_factor": "Expert capacity over the mean load; none drops no token.",
    "moe_expert_rank_capacity_factor": (
        "Capacity of an expert-parallel rank over the mean load; none is unbounded."
    ),
    "moe_pad_expert_input_to_capacity": "Pads every expert's tokens up to its capacity.",
    "moe_token_drop_policy": "Which tokens go beyond capacity: those with low probs, or late position.",
    "moe_token_dropping": "Meant to drop tokens beyond capacity; read by no release.",
    "moe_router_padding_for_fp8": "Older name of moe_router_padding_for_quantization.",
    "moe_router_padding_for_quantization": (
        "Pads each expert's tokens to multiples that FP8 or FP4 products need."
    ),
    "moe_pad_experts_for_cuda_graph_inference": (
        "Pads expert inputs while decoding, so that CUDA graphs work."
    ),
    "moe_grouped_gemm": "Runs a rank's experts in one grouped matrix product.",
    "moe_use_legacy_grouped_gemm": "Uses the older grouped product instead of Transformer Engine's.",
    "moe_single_grouped_weight": "Stores all weights of a rank's experts as a single parameter.",
    "moe_single_grouped_bias": "Stores all biases of a rank's experts as a single parameter.",
    "moe_mlp_glu_interleave_size": "Block size in which the experts' gate and linear units alternate.",
    "moe_permute_fusion": "Fuses the reordering of tokens by expert.",
    "moe_permute_fusion_into_hybridep": "Fuses the reordering of tokens into HybridEP's exchange.",
    "moe_per_layer_logging": "Logs balance losses layer by layer.",
    "moe_use_upcycling": "Turns a dense checkpoint into one with experts and saves it.",
    "moe_upcycling_granularity": "Dense inner width over expert inner width in upcycling.",
    # Token exchange between experts
    "moe_token_dispatcher_type": "How tokens reach their experts: allgather, alltoall or flex.",
    "moe_enable_deepep": "Former switch for DeepEP in the flex dispatcher.",
    "moe_flex_dispatcher_backend": "Library behind the flex dispatcher: deepep, hybridep or ncclep.",
    "moe_flex_dispatcher_num_sms": "Multiprocessors for the flex dispatcher's communication.",
    "moe_deepep_num_sms": (
        "Multiprocessors for DeepEP's communication; replaced by moe_flex_dispatcher_num_sms."
    ),
    "moe_hybridep_num_sms": (
        "Multiprocessors for HybridEP's communication; replaced by moe_flex_dispatcher_num_sms."
    ),
    "moe_hybridep_num_sms_preprocessing": "Multiprocessors for HybridEP's scan before the exchange.",
    "moe_hybridep_num_blocks_permute": "CUDA blocks that HybridEP uses to sort tokens by expert.",
    "moe_hybridep_num_blocks_unpermute": "CUDA blocks that HybridEP uses to restore the order of tokens.",
    "moe_hybridep_pad_uneven_dispatch_inputs": (
        "Pads HybridEP's input to the largest token count of the group."
    ),
    "moe_ncclep_static_shape": "Gives experts the whole receive buffer, so that shapes never change.",
    "moe_ncclep_zero_copy": "Exchanges tokens through symmetric memory without a staging copy.",
    "overlap_moe_expert_parallel_comm": "Overlaps token exchange with the compute of another microbatch.",
    "overlap_dispatch_backward_with_experts_wgrad": (
        "Overlaps the backward token exchange with the experts' weight gradients."
    ),
    "ep_overlap_early_attn_memory_release": (
        "Runs attention's backward pass earlier in that overlap, to free memory."
    ),
    "high_priority_a2a_comm_stream": "Gives the token exchange a stream of high priority.",
    "moe_paged_stash": "Keeps expert activations in pages until the backward pass.",
    "moe_paged_stash_page_size": "Tokens per page of the activation stash.",
    "moe_paged_stash_buffer_size_factor_cuda": (
        "Size of the device stash relative to mean need; negative takes the largest."
    ),
    "moe_paged_stash_buffer_size_factor_cpu": "Size of the CPU stash, by the same rule; 0 has none.",
    # Traces of routing
    "moe_routing_trace_path": "Directory for records of which experts tokens took.",
    "moe_routing_trace_max_training_iters": "Steps after which routing is no longer recorded.",
    "moe_routing_trace_capture_logits": "Adds router logits to the routing records.",
    "moe_routing_trace_capture_hidden_states": "Adds router inputs to the routing records.",
    "moe_routing_trace_dump_weights": "Saves router weights beside the routing records.",
    # Batch and length of the run
    "micro_batch_size": "Samples per microbatch on each data-parallel rank.",
    "global_batch_size": "Samples per optimizer step over all data-parallel ranks and microbatches.",
    "batch_size": "Former name of the microbatch size; any value is refused.",
    "rampup_batch_size": "Starting batch, increment and samples over which the global batch grows.",
    "step_batch_size_schedule": "Global batch by phase, as pairs of starting tokens or samples and size.",
    "decrease_batch_size_if_needed": (
        "Rounds the global batch down where the data-parallel ranks do not divide it."
    ),
    "train_iters": "Optimizer steps in the whole training, earlier runs included.",
    "train_samples": "Samples in the whole training, earlier runs included.",
    "phase_transition_iterations": "Steps at which to save and exit, so that data can change.",
    "iterations_to_skip": "Steps, counted from one, that are left out of training.",
    "calculate_per_token_loss": "Averages the loss over all unpadded tokens of the global batch.",
    "skip_train": "Evaluates and exits without training.",
    "finetune": "Starts from a checkpoint's weights at step zero, without optimizer and random state.",
    # Leaving and resuming
    "exit_interval": "Saves and exits at the first step that is a multiple of this.",
    "exit_duration_in_mins": "Running time after which the program saves and exits, in minutes.",
    "exit_signal_handler": "Saves and exits when the exit signal arrives.",
    "exit_signal": "Signal that asks for saving and exiting; SIGTERM unless set.",
    "exit_signal_handler_for_training": "Shuts down quietly on SIGINT or SIGTERM, without long tracebacks.",
    "exit_signal_handler_for_dataloader": (
        "Meant to handle the exit signal in data workers; read by no release."
    ),
    "exit_on_missing_checkpoint": "Exits when there is no checkpoint to load, instead of starting anew.",
    "adlr_autoresume": "Asks the cluster's scheduler to resume the job when it must stop.",
    "adlr_autoresume_interval": "Steps between looks at the scheduler's stop request.",
    # Evaluation
    "eval_interval": "Training steps between evaluations.",
    "eval_iters": "Batches per evaluation, for validation and test.",
    "eval_micro_batch_size": "Samples per microbatch in evaluation; that of training unless set.",
    "eval_global_batch_size": "Samples per evaluation batch; that of training unless set.",
    "start_eval_at_iter": "First training step that may be followed by evaluation.",
    "full_validation": "Evaluates on the whole validation set each time.",
    "multiple_validation_sets": "Evaluates on each validation set apart.",
    "validation_set_names": "Names of the validation sets in logs, in order.",
    # Housekeeping of the loop
    "seed": "Seed of all random generators.",
    "data_parallel_random_init": "Gives each data-parallel rank its own seed before initialization.",
    "init_method": "Callable that initializes weights.",
    "output_layer_init_method": (
        "Callable that initializes the output projections of attention and feed-forward blocks."
    ),
    "embedding_init_method": "Callable that initializes embeddings.",
    "init_method_std": "Standard deviation of initial weights.",
    "embedding_init_method_std": (
        "Standard deviation of initial embeddings; setting it frees them from weight decay."
    ),
    "init_method_xavier_uniform": "Initializes weights by the Xavier uniform rule.",
    "perform_initialization": "Initializes weights; off where a checkpoint replaces them anyway.",
    "use_cpu_initialization": "Initializes weights on the CPU, alike for every tensor-parallel size.",
    "te_rng_tracker": "Uses Transformer Engine's random state tracker, which CUDA graphs need.",
    "inference_rng_tracker": "Uses a random state tracker made for inference.",
    "deterministic_mode": "Refuses or replaces operations whose results vary between runs.",
    "batch_invariant_mode": "Uses kernels whose results do not depend on the batch.",
    "manual_gc": "Collects garbage at set steps only, alike on all ranks.",
    "manual_gc_interval": "Steps between garbage collections; 0 has none between steps.",
    "manual_gc_eval": "Collects garbage before and after each evaluation.",
    "empty_unused_memory_level": "Times per step that the device cache is emptied: 0, 1 or 2.",
    "train_sync_interval": "Steps between synchronizations of host and device.",
    "enable_experimental": "Unlocks functions that are marked experimental.",
    "config_logger_dir": "Directory to which the configs of entry points are written.",
    "result_rejected_tracker_filename": "File that collects the results that validation refused.",
    "gpu_sniff_test_interval": "Steps between speed checks that single out slow devices.",
    # Result validation and reruns
    "rerun_mode": "Whether suspicious steps are rerun: disabled, validate_results or report_stats.",
    "error_injection_rate": "Validations per false error put in for tests; 0 has none.",
    "error_injection_type": "Kind of false error: correct_result, transient_error or persistent_error.",
    "check_for_spiky_loss": "Treats a sudden jump of the loss as a suspicious result.",
    # Data
    "data_path": "Data sets by path prefix, each with its weight where there are several.",
    "train_data_path": "Data sets for training alone, by weight and path prefix.",
    "valid_data_path": "Data sets for validation alone, by weight and path prefix.",
    "test_data_path": "Data sets for testing alone, by weight and path prefix.",
    "data_args_path": "File that holds the data-path value, for long lists.",
    "per_split_data_args_path": "JSON file with the data paths of train, valid and test.",
    "split": "Shares of training, validation and test, such as 99,1,0.",
    "data_cache_path": "Directory for the index files of data sets.",
    "mock_data": "Trains on made-up data instead of files.",
    "mmap_bin_files": "Maps data files into memory instead of reading them.",
    "object_storage_cache_path": "Local directory for index files of data in object storage.",
    "s3_cache_path": "Local directory for index files of data in S3, until 0.12.",
    "num_dataset_builder_threads": "Threads per rank that build data set indices.",
    "mid_level_dataset_surplus": "Extra samples drawn from each blended data set, as a share.",
    "renormalize_blend_weights": "Corrects blend weights for the extra samples of each data set.",
    "per_dataset_sequences_path": "JSON file with the number of sequences in each data set.",
    "dataloader_fast_cache_load": "Loads data set indices from a complete cache without checks.",
    "dataloader_defer_npy_index_mmap": "Maps index files into memory at their first use.",
    "dataloader_inter_document_masking": (
        "Returns document boundaries, so that attention stays within a document."
    ),
    "dataloader_type": "Order of the data: single pass, cyclic with shuffling, or external.",
    "data_sharding": "Shuffles within a fixed shard per data-parallel rank, when cyclic.",
    "num_workers": "Loader processes per rank.",
    "create_attention_mask_in_dataloader": (
        "Builds the attention mask with the data instead of in the kernel."
    ),
    "eod_mask_loss": "Leaves end-of-document tokens out of the loss.",
    "allow_ambiguous_pad_tokens": "Keeps pad tokens in the loss when their id is also another token's.",
    "sample_rate": "Share of the retrieval data to keep; legacy tasks only.",
    "mask_prob": "Share of tokens that are masked in BERT-like training.",
    "short_seq_prob": "Share of sequences that are cut short in BERT-like training.",
    "enable_msc": "Reads and writes files through the Multi-Storage Client.",
    "disable_msc_deprecated": "Former switch against the Multi-Storage Client; without effect since 0.18.",
    # Fill-in-the-middle data
    "fim_data": "Trains on samples with their middle moved to the end.",
    "fim_rate": "Share of samples that are rearranged, 0 to 1.",
    "fim_spm_rate": "Share of rearranged samples that put the suffix first.",
    "fim_split_sample": "Text at which samples are cut into fragments first.",
    "fim_fragment_rate": "Share of fragments that are rearranged, 0 to 1.",
    "fim_no_prefix": "Beginning of fragments that are never rearranged.",
    "fim_prefix_token": "Token that introduces the prefix.",
    "fim_middle_token": "Token that introduces the middle.",
    "fim_suffix_token": "Token that introduces the suffix.",
    "fim_pad_token": "Token that pads rearranged samples.",
    "fim_eod_token": "Token that ends a document in rearranged data.",
    # Tokenizer
    "tokenizer_type": "Kind of tokenizer, such as HuggingFaceTokenizer or NullTokenizer.",
    "tokenizer_model": "File, directory or hub name of the tokenizer.",
    "vocab_file": "File with the vocabulary.",
    "merge_file": "File with the byte-pair merges.",
    "vocab_extra_ids": "Extra ids for masked spans in T5, added to the vocabulary.",
    "tiktoken_pattern": "Splitting rule of tiktoken: v1 or v2.",
    "tiktoken_num_special_tokens": "Ids that tiktoken sets aside for special tokens.",
    "tiktoken_special_tokens": "Special tokens of tiktoken, in order.",
    "tokenizer_special_tokens": "Special tokens to add to the tokenizer; this name until 0.17.",
    "special_tokens": "Special tokens to add to the tokenizer; this name from 0.18.",
    "tokenizer_metadata": "JSON file that describes the tokenizer; this name until 0.17.",
    "metadata_path": "JSON file that describes the tokenizer; this name from 0.18.",
    "legacy_tokenizer": "Uses the tokenizers from before Megatron Core.",
    "trust_remote_code": "Lets a Hugging Face tokenizer run code from its repository.",
    "tokenizer_hf_use_fast": "Uses the fast kind of Hugging Face tokenizer.",
    "tokenizer_hf_no_use_fast": "Avoids the fast kind of Hugging Face tokenizer.",
    "tokenizer_hf_include_special_tokens": "Adds special tokens when a Hugging Face tokenizer encodes text.",
    "tokenizer_hf_no_include_special_tokens": (
        "Adds no special tokens when a Hugging Face tokenizer encodes text."
    ),
    "tokenizer_sentencepiece_legacy": (
        "Uses the older SentencePiece wrapper, which can encode special tokens."
    ),
    "tokenizer_sentencepiece_ignore_extra_whitespaces": (
        "Drops surplus blanks before SentencePiece encodes text."
    ),
    "null_tokenizer_eod_id": "End-of-document id of the null tokenizer.",
    "null_tokenizer_pad_id": "Pad id of the null tokenizer; -1 has none.",
    "chat_template": "Jinja template that turns conversations into text.",
    "sft": "Trains on conversations, supervised on the answers.",
    "sft_tokenizer_prompt_format": "Name of the conversation format in supervised fine-tuning.",
    # Checkpoints
    "save": "Directory to write checkpoints to.",
    "load": "Directory to read a checkpoint from.",
    "pretrained_checkpoint": "Directory with weights to start from when there is no checkpoint to load.",
    "save_interval": "Steps between checkpoints that are kept on lasting storage.",
    "save_retain_interval": "Steps between checkpoints that are never deleted.",
    "ckpt_step": "Step whose checkpoint is loaded instead of the last.",
    "override_ckpt_iteration": "Step to resume at in place of the checkpoint's own.",
    "ckpt_format": "Format of checkpoints: torch_dist, torch, torch_dcp, fsdp_dtensor or zarr.",
    "auto_detect_ckpt_format": "Finds out the format of a checkpoint when loading it.",
    "ckpt_convert_format": "Format to convert a loaded checkpoint to.",
    "ckpt_convert_save": "Directory for the converted checkpoint.",
    "ckpt_convert_update_legacy_dist_opt_format": (
        "Brings optimizer state from before February 2024 to the present format."
    ),
    "use_dist_ckpt_deprecated": "Former switch for distributed checkpoints; ckpt_format replaces it.",
    "dist_ckpt_format_deprecated": "Former name of the checkpoint format.",
    "no_save_optim": "Leaves optimizer state out of checkpoints.",
    "no_save_rng": "Leaves random states out of checkpoints.",
    "no_load_optim": "Loads no optimizer state.",
    "no_load_rng": "Loads no random states.",
    "load_main_params_from_ckpt": (
        "Loads master weights from the checkpoint's weights, without optimizer state."
    ),
    "load_model_opt_format": "Loads a checkpoint written by ModelOpt or NeMo.",
    "use_checkpoint_args": "Takes the model's arguments from the checkpoint.",
    "use_mp_args_from_checkpoint_args": "Takes parallel sizes from the checkpoint as well.",
    "use_tokenizer_model_from_checkpoint_args": "Takes the tokenizer's path from the checkpoint as well.",
    "ckpt_fully_parallel_save": "Spreads checkpoint writing over all data-parallel ranks.",
    "ckpt_fully_parallel_save_deprecated": "Former switch for parallel writing, now the rule.",
    "ckpt_fully_parallel_save_process_group": "Ranks that share the writing: dp or ep_dp.",
    "ckpt_fully_parallel_load": "Spreads checkpoint reading over all data-parallel ranks.",
    "ckpt_fully_parallel_load_process_group": "Ranks that share the reading: dp or ep_dp.",
    "ckpt_fully_parallel_load_exchange_algo": (
        "How ranks pass on what they read: broadcast, gather_rounds or gather_object."
    ),
    "ckpt_load_validate_sharding_integrity": "Checks on loading that every shard is read exactly once.",
    "ckpt_assume_constant_structure": "Reuses the plan of the first save for later ones.",
    "dist_ckpt_strictness": "What missing or surplus keys on loading lead to, from silence to errors.",
    "dist_ckpt_optim_fully_reshardable": "Saves optimizer state so that all parallel sizes may change.",
    "distrib_optim_fully_reshardable_mem_efficient": (
        "Saves that optimizer state through Gloo and one rank, sparing memory."
    ),
    "dist_ckpt_save_pre_mcore_014": "Writes checkpoints in the layout from before release 0.14.",
    "dist_ckpt_workers": "Writer processes per rank for asynchronous saves.",
    "strict_fsdp_dtensor_load": "Refuses FSDP checkpoints that lack some of the weights.",
    "stream_ckpt_dequant": "Restores quantized weights one at a time on loading.",
    "verify_integrity": "Writes checksums with checkpoints and checks them on loading.",
    "async_save": "Writes checkpoints in the background while training goes on.",
    "async_strategy": "Library that writes in the background: nvrx or mcore.",
    "use_persistent_ckpt_worker": "Keeps one background writer alive between saves.",
    "async_ckpt_cpu_priority": "Nice value of the background writer, 0 to 19.",
    "async_ckpt_io_priority": "I/O class of the background writer, 0 to 3; 3 is idle.",
    "async_ckpt_use_cpu_shm": "Hands tensors to the background writer through shared CPU memory.",
    # Short-lived and replicated checkpoints
    "non_persistent_save_interval": "Steps between short-lived checkpoints.",
    "non_persistent_ckpt_type": "Where short-lived checkpoints go: global, local or in_memory.",
    "non_persistent_global_ckpt_dir": "Shared directory for short-lived checkpoints.",
    "non_persistent_local_ckpt_dir": "Directory on each machine for short-lived checkpoints.",
    "non_persistent_local_ckpt_algo": "How local checkpoints are written: fully_parallel or atomic.",
    "replication": "Copies local checkpoints to other machines.",
    "replication_factor": "Machines that hold each rank's local checkpoint.",
    "replication_jump": "Distance between ranks that hold copies of each other, in ranks.",
    # Dumps for debugging
    "save_params_interval": "Steps between dumps of all weights.",
    "save_activations_interval": "Steps between dumps of all activations.",
    "save_wgrads_interval": "Steps between dumps of weight gradients.",
    "save_dgrads_interval": "Steps between dumps of input gradients.",
    "save_tokens_per_expert_interval": "Steps between dumps of the tokens that each expert got.",
    # Logs
    "log_interval": "Steps between lines of loss and timing.",
    "log_throughput": "Logs floating-point operations per second and device.",
    "log_progress": "Appends tokens and operations so far to progress.txt beside the checkpoints.",
    "log_params_norm": "Logs the norm of all weights.",
    "log_num_zeros_in_grad": "Logs how many gradient elements are zero.",
    "log_max_attention_logit": "Logs the largest attention score of the model.",
    "log_energy": "Logs the energy used, in joules.",
    "log_memory_interval": "Steps between lines of memory use; a multiple of log_interval.",
    "log_device_memory_used": "Adds the whole device's memory use to those lines, in MB.",
    "log_timers_to_tensorboard": "Writes timers to TensorBoard.",
    "log_loss_scale_to_tensorboard": "Writes the loss scale to TensorBoard.",
    "log_validation_ppl_to_tensorboard": "Sends the perplexity of validation to TensorBoard.",
    "log_memory_to_tensorboard": "Writes memory use to TensorBoard.",
    "log_world_size_to_tensorboard": "Writes the number of ranks to TensorBoard.",
    "tensorboard_dir": "Directory for TensorBoard's event files.",
    "tensorboard_log_interval": "Steps between TensorBoard entries.",
    "tensorboard_queue_size": "Entries that TensorBoard holds back before it writes.",
    "wandb_project": "Project at Weights & Biases; none logs nothing there.",
    "wandb_entity": "User or team at Weights & Biases.",
    "wandb_exp_name": "Name of the run at Weights & Biases.",
    "wandb_save_dir": "Local directory for files of Weights & Biases.",
    "timing_log_level": "Detail of timers: 0 steps, 1 their main parts, 2 everything.",
    "timing_log_option": "Timers shown over ranks: max, minmax or all.",
    "barrier_with_L1_time": "Synchronizes ranks around timers of level 1.",
    "logging_level": "Threshold of Python's logging, as a number.",
    "enable_one_logger": "Sends metrics to NVIDIA's internal one_logger where it is installed.",
    "one_logger_project": "Project name for one_logger.",
    "one_logger_run_name": "Run name for one_logger.",
    "one_logger_async": "Sends metrics to one_logger without waiting.",
    "app_tag_run_name": "Name that jobs of one training share in one_logger.",
    "app_tag_run_version": "Version of the training in one_logger.",
    # Profiling
    "profile": "Profiles a range of steps, by Nsight Systems or PyTorch.",
    "profile_ranks": "Ranks that are profiled, by global index.",
    "profile_step_start": "First step that is profiled.",
    "profile_step_end": "Step at which profiling stops.",
    "use_pytorch_profiler": "Profiles with PyTorch instead of Nsight Systems.",
    "pytorch_profiler_collect_shapes": "Records tensor shapes in PyTorch's profile.",
    "pytorch_profiler_collect_callstack": "Records call stacks in PyTorch's profile.",
    "pytorch_profiler_collect_chakra": "Records a Chakra execution trace beside PyTorch's profile.",
    "nvtx_ranges": "Marks phases of the step for Nsight Systems.",
    "record_shapes": "Adds tensor shapes to the marks for Nsight Systems.",
    "record_memory_history": "Records allocations on the device of the last rank.",
    "memory_snapshot_path": "File for the recorded allocations.",
    "run_workload_inspector_server": "Starts a server through which a running job can be profiled.",
    # Slow and failing ranks
    "log_straggler": "Measures the speed of every device and logs the extremes.",
    "straggler_minmax_count": "Ranks to list as slowest and as fastest.",
    "straggler_ctrlr_port": "Port on which that measurement is switched on and off.",
    "disable_straggler_on_startup": "Leaves that measurement off until switched on.",
    "enable_ft_package": "Reports progress to NVIDIA's fault tolerance package.",
    "calc_ft_timeouts": "Lets the fault tolerance package derive timeouts from the run.",
    "ft_num_warmup_iters": "First steps that the fault tolerance package does not time.",
    "inprocess_restart": "Restarts training after a fault without ending the processes.",
    "inprocess_active_world_size": "Ranks at work; all others wait as a reserve.",
    "inprocess_granularity": "What is replaced after a fault: node or rank.",
    "inprocess_max_iterations": "Meant to bound the restarts; read by no release.",
    "inprocess_heartbeat_interval": "Seconds between signs of life of a rank.",
    "inprocess_heartbeat_timeout": "Seconds without a sign of life until a rank counts as lost.",
    "inprocess_soft_timeout": "Seconds without progress until a rank is interrupted.",
    "inprocess_hard_timeout": "Seconds without progress until a rank is killed.",
    "inprocess_termination_grace_time": "Seconds between SIGTERM and SIGKILL for a stuck rank.",
    "inprocess_last_call_wait": "Seconds in which other ranks may report faults of their own.",
    "inprocess_barrier_timeout": "Seconds that ranks wait for each other before a restart.",
    "inprocess_completion_timeout": "Seconds that ranks wait for each other at the end.",
    "inprocess_monitor_process_interval": "Seconds between checks by the watching process.",
    "inprocess_monitor_thread_interval": "Seconds between checks by the watching thread.",
    "inprocess_progress_watchdog_interval": "Meant as seconds between progress stamps; read by no release.",
    "inprocess_empty_cuda_cache": "Empties the device cache at every restart.",
    "fault_injector_ranks": "Ranks on which a fault is staged, by global index.",
    "fault_injector_num_ranks": "Randomly drawn ranks on which a fault is staged; never rank 0.",
    "fault_injector_fault_types": "Kinds of fault to draw from, such as hang or crash.",
    "fault_injector_fault_probabilities": "Relative weights of the kinds of fault.",
    "fault_injector_fault_delay": "Seconds until the fault; none draws them at random.",
    "fault_injector_mtti_seconds": "Mean of the randomly drawn delay, in seconds.",
    "fault_injector_offset_seconds": "Seconds added to the randomly drawn delay.",
    "fault_injector_delay_start_iteration": (
        "Step from whose end the delay counts; none counts from the start."
    ),
    "fault_injector_seed": "Seed of the staged fault's random draws.",
    # Inference
    "inference_max_requests": "Largest number of requests in a batch.",
    "inference_max_batch_size": "Largest number of requests in a batch; this name until 0.16.",
    "inference_max_seq_length": "Longest sequence, prompt and answer together, in tokens.",
    "inference_batch_times_seqlen_threshold": (
        "Batch in tokens from which the pipeline splits it; -1 never splits."
    ),
    "inference_sampling_seed": "Seed for sampling tokens; flags set it from the seed.",
    "offset_sampling_seed_by_dp_rank": "Gives each data-parallel rank its own sampling seed.",
    "max_tokens_to_oom": "Tokens in a batch beyond which a request is refused.",
    "flash_decode": "Decodes with the kernel made for one token at a time.",
    "num_speculative_tokens": "Tokens guessed ahead in each decoding step.",
    "use_legacy_static_engine": "Uses the former engine for static batches.",
    "use_inference_optimized_layers": "Meant to switch to layers made for inference; read by no release.",
    "inference_fuse_tp_communication": "Fuses tensor-parallel collectives with the residual sum and norm.",
    "inference_disable_triton_nvls_kernels": "Avoids Triton's collectives inside the NVLink switch.",
    "inference_grouped_gemm_backend": "Who supplies the experts' grouped product, such as vllm or torch.",
    "inference_moe_token_dispatcher_type": "How tokens reach their experts in inference: nccl or nvls.",
    "inference_moe_disable_fused_quant_kernels": "Quantizes expert inputs to MXFP8 in kernels of their own.",
    "inference_disable_ep_consensus": "Lets each expert-parallel rank step without asking the others.",
    "inference_use_synchronous_zmq_collectives": (
        "Coordinates ranks by blocking ZMQ messages, for steadier timing."
    ),
    "inference_shards": "Layout of several inference models over the ranks, as text.",
    "inference_coordinator_port": "Port of the coordinator on the first machine.",
    "inference_text_gen_server_logging": "Logs every request to the text generation server.",
    "inference_logging_step_interval": "Steps between lines of inference metrics; 0 has none.",
    "inference_wandb_logging": "Sends inference metrics to Weights & Biases.",
    "mamba_inference_conv_states_dtype": "Data type of Mamba's convolution states in inference.",
    "mamba_inference_ssm_states_dtype": "Data type of Mamba's state-space states in inference.",
    # Dynamic batching
    "inference_dynamic_batching": "Lets requests join and leave the batch at every step.",
    "inference_dynamic_batching_async_sched_mode": (
        "Order of scheduling: legacy, or async that prepares steps ahead."
    ),
    "inference_dynamic_batching_buffer_size_gb": "Device memory for cached keys and values, in GB.",
    "inference_dynamic_batching_paused_buffer_size_gb": "Memory for requests that are paused, in GB.",
    "inference_dynamic_batching_buffer_guaranteed_fraction": (
        "Share of the cache kept so that running requests can finish."
    ),
    "inference_dynamic_batching_buffer_overflow_factor": "Factor by which requests may overbook the cache.",
    "inference_dynamic_batching_unified_memory_level": "Whether the cache may spill to the CPU: 0 no, 1 yes.",
    "inference_dynamic_batching_block_size": "Tokens per block of the cache.",
    "inference_dynamic_batching_chunk_size": "Tokens per block of the cache, under its name until 0.14.",
    "inference_dynamic_batching_max_requests": "Most requests at once; set by the cache unless given.",
    "inference_dynamic_batching_max_requests_override": (
        "Most requests at once, in place of the computed bound; until 0.15."
    ),
    "inference_dynamic_batching_max_tokens": "Most tokens per step; computed unless given.",
    "inference_dynamic_batching_max_tokens_override": (
        "Most tokens per step, in place of the computed bound; until 0.15."
    ),
    "inference_dynamic_batching_mamba_memory_ratio": "Share of the cache memory for Mamba states, 0 to 1.",
    "inference_dynamic_batching_logprobs_mode": (
        "Whether log-probabilities are taken before or after temperature and filters."
    ),
    "inference_dynamic_batching_sampling_backend": "Who supplies the sampling kernels: torch or flashinfer.",
    "inference_dynamic_batching_track_generated_token_events": "Stamps the time of every generated token.",
    "inference_dynamic_batching_track_paused_request_events": (
        "Notes in a request's history when it was paused."
    ),
    "enable_chunked_prefill": "Splits long prompts over several steps.",
    "disable_chunked_prefill": "Processes prompts whole; this name until 0.16.",
    "inference_dynamic_batching_enable_prefix_caching": (
        "Shares cached blocks between requests with the same beginning."
    ),
    "inference_dynamic_batching_prefix_caching_eviction_policy": (
        "When shared blocks are freed: ref_zero at once, lru on need."
    ),
    "inference_dynamic_batching_prefix_caching_coordinator_policy": (
        "How requests are assigned to ranks, by load or shared beginnings."
    ),
    "inference_dynamic_batching_prefix_caching_routing_alpha": (
        "Weight of shared beginnings against load in that choice, 0 to 1."
    ),
    "inference_dynamic_batching_prefix_caching_mamba_gb": "Device memory for shared Mamba states, in GB.",
    "inference_dynamic_batching_num_cuda_graphs": (
        "CUDA graphs to capture for different batch sizes; -1 decides itself."
    ),
    "inference_dynamic_batching_cuda_graph_max_tokens": "Tokens in the largest captured batch, until 0.17.",
    "inference_cuda_graph_max_tokens": "Tokens in the largest captured batch that has prompts.",
    "inference_cuda_graph_all_prefills": "Captures batches with prompts up to the most tokens per step.",
    "inference_dynamic_batching_cuda_graph_mixed_prefill_count": (
        "Prompts in the captured batches that mix prompts and decoding."
    ),
    "inference_dynamic_batching_cuda_graph_sizing_distribution": (
        "Spacing of captured batch sizes: exponential or linear."
    ),
    "decode_only_cuda_graphs": "Uses CUDA graphs only in steps without prompts.",
    # Reinforcement learning
    "perform_rl_step": "Trains by reinforcement learning on generated answers.",
    "grpo_prompts_per_step": "Prompts per collection of answers.",
    "grpo_group_size": "Answers per prompt, compared with each other.",
    "grpo_iterations": "Passes over the collected answers before new ones are generated.",
    "grpo_clamp_eps_lower": "How far below one the probability ratio may go.",
    "grpo_clamp_eps_upper": "How far above one the probability ratio may go.",
    "grpo_kl_beta": "Weight of the divergence from the reference model in the loss.",
    "grpo_entropy_term_weight": "Weight of the entropy term in the loss.",
    "grpo_filter_groups_with_same_reward": "Drops prompts whose answers all got equal rewards.",
    "grpo_default_temperature": "Sampling temperature of answers; this name in 0.15.",
    "grpo_default_top_p": "Sampling cut by total probability; this name in 0.15.",
    "rl_default_temperature": "Sampling temperature of answers; this name from 0.16.",
    "rl_default_top_p": "Sampling cut by total probability; this name from 0.16.",
    "rl_default_top_k": "Sampling cut to the likeliest tokens; -1 has none.",
    "rl_prompts_per_eval": "Prompts per task in an evaluation.",
    "langrl_env_config": "YAML file with the tasks and their weights.",
    "langrl_inference_server_type": "Who generates answers: inplace_megatron or inplace_megatron_chat.",
    "langrl_inference_server_conversation_template": "Conversation format of the chat server.",
    "langrl_external_server": "Starts the server that generates answers on the first rank.",
    "rl_calculate_intra_group_similarity": "Measures how alike a prompt's answers are.",
    "rl_inference_logprobs_is_correction": (
        "Corrects the loss for differences between inference and training probabilities."
    ),
    "rl_importance_sampling_truncation_coef": "Bound on the weights of that correction.",
    "rl_inference_tensor_model_parallel_size": "Tensor-parallel ranks of the inference model.",
    "rl_inference_pipeline_model_parallel_size": "Pipeline ranks of the inference model.",
    "rl_inference_expert_model_parallel_size": "Expert-parallel ranks of the inference model.",
    "rl_inference_expert_tensor_model_parallel_size": (
        "Ranks that share each expert's weights in the inference model."
    ),
    "rl_inference_model_unified_memory_level": (
        "Whether inference weights lie in unified memory: 0 no, 1 yes."
    ),
    "rl_offload_inference_model_weights_when_idle": "Moves inference weights to the CPU while training.",
    "rl_offload_optimizer_during_inference": "Moves optimizer state to the CPU while generating.",
    "rl_kv_cache_management_mode": (
        "Fate of cached keys and values while training: persist, offload or recompute."
    ),
    "rl_offload_kv_cache_during_training": "Moves cached keys and values to the CPU while training.",
    "rl_remove_kv_cache_during_training": "Frees cached keys and values while training.",
    "rl_reset_cuda_graphs": "Deletes CUDA graphs between generating and training; until 0.16.",
    "rl_persist_cuda_graphs": "Keeps CUDA graphs while the inference engine rests.",
    "rl_training_cuda_graphs": "Keeps CUDA graphs on in training as well as generating.",
    "refit_method": "How weights are copied to the inference model: nccl, gloo or nvshmem.",
    "rl_verify_model_weights_swap": "Checks the first weight copy by comparing the models' outputs.",
    "rl_partial_rollouts": "Lets generation go on while the weights are updated.",
    "rl_generation_lag": "Batches by which generated answers may lag behind the weights.",
    "rl_submission_granularity": "Unit in which generation is requested: R answers, G groups, B batches.",
    "rl_consumption_granularity": "Unit in which training takes answers: G groups or B batches.",
    "rl_num_parallel_generations": "Answers generated at the same time.",
    "rl_num_parallel_generation_batches": "Batches of prompts generated at the same time.",
    "rl_generation_batch_size": "Prompts per batch of generation.",
    "rl_parallel_generation_tasks": (
        "Generation tasks at the same time; replaced by rl_num_parallel_generations."
    ),
    "rl_inference_parsers": "Parsers of answers, such as deepseek-r1-reasoning, by name.",
    "rl_skip_bos_token": "Leaves out the token that begins a sequence.",
    "rl_use_sequence_packing": "Packs several answers into each training sequence.",
    "rl_sequence_packing_bin_size": (
        "Meant as tokens per packed sequence; only checked against the sequence length."
    ),
    "rl_sequence_packing_max_sequences_per_bin": "Most answers per packed sequence.",
    "rl_sequence_packing_algo": "How packed sequences go to ranks: fifo or round-robin.",
    "rl_profile": "Records detailed timers of reinforcement learning.",
    "rl_profile_dir": "Directory for those timers; beside the checkpoints unless set.",
    # Logits saved for distillation
    "logits_save_dir": "Directory to write a teacher's logits to.",
    "logits_save_dtype": "Data type of saved log-probabilities: fp16, bf16 or fp32.",
    "logits_save_top_k": "Largest logits to save per token.",
    "logits_save_top_p": "Probability mass beyond which no further logits are saved, 0 to 1.",
    "logits_save_top_p_min_k": "Fewest logits to save per token under that cut.",
    "logits_load_dir": "Directory to read a teacher's logits from.",
    "logits_load_kd_loss_alpha": "Weight of the teacher's loss against the data's, 0 to 1.",
    "logits_load_ignore_errors": "Goes on with the data's loss when the teacher's fails.",
    "logits_load_decode_threads": "Threads that decompress saved logits.",
    "logits_load_prefetch_factor": "Steps of saved logits to prepare ahead, from a file system.",
    "logits_load_msc_prefetch_depth": "Archives of saved logits to fetch ahead from object storage.",
    # BERT and retrieval
    "bert_binary_head": "Trains BERT to tell whether two sentences follow each other.",
    "bert_load": "Directory with a BERT checkpoint to start retrieval training from.",
    "bert_embedder_type": "Meant to choose BERT's embedder, megatron or huggingface; read by no release.",
    "output_bert_embeddings": "Returns the mean of BERT's token outputs.",
    "biencoder_projection_dim": "Width of the retrieval embeddings' projection; 0 has none.",
    "biencoder_shared_query_context_model": "Uses one model for queries and contexts.",
    "ict_head_size": "Width of block embeddings in inverse cloze training.",
    "ict_load": "Directory with an inverse cloze checkpoint.",
    "query_in_block_prob": "Share of inverse cloze blocks that keep their query.",
    "use_one_sent_docs": "Includes documents of one sentence in inverse cloze training.",
    "titles_data_path": "Data set of document titles for inverse cloze training.",
    "block_data_path": "Meant as the file of blocks to index; read by no release.",
    "embedding_path": "File with the embeddings of the retrieval index.",
    "evidence_data_path": "File with the Wikipedia passages to retrieve from.",
    "indexer_batch_size": "Blocks per batch when the index is built.",
    "indexer_log_interval": "Batches between progress lines of the index build.",
    "retriever_seq_length": "Tokens per sequence of the retriever.",
    "retriever_score_scaling": "Divides retrieval scores by the root of the hidden size.",
    "retriever_report_topk_accuracies": "Ranks k whose top-k accuracy is reported.",
    "retro_add_retriever": "Adds a retriever to the model (Retro).",
    "retro_project_dir": "Directory with Retro's chunk database and neighbours.",
    "retro_num_neighbors": "Neighbours retrieved per chunk.",
    "retro_num_retrieved_chunks": "Chunks taken from each neighbour.",
    "retro_encoder_layers": "Layers of Retro's encoder of neighbours.",
    "retro_encoder_hidden_dropout": "Dropout probability in Retro's encoder of neighbours.",
    "retro_encoder_attention_dropout": "Dropout probability of attention in Retro's encoder.",
    "retro_attention_gate": "Factor on Retro's cross attention before the residual sum.",
    "retro_cyclic_train_iters": "Steps of Retro training with cyclic data.",
    "retro_verify_neighbor_count": "Checks that there are neighbours for every sample.",
    # Vision
    "vision_pretraining": "Says that a vision model is pretrained.",
    "vision_pretraining_type": "Goal of vision training: classify, inpaint or dino.",
    "vision_backbone_type": "Vision model: vit, mit or swin.",
    "swin_backbone_type": "Size of the Swin model: tiny, base or h3.",
    "img_h": "Image height, in pixels.",
    "img_w": "Image width, in pixels.",
    "num_channels": "Colour channels per image.",
    "patch_dim": "Side of an image patch, in pixels.",
    "num_classes": "Classes of the image data.",
    "classes_fraction": "Share of the classes to train on, 0 to 1.",
    "data_per_class_fraction": "Share of each class's images to train on, 0 to 1.",
    "iter_per_epoch": "Steps that count as an epoch in DINO.",
    "head_lr_mult": "Factor on the head's learning rate in finetuning.",
    "mask_type": "How patches are masked for inpainting: random or row.",
    "mask_factor": "Factor on the size of masks for inpainting.",
    "dino_local_img_size": "Side of DINO's small crops, in pixels.",
    "dino_local_crops_number": "Small crops per image in DINO.",
    "dino_head_hidden_size": "Inner width of DINO's head.",
    "dino_bottleneck_size": "Width of the bottleneck in DINO's head.",
    "dino_freeze_last_layer": "Epochs during which DINO's last layer stays frozen.",
    "dino_norm_last_layer": "Fixes the weight norms of DINO's last layer.",
    "dino_warmup_teacher_temp": "Teacher's temperature at the start of DINO training.",
    "dino_teacher_temp": "Teacher's temperature after warm-up in DINO training.",
    "dino_warmup_teacher_temp_epochs": "Epochs in which the teacher's temperature warms up.",
}
