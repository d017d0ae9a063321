"""What means the same in two stacks is no loss: switches that an optimizer does not have, or that are off."""

from __future__ import annotations

from typing import Any

import pytest

import compat
from bridge.errors import ConfigError
from bridge.files.secrets import Secrets
from bridge.plan.plan import Plan, paths
from bridge.report.as_json import remarks_of
from bridge.report.as_text import causes, kind, verdict
from bridge.stack.dialect import Config
from bridge.stack.rules import Effect, How
from bridge.translation import translate as translation
from bridge.translation.diff import compare
from bridge.translation.lift import lift, lower
from bridge.translation.translate import Result, remarks, translate

FUSED = "transformer_engine.pytorch.optimizers.FusedAdam"
OFF: dict[str, Any] = {
    "optimizer": {"_target_": "torch.optim.AdamW", "lr": 1e-3, "foreach": False, "fused": True},
    "model": {"backend": {"fake_balanced_gate": False}},
    "distributed": {"pp_size": 2, "pipeline": {"scale_grads_in_schedule": False}},
    "checkpoint": {"enabled": False},
}


def translated(source: str, data: Any, target: str) -> Result:
    """A config of 8 ranks in another stack."""
    config = compat.load(source).read(data, None, 8)
    return translate(config, compat.load(target))


def alarms(result: Result) -> set[str]:
    """Settings and plan fields of which it is said that the numbers differ."""
    return {finding.path for finding in result.findings if finding.effect.reaches(Effect.NUMBERS)}


@pytest.mark.parametrize("target", ["megatron", "fast_llm"])
@pytest.mark.parametrize(
    ("source", "data"),
    [
        ("automodel", {"optimizer": {"_target_": "torch.optim.AdamW", "lr": 1e-3}}),
        (
            "deepspeed",
            {
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
                "train_micro_batch_size_per_gpu": 1,
            },
        ),
        (
            "deepspeed",
            {
                "optimizer": {"type": "Lion", "params": {"lr": 1e-3}},
                "train_micro_batch_size_per_gpu": 1,
            },
        ),
    ],
)
def test_a_switch_that_an_optimizer_does_not_have_is_off(
    source: str, data: Any, target: str
) -> None:
    assert alarms(translated(source, data, target)).isdisjoint(
        {"optimizer.nesterov", "optimizer.amsgrad"}
    )


def test_nesterov_that_is_on_is_still_a_loss() -> None:
    data = {
        "optimizer": {"_target_": "torch.optim.SGD", "lr": 1e-3, "momentum": 0.9, "nesterov": True}
    }
    assert "optimizer.nesterov" in alarms(translated("automodel", data, "megatron"))


def test_transformer_engines_adam_makes_the_steps_of_torchs() -> None:
    data = {"optimizer": {"_target_": FUSED, "adam_w_mode": True, "lr": 1e-3}}
    assert alarms(translated("automodel", data, "megatron")).isdisjoint(
        {"optimizer._target_", "optimizer.adam_w_mode"}
    )
    flash = {"optimizer": {"_target_": "flashoptim.FlashAdamW", "lr": 1e-3}}
    assert "optimizer._target_" in alarms(translated("automodel", flash, "megatron"))


@pytest.mark.parametrize("target", ["megatron", "fast_llm", "deepspeed"])
def test_switches_that_are_off_change_no_numbers(target: str) -> None:
    found = {f.path: f.effect for f in translated("automodel", OFF, target).findings}
    assert {path for path, effect in found.items() if effect.reaches(Effect.NUMBERS)}.isdisjoint(
        {
            "model.backend.fake_balanced_gate",
            "distributed.pipeline.scale_grads_in_schedule",
            "checkpoint.enabled",
        }
    )
    assert found["optimizer.foreach"] is found["optimizer.fused"] is Effect.ROUNDING


def test_a_gate_that_spreads_tokens_is_a_loss() -> None:
    data = {"model": {"backend": {"fake_balanced_gate": True}}}
    assert "model.backend.fake_balanced_gate" in alarms(translated("automodel", data, "megatron"))


LAUNCH = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 --lr 1e-3 "
    "--micro-batch-size 1 --global-batch-size 128 --vocab-size 50257 --position-embedding-type rope"
)


def test_words_beside_as_many_rows_are_no_loss_there_and_back() -> None:
    there = translated("megatron", f"{LAUNCH} --train-iters 100".split(), "fast_llm")
    assert "vocab_size" not in alarms(there)
    back = translate(there.config, compat.load("megatron"), carry=there.carry)
    assert back.config.given["vocab_size"] == 50257
    assert back.exact, back.findings


def test_rows_that_differ_are_a_loss() -> None:
    assert "make_vocab_size_divisible_by" in alarms(
        translated("megatron", LAUNCH.split(), "automodel")
    )


@pytest.mark.parametrize("target", ["fast_llm", "deepspeed", "automodel"])
def test_samples_and_shares_show_the_steps_that_were_written(target: str) -> None:
    """100,000 samples, 128 at a time, are 781 steps."""
    samples = "--train-samples 100000 --lr-decay-samples 90000 --lr-warmup-samples 3906"
    assert {"train_samples": 781, "lr_decay_samples": 703, "lr_warmup_samples": 31}.items() <= kept(
        samples, target
    ).items()
    shares = f"{LAUNCH} --train-samples 128000 --lr-decay-samples 102400 --lr-warmup-fraction 0.01"
    whole = {"train_samples": 1000, "lr_decay_samples": 800, "lr_warmup_fraction": 8}
    found = expressed(translated("megatron", shares.split(), target))
    if target == "fast_llm":  # a schedule as text says both lengths
        text = "constant,1,0.0;linear,8,0.0,0.001;linear,792,0.001,0.0"
        whole |= dict.fromkeys(("lr_decay_samples", "lr_warmup_fraction"), text)
    assert whole.items() <= found.items()


