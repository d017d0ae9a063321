"""A small model of each architecture on transformers and on Megatron-Core, with the same weights, from translated configs.

`python -m tests.engine.logits ROWS.jsonl [ARCHITECTURE ...]` prints, for each, the largest distance of the logits in fp32, or
why it cannot be built. A row is a mapping as in a config.json, or has one as `hf`, beside what another bridge made of it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import fields as parts_of, is_dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, cast
from unittest.mock import patch

import torch
from torch import Tensor, nn

import bridge
import compat
from bridge.engine.compiling import disable_compile
from bridge.engine.models.dense import Dense
from bridge.errors import BridgeError
from bridge.plan.plan import Plan
from bridge.plan.section import Values
from bridge.stack.rules import Effect
from bridge.translation.lift import settings_for
from compat.megatron import objects
from compat.megatron.dialect import MegatronConfig
from compat.megatron.rules.rotary import PREFIXED
from compat.megatron.runtime.cpu import quiet, redirect_cuda

BOUND = 1e-5
"""Largest distance of logits whose own size is about one."""
TOKENS = 24
LARGEST = 10**7
SMALL: Mapping[str, int] = {
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 128,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_layer_end_index": 2,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 256,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
"""Sizes for a config that is too large to be built."""
RELEASE = "0.16.1"
OBJECTS = ("activation_func", "gated_linear_unit")
"""Fields of Megatron's config class that its flags name in some combinations only."""
RUN = {"micro_batch_size": 1, "train_iters": 1, "lr": 1e-3, "tokenizer_type": "NullTokenizer"}
"""What a launch needs beside its model."""
UNSEEN = (
    "world_size",
    "moe_router_bias_update_rate",
    "moe_aux_loss_coeff",
    "num_nextn_predict_layers",
    "model.init.scaled",
)
"""What no forward pass shows."""
KERNELS: Mapping[str, Any] = {
    **dict.fromkeys(
        ("gradient_accumulation_fusion", "masked_softmax_fusion", "bias_activation_fusion"), False
    ),
    **dict.fromkeys(
        (
            "bias_dropout_fusion",
            "apply_rope_fusion",
            "persist_layer_norm",
            "cross_entropy_loss_fusion",
        ),
        False,
    ),
    "use_cpu_initialization": True,
    "moe_grouped_gemm": False,
    "moe_token_dispatcher_type": "allgather",
    "params_dtype": torch.float32,
    "pipeline_dtype": torch.float32,
    "bf16": False,
    "fp16": False,
    "attention_softmax_in_fp32": True,
    "mtp_num_layers": None,
}
"""Kernels and formats of this machine, which no weight hangs on; transformers has no blocks that predict further tokens."""


# Megatron-Core


class Norm(nn.Module):
    """A norm in plain torch, zero-centred where the config says so; Megatron's own want Apex or Transformer Engine."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **more: Any) -> None:
        super().__init__()
        self.eps, self.centre, self.rms = (
            eps,
            float(config.layernorm_zero_centered_gamma),
            config.normalization == "RMSNorm",
        )
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.bias = None if self.rms else nn.Parameter(torch.zeros(hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        weight = self.weight + self.centre
        if self.rms:
            return nn.functional.rms_norm(x, x.shape[-1:], weight, self.eps)
        return nn.functional.layer_norm(x, x.shape[-1:], weight, self.bias, self.eps)


class Unequal(nn.Module):
    """The core of attention in plain torch, for values that are not as wide as keys: Megatron's local one takes none."""

    def __init__(self, softmax_scale: float, **more: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *more: Any, **options: Any
    ) -> Tensor:
        """Tokens, batch, heads, width; the result has heads and width in one."""
        q, k, v = (part.permute(1, 2, 0, 3) for part in (query, key, value))
        found = nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=self.scale
        )
        return found.permute(2, 0, 1, 3).flatten(2)


