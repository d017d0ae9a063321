"""Invariants of copies: data ranks have equal buffers and call the same layers, and tied weights
are one parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bridge.trace import naming
from bridge.trace.digest import digest_tensor
from bridge.trace.findings import TraceFinding
from bridge.trace.invariants.check import Check, few_names
from bridge.trace.invariants.sketch import differing_names, sample_tensors
from bridge.trace.module import ModuleSource
from bridge.trace.tracer import OUTPUT, Sight


class Buffers(Check):
    """Buffers that no forward pass changes are equal on all data ranks."""

    def __init__(self, source: ModuleSource) -> None:
        super().__init__(source)
        self.names = sorted(naming.buffers_by_name(source.module))
        self.last = self._digests()
        self.inside: set[str] = set()
        """Names of the buffers that a forward pass has changed."""
        self.begun: dict[str, Tensor] = {}
        self.equal = [False] * len(self.names)
        """For each buffer, whether all ranks had equal values of it in an earlier step."""

    def _samples(self) -> dict[str, Tensor]:
        buffers = naming.buffers_by_name(self.source.module)
        return sample_tensors({name: buffers[name] for name in self.names if name in buffers})

    def passing(self, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> None:
        # Passes of a step change the same buffers: one of them tells.
        self.begun = self._samples() if self.source.passes == 1 and self.names else {}

    def end_forward(self) -> None:
        self.inside |= differing_names(self.begun, self._samples()) if self.begun else set()
        self.begun = {}

    def _digests(self) -> list[int]:
        buffers = naming.buffers_by_name(self.source.module)
        return [
            int(digest_tensor(buffers[name])[0]) if name in buffers and buffers[name].numel() else 0
            for name in self.names
        ]

    def row(self, step: int) -> Tensor:
        now = self._digests()
        changes = [
            int(one != other) * (2 if name in self.inside else 1)
            for name, one, other in zip(self.names, now, self.last, strict=True)
        ]
        self.last = now
        return torch.tensor([now, changes], dtype=torch.int64).view(-1)

    def judge_rows(self, step: int, rows: Tensor) -> Iterator[TraceFinding]:
        digests, changes = rows.view(len(rows), 2, len(self.names)).unbind(1)
        # What a forward pass changes, as running means, differs with the samples.
        odd = (digests != digests[0]).any(0)
        looped = odd & (changes == 1).any(0) & (changes < 2).all(0) & torch.tensor(self.equal)
        self.equal = (torch.tensor(self.equal) | ~odd).tolist()
        for id, which in (("buffers-differ", odd & ~changes.any(0)), ("buffers-diverge", looped)):
            names = [self.names[at] for at in which.nonzero().view(-1).tolist()]
            if names:
                evidence = f"{len(names)} of {len(self.names)}: {few_names(names)}"
                yield TraceFinding(id, step, names[0], evidence)


class Calls(Check):
    """All data ranks call the same layers equally often."""

    def __init__(self, source: ModuleSource) -> None:
        super().__init__(source)
        self.counts = dict.fromkeys(
            (name for name in source.layers if name not in source.hidden), 0
        )
        self.calls: set[tuple[str, int, str]] = set()

    def saw(self, sight: Sight) -> None:
        key = (sight.name.layer, sight.microbatch, sight.name.tensor)
        if (
            sight.name.kind == OUTPUT
            and not sight.again
            and key not in self.calls
            and sight.name.layer in self.counts
        ):
            self.calls.add(key)
            self.counts[sight.name.layer] += 1

    def row(self, step: int) -> Tensor:
        return torch.tensor([self.source.passes, *self.counts.values()])

    def judge_rows(self, step: int, rows: Tensor) -> Iterator[TraceFinding]:
        if (rows[:, 0] != rows[0, 0]).any():
            passes = ", ".join(
                f"{count} on rank {self.at(place)}"
                for place, count in enumerate(rows[:, 0].tolist())
            )
            evidence = f"data ranks made different numbers of forward passes in this step: {passes}"
            yield TraceFinding("passes-differ", step, "", evidence)
            return
        odd = (rows[:, 1:] != rows[0, 1:]).any(0).nonzero().view(-1).tolist()
        names = list(self.counts)
        if odd:
            counts = ", ".join(
                f"{count} on rank {self.at(place)}"
                for place, count in enumerate(rows[:, 1 + odd[0]].tolist())
            )
            rest = len(odd) - 1
            more = f"; likewise {rest} more layers" if rest else ""
            evidence = f"the layer made different numbers of output tensors: {counts}{more}"
            yield TraceFinding("layers-differ", step, names[odd[0]], evidence)

    def end_step(self) -> None:
        self.counts = dict.fromkeys(self.counts, 0)
        self.calls.clear()


class Modes(Check):
    """Layers of one list are in the same mode, if they are trained."""

    def __init__(self, source: ModuleSource) -> None:
        super().__init__(source)
        alike: dict[tuple[str, type], dict[str, list[nn.Module]]] = {}
        for name, layer in source.layers.items():
            key = name.rpartition(".")[0], type(naming.unwrap_module(layer))
            alike.setdefault(key, {})[name] = list(layer.modules())
        self.lists = [layers for (path, _), layers in alike.items() if path and len(layers) > 1]

    def local(self, step: int) -> Iterator[TraceFinding]:
        for layers in self.lists:
            odd = [
                name
                for name, parts in layers.items()
                if not all(part.training for part in parts)
                and any(weight.requires_grad for weight in parts[0].parameters())
            ]
            if odd and len(odd) < len(layers):
                evidence = f"{len(odd)} of {len(layers)} layers: {few_names(odd)}"
                yield TraceFinding("layer-not-training", step, odd[0], evidence)


class Ties(Check):
    """An embedding and a head that start with the same values are one parameter, and so are those
    that the model's config ties. What is one parameter at the start remains one.
    """

    def __init__(self, source: ModuleSource) -> None:
        super().__init__(source)
        self.ties = naming.ties_of(source.module)

    def local(self, step: int) -> Iterator[TraceFinding]:
        if not self.ties:
            return
        weights = naming.parameters_by_every_name(self.source.module)
        for first, *others in self.ties:
            lost = [name for name in others if weights.get(name) is not weights.get(first)]
            if lost and first in weights and lost[0] in weights:
                evidence = f"{lost[0]} and {first} were one parameter in the step before"
                yield TraceFinding("untied", step, lost[0], evidence)
        self.ties = naming.ties_of(self.source.module)

    def start(self) -> Iterator[TraceFinding]:
        model = self.source.model
        parameters = naming.parameters_by_name(self.source.module)
        names = {id(weight): name for name, weight in parameters.items()}
        inputs, outputs = _weights_of_kind(model, nn.Embedding), _weights_of_kind(model, nn.Linear)
        for one in inputs:
            for other in outputs:
                comparable = (
                    one.requires_grad
                    and other.requires_grad
                    and one is not other
                    and one.shape == other.shape
                )
                if (
                    comparable
                    and self._alike(one, other)
                    and id(one) in names
                    and id(other) in names
                ):
                    evidence = (
                        f"{names[id(one)]} and {names[id(other)]} have the same {one.numel()} "
                        "values but are two parameters"
                    )
                    yield TraceFinding("untied", 0, names[id(other)], evidence)
                    return
        config = getattr(model, "config", None)
        ties = getattr(config, "tie_word_embeddings", False) and callable(
            getattr(model, "get_output_embeddings", None)
        )
        head = model.get_output_embeddings() if ties else None  # type: ignore[operator]
        embedding = model.get_input_embeddings() if head is not None else None  # type: ignore[operator]
        pair = [getattr(part, "_parameters", {}).get("weight") for part in (head, embedding)]
        if (
            pair[0] is not None
            and pair[1] is not None
            and pair[0] is not pair[1]
            and type(pair[0]) is nn.Parameter
        ):
            evidence = (
                "the model's config sets tie_word_embeddings, but input and output embeddings are "
                "two parameters"
            )
            yield TraceFinding("untied", 0, names.get(id(pair[0]), "head"), evidence)

    @staticmethod
    def _alike(one: Tensor, other: Tensor) -> bool:
        plain = (
            type(one) is nn.Parameter and type(other) is nn.Parameter and one.device == other.device
        )
        return (
            plain
            and not one.is_meta
            and one.numel() > 1
            and bool(torch.equal(one, other))
            # Constants are alike by chance.
            and bool((one != one.view(-1)[0]).any())
        )


def _weights_of_kind(model: nn.Module, kind: type[nn.Module]) -> list[nn.Parameter]:
    """Return the weights of all modules of a kind. Weights that are computed when they are read, as
    under `spectral_norm`, are left out, because reading would change them.
    """
    weights = (part._parameters.get("weight") for part in model.modules() if isinstance(part, kind))
    return [weight for weight in weights if weight is not None]
