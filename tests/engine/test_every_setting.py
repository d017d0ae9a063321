"""Every setting of a recipe, argument of Merak's trainer and key of a DeepSpeed file on the drop-in, changed one at a time: the
numbers of a tiny run on one rank change, a finding names the setting, the run stops, or it is in a small table of what has no
effect there.

A sample of the settings is tried; STAGEBRIDGE_EVERY=1 tries all. As a script, this file prints what came of them, by stack.
"""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import os
import re
import shutil
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields as dataclass_fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
import torch

from bridge.errors import BridgeError, ConfigError
from bridge.plan.section import fields
from bridge.translation.lift import plan_claims

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

SHARE = 1 if os.environ.get("STAGEBRIDGE_EVERY") else 12
"""One in so many of the settings is tried."""
MOCK = "nemo_automodel.components.datasets.llm.mock.build_unpacked_dataset"
SENTENCES = {"_target_": MOCK, "mean_len": 9, "vocab_size": 32, "max_sentence_len": 12}
BASE: Mapping[str, Any] = {
    "recipe": "TrainFinetuneRecipeForNextTokenPrediction",
    "seed": 7,
    "step_scheduler": {"global_batch_size": 8, "local_batch_size": 4, "num_epochs": 2},
    "model": {
        "_target_": "nemo_automodel.NeMoAutoModelForCausalLM.from_config",
        "torch_dtype": "float32",
        "config": {
            "_target_": "transformers.LlamaConfig",
            "vocab_size": 32,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 32,
        },
    },
    "distributed": {"strategy": "fsdp2"},
    "loss_fn": {"_target_": "nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy"},
    "dataset": {**SENTENCES, "num_sentences": 18},
    "validation_dataset": {**SENTENCES, "num_sentences": 4},
    "dataloader": {"_target_": "torchdata.stateful_dataloader.StatefulDataLoader"},
    "optimizer": {"_target_": "torch.optim.Adam", "lr": 0.01, "weight_decay": 0.1},
    "lr_scheduler": {"lr_decay_style": "cosine", "lr_warmup_steps": 2},
    "clip_grad_norm": {"max_norm": 0.5},
}
WSD = {"lr_scheduler.lr_decay_style": "WSD", "lr_scheduler.wsd_decay_steps": 3}
RAMP = {"lr_scheduler.wd_incr_style": "linear", "lr_scheduler.end_wd": 0.4}
BESIDE: Mapping[str, Mapping[str, Any]] = {
    "step_scheduler.ckpt_every_steps": {"checkpoint.enabled": True},
    "step_scheduler.save_checkpoint_every_epoch": {"checkpoint.enabled": True},
    "lr_scheduler.wsd_decay_steps": {**WSD, "lr_scheduler.lr_wsd_decay_style": "linear"},
    "lr_scheduler.lr_wsd_decay_style": {**WSD, "lr_scheduler.lr_wsd_decay_style": "linear"},
    "lr_scheduler.start_wd": RAMP,
    "lr_scheduler.end_wd": RAMP,
    "lr_scheduler.wd_incr_steps": RAMP,
    "lr_scheduler.wd_incr_style": {"lr_scheduler.end_wd": 0.4, **RAMP},
    "fp8.recipe_name": {"fp8.enabled": True},
    "fp8.enable_fsdp_float8_all_gather": {"fp8.enabled": True},
    "loss_fn.fp32_upcast": {"model.torch_dtype": "bfloat16"},
}
"""What a setting is seen beside, in both runs."""
OTHER: Mapping[str, Any] = {
    "model.config.hidden_size": 32,
    "model.config.vocab_size": 64,
    "model.config.head_dim": 8,
    "model.config.num_attention_heads": 2,
    "model.config.num_key_value_heads": 1,
    "model.config.initializer_range": 0.25,
    "model.config.rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    "step_scheduler.save_checkpoint_every_epoch": False,
    "step_scheduler.val_every_steps": 2,
    "step_scheduler.ckpt_every_steps": 2,
    "lr_scheduler.wsd_decay_steps": 2,
    "lr_scheduler.init_lr": 0.005,
    "lr_scheduler.max_lr": 0.02,
    "lr_scheduler.min_lr": 0.005,
    "optimizer.eps": 0.1,
    "optimizer.lr": 0.02,
}
"""Another value of a setting, where the first one of its type is none that a run shows."""
FREE: Mapping[str, Any] = {
    **{
        f"optimizer._target_={kind}": kind
        for kind in ("torch.optim.RMSprop", "torch.optim.Muon", "dion.Dion", "mine.AdamW")
    },
    "optimizer.amsgrad": True,
    "optimizer.maximize": True,
    "loss_fn._target_": "mine.Loss",
    "loss_fn.reduction": "mean",
    "loss_fn.fp32_upcast": False,
    "loss_fn.ignore_index": 3,
    "dataset.num_sentences": 24,
    "dataset.std_len": 1.0,
    "dataset.seed": 4,
    "dataset._target_": "mine.Data",
    "validation_dataset.seed": 4,
    "dataloader.shuffle": False,
    "dataloader.drop_last": True,
    "dataloader.batch_size": 2,
    "dataloader.pin_memory": True,
    "dataloader.prefetch_factor": 3,
    "dataloader._target_": "mine.Loader",
    "dataloader.collate_fn": "mine.collate",
    "validation_dataloader.batch_size": 2,
    "validation_dataloader.drop_last": True,
    "model.attn_implementation": "eager",
    "model.use_cache": True,
    "checkpoint.model_save_format": "torch_save",
    "checkpoint.save_consolidated": True,
    "rng.ranked": False,
    "compile": {"enabled": True},
    "peft": {"_target_": "nemo_automodel.components._peft.lora.PeftConfig", "dim": 2, "match_all_linear": True},
}  # fmt: skip
"""Settings that the schema leaves free, each with another value."""
WITHOUT: Mapping[str, str] = {
    **dict.fromkeys(
        ("model.config.bos_token_id", "model.config.eos_token_id"),
        "no step reads it: the tokenizer writes these tokens, and generation alone takes them from the config",
    ),
    "step_scheduler.gc_every_steps": "collects garbage",
    "distributed.activation_checkpointing": "memory against time",
    "distributed.reshard_after_forward": "memory against messages",
    "distributed.enable_async_tensor_parallel": "messages of tensor ranks, of which there is one",
    "distributed.sequence_parallel": "tensor ranks, of which there is one",
    "dist_env.timeout_minutes": "how long a hanging rank is waited for",
    "dataloader.num_workers": "processes that load",
    "dataloader.pin_memory": "where loaded batches lie",
    "dataloader.prefetch_factor": "how far ahead is loaded",
    "checkpoint.save_consolidated": "one more file of a checkpoint",
    "model.use_cache": "generation",
    "model.attn_implementation": "kernels of one computation",
    "model.config.max_position_embeddings": "a bound of a table that Llama computes as it goes",
    "model.config.original_max_position_embeddings": "read beside a scaling of positions alone",
    "validation_dataloader.drop_last": "the last batch is whole here",
    "model.config.partial_rotary_factor": "read by families that rotate a part of a head, not by Llama",
}
"""Settings without effect on the numbers of one rank, each with the reason."""
Case = tuple[str, Any, Mapping[str, Any]]
"""A setting, another value, and what both are seen beside."""
Seen = tuple[Any, set[str]]
"""What is seen of a run, None if it stops; and what findings name."""
SEEN = ("step", "loss", "grad_norm", "lr", "val_loss", "saved", "skipped", "loss_scale")


