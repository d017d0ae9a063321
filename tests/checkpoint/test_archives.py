"""Files of torch.save read as data: the values that torch's own loader has; nothing in them is executed or passes unseen."""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from bridge.checkpoint import archive
from bridge.checkpoint.lazy import SAFE, Lazy
from bridge.checkpoint.unpickle import Record, recorders
from bridge.errors import SourceError

NAMED = "deepspeed.runtime.fp16.loss_scaler LossScaler"


def assert_same(ours: Any, torchs: Any, at: str = "") -> None:
    """Whether what was read is what torch's loader made."""
    if isinstance(torchs, Tensor):
        found = ours.whole()
        assert (
            found.dtype == torchs.dtype
            and found.shape == torchs.shape
            and torch.equal(found, torchs.detach())
        ), at
    elif isinstance(torchs, Mapping):
        assert list(ours) == list(torchs), at
        for key, value in torchs.items():
            assert_same(ours[key], value, f"{at}/{key}")
    elif isinstance(torchs, list | tuple):
        assert len(ours) == len(torchs) and isinstance(ours, tuple) == isinstance(torchs, tuple), at
        for number, value in enumerate(torchs):
            assert_same(ours[number], value, f"{at}/{number}")
    elif isinstance(torchs, torch.dtype):
        assert SAFE[str(torchs).removeprefix("torch.")] == ours, at
    else:
        assert ours == torchs, at


def written(path: Path, value: Any, **how: Any) -> Path:
    torch.save(value, path, **how)
    return path


def values() -> dict[str, Any]:
    """What checkpoints hold."""
    base = torch.arange(24, dtype=torch.float32).view(4, 6)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    moved = nn.Parameter(torch.ones(2))
    moved.tensor_model_parallel = True  # type: ignore[attr-defined]
    formats = {name: torch.ones(3).to(getattr(torch, name)) for name in SAFE}
    return {
        "module": model.state_dict(),
        "parameters": OrderedDict(model.named_parameters()),
        "views": [
            base,
            base.t(),
            base[1:, 2:],
            base[2],
            base[:, 3],
            base[0, 0],
            base.expand(2, 4, 6),
            torch.empty(0, 5),
        ],
        "formats": formats,
        "attributes": moved,
        "plain": [
            None,
            True,
            -1,
            2**70,
            -(2**33),
            1.5,
            float("inf"),
            "text",
            "\u00e9" * 300,
            b"raw",
            b"x" * 300,
            {1, 2},
            (),
        ],
        "keys": {(1, "a"): frozenset({3}), None: Counter({3: 1})},
        "torch": [torch.Size([2, 3]), torch.bfloat16],
        "numpy": [numpy.float64(0.25), numpy.int64(-3), numpy.float32(1.5), numpy.bool_(True)],
        "deep": [[[[[{"a": (1, (2, (3,)))}]]]]],
    }


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_values_are_those_of_torch(tmp_path: Path, protocol: int) -> None:
    path = written(tmp_path / "a.pt", values(), pickle_protocol=protocol)
    assert_same(archive.read_archive(path, tmp_path), torch.load(path, weights_only=False))


def test_a_run_of_a_tensor_is_a_part_of_it(tmp_path: Path) -> None:
    found = archive.read_archive(written(tmp_path / "a.pt", values()), tmp_path)
    for lazy in (*found["views"], *found["formats"].values()):
        whole = lazy.whole().reshape(-1)
        for start in range(lazy.count + 1):
            assert torch.equal(lazy.flat(start, lazy.count)[:3], whole[start : start + 3])


