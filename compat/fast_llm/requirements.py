"""Settings without which a Fast-LLM run does not train."""

from __future__ import annotations

from bridge.stack.requirements import Need

NEEDS = (
    Need(
        ("training.train_iters",),
        "Fast-LLM trains nothing without this setting",
        "engine/training/config.py: train_iters is 0 by default",
        sized=False,
    ),
)
LEARNED = Need(
    ("data.maximum_document_length",),
    "Fast-LLM compares the documents with the model's learned positions, and stops without this setting",
    "models/gpt/config.py: GPTTrainerConfig._validate",
)
"""What a model with learned positions needs since 0.4.0."""
