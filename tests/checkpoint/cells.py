"""A table of checkpoints: folders that the tools themselves made, each converted to each format, and what arrived.

`python -m tests.checkpoint.cells [SOURCE ...] --folder FOLDER` makes every source with its own tool, converts it by the command
to every target, reads the target as its own tool does, and prints a row for each source; with --train three of them go on
for two steps on the own loaders of five targets. A cell is `moments` (weights and
moments are equal bit by bit), `weights`, or the words of the refusal; with anything else the program ends with 1.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bridge.checkpoint import formats, renaming
from bridge.checkpoint.hub import Hub, Model
from bridge.cli import run as command
from tests.checkpoint import checkpoints, moved
from tests.checkpoint.megatron_checkpoints import Launch, megatron
from tests.checkpoint.tool_folders import (
    GROUPED,
    MAKERS,
    STEPS,
    Loaded,
    Rows,
    TrainedRun,
    run_of,
    save_by_transformers,
    save_sharded,
    trainer,
)

Truth = Mapping[tuple[str, str], Tensor]
"""Weights (masters, where there are any) and moments, by the name of transformers and the kind."""
KINDS = ("exp_avg", "exp_avg_sq")
NAMED = ("--names", "huggingface")
"""Without it, formats that take any names keep those of Megatron."""
TARGETS: Mapping[str, tuple[str, ...]] = {
    "huggingface": ("huggingface",),
    "bin": ("bin",),
    "dcp": ("dcp", *NAMED),
    "native": ("native",),
    "DeepSpeed 1": ("deepspeed", "--level", "1", "--ranks", "2", *NAMED),
    "DeepSpeed 3": ("deepspeed", "--level", "3", "--ranks", "2", *NAMED),
    "universal": ("universal", *NAMED),
    "torch_dist": ("megatron",),
    "Trainer": ("trainer",),
}


# Sources


def of_run(make: Callable[[TrainedRun, Path], Path]) -> Callable[[Path, Any], tuple[Path, Truth]]:
    """A source that a run of plain torch saves."""

    def source(folder: Path, pool: Any) -> tuple[Path, Truth]:
        run = run_of(GROUPED)
        return make(run, folder), run.truth

    return source


def pretrained(folder: Path, pool: Any) -> tuple[Path, Truth]:
    run = run_of(GROUPED)
    run.model.save_pretrained(str(folder / "model"))
    return folder / "model", {key: held for key, held in run.truth.items() if key[1] == "weight"}


def by_trainer(folder: Path, pool: Any) -> tuple[Path, Truth]:
    whole = trainer(folder, GROUPED, STEPS)
    whole.train()
    run = TrainedRun(whole.model, whole.optimizer.optimizer, None)  # type: ignore[union-attr]
    return folder / f"checkpoint-{STEPS}", run.truth


def trainer_with_deepspeed(level: int) -> Callable[[Path, Any], tuple[Path, Truth]]:
    def source(folder: Path, pool: Any) -> tuple[Path, Truth]:
        pool.run(_trainer_with_deepspeed, folder, level)
        return folder / f"checkpoint-{STEPS}", torch.load(folder / "truth.pt")

    return source


def _trainer_with_deepspeed(rank: int, world: int, folder: Path, level: int) -> None:
    from tests.engine.oracles import real_deepspeed

    real_deepspeed()
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    optimizer = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True}}
    config = {
        "zero_optimization": {"stage": level},
        "train_micro_batch_size_per_gpu": 2,
        "zero_force_ds_cpu_optimizer": False,
        "optimizer": optimizer,
    }
    whole = trainer(folder, GROUPED, STEPS, deepspeed=config)
    whole.train()
    found = {}
    for name, weight in whole.model.named_parameters():
        found[name, "weight"] = safe_get_full_fp32_param(weight)
        found |= {(name, kind): safe_get_full_optimizer_state(weight, kind) for kind in KINDS}
    if rank == 0:
        torch.save({key: held.clone() for key, held in found.items()}, folder / "truth.pt")


def trainer_with_fsdp(folder: Path, pool: Any) -> tuple[Path, Truth]:
    """The writers of accelerate for FSDP2 on two ranks, with the Trainer's own state beside (its type of run needs a GPU)."""
    from transformers import TrainerState

    folder = folder / "checkpoint-2"
    folder.mkdir()
    (truth, _) = pool.run(save_sharded, GROUPED, folder, "SHARDED_STATE_DICT")
    TrainerState(global_step=STEPS, max_steps=4).save_to_json(str(folder / "trainer_state.json"))
    torch.save(run_of(GROUPED).scheduler.state_dict(), folder / "scheduler.pt")
    return folder, truth


