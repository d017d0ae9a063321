"""The command line as its users meet it: output, exit codes, and bad input of every kind."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import bridge
import compat
from bridge.cli import run
from bridge.cli.demo import launch_text
from bridge.report.exit_codes import Exit

DEEPSPEED = """{
  "train_batch_size": 16,
  "train_micro_batch_size_per_gpu": 2,
  "gradient_accumulation_steps": 4,
  "bf16": {"enabled": true},
  "zero_optimization": {"stage": 1},
  "gradient_clipping": 1.0
}
"""


@dataclass(frozen=True)
class Done:
    """What a command left behind."""

    code: int
    out: str
    err: str


Cli = Callable[..., Done]


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cli:
    """Runs the command line in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)

    def call(*arguments: str | Path, stdin: bytes = b"") -> Done:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        code = run([str(argument) for argument in arguments])
        return Done(code, *capfd.readouterr())

    return call


def start(*arguments: str | Path, **options: object) -> subprocess.Popen[str]:
    """The real process, with pipes."""
    environment = {**os.environ, "PYTHONPATH": str(Path(bridge.__file__).parents[1])}
    command = [
        sys.executable,
        "-P",
        "-c",
        "from bridge.cli import main; main()",
        *map(str, arguments),
    ]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen(command, text=True, env=environment, **{**pipes, **options})  # type: ignore[call-overload,no-any-return]


@pytest.fixture
def megatron(tmp_path: Path) -> Path:
    """The bundled launch as a file."""
    path = tmp_path / "launch.args"
    path.write_text(launch_text())
    return path


@pytest.fixture
def deepspeed(tmp_path: Path) -> Path:
    """A small DeepSpeed config that converts without loss."""
    path = tmp_path / "ds.json"
    path.write_text(DEEPSPEED)
    return path


