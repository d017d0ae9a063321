"""Checks and derivations for precision, iterations, learning rate and the sizes of the model."""

from __future__ import annotations

from bridge.stack.checks import excludes, needs, one_of, positive, set_
from compat.megatron.arguments.namespace import Change, Namespace, Predicate, Step, member_name
from compat.megatron.arguments.steps import (
    any_given,
    assign,
    check,
    compute_argument,
    derive,
    fallback,
    when,
)
from compat.megatron.releases import MAIN

PRECISION = "validate_args: parameters dtype"
GRAPHS = "validate_args: full-iteration CUDA graphs"
ITERATIONS = "validate_args: iteration-based training"
SAMPLES = "validate_args: sample-based training"
SIZES = "validate_args: model sizes"
LENGTHS = "validate_args: sequence lengths"
SAVE = "validate_args: save intervals"
MIXED = "validate_args: mixed precision"


def params_dtype(a: Namespace) -> str:
    """Return the name of the parameters' dtype in torch."""
    if a.bf16:
        return "torch.bfloat16"
    return "torch.float16" if a.fp16 else "torch.float32"


def _wide_gradients(a: Namespace) -> None:
    """Set whether gradients are accumulated in fp32, which is the default in bf16 training."""
    # main_grads_dtype came with 0.11; before, it is unset here, and fp32 is upstream's only choice.
    if a.bf16 and a.grad_reduce_in_bf16:
        a.accumulate_allreduce_grads_in_fp32 = False
    elif a.bf16 and a.main_grads_dtype in (None, "torch.float32"):
        a.accumulate_allreduce_grads_in_fp32 = True


def _needless(name: str) -> Step:
    """Return a derivation that switches `name` off if gradients are accumulated in fp32. The sums
    of gradients are then in fp32 even without `name`.
    """
    return derive(
        PRECISION, when(lambda a: a.accumulate_allreduce_grads_in_fp32, **{name: False}), since=MAIN
    )


def _local_scope(a: Namespace, scope: str) -> bool:
    """Whether CUDA graphs of the local implementation have the scope."""
    # 0.15 takes one scope, later releases a list.
    scopes = a.cuda_graph_scope if isinstance(a.cuda_graph_scope, list) else [a.cuda_graph_scope]
    return a.cuda_graph_impl == "local" and scope in map(member_name, scopes)


def _whole_iteration(a: Namespace) -> bool:
    return _local_scope(a, "full_iteration")


NAN_CHECK = (
    "check_for_nan_in_loss_and_grad: found with CUDA graphs of the full iteration; add"
    " --no-check-for-nan-in-loss-and-grad"
)

PRECISION_STEPS: tuple[Step, ...] = (
    excludes("fp16", "bf16", PRECISION),
    derive(PRECISION, compute_argument("params_dtype", params_dtype)),
    # A dynamic loss scaler takes NaNs for a sign that the scale is too large, so they must not end
    # the run.
    derive(
        PRECISION, when(lambda a: a.fp16 and not a.loss_scale, check_for_nan_in_loss_and_grad=False)
    ),
    check(
        PRECISION,
        lambda a: (
            a.bf16
            and a.accumulate_allreduce_grads_in_fp32
            and a.main_grads_dtype != "torch.float32"
        ),
        "main_grads_dtype: found {main_grads_dtype} with accumulate_allreduce_grads_in_fp32; keep one of them",
        since="0.11.0",
    ),
    derive(PRECISION, _wide_gradients),
    _needless("ddp_reduce_scatter_with_fp32_accumulation"),
    _needless("gtp_remat_reduce_scatter_with_fp32_accumulation"),
    check(
        GRAPHS,
        lambda a: (
            a.enable_cuda_graph
            and a.cuda_graph_scope == "full_iteration"
            and a.check_for_nan_in_loss_and_grad
        ),
        NAN_CHECK,
        since="0.14.0",
        until="0.15.0",
    ),
    check(
        GRAPHS,
        lambda a: (
            _whole_iteration(a)
            and not a.inference_dynamic_batching
            and a.check_for_nan_in_loss_and_grad
        ),
        NAN_CHECK,
        since="0.15.0",
        until="0.17.0",
    ),
    check(
        GRAPHS,
        lambda a: _whole_iteration(a) and a.inference_dynamic_batching and a.fp8 is not None,
        "fp8: found with dynamic batching and CUDA graphs of the full iteration; drop one of them",
        since="0.15.0",
        until="0.17.0",
    ),
    check(
        GRAPHS,
        lambda a: _whole_iteration(a) and a.check_for_nan_in_loss_and_grad,
        NAN_CHECK,
        since="0.17.0",
        until="0.18.0",
    ),
    check(
        GRAPHS,
        lambda a: a.cuda_graph_impl == "full_iteration" and a.check_for_nan_in_loss_and_grad,
        NAN_CHECK,
        since="0.18.0",
    ),
    check(
        GRAPHS,
        # The block scope of 0.18 is the full_iteration_inference of 0.17.
        lambda a: (
            (
                _local_scope(a, "full_iteration_inference")
                or member_name(a.inference_cuda_graph_scope) == "block"
            )
            and a.fp8 is not None
            and (a.transformer_impl, a.fp8_recipe) != ("inference_optimized", "mxfp8")
        ),
        "fp8: found with CUDA graphs of whole inference steps; expected transformer_impl inference_optimized"
        " and fp8_recipe mxfp8",
        since="0.17.0",
    ),
    check(
        GRAPHS,
        # -1: Megatron chooses the number of graphs by the most requests that it serves at once.
        lambda a: (
            a.cuda_graph_impl == "local"
            and a.inference_dynamic_batching_num_cuda_graphs < 1
            and a.inference_dynamic_batching_num_cuda_graphs != -1
        ),
        "inference_dynamic_batching_num_cuda_graphs: found {inference_dynamic_batching_num_cuda_graphs};"
        " expected a positive number, or -1",
        since="0.17.0",
    ),
)