def expressed(result: Result) -> dict[str, Any]:
    """What the target has for each setting that it has in other words or units; no finding is about these."""
    assert not {finding.path for finding in result.findings} & {
        "train_samples",
        "lr_decay_samples",
        "lr_warmup_fraction",
    }
    return {source: row.value for row in result.fields for source in row.sources}


def kept(flags: str, target: str) -> dict[str, Any]:
    """What stands in the target for each setting that is not dropped."""
    found = translated("megatron", f"{LAUNCH} {flags}".split(), target).findings
    return {
        finding.path: finding.after
        for finding in found
        if finding.how in (How.APPROXIMATE, How.DERIVED)
    }


@pytest.mark.parametrize("target", ["fast_llm", "megatron"])
@pytest.mark.parametrize(
    ("kind", "shape"), [("WarmupDecayLR", "linear"), ("WarmupCosineLR", "cosine")]
)
def test_the_shape_and_steps_of_a_schedule_that_is_kept_are_shown(
    kind: str, shape: str, target: str
) -> None:
    data = {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "train_micro_batch_size_per_gpu": 1,
        "scheduler": {"type": kind, "params": {"total_num_steps": 10000, "warmup_num_steps": 100}},
    }
    found = {finding.path: finding for finding in translated("deepspeed", data, target).findings}
    for name, kept in (
        ("type", shape),
        ("params.total_num_steps", 10000),
        ("params.warmup_num_steps", 100),
    ):
        row = found[f"scheduler.{name}"]
        # The type becomes another word; the counts are the same, and are applied differently.
        assert (row.how, row.after or int(row.change)) == (How.APPROXIMATE, kept)


@pytest.mark.parametrize("target", ["automodel", "fast_llm", "megatron", "merak"])
def test_a_schedule_that_no_plan_holds_is_not_called_open(target: str) -> None:
    cycle = {"type": "OneCycle", "params": {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3}}
    data = {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "train_micro_batch_size_per_gpu": 1,
        "scheduler": cycle,
    }
    findings = translated("deepspeed", data, target).findings
    row = next(finding for finding in findings if finding.path == "scheduler.type")
    assert (row.how, row.message) == (
        How.DROPPED,
        "stagebridge does not translate the schedule OneCycle",
    )
    assert not any("leaves optimizer.schedule" in finding.message for finding in findings)
    assert any(f"the schedule OneCycle; {target} uses" in finding.message for finding in findings)


def test_the_base_of_rotary_positions_is_kept_and_no_finding_is_about_it() -> None:
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "vocab_size": 1000,
        "intermediate_size": 128,
    }
    data = {"model": {"config": {"model_type": "llama", "rope_theta": 500000.0, **sizes}}}
    result = translated("automodel", data, "fast_llm")
    assert "theta: 500000.0" in result.written.text
    assert not [f for f in result.findings if f.path == "model.config.rope_theta"]


HALF = f"{LAUNCH} --train-iters 100 --fp16"
LATER = {
    "train_micro_batch_size_per_gpu": 1,
    "fp16": {"enabled": True},
    "zero_optimization": {"stage": 1},
}
UNUSED = {"hysteresis": 5, "loss_scale_window": 39, "min_loss_scale": 9}
SCALED = {*UNUSED, *(f"fp16.{name}" for name in UNUSED)}


@pytest.mark.parametrize(
    ("source", "data", "target", "named"),
    [
        (
            "megatron",
            f"{HALF} --loss-scale-window 99".split(),
            "deepspeed",
            {"loss_scale_window", "min_loss_scale"},
        ),
        ("megatron", f"{HALF} --loss-scale-window 100".split(), "deepspeed", {"min_loss_scale"}),
        ("megatron", f"{HALF} --initial-loss-scale 8 --train-iters 4".split(), "deepspeed", set()),
        ("megatron", f"{HALF} --loss-scale 8".split(), "deepspeed", set()),
        ("megatron", f"{LAUNCH} --train-iters 10000 --bf16".split(), "deepspeed", set()),
        ("megatron", f"{HALF} --loss-scale-window 99".split(), "fast_llm", set()),
        ("deepspeed", LATER, "fast_llm", {"fp16.loss_scale_window", "fp16.min_loss_scale"}),
        ("deepspeed", LATER, "merak", {"fp16.loss_scale_window", "fp16.min_loss_scale"}),
        ("deepspeed", {**LATER, "fp16": {"enabled": True, "loss_scale": 128}}, "megatron", set()),
        (
            "deepspeed",
            {**LATER, "fp16": {"enabled": True, "loss_scale": 128} | UNUSED},
            "megatron",
            set(),
        ),
        (
            "deepspeed",
            {**LATER, "fp16": {"enabled": True, "loss_scale": 128} | UNUSED},
            "fast_llm",
            set(),
        ),
        ("deepspeed", {**LATER, "fp16": {"enabled": False}}, "megatron", set()),
    ],
)
def test_a_loss_scale_that_grows_later_or_stops_is_named_where_the_run_can_come_to_it(
    source: str, data: Any, target: str, named: set[str]
) -> None:
    result = translated(source, data, target)
    assert alarms(result) & SCALED == named
    told = {
        field.path.rpartition(".")[2] for field in result.fields if field.how is How.APPROXIMATE
    }
    assert {path.rpartition(".")[2] for path in named if target == "deepspeed"} <= told


def test_what_a_constant_rate_has_no_use_for_is_not_left_open() -> None:
    found = alarms(translated("deepspeed", {**LATER, "optimizer": {"type": "AdamW"}}, "fast_llm"))
    assert not any(
        "learning_rate.minimum" in path or "learning_rate.warmup" in path for path in found
    )


