"""What Hugging Face's Trainer makes of a file with "auto", and what it refuses: held against the code of transformers itself."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

import bridge
import compat
from bridge.cli import run
from bridge.errors import ConfigError
from bridge.stack.dialect import Config, Dialect
from bridge.stack.rules import Effect
from bridge.translation.lift import lift
from compat.deepspeed import trainer
from tests.stacks.deepspeed.test_deepspeed_auto import HF

STAGE3 = (
    "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.stage3_param_persistence_threshold",
)
"""Left to accelerate, which fills them in by the same rule, where the level is not 3."""
LATER = ("zero_optimization.stage3_gather_16bit_weights_on_model_save",)
"""Left to accelerate always."""

ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "per_device_train_batch_size": st.integers(1, 9),
        "gradient_accumulation_steps": st.integers(1, 5),
        "max_grad_norm": st.sampled_from([0.0, 0.5, 1.0]),
        "learning_rate": st.sampled_from([1e-5, 3e-4, 5e-5]),
        "adam_beta1": st.sampled_from([0.8, 0.9]),
        "adam_beta2": st.sampled_from([0.95, 0.999]),
        "adam_epsilon": st.sampled_from([1e-8, 1e-6]),
        "weight_decay": st.sampled_from([0.0, 0.1]),
        "fp16": st.booleans(),
        "bf16": st.booleans(),
        "fp16_full_eval": st.booleans(),
        "bf16_full_eval": st.booleans(),
        "warmup_steps": st.sampled_from([0, 0.03, 0.5, 1, 7, 2.5]),
        "save_on_each_node": st.booleans(),
        "auto_find_batch_size": st.booleans(),
    },
).filter(
    lambda said: (
        not [
            *trainer.find_refusals(
                trainer.Case({**trainer.DEFAULTS, **said}, {}, frozenset(), None)
            )
        ]
    )
)
FIXED: dict[str, st.SearchStrategy[Any]] = {
    "train_micro_batch_size_per_gpu": st.integers(1, 9),
    "gradient_accumulation_steps": st.integers(1, 5),
    "train_batch_size": st.integers(1, 64),
    "gradient_clipping": st.sampled_from([0.5, 1.0, 1]),
    "optimizer.params.lr": st.sampled_from([1e-5, 5e-5]),
    "optimizer.params.betas": st.sampled_from([[0.9, 0.999], [0.8, 0.95]]),
    "optimizer.params.eps": st.sampled_from([1e-8, 1e-6]),
    "optimizer.params.weight_decay": st.sampled_from([0, 0.1]),
    "scheduler.params.warmup_max_lr": st.sampled_from([5e-5, 1e-5]),
    "scheduler.params.warmup_num_steps": st.sampled_from([1, 7]),
    "scheduler.params.total_num_steps": st.sampled_from([100, 50]),
    "fp16.enabled": st.booleans(),
    "bf16.enabled": st.booleans(),
    "zero_optimization.stage": st.sampled_from([0, 1, 2]),
    "zero_optimization.reduce_bucket_size": st.just(1000),
}
"""Keys that may stand there as a value of their own."""


def changed(data: dict[str, Any], fixed: dict[str, Any]) -> dict[str, Any]:
    found = copy.deepcopy(data)
    for path, value in fixed.items():
        *sections, key = path.split(".")
        place = found
        for section in sections:
            place = place[section]
        place[key] = value
    return found


def of_transformers(
    data: dict[str, Any], said: dict[str, Any], world: int, total: int, hidden: int
) -> dict[str, Any] | None:
    """What the Trainer of the installed transformers makes of `data`; None where it refuses it."""
    from transformers import TrainingArguments
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    args = SimpleNamespace(**{**trainer.DEFAULTS, **said}, world_size=world)
    args.get_warmup_steps = lambda steps: TrainingArguments.get_warmup_steps(args, steps)
    theirs = HfTrainerDeepSpeedConfig(copy.deepcopy(data))
    theirs.trainer_config_process(args, auto_find_batch_size=args.auto_find_batch_size)
    try:
        theirs.trainer_config_finalize(
            args, SimpleNamespace(config=SimpleNamespace(hidden_size=hidden)), total
        )
    except ValueError:
        return None
    return flat(theirs.config)


def flat(section: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in section.items():
        found |= (
            flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
        )
    return found


def plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


@pytest.mark.once
@settings(max_examples=150, deadline=None)
@given(
    ARGUMENTS,
    st.sets(st.sampled_from(sorted(FIXED)), max_size=3).flatmap(
        lambda keys: st.fixed_dictionaries({k: FIXED[k] for k in keys})
    ),
    st.sampled_from([1, 2, 8]),
    st.sampled_from([64, 1000]),
)
def test_it_is_what_transformers_does(
    said: dict[str, Any], fixed: dict[str, Any], world: int, hidden: int
) -> None:
    pytest.importorskip("deepspeed")
    pytest.importorskip("transformers")
    data, total = changed(HF, fixed), 100
    expected = of_transformers(data, said, world, total, hidden)
    filling = trainer.filling(trainer.arguments(said, whole=False), world, total)
    refused = [
        path
        for path, _ in filling.refusals({path: _tuple(value) for path, value in flat(data).items()})
    ]
    assert bool(refused) is (expected is None)
    if expected is None:
        return
    if said.get("auto_find_batch_size") and data["zero_optimization"]["stage"] == 3:
        return  # the Trainer itself refuses it (tests/convert/test_resolve.py), and not its config
    from compat.deepspeed import formats
    from compat.deepspeed.releases import release

    values = {"total_steps": total, "hidden_size": hidden}
    found = formats.read(
        data, release("0.19.8"), False, values, None, trainer.arguments(said, whole=False), world
    ).given
    alone = LATER if data["zero_optimization"]["stage"] == 3 else (*LATER, *STAGE3)
    wrong = {
        path: (plain(found.get(path)), value)
        for path, value in expected.items()
        if plain(found.get(path)) != value
    }
    assert {path: pair for path, pair in wrong.items() if path not in alone} == {}
    assert all(expected[path] == "auto" for path in wrong)


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


FILE: dict[str, Any] = {**HF, "zero_optimization": {"stage": 1}}


def read(deepspeed: Dialect, data: dict[str, Any], **said: Any) -> Any:
    reads: Any = deepspeed.read
    return reads(data, world_size=8, trainer=said, auto={"total_steps": 100})


def test_a_dump_has_what_does_not_count_here(deepspeed: Dialect) -> None:
    assert (
        read(deepspeed, FILE, output_dir="x", hub_token=None, learning_rate=1e-5).given[
            "optimizer.params.lr"
        ]
        == 1e-5
    )
    with pytest.raises(ConfigError, match="output_dire: found no TrainingArgument of this name"):
        read(deepspeed, FILE, output_dire="x")
    with pytest.raises(
        ConfigError,
        match=r"learnin_rate: found no TrainingArgument .*; did you mean learning_rate\?",
    ):
        read(deepspeed, FILE, learnin_rate=1e-5)
    for name in ("output_dir", "num_train_epochs"):
        with pytest.raises(ConfigError, match="found no TrainingArguments that fill in"):
            read(deepspeed, FILE, **{name: 3})


def test_names_that_fill_in_nothing_are_taken_without_an_output_dir(
    said: Said, tmp_path: Path
) -> None:
    more = ("--auto", "hidden_size=64", "--auto", "total_steps=100", "--world-size", "8", "--json")
    told = []
    for beside in ({}, {"output_dir": "x"}):
        (tmp_path / "args.json").write_text(
            json.dumps({"learning_rate": 1e-4, "num_train_epochs": 3} | beside)
        )
        told.append(json.loads(said(*TO, "--auto-from", "args.json", *more)[1])["target"])
    assert told[0] == told[1] and told[0]["given"]["lr"] == 1e-4


@pytest.mark.parametrize("names", [("fp16", "bf16"), ("fp16_full_eval", "bf16_full_eval")])
def test_two_formats_at_once_are_refused(deepspeed: Dialect, names: tuple[str, str]) -> None:
    """As TrainingArguments does; it was read as bf16."""
    with pytest.raises(
        ConfigError, match=f"found {names[0]} and {names[1]}, and the Trainer refuses both at once"
    ):
        read(deepspeed, FILE, **dict.fromkeys(names, True))
    assert read(deepspeed, FILE, **{names[1]: True}).given["bf16.enabled"] is True


def test_transformers_knows_the_names() -> None:
    training = pytest.importorskip("transformers.training_args")
    theirs = {
        field.name
        for field in dataclasses.fields(training.TrainingArguments)
        if not field.name.startswith("_")
    }
    assert theirs <= trainer.NAMES


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("learning_rate", "fast", "a number"),
        ("per_device_train_batch_size", 1.5, "a whole number"),
        ("bf16", "yes", "true or false"),
        ("lr_scheduler_type", 3, "a name"),
    ],
)
def test_arguments_of_another_kind_are_refused(
    deepspeed: Dialect, name: str, value: Any, wanted: str
) -> None:
    with pytest.raises(ConfigError, match=f"{name}: found .*, expected {wanted}"):
        read(deepspeed, FILE, **{name: value})


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, ("linear", 0, 100, 0.0)),
        ({"warmup_steps": 10}, ("linear", 10, 100, 0.0)),
        ({"warmup_ratio": 0.03}, ("linear", 3, 100, 0.0)),
        ({"lr_scheduler_type": "cosine", "max_steps": 50}, ("cosine", 0, 100, 0.0)),
        ({"lr_scheduler_type": "SchedulerType.COSINE"}, ("cosine", 0, 100, 0.0)),
        (
            {"lr_scheduler_type": "SchedulerType.CONSTANT", "warmup_steps": 5},
            ("constant", 0, None, None),
        ),
        ({"lr_scheduler_type": "constant", "warmup_steps": 10}, ("constant", 0, None, None)),
        (
            {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 10},
            ("constant", 10, None, None),
        ),
    ],
)
def test_a_file_without_a_schedule_has_the_trainers(
    deepspeed: Dialect, said: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    data = {name: value for name, value in FILE.items() if name != "scheduler"}
    config = read(deepspeed, data, **said)
    schedule = lift(config).optimizer.schedule
    assert (
        schedule.name,
        schedule.warmup_steps,
        schedule.total_steps,
        schedule.minimum,
    ) == expected
    assert not [finding for finding in config.findings if finding.path == "scheduler.type"]
    assert config.given.get("code.steps") == said.get("max_steps")


@pytest.mark.parametrize(
    "said", [{"lr_scheduler_type": "polynomial"}, {"lr_scheduler_kwargs": {"num_cycles": 2}}]
)
def test_a_schedule_that_no_plan_knows_is_named(deepspeed: Dialect, said: dict[str, Any]) -> None:
    data = {name: value for name, value in FILE.items() if name != "scheduler"}
    findings = read(deepspeed, data, **said).findings
    assert [finding.path for finding in findings if "Trainer" in finding.message] == [
        "scheduler.type"
    ]


Said = Callable[..., tuple[int, str, str]]


@pytest.fixture
def said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Said:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "zero3.json").write_text(json.dumps(HF))

    def call(*words: str) -> tuple[int, str, str]:
        code = run(list(words))
        return code, *capsys.readouterr()

    return call


TO = ("convert", "zero3.json", "--to", "megatron")


def test_the_printed_command_converts_once_capitals_are_replaced(said: Said) -> None:
    code, _, err = said(*TO)
    errors, command = err.splitlines()
    assert code == 1 and errors.startswith('error: found "auto" for 18 values')
    words = shlex.split(command.partition("stagebridge ")[2])
    assert said(*words)[0] == 1, "capitals are no numbers"
    facts = {"HIDDEN_SIZE": "64", "TOTAL_STEPS": "100", "WORLD_SIZE": "8"}
    told = [
        re.sub("HIDDEN_SIZE|TOTAL_STEPS|WORLD_SIZE", lambda found: facts[found[0]], word)
        for word in words
    ]
    assert said(*told)[0] == 2


def test_auto_from_a_dump_and_from_names(said: Said, tmp_path: Path) -> None:
    (tmp_path / "args.json").write_text(
        json.dumps({"output_dir": "x", "learning_rate": 2e-5, "bf16": True, "max_steps": 100})
    )
    more = ("--auto", "hidden_size=64", "--world-size", "8", "--json")
    _, whole, _ = said(*TO, "--auto-from", "args.json", *more)
    names = ("learning_rate=2e-5", "bf16=true", "max_steps=100")
    _, named, _ = said(*TO, *(word for name in names for word in ("--auto-from", name)), *more)
    assert json.loads(whole) == json.loads(named)
    target = json.loads(whole)["target"]["given"]
    assert (target["lr"], target["bf16"], target["global_batch_size"], target["train_iters"]) == (
        2e-5,
        True,
        64,
        100,
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--auto", "betas=[0.9"), "--auto betas: found [0.9, expected a list in JSON"),
        (("--auto-from", "none.json"), "none.json: no such file"),
        (("--auto-from", "list.json"), "list.json: expected a JSON object"),
    ],
)
def test_wrong_options(said: Said, tmp_path: Path, words: tuple[str, ...], says: str) -> None:
    (tmp_path / "list.json").write_text("[1]")
    code, out, err = said(*TO, *words)
    assert (code, out) == (1, "") and says in err


def test_another_stack_has_no_trainer(said: Said, tmp_path: Path) -> None:
    (tmp_path / "x.args").write_text("--micro-batch-size 1\n")
    assert (
        "--auto-from: megatron has no use for this option"
        in said("check", "x.args", "--auto-from", "bf16=true")[2]
    )


def test_a_code_part_that_was_left_behind_is_named(said: Said, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(
        '{"train_batch_size": 128, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 32}'
    )
    assert (
        "4 ranks share each batch: to say so, put the missing .code.json"
        in said("check", "ds.json", "--world-size", "8")[2]
    )
    assert "missing that lay" not in said("check", "ds.json", "--world-size", "3")[2]
    (tmp_path / "ds.code.json").write_text('{"pipeline_stages": 4}')
    assert said("check", "ds.json", "--world-size", "8")[0] in (0, 2)


WITHOUT = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "overlap_comm": True},
}
"""A file without an optimizer, as many projects have it: the Trainer builds its own."""
SCRIPT = """torchrun train.py --deepspeed ./zero3.json --bf16 True --per_device_train_batch_size 16 --learning_rate 2e-5 \\
    --weight_decay 0.1 --warmup_ratio 0.03 --lr_scheduler_type cosine
