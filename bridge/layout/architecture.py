"""The shape of a GPT as pure values: its layers, their parameters on one tensor rank, and the
points at which tensor ranks exchange activations.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from bridge import limits
from bridge.errors import ConfigError
from bridge.layout.mesh import Mesh
from bridge.layout.partition import Layers
from bridge.layout.shard import Parameter
from bridge.layout.tensor import Site, TensorPlan, cut_range, name_matches
from bridge.plan.plan import Model, Parallel


@dataclass(frozen=True, slots=True)
class LayerPart:
    """A module with a weight and maybe a bias. The weight is a matrix (`outputs`, `inputs`), or a
    vector if `inputs` is 0. If the module uses the weight of another module, `tied` names that
    other module. `copies` is the number of experts that have such a module.
    """

    name: str
    kind: Literal["embedding", "linear", "norm"]
    outputs: int
    inputs: int = 0
    bias: bool = False
    tied: str = ""
    copies: int = 1

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the weight and of the bias, by the global name of each."""
        weight: tuple[int, ...] = (self.outputs, self.inputs) if self.inputs else (self.outputs,)
        shapes = {f"{self.tied or self.name}.weight": weight}
        if self.bias:
            shapes[f"{self.name}.bias"] = (self.outputs,)
        return shapes

    @property
    def size(self) -> int:
        """Number of elements of the weights and biases of all copies, without a tied weight."""
        return self.used - (self.outputs * self.inputs if self.tied else 0)

    @property
    def used(self) -> int:
        """Number of elements of the weights and biases of all copies, including a tied weight."""
        # A vector has `outputs` elements, a matrix `outputs` x `inputs`, and a bias adds one
        # element for each output.
        return self.copies * self.outputs * ((self.inputs or 1) + self.bias)

    def role(self, names: TensorPlan) -> str | None:
        """Return how the tensor plan `names` splits the module: "embed" for a split embedding, one
        of the kinds of split linear layers, or None if the module is not split.
        """
        if self.kind == "embedding":
            return "embed" if name_matches(self.name, names.vocabulary) else None
        return names.kind(self.name, self.inputs, self.outputs) if self.kind == "linear" else None


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a model that one tensor rank holds. The rank is number `index` of `ranks` tensor
    ranks. With `sequence`, norms and dropout are split by tokens. The experts are divided among
    `experts` ranks, and each expert among `within` tensor ranks. `same` is the number of ranks that
    hold the same experts.
    """

    ranks: int = 1
    index: int = 0
    sequence: bool = False
    experts: int = 1
    within: int = 1
    same: int = 0

    @classmethod
    def on(cls, mesh: Mesh, experts: Mesh | None, parallel: Parallel, index: int = 0) -> Share:
        """Return what tensor rank `index` of a mesh has, with `experts` on a mesh of theirs."""
        spread = experts.sizes if experts else {"expert": 1, "tensor": 1, "data": 0}
        return cls(
            mesh.sizes["tensor"],
            index,
            bool(parallel.sequence),
            spread["expert"],
            spread["tensor"],
            spread["data"],
        )


@dataclass(frozen=True, slots=True)
class Latent:
    """Widths of multi-head latent attention. `query` and `kv` are the inner widths of the low-rank
    projections; if `query` is 0, queries have no low-rank projection. `plain`, `rotary` and `value`
    are the widths of the parts of a head.
    """

    query: int
    kv: int
    plain: int
    rotary: int
    value: int


@dataclass(frozen=True, slots=True)
class Experts:
    """Experts of a model: the number of experts in a block, the width of an expert, the number of
    experts that each token passes, and the width of the shared experts. `layers` says for each
    block whether it has experts; None means that every block has experts.
    """

    count: int
    ffn: int
    top_k: int
    shared: int = 0
    shared_gate: bool = False
    router_bias: bool = False
    layers: tuple[bool, ...] | None = None

    def within(self, block: int) -> bool:
        """Whether a block has experts."""
        return self.layers is None or (block < len(self.layers) and self.layers[block])


@dataclass(frozen=True, slots=True)
class Architecture:
    """Shape of a GPT, with sizes as in a plan's model section. `vocab` is 0 if the vocabulary size
    is not known. The table of learned positions has `positions` rows, or `sequence` rows if
    `positions` is None. Where `qkv_bias`, `output_bias` or `mlp_bias` is None, `bias` decides.
    Where `norm_bias` is None, LayerNorm has a bias and RMSNorm has none.
    """

    layers: int = 4
    hidden: int = 128
    heads: int = 4
    kv_heads: int = 4
    ffn: int = 512
    vocab: int = 256
    sequence: int = 128
    norm: Literal["layer", "rms"] = "layer"
    gated: bool = False
    rotary: bool = True
    tied: bool = True
    bias: bool = True
    dropout: float = 0.0
    attention_dropout: float = 0.0
    head_size: int | None = None
    qkv_bias: bool | None = None
    output_bias: bool | None = None
    mlp_bias: bool | None = None
    norm_bias: bool | None = None
    head_norm: Literal["none", "head", "own", "width"] = "none"
    place: Literal["before", "after", "both", "post"] = "before"
    shared_norm: bool = False
    sinks: bool = False
    positions: int | None = None
    width: int | None = None
    embedding_norm: bool = False
    logits_bias: bool = False
    latent: Latent | None = None
    experts: Experts | None = None

    @classmethod
    def of(cls, model: Model) -> Architecture:
        """The shape of a plan's model. A size that the plan does not set is derived from other
        sizes, or else has the default value.
        """
        usual = cls()
        hidden, heads = model.hidden or usual.hidden, model.heads or usual.heads
        return cls(
            layers=model.layers or usual.layers,
            hidden=hidden,
            heads=heads,
            kv_heads=model.kv_heads or heads,
            ffn=model.ffn or 4 * hidden,
            vocab=model.embedding.padded_vocab or model.vocab or usual.vocab,
            sequence=model.sequence or usual.sequence,
            tied=usual.tied if model.tied is None else model.tied,
            **_stated_settings(model),
            **_attention_settings(model),
            **_feed_forward(model),
            **_embedding_settings(model),
        )

    def problems(self) -> Iterator[str]:
        """Yield a problem for each size that contradicts other sizes or exceeds a limit."""
        for size in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "sequence"):
            if getattr(self, size) > limits.PLAN[f"model.{size}"]:
                yield f"model.{size}: found {getattr(self, size):,}, expected at most {limits.PLAN[f'model.{size}']:,}"
        if self.hidden % self.heads and self.head_size is None and self.latent is None:
            yield f"model.heads: {self.heads} does not divide hidden ({self.hidden}); use a divisor"
        if self.heads % self.kv_heads:
            yield f"model.kv_heads: {self.kv_heads} does not divide heads ({self.heads}); use a divisor"
        if self.rotary and self.latent is None and self.head % 2:
            yield (
                f"model.heads: found heads of width {self.head}, but rotary positions need an even width;"
                " change model.heads or hidden"
            )

    def tensor_plan(self, ranks: int) -> TensorPlan:
        """Return the tensor plan that splits this model over `ranks` tensor ranks. Raises
        `ConfigError` if `ranks` does not divide the number of heads.
        """
        if self.heads % ranks:
            raise ConfigError(
                f"parallel.tensor: {ranks} ranks do not divide heads ({self.heads}); use a divisor"
            )
        keys = ("attention.key", "attention.value")
        # With fewer key and value heads than ranks, several ranks need the same head: each then
        # holds all of them.
        divides = self.kv_heads % ranks == 0
        within = ("mlp", *(("experts", "shared") if self.experts else ()))
        inner = tuple(
            f"{layer}.{part}"
            for layer in within
            for part in (("up", "gate") if self.gated else ("up",))
        )
        return TensorPlan(
            columns=("attention.query", *inner, *(keys if divides else ())),
            rows=("attention.out", *(f"{layer}.down" for layer in within)),
            shared=() if divides else keys,
            vocabulary=("embedding.tokens", "head.logits"),
            scattered=("embedding",),
        )

    @property
    def head(self) -> int:
        """Width of a head."""
        return self.head_size or self.hidden // self.heads

    @property
    def rows(self) -> int:
        """Number of rows of the table of learned positions; 0 if the model has no such table."""
        if self.positions is not None:
            return self.positions
        return 0 if self.rotary else self.sequence

    def has_bias(self, name: Literal["qkv_bias", "output_bias", "mlp_bias", "norm_bias"]) -> bool:
        """Return whether the layers that the setting `name` is about have biases. If the setting is
        None, `bias` decides; for `norm_bias`, LayerNorm has a bias and RMSNorm has none.
        """
        setting: bool | None = getattr(self, name)
        if setting is not None:
            return setting
        return self.norm == "layer" if name == "norm_bias" else self.bias

    @property
    def indices(self) -> range:
        """Numbers of the layers, in order: 0 is the embedding, then come the blocks, then the head."""
        return range(self.layers + 2)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the layers, in order."""
        return ("embedding", *(f"block{index}" for index in range(self.layers)), "head")

    def parts(self, layer: int) -> tuple[LayerPart, ...]:
        """The modules with weights in a layer, in order."""
        if layer == 0:
            return self._embedding()
        return self._block(f"block{layer - 1}", layer - 1) if layer <= self.layers else self._head()

    def facts(self) -> Layers:
        """Return the numbers of layers and of their parameters, by which a partition rule cuts the
        model into stages. A tied weight counts in each layer that uses it.
        """
        # `_sizes` leaves out tied weights. A stage with the head holds the weight all the same, so
        # its memory counts there too.
        first, *blocks, last = self._sizes()
        tied = sum(part.used - part.size for part in self._head())
        return Layers(
            len(self.indices), leading=1, trailing=1, parameters=(first, *blocks, last + tied)
        )

    def size(self) -> int:
        """Total number of parameters. Tied parameters count once."""
        return sum(self._sizes())

    def active(self) -> int:
        """Number of parameters that are active for a token: all parameters except those of experts
        that were not chosen for the token.
        """
        if self.experts is None:
            return self.size()
        block = next((block for block in range(self.layers) if self.has_experts(block)), 0)
        expert = sum(
            part.size // part.copies for part in self._block("block", block) if part.copies > 1
        )
        # In each block with experts, all but `top_k` of them are idle for a token.
        idle = (self.experts.count - self.experts.top_k) * expert
        return self.size() - idle * sum(map(self.has_experts, range(self.layers)))

    def has_experts(self, block: int) -> bool:
        """Whether a block has experts."""
        return self.experts is not None and self.experts.within(block)

    def _sizes(self) -> tuple[int, ...]:
        """Number of parameters of each layer, without tied weights."""
        # Blocks with experts are equal, and so are those without: one of each kind is counted, as
        # there may be thousands.
        kinds: dict[bool, int] = {}
        for block in range(self.layers):
            if self.has_experts(block) not in kinds:
                kinds[self.has_experts(block)] = sum(
                    part.size for part in self._block("block", block)
                )
        first, last = (
            sum(part.size for part in self.parts(layer)) for layer in (0, self.layers + 1)
        )
        return (first, *(kinds[self.has_experts(block)] for block in range(self.layers)), last)

    def parameters(self, stages: Mapping[int, int], share: Share) -> list[Parameter]:
        """Return the parameters of some layers, as the tensor rank with this `share` holds them,
        all in fp32. The keys of `stages` are the numbers of these layers, and the values are the
        stages that run them.
        """
        by_name: dict[str, Parameter] = {}
        for layer, stage in stages.items():
            for parameter in self._local_parameters(layer, share):
                # Embedding and head may name the same weight; it is one parameter that two stages
                # use.
                users = by_name[parameter.name].stages if parameter.name in by_name else ()
                by_name[parameter.name] = replace(
                    parameter, stages=tuple(dict.fromkeys((*users, stage)))
                )
        return list(by_name.values())

    def sites(self, layers: Iterable[int], share: Share) -> list[Site]:
        """Sites of `layers` at which tensor ranks exchange activations."""
        if share.ranks == 1:
            return []
        names = self.tensor_plan(share.ranks)
        result = [site for layer in layers for site in _collective_sites(self.parts(layer), names)]
        scatters = [
            Site(name, "scatter", self.hidden)
            for name in names.scattered
            if share.sequence and 0 in layers
        ]
        return result + scatters

    def _embedding(self) -> tuple[LayerPart, ...]:
        width = self.width or self.hidden
        rows = self.rows
        parts = (
            [LayerPart("embedding.tokens", "embedding", self.vocab, width)] if self.vocab else []
        )
        if rows:
            parts.append(LayerPart("embedding.positions", "embedding", rows, self.hidden))
        if width != self.hidden:
            parts.append(LayerPart("embedding.project", "linear", self.hidden, width))
        return (*parts, *([self._norm("embedding.norm")] if self.embedding_norm else []))

    def _block(self, name: str, block: int) -> tuple[LayerPart, ...]:
        attention = self._latent(name) if self.latent else self._attention(name)
        feed_forward = (
            self._expert_parts(f"{name}.mlp")
            if self.has_experts(block)
            else self._dense(f"{name}.mlp", self.ffn)
        )
        return (*self._norms(name), *attention, *feed_forward)

    def _norms(self, name: str) -> Iterator[LayerPart]:
        number = 1 if self.shared_norm else 2
        yield from (self._norm(f"{name}.norm{index}") for index in range(1, number + 1))
        if self.place == "both":
            yield from (self._norm(f"{name}.norm{index}") for index in (3, 4))

    def _attention(self, name: str) -> Iterator[LayerPart]:
        queries, keys, qkv = (
            self.heads * self.head,
            self.kv_heads * self.head,
            self.has_bias("qkv_bias"),
        )
        for part, width in (("query", queries), ("key", keys), ("value", keys)):
            yield LayerPart(f"{name}.attention.{part}", "linear", width, self.hidden, qkv)
        yield LayerPart(
            f"{name}.attention.out", "linear", self.hidden, queries, self.has_bias("output_bias")
        )
        if self.head_norm != "none":
            widths = (self.head, self.head) if self.head_norm == "head" else (queries, keys)
            yield from (
                self._norm(f"{name}.attention.{part}_norm", size)
                for part, size in zip(("query", "key"), widths, strict=True)
            )
        if self.sinks:
            yield LayerPart(f"{name}.attention.sinks", "norm", self.heads)

    def _latent(self, name: str) -> Iterator[LayerPart]:
        """Yield the modules of latent attention: the low-rank projections, their norms if the model
        has any, and the projections that follow them. Only the low-rank projections and the output
        projection have biases.
        """
        it, qkv = self.latent or Latent(0, 0, 0, 0, 0), self.has_bias("qkv_bias")
        queries, out = self.heads * (it.plain + it.rotary), self.heads * it.value
        # The part of the keys that rotates is the same for all heads. It comes out of the same
        # projection as the narrow vector of keys and values, beside it, and passes neither the norm
        # nor the second projection.
        narrow = [("key_value", it.kv, it.rotary)]
        if it.query:
            narrow.insert(0, ("query", it.query, 0))
        for part, rank, beside in narrow:
            yield LayerPart(
                f"{name}.attention.narrow_{part}", "linear", rank + beside, self.hidden, qkv
            )
            if self.head_norm != "none":
                yield self._norm(f"{name}.attention.{part}_norm", rank)
        yield LayerPart(f"{name}.attention.query", "linear", queries, it.query or self.hidden)
        yield LayerPart(
            f"{name}.attention.key_value", "linear", self.heads * (it.plain + it.value), it.kv
        )
        yield LayerPart(
            f"{name}.attention.out", "linear", self.hidden, out, self.has_bias("output_bias")
        )

    def _dense(self, name: str, width: int, copies: int = 1) -> Iterator[LayerPart]:
        bias = self.has_bias("mlp_bias")
        for part in ("up", "gate") if self.gated else ("up",):
            yield LayerPart(f"{name}.{part}", "linear", width, self.hidden, bias, copies=copies)
        yield LayerPart(f"{name}.down", "linear", self.hidden, width, bias, copies=copies)

    def _expert_parts(self, name: str) -> Iterator[LayerPart]:
        it = self.experts or Experts(1, self.ffn, 1)
        yield LayerPart(f"{name}.router", "linear", it.count, self.hidden, it.router_bias)
        yield from self._dense(f"{name}.experts", it.ffn, it.count)
        if it.shared:
            yield from self._dense(f"{name}.shared", it.shared)
        if it.shared_gate:
            yield LayerPart(f"{name}.shared_gate", "linear", 1, self.hidden)

    def _head(self) -> tuple[LayerPart, ...]:
        width, tied = self.width or self.hidden, "embedding.tokens" if self.tied else ""
        out = (
            (LayerPart("head.project", "linear", width, self.hidden),)
            if width != self.hidden
            else ()
        )
        logits = LayerPart("head.logits", "linear", self.vocab, width, self.logits_bias, tied)
        norm = () if self.place == "post" else (self._norm("head.norm"),)
        return (*norm, *out, *((logits,) if self.vocab else ()))

    def _norm(self, name: str, size: int | None = None) -> LayerPart:
        return LayerPart(name, "norm", size or self.hidden, bias=self.has_bias("norm_bias"))

    def _local_parameters(self, layer: int, share: Share) -> Iterator[Parameter]:
        names = self.tensor_plan(share.ranks)
        # Each expert is divided among its own tensor ranks, of which there may be more or fewer than
        # for the rest of the block.
        inner = replace(share, ranks=share.within, index=share.index % share.within)
        for part in self.parts(layer):
            own = inner if part.copies > 1 else share
            for name, shape in part.shapes.items():
                parameter = Parameter(name, shape, "fp32", ())
                if own.ranks > 1:
                    parameter = _split_parameter(part, name, shape, names, own)
                if part.copies > 1:
                    # All local experts in one parameter, stacked along a new first dimension. If
                    # they do not divide evenly, some ranks have one less; the larger number is
                    # taken for all.
                    ends = (
                        cut_range(part.copies, share.experts, index)
                        for index in (0, share.experts - 1)
                    )
                    local = max(map(len, ends))
                    parameter = replace(
                        parameter, shape=(local, *parameter.shape), same=share.same, partial=False
                    )
                yield parameter


