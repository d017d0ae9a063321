"""Conversions of small checkpoints: with configs that contradict them, and of sources that change while they are read."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import save_file

from bridge.checkpoint import formats, interface, renaming
from bridge.checkpoint.hub import Hub, Model
from bridge.cli import run
from bridge.stack import registry
from bridge.translation.translate import translate
from tests.fuzz.exercise import Tally

TRUE: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 12,
    "tie_word_embeddings": False,
}
"""The config of the model that is converted."""
OTHERS: dict[str, tuple[Any, ...]] = {
    "hidden_size": (8, 32, 64),
    "intermediate_size": (16, 48),
    "num_hidden_layers": (1, 3),
    "num_attention_heads": (1, 2, 8, 16),
    "num_key_value_heads": (1, 4, 8),
    "head_dim": (1, 2, 8, 16),
    "vocab_size": (13, 64),
    "tie_word_embeddings": (True,),
}
"""Values that are not true of it."""
SILENT: dict[str, tuple[Any, ...]] = {
    "rms_norm_eps": (1e-2, 1e-3),
    "rope_theta": (5.0, 1e6),
    "hidden_act": ("gelu", "relu"),
    "rope_scaling": ({"type": "linear", "factor": 2.0}, {"type": "dynamic", "factor": 4.0}),
}
"""Values that are not true of it, which no shape shows, and which only arguments of a run and a config hold."""
ARGUMENTS = {
    "hidden_size": 16,
    "ffn_hidden_size": 24,
    "num_layers": 2,
    "num_attention_heads": 4,
    "group_query_attention": True,
    "num_query_groups": 2,
    "kv_channels": 4,
    "vocab_size": 12,
    "untie_embeddings_and_output_weights": True,
}
"""The same model in Megatron's arguments."""
Weights = dict[str, torch.Tensor]


