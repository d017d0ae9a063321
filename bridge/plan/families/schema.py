"""Typed keys of a model's config: all keys that the table of families reads."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le
from pydantic import BeforeValidator, Field as field

from bridge.plan.section import Count, Real, Section, Size, Whole, tuples

Null = Literal["null"]
Positive = Annotated[Real, Gt(0)]
Share = Annotated[Real, Ge(0), Le(1)]
NonNegative = Annotated[Real, Ge(0)]
Kinds = Annotated[
    tuple[Literal["full_attention", "sliding_attention"], ...], BeforeValidator(tuples)
]
Sorts = Annotated[tuple[Literal["dense", "sparse"], ...], BeforeValidator(tuples)]
Sizes = Annotated[tuple[Size, ...], BeforeValidator(tuples)]
Switches = Annotated[tuple[bool, ...], BeforeValidator(tuples)]
Bits = Annotated[tuple[Literal[0, 1], ...], BeforeValidator(tuples)]
Token = Whole | str | Null
"""The number of a token; a text is kept, because releases differ in what they do with it."""
Tokens = Annotated[tuple[Whole | str, ...] | Token, BeforeValidator(tuples)]
Free = dict[str, Any]
REST = "*"
"""Where a config keeps keys that its schema does not name."""
WHOLE = ("query_pre_attn_scalar",)
"""Keys that transformers accepts only as whole numbers, although the plan's field may hold a
fraction.
"""


def spell_value(key: str, value: Any) -> Any:
    """Return a value as a file spells it: null for `NULL`, a list for a tuple, and an int for a
    float if the key is in `WHOLE`.
    """
    if isinstance(value, str) and value == "null":
        return None
    if key in WHOLE and isinstance(value, float) and value.is_integer():
        return int(value)
    return list(value) if isinstance(value, tuple) else value


class ModelKeys(Section):
    """Keys of `config.json` that describe a model; each family reads some of them."""

    num_hidden_layers: Count | None = field(None, description="Number of decoder layers.")
    hidden_size: Count | None = field(None, description="Width of the residual stream.")
    num_attention_heads: Count | None = field(None, description="Number of attention heads.")
    num_key_value_heads: Count | Null | None = field(
        None, description="Number of key and value heads; null: the number of attention heads."
    )
    intermediate_size: Count | None = field(None, description="Width of the feed-forward layer.")
    vocab_size: Count | None = field(None, description="Vocabulary size.")
    pad_token_id: Token | None = field(
        None,
        description="Number of the padding token, whose row of the embedding most families do not train.",
    )
    bos_token_id: Token | None = field(
        None, description="Number of the token that begins a document."
    )
    eos_token_id: Tokens | None = field(
        None, description="Number of the token that ends a document, or of several tokens."
    )
    tie_word_embeddings: bool | None = field(
        None, description="Embedding and output layer share their weights."
    )
    head_dim: Count | Null | None = field(
        None, description="Width of a head; null: hidden size / heads."
    )
    hidden_act: str | None = field(
        None, description="Activation function of the feed-forward layer."
    )
    hidden_activation: str | None = field(
        None,
        description="Name of the feed-forward layer's activation function, in configs of Gemma.",
    )
    activation_function: str | None = field(
        None,
        description=(
            "Name of the feed-forward layer's activation function, in configs of GPT-2 and OPT."
        ),
    )
    activation: str | None = field(
        None,
        description="Name of the feed-forward layer's activation function, in configs of Falcon.",
    )
    max_position_embeddings: Count | None = field(
        None, description="Largest number of positions that the model supports."
    )
    original_max_position_embeddings: Count | None = field(
        None, description="Largest number of positions before rotary positions were scaled."
    )
    initializer_range: NonNegative | None = field(
        None, description="Standard deviation of initial weights."
    )
    init_std: NonNegative | None = field(
        None, description="Standard deviation of initial weights, in configs of OPT."
    )
    # Names of sizes in older families
    n_layer: Count | None = field(None, description="Number of layers, in configs of GPT-2.")
    n_embd: Count | None = field(None, description="Hidden size, in configs of GPT-2.")
    n_embed: Count | None = field(
        None, description="Hidden size, in older configs of Bloom and Falcon."
    )
    n_head: Count | None = field(
        None, description="Number of attention heads, in configs of GPT-2."
    )
    n_positions: Count | None = field(None, description="Number of positions, in configs of GPT-2.")
    n_inner: Count | None = field(
        None, description="Width of the feed-forward layer, in configs of GPT-2; null: 4 x hidden."
    )
    ffn_dim: Count | None = field(
        None, description="Width of the feed-forward layer, in configs of OPT."
    )
    ffn_hidden_size: Count | None = field(
        None,
        description=(
            "Width of the feed-forward layer, in configs of Falcon; if missing: 4 x hidden."
        ),
    )
    word_embed_proj_dim: Count | None = field(
        None, description="Width of OPT's embedding; null: the hidden size."
    )
    # Norms
    rms_norm_eps: NonNegative | None = field(
        None, description="Term added to the variance in RMSNorm."
    )
    layer_norm_eps: NonNegative | None = field(
        None, description="Term added to the variance in LayerNorm."
    )
    layer_norm_epsilon: NonNegative | None = field(
        None, description="Term added to the variance in LayerNorm, in configs of GPT-2."
    )
    norm_eps: NonNegative | None = field(
        None, description="Term added to the variance in LayerNorm, in configs of Nemotron."
    )
    norm_epsilon: NonNegative | None = field(
        None, description="Term added to the variance in LayerNorm, in configs of Starcoder 2."
    )
    do_layer_norm_before: bool | None = field(
        None, description="OPT's norms come before each layer."
    )
    use_parallel_residual: bool | None = field(
        None, description="Attention and feed-forward layer of GPT-NeoX's blocks run in parallel."
    )
    # Biases
    attention_bias: bool | None = field(
        None, description="Attention's projections have biases; the family determines which."
    )
    mlp_bias: bool | None = field(
        None, description="The feed-forward layer's projections have biases."
    )
    qkv_bias: bool | None = field(
        None, description="Qwen2-MoE's projections to queries, keys and values have biases."
    )
    use_qkv_bias: bool | None = field(
        None, description="Projections to queries, keys and values have biases, in configs of Ling."
    )
    enable_bias: bool | None = field(None, description="All of OPT's projections have biases.")
    use_bias: bool | None = field(None, description="All projections have biases.")
    bias: bool | None = field(None, description="All of Falcon's projections have biases.")
    # Attention
    attention_dropout: Share | None = field(
        None, description="Dropout of attention's probabilities."
    )
    attn_pdrop: Share | None = field(
        None, description="Dropout of attention's probabilities, in configs of GPT-2."
    )
    use_qk_norm: bool | None = field(None, description="Queries and keys have norms.")
    qk_layernorm: bool | None = field(
        None, description="Queries and keys have norms, in configs of Phi."
    )
    attn_logit_softcapping: Positive | Null | None = field(
        None, description="Bound of attention's logits."
    )
    final_logit_softcapping: Positive | Null | None = field(
        None, description="Bound of the output's logits."
    )
    query_pre_attn_scalar: Positive | None = field(
        None, description="Gemma's queries are multiplied by 1 / sqrt of this number."
    )
    attention_multiplier: Positive | None = field(
        None, description="Granite's factor of attention's logits."
    )
    sliding_window: Size | Null | None = field(
        None, description="Number of tokens that a token attends to; null: all before it."
    )
    use_sliding_window: bool | None = field(None, description="Qwen's sliding window is used.")
    max_window_layers: Size | None = field(
        None, description="Index of Qwen's first block with a sliding window."
    )
    layer_types: Kinds | None = field(None, description="Kind of each block's attention.")
    sliding_window_pattern: Count | None = field(
        None,
        description=(
            "Period of blocks; all blocks of a period except the last have a sliding window."
        ),
    )
    no_rope_layers: Bits | None = field(
        None, description="For each block of SmolLM3: 1 with rotary positions, 0 without."
    )
    no_rope_layer_interval: Count | None = field(
        None,
        description=(
            "Period of SmolLM3's blocks; the last block of each period has no rotary positions."
        ),
    )
    multi_query: bool | None = field(
        None, description="All queries share one head of keys and values."
    )
    num_kv_heads: Count | None = field(
        None, description="Number of key and value heads in Falcon's newer blocks."
    )
    new_decoder_architecture: bool | None = field(None, description="Falcon's newer blocks.")
    parallel_attn: bool | None = field(
        None, description="Falcon's attention and feed-forward layer run in parallel."
    )
    num_ln_in_parallel_attn: Literal[1, 2] | None = field(
        None, description="Number of norms in Falcon's newer blocks."
    )
    alibi: bool | None = field(None, description="Falcon encodes positions as a bias of attention.")
    q_lora_rank: Count | Null | None = field(
        None, description="Rank of the low-rank projection of queries; null: a single projection."
    )
    kv_lora_rank: Count | None = field(
        None, description="Rank of the low-rank projection of keys and values."
    )
    qk_nope_head_dim: Count | None = field(
        None, description="Width of the part of a head without rotary positions."
    )
    qk_rope_head_dim: Count | None = field(
        None, description="Width of the part of a head with rotary positions."
    )
    v_head_dim: Count | None = field(None, description="Width of a head's values.")
    # Rotary positions
    rope_theta: Positive | None = field(None, description="Base of the rotary frequencies.")
    rotary_emb_base: Positive | None = field(
        None, description="Base of the rotary frequencies, in configs of GPT-NeoX."
    )
    rope_local_base_freq: Positive | None = field(
        None, description="Base of the rotary frequencies in blocks with a sliding window."
    )
    rope_scaling: Free | None = field(
        None, description="Scaling of rotary positions, before transformers 5."
    )
    rope_parameters: Free | None = field(
        None, description="Base and scaling of rotary positions together, since transformers 5."
    )
    partial_rotary_factor: Annotated[Real, Gt(0), Le(1)] | None = field(
        None, description="Share of a head's width with rotary positions."
    )
    rotary_pct: Annotated[Real, Gt(0), Le(1)] | None = field(
        None, description="Share of a head's width with rotary positions, in configs of GPT-NeoX."
    )
    rotary_dim: Count | None = field(
        None, description="Width of the part of a head with rotary positions."
    )
    rope_interleave: bool | None = field(None, description="Neighbours rotate together.")
    # Factors
    logit_scale: Positive | None = field(None, description="Factor of the output's logits.")
    logits_scaling: Positive | None = field(None, description="Divisor of the output's logits.")
    embedding_multiplier: Positive | None = field(
        None, description="Factor of the embedding's output."
    )
    residual_multiplier: Positive | None = field(
        None, description="Factor of each layer's output before it is added to the residual stream."
    )
    swiglu_limit: Positive | None = field(
        None, description="Limit of the values of the gate and of the up projection."
    )
    # Dropout
    hidden_dropout: Share | None = field(None, description="Dropout of each layer's output.")
    resid_pdrop: Share | None = field(
        None, description="Dropout of each layer's output, in configs of GPT-2."
    )
    dropout: Share | None = field(
        None, description="Dropout of each layer's output, in configs of OPT."
    )
    residual_dropout: Share | None = field(
        None, description="Dropout of each layer's output, in configs of Starcoder 2."
    )
    embd_pdrop: Share | None = field(None, description="Dropout of the embedding's output.")
    embedding_dropout: Share | None = field(
        None, description="Dropout of the embedding's output, in configs of Starcoder 2."
    )
    # Experts
    num_experts: Count | None = field(
        None, description="Number of experts in a layer, in configs of Qwen."
    )
    num_local_experts: Count | None = field(
        None, description="Number of experts in a layer, in configs of Mixtral and GPT-OSS."
    )
    n_routed_experts: Count | None = field(
        None, description="Number of experts in a layer, in configs of DeepSeek."
    )
    moe_num_experts: Count | None = field(
        None, description="Number of experts in a layer, in configs of Ernie."
    )
    num_experts_per_tok: Count | None = field(
        None, description="Number of experts that each token is routed to."
    )
    experts_per_token: Count | None = field(
        None,
        description="Number of experts that each token is routed to, in early configs of GPT-OSS.",
    )
    moe_k: Count | None = field(
        None, description="Number of experts that each token is routed to, in configs of Ernie."
    )
    moe_intermediate_size: Count | None = field(None, description="Width of an expert.")
    shared_expert_intermediate_size: Size | None = field(
        None, description="Width of the shared expert."
    )
    n_shared_experts: Size | None = field(
        None, description="Number of shared experts, each as wide as a routed expert."
    )
    num_shared_experts: Size | None = field(
        None,
        description="Number of shared experts, each as wide as a routed expert, in "
        "configs of EXAONE and Ling.",
    )
    moe_num_shared_experts: Size | None = field(
        None,
        description=(
            "Number of shared experts, each as wide as a routed expert, in configs of Ernie."
        ),
    )
    norm_topk_prob: bool | None = field(
        None, description="The weights of a token's experts sum to one."
    )
    routed_scaling_factor: Positive | None = field(
        None, description="Factor of the weights of a token's experts."
    )
    scoring_func: Literal["softmax", "sigmoid"] | None = field(
        None, description="Function that turns router logits into weights."
    )
    n_group: Count | None = field(None, description="Groups of experts.")
    topk_group: Count | None = field(
        None, description="Number of groups of experts that a token may choose from."
    )
    topk_method: str | None = field(None, description="How DeepSeek chooses experts.")
    router_aux_loss_coef: NonNegative | None = field(
        None, description="Coefficient of the loss that balances experts."
    )
    output_router_logits: bool | None = field(
        None, description="Training includes the loss that balances experts."
    )
    aux_loss_alpha: NonNegative | None = field(
        None,
        description="Coefficient of the loss that balances experts, in configs of DeepSeek-V2.",
    )
    seq_aux: bool | None = field(
        None, description="DeepSeek-V2 balances its experts within each sequence."
    )
    decoder_sparse_step: Count | None = field(
        None, description="Distance between blocks with experts; 1: every block."
    )
    mlp_only_layers: Sizes | None = field(None, description="Blocks without experts.")
    first_k_dense_replace: Size | None = field(None, description="First blocks without experts.")
    moe_layer_freq: Count | None = field(
        None, description="Distance between blocks with experts, after the first dense blocks."
    )
    mlp_layer_types: Sorts | None = field(
        None, description="Kind of each block's feed-forward layer."
    )
    is_moe_layer: Switches | None = field(None, description="Which blocks have experts.")
    moe_layer_start_index: Size | None = field(
        None, description="Index of Ernie's first block with experts."
    )
    moe_layer_end_index: Annotated[Whole, Ge(-1)] | None = field(
        None,
        description="Index of Ernie's last block with experts; -1: the last block of the model.",
    )
    moe_layer_interval: Count | None = field(
        None, description="Distance between blocks with experts; 1: every block."
    )
    num_nextn_predict_layers: Size | None = field(
        None, description="Number of extra blocks that predict further tokens."
    )
    num_mtp_layers: Size | None = field(
        None,
        description="Number of extra blocks that predict further tokens, since transformers 5.",
    )
