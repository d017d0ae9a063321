"""The shape of a GPT as pure values: its layers, their parameters as one tensor rank holds them, and where activations pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

from bridge.errors import ConfigError
from bridge.layout.partition import Layers
from bridge.layout.shard import Parameter
from bridge.layout.tensor import Site, TensorPlan, cut, matches
from bridge.plan import Model


@dataclass(frozen=True, slots=True)
class Part:
    """A module with weights: a matrix (`outputs`, `inputs`), or a vector where there are no inputs, and maybe a bias.

    `tied` names the module whose weight it uses instead of its own.
    """

    name: str
    kind: Literal["embedding", "linear", "norm"]
    outputs: int
    inputs: int = 0
    bias: bool = False
    tied: str = ""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the weight and the bias, by global name."""
        weight: tuple[int, ...] = (self.outputs, self.inputs) if self.inputs else (self.outputs,)
        return {f"{self.tied or self.name}.weight": weight} | ({f"{self.name}.bias": (self.outputs,)} if self.bias else {})

    def role(self, names: TensorPlan) -> str | None:
        """What `names` make of it: "embed", or a kind of split linear layer, or None."""
        if self.kind == "embedding":
            return "embed" if matches(self.name, names.vocabulary) else None
        return names.kind(self.name, self.inputs, self.outputs) if self.kind == "linear" else None


@dataclass(frozen=True, slots=True)
class Share:
    """A tensor rank's place: which of how many ranks, and whether norms and dropout are split by tokens."""

    ranks: int = 1
    index: int = 0
    sequence: bool = False