def stood_in(spec: Any, latent: bool) -> Any:
    """`spec` with `Norm` in place of Megatron's wrapper of torch's norms, and with `Unequal` for latent attention."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    if spec is WrappedTorchNorm:
        return Norm
    if latent and spec is DotProductAttention:
        return Unequal
    if isinstance(spec, list):
        return [stood_in(part, latent) for part in spec]
    if is_dataclass(spec) and not isinstance(spec, type):
        return replace(
            spec,
            **{part.name: stood_in(getattr(spec, part.name), latent) for part in parts_of(spec)},
        )
    return spec


class WideNorm(Norm):
    """One norm over all heads of queries or keys; Megatron's flags name one of each head, and its spec takes any module."""

    def __init__(
        self, config: Any, hidden_size: int, heads: int, eps: float = 1e-5, **more: Any
    ) -> None:
        super().__init__(config, heads * hidden_size, eps)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens, batch, heads, width."""
        return super().forward(x.flatten(2)).view_as(x)


def widened(spec: Any, config: Any) -> None:
    """Give every block of `spec` a norm over all heads of its queries, and of its keys."""
    from megatron.core.transformer.spec_utils import ModuleSpec

    for layer in spec.layer_specs:
        attention = layer.submodules.self_attention.submodules
        attention.q_layernorm = ModuleSpec(
            module=WideNorm, params={"heads": config.num_attention_heads}
        )
        attention.k_layernorm = ModuleSpec(
            module=WideNorm, params={"heads": config.num_query_groups}
        )


def transformer_config(config: MegatronConfig, beyond: Mapping[str, Any]) -> Any:
    """The real TransformerConfig of a launch, with what only the class takes, and the kernels that run here."""
    from compat.megatron.objects.fields import LATENT, TRANSFORMER, defaults
    from compat.megatron.runtime.config_objects import build_object

    args = config.args.flat()
    cls = LATENT if args.get("multi_latent_attention") else TRANSFORMER
    whole = {**objects.transformer(args, config.version), **beyond}
    return build_object(
        cls, {name: whole[name] for name in defaults(config.version, cls)} | KERNELS
    )


def stretched(own: Any, newest: Values) -> None:
    """YaRN in the words of GPTModel, which looks for attributes of its config in releases whose flags do not have it yet."""
    own.yarn_rotary_scaling_factor = newest["rotary_scaling_factor"]
    for path in PREFIXED.values():
        setattr(own, path, newest[path])
    own.yarn_mscale, own.yarn_mscale_all_dim = newest["mscale"], newest["mscale_all_dim"]


def megatron_model(found: Translated) -> nn.Module:
    """Megatron's GPT as `pretrain_gpt.py` builds it from arguments, of local modules and those that the plan asks for."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    model, args, own = (
        found.plan.model,
        found.launch.args,
        transformer_config(found.launch, found.beyond),
    )
    local = get_gpt_decoder_block_spec(
        own, use_transformer_engine=False, normalization=own.normalization
    )
    spec = stood_in(local, own.multi_latent_attention)
    if model.attention.norm == "width" and not own.multi_latent_attention:
        widened(spec, own)
    yarn = found.newest["position_embedding_type"] == "yarn"
    if yarn:
        stretched(own, found.newest)
    made = GPTModel(
        config=own,
        transformer_layer_spec=spec,
        vocab_size=args["padded_vocab_size"]
        if args.get("padded_vocab_size")
        else args["vocab_size"],
        max_sequence_length=args["max_position_embeddings"],
        parallel_output=False,
        share_embeddings_and_output_weights=not args["untie_embeddings_and_output_weights"],
        position_embedding_type="yarn" if yarn else args["position_embedding_type"],
        rotary_percent=args["rotary_percent"],
        rotary_base=args["rotary_base"],
        rope_scaling=args["use_rope_scaling"],
        rope_scaling_factor=args.get("rope_scaling_factor") or 8.0,
        seq_len_interpolation_factor=args.get("rotary_seq_len_interpolation_factor"),
    )
    if model.embedding.scale:
        made.embedding.register_forward_hook(
            lambda module, inputs, output: output * model.embedding.scale
        )
    return made


