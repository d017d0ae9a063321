"""Real files, and how each reader's mutants are made of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import compat
from bridge.errors import BridgeError
from bridge.files import load, parse
from bridge.plan.section import fields
from bridge.testing.scripts import write_script
from compat.megatron import releases
from tests.fuzz import mutants
from tests.fuzz.gentle import Flags, Pool, groups

ROOT = Path(__file__).resolve().parents[2]
Make = Callable[[Random], str]
ROUGH = 0.15
"""Share of mutants that are made without regard to what a value is."""


def files(*patterns: str) -> list[Path]:
    """Files of the repository."""
    return sorted(path for pattern in patterns for path in ROOT.glob(pattern))


def trees(*patterns: str) -> list[Any]:
    """Their content as plain data."""
    return [load(path).data for path in files(*patterns)]


@dataclass(frozen=True)
class Reader:
    """What is fuzzed: the stack, the suffix of its file, how a mutant is made, and the least share that is to be accepted."""

    dialect: str
    suffix: str
    make: Callable[[], Make]
    floor: float = 0.1

    def maker(self) -> Make:
        """How a mutant is made, real files read."""
        return made(self.make)


@cache
def made(make: Callable[[], Make]) -> Make:
    """What `make` makes, once."""
    return make()


def launches() -> list[list[str]]:
    """Command lines of Megatron: every eighth of the sample, and our own."""
    lines = (
        (ROOT / "tests/stacks/megatron/sample.jsonl").read_text(encoding="utf-8").splitlines()[::8]
    )
    own = [words(path.read_text()) for path in files("examples/*/*.args", "bridge/cli/demo/*.args")]
    return accepted(
        "megatron", [*own, *(json.loads(line)["flags"] for line in lines)], ".args", " ".join
    )


def words(source: str) -> list[str]:
    """The words of a file of flags."""
    return [word for line in source.splitlines() for word in line.partition("#")[0].split()]


def accepted(
    dialect: str, seeds: Iterable[Any], suffix: str, text: Callable[[Any], str]
) -> list[Any]:
    """Those of `seeds` that are valid in the newest release."""
    return [seed for seed in seeds if _valid(dialect, text(seed), suffix)]


def _valid(dialect: str, text: str, suffix: str) -> bool:
    try:
        compat.load(dialect).read(parse(text, "seed", suffix))
    except BridgeError:
        return False
    return True


def recipe(flags: list[str]) -> dict[str, Any]:
    """Flags as a recipe."""
    return {
        "MODEL_ARGS": {
            name: " ".join(values) if values else True for name, *values in groups(flags)
        }
    }


DEEPSPEED: list[Any] = [
    {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 2,
            "overlap_comm": True,
            "offload_optimizer": {"device": "cpu"},
        },
        "gradient_clipping": 1.0,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1},
        },
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"warmup_num_steps": 10, "total_num_steps": 100},
        },
    },
    {
        "train_batch_size": "auto",
        "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16},
        "zero_optimization": {},
    },
    {
        "train_batch_size": 32,
        "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16, "hysteresis": 2},
        "zero_optimization": {
            "stage": 3,
            "stage3_prefetch_bucket_size": 50000000,
            "reduce_bucket_size": 500000000,
        },
        "activation_checkpointing": {"partition_activations": True, "number_checkpoints": 4},
        "optimizer": {"type": "Adam", "params": {"lr": 0.0002, "torch_adam": True}},
        "wall_clock_breakdown": False,
        "steps_per_print": 100,
    },
    {
        "train_micro_batch_size_per_gpu": 1,
        "code": {"pipeline_stages": 2},
        "fp16": {"enabled": True, "loss_scale": 128},
    },
]


def tree(
    dialect: str, seeds: list[Any], suffix: str, text: Callable[[Any], str], known: bool = True
) -> Make:
    """Mutants of plain data."""
    good = accepted(dialect, seeds, suffix, text)
    stack = compat.load(dialect)
    legal = {
        path: value
        for version in stack.versions
        for path, value in stack.defaults(version).items()
        if value is not None
    }
    pool = Pool(seeds, legal if known else None)

    def make(random: Random) -> str:
        if random.random() < ROUGH:
            return text(mutants.tree(random, random.choice(seeds)))
        return text(pool.tree(random, random.choice(good)))

    return make


def hjson() -> Make:
    """DeepSpeed's files as HJSON: bare keys, comments, no commas, each line changed at most once."""
    make = tree("deepspeed", DEEPSPEED, ".json", mutants.as_json)

    def loosened(random: Random) -> str:
        lines = [
            random.choice(
                (
                    line,
                    line.replace('"', "", 2) if '": ' in line else line,
                    line.rstrip(","),
                    line + " # why",
                    "// x\n" + line,
                )
            )
            for line in make(random).splitlines()
        ]
        text = "\n".join(lines)
        return mutants.text(random, text, 1) if random.random() < ROUGH else text

    return loosened


def flags() -> Make:
    """Megatron's flags, those of other releases among them."""
    good = launches()
    mixed = Flags(
        good, ("--" + name.replace("_", "-") for name in fields(compat.load("megatron").schema))
    )
    return lambda random: _flags(random, mixed.mutant(random, random.choice(good)))


def merak_flags() -> Make:
    """Merak's."""
    good = words((ROOT / "examples/merak/gpt2.args").read_text())
    return lambda random: _flags(random, Flags([good]).mutant(random, good))