RECIPE: dict[str, Any] = {
    "model": {
        "_target_": "nemo_automodel.NeMoAutoModelForCausalLM.from_config",
        "config": {"_target_": "transformers.LlamaConfig", "num_hidden_layers": 2},
    },
    "step_scheduler": {"ckpt_every_steps": 100, "global_batch_size": 8, "local_batch_size": 1},
    "checkpoint": {"enabled": False, "checkpoint_dir": "out"},
    "optimizer": {"_target_": "torch.optim.Adam", "lr": 1e-3, "weight_decay": 0.0},
    "loss_fn": {"_target_": "nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy"},
}


RMS = [*LAUNCH.split(), "--normalization", "RMSNorm"]
MERAK = {"per_device_train_batch_size": 1, "weight_decay": 0.1}


@pytest.mark.parametrize(
    ("source", "data", "target", "named"),
    [
        ("megatron", RMS, "merak", "weight_decay"),
        ("megatron", LAUNCH.split(), "merak", ""),
        ("megatron", [*RMS, "--weight-decay", "0.0"], "merak", ""),
        ("merak", MERAK, "megatron", "args.weight_decay"),
        ("merak", MERAK, "fast_llm", "args.weight_decay"),
        ("merak", MERAK | {"weight_decay": 0.0}, "fast_llm", ""),
        ("fast_llm", {"optimizer": {"weight_decay": 0.1}}, "merak", "optimizer.weight_decay"),
        ("fast_llm", {"optimizer": {"weight_decay": 0.0}}, "merak", ""),
    ],
)
def test_norms_that_decay_in_one_stack_alone_are_named(
    source: str, data: Any, target: str, named: str
) -> None:
    assert {
        path for path in alarms(translated(source, data, target)) if "weight_decay" in path
    } == ({named} if named else set())


def test_fast_llm_is_told_how_long_to_train_and_how_long_sequences_are() -> None:
    result = translated("deepspeed", {"train_micro_batch_size_per_gpu": 1}, "fast_llm")
    assert [finding.path for finding in result.missing] == ["training.train_iters"]
    assert "data.micro_batch_size" in alarms(result)
    assert not translated("megatron", [*LAUNCH.split(), "--train-iters", "100"], "fast_llm").missing


LATENT = "--multi-latent-attention --kv-lora-rank 32 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16 --qk-layernorm"
DENSE = "--swiglu --disable-bias-linear --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0"


@pytest.mark.parametrize(("target", "start"), [("huggingface", ""), ("automodel", "model.config.")])
def test_a_model_without_experts_has_none_in_a_family_that_has_some_by_default(
    target: str, start: str
) -> None:
    result = translated("megatron", [*RMS, *LATENT.split(), *DENSE.split()], target)
    assert result.config.given[f"{start}first_k_dense_replace"] == 4
    assert lift(result.config).model.experts is None and not any(
        "expert" in path or "moe" in path for path in alarms(result)
    )


@pytest.mark.parametrize("target", ["megatron", "fast_llm", "merak", "deepspeed"])
def test_adam_without_decay_and_a_model_drawn_anew_are_no_loss(target: str) -> None:
    result = translated("automodel", RECIPE, target)
    quiet = {
        "optimizer._target_",
        "model._target_",
        "checkpoint.checkpoint_dir",
        "checkpoint.enabled",
        "loss_fn._target_",
    }
    assert alarms(result).isdisjoint(quiet)
    decayed = RECIPE | {
        "optimizer": {"_target_": "torch.optim.Adam", "lr": 1e-3, "weight_decay": 0.1}
    }
    assert target == "deepspeed" or "optimizer._target_" in alarms(
        translated("automodel", decayed, target)
    )


@pytest.mark.parametrize(
    ("change", "alarmed"),
    [
        (
            {"model": {"_target_": "nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained"}},
            "model._target_",
        ),
        (
            {"model": RECIPE["model"] | {"pretrained_model_name_or_path": "a/b"}},
            "model.pretrained_model_name_or_path",
        ),
        (
            {"checkpoint": {"restore_from": "there", "model_repo_id": "a/b"}},
            "checkpoint.model_repo_id",
        ),
        (
            {"loss_fn": {"_target_": "nemo_automodel.components.loss.kd_loss.KDLoss"}},
            "loss_fn._target_",
        ),
    ],
)
def test_stored_weights_and_other_losses_are_a_loss(change: dict[str, Any], alarmed: str) -> None:
    assert alarmed in alarms(translated("automodel", RECIPE | change, "megatron"))


def test_a_recipe_that_saves_nothing_makes_no_checkpoints_elsewhere() -> None:
    assert "save_interval" not in translated("automodel", RECIPE, "megatron").config.given
    given = lower(Plan.of({"run.save_interval": 0}), compat.load("automodel")).given
    assert given["checkpoint.enabled"] is False and "step_scheduler.ckpt_every_steps" not in given


def test_a_recipe_names_what_draws_its_model() -> None:
    llama = f"{LAUNCH} --swiglu --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights"
    dropless = f"{llama} --hidden-dropout 0 --attention-dropout 0"
    given = translated("megatron", dropless.split(), "automodel").config.given
    assert given["model._target_"] == RECIPE["model"]["_target_"]


