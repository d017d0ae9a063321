"""Megatron-Core itself trains what the engine trains: the same losses, norms and weights, on one rank and split in every way."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.engine.pool import Pool

if find_spec("megatron") is None:
    pytest.skip("Megatron-Core is not installed", allow_module_level=True)

from bridge.cli import run as stagebridge
from bridge.engine import initialize
from bridge.engine.data import Text
from bridge.engine.interface import Workload
from bridge.engine.models.gpt import GPT, mean_cross_entropy
from bridge.engine.training import microbatches
from bridge.errors import BridgeError
from bridge.layout.outline import Outline
from bridge.plan.plan import Plan
from bridge.translation.lift import lift
from compat.megatron.dialect import DIALECT
from compat.megatron.runtime import cpu
from compat.megatron.runtime.backend import BACKEND, architecture
from compat.megatron.runtime.weights import Share, pieces
from tests.engine.megatron_runs import GATED, LEARNED, Found, case_of, on_engine, on_megatron
from tests.engine.runs import Case

pytestmark = pytest.mark.usefixtures("foreign")
EVEN = replace(GATED, norm="layer", hidden=64, ffn=128, vocab=128, layers=2)
"""Sizes that Megatron's buffers, which pad each parameter to 64 elements and their end to 128, take as they are."""
INTERLEAVED = {"schedule__name": "interleaved_1f1b", "schedule__virtual": 2}
OVERLAPPED = {"zero__overlap": True, "zero__overlap_gather": True}
LAST = {"parallel__order": "tensor-context-expert-pipeline-data"}
SPLIT: Mapping[str, tuple[int, Case]] = {
    "tensor": (2, case_of(GATED, parallel__tensor=2)),
    "tensor, odd vocabulary": (2, case_of(LEARNED, parallel__tensor=2)),
    "tensor and sequence": (2, case_of(GATED, parallel__tensor=2, parallel__sequence=True)),
    "tensor and sequence, odd vocabulary": (
        2,
        case_of(LEARNED, parallel__tensor=2, parallel__sequence=True),
    ),
    "data": (2, case_of(GATED, zero__stage=0)),
    "distributed optimizer": (2, case_of(GATED, zero__stage=1)),
    "distributed optimizer, overlapped": (2, case_of(GATED, zero__stage=1, **OVERLAPPED)),
    "Megatron-FSDP, gradients": (2, case_of(GATED, zero__stage=2)),
    "Megatron-FSDP, weights": (2, case_of(GATED, zero__stage=3)),
    "tensor x data": (4, case_of(GATED, parallel__tensor=2, zero__stage=1)),
}
PIPED: Mapping[str, tuple[int, Case]] = {
    "1f1b": (2, case_of(GATED, parallel__pipeline=2)),
    "1f1b, untied and per token": (2, case_of(LEARNED, parallel__pipeline=2, loss="per_token")),
    "interleaved": (2, case_of(GATED, parallel__pipeline=2, **INTERLEAVED)),
    "1f1b over four": (4, case_of(GATED, parallel__pipeline=4)),
    "tensor x pipeline": (4, case_of(GATED, parallel__tensor=2, parallel__pipeline=2)),
    "tensor x pipeline and sequence": (
        4,
        case_of(LEARNED, parallel__tensor=2, parallel__pipeline=2, parallel__sequence=True),
    ),
    "interleaved x data": (4, case_of(GATED, parallel__pipeline=2, zero__stage=1, **INTERLEAVED)),
    "data x interleaved, overlapped": (
        4,
        case_of(GATED, parallel__pipeline=2, zero__stage=1, **INTERLEAVED, **OVERLAPPED, **LAST),
    ),
}
BYTES = {
    f"{compute} at level {level}": (2, case_of(EVEN, zero__stage=level, precision__compute=compute))
    for compute, level in product(("fp32", "bf16"), (0, 1))
}
CASES = {**SPLIT, **PIPED, **BYTES}
"""By name, the ranks and the case; the second and third group run on the engine too, with the same plan."""
Ranks = list[Found]


