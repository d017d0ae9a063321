"""Facts of a checkpoint against configs, checksums and changes; and files that take too long or lead astray."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import pickle
import re
import shutil
import socket
import subprocess
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel, MixtralConfig, MixtralForCausalLM

from bridge import limits
from bridge.checkpoint import archive, formats, writing
from bridge.checkpoint.digests import read_digests
from bridge.checkpoint.interface import Wanted
from bridge.cli import run as command
from bridge.errors import SourceError
from tests.checkpoint.test_archives import packed
from tests.fuzz.converted import TRUE, all_arguments, converted, saved, weights


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A small Llama as transformers saves it."""
    return saved(tmp_path / "model", weights(1), TRUE)


def asked(*words: str) -> tuple[int, str]:
    """What a command ends with and says."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = command(["checkpoint", *words])
    return code, out.getvalue()


def given(tmp_path: Path, **other: Any) -> str:
    path = tmp_path / "given.json"
    path.write_text(json.dumps({**TRUE, **other}))
    return str(path)


# Truth


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"num_key_value_heads": 1}, ("found 1", "its own record of the model: 2")),
        ({"num_key_value_heads": 4}, ("found 16", "the weights have 8")),
        ({"hidden_size": 32, "head_dim": 4}, ("found 32", "the weights have 16")),
        ({"num_attention_heads": 8, "head_dim": 2}, ("found 8", "record of the model: 4")),
        ({"num_hidden_layers": 3}, ("found 3", "the weights have 2")),
        ({"intermediate_size": 48}, ("found 48", "the weights have 24")),
        ({"tie_word_embeddings": True}, ("found True", "different tensors")),
    ],
)
def test_a_config_that_contradicts_the_checkpoint_is_refused(
    model: Path, tmp_path: Path, other: dict[str, Any], said: tuple[str, str]
) -> None:
    assert converted(model, "megatron", tmp_path / "there")[0] == 2
    code, out = converted(
        tmp_path / "there", "safetensors", tmp_path / "out", "--config", given(tmp_path, **other)
    )
    assert code == 1 and all(words in out for words in (*said, "given.json")), out
    assert not (tmp_path / "out").exists()
    assert (
        converted(tmp_path / "there", "safetensors", tmp_path / "out", "--config", given(tmp_path))[
            0
        ]
        == 0
    )


def test_a_config_in_the_folder_is_held_against_the_weights(model: Path, tmp_path: Path) -> None:
    (model / "config.json").write_text(json.dumps({**TRUE, "intermediate_size": 48}))
    code, out = converted(model, "bin", tmp_path / "out")
    assert code == 1 and "found 48" in out and "mlp." in out, out


@pytest.mark.parametrize("to", ["safetensors", "bin", "megatron"])
@pytest.mark.parametrize("tied", [False, True])
def test_every_name_of_a_tied_weight_is_kept_or_named(tmp_path: Path, to: str, tied: bool) -> None:
    held = weights(1)
    held["lm_head.weight"] = held["model.embed_tokens.weight"]
    (tmp_path / "tied").mkdir()
    torch.save(OrderedDict(held), tmp_path / "tied" / "pytorch_model.bin")
    config = {**TRUE, "tie_word_embeddings": tied}
    (tmp_path / "tied" / "config.json").write_text(json.dumps(config))
    _, out = converted(tmp_path / "tied", to, tmp_path / "out")
    hub = formats.read_checkpoint(tmp_path / "out")
    names = {*hub.parameters, *hub.ties}
    if to == "megatron":
        assert ("output_layer.weight" in names) is not tied
    else:
        assert set(held) - names == (
            {"lm_head.weight"} if (to, tied) == ("safetensors", True) else set()
        )
        assert ("lm_head.weight is written under" in out) is ((to, tied) == ("safetensors", True))


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod."])
def test_what_wraps_a_model_is_taken_off_its_names(tmp_path: Path, prefix: str) -> None:
    held = weights(1)
    source = saved(tmp_path / "model", {f"{prefix}{name}": held[name] for name in held}, TRUE)
    code, out = converted(source, "safetensors", tmp_path / "out")
    assert code == 0 and "lose what wrapped the model" in out
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(found[name], value) for name, value in held.items())


@pytest.mark.parametrize("to", ["dcp", "native", "universal", "accelerate"])
@pytest.mark.parametrize("prefix", ["_orig_mod.", "module."])
def test_formats_with_own_names_have_none_of_what_wraps_a_model(
    tmp_path: Path, prefix: str, to: str
) -> None:
    source = saved(tmp_path / "model", prefixed(prefix), TRUE)
    _, out = converted(source, to, tmp_path / "out")
    assert "lose what wrapped the model" in out, out
    assert formats.read_checkpoint(tmp_path / "out").parameters.keys() == weights(1).keys()


def test_names_without_a_map_come_back_from_torch_dist(tmp_path: Path) -> None:
    held = {"model.decoder.layers.0.a": torch.ones(3), "model.x": torch.ones(4)}
    source = saved(tmp_path / "model", held)
    converted(source, "megatron", tmp_path / "there")
    assert set(formats.read_checkpoint(tmp_path / "there").parameters) == set(held)


def test_a_model_without_tensors_is_refused(tmp_path: Path) -> None:
    for name, rows in (("index", {}), ("empty", None)):
        (tmp_path / name).mkdir()
        save_file({}, tmp_path / name / "model.safetensors")
        if rows is not None:
            text = json.dumps({"weight_map": rows})
            (tmp_path / name / "model.safetensors.index.json").write_text(text)
        code, out = converted(tmp_path / name, "bin", tmp_path / "out")
        assert code == 1 and ("weight_map" if name == "index" else "found no tensor") in out


def test_a_folder_of_trainer_has_its_step_and_names_what_is_not_read(model: Path) -> None:
    (model / "trainer_state.json").write_text(json.dumps({"global_step": 500, "epoch": 1.0}))
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        (model / name).write_bytes(b"x")
    code, out = asked("inspect", str(model))
    assert code == 1 and "optimizer.pt: expected a file that torch.save" in out
    code, out = asked("inspect", str(model), "--from", "safetensors")
    assert code == 2 and "run: steps 500" in out
    assert "moments: optimizer.pt, rng_state.pth, scheduler.pt hold" in out
    (model / "trainer_state.json").write_text(json.dumps({"global_step": "x"}))
    code, out = asked("inspect", str(model), "--from", "safetensors")
    assert code == 1 and "global_step" in out


# Checksums


def test_the_line_says_what_was_checked_by_what(model: Path) -> None:
    files = sorted(path.name for path in model.glob("*.safetensors"))
    lines = [
        f"{hashlib.sha256((model / name).read_bytes()).hexdigest()} *./{name}" for name in files
    ]
    sums = model / "SHA256SUMS"
    sums.write_text("\n".join(reversed(lines)) + "\n")
    code, out = asked("inspect", str(model), "--check")
    assert code == 0 and f"checked by SHA256SUMS: {', '.join(files)}" in out, out
    sums.write_text(lines[0] + "\n")
    _, out = asked("inspect", str(model), "--check")
    assert f"checked by SHA256SUMS: {files[0]}\n" in out
    assert f"which does not show all: {files[1]}\n" in out and "has no line for" in out
    for text in ("", None):
        sums.unlink() if text is None else sums.write_text(text)
        assert "checked by SHA256SUMS" not in asked("inspect", str(model), "--check")[1]
    sums.write_text(f"{lines[0]}\n{'0' * 64} *./{files[0]}\n")
    assert "second digest" in asked("inspect", str(model), "--check")[1]


@pytest.mark.parametrize(
    "form", ["--tag", "upper case", "CRLF", "comment", "escaped", "no last line end"]
)
def test_every_form_of_sha256sum_is_read(model: Path, form: str) -> None:
    names = sorted(path.name for path in model.glob("*.safetensors"))
    if form == "escaped":
        (model / "a\\b\n.txt").write_text("x")
        names.append("a\\b\n.txt")
    options = ["--tag"] if form == "--tag" else []
    words = ["sha256sum", *options, "--", *names]
    text = subprocess.run(words, cwd=model, capture_output=True, text=True, check=True).stdout
    if form == "upper case":
        text = "".join(f"{line[:64].upper()}{line[64:]}\n" for line in text.splitlines())
    forms = {"CRLF": text.replace("\n", "\r\n"), "comment": f"# made today\n\n{text}"}
    text = {**forms, "no last line end": text.removesuffix("\n")}.get(form, text)
    (model / "SHA256SUMS").write_bytes(text.encode())
    assert len(read_digests(model, model)) == len(names)
    code, out = asked("inspect", str(model), "--check")
    assert code == 0 and f"checked by SHA256SUMS: {', '.join(names[:2])}" in out, out
    (model / "SHA256SUMS").write_bytes(text.replace("model-", "../model-", 1).encode())
    assert "lead out of the folder" in asked("inspect", str(model), "--check")[1]


# What leads astray


def plug(path: Path) -> None:
    """Bind a socket, by a name that is short enough for one."""
    with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as bound:
        bound.bind(path.name)


SPECIAL: dict[str, Callable[[Path], Any]] = {
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "folder": Path.mkdir,
    "socket": plug,
}
BESIDE = (
    *("config.json", "tokenizer.json", "generation_config.json", "trainer_state.json"),
    *("model.safetensors.index.json", "model-00001-of-00002.safetensors", "SHA256SUMS"),
    *("optimizer.pt", "scheduler.pt", "rng_state_0.pth"),
)


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("name", [*BESIDE, "../config.json", "--config"])
def test_what_is_no_file_next_to_a_model_is_refused(
    model: Path, tmp_path: Path, name: str, kind: str
) -> None:
    path, more = model / name, ()
    if name == "--config":
        path = tmp_path / "given.json"
        more = name, str(path)
    if name == "../config.json":
        (model / "config.json").unlink()
    path.unlink(missing_ok=True)
    SPECIAL[kind](path)
    words = ["convert", str(model), "--to", "bin", "-o", str(tmp_path / "out"), *more]
    for asking in (words, ["inspect", str(model)])[: 1 if more else 2]:
        code, out = asked(*asking)
        named = (
            f"{path.resolve().parent / path.name if kind != 'device' else path}: found no regular"
        )
        assert code == 1 and path.name in out and named.rpartition("/")[2] in out, out
    assert not (tmp_path / "out").exists()


def pickled(folder: Path, content: bytes) -> Path:
    folder.mkdir()
    return packed(folder / "pytorch_model.bin", content).parent


BOMBS: dict[str, bytes] = {
    "shared tuples as a key": b"\x80\x02}()q\x00"
    + b"".join(b"h" + bytes([at]) + b"\x86q" + bytes([at + 1]) for at in range(60))
    + b"Nu.",
    "nested tuples as a key": b"\x80\x02}()" + b"\x85" * 200_000 + b"Nu.",
    "shared lists": b"\x80\x02]q\x00"
    + b"".join(b"0](h%ch%ceq%c" % (at, at, at + 1) for at in range(60))
    + b".",
    "a list in itself": b"\x80\x02]q\x00h\x00a.",
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_pickle_that_unfolds_is_refused(tmp_path: Path, name: str) -> None:
    code, out = asked("inspect", str(pickled(tmp_path / "model", BOMBS[name])))
    assert code == 1 and "pytorch_model.bin" in out and "the file is damaged" in out, out


def test_containers_that_stand_twice_are_read(tmp_path: Path) -> None:
    shared = [1, {"a": (2, 3)}]
    data = pickle.dumps({"x": [shared] * 5, (1, ("b", frozenset({2}))): shared}, 2)
    found = archive.read_archive(packed(tmp_path / "a.pt", data), tmp_path)
    assert found == {"x": [shared] * 5, (1, ("b", frozenset({2}))): shared}


def test_a_number_in_a_name_is_no_count(tmp_path: Path) -> None:
    for number in ("00", "99999999999"):
        (tmp_path / f"mp_rank_{number}_model_states.pt").write_bytes(b"x")
    code, out = asked("inspect", str(tmp_path))
    assert code == 1 and "model states of model rank 1" in out


def test_a_repeated_storage_is_no_memory(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    held = OrderedDict(a=torch.ones(1).expand(2**40, 4), b=torch.ones(1).expand(3, 2))
    torch.save(held, tmp_path / "model" / "pytorch_model.bin")
    code, out = converted(tmp_path / "model", "safetensors", tmp_path / "out")
    assert code == 1 and "repeat a storage" in out


def test_time_grows_with_the_files(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def turning(*_: Any) -> Any:
        while True:
            sum(range(1000))

    monkeypatch.setattr(limits, "SECONDS", 0.2)
    monkeypatch.setattr(formats, "find_checkpoint", turning)
    code, out = asked("inspect", str(model))
    assert code == 1 and "0.2 s of processor time; no checkpoint of these files" in out


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError(), "GiB of memory; no checkpoint of these files"),
        (PermissionError(13, "Permission denied", "x"), "expected a file that can be read"),
    ],
)
def test_what_the_machine_lacks_is_no_damage(
    model: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, said: str
) -> None:
    opened = Path.open

    def refused(path: Path, *values: Any, **named: Any) -> Any:
        if path.suffix == ".safetensors":
            raise error
        return opened(path, *values, **named)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", refused)
        code, out = asked("inspect", str(model))
    assert code == 1 and said in out and "damaged" not in out, out


SECRETS = {
    "password": "hunter2x",
    "wandb_api_key": "0123456789abcdef0123456789abcdef01234567",
    "url": "https://user:pa55word@host/x",
    "azure": "AccountName=a;AccountKey=Zm9vYmFyYmF6cXV4Zm9vYmFyYmF6cXV4==;End=x",
    "nested": {"secret": "s3cr3tvalue", "deep": [{"passwd": "qwerty99"}]},
    "words": ["--password", "hunter3x"],
    "pin": {"password": 12345678},
}
HIDDEN = (
    *(
        "hunter2x",
        "0123456789abcdef",
        "pa55word",
        "Zm9vYmFy",
        "s3cr3tvalue",
        "qwerty99",
        "hunter3x",
    ),
    "12345678",
)


@pytest.mark.parametrize("words", [(), ("--json",)])
def test_no_secret_of_a_script_is_shown(tmp_path: Path, words: tuple[str, ...]) -> None:
    (tmp_path / "step").mkdir()
    held = {"module": {"a": torch.ones(2)}, "global_steps": 3, **SECRETS}
    torch.save(held, tmp_path / "step" / "mp_rank_00_model_states.pt")
    code, out = asked("inspect", str(tmp_path / "step"), *words)
    assert code in (0, 2) and "nested" in out and "user:" in out
    assert not [secret for secret in HIDDEN if secret in out], out


# Writing


def test_a_private_file_stays_private(model: Path, tmp_path: Path) -> None:
    (model / "model-00001-of-00002.safetensors").chmod(0o600)
    assert converted(model, "bin", tmp_path / "out")[0] == 0
    assert {path.stat().st_mode & 0o077 for path in (tmp_path / "out").iterdir()} == {0}


def test_a_folder_that_is_not_ours_is_left_alone(model: Path, tmp_path: Path) -> None:
    other = tmp_path / ".out.partial"
    for name in ("notes.txt", ".mark"):
        other.mkdir()
        (other / name).write_text("mine")
        code, out = converted(model, "bin", tmp_path / "out")
        assert code == 1 and "move this folder away" in out, out
        assert (other / name).read_text() == "mine"
        shutil.rmtree(other)
    for place in (model, tmp_path / "nowhere"):
        other.symlink_to(place)
        code, out = converted(model, "bin", tmp_path / "out")
        assert code == 1 and "is a link, and nothing was written" in out and "room" not in out, out
        other.unlink()


def test_the_second_of_two_writers_is_told_of_the_first(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock: Callable[[int], bool] = writing._try_lock

    def finished(descriptor: int) -> bool:
        (tmp_path / ".out.partial").rename(tmp_path / "out")
        return lock(descriptor)

    monkeypatch.setattr(writing, "_try_lock", finished)
    code, out = converted(model, "bin", tmp_path / "out")
    assert code == 1 and "another command finished" in out and "room" not in out, out


def test_a_name_that_is_too_long_is_refused(model: Path, tmp_path: Path) -> None:
    for size in (250, 256):
        code, out = converted(model, "bin", tmp_path / ("a" * size))
        assert code == 1 and "File name too long" in out and "room" not in out, out


@pytest.mark.parametrize("time_back", [False, True])
def test_a_source_that_changes_while_it_is_read_is_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, time_back: bool
) -> None:
    path, read = model / "model-00002-of-00002.safetensors", os.preadv
    other = saved(tmp_path / "other", weights(2), TRUE) / path.name

    def changing(*values: Any) -> int:
        about, content = path.stat(), other.read_bytes()
        if path.read_bytes() != content:
            path.write_bytes(content)
        if time_back:
            os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
        return read(*values)

    monkeypatch.setattr(os, "preadv", changing)
    code, out = converted(model, "bin", tmp_path / "out", "--no-verify")
    assert code == 1 and f"{path}: this file changed while it was read" in out, out
    assert not (tmp_path / "out").exists() and not (tmp_path / ".out.partial").exists()
    with pytest.raises(SourceError, match="changed while"):
        writing.refuse_changes({path: (0, 0, 0, 0)})


# Names


def binary(folder: Path, held: dict[str, torch.Tensor], config: Any = None) -> Path:
    """A folder with weights as torch.save writes them, and a config if there is one."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    torch.save(held, folder / "pytorch_model.bin")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    "name",
    ["a/../../../../victim", "/victim", "../x", ".", "..", "a//b", "a/./b", "", "con\0", "x" * 300],
)
def test_no_name_of_a_tensor_leads_out_of_the_folder(tmp_path: Path, name: str) -> None:
    place = tmp_path / "place"
    place.mkdir()
    source = binary(place / "source", {name: torch.ones(2), "ok": torch.ones(1)})
    before = sorted(tmp_path.rglob("*"))
    code, out = converted(source, "universal", place / "out")
    assert code == 1 and "rename the tensor" in out and "Traceback" not in out, out
    assert sorted(tmp_path.rglob("*")) == before
    # Formats that make no paths of names keep every one as it is.
    assert converted(source, "bin", place / "out")[0] in (0, 2)
    assert name in torch.load(place / "out" / "pytorch_model.bin")