class TestConvert:
    def test_the_file_goes_to_stdout_and_the_report_to_stderr(
        self, cli: Cli, megatron: Path, tmp_path: Path
    ) -> None:
        done = cli("convert", megatron, "--to", "deepspeed", "--world-size", "8")
        assert done.code == 0
        written = json.loads(done.out)
        assert written["train_micro_batch_size_per_gpu"] == 2
        assert written["gradient_accumulation_steps"] == 32
        assert written["bf16"] == {"enabled": True}
        assert "sequence_parallel" in done.err
        assert list(tmp_path.iterdir()) == [megatron]

    def test_with_an_output_the_report_goes_to_stdout(
        self, cli: Cli, megatron: Path, tmp_path: Path
    ) -> None:
        done = cli("convert", megatron, "--to", "deepspeed", "--world-size", "8", "-o", "ds.json")
        assert done.code == 0
        assert "sequence_parallel" in done.out
        assert done.err == ""
        assert json.loads((tmp_path / "ds.json").read_text())["train_batch_size"] == 128
        assert {path.name for path in tmp_path.iterdir()} == {
            "launch.args",
            "ds.json",
            "ds.code.json",
            "ds.code.py",
            "ds.json.carry.json",
        }

    def test_the_way_back_runs_on_as_many_ranks(self, cli: Cli, tmp_path: Path) -> None:
        """A Fast-LLM file does not say how many ranks it has, and so not how large its batch is: the sidecar does."""
        model = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128"
        run = "--vocab-size 1000 --train-iters 10 --micro-batch-size 2 --global-batch-size 64 --lr 1e-3"
        script = f"torchrun --nproc-per-node 8 pretrain_gpt.py {model} {run}\n"
        (tmp_path / "launch.sh").write_text(script)
        cli("convert", "launch.sh", "--to", "fast_llm", "-o", "run.yaml")
        done = cli("convert", "run.yaml", "--to", "megatron", "-o", "back.sh", "--json")
        assert "read for 8 ranks, the number in the sidecar" in done.err
        assert (tmp_path / "back.sh").read_text() == script
        findings = json.loads(done.out)["findings"]
        assert not [row for row in findings if "by default" in row["message"]]
        assert "megatron" not in {row["default_of"] for row in json.loads(done.out)["fields"]}

    @pytest.mark.parametrize(
        "balance",
        [
            "none",
            "aux_loss --moe-aux-loss-coeff 1e-2",
            "seq_aux_loss aux_loss --moe-aux-loss-coeff 1e-2 2e-2",
        ],
    )
    def test_a_list_of_one_is_no_edit_of_the_script(
        self, cli: Cli, tmp_path: Path, balance: str
    ) -> None:
        model = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128"
        run = f"--micro-batch-size 2 --global-batch-size 64 --lr 1e-3 --num-experts 8 --moe-router-load-balancing-type {balance}"
        script = f"torchrun --nproc-per-node 8 pretrain_gpt.py {model} {run}\n"
        (tmp_path / "launch.sh").write_text(script)
        cli("convert", "launch.sh", "--to", "deepspeed", "-o", "ds.json")
        cli("convert", "ds.json", "--to", "megatron", "-o", "back.sh")
        assert (tmp_path / "back.sh").read_text() == script

    @pytest.mark.parametrize(
        ("to", "name"), [("merak", "run.yaml"), ("deepspeed", "run.yaml"), ("fast_llm", "run.json")]
    )
    def test_a_suffix_that_a_reader_takes_for_another_format_is_refused(
        self, cli: Cli, megatron: Path, tmp_path: Path, to: str, name: str
    ) -> None:
        done = cli("convert", megatron, "--to", to, "-o", name)
        assert done.code == 1
        assert f"{name}: found suffix {Path(name).suffix}, in which" in done.err
        assert not (tmp_path / name).exists()

    def test_without_carry_over_there_is_no_sidecar(
        self, cli: Cli, megatron: Path, tmp_path: Path
    ) -> None:
        assert (
            cli("convert", megatron, "--to", "deepspeed", "-o", "ds.json", "--no-carry").code == 2
        )
        assert not (tmp_path / "ds.json.carry.json").exists()

    def test_there_and_back(self, cli: Cli, megatron: Path, tmp_path: Path) -> None:
        cli("convert", megatron, "--to", "deepspeed", "--world-size", "8", "-o", "ds.json")
        done = cli("convert", "ds.json", "--to", "megatron", "--world-size", "8", "-o", "back.args")
        assert "note: ds.json.carry.json is read too" in done.err
        read = compat.load("megatron").read
        assert (
            read(tmp_path / "back.args", world_size=8).given == read(megatron, world_size=8).given
        )

    def test_a_sidecar_of_a_file_with_equal_content_names_that_file(
        self, cli: Cli, megatron: Path, tmp_path: Path
    ) -> None:
        cli("convert", megatron, "--to", "deepspeed", "--world-size", "8", "-o", "other.json")
        for suffix in ("", ".carry.json"):
            (tmp_path / f"ds.json{suffix}").write_text(
                (tmp_path / f"other.json{suffix}").read_text()
            )
        done = cli("convert", "ds.json", "--to", "megatron", "--world-size", "8", "-o", "back.args")
        assert "it was written next to other.json" in done.err

    def test_an_edit_survives_the_way_back(self, cli: Cli, megatron: Path, tmp_path: Path) -> None:
        cli("convert", megatron, "--to", "deepspeed", "--world-size", "8", "-o", "ds.json")
        path = tmp_path / "ds.json"
        path.write_text(path.read_text().replace('"lr": 0.0003', '"lr": 0.0002'))
        cli("convert", "ds.json", "--to", "megatron", "--world-size", "8", "-o", "back.args")
        read = compat.load("megatron").read
        before, after = (
            read(megatron, world_size=8).given,
            read(tmp_path / "back.args", world_size=8).given,
        )
        assert {name for name in before if before[name] != after[name]} == {"lr"}
        assert after["lr"] == 0.0002

    def test_a_damaged_sidecar_is_an_error(self, cli: Cli, deepspeed: Path, tmp_path: Path) -> None:
        (tmp_path / "ds.json.carry.json").write_text("{}")
        done = cli("convert", deepspeed, "--to", "megatron")
        assert done.code == 1
        assert "ds.json.carry.json: not a carry-over file" in done.err
        assert cli("convert", deepspeed, "--to", "megatron", "--no-carry").code != 1

    def test_standard_input(self, cli: Cli) -> None:
        done = cli(
            "convert", "-", "--to", "deepspeed", "--world-size", "8", stdin=launch_text().encode()
        )
        assert json.loads(done.out)["train_batch_size"] == 128
        assert cli("check", "-", "--world-size", "2", stdin=DEEPSPEED.encode()).code in (0, 2)

    def test_the_suffix_of_the_output_picks_the_format(
        self, cli: Cli, deepspeed: Path, tmp_path: Path
    ) -> None:
        cli("convert", deepspeed, "--to", "megatron", "-o", "run.yaml")
        assert "MODEL_ARGS:" in (tmp_path / "run.yaml").read_text()
        cli("convert", deepspeed, "--to", "megatron", "-o", "run.args")
        assert "--micro-batch-size 2" in (tmp_path / "run.args").read_text()

    def test_json(self, cli: Cli, megatron: Path) -> None:
        done = cli("convert", megatron, "--to", "deepspeed", "--world-size", "8", "--json")
        found = json.loads(done.out)
        assert set(found) == {
            "source",
            "target",
            "environment",
            "launch",
            "plan",
            "fields",
            "findings",
            "exit_code",
        }
        assert found["exit_code"] == done.code == 0
        assert (found["source"]["dialect"], found["target"]["dialect"]) == ("megatron", "deepspeed")
        assert json.loads(found["target"]["text"])["train_batch_size"] == 128
        lost = {finding["path"]: finding for finding in found["findings"]}
        assert lost["sequence_parallel"]["effect"] == "memory or speed"
        assert lost["sequence_parallel"]["origin"].startswith("line ")
        assert done.err == ""

    def test_strict_writes_nothing(self, cli: Cli, megatron: Path, tmp_path: Path) -> None:
        done = cli(
            "convert",
            megatron,
            "--to",
            "deepspeed",
            "--world-size",
            "8",
            "-o",
            "ds.json",
            "--strict",
        )
        assert done.code == 1
        assert "strict: nothing was written" in done.err
        assert "error: sequence_parallel" in done.err
        assert list(tmp_path.iterdir()) == [megatron]

    def test_the_input_is_not_written_over(self, cli: Cli, deepspeed: Path) -> None:
        done = cli("convert", deepspeed, "--to", "deepspeed", "-o", "./ds.json")
        assert done.code == 1
        assert "is the file that is read" in done.err
        assert deepspeed.read_text() == DEEPSPEED

    def test_an_output_that_cannot_be_written(
        self, cli: Cli, deepspeed: Path, tmp_path: Path
    ) -> None:
        done = cli("convert", deepspeed, "--to", "megatron", "-o", "no/such/run.args")
        assert (done.code, done.out) == (1, "")
        assert "there is no directory" in done.err
        assert list(tmp_path.iterdir()) == [deepspeed]

    def test_auto_and_code_are_said_beside_the_file(self, cli: Cli, tmp_path: Path) -> None:
        (tmp_path / "auto.json").write_text(
            '{"train_micro_batch_size_per_gpu": "auto", "train_batch_size": 16}'
        )
        assert cli("check", "auto.json").code == 1
        done = cli(
            "convert",
            "auto.json",
            "--to",
            "megatron",
            "--auto",
            "micro_batch=2",
            "--code",
            "pipeline_stages=2",
            "--json",
        )
        given = json.loads(done.out)["target"]["given"]
        assert (given["micro_batch_size"], given["pipeline_model_parallel_size"]) == (2, 2)

    def test_an_option_has_no_line(self, cli: Cli, tmp_path: Path) -> None:
        """A setting of --code that is refused is named without a line or a file, for a file and for a script that names it."""
        (tmp_path / "ds.json").write_text(
            '{\n "train_batch_size": 8,\n "bf16": {"enabled": true}\n}'
        )
        (tmp_path / "run.sh").write_text(
            "deepspeed --num_gpus 4 train.py --deepspeed_config ds.json\n"
        )
        for name in ("ds.json", "run.sh"):
            done = cli(
                "convert", str(tmp_path / name), "--to", "megatron", "--code", "optimizer.type=Lamb"
            )
            assert (
                "error: code.optimizer: not a setting of the training script; move optimizer from"
                in done.err
            )
            assert "line" not in done.err and "ds.json" not in done.err

    def test_code_in_sections(self, cli: Cli, deepspeed: Path) -> None:
        said = ["--code", "scheduler.name=cosine", "--code", "scheduler.total_steps=50", "--json"]
        source = json.loads(cli("convert", deepspeed, "--to", "megatron", *said).out)["source"][
            "given"
        ]
        assert (source["code.scheduler.name"], source["code.scheduler.total_steps"]) == (
            "cosine",
            50,
        )
        both = cli("check", deepspeed, "--code", "scheduler=1", "--code", "scheduler.name=cosine")
        assert both.code == 1
        words = "found a value and also keys below this name (scheduler.name); keep either the value or the keys"
        assert both.err == f"error: --code scheduler: {words}\n"

    @pytest.mark.parametrize(
        ("options", "says"),
        [
            (["--auto", "x"], "--auto x: expected NAME=VALUE"),
            (["--auto", "a=1"], "--auto: megatron has no use for this option"),
            (
                ["--from", "megatronn"],
                "megatronn: unknown dialect; known are .*; did you mean megatron",
            ),
            (
                ["--from-version", "0.16.9"],
                "megatron: unknown release 0.16.9; .*; --nearest uses 0.16.1 instead",
            ),
            (
                ["--from-version", "newer", "--nearest"],
                "megatron: unknown release newer; known are",
            ),
            (["--to-version", "9.9"], "deepspeed: unknown release 9.9"),
            (["--world-size", "0"], "world-size"),
            (["--world-size", "two"], "world-size"),
            (["--world-size", "7"], "7"),
            (["--nonsense"], "No such option"),
        ],
    )
    def test_wrong_options(self, cli: Cli, megatron: Path, options: list[str], says: str) -> None:
        done = cli("convert", megatron, "--to", "deepspeed", *options)
        assert (done.code, done.out) == (1, "")
        assert re.search(says, done.err)

    @pytest.mark.parametrize(
        ("command", "said"),
        [
            (
                ["check", "--from-version", "77.0"],
                "Megatron-Core 77.0 is not known; the config is read as one of 0.20.0.dev20260822",
            ),
            (
                ["check", "--from-version", "0.16.9"],
                "Megatron-Core 0.16.9 is not known; the config is read as one of 0.16.1",
            ),
            (
                ["check", "--from-version", "0.1"],
                "Megatron-Core 0.1 is not known; the config is read as one of 0.9.0",
            ),
            (
                ["convert", "--to", "deepspeed", "--to-version", "77.0", "-o", "ds.json"],
                "DeepSpeed 77.0 is not known; the config is read as",
            ),
            (
                ["drift", "--to-version", "77.0", "-o", "new.args"],
                "Megatron-Core 77.0 is not known; the config is read as one of 0.20.0.dev20260822",
            ),
        ],
    )
    def test_an_unknown_release_is_taken_as_the_nearest_and_said_first(
        self, cli: Cli, megatron: Path, command: list[str], said: str
    ) -> None:
        name, *options = command
        done = cli(name, megatron, *options, "--nearest")
        assert done.out.startswith(said)
        assert done.code == 2
        assert (
            json.loads(cli(name, megatron, *options, "--nearest", "--json").out)["exit_code"] == 2
        )