@pytest.mark.parametrize("target", ["megatron", "fast_llm"])
def test_a_row_names_one_setting_once_with_its_own_value(target: str) -> None:
    """A default that stands for several fields is one row, and no setting of another meaning with a like value is named."""
    named = {
        "config": {
            "_target_": "transformers.AutoConfig.from_pretrained",
            "pretrained_model_name_or_path": "a/b",
        }
    }
    result = translated(
        "automodel",
        {"model": named, "optimizer": {"_target_": "torch.optim.AdamW", "lr": 1e-3}},
        target,
    )
    opened = [finding for finding in result.findings if finding.how is How.DEFAULTED]
    assert len(opened) == len({finding.path for finding in opened}) >= 3
    held = {**result.config.effective.flat(), **result.plan.values()}
    assert all(held.get(finding.path, finding.after) == finding.after for finding in opened)
    told = {finding.path: finding.message for finding in opened}
    assert "use_rotary_position_embeddings" not in told
    assert "model.tied" in told.get("untie_embeddings_and_output_weights", "model.tied")


HEADS = {"num_attention_heads": 4, "hidden_size": 64, "num_hidden_layers": 4, "vocab_size": 1000}


@pytest.mark.parametrize(
    ("source", "data", "target", "fact"),
    [
        ("megatron", [*LAUNCH.split(), "--bf16"], "merak", ""),
        ("huggingface", {"model_type": "phi", **HEADS}, "fast_llm", "model.norm.parallel"),
        ("huggingface", {"model_type": "phi", **HEADS}, "megatron", "model.norm.parallel"),
        (
            "huggingface",
            {"model_type": "gptj", "n_head": 4, "n_embd": 64, "n_layer": 4},
            "megatron",
            "model.norm.parallel",
        ),
    ],
)
def test_what_is_lost_is_named_once_and_by_no_key_of_another_family(
    source: str, data: Any, target: str, fact: str
) -> None:
    named = [
        finding.path
        for finding in translated(source, data, target).findings
        if finding.how is not None
    ]
    assert len(named) == len(set(named))
    assert not {"use_parallel_residual", "rotary_pct", "hidden_act", "rope_parameters"} & {*named}
    assert not fact or fact in named


def test_heads_of_latent_attention_have_no_width_by_division() -> None:
    latent = {
        "kv_lora_rank": 32,
        "q_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
    }
    result = translated("huggingface", {"model_type": "deepseek_v3", **HEADS, **latent}, "fast_llm")
    assert "head_size" not in result.written.text
    assert "model.attention.head_size" in alarms(result)


SWITCH, SHARE, BALANCE = "output_router_logits", "router_aux_loss_coef", "model.moe.balance"
STAGE = "zero_optimization.stage"
SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "train_micro_batch_size_per_gpu": 1}


def _balance(config: dict[str, Any], source: str = "huggingface") -> tuple[Any, Any]:
    """Coefficients of the balancing loss in Megatron, for two experts of a token, and in Fast-LLM, where the
    losses of 8 ranks are summed.
    """
    wrapped = {"model": {"config": config}} if source == "automodel" else config
    launch, recipe = (translated(source, wrapped, target) for target in ("megatron", "fast_llm"))
    text = next(
        line for line in recipe.written.text.splitlines() if "auxiliary_loss_coefficient" in line
    )
    return launch.config.given["moe_aux_loss_coeff"], 8 * float(text.partition(":")[2])


MIXTRAL = {"model_type": "mixtral", SHARE: 0.02, "num_experts_per_tok": 2}
QWEN = {"model_type": "qwen3_moe", SHARE: 0.02, "num_experts_per_tok": 2}


@pytest.mark.parametrize("share", [0.04, 0.0])
def test_experts_are_balanced_where_the_loss_is_trained(share: float) -> None:
    """A config keeps its coefficient for the code that trains the model; AutoModel is that code, and never trains it."""
    source = "huggingface" if share else "automodel"
    trained = _balance(MIXTRAL, source), _balance(MIXTRAL | {SWITCH: True}, source)
    assert trained == ((share, share / 2),) * 2
    assert _balance(MIXTRAL | {SWITCH: False}, source) == (0.0, 0.0)


def test_automodels_own_experts_do_not_look_at_the_switch() -> None:
    assert _balance(QWEN | {SWITCH: False}, "automodel") == (0.02, 0.01)
    assert _balance(QWEN | {SWITCH: False}) == (0.0, 0.0)


@pytest.mark.parametrize("target", ["megatron", "fast_llm"])
def test_one_loss_for_all_blocks_is_not_one_in_each(target: str) -> None:
    assert BALANCE in alarms(translated("huggingface", QWEN | {SWITCH: True}, target))
    assert BALANCE not in alarms(translated("automodel", {"model": {"config": QWEN}}, target))


def test_one_loss_in_each_block_is_written_for_automodels_own_experts() -> None:
    words = "--num-experts 8 --disable-bias-linear --moe-aux-loss-coeff 1e-2 --moe-router-topk 4 --hidden-size 64 --num-layers 2"
    plan = lift(compat.load("megatron").read(words.split(), None, 8)).values()
    qwen = Plan.of({**plan, "model.family": "qwen3_moe"})
    assert (
        lower(qwen, compat.load("automodel"), None, 8).given["model.config.router_aux_loss_coef"]
        == 0.01
    )


def test_a_recipe_says_what_names_automodels_own_experts() -> None:
    made = {"_target_": "nemo_automodel.NeMoAutoModelForCausalLM.from_config"}
    config = {"_target_": "transformers.Qwen3MoeConfig", "num_hidden_layers": 2}
    named = config | {"architectures": ["Qwen3MoeForCausalLM"]}
    assert "model.config._target_" in alarms(
        translated("automodel", {"model": made | {"config": config}}, "automodel")
    )
    assert "model.config._target_" not in alarms(
        translated("automodel", {"model": made | {"config": named}}, "automodel")
    )


# What comes back as it was and is something else in the target


