"""Launchers: what each one sets is understood, and half of it is refused."""

from __future__ import annotations

import pytest

from bridge.engine.environment import Environment, detect
from bridge.errors import ConfigError

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none",
}  # fmt: skip
DEEPSPEED = {
    "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_SIZE": "2", "CROSS_RANK": "0", "CROSS_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29501",
}  # fmt: skip
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NODELIST": "n[03-06,9],m2",
    "SLURM_JOB_ID": "71234",
}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, Environment()),
        (TORCHRUN, Environment(3, 4, 1, "a:29500", "torchrun")),
        (DEEPSPEED, Environment(1, 2, 1, "127.0.0.1:29501", "deepspeed")),
        (SLURM, Environment(5, 8, 1, "n03:31234", "slurm")),
        (
            {**SLURM, "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1", "MASTER_PORT": "7"},
            Environment(5, 8, 1, "10.0.0.1:7", "slurm"),
        ),
        ({"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, Environment()),
        ({"RANK": "0", "WORLD_SIZE": "1"}, Environment(launcher="environment")),
    ],
)
def test_launchers(variables: dict[str, str], expected: Environment) -> None:
    assert detect(variables) == expected


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "0"}, "WORLD_SIZE: not set, although other variables of a launcher are set"),
        ({**TORCHRUN, "RANK": "x"}, "RANK: found 'x', expected a whole number"),
        ({**TORCHRUN, "RANK": "4"}, r"RANK: found 4, expected 0 to WORLD_SIZE - 1 \(3\)"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR: not set"),
        ({**SLURM, "SLURM_NODELIST": ""}, "SLURM_NODELIST: not set"),
    ],
)
def test_half_an_environment_is_refused(variables: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        detect(variables)
