"""What stacks do alike in all runs: differences that no setting shows, and settings that only say what the
other stack does anyway.
"""

from __future__ import annotations

from typing import Any

import pytest

import bridge
import compat
from bridge.dialect import Config
from bridge.difference import compare
from bridge.rules import Effect

WORLD = 8
FLAGS = (
    "--micro-batch-size 1 --global-batch-size 8 --num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 512 "
    "--max-position-embeddings 512 --vocab-size 1024 --make-vocab-size-divisible-by 128 --tokenizer-type NullTokenizer "
    "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope --hidden-dropout 0 "
    "--untie-embeddings-and-output-weights --attention-dropout 0 --bf16 --use-distributed-optimizer "
    "--calculate-per-token-loss --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --train-iters 100 --lr-warmup-iters 10"
)
APART = " --reset-attention-mask --reset-position-ids --eod-mask-loss"


def megatron(flags: str) -> Config:
    return compat.load("megatron").read(flags.split(), world_size=WORLD)


def told(config: Config, name: str) -> set[str]:
    """The plan fields of findings that matter in a translation, and of the differences to its result."""
    result = bridge.translate(config, compat.load(name), world_size=WORLD)
    found = {ours for finding in result.findings if finding.matters for ours in finding.about}
    apart = {ours for row in compare(config, result.config) if row.effect.reaches(Effect.ROUNDING) for ours in row.about}
    assert {ours for ours in found if ours.startswith("habits.")} <= apart
    return found


def test_documents_that_megatron_joins_and_fast_llm_keeps_apart() -> None:
    joined = told(megatron(FLAGS), "fast_llm")
    assert joined >= {"habits.attention", "habits.boundaries"}
    assert not {ours for ours in told(megatron(FLAGS + APART), "fast_llm") if ours.startswith("habits.")}
    there = bridge.translate(megatron(FLAGS + APART), compat.load("fast_llm"), world_size=WORLD).config
    back = bridge.translate(there, compat.load("megatron"), world_size=WORLD).config
    assert all(back.given[path] for path in ("reset_attention_mask", "reset_position_ids", "eod_mask_loss"))
    # A script that brings the data decides by itself.
    assert not {ours for ours in told(megatron(FLAGS), "deepspeed") if ours.startswith("habits.")}


def fast_llm(model: dict[str, Any]) -> Config:
    source = {"training": {"train_iters": 10}, "model": {"base_model": {"hidden_size": 64, **model}}}
    return compat.load("fast_llm").read(source, world_size=WORLD)


def test_adapters_are_on_the_layers_that_the_source_adapts() -> None:
    there = bridge.translate(fast_llm({"peft": {"type": "lora", "rank": 8}}), compat.load("automodel"), world_size=WORLD)
    assert there.config.given["peft.*"] == {"target_modules": ["*.q_proj", "*.v_proj"]}
    assert "adapters.targets" not in {ours for finding in there.findings for ours in finding.about}
    back = bridge.translate(there.config, compat.load("fast_llm"), world_size=WORLD)
    assert bridge.lift(back.config).adapters.targets == ("query", "value")


def test_the_factor_of_a_whole_part_is_another_than_that_of_its_weight() -> None:
    wide = fast_llm({"head": {"lr_scale": 2.0}})
    narrow = fast_llm({"head": {"output_weight": {"lr_scale": 2.0}}})
    assert bridge.lift(wide).optimizer.output_lr == bridge.lift(narrow).optimizer.output_lr == 2.0
    assert "habits.output_lr" in told(wide, "automodel")
    assert "habits.output_lr" not in told(narrow, "automodel")
    there = bridge.translate(narrow, compat.load("automodel"), world_size=WORLD).config
    back = bridge.translate(there, compat.load("fast_llm"), world_size=WORLD).config
    assert back.given["model.base_model"]["head"]["output_weight"]["lr_scale"] == 2.0


MERAK = {
    "init": {"pp": 1, "tp": 1, "dp": 8},
    "args": {"output_dir": "o", "per_device_train_batch_size": 1, "max_steps": 10, "max_grad_norm": 1.0, "num_layers": 2},
}


def merak(**args: Any) -> Config:
    return compat.load("merak").read({**MERAK, "args": {**MERAK["args"], **args}}, world_size=WORLD)


@pytest.mark.parametrize("name", ("megatron", "deepspeed", "automodel"))
def test_the_inverse_square_root_without_warmup_has_three_meanings(name: str) -> None:
    cold = told(merak(lr_scheduler_type="inverse_sqrt", warmup_steps=0), name)
    assert "habits.inverse_sqrt" in cold
    assert "habits.inverse_sqrt" not in told(merak(lr_scheduler_type="inverse_sqrt", warmup_steps=4), name)


def test_a_value_that_is_the_default_is_lost_all_the_same() -> None:
    epochs = merak(max_steps=-1, num_train_epochs=3)
    assert "run.epochs" in told(epochs, "megatron")


def test_dropout_that_a_family_does_not_read_is_none() -> None:
    config = compat.load("huggingface").read({"model_type": "phi3", "embd_pdrop": 0.1, "num_hidden_layers": 2})
    assert not bridge.lift(config).model.embedding.dropout