EVEN = "--micro-batch-size 2 --global-batch-size 64 --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 "
EVEN += "--max-position-embeddings 64 --lr 1e-3 --bf16 --tensor-model-parallel-size 2 --sequence-parallel"
LONG = EVEN + " --train-iters 10"


class TestExitCodes:
    """One table for every command: the worst effect among the findings decides, from a threshold on."""

    @pytest.mark.parametrize(
        ("flags", "threshold", "code"),
        [
            (LONG, [], 0),
            (LONG, ["--fail-on", "different numbers"], 0),
            (LONG, ["--fail-on", "memory"], 2),
            (LONG, ["--fail-on", "memory or speed"], 2),
            (LONG + " --global-batch-size 63", [], 1),
            (LONG + " --global-batch-size 63", ["--fail-on", "stops"], 1),
            (LONG + " --optimizer sgd --use-distributed-optimizer", ["--fail-on", "stops"], 1),
            (LONG + " --calculate-per-token-loss", [], 2),
            (LONG + " --calculate-per-token-loss", ["--fail-on", "stops"], 0),
        ],
    )
    def test_convert(self, cli: Cli, flags: str, threshold: list[str], code: int) -> None:
        done = cli(
            "convert",
            "-",
            "--to",
            "deepspeed",
            "--world-size",
            "8",
            "--json",
            *threshold,
            stdin=flags.encode(),
        )
        assert done.code == json.loads(done.out)["exit_code"] == code

    def test_a_lone_remark_of_same_numbers_is_none_to_fail_on(self, cli: Cli) -> None:
        flags = (LONG + " --min-loss-scale 2").encode()
        assert cli("check", "-", "--world-size", "8", stdin=flags).code == 0
        assert (
            cli("check", "-", "--world-size", "8", "--fail-on", "same-numbers", stdin=flags).code
            == 2
        )

    def test_a_batch_that_does_not_divide_is_said_once(self, cli: Cli) -> None:
        odd = EVEN.replace("size 64 ", "size 63 ", 1).encode()
        done = cli(
            "check", "-", "--world-size", "8", "--from-version", "0.17.0", "--json", stdin=odd
        )
        found = [
            finding["effect"]
            for finding in json.loads(done.out)["findings"]
            if finding["path"] == "global_batch_size"
        ]
        assert (done.code, found) == (1, ["the run stops"])

    @pytest.mark.parametrize("words", ["nothing", "same", "", "numbers"])
    def test_an_effect_that_is_none_is_wrong_usage(
        self, cli: Cli, words: str, tmp_path: Path
    ) -> None:
        done = cli(
            "convert",
            "-",
            "--to",
            "deepspeed",
            "-o",
            "x.json",
            "--fail-on",
            words,
            stdin=EVEN.encode(),
        )
        assert done.code == 1 and "--fail-on" in done.err and not (tmp_path / "x.json").exists()

    def test_every_command_tells_its_codes(self, cli: Cli) -> None:
        for command in (
            "",
            "convert",
            "check",
            "diff",
            "drift",
            "show",
            "layout",
            "schedule",
            "train",
            "verify",
            "fuzz",
            "demo",
        ):
            words = ["trace", "diff"] if command == "diff" else [command] if command else []
            assert "Exit codes:\n    0  " in cli(*words, "--help").out, command

    def test_the_first_help_has_every_code(self, cli: Cli) -> None:
        text = cli("--help").out
        assert all(f"    {code.value}  " in text for code in Exit)


