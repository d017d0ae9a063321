"""What a file may not do: lead out of its folder, reach the terminal raw, or leave files that more people can read."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

import bridge
from bridge.cli import run
from bridge.files import OutsideError, find, reaching, write_all
from bridge.files.printable import clean, clean_block
from bridge.files.secrets import Secrets, spans

RECIPE = """model:
  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained
distributed:
  pp_size: 2
  pipeline:
    pp_schedule: PipelineScheduleMulti
    pp_microbatch_size: 2
    pp_schedule_csv: {csv}
step_scheduler:
  local_batch_size: 8
  global_batch_size: 8
"""
PRIVATE = "root:x:0:0:not for you\n"
FLAGS = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64\n"
FLAGS += "--micro-batch-size 2 --global-batch-size 16 --lr 3e-4 --bf16\n"
SCRIPT = (
    "#!/bin/bash\ntorchrun --nproc-per-node 8 pretrain_gpt.py \\\n"
    + FLAGS.strip().replace("\n", " \\\n")
    + "\n"
)
NAMED = {
    "automodel": RECIPE.format(csv="{path}"),
    "deepspeed": "#!/bin/sh\ndeepspeed train.py --deepspeed_config {path}\n",
    "fast_llm": "train gpt --config {path}\n",
}
"""Files of three stacks, each naming another file."""


@pytest.fixture
def private(tmp_path: Path) -> Path:
    path = tmp_path / "private" / "file.json"
    path.parent.mkdir()
    path.write_text(PRIVATE)
    return path


def said(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str]:
    """Exit code and everything printed."""
    capsys.readouterr()
    code = run([str(word) for word in words])
    out, err = capsys.readouterr()
    return code, out + err


@pytest.mark.parametrize("stack", NAMED)
@pytest.mark.parametrize("way", ["absolute", "upwards", "link"])
def test_a_file_that_is_named_is_not_opened_outside(
    stack: str,
    way: str,
    tmp_path: Path,
    private: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "given"
    folder.mkdir()
    (folder / "link.json").symlink_to(private)
    path = {"absolute": str(private), "upwards": "../private/file.json", "link": "link.json"}[way]
    file = (
        folder
        / {"automodel": "recipe.yaml", "deepspeed": "launch.sh", "fast_llm": "run.args"}[stack]
    )
    file.write_text(NAMED[stack].format(path=path))
    opened: list[str] = []
    monkeypatch.setattr("builtins.open", _recorded(open, opened))
    draw = ["schedule", "--microbatches", "4", "--world-size", "2"]
    for command, *options in [["check"], draw] if stack == "automodel" else [["check"]]:
        _, text = said(capsys, command, file, "--json", "--from", stack, *options)
        assert "--allow-path" in text and str(private) in text
        assert "not for you" not in text
    assert not [path for path in opened if os.path.realpath(path) == str(private)]
    _, text = said(capsys, "check", file, "--from", stack, "--allow-path", private)
    assert [path for path in opened if os.path.realpath(path) == str(private)]
    assert "not for you" not in text


def _recorded(open_: object, opened: list[str]) -> object:
    def recorded(file: object, *words: object, **named: object) -> object:
        opened.append(str(file))
        return open_(file, *words, **named)  # type: ignore[operator]

    return recorded


def test_a_file_in_the_folder_is_found_and_one_elsewhere_only_if_allowed(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for place in ("in/a.csv", "b.csv"):
        (tmp_path / place).write_text("0F0\n")
    with reaching(tmp_path / "in"):
        assert find("a.csv") == tmp_path / "in" / "a.csv"
        assert find("none.csv") is None
        for name in (str(tmp_path / "b.csv"), "../b.csv", "/no/such/file"):
            with pytest.raises(OutsideError, match="leads out"):
                find(name)
    with reaching(tmp_path / "in", [tmp_path]):
        assert find("../b.csv") and find("b.csv") == tmp_path / "b.csv"


def test_a_wrong_table_is_not_echoed_at_length(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.csv").write_text(
        "\n".join(f"{'secret words ' * 20}{line}" for line in range(500))
    )
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(csv="own.csv"))
    code, text = said(capsys, "check", tmp_path / "recipe.yaml")
    assert code == 1 and "495 more" in text and text.count("secret words") <= 5 and len(text) < 2000


# Terminals

ODD = "\x1b]0;owned\x07 \x1b[2J \u202egnp.exe\u202c \r\x1b[1A \x9b31m \u2028 \ufeff \x7f"
RAW = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2028\u2029\ufeff]")
OK = {"train_micro_batch_size_per_gpu": 2, "train_batch_size": 16}
PAINTED = {
    "key.json": json.dumps({**OK, f"ke{ODD}y": 1}),
    "value.json": json.dumps({**OK, "zero_optimization": {"stage": ODD}}),
    "free.json": json.dumps(
        {**OK, "optimizer": {"type": ODD}, "wandb": {"enabled": True, "team": ODD}}
    ),
    "word.args": FLAGS + f"--data-path 'x{ODD}y' --wandb-project 'a{ODD}'\n",
    "script.sh": SCRIPT.rstrip() + f" --save 'x{ODD}' '--no-such{ODD}' 1\n# {ODD}\n",
    f"na{ODD}me.json": json.dumps({**OK, "unknown": 1}),
    "recipe.yaml": RECIPE.format(csv=json.dumps("x" + ODD)),
    "none.txt": f"{ODD} nothing of the kind",
}
"""Files with what a terminal acts upon in keys, values, words, comments and their own names."""


@pytest.mark.parametrize("name", PAINTED, ids=ascii)
def test_control_characters_of_a_file_do_not_reach_the_terminal(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text(PAINTED[name])
    for words in (
        ["check"],
        ["check", "--lenient", "--json"],
        ["convert", "--lenient", "--to", "megatron", "-o", "o.args"],
    ):
        _, text = said(
            capsys,
            words[0],
            tmp_path / name,
            *words[1:-1],
            *([tmp_path / words[-1]] if "-o" in words else words[1:][-1:]),
        )
        assert not RAW.search(text), words
        assert text


def test_a_file_cannot_add_lines_to_a_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = "x\n\nerror: nothing is wrong\nvalid"
    (tmp_path / "a.json").write_text(
        json.dumps({"train_batch_size": 8, fake: 1, "wandb": {"enabled": True, "team": fake}})
    )
    for options in ([], ["--lenient"]):
        _, text = said(capsys, "check", tmp_path / "a.json", *options)
        assert not re.search(r"^\s*(error: nothing is wrong|valid)\s*$", text, re.M)


@given(st.text())
@settings(max_examples=200, derandomize=True, database=None)
def test_clean_text_is_printable_and_says_what_was_there(text: str) -> None:
    assert clean(text).isprintable()
    assert all(letter.isprintable() or letter in "\n\t" for letter in clean_block(text))
    if "\\" not in text and text.isascii():
        assert clean(text).encode().decode("unicode_escape") == text


# Modes and links


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(params=[0o600, 0o640, 0o644], ids=oct)
def launch_of_mode(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, int]:
    """A launch script in a folder of its own, and the mode that it has."""
    launch = tmp_path / "launch.sh"
    launch.write_text(SCRIPT.rstrip() + " --pipeline-model-parallel-size 2\n")
    launch.chmod(request.param)
    return launch, request.param


def too_open(launch: Path, wanted: int) -> dict[str, str]:
    """Files beside a source that others may do more with than with the source."""
    modes = {path.name: mode(path) for path in launch.parent.iterdir() if path != launch}
    return {name: oct(found) for name, found in modes.items() if found & ~wanted}


def test_what_is_written_is_as_private_as_its_source(launch_of_mode: tuple[Path, int]) -> None:
    launch, wanted = launch_of_mode
    folder = launch.parent
    (folder / "ds.json").touch(0o666)
    (folder / "ds.json").chmod(0o666)
    assert run(["convert", str(launch), "--to", "deepspeed", "-o", str(folder / "ds.json")]) in (
        0,
        2,
    )
    assert run(
        ["drift", str(launch), "--to-version", "0.18.0", "-o", str(folder / "new.args")]
    ) in (0, 2)
    assert run(["schedule", str(launch), "--csv", str(folder / "s.csv")]) == 0
    written = {path.name for path in folder.iterdir()} - {"launch.sh"}
    assert written == {
        "ds.json",
        "ds.json.carry.json",
        "ds.code.json",
        "ds.code.py",
        "new.args",
        "s.csv",
    }
    assert not too_open(launch, wanted)


def test_a_picture_is_as_private_as_its_source(launch_of_mode: tuple[Path, int]) -> None:
    pytest.importorskip("matplotlib")
    launch, wanted = launch_of_mode
    assert run(["schedule", str(launch), "--png", str(launch.parent / "s.png")]) == 0
    assert (launch.parent / "s.png").exists() and not too_open(launch, wanted)


def test_files_that_nobody_named_are_not_written_through_links(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.args").write_text(FLAGS)
    (tmp_path / "theirs").write_text("keep")
    (tmp_path / "ds.json.carry.json").symlink_to(tmp_path / "theirs")
    code, text = said(
        capsys,
        "convert",
        tmp_path / "a.args",
        "--to",
        "deepspeed",
        "--world-size",
        "8",
        "-o",
        tmp_path / "ds.json",
    )
    assert code == 1 and "is a link" in text
    assert (tmp_path / "theirs").read_text() == "keep" and not (tmp_path / "ds.json").exists()


def test_a_picture_does_not_replace_its_source(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.args").write_text(FLAGS)
    for option in ("--png", "--csv"):
        code, text = said(
            capsys,
            "schedule",
            tmp_path / "a.args",
            "--world-size",
            "8",
            option,
            tmp_path / "a.args",
        )
        assert code == 1 and "is the file" in text and (tmp_path / "a.args").read_text() == FLAGS


# Sets of files

WRITER = """
import sys
from pathlib import Path
from bridge.files import write_all
folder, mark = Path(sys.argv[1]), sys.argv[2]
for turn in range(int(sys.argv[3])):
    write_all({folder / name: f"{mark} {turn}\\n" for name in ("a", "b", "c")})