@contextmanager
def alone() -> Iterator[None]:
    """Megatron's process groups for one rank on CPU."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils

    with ExitStack() as stack:
        stack.enter_context(redirect_cuda())
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        stack.callback(dist.destroy_process_group)
        parallel_state.initialize_model_parallel()
        stack.callback(parallel_state.destroy_model_parallel)
        model_parallel_cuda_manual_seed(1)
        stack.enter_context(patch.object(moe_utils, "te_general_gemm", None, create=True))
        stack.enter_context(patch.object(multi_latent_attention, "HAVE_TE", False))
        yield


# Weights

Weights = Mapping[str, Tensor]


class Moved:
    """Weights of a transformers model under Megatron's names and in its layout."""

    def __init__(self, weights: Weights, plan: Plan) -> None:
        self.weights, self.model, self.found = weights, plan.model, dict[str, Tensor]()

    def all(self) -> dict[str, Tensor]:
        """Every parameter by Megatron's name."""
        self.put("embedding.word_embeddings.weight", "model.embed_tokens.weight")
        for norm in ("weight", "bias"):
            self.put(f"decoder.final_layernorm.{norm}", f"model.norm.{norm}")
        if not self.model.tied:
            self.put("output_layer.weight", "lm_head.weight")
        for layer in range(self.model.layers or 0):
            self.block(f"decoder.layers.{layer}", f"model.layers.{layer}")
        return self.found

    def put(self, to: str, name: str) -> None:
        """One tensor as it is, where the model has it."""
        if name in self.weights:
            self.found[to] = self.weights[name]

    def block(self, to: str, name: str) -> None:
        """A transformer block."""
        for kind in ("weight", "bias"):
            self.put(f"{to}.input_layernorm.{kind}", f"{name}.input_layernorm.{kind}")
            self.put(f"{to}.pre_mlp_layernorm.{kind}", f"{name}.post_attention_layernorm.{kind}")
        attention, theirs = f"{to}.self_attention", f"{name}.self_attn"
        if self.model.attention.latent.kv_rank:
            self.latent(attention, theirs)
        else:
            self.heads(attention, theirs)
        for kind in ("weight", "bias"):
            self.put(f"{attention}.linear_proj.{kind}", f"{theirs}.o_proj.{kind}")
        self.put(f"{attention}.core_attention.softmax_offset", f"{theirs}.sinks")
        self.feed_forward(f"{to}.mlp", f"{name}.mlp")

    def heads(self, to: str, name: str) -> None:
        """Queries, keys and values, group by group in one matrix."""
        size = self.model.attention.head_size or (self.model.hidden or 0) // (self.model.heads or 1)
        groups = self.model.kv_heads or self.model.heads or 1
        for kind in ("weight", "bias"):
            parts = [self.weights.get(f"{name}.{part}_proj.{kind}") for part in "qkv"]
            if all(part is not None for part in parts):
                rows = [
                    part.view(groups, -1, size, *part.shape[1:])
                    for part in parts
                    if part is not None
                ]
                self.found[f"{to}.linear_qkv.{kind}"] = torch.cat(rows, 1).flatten(0, 2)
        self.put(f"{to}.q_layernorm.weight", f"{name}.q_norm.weight")
        self.put(f"{to}.k_layernorm.weight", f"{name}.k_norm.weight")

    def latent(self, to: str, name: str) -> None:
        """Latent attention, whose matrices are the same on both sides."""
        self.put(f"{to}.linear_q_proj.weight", f"{name}.q_proj.weight")
        self.put(f"{to}.linear_q_down_proj.weight", f"{name}.q_a_proj.weight")
        self.put(f"{to}.linear_q_up_proj.weight", f"{name}.q_b_proj.weight")
        self.put(f"{to}.linear_kv_down_proj.weight", f"{name}.kv_a_proj_with_mqa.weight")
        self.put(f"{to}.linear_kv_up_proj.weight", f"{name}.kv_b_proj.weight")
        self.put(f"{to}.q_layernorm.weight", f"{name}.q_a_layernorm.weight")
        self.put(f"{to}.kv_layernorm.weight", f"{name}.kv_a_layernorm.weight")

    def feed_forward(self, to: str, name: str) -> None:
        """A plain layer, or a router, its experts and the shared ones."""
        self.plain(to, name)
        for router in ("gate", "router"):
            for kind in ("weight", "bias"):
                self.put(f"{to}.router.{kind}", f"{name}.{router}.{kind}")
            self.put(f"{to}.router.expert_bias", f"{name}.{router}.e_score_correction_bias")
        self.put(f"{to}.router.expert_bias", f"{name}.e_score_correction_bias")
        self.experts(f"{to}.experts.local_experts", f"{name}.experts")
        for shared in ("shared_experts", "shared_expert"):
            self.plain(f"{to}.shared_experts", f"{name}.{shared}")
        self.put(f"{to}.shared_experts.gate_weight", f"{name}.shared_expert_gate.weight")

    def plain(self, to: str, name: str) -> None:
        """The gate lies above the factor in one matrix."""
        for kind in ("weight", "bias"):
            up, gate = (self.weights.get(f"{name}.{part}_proj.{kind}") for part in ("up", "gate"))
            if up is not None:
                self.found[f"{to}.linear_fc1.{kind}"] = (
                    up if gate is None else torch.cat((gate, up))
                )
            self.put(f"{to}.linear_fc2.{kind}", f"{name}.down_proj.{kind}")

    def experts(self, to: str, name: str) -> None:
        """Experts lie in one tensor each kind; gpt_oss has them transposed, and gate and factor in turn."""
        both, down = self.weights.get(f"{name}.gate_up_proj"), self.weights.get(f"{name}.down_proj")
        turned = f"{name}.gate_up_proj_bias" in self.weights
        for expert in (
            range(self.model.experts or 0) if both is not None and down is not None else ()
        ):
            first, second = (
                (both[expert].T, down[expert].T) if turned else (both[expert], down[expert])
            )
            self.found[f"{to}.{expert}.linear_fc1.weight"] = (
                torch.cat((first[0::2], first[1::2])) if turned else first
            )
            self.found[f"{to}.{expert}.linear_fc2.weight"] = second
            if turned:
                bias = self.weights[f"{name}.gate_up_proj_bias"][expert]
                self.found[f"{to}.{expert}.linear_fc1.bias"] = torch.cat((bias[0::2], bias[1::2]))
                self.found[f"{to}.{expert}.linear_fc2.bias"] = self.weights[
                    f"{name}.down_proj_bias"
                ][expert]


