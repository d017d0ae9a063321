"""Launch scripts: what a human reads off them is what is read, and every mistake is listed with its line."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

import compat
from bridge.errors import BridgeError
from bridge.files import Document, Script, load
from bridge.files.named import reaching
from bridge.stack.dialect import Config

HERE = Path(__file__).parent / "scripts"
CLONES = os.environ.get("STAGEBRIDGE_SCRIPTS")
"""A folder with a git directory `OWNER+NAME/repo` for each repository of the table (see tests/shell/scripts/README.md)."""

PATHS: Mapping[str, Mapping[str, str]] = {
    "megatron": {
        "tensor": "tensor_model_parallel_size",
        "pipeline": "pipeline_model_parallel_size",
        "micro": "micro_batch_size",
        "global": "global_batch_size",
        "layers": "num_layers",
        "hidden": "hidden_size",
        "sequence": "seq_length",
    },
    "deepspeed": {
        "tensor": "code.tensor_parallel",
        "pipeline": "code.pipeline_stages",
        "micro": "train_micro_batch_size_per_gpu",
        "global": "train_batch_size",
        "zero": "zero_optimization.stage",
    },
    "merak": {
        "micro": "args.per_device_train_batch_size",
        "accumulation": "args.gradient_accumulation_steps",
        "zero": "args.zero_stage",
    },
}
"""Where each dialect keeps what a human reads off a script."""
LEFT_OUT = {"tensor": 1, "pipeline": 1}
"""Sizes that DeepSpeed's code part does not name."""


def rows(file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (HERE / file).read_text("utf-8").splitlines()]


REAL, OWN = rows("real.jsonl"), rows("own.jsonl")


def named(row: Mapping[str, Any]) -> str:
    return str(row["path"])


def sizes(config: Config, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """What `config` says of the sizes in `wanted`."""
    paths = PATHS[config.dialect.name]
    found = {
        name: config.given.get(paths[name], LEFT_OUT.get(name)) for name in wanted if name in paths
    }
    return {
        **found,
        **{
            name: value
            for name, value in (("precision", precision(config)), ("ranks", config.world_size))
            if name in wanted
        },
    }


def precision(config: Config) -> str | None:
    spelled = {"megatron": "{}", "deepspeed": "{}.enabled", "merak": "args.{}"}[config.dialect.name]
    return next((name for name in ("bf16", "fp16") if config.given.get(spelled.format(name))), None)


def read(document: Document, row: Mapping[str, Any], name: str, lenient: bool = True) -> Config:
    """The script as the row starts it, not yet checked; leniently, unless its mistakes are asked for."""
    dialect = compat.load(name)
    assert isinstance(document.data, Script)
    outside = {
        **row.get("environment", {}),
        **{str(place): word for place, word in enumerate(row.get("arguments", ()), 1)},
    }
    script = Document(
        document.data.start_with(outside, row.get("launch")), {}, "script", name=document.name
    )
    if "auto" in row and name == "deepspeed":
        facts = {**row["auto"], "world_size": row["world_size"]}
        return dialect.read(script, world_size=row["world_size"], lenient=lenient, auto=facts)  # type: ignore[call-arg]
    version = row.get("version", dialect.versions[-1])
    return dialect.build(
        dialect.parse(script, version, lenient=lenient), version, row.get("world_size")
    )


def assert_read(document: Document, row: Mapping[str, Any]) -> None:
    """Every reading of the row is what a human reads, and every mistake is named with its line."""
    for name, wanted in row.get("readings", {}).items():
        assert sizes(read(document, row, name), wanted) == wanted
    for name, wrong in row.get("mistakes", {}).items():
        with pytest.raises(BridgeError) as caught:
            read(document, row, name, lenient=False)
        for line, what in wrong:
            assert any(
                f"line {line}: " in problem and what in problem for problem in caught.value.problems
            ), caught.value
        assert len(caught.value.problems) >= len(wrong)


@cache
def shown(repository: str, commit: str, path: str) -> str | None:
    """A file of a repository at a commit; None if it is not there."""
    folder = Path(CLONES or "") / repository.replace("/", "+") / "repo"
    done = subprocess.run(
        ["git", f"--git-dir={folder}", "show", f"{commit}:{path}"], capture_output=True, check=False
    )
    return done.stdout.decode("utf-8") if done.returncode == 0 else None


def test_the_table_is_as_large_as_promised() -> None:
    assert len([row for row in REAL if row["readings"]]) >= 40
    assert len({row["repository"] for row in REAL}) >= 6


@pytest.mark.outside
@pytest.mark.skipif(CLONES is None, reason="STAGEBRIDGE_SCRIPTS names no folder of clones")
@pytest.mark.parametrize("row", REAL, ids=named)
def test_real_scripts_say_what_a_human_reads(row: dict[str, Any], tmp_path: Path) -> None:
    for path in (row["path"], *row.get("beside", ())):
        text = shown(row["repository"], row["commit"], path)
        if text is None:
            pytest.skip(f"{row['repository']} at {row['commit']} is not there")
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text, "utf-8")
    # As whoever stands at the top of the repository and trusts it.
    with reaching((tmp_path / row["path"]).parent, [tmp_path]):
        assert_read(load(tmp_path / row["path"]), row)


