"""The executor: runs the actions of one rank in a pipeline program, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_leaves

from bridge.engine.comm import HERE
from bridge.engine.gradients import Gradients
from bridge.engine.halves import Halves
from bridge.engine.messages import Form, Forms, Messages
from bridge.engine.models.blocks import Stream
from bridge.engine.stage import Draw, Stage, detach_tensors, differentiable
from bridge.engine.weights import Weights
from bridge.errors import BridgeError
from bridge.layout.residency import reductions_by_stage
from bridge.layout.schedule import Action, ActionKind, Schedule
from bridge.layout.schedule.action import COMPUTE, WRITES, Row
from bridge.layout.shard import Layout
from bridge.layout.traffic import Visits, gather_ahead


@dataclass
class Pass:
    """One forward pass through a stage that still waits for its backward pass. `entered` are the
    inputs of the stage, and `roots` the edges of the autograd graph from which backward starts.
    Outputs are not stored, because backward does not need them. With `again`, the stage has no
    graph yet and must run forward once more. `turn` tells several passes of one microbatch apart.
    """

    entered: Any
    turn: int = 0
    roots: list[GradientEdge] = field(default_factory=list)
    forms: Forms = ()
    again: bool = False


@dataclass
class Feed:
    """Functions that the executor calls during a step.

    `inputs(microbatch)` returns the input of the first stage. `output(microbatch, value)` receives
    the output of the last stage, twice if the stage is recomputed. `root(microbatch)` returns the
    tensor from which backward starts. `draw(microbatch)` returns the seeds for random numbers.
    `received(microbatch, tensors)` makes the input of a stage from tensors of another rank, and
    returns this input. `turn` is the number of the current forward pass, and `reached(turn)`
    returns whether backward has reached that pass. With `retains`, backward leaves the graph for a
    further pass.
    """

    inputs: Callable[[int], Any]
    output: Callable[[int, Any], None]
    root: Callable[[int], Tensor]
    draw: Callable[[int], Draw]
    received: Callable[[int, Sequence[Tensor]], Any]
    turn: int = 0
    reached: Callable[[int], bool] = lambda turn: True
    retains: bool = False


class Executor:
    """Runs `row`, the actions of one rank, once in each step, and records each action in the ledger
    when it is done. `microbatch` is the current microbatch. `again` is true while a forward pass is
    recomputed. `peak` is the largest number of forward passes that waited for backward at the same
    time.
    """

    def __init__(
        self,
        schedule: Schedule,
        row: Row,
        stages: Mapping[int, Stage],
        layout: Layout,
        weights: Weights,
        gradients: Gradients,
        messages: Messages,
    ) -> None:
        self.schedule, self.row, self.stages = schedule, row, stages
        self.weights, self.gradients, self.messages = weights, gradients, messages
        self.note = messages.comm.ledger.note
        self.timed: Callable[[Action], AbstractContextManager[None]] = lambda action: nullcontext()
        self.local = {stage: place for place, stage in enumerate(sorted(stages))}
        self.last = schedule.stages - 1
        self.visits = Visits.of(row, self.local)
        self._window = gather_ahead(layout)
        self._due = reductions_by_stage(layout, self.visits.writers)
        # The last visit that writes gradients of a stage. What is due after it is reduced by an
        # action of its own.
        self._final = {place: writer for writer, place in enumerate(self.visits.writers)}
        self._apart = any(action.kind in (ActionKind.INPUT, ActionKind.AGAIN) for action in row)
        # One rank, and one microbatch after the other: the graph of a microbatch is whole, so that
        # whatever the script computes from it takes part in backward.
        self.joined = schedule.name == "depth_first" and schedule.ranks == 1
        self._trained = {action.stage for action in row if action.kind in WRITES}
        messages.returned = self._gradient_forms
        self.begin()

    def begin(self) -> None:
        """Start a step."""
        # Places in the row, and in the lists of visits that compute and that write gradients. They
        # advance together.
        self._place = self._visited = self._written = self.microbatch = 0
        self.peak, self.again = 0, False
        self._entered: int | None = None
        self._opened: Action | None = None
        self._ordered = False
        self.open: dict[tuple[int, int], list[Pass]] = {}
        self._values: dict[tuple[int, int], Any] = {}
        self._gradients: dict[tuple[int, int], list[list[Tensor | None]]] = {}
        self._halves: dict[tuple[int, int], Halves] = {}
        self.messages.begin()

    @property
    def is_over(self) -> bool:
        """Whether all actions of the step have run."""
        return self._place == len(self.row)

    def run(self, feed: Feed, stop: Callable[[Action], bool] = lambda action: False) -> None:
        """Run actions until all have run, or until `stop` returns true for the next action."""
        while not self.is_over and not stop(self.row[self._place]):
            action = self.row[self._place]
            self.microbatch, HERE.action = max(action.microbatch, 0), action
            with self.timed(action):
                _RUN[action.kind](self, action, feed)
            self._place += 1
        if self.is_over:
            self.messages.finish()

    def seek(self, microbatch: int, backward: bool) -> None:
        """Continue with the first forward or backward action of `microbatch`. Only for programs in
        which one microbatch runs after the other.
        """
        end = len(self.row), len(self.visits.path), len(self.visits.writers)
        self._place, self._visited, self._written = self._starts_of.get((microbatch, backward), end)

    @cached_property
    def _starts_of(self) -> Mapping[tuple[int, bool], tuple[int, int, int]]:
        starts: dict[tuple[int, bool], tuple[int, int, int]] = {}
        visits = writes = 0
        for place, action in enumerate(self.row):
            starts.setdefault(
                (action.microbatch, action.kind is not ActionKind.FORWARD), (place, visits, writes)
            )
            visits += action.kind in COMPUTE
            writes += action.kind in WRITES
        return starts

    def carry(self, microbatch: int) -> None:
        """Let the passes of `microbatch` that backward has not reached wait for the backward of the
        next microbatch.
        """
        for stage, number in [key for key in self.open if key[1] == microbatch]:
            waiting = self.open.pop((stage, number))
            self.open[stage, number + 1] = waiting + self.open.get((stage, number + 1), [])

    def forget(self, turn: int) -> None:
        """Forget a forward pass that ended with an error."""
        for key, passes in [*self.open.items()]:
            self.open[key] = [one for one in passes if one.turn != turn]
            if not self.open[key]:
                del self.open[key]
        self._values.clear()

    def evaluate(
        self, value: Any, output: Callable[[Any], Any], receive: Callable[[Sequence[Tensor]], Any]
    ) -> Any:
        """Run one microbatch forward through the stages of all ranks, without storing anything for
        backward. On the rank with the last stage, return `output(value)` for the value that the
        stage computes, and None on all other ranks.
        """
        path, result = tuple(sorted(self.stages)), None
        for place, stage in enumerate(path):
            if self._remote(stage - 1):
                value = receive(
                    self.messages.receive_once(Action(stage, ActionKind.RECEIVE_FORWARD, 0))
                )
            self.weights.require(
                self.local[stage], [self.local[after] for after in path[place + 1 :]]
            )
            self.note(f"forward {self.local[stage]} starts")
            value = self.stages[stage].forward(value, None)
            self.note(f"forward {self.local[stage]} ends")
            if stage == self.last:
                result = output(value)
                self.weights.hide()
            elif self._remote(stage + 1):
                self.messages.send_once(
                    Action(stage + 1, ActionKind.SEND_FORWARD, 0), _flat(value, stage)
                )
        self.messages.finish()
        # A step that follows has to announce its own shapes.
        self.messages.begin()
        return result

    # Forward

    def _forward(self, action: Action, feed: Feed) -> None:
        stage, _, microbatch = action
        value = self._values.pop((stage, microbatch)) if stage else feed.inputs(microbatch)
        self._visit()
        # Of a graph that is not joined, each stage has a part of its own, which begins at detached
        # inputs. Backward runs stage by stage, and hands on their gradients.
        if self.joined:
            self._entered = None
            if not stage:
                self._watch(None, value)
            current = Pass(value, feed.turn)
        else:
            current = Pass(
                detach_tensors(value), feed.turn, again=self.to_run_again(stage, microbatch)
            )
        if stage in self._trained and torch.is_grad_enabled():
            self.open.setdefault((stage, microbatch), []).append(current)
            self.peak = max(self.peak, sum(map(len, self.open.values())))
        with torch.set_grad_enabled(torch.is_grad_enabled() and not current.again):
            self._ran(action, current, feed)

    def _once_more(self, action: Action, feed: Feed) -> None:
        self._visit()
        self._renew(action, feed)
        self.note(str(action))

    def _renew(self, action: Action, feed: Feed) -> None:
        """Run the stage forward again, with a graph, for each pass that stored only its inputs."""
        for current in self.open.get((action.stage, action.microbatch), ()):
            if current.again:
                current.again = False
                self._ran(Action(action.stage, ActionKind.AGAIN, action.microbatch), current, feed)

    def _ran(self, action: Action, current: Pass, feed: Feed) -> None:
        """Run a stage on the inputs of `current`, and hand on the output. Only the edges of the
        graph are stored, from which backward will start.
        """
        stage, kind, microbatch = action
        # The stage recomputes no chunk by itself if it is recomputed whole, or if the schedule
        # keeps this microbatch.
        keep = self._apart or (stage, microbatch) in self.schedule.kept
        self.again = kind is ActionKind.AGAIN
        self.note(f"forward {self.local[stage]} starts")
        if self.weights.in_turns:
            # A cast that an earlier pass left there would get its gradient outside of this one's turn.
            torch.clear_autocast_cache()
        output = self.stages[stage].forward(current.entered, feed.draw(microbatch), keep)
        self.note(f"forward {self.local[stage]} ends")
        if kind is ActionKind.FORWARD:
            self.note(str(action))
        if self.joined:
            self._watch(stage, output)
            current.entered = None
        if stage == self.last:
            if not current.again:
                feed.output(microbatch, output)
            if self.joined:
                self.weights.hide()
            return
        if current.again:
            # This output has no graph yet. The next stage, and another rank, have to see that it
            # takes part in backward.
            takes_part = self.stages[stage].trains or bool(differentiable(current.entered))
            for leaf in tree_leaves(output):
                if isinstance(leaf, Tensor) and leaf.is_floating_point():
                    leaf.requires_grad_(takes_part)
        if self.joined:
            self._values[stage + 1, microbatch] = output
            return
        tensors = differentiable(output)
        current.forms = tuple(map(Form.of, tensors))
        if not current.again:
            current.roots = [get_gradient_edge(tensor) for tensor in tensors]
        if kind is ActionKind.FORWARD:
            self._values[stage + 1, microbatch] = output

    def to_run_again(self, stage: int, microbatch: int) -> bool:
        """Return whether the stage stores only its inputs and is recomputed in backward as a whole.
        This is so if a layer of the stage is recomputed, and the rank's program splits backward or
        has actions that recompute.
        """
        # A chunk recomputes itself within a call of backward. Two halves would do that twice.
        repeats = self._apart and stage in self._trained and self.stages[stage].recomputes
        return repeats and (stage, microbatch) not in self.schedule.kept

    # Backward

    def _backward(self, action: Action, feed: Feed) -> None:
        if self.joined:
            self._backward_joined(action, feed)
            return
        roots, gradients = self._starts(action, feed)
        self.gradients.acquire(self.local[action.stage])

        def work() -> None:
            if roots:
                torch.autograd.backward(roots, gradients)

        self._note_action(action, work)
        self._hand_down(action, feed)
        self._close(action, feed)
        self._reduce_due(action.stage)

    def _backward_joined(self, action: Action, feed: Feed) -> None:
        """Run backward through all stages, and all actions up to the next forward action. Nodes of the
        graph say when autograd comes to a stage (`_watch`).
        """
        waiting = {one.turn for passes in self.open.values() for one in passes}
        self._entered, self._opened, self._ordered = None, None, len(waiting) == 1
        self.gradients.follow_hooks()
        self.gradients.active = True
        try:
            torch.autograd.backward([feed.root(action.microbatch)], retain_graph=feed.retains)
        finally:
            self.gradients.active = False
        if self._ordered:
            self._leave(None)
        else:
            self._end_unordered()
        self._entered, self._ordered = None, False
        self.weights.hide()
        for stage in self.stages:
            self._close(Action(stage, ActionKind.BACKWARD, action.microbatch), feed)
        self._place -= 1  # `run` goes on with the action behind this one

    def _watch(self, stage: int | None, values: Any) -> None:
        """Have the nodes that computed `values` say when backward comes to them, and so to `stage`.
        Nodes of an earlier stage, and with None those of the script, are left to them.
        """
        for tensor in differentiable(values):
            node: Any = tensor.grad_fn
            if node is not None and id(self) not in node.metadata:
                node.metadata[id(self)] = stage
                if stage is not None:
                    node.register_prehook(partial(self._reach, stage))

    def _reach(self, stage: int, gradients: Any) -> None:
        """Prepare for backward through `stage`: its weights have to be whole, and its gradients to have
        their buffers.
        """
        if torch.is_grad_enabled() and self.weights.in_turns:
            raise BridgeError(
                "backward with create_graph=True: its graph uses weights that are whole only while their layer"
                " runs; use zero.stage 2 for penalties on gradients"
            )
        if self._entered == stage:
            return
        if self._ordered and self._expects(stage):
            self._leave(stage)
            self._visit()
            self._opened = HERE.action = self.row[self._place]
        else:
            self.weights.require(self.local[stage])
        self._entered = stage
        if self.gradients.active:
            self.gradients.acquire(self.local[stage])
            self.note(f"backward {self.local[stage]} starts")

    def _expects(self, stage: int) -> bool:
        """Return whether the program has the backward of `stage` still ahead in this microbatch."""
        for action in self.row[self._place :]:
            if action.kind is ActionKind.FORWARD:
                return False
            if action.kind is ActionKind.BACKWARD and action.stage == stage:
                return True
        return False

    def _leave(self, stage: int | None) -> None:
        """Run the program up to the backward of `stage`, or up to the next forward action: the ends of
        stages that backward has been through, reductions, and stages that no gradient came to.
        """
        while not self.is_over and self.row[self._place].kind is not ActionKind.FORWARD:
            action = self.row[self._place]
            HERE.action = action
            if action.kind is ActionKind.REDUCE:
                self._reduce(action)
            else:
                if action.stage == stage:
                    return
                place = self.local[action.stage]
                if self._opened != action:
                    self._visit()
                    self.gradients.acquire(place)
                    self.note(f"backward {place} starts")
                self.note(f"backward {place} ends")
                self.note(str(action))
                self._reduce_due(action.stage)
            self._place += 1

    def _end_unordered(self) -> None:
        """End a backward pass through several forward passes, which came to stages in any order. After
        the last microbatch, reduce all gradients that are not reduced yet.
        """
        while not self.is_over and self.row[self._place].kind is not ActionKind.FORWARD:
            action = self.row[self._place]
            if action.kind is ActionKind.BACKWARD:
                self._visited += 1
                self._written += 1
                self.note(str(action))
            self._place += 1
        if self.is_over:
            self.gradients.reduce(self.gradients.left())

    def _input(self, action: Action, feed: Feed) -> None:
        roots, gradients = self._starts(action, feed)
        edges = [
            root if isinstance(root, GradientEdge) else get_gradient_edge(root) for root in roots
        ]
        inputs = [
            current.entered for current in self.open.get((action.stage, action.microbatch), ())
        ]
        halves = Halves(edges, gradients, differentiable(inputs))
        self._halves[action.stage, action.microbatch] = halves
        self._note_action(action, halves.input)
        self._hand_down(action, feed)

    def _weight(self, action: Action, feed: Feed) -> None:
        self._visit()
        halves = self._halves.pop((action.stage, action.microbatch))
        self.gradients.acquire(self.local[action.stage])
        self._note_action(action, halves.weight)
        self._close(action, feed)
        self._reduce_due(action.stage)

    def _starts(self, action: Action, feed: Feed) -> tuple[list[Any], list[Tensor | None]]:
        """Return the roots from which the backward of a microbatch on a stage starts, and a
        gradient for each root (None for the loss). Roots that get no gradient are left out.
        """
        stage, _, microbatch = action
        self._visit()
        self._renew(action, feed)
        if stage == self.last:
            return [feed.root(microbatch)], [None]  # the loss, whose own gradient is one
        passes = self._waiting_passes(action, feed)
        gradients = self._gradients.pop((stage, microbatch))
        pairs = [
            (root, gradient)
            for current, parts in zip(passes, gradients, strict=True)
            for root, gradient in zip(current.roots, parts, strict=True)
            if gradient is not None
        ]
        return [root for root, _ in pairs], [gradient for _, gradient in pairs]

    def _hand_down(self, action: Action, feed: Feed) -> None:
        """Store the gradients of a stage's inputs, in order, for each pass. The stage before needs
        them as gradients of its outputs.
        """
        stage, _, microbatch = action
        remote = self._remote(stage - 1)
        passes = self._waiting_passes(action, feed)
        inputs = [differentiable(current.entered) for current in passes]
        if stage - 1 in self._trained or remote:
            # Another rank waits for a tensor of that shape, so that zeros stand for no gradient.
            self._gradients[stage - 1, microbatch] = [
                [torch.zeros_like(one) if one.grad is None and remote else one.grad for one in part]
                for part in inputs
            ]
        for current, part in zip(passes, inputs, strict=True):
            current.roots = []
            for tensor in part:
                tensor.grad = None

    def _waiting_passes(self, action: Action, feed: Feed) -> list[Pass]:
        """Return the passes of a microbatch through a stage that wait for backward and that
        backward has reached now.
        """
        return [
            current
            for current in self.open.get((action.stage, action.microbatch), ())
            if feed.reached(current.turn)
        ]

    def _close(self, action: Action, feed: Feed) -> None:
        rest = [
            current
            for current in self.open.pop((action.stage, action.microbatch), ())
            if not feed.reached(current.turn)
        ]
        if rest:
            self.open[action.stage, action.microbatch] = rest

    def _reduce_due(self, stage: int) -> None:
        """Reduce the flats that `residency.reductions` lists for this writing of gradients of
        `stage`. After the last writing of a stage in a step this method reduces nothing, because
        the program has an action of its own for the last reduction of the stage.
        """
        writer, self._written = self._written, self._written + 1
        if self._final[self.local[stage]] != writer:
            self.gradients.reduce(self._due[writer])

    def _reduce(self, action: Action, feed: Feed | None = None) -> None:
        self.note(str(action))
        self.gradients.reduce(self._due[self._final[self.local[action.stage]]])

    # Messages

    def _send_forward(self, action: Action, feed: Feed) -> None:
        value = self._values.pop((action.stage, action.microbatch))
        self.messages.send(action, _flat(value, action.stage - 1))

    def _receive_forward(self, action: Action, feed: Feed) -> None:
        self._values[action.stage, action.microbatch] = feed.received(
            action.microbatch, self.messages.receive(action)
        )

    def _send_backward(self, action: Action, feed: Feed) -> None:
        gradients = self._gradients.pop((action.stage, action.microbatch))
        self.messages.send(
            action, [gradient for parts in gradients for gradient in parts if gradient is not None]
        )

    def _receive_backward(self, action: Action, feed: Feed) -> None:
        self._gradients[action.stage, action.microbatch] = [[*self.messages.receive(action)]]

    def _gradient_forms(self, action: Action) -> Forms:
        """Return the shapes and formats of the gradients that a microbatch's outputs will get from
        another rank. Return nothing before the forward pass.
        """
        passes = self.open.get((action.stage, action.microbatch))
        return passes[0].forms if passes else ()

    def _remote(self, stage: int) -> bool:
        """Return whether `stage` is on another rank."""
        return 0 <= stage <= self.last and stage not in self.stages

    def _visit(self) -> None:
        """Wait until the weights of the stage that runs next are whole, and start gathers for the
        stages after it.
        """
        path, place = self.visits.path, self._visited
        self._visited += 1
        following = () if self.weights.residency.full else path[place + 1 : place + self._window]
        self.weights.require(path[place], following)

    def _note_action(self, action: Action, work: Callable[[], None]) -> None:
        place = self.local[action.stage]
        self.note(f"backward {place} starts")
        self.gradients.active = True
        try:
            work()
        finally:
            self.gradients.active = False
        self.note(f"backward {place} ends")
        self.note(str(action))


def _flat(value: Any, stage: int) -> list[Tensor]:
    """Return the tensors in a stage's output as a list, to be sent to another rank."""
    if isinstance(value, Stream):
        return list(value.tensors)
    if isinstance(value, Tensor):
        return [value]
    tensors = list(value) if isinstance(value, tuple | list) else []
    # A tuple of one would arrive as a bare tensor: the other side cannot tell them apart.
    if len(tensors) < 2 or not all(isinstance(tensor, Tensor) for tensor in tensors):
        raise BridgeError(
            f"stage {stage}: the last layer returns {type(value).__name__}, which cannot be sent to another rank; return a"
            " tensor, or a tuple of two or more tensors"
        )
    return tensors


_RUN: Mapping[ActionKind, Callable[[Executor, Action, Feed], None]] = {
    ActionKind.FORWARD: Executor._forward,
    ActionKind.AGAIN: Executor._once_more,
    ActionKind.BACKWARD: Executor._backward,
    ActionKind.INPUT: Executor._input,
    ActionKind.WEIGHT: Executor._weight,
    ActionKind.REDUCE: Executor._reduce,
    ActionKind.SEND_FORWARD: Executor._send_forward,
    ActionKind.RECEIVE_FORWARD: Executor._receive_forward,
    ActionKind.SEND_BACKWARD: Executor._send_backward,
    ActionKind.RECEIVE_BACKWARD: Executor._receive_backward,
}