WHOLE = EVEN + " --train-iters 10 --mock-data --tokenizer-type NullTokenizer --vocab-size 100"
NEEDED = [
    "micro_batch_size",
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "max_position_embeddings",
    "seq_length",
    "lr",
]


def without(flags: str, name: str) -> str:
    return re.sub(rf"--{name.replace('_', '-')} \S+ ?", "", flags)


class TestWhatIsStillToBeAdded:
    @pytest.mark.parametrize("name", [*NEEDED, "train_iters"])
    def test_a_launch_that_the_stack_refuses_is_never_valid(self, cli: Cli, name: str) -> None:
        done = cli("check", "-", "--world-size", "8", stdin=without(WHOLE, name).encode())
        assert (
            done.code == 1
            and "You still have to add" in done.out
            and f"--{name.replace('_', '-')}" in done.out
        )

    def test_a_whole_launch_lacks_nothing(self, cli: Cli) -> None:
        done = cli("check", "-", "--world-size", "8", stdin=WHOLE.encode())
        assert done.code == 0 and "still have to add" not in done.out

    def test_sizes_may_come_from_a_checkpoint(self, cli: Cli) -> None:
        flags = (
            without(without(WHOLE, "num_layers"), "hidden_size") + " --use-checkpoint-args --load x"
        )
        assert cli("check", "-", "--world-size", "8", stdin=flags.encode()).code != 1

    def test_a_fragment_is_no_error(self, cli: Cli) -> None:
        done = cli(
            "check",
            "-",
            "--world-size",
            "8",
            stdin=b"--tensor-model-parallel-size 2 --sequence-parallel --bf16",
        )
        assert done.code == 2 and "You still have to add" in done.out

    @pytest.mark.parametrize(
        ("to", "flag"), [("megatron", "--num-layers"), ("automodel", "model._target_")]
    )
    def test_of_a_target(self, cli: Cli, deepspeed: Path, to: str, flag: str) -> None:
        done = cli("convert", deepspeed, "--to", to, "--world-size", "2", "--json")
        found = {
            finding["path"]: finding
            for finding in json.loads(done.out)["findings"]
            if finding["how"] == "missing"
        }
        assert done.code == 2 and any(flag in finding["message"] for finding in found.values())
        assert {finding["effect"] for finding in found.values()} <= {
            "different numbers",
            "same numbers",
        }
        report = cli("convert", deepspeed, "--to", to, "--world-size", "2").err
        assert "You still have to add" in report and flag in report

    @pytest.mark.parametrize(
        ("target", "stops"), [("AutoConfig.from_pretrained", True), ("LlamaConfig", False)]
    )
    def test_of_a_config_that_is_loaded_from_nowhere(
        self, cli: Cli, target: str, stops: bool
    ) -> None:
        model = (
            "model:\n  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_config\n  config:\n"
        )
        done = cli(
            "check", "-", "--json", stdin=f"{model}    _target_: transformers.{target}\n".encode()
        )
        found = {
            finding["path"]
            for finding in json.loads(done.out)["findings"]
            if finding["how"] == "missing"
        }
        assert ("model.config.pretrained_model_name_or_path" in found) is stops

    def test_of_the_target_of_a_whole_launch(self, cli: Cli) -> None:
        done = cli(
            "convert", "-", "--to", "automodel", "--world-size", "8", "--json", stdin=WHOLE.encode()
        )
        found = [
            finding for finding in json.loads(done.out)["findings"] if finding["how"] == "missing"
        ]
        assert done.code == 1 and {finding["effect"] for finding in found} == {"the run stops"}