LAYER = {
    "self_attn.q_proj": "attention.query",
    "self_attn.k_proj": "attention.key",
    "self_attn.v_proj": "attention.value",
    "self_attn.o_proj": "attention.out",
    "self_attn.q_norm": "attention.query_norm",
    "self_attn.k_norm": "attention.key_norm",
    "mlp.up_proj": "mlp.up",
    "mlp.gate_proj": "mlp.gate",
    "mlp.down_proj": "mlp.down",
}
"""A block's parts in transformers and in the native model."""
NORMS = {
    "before": {"input_layernorm": "norm1", "post_attention_layernorm": "norm2"},
    "after": {"post_attention_layernorm": "norm1", "post_feedforward_layernorm": "norm2"},
    "both": {
        "input_layernorm": "norm1",
        "post_attention_layernorm": "norm3",
        "pre_feedforward_layernorm": "norm2",
        "post_feedforward_layernorm": "norm4",
    },
}
OUTSIDE = {
    "model.embed_tokens": "embedding.tokens",
    "model.norm": "head.norm",
    "lm_head": "head.logits",
}


def native(weights: Weights, plan: Plan) -> dict[str, Tensor]:
    """Weights of a dense transformers model by the names of the native one."""
    place, found = plan.model.norm.place or "before", dict[str, Tensor]()
    inside = {**LAYER, **NORMS[place]}
    for name, weight in weights.items():
        module, _, kind = name.rpartition(".")
        if module in OUTSIDE:
            found[f"{OUTSIDE[module]}.{kind}"] = weight
        else:
            number, _, part = module.removeprefix("model.layers.").partition(".")
            found[f"block{number}.{inside[part]}.{kind}"] = (
                weight.flatten() if part.endswith("_norm") else weight
            )
    if plan.model.tied:
        del found["head.logits.weight"]
    return found


def filled(model: nn.Module, found: Weights) -> None:
    """Give `model` these weights; raises `ValueError` if one is left over, or one of the model gets none."""
    own = dict(model.named_parameters()) | {
        name: buffer for name, buffer in model.named_buffers() if "expert_bias" in name
    }
    missing, unused = own.keys() - found.keys(), found.keys() - own.keys()
    if missing or unused:
        raise ValueError(f"without a weight: {sorted(missing)[:6]}; not used: {sorted(unused)[:6]}")
    with torch.no_grad():
        for name, parameter in own.items():
            if parameter.shape != found[name].shape:
                raise ValueError(
                    f"{name}: {tuple(parameter.shape)} here, {tuple(found[name].shape)} there"
                )
            parameter.copy_(found[name])


# Comparing


class Translated(NamedTuple):
    """A model's plan, its Hugging Face config and Megatron launch made from the plan, and what the launch lost.

    `beyond` is what the plan's fields are in Megatron's config class and no flag tells, `newest` the arguments of the newest
    release.
    """

    plan: Plan
    again: dict[str, Any]
    launch: MegatronConfig
    lost: tuple[str, ...]
    beyond: Mapping[str, Any]
    newest: Values

    @property
    def added(self) -> tuple[str, ...]:
        """What the program adds to the launch, as a training script can: fields of objects, modules of the spec, hooks."""
        model = self.plan.model
        wide = model.attention.norm == "width" and not model.attention.latent.kv_rank
        hook = ("embedding.scale",) if model.embedding.scale else ()
        yarn = ("yarn",) if self.newest["position_embedding_type"] == "yarn" else ()
        return (
            *(name for name in self.beyond),
            *(("norm over all heads",) if wide else ()),
            *hook,
            *yarn,
        )