def test_no_tensor_has_the_name_of_metadata(tmp_path: Path) -> None:
    source = binary(tmp_path / "source", {"__metadata__": torch.ones(2), "ok": torch.ones(1)})
    code, out = converted(source, "safetensors", tmp_path / "out")
    assert code == 1 and "rename it" in out and not (tmp_path / "out").exists(), out


@pytest.mark.parametrize("tool", ["transformers", "Trainer"])
def test_a_single_file_is_preferred_to_an_index_as_in_transformers(
    model: Path, tmp_path: Path, tool: str
) -> None:
    other = weights(2)
    save_file(other, model / "model.safetensors")
    if tool == "Trainer":
        (model / "trainer_state.json").write_text('{"global_step": 3}')
        optimizer = torch.optim.AdamW([torch.nn.Parameter(held.clone()) for held in other.values()])
        for group in optimizer.param_groups:
            for held in group["params"]:
                held.grad = torch.ones_like(held)
        optimizer.step()
        torch.save(optimizer.state_dict(), model / "optimizer.pt")
    code, out = converted(model, "bin", tmp_path / "out")
    assert code in (0, 2) and "model.safetensors.index.json and its files are not read" in out, out
    found = torch.load(tmp_path / "out" / "pytorch_model.bin")
    assert all(torch.equal(found[name], value) for name, value in other.items())


