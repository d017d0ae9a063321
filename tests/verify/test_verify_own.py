"""Two configs on a user's own model and batch: the same run where it is one, and what differs where it is not."""

from __future__ import annotations

import json
from collections import namedtuple
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import compat
from bridge import trace
from bridge.cli import run as stagebridge
from bridge.engine.plain import BACKENDS
from bridge.engine.rows import Rows
from bridge.errors import BridgeError, SourceError
from bridge.trace.batch_file import Kept, read_batch
from bridge.verify.judge import Report
from bridge.verify.on_batch import Given, judge_on_batch
from bridge.verify.own import engines_of, pair_configs

needs_transformers = pytest.mark.skipif(
    find_spec("transformers") is None, reason="transformers is not installed"
)
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 48,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
}
ZERO = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "eps": 1e-6, "weight_decay": 0.0}},
    "zero_optimization": {"stage": 1},
    "gradient_clipping": 1.0,
}
MEGATRON = """
--num-layers 2 --hidden-size 16 --num-attention-heads 2 --ffn-hidden-size 32 --seq-length 32 --max-position-embeddings 32
--vocab-size 48 --swiglu --normalization RMSNorm --norm-epsilon 1e-6 --position-embedding-type rope --rotary-base 10000
--disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --micro-batch-size 2
--global-batch-size 8 --train-iters 100 --lr 1e-3 --min-lr 1e-3 --lr-decay-style constant --weight-decay 0.0 --clip-grad 1.0
--adam-beta2 0.999 --adam-eps 1e-6 --tensor-model-parallel-size 2
"""


