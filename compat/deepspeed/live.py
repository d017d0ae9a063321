"""Builds the real config object of the installed DeepSpeed, as for a run on a given number of
ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from bridge.errors import ConfigError, VersionError
from bridge.stack.dialect import Config
from bridge.stack.extras import install_command
from compat.deepspeed.batch import ranks
from compat.deepspeed.formats import plain


def release_of_package() -> str:
    """Return the release of the installed DeepSpeed. Raises `VersionError` if DeepSpeed is not
    installed.
    """
    try:
        return version("deepspeed").partition("+")[0]
    except PackageNotFoundError:
        raise VersionError(
            f"deepspeed: not installed; {install_command('deepspeed')}, or write the config as json"
        ) from None


def build(config: Config) -> Any:
    """Return the installed release's DeepSpeedConfig for `config`, with the batch divided over the
    config's data-parallel ranks.
    """
    release = release_of_package()
    if release != config.version:
        raise VersionError(
            f"deepspeed: the config is for DeepSpeed {config.version}, but {release} is"
            f" installed; read or write the config for {release}"
        )
    sizes = ranks(config.effective, config.version, config.world_size)
    return real(plain(config.given, config.opaque), sizes.dividing)


def real(data: dict[str, Any], data_parallel: int) -> Any:
    """Return the DeepSpeedConfig of `data`, with the batch divided over `data_parallel` ranks.
    Raises `ConfigError` if DeepSpeed refuses `data`.
    """
    from deepspeed.runtime.config import DeepSpeedConfig

    with _world(data_parallel):
        try:
            return DeepSpeedConfig(data, mpu=_Groups(data_parallel))
        # DeepSpeed refuses with AssertionError, ValueError,
        # TypeError, KeyError and pydantic's errors.
        except Exception as error:
            raise ConfigError(
                f"deepspeed: refused by DeepSpeed itself: {type(error).__name__}: {error}"
            ) from error


class _Groups:
    """Replaces an mpu. It has the only method of an mpu that DeepSpeedConfig calls."""

    def __init__(self, data_parallel: int) -> None:
        self._ranks = data_parallel

    def get_data_parallel_world_size(self) -> int:
        return self._ranks


class _Ranks:
    """Replaces the process group. Without a process group, DeepSpeedConfig assumes one rank and
    ignores the mpu.
    """

    def __init__(self, world_size: int) -> None:
        self._ranks = world_size

    def get_rank(self, group: Any = None) -> int:
        return 0

    def get_world_size(self, group: Any = None) -> int:
        return self._ranks


@contextmanager
def _world(world_size: int) -> Iterator[None]:
    """Context in which DeepSpeed's config module sees `world_size` ranks."""
    from deepspeed.runtime import config as module

    before = module.dist
    module.dist = _Ranks(world_size)
    try:
        yield
    finally:
        module.dist = before
