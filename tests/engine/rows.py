"""Small models of transformers that are more than one row of blocks over words (encoders and decoders, two towers, encoders of
images and sound, shared blocks), run in layers and compared with plain transformers in fp64.

`python -m tests.engine.rows [NAME ...]` builds each with random weights and prints a table: its layers and rows, how far the
layers run one by one are from the model, and the largest error of losses and gradients in the first step of a training over two
pipeline ranks in 1F1B, in interleaved stages, and over two data ranks at ZeRO 3.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from bridge.engine import initialize
from bridge.engine.gradients import MISSING
from bridge.engine.layers import Arguments
from bridge.engine.models.blocks import Blocks
from bridge.engine.models.cutting import cut_of
from bridge.plan.plan import Plan
from tests.engine.blocks import FP64, MICROBATCHES, RATE, Steps, errors, good

WORDS, SIZE = 64, 32
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
WIDTH = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
TEXT = {**WIDTH, "vocab_size": WORDS, "max_position_embeddings": 64, "embedding_size": 16, **ENDS}
IMAGE = {**WIDTH, "image_size": SIZE, "patch_size": 8}
PAIR = {
    **ENDS,
    **{
        f"{part}_{name}": size
        for part in ("encoder", "decoder")
        for name, size in (("layers", 3), ("ffn_dim", 48))
    },
    **{
        f"{part}_{name}": size
        for part in ("encoder", "decoder")
        for name, size in (("attention_heads", 4), ("layerdrop", 0.0))
    },
    "vocab_size": WORDS,
    "d_model": 32,
    "max_position_embeddings": 64,
    "forced_eos_token_id": None,
}
T5 = {
    "vocab_size": WORDS,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 3,
    "num_heads": 4,
    **ENDS,
}
CONVOLUTIONS = {
    "conv_dim": (16,) * 7,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}
SOUND = {**TEXT, **CONVOLUTIONS, "apply_spec_augment": False}
STAGES = {"depths": [1, 1, 2, 1], "hidden_sizes": [8, 12, 16, 20], "image_size": SIZE}
HEARD = {
    "max_source_positions": 200,
    "max_target_positions": 64,
    "conv_channels": 32,
    "input_feat_per_channel": 8,
}
LXMERT = {"l_layers": 2, "x_layers": 2, "r_layers": 2, "visual_feat_dim": 16, "num_qa_labels": 5}
SEEN = {
    **STAGES,
    "hidden_sizes": [8, 16, 16, 32],
    "num_attention_heads": [1, 2, 2, 4],
    "decoder_hidden_size": 32,
}
SWIN = {
    "image_size": SIZE,
    "patch_size": 2,
    "embed_dim": 8,
    "depths": [2, 2, 2],
    "num_heads": [1, 2, 4],
    "window_size": 4,
}
CLIP = {"text_config": {**TEXT, "eos_token_id": 63}, "vision_config": IMAGE, "projection_dim": 16}
ALT = {"text_config": {**TEXT, "project_dim": 16}, "vision_config": IMAGE, "projection_dim": 16}
MODELS: Mapping[str, tuple[str, str, Mapping[str, Any], tuple[str, ...]]] = {
    "albert": ("AlbertForMaskedLM", "AlbertConfig", TEXT, ("words",)),
    "altclip": ("AltCLIPModel", "AltCLIPConfig", ALT, ("words", "image")),
    "bart": ("BartForConditionalGeneration", "BartConfig", PAIR, ("words", "answer")),
    "blenderbot": (
        "BlenderbotForConditionalGeneration",
        "BlenderbotConfig",
        PAIR,
        ("words", "answer"),
    ),
    "clip": ("CLIPModel", "CLIPConfig", CLIP, ("words", "image")),
    "convnext": ("ConvNextForImageClassification", "ConvNextConfig", STAGES, ("image",)),
    "dinov2": ("Dinov2ForImageClassification", "Dinov2Config", IMAGE, ("image",)),
    "hubert": ("HubertForCTC", "HubertConfig", SOUND, ("sound",)),
    "lxmert": (
        "LxmertForQuestionAnswering",
        "LxmertConfig",
        {**TEXT, **LXMERT},
        ("words", "regions"),
    ),
    "m2m100": ("M2M100ForConditionalGeneration", "M2M100Config", PAIR, ("words", "answer")),
    "marian": ("MarianMTModel", "MarianConfig", PAIR, ("words", "answer")),
    "mt5": ("MT5ForConditionalGeneration", "MT5Config", T5, ("words", "answer")),
    "pegasus": ("PegasusForConditionalGeneration", "PegasusConfig", PAIR, ("words", "answer")),
    "resnet": (
        "ResNetForImageClassification",
        "ResNetConfig",
        {**STAGES, "embedding_size": 8},
        ("image",),
    ),
    "segformer": ("SegformerForImageClassification", "SegformerConfig", SEEN, ("image",)),
    "speech2text": (
        "Speech2TextForConditionalGeneration",
        "Speech2TextConfig",
        {**PAIR, **HEARD},
        ("speech", "answer"),
    ),
    "swin": ("SwinForImageClassification", "SwinConfig", SWIN, ("image",)),
    "t5": ("T5ForConditionalGeneration", "T5Config", T5, ("words", "answer")),
    "vit": ("ViTForImageClassification", "ViTConfig", IMAGE, ("image",)),
    "wav2vec2": ("Wav2Vec2ForCTC", "Wav2Vec2Config", SOUND, ("sound",)),
}
"""The model's class, its configuration's, what is set in that, and what it takes."""
CASES: Mapping[str, Mapping[str, Any]] = {
    "1F1B": {"parallel.pipeline": 2, "schedule.name": "1f1b"},
    "interleaved": {
        "parallel.pipeline": 2,
        "schedule.name": "interleaved_1f1b",
        "schedule.virtual": 2,
    },
    "ZeRO 3": {"zero.stage": 3},
}


def small(name: str) -> nn.Module:
    """A small model with random weights and without dropout."""
    import transformers

    kind, config, values, _ = MODELS[name]
    made = getattr(transformers, config)(**values)
    for part in (
        made,
        *(getattr(made, each) for each in ("text_config", "vision_config") if hasattr(made, each)),
    ):
        for key, value in part.to_dict().items():
            if "drop" in key and isinstance(value, float):
                setattr(part, key, 0.0)
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, kind)(made).double()
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.momentum = 0.0
    return model


def batches(name: str, step: int = 0) -> list[dict[str, Tensor]]:
    """Microbatches of a step."""
    by = torch.Generator().manual_seed(100 + step)
    made = {
        "words": lambda: {"input_ids": torch.randint(3, WORDS, (2, 9), generator=by)},
        "answer": lambda: {"decoder_input_ids": torch.randint(3, WORDS, (2, 7), generator=by)},
        "image": lambda: {"pixel_values": torch.randn(2, 3, SIZE, SIZE, generator=by)},
        "sound": lambda: {"input_values": torch.randn(2, 1600, generator=by)},
        "speech": lambda: {"input_features": torch.randn(2, 40, 8, generator=by)},
        "regions": lambda: {
            "visual_feats": torch.randn(2, 6, 16, generator=by),
            "visual_pos": torch.rand(2, 6, 4, generator=by),
        },
    }
    kinds = MODELS[name][3]
    return [
        {key: value for kind in kinds for key, value in made[kind]().items()}
        for _ in range(MICROBATCHES)
    ]


def probe(output: Any, targets: Any = None) -> Tensor:
    """A loss to which every number of an output counts, each otherwise."""
    leaves = [
        leaf.double()
        for leaf in tree_leaves(output)
        if isinstance(leaf, Tensor) and leaf.is_floating_point()
    ]
    weights = [
        torch.linspace(0.1, 1, leaf.numel(), dtype=leaf.dtype).view(leaf.shape) for leaf in leaves
    ]
    return torch.stack(
        [(leaf * weight).mean() for leaf, weight in zip(leaves, weights, strict=True)]
    ).sum()


def wide(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A batch in the model's format."""
    found: dict[str, Tensor] = tree_map_only(
        Tensor, lambda leaf: leaf.to(FP64.get(leaf.dtype, leaf.dtype)), dict(batch)
    )
    return found


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """The gradient of every weight; zeros for one that has none."""
    named = model.named_parameters()
    return {
        name: torch.zeros_like(weight) if weight.grad is None else weight.grad.clone()
        for name, weight in named
    }