def by_transformers(folder: Path, pool: Any) -> tuple[Path, Truth]:
    truth, _ = pool.run(save_by_transformers, folder / "run")
    return folder / "run", truth


def by_deepspeed(level: int, universal: bool = False) -> Callable[[Path, Any], tuple[Path, Truth]]:
    def source(folder: Path, pool: Any) -> tuple[Path, Truth]:
        task = checkpoints.Task(level=level, matrices=True, save=folder / "run")
        pool.run(checkpoints.deepspeed, task)
        moved._universal(folder / "run", folder / "universal")
        truth = truth_of_universal(folder / "universal")
        return folder / ("universal" if universal else "run"), truth

    return source


def truth_of_universal(folder: Path) -> Truth:
    """What DeepSpeed's universal files hold."""
    kinds = {"fp32.pt": "weight", **{f"{kind}.pt": kind for kind in KINDS}}
    found = {}
    for path in folder.rglob("*.pt"):
        if path.name in kinds:
            held = torch.load(path, weights_only=False)
            # Files that come from ZeRO 3 are tensors of one dimension.
            found[path.parent.name, kinds[path.name]] = (
                held if torch.is_tensor(held) else held["param"]
            )
    return found


def by_megatron(**parallel: int) -> Callable[[Path, Any], tuple[Path, Truth]]:
    def source(folder: Path, pool: Any) -> tuple[Path, Truth]:
        pool.run(megatron, Launch("llama", parallel, save=folder / "run"))
        return folder / "run", named(formats.read_checkpoint(folder / "run"))

    return source


def by_native(folder: Path, pool: Any) -> tuple[Path, Truth]:
    pool.run(checkpoints.native, checkpoints.Task(level=1, matrices=True, save=folder / "run"))
    return folder / "run", named(formats.read_checkpoint(folder / "run"))


SOURCES: Mapping[str, Callable[[Path, Any], tuple[Path, Truth]]] = {
    "save_pretrained": pretrained,
    "Trainer": by_trainer,
    "Trainer, DeepSpeed 1": trainer_with_deepspeed(1),
    "Trainer, DeepSpeed 3": trainer_with_deepspeed(3),
    "Trainer, FSDP2": trainer_with_fsdp,
    "accelerate": of_run(MAKERS["accelerate"]),
    "Lightning file": of_run(MAKERS["lightning"]),
    "torch file": of_run(MAKERS["file"]),
    "DCP: app": of_run(MAKERS["tutorial"]),
    "DCP: Lightning": of_run(MAKERS["lightning in parts"]),
    "DCP: torch_save_to_dcp": of_run(MAKERS["file by torch_save_to_dcp"]),
    "DCP: torchtitan": of_run(MAKERS["torchtitan"]),
    "DCP: transformers": by_transformers,
    "DeepSpeed 1": by_deepspeed(1),
    "DeepSpeed 2": by_deepspeed(2),
    "DeepSpeed 3": by_deepspeed(3),
    "universal": by_deepspeed(1, True),
    "torch_dist TP 2": by_megatron(tensor=2),
    "torch_dist PP 2": by_megatron(pipeline=2),
    "native": by_native,
}


# Targets, read as their own tools read them


def named(hub: Hub) -> Truth:
    """What a checkpoint holds, by the names of transformers."""
    hub = renaming.naming_that_fits(hub, None, "huggingface", Model(kv_heads=2))
    rows = {(name, "weight"): held.best.whole() for name, held in hub.parameters.items()}
    for name, held in hub.parameters.items():
        rows |= {(name, kind): moment.whole() for kind, moment in held.moments.items()}
    return rows


