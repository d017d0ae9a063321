"""Small models of every causal architecture of transformers that has a plan for pipelines, and of some that have none, run in
layers and compared with plain transformers in fp64.

`python -m tests.engine.blocks` builds each with random weights, trains it in one process, and on two ranks as each of `CASES`
says, and prints a table: the largest error of losses and gradients in the first step of each group of cases, in bold what is
further away than wanted, with the reason of each one that is left out. Names of architectures after it run those alone; `--alone`
runs no ranks; `--to FILE` appends what each gave to a file of JSON lines and leaves out the architectures that are in it.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from bridge.engine import initialize
from bridge.engine.layers import Arguments
from bridge.engine.models.blocks import Blocks
from bridge.engine.models.cutting import cut_of
from bridge.errors import BridgeError
from bridge.plan.plan import Plan
from tests.engine.runs import distance

RATE = 0.1
VOCAB, TOKENS, MICROBATCHES, STEPS = 64, 12, 4, 3
LARGEST = 8_000_000
"""Parameters of a model that is still small."""
WIDTHS = dict.fromkeys(
    ("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "hidden_dim"), 32
)
DEPTHS = dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers"), 4)
HEADS = dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4)
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
"""Of attention that makes keys and values from a short vector."""
SIZES: Mapping[str, Any] = {
    **WIDTHS,
    **DEPTHS,
    **HEADS,
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size"), 48),
    **dict.fromkeys(
        ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "vocab_size"), VOCAB
    ),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **LATENT,
    **dict.fromkeys(("head_dim", "index_head_dim", "global_head_dim"), 8),
    **dict.fromkeys(
        (
            "num_key_value_heads",
            "num_experts_per_tok",
            "index_n_heads",
            "num_global_key_value_heads",
        ),
        2,
    ),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "bos_token_id"), 1),
    "pad_token_id": 0,
    "eos_token_id": 2,
    "sliding_window": 16,
    "index_topk": 4,
    "vocab_size_per_layer_input": VOCAB,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_expand": 2,
    "hidden_size_per_layer_input": 8,
    **dict.fromkeys(
        (
            "dropout",
            "attention_dropout",
            "hidden_dropout",
            "resid_pdrop",
            "embd_pdrop",
            "attn_pdrop",
        ),
        0.0,
    ),
    **dict.fromkeys(("residual_dropout", "input_jitter_noise", "router_jitter_noise"), 0.0),
}
MORE: Mapping[str, Mapping[str, Any]] = {
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gemma4_assistant": {"hidden_size_per_layer_input": 0},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "dots1": {"n_shared_experts": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "gptj": {"rotary_dim": 4},
    "codegen": {"rotary_dim": 4},
    "falcon_h1": {"mamba_d_ssm": 64},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}
    },
    "dbrx": {
        "attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8},
        "ffn_config": {"moe_num_experts": 4, "ffn_hidden_size": 48},
    },
    "dots3_note_text": {
        **{f"swa_{key}": SIZES[key] for key in ("num_attention_heads", *LATENT)},
        "swa_num_key_value_heads": 4,
        "swa_head_dim": 16,
    },
}
UNPLANNED = (
    "gpt2",
    "gptj",
    "gpt_neo",
    "gpt_bigcode",
    "opt",
    "bloom",
    "falcon",
    "codegen",
    "mpt",
    "stablelm",
    "persimmon",
)
"""Architectures without a plan, of which the structure tells where to cut."""
TWO_STAGES = {"parallel.pipeline": 2}
SCHEDULES: Mapping[str, Mapping[str, Any]] = {
    "1F1B": {**TWO_STAGES, "schedule.name": "1f1b"},
    "interleaved": {**TWO_STAGES, "schedule.name": "interleaved_1f1b", "schedule.virtual": 2},
    "zero bubble": {**TWO_STAGES, "schedule.name": "zero_bubble"},
}
TENSOR = {"parallel.tensor": 2, "zero.stage": 1}
CASES: Mapping[str, Mapping[str, Any]] = {
    **{f"ZeRO {level}": {"zero.stage": level} for level in range(4)},
    **{
        f"{name}, ZeRO {level}": {**case, "zero.stage": level}
        for name, case in SCHEDULES.items()
        for level in range(4)
    },
    "two tensor ranks": TENSOR,
    "two tensor ranks, split tokens": {**TENSOR, "parallel.sequence": True},
}
GROUPS = ("ZeRO", *SCHEDULES, "two tensor ranks", "two tensor ranks, split tokens")
"""Columns of the table: a case belongs to the longest of these that it begins with."""
FP64 = {torch.float32: torch.float64}


class Wide(TorchFunctionMode):
    """What a model computes in fp32 whatever its weights are (norms, rotary positions, losses) is computed in fp64, so that
    nothing but the order of sums is left of the difference between tensor ranks and one process.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func` with fp64 in the place of fp32."""
        func = torch.Tensor.double if func is torch.Tensor.float else func
        wide = {key: _wide(value) for key, value in (kwargs or {}).items()}
        return func(*map(_wide, args), **wide)


def _wide(value: Any) -> Any:
    return FP64.get(value, value) if isinstance(value, torch.dtype) else value


def architectures(plan: str = "pp_plan") -> Iterator[str]:
    """The name of every causal architecture that has such a plan, and of `UNPLANNED`."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    for name in CONFIG_MAPPING:
        config, model = classes(name)
        own = model is not None and model.config_class is config
        if own and (
            name in UNPLANNED
            or getattr(model, f"_{plan}", None)
            or getattr(config, f"base_model_{plan}", None)
        ):
            yield name


def classes(name: str) -> tuple[Any, Any]:
    """Configuration and causal model of an architecture; None for a model that there is not."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING as MODELS

    config = CONFIG_MAPPING[name]
    return config, MODELS[config] if config in MODELS.keys() else None  # noqa: SIM118  (it is no dictionary)


def small(name: str, seed: int = 0, **settings: Any) -> nn.Module:
    """A small model of that architecture with random weights."""
    kind, make = classes(name)
    more = {**MORE.get(name, {}), **settings}
    config = kind(**{**more, **_sized(kind, more)})
    config._experts_implementation = "eager"
    with torch.device("meta"):
        size = sum(weight.numel() for weight in make(config).parameters())
    assert size < LARGEST, f"{size} parameters"
    torch.manual_seed(seed)
    model: nn.Module = make(config).double()
    return model


def _sized(kind: Any, more: Mapping[str, Any]) -> dict[str, Any]:
    """The small sizes that a configuration of this kind takes, and `more`; in the configurations within it too."""
    default = kind()
    known = {*default.to_dict(), *getattr(kind, "attribute_map", {})}
    heads = {"num_key_value_heads": 4} if "kv_lora_rank" in known else {}
    given = {key: value for key, value in {**SIZES, **heads, **more}.items() if key in known}
    parts = {key: getattr(default, key, None) for key in kind.sub_configs}
    within = {
        key: {"model_type": part.model_type, **_sized(type(part), more)}
        for key, part in parts.items()
        if part is not None
    }
    return {**given, **{key: {**values, **more.get(key, {})} for key, values in within.items()}}


def batches(step: int, number: int = MICROBATCHES) -> list[dict[str, Tensor]]:
    """Microbatches of a step, the second sample of each padded."""
    generator = torch.Generator().manual_seed(100 + step)
    mask = torch.ones(2, TOKENS, dtype=torch.int64)
    mask[1, -3:] = 0
    tokens = [torch.randint(3, VOCAB, (2, TOKENS), generator=generator) for _ in range(number)]
    return [
        {"input_ids": each, "attention_mask": mask, "labels": each.where(mask.bool(), -100)}
        for each in tokens
    ]


Steps = list[tuple[float, dict[str, Tensor]]]
"""Loss and gradients of each step."""


def plain(model: nn.Module, steps: int = STEPS, wide: bool = False) -> Steps:
    """The training in one process with nothing but transformers; `wide`: see `Wide`."""
    with Wide() if wide else contextlib.nullcontext():
        return _plain(model, steps)


def _plain(model: nn.Module, steps: int) -> Steps:
    model.train()
    found: Steps = []
    for step in range(steps):
        model.zero_grad()
        losses = []
        for batch in batches(step):
            loss = model(**batch, use_cache=False).loss
            (loss / MICROBATCHES).backward()
            losses.append(float(loss.detach()))
        given = {name: weight.grad for name, weight in model.named_parameters()}
        found.append(
            (
                sum(losses) / len(losses),
                {name: _gradient(model, name, grad) for name, grad in given.items()},
            )
        )
        with torch.no_grad():
            for weight in model.parameters():
                weight -= 0 if weight.grad is None else RATE * weight.grad
    return found


def _gradient(model: nn.Module, name: str, gradient: Tensor | None) -> Tensor:
    return torch.zeros_like(model.get_parameter(name)) if gradient is None else gradient.clone()


def one_by_one(name: str) -> float:
    """The largest error of logits, loss and gradients of the layers run one by one, each apart, in one process."""
    model, batch = small(name).train(), batches(0)[0]
    whole = model(**batch, use_cache=False)
    whole.loss.backward()
    expected = {key: _gradient(model, key, weight.grad) for key, weight in model.named_parameters()}
    model.zero_grad()
    blocks = Blocks(model, cut_of(model))
    given, value = Arguments((), batch), None
    for layer in blocks.chain().layers:
        value = layer(given if value is None else blocks.receive_stream(value.tensors, given))
    value.loss.backward()
    found = {key: _gradient(model, key, weight.grad) for key, weight in model.named_parameters()}
    outputs = [
        {"loss": each.loss.detach(), "logits": each.logits.detach()} for each in (value, whole)
    ]
    return max(distance(outputs[0], outputs[1]), distance(found, expected))


def in_ranks(
    rank: int,
    world: int,
    name: str,
    values: Mapping[str, Any],
    steps: int = STEPS,
    wide: bool = False,
) -> Steps:
    """The same training on the engine with a bare rate, so that the change of a weight is its gradient."""
    plan = {"precision.compute": "fp64", "optimizer.name": "sgd", "optimizer.lr": RATE, **values}
    parts = plan.get("parallel.pipeline", 1) * plan.get("parallel.tensor", 1)
    engine = initialize(
        small(name), Plan.of({**plan, "batch.accumulation": MICROBATCHES * parts // world}), seed=5
    )
    assert len(engine.chain.layers) > 2
    before = {key: weight.clone() for key, weight in engine.state_dict()}
    found: Steps = []
    for step in range(steps):
        engine.comm.ledger.clear()
        with Wide() if wide else contextlib.nullcontext():
            loss = engine.train_batch(batches(step)[engine.data.index :: engine.data.size])
        assert not step or engine.comm.ledger.totals == engine.traffic(
            2 * TOKENS
        )  # the first also gathers what is frozen
        assert engine.bytes() == engine.layout.bytes()
        after = {key: weight.clone() for key, weight in engine.state_dict()}
        found.append(
            (loss, {key: (before[key] - after[key]) / RATE for key in after} if rank == 0 else {})
        )
        before = after
    return found


def errors(found: Steps, expected: Steps) -> list[float]:
    """The largest error of each step: of the loss, and of gradients relative to the largest of them all."""
    result = []
    for (loss, gradients), (wanted, others) in zip(found, expected, strict=True):
        assert gradients.keys() == others.keys()
        largest = max(float(gradient.abs().max()) for gradient in others.values())
        apart = max(float((gradients[name] - others[name]).abs().max()) for name in others)
        result.append(max(abs(loss / wanted - 1), apart / largest))
    return result


def good(found: list[float]) -> bool:
    """The first step equal to 1e-9, later ones to 1e-6."""
    return found[0] <= 1e-9 and max(found) <= 1e-6


def tried(name: str, run: Callable[..., Any], alone: bool) -> dict[str, Any]:
    """What one architecture gave: its error layer by layer, the errors of each case by step, or why there are none."""
    found: dict[str, Any] = {"name": name}
    try:
        found["one by one"] = one_by_one(name)
        if alone:
            return found
        expected = {wide: plain(small(name), wide=wide) for wide in (False, True)}
    except Exception as error:
        return {**found, "left out": _told(error)}
    for case, values in _cases(name):
        wide = "parallel.tensor" in values
        try:
            found[case] = errors(
                run(in_ranks, name, values, STEPS, wide, timeout=300)[0], expected[wide]
            )
        except Exception as error:
            found[case] = _told(error)
    return found


def _cases(name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The cases that an architecture has a plan for; those without one are cut by their structure, and their tensors are not."""
    cut, split = (name in architectures(plan) for plan in ("pp_plan", "tp_plan"))
    for case, values in CASES.items():
        if (
            split and name not in UNPLANNED
            if "parallel.tensor" in values
            else cut or "parallel.pipeline" not in values
        ):
            yield case, values


def row(found: Mapping[str, Any]) -> str:
    """A row of the table."""
    if "left out" in found:
        return f"| {found['name']} | {found['left out']} |" + " |" * len(GROUPS)
    groups: dict[str, list[Any]] = {group: [] for group in GROUPS}
    for case in CASES.keys() & found.keys():
        groups[max((group for group in GROUPS if case.startswith(group)), key=len)].append(
            found[case]
        )
    return f"| {found['name']} | {found['one by one']:.0e} | {' | '.join(map(_cell, groups.values()))} |"


def _cell(cases: list[Any]) -> str:
    """The largest error of a first step, or the first reason why there is none."""
    reasons = [f"**{case}**" for case in cases if isinstance(case, str)]
    worst = max(
        (case for case in cases if not isinstance(case, str)),
        key=lambda case: case[0],
        default=None,
    )
    if reasons or worst is None:
        return reasons[0] if reasons else ""
    return (
        f"{worst[0]:.0e}"
        if all(map(good, cases))
        else f"**{worst[0]:.0e}, {max(map(max, cases)):.0e} later**"
    )


def _told(error: Exception) -> str:
    """The last line of what went wrong."""
    if isinstance(error, BridgeError):
        return str(error)
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[-1][:160]}"


def main() -> None:
    """Print one row for each architecture."""
    from tests.engine.pool import Pool

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*")
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--to", type=Path)
    given = parser.parse_args()
    lines = given.to.read_text("utf-8").splitlines() if given.to and given.to.exists() else []
    done = {found["name"]: found for found in map(json.loads, lines)}
    pool = Pool(2)
    print(f"| architecture | layers one by one | {' | '.join(GROUPS)} |")
    print("|---" * (2 + len(GROUPS)) + "|")
    for name in given.names or sorted({*architectures(), *architectures("tp_plan")}):
        found = done.get(name) or tried(name, pool.run, given.alone)
        if given.to and name not in done:
            with given.to.open("a", encoding="utf-8") as file:
                file.write(json.dumps(found) + "\n")
        print(row(found), flush=True)
    pool.close()


def need_parts_of_stacks() -> pytest.MarkDecorator:
    """Return the mark of tests for which a stack of experts has to run in parts. In older releases of
    transformers, a stack stops at the index of an expert that it does not have.
    """
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    runs = "num_classes=self.num_experts + 1" in inspect.getsource(MixtralExperts.forward)
    return pytest.mark.skipif(not runs, reason="stacks of this transformers do not run in parts")


if __name__ == "__main__":
    main()
