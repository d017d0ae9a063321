"""Names of DeepSpeed beside `initialize` behave as its own, or are refused with what to do instead."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import compat.deepspeed
from bridge.errors import BridgeError
from compat.deepspeed.names import ABSENT, ENTRIES, MODULES, Absent, names_of
from tests.engine.names import RULES, around, asked, early, piped, refused, said
from tests.engine.pool import Pool, Run, free_port

pytestmark = pytest.mark.usefixtures("foreign")
needs_deepspeed = pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="DeepSpeed is not installed"
)
USES: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "stacks" / "deepspeed" / "uses.json").read_text()
)
FREQUENT = 10


def assert_close(found: Any, expected: Any, place: str = "") -> None:
    """Equal to six digits, whatever they are made of."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), place
        for key in expected:
            assert_close(found[key], expected[key], f"{place}.{key}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), place
        for number, value in enumerate(expected):
            assert_close(found[number], value, f"{place}[{number}]")
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-6), place
    else:
        assert found == expected, place


@needs_deepspeed
@pytest.mark.parametrize("level", [1, 3])
def test_parts_of_a_run_are_read_and_written_as_by_deepspeed(
    run: Run, pools: dict[int, Pool], level: int
) -> None:
    ours, theirs = (run(2, asked, name, level) for name in ("compat", "deepspeed"))
    if level == 3:
        pools[2].close()  # where DeepSpeed has put its own functions into torch
    assert_close(ours, theirs)


@pytest.fixture(scope="module")
def alone() -> Iterator[Pool]:
    """A process of DeepSpeed's own, whose level 3 puts its own functions into torch."""
    pool = Pool(1)
    yield pool
    pool.close()


HALF: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 4}},
}


EVERY = bool(os.environ.get("STAGEBRIDGE_EVERY"))
FEW = ((0, "fp32"), (1, "fp16"), (2, "bf16"), (3, "fp32"))


@needs_deepspeed
@pytest.mark.parametrize(
    ("level", "half"),
    [
        (level, half)
        for level in range(4)
        for half in HALF
        # At ZeRO 0 DeepSpeed's own numbers are wrong in half precision.
        if (level, half) in FEW or (EVERY and (level or half == "fp32"))
    ],
)
def test_what_is_read_around_steps_and_loads_is_deepspeeds(
    run: Run, alone: Pool, tmp_path: Path, level: int, half: str
) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": level},
        **RULES,
        **HALF[half],
    }
    (ours,) = run(1, around, "compat", config, tmp_path / "compat")
    (theirs,) = alone.run(around, "deepspeed", config, tmp_path / "deepspeed")
    if level == 0:  # where DeepSpeed has neither masters nor a norm in fp32
        theirs = [its if its is not None else mine for its, mine in zip(theirs, ours, strict=True)]
        theirs = [
            (one[0], *its[1:]) if isinstance(its, tuple) else its
            for one, its in zip(ours, theirs, strict=True)
        ]
    assert_close(ours, theirs)


@pytest.mark.parametrize("level", range(4))
def test_an_optimizer_shows_no_empty_state_while_the_engine_has_it(level: int) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    config = {"train_batch_size": 1, "zero_optimization": {"stage": level}}
    engine = compat.deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    for read in (len, list, lambda state: state[model.weight], lambda state: model.weight in state):
        with pytest.raises(BridgeError, match=r"optimizer\.state: .*safe_get_full_optimizer_state"):
            read(optimizer.state)
    assert optimizer.loss_scale == 1 and not optimizer.overflow
    engine.destroy()
    assert not optimizer.state


@needs_deepspeed
def test_modules_beside_the_engine_answer_as_deepspeeds(run: Run, tmp_path: Path) -> None:
    theirs, ours = (run(2, said, name, tmp_path) for name in ("deepspeed", "compat"))
    assert_close(ours, theirs)


@needs_deepspeed
@pytest.mark.parametrize("stages", [1, 2])
def test_pipelines_of_specs_and_ties_give_deepspeeds_losses(run: Run, stages: int) -> None:
    theirs, ours = (run(2, piped, name, stages) for name in ("deepspeed", "compat"))
    assert_close(ours, theirs)


def test_models_made_within_init_and_steps_that_end_early(run: Run) -> None:
    for loaded, after, steps, applied in run(2, early):
        assert loaded == [[4.0, 4.0], [4.0, 4.0]]
        assert after == [[pytest.approx(4 - 2 / 3)] * 2] * 2
        assert (steps, applied) == (1, True)


