"""Invariant of models that are trained to predict the next token: no output depends on later
tokens.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from bridge.trace.findings import TraceFinding
from bridge.trace.invariants.check import Check
from bridge.trace.module import ModuleSource, in_order
from bridge.trace.random_states import other_states, restore_others
from bridge.trace.sharding import flat_pieces

logger = logging.getLogger("bridge.trace")
SHARE = 0.9
"""Minimum share of a step's targets that must equal the next token, so that the model counts as
trained to predict the next token.
"""


class Causal(Check):
    """The outputs for a token do not depend on later tokens.

    In the first step, the targets of `cross_entropy` are compared with the input tokens. If the
    targets are the input tokens shifted by one, the model runs twice more after the step, without
    gradients: once on the same tokens, and once with another last token. The outputs for all
    earlier tokens must be the same.
    """

    def __init__(self, source: ModuleSource) -> None:
        super().__init__(source)
        self.given: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self.tokens: Tensor | None = None
        self.next = False
        self.done = (
            not source.plain
            or bool(source.hidden)
            or source.comm.mesh.world != source.data.size
            or not _runs_alone(source)
        )
        if not self.done:
            self.handles.append(_Targets(self))

    def passing(self, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> None:
        if self.done or self.given is not None:
            return
        leaves = tree_leaves(in_order(self.source.current_module, tuple(arguments), keywords))
        whole = (
            leaf for leaf in leaves if isinstance(leaf, Tensor) and not leaf.is_floating_point()
        )
        tokens = [leaf for leaf in whole if leaf.dim() == 2 and leaf.shape[1] > 3]
        if tokens and "attention_mask" not in keywords:
            self.given, self.tokens = (tuple(arguments), {**keywords}), tokens[0]
        # A mask may hide the last token; without one, every token is seen.
        elif tokens:
            keywords = {name: value for name, value in keywords.items() if name != "attention_mask"}
            self.given, self.tokens = (tuple(arguments), keywords), tokens[0]

    def compare_targets(self, targets: Tensor) -> None:
        """Compare the targets of a loss with the input tokens, and record whether they are the
        next tokens.
        """
        if self.done or self.tokens is None or targets.is_floating_point():
            return
        batch, length = self.tokens.shape
        # Some loops pad the last place, others leave it out.
        for width in (length, length - 1):
            if targets.numel() != batch * width:
                continue
            rows = targets.reshape(batch, width)[:, : length - 1]
            # `cross_entropy` leaves out targets of -100, its default.
            mask = rows >= 0
            # Fewer agree by chance.
            if int(mask.sum()) >= 8:
                same = (rows == self.tokens[:, 1 : rows.shape[1] + 1]) & mask
                self.next |= float(same.sum()) >= SHARE * float(mask.sum())

    def local(self, step: int) -> Iterator[TraceFinding]:
        if self.done:
            return
        self.done = True
        if self.next and self.given is not None and self.tokens is not None:
            layer = self._leak()
            if layer is not None:
                evidence = (
                    "with another last token, the layer's outputs for earlier tokens"
                    " change, though the loss is for next tokens"
                )
                yield TraceFinding("future-seen", step, layer, evidence)
        self.given = self.tokens = None

    def _leak(self) -> str | None:
        """Return the first layer whose output for earlier tokens depends on the last token, or None
        if there is no such layer.
        """
        assert self.tokens is not None and self.given is not None
        variant = self.tokens.clone()
        # Another token of the same row is one that the vocabulary has.
        variant[:, -1] = torch.where(variant[:, -1] == variant[:, 0], variant[:, 1], variant[:, 0])
        if torch.equal(variant, self.tokens):
            return None
        runs = [self._run(self.tokens), self._run(variant)]
        for layer, output in runs[0].items():
            other = runs[1].get(layer)
            if (
                other is None
                or other.shape != output.shape
                or output.dim() < 3
                or output.shape[1] != self.tokens.shape[1]
            ):
                continue
            before, after = output[:, :-1].float(), other[:, :-1].float()
            # Kernels may sum in another order: rounding is no leak.
            if float((before - after).abs().max()) > 1e-3 * max(float(before.abs().max()), 1e-30):
                return layer
        return None

    def _run(self, tokens: Tensor) -> dict[str, Tensor]:
        """Run the model on `tokens` in evaluation mode, and return the output of each layer.
        Afterwards, random generators and the modes, buffers and attributes of the model's modules
        are as before. If the model fails, the layers that ran before are in the result.
        """
        assert self.given is not None
        source, model, outputs = self.source, self.source.model, dict[str, Tensor]()
        arguments = tree_map(lambda leaf: tokens if leaf is self.tokens else leaf, self.given)
        modes = [
            (module, dict(module.__dict__), _copy_containers(module), _copy_buffers(module))
            for module in model.modules()
        ]
        # Hooks of the user's may count or collect; a pass that the user did not start is not for them.
        for module, *_ in modes:
            module.__dict__ |= {name: OrderedDict() for name in HOOKS}
        for name, layer in source.layers.items():
            layer.register_forward_hook(_make_hook(outputs, name))
        # These passes are not of the training.
        quiet, source.quiet = source.quiet, True
        others = other_states()
        try:
            model.eval()
            devices = {weight.get_device() for weight in model.parameters() if weight.is_cuda}
            with torch.no_grad(), torch.random.fork_rng(sorted(devices)):
                model(*arguments[0], **arguments[1])
        except Exception as error:
            # A model that collects outputs by hooks may fail without them, behind its layers.
            logger.debug("trace: %s fails without hooks: %s", type(model).__name__, error)
        finally:
            source.quiet = quiet
            restore_others(others)
            for module, attributes, containers, buffers in modes:
                module.__dict__.update(attributes)
                for name in set(module.__dict__) - set(attributes):
                    del module.__dict__[name]
                for container, content in containers:
                    container.clear()
                    (container.extend if isinstance(container, list) else container.update)(content)
                for name, (buffer, old) in buffers.items():
                    module._buffers[name] = buffer.copy_(old)
        return outputs

    def end_step(self) -> None:
        self.close()


HOOKS = ("_forward_pre_hooks", "_forward_hooks")
"""Names of the attributes with the hooks that a module calls in a forward pass."""


def _copy_containers(module: nn.Module) -> list[tuple[Any, Any]]:
    """Return the lists, dicts and sets that are attributes of a module, each with a copy."""
    values = vars(module).values()
    return [(value, copy(value)) for value in values if isinstance(value, list | dict | set)]


def _copy_buffers(module: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the buffers of a module, without those of its children, by name: each buffer with a
    copy of its content.
    """
    buffers = module._buffers.items()
    return {name: (buffer, buffer.clone()) for name, buffer in buffers if buffer is not None}


def _make_hook(outputs: dict[str, Tensor], name: str) -> Any:
    def hook(module: nn.Module, arguments: Any, output: Any) -> None:
        first = next(
            (
                leaf
                for leaf in tree_leaves(output)
                if isinstance(leaf, Tensor) and leaf.is_floating_point()
            ),
            None,
        )
        if first is not None:
            outputs[name] = first.detach()

    return hook


def _runs_alone(source: ModuleSource) -> bool:
    """Whether a rank can run the model without the other ranks."""
    plain = all(type(weight) is nn.Parameter for weight in source.model.parameters())
    return plain and not flat_pieces(source.module)


class _Targets:
    """Replaces torch's `cross_entropy` by a function that also passes the targets to a check,
    until `remove` is called.
    """

    def __init__(self, check: Causal) -> None:
        self.plain = plain = nn.functional.cross_entropy
        report = check.safe(check.compare_targets)

        def call_and_compare(
            input: Tensor, target: Tensor, *arguments: Any, **keywords: Any
        ) -> Tensor:
            report(target)
            return plain(input, target, *arguments, **keywords)

        nn.functional.cross_entropy = call_and_compare

    def remove(self) -> None:
        """Restore torch's own function."""
        nn.functional.cross_entropy = self.plain
