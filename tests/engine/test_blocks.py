"""Models of Hugging Face in layers: a sample of architectures against plain transformers, and what is refused. `blocks.py` runs
all of them.
"""

from __future__ import annotations

import copy
import json
from math import log
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import compat.deepspeed
from bridge.cli import run as cli
from bridge.engine import initialize
from bridge.engine.models import slicing
from bridge.engine.models.blocks import BlockCall
from bridge.engine.models.cutting import Uncut, cut_of
from bridge.engine.models.slicing import slice_model
from bridge.engine.models.splitting import prove_split, tensor_plan
from bridge.errors import BridgeError, ConfigError
from bridge.plan.plan import Plan
from bridge.trace.desync import Policy
from bridge.trace.plugin import same_run
from tests.common.amounts import LONG
from tests.engine.blocks import (
    CASES,
    STEPS,
    VOCAB,
    batches,
    errors,
    good,
    in_ranks,
    need_parts_of_stacks,
    one_by_one,
    plain,
    small,
)
from tests.engine.pool import RankError, Run

pytest.importorskip("transformers")


@pytest.mark.parametrize("name", ["gpt2", "mixtral", "opt", "qwen3_next", "hy_v4", "gemma3"])
def test_layers_run_one_by_one_give_what_the_model_gives(name: str) -> None:
    assert one_by_one(name) == 0


@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("llama", "ZeRO 0"),
        ("llama", "ZeRO 3"),
        ("gpt2", "ZeRO 3"),
        ("gpt2", "interleaved, ZeRO 3"),
        ("gemma4_text", "1F1B, ZeRO 2"),
        ("llama", "zero bubble, ZeRO 3"),
        ("qwen3", "two tensor ranks"),
        ("gemma4_text", "two tensor ranks, split tokens"),
        ("mixtral", "two tensor ranks"),
        ("phi3", "two tensor ranks, split tokens"),
        ("gemma3", "two tensor ranks, split tokens"),
        pytest.param("qwen3_next", "two tensor ranks", marks=LONG),
    ],
)
def test_two_ranks_train_as_plain_transformers(run: Run, name: str, case: str) -> None:
    wide = "parallel.tensor" in CASES[case]
    found = run(2, in_ranks, name, CASES[case], STEPS, wide)[0]
    assert good(errors(found, plain(small(name), wide=wide)))


def most_held(rank: int, world: int, name: str) -> tuple[int, int]:
    """The most bytes of weights, gradients and optimizer state in two steps at ZeRO 3, looked up at every module and gradient,
    and the layout's bytes.
    """
    plan = {"zero.stage": 3, "optimizer.lr": 1e-3, "batch.accumulation": 2}
    engine, found = initialize(small(name), Plan.of(plan), seed=5), [0]

    def look(*_: Any) -> None:
        own = (
            engine.weights.local_buffers(),
            engine.weights.masters_apart(),
            engine.gradients.tensors(),
            engine.optimizer.tensors(),
        )
        tensors = (tensor for each in (*own, engine.model.parameters()) for tensor in each)
        with (
            torch._C.DisableTorchFunctionSubclass()
        ):  # also those of weights that are not whole now
            storages = {
                storage._cdata: storage.nbytes()
                for storage in map(torch.Tensor.untyped_storage, tensors)
            }
        found.append(sum(storages.values()))

    around = [
        module
        for module in engine.model.modules()
        if any(isinstance(each, nn.ModuleList) for each in module.modules())
    ]
    for module in {*engine.model.modules()}.difference(
        around
    ):  # nothing calls those around the layers
        module.register_forward_pre_hook(look)
        module.register_forward_hook(look)
    for parameter in engine.model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(look)
    for step in range(2):
        engine.train_batch(batches(step)[rank::world][:2])
    return max(found), sum(engine.layout.bytes().values())


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "gpt2",
        "mixtral",
        "qwen3",
        "gemma3",
        "phi3",
        "opt",
        "bloom",
        "deepseek_v3",
        "granite",
    ],
)
def test_the_peak_at_zero_3_is_that_of_the_layout(run: Run, name: str) -> None:
    for most, said in run(2, most_held, name):
        assert most == said


def test_names_are_those_of_the_model() -> None:
    cut = cut_of(small("gemma4_text"))
    assert cut.blocks == tuple(f"model.layers.{number}" for number in range(4))
    assert list(cut.before[:2]) == ["model.embed_tokens", "model.embed_tokens_per_layer"]
    assert cut.after == ("model.norm", "lm_head")
    assert [len(numbers) for numbers in cut.entering] == [0, 5, 4, 3, 2, 1], (
        "the stream, and a slice for each block to come"
    )


