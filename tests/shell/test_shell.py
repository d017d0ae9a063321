"""Scripts against bash: what the reader says that a run is given is what bash gives it, or the reader refuses with the line."""

from __future__ import annotations

import json
import os
import select
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from bridge.errors import BridgeError
from bridge.shell import Launch, Script
from bridge.stack.registry import load
from bridge.testing.bash import BASH, Bash, outcome
from bridge.testing.scripts import scripts
from tests.common.amounts import MORE

SAMPLE = Path(__file__).parent / "scripts" / "constructs.jsonl"
COUNT = 150 * MORE
"""Generated scripts; the figures of benchmarks/README.md took 20,000."""
FAMILIES = Path(__file__).parent / "scripts" / "families.txt"
"""Scripts with a construct or two each, parted by lines of %%."""
MOST_REFUSED = 0.25
"""Share of them that the reader may refuse: many ask what only a run would tell."""
REFUSED = 0.04
PATIENCE = 60
"""Seconds in which a program has to be gone."""
SAME = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 8 --seq-length 64 --max-position-embeddings 64"
    " --micro-batch-size 1 --global-batch-size 16 --lr 1e-4 --train-iters 10"
)
"""Words that every run of `shell_cases.jsonl` is given before its own."""
needs_bash = pytest.mark.skipif(BASH is None, reason="bash is not here")


@pytest.fixture
def bash(tmp_path: Path) -> Bash:
    return Bash(tmp_path)


def cases(shared: Path | None) -> list[dict[str, str | list[str]]]:
    source = SAMPLE if shared is None else shared / "truth" / "shell_cases.jsonl"
    return [json.loads(line) for line in source.read_text("utf-8").splitlines()]


def only(script: Script) -> Launch | None:
    """The one run of a script; None where the reader refuses."""
    try:
        launches = script.launches
    except BridgeError as error:
        assert "line " in str(error)
        return None
    assert len(launches) == 1
    return None if launches[0].opaque else launches[0]


def test_each_construct_is_read_as_bash_runs_it(shared: Path | None) -> None:
    refused, rows = [], cases(shared)
    for row in rows:
        launch = only(Script(str(row["script"]), "launch.sh"))
        if launch is None:
            refused.append(row["construct"])
        else:
            before = [] if shared is None else SAME.split()
            assert launch.texts == [*before, *row["bash_passes"]], row["construct"]
    assert len(refused) <= REFUSED * len(rows), refused


@needs_bash
def test_the_sample_is_what_bash_does(bash: Bash) -> None:
    for row in cases(None):
        assert bash.runs(str(row["script"])) == [["a.py", *row["bash_passes"]]], row["construct"]


@needs_bash
def test_what_a_script_leaves_running_is_ended(bash: Bash, tmp_path: Path) -> None:
    held = tmp_path / "held"
    os.mkfifo(held)
    reading = os.open(held, os.O_RDONLY | os.O_NONBLOCK)
    assert bash.runs("exec > ../held 2>&1\nwhile true; do :; done &\n") == []
    assert select.select([reading], [], [], PATIENCE)[0], "something still holds what it writes to"
    os.close(reading)


@pytest.mark.once
@needs_bash
def test_families_of_constructs_are_read_as_bash_runs_them(bash: Bash) -> None:
    # Every other one in the suite, all of them by hand.
    scripts_ = FAMILIES.read_text("utf-8").split("\n%%\n")[:: 2 if MORE == 1 else 1]
    found = [(outcome(bash, f"{text}\n"), text) for text in scripts_]
    assert not [text for (kind, _), text in found if kind == "different"]
    refused = [(why, text) for (kind, why), text in found if kind == "refused"]
    assert all("line " in why for why, _ in refused)
    assert len(refused) <= MOST_REFUSED * len(found)


@pytest.mark.once
@needs_bash
@settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=COUNT,
    suppress_health_check=list(HealthCheck),
)
@given(drawn=scripts())
def test_generated_scripts_are_read_as_bash_runs_them(
    drawn: tuple[str, tuple[str, ...]], bash: Bash
) -> None:
    text, _ = drawn
    kind, why = outcome(bash, text)
    assert kind != "different", why
    assert kind == "equal" or "line " in why or kind == "stopped"


