"""Invariants of gradients: they are cleared before backward, present before a step, and averaged
over data ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from bridge.trace import naming
from bridge.trace.findings import TraceFinding
from bridge.trace.invariants.check import (
    NOTHING,
    Check,
    Watched,
    few_names,
    floats_as_integers,
    integers_as_floats,
    is_thorough,
)
from bridge.trace.invariants.sketch import (
    COUNT,
    flatten_real,
    on_host,
    sample_tensor,
    sketch_tensor,
    spread_elements,
)
from bridge.trace.module import ModuleSource
from bridge.trace.roots import Roots
from bridge.trace.sharding import flat_pieces, local_part

FEW = 512
"""Number of elements of a gradient that are sketched in a step that is not thorough."""
LARGE = 4096
"""Number of elements above which the norm of a gradient is estimated from the gradient's sketch."""
ZEROS = torch.zeros(COUNT, dtype=torch.float64)
"""The sketch of no gradient."""
SLACK = 64.0
"""Largest error, in units in the last place, that several roundings may cause in a gradient."""


class Cleared(Check):
    """Gradients of one step are cleared before those of the next step are used, and every step has
    gradients.

    A gradient counts as stale if it is not zero when the first backward pass after the optimizer's
    last step begins, and is not cleared until the optimizer steps again.
    """

    def __init__(self, source: ModuleSource) -> None:
        super().__init__(source)
        self.backwards, self.known, self.trained, self.graded = 0, False, False, False
        self.since: dict[int, int] = {}
        """For each optimizer that has stepped, the number of backward passes since its last step.
        The key is the optimizer's index.
        """
        self.left: dict[str, nn.Parameter] = {}
        """Parameters, by name, whose gradient was not zero when the first backward pass after a
        step began, and was not cleared since.
        """
        self.same: dict[str, Tensor] = {}
        """The gradients of the parameters in `left`, by name, if backward began in a call of
        `autograd.grad`. Such a call adds to no gradient. So a parameter in this dictionary is stale
        only if its gradient is still this tensor when the step begins.
        """
        self.stale: list[str] = []
        self.missing: list[str] = []
        self.parameters = 0
        self.ever: set[str] = set()
        self.grades, self.roots = _Graded(), Roots(keeps=False)
        self.handles += [self.grades, self.roots]
        self.before = self.roots.passes
        """Number of backward passes before this step, of the module and of anything else."""
        source.stepping.append(self.safe(self._stepping))

    def backward(self) -> None:
        self.left = {
            name: weight for name, weight in self.left.items() if _any_nonzero(weight.grad)
        }
        # Only as a step begins: within it, gradients of its passes add up as they should.
        for number in [number for number, count in self.since.items() if not count]:
            leftovers = {
                name: weight for name, weight in self._of(number) if _any_nonzero(weight.grad)
            }
            self.left |= leftovers
            # What `autograd.grad` returns is added to no gradient. A loop may put it in the place of
            # the one before, or add it, as torch's pipelines with split backward passes do.
            if self.grades.inside:
                self.same |= {
                    name: weight.grad
                    for name, weight in leftovers.items()
                    if weight.grad is not None
                }
        self.since = {number: count + 1 for number, count in self.since.items()}
        if self.grades.inside:
            self.graded = True
        else:
            self.backwards += 1

    def _of(self, number: int) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the trained parameters that the optimizer with index `number` holds, with their
        names.
        """
        groups = self.source.groups_by_parameter([number])
        return (
            (name, weight)
            for name, weight in _trainable_parameters(self.source)
            if id(weight) in groups
        )

    def _stepping(self, number: int) -> None:
        own = dict(self._of(number) if self.source.plain else ())
        self.stale += [
            name
            for name, weight in own.items()
            if name in self.left and self.same.get(name, weight.grad) is weight.grad
        ]
        got = {name for name, weight in own.items() if weight.grad is not None}
        self.missing += [name for name in own if name not in got]
        self.parameters += len(own)
        self.ever |= got

    def row(self, step: int) -> Tensor:
        missing = len(self.missing) if self.backwards else 0
        others = self.roots.passes - self.before + self.source.transformed
        return torch.tensor(
            [
                self.backwards + self.graded,
                others,
                len(self.stale),
                missing,
                self.parameters,
                self.source.evaluating * (self.trained and not self.source.passes),
            ]
        )

    def judge_rows(self, step: int, rows: Tensor) -> Iterator[TraceFinding]:
        backwards, others, _, missing, parameters, quiet = rows.T
        empty = (missing == parameters) & (backwards > 0) & (parameters > 0)
        if empty.any():
            ranks = tuple(self.at(place) for place in empty.nonzero().view(-1).tolist())
            evidence = (
                f"{int(backwards.max())} backward passes ran, but none of the"
                f" {int(parameters[0])} trained parameters has a gradient"
            )
            yield TraceFinding(
                "gradient-lost", step, "", evidence, ranks if len(ranks) < len(rows) else ()
            )
        if quiet.any():
            idle = tuple(self.at(place) for place in quiet.nonzero().view(-1).tolist())
            evidence = (
                f"{int(quiet.max())} forward passes ran in evaluation mode and none in training mode, "
                "unlike in earlier steps"
            )
            ranks = idle if len(idle) < len(rows) else ()
            yield TraceFinding("not-training", step, "", evidence, ranks)
        # One that was met within this step follows another, which took the backward pass.
        elif (
            self.known
            and not (backwards + others).any()
            and not empty.any()
            and set(self.source.moving) & set(self.since)
        ):
            yield TraceFinding(
                "step-without-backward",
                step,
                "",
                "no backward pass ran since the optimizer's last step",
            )

    def local(self, step: int) -> Iterator[TraceFinding]:
        if self.stale:
            evidence = (
                f"{len(self.stale)} of {self.parameters} gradients are not zero when backward "
                f"begins: {few_names(self.stale)}"
            )
            yield TraceFinding("gradient-stale", step, self.stale[0], evidence)
        names = (name for name in self.missing if name not in self.ever)
        missing = list(names) if step <= 2 and self.backwards else []
        if missing and len(missing) < self.parameters:
            yield TraceFinding(
                "gradient-missing",
                step,
                missing[0],
                f"{len(missing)} of {self.parameters} parameters have no gradient: {few_names(missing)}",
            )

    def end_step(self) -> None:
        self.known |= self.backwards > 0 or self.graded
        self.trained |= self.source.passes > 0
        for number in self.source.moving:
            self.since[number] = 0
            groups = self.source.groups_by_parameter([number])
            self.left = {
                name: weight for name, weight in self.left.items() if id(weight) not in groups
            }
        self.same = {name: gradient for name, gradient in self.same.items() if name in self.left}
        self.backwards, self.graded, self.parameters = 0, False, 0
        self.before = self.roots.passes
        self.stale, self.missing = [], []


class _Graded:
    """Replaces `torch.autograd.grad` by a function that also records whether it is running, until
    `remove` is called.
    """

    inside = 0
    """Number of calls that are running."""

    def __init__(self) -> None:
        self.plain = plain = torch.autograd.grad

        @functools.wraps(plain)
        def call_counted(*arguments: Any, **keywords: Any) -> Any:
            _Graded.inside += 1
            try:
                return plain(*arguments, **keywords)
            finally:
                _Graded.inside -= 1

        torch.autograd.grad = call_counted

    def remove(self) -> None:
        """Put torch's own back."""
        torch.autograd.grad = self.plain