@pytest.mark.parametrize(
    ("source", "data", "target", "path", "effect"),
    [
        ("merak", {"args.bf16": True}, "megatron", "args.bf16", Effect.NUMBERS),
        (
            "deepspeed",
            {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}, **SGD},
            "megatron",
            STAGE,
            Effect.COST,
        ),
    ],
)
def test_a_setting_that_means_something_else_is_told(
    source: str, data: Any, target: str, path: str, effect: Effect
) -> None:
    dialect = compat.load(source)
    config = dialect.read(data, None, 8) if source == "deepspeed" else dialect.config(data, None, 8)
    assert {
        finding.path: finding.effect for finding in translate(config, compat.load(target)).findings
    }.get(path) is effect


def test_what_came_from_a_launch_is_no_alarm_on_the_way_back() -> None:
    """Merak spares what Megatron spares in a model of LayerNorm, and a recipe leaves open what Megatron took before."""
    words = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --lr 1e-3"
    launch = compat.load("megatron").read(
        f"{words} --weight-decay 0.1 --micro-batch-size 1".split(), None, 8
    )
    for name in ("merak", "automodel"):
        there = translate(launch, compat.load(name))
        back = translate(there.config, launch.dialect, carry=there.carry)
        assert not alarms(back) & {
            "args.weight_decay",
            "model.norm.place",
            "optimizer.amsgrad",
            "model.attention.sinks",
        }
        assert back.config.given == launch.given


@pytest.mark.parametrize("target", ["megatron", "fast_llm"])
@pytest.mark.parametrize(
    ("source", "config", "named"),
    [
        ("huggingface", MIXTRAL, True),
        ("huggingface", QWEN, True),
        ("huggingface", MIXTRAL | {SWITCH: True}, False),
        ("huggingface", MIXTRAL | {SWITCH: False}, False),
        ("huggingface", MIXTRAL | {SHARE: 0.0}, False),
        ("automodel", MIXTRAL, False),
        ("automodel", MIXTRAL | {SWITCH: True}, False),
        ("automodel", QWEN, False),
    ],
)
def test_a_balancing_loss_that_the_source_does_not_train_is_named(
    source: str, config: Any, named: bool, target: str
) -> None:
    data, start = (
        ({"model": {"config": config}}, "model.config.") if source == "automodel" else (config, "")
    )
    rows = {
        f"{start}{SWITCH}",
        "model.moe.aux_trained",
    }  # a switch that says otherwise is no teller
    assert bool(rows & alarms(translated(source, data, target))) is named


def test_a_balancing_loss_without_weight_is_none() -> None:
    experts = f"{LAUNCH} --num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --swiglu"
    assert "moe_router_load_balancing_type" not in alarms(
        translated("megatron", experts.split(), "fast_llm")
    )


def test_a_balancing_loss_arrives_with_the_switch_that_trains_it() -> None:
    experts = f"{LAUNCH} --num-experts 4 --moe-router-topk 2 --swiglu --normalization RMSNorm --disable-bias-linear"
    for loss, on in (("0.02", True), ("0.0", None)):
        given = translated(
            "megatron", f"{experts} --moe-aux-loss-coeff {loss}".split(), "huggingface"
        ).config.given
        assert (given.get(SHARE), given.get(SWITCH)) == (float(loss) / 2, on)


def test_each_setting_of_a_section_has_a_row_with_its_own_effect_and_reason() -> None:
    head = {"final_logit_softcap": 30.0, "prediction_heads": 2, "cross_entropy_splits": 4}
    section = {
        "hidden_size": 64,
        "embeddings": {"lr_scale": 0.5},
        "decoder": {"num_blocks": 4},
        "head": head,
    }
    found = {
        f.path: f
        for f in translated("fast_llm", {"model": {"base_model": section}}, "megatron").findings
        if f.given
    }
    start = "model.base_model."
    lost = {"embeddings.lr_scale", *(f"head.{name}" for name in head)}
    assert {path.removeprefix(start) for path in found if path.startswith(start[:-1])} == lost
    assert found[f"{start}head.cross_entropy_splits"].effect is Effect.ROUNDING
    assert found[f"{start}head.final_logit_softcap"].effect is Effect.NUMBERS
    assert (
        found[f"{start}head.prediction_heads"].message
        == "stagebridge does not translate head.prediction_heads"
    )
    assert not any("recomputation" in finding.message for finding in found.values())
    free = {"model": {"trust_remote_code": True, "made_up": 3}, "own": {"a": {"b": 1}, "c": 2}}
    found = {f.path: f for f in translated("automodel", free, "megatron").findings if f.given}
    assert found["model.trust_remote_code"].effect is Effect.NONE
    assert {found[path].effect for path in ("model.made_up", "own.a.b", "own.c")} == {
        Effect.NUMBERS
    }


@pytest.mark.parametrize("source", ["huggingface", "automodel"])
def test_what_is_again_what_it_was_is_no_loss_on_the_way_back(source: str) -> None:
    keys = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2}
    there = translated(
        source, keys if source == "huggingface" else {"model": {"config": keys}}, "megatron"
    )
    back = translate(there.config, compat.load(source), carry=there.carry)
    assert back.config.given == there.source.given
    assert not {path for path in alarms(back) if path.startswith("model.")}


def test_of_a_row_on_a_secret_only_its_value_is_hidden() -> None:
    row = {
        "path": "own.tracking.password",
        "how": "dropped",
        "effect": "different numbers",
        "before": "hunter2secret9",
    }
    hidden = Secrets().within(row)
    assert {key for key in row if hidden[key] != row[key]} == {"before"}


ARGUMENTS = ["--optimizer", "muon", "--micro-batch-size", "1", "--lr", "1e-3"]
LIKE_DEEPSPEED = ["--muon-nesterov", "--muon-scale-mode", "shape_scaling"]


