"""`verify` finds what stacks get wrong by measuring alone: no rule of ours is asked."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

from bridge.verify.judge import Report, VerdictRow
from tests.engine.backends import planted, verified
from tests.verify.test_planted import EXPERTS, MEGATRON

pytestmark = [
    pytest.mark.usefixtures("foreign"),
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed"),
]

RELEASE = {"version": "0.19.8", "world_size": 2}
ADAMW = {"type": "AdamW", "params": {"lr": 1e-3, "eps": 1e-3, "weight_decay": 0.0}}
FILE = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "optimizer": ADAMW,
    "gradient_clipping": 0.05,
}


def reported(run: Any, content: dict[str, Any], code: dict[str, Any] | None = None) -> Report:
    """The report on a DeepSpeed file, translated to a stack that averages losses over tokens and has no engine here."""
    source = ("deepspeed", {**FILE, **content}, {**RELEASE, "code": code})
    first, second = run(2, verified, source, "fast_llm", 3)
    assert first == second, "all ranks get the same report"
    return first  # type: ignore[no-any-return]


def only_fault(report: Report) -> VerdictRow:
    """The one run that differs: the file as its own stack runs it."""
    (fault,) = (row for row in report.rows if row.verdict == "differs" and row.side == "source")
    assert fault.side == "source" and fault.written and fault.engine.startswith("DeepSpeed")
    assert (
        "DeepSpeed does not do what the file says" in fault.cause and "known fault: " in fault.cause
    ), fault.cause
    return fault


def test_a_sound_file_runs_as_it_means_and_the_order_of_averages_is_told(run: Any) -> None:
    report = reported(run, {"zero_optimization": {"stage": 2}})
    (fault,) = (row for row in report.rows if row.verdict == "differs")
    assert (
        fault.side == "target"
        and "loss changed from mean_of_microbatches to per_token (`convert`" in fault.cause
    )
    assert "only one of the two stacks ran its own file" in report.lacking[0]
    assert [row.verdict for row in report.rows if row.written and row.side == "source"] == ["same"]


def test_deepspeeds_wrong_norm_with_a_pipeline_at_stage_0_is_found(run: Any) -> None:
    fault = only_fault(reported(run, {}, {"pipeline_stages": 2}))
    assert fault.distance is not None and fault.distance.share > 1.05, (
        "it clips too little: by the norm of one stage"
    )
    for healed in (
        "gradient_clipping 0.0",
        "code.pipeline_stages unset",
        "zero_optimization.stage 1",
    ):
        assert healed in fault.cause


def test_the_phantom_step_of_bf16_at_stage_0_is_found(run: Any) -> None:
    # DeepSpeed's own remark on Adam is near, and explains nothing of the difference.
    adam = {"type": "Adam", "params": {"lr": 1e-3, "weight_decay": 0.1}}
    fault = only_fault(reported(run, {"bf16": {"enabled": True}, "optimizer": adam}))
    assert fault.distance is not None and fault.distance.share == pytest.approx(0.744, abs=0.02), (
        "one bias correction ahead"
    )
    for healed in ("optimizer.type SGD", "bf16.enabled False", "zero_optimization.stage 1"):
        assert healed in fault.cause
    assert "gradient_clipping" not in fault.cause and "Adam decays" not in fault.cause


def test_a_schedule_is_not_blamed_on_a_type_that_is_read_as_it_means(run: Any) -> None:
    adam = {"type": "Adam", "params": {"lr": 1e-3, "eps": 1e-3, "weight_decay": 0.1}}
    warmup = {
        "type": "WarmupDecayLR",
        "params": {"warmup_num_steps": 4, "warmup_max_lr": 1e-3, "total_num_steps": 20},
    }
    report = reported(
        run, {"optimizer": adam, "scheduler": warmup, "zero_optimization": {"stage": 1}}
    )
    (fault,) = (row for row in report.rows if row.verdict == "differs" and row.side == "source")
    assert "scheduler.type" in fault.cause and "optimizer.type" not in fault.cause, fault.cause


def test_a_scale_that_doubles_late_is_the_same_run(run: Any) -> None:
    report = reported(
        run, {"fp16": {"enabled": True, "loss_scale_window": 2}, "zero_optimization": {"stage": 1}}
    )
    (source,) = (row for row in report.rows if row.written and row.side == "source")
    assert source.verdict == "same", source


@pytest.mark.skipif(find_spec("megatron") is None, reason="Megatron-Core is not installed")
def test_experts_heads_gates_and_rotary_positions_are_kept_on_both_engines(run: Any) -> None:
    text = f"{MEGATRON} {EXPERTS} --moe-aux-loss-coeff 0 --use-distributed-optimizer"
    report = run(
        2, verified, ("megatron", text, {"version": "0.16.1", "world_size": 2}), "deepspeed", None
    )[0]
    assert report.verdict == "same" and not report.lacking, report
    assert report.rows[-1].engine.endswith("the written script and model"), report
    assert (
        not {"model.experts", "model.kv_heads", "model.moe.top_k", "model.rotary.base"}
        & report.changes.keys()
    )


GPT = """
--num-layers 12 --hidden-size 512 --num-attention-heads 8 --seq-length 512 --max-position-embeddings 512 --vocab-size 1000
--attention-dropout 0 --hidden-dropout 0 --micro-batch-size 2 --global-batch-size 4 --train-iters 2000 --lr 1e-3 --clip-grad 1.0
--pipeline-model-parallel-size 2
"""


@pytest.mark.skipif(find_spec("megatron") is None, reason="Megatron-Core is not installed")
def test_a_gpt_in_stages_is_the_same_run_where_rounding_alone_moves_the_biases_of_keys(
    run: Any,
) -> None:
    report = run(
        2, verified, ("megatron", GPT, {"version": "0.16.1", "world_size": 2}), "deepspeed", 3
    )[0]
    assert report.verdict == "same" and report.rows[-1].engine.endswith(
        "the written script and model"
    ), report
    assert report.rounding is not None and {
        name.partition(".")[2] for name in report.rounding.noise
    } == {"attention.key.bias"}


OTHERWISE = "script, or the model's config.json, changes the training"
ANOTHER = "written config.json, or the script that reads it, makes a different model"
WRITTEN = {
    "rotary base": (".model.json", '"rope_theta": 500000', '"rope_theta": 10000', OTHERWISE),
    "norm eps": (".model.json", '"rms_norm_eps": 1e-05', '"rms_norm_eps": 1e-2', ANOTHER),
    "decay of norms": (".train.py", '"weight_decay": 0.0', '"weight_decay": 9.0', OTHERWISE),
    "warmup": (
        ".train.py",
        "start, warmup, total = 0.0, 2, 5",
        "start, warmup, total = 0.0, 3, 5",
        OTHERWISE,
    ),
    "end of the schedule": (".train.py", "done = min(1.0,", "done = min(9.0,", OTHERWISE),
    "padded words": (".train.py", "config.vocab_size = 272", "config.vocab_size = 256", ANOTHER),
    "order of samples": (
        ".train.py",
        "range(first, first + rows)",
        "range(first + 1, first + 1 + rows)",
        "KeyError",
    ),
}
"""Faults in the files that `convert --script` writes, and what is said of them."""


@pytest.mark.parametrize("name", WRITTEN)
def test_a_fault_in_the_script_or_the_models_config_is_found(run: Any, name: str) -> None:
    *fault, said = WRITTEN[name]
    (report,) = run(1, planted, MEGATRON.replace("--bf16", ""), *fault)
    row = report.rows[-1]
    if row.lacks:  # the script does not run at all, and no verdict is whole then
        assert said in row.lacks and report.lacking, row
    else:
        assert (
            report.verdict == row.verdict == "differs"
            and f"the translation is at fault: the {said}" in row.cause
        ), row


def test_gradients_lost_by_manual_accumulation_are_found(run: Any) -> None:
    content = {
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": 1},
        "gradient_clipping": 0.0,
    }
    report = reported(run, content, {"manual_accumulation": True})
    fault = next(row for row in report.rows if row.written and row.side == "source")
    assert (
        fault.verdict == "differs"
        and fault.distance is not None
        and (fault.distance.norm or 0) > 0.2
    )
    for healed in (
        "DeepSpeed does not do what",
        "code.manual_accumulation unset",
        "zero_optimization.stage 0",
    ):
        assert healed in fault.cause
