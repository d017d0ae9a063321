"""Scripts of Megatron-DeepSpeed, which say the run both in Megatron's flags and in a DeepSpeed file."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from bridge.cli import run
from bridge.cli.demo import launch_text
from compat.megatron import flags, releases

pytestmark = pytest.mark.once
SCRIPT = """\
cat <<EOT > ds_config.json
{"train_batch_size": 256, "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0,
 "zero_optimization": {"stage": 1}, "bf16": {"enabled": true}}
EOT
deepspeed --num_gpus 8 pretrain_gpt.py --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 \\
  --num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 \\
  --micro-batch-size 4 --global-batch-size 256 --train-iters 5000 --lr $LR --bf16 \\
  --deepspeed --deepspeed_config=ds_config.json --zero-stage=1
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("run.sh").write_text(SCRIPT)
    return "run.sh"


def told(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join("".join(capsys.readouterr()).split())


def test_flags_and_file_are_one_run(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["resolve", script, "--env", "LR=1e-4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = {row["setting"]: (row["value"], row["winner"]["line"]) for row in found["settings"]}
    assert rows["lr"] == (1e-4, 7) and rows["num_layers"] == (24, 6)
    assert rows["gradient_clipping"] == (1.0, 2) and rows["zero_optimization.stage"] == (1, 3)
    assert not found["ignored"] and not found["stops"]
    assert run(["check", script, "--env", "LR=1e-4"]) == 0
    assert run(["check", script]) == 1
    assert "--lr: $LR" in told(capsys)


def test_what_the_program_says_reaches_other_stacks(
    script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["convert", script, "--env", "LR=1e-4", "--to", "megatron", "-o", "out.args"]
    assert run(words) in (0, 2)
    flags = Path("out.args").read_text().split()
    pairs = dict(pairwise(flags))
    for flag, value in {
        "--num-layers": "24",
        "--lr": "0.0001",
        "--pipeline-model-parallel-size": "2",
        "--global-batch-size": "256",
        "--clip-grad": "1.0",
    }.items():
        assert pairs[flag] == value
    assert "--bf16" in flags
    capsys.readouterr()
    assert run(["layout", script, "--env", "LR=1e-4"]) == 0
    assert "24 layers, hidden 2048" in told(capsys)


@pytest.mark.parametrize(
    ("written", "instead", "code", "says"),
    [
        ("--global-batch-size 256", "--global-batch-size 512", 2, "train_batch_size (line 2) 256 is not used"),
        ("--global-batch-size 256", "", 2, "train_batch_size (line 2) 256 is not used"),
        ("--micro-batch-size 4", "--micro-batch-size 2", 2, "train_micro_batch_size_per_gpu (line 2) 4 is not used"),
        ("--bf16", "--bf16 --clip-grad 0.5", 2, "--clip-grad (line 7) 0.5 is not used: gradient_clipping 1.0"),
        ("--zero-stage=1", "--zero-stage=3", 2, "builds the model for ZeRO 3"),
        ('"stage": 1', '"stage": 2', 1, "refuses ZeRO stages 2 and 3"),
        ("--bf16", "--bf16 --num-experts 8", 2, "layers of DeepSpeed's MoE"),
        ("--bf16", "--bf16 --num-experts 1", 0, ""),
        ("--bf16", "--bf16 --normalization rmsnorm --num-key-value-heads 4", 0, ""),
        ("--bf16", "--bf16 --reset-iteration", 2, "does not know the flag"),
        (', "bf16": {"enabled": true}', "", 2, "--bf16 (line 7) True is not used"),
        ('"gradient_clipping"', '"scheduler": {"type": "WarmupLR"}, "gradient_clipping"', 2, "'WarmupLR' is not used"),
    ],
)  # fmt: skip
def test_contradictions_name_who_wins(
    script: str,
    capsys: pytest.CaptureFixture[str],
    written: str,
    instead: str,
    code: int,
    says: str,
) -> None:
    assert written in SCRIPT
    Path(script).write_text(SCRIPT.replace(written, instead))
    assert run(["check", script, "--env", "LR=1e-4"]) == code
    assert says in told(capsys)


def test_counts_of_tokens_are_samples(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    tokens = "--train-samples 4096000 --train-tokens 1048576000 --lr-decay-tokens 2097152000"
    Path(script).write_text(SCRIPT.replace("--train-iters 5000", tokens))
    words = ["convert", script, "--env", "LR=1e-4", "--to", "megatron", "-o", "out.args"]
    assert run(words) in (0, 2)
    flags = Path("out.args").read_text().split()
    pairs = dict(pairwise(flags))
    assert pairs["--train-iters"] == "2000" and pairs["--lr-decay-iters"] == "4000"


def test_only_the_launch_with_the_file_is_read(
    script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    other = "\npython pretrain_gpt.py --num-layers 99 --hidden-size 64 --num-attention-heads 4\n"
    Path(script).write_text(SCRIPT + other)
    assert run(["resolve", script, "--env", "LR=1e-4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"num_layers": 24}.items() <= {
        row["setting"]: row["value"] for row in found["settings"]
    }.items()
    # A program of one's own, whose flags are called alike.
    Path(script).write_text(SCRIPT.replace("--hidden-size 2048", "").replace("$LR", "1"))
    assert run(["check", script]) == 1
    assert "could be for deepspeed or megatron" in told(capsys)
    assert run(["resolve", script, "--from", "deepspeed", "--json"]) == 0
    assert "num_layers" not in capsys.readouterr().out


def test_difference_of_the_programs_flags(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("other.sh").write_text(SCRIPT.replace("--num-layers 24", "--num-layers 48"))
    assert run(["diff", script, "other.sh", "--env", "LR=1e-4"]) == 2
    assert "num_layers" in told(capsys)
    assert run(["diff", script, script, "--env", "LR=1e-4"]) == 0


def test_megatron_says_whose_flags_these_are(
    script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["check", script, "--from", "megatron", "--env", "LR=1e-4"]) == 1
    error = capsys.readouterr().err
    assert "--zero-stage: a flag of Megatron-DeepSpeed" in error and "did you mean" not in error


@pytest.mark.parametrize(
    ("flags", "release", "lenient", "code", "told"),
    [
        (
            "--enable-gpt-oss",
            "0.19.2",
            (),
            0,
            "left out; Megatron knows the flag only if NVIDIA ModelOpt is",
        ),
        (
            "--enable-gpt-oss --modelopt-enabled",
            "0.19.2",
            (),
            2,
            "left out; NVIDIA ModelOpt changes the model",
        ),
        (
            "--export-kd-cfg kd.yaml --load x",
            "0.19.2",
            (),
            2,
            "left out, with kd.yaml; NVIDIA ModelOpt changes",
        ),
        (
            "--enable-gpt-oss",
            "0.15.0",
            (),
            1,
            "which pretrain_gpt.py of Megatron 0.15.0 does not have; leave",
        ),
        (
            "--enable-gpt-oss",
            "0.15.0",
            ("--lenient",),
            0,
            "left out; Megatron knows the flag only if",
        ),
    ],
)
def test_flags_of_modelopt_are_named_and_change_numbers_where_it_may_be_on(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: str,
    release: str,
    lenient: tuple[str, ...],
    code: int,
    told: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("launch.args").write_text(f"{launch_text()}\n{flags}\n")
    assert (
        run(["check", "launch.args", "--world-size", "8", "--from-version", release, *lenient])
        == code
    )
    out = " ".join("".join(capsys.readouterr()).split())
    assert told in out and flags.split()[0] in out


def test_no_release_has_a_flag_of_modelopt() -> None:
    assert not [
        release for release in releases.KNOWN if releases.flags(release).keys() & flags.MODELOPT
    ]


def test_a_format_that_is_only_read_is_not_proposed_to_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("launch.args").write_text(launch_text())
    assert (
        run(["convert", "launch.args", "--to", "deepspeed", "--world-size", "8", "-o", "out.sh"])
        == 1
    )
    error = capsys.readouterr().err
    assert (
        "found suffix .sh, in which configs of DeepSpeed cannot be written; use .json or .hjson"
        in error
    )


FLAGS = (
    SCRIPT.partition("pretrain_gpt.py ")[2].replace("\\\n", "\n").replace("$LR", "1e-4")
).replace("--bf16", "--bf16 --clip-grad 0.5")
FILE = SCRIPT.partition("\n")[2].partition("EOT")[0]


@pytest.mark.parametrize("named", [True, False])
def test_flags_and_file_without_a_script_are_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], named: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ds_config.json").write_text(FILE)
    rest = FLAGS.partition("--deepspeed ")[0]
    Path("run.args").write_text(FLAGS if named else rest)
    sources = [["run.args"]] * named + [
        ["run.args", "ds_config.json"],
        ["ds_config.json", "run.args"],
    ]
    for words in sources:
        assert run(["resolve", *words, "--json"]) == 2
        found = json.loads(capsys.readouterr().out)
        rows = {one["setting"]: one for one in found["settings"]}
        assert rows["num_layers"]["value"] == 24
        clip = rows["gradient_clipping"]
        assert (clip["value"], clip["winner"]["source"]) == (1.0, "ds_config.json")
        (loser,) = clip["overruled"]
        assert (loser["source"], loser["setting"], loser["value"]) == (
            "run.args",
            "--clip-grad",
            0.5,
        )
    beside = [] if named else ["--with", "ds_config.json"]
    assert run(["check", "run.args", *beside]) == 2
    assert "0.5 is not used: gradient_clipping 1.0 (ds_config.json" in told(capsys)
    assert run(["layout", "run.args", *beside]) == 0
    assert "24 layers, hidden 2048" in told(capsys)


def test_loose_files_that_make_no_run_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ds_config.json").write_text(FILE)
    Path("run.args").write_text(FLAGS)
    Path("other.json").write_text(FILE)
    for words, says in (
        (["run.args", "--with", "other.json"], "names the DeepSpeed file ds_config.json"),
        (["run.args", "--with", "run.args"], "expected one DeepSpeed file"),
        (
            ["other.json", "--with", "ds_config.json"],
            "expected arguments of Hugging Face's Trainer",
        ),
        (["other.json", "--with", "run.args"], "name the file of its flags first"),
    ):
        assert run(["check", *words]) == 1
        assert says in told(capsys)
