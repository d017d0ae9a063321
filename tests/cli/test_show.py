"""`stagebridge show`: fields, sections and lists as people and programs see them."""

from __future__ import annotations

import json
from typing import Any

import pytest

import compat
from bridge.cli import run
from bridge.plan.section import fields

everyone = pytest.mark.parametrize("name", compat.names())


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs `show`, and gives exit code, stdout and stderr."""

    def call(*words: str) -> tuple[int, str, str]:
        code = run(["show", *words])
        return code, *capsys.readouterr()

    return call


def test_a_field_shows_meaning_default_by_release_and_where_it_goes(show: Any) -> None:
    code, out, err = show("deepspeed", "gradient_clipping")
    assert (code, err) == (0, "")
    for part in (
        "float >= 0",
        "0.0  (0.15.0 to 0.19.2)",
        "1.0  (0.19.3 to 0.19.8)",
        "optimizer.clip",
        "different numbers",
    ):
        assert part in out
    for elsewhere in (
        "clip_grad_norm.max_norm",
        "optimizer.gradient_norm_clipping",
        "clip_grad",
        "args.max_grad_norm",
    ):
        assert elsewhere in out


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (("megatron", "params_dtype"), ("the default is None", "the default is torch.float32")),
        (
            ("megatron", "autocast_dtype"),
            ("default is the value of pipeline_dtype", "default is the value of params_dtype"),
        ),
        (("merak", "init.pp"), ("dp, tp, pp", "pass the degrees by name")),
        (("automodel", "distributed.pipeline.pp_schedule"), ("v_schedule", "ZBVZeroBubble")),
        (
            ("fast_llm", "model.multi_stage.num_grad_buffers"),
            ("the default is 1", "one buffer for each stage"),
        ),
    ],
)
def test_documentation_that_the_code_contradicts_is_named(
    show: Any, words: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    _, out, _ = show(*words)
    flat = " ".join(out.split())
    assert "documented" in out and "but in the code" in out
    assert [part for part in parts if part not in flat] == []


@pytest.mark.parametrize(
    ("name", "flag", "path"),
    [("megatron", "--bf16", "bf16"), ("merak", "--zero_stage", "args.zero_stage")],
)
def test_a_flag_names_its_field(show: Any, name: str, flag: str, path: str) -> None:
    assert json.loads(show(name, flag, "--json")[1])["path"] == path


def test_a_section_shows_its_fields(show: Any) -> None:
    _, out, _ = show("automodel", "distributed.pipeline", "--json")
    listed = [
        field["path"] for section in json.loads(out)["sections"] for field in section["fields"]
    ]
    assert len(listed) == 16
    assert all(path.startswith("distributed.pipeline.") for path in listed)


@everyone
def test_the_list_has_every_field_on_a_line(show: Any, name: str) -> None:
    known = fields(compat.load(name).schema)
    code, out, _ = show(name)
    assert code == 0
    assert f"{len(known)} fields" in out
    starts = {line.split()[0] for line in out.splitlines() if line.strip()}
    assert [path for path in known if len(path) <= 50 and path not in starts] == []


@everyone
def test_json_of_every_field(show: Any, name: str) -> None:
    listed = json.loads(show(name, "--json")[1])
    assert (listed["dialect"], listed["versions"]) == (name, list(compat.load(name).versions))
    paths = [field["path"] for section in listed["sections"] for field in section["fields"]]
    assert sorted(paths) == sorted(fields(compat.load(name).schema))
    for path in paths[::40]:
        entry = json.loads(show(name, path, "--json")[1])
        assert entry["path"] == path
        assert entry["description"] and entry["type"] and entry["releases"] and entry["effect"]
        assert {other["dialect"] for other in entry["elsewhere"]} == set(compat.names()) - {name}
        assert all(other["fields"] or other["how"] == "dropped" for other in entry["elsewhere"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("deepspeed", "overlap_comm"), "did you mean zero_optimization.overlap_comm?"),
        (("deepspeed", "overlap_com"), "did you mean zero_optimization.overlap_comm?"),
        (("megatron", "tensor_parallel_size"), "did you mean"),
        (("megatron", "--num-layer"), "did you mean num_layers?"),
        (("fast_llm", "qwxz"), "stagebridge show fast_llm lists all fields"),
        (("deepsped",), "did you mean deepspeed?"),
        (("megatron", ""), "no such field"),
    ],
)
def test_unknown_names_get_the_nearest(show: Any, words: tuple[str, ...], message: str) -> None:
    code, out, err = show(*words)
    assert (code, out) == (1, "")
    assert err.startswith("error: ") and message in err
    code, out, _ = show(*words, "--json")
    assert code == 1
    assert message in json.loads(out)["problems"][0]