"""


def test_writers_at_once_leave_the_files_of_one(tmp_path: Path) -> None:
    """And whoever reads under the shared lock never sees two of them."""
    from bridge.files.lock import shared

    write_all({tmp_path / name: "0\n" for name in ("a", "b", "c")})
    environment = {**os.environ, "PYTHONPATH": str(Path(bridge.__file__).parent.parent)}
    words = [sys.executable, "-c", WRITER, str(tmp_path)]
    writers = [
        subprocess.Popen([*words, str(number), "40"], env=environment) for number in range(4)
    ]
    seen: set[str] = set()
    while any(writer.poll() is None for writer in writers):
        with shared(tmp_path):
            found = {(tmp_path / name).read_text() for name in ("a", "b", "c")}
        assert len(found) == 1
        seen |= found
    assert [writer.returncode for writer in writers] == [0] * 4
    assert len({(tmp_path / name).read_text() for name in ("a", "b", "c")}) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"]
    assert len(seen) > 1


# Secrets

KEY, TOKEN, WORD = "0123456789abcdef" * 2 + "01234567", "hf_abcdefghijklmnopqrstuv", "s3cret value!"
SECRETS = f"""export WANDB_API_KEY={KEY}
export HF_TOKEN="{TOKEN}"
INNER=inner-words-9
export DB_PASSWORD=$INNER
export AWS_SECRET_ACCESS_KEY='{WORD}' NOT_ONE=plain-words
git clone https://me:pass-in-url@host/x.git
"""
LEAKS = (KEY, TOKEN, WORD, "inner-words-9", "pass-in-url")


def with_secrets(folder: Path) -> Path:
    path = folder / "launch.sh"
    path.write_text(SCRIPT.replace("#!/bin/bash\n", "#!/bin/bash\n" + SECRETS))
    path.chmod(0o600)
    return path


def test_secrets_of_a_script_stay_in_it_and_come_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, target, back = with_secrets(tmp_path), tmp_path / "ds.json", tmp_path / "back.sh"
    for words in (
        ["check", script, "--json"],
        ["convert", script, "--to", "deepspeed", "-o", target],
        ["convert", script, "--to", "megatron"],
    ):
        _, text = said(capsys, *words)
        assert text and not [leak for leak in LEAKS if leak in text], words
    for path in set(tmp_path.iterdir()) - {script}:
        assert not [leak for leak in LEAKS if leak in path.read_text()], path
    assert "plain-words" in (tmp_path / "ds.json.carry.json").read_text()
    code, text = said(capsys, "convert", target, "--to", "megatron", "-o", back)
    assert code in (0, 2) and back.read_text() == script.read_text() and mode(back) == 0o600
    assert not [leak for leak in LEAKS if leak in text]
    target.write_text(json.dumps({**json.loads(target.read_text()), "gradient_clipping": 0.25}))
    said(capsys, "convert", target, "--to", "megatron", "-o", back)
    assert "--clip-grad 0.25" in back.read_text() and all(
        leak in back.read_text() for leak in LEAKS
    )


def test_secrets_that_are_gone_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, target, back = with_secrets(tmp_path), tmp_path / "ds.json", tmp_path / "back.sh"
    said(capsys, "convert", script, "--to", "deepspeed", "-o", target)
    script.rename(tmp_path / "other.sh")
    _, text = said(capsys, "convert", target, "--to", "megatron", "-o", back, "--json")
    found = findings(text)
    assert {"__hidden_WANDB_API_KEY__", "__hidden_HF_TOKEN__"} <= {
        finding["path"] for finding in found if finding["effect"] == "the run stops"
    }
    assert not [leak for leak in LEAKS if leak in back.read_text()]


def test_a_secret_of_a_file_is_not_in_its_sidecar(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target, back = tmp_path / "ds.json", tmp_path / "out.args", tmp_path / "back.json"
    source.write_text(json.dumps({**OK, "comet": {"enabled": True, "api_key": "not-for-you-1"}}))
    for words in (
        ["check", source, "--json"],
        ["check", source],
        ["convert", source, "--to", "megatron", "-o", target],
    ):
        _, text = said(capsys, *words, "--world-size", "8")
        assert "not-for-you-1" not in text
    assert not [
        path for path in set(tmp_path.iterdir()) - {source} if "not-for-you-1" in path.read_text()
    ]
    said(capsys, "convert", target, "--to", "deepspeed", "--world-size", "8", "-o", back)
    assert json.loads(back.read_text())["comet"]["api_key"] == "not-for-you-1"


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("--wandb-api-key abcdef", "abcdef"),
        ("--hf_token=abc", "abc"),
        ('{"api_key": "a b"}', "a b"),
        ("apiKey: abc123", "abc123"),
        ('["--auth-token", "abc"]', "abc"),
        ("${GITHUB_TOKEN:-abc}", "abc"),
        ('os.environ["OPENAI_API_KEY"] = "abc"', "abc"),
        ("x=sk-abcdefghijklmnop1234", "sk-abcdefghijklmnop1234"),
        (
            "wandb login 0123456789012345678901234567890123456789",
            "0123456789012345678901234567890123456789",
        ),
        ("id: AKIAABCDEFGHIJKLMNOP", "AKIAABCDEFGHIJKLMNOP"),
        ("token: ghp_abcdefghijklmnopqrst0123", "ghp_abcdefghijklmnopqrst0123"),
        ("my_token: abcdefgh12345678", "abcdefgh12345678"),
        ("export WANDB_API_KEY_2=abc", "abc"),
        ("--url=key=token=a&my_key=abcdefgh12345678", "abcdefgh12345678"),
        ("x=api_key=key=abc", "key=abc"),
        ("declare -A SECRETS=([password]=quotedsecretNNN1)", "quotedsecretNNN1"),
        ("declare -A SECRETS=(\n  [password]='a b'\n)", "a b"),
        ("PASSWORDS=($1 hunter22)", "hunter22"),
        ("curl -H 'Authorization: Bearer abc12' x", "abc12"),
        ('{"Authorization": "Basic dXNlcjpw=="}', "dXNlcjpw=="),
        ("docker login -u me -p hunter22 host", "hunter22"),
        ("docker login host \\\n  -u me \\\n  --password 'a b'", "a b"),
        ("docker login --password=hunter22 host", "hunter22"),
        ("https://h/f?X-Amz-Signature=ab12&x=1", "ab12"),
        ("https://h/f?x=1&X-Amz-Credential=me%2Fus&y", "me%2Fus"),
        ("https://h/f?sig=ab%2B1&x=1", "ab%2B1"),
        ("https://h/f?signature=ab12", "ab12"),
        ("https://h/f?x=1&token=ab12", "ab12"),
        ("https://h/f?access_token=ab12", "ab12"),
        ('wget "https://h/f?api_key=ab12"', "ab12"),
        ("DB_PASS=hunter22", "hunter22"),
        ("MYSQL_PWD=hunter22 mysql", "hunter22"),
        ("azure_storage_key: hunter22", "hunter22"),
        ("passwords: [hunter22]", "hunter22"),
        ("helm registry login -u me -p hunter22 host", "hunter22"),
        ("skopeo login -p hunter22 host", "hunter22"),
        ("echo hunter22 | docker login -u me --password-stdin host", "hunter22"),
        ("sshpass -p hunter22 ssh host", "hunter22"),
        ('curl -u "me:hunter22" https://h', "hunter22"),
        ("aws configure set aws_secret_access_key hunter22", "hunter22"),
        ("machine h login me password hunter22", "hunter22"),
        ("git clone https://abcdef0123456789ab@host/x", "abcdef0123456789ab"),
        (
            "https://hooks.slack.com/services/T000/B000/abcdef0123456789",
            "T000/B000/abcdef0123456789",
        ),
        ("https://hooks.slack.com/services/T0/B0/short", "T0/B0/short"),
        ("https://discord.com/api/webhooks/123/abcdefgh", "123/abcdefgh"),
        ("https://api.telegram.org/bot123456:abcdef/sendMessage", "123456:abcdef"),
        ("webhook_url: https://h/x/abc", "https://h/x/abc"),
        ("cookie: 'session=abc'", "session=abc"),
        ('{"private_key_id": "abc"}', "abc"),
        ("x: Bearer abcdefgh12345678", "abcdefgh12345678"),
        ("AIza" + "a" * 34, "AIza" + "a" * 34),
        ("AIza" + "a" * 35, "AIza" + "a" * 35),
        ("npm_abcdefghijklmnopqrst0123", "npm_abcdefghijklmnopqrst0123"),
        ("İ: Authorization: Bearer abc12", "abc12"),
    ],
)
def test_secrets_are_found(text: str, secret: str) -> None:
    (start, end, _) = spans(text)[0]
    assert text[start:end] == secret
    found = Secrets.of(text)
    assert secret not in found.hide(text) and found.reveal(found.hide(text)) == text


@pytest.mark.parametrize(
    ("value", "is_hidden"),
    [
        ({"auth": "Some1Secret"}, True),
        ({"args.auth.value": "Some1Secret"}, True),
        ({"pwd": "Some1Secret"}, True),
        ({"argv": ["--token", "Some1Secret"]}, True),
        ({"headers": {"Authorization": "Bearer Some1Secret"}}, True),
        ({"auth": "kerberos"}, False),
        ({"pwd": "/home/me/Run1"}, False),
        ({"token": "<|endoftext|>"}, False),
        ({"pad_token": "Some1Word"}, False),
        ({"argv": ["--pass", "2"]}, False),
    ],
)
def test_names_that_leave_it_open_are_secrets_in_data(value: Any, is_hidden: bool) -> None:
    assert (Secrets().within(value) != value) is is_hidden


def test_every_value_of_an_array_is_hidden() -> None:
    text = 'declare -A SECRETS=([one]=first-secret-1 [two]="second secret" third-secret-3) # end'
    hidden = Secrets.of(text).hide(text)
    assert (
        hidden
        == 'declare -A SECRETS=([one]=__hidden_SECRETS__ [two]="__hidden_SECRETS_2__" __hidden_SECRETS_3__) # end'
    )


def test_many_secrets_are_all_hidden() -> None:
    """In one way through the text, each with a mark of its own."""
    values = [
        f"{number}-of-{length}" + "x" * length for number in range(300) for length in (0, 7, 40)
    ]
    text = "".join(f"export MY_API_KEY={value}\n" for value in values)
    found = Secrets.of(text)
    assert len(found.marks) == len({*found.marks.values()}) == len(values)
    hidden = found.hide(text)
    assert not [value for value in values if value in hidden] and found.reveal(hidden) == text
    assert (
        values[-1] not in found.hide_known(f"({values[-1]})")
        and found.hide_known("nothing") == "nothing"
    )
    found.forget()
    assert values[-1] in found.hide_known(values[-1])


@pytest.mark.parametrize(
    "text",
    [
        "pad_token: <pad>",
        "--json-keys text",
        "eos_token: </s>",
        "sort_key: length",
        "export HF_TOKEN=$1",
        "API_KEY=${KEY:?}",
        "max_tokens: 4096",
        "--tokenizer-type GPT2BPETokenizer",
        "revision: 0123456789012345678901234567890123456789",
        "x/snapshots/0123456789012345678901234567890123456789",
        "--no-key 1 --num-attention-heads 4",
        "auth_token_file: /x/y",
        "KEYS=(text label)",
        "SECRETS=($A $B)",
        "Authorization: Bearer $TOKEN",
        "docker login host --password-stdin",
        "docker login -u me --password-stdin host",
        "curl -u $USER:$PASS https://h",
        "curl -u me https://h",
        "sshpass -f file ssh h",
        "git config credential.helper store",
        "--credential-helper osxkeychain",
        "credentials_provider: default",
        "secretKeyRef: {name: x}",
        "--passphrase-fd 3",
        "passwordless: 1",
        "MODEL_KEY=state_dict",
        "BACKWARD_PASS=2",
        "PWD=/home/me",
        "ssh://git@host/x",
        "docker run -p 8080:80 image",
        "https://h/f?token=${TOKEN}&x=1",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert Secrets.of(text).hide(text) == text


# Sidecars


def findings(text: str) -> list[dict[str, Any]]:
    """Those in the JSON that stands before the notes."""
    found: list[dict[str, Any]] = json.JSONDecoder().raw_decode(text)[0]["findings"]
    return found


def carried(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[Path, Path]:
    """A translation and its sidecar."""
    (tmp_path / "launch.args").write_text(FLAGS)
    said(
        capsys,
        "convert",
        tmp_path / "launch.args",
        "--to",
        "deepspeed",
        "--world-size",
        "8",
        "-o",
        tmp_path / "ds.json",
    )
    return tmp_path / "ds.json", tmp_path / "ds.json.carry.json"


@pytest.mark.parametrize(
    ("part", "path", "value"),
    [
        ("given", "no_such_setting", 1),
        ("given", "num_layers", "many"),
        ("given", "hidden_size", [1]),
        ("meant", "no_such_field", 1),
        ("meant", "batch", {"micro": 2}),
        ("meant", "batch.micro", "two"),
        ("meant", "batch.micro", None),
        ("meant", "optimizer.betas", {"tuple": [0.9]}),
        ("meant", "run.seed", [1]),
    ],
)
def test_what_a_sidecar_says_and_cannot_be_used_is_a_finding(
    part: str, path: str, value: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, place = carried(tmp_path, capsys)
    record = json.loads(place.read_text())
    record[part][path] = value
    place.write_text(json.dumps(record))
    code, text = said(
        capsys,
        "convert",
        target,
        "--to",
        "megatron",
        "--world-size",
        "8",
        "--json",
        "-o",
        tmp_path / "b.args",
    )
    if code != 1:
        found = findings(text)
        assert [
            finding
            for finding in found
            if finding["path"] == path and "sidecar" in finding["message"]
        ]
        assert (
            said(
                capsys, "convert", target, "--to", "megatron", "--strict", "-o", tmp_path / "c.args"
            )[0]
            == 1
        )
        assert not (tmp_path / "c.args").exists()
    else:
        assert path in text


@pytest.mark.parametrize(
    ("key", "value", "effect", "says"),
    [
        ("version", "99.1", "different numbers", "unknown release 99.1"),
        ("dialect", "merak", "same numbers", "is from merak"),
    ],
)
def test_a_sidecar_that_is_not_used_is_a_finding(
    key: str, value: str, effect: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, place = carried(tmp_path, capsys)
    place.write_text(json.dumps({**json.loads(place.read_text()), key: value}))
    _, text = said(
        capsys,
        "convert",
        target,
        "--to",
        "megatron",
        "--world-size",
        "8",
        "--json",
        "-o",
        tmp_path / "b.args",
    )
    found = findings(text)[0]
    assert (found["path"], found["effect"]) == (place.name, effect)
    assert says in found["message"] and "not used" in found["message"]
    assert (
        said(capsys, "convert", target, "--to", "megatron", "--strict", "-o", tmp_path / "c.args")[
            0
        ]
        == 1
    )


def test_a_sidecar_of_another_conversion_is_left_out_and_said_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither its digest nor its names are those of the file; a file that was renamed as it is keeps its own."""
    target, place = carried(tmp_path, capsys)
    kept = tmp_path / "renamed.json"
    kept.write_text(target.read_text())
    kept.with_name("renamed.json.carry.json").write_text(place.read_text())
    assert (
        "not used"
        not in said(capsys, "convert", kept, "--to", "megatron", "--world-size", "8", "--json")[1]
    )
    kept.write_text(target.read_text() + "\n")
    _, text = said(capsys, "convert", kept, "--to", "megatron", "--world-size", "8", "--json")
    found = findings(text)[0]
    assert (found["path"], found["effect"]) == ("renamed.json.carry.json", "different numbers")
    assert "another conversion" in found["message"] and target.name in found["message"]
    # A file with another meaning never had what the sidecar holds: nothing is lost, and it is said once.
    kept.write_text(target.read_text().replace("0.0003", "0.0006"))
    assert kept.read_text() != target.read_text()
    _, text = said(capsys, "convert", kept, "--to", "megatron", "--world-size", "8")
    assert text.count("another conversion") == 1 and "note: renamed.json.carry.json" in text


