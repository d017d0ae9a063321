"""Fields that look like those of another stack are translated, or declined with a reason."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "counterparts.py"


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(sys, "argv", [str(PROGRAM)])
    return runpy.run_path(str(PROGRAM))


def test_every_proposal_has_an_answer(
    program: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert program["main"]() == 0, capsys.readouterr().out
    told = capsys.readouterr().out.splitlines()
    assert len(told) > 100 and told[-1].endswith(", 0 open, 0 declined in vain")


@pytest.mark.parametrize("change", ["forgotten", "stale"])
def test_it_fails_on_a_proposal_without_an_answer_and_on_an_answer_without_a_proposal(
    program: dict[str, Any], change: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reasons = json.loads(program["DECLINED"].read_text("utf-8"))
    mine, others = next(iter(next(iter(reasons.values())).items()))
    if change == "forgotten":
        others.pop()
    else:
        others.append("kite:wing")
    program["main"].__globals__["DECLINED"] = tmp_path / "declined.json"
    (tmp_path / "declined.json").write_text(json.dumps(reasons), "utf-8")
    assert program["main"]() == 1
    assert f"{mine} ~ " in capsys.readouterr().out


def test_reasons_say_something(program: dict[str, Any]) -> None:
    assert all(
        len(reason.split()) > 2 for reason in json.loads(program["DECLINED"].read_text("utf-8"))
    )
