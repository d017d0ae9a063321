"""Models of recipes: what their class reads, what AutoModel splits, and what stops in the first step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

import bridge
import compat
from bridge.errors import BridgeError
from bridge.plan.families import FAMILIES, GENERIC, groups, read_by
from bridge.plan.families.refusals import MASKED, WINDOWED
from bridge.stack.dialect import Config
from bridge.stack.rules import Effect
from bridge.translation.diff import compare

AUTOMODEL = compat.load("automodel")
BUILD = "nemo_automodel.NeMoAutoModelForCausalLM.from_config"
WRITTEN = tuple(name for name, one in FAMILIES.items() if one.config and not one.foreign)
SIZES = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 512 --max-position-embeddings 512 "
    "--micro-batch-size 2 --global-batch-size 8 --lr 1e-4 --train-iters 100 --vocab-size 1024 --bf16 "
    "--calculate-per-token-loss"
)
LLAMA = (
    f"{SIZES} --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear"
    " --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0"
)
MIXTRAL = f"{LLAMA} --num-experts 8 --moe-router-topk 2 --moe-router-load-balancing-type none"
DEEPSEEK = (
    f"{LLAMA} --norm-epsilon 1e-6 --multi-latent-attention --qk-layernorm --kv-lora-rank 64 --q-lora-rank 96"
    " --qk-head-dim 32 --qk-pos-emb-head-dim 16 --v-head-dim 32 --ffn-hidden-size 1024 --num-experts 16"
    " --moe-ffn-hidden-size 128 --moe-layer-freq [0]+[1]*3 --moe-router-topk 4 --moe-router-num-groups 4"
    " --moe-router-group-topk 2 --moe-router-score-function sigmoid --moe-router-enable-expert-bias"
    " --moe-router-pre-softmax --moe-router-topk-scaling-factor 2.5 --moe-shared-expert-intermediate-size 128"
    " --moe-grouped-gemm"
)
TOKENS = ("bos_token_id", "eos_token_id")
NONE = " --moe-router-load-balancing-type none"


def megatron(flags: str, world_size: int = 2) -> Config:
    return compat.load("megatron").read(flags.split(), "0.19.2", world_size)


def to_automodel(flags: str) -> bridge.Result:
    return bridge.translate(megatron(flags), AUTOMODEL)


def recipe(family: str, model: Mapping[str, Any] = {}, **sections: Any) -> Config:
    config = {"_target_": f"transformers.{FAMILIES[family].config}", **model}
    return AUTOMODEL.read({"model": {"_target_": BUILD, "config": config}, **sections}, "0.7.0", 4)


def effects(config: Config) -> Mapping[str, Effect]:
    return {finding.path: finding.effect for finding in config.findings}


# Keys


@pytest.mark.parametrize("family", WRITTEN)
def test_a_key_that_no_model_of_the_family_reads_means_nothing(family: str) -> None:
    keys = {"num_nextn_predict_layers": 3, "mlp_only_layers": [0], "residual_multiplier": 3.0}
    unread = {key: value for key, value in keys.items() if key not in read_by(family)}
    plain, more = recipe(family), recipe(family, unread)
    assert unread
    assert bridge.lift(more) == bridge.lift(plain)
    assert not compare(plain, more) or all(
        row.effect is Effect.NONE for row in compare(plain, more)
    )
    assert {effects(more)[f"model.config.{key}"] for key in unread} == {Effect.NONE}


@pytest.mark.parametrize("family", ("llama", "glm4_moe_lite", "qwen3"))
def test_transformers_has_no_block_for_further_tokens(family: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 64, "pad_token_id": None}
    names = []
    for more in ({}, {"num_nextn_predict_layers": 2}):
        config = getattr(transformers, FAMILIES[family].config)(**sizes, **more)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        names.append([name for name, _ in model.named_parameters()])
    assert names[0] == names[1]


def test_further_tokens_are_lost_where_no_model_is_trained_on_them() -> None:
    lost = to_automodel(f"{LLAMA} --mtp-num-layers 1")
    assert "model.config.num_nextn_predict_layers" not in lost.config.given
    assert Effect.NUMBERS in {one.effect for one in lost.findings if one.path == "mtp_num_layers"}
    kept = to_automodel(f"{DEEPSEEK}{NONE} --mtp-num-layers 1")
    assert kept.config.given["model.config.num_nextn_predict_layers"] == 1
    assert "habits.mtp_loss" in {ours for one in kept.findings for ours in one.about if one.matters}
    back = bridge.translate(
        recipe("deepseek_v3", {"num_nextn_predict_layers": 2}), megatron(LLAMA).dialect
    )
    assert back.config.given["mtp_num_layers"] == 2
    assert back.config.given["mtp_loss_scaling_factor"] == 0.0


# Families


SPECIAL = tuple(
    sorted({key for keys, _ in groups() for key in keys} - GENERIC.keys_it_reads - set(TOKENS))
)
"""Keys that only some families have."""
PAIRS = ((8, 16), (0.25, 0.5), (False, True), ("gelu", "silu"))


@pytest.mark.parametrize("stack", ("automodel", "huggingface"))
def test_what_a_familys_key_does_without_a_family_is_not_known(stack: str) -> None:
    def read(key: str, value: Any) -> Config:
        if stack == "huggingface":
            return compat.load(stack).read({key: value})
        return AUTOMODEL.read({"model": {"config": {key: value}}}, "0.7.0", 4)

    tried = 0
    for key in SPECIAL:
        for pair in PAIRS:
            try:
                one, other = (read(key, value) for value in pair)
            except BridgeError:
                continue  # a value of another type
            tried += 1
            assert Effect.NUMBERS in {row.effect for row in compare(one, other)}, key
            lost = bridge.translate(one, megatron(LLAMA).dialect).findings
            assert any(row.path.endswith(key) and row.effect is Effect.NUMBERS for row in lost), key
            break
    assert tried > 60


GPT2 = f"{SIZES} --position-embedding-type learned_absolute --normalization LayerNorm"
BALANCED = " --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4"


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        (GPT2, "GPT2Config"),
        (DEEPSEEK + NONE, "DeepseekV3Config"),
        (DEEPSEEK + BALANCED, "DeepseekV3Config"),
    ],
)
def test_a_model_is_written_in_its_family(flags: str, name: str) -> None:
    result = to_automodel(flags)
    assert result.config.given["model.config._target_"] == f"transformers.{name}"
    balance = [one for one in result.findings if one.path == "moe_aux_loss_coeff" and one.matters]
    assert bool(balance) == (BALANCED in flags)


@pytest.mark.parametrize("version", ("0.6.0", "0.7.0"))
def test_a_split_counts_the_layers_of_the_models_class(version: str) -> None:
    pipeline = {"pp_schedule": "interleaved1f1b", "pp_microbatch_size": 1, "layers_per_stage": 1}
    source = {
        "model": {"_target_": BUILD, "config": {"_target_": "transformers.PhiConfig"}},
        "distributed": {"strategy": "fsdp2", "pp_size": 2, "pipeline": pipeline},
        "step_scheduler": {"global_batch_size": 64, "local_batch_size": 32},
    }
    plan = bridge.lift(AUTOMODEL.read(source, version, 2))
    assert plan.model.layers == 24
    assert plan.schedule.virtual == 12
    assert bridge.lift(bridge.lower(plan, AUTOMODEL, version)).schedule.virtual == 12


# Documents


PACKED = "packed_sequence.packed_sequence_size"
# Only layers that use the mask of the data set separate documents by it.
APART = (
    "--reset-attention-mask --reset-position-ids --eod-mask-loss --transformer-impl local "
    "--no-masked-softmax-fusion"
)
DATA = "--dataloader-inter-document-masking --eod-mask-loss"


def test_documents_apart_are_packed_samples_however_a_source_says_it() -> None:
    model = {"model": {"base_model": {"hidden_size": 64}}, "training": {"train_iters": 10}}
    fast_llm = compat.load("fast_llm")
    old = fast_llm.read(model | {"batch": {"cross_document_attention": False}}, "0.3.0", 2)
    sources = [
        megatron(f"{LLAMA} {APART}"),
        megatron(f"{LLAMA} {DATA}"),
        old,
        fast_llm.read(model, "0.4.0", 2),
    ]
    for source in sources:
        result = bridge.translate(source, AUTOMODEL)
        told = {ours for one in result.findings if one.matters for ours in one.about}
        assert result.config.given[PACKED] == result.plan.model.sequence
        assert not told & {"habits.attention", "habits.positions"}
        assert not {one.path for one in result.findings if one.matters} & {
            "dataloader_inter_document_masking",
            "batch.cross_document_attention",
        }
    assert PACKED not in to_automodel(LLAMA).config.given


def test_a_stream_of_documents_is_joined_and_a_pack_is_not() -> None:
    data = "nemo_automodel.components.datasets.llm.megatron_dataset.MegatronPretraining"
    joined = bridge.lift(AUTOMODEL.read({"dataset": {"_target_": data, "seq_len": 64}}))
    apart = bridge.lift(AUTOMODEL.read({"packed_sequence": {"packed_sequence_size": 64}}))
    assert (joined.habits.attention, joined.habits.boundaries) == ("sequence", "trained")
    assert (apart.habits.attention, apart.habits.boundaries) == ("document", "masked")


# Splits


def test_only_own_code_splits_experts() -> None:
    ranks = " --expert-model-parallel-size 2"
    stops = [one for one in to_automodel(MIXTRAL + ranks).findings if one.effect is Effect.STOPS]
    assert [one.path for one in stops] == ["distributed.ep_size"]
    assert not [one for one in to_automodel(MIXTRAL).findings if one.effect is Effect.STOPS]
    own = to_automodel(DEEPSEEK + NONE + ranks)
    assert own.config.given["model.config.architectures"] == ("DeepseekV3ForCausalLM",)
    assert not [one for one in own.findings if one.effect is Effect.STOPS]
    split = {"distributed": {"strategy": "fsdp2", "ep_size": 2}}
    assert effects(recipe("deepseek_v3", **split))["distributed.ep_size"] is Effect.STOPS


@pytest.mark.parametrize(
    ("name", "effect"),
    [
        ("LlamaForCausalLM", None),
        ("LlamaForSequenceClassification", None),
        ("Qwen3MoeForCausalLM", Effect.NUMBERS),
        ("nobody.Knows", Effect.NUMBERS),
    ],
)
def test_a_class_of_another_family_is_named(name: str, effect: Effect | None) -> None:
    path = "model.config.architectures"
    assert effects(recipe("llama", {"architectures": [name]})).get(path) is effect


@pytest.mark.parametrize(
    ("family", "stops"), [("gpt_oss", True), ("bloom", True), ("llama", False)]
)
def test_attention_of_some_families_is_not_split(family: str, stops: bool) -> None:
    found = effects(recipe(family, distributed={"strategy": "fsdp2", "cp_size": 2}))
    assert (found.get("distributed.cp_size") is Effect.STOPS) == stops


def test_a_message_names_the_values_of_the_recipe() -> None:
    (finding,) = (
        one for one in recipe("glm", {"vocab_size": 1000}).findings if "pad_token" in one.path
    )
    assert "(1000)" in finding.message


# Windows


SMALL = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 64,
}
KINDS = ("sliding_attention", "full_attention")
WINDOWS: tuple[dict[str, Any], ...] = (
    {},
    {"sliding_window": None},
    {"use_sliding_window": True, "sliding_window": None},
    {"use_sliding_window": True, "sliding_window": 4},
)


@pytest.mark.parametrize("keys", WINDOWS, ids=lambda keys: ",".join(keys) or "none")
@pytest.mark.parametrize("kinds", (KINDS, KINDS[1:] * 2), ids=("sliding", "full"))
@pytest.mark.parametrize("family", sorted(MASKED - {"exaone_moe", "gpt_oss"}))
def test_a_window_stops_the_forward_pass_exactly_where_that_is_said(
    family: str, kinds: tuple[str, ...], keys: dict[str, Any]
) -> None:
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    sizes = {**SMALL, "intermediate_size": 64, "pad_token_id": None, "use_cache": False}
    config = {**sizes, **keys, "layer_types": list(kinds)}
    model = transformers.AutoModelForCausalLM.from_config(
        getattr(transformers, FAMILIES[family].config)(**config)
    )
    try:
        model(input_ids=torch.zeros(1, 8, dtype=torch.long))
        stops = False
    except ValueError as error:
        assert "sliding_window" in str(error)
        stops = True
    read = compat.load("huggingface").read({"model_type": family, **config})
    assert (Effect.STOPS in effects(read).values()) == stops


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize("narrow", ({}, {"qk_nope_head_dim": 7}, {"kv_lora_rank": 7}), ids=str)
def test_channels_in_pairs_at_an_odd_place_stop_exactly_where_that_is_said(
    narrow: dict[str, int], dtype: str
) -> None:
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    latent = {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "kv_lora_rank": 8}
    config = {
        "num_hidden_layers": 1,
        "first_k_dense_replace": 1,
        "hidden_size": 64,
        "vocab_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 64,
        "q_lora_rank": None,
        **latent,
        **narrow,
    }
    model = transformers.DeepseekV2ForCausalLM(transformers.DeepseekV2Config(**config))
    try:
        model.to(getattr(torch, dtype))(input_ids=torch.zeros(1, 4, dtype=torch.long))
        stops = False
    except RuntimeError as error:
        assert "stride divisible by 2" in str(error)
        stops = True
    formats = {f"{name}_dtype": dtype for name in ("param", "reduce", "output")}
    policy = {"_target_": "torch.distributed.fsdp.MixedPrecisionPolicy", **formats}
    read = recipe("deepseek_v2", config, distributed={"strategy": "fsdp2", "mp_policy": policy})
    assert bridge.lift(read).precision.compute == {"float32": "fp32", "bfloat16": "bf16"}[dtype]
    found = effects(read)
    assert (Effect.STOPS in found.values()) == stops


@pytest.mark.parametrize("family", sorted(WINDOWED))
def test_a_model_without_windows_is_written_as_one_that_starts(family: str) -> None:
    source = recipe(family, {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2})
    plan = bridge.lift(source)
    assert plan.model.attention.window is None
    written = bridge.lower(plan, AUTOMODEL, "0.7.0")
    assert written.given["model.config.layer_types"] == ("full_attention",) * 2
    assert "model.config.sliding_window" not in written.given
    assert Effect.STOPS not in effects(written).values()


def test_a_learning_rate_that_is_the_others_is_none_of_its_own() -> None:
    equal, double = (to_automodel(f"{LLAMA} --decoupled-lr {rate}") for rate in ("1e-4", "2e-4"))
    told = {one.effect for one in equal.findings if one.path == "decoupled_lr"}
    assert told == {Effect.NONE}
    assert "lr_mult" not in equal.written.text
    assert "lr_mult: 2.0" in double.written.text
