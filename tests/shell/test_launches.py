"""Launches are seen with their words and ranks, whatever stands around them; what is none is not taken for one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bridge.errors import BridgeError, SourceError
from bridge.files import Script, load
from bridge.files.named import reaching
from bridge.shell import text_if_known
from bridge.shell.word_pieces import Unknown
from bridge.stack.findings import find_assumptions

SEEN: tuple[tuple[str, str, int | None], ...] = (
    ("./pretrain_gpt.py {}", "./pretrain_gpt.py", None),
    ("uv run torchrun --nproc_per_node=8 a.py {}", "a.py", 8),
    ("uv run --extra x --with y a.py {}", "a.py", None),
    ("poetry run python a.py {}", "a.py", None),
    ("conda run -n env --no-capture-output python a.py {}", "a.py", None),
    ("pixi run -e x torchrun --nproc-per-node=4 a.py {}", "a.py", 4),
    ("docker run --rm -it --gpus all -v /a:/b.py img python -u a.py {}", "a.py", None),
    ("python submit.py --gpus 8 -- torchrun --nproc_per_node 2 a.py {}", "a.py", 2),
    ("docker run --rm img bash -lc 'torchrun --nproc_per_node 2 a.py {}'", "a.py", 2),
    ("singularity exec --nv -B /a img.sif python a.py {}", "a.py", None),
    ("ft_launcher --nproc_per_node 8 --nnodes 2 a.py {}", "a.py", 16),
    ("stdbuf -o L python a.py {}", "a.py", None),
    ("aprun -n 16 -N 4 python a.py {}", "a.py", 16),
    ("nohup python a.py {} > log &", "a.py", None),
    ("exec python a.py {}", "a.py", None),
    ("time -p python a.py {}", "a.py", None),
    ("command torchrun a.py {}", "a.py", 1),
    (
        "timeout --foreground 10 python -m torch.distributed.launch --nproc_per_node 4 a.py {}",
        "a.py",
        4,
    ),
    (
        "ray job submit --address=x --runtime-env-json='{{}}' -- python3 train.py {}",
        "train.py",
        None,
    ),
    ("mpirun -np 16 -x A=1 --bind-to none -H a:8,b:8 python a.py {}", "a.py", 16),
    ("mpirun -npernode 8 python a.py {}", "a.py", None),
    ("srun -N2 --ntasks-per-node=8 python -u -m pkg.train {}", "pkg.train", 16),
    ("srun -l --mpi pmix --new-option word python a.py {}", "a.py", None),
    ("deepspeed --num_gpus 8 --module m.x {}", "m.x", 8),
    ("deepspeed --include localhost:0,1,2@h:1 a.py {}", "a.py", 4),
    ("deepspeed --hostfile h --num_gpus 8 a.py {}", "a.py", None),
    ("accelerate launch --num_processes 4 --main_process_port 2 -m a.train {}", "a.train", 4),
    ("torchrun $ARGS --nproc_per_node 8 $SCRIPT {}", "$SCRIPT", None),
    ('torchrun --nproc_per_node 8 "$SCRIPT" {}', "$SCRIPT", 8),
    ("some_wrapper --x y torchrun --nproc_per_node 2 a.py {}", "a.py", 2),
    ("some_wrapper pretrain_gpt.py {}", "pretrain_gpt.py", None),
    ("$PREFIX python a.py {}", "a.py", None),
    ("nsys profile -o x --trace=cuda python a.py {}", "a.py", None),
    ("numactl -N 0 torchrun --nproc_per_node 2 a.py {}", "a.py", 2),
    ("bash -c 'torchrun --nproc_per_node 2 a.py {}'", "a.py", 2),
    ("sh -ec 'cd x && python a.py \"$@\"' name {}", "a.py", None),
    ("srun bash -c 'python a.py {}'", "a.py", None),
    ("ssh -p 22 host 'cd /x; torchrun --nproc_per_node 2 a.py {}'", "a.py", 2),
    ('pdsh -w a,b "cd /x; python a.py {}"', "a.py", None),
    ("eval python a.py {}", "a.py", None),
    ("C='torchrun a.py {}'; eval $C", "a.py", 1),
    ('run() {{ torchrun a.py "$@"; }}\nrun {}', "a.py", 1),
    ("sbatch --wrap='torchrun --nproc_per_node 2 a.py {}'", "a.py", 2),
    ("sbatch <<EOF\n#!/bin/bash\ntorchrun --nproc_per_node 2 a.py {}\nEOF", "a.py", 2),
    ("srun bash <<'EOF'\ntorchrun --nproc_per_node 2 a.py {}\nEOF", "a.py", 2),
    ("bash <<EOF\npython a.py {}\nEOF", "a.py", None),
    ("ssh host bash <<EOF\npython a.py {}\nEOF", "a.py", None),
    ("cat > run.sh <<EOF\npython a.py {}\nEOF\nbash run.sh", "a.py", None),
    ("cat > run.sh <<EOF\npython a.py {}\nEOF\nsbatch -N 2 run.sh", "a.py", None),
    ("#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=4\nsrun python a.py {}", "a.py", 8),
    ("#SBATCH --nodes=2\nsrun torchrun --nproc_per_node 4 --nnodes 2 a.py {}", "a.py", 8),
    (
        '#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=8\nsrun --container-mounts="$PWD:/w" python a.py {}',
        "a.py",
        16,
    ),
    ("srun --ntasks=4 --container-image=$IMAGE --foo $BAR python a.py {}", "a.py", 4),
    ("srun $ARGS --ntasks=4 python a.py {}", "a.py", 4),
    ("srun --ntasks=4 $ARGS python a.py {}", "a.py", None),
    ("srun --ntasks=$N python a.py {}", "a.py", None),
    (
        "torchrun --nproc_per_node 4 --nnodes 2 --rdzv_id=$JOB --master_port $PORT a.py {}",
        "a.py",
        8,
    ),
    ("torchrun $ARGS --nproc_per_node 4 --nnodes 2 a.py {}", "a.py", 8),
    ("torchrun $ARGS --nproc_per_node 4 a.py {}", "a.py", None),
)
"""Commands, the program that they start, and the ranks that they say."""
FLAGS = "--num-layers 2"

NONE = (
    "echo torchrun a.py --num-layers 2",
    "pkill -9 python",
    "ps aux | grep train.py",
    "cat a.py b.py",
    "pip install -r a.py",
    "git add train.py --all",
    "which python",
    "python -c 'print(1)'",
    "python - <<EOF\nimport torch\nEOF",
    "docker ps python a.py",
    "ray start --head a.py",
    "cat <<EOF\npython a.py --num-layers 2\nEOF",
)
"""Commands that name a launcher or a script, and start none."""


@pytest.mark.parametrize(("command", "program", "ranks"), SEEN)
def test_a_launch_is_seen_whatever_stands_around_it(
    command: str, program: str, ranks: int | None
) -> None:
    (launch,) = Script(command.format(FLAGS), "launch.sh").launches
    assert (launch.program, launch.texts, launch.ranks) == (program, FLAGS.split(), ranks)


@pytest.mark.parametrize(
    ("command", "names"),
    [
        ("torchrun --nproc_per_node $((NG/2)) a.py", ["NG"]),
        ("torchrun --nproc_per_node=$NG --nnodes $((NN)) a.py", ["NG", "NN"]),
        ("torchrun $ARGS --nnodes 2 a.py", ["ARGS"]),
        ("srun --ntasks=$((N*G)) python a.py", ["N", "G"]),
        ("accelerate launch --num_processes $((N * 8)) a.py", ["N"]),
        ("deepspeed --num_nodes 2 --num_gpus $G a.py", ["G"]),
        ("mpirun -np $NP python a.py", ["NP"]),
        ("torchrun --nproc_per_node 2 --rdzv_id $J a.py", []),
        ("torchrun --nproc_per_node gpu a.py", []),
        ('if [ "$SP" = 1 ]; then A=--x; fi; python a.py', ["SP"]),
        ("case ${SIZE} in 7b) A=1 ;; *) A=2 ;; esac; python a.py $A", ["SIZE"]),
        ('[ "$MODE" = big ] || A=--x; python a.py $A', ["MODE"]),
        ("[[ ${MODE,,} == big ]] && A=--x; python a.py", ["MODE"]),
        ('while [ -n "$MODE" ]; do A=1; done; python a.py', ["MODE"]),
        ("if (( NN > 1 )); then A=--x; fi; python a.py", ["NN"]),
        ("if [ $((NN)) -gt 1 ]; then A=--x; fi; python a.py", ["NN"]),
        ('if [ "$(echo $MODE)" = big ]; then A=--x; fi; python a.py', ["MODE"]),
        ("for ((i = 0; i < M; i++)); do A=$i; done; python a.py", ["M"]),
        ("((COUNT++)); ((OTHER = 2)); python a.py --n $OTHER", []),
        ('SP=; if [ "$SP" = "${OTHER:-1}" ]; then A=--x; fi; python a.py', []),
        ('unset SP; if [ -n "$SP" ] && [ -d "$HOME" ]; then A=--x; fi; python a.py', []),
    ],
)
def test_what_hides_the_number_of_ranks_or_decides_a_branch_is_named(
    command: str, names: list[str]
) -> None:
    script = Script(f"{command}\n", "launch.sh")
    messages = [found.message for found in find_assumptions(script, script.launches[0])]
    assert re.findall(r"--env (\w+)=", "".join(messages)) == names and len(messages) == bool(names)


@pytest.mark.parametrize("command", NONE)
def test_words_that_name_a_launcher_are_no_launch(command: str) -> None:
    assert not Script(command, "launch.sh").launches


@pytest.mark.parametrize(
    ("text", "words", "unknown"),
    [
        (
            "N=2\nbash -c 'python a.py --num-layers $N'",
            ["--num-layers", "$N"],
            "does not export the variable",
        ),
        ("export N=2\nbash -c 'python a.py --num-layers $N'", ["--num-layers", "2"], ""),
        ("N=2 bash -c 'python a.py --num-layers $N'", ["--num-layers", "2"], ""),
        ('N=2\nbash -c "python a.py --num-layers $N"', ["--num-layers", "2"], ""),
        (
            "export N=2\nssh host 'python a.py --num-layers $N'",
            ["--num-layers", "$N"],
            "does not export the variable",
        ),
        ("bash -c 'N=4'\npython a.py --num-layers ${N:-2}", ["--num-layers", "2"], ""),
        ("python a.py --num-layers 2\nexec python b.py\npython c.py", ["--num-layers", "2"], ""),
        (
            "cat words | xargs torchrun a.py --num-layers 2",
            ["--num-layers", "2", "xargs"],
            "input of xargs",
        ),
    ],
)
def test_an_inner_shell_sees_what_bash_hands_on(text: str, words: list[str], unknown: str) -> None:
    first, *rest = Script(text, "launch.sh").launches
    assert first.texts == words and [launch.program for launch in rest] == ["b.py"] * (
        "exec" in text
    )
    assert unknown in "".join(first.opaque.values()) and bool(unknown) is bool(first.opaque)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "exit 0\ntorchrun a.py --n 2",
            "line 2: a shell does not reach this line: line 1 ends the script",
        ),
        ("if [ -z $A ]; then\nexit 1\nfi\ntorchrun a.py", "if [ -z $A ]; then); set --env A=..."),
        (
            "f() {\ntorchrun a.py\n}",
            "line 2: this line is in the function f (line 1); no command that is read calls f",
        ),
        (
            "f() {\ntorchrun a.py\n}\ntrap f TERM",
            "line 2: this line is in the function f (line 1); line 4 names f, but no command that is read calls f",
        ),
        (
            "function f {\ntorchrun a.py\nf\n}",
            "line 2: this line is in the function f (line 1); no command that is read calls f",
        ),
        (
            "A=1\nif [ $A = 2 ]; then\n  torchrun a.py\nfi",
            "line 3: this line is in a branch that is not taken: line 2: if [ $A = 2 ]; then",
        ),
        (
            "bash train.sh 8",
            "line 1: this line starts another script, train.sh; pass that script instead",
        ),
    ],
)
def test_a_line_that_is_no_run_says_why(text: str, said: str) -> None:
    script = Script(f"{text}\n", "launch.sh")
    try:
        found = "\n".join(script.messages_on_missed)
    except BridgeError as error:
        found = str(error)
    assert said in found


def test_what_a_pipe_writes_is_not_taken_for_empty() -> None:
    script = Script(
        'cat t.json | sed "s/a/b/" > ds.json\ndeepspeed a.py --deepspeed_config ds.json\n',
        "launch.sh",
    )
    (launch,) = script.launches
    content = launch.file(launch.words[1])
    assert content is not None and text_if_known(content) is None


def test_an_array_that_a_missing_file_may_set_is_any_number_of_words() -> None:
    script = Script(
        'source gone.sh\ntorchrun a.py --colocate "${ARGS[@]}" --n 2 "${ARGS[*]}"\n', "launch.sh"
    )
    (launch,) = script.launches
    loose = [
        any(isinstance(piece, Unknown) and piece.loose for piece in word) for word in launch.words
    ]
    assert loose == [False, True, False, False, False]


@pytest.mark.parametrize(
    ("text", "unknown"),
    [
        (
            "A=1\nsource gone.sh\ntorchrun a.py $A",
            "the file that is sourced on line 2 may change the variable; set --env A=...",
        ),
        ("A=1\nsource gone.sh\nA=2\ntorchrun a.py $A", ""),
        ("A=1\nsource ~/.bashrc\ntorchrun a.py $A", ""),
        ("A=1\nsource $HOME/x_profile\ntorchrun a.py $A", "may change the variable"),
        ("A=1\n[ -f x.sh ] && . x.sh\ntorchrun a.py $A", "is not known"),
        ("echo A=1 > c.sh\nbash gen.sh\n. ./c.sh\ntorchrun a.py $A", "may set the variable"),
        ("echo A=1 > c.sh\npython gen.py\n. ./c.sh\ntorchrun a.py $A", "may set the variable"),
        ("bash gen.sh\necho A=1 > c.sh\n. ./c.sh\ntorchrun a.py $A", ""),
        ("echo A=1 > c.sh\nnvidia-smi\ntorchrun b.py --c c.sh\n. ./c.sh\ntorchrun a.py $A", ""),
        (
            "echo 1 > c\nenv X=1 python gen.py\ntorchrun a.py $(cat c)",
            "env X=1 (line 2) may write the file",
        ),
        ("echo 1 > c\npython -c 'import torch; print(2)'\ntorchrun a.py $(cat c)", ""),
        (
            "echo 1 > c\npython -c 'open(1)'\ntorchrun a.py $(cat c)",
            "python -c (line 2) may write the file",
        ),
        (
            "echo 1 > c\npython gen.py\ntorchrun a.py $(cat c)",
            "python gen.py (line 2) may write the file",
        ),
        ("echo 1 > c.x\nrm *.x\ntorchrun a.py $(cat c.x)", "rm may change the file (line 2)"),
        ("echo 1 > c.x\nrm -rf *.y out/*\nmkdir -p $X\ntorchrun a.py $(cat c.y)", "no such file"),
        (
            "echo 1 > c\nsed -i s/1/2/ $F\ntorchrun a.py $(cat c)",
            "sed -i (line 2) may write the file",
        ),
        ("cd /\ntorchrun a.py $(cat pyproject.toml)", "no such file"),
        (
            "O=$(getopt -a -l tp: -- $X)\nwhile :; do case $O in x) A=1 ;; *) break ;; esac; done\ntorchrun a.py $A",
            "is not known",
        ),
        (
            "f() {\n  if [ $1 = x ]; then\n    A=1\n  fi\n  torchrun a.py $A\n}\nf $(date)",
            "$1 is not known: the value is the output of a command",
        ),
        ("shift 2\ntorchrun a.py $1", "--env 3=..."),
        ("torchrun a.py $(set | grep A=)", "the value is the output of a command"),
    ],
)
def test_what_another_file_may_say_is_not_known(text: str, unknown: str) -> None:
    launch = Script(f"{text}\n", "launch.sh").launches[-1]
    said = "".join(launch.opaque.values())
    assert unknown in said and bool(unknown) is bool(said)
    assert "--env 1=" not in said


def test_what_the_user_says_holds_behind_a_missing_file() -> None:
    script = Script("A=1\nsource gone.sh\ntorchrun a.py $A\n", "launch.sh")
    assert script.start_with({"A": "4"}, None).launches[0].texts == ["4"]


@pytest.mark.parametrize(
    ("name", "taken"),
    [
        ("gone.sh", "to set variables, and to do nothing else"),
        ("~/.bashrc", "to set up tools"),
        ("/etc/profile", "to set up tools"),
    ],
)
def test_what_is_taken_of_a_file_that_is_not_read_is_a_finding(name: str, taken: str) -> None:
    script = Script(f"source {name}\npython pretrain_gpt.py --micro-batch-size 1\n", "launch.sh")
    (found,) = find_assumptions(script, script.launches[0])
    assert (
        taken in found.message
        and found.path == f"source {name}"
        and found.origin is not None
        and found.origin.line == 1
    )


def test_a_file_outside_of_the_folder_is_opened_where_that_is_allowed(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "common.sh").write_text("A=7\n", "utf-8")
    launch = str(tmp_path / "job" / "launch.sh")
    script = Script("source ../common.sh\ntorchrun a.py $A\n", launch)
    assert (
        list(script.launches[0].opaque) == [0]
        and "give --allow-path" in next(find_assumptions(script, script.launches[0])).message
    )
    with reaching(tmp_path / "job", [tmp_path]):
        assert Script("source ../common.sh\ntorchrun a.py $A\n", launch).launches[0].texts == ["7"]


def test_a_run_is_given_the_files_written_before_it() -> None:
    text = "".join(f"echo {number} > c.json\ntorchrun a.py c.json\n" for number in (1, 2))
    contents = [launch.file(launch.words[0]) for launch in Script(text, "launch.sh").launches]
    assert [text_if_known(content or ()) for content in contents] == ["1\n", "2\n"]


@pytest.mark.parametrize("text", ["A=1\r\ntorchrun a.py\r\n", "A=1\ntorchrun a.py \\\r\n  --x\n"])
def test_line_ends_of_windows_are_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "launch.sh"
    path.write_bytes(text.encode())
    with pytest.raises(SourceError, match=r"line [12]: ends in CR and LF"):
        _ = load(path).data.launches