def one_by_one(name: str) -> tuple[float, int, int]:
    """The largest error of output and gradients of the layers run one by one, each apart; the numbers of layers and rows."""
    model, batch = small(name).train(), wide(batches(name)[0])
    whole = model(**batch)
    probe(whole).backward()
    expected = gradients(model)
    model.zero_grad()
    given = Arguments((), batch)
    cut = cut_of(model, given)
    blocks, value = Blocks(model, cut), None
    for layer in blocks.chain().layers:
        value = layer(given if value is None else blocks.receive_stream(value.tensors, given))
    probe(value).backward()
    found, wanted = (
        (float(probe(each).detach()), of)
        for each, of in ((value, gradients(model)), (whole, expected))
    )
    return errors([found], [wanted])[0], len(cut.layers), len(cut.rows) - 1


def plain(name: str) -> Steps:
    """A step in one process with nothing but transformers."""
    model, total = small(name).train(), 0.0
    for batch in batches(name):
        loss = probe(model(**wide(batch)))
        (loss / MICROBATCHES).backward()
        total += float(loss.detach())
    return [(total / MICROBATCHES, gradients(model))]


def in_ranks(rank: int, world: int, name: str, values: Mapping[str, Any]) -> Steps:
    """The same step on the engine with a bare rate, so that the change of a weight is its gradient."""
    plan = {"precision.compute": "fp64", "optimizer.name": "sgd", "optimizer.lr": RATE, **values}
    parts, given = plan.get("parallel.pipeline", 1), [wide(batch) for batch in batches(name)]
    accumulation = MICROBATCHES * parts // world
    engine = initialize(
        small(name),
        Plan.of({**plan, "batch.accumulation": accumulation}),
        probe,
        seed=5,
        sample=given[0],
    )
    assert len(engine.chain.layers) > 2
    before = {key: weight.clone() for key, weight in engine.state_dict()}
    loss = engine.train_batch(given[engine.data.index :: engine.data.size])
    after = {key: weight.clone() for key, weight in engine.state_dict()}
    engine.comm.ledger.clear()
    engine.train_batch(given[engine.data.index :: engine.data.size])
    # Only a backward pass tells which parameters it reaches, so the search for others is not known beforehand.
    sent = {what: one for what, one in engine.comm.ledger.totals.items() if what != MISSING}
    assert sent == engine.traffic(1), "what a step sends is known beforehand"
    assert engine.bytes() == engine.layout.bytes()
    return [(loss, {key: (before[key] - after[key]) / RATE for key in after})]