# What only some models have


LAYER = "model.layers.{}.{}"
PARTS = {
    "queries": [
        (f"self_attn.{part}_proj.bias", size) for part, size in zip("qkv", (16, 8, 8), strict=True)
    ],
    "output": [("self_attn.o_proj.bias", 16)],
    "mlp": [("mlp.gate_proj.bias", 24), ("mlp.up_proj.bias", 24), ("mlp.down_proj.bias", 16)],
    "norms": [("self_attn.q_norm.weight", 4), ("self_attn.k_norm.weight", 4)],
}
"""Parameters that some models have in every layer."""


def with_parts(*parts: str) -> dict[str, torch.Tensor]:
    return weights(1) | {
        LAYER.format(layer, name): torch.randn(size)
        for layer in range(2)
        for part in parts
        for name, size in PARTS[part]
    }


BOTH = ("queries", "output")


@pytest.mark.parametrize("to", ["bin", "megatron", "dcp"])
@pytest.mark.parametrize(
    ("parts", "other", "word"),
    [
        ((), {}, ""),
        ((), {"attention_bias": True}, "queries, keys and values have biases: found True"),
        ((), {"mlp_bias": True}, "feed-forward layer has biases: found True"),
        ((), {"model_type": "qwen2"}, "queries, keys and values have biases: found True"),
        ((), {"model_type": "qwen3"}, "queries and keys have norms: found True"),
        (BOTH, {}, "queries, keys and values have biases: found False"),
        (BOTH, {"attention_bias": True}, ""),
        (("queries",), {"model_type": "qwen2"}, ""),
        (("norms",), {"model_type": "qwen3"}, ""),
        (("norms",), {}, "queries and keys have norms: found False"),
        ((*BOTH, "mlp"), {"attention_bias": True, "mlp_bias": True}, ""),
        (("mlp",), {}, "feed-forward layer has biases: found False"),
        ((), {"vocab_size": 11}, ""),
        ((), {"vocab_size": 13}, "words of the vocabulary: found 13"),
    ],
)
def test_a_config_that_contradicts_the_parts_of_a_model_is_refused(
    tmp_path: Path, to: str, parts: tuple[str, ...], other: dict[str, Any], word: str
) -> None:
    source = saved(tmp_path / "model", with_parts(*parts), {**TRUE, **other})
    code, out = converted(source, to, tmp_path / "out")
    assert (code in (0, 2)) is (not word) and word in out and ("config.json" in out or not word), (
        out
    )


