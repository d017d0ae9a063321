"""The package as it is installed: its files, its metadata, and the commands that the README promises."""

from __future__ import annotations

import re
import tomllib
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution
from importlib.resources import files
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import bridge
import compat
import stagebridge

HOME = Path(__file__).resolve().parents[1]
FRONT = HOME / "bridge" / "cli" / "front" / "stagebridge"
"""The package that the wheel puts beside the others."""
PROJECT = tomllib.loads((HOME / "pyproject.toml").read_text())["project"]
README = (HOME / "README.md").read_text()
TESTS = "pip install -c constraints.txt tox && tox"
DEMO = "pip install -c constraints.txt '.[engine]' && stagebridge demo"


def test_version_is_said_once() -> None:
    assert PROJECT["version"] == bridge.__version__
    try:
        installed = distribution("stagebridge")
    except PackageNotFoundError:
        pytest.skip("not installed")
    assert installed.version == bridge.__version__


@pytest.mark.parametrize("package", ["bridge", "compat", "stagebridge"])
def test_types_are_shipped(package: str) -> None:
    assert files(package).joinpath("py.typed").is_file()


def test_package_data_is_shipped() -> None:
    """Every data file of the checkout is where the imported package is."""
    places = {bridge: HOME / "bridge", compat: HOME / "compat", stagebridge: FRONT}
    for package, place in places.items():
        files_in_it = [
            path
            for path in place.rglob("*")
            if path.is_file() and path.suffix not in (".py", ".pyc")
        ]
        data = [path for path in files_in_it if place == FRONT or FRONT not in path.parents]
        assert data
        for path in data:
            assert (Path(str(package.__file__)).parent / path.relative_to(place)).is_file(), path


def test_public_names_exist() -> None:
    for name in bridge.__all__:
        assert getattr(bridge, name)
    with pytest.raises(AttributeError):
        _ = bridge.nothing


def test_the_script_points_at_a_function() -> None:
    module, _, function = PROJECT["scripts"]["stagebridge"].partition(":")
    assert callable(getattr(import_module(module), function))


def test_a_converter_alone_needs_no_torch() -> None:
    heavy = {"torch", "deepspeed", "megatron-core", "transformers", "numpy", "matplotlib"}
    assert not {Requirement(line).name for line in PROJECT["dependencies"]} & heavy


def test_extras() -> None:
    assert set(PROJECT["optional-dependencies"]) == {
        "engine",
        "deepspeed",
        "megatron",
        "huggingface",
        "plot",
        "test",
    }


def test_every_requirement_is_pinned() -> None:
    pins = dict(
        re.findall(r"^([\w.-]+)==(\S+)$", (HOME / "constraints.txt").read_text(), re.MULTILINE)
    )
    pinned = {
        name.lower().replace("_", "-").replace(".", "-"): version for name, version in pins.items()
    }
    extras = [line for lines in PROJECT["optional-dependencies"].values() for line in lines]
    for line in [*PROJECT["dependencies"], *extras, "tox", "ruff", "mypy", "hatchling"]:
        wanted = Requirement(line)
        version = pinned.get(wanted.name.replace("_", "-").replace(".", "-"))
        assert version, f"{line} is not pinned"
        assert wanted.specifier.contains(version), f"{line} does not admit {version}"
        assert "+" not in version


def test_the_readme_has_the_two_commands() -> None:
    assert DEMO in README
    assert TESTS in README
    assert TESTS in (HOME / ".ci" / "run").read_text()


def test_the_readme_example_runs() -> None:
    """The Python block of the README, as it stands there."""
    code = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert code
    for block in code:
        exec(compile(block, "README.md", "exec"), {})


def test_nothing_names_a_machine() -> None:
    """No path of a machine and no host of a registry in what is published."""
    words = re.compile(
        r"/(?:root|home|work|opt|tmp)/|https?://(?!(?:www\.)?(?:apache\.org|github\.com))"
    )
    for path in [
        HOME / "README.md",
        HOME / "CHANGELOG.md",
        HOME / "CONTRIBUTING.md",
        *HOME.glob("docs/*.md"),
        HOME / "constraints.txt",
    ]:
        assert not words.search(path.read_text()), path