@pytest.mark.parametrize("given", [[], LIKE_DEEPSPEED[:1], LIKE_DEEPSPEED[1:], LIKE_DEEPSPEED])
def test_what_deepspeeds_muon_always_does_is_told_where_megatrons_does_otherwise(
    given: list[str],
) -> None:
    found = alarms(translated("megatron", [*ARGUMENTS, *given], "deepspeed"))
    assert {"muon_nesterov", "muon_scale_mode"} & found == {
        flag[2:].replace("-", "_")
        for flag in LIKE_DEEPSPEED
        if flag.startswith("--") and flag not in given
    }


def test_deepspeeds_muon_makes_the_same_steps_in_megatron() -> None:
    data = {
        "optimizer": {"type": "Muon", "params": {"lr": 1e-3}},
        "train_micro_batch_size_per_gpu": 1,
    }
    result = translated("deepspeed", data, "megatron")
    said = result.config.given
    assert (said["muon_nesterov"], said["muon_scale_mode"], said["muon_momentum"]) == (
        True,
        "shape_scaling",
        0.95,
    )
    named = {path for path in alarms(result) if path.startswith("optimizer.")}
    assert named <= {"optimizer.schedule.name"}


WITH_DROPOUT = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --global-batch-size 8"
    " --train-iters 10 --lr 1e-3 --vocab-size 100 --attention-dropout 0 --hidden-dropout"
)
MOE = "0 --num-experts 4 --moe-aux-loss-coeff 0.01 --moe-router-load-balancing-type"
CUT = [
    ("0", ""),
    ("0 --eod-mask-loss --calculate-per-token-loss", ""),
    (f"{MOE} seq_aux_loss", ""),
    (f"{MOE} none", ""),
    ("0.1", "dropout"),
    ("0 --eod-mask-loss", "tokens the loss leaves out"),
    (f"{MOE} aux_loss", "experts"),
    (f"{MOE} sinkhorn", "experts"),
    (f"{MOE} none --moe-expert-capacity-factor 1.0", "experts"),
    ("0 --bf16 --transformer-impl transformer_engine --fp8-format hybrid", "8 bits"),
]
"""Launches, each with the reason why the size of a microbatch changes its numbers."""


def launched(words: str, ranks: int = 1) -> Config:
    return compat.load("megatron").read(f"{WITH_DROPOUT} {words}", None, ranks)


@pytest.mark.parametrize(("words", "reason"), CUT)
def test_the_size_of_a_microbatch_changes_numbers_where_something_is_computed_over_one(
    words: str, reason: str
) -> None:
    one, other = (launched(f"{words} --micro-batch-size {size}") for size in (2, 1))
    for found in (compare(one, other), compare(other, one)):
        row = next(row for row in found if row.path == "micro_batch_size")
        assert row.effect is (Effect.NUMBERS if reason else Effect.ROUNDING)
        assert (
            reason or "in other microbatches"
        ) in row.message and "other ranks" not in row.message


@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
def test_another_arrangement_of_the_same_ranks_is_the_same_up_to_rounding(axis: str) -> None:
    # The gradients of all ranks are clipped by one norm, with one rank for a copy of the model too.
    run = "0 --micro-batch-size 1 --padded-vocab-size 128"
    one, other = launched(run, 2), launched(f"{run} --{axis}-model-parallel-size 2", 2)
    for found in (compare(one, other), compare(other, one)):
        assert kind(found) == "same up to rounding"


@pytest.mark.parametrize("target", ["merak", "fast_llm", "deepspeed"])
@pytest.mark.parametrize(
    "words",
    [
        "",
        "--bf16",
        "--use-distributed-optimizer",
        "--bf16 --use-distributed-optimizer --pipeline-model-parallel-size 2",
        "--fp16 --tensor-model-parallel-size 2",
    ],
)
def test_convert_and_diff_count_the_same_causes(words: str, target: str) -> None:
    source = launched(f"0 --micro-batch-size 1 {words}", 4)
    result = translate(source, compat.load(target))
    assert not result.missing
    convert_says = verdict((*remarks(source), *result.findings))
    assert verdict(compare(source, result.config)) == convert_says


def deepspeed(**more: Any) -> Config:
    data = {"train_batch_size": 8, "optimizer": {"type": "Adam", "params": {"lr": 1e-3}}, **more}
    return compat.load("deepspeed").read(data, None, 1)


FOLLOWING = [
    (
        launched("0 --micro-batch-size 1"),
        launched("0 --micro-batch-size 1 --tensor-model-parallel-size 2", 2),
        "tensor_model",
    ),
    (
        deepspeed(bf16={"enabled": True}),
        deepspeed(torch_autocast={"enabled": True, "dtype": "bfloat16"}),
        "bf16.enabled",
    ),
]


@pytest.mark.parametrize(("one", "other", "name"), FOLLOWING, ids=["rows", "formats"])
def test_a_difference_names_the_settings_that_it_follows_from(
    one: Config, other: Config, name: str
) -> None:
    assert any(f"this follows from {name}" in row.message for row in compare(one, other))
    for found in (compare(one, other), compare(other, one)):
        following = [row for row in found if "follows" in row.message]
        given = {*one.given, *other.given}
        assert following and all(any(path in row.message for path in given) for row in following)
        # Rows speak of settings, or in plain English.
        assert {row.path for row in found}.isdisjoint(paths())
        assert not [
            row
            for row in found
            if "plan" in row.message or ("alone" in row.change and "file alone" not in row.change)
        ]


CYCLE = {"cycle_min_lr": 1e-5, "cycle_max_lr": 1e-3, "cycle_first_step_size": 10}
RANGE = {"lr_range_test_min_lr": 1e-4, "lr_range_test_step_size": 10}