@pytest.fixture(scope="module")
def alone() -> dict[Any, tuple[Found, Found]]:
    """By shape, what Megatron-Core and the engine find on one rank."""
    cases = [case_of(GATED), case_of(LEARNED)]
    return dict(
        zip(
            (GATED, LEARNED),
            zip(on_megatron(0, 1, cases), on_engine(0, 1, cases), strict=True),
            strict=True,
        )
    )


def results(
    pools: dict[int, Pool], function: Any, cases: Mapping[str, tuple[int, Case]]
) -> dict[str, Ranks]:
    """By case, what each rank found: one call for all cases of a world size."""
    found = {}
    for world in (2, 4):
        names = [name for name, (ranks, _) in cases.items() if ranks == world]
        ranks = pools.setdefault(world, Pool(world)).run(
            function, [cases[name][1] for name in names]
        )
        found.update(zip(names, map(list, zip(*ranks, strict=True)), strict=True))
    return found


@pytest.fixture(scope="module")
def megatron(pools: dict[int, Pool]) -> dict[str, Ranks]:
    """What Megatron-Core finds."""
    return results(pools, on_megatron, CASES)


@pytest.fixture(scope="module")
def engine(pools: dict[int, Pool]) -> dict[str, Ranks]:
    """What the native engine finds."""
    return results(pools, on_engine, {**PIPED, **BYTES})


def assert_close(one: Found, other: Found) -> None:
    """Equal up to rounding in fp32."""
    assert one.losses == pytest.approx(other.losses, rel=1e-5)
    assert one.norms == pytest.approx(other.norms, rel=1e-5)
    assert one.weights.keys() == other.weights.keys()
    for name, weight in one.weights.items():
        torch.testing.assert_close(weight, other.weights[name], rtol=1e-4, atol=1e-5)


def test_one_rank(alone: dict[Any, tuple[Found, Found]]) -> None:
    for found, native in alone.values():
        assert_close(found, native)
        assert found.losses[0] != pytest.approx(found.losses[-1], rel=1e-3), "weights change"


@pytest.mark.parametrize("name", {**SPLIT, **PIPED})
def test_split_runs_equal_one_rank(
    name: str, megatron: dict[str, Ranks], alone: dict[Any, tuple[Found, Found]]
) -> None:
    for found in megatron[name]:
        assert found.losses == megatron[name][0].losses, "ranks agree"
        for one in alone[CASES[name][1].shape]:
            assert_close(found, one)


@pytest.mark.parametrize("name", PIPED)
def test_its_schedules_equal_those_of_the_engine(
    name: str, megatron: dict[str, Ranks], engine: dict[str, Ranks]
) -> None:
    for found, native in zip(megatron[name], engine[name], strict=True):
        assert_close(found, native)


LAYERS = tuple(f"linear_{name}.weight" for name in ("qkv", "proj", "fc1", "fc2"))
HALVED = (*LAYERS, "linear_qkv.bias", "linear_fc1.bias")


@pytest.mark.parametrize("name", ["tensor", "tensor and sequence", "tensor x data"])
def test_each_tensor_rank_holds_half_of_what_is_split(
    name: str, megatron: dict[str, Ranks], alone: dict[Any, tuple[Found, Found]]
) -> None:
    whole = alone[GATED][0].elements
    halves = {weight for weight in whole if weight.endswith((*HALVED, "word_embeddings.weight"))}
    assert len(halves) == GATED.layers * len(HALVED) + 1
    for found in megatron[name]:
        assert found.elements == {
            weight: size // 2 if weight in halves else size for weight, size in whole.items()
        }


KEPT = {
    "fp32 at level 0": {"weights": 4, "gradients": 4, "optimizer": 8},
    "fp32 at level 1": {"weights": 4, "gradients": 4, "optimizer": 8 / 2},
    "bf16 at level 0": {"weights": 2, "gradients": 4, "optimizer": 12},
    "bf16 at level 1": {"weights": 2, "gradients": 4, "optimizer": 12 / 2},
}
"""Bytes that each of two data ranks keeps for a parameter: two moments of Adam, and a master beside bf16, all in fp32; level 1
shards those. Megatron accumulates bf16 gradients in fp32.
"""


