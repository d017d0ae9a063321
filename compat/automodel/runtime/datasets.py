"""Data sets by the classes that recipes name: mock data, columns of JSON lines, and local copies of
SQuAD and HellaSwag.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from bridge.engine.randomness import seed_of
from bridge.errors import ConfigError, SourceError
from compat.automodel.runtime.formatting import IGNORED, Sample, completion, pairs
from compat.automodel.runtime.rows import column, rows
from compat.automodel.runtime.sections import Section, only, target

END = 1
"""Token that ends a sentence of mock data. Token 0 is padding, and words have higher numbers."""


class Samples(torch.utils.data.Dataset[Sample]):
    """A data set of `number` samples, each made on access."""

    def __init__(self, number: int, make: Callable[[int], Sample]) -> None:
        self.number, self.make = number, make

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> Sample:
        return self.make(index)


def dataset(section: Section, path: str, tokenizer: Callable[[], Any], seed: int) -> Samples:
    """Return the data set that a section describes. `tokenizer()` is only called for data sets of
    texts. Raises `BridgeError`.
    """
    settings, make = KNOWN[target(section, path, tuple(KNOWN))]
    only(section, path, (*settings, "tokenizer"))
    values = {key: section[key] for key in settings if section.get(key) is not None}
    samples = make(values, path, tokenizer, seed)
    if not len(samples):
        raise SourceError(
            f"{path}: the data set has no samples; give data with at least one sample"
        )
    return samples


def _make_sentences(
    settings: Section, path: str, tokenizer: Callable[[], Any], seed: int
) -> Samples:
    """Return samples that are sentences of random words. Source:
    components/datasets/llm/mock.py.
    """
    values = {
        "num_sentences": 10,
        "mean_len": 20.0,
        "std_len": 6.0,
        "vocab_size": 100,
        "max_sentence_len": 64,
        "seed": 0,
        **settings,
    }
    rng, words, samples = (random.Random(values["seed"]), range(2, values["vocab_size"]), [])
    for _ in range(values["num_sentences"]):
        length = max(
            1,
            min(values["max_sentence_len"], int(rng.gauss(values["mean_len"], values["std_len"]))),
        )
        tokens = [*rng.choices(words, k=length), END]
        places = list(range(len(tokens)))
        samples.append(
            {
                "input_ids": tokens,
                "attention_mask": [1] * len(tokens),
                "labels": [*tokens],
                "position_ids": places,
            }
        )
    return Samples(len(samples), lambda index: samples[index])


def _make_random(settings: Section, path: str, tokenizer: Callable[[], Any], seed: int) -> Samples:
    """Return samples of random tokens. AutoModel's data set never ends; here the data set ends
    after `num_samples` batches. Source: components/datasets/llm/mock_iterable_dataset.py.
    """
    words, length = settings.get("vocab_size", 1024), settings.get("seq_len", 1024)

    def sample(index: int) -> Sample:
        generator = torch.Generator().manual_seed(seed_of(seed, "mock", index))
        tokens = torch.randint(0, words, (length,), generator=generator).tolist()
        return {
            "input_ids": tokens,
            "labels": [*tokens[1:], IGNORED],
            "position_ids": list(range(length)),
        }

    return Samples(settings.get("num_samples", 1_000_000) * settings.get("batch_size", 1), sample)


def _read_columns(settings: Section, path: str, tokenizer: Callable[[], Any], seed: int) -> Samples:
    """Return samples whose prompt and answer are columns of a table.

    Source: components/datasets/llm/column_mapped_text_instruction_dataset.py.
    """
    mapping = settings.get("column_mapping") or {}
    if (
        "answer" not in mapping
        or not {"context", "question"} & mapping.keys()
        or mapping.keys() - {"context", "question", "answer"}
    ):
        raise ConfigError(
            f"{path}.column_mapping: found {mapping}, expected the key answer, and the keys"
            " context or question or both"
        )
    if settings.get("use_hf_chat_template"):
        raise ConfigError(
            f"{path}.use_hf_chat_template: the native engine does not support chat templates;"
            " leave it out"
        )
    source = f"{path}.path_or_dataset_id"
    table = rows(
        _required_value(settings, path, "path_or_dataset_id"), settings.get("split"), source
    )[: settings.get("limit_dataset_samples")]
    words = tokenizer()
    form: Callable[[str, str], Sample] = partial(
        completion, words, **_length_settings(settings, ("answer_only_loss_mask",))
    )

    def sample(index: int) -> Sample:
        for place in range(index, index + len(table)):
            row = table[place % len(table)]
            texts = [
                column(row, mapping[role], source)
                for role in ("context", "question")
                if role in mapping
            ]
            sample = form(" ".join([*texts, ""]), column(row, mapping["answer"], source))
            if any(label != IGNORED for label in sample["labels"]):
                return sample
        raise SourceError(
            f"{source}: no row has a label that counts in the loss; check seq_length and the columns"
        )

    return Samples(len(table), sample)


def _read_squad(settings: Section, path: str, tokenizer: Callable[[], Any], seed: int) -> Samples:
    """Return samples that ask a question about a text. Source: components/datasets/llm/squad.py."""
    source = f"{path}.dataset_name"
    table = rows(
        settings.get("dataset_name", "squad"),
        _split_name(settings, "limit_dataset_samples"),
        source,
    )
    form: Callable[[str, str], Sample] = partial(
        completion,
        tokenizer(),
        **_length_settings({"padding": False, "truncation": False, **settings}, ()),
    )

    def sample(index: int) -> Sample:
        row = table[index]
        prompt = f"Context: {column(row, 'context', source)} Question: {column(row, 'question', source)} Answer: "
        texts = column(row, "answers", source)["text"]
        return form(prompt, texts[0].strip() if texts else "")

    return Samples(len(table), sample)


def _read_hellaswag(
    settings: Section, path: str, tokenizer: Callable[[], Any], seed: int
) -> Samples:
    """Return samples that continue a story with its right ending. Source:
    components/datasets/llm/hellaswag.py.
    """
    source = f"{path}.path_or_dataset"
    table = rows(
        _required_value(settings, path, "path_or_dataset"),
        _split_name(settings, "num_samples_limit"),
        source,
    )
    contexts = [column(row, "ctx", source) for row in table]
    targets = [column(row, "endings", source)[int(column(row, "label", source))] for row in table]
    samples = pairs(tokenizer(), contexts, targets, settings.get("pad_to_max_length", True))
    return Samples(len(samples), lambda index: samples[index])


def _split_name(settings: Section, limit: str) -> str:
    split, most = settings.get("split", "train"), settings.get(limit)
    return split if most is None or "[" in split else f"{split}[:{most}]"


def _length_settings(settings: Section, more: tuple[str, ...]) -> dict[str, Any]:
    return {
        name: settings[name]
        for name in ("seq_length", "padding", "truncation", *more)
        if name in settings
    }


def _required_value(settings: Section, path: str, name: str) -> Any:
    if name not in settings:
        raise ConfigError(f"{path}.{name}: missing; give the file or folder of the data")
    return settings[name]


LENGTHS = ("seq_length", "padding", "truncation")
KNOWN: Mapping[
    str, tuple[tuple[str, ...], Callable[[Section, str, Callable[[], Any], int], Samples]]
] = {
    "build_unpacked_dataset": (
        ("num_sentences", "mean_len", "std_len", "vocab_size", "max_sentence_len", "seed"),
        _make_sentences,
    ),
    "MockIterableDataset": (("vocab_size", "seq_len", "num_samples", "batch_size"), _make_random),
    "ColumnMappedTextInstructionDataset": (
        (
            "path_or_dataset_id",
            "column_mapping",
            "split",
            "answer_only_loss_mask",
            "limit_dataset_samples",
            "use_hf_chat_template",
            *LENGTHS,
        ),
        _read_columns,
    ),
    "make_squad_dataset": (
        ("dataset_name", "split", "limit_dataset_samples", *LENGTHS),
        _read_squad,
    ),
    "HellaSwag": (
        ("path_or_dataset", "split", "num_samples_limit", "pad_to_max_length"),
        _read_hellaswag,
    ),
}
"""Known data sets by the name of their class or function, without the package. Each has its known
settings and the function that makes the samples.
"""
