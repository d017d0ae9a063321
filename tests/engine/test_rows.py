"""Models that are more than one row of blocks over words: a sample against plain transformers. `rows.py` runs all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from bridge.engine import initialize
from bridge.engine.layers import Arguments
from bridge.engine.models.blocks import Blocks, Segment
from bridge.engine.models.cutting import Uncut, cut_of
from bridge.engine.models.slicing import slice_model
from bridge.errors import BridgeError, ConfigError
from bridge.plan.plan import Plan
from tests.engine.blocks import errors, good
from tests.engine.pool import Run
from tests.engine.rows import (
    CASES,
    batches,
    dropped,
    in_ranks,
    one_by_one,
    plain,
    probe,
    small,
    wide,
)

pytest.importorskip("transformers")


@pytest.mark.parametrize(
    ("name", "rows"), [("clip", 2), ("lxmert", 2), ("mt5", 2), ("swin", 1), ("wav2vec2", 2)]
)
def test_layers_run_one_by_one_give_what_the_model_gives(name: str, rows: int) -> None:
    apart, _, found = one_by_one(name)
    assert (apart, found) == (0, rows)


@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("t5", "1F1B"),
        ("altclip", "interleaved"),
        ("albert", "ZeRO 3"),
        ("albert", "1F1B"),
        ("bart", "ZeRO 3"),
    ],
)
def test_two_ranks_train_as_plain_transformers(run: Run, name: str, case: str) -> None:
    assert good(errors(run(2, in_ranks, name, CASES[case])[0], plain(name)))


def test_dropout_does_not_depend_on_the_layout(run: Run) -> None:
    alone = run(1, dropped, "t5", {})[0]
    assert alone == pytest.approx(run(2, dropped, "t5", CASES["1F1B"])[0], rel=1e-12)
    assert alone != pytest.approx([plain("t5")[0][0]] * 2, rel=1e-6), "it is on"


def test_a_decoder_takes_what_the_encoder_gives_along() -> None:
    cut = cut_of(small("t5"))
    assert [one.modules for one in cut.layers if isinstance(one, Segment)] == [
        ("encoder.embed_tokens",),
        ("encoder.final_layer_norm", "decoder.embed_tokens"),
        ("decoder.final_layer_norm", "lm_head", "shared"),
    ]
    # A stream, then the bias that the first block makes; in the decoder also the encoder's output,
    # as its blocks take it and as the model gives it.
    assert [len(numbers) for numbers in cut.entering] == [0, 1, 2, 2, 1, 3, 5, 5, 2]


def test_layers_that_share_a_block_have_names_of_their_own() -> None:
    model = small("albert")
    names = [layer.name for layer in Blocks(model, cut_of(model)).chain().layers]
    block = "albert.encoder.albert_layer_groups.0"
    assert names == [
        "albert.embeddings",
        block,
        f"{block}#2",
        f"{block}#3",
        f"{block}#4",
        "predictions",
    ]


def test_a_model_that_runs_on_more_than_words_is_tried_on_a_sample() -> None:
    model = small("clip")
    with pytest.raises(Uncut, match="CLIPModel: the model has no input embedding for tokens"):
        cut_of(model)
    assert (
        cut_of(model, Arguments((), batches("clip")[0])).blocks[0]
        == "vision_model.encoder.layers.0"
    )


def test_blanks_have_the_shapes_of_the_batch_at_hand() -> None:
    """The layers, cut by images of one size, run on images of another."""
    model = small("dinov2").eval()
    cut = cut_of(model, Arguments((), batches("dinov2")[0]))
    given = Arguments((), {"pixel_values": torch.randn(3, 3, 48, 40, dtype=torch.float64)})
    blocks, value = Blocks(model, cut), None
    for layer in blocks.chain().layers:
        value = layer(given if value is None else blocks.receive_stream(value.tensors, given))
    assert torch.equal(value.logits, model(**given.named).logits)


def test_several_rows_do_not_split_their_tokens() -> None:
    with pytest.raises(
        ConfigError, match=r"parallel.sequence: T5ForConditionalGeneration has 2 rows of blocks"
    ):
        slice_model(small("t5"), [])


def train(model: nn.Module, **values: Any) -> Any:
    plan = {"precision.compute": "fp64", "optimizer.lr": 0.1, **values}
    engine = initialize(model, Plan.of(plan), probe, sample=batches("bart")[0])
    model.model.decoder.layerdrop = 1.0
    engine.train_batch([wide(batches("bart")[0])])
    return engine


def test_a_model_that_calls_its_blocks_otherwise_than_when_it_was_cut_says_so() -> None:
    with pytest.raises(
        BridgeError,
        match=r"lm_head: the model does not call this module in the order in which it was divided",
    ):
        train(small("bart").train())


def test_a_block_that_is_left_out_behind_its_row_is_noticed() -> None:
    """The last layer's pass leaves out a block, which would have given the stream."""
    model = small("bart").train()
    cut = cut_of(model)
    given, value, blocks = Arguments((), wide(batches("bart")[0])), None, Blocks(model, cut)
    *layers, last = blocks.chain().layers
    for layer in layers:
        value = layer(given if value is None else value)
    model.model.decoder.layerdrop = 1.0
    with pytest.raises(
        BridgeError,
        match=r"model.decoder.layers.0: the model does not call this module in the order",
    ):
        last(value)


def test_a_model_that_leaves_out_blocks_by_chance_is_one_layer() -> None:
    model = small("bart").train()
    model.model.decoder.layerdrop = 0.5
    engine = train(model, **{"zero.stage": 3})
    assert len(engine.chain.layers) == 1
    told = {finding.path: finding.message for finding in engine.findings}
    assert told["zero.stage"].endswith(
        "the setting model.decoder.layerdrop=0.5 leaves out blocks at random; set it to 0"
    )
