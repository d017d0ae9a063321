"""What Megatron's own code takes from a checkpoint: `python -m tests.stacks.megatron.checkpoint_oracle RELEASE=TREE ...`.

For each release, flags and a checkpoint are generated, and `load_args_from_checkpoint` and
`OptimizerParamScheduler.load_state_dict` of its source tree run on them as they are; only the reading of the file is stood
in for, and packages that are not installed. Our answers are held against theirs. With --write, that many rows of each
release go to checkpoint_sample.jsonl, against which test_checkpoint_source.py holds our answers without a tree.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

from bridge.errors import TranslationError
from bridge.stack.releases import table
from compat.megatron import releases
from compat.megatron.checkpoint_source import DECAYS, Saved, load_schedule, take_arguments
from compat.megatron.dialect import DIALECT
from compat.megatron.formats import flag_lines

Row = dict[str, Any]
SAMPLE = Path(__file__).with_name("checkpoint_sample.jsonl")
LACKING = ("six", "triton", "triton.language")
"""Packages that the trees import and that have no part in the answer."""
SIZES = (None, 1, 2, 4, 8, 64, 128)
VALUES: dict[str, tuple[Any, ...]] = {
    "position_embedding_type": ("learned_absolute", "rope", "none"),
    "normalization": ("LayerNorm", "RMSNorm"),
    "moe_token_dispatcher_type": ("allgather", "alltoall", None),
    "moe_router_score_function": ("softmax", "sigmoid"),
    "ckpt_format": ("torch", "torch_dist"),
    "tokenizer_type": ("GPT2BPETokenizer", "NullTokenizer", None),
    "tokenizer_model": ("/a/b.model", None),
    "tiktoken_pattern": ("v1", "v2", None),
    "hybrid_layer_pattern": ("M*-M", None),
    "hybrid_override_pattern": ("M*M-", None),
    "mtp_hybrid_override_pattern": ("M*", None),
    "heterogeneous_layers_config_path": ("/a.json", None),
    "heterogeneous_layers_config_encoded_json": ("{}", None),
    "spec": (["a", "b"], None),
    "moe_layer_freq": (1, 2, [0, 1]),
    **dict.fromkeys(("rotary_percent", "attention_dropout", "hidden_dropout"), (0.0, 0.5, 1.0)),
    **dict.fromkeys(
        ("hybrid_attention_ratio", "hybrid_mlp_ratio", "moe_router_topk_scaling_factor"),
        (0.0, 0.25, None),
    ),
}
"""Values of arguments that are neither switches nor sizes."""
SCHEDULES: dict[str, tuple[Any, ...]] = {
    "max_lr": (1e-3, 3e-4, 1e-3),
    "min_lr": (0.0, 1e-5),
    "lr_warmup_steps": (0, 32, 64),
    "lr_decay_steps": (1024, 2048, 1024),
    "lr_decay_style": ("cosine", "linear"),
    "wd_incr_steps": (1024, 2048, 1024),
    "wd_incr_style": ("linear", "cosine"),
    "start_wd": (0.0, 0.01),
    "end_wd": (0.1, 0.2),
}
OLDER = {"max_lr": "start_lr", "lr_warmup_steps": "warmup_steps", "lr_decay_steps": "end_iter"}


def _names(version: str) -> list[str]:
    rows = table(releases.__name__, "checkpoint_arguments.json")
    return sorted({row["name"] for row in rows} & releases.defaults(version).keys())


def _value(name: str, version: str, dice: random.Random) -> Any:
    default = releases.defaults(version).get(name)
    if name in VALUES:
        return dice.choice(VALUES[name])
    return dice.choice((True, False) if isinstance(default, bool) else SIZES)


def pose(version: str, seed: int) -> Row:
    """Return flags, the arguments of a checkpoint with the version of its format, and two schedules."""
    dice = random.Random(f"{version} {seed}")
    names = _names(version)
    words = []
    for name in dice.sample(names, dice.randrange(0, len(names))):
        try:
            value = _value(name, version, dice)
            words += [
                word
                for line in flag_lines({name: value}, version)
                for word in line
                if value is not None
            ]
        except TranslationError:
            continue  # no flag says so, such as a switch that is off anyway
    for switch in ("use_tokenizer_model_from_checkpoint_args", "use_mp_args_from_checkpoint_args"):
        default = releases.defaults(version).get(switch)
        if default is not None and dice.random() < 0.5:
            words += [word for line in flag_lines({switch: not default}, version) for word in line]
    more = (
        "disable_bias_linear",
        "model_parallel_size",
        "hybrid_override_pattern",
        "consumed_train_samples",
    )
    saved = {name: _value(name, version, dice) for name in (*names, *more) if dice.random() < 0.7}
    own, state = ({name: dice.choice(values) for name, values in SCHEDULES.items()} for _ in "12")
    state = {**own, **{name: state[name] for name in dice.sample([*state], dice.randrange(0, 4))}}
    if dice.random() < 0.2:
        state = {name: value for name, value in state.items() if name not in DECAYS}
    state = {
        OLDER[name] if name in OLDER and dice.random() < 0.2 else name: value
        for name, value in state.items()
    }
    mode = dice.choice(("overrides", "uses", ""))
    return {
        "release": version,
        "flags": words,
        "checkpoint": saved,
        "format": dice.choice((0, 2.0, 3.0, 3.0)),
        "own": own,
        "state": {**state, dice.choice(("num_steps", "num_steps", "num_iters")): dice.choice((0, 128, 512))},
        "mode": mode,
    }  # fmt: skip


def answer(row: Row) -> Row:
    """Return what our code makes of a row."""
    version = row["release"]
    given = DIALECT.parse(row["flags"], version, True).given
    args = {**releases.defaults(version), **given}
    taken = take_arguments(args, Saved("", row["checkpoint"], row["format"]), version)
    mode = row["mode"]
    found, problems = load_schedule(row["own"], row["state"], mode == "overrides", mode == "uses")
    # What is set to the value that it has anyway cannot be told from outside.
    changed = {name: value for name, value in taken.items() if args.get(name) != value}
    return {"taken": changed, "schedule": None if problems else found}


def ask(rows: list[Row]) -> list[Row]:
    """Return what the release's own code makes of rows; its source tree is first on the path."""
    from tests.harvesting.stacks.megatron import ready

    ready()
    # They stay: a module that is imported twice has no source.
    sys.modules.update({name: MagicMock(__version__="3.4.0") for name in LACKING})
    with patch("torch.compile", lambda made=None, **_: made or (lambda one: one)):
        script = import_module("megatron.training.arguments")
        loader = import_module("megatron.training.checkpointing")
        scheduler = import_module("megatron.core.optimizer_param_scheduler")
    parser = script.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    loader.print_rank_0 = lambda *words: None
    return [{**row, **_ask(row, parser, loader, scheduler)} for row in rows]


