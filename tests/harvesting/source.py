"""Finds a release, which is an installed package or a source tree, and reads its version."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from pathlib import Path

from packaging.version import InvalidVersion, Version

from bridge.errors import SourceError, VersionError

PARTS = ("MAJOR", "MINOR", "PATCH", "PRE_RELEASE")
"""Names of the variables in a `package_info.py` that together form the version."""
STATED = re.compile(rf"^\s*_*(version|{'|'.join(PARTS)})_*\s*=\s*[\"']?([\w.+]*)", re.MULTILINE)


@dataclass(frozen=True)
class Package:
    """A stack as a package: its name in package registries, the name of its folder, and the name of
    the file in this folder that states the version.
    """

    name: str
    folder: str
    info: str = "package_info.py"


@dataclass(frozen=True)
class Tree:
    """A release on disk. `root` is the folder to add to Python's path."""

    package: Package
    root: Path
    release: str

    @property
    def folder(self) -> Path:
        """The package."""
        return self.root / self.package.folder


def locate(package: Package, release: str, path: Path | None = None) -> Tree:
    """Return the release in the folder `path`, or the installed release.

    Raises `SourceError` or `VersionError` if the release is not there.
    """
    if path is not None and not (path / package.folder).is_dir():
        raise SourceError(
            f"{path}: no folder {package.folder} in it; name a source tree or an installation of "
            f"{package.name}"
        )
    dist: Distribution | None = None
    for one in distributions(path=[str(path)]) if path else ():
        # Registries take `_` and `-` for the same; metadata has either.
        if str(one.metadata["Name"]).lower().replace("_", "-") == package.name:
            dist = one
            break
    if path is None:
        try:
            dist = distribution(package.name)
        except PackageNotFoundError:
            advice = (
                f"pip install --no-deps {package.name}=={release}, or name its source with --from"
            )
            raise VersionError(f"{package.name}: not installed; {advice}") from None
    root = path or Path(str(dist.locate_file("") if dist else ""))
    version = dist.version if dist else version_in(root / package.folder / package.info)
    if not same(release, version):
        advice = (
            f"pip install --no-deps {package.name}=={release}, or name its source tree with --from"
        )
        raise VersionError(
            f"{package.name}: found {version} in {root}, expected {release}; {advice}"
        )
    return Tree(package, root.resolve(), release)


def version_in(file: Path) -> str:
    """Return the version that a file states, by name, in parts or as its only text. The file is not executed."""
    try:
        text = file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"{file}: has no version ({error})") from None
    parts: dict[str, str] = dict(STATED.findall(text))
    if parts.keys() >= {*PARTS[:3]}:
        return ".".join(parts[name] for name in PARTS[:3]) + parts.get(PARTS[3], "")
    version = parts.get("version", text.strip())
    if not re.fullmatch(r"\d[\w.+]*", version):
        raise SourceError(f"{file}: sets neither version nor {', '.join(PARTS[:3])}")
    return version


def same(release: str, version: str) -> bool:
    """Return whether a tree that states `version` is `release`.

    A tree between two releases may state the version of the release before or after.
    """
    try:
        target, have = Version(release), Version(version)
    except InvalidVersion:
        return release == version
    between = target.is_devrelease or target.is_postrelease
    return target.public == have.public or (between and target.base_version == have.base_version)