def _flags(random: Random, found: list[str]) -> str:
    """Words as they are, or one replaced, dropped or doubled, or changed letter by letter."""
    if random.random() < ROUGH:
        place = random.randrange(len(found))
        new = random.choice(
            ([], [found[place]] * 2, [str(random.choice(mutants.ODD))], [found[place] + "=1"])
        )
        found[place : place + 1] = new or ["--bf16"]
        return mutants.text(random, " ".join(found)) if random.random() < 0.4 else " ".join(found)
    return "\n".join(found)


def recipes() -> Make:
    """NVIDIA's recipes."""
    return tree(
        "megatron", [recipe(found) for found in launches()], ".yaml", mutants.as_yaml, known=False
    )


SECTIONED = {
    "num_layers": 8,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "activation_func": "swiglu",
    "bf16": True,
    "fp16": False,
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
    "context_parallel_size": 1,
    "sequence_parallel": True,
}
TOP = {
    "micro_batch_size": 2,
    "global_batch_size": 32,
    "seq_length": 256,
    "max_position_embeddings": 256,
    "lr": 1e-3,
}


def sectioned() -> Make:
    """Files for `--yaml-cfg`: all fields of both classes of a release, most of them null."""
    seeds = []
    for version in ("0.12.0", "0.16.0", "0.19.2"):
        model, parallel = (
            {key: SECTIONED.get(key) for key in releases.fields(version, name)}
            for name in ("TransformerConfig", "ModelParallelConfig")
        )
        seeds.append({"language_model": model, "model_parallel": parallel, **TOP})
    return tree("megatron", seeds, ".yaml", mutants.as_yaml, known=False)


def yaml_text() -> Make:
    """Fast-LLM's YAML, changed letter by letter."""
    seeds = [path.read_text() for path in files("examples/fast_llm/*.yaml")]
    return lambda random: mutants.text(random, random.choice(seeds), 1)


def overrides() -> Make:
    """Fast-LLM's overrides, changed letter by letter or word by word."""
    seed = (ROOT / "examples/fast_llm/overrides.txt").read_text()
    mixed = Flags([words(seed)])

    def make(random: Random) -> str:
        return (
            mutants.text(random, seed, 1)
            if random.random() < 2 * ROUGH
            else " ".join(mixed.mutant(random, words(seed)))
        )

    return make


def shell() -> Make:
    """Scripts of generated statements around a launch, and those of other people changed letter by letter."""
    scripts, make = [path.read_text() for path in files("tests/shell/scripts/*.sh")], flags()

    def script(random: Random) -> str:
        if random.random() < 2 * ROUGH:
            return mutants.text(random, random.choice(scripts), 2)
        lines = write_script(random.choice)[0].splitlines()
        begun = random.sample(lines[:-1], random.randint(0, 4))
        said = make(random).split()
        cut = random.randrange(len(said) + 1)
        name = random.choice(("ARGS", "A", "P"))
        start = random.choice(
            (f"{name}='{' '.join(said[:cut])}'", f"{name}=({' '.join(said[:cut])})")
        )
        use = f"${{{name}[@]}}" if start.endswith(")") else f"${name}"
        run = random.choice(
            (
                "torchrun pretrain_gpt.py",
                "python -u ./pretrain_gpt.py",
                "exec torchrun --nproc-per-node 8 pretrain_gpt.py",
            )
        )
        text = "\n".join([*begun, start, f"{run} {use} \\\n  {' '.join(said[cut:])}", ""])
        return mutants.text(random, text, 1) if random.random() < ROUGH else text

    return script


@cache
def plans() -> Callable[[Random], Any]:
    """Mutants of plans, flat by dotted path, made for what a plan's fields hold."""
    seeds = [json.loads(path.read_text())["plan"] for path in files("examples/*/*.plan.json")]
    pool = Pool(seeds)
    return lambda random: (mutants.tree if random.random() < ROUGH else pool.tree)(
        random, random.choice(seeds)
    )


READERS: dict[str, Reader] = {
    "JSON": Reader(
        "deepspeed", ".json", lambda: tree("deepspeed", DEEPSPEED, ".json", mutants.as_json)
    ),
    "HJSON": Reader("deepspeed", ".hjson", hjson),
    "Fast-LLM YAML": Reader(
        *("fast_llm", ".yaml"),
        lambda: tree(
            "fast_llm",
            trees("examples/fast_llm/*.yaml", "tests/stacks/fast_llm/recipe.yaml"),
            ".yaml",
            mutants.as_yaml,
        ),
    ),
    "AutoModel YAML": Reader(
        *("automodel", ".yaml"),
        lambda: tree("automodel", trees("examples/automodel/*.yaml"), ".yaml", mutants.as_yaml),
    ),
    "Megatron recipe": Reader("megatron", ".yaml", recipes),
    "Megatron sections": Reader("megatron", ".yaml", sectioned),
    "Merak JSON": Reader(
        *("merak", ".json"),
        lambda: tree(
            "merak",
            trees("examples/merak/llama.json", "examples/merak/ulysses.json"),
            ".json",
            mutants.as_json,
        ),
    ),
    "YAML text": Reader("fast_llm", ".yaml", yaml_text),
    "flags": Reader("megatron", ".args", flags),
    "Merak flags": Reader("merak", ".args", merak_flags),
    "Fast-LLM overrides": Reader("fast_llm", ".txt", overrides),
    "shell": Reader("megatron", ".sh", shell),
}