def _ask(row: Row, parser: Any, loader: Any, scheduler: Any) -> Row:
    args = parser.parse_args([*row["flags"], "--load", "x"])
    before = dict(vars(args))
    state = {
        "args": SimpleNamespace(**row["checkpoint"]),
        "checkpoint_version": row["format"],
        "iteration": 7,
    }
    loaded = (state, "x", False) if row["release"] < "0.1" else (state, "x", False, None)
    with patch.object(loader, "_load_base_checkpoint", lambda *_, **__: loaded):
        loader.load_args_from_checkpoint(args)
    after = {name: value for name, value in vars(args).items() if name != "iteration"}
    taken = {name: value for name, value in after.items() if before.get(name) != value}
    own = {"init_lr": 0.0, "use_checkpoint_opt_param_scheduler": row["mode"] == "uses"}
    own |= {"override_opt_param_scheduler": row["mode"] == "overrides", **row["own"]}
    made = scheduler.OptimizerParamScheduler(SimpleNamespace(param_groups=[]), **own)
    try:
        made.load_state_dict(dict(row["state"]))
    except AssertionError:
        return {"taken": taken, "schedule": None}
    return {
        "taken": taken,
        "schedule": {name: getattr(made, name) for name in (*row["own"], "num_steps")},
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("trees", nargs="+")
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--write", type=int, default=0)
    parser.add_argument("--ask", action="store_true")
    options = parser.parse_args()
    if options.ask:
        rows = [pose(options.trees[0], seed) for seed in range(options.count)]
        print("\n" + json.dumps(ask(rows)))
        return
    kept: list[Row] = []
    for release, tree in (one.split("=", 1) for one in options.trees):
        command = [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "tests.stacks.megatron.checkpoint_oracle",
            release,
            "--ask",
        ]
        path = ":".join([str(Path(__file__).parents[3]), tree, *sys.path])
        done = subprocess.run(
            [*command, "--count", str(options.count)],
            env={"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            print(release, done.stderr[-2000:])
            continue
        rows = json.loads(done.stdout.splitlines()[-1])
        wrong = [
            row for row in rows if any(row[key] != value for key, value in answer(row).items())
        ]
        print(
            f"{release}: {len(rows)} rows, {len(wrong)} differ,",
            f"{sum(len(row['taken']) for row in rows)} arguments taken",
        )
        for row in wrong[:3]:
            ours = answer(row)
            print({key: (row[key], ours[key]) for key in ours if row[key] != ours[key]}, row)
        kept += rows[: options.write]
    if options.write:
        SAMPLE.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")


if __name__ == "__main__":
    main()
