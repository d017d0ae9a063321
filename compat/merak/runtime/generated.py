"""`DynamicGenDataset`: random samples with the shapes that a model needs. Source:
Merak/utils/datasets.py.

Merak draws a new sample on each access. In this implementation a sample depends only on its index
and on torch's seed, so that all ranks of a pipeline get the same sample.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from bridge.errors import ConfigError

__all__ = ["DynamicGenDataset"]
LENGTHS = (
    "seq_length",
    "max_position_embeddings",
    "n_positions",
    "embed_dim",
    "max_target_positions",
)
"""Keys of a model's config for the length of a sequence. The first key that the config has is used."""
WORDS = 1000
IMAGE = 224
PIXELS = "vision_only"
Sample = dict[str, Tensor]


class DynamicGenDataset(Dataset[Sample]):
    """A data set of `dataset_size` random samples. `mode` chooses the kind of samples: text,
    images, speech, or several of these.
    """

    def __init__(
        self,
        model_config: Any,
        mode: str = "text_only",
        dataset_size: float = 1000,
        image_size: int | None = None,
        seq_length: int | None = None,
    ) -> None:
        if mode not in KINDS:
            raise ConfigError(
                f"DynamicGenDataset: found mode {mode!r}, expected one of {', '.join(KINDS)}"
            )
        inner = getattr(model_config, "text_config", model_config)
        lengths = (getattr(inner, name) for name in LENGTHS if hasattr(inner, name))
        self.seq_length = next(lengths, None) if seq_length is None else seq_length
        if self.seq_length is None and mode != PIXELS:
            raise ConfigError(
                f"DynamicGenDataset: the model's config has none of {', '.join(LENGTHS)}; pass seq_length"
            )
        self.model_config, self.mode = model_config, mode
        self.dataset_size, self.image_size = dataset_size, image_size or IMAGE
        self._seed = torch.initial_seed()

    @property
    def sequence_length(self) -> int | None:
        """Tokens in a sample."""
        return self.seq_length

    def __len__(self) -> int:
        return int(self.dataset_size)

    def __getitem__(self, index: int) -> Sample:
        generator = torch.Generator().manual_seed((self._seed * 1_000_003 + index) % 2**63)
        return KINDS[self.mode](self, generator)

    def words(
        self,
        generator: torch.Generator,
        most: int = WORDS,
        number: int | None = None,
        least: int = 1,
    ) -> Tensor:
        """Return random token ids, one for each position of a sample."""
        return torch.randint(least, most, (number or self.seq_length or 1,), generator=generator)

    def pixels(self, generator: torch.Generator) -> Tensor:
        """Return a random image."""
        return torch.randn(3, self.image_size, self.image_size, generator=generator)

    def rows(self, generator: torch.Generator, width: int | None = None) -> Tensor:
        """Return random numbers for each token."""
        shape = (self.seq_length or 1,) if width is None else (self.seq_length or 1, width)
        return torch.randn(shape, generator=generator)


def _text(data: DynamicGenDataset, by: torch.Generator) -> Sample:
    return {"input_ids": data.words(by), "labels": data.words(by)}


def _both(data: DynamicGenDataset, by: torch.Generator) -> Sample:
    return {"input_ids": data.words(by, 64), "pixel_values": data.pixels(by)}


def _images(data: DynamicGenDataset, by: torch.Generator) -> Sample:
    return {
        "pixel_values": data.pixels(by),
        "labels": data.words(by, data.model_config.num_labels, 1, 0),
    }


def _pairs(data: DynamicGenDataset, by: torch.Generator) -> Sample:
    return {
        "input_ids": data.words(by),
        "decoder_input_ids": data.words(by),
        "labels": data.words(by),
    }


def _speech(data: DynamicGenDataset, by: torch.Generator) -> Sample:
    return {"input_values": data.rows(by), "labels": data.words(by, data.model_config.vocab_size)}


def _heard(data: DynamicGenDataset, by: torch.Generator) -> Sample:
    features = data.rows(by, data.model_config.input_feat_per_channel)
    return {
        "input_features": features,
        "decoder_input_ids": data.words(by),
        "labels": data.words(by),
    }


def _draw_sample(data: DynamicGenDataset, by: torch.Generator) -> Sample:
    config = data.model_config
    sample = {
        "visual_feats": data.rows(by, config.visual_feat_dim),
        "visual_pos": data.rows(by, config.visual_pos_dim),
    }
    return {"input_ids": data.words(by), **sample, "labels": torch.zeros(1, dtype=torch.int64)}


KINDS: Mapping[str, Callable[[DynamicGenDataset, torch.Generator], Sample]] = {
    "text_only": _text,
    "multimodal": _both,
    PIXELS: _images,
    "condition": _pairs,
    "speech": _speech,
    "speech2text": _heard,
    "for_qa": _draw_sample,
}
