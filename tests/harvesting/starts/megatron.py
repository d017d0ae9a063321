"""Builds what a launch needs of the installed Megatron-Core before its first step: config classes,
batches, the learning-rate schedule, and the model on the meta device. A group of ranks stands in for
the cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

from bridge.errors import ConfigError
from bridge.stack.dialect import Config
from compat.megatron.objects.fields import LATENT, TRANSFORMER
from tests.harvesting.judges import megatron as real
from tests.harvesting.judges.megatron import release_of_package as release_of_package
from tests.harvesting.machine import MachineError, judge

ALONE = {
    "sequence_parallel": False,
    "gradient_accumulation_fusion": False,
    "persist_layer_norm": False,
    "memory_efficient_layer_norm": False,
    "layernorm_zero_centered_gamma": False,
    "use_cpu_initialization": True,
    "perform_initialization": False,
    "cpu_offloading": False,
    "cuda_graph_impl": "none",
    "enable_cuda_graph": False,
    "external_cuda_graph": False,
    "fp8": None,
    "fp4": None,
}
"""Fields of a model that is built here: what needs a device or Transformer Engine is off."""
FILLS = True
"""Whether `start` fills in what a config lacks."""
UNASKED = ("use_distributed_optimizer", "use_megatron_fsdp", "megatron_fsdp_version", "optimizer")
"""Settings whose stops come later than what `start` builds."""
Args = Any


class ReachedError(Exception):
    """Raised by stand-ins: what is asked has passed its checks."""


def start(config: Config) -> None:
    """Build the parts of the launch. Raises `ConfigError` with the reason for which Megatron stops.
    Sizes that the config leaves open are filled in.
    """
    question, _ = real.pose_config(config)
    real.answer(question)
    whole: Any = real._complete_sizes(config, real.REQUIRED)
    if whole is None or config.entry != "flags":
        raise MachineError("only the config's own class was asked")
    args = SimpleNamespace(**whole.args.flat())
    try:
        with _ranks(args):
            counts = _batches(args)
            _schedule(args)
            model = _model(whole, args)
            _first_step(args, model, counts)
    except Exception as error:
        judge(error)
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"refused by Megatron's core: {type(error).__name__}: {reason}"
        ) from error


@contextmanager
def _ranks(args: Args) -> Iterator[None]:
    """Context in which this process is the first of the launch's ranks. No rank communicates."""
    from megatron.core import parallel_state
    from torch import distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=args.world_size)
    try:
        parallel_state.initialize_model_parallel(
            args.tensor_model_parallel_size,
            args.pipeline_model_parallel_size,
            args.virtual_pipeline_model_parallel_size,
            context_parallel_size=args.context_parallel_size,
            expert_model_parallel_size=args.expert_model_parallel_size,
            expert_tensor_parallel_size=args.expert_tensor_parallel_size,
            create_gloo_process_groups=False,
            order="tp-cp-ep-pp-dp" if args.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp",
        )
        yield
    finally:
        parallel_state.destroy_model_parallel()
        distributed.destroy_process_group()


def _batches(args: Args) -> set[int]:
    """Return the numbers of microbatches that Megatron's own calculator counts during the run."""
    from megatron.core import num_microbatches_calculator as calculator

    if not args.global_batch_size:
        return set()
    counter: Any = calculator._build_num_microbatches_calculator(
        0,
        args.rampup_batch_size,
        args.global_batch_size,
        args.micro_batch_size,
        args.data_parallel_size,
        bool(args.decrease_batch_size_if_needed),
    )
    step = getattr(counter, "rampup_samples_per_increment", 0)
    counts = set()
    for part in range(int(counter.ramup_samples / step) + 2 if step else 1):
        counter.update(int(part * step) + 1, True)
        counts.add(counter.get())
    return counts


