"""What Fast-LLM accepts, refuses and derives is what we accept, refuse and derive."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import bridge
import compat
from bridge.errors import ConfigError
from bridge.stack.dialect import Dialect

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "fast_llm"
EXPECTED: dict[str, Any] = json.loads((EXAMPLES / "expected.json").read_text("utf-8"))
STAGES = "model.multi_stage."
ROWS = [
    json.loads(line)
    for line in (Path(__file__).parent / "releases.jsonl").read_text("utf-8").splitlines()
]
LEVEL, WEIGHTS, GRADS = "zero_stage", "num_weight_buffers", "num_grad_buffers"


def fast_llm() -> Dialect:
    return compat.load("fast_llm")


def stages(**given: Any) -> dict[str, Any]:
    return {"model": {"multi_stage": given}}


def is_dump(given: dict[str, Any]) -> bool:
    """Whether a refused input is what a dump of all fields writes for a config that Fast-LLM accepts."""
    level = given.get(LEVEL)
    return (
        {LEVEL, WEIGHTS, GRADS} <= given.keys()
        and level in (2, 3)
        and given[GRADS] == 2
        and (level == 2 or given[WEIGHTS] == 2)
    )


def test_accepted_inputs_have_the_same_effective_values(facts: list[dict[str, Any]]) -> None:
    accepted = [row for row in facts if row["accepted"]]
    assert len(accepted) >= 100
    for row in accepted:
        values = getattr(fast_llm().read({row["config"]: row["input"]}), row["config"])
        assert {name: values[name] for name in row["effective"]} == row["effective"], row


def test_refused_inputs_are_refused(facts: list[dict[str, Any]]) -> None:
    refused = [row for row in facts if not row["accepted"]]
    assert len(refused) >= 100
    accepted = []
    for row in refused:
        try:
            fast_llm().read({row["config"]: row["input"]})
        except ConfigError as error:
            assert all(": " in problem for problem in error.problems)
        else:
            accepted.append(row["input"])
    assert all(map(is_dump, accepted)), accepted
    assert len(accepted) == 1


@pytest.mark.parametrize("name", EXPECTED)
def test_examples_mean_what_their_origin_says(name: str) -> None:
    expected = EXPECTED[name]
    config = fast_llm().read(EXAMPLES / name, expected["version"])
    plan = bridge.lift(config).values()
    assert {path: config.effective.get(path) for path in expected["effective"]} == expected[
        "effective"
    ]
    assert {path: plan.get(path) for path in expected["plan"]} == expected["plan"]
    assert {
        name: config.distributed[name] for name in expected.get("distributed", {})
    } == expected.get("distributed", {})


def test_every_example_has_an_expectation() -> None:
    assert {path.name for path in EXAMPLES.iterdir()} - {"README.md", "expected.json"} == set(
        EXPECTED
    )


def test_recipes_convert_to_every_other_stack(corpus: list[Path]) -> None:
    assert corpus
    for path in corpus:
        config = fast_llm().read(path, world_size=8)
        assert config.multi_stage["num_grad_buffers"] == 2
        for name in set(compat.names()) - {"fast_llm"}:
            result = bridge.translate(config, compat.load(name))
            lost = tuple(finding.path for finding in result.findings)
            assert all(
                any(path.startswith(section) for path in lost)
                for section in ("model.base_model", "data.datasets")
            )


# Levels and buffers


@pytest.mark.parametrize("level", (1, 2, 3))
def test_levels_set_buffers(level: int) -> None:
    values = fast_llm().read(stages(zero_stage=level)).multi_stage
    assert values[GRADS] == (2 if level >= 2 else None)
    assert values[WEIGHTS] == (2 if level >= 3 else None)


@pytest.mark.parametrize(
    "given",
    (
        {LEVEL: 0},
        {LEVEL: 4},
        {LEVEL: True},
        {LEVEL: 2, GRADS: 4},
        {LEVEL: 2, GRADS: 2},
        {LEVEL: 2, GRADS: None},
        {LEVEL: 3, WEIGHTS: 2},
        {LEVEL: 3, GRADS: 2, WEIGHTS: 3},
        {LEVEL: 3, GRADS: 2, WEIGHTS: None},
        {WEIGHTS: 0},
        {"stages_per_pipeline_stage": 2},
        {"layers_per_stage": "2"},
        {"debug_layer_outputs": 2.0},
        {"debug_layer_output": 2},
        {"compile_all": True},
    ),
)
def test_what_fast_llm_refuses(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"multi_stage\.\w+"):
        fast_llm().read(stages(**given))


@pytest.mark.parametrize(
    "given",
    ({LEVEL: 2, WEIGHTS: 4}, {LEVEL: 1, GRADS: 1}, {GRADS: 3}, {WEIGHTS: None, LEVEL: None}),
)
def test_what_fast_llm_accepts(given: dict[str, Any]) -> None:
    values = fast_llm().read(stages(**given)).multi_stage
    assert {name: values[name] for name in given} == given


def test_before_0_3_a_level_replaces_buffers_and_says_so() -> None:
    config = fast_llm().read(stages(zero_stage=3, num_grad_buffers=5), "0.2.0")
    assert config.multi_stage[GRADS] == 2
    assert any(
        finding.path == STAGES + GRADS and "overwritten with 2" in finding.message
        for finding in config.findings
    )


def test_dumps_load_when_they_are_consistent(facts: list[dict[str, Any]]) -> None:
    dumps = [
        row["effective"] for row in facts if row["accepted"] and row["config"] == "multi_stage"
    ]
    assert sum((dump[LEVEL] or 0) >= 2 for dump in dumps) >= 3
    for dump in dumps:
        config = fast_llm().read({"model": {"multi_stage": {"type": None, **dump}}})
        assert config.multi_stage == dump
        assert fast_llm().read(config.text()).given == config.given
    with pytest.raises(ConfigError, match="zero_stage"):
        fast_llm().read({"multi_stage": {**dumps[0], LEVEL: 3, GRADS: 2, WEIGHTS: 5}})


@pytest.mark.parametrize(
    ("word", "first", "before"), [("uint32", "0.4.0", "0.3.0"), ("uint16", "0.2.0", "0.1.0")]
)
def test_a_format_is_known_from_its_release_on(word: str, first: str, before: str) -> None:
    given = {"model": {"distributed": {"optimization_dtype": word}}}
    assert fast_llm().read(given, first).effective["model.distributed.optimization_dtype"] == word
    with pytest.raises(
        ConfigError, match=f"found {word}, which is new in Fast-LLM {first}, but this is {before}"
    ):
        fast_llm().read(given, before)


def test_in_0_3_data_ranks_that_split_a_sequence_exclude_pipeline_first() -> None:
    given = {"distributed": {"pipeline_first": True, "sequence_data_parallel": 2}}
    for version in ("0.2.0", "0.4.0"):
        assert fast_llm().read(given, version, 2).distributed["data_parallel"] == 2
    with pytest.raises(ConfigError, match="found 2 with pipeline_first; expected 1"):
        fast_llm().read(given, "0.3.0", 2)


@pytest.mark.parametrize("version", sorted({row["release"] for row in ROWS}))
def test_verdicts_and_values_of_the_releases(version: str) -> None:
    rows = [row for row in ROWS if row["release"] == version]
    assert {row["accepted"] for row in rows} == {True, False}
    for row in rows:
        source = {path.rpartition(".")[2]: section for path, section in row["sections"].items()}
        try:
            held = fast_llm().read({"model": source}, row["release"]).effective
        except ConfigError:
            assert not row["accepted"], row
        else:
            assert row["accepted"], row
            said = {path: held[path] for path in held.keys() & row["holds"].keys()}
            assert said and said == {path: row["holds"][path] for path in said}, row


# Ranks


def test_open_world_size_leaves_ranks_open() -> None:
    config = fast_llm().read({"distributed": {"tensor_parallel": 4}})
    assert "data_parallel" not in config.distributed
    assert (
        fast_llm()
        .read({"distributed": {"tensor_parallel": 4}}, world_size=8)
        .distributed["data_parallel"]
        == 2
    )


def test_all_problems_come_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        fast_llm().read(
            {
                "distributed": {
                    "tensor_parallel": 3,
                    "world_size": 8,
                    "local_world_size": 8,
                    "rank": 9,
                }
            }
        )
    assert len(caught.value.problems) == 3


def test_the_file_wins_over_the_launcher_and_says_so() -> None:
    config = fast_llm().read({"distributed": {"world_size": 16}}, world_size=8)
    assert config.distributed["data_parallel"] == 16
    assert any("uses the value in the file" in finding.message for finding in config.findings)


# The older batch


@pytest.mark.parametrize(
    ("batch", "ranks", "expected"),
    (
        ({}, {}, (1, 1, 1, 1)),
        ({"micro_batch_size": 2, "batch_size": 16}, {}, (2, 16, 8, 1)),
        ({"micro_batch_size": 2, "batch_size": 16}, {"pipeline_parallel": 2}, (2, 16, 1, 8)),
        ({"batch_size": 16, "breadth_first_micro_batches": 4}, {"data": 2}, (2, 16, 1, 4)),
        (
            {"micro_batch_size": 1, "batch_size": 16, "depth_first_micro_batches": 2},
            {"data": 2},
            (1, 16, 2, 4),
        ),
    ),
)
def test_the_older_batch_is_worked_out(
    batch: dict[str, int], ranks: dict[str, int], expected: tuple[int, ...]
) -> None:
    axes = {name: size for name, size in ranks.items() if name != "data"}
    world = ranks.get("data", 1) * axes.get("pipeline_parallel", 1)
    values = fast_llm().read({"batch": batch, "distributed": axes}, "0.3.0", world).batch
    names = (
        "micro_batch_size",
        "batch_size",
        "depth_first_micro_batches",
        "breadth_first_micro_batches",
    )
    assert tuple(values[name] for name in names) == expected


@pytest.mark.parametrize(
    "batch",
    (
        {"micro_batch_size": 3, "batch_size": 16},
        {"depth_first_micro_batches": 2},
        {"sequence_length": 100, "micro_sequence_length": 30},
    ),
)
def test_batches_that_do_not_hold_are_refused(batch: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="batch"):
        fast_llm().read({"batch": batch, "distributed": {"pipeline_parallel": 2}}, "0.3.0", 4)


def test_the_newer_schedule_allows_rounds_with_a_pipeline_and_warns() -> None:
    config = fast_llm().read(
        {"schedule": {"depth_first_micro_batches": 4}, "distributed": {"pipeline_parallel": 2}},
        world_size=2,
    )
    assert any(finding.path == "schedule.depth_first_micro_batches" for finding in config.findings)