@pytest.mark.parametrize(
    "flag",
    ["--target-tensor-model-parallel-size 2", "--own-switch bf16", "--own-batch=3", "--own-name x"],
)
def test_a_flag_that_nobody_knows_counts_whatever_its_name(
    cli: Cli, tmp_path: Path, flag: str
) -> None:
    (tmp_path / "launch.sh").write_text(f"torchrun --nproc_per_node 2 train.py {EVEN} {flag}\n")
    assert cli("convert", "launch.sh", "--to", "deepspeed", "--json").code == 1
    done = cli("convert", "launch.sh", "--to", "deepspeed", "--json", "--lenient")
    name = flag.replace("=", " ").split()[0]
    (found,) = (finding for finding in json.loads(done.out)["findings"] if finding["path"] == name)
    assert (found["effect"], done.code) == ("different numbers", 2)


class TestCheck:
    def test_findings(self, cli: Cli, tmp_path: Path) -> None:
        (tmp_path / "x.args").write_text(
            "--micro-batch-size 1\n--num-layers 4\n--hidden-size 64\n--num-attention-heads 4\n--lr 1e-4 --lr 2e-4\n"
        )
        done = cli("check", "x.args", "--world-size", "1", "--from-version", "0.16.1", "--lenient")
        assert done.code == 2
        assert "lr" in done.out + done.err

    def test_json(self, cli: Cli, deepspeed: Path) -> None:
        done = cli("check", deepspeed, "--json", "--world-size", "2")
        found = json.loads(done.out)
        assert set(found) == {"source", "effective", "findings", "exit_code"}
        assert found["exit_code"] == done.code
        assert found["effective"]["zero_optimization.stage"] == 1

    def test_every_problem_is_listed(self, cli: Cli) -> None:
        text = b'{"train_batch_size": true, "zero_optimisation": {}, "gradient_clipping": "lots"}'
        done = cli("check", "-", "--from", "deepspeed", stdin=text)
        assert (done.code, done.out) == (1, "")
        for name in ("train_batch_size", "zero_optimisation", "gradient_clipping"):
            assert name in done.err
        assert all(line.startswith("error: ") for line in done.err.splitlines())

    def test_errors_as_json(self, cli: Cli) -> None:
        done = cli(
            "check", "-", "--json", stdin=b'{"zero_optimisation": {}, "train_batch_size": 1}'
        )
        found = json.loads(done.out)
        assert found["exit_code"] == done.code == 1
        assert any("did you mean zero_optimization" in problem for problem in found["problems"])


