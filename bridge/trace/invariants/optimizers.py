"""Invariants of optimizers: they hold the parameters of the model, and each step updates these by
as much as the settings say.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from bridge.trace import naming
from bridge.trace.digest import digest_tensor
from bridge.trace.findings import TraceFinding
from bridge.trace.gather import gather_tensor
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
from bridge.trace.module import SHORT, ModuleSource
from bridge.trace.sharding import flat_pieces, local_gradient, local_part


class Groups(Check):
    """Every trained parameter is in exactly one group of the optimizers, and the groups hold
    parameters of the model.
    """

    def __init__(self, source: ModuleSource) -> None:
        super().__init__(source)
        self.masters = False
        """Whether the optimizer holds copies of the model's parameters."""
        self.others: list[nn.Parameter] = []
        """Parameters in the optimizer that the model does not have, as those of a loss."""
        self.strangers: list[nn.Parameter] = []
        """The same, if the optimizer has no parameter of the model. They are what is trained if they
        get gradients, as a script's own masters or fast weights do.
        """
        self.equal = False
        """Whether all data ranks had the same values of `others` before the last update."""

    def start(self) -> Iterator[TraceFinding]:
        if not self.source.plain:
            return
        parameters = naming.parameters_by_name(self.source.module)
        counts = Counter(id(weight) for group in self.source.groups for weight in group["params"])
        twice = [name for name, weight in parameters.items() if counts[id(weight)] > 1]
        if twice:
            yield TraceFinding("in-two-groups", 0, twice[0], few_names(twice))
        model_ids = {id(weight) for weight in self.source.module.parameters()} | {
            id(weight) for weight in parameters.values()
        }
        held = {id(weight): weight for group in self.source.groups for weight in group["params"]}
        strangers = [weight for key, weight in held.items() if key not in model_ids]
        without = {name for name, _ in self._without()}
        self.masters = bool(without) and without <= self.source.casts().keys()
        # Some beside those of the model, as of a loss, may be meant.
        if strangers and len(strangers) == len(held) and not self.masters:
            self.strangers = strangers
        elif not self.masters:
            self.others = strangers
        yield from self._find_norm_decay(parameters)

    def row(self, step: int) -> Tensor:
        digests = [int(digest_tensor(sample_tensor(local_part(one)))[0]) for one in self.others]
        return torch.tensor([hash(tuple(digests))])

    def judge_rows(self, step: int, rows: Tensor) -> Iterator[TraceFinding]:
        before, self.equal = self.equal, bool((rows == rows[0]).all())
        if before and not self.equal:
            where = "parameters outside of the model"
            evidence = (
                f"the optimizer holds {len(self.others)} parameters that are not of the model; "
                "data ranks had equal values of them before the last update, and have different ones now"
            )
            yield TraceFinding("replicas-differ", step, where, evidence)

    def _without(self) -> list[tuple[str, nn.Parameter]]:
        """Return the trained parameters that are in no group of an optimizer, with their names."""
        held = {id(weight) for group in self.source.groups for weight in group["params"]}
        parameters = naming.parameters_by_name(self.source.module).items()
        return [
            (name, weight)
            for name, weight in parameters
            if weight.requires_grad and id(weight) not in held
        ]

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
        """Yield a finding if parameters get gradients but are in no group of an optimizer, or if
        those in the optimizer are of another model and get none.
        """
        self.masters |= any(weight.grad is not None for weight in self.strangers)
        if self.strangers and not self.masters:
            evidence = (
                f"none of the {len(self.strangers)} parameters in the optimizer belongs to the "
                "model, or has a gradient"
            )
            yield TraceFinding("not-of-the-model", step, "", evidence)
        if self.masters or not self.source.plain:
            return
        idle = [
            name
            for name, weight in self._without()
            if weight.grad is not None and bool(sample_tensor(local_part(weight.grad)).any())
        ]
        if idle:
            layer = naming.layer_of(self.source.global_name(idle[0]), self.source.layers)[0]
            count = len(naming.parameters_by_name(self.source.module))
            evidence = (
                f"{len(idle)} of {count} parameters get gradients but are in no group of an "
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
        self.changed: set[str] = set()
        """Names in `kept` of which sampled elements have changed since the last update."""
        self.kept: dict[str, Tensor] = {}
        """Sampled elements of moments and of frozen weights after the last update."""
        self.known: dict[str, int] = {}
        """Number of entries that the optimizer's state had for each parameter after the last
        update.
        """
        self.found: list[TraceFinding] = []
        self.alone: set[str] = set()
        """Names of weights of one element that the last update did not change."""
        self.ids: dict[str, int] = {}
        """The identities of the parameters in `now`, by name, where torch does not exchange them."""
        self.others: set[str] = set()
        """The names that have meant other parameters since the last update."""
        self.steps = 0

    def row(self, step: int) -> Tensor:
        self.old, self.taken, self.found = {}, None, []
        if self.source.plain and not self.source.late:
            parameters = naming.parameters_by_name(self.source.module)
            self.others = {
                name for name, key in self.ids.items() if id(parameters.get(name)) != key
            }
            weights, gradients = dict[str, Tensor](), dict[str, Tensor]()
            for name, weight in parameters.items():
                if weight.grad is not None and weight.requires_grad:
                    weights[name] = local_part(weight)
                    gradient = local_gradient(weight) if weight.dtype in SHORT else None
                    gradients |= {} if gradient is None else {name: gradient}
            # Fetched after the update: the host would wait for backward here.
            kept = start_sampling(self._kept_tensors(parameters))
            self.taken = start_sampling(weights), start_sampling(gradients), kept
            self.found = list(self._find_lost_state(step, parameters))
        return torch.empty(0, dtype=torch.int64)

    def _fetch(self) -> None:
        """Set the sampled elements from before the update."""
        if self.taken is not None:
            weights, gradients, kept = (fetch() for fetch in self.taken)
            self.old = {name: (sample, gradients.get(name)) for name, sample in weights.items()}
            # NaN is not equal to itself.
            self.changed = {
                name
                for name in differing_names(self.kept, kept)
                if not bool(self.kept[name].isnan().any())
            }
            self.taken = None

    def _kept_tensors(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        """Return what only the optimizer may change, and only in its step: moments, each under the
        name "NAME of PARAMETER"; and what nothing may change: frozen weights.
        """
        kept = {
            f"{moment} of {name}": local_part(tensor)
            for name, weight in parameters.items()
            for moment, tensor in self.source.of("moment", weight).items()
        }
        frozen = {name: weight for name, weight in parameters.items() if not weight.requires_grad}
        return kept | {name: local_part(weight) for name, weight in frozen.items()}

    def _find_foreign_changes(self, step: int) -> Iterator[TraceFinding]:
        """Yield a finding about weights that changed between the last update and this one."""
        apart = differing_names(self.now, {name: sample for name, (sample, _) in self.old.items()})
        # Weights that have masters are casts of these, which `Casts` holds them to.
        names = [name for name in self.now if name in apart - self.source.casts().keys()]
        names = [name for name in names if name not in self.others]
        if self.others:
            evidence = (
                f"{len(self.others)} of {len(self.ids)} names mean other parameters than after the "
                f"last update: {few_names(sorted(self.others))}"
            )
            yield TraceFinding("parameter-replaced", step, min(self.others), evidence)
        changed = [
            name
            for name in self.kept
            if name in self.changed and name.rpartition(" of ")[2] not in self.others
        ]
        frozen = [name for name in changed if " of " not in name]
        # NaN is not equal to itself.
        names = [name for name in names if not bool(self.now[name].isnan().any())] + frozen
        moments = [name for name in changed if name not in frozen]
        if moments and not self.source.replaced:
            evidence = (
                f"{len(moments)} of {len(self.kept)} moments changed between the last update and this "
                f"one: {few_names(moments)}"
            )
            where = moments[0].partition(" of ")[2]
            yield TraceFinding("moments-changed", step, where, evidence)
        if names:
            evidence = (
                f"{len(names)} of {len(self.now)} trained weights and {len(frozen)} frozen ones"
                if frozen
                else f"{len(names)} of {len(self.now)} weights"
            )
            evidence += f" changed between the last update and this one: {few_names(names)}"
            yield TraceFinding("weights-changed", step, names[0], evidence)

    def _find_lost_state(
        self, step: int, parameters: dict[str, nn.Parameter]
    ) -> Iterator[TraceFinding]:
        """Yield a finding if the optimizer, or its state, was lost since the last update."""
        if self.source.replaced:
            yield TraceFinding("optimizer-replaced", step, "", self.source.replaced)
            return
        # Between forward and update, FSDP may have other parameters in the places of its own.
        held = self.source.groups_by_parameter(range(len(self.source.optimizers)))
        names = [
            name
            for name, count in self.known.items()
            if id(parameters.get(name)) in held and self._state(parameters[name]) < count
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
        self.kept = sample_tensors(self._kept_tensors(parameters))
        self.now = sample_tensors(
            {name: local_part(parameters[name]) for name in self.old if name in parameters}
        )
        self.known = {name: self._state(parameters[name]) for name in self.now}
        sharded = flat_pieces(self.source.module)
        self.ids = {
            name: id(parameters[name])
            for name in self.now
            if not (sharded or isinstance(parameters[name], DTensor))
        }
        self.found += self._check_weights(step) if self.old else []
        return torch.empty(0, dtype=torch.int64)

    def _check_weights(self, step: int) -> Iterator[TraceFinding]:
        parameters = naming.parameters_by_name(self.source.module)
        groups = self.source.groups_by_parameter(self.source.moving)
        broken = [
            name
            for name, now in self.now.items()
            if not bool(now.isfinite().all()) and bool(self.old[name][0].isfinite().all())
        ]
        if broken:
            evidence = (
                f"{len(broken)} of {len(self.now)} weights have NaNs or infinities, and had none "
                f"before the update: {few_names(broken)}"
            )
            yield TraceFinding("weights-not-finite", step, broken[0], evidence)
        still, losses, total, before = [], 0, 0, self.alone
        self.alone = set()
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
                largest = self._size_of_update(parameters[name], group, gradient)
                if _learning_rate(group) * largest > 4 * rounding:
                    self.alone |= {name} if old.numel() == 1 else set()
                    # By chance, weight decay may cancel the update of a single element.
                    if old.numel() > 1 or name in before:
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

    def _size_of_update(
        self, weight: nn.Parameter, group: Mapping[str, Any], gradient: Tensor
    ) -> float:
        """Return about how large the largest update of the sampled elements is, before it is
        multiplied by the learning rate. Where gradients have become much smaller than they were,
        those of Adam are far smaller than 1.
        """
        if "betas" not in group:
            return float(gradient.abs().max())
        moments = self.source.of("moment", weight)
        if not {"exp_avg", "exp_avg_sq"} <= moments.keys():
            return 1.0
        mean, square = (
            sample_tensor(local_part(moments[name])) for name in ("exp_avg", "exp_avg_sq")
        )
        return float((mean.abs() / (square.sqrt() + float(group.get("eps", 0.0)))).max())

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
        self.norm, self.limit = -1.0, math.inf
        self.limits, self.before = set[float](), set[float]()
        """The finite limits of this step, and of all steps before."""
        self.stages: list[float] = []
        """The norms of all pipeline ranks in this step; empty if there is one such rank."""
        self.handles.append(Watched("clip_grad_norm_", self.safe(self._record_norm)))

    def _record_norm(self, norm: Any, limit: float) -> None:
        self.limit = limit
        self.limits |= {limit} if math.isfinite(limit) else set()
        self.norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def row(self, step: int) -> Tensor:
        comm = self.source.comm
        if comm.mesh.sizes.get("pipeline", 1) > 1:
            own = torch.tensor([self.norm], dtype=torch.float64)
            rows = gather_tensor(comm, "norms of stages", own, comm.group("pipeline"))
            self.stages = rows.view(-1).tolist()
        return floats_as_integers([self.norm])

    def local(self, step: int) -> Iterator[TraceFinding]:
        new, before = (
            ", ".join(f"{one:.6g}" for one in sorted(some))
            for some in (self.limits - self.before, self.before)
        )
        if new and before:
            yield TraceFinding("clip-changed", step, "", f"the limit is {new}, and was {before}")
        norms = self.stages
        # With an infinite limit a norm is only measured.
        clips = norms and min(norms) >= 0 and max(norms) > self.limit
        if clips and max(norms) > min(norms) * (1 + 1e-3):
            evidence = f"pipeline stages clip by the norms of their own gradients: {', '.join(f'{norm:.6g}' for norm in norms)}"
            yield TraceFinding("clip-norms-differ", step, "", evidence)

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
        self.before |= self.limits
        self.norm, self.limits = -1.0, set()