def translated(hf: Mapping[str, Any]) -> Translated:
    """Everything that is made from a config."""
    huggingface, megatron = compat.load("huggingface"), compat.load("megatron")
    source = huggingface.read(dict(hf))
    result = bridge.translate(source, megatron, version=RELEASE)
    launch = megatron.config({**result.config.given, **RUN}, RELEASE, 1, result.config.entry)
    named = (finding.path for finding in result.findings if finding.effect is Effect.NUMBERS)
    lost = tuple(dict.fromkeys(path for path in named if path not in UNSEEN))
    again = json.loads(bridge.translate(source, huggingface).written.text)
    plan = bridge.lift(source)
    newest = cast(MegatronConfig, bridge.translate(source, megatron).config).args
    return Translated(
        plan, again, cast(MegatronConfig, launch), lost, objects_alone(plan, launch), newest
    )


def objects_alone(plan: Plan, launch: Any) -> dict[str, Any]:
    """What the rules write for the config class where the flags leave something else."""
    written = settings_for(plan.values(), launch.dialect, RELEASE, 1)
    whole = objects.transformer(launch.args.flat(), RELEASE)
    scaling = plan.model.rotary.scaling
    latent = {
        "original_max_position_embeddings": scaling.original,
        "beta_fast": scaling.fast,
        "beta_slow": scaling.slow,
    }
    bounds = latent if plan.model.attention.latent.kv_rank and scaling.kind == "yarn" else {}
    found = {**{name: written.get(name) for name in OBJECTS}, **bounds}
    return {
        name: value
        for name, value in found.items()
        if value is not None and not same_function(value, whole[name])
    }


def same_function(written: Any, held: Any) -> bool:
    """Whether an activation or a switch is what the class holds already; fused GELU is the tanh form, which is off here."""
    return written == held or str(held).rpartition(".")[2] == written


STAND_INS = {"mimo": "qwen2"}
"""Models whose own code, which lies beside their weights, is that of another one but for blocks that predict further tokens."""


def transformers_model(config: Mapping[str, Any]) -> nn.Module:
    """The model of transformers with random weights, in fp32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    told = dict(config)
    kind = told.pop("model_type")
    own = AutoConfig.for_model(STAND_INS.get(kind, kind), **told)
    own._attn_implementation = "eager"
    own._experts_implementation = "eager"
    torch.manual_seed(5)
    model: nn.Module = AutoModelForCausalLM.from_config(
        own, torch_dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(_drawn(name, weight))
    return model.eval()


def _drawn(name: str, weight: Tensor) -> Tensor:
    """Weights that are all different from what a model starts with, and of a size at which nothing saturates."""
    noise = torch.randn_like(weight)
    if weight.ndim > 1:
        return noise * weight.shape[-1] ** -0.5
    return 1 + 0.1 * noise if "norm" in name else 0.1 * noise


def prompt(plan: Plan) -> Tensor:
    """Tokens, the same ones for every model."""
    return torch.randint(
        0, plan.model.vocab or 1, (1, TOKENS), generator=torch.Generator().manual_seed(3)
    )


def apart(wanted: Tensor, got: Tensor) -> float:
    """Largest distance of logits, over the largest logit."""
    return float((wanted - got[..., : wanted.shape[-1]]).abs().max() / wanted.abs().max())


@torch.no_grad()
def distance(found: Translated, theirs: nn.Module) -> float:
    """How far the logits of Megatron's model are from those of transformers."""
    ours, tokens = megatron_model(found), prompt(found.plan)
    filled(ours, Moved(theirs.state_dict(), found.plan).all())
    mask = torch.ones(1, 1, TOKENS, TOKENS).tril() < 0.5
    return apart(theirs(tokens).logits, ours.eval()(tokens, torch.arange(TOKENS)[None], mask))


@torch.no_grad()
def native_distance(found: Translated, theirs: nn.Module) -> float:
    """How far the logits of the native model are from those of transformers."""
    # Blocks that predict further tokens are no part of what transformers builds.
    ours, tokens = (
        Dense(found.plan.model.model_copy(update={"predicted": None})),
        prompt(found.plan),
    )
    filled(ours, native(theirs.state_dict(), found.plan))
    return apart(theirs(tokens).logits, ours.eval()(tokens))


