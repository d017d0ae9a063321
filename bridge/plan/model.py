"""The model's part of a Plan: a decoder of transformer blocks in the field's standard terms."""

# No annotation is a text here: pydantic would compile each of them at every start.
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le
from pydantic import Field as field

from bridge.plan.section import Count, Real, Section, Size

Positive = Annotated[Real, Gt(0)]
Share = Annotated[Real, Ge(0), Le(1)]


class Latent(Section):
    """Multi-head latent attention: queries, keys and values are made from narrow vectors."""

    query_rank: Size | None = field(
        None,
        description=(
            "Width of the vector that queries are made from; 0: queries are made from the "
            "hidden state."
        ),
    )
    kv_rank: Count | None = field(
        None, description="Width of the vector that keys and values are made from."
    )
    plain_size: Count | None = field(
        None, description="Width of the part of a head without rotary positions."
    )
    rotary_size: Count | None = field(
        None, description="Width of the part of a head with rotary positions."
    )
    value_size: Count | None = field(None, description="Width of a head's values.")


class Attention(Section):
    """Attention of a block."""

    head_size: Count | None = field(None, description="Width of a head; open: hidden / heads.")
    qkv_bias: bool | None = field(
        None, description="Projections to queries, keys and values have biases."
    )
    output_bias: bool | None = field(
        None, description="The projection of attention's output has a bias."
    )
    norm: Literal["none", "head", "own", "width"] | None = field(
        None,
        description=(
            "Norm of queries and keys: none, head (over each head, with the same weights), own "
            "(over each head, with separate weights), or width (over all heads; with latent "
            "attention, over the narrow vectors)."
        ),
    )
    window: Count | None = field(
        None,
        description=(
            "Number of tokens that a token attends to, itself included; open: all earlier tokens."
        ),
    )
    windowed: tuple[bool, ...] | None = field(
        None,
        description="Blocks in which a token attends only to `window` tokens; open: all blocks.",
    )
    softcap: Positive | None = field(
        None,
        description="Bound c of attention's logits, which become c tanh(x / c); open: no bound.",
    )
    scale: Positive | None = field(
        None, description="Factor of attention's logits; open: 1 / sqrt(head size)."
    )
    sinks: bool | None = field(
        None,
        description=(
            "Each head has a learned logit in the softmax that stands for no token (a sink)."
        ),
    )
    dropout: Share | None = field(None, description="Dropout of attention's probabilities.")
    latent: Latent = field(
        default_factory=Latent, description="Multi-head latent attention; open: ordinary heads."
    )


class RotaryScaling(Section):
    """Scaling of rotary positions beyond the length that the model was trained for."""

    kind: Literal["none", "linear", "dynamic", "yarn", "llama3", "longrope"] | None = field(
        None, description="Kind of scaling."
    )
    factor: Positive | None = field(
        None, description="Longest new sequence divided by the original length."
    )
    original: Count | None = field(
        None, description="Number of positions that the model was first trained for."
    )
    low: Positive | None = field(
        None,
        description=(
            "llama3: frequencies that rotate fewer times than this number within the original "
            "length are scaled in full (low_freq_factor)."
        ),
    )
    high: Positive | None = field(
        None,
        description=(
            "llama3: frequencies that rotate more times than this number within the original "
            "length are not scaled (high_freq_factor)."
        ),
    )
    fast: Positive | None = field(
        None,
        description=(
            "yarn: frequencies that rotate more times than this number within the original length "
            "are not scaled (beta_fast)."
        ),
    )
    slow: Positive | None = field(
        None,
        description=(
            "yarn: frequencies that rotate fewer times than this number within the original length "
            "are scaled in full (beta_slow)."
        ),
    )
    attention: Positive | None = field(
        None, description="yarn: factor of rotated queries and keys; open: computed from `factor`."
    )
    mscale: Annotated[Real, Ge(0)] | None = field(
        None, description="yarn: weight of the logarithm of `factor` in the factor `attention`."
    )
    mscale_all: Annotated[Real, Ge(0)] | None = field(
        None, description="yarn: like `mscale`, for the part of a head without rotary positions."
    )
    truncate: bool | None = field(
        None,
        description="yarn: the bounds between scaled and unscaled frequencies are whole numbers.",
    )