class TestDemo:
    def test_writes_what_it_lists(self, cli: Cli, tmp_path: Path) -> None:
        done = cli("demo", "--no-train")
        assert (done.code, done.err) == (0, "")
        folder = tmp_path / "stagebridge-demo"
        assert {path.name for path in folder.iterdir()} == {
            "megatron.args",
            "ds_config.json",
            "ds_config.json.carry.json",
            "ds_config.code.json",
            "ds_config.code.py",
            "back.args",
            "report.json",
            "zero3.json",
            "args.json",
        }
        again = compat.load("megatron").read(folder / "back.args", world_size=8)
        assert (
            again.given
            == compat.load("megatron").read(folder / "megatron.args", world_size=8).given
        )
        assert all(path.name in done.out for path in folder.iterdir())
        assert "came back equal" in done.out
        compile((folder / "ds_config.code.py").read_text(), "ds_config.code.py", "exec")
        assert json.loads((folder / "report.json").read_text())["exit_code"] == 0

    def test_twice_is_fine(self, cli: Cli) -> None:
        assert [cli("demo", "--no-train", "-o", "x").code for _ in range(2)] == [0, 0]

    def test_without_torch_it_says_how_to_train(
        self, cli: Cli, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("bridge.stack.extras.find_spec", lambda name: None)
        done = cli("demo")
        assert (done.code, done.err) == (0, "")
        assert (
            done.out.splitlines()[-1]
            == "To train the plan here as well: install the extra engine, and run the demo again."
        )

    def test_no_folder(self, cli: Cli, tmp_path: Path) -> None:
        (tmp_path / "x").write_text("")
        done = cli("demo", "-o", "x/y")
        assert done.code == 1
        assert "cannot be created" in done.err


class TestUsage:
    @pytest.mark.parametrize(
        "arguments",
        [["--help"], ["-h"], ["convert", "--help"], ["check", "-h"], ["demo", "--help"]],
    )
    def test_help_teaches(self, cli: Cli, arguments: list[str]) -> None:
        done = cli(*arguments)
        assert (done.code, done.err) == (0, "")
        assert "stagebridge" in done.out
        if arguments[0] in ("convert", "check"):
            assert "Examples:" in done.out
            assert "Exit codes:" in done.out

    @pytest.mark.parametrize(
        "arguments",
        [[], ["convrt"], ["convert"], ["convert", "x"], ["check"], ["diff", "a"], ["--no"]],
    )
    def test_wrong_usage_is_1_not_2(self, cli: Cli, arguments: list[str]) -> None:
        done = cli(*arguments)
        assert done.code == 1
        assert "Usage: stagebridge" in done.out + done.err or done.err.startswith(
            "error: --to: missing; name the stack"
        )

    def test_version(self, cli: Cli) -> None:
        assert cli("--version").out == f"stagebridge {bridge.__version__}\n"


def bomb() -> str:
    return "a0: &a0 [1, 2]\n" + "".join(
        f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9)
    )


