"""The gate: two configs compared, many files at once, what counts, and the formats that others read."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter
from ruamel.yaml import YAML

import bridge
import compat
from bridge.cli import run
from bridge.cli.demo import launch_text
from bridge.cli.options import READING as OPTIONS
from bridge.cli.patterns import refuse_strange
from bridge.files.project import READING, Table, project_of
from bridge.plan.section import fields
from bridge.report.json_types import OUTPUTS
from bridge.report.sarif import Choice, fits, read_baseline

pytestmark = pytest.mark.once

HOME = Path(__file__).resolve().parents[2]
GOOD: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
}
GOOD["zero_optimization"] = {"stage": 1}
ODD = {**GOOD, "disable_allgather": True}
WRONG = {**GOOD, "zero_optimisation": {"stage": 2}}

Said = Callable[..., tuple[int, str, str]]


@pytest.fixture
def said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Said:
    """Runs the command line in a folder with a few configs: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    (tmp_path / "configs" / "deep").mkdir(parents=True)
    for name, data in {"good.json": GOOD, "deep/odd.json": ODD}.items():
        (tmp_path / "configs" / name).write_text(json.dumps(data, indent=1))
    (tmp_path / "configs" / "package.json").write_text('{"name": "x", "scripts": {}}')
    (tmp_path / "launch.args").write_text(launch_text())

    def call(*words: str) -> tuple[int, str, str]:
        code = run(list(words))
        return code, *capsys.readouterr()

    return call


def written(folder: Path, name: str, data: dict[str, Any]) -> None:
    (folder / name).write_text(json.dumps(data, indent=1))