def test_rows_that_are_no_padding_are_refused(tmp_path: Path) -> None:
    held = weights(1)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        held[name] = torch.randn(13, 16)
    source = saved(tmp_path / "model", held, TRUE)
    code, out = converted(source, "bin", tmp_path / "out")
    assert code == 1 and "words of the vocabulary: found 12, but the weights have 13" in out, out


# Whole models


def prefixed(prefix: str, seed: int = 1) -> dict[str, torch.Tensor]:
    return {f"{prefix}{name}": held for name, held in weights(seed).items()}


def adapted() -> dict[str, torch.Tensor]:
    """A model of PEFT with an adapter that is not merged."""
    top, part = "base_model.model.", "self_attn.q_proj"
    names = {
        f"{top}{name.replace(part, f'{part}.base_layer')}": t for name, t in weights(1).items()
    }
    return names | {
        f"{top}model.layers.0.{part}.lora_{side}.default.weight": torch.ones(4, 16) for side in "AB"
    }


def without(word: str) -> dict[str, torch.Tensor]:
    return {name: held for name, held in weights(1).items() if word not in name}


RAGGED = "model.layers.1.mlp.up_proj.weight"
IN_PART: dict[str, tuple[Callable[[], dict[str, torch.Tensor]], str]] = {
    "two models": (lambda: prefixed("student.") | prefixed("teacher.", 2), "--root: 'student' or"),
    "model and loss": (lambda: prefixed("model.") | {"loss.w": torch.ones(3)}, "--root: 'model'"),
    "adapters": (adapted, "merge the adapters"),
    "half-wrapped": (
        lambda: {f"{'module.' * ('layers.1' in name)}{name}": t for name, t in weights(1).items()},
        "name the whole model",
    ),
    "one key": (lambda: without("layers.1.self_attn.k_proj"), "layers.1.self_attn.k_proj"),
    "norm": (lambda: without("model.norm"), "head.norm"),
    "layer": (lambda: without("layers.0."), "layers.0."),
    "all keys": (lambda: without("k_proj"), "attention.key"),
    "ragged": (lambda: weights(1) | {RAGGED: torch.ones(10, 16)}, "found shape (10, 16)"),
    "strange": (lambda: {"a.b": torch.ones(2), "c": torch.ones(1)}, "name the whole model"),
}