@pytest.mark.parametrize(("kind", "params"), [("OneCycle", CYCLE), ("LRRangeTest", RANGE)])
@pytest.mark.parametrize("target", ["megatron"])
def test_a_schedule_that_no_plan_holds_is_one_cause_in_both_commands(
    kind: str, params: dict[str, Any], target: str
) -> None:
    source = deepspeed(scheduler={"type": kind, "params": params}, gradient_clipping=1.0)
    result = translate(source, compat.load(target))
    said = f"stagebridge does not translate the schedule {kind}"
    told = [one for one in remarks_of(result) if one.how is not How.MISSING]
    for found in (told, compare(source, result.config), compare(result.config, source)):
        rows = [
            cause
            for cause in causes(found)
            if any("scheduler." in f"{one.path} {one.change}" for one in cause.findings)
        ]
        assert sorted(cause.message for cause in rows) == [
            "a setting of DeepSpeed's own scheduler",
            said,
        ]
        assert "warmup_num_steps" not in str(found)


def test_a_lost_ramp_of_the_batch_says_how_many_steps_are_left() -> None:
    flags = (
        "--micro-batch-size 1 --global-batch-size 64 --rampup-batch-size 16 16 1000 --train-samples 640000 --num-layers 4 "
        "--hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --lr 1e-4 --vocab-size 100 "
        "--lr-decay-style constant --tokenizer-type NullTokenizer"
    )
    (lost,) = (
        row
        for row in translated("megatron", flags.split(), "deepspeed").findings
        if row.path == "rampup_batch_size"
    )
    assert "the run then has 10,000 steps of 64 samples from the start" in lost.message


def test_an_error_of_the_target_names_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> Config:
        raise ConfigError("num_layers: found 12, expected a multiple of 8")

    monkeypatch.setattr(translation, "lower_values", refuse)
    with pytest.raises(ConfigError, match="converted to Megatron-Core: num_layers: found 12"):
        translated("deepspeed", {"train_micro_batch_size_per_gpu": 1}, "megatron")


GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "vocab_size": 64,
}
QWEN2: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
CYCLE = {"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-2}
ADAM: dict[str, Any] = {
    "train_batch_size": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
}


@pytest.mark.parametrize(
    ("source", "data", "ignored", "path"),
    [
        ("huggingface", GPT2, {"v_head_dim": 8}, "v_head_dim"),
        ("huggingface", QWEN2, {"norm_eps": 0.5}, "norm_eps"),
        ("deepspeed", ADAM, {"scheduler": {"params": {"cycle_max_mom": 0.5}}}, "scheduler.params"),
    ],
)
def test_a_setting_that_the_stack_ignores_is_loud_alone_and_no_difference_of_two_runs(
    source: str, data: dict[str, Any], ignored: dict[str, Any], path: str
) -> None:
    dialect = compat.load(source)
    without, given = dialect.read(data, None, 1), dialect.read({**data, **ignored}, None, 1)
    assert path in {one.path for one in remarks(given) if one.effect is Effect.NUMBERS}
    found = compare(without, given)
    assert path in {one.path for one in found}
    assert not any(one.effect.reaches(Effect.COST) for one in found)


@pytest.mark.parametrize(
    ("given", "effect"),
    [
        ({"gradient_allreduce_op": "mean"}, Effect.NONE),
        ({"gradient_allreduce_op": "sum"}, Effect.NUMBERS),
        (
            {"scheduler": {"type": "OneCycle", "params": {**CYCLE, "decay_mom_rate": 0.5}}},
            Effect.NONE,
        ),
        (
            {
                "scheduler": {
                    "type": "OneCycle",
                    "params": {**CYCLE, "decay_mom_rate": 0.5, "decay_step_size": 2},
                }
            },
            Effect.NUMBERS,
        ),
    ],
)
def test_a_key_of_deepspeed_is_a_loss_only_where_its_value_does_something(
    given: dict[str, Any], effect: Effect
) -> None:
    found = {
        one.path: one.effect
        for one in translated("deepspeed", {**ADAM, **given}, "megatron").findings
    }
    assert (
        found.get(
            "gradient_allreduce_op", found.get("scheduler.params.decay_mom_rate", Effect.NONE)
        )
        is effect
    )


@pytest.mark.parametrize(
    ("more", "same"), [("", True), ("--use-legacy-models --ckpt-format torch", False)]
)
def test_megatron_cores_layers_ignore_where_a_residual_connection_starts(
    more: str, same: bool
) -> None:
    flags = f"--num-layers 2 --hidden-size 32 --num-attention-heads 4 --lr 1e-3 {more}".split()
    one, other = (
        compat.load("megatron").read([*flags, *switch], "0.17.0", 1)
        for switch in ([], ["--apply-residual-connection-post-layernorm"])
    )
    assert all(not found.effect.reaches(Effect.NUMBERS) for found in compare(one, other)) is same


def test_a_table_of_words_that_is_given_with_its_padding_is_not_left_open() -> None:
    sizes = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16"
    flags = [*sizes.split(), "--padded-vocab-size", "128"]
    assert "model.vocab" not in {
        found.path for found in translated("megatron", flags, "fast_llm").findings
    }


@pytest.mark.parametrize("target", ["megatron", "fast_llm", "merak"])
def test_a_number_never_becomes_a_switch(target: str) -> None:
    scaled = {"fp16": {"enabled": True, "loss_scale_window": 500, "min_loss_scale": 8}}
    result = translated("deepspeed", {"train_batch_size": 8, **scaled}, target)
    rows = [one for one in result.findings if one.path == "fp16.loss_scale_window"]
    assert rows
    for row in rows:
        assert row.change.startswith("500; precision.loss_scale.late ") or not isinstance(
            row.after, bool
        )


def test_a_micro_batch_that_arrives_is_not_lost_with_the_length_of_the_samples() -> None:
    data = {"micro_batch_size": 512, "maximum_document_length": 512}
    source = {"data": data, "training": {"train_iters": 10}}
    result = translated("fast_llm", source, "deepspeed")
    assert result.config.given["train_micro_batch_size_per_gpu"] == 1
    assert not {path for path in alarms(result) if path.startswith("data.")}


def test_a_default_is_no_loss_where_the_way_back_does_not_start() -> None:
    """Megatron refuses seven layers on two ranks without the embedding's account, which Fast-LLM does not have."""
    lost = []
    for layers, more in (("7", ["--account-for-embedding-in-pipeline-split"]), ("8", [])):
        flags = LAUNCH.replace("--num-layers 4", f"--num-layers {layers}").split()
        flags += ["--pipeline-model-parallel-size", "2", *more]
        result = translated("megatron", flags, "fast_llm")
        assert (result.trip.back is None) is bool(more)
        # By plan field: of two flags for one field, the way back decides which one is named.
        lost.append(
            {
                tuple(one.about) or one.path
                for one in result.findings
                if one.effect.reaches(Effect.COST)
            }
        )
    (added,) = lost[0] - lost[1]
    assert lost[1] < lost[0] and "stages.rule" in added


@pytest.mark.parametrize(("positions", "length"), [(1024, 1024), (4096, 2048)])
def test_documents_that_nobody_sized_fit_the_learned_positions(positions: int, length: int) -> None:
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 512, "n_positions": positions}
    model = {
        "_target_": RECIPE["model"]["_target_"],
        "config": {"_target_": "transformers.GPT2Config", **sizes},
    }
    result = translated("automodel", {**RECIPE, "model": model}, "fast_llm")
    assert result.config.given["data.maximum_document_length"] == length
    assert not [one for one in result.findings if one.effect is Effect.STOPS]