def _schedule(args: Args) -> None:
    """Build the schedule of the learning rate as the training loop does."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    unit, size = ("iters", args.global_batch_size) if args.train_iters else ("samples", 1)
    length = getattr(args, f"train_{unit}")
    if not (length and size):
        return
    # A launch without a rate stops anyway, which the conversion asks for apart.
    rate = max(args.min_lr or 0, args.lr_warmup_init or 0) if args.lr is None else args.lr
    decay = (getattr(args, f"lr_decay_{unit}") or length) * size
    share = args.lr_warmup_fraction
    warmup = getattr(args, f"lr_warmup_{unit}") * size if share is None else share * decay
    wsd = getattr(args, f"lr_wsd_decay_{unit}", None)
    OptimizerParamScheduler(
        SimpleNamespace(param_groups=[]),
        init_lr=args.lr_warmup_init,
        max_lr=rate,
        min_lr=args.min_lr,
        lr_warmup_steps=warmup,
        lr_decay_steps=decay,
        lr_decay_style=args.lr_decay_style,
        start_wd=args.start_weight_decay,
        end_wd=args.end_weight_decay,
        wd_incr_steps=length * size,
        wd_incr_style=args.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=args.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=args.override_opt_param_scheduler,
        wsd_decay_steps=None if wsd is None else wsd * size,
        lr_wsd_decay_style=args.lr_wsd_decay_style,
    )


def _model(whole: Any, args: Args) -> Any:
    """Build the first stage of the model without memory."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from torch import device

    question, _ = real._of_flags(whole, TRANSFORMER)
    name = LATENT if LATENT in question else TRANSFORMER
    with real._on_a_cluster():
        config = real.ask_class(name, question[name])
    local = args.transformer_impl == "local"
    for field, value in (ALONE if local else {**ALONE, "context_parallel_size": 1}).items():
        setattr(config, field, value)
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=name == LATENT,
        normalization=config.normalization,
    )
    rows = getattr(args, "padded_vocab_size", None) or args.tensor_model_parallel_size * 128
    chunk = {} if args.virtual_pipeline_model_parallel_size is None else {"vp_stage": 0}
    with device("meta"):
        return GPTModel(
            config,
            spec,
            rows,
            args.max_position_embeddings,
            post_process=args.pipeline_model_parallel_size == 1,
            position_embedding_type=args.position_embedding_type,
            rotary_percent=args.rotary_percent,
            **chunk,
        )


def _first_step(args: Args, model: Any, counts: set[int]) -> None:
    """Begin what a step begins with: the split of a sequence, a layer of experts, and the order of
    microbatches.
    """
    import torch
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import mappings
    from megatron.core.transformer.moe.moe_layer import MoELayer

    length = args.seq_length // args.context_parallel_size
    tokens = torch.empty(length, 1, args.hidden_size, device="meta")
    if args.sequence_parallel:
        mappings._split_along_first_dim(tokens, parallel_state.get_tensor_model_parallel_group())
    for layer in model.modules():
        if isinstance(layer, MoELayer):
            layer.config.sequence_parallel = args.sequence_parallel
            layer._modules.pop("router", None)
            layer.route = layer.router = _raise_reached
            with suppress(ReachedError):
                layer(tokens)
            torch.topk(torch.zeros(1, args.num_experts), args.moe_router_topk)
            break
    if args.virtual_pipeline_model_parallel_size is not None:
        for count in sorted(counts):
            _run_interleaved(args, model, count)


def _raise_reached(*values: Any, **keywords: Any) -> Any:
    raise ReachedError


def _run_interleaved(args: Args, model: Any, count: int) -> None:
    from megatron.core.pipeline_parallel import schedules

    chunks = [model] * args.virtual_pipeline_model_parallel_size
    run: Callable[..., Any] = schedules.forward_backward_pipelining_with_interleaving
    with suppress(ReachedError, AttributeError, TypeError):
        run(
            forward_step_func=_raise_reached,
            data_iterator=[None] * len(chunks),
            model=chunks,
            num_microbatches=count,
            seq_length=args.seq_length,
            micro_batch_size=args.micro_batch_size,
            forward_only=True,
        )
