"""What NVIDIA's own bridge makes of models, read as Megatron's arguments, says what Hugging Face's configs of them say."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from math import isclose
from pathlib import Path
from typing import Any

import pytest

import bridge
import compat
from bridge.plan.equality import plain
from bridge.plan.section import Values
from compat.megatron import options

Row = dict[str, Any]
SAMPLE = Path(__file__).parent / "model_sample.jsonl"
RELEASE = "0.19.2"
LATENT = {
    "multi_latent_attention": True,
    "q_lora_rank": 512,
    "kv_lora_rank": 512,
    "rotary_scaling_factor": 40.0,
}
"""Defaults of MLATransformerConfig beside those of the parser."""
OWN = {
    "seq_len_interpolation_factor": "rotary_seq_len_interpolation_factor",
    "rope_scaling": "use_rope_scaling",
    "yarn_rotary_scaling_factor": "rotary_scaling_factor",
}
"""Fields of the bridge's models that Megatron-LM's arguments spell otherwise."""
ACTIVATIONS: Mapping[str, Mapping[str, bool]] = {
    "silu": {"swiglu": True},
    "squared_relu": {"squared_relu": True},
    "quick_gelu": {"quick_geglu": True},
}
WHOLE = ("rotary_base", "rotary_seq_len_interpolation_factor")
RUN = frozenset(
    [
        "bf16",
        "fp16",
        "params_dtype",
        "pipeline_dtype",
        "gradient_accumulation_fusion",
        "cross_entropy_fusion_impl",
    ]
)
EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")


def sample() -> tuple[Row, ...]:
    return tuple(map(json.loads, SAMPLE.read_text(encoding="utf-8").splitlines()))


def arguments(made: Row) -> dict[str, Any]:
    """The fields of the bridge's model as arguments; what has no flag is left out."""
    latent = made["core_class"].startswith("MLA")
    given: dict[str, Any] = dict(LATENT) if latent else {}
    fields = {**made["fields"], **made["model_fields"]}
    for name, value in fields.items():
        dest = OWN.get(name, options.RENAMED.get(name, name))
        value = (
            int(value)
            if isinstance(value, float) and dest in WHOLE and value.is_integer()
            else value
        )
        if (
            dest not in RUN
            and value is not None
            and options.option_for(RELEASE, dest, value) is not None
        ):
            given[dest] = value
    given |= ACTIVATIONS.get(
        str(fields.get("activation_func", "")).rpartition(".")[2].removeprefix("fast_"), {}
    )
    if not fields.get("share_embeddings_and_output_weights", True):
        given["untie_embeddings_and_output_weights"] = True
    if latent:
        given.pop("num_query_groups", None)
        given["apply_rope_fusion"] = False
        given |= (
            {} if "q_lora_rank" not in fields or fields["q_lora_rank"] else {"q_lora_rank": None}
        )
    elif "num_query_groups" in given:
        given["group_query_attention"] = True
    return given


def meant(made: Row) -> Mapping[str, Any]:
    """The plan of the bridge's model, with what its open fields mean."""
    config = compat.load("megatron").config(
        {**arguments(made), "bf16": True, "micro_batch_size": 1}, RELEASE, 1
    )
    return plain(bridge.lift(config).values())


def told(hf: Row) -> Iterator[tuple[str, Any]]:
    """What a config of Hugging Face says outright, by path of a plan."""
    latent = bool(hf.get("kv_lora_rank"))
    for path, names in NAMES.items():
        yield path, next((hf[name] for name in names if hf.get(name) is not None), None)
    if latent:
        yield from (
            (f"model.attention.latent.{ours}", hf.get(theirs)) for theirs, ours in NARROW.items()
        )
    elif hf["model_type"] not in PAIRED:
        yield "model.attention.head_size", hf.get("head_dim")
        yield "model.kv_heads", hf.get("num_key_value_heads")
    if hf["model_type"] not in UNDROPPED:
        yield "model.attention.dropout", hf.get("attention_dropout")
    yield from scaling(hf)
    yield from experts(hf)