@pytest.mark.parametrize("to", ["bin", "safetensors", "megatron", "trainer"])
@pytest.mark.parametrize("name", IN_PART)
def test_a_part_of_a_model_is_refused_by_targets_that_are_loaded_by_names(
    tmp_path: Path, name: str, to: str
) -> None:
    held, word = IN_PART[name]
    source = binary(tmp_path / "model", held(), TRUE)
    code, out = converted(source, to, tmp_path / "out")
    assert code == 1 and word in out, out
    # Other formats keep what is there, and so do targets without a config.
    if name not in ("layer", "ragged"):
        assert converted(source, "dcp", tmp_path / "out")[0] in (0, 2)
    (source / "config.json").unlink()
    if to != "megatron":
        assert converted(source, to, tmp_path / "own")[0] in (0, 2)


@pytest.mark.parametrize(
    "more",
    [
        {"score.weight": torch.ones(2, 16)},
        {f"ema.{name}": held for name, held in weights(2).items()},
        {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)},
    ],
)
@pytest.mark.parametrize("without_output", [False, True])
def test_a_whole_model_with_more_is_no_part(
    tmp_path: Path, more: dict[str, torch.Tensor], without_output: bool
) -> None:
    held = weights(1) | more
    if without_output:  # as AutoModel saves a model
        held = {name.removeprefix("model."): held[name] for name in held if "lm_head" not in name}
    source = binary(tmp_path / "model", held, TRUE)
    code, out = converted(source, "safetensors", tmp_path / "out")
    assert code == 0, out
    assert set(load_file(tmp_path / "out" / "model.safetensors")) == set(held)