def native_answer(hf: Mapping[str, Any]) -> tuple[str, str]:
    """The same as `answer` for the native model, which announces nothing: what it has not got it refuses."""
    try:
        found = translated(hf)
        far = native_distance(found, transformers_model(found.again))
    except Exception as error:
        return "not built", f" {type(error).__name__}: {str(error)[:160]}"
    return "equal" if far <= BOUND else "DIFFERENT", f"{far:.1e}"


def fixed_eps(plan: Plan) -> bool:
    """Whether transformers norms the narrow vectors of latent attention with another eps than the config says: always 1e-6."""
    return bool(plan.model.attention.latent.kv_rank) and plan.model.norm.eps != 1e-6


def answer(hf: Mapping[str, Any]) -> tuple[str, str]:
    """What became of a config: equal, announced or DIFFERENT, and the distance, the losses, or why it was not built."""
    lost = ""
    try:
        found = translated(hf)
        lost = "".join(
            f"; {word}: {', '.join(what)}"
            for word, what in (("lost", found.lost), ("added", found.added))
            if what
        )
        far = distance(found, transformers_model(found.again))
    except Exception as error:
        told = str(error).splitlines() or [""]
        return (
            "not built",
            f"{lost} {type(error).__name__}: {told[0][:160]} {''.join(told[1:2])[:100]}",
        )
    kind = (
        "equal"
        if far <= BOUND
        else "announced"
        if found.lost
        else "explained"
        if fixed_eps(found.plan)
        else "DIFFERENT"
    )
    return kind, f"{far:.1e} {lost}"


def _row(line: str) -> dict[str, Any]:
    """A line with the architecture and the number of parameters, about."""
    told: dict[str, Any] = json.loads(line)
    row = told if "hf" in told else {"hf": told, "arch": told["model_type"], "megatron": True}
    if row.get("parameters"):
        return row
    model = bridge.lift(compat.load("huggingface").read(dict(row["hf"]))).model
    size = 12 * (model.layers or 1) * (model.hidden or 1) ** 2 + (model.vocab or 1) * (
        model.hidden or 1
    )
    return {**row, "parameters": size}


def small(path: Path) -> dict[str, list[Any]]:
    """Configs of each architecture that Megatron's own bridge takes, the smallest first; made smaller where all are large."""
    rows = [row for row in map(_row, path.read_text("utf-8").splitlines()) if row.get("megatron")]
    found: dict[str, list[Any]] = {}
    for row in sorted(rows, key=lambda row: row["parameters"]):
        known = found.setdefault(row["arch"], [])
        if row["parameters"] < LARGEST:
            known.append(row["hf"])
        elif not known and "hidden_size" in row["hf"]:
            known.append(
                {**row["hf"], **{key: size for key, size in SMALL.items() if key in row["hf"]}}
            )
    return found


def main() -> int:
    """Print a line for each architecture; 1 if one differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=Path)
    parser.add_argument("architectures", nargs="*")
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    equal, seen = set[tuple[str, str]](), set[str]()
    with disable_compile(), quiet(), alone():
        for name, configs in sorted(small(options.rows).items()):
            for hf in configs if not options.architectures or name in options.architectures else ():
                answers = {
                    "megatron": answer(hf),
                    **({"native": native_answer(hf)} if is_dense(hf) else {}),
                }
                seen.add(name)
                for engine, (kind, told) in answers.items():
                    counts[f"{kind} on {engine}"] += 1
                    equal |= {(name, engine)} if kind == "equal" else set()
                    print(f"{name:16} {engine:8} {kind:10} {told}", flush=True)
    for engine in ("megatron", "native"):
        found = sorted(name for name, on in equal if on == engine)
        print(
            f"{engine}: logits of {len(found)} of {len(seen)} architectures are equal: {', '.join(found)}"
        )
    print(", ".join(f"{count} {kind}" for kind, count in counts.items()))
    return 1 if any(kind.startswith("DIFFERENT") and count for kind, count in counts.items()) else 0


def is_dense(hf: Mapping[str, Any]) -> bool:
    """Whether a config's model has no experts, no latent attention and no other kinds of blocks."""
    try:
        model = bridge.lift(compat.load("huggingface").read(dict(hf))).model
    except BridgeError:
        return False
    return not model.experts and not model.attention.latent.kv_rank and model.family != "nemotron_h"


if __name__ == "__main__":
    sys.exit(main())