NAMES: Mapping[str, tuple[str, ...]] = {
    "model.layers": ("num_hidden_layers",),
    "model.hidden": ("hidden_size",),
    "model.heads": ("num_attention_heads",),
    "model.ffn": ("intermediate_size",),
    "model.vocab": ("vocab_size",),
    "model.norm.eps": ("rms_norm_eps", "layer_norm_eps", "norm_eps"),
}
UNDROPPED = ("mistral", "gemma")
"""Models of which the bridge drops the dropout of attention."""
STRETCHED = ("llama", "deepseek_v2", "deepseek_v3")
"""Models of which the bridge keeps how positions stretch; of gpt_oss it fixes the factor, of others it keeps nothing."""
NARROW = {
    "q_lora_rank": "query_rank",
    "kv_lora_rank": "kv_rank",
    "qk_nope_head_dim": "plain_size",
    "qk_rope_head_dim": "rotary_size",
    "v_head_dim": "value_size",
}
PAIRED = ("nemotron_h",)
"""Models whose layers are not decoder blocks; Megatron has scripts of its own for them."""


def scaling(hf: Row) -> Iterator[tuple[str, Any]]:
    """Rotary positions: their base, and how they stretch where the bridge keeps that."""
    if hf["model_type"] not in ("gemma3_text", *PAIRED):  # two bases at once
        yield "model.rotary.base", hf.get("rope_theta")
    said = hf.get("rope_scaling") or {}
    kind = said.get("rope_type", said.get("type"))
    if kind in ("llama3", "linear", "yarn") and hf["model_type"] in STRETCHED:
        yield from (
            ("model.rotary.scaling.kind", kind),
            ("model.rotary.scaling.factor", said["factor"]),
        )


def experts(hf: Row) -> Iterator[tuple[str, Any]]:
    """Experts: their count, width, and how many a token has."""
    count = next((hf[name] for name in EXPERT_COUNTS if hf.get(name)), None)
    if count is None or hf["model_type"] in PAIRED:
        return
    yield "model.experts", count
    yield "model.moe.top_k", hf.get("num_experts_per_tok")
    yield "model.moe.ffn", hf.get("moe_intermediate_size") or hf.get("intermediate_size")
    dense = hf.get("first_k_dense_replace")
    if dense and not hf.get("decoder_sparse_step", 1) > 1:
        yield "model.moe.layers", tuple(index >= dense for index in range(hf["num_hidden_layers"]))
    yield "model.moe.groups", hf.get("n_group") if (hf.get("n_group") or 1) > 1 else None


def differences(row: Row) -> dict[str, tuple[Any, Any]]:
    """Where plan and config both speak, and say different things."""
    found = meant(row["megatron"])
    said = (
        (path, value)
        for path, value in told(row["hf"])
        if value is not None and found.get(path) is not None
    )
    return {path: (value, found[path]) for path, value in said if not same(value, found[path])}


def same(one: Any, other: Any) -> bool:
    numbers = isinstance(one, int | float) and isinstance(other, int | float)
    return isclose(one, other, rel_tol=1e-9) if numbers else bool(one == other)


def right(row: Row) -> bool:
    """Whether the bridge's own result describes the model of the config, and Megatron builds it."""
    replay = row["megatron"].get("replay", {})
    return not replay.get("converter_loss") and "--moe-router-pre-softmax" not in replay.get(
        "error", ""
    )


@pytest.mark.parametrize("row", sample(), ids=lambda row: f"{row['arch']}-{row['name']}")
def test_the_bridge_and_the_config_say_the_same(row: Row) -> None:
    assert differences(row) == {}


@pytest.mark.parametrize("row", sample(), ids=lambda row: f"{row['arch']}-{row['name']}")
def test_the_model_comes_back(row: Row) -> None:
    """Its plan, written as flags and read again, is the same plan, but for a number of positions that a launch has to have."""
    dialect = compat.load("megatron")
    plan = bridge.lift(
        dialect.config(
            {**arguments(row["megatron"]), "bf16": True, "micro_batch_size": 1}, RELEASE, 1
        )
    ).values()
    text = bridge.lower(bridge.Plan.of(plan), dialect, RELEASE, 1).text()
    back = bridge.lift(dialect.read(shlex.split(text), RELEASE, 1)).values()
    assert {**back, **plan} == {**back} and back.keys() - plan.keys() <= {
        "model.embedding.max_positions"
    }


def test_all_models_say_the_same(whole: Path) -> None:
    rows = map(
        json.loads,
        (whole / "truth" / "model_configs.jsonl").read_text(encoding="utf-8").splitlines(),
    )
    held = [row for row in rows if row.get("megatron") and right(row)]
    wrong = {row["name"]: found for row in held if (found := differences(row))}
    assert len(held) > 100 and wrong == {}