def test_a_whole_mixtral_or_gpt2_with_a_further_head_is_no_part(tmp_path: Path) -> None:
    """Their names hold numbers that count nothing, such as `w1` and `ln_2`."""
    models = {
        "gpt2": GPT2LMHeadModel(GPT2Config(vocab_size=12, n_embd=16, n_layer=2, n_head=4)),
        "mixtral": MixtralForCausalLM(
            MixtralConfig(
                **{k: v for k, v in TRUE.items() if k != "model_type"}, num_local_experts=2
            )
        ),
    }
    for name, own in models.items():
        own.save_pretrained(str(tmp_path / name))
        held = load_file(tmp_path / name / "model.safetensors") | {"v.weight": torch.ones(1, 16)}
        save_file(held, tmp_path / name / "model.safetensors")
        code, out = converted(tmp_path / name, "bin", tmp_path / f"{name}-out")
        assert code == 0, out


@pytest.mark.parametrize("root", ["student", "teacher"])
def test_one_of_several_models_is_chosen_with_root(tmp_path: Path, root: str) -> None:
    source = binary(tmp_path / "model", prefixed("student.") | prefixed("teacher.", 2), TRUE)
    file = str(source / "pytorch_model.bin")
    code, out = converted(Path(file), "safetensors", tmp_path / "out", "--root", root)
    assert code in (0, 2), out
    found = load_file(tmp_path / "out" / "model.safetensors")
    truth = weights(1 if root == "student" else 2)
    assert found.keys() == truth.keys()
    assert all(torch.equal(found[name], value) for name, value in truth.items())


# Two configs


@pytest.mark.parametrize(
    ("own", "other", "word"),
    [
        ({}, {}, ""),
        ({"rms_norm_eps": 1e-6}, {"rms_norm_eps": 1e-2}, "rms_norm_eps: found 0.01"),
        ({}, {"rms_norm_eps": 1e-2}, "norm.eps: found 0.01"),
        ({"rope_theta": 1e4}, {"rope_theta": 5.0}, "rope_theta: found 5.0"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
            {"rope_theta": 5.0},
            "rope_theta: found 5.0",
        ),
        ({"hidden_act": "silu"}, {"hidden_act": "gelu"}, "hidden_act: found 'gelu'"),
        ({}, {"architectures": ["MistralForCausalLM"]}, "architectures"),
        ({"strange": 1}, {"strange": 2}, "strange: found 2"),
        (
            {"dtype": "float32", "use_cache": True},
            {"torch_dtype": "float16", "use_cache": False},
            "",
        ),
        ({"head_dim": None}, {}, ""),
    ],
)
@pytest.mark.parametrize("to", ["bin", "megatron"])
def test_a_config_given_that_contradicts_the_one_in_the_folder_is_refused(
    model: Path, tmp_path: Path, own: dict[str, Any], other: dict[str, Any], word: str, to: str
) -> None:
    (model / "config.json").write_text(json.dumps({**TRUE, **own}))
    code, out = converted(model, to, tmp_path / "out", "--config", given(tmp_path, **other))
    assert (code in (0, 2)) is (not word), out
    assert word in out and (
        not word or {"given.json", "config.json"} <= set(re.split(r"[/:\s]", out))
    )


# The arguments of a run


def with_arguments(folder: Path, held: dict[str, torch.Tensor], **other: Any) -> Path:
    """A checkpoint of Megatron-Core, with the arguments of its run."""
    rows = {"vocab_size": len(held["lm_head.weight"])}
    plain = saved(folder / "plain", held, {**TRUE, **rows})
    assert converted(plain, "megatron", folder / "bare")[0] == 2
    hub = formats.read_checkpoint(folder / "bare")
    args = {"megatron": {"args": all_arguments(**other)}}
    megatron = formats.format_of_name("megatron")
    files = formats.plan_files(megatron, replace(hub, model=None, client=args), Wanted())
    writing.write_checkpoint(files, folder / "run", (), lambda count, fresh: None)
    return folder / "run"


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({}, ""),
        ({"rms_norm_eps": 1e-2}, "norm.eps: found 0.01, but the arguments of the run"),
        ({"rope_theta": 5.0}, "rotary.base: found 5.0, but the arguments of the run"),
        ({"hidden_act": "gelu"}, "mlp.activation: found gelu, but the arguments of the run"),
        ({"rope_parameters": LLAMA3}, "rotary.scaling.kind: found llama3, but the arguments"),
        (
            {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 2},
            "attention heads: found 8",
        ),
    ],
)
def test_the_arguments_of_a_run_are_held_against_a_config(
    tmp_path: Path, other: dict[str, Any], words: str, beside: bool
) -> None:
    source = with_arguments(tmp_path, weights(1))
    config = Path(given(tmp_path, **other))
    if beside:
        config = config.rename(next(source.glob("iter_*")) / "config.json")
    more = () if beside else ("--config", str(config))
    code, out = converted(source, "huggingface", tmp_path / "out", *more)
    assert (code == 1) is bool(words) and words in out and (str(config) in out or not words), out
    assert (tmp_path / "out").exists() is not bool(words)