class Reduced(Check):
    """Each gradient that the optimizer gets is the mean over data ranks of the gradients that
    backward computed.

    This is checked on sketches, which are linear in the gradient: if the sketch of the gradient is
    the mean of the ranks' sketches, the gradient is the mean of their gradients. All gradients may
    be multiplied by one number (clipping, a loss scale). Parameters that torch shards are left out,
    because their gradients cannot be read before the reduction.
    """

    def __init__(self, source: ModuleSource) -> None:
        super().__init__(source)
        weight_ids = {id(weight) for group in source.groups for weight in group["params"]}
        pairs = [
            (name, weight)
            for name, weight in _trainable_parameters(source)
            if id(weight) in weight_ids
            and not isinstance(weight, DTensor)
            and type(weight).__name__ != "FlatParameter"
        ]
        self.named = pairs if _hooks_precede_reduction(source) else []
        self.coarse = _compresses_gradients(source)
        self.sums = [ZEROS] * len(self.named)
        """Sums of sketches, on the device of the gradients: to fetch each of them would make the
        host wait within backward.
        """
        self.fired = [0] * len(self.named)
        self.emptied: set[int] = set()
        """Indices of the parameters whose gradient was set to None between passes of this step."""
        self.rows = NOTHING[None]
        """The rows of all data ranks in this step, kept until the end of the step."""
        self.before: Tensor | None = None
        self.clipped = self.bounded = False
        self.handles.append(Watched("clip_grad_norm_", lambda *_: setattr(self, "clipped", True)))
        self.handles.append(Watched("clip_grad_value_", lambda *_: setattr(self, "bounded", True)))
        for at, (_, weight) in enumerate(self.named):
            hook = self.safe(lambda gradient, at=at: self._add_gradient_sketch(at, gradient))
            self.handles.append(weight.register_hook(hook))  # type: ignore[no-untyped-call]

    def _add_gradient_sketch(self, at: int, gradient: Tensor) -> None:
        """Add the sketch of a gradient that backward computed on this rank, and that is not
        reduced yet, to the parameter's sum in `sums`.
        """
        weight = self.named[at][1]
        sketch, before = sketch_tensor(self._elements(gradient)), self.sums[at]
        # The gradient begins with this pass if what was summed before was cleared.
        if weight.grad is not None and before is not ZEROS:
            some = True if self.fired[at] else _sample_nonzero(weight.grad)
            sketch = sketch + before.to(sketch.device) * some
        # Only where the script says how many passes a step has: in other places, they may be trials.
        elif self.fired[at] and not _Graded.inside:
            self.emptied |= (
                {at} if (self.source.passes - 1) % (self.source.accumulation or 1) else set()
            )
        self.sums[at] = sketch
        self.fired[at] += 1
        self.source.last_gradient = perf_counter()

    def _elements(self, gradient: Tensor) -> Tensor:
        """Return the elements of a gradient that are sketched in this step."""
        thorough = is_thorough(self.source.now().step)
        return gradient if thorough else spread_elements(gradient, FEW)

    def row(self, step: int) -> Tensor:
        """Return for each parameter: the sketch of the gradients that backward computed on this
        rank, the sketch and the norm of the gradient that the optimizer gets, and the number of
        backward passes.
        """
        if not self.named:
            return NOTHING
        gradients = (weight.grad for _, weight in self.named)
        own = _gradient_rows([None if one is None else self._elements(one) for one in gradients])
        counts = torch.tensor(self.fired, dtype=torch.float64)[:, None]
        return floats_as_integers(torch.cat([on_host(self.sums), own, counts], 1))

    def judge_rows(self, step: int, rows: Tensor) -> Iterator[TraceFinding]:
        self.rows = rows
        yield from ()

    def local(self, step: int) -> Iterator[TraceFinding]:
        if self.emptied:
            names = [self.named[at][0] for at in sorted(self.emptied)]
            evidence = (
                f"{len(names)} of {len(self.named)} gradients were cleared between the "
                f"{self.source.accumulation} passes of this step: {few_names(names)}"
            )
            yield TraceFinding("gradient-lost", step, names[0], evidence)
        # Only now is it known which optimizers took part in the step.
        rows, self.rows = self.rows, NOTHING[None]
        if not rows.shape[1]:
            return
        every = integers_as_floats(rows).view(len(rows), len(self.named), 2 * COUNT + 2)
        own, got, norm, counts = torch.split(every, [COUNT, COUNT, 1, 1], 2)
        groups = self.source.groups_by_parameter(self.source.moving)
        # Gradients of an optimizer that does not step are not for this step.
        moving = torch.tensor([id(weight) in groups for _, weight in self.named])
        counts = counts * moving[None, :, None]
        there = (
            (counts > 0).any(0).view(-1)
            & (norm > 0).all(0).view(-1)
            & torch.isfinite(norm).all(0).view(-1)
        )
        mean, first = own.mean(0), got[0]
        size = norm.amax(0)
        factor = _reduction_factor(first[there], mean[there], size[there])
        yield from self._judge_gradients(step, own, got, mean, size, there, factor)
        yield from self._find_zeros(step, own, norm, counts)
        # A sketch of other elements cannot be compared with those of the next step.
        self.before = first if is_thorough(step) == is_thorough(step + 1) else None

    def _judge_gradients(
        self,
        step: int,
        own: Tensor,
        got: Tensor,
        mean: Tensor,
        size: Tensor,
        there: Tensor,
        factor: float | None,
    ) -> Iterator[TraceFinding]:
        ranks = len(own)
        if factor is None or self.bounded:
            return
        for reference, name in (
            (float(ranks), "gradient-summed"),
            (1 / ranks, "gradient-averaged-twice"),
        ):
            # Clipping scales by any number below 1, which may be 1 / ranks.
            if (
                ranks > 1
                and abs(factor - reference) < 1e-3 * reference
                and not (name != "gradient-summed" and self.clipped)
            ):
                evidence = (
                    f"every gradient is {factor:.6g} times the mean of the gradients that backward "
                    f"computed on {ranks} data ranks"
                )
                yield TraceFinding(name, step, "", evidence)
        # Each number of a sketch is about as large as the norm: COUNT of them COUNT**0.5 times.
        apart = (got - factor * mean).norm(dim=2).amax(0) / (size.view(-1) * COUNT**0.5).clamp(
            min=1e-300
        )
        odd = [at for at in (apart > self._tolerance()).nonzero().view(-1).tolist() if there[at]]
        kinds: dict[str, list[int]] = {}
        for at in odd:
            kinds.setdefault(self._kind(at, own, got, mean, size, factor), []).append(at)
        for kind, places in kinds.items():
            if kind == "gradient-changed" and self.coarse:
                continue
            names = [self.named[at][0] for at in places]
            worst = max(float(apart[at]) for at in places)
            alone = self._alone(places[0], own, got) if kind == "gradient-not-reduced" else ()
            evidence = (
                f"{few_names(names)}: the gradient differs by {worst:.2g} times its norm from the mean of the "
                "gradients that backward computed; all other gradients agree with their means"
            )
            yield TraceFinding(kind, step, names[0], evidence, alone)

    def _kind(
        self, at: int, own: Tensor, got: Tensor, mean: Tensor, size: Tensor, factor: float
    ) -> str:
        if self._alone(at, own, got):
            return "gradient-not-reduced"
        if self.before is not None:
            # Beside the mean, is what is left the gradient of the step before?
            rest = (got[0, at] - factor * mean[at] - self.before[at]).norm() / (
                size[at] * COUNT**0.5
            )
            if float(rest) < self._tolerance():
                return "gradient-stale"
        return "gradient-changed"

    def _alone(self, at: int, own: Tensor, got: Tensor) -> tuple[int, ...]:
        """Return the ranks on which the optimizer gets the gradient that the same rank computed,
        possibly multiplied by a factor, although other ranks computed other gradients.
        """
        if len(own) == 1:
            return ()
        mine, result, mean = own[:, at], got[:, at], own[:, at].mean(0)
        scales = (result * mine).sum(1) / mine.square().sum(1).clamp(min=1e-300)
        rest = (result - scales[:, None] * mine).norm(dim=1) / result.norm(dim=1).clamp(min=1e-300)
        apart = (mine - mean).norm(dim=1) > self._tolerance() * mean.norm()
        return tuple(
            self.at(place) for place in ((rest < 1e-4) & apart).nonzero().view(-1).tolist()
        )

    def _find_zeros(
        self, step: int, own: Tensor, norm: Tensor, counts: Tensor
    ) -> Iterator[TraceFinding]:
        """Yield a finding if the gradients of some parameters became zero after backward."""
        nonzero = (own.norm(dim=2) > 0).any(0) & (counts > 0).any(0).view(-1)
        zero = nonzero & (norm == 0).all(0).view(-1)
        if zero.any() and not zero[nonzero].all():
            names = [self.named[at][0] for at in zero.nonzero().view(-1).tolist()]
            yield TraceFinding(
                "gradient-changed",
                step,
                names[0],
                f"{few_names(names)}: backward computed a gradient, but all its elements are zero when the optimizer steps",
            )

    def _tolerance(self) -> float:
        formats = {weight.dtype for _, weight in self.named}
        return min(0.2, max(1e-2, SLACK * max(torch.finfo(dtype).eps for dtype in formats)))

    def end_step(self) -> None:
        groups = self.source.groups_by_parameter(self.source.moving)
        for at, (_, weight) in enumerate(self.named):
            if id(weight) in groups:
                self.fired[at] = 0
                self.sums[at] = ZEROS
        self.clipped = self.bounded = False
        self.emptied.clear()