@dataclass(frozen=True, slots=True)
class Architecture:
    """Shape of a GPT. Sizes as in a plan's model section; `sequence` bounds learned positions only."""

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

    @classmethod
    def of(cls, model: Model) -> Architecture:
        """The shape that a plan states; what it leaves open follows from the rest."""
        hidden, heads = model.hidden or cls().hidden, model.heads or cls().heads
        return cls(
            layers=model.layers or cls().layers,
            hidden=hidden,
            heads=heads,
            kv_heads=model.kv_heads or heads,
            ffn=model.ffn or 4 * hidden,
            vocab=model.vocab or cls().vocab,
            sequence=model.sequence or cls().sequence,
            tied=cls().tied if model.tied is None else model.tied,
        )

    def problems(self) -> Iterator[str]:
        """What does not fit together."""
        if self.hidden % self.heads:
            yield f"model.heads: {self.heads} does not divide hidden ({self.hidden}); use a divisor"
        if self.heads % self.kv_heads:
            yield f"model.kv_heads: {self.kv_heads} does not divide heads ({self.heads}); use a divisor"
        if self.rotary and self.hidden // self.heads % 2:
            yield f"model.heads: {self.hidden // self.heads} wide heads cannot rotate; make the width even"

    def tensor_plan(self, ranks: int) -> TensorPlan:
        """How `ranks` tensor ranks split this model. Raises `ConfigError` if its heads do not divide."""
        if self.heads % ranks:
            raise ConfigError(f"parallel.tensor: {ranks} ranks do not divide heads ({self.heads}); use a divisor")
        keys = ("attention.key", "attention.value")
        divides = self.kv_heads % ranks == 0
        return TensorPlan(
            columns=("attention.query", "mlp.up", *(["mlp.gate"] if self.gated else []), *(keys if divides else ())),
            rows=("attention.out", "mlp.down"),
            shared=() if divides else keys,
            vocabulary=("embedding.tokens", "head.logits"),
            scattered=("embedding",),
        )

    @property
    def indices(self) -> range:
        """The layers by number: embedding, blocks, head."""
        return range(self.layers + 2)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the layers, in order."""
        return ("embedding", *(f"block{index}" for index in range(self.layers)), "head")

    def parts(self, layer: int) -> tuple[Part, ...]:
        """The modules with weights in a layer, in order."""
        if layer == 0:
            return self._embedding()
        return self._block(self.names[layer]) if layer <= self.layers else self._head()

    def facts(self) -> Layers:
        """What partition rules see."""
        sizes = (sum(prod(shape) for part in self.parts(layer) for shape in part.shapes.values()) for layer in self.indices)
        return Layers(len(self.indices), leading=1, trailing=1, parameters=tuple(sizes))

    def size(self) -> int:
        """Parameters in all, tied ones once."""
        shapes = {name: shape for layer in self.indices for part in self.parts(layer) for name, shape in part.shapes.items()}
        return sum(map(prod, shapes.values()))

    def parameters(self, stages: Mapping[int, int], share: Share) -> list[Parameter]:
        """Parameters, in fp32, as tensor rank `share` holds those of the layers in `stages`, which says the stage of each."""
        found: dict[str, Parameter] = {}
        for layer, stage in stages.items():
            for parameter in self._held(layer, share):
                users = found[parameter.name].stages if parameter.name in found else ()
                found[parameter.name] = replace(parameter, stages=tuple(dict.fromkeys((*users, stage))))
        return list(found.values())

    def sites(self, layers: Iterable[int], share: Share) -> list[Site]:
        """Where activations of `layers` pass between tensor ranks."""
        if share.ranks == 1:
            return []
        names = self.tensor_plan(share.ranks)
        found = [site for layer in layers for site in _sites(self.parts(layer), names)]
        scattered = [Site(name, "scatter", self.hidden) for name in names.scattered if share.sequence and 0 in layers]
        return found + scattered

    def _embedding(self) -> tuple[Part, ...]:
        tokens = Part("embedding.tokens", "embedding", self.vocab, self.hidden)
        positions = Part("embedding.positions", "embedding", self.sequence, self.hidden)
        return (tokens,) if self.rotary else (tokens, positions)

    def _block(self, name: str) -> tuple[Part, ...]:
        keys = self.hidden // self.heads * self.kv_heads
        attention = (("query", self.hidden), ("key", keys), ("value", keys), ("out", self.hidden))
        inner = ("up", "gate") if self.gated else ("up",)
        return (
            self._norm(f"{name}.norm1"),
            self._norm(f"{name}.norm2"),
            *(Part(f"{name}.attention.{part}", "linear", width, self.hidden, self.bias) for part, width in attention),
            *(Part(f"{name}.mlp.{part}", "linear", self.ffn, self.hidden, self.bias) for part in inner),
            Part(f"{name}.mlp.down", "linear", self.hidden, self.ffn, self.bias),
        )

    def _head(self) -> tuple[Part, ...]:
        tied = "embedding.tokens" if self.tied else ""
        return self._norm("head.norm"), Part("head.logits", "linear", self.vocab, self.hidden, tied=tied)

    def _norm(self, name: str) -> Part:
        return Part(name, "norm", self.hidden, bias=self.norm == "layer")

    def _held(self, layer: int, share: Share) -> Iterator[Parameter]:
        names = self.tensor_plan(share.ranks) if share.ranks > 1 else None
        for part in self.parts(layer):
            for name, shape in part.shapes.items():
                yield Parameter(name, shape, "fp32", ()) if names is None else _split(part, name, shape, names, share)


def _split(part: Part, name: str, shape: tuple[int, ...], names: TensorPlan, share: Share) -> Parameter:
    """A parameter as a tensor rank holds it: cut along one dimension, or whole."""
    role = part.role(names)
    dim = _CUT.get((role, len(shape)))
    if dim is None:
        tokens = share.sequence and not matches(part.name, names.scattered)
        return Parameter(name, shape, "fp32", (), partial=role == "shared" or tokens)
    place = cut(shape[dim], share.ranks, share.index)
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
"""The dimension along which a module of a role cuts its weight (2 dimensions) and its bias (1)."""


def _sites(parts: Iterable[Part], names: TensorPlan) -> Iterator[Site]:
    entered: set[str] = set()
    for part in parts:
        role, parent = part.role(names), part.name.rpartition(".")[0]
        if role == "embed":
            yield Site(part.name, "embed", part.inputs)
        elif role == "row":
            yield Site(part.name, "leave", part.outputs)
        elif role == "vocabulary":
            yield Site(part.name, "logits", 1)
        if role in ("column", "shared", "vocabulary") and parent not in entered:
            entered.add(parent)
            yield Site(part.name, "enter", part.inputs)


def _gpt2(layers: int, hidden: int, heads: int) -> Architecture:
    return Architecture(layers, hidden, heads, heads, 4 * hidden, vocab=50257, sequence=1024, rotary=False)


_LLAMA = Architecture(norm="rms", gated=True, tied=False, bias=False)

PRESETS: Mapping[str, Architecture] = {
    "tiny": Architecture(layers=4, hidden=128, heads=4, kv_heads=4, ffn=512, vocab=256, sequence=64),
    "gpt2": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-xl": _gpt2(48, 1600, 25),
    "llama-7b": replace(_LLAMA, layers=32, hidden=4096, heads=32, kv_heads=32, ffn=11008, vocab=32000, sequence=2048),
    "llama3-8b": replace(_LLAMA, layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256, sequence=8192),
}
"""Shapes by name: the one that trains in seconds, and published models."""