def test_what_arguments_do_not_name_contradicts_nothing(tmp_path: Path) -> None:
    assert (
        converted(saved(tmp_path / "own", weights(1), TRUE), "megatron", tmp_path / "bare")[0] == 2
    )
    hub = formats.read_checkpoint(tmp_path / "bare")
    sizes = {"num_layers": 2, "num_attention_heads": 4, "hidden_size": 16, "kv_channels": 4}
    few = {"megatron": {"args": {**sizes, "group_query_attention": True, "num_query_groups": 2}}}
    megatron = formats.format_of_name("megatron")
    files = formats.plan_files(megatron, replace(hub, client=few), Wanted())
    source = tmp_path / "run"
    writing.write_checkpoint(files, source, (), lambda count, fresh: None)
    code, out = converted(source, "huggingface", tmp_path / "bare out")
    assert (
        code in (0, 2)
        and "no config.json" in out
        and not (tmp_path / "bare out/config.json").exists()
    )
    config = given(tmp_path, rope_theta=5.0, rms_norm_eps=1e-2)
    assert converted(source, "huggingface", tmp_path / "out", "--config", config)[0] == 0


@pytest.mark.parametrize("rows", [13, 64])
@pytest.mark.parametrize("words", [12, None])
def test_a_padded_vocabulary_that_the_record_states_is_read(
    tmp_path: Path, rows: int, words: int | None
) -> None:
    """Of a config that counts the padding as words, all rows are kept."""
    held = weights(1)
    padded = dict(held)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        padded[name] = torch.cat((held[name], torch.ones(rows - 12, 16)))
    source = with_arguments(tmp_path, padded, padded_vocab_size=rows, vocab_size=words)
    for count, truth in ((12, held), (rows, padded)):
        out = tmp_path / f"out{count}"
        code, said = converted(
            source, "huggingface", out, "--config", given(tmp_path, vocab_size=count)
        )
        assert code == (2 if count == 12 else 0), said
        found = load_file(out / "model.safetensors")
        assert all(torch.equal(found[name], truth[name]) for name in truth)
    config = given(tmp_path, vocab_size=rows + 1)
    assert converted(source, "huggingface", tmp_path / "other", "--config", config)[0] == 1


# Models of classes that are not those of transformers


@pytest.mark.parametrize("to", ["safetensors", "bin"])
def test_a_draft_model_is_carried_as_it_is(tmp_path: Path, to: str) -> None:
    held = {
        name.removeprefix("model."): tensor
        for name, tensor in weights(1).items()
        if ".layers.0." in name and "input_layernorm" not in name
    } | {"fc.weight": torch.ones(16, 32)}
    config = {**TRUE, "architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": 1}
    source = saved(tmp_path / "model", held, config)
    code, out = converted(source, to, tmp_path / "out")
    assert code == 0, out
    found = formats.read_checkpoint(tmp_path / "out").parameters
    assert found.keys() == held.keys()
    assert all(torch.equal(found[name].weight.whole(), held[name]) for name in held)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == config
    # The same tensors under the name of a whole model are a part of one.
    (source / "config.json").write_text(
        json.dumps({**config, "architectures": ["LlamaForCausalLM"]})
    )
    assert converted(source, to, tmp_path / "other")[0] == 1


# Secrets in configs


@pytest.mark.parametrize(
    "held",
    [
        {"auth": {"token": "deadbeef99"}},
        {"auth_token": "deadbeef99x"},
        {"data": "https://someone:deadbeef99@host/x"},
        {"store": "AccountName=a;AccountKey=deadbeef99=="},
    ],
)
@pytest.mark.parametrize("own", [True, False])
def test_no_secret_of_a_config_is_in_an_error(
    model: Path, tmp_path: Path, held: dict[str, Any], own: bool
) -> None:
    other = {key: {"b": "c"} for key in held}
    (model / "config.json").write_text(json.dumps({**TRUE, **(held if own else other)}))
    config = given(tmp_path, **(other if own else held))
    code, out = converted(model, "bin", tmp_path / "out", "--config", config)
    assert code == 1 and next(iter(held)) in out and "deadbeef" not in out, out


# Numbers that are not those of the source


