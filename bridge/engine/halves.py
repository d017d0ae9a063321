"""Halves: a backward pass in two parts. The first part computes the gradients of a stage's inputs,
and the second part those of the stage's weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

Gradients = tuple[Tensor | None, ...]


@dataclass(eq=False)
class NodeGroup:
    """A group of weights, and the autograd nodes at which the second half continues to compute
    their gradients. `gradients` are those that arrived at these nodes in the first half.
    """

    weights: list[Tensor]
    nodes: dict[Node, Gradients] = field(default_factory=dict)


class Halves:
    """One backward pass from `roots` with their `gradients`. Call `input` first and then `weight`,
    each once.

    Some nodes of the graph lead both to inputs and to weights. The first half stores the gradients
    that arrive at such nodes, and `weight` continues from there, so that nothing is computed twice.
    If no input needs a gradient, `weight` computes everything.
    """

    def __init__(
        self,
        roots: Sequence[GradientEdge],
        gradients: Sequence[Tensor | None],
        inputs: Sequence[Tensor],
    ) -> None:
        self._roots, self._gradients, self._inputs = list(roots), list(gradients), list(inputs)
        self._groups: list[NodeGroup] = []

    def input(self) -> None:
        """Compute the gradient of each input, and store it in the attribute `grad` of the input."""
        if not self._inputs or not self._roots:
            return
        self._groups = _groups(self._roots, self._inputs)
        hooks = [
            node.register_prehook(_catch(group, node))
            for group in self._groups
            for node in group.nodes
        ]
        # Autograd runs only the nodes on the way to `inputs`. The graph is kept, because the second
        # half needs the rest of it.
        gradients = torch.autograd.grad(
            self._roots,
            self._inputs,
            _gradients_or_none(self._gradients),
            retain_graph=True,
            allow_unused=True,
        )
        for hook in hooks:
            hook.remove()
        for tensor, gradient in zip(self._inputs, gradients, strict=True):
            tensor.grad = gradient
        self._outside()

    def weight(self) -> None:
        """Compute the gradients of the weights, add them where a whole backward pass would, and
        free the graph.
        """
        if not self._roots:
            return
        if not self._inputs:
            torch.autograd.backward(self._roots, _gradients_or_none(self._gradients))
        # From one node of a group to another, backward runs nodes on the way to the inputs, which
        # other groups may need as well. Their saved tensors are kept then.
        crossing = any(len(group.nodes) > 1 for group in self._groups)
        for group in self._groups:
            _go_on(group, crossing)
        self._groups, self._roots = [], []

    def _outside(self) -> None:
        """Store the gradients of roots that do not depend on the inputs. The first half does not
        pass through these roots.
        """
        for group in self._groups:
            for edge, gradient in zip(self._roots, self._gradients, strict=True):
                if group.nodes.get(edge.node) == ():
                    # Gradients of a node stand by output, and this root is output number
                    # `output_nr`.
                    before = torch.ones(()) if gradient is None else gradient
                    group.nodes[edge.node] = (None,) * edge.output_nr + (before,)


def _gradients_or_none(gradients: Sequence[Tensor | None]) -> Any:
    return gradients if any(gradient is not None for gradient in gradients) else None


def _catch(group: NodeGroup, node: Node) -> Callable[[Gradients], None]:
    def catch(gradients: Gradients) -> None:
        group.nodes[node] = gradients

    return catch


def _go_on(group: NodeGroup, retain: bool) -> None:
    """Compute the gradients of the weights of `group`, from the nodes at which the first half
    stored gradients. With `retain`, the graph is kept.
    """
    edges = [
        (GradientEdge(node, place), gradient)
        for node, gradients in group.nodes.items()
        for place, gradient in enumerate(gradients)
        if gradient is not None
    ]
    if not edges:
        return
    hooks = []
    if len(group.nodes) > 1:
        # If one node of the group lies behind another, autograd adds up what it gets from there and
        # what was caught. The caught gradient already has both, so it replaces the sum. The default
        # argument binds this turn's value.
        hooks = [
            node.register_prehook(lambda _, values=gradients: values)
            for node, gradients in group.nodes.items()
        ]
    torch.autograd.backward(
        [edge for edge, _ in edges],
        [gradient for _, gradient in edges],
        retain,
        inputs=group.weights,
    )
    for hook in hooks:
        hook.remove()


def _groups(roots: Sequence[GradientEdge], inputs: Sequence[Tensor]) -> list[NodeGroup]:
    """Divide the weights on which the roots depend into groups. Two weights are in one group if the
    second half reaches both from the same node.
    """
    ids = {id(tensor) for tensor in inputs}
    # Whether a node leads to an input, and the weights that it leads to without passing another
    # node that does.
    through: dict[Node, bool] = {}
    below: dict[Node, tuple[Tensor, ...]] = {}
    groups: dict[int, NodeGroup] = {}
    for node in _children_first([edge.node for edge in roots]):
        leaf = getattr(node, "variable", None)  # the nodes that accumulate gradients have it
        children = [child for child, _ in node.next_functions if child is not None]
        through[node] = id(leaf) in ids or any(through[child] for child in children)
        weights = [weight for child in children if not through[child] for weight in below[child]]
        if through[node]:
            # These weights branch off here. Nodes above need not know of them.
            below[node] = ()
            _join(groups, node, weights)
        else:
            below[node] = _unique(weights if leaf is None else [leaf])
    for node in {edge.node for edge in roots}:
        if not through[node]:
            _join(groups, node, below[node])
    return list({id(group): group for group in groups.values()}.values())


def _join(groups: dict[int, NodeGroup], node: Node, weights: Iterable[Tensor]) -> None:
    """Record that the second half reaches `weights` from `node`. Groups with one of these weights
    are joined to one group.
    """
    weights = _unique(weights)
    if not weights:
        return
    old_groups = {id(group): group for weight in weights if (group := groups.get(id(weight)))}
    union = NodeGroup([])
    for group in old_groups.values():
        union.weights += group.weights
        union.nodes.update(group.nodes)
    union.weights = list(_unique([*union.weights, *weights]))
    union.nodes[node] = ()
    groups.update((id(weight), union) for weight in union.weights)


def _unique(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    return tuple({id(tensor): tensor for tensor in tensors}.values())


def _children_first(roots: Sequence[Node]) -> list[Node]:
    """Return all nodes of the graph that can be reached from the roots. A node comes after all
    nodes that can be reached from it.
    """
    # With a stack of its own: the graph of a deep model exceeds Python's limit of recursion. Each
    # node is met twice, the `second_time` after all below it.
    nodes: dict[Node, None] = {}
    visits: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(node, False) for node in roots]
    while stack:
        node, second_time = stack.pop()
        if second_time:
            nodes[node] = None
        elif node not in visits:
            visits.add(node)
            stack.append((node, True))
            stack.extend(
                (child, False)
                for child, _ in node.next_functions
                if child is not None and child not in visits
            )
    return list(nodes)
