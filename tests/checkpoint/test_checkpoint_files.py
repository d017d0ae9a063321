"""Checkpoints from elsewhere: nothing in them is executed, nothing leads out of their folder, and no change goes unseen."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import re
import shutil
import time
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from bridge.checkpoint import digests
from bridge.checkpoint.folder_lock import Saving
from bridge.checkpoint.native_format import Checkpoint, file_of
from bridge.engine import initialize
from bridge.engine.models.gpt import GPT, Architecture, mean_cross_entropy
from bridge.engine.runner import Engine
from bridge.errors import BridgeError
from bridge.plan.plan import Plan
from tests.engine.pool import Pool, RankError
from tests.engine.runs import Case, batch_normed, evaluated, left_alone, save

TINY = Architecture(layers=1, hidden=4, heads=1, kv_heads=1, ffn=4, vocab=5, sequence=3)
ONE = Case(
    {"precision.compute": "fp64", "optimizer.name": "adamw", "batch.micro": 2, "batch.global_": 2},
    TINY,
    2,
    tokens=3,
)
FILES = ("state.json", "SHA256SUMS", "rank-00000.safetensors")


def engine_of(seed: int = 7) -> Engine:
    return initialize(GPT(TINY, seed=seed).double(), Plan.of(ONE.plan), mean_cross_entropy)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A folder with the checkpoint `step0`."""
    engine_of().save_checkpoint(tmp_path / "saved", client_state={"epoch": 3})
    return tmp_path / "saved"


def refused(folder: Path, tag: str | None = None) -> str:
    """What a load of `folder` says, which has to leave everything as it was."""
    engine = engine_of(8)
    before = {name: tensor.clone() for name, tensor in engine.state_dict()}
    generator = torch.get_rng_state()
    with pytest.raises(BridgeError) as caught:
        engine.load_checkpoint(folder, tag)
    assert all(torch.equal(before[name], tensor) for name, tensor in engine.state_dict())
    assert torch.equal(generator, torch.get_rng_state()) and engine.seed == 1234
    return str(caught.value)


def refused_with(path: Path, content: bytes) -> str:
    """The same, with a file of the checkpoint changed."""
    path.write_bytes(content)
    return refused(path.parent.parent)


def seal(folder: Path) -> None:
    """Make the digests those of the files as they are now, as someone would who wants to deceive."""
    names = [path.name for path in folder.iterdir() if path.name != digests.SUMS]
    (folder / digests.SUMS).write_text(
        digests.text_of({name: digests.digest_of(folder / name) for name in names})
    )


