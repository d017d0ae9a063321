"""Tensor and sequence parallelism: layers that are split over a group of ranks, the collectives
between these ranks, and the conversion of a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import register_pytree_node

from bridge.engine.comm import Comm, Group, Wait
from bridge.engine.layers import Mark
from bridge.engine.randomness import draw_apart, draw_together
from bridge.errors import ConfigError
from bridge.layout.tensor import Site, SiteKind, TensorPlan, cut_range, name_matches
from bridge.layout.traffic import (
    GATHER_FEATURES,
    GATHER_TOKENS,
    LARGEST,
    LOGITS,
    SCATTER_TOKENS,
    SUM,
    SUM_BACKWARD,
)

TOKENS = 1
"""The dimension that sequence parallelism splits: activations are (batch, tokens, features)."""


@dataclass(frozen=True)
class Split:
    """The group of tensor ranks, and whether activations between split layers are split by tokens
    (`sequence`).
    """

    comm: Comm
    group: Group
    sequence: bool

    def sum(self, name: str, tensor: Tensor) -> Tensor:
        """Return the sum of `tensor` over the tensor ranks. A contiguous tensor is overwritten with
        the sum.
        """
        total, wait = self._start_sum(name, tensor)
        wait()
        return total

    def gather(self, tensor: Tensor) -> Tensor:
        """Return the token slices of all ranks as one tensor: (batch, tokens / ranks, ...) to
        (batch, tokens, ...).
        """
        # The collective puts parts of ranks one behind the other along the first dimension, so
        # tokens go there for a while.
        by_token = tensor.transpose(0, TOKENS).contiguous()
        whole = by_token.new_empty(len(by_token) * self.group.size, *by_token.shape[1:])
        self.comm.all_gather(GATHER_TOKENS, whole, by_token, self.group)()
        return whole.transpose(0, TOKENS)

    def scatter_sum(self, tensor: Tensor) -> Tensor:
        """Sum `tensor` over the tensor ranks, and return this rank's token slice of the sum."""
        part, wait = self._start_scatter(tensor)
        wait()
        return part

    def gather_features(self, local: Tensor, whole: int) -> Tensor:
        """Return the features of all ranks as one tensor: (..., features of this rank) to (...,
        `whole`).
        """
        size, longest = self.group.size, -(-whole // self.group.size)
        # Parts may differ by one feature, but a gather wants them alike.
        block = F.pad(local, (0, longest - local.shape[-1])).contiguous()
        parts = block.new_empty(size * len(block), *block.shape[1:])
        self.comm.all_gather(GATHER_FEATURES, parts, block, self.group)()
        lengths = (len(cut_range(whole, size, rank)) for rank in range(size))
        pieces = parts.view(size, *block.shape).unbind()
        return torch.cat(
            [part[..., :length] for part, length in zip(pieces, lengths, strict=True)], -1
        )

    def start(self, gradient: Tensor) -> tuple[Tensor, Wait]:
        """Start to sum the ranks' gradients of the common input of split layers. Return the sum,
        and the wait after which the sum is valid.
        """
        return (
            self._start_scatter(gradient)
            if self.sequence
            else self._start_sum(SUM_BACKWARD, gradient)
        )

    def _start_sum(self, name: str, tensor: Tensor) -> tuple[Tensor, Wait]:
        total = tensor.contiguous()
        return total, self.comm.all_reduce(name, total, self.group)

    def _start_scatter(self, tensor: Tensor) -> tuple[Tensor, Wait]:
        by_token = tensor.transpose(0, TOKENS).contiguous()
        part = by_token.new_empty(len(by_token) // self.group.size, *by_token.shape[1:])
        return part.transpose(0, TOKENS), self.comm.reduce_scatter(
            SCATTER_TOKENS, part, by_token, self.group
        )

    def slice(self, tensor: Tensor) -> Tensor:
        """Return this rank's token slice of `tensor`, which is equal on all ranks: (batch, tokens,
        ...) to (batch, tokens / ranks, ...).
        """
        length = tensor.shape[TOKENS]
        if length % self.group.size:
            raise ConfigError(
                f"parallel.sequence: {length} tokens do not divide evenly over {self.group.size} tensor ranks; pad the"
                " sequences to a multiple, or turn sequence parallelism off"
            )
        return tensor.narrow(
            TOKENS, self.group.index * length // self.group.size, length // self.group.size
        )


def apply(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    """Return the output of a function of autograd with one output."""
    output: Tensor = function.apply(*arguments)  # type: ignore[no-untyped-call]
    return output


class _Wait(torch.autograd.Function):
    """Forward hands the activations on to split layers. Backward waits for the sum that `_Enter`
    has started.
    """

    @staticmethod
    def forward(context: Any, inputs: Tensor, waits: list[Wait]) -> Tensor:
        context.started = waits
        return inputs.view_as(inputs)  # autograd wants another tensor than the input

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        context.started.pop()()
        return gradient, None


class _Enter(torch.autograd.Function):
    """Forward hands the input `whole` on to split layers. This input is equal on all ranks.
    Backward starts the sum of the ranks' gradients.
    """

    @staticmethod
    def forward(
        context: Any, inputs: Tensor, whole: Tensor, split: Split, waits: list[Wait]
    ) -> Tensor:
        context.split, context.started = split, waits
        return whole.view_as(whole)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        ledger = context.split.comm.ledger
        ledger.note(f"{SUM_BACKWARD} starts")
        total, wait = context.split.start(gradient)

        def end() -> None:
            wait()
            ledger.note(f"{SUM_BACKWARD} ends")

        context.started.append(end)
        return total, None, None, None


class _Weight(torch.autograd.Function):
    """Makes the weight of a linear layer a node of its own in the graph. Backward computes the
    gradient of the weight from the gradient of the layer's output.
    """

    @staticmethod
    def forward(
        context: Any, weight: Tensor, bias: Tensor | None, whole: Tensor, split: Split
    ) -> Tensor:
        context.save_for_backward(whole)
        context.split = split
        # Autograd checks that a gradient has the shape of the output. This one has it, (..., out),
        # with a single element of memory.
        return weight.new_empty(()).expand(*whole.shape[:-1], len(weight))

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (whole,) = context.saved_tensors
        context.split.comm.ledger.note("weight gradient")
        # All dimensions but the last count tokens: (tokens, out) transposed times (tokens, in) is
        # (out, in).
        flat, inputs = gradient.flatten(0, -2), whole.flatten(0, -2)
        of_weight, of_bias = context.needs_input_grad[:2]
        return (
            flat.t() @ inputs if of_weight else None,
            flat.sum(0) if of_bias else None,
            None,
            None,
        )


class _Product(torch.autograd.Function):
    """A linear layer whose backward computes only the gradient of the input. The gradient of the
    output is passed on to the `_Weight` at `place`.
    """

    @staticmethod
    def forward(
        context: Any, inputs: Tensor, place: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        context.save_for_backward(weight)
        return F.linear(inputs, weight, bias)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor, None, None]:
        (weight,) = context.saved_tensors
        return gradient @ weight if context.needs_input_grad[0] else None, gradient, None, None


class _Leave(torch.autograd.Function):
    """The output of a split layer: the sum of all ranks' outputs. With sequence parallelism, each
    rank gets its token slice of the sum. Without, the sum overwrites `outputs`.
    """

    @staticmethod
    def forward(context: Any, outputs: Tensor, split: Split) -> Tensor:
        context.split = split
        if split.sequence:
            return split.scatter_sum(outputs)
        # The product before it keeps its inputs for backward, and not this output. Nobody else
        # reads it.
        context.mark_dirty(outputs)
        return split.sum(SUM, outputs)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        # The derivative of a sum by each of its terms is one, so the gradient of the sum is that of
        # every rank's part.
        split: Split = context.split
        return split.gather(gradient) if split.sequence else gradient, None


class _Scatter(torch.autograd.Function):
    """Forward cuts whole sequences, which are equal on all ranks, to this rank's slice of tokens."""

    @staticmethod
    def forward(context: Any, inputs: Tensor, split: Split) -> Tensor:
        context.split = split
        return split.slice(inputs).contiguous()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return context.split.gather(gradient), None


class _GatherFeatures(torch.autograd.Function):
    """Gathers the features of all ranks. All ranks then compute the same, so each has the whole
    gradient, and backward returns this rank's slice.
    """

    @staticmethod
    def forward(context: Any, local: Tensor, split: Split, part: range, whole: int) -> Tensor:
        context.part = part
        return split.gather_features(local, whole)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _features(gradient, context.part), None, None, None


class _DivideFeatures(torch.autograd.Function):
    """Forward cuts features, which are equal on all ranks, to the features of this rank."""

    @staticmethod
    def forward(context: Any, inputs: Tensor, split: Split, part: range) -> Tensor:
        context.split, context.whole = split, inputs.shape[-1]
        return _features(inputs, part)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return context.split.gather_features(gradient, context.whole), None, None


def _features(tensor: Tensor, part: range) -> Tensor:
    return tensor.narrow(-1, part.start, len(part)).contiguous()


class _CrossEntropy(torch.autograd.Function):
    """Cross entropy (tokens,) of logits (tokens, local vocabulary). A rank holds only some columns
    of the logits, which begin with column `start`.
    """

    @staticmethod
    def forward(context: Any, logits: Tensor, targets: Tensor, split: Split, start: int) -> Tensor:
        # The loss of a token is log(sum of exp(logit - m)) - (logit of the target - m). With m the
        # largest logit of all ranks, no exponential exceeds 1. Both terms are sums over the
        # vocabulary, so that ranks add up theirs in one collective.
        largest = logits.amax(-1)
        split.comm.all_reduce(LARGEST, largest, split.group, "max")()
        offsets = logits - largest[:, None]
        local = targets - start
        here = (local >= 0) & (local < logits.shape[-1])
        # A target of another rank is looked up at place 0 and multiplied with 0: the rank that has
        # it adds it to the sum.
        places = local.where(here, 0)
        chosen = offsets.gather(-1, places[:, None])[:, 0] * here
        exponentials = offsets.exp_()  # in the memory of `offsets`, which is as large as the logits
        sums = torch.stack([exponentials.sum(-1), chosen])
        split.comm.all_reduce(LOGITS, sums, split.group)()
        context.save_for_backward(exponentials.div_(sums[0][:, None]), places, here)
        return sums[0].log() - sums[1]

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        # The derivative by a logit is its softmax, less one at the target.
        shares, places, here = context.saved_tensors
        result = shares * gradient[:, None]
        result.scatter_add_(-1, places[:, None], -(gradient * here)[:, None])
        return result, None, None, None


class Entrance:
    """The common input of several split layers, which is gathered once for all of them, and whose
    gradient is summed once.

    Backward computes in this order: gradients of inputs, start of their sum over tensor ranks,
    gradients of weights, wait for the sum. The sum thus overlaps with the gradients of weights. If
    several nodes of autograd are ready, backward runs the one that was created last. So forward
    creates the nodes in the reverse order.
    """

    def __init__(self, split: Split) -> None:
        self.split, self._left = split, 0
        self._users: list[ColumnLinear | VocabularyLinear] = []
        self._last: tuple[Tensor, Tensor, list[Tensor]] | None = None

    def add(self, user: ColumnLinear | VocabularyLinear) -> None:
        """Register `user` as a layer that takes this input."""
        self._users.append(user)

    def __call__(self, inputs: Tensor, user: ColumnLinear | VocabularyLinear) -> Tensor:
        """Return the product of `inputs` with the weight of `user`, plus its bias."""
        # The first user with an input enters it for all; the last one lets go of it, so that it is
        # not kept until the next pass.
        if self._last is None or self._last[0] is not inputs:
            self._last, self._left = (inputs, *self._enter(inputs)), len(self._users)
        _, activations, places = self._last
        self._left -= 1
        if self._left == 0:
            self._last = None
        place = places[self._users.index(user)]
        bias = None if user.bias is None else user.bias.detach()
        return apply(_Product, activations, place, user.weight.detach(), bias)

    def _enter(self, inputs: Tensor) -> tuple[Tensor, list[Tensor]]:
        waits: list[Wait] = []
        tensor = apply(_Wait, inputs, waits)
        whole = self.split.gather(inputs.detach()) if self.split.sequence else inputs.detach()
        places = [apply(_Weight, user.weight, user.bias, whole, self.split) for user in self._users]
        return apply(_Enter, tensor, whole, self.split, waits), places


class Inside(Entrance):
    """The common input of split layers within a region (`Tokens.regions`). Tokens are gathered at
    the beginning of the region, and there the gradient is summed too.
    """

    def __call__(self, inputs: Tensor, user: ColumnLinear | VocabularyLinear) -> Tensor:
        """Return the product of `inputs` with the weight of `user`, plus its bias."""
        return F.linear(inputs, user.weight, user.bias)


class ColumnLinear(nn.Module):
    """A linear layer that is split by output features. The input has all features, and the output
    has this rank's features.
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, entrance: Entrance) -> None:
        super().__init__()
        self.weight, self.bias, self._entrance = weight, bias, entrance
        self.in_features, self.out_features = weight.shape[1], weight.shape[0]
        entrance.add(self)

    def forward(self, inputs: Tensor) -> Tensor:
        """From shape (..., in) to shape (..., out / ranks)."""
        outputs = self._entrance(inputs, self)
        if self.training:
            draw_apart(self._entrance.split.group.index, inputs.device)
        return outputs


class RowLinear(nn.Module):
    """A linear layer that is split by input features. The input has this rank's features, and the
    output has all. The bias is added once.
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, split: Split) -> None:
        super().__init__()
        self.weight, self.bias, self._split = weight, bias, split
        self.in_features, self.out_features = weight.shape[1], weight.shape[0]

    def forward(self, inputs: Tensor) -> Tensor:
        """From shape (..., in / ranks) to shape (..., out)."""
        draw_together()
        # The bias comes after the sum: every rank has it whole, and in the products it would be
        # added once for each rank.
        total = apply(_Leave, F.linear(inputs, self.weight), self._split)
        if self.bias is None:
            return total
        return total + self.bias if self._split.sequence else total.add_(self.bias)


class GatheredLinear(ColumnLinear):
    """A linear layer that is split by output features, although its input and its output have all
    features.
    """

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, entrance: Entrance, mark: Mark
    ) -> None:
        super().__init__(weight, bias, entrance)
        self._part = range(mark.start, mark.start + len(weight))
        self.out_features = mark.whole

    def forward(self, inputs: Tensor) -> Tensor:
        """From shape (..., in) to shape (..., out)."""
        local, split = self._entrance(inputs, self), self._entrance.split
        return apply(_GatherFeatures, local, split, self._part, self.out_features)


class DividedLinear(RowLinear):
    """A linear layer that is split by input features, although its input and its output have all
    features.
    """

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, split: Split, mark: Mark
    ) -> None:
        super().__init__(weight, bias, split)
        self._part = range(mark.start, mark.start + weight.shape[1])
        self.in_features = mark.whole

    def forward(self, inputs: Tensor) -> Tensor:
        """From shape (..., in) to shape (..., out)."""
        return super().forward(apply(_DivideFeatures, inputs, self._split, self._part))