def weights(seed: int) -> Weights:
    """The weights of such a model."""
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (12, 16)}
    for layer in range(2):
        top = f"model.layers.{layer}."
        shapes |= {f"{top}self_attn.{part}_proj.weight": (16, 16) for part in "qo"}
        shapes |= {f"{top}self_attn.{part}_proj.weight": (8, 16) for part in "kv"}
        shapes |= {f"{top}mlp.{part}_proj.weight": (24, 16) for part in ("gate", "up")}
        shapes |= {f"{top}mlp.down_proj.weight": (16, 24)}
        shapes |= {f"{top}{part}_layernorm.weight": (16,) for part in ("input", "post_attention")}
    shapes |= {"model.norm.weight": (16,), "lm_head.weight": (12, 16)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def saved(folder: Path, held: Weights, config: dict[str, Any] | None = None) -> Path:
    """A folder of transformers with two files of weights, and its config if there is one."""
    folder.mkdir()
    names, where = sorted(held), dict[str, str]()
    for number in range(2):
        file = f"model-{number + 1:05d}-of-00002.safetensors"
        save_file({name: held[name] for name in names[number::2]}, folder / file)
        where |= dict.fromkeys(names[number::2], file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def all_arguments(**other: Any) -> dict[str, Any]:
    """All arguments of a run of Megatron-LM that trains the model, as it saves them."""
    config = translate(registry.load("huggingface").read(TRUE), registry.load("megatron")).config
    plain = bool | int | float | str | None
    values = {**config.effective, **other}
    return {name: value for name, value in values.items() if isinstance(value, plain)}


def converted(source: Path, to: str, output: Path, *more: str) -> tuple[int, str]:
    """What `checkpoint convert` ends with and says."""
    words = ["checkpoint", "convert", str(source), "--to", to, "-o", str(output), *more]
    out, wrong = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(wrong):
        code = run(words)
    return code, out.getvalue() + wrong.getvalue()


def read(folder: Path) -> Weights:
    """The weights of a checkpoint, under transformers' names."""
    hub = formats.read_checkpoint(folder)
    named = renaming.naming_that_fits(hub, "huggingface", None, Model(kv_heads=2))
    return {name: held.weight.whole() for name, held in named.parameters.items()}


def same(one: Weights, other: Weights) -> bool:
    """Whether two models are equal bit by bit."""
    return set(one) == set(other) and all(torch.equal(one[name], other[name]) for name in one)


def sources(top: Path, held: Weights) -> dict[str, Path]:
    """Checkpoints of one model, by what they say of it."""
    own = saved(top / "own", held, TRUE)
    for to in ("megatron", "native"):
        code, said = converted(own, to, top / to)
        assert (top / to).is_dir(), (code, said)
    hub: Hub = formats.read_checkpoint(top / "megatron")
    args = {"megatron": {"args": {**all_arguments(), **ARGUMENTS}}}
    files = formats.plan_files(
        formats.format_of_name("megatron"),
        replace(hub, model=None, client=args),
        interface.Wanted(),
    )
    from bridge.checkpoint.writing import write_checkpoint

    write_checkpoint(files, top / "arguments", (), lambda count, fresh: None)
    return {
        "own": own,
        "bare": saved(top / "bare", held),
        **{name: top / name for name in ("megatron", "native", "arguments")},
    }


def contradictions(scratch: Path) -> Callable[[Random, Tally], None]:
    """A config that contradicts a checkpoint is refused, or what is written is the model all the same."""
    held = weights(1)
    found, output = sources(scratch, held), scratch / "out"
    given = scratch / "given.json"

    def one(random: Random, tally: Tally) -> None:
        start, name = time.process_time(), random.choice([*found, "folder"])
        others = OTHERS | SILENT if name in ("own", "arguments") else OTHERS
        keys = random.sample(sorted(others), random.choice((0, 1, 1, 1, 2, 3)))
        config = {**TRUE, **{key: random.choice(others[key]) for key in keys}}
        to = (
            "safetensors"
            if name in ("megatron", "arguments")
            else random.choice(("bin", "megatron"))
        )
        source, more = found.get(name, found["own"]), ["--config", str(given)]
        given.write_text(json.dumps(config))
        if name == "folder":
            more = []
            (source / "config.json").write_text(json.dumps(config))
        code, said = converted(source, to, output, *more)
        (found["own"] / "config.json").write_text(json.dumps(TRUE))
        wrote = output.exists()
        # Of heads, shapes show how many rows they have together, and a bare folder has no other record.
        true = not keys or (name in ("bare", "folder") and _rows(config) == _rows(TRUE))
        if wrote:
            assert true, f"{name} to {to}: written with {keys}: {said}"
            assert config != TRUE or same(read(output), held), f"{name} to {to}: {said}"
            tally["accepted"] += 1
            shutil.rmtree(output)
        else:
            assert not true and code == 1 and "found" in said, f"{name} to {to}, {keys}: {said}"
            tally["refused: contradiction"] += 1
        tally.took(start)

    return one


def _rows(config: dict[str, Any]) -> dict[str, Any]:
    heads = ("num_attention_heads", "num_key_value_heads", "head_dim")
    rest = {key: value for key, value in config.items() if key not in heads}
    return {**rest, **{key: config[key] * config["head_dim"] for key in heads[:2]}}


WAYS = ("in place", "in place, its time put back", "replaced", "cut short")


def changing(scratch: Path) -> Callable[[Random, Tally], None]:
    """A source of which a file changes at any moment is refused, or what is written is what lies there then."""
    first, second = (scratch / name for name in ("first", "second"))
    for folder, seed in ((first, 1), (second, 2)):
        folder.mkdir()
        sources(folder, weights(seed))
    source, output = scratch / "source", scratch / "out"

    def one(random: Random, tally: Tally) -> None:
        start, kind = time.process_time(), random.choice(("own", "megatron", "native"))
        shutil.copytree(first / kind, source)
        time.sleep(0.01)  # a file system counts time in steps
        files = [
            path for path in sorted(source.rglob("*")) if path.suffix in (".safetensors", ".distcp")
        ]
        path, way = random.choice(files), random.choice(WAYS)
        other = (second / kind / path.relative_to(source)).read_bytes()
        change = Change(random.randrange(1, 90), lambda: _changed(path, other, way))
        with change.watching():
            code, said = converted(
                source, random.choice(("bin", "safetensors", "dcp")), output, "--no-verify"
            )
        if output.exists():
            assert same(read(output), read(source)), f"{kind} {path.name} {way}: {said}"
            tally["accepted"] += 1
            shutil.rmtree(output)
        else:
            assert code == 1 and change.done, f"{kind} {path.name} {way}: {said}"
            tally["refused: changed"] += 1
        shutil.rmtree(source)
        tally.took(start)

    return one


def _changed(path: Path, content: bytes, way: str) -> None:
    about = path.stat()
    if way == "replaced":
        path.with_name("x").write_bytes(content)
        path.with_name("x").rename(path)
    elif way == "cut short":
        os.truncate(path, about.st_size // 2)
    else:
        with os.fdopen(os.open(path, os.O_WRONLY), "wb") as file:
            file.write(content)
    if way.endswith("put back"):
        os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))


class Change:
    """A change that happens when so many files were opened and tensors read."""

    def __init__(self, left: int, act: Callable[[], None]) -> None:
        self.left, self.act, self.done = left, act, False

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Count what is opened and read in a `with` statement."""
        preadv, opened = os.preadv, Path.open

        def event() -> None:
            self.left -= 1
            if self.left == 0 and not self.done:
                self.done = True
                self.act()

        def reading(*values: Any) -> int:
            event()
            return preadv(*values)

        def opening(path: Path, *values: Any, **named: Any) -> Any:
            if not self.done and "partial" not in str(path):
                event()
            return opened(path, *values, **named)

        os.preadv, Path.open = reading, opening  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            os.preadv, Path.open = preadv, opened  # type: ignore[method-assign]