def _training(unit: str, other: str, place: str) -> tuple[Step, ...]:
    """Return checks for training whose length is given in `unit`, which is `iters` or `samples`.
    They refuse any length that is given in `other`, the other unit.
    """

    def count_message(name: str) -> str:
        return f"{name}: found {{{name}}} with train_{unit}; count everything in {unit}, or everything in {other}"

    return (
        *_check_unit(unit, place, any_given(f"train_{other}"), count_message(f"train_{other}")),
        *_check_unit(
            unit, place, any_given(f"lr_decay_{other}"), count_message(f"lr_decay_{other}")
        ),
        # The default of the warmup is 0, that of the other two None.
        *_check_unit(
            unit,
            place,
            lambda a: getattr(a, f"lr_warmup_{other}") != 0,
            count_message(f"lr_warmup_{other}"),
        ),
        *_check_unit(
            unit,
            place,
            lambda a: a.lr_warmup_fraction is not None and getattr(a, f"lr_warmup_{unit}") != 0,
            f"lr_warmup_fraction: found with lr_warmup_{unit} {{lr_warmup_{unit}}}; keep one of them",
        ),
    )


def _check_unit(
    unit: str, place: str, fails: Predicate, problem: str, until: str = ""
) -> tuple[Step, Step]:
    """Return a check for training whose length is given in `unit`. Since 0.17, --skip-train
    disables the check.
    """

    def before(a: Namespace) -> object:
        return getattr(a, f"train_{unit}") and fails(a)

    return (
        check(place, before, problem, until="0.17.0"),
        check(
            place, lambda a: not a.skip_train and before(a), problem, since="0.17.0", until=until
        ),
    )


def feed_forward_width(a: Namespace) -> int:
    """Return the default width of the feed-forward layer."""
    # SwiGLU has three matrices instead of two, so its width is 2/3 of the usual one, rounded down
    # to a multiple of 64.
    return int((4 * a.hidden_size * 2 / 3) / 64) * 64 if a.swiglu else int(4 * a.hidden_size)


def _twins(name: str, encoder: str) -> Change:
    """Return a change that gives the arguments `name` and `encoder` the same value. If both are
    set, the value of `name` is used.
    """

    def change(a: Namespace) -> None:
        if getattr(a, name) is not None:
            setattr(a, encoder, getattr(a, name))
        else:
            setattr(a, name, getattr(a, encoder))

    return change


def _positions(length: str) -> Step:
    return check(
        LENGTHS,
        lambda a: a.max_position_embeddings < getattr(a, length),
        f"max_position_embeddings: found {{max_position_embeddings}}; expected at least {length} ({{{length}}})",
        needs=("max_position_embeddings", length),
    )


