"""Families of models whose activations were counted, with what their code in transformers keeps
differently from Llama's and GPT's.
"""

from __future__ import annotations

from collections.abc import Mapping

TRAITS: Mapping[str, str] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "granite", "smollm3", "starcoder2"), ""),
    **dict.fromkeys(("opt", "gpt_bigcode", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe"), ""),
    **dict.fromkeys(("gemma", "gemma3_text", "olmo2"), "wide-norm"),
    "gemma2": "wide-norm eager",
    **dict.fromkeys(("cohere", "cohere2"), "norm-steps"),
    "ernie4_5": "tables",
    "exaone_moe": "wide-router",
    "ernie4_5_moe": "wide-router",
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite"), "wide-router copied-output"),
    "glm4_moe": "wide-router copied-output",
    **dict.fromkeys(("glm", "glm4", "minimax_m2", "nemotron"), "copied-output"),
    "phi": "plain-gelu copied-output",
    **dict.fromkeys(("phi3", "gpt_neox"), "fused-queries copied-output"),
    "gpt2": "plain-gelu narrow-softmax",
    "gptj": "plain-gelu wide-queries eager",
    "bloom": "eager",
    "falcon": "narrow-softmax one-key",
}
"""What is special of each family that was counted (transformers, models/FAMILY/modeling_FAMILY.py),
in these words. Of all others nothing was counted.

- `wide-norm`: multiplies the weight of an RMSNorm in fp32.
- `norm-steps`: LayerNorm in several operations, in fp32.
- `wide-router`: the router of experts reads an fp32 copy of its input.
- `tables`: each layer makes its own cosines and sines, in fp32.
- `fused-queries`: one projection makes queries, keys and values, and queries and keys are rotated.
- `wide-queries`: rotates queries and keys in fp32, and leaves them so.
- `copied-output`: joins parts of a head; the output of fused attention has their order, and is copied.
- `plain-gelu`: the activation function is gelu_new, which is written in several operations.
- `narrow-softmax`: eager attention has no fp32 copy of the probabilities.
- `one-key`: one head of keys for all queries, which fused attention refuses: torch takes its plain one.
- `eager`: transformers has no fused attention of torch's for it.
"""


def uncounted(family: str | None, norm: str, attention: str) -> str | None:
    """Return a sentence if the activations of `family` with this kind of attention were not counted."""
    like = "Llama" if norm == "rms" else "GPT"
    if family is None or family not in TRAITS:
        name = f"{family} were not counted" if family else "a family that is not known"
        return f"activations of {name}: these are those of a {like} of its sizes"
    if "eager" in TRAITS[family].split() and attention != "eager":
        return (
            f"the attention of {family} is eager in transformers unless flash attention is"
            " asked for; its probabilities are not counted"
        )
    return None
