"""Memory of a run: its formulas, laws of what changes it, and published measurements."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from math import isclose, prod
from pathlib import Path
from typing import Any

import pytest

import compat
from bridge.cli import run
from bridge.errors import ConfigError
from bridge.layout.architecture import PRESETS, Architecture, Experts, Latent, Share
from bridge.layout.memory.estimate import Estimate, Estimator, RankEstimate
from bridge.layout.memory.states import Rank, state_terms
from bridge.layout.memory.terms import GIB, STATES, sum_by_kind
from bridge.layout.outline import Outline
from bridge.plan.plan import Plan
from bridge.stack.memory_rules import MemoryRules
from compat.megatron.memory import RULES as MEGATRON

LLAMA = PRESETS["llama-7b"]
USUAL = {
    "precision.compute": "bf16",
    "precision.master": "fp32",
    "precision.reduce": "fp32",
    "batch.micro": 2,
    "batch.accumulation": 16,
    "stages.rule": "even",
    "schedule.name": "1f1b",
}


def estimate(
    rules: MemoryRules = MEGATRON, shape: Architecture = LLAMA, world: int = 16, **settings: Any
) -> Estimate:
    values = {**USUAL, **{name.replace("__", "."): value for name, value in settings.items()}}
    if not values.get("parallel.pipeline"):
        values |= {"stages.rule": None, "schedule.name": None}
    return Estimator.of(Plan.of(values), shape, world, rules).estimate()


def states(rank: RankEstimate) -> dict[str, int]:
    sizes = sum_by_kind(rank.states)
    return {kind: sizes.get(kind, 0) for kind in STATES}


SHARDINGS = ("native", "megatron", "deepspeed", "fsdp", "ddp")


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_every_number_opens_into_its_formula(sharding: str) -> None:
    rules = replace(MEGATRON, sharding=sharding, attention="unfused")
    mesh = {"parallel__tensor": 2, "parallel__pipeline": 2, "parallel__sequence": True}
    found = estimate(rules, zero__stage=1, **mesh)
    terms = [term for rank in found.ranks for term in rank.terms if " x " in term.formula]
    assert len(terms) > 20
    for term in terms:
        factors = [float(part.split()[0].replace(",", "")) for part in term.formula.split(" x ")]
        assert isclose(prod(factors), term.bytes, rel_tol=1e-6), term


def test_states_of_the_native_engine_are_those_of_its_layout() -> None:
    for level in range(4):
        plan = Plan.of({**USUAL, "stages.rule": None, "schedule.name": None, "zero.stage": level})
        outline = Outline.of(plan, PRESETS["tiny"], 4)
        parameters = PRESETS["tiny"].parameters(
            {layer: stage for stage, layers in enumerate(outline.stages) for layer in layers},
            Share(),
        )
        terms = state_terms(plan, Rank(parameters, len(outline.stages), 4), MemoryRules())
        sizes = sum_by_kind(terms)
        assert {kind: sizes.get(kind, 0) for kind in STATES} == outline.bytes(0)


@pytest.mark.parametrize("sharding", ["megatron", "deepspeed", "fsdp"])
def test_a_higher_level_never_keeps_more(sharding: str) -> None:
    rules = replace(MEGATRON, sharding=sharding)
    levels = [0, 1] if sharding == "megatron" else [2, 3] if sharding == "fsdp" else [0, 1, 2, 3]
    kept = [sum(states(estimate(rules, zero__stage=level).largest).values()) for level in levels]
    assert kept == sorted(kept, reverse=True)
    assert sharding == "fsdp" or kept[0] > kept[-1]


def test_the_first_stage_has_as_many_microbatches_in_flight_as_there_are_stages() -> None:
    found = estimate(parallel__pipeline=4)
    kept = [sum_by_kind(rank.moments["the backward pass of a block"]) for rank in found.ranks]
    sizes = [kind["activations"] for kind in kept]
    assert sizes == sorted(sizes, reverse=True)
    assert 3.5 < sizes[0] / sizes[-1] < 4.5


def test_recomputation_and_offload_need_less_of_the_device() -> None:
    usual = estimate().largest
    for settings in (
        {"recompute__granularity": "full"},
        {"recompute__granularity": "full", "recompute__method": "uniform", "recompute__layers": 4},
        {"zero__offload__optimizer": "cpu"},
        {"zero__stage": 1},
        {"parallel__tensor": 2, "parallel__sequence": True},
    ):
        assert estimate(**settings).largest.needed < usual.needed, settings  # type: ignore[arg-type]
    host = sum_by_kind(estimate(zero__offload__optimizer="cpu").largest.states)["host"]
    assert host == states(usual)["master"] + states(usual)["moments"]


@pytest.mark.parametrize("sharding", ["fsdp", "ddp"])
def test_gradients_are_not_there_before_the_only_backward_pass(sharding: Any) -> None:
    rules = MemoryRules(sharding=sharding)
    moments = [
        estimate(rules, world=4, zero__stage=3, batch__accumulation=number).largest.moments
        for number in (1, 2)
    ]
    gradients = states(estimate(rules, world=4, zero__stage=3).largest)["gradients"]
    once, summed = (
        {name: sum(t.bytes for t in terms) for name, terms in one.items()} for one in moments
    )
    assert once["the loss"] == summed["the loss"] - gradients
    # A block's backward pass comes while some of the blocks have no gradients yet.
    assert once["the backward pass of a block"] < summed["the backward pass of a block"]


def test_experts_are_divided_among_their_own_tensor_ranks() -> None:
    shape = Architecture(layers=1, experts=Experts(4, 512, 1), bias=False)
    share = Share(ranks=4, experts=2, within=2, same=1)
    shapes = {one.name: one.shape for one in shape.parameters({1: 0}, share)}
    assert shapes["block0.mlp.experts.up.weight"] == (2, 256, 128)
    assert shapes["block0.mlp.experts.down.weight"] == (2, 128, 256)
    assert shapes["block0.attention.out.weight"] == (128, 32)


DENSE = Architecture(
    layers=12, hidden=8192, heads=64, kv_heads=8, ffn=28672, vocab=128256, sequence=4096, norm="rms",
    gated=True, tied=False, bias=False,
)  # fmt: skip
EXPERTS = Architecture(
    layers=4, hidden=7168, heads=128, kv_heads=128, ffn=18432, vocab=129280, sequence=4096,
    norm="rms", gated=True, tied=False, bias=False, latent=Latent(1536, 512, 128, 64, 128),
    head_norm="width", experts=Experts(256, 2048, 8, 2048, layers=(False, True, True, True)),
)  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "settings", "measured", "within"),
    [
        (DENSE, {"parallel__tensor": 2, "parallel__sequence": True}, 60.68, 0.004),
        (DENSE, {"parallel__tensor": 8, "parallel__sequence": True}, 28.286, 0.004),
        (EXPERTS, {"parallel__expert": 8}, 104.301, 0.015),
    ],
)
def test_peaks_are_those_that_were_measured(
    shape: Architecture, settings: dict[str, Any], measured: float, within: float
) -> None:
    # Megatron with Transformer Engine on 8 GPUs: the B200 tables of SimuMax 1.2.
    plan = {
        "zero__stage": 1,
        "batch__micro": 1,
        "batch__accumulation": 4,
        "parallel__vocabulary": True,
    }
    found = estimate(replace(MEGATRON, loss="te"), shape, 8, **plan, **settings)
    assert found.largest.peak / GIB == pytest.approx(measured, rel=within)


def test_what_does_not_fit_together_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"batch\.micro: not set"):
        estimate(batch__micro=None, batch__accumulation=None)
    with pytest.raises(ConfigError, match="does not divide world size"):
        estimate(parallel__tensor=3)


# The command

LAUNCH = (
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096"
    " --max-position-embeddings 4096 --micro-batch-size 2 --global-batch-size 64"
    " --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --bf16 --swiglu"
    " --use-distributed-optimizer --vocab-size 32000 --tokenizer-type NullTokenizer --mock-data"
    " --lr 1e-4 --train-iters 10"
)
ZERO = {
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 3},
    **dict.fromkeys(
        ("train_micro_batch_size_per_gpu", "train_batch_size", "gradient_accumulation_steps"),
        "auto",
    ),
}
TRAINER = {
    "output_dir": "out",
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "bf16": True,
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "launch.args").write_text(LAUNCH)
    (tmp_path / "zero.json").write_text(json.dumps(ZERO))
    (tmp_path / "args.json").write_text(json.dumps(TRAINER))
    return tmp_path


def said(capsys: Any, *words: str) -> tuple[int, Any]:
    code = run(["estimate", *words, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_the_first_line_says_whether_it_fits(folder: Path, capsys: Any) -> None:
    words = ["estimate", "launch.args", "--ranks", "16"]
    assert run([*words, "--memory", "80"]) == 0
    first = " ".join(capsys.readouterr().out.split())
    assert re.match(
        r"fits in 80 GB: [\d.]+ GiB on the first stage, at .*; activations [\d.]+,", first
    )
    assert run([*words, "--memory", "16"]) == 1
    assert capsys.readouterr().out.startswith("does not fit in 16 GB: ")
    assert run(words) == 0
    assert capsys.readouterr().out.startswith("needs ")
    assert run([*words, "--explain"]) == 0
    assert "bytes, a constant of the stack" in " ".join(capsys.readouterr().out.split())


def test_each_change_is_accepted_and_makes_it_fit(folder: Path, capsys: Any) -> None:
    code, data = said(capsys, "launch.args", "--ranks", "16", "--memory", "24")
    assert (code, data["fits"]) == (1, False)
    assert len(data["changes"]) >= 2
    for change in data["changes"]:
        flags = [
            f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}")
            for name, value in change["settings"].items()
        ]
        (folder / "changed.args").write_text(" ".join([LAUNCH, *flags]))
        code, changed = said(capsys, "changed.args", "--ranks", "16", "--memory", "24")
        assert (code, changed["needed"]) == (0, change["needed"]), change


def test_a_run_of_the_trainer_is_changed_by_its_arguments(folder: Path, capsys: Any) -> None:
    words = ("zero.json", "args.json", "--ranks", "8", "--model", "llama-7b", "--memory", "24")
    code, data = said(capsys, *words)
    assert code == 1
    settings = [change["settings"] for change in data["changes"]]
    assert {"gradient_checkpointing": True} in settings
    assert not [name for one in settings for name in one if name.startswith("code.")]
    (folder / "args.json").write_text(json.dumps({**TRAINER, "gradient_checkpointing": True}))
    code, again = said(capsys, *words)
    assert (code, again["needed"]) == (
        0,
        next(one["needed"] for one in data["changes"] if one["settings"] == settings[0]),
    )


def test_liger_has_no_logits_and_a_strange_optimizer_is_named(folder: Path, capsys: Any) -> None:
    words = ("zero.json", "args.json", "--ranks", "8", "--model", "llama-7b")
    _, data = said(capsys, *words)
    more = {"use_liger_kernel": True, "optim": "adamw_bnb_8bit", "gradient_checkpointing": True}
    (folder / "args.json").write_text(json.dumps({**TRAINER, **more}))
    _, liger = said(capsys, *words)
    assert "logits" in data["ranks"][0]["kinds"]
    assert "logits" not in liger["ranks"][0]["kinds"]
    assert any("adamw_bnb_8bit" in one["message"] for one in liger["findings"])


def test_a_script_that_starts_the_trainer_may_checkpoint(folder: Path, capsys: Any) -> None:
    words = " ".join(f"--{name} {str(value).lower()}" for name, value in TRAINER.items())
    script = f"deepspeed train.py --deepspeed zero.json {words}"
    (folder / "plain.sh").write_text(script)
    (folder / "again.sh").write_text(f"{script} --gradient_checkpointing true")
    sizes = [
        said(capsys, name, "--ranks", "8", "--model", "llama-7b")[1]["needed"]
        for name in ("plain.sh", "again.sh")
    ]
    assert sizes[1] < 0.6 * sizes[0]


def test_a_family_that_was_not_counted_is_named_at_once(folder: Path, capsys: Any) -> None:
    config = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 99}
    model = folder / "model"
    model.mkdir()
    words = ("zero.json", "args.json", "model", "--ranks", "2", "--sequence", "64")
    expected = {
        "llama": None,
        "cohere": None,
        "mimo": "activations of mimo were not counted: these are those of a Llama of its sizes",
        "bloom": "the attention of bloom is eager in transformers unless flash attention is asked for;"
        " its probabilities are not counted",
    }
    for family, note in expected.items():
        (model / "config.json").write_text(json.dumps({"model_type": family, **config}))
        _, data = said(capsys, *words)
        notes = [one for one in data["findings"] if one["path"] == "model.family"]
        assert [one["message"] for one in notes] == ([note] if note else []), family
        assert not note or data["findings"][0] == notes[0]
        run(["estimate", *words])
        lines = " ".join(capsys.readouterr().out.split("Memory by stage")[0].split())
        assert lines.partition(" note: ")[2] == (note or ""), family
    unknown = ("zero.json", "args.json", "--ranks", "2", "--model", "tiny")
    assert "a family that is not known" in said(capsys, *unknown)[1]["findings"][0]["message"]


def test_a_file_of_arguments_that_a_script_passes_is_read(folder: Path, capsys: Any) -> None:
    again = {**TRAINER, "gradient_checkpointing": True}
    (folder / "args.json").write_text(json.dumps({**again, "deepspeed": "zero.json"}))
    (folder / "run.sh").write_text("deepspeed --num_gpus 8 train.py args.json")
    sizes = ("--model", "llama-7b")
    _, data = said(capsys, "run.sh", *sizes)
    _, apart = said(capsys, "zero.json", "args.json", "--ranks", "8", *sizes)
    assert data["needed"] == apart["needed"]
    # accelerate has no file of its own: batch and checkpointing come from the arguments.
    launch = (
        "accelerate launch --num_processes 8 --use_fsdp --fsdp_version 2 --mixed_precision bf16"
    )
    (folder / "fsdp.sh").write_text(f"{launch} train.py args.json")
    (folder / "args.json").write_text(json.dumps(again))
    _, checkpointed = said(capsys, "fsdp.sh", *sizes)
    (folder / "args.json").write_text(json.dumps(TRAINER))
    _, whole = said(capsys, "fsdp.sh", *sizes)
    assert checkpointed["needed"] < 0.6 * whole["needed"]
    (folder / "args.json").unlink()
    assert run(["estimate", "fsdp.sh", *sizes]) == 1
    assert "train.py is given args.json alone, and no such file is there" in capsys.readouterr().err


def test_adapters_and_quantised_weights(folder: Path, capsys: Any) -> None:
    words = ("zero.json", "args.json", "lora.json", "--ranks", "8", "--model", "llama-7b")
    adapter: dict[str, Any] = {"peft_type": "LORA", "r": 16, "target_modules": "all-linear"}
    (folder / "lora.json").write_text(json.dumps(adapter))
    code, data = said(capsys, *words)
    kinds = data["ranks"][0]["kinds"]
    # 40 million elements are trained: rank 16 on seven matrices of each of 32 blocks.
    own = 32 * 16 * (4 * 2 * 4096 + 3 * (4096 + 11008)) // 8
    assert (code, kinds["master"], kinds["moments"]) == (0, 4 * own, 8 * own)
    (folder / "args.json").write_text(json.dumps({**TRAINER, "load_in_4bit": True}))
    _, quantised = said(capsys, *words)
    assert quantised["ranks"][0]["kinds"]["weights"] < 0.4 * kinds["weights"]
    adapter |= {"target_modules": ["q_proj", "router"], "modules_to_save": ["lm_head"]}
    (folder / "lora.json").write_text(json.dumps(adapter))
    notes = " ".join(one["message"] for one in said(capsys, *words)[1]["findings"])
    assert "an adapter of router is not counted" in notes
    assert "copies of lm_head are not counted" in notes
    (folder / "lora.json").write_text(json.dumps({**adapter, "peft_type": "IA3"}))
    assert run(["estimate", *words]) == 1
    assert "found 'IA3', expected LORA" in capsys.readouterr().err


def test_megatron_says_which_kernels_it_has() -> None:
    def rules(*flags: str, version: str | None = None) -> MemoryRules:
        dialect = compat.load("megatron")
        config = dialect.read([*LAUNCH.split(), *flags], version, 16)
        return dialect.memory_rules(config)

    assert rules() == MEGATRON
    assert rules("--transformer-impl", "local").attention == "unfused"
    assert rules("--attention-backend", "unfused").attention == "unfused"
    fused = rules(
        "--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl", "te", version="0.15.0"
    )
    assert fused.loss == "te"
    assert not rules("--no-gradient-accumulation-fusion").fused_gradients