def test_a_cut_leaves_the_model_as_it_was() -> None:
    model = small("llama").train()
    model.model.norm.eval()
    model.model.embed_tokens.weight.requires_grad_(False)
    before, state = copy.deepcopy(model), torch.get_rng_state()
    cut_of(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == [
        module.training for module in before.modules()
    ]
    for weight, other in zip(model.parameters(), before.parameters(), strict=True):
        assert torch.equal(weight, other)
        assert weight.requires_grad == other.requires_grad


def alone(model: nn.Module, **values: Any) -> Any:
    plan = {
        "precision.compute": "fp64",
        "optimizer.name": "sgd",
        "optimizer.lr": 0.1,
        "batch.accumulation": 4,
        **values,
    }
    return initialize(model, Plan.of(plan))


def test_a_model_that_cannot_be_cut_is_refused_or_one_layer() -> None:
    with pytest.raises(
        Uncut,
        match=r"model.L_module.layers.1: the layers, run one by one, give another output than the model; the model can",
    ):
        cut_of(small("hrm_text"))
    engine = alone(small("hrm_text"), **{"zero.stage": 3})
    assert len(engine.chain.layers) == 1
    said = {finding.path: finding.message for finding in engine.findings}
    assert said["zero.stage"].startswith(
        "this model is one layer, so its weights stay whole: model.L_module.layers.1: the"
    )


def test_a_weight_that_two_layers_use_unseen_is_refused() -> None:
    model = small("llama")
    norm, first = model.model.norm, model.model.layers[0]
    norm.register_forward_hook(
        lambda module, inputs, output: output * first.mlp.up_proj.weight[0, 0]
    )
    with pytest.raises(
        Uncut, match="the layers, run one by one, give another output than the model"
    ):
        cut_of(model)


def test_what_layers_do_not_give_is_refused() -> None:
    engine = alone(small("llama"))
    batch = batches(0)[0]
    for name in ("output_hidden_states", "output_attentions", "use_cache"):
        with pytest.raises(BridgeError, match=f"{name}: a model that is run in layers"):
            engine(**batch, **{name: True})
    model = small("llama", output_hidden_states=True)
    assert len(alone(model)(**batch).hidden_states) == 5, "as one layer it gives them"


def test_a_loss_function_takes_the_batch() -> None:
    model = small("llama")
    expected = plain(copy.deepcopy(model), steps=1)

    def loss(output: Any, batch: Any) -> Any:
        return nn.functional.cross_entropy(
            output.logits[:, :-1].float().flatten(0, 1), batch["labels"][:, 1:].flatten()
        )

    engine = initialize(
        model,
        Plan.of({"precision.compute": "fp64", "optimizer.lr": 0.1, "batch.accumulation": 4}),
        loss,
    )
    assert engine.train_batch(batches(0)) == pytest.approx(expected[0][0], abs=1e-9)
    assert engine.progress.samples == 8


def test_train_and_layout_take_the_folder_of_a_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small("llama", vocab_size=256).config.save_pretrained(tmp_path / "model")
    config = tmp_path / "ds.json"
    config.write_text(
        json.dumps({"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}})
    )
    given = [str(config), "--model", str(tmp_path / "model")]
    assert cli(["train", *given, "--steps", "2", "--json"]) == 0
    losses = [json.loads(line)["loss"] for line in capsys.readouterr().out.splitlines()]
    assert losses[0] == pytest.approx(log(256), abs=0.1)
    assert cli(["layout", *given, "--sequence", "32"]) == 0
    assert (
        "4 layers, hidden 32, heads 4 (keys 2), ffn 48, vocab 256, sequence 32"
        in capsys.readouterr().out
    )
    small("llama").config.save_pretrained(tmp_path / "model")
    assert cli(["train", *given]) == 1
    assert "found a vocabulary of 64, expected at least 256" in capsys.readouterr().err


@need_parts_of_stacks()
def test_tensor_ranks_split_what_a_plan_covers() -> None:
    plan = tensor_plan(small("mixtral"), Plan(), 2)
    assert {name.split(".", 3)[3] for name in plan.columns} == {
        f"self_attn.{kind}_proj" for kind in "qkv"
    }
    assert [name.split(".", 3)[3] for name in plan.rows] == ["self_attn.o_proj"] * 4
    assert [stack.name for stack in plan.experts] == [
        f"model.layers.{number}.mlp.experts" for number in range(4)
    ]
    assert {name.split(".", 3)[3] for name in tensor_plan(small("qwen3"), Plan(), 2).partial} == {
        "self_attn.q_norm",
        "self_attn.k_norm",
    }
    with pytest.raises(
        ConfigError,
        match=r"the model's num_attention_heads \(4\) do not divide evenly over 3 ranks",
    ):
        tensor_plan(small("llama"), Plan(), 3)
    with pytest.raises(
        ConfigError, match=r"OPTForCausalLM has no tensor plan that the engine can follow; set"
    ):
        tensor_plan(small("opt"), Plan(), 2)


def test_a_split_that_gives_other_logits_is_refused() -> None:
    model = small("llama")
    with (
        pytest.raises(ConfigError, match="the split model gives other logits"),
        prove_split(model, 1),
    ):
        model.model.layers[1].self_attn.o_proj.weight.data.mul_(1.5)


def test_modules_that_need_whole_sequences_are_found() -> None:
    found = tensor_plan(small("mixtral"), Plan.of({"parallel.sequence": True}), 2).tokens
    assert found is not None
    assert (found.first, found.last, found.width) == ("model.layers.0", "model.layers.3", 32)
    assert found.regions == tuple(f"model.layers.{number}.self_attn" for number in range(4))
    assert found.whole == tuple(f"model.layers.{number}.mlp" for number in range(4)), (
        "routing takes whole sequences"
    )
    found = tensor_plan(small("gemma4_text"), Plan.of({"parallel.sequence": True}), 2).tokens
    assert found is not None
    assert found.whole == tuple(f"model.layers.{number}" for number in range(4)), (
        "what each layer adds is for all tokens"
    )
    dropped = small("gpt_neox", hidden_dropout=0.1)
    assert slice_model(dropped, []).whole == cut_of(dropped).blocks, (
        "dropout draws its mask for whole sequences"
    )


class Twice(nn.Module):
    """A block that runs its product once more for each token that it gets beyond four."""

    def __init__(self) -> None:
        super().__init__()
        self.product = nn.Linear(4, 4)

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        for _ in range(2 if stream.shape[1] <= 4 else 1):
            stream = stream + self.product(stream)
        return stream


def test_a_block_that_calls_its_modules_more_often_for_fewer_tokens_takes_whole_sequences() -> None:
    model, stream = nn.Sequential(Twice()), torch.ones(2, 8, 4)
    seen = slicing._Unit([(((stream,), {}), model[0].product(stream))])
    run = slicing._Run(BlockCall([stream], {}), stream, model(stream), {"0.product": seen})
    with torch.no_grad():
        assert not slicing._by_token(model, "0", run)


def watched(rank: int, world: int, folder: Path) -> None:
    values = {"optimizer.name": "sgd", "optimizer.lr": 0.1, "debug.tensor_parallel": True}
    values |= {
        f"debug.{name}": 5
        for name in ("layer_outputs", "layer_gradients", "all_param_gradients", "param_update")
    }
    split = (
        {"parallel.tensor": 2, "parallel.sequence": True, "parallel.pipeline": 1}
        if world > 1
        else {}
    )
    plan = Plan.of({**values, **split, "batch.accumulation": 2})
    engine = initialize(
        small("mixtral").float(),
        plan,
        seed=5,
        trace=folder,
        full=True,
        policy=Policy(action="raise"),
    )
    for step in range(2):
        engine.train_batch(batches(step, 2))


def test_a_run_with_split_tokens_is_the_run_of_one_rank_layer_by_layer(
    run: Run, tmp_path: Path
) -> None:
    run(1, watched, tmp_path / "one")
    run(2, watched, tmp_path / "two")
    same_run(tmp_path / "one", tmp_path / "two")


def test_tokens_that_do_not_divide_are_refused(run: Run) -> None:
    with pytest.raises(
        RankError,
        match="11 tokens do not divide evenly over 2 tensor ranks; pad the sequences to a multiple",
    ):
        run(2, odd)


def odd(rank: int, world: int) -> None:
    engine = initialize(
        small("llama"),
        Plan.of({"parallel.tensor": 2, "parallel.sequence": True, "optimizer.lr": 0.1}),
    )
    engine.train_batch([{name: value[:, :11] for name, value in batches(0)[0].items()}])


def test_a_deepspeed_script_with_a_model_of_hugging_face() -> None:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "gradient_clipping": 0,
        "zero_optimization": {"stage": 3},
    }
    model = small("llama").float()
    expected = plain(copy.deepcopy(model))
    engine = compat.deepspeed.initialize(model=model, config=config)[0]
    for step in range(3):
        losses = []
        for batch in batches(step):
            output = engine(**batch)
            assert output.logits.shape == (2, 12, VOCAB)
            engine.backward(output.loss)
            engine.step()
            losses.append(float(output.loss.detach()))
        assert sum(losses) / 4 == pytest.approx(expected[step][0], rel=1e-5)
    assert len(engine.native.layout.flats) == 6
    assert not any(finding.path == "zero.stage" for finding in engine.findings)