class TestDiff:
    def changed(self, tmp_path: Path, *changes: tuple[str, str]) -> None:
        text = launch_text()
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        (tmp_path / "other.args").write_text(text)

    def rows(self, said: Said, *words: str) -> tuple[int, dict[str, dict[str, Any]]]:
        code, out, _ = said("diff", *words, "--world-size", "8", "--json")
        found = json.loads(out)
        assert found["exit_code"] == code
        return code, {row["path"]: row for row in found["findings"]}

    def test_the_same_file_is_the_same_run(self, said: Said) -> None:
        assert self.rows(said, "launch.args", "launch.args") == (0, {})
        assert (
            said("diff", "launch.args", "launch.args", "--world-size", "8")[1].splitlines()[0]
            == "same run"
        )

    @pytest.mark.parametrize(
        ("change", "path", "effect", "code"),
        [
            (("--lr 3.0e-4", "--lr 1.0e-4"), "lr", "different numbers", 2),
            (("--clip-grad 1.0\n", ""), None, None, 0),
            (("--clip-grad 1.0\n", "--clip-grad 2\n"), "clip_grad", "different numbers", 2),
            (("--save-interval 1000", "--save-interval 10"), "save_interval", "same numbers", 0),
            (("--sequence-parallel\n", ""), "sequence_parallel", "memory or speed", 0),
            (
                ("--micro-batch-size 2", "--micro-batch-size 4"),
                "micro_batch_size",
                "same up to rounding",
                0,
            ),
        ],
    )
    def test_a_change_has_its_effect(
        self,
        said: Said,
        tmp_path: Path,
        change: tuple[str, str],
        path: str | None,
        effect: str | None,
        code: int,
    ) -> None:
        self.changed(tmp_path, change)
        done, rows = self.rows(said, "launch.args", "other.args")
        if path is None:
            assert (done, rows) == (code, {})
        elif effect == "same up to rounding":
            assert path in rows  # what the batch is made of weighs as the table says
        else:
            assert (done, rows[path]["effect"]) == (code, effect)
            assert rows[path]["rule"] == f"difference/{path}"

    @pytest.mark.parametrize(
        ("one", "other", "effect"),
        [
            ("--data-path /a/pile", "--data-path /a/c4", "different numbers"),
            ("--mock-data", "--data-path /a/pile", "different numbers"),
            ("--train-data-path /a/pile", "--train-data-path /a/c4", "different numbers"),
            (
                "--data-path /a/pile --split 98,1,1",
                "--data-path /a/pile --split 90,5,5",
                "different numbers",
            ),
            (
                "--tokenizer-type GPT2BPETokenizer",
                "--tokenizer-type NullTokenizer",
                "different numbers",
            ),
            ("--tokenizer-model /a/one", "--tokenizer-model /a/two", "different numbers"),
            ("--data-cache-path /a/one", "--data-cache-path /a/two", "same numbers"),
        ],
    )
    def test_other_data_is_another_run(
        self, said: Said, tmp_path: Path, one: str, other: str, effect: str
    ) -> None:
        """What is harmless to leave out of another stack's file, which names the same data in its own way."""
        text = launch_text().replace("--data-path corpus_text_document\n", "")
        for name, words in (("launch.args", one), ("other.args", other)):
            (tmp_path / name).write_text(f"{text}\n{words}\n")
        _, rows = self.rows(said, "launch.args", "other.args")
        assert {row["effect"] for row in rows.values()} == {effect}
        report = json.loads(
            said("convert", "launch.args", "--to", "deepspeed", "--world-size", "8", "--json")[1]
        )
        lost = [row for row in report["findings"] if row["path"] in rows]
        assert lost and {row["effect"] for row in lost} == {"same numbers"}

    def test_commands_of_help_show_a_field(self, said: Said) -> None:
        """A field may be of the first file's stack alone."""
        said("convert", "launch.args", "--to", "deepspeed", "--world-size", "8", "-o", "ds.json")
        out = said("diff", "launch.args", "ds.json", "--world-size", "8", "--format", "sarif")[1]
        told = [
            rule["help"]["text"].split()
            for rule in json.loads(out)["runs"][0]["tool"]["driver"]["rules"]
            if "help" in rule
        ]
        assert ["stagebridge", "show", "megatron", "num_attention_heads"] in told
        assert {words[2] for words in told} == {"megatron", "deepspeed"}
        assert not [words for words in told if said(*words[1:])[0]]

    def test_a_rounded_count_is_another_run(self, said: Said, tmp_path: Path) -> None:
        """`convert` says so too, of the same two files."""
        counts = {"--train-iters": "--train-samples", "--lr-decay-iters": "--lr-decay-samples"}
        for name, end in {"one": "100100", "other": "100096"}.items():
            text = launch_text().replace("--lr-warmup-iters 500", "--lr-warmup-samples 1280")
            for old, new in counts.items():
                text = re.sub(rf"{old} \d+", f"{new} {end}", text)
            (tmp_path / f"{name}.args").write_text(text)
        assert (
            said("convert", "one.args", "--to", "deepspeed", "--world-size", "8", "-o", "ds.json")[
                0
            ]
            == 2
        )
        for names in (("one.args", "ds.json"), ("ds.json", "one.args"), ("one.args", "other.args")):
            code, rows = self.rows(said, *names)
            assert code == 2 and rows["lr_decay_samples"]["effect"] == "different numbers"
            assert "100100 samples -> 782 steps, rounded down from" in str(rows["train_samples"])
        assert "lr_warmup_samples" not in rows
        assert (
            said(
                "convert",
                "other.args",
                "--to",
                "deepspeed",
                "--world-size",
                "8",
                "-o",
                "whole.json",
            )[0]
            == 0
        )
        assert self.rows(said, "other.args", "whole.json")[0] == 0

    def test_each_change_is_a_thing_of_its_own(self, said: Said, tmp_path: Path) -> None:
        changes = {
            "--lr 3.0e-4": "--lr 1.0e-4",
            "--adam-beta2 0.95": "--adam-beta2 0.99",
            "--clip-grad 1.0": "--clip-grad 2",
        }
        self.changed(tmp_path, *changes.items())
        out = said("diff", "launch.args", "other.args", "--world-size", "8")[1]
        assert out.splitlines()[0] == "different numbers: 3 things"
        assert re.findall(r"^ +(\d) (\w+) ", out, re.MULTILINE) == [
            ("1", "lr"),
            ("2", "adam_beta2"),
            ("3", "clip_grad"),
        ]

    def test_a_field_has_the_value_that_its_file_has(self, said: Said, tmp_path: Path) -> None:
        """Where it amounts to something else, plain words say what."""
        said("convert", "launch.args", "--to", "deepspeed", "--world-size", "8", "-o", "ds.json")
        data = json.loads(Path("ds.json").read_text())
        written(tmp_path, "alone.json", {**data, "train_batch_size": 512})
        (tmp_path / "other.args").write_text(launch_text() + "\n--decoupled-lr 5.0e-4\n")
        words = ("alone.json", "--world-size", "8", "--all")
        told = {
            one: " ".join(said("diff", one, *words)[1].split())
            for one in ("launch.args", "other.args")
        }
        batch = r"data_parallel_size 2 -> train_batch_size 512 \(line 2\):? data-parallel replicas: 2 -> 8"
        assert re.search(batch, told["launch.args"])
        assert re.search(r"normalization \(line \d+\) 'RMSNorm' -> not set", told["launch.args"])
        assert re.search(r"decoupled_lr \(line \d+\) 0.0005 -> not set", told["other.args"])

    def test_values_are_whole(self, said: Said, tmp_path: Path) -> None:
        """Two long values may differ at their ends only, and of a section what differs has a line of its own."""
        where = "/data/" + "folder/" * 40
        for name in ("one", "other"):
            (tmp_path / f"{name}.args").write_text(f"{launch_text()}\n--load {where}{name}\n")
        _, rows = self.rows(said, "one.args", "other.args")
        assert rows["load"]["change"] == f"'{where}one' -> '{where}other'"
        recipe = (HOME / "examples/automodel/interleaved.yaml").read_text()
        set_ = "dataset:\n  _target_: nemo_automodel.components.datasets.llm.squad.make_squad_dataset\n"
        for name in ("one", "other"):
            (tmp_path / f"{name}.yaml").write_text(
                f"{recipe}\n{set_}  split: train\n  path_or_dataset: rajpurkar/{name}\n"
            )
        line = len(Path("one.yaml").read_text().splitlines())
        out = said("diff", "one.yaml", "other.yaml", "--world-size", "8")[1]
        change = f"(line {line}) 'rajpurkar/one' -> 'rajpurkar/other' (line {line})"
        assert f"1 dataset.path_or_dataset {change}" in " ".join(out.split())
        assert "_target_" not in out and "…" not in out
        out = said("diff", "one.yaml", "launch.args", "--world-size", "8")[1]
        assert (
            f"dataset.path_or_dataset (line {line}) 'rajpurkar/one', in NeMo AutoModel alone"
            in " ".join(out.split())
        )

    def test_schedulers_with_other_warmups_are_two_runs(self, said: Said, tmp_path: Path) -> None:
        """No plan holds DeepSpeed's warmup, which is logarithmic and one step late: `convert` and `diff` both say so."""
        adam = {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8}}
        steps = {"warmup_max_lr": 3e-4, "warmup_num_steps": 100, "total_num_steps": 1000}
        source = {
            **GOOD,
            "optimizer": adam,
            "scheduler": {"type": "WarmupDecayLR", "params": steps},
        }
        written(tmp_path, "source.json", source)
        steps = {**steps, "warmup_type": "linear"}
        written(
            tmp_path,
            "linear.json",
            {**source, "scheduler": {"type": "WarmupDecayLR", "params": steps}},
        )
        code, out, _ = said(
            "convert", "source.json", "--to", "megatron", "--world-size", "8", "-o", "target.args"
        )
        assert code == 2 and "scheduler.type" in out and "1 thing" in out
        # The model and the length of the run, which the script of DeepSpeed sets.
        model = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64"
        more = f"{model} --vocab-size 99 --tokenizer-type NullTokenizer --train-iters 1000"
        (tmp_path / "target.args").write_text(f"{(tmp_path / 'target.args').read_text()} {more}")
        for names in (("source.json", "target.args"), ("target.args", "source.json")):
            code, rows = self.rows(said, *names)
            assert code == 2 and rows["scheduler.type"]["effect"] == "different numbers"
            assert rows["scheduler.type"]["message"].startswith(
                "DeepSpeed's own schedulers lag one step behind"
            )
        code, rows = self.rows(said, "source.json", "linear.json")
        assert code == 2 and rows["scheduler.params.warmup_type"]["effect"] == "different numbers"

    def test_sizes_that_follow_from_the_ranks_are_no_cause(
        self, said: Said, tmp_path: Path
    ) -> None:
        dropped = ("--hidden-dropout 0.0", "--hidden-dropout 0.1")
        for name, changes in {
            "one": (),
            "other": (("parallel-size 2", "parallel-size 4"),),
        }.items():
            text = launch_text()
            for old, new in changes:
                text = text.replace(f"--tensor-model-{old}", f"--tensor-model-{new}")
            (tmp_path / f"{name}.args").write_text(text)
            (tmp_path / f"{name}.drop.args").write_text(text.replace(*dropped))
        code, rows = self.rows(said, "one.args", "other.args")
        assert code == 0 and rows["data_parallel_size"]["effect"] == "same up to rounding"
        code, rows = self.rows(said, "one.drop.args", "other.drop.args")
        assert code == 2 and "dropout" in rows["data_parallel_size"]["message"]

    def test_two_stacks(self, said: Said) -> None:
        said("convert", "launch.args", "--to", "deepspeed", "--world-size", "8", "-o", "ds.json")
        code, rows = self.rows(said, "launch.args", "ds.json")
        assert code == 0 and rows["sequence_parallel"]["effect"] == "memory or speed"
        data = json.loads(Path("ds.json").read_text())
        written(Path(), "ds.json", {**data, "gradient_clipping": 0.5})
        code, rows = self.rows(said, "launch.args", "ds.json")
        assert code == 2 and rows["clip_grad"]["change"] == "1.0 -> gradient_clipping 0.5"

    def test_a_conversion_of_a_commit(self, said: Said, tmp_path: Path) -> None:
        for words in (
            ("init", "-q"),
            ("add", "."),
            ("-c", "user.name=x", "-c", "user.email=x@x", "commit", "-qm", "one"),
        ):
            subprocess.run(["git", *words], check=True, capture_output=True, cwd=tmp_path)
        rest = ("--to", "deepspeed", "--world-size", "8")
        code, out, _ = said("convert", "launch.args", *rest)
        Path("launch.args").write_text("--lr 1.0")
        assert said("convert", "git:HEAD:launch.args", *rest)[:2] == (code, out)
        (tmp_path / "out").mkdir()
        assert (
            said(
                "convert", "git:HEAD:launch.args", "git:HEAD:configs/good.json", *rest, "-o", "out"
            )[0]
            == code
        )
        assert (
            json.loads(Path("out/launch.json").read_text()) == json.loads(out)
            and Path("out/good.json").is_file()
        )
        assert (
            "git:HEAD:none.json: no such file in that commit"
            in said("convert", "git:HEAD:none.json", *rest)[2]
        )

    def test_the_threshold_is_that_of_every_command(self, said: Said, tmp_path: Path) -> None:
        self.changed(tmp_path, ("--sequence-parallel\n", ""))
        words = ("diff", "launch.args", "other.args", "--world-size", "8")
        assert (said(*words)[0], said(*words, "--fail-on", "memory")[0]) == (0, 2)
        assert (
            said(*words, "--fail-on", "memory", "--ignore", "difference/sequence_parallel")[0] == 0
        )

    def test_a_commit(self, said: Said, tmp_path: Path) -> None:
        def git(*words: str) -> None:
            who = ("-c", "user.name=x", "-c", "user.email=x@x")
            subprocess.run(["git", *who, *words], check=True, capture_output=True, cwd=tmp_path)

        said(
            "convert",
            "launch.args",
            "--to",
            "deepspeed",
            "--world-size",
            "8",
            "-o",
            "configs/ds.json",
        )
        git("init", "-q")
        git("add", ".")
        git("commit", "-qm", "one")
        data = json.loads(Path("configs/ds.json").read_text())
        written(Path("configs"), "ds.json", {**data, "gradient_clipping": 0.5})
        code, rows = self.rows(said, "git:HEAD:configs/ds.json", "configs/ds.json")
        assert (code, list(rows)) == (2, ["gradient_clipping"]), (
            "what lay beside it in the commit is read with it"
        )
        assert (
            said("check", "git:HEAD:configs/good.json")[0] == said("check", "configs/good.json")[0]
        )
        for name, says in {
            "git:HEAD:none.json": "no such file in that commit",
            "git:nope:configs/ds.json": "nope",
            "git:--help:x": "expected git:REV:PATH",
            "git:HEAD": "expected git:REV:PATH",
        }.items():
            code, _, err = said("diff", name, "configs/ds.json")
            assert code == 1 and err.startswith("error: ") and says in err and "/tmp" not in err

    def test_rows_of_two_stacks_are_in_words_of_their_files(self, said: Said) -> None:
        """A setting stands beside its own value, and a plan's field never stands for a setting."""
        said("convert", "launch.args", "--to", "deepspeed", "--world-size", "8", "-o", "ds.json")
        known = {
            path for name in ("megatron", "deepspeed") for path in fields(compat.load(name).schema)
        }
        for names in (("launch.args", "ds.json"), ("ds.json", "launch.args")):
            rows = json.loads(said("diff", *names, "--world-size", "8", "--json")[1])["findings"]
            assert not [
                row["path"]
                for row in rows
                if row["effect"] != "same numbers" and row["path"] not in known
            ]
        told = said("diff", "launch.args", "ds.json", "--world-size", "8", "--all")[1]
        assert re.search(
            r"activation_checkpointing.cpu_checkpointing not set -> False \(line \d+\)", told
        )
        lines = [Path(name).read_text().splitlines() for name in ("launch.args", "ds.json")]
        Path("ds.json").write_text(
            Path("ds.json")
            .read_text()
            .replace('"gradient_clipping": 1.0', '"gradient_clipping": 0.5')
        )
        own, other = (next(n for n, line in enumerate(each, 1) if "clip" in line) for each in lines)
        told = said("diff", "launch.args", "ds.json", "--world-size", "8")[1]
        assert f"clip_grad (line {own}) 1.0 -> gradient_clipping 0.5 (line {other})" in told

    def test_a_file_without_ranks_is_read_on_those_of_the_other(
        self, said: Said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        script, config = (
            "torchrun --nproc_per_node 8 pretrain_gpt.py --train-iters 9 --lr 1e-4\n",
            {"train_micro_batch_size_per_gpu": 1, "train_batch_size": 8},
        )
        (tmp_path / "run.sh").write_text(
            script.replace("--lr", "--micro-batch-size 1 --global-batch-size 8 --lr")
        )
        written(tmp_path, "few.json", config)
        monkeypatch.chdir(tmp_path)
        for names in (("run.sh", "few.json"), ("few.json", "run.sh")):
            _, out, err = said("diff", *names)
            assert (
                "few.json does not state a number of ranks: read for 8 ranks, the number in run.sh"
                in err
            )
            assert "train_batch_size" not in out and "gradient_accumulation_steps" not in out
        assert "does not state" not in said("diff", "few.json", "few.json")[2]
        assert "does not state" not in said("diff", "run.sh", "few.json", "--world-size", "8")[2]

    def test_a_path_of_a_commit_from_where_one_stands(
        self, said: Said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """`./` and `../` are read as git reads them."""
        for words in (
            ("init", "-q"),
            ("add", "."),
            ("-c", "user.name=x", "-c", "user.email=x@x", "commit", "-qm", "one"),
        ):
            subprocess.run(["git", *words], check=True, capture_output=True, cwd=tmp_path)
        monkeypatch.chdir(tmp_path / "configs" / "deep")
        for name in ("git:HEAD:./odd.json", "git:HEAD:../good.json", "git:HEAD:configs/good.json"):
            assert said("check", name)[0] == 0
        assert "lies outside of the repository" in said("check", "git:HEAD:../../../x.json")[2]
        assert "no such file in that commit" in said("check", "git:HEAD:./good.json")[2]

    def test_an_error_names_the_file_that_it_is_about(self, said: Said, tmp_path: Path) -> None:
        written(tmp_path, "wrong.json", WRONG)
        for names in (("wrong.json", "configs/good.json"), ("configs/good.json", "wrong.json")):
            code, _, err = said("diff", *names)
            assert (
                code == 1
                and err.startswith("error: wrong.json: line ")
                and err.count("wrong.json") == 1
            )


class TestManyFiles:
    def test_a_folder(self, said: Said) -> None:
        code, out, err = said("check", "configs")
        assert (code, err) == (0, "") and "disable_allgather" not in out, (
            "it has no effect, and many files are many remarks"
        )
        last = r"^2 files: 2 as written, 1 of no stack; \d findings without effect \(--all shows them\)$"
        assert re.search(last, out, re.MULTILINE)
        code, out, err = said("check", "configs", "--all")
        assert (code, err) == (0, "")
        assert (
            "configs/good.json: as written" in out
            and "configs/deep/odd.json: " in out
            and "disable_allgather" in out
        )
        assert (
            "package.json" not in out
            and out.splitlines()[-1] == "2 files: 2 as written, 1 of no stack"
        )

    def test_a_pattern_and_a_name(self, said: Said) -> None:
        out = json.loads(
            said("check", "configs/**/*.json", "launch.args", "--world-size", "8", "--json")[1]
        )
        assert [one["file"] for one in out["files"]] == [
            "configs/deep/odd.json",
            "configs/good.json",
            "launch.args",
        ]
        assert "no file matches the pattern" in said("check", "*.toml")[2]
        refused = "error: *.toml: no file matches the pattern; check the pattern\n"
        assert said("convert", "*.toml", "--to", "megatron")[2] == refused
        code, out, err = said("check", "configs/package.json", "configs/good.json")
        assert code == 1 and "no stack recognises it" in err, "one that was named is an error"

    def test_errors_of_one_file_do_not_hide_another(self, said: Said, tmp_path: Path) -> None:
        written(tmp_path / "configs", "wrong.json", WRONG)
        code, out, err = said("check", "configs")
        assert all(line.startswith("error: configs/wrong.json: ") for line in err.splitlines())
        assert (
            code == 1
            and "did you mean zero_optimization" in err
            and "odd.json" in out
            and "1 refused" in out
        )

    def test_what_is_said_for_one_stack_does_not_stop_another(self, said: Said) -> None:
        words = (
            "--auto-from",
            "max_grad_norm=1.0",
            "--auto-from",
            "bf16=true",
            "--auto-from",
            "per_device_train_batch_size=2",
        )
        code, out, err = said(
            "check", "configs/good.json", "launch.args", "--world-size", "8", *words
        )
        assert code in (0, 2) and err == "", out
        assert (
            "has no use for this option"
            in said("check", "launch.args", "--world-size", "8", *words)[2]
        )
        sizes = " ".join(launch_text().splitlines()[3:5])
        Path("run.sh").write_text(f"torchrun --nproc-per-node 8 pretrain_gpt.py --lr $LR {sizes}\n")
        assert said("check", "run.sh", "configs/good.json", "--env", "LR=1e-4")[2] == ""

    def test_convert_into_a_folder(self, said: Said, tmp_path: Path) -> None:
        (tmp_path / "out").mkdir()
        assert "several files need -o FOLDER" in said("convert", "configs", "--to", "megatron")[2]
        code, out, err = said(
            "convert", "configs", "--to", "megatron", "--world-size", "2", "-o", "out", "-q"
        )
        assert code == 2 and "package.json: left out, as no stack" in err
        assert {path.name for path in (tmp_path / "out").iterdir() if path.suffix == ".args"} == {
            "good.args",
            "odd.args",
        }
        assert [line for line in out.splitlines() if "->" in line] == [
            "configs/good.json -> out/good.args",
            "configs/deep/odd.json -> out/odd.args",
        ]

    def test_the_folder_of_many_conversions_is_made(self, said: Said, tmp_path: Path) -> None:
        words = (
            "convert",
            "configs",
            "--to",
            "megatron",
            "--world-size",
            "2",
            "--format",
            "sarif",
            "-o",
        )
        assert said(*words, "new", "--dry-run")[0] == 2 and not (tmp_path / "new").exists()
        assert said(*words, "new")[0] == 2 and (tmp_path / "new" / "good.args").is_file()
        for wrong, why in (
            ("launch.args", "several files need -o FOLDER"),
            ("no/new", "there is no directory no"),
        ):
            code, out, err = said(*words, wrong)
            assert (code, out) == (1, "") and why in err

    def test_json_of_many_conversions_is_one_object(self, said: Said, tmp_path: Path) -> None:
        (tmp_path / "out").mkdir()
        written(tmp_path / "configs", "wrong.json", WRONG)
        words = (
            "convert",
            "configs",
            "--to",
            "megatron",
            "--world-size",
            "2",
            "-o",
            "out",
            "--json",
        )
        code, out, err = said(*words)
        told = json.loads(out)
        TypeAdapter(OUTPUTS["convert"]).validate_python(told)
        assert code == told["exit_code"] == 1 and "error" not in err
        assert [one["file"] for one in told["files"]] == [
            "configs/good.json",
            "configs/wrong.json",
            "configs/deep/odd.json",
        ]
        good, wrong, _ = told["files"]
        assert good["target"]["dialect"] == "megatron" and good["files"][0] == "out/good.args"
        assert wrong["exit_code"] == 1 and "zero_optimisation" in wrong["problems"][0]

    def test_errors_of_many_conversions_name_the_file(self, said: Said, tmp_path: Path) -> None:
        (tmp_path / "out").mkdir()
        written(tmp_path / "configs", "wrong.json", WRONG)
        code, out, err = said(
            "convert", "configs", "--to", "megatron", "--world-size", "2", "-o", "out", "-q"
        )
        errors = [line for line in err.splitlines() if line.startswith("error")]
        assert (
            code == 1
            and errors
            and all(line.startswith("error: configs/wrong.json: line ") for line in errors)
        )
        assert re.fullmatch(r"3 files: .*\b1 refused\b.*, 1 of no stack", out.splitlines()[-1])

    def test_the_counts_agree_with_the_rows(self, said: Said, tmp_path: Path) -> None:
        written(tmp_path / "configs", "half.json", {**GOOD, "gradient_clipping": 0})
        for words in (("check", "configs", "launch.args"), ("check", "configs")):
            *rows, last = said(*words, "--world-size", "8", "-q")[1].splitlines()
            same = sum(": as written" in row for row in rows)
            assert same and f"{same} as written" in last

    def test_two_of_one_name_are_refused(self, said: Said, tmp_path: Path) -> None:
        written(tmp_path, "good.json", GOOD)
        (tmp_path / "out").mkdir()
        code, _, err = said("convert", "configs", "good.json", "--to", "megatron", "-o", "out")
        assert (
            code == 1
            and "out/good.args: two of the files" in err
            and not list((tmp_path / "out").iterdir())
        )

    def test_thirty_files_take_little_time(self, said: Said, tmp_path: Path) -> None:
        folder = tmp_path / "thirty"
        folder.mkdir()
        for number in range(30):
            written(folder, f"ds{number}.json", ODD if number % 3 == 0 else GOOD)
        begun = time.process_time()
        code, out, _ = said("check", "thirty")
        assert code == 0 and out.splitlines()[-1].startswith("30 files: ")
        assert time.process_time() - begun < 30


def test_a_file_of_several_names_is_one_file(said: Said, tmp_path: Path) -> None:
    names = (
        "configs//good.json",
        "configs/deep/../good.json",
        "./configs/good.json",
        str(tmp_path / "configs/good.json"),
    )
    found = json.loads(said("check", *names, "configs", "--json")[1])["files"]
    assert [one["file"] for one in found] == ["configs//good.json", "configs/deep/odd.json"]


class TestChoice:
    def test_patterns(self) -> None:
        rule = "deepspeed/disable_allgather/no-effect-drop-it"
        patterns = {
            rule: True,
            "deepspeed": True,
            "deepspeed/disable_allgather/": True,
            "*/no-effect-*": True,
            "deep": False,
        }
        assert {pattern: fits(rule, pattern) for pattern in patterns} == patterns

    def rules(self, said: Said, *words: str) -> set[str]:
        found = json.loads(said("check", "configs/deep/odd.json", "--json", *words)[1])["findings"]
        return {one["rule"] for one in found}

    def test_select_and_ignore(self, said: Said) -> None:
        rule = "disable_allgather/no-effect-drop-it"
        everything = self.rules(said)
        assert rule in everything and len(everything) > 1
        assert self.rules(said, "--select", "disable_allgather") == {rule}
        assert self.rules(said, "--ignore", rule) == everything - {rule}

    def test_they_decide_the_exit_code(self, said: Said) -> None:
        words = ("check", "configs/deep/odd.json", "--fail-on", "same numbers")
        assert (said(*words)[0], said(*words, "--select", "gradient_clipping")[0]) == (2, 0)

    @pytest.mark.parametrize(
        ("pattern", "instead"),
        [
            ("gradient_cliping", "did you mean gradient_clipping?"),
            ("zero_optimization", "zero_optimization.* matches all settings of the section"),
            (
                "disable_allgather/no-efect",
                "the rules of disable_allgather are disable_allgather/no-effect-drop-it",
            ),
            ("difference/nothing", "check --json names the rule"),
            ("nothing/*", "check --json names the rule"),
        ],
    )
    def test_a_pattern_that_fits_no_rule_is_refused(
        self, said: Said, pattern: str, instead: str
    ) -> None:
        """Misspelled, --select would let every finding through, and the gate would be open."""
        for option in ("select", "ignore"):
            code, _, err = said("check", "configs/deep/odd.json", f"--{option}", pattern)
            assert (
                code == 1
                and f"error: {option}: {pattern}: no rule has this id" in err
                and instead in err
            )

    def test_patterns_that_a_rule_may_fit_are_taken(self) -> None:
        taken = (
            "*",
            "*/remark",
            "zero_*",
            "release",
            "difference",
            "difference/optimizer.*",
            "world_size/*",
            "load/dropped",
        )
        refuse_strange(taken, ("made_up_key/remark", *taken))
        everyone = [check.rule for name in compat.names() for check in compat.load(name).checks]
        refuse_strange(everyone, everyone)

    def test_the_stars_of_a_refusal_are_no_finding(self, said: Said, tmp_path: Path) -> None:
        written(tmp_path, "wrong.json", WRONG)
        assert said("check", "wrong.json", "--ignore", "*")[0] == 1, (
            "what is refused cannot be ignored"
        )

    def test_a_baseline(self, said: Said, tmp_path: Path) -> None:
        words = ("check", "configs", "--fail-on", "same numbers")
        assert said(*words)[0] == 2
        assert said(*words, "--write-baseline", "known.json")[0] == 0
        assert said(*words, "--baseline", "known.json")[0] == 0
        written(tmp_path / "configs", "new.json", ODD)
        code, out, _ = said(*words, "--baseline", "known.json", "--format", "json")
        assert code == 2 and [
            one["file"] for one in json.loads(out)["files"] if one["findings"]
        ] == ["configs/new.json"]
        both = ("--baseline", "known.json", "--write-baseline", "known.json")
        assert said(*words, *both)[0] == 0 == said(*words, "--baseline", "known.json")[0], (
            "with all findings, old and new"
        )
        (tmp_path / "known.json").write_text("[]")
        assert "known.json: not a baseline file" in said(*words, "--baseline", "known.json")[2]

    def test_a_baseline_holds_from_every_folder(
        self, said: Said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rest = ("--fail-on", "same numbers")
        assert (
            said("check", "configs/deep/odd.json", *rest, "--write-baseline", "configs/known.json")[
                0
            ]
            == 0
        )
        (row, *_) = json.loads(Path("configs/known.json").read_text())["known"]
        assert row["file"] == "deep/odd.json", "relative to the baseline"
        names = (
            "configs/deep/odd.json",
            "./configs/deep/../deep/odd.json",
            str(tmp_path / "configs/deep/odd.json"),
        )
        for name in names:
            assert (
                said("check", name, *rest)[0],
                said("check", name, *rest, "--baseline", "configs/known.json")[0],
            ) == (2, 0)
        (tmp_path / "pyproject.toml").write_text(
            '[tool.stagebridge]\nbaseline = "configs/known.json"\n'
        )
        monkeypatch.chdir(tmp_path / "configs" / "deep")
        assert said("check", "odd.json", *rest)[0] == 0

    def test_a_new_baseline_replaces_nothing_but_a_baseline(
        self, said: Said, tmp_path: Path
    ) -> None:
        other, config = tmp_path / "other.yaml", "configs/good.json"
        other.write_text("mine: 1\n")
        for command in (
            ("check", config),
            ("check", config, "configs"),
            ("diff", config, "configs/deep/odd.json"),
        ):
            for file, told in (
                (config, "is the file that is read"),
                (other, "found a file that is not a baseline"),
            ):
                before = (tmp_path / file).read_text()
                code, _, err = said(*command, "--write-baseline", str(file))
                assert code == 1 and told in err and (tmp_path / file).read_text() == before
        for _ in "again":
            assert said("check", "configs", "--write-baseline", "known.json")[0] == 0
        assert (
            "is the file that is read"
            in said("check", "known.json", "--write-baseline", "known.json")[2]
        )

    def test_only_check_and_diff_write_a_baseline(self, said: Said) -> None:
        with_option = {
            name: "--write-baseline" in said(name, "--help")[1]
            for name in ("check", "diff", "convert")
        }
        assert with_option == {"check": True, "diff": True, "convert": False}

    def test_a_project(self, said: Said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "pyproject.toml").write_text(
            '[tool.stagebridge]\nfail-on = "same numbers"\nexclude = ["*/deep/*"]\n'
        )
        assert said("check", "configs")[0] == 2 and "odd.json" not in said("check", "configs")[1]
        monkeypatch.chdir(tmp_path / "configs")
        assert (
            said("check", "good.json")[0] == 2
            and said("check", "good.json", "--fail-on", "stops")[0] == 0
        )
        (tmp_path / "pyproject.toml").write_text(
            '[tool.stagebridge]\nselct = ["x"]\nignore = "x"\n'
        )
        code, _, err = said("check", "good.json")
        assert code == 1 and "tool.stagebridge.selct: unknown key; expected one of select" in err
        assert "expected a list of strings" in err

    def test_files_of_a_project_have_their_own_sizes(self, said: Said, tmp_path: Path) -> None:
        """One repository with configs for 8 and for 64 ranks; a later table and the command line win."""
        for ranks in (8, 64):
            data = {
                **GOOD,
                "train_batch_size": 2 * ranks,
                "train_micro_batch_size_per_gpu": 1,
                "gradient_accumulation_steps": 2,
            }
            (tmp_path / "configs" / f"{ranks}").mkdir()
            written(tmp_path / "configs" / f"{ranks}", "ds.json", data)
        names = ("configs/8/ds.json", "configs/64/ds.json")
        (tmp_path / "pyproject.toml").write_text("[tool.stagebridge]\nworld-size = 8\n")
        assert [said("check", name)[0] for name in names] == [0, 1]
        assert said("check", *names)[0] == 1
        table = '[[tool.stagebridge.files]]\npattern = "configs/64/**"\nworld_size = {}\n'
        (tmp_path / "pyproject.toml").write_text(
            f"[tool.stagebridge]\nworld-size = 8\n{table.format(4)}{table.format(64)}"
        )
        assert said("check", *names)[0] == 0
        assert [said("check", name)[0] for name in names] == [0, 0]
        found = json.loads(said("check", *names, "--json")[1])["files"]
        assert [one["source"]["world_size"] for one in found] == [8, 64]
        assert said("check", "configs/64/ds.json", "--world-size", "8")[0] == 1, (
            "the command line wins"
        )
        assert said("diff", *names)[0] == 2
        rows = json.loads(said("layout", "configs/64/ds.json", "--model", "gpt2", "--json")[1])[
            "ranks"
        ]
        assert sum(len(row["ranks"]) for row in rows) == 64

    def test_a_table_has_the_options_of_the_command_line(self, said: Said, tmp_path: Path) -> None:
        assert {name.replace("-", "_") for name in READING} == {
            name.rstrip("_") for name in OPTIONS
        } - {"as_json"}
        flags = " ".join(line for line in launch_text().splitlines() if not line.startswith("#"))
        (tmp_path / "run.sh").write_text(
            f"torchrun --nproc-per-node $RANKS pretrain_gpt.py {flags} --seed $SEED\n"
        )
        written(tmp_path, "auto.json", {**GOOD, "train_micro_batch_size_per_gpu": "auto"})
        (tmp_path / "pyproject.toml").write_text(
            "[tool.stagebridge]\nenv = {RANKS = 4, SEED = 2}\nallow-path = ['data']\n"
            "[[tool.stagebridge.files]]\npattern = ['*.sh', 'x']\nenv = ['RANKS=8']\nfrom-version = '0.16.1'\n"
            "[[tool.stagebridge.files]]\npattern = 'auto.json'\nauto = {micro_batch = 4}\n"
        )
        source = json.loads(said("check", "run.sh", "--json")[1])["source"]
        assert (source["world_size"], source["version"], source["given"]["seed"]) == (
            8,
            "0.16.1",
            2,
        )
        assert (
            json.loads(said("check", "run.sh", "--json", "--env", "RANKS=16")[1])["source"][
                "world_size"
            ]
            == 16
        )
        assert said("check", "auto.json")[0] != 1, (
            "--env of the project is for scripts, and no mistake here"
        )

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            (
                "world-size = '8'",
                "tool.stagebridge.world-size: found '8', expected a whole number from 1 to",
            ),
            (
                "world-size = true",
                "tool.stagebridge.world-size: found True, expected a whole number from 1 to",
            ),
            (
                "env = {A = {B = 1}}",
                "tool.stagebridge.env: found {'A': {'B': 1}}, expected a table of names with values",
            ),
            (
                "[[tool.stagebridge.files]]\npattern = 'a[b'",
                "tool.stagebridge.files[1].pattern: found 'a[b', expected a pattern",
            ),
            (
                "env = ['A']",
                "tool.stagebridge.env: found ['A'], expected a table of names with values, or a list",
            ),
            (
                "files = 3",
                "tool.stagebridge.files: expected tables, each under [[tool.stagebridge.files]]",
            ),
            (
                "[[tool.stagebridge.files]]\nworld-size = 8",
                "tool.stagebridge.files[1]: has no pattern",
            ),
            (
                "[[tool.stagebridge.files]]\npattern = '[b-a]'",
                "files[1].pattern: found '[b-a]', expected a pattern",
            ),
            (
                "[[tool.stagebridge.files]]\npattern = 'x'\nworld = 8",
                "files[1].world: unknown key; expected one of pattern",
            ),
        ],
    )
    def test_a_wrong_key_is_named_with_its_place(
        self, said: Said, tmp_path: Path, text: str, expected: str
    ) -> None:
        (tmp_path / "pyproject.toml").write_text(f"[tool.stagebridge]\n{text}\n")
        code, _, err = said("check", "configs/good.json")
        assert code == 1 and expected in err

    @pytest.mark.parametrize(
        ("pattern", "fits_", "others"),
        [
            (
                "configs/64/**",
                ("configs/64/a.json", "configs/64/b/a.json"),
                ("configs/8/a.json", "x/configs/64/a.json"),
            ),
            ("configs/64", ("configs/64/a.json",), ("configs/640/a.json",)),
            ("*_64.json", ("a_64.json", "x/y/a_64.json"), ("a_64.json5", "a_8.json")),
            ("configs/*.json", ("configs/a.json",), ("configs/b/a.json", "a.json")),
            ("**/ds.json", ("ds.json", "x/y/ds.json"), ("x/ads.json",)),
            ("./a/**/b?[!c].json", ("a/bxd.json", "a/x/bxd.json"), ("a/bxc.json", "a/b/.json")),
        ],
    )
    def test_patterns_of_files(
        self, pattern: str, fits_: tuple[str, ...], others: tuple[str, ...]
    ) -> None:
        table = Table((pattern,), {})
        assert [path for path in (*fits_, *others) if table.takes(path)] == list(fits_)

    def test_what_is_not_ours_in_a_project_file_is_left_alone(self) -> None:
        assert project_of('[tool.other]\nx = 1\n[project]\nname = "y"\n', "x").ignore == ()
        assert read_baseline('{"stagebridge": 1, "known": []}', "x") == Choice().known


class TestFormats:
    def test_github(self, said: Said, tmp_path: Path) -> None:
        written(tmp_path / "configs", "wrong.json", WRONG)
        code, out, _ = said("check", "configs", "--format", "github")
        lines = out.splitlines()
        command = r"::(error|warning|notice) file=[^:]+(,line=\d+)?,title=[^:]+::"
        assert code == 1 and all(re.match(command, line) for line in lines)
        (error,) = (line for line in lines if line.startswith("::error"))
        assert error.startswith(
            "::error file=configs/wrong.json,line=10,title=refused::zero_optimisation: the run stops: "
        )

    def test_sarif(self, said: Said, tmp_path: Path) -> None:
        written(tmp_path / "configs", "wrong file.json", WRONG)
        code, out, _ = said("check", "configs", "--format", "sarif")
        log = json.loads(out)
        (one,) = log["runs"]
        rules = [rule["id"] for rule in one["tool"]["driver"]["rules"]]
        assert (code, log["version"], one["invocations"][0]["exitCode"]) == (1, "2.1.0", 1)
        assert len(rules) == len(set(rules)) > 1
        for row in one["results"]:
            assert rules[row["ruleIndex"]] == row["ruleId"] and row["level"] in (
                "error",
                "warning",
                "note",
            )
            assert (
                row["message"]["text"]
                and row["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
            )
        places = {
            row["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
            for row in one["results"]
        }
        assert "configs/wrong%20file.json" in places

    def test_records_of_a_difference(self, said: Said, tmp_path: Path) -> None:
        (tmp_path / "other.args").write_text(launch_text().replace("--lr 3.0e-4", "--lr 1.0e-4"))
        out = said("diff", "launch.args", "other.args", "--world-size", "8", "--format", "github")[
            1
        ]
        line = launch_text().splitlines().index("--lr 3.0e-4") + 1
        assert out == (
            f"::warning file=other.args,line={line},title=difference/lr::lr: different numbers: 0.0003 -> 0.0001\n"
        )

    def test_records_of_a_conversion(self, said: Said, tmp_path: Path) -> None:
        words = ("launch.args", "--to", "fast_llm", "--world-size", "8", "-o", "out.yaml")
        code, out, _ = said("convert", *words, "--format", "sarif")
        (one,) = json.loads(out)["runs"]
        told = json.loads(said("convert", *words, "--force", "--json")[1])
        assert (
            code == told["exit_code"] == one["invocations"][0]["exitCode"]
            and (tmp_path / "out.yaml").is_file()
        )
        assert [row["ruleId"] for row in one["results"]] == [
            finding["rule"] for finding in told["findings"]
        ]
        lines = said("convert", *words, "--force", "--format", "github")[1].splitlines()
        assert len(lines) == len(told["findings"]) and all(
            " file=launch.args," in line for line in lines
        )

    def test_records_of_many_conversions(self, said: Said, tmp_path: Path) -> None:
        (tmp_path / "out").mkdir()
        written(tmp_path / "configs", "wrong.json", WRONG)
        written(tmp_path / "configs", "note.json", {"title": "of no stack"})
        words = (
            "convert",
            "configs",
            "launch.args",
            "--to",
            "megatron",
            "--world-size",
            "8",
            "-o",
            "out",
            "--format",
            "github",
        )
        code, out, err = said(*words)
        assert (
            code == 1
            and "::error file=configs/wrong.json," in out
            and "note.json: left out, as no stack" in err
        )
        made = {path.stem for path in (tmp_path / "out").glob("*.args")}
        assert "launch" in made and not made & {"wrong", "note"}

    def test_records_of_a_conversion_need_a_place_for_the_file(self, said: Said) -> None:
        code, out, err = said("convert", "launch.args", "--to", "fast_llm", "--format", "sarif")
        assert (code, out) == (1, "") and "--format sarif: needs -o OUT" in err

    def test_two_formats_are_refused(self, said: Said, tmp_path: Path) -> None:
        for format in ("sarif", "github", "text"):
            code, _, err = said("check", "configs", "--json", "--format", format)
            assert (code, err) == (
                1,
                f"error: --json --format {format}: two formats; keep one of the options\n",
            )
        assert said("check", "configs", "--json", "--format", "json")[0] == 0
        (tmp_path / "pyproject.toml").write_text('[tool.stagebridge]\nformat = "sarif"\n')
        assert "files" in json.loads(said("check", "configs", "--json")[1])

    def test_a_quiet_refusal_has_the_verdict_and_the_errors(self, said: Said) -> None:
        code, out, err = said(
            "convert", "launch.args", "--to", "deepspeed", "--world-size", "8", "--strict", "-q"
        )
        verdict, *errors = err.splitlines()
        assert (code, out) == (1, "") and not verdict.startswith("error") and errors
        assert all(line.startswith("error: ") for line in errors)

    def test_json_for_wrong_usage_too(self, said: Said) -> None:
        for words in (
            ("check", "--nope", "--json"),
            ("diff", "x", "--format", "json"),
            ("check", "--format=json"),
        ):
            code, out, _ = said(*words)
            assert code == json.loads(out)["exit_code"] == 1 and json.loads(out)["problems"]
        assert (
            "--format: found xml, expected text, json, github, sarif"
            in said("check", "x", "--format", "xml")[2]
        )


def test_the_hook_and_the_action_call_what_there_is(said: Said) -> None:
    yaml = YAML(typ="safe")
    (hook,) = yaml.load((HOME / ".pre-commit-hooks.yaml").read_text())
    assert hook["entry"] == "stagebridge check"
    wanted, left = re.compile(hook["files"]), re.compile(hook["exclude"])
    assert (
        wanted.search("a/ds_config_zero3.json")
        and not wanted.search("package.json")
        and left.search("ds_config.carry.json")
    )
    assert left.search(".vscode/launch.json") and not left.search("a.b/launch.json"), (
        "of an editor, and of no stack"
    )
    action = yaml.load((HOME / "action.yml").read_text())
    steps = action["runs"]["steps"]
    script = steps[-1]["run"].partition("GITHUB_ACTION_PATH/")[2].rstrip('"')
    assert (HOME / script).is_file() and set(action["inputs"]) == {"paths", "options", "sarif"}
    assert set(steps[-1]["env"]) == set(
        re.findall(r"STAGEBRIDGE_[A-Z]+", (HOME / script).read_text())
    )
    assert yaml.load((HOME / "examples" / "gate" / "workflow.yml").read_text())["jobs"]


def test_the_script_of_the_action(said: Said, tmp_path: Path) -> None:
    """As the action runs it, with a `stagebridge` of this source on its path."""
    tool = tmp_path / "bin" / "stagebridge"
    tool.parent.mkdir()
    tool.write_text(
        f'#!/bin/sh\nexec {sys.executable} -P -c "from bridge.cli import main; main()" "$@"\n'
    )
    tool.chmod(0o755)
    variables = {
        **os.environ,
        "PATH": f"{tool.parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(Path(bridge.__file__).parents[1]),
        # One to a line, as `paths: |` of a workflow has them.
        "STAGEBRIDGE_PATHS": "launch.args\nconfigs/**/*.json\n",
        "STAGEBRIDGE_OPTIONS": "--world-size 8 --fail-on same-numbers",
        "STAGEBRIDGE_SARIF": "found.sarif",
    }
    done = subprocess.run(
        ["bash", HOME / "examples/gate/check.sh"],
        capture_output=True,
        text=True,
        env=variables,
        check=False,
    )
    assert done.returncode == 2 and "::notice file=configs/deep/odd.json" in done.stdout, (
        done.stderr
    )
    assert json.loads((tmp_path / "found.sarif").read_text())["runs"][0]["results"]
    wrong = {
        **variables,
        "STAGEBRIDGE_OPTIONS": "--no-such-option",
        "STAGEBRIDGE_SARIF": "none.sarif",
    }
    done = subprocess.run(
        ["bash", HOME / "examples/gate/check.sh"],
        capture_output=True,
        text=True,
        env=wrong,
        check=False,
    )
    assert done.returncode == 1 and not list(tmp_path.glob("none.sarif*"))


class TestCommandLine:
    def test_version_and_help(self, said: Said) -> None:
        assert said("-V")[1] == f"stagebridge {bridge.__version__}\n"
        assert said("help", "diff")[1] == said("diff", "--help")[1]
        assert said("help")[1] == said("--help")[1]
        assert said("help", "nope")[0] == 1

    def test_a_file_alone_is_named_too(self, tmp_path: Path, said: Said) -> None:
        """A hook that gets one file shows nothing else that names it."""
        good, bad = tmp_path / "good.json", tmp_path / "bad.json"
        good.write_text(json.dumps({"train_batch_size": 8, "gradient_clipping": 1.0}))
        bad.write_text(json.dumps({"train_batch_size": 8, "gradient_clippin": 1.0}))
        assert f"{good}: DeepSpeed" in said("check", str(good))[1].replace("\n", " ").replace(
            "  ", ""
        )
        code, _, error = said("check", str(bad))
        assert code == 1 and f"error: {bad}: line 1: gradient_clippin" in error