def _stated_settings(model: Model) -> dict[str, Any]:
    """Return the settings of norms, biases and dropout in the plan's model, without those that the
    plan leaves open.
    """
    norm, attention = model.norm, model.attention
    settings = {
        "norm": norm.kind,
        "norm_bias": norm.bias,
        "place": norm.place,
        "gated": model.mlp.gated,
        "qkv_bias": attention.qkv_bias,
        "output_bias": attention.output_bias,
        "mlp_bias": model.mlp.bias,
        "dropout": model.dropout,
        "attention_dropout": attention.dropout,
    }
    return {name: value for name, value in settings.items() if value is not None}


def _attention_settings(model: Model) -> dict[str, Any]:
    attention, latent = model.attention, model.attention.latent
    settings: dict[str, Any] = {
        "head_size": attention.head_size,
        "head_norm": attention.norm or "none",
        "sinks": bool(attention.sinks),
        "shared_norm": bool(model.norm.parallel and model.norm.shared),
    }
    if latent.kv_rank is None:
        return settings
    widths = (
        latent.query_rank,
        latent.kv_rank,
        latent.plain_size,
        latent.rotary_size,
        latent.value_size,
    )
    return settings | {"latent": Latent(*(width or 0 for width in widths))}


def _feed_forward(model: Model) -> dict[str, Any]:
    moe = model.moe
    if not model.experts:
        return {}
    width = moe.ffn or model.ffn or 4 * (model.hidden or Architecture().hidden)
    choice = (
        moe.top_k or 1,
        moe.shared_ffn or 0,
        bool(moe.shared_gate),
        bool(moe.router_bias),
        moe.layers,
    )
    return {"experts": Experts(model.experts, width, *choice)}