@pytest.mark.parametrize(
    "row", OWN, ids=lambda row: f"{row['path']}{'-' + row['case'] if 'case' in row else ''}"
)
def test_own_scripts_say_what_a_human_reads(row: dict[str, Any]) -> None:
    assert_read(load(HERE / row["path"]), row)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('echo "never closed\ntorchrun a.py --num-layers 2\n', "line 1: not shell syntax"),
        (
            "if true; then\ntorchrun a.py --num-layers 2\n",
            "line 1: a statement is never closed; expected fi",
        ),
        (
            "cat > a.json <<EOF\n$(x\nEOF\ntorchrun a.py --num-layers 2\n",
            "line 2: a bracket is never closed; expected )",
        ),
        (
            "ls\ncat > ds.json <<EOF\n{\n",
            "line 2: a here-document is never closed; expected its delimiter",
        ),
        (":(){ :|:& };:\n", "line 1: : calls itself without end"),
        ("f() { eval f; }\nf\n", "line 1: f calls itself without end"),
        ("A=x\n" + "A=$A$A$A$A\n" * 40, "A grows beyond 20,000 parts"),
        ("B='bash -c \"$B\"'\nexport B\neval eval eval '$B'\n", "found no run"),
        ("ls\n", "found no run with flags of Megatron; runs of the script: none"),
        (
            "python prepare.py --in x\n",
            "found no run with flags of Megatron; runs of the script: line 1: prepare.py",
        ),
        (
            "torchrun a.py --num-layers 2\n# comment\n--bf16\ntorchrun b.py --num-layers 4\n",
            "--launch 2: line 4: b.py",
        ),
        (
            "torchrun a.py --hidden-size 2 \\\n# --bf16 \\\n--num-layers 2\n",
            "--num-layers: the flag is no part of the run",
        ),
        (
            "torchrun a.py --num-layers $((1/0))\n",
            "line 1: --num-layers: $((1/0)) (line 1) is not known",
        ),
        ("for n in 2 4; do torchrun a.py --num-layers $n; done\n", "--launch 2: line 1: a.py"),
        (
            "for n in $N; do torchrun a.py --num-layers $n; done\n",
            "a loop gives the variable several values",
        ),
        (
            "N=2\nwhile read x; do N=$x; done < f\ntorchrun a.py --num-layers $N\n",
            "line 3: --num-layers: $N",
        ),
        ("torchrun a.py --num-layers ${!N}\n", "line 1: --num-layers: ${!N}"),
        (
            "torchrun pretrain_gpt.py $ALL\n",
            "$ALL (line 1) is not known: the script sets ALL nowhere; set --env ALL=...",
        ),
        (
            "torchrun a.py --num-layers 2 --data-path x $U y\n",
            "may contain flags: $U (line 1) is not known",
        ),
        (
            "run() { torchrun a.py --num-layers 4; }\nbash -c run\n",
            "line 1: this line is in the function run; line 2 names run, but no command that is read calls run",
        ),
        (
            "D=$D$D\ntorchrun a.py --num-layers $D\n",
            "line 1 sets D, but this expansion does not see that value; set --env D=...",
        ),
        ("L=$(date)$L\ntorchrun a.py --num-layers 2$L\n", "the value is the output of a command"),
        ("read -n 2 q <<< 42\ntorchrun a.py --num-layers $q\n", "read -n is not supported"),
        (
            "trap 'x' RETURN\n",
            "line 1: a trap that runs where functions and sourced files end is not supported",
        ),
        ("set -o posix\n", "line 1: set turns posix on, which is not supported"),
        ("(" * 4000, "not shell syntax"),
        ("x" * (2**20 + 1), "more than 1 MiB"),
        ("true\n" * 12_000, "more than 10,000 steps"),
    ],
)
def test_bad_scripts_are_refused_in_a_line(text: str, said: str) -> None:
    with pytest.raises(BridgeError) as caught:
        compat.load("megatron").read(load_text(text))
    assert said in str(caught.value)


def load_text(text: str) -> Document:
    return Document(Script(text, "launch.sh"), {}, "script", name="launch.sh")


def test_nothing_is_run(tmp_path: Path) -> None:
    target = tmp_path / "touched"
    text = f"A=$(touch {target})\n`touch {target}`\ntouch {target}\neval 'touch {target}'\nsource <(touch {target})\n"
    text += f"torchrun a.py --num-layers 2 --save $A$(touch {target}) > {target}\ncat > {target} <<EOF\n$(touch {target})\nEOF\n"
    config = compat.load("megatron").parse(load_text(text), "0.19.2", lenient=True)
    assert config.given["num_layers"] == 2
    assert not target.exists()


def test_a_choice_that_does_not_exist_is_said() -> None:
    script = load(HERE / "several.sh")
    assert isinstance(script.data, Script)
    with pytest.raises(BridgeError, match=r"there is no run 4; the script starts 3"):
        compat.load("megatron").read(
            Document(script.data.start_with({}, 4), {}, "script", name="several.sh")
        )


TOKENS = (
    'torchrun a.py --num-layers 2 $A ${A:-3} "$B" \' " ` $( ) { } (( )) [[ ]] [ ] if then fi else for in do done case esac '
    "while ; ;; & && | || > < << EOF \\ \n A=1 A+=2 A=(1 2) A[0]=1 ${A[@]} ${#A} ${A%x} ${A//x/y} ${A:1:2} $((A+1)) $1 $@ # ! = "
    "== -eq -z exit return eval bash -c export local é\u3000 \t"
)
WORDS = st.sampled_from(TOKENS.split(" "))


@settings(derandomize=True, database=None, deadline=None, max_examples=150)
@given(st.lists(WORDS, max_size=30), st.text(max_size=20))
def test_any_text_is_read_or_refused(words: list[str], noise: str) -> None:
    for text in (" ".join(words), "".join(words) + noise):
        with suppress(BridgeError):
            script = Script(text, "launch.sh")
            for launch in script.launches:
                assert len(launch.texts) == len(launch.lines) and all(
                    line >= 1 for line in launch.lines
                )