def changed(values: Mapping[str, Any]) -> dict[str, Any]:
    """The base with other values by dotted path."""
    data = copy.deepcopy(dict(BASE))
    for path, value in values.items():
        at, (*inner, last) = data, path.partition("=")[0].split(".")
        for name in inner:
            at = at.setdefault(name, {})
        at[last] = value
    return data


def another(kind: Any, usual: Any) -> Iterator[Any]:
    """Values of a type other than `usual`."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        yield from another(parts[0], usual)
    elif origin in (UnionType, Union):
        for part in parts:
            yield from another(part, usual)
    elif origin in (tuple, list):
        inner = next(another(parts[0], None), None) if parts else {}
        yield [inner] * (1 if not parts or parts[-1] is ... or origin is list else len(parts))
    else:
        known: Mapping[Any, Sequence[Any]] = {
            bool: (True, False),
            int: (1, 3, 2),
            float: (0.25, 2.0),
        }
        texts = ("nobody.Knows",) if kind is str else ()
        found = parts if origin is Literal else known.get(kind, texts)
        found = ({"nobody_knows": 1},) if dict in (kind, origin) else found
        yield from (value for value in found if value != usual and kind is not NoneType)


def recipe(values: Mapping[str, Any]) -> tuple[Any, set[str]]:
    """The lines of a recipe's run, or None if it stops; and what findings name."""
    from compat.automodel.dialect import DIALECT
    from compat.automodel.runtime.recipe import open_recipe

    rules = plan_claims(DIALECT)
    try:
        config = DIALECT.read(changed(values), None, 1)
        run = open_recipe(config, 1)
        lines = [
            (type(line).__name__, [value for name, value in line.fields().items() if name in SEEN])
            for line in run.steps()
        ]
    except BridgeError as error:
        return None, set(re.findall(r"[\w.*]+", str(error)))
    found = {finding.path for finding in (*run.findings, *config.findings)}
    mine = (path for each in found if each in rules for path in rules[each].carriers(each))
    return lines, found | set(mine)