@pytest.mark.parametrize(
    ("text", "said_"),
    [
        ("while true; do :; done\n", "more than 10,000 steps"),
        ("for ((;;)); do A=1; done\n", "more than 10,000 steps"),
        ("A=xxxxxxxxxxxxxxxx\nwhile true; do A=$A$A; done\n", "A grows beyond"),
        (
            "set -u\nA=$((B + 1))\n",
            "line 2: $((B + 1)): a shell stops here: B is not set, and set -u is on; set --env B=...",
        ),
        ("x=ab; B=${x@Z}\n", "line 1: ${x@Z}: a shell stops here: bad substitution"),
    ],
)
def test_what_does_not_end_or_stops_a_shell_is_named(text: str, said_: str) -> None:
    with pytest.raises(BridgeError) as caught:
        _ = Script(text, "launch.sh").launches
    assert said_ in str(caught.value)


@needs_bash
@pytest.mark.parametrize(
    "text",
    [
        "x=5\nx=$((1/0)); torchrun a.py same\ntorchrun b.py $x",
        "x=7; x=$((08)); torchrun a.py same\ntorchrun b.py $x",
        "A=126_953_125; B=1; B=$((A / 5)); torchrun a.py\ntorchrun b.py $B",
        "if true; then\n x=$((1/0))\n torchrun a.py in\nfi; torchrun a.py same\ntorchrun b.py next",
        "f() {\n x=$((1/0))\n torchrun a.py in\n}\nf; torchrun a.py same\ntorchrun b.py next",
        "for i in 1 2; do\n y=$((1/0))\n torchrun a.py in\ndone\ntorchrun b.py next",
        "set -e\nx=$((1/0))\ntorchrun b.py next",
        "set -e\nreadonly R=1\nR=2\ntorchrun b.py next",
        "( x=$((1/0)); torchrun a.py in )\ntorchrun b.py next",
        "a[1/0]=3; torchrun a.py same\ntorchrun b.py next",
        "eval 'x=$((1/0)); torchrun a.py same\ntorchrun b.py in'\ntorchrun c.py next",
        "case $((1/0)) in *) torchrun a.py;; esac\ntorchrun b.py next",
        "B=${#x:-2}; torchrun a.py same\ntorchrun b.py next",
        "{ x=$((1/0)); echo b; } > f; torchrun a.py\ntorchrun b.py $(cat f) next",
    ],
)
def test_an_error_in_an_expression_loses_its_line_alone(text: str, bash: Bash) -> None:
    assert outcome(bash, f"{text}\n")[0] == "equal"


