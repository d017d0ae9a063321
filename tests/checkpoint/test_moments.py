"""Moments that no run of Adam can have are found; those of a run never are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st

from bridge.checkpoint import interface, moments, writing
from bridge.checkpoint.hub import Hub, Origin, Parameter, ParameterGroup
from bridge.checkpoint.lazy import Held
from bridge.cli import run as command
from compat.deepspeed.checkpoint.universal import Universal

BETAS = st.sampled_from([(0.9, 0.999), (0.9, 0.95), (0.0, 0.5), (0.99, 0.999), (0.5, 0.9)])


def trained(
    seed: int, steps: int, betas: tuple[float, float], size: int, exponent: float
) -> dict[str, dict[str, torch.Tensor]]:
    """The moments of two parameters after steps of torch's own Adam, with gradients that are now and then 0 or huge."""
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.nn.Parameter(torch.zeros(size)) for _ in range(2)]
    optimizer = torch.optim.AdamW(weights, betas=betas)
    for _ in range(steps):
        for weight in weights:
            spread = 10.0 ** (exponent * torch.rand(size, generator=generator))
            kept = torch.rand(size, generator=generator) < 0.7
            weight.grad = torch.randn(size, generator=generator) * spread * kept
        optimizer.step()
    return {
        name: {kind: optimizer.state[weight][kind] for kind in (moments.FIRST, moments.SECOND)}
        for name, weight in zip("ab", weights, strict=True)
    }


def hub(
    found: dict[str, dict[str, torch.Tensor]], betas: tuple[float, float] | None, steps: int
) -> Hub:
    """A checkpoint with these moments."""
    parameters = {
        name: Parameter(
            Held(torch.zeros(kinds[moments.FIRST].shape)),
            None,
            {k: Held(v) for k, v in kinds.items()},
            steps,
        )
        for name, kinds in found.items()
    }
    group = ParameterGroup(tuple(parameters), {} if betas is None else {"betas": list(betas)})
    return Hub(Origin("universal"), parameters, groups=(group,))


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 40), BETAS, st.integers(1, 60), st.floats(-20, 15))
def test_a_run_is_never_doubted(
    seed: int, steps: int, betas: tuple[float, float], size: int, exponent: float
) -> None:
    found = trained(seed, steps, betas, size, exponent)
    assert not list(moments.find_impossible(hub(found, betas, steps)))


@pytest.mark.parametrize("kind", [moments.FIRST, moments.SECOND])
@pytest.mark.parametrize("steps", [1, 3, 10])
def test_moments_of_another_parameter_are_named(kind: str, steps: int) -> None:
    found = trained(1, steps, (0.9, 0.999), 4096, 0.0)
    found["a"][kind], found["b"][kind] = found["b"][kind], found["a"][kind]
    assert {
        finding.path for finding in moments.find_impossible(hub(found, (0.9, 0.999), steps))
    } == {"moments.a", "moments.b"}


def test_a_second_moment_that_was_lost_is_named() -> None:
    found = trained(1, 3, (0.9, 0.999), 64, 0.0)
    found["a"][moments.SECOND] = torch.zeros(64)
    (finding,) = moments.find_impossible(hub(found, (0.9, 0.999), 3))
    assert finding.path == "moments.a" and "inf times" in finding.message


def test_without_betas_nothing_is_said() -> None:
    found = trained(1, 3, (0.9, 0.999), 64, 0.0)
    found["a"][moments.SECOND] = torch.zeros(64)
    assert not list(moments.find_impossible(hub(found, None, 3)))


def test_the_command_line_names_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a universal checkpoint without checksums, as DeepSpeed's own program leaves it."""
    written = Universal().plan(
        hub(trained(1, 3, (0.9, 0.999), 64, 0.0), (0.9, 0.999), 3), interface.Wanted()
    )
    writing.write_checkpoint(written, tmp_path / "out", (), lambda size, made: None)
    (place,) = (tmp_path / "out").glob("global_step*_universal")
    (place / "SHA256SUMS").unlink()
    assert command(["checkpoint", "inspect", str(tmp_path / "out"), "--check"]) == 0
    one, other = (place / "zero" / name / f"{moments.FIRST}.pt" for name in "ab")
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)
    capsys.readouterr()
    for words in (
        ["inspect", "--check"],
        ["convert", "--to", "native", "-o", str(tmp_path / "native")],
    ):
        assert command(["checkpoint", words[0], str(tmp_path / "out"), *words[1:]]) == 2
        assert "moments.a: exp_avg is up to" in capsys.readouterr().out