def of_pretrained(folder: Path) -> Truth:
    from transformers import AutoModelForCausalLM

    model, said = AutoModelForCausalLM.from_pretrained(
        str(folder), dtype=torch.float32, output_loading_info=True
    )
    assert not said["missing_keys"] and not said["unexpected_keys"], said
    return {(name, "weight"): held.detach() for name, held in model.named_parameters()}


def of_dcp(folder: Path) -> Truth:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(folder, folder / "whole.pt")
    state = torch.load(folder / "whole.pt", weights_only=False)
    found = {(name, "weight"): held for name, held in state["model"].items()}
    for name, moments in state.get("optimizer", {}).get("state", {}).items():
        found |= {(name, kind): moments[kind] for kind in KINDS}
    return found


def of_deepspeed(folder: Path) -> Truth:
    place = folder.with_name(f"{folder.name} universal")
    tag = (folder / "latest").read_text()
    moved.universal_of(folder / tag, place / "universal")
    return truth_of_universal(place)


def of_trainer(folder: Path) -> Truth:
    """By the numbers that the Trainer's own optimizer gives to its parameters."""
    found = dict(of_pretrained(folder))
    if not (folder / "optimizer.pt").is_file():
        return found
    with tempfile.TemporaryDirectory() as scratch:
        whole = trainer(Path(scratch), GROUPED)
        names = {weight: name for name, weight in whole.model.named_parameters()}  # type: ignore[union-attr]
        groups = whole.create_optimizer().param_groups
    order = [names[weight] for group in groups for weight in group["params"]]
    states = torch.load(folder / "optimizer.pt")["state"]
    for at, state in states.items():
        found |= {(order[at], kind): state[kind] for kind in KINDS}
    return found


READERS: Mapping[str, Callable[[Path], Truth]] = {
    "huggingface": of_pretrained,
    "bin": of_pretrained,
    "dcp": of_dcp,
    "native": lambda folder: named(formats.read_checkpoint(folder)),
    "DeepSpeed 1": of_deepspeed,
    "DeepSpeed 3": of_deepspeed,
    "universal": truth_of_universal,
    "torch_dist": lambda folder: named(formats.read_checkpoint(folder)),
    "Trainer": of_trainer,
}


def converted(source: Path, target: str, output: Path, *more: str) -> str:
    """Why a conversion was refused; empty if it was not."""
    words = ["checkpoint", "convert", str(source), "--to", *TARGETS[target], "-o", str(output)]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        code = command([*words, *more])
    lines = [line for line in out.getvalue().splitlines() if line.startswith("error: ")]
    return "" if code in (0, 2) else "\n".join(lines) or out.getvalue()


def cell(source: Path, truth: Truth, target: str, output: Path, config: Path) -> str:
    """What arrived of a source."""
    if problem := converted(source, target, output, "--config", str(config)):
        return f"refused: {problem.removeprefix('error: ')}"
    found = READERS[target](output)
    # Without the prefix of the attribute that holds the model of a Lightning module.
    prefix = "" if any(key in found for key in truth) else "model."
    rows = {(prefix + name, kind): held for (name, kind), held in truth.items()}
    wrong = [key for key, held in found.items() if key not in rows or not _same(held, rows[key])]
    lost = {kind for name, kind in rows if (name, kind) not in found}
    if wrong or "weight" in lost:
        return f"WRONG: {wrong[:3]} {sorted(lost)}"
    return "weights" if lost or len(rows) == len({name for name, _ in rows}) else "moments"


def _same(found: Tensor, held: Tensor) -> bool:
    """Whether they have the same bits. Files of ZeRO 3 have no shapes, and rows of the vocabulary that stand for no word are
    told and left.
    """
    padding = held.numel() - found.numel()
    padded = padding > 0 and held.shape[0] == checkpoints.VOCABULARY + moved.PADDING
    return (padded or not padding) and torch.equal(found.flatten(), held.flatten()[: found.numel()])


