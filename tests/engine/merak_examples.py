"""Merak's own examples, made small, run five steps with the native engine: only the import differs.

`python tests/engine/merak_examples.py FOLDER [NAME ...]` takes the folder `examples` of Merak's source. Models are as small as
`SIZES` says, with random weights and five steps; everything else stays as the script has it: its ranks, its lists for tensor
ranks, its loss, its data set, the flags of its README. What a script sets is counted by use, and each use is held to what is
seen of the run: axes by the engine's groups, lists by the weights that were split, flags and assignments by the trainer, methods
that a script overrides by whether they ran. A use that is in the trainer's findings is counted as such. Where a model cannot be
cut as its script wants, the same script runs on data ranks alone, and its pipeline and tensor ranks count as not honoured.
"""

from __future__ import annotations

import re
import sys
import tempfile
import types
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pool import Pool, RankError

from bridge.errors import BridgeError

STEPS = 5
LARGEST = 8_000_000
SIZES: Mapping[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "embedding_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers", "num_decoder_layers"), 4),
    **dict.fromkeys(("l_layers", "x_layers", "r_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim"), 64),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_source_positions", "max_target_positions"), 64),
    "vocab_size": 1024,
    "num_key_value_heads": 4,
    "rotary_dim": 4,
    "d_kv": 8,
}
LISTS = {"num_attention_heads", "num_heads", "num_hidden_layers", "hidden_size"}
"""Sizes that some models have by stage; theirs stay as they are."""
COMMON = (
    *("--output_dir", "out", "--max_steps", str(STEPS), "--num_train_epochs", "1", "--logging_steps", "1"),
    *("--use_cpu", "True", "--seq_length", "64"),
)
SMALL = ("--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "4")
METHODS = ("get_loss_fn", "prepare_data", "create_optimizer", "create_lr_scheduler", "create_dataloader")
CONFIG = re.compile(r"\bconfig = (\w+Config)\(")
IMPORTS = re.compile(r"^(\s*)(import|from) Merak\b", re.MULTILINE)
MODEL = re.compile(r"model_name == '([^']+)'|model_name == \"([^\"]+)\"")


def shrunk(kind: Any) -> Any:
    """A config class whose models are small."""

    def make(**given: Any) -> Any:
        usual = kind()
        there = {name for name in SIZES if hasattr(usual, name) and not isinstance(getattr(usual, name), list | tuple)}
        inner = {name: _small(getattr(usual, name).to_dict()) for name in PARTS if hasattr(usual, name)}
        mine = {name: SIZES[name] for name in there if name in usual.to_dict() or name in getattr(kind, "attribute_map", {})}
        return kind(**{**given, **mine, **inner})

    return make


PARTS = ("text_config", "vision_config")


def _small(values: Mapping[str, Any]) -> dict[str, Any]:
    return {**values, **{key: size for key, size in SIZES.items() if key in values and not isinstance(values[key], list)}}


@dataclass
class Seen:
    """What is seen of a run on one rank: uses with what became of each, losses, and why it did not run."""

    uses: dict[str, str] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    refused: str = ""


def ran(rank: int, world: int, path: Path, sizes: Mapping[str, int] | None, flags: Sequence[str]) -> Seen:
    """One example; `sizes` are taken instead of the script's."""
    from compat.merak.runtime import launch, trainer

    seen, made = Seen(), []
    real_init, real_lists, real_make = launch.init, launch.set_tp_layer_lists, trainer.MerakTrainer.__init__

    def init(pp: int, tp: int, dp: int, *more: Any) -> None:
        seen.uses.update({f"init.pp={pp}": "?", f"init.tp={tp}": "?", f"init.dp={dp}": "?"})
        real_init(**(sizes or {"pp": pp, "tp": tp, "dp": dp}))

    def lists(**given: Any) -> None:
        seen.uses.update({f"lists.{name}": "?" for name, value in given.items() if value})
        if (sizes or {"tp": 2})["tp"] > 1:
            real_lists(**given)

    def make(self: Any, *given: Any, **named: Any) -> None:
        made.append(self)
        size = sum(weight.numel() for weight in named["model"].parameters())
        assert size < LARGEST, f"{size} parameters: SIZES do not make this model small"
        seen.uses.update({f"trainer.{name}": "?" for name, value in named.items() if value is not None})
        called = {name for name in METHODS if getattr(type(self), name) is not getattr(trainer.MerakTrainer, name, None)}
        seen.uses.update({f"override.{name}": "?" for name in called & set(vars(type(self)))})
        for name in called:
            _counting(self, name, seen)
        real_make(self, *given, **named)

    patches = ((launch, "init", init), (launch, "set_tp_layer_lists", lists), (trainer.MerakTrainer, "__init__", make))
    held = [(owner, name, getattr(owner, name)) for owner, name, _ in patches]
    argv, sys.argv = sys.argv, [path.name, *COMMON, *flags, "--model_name", _model_name(path)]
    sys.path.insert(0, str(path.parent))
    try:
        for owner, name, value in patches:
            setattr(owner, name, value)
        with warnings.catch_warnings(), tempfile.TemporaryDirectory():
            warnings.simplefilter("ignore")
            text = IMPORTS.sub(_changed, CONFIG.sub(r"config = __shrunk(\1)(", path.read_text(encoding="utf-8")))
            module = types.ModuleType(f"merak_{path.stem}")
            module.__dict__.update({"__shrunk": shrunk, "__name__": "__main__"})
            exec(compile(text, str(path), "exec"), module.__dict__)
        _judge(seen, made[0], sizes)
        seen.losses = [line["loss"] for line in made[0].log_history if "loss" in line]
    except (BridgeError, ImportError, NameError) as error:
        seen.refused = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    except Exception as error:
        seen.refused = f"{type(error).__name__}: {(str(error).splitlines() or [''])[-1][:300]}"
    finally:
        for owner, name, value in held:
            setattr(owner, name, value)
        sys.argv = argv
        sys.path.remove(str(path.parent))
        sys.modules.pop("config", None)
    return seen


def _changed(found: re.Match[str]) -> str:
    indent, word = found.groups()
    return f"{indent}import compat.merak as Merak" if word == "import" else f"{indent}from compat.merak"


def _model_name(path: Path) -> str:
    beside = path.parent / "config.py"
    found = MODEL.search(beside.read_text(encoding="utf-8")) if beside.exists() else None
    return next(filter(None, found.groups())) if found else "small"


def _counting(trainer: Any, name: str, seen: Seen) -> None:
    own = getattr(trainer, name)

    def called(*given: Any, **named: Any) -> Any:
        seen.uses[f"override.{name}"] = "called"
        return own(*given, **named)

    setattr(trainer, name, called)


def _judge(seen: Seen, trainer: Any, sizes: Mapping[str, int] | None) -> None:
    """What became of each use."""
    engine, told = trainer.engine, {finding.path: finding.message for finding in trainer.findings}
    axes = {"pp": engine.line.size, "tp": engine.tensor.size, "dp": engine.data.size}
    split = [parameter.name for parameter in engine.parameters if parameter.split is not None]
    for use in list(seen.uses):
        kind, _, rest = use.partition(".")
        if kind == "init":
            axis, number = rest.split("=")
            seen.uses[use] = f"{axes[axis]} ranks" if axes[axis] == int(number) else ""
        elif kind == "lists":
            seen.uses[use] = f"{len(split)} weights split" if split else ""
        elif kind == "trainer":
            seen.uses[use] = "changes nothing here" if rest == "leaf_modules" else "used"
    for name, value in vars(trainer.args).items():
        if name in ASSIGNED and value:
            seen.uses[f"args.{name}"] = "in findings" if f"args.{name}" in told else ""


ASSIGNED = ("custom_split_points",)
"""What scripts assign to their arguments, apart from sizes."""


def main(folder: Path, chosen: Sequence[str]) -> int:
    """Run them all and print what is seen."""
    torch.set_num_threads(1)
    pools: dict[int, Pool] = {}
    honoured, uses, whole, partly = Counter[str](), Counter[str](), 0, 0
    paths = sorted(folder.glob("models/*/run_*.py"))
    print("| example | ranks | losses, or why not | not honoured |\n|---|---|---|---|")
    for path in paths:
        if chosen and path.parent.name not in chosen:
            continue
        own = {name: int(number) for name, number in re.findall(r"^\s*(pp|tp|dp) = (\d+)", path.read_text(), re.MULTILINE)}
        found, world = Seen(), own["pp"] * own["tp"] * own["dp"]
        for sizes in (None, {"pp": 1, "tp": own["tp"], "dp": own["pp"] * own["dp"]}, {"pp": 1, "tp": 1, "dp": 2}):
            ranks = world if sizes is None else sizes["tp"] * sizes["dp"]
            first = found
            try:
                found = pools.setdefault(ranks, Pool(ranks)).run(ran, path, sizes, SMALL, timeout=300)[0]
            except RankError as error:
                found = Seen(refused=str(error).strip().splitlines()[-1][:300])
            print(f"<!-- {path.parent.name} {sizes or own}: {found.refused or 'ran'} -->", flush=True)
            if not found.refused:
                break
        told = " ".join(f"{loss:.3f}" for loss in found.losses) if not found.refused else found.refused
        whole += sizes is None and not found.refused
        partly += sizes is not None and not found.refused
        missed = [use for use, how in found.uses.items() if not how or how == "?"]
        for use in found.uses:
            kind = use.partition("=")[0]
            uses[kind] += 1
            honoured[kind] += use not in missed
        print(f"| {path.parent.name} | {sizes or own} | {told} | {', '.join(missed)} |", flush=True)
        del first
    for pool in pools.values():
        pool.close()
    print(f"\n{whole} run as they are, {partly} on other ranks, of {len(paths)}")
    for kind, number in uses.most_common():
        print(f"| {kind} | {number} | {honoured[kind]} |")
    print(f"{sum(honoured.values())} of {sum(uses.values())} uses")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve(), sys.argv[2:]))
