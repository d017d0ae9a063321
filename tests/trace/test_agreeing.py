"""A run agrees with itself, whatever its ranks hold; ten roundings in one tensor are found at this tensor, from both sides."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bridge.trace import attach
from bridge.trace.comparison import Comparison
from bridge.trace.run import TracedRun
from bridge.trace.run_comparison import compare_runs
from tests.trace.agreeing import disagreements
from tests.trace.pairs import wrong_pairs
from tests.trace.planting import LOGS

SEEDS = range(8)


def test_generated_runs_agree_with_themselves_and_small_changes_are_found(tmp_path: Path) -> None:
    counts: Counter[str] = Counter()
    assert list(disagreements(SEEDS, tmp_path, counts)) == []
    assert counts["logs"] == len(SEEDS) and counts["changed gradient"] >= len(SEEDS) / 2


def compared(first: Path, second: Path) -> Comparison:
    """Two runs, compared as `trace diff` does."""
    return compare_runs(TracedRun.read(first), TracedRun.read(second), every=False)


class Deep(nn.Module):
    """Two blocks and running statistics; a rank leaves out a block, as stochastic depth does."""

    def __init__(self, skipped: int | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.norm, self.skipped = nn.BatchNorm1d(4), skipped

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = x if index == self.skipped else x + block(x)
        return self.norm(x)  # type: ignore[no-any-return]


def by_rank(rank: int, world: int, folder: Path, way: str, rate: float) -> None:
    """A training whose ranks hold different numbers."""
    torch.manual_seed(1)
    model: nn.Module = Deep(2 if way == "depth" and rank else None)
    if way != "local":
        find = way == "depth"
        model = DistributedDataParallel(model, find_unused_parameters=find, broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    logs = LOGS.model_copy(update={"tensor_parallel": None})
    tracer = attach(model, logs, folder, optimizer=optimizer)
    for step in range(3):
        data = torch.randn(4, 4, generator=torch.Generator().manual_seed(10 * step + rank))
        optimizer.zero_grad()
        (model(data) - 1).square().mean().mul(rate if rank and step == 1 else 1.0).backward()
        optimizer.step()
    tracer.remove()


@pytest.mark.parametrize("way", ["norms", "depth", "local"])
def test_ranks_are_compared_with_the_same_ranks(way: str, run: Any, tmp_path: Path) -> None:
    run(2, by_rank, tmp_path / "a", way, 1.0)
    run(2, by_rank, tmp_path / "b", way, 1.5)
    assert compared(tmp_path / "a", tmp_path / "a").divergence is None
    one, other = (
        compared(tmp_path / first, tmp_path / second).divergence for first, second in ("ab", "ba")
    )
    assert one is not None and other is not None and one.name == other.name
    assert one.name.step == 2
    if way == "local":
        assert one.ranks == other.ranks == (1,), "only this rank's loss was another"


def trained(
    folder: Path, dtype: torch.dtype, kind: Any, scaled: int | None, **options: Any
) -> None:
    """Three blocks that an optimizer trains for five steps; in step `scaled`, all weights are 0.9 of what they were."""
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3))).to(
        dtype
    )
    optimizer = kind(model.parameters(), 1e-3, **options)
    tracer = attach(model, LOGS, folder, optimizer=optimizer)
    for step in range(1, 6):
        data = torch.randn(8, 16, generator=torch.Generator().manual_seed(step)).to(dtype)
        if step == scaled:
            for weight in model.parameters():
                weight.data.mul_(0.9)
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()
    tracer.remove()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_weights_that_agreed_and_are_a_tenth_smaller_are_no_rounding(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    trained(tmp_path / "good", dtype, torch.optim.AdamW, None)
    trained(tmp_path / "bad", dtype, torch.optim.AdamW, 3)
    for pair in (("good", "bad"), ("bad", "good")):
        found = compared(*(tmp_path / name for name in pair)).divergence
        assert found is not None and (found.name.step, found.name.kind) == (3, "output"), found


def test_runs_with_adafactor_are_compared(tmp_path: Path) -> None:
    trained(tmp_path / "good", torch.float32, torch.optim.Adafactor, None, eps=(None, 1e-3))
    trained(tmp_path / "bad", torch.float32, torch.optim.Adafactor, 3, eps=(1e-30, 1e-3))
    assert compared(tmp_path / "good", tmp_path / "good").divergence is None
    found = compared(tmp_path / "good", tmp_path / "bad").divergence
    assert found is not None and found.name.step == 3


def test_what_is_infinite_in_both_runs_is_equal(tmp_path: Path) -> None:
    for name in ("a", "b"):
        model = nn.Linear(4, 4)
        nn.init.constant_(model.weight, torch.inf if name == "a" else 1.0)
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        tracer = attach(model, LOGS, tmp_path / name, optimizer=optimizer)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        tracer.remove()
    assert compared(tmp_path / "a", tmp_path / "a").divergence is None
    for pair in (("a", "b"), ("b", "a")):
        assert compared(*(tmp_path / name for name in pair)).divergence is not None


class Masked(nn.Module):
    """A model that can be called with a mask."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.tok, self.head = nn.Embedding(9, 8), nn.Linear(8, 9)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(
        self, ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> Tensor:
        x = self.tok(ids)
        for block in self.blocks:
            x = block(x if attention_mask is None else x * attention_mask[..., None])
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def masked(folder: Path, mask: Tensor | None, labels: int = 1) -> None:
    """Two steps of the model, with a mask or without."""
    model = Masked()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    tracer = attach(model, LOGS, folder, optimizer=optimizer)
    for step in range(2):
        ids = torch.randint(9, (2, 5), generator=torch.Generator().manual_seed(step))
        more = {} if mask is None else {"attention_mask": mask}
        model(ids=ids, labels=(ids + labels) % 9, **more).backward()
        optimizer.step()
    tracer.remove()