@pytest.mark.parametrize("form", ["file", "dcp"])
@pytest.mark.parametrize("flag", ["conj", "neg"])
def test_a_tensor_whose_sign_is_no_number_of_its_storage_is_refused(
    tmp_path: Path, flag: str, form: str
) -> None:
    # As `.imag` of a conjugate is; that of a part of a storage DCP copies, and so resolves.
    negative = torch._neg_view(torch.ones(3))  # type: ignore[attr-defined]
    turned = torch.randn(3, dtype=torch.complex64).conj() if flag == "conj" else negative
    state = {"model": {"w": turned, "b": torch.ones(2)}}
    source, out = tmp_path / "source", tmp_path / "out"
    if form == "dcp":
        torch.distributed.checkpoint.save(state, checkpoint_id=source, no_dist=True)
    else:
        torch.save(state, source)
    code, said = asked("convert", str(source), "--to", "bin", "-o", str(out))
    assert code == 1 and f"'{flag}'" in said and "damaged" not in said and not out.exists(), said


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with weights and moments in fp32."""
    path = tmp_path_factory.mktemp("exact") / "run.pt"
    model = torch.nn.Linear(5, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 5)).sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    return path


@pytest.mark.parametrize(
    "to", [name for name, format in formats.all_formats().items() if "dtype" in format.takes]
)
def test_precision_is_kept_or_its_loss_is_named(exact: Path, tmp_path: Path, to: str) -> None:
    out = tmp_path / "out"
    code, said = asked("convert", str(exact), "--to", to, "--dtype", "bf16", "-o", str(out))
    if "can be read but not written" in said:
        return
    before, after = formats.read_checkpoint(exact), formats.read_checkpoint(out)
    kept = all(
        torch.equal(one.best.whole(), other.best.whole())
        for one, other in zip(before.parameters.values(), after.parameters.values(), strict=True)
    )
    assert kept or (code == 2 and "the greater precision of the masters is lost" in said), said


@pytest.mark.parametrize("to", ["safetensors", "bin", "dcp", "megatron"])
def test_no_finite_weight_becomes_infinite(tmp_path: Path, to: str) -> None:
    source, out = tmp_path / "run.pt", tmp_path / "out"
    torch.save({"w": torch.tensor([1.0, 1e6]), "inf": torch.tensor([float("inf")])}, source)
    way = ("convert", str(source), "--to", to, "-o", str(out), "--dtype")
    code, said = asked(*way, "fp16")
    assert code == 1 and "1e+06, which F16 cannot hold" in said, said
    assert not any(tmp_path.glob("*out*")) and asked(*way, "bf16")[0] in (0, 2)


def test_from_pretrained_loads_the_number_format_that_was_asked_for(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = saved(tmp_path / "model", weights(1), {**TRUE, "dtype": "bfloat16"})
    out = tmp_path / "out"
    assert asked("convert", str(model), "--to", "bin", "--dtype", "fp32", "-o", str(out))[0] == 0
    found = AutoModelForCausalLM.from_pretrained(out).state_dict()
    assert all(torch.equal(found[name], value) for name, value in weights(1).items())


def test_every_file_that_transformers_reads_is_copied_or_named(model: Path, tmp_path: Path) -> None:
    copied = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
    named = ("adapter_config.json", "adapter_model.safetensors", "modeling_own.py", "qwen.tiktoken")
    for name in (*copied, *named, "README.md"):
        (model / name).write_text("{}")
    (model / "additional_chat_templates").mkdir()
    out = tmp_path / "out"
    code, said = asked("convert", str(model), "--to", "bin", "-o", str(out))
    assert code == 2 and "different numbers: adapter: adapter_config.json lies next to" in said
    assert all((out / name).is_file() for name in copied)
    line = next(line for line in said.splitlines() if "not copied" in line)
    assert all(name in line for name in (*named, "additional_chat_templates"))
    assert "README" not in said


@pytest.mark.parametrize("dtype", ["F8_E8M0", "F4"])
def test_a_number_format_that_is_not_read_is_no_damage(tmp_path: Path, dtype: str) -> None:
    row = {"dtype": dtype, "shape": [4], "data_offsets": [0, 4]}
    head = json.dumps({"w": row}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(head).to_bytes(8, "little") + head + bytes(4))
    code, said = asked("inspect", str(path))
    assert code == 1 and f"number format '{dtype}'" in said and "damaged" not in said, said


def test_copies_of_two_number_formats_are_not_said_to_be_alike_without_a_word(
    tmp_path: Path,
) -> None:
    fine = torch.randn(50)
    forms = {"fine": fine, "half": fine.half(), "brain": fine.bfloat16()}
    for name, held in forms.items():
        torch.save({"w": held}, tmp_path / name)

    def told(one: str, other: str) -> tuple[int, str]:
        return asked("diff", str(tmp_path / one), str(tmp_path / other))

    code, said = told("fine", "brain")
    assert code == 0 and "different number formats: 1 tensors, which were compared in BF16" in said
    assert "number formats" not in told("fine", "fine")[1]
    # Each of these two has numbers that the other lacks, so neither is the coarser one.
    assert told("half", "brain")[0] == told("brain", "half")[0] == 2


ENDLESS = float("inf")


@pytest.mark.parametrize(
    ("one", "other", "most"),
    [
        (torch.tensor([7e4]), torch.tensor([ENDLESS]).half(), "inf"),
        (torch.tensor([ENDLESS, 1.0]), torch.tensor([ENDLESS, 1.5]), "0.5"),
        (torch.tensor([2**53]), torch.tensor([2**53 + 1]), "1"),
        (torch.tensor([2**32 + 1]), torch.tensor([1], dtype=torch.int32), "4.29e+09"),
        (torch.tensor([1.5]), torch.tensor([1], dtype=torch.int8), "0.5"),
        (torch.tensor([1 + 1j]), torch.tensor([1 + 3j]), "2"),
    ],
)
def test_no_number_of_another_format_is_rounded_to_its_opposite(
    tmp_path: Path, one: torch.Tensor, other: torch.Tensor, most: str
) -> None:
    for name, held in {"one": one, "other": other}.items():
        torch.save({"a": torch.ones(2), "w": held}, tmp_path / name)
    for pair in (("one", "other"), ("other", "one")):
        code, said = asked("diff", *(str(tmp_path / name) for name in pair))
        assert code == 2 and f"w weight: different, by {most} at most" in said, said
    assert asked("diff", str(tmp_path / "one"), str(tmp_path / "one"))[0] == 0
