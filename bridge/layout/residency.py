"""Residency: which flat of weights lies in each buffer, and when the next flat can be gathered into
the buffer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from bridge.layout.shard import Home, Layout


class Residency:
    """The flats that lie in one rank's weight buffers at a point of a step. A flat is identified by
    its index in the layout.
    """

    def __init__(self, layout: Layout) -> None:
        self.flats = layout.flats
        self._needed = layout.users
        self._holder: dict[Home, int] = {}
        self._absent = set(range(len(layout.flats)))

    @property
    def full(self) -> bool:
        """Whether every flat is in its buffer or being gathered, so that nothing is left to gather."""
        return not self._absent

    def flats_for_stage(self, stage: int) -> tuple[int, ...]:
        """Indices of the flats that must be whole while `stage` computes."""
        return self._needed[stage]

    def holds(self, index: int) -> bool:
        """Whether flat `index` is whole in its buffer, or being gathered into the buffer."""
        return self._holder.get(self.flats[index].weight_home) == index

    def hold(self, index: int) -> None:
        """Record that flat `index` is now in its buffer, in place of the flat that was there
        before.
        """
        home = self.flats[index].weight_home
        if home in self._holder:
            self._absent.add(self._holder[home])
        self._holder[home] = index
        self._absent.discard(index)

    def drop(self, indices: Iterable[int]) -> None:
        """Record that the flats with these indices are out of date and must be gathered again."""
        for index in indices:
            if self.holds(index):
                del self._holder[self.flats[index].weight_home]
                self._absent.add(index)

    def due(self, visits: Iterable[int]) -> Iterator[int]:
        """Yield the indices of the flats that can be gathered now, in order, and record them as
        gathered. `visits` are the stages that the rank will compute, in order, starting with the
        current stage.

        A flat replaces another flat in a buffer only if no earlier stage of `visits` needs the
        other flat. The iteration ends at the first flat that has to wait.
        """
        if self.full:
            return
        # Buffers that a visit up to here needs as they are.
        busy: set[Home] = set()
        for index in (index for stage in visits for index in self._needed[stage]):
            home = self.flats[index].weight_home
            if not self.holds(index):
                if home in busy:
                    return
                self.hold(index)
                yield index
            busy.add(home)


def stage_visits(layout: Layout, training: bool = True) -> tuple[int, ...]:
    """Return the stages that a rank computes for one microbatch, in order: forward through all
    stages, then backward from the last stage to the first stage that trains. Without `training`,
    only forward.
    """
    forward = range(layout.stages)
    return (
        (*forward, *reversed(range(layout.first_trained, layout.stages)))
        if training
        else tuple(forward)
    )


def reductions_by_stage(layout: Layout, writers: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the indices of the flats to reduce, for each entry of `writers`. `writers` are the
    stages whose gradients are written, in order.

    A flat is reduced after the last time that gradients are written to it, or earlier if another
    flat needs the same buffer.
    """
    # Backwards: `following` has the flat that is written next into each buffer. If it is the same flat, reduction can wait.
    following: dict[Home, int] = {}
    reductions: list[tuple[int, ...]] = []
    flats = {
        stage: [index for index in layout.users[stage] if layout.flats[index].trainable]
        for stage in set(writers)
    }
    for stage in reversed(writers):
        reductions.append(
            tuple(
                index
                for index in flats[stage]
                if following.get(layout.flats[index].grad_home) != index
            )
        )
        following.update((layout.flats[index].grad_home, index) for index in flats[stage])
    return tuple(reversed(reductions))