def test_a_setting_of_a_model_without_a_family_has_the_one_row_on_its_field() -> None:
    sizes = {"n_layer": 10, "vocab_size": 100, "hidden_size": 64, "num_attention_heads": 2}
    result = translated("automodel", {"model": {"config": sizes}}, "fast_llm")
    (row,) = (row for row in result.findings if "model.layers" in row.about)
    assert (row.path, row.before, row.after) == ("model.config.n_layer", 10, None)
    assert row.message.startswith("no known family of models says what this key does")


@pytest.mark.parametrize("version", ["0.6.0", "0.7.0"])
def test_formats_of_automodel_that_nobody_chose_are_no_loss(version: str) -> None:
    data = {"model": {"torch_dtype": "bf16"}, "distributed": {"strategy": "fsdp2", "dp_size": 8}}
    config = compat.load("automodel").read(data, version, 8)
    rows = translate(config, compat.load("megatron")).findings
    assert not [row.path for row in rows if row.path.startswith("distributed.mp_policy")]


def test_what_no_setting_of_a_section_tells_has_a_row_on_the_section() -> None:
    """The norm before the output layer keeps its default, which is not the norm of the blocks."""
    block = {"normalization": {"type": "rms_norm"}, "mixer": {"heads": 8}}
    words = {"word_embeddings": {"initialization": {"type": "normal", "std": 0.5}}}
    model = {
        "hidden_size": 256,
        "head": {},
        "decoder": {"num_blocks": 4, "block": block},
        "embeddings": words,
    }
    result = translated("fast_llm", {"model": {"base_model": model}}, "megatron")
    (row,) = (row for row in result.findings if row.path == "model.base_model")
    assert "head.normalization" in row.message and "(0.0625, 0.5)" in row.message
    assert row.effect is Effect.NUMBERS
    assert "model.base_model.head" not in alarms(result)


@pytest.mark.parametrize(
    ("target", "words", "path"),
    [
        (
            "fast_llm",
            "--num-experts 4 --swiglu --disable-bias-linear",
            "model.distributed.tensor_parallel",
        ),
        ("", "--num-layers-per-virtual-pipeline-stage 1", "global_batch_size"),
    ],
)
def test_one_size_that_does_not_fit_is_one_stop(target: str, words: str, path: str) -> None:
    launch = (
        "--num-layers 8 --hidden-size 64 --num-attention-heads 8 --ffn-hidden-size 63 --bf16 --lr 1e-3"
        " --seq-length 64 --max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 2"
        " --train-iters 9 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4"
        f" --sequence-parallel {words}"
    )
    source = compat.load("megatron").read(launch, None, 8)
    rows = translate(source, compat.load(target)).findings if target else source.findings
    stops = [row for row in rows if row.effect is Effect.STOPS and row.path == path]
    assert len(stops) == 1


def test_two_runs_do_not_differ_by_a_default_that_neither_has() -> None:
    """Fast-LLM has a length of its own where none is given; here the file has one, and the script of
    DeepSpeed the other.
    """
    batch = {"micro_batch_size": 1, "batch_size": 1, "sequence_length": 768}
    run = compat.load("fast_llm").read({"batch": batch}, "0.3.0", 1)
    rows = compare(run, translate(run, compat.load("deepspeed")).config)
    (row,) = (row for row in rows if "model.sequence" in row.about)
    assert (row.path, row.effect) == ("batch.sequence_length", Effect.NONE)


@pytest.mark.parametrize(("momentum", "stops"), [({}, True), ({"momentum": 0.9}, False)])
def test_nesterov_without_a_momentum_stops_torchs_sgd(
    momentum: dict[str, Any], stops: bool
) -> None:
    recipe = {"_target_": "torch.optim.SGD", "lr": 0.1, "nesterov": True, **momentum}
    rows = translated("automodel", {"optimizer": recipe}, "deepspeed").findings
    said = [row for row in rows if row.path == "optimizer.params.nesterov"]
    assert any(row.effect is Effect.STOPS for row in said) is stops