class Payload:
    """An object whose pickle makes a file when it is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("name", [*FILES, "latest"])
def test_no_payload_is_executed(saved: Path, tmp_path: Path, name: str, sealed: bool) -> None:
    marker, target = (
        tmp_path / "executed",
        saved / name if name == "latest" else saved / "step0" / name,
    )
    target.write_bytes(pickle.dumps(Payload(marker)))
    if sealed and name != digests.SUMS:
        seal(saved / "step0")
    assert str(target) in refused(saved)
    torch.save({"weights": Payload(marker)}, target)
    assert str(target) in refused(saved)
    assert not marker.exists()


def test_the_payload_would_run(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Payload(tmp_path / "executed")))
    assert (tmp_path / "executed").exists()


@pytest.mark.parametrize("name", FILES)
def test_a_changed_byte_names_the_file(saved: Path, name: str) -> None:
    path = saved / "step0" / name
    content = path.read_bytes()
    assert name in refused_with(path, bytes([content[0] ^ 1]) + content[1:])
    for place in range(0, len(content), max(1, len(content) // 200)):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(BridgeError, match=re.escape(name)):
            Checkpoint.open(saved / "step0", saved).verify()
    # Sums whose last line has no end are whole.
    for cut in (0, 1, len(content) // 2, len(content) - 1 - (name == digests.SUMS)):
        path.write_bytes(content[:cut])
        assert str(path) in refused(saved).replace(f"{digests.SUMS} has", "")
    path.unlink()
    assert name in refused(saved) or name == "state.json"


@pytest.mark.parametrize(
    "tag", ["../saved/step0", "/etc", ".", "..", ".hidden", "a/b", "", "a\nb", "x" * 300]
)
def test_a_name_that_is_a_path_is_refused(saved: Path, tag: str) -> None:
    (saved / "latest").write_text(tag)
    assert f"{saved / 'latest'}: found" in refused(saved)
    if tag:
        assert "tag: found" in refused(saved, tag)
        with pytest.raises(BridgeError, match="tag: found"):
            engine_of().save_checkpoint(saved, tag)
    assert {path.name for path in saved.iterdir()} == {".lock", "latest", "step0"}


def test_links_that_lead_out_are_refused(saved: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(saved, elsewhere)
    (saved / "away").symlink_to(elsewhere / "step0")
    assert f"{saved / 'away'}: a link that leads to {elsewhere / 'step0'}" in refused(saved, "away")
    for name in FILES:
        path = saved / "step0" / name
        path.unlink()
        path.symlink_to(elsewhere / "step0" / name)
        assert f"{path}: a link that leads to" in refused(saved)
        path.unlink()
        shutil.copy(elsewhere / "step0" / name, path)
    (saved / "latest").unlink()
    (saved / "latest").symlink_to(elsewhere / "latest")
    assert f"{saved / 'latest'}: a link that leads to" in refused(saved)
    (saved / "beside").symlink_to("step0")
    assert engine_of(8).load_checkpoint(saved, "beside")[1] == {"epoch": 3}


@pytest.mark.parametrize("name", [*FILES, "latest"])
def test_what_is_no_file_is_refused_and_not_waited_for(saved: Path, name: str) -> None:
    path = saved / name if name == "latest" else saved / "step0" / name
    path.unlink()
    os.mkfifo(path)
    assert f"{path}: found no regular file" in refused(saved)


STATES: dict[str, tuple[tuple[str | int, ...], Any]] = {
    "progress.steps": (("progress", "steps"), "two"),
    "progress.samples": (("progress", "samples"), -1),
    "progress.loss": (("progress", "loss"), None),
    "progress.other": (("progress", "other"), 1),
    "scaler.scale": (("scaler", "scale"), 0),
    "scaler": (("scaler",), []),
    "seed": (("seed",), 2**70),
    "world": (("world",), 0),
    "client": (("client",), [1]),
    "copies": (("copies",), [1]),
    "tensors.weights/head.norm.weight": (("tensors", "weights/head.norm.weight"), ["a"]),
    "format": (("format",), 3),
}


@pytest.mark.parametrize("place", STATES)
def test_a_state_that_fits_no_schema_is_refused_before_any_weight_is_touched(
    saved: Path, place: str
) -> None:
    path, (keys, value) = saved / "step0" / "state.json", STATES[place]
    state = json.loads(path.read_text())
    inner = state
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    path.write_text(json.dumps(state))
    seal(saved / "step0")
    assert refused(saved).startswith(f"{path}: {place}")


@pytest.mark.parametrize(
    "text", ["", "[]", "null", "{", '{"format": 2, "format": 2}', "[" * 100_000, "9" * 5000, "\x00"]
)
def test_a_state_that_is_no_object_is_refused(saved: Path, text: str) -> None:
    (saved / "step0" / "state.json").write_text(text)
    assert str(saved / "step0" / "state.json") in refused(saved)


def test_parts_that_do_not_make_each_tensor_once_are_refused(saved: Path) -> None:
    path = saved / "step0" / file_of(0)
    with safe_open(path, "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    key = "weights/head.norm.weight@0"
    changed: dict[str, dict[str, Any]] = {
        "the parts have 0 elements": {key: None},
        "the parts have 6 elements": {"weights/head.norm.weight@1": tensors[key][:2].clone()},
        "lies outside": {key: None, "weights/head.norm.weight@9": tensors[key]},
        "its parts overlap": {
            key: tensors[key][:2].clone(),
            "weights/head.norm.weight@1": tensors[key][2:].clone(),
        },
        "several number formats": {
            key: tensors[key][:2].clone(),
            "weights/head.norm.weight@2": tensors[key][2:].float(),
        },
        "expected NAME@ and 1 offsets": {key: None, "weights/head.norm.weight@0,0": tensors[key]},
        "which state.json does not list": {"weights/other@0": tensors[key]},
        "number format I64": {key: tensors[key].long()},
    }
    for said, change in changed.items():
        save_file(
            {
                name: held.clone()
                for name, held in {**tensors, **change}.items()
                if held is not None
            },
            path,
        )
        seal(saved / "step0")
        assert said in refused(saved)


def test_files_of_another_run_are_told_apart(saved: Path, tmp_path: Path) -> None:
    engine_of(9).save_checkpoint(tmp_path / "other")
    shutil.copy(tmp_path / "other" / "step0" / file_of(0), saved / "step0" / file_of(0))
    assert f"{saved / 'step0' / file_of(0)}: the" in refused(saved)


def test_anyone_can_check_the_digests(saved: Path) -> None:
    digests.verify_digests(
        saved / "step0",
        saved,
        ["state.json", file_of(0)],
        digests.read_digests(saved / "step0", saved),
    )


@pytest.mark.parametrize("level", [0, 3])
def test_buffers_are_part_of_it(run: Any, tmp_path: Path, level: int) -> None:
    found = run(2, batch_normed, tmp_path, level)
    for expected, resumed, untouched in found:
        assert resumed == expected and untouched
    assert found[0][0] != found[1][0], "ranks see samples of their own"
    assert run(1, evaluated, tmp_path) == [pytest.approx(found[0][0], rel=1e-12)]


@pytest.mark.parametrize("after", [1, 2, 4])
def test_a_rank_that_dies_in_a_save_is_said_and_leaves_the_checkpoint_before(
    tmp_path: Path, after: int
) -> None:
    pool = Pool(2)
    case = Case({**ONE.plan, "batch.global_": 4, "parallel.data": 2}, TINY, 4, tokens=3)
    with pytest.raises(RankError, match="the process died"):
        pool.run(left_alone, case, tmp_path, after)
    assert "rank 1 is gone or silent" in (tmp_path / "said").read_text()
    assert {path.name for path in tmp_path.iterdir()} - {"after"} == {
        ".lock",
        "latest",
        "before",
        "said",
    }
    found = tmp_path / (tmp_path / "latest").read_text()
    assert found.name == ("after" if (tmp_path / "after").exists() else "before")
    Checkpoint.open(found, tmp_path).verify()


def publish(folder: Path, number: int, times: int) -> None:
    """Write the same tag over and over."""
    for _ in range(times):
        saving = Saving.begin(folder, "tag")
        (saving.temporary / "one").write_text(str(number))
        saving.publish({"two": str(number)}, latest=True)


def test_jobs_that_save_one_tag_take_turns(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    jobs = [context.Process(target=publish, args=(tmp_path, number, 25)) for number in range(2)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    assert [job.exitcode for job in jobs] == [0, 0]
    assert (tmp_path / "tag" / "one").read_text() == (tmp_path / "tag" / "two").read_text()
    assert {path.name for path in tmp_path.iterdir()} == {".lock", "latest", "tag"}


def test_what_a_killed_save_left_goes_and_what_a_living_one_writes_stays(tmp_path: Path) -> None:
    living = Saving.begin(tmp_path, "tag")
    (tmp_path / ".tag.0123456789abcdef.tmp").mkdir()
    (tmp_path / ".tag.tmp").mkdir()
    other = Saving.begin(tmp_path, "tag")
    assert living.temporary.exists() and other.temporary != living.temporary
    living.publish({"state.json": "{}"}, latest=False)
    other.discard()
    assert {path.name for path in tmp_path.iterdir()} == {".lock", "tag"}


def test_an_older_format_is_named(run: Any, tmp_path: Path) -> None:
    run(1, save, ONE, tmp_path)
    path = tmp_path / "step2" / "state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 1}))
    with pytest.raises(
        BridgeError,
        match="found format 1, expected 2; load this checkpoint with the release that wrote it",
    ):
        run(1, resume_, tmp_path)


def resume_(rank: int, world: int, folder: Path) -> None:
    """A load that fails."""
    engine_of().load_checkpoint(folder)


KILLS = int(os.environ.get("STAGEBRIDGE_KILLS", "10"))


def marked(engine: Engine, turn: int) -> None:
    """Make all weights the number of the turn."""
    for shard in engine.weights.shards:
        shard.fill_(turn)
    engine.progress.steps = turn


def saves_and_loads(engine: Engine, folder: Path, turn: int) -> None:
    """For ever: another state under the same tag, and back."""
    while True:
        marked(engine, turn := turn + 1)
        engine.save_checkpoint(folder, "same", {"turn": turn})
        engine.load_checkpoint(folder)


def test_kills_at_any_moment_of_saves_and_loads_leave_a_whole_checkpoint(tmp_path: Path) -> None:
    engine, random, turn = engine_of(), Random(1), 0
    engine.save_checkpoint(tmp_path, "same", {"turn": 0})
    marked(engine, 0)
    engine.save_checkpoint(tmp_path, "same", {"turn": 0})
    context = multiprocessing.get_context("fork")
    for _ in range(KILLS):
        job = context.Process(target=saves_and_loads, args=(engine, tmp_path, turn))
        job.start()
        time.sleep(random.random() * 0.3)
        job.kill()
        job.join()
        _, client = engine.load_checkpoint(tmp_path)
        assert client["turn"] >= turn, "an older one than was there before"
        turn = client["turn"]
        assert engine.progress.steps == turn and all(
            (shard == turn).all() for shard in engine.weights.shards
        )
    assert turn > 0, "no kill came after a save"
    engine.save_checkpoint(tmp_path, "same")
    assert {path.name for path in tmp_path.iterdir()} <= {".lock", "latest", "same", ".latest.tmp"}
