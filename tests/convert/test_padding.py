"""The padding token's row of the embedding: what transformers' families do, and where stacks differ."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from typing import Any

import pytest

import bridge
import compat
from bridge.plan.families import FAMILIES
from bridge.stack.dialect import Config
from bridge.stack.rules import Effect
from bridge.translation.diff import compare

ROW = "model.embedding.padding"
COUNT = int(os.environ.get("PADDING_PAIRS", "6"))
"""Generated configs for each pair of stacks; 40 by hand."""
CLASSES = sorted(name for name, one in FAMILIES.items() if one.config and not one.foreign)
SMALL = {
    "num_hidden_layers": 1,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 64,
}


def read(family: str, keys: Mapping[str, Any]) -> Config:
    return compat.load("huggingface").read({"model_type": family, **keys})


@pytest.mark.parametrize("family", CLASSES)
def test_the_row_is_the_one_that_transformers_does_not_train(family: str) -> None:
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    layers = {FAMILIES[family].layer_keys[0]: 1}
    sizes = {**layers, **({"num_key_value_heads": 48} if family == "nemotron" else {})}
    draw = random.Random(family)
    for keys in (
        {},
        {"pad_token_id": draw.choice((None, draw.randrange(-99, 0), draw.randrange(99)))},
    ):
        kind = getattr(transformers, FAMILIES[family].config)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(kind(**sizes, **keys))
        row = model.get_input_embeddings().padding_idx
        assert bridge.lift(read(family, {**sizes, **keys})).model.embedding.padding == (
            "none" if row is None else row
        )
        # What is written for a plan means the same row.
        plan = bridge.lift(read(family, {**sizes, **keys}))
        for name in ("huggingface", "automodel"):
            written = bridge.lower(plan, compat.load(name))
            # AutoModel's own code for experts trains all rows.
            own = "model.config.architectures" in written.given and not family.startswith("ernie")
            assert bridge.lift(written).model.embedding.padding == (
                "none" if own else plan.model.embedding.padding
            )


@pytest.mark.parametrize("tied", [False, True])
def test_torch_trains_a_tied_row_as_an_output_alone(tied: bool) -> None:
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    found = {}
    for token in (5, None):
        torch.manual_seed(1)
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                **SMALL, vocab_size=32, pad_token_id=token, tie_word_embeddings=tied
            )
        )
        rows = model.get_input_embeddings().weight
        start = bool(rows[5].any())
        tokens = torch.tensor([[1, 5, 3, 4]])
        model(tokens, labels=tokens).loss.backward()
        met = bool(rows.grad[5].any())
        model.zero_grad()
        # Behind the last token of a sample, the token changes nothing.
        tokens, labels = torch.tensor([[1, 2, 3, 5]]), torch.tensor([[1, 2, 3, -100]])
        model(tokens, labels=labels).loss.backward()
        found[token] = (start, met, bool(rows.grad[5].any()))
    assert found == {5: (False, tied, tied), None: (True, True, tied)}


def worst(rows: Any) -> Effect:
    effects = (row.effect for row in rows if ROW in row.about)
    return min(effects, key=lambda effect: effect.rank, default=Effect.NONE)


def drawn(draw: random.Random) -> tuple[dict[str, Any], bool]:
    """A config, and whether it matters that the row of its padding token is not trained."""
    tokens = draw.sample(range(128), 4)
    pad = draw.choice((*tokens, None))
    ends = draw.choice((tokens[0], tokens[:2]))
    keys = {
        **SMALL,
        "vocab_size": 128,
        "max_position_embeddings": 64,
        "pad_token_id": pad,
        "bos_token_id": tokens[2],
        "eos_token_id": ends,
        "tie_word_embeddings": draw.random() < 0.3,
    }
    several = ends if isinstance(ends, list) else [ends]
    met = keys["tie_word_embeddings"] or pad in (tokens[2], *several)
    return keys, pad is not None and met


@pytest.mark.parametrize("target", ("megatron", "fast_llm", "automodel"))
@pytest.mark.parametrize("source", ("huggingface", "automodel"))
def test_another_training_of_the_row_is_told_exactly_where_inputs_hold_the_token(
    source: str, target: str
) -> None:
    draw, seen = random.Random(f"{source} {target}"), set()
    for _ in range(COUNT):
        keys, matters = drawn(draw)
        one = read("llama", keys)
        if source == "automodel":
            one = bridge.translate(one, compat.load("automodel")).config
        result = bridge.translate(one, compat.load(target))
        differs = matters and target != "automodel"
        expected = Effect.NUMBERS if differs else Effect.NONE
        assert worst(result.findings) is expected
        if source != "huggingface":
            assert worst(compare(one, result.config)) is worst(compare(result.config, one))
            assert worst(compare(one, result.config)) is expected
        # The way back trains every row, as the stack did.
        back = bridge.translate(result.config, compat.load("automodel"))
        assert worst(back.findings) is Effect.NONE
        seen.add(matters)
    assert seen == {True, False}


@pytest.mark.parametrize("family", ("phi3", "glm", "olmo2", "gemma"))
def test_a_stack_that_trains_all_rows_is_written_in_a_family_that_would_not(family: str) -> None:
    plan = bridge.lift(read(family, {"pad_token_id": None}))
    written = bridge.lower(plan, compat.load("automodel"))
    assert "pad_token_id: null" in written.text()


def test_the_own_code_of_automodel_trains_all_rows_but_ernies() -> None:
    for family, row in (("qwen3_moe", "none"), ("gpt_oss", "none"), ("ernie4_5_moe", 7)):
        own = {
            "_target_": f"transformers.{FAMILIES[family].config}",
            "architectures": [f"{FAMILIES[family].config.removesuffix('Config')}ForCausalLM"],
            "pad_token_id": 7,
        }
        for config, expected in ((own, row), ({**own, "architectures": None}, 7)):
            source = {
                "model": {
                    "_target_": "nemo_automodel.NeMoAutoModelForCausalLM.from_config",
                    "config": {key: value for key, value in config.items() if value},
                }
            }
            recipe = compat.load("automodel").read(source)
            assert bridge.lift(recipe).model.embedding.padding == expected


def test_the_native_model_has_the_row() -> None:
    torch = pytest.importorskip("torch")
    from bridge.engine.models.dense import Dense
    from bridge.errors import ConfigError

    plan = bridge.lift(read("llama", {**SMALL, "vocab_size": 32, "pad_token_id": 5}))
    model = Dense(plan.model)
    model(torch.tensor([[1, 5, 3]])).sum().backward()
    rows = model.embedding.tokens.weight
    assert rows.grad[1].any() and not rows.grad[5].any() and not rows[5].any()
    beyond = bridge.lift(read("llama", {**SMALL, "vocab_size": 32, "pad_token_id": 32}))
    with pytest.raises(ConfigError, match=r"model\.embedding\.padding: found 32"):
        Dense(beyond.model)
