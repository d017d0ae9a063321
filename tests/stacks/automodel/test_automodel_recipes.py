"""Real recipes: all are read, written back as they were, and converted; golden ones mean what their authors worked out."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import bridge
import compat
from bridge.files import load
from bridge.plan.free_sections import otherwise
from bridge.plan.plan import Plan
from bridge.stack.dialect import Config, Dialect
from bridge.stack.rules import HABITS, Effect
from bridge.translation.translate import Result, translate
from compat.automodel.rules.table import DATA, DOCUMENTS, STREAMS

AUTOMODEL = compat.load("automodel")
EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "automodel"
OTHERS = tuple(compat.load(name) for name in compat.names() if name != "automodel")
GOLDEN = sorted(EXAMPLES.glob("*.yaml"))


@pytest.fixture(scope="module")
def recipes(shared: Path | None) -> dict[str, Config]:
    """Every recipe by name: of the shared folder, else the golden ones."""
    folder = shared / "corpus" / "automodel" if shared else EXAMPLES
    return {path.name: AUTOMODEL.read(path) for path in sorted(folder.glob("*.yaml"))}


def test_all_are_read(recipes: dict[str, Config], shared: Path | None) -> None:
    assert len(recipes) == (71 if shared else len(GOLDEN))


def test_they_are_written_as_they_were(recipes: dict[str, Config], tmp_path: Path) -> None:
    for name, config in recipes.items():
        AUTOMODEL.write(config, tmp_path / name)
        again = AUTOMODEL.read(tmp_path / name)
        assert (again.given, again.effective) == (config.given, config.effective), name


def test_nothing_in_a_file_is_lost(recipes: dict[str, Config], shared: Path | None) -> None:
    """Sections, settings and values of the file are those of the text that is written, types and nulls aside."""
    folder = shared / "corpus" / "automodel" if shared else EXAMPLES
    for name, config in recipes.items():
        read, written = load(folder / name).data, load(config.text()).data
        assert {
            path: value for path, value in leaves(read) if value not in (None, "none", "None")
        }.keys() <= dict(leaves(written)).keys(), name


def leaves(data: object, path: str = "") -> Iterator[tuple[str, object]]:
    if isinstance(data, dict) and data:
        for name, inner in data.items():
            yield from leaves(inner, f"{path}.{name}".removeprefix("."))
    else:
        yield path, data


def test_they_survive_a_plan(recipes: dict[str, Config]) -> None:
    for name, config in recipes.items():
        plan = bridge.lift(config)
        again = bridge.lift(bridge.lower(plan, AUTOMODEL)).values()
        # Which documents see each other is decided by the data set, which no plan has.
        data = str((config.given.get(DATA) or {}).get("_target_") or "").rpartition(".")[2]
        apart = {f"habits.{name}" for name in DOCUMENTS} if data in STREAMS else set()
        assert again == {k: v for k, v in plan.values().items() if k not in apart}, name


@pytest.fixture(scope="module")
def launched(recipes: dict[str, Config]) -> dict[str, Config]:
    """Every recipe on the fewest ranks that hold its mesh."""
    return {
        name: AUTOMODEL.config(config.given, config.version, ranks(config))
        for name, config in recipes.items()
    }


def ranks(config: Config) -> int:
    sizes = config.effective.distributed
    experts = -(-sizes.ep_size // (sizes.tp_size * sizes.cp_size))
    data = sizes.get("dp_size") or max(
        experts,
        sizes.dp_replicate_size if sizes.dp_replicate_size == 1 else sizes.dp_replicate_size * 2,
    )
    return int(data * sizes.tp_size * sizes.cp_size * sizes.pp_size)


@pytest.mark.parametrize("other", OTHERS, ids=lambda dialect: dialect.name)
def test_each_converts_whatever_the_ranks(recipes: dict[str, Config], other: Dialect) -> None:
    for name, config in recipes.items():
        assert translate(config, other).written.text, name


@pytest.mark.parametrize("other", OTHERS, ids=lambda dialect: dialect.name)
def test_each_converts(launched: dict[str, Config], other: Dialect) -> None:
    """What does not survive is named: a given setting is in the findings, comes back as it was, or arrives in other words."""
    for name, config in launched.items():
        result = translate(config, other)
        lost = {
            finding.path for finding in result.findings if finding.given and finding.how is not None
        }
        back = returned(result, config)
        changed = (
            path
            for path in config.given
            if config.effective.get(path) != back.get(path) and not result.has_arrived(path)
        )
        named = {
            name for path in changed for name in otherwise(path, config.given[path], back.get(path))
        }
        assert named <= lost, name


def returned(result: Result, config: Config) -> Mapping[str, Any]:
    """Effective values after the way there and back; none where AutoModel refuses what the other side took by default."""
    try:
        return bridge.lower(
            bridge.lift(result.config), AUTOMODEL, config.version, config.world_size
        ).effective
    except bridge.BridgeError:
        return {}


@pytest.mark.parametrize("other", OTHERS, ids=lambda dialect: dialect.name)
def test_carry_over_brings_each_back(launched: dict[str, Config], other: Dialect) -> None:
    for name, config in launched.items():
        there = translate(config, other)
        back = translate(there.config, AUTOMODEL, config.version, carry=there.carry)
        assert back.config.given == config.given, name


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_golden_recipes_mean_what_they_say(path: Path) -> None:
    golden = json.loads(path.with_suffix(".plan.json").read_text(encoding="utf-8"))
    config = AUTOMODEL.read(path, golden["version"], golden["world_size"])
    values = {
        path: value
        for path, value in bridge.lift(config).values().items()
        if not path.startswith(HABITS)
    }
    assert json.loads(json.dumps(values)) == golden["plan"]


def test_there_are_golden_recipes() -> None:
    assert len(GOLDEN) >= 4
    assert all("# Origin:" in path.read_text(encoding="utf-8") for path in GOLDEN)


def test_findings_on_a_recipe_say_what_they_do() -> None:
    config = AUTOMODEL.read(EXAMPLES / "interleaved.yaml")
    result = translate(config, compat.load("megatron"))
    found = {finding.path: finding for finding in result.findings if finding.given}
    named = found["model.config.pretrained_model_name_or_path"]
    assert named.effect is Effect.NUMBERS, "the recipe is the model"
    assert "distributed.tp_size" not in found
    assert "step_scheduler.global_batch_size" not in found


def test_a_ramp_of_the_decay_leaves_a_constant_rate_constant() -> None:
    """Both stand in one section, and a section without a style is a cosine."""
    plan = Plan.of(
        {
            "optimizer.decay_ramp.shape": "linear",
            "optimizer.decay_ramp.start": 0.0,
            "optimizer.decay_ramp.end": 0.1,
            "optimizer.schedule.name": "constant",
            "run.steps": 9,
        }
    )
    kept = bridge.lift(bridge.lower(plan, AUTOMODEL))
    again = bridge.lift(bridge.lower(kept, AUTOMODEL))
    assert again.optimizer.schedule == kept.optimizer.schedule
    assert (kept.optimizer.schedule.name, kept.optimizer.decay_ramp.shape) == ("constant", "linear")