@dataclass(frozen=True)
class SplitLogits:
    """Logits (..., local vocabulary): the columns that this rank holds, which begin with column
    `start`.
    """

    local: Tensor
    split: Split
    start: int

    def whole(self) -> Tensor:
        """Return the logits of the whole vocabulary, on every rank, without their graph. All tensor
        ranks must take part.
        """
        # Each rank adds the size of its own part to zeros, and thereby learns those of the others.
        sizes = self.local.new_zeros(self.split.group.size, dtype=torch.int64)
        sizes[self.split.group.index] = self.local.shape[-1]
        self.split.comm.all_reduce("logits' sizes", sizes, self.split.group)()
        mark = Mark(self.local.dim() - 1, self.start, int(sizes.sum()))
        return join_split(self.split.comm, "logits", self.local.detach(), mark)

    def losses(self, targets: Tensor, ignore: int) -> Tensor:
        """Return the cross entropy of each token, shape (tokens,), in fp32 or a wider format. It is
        0 for tokens whose target is `ignore`.
        """
        flat, mask = targets.flatten(), targets.flatten() != ignore
        logits = self.local.flatten(0, -2)
        exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
        of_kept = flat.where(mask, 0)
        return apply(_CrossEntropy, exact, of_kept, self.split, self.start) * mask