def _embedding_settings(model: Model) -> dict[str, Any]:
    embedding, kind = model.embedding, model.embedding.positions
    # Some families (OPT) leave the first rows of the table unused, so it has that many more.
    rows = (embedding.max_positions or model.sequence or Architecture().sequence) + (
        embedding.offset or 0
    )
    rotary = kind in (None, "rotary")
    positions = None
    if not rotary:
        positions = rows if kind == "learned" else 0
    return {
        "rotary": rotary,
        "positions": positions,
        "width": embedding.width,
        "embedding_norm": bool(embedding.norm),
        "logits_bias": bool(embedding.output_bias),
    }


def _split_parameter(
    part: LayerPart, name: str, shape: tuple[int, ...], names: TensorPlan, share: Share
) -> Parameter:
    """Return the parameter `name` as one tensor rank holds it: a part along one dimension, or the
    whole parameter.
    """
    role = part.role(names)
    dim = _CUT.get((role, len(shape)))
    if dim is None:
        # Every rank holds all of it. The gradient is complete on each rank, except where a rank
        # uses the parameter for its own heads alone, or, with sequence parallelism, for its own
        # tokens alone: then gradients have to be summed.
        tokens = share.sequence and not name_matches(part.name, names.scattered)
        return Parameter(name, shape, "fp32", (), partial=role == "shared" or tokens)
    place = cut_range(shape[dim], share.ranks, share.index)
    local = (*shape[:dim], len(place), *shape[dim + 1 :])
    return Parameter(name, local, "fp32", (), split=dim, start=place.start, whole=shape[dim])