@pytest.mark.parametrize("name", BYTES)
def test_bytes_are_those_of_the_table_and_of_the_layout(
    name: str, megatron: dict[str, Ranks], engine: dict[str, Ranks]
) -> None:
    outline = Outline.of(Plan.of(BYTES[name][1].plan), EVEN, 2)
    for rank, (found, native) in enumerate(zip(megatron[name], engine[name], strict=True)):
        assert found.bytes == {kind: EVEN.size() * size for kind, size in KEPT[name].items()}
        assert found.bytes == joined(native.bytes) == joined(outline.bytes(rank))


def joined(bytes_: Mapping[str, int]) -> dict[str, int]:
    """The engine's kinds, with all state of the optimizer as one."""
    state = bytes_["master"] + bytes_["moments"]
    return {"weights": bytes_["weights"], "gradients": bytes_["gradients"], "optimizer": state}


@pytest.mark.parametrize("name", BYTES)
def test_bf16_runs_differ_by_rounding(
    name: str, megatron: dict[str, Ranks], engine: dict[str, Ranks]
) -> None:
    bound = 1e-3 if name.startswith("bf16") else 1e-5
    for found, native in zip(megatron[name], engine[name], strict=True):
        assert found.losses == pytest.approx(native.losses, rel=bound)
        assert found.norms == pytest.approx(native.norms, rel=10 * bound)
        for weight, values in native.weights.items():
            torch.testing.assert_close(found.weights[weight], values, rtol=0.05, atol=20 * bound)


def refused(world: int = 2, **values: Any) -> list[str]:
    plan = Plan.of({name.replace("__", "."): value for name, value in values.items()})
    return [line.partition(":")[0] for line in BACKEND.refusals(plan, world)]


def test_a_plan_is_refused_with_the_field_in_the_way() -> None:
    assert (
        refused(
            parallel__tensor=2, zero__stage=1, optimizer__name="adamw", precision__compute="bf16"
        )
        == []
    )
    assert refused(zero__stage=2) == [] == refused(zero__stage=3)
    assert (
        refused(zero__stage=3, parallel__tensor=2)
        == ["zero.stage"]
        == refused(zero__stage=3, parallel__pipeline=2)
    )
    assert refused(zero__weight_buffers=1) == ["zero.weight_buffers"]
    assert (
        refused(optimizer__name="sgd") == []
        and refused(optimizer__name="sgd", zero__stage=1)[0] == "optimizer.name"
    )
    assert refused(optimizer__name="lamb", precision__compute="fp64") == [
        "precision.compute",
        "optimizer.name",
    ]
    assert refused(parallel__pipeline=2, schedule__name="zero_bubble", batch__accumulation=4) == [
        "schedule.name"
    ]
    assert refused(parallel__context=2, model__experts=4) == ["parallel.context", "model.experts"]
    assert refused(world=3, parallel__tensor=2) != []


def test_the_redirection_is_refused_where_there_is_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(BridgeError, match="found CUDA on this machine"), cpu.redirect_cuda():
        pass


def test_the_redirection_ends() -> None:
    before = torch.cuda.current_device
    with cpu.redirect_cuda():
        assert torch.zeros(2, device="cuda:0").to("cuda").cuda().device.type == "cpu"
        assert torch.zeros(2, device=torch.cuda.current_device()).type() == "torch.cuda.FloatTensor"
    assert torch.cuda.current_device is before and torch.zeros(2).type() == "torch.FloatTensor"
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(2, device="cuda")


EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "megatron"