# The next losses, by the target's own loader


def next_losses(rank: int, world: int, target: str, folder: Path) -> list[float]:
    """The losses of two more steps from a converted checkpoint; each rank trains on the same rows."""
    run = run_of(GROUPED, 0, seed=5)
    if target == "dcp":
        run = Loaded(folder, run_of(GROUPED, seed=5)).run
        return [run.step(number) for number in AFTER]
    if target == "native":
        import compat.deepspeed as library
    else:
        from tests.engine.oracles import real_deepspeed

        library = real_deepspeed()
    rows = [
        {key: group[key] for key in ("params", "weight_decay")}
        for group in run.optimizer.param_groups
    ]
    level = int(target[-1]) if target.startswith("DeepSpeed") else 1
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": level},
        **({"checkpoint": {"load_universal": True}} if target == "universal" else {}),
    }
    engine, *_ = library.initialize(
        model=run.model,
        model_parameters=rows,
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
        config=config,
        dist_init_required=False,
    )
    path, _ = engine.load_checkpoint(str(folder))
    assert path is not None
    losses = []
    for number in AFTER:
        loss = engine(**{name: row[None] for name, row in Rows()[number].items()}).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


AFTER = (STEPS, STEPS + 1)
TRAINED = ("torch file", "DCP: torchtitan", "accelerate")
"""Sources that a run of plain torch saved, from which each target trains on."""
GOING_ON = ("dcp", "native", "DeepSpeed 1", "DeepSpeed 3", "universal")


def farthest(source: str, target: str, folder: Path, pool: Any) -> float:
    """The largest relative difference between the next losses of plain torch and of a target."""
    run = run_of(GROUPED)
    truth = [run.step(number) for number in AFTER]
    found = pool.run(next_losses, target, folder)[0]
    pool.close()
    return max(abs(one - other) / other for one, other in zip(found, truth, strict=True))


def table(names: list[str], top: Path, pool: Any) -> Iterator[tuple[str, dict[str, str]]]:
    """Each source with its cells."""
    for name in names:
        folder = folder_of(top, name)
        folder.mkdir(parents=True)
        with contextlib.redirect_stdout(io.StringIO()):
            source, truth = SOURCES[name](folder, pool)
            pool.close()  # a run of one library may leave another unable to train
        hidden = max(held.shape[-1] for (key, _), held in truth.items() if "embed" in key)
        config = GROUPED if hidden == GROUPED.hidden_size else checkpoints.config_for("llama")
        config.save_pretrained(folder / "config")
        given = folder / "config" / "config.json"
        cells = {}
        for target in TARGETS:
            try:
                cells[target] = cell(source, truth, target, folder / f"to {target}", given)
            except Exception as error:
                cells[target] = f"WRONG: {type(error).__name__}: {error}"
        yield name, cells


def main() -> int:
    """All sources and targets."""
    from tests.engine.pool import Pool

    parser = argparse.ArgumentParser()
    parser.add_argument("sources", nargs="*")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--train", action="store_true", help="train on from the targets as well")
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    pool = Pool(2)
    with tempfile.TemporaryDirectory() as scratch:
        top = options.folder or Path(scratch)
        for name, cells in table(options.sources or list(SOURCES), top, pool):
            counts.update(words.partition(":")[0] for words in cells.values())
            print(
                f"{name}: {'; '.join(f'{target} {words}' for target, words in cells.items())}",
                flush=True,
            )
            for target in GOING_ON if options.train and name in TRAINED else ():
                gap = farthest(name, target, folder_of(top, name) / f"to {target}", pool)
                counts["WRONG"] += gap > NEAR
                print(f"{name} to {target}: the next losses differ by {gap:.1e}", flush=True)
    pool.close()
    print(dict(counts))
    return int(counts["WRONG"] > 0)


NEAR = 1e-6
"""Largest relative difference of losses that rounding explains."""


def folder_of(top: Path, source: str) -> Path:
    return top / source.replace(" ", "_").replace(":", "")


if __name__ == "__main__":
    sys.exit(main())