_CUT: Mapping[tuple[str | None, int], int] = {
    ("embed", 2): 0,
    ("vocabulary", 2): 0,
    ("vocabulary", 1): 0,
    ("column", 2): 0,
    ("column", 1): 0,
    ("row", 2): 1,
}
"""A table from the role of a module and the number of dimensions of a parameter (2 for a weight, 1
for a bias) to the dimension along which tensor ranks split the parameter. A parameter that is not
in the table is not split.
"""


def _collective_sites(parts: Iterable[LayerPart], names: TensorPlan) -> Iterator[Site]:
    parents: set[str] = set()
    for part in parts:
        role, parent = part.role(names), part.name.rpartition(".")[0]
        if role == "embed":
            yield Site(part.name, "embed", part.inputs)
        elif role == "row":
            yield Site(part.name, "leave", part.outputs)
        elif role == "vocabulary":
            yield Site(part.name, "logits", 1)
        # Query, key and value share their input, and so do up and gate: the activations enter all
        # of them in one collective.
        if role in ("column", "shared", "vocabulary") and parent not in parents:
            parents.add(parent)
            yield Site(part.name, "enter", part.inputs)


def _gpt2_shape(layers: int, hidden: int, heads: int) -> Architecture:
    return Architecture(
        layers, hidden, heads, heads, 4 * hidden, vocab=50257, sequence=1024, rotary=False
    )


_LLAMA = Architecture(norm="rms", gated=True, tied=False, bias=False)

PRESETS: Mapping[str, Architecture] = {
    "tiny": Architecture(
        layers=4, hidden=128, heads=4, kv_heads=4, ffn=512, vocab=256, sequence=64
    ),
    "gpt2": _gpt2_shape(12, 768, 12),
    "gpt2-medium": _gpt2_shape(24, 1024, 16),
    "gpt2-large": _gpt2_shape(36, 1280, 20),
    "gpt2-xl": _gpt2_shape(48, 1600, 25),
    "llama-7b": replace(
        _LLAMA, layers=32, hidden=4096, heads=32, kv_heads=32, ffn=11008, vocab=32000, sequence=2048
    ),
    "llama3-8b": replace(
        _LLAMA, layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256, sequence=8192
    ),
}
"""Shapes of models by name: a tiny model that trains in seconds, and published models."""