def test_models_made_within_init_are_of_the_configs_format() -> None:
    init, before = compat.deepspeed.zero.Init, torch.zeros
    for given, expected in (
        ({"config_dict_or_path": {"bf16": {"enabled": True}}}, torch.bfloat16),
        ({"config": {"fp16": {"enabled": "auto"}, "train_batch_size": "auto"}}, torch.float32),
        ({"config": {"bf16": {"enabled": True}}, "dtype": torch.float16}, torch.float16),
        ({}, torch.float64),
    ):
        torch.set_default_dtype(torch.float64)
        try:
            with init(**given):
                layer = torch.nn.BatchNorm1d(2)
        finally:
            torch.set_default_dtype(torch.float32)
        assert layer.weight.dtype == layer.running_mean.dtype == expected
        assert layer.num_batches_tracked.dtype == torch.int64 and torch.zeros is before
    with pytest.raises(BridgeError, match=r"zero\.Init: found bf16 and fp16"):
        init(config={"bf16": {"enabled": True}, "fp16": {"enabled": True}})


def test_weights_that_are_not_whole_are_never_shown(run: Run) -> None:
    for rank, found in enumerate(run(2, refused)):
        called, part, state, whole, half, load, compiled, evaluated, loaded, saved = found
        assert called.startswith(
            "model(...): each layer's weights are whole only while that layer runs"
        )
        assert part.startswith("0(...): the module's weights are whole only")
        refusal = "state_dict: 0.weight is whole only while its layer runs; call engine.module_state_dict()"
        assert state.startswith(refusal)
        # There other ranks get empty tensors, as with DeepSpeed, since they write nothing.
        assert "('0.weight', tensor([]))" in saved if rank else saved.startswith(refusal)
        assert whole.startswith("[[")
        assert half.startswith(
            "engine.to: 0.weight would change from torch.float32 on cpu to torch.float16 on cpu"
        )
        assert load.startswith("load_module_state_dict: the given state lacks 0.bias")
        assert compiled.startswith("engine.compile: ")
        assert (evaluated, loaded) == ("True", "{2.0}")


def test_every_module_of_the_table_imports_and_has_its_names() -> None:
    for path in MODULES:
        found = import_module(f"compat.deepspeed.{path}".rstrip("."))
        for name in names_of(path):
            assert getattr(found, name) is not None, f"{path}.{name}"


def test_the_names_that_need_no_torch_to_be_listed_are_those_that_are_there() -> None:
    assert sorted(import_module("compat.deepspeed.runtime.entries").__all__) == sorted(ENTRIES)


def test_names_that_scripts_use_often_run_or_say_what_to_do() -> None:
    """Of the uses of names that DeepSpeed 0.19.8 still has, at least 85 % run, and all names that are used ten times."""
    numbers = {
        name: sum(sources.values())
        for name, sources in USES["names"].items()
        if name not in USES["gone"]
    }
    absent = {name for name in numbers if not there(name)}
    assert sum(numbers[name] for name in absent) / sum(numbers.values()) < 0.15
    assert not {name for name in absent if numbers[name] >= FREQUENT}


@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
def test_a_layer_of_bert_has_deepspeeds_parameters_and_transformers_numbers(first: bool) -> None:
    pytest.importorskip("transformers")
    from transformers import BertConfig
    from transformers.models.bert.modeling_bert import BertLayer

    given = {
        "heads": 4,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "initializer_range": 0.5,
        "pre_layer_norm": first,
    }
    ours = compat.deepspeed.DeepSpeedTransformerLayer(
        compat.deepspeed.DeepSpeedTransformerConfig(**given)
    ).double()
    stream = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    mask = torch.zeros(2, 1, 1, 5, dtype=torch.float64)
    mask[1, ..., 3:] = -10000.0
    sizes = {
        "hidden_size": 16,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "hidden_act": "gelu_pytorch_tanh",
    }
    theirs = (
        BertLayer(BertConfig(**sizes, layer_norm_eps=1e-12, _attn_implementation="eager"))
        .double()
        .eval()
    )
    _fill(theirs, ours)
    if first:  # as DeepSpeed's tests have it: the norms of a BertLayer stand before, and the residuals go around them
        attention, self_output, output = theirs.attention, theirs.attention.output, theirs.output
        mixed = attention.self(self_output.LayerNorm(stream), mask)[0]
        middle = stream + self_output.dense(mixed)
        expected = middle + output.dense(theirs.intermediate(output.LayerNorm(middle)))
    else:
        expected = theirs(stream, mask)
        expected = expected[0] if isinstance(expected, tuple) else expected
    torch.testing.assert_close(ours(stream, mask), expected, rtol=1e-10, atol=1e-10)