def dropped(rank: int, world: int, name: str, values: Mapping[str, Any]) -> list[float]:
    """The losses of two steps with dropout."""
    plan = {"precision.compute": "fp64", "optimizer.name": "sgd", "optimizer.lr": RATE, **values}
    parts = plan.get("parallel.pipeline", 1)
    model = small(name)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.2
    given = [wide(batch) for batch in batches(name)]
    engine = initialize(
        model, Plan.of({**plan, "batch.accumulation": MICROBATCHES * parts // world}), probe, seed=5
    )
    return [engine.train_batch(given[engine.data.index :: engine.data.size]) for _ in range(2)]


def main(names: list[str]) -> int:
    """Print the table; 1 if anything is further away than wanted."""
    from tests.engine.pool import Pool

    pool, failed = Pool(2), 0
    print(f"| model | layers | rows | one by one | {' | '.join(CASES)} |")
    print("|---" * (4 + len(CASES)) + "|")
    for name in names or MODELS:
        apart, layers, rows = one_by_one(name)
        expected, cells = plain(name), []
        for values in CASES.values():
            try:
                found = errors(pool.run(in_ranks, name, values, timeout=300)[0], expected)
                cells.append(f"{found[0]:.0e}")
                failed += not good(found)
            except Exception as error:
                cells.append(str(error).strip().splitlines()[-1][:200])
                failed += 1
        print(f"| {name} | {layers} | {rows} | {apart:.0e} | {' | '.join(cells)} |", flush=True)
    pool.close()
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
