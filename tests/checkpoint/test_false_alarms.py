"""What people have, and what was once refused or called damaged; and the words of what is refused."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from bridge.checkpoint import formats, writing
from bridge.checkpoint.digests import read_digests, text_of
from bridge.cli import run as command
from bridge.errors import BridgeError, SourceError
from bridge.report.exit_codes import Exit
from compat.huggingface import formats as configs


def plain_model(folder: Path) -> Path:
    """A folder with weights in an order that no family of models has."""
    folder.mkdir(parents=True)
    weights = {"b.1.up.weight": torch.rand(3, 2), "b.0.down.weight": torch.rand(2, 3)}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_sgd_without_momentum_lacks_no_moments(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for momentum, code in ((0.0, Exit.CLEAN), (0.9, Exit.FINDINGS)):
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        source = tmp_path / f"{momentum}.pt"
        torch.save(state, source)
        output = tmp_path / f"{momentum}"
        words = ["convert", str(source), "--to", "dcp", "-o", str(output)]
        assert command(["checkpoint", *words]) == code
        assert ("no moments" in capsys.readouterr().out) == (code is Exit.FINDINGS)


def test_weights_without_moments_need_no_order_for_trainer(tmp_path: Path) -> None:
    place = plain_model(tmp_path / "a")
    words = ["convert", str(place), "--to", "trainer", "-o", str(tmp_path / "b")]
    assert command(["checkpoint", *words]) == Exit.FINDINGS
    assert not (tmp_path / "b/optimizer.pt").exists()
    one, other = (formats.read_checkpoint(tmp_path / name) for name in "ab")
    for name, held in one.parameters.items():
        assert torch.equal(held.weight.whole(), other.parameters[name].weight.whole())


def cached(tmp_path: Path) -> tuple[Path, Path]:
    """A model in the cache of huggingface_hub, and its blob."""
    home = tmp_path / "models--a--b"
    file = plain_model(tmp_path / "made") / "model.safetensors"
    blob = home / "blobs" / hashlib.sha256(file.read_bytes()).hexdigest()
    for revision in ("abc", "old"):
        (home / "snapshots" / revision).mkdir(parents=True)
    blob.parent.mkdir()
    file.rename(blob)
    (home / "snapshots/abc/model.safetensors").symlink_to(f"../../blobs/{blob.name}")
    (home / "refs").mkdir()
    (home / "refs/main").write_text("abc")
    return home, blob


@pytest.mark.parametrize("inside", ["", "snapshots", "snapshots/abc"])
def test_a_model_in_the_cache_is_found_from_its_root(tmp_path: Path, inside: str) -> None:
    home, _ = cached(tmp_path)
    format, place = formats.find_checkpoint(home / inside)
    assert format.name == "safetensors" and place == home / "snapshots/abc"
    assert len(formats.read_at(format, place).parameters) == 2


@pytest.mark.parametrize("text", ["../..", "/etc", "", "a/b"])
def test_a_reference_leads_to_no_other_folder(tmp_path: Path, text: str) -> None:
    home, _ = cached(tmp_path)
    (home / "refs/main").write_text(text)
    with pytest.raises(SourceError, match=r"refs/main.*plain name"):
        formats.find_checkpoint(home)


def test_a_link_to_a_missing_blob_is_named(tmp_path: Path) -> None:
    home, blob = cached(tmp_path)
    blob.unlink()
    words = rf"model\.safetensors is a link that leads to \.\./\.\./blobs/{blob.name}"
    with pytest.raises(SourceError, match=words):
        formats.find_checkpoint(home)


@pytest.mark.parametrize("options", ["$PWD/*", "-z *", "-z $PWD/*", "--tag $PWD/*", "-b ./*"])
def test_what_sha256sum_writes_is_read(tmp_path: Path, options: str) -> None:
    place = plain_model(tmp_path / "a b")
    done = subprocess.run(
        ["bash", "-c", f'cd "$1"; IFS=; sha256sum {options}', "-", str(place)],
        capture_output=True,
        check=True,
    )
    (place / "SHA256SUMS").write_bytes(done.stdout)
    assert list(read_digests(place, place)) == ["model.safetensors"]
    format, found = formats.find_checkpoint(place)
    formats.verify_checkpoint(format, found)
    with (place / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x7f")
    with pytest.raises(SourceError, match="have changed"):
        formats.verify_checkpoint(format, found)


def test_a_sum_of_a_file_elsewhere_is_refused_with_its_name(tmp_path: Path) -> None:
    place = plain_model(tmp_path / "a")
    (place / "SHA256SUMS").write_text(text_of({"/etc/hosts": "0" * 64}))
    with pytest.raises(SourceError, match="found '/etc/hosts', a file outside of"):
        read_digests(place, place)


def test_the_disk_needs_what_is_written_and_little_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usage = namedtuple("usage", "free")
    place = plain_model(tmp_path / "a")
    words = ["checkpoint", "convert", str(place), "--to", "bin", "-o"]
    monkeypatch.setattr(writing.shutil, "disk_usage", lambda path: usage(2**17))
    assert command([*words, str(tmp_path / "b")]) == Exit.CLEAN
    size = (tmp_path / "b/pytorch_model.bin").stat().st_size
    monkeypatch.setattr(writing.shutil, "disk_usage", lambda path: usage(2**12))
    assert command([*words, str(tmp_path / "c")]) == Exit.ERROR
    told = capsys.readouterr().err
    assert f"4,096 bytes are free, but {size:,} are to be written" in told


WORDS: list[tuple[Any, str]] = [
    (torch.rand(2), "found a tensor, expected a dictionary with the state of a model"),
    ([1], "found a list, expected a dictionary"),
    (
        {"optimizer": torch.optim.Adam([torch.rand(2, requires_grad=True)]).state_dict()},
        r"found an optimizer \(optimizer\) and no model; name the file or folder",
    ),
    ({"state": {}, "param_groups": [{"params": [0], "lr": 0.1}]}, "found an optimizer"),
]


@pytest.mark.parametrize(("value", "words"), WORDS)
def test_what_is_no_model_is_called_what_it_is(tmp_path: Path, value: Any, words: str) -> None:
    torch.save(value, tmp_path / "a.pt")
    with pytest.raises(SourceError, match=words) as caught:
        formats.read_checkpoint(tmp_path / "a.pt")
    assert "damaged" not in str(caught.value) and "Span" not in str(caught.value)


def test_the_step_of_an_optimizer_that_is_not_read_is_known(tmp_path: Path) -> None:
    state = {at: {"step": torch.tensor(7.0), "exp_avg": torch.rand(5)} for at in range(2)}
    optimizer = {"state": state, "param_groups": [{"params": [0, 1], "lr": 0.1}]}
    torch.save({"model": {"a.weight": torch.rand(2, 2)}, "optimizer": optimizer}, tmp_path / "a.pt")
    hub = formats.read_checkpoint(tmp_path / "a.pt")
    assert hub.where.steps == 7 and not hub.moments
    assert any("not read" in finding.message for finding in hub.findings)


def test_a_config_with_a_wrong_number_is_not_told_to_be_null() -> None:
    with pytest.raises(BridgeError, match="greater than 0") as caught:
        configs.read({"model_type": "llama", "num_key_value_heads": 0})
    assert "null" not in str(caught.value)