def test_the_example_under_torchrun_equals_the_engine() -> None:
    flags = [str(EXAMPLE / "tiny.args"), "--train-iters", "3"]
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--standalone",
    ]
    done = subprocess.run(
        [*launcher, str(EXAMPLE / "train.py"), *flags], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    steps = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    config = DIALECT.read(EXAMPLE / "tiny.args", BACKEND.release, 2)
    plan, shape = lift(config), architecture(config)
    alone = Plan.of(
        {**plan.values(), **{f"parallel.{axis}": 1 for axis in ("tensor", "expert_tensor")}}
    )
    engine, text = initialize(GPT(shape), alone, mean_cross_entropy), Text.of(None, shape.sequence)
    expected = [
        engine.train_batch(microbatches(text, engine, plan.batch.micro or 0)) for _ in steps
    ]
    assert [step["loss"] for step in steps] == pytest.approx(expected, rel=1e-5) and len(steps) == 3


def words() -> list[str]:
    """The flags of the example."""
    return shlex.split((EXAMPLE / "tiny.args").read_text(encoding="utf-8"), comments=True)


@pytest.mark.parametrize(
    ("flag", "field"),
    [
        ("--num-experts 4 --disable-bias-linear", "num_experts"),
        ("--hidden-dropout 0.1", "hidden_dropout"),
    ],
)
def test_a_model_that_is_not_the_native_one_is_refused(flag: str, field: str) -> None:
    with pytest.raises(BridgeError, match=f"{field}: found"):
        architecture(DIALECT.read([*words(), *flag.split()], BACKEND.release, 2))


def test_a_config_that_says_too_little_or_too_much_is_refused() -> None:
    from megatron.core import ModelParallelConfig

    parts = DIALECT.read(ModelParallelConfig())
    more = ["--tensor-model-parallel-size", "1", "--num-experts", "4"]
    experts = DIALECT.read([*words(), *more], BACKEND.release, 1)
    for config, reason in ((parts, "no batch size"), (experts, "num_experts: found 4")):
        with pytest.raises(BridgeError, match=reason):
            BACKEND.config(config, Workload(GATED))


def test_queries_and_keys_are_found_in_heads_of_any_width() -> None:
    shape = replace(GATED, hidden=32, heads=4, kv_heads=2, head_size=16)
    whole = torch.arange((4 + 2 + 2) * 16.0).view(-1, 1).expand(-1, 32)
    found = {
        it.name: it.of(whole)
        for it in pieces("decoder.layers.0.self_attention.linear_qkv.weight", shape, Share())
    }
    assert [len(part) for part in found.values()] == [64, 32, 32]
    assert found["block0.attention.key.weight"][16:, 0].tolist() == list(range(96, 112)), (
        "behind the two queries of its group"
    )


def test_a_model_whose_queries_keys_and_values_alone_have_biases_is_traced_with_these() -> None:
    from compat.megatron.runtime.tracing import _shape

    flags = {"add_bias_linear": False, "add_qkv_bias": True, "normalization": "RMSNorm"}
    sizes = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "num_query_groups": 1}
    config = SimpleNamespace(**sizes, **flags, ffn_hidden_size=16, gated_linear_unit=True)
    model = SimpleNamespace(
        config=config,
        vocab_size=16,
        max_sequence_length=8,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=True,
    )
    name = "decoder.layers.0.self_attention.linear_qkv.bias"
    names = [piece.name for piece in pieces(name, _shape(model), Share())]
    assert len(names) == 3 and all(name.endswith(".bias") for name in names)


def test_a_run_of_the_command_is_traced_and_compared_with_the_native_engine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (Path(__file__).parents[2] / "examples/megatron/tiny.args").read_text()
    path = tmp_path / "tiny.args"
    path.write_text(re.sub("--tensor-model-parallel-size 2|--sequence-parallel", "", words))
    for engine in ("megatron", "native"):
        more = ["--engine", engine, "--model", "file", "--steps", "2", "--from", "megatron"]
        assert stagebridge(["train", str(path), *more, "--trace", str(tmp_path / engine)]) == 0
    assert (
        stagebridge(["trace", "diff", *(str(tmp_path / name) for name in ("megatron", "native"))])
        == 0
    )
    printed = capsys.readouterr().out
    assert "megatron: Megatron-Core, one rank" in printed and "equal up to rounding" in printed
