"""Converts prompts and answers to tokens, labels and masks. Source:
components/datasets/llm/formatting_utils.py, utils.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from bridge.errors import ConfigError

IGNORED = -100
"""Label of a token that is left out of the loss."""
PADS = "pads"
"""The key in a sample under which the padding value of each field is stored."""
USUAL = {"labels": IGNORED, "attention_mask": 0, "loss_mask": 0, "input_ids": 0}
BATCH = 1000
"""Number of samples that are tokenized in one batch. The first sample of a batch decides whether
special tokens between context and continuation are removed from all samples of the batch.
"""
Sample = dict[str, Any]


def completion(
    tokenizer: Any,
    prompt: str,
    answer: str,
    seq_length: int | None = None,
    padding: str | bool = "do_not_pad",
    truncation: str | bool = "do_not_truncate",
    answer_only_loss_mask: bool = True,
) -> Sample:
    """Return a prompt and its answer as one tokenized sequence with labels. The labels are shifted
    by one token, and labels of the prompt are excluded from the loss.
    """
    if getattr(tokenizer, "chat_template", None) is not None:
        raise ConfigError(
            "tokenizer: found a chat template, which the native engine does not support; use a"
            " tokenizer without one"
        )
    start = 0
    if answer_only_loss_mask:
        start = len(tokenizer(prompt, add_special_tokens=False)["input_ids"]) + bool(
            getattr(tokenizer, "add_bos_token", False)
        )
    tokenizer.padding_side = "right"
    encoding = tokenizer(
        prompt + answer, padding=padding, truncation=truncation, max_length=seq_length
    )
    tokens, mask = list(encoding["input_ids"]), encoding.get("attention_mask")
    counts = [
        place >= start and (mask is None or bool(mask[place])) for place in range(len(tokens))
    ]
    return _shift_tokens(tokenizer, tokens, counts, seq_length if padding == "max_length" else None)


def _shift_tokens(
    tokenizer: Any, tokens: list[int], counts: Sequence[bool], length: int | None
) -> Sample:
    pad = tokenizer.pad_token_id or tokenizer.eos_token_id or 0
    real = max(0, min(_count_content(tokens, pad, tokenizer.eos_token_id) - 1, len(tokens) - 1))
    labels = [token if count else IGNORED for token, count in zip(tokens, counts, strict=True)][1:]
    inputs = tokens[:-1]
    more = max(0, (length or 0) - len(inputs))
    return {
        "input_ids": inputs + [pad] * more,
        "labels": labels + [IGNORED] * more,
        "attention_mask": [1] * real + [0] * (len(inputs) - real + more),
        PADS: {"input_ids": pad, "labels": IGNORED, "attention_mask": 0},
    }


def _count_content(tokens: Sequence[int], pad: int, eos: int | None) -> int:
    """Return the number of tokens before the padding. If the padding token is also the token that
    ends a sequence, the first padding token counts as this end.
    """
    end = len(tokens)
    while end > 0 and tokens[end - 1] == pad:
        end -= 1
    return min(end + 1, len(tokens)) if pad == eos else end


def pairs(
    tokenizer: Any, contexts: Sequence[str], targets: Sequence[str], pad_to_max_length: bool
) -> list[Sample]:
    """Tokenize contexts and continuations separately and join each pair to a sample.

    With `pad_to_max_length` all samples are padded to the longest, rounded up to a multiple of 8.
    """
    samples: list[Sample] = []
    for start in range(0, len(contexts), BATCH):
        samples += _tokenize_pairs(
            tokenizer, contexts[start : start + BATCH], targets[start : start + BATCH]
        )
    length = (
        math.ceil(max(len(sample["input_ids"]) for sample in samples) / 8) * 8
        if pad_to_max_length and samples
        else 0
    )
    usual = USUAL | {"input_ids": tokenizer.pad_token_id or 0}
    for sample in samples:
        for name, values in sample.items():
            values += [usual[name]] * max(0, length - len(values))
    return samples


def _tokenize_pairs(
    tokenizer: Any, contexts: Sequence[str], targets: Sequence[str]
) -> list[Sample]:
    first, second = (tokenizer(list(texts))["input_ids"] for texts in (contexts, targets))
    special = set(tokenizer.all_special_ids)
    if first[0] and first[0][-1] in special:
        first = [tokens[:-1] for tokens in first]
    if second[0] and second[0][0] in special:
        second = [tokens[1:] for tokens in second]
    samples = []
    for context, target in zip(first, second, strict=True):
        labels = [IGNORED] * (len(context) - 1) + target + [IGNORED]
        mask = [int(label != IGNORED) for label in labels]
        tokens = context + target
        samples.append(
            {
                "input_ids": tokens,
                "attention_mask": [1] * len(tokens),
                "labels": labels,
                "loss_mask": mask,
            }
        )
    return samples
