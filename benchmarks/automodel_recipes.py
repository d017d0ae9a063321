"""Ten recipes of AutoModel's own, made small, run five steps; and each option that they set is tried with another value.

`python benchmarks/automodel_recipes.py FOLDER` takes the folder `examples/llm_finetune` of AutoModel's source. Models become
small ones of their family with random weights, data some rows of the same columns, batches and intervals smaller numbers; no
option is dropped. Each recipe is run by `stagebridge train` on as many ranks as it needs. Then, on one rank, an option is set to
another value in the first recipe that has it: it is heard if what is seen of the run is other (losses, norms, rates, validations,
files, plan, or an error that refuses it), except where it is in a finding of the recipe as it stands. `ci` says how AutoModel's
own tests run a file; nothing of the run reads it, and it is counted apart. Options are counted by use: one set in ten recipes is
ten uses.
"""

from __future__ import annotations

import copy
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml

sys.path.append(str(Path(__file__).parents[1]))

from bridge.engine import comm
from bridge.errors import BridgeError
from bridge.translation.lift import lift
from compat.automodel.dialect import DIALECT
from compat.automodel.runtime.recipe import open_recipe
from tests.engine.automodel_runs import words
from tests.engine.blocks import small
from tests.engine.uses import WANTED, Use, different, other, table

RECIPES: Mapping[str, str] = {
    "llama3_2/llama3_2_1b_squad": "llama",
    "llama3_2/llama3_2_1b_hellaswag": "llama",
    "llama3_2/llama3_2_1b_hellaswag_hsdp": "llama",
    "llama3_2/customizer_llama_3_2_1b_full_sft": "llama",
    "llama3_1/llama3_1_8b_hellaswag_pp": "llama",
    "gemma/gemma_3_270m_squad": "gemma3_text",
    "mistral/mistral_7b_squad": "mistral",
    "qwen/qwen2_5_7b_squad": "qwen2",
    "qwen/qwen3_0p6b_hellaswag": "qwen3",
    "llama3_1/customizer_llama_3_1_8b_full_sft_tp": "llama",
}
"""The recipes, and the family of the model of each."""
SIZES: Mapping[str, Any] = {
    "step_scheduler.global_batch_size": 8,
    "step_scheduler.local_batch_size": 4,
    "step_scheduler.ckpt_every_steps": 2,
    "step_scheduler.val_every_steps": 3,
    "step_scheduler.max_steps": 6,
    "distributed.pipeline.pp_microbatch_size": 1,
    "validation_dataset.num_samples_limit": 6,
    "validation_dataset.limit_dataset_samples": 6,
    "dataset.seq_length": 96,
    "validation_dataset.seq_length": 96,
    "dataset.dataset_name": "data",
    "validation_dataset.dataset_name": "data",
    "dataset.path_or_dataset": "data",
    "validation_dataset.path_or_dataset": "data",
    "dataset.path_or_dataset_id": "data/train.jsonl",
    "validation_dataset.path_or_dataset_id": "data/validation.jsonl",
    "checkpoint.checkpoint_dir": "out",
}
"""What becomes of sizes and places."""
RATE = 1e-2
OTHER: Mapping[str, Any] = {
    "step_scheduler.num_epochs": 3,
    "checkpoint.model_save_format": "torch_save",
    "checkpoint.save_consolidated": False,
    "checkpoint.checkpoint_dir": "other",
    "model.pretrained_model_name_or_path": "another",
    "model._target_": "nemo_automodel.NeMoAutoModelForCausalLM.from_config",
    "model.torch_dtype": "float32",
    "model.attn_implementation": "eager",
    "dataset.split": "validation",
    "validation_dataset.split": "train",
    "distributed.strategy": "ddp",
    "distributed.pipeline.pp_schedule": "gpipe",
    "distributed._target_": "nemo_automodel.components.distributed.ddp.DDPManager",
    "optimizer.betas": [0.5, 0.9],
    "optimizer.eps": 0.1,
    "optimizer._target_": "torch.optim.SGD",
    "dataset.column_mapping.question": "completion",
    "dataset.column_mapping.answer": "prompt",
    "validation_dataset.column_mapping.question": "completion",
    "validation_dataset.column_mapping.answer": "prompt",
    "dataset.padding": "max_length",
    "validation_dataset.padding": "max_length",
    "dataset.truncation": "do_not_truncate",
    "validation_dataset.truncation": "do_not_truncate",
    "dataset.seq_length": 16,
    "validation_dataset.seq_length": 16,
    "clip_grad_norm.max_norm": 0.01,
    "lr_scheduler.lr_decay_style": "linear",
    "packed_sequence.packed_sequence_size": 64,
    "dataloader.collate_fn.pad_seq_len_divisible": 64,
    "validation_dataloader.collate_fn.pad_seq_len_divisible": 64,
    **{
        f"{name}.{key}": f"elsewhere.{key}"
        for name in ("dataset", "validation_dataset")
        for key in ("dataset_name", "path_or_dataset")
    },
    "dataset.path_or_dataset_id": "data/validation.jsonl",
    "validation_dataset.path_or_dataset_id": "data/train.jsonl",
}
"""Another value of an option, where it is not the double, the opposite or a name that nobody knows."""
BESIDE: Mapping[str, Mapping[str, Any]] = {
    "distributed.sequence_parallel": {"distributed.tp_size": 2},
    "validation_dataloader.drop_last": {"validation_dataset.num_samples_limit": 6},
    "dataset.truncation": {"dataset.seq_length": 16},
    "validation_dataset.truncation": {"validation_dataset.seq_length": 16},
    "lr_scheduler.min_lr": {"lr_scheduler.min_lr": 1e-4},
    "step_scheduler.num_epochs": {"step_scheduler.max_steps": None},
}
"""What an option is seen beside, in both runs."""
Tree = dict[str, Any]