class Rotary(Section):
    """Rotary positions."""

    base: Positive | None = field(None, description="Base of the frequencies (theta).")
    local_base: Positive | None = field(
        None,
        description=(
            "Base of the frequencies in blocks whose attention has a window; open: the base of the "
            "other blocks."
        ),
    )
    share: Share | None = field(
        None, description="Share of a head's width with rotary positions; open: the whole width."
    )
    interleaved: bool | None = field(
        None,
        description=(
            "Rotary positions pair neighbouring elements, rather than elements of the two halves "
            "of a head."
        ),
    )
    layers: tuple[bool, ...] | None = field(
        None, description="Blocks with rotary positions; open: all blocks."
    )
    scaling: RotaryScaling = field(
        default_factory=RotaryScaling,
        description="Scaling of rotary positions to longer sequences.",
    )


class FeedForward(Section):
    """Feed-forward layer of a block; experts have the same form."""

    activation: (
        Literal["gelu", "gelu_tanh", "quick_gelu", "silu", "relu", "squared_relu", "xielu"] | None
    ) = field(
        None, description="Activation function; gelu is the exact form, gelu_tanh an approximation."
    )
    gated: bool | None = field(
        None, description="A second projection multiplies the activation's result (GLU)."
    )
    bias: bool | None = field(None, description="Its projections have biases.")
    clamp: Positive | None = field(
        None,
        description=(
            "Bound of the results of the gate and the up projection before they are multiplied; "
            "open: no bound."
        ),
    )
    offset: Real | None = field(
        None,
        description=(
            "Number added to the result of the up projection before the gate multiplies this result; "
            "open: 0."
        ),
    )


class Norm(Section):
    """Norms of a block and of the output."""

    kind: Literal["layer", "rms"] | None = field(None, description="LayerNorm or RMSNorm.")
    eps: Annotated[Real, Ge(0)] | None = field(None, description="Term added to the variance.")
    zero_centred: bool | None = field(
        None, description="A norm's weights are stored as the difference from one."
    )
    bias: bool | None = field(None, description="Norms have biases.")
    place: Literal["before", "after", "both", "post"] | None = field(
        None,
        description=(
            "Position of norms in a block: before each layer, after each layer (before the "
            "residual is added), or both; post: after the residual is added, and no norm follows "
            "the last block."
        ),
    )
    parallel: bool | None = field(
        None, description="Attention and feed-forward layer run in parallel on the same input."
    )
    shared: bool | None = field(
        None,
        description=(
            "If attention and feed-forward layer run in parallel, they share one norm of the input."
        ),
    )


class Embedding(Section):
    """Embedding and output layer."""

    positions: Literal["none", "rotary", "learned", "alibi"] | None = field(
        None, description="Kind of position encoding in the model."
    )
    max_positions: Count | None = field(
        None,
        description=(
            "Number of positions that the model is made for; with learned positions, the rows of "
            "the table of positions."
        ),
    )
    offset: Size | None = field(
        None,
        description="Number of rows in the table of learned positions that come before position 0.",
    )
    padded_vocab: Count | None = field(
        None,
        description="Number of rows of the embedding, padding included; open: the vocabulary size.",
    )
    padding: Size | str | None = field(
        None,
        description=(
            "Number of the padding token, whose row of the embedding starts at zero and gets no "
            "gradient as an input; none: all rows are trained."
        ),
    )
    begin: Size | str | None = field(
        None,
        description=(
            "Number of the token that begins a document, or none, as the model's config says."
        ),
    )
    ends: tuple[Size | str, ...] | None = field(
        None,
        description=(
            "Numbers of the tokens that end a document, as the model's config says; empty: none."
        ),
    )
    width: Count | None = field(
        None,
        description=(
            "Width of the embedding, if not `hidden`; projections convert between the two widths "
            "at input and output."
        ),
    )
    scale: Positive | None = field(None, description="Factor of the embedding's output; open: 1.")
    norm: bool | None = field(None, description="A norm follows the embedding.")
    output_bias: bool | None = field(None, description="The output layer has a bias.")
    softcap: Positive | None = field(
        None,
        description="Bound c of the output's logits, which become c tanh(x / c); open: no bound.",
    )
    logit_scale: Positive | None = field(
        None, description="Factor of the output's logits; open: 1."
    )
    residual_scale: Positive | None = field(
        None, description="Factor of a block's output before it is added to the residual; open: 1."
    )
    dropout: Share | None = field(None, description="Dropout of the embedding's output.")


