"""Invariants of optimizers: they hold the parameters of the model, and each step updates these by
as much as the settings say.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from bridge.trace import naming
from bridge.trace.findings import TraceFinding
from bridge.trace.invariants.check import (
    Check,
    Watched,
    few_names,
    floats_as_integers,
    integers_as_floats,
)
from bridge.trace.invariants.sketch import (
    differing_names,
    sample_tensor,
    sample_tensors,
    start_sampling,
)
from bridge.trace.module import ModuleSource
from bridge.trace.sharding import local_gradient, local_part


class Groups(Check):
    """Every trained parameter is in exactly one group of the optimizers, and the groups hold
    parameters of the model.
    """

    def __init__(self, source: ModuleSource) -> None:
        super().__init__(source)
        self.without: list[tuple[str, nn.Parameter]] = []

    def start(self) -> Iterator[TraceFinding]:
        if not self.source.plain:
            return
        parameters = naming.parameters_by_name(self.source.module)
        counts = Counter(id(weight) for group in self.source.groups for weight in group["params"])
        self.without = [
            (name, weight)
            for name, weight in parameters.items()
            if weight.requires_grad and id(weight) not in counts
        ]
        twice = [name for name, weight in parameters.items() if counts[id(weight)] > 1]
        if twice:
            yield TraceFinding("in-two-groups", 0, twice[0], few_names(twice))
        model_ids = {id(weight) for weight in self.source.module.parameters()} | {
            id(weight) for weight in parameters.values()
        }
        strangers = sum(1 for weight in counts if weight not in model_ids)
        if self._has_masters():
            self.without = []
        # Some beside those of the model, as of a loss, may be meant.
        elif strangers and strangers == len(counts):
            yield TraceFinding(
                "not-of-the-model",
                0,
                "",
                f"none of the {strangers} parameters in the optimizer belongs to the model",
            )
        yield from self._find_norm_decay(parameters)

    def _has_masters(self) -> bool:
        """Return whether the optimizer holds fp32 copies of the model's 16-bit weights. Then the
        script itself copies the updated values back into the weights.
        """
        shapes = Counter(
            weight.shape
            for group in self.source.groups
            for weight in group["params"]
            if weight.dtype == torch.float32
        )
        short = Counter(weight.shape for _, weight in self.without if weight.dtype in SHORT)
        return bool(short) and short.total() == len(self.without) and short <= shapes

    def _find_norm_decay(self, parameters: dict[str, nn.Parameter]) -> Iterator[TraceFinding]:
        decay_ids = {
            id(weight)
            for group in self.source.groups
            if group.get("weight_decay")
            for weight in group["params"]
        }
        flat = [
            name
            for name, weight in parameters.items()
            if id(weight) in decay_ids and weight.dim() < 2 and weight.requires_grad
        ]
        if flat:
            yield TraceFinding(
                "decay-on-norms",
                0,
                flat[0],
                f"weight decay applies to {len(flat)} parameters with less than two dimensions: {few_names(flat)}",
            )

    def local(self, step: int) -> Iterator[TraceFinding]:
        """Yield a finding if parameters get gradients but are in no group of an optimizer."""
        weight_ids = {id(weight) for group in self.source.groups for weight in group["params"]}
        parameters = naming.parameters_by_name(self.source.module)
        missing = [
            name
            for name, _ in self.without
            if name in parameters and id(parameters[name]) not in weight_ids
        ]
        idle = [
            name
            for name in missing
            if parameters[name].grad is not None
            and bool(sample_tensor(local_part(parameters[name].grad)).any())
        ]
        if idle:
            layer = naming.layer_of(self.source.global_name(idle[0]), self.source.layers)[0]
            evidence = (
                f"{len(idle)} of {len(parameters)} parameters get gradients but are in no group of an "
                f"optimizer: {few_names(idle)}"
            )
            yield TraceFinding("not-in-optimizer", step, layer or idle[0], evidence)


class Updated(Check):
    """A step changes every weight that has a gradient, and between steps nothing changes the
    weights or the optimizer's state.

    The change is at most as large as the learning rate allows, and is not lost in rounding.
    """

    def __init__(self, source: ModuleSource) -> None:
        super().__init__(source)
        self.old: dict[str, tuple[Tensor, Tensor | None]] = {}
        """Sampled elements of each weight before the update; for 16-bit weights, also those of the
        gradient. Gradients of other weights are read only if the weight did not change.
        """
        self.taken: tuple[Callable[[], dict[str, Tensor]], ...] | None = None
        """The elements of weights and gradients that were sampled before the update, on their way
        from the device.
        """
        self.now: dict[str, Tensor] = {}
        """Sampled elements of each weight after the last update, to compare them with those before
        the next update.
        """
        self.known: dict[str, int] = {}
        """Number of entries that the optimizer's state had for each parameter after the last
        update.
        """
        self.found: list[TraceFinding] = []
        self.steps = 0

    def row(self, step: int) -> Tensor:
        self.old, self.taken, self.found = {}, None, []
        if self.source.plain and not self.source.late:
            parameters = naming.parameters_by_name(self.source.module)
            weights, gradients = dict[str, Tensor](), dict[str, Tensor]()
            for name, weight in parameters.items():
                if weight.grad is not None and weight.requires_grad:
                    weights[name] = local_part(weight)
                    gradient = local_gradient(weight) if weight.dtype in SHORT else None
                    gradients |= {} if gradient is None else {name: gradient}
            # Fetched after the update: the host would wait for backward here.
            self.taken = start_sampling(weights), start_sampling(gradients)
            self.found = list(self._find_lost_state(step, parameters))
        return torch.empty(0, dtype=torch.int64)

    def _fetch(self) -> None:
        """Set the sampled elements from before the update."""
        if self.taken is not None:
            weights, gradients = (fetch() for fetch in self.taken)
            self.old = {name: (sample, gradients.get(name)) for name, sample in weights.items()}
            self.taken = None

    def _find_foreign_changes(self, step: int) -> Iterator[TraceFinding]:
        """Yield a finding about weights that changed between the last update and this one."""
        apart = differing_names(self.now, {name: sample for name, (sample, _) in self.old.items()})
        names = [name for name in self.now if name in apart]
        # NaN is not equal to itself.
        names = [name for name in names if not bool(self.now[name].isnan().any())]
        if names:
            evidence = (
                f"{len(names)} of {len(self.now)} weights changed between the last update and this one: "
                f"{few_names(names)}"
            )
            yield TraceFinding("weights-changed", step, names[0], evidence)

    def _find_lost_state(
        self, step: int, parameters: dict[str, nn.Parameter]
    ) -> Iterator[TraceFinding]:
        """Yield a finding if the optimizer, or its state, was lost since the last update."""
        if self.source.replaced:
            yield TraceFinding("optimizer-replaced", step, "", self.source.replaced)
            return
        names = [
            name
            for name, count in self.known.items()
            if name in parameters and self._state(parameters[name]) < count
        ]
        if names:
            evidence = (
                f"{len(names)} of {len(self.known)} parameters lost their optimizer state since the last update: "
                f"{few_names(names)}"
            )
            yield TraceFinding("moments-lost", step, names[0], evidence)

    def _state(self, weight: nn.Parameter) -> int:
        return sum(len(optimizer.state.get(weight, ())) for optimizer in self.source.optimizers)

    def later(self, step: int) -> Tensor:
        self.steps += 1
        self._fetch()
        self.found = [*self._find_foreign_changes(step), *self.found]
        parameters = naming.parameters_by_name(self.source.module) if self.old else {}
        self.now = sample_tensors(
            {name: local_part(parameters[name]) for name in self.old if name in parameters}
        )
        self.known = {name: self._state(parameters[name]) for name in self.now}
        self.found += self._check_weights(step) if self.old else []
        return torch.empty(0, dtype=torch.int64)

    def _check_weights(self, step: int) -> Iterator[TraceFinding]:
        parameters = naming.parameters_by_name(self.source.module)
        groups = self.source.groups_by_parameter(self.source.moving)
        still, losses, total = [], 0, 0
        apart = differing_names(self.now, {name: tensor for name, (tensor, _) in self.old.items()})
        for name, (old, gradient) in self.old.items():
            group = groups.get(id(parameters[name])) if name in parameters else None
            if group is None or not _learning_rate(group) or not old.numel():
                continue
            if old.dtype not in SHORT:
                if name in apart:
                    continue
                tensor = local_gradient(parameters[name])
                gradient = None if tensor is None else sample_tensor(tensor).cpu()
            mask = torch.zeros(0) if gradient is None else gradient.isfinite() & (gradient != 0)
            if gradient is None or not mask.any():
                continue
            differs = self.now[name] != old
            if old.dtype in SHORT and old.numel() > 1:
                losses, total = losses + int((mask & ~differs).sum()), total + int(mask.sum())
            elif not differs.any():
                # An update shows if it is larger than rounding; those of SGD grow with gradients.
                rounding = float(old.abs().max()) * torch.finfo(old.dtype).eps
                largest = 1.0 if "betas" in group else float(gradient.abs().max())
                if _learning_rate(group) * largest > 4 * rounding:
                    still.append(name)
        if still:
            everything = len(still) == len(self.old)
            evidence = (
                "no weight changed"
                if everything
                else f"{len(still)} of {len(self.old)} weights did not change: {few_names(still)}"
            )
            yield TraceFinding("not-updated", step, "" if everything else still[0], evidence)
        if total >= 64 and losses > 0.5 * total:
            evidence = (
                f"{losses} of {total} sampled 16-bit weights that have a gradient did not change"
            )
            yield TraceFinding("updates-lost", step, "", evidence)
        yield from self._large(step, parameters, groups)

    def _large(
        self, step: int, parameters: dict[str, nn.Parameter], groups: dict[int, Any]
    ) -> Iterator[TraceFinding]:
        """Yield a finding about the first weight whose update is too large.

        In a new run, Adam's updates are at first about as large as the learning rate. In a resumed
        run they are at most (1 - beta1) / sqrt(1 - beta2) times the rate.
        """
        for name, (old, _) in self.old.items():
            group = groups.get(id(parameters[name])) if name in parameters else None
            if (
                group is None
                or not old.numel()
                or "betas" not in group
                or self.steps > 3
                or old.dtype in SHORT
                or old.is_complex()  # Adam takes its two parts for two numbers
            ):
                continue
            change = (self.now[name] - old).abs()
            rate, decay = _learning_rate(group), float(group.get("weight_decay") or 0.0)
            first, second = map(float, group["betas"])
            ratio = (
                max(1.0, (1 - first) / max(1 - second, 1e-9) ** 0.5) if self.source.resumed else 1.0
            )
            size = float(old.abs().max())
            # 20 % and four roundings of room.
            most = 1.2 * rate * (ratio + decay * size) + 4 * torch.finfo(old.dtype).eps * size
            if (
                type(self.source.optimizer).__name__ in BOUNDED
                and rate
                and bool((change > most).any())
            ):
                evidence = (
                    f"{name} changes by {float(change.max()):.2g} at a learning rate of {rate:.2g}"
                )
                yield TraceFinding("update-too-large", step, name, evidence)
                return

    def local(self, step: int) -> Iterator[TraceFinding]:
        yield from self.found


def _learning_rate(group: Mapping[str, Any]) -> float:
    """Return the learning rate of a parameter group, or 0 if the optimizer computes the rate
    itself, as Adafactor may.
    """
    return float(group.get("lr") or 0.0)


SHORT = (torch.bfloat16, torch.float16)
BOUNDED = ("Adam", "AdamW")
"""Names of the optimizers whose updates the learning rate bounds."""


class Resumed(Check):
    """After a run is resumed, the parameters of one group have equal step counts. The second
    moments fit these counts: all are zeros at 0 steps, and not all are zeros above 1.
    """

    def start(self) -> Iterator[TraceFinding]:
        if not self.source.plain:
            return
        states = [
            state for optimizer in self.source.optimizers for state in optimizer.state.values()
        ]
        pairs = [
            (int(state["step"]), state["exp_avg_sq"])
            for state in states
            if {"step", "exp_avg_sq"} <= set(state)
        ]
        if self.source.done and not states:
            evidence = (
                f"the run resumes after step {self.source.done}, but the optimizer has no state"
            )
            yield TraceFinding("moments-not-resumed", 0, "", evidence)
        steps = max((count for count, _ in pairs), default=0)
        nonzero = any(bool(sample_tensor(local_part(moment)).any()) for _, moment in pairs)
        # A single step may have been one without gradients, so that it says nothing of its moments.
        if pairs and (not nonzero if steps > 1 else nonzero and not steps):
            moments = (
                "some second moments are not zero" if nonzero else "all second moments are zero"
            )
            yield TraceFinding(
                "moments-missing",
                0,
                "",
                f"{moments}, but the optimizer counts {steps} steps before this run",
            )

    def local(self, step: int) -> Iterator[TraceFinding]:
        if step > 2 or not self.source.plain:
            return
        for group in self.source.groups:
            counts: dict[int, list[nn.Parameter]] = defaultdict(list)
            for optimizer in self.source.optimizers:
                for weight in group["params"]:
                    count = optimizer.state.get(weight, {}).get("step")
                    if count is not None and weight.grad is not None:
                        counts[int(count)].append(weight)
            # A parameter without a gradient falls behind by one a step: in this run, by `step`.
            if len(counts) > 1 and min(counts) < max(counts) - step:
                names = {
                    id(weight): name
                    for name, weight in naming.parameters_by_name(self.source.module).items()
                }
                few_of = [names.get(id(weight), "?") for weight in counts[min(counts)]]
                yield TraceFinding(
                    "moments-missing",
                    step,
                    few_of[0],
                    f"{few_names(few_of)}: {min(counts)} steps taken, while others have taken {max(counts)}",
                )


class Clipped(Check):
    """`clip_grad_norm_` returns the same norm of gradients on all ranks."""

    def __init__(self, source: ModuleSource) -> None:
        super().__init__(source)
        self.norm = -1.0
        self.handles.append(Watched("clip_grad_norm_", self.safe(self._record_norm)))

    def _record_norm(self, norm: Any) -> None:
        self.norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def row(self, step: int) -> Tensor:
        return floats_as_integers([self.norm])

    def judge_rows(self, step: int, rows: Tensor) -> Iterator[TraceFinding]:
        norms = integers_as_floats(rows).view(-1)
        # -1 stands for a rank that did not clip.
        if (
            bool((norms >= 0).all())
            and bool(norms.isfinite().all())
            and float(norms.max()) > float(norms.min()) * (1 + 1e-3)
        ):
            yield TraceFinding(
                "clip-norms-differ",
                step,
                "",
                f"the norms are {', '.join(f'{norm:.6g}' for norm in norms.tolist())}",
            )

    def end_step(self) -> None:
        self.norm = -1.0