"""


WRONG = {
    "lr": "abc",
    "learning_rate": "auto",
    "optimizer.params.lr": "abc",
    "weight_decay": "xyz",
    "eps": "abc",
    "max_grad_norm": float("nan"),
    "betas": [0.9],
    "adam_beta1": "abc",
    "mixed_precision": "fp17",
    "total_steps": "abc",
    "micro_batch": 0,
}
"""Values of --auto that were dropped without a word where --auto-from gave another value."""


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_fact_beside_a_dump_is_refused(deepspeed: Dialect, name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: found .*, expected "):
        deepspeed.read(
            HF, world_size=8, trainer={"max_steps": 50}, auto={"hidden_size": 64, name: WRONG[name]}
        )


def test_data_ranks_that_contradict_the_world_are_refused(deepspeed: Dialect) -> None:
    with pytest.raises(ConfigError, match="train_batch_size"):
        deepspeed.read(
            HF,
            world_size=8,
            trainer={"max_steps": 50},
            auto={"hidden_size": 64, "data_parallel": 2},
        )


def test_a_key_beside_a_dump_counts_wherever_the_argument_does(deepspeed: Dialect) -> None:
    auto = {"hidden_size": 64, "optimizer.params.lr": 1e-4}
    given = deepspeed.read(
        HF, world_size=8, trainer={"learning_rate": 2e-5, "max_steps": 50}, auto=auto
    ).given
    assert given["optimizer.params.lr"] == given["scheduler.params.warmup_max_lr"] == 1e-4


@pytest.mark.parametrize(
    ("fact", "wanted"),
    [
        ("lr=0.007", {"optimizer.params.lr": 0.007}),
        ("learning_rate=0.007", {"optimizer.params.lr": 0.007}),
        ("optimizer.params.lr=0.007", {"optimizer.params.lr": 0.007}),
        ("betas=[0.8, 0.9]", {"optimizer.params.betas": (0.8, 0.9)}),
        ("adam_beta1=0.7", {"optimizer.params.betas": (0.7, 0.95)}),
        ("eps=1e-5", {"optimizer.params.eps": 1e-5}),
        ("weight_decay=0.3", {"optimizer.params.weight_decay": 0.3}),
        ("clip=0.3", {"gradient_clipping": 0.3}),
        ("micro_batch=3", {"train_micro_batch_size_per_gpu": 3, "train_batch_size": 48}),
        ("accumulation=5", {"gradient_accumulation_steps": 5, "train_batch_size": 160}),
        ("mixed_precision=fp16", {"fp16.enabled": True, "bf16.enabled": False}),
        ("mixed_precision=no", {"fp16.enabled": False, "bf16.enabled": False}),
        ("mixed_precision=false", {"fp16.enabled": False, "bf16.enabled": False}),
        ("warmup_steps=9", {"scheduler.params.warmup_num_steps": 9}),
        ("max_steps=77", {"scheduler.params.total_num_steps": 77}),
    ],
)
def test_a_fact_beside_a_dump_wins(deepspeed: Dialect, fact: str, wanted: dict[str, Any]) -> None:
    """What one says on the command line counts; it was dropped without a word."""
    dump = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "learning_rate": 2e-5,
        "bf16": True,
    }
    dump |= {
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "max_grad_norm": 1.0,
        "max_steps": 50,
        "warmup_steps": 3,
    }
    name, _, said = fact.partition("=")
    auto = {
        "hidden_size": 64,
        name: json.loads(said) if said[0] in "[0123456789" or said == "false" else said,
    }
    given = deepspeed.read(HF, world_size=8, trainer=dump, auto=auto).given
    assert {
        path: tuple(found) if isinstance(found := given[path], list) else found for path in wanted
    } == wanted


class TestItsOwnOptimizer:
    @pytest.mark.parametrize(
        "optim", sorted(trainer.ADAMW - {"adamw_hf", "adamw_apex_fused", "adamw_torch_npu_fused"})
    )
    def test_it_is_what_the_trainer_builds(self, deepspeed: Dialect, optim: str) -> None:
        transformers = pytest.importorskip("transformers")
        pytest.importorskip("accelerate")
        said = {
            "learning_rate": 2e-5,
            "adam_beta1": 0.8,
            "adam_beta2": 0.95,
            "adam_epsilon": 1e-6,
            "weight_decay": 0.1,
        }
        args = transformers.TrainingArguments(optim=optim, use_cpu=True, report_to=[], **said)
        kind, its = transformers.Trainer.get_optimizer_cls_and_kwargs(args)
        given = deepspeed.read(
            WITHOUT, world_size=8, trainer={**said, "optim": optim}, auto={"hidden_size": 64}
        ).given
        assert kind.__name__ == given["optimizer.type"] == "AdamW"
        ours = {name: given[f"optimizer.params.{name}"] for name in ("lr", "betas", "eps")}
        assert {**ours, "betas": tuple(ours["betas"])} == {name: its[name] for name in ours}
        assert (
            given["optimizer.params.weight_decay"] == args.weight_decay
            and given["code.decay_scope"] == "matrices"
        )

    def test_one_that_no_plan_knows_is_left_open(self, deepspeed: Dialect) -> None:
        config = deepspeed.read(
            WITHOUT, world_size=8, trainer={"optim": "adafactor"}, auto={"hidden_size": 64}
        )
        (finding,) = (one for one in config.findings if one.path == "optimizer.type")
        assert (
            "optim=adafactor, which stagebridge cannot translate" in finding.message
            and not lift(config).optimizer.name
        )

    def test_one_of_the_file_stays(self, deepspeed: Dialect) -> None:
        own = {**WITHOUT, "optimizer": {"type": "Adam", "params": {"lr": "auto"}}}
        config = deepspeed.read(
            own, world_size=8, trainer={"learning_rate": 1e-3}, auto={"hidden_size": 64}
        )
        assert (config.given["optimizer.type"], config.given["optimizer.params.lr"]) == (
            "Adam",
            1e-3,
        )
        assert "optimizer.type" not in {one.path for one in config.findings}

    def test_a_launch_script_says_it(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "zero3.json").write_text(json.dumps(WITHOUT, indent=2))
        (tmp_path / "go.sh").write_text(SCRIPT)
        words = ["convert", str(tmp_path / "go.sh"), "--to", "megatron", "--world-size", "8"]
        assert run([*words, "--auto", "hidden_size=64"]) == 2
        out, err = capsys.readouterr()
        assert "--lr 2e-05\n" in out and "--weight-decay 0.1\n" in out and "add --lr" not in err
        told = " ".join(err.split())
        assert (
            "builds its own scheduler, cosine, over a number of steps that follows from the data"
            in told
        )
        assert run([*words, "--auto", "hidden_size=64", "--auto-from", "max_steps=100"]) == 2
        assert (
            "--lr-decay-style cosine\n--lr-decay-iters 100\n--lr-warmup-iters 3\n"
            in capsys.readouterr().out
        )

    def test_a_line_of_the_file_that_a_script_names_says_so(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "zero3.json").write_text(
            json.dumps({**WITHOUT, "disable_allgather": True}, indent=2)
        )
        (tmp_path / "go.sh").write_text(SCRIPT)
        words = [str(tmp_path / "go.sh"), "--world-size", "8"]
        assert run(["check", *words, "--auto", "hidden_size=64"]) == 2
        said = capsys.readouterr().out
        assert (
            "disable_allgather (zero3.json line 12): no effect" in said
            and "optimizer.type\n" in said
        )
        assert run(["check", *words, "--auto", "hidden_size=64", "--format", "github"]) == 2
        assert "line=12" not in capsys.readouterr().out, "it is no line of the script"
        assert run(["check", *words]) == 1
        assert "zero_optimization.reduce_bucket_size (zero3.json line 9)" in capsys.readouterr().err
        (tmp_path / "zero3.json").write_text(
            json.dumps({**WITHOUT, "zero_optimisation": {}}, indent=2)
        )
        assert run(["check", *words, "--auto", "hidden_size=64"]) == 1
        assert (
            "error: zero3.json: line 12: zero_optimisation: unknown key" in capsys.readouterr().err
        )


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_precision_without_a_section_is_switched_on(deepspeed: Dialect, precision: str) -> None:
    """accelerate adds the section; only a section that is there is left as it is."""
    file = {
        "zero_optimization": {"stage": 2},
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_clipping": "auto",
    }
    config = deepspeed.read(file, world_size=2, trainer={precision: True, "max_steps": 9})
    assert lift(config).precision.compute == precision
    assert (
        lift(
            deepspeed.read({**file, precision: {}}, world_size=2, trainer={precision: True})
        ).precision.compute
        == "fp32"
    )
    facts = {"micro_batch": 2, "clip": 1.0, "mixed_precision": precision}
    by_fact = deepspeed.read(file, world_size=2, auto=facts)
    assert by_fact.given[f"{precision}.enabled"] is True
    (row,) = (
        one
        for one in deepspeed.read(file, auto={"micro_batch": 2, "clip": 1.0}).findings
        if one.path == "bf16.enabled"
    )
    assert row.effect is Effect.NUMBERS and "--auto mixed_precision=bf16" in row.message


class TestEvidence:
    """`--deepspeed FILE` alone does not show that there is a Trainer."""

    FILE = '{"train_micro_batch_size_per_gpu": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 1}}'
    ARGPARSE = "p = argparse.ArgumentParser()\np.add_argument('--deepspeed')\np.add_argument('--output_dir')\n"

    def read(self, folder: Path, flags: str, program: str | None = None) -> Config:
        (folder / "ds.json").write_text(self.FILE)
        (folder / "go.sh").write_text(
            f"torchrun --nproc_per_node 2 train.py --deepspeed ds.json {flags}\n"
        )
        (folder / "own.py").write_text("from lib.base import Mine\n")
        (folder / "lib").mkdir()
        (folder / "lib" / "base.py").write_text("from . import more\n")
        (folder / "lib" / "more.py").write_text(
            "from transformers import Trainer\nclass Mine(Trainer): pass\n"
        )
        (folder / "plain.py").write_text("import argparse\n" + self.ARGPARSE)
        if program is not None:
            (folder / "train.py").write_text(program)
        return compat.load("deepspeed").read(folder / "go.sh")

    @pytest.mark.parametrize(
        ("flags", "program", "effect"),
        [
            ("--lr 1e-3 --epochs 3 --seed 1", None, Effect.NUMBERS),
            ("--lr 1e-3", "import torch\n", Effect.NUMBERS),
            ("--lr 1e-3", "import (", Effect.NUMBERS),
            ("--lr 1e-3", ARGPARSE, Effect.NONE),
            ("--output_dir x", ARGPARSE, Effect.NONE),
            ("--learning_rate 1e-3 --epochs 3", ARGPARSE, Effect.NONE),
            ("--learning_rate 1e-3 --epochs 3", None, Effect.NUMBERS),
            ("--per_device_train_batch_size 8 --lr 1e-3", "import torch, unseen\n", Effect.NUMBERS),
            ("--per-device-train-batch-size=8", "import torch\n", Effect.NUMBERS),
            ("--per_device_train_batch_size 8", "from plain import main\nmain()\n", Effect.NONE),
        ],
    )
    def test_without_it_nothing_is_invented(
        self, tmp_path: Path, flags: str, program: str | None, effect: Effect
    ) -> None:
        config = self.read(tmp_path, flags, program)
        (row,) = (one for one in config.findings if one.path == "--deepspeed")
        assert (
            row.effect is effect
            and "assumes that DeepSpeed gets the file as it is" in row.message
            and row.origin
        )
        assert not any(path.startswith(("optimizer.", "code.")) for path in config.given)
        assert not any("Trainer then" in one.message for one in config.findings)

    @pytest.mark.parametrize(
        ("flags", "program"),
        [
            ("--output_dir x --per_device_train_batch_size 8", None),
            ("--per-device-train-batch-size=8", "import torch, unseen\n"),
            ("--lr 1", "import transformers as hf\nhf.Trainer()\n"),
            ("--lr 1", "from own import Mine\n"),
            ("--lr 1", "from transformers import HfArgumentParser, Trainer\n"),
            ("--lr 1", "import transformers\ntransformers.Trainer()\n"),
            ("--lr 1", "from trl import SFTTrainer\n"),
        ],
    )
    def test_with_it_the_trainer_fills_in(
        self, tmp_path: Path, flags: str, program: str | None
    ) -> None:
        config = self.read(tmp_path, flags, program)
        assert config.given["optimizer.params.lr"] == 5e-5
        assert [one.path for one in config.findings].count("scheduler.type") == 1


def _convert(deepspeed: Dialect, to: str, release: str = "", **arguments: Any) -> Any:
    auto = {"hidden_size": 64, "total_steps": 100} | ({"transformers": release} if release else {})
    reads: Any = deepspeed.read
    config = reads(FILE, world_size=8, trainer=arguments, auto=auto)
    return bridge.translate(config, compat.load(to))


@pytest.mark.parametrize(
    ("name", "value", "effect"),
    [
        ("label_smoothing_factor", 0.1, Effect.NUMBERS),
        ("neftune_noise_alpha", 5.0, Effect.NUMBERS),
        ("optim_args", "a=b", Effect.NUMBERS),
        ("data_seed", 3, Effect.NUMBERS),
        ("group_by_length", True, Effect.NUMBERS),
        ("average_tokens_across_devices", False, Effect.NUMBERS),
        ("gradient_checkpointing", True, Effect.COST),
        ("use_liger_kernel", True, Effect.ROUNDING),
        ("label_smoothing_factor", 0.0, None),
        ("average_tokens_across_devices", True, None),
        ("gradient_checkpointing", False, None),
    ],
)
def test_what_the_trainer_alone_does_is_lost_to_another_stack_and_not_to_its_own(
    deepspeed: Dialect, name: str, value: Any, effect: Effect | None
) -> None:
    path = f"code.trainer.{name}"
    for to, expected in (("megatron", effect), ("deepspeed", None)):
        result = _convert(deepspeed, to, learning_rate=1e-4, **{name: value})
        effects = [one.effect for one in result.findings if one.path == path]
        assert effects == ([expected] if expected else [])


@pytest.mark.parametrize(
    ("release", "loss", "ranks"),
    [("4.45.2", "mean_of_microbatches", []), ("4.46.0", "per_token", [False]),
     ("4.53.3", "per_token", [False]), ("4.54.0", "per_token", []), ("", "per_token", [])],
)  # fmt: skip
def test_the_trainer_averages_over_tokens_by_release(
    deepspeed: Dialect, release: str, loss: str, ranks: list[bool]
) -> None:
    result = _convert(deepspeed, "megatron", release, learning_rate=1e-4)
    assert result.plan.loss == loss
    assert bool(result.config.given.get("calculate_per_token_loss")) is (loss == "per_token")
    lost = [one for one in result.findings if "average_tokens_across_devices" in one.path]
    assert [one.before for one in lost] == ranks