BAD: dict[str, tuple[str, bytes, str]] = {
    "empty": ("x.json", b"", "empty"),
    "blank": ("x.yaml", b"\n \n", "empty"),
    "binary": ("x.json", b"\x00\x01\x02", "binary"),
    "image": ("x.json", b"\x89PNG\r\n\x1a\n", "UTF-8"),
    "truncated JSON": ("x.json", DEEPSPEED[:90].encode(), "unterminated string"),
    "truncated YAML": ("x.yaml", b'MODEL_ARGS:\n  --lr: "1e', "line 2"),
    "truncated flags": ("x.args", b"--lr '1e", "an open quote"),
    "large": ("x.json", b" " * (17 * 2**20), "16 MiB"),
    "deep JSON": ("x.json", b'{"a":' * 50_000, "deeper than 100"),
    "deep YAML": ("x.yaml", b"a: " + b"[" * 50_000, "deeper than 100"),
    "alias bomb": ("x.yaml", bomb().encode(), "more than 20,000 values"),
    "python object": (
        "x.yaml",
        b"MODEL_ARGS: !!python/object/apply:os.system ['touch pwned']\n",
        "tag",
    ),
    "unknown tag": ("x.yaml", b"MODEL_ARGS: !run {}\n", "tag"),
    "duplicate keys": (
        "x.json",
        b'{"train_batch_size": 8,\n"train_batch_size": 16}',
        "lines 1 and 2",
    ),
    "NaN": ("x.json", b'{"gradient_clipping": NaN}', "NaN"),
    "1e400": ("x.json", b'{"gradient_clipping": 1e400}', "finite"),
    "YAML infinity": ("x.yaml", b"MODEL_ARGS:\n  --lr: .inf\n", "finite"),
    "negative count": ("x.json", b'{"train_batch_size": -8}', "train_batch_size"),
    "fractional count": ("x.json", b'{"train_batch_size": 8.5}', "train_batch_size"),
    "true for a number": ("x.json", b'{"train_batch_size": true}', "train_batch_size"),
    "text for a number": ("x.json", b'{"train_batch_size": "many"}', "train_batch_size"),
    "list for a section": (
        "x.json",
        b'{"train_batch_size": 8, "zero_optimization": [1]}',
        "zero_optimization",
    ),
    "number for a switch": (
        "x.json",
        b'{"train_batch_size": 8, "bf16": {"enabled": 3}}',
        "bf16.enabled",
    ),
    "a number alone": ("x.json", b"42", "expected a mapping"),
    "a list of numbers": ("x.json", b"[1, 2]", ""),
    "somebody else's file": (
        "x.yaml",
        b"services:\n  web: {image: nginx}\n",
        "no stack recognises it",
    ),
    "abbreviated flag": ("x.args", b"--micro-batch 2\n", "micro-batch"),
    "unknown flag": ("x.args", b"--micro-batch-size 1 --fly-me-to-the-moon\n", "fly-me"),
    "flag without its value": ("x.args", b"--micro-batch-size\n", "micro-batch-size"),
    "text for a flag's number": ("x.args", b"--micro-batch-size two\n", "micro-batch-size"),
    "shell text": ("x.args", b"--micro-batch-size $(touch pwned)\n", "micro-batch-size"),
}
"""Name of the file, its content, and what the message must say."""


