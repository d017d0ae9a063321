"""Configs of GPT-NeoX, which are a DeepSpeed file and flags of Megatron in one."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from bridge.cli import run

pytestmark = pytest.mark.once
MODEL = """\
{
  "pipe-parallel-size": 1,
  "model-parallel-size": 2,
  "num-layers": 12,
  "hidden-size": 768,
  "num-attention-heads": 12,
  "seq-length": 2048,
  "max-position-embeddings": 2048,
  "pos-emb": "rotary",
  "no-weight-tying": true,
  "train_micro_batch_size_per_gpu": 4,
  "gradient_accumulation_steps": 8,
  "gradient_clipping": 0.5,
}
"""
TRAINING = """\
{
  "optimizer": {"type": "Adam", "params": {"lr": 0.0006, "betas": [0.9, 0.95], "eps": 1.0e-8}},
  "min_lr": 0.00006,
  "zero_optimization": {"stage": 1},
  "fp16": {"fp16": true, "enabled": true, "loss_scale": 0},
  "train-iters": 3200,
  "lr-decay-style": "cosine",
  "warmup": 0.01,
  "checkpoint-activations": true,
}
"""
WHOLE = MODEL.rstrip("}\n") + TRAINING.lstrip("{")


def settings(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found = json.loads(capsys.readouterr().out)
    return {row["setting"]: (row["value"], row["winner"]["line"]) for row in found["settings"]}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("m.yml").write_text(WHOLE)


def test_one_file_is_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["resolve", "m.yml", "--world-size", "8", "--json"]) == 2
    rows = settings(capsys)
    assert rows["num_layers"] == (12, 4) and rows["lr"] == (0.0006, 14)
    assert rows["gradient_clipping"] == (0.5, 13) and rows["zero_optimization.stage"] == (1, 16)
    assert rows["global_batch_size"][0] == 4 * 8 * 4
    assert rows["weight_decay"] == (0.1, None)  # GPT-NeoX's own default
    assert run(["convert", "m.yml", "--to", "megatron", "--world-size", "8", "-o", "m.args"]) == 2
    flags = Path("m.args").read_text().split()
    pairs = dict(pairwise(flags))
    assert pairs["--num-layers"] == "12" and pairs["--weight-decay"] == "0.1"
    assert pairs["--clip-grad"] == "0.5" and pairs["--hidden-dropout"] == "0.0"
    assert pairs["--global-batch-size"] == "128" and "--fp16" in flags
    capsys.readouterr()
    assert run(["layout", "m.yml", "--world-size", "8"]) == 0
    assert "12 layers, hidden 768" in capsys.readouterr().out
    assert run(["diff", "m.yml", "m.yml"]) == 0


def test_files_of_a_launch_are_merged(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.yml").write_text(MODEL)
    Path("b.yml").write_text(TRAINING)
    Path("run.sh").write_text("python ./deepy.py train.py a.yml b.yml\n")
    assert run(["resolve", "run.sh", "--world-size", "8", "--json"]) == 2
    rows = settings(capsys)
    assert rows["num_layers"][0] == 12 and rows["lr"][0] == 0.0006
    Path("b.yml").write_text(TRAINING.replace('"min_lr"', '"gradient_clipping": 1.0, "min_lr"'))
    assert run(["check", "run.sh"]) == 1
    assert "given in two files" in capsys.readouterr().err
    Path("c.yml").write_text("{data-path: d, vocab-file: v, merge-file: m, train-iters: 9}")
    assert run(["check", "c.yml"]) == 1
    assert "as one part sets up no model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("written", "instead", "code", "says"),
    [
        # EleutherAI/gpt-neox#1432: what equals its default does not reach DeepSpeed.
        ('"gradient_clipping": 0.5', '"gradient_clipping": 1.0', 2, "leaves out what equals its own default"),
        ('"no-weight', '"gpt_j_residual": true, "no-weight', 2, "gpt_j_residual"),
        ('"no-weight', '"use_mup": true, "no-weight', 2, "use_mup"),
        ('"no-weight', '"use_mup": false, "no-weight', 2, ""),
        ('"no-weight', '"no_weight_typing": 1, "no-weight', 1, "no key of GPT-NeoX, which stops at it"),
        ('"stage": 1', '"stage": 2', 1, "refuses ZeRO stages 2 and 3"),
        ('"cosine"', '"linear"', 2, "is cut off at min_lr"),
        ('"no-weight', '"attention_config": ["flash", "mamba"], "no-weight', 2, "attention_config"),
        ('"fp16": {"fp16"', '"bf16": {"bf16"', 2, "loss_scale: keys of fp16 only"),
    ],
)  # fmt: skip
def test_what_is_not_as_it_looks(
    capsys: pytest.CaptureFixture[str], written: str, instead: str, code: int, says: str
) -> None:
    Path("m.yml").write_text(WHOLE.replace(written, instead))
    assert run(["check", "m.yml"]) == code
    assert says in " ".join("".join(capsys.readouterr()).split())


@pytest.mark.parametrize(
    ("key", "flag", "value"),
    [
        ('"activation": "swiglu", "mlp_multiple_of": 256', "--ffn-hidden-size", "1024"),
        ('"norm": "rmsnorm", "rms_norm_epsilon": 1.0e-6', "--norm-epsilon", "1e-06"),
        ('"init_method": "small_init"', "--init-method-std", "0.02282177322938192"),
        ('"num_kv_heads": 4', "--num-query-groups", "4"),
        ('"lr_decay_fraction": 0.5', "--lr-decay-iters", "1600"),
    ],
)
def test_derived_settings(key: str, flag: str, value: str) -> None:
    Path("m.yml").write_text(WHOLE.replace('"no-weight', f'{key}, "no-weight'))
    words = ["convert", "m.yml", "--to", "megatron", "--world-size", "8", "-o", "m.args"]
    assert run(words) in (0, 2)
    flags = Path("m.args").read_text().split()
    assert dict(pairwise(flags))[flag] == value


@pytest.mark.parametrize(
    ("layers", "code"), [('["mamba"]', 2), ('["mamba", "global"]', 1), ('["global"]', 1)]
)
def test_heads_count_only_with_attention(layers: str, code: int) -> None:
    more = f'"attention_config": [[{layers}, "all"]], "no-weight'
    Path("m.yml").write_text(WHOLE.replace("768", "1024").replace('"no-weight', more))
    assert run(["check", "m.yml"]) == code
    words = ["convert", "m.yml", "--to", "megatron", "--world-size", "8", "-o", "m.args"]
    assert run(words) == code


@pytest.mark.parametrize(
    "line",
    [
        "optimizer: adam", "optimizer: {params: 3}", "optimizer: {params: {betas: 3}}", "pipe_parallel_size: x",
        "hidden_size: [1]", "hidden_size: null", "train_batch_size: a", "fp16: true", "model_parallel_size: 0",
        "attention_config: 3",
    ],
)  # fmt: skip
def test_a_value_of_another_kind_is_an_error_with_its_key(
    line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "pipe_parallel_size": 1}
    name = line.partition(":")[0]
    rest = [f"{key}: {value}" for key, value in sizes.items() if key != name]
    (tmp_path / "a.yml").write_text("\n".join([*rest, line]))
    assert run(["check", str(tmp_path / "a.yml"), "--world-size", "8"]) == 1
    err = capsys.readouterr().err
    assert name in err and "expected" in err


@pytest.mark.parametrize(("release", "code"), [("0.15.0", 2), ("0.19.8", 1)])
def test_the_release_of_deepspeed_reaches_the_file(
    capsys: pytest.CaptureFixture[str], release: str, code: int
) -> None:
    half = '"bf16": {"enabled": true, "loss_scale": 0}'
    text = WHOLE.replace('"fp16": {"fp16": true, "enabled": true, "loss_scale": 0}', half)
    Path("m.yml").write_text(text)
    words = ["m.yml", "--world-size", "8", "--from-version", release]
    assert run(["resolve", *words, "--json"]) == code
    stops = json.loads(capsys.readouterr().out)["stops"]
    assert [one["setting"] for one in stops] == (["bf16.loss_scale"] if code == 1 else [])
    Path("m.yml").write_text(WHOLE.replace('"gradient_clipping": 0.5', '"gradient_clipping": 1.0'))
    run(["check", *words, "--json"])
    clips = [
        one["message"]
        for one in json.loads(capsys.readouterr().out)["findings"]
        if one["path"] == "gradient_clipping"
    ]
    assert any("GPT-NeoX leaves out" in one for one in clips) is (release == "0.15.0")
    assert run(["resolve", *words[:-1], "0.99.0"]) == 1
    assert "unknown release 0.99.0" in capsys.readouterr().err
