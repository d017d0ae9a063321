"""What a launch takes from the checkpoint that it loads: Megatron's own answers, and launches with a checkpoint on disk."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bridge.cli import run
from compat.megatron.dialect import DIALECT
from tests.stacks.megatron.checkpoint_oracle import SAMPLE, answer

torch = pytest.importorskip("torch")

Row = dict[str, Any]
LAUNCH = (
    "torchrun --nproc-per-node 8 pretrain_gpt.py --load ck --micro-batch-size 1 --global-batch-size 32"
    " --train-iters 100 --lr-decay-style cosine --lr-warmup-iters 2 --bf16 --vocab-size 1000"
    " --tokenizer-type NullTokenizer --mock-data"
)
SIZES = " --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128"
SCHEDULE = {
    "max_lr": 3e-4,
    "min_lr": 3e-5,
    "lr_warmup_steps": 64,
    "num_steps": 320,
    "lr_decay_style": "cosine",
    "lr_decay_steps": 3200,
    "start_wd": 0.01,
    "end_wd": 0.01,
    "wd_incr_style": "constant",
    "wd_incr_steps": 3200,
}
NEW_RATE = " --lr 1e-4 --min-lr 1e-5"


def test_megatron_itself_gives_the_same() -> None:
    rows: list[Row] = [json.loads(line) for line in SAMPLE.read_text("utf-8").splitlines()]
    releases = {row["release"] for row in rows}
    wrong = [row for row in rows if any(row[key] != value for key, value in answer(row).items())]
    assert len(rows) >= 100 and len(releases) >= 8
    assert not wrong
    assert {row["schedule"] is None for row in rows} == {True, False}


@pytest.fixture
def told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., Any]:
    """The object that `resolve --json` prints of a launch with these flags, next to a checkpoint."""
    from argparse import Namespace

    monkeypatch.chdir(tmp_path)
    (tmp_path / "ck/iter_0000010/mp_rank_00").mkdir(parents=True)
    (tmp_path / "ck/latest_checkpointed_iteration.txt").write_text("10")
    args = Namespace(
        num_layers=4,
        hidden_size=64,
        num_attention_heads=4,
        seq_length=128,
        max_position_embeddings=128,
        add_position_embedding=True,
        position_embedding_type="rope",
        rotary_base=500000,
        swiglu=True,
        num_experts=None,
        consumed_train_samples=320,
    )
    group = {"params": [0], "max_lr": 3e-4, "min_lr": 3e-5, "is_decoupled_lr": False}
    state = {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": 10,
        "opt_param_scheduler": SCHEDULE,
        "optimizer": {"optimizer": {"param_groups": [group]}},
        "model": {"weight": torch.ones(3)},
    }
    torch.save(state, tmp_path / "ck/iter_0000010/mp_rank_00/model_optim_rng.pt")

    def call(flags: str, version: str = "0.16.1") -> Any:
        (tmp_path / "run.sh").write_text(f"{LAUNCH} {flags}\n")
        run(["resolve", "run.sh", "--from-version", version, "--json"])
        return json.loads(capsys.readouterr().out)

    return call


def values(found: Any) -> dict[str, Any]:
    return {row["setting"]: row["value"] for row in found["settings"]}


def stops(found: Any) -> list[str]:
    return [one["path"] for one in found["findings"] if one["effect"] == "the run stops"]


class TestArguments:
    def test_the_checkpoint_wins_where_it_is_forced(self, told: Callable[..., Any]) -> None:
        found = told(
            "--use-checkpoint-args --rotary-base 10000 --seq-length 64 --lr 3e-4 --min-lr 3e-5"
        )
        row = next(one for one in found["settings"] if one["setting"] == "rotary_base")
        assert row["value"] == 500000 and "model_optim_rng.pt" in json.dumps(row["winner"])
        # A length is no forced one: the launch keeps its own.
        assert values(found)["seq_length"] == 64 and values(found)["num_layers"] == 4
        assert any(
            one["path"] == "--rotary-base" and "not used" in one["message"]
            for one in found["findings"]
        )
        assert not stops(found)

    def test_a_checkpoint_that_is_not_there_is_unknown(self, tmp_path: Path) -> None:
        words = f"--use-checkpoint-args --load {tmp_path / 'none'} --micro-batch-size 1".split()
        config = DIALECT.read(words, "0.16.1", 8)
        found = next(one for one in config.findings if one.path == "use_checkpoint_args")
        assert found.unknown and found.effect.name == "NUMBERS"


class TestSchedule:
    def test_without_a_word_different_rates_stop(self, told: Callable[..., Any]) -> None:
        assert {"lr", "min_lr"} <= {*stops(told(f"{SIZES} --swiglu{NEW_RATE}"))}

    def test_the_checkpoints_schedule(self, told: Callable[..., Any]) -> None:
        found = told(f"{SIZES}{NEW_RATE} --use-checkpoint-opt_param-scheduler")
        assert not stops(found) and values(found)["lr"] == 3e-4
        assert values(found)["iteration"] == 10
        assert values(found)["consumed_train_samples"] == 320

    def test_an_override_keeps_the_groups_rates_before_the_fix(
        self, told: Callable[..., Any]
    ) -> None:
        found = told(f"{SIZES}{NEW_RATE} --override-opt_param-scheduler")
        assert not stops(found) and values(found)["lr"] == 3e-4

    def test_an_override_with_other_rates_finds_no_group(self, told: Callable[..., Any]) -> None:
        found = told(f"{SIZES}{NEW_RATE} --override-opt_param-scheduler", "0.19.0")
        assert stops(found) == ["lr", "min_lr"]

    def test_a_schedule_without_its_optimizer_begins_anew(self, told: Callable[..., Any]) -> None:
        found = told(f"{SIZES}{NEW_RATE} --no-load-optim")
        assert not stops(found) and values(found)["lr"] == 1e-4
        assert values(found)["opt_param_scheduler.num_steps"] == 0
        assert values(found)["iteration"] == 10

    def test_another_model_stops(self, told: Callable[..., Any]) -> None:
        sizes = SIZES.replace("--hidden-size 64", "--hidden-size 128")
        assert stops(told(f"{sizes}{NEW_RATE} --no-load-optim")) == ["hidden_size"]

    def test_fine_tuning_begins_anew(self, told: Callable[..., Any]) -> None:
        found = told(f"{SIZES}{NEW_RATE} --finetune")
        assert not stops(found) and values(found)["iteration"] == 0
        assert values(found)["consumed_train_samples"] == 0


@pytest.mark.parametrize(
    "change",
    [
        {"checkpoint_version": "three"},
        {"iteration": [10]},
        {"opt_param_scheduler": {**SCHEDULE, "lr_warmup_steps": "64"}},
        {"opt_param_scheduler": 7},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_damaged_state_is_unknown(
    told: Callable[..., Any], tmp_path: Path, change: dict[str, Any]
) -> None:
    path = tmp_path / "ck/iter_0000010/mp_rank_00/model_optim_rng.pt"
    torch.save(torch.load(path, weights_only=False) | change, path)
    found = next(one for one in told(f"{SIZES}{NEW_RATE}")["findings"] if one["path"] == "load")
    assert "damaged" in found["message"] and found["effect"] == "different numbers"