def _reduction_factor(got: Tensor, mean: Tensor, size: Tensor) -> float | None:
    """Return the factor between the gradients that the optimizer gets and the means over data
    ranks, as the median over parameters. Return None if no mean is large enough.
    """
    weights = mean.norm(dim=1) / size.view(-1)
    # A mean that is small beside the norm tells no factor: its parts cancel.
    large = weights > 0.1
    if not large.any():
        return None
    ratios = (got[large] * mean[large]).sum(1) / mean[large].square().sum(1)
    # The median: a few gradients that were changed must not move it.
    return float(ratios.median()) if bool(torch.isfinite(ratios).all()) else None


def _gradient_rows(gradients: Sequence[Tensor | None]) -> Tensor:
    """Return the sketch and the norm of each gradient, on the CPU; zeros for None."""
    sketches = on_host(
        [ZEROS if gradient is None else sketch_tensor(gradient) for gradient in gradients]
    )
    # A sketch tells the norm of a large gradient well enough, without reading it once more.
    norms = sketches.norm(dim=1) / COUNT**0.5
    small = {
        at: _gradient_norm(gradient)
        for at, gradient in enumerate(gradients)
        if gradient is not None and gradient.numel() <= LARGE
    }
    if small:
        norms[list(small)] = on_host(list(small.values()))
    return torch.cat([sketches, norms[:, None]], 1)