class Call:
    """Pickles as a call of `function`, so that a loader that executes makes a file."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def payloads(marker: Path) -> dict[str, tuple[Any, str]]:
    """Objects that would make a file, by what an error names."""
    touch = f"open({str(marker)!r}, 'w')"
    return {
        "posix.system": (Call(os.system, f"touch {marker}"), "posix.system"),
        "eval": (Call(eval, touch), "eval"),
        "exec": (Call(exec, touch), "exec"),
        "Popen": (Call(subprocess.Popen, ["touch", str(marker)]), ".Popen"),
        "getattr": (Call(getattr, 1, "real"), "getattr"),
        "load": (Call(torch.load, str(marker)), "torch.serialization.load"),
        "hub": (Call(torch.hub.load, str(marker), "a"), "torch.hub.load"),
        "namespace": (Call(__import__, "os"), "__import__"),
        "numpy": (Call(numpy.fromfile, str(marker)), "fromfile"),
        "module": (nn.Linear(1, 1), "torch.nn.modules.linear.Linear"),
    }


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("name", payloads(Path("x")))
@pytest.mark.parametrize("place", ["value", "key of a tensor's dictionary", "in a listed object"])
def test_no_payload_is_executed(tmp_path: Path, name: str, place: str, protocol: int) -> None:
    marker = tmp_path / "executed"
    payload, said = payloads(marker)[name]
    holder = {
        "value": payload,
        "key of a tensor's dictionary": {
            "module": OrderedDict(weight=torch.ones(2), other=payload)
        },
        "in a listed object": {"lr": [torch.Size([1]), {"scale": (1, payload)}]},
    }[place]
    path = written(tmp_path / "a.pt", holder, pickle_protocol=protocol)
    with pytest.raises(SourceError) as caught:
        archive.read_archive(path, tmp_path, recorders(NAMED))
    assert (
        str(path) in str(caught.value)
        and said in str(caught.value)
        and "executed" in str(caught.value)
    )
    assert not marker.exists()


RAW = {
    "a name by a number": b"\x80\x02\x82\x01.",
    "an instance by lines": b"(S'touch x'\nios\nsystem\n.",
    "an object by mark": b"(cos\nsystem\nX\x01\x00\x00\x00xo.",
    "a call of what was built": b"\x80\x02]K\x01\x85R.",
    "a call of a record": b"\x80\x02cdeepspeed.runtime.fp16.loss_scaler\nLossScaler\n)R)R.",
    "attributes are set on a list": b"\x80\x02]}b.",
    "a storage that is none": b"\x80\x02(X\x07\x00\x00\x00storageK\x01K\x01K\x01K\x01tQ.",
    "a name that is no text": b"\x80\x04K\x01K\x02\x93.",
    "a list that is its own key": b"\x80\x02}]K\x01s.",
    "more than one value": b"\x80\x02K\x01K\x01.",
    "nothing": b"",
    "no end": b"\x80\x02K\x01",
    "a text beyond the end": b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7f.",
    "a place far away": b"\x80\x02K\x01r\xff\xff\xff\x7fj\x00\x00\x00\x00.",
    "a tensor beyond its storage": b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(K\x01K\x01)}}K\x01tR.",
}


def packed(path: Path, pickle: bytes, **others: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as file:
        for name, content in {
            "data.pkl": pickle,
            "byteorder": b"little",
            "version": b"3\n",
            **others,
        }.items():
            file.writestr(f"archive/{name}", content)
    return path


@pytest.mark.parametrize("name", RAW)
def test_a_pickle_made_by_hand_is_refused(tmp_path: Path, name: str) -> None:
    path = packed(tmp_path / "a.pt", RAW[name])
    with pytest.raises(SourceError, match=r"a\.pt"):
        archive.read_archive(path, tmp_path, recorders(NAMED))


def test_a_listed_class_is_a_record(tmp_path: Path) -> None:
    data = b"\x80\x02cdeepspeed.runtime.fp16.loss_scaler\nLossScaler\n)\x81}X\x09\x00\x00\x00cur_scaleK\x08sb."
    found = archive.read_archive(packed(tmp_path / "a.pt", data), tmp_path, recorders(NAMED))
    assert isinstance(found, Record) and (found.name, found.state) == (NAMED, {"cur_scale": 8})


def test_what_is_no_archive_of_torch_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({"a": torch.ones(2)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(SourceError, match=r"PyTorch 1\.6 or later"):
        archive.read_archive(path, tmp_path)
    torch.jit.save(torch.jit.script(nn.Linear(1, 1)), path)
    with pytest.raises(SourceError, match="a TorchScript program"):
        archive.read_archive(path, tmp_path)
    packed(path, b"\x80\x02K\x01.", byteorder=b"big")
    with pytest.raises(SourceError, match="little-endian"):
        archive.read_archive(path, tmp_path)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("archive/data.pkl", b"\x80\x02K\x01.")
    with pytest.raises(SourceError, match="compressed"):
        archive.read_archive(path, tmp_path)
    with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(path, "w") as file:
        for _ in range(2):
            file.writestr("archive/data.pkl", b"\x80\x02K\x01.")
    with pytest.raises(SourceError, match="twice"):
        archive.read_archive(path, tmp_path)
    os.remove(path)
    os.mkfifo(path)
    with pytest.raises(SourceError, match="no regular file"):
        archive.read_archive(path, tmp_path)


def test_a_changed_byte_is_an_error_or_changes_nothing_but_elements(tmp_path: Path) -> None:
    path = written(
        tmp_path / "a.pt",
        {"module": OrderedDict(a=torch.arange(6.0).view(2, 3)), "steps": 3, "names": ["x", "y"]},
    )
    content, random, refused = path.read_bytes(), Random(5), 0
    for place in range(0, len(content), 3):
        path.write_bytes(
            content[:place]
            + bytes([content[place] ^ (1 << random.randrange(8))])
            + content[place + 1 :]
        )
        try:
            found = archive.read_archive(path, tmp_path)
        except SourceError as error:
            assert str(path) in str(error)
            refused += 1
        else:
            assert (found["steps"], found["names"]) == (3, ["x", "y"]) and found["module"][
                "a"
            ].shape == (2, 3)
    assert refused > 100
    for cut in range(0, len(content), 97):
        path.write_bytes(content[:cut])
        with pytest.raises(SourceError, match=r"a\.pt"):
            archive.read_archive(path, tmp_path)


def test_generated_pickles_come_to_values_or_errors(tmp_path: Path) -> None:
    random, plain = Random(7), pickle.dumps([1, "a", {"b": (2.5, None, [True])}], protocol=4)
    for _ in range(3000):
        data = bytearray(plain)
        for _ in range(random.randrange(1, 6)):
            data[random.randrange(len(data))] = random.randrange(256)
        path = tmp_path / "a.pt"
        try:
            archive.unpickle.unpickle_value(bytes(data), archive.KNOWN, path)
        except SourceError as error:
            assert "a.pt" in str(error)


def test_a_file_that_shrinks_says_so(tmp_path: Path) -> None:
    path = written(tmp_path / "a.pt", {"a": torch.ones(1000)})
    found: Lazy = archive.read_archive(path, tmp_path)["a"]
    os.truncate(path, 500)
    with pytest.raises(SourceError, match="changed while it was read"):
        found.whole()


def test_an_archive_within_a_file_is_read(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    torch.save(torch.arange(5), buffer)
    path = tmp_path / "a.distcp"
    path.write_bytes(b"before" + buffer.getvalue() + b"behind")
    found = archive.read_archive(path, tmp_path, begin=6, size=len(buffer.getvalue()))
    assert torch.equal(found.whole(), torch.arange(5))