@pytest.mark.parametrize(
    "text",
    [
        r'echo -e "\033[32mhi\033[0m"',
        r'echo -e "\x1b[1mhi" | tee -a log.txt',
        r"X=$(echo -e '\u2713')",
        'printf -v "$NAME" x',
        'read -r "$VAR" < f',
        'mapfile -t "$ARR" < f',
        'unset "$V"',
        'export "$N"',
        "export $(grep -v '#' .env | xargs)",
        'while IFS== read -r a b; do export "$a"="$b"; done < .env',
        "declare -n ref=$V; ref=1",
        ': "${A[0]:=3}"',
        "select x in a b; do echo $x; break; done",
        "for i in {1..20000}; do :; done",
        "for i in $(seq 1 99999999); do :; done",
        'while getopts "$OPTS" o; do case $o in a) ;; esac; done',
        "shopt -s nosuch; set -o nosuch",
        "shopt -s expand_aliases; alias ll='ls -l'",
        "break $N; shift $N",
        "trap 'echo $LINENO' DEBUG",
        "x=$(( GPUS / WORLD_SIZE ))",
    ],
)
def test_what_cannot_reach_a_run_is_no_reason_to_refuse_it(text: str) -> None:
    (launch,) = Script(f"{text}\ntorchrun --nproc_per_node 2 a.py --n 1\n").launches
    assert (launch.texts, launch.opaque, launch.ranks) == (["--n", "1"], {}, 2)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            'N=4; export "$V"=1',
            "line 1, which sets a variable of unknown name ($V=1), may change the variable; set --env N=...",
        ),
        ('N=4; declare "${V}_HOME=1"', None),
        (
            "N=$(( 8 / WORLD_SIZE ))",
            "WORLD_SIZE not set: division by zero; set --env WORLD_SIZE=...",
        ),
        ("N=$(( 8 / $WORLD_SIZE ))", "set --env WORLD_SIZE=..."),
        ("N=$(( $B / 2 ))\nC=$(( / 2 ))", "B not set: "),
        (
            "shopt -s expand_aliases; alias torchrun='torchrun -x'",
            "changes the meaning of torchrun",
        ),
        ("select N in 1 2; do break; done", "the value depends on a branch (line 1)"),
    ],
)
def test_what_reaches_a_run_says_how_to_settle_it(text: str, said: str | None) -> None:
    try:
        (launch,) = Script(f"{text}\ntorchrun a.py $N\n").launches
    except BridgeError as error:
        assert said is not None and said in str(error)
        return
    assert said in launch.opaque[0] if said is not None else launch.texts == ["4"]


@pytest.mark.parametrize(
    "text",
    [
        *(
            f"N=$(({form}))"
            for form in (
                "BS*8+8",
                "BS*0",
                "2**BS",
                "BS ? 2 : 1",
                "!BS",
                "-BS",
                "BS && 1",
                "~$BS",
                "(BS)",
            )
        ),
        *(
            f"N=$(({form}))"
            for form in (
                "BS > 1",
                "7 % (BS+3)",
                "1 << BS",
                "${BS} + 1",
                "${X:-2}*BS",
                "8/BS",
                "BS++",
                "A=BS+4",
            )
        ),
        *(f"N=$(({form}))" for form in ("0 || BS", "10#$BS")),
        "N=$[BS*2]",
        "let N=BS*4",
        'let "N = $BS * 4"',
        "let N=8/BS",
        "(( N = BS * 4 ))",
        "N=3; (( N += BS ))",
        "let N=$BS*4",
        "(( A = BS, N = A + 1 ))",
        "((N=8/BS))",
        "declare -i N=BS*4",
        "declare -i N=$BS+4",
        "declare -i N=4; N+=BS",
        "f() { local -i n=BS+1; N=$n; }; f",
        "a=(1 2); N=${a[BS]}",
        "a=(1 2); N=${a[$BS + 1]}",
        "a=(1 2); N=$((a[BS]))",
        "a=(1 2); a[BS]=7; N=${a[0]}",
        "a[k=BS]=7; N=$k",
        "a=([BS]=7); N=${a[0]}",
        "x=abc; N=${x:BS:2}",
        "x=abc; N=${x:1:BS}",
        "a=(1 2 3); N=${a[*]:BS:2}",
        "A=$((BS*2)); B=$((A+1)); C=${B#0}; N=$((C * 8))",
        "A=$BS; N=$((A + 1))",
        "N=$(echo $((BS*2)))",
        "N=$(expr $((BS*2)) + 1)",
        "for ((N=BS; N<1; N++)); do break; done",
        "export N=$((BS))",
        "N=${M:-$((BS))}",
        "N=${M:=$((BS))}",
    ],
)
def test_a_number_made_from_an_unset_variable_is_not_known(text: str) -> None:
    script = Script(f"{text}\ntorchrun a.py --n $N --m 3\n", "launch.sh")
    (launch,) = script.launches
    assert list(launch.opaque) == [1] and "--env BS=" in launch.opaque[1]
    (told,) = script.start_with({"BS": "2"}, None).launches
    assert not told.opaque


