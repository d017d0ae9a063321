"""Quantized weights are read as transformers reads them, or refused; they are never taken for weights."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import _convert_moe_packed_tensors
from typer.testing import CliRunner

from bridge.checkpoint import formats
from bridge.cli.app import app
from bridge.errors import SourceError
from bridge.report.exit_codes import Exit


def written(folder: Path, tensors: dict[str, torch.Tensor], config: Any = None) -> Path:
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_scales_of_blocks_give_what_transformers_gives(tmp_path: Path) -> None:
    random, theirs = Random(0), Fp8Dequantize(None)
    for turn in range(60):
        height, width, rows, columns = (random.randint(1, 6) for _ in range(4))
        lead = random.choice([(), (3,)])
        kind = random.choice([torch.float8_e4m3fn, torch.float8_e5m2])
        weight = torch.randn(*lead, height * rows, width * columns).to(kind)
        scales = torch.rand(*lead, height, width).to(random.choice([torch.float32, torch.bfloat16]))
        place = written(tmp_path / str(turn), {"a.weight": weight, "a.weight_scale_inv": scales})
        hub = formats.read_checkpoint(place)
        (held,) = hub.parameters.values()
        truth = theirs._dequantize_one(weight, scales, torch.bfloat16)
        assert list(hub.parameters) == ["a.weight"] and not hub.buffers
        assert torch.equal(held.weight.whole(), truth)
        start, stop = sorted(random.randint(0, truth.numel()) for _ in range(2))
        assert torch.equal(held.weight.flat(start, stop), truth.reshape(-1)[start:stop])


def test_a_last_block_that_is_smaller_needs_the_size_of_the_config(tmp_path: Path) -> None:
    weight, scales = torch.randn(9, 8).to(torch.float8_e4m3fn), torch.rand(3, 2)
    tensors = {"a.weight": weight, "a.weight_scale_inv": scales}
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [4, 4]}}
    hub = formats.read_checkpoint(written(tmp_path / "one", tensors, config))
    wide = scales.repeat_interleave(4, 0)[:9].repeat_interleave(4, 1)
    truth = (weight.float() * wide).bfloat16()
    assert torch.equal(hub.parameters["a.weight"].weight.whole(), truth)
    config["quantization_config"]["weight_block_size"] = [3, 4]
    assert formats.read_checkpoint(written(tmp_path / "two", tensors, config)).parameters
    for name, sizes in (("three", [2, 4]), ("four", [16, 16])):
        config["quantization_config"]["weight_block_size"] = sizes
        with pytest.raises(SourceError, match=r"a\.weight: .*expected one for each block"):
            formats.read_checkpoint(written(tmp_path / name, tensors, config))


def test_packed_experts_give_what_transformers_gives(tmp_path: Path) -> None:
    random = Random(0)
    for turn in range(40):
        experts, outputs, count = (random.randint(1, 4) for _ in range(3))
        blocks = torch.randint(0, 256, (experts, outputs, count, 16), dtype=torch.uint8)
        scales = torch.randint(110, 140, (experts, outputs, count), dtype=torch.uint8)
        bias = torch.randn(experts, outputs)
        tensors = {
            "e.down_proj_blocks": blocks,
            "e.down_proj_scales": scales,
            "e.down_proj_bias": bias,
        }
        hub = formats.read_checkpoint(written(tmp_path / str(turn), tensors))
        truth = _convert_moe_packed_tensors(blocks, scales)
        assert sorted(hub.parameters) == ["e.down_proj", "e.down_proj_bias"] and not hub.buffers
        held = hub.parameters["e.down_proj"].weight
        assert held.shape == tuple(truth.shape) and torch.equal(held.whole(), truth)
        start, stop = sorted(random.randint(0, truth.numel()) for _ in range(2))
        assert torch.equal(held.flat(start, stop), truth.reshape(-1)[start:stop])


@pytest.mark.parametrize(
    "tensors",
    [
        {
            "a.qweight": (torch.int32, 2),
            "a.qzeros": (torch.int32, 2),
            "a.scales": (torch.float16, 2),
        },
        {"a.weight": (torch.int8, 2), "a.SCB": (torch.float32, 1)},
        {"a.weight": (torch.uint8, 2), "a.weight.absmax": (torch.float32, 1)},
        {"a.weight": (torch.float8_e4m3fn, 2), "a.weight_scale": (torch.float32, 1)},
        {"a.weight": (torch.float8_e4m3fn, 2), "a.weight_scale_inv": (torch.float32, 1)},
        {"a.weight_packed": (torch.int32, 2), "a.weight_scale": (torch.bfloat16, 2)},
        {"a.weight_blocks": (torch.uint8, 3), "a.weight_scales": (torch.uint8, 2)},
    ],
)
def test_other_ways_are_refused_with_the_name_of_the_weight(tmp_path: Path, tensors: Any) -> None:
    held = {name: torch.ones([4] * rank).to(kind) for name, (kind, rank) in tensors.items()}
    with pytest.raises(SourceError, match=f"{next(iter(tensors))}'?: found (quantized )?weights"):
        formats.read_checkpoint(written(tmp_path / "model", held))


@pytest.mark.parametrize("to", ["safetensors", "bin", "dcp", "native"])
def test_weights_in_eight_bits_without_scales_are_weights(tmp_path: Path, to: str) -> None:
    tensors = {"a.weight": torch.randn(8, 4).to(torch.float8_e4m3fn), "b.weight": torch.randn(4)}
    place, out = written(tmp_path / "model", tensors), tmp_path / "out"
    assert sorted(formats.read_checkpoint(place).parameters) == ["a.weight", "b.weight"]
    args = ["checkpoint", "convert", str(place), "--to", to, "-o", str(out)]
    if to != "native":
        same = CliRunner().invoke(app, [*args[:-1], str(tmp_path / "same")])
        assert same.exit_code in (Exit.CLEAN, Exit.FINDINGS), same.output
        found = formats.read_checkpoint(tmp_path / "same").parameters["a.weight"].weight.whole()
        assert torch.equal(found.view(torch.uint8), tensors["a.weight"].view(torch.uint8))
    done = CliRunner().invoke(app, [*args, "--dtype", "fp32"])
    assert "precision" not in done.output
    if to == "native":
        assert done.exit_code == Exit.ERROR and "--dtype: found fp32; native" in str(done.exception)
        done = CliRunner().invoke(app, args)
    assert done.exit_code in (Exit.CLEAN, Exit.FINDINGS), done.output
    found = formats.read_checkpoint(out).parameters["a.weight"].best
    assert found.dtype == ("F8_E4M3" if to == "native" else "F32")
    assert torch.equal(found.whole().float(), tensors["a.weight"].float())


def test_torch_opens_files_with_number_formats_that_have_no_storage(tmp_path: Path) -> None:
    kinds = {"e4": torch.float8_e4m3fn, "e5": torch.float8_e5m2}
    kinds |= {"u2": torch.uint16, "u4": torch.uint32, "u8": torch.uint64}
    tensors = {name: torch.arange(6).reshape(2, 3).to(kind) for name, kind in kinds.items()}
    place = written(tmp_path / "model", {**tensors, "w": torch.ones(2, 2)})
    for to in ("bin", "dcp"):
        args = ["checkpoint", "convert", str(place), "--to", to, "-o", str(tmp_path / to)]
        done = CliRunner().invoke(app, args)
        assert done.exit_code in (Exit.CLEAN, Exit.FINDINGS), done.output
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "whole.pt")
    found = torch.load(tmp_path / "bin" / "pytorch_model.bin", weights_only=True)
    whole = torch.load(tmp_path / "whole.pt", weights_only=False)["model"]
    for held in (found, whole):
        for name, tensor in tensors.items():
            assert held[name].dtype == tensor.dtype and held[name].tolist() == tensor.tolist()


def test_the_written_model_is_not_said_to_be_quantized(tmp_path: Path) -> None:
    tensors = {
        "model.embed_tokens.weight": torch.randn(8, 4),
        "model.layers.0.self_attn.q_proj.weight": torch.randn(4, 4).to(torch.float8_e4m3fn),
        "model.layers.0.self_attn.q_proj.weight_scale_inv": torch.rand(2, 2),
    }
    config = {"model_type": "invented", "quantization_config": {"quant_method": "fp8"}}
    place = written(tmp_path / "model", tensors, config)
    args = ["checkpoint", "convert", str(place), "--to", "safetensors", "-o", str(tmp_path / "out")]
    done = CliRunner().invoke(app, args)
    assert done.exit_code == Exit.CLEAN, done.output
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"model_type": "invented"}
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert {held.dtype for held in found.values()} == {torch.float32, torch.bfloat16}
    assert len(found) == 2