def named(path: str, findings: set[str]) -> bool:
    """Whether a finding is about a setting or the section around it."""
    return any(
        f"{path}.".startswith(f"{each}.") or each.startswith(f"{path}.") for each in findings
    )


def answers(
    cases: Iterator[Case],
    run: Callable[[Mapping[str, Any]], Seen],
    excused: Mapping[str, str],
    before_too: bool = False,
) -> Iterator[tuple[str, Any, str]]:
    """Change a sample of settings one at a time. Yield each with its value and what came of it: `stops`, `numbers`, `named`
    (with `before_too`, by a finding that was there before the change as well), `excused`, `silent`, or the error that is
    nobody's refusal.
    """
    bases = dict[str, Seen]()
    for path, value, beside in itertools.islice(cases, 0, None, SHARE):
        if value is None:
            continue
        if repr(beside) not in bases:
            bases[repr(beside)] = run(beside)
        before, known = bases[repr(beside)]
        try:
            lines, findings = run({**beside, path: value})
        except Exception as error:
            yield path, value, f"{error!r}"[:200]
            continue
        if lines is None or lines != before:
            yield path, value, "stops" if lines is None else "numbers"
        elif named(path.partition("=")[0], findings - known) or (
            before_too and (path in findings or named(path, known - findings))
        ):
            yield path, value, "named"
        else:
            yield path, value, "excused" if path in excused else "silent"


def settings() -> Iterator[Case]:
    """Every setting of a recipe, with another value, and what it is seen beside."""
    from compat.automodel.dialect import DIALECT
    from compat.automodel.schema import AutoModel

    usual = DIALECT.read(changed({}), None, 1).effective.flat()
    for path, field in fields(AutoModel).items():
        beside = BESIDE.get(path, {})
        if path.endswith("*"):
            yield f"{path[:-1]}nobody_knows", 1, {}
        elif path in OTHER:
            yield path, OTHER[path], beside
        else:
            now = beside.get(path, usual.get(path))
            yield path, next(another(field.annotation, now), None), beside
    for path, value in FREE.items():
        yield path, value, BESIDE.get(path.partition("=")[0], {})


