"""Fixtures for all tests: the folder of facts, where STAGEBRIDGE_SHARED names one; nothing else outside the repository."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from tests.engine.pool import Pool, Run

settings.register_profile(
    "suite",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("suite")
"""No test depends on the speed of the machine, and every run draws the same."""

VARIABLE = "STAGEBRIDGE_SHARED"
"""Names the folder of truth, facts and corpus."""
NEED_TORCH = ("checkpoint", "engine", "trace", "verify")
HOME = Path(__file__).resolve().parents[1]
PLANTED = (
    *("json", "torch", "typing", "bridge", "compat", "stagebridge"),
    *("contextlib", "functools", "types", "warnings", "collections"),
)

if (
    find_spec("stagebridge") is None
):  # a checkout that is not installed: this process and others find the package where it lies
    places = [str(HOME), str(HOME / "bridge" / "cli" / "front")]
    sys.path += places
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [*places, *filter(None, [os.environ.get("PYTHONPATH")])]
    )

# Tests are one package, which this process and ranks import from the root of the repository. The root comes last, so that what is
# installed is what is tested.
sys.path.append(str(HOME))

collect_ignore = [] if find_spec("torch") else list(NEED_TORCH)


def named() -> Path | None:
    """The folder that the variable names, None where it is not set."""
    value = os.environ.get(VARIABLE)
    return Path(value).resolve() if value else None


def pytest_configure() -> None:
    """Refuse a folder without facts at once: a typing error must not pass as a run on the samples."""
    folder = named()
    if folder is not None and not (folder / "truth").is_dir():
        raise pytest.UsageError(
            f"{VARIABLE}: no folder truth in {folder}; name the folder of facts, or unset the variable"
        )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what takes the folder, directly or through another fixture: `pytest -m shared` runs all of that.

    Laws are marked too: every run draws the same, and they hold of tables, so one version of Python is enough for them. Fuzzers
    of readers are no laws: what Python's own parsers and limits do differs. What is marked `outside` runs where it is asked for.
    """
    wanted = "outside" in config.option.markexpr
    for item in items:
        if item.get_closest_marker("outside") and not wanted:
            item.add_marker(
                pytest.mark.skip(reason="takes long, or more than packages; pytest -m outside")
            )
        if "shared" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.shared)
        if (
            getattr(getattr(item, "obj", None), "is_hypothesis_test", False)
            and "fuzz" not in item.path.parts
        ):
            item.add_marker(pytest.mark.once)


@pytest.fixture
def planted(tmp_path: Path) -> Iterator[Path]:
    """A folder with files that Python would import instead of its own, ours and torch's; that none of them ran is checked."""
    folder, ran = tmp_path / "planted", tmp_path / "ran"
    folder.mkdir()
    for name in PLANTED:
        (folder / f"{name}.py").write_text(
            f"open({str(ran)!r}, 'a').write(__file__ + chr(10))\nraise SystemExit('planted')\n"
        )
    yield folder
    assert not ran.exists(), ran.read_text()


@pytest.fixture(scope="session")
def shared() -> Path | None:
    """The folder of facts, or None: a test then uses the committed samples."""
    return named()


@pytest.fixture(scope="session")
def whole(shared: Path | None) -> Path:
    """The folder of facts, for a test that no committed sample can serve; skipped without it."""
    if shared is None:
        pytest.skip(f"needs the folder of facts; name it with {VARIABLE}")
    return shared


@pytest.fixture(autouse=True)
def as_wide_as_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports are as wide as a pipe's, whatever terminal the tests run in."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture(scope="session")
def pools() -> Iterator[dict[int, Pool]]:
    """Pools by world size, started on first use and ended with the test run."""
    import torch

    found: dict[int, Pool] = {}
    torch.set_num_threads(1)
    yield found
    for pool in found.values():
        pool.close()


@pytest.fixture(scope="module")
def foreign(pools: dict[int, Pool]) -> Iterator[None]:
    """For modules that run other engines in the pools: these leave process groups behind, whose threads wake all the time."""
    yield
    for pool in pools.values():
        pool.close()


@pytest.fixture
def run(pools: dict[int, Pool]) -> Run:
    """`run(world, function, *arguments)`: results by rank; one rank runs in this process."""

    from tests.engine.pool import Pool

    def start(world: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        if world == 1:
            return [function(0, 1, *arguments)]
        result: list[Any] = pools.setdefault(world, Pool(world)).run(function, *arguments)
        return result

    return start


@pytest.fixture(scope="module")
def leave_group() -> Iterator[None]:
    """One rank runs in this process, and a drop-in leaves its group and LOCAL_RANK there as DeepSpeed does."""
    local_rank = os.environ.get("LOCAL_RANK")
    yield
    from torch import distributed

    if distributed.is_initialized():
        distributed.destroy_process_group()
    os.environ.pop("LOCAL_RANK", None)
    if local_rank is not None:
        os.environ["LOCAL_RANK"] = local_rank
