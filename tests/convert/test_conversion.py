"""Real Megatron launches become DeepSpeed configs: accepted by the real class, and equal to a table written by hand."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import compat
from bridge.errors import BridgeError
from bridge.stack.rules import Effect
from bridge.translation.translate import Result, translate

SAMPLE = Path(__file__).parents[1] / "stacks" / "megatron" / "sample.jsonl"
STRATEGIES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}


def rows(path: Path) -> Iterator[dict[str, Any]]:
    """Launches that Megatron's parser and its model's config class accept."""
    for line in path.read_text().splitlines():
        row = json.loads(line)
        if "args" in row and "config_rejected" not in row:
            yield row


def accepted_rows(shared: Path | None) -> Iterator[dict[str, Any]]:
    """Launches that Megatron's optimizer config accepts as well."""
    found = rows(shared / "truth" / "megatron_cli.jsonl" if shared else SAMPLE)
    return (row for row in found if "optimizer_rejected" not in row)


def to_deepspeed(row: Mapping[str, Any]) -> Result:
    source = compat.load("megatron").read(
        row["flags"], row["version"], row["world_size"], lenient=True
    )
    return translate(source, compat.load("deepspeed"))


def expected_stage(args: Mapping[str, Any]) -> int:
    """ZeRO level of a launch, then what DeepSpeed can run right: the pipeline engine takes 0 and 1; stage 0 takes a phantom
    optimizer step in half precision and clips by a wrong norm under a pipeline, where stage 1 gives the same numbers."""
    sharded = args.get("use_megatron_fsdp") or args.get("use_custom_fsdp")
    stage = STRATEGIES[args.get("data_parallel_sharding_strategy") or "no_shard"] if sharded else 0
    if not sharded and args.get("use_torch_fsdp2"):
        stage = 3 if args.get("torch_fsdp2_reshard_after_forward", True) else 2
    elif not sharded and args["use_distributed_optimizer"]:
        stage = 1
    pipeline = args["pipeline_model_parallel_size"] > 1
    stage = min(stage, 1) if pipeline else stage
    return (
        max(stage, 1)
        if args["bf16"] or args["fp16"] or (pipeline and args["clip_grad"] > 0)
        else stage
    )


def convertible(shared: Path | None) -> Iterator[tuple[dict[str, Any], Result]]:
    """Launches with what they become; not those whose ranks would come to take data, of which the batch has too little."""
    for row in accepted_rows(shared):
        try:
            yield row, to_deepspeed(row)
        except BridgeError as error:
            assert "context ranks become data-parallel ranks" in str(error), row["recipe"]


def data_ranks(result: Result) -> int:
    """Those of the launch, and where DeepSpeed has no way to share its sequences the ranks that shared them."""
    tensor, stages, context = (
        result.plan.values().get(f"parallel.{axis}") or 1
        for axis in ("tensor", "pipeline", "context")
    )
    data, heads = (
        result.source.effective["data_parallel_size"],
        result.plan.values().get("model.heads") or 1,
    )
    return int(data * context if stages > 1 or heads % (tensor * context) else data)


def expected(args: Mapping[str, Any], data: int) -> dict[str, Any]:
    """What the reference says a DeepSpeed config of this launch holds; a global batch that is no multiple of micro batch x
    data ranks, with which Megatron stops at the start, is rounded down to one."""
    micro = args["micro_batch_size"]
    steps = max(1, args["global_batch_size"] // (micro * data))
    table: dict[str, Any] = {
        "zero_optimization.stage": expected_stage(args),
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": steps,
        "train_batch_size": micro * steps * data,
        "gradient_clipping": args["clip_grad"],
        "fp16.enabled": bool(args["fp16"]),
        "bf16.enabled": bool(args["bf16"]),
    }
    if args["fp16"]:
        table |= {
            "fp16.loss_scale": args["loss_scale"] or 0,
            "fp16.initial_scale_power": int(args["initial_loss_scale"]).bit_length() - 1,
            "fp16.loss_scale_window": args["loss_scale_window"],
            "fp16.hysteresis": args["hysteresis"],
            "fp16.min_loss_scale": args["min_loss_scale"],
        }
    return table


def test_every_launch_equals_the_table(shared: Path | None) -> None:
    shares: Counter[str] = Counter()
    for row, result in convertible(shared):
        wanted = expected(row["args"], data_ranks(result))
        assert {path: result.config.effective[path] for path in wanted} == wanted, (
            row["recipe"],
            row["version"],
        )
        shares["rows"] += 1
        shares["same numbers"] += all(
            finding.effect is not Effect.NUMBERS for finding in result.findings
        )
    print(
        f"{shares['same numbers']} of {shares['rows']} launches have no finding of effect 'different numbers'"
    )
    assert shares["rows"] > 1040 if shared else shares["rows"] == 161


def test_what_the_optimizers_class_refuses_is_refused() -> None:
    """The parser takes these launches; `OptimizerConfig.__post_init__` stops them, at each of these releases."""
    refused = [row for row in rows(SAMPLE) if "optimizer_rejected" in row]
    assert len(refused) == 7
    for row in refused:
        with pytest.raises(BridgeError, match="precision_aware_optimizer"):
            compat.load("megatron").read(
                row["flags"], row["version"], row["world_size"], lenient=True
            )


def test_the_real_class_accepts_every_launch(shared: Path | None) -> None:
    pytest.importorskip("deepspeed", reason="the differential test needs DeepSpeed")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from compat.deepspeed.live import real

    for row, result in convertible(shared):
        wanted = expected(row["args"], data_ranks(result))
        config = real(json.loads(result.written.text), data_ranks(result))
        assert config.train_batch_size == wanted["train_batch_size"], row["recipe"]
        assert config.gradient_accumulation_steps == wanted["gradient_accumulation_steps"], row[
            "recipe"
        ]
        assert config.zero_config.stage == wanted["zero_optimization.stage"], row["recipe"]
        assert config.gradient_clipping == wanted["gradient_clipping"], row["recipe"]