def test_no_setting_of_a_recipe_is_silent(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert_heard(answers(settings(), recipe, WITHOUT))


def assert_heard(found: Iterator[tuple[str, Any, str]]) -> None:
    """Hold that something was tried, and that every setting had an answer."""
    seen = list(found)
    assert seen
    left = [each for each in seen if each[2] not in ("stops", "numbers", "named", "excused")]
    assert not left, left


# Merak


def arguments_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a short run with other values."""
    usual = {
        "output_dir": "out",
        "use_cpu": True,
        "max_steps": 4,
        "num_train_epochs": 1,
        "per_device_train_batch_size": 2,
        "learning_rate": 0.01,
        "weight_decay": 0.1,
        "logging_steps": 1,
    }
    return {**usual, **values}


def trained(values: Mapping[str, Any]) -> tuple[Any, set[str]]:
    """The lines and files of a run of Merak's trainer, or None if it stops; and what findings name."""
    import compat.merak as Merak
    from tests.engine.blocks import small
    from tests.engine.merak_runs import Rows

    Merak.init(1, 1, 1)
    try:
        try:
            args = Merak.MerakArguments(**arguments_of(values))
        except (TypeError, OSError, ImportError) as error:  # transformers itself refuses
            raise ConfigError(str(error)) from error
        torch.manual_seed(args.seed)
        model = small("gpt2", resid_pdrop=0.1).float()
        trainer = Merak.MerakTrainer(
            model=model, args=args, train_dataset=Rows(), eval_dataset=Rows(4)
        )
        trainer.train()
    except (BridgeError, ValueError) as error:
        return None, set(re.findall(r"[\w.*]+", str(error)))
    found = {finding.path.removeprefix("args.") for finding in trainer.findings}
    files = sorted(str(path) for path in Path().rglob("iter_*/*"))
    chunks = [stage.recomputes for stage in trainer.engine.executor.stages.values()]
    shutil.rmtree("out", ignore_errors=True)
    return (trainer.log_history, files, chunks, trainer.max_steps), found


MERAK_BESIDE: Mapping[str, Mapping[str, Any]] = {
    "num_train_epochs": {"max_steps": -1},
    "eval_steps": {"do_eval": True, "per_device_eval_batch_size": 1},
    "per_device_eval_batch_size": {"do_eval": True},
    "save_total_limit": {"save": True, "save_steps": 1},
    "save_steps": {"save": True},
    "lr_scheduler_kwargs": {"lr_scheduler_type": "cosine_with_min_lr"},
}
MERAK_OTHER: Mapping[str, Any] = {
    "num_train_epochs": 2.0,
    "eval_steps": 1,
    "per_device_eval_batch_size": 3,
    "save_steps": 1,
    "lr_scheduler_kwargs": {"min_lr": 0.005},
    "include_num_input_tokens_seen": True,
    "evaluation_strategy": "epoch",
    "warmup_ratio": 0.5,
    "parallelism_config": {"tp_size": 2},
}
MERAK_WITHOUT: Mapping[str, str] = {
    **dict.fromkeys(("tp_overlapping_level", "partition_method", "train_schedule"), "one rank"),
    "wall_clock_breakdown": "prints times",
    **dict.fromkeys(("output_dir", "logging_dir", "run_name"), "a place or a name of records"),
    **dict.fromkeys(("report_to", "disable_tqdm"), "records"),
    **dict.fromkeys(("use_cpu", "local_rank"), "the device, of which a test has one"),
    **dict.fromkeys(("dataloader_num_workers", "dataloader_pin_memory"), "how data is loaded"),
    "average_tokens_across_devices": "Merak's default is the other one, and it never reads it",
}
"""Arguments without effect on the numbers of one rank, each with the reason."""


def arguments() -> Iterator[Case]:
    """Every argument of Merak's trainer with another value, and what it is seen beside."""
    import compat.merak as Merak
    from compat.merak.schema import Merak as Schema

    schema, hints = fields(Schema), get_type_hints(Merak.MerakArguments)
    usual = Merak.MerakArguments(**arguments_of({}))
    for name in (each.name for each in dataclass_fields(Merak.MerakArguments)):
        known, now = schema.get(f"args.{name}"), getattr(usual, name)
        kind = known.annotation if known else hints[name]
        other = next(another(kind, getattr(now, "value", now)), None)
        yield name, MERAK_OTHER.get(name, other), MERAK_BESIDE.get(name, {})


def test_no_argument_of_merak_s_trainer_is_silent(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert_heard(answers(arguments(), trained, MERAK_WITHOUT))


# DeepSpeed's file


FILE: Mapping[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5,
    "optimizer.type": "AdamW",
    "optimizer.params.lr": 0.01,
    "optimizer.params.weight_decay": 0.1,
    "scheduler.type": "WarmupDecayLR",
    "scheduler.params.warmup_num_steps": 3,
    "scheduler.params.warmup_max_lr": 0.05,
    "scheduler.params.total_num_steps": 8,
    "zero_optimization.stage": 2,
}
HALF = {
    "fp16.enabled": True,
    "fp16.initial_scale_power": 8,
    "fp16.loss_scale_window": 2,
    "zero_optimization.stage": 1,
}
NO_WARMUP = dict.fromkeys(
    f"scheduler.params.{name}" for name in ("warmup_num_steps", "warmup_max_lr", "total_num_steps")
)
RANGE = {
    **NO_WARMUP,
    "scheduler.type": "LRRangeTest",
    "scheduler.params.lr_range_test_step_size": 2,
}
CYCLE = {
    **NO_WARMUP,
    "scheduler.type": "OneCycle",
    "scheduler.params.cycle_min_lr": 0.001,
    "scheduler.params.cycle_max_lr": 0.02,
    "scheduler.params.cycle_first_step_size": 3,
    "scheduler.params.decay_step_size": 1,
    "scheduler.params.cycle_first_stair_count": 1,
    "scheduler.params.cycle_second_stair_count": 1,
}
COSINE = {"scheduler.type": "WarmupCosineLR", "scheduler.params.warmup_max_lr": None}
PARAMS, STEPS_OF = "optimizer.params.", "scheduler.params."
SECTIONS: Mapping[str, Mapping[str, Any]] = {
    "fp16.": HALF,
    "fp16.consecutive": {**HALF, "fp16.loss_scale_window": 50},
    "fp16.min_loss": {**HALF, "fp16.loss_scale_window": 50, "fp16.hysteresis": 1},
    "bf16.": {"bf16.enabled": True},
    "bf16.bf16": {"bf16.enabled": True, "bf16.bf16_master_weights_and_grads": True},
    "bfloat16.": {"bfloat16.enabled": True},
    "bfloat16.enabled": {},
    "bfloat16.bf16": {"bfloat16.enabled": True, "bfloat16.bf16_master_weights_and_grads": True},
    f"{PARAMS}adam_w_mode": {"optimizer.type": "Adam"},
    f"{STEPS_OF}lr_range": RANGE,
    f"{STEPS_OF}cycle": CYCLE,
    f"{STEPS_OF}decay": CYCLE,
    f"{STEPS_OF}cos_": COSINE,
    f"{STEPS_OF}warmup_min_ratio": COSINE,
    f"{PARAMS}momentum": {"optimizer.type": "SGD"},
    f"{PARAMS}dampening": {"optimizer.type": "SGD", f"{PARAMS}momentum": 0.9},
    f"{PARAMS}nesterov": {"optimizer.type": "SGD", f"{PARAMS}momentum": 0.9},
    "zero_optimization.stage3_": {"zero_optimization.stage": 3},
    "zero_optimization.offload_param.": {
        "zero_optimization.stage": 3,
        "zero_optimization.offload_param.device": "cpu",
    },
    "zero_optimization.offload_optimizer.": {"zero_optimization.offload_optimizer.device": "cpu"},
    **{
        f"{name}.": {f"{name}.enabled": True}
        for name in (
            "flops_profiler",
            "comms_logger",
            "tensorboard",
            "csv_monitor",
            "hybrid_engine",
        )
    },
}
"""What the keys of a section are seen beside: the longest of these that a key begins with."""


def key_lines(values: Mapping[str, Any]) -> tuple[Any, set[str]]:
    """What a script sees in a short run of the drop-in by a file, or None if it stops; and what findings name."""
    import compat.deepspeed as deepspeed
    from compat.deepspeed.dialect import DIALECT

    torch.manual_seed(3)
    data = nested({**FILE, **values})
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3))
    rows = [(torch.randn(4), torch.randn(3)) for _ in range(7)]
    rules = plan_claims(DIALECT)
    printed = io.StringIO()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(printed):
            warnings.simplefilter("ignore")
            engine, _, loader, _ = deepspeed.initialize(
                model=model, config=data, training_data=rows
            )
            lines = [
                engine.train_batch_size(),
                len(loader),
                *(engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()),
                *engine.get_data_types(),
                engine.zero_gather_16bit_weights_on_model_save(),
            ]
            engine.loss_fn = torch.nn.functional.mse_loss
            dtype = next(model.parameters()).dtype
            batches = [(x.to(dtype), y.to(dtype)) for x, y in [*loader] * 8]
            for step in range(8):
                losses = []
                for at in range(engine.gradient_accumulation_steps()):
                    inputs, targets = batches[(2 * step + at) % len(batches)]
                    weight = 1e4 if step % 3 == 2 else 1  # which overflows in fp16
                    loss = torch.nn.functional.mse_loss(engine(inputs * 40), targets) * weight
                    engine.backward(loss)
                    engine.step()
                    losses.append(float(loss.detach()))
                found = engine.get_global_grad_norm(), engine.get_lr(), engine.get_mom()
                lines += [*losses, *found, engine.cur_scale, engine.skipped_steps]
    except BridgeError as error:
        return None, set(re.findall(r"[\w.*]+", str(error)))
    paths = {finding.path for finding in engine.findings}
    carried = {path for each in paths if each in rules for path in rules[each].carriers(each)}
    engine.destroy()
    return (repr(lines), printed.getvalue()), paths | carried


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Sections of values by dotted path, without those that are None."""
    data: dict[str, Any] = {}
    for path, value in values.items():
        if value is None:
            continue
        *inner, last = path.split(".")
        at = data
        for name in inner:
            at = at.setdefault(name, {})
        at[last] = value
    return data


def keys() -> Iterator[Case]:
    """Every key of a file with another value, and what it is seen beside."""
    from compat.deepspeed.dialect import DIALECT
    from compat.deepspeed.schema import DeepSpeed
    from compat.deepspeed.strategies import BESIDE as NEEDED, settable

    sections = set()
    for path in settable(DIALECT.versions[-1]):
        if path.startswith("code."):
            continue
        leads = [lead for lead in SECTIONS if path.startswith(lead)]
        beside = {**(SECTIONS[max(leads, key=len)] if leads else {}), **NEEDED.get(path, {})}
        usual = DIALECT.read(nested({**FILE, **beside}), None, 1).effective.flat().get(path)
        other = KEY_OTHER.get(path, next(another(fields(DeepSpeed)[path].annotation, usual), None))
        yield path, other, beside
        sections.add(path.rpartition(".")[0])
    yield f"{PARAMS}adam_w_mode", False, {}
    yield from ((f"{section}.nobody_knows".lstrip("."), 1, {}) for section in sorted(sections))


KEY_OTHER: Mapping[str, Any] = {
    "fp16.min_loss_scale": 200,
    "bfloat16.immediate_grad_update": False,
    "bfloat16.check_grad_overflow": False,
}
KEY_WITHOUT: Mapping[str, str] = {
    "optimizer.params.torch_adam": "which kernel of DeepSpeed's runs; the engine has torch's alone",
    "zero_optimization.stage": "shards over ranks, of which there is one",
    "wall_clock_breakdown": "prints times, which differ from run to run",
}
"""Keys without effect on what one rank computes, each with the reason."""


def test_no_key_of_a_file_is_silent_on_the_drop_in() -> None:
    assert_heard(answers(keys(), key_lines, KEY_WITHOUT, before_too=True))


if __name__ == "__main__":
    os.chdir(tempfile.mkdtemp())
    for stack, found in (
        ("DeepSpeed", answers(keys(), key_lines, KEY_WITHOUT, before_too=True)),
        ("Merak", answers(arguments(), trained, MERAK_WITHOUT)),
        ("AutoModel", answers(settings(), recipe, WITHOUT)),
    ):
        with contextlib.redirect_stdout(io.StringIO()):
            seen = list(found)
        print(stack, len(seen), dict(Counter(answer for *_, answer in seen)))
        print(*(each for each in seen if each[2] not in ("stops", "numbers", "named", "excused")))