def _gradient_norm(gradient: Tensor) -> Tensor:
    values = flatten_real(gradient)
    wide = torch.promote_types(values.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(values, dtype=wide)
    return norm.double()


def _trainable_parameters(source: ModuleSource) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the name and parameter of each trained parameter of which this rank holds at least one
    element.
    """
    for name, weight in naming.parameters_by_name(source.module).items():
        if weight.requires_grad and local_part(weight).numel():
            yield name, weight


def _hooks_precede_reduction(source: ModuleSource) -> bool:
    """Return whether hooks on parameters get the gradients before they are reduced. This is so
    unless torch shards or compiles the module.
    """
    sharded = any(
        isinstance(weight, DTensor) for weight in naming.parameters_by_name(source.module).values()
    )
    return source.plain and not source.hidden and not sharded and not flat_pieces(source.module)


LOSSY = "torch.distributed.algorithms.ddp_comm_hooks."
"""Prefix of the modules with torch's communication hooks for DistributedDataParallel. Many of
these hooks lose precision, such as PowerSGD.
"""


def _compresses_gradients(source: ModuleSource) -> bool:
    """Return whether a hook of DistributedDataParallel compresses gradients before they are
    reduced.
    """
    hooks = [
        hook for part in source.module.modules() for hook, _ in getattr(part, "_comm_hooks", ())
    ]
    places = [str(getattr(hook, "__module__", "")) for hook in hooks]
    return any(place.startswith(LOSSY) and not place.endswith(".default_hooks") for place in places)


def _any_nonzero(gradient: Tensor | None) -> bool:
    return gradient is not None and bool(_sample_nonzero(gradient))


def _sample_nonzero(gradient: Tensor) -> Tensor:
    """Return whether sampled elements of a gradient are not all zeros, on its device."""
    local = gradient._local_tensor if isinstance(gradient, DTensor) else gradient
    return sample_tensor(local, 256).any()