@pytest.mark.parametrize(
    "text",
    [
        "BS=; N=$((BS+4))",
        "unset BS; N=$((BS+4))",
        "f() { local -i BS; N=$((BS+4)); }; f",
        "(( A = BS, N = 4 ))",
        "N=$((1 ? 4 : BS))",
        "N=$((1 || BS)); N=$((N+3))",
        "N=4; x=$((BS*2)); [[ $x -gt 3 ]] && N=5",
        "N=4; if (( BS > 1 )); then N=5; fi",
        "N=4; A=$((BS/0)); while ((BS < 0)); do N=5; done",
        "N=4; a[BS]=3; let M=BS",
        "N=$(echo -e '\\064')",
        "N=$(echo -e '\\x34')",
    ],
)
def test_a_number_that_needs_no_unset_variable_is_known(text: str) -> None:
    (launch,) = Script(f"{text}\ntorchrun a.py --n $N\n", "launch.sh").launches
    assert launch.texts == ["--n", "4"] and not launch.opaque


@pytest.mark.parametrize(
    "name", ["HOSTNAME", "PWD", "UID", "RANDOM", "HOME", "SECONDS", "1", "19", "NEVER_SET"]
)
def test_what_is_set_outside_is_not_known(name: str) -> None:
    script = Script(f'torchrun a.py --x "${{{name}}}"\n', "launch.sh")
    assert list(script.launches[0].opaque) == [1]
    assert script.start_with({name: "7"}, None).launches[0].texts == ["--x", "7"] or name in (
        "RANDOM",
        "SECONDS",
    )


@pytest.mark.parametrize("name", ["HOSTNAME", "PWD", "UID"])
def test_what_is_set_outside_is_not_empty(name: str) -> None:
    script = Script(f'X=4\n[ -z "${name}" ] && X=2\ntorchrun a.py $X\n', "launch.sh")
    assert 0 in script.launches[0].opaque


def test_a_variable_that_a_branch_sets_is_named_with_its_line() -> None:
    script = Script('if false; then\n  X=2\nfi\ntorchrun a.py "$X"\n', "launch.sh")
    assert (
        "the script sets X only on line 2, which is not reached before this line"
        in script.launches[0].opaque[0]
    )


def test_a_branch_says_what_settles_it() -> None:
    script = Script('SP=$3\nif [ $SP = true ]; then\n  X=2\nfi\ntorchrun a.py "$X"\n', "launch.sh")
    assert "set --env 3=..." in script.launches[0].opaque[0]
    told = script.start_with({"3": "true"}, None)
    assert told.launches[0].texts == ["2"]


def test_a_script_says_where_it_ends() -> None:
    text = "M=${MODE:-x}\nif [ $M = x ]; then\n  exit 1\nfi\nif [ $M = y ]; then\n  exit 1\nfi\ntorchrun a.py\n"
    assert Script(text, "launch.sh").messages_on_missed == [
        "launch.sh: line 8: a shell does not reach this line: line 3 ends the script (line 2: if [ $M = x ]; "
        "then); set --env MODE=..."
    ]


@pytest.mark.parametrize(
    ("template", "said_"), [(True, ""), (False, "t.json: no such file in the script's folder")]
)
def test_a_template_is_filled_in(tmp_path: Path, template: bool, said_: str) -> None:
    if template:
        (tmp_path / "t.json").write_text('{"a": AAA, "b": BBB}\n', "utf-8")
    text = (
        'T=t.json\nsed "s/AAA/3/" ${T} | sed "s/BBB/4/g" > c.json\ntorchrun a.py "$(cat c.json)"\n'
    )
    launch = Script(text, str(tmp_path / "launch.sh")).launches[0]
    assert launch.texts == ['{"a": 3, "b": 4}'] if template else said_ in launch.opaque[0]


@pytest.mark.parametrize(
    "text",
    [
        "-e 's/a/b/w out'",
        "'y/a/b/'",
        "'s/\\(a*\\)*/\\1/'",
        "'s/a\\>/x/'",
        "'/a/,/b/d'",
        "--debug s/a/b/",
    ],
)
def test_what_sed_does_otherwise_is_not_known(text: str) -> None:
    launch = Script(f'torchrun a.py "$(echo a | sed {text})"\n', "launch.sh").launches[0]
    assert 0 in launch.opaque


