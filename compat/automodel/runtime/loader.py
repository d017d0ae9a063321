"""Loads the batches of a data rank, epoch after epoch, as microbatches of the engine.

Source: components/datasets/loader.py, utils.py, components/training/step_scheduler.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from bridge.engine.layers import Arguments
from bridge.errors import ConfigError
from compat.automodel.runtime.datasets import Samples
from compat.automodel.runtime.formatting import IGNORED, PADS, USUAL, Sample
from compat.automodel.runtime.sections import TARGET, Section, only, target

SETTINGS = (
    "collate_fn",
    "shuffle",
    "num_workers",
    "drop_last",
    "batch_size",
    "pin_memory",
    "persistent_workers",
    "prefetch_factor",
)
LOADERS = ("StatefulDataLoader", "ParallelAwareDataloader", "DataLoader")
COLLATERS = ("default_collater", "default")
INPUTS = ("input_ids", "attention_mask", "position_ids")
"""The entries of a batch that are arguments of the model."""


@dataclass(frozen=True)
class Loader:
    """Loads batches of `rows` samples for rank `rank` of `ranks`. If `whole` is set, a last batch
    with fewer samples is dropped.
    """

    samples: Samples
    rows: int
    rank: int
    ranks: int
    seed: int
    shuffle: bool
    whole: bool
    multiple: int | None = None
    workers: int = 0

    @classmethod
    def of(
        cls,
        samples: Samples,
        section: Section,
        path: str,
        rows: int,
        place: tuple[int, int],
        seed: int,
        has_pipeline: bool,
    ) -> Loader:
        """Return a loader with the settings of a section. Raises `ConfigError` for settings that
        this loader does not have.
        """
        if section.get(TARGET):
            target(section, path, LOADERS)
        only(section, path, SETTINGS)
        shuffle, workers = section.get("shuffle"), section.get("num_workers") or 0
        whole, multiple = (
            has_pipeline or bool(section.get("drop_last")),
            _collater(section.get("collate_fn"), f"{path}.collate_fn"),
        )
        return cls(
            samples, rows, *place, seed, shuffle is None or bool(shuffle), whole, multiple, workers
        )

    @property
    def batches(self) -> int:
        """Number of batches in an epoch on each rank."""
        own = math.ceil(len(self.samples) / self.ranks)
        return own // self.rows if self.whole else math.ceil(own / self.rows)

    def epoch(self, number: int, first: int = 0) -> Iterator[dict[str, Tensor]]:
        """Yield the batches of epoch `number`, beginning with batch `first`."""
        self._sampler.set_epoch(number)
        order = list(self._sampler)
        # Lists of indices rather than a skipped iterator: a run that resumes loads no sample that
        # it has seen.
        lists = [order[start : start + self.rows] for start in range(0, len(order), self.rows)][
            first : self.batches
        ]
        collate = partial(collate_samples, multiple=self.multiple)
        loader: Any = torch.utils.data.DataLoader(
            self.samples, batch_sampler=lists, collate_fn=collate, num_workers=self.workers
        )
        yield from loader

    @cached_property
    def _sampler(self) -> Any:
        return torch.utils.data.DistributedSampler(
            self.samples,
            num_replicas=self.ranks,
            rank=self.rank,
            shuffle=self.shuffle,
            seed=self.seed,
        )


def _collater(value: Any, path: str) -> int | None:
    """Return the collater's setting `pad_seq_len_divisible`: sequences are padded to a multiple of
    this number. None if the setting is missing. Raises `ConfigError` for an unknown collater.
    """
    settings = value if isinstance(value, dict) else {TARGET: value}
    name = str(settings.get(TARGET) or COLLATERS[0]).rpartition(".")[2]
    if name not in COLLATERS:
        raise ConfigError(
            f"{path}: found {settings[TARGET]}, expected {COLLATERS[0]}; leave it out"
        )
    only(settings, path, ("pad_seq_len_divisible",))
    return settings.get("pad_seq_len_divisible")


def collate_samples(samples: Sequence[Sample], multiple: int | None = None) -> dict[str, Tensor]:
    """Return samples as tensors of shape (samples, tokens). They are padded to the longest sample,
    whose length is rounded up to a multiple of `multiple`.
    """
    pads = USUAL | (samples[0].get(PADS) or {})
    tensors = {}
    for name in samples[0]:
        if name == PADS:
            continue
        values = [sample[name] for sample in samples]
        length = max(map(len, values))
        length = math.ceil(length / multiple) * multiple if multiple else length
        fill = pads.get(name, values[0][-1])
        tensors[name] = torch.tensor(
            [[*value, *[fill] * (length - len(value))] for value in values]
        )
    return tensors


def microbatches(batches: Sequence[dict[str, Tensor]], rows: int, number: int) -> list[Arguments]:
    """Split the batches of a step into microbatches of `rows` samples. If there are fewer than
    `number`, microbatches without labels are added.
    """
    passes = [
        Arguments(
            (batch["labels"][start : start + rows],),
            {name: batch[name][start : start + rows] for name in INPUTS if name in batch},
        )
        for batch in batches
        for start in range(0, len(batch["labels"]), rows)
    ]
    last = passes[-1]
    silent = Arguments((torch.full_like(last.given[0], IGNORED),), last.named)
    return passes + [silent] * (number - len(passes))


def count_labels(labels: Tensor) -> int:
    """Return the number of labels that are included in the loss."""
    return int((labels != IGNORED).sum())