PROJECTS = {
    "one": "--global-batch-size 64 --num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024"
    " --max-position-embeddings 1024 --vocab-size 50257 --lr 3e-4 --min-lr 3e-5 --train-iters 5000 --lr-warmup-iters 200",
    "other": "--global-batch-size 128 --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048"
    " --max-position-embeddings 2048 --vocab-size 32000 --lr 1e-4 --min-lr 1e-5 --train-iters 20000 --lr-warmup-iters 1000",
}
ALIKE = " --micro-batch-size 2 --bf16 --weight-decay 0.1 --clip-grad 1.0 --adam-beta2 0.95 --lr-decay-style cosine"
MIDDLE = {
    "deepspeed": ("ds_config.json", '"gradient_clipping": 1.0', '"gradient_clipping": 0.7'),
    "fast_llm": ("run.yaml", "gradient_norm_clipping: 1.0", "gradient_norm_clipping: 0.7"),
    "automodel": ("run.yaml", "max_norm: 1.0", "max_norm: 0.7"),
    "merak": ("run.json", '"max_grad_norm": 1.0', '"max_grad_norm": 0.7'),
}


@pytest.mark.parametrize("stack", MIDDLE)
def test_a_sidecar_of_another_run_with_the_same_names_is_left_out_and_an_edit_merges(
    stack: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, before, after = MIDDLE[stack]
    for project, flags in PROJECTS.items():
        (tmp_path / project).mkdir()
        (tmp_path / project / "x.args").write_text(flags + ALIKE)
        to = ["--to", stack, "--world-size", "8", "-o", tmp_path / project / name]
        said(capsys, "convert", tmp_path / project / "x.args", *to)
    back = ["--to", "megatron", "--world-size", "8", "--json", "-o"]
    file = tmp_path / "one" / name
    text = file.read_text()
    assert before in text
    file.write_text(text.replace(before, after))
    said(capsys, "convert", file, *back, tmp_path / "edited.args")
    written = (tmp_path / "edited.args").read_text()
    assert "--clip-grad 0.7" in written and "--hidden-size 768" in written

    place = file.with_name(f"{name}.carry.json")
    place.write_text((tmp_path / "other" / place.name).read_text())
    file.write_text(text)
    code, told = said(capsys, "convert", file, *back, tmp_path / "foreign.args")
    found = findings(told)[0]
    # Without its sidecar a recipe lacks what Megatron needs to start.
    assert code == (1 if stack == "automodel" else 2)
    assert (found["path"], found["effect"]) == (place.name, "different numbers")
    assert "not used" in found["message"] and "settings have other numbers" in found["message"]
    assert "1024" not in (tmp_path / "foreign.args").read_text().replace(
        "--seq-length 1024", ""
    ).replace("--max-position-embeddings 1024", "")


def test_no_sidecar_of_an_earlier_conversion_is_left_beside_a_new_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, place = carried(tmp_path, capsys)
    source = tmp_path / "other.args"
    source.write_text("--micro-batch-size 1 --global-batch-size 8 --lr 1e-3")
    again = ("convert", source, "--to", "deepspeed", "--no-carry", "-o", target)
    code, text = said(capsys, *again)
    assert code == 1 and f"{place}: belongs to an earlier conversion" in text
    said(capsys, *again, "--force")
    assert target.exists() and not place.exists()


def test_a_digest_that_does_not_fit_is_said_first_and_strict_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, place = carried(tmp_path, capsys)
    assert (
        "the digest in the sidecar"
        not in said(capsys, "convert", target, "--to", "megatron", "--json")[1]
    )
    target.write_text(target.read_text() + "\n")
    _, text = said(capsys, "convert", target, "--to", "megatron", "--json")
    found = findings(text)
    assert found[0]["path"] == place.name and "digest" in found[0]["message"]
    code, text = said(
        capsys, "convert", target, "--to", "megatron", "--strict", "-o", tmp_path / "b.args"
    )
    assert code == 1 and "digest" in text and not (tmp_path / "b.args").exists()