class TestBadInput:
    @pytest.mark.parametrize("name", BAD)
    @pytest.mark.parametrize("command", ["check", "convert"])
    def test_one_clear_message(self, cli: Cli, tmp_path: Path, name: str, command: str) -> None:
        file, content, says = BAD[name]
        (tmp_path / file).write_bytes(content)
        options = ["--to", "deepspeed", "-o", "out.json"] if command == "convert" else []
        done = cli(command, file, *options)
        assert (done.code, done.out) == (1, "")
        assert re.search(says, done.err)
        assert "Traceback" not in done.err
        assert all(
            line.startswith("error: ") and line.isprintable() for line in done.err.splitlines()
        )
        assert len(done.err) < 4000
        assert [path.name for path in tmp_path.iterdir()] == [file], "something was written or run"

    def test_missing_and_directory(self, cli: Cli) -> None:
        assert "no such file" in cli("check", "missing.json").err
        assert "no file that may be a config" in cli("check", ".").err
        assert "found a directory" in cli("layout", ".").err

    def test_through_the_real_command(self, tmp_path: Path) -> None:
        process = start("check", "missing.json", cwd=tmp_path)
        out, err = process.communicate()
        assert (process.returncode, out) == (1, "")
        assert err == "error: missing.json: no such file; check the path\n"


class TestTerminals:
    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
    @pytest.mark.parametrize(
        "words", [("check",), ("check", "--json"), ("convert", "--to", "deepspeed")]
    )
    @pytest.mark.parametrize("unbuffered", ["", "1"])
    def test_a_full_disk_is_one_line(
        self,
        words: tuple[str, ...],
        unbuffered: str,
        megatron: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
        with open("/dev/full", "w") as full:
            process = start(*words, megatron, "--world-size", "8", stdout=full)
            _, err = process.communicate(timeout=60)
        said = "error: standard output: cannot be written (No space left on device)\n"
        assert process.returncode == 1 and err.endswith(said) and "Traceback" not in err

    def test_a_pipe_has_no_colour(self, megatron: Path) -> None:
        process = start("convert", megatron, "--to", "deepspeed", "--world-size", "8")
        out, err = process.communicate()
        assert process.returncode == 0
        assert "\x1b" not in out + err

    @pytest.mark.parametrize("columns", [40, 80, 160])
    def test_a_terminal_has_colour_and_its_own_width(self, megatron: Path, columns: int) -> None:
        shown = terminal(
            ["convert", str(megatron), "--to", "deepspeed", "--world-size", "8", "-o", "ds.json"],
            columns,
        )
        assert "\x1b[" in shown
        plain = re.sub(r"\x1b\[[0-9;]*m", "", shown)
        tables = plain.split("In the training script")[0]
        assert max(len(line.rstrip("\r")) for line in tables.split("\n")) <= columns

    def test_a_reader_that_leaves_is_no_error(self, megatron: Path) -> None:
        process = start("convert", megatron, "--to", "deepspeed", "--world-size", "8", "--json")
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        err = process.stderr.read()
        process.wait()
        assert process.returncode == 1
        assert err == ""


def terminal(arguments: list[str], columns: int) -> str:
    """What the command shows on a terminal of that width."""
    pty = pytest.importorskip("pty")
    import fcntl
    import struct
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    variables = {
        name: value
        for name, value in os.environ.items()
        if name not in ("COLUMNS", "LINES", "NO_COLOR")
    }
    variables |= {"TERM": "xterm-256color", "PYTHONPATH": str(Path(bridge.__file__).parents[1])}
    command = [sys.executable, "-P", "-c", "from bridge.cli import main; main()", *arguments]
    folder = Path(arguments[1]).parent
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=variables, cwd=folder
    )
    os.close(theirs)
    shown = b"".join(_chunks(ours))
    process.wait()
    os.close(ours)
    return shown.decode()


def _chunks(handle: int) -> Iterator[bytes]:
    while True:
        try:
            chunk = os.read(handle, 65536)
        except OSError:
            return
        if not chunk:
            return
        yield chunk