LLAMA = {
    "model.layers": 4,
    "model.hidden": 64,
    "model.heads": 4,
    "model.kv_heads": 2,
    "model.norm.kind": "rms",
    "model.norm.eps": 1e-6,
    "model.mlp.activation": "silu",
    "model.mlp.gated": True,
    "model.mlp.bias": False,
    "model.attention.qkv_bias": False,
    "model.attention.output_bias": False,
    "model.attention.dropout": 0.0,
    "model.dropout": 0.0,
    "model.embedding.positions": "rotary",
    "model.rotary.base": 500000.0,
    "model.tied": False,
}


@pytest.mark.parametrize("release", ["0.9.0", "0.13.0", RELEASE])
def test_what_megatron_takes_by_default_is_written(release: str) -> None:
    given = bridge.lower(bridge.Plan.of(LLAMA), compat.load("megatron"), release).given
    eps = "layernorm_epsilon" if release == RELEASE else "norm_epsilon"
    wanted = Values(
        {
            "normalization": "RMSNorm",
            eps: 1e-6,
            "swiglu": True,
            "add_bias_linear": False,
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
            "position_embedding_type": "rope",
            "rotary_base": 500000,
            "untie_embeddings_and_output_weights": True,
            "num_query_groups": 2,
        }
    )
    assert {name: given.get(name) for name in wanted} == dict(wanted)


BASE = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 8 --max-position-embeddings 8 --micro-batch-size 1"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "",
            {
                "model.dropout": 0.1,
                "model.embedding.positions": "learned",
                "model.mlp.activation": "gelu_tanh",
            },
        ),
        (
            "",
            {
                "model.norm.kind": "layer",
                "model.norm.bias": True,
                "model.attention.qkv_bias": True,
                "model.moe.top_k": None,
            },
        ),
        ("--disable-bias-linear", {"model.mlp.activation": "gelu", "model.mlp.bias": False}),
        (
            "--disable-bias-linear --add-qkv-bias",
            {"model.attention.qkv_bias": True, "model.attention.output_bias": False},
        ),
        (
            "--window-size 7,0 --window-attn-skip-freq 4",
            {"model.attention.window": 8, "model.attention.windowed": (1, 1, 1, 0)},
        ),
        ("--position-embedding-type rope --no-rope-freq 2", {"model.rotary.layers": (1, 0, 1, 0)}),
        (
            "--num-experts 8 --disable-bias-linear",
            {"model.moe.top_k": 2, "model.moe.normalised": True, "model.moe.ffn": 256},
        ),
        (
            "--num-experts 8 --disable-bias-linear --moe-layer-freq 2",
            {"model.moe.layers": (1, 0, 1, 0)},
        ),
        (
            "--num-experts 8 --disable-bias-linear --moe-aux-loss-coeff 1e-2 --moe-router-topk 4",
            {"model.moe.aux_loss": 0.0025},
        ),
        (
            "--num-experts 8 --disable-bias-linear --moe-router-pre-softmax",
            {"model.moe.normalised": False},
        ),
        (
            "--vocab-size 1000 --make-vocab-size-divisible-by 512",
            {"model.embedding.padded_vocab": 1024},
        ),
        (
            "--position-embedding-type rope --use-rope-scaling",
            {"model.rotary.scaling.kind": "llama3", "model.rotary.scaling.low": 1},
        ),
        (
            "--lr 1e-3 --decoupled-lr 5e-4",
            {"optimizer.embedding_lr": 0.5, "optimizer.output_lr": 0.5},
        ),
    ],
)
def test_flags_say_what_the_model_is(words: str, said: dict[str, Any]) -> None:
    config = compat.load("megatron").read(f"{BASE} {words}".split(), RELEASE, 2)
    plan = bridge.lift(config).values()
    assert {path: plan.get(path) for path in said} == said


@pytest.mark.parametrize(("release", "rows"), [("0.17.0", 1280), ("0.18.0", 1024)])
def test_a_tokenizer_of_nothing_had_one_word_more(release: str, rows: int) -> None:
    words = (
        f"{BASE} --vocab-size 1024 --tokenizer-type NullTokenizer --tensor-model-parallel-size 2"
    )
    plan = bridge.lift(compat.load("megatron").read(words.split(), release, 2)).values()
    assert plan["model.embedding.padded_vocab"] == rows