def _fill(theirs: Any, ours: Any) -> None:
    """Give a BertLayer the weights of DeepSpeed's layer, of which each norm goes where its kernel has it."""
    attention, output = theirs.attention, theirs.output
    for place, part in enumerate((attention.self.query, attention.self.key, attention.self.value)):
        part.weight.data, part.bias.data = (
            whole.data.chunk(3)[place] for whole in (ours.attn_qkvw, ours.attn_qkvb)
        )
    norms = [(ours.norm_w, ours.norm_b), (ours.attn_nw, ours.attn_nb)]
    norms = norms if ours.config.pre_layer_norm else norms[::-1]
    for weight in (each for norm in norms for each in norm):
        torch.nn.init.uniform_(weight, 0.5, 1.5)
    pairs = [
        (attention.output.dense, (ours.attn_ow, ours.attn_ob)),
        (theirs.intermediate.dense, (ours.inter_w, ours.inter_b)),
        (output.dense, (ours.output_w, ours.output_b)),
        (attention.output.LayerNorm, norms[0]),
        (output.LayerNorm, norms[1]),
    ]
    for part, (weight, bias) in pairs:
        part.weight.data, part.bias.data = weight.data, bias.data


def test_files_are_read_and_written_beside_other_work(tmp_path: Path) -> None:
    from compat.deepspeed.ops.op_builder import AsyncIOBuilder

    assert AsyncIOBuilder().is_compatible()
    handle = (
        AsyncIOBuilder().load(verbose=False).aio_handle(block_size=4096, intra_op_parallelism=2)
    )
    assert (handle.get_block_size(), handle.get_queue_depth(), handle.get_alignment()) == (
        4096,
        128,
        1024,
    )
    first, second = torch.arange(1000.0), torch.arange(500, dtype=torch.bfloat16)
    assert (
        handle.async_pwrite(first, str(tmp_path / "one"))
        == handle.async_pwrite(second, str(tmp_path / "two"))
        == 0
    )
    assert handle.wait() == 2 and handle.wait() == 0
    locked = handle.new_cpu_locked_tensor(900, torch.empty(0))
    assert handle.sync_pread(locked, str(tmp_path / "one"), 400) == 1
    assert torch.equal(locked, first[100:])
    assert handle.free_cpu_locked_tensor(locked) and not handle.free_cpu_locked_tensor(locked)
    found = torch.zeros(500, dtype=torch.bfloat16)
    assert handle.async_pread(found, str(tmp_path / "two")) == 0 and handle.wait() == 1
    assert torch.equal(found, second)
    with pytest.raises(
        BridgeError,
        match=r"one: found 4000 bytes after offset 0, expected 8000; read a larger file",
    ):
        handle.sync_pread(torch.zeros(2000), str(tmp_path / "one"))


def there(name: str) -> bool:
    """Whether a name that scripts use is there. One that is not must say what to do."""
    root, _, rest = name.partition(".")
    if root == "engine":
        return hasattr(compat.deepspeed.DeepSpeedEngine, rest) or rest in OWN
    owner: Any = compat.deepspeed.get_accelerator() if root == "accelerator" else compat.deepspeed
    try:
        for word in rest.split(".") if rest else ():
            owner = getattr(owner, word)
    except (Absent, BridgeError) as error:
        assert "; " in str(error)
        return False
    except AttributeError:
        return False
    return True


OWN = (
    "config",
    "device",
    "local_rank",
    "lr_scheduler",
    "tput_timer",
    "training_dataloader",
    "optimizer",
)
"""What an engine has of its own."""


@pytest.mark.parametrize("name", sorted(ABSENT))
def test_what_is_absent_says_what_to_do_instead(name: str) -> None:
    with pytest.raises(
        ImportError, match=r"the native engine does not have this (name|module); \w+"
    ):
        exec(
            f"from compat.deepspeed.{name} import Anything"
            if name in MODULES
            else f"import compat.deepspeed as d; d.{name}.Anything"
        )


def test_the_switch_is_refused_once_deepspeed_is_imported() -> None:
    code = (
        "import sys, types; sys.modules['deepspeed'] ="
        " types.ModuleType('deepspeed')\nimport compat.deepspeed as d; d.install()"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert (
        "DeepSpeed itself is already imported; call compat.deepspeed.install() before"
        in found.stderr
    )


@pytest.mark.skipif(
    not (find_spec("transformers") and find_spec("accelerate")),
    reason="accelerate is not installed",
)
def test_a_trainer_of_transformers_runs_on_the_engine_by_one_switch(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from tests.engine.trainer import Rows, generated, logged, trainer, write_first

    write_first(tmp_path)
    script, port = Path(__file__).parent / "trainer.py", str(free_port())
    ranks = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    command = [sys.executable, "-m", "compat.deepspeed", str(script), str(tmp_path), "3"]
    started = [
        subprocess.Popen(
            command,
            env={**os.environ, **ranks, "RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    alone = trainer(tmp_path, None, 2)
    alone.train()
    outputs = [process.communicate()[0] for process in started]
    found = json.loads(outputs[0].splitlines()[-1])
    assert_close(found["steps"][:2], [list(step) for step in logged(alone)[:2]])
    assert_close(found["resumed"], found["steps"])
    assert found["evaluated"] < alone.evaluate(Rows())["eval_loss"] + 0.1
    saved = AutoModelForCausalLM.from_pretrained(str(tmp_path / "saved"))
    assert found["generated"] == generated(saved)
