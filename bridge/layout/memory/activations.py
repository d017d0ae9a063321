"""Activations: what each layer keeps of a microbatch until its backward pass, and what the loss and
a backward pass need for a moment.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from bridge.layout.architecture import Architecture
from bridge.layout.memory.adapters import adapted_parts
from bridge.layout.memory.families import TRAITS
from bridge.layout.memory.terms import Term, product
from bridge.layout.shard import BYTES
from bridge.plan.plan import Plan
from bridge.stack.memory_rules import MemoryRules

Part = Literal[
    "input", "norm", "projections", "attention", "mlp", "latent", "experts", "shared_experts"
]
"""Part of a block, by the name that selective recomputation has for it."""


class Kept(NamedTuple):
    """A tensor that a block keeps: elements of a token, bytes of an element, and the number of
    tensor ranks that divide it.
    """

    what: str
    part: Part
    width: float
    bytes: int
    ranks: int


@dataclass(frozen=True)
class Tokens:
    """Sizes of a microbatch on one rank. `count` are its tokens on one context rank, `keys` the
    tokens of a sequence, and `context` the number of context ranks. `tensor` ranks divide what is
    split by heads and columns, and `sequence` ranks what is split by tokens.
    """

    count: int
    keys: int
    context: int
    tensor: int
    sequence: int

    @classmethod
    def of(cls, plan: Plan, shape: Architecture, micro: int) -> Tokens:
        """The tokens of a microbatch of `micro` sequences."""
        parallel = plan.parallel
        context, tensor = parallel.context or 1, parallel.tensor or 1
        sequence = tensor if parallel.sequence else 1
        return cls(-(-micro * shape.sequence // context), shape.sequence, context, tensor, sequence)


@dataclass(frozen=True)
class Keeper:
    """Says what the layers of one model keep, by the plan and by the rules of its stack."""

    plan: Plan
    shape: Architecture
    tokens: Tokens
    rules: MemoryRules

    def has(self, trait: str) -> bool:
        """Whether the model's family does what `trait` names (families.py)."""
        family = self.plan.model.family or ""
        return self.rules.kernels == "torch" and trait in TRAITS.get(family, "").split()

    @property
    def plain(self) -> bool:
        """Whether torch takes its plain attention in place of a fused one."""
        flash = self.rules.attention == "flash"
        return flash and self.shape.kv_heads == 1 < self.shape.heads and self.has("one-key")

    @property
    def frozen(self) -> bool:
        """Whether only adapters are trained. A frozen matrix needs no input for its backward pass."""
        return bool(self.plan.adapters.rank)

    @property
    def width(self) -> int:
        """Bytes of an element of an activation."""
        return BYTES[self.plan.precision.autocast or self.plan.precision.compute or "fp32"]

    def block(self, block: int) -> list[Kept]:
        """What a block keeps if nothing of it is computed again."""
        shape = self.shape
        attention = self._latent() if shape.latent else self._attention()
        feed = self._experts() if shape.has_experts(block) else self._dense(shape.ffn, "mlp")
        kept = [*self._norms(block), *attention, *self._core(), *feed, *self._dropped()]
        return [*kept, *self._adapters(block)]

    def kept(self, block: int) -> list[Kept]:
        """What a block keeps after its forward pass, less what selective recomputation drops."""
        recompute = self.plan.recompute
        if recompute.granularity != "selective":
            return self.block(block)
        parts = set(recompute.modules or ("attention",))
        # What a norm is computed from stays, so that it can be computed again.
        return [
            one
            for one in self.block(block)
            if one.part not in parts or one.what.endswith(": input")
        ]

    def input(self) -> Kept:
        """The input of a block, all that a block keeps that is computed again as a whole."""
        ranks = self.tokens.tensor if self.plan.recompute.partition else self.tokens.sequence
        return Kept("input", "input", self.shape.hidden, self.width, ranks)

    def bytes(self, kept: Iterable[Kept]) -> int:
        """Number of bytes of these tensors for one microbatch."""
        count = self.tokens.count
        return sum(round(count * one.width * one.bytes / one.ranks) for one in kept)

    def terms(self, kept: Iterable[Kept], number: float, of: str) -> Iterator[Term]:
        """Yield a term for each of these tensors, of `number` blocks; `of` says what is counted."""
        for one in kept:
            factors = [(number, of), (self.tokens.count, "tokens"), (one.width, "elements")]
            factors.append((one.bytes, "bytes"))
            if one.ranks > 1:
                factors.append((1 / one.ranks, f"(1/{one.ranks} of a tensor rank)"))
            yield product("activations", one.what, *factors)

    # What parts of a block keep

    def _norm(
        self, what: str, width: int, ranks: int, vectors: int = 1, output: bool = True
    ) -> Iterator[Kept]:
        """Yield what norms of `vectors` vectors of together `width` elements keep: input, a number or
        two for each vector, and output, if what follows keeps it. Plain torch computes RMSNorm in
        fp32, and keeps the input in fp32 and the normed vector too.
        """
        rms = self.shape.norm == "rms"
        plain = self.rules.kernels == "torch" and rms
        if self.has("norm-steps"):
            yield Kept(f"{what}: less the mean", "norm", 2 * width, 4, ranks)
            plain, rms = True, True
        yield Kept(f"{what}: input", "norm", width, 4 if plain else self.width, ranks)
        yield Kept(f"{what}: statistics", "norm", vectors * (1 if rms else 2), 4, ranks)
        if plain and not self.frozen and not self.has("norm-steps"):
            wide = self.has("wide-norm")
            yield Kept(f"{what}: normed", "norm", width, 4 if wide else self.width, ranks)
        if output and not (self.frozen and self.rules.copies_inputs):
            yield Kept(f"{what}: output", "norm", width, self.width, ranks)

    def _norms(self, block: int) -> Iterator[Kept]:
        hidden, ranks = self.shape.hidden, self.tokens.sequence
        before = 1 if self.shape.shared_norm else 2
        if self.frozen and block == 0:
            before -= 1  # no gradient goes on to a frozen embedding
        if before:
            both = self.plan.model.norm.parallel and before == 2
            for one in self._norm("norms", before * hidden, ranks, before):
                # Two norms of one input, by torch's LayerNorm, keep it once.
                once = both and self.shape.norm == "layer" and one.what.endswith(": input")
                yield one._replace(width=hidden) if once else one
        if self.shape.place == "both":
            # What follows is a sum, which keeps nothing.
            yield from self._norm("norms after layers", 2 * hidden, ranks, 2, output=False)

    def _attention(self) -> Iterator[Kept]:
        shape, ranks = self.shape, self.tokens.tensor
        queries, keys = shape.heads * shape.head, shape.kv_heads * shape.head
        if shape.head_norm != "none":
            heads = shape.heads + shape.kv_heads if shape.head_norm != "width" else 2
            # Rotary positions follow, which do not keep what they rotate.
            what = "norm of queries and keys"
            yield from self._norm(what, queries + keys, ranks, heads, output=False)
        eager = self.rules.attention == "eager"
        if self.has("fused-queries") and not eager:
            # Values are a view of one result, which is kept whole; queries and keys are rotated.
            what = "queries and keys before they are rotated"
            yield Kept(what, "projections", queries + keys, self.width, ranks)
        if self.has("tables"):
            # Of each position, whatever the number of sequences.
            width = 2 * shape.head * self.tokens.keys / self.tokens.context / self.tokens.count
            yield Kept("cosines and sines of positions", "projections", width, 4, 1)
        if eager or self.plain:
            keys = queries  # each is repeated for every head that shares it
        wide = queries + keys if self.has("wide-queries") else 3 * queries if self.plain else 0
        if wide:
            what = "queries and keys in fp32" if not self.plain else "queries, keys, values in fp32"
            yield Kept(what, "projections", wide, 4, ranks)
        narrow = queries + 2 * keys - wide
        if narrow:
            yield Kept("queries, keys, values", "projections", narrow, self.width, ranks)
        yield from self._output(queries)

    def _output(self, width: int) -> Iterator[Kept]:
        """Yield what the last projection reads, and what fused attention made of it."""
        flash, ranks = self.rules.attention == "flash", self.tokens.tensor
        if flash and self.has("copied-output"):
            yield Kept("output of attention, by heads", "attention", width, self.width, ranks)
        if flash or not (self.frozen and self.rules.copies_inputs):
            yield Kept("output of attention", "projections", width, self.width, ranks)

    def _latent(self) -> Iterator[Kept]:
        shape, it, ranks = self.shape, self.shape.latent, self.tokens.tensor
        assert it is not None
        narrow = (it.query, it.kv)
        if shape.head_norm != "none":
            for name, width in zip(("queries", "keys"), narrow, strict=True):
                yield from self._norm(f"norm of narrow {name}", width, self.tokens.sequence)
        head = 2 * (it.plain + it.rotary) + it.value
        if self.rules.kernels == "torch" and self.rules.attention == "flash":
            # Values are a view of what keys are copied from.
            head += it.plain
        yield Kept("queries, keys, values", "latent", shape.heads * head, self.width, ranks)
        if self.rules.kernels == "fused":
            yield Kept("rotary part of keys", "latent", it.rotary, self.width, self.tokens.sequence)
        yield from self._output(shape.heads * it.value)

    def _core(self) -> Iterator[Kept]:
        """Yield what the core of attention keeps: with flash attention a number for each head and
        token, else the probabilities of all pairs of tokens, and with dropout a mask and what is
        left of them.
        """
        shape, tokens, rules = self.shape, self.tokens, self.rules
        if rules.attention == "flash" and not self.plain:
            yield Kept("log-sums of attention", "attention", shape.heads, 4, tokens.tensor)
            if tokens.context > 1 and "a2a" in (self.plan.parallel.context_method or ""):
                # Ranks exchange heads for tokens: the output is kept before and after it is sent.
                width = shape.heads * (shape.latent.value if shape.latent else shape.head)
                what = "output of attention on other tokens"
                yield Kept(what, "attention", width, self.width, tokens.tensor)
            return
        pairs = shape.heads * tokens.keys
        drops = bool(shape.attention_dropout)
        upcast = rules.attention == "eager" and not self.has("narrow-softmax")
        soft = 4 if upcast or self.plain else self.width
        yield Kept("probabilities", "attention", pairs, soft, tokens.tensor)
        if self.plan.model.attention.softcap:
            yield Kept(
                "logits of attention, bounded", "attention", pairs, self.width, tokens.tensor
            )
        if upcast and soft > self.width:
            yield Kept("probabilities, rounded", "attention", pairs, self.width, tokens.tensor)
        if drops:
            yield Kept("mask of dropout", "attention", pairs, 1, tokens.tensor)
            yield Kept("probabilities after dropout", "attention", pairs, self.width, tokens.tensor)

    def _dense(self, width: float, part: Part, times: float = 1.0) -> Iterator[Kept]:
        """Yield what a feed-forward layer of this width keeps for `times` copies of each token."""
        ranks, plain = self.tokens.tensor, self.rules.kernels == "torch"
        number = 2 if self.shape.gated else 1
        # The gradient of ReLU follows from its result, which the second projection keeps.
        if not (plain and self.plan.model.mlp.activation == "relu"):
            what = "results of the first projection"
            yield Kept(what, part, number * width * times, self.width, ranks)
        if self.has("plain-gelu"):
            yield Kept(
                "steps of the activation function", part, 3 * width * times, self.width, ranks
            )
        if self.shape.gated and plain:
            yield Kept("activation before it is gated", part, width * times, self.width, ranks)
        if not (self.frozen and self.rules.copies_inputs):
            yield Kept("input of the second projection", part, width * times, self.width, ranks)

    def _experts(self) -> Iterator[Kept]:
        """Yield what experts keep if every expert gets its share of the tokens."""
        it = self.shape.experts
        assert it is not None
        within = self.plan.parallel.expert_tensor or self.tokens.tensor
        # Tensor ranks that do not divide an expert divide the tokens; gathered over the others.
        copies = it.top_k * within / self.tokens.tensor if self.tokens.sequence > 1 else it.top_k
        yield Kept("scores of the router", "experts", 4 * it.count, 4, self.tokens.sequence)
        if self.has("wide-router") and self.width < 4:
            what, width = "input of the router in fp32", self.shape.hidden
            yield Kept(what, "experts", width, 4, self.tokens.sequence)
        yield Kept("tokens sent to experts", "experts", copies * self.shape.hidden, self.width, 1)
        for one in self._dense(it.ffn, "experts", copies):
            yield one._replace(what=f"experts: {one.what}", ranks=within)
        if self.rules.kernels == "torch":
            what = "results of experts, to be weighted"
            yield Kept(what, "experts", copies * self.shape.hidden, self.width, 1)
        if it.shared:
            for one in self._dense(it.shared, "shared_experts"):
                yield one._replace(what=f"shared experts: {one.what}")
        if it.shared_gate and self.rules.kernels == "torch":
            what = "result of shared experts, to be weighted"
            yield Kept(what, "shared_experts", self.shape.hidden, self.width, self.tokens.sequence)

    def _dropped(self) -> Iterator[Kept]:
        if self.shape.dropout:
            ranks = self.tokens.sequence
            yield Kept("masks of dropout", "mlp", 2 * self.shape.hidden, 1, ranks)

    def _adapters(self, block: int) -> Iterator[Kept]:
        """Yield what adapters keep: their input, if each has a copy of it, and what is between their
        two matrices (peft, tuners/lora/layer.py: forward).
        """
        adapters, experts = self.plan.adapters, self.shape.experts
        if not adapters.rank:
            return
        # Adapters are in the master's format, and autocast casts what they read.
        own = (
            self.width
            if self.plan.precision.autocast
            else BYTES[self.plan.precision.master or "fp32"]
        )
        own = own if self.rules.copies_inputs else self.width
        inputs = between = 0
        for part in adapted_parts(self.shape, block + 1, adapters):
            times = experts.top_k if experts and part.copies > 1 else 1
            inputs, between = inputs + part.inputs * times, between + adapters.rank * times
        if self.rules.copies_inputs:
            yield Kept("inputs of adapters", "projections", inputs, own, 1)
        yield Kept("results inside adapters", "projections", between, own, 1)
        if adapters.dropout:
            yield Kept("masks of adapters' dropout", "projections", inputs, 1, 1)

    # For a moment

    def head(self) -> Iterator[Kept]:
        """Yield what the last norm keeps for the output layer."""
        yield from self._norm("last norm", self.shape.hidden, self.tokens.sequence)

    def embedding(self) -> Iterator[Kept]:
        """Yield what the embedding keeps: the mask of its dropout."""
        if self.shape.dropout:
            yield Kept(
                "mask of the embedding's dropout", "mlp", self.shape.hidden, 1, self.tokens.sequence
            )

    def loss(self) -> list[Term]:
        """What the loss needs while it is computed: the logits in all the formats that it has them
        in at once.
        """
        shape, tokens, width = self.shape, self.tokens, self.width
        # Plain torch keeps the logits, an fp32 copy and its log-softmax, and the gradient of it.
        each = {
            "te": width,
            "plain": width + 4,
            "fused": width + 8,
            "linear": 0,
            "torch": (width if width < 4 else 0) + 12,
        }
        ranks = tokens.tensor if self.plan.parallel.vocabulary is not False else 1
        factors: list[tuple[float, str]] = [(tokens.count, "tokens"), (shape.vocab, "words")]
        factors.append((each[self.rules.loss], "bytes"))
        if ranks > 1:
            factors.append((1 / ranks, f"(1/{ranks} of a tensor rank)"))
        return [product("logits", f"logits, for the loss ({self.rules.loss})", *factors)]

    def output_backward(self) -> list[Term]:
        """What the output layer needs in its backward pass: gradients of logits, of its weight and
        of its input, and with sequence parallelism its whole input.
        """
        shape, tokens, width = self.shape, self.tokens, self.width
        ranks = tokens.tensor if self.plan.parallel.vocabulary is not False else 1
        words = 0 if self.rules.loss == "linear" else shape.vocab
        part = (1 / ranks, f"(1/{ranks} of a tensor rank)")
        logits = product(
            "logits", "gradients of logits", (tokens.count, "tokens"), (words, "words"),
            (width, "bytes"), part,
        )  # fmt: skip
        rows = 0 if self.frozen else shape.vocab
        weight = product(
            "gradients", "gradient of the output layer's weight", (rows, "words"),
            (shape.hidden, "elements"), (width, "bytes"), part,
        )  # fmt: skip
        inputs = product(
            "activations", "gradient of the output layer's input",
            (1 + 1 / tokens.sequence, "tensors"), (tokens.count, "tokens"),
            (shape.hidden, "elements"), (width, "bytes"),
        )  # fmt: skip
        return [logits, weight, inputs]

    def residual(self, number: int) -> Term:
        """Some tensors of the residual's shape, which a backward pass needs for a moment."""
        return product(
            "activations", "gradients of the residual", (number / self.tokens.sequence, "tensors"),
            (self.tokens.count, "tokens"), (self.shape.hidden, "elements"), (self.width, "bytes"),
        )  # fmt: skip

    def block_backward(self, block: int) -> list[Term]:
        """What the backward pass of a block needs: gradients at the widest place of the block and,
        where matrix products do not add to the gradient buffer themselves, the gradient of its
        largest weight.
        """
        shape, tokens = self.shape, self.tokens
        wide = max(
            (one for one in self.block(block) if one.part not in ("input", "norm")),
            key=lambda one: one.width * one.bytes / one.ranks,
        )
        terms = [
            product(
                "activations", f"gradient of: {wide.what}", (tokens.count, "tokens"),
                (wide.width, "elements"), (self.width, "bytes"), (1 / wide.ranks, f"(1/{wide.ranks})"),
            ),
            self.residual(2),
        ]  # fmt: skip
        largest = max(part.outputs * max(part.inputs, 1) for part in shape.parts(block + 1))
        factors = (
            (largest, "elements"),
            (self.width, "bytes"),
            (1 / tokens.tensor, f"(1/{tokens.tensor})"),
        )
        if self.frozen and self.rules.quantised:
            terms.append(product("buffers", "the largest matrix, not quantised", *factors))
        elif not (self.frozen or self.rules.fused_gradients or self.rules.sharding == "fsdp"):
            terms.append(product("gradients", "gradient of the largest weight", *factors))
        return terms
