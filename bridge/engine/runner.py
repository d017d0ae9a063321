"""The engine: trains a model by a plan, step by step and stage by stage, with DeepSpeed's
interface.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import nullcontext
from dataclasses import dataclass, replace
from operator import is_
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from bridge.engine import expert_stacks
from bridge.engine.absence import change
from bridge.engine.comm import HERE, Comm, Group as Ranks, announce_operation, arrive, board, leave
from bridge.engine.executor import Executor, Feed
from bridge.engine.fields import accumulation_of
from bridge.engine.formats import TORCH
from bridge.engine.gradients import LATE, MISSING, Gradients
from bridge.engine.layers import (
    Arguments,
    Chain,
    Layer,
    Mark,
    chain_of,
    facts,
    loss_in,
    one_layer,
    parameter_facts,
)
from bridge.engine.learning_rate import weight_decay
from bridge.engine.loss_scale import LIMIT, LossScaler
from bridge.engine.messages import Messages
from bridge.engine.models.blocks import Blocks, Cut
from bridge.engine.models.cutting import is_hugging_face
from bridge.engine.models.splitting import prove_split, tensor_plan
from bridge.engine.optimizer import (
    Make,
    ParameterGroupSettings,
    ShardOptimizer,
    clip_factor,
    rate_of_update,
    setting,
    sum_of_squares,
)
from bridge.engine.sequence import attach
from bridge.engine.stage import Draw, Stage, differentiable, recompute_parts
from bridge.engine.tensor_parallel import Conversion, Split, join_split
from bridge.engine.timers import UPDATE, Timers
from bridge.engine.training_state import Progress
from bridge.engine.weights import EXPORT, Weights
from bridge.errors import BridgeError, ConfigError
from bridge.layout.levels import find_dearer_level
from bridge.layout.pipeline import Pipeline, by_names, text_of
from bridge.layout.recompute import chunks_by_stage
from bridge.layout.schedule import ActionKind, program_rows, trim_backward
from bridge.layout.shard import Flat, Layout, Parameter, holders_of, on_rank
from bridge.layout.step import Step
from bridge.layout.tensor import Site, TensorPlan
from bridge.layout.traffic import AGREE, Traffic, sites_within
from bridge.plan.plan import Plan
from bridge.stack.findings import Finding
from bridge.trace.source import Moment
from bridge.trace.tracer import Tracer

Loss = Callable[[Any, Any], Tensor | tuple[Tensor, Tensor | int]]
"""Type of a loss function. It takes the model's output and the targets. It returns the mean loss of
a microbatch, or the sum of losses and the count by which the sum is divided.
"""


INITIAL = "initial weights"
NOTHING = Arguments((), {})


class DataEnded(BridgeError):
    """Raised when the data of a rank ended within a step. All ranks have ended the step without an
    update.
    """


@dataclass(eq=False)
class Turn:
    """A forward pass that waits for backward: its number, its number of samples, and the weight of
    its loss in the mean. `reached` is set when a gradient has arrived.
    """

    number: int
    rows: int = 0
    weight: Tensor | float = 1.0
    reached: bool = False

    def watch(self, output: Any) -> None:
        """Set `reached` as soon as a gradient of `output` arrives."""
        for tensor in differentiable(output):
            tensor.register_hook(self._reach)  # type: ignore[no-untyped-call]

    def _reach(self, gradient: Tensor) -> None:
        self.reached = True


MOST_WAITING = 16
"""Most forward passes in evaluation mode that wait for backward; an older one is forgotten."""


class Passes(NamedTuple):
    """The results of a step without an update: the loss of each microbatch, and the gradients by
    global name.
    """

    losses: list[Tensor]
    gradients: dict[str, Tensor]


class Engine:
    """Trains a model by a plan. Call `train_batch` once for each step, or `engine(...)` and
    `backward` for each microbatch, with `step` after each of them.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        comm: Comm,
        device: torch.device,
        loss_fn: Loss | None = None,
        seed: int = 1234,
        findings: Iterable[Finding] = (),
        tensor_plan: TensorPlan | None = None,
        groups: Sequence[ParameterGroupSettings] = (),
        pipeline: Pipeline | None = None,
        variable_shapes: bool = False,
        cut: Cut | None = None,
        sample: Arguments | None = None,
        optimizer: Make | None = None,
    ) -> None:
        self._module, self.plan, self.comm, self.device = model, plan, comm, device
        self.loss_fn, self.seed = loss_fn, seed
        self.findings = (*findings, *recompute_parts(model, plan.recompute))
        self.data = comm.group("data")
        self.accumulation, self.tensor = accumulation_of(plan, self.data.size), comm.group("tensor")
        # The model is split before it is cut into layers: the layers have to hold the split
        # modules.
        marks, sites = _split(model, plan, comm, tensor_plan, sample)
        self.chain, self.line = chain_of_model(model, cut), comm.group("pipeline")
        self.pipeline = pipeline or pipeline_of(self.chain, plan, self.accumulation)
        layers = self.chain.layers
        self._names = [layer.name for layer in layers]
        weights, homes = dict(model.named_parameters()), self.pipeline.schedule.homes
        self.parameters = parameter_facts(weights, layers, self.pipeline.layers, marks)
        self.layout, local = self._layout(self.line.index), self.pipeline.local(self.line.index)
        costly = find_dearer_level(
            plan, self.layout, on_rank(self.parameters, homes, self.line.index)
        )
        self.findings = (*self.findings, costly) if costly else self.findings
        compute = TORCH[plan.precision.compute] if plan.precision.compute else None
        parameters = _parameters_to_keep(
            weights, on_rank(self.parameters, homes, self.line.index), compute
        )
        self._trained = [
            (name, weight, weight.requires_grad) for name, weight in parameters.items()
        ]
        self.weights = Weights(self.layout, parameters, comm, device)
        holders = _holders(comm, self.parameters, homes)
        self.gradients = Gradients(self.layout, parameters, comm, device, holders)
        self.gradients.holds = self.weights.residency.holds
        self.scattered = tuple(site.name for site in sites if site.kind == "scatter")
        self.gathered = tuple(site.name for site in sites if site.kind == "gather")
        self._parts = chunks_by_stage(plan.recompute, self.pipeline.layers)
        self.sites = sites_within(
            sites, (self._names[layer] for stage in local for layer in self.pipeline.layers[stage])
        )
        stages = {
            stage: Stage(layers, self._parts[stage], device, self.tensor.size == 1)
            for stage in local
        }
        self.timers = Timers.of(plan, comm.rank, device)
        self.executor = _executor(self, stages, variable_shapes)
        self.optimizer = ShardOptimizer(
            plan.optimizer, self.weights.masters(), self.weights.pieces(), groups, optimizer
        )
        self.scaler, self.progress = LossScaler.of(plan), Progress()
        self.say: Callable[[str], None] = _warn
        self.casts, self.draws_as_torch, self.takes_more = True, False, False
        """Whether floating-point inputs are cast to the compute format, layers draw from torch's
        generators as they are, and more passes may follow the last microbatch of a step.
        """
        # In fp16, losses are divided by their number before backward and not after it: the sum over
        # microbatches could overflow.
        self._share = 1 / self.accumulation if plan.precision.compute == "fp16" else 1.0
        self._feed = Feed(self._enter, self._leave, self._root, self._draw, self._receive_input)
        self._idle()
        self.tracer: Tracer | None = None
        """The tracer that logs this engine's tensors, if there is one."""
        self._totals = torch.zeros(2, dtype=torch.float64, device=device)
        self._board, self._shares = board(), 0
        self._named = dict(model.named_parameters())
        self._ended: list[str] = []
        self.closing: list[Callable[[str], None]] = []
        """Called when the engine ends, with the name of a parameter that another engine takes, or
        with an empty text.
        """

    def _idle(self) -> None:
        """Set the state that holds before the first step: no data, and no forward pass that waits
        for backward.
        """
        self._source: Iterator[Any] = iter(())
        self._fed: list[Arguments] = []
        self._last: Arguments | None = None
        self._short: int | None = None
        self._ends: dict[int, tuple[Any, Tensor | float]] = {}
        self._losses: dict[int, tuple[Tensor, Tensor | float]] = {}
        self._turns: list[Turn] = []
        self._has_trained = False
        """Whether a pass has run in training mode."""
        self._backward_seen = self._handed = False
        self._micro = self._rows = self._number = self._calls = 0
        self.unit = 1.0
        self._given: Any = None
        self.without_gradient = frozenset[str]()
        self.skips_allowed, self._in_vain = LIMIT, 0
        self.watchers: dict[Moment, list[Callable[[], None]]] = {
            "reduced": [],
            "updated": [],
            "ended": [],
        }

    @property
    def model(self) -> nn.Module:
        """The model. Between steps under ZeRO 3, parameters that share a buffer with another stage
        have undefined values.
        """
        return self._module

    @property
    def current_step(self) -> int:
        """Number of the current step, from 1. Skipped steps count."""
        return self.progress.steps + self.progress.skipped + 1

    @property
    def place(self) -> int:
        """The index of the current microbatch in this step, counted over all data ranks."""
        # In the order in which the data is dealt out: the first microbatch of each rank, then the
        # second of each.
        return self.executor.microbatch * self.data.size + self.data.index

    @property
    def batch(self) -> Any:
        """Inputs and targets of the current microbatch, on every pipeline rank."""
        return self._microbatch(self.executor.microbatch) if self._given is None else self._given

    @property
    def gradient_unit(self) -> float:
        """The factor that turns reduced gradients of weights into gradients of the mean loss. The
        factor for gradients of activations is `unit`.
        """
        # Only reduced gradients were multiplied with the share of a data rank.
        return 1.0 if self._handed else self.unit / self.gradients.share

    @property
    def module(self) -> nn.Module:
        """The model. Parameters with a buffer of their own are whole. All others are whole only
        while their stage runs, and parameters of other pipeline ranks are empty.
        """
        self.weights.settle()
        return self._module

    def train(self, mode: bool = True) -> Engine:
        """Set training mode."""
        # Setting it anew in every module takes longer than asking all of them.
        if not _in_mode(self._module, mode):
            self._module.train(mode)
        return self

    def eval(self) -> Engine:
        """Set evaluation mode. `engine(...)` stores nothing for backward within `torch.no_grad()`, and
        in a pipeline.
        """
        return self.train(False)

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run one microbatch forward.

        With a loss function, the last input are the targets, and the loss is returned. Without one,
        the output of the model is returned. Only a model that is a single layer takes `kwargs`
        inputs.
        """
        arguments = Arguments(inputs, kwargs)
        # As in torch, evaluation mode alone switches no graph off: a script may train in it and in no
        # other mode. After a pass in training mode it evaluates, and after the last backward pass of a
        # step, gradients can only go to what the script put in front.
        passes = torch.is_grad_enabled() and self.executor.joined
        self._has_trained |= self._module.training
        if self._has_trained or (self.is_gradient_accumulation_boundary() and not self._goes_on):
            passes = passes and bool(differentiable(arguments))
        if not self._module.training and len(self._turns) >= MOST_WAITING:
            # Nothing will go back through most of them: their graphs would fill the memory.
            self.executor.forget(self._turns.pop(0).number)
        return (self._train_pass if self._module.training or passes else self._eval_pass)(arguments)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> Tensor:
        """Run backward for one microbatch. `loss` is computed from the results of one or several
        calls of `engine(...)`. Gradients are accumulated, and reduced where no later microbatch
        adds to them. If the engine `takes_more`, and the script has whole gradients, more backward
        passes may follow before `step`, and add to them.
        """
        if retain_graph and (self.weights.in_turns or not self.executor.joined):
            raise BridgeError(
                "backward: found retain_graph=True, but not all weights are whole here for a second pass;"
                " add the losses up and call backward once, or use zero.stage 2 on data ranks alone"
            )
        if self._goes_on:
            self._backward_again(loss, retain_graph)
            return loss
        self._refuse_more("backward")
        weight = self._weight()
        self._backward_seen = True
        self._losses[self._micro] = loss.detach(), weight
        root = self._scale_loss(loss, weight)
        turns = {turn.number: turn for turn in self._turns}
        for turn in self._turns:
            turn.reached = False  # by a backward pass of the script, such as that of a penalty

        def turn_has_come(number: int) -> bool:
            # Without a gradient at any output, nothing tells the passes apart: all are over then.
            reached = turns[number].reached or not any(turn.reached for turn in turns.values())
            return reached and not retain_graph

        self.gradients.show()
        self.executor.seek(self._micro, backward=True)
        feed = replace(
            self._feed, root=lambda microbatch: root, reached=turn_has_come, retains=retain_graph
        )
        self.executor.run(feed, stop=lambda action: action.kind is ActionKind.FORWARD)
        self.executor.carry(self._micro)
        self._rows += sum(turn.rows for turn in self._turns if turn_has_come(turn.number))
        self._turns = [turn for turn in self._turns if not turn_has_come(turn.number)]
        self._micro, self._calls = self._micro + 1, 0
        last = self.is_gradient_accumulation_boundary()
        if last and not self._by_token():
            self._hand_over()
        elif self.executor.joined and (self.plan.zero.effective_stage or 0) < 2:
            (self.gradients.withhold if last else self.gradients.hide)()
        return loss

    @property
    def _goes_on(self) -> bool:
        """Whether more passes may add to the gradients of a step whose microbatches have all run: those
        of parameters, which the script has whole.
        """
        return self.takes_more and self._handed and not self.gradients.gathered

    def _backward_again(self, loss: Tensor, retain_graph: bool) -> None:
        """Add the gradients of another loss, which data ranks reduce before the update."""
        before, weight = self._losses[self._micro - 1]
        self._losses[self._micro - 1] = before + loss.detach(), weight
        if self.data.size > 1:
            self.gradients.take_back()
        torch.autograd.backward([self._scale_loss(loss, weight)], retain_graph=retain_graph)

    def drop(self) -> bool:
        """Forget the only microbatch of a step before its update, and return whether that is possible."""
        drops = self._goes_on and self.accumulation == self.data.size == 1
        if drops:
            self.gradients.forget()
            self._clear()
        return drops

    def _by_token(self) -> bool:
        return self.plan.loss == "per_token"

    @property
    def mean_unit(self) -> float:
        """The factor that turns reduced gradients into those of the mean loss over all microbatches and
        data ranks, before the update of a step.
        """
        return 1.0 if self._handed else self._factor

    @property
    def _factor(self) -> float:
        number = self.accumulation * self.data.size
        return 1 / (number * self.scaler.scale * self._share * self.gradients.share)

    def _hand_over(self) -> None:
        """Make whole gradients those of the parameters, so that the script can read and change them."""
        if not self.executor.joined:
            return
        flats = self.gradients.flats.values()
        exact = all(flat.reduce == flat.dtype and flat.reduce in ("fp32", "fp64") for flat in flats)
        exact = exact and self.scaler.scale == 1
        if exact and not any(flat.sharded for flat in flats):
            self.gradients.finish()
            for index in self.gradients.late() if self.data.size == 1 else ():
                self.gradients.add_late(index, 1.0)
            self.gradients.hand_over(self.mean_unit)
            self._handed = True
        else:
            alike = exact and all(flat.shards in (1, self.data.size) for flat in flats)
            self.gradients.withhold(self._share_gradients if alike else None)

    def _share_gradients(self) -> bool:
        """Give the script the gradients whole if all ranks ask for them, and return whether they do."""
        self._shares += 1
        assert self._board is not None, "a single rank has no slices"
        if self._board.meet(f"gradients {self._shares}"):
            self.gradients.hand_over(self.mean_unit)
            self._handed = True
        return self._handed

    def take_gradients_back(self) -> None:
        """Take the gradients that the script has, so that slices can be read and changed."""
        if self.gradients.gathered:
            self.gradients.take_back()
            self._hand_over()

    def step(self) -> bool:
        """Update the weights if all microbatches of the step have run, and do nothing otherwise.
        Return whether weights changed.
        """
        self.count_by_hand()
        if not self.is_gradient_accumulation_boundary():
            return False
        squares, loss, weight = self._wait_for_reduction()
        # The sum is that of all ranks, so that all of them skip a step or none does.
        updates = math.isfinite(squares)
        self._note(squares, loss, weight, updates)
        if updates:
            with self.timers.part(UPDATE) if self.timers else nullcontext():
                self._update()
        self._tell("updated")
        if self.timers:
            self.timers.end(self.current_step)
        self._tell("ended")
        # Before the scaler's update: whether a smaller scale can help is asked of the scale that
        # the step ran with.
        self._judge(updates, loss)
        self.scaler.update(overflow=not updates)
        self._begin(updates)
        return updates

    def count_by_hand(self) -> None:
        """Count a microbatch for which the script called `loss.backward()` itself: there are gradients,
        and `backward` was not called since the last call of `step`.
        """
        had_backward, self._backward_seen = self._backward_seen, False
        if had_backward or self.is_gradient_accumulation_boundary() or not self.gradients.late():
            return
        if self.scaler.scale != 1:
            raise BridgeError(
                "step: found gradients of loss.backward(), in which the loss scale is missing; call"
                " engine.backward(loss)"
            )
        turns = [turn for turn in self._turns if turn.reached]
        self._losses[self._micro] = self._totals.new_full((), math.nan), 1.0
        self._rows += sum(turn.rows for turn in turns)
        self._turns = [turn for turn in self._turns if not turn.reached]
        self._micro, self._calls = self._micro + 1, 0

    def last(self) -> None:
        """End the step early, with the next microbatch that runs backward. Microbatches that did
        not run count in the mean with a loss of 0.
        """
        self._refuse_parts()
        self._refuse_more("last")
        for number in range(self._micro, self.accumulation - 1):
            self._losses[number] = self._totals.new_zeros(()), 1.0
            self.executor.carry(number)
        self._micro = self.accumulation - 1

    def divide_early(self) -> None:
        """Divide losses by the number of microbatches before backward, instead of dividing
        gradients after it. This is needed if hooks of the user read gradients during backward.
        """
        self._share = 1 / self.accumulation

    @property
    def microbatch(self) -> int:
        """Number of microbatches that have run backward in this step."""
        return self._micro

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether all microbatches of the step have run backward."""
        return self._micro == self.accumulation

    def train_batch(self, batches: Iterable[Any] | Iterator[Any]) -> float:
        """Run one step with the next `accumulation` elements of `batches`, and return the mean loss
        over all ranks. An element is a pair (inputs, targets), or a mapping of named inputs.

        Without a loss function, the model must return the loss, or an object with the attribute
        `loss`. With a loss function, a mapping is also passed to this function as the targets.
        """
        self.train()
        self._has_trained = True
        self._pass(batches)
        self.step()
        return self.progress.loss

    def gradients_of(self, batches: Iterable[Any]) -> Passes:
        """Run one step forward and backward over `batches`, as in `train_batch`, but without an
        update.

        Returns the losses of this rank's microbatches, if the rank has the last stage. Also returns
        the gradients of the mean loss over all ranks, by global name, for this rank's parameters.
        Modules stay in their mode. Raises `BridgeError` if weights are sharded, or are casts of
        master weights.
        """
        if any(flat.sharded or not flat.master_is_weight for flat in self.gradients.flats.values()):
            raise BridgeError(
                "gradients_of: found weights that are sharded or cast from masters;"
                " use zero.stage 0 and the same number format for weights and masters, or call train_batch"
            )
        self._pass(batches)
        squares, loss, weight = self._wait_for_reduction()
        self._note(squares, loss, weight, True)
        losses = [value for _, (value, _) in sorted(self._losses.items())]
        gradients = {
            slot.parameter.name: whole[slot.start : slot.stop].view(slot.parameter.shape)
            * self.gradient_unit
            for flat, whole in self.gradients.parts()
            for slot in flat.slots
        }
        self._tell("ended")
        self._begin(True)
        return Passes(losses, gradients)

    def _pass(self, batches: Iterable[Any]) -> None:
        """Run the microbatches of a step that have not run yet, forward and backward."""
        self._source, self._given = iter(fitting(batches, self.accumulation - self._micro)), None
        # Microbatches that `engine(...)` ran have their samples counted already.
        self._fed += [NOTHING] * (self._micro - len(self._fed))
        self.executor.run(self._feed)
        # A rank in the middle of a pipeline asks for no inputs. It takes its microbatches anyway,
        # as it counts samples too.
        self._microbatch(self.accumulation - 1)
        self._micro = self.accumulation

    @torch.no_grad()
    def eval_batch(self, batch: Any) -> Any:
        """Return the loss of one batch on this rank, or the output if there is no loss function.
        The state of random generators and the counts of training stay as they are.

        All pipeline ranks must take part, and each of them gets the loss. An output is returned
        only on the rank that has the last stage.
        """
        training = self._module.training
        self.eval()
        try:
            return self._eval_pass(_as_arguments(batch))
        finally:
            self.train(training)

    def state_dict(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every parameter whole, by global name, in the format of the master weights. Only
        one flat is whole at a time. All ranks must take part.
        """
        for rank in range(self.line.size):
            for flat, whole in self._flats_of(rank):
                self.comm.broadcast(EXPORT, whole, self.line, rank)()
                for slot in flat.slots:
                    local = whole[slot.start : slot.stop].view(slot.parameter.shape)
                    split = slot.parameter.split is not None
                    yield (
                        slot.parameter.name,
                        join_split(self.comm, EXPORT, local, slot.parameter) if split else local,
                    )

    def _flats_of(self, rank: int) -> Iterator[tuple[Flat, Tensor]]:
        """Yield each flat of pipeline rank `rank`, with a buffer that has the whole values on that
        rank and is empty on all others. A flat that several ranks hold is yielded only for the
        first of them.
        """
        mine = rank == self.line.index
        layout = self.layout if mine else self._layout(rank)
        for index, flat in enumerate(layout.flats):
            if not flat.replicas or flat.replicas[0] == rank:
                if mine:
                    yield flat, self.weights.whole_master(index)
                else:
                    yield (
                        flat,
                        torch.empty(flat.padded, dtype=TORCH[flat.master], device=self.device),
                    )

    def _layout(self, rank: int) -> Layout:
        """Return the layout of the flats of pipeline rank `rank`."""
        own = on_rank(self.parameters, self.pipeline.schedule.homes, rank)
        return Layout.of(self.plan, own, len(self.pipeline.local(rank)), self.data.size)

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
    ) -> Path:
        """Write a checkpoint into `save_dir`/`tag`, with everything that a run needs to resume
        (`checkpoint.save`). All ranks must take part.
        """
        from bridge.engine import checkpoint

        with announce_operation("save checkpoint"):
            return checkpoint.save(self, Path(save_dir), tag, client_state or {}, save_latest)

    def load_checkpoint(
        self, load_dir: str | Path, tag: str | None = None, load_optimizer_states: bool = True
    ) -> tuple[Path, dict[str, Any]]:
        """Continue from the checkpoint `load_dir`/`tag`, or from the latest one, whatever the
        layout was. Return its path and the client's state.
        """
        from bridge.engine import checkpoint

        with announce_operation("load checkpoint"):
            return checkpoint.load(self, Path(load_dir), tag, load_optimizer_states)

    def close(self) -> None:
        """Remove the hooks, wait for unfinished gathers and for all ranks, and then leave the process
        group.
        """
        self.end("after close()")
        leave()

    def end(self, when: str, successor: str = "") -> None:
        """Remove the engine's hooks from the model, which the engine does not run any more. `when`
        says for later calls when it ended.
        """
        self.weights.settle()
        for call in self.closing:
            call(successor)
        self.closing.clear()
        self.gradients.unhook()
        self._ended = [f"engine(...): called {when}; create a new engine with the model"]

    def release(self, successor: str) -> None:
        """End the engine, and make its parameters whole, each in the compute format and in memory of
        its own. `successor` names one that another engine takes. All data ranks must take part.
        """
        if self.line.size * self.tensor.size > 1:
            raise ConfigError(
                f"model: {successor} belongs to an engine whose tensor or pipeline ranks hold parts of the"
                " model; build the model anew, and load a checkpoint of the engine"
            )
        self.end("after its model was given to another engine", successor)
        for index, flat in enumerate(self.layout.flats):
            # Weights with a buffer of their own are whole here: only others need the other ranks.
            away = self.weights.takes_turns(index)
            whole = self.weights.whole_master(index) if away else self.weights.whole(flat)
            for slot in flat.slots:
                parameter = self.gradients.parameters[slot.parameter.name]
                change(parameter, None)
                weight = whole[slot.start : slot.stop].view(slot.parameter.shape)
                parameter.data = weight.to(TORCH[flat.dtype], copy=True)

    def _follow_changes(self) -> None:
        """Run the model as one layer from now on, if a part of it or a hook has changed since it was divided into
        layers. A parameter that was removed gets no gradient, and stays as it is. Raises `BridgeError` if this is
        not possible, and if a parameter is another one.
        """
        BridgeError.raise_if(self._ended)
        self.weights.take_over()
        now = dict(self._module.named_parameters())
        whole = self.executor.joined and self.tensor.size == 1 and not self.weights.in_turns
        BridgeError.raise_if(
            f"{name}: this parameter was replaced, added or removed after the engine was created,"
            " which therefore would not train it; create a new engine with the model"
            for name in dict.fromkeys((*self._named, *now))
            if self._named.get(name) is not now.get(name)
            and (name in now or self.tracer or not whole)
        )
        changes = list(self.chain.changed())
        if changes and (self.tracer or not whole):
            raise BridgeError(
                f"{changes[0]}, which run without this change; make the change before initialize, or use"
                " zero.stage 2 on data ranks alone"
            )
        if changes:
            self.say(f"{changes[0]}; from now on it runs as one layer, which needs more memory")
            rest = (Layer(name, nn.Identity(), nn.Identity()) for name in self._names[1:])
            self.chain = Chain((one_layer(self._module), *rest), called=True)
            self.executor.stages = {
                stage: Stage(self.chain.layers, self._parts[stage], self.device)
                for stage in self.executor.stages
            }

    def bytes(self) -> dict[str, int]:
        """Return the number of bytes that this rank stores between steps, for each of weights,
        gradients, master and moments.
        """
        kinds = {
            "weights": self.weights.local_buffers(),
            "gradients": self.gradients.tensors(),
            "master": self.weights.masters_apart(),
            "moments": self.optimizer.tensors(),
        }
        return {
            kind: sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            for kind, tensors in kinds.items()
        }

    def traffic(self, tokens: int) -> dict[str, Traffic]:
        """Return the collectives that this rank should call in a step, by name, if a microbatch has
        `tokens` tokens.
        """
        rank, row, sequence = self.line.index, self.executor.row, bool(self.plan.parallel.sequence)
        step = Step(
            rank, self.layout, self.pipeline, row, self._parts, self._names, self.sites, sequence
        )
        return step.traffic(
            self.executor.messages.sizes(tokens), self.comm.world.size, self.data.index
        )

    def _next(self, source: Iterator[Any]) -> Arguments:
        """Return the next microbatch of `source`. If there is none, return the last one again,
        because other ranks wait for this rank in the collectives of the step. All ranks then stop
        together at the end of the step.
        """
        try:
            self._last = _as_arguments(next(source))
        except StopIteration:
            if self._last is None:
                raise DataEnded(self._data_end_message(len(self._fed))) from None
            self.lack(len(self._fed))
        return self._last

    def lack(self, number: int | None = None) -> None:
        """Record that this rank has data for only `number` microbatches of the step (default: for
        those that have run). At the end of the step, all ranks raise `DataEnded`.
        """
        if self._short is None:
            self._short = self._micro if number is None else number

    def _refuse_more(self, what: str) -> None:
        if self.is_gradient_accumulation_boundary():
            raise BridgeError(
                f"{what}: all {self.accumulation} microbatches of this step have run; call engine.step(),"
                " or set batch.accumulation to a larger number"
            )

    def _refuse_moved(self) -> None:
        """Raise an error if a parameter that was frozen trains now, as buffers and master weights are laid out
        only once. One that is frozen later gets no gradient, and stays as it is, but in a pipeline, whose ranks
        would wait for its gradients.
        """
        for name, weight, trains in self._trained:
            if weight.requires_grad != trains and not (trains and self.executor.joined):
                raise BridgeError(
                    f"{name}: requires_grad is {weight.requires_grad}, but was {trains} when the engine was created; save a"
                    " checkpoint, create a new engine, and load the checkpoint there"
                )

    def _refuse_parts(self) -> None:
        """Raise an error unless the schedule is depth first. In other schedules, microbatches do
        not run one after the other.
        """
        if self.pipeline.schedule.name != "depth_first":
            raise BridgeError(
                f"engine(...): the schedule {self.pipeline.schedule.name} mixes the microbatches of a step; call"
                " engine.train_batch(batches) instead"
            )

    def _weight(self) -> Tensor | float:
        """Return the weight in the mean loss of the forward passes that wait for backward."""
        if not self._turns:
            raise BridgeError(
                "backward: no forward pass waits for backward; call engine(...) first, outside of"
                " torch.no_grad()"
            )
        if len(self._turns) > 1 and self._by_token():
            raise BridgeError(
                f"backward: {len(self._turns)} forward passes wait for backward, but with plan.loss per_token only one"
                " may; call backward after each forward pass, and eval_batch for losses without backward"
            )
        return self._turns[0].weight

    # Called by the executor in the course of a step

    def _microbatch(self, microbatch: int) -> Arguments:
        """Return the inputs and targets of a microbatch. The first call reads them from the data."""
        while len(self._fed) <= microbatch:
            self._fed.append(self._next(self._source))
        return self._fed[microbatch]

    def _drop(self, code: float) -> None:
        """End the step on all ranks without an update, because some ranks have no data. `code` is
        a sum over the ranks without data: each of them adds its own rank number plus the number of
        all ranks.
        """
        world, short, step = self.comm.world.size, self._short, self.current_step
        self._clear()
        if short is not None:
            raise DataEnded(self._data_end_message(short))
        # Each such rank adds between world and 2 * world - 1, so that a sum below 2 * world names a
        # single rank.
        who = f"rank {int(code) - world}" if code < 2 * world else "several ranks"
        raise DataEnded(
            f"step {step}: the data of {who} ended, so no rank updated its weights;"
            " give all ranks the same amount of data"
        )

    def _data_end_message(self, number: int) -> str:
        return f"train_batch: data ended after {number} microbatches of a step, expected {self.accumulation}; give more data"

    def _enter(self, microbatch: int) -> Any:
        self._follow_changes()
        return self._cast(self._inputs(self._microbatch(microbatch)))

    def _receive_input(self, microbatch: int, tensors: Sequence[Tensor]) -> Any:
        """Return the input of a stage, made of `tensors` from another rank and of the batch, which
        every pipeline rank has.
        """
        arguments = (
            self._cast(self._arguments(self._microbatch(microbatch)))
            if self.chain.called
            else NOTHING
        )
        return self.chain.received(tensors, arguments)

    def _leave(self, microbatch: int, output: Any) -> None:
        """Store the loss of a microbatch, from which backward will start. Without a loss function,
        `output` is the loss or has the attribute `loss`.
        """
        loss = (
            (loss_in(output), 1.0)
            if self.loss_fn is None
            else self._loss(output, _targets(self._microbatch(microbatch)))
        )
        self._ends[microbatch] = loss
        self._losses[microbatch] = loss[0].detach(), loss[1]

    def _root(self, microbatch: int) -> Tensor:
        loss, weight = self._ends.pop(microbatch)
        self._micro += 1
        return self._scale_loss(loss, weight)

    def _scale_loss(self, loss: Tensor, weight: Tensor | float) -> Tensor:
        """Return the tensor from which the backward of a microbatch starts: the loss times the
        weight in the mean, the data rank's share, and the loss scale.
        """
        if self._share == self.scaler.scale == 1:
            return loss * weight
        # The product is made in fp32: a scale of 2**16 alone is more than the largest number of
        # fp16, 65504.
        return (
            (loss.float() if loss.dtype == torch.float16 else loss)
            * (weight * self._share)
            * self.scaler.scale
        )

    def _draw(self, microbatch: int) -> Draw:
        """Return the numbers on which the random numbers of a microbatch depend. The microbatch is
        counted over all data ranks of this step.
        """
        place = microbatch * self.data.size + self.data.index
        return Draw(None if self.draws_as_torch else self.seed, self.current_step - 1, place)

    def _train_pass(self, batch: Arguments) -> Any:
        self._refuse_parts()
        self._follow_changes()
        value = self._cast(self._inputs(batch))
        if self._goes_on:
            self._calls += 1
            draw = self._draw(self._micro + self._calls)
            for stage in sorted(self.executor.stages):
                value = self.executor.stages[stage].forward(value, draw)
            return value if self.loss_fn is None else self._loss(value, _targets(batch))[0]
        self._refuse_more("engine(...)")
        self._given = batch
        self._number += 1
        turn, draw = (
            Turn(self._number, _rows(value)),
            replace(self._draw(self._micro), turn=self._calls),
        )
        self._calls += 1
        results: list[Any] = []

        def output(microbatch: int, value: Any) -> None:
            turn.watch(value)
            loss, turn.weight = (
                (value, 1.0) if self.loss_fn is None else self._loss(value, _targets(batch))
            )
            results.append(loss)

        self.executor.seek(self._micro, backward=False)
        feed = replace(
            self._feed, inputs=lambda _: value, output=output, draw=lambda _: draw, turn=turn.number
        )
        try:
            self.executor.run(
                feed,
                stop=lambda action: (
                    action.kind is not ActionKind.FORWARD or action.microbatch != self._micro
                ),
            )
        except BaseException:  # a notebook goes on after an error, and after an interruption
            self.executor.forget(turn.number)
            self._calls -= 1
            raise
        if torch.is_grad_enabled():
            self._turns.append(turn)
        return results[0]

    def _eval_pass(self, batch: Arguments) -> Any:
        def output(value: Any) -> Any:
            return value if self.loss_fn is None else self._loss(value, _targets(batch))[0]

        def receive_input(tensors: Sequence[Tensor]) -> Any:
            return self.chain.received(
                tensors, self._cast(self._arguments(batch)) if self.chain.called else NOTHING
            )

        self._follow_changes()
        with torch.no_grad():
            value = self._cast(self._inputs(batch)) if 0 in self.executor.stages else None
            result = self.executor.evaluate(value, output, receive_input)
        if self.line.size == 1 or self.loss_fn is None:
            return result
        loss = (
            torch.zeros((), dtype=torch.float64, device=self.device)
            if result is None
            else result.double()
        )
        self.comm.all_reduce("evaluation loss", loss, self.line)()
        return loss

    def _arguments(self, batch: Arguments) -> Arguments:
        """Return the arguments of the model in a batch: everything except the targets."""
        arguments = arguments_of(batch, self.loss_fn is not None)
        if not (arguments.given or arguments.named):
            raise BridgeError(
                "engine(...): found no inputs besides the targets, expected inputs and targets; "
                "pass both"
            )
        return arguments

    def _inputs(self, batch: Arguments) -> Any:
        """Return the input of the first layer. A list of layers gets a single input as it is, and
        several inputs as a tuple.
        """
        arguments = self._arguments(batch)
        if self.chain.called:
            return arguments
        BridgeError.raise_if(
            f"engine({name}=...): a model that is a list of layers takes no named inputs; pass them in order"
            for name in batch.named
        )
        return arguments.given[0] if len(arguments.given) == 1 else arguments.given

    def _cast(self, inputs: Any) -> Any:
        compute = self.plan.precision.compute if self.casts else None

        def cast(tensor: Tensor) -> Tensor:
            dtype = TORCH[compute] if compute and tensor.is_floating_point() else tensor.dtype
            return tensor.to(self.device, dtype)

        leaves, form = tree_flatten(inputs)
        casts = [cast(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        # What needs no cast stays the same object: the model may write into a list that it gets.
        return inputs if all(map(is_, casts, leaves)) else tree_unflatten(casts, form)

    def _loss(self, output: Any, targets: Any) -> tuple[Tensor, Tensor | float]:
        """Return the mean loss of a microbatch and its weight in the mean over all microbatches:
        the number of tokens if the plan's loss is per token, else 1.
        """
        assert self.loss_fn is not None
        result = self.loss_fn(
            output, tree_map_only(Tensor, lambda tensor: tensor.to(self.device), targets)
        )
        per_token = self._by_token()
        if isinstance(result, tuple):
            count = torch.as_tensor(result[1], dtype=torch.float64, device=self.device)
            # A microbatch without a single token that counts has a sum of 0, and a weight of 0.
            return result[0] / count.clamp(min=1).to(result[0].dtype), count if per_token else 1.0
        if per_token:
            raise BridgeError(
                "loss_fn: returned a mean, but plan.loss is per_token; return the sum of losses and the number of tokens"
            )
        return result, 1.0

    def _wait_for_reduction(self) -> tuple[float, float, float]:
        """Wait until gradients are reduced. Return three sums over all ranks: of squared gradients,
        of losses times their weights, and of these weights.
        """
        self._refuse_moved()
        self.weights.take_over()
        self.weights.refuse_rewritten()
        self.gradients.take_back()
        self.gradients.finish()
        squares, loss, weight, end, late, missing = self._agree()
        if late:
            self._add_late()
            squares, *_ = self._agree()
        self.without_gradient = self._without_gradient() if missing else frozenset()
        self._tell("reduced")
        if end:
            self._drop(end)
        return squares, loss, weight

    def _add_late(self) -> None:
        """Add the gradients that came too late for their buffers, of flats of which any rank has some."""
        if self.tensor.size * self.line.size > 1:
            raise BridgeError(
                "step: found gradients of weights outside of their layers, which tensor and pipeline ranks"
                " cannot add; use data ranks alone"
            )
        flags = self._totals.new_zeros(len(self.layout.flats))
        flags[self.gradients.late()] = 1
        self.comm.all_reduce(LATE, flags, self.data)()
        for index in flags.nonzero().flatten().tolist():
            self.gradients.add_late(index, self._factor if self._handed else 1.0)

    def _without_gradient(self) -> frozenset[str]:
        """Return the names of the parameters of this rank that got no gradient from any data rank."""
        names = [
            slot.parameter.name for flat in self.gradients.flats.values() for slot in flat.slots
        ]
        mine = set(self.gradients.missing())
        flags = self._totals.new_tensor([float(name not in mine) for name in names])
        self.comm.all_reduce(MISSING, flags, self.data)()
        return frozenset(
            name for name, ranks in zip(names, flags.tolist(), strict=True) if not ranks
        )

    def _agree(self) -> tuple[float, ...]:
        """Return six sums over all ranks: of squared gradients, of losses times their weights, of
        these weights, of marks of ranks whose data ended, of ranks with late gradients, and of ranks
        on which a parameter got no gradient.
        """
        self._totals.zero_()
        for loss, weight in self._losses.values():
            self._totals[0] += loss.double() * weight
            self._totals[1] += weight
        own = [
            part
            for flat, shard in self.gradients.parts()
            for part in self._slice_for_norm(flat, shard)
        ]
        squares = sum_of_squares(own) if own else self._totals.new_zeros(())
        # Tensor ranks have the same losses, so that only the first of them adds its own. All four
        # numbers go in one collective.
        totals = self._totals if self.tensor.index == 0 else torch.zeros_like(self._totals)
        mine = self.comm.rank + self.comm.world.size if self._short is not None else 0
        late, missing = float(bool(self.gradients.late())), float(bool(self.gradients.missing()))
        vector = torch.cat([squares.view(1), totals, totals.new_tensor([mine, late, missing])])
        self.comm.all_reduce(AGREE, vector, self.comm.world)()
        arrive()
        return tuple(vector.tolist())

    def _slice_for_norm(self, flat: Flat, shard: Tensor) -> Iterator[Tensor]:
        """Yield the part of this rank's slice that counts for the global norm. Over all ranks,
        every element of the model counts once.
        """
        if (not flat.sharded and self.data.index > 0) or not self.first_holder(flat):
            return
        # Beside the first tensor rank, the others add only the parameters that are split: they hold
        # the rest alike.
        place = flat.own(flat.split, self.data.index)
        part = shard if self.tensor.index == 0 else shard[place.start : place.stop]
        if len(part):
            yield part

    def first_holder(self, flat: Flat) -> bool:
        """Return whether this pipeline rank is the first of the ranks that hold `flat`."""
        return not flat.replicas or self.line.index == flat.replicas[0]

    def _note(self, squares: float, loss: float, weight: float, updates: bool) -> None:
        """Set the loss, the gradient norm and the learning rate of the step, and the factor `unit`
        of its gradients.
        """
        progress, divisor = self.progress, max(weight, 1.0)
        # Gradients are sums of weight * share * scale * gradient over microbatches and data ranks.
        # The mean divides by the sum of weights; share and scale are taken out again.
        self.unit = 1 / (divisor * self.scaler.scale * self._share)
        progress.loss = loss / divisor
        progress.grad_norm = math.sqrt(squares) * self.gradient_unit if updates else math.inf
        progress.lr = self.optimizer.lr(rate_of_update(self.plan, progress.steps))

    def _judge(self, updates: bool, loss: float) -> None:
        """Print why a step is skipped, unless the loss scale will become smaller and this can help.
        Raise an error after too many skipped steps in a row.
        """
        # A loss that is not finite comes from the forward pass, which the scale does not enter.
        helps = self.scaler.helps and math.isfinite(loss)
        self._in_vain = 0 if updates or helps else self._in_vain + 1
        if not self._in_vain:
            return
        message = f"step {self.current_step}: skipped, no weight changed: {self._reason(loss)}"
        if self._in_vain > self.skips_allowed or (self.scaler.final and not self.scaler.helps):
            raise BridgeError(
                f"{message}; {self._in_vain} steps in a row were skipped; check data, learning rate and formats"
            )
        own = [
            number for number, (value, _) in sorted(self._losses.items()) if not value.isfinite()
        ]
        if own or self.comm.rank == 0:
            mine = (
                f" (on rank {self.comm.rank}, in microbatch {', '.join(map(str, own))})"
                if own
                else ""
            )
            self.say(message + mine)

    def _reason(self, loss: float) -> str:
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        scale = (
            f" at loss scale {self.scaler.scale:g}" if self.plan.precision.compute == "fp16" else ""
        )
        return f"the loss is finite, but gradients are not{scale}"

    def _update(self) -> None:
        # The norm that is clipped is that of the gradients which the update sees.
        share = self.scaler.share
        factor = (
            self.gradient_unit
            * share
            * clip_factor(self.progress.grad_norm * share, setting(self.plan.optimizer, "clip"))
        )
        gradients = [part.to(TORCH[flat.master]) for flat, part in self.gradients.parts()]
        # In the master format: in bf16, an unscaled or clipped gradient would be rounded once more.
        if gradients:
            torch._foreach_mul_(gradients, factor)
        decay = weight_decay(self.plan.optimizer.decay_ramp, self.progress.steps)
        self.optimizer.step(gradients, self.progress.lr, decay, self.without_gradient)
        self.weights.refresh()

    def _begin(self, updates: bool) -> None:
        """Count the step that has ended, and prepare the next one."""
        self.progress.steps += updates
        self.progress.skipped += not updates
        fed = sum(_rows(self._inputs(batch)) for batch in self._fed if batch is not NOTHING)
        self.progress.samples += (self._rows + fed) * self.data.size
        self._clear()

    def _clear(self) -> None:
        """Delete everything that is kept only within a step."""
        HERE.step, self._short = self.current_step, None
        self.gradients.clear()
        self.weights.hide()
        self.executor.begin()
        self._totals.zero_()
        self._source = iter(())
        self._fed, self._turns, self._given = [], [], None
        self._ends, self._losses = {}, {}
        self._handed = False
        self._micro = self._rows = self._calls = 0

    def _tell(self, moment: Moment) -> None:
        for call in self.watchers[moment]:
            call()


def chain_of_model(model: nn.Module, cut: Cut | None) -> Chain:
    """Return the layers of a model: those of `cut`, or those that the model has itself if `cut` is
    None.
    """
    return chain_of(model) if cut is None else Blocks(model, cut).chain()


def pipeline_of(
    chain: Chain, plan: Plan, microbatches: int, parts: Sequence[Sequence[str]] | None = None
) -> Pipeline:
    """Return the pipeline of `plan` for the layers of a model. `parts` are the names of the modules
    in each stage, if they are given. Raises `ConfigError` if the layers do not fit the plan.
    """
    ranges = by_names(parts, [layer.name for layer in chain.layers]) if parts else None
    return Pipeline.of(plan, facts(chain), microbatches, text_of(plan), ranges)


def _executor(engine: Engine, stages: Mapping[int, Stage], variable: bool) -> Executor:
    """Return the executor for this rank's actions of the program. Backward actions of stages before
    the first trainable one are left out.
    """
    comm, schedule = engine.comm, engine.pipeline.schedule
    first = min(
        (parameter.stages[0] for parameter in engine.parameters if parameter.trainable),
        default=schedule.stages,
    )
    rows = [trim_backward(row, first) for row in program_rows(schedule)]
    overlap = engine.plan.schedule.overlap is not False
    messages = Messages(
        comm, rows, schedule.homes, schedule.microbatches, engine.device, variable, overlap
    )
    executor = Executor(
        schedule,
        rows[engine.line.index],
        stages,
        engine.layout,
        engine.weights,
        engine.gradients,
        messages,
    )
    if engine.timers:
        executor.timed = engine.timers.action
    return executor


def _parameters_to_keep(
    weights: Mapping[str, nn.Parameter], own: Iterable[Parameter], compute: torch.dtype | None
) -> dict[str, nn.Parameter]:
    """Return the parameters that this pipeline rank holds, and empty all others in place. An empty
    parameter has the format `compute`, because models create masks and positions in the format of
    their first parameter.
    """
    names = {parameter.name for parameter in own}
    for name, weight in weights.items():
        if name not in names:
            dtype = compute if compute and weight.is_floating_point() else weight.dtype
            weight.data = weight.data.new_empty(0, dtype=dtype)
    return {name: weight for name, weight in weights.items() if name in names}


def _holders(
    comm: Comm, parameters: Iterable[Parameter], homes: Sequence[int]
) -> dict[tuple[int, ...], Ranks]:
    """Return, for each tuple of pipeline ranks that hold the same parameter, their process group."""
    # Sorted, since all ranks have to make them in one order.
    holders = sorted({ranks for one in parameters if len(ranks := holders_of(one, homes)) > 1})
    return {ranks: comm.part("pipeline", ranks) for ranks in holders}


def _split(
    model: nn.Module, plan: Plan, comm: Comm, names: TensorPlan | None, sample: Arguments | None
) -> tuple[Mapping[int, Mark], list[Site]]:
    """Give all ranks the weights of the first rank, and then split the model over tensor ranks.
    Return how each parameter is split, and the sites at which tensor ranks exchange activations.
    """
    for weight in model.parameters():
        comm.broadcast(INITIAL, weight.data, comm.world)()
    group = comm.group("tensor")
    if group.size == 1:
        return {}, []
    names = names or _own_plan(model, plan, group.size)
    with prove_split(model, group.size, sample):
        conversion = Conversion(model, names, Split(comm, group, bool(plan.parallel.sequence)))
        expert_stacks.attach(conversion)
        if plan.parallel.sequence and names.tokens:
            attach(conversion)
    return conversion.marks, conversion.sites


def _own_plan(model: nn.Module, plan: Plan, ranks: int) -> TensorPlan:
    own: Callable[[int], TensorPlan] | None = getattr(model, "tensor_plan", None)
    if own is None and is_hugging_face(model):
        return tensor_plan(model, plan, ranks)
    if own is None:
        raise ConfigError(
            "parallel.tensor: this model does not say how to split it; pass `tensor_plan` to initialize"
        )
    return own(ranks)


def fitting(batches: Iterable[Any], number: int) -> Iterable[Any]:
    """Return `batches`. Raises an error if they are a list that is longer than a step. The rest of
    such a list would be lost, because the next call would begin with the first batches again.
    """
    if isinstance(batches, Sized) and len(batches) > number:
        raise BridgeError(
            f"train_batch: found {len(batches)} batches, expected {number}, as many as a step has;"
            " to train on all of them, pass the same iterator iter(batches) in every call"
        )
    return batches


def arguments_of(batch: Any, targets: bool) -> Arguments:
    """Return the arguments of a model in a batch. If `targets` is true, the targets are left out."""
    arguments = _as_arguments(batch)
    return Arguments(arguments.given[:-1], arguments.named) if targets else arguments


def _as_arguments(batch: Any) -> Arguments:
    """Return a batch as arguments of a model. The elements of a tuple are positional, and those of
    a mapping are named.
    """
    if isinstance(batch, Arguments):
        return batch
    return Arguments((), dict(batch)) if isinstance(batch, Mapping) else Arguments(tuple(batch), {})


def _targets(batch: Arguments) -> Any:
    """Return the targets in a batch: the last positional input, or all named inputs if there is no
    positional one.
    """
    return batch.given[-1] if batch.given else batch.named


def _in_mode(module: nn.Module, training: bool) -> bool:
    """Return whether a module and all modules in it are in training mode, or none is."""
    stack: list[nn.Module | None] = [module]
    while stack:
        one = stack.pop()
        if one is not None:
            if one.training is not training:
                return False
            stack.extend(one._modules.values())
    return True


def _warn(line: str) -> None:
    warnings.warn(line, stacklevel=2)


def _rows(inputs: Any) -> int:
    """Return the number of samples in a microbatch: the first dimension of its first tensor."""
    return next(
        (len(leaf) for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.dim()), 0
    )