def test_arguments_come_from_outside() -> None:
    script = Script('f() { torchrun a.py "$@" "$#"; }\nf "$@" x\n', "launch.sh")
    assert script.launches[0].texts == ["x", "1"]
    assert script.start_with({"1": "--bf16", "2": "a b"}, None).launches[0].texts == [
        "--bf16",
        "a b",
        "x",
        "3",
    ]


PLACES = (
    ". ./models/size.sh",
    "source $(dirname $0)/models/size.sh",
    'HERE="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"; source "${HERE}/models/size.sh"',
    'S=$(readlink -f "$0"); . "$(dirname "$S")"/models/size.sh',
    'cd "$(dirname "$0")"; . ./models/size.sh',
    "cd models; . ./size.sh",
    "pushd models >/dev/null; . ./size.sh; popd >/dev/null",
    "(cd models); . models/size.sh",
    ". ${PWD}/models/size.sh",
    "D=`dirname $0`; D=`cd $D; pwd`; cd models; . $D/models/size.sh",
    '. "$(cd "$(dirname "$0")" && pwd -P)/models/size.sh"',
    '. "$(dirname "$(realpath "$0")")/models/../models/size.sh"',
    '. "$(dirname "$0")/models/beside.sh"',
    "[ -f models/size.sh ] && . models/size.sh",
    'D=$(dirname "$0"); if [[ -s $D/models/size.sh ]]; then source "$D/models/size.sh"; else exit 1; fi',
)
"""How scripts name a file beside them."""
UNSURE = (
    'cd models; . "$(dirname "$0")/models/size.sh"',
    'f() { . "$(dirname "${BASH_SOURCE[0]}")/models/size.sh"; }; f',
    '. "$(dirname "$(dirname "$0")")/models/size.sh"',
    "cd nowhere; . models/size.sh",
    '. "$HOME/models/size.sh"',
    "[ -f models/none.sh ] && . models/none.sh",
    "cd nowhere; [ -f models/size.sh ] && . models/size.sh",
)
"""Where it hangs on how the script is started, or on the machine."""


@pytest.fixture
def beside(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "size.sh").write_text("SIZE=(--num-layers 4)\n", encoding="utf-8")
    (tmp_path / "models" / "beside.sh").write_text(
        '. "$(dirname "${BASH_SOURCE[0]}")/size.sh"\n', encoding="utf-8"
    )
    return tmp_path / "launch.sh"


def _read(place: Path, first: str) -> Script:
    text = f'SIZE=(--num-layers 2)\n{first}\ntorchrun train.py "${{SIZE[@]}}"\n'
    place.write_text(text, encoding="utf-8")
    return Script(text, str(place))


@pytest.mark.parametrize("first", PLACES)
def test_a_file_beside_the_script_is_read(beside: Path, first: str) -> None:
    found = only(_read(beside, first))
    assert found is not None and found.texts[-2:] == ["--num-layers", "4"]


@pytest.mark.parametrize("first", UNSURE)
def test_a_file_of_another_place_leaves_its_variables_unknown(beside: Path, first: str) -> None:
    (launch,) = _read(beside, first).launches
    assert launch.opaque and not {"2", "4"} & set(launch.texts)


def test_placeholders_of_a_sourced_file_are_all_named_with_its_name_and_lines(
    tmp_path: Path,
) -> None:
    (tmp_path / "cfg.sh").write_text(
        "# a\nexport P=<your partition, please>\nN=2\nQ=<your account>\n"
    )
    (tmp_path / "main.sh").write_text(
        "#!/bin/bash\nX=1\n. `pwd`/cfg.sh\ntorchrun a.py --num-layers $X\n"
    )
    with pytest.raises(BridgeError) as caught:
        load("megatron").read(tmp_path / "main.sh")
    said = [problem.partition(" is a placeholder")[0] for problem in caught.value.problems]
    assert said == ["cfg.sh: line 2: <your partition, please>", "cfg.sh: line 4: <your account>"]
