"""`match` names each contradiction between a launch and the model that it loads, and nothing else."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from bridge.cli import run
from bridge.errors import BridgeError
from tests.common.launched_models import SPELLED, judge, wrong_pairs

OWN = {
    "untie_embeddings_and_output_weights": "untie_embeddings_and_output_weights",
    "disable_bias_linear": "add_bias_linear",
    "apply_layernorm_1p": "layernorm_zero_centered_gamma",
}
"""Settings for which a flag stands that has another name."""


def test_generated_contradictions_are_named_and_mended(tmp_path: Path) -> None:
    counts: Counter[str] = Counter()
    assert list(wrong_pairs(range(60), tmp_path, counts)) == []
    assert counts["clean"] == 60 and counts["planted"] > 100
    assert counts["planted, in a launch that Megatron refuses"] < 6


def test_launches_and_models_of_the_facts(whole: Path, tmp_path: Path) -> None:
    """No word of what is allowed, every contradiction by its setting; some launches Megatron itself refuses."""
    rows = [*map(json.loads, (whole / "truth/sources/match.jsonl").read_text().splitlines())]
    refused, wrong = 0, []
    for row in rows:
        flags: dict[str, Any] = {}
        for word in row["flags"]:
            if word.startswith("--"):
                flag, flags[word[2:]] = word[2:], True
            else:
                flags[flag] = word
        try:
            found = judge(flags, row["hf"], tmp_path)
        except BridgeError:
            refused += 1
            continue
        named = {path for one in found.findings for path in (one.path, *one.about)}
        names = [one["setting"][2:].replace("-", "_") for one in row["truth"]]
        missing = [
            name for name in names if named.isdisjoint(SPELLED.get(name, {OWN.get(name, name)}))
        ]
        if missing or (row["clean"] and found.contradictions):
            wrong.append((row["id"], row["arch"], missing, sorted(named)))
    assert wrong == [] and refused <= len(rows) // 8


MODEL = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
    "num_key_value_heads": 4, "vocab_size": 128, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
}  # fmt: skip
LAUNCH = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 128 --vocab-size 128 --seq-length 32 "
    "--max-position-embeddings 32 --position-embedding-type rope --normalization RMSNorm --swiglu --hidden-dropout 0 "
    "--attention-dropout 0 --disable-bias-linear --micro-batch-size 1 --global-batch-size 2 --lr 1e-4 --train-iters 5 "
)


def test_the_settings_to_paste_are_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    launch = tmp_path / "launch.args"
    launch.write_text(f"{LAUNCH} --norm-epsilon 1e-6 --untie-embeddings-and-output-weights")
    assert run(["match", str(launch), str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("fits\n")
    launch.write_text(f"{LAUNCH} --add-qkv-bias")
    assert run(["match", str(launch), str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == (
        "does not fit: the weights do not fit (2); the weights load, but the run computes another function (1)"
    )
    words = "--norm-epsilon 1e-06 and without --add-qkv-bias"
    assert lines[-2:] == [
        "With these settings it fits:",
        f"  --untie-embeddings-and-output-weights {words}",
    ]
    assert run(["match", str(launch), str(tmp_path), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["settings"] == {
        "add_qkv_bias": None,
        "untie_embeddings_and_output_weights": True,
        "layernorm_epsilon": 1e-6,
    }


def test_the_text_decoder_of_a_model_with_several_parts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = {"model_type": "llava", "text_config": MODEL, "vision_config": {"hidden_size": 8}}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    launch = tmp_path / "launch.args"
    launch.write_text(f"{LAUNCH} --norm-epsilon 1e-6 --untie-embeddings-and-output-weights")
    assert run(["match", str(launch), str(tmp_path)]) == 0
    launch.write_text(f"{LAUNCH} --norm-epsilon 1e-5 --untie-embeddings-and-output-weights")
    assert run(["match", str(launch), str(tmp_path)]) == 2
    assert "layernorm_epsilon (line 1, --norm-epsilon) 1e-05 -> 1e-06" in capsys.readouterr().out


def test_a_config_without_a_model_is_no_match(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ds.json").write_text('{"train_batch_size": 8}')
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    assert run(["match", str(tmp_path / "ds.json"), str(tmp_path)]) == 1
    assert "found no size of a model" in capsys.readouterr().err