TRAINING_STEPS: tuple[Step, ...] = (
    derive(
        "validate_args: data loader",
        when(lambda a: a.dataloader_type is None, dataloader_type="single"),
    ),
    check(
        "validate_args: data loader",
        lambda a: a.num_dataset_builder_threads is not None and a.num_dataset_builder_threads < 1,
        "num_dataset_builder_threads: found {num_dataset_builder_threads}; expected a positive number",
    ),
    derive(
        "validate_args: consumed samples",
        assign(
            consumed_train_samples=0,
            skipped_train_samples=0,
            consumed_valid_samples=0,
            variable_seq_lengths=False,
        ),
    ),
    derive(
        "validate_args: consumed samples",
        when(lambda a: a.rl_use_sequence_packing, consumed_train_bins=0),
    ),
    *_training("iters", "samples", ITERATIONS),
    *_check_unit(
        "iters",
        ITERATIONS,
        any_given("rampup_batch_size"),
        "rampup_batch_size: found {rampup_batch_size} with train_iters; this release expects train_samples instead",
        until="0.18.0",
    ),
    *_training("samples", "iters", SAMPLES),
    excludes(set_("encoder_num_layers"), set_("num_layers"), SIZES),
    derive(SIZES, _twins("num_layers", "encoder_num_layers")),
    derive(SIZES, fallback("ffn_hidden_size", feed_forward_width), needs=("hidden_size",)),
    # With kv_channels given, heads need not divide the hidden width: the projections change the
    # width then.
    check(
        SIZES,
        lambda a: (
            a.kv_channels is None
            and (a.num_attention_heads < 1 or a.hidden_size % a.num_attention_heads != 0)
        ),
        "num_attention_heads: found {num_attention_heads}; expected a divisor of hidden_size"
        " ({hidden_size}); change one of them, or set kv_channels",
        needs=("hidden_size", "num_attention_heads"),
    ),
    derive(
        SIZES,
        fallback("kv_channels", lambda a: a.hidden_size // max(a.num_attention_heads, 1)),
        needs=("hidden_size", "num_attention_heads"),
    ),
    # Each context rank holds two chunks of a sequence, one of the first half and one of the second,
    # so that all ranks have the same work under a causal mask.
    check(
        LENGTHS,
        lambda a: a.context_parallel_size > 1 and a.seq_length % (a.context_parallel_size * 2) != 0,
        "seq_length: found {seq_length}; expected a multiple of 2 x context_parallel_size ({context_parallel_size})",
        needs=("seq_length",),
    ),
    # The dataset then has no attention mask. Tensor ranks that wait for its broadcast would not
    # match those that send none.
    derive(
        LENGTHS,
        when(
            lambda a: a.dataloader_inter_document_masking and a.create_attention_mask_in_dataloader,
            create_attention_mask_in_dataloader=False,
        ),
        since="0.19.0",
    ),
    check(
        LENGTHS,
        lambda a: a.encoder_seq_length is not None,
        "encoder_seq_length: found {encoder_seq_length} with seq_length {seq_length}; keep one of them",
        needs=("seq_length",),
    ),
    derive(LENGTHS, _twins("seq_length", "encoder_seq_length")),
    _positions("seq_length"),
    _positions("decoder_seq_length"),
    check(
        "validate_args: learning rate",
        lambda a: a.min_lr is None or a.min_lr > a.lr,
        "min_lr: found {min_lr}; expected at most lr ({lr})",
        needs=("lr",),
    ),
    check(
        SAVE,
        lambda a: a.save_interval is None,
        "save_interval: missing; save needs it; add --save-interval",
        needs=("save",),
        last=True,
    ),
    positive("save_interval", SAVE, since="0.14.0", last=True),
    check(
        SAVE,
        lambda a: a.save_retain_interval <= 0 or a.save_retain_interval % a.save_interval != 0,
        "save_retain_interval: found {save_retain_interval}; expected a positive multiple of save_interval ({save_interval})",
        since="0.14.0",
        needs=("save", "save_retain_interval"),
    ),
    check(
        SAVE,
        lambda a: a.overlap_param_gather,
        "save_params_interval: found {save_params_interval} with overlap_param_gather; keep one of them",
        since="0.18.0",
        needs=("save", "save_params_interval"),
    ),
    check(
        "validate_args: log intervals",
        lambda a: not a.log_interval or a.log_memory_interval % a.log_interval != 0,
        "log_memory_interval: found {log_memory_interval}; expected a multiple of log_interval ({log_interval})",
        since="0.16.0",
        needs=("log_memory_interval",),
    ),
    needs("fp16_lm_cross_entropy", "fp16", MIXED, "add --fp16, or drop --fp16-lm-cross-entropy"),
    check(
        MIXED,
        lambda a: a.fp32_residual_connection and not (a.fp16 or a.bf16),
        "fp32_residual_connection: found in fp32 training, in which it has no effect; add --bf16 or --fp16, or drop it",
        name="found-in-fp32-training-where",
    ),
    needs("moe_grouped_gemm", "bf16", MIXED, "add --bf16", until="0.16.0"),
    one_of(
        "no_weight_decay_cond_type",
        (None, "apply_wd_to_qk_layernorm"),
        "validate_args: weight decay",
        since="0.16.0",
    ),
    derive(
        "validate_args: weight decay",
        when(
            lambda a: a.no_weight_decay_cond_type is not None,
            apply_wd_to_qk_layernorm=True,
            no_weight_decay_cond_type=None,
        ),
        since="0.16.0",
    ),
    check(
        "validate_args: weight decay",
        lambda a: (
            a.weight_decay_incr_style == "constant"
            and not (a.start_weight_decay is None and a.end_weight_decay is None)
        ),
        "start_weight_decay: found {start_weight_decay} and end_weight_decay {end_weight_decay} with"
        " weight_decay_incr_style constant; drop both, or choose another weight_decay_incr_style",
        name="found-and-end_weight_decay-with-a",
    ),
    check(
        "validate_args: weight decay",
        lambda a: (
            a.weight_decay_incr_style != "constant"
            and (a.start_weight_decay is None or a.end_weight_decay is None)
        ),
        "start_weight_decay: found {start_weight_decay} and end_weight_decay {end_weight_decay} with"
        " weight_decay_incr_style {weight_decay_incr_style}; expected both",
    ),
    *(
        derive(
            "validate_args: weight decay",
            compute_argument(
                end, lambda a: a.weight_decay, lambda a: a.weight_decay_incr_style == "constant"
            ),
        )
        for end in ("start_weight_decay", "end_weight_decay")
    ),
)
