"""Prints, as JSON, the bytes of tensors that plain torch has for small models of transformers.

Arguments: the number of ranks, and families of models. The ranks do not exist: collectives of a fake group do nothing, but
what FSDP2 shards over them is as large as it would be.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 3,
    "vocab_size": 102,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OTHERS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 66, "n_layer": 3, "n_head": 6, "vocab_size": 102, "n_positions": 258},
    "opt": {**SIZES, "ffn_dim": 252, "word_embed_proj_dim": 64},
    "gptj": {"n_embd": 64, "n_layer": 3, "n_head": 8, "vocab_size": 102, "rotary_dim": 4},
    "bloom": {**SIZES, "n_layer": 3, "n_head": 8},
}
EAGER_ALONE = ("gemma2", "gptj", "bloom")
"""Families of which transformers has no other attention than the eager one."""
EXPERTS = {
    "num_experts": 6,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "shared_expert_intermediate_size": 128,
    "n_routed_experts": 6,
    "moe_num_experts": 6,
    "moe_k": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
LATENT = {
    "num_key_value_heads": 8,
    "head_dim": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
HEADS = (
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "mixtral",
    "cohere2",
    "glm",
    "glm4",
    "glm4_moe",
    "minimax_m2",
)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def config_of(family: str) -> Any:
    """The config of a small model, without dropout."""
    sizes = OTHERS.get(family, SIZES)
    experts = EXPERTS if family in ("mixtral", "olmoe", "minimax_m2") or "moe" in family else {}
    head: dict[str, Any] = {"head_dim": 8} if family in HEADS else {}
    if family in ("deepseek_v2", "deepseek_v3", "glm4_moe_lite"):
        head, experts = LATENT, EXPERTS
    config = transformers.CONFIG_MAPPING[family](**{**sizes, **experts, **head})
    for name in vars(config):
        if name.endswith(("dropout", "pdrop")):
            setattr(config, name, 0.0)
    return config


def model_of(config: Any, dtype: torch.dtype, attention: str) -> Any:
    """A model in training mode."""
    return transformers.AutoModelForCausalLM.from_config(
        config, dtype=dtype, attn_implementation=attention
    ).train()


def states_of(config: Any, ranks: int) -> dict[str, dict[str, int]]:
    """Bytes of weights, gradients and moments after a step of FSDP2, and without sharding."""
    ids = torch.randint(0, 102, (2, 16))
    found = {}
    for sharding in ("fsdp", "ddp"):
        model = model_of(config, torch.float32, "eager")
        if sharding == "fsdp":
            mesh = init_device_mesh("cpu", (ranks,))
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
            base = next(part for _, part in model.named_children())
            blocks = next(part for part in base.modules() if isinstance(part, torch.nn.ModuleList))
            for block in blocks:
                fully_shard(block, mesh=mesh, mp_policy=policy)
            fully_shard(model, mesh=mesh, mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters())
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        weights = list(model.parameters())
        moments = [
            tensor
            for state in optimizer.state.values()
            for name, tensor in state.items()
            if name != "step"
        ]
        found[sharding] = {
            "weights": sum(map(size_of, weights)),
            "gradients": sum(size_of(one.grad) for one in weights if one.grad is not None),
            "moments": sum(map(size_of, moments)),
        }
    return found


def size_of(tensor: Any) -> int:
    """Bytes of a tensor on this rank."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return int(local.numel() * local.element_size())


def saved_by(model: Any) -> int:
    """Bytes of the storages that autograd saves in a forward pass, without weights."""
    ids = torch.randint(0, 102, (2, 128))
    known = {one.untyped_storage().data_ptr() for one in (*model.parameters(), *model.buffers())}
    kept: dict[int, Any] = {}

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = model(input_ids=ids, use_cache=False)
    assert outputs.logits.requires_grad
    return sum(storage.nbytes() for storage in kept.values())


class Adapted(torch.nn.Module):
    """A frozen linear layer with a low-rank adapter in fp32, in the operations of peft's."""

    def __init__(self, base: torch.nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.inner = torch.nn.Linear(base.in_features, rank, bias=False)
        self.outer = torch.nn.Linear(rank, base.out_features, bias=False)

    def forward(self, inputs: Any) -> Any:
        """The base's result and the adapter's, which reads the input in its own format."""
        result = self.base(inputs)
        own = inputs.to(self.inner.weight.dtype)
        return (result + self.outer(self.inner(own)) * 2.0).to(result.dtype)


def adapted_model(targets: tuple[str, ...]) -> Any:
    """A frozen Llama with adapters of rank 8 on the layers that `targets` name."""
    model = model_of(config_of("llama"), torch.bfloat16, "sdpa").requires_grad_(False)
    for block in model.model.layers:
        for part in (block.self_attn, block.mlp):
            for name, layer in list(part.named_children()):
                if name in targets:
                    setattr(part, name, Adapted(layer, 8))
    return model


ADAPTED = {
    "some": ("q_proj", "v_proj"),
    "all": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
}


def count_adapters() -> dict[str, int]:
    """Bytes that autograd saves, and numbers of elements that are trained."""
    found = {}
    for name, targets in ADAPTED.items():
        model = adapted_model(targets)
        found[f"{name} trained"] = sum(
            one.numel() for one in model.parameters() if one.requires_grad
        )
        found[f"{name} plain"] = saved_by(model)
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            found[f"{name} autocast"] = saved_by(adapted_model(targets))
    return found


def count_family(family: str, ranks: int) -> dict[str, Any]:
    """All figures of a family."""
    found: dict[str, Any] = {"config": json.loads(config_of(family).to_json_string(use_diff=False))}
    if family not in EAGER_ALONE:
        found |= states_of(config_of(family), ranks)
    for attention in ("sdpa", "eager") if family not in EAGER_ALONE else ("eager",):
        for name, dtype in DTYPES.items():
            found[f"{attention} {name}"] = saved_by(model_of(config_of(family), dtype, attention))
    attention = "eager" if family in EAGER_ALONE else "sdpa"
    model = model_of(config_of(family), torch.bfloat16, attention)
    model.gradient_checkpointing_enable()
    found["again"] = saved_by(model)
    return found


def main() -> None:
    """Print the figures of all families."""
    ranks, *families = sys.argv[1:]
    torch.manual_seed(0)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=int(ranks))
    found: dict[str, Any] = {family: count_family(family, int(ranks)) for family in families}
    print(json.dumps({**found, "adapters": count_adapters()}))


if __name__ == "__main__":
    main()