class Moe(Section):
    """Experts of a block; `model.experts` is the number of experts."""

    top_k: Count | None = field(None, description="Number of experts that a token uses.")
    ffn: Count | None = field(
        None, description="Width of an expert; open: the width of the feed-forward layer."
    )
    shared_ffn: Size | None = field(
        None, description="Width of all shared experts together; 0: no shared experts."
    )
    shared_gate: bool | None = field(
        None, description="The shared experts' output has a learned gate."
    )
    layers: tuple[bool, ...] | None = field(
        None, description="Blocks that have experts; open: all blocks."
    )
    score: Literal["softmax", "sigmoid", "sqrtsoftplus"] | None = field(
        None, description="Function that turns a router's logits into weights."
    )
    normalised: bool | None = field(
        None, description="The weights of a token's chosen experts sum to one."
    )
    scale: Positive | None = field(
        None, description="Factor of the weights of the chosen experts; open: 1."
    )
    groups: Count | None = field(
        None, description="Number of groups of experts; a token chooses groups first, then experts."
    )
    top_groups: Count | None = field(
        None, description="Number of groups that a token may choose from."
    )
    group_best: Count | None = field(
        None,
        description=(
            "Number of experts, the best of a group, whose scores are summed; the groups with the "
            "largest sums are chosen."
        ),
    )
    balance: Literal["none", "batch", "pooled", "sequence", "global", "sinkhorn"] | None = field(
        None,
        description=(
            "How the experts' loads are balanced: by a loss in each block over a microbatch (batch), "
            "a sequence, or a step (global); by one loss for all blocks (pooled); or without a loss, "
            "by Sinkhorn's iteration."
        ),
    )
    aux_loss: Annotated[Real, Ge(0)] | None = field(
        None,
        description=(
            "Coefficient of the balancing loss: experts x sum over experts of (assignments per "
            "token x mean score)."
        ),
    )
    aux_trained: bool | None = field(
        None,
        description=(
            "Training adds the balancing loss; open: true if the coefficient of this loss is not 0."
        ),
    )
    z_loss: Annotated[Real, Ge(0)] | None = field(
        None, description="Coefficient of the router's z-loss, the mean of logsumexp(logits)^2."
    )
    router_bias: bool | None = field(
        None, description="The router has a bias that is learned by gradients."
    )
    balance_bias: bool | None = field(
        None,
        description=(
            "A bias that balances the experts' loads is added to the scores that choose experts."
        ),
    )
    balance_rate: Annotated[Real, Ge(0)] | None = field(
        None, description="Amount by which a step changes the balancing bias."
    )
    capacity: Positive | None = field(
        None,
        description=(
            "Number of tokens that an expert takes, as a multiple of an equal share; further "
            "tokens are dropped."
        ),
    )


class Init(Section):
    """Initial weights."""

    std: Annotated[Real, Ge(0)] | None = field(
        None, description="Standard deviation of the initial weights."
    )
    scaled: bool | None = field(
        None,
        description=(
            "Projections into the residual start with standard deviation std / sqrt(2 x layers)."
        ),
    )


class Model(Section):
    """The model: a decoder of transformer blocks."""

    family: str | None = field(
        None, description="Model type by the name that Hugging Face gives it."
    )
    layers: Count | None = field(None, description="Number of transformer layers.")
    hidden: Count | None = field(None, description="Width of the residual stream.")
    heads: Count | None = field(None, description="Number of attention heads.")
    kv_heads: Count | None = field(
        None, description="Number of key and value heads (grouped queries); open: `heads`."
    )
    ffn: Count | None = field(None, description="Width of the feed-forward layer.")
    experts: Count | None = field(
        None, description="Number of experts in a mixture-of-experts layer."
    )
    tied: bool | None = field(None, description="Embedding and output layer share their weights.")
    vocab: Count | None = field(None, description="Vocabulary size, before padding.")
    sequence: Count | None = field(None, description="Number of tokens in a sequence.")
    predicted: Size | None = field(
        None,
        description="Number of further tokens that extra blocks predict (multi-token prediction).",
    )
    dropout: Share | None = field(
        None, description="Dropout of each layer's output before it is added to the residual."
    )
    attention: Attention = field(default_factory=Attention, description="Attention.")
    rotary: Rotary = field(default_factory=Rotary, description="Rotary positions.")
    mlp: FeedForward = field(default_factory=FeedForward, description="Feed-forward layer.")
    norm: Norm = field(default_factory=Norm, description="Norms.")
    embedding: Embedding = field(
        default_factory=Embedding, description="Embedding and output layer."
    )
    moe: Moe = field(default_factory=Moe, description="Experts.")
    init: Init = field(default_factory=Init, description="Initial weights.")