def test_inputs_are_matched_by_their_keywords(tmp_path: Path) -> None:
    mask = torch.ones(2, 5)
    mask[:, 0] = 0
    masked(tmp_path / "mask", mask)
    masked(tmp_path / "other", 1 - mask)
    masked(tmp_path / "none", None)
    masked(tmp_path / "labels", None, 2)
    words = {
        ("none", "mask"): "B alone passes attention_mask to the model",
        ("mask", "none"): "A alone passes attention_mask to the model",
        ("other", "mask"): "the runs get a different attention_mask",
        ("labels", "none"): "the runs get different data",
    }
    for (first, second), claim in words.items():
        found = compared(tmp_path / first, tmp_path / second)
        assert found.diagnosis is not None and found.diagnosis.claim == claim
    assert "1:attention_mask" in str(compared(tmp_path / "other", tmp_path / "mask").divergence)


def moded(folder: Path, change: Any) -> None:
    """Two steps of blocks with dropout that starts in the second block, after a change of the model."""
    torch.manual_seed(2)
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)) for _ in range(3)]
    model = nn.Sequential(nn.Linear(8, 8), nn.ModuleList(blocks), nn.Linear(8, 1))
    model.forward = lambda x: model[2](blocks[2](blocks[1](blocks[0](model[0](x)))))  # type: ignore[method-assign]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    tracer = attach(model, LOGS, folder, optimizer=optimizer)
    for step in range(2):
        if step:
            change(model)
        torch.manual_seed(step)
        model(torch.ones(4, 8, requires_grad=True)).square().mean().backward()
        optimizer.step()
    tracer.remove()


def test_parts_in_another_mode_are_named(tmp_path: Path) -> None:
    moded(tmp_path / "good", lambda model: None)
    moded(tmp_path / "part", lambda model: model[1][1][1].eval())
    moded(tmp_path / "block", lambda model: model[1][1].eval())
    for name, claim in (("part", "1.1.1"), ("block", "1.1")):
        for first, second, label in ((name, "good", "A"), ("good", name, "B")):
            found = compared(tmp_path / first, tmp_path / second)
            assert found.divergence is not None and found.divergence.name.layer == "1.1"
            assert found.diagnosis is not None
            assert found.diagnosis.claim == f"{claim} is in evaluation mode in {label} alone"


# RMSprop, NAdam and Adafactor, whose updates go with the gradient itself.
@pytest.mark.parametrize(
    "seeds",
    [
        range(5, 8),
        range(41019, 41020),
        range(571254, 571255),
        range(571345, 571346),
        range(571499, 571500),
    ],
    ids=str,
)
def test_generated_pairs_are_equal_and_a_change_is_found_in_its_step(
    tmp_path: Path, seeds: range
) -> None:
    counts: Counter[str] = Counter()
    assert list(wrong_pairs(seeds, tmp_path, counts)) == []
    assert counts == {"clean": len(seeds), "changed": len(seeds)}
