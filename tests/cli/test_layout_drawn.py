"""`stagebridge layout --plot`: bytes by rank and kind, drawn as the file's ending says, and the memory of the device."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from bridge.cli import run
from bridge.cli.demo import launch_text
from bridge.report.pictures.rank_bars import BARS, Bar, draw, figure, merge_ranks, ranks_text

pytestmark = pytest.mark.once
PICTURES = {".svg": b"<?xml", ".pdf": b"%PDF", ".html": b"<!doctype html>", ".png": b"\x89PNG"}


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command up to its options."""
    monkeypatch.chdir(tmp_path)
    Path("launch.args").write_text(launch_text())
    return ["layout", "launch.args", "--ranks", "8", "--vocab", "32000"]


def test_an_estimate_is_drawn_for_each_stage_and_moment(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The longest bar is what the stage needs, and each stage has bars of its own."""
    matplotlib = pytest.importorskip("matplotlib")
    command = ["estimate", *words[1:], "--memory", "80"]
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        assert run([*command, "--plot", "step.svg"]) == 0
    assert "wrote step.svg" in capsys.readouterr().out
    text = Path("step.svg").read_text()
    assert run([*command, "--json"]) == 0
    stages = json.loads(capsys.readouterr().out)["ranks"]
    unit = 2**30 if any(one["needed"] >= 2**30 for one in stages) else 2**20
    for place, one in enumerate(stages, 1):
        assert f"stage {place}, between steps" in text
        assert f"stage {place}, {one['moment']}" in text
        assert f"> {figure(one['needed'] / unit)}<" in text
    assert {"activations", "margins", "memory of a device: 80 GiB"} <= set(
        re.findall(">([^<>]+)</text>", text)
    )
    Path("step.svg").write_text("mine")
    assert run([*command, "--plot", "step.svg"]) == 1 and Path("step.svg").read_text() == "mine"


@pytest.mark.parametrize("ending", PICTURES)
def test_a_picture_is_what_its_file_ends_in(
    ending: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    path = Path(f"ranks{ending}")
    assert run([*words, "--plot", str(path), "--memory", "80"]) in (0, 2)
    assert f"wrote {path}" in capsys.readouterr().out
    first = path.read_bytes()
    assert first.startswith(PICTURES[ending])
    assert run([*words, "--plot", str(path), "--memory", "80"]) in (0, 2)
    assert ending == ".html" or ending == ".svg" or path.read_bytes() == first
    path.write_text("mine")
    assert run([*words, "--plot", str(path)]) == 1 and path.read_text() == "mine"
    assert "found a file that is not a picture of stagebridge" in capsys.readouterr().err


def test_it_says_ranks_kinds_sizes_and_the_memory(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        assert run([*words, "--plot", "ranks.svg", "--memory", "80"]) in (0, 2)
    text = Path("ranks.svg").read_text()
    told = [
        "weights",
        "gradients",
        "master",
        "moments",
        "memory of a device: 80 GiB",
        "ranks 0-3",
        "ranks 4-7",
        "on 8 ranks",
    ]
    assert not [word for word in told if word not in text]
    width = float(re.search(r'width="([\d.]+)pt"', text)[1])  # type: ignore[index]
    assert width <= 720


def test_ranks_that_keep_the_same_are_one_bar_and_the_largest_is_always_drawn(
    tmp_path: Path,
) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    sizes = [((rank,), {"weights": rank + 1}) for rank in range(BARS + 20)]
    bars = merge_ranks([*sizes, ((99,), {"weights": 1})])
    assert bars[0].label == "ranks 0, 99" and len(bars) == BARS + 20
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        draw(bars, "many", "kept", None, tmp_path / "many.svg")
    text = (tmp_path / "many.svg").read_text()
    assert f"the {BARS} largest of {BARS + 20} bars" in text
    assert f">rank {BARS + 19}<" in text and ">rank 1<" not in text


def test_a_memory_far_beyond_the_bars_is_told_in_words(words: list[str]) -> None:
    """On the scale of its line nothing of the bars would be seen."""
    matplotlib = pytest.importorskip("matplotlib")
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        assert run([*words, "--plot", "far.svg", "--memory", "100000"]) in (0, 2)
    text = Path("far.svg").read_text()
    assert re.search(r"memory of a device: 100,000 GiB, [\d,]+ times the longest bar", text)
    ticks = [float(tick) for tick in re.findall(r">(\d+(?:\.\d+)?)</text>", text)]
    assert max(ticks) < 1000


def test_ranks_that_keep_more_than_a_device_has_stop_the_run(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*words, "--memory", "1", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    (finding,) = (one for one in found["findings"] if one["path"] == "memory")
    assert (
        finding["effect"] == "the run stops"
        and "ranks 0-7: found up to 4.9 GiB" in finding["message"]
    )
    assert found["memory"] == 2**30
    assert run([*words, "--memory", "24"]) in (0, 2)


def test_an_ending_of_no_picture_is_refused_before_anything_is_written(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*words, "--plot", "ranks.gif"]) == 1
    assert (
        "ranks.gif: found .gif, expected a picture .png, .svg, .pdf, .html"
        in capsys.readouterr().err
    )
    assert not Path("ranks.gif").exists()


def test_ranks_are_named_in_runs() -> None:
    assert ranks_text([0]) == "rank 0" and ranks_text([0, 1, 2, 5]) == "ranks 0-2, 5"
    assert ranks_text([*range(0, 40, 4)]) == "ranks 0, 4, 8, 12, 16 and 5 more"


@pytest.mark.parametrize(
    ("size", "shown"), [(3 * 2**30, "3.00"), (2**20, "1.00"), (3 * 2**40, "3,072")]
)
def test_sizes_are_in_a_unit_of_their_own_with_three_digits(
    size: int, shown: str, tmp_path: Path
) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        draw(
            [Bar("rank 0", {"weights": size})],
            "one",
            "kept between steps",
            None,
            tmp_path / "one.svg",
        )
    text = (tmp_path / "one.svg").read_text()
    assert (
        f"> {shown}<" in text and f">{'MiB' if size < 2**30 else 'GiB'} kept between steps" in text
    )
    assert figure(6.41) == "6.41"