register_pytree_node(
    SplitLogits,
    lambda logits: ([logits.local], (logits.split, logits.start)),
    lambda leaves, rest: SplitLogits(next(iter(leaves)), *rest),
)


class VocabularyLinear(nn.Module):
    """The output layer, split by vocabulary. The input has all features, and the output is
    `SplitLogits`.
    """

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, entrance: Entrance, start: int
    ) -> None:
        super().__init__()
        self.weight, self.bias, self._entrance, self._start = weight, bias, entrance, start
        entrance.add(self)

    def forward(self, inputs: Tensor) -> SplitLogits:
        """From shape (..., in) to the logits of this rank's part of the vocabulary."""
        return SplitLogits(self._entrance(inputs, self), self._entrance.split, self._start)


class VocabularyEmbedding(nn.Module):
    """An embedding that is split by vocabulary. A rank looks up the tokens in its part of the
    vocabulary, and takes 0 for all others. The sum over ranks has all tokens. The row `padding`
    gets no gradient.
    """

    def __init__(
        self, weight: nn.Parameter, split: Split, start: int, padding: int | None = None
    ) -> None:
        super().__init__()
        local = None if padding is None else padding - start
        self._padding = local if local is not None and 0 <= local < len(weight) else None
        # The sum is whole even under sequence parallelism: tokens are split later, behind the
        # modules that the plan names.
        self.weight, self._split, self._start = (
            weight,
            Split(split.comm, split.group, sequence=False),
            start,
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """From tokens of shape (...) to vectors of shape (..., hidden), which are equal on all
        ranks.
        """
        local = tokens - self._start
        here = (local >= 0) & (local < len(self.weight))
        vectors = F.embedding(local.where(here, 0), self.weight, self._padding) * here[..., None]
        return apply(_Leave, vectors, self._split)


class TokenDropout(nn.Module):
    """Dropout for a slice of tokens, with the same mask as dropout of the whole sequence has at
    these tokens.
    """

    def __init__(self, p: float, split: Split) -> None:
        super().__init__()
        self.p, self._split = p, split

    def forward(self, inputs: Tensor) -> Tensor:
        """Apply dropout to activations that are split by tokens."""
        if not self.training or self.p == 0.0:
            return inputs
        # Ranks draw from the same seed. A mask of its own size would be the same on all of them,
        # and not that of one process.
        shape = list(inputs.shape)
        shape[TOKENS] *= self._split.group.size
        return inputs * self._split.slice(F.dropout(inputs.new_ones(shape), self.p))


class Conversion:
    """Splits a model in place over tensor ranks, by the names in a tensor plan. `marks` says how
    each parameter was changed, by the identity (`id`) of the new parameter.
    """

    def __init__(self, model: nn.Module, plan: TensorPlan, split: Split) -> None:
        self.model, self.plan, self.split = model, plan, split
        self.alone = split if plan.tokens is None else replace(split, sequence=False)
        """How layers outside of `Tokens.regions` exchange activations. Even if hooks split the
        model's stream by tokens, these layers get whole sequences.
        """
        self.marks: dict[int, Mark] = {}
        self.sites: list[Site] = []
        self._cuts: dict[tuple[int, int], nn.Parameter] = {}
        self._entrances: dict[tuple[str, int], Entrance] = {}
        ConfigError.raise_if(self._problems())
        # Modules first: a weight that belongs to a split layer has its mark then, and is not cut
        # again by its name.
        self._replace_modules()
        self._cut_weights()
        for name, module in self.model.named_modules():
            if name_matches(name, self.plan.partial):
                self.marks.update(
                    {id(weight): Mark(partial=True) for weight in module.parameters()}
                )
        # A list, as the division changes what `_layers_to_split` looks at.
        for name, value, attribute in list(self._layers_to_split()):
            setattr(self.model.get_submodule(name), attribute, value // self.split.group.size)
        if split.sequence and plan.tokens is None:
            self._split_tokens()

    def _problems(self) -> Iterator[str]:
        names = [name for name, _ in self.model.named_modules()]
        plan = self.plan
        linear = (*plan.columns, *plan.rows, *plan.gathered, *plan.divided, *plan.shared)
        stacks = (stack.name for stack in plan.experts)
        for part in (*linear, *stacks, *plan.vocabulary, *plan.scattered):
            if not any(part in name for name in names):
                yield f"tensor plan: no module of the model has {part!r} in its name; correct or remove this entry"
        for part, _ in plan.weights:
            if not any(part in name for name, _ in self.model.named_parameters()):
                yield f"tensor plan: no parameter of the model has {part!r} in its name; correct or remove this entry"
        for attribute in plan.attributes:
            if not any(attribute == kind for _, _, kind in self._layers_to_split()):
                yield f"tensor plan: no module of the model has an integer {attribute!r}; correct or remove this entry"
        if self.split.sequence and not plan.scattered and plan.tokens is None:
            yield "parallel.sequence: the tensor plan names no module after which to split by tokens; set `scattered`"
        if self.split.sequence and plan.experts and plan.tokens is None:
            yield (
                "parallel.sequence: tensor ranks cannot divide experts if the tensor plan does not set `tokens`;"
                " set it, or turn parallel.sequence off"
            )
        yield from self._indivisible()

    def _indivisible(self) -> Iterator[str]:
        for name, value, attribute in self._layers_to_split():
            if value % self.split.group.size:
                yield (
                    f"parallel.tensor: {name}.{attribute} ({value}) does not divide evenly over {self.split.group.size} ranks;"
                    f" use a divisor of {value}"
                )

    def _layers_to_split(self) -> Iterator[tuple[str, int, str]]:
        for name, module in self.model.named_modules():
            for attribute in self.plan.attributes:
                value = getattr(module, attribute, None)
                if isinstance(value, int):
                    yield name, value, attribute

    def _replace_modules(self) -> None:
        for name, module in list(self.model.named_modules()):
            layer = self._convert_layer(name, module)
            if layer is not None:
                layer.train(module.training)
                self.model.set_submodule(name, layer)
            divide = getattr(module, "split_over", None)
            if divide is not None:
                divide(self.split.group.index, self.split.group.size)

    def _convert_layer(self, name: str, module: nn.Module) -> nn.Module | None:
        if isinstance(module, nn.Embedding) and name_matches(name, self.plan.vocabulary):
            weight = self.cut_along(module.weight, 0)
            self.sites.append(Site(name, "embed", module.embedding_dim))
            start = self.marks[id(weight)].start
            return VocabularyEmbedding(weight, self.split, start, module.padding_idx)
        if not isinstance(module, nn.Linear):
            return None
        kind = self.plan.kind(name, module.in_features, module.out_features)
        return None if kind is None else _MAKE[kind](self, name, module)

    def _column(self, name: str, module: nn.Linear) -> nn.Module:
        weight, bias = self.cut_along(module.weight, 0), self._cut_bias(module)
        return ColumnLinear(weight, bias, self._entrance(name, module))

    def _vocabulary(self, name: str, module: nn.Linear) -> nn.Module:
        weight, bias = self.cut_along(module.weight, 0), self._cut_bias(module)
        self.sites.append(Site(name, "logits", 1))
        return VocabularyLinear(
            weight, bias, self._entrance(name, module), self.marks[id(weight)].start
        )

    def _shared(self, name: str, module: nn.Linear) -> nn.Module:
        """Convert a layer that every rank holds whole. A rank uses only a part of the output, so
        each rank has only a share of the gradient, and the weights are marked as partial.
        """
        for weight in module.parameters():
            self.marks[id(weight)] = Mark(partial=True)
        assert isinstance(module.weight, nn.Parameter), "linear layers hold parameters"
        return ColumnLinear(module.weight, module.bias, self._entrance(name, module))

    def _row(self, name: str, module: nn.Linear) -> nn.Module:
        split = self._split_at(name)
        self.sites.append(
            Site(name, "leave" if split is self.split else "leave whole", module.out_features)
        )
        return RowLinear(self.cut_along(module.weight, 1), module.bias, split)

    def _gather_linear(self, name: str, module: nn.Linear) -> nn.Module:
        weight, bias = self.cut_along(module.weight, 0), self._cut_bias(module)
        self._add(name, "gather features", module.out_features)
        return GatheredLinear(weight, bias, self._entrance(name, module), self.marks[id(weight)])

    def _divide_linear(self, name: str, module: nn.Linear) -> nn.Module:
        weight, split = self.cut_along(module.weight, 1), self._split_at(name)
        self._add(name, "divide features", module.in_features)
        self.sites.append(
            Site(name, "leave" if split is self.split else "leave whole", module.out_features)
        )
        return DividedLinear(weight, module.bias, split, self.marks[id(weight)])

    def _add(self, name: str, kind: SiteKind, features: int) -> None:
        size = self.split.group.size
        self.sites.append(Site(name, kind, -(-features // size) * size))

    def _split_at(self, name: str) -> Split:
        """Return how the activations of a layer are split. If hooks split the model's stream by
        tokens, layers get whole sequences, except in `Tokens.regions`.
        """
        tokens = self.plan.tokens
        return (
            self.split
            if tokens is None or name.rpartition(".")[0] in tokens.regions
            else self.alone
        )

    def _entrance(self, name: str, module: nn.Linear) -> Entrance:
        """Return the common input of a layer and of the other layers within the same module. Layers
        with another number of input features have another common input.
        """
        key = name.rpartition(".")[0], module.in_features
        if key not in self._entrances:
            split, tokens = self._split_at(name), self.plan.tokens
            if tokens is not None and split is self.split:
                self._entrances[key] = Inside(
                    split
                )  # `sequence.attach` adds the site, where the region begins
            else:
                self._entrances[key] = Entrance(split)
                self.sites.append(
                    Site(name, "enter" if tokens is None else "enter whole", module.in_features)
                )
        return self._entrances[key]

    def _cut_bias(self, module: nn.Linear) -> nn.Parameter | None:
        return None if module.bias is None else self.cut_along(module.bias, 0)

    def cut_along(self, weight: Tensor, dim: int) -> nn.Parameter:
        """Return this rank's part of a weight along `dim`. A tied weight is cut once, and stays
        tied.
        """
        key = id(weight), dim
        if key not in self._cuts:
            whole = weight.shape[dim]
            part = cut_range(whole, self.split.group.size, self.split.group.index)
            local = weight.detach().narrow(dim, part.start, len(part)).clone()
            parameter = nn.Parameter(local, requires_grad=weight.requires_grad)
            self._cuts[key] = parameter
            self.marks[id(parameter)] = Mark(dim, part.start, whole)
        return self._cuts[key]

    def _cut_weights(self) -> None:
        for name, weight in list(self.model.named_parameters()):
            for part, dim in self.plan.weights:
                if part in name and id(weight) not in self.marks:
                    parent, _, leaf = name.rpartition(".")
                    setattr(self.model.get_submodule(parent), leaf, self.cut_along(weight, dim))

    def _split_tokens(self) -> None:
        """Make the modules that the tensor plan names in `scattered` return a slice of tokens."""
        before: set[int] = set()
        # Features of the stream: what the first split layer takes.
        width = next((site.width for site in self.sites if site.kind == "enter"), 0)
        for name, module in list(self.model.named_modules()):
            if name_matches(name, self.plan.scattered):
                before |= {id(part) for part in module.modules()}
                # A name in the plan may match a module and modules within it. Only the outermost
                # one scatters.
                words = name.split(".")
                parents = (".".join(words[:number]) for number in range(1, len(words)))
                if not any(name_matches(parent, self.plan.scattered) for parent in parents):
                    module.register_forward_hook(self._scatter)
                    self.sites.append(Site(name, "scatter", width))
            elif isinstance(module, nn.Dropout):
                self.model.set_submodule(name, TokenDropout(module.p, self.split))
        # A parameter that is not split sees this rank's tokens alone from there on, so that its
        # gradient is a share.
        for module in self.model.modules():
            for weight in module.parameters(recurse=False) if id(module) not in before else ():
                self.marks.setdefault(id(weight), Mark(partial=True))

    def _scatter(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return scatter_tokens(output, self.split)


def join_split(comm: Comm, name: str, local: Tensor, mark: Any) -> Tensor:
    """Return the whole of a tensor that is split over tensor ranks. `mark`, a `Mark` or a
    `Parameter`, says how it is split.
    """
    group, dim = comm.group("tensor"), mark.split
    # Parts may differ in length, but a gather wants them alike: each is padded to the longest, and
    # cut to its own length after.
    length = -(-mark.whole // group.size)
    by_slice = local.transpose(0, dim)
    block = by_slice.new_zeros(length, *by_slice.shape[1:])
    block[: len(by_slice)] = by_slice
    parts = block.new_empty(length * group.size, *by_slice.shape[1:])
    comm.all_gather(name, parts, block, group)()
    pieces = [
        parts[rank * length :][: len(cut_range(mark.whole, group.size, rank))]
        for rank in range(group.size)
    ]
    return torch.cat(pieces).transpose(0, dim)


_MAKE: dict[str, Callable[[Conversion, str, nn.Linear], nn.Module]] = {
    "column": Conversion._column,
    "row": Conversion._row,
    "gathered": Conversion._gather_linear,
    "divided": Conversion._divide_linear,
    "shared": Conversion._shared,
    "vocabulary": Conversion._vocabulary,
}


def scatter_tokens(inputs: Tensor, split: Split) -> Tensor:
    """Return this rank's token slice of a tensor that is equal on all ranks. Backward gathers the
    slices of the gradient.
    """
    return apply(_Scatter, inputs, split)
