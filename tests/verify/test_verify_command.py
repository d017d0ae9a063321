"""The `verify` command: a report for people and for programs, exit codes, and errors that say what to do."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bridge.api import verify as command
from bridge.cli import run as stagebridge
from bridge.plan.plan import Plan
from bridge.verify.local import MARK
from bridge.verify.measure import Distance
from bridge.verify.size import Size, changes, is_taken
from tests.common.schemas import problems

ZERO3 = Path(__file__).parents[2] / "examples" / "fast_llm" / "batch_0.3.0.yaml"
"""Shards weights in a pipeline, which only the native engine can run."""
WORDS = ["verify", str(ZERO3), "--from-version", "0.3.0", "--to", "automodel", "--ranks", "2"]


def test_one_run_on_two_local_ranks_from_file_to_verdict(planted: Path) -> None:
    command = [sys.executable, "-P", "-m", "stagebridge", *WORDS, "--steps", "2", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=planted, check=False)
    found = json.loads(done.stdout)
    assert not problems("verify", found)
    assert found["exit_code"] == done.returncode == {"in part": 3, "differs": 2}[found["verdict"]]
    assert found["ranks"] == 2 and found["changes"]["batch.global_"] == {"before": 64, "after": 4}
    reference, *others = found["runs"]
    assert reference["verdict"] == "reference" and len(reference["losses"]) == 2
    assert all(run["cause"] for run in others if run["verdict"] in ("not run", "differs"))


ROUNDING = {
    "loss": 1e-7,
    "norm": 1e-7,
    "update": 1e-5,
    "share": 1.0,
    "tensor": "head.norm.weight",
    "worst": 1e-5,
}


def run_of(**said: Any) -> dict[str, Any]:
    """An entry of `runs`."""
    usual = {
        "side": "source",
        "engine": "native engine",
        "as_written": False,
        "verdict": "reference",
        "cause": "",
    }
    return {**usual, "losses": [2.0, 1.0], "grad_norms": [1.0, None], "distance": None, **said}


def ranks_that_say(*lines: dict[str, Any]) -> Any:
    """Stands for the ranks: what they print, among what a stack prints."""

    def ranks(number: int, module: str, *arguments: str) -> Iterator[str]:
        yield "stack: hello"
        yield from (MARK + json.dumps(line) for line in lines)

    return ranks


CASES = {
    "same": (0, "Same run."),
    "in part": (
        3,
        "Proved in part: taken out: model.experts 8 -> None; neither stack ran its own file.",
    ),
    "differs": (2, "Not the same run."),
    "not run": (3, "Nothing proved: neither stack ran its own file."),
}
LACKING = {
    "in part": ["taken out: model.experts 8 -> None", "neither stack ran its own file"],
    "not run": ["neither stack ran its own file"],
}


@pytest.mark.parametrize("verdict", CASES)
def test_the_first_line_the_table_and_the_exit_code(
    verdict: str, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    other = run_of(
        side="target",
        engine="Stack 1.0",
        as_written=True,
        verdict=verdict,
        cause="its clipping",
        distance=ROUNDING,
    )
    empty = {"changes": {}, "left_out": [], "no_script": [], "judged_release": ""}
    found = {
        "verdict": verdict,
        "ranks": 2,
        **empty,
        "rounding": ROUNDING,
        "runs": [run_of(), other],
    }
    found["lacking"] = LACKING.get(verdict, [])
    monkeypatch.setattr(
        command, "run_ranks", ranks_that_say({"note": "native engine: runs"}, {"found": found})
    )
    code, words = CASES[verdict]
    assert stagebridge(WORDS) == code
    out, err = capsys.readouterr()
    assert out.splitlines()[0] == words
    assert f"target on Stack 1.0: {verdict}: its clipping" in out and "not told" in out
    assert "native engine: runs" in err and "hello" not in out + err


def test_what_the_ranks_cannot_read_is_an_error(
    monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        command,
        "run_ranks",
        ranks_that_say({"found": {"verdict": "not run", "problems": ["model: too wide"]}}),
    )
    assert stagebridge(WORDS) == 1
    assert "error: model: too wide" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["verify", "nowhere.json", "--to", "megatron"], "nowhere.json"),
        (
            ["verify", str(ZERO3), "--from-version", "0.3.0", "--to", "megatrn"],
            "did you mean megatron?",
        ),
        (["verify", str(ZERO3), "--to", "megatron", "--ranks", "0"], "'--ranks'"),
        (["verify", str(ZERO3)], "--to"),
        (
            ["train", str(ZERO3), "--from-version", "0.3.0", "--engine", "nvidia", "--fit"],
            "engine: found nvidia, expected native",
        ),
    ],
)
def test_wrong_usage_is_an_error_that_says_what_to_do(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert stagebridge(words) == 1
    assert said in capsys.readouterr().err


def test_options_of_the_native_engine_are_refused_for_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(
        json.dumps(
            {
                "train_micro_batch_size_per_gpu": 1,
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            }
        )
    )
    assert (
        stagebridge(["train", str(path), "--engine", "deepspeed", "--save", str(tmp_path / "run")])
        == 1
    )
    assert "--save: only the native engine has this option" in capsys.readouterr().err


def test_rounding_is_told_from_a_difference() -> None:
    rounding = Distance(1e-6, 1e-6, 0.05, 0.999, "head.norm.weight", 0.1)
    assert Distance(3e-6, None, 0.15, 1.003, "head.norm.weight", 0.3).beyond(rounding) == ()
    assert Distance(0.0, None, 0.15, 0.75, "head.norm.weight", 0.3).beyond(rounding) == ("weights",)
    assert Distance(1e-3, 0.5, 0.05, 1.0, "head.norm.weight", 0.3).beyond(rounding) == (
        "loss",
        "norm",
    )


def test_noise_that_passes_may_turn_the_update_as_far_as_noise_does() -> None:
    rounding = Distance(1e-4, 1e-3, 0.078, 0.9956, "block1.mlp.up", 0.3)
    assert Distance(1e-5, 6e-4, 0.219, 0.9792, "block0.mlp.up", 0.7).beyond(rounding) == ()
    assert Distance(1e-5, 6e-4, 0.219, 0.9, "block0.mlp.up", 0.7).beyond(rounding) == ("weights",)


def test_a_choice_of_experts_that_no_engine_shares_is_taken_out() -> None:
    plan = Plan.of({"model.experts": 8, "model.moe.top_k": 1, "model.moe.balance": "sinkhorn"})
    found = changes(plan, Size(1, 1, 1, 1, 1))
    assert found["model.moe.balance"] == "none" and found["model.moe.normalised"] is False
    assert is_taken("model.moe.balance", "sinkhorn", "none")