def sample() -> dict[str, torch.Tensor]:
    """A batch as a loop of Hugging Face has it: rows of several lengths, one of them padded on the left."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(2, 48, (8, 12), generator=generator)
    mask = (torch.arange(12) < torch.randint(5, 13, (8, 1), generator=generator)).long()
    mask[3] = mask[3].flip(0)
    labels = tokens.masked_fill(mask == 0, -100)
    labels[3, int(mask[3].argmax())] = -100  # what comes before it is padding, which sees nothing
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def found(
    rank: int,
    world: int,
    folder: Path,
    sources: tuple[tuple[str, Any], tuple[str, Any]],
    on: tuple[str, str] | None,
) -> Report:
    """The report on two configs, without tensors."""
    versions = {"deepspeed": "0.19.8", "megatron": "0.16.1"}
    first, second = (
        compat.load(name).read(content, version=versions[name], world_size=2)
        for name, content in sources
    )
    known = {**compat.backends(), **BACKENDS}
    engines = engines_of((first, second), on, known)
    pair = pair_configs((first, second), engines, world)
    model = compat.load("huggingface").read(json.loads((folder / "config.json").read_text()))
    rows = Rows.of("batch", read_batch(folder / "batch.safetensors").tensors)
    report = judge_on_batch(pair, engines, Given(folder, model, rows), 2, lambda line: None)
    return replace(report, rows=tuple(replace(row, measured=None) for row in report.rows))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model without weights, and a batch."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert trace.batch(tmp_path / "batch.safetensors", sample())
    return tmp_path


@needs_transformers
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
@pytest.mark.parametrize("on", [("torch", "deepspeed"), ("ddp", "fsdp2")])
def test_one_recipe_is_the_same_run_on_every_engine(
    on: tuple[str, str], run: Any, folder: Path
) -> None:
    report = run(2, found, folder, (("deepspeed", ZERO), ("deepspeed", ZERO)), on)[0]
    assert report.verdict == "same" and not report.lacking, report
    assert [row.verdict for row in report.rows] == ["reference", "same", "same", "same"]


@needs_transformers
@pytest.mark.skipif(find_spec("megatron") is None, reason="Megatron-Core is not installed")
@pytest.mark.parametrize(("flags", "verdict"), [("", "same"), ("--rotary-base 500000", "differs")])
def test_megatron_trains_the_users_own_weights_under_masks(
    flags: str, verdict: str, run: Any, folder: Path
) -> None:
    sources = (
        ("deepspeed", ZERO),
        ("megatron", MEGATRON.replace("--rotary-base 10000", flags or "--rotary-base 10000")),
    )
    report = run(2, found, folder, sources, ("fsdp2", "megatron"))[0]
    assert report.verdict == verdict, report
    if flags:
        assert (
            "model.rotary.base: found 500000" in report.rows[-1].cause
            and "10000" in report.rows[-1].cause
        )


@needs_transformers
@pytest.mark.skipif(find_spec("megatron") is None, reason="Megatron-Core is not installed")
def test_padding_that_engines_take_in_their_own_ways_is_refused(folder: Path) -> None:
    tensors = sample()
    tensors["labels"][3] = tensors["input_ids"][3]
    given = Given(folder, compat.load("huggingface").read(LLAMA), Rows.of("batch", tensors))
    (line,) = given.refusals({"source": compat.backends()["megatron"]})
    assert line.startswith(
        "megatron: attention_mask: row 3 has losses at tokens that cannot attend to any token"
    )


@needs_transformers
def test_another_setting_is_named(run: Any, folder: Path) -> None:
    other = {**ZERO, "gradient_clipping": 0.1}
    report = run(2, found, folder, (("deepspeed", ZERO), ("deepspeed", other)), ("ddp", "torch"))[0]
    assert report.verdict == "differs"
    assert all(
        "optimizer.clip changed from 1.0 to 0.1" in row.cause
        for row in report.rows
        if row.verdict == "differs"
    )


Named = namedtuple("Named", "tokens targets")
TOKENS = torch.arange(24).view(2, 12)
SHAPES: Mapping[str, tuple[Any, dict[str, Any], set[str]]] = {
    "a dict": (
        {"input_ids": TOKENS, "labels": TOKENS, "use_cache": False},
        {},
        {"input_ids", "labels"},
    ),
    "a tuple": ((TOKENS, TOKENS), {}, {"0", "1"}),
    "a named tuple": (Named(TOKENS, TOKENS), {}, {"tokens", "targets"}),
    "one tensor and labels by name": (TOKENS, {"labels": TOKENS}, {"0", "labels"}),
    "arrays within": ({"inputs": {"ids": TOKENS.numpy()}}, {}, {"inputs.ids"}),
}


@pytest.mark.parametrize("name", SHAPES)
def test_batches_of_every_form_are_kept(name: str, tmp_path: Path) -> None:
    values, more, names = SHAPES[name]
    path = tmp_path / "batch.safetensors"
    assert trace.batch(path, values, **more) and not trace.batch(path, values, **more), (
        "the first one alone is written"
    )
    kept = read_batch(path)
    assert set(kept.tensors) == names and all(
        torch.equal(tensor, TOKENS) for tensor in kept.tensors.values()
    )
    assert dict(kept.values) == ({"use_cache": False} if name == "a dict" else {})


def test_what_cannot_be_kept_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    path = tmp_path / "batch.safetensors"
    with pytest.raises(BridgeError) as error:
        trace.batch(
            path, {"input_ids": TOKENS, "loader": object(), "sparse": torch.eye(3).to_sparse()}
        )
    assert (
        len(error.value.problems) == 2
        and "loader: found object" in str(error.value)
        and "sparse" in str(error.value)
    )
    assert not list(tmp_path.iterdir())


def test_labels_stand_at_their_own_token_and_targets_before_it() -> None:
    labels = TOKENS.clone()
    labels[:, :3] = -100
    for tensors in ({"input_ids": TOKENS, "labels": labels}, {"0": TOKENS, "1": labels}):
        rows = Rows.of("batch", tensors)
        assert (
            rows.targets[0, 1].item() == -100
            and rows.targets[0, 2].item() == 3
            and rows.targets[0, -1].item() == -100
        )
    after = torch.cat([TOKENS[:, 1:], torch.full((2, 1), 7)], 1)
    for tensors in ({"0": TOKENS, "1": after}, {"tokens": TOKENS, "targets": after}):
        assert torch.equal(Rows.of("batch", tensors).targets, after)


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"pixel_values": torch.ones(2, 3)}, "expected a tensor input_ids of token numbers"),
        ({"input_ids": torch.ones(2, 3)}, "expected whole numbers of shape (rows, tokens)"),
        (
            {"input_ids": TOKENS, "decoder_input_ids": TOKENS},
            "decoder_input_ids: found int64 (2, 12), which no engine accepts",
        ),
        (
            {"input_ids": TOKENS, "attention_mask": torch.ones(2, 1, 12, 12)},
            "expected a whole number for each of (2, 12)",
        ),
        ({"input_ids": TOKENS, "labels": TOKENS[:, 1:]}, "labels: found int64 (2, 11)"),
    ],
)
def test_a_batch_that_no_engine_takes_is_refused(
    tensors: dict[str, torch.Tensor], said: str
) -> None:
    with pytest.raises(SourceError, match=r".") as error:
        Rows.of("batch", Kept(tensors).tensors)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["a.json", "b.json"], "a second config needs --model FOLDER too"),
        (["a.json", "--to", "megatron", "--model", "."], "--model: needs a second config"),
        (["a.json"], "expected --to DIALECT, or a second config"),
        (["a.json", "b.json", "--model", "nowhere", "--batch", "x"], "config.json: not found"),
    ],
)
def test_half_of_what_it_takes_is_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert stagebridge(["verify", *words]) == 1
    assert said in " ".join(capsys.readouterr().err.split())
