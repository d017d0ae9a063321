"""The command `stagebridge trace`: two runs compared and one shown, as text, JSON, page and picture."""

from __future__ import annotations

import json
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest

from bridge.cli import run
from bridge.engine import initialize
from bridge.engine.models.gpt import mean_cross_entropy
from bridge.plan.plan import Plan
from bridge.trace.plugin import same_run
from tests.engine.runs import Case, microbatches, model_of
from tests.trace.faults import scaled_output
from tests.trace.traces import traced

LOGS = ("layer_outputs", "layer_gradients", "param_init", "all_param_gradients", "param_update")
PLAN = {
    "precision.compute": "fp64",
    "optimizer.name": "sgd",
    "optimizer.lr": 0.1,
    "batch.micro": 4,
    "batch.accumulation": 2,
    **{f"debug.{name}": 8 for name in LOGS},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good run, the same once more, and one that goes wrong in its second step."""
    folder = tmp_path_factory.mktemp("runs")
    for name in ("good", "again"):
        traced(0, 1, Case(PLAN), folder / name)
    case = Case(PLAN)
    engine = initialize(
        model_of(case), Plan.of(PLAN), mean_cross_entropy, seed=11, trace=folder / "bad"
    )
    for step in range(case.steps):
        if step == 1:
            scaled_output(engine, [])
        engine.train_batch(microbatches(case, engine, step))
    return folder


def said(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of one command."""
    code = run(["trace", *map(str, arguments)])
    streams = capsys.readouterr()
    return code, streams.out, streams.err


def test_equal_runs(capsys: pytest.CaptureFixture[str], runs: Path) -> None:
    code, out, _ = said(capsys, "diff", runs / "again", runs / "good")
    assert (code, out.splitlines()[-1]) == (0, "equal up to rounding")


def test_a_run_that_is_shorter_is_named(
    capsys: pytest.CaptureFixture[str], runs: Path, tmp_path: Path
) -> None:
    """One that was ended by force, say."""
    shutil.copytree(runs / "again", tmp_path / "short")
    for log in (tmp_path / "short").rglob("steps.jsonl"):
        log.write_text("".join(log.read_text().splitlines(keepends=True)[:-1]))
    code, out, _ = said(capsys, "diff", tmp_path / "short", runs / "good")
    assert code == 0 and "\nB goes on, and its steps 3 to 3 are not compared\n" in out
    assert "goes on" not in said(capsys, "diff", runs / "again", runs / "good")[1]


def test_where_runs_part(capsys: pytest.CaptureFixture[str], runs: Path) -> None:
    code, out, _ = said(capsys, "diff", runs / "bad", runs / "good")
    assert code == 2
    assert "the runs first differ at 2/forward/block1/output: fault\n" in out
    assert "looks like: A is 1.00001 times B" in out
    assert (
        "cause: block1 is the first layer whose outputs differ: because of the layer's code" in out
    )
    assert "evidence: the layers before block1 agree to 0" in out
    assert "2/forward/block2/output" in out and "steps after step 2 were left out (1); --all" in out


def test_a_test_holds_two_runs_together(runs: Path) -> None:
    same_run(runs / "again", runs / "good")
    first = r"the runs first differ at 2/forward/block1/output: fault; A is 1.00001 times B\ncause: block1"
    with pytest.raises(AssertionError, match=first):
        same_run(runs / "bad", runs / "good")


def test_json(capsys: pytest.CaptureFixture[str], runs: Path) -> None:
    code, out, _ = said(capsys, "diff", runs / "bad", runs / "good", "--json")
    found = json.loads(out)
    assert code == found["exit_code"] == 2
    assert found["divergence"] == found["faults"][0]
    assert (found["divergence"]["layer"], found["divergence"]["step"]) == ("block1", 2)
    assert 5e-6 < found["divergence"]["distance"] < 1e-5
    assert found["heat"]["embedding"]["1"] == 0.0 and found["heat"]["block1"]["2"] > 1
    assert sum(found["verdicts"].values()) > len(found["faults"])


class Parts(HTMLParser):
    """The tags of a page, and what it takes from elsewhere."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [
            name
            for name, _ in attrs
            if name in ("src", "href", "xlink:href") or name.startswith("on")
        ]

    def handle_data(self, data: str) -> None:
        self.words += data


def test_a_page_of_two_runs(capsys: pytest.CaptureFixture[str], runs: Path, tmp_path: Path) -> None:
    said(capsys, "diff", runs / "bad", runs / "good", "--html", tmp_path / "map.html")
    code, out, _ = said(capsys, "html", runs / "bad", runs / "good", "-o", tmp_path / "page.html")
    assert (code, out) == (2, f"wrote {tmp_path / 'page.html'}\n")
    text = (tmp_path / "page.html").read_text()
    assert text == (tmp_path / "map.html").read_text()
    parts = Parts(text)
    assert parts.links == [] and "script" not in parts.tags
    assert "The runs first differ at 2/forward/block1/output: fault." in parts.words
    assert "Cause: block1 is the first layer whose outputs differ" in parts.words
    assert parts.words.count("the runs first differ: 2/forward/block1/output") == 1, (
        "the frame in the map"
    )
    assert "norm of gradients of A" in parts.words and "loss of B" in parts.words
    assert parts.tags.count("figure") == 5, (
        "the map, the loss, norms of gradients, outputs and weights"
    )


def test_a_page_of_one_run(capsys: pytest.CaptureFixture[str], runs: Path, tmp_path: Path) -> None:
    code, out, _ = said(capsys, "html", runs / "good", "-o", tmp_path / "page.html")
    assert (code, out) == (0, f"wrote {tmp_path / 'page.html'}\n")
    words = Parts((tmp_path / "page.html").read_text()).words
    assert "There are no findings" in words and "Norms of gradients, by layer and step" in words
    first = (runs / "good" / "rank-00000" / "steps.jsonl").read_text().splitlines()[1]
    assert f"loss: {json.loads(first)['loss']:.4g} in step 1" in words


def test_show(capsys: pytest.CaptureFixture[str], runs: Path) -> None:
    code, out, _ = said(
        capsys,
        "show",
        runs / "good",
        "--layer",
        "block1",
        "--kind",
        "output",
        "--step",
        2,
        "--microbatches",
    )
    lines = out.splitlines()
    assert code == 0
    assert lines[2].split()[:3] == ["2/forward/block1/output", "8x6x16", "float64"]
    assert [line.split()[:2] for line in lines[3:]] == [["microbatch", "0"], ["microbatch", "1"]]


def test_show_json(capsys: pytest.CaptureFixture[str], runs: Path) -> None:
    _, out, _ = said(capsys, "show", runs / "good", "--kind", "weight", "--step", 0, "--json")
    found = json.loads(out)
    norms = [tensor for tensor in found["tensors"] if tensor["tensor"] == "norm1.weight"]
    assert [tensor["layer"] for tensor in norms] == ["block0", "block1", "block2"]
    assert {tensor["statistics"]["mean"] for tensor in norms} == {1.0}
    assert {len(tensor["samples"]) for tensor in norms} == {16}


def test_plot(capsys: pytest.CaptureFixture[str], runs: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    png = tmp_path / "norms.png"
    code, out, _ = said(
        capsys, "show", runs / "good", "--kind", "gradient", "--layer", "block0", "--plot", png
    )
    assert (code, out) == (0, f"wrote {png}\n")
    assert png.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("diff", "{runs}/none", "{runs}/good"),
            "expected the folder of a traced run, with run.json in it",
        ),
        (
            ("show", "{runs}/good", "--kind", "nothing"),
            "no tensor passes these filters; the run has steps 0 to 3, layers",
        ),
        (("show", "{runs}/good", "--statistic", "nrm"), "did you mean norm?"),
    ],
)
def test_errors(
    capsys: pytest.CaptureFixture[str], runs: Path, arguments: tuple[str, ...], message: str
) -> None:
    words = [word.format(runs=runs) for word in arguments]
    code, out, err = said(capsys, *words)
    assert (code, out) == (1, "")
    assert message in err
    assert json.loads(said(capsys, *words, "--json")[1])["exit_code"] == 1


def test_train_writes_a_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = tmp_path / "ds.json"
    config.write_text(
        '{"train_batch_size": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}}'
    )
    assert (
        run(
            [
                "train",
                str(config),
                "--steps",
                "1",
                "--trace",
                str(tmp_path / "run"),
                "--desync",
                "raise",
            ]
        )
        == 0
    )
    capsys.readouterr()
    code, out, _ = said(
        capsys, "show", tmp_path / "run", "--layer", "block3", "--kind", "output", "--json"
    )
    (found,) = json.loads(out)["tensors"]
    assert (code, found["shape"], found["step"]) == (0, [2, 64, 128], 1)
    assert len(found["samples"]) == 64 and found["missing"] == 0


def test_what_a_training_keeps_holds_no_secret_of_its_config(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Neither its checkpoint, nor its trace, nor what it prints; and all are as private as the config."""
    config, out = tmp_path / "ds.json", tmp_path / "kept"
    settings = {"train_batch_size": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}}
    config.write_text(
        json.dumps({**settings, "comet": {"enabled": False, "api_key": "not-for-you-1"}})
    )
    config.chmod(0o600)
    options = (
        "--steps",
        "1",
        "--trace",
        str(out / "run"),
        "--save",
        str(out / "saved"),
        "--desync",
        "dump",
    )
    assert run(["train", str(config), *options]) == 0
    streams = capsys.readouterr()
    assert "not-for-you-1" not in streams.out + streams.err
    kept = [path for path in out.rglob("*") if path.is_file()]
    assert {path.name for path in kept} >= {"run.json", "state.json"}
    assert not [path for path in kept if b"not-for-you-1" in path.read_bytes()]
    assert not [path for path in kept if path.stat().st_mode & 0o077]


def test_limits_are_options(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bridge.engine import comm

    config = tmp_path / "ds.json"
    config.write_text(
        '{"train_batch_size": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}}'
    )
    try:
        assert run(["train", str(config), "--steps", "1", "--silence", "5", "--timeout", "70"]) == 0
        assert (comm.SILENCE, comm.TIMEOUT) == (5, 70)
        monkeypatch.setenv(comm.SILENT, "7")
        assert run(["train", str(config), "--steps", "1"]) == 0
        assert (comm.SILENCE, comm.TIMEOUT) == (7, 600)
        monkeypatch.setenv(comm.GIVEN_UP, "soon")
        assert run(["train", str(config), "--steps", "1"]) == 1
        assert (
            "STAGEBRIDGE_TIMEOUT: found 'soon', expected a number of seconds, at least 1"
            in capsys.readouterr().err
        )
    finally:
        monkeypatch.undo()
        comm.patient(None, None)


def test_an_unknown_policy(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["train", "none.json", "--desync", "rise"]) == 1
    assert (
        "--desync: found rise, expected log or raise or dump; did you mean raise?"
        in capsys.readouterr().err
    )
