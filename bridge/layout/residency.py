"""Residency: the flat of weights that each buffer holds, and the time at which the next flat can be
gathered into the buffer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from bridge.layout.shard import Home, Layout


class Residency:
    """Contents of one rank's weight buffers during a step. Flats are identified by their index in
    the layout.
    """

    def __init__(self, layout: Layout) -> None:
        self.flats = layout.flats
        self._needed = layout.users
        self._holder: dict[Home, int] = {}
        self._absent = set(range(len(layout.flats)))

    @property
    def full(self) -> bool:
        """Return whether every flat is whole or being gathered. Then no gather is due."""
        return not self._absent

    def needed(self, stage: int) -> tuple[int, ...]:
        """The flats that must be whole while `stage` computes."""
        return self._needed[stage]

    def holds(self, index: int) -> bool:
        """Whether the flat is whole, or being gathered."""
        return self._holder.get(self.flats[index].weight_home) == index

    def hold(self, index: int) -> None:
        """Record that the flat now fills its buffer."""
        home = self.flats[index].weight_home
        if home in self._holder:
            self._absent.add(self._holder[home])
        self._holder[home] = index
        self._absent.discard(index)

    def drop(self, indices: Iterable[int]) -> None:
        """Record that these flats are out of date."""
        for index in indices:
            if self.holds(index):
                del self._holder[self.flats[index].weight_home]
                self._absent.add(index)

    def due(self, visits: Iterable[int]) -> Iterator[int]:
        """Yield the flats to gather now, in order. `visits` are the stages from the current stage
        on.

        A flat may replace the flat in its buffer only if no earlier visit needs the old flat. The
        look-ahead ends at the first flat that has to wait.
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


def visits(layout: Layout, training: bool = True) -> tuple[int, ...]:
    """Yield the stages that one microbatch visits: forward through all stages, and backward down to
    the first stage that trains.
    """
    forward = range(layout.stages)
    return (
        (*forward, *reversed(range(layout.first_trained, layout.stages)))
        if training
        else tuple(forward)
    )


def reductions(layout: Layout, writers: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the flats to reduce after each visit. `writers` are the stages that write gradients,
    one for each visit, in order.

    A flat is reduced after the last visit that writes it, and before another flat is written into
    the same buffer.
    """
    # Backwards: `following` has the flat that is written next into each buffer. If it is the same flat, reduction can wait.
    following: dict[Home, int] = {}
    found: list[tuple[int, ...]] = []
    written = {
        stage: [index for index in layout.users[stage] if layout.flats[index].trainable]
        for stage in set(writers)
    }
    for stage in reversed(writers):
        found.append(
            tuple(
                index
                for index in written[stage]
                if following.get(layout.flats[index].grad_home) != index
            )
        )
        following.update((layout.flats[index].grad_home, index) for index in written[stage])
    return tuple(reversed(found))