def leaves(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Every option with its value."""
    for name, value in tree.items():
        inner = f"{path}.{name}" if path else str(name)
        if isinstance(value, Mapping):
            yield from leaves(value, inner)
        else:
            yield inner, value


def put(tree: Tree, path: str, value: Any) -> None:
    """Set an option, or take it out where `value` is None."""
    *parents, leaf = path.split(".")
    for name in parents:
        tree = tree.setdefault(name, {})
    if value is None:
        tree.pop(leaf, None)
    else:
        tree[leaf] = value


def shrunk(tree: Tree, family: str) -> Tree:
    """A recipe with small sizes and local places; every option stays."""
    found = copy.deepcopy(tree)
    options = dict(leaves(found))
    for path, value in SIZES.items():
        if path in options:
            put(found, path, value)
    if isinstance(options.get("distributed.dp_size"), int):
        put(found, "distributed.dp_size", 1)
    put(found, "model.pretrained_model_name_or_path", family)
    put(found, "optimizer.lr", RATE)
    if "lr_scheduler.min_lr" in options:
        put(found, "lr_scheduler.min_lr", RATE / 10)
    return found


def files(folder: Path) -> None:
    """Small models with a tokenizer, and rows with the columns of all three data sets."""
    for family in {*RECIPES.values(), "another"}:
        kind, seed = ("llama", 7) if family == "another" else (family, 0)
        small(kind, seed, vocab_size=264).to(torch.bfloat16).save_pretrained(folder / family)
        words(folder / family)
    (folder / "data").mkdir()
    for split, first, number in (("train", 0, 48), ("validation", 100, 10)):
        rows = [json.dumps(row(first + place)) for place in range(number)]
        (folder / "data" / f"{split}.jsonl").write_text("\n".join(rows) + "\n")


def row(number: int) -> Tree:
    """A row with every column."""
    question, answer = f"What is {number} and one?", f"It is {number + 1}."
    story = {
        "ctx": f"She counts {number}",
        "endings": [" and stops.", f" and then {number + 1}."],
        "label": "1",
    }
    squad = {
        "context": f"After {number} comes {number + 1}.",
        "question": question,
        "answers": {"text": [answer]},
    }
    return {"prompt": question, "completion": answer, **story, **squad}


def ranks(tree: Tree) -> int:
    """Ranks that the axes of a recipe need."""
    options = dict(leaves(tree))
    return int(
        (options.get("distributed.tp_size") or 1) * (options.get("distributed.pp_size") or 1)
    )


def trained(path: Path, world: int) -> tuple[int, list[Tree], list[str]]:
    """Five steps by the command: its exit code, its lines and its notes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launcher = (
        ["-m", "torch.distributed.run", "--nproc-per-node", str(world), "--master-port", str(port)]
        if world > 1
        else ["-P"]
    )
    words_ = [
        sys.executable,
        *launcher,
        "-m",
        "stagebridge",
        "train",
        path.name,
        "--steps",
        "5",
        "--json",
    ]
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        words_, capture_output=True, text=True, cwd=path.parent, env=environment, check=False
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    notes = [
        line.removeprefix("note: ")
        for line in done.stderr.splitlines()
        if line.startswith(("note:", "error:"))
    ]
    return done.returncode, lines, notes


def seen(tree: Tree) -> dict[str, Any]:
    """What is seen of three steps of a recipe on one rank; of one that needs more, its plan."""
    before = {str(file) for file in Path().rglob("*")}
    found: dict[str, Any] = {}
    try:
        world = ranks(tree)
        config = DIALECT.read(tree, None, world)
        found["plan"] = lift(config).values()
        if world == 1:
            comm.patient(None, None)
            run = open_recipe(config, 1)
            found["findings"] = sorted(finding.path for finding in run.findings)
            found["lines"] = [
                {
                    name: value
                    for name, value in line.fields().items()
                    if name not in ("tokens_per_second", "memory")
                }
                for line in run.steps(min(3, run.length))
            ]
            found["own"] = (
                run.length,
                comm.TIMEOUT,
                run.engine.model.config._attn_implementation,
                run.engine.bytes(),
            )
    except (BridgeError, ValueError) as error:
        found["refused"] = str(error)
    found["files"] = sorted({str(file) for file in Path().rglob("*")} - before)
    subprocess.run(["rm", "-rf", "out", "other"], check=True)
    return found


def tried(tree: Tree, path: str) -> str:
    """How an option is heard: what is other with another value; empty: nothing."""
    beside = dict(BESIDE.get(path, {}))
    first = copy.deepcopy(tree)
    for name, value in beside.items():
        put(first, name, value)
    second = copy.deepcopy(first)
    put(second, path, other(path, dict(leaves(first)).get(path), OTHER))
    return different(
        seen(first), seen(second), ("refused", "lines", "files", "plan", "own", "findings")
    )


def main(source: Path) -> int:
    """Run and try, and print both tables; 1 if less than nine in ten uses are heard, or a recipe did not run."""
    uses, homes, good = Counter[str](), {}, True
    told_of = Counter[str]()
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)
        files(Path(name))
        print("| recipe | ranks | exit | losses |\n|---|---|---|---|")
        for place, (recipe, family) in enumerate(RECIPES.items()):
            tree = yaml.safe_load((source / f"{recipe}.yaml").read_text(encoding="utf-8"))
            small_one = shrunk(tree, family)
            assert {path for path, _ in leaves(tree)} == {path for path, _ in leaves(small_one)}
            for path, _ in leaves(small_one):
                uses[path] += 1
                homes.setdefault(path, small_one)
            file = Path(name) / f"recipe{place}.yaml"
            file.write_text(yaml.safe_dump(small_one))
            code, lines, notes = trained(file, ranks(small_one))
            subprocess.run(["rm", "-rf", "out"], check=True)
            losses = [line["loss"] for line in lines if "loss" in line]
            told_of.update(
                {note.partition(":")[0] for note in notes if not note.startswith("error")}
            )
            good = good and code == 0 and len(losses) == 5
            told = " ".join(f"{loss:.4f}" for loss in losses) or "; ".join(notes)
            print(f"| {recipe} | {ranks(small_one)} | {code} | {told} |", flush=True)
        own = {path: number for path, number in uses.items() if path.startswith("ci.")}
        every: list[Use] = []
        for path, number in uses.most_common():
            if path not in own:
                how, findings = tried(homes[path], path), told_of[path]
                every += [Use("recipes", path, how, place < findings) for place in range(number)]
        share = table(every)
    print(f"{sum(own.values())} uses of ci apart")
    return int(not good or share < WANTED)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
