"""Flags are read as each release's own parser reads them: recorded answers of the real parsers, and laws."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

import compat
from bridge.errors import BridgeError, ConfigError, VersionError
from compat.megatron import releases
from compat.megatron.flags import Parsed, Spot
from tests.common.megatron_flags import parse

CASES = Path(__file__).parent / "parser_cases.jsonl"
"""Generated command lines, and what the parser of that release made of them (git tags; 0.19.2: the wheel)."""

ACTIONS = {
    "0.9.0": 347, "0.10.0": 379, "0.11.0": 407, "0.12.0": 456, "0.12.3": 456, "0.13.1": 502, "0.14.0": 514,
    "0.15.3": 566, "0.16.1": 652, "0.17.0": 701, "0.17.1": 705, "0.18.2": 751, "0.19.2": 808,
}  # fmt: skip
"""Number of arguments that the real parsers have."""

FIELDS = {
    "0.9.0": 54,
    "0.10.0": 59,
    "0.12.3": 61,
    "0.13.0": 62,
    "0.15.3": 63,
    "0.16.1": 67,
    "0.17.1": 66,
    "0.19.2": 73,
}
"""Number of fields of the real ModelParallelConfig."""

BASE = ("--tensor-model-parallel-size", "2")


def cases() -> list[dict[str, Any]]:
    return [json.loads(line) for line in CASES.read_text("utf-8").splitlines()]


@pytest.mark.parametrize("case", cases(), ids=lambda case: case["version"])
def test_reads_what_the_real_parser_read(case: dict[str, Any]) -> None:
    if "refused" in case:
        with pytest.raises(BridgeError):
            parse(case["flags"], case["version"], lenient=True)
        return
    parsed = parse(case["flags"], case["version"], lenient=True)
    default = releases.defaults(case["version"])
    assert {dest: value for dest, value in parsed.given.items() if value != default[dest]} == case[
        "changed"
    ]
    assert parsed.unknown == case["unknown"]


@pytest.mark.parametrize(
    "case", [case for case in cases() if case.get("unknown")], ids=lambda case: case["version"]
)
def test_left_over_words_are_errors_unless_lenient(case: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        parse(case["flags"], case["version"])


@pytest.mark.parametrize(("version", "count"), ACTIONS.items())
def test_every_argument_of_the_release_is_there(version: str, count: int) -> None:
    assert len({flag.options for flag in releases.flags(version).values()}) == count


@pytest.mark.parametrize(("version", "count"), FIELDS.items())
def test_every_field_of_the_release_is_there(version: str, count: int) -> None:
    assert len(releases.fields(version, "ModelParallelConfig")) == count


@pytest.mark.parametrize(
    ("dest", "older", "before", "newer", "after"),
    [
        ("data_parallel_sharding_strategy", "0.17.1", "no_shard", "0.18.0", "optim_grads_params"),
        ("eval_interval", "0.15.3", 1000, "0.16.0", None),
        ("profile_ranks", "0.16.1", [0], "0.17.0", []),
        ("rerun_mode", "0.13.1", "disabled", "0.14.0", "validate_results"),
    ],
)
def test_defaults_move_with_releases(
    dest: str, older: str, before: Any, newer: str, after: Any
) -> None:
    assert releases.defaults(older)[dest] == before
    assert releases.defaults(newer)[dest] == after


def test_one_flag_has_another_shape_in_another_release() -> None:
    words = ("--rampup-batch-size", "16", "8", "1000")
    assert parse(words, "0.15.3").given == {"rampup_batch_size": ["16", "8", "1000"]}
    assert parse(words, "0.16.0").given == {"rampup_batch_size": [16, 8, 1000]}
    with pytest.raises(ConfigError, match="found 2 values; expected 3"):
        parse(words[:-1], "0.16.0")


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (["--lr", "-1"], -1.0),
        (["--lr", "-.5"], -0.5),
        (["--lr=-1e-5"], -1e-5),
        (["--lr", "1e-5"], 1e-5),
    ],
)
def test_negative_numbers_are_values(words: list[str], value: float) -> None:
    assert parse(words, "0.16.1").given == {"lr": value}


def test_a_negative_number_with_an_exponent_looks_like_a_flag() -> None:
    with pytest.raises(ConfigError, match=r"--lr .*found no value"):
        parse(["--lr", "-1e-5"], "0.16.1", lenient=True)
    with pytest.raises(ConfigError, match=r"-1e-5: .*attach the number to its flag with ="):
        parse(["--lr", "-1e-5"], "0.16.1")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("([0]*3+[1]*11)", [0] * 3 + [1] * 11),
        ("([1]+[0]*23)", [1] + [0] * 23),
        ("2*[0,1]", [0, 1, 0, 1]),
        ("4", 4),
    ],
)
def test_layer_patterns(text: str, value: Any) -> None:
    assert parse(["--moe-layer-freq", text], "0.16.1").given["moe_layer_freq"] == value


NO_PATTERNS = (
    "[0] * 3", "[a]", "__import__('os')", "[0]*999999999", "[[0]*90000]*90000", "([0]*3", "[0]*[1]",
    "([]" + "+[0]*90000" * 2 + ")*999", "[" * 4000, "[0][0]", "[2**9]", "x",
)  # fmt: skip


@pytest.mark.parametrize("text", NO_PATTERNS)
def test_what_is_no_layer_pattern_is_refused_and_never_run(text: str) -> None:
    with pytest.raises(ConfigError, match="--moe-layer-freq"):
        parse(["--moe-layer-freq", text], "0.16.1")


def test_blanks_in_layer_patterns_were_allowed_until_0_12_1() -> None:
    assert parse(["--moe-layer-freq", "[0] * 2"], "0.12.1").given["moe_layer_freq"] == [0, 0]
    with pytest.raises(ConfigError, match="without blanks"):
        parse(["--moe-layer-freq", "[0] * 2"], "0.12.2")


def test_the_last_mention_wins_and_the_first_is_reported() -> None:
    parsed = parse([*BASE, "--bf16", "--tensor-model-parallel-size=4"], "0.16.1")
    assert list(parsed.given.items()) == [("bf16", True), ("tensor_model_parallel_size", 4)]
    assert parsed.flags["tensor_model_parallel_size"] == Spot("--tensor-model-parallel-size", 3)
    assert parsed.repeated == [
        ("tensor_model_parallel_size", Spot("--tensor-model-parallel-size", 0, 2))
    ]


def test_two_flags_for_one_destination_count_as_repeated() -> None:
    parsed = parse(["--disable-tp-comm-overlap-ag", "--no-tp-comm-overlap-ag"], "0.16.1")
    assert [dest for dest, _ in parsed.repeated] == ["tp_comm_overlap_ag"]
    assert parsed.given == {"tp_comm_overlap_ag": False}


def test_text_that_says_no_is_taken_for_yes() -> None:
    parsed = parse(["--onnx-safe", "false"], "0.9.0")
    assert parsed.given == {"onnx_safe": True}
    assert parsed.misread == ["onnx_safe"]
    assert parse(["--onnx-safe", "true"], "0.9.0").misread == []


def test_flags_that_exclude_each_other_have_a_row_that_says_so() -> None:
    pairs = {
        (version, flag.dest, releases.flags(version)[other].dest)
        for version in releases.KNOWN
        for flag in releases.flags(version).values()
        for other in flag.excludes
    }
    assert pairs
    for version, *both in pairs:
        with pytest.raises(ConfigError, match=r": found 1 with .*; keep one of them") as error:
            compat.load("megatron").read(
                [word for dest in both for word in (f"--{dest.replace('_', '-')}", "1")], version
            )
        assert all(dest in str(error.value) for dest in both)


def test_a_switch_has_two_names() -> None:
    assert parse(["--no-inference-text-gen-server-logging"], "0.19.2").given == {
        "inference_text_gen_server_logging": False
    }
    assert parse(["--inference-text-gen-server-logging"], "0.19.2").given == {
        "inference_text_gen_server_logging": True
    }


@pytest.mark.parametrize(
    ("words", "version", "message"),
    [
        (["--tensor-model-parallel"], "0.16.1", "did you mean --tensor-model-parallel-size"),
        (
            ["--tensor_model_parallel_size", "2"],
            "0.16.1",
            "did you mean --tensor-model-parallel-size",
        ),
        (["--use-custom-fsdp"], "0.16.1", "known from 0.12.0 to 0.13.1"),
        (["--pipeline-model-parallel-layout", "E|t|L"], "0.12.0", "known since 0.13.0"),
        (["--encoder-tensor-model-parallel-size", "2"], "0.14.0", "known until 0.13.1"),
        (["--micro-batch-size", "2.5"], "0.16.1", "found '2.5'; expected a whole number"),
        (["--micro-batch-size"], "0.16.1", "found no value; expected 1"),
        (["--profile-ranks", "--bf16"], "0.16.1", "found no value; expected one or more"),
        (["--bf16=true"], "0.16.1", "found the value 'true'; expected no value"),
        (["--bf16", "true"], "0.16.1", "'true' .*no flag accepts this value"),
        (["--data-parallel-sharding-strategy", "optim_grad"], "0.16.1", "did you mean optim_grads"),
        (["--attention-backend", "flsh"], "0.16.1", "did you mean flash"),
        (["--help"], "0.16.1", "--help .*leave it out"),
        (["--", "--bf16"], "0.16.1", "'--' .*expected a flag"),
    ],
)
def test_messages_say_what_to_do(words: list[str], version: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(words, version)


def test_all_problems_come_together_and_in_order() -> None:
    words = ["--zzz", "1", *BASE, "--lr", "x", "--bf16", "yes", "--yyy=2", "--num-layers"]
    with pytest.raises(ConfigError) as caught:
        parse(words, "0.16.1")
    assert [problem.split()[0].rstrip(":") for problem in caught.value.problems] == [
        "--zzz", "--lr", "'yes'", "--yyy", "--num-layers",
    ]  # fmt: skip


def test_lenient_skips_what_the_release_does_not_know_and_nothing_else() -> None:
    words = ["--zzz", "1", "2", *BASE, "--yyy=2", "-z", "5"]
    parsed = parse(words, "0.16.1", lenient=True)
    assert parsed == Parsed(
        {"tensor_model_parallel_size": 2},
        {"tensor_model_parallel_size": Spot("--tensor-model-parallel-size", 3, 2)},
        [],
        ["--zzz", "1", "2", "--yyy=2", "-z", "5"],
        [],
    )
    with pytest.raises(ConfigError, match="--lr"):
        parse([*words, "--lr", "x"], "0.16.1", lenient=True)


@pytest.mark.parametrize(
    ("version", "message"),
    [
        ("0.16.2", "nearest known are 0.16.1 and 0.17.0"),
        ("0.20.0", "nearest known is 0.20.0.dev20260822"),
        ("0.8.0", "nearest known is 0.9.0"),
        ("latest", "known are 0.9.0 to 0.20.0.dev20260822"),
        ("0.16", "nearest known are 0.15.3 and 0.16.0"),
    ],
)
def test_an_unknown_release_is_an_error_and_not_a_guess(version: str, message: str) -> None:
    for ask in (
        releases.flags,
        releases.defaults,
        lambda name: releases.fields(name, "ModelParallelConfig"),
    ):
        with pytest.raises(VersionError, match=message):
            ask(version)


def test_an_unknown_class_is_an_error() -> None:
    with pytest.raises(ConfigError, match="known are DistributedDataParallelConfig"):
        releases.fields("0.16.1", "Config")


def test_a_field_that_comes_back_is_absent_between() -> None:
    known = releases.KNOWN
    having = [
        name for name in known if "overlap_param_gather" in releases.fields(name, "OptimizerConfig")
    ]
    assert having == ["0.9.0", *known[known.index("0.14.0") :]]


@pytest.mark.parametrize("version", releases.KNOWN)
def test_defaults_are_values_that_their_flags_allow(version: str) -> None:
    for flag in releases.flags(version).values():
        values = flag.default if isinstance(flag.default, list) else [flag.default]
        if flag.choices and flag.default is not None:
            assert set(values) <= set(flag.choices), flag


ODD = ("--", "-", "-1", "--x", "1", "2.5", "[1]*3", "a b", "", "--lr=1", "--bf16=1")
WORDS = st.one_of(st.sampled_from([*releases.flags("0.16.1"), *ODD]), st.text(max_size=8))


@given(st.lists(WORDS, max_size=12), st.sampled_from(releases.KNOWN))
@settings(max_examples=300, deadline=None)
def test_any_words_give_a_reading_or_a_bridge_error(words: list[str], version: str) -> None:
    try:
        parsed = parse(words, version, lenient=True)
    except BridgeError as error:
        assert error.problems
        return
    assert set(parsed.given) == set(parsed.flags) <= set(releases.defaults(version))
    assert all(words[spot.index].startswith(spot.option) for spot in parsed.flags.values())
    rest = iter(words)
    assert all(word in rest for word in parsed.unknown)


@pytest.mark.parametrize(
    "value", ["-0", "-00", "0x10", "1_0", "1:30", "True", "1.10", "-0.0", "-5", "0.5", "null"]
)
def test_a_recipe_gives_a_text_back_that_looks_like_a_number(value: str) -> None:
    sizes = (("num-layers", 1), ("hidden-size", 64), ("num-attention-heads", 1), ("seq-length", 2))
    more = (("max-position-embeddings", 4), ("micro-batch-size", 1), ("kitchen-config-file", value))
    config = compat.load("megatron").read(
        [f"--{name}={given}" for name, given in (*sizes, *more)], "0.15.3", 1
    )
    assert config.given["kitchen_config_file"] == value
    assert compat.load("megatron").read(config.text("yaml"), "0.15.3", 1).given == config.given


@pytest.mark.parametrize(
    "words",
    [["--micro-batch-size"], ["--position-embedding-type"], ["--bf16", "--swiglu="], ["--bf16"]],
)
def test_a_long_value_is_shown_in_part(words: list[str]) -> None:
    long = "x" * 100_000
    given = [*words[:-1], words[-1] + long] if words[-1].endswith("=") else [*words, long]
    with pytest.raises(ConfigError) as error:
        parse(given, "0.16.1")
    assert "'xxxx" in str(error.value) and "…" in str(error.value) and len(str(error.value)) < 1000
