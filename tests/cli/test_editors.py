"""The JSON Schema that editors get: it takes what the reader takes, and refuses a name or kind that the reader refuses."""

from __future__ import annotations

import json
from typing import Any

import pytest

import compat
from bridge.cli import run
from tests.stacks.deepspeed.test_deepspeed_auto import HF

GOOD: dict[str, Any] = {
    "train_batch_size": 8,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
}
WRONG: list[dict[str, Any]] = [
    {**GOOD, "train_batch_sise": 8},
    {**GOOD, "train_batch_size": "many"},
    {**GOOD, "bf16": {"enabled": 3}},
    {**GOOD, "zero_optimization": {"stage": 7}},
    {**GOOD, "zero_optimization": {"stage3_max_live_parameters": "auto"}},
    {**GOOD, "code": {"pipeline_stages": 2}},
]


def validator(capsys: pytest.CaptureFixture[str], name: str) -> Any:
    """What judges by the printed schema."""
    jsonschema = pytest.importorskip("jsonschema")
    assert run(["show", name, "--schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@pytest.mark.parametrize("name", compat.names())
def test_every_stack_has_one(capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert not list(validator(capsys, name).iter_errors({}))


def test_it_judges_files_of_deepspeed(capsys: pytest.CaptureFixture[str]) -> None:
    judge = validator(capsys, "deepspeed")
    for data in (GOOD, HF):
        assert not list(judge.iter_errors(data))
    for data in WRONG:
        assert list(judge.iter_errors(data)), data
