"""How Hugging Face's Trainer averages the loss of a step, against what the plan says of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import SequentialSampler

transformers = pytest.importorskip("transformers")
VOCABULARY, LENGTH, MICRO, STEPS = 64, 16, 2, 4


def test_a_step_is_a_mean_over_its_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples with 15 to 1 counted tokens: the mean over tokens and that over micro-batches differ."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
    )
    model = transformers.LlamaForCausalLM(config)
    samples = []
    for masked in range(MICRO * STEPS):
        tokens = torch.randint(0, VOCABULARY, (LENGTH,))
        labels = tokens.clone()
        labels[: 2 * masked] = -100
        samples.append({"input_ids": tokens, "labels": labels})
    means = _gradients(model, samples)
    gradients: list[Any] = []
    trainer = transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=MICRO,
            gradient_accumulation_steps=STEPS,
            max_steps=1,
            max_grad_norm=0.0,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
        ),
        train_dataset=samples,
    )
    monkeypatch.setattr(trainer, "_get_train_sampler", lambda *_: SequentialSampler(samples))
    step = trainer.training_step

    def train(*args: Any, **more: Any) -> Any:
        loss = step(*args, **more)
        gradients[:] = [parameter.grad.clone() for parameter in model.parameters()]
        return loss

    monkeypatch.setattr(trainer, "training_step", train)
    trainer.train()
    distances = {
        name: max(float((a - b).abs().max()) for a, b in zip(gradients, mean, strict=True))
        for name, mean in means.items()
    }
    assert distances["per_token"] < 1e-6 < 1e-3 < distances["mean_of_microbatches"]


def _gradients(model: Any, samples: list[Any]) -> dict[str, Any]:
    sums, counts = [], []
    for at in range(0, len(samples), MICRO):
        inputs, labels = (
            torch.stack([sample[name] for sample in samples[at : at + MICRO]])
            for name in ("input_ids", "labels")
        )
        logits, targets = model(input_ids=inputs).logits[:, :-1], labels[:, 1:]
        sums.append(F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"))
        counts.append(int((targets != -100).sum()))
    means = {
        "per_token": sum(sums) / sum(counts),
        "mean_of_microbatches": sum(a / b for a, b in zip(sums, counts, strict=True)) / STEPS,
    }
    parameters = [*model.parameters()]
    return {
        name: torch.autograd.grad(mean, parameters, retain_graph=True)
        for name, mean in means.items()
    }
